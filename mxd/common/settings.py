"""The base of every config that a person writes: frozen and strict, with whole numbers as people write them."""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from mxd.common.parsing import whole_number


class Frozen(BaseModel):
    """Unknown fields and infinite numbers are refused; docstrings are the help; 10k is a whole number."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        whole = {name for name, field in cls.model_fields.items() if _is_whole(field.annotation)}
        return {name: whole_number(value) if name in whole else value for name, value in fields.items()}


def _is_whole(annotation: Any) -> bool:
    """Return whether a field's value may be a whole number."""
    return annotation is int or any(map(_is_whole, get_args(annotation)))
