"""The kinds of sparsity, apart from any method."""

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from mxd.config import parse_config
from mxd.errors import MxdError
from mxd.layers.sparsity import AnySparsity, JumpReLUConfig, RandomKConfig, ReLUL1Config, TopKConfig
from mxd.layers.transcoder import TranscoderConfig


@pytest.fixture
def gate():
    """Input, weight and bias of 40 units, about half of them positive."""
    return torch.randn(3, 6), torch.randn(40, 6), torch.randn(40)


def draw(sparsity, gate, steps):
    """The K of each of a number of calls."""
    return [sparsity(*gate)[0].shape[-1] for _ in range(steps)]


# --- random K -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "spread", "low", "high"), [(8, 2, 4, 12), (8, 1, 1, 16), (9, 2, 5, 13), (5, 8, 5, 5)])
def test_random_k_covers_its_range_evenly(gate, k, spread, low, high):
    """``K^`` is uniform on ``{K - K // s, ..., K + K // s}`` (appendix C.2); never below one unit."""
    config = RandomKConfig(k=k, spread=spread)
    drawn = draw(config.build(40).train(), gate, 1000)
    assert set(drawn) == set(range(low, high + 1))
    assert config.max_k == high
    expected = 1000 / (high - low + 1)
    assert all(0.6 * expected < drawn.count(value) < 1.4 * expected for value in set(drawn))


def test_random_k_evaluates_with_k_and_does_not_count(gate):
    sparsity = RandomKConfig(k=8).build(40).eval()
    assert set(draw(sparsity, gate, 20)) == {8}
    assert sparsity.draws == 0
    values, indices, _ = sparsity(*gate)
    expected = TopKConfig(k=8).build(40)(*gate)
    assert torch.equal(values, expected[0])
    assert torch.equal(indices, expected[1])


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
    penalty = sparsity.penalty(torch.tensor([[1.0, 0.0], [3.0, 2.0]]), lambda: torch.tensor([2.0, 5.0]))
    assert penalty.item() == pytest.approx(0.9)


def test_l1_averages_over_any_number_of_tokens(gate):
    sparsity, values, norms = ReLUL1Config(l1=0.1).build(40), torch.rand(4, 3, 40), torch.rand(40)
    flat = sparsity.penalty(values.reshape(12, 40), lambda: norms)
    torch.testing.assert_close(sparsity.penalty(values, lambda: norms), flat)
    torch.testing.assert_close(sparsity.penalty(values.repeat(2, 1, 1), lambda: norms), flat)


def test_l1_cannot_be_escaped_by_scaling():
    """Small coefficients with large decoders are the same function: weighted by the norms, they cost the same."""
    config = TranscoderConfig(d_in=6, d_out=5, num_units=40, sparsity=ReLUL1Config(l1=0.1))
    layer, x = config.build(), torch.randn(4, 6)
    layer.decoder.data.normal_()
    y, penalty = layer(x), layer.penalty(layer.encode(x))
    layer.encoder.data /= 8
    layer.encoder_bias.data /= 8
    layer.decoder.data *= 8
    torch.testing.assert_close(layer(x), y)
    torch.testing.assert_close(layer.penalty(layer.encode(x)), penalty)
    assert penalty > 0


def test_l1_training_switches_units_off():
    config = TranscoderConfig(d_in=6, d_out=5, num_units=40, sparsity=ReLUL1Config(l1=1.0))
    layer, x = config.build(), torch.randn(64, 6)
    layer.decoder.data.normal_()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    before = (layer.encode(x).values > 0).float().mean()
    for _ in range(20):
        optimizer.zero_grad()
        layer.penalty(layer.encode(x)).backward()
        optimizer.step()
    assert (layer.encode(x).values > 0).float().mean() < 0.8 * before


def test_relu_keeps_every_positive_unit(gate):
    x, weight, bias = gate
    values, indices, all_units = ReLUL1Config().build(40)(*gate)
    assert all_units
    torch.testing.assert_close(values, torch.relu(x @ weight.T + bias))
    assert indices.tolist() == [list(range(40))] * 3


# --- JumpReLU -----------------------------------------------------------------------------------------------------


def test_jumprelu_keeps_what_is_above_its_units_threshold(gate):
    """Whole, not less the threshold; what is exactly at it is off; a negative threshold is as good as zero."""
    x, weight, bias = gate
    pre = x @ weight.T + bias
    sparsity = JumpReLUConfig().build(40)
    sparsity.threshold.copy_(torch.rand(40))
    sparsity.threshold[3], sparsity.threshold[4] = torch.nn.functional.linear(x, weight, bias)[1, 3].abs(), -5.0
    weight[3], bias[3] = weight[3] * pre[1, 3].sign(), bias[3] * pre[1, 3].sign()
    pre = torch.nn.functional.linear(x, weight, bias)
    values, indices, all_units = sparsity(x, weight, bias)
    assert all_units and indices.tolist() == [list(range(40))] * 3
    assert torch.equal(values, torch.where((pre > sparsity.threshold) & (pre > 0), pre, torch.zeros(())))
    assert values[1, 3] == 0 < pre[1, 3] and 10 < (values > 0).sum() < (pre > 0).sum()


def test_jumprelu_thresholds_are_state_and_not_parameters():
    config = TranscoderConfig(d_in=6, d_out=5, num_units=40, sparsity=JumpReLUConfig())
    layer = config.build()
    assert "sparsity.threshold" in layer.state_dict() and "sparsity.threshold" not in dict(layer.named_parameters())
    assert config.num_params == sum(p.numel() for p in layer.parameters())


def test_jumprelu_cannot_be_trained():
    run = {"replacements": [{"method": "transcoder", "sparsity": {"kind": "jumprelu"}}]}
    with pytest.raises(MxdError, match="jumprelu is for imported layers"):
        parse_config(run)


# --- configs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "max_k", "slug"),
    [
        (TopKConfig(k=8), 8, "k8"),
        (RandomKConfig(k=8, spread=4), 10, "randomk8"),
        (ReLUL1Config(l1=0.005), None, "l1-0.005"),
        (JumpReLUConfig(), None, "jumprelu"),
    ],
)
def test_configs(config, max_k, slug):
    assert (config.max_k, config.slug) == (max_k, slug)
    assert TypeAdapter(AnySparsity).validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "topk", "k": 0},
        {"kind": "random_k", "k": 4, "spread": 0},
        {"kind": "relu_l1", "l1": -1.0},
        {"kind": "relu_l1", "k": 4},
        {"kind": "jumprelu", "threshold": 1.0},
        {"kind": "topp"},
        {"k": 4},
    ],
)
def test_bad_configs_are_refused(fields):
    with pytest.raises(ValidationError):
        TypeAdapter(AnySparsity).validate_python(fields)
