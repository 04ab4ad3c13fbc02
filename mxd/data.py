"""Text -> blocks of token ids. Documents are packed into contexts of fixed length, BOS first where the model has one.

Finite sources are tokenised once, in an order drawn from the seed, into a file that is memory-mapped here and by every
later run, and are read in a new order every epoch. Larger Hub datasets are streamed; resuming then re-reads (but does
not re-run the model on) what went before.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from jaxtyping import Bool, Int

from mxd.errors import MxdError, unknown
from mxd.model import bundled
from mxd.plain import parse_json, read_text, regular, sayable

SPLITS = ("train", "validation", "test")
BUNDLED = {"bundled": None, "bundled:sotu": "sotu", "bundled:factbook": "factbook"}
"""Name of bundled text -> the one of its sources whose documents it holds, or all."""
LOCAL_SUFFIXES = (".txt", ".jsonl", ".parquet")
HELD_OUT_PERCENT = 5
"""Of the documents of a local source without its own splits, this share is validation, and as much again test."""

Blocks = Callable[[int], Iterator[Int[np.ndarray, " context"]]]
"""``blocks(n)`` yields the contexts of a stream from number n on."""


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
        return _bundled(source, split, column)
    path = Path(source)
    try:
        if path.exists():
            return list(_local(path, split, column))
    except OSError as error:
        raise MxdError(f"cannot read text from {source!r}: {error.strerror}.") from error
    if path.suffix in LOCAL_SUFFIXES:
        raise MxdError(f"no text file at {source!r}.")
    return _hub(source, split, column, streaming, seed, part)


def _bundled(source: str, split: str, column: str) -> list[str]:
    if source not in BUNDLED:
        raise unknown("bundled text", source, BUNDLED)
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    path = bundled(f"text/{split}.parquet")
    texts = list(_read_file(path, column))
    if (wanted := BUNDLED[source]) is None:
        return texts
    return [text for text, of in zip(texts, _read_file(path, "source"), strict=True) if of == wanted]


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
) -> Blocks:
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

    Raises:
        MxdError: the texts hold not even one context.
    """
    first = tokenizer.bos_token_id if bos else None
    if not isinstance(texts, list):
        return lambda start: islice(_pack(texts, tokenizer, context, first), start, None)
    rng = np.random.default_rng(seed)
    ordered = [texts[i] for i in rng.permutation(len(texts))] if shuffle else texts
    packed = _packed_once(ordered, tokenizer, context, first)

    def blocks(start: int) -> Iterator[np.ndarray]:
        epoch, row = divmod(start, len(packed))
        while epoch == 0 or repeat:
            order = np.random.default_rng([seed, epoch]).permutation(len(packed)) if shuffle else range(len(packed))
            for i in order[row:]:
                yield packed[i]
            epoch, row = epoch + 1, 0

    return blocks


def token_folder() -> Path:
    """Return where tokenised text is kept: ``$MXD_CACHE``, or ``~/.cache/mxd``. It can be deleted at any time."""
    return Path(os.environ.get("MXD_CACHE") or Path.home() / ".cache" / "mxd").expanduser()


def _packed_once(
    texts: list[str], tokenizer: Any, context: int, first: int | None
) -> Int[np.ndarray, "contexts context"]:
    """Return the packed contexts, memory-mapped from a file named by all they depend on; written if not there."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python, which has nothing to name the file by
        return _packed(texts, tokenizer, context, first)
    split = getattr(tokenizer, "split_special_tokens", False)  # the one setting that the backend does not spell out
    digest = hashlib.sha256(f"{context} {first} {tokenizer.eos_token_id} {split} {backend.to_str()}".encode())
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big") + raw)
    packed = None
    try:
        file = token_folder() / f"tokens-{digest.hexdigest()[:32]}.int32"
        if not file.is_file() or file.stat().st_size == 0 or file.stat().st_size % (4 * context):
            packed = _packed(texts, tokenizer, context, first)
            _write(packed, file)
        return np.memmap(file, np.int32, "r").reshape(-1, context)
    except (OSError, RuntimeError):  # nowhere to write, or no home: the run goes on from memory
        return _packed(texts, tokenizer, context, first) if packed is None else packed


def _write(packed: Int[np.ndarray, "contexts context"], file: Path) -> None:
    """Write a file that appears whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.stem}.{uuid4().hex[:8]}")
    try:
        with partial.open("wb") as handle:
            packed.tofile(handle)
            os.fsync(handle.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _packed(texts: list[str], tokenizer: Any, context: int, first: int | None) -> Int[np.ndarray, "contexts context"]:
    packed = np.array(list(_pack(texts, tokenizer, context, first)), dtype=np.int32)
    if len(packed) == 0:
        raise MxdError(
            f"the text holds less than one context of {context} tokens; give more text or a shorter context."
        )
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


def _local(path: Path, split: str, column: str) -> Iterator[str]:
    files = sorted(f for f in path.iterdir() if f.suffix in LOCAL_SUFFIXES) if path.is_dir() else [path]
    if not files or any(f.suffix not in LOCAL_SUFFIXES for f in files):
        raise MxdError(f"no text in {str(path)!r}; expected a file or a folder of {', '.join(LOCAL_SUFFIXES)}.")
    named = [f for f in files if f.stem == split]
    texts = (text for file in named or files for text in _read_file(file, column))
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
    return "" if row[column] is None else sayable(str(row[column]))


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
