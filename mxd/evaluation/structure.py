"""The units: the rank of their weights (MxD, arXiv 2505.21364, app. B.4), and which of them leads (C.2, figure 21)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mxd.artifacts.checkpoint import Trained
from mxd.common.errors import MxdError
from mxd.common.progress import progress
from mxd.data.contexts import Blocks, head_ids, mask_of
from mxd.layers import Code, ReplacementLayer
from mxd.model.frozen import FrozenModel
from mxd.questions import DEFAULTS
from mxd.splice import check_provenance

K = TypeVar("K")

LEADERS = 3
"""Units named for each prompt."""

RANK_NUMBERS = 2**23
"""Numbers in one batch of weights whose ranks are computed together."""


class CodeMoments:
    """The mean code over tokens, how often each unit is active, and how strongly at most."""

    def __init__(self, layer: ReplacementLayer) -> None:
        self.layer = layer
        self.sums = torch.zeros(layer.num_units, dtype=torch.float64)
        self.counts = torch.zeros(layer.num_units, dtype=torch.int64)
        self.maxima = torch.zeros(layer.num_units)
        self.tokens = 0

    def count(self, code: Code) -> None:
        """Count the code of a batch of tokens."""
        values, indices = code.values.cpu().reshape(-1), code.indices.cpu().reshape(-1)
        self.tokens += len(code.values)
        self.sums.index_add_(0, indices, values.double())
        self.counts.index_add_(0, indices, (values > 0).long())
        self.maxima.scatter_reduce_(0, indices, values.float(), "amax")

    def mean_code(self, like: Tensor) -> Code:
        """Return the mean coefficients of all units as a code for every row of ``like``."""
        mean = (self.sums / max(self.tokens, 1)).to(like)
        indices = torch.arange(len(mean), device=like.device)
        return Code(mean.expand(len(like), -1), indices.expand(len(like), -1), all_units=True)

    @property
    def rates(self) -> Float[Tensor, " units"]:
        """The share of tokens at which each unit is active."""
        return self.counts.double() / max(self.tokens, 1)

    @property
    def leading_unit(self) -> int:
        """The unit that is active most often."""
        return int(self.counts.argmax())

    @property
    def dead_share(self) -> float:
        """Share of units that were never active."""
        return float((self.counts == 0).float().mean())


@torch.no_grad()
def weight_ranks(
    layer: ReplacementLayer, units: Sequence[int], advance: Any = None
) -> tuple[Float[Tensor, " units"], Float[Tensor, " units"]]:
    """Return the normalized rank and the stable rank of units' weights.

    The normalized rank is ``rank(W_n) / min(H, O)`` (equation 23), where a rank counts the singular values above
    ``max(H, O) eps`` times the largest: it is 1 also where nearly all energy lies in one direction. The stable rank,
    ``||W_n||_F^2 / ||W_n||_2^2``, says how many directions carry the energy; at most the rank, 0 for a weight of zeros.
    A feature's weight is one row, so both are 1, or 0.

    Args:
        layer: any replacement layer; the weights are materialised in batches.
        units: which units.
        advance: told of each batch of units that is done.
    """
    rows, columns = layer.unit_weight(0).shape
    chunk = max(1, RANK_NUMBERS // (rows * columns))
    found = [torch.zeros(2, 0)]
    for start in range(0, len(units), chunk):
        some = units[start : start + chunk]
        singular = torch.linalg.svdvals(torch.stack([layer.unit_weight(n).float() for n in some]))
        largest = singular[:, :1]
        ranks = (singular > max(rows, columns) * torch.finfo(singular.dtype).eps * largest).sum(-1)
        stable = (singular / largest.clamp_min(1e-30)).square().sum(-1)
        found.append(torch.stack([ranks / min(rows, columns), stable]).cpu())
        if advance is not None:
            advance(len(some))
    normalized, stable = torch.cat(found, 1)
    return normalized, stable


@torch.no_grad()
def evaluate_structure(
    model: FrozenModel,
    trained: Mapping[str, Trained],
    blocks: Blocks,
    tokens: int = DEFAULTS.structure.tokens,
    experts: int = DEFAULTS.structure.experts,
    prompts: Sequence[str] = DEFAULTS.structure.prompts,
    forward_contexts: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Look at the units of trained layers: their ranks, and which of them lead.

    The unit that leads at a token is the one with the largest coefficient. A shared expert leads everywhere; training
    with a random K is meant to end that.

    Args:
        model: the frozen base model.
        trained: name -> layer; the base model runs once for all of them, up to the last.
        blocks: contexts over which leads and rates are counted.
        tokens: positions to read, rounded up to whole contexts; those the layer was trained without do not count.
        experts: units whose rank is computed.
        prompts: texts at whose last token the leading unit is named.
        forward_contexts: contexts in one forward, by default about 1,024 tokens.

    Returns:
        Name -> mean ``normalized_rank`` and ``stable_rank`` of ``experts`` units whose weights have ``shape``, with
        their standard deviations ``*_sd``, and how many of the units are rank-``deficient``; over the text's
        ``tokens``, the unit that leads most often and its share of them, ``leader``; and for each prompt, under
        ``leading``, the ``units`` that are strongest at its last token, with their ``strength`` there and their
        ``rate`` over the text.

    Raises:
        MxdError: no layers, no text, numbers below 1, or layers of another model.
    """
    if experts < 1:
        raise MxdError(f"experts is {experts}; expected at least 1.")
    leaders = {name: torch.zeros(one.layer.num_units, dtype=torch.int64) for name, one in trained.items()}
    moments = {name: CodeMoments(one.layer) for name, one in trained.items()}
    with evaluating(model, trained):
        with progress(f"structure: leading units of {len(trained)} layers", tokens) as advance:
            for batch in streamed(blocks, tokens, forward_contexts):
                for name, code, _ in codes(model, trained, batch):
                    moments[name].count(code)
                    unit, strength = _leading(code)
                    leaders[name] += torch.bincount(unit[strength > 0].cpu(), minlength=len(leaders[name]))
                advance(batch.size)
        counts = {name: min(experts, one.layer.num_units) for name, one in trained.items()}
        with progress(f"structure: ranks of {len(trained)} layers", sum(counts.values()), "units") as advance:
            ranks = {name: weight_ranks(one.layer, range(counts[name]), advance) for name, one in trained.items()}
        prompted = leading_units(model, trained, prompts)
    return {
        name: {
            "layer": one.provenance.layer,
            **_mean_and_spread("normalized_rank", ranks[name][0]),
            **_mean_and_spread("stable_rank", ranks[name][1]),
            "deficient": int((ranks[name][0] < 1).sum()),
            "experts": counts[name],
            "shape": list(one.layer.unit_weight(0).shape),
            "tokens": moments[name].tokens,
            "leader": {
                "unit": int(leaders[name].argmax()),
                "share": float(leaders[name].max()) / max(moments[name].tokens, 1),
            },
            "leading": [
                {**row, "units": [{**one, "rate": float(moments[name].rates[one["unit"]])} for one in row["units"]]}
                for row in prompted[name]
            ],
        }
        for name, one in trained.items()
    }


