"""What the MLPs of a model's blocks are like, before anything replaces them: how linear, of what rank, with what sink.

    python scripts/mlp_sites.py MODEL [--blocks 3 9] [--fit-tokens 65536] [--tokens 16384] [--json FILE] [--check]

Of each block, on held-out tokens that are not special:

- *linear*: share of the output's variance that the best affine map of the MLP's input explains. The map is fitted on
  training text by least squares, with a ridge of a millionth of the inputs' mean variance. It is what a skip connection
  could do alone.
- *linear on the fit's text*: the same where it was fitted; the gap between the two says how far it is fitted to noise.
- *rank*: participation ratio of the outputs' covariance, (sum of eigenvalues)^2 / sum of their squares: dimensions if
  all had the same variance. *first*: share of the first eigenvalue.
- *sink*: norm of the output at BOS beside the median norm over other tokens (*median*).
- *heavy*: the 99th percentile of the norm beside its median.
- *in*, *out*: root mean square of an element of the input and of the output.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from goals import conclude
from jaxtyping import Float
from torch import Tensor

from mxd.artifacts.provenance import versions
from mxd.common.files import whole_file, write_json
from mxd.common.markdown import grid
from mxd.config import DataConfig
from mxd.data.contexts import counted_positions, special_ids
from mxd.evaluation.checkpoints import held_out_contexts
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen

RIDGE = 1e-6
"""Ridge of the fit, as a share of the inputs' mean variance."""
LOST = 0.1
"""Share of the variance that an affine map may lose from the text of its fit to held-out text."""

Pair = tuple[Float[Tensor, "tokens d_in"], Float[Tensor, "tokens d_out"]]


class Moments:
    """Sums from which affine maps and covariances follow, in float64."""

    def __init__(self) -> None:
        self.sums: Float[Tensor, "width width"] = torch.empty(0)
        self.norms: list[Tensor] = []

    def see(self, inputs: Float[Tensor, "tokens d_in"], outputs: Float[Tensor, "tokens d_out"]) -> None:
        """Count some tokens."""
        rows = torch.cat([torch.ones(len(inputs), 1), inputs, outputs], 1).double()
        if not len(self.sums):
            self.sums = rows.new_zeros(rows.shape[1], rows.shape[1])
        self.sums.addmm_(rows.T, rows)  # in place: freed matrices this large are not reused between small ones
        self.norms.append(outputs.norm(dim=1))

    def centred(self) -> Float[Tensor, "width width"]:
        """Return the covariance of inputs and outputs together."""
        mean = self.sums[0, 1:] / self.sums[0, 0]
        return self.sums[1:, 1:] / self.sums[0, 0] - torch.outer(mean, mean)

    def size(self, part: slice) -> float:
        """Return the root mean square of an element of some columns."""
        return float((self.sums.diagonal()[part].mean() / self.sums[0, 0]).sqrt())

    def affine(self, d_in: int) -> Float[Tensor, "d_in_1 d_out"]:
        """Return the best affine map, the bias in its first row."""
        covariance = self.centred()
        inner = covariance[:d_in, :d_in]
        ridge = RIDGE * inner.diagonal().mean() * torch.eye(d_in, dtype=inner.dtype)
        weight = torch.linalg.solve(inner + ridge, covariance[:d_in, d_in:])
        mean = self.sums[0, 1:] / self.sums[0, 0]
        return torch.cat([(mean[d_in:] - mean[:d_in] @ weight)[None], weight])

    def explained(self, affine: Float[Tensor, "d_in_1 d_out"]) -> float:
        """Return the share of the outputs' variance that an affine map of the inputs explains."""
        cut = len(affine)
        s = self.sums
        crossed = (affine * s[:cut, cut:]).sum()
        error = s[cut:, cut:].trace() - 2 * crossed + (affine * (s[:cut, :cut] @ affine)).sum()
        return 1 - float(error / s[0, 0] / self.centred()[cut - 1 :, cut - 1 :].trace())


