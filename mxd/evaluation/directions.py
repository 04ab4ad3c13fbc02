"""What single units add: the tokens that their output promotes and suppresses, and how strongly they fire.

A unit's output is a direction in the residual stream; ``Lens`` takes it to logits, as the logit lens does
(nostalgebraist, 2020; for what MLPs write: Geva et al., arXiv 2203.14680). The units of a transcoder add one direction.
Those of a mixture of decoders add another at every token, so the mean over the tokens at which the unit is active is
shown, with the mean cosine between two such directions: where that is near zero the mean describes none of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mxd.artifacts.checkpoint import Trained
from mxd.common.progress import progress
from mxd.evaluation.walk import reads
from mxd.layers import Code, ReplacementLayer
from mxd.model.frozen import FrozenModel
from mxd.model.lens import Lens, peaks

TOKENS = 10
"""Tokens shown on each side: promoted, suppressed."""
TOGETHER = 32
"""Units whose logits are held at a time."""
BINS = 20
"""Bins of a unit's histogram, of equal width from 0 to its largest activation."""

Texts = Callable[[list[int]], list[str]]
"""Token ids -> their texts."""


class UnitDirections:
    """Directions and activations of some of a layer's units, over a sample of the text."""

    def __init__(self, layer: ReplacementLayer, maxima: Mapping[int, float]) -> None:
        self.layer, self.maxima = layer, maxima
        self.width = layer.bias.shape[0]
        self.histograms = {unit: np.zeros(BINS, np.int64) for unit in maxima}
        self.sums = {unit: torch.zeros(self.width, dtype=torch.float64) for unit in maxima}
        self.unit_sums = {unit: torch.zeros(self.width, dtype=torch.float64) for unit in maxima}
        self.tokens = 0

    @property
    def fixed(self) -> bool:
        """Whether units add the same direction at every token."""
        return self.layer.hidden(self.zero).shape[-1] == 0

    @property
    def zero(self) -> Float[Tensor, "1 d_in"]:
        """An input, for what does not depend on it."""
        return self.layer.bias.new_zeros(1, self.layer.config.d_in or 0)

    def see(self, x: Float[Tensor, "tokens d_in"], code: Code) -> None:
        """Count a batch of inputs and their code."""
        values, indices = code.activations, code.indices
        self.tokens += len(x)
        moving = self.layer.additive and not self.fixed
        for unit, largest in self.maxima.items():
            value = (values * (indices == unit)).sum(-1)
            active = value > 0
            at = (value[active].double().cpu().numpy() / largest * BINS).astype(int).clip(0, BINS - 1)
            self.histograms[unit] += np.bincount(at, minlength=BINS)
            if moving and len(at):
                directions = self.layer.unit_output(unit, x[active]).double()
                self.sums[unit] += directions.sum(0).cpu()
                norms = directions.norm(dim=-1, keepdim=True).clamp_min(1e-30)
                self.unit_sums[unit] += (directions / norms).sum(0).cpu()

    def active(self, unit: int) -> int:
        """Return the number of sampled tokens at which a unit is active."""
        return int(self.histograms[unit].sum())

    def direction(self, unit: int) -> Float[Tensor, " d_out"] | None:
        """Return the (mean) direction that a unit adds; ``None`` where it is not known."""
        if not self.layer.additive:
            return None
        if self.fixed:
            return self.layer.unit_output(unit, self.zero)[0].double().cpu()
        return self.sums[unit] / self.active(unit) if self.active(unit) else None

    def cosine(self, unit: int) -> float | None:
        """Return the mean cosine between the directions at two tokens; ``None`` for fewer than two.

        With unit vectors ``u_t`` it is ``(||sum u||^2 - n) / (n (n - 1))``: no token is compared with itself, so a unit
        that is rarely active gains nothing by it.
        """
        n = self.active(unit)
        if not self.layer.additive or (not self.fixed and n < 2):
            return None
        return 1.0 if self.fixed else (float(self.unit_sums[unit].square().sum()) - n) / (n * (n - 1))


@torch.no_grad()
def sampled(
    model: FrozenModel,
    layers: Mapping[str, Trained],
    maxima: Mapping[str, Mapping[int, float]],
    batches: Sequence[Int[np.ndarray, "_ seq"]],
) -> dict[str, UnitDirections]:
    """Run the model over a sample of the text, and collect directions and activations of some units.

    Args:
        model: the frozen base model.
        layers: name -> a layer with its provenance.
        maxima: name -> unit -> its largest activation.
        batches: token ids of the sample.
    """
    found = {name: UnitDirections(trained.layer, maxima[name]) for name, trained in layers.items()}
    with progress("what the units shown add", sum(batch.size for batch in batches)) as advance:
        for batch in batches:
            for name, x, _ in reads(model, layers, batch):
                found[name].see(x, layers[name].layer.encode(x))
            advance(batch.size)
    return found


def described(directions: UnitDirections, lens: Lens | None, tokens: Texts) -> dict[int, dict[str, Any]]:
    """Return what each unit adds.

    Args:
        directions: of the units.
        lens: takes them to logits; ``None`` where there is none.
        tokens: token ids -> their texts.

    Returns:
        Unit -> ``activations``, a histogram over the sample with the number of ``active`` tokens; ``cosine``; and
        ``promoted`` and ``suppressed`` tokens with what they gain for each unit of activation, undivided by the final
        norm, with the ``peak`` of the first. Of a unit whose direction is not known, no tokens.
    """
    found = {unit: _measured(directions, unit) for unit in directions.maxima}
    known = {unit: one for unit in found if (one := directions.direction(unit)) is not None and one.any()}
    if lens is None:
        return found
    for units in (list(known)[i : i + TOGETHER] for i in range(0, len(known), TOGETHER)):
        logits = lens.logits(torch.stack([known[unit] for unit in units]))
        for unit, row, peak in zip(units, logits, peaks(logits).tolist(), strict=True):
            ends = {"promoted": _ranked(row, 1, tokens), "suppressed": _ranked(-row, -1, tokens)}
            found[unit] |= {"peak": peak} | ends
    return found


def _measured(directions: UnitDirections, unit: int) -> dict[str, Any]:
    counts = directions.histograms[unit].tolist()
    return {
        "activations": {"high": directions.maxima[unit], "counts": counts, "active": directions.active(unit)},
        "cosine": directions.cosine(unit),
        "peak": None,
        "promoted": [],
        "suppressed": [],
    }


def _ranked(logits: Float[Tensor, " vocab"], sign: int, tokens: Texts) -> list[dict[str, Any]]:
    top = logits.topk(min(TOKENS, len(logits)))
    texts = tokens(top.indices.tolist())
    return [
        {"token": text, "logit": float(f"{sign * value:.4g}")}
        for text, value in zip(texts, top.values.tolist(), strict=True)
    ]
