"""Time one training step (forward, loss, backward, Adam) of each layer against plain dense autograd and the floor.

    python scripts/bench_step.py [--shapes gpt2 smollm2] [--repeats 5] [--json FILE] [--check]

For every layer and shape one process runs all contestants in turn within every repeat, on the same data; medians over
repeats. `mxd train` also tells glibc to keep freed memory; since that would speed up every contestant, "as mxd train"
is measured after them, in turn with the same step with all products in float32 ("float32 candidates"). The floor is the
time of the dense products that such a step takes, each written to an existing buffer. Peak memory is that of a process
of its own that builds one contestant and takes two steps, less what it held before. With `pip install eai-sparsify`,
EleutherAI's sparsify is measured as well.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mxd.artifacts.provenance import versions
from mxd.config import TrainingConfig
from mxd.layers import LAYERS, MLPShape, ReplacementConfig, ReplacementLayer, size
from mxd.ops import CandidateDtype
from mxd.training.step import new_trainee, train_step
from mxd.training.trainer import keep_freed_memory

os.environ.setdefault("SPARSIFY_DISABLE_TRITON", "1")  # its kernels need a GPU

TOKENS = 4096
SHAPES = {
    "gpt2": MLPShape(768, 768, 3072, "gelu_tanh", False),
    "smollm2": MLPShape(576, 576, 1536, "silu", True),
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "MxD": ("mxd", {}),
    "TC": ("transcoder", {}),
    "STC": ("transcoder", {"skip": True}),
}
Step = Callable[[], object]


def ours(config: ReplacementConfig, candidates: Literal["auto"] | CandidateDtype, x: Tensor, y: Tensor) -> Step:
    """A step as `mxd train` takes it, but for freed memory."""
    training = TrainingConfig(
        tokens=TOKENS, batch_tokens=TOKENS, buffer_tokens=TOKENS, warmup_steps=0, candidates=candidates
    )
    trainee = new_trainee(config.label, 0, config, 0, torch.device("cpu"), training)
    return lambda: train_step(trainee, x, y, training, 0)


def dense(config: ReplacementConfig, x: Tensor, y: Tensor) -> Step:
    """The same step as reference code writes it: dense codes, dense products, default Adam, dense bookkeeping."""
    layer = config.build()
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-4, foreach=False, fused=False)
    last_active = torch.zeros(layer.num_units)

    def step() -> None:
        optimizer.zero_grad()
        pre = F.relu(layer.pre_activations(x))
        values, indices = pre.topk(config.sparsity.max_k or 0, dim=-1)
        code = torch.zeros_like(pre).scatter_(-1, indices, values)
        loss = ((dense_output(layer, x, code) - y).pow(2).mean(-1) / y.norm(dim=-1)).mean()
        loss.backward()
        optimizer.step()
        last_active[(code > 0).any(0)] = 0

    return step


def dense_output(layer: ReplacementLayer, x: Tensor, code: Tensor) -> Tensor:
    """The layer's output from a dense code."""
    if hasattr(layer, "expert_scale"):
        return (code @ layer.expert_scale) * (layer.encoder(x) @ layer.decoder) + layer.bias
    out = code @ layer.decoder + layer.bias
    return out if layer.skip is None else out + x @ layer.skip


