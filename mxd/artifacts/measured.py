"""The fields of a ``faithfulness.json`` that a card shows; anyone may have written the file."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, create_model

from mxd.common.errors import MxdError
from mxd.metrics import METRICS

_FIELDS: dict[str, Any] = {m.key: (float | None, None) for m in METRICS["faithfulness"] if "." not in m.key}
_Numbers: Any = create_model("_Numbers", **_FIELDS)


class Replaced(BaseModel):
    """One layer of a measured splice."""

    method: str
    sparsity: str
    block: int
    units: int
    params: int
    tokens_trained: int


class Around(BaseModel):
    """Measurements with the base MLP in place at special tokens."""

    ce_increase: float


class Site(_Numbers):
    """Measurements at one MLP."""


class Result(_Numbers):
    """Measurements of one splice."""

    tokens: int
    ce_base: float
    ce_zero: float | None = None
    ce_increase: float
    around_special: Around | None = None
    blocks: dict[str, Site]
    replacements: list[Replaced]


class Evaluation(BaseModel):
    """The fields of a ``faithfulness.json`` that a card shows."""

    model: str
    data: dict[str, Any]
    results: dict[str, Result]

    @classmethod
    def read(cls, path: Path) -> "Evaluation | None":
        """Read a file; ``None`` where there is none.

        Raises:
            MxdError: it is not what ``mxd evaluate`` writes.
        """
        if not path.is_file():
            return None
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise MxdError(f"{path} is not what `mxd evaluate` writes; run that again, or delete it.") from error
