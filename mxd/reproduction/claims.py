"""What the MxD paper (arXiv 2505.21364) says of its figures and tables, beside what a reproduction has measured.

Each claim reads the answers of a run or two and says what it found: the paper's words, ours, the difference, and
whether the claim holds. Where a difference has a standard error, a claim holds only beyond two of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mxd.artifacts.folders import read_layer
from mxd.common.arrays import unpacked
from mxd.common.files import read_json
from mxd.evaluation.walk import Mean
from mxd.layers import ReplacementConfig
from mxd.reproduction.paper import Form, Published

Verdict = Literal["confirmed", "in part", "not confirmed"]

BEYOND = 2.0
"""Standard errors beyond which a difference counts."""


@dataclass(frozen=True)
class Finding:
    """What came out of one claim on one model."""

    paper: str
    """What the paper says."""
    ours: str
    """What was measured here."""
    difference: str
    """How far they are apart."""
    verdict: Verdict


@dataclass(frozen=True)
class Claim:
    """A figure or table of the paper, and how it is looked at."""

    item: str
    """Its number in the paper."""
    experiments: tuple[str, ...]
    """The runs that it is read from."""
    question: str
    """The file of these runs."""
    look: Callable[["Answers", Published | None], Finding | None]
    """Returns what was found; ``None`` where the layers cannot be compared."""
    published: bool = False
    """Whether it is only about models of which the paper states numbers."""


@dataclass(frozen=True)
class Answer:
    """A layer, and what one question found of it."""

    config: ReplacementConfig
    result: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Its method."""
        return self.config.label

    @property
    def k(self) -> int:
        """Its K; 0 where it has none."""
        return int(getattr(self.config.sparsity, "k", 0))

    @property
    def increase(self) -> Mean:
        """The cross-entropy increase of its splice, by context."""
        found = self.result["by_context"]
        return Mean.of(found["ce_increase"], found["tokens"])

    def of_block(self, key: str) -> float:
        """Return a number of its reconstruction."""
        return float(next(iter(self.result["blocks"].values()))[key])


class Answers(list[Answer]):
    """What a question found of a run's layers."""

    @staticmethod
    def read(run: Path, question: str) -> "Answers":
        """Return what is in a run's folder; names that are no layers of it (the base MLP's neurons) are left out.

        Raises:
            MxdError: the file or a layer is damaged.
        """
        file = run / f"{question}.json"
        results = read_json(file, unpacked)["results"] if file.is_file() else {}
        folders = {name: run / name.rpartition("/")[2] for name in results}
        return Answers(
            Answer(read_layer(folder)[0], results[name])
            for name, folder in folders.items()
            if (folder / "config.json").is_file()
        )

    def labelled(self, *labels: str) -> "Answers":
        """Return those of some methods, by K."""
        return Answers(sorted((a for a in self if a.label in labels), key=lambda answer: answer.k))

    def kind(self, kind: str) -> "Answers":
        """Return those of one kind of sparsity."""
        return Answers(answer for answer in self if answer.config.sparsity.kind == kind)

    def by_k(self) -> Iterator[tuple[int, "Answers"]]:
        """Yield each K with its answers."""
        for k in sorted({answer.k for answer in self}):
            yield k, Answers(answer for answer in self if answer.k == k)


def judged(holds: int, of: int) -> Verdict:
    """Return the verdict where a claim holds in some of several cases."""
    return "confirmed" if holds == of else "in part" if holds else "not confirmed"


def lower_cross_entropy(answers: Answers, _: Published | None) -> Finding | None:
    """Figures 3 and 11: is MxD's cross-entropy the lowest at every K? Differences are taken on the same contexts."""
    gaps: list[tuple[int, Mean]] = []
    for k, found in answers.by_k():
        ours, others = found.labelled("MxD"), found.labelled("TC", "STC")
        if ours and others:
            best = min(others, key=lambda answer: answer.increase.value)
            gaps.append((k, ours[0].increase.less(best.increase)))
    if not gaps:
        return None
    below, above = ([k for k, gap in gaps if sign * gap.value > BEYOND * gap.standard_error] for sign in (-1, 1))
    shown = ", ".join(f"K = {k}: {gap.value:+.4f} ± {gap.standard_error:.4f}" for k, gap in gaps)
    return Finding(
        "below both transcoders at every K",
        f"below at {len(below)}, above at {len(above)} of {len(gaps)} K",
        f"nats beside the better transcoder: {shown}",
        judged(len(below), len(gaps)),
    )


def lower_error(answers: Answers, _: Published | None) -> Finding | None:
    """Figure 10: how many times a transcoder's normalized MSE is MxD's, at the smallest K?"""
    for k, found in answers.by_k():
        ours, other = found.labelled("MxD"), found.labelled("TC")
        if ours and other:
            ratio = other[0].of_block("normalized_mse") / ours[0].of_block("normalized_mse")
            return Finding(
                "a transcoder's NMSE is up to 10 x MxD's at the smallest K",
                f"{ratio:.2f} x at K = {k}",
                f"{ratio / 10:.2f} of the paper's",
                "confirmed" if ratio >= 5 else "in part" if ratio > 1 else "not confirmed",
            )
    return None


