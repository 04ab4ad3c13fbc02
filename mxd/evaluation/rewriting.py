"""A layer's output with something added where certain units are active, or everywhere: texts' classes after that.

    out(x) += strength s(x) v

v is as long as the layer's output is on average, and ``s`` is affine in the coefficients ``a(x)``: ``Gate``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mxd.artifacts.checkpoint import Trained
from mxd.common.errors import MxdError
from mxd.common.progress import Advance
from mxd.evaluation.dropping import Dropping, Site
from mxd.evaluation.targets import ProbedClass
from mxd.evaluation.walk import padded_batches
from mxd.layers import Code
from mxd.model.frozen import FrozenModel
from mxd.model.lens import Lens

Edit = tuple[str, float]
"""Where something is added, one of the names in ``Rewriting.gates`` or ``BLIND``, and how much."""
BLIND = "blind"
"""Adds the same at every token: s = 1."""
PLAIN: Edit = (BLIND, 0.0)
"""Adds nothing."""


@dataclass(frozen=True)
class Gate:
    """How much is added at a token, from its code: ``s(x) = weight . a(x) - offset``."""

    weight: Float[Tensor, " units"]
    offset: float = 0.0

    @staticmethod
    def by_mean(mean: Float[Tensor, " units"], simplex: bool) -> "Gate":
        """Return muMoE's gate (equation 5): ``s(x) = N (abar . a(x))``, its lambda = N, where coefficients sum to 1.

        Elsewhere that has no scale, and ``s(x) = (abar . a(x)) / (abar . abar)``: 1 on average over the texts.

        Args:
            mean: ``abar``, the mean code over some texts' tokens.
            simplex: whether each token's coefficients sum to 1.
        """
        return Gate(mean * len(mean) if simplex else mean / _energy(mean))

    @staticmethod
    def by_contrast(mean: Float[Tensor, " units"], others: Float[Tensor, " units"]) -> "Gate":
        """Return ours: ``s(x) = D . (a(x) - others) / (D . D)`` with ``D = abar - others``.

        On average 1 over the texts and 0 over the others, so units that all texts use count for nothing.

        Args:
            mean: ``abar``.
            others: the mean code over all other texts' tokens.
        """
        weight = (mean - others) / _energy(mean - others)
        return Gate(weight, float(weight @ others))

    def strength(self, code: Code) -> Float[Tensor, "*lead"]:
        """Return ``s`` at each token."""
        if code.all_units:
            return code.activations @ self.weight - self.offset
        return (code.activations * self.weight[code.indices]).sum(-1) - self.offset


def _energy(mean: Float[Tensor, " units"]) -> Tensor:
    return mean.square().sum().clamp_min(1e-30)


@dataclass(frozen=True)
class Found:
    """What came of some edits, texts in the order they were named."""

    right: Bool[np.ndarray, "edits texts"]
    """Which texts are classified right."""
    strengths: dict[str, Float[np.ndarray, " texts"]]
    """Name of a gate -> ``s``, the mean over each text's tokens."""