def sparsify(config: ReplacementConfig, x: Tensor, y: Tensor) -> Step | None:
    """A step of EleutherAI's sparsify, where it is installed and has the method."""
    try:
        from sparsify import SparseCoder, SparseCoderConfig
    except ImportError:
        return None
    if not hasattr(config, "skip"):
        return None
    options = {"num_latents": config.num_units, "k": config.sparsity.max_k, "transcode": True}
    peer = SparseCoderConfig(**options, skip_connection=config.skip)
    coder = SparseCoder(x.shape[1], peer, device="cpu", dtype=torch.float32)
    optimizer = torch.optim.Adam(coder.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        coder(x, y).fvu.backward()
        optimizer.step()

    return step


CONTESTANTS: dict[str, Callable[[ReplacementConfig, Tensor, Tensor], Step | None]] = {
    "ours": lambda config, x, y: ours(config, "auto", x, y),
    "float32": lambda config, x, y: ours(config, "float32", x, y),
    "dense": dense,
    "sparsify": sparsify,
}
TITLES = {
    "train": "ours, as mxd train",
    "float32": "ours, as mxd train, float32 candidates",
    "ours": "ours, freed memory not kept",
    "dense": "dense autograd",
    "sparsify": "sparsify",
    "floor": "floor in float32",
}


def floor(config: ReplacementConfig, shape: MLPShape, x: Tensor) -> dict[str, tuple[int, Step]]:
    """The products of a step in float32, and how often each is needed.

    All units' pre-activations; of an MxD's dense encoder each of E, (E_glu,) and D forward and for its own gradient,
    and D once more for the gradient of the hidden state; of a skip its output and its gradient. Nothing needs the
    gradient of x.
    """
    units, hidden = config.num_units or 0, shape.hidden or 0
    gate, pre = torch.randn(units, shape.d_in), torch.empty(TOKENS, units)
    products: dict[str, tuple[int, Step]] = {"gate": (1, lambda: torch.mm(x, gate.T, out=pre))}
    if config.label == "MxD":
        weight, z = torch.randn(hidden, shape.d_in), torch.empty(TOKENS, hidden)
        products["encoder"] = (7 if shape.glu else 5, lambda: torch.mm(x, weight.T, out=z))
    if config.label == "STC":
        skip, out = torch.randn(shape.d_in, shape.d_out), torch.empty(TOKENS, shape.d_out)
        products["skip"] = (2, lambda: torch.mm(x, skip, out=out))
    return products


def bench(name: str, label: str, k: int, repeats: int) -> dict[str, Any]:
    """Time every contestant for one layer and shape, in turn in each repeat."""
    config, x, y = case(name, label, k)
    steps = {key: step for key, build in CONTESTANTS.items() if (step := build(config, x, y))}
    products = floor(config, SHAPES[name], x)
    floors = {f"floor {key}": step for key, (_, step) in products.items()}
    float32 = steps.pop("float32")
    plain = medians(steps | floors, repeats)
    keep_freed_memory()
    kept = medians({"train": steps["ours"], "float32": float32} | floors, repeats)
    seconds = {**kept, **{key: plain[key] for key in steps}}
    for title, times in (("floor", plain), ("floor of as mxd train", kept)):
        seconds[title] = sum(count * times[f"floor {key}"] for key, (count, _) in products.items())
    return {
        "shape": name,
        "layer": label,
        "k": k,
        "units": config.num_units,
        "params": config.num_params,
        "seconds": {key: value for key, value in seconds.items() if key not in floors},
    }


def medians(steps: dict[str, Step], repeats: int) -> dict[str, float]:
    """Median times of steps that take turns, after one round to warm up."""
    times: dict[str, list[float]] = {key: [] for key in steps}
    for repeat in range(repeats + 1):
        for key, step in steps.items():
            begin = time.perf_counter()
            step()
            if repeat:
                times[key].append(time.perf_counter() - begin)
    return {key: statistics.median(seconds) for key, seconds in times.items()}


def case(name: str, label: str, k: int) -> tuple[ReplacementConfig, Tensor, Tensor]:
    """The layer's config and the data."""
    method, fields = METHODS[label]
    shape = SHAPES[name]
    config = size(LAYERS[method](sparsity={"kind": "topk", "k": k}, **fields).resolve(shape), match="paper")
    torch.manual_seed(0)
    return config, torch.randn(TOKENS, shape.d_in), torch.randn(TOKENS, shape.d_out)


def apart(name: str, label: str, k: int, what: str, repeats: int = 0) -> Any:
    """Measure in a process of its own: times, or the peak memory of two steps of one contestant, its state included."""
    command = [sys.executable, "-W", "ignore", __file__, "--apart", name, label, str(k), what, str(repeats)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def peak_bytes(name: str, label: str, k: int, contestant: str) -> int:
    """Peak memory of two steps of a contestant, in this process."""
    if contestant == "train":
        keep_freed_memory()
    config, x, y = case(name, label, k)
    torch.mm(x, x.T)  # let the product's own buffers be there already
    before = peak_so_far()
    step = CONTESTANTS["ours" if contestant == "train" else contestant](config, x, y)
    assert step is not None
    step(), step()
    return peak_so_far() - before


def peak_so_far() -> int:
    """This process's largest resident memory; on Linux not from getrusage, which starts with the parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def missed(row: dict[str, Any]) -> list[str]:
    """Return the targets a row misses, each as one line."""
    seconds, peak = row["seconds"], row["peak_bytes"]
    mine, floor = seconds["train"], seconds["floor of as mxd train"]
    wanted = {"floor": (mine / floor, 1.0 if row["layer"] == "MxD" else 1.3)}
    if row["layer"] == "MxD":
        wanted["floor, with float32 candidates,"] = (seconds["float32"] / floor, 1.25)
        wanted["dense autograd"] = (mine / seconds["dense"], 1 / 4)
    elif "sparsify" in seconds:
        wanted["sparsify"] = (mine / seconds["sparsify"], 1 / 1.6)
        wanted["sparsify's peak memory"] = (peak["train"] / peak["sparsify"], 0.6)
    where = f"{row['shape']} {row['layer']}"
    lines = [f"{where}: {got:.2f} x {what}, at most {most:.2f}" for what, (got, most) in wanted.items() if got > most]
    if row["layer"] != "MxD" and "sparsify" not in seconds:
        lines.append(f"{where}: sparsify is not installed (pip install eai-sparsify), so it was not compared")
    return lines


def print_row(row: dict[str, Any]) -> None:
    """Print a row of the table for each contestant."""
    seconds, peak = row["seconds"], row["peak_bytes"]
    for key in (key for key in TITLES if key in seconds):
        own_floor = seconds["floor of as mxd train" if key in ("train", "float32") else "floor"]
        print(
            f"| {row['shape']} | {row['layer']}, N = {row['units']:,} | {TITLES[key]} | {seconds[key]:.3f} "
            f"| {seconds[key] / own_floor:.2f} | {seconds[key] / seconds['train']:.2f} "
            f"| {f'{peak[key] / 2**20:,.0f}' if key in peak else ''} |",
            flush=True,
        )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--layers", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 and name each target that is missed")
    parser.add_argument("--apart", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.apart:
        name, label, k, what, repeats = args.apart
        print(
            json.dumps(
                bench(name, label, int(k), int(repeats)) if int(repeats) else peak_bytes(name, label, int(k), what)
            )
        )
        return
    machine = {"threads": torch.get_num_threads(), "processor": platform.processor() or platform.machine()}
    print(f"{machine['processor']}, {machine['threads']} threads, torch {torch.__version__}, K = {args.k}, float32")
    print(
        "\n| shape | layer | step of | seconds | x floor | x as mxd train | peak MiB |\n|---|---|---|---|---|---|---|"
    )
    rows = []
    for name in args.shapes:
        for label in args.layers:
            row = apart(name, label, args.k, "", args.repeats)
            measured = [key for key in ("train", *CONTESTANTS) if key in row["seconds"]]
            rows.append(row | {"peak_bytes": {key: apart(name, label, args.k, key) for key in measured}})
            print_row(rows[-1])
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "versions": versions(), "rows": rows}, indent=2) + "\n")
    misses = [line for row in rows for line in missed(row)]
    if args.check:
        print("\n".join(misses) or "every target is met")
        sys.exit(1 if misses else 0)


if __name__ == "__main__":
    main()