def leading_units(
    model: FrozenModel, trained: Mapping[str, Trained], prompts: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return for each layer and prompt the units with the largest coefficients at the last token (figure 21).

    Returns:
        Name -> for each prompt at whose last token a unit is active ``prompt`` and ``units``: up to three, each with
        its ``strength``, the strongest first.

    Raises:
        MxdError: the model has no tokenizer, or a prompt has no token.
    """
    head = head_ids(model.tokenizer)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in trained}
    for prompt in prompts:
        ids = model.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if not ids:
            raise MxdError(f"the prompt {prompt!r} has no tokens; give it a word.")
        row = np.array([head + ids])
        last = np.arange(row.size)[None] == row.size - 1
        for name, code, _ in codes(model, trained, row, last):
            if units := _strongest(code):
                found[name].append({"prompt": prompt, "units": units})
    return found


def codes(
    model: FrozenModel,
    trained: Mapping[K, Trained],
    batch: Int[np.ndarray, "batch seq"],
    places: Bool[np.ndarray, "batch seq"] | None = None,
) -> Iterator[tuple[K, Code, Int[np.ndarray, " tokens"]]]:
    """Yield each layer's name, its code at the tokens that count, and where these stand in the flattened batch.

    The base model runs once, up to the last of the layers. Tokens that a layer was trained without do not count, nor
    those where its stored constant answers, nor, where ``places`` are given, any others.
    """
    sites = model.record(torch.from_numpy(batch).long(), [one.provenance.layer for one in trained.values()])
    for name, one in trained.items():
        x, y = sites[one.provenance.layer]
        read = one.layer.read(x, y)
        counted = mask_of(batch, one.provenance.masked_ids) & (True if places is None else places)
        counted &= ~one.layer.at_bos(read).cpu().numpy()
        code = one.layer.encode(read[torch.from_numpy(counted).to(read.device)].float())
        yield name, code, np.flatnonzero(counted)


def streamed(
    blocks: Blocks, tokens: int, forward_contexts: int | None = None
) -> Iterator[Int[np.ndarray, "batch seq"]]:
    """Yield batches of contexts until ``tokens`` positions are read or the text ends; nothing is kept.

    Raises:
        MxdError: the text holds no complete context, or ``tokens`` is below 1.
    """
    if tokens < 1:
        raise MxdError(f"tokens is {tokens}; expected at least 1.")
    stream = blocks(0)
    first = next(stream, None)
    if first is None:
        raise MxdError("the evaluation text holds no complete context; give more text or a shorter context.")
    rows = islice(chain([first], stream), -(-tokens // len(first)))
    while piece := list(islice(rows, forward_contexts or max(1, 1024 // len(first)))):
        yield np.stack(piece)


@contextmanager
def evaluating(model: FrozenModel, trained: Mapping[Any, Trained]) -> Iterator[None]:
    """Have layers on the model's device and in evaluation mode for the length of the block.

    Raises:
        MxdError: there are none, or they were trained for another model.
    """
    if not trained:
        raise MxdError("nothing to evaluate: give at least one trained layer.")
    for one in trained.values():
        model.check_layer(one.provenance.layer)
        check_provenance(model, one.provenance.layer, one.provenance)
    modes = [(one.layer.to(model.device), one.layer.training) for one in trained.values()]
    for layer, _ in modes:
        layer.eval()
    try:
        yield
    finally:
        for layer, training in modes:
            layer.train(training)


def _mean_and_spread(name: str, values: Float[Tensor, " units"]) -> dict[str, float]:
    return {name: float(values.mean()), f"{name}_sd": float(values.std(correction=0))}


def _leading(code: Code) -> tuple[Int[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Return for each token the unit with the largest coefficient, and that coefficient."""
    strength, place = code.values.max(-1)
    return code.indices.gather(-1, place.unsqueeze(-1)).squeeze(-1), strength


def _strongest(code: Code) -> list[dict[str, Any]]:
    """Return the active units of a single token with the largest coefficients, the strongest first."""
    strengths, places = code.values[0].topk(min(LEADERS, code.values.shape[-1]))
    found = zip(code.indices[0, places].tolist(), strengths.tolist(), strict=True)
    return [{"unit": unit, "strength": strength} for unit, strength in found if strength > 0]
