"""Experts that are rows of a table, and hierarchies of them (Oldfield et al., muMoE, NeurIPS 2024, section 3).

With ``levels: [N1, ..., NE]`` a unit takes one expert of each level: experts multiply while parameters add. Each level
has a gate ``G_e [N_e, d]`` and a table ``C_e [N_e, columns]`` of its own, and a unit's row is the product of its
experts' rows. Then a mixture of units is the product of the levels' mixtures:

    sum_n a_n row_n = prod_e (a_e C_e),   a_(n_1 ... n_E) = prod_e a_(e, n_e),   row_(n_1 ... n_E) = prod_e C_e[n_e]
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from pydantic import PositiveInt, model_validator
from torch import Tensor, nn

from mxd.layers.base import code_product, linear_init, zeros
from mxd.layers.experts import ExpertConfig, ExpertLayer
from mxd.layers.gates import Code, LinearGate
from mxd.layers.hierarchy import LevelCode, LevelGate, split
from mxd.layers.sparsity import LevelsConfig, Sparsity

C = TypeVar("C", bound="TableConfig")

FORMED = 2**26
"""Numbers of a hierarchy's rows that are formed at a time."""


class TableConfig(ExpertConfig):
    """Fields of the methods whose experts are rows of a table."""

    levels: tuple[PositiveInt | None, ...] = ()
    """Numbers of experts in the levels of a hierarchy, ``[N1, ..., NE]``: a unit takes one of each, so there are
    ``N1 ... NE`` units. N1 may be left open (``null``): it follows from ``num_units``, or from the parameter budget.
    Needs ``sparsity: {kind: levels, levels: [...]}``. By default there is one level."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of experts in each level; all units where there is one level."""
        return tuple(size or 0 for size in self.levels) or (self.num_units or 0,)

    @property
    def experts(self) -> int:
        """As ``ExpertConfig``, of the first level."""
        return self.sizes[0]

    @property
    @abstractmethod
    def columns(self) -> tuple[int, ...]:
        """Numbers that an expert's row has in each level."""

    @property
    def table_params(self) -> int:
        """Number of the parameters in the levels' tables."""
        return sum(size * columns for size, columns in zip(self.sizes, self.columns, strict=True))

    @property
    def gate_params(self) -> int:
        """Number of the parameters of the levels' gates, biases included."""
        return sum(self.sizes) * ((self.d_in or 0) + 1)

    def active_params(self, l0: float) -> float:
        """As ``ReplacementConfig.active_params``; in a hierarchy each level has K active, whatever ``l0``."""
        if not isinstance(self.sparsity, LevelsConfig):
            return super().active_params(l0)
        levels = zip(self.sizes, self.columns, self.sparsity.levels, strict=True)
        idle = sum((size - level.k) * ((self.d_in or 0) + 1 + columns) for size, columns, level in levels)
        return float(self.layer_params - idle)

    @property
    def neutral(self) -> bool:
        """Whether the experts of further levels begin without an effect, so that a layer begins as one of one level."""
        return False

    @property
    def form(self) -> tuple[str, ...]:
        """As ``ExpertConfig``, with the levels' sizes."""
        return (*super().form, *(["x".join(map(str, self.sizes))] if self.levels else []))

    @property
    def own_kinds(self) -> tuple[str, ...]:
        """A hierarchy's own kind, or all that are ``general``."""
        return ("levels",) if self.levels else super().own_kinds

    def build_sparsity(self) -> Sparsity:
        """Build the module that chooses units, level by level in a hierarchy."""
        if isinstance(self.sparsity, LevelsConfig):
            return self.sparsity.build_levels(self.sizes)
        return super().build_sparsity()

    def grown(self: C, units: int) -> C:
        """Return a copy with another number of experts in the first level."""
        if not self.levels:
            return super().grown(units)
        later = self.levels[1:]
        return self.model_copy(update={"levels": (units, *later), "num_units": units * math.prod(self.sizes[1:])})

    @model_validator(mode="before")
    @classmethod
    def _close(cls, fields: Any) -> Any:
        """Derive ``num_units`` from the levels, or an open first level from ``num_units``."""
        levels = fields.get("levels") if isinstance(fields, dict) else None
        if not isinstance(levels, list | tuple) or not all(isinstance(size, int) for size in levels[1:]):
            return fields
        later, units = math.prod(levels[1:]), fields.get("num_units")
        if levels and units is None and isinstance(levels[0], int):
            return fields | {"num_units": levels[0] * later}
        if levels and levels[0] is None and isinstance(units, int) and later > 0 and units % later == 0:
            return fields | {"levels": (units // later, *levels[1:])}
        return fields

    @model_validator(mode="after")
    def _check_levels(self: C) -> C:
        if not self.levels:
            return self
        if len(self.levels) < 2 or None in self.levels[1:]:
            raise ValueError(
                f"levels = {list(self.levels)} is no hierarchy; give two or more numbers (the first may be null)"
            )
        if self.num_units is not None and self.num_units != math.prod(self.sizes):
            raise ValueError(
                f"num_units = {self.num_units} is not the product of levels = {list(self.levels)}; leave it out"
            )
        assert isinstance(self.sparsity, LevelsConfig)
        if len(self.sparsity.levels) != len(self.levels):
            raise ValueError(
                f"{len(self.levels)} levels need as many in sparsity.levels, which has {len(self.sparsity.levels)}"
            )
        for number, (size, level) in enumerate(zip(self.levels, self.sparsity.levels, strict=True), 1):
            if size is not None and level.max_k is not None and level.max_k > size:
                raise ValueError(f"k = {level.max_k} is more than the {size} experts of level {number}; lower it")
        return self


class TableLayer(ExpertLayer):
    """Experts that are rows of a table ``[N, columns]``, which all that is between them shares."""

    config: TableConfig

    @property
    @abstractmethod
    def table(self) -> Float[Tensor, "units columns"]:
        """The table; in a hierarchy, that of the first level."""

    def row(self, n: int) -> Float[Tensor, " columns"]:
        """Return unit ``n``'s row."""
        return self.table[n]

    def rows(self) -> Iterator[Float[Tensor, "_ columns"]]:
        """Yield the rows of all units, some at a time."""
        yield self.table

    def mixture(self, code: Code) -> Float[Tensor, "tokens columns"]:
        """Return ``sum_n a_n row_n``."""
        return code_product(code, self.table)

    def factor_norms(self) -> Float[Tensor, " units"]:
        """Return the norm of each unit's row."""
        return self.of_rows(lambda rows: rows.square().sum(-1).clamp_min(1e-30).sqrt())

    def of_rows(self, function: Callable[[Tensor], Tensor]) -> Float[Tensor, " units"]:
        """Return what a function says of all units' rows, asking of some at a time."""
        return torch.cat([function(rows) for rows in self.rows()])


class Hierarchy(TableLayer):
    """Mix-in, before a ``TableLayer`` of one level in the order of bases: several levels.

    ``table``, ``gate`` and ``gate_bias`` are the first level's; those of the others follow one another.
    """

    def __init__(self, config: TableConfig) -> None:
        super().__init__(config)
        d, later = config.d_in or 0, config.sizes[1:]
        self.later_gate = linear_init(sum(later), d, fan_in=d)
        self.later_gate_bias = zeros(sum(later))
        shapes = zip(later, config.columns[1:], strict=True)
        self.later_tables = nn.ParameterList(linear_init(size, columns, fan_in=size) for size, columns in shapes)
        if config.neutral:
            for table in self.later_tables:
                table.data.copy_(self.neutral_row(table.shape[1]))

    @property
    def gates(self) -> LevelGate:
        """The levels' gates."""
        sizes = self.config.sizes[1:]
        later = zip(self.later_gate.split(sizes), self.later_gate_bias.split(sizes), strict=True)
        return LevelGate([super().gates, *(LinearGate(*level) for level in later)])

    def product(
        self, first: Float[Tensor, "*#batch _"], later: Float[Tensor, "*#batch _"]
    ) -> Float[Tensor, "*batch _"]:
        """Return the product of rows of one level with rows of later ones."""
        return first * later

    def neutral_row(self, columns: int) -> Float[Tensor, " _"]:
        """Return the row that all experts of a further level begin with where they are ``neutral``."""
        return torch.ones(columns)

    def row(self, n: int) -> Float[Tensor, " columns"]:
        """Return unit ``n``'s row, the product of its experts'."""
        return self._rows_of(torch.tensor(n, device=self.table.device))

    def rows(self) -> Iterator[Float[Tensor, "_ columns"]]:
        """Yield the rows of all units in order, some at a time."""
        later = self._later_table()
        for first in self.table.split(max(1, FORMED // (later.shape[0] * self._columns))):
            yield self.product(first.unsqueeze(1), later.unsqueeze(0)).flatten(0, 1)

    def mixture(self, code: Code) -> Float[Tensor, "tokens columns"]:
        """Return the product of the levels' mixtures, or of a list of units the mixture of their rows."""
        if isinstance(code, LevelCode):
            return self.product(code_product(code.first, self.table), code_product(code.later, self._later_table()))
        if code.all_units:
            widths = [len(rows) for rows in self.rows()]
            parts = zip(code.activations.split(widths, -1), self.rows(), strict=True)
            return reduce(torch.add, (_dense_product(activations, rows) for activations, rows in parts))
        tokens = max(1, FORMED // max(1, code.activations.shape[-1] * self._columns))
        parts = zip(code.activations.split(tokens), code.indices.split(tokens), strict=True)
        return torch.cat([torch.einsum("tk,tkc->tc", values, self._rows_of(units)) for values, units in parts])

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``; the tables have no unit."""
        return super().scaling() | {"later_gate": (1, 0)}

    @property
    def _columns(self) -> int:
        """Numbers in a unit's row."""
        return self._rows_of(torch.zeros((), dtype=torch.long, device=self.table.device)).shape[-1]

    def _rows_of(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch columns"]:
        tables = [self.table, *self.later_tables]
        return reduce(
            self.product, (table[part] for table, part in zip(tables, split(ids, self.config.sizes), strict=True))
        )

    def _later_table(self) -> Float[Tensor, "units _"]:
        """Return the rows of all units that the later levels make together, which are few."""
        tables = list(self.later_tables)
        return reduce(lambda one, other: self.product(one.unsqueeze(1), other.unsqueeze(0)).flatten(0, 1), tables)


def _dense_product(
    activations: Float[Tensor, "tokens units"], rows: Float[Tensor, "units columns"]
) -> Float[Tensor, "tokens columns"]:
    units = torch.arange(len(rows), device=rows.device).expand(activations.shape)
    return code_product(Code(activations, units, all_units=True), rows)
