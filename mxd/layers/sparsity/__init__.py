"""How units are chosen. Each kind is a frozen config and a small module whose state lives in the state dict.

Activations are never negative: all kinds but those whose codes sum to 1 apply ReLU to the pre-activations first (MxD,
section 2.4; Gao et al., TopK).
"""

from typing import Annotated, get_args

from pydantic import Field

from mxd.layers.sparsity.always import Always, AlwaysConfig
from mxd.layers.sparsity.base import Sparsity, SparsityConfig
from mxd.layers.sparsity.batch_topk import BatchTopK, BatchTopKConfig
from mxd.layers.sparsity.group_max import GroupMax, GroupMaxConfig
from mxd.layers.sparsity.jumprelu import JumpReLU, JumpReLUConfig
from mxd.layers.sparsity.l1 import ReLUL1, ReLUL1Config, Weighting
from mxd.layers.sparsity.levels import Levels, LevelsConfig
from mxd.layers.sparsity.product import PairTopKConfig, ProductQuantileConfig, ProductTopKConfig
from mxd.layers.sparsity.simplex import Entmax, EntmaxConfig, Softmax, SoftmaxConfig
from mxd.layers.sparsity.topk import RandomK, RandomKConfig, TopK, TopKConfig
from mxd.layers.sparsity.topk_softmax import TopKSoftmaxConfig

AnySparsity = Annotated[
    TopKConfig
    | RandomKConfig
    | BatchTopKConfig
    | GroupMaxConfig
    | ReLUL1Config
    | JumpReLUConfig
    | SoftmaxConfig
    | EntmaxConfig
    | LevelsConfig
    | TopKSoftmaxConfig
    | ProductTopKConfig
    | ProductQuantileConfig
    | PairTopKConfig
    | AlwaysConfig,
    Field(discriminator="kind"),
]

SPARSITIES: dict[str, type[SparsityConfig]] = {
    config.model_fields["kind"].default: config for config in get_args(get_args(AnySparsity)[0])
}
"""Kind -> its config."""

__all__ = [
    "SPARSITIES",
    "Always",
    "AlwaysConfig",
    "AnySparsity",
    "BatchTopK",
    "BatchTopKConfig",
    "Entmax",
    "EntmaxConfig",
    "GroupMax",
    "GroupMaxConfig",
    "JumpReLU",
    "JumpReLUConfig",
    "Levels",
    "LevelsConfig",
    "PairTopKConfig",
    "ProductQuantileConfig",
    "ProductTopKConfig",
    "RandomK",
    "RandomKConfig",
    "ReLUL1",
    "ReLUL1Config",
    "Softmax",
    "SoftmaxConfig",
    "Sparsity",
    "SparsityConfig",
    "TopK",
    "TopKConfig",
    "TopKSoftmaxConfig",
    "Weighting",
]
