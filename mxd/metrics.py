"""Every number in results: key, name, unit, format, direction and meaning, for tables, cards, pages and docs."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

AROUND = "around_special"
"""The key of what was measured with the base MLP answering at special tokens."""


@dataclass(frozen=True)
class Metric:
    """One number of a result."""

    key: str
    """Its path in the file, names separated by dots, within a result or one of its blocks."""
    title: str
    """What columns are called."""
    form: str
    """How it is printed."""
    says: str
    """What it is."""
    better: Literal["lower", "higher", ""] = ""
    """Which direction is better, where one is."""
    unit: Literal["nats", "share", "units", "tokens", ""] = ""
    """Its unit; empty for a plain number."""
    name: str = ""
    """A longer name for where there is room; the title by default."""
    error: str = ""
    """The path of its standard error."""

    @property
    def label(self) -> str:
        """Its name on an axis, or alone."""
        return (self.name or self.title) + (", nats" if self.unit == "nats" else "")

    @property
    def note(self) -> str:
        """One sentence that explains it."""
        return self.says + (", in nats" if self.unit == "nats" else "")

    def of(self, result: Mapping[str, Any]) -> float | None:
        """Return its value: the result's own, or the mean over its blocks; ``None`` where there is none."""
        value = _at(result, self.key)
        if value is not None:
            return value
        blocks = result.get("blocks", {})
        values = [layer_value for site in blocks.values() if (layer_value := _at(site, self.key)) is not None]
        return sum(values) / len(values) if values else None

    def shown(self, result: Mapping[str, Any]) -> str:
        """Return its value as text: ``n/a`` where it is undefined, ``-`` where it was not measured."""
        value = self.of(result)
        if value is not None:
            return self.form.format(value)
        return "n/a" if self.key in result else "-"

    def with_error(self, result: Mapping[str, Any]) -> str:
        """Return its value as text with its standard error, where it has one that is finite."""
        error = _at(result, self.error) if self.error else None
        known = error is not None and math.isfinite(error)
        return f"{self.shown(result)} ± {self.form.format(error).lstrip('+')}" if known else self.shown(result)


def _at(values: Mapping[str, Any], path: str) -> float | None:
    value: Any = values
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int) else value


# faithfulness.json: is it faithful?

NMSE = Metric(
    "normalized_mse",
    "NMSE",
    "{:.4f}",
    "the training loss on held-out tokens, mean of ||y - y^||² / (||y|| d)",
    "lower",
    name="normalized MSE",
)
FVU = Metric(
    "fvu",
    "FVU",
    "{:.3f}",
    "share of the output's variance that is not explained",
    "lower",
    "share",
    name="fraction of variance unexplained",
)
CE = Metric(
    "ce_spliced",
    "CE",
    "{:.4f}",
    "next-token loss with the replacement at every position",
    "lower",
    "nats",
    name="cross-entropy",
    error="ce_spliced_se",
)
CE_INCREASE = Metric(
    "ce_increase",
    "CE increase",
    "{:+.4f}",
    "what the replacement, at every position, adds to the next-token loss",
    "lower",
    "nats",
    name="cross-entropy increase",
    error="ce_increase_se",
)
CE_INCREASE_SE = Metric(
    "ce_increase_se", "± s.e.", "{:.4f}", "standard error of the CE increase, over contexts", unit="nats"
)
AROUND_SPECIAL = Metric(
    f"{AROUND}.ce_increase",
    "around special",
    "{:+.4f}",
    "CE increase over the same targets when the base MLP still answers at special tokens, and so at attention sinks",
    "lower",
    "nats",
)
RECOVERED = Metric(
    "loss_recovered",
    "recovered",
    "{:.1%}",
    "share of the loss from zero-ablating the MLP that is won back; n/a where that loss is within two standard errors",
    "higher",
    "share",
    name="loss recovered",
)
KL = Metric(
    "kl",
    "KL",
    "{:.4f}",
    "mean KL divergence from the base model's predictions",
    "lower",
    "nats",
    name="KL to the base model",
    error="kl_se",
)
TOP1 = Metric(
    "top1_agreement", "top-1", "{:.1%}", "positions whose most probable token is unchanged", "higher", "share"
)

