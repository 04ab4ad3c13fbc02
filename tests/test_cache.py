"""Activations on disk: what is read back is the live stream, bit for bit, and whatever is not is refused.

Streams and runs read a tiny random model, and shards hold four batches, so that a few batches fill several shards.
"""

import errno
import importlib
import json
import shutil
from collections import namedtuple
from itertools import islice

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mxd.activations import Cursor, activation_batches
from mxd.cache import cache_bytes, cached_batches, cached_tokens, check_cache, claim_cache, write_cache
from mxd.config import parse_config
from mxd.errors import MxdError
from mxd.model import load_frozen
from mxd.stream import cache_activations
from mxd.train import train

BATCH, LAYERS, MASKED = 8, (0, 2), (0, 1, 2, 3, 4)
IDENTITY = {"data": {"source": "a.jsonl", "context": 9}, "seed": 0, "fingerprints": {"0": "aa", "2": "bb"}}
SIZE = cache_bytes([(32, 32), (32, 32)], 14 * BATCH)


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    """14 batches are three whole shards and one of two batches."""
    monkeypatch.setattr("mxd.cache.SHARD_BATCHES", 4)


@pytest.fixture(scope="module")
def live(gpt2):
    """The live stream: windows of three batches of 8 tokens; about a quarter of the tokens are masked."""
    rng = np.random.default_rng(0)
    rows = rng.integers(5, 4096, (40, 9), dtype=np.int32)
    hide = rng.random(rows.shape) < 0.25
    rows[hide] = rng.choice(MASKED, hide.sum())

    def stream(start=None, layers=LAYERS):
        options = {"batch_tokens": BATCH, "buffer_tokens": 3 * BATCH, "masked_ids": MASKED, "forward_contexts": 2}
        return activation_batches(gpt2, layers, lambda first: iter(rows[first:]), start=start, **options)

    return stream


@pytest.fixture(scope="module")
def whole(live):
    """The first 14 live batches."""
    return list(islice(live(), 14))


@pytest.fixture
def cache(tmp_path, whole):
    """A cache of the 14 batches, written at once."""
    return write(tmp_path / "cache", whole)


def write(folder, stream, batches=14, identity=IDENTITY):
    claim_cache(folder, identity, SIZE)
    write_cache(folder, iter(stream), batches * BATCH)
    return folder


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
    assert names(cache) == ["cache.json", *(f"shard-{n:06d}" for n in range(4))]
    counts = [len(load_file(cache / f"shard-{n:06d}" / "activations.safetensors")["ids"]) for n in range(4)]
    assert counts == [32, 32, 32, 16]
    assert cached_tokens(cache) == 112
    assert any(batch.cursor.offset and batch.cursor.batch for batch in whole)  # inside a window that cuts a context
    assert not set(torch.cat([batch.ids for batch in whole]).tolist()) & set(MASKED)


def test_some_layers_of_a_cache(cache, whole, live):
    alone = list(cached_batches(cache, (2,)))
    assert all_same(alone, islice(live(layers=(2,)), 14))
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


def test_an_interrupted_cache_goes_on_and_equals_one_written_at_once(tmp_path, live, whole, cache):
    folder = tmp_path / "cut"
    for stop, kept in ((2, 0), (6, 4), (9, 12)):  # batches read before a failure, batches in whole shards after it
        start = claim_cache(folder, IDENTITY, SIZE)
        with pytest.raises(MxdError, match="the Hub is gone"):
            write_cache(folder, broken(live(start), stop), 112)
        assert all_same(cached_batches(folder, LAYERS), whole[:kept])
    start = claim_cache(folder, IDENTITY, SIZE)
    assert start == whole[11].cursor
    write_cache(folder, live(start), 112)
    assert contents(folder) == contents(cache)


def test_a_cache_grows_when_more_is_asked(tmp_path, live, whole):
    folder = write(tmp_path / "c", live(), batches=5)
    assert all_same(cached_batches(folder, LAYERS), whole[:5])
    start = claim_cache(folder, IDENTITY, SIZE)
    assert start == whole[4].cursor
    write_cache(folder, live(start), 112)
    assert all_same(cached_batches(folder, LAYERS), whole)
    for n in (3, 4, 8, 12):  # on both sides of borders between shards of unequal length
        assert all_same(cached_batches(folder, LAYERS, whole[n].cursor), whole[n + 1 :])


def test_a_cache_that_holds_enough_is_left_alone(cache, whole):
    before = contents(cache)
    assert claim_cache(cache, IDENTITY, SIZE) == whole[-1].cursor
    write_cache(cache, broken([], 0), 100)  # not asked for anything
    assert contents(cache) == before


