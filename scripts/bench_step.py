"""Time one training step (forward, loss, backward, Adam) of each layer against plain dense autograd and the floor.

    python scripts/bench_step.py [--shapes gpt2 smollm2] [--repeats 5] [--json FILE] [--check]

All contestants run in this process, in turn, on the same data; medians over repeats. The floor is the time of the
dense float32 products that a step cannot avoid, from the rate of the encoder's own product measured here.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mxd.checkpoint import versions
from mxd.layers import LAYERS, MLPShape, ReplacementLayer, size
from mxd.train import _job, train_step

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
TARGETS = {
    "MxD": {"dense": 4.0, "floor": 1.25},
    "TC": {"sparsify": 1.6, "floor": 1.3},
    "STC": {"sparsify": 1.6, "floor": 1.3},
}
"""Speed-up over a peer that is at least asked for; multiple of the floor that is at most allowed."""


def median_seconds(step: Callable[[], object], repeats: int) -> float:
    """Return the median time of a step after one that warms up."""
    step()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def dense_step(layer: ReplacementLayer, x: Tensor, y: Tensor) -> Callable[[], object]:
    """The same step as reference code writes it: dense codes, dense products, default Adam, dense bookkeeping."""
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-4, foreach=False, fused=False)
    last_active = torch.zeros(layer.num_units)
    k = layer.config.sparsity.max_k

    def step() -> None:
        optimizer.zero_grad()
        pre = F.relu(F.linear(x, *layer.gate_parameters()))
        values, indices = pre.topk(k, dim=-1)
        code = torch.zeros_like(pre).scatter_(-1, indices, values)
        if hasattr(layer, "expert_scale"):
            prediction = (code @ layer.expert_scale) * (layer.encoder(x) @ layer.decoder) + layer.bias
        else:
            prediction = code @ layer.decoder + layer.bias
            prediction = prediction if layer.skip is None else prediction + x @ layer.skip
        loss = ((prediction - y).pow(2).mean(-1) / y.norm(dim=-1)).mean()
        loss.backward()
        optimizer.step()
        last_active[(code > 0).any(0)] = 0

    return step


def sparsify_step(d: int, width: int, k: int, skip: bool, x: Tensor, y: Tensor) -> Callable[[], object] | None:
    """A step of EleutherAI's sparsify, where it is installed."""
    try:
        from sparsify import SparseCoder, SparseCoderConfig
    except ImportError:
        return None
    config = SparseCoderConfig(num_latents=width, k=k, transcode=True, skip_connection=skip)
    coder = SparseCoder(d, config, device="cpu", dtype=torch.float32)
    optimizer = torch.optim.Adam(coder.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        coder(x, y).fvu.backward()
        optimizer.step()

    return step


def floor_seconds(label: str, shape: MLPShape, units: int, repeats: int, x: Tensor) -> float:
    """Return the time of the products no step avoids: all units' pre-activations, and a dense encoder's passes.

    Dense encoder: each of its E, (E_glu,) and D costs one product forward and one for its gradient, and D one more for
    the gradient of the hidden state; nothing needs the gradient of the input.
    """
    weight, out = torch.randn(units, shape.d_in), torch.empty(TOKENS, units)
    seconds = median_seconds(lambda: torch.mm(x, weight.T, out=out), repeats)
    if label == "MxD":
        hidden, z = torch.randn(shape.hidden or 0, shape.d_in), torch.empty(TOKENS, shape.hidden or 0)
        products = 7 if shape.glu else 5
        seconds += products * median_seconds(lambda: torch.mm(x, hidden.T, out=z), repeats)
    return seconds


def bench(name: str, shape: MLPShape, label: str, k: int, repeats: int) -> dict[str, Any]:
    """Time every contestant for one layer and shape."""
    method, fields = METHODS[label]
    config = size(LAYERS[method](sparsity={"kind": "topk", "k": k}, **fields).inherit(shape), match="paper")
    torch.manual_seed(0)
    x, y = torch.randn(TOKENS, shape.d_in), torch.randn(TOKENS, shape.d_out)
    job = _job(label, 0, config, 0, torch.device("cpu"))
    row: dict[str, Any] = {
        "shape": name,
        "layer": label,
        "k": k,
        "units": config.num_units,
        "params": config.num_params,
    }
    row["ours"] = median_seconds(lambda: train_step(job, x, y, 1e-4, TOKENS), repeats)
    row["dense"] = median_seconds(dense_step(job.layer, x, y), max(1, repeats // 2))
    peer = sparsify_step(shape.d_in, config.num_units or 0, k, bool(fields), x, y) if label != "MxD" else None
    row["sparsify"] = median_seconds(peer, repeats) if peer else None
    row["floor"] = floor_seconds(label, shape, config.num_units or 0, repeats, x)
    return row


def missed(row: dict[str, Any]) -> list[str]:
    """Return the targets a row misses."""
    found = []
    for peer, factor in TARGETS[row["layer"]].items():
        if row[peer] is None:
            found.append(f"{row['shape']} {row['layer']}: {peer} is not installed, so {factor}x was not checked")
        elif peer == "floor" and row["ours"] > factor * row["floor"]:
            found.append(
                f"{row['shape']} {row['layer']}: {row['ours'] / row['floor']:.2f}x the floor, at most {factor}"
            )
        elif peer != "floor" and row[peer] < factor * row["ours"]:
            found.append(
                f"{row['shape']} {row['layer']}: {row[peer] / row['ours']:.2f}x faster than {peer}, at least {factor}"
            )
    return found


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--layers", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 and name each target that is missed")
    args = parser.parse_args()
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}; seconds, medians")
    columns = ("ours", "floor", "/floor", "dense", "ratio", "sparsify", "ratio")
    print(f"{'shape':8} {'layer':5} {'units':>7} " + " ".join(f"{column:>8}" for column in columns))
    rows = []
    for name in args.shapes:
        for label in args.layers:
            row = bench(name, SHAPES[name], label, args.k, args.repeats)
            rows.append(row)
            numbers = [row["ours"], row["floor"], row["ours"] / row["floor"], row["dense"], row["dense"] / row["ours"]]
            cells = [f"{number:8.3f}" for number in numbers]
            if row["sparsify"] is not None:
                cells += [f"{row['sparsify']:8.3f}", f"{row['sparsify'] / row['ours']:8.2f}"]
            print(f"{name:8} {label:5} {row['units']:7,} " + " ".join(cells), flush=True)
    if args.json:
        machine = {"threads": torch.get_num_threads(), "processor": platform.processor() or platform.machine()}
        args.json.write_text(json.dumps({"machine": machine, "versions": versions(), "rows": rows}, indent=2) + "\n")
    misses = [miss for row in rows for miss in missed(row)]
    if args.check:
        print("\n".join(misses) or "every target is met")
        sys.exit(1 if misses else 0)


if __name__ == "__main__":
    main()
