"""JumpReLU: its thresholds, how they are learned, and the number of active units that training aims at."""

import pytest
import torch

from mxd.common.errors import MxdError
from mxd.config import parse_config
from mxd.layers import Covariance
from mxd.layers.gates import LinearGate
from mxd.layers.sparsity import JumpReLUConfig
from mxd.layers.transcoder import TranscoderConfig

UNITS = 40
NORMS = [lambda: torch.ones(UNITS)] * 2


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
    """Written out token by token: of the activation ``-theta R / eps``, of the count ``-R / eps``, of p the step."""
    sparsity, upstream = built(l0=5, bandwidth=0.4, penalty=0.3).train(), torch.randn(30, UNITS, dtype=torch.float64)
    gate.weight.requires_grad_()
    code = sparsity(x, gate)
    loss = (code.activations * upstream).sum()
    by_value = torch.autograd.grad(loss, [sparsity.threshold, gate.weight], retain_graph=True)
    by_count = torch.autograd.grad(sparsity.penalty(code, *NORMS), [sparsity.threshold, gate.weight], allow_unused=True)
    theta, p = sparsity.threshold.detach(), gate.scores(x).squeeze(1).detach().relu()
    value, count, weight = torch.zeros_like(theta), torch.zeros_like(theta), torch.zeros_like(gate.weight)
    for t in range(30):
        for n in range(UNITS):
            inside = float(abs(p[t, n] - theta[n]) < 0.2)
            value[n] -= theta[n] / 0.4 * inside * upstream[t, n]
            count[n] -= inside / 0.4 * 0.3 / 5 / 30
            weight[n] += float(p[t, n] > theta[n]) * upstream[t, n] * x[t]
    torch.testing.assert_close(by_value, (value, weight))
    torch.testing.assert_close(by_count[0], count)
    assert by_count[1] is None and (value != 0).sum() > 20


def test_the_penalty_is_the_number_of_active_units_over_the_target(x, gate):
    sparsity = built(l0=5, penalty=0.3).train()
    code = sparsity(x, gate)
    active = (code.activations > 0).sum(1).double().mean()
    torch.testing.assert_close(sparsity.penalty(code, *NORMS), 0.3 * active / 5)
    torch.testing.assert_close(code.reshape((5, 6)).active, active)  # what a layer does to its code
    assert sparsity.eval().penalty(sparsity(x, gate), *NORMS) == 0
    assert built().train().penalty(built().train()(x, gate), *NORMS) == 0  # without a target


def test_the_estimate_tends_to_the_derivative_of_the_expected_count():
    """Of normal pre-activations: ``d/dtheta P(p > theta) = -density(theta)``."""
    sparsity = built(l0=5, bandwidth=0.05, penalty=5.0).train()
    p = torch.randn(200_000, 1, dtype=torch.float64).expand(-1, 3)
    sparsity.threshold = torch.nn.Parameter(torch.tensor([0.3, 0.8, 1.5], dtype=torch.float64))
    code = sparsity(p, LinearGate(torch.eye(3).double(), torch.zeros(3).double()))
    sparsity.penalty(code, *NORMS).backward()
    density = torch.distributions.Normal(0.0, 1.0).log_prob(sparsity.threshold.detach()).exp()
    torch.testing.assert_close(sparsity.threshold.grad, -density, rtol=0.05, atol=0)


def test_after_a_step_thresholds_are_not_negative_and_the_weight_follows(x, gate):
    sparsity = built(l0=4, penalty=0.5).train()
    sparsity.threshold.data[:2] = -1.0
    sparsity.begin_step([x[:15], x[15:]], gate)
    active = [float((sparsity(part, gate).activations > 0).sum(1).double().mean()) for part in (x[:15], x[15:])]
    sparsity.end_step()
    assert sparsity.threshold.data[:2].tolist() == [0, 0] and (sparsity.threshold[2:] > 0).all()
    excess = sum(active) / 2 / 4
    assert excess > 1.2
    assert sparsity.excess.item() == pytest.approx(excess)
    assert sparsity.weight.item() == pytest.approx(0.5 * excess**0.2)
    code = sparsity(x, gate)
    active = (code.activations > 0).sum(1).double().mean().item()
    assert sparsity.penalty(code, *NORMS).item() == pytest.approx(0.5 * excess**2.2 * active / 4)
    weight = sparsity.weight.clone()
    sparsity.eval().begin_step([x], gate)
    sparsity(x, gate)
    sparsity.end_step()
    assert sparsity.weight == weight  # evaluation changes nothing


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
def test_training_reaches_the_target():
    config = TranscoderConfig(d_in=8, d_out=8, num_units=64, sparsity=JumpReLUConfig(l0=6))
    layer, map_ = config.build().train(), torch.randn(8, 8)
    layer.initialise(torch.zeros(8), torch.zeros(8), "centred", Covariance(*[2 * torch.eye(8).double()] * 3))
    optimizer, counts = torch.optim.Adam(layer.parameters(), 0.01), []
    for _ in range(600):
        x = torch.randn(256, 8)
        layer.begin_step([x])
        code = layer.encode(x)
        loss = layer.loss(x, code, (x @ map_).relu())[1] + layer.penalty(code)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        layer.sparsity.end_step()
        counts.append(float(code.active_count()) / 256)
    assert abs(sum(counts[-50:]) / 50 - 6) < 0.6


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
