"""How replacements of several blocks are tuned together: the options of `mxd tune`, and a section of a run's config."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from mxd.questions import Count, NoOption, Settings


class TuneConfig(Settings):
    """How the replacements of several blocks are tuned together."""

    loss: Literal["kl", "ce"] = "kl"
    """What is minimised of the wholly spliced model: ``kl``, the divergence of its predictions from the base model's;
    ``ce``, its next-token loss on the text, which can leave the base model behind."""
    nmse: NonNegativeFloat = 1.0
    """Weight of each layer's normalized MSE, against the base MLP on the same (spliced) input. It holds layers to what
    they replace."""
    tokens: Count = 1_048_576
    """Tokens to tune on."""
    batch_tokens: Count = 1024
    """Tokens in a step: whole contexts."""
    lr: PositiveFloat = 1e-3
    """Learning rate of Adam on scaled activations, as in the recipe ``scaled``."""
    warmup_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Warm-up as a share of all steps."""
    decay: bool = True
    """Whether the rate falls linearly to zero after warm-up."""
    clip_norm: PositiveFloat | None = 1.0
    """Clip the gradient of all layers that are tuned together to this norm, on scaled activations."""
    accumulation: Count = 1
    """Split each step's contexts in this many parts to lower memory."""
    checkpointing: bool = False
    """Keep what goes into each block alone and run it again in the backward pass: less memory, more time."""
    log_every: Count = 50
    """Steps between lines of metrics.jsonl."""
    save_every: Count = 200
    """Steps between saved states."""
    of: NoOption[tuple[str, ...]] = ()
    """What is tuned: layers or runs, as `mxd tune` was given them."""


UNCHANGED = TuneConfig()
"""No option is given."""

GUARD_TOKENS = 8192
"""Held-out tokens on which tuned layers are measured, before and after."""
