"""Second moments of the first window: what layers that begin at a fit are given before training, and when."""

import importlib
import weakref
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import assert_same_run, metrics, small

from mxd.artifacts.checkpoint import load_layer
from mxd.common.errors import MxdError
from mxd.common.processes import ALONE
from mxd.config import RunConfig
from mxd.data.activations import activation_batches
from mxd.data.contexts import token_contexts
from mxd.data.exchange import RankPart
from mxd.data.text import documents
from mxd.planning.memory import plan_run
from mxd.training.source import cache_activations, covariances
from mxd.training.trainer import train

loop = importlib.import_module("mxd.training.loop")
FITTED = [{"method": "linear"}, {"method": "low_rank", "rank": 4}]
WINDOW = 2048


def fitted(root: Path, run: str = "r", **fields) -> RunConfig:
    """A run of the two linear layers, three windows long."""
    return small(root, run=run, **({"replacements": FITTED} | fields))


def moments(config: RunConfig, model) -> dict[int, tuple[np.ndarray, ...]]:
    shares = [RankPart(config.blocks)]
    found = covariances(config, model, ALONE, ALONE, shares)
    return {block: tuple(part.numpy() for part in astuple(covariance)) for block, covariance in found.items()}


def window(model, block: int, tokens: int = WINDOW) -> tuple[np.ndarray, np.ndarray]:
    """The first window of the text in float64, read as one batch; its last tokens are dropped where it is shorter."""
    contexts = token_contexts(documents("bundled", "validation"), model.tokenizer, 128)
    bos = model.tokenizer.bos_token_id
    batch = next(activation_batches(model, [block], contexts, tokens, tokens, bos_id=bos))
    x, y = batch.sites[block]
    return x.double().numpy(), y.double().numpy()


@pytest.mark.parametrize("tokens", [3 * WINDOW, 512])
def test_they_are_those_of_the_first_window(tmp_path, trained_gpt2, tokens):
    """Or of the whole run, where it is shorter."""
    config = fitted(tmp_path, blocks=[1, 2], training={"tokens": tokens, "buffer_tokens": min(tokens, WINDOW)})
    found = moments(config, trained_gpt2)
    assert list(found) == [1, 2]
    for block, parts in found.items():
        x, y = window(trained_gpt2, block, min(tokens, WINDOW))
        joint = np.cov(np.c_[x, y], rowvar=False, bias=True)
        d = x.shape[1]
        for got, expected in zip(parts, (joint[:d, :d], joint[:d, d:], joint[d:, d:]), strict=True):
            assert got.dtype == np.float64
            np.testing.assert_allclose(got, expected, atol=1e-9 * np.abs(expected).max())


def test_a_run_that_is_shorter_than_its_buffer_reads_no_further(tmp_path, trained_gpt2):
    """Its only batch, of the four that the window has."""
    config = fitted(tmp_path, training={"tokens": 512})
    stream = importlib.import_module("mxd.training.source").activation_stream(config, trained_gpt2)
    x, y = (t.double().numpy() for t in next(stream).sites[2])
    joint = np.cov(np.c_[x, y], rowvar=False, bias=True)
    np.testing.assert_allclose(moments(config, trained_gpt2)[2][0], joint[: x.shape[1], : x.shape[1]], atol=1e-9)


def test_a_cache_gives_the_same_bits(tmp_path, trained_gpt2):
    config = fitted(tmp_path)
    cache_activations(config, str(tmp_path / "cache"), trained_gpt2)
    cached = fitted(tmp_path, data={"split": "validation", "cache": str(tmp_path / "cache")})
    for live, read in zip(moments(config, trained_gpt2)[2], moments(cached, trained_gpt2)[2], strict=True):
        assert np.array_equal(live, read)