class Rewriting:
    """One layer whose output is rewritten, and a probe of the final hidden states that tells labels of texts."""

    def __init__(
        self, model: FrozenModel, trained: Trained, rows: Sequence[Sequence[int]], labels: Sequence[int], size: int
    ) -> None:
        """Take the layer and the texts.

        Args:
            model: the frozen base model.
            trained: the layer.
            rows: all texts, as token ids.
            labels: the number of each one's label.
            size: texts in one forward.
        """
        self.model, self.layer, self.rows, self.size = model, trained.layer, rows, size
        self.simplex = trained.layer.config.sparsity.simplex
        self.site_of = Dropping(model, trained)
        self.probe = ProbedClass(model, labels)
        self.gates: dict[str, Gate] = {}
        self.length = 0.0
        """Mean length of the layer's output."""

    def fit(
        self,
        numbers: Sequence[int],
        probed: Sequence[int],
        members: Mapping[str, Sequence[int]],
        advance: Advance,
    ) -> dict[str, Float[Tensor, " units"]]:
        """Fit the probe, take the layer's mean length over texts, and return mean codes over some of them.

        Args:
            numbers: the texts.
            probed: those that the probe is fitted on.
            members: name -> those whose tokens' codes are averaged.
            advance: told of the texts that have passed through the model.
        """
        self.probe.fit(self.site_of.spliced(padded_batches(self.rows, probed, self.size)))
        sums = {name: torch.zeros(self.layer.num_units, dtype=torch.float64) for name in members}
        tokens, lengths, every = dict.fromkeys(members, 0), 0.0, 0
        for site in self._sites(numbers):
            lengths += float(torch.linalg.vector_norm(site.out.float(), dim=-1)[site.there].double().sum())
            every += int(site.there.sum())
            active = site.active
            for name, inside in members.items():
                at = torch.from_numpy(np.isin(site.batch.numbers, inside)).to(active.device)
                chosen = active & at[:, None, None]
                values = site.code.activations[chosen].cpu().double()
                sums[name].index_add_(0, site.code.indices.expand(active.shape)[chosen].cpu(), values)
                tokens[name] += int(site.there[at].sum())
            advance(len(site.batch.numbers))
        self.length = lengths / max(every, 1)
        return {name: (sums[name] / max(tokens[name], 1)).float().to(self.model.device) for name in members}

    def run(self, numbers: Sequence[int], edits: Sequence[Edit], direction: "Direction", advance: Advance) -> Found:
        """Classify texts under each edit.

        Args:
            numbers: the texts.
            edits: where something is added, and how much.
            direction: what is added.
            advance: told of the texts that have passed through the model, once for each edit.
        """
        place = {number: i for i, number in enumerate(numbers)}
        right = np.zeros((len(edits), len(numbers)), dtype=bool)
        pooled = {name: np.zeros(len(numbers)) for name in self.gates}
        for site in self._sites(numbers):
            at = [place[number] for number in site.batch.numbers]
            out, added = site.out, direction(site)
            strengths = {name: _strength(site, gate) for name, gate in self.gates.items()}
            for name, strength in strengths.items():
                pooled[name][at] = (strength.sum(-1) / site.there.sum(-1).clamp_min(1)).double().cpu().numpy()
            strengths[BLIND] = site.there.to(out.dtype)
            for i, (name, much) in enumerate(edits):
                changed = out + (much * strengths[name].unsqueeze(-1) * added).to(out.dtype) if much else out
                with site.answering(np.arange(len(at)), changed) as texts:
                    right[i, at] = self.probe.right(texts)
                advance(len(at))
        return Found(right, pooled)

    def _sites(self, numbers: Sequence[int]) -> Iterator[Site]:
        return map(self.site_of.at, padded_batches(self.rows, numbers, self.size))


Direction = Callable[[Site], Float[Tensor, "*batch d_out"]]
"""What is added to the outputs on a batch, at each token as long as these are on average."""


def _strength(site: Site, gate: Gate) -> Float[Tensor, "batch seq"]:
    return gate.strength(site.code) * site.there


def direction_of(named: str, rewriting: Rewriting, label: int) -> Direction:
    """Return what is added to outputs.

    Args:
        named: ``probe``, the direction of a label; ``token:TEXT``, the unembedding of a token; ``unit:N``, what a unit
            adds to the output where it is active (for an MxD, another one for each token).
        rewriting: the layer, with its probe.
        label: the label's number.

    Raises:
        MxdError: no such token or unit, or a model whose final norm or output embeddings cannot be read.
    """
    kind, _, what = named.partition(":")
    layer = rewriting.layer
    if kind == "unit":
        if int(what) >= layer.num_units:
            raise MxdError(f"direction is {named!r}; the layer has units 0 ... {layer.num_units - 1}.")
        layer.check_additive()
        return lambda site: _as_long(layer.unit_output(int(what), site.read), rewriting.length)
    lens = Lens.of(rewriting.model)
    if kind == "token":
        reading = lens.unembedding[_token(rewriting.model, what)].float()
    else:
        reading = torch.from_numpy(rewriting.probe.direction(label)).float()
        if len(reading) != len(lens.scale):
            raise MxdError(
                "the probe of this model reads logits, which are not linear in its hidden states, so it has no "
                "direction there. Give --direction token:TEXT or unit:N."
            )
    added = _as_long(lens.before_norm(reading.to(lens.scale.device)), rewriting.length)
    return lambda site: added


def _as_long(direction: Float[Tensor, "*batch d_out"], length: float) -> Float[Tensor, "*batch d_out"]:
    """Return directions of one length; nothing where there is none."""
    norms = torch.linalg.vector_norm(direction.float(), dim=-1, keepdim=True)
    return direction.float() * (length / norms.clamp_min(1e-30))


def _token(model: FrozenModel, text: str) -> int:
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        parts = ", ".join(repr(model.tokenizer.decode([i])) for i in ids)
        raise MxdError(f"{text!r} is {len(ids)} tokens ({parts}); expected one. Most words begin with a space.")
    return int(ids[0])
