"""Training: it learns, resumes bit for bit, refuses what would lose work, and leaves the base model alone."""

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Literal

import pytest
import torch
from runs import assert_same_run, metrics, small, tensors
from safetensors.torch import load_file
from torch import Tensor

from mxd.artifacts.checkpoint import load_layer
from mxd.artifacts.folders import read_config
from mxd.common.errors import MxdError
from mxd.common.stop import Interrupted
from mxd.config import TrainingConfig, dump_config, load_config
from mxd.layers.gates import Code
from mxd.layers.mxd import MxDConfig
from mxd.layers.sparsity import RandomKConfig, TopKConfig
from mxd.layers.transcoder import TranscoderConfig
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen
from mxd.ops import candidate_dtype, dense_dtype
from mxd.planning.layout import plan_layers
from mxd.training.step import learning_rate, new_trainee, train_step
from mxd.training.trainer import train

EVERYTHING = [
    {"method": "mxd", "sparsity": [{"kind": "topk", "k": 8}, {"kind": "random_k", "k": 8}]},
    {"method": "transcoder", "skip": True, "sparsity": {"kind": "relu_l1"}},
    {"method": "cp_mumoe", "rank_share": 0.25, "sparsity": {"kind": "topk", "k": 4}},
    {"method": "topk_sae", "sparsity": {"kind": "topk", "k": 4}},
]


@pytest.mark.long
def test_one_run_trains_every_method_at_several_layers(tmp_path: Path) -> None:
    config = small(tmp_path, blocks=[1, 3], replacements=EVERYTHING, training={"tokens": 512 * 32, "log_every": 8})
    folder = train(config)
    layers = [p for p in folder.iterdir() if (p / "config.json").exists()]
    assert len(layers) == 10
    lines = metrics(folder)
    assert {line["step"] for line in lines} == {8, 16, 24, 32}
    for path in layers:
        trained = load_layer(path)
        own = [line for line in lines if line["replacement"] == path.name]
        assert own[-1]["normalized_mse"] < own[0]["normalized_mse"], path.name
        assert trained.provenance.tokens == 512 * 32
        assert trained.provenance.block == int(path.name.removeprefix("block")[0])
        assert trained.provenance.excluded_ids == ()
        assert trained.layer.bos_in is not None and trained.layer.bos_in.any()
    assert {p.name.split("-")[1] for p in layers} == {"mxd", "stc", "cp", "sae"}


@pytest.mark.long
def test_training_together_equals_training_alone(tmp_path: Path) -> None:
    both = train(small(tmp_path, run="both", replacements=EVERYTHING[:2]))
    alone = train(small(tmp_path, run="alone", replacements=EVERYTHING[:1]))
    for name in ("block2-mxd-k8", "block2-mxd-randomk8"):
        a, b = (load_file(folder / name / "model.safetensors") for folder in (both, alone))
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_the_base_model_is_bit_identical_after_training(tmp_path: Path) -> None:
    model = load_frozen("tiny-gpt2")
    before = {k: v.clone() for k, v in model.module.state_dict().items()}
    train(small(tmp_path), model=model)
    after = model.module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(v, after[k]) for k, v in before.items())
    assert not model.module.training
    assert not any(p.requires_grad or p.grad is not None for p in model.module.parameters())


@pytest.mark.long
def test_same_seed_same_bits_other_seed_other_bits(tmp_path: Path) -> None:
    a, b = (train(small(tmp_path, run=name)) for name in "ab")
    assert_same_run(a, b)
    c = train(small(tmp_path, run="c", seed=1))
    weights = [load_file(f / "block2-mxd-k8" / "model.safetensors")["gate"] for f in (a, c)]
    assert not torch.equal(*weights)


@pytest.mark.long
def test_bos_is_stored_once_and_refused_where_it_is_not_finite(tmp_path: Path) -> None:
    model = load_frozen("tiny-gpt2")
    bos = torch.tensor([[model.tokenizer.bos_token_id]])
    x, y = (site[0, 0] for site in model.record(bos, [2])[2])
    layer = load_layer(train(small(tmp_path), model=model) / "block2-mxd-k8").layer
    assert torch.equal(layer.bos_in, x) and torch.equal(layer.bos_out, y) and torch.equal(layer(x), y)
    assert (
        load_layer(train(small(tmp_path, run="none", data={"bos_constant": False})) / "block2-mxd-k8").layer.bos_in
        is None
    )
    poison = model.mlp(2).register_forward_hook(lambda mlp, args, out: out * (float("nan") if out.shape[1] == 1 else 1))
    with pytest.raises(MxdError, match="block 2: an activation is not finite in 1 of 1 tokens, first at token id 0"):
        train(small(tmp_path, run="poisoned"), model=model)
    poison.remove()


