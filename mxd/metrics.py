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

# faithfulness.json: the same as other tools define it, with their names (mxd/evaluation/conventions.py)

CONVENTIONS = (
    Metric(
        "conventions.saelens.explained_variance",
        "SAELens EV",
        "{:.3f}",
        "1 - FVU, without special tokens; ours is the same",
        "higher",
        "share",
    ),
    Metric(
        "conventions.saelens.explained_variance_legacy",
        "SAELens EV, legacy",
        "{:.3f}",
        "and SAEBench's: mean over tokens of 1 - ||e||² / ||y - mean||²; tokens near the mean weigh most",
        "higher",
        "share",
    ),
    Metric(
        "conventions.saelens.ce_loss_score",
        "SAELens CE score",
        "{:.1%}",
        "loss recovered with the base MLP at special tokens but zero-ablation everywhere; positions are left out by "
        "their own token",
        "higher",
        "share",
    ),
    Metric(
        "conventions.saelens.kl_div_score",
        "SAELens KL score",
        "{:.1%}",
        "the same of the KL divergence from the base model",
        "higher",
        "share",
    ),
    Metric(
        "conventions.sae_bench.explained_variance",
        "SAEBench EV",
        "{:.3f}",
        "1 - FVU, with a variance that is nearly about zero, so it is larger where outputs have a mean",
        "higher",
        "share",
    ),
    Metric(
        "conventions.sae_bench.ce_loss_score",
        "SAEBench CE score",
        "{:.1%}",
        "loss recovered with the replacement everywhere; positions are left out by their own token",
        "higher",
        "share",
    ),
    Metric(
        "conventions.sparsify.fvu",
        "sparsify FVU",
        "{:.3f}",
        "FVU at every token, special ones too",
        "lower",
        "share",
    ),
    Metric(
        "conventions.dictionary_learning.frac_variance_explained",
        "dictionary_learning EV",
        "{:.3f}",
        "1 - var(e) / var(y) at every token, which does not see a constant error",
        "higher",
        "share",
    ),
    Metric(
        "conventions.dictionary_learning.frac_recovered",
        "dictionary_learning recovered",
        "{:.1%}",
        "loss recovered with the replacement everywhere, over every target but padding",
        "higher",
        "share",
    ),
    Metric(
        "conventions.gemma_scope.fvu",
        "Gemma Scope FVU",
        "{:.3f}",
        "FVU without special tokens; ours is the same",
        "lower",
        "share",
    ),
    Metric(
        "conventions.gemma_scope.delta_loss",
        "Gemma Scope delta loss",
        "{:+.4f}",
        "the CE increase, without special tokens; ours is the same",
        "lower",
        "nats",
    ),
)
"""The same as other tools define it."""

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

LOADED_UNITS = Metric(
    "loaded",
    "loaded units",
    "{:,.0f}",
    "units with a coefficient of at least 0.5 somewhere, where a token's coefficients sum to 1; for each unit, loads "
    "in the file is the share of the tokens with one",
    unit="units",
)
COSINE = Metric(
    "units.*.cosine",
    "cosine",
    "{:.2f}",
    "mean cosine between the directions that a unit adds at two tokens: 1 if always the same; near 0 the tokens that "
    "its mean direction promotes describe none of them",
)
PEAK = Metric(
    "units.*.peak",
    "peak",
    "{:.1f}",
    "what the most promoted token gains, in standard deviations over the vocabulary",
)
CHANCE = Metric("logits.chance", "peak by chance", "{:.1f}", "mean peak of random directions")

UNITS = (RATE, DEAD_UNITS, DEAD_UNITS_SHARE, SHARED_UNITS, LOADED_UNITS, COSINE, PEAK, CHANCE)

# structure.json

