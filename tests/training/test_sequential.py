"""One block after the other: each learns from activations of the model with the trained layers below spliced in."""

import copy
import json
import os
import shutil
import signal
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path

import pytest
import torch
from runs import metrics
from safetensors.torch import load_file

from mxd.artifacts.checkpoint import load_layer, save_layer
from mxd.artifacts.folders import read_config
from mxd.common.errors import MxdError
from mxd.common.processes import ALONE
from mxd.common.stop import Interrupted
from mxd.config import parse_config
from mxd.data.exchange import RankPart
from mxd.splice import Splice, recorder
from mxd.training.loop import Loop
from mxd.training.phases import finished_layer
from mxd.training.source import activation_stream, bos_activations, cache_activations, covariances
from mxd.training.trainer import train

trainer = import_module("mxd.training.trainer")
LINES = [f"{i} is a number, and {i * i} its square." for i in range(400)]
ONE = {"method": "transcoder", "num_units": 64, "sparsity": {"kind": "topk", "k": 4}}
STEPS = 6


def config_of(root: Path, run: str = "r", **fields):
    """Three blocks, each in six steps of three windows."""
    text = root / "train.jsonl"
    if not text.exists():
        text.write_text("\n".join(json.dumps({"text": line}) for line in LINES), encoding="utf-8")
    training = {"recipe": "short", "lr": 0.01, "tokens": 64 * STEPS, "batch_tokens": 64, "buffer_tokens": 128}
    raw = {
        "run": run,
        "out": str(root / "out"),
        "blocks": "all",
        "model": {"device": "cpu"},
        "replacements": [ONE],
        "data": {"source": str(text), "split": "train", "context": 16},
        "training": training | {"log_every": 2, "save_every": 3, "inputs": "spliced"},
    }
    for key, value in fields.items():
        raw[key] = {**raw[key], **value} if isinstance(value, dict) else value
    return parse_config(raw)


def layers_of(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.parent.name: load_file(path) for path in sorted(folder.glob("block*/model.safetensors"))}


def assert_same_layers(a: Path, b: Path) -> None:
    left, right = layers_of(a), layers_of(b)
    assert list(left) == list(right)
    for name, tensors in left.items():
        assert all(torch.equal(tensor, right[name][key]) for key, tensor in tensors.items()), name


def watched(config, model, ids) -> dict[int, tuple]:
    """Train, and note for each block what is recorded for some ids, and for BOS, while it is trained."""
    seen, real = {}, trainer.activation_stream

    def stream(config, base, cursor, processes, shares, record, *text):
        (block,) = config.blocks
        seen[block] = record(ids, [block])[block], bos_activations(config, base)[block]
        return real(config, base, cursor, processes, shares, record, *text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "activation_stream", stream)
        train(config, model=model)
    return seen


@pytest.fixture(scope="module")
def noted(gpt2, ids, tmp_path_factory):
    """The run that nobody stopped, and what it recorded."""
    config = config_of(tmp_path_factory.mktemp("whole"))
    return config.folder, watched(config, gpt2, ids)


@pytest.fixture(scope="module")
def whole(noted) -> Path:
    return noted[0]


def by_hand(model, layers, ids, block):
    """The input and output of a block's MLP while the MLPs of other blocks give what layers give: with hooks alone."""
    seen = {}
    handles = [
        model.mlp(number).register_forward_hook(lambda module, args, out, layer=layer: layer(args[0]))
        for number, layer in layers.items()
    ]
    watch = model.mlp(block).register_forward_hook(lambda module, args, out: seen.update(x=args[0], y=out))
    with torch.no_grad():
        model.module(input_ids=ids)
    for handle in (*handles, watch):
        handle.remove()
    return seen["x"], seen["y"]


@pytest.mark.parametrize("base_targets", [False, True])
def test_through_copies_of_the_base_mlps_nothing_changes(family, ids, base_targets):
    copies = {number: copy.deepcopy(family.mlp(number)) for number in (0, 1)}
    through = recorder(Splice(family, copies), base_targets)(ids, [2])[2]
    for now, before in zip(through, family.record(ids, [2])[2], strict=True):
        assert torch.equal(now, before)