def test_output_bias_starts_at_the_mean_output(tmp_path: Path) -> None:
    from mxd.data.activations import activation_batches
    from mxd.data.contexts import token_contexts
    from mxd.data.text import documents

    config = small(tmp_path, training={"lr": 1e-12, "tokens": 512, "warmup_steps": 0})
    layer = load_layer(train(config) / "block2-mxd-k8").layer
    model = load_frozen("tiny-gpt2")
    blocks = token_contexts(documents("bundled", "validation"), model.tokenizer, 128)
    bos = model.tokenizer.bos_token_id
    batch = next(activation_batches(model, [2], blocks, 2048, 2048, bos_id=bos))
    assert torch.allclose(layer.bias, batch.sites[2][1].mean(0), atol=1e-5)
    assert layer.bias.abs().max() > 0.01


@pytest.mark.long
def test_all_layers_are_initialised_before_the_first_step_and_the_first_batch_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained_gpt2
) -> None:
    module = importlib.import_module("mxd.training.loop")
    real, batches = module.Loop.train_batch, []

    def watch(loop, batch) -> None:
        if not batches:
            assert len(loop.trainees) == 5
            assert all(torch.equal(trainee.layer.bias, batch.means[trainee.number][1]) for trainee in loop.trainees)
            assert all(trainee.layer.bos_in.any() for trainee in loop.trainees)
        assert not any(earlier() for earlier in batches)
        batches.append(weakref.ref(batch))
        real(loop, batch)

    monkeypatch.setattr(module.Loop, "train_batch", watch)
    train(small(tmp_path, replacements=EVERYTHING), model=trained_gpt2)
    assert len(batches) == 12


RUNNER = """
import sys, mxd
from mxd.config import load_config
from mxd.training.trainer import train
train(load_config(sys.argv[1]), resume=sys.argv[2] == "resume")
"""


def start(config_path: Path, mode: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", RUNNER, str(config_path), mode], stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    fields = {"replacements": EVERYTHING, "training": {"tokens": 512 * 60, "save_every": 3}}
    whole = train(small(tmp_path, run="whole", **fields))
    config = small(tmp_path, run="cut", **fields)
    path = tmp_path / "cut.yaml"
    path.write_text(dump_config(config))
    process = start(path, "new")
    state = config.folder / "state"
    deadline = time.monotonic() + 60
    while not list(state.glob("step-*[1-9]")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    process.kill()  # SIGKILL
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run ended before it could be killed"
    assert not (config.folder / "block2-mxd-k8").exists()
    train(config, resume=True)
    assert_same_run(whole, config.folder)


@pytest.mark.usefixtures("signals")
def test_interrupt_saves_and_says_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    whole = train(small(tmp_path, run="whole"))
    config = small(tmp_path, run="cut")
    module = importlib.import_module("mxd.training.loop")

    real, calls = module.train_step, []

    def step_then_signal(*args, **kwargs) -> None:
        real(*args, **kwargs)
        calls.append(1)
        if len(calls) == 7:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(module, "train_step", step_then_signal)
    with pytest.raises(Interrupted, match=r"step 7 of 12.*--resume"):
        train(config)
    monkeypatch.setattr(module, "train_step", real)
    train(config, resume=True)
    assert_same_run(whole, config.folder)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.long
def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    config = small(tmp_path)
    folder = train(config)
    before = tensors(folder)
    train(config, resume=True)
    assert all(torch.equal(v, tensors(folder)[k]) for k, v in before.items())


def test_a_folder_that_holds_a_run_is_refused_and_untouched(tmp_path: Path) -> None:
    config = small(tmp_path)
    folder = train(config)
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    with pytest.raises(MxdError, match=r"already holds a run.*--resume"):
        train(config)
    with pytest.raises(MxdError, match="differs from this config"):
        train(small(tmp_path, seed=5), resume=True)
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("*")}


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(MxdError, match="nothing to resume"):
        train(small(tmp_path), resume=True)


def test_a_wrong_input_leaves_no_folder(tmp_path: Path) -> None:
    for fields, message in [
        ({"blocks": [99]}, "block 99 is out of range.*has 6 blocks, 0 ... 5"),
        ({"data": {"column": "nope"}}, "no column 'nope'"),
        ({"data": {"source": str(tmp_path / "no.txt")}}, "no text at"),
        ({"sizing": {"expansion": 1}}, "raise sizing.expansion"),
        ({"replacements": [{"method": "mxd", "sparsity": {"kind": "topk", "k": 100_000}}]}, "k = 100000 is more"),
    ]:
        with pytest.raises(MxdError, match=message):
            train(small(tmp_path, **fields))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_too_little_memory_is_said_before_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("mxd.common.hardware")

    class Little:
        available = 2**20

    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: Little)
    with pytest.raises(MxdError, match=r"iB are free.*Lower training.buffer_tokens"):
        train(small(tmp_path))
    assert not (tmp_path / "r").exists()


