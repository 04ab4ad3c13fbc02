"""Text -> blocks of token ids. Documents are packed into contexts of fixed length, BOS first where the model has one.

Finite sources are tokenised once, in an order drawn from the seed, into a file that is memory-mapped here and by every
later run, and are read in a new order every epoch. Larger Hub datasets are streamed; resuming then re-reads (but does
not re-run the model on) what went before.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from jaxtyping import Bool, Int

from mxd.common.bundled import bundled
from mxd.common.errors import MxdError, unknown
from mxd.common.files import file_sha256, read_text, regular
from mxd.common.parsing import parse_json, without_surrogates

SPLITS = ("train", "validation", "test")
BUNDLED = {"bundled": None, "bundled:sotu": "sotu", "bundled:factbook": "factbook"}
"""Name of bundled text -> the one of its sources whose documents it holds, or all."""
LOCAL_SUFFIXES = (".txt", ".jsonl", ".parquet")
HELD_OUT_PERCENT = 5
"""Of the documents of a local source without its own splits, this share is validation, and as much again test."""

Blocks = Callable[[int], Iterator[Int[np.ndarray, " context"]]]
"""``blocks(n)`` yields the contexts of a stream from number n on."""

SEAL_BYTES = 32
"""At the end of a file of token ids: SHA-256 of its name and of the ids' own SHA-256."""


def documents(
    source: str,
    split: str = "train",
    column: str = "text",
    streaming: bool = False,
    seed: int = 0,
    part: str = "all",
) -> Iterable[str]:
    """Return the documents of a text source.

    Args:
        source: ``bundled``, or of that one source alone, ``bundled:sotu`` (speeches) or ``bundled:factbook``; a local
            ``.txt`` (one document), ``.jsonl`` or ``.parquet`` file; a folder of such files; or a Hub dataset,
            ``org/name[:config][@revision]``.
        split: for a folder that has a file of that name (``train.jsonl``), that file; for other local sources a
            split by document, drawn from a hash of its text; for Hub datasets the dataset's own split.
        column: the field that holds the text.
        streaming: read a Hub dataset without downloading it whole.
        seed: orders a streamed dataset.
        part: of a Hub dataset's split only the documents whose hash falls to ``train``, ``validation`` or ``test``
            (for datasets without held-out splits of their own), or ``all``.

    Raises:
        MxdError: nothing there, no such column or split, or the Hub cannot be reached.
    """
    if source.partition(":")[0] == "bundled":
        path = _bundled(source, split)
        texts = list(_read_file(path, column))
        if (wanted := BUNDLED[source]) is None:
            return texts
        return [text for text, of in zip(texts, _read_file(path, "source"), strict=True) if of == wanted]
    path = Path(source)
    try:
        if path.exists():
            return list(_local(path, split, column))
    except OSError as error:
        raise MxdError(f"cannot read text from {source!r}: {error.strerror}.") from error
    if path.suffix in LOCAL_SUFFIXES:
        raise MxdError(f"no text file at {source!r}.")
    return _hub(source, split, column, streaming, seed, part)


def text_hash(source: str, split: str = "train") -> str | None:
    """Return a hash of the files that a text of this machine is read from: the size and SHA-256 of each, in order.

    Returns:
        ``None`` where there is no such file here: of a Hub dataset only the token ids can tell.

    Raises:
        MxdError: a file cannot be read.
    """
    path = _bundled(source, split) if source.partition(":")[0] == "bundled" else Path(source)
    try:
        files = _local_files(path, split)[0] if path.exists() else []
        sizes = [f"{regular(file).stat().st_size} {file_sha256(file)}" for file in files]
    except OSError as error:
        raise MxdError(f"cannot read text from {source!r}: {error.strerror}.") from error
    return hashlib.sha256("\n".join(sizes).encode()).hexdigest()[:32] if sizes else None


def _bundled(source: str, split: str) -> Path:
    if source not in BUNDLED:
        raise unknown("bundled text", source, BUNDLED)
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    return bundled(f"text/{split}.parquet")


def special_ids(tokenizer: Any) -> list[int]:
    """Return the ids of the tokenizer's special tokens (BOS, EOS, PAD ...), sorted."""
    return sorted(set(tokenizer.all_special_ids))


def mask_of(
    ids: Int[np.ndarray, "*batch seq"], masked: Iterable[int], bos_id: int | None = None
) -> Bool[np.ndarray, "*batch seq"]:
    """Return True where a position counts.

    Args:
        ids: token ids of whole contexts.
        masked: tokens that count nowhere.
        bos_id: a token that does not count at position 0.
    """
    counts = ~np.isin(ids, list(masked))
    if bos_id is not None:
        counts[..., 0] &= ids[..., 0] != bos_id
    return counts


