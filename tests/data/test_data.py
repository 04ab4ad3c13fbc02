"""Text: packing by hand, orders drawn from the seed, every kind of source, and what is refused."""

import copy
import errno
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count, islice
from pathlib import Path

import numpy as np
import pytest
from damage import flipped
from datasets import load_dataset
from tables import SUFFIXES, write_table

from mxd.common.bundled import bundled, bundled_path
from mxd.common.errors import MxdError
from mxd.data import contexts
from mxd.data import text as source
from mxd.data.contexts import counted_positions, special_ids, token_contexts, token_folder
from mxd.data.labelled import BUNDLED_SETS, labelled_texts
from mxd.data.text import text_hash
from mxd.model.loading import BUNDLED, load_frozen, outline


class Letters:
    """A tokenizer whose tokens are letters: a = 10, b = 11 ...; BOS = 1, EOS = 2."""

    bos_token_id, eos_token_id = 1, 2

    def __call__(self, texts, **options):
        return {"input_ids": [[ord(letter) - ord("a") + 10 for letter in text] for text in texts]}


class Bare(Letters):
    """The same without BOS and EOS."""

    bos_token_id = eos_token_id = None


def packed(texts, tokenizer=None, **options):
    options = {"context": 4, "shuffle": False, "repeat": False, **options}
    return [row.tolist() for row in token_contexts(texts, tokenizer or Letters(), **options)(0)]


def numbered(n):
    """Documents that tell which one they are; of length 3, so that with EOS each fills one context of 5."""
    return [f"{chr(97 + i // 26)}{chr(97 + i % 26)}z" for i in range(n)]


# Packing


def test_packing_by_hand():
    # abc EOS de EOS f EOS, in threes behind BOS; the last two tokens do not fill a context
    assert packed(["abc", "de", "fg"]) == [[1, 10, 11, 12], [1, 2, 13, 14], [1, 2, 15, 16]]
    assert packed(["abc", "de", "fg"], bos=False) == [[10, 11, 12, 2], [13, 14, 2, 15]]
    assert packed(["abc", "de", "fg"], Bare()) == [[10, 11, 12, 13]]


def test_lists_and_generators_pack_the_same():
    texts = numbered(600)  # more than one batch of the tokenizer
    assert packed(iter(texts)) == packed(texts)
    assert sum(map(len, packed(texts))) == 600 * 4 // 3 * 4


def test_blocks_start_where_they_are_told():
    for options in ({}, {"shuffle": False}, {"repeat": False}):
        blocks = token_contexts(numbered(20), Letters(), context=5, seed=3, **options)
        whole = list(islice(blocks(0), 70))
        for start in (0, 1, 19, 20, 21, 45):
            rest = list(islice(blocks(start), 70 - start))
            assert np.array_equal(rest, whole[start:])


def test_a_lazy_source_starts_where_it_is_told():
    texts = numbered(20)
    rest = list(token_contexts(iter(texts), Letters(), context=5)(7))
    assert np.array_equal(rest, list(token_contexts(iter(texts), Letters(), context=5)(0))[7:])


def test_order_is_drawn_from_the_seed():
    def rows(seed):
        return np.stack(list(islice(token_contexts(numbered(50), Letters(), context=5, seed=seed)(0), 50)))

    assert np.array_equal(rows(1), rows(1))
    assert not np.array_equal(rows(1), rows(2))
    assert Counter(map(tuple, rows(1).tolist())) == Counter(map(tuple, rows(2).tolist()))


def test_the_contexts_of_a_single_document_are_ordered_by_the_seed_too():
    text = "".join(numbered(60))
    orders = [
        [tuple(row) for row in islice(token_contexts([text], Letters(), seed=s, context=9)(0), 22)] for s in (1, 2)
    ]
    assert set(orders[0]) == set(orders[1])
    assert orders[0] != orders[1]


def test_every_epoch_holds_the_same_contexts_in_a_new_order():
    rows = [tuple(row) for row in islice(token_contexts(numbered(50), Letters(), context=5)(0), 150)]
    epochs = [rows[:50], rows[50:100], rows[100:]]
    assert len(set(rows)) == 50
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_documents_are_shuffled_before_they_are_packed():
    """Otherwise contexts would always hold the same neighbours, whatever the seed."""
    together = set()
    for seed in range(2):
        rows = list(token_contexts(numbered(50), Letters(), context=9, seed=seed, repeat=False)(0))
        together.update((seed, tuple(row)) for row in rows)
    assert len({row for _, row in together}) == 50  # 25 contexts for each seed, none in common