def test_what_a_killed_write_left_is_ignored(tmp_path, live, whole, monkeypatch):
    folder = write(tmp_path / "c", whole, batches=6)
    shutil.copytree(folder / "shard-000001", folder / ".shard-000002.0a1b2c3d")
    (folder / ".shard-000002.99999999").mkdir()
    (folder / ".shard-000002.99999999" / "activations.safetensors").write_bytes(b"cut")
    assert cached_tokens(folder) == 48
    assert all_same(cached_batches(folder, LAYERS), whole[:6])
    start = claim_cache(folder, IDENTITY, SIZE)
    write_cache(folder, live(start), 112)
    assert all_same(cached_batches(folder, LAYERS), whole)
    assert names(folder)[-1] == "shard-000003"


def test_two_that_write_at_once_do_not_mix(tmp_path, whole):
    """Shards are numbered as they are written; the second to write a number says so, and the cache stays right."""
    folder = tmp_path / "c"
    claim_cache(folder, IDENTITY, SIZE)

    def stream():
        yield from whole[:6]
        write_cache(folder, iter(whole[4:]), 112)  # the other began after this one's first shard, and is done
        yield from whole[6:]

    with pytest.raises(MxdError, match=r"another process is writing to the cache .*; wait until it is done"):
        write_cache(folder, stream(), 112)
    assert all_same(cached_batches(folder, LAYERS), whole)


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


@pytest.mark.parametrize("text", ["{", "[1]", "null", '"x"', "{}", '{"format": 0, "fingerprints": 3}'])
def test_another_programs_cache_json_is_refused_and_untouched(tmp_path, text):
    (tmp_path / "cache.json").write_text(text)
    for function in (lambda: check_cache(tmp_path, IDENTITY), lambda: claim_cache(tmp_path, IDENTITY, SIZE)):
        with pytest.raises(MxdError, match=r"cache\.json(: |.* choose another folder)"):
            function()
    assert (tmp_path / "cache.json").read_text() == text


def test_an_empty_folder_and_folders_that_are_not_there_are_taken(tmp_path, whole):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        assert claim_cache(folder, IDENTITY, SIZE) == Cursor()
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
        ({"batch_tokens": 4}, "batch_tokens: None, asked for 4"),
        ({"fingerprints": {"0": "aa", "2": "cc"}}, r"layer 2 is of another base model \(fingerprint bb, asked for cc"),
        ({"fingerprints": {"1": "bb"}}, "it has layers 0, 2, asked for 1"),
    ],
)
def test_a_cache_of_something_else_is_refused_and_untouched(cache, changed, message):
    before = contents(cache)
    for function in (lambda i: check_cache(cache, i), lambda i: claim_cache(cache, i, SIZE)):
        with pytest.raises(MxdError, match=message):
            function({**IDENTITY, **changed})
    assert contents(cache) == before


def test_all_differences_are_named_at_once(cache):
    with pytest.raises(MxdError, match=r"seed: 0, asked for 7\n.*it has layers 0, 2, asked for 1\n.*asked for 5"):
        check_cache(cache, {**IDENTITY, "seed": 7, "fingerprints": {"1": "xx", "2": "bb", "5": "yy"}})


def test_some_of_its_layers_can_be_read_but_not_written(cache):
    """A shard of fewer layers in the midst would be unreadable."""
    fewer = {**IDENTITY, "fingerprints": {"2": "bb"}}
    check_cache(cache, fewer)
    with pytest.raises(MxdError, match="has layers 0, 2, asked for 2"):
        claim_cache(cache, fewer, SIZE)


def test_a_cache_that_holds_nothing_yet_may_become_another(tmp_path, whole):
    """For example when the first try named a text that is not there."""
    for identity in ({**IDENTITY, "seed": 7, "fingerprints": {"5": "aa"}}, IDENTITY):
        assert claim_cache(tmp_path / "c", identity, SIZE) == Cursor()
        check_cache(tmp_path / "c", identity)

    def stream():
        yield from whole[:3]
        claim_cache(tmp_path / "c", {**IDENTITY, "seed": 7}, SIZE)  # by another process: then nothing is written
        yield from whole[3:]

    with pytest.raises(MxdError, match="another process is writing to the cache"):
        write_cache(tmp_path / "c", stream(), 112)
    assert names(tmp_path / "c") == ["cache.json"]


def test_another_format_is_refused(cache, monkeypatch):
    monkeypatch.setattr("mxd.cache.FORMAT", 2)
    with pytest.raises(MxdError, match="format: 1, asked for 2"):
        check_cache(cache, IDENTITY)