def head_ids(tokenizer: Any, bos: bool = True) -> list[int]:
    """Return what a prompt begins with: BOS where the tokenizer has one and ``bos`` is set.

    Raises:
        MxdError: the model has no tokenizer.
    """
    if tokenizer is None:
        raise MxdError("the base model has no tokenizer; load the model with one, or give prompts as token ids.")
    return [tokenizer.bos_token_id] if bos and tokenizer.bos_token_id is not None else []


def token_blocks(
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
        texts: documents; a list is tokenised at once, any other iterable lazily and once, in its own order.
        tokenizer: a Hugging Face tokenizer.
        context: tokens in a context.
        bos: begin each context with BOS.
        seed: orders documents, and contexts within every epoch.
        repeat: begin a new epoch, in a new order, when a list is at its end.
        shuffle: whether a list is reordered at all.
        vocabulary: how many token ids the model knows; by default no id is too large.

    Raises:
        MxdError: the texts hold not even one context, or the tokenizer gives ids that the model does not know.
    """
    first = tokenizer.bos_token_id if bos else None
    if not isinstance(texts, list):
        return Streamed(lambda: _pack(texts, tokenizer, context, first), vocabulary)
    rng = np.random.default_rng(seed)
    ordered = [texts[i] for i in rng.permutation(len(texts))] if shuffle else texts
    return Finite(*_packed_once(ordered, tokenizer, context, first, vocabulary), seed, repeat, shuffle)


@dataclass(frozen=True)
class Finite:
    """The contexts of a list of texts, epoch after epoch, and a hash by which the same text is known again."""

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
    """Number of contexts -> hash of so many, for those read lately."""

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
        """Return the hash of the token ids of the first so many contexts; "" before they have been read.

        It is forgotten when that of more contexts is asked for.
        """
        for number in list(self.digests):  # another thread may be reading ahead
            if number < contexts:
                del self.digests[number]
        return self.digests.get(contexts, "")


def token_folder() -> Path:
    """Return where tokenised text is kept: ``$MXD_CACHE``, or ``~/.cache/mxd``. It can be deleted at any time."""
    return Path(os.environ.get("MXD_CACHE") or Path.home() / ".cache" / "mxd").expanduser()


def _packed_once(
    texts: list[str], tokenizer: Any, context: int, first: int | None, vocabulary: int | None
) -> tuple[Int[np.ndarray, "contexts context"], bytes]:
    """Return the packed contexts and their SHA-256, memory-mapped from a file named by all they depend on.

    The file is written where it is not there, or not what was written, as the seal at its end says.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python, which has nothing to name the file by
        return _hashed(_packed(texts, tokenizer, context, first, vocabulary))
    split = getattr(tokenizer, "split_special_tokens", False)  # the one setting that the backend does not spell out
    digest = hashlib.sha256(f"{context} {first} {tokenizer.eos_token_id} {split} {backend.to_str()}".encode())
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big") + raw)
    packed = None
    try:
        file = token_folder() / f"tokens-{digest.hexdigest()[:32]}.int32"
        kept = _kept(file, context, vocabulary)
        if kept is None:
            packed = _packed(texts, tokenizer, context, first, vocabulary)
            kept = _write(packed, file)
        return kept
    except (OSError, RuntimeError):  # nowhere to write, or no home: the run goes on from memory
        return _hashed(_packed(texts, tokenizer, context, first, vocabulary) if packed is None else packed)


def _hashed(rows: Int[np.ndarray, "contexts context"]) -> tuple[Int[np.ndarray, "contexts context"], bytes]:
    return rows, hashlib.sha256(rows.data).digest()


def _kept(file: Path, context: int, vocabulary: int | None) -> tuple[Int[np.ndarray, "contexts context"], bytes] | None:
    """Return the contexts in a file and their SHA-256; ``None`` where there is no file, or not what was written."""
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
    """Whether all are ids of a vocabulary of that size."""
    return int(ids.min()) >= 0 and (vocabulary is None or int(ids.max()) < vocabulary)


def _check_ids(ids: Int[np.ndarray, "*shape"], vocabulary: int | None) -> None:
    if not _known(ids, vocabulary):
        raise MxdError(
            f"the tokenizer makes of the text ids from {ids.min()} to {ids.max()}, and the model knows 0 ... "
            f"{(vocabulary or 0) - 1}; give the model with the tokenizer that it was trained with."
        )


def _write(
    packed: Int[np.ndarray, "contexts context"], file: Path
) -> tuple[Int[np.ndarray, "contexts context"], bytes]:
    """Write a file that appears whole or not at all, and return what ``_kept`` would."""
    digest = hashlib.sha256(packed.data).digest()
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.stem}.{uuid4().hex[:8]}")
    try:
        with partial.open("wb") as handle:
            packed.tofile(handle)
            handle.write(_seal(file, digest))
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(file)
        return np.memmap(file, np.int32, "r", shape=packed.shape), digest
    finally:
        partial.unlink(missing_ok=True)


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