def same_words(answers: Answers, _: Published | None) -> Finding | None:
    """Figures 6 and 7: does MxD write longest what the base model writes, at each K?"""
    ahead, gaps = 0, []
    for k, found in answers.by_k():
        ours, others = found.labelled("MxD"), found.labelled("TC", "STC")
        if ours and others:
            best = max(others, key=lambda answer: answer.result["agreed_tokens"]).result
            gap = ours[0].result["agreed_tokens"] - best["agreed_tokens"]
            error = float(np.hypot(ours[0].result["agreed_tokens_se"], best["agreed_tokens_se"]))
            ahead += gap > BEYOND * error
            gaps.append(f"K = {k}: {gap:+.1f} ± {error:.1f}")
    if not gaps:
        return None
    return Finding(
        "MxD agrees longest with the base model",
        f"longest at {ahead} of {len(gaps)} K",
        f"tokens beside the better transcoder: {', '.join(gaps)}",
        judged(ahead, len(gaps)),
    )


def sizes(answers: Answers, published: Published | None) -> Finding | None:
    """Table 2: units and parameters, where the paper states them."""
    if published is None or not answers:
        return None
    forms: dict[str, Form] = {"TC": published.tc, "STC": published.stc, "MxD": published.mxd}
    found = {answer.label: answer.config for answer in answers}
    pairs = [(found[label], form) for label, form in forms.items() if label in found]
    same = sum(config.num_units == form.units for config, form in pairs)
    off = max(abs(config.num_params / 1e6 / form.millions - 1) for config, form in pairs)
    return Finding(
        ", ".join(f"{label} {form.units:,}" for label, form in forms.items()),
        ", ".join(f"{label} {config.num_units:,}" for label, config in found.items()),
        f"units of {same} of {len(pairs)} the same; parameters within {off:.1%}",
        judged(same, len(pairs)),
    )


def full_rank(answers: Answers, published: Published | None) -> Finding | None:
    """Table 3: the mean normalized rank of MxD's experts, at K = 32 or the nearest."""
    ours = sorted(answers.labelled("MxD"), key=lambda answer: abs(answer.k - 32))
    if not ours:
        return None
    found, expected = ours[0].result, published.rank if published else 0.99
    rank = found["normalized_rank"]
    return Finding(
        f"{expected:.2f}",
        f"{rank:.4f} ± {found['normalized_rank_sd']:.4f} (s.d.), stable rank {found['stable_rank']:.1f}",
        f"{rank - expected:+.4f}",
        "confirmed" if rank >= expected - 0.005 else "not confirmed",
    )


def balanced(answers: Answers, _: Published | None) -> Finding | None:
    """Figure 20: are MxD's experts as balanced as a transcoder's features? By the share that never fires."""
    dead = {
        (answer.label, answer.k): answer.result["dead"] / len(answer.result["rates"])
        for answer in answers.labelled("MxD", "TC")
    }
    pairs = [(k, share, dead["TC", k]) for (label, k), share in dead.items() if label == "MxD" and ("TC", k) in dead]
    if not pairs:
        return None
    return Finding(
        "as balanced as transcoders' features",
        "dead, MxD and TC: " + ", ".join(f"K = {k}: {ours:.0%}, {other:.0%}" for k, ours, other in pairs),
        f"{max(ours - other for _, ours, other in pairs):+.0%} at most",
        judged(sum(ours <= other + 0.05 for _, ours, other in pairs), len(pairs)),
    )


def rank_matters(answers: Answers, _: Published | None) -> Finding | None:
    """Figure 12: does cross-entropy fall with the rank of the experts, of muMoEs and from the highest to MxD's?"""
    low = sorted(answers.labelled("CP-muMoE"), key=lambda answer: getattr(answer.config, "rank", 0) or 0)
    ours = answers.labelled("MxD")
    if len(low) < 2 or not ours:
        return None
    shown = ", ".join(f"R = {getattr(a.config, 'rank', 0)}: {a.increase.value:+.4f}" for a in low)
    gaps = [b.increase.less(a.increase) for a, b in pairwise([*low, ours[0]])]
    falls = sum(gap.value < -BEYOND * gap.standard_error for gap in gaps)
    return Finding(
        "cross-entropy falls with the rank; full rank is best",
        f"{shown}; MxD {ours[0].increase.value:+.4f}",
        f"falls at {falls} of {len(gaps)} steps, the last one from muMoE to MxD",
        judged(falls, len(gaps)),
    )