FAITHFULNESS = (NMSE, FVU, CE, CE_INCREASE, CE_INCREASE_SE, AROUND_SPECIAL, RECOVERED, KL, TOP1)
"""Is it faithful?"""

# faithfulness.json: does it decompose?

L0 = Metric("l0", "L0", "{:.1f}", "units active for a token", unit="units")
DEAD = Metric("dead_share", "dead", "{:.0%}", "units never active on the held-out tokens", "lower", "share")
ROUTED = Metric(
    "routed_share",
    "routed",
    "{:.2f}",
    "energy that routing adds over the output's: 0 for a dense MLP in disguise, about 1 for a transcoder; may exceed 1",
    unit="share",
)
SHARED = Metric(
    "shared_share", "shared", "{:.3f}", "energy left when only the most frequently active unit is kept", unit="share"
)
MEAN_GATE = Metric("nmse_mean_gate", "mean gate", "{:.4f}", "NMSE when every token gets the mean gate")
FIXED = Metric(
    "nmse_fixed_directions",
    "fixed",
    "{:.4f}",
    "NMSE when every unit adds its mean direction in place of the one for this token: NMSE itself for a transcoder, "
    "also for one in disguise",
)
GATE = Metric(
    "gate_share",
    "gate",
    "{:.2f}",
    "share of the output's energy from gates alone, all that a transcoder has",
    unit="share",
)
DENSE = Metric(
    "dense_share",
    "dense",
    "{:.2f}",
    "share from directions under the mean gate, all that a dense MLP has",
    unit="share",
)
INTERACTION = Metric(
    "interaction_share",
    "interaction",
    "{:.3f}",
    "share from gates and directions that change together, what only a mixture of decoders has",
    unit="share",
)
SKIP = Metric("skip_share", "skip", "{:.2f}", "share that is added whatever the units do", unit="share")
STABLE_RANK = Metric(
    "stable_rank",
    "stable rank",
    "{:.1f}",
    "number of directions that carry the energy of a unit's weight, ||W||_F² / ||W||_2², mean over 32 units",
)
EFFECTIVE = Metric(
    "effective_units",
    "eff. units",
    "{:.1f}",
    "number of equally active units that would be as spread as a token's",
    unit="units",
)

DECOMPOSITION = (
    NMSE,
    MEAN_GATE,
    FIXED,
    ROUTED,
    SHARED,
    GATE,
    DENSE,
    INTERACTION,
    SKIP,
    STABLE_RANK,
    EFFECTIVE,
    L0,
    DEAD,
)
"""Does it decompose?"""

# faithfulness.json: what does it cost?

PARAMS = Metric("params", "params", "{:,.0f}", "parameters of the replacement")
ACTIVE_PARAMS = Metric(
    "active_params",
    "active params",
    "{:,.0f}",
    "parameters that a token's output depends on: those that units share, and those of its active units",
)
FLOPS = Metric(
    "flops",
    "FLOPs",
    "{:,.0f}",
    "operations for a token's output, two for each multiply-add, the choice of units included",
)

COST = (PARAMS, ACTIVE_PARAMS, FLOPS, L0)
"""What does it cost?"""

# generation.json

MATCH = Metric(
    "match", "share identical", "{:.1%}", "share of prompts continued identically up to n tokens", "higher", "share"
)
AGREED = Metric(
    "agreed_tokens",
    "tokens agreed",
    "{:.1f}",
    "mean number before the first difference",
    "higher",
    "tokens",
    error="agreed_tokens_se",
)
AGREED_SE = Metric("agreed_tokens_se", "± s.e.", "{:.1f}", "standard error of the tokens agreed", unit="tokens")

GENERATION = (MATCH, AGREED, AGREED_SE)

# whole.json: of all blocks of a set, and for each of them

