"""Rows of numbers as a data frame, where pandas is installed."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mxd.common.errors import MxdError

if TYPE_CHECKING:
    import pandas


def data_frame(rows: Iterable[Mapping[str, Any]]) -> "pandas.DataFrame":
    """Return rows as a data frame; a column that a row lacks is empty there.

    Raises:
        MxdError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise MxdError("to_pandas needs the package pandas: pip install pandas") from error
    return pandas.DataFrame(list(rows))