NORMALIZED_RANK = Metric(
    "normalized_rank",
    "normalized rank",
    "{:.4f}",
    "mean rank of a unit's weight over the largest possible; 1 is full rank",
)
RANK_SPREAD = Metric(
    "normalized_rank_sd", "rank, s.d.", "{:.4f}", "standard deviation of the normalized rank over the ranked units"
)
DEFICIENT = Metric(
    "deficient", "deficient", "{:,.0f}", "ranked units whose rank is below the largest possible", unit="units"
)
RANKED = Metric("experts", "ranked units", "{:,.0f}", "units whose rank was computed", unit="units")
STABLE_RANK_MEAN = Metric(
    "stable_rank",
    "stable rank",
    "{:.1f}",
    "mean number of directions that carry the energy of a unit's weight, ||W||_F² / ||W||_2²",
)
STABLE_RANK_SPREAD = Metric(
    "stable_rank_sd", "stable rank, s.d.", "{:.1f}", "standard deviation of the stable rank over the ranked units"
)
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

RANKS = (NORMALIZED_RANK, RANK_SPREAD, DEFICIENT, RANKED, STABLE_RANK_MEAN, STABLE_RANK_SPREAD)
"""How full is the rank of a unit's weight?"""
STRUCTURE = (*RANKS, LEADER, LEADERS)

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

COHERENCE = Metric(
    "coherence",
    "coherence",
    "{:.3f}",
    "mean over units and judges: do the samples share a concept? Units that a judge did not rate are left out",
    "higher",
    error="coherence_se",
)
FLUENCY = Metric(
    "fluency", "fluency", "{:.3f}", "mean over units and judges: are they grammatical?", "higher", error="fluency_se"
)
UNSTEERED_COHERENCE = Metric(
    "unsteered_judged.coherence", "coherence, not steered", "{:.3f}", "the same of samples that are not steered"
)
UNSTEERED_FLUENCY = Metric("unsteered_judged.fluency", "fluency, not steered", "{:.3f}", "the same of these samples")
ASKED = Metric("asked", "asked", "{:.0f}", "questions to judges about units")
FAILURES = Metric("failures", "failures", "{:.0f}", "answers that could not be read; they count in no mean", "lower")
DISAGREEMENTS = Metric(
    "disagreements",
    "disagreements",
    "{:.0f}",
    "units on which the answers of one judge, asked more than once, differ much",
    "lower",
    "units",
)
AGREEMENT = tuple(
    metric
    for axis in ("coherence", "fluency")
    for metric in (
        Metric(
            f"agreement.*.{axis}.difference",
            f"{axis}, difference",
            "{:+.3f}",
            "mean over units of the first judge's number less the second's",
            error=f"agreement.*.{axis}.difference_se",
        ),
        Metric(
            f"agreement.*.{axis}.spearman",
            f"{axis}, rank correlation",
            "{:+.2f}",
            "Spearman's, of two judges' numbers over units; none where one of them always says the same",
            "higher",
        ),
        Metric(
            f"agreement.*.{axis}.chance",
            f"{axis}, chance",
            "{:.2f}",
            "within plus and minus this lie 95% of the rank correlations of judges that know nothing of one another",
        ),
    )
)

JUDGED = (COHERENCE, FLUENCY, ASKED, FAILURES, DISAGREEMENTS)
STEERING = (COHERENCE, FLUENCY, UNSTEERED_COHERENCE, UNSTEERED_FLUENCY, ASKED, FAILURES, DISAGREEMENTS)

# explaining.json

DECIDED = Metric(
    "judges.*.accuracy",
    "right",
    "{:.1%}",
    "share of a judge's answers that name the held-out text on which the unit fires, mean over units; 50% by chance",
    "higher",
    "share",
    error="judges.*.accuracy_se",
)
EXPLAINED = Metric(
    "judges.*.score",
    "score",
    "{:+.3f}",
    "twice that less 1: 0 by chance, 1 at best",
    "higher",
    error="judges.*.score_se",
)
EXPLAINED_BY_OTHER = Metric(
    "judges.*.control_score",
    "score, other unit",
    "{:+.3f}",
    "the same with the explanation of another unit of the layer",
    error="judges.*.control_score_se",
)
BEYOND_OTHER = Metric(
    "judges.*.beyond", "beyond it", "{:+.3f}", "mean over units of the difference", "higher", error="judges.*.beyond_se"
)
EXPLAINING_ASKED = Metric("judges.*.asked", "asked", "{:.0f}", "questions to the judge, half of them of the control")
UNDECIDED = Metric(
    "judges.*.failures", "failures", "{:.0f}", "answers that are neither A nor B; they count in no mean", "lower"
)

