"""Time one training step (forward, loss, backward, Adam) of every layer against its floor, and its peers.

    python scripts/bench_step.py [--shapes gpt2 smollm2] [--layers MxD TC ...] [--repeats 5] [--json FILE] [--check]

For every layer and shape one process runs all contestants in turn within every repeat, on the same data; medians over
repeats. `mxd train` also tells glibc to keep freed memory; since that would speed up every contestant, "as mxd train"
is measured after them, in turn with the same step with its dense products in float32, and with all products in
float32, where those are other steps. There are two floors (``step_floor.py``): the time of the dense products that a
step takes in float32, each written to an existing buffer; and that with the bytes that no step avoids, which says more
where products are few.
Peak memory is that of a process of its own that builds one contestant and takes two steps, less what it held before.
Dense autograd is there for the layers of MxD's paper, and EleutherAI's sparsify, with `pip install eai-sparsify`, for
those that it has.
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
from goals import conclude
from step_floor import Floor, Step, step_cost
from torch import Tensor

from mxd.artifacts.provenance import versions
from mxd.config import TrainingConfig
from mxd.layers import Covariance, MLPShape, ReplacementConfig, ReplacementLayer, parse_layer, size
from mxd.ops import DenseDtype, candidate_dtype, dense_dtype
from mxd.training.step import new_trainee, train_step
from mxd.training.trainer import keep_freed_memory

os.environ.setdefault("SPARSIFY_DISABLE_TRITON", "1")  # its kernels need a GPU

Dtype = Literal["auto", "float32", "bfloat16"]

TOKENS = 4096
SHAPES = {
    "gpt2": MLPShape(768, 768, 3072, "gelu_tanh", False),
    "smollm2": MLPShape(576, 576, 1536, "silu", True),
}


def methods(k: int) -> dict[str, dict[str, Any]]:
    """Return label -> fields of every layer that is measured, with K where they have one that is not their own."""
    top = {"sparsity": {"kind": "topk", "k": k}}
    levels = {"levels": [None, 4], "sparsity": {"kind": "levels", "levels": [max(1, k // 4), 2]}}
    return {
        "MxD": {"method": "mxd"} | top,
        "MxD, expert biases": {"method": "mxd", "expert_bias": True} | top,
        "MxD, two levels": {"method": "mxd"} | levels,
        "MxD, entmax": {"method": "mxd", "sparsity": {"kind": "entmax"}},
        "TC": {"method": "transcoder"} | top,
        "STC": {"method": "transcoder", "skip": True} | top,
        "TC, BatchTopK": {"method": "transcoder", "sparsity": {"kind": "batch_topk", "k": k}},
        "TC, GroupMax": {"method": "transcoder", "sparsity": {"kind": "group_max", "k": k}},
        "TC, JumpReLU": {"method": "transcoder", "sparsity": {"kind": "jumprelu", "l0": k}},
        "TC, Matryoshka": {"method": "transcoder", "groups": [1 / 16, 1 / 16, 1 / 8, 1 / 4, 1 / 2]} | top,
        "SAE": {"method": "topk_sae"} | top,
        "CP-muMoE": {"method": "cp_mumoe"} | top,
        "TR-muMoE": {"method": "tr_mumoe"} | top,
        "TR-muMoE, tensor train": {"method": "tr_mumoe", "rank_1": 1} | top,
        "Tucker-muMoE": {"method": "tucker_mumoe"} | top,
        "muMoE block": {"method": "mumoe_block"} | top,
        "MoE": {"method": "moe"},
        "MoV": {"method": "mov"} | top,
        "SMoE": {"method": "smoe", "sparsity": {"kind": "topk_softmax", "k": k}},
        "Monet-HD": {"method": "monet"},
        "Monet-VD": {"method": "monet", "decompose": "vertical"},
        "PEER": {"method": "peer"},
        "MOLT": {"method": "molt"} | top,
        "MOLT, rank 1": {"method": "molt", "rank": 1} | top,
        "MOLT, rank 16, skip": {"method": "molt", "rank": 16, "halvings": 0, "skip": True} | top,
        "Linear": {"method": "linear"},
        "Low-rank": {"method": "low_rank"},
    }


METHODS = tuple(methods(1))
PAPER = ("MxD", "TC", "STC")
"""The layers of MxD's paper."""

GOALS = {("gpt2", "MxD"): 0.45, ("gpt2", "TC"): 0.33, ("gpt2", "STC"): 0.33}
"""What steps of a shape and layer may take, of the floor; others 1.3, MxD 1, Monet 2."""


def ours(config: ReplacementConfig, candidates: Dtype, dense: Dtype, x: Tensor, y: Tensor) -> Step:
    """A step as `mxd train` takes it, but for freed memory."""
    training = TrainingConfig(
        tokens=TOKENS,
        batch_tokens=TOKENS,
        buffer_tokens=TOKENS,
        warmup_steps=0,
        candidates=candidates,
        dense=dense,
    )
    trainee = new_trainee(config.label, 0, config, 0, torch.device("cpu"), training)
    d, o = x.shape[1], y.shape[1]
    read = d if config.reads == "mlp_in" else o
    numbers = torch.eye(read).double(), torch.zeros(read, o).double(), torch.eye(o).double()
    trainee.initialise((x.mean(0), y.mean(0)), None, training.settings, Covariance(*numbers))
    return lambda: train_step(trainee, x, y, training, 0)


def float32(config: ReplacementConfig, x: Tensor, y: Tensor) -> Step | None:
    """The same step with all products in float32, where that is another one."""
    rounded = step_cost(config, len(x), candidate_dtype(x.device), dense_dtype(x.device)).rounded
    return ours(config, "float32", "float32", x, y) if rounded else None


