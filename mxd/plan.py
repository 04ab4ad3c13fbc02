"""What a run is made of and what it needs, known before anything large is loaded."""

from collections.abc import Mapping

import psutil
import torch

from mxd.activations import buffer_bytes
from mxd.config import RunConfig
from mxd.errors import MxdError
from mxd.layers import ReplacementConfig, size
from mxd.model import FrozenModel
from mxd.progress import console


def plan_layers(config: RunConfig, base: FrozenModel) -> dict[str, tuple[int, ReplacementConfig]]:
    """Return name -> (block, complete config) for everything the run trains.

    Raises:
        MxdError: a layer out of range, a size that does not fit, or two replacements that are the same.
    """
    plans: dict[str, tuple[int, ReplacementConfig]] = {}
    for number in config.layers:
        base.check_layer(number)
        shape = base.mlp_shape(number)
        for wanted in config.replacements:
            complete = size(wanted.inherit(shape), config.sizing.expansion, config.sizing.match)
            name = f"layer{number}-{complete.slug}"
            taken = [n for n in plans if n == name or n.startswith(f"{name}-v")]
            if any(plans[n] == (number, complete) for n in taken):
                raise MxdError(f"the run trains {name} twice with the same settings; remove one from replacements.")
            plans[f"{name}-v{len(taken) + 1}" if taken else name] = (number, complete)
    return plans


def check_memory(config: RunConfig, base: FrozenModel, plans: Mapping[str, tuple[int, ReplacementConfig]]) -> None:
    """Say so before starting if parameters, gradients, moments and the buffer cannot fit."""
    state = sum(16 * layer.num_params for _, layer in plans.values())
    shapes = [base.mlp_shape(number) for number in config.layers]
    buffer = buffer_bytes([(s.d_in, s.d_out) for s in shapes], config.training.buffer_tokens)
    free = torch.cuda.mem_get_info(base.device)[0] if base.device.type == "cuda" else psutil.virtual_memory().available
    if state + buffer > free:
        raise MxdError(
            f"the run needs {(state + buffer) / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free on {base.device}: "
            f"{state / 2**30:.1f} GiB for weights, gradients and Adam's moments of {len(plans)} replacements, "
            f"{buffer / 2**30:.1f} GiB for the activation buffer. Lower training.buffer_tokens or sizing.expansion, or "
            "train fewer replacements at a time."
        )
    console.print(
        f"{len(plans)} replacements, {sum(c.num_params for _, c in plans.values()):,} parameters; "
        f"memory: {state / 2**30:.2f} GiB of state, {buffer / 2**30:.2f} GiB of activations",
        soft_wrap=True,
    )
