"""Tuning: its loss against an oracle, what it leaves alone, and that an interrupted one ends like one that was not."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command import mxd
from safetensors.torch import load_file
from streams import served, write_files

from mxd.artifacts.checkpoint import load_layers, save_layer
from mxd.artifacts.folders import read_config
from mxd.artifacts.provenance import Provenance
from mxd.artifacts.sets import named_layers, sets_of
from mxd.common.errors import MxdError
from mxd.common.processes import ALONE, Processes
from mxd.common.stop import Interrupted, Stop
from mxd.config import dump_config, parse_config
from mxd.data.activations import Batch, Cursor
from mxd.data.streams import Place, TextStream
from mxd.evaluation.checkpoints import open_checkpoints
from mxd.evaluation.faithfulness import evaluate
from mxd.evaluation.tuned import before_and_after
from mxd.evaluation.whole import evaluate_whole
from mxd.joint import Shares, TunedMLP
from mxd.layers.losses import normalized_mse
from mxd.metrics.whole import BEFORE_AND_AFTER
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen
from mxd.model.unembedding import Unembedding
from mxd.ops.tiled import tiled_sum
from mxd.planning.layout import ParallelLayout, plan_layers
from mxd.questions import WholeConfig
from mxd.report.page import write_report
from mxd.splice import SiblingWarning, Splice, spliced
from mxd.training.phases import at_once
from mxd.training.step import Trainee, learned
from mxd.training.tune import tensors_hash, tune, tune_config, tuned_trainee
from mxd.training.tuning import TunedSet, TunedStats, TuneLoop
from mxd.tuning import TuneConfig

HOW = {"tokens": 2048, "batch_tokens": 512, "log_every": 2, "save_every": 2}


@pytest.fixture(scope="module")
def base() -> FrozenModel:
    return load_frozen("tiny-gpt2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, base: FrozenModel) -> Path:
    """A run of two kinds of layers at two blocks of tiny-gpt2, as if they had been trained."""
    config = parse_config(
        {
            "run": "two",
            "out": str(tmp_path_factory.mktemp("runs")),
            "blocks": [0, 2],
            "model": {"source": "tiny-gpt2"},
            "sizing": {"expansion": 6},
            "data": {"context": 64},
            "replacements": [
                {"method": "mxd", "sparsity": {"kind": "topk", "k": 8}},
                {"method": "transcoder", "sparsity": {"kind": "relu_l1", "l1": 0.01}},
            ],
        }
    )
    generator = torch.Generator().manual_seed(0)
    for name, (block, complete) in plan_layers(config, base).items():
        layer = complete.build(block)
        with torch.no_grad():
            for parameter in learned(layer).values():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
            layer.store_bos(torch.ones(128), torch.ones(128))
        about = {"model": base.source, "revision": None, "block": block, "fingerprint": base.fingerprint(block)}
        data = config.data.model_dump()
        save_layer(config.folder / name, layer, Provenance(**about, data=data, tokens=4096))
    (config.folder / "config.yaml").write_text(dump_config(config))
    return config.folder


def weights(folder: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in sorted(folder.glob("block*/model.safetensors"))}


def of_kind(folder: Path, kind: str) -> list[str]:
    return [str(path) for path in sorted(folder.glob(f"block*-{kind}-*"))]


def test_a_sum_in_parts_is_the_whole_one() -> None:
    rows = torch.randn(11, 4, requires_grad=True)
    weight = torch.randn(4, 7)

    def loss(own: torch.Tensor, part: slice) -> torch.Tensor:
        return ((own @ weight).logsumexp(-1) * torch.arange(11.0)[part]).sum()

    (expected,) = torch.autograd.grad(3 * loss(rows, slice(None)), rows)
    for size in (1, 4, 11, 100):
        total = 3 * tiled_sum(rows, loss, size)
        torch.testing.assert_close(total, 3 * loss(rows, slice(None)))
        torch.testing.assert_close(torch.autograd.grad(total, rows)[0], expected)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-neox", "tiny-llama"])
def test_hidden_states_become_the_logits(name: str) -> None:
    model, ids = load_frozen(name), torch.arange(24).view(2, 12)
    found = Unembedding.of(model, ids)
    assert found.head is not None
    with torch.no_grad():
        hidden = found.hidden(ids)
        assert hidden.shape[-1] < model.vocabulary
        torch.testing.assert_close(found.logits(hidden), model.logits(ids))


def test_a_model_that_changes_its_logits_gives_them_whole() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    config = Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, final_logit_softcapping=0.05)
    module = Gemma2ForCausalLM(config).eval().requires_grad_(False)
    model = FrozenModel(module, None, "gemma", None, module.model.layers)
    ids = torch.arange(12).view(1, 12)
    found = Unembedding.of(model, ids)
    assert found.head is None
    with torch.no_grad():
        torch.testing.assert_close(found.logits(found.hidden(ids)), model.logits(ids))


def a_loop(base: FrozenModel, folder: Path, kind: str = "mxd", **how: object) -> tuple[TuneLoop, TunedSet]:
    """A loop over one set, which can take forward and backward passes but has no run."""
    config, layers = tune_config(of_kind(folder, kind), TuneConfig(**HOW | how), run="none")
    trainees = [tuned_trainee(name, item, base, config.tune, ALONE) for name, item in layers.items()]
    tuned = TunedSet.of(kind, trainees, base)
    loop = object.__new__(TuneLoop)
    loop.phase = at_once(config, base, {}, ParallelLayout((), 1, ()), False)
    loop.base, loop.trainees, loop.processes, loop.step = base, trainees, ALONE, 0
    loop.how, loop.sets, loop.excluded = config.tune, [tuned], [0]
    loop.unembedding = Unembedding.of(base, torch.arange(8).view(1, 8))
    return loop, tuned


def gradients(loop: TuneLoop, tuned: TunedSet, ids: torch.Tensor, compared: bool = True) -> list[torch.Tensor]:
    tuned.zero_grad()
    counted = ~torch.isin(ids, torch.tensor(loop.excluded))
    shares = Shares(int(counted[:, 1:].sum()), int(counted.sum()), 1)
    for part in ids.chunk(loop.how.accumulation):
        loop._part(part, shares, compared)
    return [p.grad for p in tuned.parameters()]


@pytest.mark.parametrize(("loss", "nmse", "kind"), [("kl", 0.0, "mxd"), ("kl", 2.0, "tc"), ("ce", 0.5, "mxd")])
def test_the_gradient_is_that_of_the_loss_written_out(
    base: FrozenModel, trained: Path, loss: str, nmse: float, kind: str
) -> None:
    """Whole logits of both models, all positions and tokens at once, MLPs replaced by plain hooks."""
    loop, tuned = a_loop(base, trained, kind, loss=loss, nmse=nmse)
    ids = torch.randint(0, base.vocabulary, (3, 20), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = 0
    ids[1, 7] = 0  # neither a target nor compared with the base MLP
    found = gradients(loop, tuned, ids)
    layers = {trainee.number: trainee.layer for trainee in tuned.trainees}
    errors, penalties = [], []

    def replace(layer, module, args, y):
        code = layer.encode(args[0])
        out = layer.decode(args[0], code)
        errors.append(normalized_mse(out[ids != 0], y[ids != 0]))
        penalties.append(layer.penalty(code))
        return out

    expected_logits = base.logits(ids)
    handles = [base.mlp(n).register_forward_hook(partial(replace, layer)) for n, layer in layers.items()]
    logits = base.module(input_ids=ids).logits
    for handle in handles:
        handle.remove()
    counted = (ids != 0)[:, 1:]
    logp, logq = logits[:, :-1].log_softmax(-1), expected_logits[:, :-1].log_softmax(-1)
    divergences, entropies = (logq.exp() * (logq - logp)).sum(-1), -logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    total = (
        (divergences if loss == "kl" else entropies)[counted].mean()
        + nmse * sum(errors)
        + sum(penalties) * (ids != 0).sum() / (ids != 0).sum()
    )
    expected = torch.autograd.grad(total, tuned.parameters())
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-3, atol=1e-6 + 1e-4 * float(right.abs().max()))
    assert any(bool(grad.abs().max() > 0) for grad in expected)
    assert (kind == "mxd") == (float(sum(penalties).detach()) == 0)


def test_parts_and_checkpointing_change_nothing_but_memory(base: FrozenModel, trained: Path) -> None:
    ids = torch.randint(1, base.vocabulary, (4, 16), generator=torch.Generator().manual_seed(0))
    expected, sums = None, None
    for how in ({}, {"accumulation": 2}, {"checkpointing": True}):
        loop, tuned = a_loop(base, trained, "mxd", nmse=1.0, **how)
        found = gradients(loop, tuned, ids)
        stats = tuned.trainees[0].stats
        seen = {key: value.clone() for key, value in stats.sums.items()} | {"tokens": torch.tensor(stats.tokens)}
        expected, sums = expected or found, sums or seen
        for own, right in zip(found, expected, strict=True):
            torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-6)
        for key, right in sums.items():
            torch.testing.assert_close(seen[key], right, rtol=1e-4, atol=1e-5)
        assert all("forward" not in block.__dict__ for block in base.blocks)


class Exact(torch.nn.Module):
    """A stand-in for a layer that is its MLP, plus something times a parameter that is 0."""

    num_units = 1

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.config = type("Config", (), {"reads": "mlp_in", "d_out": 128})
        self.beside = (mlp,)
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def encode(self, x: torch.Tensor):
        return type("Code", (), {"active_units": lambda self, units: torch.ones(1, dtype=torch.bool)})()

    def decode(self, x: torch.Tensor, code: object) -> torch.Tensor:
        return self.beside[0](x) + self.weight * x.roll(1, -1)

    def penalty(self, code: object) -> torch.Tensor:
        return torch.zeros(())


def test_replacements_that_are_the_mlps_have_nothing_to_learn(base: FrozenModel, trained: Path) -> None:
    loop, _ = a_loop(base, trained)

    trainees = [object.__new__(Trainee) for _ in range(2)]
    for trainee, number in zip(trainees, (0, 3), strict=True):
        trainee.number, trainee.layer = number, Exact(base.mlp(number))
        trainee.stats = TunedStats(1, 128, torch.device("cpu"), "kl")
    modules = [
        TunedMLP(own.layer, base.mlp(trainee.number)) for own, trainee in zip(loop.trainees, trainees, strict=True)
    ]
    for module, trainee in zip(modules, trainees, strict=True):
        module.layer = trainee.layer
    tuned = TunedSet(
        "exact", trainees, Splice(base, {t.number: m for t, m in zip(trainees, modules, strict=True)}), modules
    )
    tuned.parameters = lambda: [t.layer.weight for t in trainees]  # type: ignore[method-assign]
    tuned.zero_grad = lambda: None  # type: ignore[method-assign]
    loop.sets = [tuned]
    found = gradients(loop, tuned, torch.arange(1, 33).view(2, 16), compared=False)
    assert abs(float(trainees[0].stats.sums["kl"])) < 1e-5
    assert max(float(grad.abs()) for grad in found) < 1e-5


def test_clipping_counts_parameters_as_their_optimiser_does(base: FrozenModel, trained: Path) -> None:
    loop, tuned = a_loop(base, trained)
    for trainee, scales in zip(tuned.trainees, ((2.0, 0.5), (0.1, 3.0)), strict=True):
        trainee.scale(scales)
    before = [grad.clone() for grad in gradients(loop, tuned, torch.arange(1, 33).view(2, 16))]
    factors = [t.optimizer.factors.get(name, 1.0) for t in tuned.trainees for name in learned(t.layer)]
    norm = sum(float((f * g).square().sum()) for f, g in zip(factors, before, strict=True)) ** 0.5
    tuned.clip(10 * norm)
    assert all(torch.equal(p.grad, g) for p, g in zip(tuned.parameters(), before, strict=True))
    tuned.clip(norm / 4)
    for parameter, grad in zip(tuned.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, grad / 4, rtol=1e-4, atol=1e-9)


def test_rates_are_those_of_activations_of_one_size(base: FrozenModel, trained: Path) -> None:
    loop, tuned = a_loop(base, trained)
    ids = torch.randint(1, base.vocabulary, (2, 64), generator=torch.Generator().manual_seed(1))
    batch = Batch({}, ids.flatten(), {}, Cursor())
    assert next(loop.initialised(iter([batch]), Stop())) is batch
    for trainee in tuned.trainees:
        sites: dict[str, torch.Tensor] = {}
        hook = base.mlp(trainee.number).register_forward_hook(lambda _, x, y, to=sites: to.update(x=x[0], y=y))
        base.module(ids)
        hook.remove()
        size = {site: float((t[:, 1:].square().mean(-1)).sqrt().mean()) for site, t in sites.items()}
        assert trainee.scales == pytest.approx((1 / size["x"], 1 / size["y"]), rel=1e-4)
        assert trainee.optimizer.factors["bias"] == pytest.approx(size["y"], rel=1e-4)


@pytest.mark.long
def test_tuning_lowers_the_divergence_and_leaves_the_rest_alone(trained: Path, base: FrozenModel) -> None:
    before, read = base.base_fingerprint(), weights(trained)
    parameters = [p.clone() for p in base.module.parameters()]
    folder = tune([trained], TuneConfig(**HOW | {"tokens": 6144}), model=base)
    assert folder == trained.parent / "two-tuned"
    assert base.base_fingerprint() == before and weights(trained) == read
    assert all(torch.equal(p, q) for p, q in zip(base.module.parameters(), parameters, strict=True))
    assert not any(p.requires_grad for p in base.module.parameters())
    sets = {}
    for which in (trained, folder):
        sets |= {f"{which.name} {name}": own for name, own in sets_of(load_layers(which)).items()}
    contexts = open_checkpoints([trained], model=base).contexts()
    found = evaluate(base, sets, contexts, 1024)
    for kind in sets_of(load_layers(trained)):
        assert found[f"two-tuned {kind}"]["kl"] < 0.9 * found[f"two {kind}"]["kl"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, last = (
        next(line for line in order if line["replacement"] == "block2-mxd-k8") for order in (lines, lines[::-1])
    )
    assert first["step"] == 2 and last["step"] == 12 and 0 < last["kl"] < first["kl"] and last["l0"] == 8


@pytest.mark.long
def test_what_a_tuned_layer_says_of_itself(trained: Path, base: FrozenModel, tmp_path: Path) -> None:
    folder = tune(of_kind(trained, "mxd"), TuneConfig(**HOW), "t", str(tmp_path), model=base)
    layers = load_layers(folder)
    members = {str(item.provenance.block): read_config(item.path)["tensors_sha256"] for item in layers.values()}
    for name, item in layers.items():
        (tuning,) = item.provenance.tuning
        assert tuning["members"] == members and tuning["loss"] == "kl" and tuning["tokens"] == 2048
        assert item.provenance.tokens == 4096  # of its own training
        assert tensors_hash(item.layer) == members[str(item.provenance.block)]
        assert not torch.equal(item.layer.bias, load_file(trained / name / "model.safetensors")["bias"])
    together = {item.provenance.block: item for item in layers.values()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", SiblingWarning)
        with spliced(base, together):
            pass
        for alone in ({2: together[2]}, together | {2: load_layers(trained)["block2-mxd-k8"]}):
            with pytest.raises(SiblingWarning, match="tuned together with others, of which those of blocks"):
                Splice(base, alone)
        Splice(base, {2: together[2]}, check=False)


@pytest.mark.long
def test_interrupted_and_resumed_equals_uninterrupted(
    trained: Path, base: FrozenModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = TuneConfig(**HOW | {"tokens": 3072})
    whole = tune([trained], how, "whole", str(tmp_path), model=base)
    step = TuneLoop.train_batch

    def stops(self: TuneLoop, batch: object) -> None:
        step(self, batch)
        if self.step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(TuneLoop, "train_batch", stops)
    with pytest.raises(KeyboardInterrupt):
        tune([trained], how, "part", str(tmp_path), model=base)
    monkeypatch.setattr(TuneLoop, "train_batch", step)
    part = tune([tmp_path / "part" / "config.yaml"], resume=True, model=base)
    assert weights(part) == weights(whole) and part != whole
    lines = [
        [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in file.read_text().splitlines()]
        for file in (part / "metrics.jsonl", whole / "metrics.jsonl")
    ]
    assert lines[0] == lines[1]


@pytest.mark.long
def test_a_stream_is_read_on_where_it_was(
    trained: Path, base: FrozenModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the above, resumed twice, and the first of these times the text had changed."""
    lines = [f"{i} is a number, and {i * i} its square." for i in range(200)]
    monkeypatch.setattr("mxd.data.streams.WINDOW", 8)
    monkeypatch.setattr("mxd.data.streams.BATCH", 3)
    monkeypatch.setattr("datasets.load_dataset", served(tmp_path / "hub", "parquet"))
    write_files(tmp_path / "hub", "parquet", lines)
    shutil.copytree(trained, tmp_path / "two")
    for file in (tmp_path / "two").glob("block*/config.json"):
        said = json.loads(file.read_text())
        said["provenance"]["data"] |= {"source": "org/name", "streaming": True}
        file.write_text(json.dumps(said))
    how = TuneConfig(**HOW | {"tokens": 768, "batch_tokens": 128, "save_every": 1})
    layers = of_kind(tmp_path / "two", "tc")
    whole = tune(layers, how, "whole", str(tmp_path), model=base)
    real, step, windows, left = TextStream._windows, TuneLoop.train_batch, [], [3, 5]

    def seen(self: TextStream, place: Place) -> Iterator[tuple[Place, list[dict[str, Any]]]]:
        for at, rows in real(self, place):
            windows.append(at.window)
            yield at, rows

    def stops(self: TuneLoop, batch: object) -> None:
        step(self, batch)
        if self.step in left:
            left.remove(self.step)
            raise KeyboardInterrupt

    monkeypatch.setattr(TextStream, "_windows", seen)
    monkeypatch.setattr(TuneLoop, "train_batch", stops)
    with pytest.raises(KeyboardInterrupt):
        tune(layers, how, "part", str(tmp_path), model=base)
    config = tmp_path / "part" / "config.yaml"
    write_files(tmp_path / "hub", "parquet", [line.upper() for line in lines])
    with pytest.raises(MxdError, match="the text or its tokenizer has changed"):
        tune([config], resume=True, model=base)
    write_files(tmp_path / "hub", "parquet", lines)
    windows.clear()
    with pytest.raises(KeyboardInterrupt):
        tune([config], resume=True, model=base)
    monkeypatch.setattr(TuneLoop, "train_batch", step)
    first = windows[0]
    windows.clear()
    part = tune([config], resume=True, model=base)
    assert 0 < first < windows[0]
    assert weights(part) == weights(whole) and part != whole