def test_poisoned_activations_stop_the_run_and_lose_nothing(tmp_path: Path) -> None:
    model = load_frozen("tiny-gpt2")
    forwards = []

    def poison(module, args, output):
        forwards.append(1)
        return output * float("nan") if len(forwards) > 3 else output

    model.mlp(2).register_forward_hook(poison)
    config = small(tmp_path, training={"save_every": 1000, "tokens": 512 * 40})
    with pytest.raises(MxdError, match="block 2: an activation is not finite"):
        train(config, model=model)
    saved = sorted((config.folder / "state").glob("step-*"))
    assert saved and saved[-1].name > "step-000000000"


def test_text_that_ends_early_saves_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("mxd.training.source")

    texts = module.documents("bundled", "validation")[:6]
    monkeypatch.setattr(module, "documents", lambda *args: iter(texts))
    config = small(tmp_path, training={"tokens": 4_096_000})
    with pytest.raises(MxdError, match="the text ended after"):
        train(config)
    assert list((config.folder / "state").glob("step-*"))
    provenance = load_layer(config.folder / "block2-mxd-k8").provenance
    assert 0 < provenance.tokens < 4_096_000
    assert provenance.tokens == metrics(config.folder)[-1]["tokens"] + 512 * (provenance.tokens // 512 % 2)


@pytest.mark.long
def test_accumulation_gives_the_whole_batch_gradient(tmp_path: Path) -> None:
    one = train(small(tmp_path, run="one"))
    four = train(small(tmp_path, run="four", training={"accumulation": 4}))
    a, b = (load_file(f / "block2-mxd-k8" / "model.safetensors") for f in (one, four))
    for name in a:
        assert torch.allclose(a[name], b[name], atol=2e-3), name
    assert metrics(one)[0]["normalized_mse"] == pytest.approx(metrics(four)[0]["normalized_mse"], rel=1e-4)


def test_clipping_changes_and_bounds_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = []
    real = torch.nn.utils.clip_grad_norm_

    def watch(parameters, limit):
        parameters = list(parameters)
        real(parameters, limit)
        norms.append(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm())

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", watch)
    train(small(tmp_path, training={"clip_norm": 1e-3}))
    assert len(norms) == 12
    assert max(norms) <= 1.001e-3


def test_warm_up_is_linear_then_constant(tmp_path: Path) -> None:
    training = small(tmp_path, training={"tokens": 512 * 100, "lr": 1.0, "warmup_steps": 9}).training
    rates = [learning_rate(step, training) for step in range(12)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10:] == [1.0, 1.0]


def test_decay_is_linear_from_warm_up_to_zero_after_the_last_step(tmp_path: Path) -> None:
    training = small(tmp_path, training={"tokens": 512 * 14, "lr": 1.0, "warmup_steps": 4, "decay": True}).training
    rates = [learning_rate(step, training) for step in range(14)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, *(1 - i / 10 for i in range(10))])


def test_names_tell_settings_apart(tmp_path: Path) -> None:
    twice = [{"method": "mxd", "activation": ["relu", "gelu"], "sparsity": {"kind": "topk", "k": 8}}]
    plans = plan_layers(small(tmp_path, replacements=twice), load_frozen("tiny-gpt2"))
    assert list(plans) == ["block2-mxd-k8", "block2-mxd-k8-v2"]
    same = [{"method": "mxd", "sparsity": {"kind": "topk", "k": [8, 8]}}]
    with pytest.raises(MxdError, match="twice"):
        plan_layers(small(tmp_path, replacements=same), load_frozen("tiny-gpt2"))