def dense_float32(config: ReplacementConfig, x: Tensor, y: Tensor) -> Step | None:
    """The same step with dense products in float32 and candidates as they are, where both differ."""
    dtypes: tuple[DenseDtype, DenseDtype] = ("float32", dense_dtype(x.device))
    found = [step_cost(config, len(x), candidate_dtype(x.device), dtype).rounded for dtype in dtypes]
    return ours(config, "auto", "float32", x, y) if 0 < found[0] < found[1] else None


def dense(config: ReplacementConfig, x: Tensor, y: Tensor) -> Step | None:
    """The step as reference code writes it: dense codes, dense products, default Adam, dense bookkeeping."""
    if config.sparsity.kind != "topk" or config.slug not in (
        f"{plain.lower()}-{config.sparsity.slug}" for plain in PAPER
    ):
        return None
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
    kinds = {"topk": "topk", "group_max": "groupmax"}
    if config.label not in ("TC", "STC") or config.sparsity.kind not in kinds or config.groups:
        return None
    options = {"num_latents": config.num_units, "k": config.sparsity.max_k, "transcode": True}
    options |= {"activation": kinds[config.sparsity.kind]}
    peer = SparseCoderConfig(**options, skip_connection=config.skip)
    coder = SparseCoder(x.shape[1], peer, device="cpu", dtype=torch.float32)
    optimizer = torch.optim.Adam(coder.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        coder(x, y).fvu.backward()
        optimizer.step()

    return step


CONTESTANTS: dict[str, Callable[[ReplacementConfig, Tensor, Tensor], Step | None]] = {
    "ours": lambda config, x, y: ours(config, "auto", "auto", x, y),
    "dense_float32": dense_float32,
    "float32": float32,
    "dense": dense,
    "sparsify": sparsify,
}
TITLES = {
    "train": "ours, as mxd train",
    "dense_float32": "ours, as mxd train, dense products in float32",
    "float32": "ours, as mxd train, all products in float32",
    "ours": "ours, freed memory not kept",
    "dense": "dense autograd",
    "sparsify": "sparsify",
}


def bench(name: str, label: str, k: int, repeats: int) -> dict[str, Any]:
    """Time every contestant for one layer and shape, in turn in each repeat."""
    config, x, y = case(name, label, k)
    steps = {key: step for key, build in CONTESTANTS.items() if (step := build(config, x, y))}
    floor = Floor.of(config, TOKENS)
    least = floor.steps()
    kept_steps = {key: steps.pop(key) for key in ("dense_float32", "float32") if key in steps}
    plain = medians(steps | least, repeats)
    keep_freed_memory()
    kept = medians({"train": steps["ours"]} | kept_steps | least, repeats)
    return {
        "shape": name,
        "layer": label,
        "k": k,
        "units": config.num_units,
        "params": config.num_params,
        "flops": floor.flops,
        "moved_bytes": floor.moved,
        "seconds": {key: seconds for key, seconds in (plain | kept).items() if key not in least},
        "floors": {"ours": floor.seconds(plain), "train": floor.seconds(kept)},
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
    shape = SHAPES[name]
    layer = parse_layer(methods(k)[label]).resolve(shape)
    config = size(layer, match="exact" if getattr(layer, "levels", ()) else "paper")
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
    seconds, peak, floors = row["seconds"], row["peak_bytes"], row["floors"]["train"]
    mine, label = seconds["train"], row["layer"]
    paper = label in PAPER
    few = not paper and floors["products"] < floors["floor"] / 2
    floor = floors["floor" if few else "products"]
    usual = 1.0 if label == "MxD" else 2.0 if label.startswith("Monet") else 1.3
    most = GOALS.get((row["shape"], label), usual)
    wanted = {f"floor{' with the bytes moved' if few else ''}": (mine / floor, most)}
    if label == "MxD" and "float32" in seconds:
        wanted["floor, with all products in float32,"] = (seconds["float32"] / floor, 1.25)
    if label == "MxD":
        wanted["dense autograd"] = (mine / seconds["dense"], 1 / 4)
    if paper and "sparsify" in seconds:
        wanted["sparsify"] = (mine / seconds["sparsify"], 1 / 1.6)
        wanted["sparsify's peak memory"] = (peak["train"] / peak["sparsify"], 0.6)
    where = f"{row['shape']} {label}"
    lines = [f"{where}: {got:.2f} x {what}, at most {most:.2f}" for what, (got, most) in wanted.items() if got > most]
    if label in ("TC", "STC") and "sparsify" not in seconds:
        lines.append(f"{where}: sparsify is not installed (pip install eai-sparsify), so it was not compared")
    return lines


def print_row(row: dict[str, Any]) -> None:
    """Print a row of the table for each contestant, and for the floors as they were beside the first."""
    seconds, peak, floors = row["seconds"], row["peak_bytes"], row["floors"]

    def line(title: str, time: float, least: dict[str, float], memory: str = "") -> str:
        ratios = (time / least["products"], time / least["floor"], time / seconds["train"])
        numbers = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        return (
            f"| {row['shape']} | {row['layer']}, N = {row['units']:,} | {title} | {time:.3f} | {numbers} | {memory} |"
        )

    for key in (key for key in TITLES if key in seconds):
        least = floors["train" if key in ("train", "dense_float32", "float32") else "ours"]
        print(line(TITLES[key], seconds[key], least, f"{peak[key] / 2**20:,.0f}"))
    for key, title in (("products", "floor: products"), ("floor", "floor: products and bytes")):
        print(line(title, floors["train"][key], floors["train"]), flush=True)


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
    print("\n| shape | layer | step of | seconds | x products | x floor | x as mxd train | peak MiB |")
    print("|---|---|---|---|---|---|---|---|")
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
        conclude(misses)


if __name__ == "__main__":
    main()