ALONE_SUM = Metric(
    "alone_sum",
    "sum alone",
    "{:+.4f}",
    "sum of what each block adds alone; where the CE increase is larger, errors compound",
    unit="nats",
    error="alone_sum_se",
)
ALONE = Metric(
    "alone.ce_increase",
    "alone",
    "{:+.4f}",
    "CE increase with this block alone replaced",
    "lower",
    "nats",
    error="alone.ce_increase_se",
)
WON_BACK = Metric(
    "without.won_back",
    "won back",
    "{:+.4f}",
    "by how much the CE increase is smaller where this block alone is not replaced",
    unit="nats",
    error="without.won_back_se",
)
ON_BASE = (NMSE, MEAN_GATE, FIXED, ROUTED, DEAD)
"""What a layer's reconstruction is made of, on the base model's inputs."""
ON_SPLICED = tuple(
    replace(
        metric,
        key=f"spliced.{metric.key}",
        title=f"{metric.title}, spliced",
        says=f"{metric.says}; on the inputs of the model with all blocks replaced, against the base MLP there",
        name="",
    )
    for metric in ON_BASE
)
"""The same on the spliced model's inputs."""
BEFORE_AND_AFTER = (NMSE, MEAN_GATE, FIXED, GATE, DENSE, INTERACTION, DEAD)
"""Does a tuned layer still describe its MLP?"""
WHOLE_AGREED = replace(AGREED, key="generation.agreed_tokens", error="generation.agreed_tokens_se")
REPEATED = Metric(
    "generation.garbage.repeated",
    "repeated",
    "{:.1%}",
    "share of the 4-grams of a continuation that came before in it",
    "lower",
    "share",
    error="generation.garbage.repeated_se",
)
REPEATED_BASE = Metric(
    "generation.garbage_base.repeated",
    "repeated, base",
    "{:.1%}",
    "the same of what the base model writes",
    unit="share",
    error="generation.garbage_base.repeated_se",
)
BASE_CE = Metric(
    "generation.garbage.base_ce",
    "base CE",
    "{:.3f}",
    "the base model's cross-entropy of what the spliced model writes: how improbable it finds it",
    "lower",
    "nats",
    error="generation.garbage.base_ce_se",
)
BASE_CE_OWN = Metric(
    "generation.garbage_base.base_ce",
    "base CE, own",
    "{:.3f}",
    "the base model's cross-entropy of what it writes itself",
    unit="nats",
    error="generation.garbage_base.base_ce_se",
)

WHOLE = (CE_INCREASE, AROUND_SPECIAL, KL, TOP1, ALONE_SUM, PARAMS)
"""Is it still the model with all blocks replaced?"""
BY_BLOCK = (ALONE, WON_BACK, *ON_BASE, *ON_SPLICED)
"""Where does the error come from?"""
GARBAGE = (WHOLE_AGREED, REPEATED, REPEATED_BASE, BASE_CE, BASE_CE_OWN)
"""Is what it writes garbage?"""

WHOLE_ORDERS = {"bottom": "from the bottom", "top": "from the top", "random": "random order"}
"""What the orders in which blocks are replaced are called."""

# units.json

RATE = Metric("rates", "rate", "{:.3%}", "share of the tokens at which a unit fires", unit="share", name="firing rate")
DEAD_UNITS = Metric("dead", "dead units", "{:,.0f}", "units that never fired", "lower", "units")
DEAD_UNITS_SHARE = Metric("dead", "dead share", "{:.1%}", "share of the units that never fired", "lower", "share")
SHARED_UNITS = Metric(
    "shared", "shared units", "{}", "units that fire on a large share of all tokens, with that share", unit="units"
)

UNITS = (RATE, DEAD_UNITS, DEAD_UNITS_SHARE, SHARED_UNITS)

# structure.json

NORMALIZED_RANK = Metric(
    "normalized_rank",
    "normalized rank",
    "{:.4f}",
    "mean rank of a unit's weight over the largest possible; 1 is full rank",
)
RANKED = Metric("experts", "ranked units", "{:,.0f}", "units whose rank was computed", unit="units")
LEADER = Metric(
    "leader.share",
    "leads",
    "{:.1%}",
    "share of tokens led by the unit that leads most often, with its number: near 100%, it is shared",
    unit="share",
)
LEADERS = Metric(
    "leading", "leaders", "{}", "distinct leading units over the prompts: a single one is shared", unit="units"
)

STRUCTURE = (NORMALIZED_RANK, RANKED, LEADER, LEADERS)

# probing.json, for each set