def test_widths_that_are_not_the_mlps_are_refused(tmp_path: Path) -> None:
    base = load_frozen("tiny-gpt2")
    right = [{"method": "mxd", "d_in": 128, "d_out": 128, "sparsity": {"kind": "topk", "k": 8}}]
    assert plan_layers(small(tmp_path, replacements=right), base)
    for name in ("d_in", "d_out"):
        with pytest.raises(MxdError, match=rf"MxD: {name} = 7, and that of block \d's MLP is 128; leave {name} out"):
            plan_layers(small(tmp_path, replacements=[{**right[0], name: 7}]), base)


def test_reported_metrics_agree_with_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    module = importlib.import_module("mxd.training.metrics")

    seen, real = [], module.Stats.see

    def spy(self, y, error, loss, code, *rest):
        seen.append((y.numpy().copy(), error.detach().numpy().copy(), code.activations.detach().numpy().copy()))
        real(self, y, error, loss, code, *rest)

    monkeypatch.setattr(module.Stats, "see", spy)
    folder = train(small(tmp_path))
    y, error, values = (np.concatenate([s[i] for s in seen[:2]]).astype(np.float64) for i in range(3))
    line = metrics(folder)[0]
    nmse = (error / y.shape[1] / np.linalg.norm(y, axis=1)).mean()
    assert line["normalized_mse"] == pytest.approx(nmse, rel=1e-4)
    assert line["fvu"] == pytest.approx(error.sum() / ((y - y.mean(0)) ** 2).sum(), rel=1e-3)
    assert line["l0"] == pytest.approx((values > 0).sum(1).mean(), rel=1e-5)


@pytest.mark.long
def test_dead_units_are_those_not_active_lately(tmp_path: Path) -> None:
    config = small(tmp_path, training={"tokens": 512 * 40, "dead_after": 512 * 2})
    folder = train(config)
    last = load_file(sorted((folder / "state").glob("*"))[-1] / "block2-mxd-k8.safetensors")["last_active"]
    expected = (512 * 40 - last >= 512 * 2).float().mean()
    assert metrics(folder)[-1]["dead_share"] == pytest.approx(float(expected))
    assert 0 < expected < 1


@pytest.mark.long
def test_an_unknown_tracker_is_refused_and_a_known_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MxdError, match="tracker"):
        train(small(tmp_path, run="bad", training={"trackers": ["nope"]}))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    folder = train(small(tmp_path, run="good", training={"trackers": ["wandb"]}))
    assert (folder / "block2-mxd-k8").is_dir()


@pytest.mark.long
def test_local_text_and_no_mask(tmp_path: Path) -> None:
    text = tmp_path / "t.jsonl"
    from mxd.data.text import documents

    lines = documents("bundled", "validation")[:30]
    text.write_text("\n".join(json.dumps({"body": line}) for line in lines))
    data = {"source": str(text), "column": "body", "split": "train", "exclude_special": False, "context": 64}
    folder = train(small(tmp_path, data=data))
    assert load_layer(folder / "block2-mxd-k8").provenance.excluded_ids == ()


def test_divergence_is_said_and_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("mxd.training.loop")

    real = module.train_step

    def explode(trainee, *args, **kwargs) -> None:
        real(trainee, *args, **kwargs)
        if trainee.stats.tokens > 1024:
            trainee.layer.bias.data.fill_(float("nan"))

    monkeypatch.setattr(module, "train_step", explode)
    config = small(tmp_path, training={"save_every": 2, "log_every": 4})
    with pytest.raises(MxdError, match=r"diverged before step .*lower training\.lr"):
        train(config)
    (saved,) = (config.folder / "state").glob("step-*")
    kept = load_file(saved / "block2-mxd-k8.safetensors")
    assert all(tensor.isfinite().all() for tensor in kept.values() if tensor.is_floating_point())


@pytest.mark.long
def test_killed_before_the_first_state_starts_anew_and_equals_uninterrupted(tmp_path: Path) -> None:
    whole = train(small(tmp_path, run="whole"))
    config = small(tmp_path, run="cut")
    config.folder.mkdir()
    (config.folder / "config.yaml").write_text(dump_config(config))
    (config.folder / "metrics.jsonl").write_text((whole / "metrics.jsonl").read_text().splitlines()[0] + "\n")
    train(config, resume=True)
    assert_same_run(whole, config.folder)