@pytest.mark.long
def test_training_begins_at_the_best_fit(tmp_path, trained_gpt2):
    """With a vanishing rate the trained layers are the fits of NumPy, made of the window's rows themselves."""
    folder = train(fitted(tmp_path, training={"lr": 1e-12, "warmup_steps": 0}), model=trained_gpt2)
    x, y = window(trained_gpt2, 2)
    rows = np.c_[x, np.ones(len(x))]
    best = rows @ np.linalg.lstsq(rows, y, rcond=1e-5)[0]  # one direction, after a layer norm, is rounding alone
    u, s, v = np.linalg.svd(best - y.mean(0), full_matrices=False)
    cut = (u[:, :4] * s[:4]) @ v[:4] + y.mean(0)
    for name, expected in (("linear", best), ("low-rank-r4", cut)):
        with torch.no_grad():
            out = load_layer(folder / f"block2-{name}").layer(torch.from_numpy(x).float()).numpy()
        np.testing.assert_allclose(out, expected, atol=1e-4 * np.abs(y).max())
        assert np.square(out - y).sum() < 0.8 * np.square(y - y.mean(0)).sum()


def test_nothing_is_read_twice_where_no_layer_asks(tmp_path, trained_gpt2, monkeypatch):
    monkeypatch.setattr(loop, "covariances", None)
    train(small(tmp_path, training={"tokens": 1024}), model=trained_gpt2)
    with pytest.raises(TypeError):
        train(fitted(tmp_path, "fitted", training={"tokens": 1024}), model=trained_gpt2)


def test_one_window_is_in_memory_at_a_time(tmp_path, trained_gpt2, monkeypatch):
    """Though the first is filled twice."""
    module = importlib.import_module("mxd.data.activations")
    real, alive = module._fill, []

    def fill(*args):
        assert not any(earlier() for earlier in alive)
        filled = real(*args)
        alive.append(weakref.ref(filled.ids))
        return filled

    monkeypatch.setattr(module, "_fill", fill)
    train(fitted(tmp_path), model=trained_gpt2)
    assert len(alive) == 1 + 3


@pytest.mark.long
def test_resumed_layers_are_not_fitted_anew(tmp_path, trained_gpt2, monkeypatch):
    """Bit for bit the uninterrupted run, whether it failed within a window or while the second moments were formed."""
    whole = train(fitted(tmp_path), model=trained_gpt2)
    real, calls = loop.covariances, []

    def fail_at_first(*args):
        calls.append(args)
        if len(calls) == 1:
            raise MxdError("the disk is gone")
        return real(*args)

    monkeypatch.setattr(loop, "covariances", fail_at_first)
    config = fitted(tmp_path, "stopped")
    with pytest.raises(MxdError, match="the disk is gone"):
        train(config, model=trained_gpt2)
    step = loop.Loop.train_batch

    def fail_at_seventh(run, batch):
        if run.step == 6:
            raise MxdError("enough")
        step(run, batch)

    with monkeypatch.context() as patch, pytest.raises(MxdError, match="enough"):
        patch.setattr(loop.Loop, "train_batch", fail_at_seventh)
        train(config, resume=True, model=trained_gpt2)
    assert len(calls) == 2
    train(config, resume=True, model=trained_gpt2)
    assert len(calls) == 2
    assert_same_run(whole, config.folder)


def test_a_text_that_ends_within_the_first_window(tmp_path, trained_gpt2, monkeypatch):
    """The layers begin at the fit of what there is, and are saved."""
    module = importlib.import_module("mxd.training.source")
    texts = module.documents("bundled", "validation")[:2]
    monkeypatch.setattr(module, "documents", lambda *args: iter(texts))
    config = fitted(tmp_path, training={"buffer_tokens": 8192, "tokens": 8192, "log_every": 1})
    with pytest.raises(MxdError, match="the text ended after"):
        train(config, model=trained_gpt2)
    provenance = load_layer(config.folder / "block2-linear").provenance
    assert 0 < provenance.tokens < 8192
    first = next(line for line in metrics(config.folder) if line["replacement"] == "block2-linear")
    assert first["fvu"] < 0.5


def test_the_plan_counts_them(tmp_path):
    """Three matrices of 128 x 128 in float64, and as much again while a batch's are added."""
    record = [plan_run(c).memory["recording activations"] for c in (fitted(tmp_path, blocks=[1, 2]), small(tmp_path))]
    assert record[0]["second moments"] == 2 * 2 * 3 * 128 * 128 * 8
    assert "second moments" not in record[1]