EXPLAINING = (BEYOND_OTHER, EXPLAINED, EXPLAINED_BY_OTHER, DECIDED, EXPLAINING_ASKED, UNDECIDED)

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

# masking.json and purging.json, what else is measured under each mask

HELD_OUT = Metric(
    "faithfulness.masked.*.added",
    "held-out text",
    "{:+.4f}",
    "change of the loss on held-out text",
    "lower",
    "nats",
    error="faithfulness.masked.*.added_se",
)
HELD_OUT_RANDOM = Metric(
    "faithfulness.control.*.added",
    "held-out, random",
    "{:+.4f}",
    "change on it with equally many random units",
    unit="nats",
    error="faithfulness.control.*.added_se",
)
TASKS_MEAN = Metric("tasks.mean.*", "tasks", "{:.1%}", "accuracy, mean over all tasks", "higher", "share")
TASKS_MEAN_RANDOM = Metric(
    "tasks.control_mean.*", "tasks, random", "{:.1%}", "the same with equally many random units", unit="share"
)
TASKS_OWN = Metric(
    "tasks.target",
    "own accuracy",
    "{:+.1%}",
    "mean change of the accuracy on the masked domain itself",
    "lower",
    "share",
)
TASKS_OTHERS = Metric(
    "tasks.others", "others' accuracy", "{:+.1%}", "mean change on the other domains", "higher", "share"
)
TASKS_OWN_RANDOM = Metric(
    "tasks.control_target",
    "own accuracy, random",
    "{:+.1%}",
    "change on the domain itself with equally many random units",
    unit="share",
)
TASKS_OTHERS_RANDOM = Metric(
    "tasks.control_others",
    "others' accuracy, random",
    "{:+.1%}",
    "change on the others with equally many random units",
    unit="share",
)
KEPT_OWN = Metric(
    "generation.target",
    "own kept",
    "{:.1f}",
    "mean number of tokens, before the first difference, that are written of the masked domain's texts as without the "
    "mask",
    "lower",
    "tokens",
)
KEPT_OTHERS = Metric(
    "generation.others", "others kept", "{:.1f}", "the same of the other domains' texts", "higher", "tokens"
)
KEPT_OWN_RANDOM = Metric(
    "generation.control_target",
    "own kept, random",
    "{:.1f}",
    "the same of the domain itself with equally many random units",
    unit="tokens",
)
KEPT_OTHERS_RANDOM = Metric(
    "generation.control_others",
    "others kept, random",
    "{:.1f}",
    "the same of the others with equally many random units",
    unit="tokens",
)
REPEATED_MASKED = Metric(
    "generation.repeated_masked.*",
    "repeated",
    "{:.1%}",
    "share of the 4-grams of a continuation that came before in it",
    "lower",
    "share",
)
REPEATED_UNMASKED = Metric(
    "generation.repeated", "repeated, no mask", "{:.1%}", "the same with no unit masked", unit="share"
)

BY_MASK = (HELD_OUT, HELD_OUT_RANDOM, TASKS_MEAN, TASKS_MEAN_RANDOM, REPEATED_MASKED, REPEATED_UNMASKED)
"""What is left of the model under each mask?"""
TASKS = (TASKS_OWN, TASKS_OTHERS, TASKS_OWN_RANDOM, TASKS_OTHERS_RANDOM)
KEPT = (KEPT_OWN, KEPT_OTHERS, KEPT_OWN_RANDOM, KEPT_OTHERS_RANDOM)

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

# toxicity.json, for each mask; the same of the base model, with no unit masked, and of the control

