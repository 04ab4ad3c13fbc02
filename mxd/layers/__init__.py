"""Every replacement layer, by name.

A new method is one file here, its name in ``LAYERS`` and its class in ``AnyReplacement``, one YAML, one test file.
"""

from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from mxd.common.errors import MxdError, told, unknown
from mxd.layers.base import ReplacementLayer
from mxd.layers.config import Covariance, Initialisation, MLPShape, MLPWeights, ReplacementConfig
from mxd.layers.gates import Code, Gate, PairCode
from mxd.layers.linear import LinearConfig, LowRankConfig
from mxd.layers.moe import MoEConfig
from mxd.layers.molt import MOLTConfig
from mxd.layers.monet import MonetConfig
from mxd.layers.mov import MoVConfig
from mxd.layers.mumoe import CPMuMoEConfig
from mxd.layers.mumoe_block import MuMoEBlockConfig
from mxd.layers.mxd import MxDConfig
from mxd.layers.peer import PEERConfig
from mxd.layers.sae import TopKSAEConfig
from mxd.layers.sizing import size
from mxd.layers.smoe import SMoEConfig
from mxd.layers.tensor_ring import TRMuMoEConfig
from mxd.layers.transcoder import TranscoderConfig
from mxd.layers.tucker import TuckerMuMoEConfig

LAYERS: dict[str, type[ReplacementConfig]] = {
    "mxd": MxDConfig,
    "transcoder": TranscoderConfig,
    "cp_mumoe": CPMuMoEConfig,
    "tr_mumoe": TRMuMoEConfig,
    "tucker_mumoe": TuckerMuMoEConfig,
    "moe": MoEConfig,
    "topk_sae": TopKSAEConfig,
    "mumoe_block": MuMoEBlockConfig,
    "monet": MonetConfig,
    "peer": PEERConfig,
    "smoe": SMoEConfig,
    "mov": MoVConfig,
    "linear": LinearConfig,
    "low_rank": LowRankConfig,
    "molt": MOLTConfig,
}

AnyReplacement = Annotated[
    MxDConfig
    | TranscoderConfig
    | CPMuMoEConfig
    | TRMuMoEConfig
    | TuckerMuMoEConfig
    | MoEConfig
    | TopKSAEConfig
    | MuMoEBlockConfig
    | MonetConfig
    | PEERConfig
    | SMoEConfig
    | MoVConfig
    | LinearConfig
    | LowRankConfig
    | MOLTConfig,
    Field(discriminator="method"),
]


def parse_layer(fields: Any) -> ReplacementConfig:
    """Read a layer's config from plain data, as a checkpoint stores it.

    Raises:
        MxdError: not a mapping, no or unknown method, or a field the method does not have.
    """
    method = fields.get("method") if isinstance(fields, dict) else None
    if not isinstance(method, str) or method not in LAYERS:
        raise unknown("method", method, LAYERS)
    try:
        return TypeAdapter(LAYERS[method]).validate_python(fields)
    except ValidationError as error:
        raise MxdError(f"bad {method} config: {told(error)}") from error


__all__ = [
    "LAYERS",
    "AnyReplacement",
    "Code",
    "Covariance",
    "Gate",
    "Initialisation",
    "MLPShape",
    "MLPWeights",
    "PairCode",
    "ReplacementConfig",
    "ReplacementLayer",
    "parse_layer",
    "size",
]
