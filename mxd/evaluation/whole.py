"""Is the model still the model with all of a set's blocks replaced? Errors by number of blocks and block by block.

A layer that is faithful alone may not be in a model whose other MLPs are replaced, too: it then reads inputs that it
was not trained on, and errors add up, or compound. So for each set there are, over the same text and in one pass of
the base model:

- the splice of all its blocks, at every position and around special tokens;
- splices of 1, 2, 4 ... of them, from the bottom, from the top, and in random orders;
- each block replaced alone, and all blocks but one: what leaving it out wins back;
- each layer's reconstruction and account on the base model's inputs, and on those of the spliced model, where the base
  MLP on the same inputs is the target;
- continuations, with what tells garbage from text.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mxd.common.errors import MxdError
from mxd.common.numbers import plural
from mxd.common.progress import Advance, progress
from mxd.data.contexts import Contexts, counted_positions
from mxd.evaluation.checkpoints import Subject, describe
from mxd.evaluation.faithfulness import (
    BasePrediction,
    Prediction,
    Reconstruction,
    Way,
    Ways,
    ids_of,
    positions,
    site_at,
    special,
)
from mxd.evaluation.garbage import ce_of_added, signs
from mxd.evaluation.generation import evaluate_generation, openings, prompts
from mxd.evaluation.orders import ORDERS, numbers_replaced, orders
from mxd.evaluation.walk import Mean, Sets, evaluation_mode, next_token_logits, streamed
from mxd.model.frozen import FrozenModel
from mxd.questions import DEFAULTS, GenerationConfig, WholeConfig
from mxd.splice import Replacement, Splice

EXAMPLES = 10
"""Prompts whose continuations are kept."""

Blocks = frozenset[int]
"""The blocks that a splice replaces."""
Below = Mapping[int, Any]
"""Block number -> what the block below it returned for a batch."""


def answer(subject: Subject, how: WholeConfig = DEFAULTS.whole, batch: int = 32) -> dict[str, Any]:
    """Measure what checkpoints do together, a set at a time (``Subject.sets``).

    Args:
        subject: the checkpoints.
        how: how much text is read, how many orders are drawn, which prompts are continued.
        batch: prompts in one forward.

    Returns:
        The numbers of ``evaluate_whole``, and those of ``evaluate_continuations`` under ``generation``, with everything
        they depend on.

    Raises:
        MxdError: as ``Subject.sets``, ``prompts``, ``evaluate_whole`` and ``evaluate_generation``.
    """
    sets, tokenizer = subject.sets(together=True), subject.base.tokenizer
    asked = GenerationConfig(limit=how.limit, words=how.words)
    ids = prompts(openings(subject.texts(), how.limit, how.seed), tokenizer, asked, subject.text.bos)
    results = evaluate_whole(subject.base, sets, subject.contexts(how.seed), how)
    for name, found in evaluate_continuations(subject.base, sets, ids, how.new_tokens, batch).items():
        for example in found["examples"]:
            example["prompt_text"] = tokenizer.decode(example["prompt"], skip_special_tokens=True)
            for key in ("base", "spliced"):
                example[f"{key}_tokens"] = [tokenizer.decode([token]) for token in example[key]]
        results[name]["generation"] = found
    for name, members in sets.items():
        results[name]["replacements"] = [describe(trained) for trained in members.values()]
        results[name]["params"] = sum(trained.layer.config.num_params for trained in members.values())
    return subject.document(results, asked=how.model_dump())


@torch.no_grad()
def evaluate_continuations(
    model: FrozenModel, sets: Sets, prompts: Sequence[Sequence[int]], new_tokens: int, batch: int
) -> dict[str, dict[str, Any]]:
    """Continue prompts with all of each set's blocks replaced.

    Arguments, results and errors as ``evaluate_generation``, whose ``examples`` are ten here.

    Returns:
        Name -> also ``garbage`` and ``garbage_base``: what tells garbage from text (``signs``), of the spliced model's
        continuations and of the base model's own.
    """
    found = evaluate_generation(model, sets, prompts, new_tokens, batch, examples=len(prompts))
    base = torch.tensor([example["base"] for example in next(iter(found.values()))["examples"]])
    own = signs(base, ce_of_added(model, prompts, base, batch))
    for result in found.values():
        added = torch.tensor([example["spliced"] for example in result["examples"]])
        result["garbage"] = signs(added, ce_of_added(model, prompts, added, batch))
        result["garbage_base"] = own
        result["examples"] = result["examples"][:EXAMPLES]
    return found


class MeasuredWhole:
    """What is measured of one set; constructing it runs every check of its splices."""

    def __init__(
        self,
        model: FrozenModel,
        replacements: Mapping[int, Replacement],
        excluded: Sequence[int],
        how: WholeConfig,
        parts: bool = True,
    ) -> None:
        self.parts = parts
        whole = Ways(model, replacements, excluded)
        self.whole, self.around = whole.full, whole.around
        self.layers = self.whole.splice.layers
        self.blocks = sorted(self.layers)
        self.orders = orders(self.blocks, how.draws, how.seed)
        self.on_base, self.on_spliced = (
            {number: Reconstruction.of(layer) for number, layer in self.layers.items()} for _ in range(2)
        )
        self.ways = {frozenset(self.blocks): self.whole}
        for blocks in self._asked():  # one splice, however many questions it answers
            if blocks and blocks not in self.ways:
                part = {number: self.layers[number] for number in blocks}
                self.ways[blocks] = Way(Splice(model, part), Prediction())

    def _asked(self) -> Iterator[Blocks]:
        """Yield every choice of blocks that is replaced."""
        if not self.parts:
            return
        for number in self.blocks:
            yield frozenset([number])
            yield self._without(number)
        for drawn in self.orders.values():
            for order in drawn:
                yield from (frozenset(order[:n]) for n in numbers_replaced(len(order)))

    def _without(self, number: int) -> Blocks:
        return frozenset(self.blocks) - {number}

    @property
    def all_ways(self) -> list[Way]:
        """Every splice that is run, each once."""
        return [*self.ways.values(), *([] if self.around is self.whole else [self.around])]

    def start(self, way: Way, below: Below, spliced_below: Below) -> tuple[int, Below]:
        """Return the first block that a splice has to run, and the hidden states that it begins with.

        Args:
            way: one of ``all_ways``.
            below: block -> what the block below it returned in the base model.
            spliced_below: the same with all of the set spliced in.
        """
        lowest, blocks = min(way.splice.layers), way.splice.layers.keys()
        differs = next((number for number in self.blocks if number not in blocks), self.blocks[-1])
        if way is self.around or differs <= lowest:  # around special tokens nothing is as in the whole splice
            return lowest, below
        return differs, spliced_below

    def report(self, base: Mean) -> dict[str, Any]:
        """Return the metrics, given the base model's cross-entropy over the same tokens."""
        increase = self.whole.prediction.increase
        found = {
            "tokens": sum(base.counts),
            "contexts": len(base.counts),
            "ce_base": base.value,
            "ce_base_se": base.standard_error,
            **self.whole.prediction.report(),
            "around_special": self.around.prediction.report(),
            "by_context": {"tokens": base.counts, "ce_increase": increase.by_context},
            "blocks": {str(number): self._block(number) for number in self.blocks},
        }
        if not self.parts:
            return found
        alone = Mean.sum([self.ways[frozenset([number])].prediction.increase for number in self.blocks])
        return found | {
            "alone_sum": alone.value,
            "alone_sum_se": alone.standard_error,
            "by_number": self._by_number(),
        }

    def _by_number(self) -> dict[str, Any]:
        """Return for each order its blocks, and what replacing the first 1, 2, 4 ... of them does."""
        numbers = numbers_replaced(len(self.blocks))
        found: dict[str, Any] = {"numbers": numbers}
        for order in ORDERS:
            drawn = self.orders[order]
            reports = [[self.ways[frozenset(one[:n])].prediction.report() for one in drawn] for n in numbers]
            found[order] = {"orders": drawn, "points": [_over_draws(draws) for draws in reports]}
        return found

    def _block(self, number: int) -> dict[str, Any]:
        """Return what one block's layer does: to its MLP's output, alone in the model, and among the others."""
        found = self.on_base[number].report() | {"spliced": self.on_spliced[number].report()}
        if not self.parts:
            return found
        found["alone"] = self.ways[frozenset([number])].prediction.report()
        if rest := self._without(number):
            without = self.ways[rest].prediction
            won_back = self.whole.prediction.increase.less(without.increase)
            errors = {"won_back": won_back.value, "won_back_se": won_back.standard_error}
            found["without"] = without.report() | errors
        return found


