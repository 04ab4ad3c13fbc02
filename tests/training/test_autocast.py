"""Activations recorded under autocast: what is rounded, who decides, and who is told."""

import json
from copy import deepcopy
from itertools import islice
from pathlib import Path

import pytest
import torch
from runs import small, stop_after, tensors
from torch.testing import assert_close

from mxd.artifacts.checkpoint import load_layer
from mxd.common.errors import MxdError
from mxd.config import RunConfig
from mxd.data.reading import check_cache
from mxd.model.autocast import WIDE, under_autocast
from mxd.model.frozen import FrozenModel
from mxd.planning import time
from mxd.training.source import activation_stream, autocasts, cache_activations, recording
from mxd.training.trainer import train

CPU = torch.device("cpu")


def recorded(tmp_path: Path, autocast: bool | str, **fields) -> RunConfig:
    return small(tmp_path, data={"split": "validation", "context": 16, "autocast": autocast}, **fields)


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A processor with instructions for bfloat16, and models of any width."""
    monkeypatch.setattr("mxd.ops.dense.candidate_dtype", lambda device: "bfloat16")
    monkeypatch.setattr("mxd.model.autocast.WIDE", 1)
    return monkeypatch


@pytest.mark.parametrize("native", [True, False])
def test_auto_is_for_wide_float32_models_on_processors_with_the_instructions(native, monkeypatch) -> None:
    monkeypatch.setattr("mxd.ops.dense.candidate_dtype", lambda device: "bfloat16" if native else "float32")
    assert under_autocast("auto", "float32", CPU, WIDE) is native
    assert not under_autocast("auto", "float32", CPU, WIDE - 1)
    assert not under_autocast("auto", "float32", torch.device("cuda"), WIDE)
    assert not under_autocast("auto", "bfloat16", CPU, WIDE)
    assert under_autocast(True, "float32", CPU, 1) and not under_autocast(False, "float32", CPU, WIDE)
    with pytest.raises(MxdError, match="for a base model in float32, this one is in bfloat16; leave it at auto"):
        under_autocast(True, "bfloat16", CPU, WIDE)


def test_an_mlp_under_autocast_is_the_mlp_in_bfloat16(trained: FrozenModel, ids, tmp_path: Path) -> None:
    config = recorded(tmp_path, True)
    x, y = recording(config, trained)(ids, [2])[2]
    assert x.dtype == torch.float32  # the residual stream, and its norm
    with torch.no_grad():
        assert torch.equal(y, deepcopy(trained.mlp(2)).bfloat16()(x.bfloat16()))
    exact = trained.record(ids, 2)[2]
    for found, expected in zip((x, y), exact, strict=True):
        error = (found - expected).norm() / expected.norm()
        assert 1e-4 < error < 2e-2
    plain = recording(recorded(tmp_path, False), trained)(ids, [2])[2]
    assert all(torch.equal(a, b) for a, b in zip(plain, exact, strict=True))


def test_batches_are_the_same_tokens_in_float32(trained_gpt2, tmp_path: Path) -> None:
    exact, low = (next(activation_stream(recorded(tmp_path, on), trained_gpt2)) for on in (False, True))
    assert torch.equal(exact.ids, low.ids)
    for a, b in zip(exact.sites[2], low.sites[2], strict=True):
        assert b.dtype == torch.float32 and not torch.equal(a, b)
        assert_close(b, a, rtol=0, atol=0.05 * float(a.abs().max()))


def test_a_cache_is_read_as_it_was_written_unless_the_run_says_otherwise(trained_gpt2, able, tmp_path: Path) -> None:
    for name, autocast in {"low": "auto", "exact": False}.items():
        cache_activations(recorded(tmp_path, autocast), tmp_path / name, trained_gpt2)
    live = list(islice(activation_stream(recorded(tmp_path, True), trained_gpt2), 3))
    read = {
        name: list(islice(activation_stream(cached(tmp_path, name, "auto"), trained_gpt2), 3))
        for name in ("low", "exact")
    }
    assert all(torch.equal(a.sites[2][1], b.sites[2][1]) for a, b in zip(live, read["low"], strict=True))
    assert not torch.equal(live[0].sites[2][1], read["exact"][0].sites[2][1])
    with pytest.raises(MxdError, match="autocast: True, asked for False"):
        activation_stream(cached(tmp_path, "low", False), trained_gpt2)
    with pytest.raises(MxdError, match="autocast: False, asked for True"):
        cache_activations(recorded(tmp_path, True), tmp_path / "exact", trained_gpt2)
    (tmp_path / "older").mkdir()
    identity = json.loads((tmp_path / "exact" / "cache.json").read_text())
    del identity["autocast"]  # as earlier versions wrote it
    (tmp_path / "older" / "cache.json").write_text(json.dumps(identity))
    check_cache(tmp_path / "older", identity | {"autocast": False})
    with pytest.raises(MxdError, match="autocast: False, asked for True"):
        check_cache(tmp_path / "older", identity | {"autocast": True})
    assert not autocasts(cached(tmp_path, "older", "auto"), trained_gpt2)
    assert autocasts(cached(tmp_path, "low", "auto"), trained_gpt2)


def cached(tmp_path: Path, cache: str, autocast: bool | str) -> RunConfig:
    data = {"split": "validation", "context": 16, "autocast": autocast, "cache": str(tmp_path / cache)}
    return small(tmp_path, data=data)


def test_a_layer_says_how_its_activations_were_recorded(trained_gpt2, able, tmp_path: Path) -> None:
    layers = {}
    for autocast in ("auto", False):
        folder = train(recorded(tmp_path / str(autocast), autocast), model=trained_gpt2)
        layers[autocast] = load_layer(folder / "block2-mxd-k8").provenance
    exact, low = (tensors(tmp_path / str(autocast) / "r") for autocast in (False, "auto"))
    assert not torch.equal(exact["block2-mxd-k8/expert_scale"], low["block2-mxd-k8/expert_scale"])
    cache_activations(recorded(tmp_path, "auto"), tmp_path / "low", trained_gpt2)
    train(cached(tmp_path, "low", "auto"), model=trained_gpt2)
    from_cache = tensors(tmp_path / "r")
    assert all(torch.equal(tensor, low[name]) for name, tensor in from_cache.items())
    assert layers["auto"].data["autocast"] is True and layers[False].data["autocast"] is False
    assert layers["auto"].recorded_in == "float32, under autocast to bfloat16"
    assert layers[False].recorded_in == "float32"
    card = (tmp_path / "auto" / "r" / "block2-mxd-k8" / "README.md").read_text()
    assert "run in float32, under autocast to bfloat16." in card


def test_a_run_is_not_continued_where_auto_means_something_else(trained_gpt2, able, tmp_path: Path) -> None:
    config = recorded(tmp_path, "auto")
    stop_after(5, config, trained_gpt2)
    able.setattr("mxd.model.autocast.WIDE", 10**6)
    with pytest.raises(MxdError, match="base model under autocast"):
        train(config, model=trained_gpt2, resume=True)


def test_a_spliced_base_model_is_not_under_autocast(trained_gpt2, able, tmp_path: Path) -> None:
    spliced = {"training": {"inputs": "spliced"}}
    exact = trained_gpt2.record(torch.arange(16)[None], 2)[2]
    config = recorded(tmp_path, "auto", **spliced)
    assert torch.equal(recording(config, trained_gpt2)(torch.arange(16)[None], [2])[2][1], exact[1])
    with pytest.raises(MxdError, match=r"for the base model as it is; with training\.inputs: spliced"):
        recording(recorded(tmp_path, True, **spliced), trained_gpt2)


def test_the_base_models_products_are_planned_in_bfloat16(able, tmp_path: Path, monkeypatch) -> None:
    speeds = {torch.float32: 1.0, torch.bfloat16: 2.0}
    monkeypatch.setattr(time, "product_speed", lambda device, dtype=torch.float32, tf32=False: speeds[dtype])
    monkeypatch.setattr(time, "copy_speed", lambda device: 1.0)
    found = [time.measured_speeds(recorded(tmp_path, autocast), CPU, 64).base for autocast in ("auto", False)]
    assert found == [2.0, 1.0]
    spliced = recorded(tmp_path, "auto", training={"inputs": "spliced"})
    assert time.measured_speeds(spliced, CPU, 64).base == 1.0
