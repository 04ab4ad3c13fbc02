"""Product keys: gates that no ``[N, d]`` matrix describes, codes of pairs, and the kinds of sparsity that choose them.

Unit ``(i, j)`` has number ``i n + j`` and the row ``[first_i ; second_j]``, or ``first_i + second_j`` where both halves
read the whole input; each head has keys of its own. The oracles materialise everything.
"""

import math

import numpy as np
import pytest
import torch

from mxd.common.errors import MxdError
from mxd.common.processes import Processes
from mxd.evaluation.probes import Units
from mxd.layers import Code, PairCode, parse_layer
from mxd.layers.gates import MOST_SCORES, LinearGate, merged
from mxd.layers.product_gate import ProductGate
from mxd.layers.sparsity import PairTopKConfig, ProductQuantileConfig, ProductTopKConfig
from mxd.layers.sparsity.product import ambiguity, uniformity

KEYS, HEADS, K = 5, 2, 2
READS = ["halves", "whole", "query"]


def keys_of(reads):
    """First keys, second keys, and the query."""
    widths = {"halves": (2, 4), "whole": (6, 6), "query": (3, 1)}[reads]
    keys = [torch.randn(HEADS, KEYS, width, dtype=torch.float64) for width in widths]
    return *keys, torch.randn(HEADS, 4, 6, dtype=torch.float64) if reads == "query" else None


@pytest.fixture(params=READS)
def gate(request):
    return ProductGate(*keys_of(request.param), whole=request.param == "whole")


@pytest.fixture
def x():
    return torch.randn(7, 6, dtype=torch.float64)


def materialised(gate, head):
    """All rows of a head, from the definition."""
    rows = []
    for first in gate.first[head]:
        for second in gate.second[head]:
            row = first + second if gate.whole else torch.cat([first, second])
            rows.append(row if gate.query is None else row @ gate.query[head])
    return torch.stack(rows)


def test_scores_rows_and_projections_are_those_of_the_matrix(gate, x):
    for head in range(HEADS):
        weight = materialised(gate, head)
        torch.testing.assert_close(gate.scores(x)[:, head], x @ weight.T)
        torch.testing.assert_close(gate.project(x[0], head), weight @ x[0])
        ids = torch.tensor([3, 24, 0])
        rows, bias = gate.rows(ids, head)
        torch.testing.assert_close(rows, weight[ids])
        assert bias.tolist() == [0, 0, 0]


def test_the_best_pairs_are_those_of_the_whole_grid(gate, x):
    for k in (1, 3, 7, 25):
        scores, units = gate.best_pairs(x, k)
        expected = torch.stack([x @ materialised(gate, head).T for head in range(HEADS)], 1).topk(k)
        torch.testing.assert_close(scores, expected.values)
        assert torch.equal(units, expected.indices)


def test_centred_keys_do_not_see_the_mean(gate, x):
    """And what is orthogonal to what they read of it scores as before."""
    before = gate.scores(x)
    gate.centre(x[0])
    assert gate.scores(x[:1]).abs().max() < 1e-12
    if gate.whole:
        apart = x[1] - (x[1] @ x[0]) / (x[0] @ x[0]) * x[0]
        one = ProductGate(gate.first, gate.second, whole=True).scores(apart[None])
        torch.testing.assert_close(one, before[1:2] - (x[1] @ x[0]) / (x[0] @ x[0]) * before[:1])


def test_scores_too_many_to_form_are_refused(gate, x):
    gate.units = MOST_SCORES
    with pytest.raises(MxdError, match="give fewer tokens at a time"):
        gate.scores(x)


@torch.no_grad()
@pytest.mark.parametrize("heads", [1, 2])
def test_a_probe_is_that_of_the_materialised_matrix(gate, x, heads):
    """With several heads a candidate is a unit of one head."""
    pooled, rows = x.float(), np.arange(7) % 2 == 0
    query = None if gate.query is None else gate.query[:heads].float()
    product = ProductGate(gate.first[:heads].float(), gate.second[:heads].float(), query, gate.whole)
    every = torch.cat([materialised(gate, head) for head in range(heads)]).float()
    one, other = Units(pooled, product), Units(pooled, LinearGate(every, torch.zeros(len(every))))
    torch.testing.assert_close(one.differences(rows, ~rows), other.differences(rows, ~rows), rtol=1e-4, atol=1e-5)
    chosen = torch.tensor([24, 3, len(every) - 1])
    np.testing.assert_allclose(one.columns(chosen), other.columns(chosen), rtol=1e-4, atol=1e-5)
    assert one.named(24) == ({"unit": 24} if heads == 1 else {"unit": 24, "head": 0})


# --- codes ----------------------------------------------------------------------------------------------------------


def halves(tokens=7, heads=HEADS):
    """Activations of halves, some of them zero."""
    values = torch.rand(2, tokens, heads, KEYS, dtype=torch.float64)
    return values * (torch.rand(values.shape) < 0.5)


