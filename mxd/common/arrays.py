"""Arrays in files of results: base64 of little-endian numbers, with their type and how many there are.

A number for each of 262,144 units is 8 MB as decimals on lines of their own. As float32 it is 1.4 MB, and exact.
"""

import base64
from typing import Any

import numpy as np

TYPES = ("<f4", "<i4")
"""NumPy's names of the types that are stored: float32 and int32, little-endian."""
KEYS = {"dtype", "length", "base64"}


def packed(value: Any) -> Any:
    """Return what stands in JSON for a value that JSON lacks (``default`` of ``json.dumps``).

    Args:
        value: a one-dimensional array of float32 or int32; of anything else the text is returned.

    Raises:
        TypeError: an array of another type or shape.
    """
    if not isinstance(value, np.ndarray):
        return str(value)
    dtype = value.dtype.newbyteorder("<").str
    if dtype not in TYPES or value.ndim != 1:
        raise TypeError(f"got an array of {value.dtype} and shape {value.shape}; expected float32 or int32, and a line")
    return {"dtype": dtype, "length": len(value), "base64": base64.b64encode(value.astype(dtype).tobytes()).decode()}


def unpacked(value: dict[str, Any]) -> Any:
    """Return the array that an object of a JSON text stands for, and any other object as it is (an ``object_hook``).

    Raises:
        ValueError: the array is damaged.
    """
    if value.keys() != KEYS:
        return value
    dtype, length, text = value["dtype"], value["length"], value["base64"]
    if dtype not in TYPES or type(length) is not int or not isinstance(text, str):
        raise ValueError(f"it holds an array of {length!r} numbers of type {dtype!r}; expected {' or '.join(TYPES)}")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"it holds a damaged array: {error}") from error
    if len(data) != 4 * length:
        raise ValueError(f"it holds a damaged array: {len(data):,} bytes, expected {4 * length:,}")
    return np.frombuffer(data, dtype)
