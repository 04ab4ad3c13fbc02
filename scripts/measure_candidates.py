"""When do candidates in low precision pay? What they cost, and what a proof of them needs: in bfloat16, and in int8.

    python scripts/measure_candidates.py [--units 2304 4608] [--d 576] [--k 32] [--repeats 5] [--json FILE] [--check]
    python scripts/measure_candidates.py --layer checkpoints/RUN/LAYER --config configs/RUN.yaml [--tokens 2048]

`mxd train` forms all pre-activations in bfloat16 and proves that no unit outside of the candidates belongs among the
K largest (``mxd.ops.sparse._from_candidates``), where there are enough units for each candidate
(``mxd.ops.sparse.WORTH``). The first table is what that is set by: the choice of the K largest of a tile of 2,048
tokens in float32 and from candidates, in turn, on weights as they are drawn. The second is what their number is set by
(``mxd.ops.sparse.candidate_count``): rows of random numbers whose choice is not proven, beside those that would not
be with 2 K + 16 candidates whatever the width.

A processor with VNNI multiplies int8 faster still. The third table times the parts that candidates in int8 would
have at GPT-2's shape. Rounding to int8 errs by more, so the same proof (Cauchy and Schwarz, with measured norms of the
errors) needs more candidates: all units whose pre-activation is within twice the bound of the K-th largest. With
``--layer`` the last table says how many, on held-out activations, with one scale for each row; with one bound for all
units, as if the norms of their rows were alike, which training undoes; *balanced* first
divides each column of the inputs by the square root of the ratio of its largest numbers, and multiplies the weights by
it (SmoothQuant, arXiv 2211.10438).
"""

import argparse
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bench_step import medians
from check_quality import held_out_activations
from goals import conclude
from torch import Tensor

from mxd.artifacts.checkpoint import load_layer
from mxd.config import RunConfig, load_config
from mxd.layers.gates import LinearGate
from mxd.model.loading import load_frozen
from mxd.ops import sparse
from mxd.ops.sparse import _from_candidates, _largest, _topk, candidate_count, candidates_pay

TILE, WIDTH, UNITS = 2048, 768, 24_576
LARGEST = 127
"""The largest number of an int8 that has a negative."""


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in int8 and the scale of each, a column."""
    scale = rows.abs().amax(1, keepdim=True) / LARGEST
    return (rows / scale).round().to(torch.int8), scale


def rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows as they are after rounding."""
    if dtype == torch.bfloat16:
        return rows.bfloat16().float()
    numbers, scale = quantised(rows)
    return numbers * scale


def needed(x: Tensor, weight: Tensor, bias: Tensor, k: int, dtype: torch.dtype, shared: bool = False) -> Tensor:
    """Return how many candidates each row's proof needs, with a bound of each unit's own or one for all of a row."""
    low_x, low_weight = rounded(x, dtype), rounded(weight, dtype)
    norm = torch.linalg.vector_norm
    bound = torch.outer(norm(x - low_x, dim=1), norm(low_weight, dim=1))
    bound += torch.outer(norm(x, dim=1), norm(weight - low_weight, dim=1))
    if shared:
        bound = bound.amax(1, keepdim=True)
    kth = torch.addmm(bias, x, weight.T).topk(k).values.amin(1, keepdim=True)
    return (torch.addmm(bias, low_x, low_weight.T) + bound >= kth).sum(1)


def proofs(config: RunConfig, source: str, tokens: int) -> list[dict[str, Any]]:
    """Return what the proof of a layer's candidates needs on held-out text, for each way to round."""
    trained = load_layer(source)
    layer, block = trained.layer.float(), trained.provenance.block
    gates, k = layer.gates, layer.config.sparsity.max_k
    assert isinstance(gates, LinearGate), "a layer with one row for each unit"
    x, y = held_out_activations(config, load_frozen(config.model.source), tokens)[block]
    x, weight, bias = layer.read(x, y), gates.weight.detach(), gates.bias.detach()
    balance = (x.abs().amax(0) / weight.abs().amax(0)).sqrt()
    ways = {
        "bfloat16": (x, weight, torch.bfloat16, False),
        "bfloat16, one bound for all units": (x, weight, torch.bfloat16, True),
        "int8": (x, weight, torch.int8, False),
        "int8, balanced": (x / balance, weight * balance, torch.int8, False),
    }
    rows = []
    for way, (inputs, rows_of, dtype, shared) in ways.items():
        counts = needed(inputs, rows_of, bias, k, dtype, shared).float()
        taken = candidate_count(k, len(weight), x.shape[1])
        shares = {f"proven by {n}": (counts <= n).float().mean().item() for n in (taken, 4 * k, 8 * k)}
        rows.append({"way": way, "median": counts.median().item(), "99%": counts.quantile(0.99).item()} | shares)
    return rows


def choices(units: list[int], widths: list[int], k: int, repeats: int) -> list[dict[str, Any]]:
    """Return the median seconds of the choice of the ``k`` largest of a tile, in float32 and from candidates."""
    torch.manual_seed(0)
    rows = []
    for d, n in itertools.product(widths, units):
        x, weight, bias = torch.randn(TILE, d), torch.randn(n, d), torch.zeros(n)
        ways: dict[str, Callable[[], Any]] = {
            "float32": lambda: _largest(x, weight, bias, k),  # noqa: B023  called at once
            "candidates": lambda: _from_candidates(x, weight, bias, k),  # noqa: B023
        }
        with patch.object(sparse, "WORTH", (0, 0)):  # candidates however few units there are
            found = medians(ways, repeats)
        rows.append({"d": d, "units": n, "units for each candidate": n / candidate_count(k, n, d), **found})
    return rows


