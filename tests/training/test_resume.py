"""One thing is changed between a stop and `--resume`: refused, named, nothing touched; unchanged, the run goes on.

`scripts/check_resume.py` does the same with the command itself.
"""

import copy
import gc
import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from runs import assert_same_run, seal_state, stop_after
from streams import LOADERS, served, write_files

from mxd.artifacts.checkpoint import load_layer
from mxd.common.errors import MxdError
from mxd.common.parsing import differences
from mxd.config import RunConfig, config_hash, dump_config, load_config, parse_config
from mxd.data.streams import TextStream
from mxd.model.loading import load_frozen
from mxd.training.source import cache_activations
from mxd.training.trainer import train

module = importlib.import_module("mxd.training.loop")
LINES = [f"{i} is a number, and {i * i} its square." for i in range(400)]


def write_text(file: Path, lines: list[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(json.dumps({"text": line}) for line in lines), encoding="utf-8")


def config_of(root: Path, run: str = "r", **fields) -> RunConfig:
    """A run of 12 steps in six windows of a text of its own."""
    raw = {
        "run": run,
        "out": str(root / "out"),
        "blocks": [1],
        "replacements": [{"method": "transcoder", "num_units": 64, "sparsity": {"kind": "topk", "k": 4}}],
        "data": {"source": str(root / "text" / "train.jsonl"), "split": "train", "context": 16},
        "training": {"recipe": "short", "tokens": 768, "batch_tokens": 64, "buffer_tokens": 128}
        | {"log_every": 2, "save_every": 5},
    }
    for key, value in fields.items():
        raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
    return parse_config(raw)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(config: RunConfig, model, *said: str) -> str:
    """Resuming ends in one line that says so, and leaves the run's folder as it was."""
    before = contents(config.folder)
    with pytest.raises(MxdError) as error:
        train(config, resume=True, model=model)
    message = str(error.value)
    assert all(text in message for text in said), message
    assert "\n" not in message
    assert contents(config.folder) == before
    return message


@pytest.fixture(scope="module")
def whole(gpt2, tmp_path_factory) -> Path:
    """Where the run stands that nobody stopped."""
    root = tmp_path_factory.mktemp("whole")
    write_text(root / "text" / "train.jsonl", LINES)
    return train(config_of(root), model=gpt2)


@pytest.fixture(scope="module")
def halves(gpt2, tmp_path_factory) -> Path:
    """Where the same run stands, stopped after step 7, and one like it under another name."""
    root = tmp_path_factory.mktemp("halves")
    write_text(root / "text" / "train.jsonl", LINES)
    for run in ("r", "other"):
        config = config_of(root, run)
        stop_after(7, config, gpt2)
        with (config.folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 8}\n')  # as if it had been killed later
    return root


@pytest.fixture
def stopped(halves, tmp_path):
    """The run's config; its folder is put back as it was after the test, and its text."""
    shutil.copytree(halves, tmp_path / "before")
    yield config_of(halves)
    shutil.rmtree(halves)
    shutil.copytree(tmp_path / "before", halves)


def test_unchanged_it_goes_on_bit_for_bit(stopped, whole, gpt2):
    train(stopped, resume=True, model=gpt2)
    assert_same_run(whole, stopped.folder)


@pytest.mark.parametrize(
    "lines",
    [[*LINES, "One line more."], LINES[::-1], LINES[:-1], ["1 is no number.", *LINES[1:]]],
    ids=["appended", "reordered", "shortened", "changed"],
)
def test_another_text(stopped, gpt2, lines):
    write_text(Path(stopped.data.source), lines)
    refused(stopped, gpt2, "the text or its tokenizer has changed: its token ids had the hash ")


def test_another_tokenizer(stopped, gpt2, tokenizer):
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["number"])
    refused(stopped, load_frozen(gpt2.module, tokenizer=other), "ids from 0 to 4096, and the model knows 0 ... 4095")
    other = copy.deepcopy(tokenizer)
    other.eos_token = "a"
    refused(stopped, load_frozen(gpt2.module, tokenizer=other), "the text or its tokenizer has changed")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"seed": 1}, "seed was 0, is 1"),
        ({"data": {"context": 32}}, "data.context was 16, is 32"),
        ({"data": {"bos": False}}, "data.bos was True, is False"),
        ({"data": {"exclude_special": True}}, "data.exclude_special was False, is True"),
        ({"data": {"bos_constant": False}}, "data.bos_constant was True, is False"),
        ({"training": {"recipe": "fast"}}, "training.recipe was 'short', is 'fast'"),
        ({"training": {"lr": 0.1}}, "training.lr was None, is 0.1"),
        ({"blocks": [2]}, "blocks.0 was 1, is 2"),
        (
            {"replacements": [{"method": "transcoder", "num_units": 64, "sparsity": {"kind": "topk", "k": 5}}]},
            "replacements.0.sparsity.k was 4, is 5",
        ),
    ],
)
def test_another_config(stopped, gpt2, fields, said):
    """Given with the command, and also in the run's own config.yaml."""
    changed = config_of(Path(stopped.out).parent, **fields)
    refused(changed, gpt2, "config.yaml differs from this config", said, "mxd train", "--resume")
    (stopped.folder / "config.yaml").write_text(dump_config(changed))
    refused(load_config(stopped.folder / "config.yaml"), gpt2, "cannot continue as it began", said, "--run NAME")