def pairs_of(first, second):
    """All activations ``[tokens, N]``, pair by pair."""
    found = torch.zeros(len(first), KEYS**2, dtype=first.dtype)
    for i in range(KEYS):
        for j in range(KEYS):
            found[:, i * KEYS + j] = (first[:, :, i] * second[:, :, j]).sum(1)
    return found


@pytest.mark.parametrize("heads", [1, 2, 3, 9])
def test_a_code_of_pairs_answers_what_its_list_says(heads):
    first, second = halves(heads=heads)
    code, expected = PairCode(first.unsqueeze(1), second.unsqueeze(1)), pairs_of(first, second)
    assert code.active_count() == (expected > 0).sum() == (code.activations > 0).sum()
    assert torch.equal(code.active_units(KEYS**2), (expected > 0).any(0))
    units, activations = code.indices[:, 0], code.activations[:, 0]
    torch.testing.assert_close(torch.zeros_like(expected).scatter_add(1, units, activations), expected)
    for row, active in zip(units, activations, strict=True):  # a code is a set
        assert len(set(row[active > 0].tolist())) == int((active > 0).sum())
    empty = PairCode(first[:0], second[:0])
    assert (empty.active_count(), len(empty.activations)) == (0, 0)


def test_merged_lists_add_up_equal_units():
    code = merged(torch.tensor([[1.0, 2, 4], [1, 2, 4]]), torch.tensor([[5, 3, 5], [1, 1, 1]]))
    assert code.indices.tolist() == [[3, 5, 5], [1, 1, 1]]
    assert code.activations.tolist() == [[2, 5, 0], [7, 0, 0]]


# --- kinds ----------------------------------------------------------------------------------------------------------


def test_the_largest_halves_with_a_softmax(gate, x):
    code = ProductTopKConfig(heads=HEADS, k=K).build(KEYS**2)(x, gate)
    for scores, got in zip(gate.half_scores(x), (code.first, code.second), strict=True):
        for t in range(7):
            for h in range(HEADS):
                order = scores[t, h].argsort(descending=True)[:K]
                expected = torch.zeros(KEYS, dtype=torch.float64)
                expected[order] = scores[t, h, order].exp() / scores[t, h, order].exp().sum()
                torch.testing.assert_close(got[t, h], expected)
    torch.testing.assert_close(code.activations.sum(1), torch.full((7,), float(HEADS), dtype=torch.float64))


def test_pairs_chosen_by_several_heads_add_up(gate, x):
    gate.second, gate.first = gate.second.clone(), gate.first.clone()
    gate.first[1], gate.second[1] = gate.first[0], 1.1 * gate.second[0]  # heads that agree often
    code = PairTopKConfig(heads=HEADS, k=3).build(KEYS**2)(x, gate)
    expected = torch.zeros(7, KEYS**2, dtype=torch.float64)
    for t in range(7):
        for h in range(HEADS):
            best = gate.scores(x)[t, h].topk(3)
            expected[t, best.indices] += best.values.softmax(0)
    assert ((expected > 0).sum(1) < 6).any()
    torch.testing.assert_close(torch.zeros_like(expected).scatter_add(1, code.indices, code.activations), expected)


def quantile(k, keys, tokens):
    """The module, and a gate whose scores are normal, of mean 3 and standard deviation 2 in the first head."""
    module = ProductQuantileConfig(heads=HEADS, k=k).build(keys**2).double()
    first, second = (torch.randn(HEADS, keys, 64, dtype=torch.float64) / 8 for _ in range(2))
    mean = torch.zeros(64).double()
    mean[0] = 4.0
    for keys_of_side in (first, second):
        keys_of_side[..., 0] = 0
        keys_of_side[0] *= 2
        keys_of_side[0, :, 0] = 0.75
    return module, ProductGate(first, second, whole=True), torch.randn(tokens, 64, dtype=torch.float64) + mean


def test_the_quantile_router_keeps_about_k_of_normal_scores_and_always_one():
    module, gate, x = quantile(8, 64, 500)
    code = module.train()(x, gate)
    for half in (code.first, code.second):
        kept = (half > 0).sum(-1).double()
        # binomial, inflated for keys' own norms and means, which the 64 keys of a head share with all tokens
        assert abs(kept.mean() - 8) < 1.0
        assert kept.min() >= 1
        torch.testing.assert_close(half.sum(-1), torch.ones(500, HEADS, dtype=torch.float64))
    few, gate, x = quantile(1, 1000, 50)
    assert ((few.train()(x, gate).first > 0).sum(-1) == 1).any()
    assert ((few(x, gate).first > 0).sum(-1) >= 1).all()