def test_evaluation_reads_once_and_in_order():
    assert packed(numbered(3), context=5) == [[1, 10, 10, 35, 2], [1, 10, 11, 35, 2], [1, 10, 12, 35, 2]]


def test_an_endless_source_is_read_lazily():
    read = []

    def endless():
        for i in count():
            assert i < 5000, "read to its end"
            read.append(i)
            yield "abcdefg"

    blocks = token_contexts(endless(), Letters(), context=4)
    assert not read
    assert len(list(islice(blocks(0), 10))) == 10
    assert len(read) <= 256


def test_text_shorter_than_a_context_is_refused():
    for texts in ([], [""], ["abc"]):
        with pytest.raises(MxdError, match="less than one context of 128 tokens"):
            token_contexts(texts, Letters())


def test_the_bundled_tokenizer_packs_its_own_text(tokenizer):
    text = "The quick brown fox jumps over the lazy dog."
    rows = packed([text] * 3, tokenizer, context=8)
    stream = (tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]) * 3
    assert [row[0] for row in rows] == [tokenizer.bos_token_id] * len(rows)
    assert [token for row in rows for token in row[1:]] == stream[: len(stream) // 7 * 7]


# The file of tokens


class Counting:
    """A tokenizer that counts its calls; without ``backend_tokenizer`` it has nothing to name a file by."""

    def __init__(self, tokenizer, backend=True):
        self.own, self.calls = tokenizer, 0
        self.bos_token_id, self.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        if backend:
            self.backend_tokenizer = tokenizer.backend_tokenizer

    def __call__(self, texts, **options):
        self.calls += 1
        return self.own(texts, **options)


SENTENCES = [f"Sentence {i} is followed by sentence {i + 1}, unless it is the last.<|endoftext|>" for i in range(40)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where tokenised text is kept."""
    monkeypatch.setenv("MXD_CACHE", str(tmp_path / "tokens"))
    return tmp_path / "tokens"


def kept(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_text_is_tokenised_once_and_then_read_from_its_file(tokenizer, folder):
    once, bare = Counting(tokenizer), Counting(tokenizer, backend=False)
    for options in ({}, {"shuffle": True, "seed": 3}, {"context": 7}, {"bos": False}):
        expected = packed(SENTENCES, bare, **options)
        assert len(expected) > 40
        assert packed(SENTENCES, once, **options) == packed(SENTENCES, once, **options) == expected
    assert once.calls == 4
    assert bare.calls == 4
    assert len(kept(folder)) == 4
    assert all(name.startswith("tokens-") for name in kept(folder))


def test_contexts_are_mapped_not_loaded(tokenizer, folder):
    """Both when the file was just written and later: what changes in the file changes in what was read."""
    for value in (7, 8):
        _, second = islice(token_contexts(SENTENCES, tokenizer, context=8, shuffle=False)(0), 2)
        assert isinstance(second, np.memmap)
        assert not second.flags.writeable
        (file,) = folder.iterdir()
        with file.open("r+b") as handle:
            handle.seek(8 * 4)
            handle.write(np.int32(value).tobytes())
        assert second[0] == value


@pytest.mark.parametrize(
    "change",
    [
        {"texts": SENTENCES[:-1]},
        {"texts": [*SENTENCES[:-2], SENTENCES[-2] + SENTENCES[-1][0], SENTENCES[-1][1:]]},  # a border moved
        {"texts": SENTENCES[::-1]},
        {"context": 9},
        {"bos": False},
        {"seed": 1, "shuffle": True},
        {"tokenizer": lambda t: t.add_tokens(["followed by"])},
        {"tokenizer": lambda t: setattr(t, "eos_token", "a")},
        {"tokenizer": lambda t: setattr(t, "bos_token", "a")},
        {"tokenizer": lambda t: setattr(t, "split_special_tokens", True)},
    ],
    ids=["fewer", "border", "order", "context", "bos", "seed", "vocabulary", "eos-token", "bos-token", "split"],
)
def test_other_contexts_have_another_file(tokenizer, folder, change):
    options = {"texts": SENTENCES, "context": 8, **change}
    other = copy.deepcopy(tokenizer)
    options.pop("tokenizer", lambda t: None)(other)
    before = packed(SENTENCES, tokenizer, context=8)
    after = packed(options.pop("texts"), other, **options)
    assert before != after
    assert len(kept(folder)) == 2
    assert before == packed(SENTENCES, tokenizer, context=8)


def test_a_damaged_file_is_written_anew(tokenizer, folder):
    expected = packed(SENTENCES, tokenizer)
    (file,) = folder.iterdir()
    good = file.read_bytes()
    assert len(good) == 16 * len(expected) + 32
    flipped = [good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :] for place in (0, 4000, len(good) - 1)]
    for damaged in (b"", good[:-4], b"123", good[: len(good) // 2], good[32:], good[:-32], bytes(len(good)), *flipped):
        file.write_bytes(damaged)
        assert packed(SENTENCES, tokenizer) == expected
        assert file.read_bytes() == good
    assert len(kept(folder)) == 1


def test_the_file_of_another_text_under_this_ones_name_is_written_anew(tokenizer, folder):
    expected = packed(SENTENCES, tokenizer)
    (file,) = folder.iterdir()
    packed(SENTENCES[::-1], tokenizer)
    (other,) = set(folder.iterdir()) - {file}
    assert other.stat().st_size == file.stat().st_size
    file.write_bytes(other.read_bytes())
    assert packed(SENTENCES, tokenizer) == expected


def test_ids_that_the_model_does_not_know_are_refused_and_never_read(tokenizer, folder):
    """From the tokenizer of another model, and from a file that was sealed with them."""
    texts = ["abc", "de", "fg"]
    for tokens in (texts, iter(texts)):
        with pytest.raises(MxdError, match=r"ids from 1 to 16, and the model knows 0 ... 15; give the model with the"):
            list(token_contexts(tokens, Letters(), context=4, vocabulary=16, repeat=False)(0))
        assert len(packed(texts, vocabulary=17)) == 3
    expected = packed(SENTENCES, tokenizer, vocabulary=4096)
    (file,) = folder.iterdir()
    for wrong in (4096, -1):
        contexts._write([np.full((5, 4), wrong, np.int32)], file, 4)
        assert packed(SENTENCES, tokenizer, vocabulary=4096) == expected
    with pytest.raises(MxdError, match=r"the model knows 0 \.\.\. 99"):
        packed(SENTENCES, tokenizer, vocabulary=100)


# Known again


def test_a_text_is_known_by_its_token_ids(tokenizer, folder):
    def digest(texts, **options):
        options = {"context": 8, "seed": 3, **options}
        return token_contexts(texts, tokenizer, **options).digest(0)

    own = digest(SENTENCES)
    assert len(own) == 32
    assert own == digest(SENTENCES) == digest(SENTENCES, repeat=False)
    others = [
        digest([*SENTENCES, "One more."]),
        digest(SENTENCES[::-1]),
        digest([SENTENCES[0].upper(), *SENTENCES[1:]]),
        digest(SENTENCES, seed=4),
        digest(SENTENCES, bos=False),
    ]
    assert len({own, *others}) == 6


def test_a_stream_is_known_by_what_was_read_of_it(tokenizer):
    """As the hash of its first contexts, each with the hash of those before it, from wherever it is read on."""
    rows = packed(SENTENCES, tokenizer, context=8)
    expected = [""]
    for row in rows:
        expected.append(hashlib.sha256(expected[-1].encode() + np.array(row, np.int32).tobytes()).hexdigest()[:32])
    for start in (0, 1, 7):
        blocks = token_contexts(iter(SENTENCES), tokenizer, context=8)
        stream = blocks(start)
        for n in range(start, 20):
            assert next(stream).tolist() == rows[n]
            assert blocks.digest(n + 1) == expected[n + 1]
        assert blocks.digest(18) == "" != blocks.digest(20)  # what came before is forgotten
        list(stream)
        assert blocks.digest(len(rows)) == expected[-1] and blocks.digest(len(rows) + 1) == ""


def test_a_local_text_is_known_by_its_files(tmp_path):
    def found(split="train"):
        return text_hash(str(tmp_path), split)

    assert found() is None
    write(tmp_path / "train.jsonl", ["a", "b"])
    write(tmp_path / "test.jsonl", ["c"])
    train, test = found(), found("test")
    assert train != test and len(train) == 32
    write(tmp_path / "test.jsonl", ["d"])
    assert found() == train and found("test") != test
    for other in (["a", "c"], ["b", "a"], ["a", "b", "c"]):
        write(tmp_path / "train.jsonl", other)
        assert found() != train
    write(tmp_path / "train.jsonl", ["a", "b"])
    assert found() == train
    assert text_hash(str(tmp_path / "train.jsonl")) == train
    assert text_hash("org/name") is None
    assert text_hash("bundled", "test") != text_hash("bundled", "validation")
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "train.jsonl").mkdir()
    with pytest.raises(MxdError, match="cannot read text from"):
        found()


def test_many_may_mend_one_file_at_the_same_time(tokenizer, folder):
    expected = packed(SENTENCES, tokenizer)
    (file,) = folder.iterdir()
    good = file.read_bytes()
    damaged = good[:40] + bytes([good[40] ^ 4]) + good[41:]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            file.unlink()  # mapped by those before: what is there is not written to
            file.write_bytes(damaged)
            assert list(pool.map(lambda _: packed(SENTENCES, tokenizer), range(12))) == [expected] * 12
    assert kept(folder) == [file.name] and file.read_bytes() == good


def test_text_too_short_leaves_no_file(tokenizer, folder):
    with pytest.raises(MxdError, match="less than one context"):
        token_contexts(["a"], tokenizer)
    assert kept(folder) == []


@pytest.mark.parametrize("place", ["tokens", "tokens/below"])
def test_a_folder_that_cannot_be_made_does_not_matter(tokenizer, tmp_path, monkeypatch, place):
    (tmp_path / "tokens").write_text("a file")
    monkeypatch.setenv("MXD_CACHE", str(tmp_path / place))
    assert packed(SENTENCES, tokenizer) == packed(SENTENCES, Counting(tokenizer, backend=False))
    assert kept(tmp_path) == ["tokens"]


@pytest.mark.parametrize("call", ["is_file", "mkdir", "open", "replace"])
@pytest.mark.parametrize("error", [errno.EACCES, errno.ENOSPC, errno.EROFS])
def test_a_folder_that_cannot_be_written_does_not_matter(tokenizer, folder, monkeypatch, call, error):
    def fail(*args, **options):
        raise OSError(error, "cannot")

    once = Counting(tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(Path, call, fail)
        found = packed(SENTENCES, once)
    assert found == packed(SENTENCES, Counting(tokenizer, backend=False))
    assert once.calls == (2 if call == "replace" else 1)  # what was written is not kept in memory, too
    assert kept(folder) == []


def test_no_home_does_not_matter(tokenizer, monkeypatch):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MXD_CACHE")
    monkeypatch.setattr(Path, "home", fail)
    assert packed(SENTENCES, tokenizer) == packed(SENTENCES, Counting(tokenizer, backend=False))


def test_an_interrupted_write_leaves_no_file(tokenizer, folder, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            packed(SENTENCES, tokenizer)
    assert kept(folder) == []


def test_where_tokenised_text_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value, expected in {str(tmp_path / "a"): "a", "~/b": "b", "": ".cache/mxd"}.items():
        monkeypatch.setenv("MXD_CACHE", value)
        assert token_folder() == tmp_path / expected
    monkeypatch.delenv("MXD_CACHE")
    assert token_folder() == tmp_path / ".cache" / "mxd"


# Masks


def test_special_ids_and_their_mask(tokenizer):
    assert special_ids(tokenizer) == [0]
    ids = np.array([[0, 5, 0], [7, 0, 0]])
    assert counted_positions(ids, [0, 7]).tolist() == [[False, True, False], [False, False, False]]
    assert counted_positions(ids, ()).all()


# Sources


def documents(*args, **options):
    """The documents of a source, as a list."""
    return list(source.documents(*args, **options))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_bundled_text(split):
    texts = documents("bundled", split)
    assert len(texts) > 100
    assert all(isinstance(text, str) and text for text in texts)


def test_bundled_splits_share_no_document():
    splits = [set(documents("bundled", split)) for split in ("train", "validation", "test")]
    assert not splits[0] & splits[1] and not splits[0] & splits[2] and not splits[1] & splits[2]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_either_source_of_the_bundled_text_can_be_read_alone(split):
    every, sotu, factbook = (documents(f"bundled{of}", split) for of in ("", ":sotu", ":factbook"))
    counts = json.loads(bundled_path("assets.json").read_text())["text"][split]
    assert {"sotu": len(sotu), "factbook": len(factbook)} == {of: one["documents"] for of, one in counts.items()}
    assert [text for text in every if text in set(sotu)] == sotu
    assert [text for text in every if text in set(factbook)] == factbook
    assert len(sotu) + len(factbook) == len(every)
    assert all(" - " in text.split("\n")[0] for text in factbook)  # Country - Section
    with pytest.raises(
        MxdError, match="unknown bundled text 'bundled:speeches'; choose one of: bundled, bundled:sotu, b"
    ):
        documents("bundled:speeches", split)


def write(path, texts, column="text"):
    if path.suffix == ".txt":
        path.write_text(texts[0], encoding="utf-8")
        return path
    return write_table(path, [{column: text} for text in texts])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_local_files_are_split_by_document(tmp_path, suffix):
    texts = [f"document number {i}" for i in range(400)]
    path = write(tmp_path / f"some{suffix}", texts)
    splits = {split: documents(str(path), split) for split in ("train", "validation", "test")}
    assert sorted(chain.from_iterable(splits.values())) == sorted(texts)  # disjoint and covering
    assert splits["train"] == [t for t in texts if t in set(splits["train"])]  # in the file's order
    assert all(4 <= len(splits[name]) <= 45 for name in ("validation", "test"))
    assert len(splits["train"]) > 300
    extended = write(tmp_path / f"more{suffix}", [*texts, "one more"])  # growing a file moves no document
    assert set(splits["test"]) <= set(documents(str(extended), "test"))


def test_a_folder_with_files_named_as_splits(tmp_path):
    write(tmp_path / "train.jsonl", ["a", "b"])
    write(tmp_path / "test.parquet", ["c"])
    assert documents(str(tmp_path), "train") == ["a", "b"]
    assert documents(str(tmp_path), "test") == ["c"]


def test_a_folder_of_other_files_is_split_by_document(tmp_path):
    write(tmp_path / "1.jsonl", [f"first {i}" for i in range(100)])
    write(tmp_path / "2.txt", ["second"])
    (tmp_path / "README.md").write_text("not text to train on")
    found = [text for split in ("train", "validation", "test") for text in documents(str(tmp_path), split)]
    assert sorted(found) == sorted([f"first {i}" for i in range(100)] + ["second"])


def test_a_pattern_names_files_in_the_order_of_their_names(tmp_path):
    """And its text is known again by those files."""
    parts = [[f"document {n}, {i}" for i in range(200)] for n in range(3)]
    (tmp_path / "below").mkdir()
    for name, texts in zip(("b.csv", "below/a.jsonl.gz", "c.jsonl"), parts, strict=True):
        write(tmp_path / name, texts)

    def read(pattern):
        return [t for split in ("train", "validation", "test") for t in documents(f"{tmp_path}/{pattern}", split)]

    assert sorted(read("*")) == sorted(parts[0] + parts[2])
    assert sorted(read("**/*.jsonl*")) == sorted(parts[1] + parts[2])
    every = documents(f"{tmp_path}/**/*")
    assert every == [text for text in chain(*parts) if text in set(every)] and len(every) > 400
    assert sorted(read("below/?.jsonl.gz")) == sorted(parts[1])
    before = text_hash(f"{tmp_path}/*")
    assert len(before) == 32 != text_hash(f"{tmp_path}/**/*") != before
    assert text_hash(f"{tmp_path}/below/*") == text_hash(f"{tmp_path}/below/a.jsonl.gz")
    write(tmp_path / "below/a.jsonl.gz", parts[1])
    write(tmp_path / "c.jsonl", parts[1])
    assert text_hash(f"{tmp_path}/*") != before
    with pytest.raises(MxdError, match=r"no text at '.*/\*\.parquet'"):
        read("*.parquet")
    assert text_hash(f"{tmp_path}/*.parquet") is None


def test_json_lines_end_at_newlines_only(tmp_path):
    texts = ["a\u2028b", "c\x85d", "e\x0cf"]
    write(tmp_path / "train.jsonl", texts)
    assert documents(str(tmp_path), "train") == texts


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_document_may_be_null(tmp_path, suffix):
    texts = ["a", None, "b", "2024-01-01", "NA", "007"]  # the others are what they were
    write_table(tmp_path / f"train{suffix}", [{"text": text, "n": n} for n, text in enumerate(texts)])
    assert documents(str(tmp_path), "train") == ["a", "", "b", "2024-01-01", "NA", "007"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_another_column_and_a_missing_one(tmp_path, suffix):
    write(tmp_path / f"train{suffix}", ["a"], column="body")
    assert documents(str(tmp_path), "train", column="body") == ["a"]
    with pytest.raises(MxdError, match=r"no column 'text'; it has: body. Set data.column"):
        documents(str(tmp_path), "train")


@pytest.mark.parametrize("suffix", [".txt", *SUFFIXES])
def test_a_binary_file_is_refused(tmp_path, suffix):
    path = tmp_path / f"train{suffix}"
    path.write_bytes(b"\xff\xfe\x00\x80 binary" * 10)
    with pytest.raises(MxdError, match="cannot read text from"):
        documents(str(path))


def test_broken_json_and_json_that_is_no_object(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(MxdError, match="cannot read text from"):
        documents(str(tmp_path), "train")
    path.write_text('["a"]\n')
    with pytest.raises(MxdError, match="line 1: expected an object with fields, got list"):
        documents(str(tmp_path), "train")


def test_nothing_there(tmp_path):
    with pytest.raises(MxdError, match="no text at"):
        documents(str(tmp_path / "none.txt"))
    with pytest.raises(MxdError, match=r"no text at .*; expected a file, a folder, or .* of .txt, .*, .parquet\."):
        documents(str(tmp_path))
    (tmp_path / "code.py").write_text("pass")
    with pytest.raises(MxdError, match="no text at"):
        documents(str(tmp_path / "code.py"))


def test_unknown_split_lists_the_choices(tmp_path):
    path = write(tmp_path / "some.jsonl", ["a"])
    for name in ("bundled", str(path)):
        with pytest.raises(MxdError, match="unknown split 'dev'; choose one of: train, validation, test"):
            documents(name, "dev")


# The Hub


def test_an_unreachable_dataset_says_what_can_be_given():
    for streaming in (False, True):
        with pytest.raises(
            MxdError, match=r"cannot load dataset 'no-such-org/texts:en', split 'train': [^\n]*`bundled`"
        ):
            documents("no-such-org/texts:en", streaming=streaming)


def test_an_error_without_a_message_is_still_explained(monkeypatch):
    def fail(*args, **options):
        raise ConnectionError

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(MxdError, match="cannot load dataset 'org/texts', split 'train': ConnectionError"):
        documents("org/texts")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for the Hub that serves one local file; gives the calls that it got."""
    texts = [f"text {i}" for i in range(50)]
    path = write(tmp_path / "served.jsonl", texts)
    calls = []

    def serve(name, subset, split, streaming, revision="main"):
        calls.append((name, subset, split, revision))
        return load_dataset(
            "json", data_files={"train": str(path)}, split=split, streaming=streaming, cache_dir=str(tmp_path)
        )

    monkeypatch.setattr("datasets.load_dataset", serve)
    return texts, calls


def test_a_hub_dataset(hub):
    texts, calls = hub
    assert documents("org/name:subset") == texts
    assert calls == [("org/name", "subset", "train", "main")]
    documents("org/name")
    documents("org/name@abc123")
    documents("org/name:subset@v1.0")
    assert calls[1:] == [
        ("org/name", None, "train", "main"),
        ("org/name", None, "train", "abc123"),
        ("org/name", "subset", "train", "v1.0"),
    ]


def test_a_streamed_hub_dataset_is_ordered_by_the_seed(hub):
    texts, _ = hub
    orders = [list(documents("org/name", streaming=True, seed=seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(texts)
    assert not isinstance(source.documents("org/name", streaming=True), Sequence)  # so token_contexts reads it lazily


def test_a_hub_dataset_without_the_column_or_split(hub):
    for streaming in (False, True):
        with pytest.raises(MxdError, match="no column 'body'; it has: text"):
            documents("org/name", column="body", streaming=streaming)
        with pytest.raises(MxdError, match="cannot load dataset 'org/name', split 'dev'"):
            documents("org/name", split="dev", streaming=streaming)


def test_parts_of_a_hub_dataset_are_disjoint_and_cover_it(monkeypatch):
    import datasets

    from mxd.data.text import documents

    rows = datasets.Dataset.from_dict({"text": [f"document {i}" for i in range(300)]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: rows)
    parts = {part: list(documents("a/b", part=part)) for part in ("train", "validation", "test")}
    assert sorted(text for part in parts.values() for text in part) == sorted(rows["text"])
    assert min(map(len, parts.values())) > 3
    assert list(documents("a/b")) == rows["text"][:]


def test_a_stream_that_fails_midway_is_one_clear_error(monkeypatch):
    import datasets

    from mxd.common.errors import MxdError
    from mxd.data.text import documents

    def broken():
        yield {"text": "one"}
        raise KeyError("connection lost")

    class Rows:
        column_names = None
        num_shards = 1

        def shard(self, **kwargs):
            return self

        def state_dict(self):
            return {}

        def __iter__(self):
            return broken()

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: Rows())
    monkeypatch.setattr("mxd.data.streams.WINDOW", 1)
    stream = iter(documents("a/b", streaming=True))
    assert next(stream) == "one"
    with pytest.raises(MxdError, match="reading 'a/b' failed"):
        next(stream)


# What mxd came with


@pytest.fixture
def assets(tmp_path, monkeypatch):
    """A copy of the bundled files, in their place."""
    shutil.copytree(bundled_path(""), tmp_path / "assets")
    monkeypatch.setattr("mxd.common.bundled.bundled_path", lambda name: tmp_path / "assets" / name)
    bundled.cache_clear()
    yield tmp_path / "assets"
    bundled.cache_clear()


def test_every_bundled_file_is_known_and_whole(assets):
    folders = ("text", "probing", "tasks", *BUNDLED)
    known = json.loads((assets / "assets.json").read_text())["files"]
    there = {str(file.relative_to(assets)) for folder in folders for file in (assets / folder).iterdir()}
    assert there == set(known) and len(there) == 23
    for name in (*folders, *known):
        assert bundled(name) == assets / name


def test_no_flipped_bit_of_the_bundled_text_is_read(assets):
    for _ in flipped(assets / "text" / "validation.parquet", 120):
        with pytest.raises(MxdError, match=r"text/validation\.parquet is not what mxd came with: .*Install mxd again"):
            documents("bundled", "validation")
    assert len(list(documents("bundled", "validation"))) == 139


@pytest.mark.parametrize("name", BUNDLED_SETS)
def test_no_flipped_bit_of_a_bundled_set_is_read(assets, name):
    for _ in flipped(assets / "probing" / f"{name}.parquet", 40):
        with pytest.raises(MxdError, match=rf"probing/{name}\.parquet is not what mxd came with"):
            labelled_texts(name)
    assert len(labelled_texts(name).texts) > 100


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_no_flipped_bit_of_a_bundled_model_is_read(assets, file):
    for _ in flipped(assets / "tiny-llama" / file, 5):
        for load in (load_frozen, outline):
            with pytest.raises(MxdError, match=rf"tiny-llama/{file} is not what mxd came with"):
                load("tiny-llama")
    assert load_frozen("tiny-llama", device="cpu").num_blocks == 6


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"files": {}}', '{"files": {"text/test.parquet": 1}}'])
def test_bundled_files_without_their_list_are_not_read(assets, text):
    (assets / "assets.json").write_text(text)
    with pytest.raises(MxdError, match=r"cannot read the files that mxd came with: .*Install mxd again"):
        documents("bundled", "test")
    (assets / "assets.json").unlink()
    with pytest.raises(MxdError, match=r"cannot read the files that mxd came with: .*assets\.json"):
        documents("bundled", "test")


def test_a_bundled_file_is_compared_once_in_a_process(assets, monkeypatch):
    from mxd.common import bundled as module

    read = []
    monkeypatch.setattr(module, "file_sha256", lambda path, old=module.file_sha256: read.append(path) or old(path))
    for _ in range(3):
        documents("bundled", "test")
    assert read == [assets / "text" / "test.parquet"]