def test_a_name_and_a_place_may_change(stopped, whole, gpt2):
    moved = stopped.model_copy(update={"run": "moved"})
    stopped.folder.rename(moved.folder)
    train(moved, resume=True, model=gpt2)
    assert_same_run(whole, moved.folder)


def test_a_config_that_is_written_otherwise_is_the_same(stopped, whole, gpt2):
    file = stopped.folder / "config.yaml"
    file.write_text("# mine\n" + yaml.safe_dump(yaml.safe_load(file.read_text()), default_flow_style=True))
    train(stopped, resume=True, model=gpt2)
    assert_same_run(whole, stopped.folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.get_input_embeddings().weight.data.mul_(1.05),
        lambda model: model.transformer.wpe.weight.data.add_(0.1),
        lambda model: model.transformer.ln_f.bias.data.add_(0.1),
        lambda model: model.transformer.h[2].attn.c_proj.weight.data.mul_(1.05),
        lambda model: setattr(model.config, "layer_norm_epsilon", 1e-3),
    ],
    ids=["embedding", "positions", "last norm", "attention above", "epsilon"],
)
def test_another_base_model_of_the_same_mlps(stopped, build_model, tokenizer, change):
    model = build_model("gpt2")
    change(model)
    refused(stopped, load_frozen(model, tokenizer=tokenizer), "base model (hash of its settings and all its weights)")


def test_another_dtype_of_the_base_model(stopped, build_model, tokenizer):
    half = load_frozen(build_model("gpt2").to(torch.bfloat16), tokenizer=tokenizer)
    refused(stopped, half, "dtype of the base model was 'float32', is 'bfloat16'")


def test_the_states_of_another_run(stopped, gpt2):
    other = stopped.folder.with_name("other")
    shutil.rmtree(stopped.folder / "state")
    shutil.copytree(other / "state", stopped.folder / "state")
    refused(
        stopped, gpt2, "step-000000007 is a state of another run: it is of ", "run_id names ", "Put back this run's"
    )
    (stopped.folder / "run_id").unlink()
    refused(stopped, gpt2, "is a state of another run: it is of ", "run_id is missing")
    (stopped.folder / "run_id").write_text("{}")
    refused(stopped, gpt2, "run_id does not name a run")