def recorded(
    model: FrozenModel, blocks: Sequence[int], split: str, tokens: int, context: int, seed: int
) -> Iterator[dict[int, tuple[Pair, Pair]]]:
    """Yield, for single contexts, block -> inputs and outputs at tokens that count, and at BOS."""
    text = DataConfig(source="bundled", split=split, context=context)
    excluded = special_ids(model.tokenizer)
    seen = 0
    for ids in held_out_contexts(model, text, seed)(0):
        if seen >= tokens:
            return
        counts = torch.from_numpy(counted_positions(ids, excluded))
        seen += int(counts.sum())
        with torch.inference_mode():
            pairs = model.record(torch.from_numpy(np.asarray(ids, np.int64))[None], blocks)
        yield {n: ((x[0][counts], y[0][counts]), (x[0][:1], y[0][:1])) for n, (x, y) in pairs.items()}


def described(fit: Moments, held: Moments, d_in: int, sink: float) -> dict[str, float]:
    """Return what is said of one block.

    Args:
        fit: of the text that the affine map is fitted on.
        held: of held-out text.
        d_in: width of the MLP's input.
        sink: norm of the output at BOS.
    """
    affine = fit.affine(d_in)
    eigenvalues = torch.linalg.eigvalsh(held.centred()[d_in:, d_in:]).clamp_min(0)
    norms = torch.cat(held.norms)
    median = float(norms.median())
    return {
        "linear": held.explained(affine),
        "linear_on_fit": fit.explained(affine),
        "rank": float(eigenvalues.sum() ** 2 / (eigenvalues**2).sum()),
        "first": float(eigenvalues.max() / eigenvalues.sum()),
        "sink": sink / median,
        "heavy": float(norms.quantile(0.99)) / median,
        "median": median,
        "in": held.size(slice(1, d_in + 1)),
        "out": held.size(slice(d_in + 1, None)),
    }


def study(model: FrozenModel, blocks: Sequence[int], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return block -> what is said of it."""
    moments = {split: {n: Moments() for n in blocks} for split in ("train", "test")}
    sinks: dict[int, float] = {}
    for split, tokens in (("train", args.fit_tokens), ("test", args.tokens)):
        for pairs in recorded(model, blocks, split, tokens, args.context, args.seed):
            for n, (counted, (_, first)) in pairs.items():
                moments[split][n].see(*counted)
                sinks[n] = float(first.norm())
    d_in = {n: model.mlp_widths(n)[0] for n in blocks}
    return {str(n): described(moments["train"][n], moments["test"][n], d_in[n], sinks[n]) for n in blocks}


def fitted_to_noise(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the blocks whose affine map explains less on held-out text, by more than ``LOST`` of the variance."""
    return [
        f"block {n}: the affine map explains {one['linear']:.1%} of held-out variance, {one['linear_on_fit']:.1%} "
        "where it was fitted; give more --fit-tokens, or leave out what is far from the rest"
        for n, one in found.items()
        if one["linear_on_fit"] - one["linear"] > LOST
    ]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a bundled name, a folder, a GGUF file or a Hub id")
    parser.add_argument("--blocks", type=int, nargs="+", help="by default all")
    parser.add_argument(
        "--fit-tokens", type=int, default=65536, help="training tokens that the affine map is fitted on"
    )
    parser.add_argument("--tokens", type=int, default=16384, help="held-out tokens that are measured")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0, help="draws the order of the text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--check", action="store_true", help="exit with 1 where an affine map is fitted to noise")
    args = parser.parse_args()
    model = load_frozen(args.model)
    blocks = list(range(model.num_blocks)) if args.blocks is None else args.blocks
    found = study(model, blocks, args)
    forms = {"linear": "{:.1%}", "linear_on_fit": "{:.1%}", "rank": "{:.1f}", "first": "{:.1%}"}
    forms |= {"sink": "{:.1f}", "heavy": "{:.1f}", "median": "{:.1f}", "in": "{:.3f}", "out": "{:.3f}"}
    lines = [[n, *(form.format(one[key]) for key, form in forms.items())] for n, one in found.items()]
    print(grid([["block", *(name.replace("linear_on_fit", "linear on the fit's text") for name in forms)], *lines]))
    if args.json:
        asked: dict[str, Any] = {
            key: getattr(args, key) for key in ("model", "fit_tokens", "tokens", "context", "seed")
        }
        with whole_file(args.json) as file:
            write_json(file, {"versions": versions(), "asked": asked, "blocks": found})
    if args.check:
        conclude(
            fitted_to_noise(found), f"every affine map explains within {LOST:.0%} of what it does where it was fitted"
        )


if __name__ == "__main__":
    main()