@pytest.mark.long
def test_a_signal_saves_everything(trained: Path, base: FrozenModel, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(TuneLoop, "stopping", lambda self, stop: self.step == 3)
    monkeypatch.setattr("mxd.common.stop.Stop.error", lambda self, *said: Interrupted(*said))
    with pytest.raises(Interrupted, match=r"stopped at step 3 of 4.*mxd tune .*config.yaml --resume"):
        tune([trained], TuneConfig(**HOW), "s", str(tmp_path), model=base)
    assert (tmp_path / "s" / "state" / "step-000000003").is_dir()


@pytest.mark.long
def test_two_processes_tune_as_one_does(trained: Path, base: FrozenModel, tmp_path: Path) -> None:
    one = tune([trained], TuneConfig(**HOW), "one", str(tmp_path), model=base)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "mxd",
        "tune",
    ]
    options = [f"--{key.replace('_', '-')}={value}" for key, value in HOW.items()]
    command = [*launch, str(trained), *options, "--out", str(tmp_path)]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert found.returncode == 0, found.stderr[-6000:]
    for name in weights(one):
        folders = (one, tmp_path / "two-tuned", trained)
        ours, theirs, before = (load_file(folder / name / "model.safetensors") for folder in folders)
        for key, value in ours.items():  # of all that tuning moved; Adam takes a gradient near zero from its rounding
            moved = torch.linalg.vector_norm(value - before[key])
            assert torch.linalg.vector_norm(theirs[key] - value) <= 1e-3 * moved, key
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (one, tmp_path / "two-tuned")]
    for ours, theirs in zip(*(map(json.loads, part) for part in lines), strict=True):
        assert ours["kl"] == pytest.approx(theirs["kl"], rel=1e-4)
        assert ours["normalized_mse"] == pytest.approx(theirs["normalized_mse"], rel=1e-3)


