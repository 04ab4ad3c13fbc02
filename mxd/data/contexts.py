"""Documents -> contexts of token ids: packed to one length, BOS first where the model has one.

A sequence of documents is tokenised once, in an order drawn from the seed, into a file that is memory-mapped here and
by every later run, and is read in a new order every epoch. A stream is tokenised as it comes; a resumed run reads on
from a bookmark a little before its place, or where there is none from the beginning, without running the model on that.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from mxd.common.errors import MxdError
from mxd.common.files import atomic_file
from mxd.common.progress import console
from mxd.data.streams import BATCH, Place, TextStream

Contexts = Callable[[int], Iterator[Int[np.ndarray, " context"]]]
"""``contexts(n)`` yields the contexts of a text from number n on."""

READ_BYTES = 2**22
"""Bytes of token ids that are checked at a time."""
SEAL_BYTES = 32
"""Bytes at the end of a file of token ids: SHA-256 of its name and of the ids' SHA-256."""


def special_ids(tokenizer: Any) -> list[int]:
    """Return the ids of the tokenizer's special tokens (BOS, EOS, PAD ...), sorted."""
    return sorted(set(tokenizer.all_special_ids))


def counted_positions(
    ids: Int[np.ndarray, "*batch seq"], excluded: Iterable[int], bos_id: int | None = None
) -> Bool[np.ndarray, "*batch seq"]:
    """Return True where a position counts.

    Args:
        ids: token ids of whole contexts.
        excluded: tokens that never count.
        bos_id: a token that does not count at position 0.
    """
    counts = ~np.isin(ids, list(excluded))
    if bos_id is not None:
        counts[..., 0] &= ids[..., 0] != bos_id
    return counts


