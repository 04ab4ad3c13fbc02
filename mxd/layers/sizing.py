"""How many units a layer gets, so that methods are compared at equal parameters."""

from typing import Literal, TypeVar

from pydantic import ValidationError

from mxd.common.errors import MxdError, told
from mxd.layers.config import ReplacementConfig, transcoder_params

Match = Literal["exact", "paper"]
C = TypeVar("C", bound=ReplacementConfig)


def size(config: C, expansion: int = 32, match: Match = "exact") -> C:
    """Return the config with its number of units set, unless it states one.

    The budget is that of a transcoder of width ``expansion * d_in`` (MxD, section 3.1 and table 2).

    Args:
        config: a config whose widths are known (``config.resolve(mlp_shape)``).
        expansion: the transcoder's width as a multiple of the model's.
        match: ``exact`` counts the true parameters of both; ``paper`` follows the conventions of the paper's table 2.

    Raises:
        MxdError: the budget is too small, or K is larger than the number of units found, or they cannot be divided as
            the config asks.
    """
    if config.num_units is not None and getattr(config, config.solves) is not None:
        return config
    width = expansion * (config.d_in or 0)
    if match == "paper":
        config = config.paper_sized(width)
        units = config.num_units or 0
        if units < 1:
            raise MxdError(
                f"{config.label}: by the paper's convention an expansion of {expansion} leaves no units "
                f"(N = {units:,}); raise sizing.expansion."
            )
    else:
        config = config.sized(transcoder_params(config.d_in or 0, config.d_out or 0, width))
        units = config.num_units or 0
    k = config.sparsity.max_k
    if k is not None and k > units:
        raise MxdError(f"{config.label}: k = {k} is more than its {units} units; lower k or raise sizing.expansion.")
    try:
        return type(config).model_validate(config.model_dump() | {"num_units": units})
    except ValidationError as error:
        raise MxdError(f"{config.label}: {told(error)}.") from error