def test_a_state_that_says_what_cannot_be(stopped, gpt2):
    """Its manifest made to fit, and its folder: nothing is damaged, and still the numbers do not add up."""
    (stopped.folder / "state" / "step-000000005").rename(stopped.folder / "before")
    place = stopped.folder / "state" / "step-000000007"
    for step, tokens in ((7, 64), (70, 70 * 64)):
        said = json.loads((place / "state.json").read_text())
        said |= {"step": step, "tokens": tokens, "counted": dict.fromkeys(said["counted"], 0)}
        (place / "state.json").write_text(json.dumps(said))
        seal_state(place)
        place = place.rename(place.with_name(f"step-{step:09d}"))
        refused(stopped, gpt2, f"step {step} of 12 cannot be after {tokens:,} tokens")


def test_a_config_that_cannot_be_read(stopped, gpt2):
    (stopped.folder / "config.yaml").write_bytes(b"\xff\xfe")
    refused(stopped, gpt2, "config.yaml is not YAML that can be used")


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({"a": 1, "b": [1, {"c": None}]}, {"b": [1, {"c": None}], "a": 1}, []),
        ({"a": {"b": 1}}, {"a": {"b": 2}, "c": "x"}, ["a.b was 1, is 2", "c was None, is 'x'"]),
        ({"a": [1, 2]}, {"a": [1, 2, 3]}, ["a was [1, 2], is [1, 2, 3]"]),
        ({"a": [1, {"b": True}]}, {"a": [1, {"b": [False]}]}, ["a.1.b was True, is [False]"]),
        ({"a": "x" * 500}, {"a": None}, [f"a was '{'x' * 199}..., is None"]),
    ],
)
def test_differences_are_named_by_their_place(before, now, found):
    assert differences(before, now) == found


# Caches


@pytest.fixture
def cached(tmp_path, gpt2, monkeypatch):
    """The run from a cache in order, stopped after step 7; its config and that of the cache."""
    monkeypatch.setattr("mxd.data.cache.SHARD_BATCHES", 1)
    write_text(tmp_path / "text" / "train.jsonl", LINES)
    cache = tmp_path / "cache"
    live = config_of(tmp_path, training={"tokens": 64 * 14})
    cache_activations(live, cache, gpt2)
    config = config_of(tmp_path, data={"cache": str(cache)})
    stop_after(7, config, gpt2)
    return config, live


def another_cache(config: RunConfig, live: RunConfig, model, dtype: str = "float32", **fields) -> None:
    shutil.rmtree(config.data.cache)
    changed = config_of(Path(config.out).parent, training={"tokens": live.training.tokens}, **fields)
    cache_activations(changed, config.data.cache, model, dtype)


def test_the_same_cache_written_anew_goes_on(cached, whole, gpt2):
    config, live = cached
    another_cache(config, live, gpt2)
    train(config, resume=True, model=gpt2)
    assert_same_run(whole, config.folder)


def test_a_cache_that_has_grown_goes_on(cached, whole, gpt2):
    config, _ = cached
    cache_activations(config_of(Path(config.out).parent, training={"tokens": 64 * 16}), config.data.cache, gpt2)
    train(config, resume=True, model=gpt2)
    assert_same_run(whole, config.folder)


@pytest.mark.long
def test_another_cache(cached, gpt2):
    config, live = cached
    another_cache(config, live, gpt2, "bfloat16")
    refused(config, gpt2, "activation cache (hash of its cache.json) was ")
    another_cache(config, live, gpt2, seed=1)
    refused(config, gpt2, "activation cache (hash of its cache.json) was ")
    text = Path(live.data.source)
    write_text(text, LINES[::-1])
    another_cache(config, live, gpt2)
    refused(config, gpt2, "activation cache (hash of its cache.json) was ")


@pytest.mark.long
def test_a_cache_of_a_text_that_cannot_be_compared(cached, gpt2, monkeypatch):
    """Of a Hub dataset only the token ids tell: they are in the places that the shards and the state name."""
    config, live = cached
    shutil.rmtree(config.folder)
    for lines in (LINES, [LINES[0].replace("a number", "a square"), *LINES[1:]]):
        monkeypatch.setattr("mxd.training.source.text_hash", lambda *args: None)
        write_text(Path(live.data.source), lines)
        another_cache(config, live, gpt2)
        if lines is LINES:
            stop_after(7, config, gpt2)
    with pytest.raises(MxdError, match=r"the activation cache .* is of another text than the one that was read up to"):
        train(config, resume=True, model=gpt2)


