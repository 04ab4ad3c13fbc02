"""The same seed gives the same bits; `scripts/check_determinism.py` does the same for every command, in processes."""

import pytest
import torch
from safetensors.torch import load_file

from mxd.config import parse_config
from mxd.layers import parse_layer
from mxd.layers.sparsity import RandomKConfig
from mxd.training.trainer import train

METHODS = [
    {"method": "mxd", "num_units": 24, "sparsity": {"kind": "random_k", "k": 4}},
    {"method": "transcoder", "num_units": 24, "skip": True, "sparsity": {"kind": "topk", "k": 4}},
    {"method": "transcoder", "num_units": 24, "sparsity": {"kind": "relu_l1", "l1": 0.01}},
    {"method": "cp_mumoe", "num_units": 24, "sparsity": {"kind": "topk", "k": 4}},
    {"method": "tr_mumoe", "num_units": 24, "sparsity": {"kind": "topk", "k": 4}},
    {"method": "tucker_mumoe", "num_units": 24, "sparsity": {"kind": "topk", "k": 4}},
    {"method": "moe", "num_units": 5, "sparsity": {"kind": "topk", "k": 2}},
    {"method": "topk_sae", "num_units": 24, "sparsity": {"kind": "topk", "k": 4}},
]


@pytest.fixture
def trained(tmp_path, gpt2):
    """Train every method; return the weights of each and the metrics without times."""
    (tmp_path / "train.txt").write_text("Some words that a model reads, again and again. " * 60)

    def run(name, **training):
        training = {
            "recipe": "short",
            "tokens": 256,
            "batch_tokens": 64,
            "buffer_tokens": 128,
            "clip_norm": 1.0,
        } | training
        raw = {"run": name, "out": str(tmp_path), "blocks": [1], "replacements": METHODS}
        raw |= {"data": {"source": str(tmp_path / "train.txt"), "split": "train", "context": 16}, "training": training}
        folder = train(parse_config(raw), model=gpt2)
        return {path.parent.name: load_file(path) for path in folder.glob("block*/model.safetensors")}

    return run


def same(a, b):
    return a.keys() == b.keys() and all(
        tensors.keys() == b[name].keys() and all(torch.equal(t, b[name][key]) for key, t in tensors.items())
        for name, tensors in a.items()
    )


@pytest.mark.long
def test_deterministic_training_takes_every_method_and_changes_no_bit_on_a_cpu(trained, monkeypatch):
    """Each method and sparsity, bfloat16 candidates, a batch in parts, a clipped gradient."""
    seen, step = [], torch.optim.Adam.step

    def watched(*args, **kwargs):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return step(*args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    plain = trained("plain", accumulation=2, candidates="bfloat16")
    assert len(plain) == len(METHODS) and seen and not any(seen)
    seen.clear()
    assert same(plain, trained("deterministic", accumulation=2, candidates="bfloat16", deterministic=True))
    assert seen and all(seen) and not torch.are_deterministic_algorithms_enabled()


def test_what_random_k_draws_follows_the_seed():
    def drawn(seed):
        fields = {"d_in": 4, "d_out": 4, "num_units": 40, "sparsity": {"kind": "random_k", "k": 16}}
        layer = parse_layer({"method": "transcoder", **fields}).build(seed).train()
        return [layer.encode(torch.ones(1, 4)).activations.shape[-1] for _ in range(50)]

    assert drawn(0) == drawn(0) and drawn(7) == drawn(7)
    sequences = {tuple(drawn(seed)) for seed in (0, 1, 2, 7, 2**31 - 1, 2**31 + 5)}
    assert len(sequences) == 6


def test_random_k_of_seed_zero_draws_what_it_drew_before_seeds_counted():
    sparsity = RandomKConfig(k=8).build(40).train()
    before = sparsity.draws.clone()
    sparsity.seed(0)
    assert sparsity.draws == before == 0
