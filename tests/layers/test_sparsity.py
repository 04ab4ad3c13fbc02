"""The kinds of sparsity, apart from any method."""

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from mxd.layers import Code, parse_layer
from mxd.layers.gates import LinearGate
from mxd.layers.sparsity import (
    AnySparsity,
    BatchTopKConfig,
    EntmaxConfig,
    GroupMaxConfig,
    JumpReLUConfig,
    RandomKConfig,
    ReLUL1Config,
    SoftmaxConfig,
    TopKConfig,
)
from mxd.layers.transcoder import TranscoderConfig


@pytest.fixture
def gate():
    """Input and gate of 40 units, about half of them positive."""
    return torch.randn(3, 6), LinearGate(torch.randn(40, 6), torch.randn(40))


def all_units(values):
    """The code that lists all units."""
    return Code(values, torch.arange(values.shape[-1]).expand(values.shape), all_units=True)


def draw(sparsity, gate, steps):
    """The K of each of a number of calls."""
    return [sparsity(*gate).activations.shape[-1] for _ in range(steps)]


# --- random K -----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("k", "spread", "low", "high"), [(8, 2, 4, 12), (8, 1, 1, 16), (9, 2, 5, 13), (5, 8, 5, 5)])
def test_random_k_covers_its_range_evenly(gate, k, spread, low, high):
    """``K^`` is uniform on ``{K - K // s, ..., K + K // s}`` (appendix C.2); never below one unit."""
    config = RandomKConfig(k=k, spread=spread)
    drawn = draw(config.build(40).train(), gate, 1000)
    assert set(drawn) == set(range(low, high + 1))
    assert config.max_k == high and config.shown_k == k
    expected = 1000 / (high - low + 1)
    assert all(0.6 * expected < drawn.count(value) < 1.4 * expected for value in set(drawn))


def test_random_k_evaluates_with_k_and_does_not_count(gate):
    sparsity = RandomKConfig(k=8).build(40).eval()
    assert set(draw(sparsity, gate, 20)) == {8}
    assert sparsity.draws == 0
    code, expected = sparsity(*gate), TopKConfig(k=8).build(40)(*gate)
    assert torch.equal(code.activations, expected.activations)
    assert torch.equal(code.indices, expected.indices)


def test_random_k_draws_on_where_the_state_dict_says(gate):
    """A resumed run draws what the uninterrupted one would have, whatever the global generators are at."""
    sparsity = RandomKConfig(k=8).build(40).train()
    first = draw(sparsity, gate, 10)
    state = {name: tensor.clone() for name, tensor in sparsity.state_dict().items()}
    then = draw(sparsity, gate, 10)
    torch.manual_seed(99)
    restored = RandomKConfig(k=8).build(40).train()
    restored.load_state_dict(state)
    assert draw(restored, gate, 10) == then != first
    assert draw(RandomKConfig(k=8).build(40).train(), gate, 10) == first


def test_a_restored_layer_draws_the_same():
    config = TranscoderConfig(d_in=6, d_out=5, num_units=40, sparsity=RandomKConfig(k=16, spread=2))
    layer, other, x = config.build().train(), config.build().train(), torch.randn(4, 6)
    for _ in range(5):
        layer(x)
    other.load_state_dict(layer.state_dict(), strict=True)
    for _ in range(5):
        assert torch.equal(layer.encode(x).indices, other.encode(x).indices)
    assert torch.equal(layer.sparsity.draws, torch.tensor(10))


def test_reading_k_in_evaluation_leaves_the_training_draws_alone(gate):
    """Evaluating in the middle of a run must not change the run."""
    straight, interrupted = (RandomKConfig(k=8).build(40).train() for _ in range(2))
    expected = draw(straight, gate, 6)
    head = draw(interrupted, gate, 3)
    draw(interrupted.eval(), gate, 4)
    assert head + draw(interrupted.train(), gate, 3) == expected


# --- ReLU + L1 ----------------------------------------------------------------------------------------------------


def test_l1_by_hand():
    """Two tokens, ``(1 * 2 + 0) + (3 * 2 + 2 * 5) = 18`` over them, halved by the mean and weighted by 0.1."""
    sparsity = ReLUL1Config(l1=0.1).build(40)
    code = all_units(torch.tensor([[1.0, 0.0], [3.0, 2.0]]))
    norms = (lambda: torch.tensor([2.0, 5.0]), lambda: torch.ones(2) / 2)
    assert sparsity.penalty(code, *norms).item() == pytest.approx(0.9)
    assert ReLUL1Config(l1=0.1, weighting="factor").build(40).penalty(code, *norms).item() == pytest.approx(0.15)
    assert ReLUL1Config(l1=0.1, weighting="none").build(40).penalty(code, *norms).item() == pytest.approx(0.3)