def check_recorded(model, ids, folder: Path, seen: dict, targets: str) -> None:
    """Inputs, targets and what is stored for BOS, against hooks; the layers below are those that the run keeps."""
    layers = {block: load_layer(folder / f"block{block}-tc-k4").layer for block in range(3)}
    assert list(seen) == [0, 1, 2]
    bos = torch.tensor([[model.tokenizer.bos_token_id]])
    for block, (found, at_bos) in seen.items():
        below = {number: layers[number] for number in range(block)}
        x, y = by_hand(model, below, ids, block)
        own_x, own_y = by_hand(model, {}, ids, block)
        assert block == 0 or not torch.allclose(x, own_x, rtol=0.01)
        assert torch.equal(found[0], x) and torch.equal(found[1], own_y if targets == "base" else y)
        bos_x, bos_y = by_hand(model, below, bos, block)
        if targets == "base":
            bos_y = by_hand(model, {}, bos, block)[1]
        for stored, recorded, expected in [
            (layers[block].bos_in, at_bos[0], bos_x[0, 0]),
            (layers[block].bos_out, at_bos[1], bos_y[0, 0]),
        ]:
            assert torch.equal(stored, expected) and torch.equal(recorded, expected)


@pytest.mark.long
def test_a_block_learns_from_the_model_with_the_layers_below(gpt2, ids, noted):
    check_recorded(gpt2, ids, *noted, "same")


@pytest.mark.long
def test_targets_may_be_those_of_the_base_model(gpt2, ids, tmp_path, whole):
    config = config_of(tmp_path, training={"targets": "base"})
    check_recorded(gpt2, ids, config.folder, watched(config, gpt2, ids), "base")
    same, base = layers_of(whole), layers_of(config.folder)
    assert [torch.equal(same[name]["decoder"], base[name]["decoder"]) for name in same] == [True, False, False]


def test_second_moments_are_those_of_the_spliced_inputs(gpt2, whole, tmp_path):
    config = config_of(tmp_path, blocks=[1])
    record = recorder(Splice(gpt2, {0: load_layer(whole / "block0-tc-k4")}))
    found = covariances(config, gpt2, ALONE, ALONE, [RankPart((1,))], record)[1]
    batches = [batch.sites[1] for batch in islice(activation_stream(config, gpt2, record=record), 2)]
    x, y = (torch.cat(parts).double() for parts in zip(*batches, strict=True))
    torch.testing.assert_close(found.read, torch.cov(x.T, correction=0))
    torch.testing.assert_close(found.out, torch.cov(y.T, correction=0))


def test_the_lowest_block_is_trained_as_ever_and_the_others_are_not(whole, gpt2, tmp_path):
    side_by_side = layers_of(train(config_of(tmp_path, blocks=[0, 1, 2], training={"inputs": "base"}), model=gpt2))
    below = layers_of(whole)
    for name, tensors in side_by_side.items():
        same = {key: torch.equal(tensor, below[name][key]) for key, tensor in tensors.items()}
        assert all(same.values()) if name.startswith("block0") else not same["decoder"] and not same["encoder"]


@pytest.mark.long
def test_blocks_are_trained_from_the_lowest_in_whatever_order_they_are_named(whole, gpt2, tmp_path):
    assert_same_layers(whole, train(config_of(tmp_path, blocks=[2, 0, 1]), model=gpt2))


