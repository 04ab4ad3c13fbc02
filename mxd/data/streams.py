"""The documents of a dataset on the Hub, read as they come, from the beginning or from where an earlier reading was.

The dataset's files are read in an order drawn from the seed, and their rows are permuted window by window, each by a
generator of its own. (The buffer of `datasets` mixes as many rows, but depends on the whole past, and its state leaves
it out.) So a place in the text is where its window begins, which `datasets` can say, and a number of documents.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mxd.data.tables import Located, Row, reading

WINDOW = 10_000
"""Rows that are permuted at a time."""
BATCH = 256
"""The most documents that are handed on at a time, to be tokenised together."""
FORGETFUL = ("5.0.0",)
"""Versions of `datasets` whose streams lose their place once they were continued (huggingface/datasets issue 8308)."""


@dataclass(frozen=True)
class Place:
    """Where a batch of documents begins."""

    window: int = 0
    file: int = 0
    """The file in which the window begins, counted in the order in which they are read."""
    state: dict[str, Any] | None = None
    """The state of `datasets` there; ``None`` at the beginning of the file."""
    documents: int = 0
    """Documents of the window before the batch."""
    datasets: str = ""
    """The version whose state it is."""


@dataclass(frozen=True)
class TextStream:
    """The documents of a dataset; each iteration reads them from the beginning."""

    source: str
    table: Any
    """The ``datasets.IterableDataset``."""
    read: Callable[[Iterable[Located]], Iterator[str]]
    """The documents of some rows."""
    seed: int

    def __iter__(self) -> Iterator[str]:
        """Yield every document."""
        for _, texts in self.batches():
            yield from texts

    def batches(self, start: Place | None = None) -> Iterator[tuple[Place | None, list[str]]]:
        """Yield documents by the batch, each with its place, or ``None`` where `datasets` cannot be continued there.

        Args:
            start: the place of the first batch; by default the beginning.

        Raises:
            MxdError: the dataset cannot be read.
        """
        version, first = _version(), start.documents if start else 0
        for place, rows in self._windows(start or Place()):
            begin = place.window * WINDOW + 1
            order = np.random.default_rng([self.seed, place.window]).permutation(len(rows))
            texts = list(self.read((f"{self.source}, row {begin + i}", rows[i]) for i in order))
            for done in range(first, len(texts), BATCH):
                here = None if version in FORGETFUL else replace(place, documents=done, datasets=version)
                yield here, texts[done : done + BATCH]
            first = 0

    def obstacle(self, place: Place | None) -> str:
        """Return why the text cannot be read on from a place, or "" if it can."""
        if place is None:
            return "where to read on was not saved"
        now = _version()
        if now in FORGETFUL:
            return f"streams of datasets {now} lose their place (its issue 8308); install another version"
        if now != place.datasets:
            return f"the place was saved by datasets {place.datasets}, and {now} is installed"
        return ""

    def _windows(self, place: Place) -> Iterator[tuple[Place, list[Row]]]:
        """Yield the rows of each window in the dataset's own order, and where it begins: the first at ``place``."""
        rows: list[Row] = []
        with reading(self.source):
            order = np.random.default_rng(self.seed).permutation(self.table.num_shards)
            for number in range(place.file, len(order)):
                file = self.table.shard(num_shards=len(order), index=int(order[number]))
                if number == place.file and place.state is not None:
                    file.load_state_dict(place.state)
                for row in file:
                    rows.append(row)
                    if len(rows) == WINDOW:
                        yield place, rows
                        place, rows = Place(place.window + 1, number, file.state_dict()), []
            if rows:
                yield place, rows


def _version() -> str:
    import datasets

    return datasets.__version__