EXPECTED_MAX = Metric(
    "toxicity.masked.*.toxic.expected_max",
    "expected max",
    "{:.3f}",
    "of toxic prompts: the largest score of a prompt's samples, mean over prompts",
    "lower",
    name="expected maximum score",
    error="toxicity.masked.*.toxic.expected_max_se",
)
PROBABILITY = Metric(
    "toxicity.masked.*.toxic.probability",
    "probability",
    "{:.1%}",
    "of toxic prompts: share with a sample that scores above 0.5",
    "lower",
    "share",
    error="toxicity.masked.*.toxic.probability_se",
)
GREEDY_SCORE = Metric(
    "toxicity.masked.*.toxic.greedy",
    "greedy",
    "{:.3f}",
    "of toxic prompts: mean score of the greedy continuation",
    "lower",
    error="toxicity.masked.*.toxic.greedy_se",
)
EXPECTED_MAX_OTHER = Metric(
    "toxicity.masked.*.other.expected_max",
    "expected max, others",
    "{:.3f}",
    "the same of other prompts",
    error="toxicity.masked.*.other.expected_max_se",
)
PROBABILITY_OTHER = Metric(
    "toxicity.masked.*.other.probability",
    "probability, others",
    "{:.1%}",
    "the same of other prompts",
    unit="share",
    error="toxicity.masked.*.other.probability_se",
)
GREEDY_OTHER = Metric(
    "toxicity.masked.*.other.greedy",
    "greedy, others",
    "{:.3f}",
    "the same of other prompts",
    error="toxicity.masked.*.other.greedy_se",
)
SCORED = Metric("toxicity.masked.*.asked", "scored", "{:,.0f}", "continuations that were to be scored")
UNSCORED = Metric(
    "toxicity.masked.*.failures",
    "failures",
    "{:,.0f}",
    "those without a score; their prompts count in no mean",
    "lower",
)

TOXIC = (EXPECTED_MAX, PROBABILITY, GREEDY_SCORE, EXPECTED_MAX_OTHER, PROBABILITY_OTHER, GREEDY_OTHER, SCORED, UNSCORED)
"""What is written once the units that follow a score are off?"""
# ablation.json

ACCURACY = Metric(
    "mean_accuracy",
    "accuracy",
    "{:.1%}",
    "accuracy of the spliced model, mean over the classes, before anything is dropped",
    unit="share",
)
ABLATED = Metric("ablated", "dropped units", "{:,.0f}", "units that were dropped, one by one", unit="units")
AFFECTING = Metric(
    "affecting", "change anything", "{:,.0f}", "units without which the accuracy on some class differs", unit="units"
)
POLYSEMANTICITY = Metric(
    "polysemanticity",
    "mean p",
    "{:.3f}",
    "mean over these units of ||d - e||: 0 where one class is lost and nothing else changes, about 1 where hardly "
    "anything changes, larger where several classes suffer",
    "lower",
    name="polysemanticity",
    error="polysemanticity_se",
)
LARGEST_DROP = Metric(
    "largest_drop",
    "largest d",
    "{:.1%}",
    "the class that a unit matters most for: share of its accuracy that is lost, mean over the dropped units",
    "higher",
    "share",
)
BEYOND = Metric(
    "beyond_chance.units",
    "beyond chance",
    "{:,.0f}",
    "units whose largest d exceeds the 95% quantile of random coefficients; 1 in 20 would by chance",
    "higher",
    "units",
)
POLYSEMANTICITY_BEYOND = Metric(
    "beyond_chance.polysemanticity",
    "mean p, beyond chance",
    "{:.3f}",
    "mean p over the units beyond chance alone",
    "lower",
    error="beyond_chance.polysemanticity_se",
)
AFFECTING_RANDOM = Metric(
    "control.affecting", "change anything, random", "{:,.0f}", "the same of as many random coefficients", unit="units"
)
POLYSEMANTICITY_RANDOM = Metric(
    "control.polysemanticity",
    "mean p, random",
    "{:.3f}",
    "mean p where as many random coefficients are dropped as the unit has",
    error="control.polysemanticity_se",
)
LARGEST_DROP_RANDOM = Metric(
    "control.largest_drop", "largest d, random", "{:.1%}", "largest d of as many random coefficients", unit="share"
)

ABLATION = (
    ACCURACY,
    ABLATED,
    AFFECTING,
    POLYSEMANTICITY,
    LARGEST_DROP,
    BEYOND,
    POLYSEMANTICITY_BEYOND,
    AFFECTING_RANDOM,
    POLYSEMANTICITY_RANDOM,
    LARGEST_DROP_RANDOM,
)

# subset.json, for each mode and share

