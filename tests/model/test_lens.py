"""The map from a direction to logits, against NumPy: LayerNorm and RMSNorm, trained weights and random ones."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

from mxd.common.errors import MxdError
from mxd.model.lens import Lens, peaks
from mxd.model.loading import load_frozen


def norm_of(model):
    """The final norm, its weight, and whether it centres, by the family's own names."""
    module = model.module
    kind = module.config.model_type
    norm = {"gpt2": "transformer.ln_f", "gpt_neox": "gpt_neox.final_layer_norm", "llama": "model.norm"}[kind]
    return module.get_submodule(norm), kind != "llama"


def by_hand(model, directions):
    """Centred where the norm is a LayerNorm, times its weight, times the unembedding; about the vocabulary's mean."""
    norm, centred = norm_of(model)
    v = directions.double().numpy()
    v = v - v.mean(-1, keepdims=True) if centred else v
    unembedding = model.module.get_output_embeddings().weight.detach().double().numpy()
    logits = (v * norm.weight.detach().double().numpy()) @ unembedding.T
    return logits - logits.mean(-1, keepdims=True)


def directions_of(model, count=5):
    return torch.randn(count, model.config.hidden_size, generator=torch.Generator().manual_seed(1)) + 0.5


def test_every_familys_final_norm_is_folded_in(family):
    check(family)


def test_of_trained_models_too(trained):
    check(trained)


def check(model):
    lens, directions = Lens.of(model), directions_of(model)
    assert lens.centred == norm_of(model)[1] and lens.norm == type(norm_of(model)[0]).__name__
    np.testing.assert_allclose(lens.logits(directions), by_hand(model, directions), rtol=1e-3, atol=1e-4)


def test_it_is_what_the_model_does_up_to_the_norms_division(trained):
    """A small step along a direction changes the logits in proportion, once the size of the stream is held fixed."""
    norm, centred = norm_of(trained)
    norm, head = deepcopy(norm).double(), deepcopy(trained.module.get_output_embeddings()).double()
    h = 3 * torch.randn(trained.config.hidden_size, generator=torch.Generator().manual_seed(0)).double()
    direction = directions_of(trained, 1)[0].double()
    kept = h - h.mean() if centred else h
    inward = direction - direction.mean() if centred else direction
    along = inward - (inward @ kept) / (kept @ kept) * kept  # leaves the size of the stream as it is
    with torch.no_grad():
        change = (head(norm(h + 0.03 * along)) - head(norm(h))) / 0.03 * kept.square().mean().sqrt()
    expected = change - change.mean()
    got = Lens.of(trained).logits(along[None].float())[0].double()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-2 * float(expected.abs().max()))


def test_a_vocabulary_in_parts_is_the_same(trained_gpt2, monkeypatch):
    whole = Lens.of(trained_gpt2).logits(directions_of(trained_gpt2))
    monkeypatch.setattr("mxd.model.lens.ROWS", 100)
    torch.testing.assert_close(Lens.of(trained_gpt2).logits(directions_of(trained_gpt2)), whole)


class OnePlus(nn.Module):
    """An RMSNorm that stores its weight less one, as Gemma does."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight - 1)

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + self.weight)


class Squashed(nn.Module):
    def forward(self, x):
        return torch.tanh(x)


def test_a_norm_is_known_by_what_it_does(build_model, tokenizer):
    model = load_frozen(build_model("llama"), tokenizer=tokenizer)
    known = Lens.of(model).logits(directions_of(model))
    model.module.model.norm = OnePlus(model.module.model.norm.weight.detach())
    torch.testing.assert_close(Lens.of(model).logits(directions_of(model)), known, rtol=1e-3, atol=1e-4)
    assert Lens.of(model).norm == "OnePlus"
    model.module.model.norm = Squashed()
    with pytest.raises(MxdError, match="Squashed before the unembedding is neither"):
        Lens.of(model)


def test_an_odd_width_is_probed_whole():
    from mxd.model.lens import _tried

    for centred, norm in ((True, nn.LayerNorm(7)), (False, OnePlus(torch.ones(7)))):
        weight = torch.arange(1.0, 8)
        norm.weight.data.copy_(weight if centred else weight - 1)
        scale, found = _tried(norm, 7, torch.device("cpu"))
        assert found == centred
        torch.testing.assert_close(scale, weight, rtol=1e-3, atol=1e-3)


def test_random_directions_peak_as_the_largest_of_as_many_gaussians(build_model, tokenizer):
    """Of a random model: 4,096 tokens that do not correlate."""
    model = load_frozen(build_model("gpt2"), tokenizer=tokenizer)
    largest = np.random.default_rng(0).normal(size=(400, 4096)).max(1).mean()
    assert Lens.of(model).chance() == pytest.approx(largest, rel=0.1)
    lens = Lens.of(model)
    row = lens.unembedding[7].double()
    assert float(peaks(lens.logits((row / lens.scale)[None].float()))[0]) > lens.chance() + 1