@pytest.mark.long
def test_changed_layers_are_not_resumed(trained: Path, base: FrozenModel, tmp_path: Path, monkeypatch) -> None:
    copy = tmp_path / "copy"
    for path in of_kind(trained, "mxd"):
        item = load_layers(path)
        (own,) = item.values()
        save_layer(copy / Path(path).name, own.layer, own.provenance)
    monkeypatch.setattr(TuneLoop, "stopping", lambda self, stop: self.step == 2)
    monkeypatch.setattr("mxd.common.stop.Stop.error", lambda self, *said: Interrupted(*said))
    with pytest.raises(Interrupted):
        tune([copy], TuneConfig(**HOW), "t", str(tmp_path), model=base)
    (own,) = load_layers(copy / "block2-mxd-k8").values()
    own.layer.bias += 1
    save_layer(copy / "block2-mxd-k8", own.layer, own.provenance)
    with pytest.raises(MxdError, match="layers that are tuned"):
        tune([tmp_path / "t" / "config.yaml"], resume=True, model=base)


@pytest.mark.long
def test_refusals(trained: Path, base: FrozenModel, tmp_path: Path) -> None:
    with pytest.raises(MxdError, match="batch_tokens = 100 must be a multiple of 64: contexts of 64 tokens"):
        tune([trained], TuneConfig(batch_tokens=100), "a", str(tmp_path), model=base)
    with pytest.raises(MxdError, match="already holds a run"):
        folder = tune(of_kind(trained, "tc"), TuneConfig(**HOW | {"tokens": 512}), "b", str(tmp_path), model=base)
        tune(of_kind(trained, "tc"), TuneConfig(**HOW), "b", str(tmp_path), model=base)
    assert sorted(weights(folder)) == [Path(path).name for path in of_kind(trained, "tc")]
    with pytest.raises(MxdError, match="two checkpoints are called"):
        tune([trained, trained], model=base)
    with pytest.raises(MxdError, match="is no tuning's config; give the trained run"):
        tune([trained / "config.yaml"], model=base)
    with pytest.raises(MxdError, match="has other weights there"):
        tune([trained], run="c", out=str(tmp_path), model=altered())