MEAN_F1 = Metric(
    "mean_f1",
    "mean F1",
    "{:.3f}",
    "mean over the classes of the held-out F1 of the unit that is best for each",
    "higher",
)
MEAN_F1_TRAIN = Metric(
    "mean_f1_train_choice",
    "chosen in training",
    "{:.3f}",
    "mean F1 of the units that are best on the training texts",
    "higher",
)
F1 = Metric("classes.*.f1", "F1", "{:.3f}", "held-out F1 of the best unit for a class", "higher")
F1_ALWAYS = Metric("classes.*.f1_always", "always answering yes", "{:.3f}", "F1 of assigning every text to the class")

PROBING = (MEAN_F1, MEAN_F1_TRAIN, F1, F1_ALWAYS)

# steering.json

COHERENCE = Metric("coherence", "coherence", "{:.3f}", "mean over units: do the samples share a concept?", "higher")
FLUENCY = Metric("fluency", "fluency", "{:.3f}", "mean over units: are they grammatical?", "higher")
ASKED = Metric("asked", "asked", "{:.0f}", "questions to the judge")
FAILURES = Metric("failures", "failures", "{:.0f}", "answers that could not be read; they count in no mean", "lower")
DISAGREEMENTS = Metric(
    "disagreements", "disagreements", "{:.0f}", "units on which the judge's answers differ much", "lower", "units"
)

STEERING = (COHERENCE, FLUENCY, ASKED, FAILURES, DISAGREEMENTS)

# masking.json

OWN = Metric("target", "own domain", "{:+.4f}", "mean change on the masked domain itself", "higher", "nats")
OTHERS = Metric("others", "others", "{:+.4f}", "mean change on the other domains", "lower", "nats")
OWN_RANDOM = Metric(
    "control_target", "own, random", "{:+.4f}", "change on it with equally many random units", unit="nats"
)
OTHERS_RANDOM = Metric(
    "control_others", "others, random", "{:+.4f}", "change on the others with equally many random units", unit="nats"
)

MASKING = (OWN, OTHERS, OWN_RANDOM, OTHERS_RANDOM)

# purging.json, for each threshold

THRESHOLD = Metric(
    "thresholds", "correlation", "{:g}", "the least correlation with the score at which a unit is masked"
)
PURGED = Metric("units", "units", "{:,.0f}", "how many units are masked", unit="units")
PURGED_SHARE = Metric("share", "share", "{:.1%}", "their share of all units", unit="share")
BY_CHANCE = Metric(
    "removed",
    "by chance",
    "{:,.0f}",
    "units that correlate as much but not beyond chance; they are not masked",
    unit="units",
)
LOW = Metric(
    "changes.*.0",
    "low scores",
    "{:+.4f}",
    "change of the loss on texts with scores up to the mean",
    "lower",
    "nats",
    error="changes_se.*.0",
)
HIGH = Metric(
    "changes.*.1",
    "high scores",
    "{:+.4f}",
    "change of the loss on texts with scores above it",
    "higher",
    "nats",
    error="changes_se.*.1",
)
LOW_RANDOM = Metric(
    "control.*.0",
    "low, random",
    "{:+.4f}",
    "change on low scores with equally many random units",
    unit="nats",
    error="control_se.*.0",
)
HIGH_RANDOM = Metric(
    "control.*.1",
    "high, random",
    "{:+.4f}",
    "change on high scores with equally many random units",
    unit="nats",
    error="control_se.*.1",
)

PURGING = (THRESHOLD, PURGED, PURGED_SHARE, BY_CHANCE, LOW, HIGH, LOW_RANDOM, HIGH_RANDOM)

QUESTIONS = {"Is it faithful?": FAITHFULNESS, "Does it decompose?": DECOMPOSITION, "What does it cost?": COST}
"""The tables of an evaluation, by their titles."""

METRICS = {
    "faithfulness": tuple(dict.fromkeys((*FAITHFULNESS, *DECOMPOSITION, *COST))),
    "generation": GENERATION,
    "whole": (*WHOLE, *BY_BLOCK, *GARBAGE),
    "structure": STRUCTURE,
    "units": UNITS,
    "probing": PROBING,
    "steering": STEERING,
    "masking": MASKING,
    "purging": PURGING,
}
"""Every number that people are shown, by the file that holds it."""


def explained(metrics: Iterable[Metric]) -> str:
    """Return the explanations of some metrics as one line of Markdown."""
    return "; ".join(f"*{metric.title}*: {metric.note}" for metric in metrics) + "."