@pytest.mark.parametrize("weighting", ["none", "factor", "norm"])
def test_l1_averages_over_any_number_of_tokens(gate, weighting):
    sparsity, values = ReLUL1Config(l1=0.1, weighting=weighting).build(40), torch.rand(4, 3, 40)
    norms = [(lambda norm: lambda: norm)(torch.rand(40)) for _ in range(2)]
    flat = sparsity.penalty(all_units(values.reshape(12, 40)), *norms)
    torch.testing.assert_close(sparsity.penalty(all_units(values), *norms), flat)
    torch.testing.assert_close(sparsity.penalty(all_units(values.repeat(2, 1, 1)), *norms), flat)


@pytest.mark.parametrize("method", ["transcoder", "mxd", "cp_mumoe", "topk_sae"])
@pytest.mark.parametrize(("weighting", "left"), [("none", 0.5), ("factor", 1.0), ("norm", 1.0)])
def test_l1_cannot_be_escaped_by_scaling_but_without_weights(method, weighting, left, mlp, randomise):
    """Half the gate and twice the row of C (or D, C') are the same function: weighted by norms, it costs the same."""
    fields = {"method": method, "num_units": 40, "sparsity": {"kind": "relu_l1", "l1": 0.1, "weighting": weighting}}
    layer = randomise(parse_layer(fields).resolve(mlp).build())
    x = torch.randn(4, layer.config.d_in, dtype=torch.float64)
    y, penalty = layer(x), layer.penalty(layer.encode(x))
    for parameter in (layer.gates.weight, layer.gates.bias):
        parameter.data /= 2
    own = {"mxd": "expert_scale", "cp_mumoe": "expert_factor"}.get(method, "decoder")
    getattr(layer, own).data *= 2
    torch.testing.assert_close(layer(x), y)
    torch.testing.assert_close(layer.penalty(layer.encode(x)), left * penalty)
    assert penalty > 0


def test_the_factor_is_what_a_unit_has_of_its_own(mlp, randomise):
    """An MxD's shared D scales the norm of a unit's weight, and is no part of its factor."""
    found = {}
    for weighting in ("factor", "norm"):
        fields = {"method": "mxd", "num_units": 40, "sparsity": {"kind": "relu_l1", "weighting": weighting}}
        torch.manual_seed(1)
        layer = randomise(parse_layer(fields).resolve(mlp).build())
        x = torch.randn(4, layer.config.d_in, dtype=torch.float64)
        before = layer.penalty(layer.encode(x))
        layer.decoder.data *= 3
        found[weighting] = (layer.penalty(layer.encode(x)) / before).item()
    assert found == pytest.approx({"factor": 1, "norm": 3})


def test_l1_training_switches_units_off():
    config = TranscoderConfig(d_in=6, d_out=5, num_units=40, sparsity=ReLUL1Config(l1=1.0))
    layer, x = config.build(), torch.randn(64, 6)
    layer.decoder.data.normal_()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    before = (layer.encode(x).activations > 0).float().mean()
    for _ in range(20):
        optimizer.zero_grad()
        layer.penalty(layer.encode(x)).backward()
        optimizer.step()
    assert (layer.encode(x).activations > 0).float().mean() < 0.8 * before


def test_relu_keeps_every_positive_unit(gate):
    x, linear = gate
    code = ReLUL1Config().build(40)(*gate)
    assert code.all_units
    torch.testing.assert_close(code.activations, torch.relu(x @ linear.weight.T + linear.bias))
    assert code.indices.tolist() == [list(range(40))] * 3


# --- configs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "max_k", "slug"),
    [
        (TopKConfig(k=8), 8, "k8"),
        (RandomKConfig(k=8, spread=4), 10, "randomk8"),
        (ReLUL1Config(l1=0.005), None, "l1-0.005"),
        (ReLUL1Config(l1=0.005, weighting="none"), None, "l1-0.005-none"),
        (JumpReLUConfig(), None, "jumprelu"),
        (JumpReLUConfig(l0=16), None, "jumprelu16"),
        (BatchTopKConfig(k=8), None, "batchk8"),
        (GroupMaxConfig(k=8), 8, "groupmax8"),
        (EntmaxConfig(), None, "entmax1.5"),
        (EntmaxConfig(norm="batch"), None, "entmax1.5-batch"),
        (SoftmaxConfig(norm="none"), None, "softmax-none"),
    ],
)
def test_configs(config, max_k, slug):
    assert (config.max_k, config.slug) == (max_k, slug)
    assert config.shown_k == (8 if config.kind == "random_k" else max_k)
    assert TypeAdapter(AnySparsity).validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "topk", "k": 0},
        {"kind": "random_k", "k": 4, "spread": 0},
        {"kind": "relu_l1", "l1": -1.0},
        {"kind": "relu_l1", "weighting": "rows"},
        {"kind": "relu_l1", "k": 4},
        {"kind": "jumprelu", "threshold": 1.0},
        {"kind": "jumprelu", "l0": 0},
        {"kind": "batch_topk", "k": 0},
        {"kind": "entmax", "alpha": 1.3},
        {"kind": "entmax", "norm": "group"},
        {"kind": "topp"},
        {"k": 4},
    ],
)
def test_bad_configs_are_refused(fields):
    with pytest.raises(ValidationError):
        TypeAdapter(AnySparsity).validate_python(fields)
