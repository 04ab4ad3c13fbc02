"""How units are chosen. Each kind is a frozen config and a small module whose state lives in the state dict.

Most apply ReLU to the pre-activations first (MxD, section 2.4; Gao et al., TopK), the others a softmax to those kept:
activations are non-negative.
"""

from typing import Annotated

from pydantic import Field

from mxd.layers.sparsity.base import Sparsity, SparsityConfig
from mxd.layers.sparsity.jumprelu import JumpReLU, JumpReLUConfig
from mxd.layers.sparsity.l1 import ReLUL1, ReLUL1Config, Weighting
from mxd.layers.sparsity.product import PairTopKConfig, ProductQuantileConfig, ProductTopKConfig
from mxd.layers.sparsity.topk import RandomK, RandomKConfig, TopK, TopKConfig
from mxd.layers.sparsity.topk_softmax import TopKSoftmaxConfig

AnySparsity = Annotated[
    TopKConfig
    | RandomKConfig
    | ReLUL1Config
    | JumpReLUConfig
    | TopKSoftmaxConfig
    | ProductTopKConfig
    | ProductQuantileConfig
    | PairTopKConfig,
    Field(discriminator="kind"),
]

__all__ = [
    "AnySparsity",
    "JumpReLU",
    "JumpReLUConfig",
    "PairTopKConfig",
    "ProductQuantileConfig",
    "ProductTopKConfig",
    "RandomK",
    "RandomKConfig",
    "ReLUL1",
    "ReLUL1Config",
    "Sparsity",
    "SparsityConfig",
    "TopK",
    "TopKConfig",
    "TopKSoftmaxConfig",
    "Weighting",
]