def _pack(texts: Iterable[str], tokenizer: Any, context: int, first: int | None) -> Iterator[np.ndarray]:
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


def _local_files(path: Path, split: str) -> tuple[list[Path], bool]:
    """Return the files that a split is read from, and whether they are that split's alone."""
    files = sorted(f for f in path.iterdir() if f.suffix in LOCAL_SUFFIXES) if path.is_dir() else [path]
    named = [f for f in files if f.stem == split]
    return named or files, bool(named)


def _local(path: Path, split: str, column: str) -> Iterator[str]:
    files, named = _local_files(path, split)
    if not files or any(f.suffix not in LOCAL_SUFFIXES for f in files):
        raise MxdError(f"no text in {str(path)!r}; expected a file or a folder of {', '.join(LOCAL_SUFFIXES)}.")
    texts = (text for file in files for text in _read_file(file, column))
    if not named:
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        texts = (text for text in texts if _hash_split(text) == split)
    empty = True
    for text in texts:
        empty = False
        yield text
    if empty:
        raise MxdError(
            f"{str(path)!r} has no document in split {split!r}. A local source without a file named {split!r} is split "
            f"by document ({HELD_OUT_PERCENT}% validation, {HELD_OUT_PERCENT}% test), so it needs many documents."
        )


def _hash_split(text: str) -> str:
    bucket = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 100
    if bucket < HELD_OUT_PERCENT:
        return "validation"
    return "test" if bucket < 2 * HELD_OUT_PERCENT else "train"


def _read_file(path: Path, column: str) -> Iterator[str]:
    try:
        if path.suffix == ".txt":
            yield read_text(path)
        elif path.suffix == ".jsonl":
            for line in read_text(path).split("\n"):  # JSON strings may hold other line ends
                if line.strip():
                    yield _text_of(parse_json(line), column, path)
        else:
            import pyarrow.parquet as pq

            table = pq.ParquetFile(regular(path))
            _text_of(dict.fromkeys(table.schema_arrow.names, ""), column, path)
            for batch in table.iter_batches(columns=[column]):
                yield from (_text_of({column: text}, column, path) for text in batch.column(0).to_pylist())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise MxdError(f"cannot read text from {str(path)!r}: {error}") from error


def _text_of(row: Any, column: str, where: object) -> str:
    if not isinstance(row, dict) or column not in row:
        have = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise MxdError(f"{where}: no text column {column!r}; it has: {have}. Set data.column.")
    return "" if row[column] is None else without_surrogates(str(row[column]))


def _hub(source: str, split: str, column: str, streaming: bool, seed: int, part: str) -> Iterable[str]:
    import datasets

    address, _, revision = source.partition("@")
    name, _, subset = address.partition(":")
    options = {"revision": revision} if revision else {}
    try:
        rows = datasets.load_dataset(name, subset or None, split=split, streaming=streaming, **options)
    except (OSError, ValueError, RuntimeError) as error:  # no network, no such dataset or split, needs a script
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise MxdError(
            f"cannot load dataset {source!r}, split {split!r}: {reason}\n"
            "Expected `bundled`, a local .txt/.jsonl/.parquet file or folder, or a Hub dataset that can be reached."
        ) from error
    if rows.column_names is not None:
        _text_of(dict.fromkeys(rows.column_names, ""), column, source)
    if streaming:
        rows = rows.shuffle(seed=seed, buffer_size=10_000)
    texts = (_text_of(row, column, source) for row in _guarded(rows, source))
    chosen = texts if part == "all" else (text for text in texts if _hash_split(text) == part)
    return chosen if streaming else list(chosen)


def _guarded(rows: Iterable[Any], source: str) -> Iterator[Any]:
    """Hand on rows; whatever a Hub client raises on the way becomes one clear error, so that a run can save."""
    try:
        yield from rows
    except MxdError:
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise MxdError(f"reading {source!r} failed: {reason}") from error
