"""What else does a mask change? Held-out text, continuations and tasks under each mask, beside its control.

All of it is compared with the same splice with no unit masked, on the same text, so what the splice itself costs is not
counted as the mask's. After Monet (ICLR 2025, 5.1 and 5.3): accuracies by domain, and what is left of helpfulness.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from mxd.common.numbers import plural
from mxd.common.progress import progress
from mxd.data.contexts import Contexts, counted_positions
from mxd.evaluation.checkpoints import Subject
from mxd.evaluation.faithfulness import BasePrediction, Prediction, ids_of, special
from mxd.evaluation.garbage import repeated_share
from mxd.evaluation.generation import greedy
from mxd.evaluation.generation import prompts as opening_words
from mxd.evaluation.harness import Tasks, find_tasks, outcomes
from mxd.evaluation.masks import Ablation, Texts, masked_splice, matrices
from mxd.evaluation.task_domains import accuracy, by_domain, difference, read_groups
from mxd.evaluation.walk import Mean, TrainedSets, next_token_logits, streamed
from mxd.model.frozen import FrozenModel
from mxd.questions import GenerationConfig, UnderMaskConfig
from mxd.splice import Splice

V = TypeVar("V")

Which = Literal["unmasked", "masked", "control"]
Key = tuple[str, Which, int]
"""One way of running the model: a set, with no unit masked, under one of the masks, or under its control."""

EXAMPLES = 3
"""Prompts of a mask whose continuations are kept."""


@dataclass(frozen=True)
class Masked:
    """Sets of replacements with their masks, and the texts that these were made for: what is measured under masks."""

    model: FrozenModel
    sets: TrainedSets
    ablations: Mapping[str, Ablation]
    """Name of a set -> its masks."""
    masks: Sequence[str]
    """What the masks are called; a mask's own domain is the one of its name."""
    groups: Sequence[str]
    """What the groups of texts are called."""
    begun: Sequence[Sequence[Sequence[int]]]
    """The prompts of each group of texts (``UnderMask.prompts``)."""

    def ways(self) -> Iterator[tuple[Key, Splice]]:
        """Yield all ways of running the model; an empty mask changes nothing and is left out."""
        for name, members in self.sets.items():
            plain = Splice(self.model, members, check=False)
            yield (name, "unmasked", 0), plain
            which: tuple[Which, ...] = ("masked", "control")
            for kind, masks in zip(which, (self.ablations[name].masks, self.ablations[name].random), strict=True):
                for number, mask in enumerate(masks):
                    if (splice := masked_splice(plain, mask)) is not None:
                        yield (name, kind, number), splice

    def by_which(self, found: Mapping[Any, V], name: str) -> dict[Which, list[V]]:
        """Return what was found of a set, in order; of an empty mask what was found with no unit masked.

        Args:
            found: by way of running the model.
            name: the set's.
        """
        plain, numbers = found[name, "unmasked", 0], range(len(self.masks))
        masked = [found.get((name, "masked", number), plain) for number in numbers]
        control = [found.get((name, "control", number), plain) for number in numbers]
        return {"unmasked": [plain], "masked": masked, "control": control}


@runtime_checkable
class Beside(Protocol):
    """Anything that is measured under masks beside the losses of the texts; ``UnderMask`` says what its methods do."""

    def prompts(
        self, model: FrozenModel, text: Texts, texts: Sequence[str], groups: Sequence[str], bos: bool
    ) -> list[list[list[int]]]:
        """As ``UnderMask.prompts``."""

    def measure(self, masked: Masked) -> dict[str, dict[str, Any]]:
        """As ``UnderMask.measure``."""