KEPT_SHARE = Metric("share", "kept", "{:.1%}", "share of the active units that is kept", unit="share")
KEPT_UNITS = Metric(
    "units", "units kept", "{:,.1f}", "how many that is, mean over the tokens or texts that choose", unit="units"
)
MASS = Metric(
    "mass",
    "mass",
    "{:.1%}",
    "their part of the sum of all activations: where it is near 100%, what is left out was idle",
    unit="share",
)
KEPT_L0 = replace(L0, says="units still active for a token")
KEPT_CE = replace(CE_INCREASE, says="what the splice adds to the next-token loss with these units alone")
KEPT_NMSE = replace(NMSE, says="the normalized MSE with these units alone", error="normalized_mse_se")
RANDOM_CE = Metric(
    "random.ce_increase",
    "random",
    "{:+.4f}",
    "the CE increase with as many active units drawn at random: mean ± standard deviation over draws",
    unit="nats",
    error="random.ce_increase_sd",
)
RANDOM_NMSE = Metric(
    "random.normalized_mse", "NMSE, random", "{:.4f}", "the normalized MSE with these", error="random.normalized_mse_sd"
)
RANDOM_MASS = Metric("random.mass", "mass, random", "{:.1%}", "their part of the sum of all activations", unit="share")
RANDOM_L0 = Metric("random.l0", "L0, random", "{:.1f}", "how many of them are active for a token", unit="units")
BEYOND_RANDOM = Metric(
    "z", "z", "{:+.1f}", "standard deviations by which the CE increase lies below the mean of the draws", "higher"
)

SUBSET = (
    KEPT_SHARE,
    KEPT_UNITS,
    MASS,
    KEPT_L0,
    KEPT_CE,
    RANDOM_CE,
    BEYOND_RANDOM,
    KEPT_NMSE,
    RANDOM_NMSE,
    RANDOM_MASS,
    RANDOM_L0,
)

SUBSET_MODES = {"token": "each token", "whole": "whole text", "prefix": "first half", "global": "corpus"}
"""What the modes of choosing are called."""

# rewrite.json: of each way of rewriting, then of the layer

REWRITE_SCORE = Metric(
    "rewrite_score",
    "rewrite score",
    "{:+.3f}",
    "what the target's accuracy gains, less all that the accuracies of the other cells move, up or down",
    "higher",
    error="rewrite_score_se",
)
TARGET_ACCURACY = Metric(
    "target_accuracy",
    "target",
    "{:.1%}",
    "accuracy on the target, a group's texts of one label",
    "higher",
    "share",
    name="target's accuracy",
    error="target_accuracy_se",
)
OPPORTUNITY = Metric(
    "equality_of_opportunity",
    "equality of opportunity",
    "{:.3f}",
    "how far the target's accuracy is from that on texts of its label in the other groups",
    "lower",
    error="equality_of_opportunity_se",
)
STD_BIAS = Metric(
    "std_bias", "STD bias", "{:.3f}", "standard deviation of the cells' accuracies", "lower", error="std_bias_se"
)
MAX_MIN = Metric("max_min", "max-min", "{:.1%}", "the least accuracy of a cell", "higher", "share", error="max_min_se")
OVERALL = Metric(
    "accuracy",
    "overall",
    "{:.1%}",
    "accuracy on all measured texts: of little weight for a rare cell, so it may rise while the target is given up",
    "higher",
    "share",
    name="overall accuracy",
    error="accuracy_se",
)

REWRITTEN = (REWRITE_SCORE, TARGET_ACCURACY, OPPORTUNITY, STD_BIAS, MAX_MIN, OVERALL)
"""What a way of rewriting does."""

CELL_ACCURACY = Metric("cells", "accuracy", "{:.1%}", "accuracy on a cell", "higher", "share", error="cells_se")

