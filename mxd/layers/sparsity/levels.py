"""The sparsity of a hierarchy: each level chooses among its own experts (muMoE, section 3)."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, cast

from jaxtyping import Float
from pydantic import Field, field_validator
from torch import Tensor, nn

from mxd.layers.gates import Gate
from mxd.layers.hierarchy import LevelCode, LevelGate, level_code
from mxd.layers.sparsity.base import Sparsity, SparsityConfig
from mxd.layers.sparsity.topk import TopKConfig


class LevelsConfig(SparsityConfig):
    """Each level of a hierarchy chooses by itself: for layers with ``levels``."""

    general: ClassVar[bool] = False

    kind: Literal["levels"] = "levels"
    """Selects this kind."""
    levels: tuple[TopKConfig, ...] = Field((TopKConfig(), TopKConfig(k=1)), min_length=2)
    """How each level chooses, the first level first; a number stands for ``{kind: topk, k: number}``."""

    @field_validator("levels", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return [{"kind": "topk", "k": item} if isinstance(item, int) else item for item in value]

    @property
    def max_k(self) -> int:
        """The product of the levels'."""
        return math.prod(level.max_k for level in self.levels)

    @property
    def slug(self) -> str:
        """For example ``k32xk2``."""
        return "x".join(level.slug for level in self.levels)

    def build(self, units: int) -> "Levels":
        """Build the module for levels of ``units`` experts each."""
        return self.build_levels([units] * len(self.levels))

    def build_levels(self, sizes: Sequence[int]) -> "Levels":
        """Build the module for levels of the given sizes."""
        return Levels([level.build(size) for level, size in zip(self.levels, sizes, strict=True)])


class Levels(Sparsity):
    """A sparsity for each level; where K falls during a run (``widening``), that of the first level does."""

    def __init__(self, levels: Sequence[Sparsity]) -> None:
        super().__init__()
        self.levels = nn.ModuleList(levels)

    def seed(self, seed: int) -> None:
        """Seed each level."""
        for level in self._each():
            level.seed(seed)

    def forward(self, x: Float[Tensor, "tokens d_in"], gate: Gate) -> LevelCode:
        """Choose in each level."""
        levels = self._each()
        levels[0].widening = self.widening
        for level in levels:
            level.candidates, level.processes = self.candidates, self.processes
        gates = cast(LevelGate, gate)
        return level_code([level(x, part) for level, part in zip(levels, gates.levels, strict=True)], gates.sizes)

    def _each(self) -> list[Sparsity]:
        return [cast(Sparsity, level) for level in self.levels]
