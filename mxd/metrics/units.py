"""Numbers of units: how often they fire, what they add, which rank they have, what they tell."""

from mxd.metrics.metric import Metric

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