@pytest.mark.parametrize("change", ["grown", "another text"])
def test_a_mixed_cache_with_other_shards(tmp_path, gpt2, monkeypatch, change):
    monkeypatch.setattr("mxd.data.cache.SHARD_BATCHES", 1)
    monkeypatch.setattr("mxd.training.source.text_hash", lambda *args: None)
    write_text(tmp_path / "text" / "train.jsonl", LINES)
    cache = tmp_path / "cache"
    cache_activations(config_of(tmp_path), cache, gpt2)
    config = config_of(tmp_path, data={"cache": str(cache), "mix_shards": 3})
    stop_after(7, config, gpt2)
    if change == "another text":
        shutil.rmtree(cache)
        write_text(tmp_path / "text" / "train.jsonl", LINES[::-1])
    cache_activations(config_of(tmp_path, training={"tokens": 64 * (14 if change == "grown" else 12)}), cache, gpt2)
    with pytest.raises(
        MxdError, match="has other shards than when the run was saved, so they would be mixed differently"
    ):
        train(config, resume=True, model=gpt2)


# Streams


@pytest.mark.long
@pytest.mark.parametrize("step", [7, 8])  # within a window, between two
def test_a_stream_that_is_another_up_to_the_place(tmp_path, gpt2, monkeypatch, step):
    """What was read is compared before the base model runs; what comes later nobody can know."""
    lines = list(LINES)
    monkeypatch.setattr("mxd.training.source.documents", lambda *args: iter(lines))
    monkeypatch.setattr("mxd.training.source.held_out", lambda *args: None)  # of a file that is not there
    whole = train(config_of(tmp_path, "whole"), model=gpt2)
    config = config_of(tmp_path)
    stop_after(step, config, gpt2)
    before, later = contents(config.folder), LINES[300:]

    def fail(*args):
        raise AssertionError("the base model was run")

    for place in (0, 10):
        lines[place] = "Another line."
        with monkeypatch.context() as patch:
            patch.setattr("mxd.data.activations._fill", fail)
            with pytest.raises(MxdError, match="the text or its tokenizer has changed: its token ids had the"):
                train(config, resume=True, model=gpt2)
        lines[place] = LINES[place]
        assert contents(config.folder) == before
    lines[:] = LINES[:10]
    with pytest.raises(MxdError, match="and now have none, since it ends before"):
        train(config, resume=True, model=gpt2)
    lines[:] = [*LINES[:300], *later[::-1]]
    train(config, resume=True, model=gpt2)
    assert_same_run(whole, config.folder)


