"""Activations on disk: what is read back is the live stream, bit for bit, and whatever is not is refused.

Streams and runs read a tiny random model, and shards hold two batches, so that a few batches fill several shards.
"""

import dataclasses
import errno
import hashlib
import importlib
import importlib.util
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import torch
from command import mxd
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mxd.common.errors import MxdError, redact
from mxd.common.processes import Processes
from mxd.config import dump_config, parse_config
from mxd.data.activations import Cursor, activation_batches
from mxd.data.cache import cache_bytes, claim_cache, in_8_bits, write_cache
from mxd.data.exchange import RankPart
from mxd.data.reading import cached_batches, cached_tokens, check_cache, mixed_batches
from mxd.data.shards import seal_of
from mxd.data.store import Store
from mxd.model.loading import load_frozen
from mxd.training.source import activation_stream, cache_activations
from mxd.training.trainer import train

BATCH, LAYERS, MASKED = 8, (0, 2), (0, 1, 2, 3, 4)
IDENTITY = {
    "data": {"source": "a.jsonl", "context": 9},
    "seed": 0,
    "batch_tokens": BATCH,
    "buffer_tokens": 3 * BATCH,
    "revision": "c0ffee",
    "fingerprints": {"0": "aa", "2": "bb"},
}
SIZE = cache_bytes([(32, 32), (32, 32)], 14 * BATCH)


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    """A window of three batches is a shard of two and one of one; 14 batches are nine shards."""
    monkeypatch.setattr("mxd.data.cache.SHARD_BATCHES", 2)


@pytest.fixture(scope="module")
def live(gpt2):
    """The live stream: windows of three batches of 8 tokens; about a quarter of the tokens are masked."""
    rng = np.random.default_rng(0)
    rows = rng.integers(5, 4096, (40, 9), dtype=np.int32)
    hide = rng.random(rows.shape) < 0.25
    rows[hide] = rng.choice(MASKED, hide.sum())

    def stream(start=None, accept=None, blocks=LAYERS):
        options = {"batch_tokens": BATCH, "buffer_tokens": 3 * BATCH, "excluded_ids": MASKED, "forward_contexts": 2}
        return activation_batches(gpt2, blocks, lambda first: iter(rows[first:]), start=start, accept=accept, **options)

    return stream


@pytest.fixture(scope="module")
def whole(live):
    """The first 14 live batches."""
    return list(islice(live(), 14))


@pytest.fixture(scope="module")
def counting(live, whole):
    """The live stream, noting the number of each window that runs."""
    places = [Cursor(), *(batch.cursor for batch in whole if batch.cursor.batch == 0)]

    def count_in(ran):
        def stream(start, mine):
            return live(start, lambda at, batches: mine(at, batches) and (ran.append(places.index(at)) or True))

        return stream

    return count_in


@pytest.fixture(scope="module")
def written(live, tmp_path_factory):
    """A cache of the 14 batches, written at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mxd.data.cache.SHARD_BATCHES", 2)
        return write(tmp_path_factory.mktemp("written") / "cache", live)


@pytest.fixture
def cache(tmp_path, written):
    """A copy of it that a test may damage."""
    return shutil.copytree(written, tmp_path / "cache")


def write(folder, stream, batches=14, identity=IDENTITY, dtype="float32", worker=(0, 1)):
    claim_cache(folder, identity, SIZE, dtype)
    write_cache(folder, stream, batches * BATCH, worker)
    return folder


def shard(folder, number, kind="safetensors"):
    return folder / f"shard-{number:06d}.{kind}"


def nothing(start, mine):
    """A stream that must not be asked."""
    raise AssertionError("the stream was asked for")


def same(a, b):
    return (
        torch.equal(a.ids, b.ids)
        and a.cursor == b.cursor
        and a.sites.keys() == b.sites.keys() == a.means.keys() == b.means.keys()
        and all(torch.equal(s, t) for n in a.sites for s, t in zip(a.sites[n], b.sites[n], strict=True))
        and all(torch.equal(s, t) for n in a.sites for s, t in zip(a.means[n], b.means[n], strict=True))
        and all(t.dtype == torch.float32 for batch in (a, b) for pair in batch.sites.values() for t in pair)
    )


def all_same(stream, other):
    stream, other = list(stream), list(other)
    return len(stream) == len(other) and all(map(same, stream, other))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# What is read is what was live


def test_cached_batches_are_the_live_ones_bit_for_bit(cache, whole):
    assert all_same(cached_batches(cache, LAYERS), whole)
    assert names(cache) == ["cache.json", *(f"shard-{n:06d}.{k}" for n in range(9) for k in ("json", "safetensors"))]
    counts = [len(load_file(shard(cache, n))["ids"]) for n in range(9)]
    assert counts == [16, 8] * 4 + [16]
    assert cached_tokens(cache) == 112
    assert any(batch.cursor.offset and batch.cursor.batch for batch in whole)  # inside a window that cuts a context
    assert not set(torch.cat([batch.ids for batch in whole]).tolist()) & set(MASKED)


def test_some_layers_of_a_cache(cache, whole, live):
    alone = list(cached_batches(cache, (2,)))
    assert all_same(alone, islice(live(blocks=(2,)), 14))
    assert all(torch.equal(a.sites[2][1], b.sites[2][1]) for a, b in zip(alone, whole, strict=True))


def test_a_cache_is_read_from_between_any_two_batches(cache, whole):
    for n in range(14):
        assert all_same(cached_batches(cache, LAYERS, whole[n].cursor), whole[n + 1 :])
    assert all_same(cached_batches(cache, LAYERS, Cursor()), whole)


@pytest.mark.parametrize("n", [0, 3, 6, 11])
def test_from_there_it_is_the_live_stream_from_there(cache, whole, live, n):
    rest = islice(live(whole[n].cursor), 13 - n)
    assert all_same(cached_batches(cache, LAYERS, whole[n].cursor), rest)


def test_the_batches_go_to_the_device_asked_for(cache):
    batch = next(cached_batches(cache, LAYERS, device="meta"))
    tensors = [
        batch.ids,
        *(t for pair in batch.means.values() for t in pair),
        *(t for pair in batch.sites.values() for t in pair),
    ]
    assert [t.device.type for t in tensors] == ["meta"] * 9


def test_cache_bytes_is_what_the_tokens_take(cache):
    shards = [load_file(path) for path in cache.rglob("*.safetensors")]
    held = sum(t.nbytes for shard in shards for name, t in shard.items() if not name.endswith("mean"))
    assert held == SIZE == 112 * (8 + 2 * 2 * 32 * 4)


# An interrupted cache is continued


def broken(stream, after):
    yield from islice(stream, after)
    raise MxdError("the Hub is gone")


@pytest.mark.long
def test_an_interrupted_cache_goes_on_and_equals_one_written_at_once(tmp_path, live, whole, cache):
    folder = tmp_path / "cut"
    for stop, kept in ((1, 0), (2, 2), (6, 6), (7, 12)):  # batches read before a failure, batches in shards after it
        with pytest.raises(MxdError, match="the Hub is gone"):
            write(folder, lambda start, mine, stop=stop: broken(live(start, mine), stop))
        assert all_same(cached_batches(folder, LAYERS), whole[:kept])
    begun = []
    write(folder, lambda start, mine: begun.append(start) or live(start, mine))
    assert begun == [whole[11].cursor]  # windows that are there whole are not even planned
    assert contents(folder) == contents(cache)


def test_a_cache_grows_when_more_is_asked(tmp_path, live, whole, cache):
    folder = write(tmp_path / "c", live, batches=4)
    assert all_same(cached_batches(folder, LAYERS), whole[:4])
    assert cached_tokens(folder) == 4 * BATCH
    write(folder, live)
    assert contents(folder) == contents(cache)


def test_a_cache_that_holds_enough_is_left_alone(cache):
    before = contents(cache)
    for batches in (14, 13, 3):
        write(cache, nothing, batches)
    assert contents(cache) == before


def test_what_a_killed_write_left_is_ignored(tmp_path, live, whole):
    folder = write(tmp_path / "c", live, batches=6)
    (folder / ".shard-000004.safetensors.0a1b2c3d").write_bytes(b"cut")
    (folder / ".cache.json.99999999").write_bytes(b"cut")
    shutil.copy(shard(folder, 0), shard(folder, 4))  # killed between a shard's tensors and its JSON
    assert cached_tokens(folder) == 48
    assert all_same(cached_batches(folder, LAYERS), whole[:6])
    write(folder, live)
    assert all_same(cached_batches(folder, LAYERS), whole)


def test_a_claim_that_was_killed_is_no_other_folder(tmp_path, live):
    (tmp_path / ".cache.json.99999999").write_bytes(b"cut")
    claim_cache(tmp_path, IDENTITY, SIZE)


# Many writers


def test_workers_divide_the_windows_and_write_the_same_cache(tmp_path, live, cache, counting):
    folder, ran = tmp_path / "c", []
    for number in (2, 0, 1):
        held = set(names(folder)) if folder.exists() else set()
        write(folder, counting(ran), worker=(number, 3))
        written = {int(name[6:12]) // 2 for name in set(names(folder)) - held - {"cache.json"}}
        assert written == set(range(number, 5, 3))
    assert contents(folder) == contents(cache)
    assert sorted(ran) == [0, 1, 2, 3, 4]  # each window's forward ran once


def test_other_workers_go_on_with_what_some_have_left(tmp_path, live, cache, counting):
    folder = tmp_path / "c"
    for number, stop in ((0, 4), (1, 2), (2, 2)):
        with pytest.raises(MxdError, match="the Hub is gone"):
            write(folder, lambda start, mine, stop=stop: broken(live(start, mine), stop), worker=(number, 3))
    with pytest.raises(MxdError, match=r"shard-000003 is missing\. `mxd cache` writes it again, and nothing else"):
        list(cached_batches(folder, LAYERS))
    assert cached_tokens(folder) == 3 * BATCH + 2 * BATCH  # up to the first that is missing
    ran = []
    for number in (1, 0):
        write(folder, counting(ran), worker=(number, 2))
    assert contents(folder) == contents(cache)
    assert 0 not in ran  # the first window was there


def test_two_that_write_the_same_do_no_harm(tmp_path, live, cache):
    folder = tmp_path / "c"

    def stream(start, mine):
        batches = live(start, mine)
        yield from islice(batches, 4)
        write(folder, live)  # the other began after this one, and is done
        yield from batches

    write(folder, stream)
    assert contents(folder) == contents(cache)


def test_a_writer_that_finds_another_cache_in_its_place_stops(tmp_path, live):
    folder = tmp_path / "c"

    def stream(start, mine):
        batches = live(start, mine)
        yield next(batches)
        claim_cache(folder, {**IDENTITY, "seed": 7}, SIZE)  # nothing is written yet: it becomes another
        yield from batches

    with pytest.raises(MxdError, match=r"another process has begun another cache in .*c; choose another folder"):
        write(folder, stream)
    assert names(folder) == ["cache.json"]


def test_a_shard_of_another_cache_is_refused(tmp_path, live, cache):
    """Whatever brought it here: its tensors are whole, and are of something else."""
    other = write(tmp_path / "other", live, identity={**IDENTITY, "seed": 7})
    for kind in ("json", "safetensors"):
        shutil.copy(shard(other, 3, kind), shard(cache, 3, kind))
    with pytest.raises(MxdError, match=r"cannot read .*shard-000003: it is damaged, or of another cache"):
        list(cached_batches(cache, LAYERS))


WORKER = """
import sys, time
import torch
from mxd.data.activations import Batch, Cursor
from mxd.data.cache import claim_cache, write_cache

