"""Streams of the Hub: the order, reading on from any place, and that what lies before it is not read."""

import gc
import hashlib
import random
from dataclasses import asdict
from itertools import pairwise

import datasets
import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from streams import LOADERS, served, write_files

from mxd.common.errors import MxdError
from mxd.data import streams
from mxd.data.activations import Cursor
from mxd.data.contexts import Bookmark, token_contexts
from mxd.data.text import documents
from mxd.model.loading import load_frozen
from mxd.training.tuning import batches_of

pytestmark = [  # `datasets` leaves the file open of a CSV that is not read to its end
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
TEXTS = [f"{i} is a number, {'and' * (i % 5)} {i * i} its square." for i in range(100)]
WINDOW, BATCH, SEED = 16, 5, 3


@pytest.fixture(scope="module")
def tokenizer():
    return load_frozen("tiny-gpt2").tokenizer


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(streams, "WINDOW", WINDOW)
    monkeypatch.setattr(streams, "BATCH", BATCH)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    def serve(kind="jsonl", texts=TEXTS):
        write_files(tmp_path, kind, texts)
        monkeypatch.setattr(datasets, "load_dataset", served(tmp_path, kind))

    serve()
    yield serve
    gc.collect()


def opened(**options):
    return documents("org/name", streaming=True, seed=SEED, **options)


def through_json(value):
    adapter = TypeAdapter(type(value))
    return adapter.validate_json(adapter.dump_json(value), strict=True)


def expected_order():
    """Files of 34, 34 and 32 rows in a drawn order, then windows in drawn orders."""
    files = [TEXTS[:34], TEXTS[34:68], TEXTS[68:]]
    rows = [text for i in np.random.default_rng(SEED).permutation(3) for text in files[i]]
    windows = [rows[i : i + WINDOW] for i in range(0, 100, WINDOW)]
    return [w[i] for n, w in enumerate(windows) for i in np.random.default_rng([SEED, n]).permutation(len(w))]


@pytest.mark.parametrize("kind", LOADERS)
def test_a_stream_is_read_on_from_every_place(hub, kind):
    hub(kind)
    order, done = expected_order(), 0
    assert list(opened()) == order
    for place, texts in opened().batches():
        rest = [text for _, batch in opened().batches(through_json(place)) for text in batch]
        assert rest == order[done:]
        done += len(texts)
    assert done == 100


@pytest.mark.parametrize("kind", LOADERS)
def test_a_stream_is_read_on_again_and_again(hub, kind):
    hub(kind)
    draw, order = random.Random(0), expected_order()
    for _ in range(4):
        found, place = [], None
        while True:
            batches, left = opened().batches(place), draw.randint(1, 6)
            for place, texts in batches:  # noqa: B007
                left -= 1
                if left < 0:
                    break
                found += texts
            else:
                break
            place = through_json(place)
        assert found == order


def test_a_part_of_a_stream_is_read_on_too(hub):
    whole = list(opened(part="train"))
    assert 50 < len(whole) < 100 and whole == [text for text in expected_order() if text in whole]
    places = [place for place, _ in opened(part="train").batches()]
    rest = [text for _, batch in opened(part="train").batches(places[-2]) for text in batch]
    assert rest == whole[-len(rest) :] and 0 < len(rest) <= 2 * BATCH


class Tokens:
    """A tokenizer that keeps what it was given."""

    def __init__(self, tokenizer):
        self.tokenizer, self.given = tokenizer, []
        self.bos_token_id = self.eos_token_id = tokenizer.eos_token_id

    def __call__(self, texts, **options):
        self.given += texts
        return self.tokenizer(texts, **options)


def chained(rows):
    hashes = [""]
    for row in rows:
        hashes.append(hashlib.sha256(hashes[-1].encode() + np.asarray(row, np.int32).tobytes()).hexdigest()[:32])
    return hashes


@pytest.mark.long
def test_contexts_go_on_from_a_bookmark_and_nothing_before_it_is_read(hub, tokenizer, monkeypatch):
    order, read = expected_order(), []
    rows = [row.tolist() for row in token_contexts(opened(), tokenizer, context=16)(0)]
    hashes = chained(rows)
    assert len(rows) > 60
    real = streams.TextStream._windows

    def windows(self, place):
        for at, part in real(self, place):
            read.extend(row["text"] for row in part)
            yield at, part

    monkeypatch.setattr(streams.TextStream, "_windows", windows)
    blocks = token_contexts(opened(), tokenizer, context=16)
    stream = blocks(0)
    assert blocks.bookmark(0) is None
    for n in range(1, len(rows)):
        next(stream)
        mark = through_json(blocks.bookmark(n))
        assert 0 <= mark.context < n and mark.text == hashes[mark.context]
        read.clear()
        tokens = Tokens(tokenizer)
        again = token_contexts(opened(), tokens, context=16, begin=mark)
        rest = again(n)
        assert next(rest).tolist() == rows[n]
        assert again.digest(n) == hashes[n] and again.digest(n + 1) == hashes[n + 1]
        before = mark.place.window * WINDOW
        assert not set(read) & set(order[:before])
        assert tokens.given[0] == order[before + mark.place.documents]
        assert len(tokens.given) <= 4 * BATCH
        assert through_json(again.bookmark(n)) == blocks.bookmark(n)
        if n % 20 == 0:
            assert [row.tolist() for row in rest] == rows[n + 1 :]
    assert len(blocks.bookmarks) < 4 and before > 60


def test_a_tunings_batches_go_on_from_every_cursor(hub, tokenizer):
    """And where they are read on a second time."""
    batches = list(batches_of(token_contexts(opened(), tokenizer, context=16), Cursor(), 6))
    assert len(batches) > 9
    cursor = Cursor()
    for batch, following in pairwise(batches):
        contexts = token_contexts(opened(), tokenizer, context=16, begin=cursor.bookmark)
        again = next(batches_of(contexts, cursor, 6))
        assert torch.equal(again.ids, batch.ids)
        assert again.cursor == batch.cursor and again.cursor.bookmark == batch.cursor.bookmark
        cursor = through_json(again.cursor)
        assert not torch.equal(batch.ids, following.ids)
    assert cursor.bookmark.place.window > 3
    other = Cursor(cursor.context, text="0" * 32, bookmark=cursor.bookmark)
    with pytest.raises(MxdError, match="the text or its tokenizer has changed"):
        next(batches_of(token_contexts(opened(), tokenizer, context=16, begin=other.bookmark), other, 6))


def test_another_text_at_the_bookmark_has_another_hash(hub, tokenizer):
    blocks = token_contexts(opened(), tokenizer, context=16)
    stream = blocks(0)
    for _ in range(40):
        next(stream)
    mark, digest = blocks.bookmark(40), blocks.digest(40)
    hub(texts=[text.replace("number", "Number") for text in TEXTS])
    again = token_contexts(opened(), tokenizer, context=16, begin=mark)
    next(again(40))
    assert again.digest(40) not in ("", digest)


@pytest.mark.parametrize(
    ("saved", "now", "why"),
    [
        ("5.0.0", "5.2.0", "where to read on was not saved"),
        ("5.2.0", "5.0.0", "streams of datasets 5.0.0 lose their place (its issue 8308); install another version"),
        ("4.8.0", "5.2.0", "the place was saved by datasets 4.8.0, and 5.2.0 is installed"),
        ("5.2.0", "5.2.0", ""),
    ],
)
def test_where_a_place_cannot_be_trusted_the_text_is_read_again(hub, tokenizer, monkeypatch, capfd, saved, now, why):
    monkeypatch.setattr(datasets, "__version__", saved)
    blocks = token_contexts(opened(), tokenizer, context=16)
    rows = list(blocks(0))
    mark = blocks.bookmark(40)
    assert (mark is None) == (saved == "5.0.0")
    monkeypatch.setattr(datasets, "__version__", now)
    tokens = Tokens(tokenizer)
    again = token_contexts(opened(), tokens, context=16, begin=mark)
    assert np.array_equal(list(again(40)), rows[40:])
    assert again.digest(len(rows)) == blocks.digest(len(rows))
    assert sum(n < 40 for n in again.bookmarks) == (now != "5.0.0")
    assert (tokens.given[0] == expected_order()[0]) == bool(why)
    printed = capfd.readouterr().err
    assert printed == (f"The text is read again from its beginning: {why}.\n" if why else "")


def test_a_bookmark_is_plain_data(hub, tokenizer):
    blocks = token_contexts(opened(), tokenizer, context=16)
    list(blocks(0))
    said = asdict(through_json(blocks.bookmark(30)))
    assert said.keys() == set(Bookmark.__dataclass_fields__) and said["place"]["datasets"] == datasets.__version__