def altered() -> FrozenModel:
    model = load_frozen("tiny-gpt2")
    with torch.no_grad():
        for parameter in model.mlp(0).parameters():
            parameter.mul_(1.5)
    return model


def test_what_the_run_says_under_tune_holds_unless_it_is_given(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    text = (copy / "config.yaml").read_text()
    assert "\ntune:\n" in text
    (copy / "config.yaml").write_text(text.replace("  nmse: 1.0\n", "  nmse: 0.25\n").replace("loss: kl", "loss: ce"))
    config, _ = tune_config([copy], TuneConfig(loss="kl"))
    assert (config.tune.loss, config.tune.nmse, config.run) == ("kl", 0.25, "copy-tuned")
    assert config.training.steps == 1024 and config.training.settings.warmup_steps == 51


# Before and after


@pytest.mark.long
def test_before_and_after_are_what_mxd_whole_measures(
    trained: Path, base: FrozenModel, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["--tokens", "512", "--batch-tokens", "512", "--lr", "0.01", "--run", "t", "--out", tmp_path]
    code, out, err = mxd(capsys, "tune", *of_kind(trained, "mxd"), *words, "--guard-tokens", "512")
    assert code == 0, err
    found = json.loads((tmp_path / "t" / "tuned.json").read_text())
    layers = {when: named_layers([path]) for when, path in (("before", trained), ("after", tmp_path / "t"))}
    subject = open_checkpoints([trained], model=base)
    sets = {
        when: {own.provenance.block: own for own in layers[when].values() if "mxd" in own.path.name} for when in layers
    }
    how = WholeConfig(tokens=512)
    whole = evaluate_whole(base, sets, subject.contexts(), how)
    (name,) = found["results"]
    assert name == "mxd-k8" and found["asked"]["tokens"] == 512
    for when in ("before", "after"):
        got, right = found["results"][name][when], whole[when]
        assert got["ce_increase"] == pytest.approx(right["ce_increase"], rel=1e-5) and "by_number" not in got
        assert got["tokens"] == right["tokens"]
        for block in ("0", "2"):
            for metric in BEFORE_AND_AFTER:
                value = right["blocks"][block][metric.key]
                assert got["blocks"][block][metric.key] == pytest.approx(value, rel=1e-5)
            assert got["blocks"][block]["spliced"]["nmse_mean_gate"] > 0 and "alone" not in got["blocks"][block]
    shown = [whole[when]["blocks"]["2"]["nmse_mean_gate"] for when in ("before", "after")]
    assert shown[0] != shown[1]
    arrow = " → ".join(f"{value:.4f}" for value in shown)
    page = write_report(tmp_path / "t")[1].read_text()
    assert arrow in " ".join(out.split()) and arrow in page and "Before and after tuning" in page
    with pytest.raises(MxdError, match="holds no tuning"):
        before_and_after(trained)


@pytest.mark.long
def test_nothing_is_measured_where_nothing_is_asked_for(trained: Path, tmp_path: Path, capsys) -> None:
    words = ["--tokens", "512", "--batch-tokens", "512", "--run", "t", "--out", tmp_path, "--guard-tokens", "0"]
    code, out, _ = mxd(capsys, "tune", *of_kind(trained, "tc"), *words)
    assert code == 0 and not (tmp_path / "t" / "tuned.json").exists()
    assert out.splitlines()[-1].startswith("next: mxd whole ") and out.splitlines()[-1].endswith("/t")


# Mistakes and mishaps


def stopped_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TuneLoop, "stopping", lambda self, stop: self.step == step)
    monkeypatch.setattr("mxd.common.stop.Stop.error", lambda self, *said: Interrupted(*said))


def test_all_parts_of_a_step_are_over_in_every_process_before_gradients_are_averaged(
    trained: Path, base: FrozenModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened, part = [], TuneLoop._part

    @contextmanager
    def together_on(self: Processes, device: torch.device) -> Iterator[None]:
        happened.append(device.type)
        yield
        happened.append("all are well")

    monkeypatch.setattr(Processes, "together_on", together_on)
    monkeypatch.setattr(Processes, "average", lambda *_: happened.append("average"))
    monkeypatch.setattr(TuneLoop, "_part", lambda *args, **options: (happened.append("part"), part(*args, **options)))
    how = TuneConfig(**HOW | {"tokens": 512, "accumulation": 2})
    tune(of_kind(trained, "mxd"), how, "t", str(tmp_path), model=base)
    assert happened == ["cpu", "part", "part", "all are well", "average"]


@pytest.mark.long
def test_out_of_memory_says_how_to_go_on_and_going_on_gives_the_same(
    trained: Path, base: FrozenModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = TuneConfig(**HOW | {"tokens": 1536, "save_every": 1})
    whole = tune(of_kind(trained, "mxd"), how, "whole", str(tmp_path), model=base)
    part = TuneLoop._part

    def runs_out(self: TuneLoop, *args: object, **options: bool) -> None:
        if self.step == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\nmore")
        part(self, *args, **options)

    monkeypatch.setattr(TuneLoop, "_part", runs_out)
    said = r"out of memory at step 2\. The last saved state is kept: continue with mxd tune \S+/t/config.yaml --resume "
    with pytest.raises(MxdError, match=said + r"--accumulation 2 \(.*--checkpointing.*lower --batch-tokens") as caught:
        tune(of_kind(trained, "mxd"), how, "t", str(tmp_path), model=base)
    assert str(caught.value).splitlines()[1:] == [
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
    ]
    parts = []

    def counted(self: TuneLoop, ids: torch.Tensor, *args: object, **options: bool) -> None:
        parts.append((len(ids), self.how.checkpointing))
        part(self, ids, *args, **options)

    monkeypatch.setattr(TuneLoop, "_part", counted)
    again = TuneConfig(accumulation=2, checkpointing=True)
    folder = tune([tmp_path / "t" / "config.yaml"], again, resume=True, model=base)
    assert parts == [(4, True), (4, True)]  # of the one step that was left
    for name in weights(whole):
        ours, theirs = (load_file(run / name / "model.safetensors") for run in (folder, whole))
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-6 + 1e-3 * float(value.abs().max()))


@pytest.mark.long
def test_a_resumed_tuning_keeps_its_recipe(trained: Path, base: FrozenModel, tmp_path: Path, monkeypatch) -> None:
    stopped_at(1, monkeypatch)
    with pytest.raises(Interrupted):
        tune(of_kind(trained, "mxd"), TuneConfig(**HOW), "t", str(tmp_path), model=base)
    with pytest.raises(MxdError, match=r"goes on as it began: lr was 0.001, not 0.1\. Only accumulation and check"):
        tune([tmp_path / "t" / "config.yaml"], TuneConfig(lr=0.1, batch_tokens=512), resume=True, model=base)


@pytest.mark.long
def test_a_run_that_lacks_a_layer_is_not_tuned_as_if_it_were_whole(
    trained: Path, base: FrozenModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    stopped_at(1, monkeypatch)
    with pytest.raises(Interrupted):
        tune([copy], TuneConfig(**HOW), "whole", str(tmp_path), model=base)
    shutil.rmtree(copy / "block2-mxd-k8")
    with pytest.raises(MxdError, match=r"lacks block2-mxd-k8, which its config.yaml names\. Finish it \(mxd train "):
        tune([copy], TuneConfig(**HOW), "t", str(tmp_path), model=base)
    assert not (tmp_path / "t" / "config.yaml").exists()
    with pytest.raises(MxdError, match=r"cannot continue as it began: layers that are tuned.*block2-mxd-k8"):
        tune([tmp_path / "whole" / "config.yaml"], resume=True, model=base)
    with pytest.raises(Interrupted):  # given by name, layers need no others
        tune([str(copy / "block0-mxd-k8")], TuneConfig(**HOW), "one", str(tmp_path), model=base)


@pytest.mark.long
def test_tuning_some_of_those_that_were_tuned_together_warns(
    trained: Path, base: FrozenModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = TuneConfig(**HOW | {"tokens": 512})
    folder = tune(of_kind(trained, "mxd"), how, "t", str(tmp_path), model=base)
    with pytest.warns(SiblingWarning, match="tuned together with others, of which those of blocks 2 are not"):
        tune([folder / "block0-mxd-k8"], how, "again", str(tmp_path), model=base)


def test_layers_of_several_base_models_are_named(trained: Path, tmp_path: Path) -> None:
    (own,) = load_layers(trained / "block2-mxd-k8").values()
    other = own.provenance.model_copy(update={"model": "tiny-neox", "revision": "r1"})
    save_layer(tmp_path / "other" / "block2-mxd-k8", own.layer, other)
    said = (
        "different base models: two/block0-mxd-k8 tiny-gpt2 in float32, other/block2-mxd-k8 tiny-neox at r1 in float32;"
    )
    with pytest.raises(MxdError, match=said):
        tune_config([trained, tmp_path / "other"])


@pytest.mark.long
def test_a_changed_text_is_refused(trained: Path, base: FrozenModel, tmp_path: Path, monkeypatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text(("The President of the United States addressed the Congress. " * 400 + "\n") * 8)
    for path in of_kind(trained, "mxd"):
        (own,) = load_layers(path).values()
        data = own.provenance.data | {"source": str(text)}
        save_layer(tmp_path / "own" / Path(path).name, own.layer, own.provenance.model_copy(update={"data": data}))
    with monkeypatch.context() as patch:
        stopped_at(2, patch)
        with pytest.raises(Interrupted):
            tune([tmp_path / "own"], TuneConfig(**HOW), "t", str(tmp_path), model=base)
    text.write_text(text.read_text().replace("President", "Senate"))
    with pytest.raises(MxdError, match="the text or its tokenizer has changed"):
        tune([tmp_path / "t" / "config.yaml"], resume=True, model=base)
