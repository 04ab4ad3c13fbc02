"""JumpReLU: its thresholds, how they are learned, and the number of active units that training aims at."""

import math

import pytest
import torch

from mxd.common.errors import MxdError
from mxd.config import parse_config
from mxd.layers import Covariance
from mxd.layers.gates import LinearGate
from mxd.layers.sparsity import JumpReLUConfig
from mxd.layers.transcoder import TranscoderConfig

UNITS = 40


@pytest.fixture
def x():
    return torch.randn(30, 6, dtype=torch.float64)


@pytest.fixture
def gate():
    return LinearGate(torch.randn(UNITS, 6, dtype=torch.float64), torch.randn(UNITS, dtype=torch.float64))


def built(**fields):
    sparsity = JumpReLUConfig(**fields).build(UNITS).double()
    sparsity.threshold.data.copy_(torch.rand(UNITS) * 2)
    return sparsity


def test_it_keeps_what_is_above_its_units_threshold(x, gate):
    """Whole, not less the threshold; what is exactly at it is off; a negative threshold is as good as zero."""
    pre = gate.scores(x).squeeze(1)
    sparsity = built()
    token = int(pre[:, 3].argmax())
    sparsity.threshold.data[3], sparsity.threshold.data[4] = pre[token, 3], -5.0
    code = sparsity(x, gate)
    values = code.activations
    assert code.all_units and code.indices.tolist() == [list(range(UNITS))] * 30
    assert torch.equal(values, torch.where((pre > sparsity.threshold) & (pre > 0), pre, 0))
    assert values[token, 3] == 0 < pre[token, 3] and 10 < (values > 0).sum() < (pre > 0).sum()


def test_the_gradients_are_the_papers_formulas(x, gate):
    """Written out token by token: of the activation ``-theta R / eps``, of p the step."""
    sparsity, upstream = built(l0=5, bandwidth=0.4).train(), torch.randn(30, UNITS, dtype=torch.float64)
    gate.weight.requires_grad_()
    code = sparsity(x, gate)
    loss = (code.activations * upstream).sum()
    found = torch.autograd.grad(loss, [sparsity.threshold, gate.weight])
    theta, p = sparsity.threshold.detach(), gate.scores(x).squeeze(1).detach().relu()
    value, weight = torch.zeros_like(theta), torch.zeros_like(gate.weight)
    for t in range(30):
        for n in range(UNITS):
            inside = float(abs(p[t, n] - theta[n]) < 0.2)
            value[n] -= theta[n] / 0.4 * inside * upstream[t, n]
            weight[n] += float(p[t, n] > theta[n]) * upstream[t, n] * x[t]
    torch.testing.assert_close(found, (value, weight))
    assert (value != 0).sum() > 20


def test_the_estimate_tends_to_the_derivative_of_the_expected_activation():
    """Of normal pre-activations: ``d/dtheta E[p (p > theta)] = -theta density(theta)``."""
    sparsity = built(l0=5, bandwidth=0.05).train()
    p = torch.randn(200_000, 1, dtype=torch.float64).expand(-1, 3)
    sparsity.threshold = torch.nn.Parameter(torch.tensor([0.3, 0.8, 1.5], dtype=torch.float64))
    code = sparsity(p, LinearGate(torch.eye(3).double(), torch.zeros(3).double()))
    code.activations.mean(0).sum().backward()
    theta = sparsity.threshold.detach()
    density = torch.distributions.Normal(0.0, 1.0).log_prob(theta).exp()
    torch.testing.assert_close(sparsity.threshold.grad, -theta * density, rtol=0.05, atol=0)


class Others:
    """Processes in which twice as many units are active on average."""

    def average(self, tensors):
        for tensor in tensors:
            tensor *= 1.5