@dataclass(frozen=True)
class UnderMask:
    """What is measured under masks, with what that needs; everything was looked up before anything is measured."""

    how: UnderMaskConfig
    contexts: Contexts
    tasks: Tasks | None
    groups: dict[str, str] | None
    """Task -> domain."""

    @classmethod
    def of(cls, subject: Subject, how: UnderMaskConfig, seed: int) -> "UnderMask":
        """Look up what a config names.

        Args:
            subject: the checkpoints, with the held-out text.
            how: what is asked.
            seed: draws the order of the text.

        Raises:
            MxdError: as ``find_tasks`` and ``read_groups``.
        """
        asked = how.lm_eval
        tasks = None if asked is None else find_tasks(asked.tasks, asked.limit, asked.include)
        groups = None if asked is None or asked.groups is None else read_groups(asked.groups)
        return cls(how, subject.contexts(seed), tasks, groups)

    def prompts(
        self, model: FrozenModel, text: Texts, texts: Sequence[str], groups: Sequence[str], bos: bool
    ) -> list[list[list[int]]]:
        """Return the first words of the measured texts of each group, as token ids; none where nothing is continued.

        Args:
            model: the frozen base model.
            text: which texts are measured.
            texts: all texts.
            groups: what the groups of texts are called.
            bos: begin prompts with BOS where the tokenizer has one.

        Raises:
            MxdError: a group without a text of so many words.
        """
        if "generation" not in self.how.then:
            return []
        how = GenerationConfig(limit=self.how.prompts, words=self.how.words, tokens=self.how.new_tokens)
        measured = [[n for n in text.measuring if text.groups[n] == group] for group in range(len(groups))]
        return [opening_words((texts[n] for n in numbers), model.tokenizer, how, bos) for numbers in measured]

    @torch.no_grad()
    def measure(self, masked: Masked) -> dict[str, dict[str, Any]]:
        """Measure what was asked under each mask of each set.

        Returns:
            Name -> ``faithfulness``, ``generation`` and ``tasks``, as far as they were asked for.

        Raises:
            MxdError: as ``streamed`` and ``outcomes``.
        """
        model, splices = masked.model, dict(masked.ways())
        found: dict[str, dict[str, Any]] = {name: {} for name in masked.sets}
        if "faithfulness" in self.how.then:
            predictions = self._predictions(model, splices)
            for name, parts in found.items():
                parts["faithfulness"] = _faithfulness(masked.by_which(predictions, name))
        if "generation" in self.how.then:
            added = self._continuations(model, splices, [row for rows in masked.begun for row in rows])
            for name, parts in found.items():
                parts["generation"] = _generation(masked, masked.by_which(added, name))
        if self.tasks is not None and self.how.lm_eval is not None:
            base: dict[Any, Splice | None] = {None: None}
            scored = outcomes(model, base | splices, self.tasks, self.how.lm_eval.metric)
            domains = by_domain(list(scored[None]), self.groups, masked.masks)
            about = {"version": self.tasks.version, "limit": self.tasks.limit, "metric": self.how.lm_eval.metric}
            for name, parts in found.items():
                right = masked.by_which(scored, name)
                parts["tasks"] = about | _tasks(domains, scored[None], right, masked.masks)
        return found

    def _predictions(self, model: FrozenModel, splices: Mapping[Key, Splice]) -> dict[Key, Prediction]:
        """Return what each way predicts on held-out text, compared with the base model."""
        found = {key: Prediction() for key in splices}
        lowest, excluded = sorted({min(splice.layers) for splice in splices.values()}), special(model)
        total = self.how.tokens * (1 + len(splices))
        title = f"held-out text under {plural(len(splices), 'mask')}"
        with progress(title, total, "tokens through the model") as advance:
            for batch in streamed(self.contexts, self.how.tokens):
                ids = ids_of(batch).to(model.device)
                counted = torch.from_numpy(counted_positions(batch, excluded)).to(model.device)
                with model.block_outputs(lowest) as below:
                    base = BasePrediction.of(model.logits(ids)[:, :-1], ids[:, 1:], counted[:, 1:])
                advance(batch.size)
                for key, splice in splices.items():
                    found[key].see(base, next_token_logits(splice, ids, below))
                    advance(batch.size)
        return found

    def _continuations(
        self, model: FrozenModel, splices: Mapping[Key, Splice], prompts: Sequence[Sequence[int]]
    ) -> dict[Key, Int[Tensor, "prompts n"]]:
        """Return what each way writes."""
        found = {}
        with progress(
            f"generating under {plural(len(splices), 'mask')}", len(splices) * len(prompts), "prompts"
        ) as advance:
            for key, splice in splices.items():
                with splice.entered():
                    found[key] = greedy(model, prompts, self.how.new_tokens)
                advance(len(prompts))
        return found


def _faithfulness(predictions: Mapping[Which, Sequence[Prediction]]) -> dict[str, Any]:
    """Return the numbers of held-out text: with no unit masked, and for each mask what it adds to the loss."""
    (plain,) = predictions["unmasked"]
    found: dict[str, Any] = {"targets": sum(plain.ce.counts), "unmasked": plain.report()}
    which: tuple[Which, ...] = ("masked", "control")
    for kind in which:
        added = [prediction.increase.less(plain.increase) for prediction in predictions[kind]]
        found[kind] = [
            prediction.report() | {"added": mean.value, "added_se": mean.standard_error}
            for prediction, mean in zip(predictions[kind], added, strict=True)
        ]
    return found