def test_a_place_not_in_the_cache_is_refused(cache, whole, live):
    beyond = next(live(whole[-1].cursor)).cursor
    for start in (beyond, Cursor(3, 1, 4)):
        message = rf"no batch that begins at Cursor\(context={start.context},.*; it ends at Cursor\("
        with pytest.raises(MxdError, match=message):
            list(cached_batches(cache, LAYERS, start))


def cut_to(n):
    return lambda shard: (file := shard / "activations.safetensors").write_bytes(file.read_bytes()[:n])


@pytest.mark.parametrize(
    "damage",
    [
        cut_to(0),
        cut_to(40),
        cut_to(-1),
        lambda shard: (shard / "activations.safetensors").unlink(),
        lambda shard: (shard / "shard.json").unlink(),
        lambda shard: (shard / "shard.json").write_text("{"),
        shutil.rmtree,
    ],
    ids=["empty", "header", "last-byte", "no-tensors", "no-ends", "bad-ends", "no-shard"],
)
def test_a_damaged_shard_is_named_and_can_be_written_anew(cache, whole, live, damage):
    damage(cache / "shard-000001")
    with pytest.raises(MxdError, match=r"shard-000001.* all after it; `mxd cache` writes them anew"):
        list(cached_batches(cache, LAYERS))
    for n in (1, 2, 3):
        shutil.rmtree(cache / f"shard-{n:06d}", ignore_errors=True)
    start = claim_cache(cache, IDENTITY, SIZE)
    write_cache(cache, live(start), 112)
    assert all_same(cached_batches(cache, LAYERS), whole)


def test_what_comes_before_a_damaged_shard_is_read(cache, whole):
    cut_to(-1)(cache / "shard-000002")
    stream = cached_batches(cache, LAYERS)
    assert all_same(islice(stream, 8), whole[:8])
    with pytest.raises(MxdError, match=r"cannot read .*shard-000002"):
        next(stream)
    assert all_same(cached_batches(cache, LAYERS, whole[11].cursor), whole[12:])  # nor does it matter later


def free(monkeypatch, n):
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or namedtuple("Disk", "free")(n))
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
    there = sum(path.stat().st_size for path in cache.rglob("shard-*/*.safetensors"))
    shutil.copytree(cache / "shard-000000", cache / ".shard-000004.0a1b2c3d")  # left by a killed write: does not count
    free(monkeypatch, 1000)
    claim_cache(cache, IDENTITY, there + 1000)
    with pytest.raises(MxdError, match=r"lower training\.tokens, cache fewer layers, or choose another disk"):
        claim_cache(cache, IDENTITY, there + 1001)


def test_a_text_that_ends_before_says_what_is_held(tmp_path, live):
    tokens = sum(len(batch.ids) for batch in live())
    assert 112 < tokens < 10_000
    folder = tmp_path / "c"
    for _ in range(2):
        start = claim_cache(folder, IDENTITY, SIZE)
        with pytest.raises(MxdError, match=rf"the text ended after {tokens} tokens of 10,000; the cache in .*c holds"):
            write_cache(folder, live(start), 10_000)
    assert all_same(cached_batches(folder, LAYERS), live())


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left")])
def test_a_full_disk_loses_no_shard_and_leaves_no_part_of_one(tmp_path, live, whole, monkeypatch, error):
    real, written = save_file, []

    def full(tensors, path):
        if len(written) == 2:
            path.write_bytes(b"part of a shard")
            raise error
        written.append(path)
        real(tensors, path)

    monkeypatch.setattr("mxd.cache.save_file", full)
    folder = tmp_path / "c"
    with pytest.raises(MxdError, match=r"cannot write .*shard-000002: .*No space left.* Free space"):
        write(folder, whole)
    assert names(folder) == ["cache.json", "shard-000000", "shard-000001"]
    assert all_same(cached_batches(folder, LAYERS), whole[:8])
    monkeypatch.setattr("mxd.cache.save_file", real)
    write_cache(folder, live(claim_cache(folder, IDENTITY, SIZE)), 112)
    assert all_same(cached_batches(folder, LAYERS), whole)


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
        patch.setattr("mxd.cache.SHARD_BATCHES", 4)
        cache_activations(run(folder.parent, text), folder, gpt2)
    return folder


