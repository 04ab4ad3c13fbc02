"""Long texts cut at paragraphs, so that a source of few documents has held-out text."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from mxd.common.numbers import plural

PIECE = 2_000
"""The most characters of a piece; the least are half of that, but at a document's end."""
_BREAKS = ("\n\n", "\n\r\n", "\n", " ")


def pieces(text: str) -> Iterator[str]:
    r"""Yield a text in pieces, cut after a blank line where there is one, else after a line, a word, or anywhere.

    The pieces joined are the text, and appending to the text changes none but the last.

    >>> list(pieces("a" * 1_500 + "\n\n" + "b" * 3_000))[0][-2:]
    'a\n\n'
    """
    begin = 0
    while len(text) - begin > PIECE:
        least, most = begin + PIECE // 2, begin + PIECE
        found = ((text.rfind(mark, least, most), len(mark)) for mark in _BREAKS)
        end = next((at + length for at, length in found if at >= 0), most)
        yield text[begin:end]
        begin = end
    yield text[begin:]


def cut_out(read: Callable[[], Iterable[str]], split: str, percent: int) -> Iterator[str]:
    """Yield the part of some texts that belongs to a split: pieces in their order, neighbours joined again.

    The different pieces are ordered by a hash; the first belong to ``validation``, as many to ``test``, the others to
    ``train``. So equal pieces are on the same side.

    Args:
        read: gives the texts, each time anew.
        split: ``train``, ``validation`` or ``test``.
        percent: of the different pieces, those of ``validation``; at least one.

    Raises:
        ValueError: there are fewer than three different pieces.
    """
    ranked = sorted({_rank(piece) for text in read() for piece in pieces(text)})
    if len(ranked) < 3:
        raise ValueError(
            f"too short to hold some of it out: {plural(len(ranked), 'different piece')} of about {PIECE:,} characters"
        )
    held = max(1, len(ranked) * percent // 100)

    def side(piece: str) -> str:
        rank = _rank(piece)
        return "validation" if rank < ranked[held] else "test" if rank < ranked[2 * held] else "train"

    for text in read():
        for name, run in groupby(pieces(text), key=side):
            if name == split:
                yield "".join(run)


def _rank(piece: str) -> bytes:
    return hashlib.sha256(piece.encode()).digest()[:16]