def test_metrics_are_those_of_all_blocks(whole):
    lines = metrics(whole)
    assert [line["replacement"] for line in lines] == [f"block{n}-tc-k4" for n in range(3) for _ in range(STEPS // 2)]
    assert [line["step"] for line in lines] == [*range(2, STEPS + 1, 2)] * 3


def test_a_layer_says_what_it_read_through(whole):
    digests = {n: read_config(whole / f"block{n}-tc-k4")["tensors_sha256"] for n in range(3)}
    for block in range(3):
        provenance = load_layer(whole / f"block{block}-tc-k4").provenance
        assert provenance.below == {n: digests[n] for n in range(block)}
        assert provenance.training["inputs"] == "spliced" and provenance.training["targets"] == "same"
    cards = [(whole / f"block{block}-tc-k4" / "README.md").read_text() for block in range(3)]
    assert "spliced into blocks 0, 1; it is meant" in cards[2] and "spliced into blocks" not in cards[0]
    assert not list(whole.glob("state/*")), "a finished layer needs no state"


# Stopped and resumed


def stop_at(monkeypatch, block: int, step: int) -> None:
    """Save and stop after a step of a block, as Ctrl-C does."""
    monkeypatch.setattr(Loop, "stopping", lambda run, stop: run.step == step and run.config.blocks == (block,))
    monkeypatch.setattr(Loop, "stopped", lambda run, stop: Interrupted("stopped", "mxd"))


def kill_at(monkeypatch, block: int, step: int) -> None:
    """End at a step of a block with nothing saved, as SIGKILL does."""
    real = Loop.train_batch

    def train_batch(run, batch):
        if run.step == step and run.config.blocks == (block,):
            raise KeyboardInterrupt
        real(run, batch)

    monkeypatch.setattr(Loop, "train_batch", train_batch)


@contextmanager
def ended(monkeypatch, how, block, step):
    with monkeypatch.context() as patch:
        how(patch, block, step)
        with pytest.raises((Interrupted, KeyboardInterrupt)):
            yield


@pytest.mark.parametrize(
    ("how", "block", "step", "kept"),
    [
        (stop_at, 1, 5, {"block1": ["step-000000003", "step-000000005"]}),
        pytest.param(kill_at, 2, 2, {}, marks=pytest.mark.long),  # lines of metrics are there, and no state yet
        pytest.param(kill_at, 1, 0, {}, marks=pytest.mark.long),  # between two blocks
    ],
    ids=["within a block", "before its first state", "between blocks"],
)
def test_a_resumed_run_ends_as_if_it_had_not_been_stopped(whole, gpt2, tmp_path, monkeypatch, how, block, step, kept):
    config = config_of(tmp_path)
    with ended(monkeypatch, how, block, step):
        train(config, model=gpt2)
    done = sorted(path.name for path in config.folder.glob("block*"))
    assert done == [f"block{n}-tc-k4" for n in range(block)]
    states = {path.name: sorted(p.name for p in path.iterdir()) for path in config.folder.glob("state/*")}
    assert states == kept
    before = {path: path.stat().st_mtime_ns for name in done for path in (config.folder / name).iterdir()}
    train(config, resume=True, model=gpt2)
    assert_same_layers(whole, config.folder)
    assert metrics(whole) == metrics(config.folder)
    assert before == {path: path.stat().st_mtime_ns for path in before}, "a finished layer was written again"


def test_a_finished_run_is_left_as_it_is(whole, gpt2):
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    config = config_of(whole.parents[1])
    train(config, resume=True, model=gpt2)
    assert before == {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}


@pytest.mark.long
def test_a_block_that_was_taken_away_is_trained_again(whole, gpt2, tmp_path):
    config = config_of(whole.parents[1]).model_copy(update={"out": str(tmp_path)})
    shutil.copytree(whole, config.folder)
    shutil.rmtree(config.folder / "block1-tc-k4")
    train(config, resume=True, model=gpt2)
    assert_same_layers(whole, config.folder)
    by_block = [sorted(metrics(folder), key=lambda line: line["replacement"]) for folder in (whole, config.folder)]
    assert by_block[0] == by_block[1]


@pytest.mark.long
def test_a_request_in_the_last_step_of_a_block_stops_the_run(whole, gpt2, tmp_path, monkeypatch, signals):
    config = config_of(tmp_path)
    real = Loop.train_batch

    def train_batch(run, batch):
        real(run, batch)
        if run.step == STEPS:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "train_batch", train_batch)
        with pytest.raises(Interrupted, match=r"stopped at step 6 of 6; everything is saved\. To continue: mxd train"):
            train(config, model=gpt2)
    assert [path.name for path in config.folder.glob("block*")] == ["block0-tc-k4"]
    train(config, resume=True, model=gpt2)
    assert_same_layers(whole, config.folder)


@pytest.fixture
def stopped(gpt2, tmp_path, monkeypatch):
    """A run whose first block is finished, and whose second has a state."""
    config = config_of(tmp_path)
    with ended(monkeypatch, stop_at, 1, 5):
        train(config, model=gpt2)
    return config


def another_layer(config, name: str) -> None:
    """Put other numbers into a layer, sealed and with the provenance that it had."""
    layer = load_layer(config.folder / name)
    layer.layer.bias.data.add_(1)
    save_layer(config.folder / name, layer.layer, layer.provenance)


@pytest.mark.long
def test_a_changed_layer_below_is_refused(stopped, gpt2):
    another_layer(stopped, "block0-tc-k4")
    with pytest.raises(
        MxdError, match=r"cannot continue as it began: layers below \(SHA-256 of their tensors\)\.0 was"
    ):
        train(stopped, resume=True, model=gpt2)


def test_a_changed_layer_below_a_finished_one_is_refused(whole, gpt2, tmp_path):
    config = config_of(whole.parents[1]).model_copy(update={"out": str(tmp_path)})
    shutil.copytree(whole, config.folder)
    another_layer(config, "block0-tc-k4")
    with pytest.raises(
        MxdError, match=r"block1-tc-k4 does not belong to this run.*layers below\.0 was '\w+', is '\w+'"
    ):
        train(config, resume=True, model=gpt2)


def test_what_is_there_is_the_runs_own_whole_layer_or_refused(whole, gpt2, tmp_path):
    config, base_hash = config_of(whole.parents[1]), gpt2.base_fingerprint()
    folder = tmp_path / "block0-tc-k4"
    assert finished_layer(folder, config, base_hash, {}) is None
    first = load_layer(whole / folder.name)
    save_layer(folder, first.layer, first.provenance.model_copy(update={"tokens": 64}))  # the text ended there
    assert finished_layer(folder, config, base_hash, {}) is None
    save_layer(folder, first.layer, first.provenance)
    settled = config.model_copy(update={"training": config.training.model_copy(update={"accumulation": 1})})
    found = finished_layer(folder, settled, base_hash, {})
    assert torch.equal(found.layer.bias, first.layer.bias)
    for changed, said in [
        ((settled.model_copy(update={"seed": 1}), base_hash, {}), "config was"),
        ((settled, "another", {}), "base model was"),
        ((settled, base_hash, {0: "0" * 64}), r"layers below\.0 was None"),
    ]:
        with pytest.raises(MxdError, match=said):
            finished_layer(folder, *changed)


# Refused


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"replacements": [ONE, ONE | {"num_units": 32}]}, "this config has 2 for each. Make a run of each"),
        ({"replacements": [ONE | {"sparsity": {"kind": "topk", "k": [4, 8]}}]}, "this config has 2 for each"),
        ({"data": {"cache": "c"}}, "data.cache holds activations of the base model"),
        ({"training": {"inputs": "base", "targets": "base"}}, "targets: base is for inputs: spliced"),
        ({"training": {"inputs": "tuned"}}, "training.inputs: expected base or spliced, got 'tuned'"),
        (
            {"replacements": [{"method": "topk_sae", "sparsity": {"kind": "topk", "k": 4}}]}
            | {"training": {"targets": "base"}},
            "topk_sae reads what the MLP gives.*use training.targets: same",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(tmp_path, fields, said):
    with pytest.raises(MxdError, match=said):
        config_of(tmp_path, **fields)


def test_a_cache_of_spliced_inputs_is_refused(tmp_path, gpt2):
    with pytest.raises(MxdError, match=r"write it with --training\.inputs base"):
        cache_activations(config_of(tmp_path), tmp_path / "cache", gpt2)
    assert not (tmp_path / "cache").exists()