def test_the_quantile_router_normalises_by_its_moments():
    module, gate, x = quantile(8, 64, 500)
    scores = gate.half_scores(x)
    before = module.eval()(x, gate)
    assert module.mean.abs().max() == 0 and (module.variance == 1).all()
    normalised = scores[0] / math.sqrt(1 + 1e-5)
    kept = normalised >= normalised.amax(-1, keepdim=True).clamp_max(1.1503493803760083)  # Phi^-1(1 - 8 / 64)
    assert torch.equal(before.first > 0, kept)
    module.train()(x, gate)
    means = torch.stack([s.mean((0, 2)) for s in scores])
    variances = torch.stack([s.transpose(0, 1).flatten(1).var(-1, correction=0) for s in scores])
    torch.testing.assert_close(module.mean, 0.1 * means)
    torch.testing.assert_close(module.variance, 0.9 + 0.1 * variances)
    torch.testing.assert_close(means[:, 0], torch.full((2,), 3.0).double(), rtol=0, atol=0.2)
    assert not torch.equal(module.eval()(x, gate).first, before.first)


class Two(Processes):
    """Two processes of which this is one: the other's tensors come from a list."""

    def __new__(cls, others):
        made = object.__new__(cls)
        object.__setattr__(made, "others", list(others))
        return made

    def __init__(self, others):
        super().__init__(world=2)

    def average(self, tensors):
        for tensor in tensors:
            tensor.add_(self.others.pop(0)).div_(2)


def test_processes_share_their_moments_and_their_mean_activations():
    module, gate, x = quantile(8, 64, 500)
    module.train()
    whole, (scores, _) = module(x, gate), gate.half_scores(x)
    parts = scores[250:].mean((0, 2)), (scores[250:] - scores.mean((0, 2)).unsqueeze(-1)).square().mean((0, 2))
    module.processes = Two(parts)
    torch.testing.assert_close(module.activations(scores[:250], 0), whole.first[:250])

    mine = whole.first[:250].clone().requires_grad_()
    module.processes = Two([whole.first[250:].mean(0), whole.second[250:].mean(0)])
    measured = module.measures(PairCode(mine, whole.second[:250]))
    together = whole.first.clone().requires_grad_()
    module.processes = Processes()
    expected = module.measures(PairCode(together, whole.second))
    torch.testing.assert_close(measured["uniformity"], expected["uniformity"])
    measured["uniformity"].backward()
    expected["uniformity"].backward()
    # the group averages gradients afterwards, so a part's counts twice
    torch.testing.assert_close(mine.grad, 2 * together.grad[:250])


def test_uniformity_and_ambiguity():
    n = 512
    even = torch.full((4, 3, n), 1 / n, dtype=torch.float64)
    assert uniformity(even.mean(0)).item() == pytest.approx(math.log(n))
    assert ambiguity(even).item() == pytest.approx(1 - 1 / n)
    fixed = torch.zeros(4, 3, n, dtype=torch.float64)
    fixed[..., 7] = 1
    assert uniformity(fixed.mean(0)) > 2 * math.log(n)
    assert ambiguity(fixed) == 0
    spread = torch.eye(n, dtype=torch.float64).unsqueeze(1)
    assert uniformity(spread.mean(0)).item() == pytest.approx(math.log(n))
    assert ambiguity(spread) == 0


def test_the_penalty_weighs_both(gate, x):
    code = PairCode(*halves())
    measures = ProductTopKConfig(heads=HEADS, k=K).build(KEYS**2).measures(code)
    means = [half.mean(0).clamp_min(1e-12).log().mean() for half in (code.first, code.second)]
    peaks = [(1 - half.max(-1).values).mean() for half in (code.first, code.second)]
    torch.testing.assert_close(measures["uniformity"], -(means[0] + means[1]) / 2)
    torch.testing.assert_close(measures["ambiguity"], (peaks[0] + peaks[1]) / 2)
    for weight in (0, 0.5):
        penalty = (
            ProductTopKConfig(heads=HEADS, k=K, balance=weight)
            .build(KEYS**2)
            .penalty(code, *2 * [lambda: torch.ones(25)])
        )
        torch.testing.assert_close(penalty, weight * sum(measures.values()))


@pytest.mark.parametrize("method", ["monet", "peer"])
def test_the_number_of_units_is_a_square(method):
    with pytest.raises(MxdError, match=r"num_units = 9,000 is not a square.*give 8,836 or 9,025"):
        parse_layer({"method": method, "num_units": 9000})


@pytest.mark.parametrize("method", ["monet", "peer"])
def test_other_kinds_of_sparsity_are_refused(method):
    with pytest.raises(MxdError, match=r"sparsity topk does not work with .*; choose p"):
        parse_layer({"method": method, "sparsity": {"kind": "topk", "k": 2}})


def test_kinds_for_product_keys_are_refused_elsewhere():
    with pytest.raises(MxdError, match="pair_topk does not work with TC"):
        parse_layer({"method": "transcoder", "sparsity": {"kind": "pair_topk"}})


def test_masks_and_parts_go_through_the_list():
    first, second = halves()
    code, off = PairCode(first, second), torch.rand(KEYS**2) < 0.5
    masked = code.without(off)
    assert type(masked) is Code
    got = torch.zeros(7, KEYS**2).double().scatter_add(1, masked.indices, masked.activations)
    torch.testing.assert_close(got, pairs_of(first, second).masked_fill(off, 0))
    kept = torch.arange(7) % 2 == 0
    torch.testing.assert_close(code.at(kept).first, first[kept])
