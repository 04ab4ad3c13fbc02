"""Faithfulness: every metric against an oracle written out in NumPy, and the identities that must hold."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import check_reconstruction, log_softmax
from variants import GENERAL

from mxd.common.errors import MxdError
from mxd.data.contexts import counted_positions, special_ids
from mxd.evaluation.conventions import recovered
from mxd.evaluation.faithfulness import Prediction, answer, evaluate
from mxd.layers import LAYERS, size
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen
from mxd.questions import FaithfulnessConfig

LAYER = 2

MEASURED = [
    pytest.param(method, some, marks=pytest.mark.long if number % 3 else ())
    for number, (method, some) in enumerate((method, some) for method in GENERAL for some in (True, False))
]
"""Every method that adds up, with and without excluded tokens; a third of these in the short run."""


@pytest.fixture(scope="module")
def model() -> FrozenModel:
    return load_frozen("tiny-gpt2")


@pytest.fixture(scope="module")
def rows(model: FrozenModel) -> np.ndarray:
    from mxd.data.contexts import token_contexts
    from mxd.data.text import documents

    stream = token_contexts(documents("bundled", "validation"), model.tokenizer, 32)(0)
    return np.stack([next(stream) for _ in range(11)])


def contexts_of(rows: np.ndarray):
    return lambda start: iter(rows[start:])


def layer_for(model: FrozenModel, method: str = "mxd", number: int = LAYER, k: int = 8, noise: float = 0.05, **fields):
    config = LAYERS[method](sparsity={"kind": "topk", "k": k}, **fields).resolve(model.mlp_shape(number))
    layer = size(config, 9).build(seed=3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return layer.eval()


def patched_logits(model: FrozenModel, ids: torch.Tensor, replace) -> np.ndarray:
    """Logits with the MLP's output replaced by ``replace(x, y)`` through a plain hook, independent of splice.py."""
    handle = model.mlp(LAYER).register_forward_hook(lambda m, args, y: replace(args[0], y))
    try:
        return model.logits(ids).numpy().astype(np.float64)
    finally:
        handle.remove()


@pytest.mark.parametrize(("method", "some_excluded"), MEASURED)
def test_every_metric_agrees_with_numpy(model: FrozenModel, rows: np.ndarray, method: str, some_excluded: bool) -> None:
    """Of both splices, over the same targets: everything replaced, and around the tokens that are excluded."""
    excluded = special_ids(model.tokenizer) if some_excluded else []
    layer = layer_for(model, method)
    found = evaluate(model, {"a": {LAYER: layer}}, contexts_of(rows), rows.size, excluded, forward_contexts=4)["a"]
    ids = torch.from_numpy(rows).long()
    keep = torch.from_numpy(counted_positions(rows, excluded))
    x, y = model.record(ids, [LAYER])[LAYER]
    read = x if layer.config.reads == "mlp_in" else y
    with torch.no_grad():
        hat = layer(read)
    mean_y = y[keep].mean(0)
    base = log_softmax(model.logits(ids).numpy().astype(np.float64))
    targets = rows[:, 1:]
    counted = counted_positions(targets, excluded)
    ways = {
        "ce_spliced": lambda old: hat,
        "ce_zero": torch.zeros_like,
        "ce_mean": lambda old: mean_y.expand_as(old),
    }

    def ce(lp: np.ndarray) -> np.ndarray:
        return -np.take_along_axis(lp[:, :-1], targets[..., None], -1)[..., 0]

    def over(values: np.ndarray) -> float:
        return values[counted].mean()

    assert found["tokens"] == counted.sum() and found["excluded"] == excluded
    assert found["ce_base"] == pytest.approx(over(ce(base)), abs=1e-5)
    for got, replaced in ((found, torch.ones_like(keep)), (found["around_special"], keep)):

        def patched(new, replaced: torch.Tensor = replaced) -> np.ndarray:
            return patched_logits(model, ids, lambda _, old: torch.where(replaced.unsqueeze(-1), new(old), old))

        logp = {key: log_softmax(patched(new)) for key, new in ways.items()}
        for key, one in logp.items():
            assert got[key] == pytest.approx(over(ce(one)), abs=1e-4), key
        increase = ce(logp["ce_spliced"]) - ce(base)
        assert got["ce_increase"] == pytest.approx(over(increase), abs=1e-4)
        zero = over(ce(logp["ce_zero"]) - ce(base))
        assert got["loss_recovered"] == pytest.approx(1 - over(increase) / zero, rel=0.02, abs=0.02)
        kl = (np.exp(base) * (base - logp["ce_spliced"])).sum(-1)[:, :-1]
        assert got["kl"] == pytest.approx(over(kl), rel=1e-3, abs=1e-5)
        same = base.argmax(-1) == logp["ce_spliced"].argmax(-1)
        assert got["top1_agreement"] == pytest.approx(over(same[:, :-1].astype(float)), abs=0.01)
        if got is found:
            means = (increase * counted).sum(1) / counted.sum(1)
            assert found["by_context"]["tokens"] == counted.sum(1).tolist()
            assert found["by_context"]["ce_increase"] == pytest.approx(means, abs=1e-4)
    if some_excluded:
        assert found["ce_increase"] != found["around_special"]["ce_increase"]
    check_reconstruction(found["blocks"][str(LAYER)], layer, read[keep], y[keep])