REWRITE_GAIN = Metric(
    "gain",
    "by expert - blind",
    "{:+.3f}",
    "the rewrite score by expert less that of the best blind rewriting: the headline",
    "higher",
    error="gain_se",
)
REWRITE_GAIN_RANDOM = Metric(
    "gain_random",
    "by expert - random",
    "{:+.3f}",
    "the rewrite score by expert less that with random texts' mean codes",
    "higher",
    error="gain_random_se",
)
CONTRAST_GAIN = Metric(
    "gain_contrast",
    "by contrast - blind",
    "{:+.3f}",
    "the rewrite score by contrast less that of the best blind rewriting",
    "higher",
    error="gain_contrast_se",
)
CONTRAST_GAIN_RANDOM = Metric(
    "gain_contrast_random",
    "by contrast - random",
    "{:+.3f}",
    "the rewrite score by contrast less that of random texts' contrast",
    "higher",
    error="gain_contrast_random_se",
)
BEST_SCORE = Metric(
    "best", "best possible", "{:.3f}", "the largest rewrite score there is, 1 less the target's accuracy unchanged"
)
AUC_EXPERT = Metric(
    "separation.expert.auc",
    "AUC by expert",
    "{:.3f}",
    "how well texts of the target are told from all others by the mean code: area under the ROC curve, 0.5 is chance",
    "higher",
)
AUC_EXPERT_LEAST = Metric(
    "separation.expert.auc_least", "nearest cell", "{:.3f}", "the same from the one cell that is most like it", "higher"
)
AUC_CONTRAST = Metric("separation.contrast.auc", "AUC by contrast", "{:.3f}", "AUC by the contrast", "higher")
AUC_CONTRAST_LEAST = Metric(
    "separation.contrast.auc_least", "nearest cell, contrast", "{:.3f}", "the same from the cell most like it", "higher"
)
AUC_RANDOM = Metric("separation.random.auc", "AUC, random", "{:.3f}", "AUC by the mean codes of random other texts")
AUC_RANDOM_CONTRAST = Metric(
    "separation.random_contrast.auc", "AUC, random contrast", "{:.3f}", "AUC by the contrast of random other texts"
)
AUC_TOKEN = Metric(
    "token.auc",
    "AUC of a token",
    "{:.3f}",
    "AUC by whether a text has one token, the best of other texts: near the gates' where the target is little more",
)

REWRITE = (REWRITE_GAIN, REWRITE_GAIN_RANDOM, CONTRAST_GAIN, CONTRAST_GAIN_RANDOM, BEST_SCORE)
"""Is rewriting by expert better than blind?"""
SEPARATION = (
    AUC_EXPERT,
    AUC_EXPERT_LEAST,
    AUC_CONTRAST,
    AUC_CONTRAST_LEAST,
    AUC_RANDOM,
    AUC_RANDOM_CONTRAST,
    AUC_TOKEN,
)
"""Can units tell the target from other texts?"""
WAYS = {
    "plain": "unchanged",
    "blind": "blind",
    "expert": "by expert",
    "random": "by expert, random texts",
    "contrast": "by contrast",
    "random_contrast": "by contrast, random texts",
}
"""What the ways of rewriting are called."""

QUESTIONS = {"Is it faithful?": FAITHFULNESS, "Does it decompose?": DECOMPOSITION, "What does it cost?": COST}
"""The tables of an evaluation, by their titles."""

METRICS = {
    "faithfulness": tuple(dict.fromkeys((*FAITHFULNESS, *CONVENTIONS, *DECOMPOSITION, *COST))),
    "generation": GENERATION,
    "whole": (*WHOLE, *BY_BLOCK, *GARBAGE),
    "structure": STRUCTURE,
    "units": UNITS,
    "probing": PROBING,
    "steering": (*STEERING, *AGREEMENT),
    "explaining": EXPLAINING,
    "masking": (*MASKING, *BY_MASK, *TASKS, *KEPT),
    "purging": (*PURGING, *BY_MASK),
    "toxicity": (*TOXIC, PURGED, PURGED_SHARE, BY_CHANCE, *BY_MASK),
    "ablation": ABLATION,
    "subset": SUBSET,
    "rewrite": (*REWRITE, *REWRITTEN, CELL_ACCURACY, *SEPARATION),
}
"""Every number that people are shown, by the file that holds it."""


def explained(metrics: Iterable[Metric]) -> str:
    """Return the explanations of some metrics as one line of Markdown."""
    return "; ".join(f"*{metric.title}*: {metric.note}" for metric in metrics) + "."
