"""Numbers of what dropping units does: one by one, or all but the strongest."""

from dataclasses import replace

from mxd.metrics.faithful import CE_INCREASE, L0, NMSE
from mxd.metrics.metric import Metric

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
