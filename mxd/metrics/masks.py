"""Numbers of what masks of units do: to domains, to texts with a score, to whatever else is measured under them."""

from mxd.metrics.metric import Metric

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