def head_ids(tokenizer: Any, bos: bool = True) -> list[int]:
    """Return the token ids that a prompt begins with: BOS where the tokenizer has one and ``bos`` is set.

    Raises:
        MxdError: the model has no tokenizer.
    """
    if tokenizer is None:
        raise MxdError("the base model has no tokenizer; load the model with one, or give prompts as token ids.")
    return [tokenizer.bos_token_id] if bos and tokenizer.bos_token_id is not None else []


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Return a prompt as token ids, as it is, without BOS.

    Raises:
        MxdError: it has none.
    """
    ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not ids:
        raise MxdError(f"the prompt {prompt!r} has no tokens; give it a word.")
    return ids


def token_contexts(
    texts: Iterable[str],
    tokenizer: Any,
    context: int = 128,
    bos: bool = True,
    seed: int = 0,
    repeat: bool = True,
    shuffle: bool = True,
    vocabulary: int | None = None,
    begin: "Bookmark | None" = None,
) -> "Finite | Streamed":
    """Pack documents into contexts of ``context`` tokens.

    Each document is followed by EOS where the tokenizer has one; each context begins with BOS where the tokenizer has
    one and ``bos`` is set. The last incomplete context is dropped.

    Args:
        texts: documents; a sequence is tokenised at once, any other iterable lazily, once and in its own order.
        tokenizer: a Hugging Face tokenizer.
        context: tokens in a context.
        bos: begin each context with BOS.
        seed: determines the order of documents, and of contexts within every epoch.
        repeat: begin a new epoch, in a new order, at the end of a sequence.
        shuffle: whether a sequence is reordered at all.
        vocabulary: the number of token ids that the model knows; by default no id is too large.
        begin: where to begin reading texts that are not a sequence, to reach any context after it.

    Raises:
        MxdError: the texts are shorter than one context, or the tokenizer gives ids that the model does not know.
    """
    first = tokenizer.bos_token_id if bos else None
    if not isinstance(texts, Sequence):
        return Streamed(texts, partial(_cut, tokenizer=tokenizer, context=context, first=first), vocabulary, begin)
    order = np.random.default_rng(seed).permutation(len(texts)) if shuffle else range(len(texts))
    packed, sha256 = _packed_once(lambda: (texts[int(i)] for i in order), tokenizer, context, first, vocabulary)
    return Finite(packed, sha256, seed, repeat, shuffle)


@dataclass(frozen=True)
class Finite:
    """The contexts of a sequence of texts, epoch after epoch, and a hash that identifies them."""

    rows: Int[np.ndarray, "contexts context"]
    sha256: bytes
    seed: int
    repeat: bool
    shuffle: bool

    def __call__(self, start: int) -> Iterator[Int[np.ndarray, " context"]]:
        """Yield the contexts from number ``start`` on."""
        count = len(self.rows)
        epoch, row = divmod(start, count)
        while epoch == 0 or self.repeat:
            order: Sequence[int] | np.ndarray = range(count)
            if self.shuffle:
                order = np.random.default_rng([self.seed, epoch]).permutation(count)
            for i in order[row:]:
                yield self.rows[i]
            epoch, row = epoch + 1, 0

    def digest(self, contexts: int) -> str:
        """Return the hash of all token ids, whatever the number of contexts."""
        return self.sha256.hex()[:32]

    def bookmark(self, contexts: int) -> None:
        """Return nothing: every context is at hand."""


@dataclass(frozen=True)
class Bookmark:
    """Where a stream can be read from: everything that the contexts from there on depend on."""

    context: int = 0
    """Contexts before it."""
    text: str = ""
    """Their hash."""
    ids: tuple[int, ...] = ()
    """Token ids after them, of documents before ``place``."""
    place: Place | None = None
    """Where the next document is; ``None`` at the beginning."""


Cut = Callable[[list[str], Sequence[int]], tuple[list[Int[np.ndarray, " context"]], list[int]]]
"""``cut(texts, ids)`` returns the contexts of the ids and then the texts, and the ids left over."""


@dataclass(frozen=True)
class Streamed:
    """The contexts of texts that are read once, hashed as they come."""

    texts: Iterable[str]
    cut: Cut
    vocabulary: int | None
    begin: Bookmark | None = None
    """Where to begin reading, to reach any context after it."""
    digests: dict[int, str] = field(default_factory=dict)
    """n -> hash of the first n contexts, for values of n that were reached lately."""
    bookmarks: dict[int, Bookmark] = field(default_factory=dict)
    """n -> the last bookmark after n contexts, for values of n that were reached lately."""

    def __call__(self, start: int) -> Iterator[Int[np.ndarray, " context"]]:
        """Yield the contexts from number ``start`` on.

        The hash of n contexts is that of the hash of n - 1 contexts and the ids of one more.
        """
        begin = self._begin() if start else Bookmark()
        number, seen, ids = begin.context, begin.text, list(begin.ids)
        for place, texts in _batches(self.texts, begin.place):
            if number < start:
                self.bookmarks.clear()  # of a text that is read again only the last before ``start`` is of use
            if place is not None:
                self.bookmarks[number] = Bookmark(number, seen, tuple(ids), place)
            rows, ids = self.cut(texts, ids)
            for row in rows:
                _check_ids(row, self.vocabulary)
                number, seen = number + 1, _chained(seen, row)
                if number >= start:
                    self.digests[number] = seen
                if number > start:
                    yield row

    def _begin(self) -> Bookmark:
        """Return where to begin; where that cannot be, say why and return the beginning of the text."""
        place = self.begin.place if self.begin else None
        problem = self.texts.obstacle(place) if isinstance(self.texts, TextStream) else "it can be read in no other way"
        if self.begin and not problem:
            return self.begin
        console.tell(f"The text is read again from its beginning: {problem}.")
        return Bookmark()

    def digest(self, contexts: int) -> str:
        """Return the hash of the first ``contexts`` contexts' token ids; "" before they have been read.

        Hashes of fewer contexts are forgotten.
        """
        for number in list(self.digests):  # another thread may be reading ahead
            if number < contexts:
                del self.digests[number]
        return self.digests.get(contexts, "")

    def bookmark(self, contexts: int) -> Bookmark | None:
        """Return the last bookmark before the end of the first ``contexts`` contexts, if there is one.

        At least one context is thus read again, whose hash shows whether it is the same text. Earlier bookmarks are
        forgotten.
        """
        before = [number for number in list(self.bookmarks) if number < contexts]
        for number in sorted(before)[:-1]:
            del self.bookmarks[number]
        return self.bookmarks[max(before)] if before else None


def token_folder() -> Path:
    """Return the folder of tokenised text: ``$MXD_CACHE``, or ``~/.cache/mxd``. It can be deleted at any time."""
    return Path(os.environ.get("MXD_CACHE") or Path.home() / ".cache" / "mxd").expanduser()


Packed = tuple[Int[np.ndarray, "contexts context"], bytes]
"""Contexts, and the SHA-256 of their ids."""


def _packed_once(
    texts: Callable[[], Iterator[str]], tokenizer: Any, context: int, first: int | None, vocabulary: int | None
) -> Packed:
    """Return the packed contexts, memory-mapped from a file named by a hash of all they depend on.

    The file is written if it is missing, or if the seal at its end shows that it is damaged. ``texts`` gives the
    documents, for the hash and for every attempt.
    """

    def packed() -> Iterator[Int[np.ndarray, "contexts context"]]:
        return _packed(texts(), tokenizer, context, first, vocabulary)

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python, which has nothing to name the file by
        return _in_memory(packed())
    split = getattr(tokenizer, "split_special_tokens", False)  # the only setting that the backend's JSON lacks
    digest = hashlib.sha256(f"{context} {first} {tokenizer.eos_token_id} {split} {backend.to_str()}".encode())
    for text in texts():
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big") + raw)
    try:
        file = token_folder() / f"tokens-{digest.hexdigest()[:32]}.int32"
        stored = _read(file, context, vocabulary)
    except (OSError, RuntimeError):  # no permission to read, or no home folder: use memory instead
        return _in_memory(packed())
    if stored is not None:
        return stored
    try:
        return _write(packed(), file, context)
    except (OSError, MxdError):  # cannot write: use memory instead, which raises again what is wrong with the text
        return _in_memory(packed())


def _in_memory(packed: Iterable[Int[np.ndarray, "contexts context"]]) -> Packed:
    rows = np.concatenate(list(packed))
    return rows, hashlib.sha256(rows.data).digest()


def _read(file: Path, context: int, vocabulary: int | None) -> Packed | None:
    """Return the contexts in a file; ``None`` where the file is missing or damaged."""
    size = file.stat().st_size - SEAL_BYTES if file.is_file() else 0
    if size <= 0 or size % (4 * context):
        return None
    digest = hashlib.sha256()
    with file.open("rb") as handle:  # part by part: pages of a mapped file would count as this process's memory
        for begin in range(0, size, READ_BYTES):
            part = handle.read(min(READ_BYTES, size - begin))
            digest.update(part)
            if not _known(np.frombuffer(part, np.int32), vocabulary):
                return None
        seal = handle.read()
    if seal != _seal(file, digest.digest()):
        return None
    return np.memmap(file, np.int32, "r", shape=(size // (4 * context), context)), digest.digest()


def _seal(file: Path, digest: bytes) -> bytes:
    return hashlib.sha256(file.name.encode() + digest).digest()


def _known(ids: Int[np.ndarray, "*shape"], vocabulary: int | None) -> bool:
    """Return whether all ids belong to a vocabulary of that size."""
    return int(ids.min()) >= 0 and (vocabulary is None or int(ids.max()) < vocabulary)


def _check_ids(ids: Int[np.ndarray, "*shape"], vocabulary: int | None) -> None:
    if not _known(ids, vocabulary):
        raise MxdError(
            f"the tokenizer gives ids from {ids.min()} to {ids.max()}, and the model knows 0 ... "
            f"{(vocabulary or 0) - 1}; give the model with the tokenizer that it was trained with."
        )


def _write(packed: Iterable[Int[np.ndarray, "contexts context"]], file: Path, context: int) -> Packed:
    """Write a file atomically, and return what ``_read`` would."""
    digest, count = hashlib.sha256(), 0
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as partial, partial.open("wb") as handle:
        for rows in packed:
            handle.write(rows.data)
            digest.update(rows.data)
            count += len(rows)
        handle.write(_seal(file, digest.digest()))
    return np.memmap(file, np.int32, "r", shape=(count, context)), digest.digest()


def _packed(
    texts: Iterable[str], tokenizer: Any, context: int, first: int | None, vocabulary: int | None
) -> Iterator[Int[np.ndarray, "contexts context"]]:
    """Yield the contexts of documents, some at a time.

    Raises:
        MxdError: there is not one, or an id that the model does not know.
    """
    ids: list[int] = []
    empty = True
    for _, batch in _batches(texts):
        rows, ids = _cut(batch, ids, tokenizer, context, first)
        if rows:
            packed = np.array(rows, dtype=np.int32)
            _check_ids(packed, vocabulary)
            yield packed
            empty = False
    if empty:
        raise MxdError(
            f"the text that is read holds less than one context of {context} tokens; give more text, a shorter "
            "context, or another split: of a text without splits of its own, train is the largest."
        )


def _batches(texts: Iterable[str], place: Place | None = None) -> Iterator[tuple[Place | None, list[str]]]:
    """Yield documents by the batch, each with its place if it has one, from a place on."""
    if isinstance(texts, TextStream):
        return texts.batches(place)
    source = iter(texts)
    return ((None, batch) for batch in iter(lambda: list(islice(source, BATCH)), []))


def _cut(
    texts: list[str], ids: Sequence[int], tokenizer: Any, context: int, first: int | None
) -> tuple[list[Int[np.ndarray, " context"]], list[int]]:
    """Tokenise documents and cut their ids, joined by EOS, into contexts that begin with ``first``.

    Args:
        texts: the documents.
        ids: token ids that come before theirs.
        tokenizer: a Hugging Face tokenizer.
        context: tokens in a context.
        first: the token that each begins with, if any.

    Returns:
        The contexts, and the ids that are left over.
    """
    head = [] if first is None else [first]
    room = context - len(head)
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pending = list(ids)
    for own in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        pending += [*own, *eos]
    whole = len(pending) // room * room
    rows = [np.array(head + pending[i : i + room], dtype=np.int32) for i in range(0, whole, room)]
    return rows, pending[whole:]


def _chained(before: str, row: Int[np.ndarray, " context"]) -> str:
    digest = hashlib.sha256(before.encode())
    digest.update(row.data)
    return digest.hexdigest()[:32]
