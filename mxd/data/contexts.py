"""Documents -> contexts of token ids: packed to one length, BOS first where the model has one.

A list of documents is tokenised once, in an order drawn from the seed, into a file that is memory-mapped here and by
every later run, and is read in a new order every epoch. A stream is tokenised as it comes; a resumed run reads its
beginning again, without running the model on it.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from mxd.common.errors import MxdError
from mxd.common.files import atomic_file

Contexts = Callable[[int], Iterator[Int[np.ndarray, " context"]]]
"""``contexts(n)`` yields the contexts of a text from number n on."""

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


def token_contexts(
    texts: Iterable[str],
    tokenizer: Any,
    context: int = 128,
    bos: bool = True,
    seed: int = 0,
    repeat: bool = True,
    shuffle: bool = True,
    vocabulary: int | None = None,
) -> "Finite | Streamed":
    """Pack documents into contexts of ``context`` tokens.

    Each document is followed by EOS where the tokenizer has one; each context begins with BOS where the tokenizer has
    one and ``bos`` is set. The last incomplete context is dropped.

    Args:
        texts: documents; a list is tokenised at once, any other iterable lazily, once and in its own order.
        tokenizer: a Hugging Face tokenizer.
        context: tokens in a context.
        bos: begin each context with BOS.
        seed: determines the order of documents, and of contexts within every epoch.
        repeat: begin a new epoch, in a new order, at the end of a list.
        shuffle: whether a list is reordered at all.
        vocabulary: the number of token ids that the model knows; by default no id is too large.

    Raises:
        MxdError: the texts are shorter than one context, or the tokenizer gives ids that the model does not know.
    """
    first = tokenizer.bos_token_id if bos else None
    if not isinstance(texts, list):
        return Streamed(lambda: _pack(texts, tokenizer, context, first), vocabulary)
    rng = np.random.default_rng(seed)
    ordered = [texts[i] for i in rng.permutation(len(texts))] if shuffle else texts
    return Finite(*_packed_once(ordered, tokenizer, context, first, vocabulary), seed, repeat, shuffle)


@dataclass(frozen=True)
class Finite:
    """The contexts of a list of texts, epoch after epoch, and a hash that identifies them."""

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


@dataclass(frozen=True)
class Streamed:
    """The contexts of texts that are read once, hashed as they come."""

    pack: Callable[[], Iterator[Int[np.ndarray, " context"]]]
    vocabulary: int | None
    digests: dict[int, str] = field(default_factory=dict)
    """n -> hash of the first n contexts, for values of n that were reached lately."""

    def __call__(self, start: int) -> Iterator[Int[np.ndarray, " context"]]:
        """Yield the contexts from number ``start`` on."""
        seen = hashlib.sha256()
        self.digests[0] = seen.hexdigest()[:32]
        for number, row in enumerate(self.pack(), 1):
            _check_ids(row, self.vocabulary)
            seen.update(row.data)
            if number >= start:
                self.digests[number] = seen.hexdigest()[:32]
            if number > start:
                yield row

    def digest(self, contexts: int) -> str:
        """Return the hash of the first ``contexts`` contexts' token ids; "" before they have been read.

        Hashes of fewer contexts are forgotten.
        """
        for number in list(self.digests):  # another thread may be reading ahead
            if number < contexts:
                del self.digests[number]
        return self.digests.get(contexts, "")


def token_folder() -> Path:
    """Return the folder of tokenised text: ``$MXD_CACHE``, or ``~/.cache/mxd``. It can be deleted at any time."""
    return Path(os.environ.get("MXD_CACHE") or Path.home() / ".cache" / "mxd").expanduser()


def _packed_once(
    texts: list[str], tokenizer: Any, context: int, first: int | None, vocabulary: int | None
) -> tuple[Int[np.ndarray, "contexts context"], bytes]:
    """Return the packed contexts and their SHA-256, memory-mapped from a file named by a hash of all they depend on.

    The file is written if it is missing, or if the seal at its end shows that it is damaged.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python, which has nothing to name the file by
        return _hashed(_packed(texts, tokenizer, context, first, vocabulary))
    split = getattr(tokenizer, "split_special_tokens", False)  # the only setting that the backend's JSON lacks
    digest = hashlib.sha256(f"{context} {first} {tokenizer.eos_token_id} {split} {backend.to_str()}".encode())
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big") + raw)
    try:
        file = token_folder() / f"tokens-{digest.hexdigest()[:32]}.int32"
        stored = _read(file, context, vocabulary)
    except (OSError, RuntimeError):  # no permission to read, or no home folder: use memory instead
        return _hashed(_packed(texts, tokenizer, context, first, vocabulary))
    if stored is not None:
        return stored
    packed = _packed(texts, tokenizer, context, first, vocabulary)
    try:
        return _write(packed, file)
    except (OSError, MxdError):  # cannot write: use memory instead
        return _hashed(packed)


def _hashed(rows: Int[np.ndarray, "contexts context"]) -> tuple[Int[np.ndarray, "contexts context"], bytes]:
    return rows, hashlib.sha256(rows.data).digest()


def _read(file: Path, context: int, vocabulary: int | None) -> tuple[Int[np.ndarray, "contexts context"], bytes] | None:
    """Return the contexts in a file and their SHA-256; ``None`` where the file is missing or damaged."""
    size = file.stat().st_size - SEAL_BYTES if file.is_file() else 0
    if size <= 0 or size % (4 * context):
        return None
    with file.open("rb") as handle:
        handle.seek(size)
        seal = handle.read()
    rows = np.memmap(file, np.int32, "r", shape=(size // (4 * context), context))
    digest = hashlib.sha256(rows.data).digest()
    return (rows, digest) if seal == _seal(file, digest) and _known(rows, vocabulary) else None


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


def _write(
    packed: Int[np.ndarray, "contexts context"], file: Path
) -> tuple[Int[np.ndarray, "contexts context"], bytes]:
    """Write a file atomically, and return what ``_read`` would."""
    digest = hashlib.sha256(packed.data).digest()
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as partial, partial.open("wb") as handle:
        packed.tofile(handle)
        handle.write(_seal(file, digest))
    return np.memmap(file, np.int32, "r", shape=packed.shape), digest


def _packed(
    texts: list[str], tokenizer: Any, context: int, first: int | None, vocabulary: int | None
) -> Int[np.ndarray, "contexts context"]:
    packed = np.array(list(_pack(texts, tokenizer, context, first)), dtype=np.int32)
    if len(packed) == 0:
        raise MxdError(
            f"the text holds less than one context of {context} tokens; give more text or a shorter context."
        )
    _check_ids(packed, vocabulary)
    return packed


def _pack(
    texts: Iterable[str], tokenizer: Any, context: int, first: int | None
) -> Iterator[Int[np.ndarray, " context"]]:
    """Tokenise documents, 256 at a time, and cut their ids, joined by EOS, into contexts that begin with ``first``."""
    head = [] if first is None else [first]
    room = context - len(head)
    eos = tokenizer.eos_token_id
    pending: list[int] = []
    source = iter(texts)
    while batch := list(islice(source, 256)):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            pending.extend(ids)
            if eos is not None:
                pending.append(eos)
        whole = len(pending) // room
        for i in range(whole):
            yield np.array(head + pending[i * room : (i + 1) * room], dtype=np.int32)
        pending = pending[whole * room :]