def test_the_base_mlp_itself_is_perfectly_faithful(model: FrozenModel, rows: np.ndarray) -> None:
    found = evaluate(model, {"same": {LAYER: model.mlp(LAYER)}}, contexts_of(rows), rows.size, [])["same"]
    assert found["ce_increase"] == 0
    assert found["kl"] == pytest.approx(0, abs=1e-9)
    assert found["top1_agreement"] == 1
    assert found["loss_recovered"] == pytest.approx(1)
    assert found["blocks"][str(LAYER)]["fvu"] == 0


def test_a_layer_that_is_not_additive_has_no_account(
    model: FrozenModel, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts interact, so shares of them would mean nothing; all else is measured."""
    layer = layer_for(model)
    monkeypatch.setattr(type(layer), "additive", False)
    found = evaluate(model, {"a": {LAYER: layer}}, contexts_of(rows), rows.size, [])["a"]
    assert found["ce_increase"] != 0 and set(found["blocks"][str(LAYER)]) == {
        "normalized_mse",
        "fvu",
        "explained_variance",
        "conventions",
        "l0",
    }


def test_zero_ablation_recovers_nothing(model: FrozenModel, rows: np.ndarray) -> None:
    from mxd.evaluation.faithfulness import Constant

    zero = Constant(torch.zeros(model.config.hidden_size))
    found = evaluate(model, {"zero": {LAYER: zero}}, contexts_of(rows), rows.size, [])["zero"]
    assert found["loss_recovered"] == pytest.approx(0, abs=1e-6)
    assert found["ce_spliced"] == pytest.approx(found["ce_zero"], abs=1e-9)


@pytest.mark.long
def test_sets_do_not_disturb_each_other_nor_depend_on_batching(model: FrozenModel, rows: np.ndarray) -> None:
    a, b = layer_for(model, number=1), layer_for(model, "transcoder", number=4)
    sets = {"a": {1: a}, "b": {4: b}, "both": {1: a, 4: b}}
    together = evaluate(model, sets, contexts_of(rows), rows.size, [], forward_contexts=4)
    for name, members in sets.items():
        alone = evaluate(model, {name: members}, contexts_of(rows), rows.size, [], forward_contexts=11)[name]
        for key, value in alone.items():
            if key not in ("blocks", "around_special", "excluded", "by_context", "conventions"):
                assert together[name][key] == pytest.approx(value, rel=1e-3, abs=2e-5), (name, key)
        for key, values in alone["by_context"].items():
            assert together[name]["by_context"][key] == pytest.approx(values, rel=1e-3, abs=1e-4), (name, key)
    assert together["both"]["ce_increase"] > max(together["a"]["ce_increase"], together["b"]["ce_increase"])
    assert set(together["both"]["blocks"]) == {"1", "4"}


def test_evaluation_leaves_the_model_as_it_was(model: FrozenModel, rows: np.ndarray) -> None:
    ids = torch.from_numpy(rows).long()
    before = model.logits(ids)
    evaluate(model, {"a": {LAYER: layer_for(model)}}, contexts_of(rows), rows.size, [])
    assert torch.equal(model.logits(ids), before)


def test_a_share_of_noise_is_not_given() -> None:
    """What zero-ablation costs must be told from nothing before a share of it is recovered."""
    splice, zero = Prediction(), Prediction()
    counted = torch.ones(1, 4, dtype=torch.bool)
    for gap in (0.5, -0.4, 0.3, -0.35):
        splice.increase.see(torch.full((1, 4), 0.1), counted)
        zero.increase.see(torch.full((1, 4), gap), counted)
    assert zero.increase.value > 0 and recovered(splice.increase, zero.increase) is None
    for _ in range(50):
        zero.increase.see(torch.full((1, 4), 0.4), counted)
    assert recovered(splice.increase, zero.increase) == pytest.approx(1 - 0.1 / zero.increase.value)
    assert recovered(splice.increase, Prediction().increase) is None


def test_what_special_tokens_are_is_the_tokenizers_word(model: FrozenModel, rows: np.ndarray) -> None:
    """Whatever a layer was trained without, so that layers are compared over the same targets."""
    from mxd.artifacts.checkpoint import Trained
    from mxd.artifacts.provenance import Provenance

    layer = layer_for(model)
    known = {"model": "m", "revision": None, "block": LAYER, "fingerprint": model.fingerprint(LAYER)}
    sets = {str(ids): {LAYER: Trained(layer, Provenance(**known, excluded_ids=ids), Path())} for ids in ((), (0, 7))}
    found = evaluate(model, sets, contexts_of(rows), rows.size)
    assert found["()"] == found["(0, 7)"]
    assert found["()"]["excluded"] == special_ids(model.tokenizer)


@pytest.mark.long
def test_with_its_constant_a_layer_answers_at_bos_as_the_mlp_does(model: FrozenModel) -> None:
    """Where BOS is the only special token, both splices are then one."""
    from mxd.data.contexts import token_contexts
    from mxd.data.text import documents

    layer = layer_for(model, bos_constant=True)
    bos = model.tokenizer.bos_token_id
    x, y = model.record(torch.tensor([[bos]]), [LAYER])[LAYER]
    layer.store_bos(x[0, 0], y[0, 0])
    stream = token_contexts(documents("bundled", "validation"), model.tokenizer, 32)(0)
    rows = np.stack([row for row, _ in zip(stream, range(200), strict=False) if (row == bos).sum() == 1])
    assert len(rows) > 20
    found = evaluate(model, {"a": {LAYER: layer}}, contexts_of(rows), rows.size)["a"]
    assert (
        found["ce_increase"] == pytest.approx(found["around_special"]["ce_increase"], abs=1e-6) and found["kl"] > 0.01
    )


def test_errors(model: FrozenModel, rows: np.ndarray) -> None:
    layer = layer_for(model)
    with pytest.raises(MxdError, match="no complete context"):
        evaluate(model, {"a": {LAYER: layer}}, lambda start: iter(()), 100, [])
    with pytest.raises(MxdError, match="nothing to evaluate"):
        evaluate(model, {}, contexts_of(rows), 100, [])
    with pytest.raises(MxdError, match="out of range"):
        evaluate(model, {"a": {77: layer}}, contexts_of(rows), 100, [])
    with pytest.raises(MxdError, match="excluded"):
        evaluate(model, {"a": {LAYER: layer}}, contexts_of(rows), 100, range(5000))


@pytest.mark.long
def test_checkpoints_end_to_end(tmp_path: Path) -> None:
    from mxd.config import parse_config
    from mxd.evaluation.checkpoints import open_checkpoints, save_results
    from mxd.training.trainer import train

    raw = {
        "run": "r",
        "out": str(tmp_path),
        "blocks": [1, 2],
        "model": {"source": "tiny-gpt2", "device": "cpu"},
        "sizing": {"expansion": 9},
        "replacements": [{"method": "mxd", "sparsity": {"kind": "topk", "k": [2, 4]}}],
        "training": {"recipe": "short", "tokens": 1024, "batch_tokens": 512, "buffer_tokens": 1024},
    }
    folder = train(parse_config(raw))
    how = FaithfulnessConfig(tokens=512)
    found = answer(open_checkpoints([folder]), how)
    assert set(found["results"]) == {f"r/block{n}-mxd-k{k}" for n in (1, 2) for k in (2, 4)}
    assert found["data"]["split"] == "validation"
    pair = [folder / "block1-mxd-k2", folder / "block2-mxd-k4"]
    both = answer(open_checkpoints(pair, {"context": 64}), how, together=True)
    assert list(both["results"]) == ["together"]
    assert len(both["results"]["together"]["replacements"]) == 2
    assert json.loads(save_results(both, tmp_path / "x" / "e.json").read_text())["results"].keys() == {"together"}
    subject = open_checkpoints([pair[0]])
    drawn = answer(subject, how), answer(subject, FaithfulnessConfig(tokens=512, seed=1))
    first, other = ({"ce_base": d["results"]["r/block1-mxd-k2"]["ce_base"], "seed": d["seed"]} for d in drawn)
    assert first["seed"] == 0 and other["seed"] == 1 and first["ce_base"] != other["ce_base"]
    by_path = evaluate(subject.base, {"a": {1: pair[0]}, "b": {1: str(pair[0])}}, subject.contexts(), 512)
    assert by_path["a"] == by_path["b"] and by_path["a"]["ce_base"] == first["ce_base"]
    sets = answer(open_checkpoints([folder], {"context": 64}), how, together=True)["results"]
    assert {name: [r["block"] for r in found["replacements"]] for name, found in sets.items()} == {
        "mxd-k2": [1, 2],
        "mxd-k4": [1, 2],
    }
    alone = answer(open_checkpoints(sorted(folder.glob("*-k4")), {"context": 64}), how, together=True)
    assert alone["results"]["mxd-k4"] == sets["mxd-k4"]
    with pytest.raises(MxdError, match="other weights there"):
        answer(open_checkpoints([folder / "block1-mxd-k2"], model="tiny-neox"), how)
    with pytest.raises(MxdError, match="no checkpoint"):
        open_checkpoints([tmp_path / "nowhere"])


def test_a_layer_under_training_is_measured_in_eval_mode_and_handed_back(model: FrozenModel, rows: np.ndarray) -> None:
    config = LAYERS["mxd"](sparsity={"kind": "random_k", "k": 8}).resolve(model.mlp_shape(LAYER))
    layer = size(config, 9).build().train()
    found = evaluate(model, {"a": {LAYER: layer}}, contexts_of(rows), rows.size, [])["a"]
    assert found["blocks"][str(LAYER)]["l0"] <= 8
    assert int(layer.sparsity.draws) == 0
    assert layer.training


def test_held_out_text_is_the_other_side_of_the_training_text(model: FrozenModel, tmp_path: Path) -> None:
    from mxd.artifacts.checkpoint import Trained
    from mxd.artifacts.provenance import Provenance
    from mxd.evaluation.checkpoints import _held_out

    def held_out(changes: dict, **data):
        provenance = Provenance(model="m", revision=None, block=0, fingerprint="f", data=data)
        text = _held_out(Trained(layer_for(model), provenance, tmp_path), changes)
        return text.split, text.part

    assert held_out({}, split="train") == ("validation", "all")
    assert held_out({}, split="train", part="train") == ("train", "validation")
    assert held_out({"split": "test"}, split="train", part="train") == ("test", "all")
    with pytest.raises(MxdError, match="context"):
        held_out({"context": 0}, split="train")


def test_results_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mxd.common import files
    from mxd.evaluation.checkpoints import save_results

    class Interrupting:
        def __str__(self) -> str:
            raise KeyboardInterrupt

    def full_disk(path: Path) -> None:
        raise OSError(28, "No space left on device")

    file = save_results({"results": 1}, tmp_path / "deep" / "e.json")
    before = file.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        save_results({"results": [*range(10_000), Interrupting()]}, file)
    with monkeypatch.context() as patch, pytest.raises(MxdError, match=r"cannot write .*No space left"):
        patch.setattr(files, "settle", full_disk)
        save_results({"results": 2}, file)
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]
    with pytest.raises(MxdError, match="cannot write"):
        save_results({}, tmp_path)


def test_results_go_where_a_link_leads_and_into_a_pipe(tmp_path: Path) -> None:
    from mxd.evaluation.checkpoints import save_results

    file, link, pipe = tmp_path / "e.json", tmp_path / "link.json", tmp_path / "pipe"
    file.write_text("{}")
    link.symlink_to(file)
    save_results({"results": 2}, link)
    assert link.is_symlink() and json.loads(file.read_text()) == {"results": 2}
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDWR | os.O_NONBLOCK), "rb") as end:
        save_results({"results": 3}, pipe)
        assert json.loads(end.read(1000) or b"") == {"results": 3}
    assert pipe.is_fifo()