def hub_run(root: Path, run: str = "r") -> RunConfig:
    data = {"source": "org/name", "streaming": True}
    return config_of(root, run, data=data)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Files in place of the Hub, in windows of 24 rows, of which a run reads ten or so."""
    monkeypatch.setattr("mxd.data.streams.WINDOW", 24)
    monkeypatch.setattr("mxd.data.streams.BATCH", 5)

    def serve(kind):
        write_files(tmp_path / "hub", kind, LINES)
        monkeypatch.setattr("datasets.load_dataset", served(tmp_path / "hub", kind))

    yield serve
    gc.collect()  # `datasets` leaves a CSV open that is not read to its end


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", LOADERS)
def test_a_stream_is_read_on_where_it_was(tmp_path, gpt2, hub, monkeypatch, kind):
    """Stopped within a window and between two, and thrice; the files before the last place are never opened again."""
    hub(kind)
    whole = train(hub_run(tmp_path, "whole"), model=gpt2)
    config, places = hub_run(tmp_path), []
    real = TextStream._windows

    def windows(self, place):
        for at, rows in real(self, place):
            places.append(at.window)
            yield at, rows

    monkeypatch.setattr(TextStream, "_windows", windows)
    stop_after(5, config, gpt2)
    assert places[0] == 0
    for stop in (6, 11):
        places.clear()
        stop_after(stop, config, gpt2, resume=True)
    before = json.loads((config.folder / "state" / "step-000000011" / "state.json").read_text())["cursor"]["bookmark"]
    places.clear()
    train(config, resume=True, model=gpt2)
    assert places[0] == before["place"]["window"] > 0
    assert_same_run(whole, config.folder)


@pytest.mark.parametrize("step", [7, 8])
def test_a_stream_that_is_another_where_it_is_read_on(tmp_path, gpt2, hub, monkeypatch, step):
    hub("jsonl")
    config = hub_run(tmp_path)
    stop_after(step, config, gpt2)
    before = contents(config.folder)
    write_files(tmp_path / "hub", "jsonl", [line.replace("number", "Number") for line in LINES])
    with pytest.raises(MxdError, match="the text or its tokenizer has changed: its token ids had the"):
        train(config, resume=True, model=gpt2)
    assert contents(config.folder) == before


# What is written says what it is of


def test_a_layer_says_what_it_was_trained_on(whole, gpt2, tmp_path):
    (folder,) = whole.glob("block*")
    provenance = load_layer(folder).provenance
    assert provenance.base_fingerprint == gpt2.base_fingerprint()
    config = load_config(whole / "config.yaml")
    assert provenance.config_hash == config_hash(config.model_copy(update={"run": "x", "out": "y"}))
    assert provenance.config_hash != config_hash(config.model_copy(update={"seed": 1}))
    said = json.loads((whole / "state" / "step-000000012" / "state.json").read_text())
    assert provenance.text_hash == said["cursor"]["text"] and len(provenance.text_hash) == 32
    old = json.loads((folder / "config.json").read_text())
    for field in ("base_fingerprint", "text_hash", "config_hash"):
        del old["provenance"][field]
    shutil.copytree(folder, tmp_path / "old")
    (tmp_path / "old" / "config.json").write_text(json.dumps(old))
    assert load_layer(tmp_path / "old").provenance.text_hash == ""


# Nothing that is not finite is written


@pytest.fixture
def spoil(monkeypatch):
    """Put a number into a tensor of a trainee after a step, counted from 1."""

    def plan(step, find, value):
        real, calls = module.train_step, []

        def train_step(trainee, *args):
            real(trainee, *args)
            calls.append(1)
            if len(calls) == step:
                find(trainee).reshape(-1)[3] = value

        monkeypatch.setattr(module, "train_step", train_step)

    return plan


FOUND = {
    "layer/decoder": lambda trainee: trainee.layer.decoder.data,
    "optimizer/exp_avg/": lambda trainee: next(iter(trainee.optimizer.parts[0].state.values()))["exp_avg"],
    "optimizer/exp_avg_sq/": lambda trainee: next(iter(trainee.optimizer.parts[0].state.values()))["exp_avg_sq"],
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize(("step", "value"), [(10, float("nan")), (12, float("inf")), (5, -float("inf"))])
def test_weights_and_moments_that_are_not_finite_are_not_saved(tmp_path, gpt2, spoil, name, step, value):
    """Found in the save after the very step, before any loss shows it; in the last, too."""
    write_text(tmp_path / "text" / "train.jsonl", LINES)
    config = config_of(tmp_path)
    spoil(step, FOUND[name], value)
    good = {5: [], 10: [5], 12: [5, 10]}[step]
    kept = f"the last good state, state/step-{good[-1]:09d}, stays" if good else "there is no earlier state"
    with pytest.raises(MxdError, match=rf"diverged before step {step}: {name}.* is not finite\..* {kept}"):
        train(config, model=gpt2)
    assert sorted(path.name for path in config.folder.glob("state/*")) == [f"step-{n:09d}" for n in good]
    assert not list(config.folder.glob("block*"))
