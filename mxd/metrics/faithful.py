"""Numbers of `mxd evaluate`: is a splice faithful, does it decompose, what does it cost?"""

from mxd.metrics.metric import Metric

AROUND = "around_special"
"""The key of what was measured with the base MLP answering at special tokens."""

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