def stream(start, mine):
    for window in range(start.context, 12):
        if mine(Cursor(window), 18):
            time.sleep(0.05)
            rows = torch.randn(18, 4, 8, generator=torch.Generator().manual_seed(window))
            for b in range(18):
                end = Cursor(window, 0, b + 1) if b < 17 else Cursor(window + 1)
                yield Batch({0: (rows[b], -rows[b])}, torch.arange(4) + b, {0: (rows[0, 0], rows[0, 1])}, end)

identity = {"batch_tokens": 4, "buffer_tokens": 72, "fingerprints": {"0": "aa"}}
for folder, number, workers in zip(*[iter(sys.argv[1:])] * 3):
    claim_cache(folder, identity, 0)
    write_cache(folder, stream, 12 * 72, (int(number), int(workers)))
"""


@pytest.mark.long
def test_workers_at_the_same_time_one_of_them_killed(tmp_path, monkeypatch):
    """Three processes, of which one is killed half-way; two workers write the rest."""
    script, folder, once = tmp_path / "worker.py", tmp_path / "c", tmp_path / "once"
    script.write_text(WORKER)
    folder.mkdir()

    def of_the_last():  # files of windows 2, 5, 8, 11, of two shards each
        return sum(int(name[6:12]) // 2 % 3 == 2 for name in names(folder) if name.startswith("shard-"))

    processes = [
        subprocess.Popen([sys.executable, script, folder, share, "3"], stderr=subprocess.DEVNULL) for share in "012"
    ]
    try:
        deadline = time.monotonic() + 120
        while of_the_last() < 5:
            assert time.monotonic() < deadline and processes[2].poll() is None
            time.sleep(0.005)
        processes[2].send_signal(signal.SIGKILL)
        assert [process.wait(120) for process in processes] == [0, 0, -signal.SIGKILL]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert 5 <= of_the_last() < 16
    monkeypatch.setattr("mxd.data.cache.SHARD_BATCHES", 16)
    monkeypatch.setattr(sys, "argv", [str(script), folder, "1", "2", folder, "0", "2", once, "0", "1"])
    runpy.run_path(str(script))
    written = {name: content for name, content in contents(folder).items() if not name.name.startswith(".")}
    assert written == contents(once)
    assert len(written) == 49


# Refusals


def test_no_cache_there_says_how_to_write_one(tmp_path):
    with pytest.raises(MxdError, match=r"no activation cache at '.*none'; write one with: mxd cache CONFIG .*none"):
        check_cache(tmp_path / "none", IDENTITY)
    assert names(tmp_path) == []


def test_a_folder_that_holds_something_else_is_refused_and_untouched(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("run", "file"):
        with pytest.raises(MxdError, match=rf"{name} exists and is not an activation cache; choose another folder"):
            claim_cache(tmp_path / name, IDENTITY, SIZE)
    with pytest.raises(MxdError, match=r"no activation cache at .*run"):
        check_cache(tmp_path / "run", IDENTITY)
    assert names(tmp_path / "run") == ["config.yaml"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("text", ["{", "[1]", "null", '"x"', "{}", '{"format": 0, "fingerprints": 3}', "\xff"])
def test_another_programs_cache_json_is_refused_and_untouched(tmp_path, text):
    (tmp_path / "cache.json").write_text(text)
    for function in (lambda: check_cache(tmp_path, IDENTITY), lambda: claim_cache(tmp_path, IDENTITY, SIZE)):
        with pytest.raises(MxdError, match=r"cache\.json(: |.* choose another folder)"):
            function()
    assert (tmp_path / "cache.json").read_text() == text


def test_an_empty_folder_and_folders_that_are_not_there_are_taken(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        claim_cache(folder, IDENTITY, SIZE)
        assert names(folder) == ["cache.json"]
        assert json.loads((folder / "cache.json").read_text())["seed"] == 0
        assert list(cached_batches(folder, LAYERS)) == []


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MxdError, match=r"cannot write to .*cache: Not a directory; choose another folder"):
        claim_cache(tmp_path / "file" / "cache", IDENTITY, SIZE)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, "seed: 0, asked for 1"),
        ({"data": {"source": "b.jsonl", "context": 9}}, r"data: .*'a.jsonl'.*, asked for .*'b.jsonl'"),
        ({"batch_tokens": 4}, "batch_tokens: 8, asked for 4"),
        ({"site": "attention"}, "site: None, asked for 'attention'"),
        ({"revision": "decaf"}, "revision: 'c0ffee', asked for 'decaf'"),
        ({"fingerprints": {"0": "aa", "2": "cc"}}, r"block 2 is of another base model \(fingerprint bb, asked for cc"),
        ({"fingerprints": {"1": "bb"}}, "it has blocks 0, 2, asked for 1"),
    ],
)
def test_a_cache_of_something_else_is_refused_and_untouched(cache, changed, message):
    before = contents(cache)
    for function in (lambda i: check_cache(cache, i), lambda i: claim_cache(cache, i, SIZE)):
        with pytest.raises(MxdError, match=message):
            function({**IDENTITY, **changed})
    assert contents(cache) == before


def test_all_differences_are_named_at_once(cache):
    with pytest.raises(MxdError, match=r"seed: 0, asked for 7; it has blocks 0, 2, asked for 1; .*asked for 5"):
        check_cache(cache, {**IDENTITY, "seed": 7, "fingerprints": {"1": "xx", "2": "bb", "5": "yy"}})


def test_some_of_its_layers_can_be_read_but_not_written(cache):
    """A shard of fewer blocks in the midst would be unreadable."""
    fewer = {**IDENTITY, "fingerprints": {"2": "bb"}}
    check_cache(cache, fewer)
    with pytest.raises(MxdError, match="has blocks 0, 2, asked for 2"):
        claim_cache(cache, fewer, SIZE)


def test_a_revision_that_is_not_known_is_not_compared(cache):
    check_cache(cache, {**IDENTITY, "revision": None})


def test_a_cache_that_holds_nothing_yet_may_become_another(tmp_path):
    """For example when the first try named a text that is not there."""
    for identity in ({**IDENTITY, "seed": 7, "fingerprints": {"5": "aa"}}, IDENTITY):
        claim_cache(tmp_path / "c", identity, SIZE)
        check_cache(tmp_path / "c", identity)


@pytest.mark.parametrize("held", [1, 2, 3, None])
def test_another_format_is_refused_and_untouched(cache, held):
    said = json.loads((cache / "cache.json").read_text())
    (cache / "cache.json").write_text(json.dumps({**said, "format": held}))
    before = contents(cache)
    for function in (lambda: check_cache(cache, IDENTITY), lambda: claim_cache(cache, IDENTITY, SIZE)):
        with pytest.raises(
            MxdError, match=rf"format {held}, this mxd reads and writes 4; delete it and write it again"
        ):
            function()
    assert contents(cache) == before


def test_a_place_not_in_the_cache_is_refused(cache, whole, live):
    beyond = next(live(whole[-1].cursor)).cursor
    for start in (beyond, Cursor(3, 1, 4)):
        message = rf"no batch that begins at Cursor\(context={start.context},.*; it ends at Cursor\("
        with pytest.raises(MxdError, match=message):
            list(cached_batches(cache, LAYERS, start))


def cut_to(n):
    return lambda folder, number: shard(folder, number).write_bytes(shard(folder, number).read_bytes()[:n])


def flip(place, kind="safetensors"):
    """Change one bit, and not the length."""

    def damage(folder, number):
        content = bytearray(shard(folder, number, kind).read_bytes())
        content[place] ^= 1
        shard(folder, number, kind).write_bytes(content)

    return damage


def lose(*kinds):
    return lambda folder, number: [shard(folder, number, kind).unlink() for kind in kinds]


DAMAGES = {
    "empty": cut_to(0),
    "header": cut_to(40),
    "last-byte": cut_to(-1),
    "flipped-bit": flip(-5),
    "flipped-header": flip(20),
    "no-tensors": lose("safetensors"),
    "no-json": lose("json"),
    "no-shard": lose("json", "safetensors"),
    "bad-json": lambda folder, number: shard(folder, number, "json").write_text("{"),
    "other-json": lambda folder, number: shard(folder, number, "json").write_text("[3]"),
    "flipped-json": lambda folder, number: shard(folder, number, "json").write_text(
        shard(folder, number, "json").read_text().replace('"context": ', '"context": 1', 1)
    ),
    "anothers": lambda folder, number: [
        shutil.copy(shard(folder, 0, kind), shard(folder, number, kind)) for kind in ("json", "safetensors")
    ],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("number", [2, 3])  # the first and the last of a window
def test_a_damaged_shard_is_named_and_only_it_is_written_anew(cache, live, damage, number, counting):
    before = contents(cache)
    damage(cache, number)
    assert contents(cache) != before
    with pytest.raises(MxdError, match=rf"shard-00000{number}.* `mxd cache` writes it again, and nothing else"):
        list(cached_batches(cache, LAYERS))
    times = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    ran = []
    write(cache, counting(ran))
    assert contents(cache) == before
    assert ran == [1]
    written = {path for path in cache.iterdir() if times.get(path) != path.stat().st_mtime_ns}
    assert written == {shard(cache, number, kind) for kind in ("json", "safetensors")}


def test_a_shard_is_verified_once(cache, monkeypatch):
    hashed = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: hashed.append(file.name) or real(file, name))
    for _ in range(2):
        assert len(list(cached_batches(cache, LAYERS))) == 14
    assert sorted(hashed) == [str(shard(cache, n)) for n in range(9)]
    flip(-5)(cache, 4)  # unless it has changed since
    with pytest.raises(
        MxdError, match=r"cannot read .*shard-000004: its tensors have another SHA-256 than when they were written"
    ):
        list(cached_batches(cache, LAYERS))


def test_a_cache_whose_shards_do_not_meet_says_so(tmp_path, live, cache):
    """One that was growing, and was killed before the shard that had been its last was completed."""
    before = contents(cache)
    small = write(tmp_path / "small", live, batches=4)
    for kind in ("json", "safetensors"):
        shutil.copy(shard(small, 2, kind), shard(cache, 2, kind))
    with pytest.raises(
        MxdError, match=r"shard-000003 begins at .*, and the shard before it ends at .*completes a cache"
    ):
        list(cached_batches(cache, LAYERS))
    write(cache, live)
    assert contents(cache) == before


def test_what_comes_before_a_damaged_shard_is_read(cache, whole):
    cut_to(-1)(cache, 4)
    stream = cached_batches(cache, LAYERS)
    assert all_same(islice(stream, 6), whole[:6])
    with pytest.raises(MxdError, match=r"cannot read .*shard-000004"):
        next(stream)
    assert all_same(cached_batches(cache, LAYERS, whole[11].cursor), whole[12:])  # nor does it matter later


def free(monkeypatch, n):
    asked = []
    monkeypatch.setattr("psutil.disk_usage", lambda path: asked.append(Path(path)) or namedtuple("Disk", "free")(n))
    return asked


def test_too_little_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    asked = free(monkeypatch, 3 * 2**29)
    with pytest.raises(MxdError, match=r"needs 2.0 GiB more and 1.5 GiB are free at .*lower training.tokens"):
        claim_cache(tmp_path / "a" / "b", IDENTITY, 2 * 2**30)
    assert asked == [tmp_path]
    assert names(tmp_path) == []
    claim_cache(tmp_path / "a" / "b", IDENTITY, 3 * 2**29)
    assert names(tmp_path) == ["a"]


def test_what_is_written_already_needs_no_more_room(cache, monkeypatch):
    there = sum(path.stat().st_size for path in cache.rglob("*.safetensors"))
    shutil.copy(shard(cache, 0), cache / ".shard-000009.safetensors.0a1b2c3d")  # left by a killed write: does not count
    free(monkeypatch, 1000)
    claim_cache(cache, IDENTITY, there + 1000)
    with pytest.raises(MxdError, match=r"lower training\.tokens, cache fewer blocks, .* or choose another disk"):
        claim_cache(cache, IDENTITY, there + 1001)


def test_a_text_that_ends_before_says_what_is_held(tmp_path, live):
    tokens = sum(len(batch.ids) for batch in live())
    assert 112 < tokens < 10_000
    folder = tmp_path / "c"
    for _ in range(2):
        with pytest.raises(MxdError, match=rf"the text ended after {tokens} tokens of 10,000; the cache in .*c holds"):
            write(folder, live, batches=1250)
    assert all_same(cached_batches(folder, LAYERS), live())


def test_every_worker_says_that_the_text_ended_and_together_they_hold_it(tmp_path, live):
    tokens = sum(len(batch.ids) for batch in live())
    for number in range(3):
        with pytest.raises(MxdError, match=rf"the text ended after {tokens} tokens of 10,000"):
            write(tmp_path / "c", live, batches=1250, worker=(number, 3))
    assert all_same(cached_batches(tmp_path / "c", LAYERS), live())


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left")])
def test_a_full_disk_loses_no_shard_and_leaves_no_part_of_one(tmp_path, live, whole, monkeypatch, error):
    real, written = save_file, []

    def full(tensors, path):
        if len(written) == 2:
            path.write_bytes(b"part of a shard")
            raise error
        written.append(path)
        real(tensors, path)

    monkeypatch.setattr("mxd.data.cache.save_file", full)
    folder = tmp_path / "c"
    with pytest.raises(MxdError, match=r"cannot write .*shard-000002\.safetensors: .*No space left.* Free space"):
        write(folder, live)
    assert names(folder) == [
        "cache.json",
        *(f"shard-00000{n}.{kind}" for n in (0, 1) for kind in ("json", "safetensors")),
    ]
    assert all_same(cached_batches(folder, LAYERS), whole[:3])
    monkeypatch.setattr("mxd.data.cache.save_file", real)
    write(folder, live)
    assert all_same(cached_batches(folder, LAYERS), whole)


# Half precision


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cache_in_half_precision_is_the_live_stream_rounded_once(tmp_path, live, whole, dtype):
    folder = write(tmp_path / "c", live, dtype=dtype)
    held = load_file(shard(folder, 0))
    kind = getattr(torch, dtype)
    assert {t.dtype for name, t in held.items() if name[1:] in (".x", ".y")} == {kind}
    assert {t.dtype for name, t in held.items() if "mean" in name} == {torch.float32}
    for got, want in zip(cached_batches(folder, LAYERS), whole, strict=True):
        sites = {block: tuple(t.to(kind).float() for t in pair) for block, pair in want.sites.items()}
        assert same(got, dataclasses.replace(want, sites=sites))
        assert not torch.equal(got.sites[0][0], want.sites[0][0])
    sizes = sum(t.nbytes for n in range(9) for name, t in load_file(shard(folder, n)).items() if "mean" not in name)
    assert sizes == cache_bytes([(32, 32), (32, 32)], 14 * BATCH, dtype) == 112 * (8 + 2 * 2 * 32 * 2)


def test_a_cache_goes_on_in_its_own_dtype_only(tmp_path, live):
    folder = write(tmp_path / "c", live, batches=3, dtype="bfloat16")
    check_cache(folder, IDENTITY)  # read it may be, whatever its dtype
    with pytest.raises(MxdError, match="dtype: 'bfloat16', asked for 'float32'"):
        write(folder, live)


@pytest.mark.parametrize(
    ("site", "change", "message"),
    [
        (0, 70_000.0, r"block 2: x has a value of 70000, at token id \d+, which float16 cannot hold .*65504.*bfloat16"),
        (1, -1e6, r"block 2: y has a value of -1e\+06, at token id \d+, which float16 cannot hold"),
        (1, "tiny", r"block 2: y has a value of 1e-09, at token id \d+, which float16 cannot hold"),
    ],
)
def test_what_float16_cannot_hold_is_named_before_its_shard_is_written(tmp_path, live, site, change, message):
    def stream(start, mine):
        for n, batch in enumerate(live(start, mine)):
            pair = [t.clone() for t in batch.sites[2]]
            if n == 4 and change == "tiny":
                pair[site][5] = 1e-9  # a target of norm zero, once it is rounded
            elif n == 4:
                pair[site][5, 7] = change
            yield dataclasses.replace(batch, sites={**batch.sites, 2: tuple(pair)})

    folder = tmp_path / "c"
    with pytest.raises(MxdError, match=message):
        write(folder, stream, dtype="float16")
    assert names(folder)[-1] == "shard-000001.safetensors"
    assert len(list(cached_batches(folder, LAYERS))) == 3
    assert cached_tokens(write(tmp_path / "b", stream, dtype="bfloat16")) == 112


# 8 bits


def test_a_cache_in_8_bits_is_the_live_stream_up_to_half_a_step_of_each_row(tmp_path, live, whole):
    """A step is 1/127 of a row's largest value, so a row's error does not depend on the sizes of other rows."""
    folder = write(tmp_path / "c", live, dtype="int8")
    held = load_file(shard(folder, 0))
    assert {t.dtype for name, t in held.items() if name[1:] in (".x", ".y")} == {torch.int8}
    assert {t.dtype for name, t in held.items() if "_" in name} == {torch.float32}
    assert all(held[name].abs().amax(1).eq(127).all() for name in held if name[1:] in (".x", ".y"))
    for got, want in zip(cached_batches(folder, LAYERS), whole, strict=True):
        assert torch.equal(got.ids, want.ids)
        for block, pair in want.sites.items():
            assert all(torch.equal(a, b) for a, b in zip(got.means[block], want.means[block], strict=True))
            for found, exact in zip(got.sites[block], pair, strict=True):
                step = exact.abs().amax(1, keepdim=True) / 127
                assert found.dtype == torch.float32
                assert bool(((found - exact).abs() <= 0.501 * step).all())
                share = float((found - exact).square().sum() / exact.square().sum())
                assert 1e-6 < share < 1e-4  # about (max / 127)^2 / 12 over the mean square
    sizes = sum(t.nbytes for n in range(9) for name, t in load_file(shard(folder, n)).items() if "mean" not in name)
    assert sizes == cache_bytes([(32, 32), (32, 32)], 14 * BATCH, "int8") == 112 * (8 + 4 * (32 + 4))


def test_rows_of_a_cache_in_8_bits_are_mixed_and_divided_with_their_scales(tmp_path, live):
    folder = write(tmp_path / "c", live, dtype="int8")
    rows = {tuple(x.tolist()) for batch in cached_batches(folder, LAYERS) for x in batch.sites[0][0]}
    mixed = islice(mixed_batches(folder, LAYERS, 16, 3, seed=1), 112 // 16)
    parts = (part for batch in mixed for part in batch.sites[0][0])
    assert {tuple(x.tolist()) for x in parts} == rows
    halves = [next(cached_batches(folder, LAYERS, part=(n, 2))).sites[2][1] for n in (0, 1)]
    assert torch.equal(torch.cat(halves), next(cached_batches(folder, LAYERS)).sites[2][1])


@pytest.mark.parametrize("values", [[0.0, 0.0], [1e-30, -3e-30], [3e38, 1.0], [-5.0, 2.0]])
def test_rows_of_any_size_fit_into_8_bits(values):
    exact = torch.tensor([values])
    stored, scales = in_8_bits(exact)
    torch.testing.assert_close(stored * scales[:, None], exact, rtol=0, atol=float(exact.abs().max()) / 253)


# Parts of batches


@pytest.mark.parametrize("mixed", [False, True])
def test_the_parts_of_a_batch_are_its_rows(cache, mixed):
    def read(**part):
        if mixed:
            return islice(mixed_batches(cache, LAYERS, 20, 3, **part), 9)
        return cached_batches(cache, LAYERS, **part)

    parts = [read(part=(s, 4)) for s in range(4)]
    for batch, *quarters in zip(read(), *parts, strict=True):
        assert torch.equal(batch.ids, torch.cat([quarter.ids for quarter in quarters]))
        for block in LAYERS:
            for i in (0, 1):
                assert torch.equal(batch.sites[block][i], torch.cat([q.sites[block][i] for q in quarters]))
        assert {len(quarter.ids) for quarter in quarters} == {len(batch.ids) // 4}
        assert all(quarter.cursor == batch.cursor for quarter in quarters)
    with pytest.raises(MxdError, match="cannot be divided into 3 equal parts"):
        next(read(part=(0, 3)))


# In another order


def rows_of(batch):
    """Each token of a batch, told by its activations: no two are alike."""
    return [tuple(row.tolist()) for row in batch.sites[2][1]]


@pytest.mark.parametrize(("batch_tokens", "at_once"), [(8, 4), (10, 2), (7, 9), (8, 100), (50, 3), (112, 1)])
def test_every_token_once_in_each_epoch(cache, whole, batch_tokens, at_once):
    everything = {row: id_ for batch in whole for row, id_ in zip(rows_of(batch), batch.ids.tolist(), strict=True)}
    assert len(everything) == 112
    batches = list(islice(mixed_batches(cache, LAYERS, batch_tokens, at_once), 3 * 112 // batch_tokens))
    assert {len(batch.ids) for batch in batches} == {batch_tokens}
    seen = [row for batch in batches for row in rows_of(batch)]
    ids = [id_ for batch in batches for id_ in batch.ids.tolist()]
    assert ids == [everything[row] for row in seen]
    epochs = [seen[n : n + 112] for n in range(0, len(seen) - 111, 112)]
    assert len(epochs) >= 2 and all(set(epoch) == set(everything) for epoch in epochs)
    assert epochs[0] != epochs[1]
    other = [
        row
        for batch in islice(mixed_batches(cache, LAYERS, batch_tokens, at_once, seed=1), 3)
        for row in rows_of(batch)
    ]
    assert other != seen[: len(other)]


@pytest.mark.long
@pytest.mark.parametrize(("batch_tokens", "at_once"), [(10, 2), (9, 9), (50, 3)])
def test_the_mixed_stream_is_read_from_between_any_two_batches(cache, batch_tokens, at_once):
    def read(start=None):
        return mixed_batches(cache, LAYERS, batch_tokens, at_once, seed=3, start=start)

    batches = list(islice(read(), 30))
    assert any(batch.cursor.offset for batch in batches)
    for n in (*range(0, 25, 3), 10):
        assert all_same(islice(read(batches[n].cursor), 5), batches[n + 1 : n + 6])
    assert all_same(islice(read(Cursor()), 5), batches[:5])


def test_mixed_means_are_those_of_the_shards_at_hand(cache, whole):
    batch = next(mixed_batches(cache, (0,), 8, 9))
    tokens = [w.sites[0][1] for w in whole[:12]]
    last = whole[12].means[0][1]
    want = (torch.cat(tokens).sum(0) + 16 * last) / 112
    torch.testing.assert_close(batch.means[0][1], want)


def test_what_mixed_reading_refuses(cache):
    with pytest.raises(MxdError, match="holds 112 tokens, less than one batch"):
        next(mixed_batches(cache, LAYERS, 113, 4))
    lose("json")(cache, 5)
    with pytest.raises(MxdError, match="shard-000005 is missing"):
        next(mixed_batches(cache, LAYERS, 8, 4))


# Elsewhere than on this machine


@pytest.fixture
def bucket():
    """A folder in memory, which fsspec treats as it would any other."""
    import fsspec

    fs = fsspec.filesystem("memory")
    yield f"memory://bucket/{uuid4().hex}"
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def remote_contents(url):
    import fsspec

    fs, root = fsspec.core.url_to_fs(url)
    return {Path(path[len(root) + 1 :]): fs.cat_file(path) for path in fs.find(root)}


def test_a_cache_in_a_bucket_is_the_one_on_this_machine(tmp_path, bucket, live, whole, cache, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(MxdError, match=f"no activation cache at '{bucket}'"):
        check_cache(bucket, IDENTITY)
    with pytest.raises(MxdError, match="the Hub is gone"):
        write(bucket, lambda start, mine: broken(live(start, mine), 6), worker=(0, 2))
    for number in (1, 0):
        write(bucket, live, worker=(number, 2))
    assert remote_contents(bucket) == contents(cache)
    assert cached_tokens(bucket) == 112
    check_cache(bucket, IDENTITY)
    before = set(names(tmp_path))
    assert all_same(cached_batches(bucket, LAYERS), whole)
    assert all_same(cached_batches(bucket, LAYERS, whole[6].cursor), whole[7:])
    ours, theirs = (mixed_batches(place, LAYERS, 10, 3) for place in (bucket, cache))
    assert all_same(islice(ours, 30), islice(theirs, 30))
    ours.close()
    assert set(names(tmp_path)) == before  # no copy is left


def test_a_url_of_this_machine_is_its_folder(tmp_path, live, cache):
    write(f"file://{tmp_path}/c", live)
    assert contents(tmp_path / "c") == contents(cache)
    assert len(list(cached_batches(f"file://{tmp_path}/c", LAYERS))) == 14


def test_a_damaged_shard_in_a_bucket_is_written_anew(bucket, live, counting):
    import fsspec

    write(bucket, live)
    before = remote_contents(bucket)
    fs, root = fsspec.core.url_to_fs(bucket)
    content = fs.cat_file(f"{root}/shard-000003.safetensors")
    fs.pipe_file(f"{root}/shard-000003.safetensors", content[:-1] + bytes([content[-1] ^ 1]))
    fs.rm(f"{root}/shard-000004.json")
    with pytest.raises(MxdError, match=rf"cannot read {bucket}/shard-000003: its tensors have another SHA-256"):
        list(cached_batches(bucket, LAYERS, Cursor()))
    ran = []
    write(bucket, counting(ran))
    assert ran == [1, 2]
    assert remote_contents(bucket) == before


def test_few_copies_of_shards_are_held_at_a_time(tmp_path, bucket, live, monkeypatch):
    write(bucket, live)
    held, real = [], Store.local

    @contextmanager
    def noting(self, name):
        with real(self, name) as path:
            held.append(sum(len(files) for _, _, files in os.walk(tmp_path)))  # minds no folder that vanishes meanwhile
            yield path

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Store, "local", noting)
    assert len(list(cached_batches(bucket, LAYERS))) == 14
    assert len(held) == 9 and max(held) <= 2  # each has a name only until it is mapped


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("s3://bucket/folder", r"cannot open s3://bucket/folder: .*s3fs"),
        ("nowhere://bucket/folder", r"cannot open nowhere://bucket/folder: Protocol not known: nowhere"),
        ("sftp://me:se/cr@et@host/folder", r"sftp://host/folder is given with a user, password or query"),
        ("sftp://me@host/folder", r"sftp://host/folder is given with a user, password or query"),
        ("https://host/folder?sig=secret&x=1", r"https://host/folder is given with a user, password or query"),
    ],
)
def test_a_place_that_cannot_be_reached_is_said_in_one_line(place, message):
    if place.startswith("s3:") and importlib.util.find_spec("s3fs"):
        pytest.skip("its driver is here")
    for function in (lambda: check_cache(place, IDENTITY), lambda: claim_cache(place, IDENTITY, SIZE)):
        with pytest.raises(MxdError, match=message) as error:
            function()
        assert "\n" not in str(error.value)
        assert not any(word in str(error.value) for word in ("se/cr", "et@", "secret", "me@"))


def test_what_a_driver_raises_is_one_line_without_secrets(bucket, live, monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    write(bucket, live)

    def fail(*args, **options):
        raise RuntimeError("403 at https://me:secret@host/bucket?token=secret\nand more")

    for name, call in {
        "ls": lambda: cached_tokens(bucket),
        "cat_file": lambda: check_cache(bucket, IDENTITY),
        "get_file": lambda: list(cached_batches(bucket, LAYERS)),
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(MemoryFileSystem, name, fail)
            with pytest.raises(MxdError, match=r"cannot read .*: 403 at https://host/bucket(?!.*secret)") as error:
                call()
            assert "\n" not in str(error.value)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", fail)
        lose_remote(bucket, "shard-000002.json")
        with pytest.raises(MxdError, match=r"cannot write .*shard-000002\.safetensors: 403 at https://host/bucket\. "):
            write(bucket, live)


def lose_remote(url, name):
    import fsspec

    fs, root = fsspec.core.url_to_fs(url)
    fs.rm(f"{root}/{name}")


@pytest.mark.parametrize(
    ("text", "clear"),
    [
        ("https://me:secret@host/a?b=c and s3://bucket/x", "https://host/a and s3://bucket/x"),
        ("sftp://me@host", "sftp://host"),
        ("'https://host/a?token=x' is gone", "'https://host/a' is gone"),
        ("s3://k:a/b+c@bucket/x", "s3://bucket/x"),
        ("s3://bucket/a@b/c", "s3://bucket/a@b/c"),
        ("a@b.org, what? no", "a@b.org, what? no"),
    ],
)
def test_redacted_text_keeps_all_but_secrets(text, clear):
    assert redact(text) == clear


# Runs


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Two texts."""
    folder = tmp_path_factory.mktemp("text")
    for name in "ab":
        lines = [json.dumps({"text": f"{name}: the number {i} is followed by {i + 1}. " * 4}) for i in range(60)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def cached(gpt2, text, tmp_path_factory):
    """A cache of the run below."""
    folder = tmp_path_factory.mktemp("cached") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mxd.data.cache.SHARD_BATCHES", 2)
        cache_activations(run(folder.parent, text), folder, gpt2)
    return folder


def run(out, text, cache=None, **fields):
    """A run of 10 steps: three replacements at two blocks; a cache of it has seven shards."""
    sweep = [{"kind": "topk", "k": 4}, {"kind": "random_k", "k": 4}]
    raw = {
        "run": "r",
        "out": str(out),
        "blocks": list(LAYERS),
        "data": {"source": str(text / "a.jsonl"), "context": 16, "cache": str(cache) if cache else None},
        "sizing": {"expansion": 9},
        "replacements": [
            {"method": "mxd", "sparsity": sweep},
            {"method": "topk_sae", "sparsity": {"kind": "topk", "k": 4}},
        ],
        "training": {"recipe": "short", "tokens": 640, "batch_tokens": 64, "buffer_tokens": 192, "log_every": 2},
    }
    for key, value in fields.items():
        raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
    return parse_config(raw)


def state_of(folder):
    """Every tensor of a run's blocks and last state, and its metrics but for times."""
    paths = [*folder.glob("block*/*.safetensors"), sorted(folder.glob("state/step-*/*.safetensors"))[-1]]
    tensors = {f"{path.parent.name}/{name}": t for path in paths for name, t in load_file(path).items()}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"], line["tokens_per_second"], line["step_seconds"]
    return tensors, lines


def assert_same_run(a, b):
    (tensors, lines), (others, other_lines) = state_of(a), state_of(b)
    assert lines == other_lines
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


@pytest.mark.long
def test_a_run_trained_from_its_cache_is_the_live_run_bit_for_bit(tmp_path, gpt2, text, cached, monkeypatch):
    live_run = train(run(tmp_path / "live", text), model=gpt2)
    names_ = {path.name for path in live_run.glob("block*")}
    assert names_ == {f"block{n}-{kind}" for n in LAYERS for kind in ("mxd-k4", "mxd-randomk4", "sae-k4")}

    def fail(*args, **options):
        raise AssertionError("the text was read, or the base model run")

    def at_bos(model, ids, blocks):
        return record(model, ids, blocks) if ids.shape == (1, 1) else fail()

    record = type(gpt2).record
    for name in ("documents", "token_contexts", "activation_batches"):
        monkeypatch.setattr(importlib.import_module("mxd.training.source"), name, fail)
    monkeypatch.setattr(type(gpt2), "record", at_bos)
    assert_same_run(train(run(tmp_path / "cached", text, cached), model=gpt2), live_run)
    assert len(state_of(live_run)[1]) == 6 * 5


@pytest.mark.long
def test_a_run_of_some_layers_and_fewer_tokens_reads_the_same_cache(tmp_path, gpt2, text, cached):
    fields = {"blocks": [2], "training": {"tokens": 300}}
    a = train(run(tmp_path / "live", text, **fields), model=gpt2)
    b = train(run(tmp_path / "cached", text, cached, **fields), model=gpt2)
    assert_same_run(a, b)


@pytest.mark.long
@pytest.mark.parametrize("step", [5, 4])  # between two shards; inside a shard
def test_interrupted_and_resumed_from_the_cache_equals_uninterrupted(tmp_path, gpt2, text, cached, monkeypatch, step):
    fields = {"blocks": [2], "training": {"save_every": step}}
    uninterrupted = train(run(tmp_path / "whole", text, cached, **fields), model=gpt2)
    module = importlib.import_module("mxd.training.loop")
    real, calls = module.train_step, []

    def stop(*args):
        calls.append(1)
        if len(calls) > 3 * (step + 1):
            raise KeyboardInterrupt
        real(*args)

    config = run(tmp_path / "cut", text, cached, **fields)
    monkeypatch.setattr(module, "train_step", stop)
    with pytest.raises(KeyboardInterrupt):
        train(config, model=gpt2)
    assert [path.name for path in config.folder.glob("state/*")] == [f"step-{step:09d}"]
    monkeypatch.setattr(module, "train_step", real)
    assert_same_run(train(config, resume=True, model=gpt2), uninterrupted)


def test_caching_a_config_that_names_a_cache_runs_the_model(tmp_path, gpt2, text, cached):
    config = run(tmp_path, text, tmp_path / "none")
    cache_activations(config, tmp_path / "anew", gpt2)
    assert contents(tmp_path / "anew") == contents(cached)


def test_caching_goes_on_where_it_stopped(tmp_path, gpt2, text, cached):
    folder = tmp_path / "grown"
    for tokens in (256, 200, 640):  # a window and a batch, nothing to do, the rest
        cache_activations(run(tmp_path, text, training={"tokens": tokens}), folder, gpt2)
        assert cached_tokens(folder) == max(tokens, 256)
    assert contents(folder) == contents(cached)


@pytest.fixture
def own_text(tmp_path, text):
    """A copy of the texts that a test may change."""
    return shutil.copytree(text, tmp_path / "text")


def another(text, change):
    """Change a text's lines."""
    lines = (text / "a.jsonl").read_text().split("\n")
    (text / "a.jsonl").write_text("\n".join(change(lines)))


CHANGES = {
    "appended": lambda lines: [*lines, json.dumps({"text": "One more line."})],
    "reordered": lambda lines: lines[::-1],
    "a word": lambda lines: [line.replace("followed", "preceded") for line in lines],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_cache_of_another_text_is_neither_read_nor_repaired_nor_grown(tmp_path, gpt2, own_text, change):
    folder = tmp_path / "cache"
    cache_activations(run(tmp_path, own_text), folder, gpt2)
    another(own_text, change)
    lose("json", "safetensors")(folder, 3)
    before = contents(folder)
    message = r"holds something else: its text, by the hash of its files: '\w{32}', asked for '\w{32}'\. Put back"
    for tokens in (640, 1280):
        with pytest.raises(MxdError, match=message):
            cache_activations(run(tmp_path, own_text, training={"tokens": tokens}), folder, gpt2)
    for fields in ({}, {"data": {"mix_shards": 2}}):
        with pytest.raises(MxdError, match=message):
            train(run(tmp_path, own_text, folder, **fields), model=gpt2)
    assert contents(folder) == before


def test_a_cache_is_read_where_its_text_is_not(tmp_path, gpt2, own_text, text):
    folder = tmp_path / "cache"
    cache_activations(run(tmp_path, own_text), folder, gpt2)
    shutil.rmtree(own_text)
    assert train(run(tmp_path, own_text, folder), model=gpt2).is_dir()


@pytest.mark.parametrize("number", [0, 3, 6])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_text_that_has_no_files_is_known_by_its_token_ids(
    tmp_path, gpt2, own_text, monkeypatch, number, streamed, change
):
    """As one of the Hub: a lost shard is not written from another text, nor more after it."""
    stream = importlib.import_module("mxd.training.source")
    real, folder = stream.documents, tmp_path / "cache"
    monkeypatch.setattr(stream, "text_hash", lambda *args: None)
    if streamed:
        monkeypatch.setattr(stream, "documents", lambda *args: iter(real(*args)))
    config = run(tmp_path, own_text)
    cache_activations(config, folder, gpt2)
    whole = contents(folder)
    lose("json", "safetensors")(folder, number)
    before = contents(folder)
    good = (own_text / "a.jsonl").read_text()
    another(own_text, change)
    if streamed and change is CHANGES["appended"]:  # of a stream, what comes later is not of the cache
        cache_activations(config, folder, gpt2)
    else:
        with pytest.raises(MxdError, match=r"the text or its tokenizer has changed|the text has changed since"):
            cache_activations(config, folder, gpt2)
        assert contents(folder) == before
        (own_text / "a.jsonl").write_text(good)
        cache_activations(config, folder, gpt2)
    assert contents(folder) == whole


def test_a_shard_repaired_for_fewer_tokens_is_written_whole(tmp_path, gpt2, text, cached):
    folder = shutil.copytree(cached, tmp_path / "cache")
    lose("safetensors")(folder, 2)
    cache_activations(run(tmp_path, text, training={"tokens": 64 * 4}), folder, gpt2)
    assert contents(folder) == contents(cached)


def test_shards_that_are_there_and_do_not_meet_are_not_done(cache):
    """As two writers leave them that began at the same moment with two texts."""
    file = shard(cache, 4, "json")
    said = json.loads(file.read_text())
    del said["seal"]
    said["start"]["text"] = "a" * 32
    said["seal"] = seal_of(json.loads((cache / "cache.json").read_text()), said)
    file.write_text(json.dumps(said))
    with pytest.raises(MxdError, match=r"shard-000004 begins at .*, and the shard before it ends at .* has changed"):
        write(cache, nothing)


def test_caching_asks_for_room_for_all_its_layers_and_tokens(tmp_path, gpt2, text, monkeypatch):
    need = 640 * (8 + 2 * 2 * 32 * 4)
    free(monkeypatch, need - 1)
    with pytest.raises(MxdError, match=r"are free at .*none; lower training\.tokens"):
        cache_activations(run(tmp_path, text), tmp_path / "none", gpt2)
    assert names(tmp_path) == []
    free(monkeypatch, need)
    cache_activations(run(tmp_path, text), tmp_path / "all", gpt2)
    assert cached_tokens(tmp_path / "all") == 640


@pytest.fixture(scope="module")
def other_gpt2(build_model, tokenizer):
    """The same architecture with other weights."""
    return load_frozen(build_model("gpt2", seed=1), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": 1}, "seed: 0, asked for 1"),
        ({"data": {"source": "b.jsonl"}}, r"data: .*a\.jsonl.*, asked for .*b\.jsonl"),
        ({"data": {"context": 17}}, "data: .*'context': 16.*, asked for .*'context': 17"),
        ({"data": {"exclude_special": True}}, r"excluded_ids: \[\], asked for \[0\]"),
        ({"data": {"bos_constant": False}}, "bos_id: 0, asked for None"),
        ({"training": {"batch_tokens": 32}}, "batch_tokens: 64, asked for 32"),
        ({"training": {"buffer_tokens": 256}}, "buffer_tokens: 192, asked for 256"),
        ({"blocks": [1, 2]}, "it has blocks 0, 2, asked for 1"),
        (
            {"training": {"tokens": 704}},
            "holds 640 tokens, the run asks for 704; lower training.tokens, .* or continue",
        ),
    ],
)
def test_a_run_refuses_a_cache_of_something_else(tmp_path, gpt2, text, cached, fields, message):
    if "source" in fields.get("data", {}):
        fields = {"data": {"source": str(text / "b.jsonl")}}
    before = contents(cached)
    with pytest.raises(MxdError, match=message):
        train(run(tmp_path, text, cached, **fields), model=gpt2)
    assert names(tmp_path) == []
    if "tokens" not in fields.get("training", {}):
        with pytest.raises(MxdError, match=message):
            cache_activations(run(tmp_path, text, **fields), cached, gpt2)
    assert contents(cached) == before


def test_a_run_refuses_the_cache_of_another_base_model(tmp_path, text, cached, other_gpt2, build_model, tokenizer):
    with pytest.raises(MxdError, match=r"block 0 is of another base model .*; block 2 is of another base model"):
        train(run(tmp_path, text, cached), model=other_gpt2)
    half = load_frozen(build_model("gpt2").to(torch.bfloat16), tokenizer=tokenizer)
    with pytest.raises(MxdError, match="model_dtype: 'float32', asked for 'bfloat16'"):
        train(run(tmp_path, text, cached), model=half)
    assert names(tmp_path) == []


def test_a_run_needs_only_as_many_tokens_as_its_whole_steps(tmp_path, gpt2, text, cached):
    folder = train(run(tmp_path, text, cached, blocks=[2], training={"tokens": 703}), model=gpt2)
    assert state_of(folder)[1][-1]["tokens"] == 640


def test_a_shard_damaged_under_a_run_saves_what_was_trained(tmp_path, gpt2, text, cached):
    folder = tmp_path / "cache"
    shutil.copytree(cached, folder)
    cut_to(-1)(folder, 3)
    config = run(tmp_path, text, folder, blocks=[2])
    with pytest.raises(MxdError, match=r"cannot read .*shard-000003"):
        train(config, model=gpt2)
    assert [path.name for path in config.folder.glob("state/*")] == ["step-000000005"]


def test_a_layer_that_is_not_there_is_refused_before_anything_is_written(tmp_path, gpt2, text):
    with pytest.raises(MxdError, match=r"out of range.*0 \.\.\. 2"):
        cache_activations(run(tmp_path, text, blocks=[3]), tmp_path / "c", gpt2)
    assert names(tmp_path) == []


def test_a_text_too_short_is_refused_in_caching(tmp_path, gpt2):
    short = tmp_path / "text"
    short.mkdir()
    (short / "train.jsonl").write_text('{"text": "one two"}')
    with pytest.raises(MxdError, match="less than one context"):
        cache_activations(
            run(tmp_path, short, data={"source": str(short / "train.jsonl"), "context": 64}), tmp_path / "c", gpt2
        )


@pytest.mark.long
def test_a_run_mixes_a_cache_of_another_seed_and_batch_size(tmp_path, gpt2, text, cached, monkeypatch):
    """It may read more tokens than the cache holds, and goes on after a stop exactly as if it had not stopped."""
    fields = {
        "seed": 5,
        "blocks": [2],
        "data": {"mix_shards": 3},
        "training": {"tokens": 1000, "batch_tokens": 50, "buffer_tokens": 50, "save_every": 7},
    }
    uninterrupted = train(run(tmp_path / "whole", text, cached, **fields), model=gpt2)
    assert state_of(uninterrupted)[1][-1]["tokens"] == 1000
    module = importlib.import_module("mxd.training.loop")
    real, calls = module.train_step, []

    def stop(*args, **options):
        calls.append(1)
        if len(calls) > 3 * 15:
            raise KeyboardInterrupt
        return real(*args, **options)

    config = run(tmp_path / "cut", text, cached, **fields)
    monkeypatch.setattr(module, "train_step", stop)
    with pytest.raises(KeyboardInterrupt):
        train(config, model=gpt2)
    monkeypatch.setattr(module, "train_step", real)
    assert_same_run(train(config, resume=True, model=gpt2), uninterrupted)


def test_mixing_needs_the_same_activations_all_the_same(tmp_path, gpt2, text, cached):
    fields = {"data": {"mix_shards": 2, "context": 17}, "seed": 4}
    with pytest.raises(MxdError, match=r"'context': 16.*, asked for .*'context': 17") as error:
        train(run(tmp_path, text, cached, **fields), model=gpt2)
    assert "seed" not in str(error.value)
    with pytest.raises(MxdError, match=r"mix_shards is for a cache; set data.cache, too"):
        run(tmp_path, text, data={"mix_shards": 2})


def test_the_processes_of_a_launch_are_the_workers(tmp_path, gpt2, text, cached, monkeypatch):
    monkeypatch.setattr(Processes, "agree", lambda self, given: None)
    for rank in (1, 0):
        monkeypatch.setattr("mxd.training.source.launched", lambda minutes, rank=rank: nullcontext(Processes(rank, 2)))
        cache_activations(run(tmp_path, text), tmp_path / "c", gpt2)
        numbers = {int(name[6:12]) // 2 for name in names(tmp_path / "c") if name[:6] == "shard-"}
        assert numbers == ({1, 3} if rank else {0, 1, 2, 3})
    assert contents(tmp_path / "c") == contents(cached)


def test_a_process_of_a_launch_reads_its_share_of_a_cache(tmp_path, gpt2, text, cached):
    config = run(tmp_path, text, cached)
    shares = [RankPart((2,), 0, 2), RankPart((2,), 1, 2)]
    halves = [activation_stream(config, gpt2, None, Processes(rank, 2), shares) for rank in (0, 1)]
    for batch, a, b in islice(zip(activation_stream(config, gpt2), *halves, strict=True), 3):
        assert torch.equal(batch.sites[2][0], torch.cat([a.sites[2][0], b.sites[2][0]]))
        assert a.sites.keys() == {2} and batch.sites.keys() == {0, 2}


def test_the_command_takes_a_dtype_and_a_worker(tmp_path, text, capsys):
    (tmp_path / "a.yaml").write_text(dump_config(run(tmp_path, text, blocks=[0], training={"buffer_tokens": 64})))
    for worker in ("2/2", "1/2"):
        code, out, _ = mxd(
            capsys, "cache", tmp_path / "a.yaml", tmp_path / "c", "--dtype", "bfloat16", "--worker", worker
        )
        assert code == 0 and f"--data.cache {tmp_path}/c" in out
        assert len(names(tmp_path / "c")) == (11 if worker == "2/2" else 21)
    assert cached_tokens(tmp_path / "c") == 640
    assert json.loads((tmp_path / "c" / "cache.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("worker", ["0/4", "5/4", "2", "a/b", "1/0", "-1/2", "1/4/2", "²/4"])
def test_a_worker_that_is_none_is_refused(tmp_path, capsys, worker):
    code, _, err = mxd(capsys, "cache", "configs/tiny.yaml", tmp_path / "c", f"--worker={worker}")
    assert code == 1 and "--worker takes one of 1/4, 2/4, 3/4, 4/4 (of four), got" in " ".join(err.split())
    assert names(tmp_path) == []
