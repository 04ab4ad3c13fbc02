"""Numbers of continuations, and of wholly replaced models."""

from dataclasses import replace

from mxd.metrics.faithful import (
    AROUND_SPECIAL,
    CE_INCREASE,
    DEAD,
    DENSE,
    FIXED,
    GATE,
    INTERACTION,
    KL,
    MEAN_GATE,
    NMSE,
    PARAMS,
    ROUTED,
    TOP1,
)
from mxd.metrics.metric import Metric

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