def run(out, text, cache=None, **fields):
    """A run of 10 steps: three replacements at two layers; a cache of it has two whole shards and half a one."""
    sweep = [{"kind": "topk", "k": 4}, {"kind": "random_k", "k": 4}]
    raw = {
        "run": "r",
        "out": str(out),
        "layers": list(LAYERS),
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
    """Every tensor of a run's layers and last state, and its metrics but for times."""
    paths = [*folder.glob("layer*/*.safetensors"), sorted(folder.glob("state/step-*/*.safetensors"))[-1]]
    tensors = {f"{path.parent.name}/{name}": t for path in paths for name, t in load_file(path).items()}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"], line["tokens_per_second"]
    return tensors, lines


def assert_same_run(a, b):
    (tensors, lines), (others, other_lines) = state_of(a), state_of(b)
    assert lines == other_lines
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


def test_a_run_trained_from_its_cache_is_the_live_run_bit_for_bit(tmp_path, gpt2, text, cached, monkeypatch):
    live_run = train(run(tmp_path / "live", text), model=gpt2)
    names_ = {path.name for path in live_run.glob("layer*")}
    assert names_ == {f"layer{n}-{kind}" for n in LAYERS for kind in ("mxd-k4", "mxd-randomk4", "sae-k4")}

    def fail(*args, **options):
        raise AssertionError("the text was read, or the base model run")

    for name in ("documents", "token_blocks", "activation_batches"):
        monkeypatch.setattr(importlib.import_module("mxd.stream"), name, fail)
    monkeypatch.setattr(type(gpt2), "record", fail)
    assert_same_run(train(run(tmp_path / "cached", text, cached), model=gpt2), live_run)
    assert len(state_of(live_run)[1]) == 6 * 5


def test_a_run_of_some_layers_and_fewer_tokens_reads_the_same_cache(tmp_path, gpt2, text, cached):
    fields = {"layers": [2], "training": {"tokens": 300}}
    a = train(run(tmp_path / "live", text, **fields), model=gpt2)
    b = train(run(tmp_path / "cached", text, cached, **fields), model=gpt2)
    assert_same_run(a, b)


@pytest.mark.parametrize("step", [4, 5])  # between two shards; inside a shard and a window
def test_interrupted_and_resumed_from_the_cache_equals_uninterrupted(tmp_path, gpt2, text, cached, monkeypatch, step):
    fields = {"layers": [2], "training": {"save_every": step}}
    uninterrupted = train(run(tmp_path / "whole", text, cached, **fields), model=gpt2)
    module = importlib.import_module("mxd.train")
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
    for tokens in (256, 200, 640):  # one shard, nothing to do, the rest
        cache_activations(run(tmp_path, text, training={"tokens": tokens}), folder, gpt2)
        assert cached_tokens(folder) == max(tokens, 256)
    assert contents(folder) == contents(cached)


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
        ({"data": {"mask_special": False}}, r"masked_ids: \[0\], asked for \[\]"),
        ({"training": {"batch_tokens": 32}}, "batch_tokens: 64, asked for 32"),
        ({"training": {"buffer_tokens": 256}}, "buffer_tokens: 192, asked for 256"),
        ({"layers": [1, 2]}, "it has layers 0, 2, asked for 1"),
        ({"training": {"tokens": 704}}, "holds 640 tokens, the run asks for 704; lower training.tokens, or go on"),
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
    with pytest.raises(MxdError, match=r"layer 0 is of another base model .*\n.*layer 2 is of another base model"):
        train(run(tmp_path, text, cached), model=other_gpt2)
    half = load_frozen(build_model("gpt2").to(torch.bfloat16), tokenizer=tokenizer)
    with pytest.raises(MxdError, match="model_dtype: 'float32', asked for 'bfloat16'"):
        train(run(tmp_path, text, cached), model=half)
    assert names(tmp_path) == []


def test_a_run_needs_only_as_many_tokens_as_its_whole_steps(tmp_path, gpt2, text, cached):
    folder = train(run(tmp_path, text, cached, layers=[2], training={"tokens": 703}), model=gpt2)
    assert state_of(folder)[1][-1]["tokens"] == 640


def test_a_shard_damaged_under_a_run_saves_what_was_trained(tmp_path, gpt2, text, cached):
    folder = tmp_path / "cache"
    shutil.copytree(cached, folder)
    cut_to(-1)(folder / "shard-000001")
    config = run(tmp_path, text, folder, layers=[2])
    with pytest.raises(MxdError, match=r"cannot read .*shard-000001"):
        train(config, model=gpt2)
    assert [path.name for path in config.folder.glob("state/*")] == ["step-000000004"]


def test_a_layer_that_is_not_there_is_refused_before_anything_is_written(tmp_path, gpt2, text):
    with pytest.raises(MxdError, match=r"out of range.*0 \.\.\. 2"):
        cache_activations(run(tmp_path, text, layers=[3]), tmp_path / "c", gpt2)
    assert names(tmp_path) == []


def test_a_text_too_short_is_refused_in_caching(tmp_path, gpt2, text):
    with pytest.raises(MxdError, match="less than one context"):
        cache_activations(run(tmp_path, text, data={"context": 100_000}), tmp_path / "c", gpt2)