def _over_draws(draws: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the mean of some drawn orders' metrics; of a single one these, with their standard errors."""
    if len(draws) == 1:
        return dict(draws[0])
    increases = [draw["ce_increase"] for draw in draws]
    means = {key: float(np.mean([draw[key] for draw in draws])) for key in ("ce_increase", "kl", "top1_agreement")}
    return means | {"low": min(increases), "high": max(increases), "drawn": increases}


@torch.no_grad()
def evaluate_whole(
    model: FrozenModel,
    sets: Sets,
    contexts: Contexts,
    how: WholeConfig = DEFAULTS.whole,
    excluded: Sequence[int] | None = None,
    forward_contexts: int | None = None,
    parts: bool = True,
) -> dict[str, dict[str, Any]]:
    """Measure what each set does to the model's predictions, all at once and in parts.

    Args:
        model: the frozen base model.
        sets: name -> what is spliced in together.
        contexts: the text, in a fixed order.
        how: how much of it is read, and how many orders of blocks are drawn.
        excluded: tokens that count neither as targets nor in reconstruction; the tokenizer's special ones by default.
        forward_contexts: contexts in one forward, by default about 1,024 tokens; memory grows with the vocabulary.
        parts: whether parts of a set are replaced, too; without them there is no ``alone_sum``, ``by_number``,
            ``alone`` and ``without``.

    Returns:
        Name -> of the splice of all blocks ``ce_spliced``, ``ce_increase``, ``kl``, ``top1_agreement`` with ``*_se``,
        ``around_special`` and ``by_context`` as in ``evaluate``; ``alone_sum``, what the blocks add alone, in sum;
        under ``by_number`` the ``numbers`` of blocks, and for each order its blocks and metrics at these, of several
        drawn ones the mean with ``low`` and ``high``; and under ``blocks`` for each its reconstruction and account on
        the base model's inputs, the same under ``spliced`` on the spliced model's, its metrics ``alone``, and those of
        all blocks ``without`` it, where ``won_back`` is by how much the CE increase is smaller.

    Raises:
        MxdError: no text, no sets, or replacements that do not fit the model.
    """
    ids = tuple(special(model) if excluded is None else excluded)
    batches = list(streamed(contexts, how.tokens, forward_contexts))
    if not sets or not all(sets.values()):
        raise MxdError("nothing to evaluate: give at least one replacement in each set.")
    measured = {name: MeasuredWhole(model, replacements, ids, how, parts) for name, replacements in sets.items()}
    modules = [layer for member in measured.values() for layer in member.layers.values()]
    splices = sum(len(member.all_ways) for member in measured.values())
    total = (2 + 2 * len(measured) + splices) * sum(batch.size for batch in batches)
    with (
        evaluation_mode(modules, model.device),
        progress(f"evaluating {plural(splices, 'splice')}", total, "tokens through the model") as advance,
    ):
        _first_pass(model, measured.values(), batches, ids, advance)
        base = _second_pass(model, measured.values(), batches, ids, advance)
        return {name: member.report(base) | {"excluded": list(ids)} for name, member in measured.items()}


def _first_pass(
    model: FrozenModel,
    sets: Collection[MeasuredWhole],
    batches: Sequence[Int[np.ndarray, "_ seq"]],
    excluded: Sequence[int],
    advance: Advance,
) -> None:
    """Show the means of all inputs to the accounts of all replacements."""
    count = 0
    for batch in batches:
        counted = counted_positions(batch, excluded)
        count += int(counted.sum())
        at = positions(counted, model.device)
        sites = model.record(ids_of(batch), _blocks(sets))
        advance(batch.size)
        for member in sets:
            for number, reconstruction in member.on_base.items():
                reconstruction.see_means(*site_at(sites[number], at))
            for number, site in _spliced_sites(member, ids_of(batch)):
                member.on_spliced[number].see_means(*site_at(site, at))
            advance(batch.size)
    if not count:
        raise MxdError("every token of the evaluation text is excluded; check the excluded tokens and the text.")


def _second_pass(
    model: FrozenModel,
    sets: Collection[MeasuredWhole],
    batches: Sequence[Int[np.ndarray, "_ seq"]],
    excluded: Sequence[int],
    advance: Advance,
) -> Mean:
    """Run every splice beside the base model, whose cross-entropy is returned."""
    base_ce = Mean()
    for batch in batches:
        ids = ids_of(batch).to(model.device)
        mask = counted_positions(batch, excluded)
        counted, at = torch.from_numpy(mask).to(model.device), positions(mask, model.device)
        with model.block_outputs(_blocks(sets)) as below, model.watched(_blocks(sets)) as sites:
            base = BasePrediction.of(model.logits(ids)[:, :-1], ids[:, 1:], counted[:, 1:])
        base_ce.see(base.ce, base.counted)
        advance(batch.size)
        for member in sets:
            for number, reconstruction in member.on_base.items():
                reconstruction.see(*site_at(sites[number], at))
            with model.block_outputs(member.blocks) as spliced_below:
                for number, site in _spliced_sites(member, ids):
                    member.on_spliced[number].see(*site_at(site, at))
            advance(batch.size)
            for way in member.all_ways:
                start, hidden = member.start(way, below, spliced_below)
                way.prediction.see(base, next_token_logits(way.splice, ids, hidden, start))
                advance(batch.size)
    return base_ce


def _blocks(sets: Iterable[MeasuredWhole]) -> list[int]:
    """Return every block that one of the sets replaces."""
    return sorted({number for member in sets for number in member.blocks})


def _spliced_sites(
    member: MeasuredWhole, ids: Int[Tensor, "batch seq"]
) -> Iterator[tuple[int, tuple[Float[Tensor, "batch seq d_in"], Float[Tensor, "batch seq d_out"]]]]:
    """Yield each block, what its layer reads where all blocks are replaced, and the base MLP's output for that."""
    splice = member.whole.splice
    with splice.entered():
        inputs = {number: x for number, (x, _) in splice.model.record(ids, member.blocks).items()}
    for number, x in inputs.items():
        yield number, (x, splice.model.mlp(number)(x))