@pytest.mark.long
def test_resuming_on_another_base_model_is_refused(tmp_path: Path) -> None:
    config = small(tmp_path)
    train(config)
    with pytest.raises(
        MxdError, match=r"cannot continue as it began: base model \(hash of .*\) was '\w{16}', is '\w{16}'\."
    ):
        train(config, resume=True, model=load_frozen("tiny-neox"))


@pytest.mark.long
def test_a_streamed_text_is_prepared_ahead_and_trains_the_same(tmp_path: Path, trained_gpt2) -> None:
    from mxd.data.text import documents

    text = tmp_path / "train.jsonl"
    text.write_text("\n".join(json.dumps({"text": line}) for line in documents("bundled", "validation")[:40]))
    threads = set()

    def watch(*args) -> None:
        threads.update(thread.name.rpartition("_")[0] for thread in threading.enumerate())

    hook = trained_gpt2.mlp(2).register_forward_hook(watch)
    runs = []
    for streaming in (False, True):
        assert "mxd-ahead" not in threads
        data = {"source": str(text), "split": "train", "streaming": streaming}
        runs.append(train(small(tmp_path, run=f"r{streaming}", data=data), model=trained_gpt2))
    hook.remove()
    assert_same_run(*runs)
    assert "mxd-ahead" in threads
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mxd-ahead")]


# Candidates in bfloat16

SPARSITIES = {"topk": TopKConfig(k=2), "random_k": RandomKConfig(k=2, spread=8)}


@pytest.mark.parametrize("kind", SPARSITIES)
def test_bfloat16_proposals_are_for_training_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TranscoderConfig(d_in=6, d_out=3, num_units=1500, sparsity=SPARSITIES[kind])
    ops, used = importlib.import_module("mxd.ops.sparse"), []
    real = ops._from_candidates
    monkeypatch.setattr(ops, "_from_candidates", lambda *inputs: (used.append(1), real(*inputs))[1])
    for candidates in ("float32", "bfloat16", "auto"):
        trainee = new_trainee("j", 0, config, 0, torch.device("cpu"), TrainingConfig(candidates=candidates))
        asked = candidate_dtype(torch.device("cpu")) if candidates == "auto" else candidates
        for training in (True, False, True):
            trainee.layer.train(training)(torch.randn(5, 6))
            assert bool(used) is (training and asked == "bfloat16")
            used.clear()


@pytest.mark.parametrize("asked", ["float32", "bfloat16", "auto"])
def test_dense_products_are_rounded_in_training_steps_and_the_choice_of_units_never(
    asked: Literal["float32", "bfloat16", "auto"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mxd.ops.dense.WORTH", 1)
    torch.manual_seed(0)
    x, y = torch.randn(64, 6), torch.randn(64, 5)
    mxd = MxDConfig(d_in=6, d_out=5, hidden=7, activation="relu", glu=True, num_units=9, sparsity=SPARSITIES["topk"])
    stc = TranscoderConfig(d_in=6, d_out=5, num_units=9, skip=True, sparsity=SPARSITIES["topk"])
    dtype = dense_dtype(torch.device("cpu"), asked)
    for config, dense in ((mxd, {"encoder.weight", "encoder.glu_weight", "decoder"}), (stc, {"skip"})):
        training = TrainingConfig(dense=asked, warmup_steps=0)
        trainee = new_trainee("j", 0, config, 0, torch.device("cpu"), training)
        for parameter in trainee.layer.parameters():  # decoders begin with zeros
            torch.nn.init.normal_(parameter)
        chosen = trainee.layer.encode(x)
        seen: dict[str, Tensor] = {}
        for name, parameter in trainee.layer.named_parameters():
            parameter.register_hook(functools.partial(seen.setdefault, name))
        codes: list[Code] = []
        trainee.layer.sparsity.register_forward_hook(lambda *call, codes=codes: codes.append(call[-1]))
        train_step(trainee, x, y, training, 0)
        assert {name for name, grad in seen.items() if torch.equal(grad, grad.bfloat16().float())} == (
            dense if dtype == "bfloat16" else set()
        )
        assert torch.equal(codes[0].indices, chosen.indices) and torch.equal(codes[0].activations, chosen.activations)
        states = trainee.layer.eval().hidden(x)
        assert not states.numel() or not torch.equal(states, states.bfloat16().float())


@pytest.mark.long
def test_bfloat16_proposals_train_as_well_and_leave_the_same_kind_of_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained_gpt2
) -> None:
    gates = importlib.import_module("mxd.layers.gates")
    real, used = gates.topk_linear, []

    def spy(x, weight, bias, k, candidates, selection):
        if not x.is_meta:  # where the run is planned
            used.append(candidates)
        return real(x, weight, bias, k, candidates, selection)

    monkeypatch.setattr(gates, "topk_linear", spy)
    folders = {}
    for candidates in ("float32", "bfloat16"):
        training = {"tokens": 512 * 24, "candidates": candidates}
        config = small(tmp_path, run=candidates, replacements=EVERYTHING[:1], training=training)
        folders[candidates] = train(config, model=trained_gpt2)
        assert used == [candidates] * 48  # two replacements, 24 steps
        used.clear()
    exact, rounded = (metrics(folder) for folder in folders.values())
    assert rounded[-1]["normalized_mse"] < 0.85 * rounded[0]["normalized_mse"]
    for a, b in zip(exact, rounded, strict=True):
        assert b["normalized_mse"] == pytest.approx(a["normalized_mse"], rel=0.02)
        assert b["l0"] == pytest.approx(a["l0"], rel=0.02)
    for name in ("block2-mxd-k8", "block2-mxd-randomk8"):
        a, b = (read_config(folder / name) for folder in folders.values())
        assert a["layer"] == b["layer"]
        assert (a["provenance"]["training"]["candidates"], b["provenance"]["training"]["candidates"]) == tuple(folders)
        a, b = (load_file(folder / name / "model.safetensors") for folder in folders.values())
        assert {k: v.shape for k, v in a.items()} == {k: v.shape for k, v in b.items()}
        load_layer(folders["bfloat16"] / name).layer.train()(torch.randn(3, 128))
        assert used.pop() == "float32"


@pytest.mark.long
def test_a_run_with_bfloat16_proposals_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained_gpt2
) -> None:
    fields = {"training": {"candidates": "bfloat16", "save_every": 5}}
    whole = train(small(tmp_path, run="whole", **fields), model=trained_gpt2)
    config = small(tmp_path, run="cut", **fields)
    module = importlib.import_module("mxd.training.loop")
    real, calls = module.train_step, []

    def stop(*args) -> None:
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "train_step", stop)
        with pytest.raises(KeyboardInterrupt):
            train(config, model=trained_gpt2)
    train(config, resume=True, model=trained_gpt2)
    assert_same_run(whole, config.folder)


