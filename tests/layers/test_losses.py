"""The training objective against an oracle in NumPy."""

import numpy as np
import pytest
import torch

from mxd.layers.losses import normalize, normalized_mse, squared_error


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def oracle(prediction, target):
    """Equation of section 3.1, token by token: ``||y - y^||^2 / (||y|| d)``, the norm not squared."""
    y, p = (np.asarray(t.double()).reshape(-1, t.shape[-1]) for t in (target, prediction))
    terms = [np.sum((a - b) ** 2) / (np.sqrt(np.sum(a**2)) * len(a)) for a, b in zip(y, p, strict=True)]
    return sum(terms) / len(terms)


@pytest.mark.parametrize("shape", [(1,), (5,), (7, 5), (2, 3, 5)])
def test_it_is_the_oracle(shape):
    prediction, target = torch.randn(shape), 3 * torch.randn(shape)
    got = normalized_mse(prediction, target)
    assert got.shape == ()
    assert got.item() == pytest.approx(oracle(prediction, target), rel=1e-5)


def test_by_hand():
    """y = (3, 4), y^ = (0, 4): ``9 / (5 * 2)``; y = (0, 2), y^ = (0, 0): ``4 / (2 * 2)``; their mean."""
    target, prediction = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[0.0, 4.0], [0.0, 0.0]])
    assert normalized_mse(prediction, target).item() == pytest.approx((0.9 + 1.0) / 2)


def test_it_is_zero_exactly_at_perfect_reconstruction():
    target = torch.randn(7, 5)
    assert normalized_mse(target.clone(), target) == 0
    assert normalized_mse(target + 1e-3, target) > 0


def test_the_norm_is_not_squared():
    """So the loss scales as its inputs do: not invariant (squared norm), not quadratic (no norm)."""
    prediction, target = torch.randn(7, 5), torch.randn(7, 5)
    base = normalized_mse(prediction, target)
    torch.testing.assert_close(normalized_mse(10 * prediction, 10 * target), 10 * base)


def test_each_token_weighs_by_its_own_norm():
    """Not by the norm of the batch: the loss of a batch is the mean of its tokens' losses."""
    prediction, target = torch.randn(7, 5), torch.randn(7, 5) * torch.logspace(-2, 2, 7).unsqueeze(1)
    tokens = torch.stack([normalized_mse(p, t) for p, t in zip(prediction, target, strict=True)])
    torch.testing.assert_close(normalized_mse(prediction, target), tokens.mean())


def test_a_target_of_norm_zero_is_finite():
    """Loss and gradient, where a bare division would give NaN."""
    target = torch.randn(3, 5)
    target[1] = 0
    prediction = target.clone().requires_grad_()
    loss = normalized_mse(prediction, target)
    loss.backward()
    assert loss == 0
    assert torch.equal(prediction.grad, torch.zeros(3, 5))
    assert normalized_mse(torch.ones(3, 5), target).isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_accumulated_in_float32(dtype):
    """300 numbers near 20: the sum of their squares overflows float16, and bfloat16 has 8 bits."""
    target, prediction = (20 + torch.randn(3, 300)).to(dtype), torch.randn(3, 300).to(dtype)
    loss = normalized_mse(prediction, target)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(oracle(prediction, target), rel=1e-6)


def test_gradient():
    """``2 (y^ - y) / (||y|| d)`` over the tokens."""
    target = torch.randn(3, 4)
    prediction = torch.randn(3, 4, requires_grad=True)
    normalized_mse(prediction, target).backward()
    explicit = 2 * (prediction - target) / (target.norm(dim=-1, keepdim=True) * 4 * 3)
    torch.testing.assert_close(prediction.grad, explicit.detach())


def test_gradients_of_both_arguments_are_those_of_the_formula():
    """The target's too, through the error and through the norm; a second derivative is refused, not wrong."""
    inputs = [torch.randn(2, 3, 4, requires_grad=True) for _ in range(2)]
    formula = ((inputs[0] - inputs[1]).square().mean(-1) / inputs[1].norm(dim=-1)).mean()
    got = torch.autograd.grad(normalized_mse(*inputs), inputs, create_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(formula, inputs))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        got[0].sum().backward()


def test_it_can_be_had_from_the_squared_errors():
    """Which are those of each token, of any leading shape."""
    prediction, target = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    error = squared_error(prediction, target)
    np.testing.assert_allclose(error, ((prediction.numpy() - target.numpy()) ** 2).sum(-1), rtol=1e-5)
    torch.testing.assert_close(normalize(error, target), normalized_mse(prediction, target))