def topk_beats_l1(answers: Answers, _: Published | None) -> Finding | None:
    """Figure 18: is top-k's cross-entropy below that of ReLU with L1, at the L0 that this has come to?"""
    below, of = 0, 0
    for label in ("MxD", "TC"):
        chosen, penalised = answers.labelled(label).kind("topk"), answers.labelled(label).kind("relu_l1")
        l0 = [answer.of_block("l0") for answer in chosen]
        for answer in penalised if len(l0) > 1 else ():
            if min(l0) <= (own := answer.of_block("l0")) <= max(l0):
                at = np.interp(np.log(own), np.log(l0), [a.increase.value for a in chosen])
                below, of = below + int(at < answer.increase.value), of + 1
    if not of:
        return None
    return Finding(
        "top-k is below L1 at every sparsity",
        f"below at {below} of {of} layers with L1",
        "L1's layers beyond the range of K are left out",
        judged(below, of),
    )


def encoder_form(answers: Answers, _: Published | None) -> Finding | None:
    """Figure 19: is the base model's activation at least as good as ReLU? And what does a gated encoder do?"""
    error = {
        (getattr(a.config, "activation", None), getattr(a.config, "glu", None)): a.of_block("normalized_mse")
        for a in answers
    }
    relu = {glu: value for (activation, glu), value in error.items() if activation == "relu"}
    smooth = {(name, glu): value for (name, glu), value in error.items() if name != "relu"}
    if not relu or not smooth:
        return None
    wins = sum(value <= relu[glu] for (_, glu), value in smooth.items())
    shown = ", ".join(f"{name}{' GLU' if glu else ''} {value:.4f}" for (name, glu), value in error.items())
    return Finding(
        "GELU's error is below ReLU's", shown, f"below ReLU in {wins} of {len(smooth)} pairs", judged(wins, len(smooth))
    )


def no_shared_expert(answers: Answers, _: Published | None) -> Finding | None:
    """Figure 21: does random K end the lead of one expert? By the share of tokens that the most frequent one leads."""
    fixed, drawn = answers.kind("topk"), answers.kind("random_k")
    if not fixed or not drawn:
        return None
    before, after = (found[0].result["leader"]["share"] for found in (fixed, drawn))
    return Finding(
        "one expert leads every token; with random K none does",
        f"leads {before:.0%} of the tokens; with random K {after:.0%}",
        f"{after - before:+.0%}",
        "confirmed" if before > 0.5 and after < 0.5 else "in part" if after < before else "not confirmed",
    )


def random_k_costs_little(answers: Answers, _: Published | None) -> Finding | None:
    """Figure 22: is the error with random K comparable?"""
    fixed, drawn = answers.kind("topk"), answers.kind("random_k")
    if not fixed or not drawn:
        return None
    ratio = drawn[0].of_block("normalized_mse") / fixed[0].of_block("normalized_mse")
    return Finding(
        "comparable", f"NMSE {ratio:.2f} x", f"{ratio - 1:+.0%}", "confirmed" if ratio < 1.1 else "not confirmed"
    )


def probes(answers: Answers, _: Published | None) -> Finding | None:
    """Figures 4, 13 and 16: is a single MxD expert as good a probe as a feature, and better than an autoencoder's?"""
    best: dict[str, dict[str, float]] = {}
    for answer in answers.labelled("MxD", "TC", "STC", "SAE"):
        for name, found in answer.result.items():
            scores = best.setdefault(name, {})
            scores[answer.label] = max(scores.get(answer.label, 0.0), found["mean_f1"])
    both = {name: scores for name, scores in best.items() if {"MxD", "TC", "SAE"} <= scores.keys()}
    if not both:
        return None
    close = sum(scores["MxD"] >= max(scores["TC"] - 0.02, scores["SAE"]) for scores in both.values())
    shown = "; ".join(
        f"{name}: " + ", ".join(f"{k} {v:.3f}" for k, v in scores.items()) for name, scores in both.items()
    )
    return Finding(
        "MxD's best F1 is competitive with transcoders', above autoencoders'",
        shown,
        f"at most 0.02 behind TC and not behind SAE on {close} of {len(both)} sets",
        judged(close, len(both)),
    )


CLAIMS: Sequence[Claim] = (
    Claim("figure 3", ("main",), "faithfulness", lower_cross_entropy),
    Claim("figure 11", ("other-block",), "faithfulness", lower_cross_entropy),
    Claim("figure 10", ("main",), "faithfulness", lower_error),
    Claim("figures 6, 7", ("main",), "generation", same_words),
    Claim("figures 4, 13, 16", ("main", "autoencoder"), "probing", probes),
    Claim("figure 12", ("rank",), "faithfulness", rank_matters),
    Claim("figure 18", ("sparsity",), "faithfulness", topk_beats_l1),
    Claim("figure 19", ("encoder",), "faithfulness", encoder_form),
    Claim("figure 20", ("main",), "units", balanced),
    Claim("figure 21", ("random-k",), "structure", no_shared_expert),
    Claim("figure 22", ("random-k",), "faithfulness", random_k_costs_little),
    Claim("table 2", ("main",), "faithfulness", sizes, published=True),
    Claim("table 3", ("main",), "structure", full_rank),
)