@pytest.fixture
def caller_set_ieee():
    """The caller's own setting of float32 products on CUDA."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "ieee"
    yield settings
    settings.fp32_precision = before


@pytest.mark.parametrize("error", [None, MxdError, KeyboardInterrupt])
@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_for_the_run_alone_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained_gpt2, caller_set_ieee, tf32: bool, error: type | None
) -> None:
    settings = caller_set_ieee
    module = importlib.import_module("mxd.training.loop")
    real, seen = module.train_step, []

    def spy(*args) -> None:
        seen.append(settings.fp32_precision)
        if error is not None:
            raise error
        real(*args)

    monkeypatch.setattr(module, "train_step", spy)
    config = small(tmp_path, training={"tokens": 1024, "tf32": tf32})
    if error is None:
        train(config, model=trained_gpt2)
    else:
        with pytest.raises(error):
            train(config, model=trained_gpt2)
    assert set(seen) == {"tf32" if tf32 else "ieee"}
    assert settings.fp32_precision == "ieee"


@pytest.mark.long
def test_all_blocks_are_numbers_wherever_a_run_is_written_down(tmp_path: Path, gpt2: FrozenModel) -> None:
    """And its config goes on saying ``all``; a model of another depth would have other layers."""
    one = [{"method": "transcoder", "num_units": 64, "sparsity": {"kind": "topk", "k": 4}}]
    fields = {"replacements": one, "data": {"context": 64}, "training": {"batch_tokens": 64, "tokens": 384}}
    config = small(tmp_path, run="all", blocks="all", **fields)
    named = small(tmp_path, run="named", blocks=[0, 1, 2], **fields)
    train(config, model=gpt2)
    train(named, model=gpt2)
    assert load_config(config.folder / "config.yaml").blocks == "all"
    names = [f"block{number}-tc-k4" for number in range(gpt2.num_blocks)]
    assert sorted(path.name for path in config.folder.glob("block*")) == names
    state = json.loads(next(config.folder.glob("state/*/state.json")).read_text())
    assert list(state["counted"]) == names and state["origin"]["blocks"] == [0, 1, 2]
    assert_same_run(config.folder, named.folder)
    train(config, resume=True, model=gpt2)
