"""The fields of ``faithfulness.json`` and ``whole.json`` that a card shows; anyone may have written the files."""

from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ValidationError, create_model

from mxd.common.errors import MxdError
from mxd.metrics import METRICS

F = TypeVar("F", bound="_File")

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


class Together(BaseModel):
    """Measurements with all blocks of a set replaced."""

    tokens: int
    ce_base: float
    ce_increase: float
    ce_increase_se: float | None = None
    kl: float | None = None
    kl_se: float | None = None
    top1_agreement: float | None = None
    alone_sum: float | None = None
    alone_sum_se: float | None = None
    around_special: Around | None = None
    params: int | None = None
    replacements: list[Replaced]


class _File(BaseModel):
    """A file of results."""

    command: ClassVar[str]
    """What writes it."""

    model: str
    data: dict[str, Any]

    @classmethod
    def read(cls: type[F], path: Path) -> F | None:
        """Read a file; ``None`` where there is none.

        Raises:
            MxdError: it is not what its command writes.
        """
        if not path.is_file():
            return None
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise MxdError(f"{path} is not what `{cls.command}` writes; run that again, or delete it.") from error


class Evaluation(_File):
    """The fields of a ``faithfulness.json`` that a card shows."""

    command = "mxd evaluate"

    results: dict[str, Result]


class Whole(_File):
    """The fields of a ``whole.json`` that a card shows."""

    command = "mxd whole"

    results: dict[str, Together]
