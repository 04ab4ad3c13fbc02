"""How units are chosen. Each kind is a frozen config and a small module whose state lives in the state dict.

All apply ReLU to the pre-activations first, so activations are non-negative (MxD, section 2.4; Gao et al., TopK).
"""

from typing import Annotated

from pydantic import Field

from mxd.layers.sparsity.base import Sparsity, SparsityConfig
from mxd.layers.sparsity.jumprelu import JumpReLU, JumpReLUConfig
from mxd.layers.sparsity.l1 import ReLUL1, ReLUL1Config, Weighting
from mxd.layers.sparsity.levels import Levels, LevelsConfig
from mxd.layers.sparsity.topk import RandomK, RandomKConfig, TopK, TopKConfig

AnySparsity = Annotated[
    TopKConfig | RandomKConfig | ReLUL1Config | JumpReLUConfig | LevelsConfig, Field(discriminator="kind")
]

__all__ = [
    "AnySparsity",
    "JumpReLU",
    "JumpReLUConfig",
    "Levels",
    "LevelsConfig",
    "RandomK",
    "RandomKConfig",
    "ReLUL1",
    "ReLUL1Config",
    "Sparsity",
    "SparsityConfig",
    "TopK",
    "TopKConfig",
    "Weighting",
]