def _generation(masked: Masked, added: Mapping[Which, Sequence[Int[Tensor, "prompts n"]]]) -> dict[str, Any]:
    """Return how many tokens each mask leaves as they were, by group of prompts, and the first continuations."""
    (plain,) = added["unmasked"]
    begun, groups = masked.begun, masked.groups
    group_of = [group for group, rows in enumerate(begun) for _ in rows]
    prompts = [row for rows in begun for row in rows]
    agreed = {kind: [_agreed(plain, rows, group_of, len(begun)) for rows in added[kind]] for kind in added}
    shown = []
    for mask, rows in zip(masked.masks, added["masked"], strict=True):
        own = groups.index(mask) if mask in groups else len(groups) - 1  # of scores the high ones
        shown.append(examples(masked.model, prompts, plain, rows, [n for n, g in enumerate(group_of) if g == own]))
    return {
        "new_tokens": plain.shape[1],
        "prompts": [len(rows) for rows in begun],
        "columns": list(groups),
        **matrices(masked.masks, groups, agreed["masked"], agreed["control"]),
        "repeated": _repeated(plain),
        "repeated_masked": [_repeated(rows) for rows in added["masked"]],
        "repeated_control": [_repeated(rows) for rows in added["control"]],
        "examples": shown,
    }


def _agreed(plain: Tensor, rows: Tensor, group_of: Sequence[int], groups: int) -> list[Mean]:
    """Return the mean number of tokens before the first difference, by group."""
    tokens = (plain == rows).cumprod(-1).sum(-1).double().tolist()
    of = [[n for number, n in zip(group_of, tokens, strict=True) if number == group] for group in range(groups)]
    return [Mean.of(each, [1] * len(each)) for each in of]


def _repeated(rows: Tensor) -> float:
    return float(np.mean([repeated_share(row) for row in rows.tolist()]))


def examples(
    model: FrozenModel, prompts: Sequence[Sequence[int]], plain: Tensor, rows: Tensor, numbers: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the first of some continuations, with and without a mask.

    Args:
        model: the frozen base model.
        prompts: token ids of all prompts.
        plain: their continuations without the mask.
        rows: their continuations under it.
        numbers: which of them may be shown.
    """
    tokenizer: Any = model.tokenizer
    found = []
    for n in numbers[:EXAMPLES]:
        texts = {
            "prompt_text": tokenizer.decode(prompts[n], skip_special_tokens=True),
            "base_tokens": [tokenizer.decode([token]) for token in plain[n].tolist()],
            "spliced_tokens": [tokenizer.decode([token]) for token in rows[n].tolist()],
        }
        found.append({"prompt": list(prompts[n]), "base": plain[n].tolist(), "spliced": rows[n].tolist(), **texts})
    return found


def _tasks(
    domains: Mapping[str, Sequence[str]],
    base: Mapping[str, Any],
    scored: Mapping[Which, Sequence[Mapping[str, Any]]],
    masks: Sequence[str],
) -> dict[str, Any]:
    """Return the accuracy on each domain, and what each mask does to it: Monet's matrix."""
    (plain,) = scored["unmasked"]
    changes = {
        kind: [
            [accuracy(difference(dict(way), dict(plain)), tasks) for tasks in domains.values()] for way in scored[kind]
        ]
        for kind in scored
    }
    columns = list(domains)
    found = {
        "columns": columns,
        "tasks": {domain: list(tasks) for domain, tasks in domains.items()},
        "documents": [sum(len(plain[task]) for task in tasks) for tasks in domains.values()],
        "base": [accuracy(dict(base), tasks).value for tasks in domains.values()],
        "unmasked": [accuracy(dict(plain), tasks).value for tasks in domains.values()],
        "base_mean": float(np.mean([base[task].mean() for task in plain])),
        "unmasked_mean": float(np.mean([plain[task].mean() for task in plain])),
        **matrices(masks, columns, changes["masked"], changes["control"]),
    }
    for name, ways_of in (("mean", scored["masked"]), ("control_mean", scored["control"])):
        found[name] = [float(np.mean([way[task].mean() for task in plain])) for way in ways_of]
    return found
