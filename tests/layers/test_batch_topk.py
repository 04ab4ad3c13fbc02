"""BatchTopK: what a step keeps, whatever its parts and lists; the threshold of evaluation."""

import pytest
import torch
from torch import nn

from mxd.layers.gates import Gate, LinearGate
from mxd.layers.sparsity import BatchTopKConfig, TopKConfig
from mxd.ops import Selection

K, UNITS = 3, 60


class Twice:
    """The counts of two processes whose tokens are the same."""

    world = 2

    def add(self, count):
        return 2 * count

    def any(self, flag):
        return flag


@pytest.fixture
def x():
    """20 tokens, of which one would use most of the budget."""
    x = torch.randn(20, 6, dtype=torch.float64)
    x[7] *= 20
    return x


@pytest.fixture
def gate():
    return LinearGate(
        nn.Parameter(torch.randn(UNITS, 6, dtype=torch.float64)), nn.Parameter(torch.randn(UNITS, dtype=torch.float64))
    )


def positive(x, gate):
    return gate.scores(x).squeeze(1).relu()


def flat_topk(x, gate, count):
    """The definition: the ``count`` largest of all tokens and units."""
    p = positive(x, gate)
    values, places = p.flatten().topk(count)
    return torch.zeros_like(p).flatten().scatter(0, places, values).view_as(p)


def dense(code):
    return torch.zeros(len(code.indices), UNITS).double().scatter_add(1, code.indices, code.activations)


def test_a_step_keeps_the_largest_of_all_its_tokens(x, gate):
    """Values and gradients; one token is far beyond the 4 K candidates that lists begin with."""
    code, expected = BatchTopKConfig(k=K).build(UNITS).train()(x, gate), flat_topk(x, gate, 20 * K)
    torch.testing.assert_close(dense(code), expected)
    assert (expected[7] > 0).sum() > 4 * K and code.indices.shape[1] == (expected > 0).sum(1).max() < UNITS
    listed = [indices[values > 0].tolist() for values, indices in zip(code.activations, code.indices, strict=True)]
    assert code.active_count() == 20 * K and all(len(set(row)) == len(row) for row in listed)
    upstream = torch.randn(20, UNITS).double()
    for got, exact in zip(
        torch.autograd.grad((dense(code) * upstream).sum(), [gate.weight, gate.bias]),
        torch.autograd.grad((expected * upstream).sum(), [gate.weight, gate.bias]),
        strict=True,
    ):
        torch.testing.assert_close(got, exact)


@pytest.mark.parametrize("parts", [1, 2, 5, 20])
def test_the_parts_of_a_step_make_no_difference(x, gate, parts):
    sparsity, whole = (BatchTopKConfig(k=K).build(UNITS).train() for _ in range(2))
    chunks = x.chunk(parts)
    sparsity.begin_step(chunks, gate)
    got = torch.cat([dense(sparsity(part, gate)) for part in chunks])
    sparsity.end_step()
    torch.testing.assert_close(got, dense(whole(x, gate)))
    assert sparsity.threshold.item() == pytest.approx(whole.threshold.item(), rel=1e-12)
    assert whole.threshold > 0 and sparsity.steps == 1


def test_one_token_is_topk_and_the_order_of_tokens_is_nothing(x, gate):
    one = BatchTopKConfig(k=K).build(UNITS).train()
    torch.testing.assert_close(dense(one(x[:1], gate)), dense(TopKConfig(k=K).build(UNITS)(x[:1], gate)))
    order = torch.randperm(20)
    torch.testing.assert_close(dense(one(x[order], gate)), dense(one(x, gate))[order])


def test_the_budget_is_that_of_all_processes(x, gate):
    """Two that have the same tokens keep in each what one alone keeps of them."""
    alone, one_of_two = (BatchTopKConfig(k=K).build(UNITS).train() for _ in range(2))
    one_of_two.processes = Twice()
    torch.testing.assert_close(dense(one_of_two(x, gate)), dense(alone(x, gate)))
    assert one_of_two.threshold == alone.threshold


def test_fewer_positive_than_the_budget_are_all_kept(x, gate):
    gate.bias.data -= 60
    sparsity = BatchTopKConfig(k=K).build(UNITS).train()
    code, expected = sparsity(x, gate), positive(x, gate)
    assert 0 < (expected > 0).sum() < 20 * K
    torch.testing.assert_close(dense(code), expected)
    assert sparsity.threshold == 0


def test_widening_multiplies_k_in_training(x, gate):
    sparsity = BatchTopKConfig(k=K).build(UNITS).train()
    sparsity.widening = 2.0
    assert sparsity(x, gate).active_count() == 40 * K


def test_evaluation_keeps_what_is_above_the_mean_of_the_cutoffs(x, gate):
    """The mean is that of all steps with weights that fall by a tenth a step; evaluation does not move it."""
    sparsity, cutoffs = BatchTopKConfig(k=K).build(UNITS).train(), []
    for step in range(5):
        batch = x + step / 10
        sparsity(batch, gate)
        cutoffs.append(positive(batch, gate).flatten().topk(20 * K).values[-1].item())
    weights = [0.9 ** (4 - step) for step in range(5)]
    mean = sum(w * c for w, c in zip(weights, cutoffs, strict=True)) / sum(weights)
    assert sparsity.threshold.item() == pytest.approx(mean, rel=1e-12)
    assert sparsity.threshold.dtype == torch.float64
    code, p = sparsity.eval()(x, gate), positive(x, gate)
    torch.testing.assert_close(dense(code), p * (p > mean))
    assert (dense(code) > 0).sum(1).max() > 4 * K  # lists grow in evaluation, too
    assert sparsity.threshold.item() == pytest.approx(mean, rel=1e-12) and sparsity.steps == 5


def test_a_restored_threshold_goes_on(x, gate):
    straight, first, second = (BatchTopKConfig(k=K).build(UNITS).train() for _ in range(3))
    for step in range(4):
        straight(x + step, gate)
        (first if step < 2 else second)(x + step, gate)
        if step == 1:
            second.load_state_dict(first.state_dict())
    assert torch.equal(straight.threshold, second.threshold) and straight.steps == second.steps == 4


def test_a_gate_without_rows_at_hand(x, gate):
    """What ``Gate.at`` is where a gate has nothing better."""
    ids = torch.randint(UNITS, (20, 4))
    torch.testing.assert_close(Gate.at(gate, x, ids, Selection()), gate.at(x, ids, Selection()))
