"""The account of an output: every part against sums over the units written out in NumPy, and both disguises."""

import numpy as np
import pytest
import torch
from small_layers import layer_for
from variants import GENERAL

from mxd.evaluation import account as module
from mxd.evaluation.account import Account, Energy, effective_units
from mxd.layers.mxd import MxDConfig
from mxd.layers.sparsity import TopKConfig

TOKENS = 50
KINDS = [(method, {}) for method in GENERAL] + [("transcoder", {"skip": True})]


def accounted(layer, x, y, batch=17):
    """An account of these tokens, read in several batches."""
    account = Account(layer)
    with torch.no_grad():
        for part in x.split(batch):
            account.see_means(part)
        for part, target in zip(x.split(batch), y.split(batch), strict=True):
            code = layer.encode(part)
            account.see(part, target, code, layer.decode(part, code))
    return account


def activations(model, number, layer):
    """Inputs that a layer reads, and the MLP's outputs."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(1, 60, (1, TOKENS)))
    x, y = (site[0].float() for site in model.record(ids, [number])[number])
    return (x if layer.config.reads == "mlp_in" else y), y


def shares(model, number, layer, x):
    """Predictions, predictions with each unit's mean direction, and the parts' shares, unit by unit."""
    with torch.no_grad():
        code = layer.encode(x)
        a = np.zeros((TOKENS, layer.num_units))
        np.put_along_axis(a, code.indices.numpy(), code.activations.double().numpy(), 1)
        v = np.stack([layer.unit_output(n, x).double().numpy() for n in range(layer.num_units)], 1)
        prediction = layer(x).double().numpy()
    rest = prediction - np.einsum("tn,tno->to", a, v)
    gap, turned = a - a.mean(0), v - v.mean(0)
    parts = {
        "gate": np.einsum("tn,no->to", gap, v.mean(0)),
        "dense": np.einsum("n,tno->to", a.mean(0), turned),
        "interaction": np.einsum("tn,tno->to", gap, turned),
        "skip": rest,
    }
    whole = centred(prediction)
    return prediction, rest + np.einsum("tn,no->to", a, v.mean(0)), {k: centred(p) / whole for k, p in parts.items()}


def centred(vectors):
    return ((vectors - vectors.mean(0)) ** 2).sum()


@pytest.mark.parametrize(("method", "fields"), KINDS)
def test_every_part_agrees_with_sums_over_units(gpt2, method, fields):
    layer = layer_for(gpt2, 1, method, **fields)
    x, y = activations(gpt2, 1, layer)
    found = accounted(layer, x, y).report()
    _, fixed, parts = shares(gpt2, 1, layer, x)
    for name, share in parts.items():
        assert found[f"{name}_share"] == pytest.approx(share, rel=1e-3, abs=1e-6), name
    target = y.double().numpy()
    errors = ((target - fixed) ** 2).mean(1) / np.linalg.norm(target, axis=1)
    assert found["nmse_fixed_directions"] == pytest.approx(errors.mean(), rel=1e-4)


@pytest.mark.parametrize("kind", ["relu_l1", "random_k"])
def test_the_account_holds_for_every_sparsity(gpt2, kind):
    sparsity = {"kind": kind} | ({"k": 4} if kind == "random_k" else {})
    layer = layer_for(gpt2, 1, sparsity=sparsity)
    x, y = activations(gpt2, 1, layer)
    parts = shares(gpt2, 1, layer, x)[2]
    assert accounted(layer, x, y).report()["interaction_share"] == pytest.approx(parts["interaction"], rel=1e-3)


@pytest.mark.parametrize("fields", [{}, {"skip": True}])
def test_a_transcoder_is_all_gate_and_its_skip_stands_apart(gpt2, fields):
    layer = layer_for(gpt2, 1, "transcoder", **fields)
    x, y = activations(gpt2, 1, layer)
    found = accounted(layer, x, y).report()
    assert max(found["dense_share"], found["interaction_share"]) < 1e-9
    assert found["gate_share"] > 0.05 and found["stable_rank"] == pytest.approx(1)
    assert (found["skip_share"] > 0.01) if fields else found["skip_share"] == pytest.approx(0, abs=1e-9)
    with torch.no_grad():
        code = layer.encode(x)
        assert torch.equal(layer.decode(x, code, layer.hidden(x).mean(0)), layer.decode(x, code))


def test_tokens_where_the_stored_constant_answers_are_left_out(gpt2):
    layer = layer_for(gpt2, 1, bos_constant=True)
    x, y = activations(gpt2, 1, layer)
    layer.store_bos(x[3], 1e4 * y[3])
    rest = torch.arange(TOKENS) != 3
    assert accounted(layer, x, y).report() == pytest.approx(accounted(layer, x[rest], y[rest]).report())


def test_a_dense_mlp_in_disguise_is_all_dense(gpt2):
    """An MxD that is the base MLP: one expert always on."""
    layer = layer_for(gpt2, 1)
    layer.copy_base(gpt2.mlp_weights(1))
    x, y = activations(gpt2, 1, layer)
    found = accounted(layer, x, y).report()
    assert found["dense_share"] == pytest.approx(1)
    assert max(found["gate_share"], found["interaction_share"]) < 1e-9
    assert found["nmse_mean_gate"] == pytest.approx(0, abs=1e-9) and found["nmse_fixed_directions"] > 0.01


def test_a_transcoder_in_disguise_is_all_gate_though_its_rank_is_full(gpt2):
    """An MxD whose ``z D`` is the same for every token."""
    layer = layer_for(gpt2, 1)
    with torch.no_grad():
        for name, parameter in layer.encoder.named_parameters():  # hidden unit 0: weights 0, biases 1
            parameter[0] = float("bias" in name)
        constant = layer.encoder(torch.zeros(1, layer.config.d_in))[0, 0]
        layer.decoder.copy_(1e-4 * torch.randn(layer.decoder.shape))
        layer.decoder[0] = 1 / constant
    x, y = activations(gpt2, 1, layer)
    found = accounted(layer, x, y).report()
    assert found["gate_share"] == pytest.approx(1, abs=1e-2) and found["interaction_share"] < 1e-4
    assert found["nmse_fixed_directions"] == pytest.approx(float(accounted_error(layer, x, y)), rel=1e-2)
    assert found["stable_rank"] == pytest.approx(1, abs=1e-2)


def accounted_error(layer, x, y):
    from mxd.layers.losses import normalized_mse

    with torch.no_grad():
        return normalized_mse(layer(x), y)


def test_the_stable_rank_is_of_units_that_were_active(gpt2, monkeypatch):
    """Of the first so many; an expert with the energy in one direction has 1, an orthogonal one its width."""
    monkeypatch.setattr(module, "STABLE_RANKED", 2)
    layer = layer_for(gpt2, 1)
    with torch.no_grad():
        layer.gate.zero_()
        layer.gate_bias.copy_(torch.tensor([0.0, 1, 0, 1, 1] + [0] * (layer.num_units - 5)))
        layer.decoder.zero_()
        layer.decoder[:32] = torch.eye(32)
        layer.expert_scale.fill_(1e-6)
        layer.expert_scale[1] = 1
        layer.expert_scale[3, 0] = 1
        layer.expert_scale[4] = 100
    x, y = activations(gpt2, 1, layer)
    assert accounted(layer, x, y).stable_rank() == pytest.approx((32 + 1) / 2, rel=1e-4)
    layer.gate_bias.data.zero_()
    assert accounted(layer, x, y).stable_rank() == 0


def test_the_worked_example_of_the_docs():
    """docs/evaluation.md: one expert, one hidden unit, four tokens; a in {0, 2} and z D in {1, 3} independently."""
    layer = MxDConfig(
        d_in=2, d_out=1, hidden=1, num_units=1, activation="relu", glu=False, sparsity=TopKConfig(k=1)
    ).build()
    with torch.no_grad():
        layer.gate.copy_(torch.tensor([[1.0, 0]]))
        layer.encoder.weight.copy_(torch.tensor([[0.0, 1]]))
        layer.expert_scale.fill_(1)
        layer.decoder.fill_(1)
    x = torch.tensor([[0.0, 1], [0, 3], [2, 1], [2, 3]])
    assert layer(x).flatten().tolist() == [0, 0, 2, 6]
    found = accounted(layer, x, torch.tensor([[1.0], [1], [2], [6]]), batch=3).report()
    shares = [found[f"{name}_share"] for name in ("gate", "dense", "interaction", "skip")]
    assert shares == pytest.approx([2 / 3, 1 / 6, 1 / 6, 0])
    assert found["nmse_fixed_directions"] == pytest.approx((1 / 1 + 1 / 1 + 4 / 2 + 4 / 6) / 4)  # 0, 0, 4, 4
    assert found["nmse_mean_gate"] == pytest.approx((0 / 1 + 4 / 1 + 1 / 2 + 9 / 6) / 4)  # 1, 3, 1, 3
    assert found["routed_share"] == pytest.approx((1 + 9 + 1 + 9) / 40)


def test_energy_is_about_the_mean():
    energy = Energy()
    assert energy.value == 0
    rows = torch.randn(20, 3) + 5
    for part in rows.split(6):
        energy.see(part)
    assert energy.value == pytest.approx(centred(rows.double().numpy()))


def test_effective_units_of_known_codes() -> None:
    codes = torch.tensor([[1.0, 1, 1, 1], [5, 0, 0, 0], [0, 0, 0, 0]])
    assert effective_units(codes) == pytest.approx([4, 1, 0])