def unproven(units: int, d: int, k: int, count: int) -> float:
    """Return the share of a tile's rows, of random numbers, that are searched again after ``count`` candidates."""
    torch.manual_seed(0)
    anew, real = [], _largest

    def noting(x: Tensor, *rest: Any) -> Any:
        anew.append(len(x))
        return real(x, *rest)

    with (
        patch.object(sparse, "WORTH", (0, 0)),
        patch.object(sparse, "candidate_count", lambda *_: count),
        patch.object(sparse, "_largest", noting),
    ):
        _from_candidates(torch.randn(TILE, d), torch.randn(units, d), torch.zeros(units), k)
    return sum(anew[1:]) / TILE


def counts(widths: list[int], ks: list[int]) -> list[dict[str, Any]]:
    """Return how many candidates are taken, and the share of rows that they leave unproven, beside 2 K + 16."""
    rows = []
    for d, k in itertools.product(widths, ks):
        n, flat = 8 * d, 2 * k + 16
        taken = candidate_count(k, n, d)
        shares = {"unproven": unproven(n, d, k, taken), "unproven by 2 K + 16": unproven(n, d, k, min(flat, n))}
        rows.append({"d": d, "units": n, "k": k, "candidates": taken, "2 K + 16": flat} | shares)
    return rows


def parts(repeats: int) -> dict[str, float]:
    """Return the median seconds of each part for a tile at GPT-2's shape."""
    torch.manual_seed(0)
    x, weight = torch.randn(TILE, WIDTH), torch.randn(UNITS, WIDTH)
    low_x, low_weight = x.bfloat16(), weight.bfloat16()
    (int_x, _), (int_weight, scale) = quantised(x), quantised(weight)
    pre, low, sums = (torch.empty(TILE, UNITS, dtype=d) for d in (torch.float32, torch.bfloat16, torch.int32))
    groups = torch.empty(TILE, UNITS // 4, dtype=torch.int32)
    bias = torch.zeros(UNITS)
    ways: dict[str, Callable[[], Any]] = {
        "product, float32": lambda: torch.mm(x, weight.T, out=pre),
        "product, bfloat16": lambda: torch.mm(low_x, low_weight.T, out=low),
        "product, int8": lambda: torch._int_mm(int_x, int_weight.T, out=sums),
        "weights to bfloat16": lambda: low_weight.copy_(weight),
        "weights to int8": lambda: quantised(weight),
        "80 largest of bfloat16": lambda: _topk(low, 80),
        "maxima of int32 in fours": lambda: torch.amax(sums.view(TILE, 4, -1), 1, out=groups),
        "their scaling": lambda: groups.float().mul_(scale[: UNITS // 4, 0]),
        "all of it in bfloat16": lambda: _from_candidates(x, weight, bias, 32),
    }
    return medians(ways, repeats)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, nargs="+", default=[1152, 2304, 3456, 4608, 9216])
    parser.add_argument("--d", type=int, nargs="+", default=[128, 576, 2048], help="widths of the inputs")
    parser.add_argument(
        "--proven", type=int, nargs="+", default=[576, 768, 2048, 3072, 4096], help="widths, second table"
    )
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--layer", help="a trained layer with a linear gate and TopK")
    parser.add_argument("--config", type=Path, help="of the run that trained it")
    parser.add_argument("--tokens", type=int, default=2048, help="held-out tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 where candidates are taken and do not pay")
    args = parser.parse_args()
    if (args.layer is None) != (args.config is None):
        parser.error("--layer and --config go together")
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    print(f"{torch.get_num_threads()} threads\n")
    print("| d | units | units for each candidate | float32, ms | candidates, ms | ratio |\n|---|---|---|---|---|---|")
    found["choices"] = choices(args.units, args.d, args.k, args.repeats)
    for row in found["choices"]:
        exact, low = row["float32"], row["candidates"]
        times = f"{1000 * exact:.1f} | {1000 * low:.1f} | {low / exact:.2f}"
        print(f"| {row['d']:,} | {row['units']:,} | {row['units for each candidate']:.0f} | {times} |")
    print("\n| d | units | K | candidates | unproven | 2 K + 16 | unproven by them |\n|---|---|---|---|---|---|---|")
    found["counts"] = counts(args.proven, [args.k // 4, args.k, 4 * args.k])
    for row in found["counts"]:
        taken = f"{row['candidates']} | {row['unproven']:.2%} | {row['2 K + 16']} | {row['unproven by 2 K + 16']:.2%}"
        print(f"| {row['d']:,} | {row['units']:,} | {row['k']} | {taken} |")
    print("\n| part | ms |\n|---|---|")
    found["parts"] = parts(args.repeats)
    for part, value in found["parts"].items():
        print(f"| {part} | {1000 * value:.1f} |")
    if args.layer is not None:
        found |= {"layer": Path(args.layer).name, "proofs": proofs(load_config(args.config), args.layer, args.tokens)}
        print("\n| " + " | ".join(found["proofs"][0]) + " |\n" + "|---" * len(found["proofs"][0]) + "|")
        for row in found["proofs"]:
            numbers = (f"{value:.0f}" if value > 1 else f"{100 * value:.1f}%" for value in list(row.values())[1:])
            print(f"| {row['way']} | {' | '.join(numbers)} |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    if args.check:
        taken = [row for row in found["choices"] if candidates_pay(args.k, row["units"], row["d"])]
        slow = [row for row in taken if row["candidates"] > row["float32"]]
        slower = [f"{row['units']:,} units of width {row['d']}: slower than in float32" for row in slow]
        conclude(slower, "candidates pay wherever they are taken")


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")
    main()