@pytest.mark.parametrize("target", [4, 25])
@pytest.mark.parametrize("many", [False, True])
def test_after_a_step_thresholds_follow_the_target_from_both_sides(x, gate, target, many):
    sparsity = built(l0=target).train()
    sparsity.threshold.data[:2] = 0.01
    before, active = sparsity.threshold.detach().clone(), []
    for part in (x[:15], x[15:]):
        active.append((sparsity(part, gate).activations > 0).sum(1).double().mean().item())
    if many:
        sparsity.processes = Others()
    sparsity.end_step()
    l0 = sum(active) / 2 * (1.5 if many else 1)
    assert (l0 > target) == (target == 4)
    moved = before + 0.1 * math.log(l0 / target) * before.mean()
    torch.testing.assert_close(sparsity.threshold.detach(), moved.clamp_min(0), rtol=1e-6, atol=0)
    assert (sparsity.threshold == 0).any() == (l0 < target)
    after = sparsity.threshold.detach().clone()
    sparsity.end_step()  # nothing was seen since
    sparsity.eval()(x, gate)
    sparsity.end_step()
    assert torch.equal(sparsity.threshold, after)


def test_without_a_target_thresholds_are_only_kept_from_falling_below_zero(x, gate):
    sparsity = built().train()
    sparsity.threshold.data[:2] = -1.0
    before = sparsity.threshold.detach().clamp_min(0)
    sparsity(x, gate)
    sparsity.end_step()
    assert torch.equal(sparsity.threshold, before)


def test_units_begin_active_as_often_as_the_target_asks(x):
    """If inputs are normal: N = 40 and a target of 4 make a tenth of the tokens for each unit."""
    config = TranscoderConfig(d_in=6, d_out=5, num_units=UNITS, sparsity=JumpReLUConfig(l0=4))
    layer, mix, mean = config.build(), torch.randn(6, 6), torch.randn(6)
    read = (mix @ mix.T).double()
    assert config.needs_covariance and not TranscoderConfig().needs_covariance
    for start in ("centred", "paper"):
        layer.initialise(mean, torch.zeros(5), start, Covariance(read, read[:, :5], read[:5, :5]))
        inputs = torch.randn(20_000, 6) @ mix.T + mean
        rates = (layer.encode(inputs).activations > 0).float().mean(0)
        expected = rates if start == "paper" else torch.full((UNITS,), 0.1)  # thresholds are never negative
        torch.testing.assert_close(
            rates.minimum(torch.tensor(0.1)), expected.minimum(torch.tensor(0.1)), atol=0.01, rtol=0
        )
        assert (layer.sparsity.threshold >= 0).all() and rates.max() < 0.11


@pytest.mark.long
@pytest.mark.parametrize("start", [0.5, 1.5], ids=["from above", "from below"])
def test_training_reaches_the_target(start):
    config = TranscoderConfig(d_in=8, d_out=8, num_units=64, sparsity=JumpReLUConfig(l0=6))
    layer, map_ = config.build().train(), torch.randn(8, 8)
    layer.initialise(torch.zeros(8), torch.zeros(8), "centred", Covariance(*[2 * torch.eye(8).double()] * 3))
    layer.sparsity.threshold.data *= start
    optimizer, counts = torch.optim.Adam(layer.parameters(), 0.01), []
    for _ in range(300):
        x = torch.randn(256, 8)
        code = layer.encode(x)
        optimizer.zero_grad()
        layer.loss(x, code, (x @ map_).relu())[1].backward()
        optimizer.step()
        layer.sparsity.end_step()
        counts.append(float(code.active_count()) / 256)
    assert counts[0] > 9 if start < 1 else counts[0] < 4
    assert sum(counts[-50:]) / 50 == pytest.approx(6, rel=0.05)


def test_thresholds_are_parameters_under_the_name_that_files_have():
    config = TranscoderConfig(d_in=6, d_out=5, num_units=UNITS, sparsity=JumpReLUConfig())
    layer = config.build()
    assert "sparsity.threshold" in dict(layer.named_parameters())
    assert [name for name in layer.state_dict() if name.startswith("sparsity.")] == ["sparsity.threshold"]
    assert config.num_params == sum(p.numel() for p in layer.parameters())


def test_without_a_target_it_cannot_be_trained():
    run = {"replacements": [{"method": "transcoder", "sparsity": {"kind": "jumprelu"}}]}
    with pytest.raises(MxdError, match=r"jumprelu without l0 is for imported layers; .* set sparsity.l0"):
        parse_config(run)
    run["replacements"][0]["sparsity"]["l0"] = 8
    assert parse_config(run).replacements[0].sparsity.l0 == 8
