"""What is measured of a splice: the name, form, direction and meaning of every number, for tables, cards and pages."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

AROUND = "around_special"
"""Where results keep what was measured with the base MLP answering at special tokens."""


@dataclass(frozen=True)
class Metric:
    """One number of a splice, or of the layer that it splices in."""

    key: str
    """Where it stands in ``faithfulness.json``: names divided by dots, of a result or of one of its layers."""
    title: str
    """What columns are called."""
    form: str
    """How it is printed."""
    says: str
    """One sentence on what it is."""
    better: Literal["lower", "higher", ""] = ""
    """Which is better, where one is."""

    def of(self, result: Mapping[str, Any]) -> float | None:
        """Return its value: a result's own, or the mean over its layers; ``None`` where it has none."""
        own = _at(result, self.key)
        if own is not None:
            return own
        found = [value for layer in result["layers"].values() if (value := _at(layer, self.key)) is not None]
        return sum(found) / len(found) if found else None

    def shown(self, result: Mapping[str, Any]) -> str:
        """Return its value as it is printed: ``n/a`` where it makes no sense, ``-`` where it was not measured."""
        value = self.of(result)
        if value is not None:
            return self.form.format(value)
        return "n/a" if self.key in result else "-"


def _at(values: Mapping[str, Any], path: str) -> float | None:
    found: Any = values
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


NMSE = Metric(
    "normalized_mse",
    "NMSE",
    "{:.4f}",
    "the training loss on held-out tokens, mean of ||y - y^||² / (||y|| d)",
    "lower",
)
FVU = Metric("fvu", "FVU", "{:.3f}", "share of the output's variance that is not explained", "lower")
CE = Metric("ce_spliced", "CE", "{:.4f}", "next-token loss with the replacement at every position, in nats", "lower")
CE_INCREASE = Metric(
    "ce_increase",
    "CE increase",
    "{:+.4f}",
    "what the replacement, at every position, adds to the next-token loss, in nats",
    "lower",
)
CE_INCREASE_SE = Metric("ce_increase_se", "± s.e.", "{:.4f}", "standard error of the CE increase, over contexts")
AROUND_SPECIAL = Metric(
    f"{AROUND}.ce_increase",
    "around special",
    "{:+.4f}",
    "CE increase over the same targets if the base MLP goes on answering at special tokens, and so at attention sinks",
    "lower",
)
RECOVERED = Metric(
    "loss_recovered",
    "recovered",
    "{:.1%}",
    "share of the loss from zero-ablating the MLP that is won back; n/a where that loss is within two standard errors",
    "higher",
)
KL = Metric("kl", "KL", "{:.4f}", "mean KL divergence from the base model's predictions, in nats", "lower")
TOP1 = Metric("top1_agreement", "top-1", "{:.1%}", "positions whose most probable token is unchanged", "higher")
L0 = Metric("l0", "L0", "{:.1f}", "units active for a token")
DEAD = Metric("dead_share", "dead", "{:.0%}", "units never active on the held-out tokens", "lower")
ROUTED = Metric(
    "routed_share",
    "routed",
    "{:.2f}",
    "energy that routing adds over the output's: 0 for a dense MLP in disguise, about 1 for a transcoder; may exceed 1",
)
SHARED = Metric("shared_share", "shared", "{:.3f}", "energy left when only the most frequently active unit is kept")
MEAN_GATE = Metric("nmse_mean_gate", "mean gate", "{:.4f}", "NMSE when every token gets the mean gate")
FIXED = Metric(
    "nmse_fixed_directions",
    "fixed",
    "{:.4f}",
    "NMSE when every unit adds its mean direction in place of the one for this token: NMSE itself for a transcoder, "
    "also for one in disguise",
)
GATE = Metric(
    "gate_share", "gate", "{:.2f}", "share of the output's energy from gates alone, all that a transcoder has"
)
DENSE = Metric("dense_share", "dense", "{:.2f}", "share from directions under the mean gate, all that a dense MLP has")
INTERACTION = Metric(
    "interaction_share",
    "interaction",
    "{:.3f}",
    "share from gates and directions that change together, what only a mixture of decoders has",
)
SKIP = Metric("skip_share", "skip", "{:.2f}", "share that is added whatever the units do")
STABLE_RANK = Metric(
    "stable_rank",
    "stable rank",
    "{:.1f}",
    "number of directions that carry the energy of a unit's weight, ||W||_F² / ||W||_2², mean over 32 units",
)
EFFECTIVE = Metric(
    "effective_units", "eff. units", "{:.1f}", "number of equally active units that would be as spread as a token's"
)

FAITHFULNESS = (NMSE, FVU, CE, CE_INCREASE, CE_INCREASE_SE, AROUND_SPECIAL, RECOVERED, KL, TOP1)
"""Is it faithful?"""
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


def explained(metrics: Iterable[Metric]) -> str:
    """Return the sentences on some metrics as one line of Markdown."""
    return "; ".join(f"*{metric.title}*: {metric.says}" for metric in metrics) + "."
