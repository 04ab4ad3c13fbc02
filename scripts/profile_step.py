"""Where does a training step's time go? Its operators, by their share of the time of a step as `mxd train` takes it.

    python scripts/profile_step.py [--shape smollm2] [--expansion 8] [--layers TC MxD] [--tokens 1024 4096] [--check]

The layers and shapes are those of ``bench_step.py``; times are torch.profiler's, of the thread that calls, without
what an operator calls in turn. Profiling slows small operators most, so shares, not times, are what to read.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_step
import torch
from goals import conclude
from torch.profiler import ProfilerActivity, profile

from mxd.layers import parse_layer, size
from mxd.training.trainer import keep_freed_memory

STEPS = 5


def operators(name: str, label: str, k: int, tokens: int, expansion: int) -> dict[str, Any]:
    """Return the seconds of a step and the share of each operator, the largest first."""
    bench_step.TOKENS, shape = tokens, bench_step.SHAPES[name]
    config = size(parse_layer(bench_step.methods(k)[label]).resolve(shape), expansion)
    torch.manual_seed(0)
    x, y = torch.randn(tokens, shape.d_in), torch.randn(tokens, shape.d_out)
    step = bench_step.ours(config, "auto", "auto", x, y)
    step(), step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(STEPS):
            step()
    times = {event.key: event.self_cpu_time_total for event in profiled.key_averages()}
    total = sum(times.values())
    shares = {name: time / total for name, time in sorted(times.items(), key=lambda item: -item[1])}
    about = {"shape": name, "layer": label, "units": config.num_units, "tokens": tokens}
    return about | {"seconds": total / STEPS / 1e6, "shares": shares}


def products(row: dict[str, Any]) -> float:
    """Return the share of a step that its matrix products take."""
    return float(sum(row["shares"].get(name, 0.0) for name in ("aten::mm", "aten::addmm", "aten::bmm")))


def small(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the steps of which products take less than half."""
    return [
        f"{row['layer']}, {row['tokens']:,} tokens: products take {products(row):.0%} of a step, wanted 50%"
        for row in rows
        if products(row) < 0.5
    ]


def main() -> None:
    """Parse, profile, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=bench_step.SHAPES, default="smollm2")
    parser.add_argument("--layers", nargs="+", choices=bench_step.METHODS, default=["TC", "MxD"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="of a batch")
    parser.add_argument("--expansion", type=int, default=8, help="units of a transcoder of this size, times the width")
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--top", type=int, default=8, help="operators that are listed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit with 1 where products take less than half of a step")
    args = parser.parse_args()
    keep_freed_memory()
    cases = [(label, tokens) for label in args.layers for tokens in args.tokens]
    rows = [operators(args.shape, label, args.k, tokens, args.expansion) for label, tokens in cases]
    print(f"{torch.get_num_threads()} threads, K = {args.k}\n\n| layer | units | tokens | ms | largest shares |")
    print("|---|---|---|---|---|")
    for row in rows:
        largest = ", ".join(f"{name} {share:.0%}" for name, share in list(row["shares"].items())[: args.top])
        print(f"| {row['layer']} | {row['units']:,} | {row['tokens']:,} | {1000 * row['seconds']:.0f} | {largest} |")
    if args.json:
        args.json.write_text(json.dumps({"threads": torch.get_num_threads(), "rows": rows}, indent=1) + "\n")
    if args.check:
        conclude(small(rows))


if __name__ == "__main__":
    main()
