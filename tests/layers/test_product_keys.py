"""The contract carries layers that no ``[N, d]`` matrix describes: a toy with product keys, heads and normalised gates.

Unit ``(i, j)`` has number ``i n + j`` and the row ``[first_i ; second_j]``; its score is the sum of the halves'. Each
head has keys of its own. Among the chosen of each half the activations are a softmax, so those of a token add up to the
number of heads. The oracles materialise everything.
"""

from typing import Literal, cast

import numpy as np
import pytest
import torch
from torch import nn

from mxd.common.errors import MxdError
from mxd.evaluation.probes import Units
from mxd.layers import Code, MLPShape, PairCode, ReplacementConfig, ReplacementLayer
from mxd.layers.base import code_product, linear_init, zeros
from mxd.layers.gates import MOST_SCORES, Gate, LinearGate
from mxd.layers.sizing import size, transcoder_params
from mxd.layers.sparsity import Sparsity, SparsityConfig

HALVES, HEADS, K = 5, 2, 2


class ProductGate(Gate):
    """Scores of all pairs of halves, for each head; without biases."""

    def __init__(self, first, second):
        self.first, self.second = first, second  # [heads, n, d / 2]
        self.heads, self.halves = first.shape[:2]
        self.units = self.halves**2

    def half_scores(self, x):
        one, other = x.chunk(2, dim=-1)
        return [torch.einsum("td,hnd->thn", *pair) for pair in ((one, self.first), (other, self.second))]

    def top(self, x, k, candidates, selection):
        raise NotImplementedError("its sparsity chooses halves")

    def rows(self, ids, head=0):
        i, j = ids // self.halves, ids % self.halves
        weight = torch.cat([self.first[head, i], self.second[head, j]], dim=-1)
        return weight, weight.new_zeros(len(ids))

    def project(self, v, head=0):
        one, other = v.chunk(2)
        return ((self.first[head] @ one).unsqueeze(1) + (self.second[head] @ other).unsqueeze(0)).flatten()

    def centre(self, mean_in):
        raise NotImplementedError

    def _scores(self, x):
        one, other = self.half_scores(x)
        return (one.unsqueeze(-1) + other.unsqueeze(-2)).flatten(2)


class HalvesConfig(SparsityConfig):
    """The ``k`` largest halves of each side, softmaxed over a running scale."""

    kind: Literal["halves"] = "halves"
    k: int = K

    @property
    def max_k(self):
        return None

    @property
    def slug(self):
        return f"halves{self.k}"

    def build(self, units):
        return Halves(self.k)


class Halves(Sparsity):
    """A normalised gate: divides scores by their running standard deviation, a buffer."""

    def __init__(self, k):
        super().__init__()
        self.k = k
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x, gate):
        one, other = cast(ProductGate, gate).half_scores(x)
        if self.training:
            self.scale.lerp_(torch.cat([one, other]).detach().std(), 0.1)
        return PairCode(*(self.chosen(scores / self.scale) for scores in (one, other)))

    def chosen(self, scores):
        kept = scores >= scores.topk(self.k, dim=-1).values[..., -1:]
        return torch.where(kept, scores, -torch.inf).softmax(-1)

    def penalty(self, code, unit_norms, factor_norms):
        return code.first.square().mean()  # the halves' own: a penalty sees the code that the layer made


class ToyConfig(ReplacementConfig):
    """``halves`` is what sizing solves for; ``num_units`` is its square."""

    method: Literal["toy"] = "toy"
    halves: int | None = None
    sparsity: HalvesConfig = HalvesConfig()

    @property
    def label(self):
        return "Toy"

    @property
    def layer_params(self):
        d, o, n = self.d_in or 0, self.d_out or 0, self.halves or 0
        return HEADS * n * d + n * n * o + o

    def resolve(self, mlp):
        return self.with_defaults(d_in=mlp.d_in, d_out=mlp.d_out)

    def paper_units(self, width):
        return width

    def sized(self, budget):
        counts = {n: self.model_copy(update={"halves": n}).learned_params for n in range(1, 100)}
        n = min(counts, key=lambda n: abs(counts[n] - budget))
        return self.model_copy(update={"halves": n, "num_units": n * n})

    def _make(self):
        return Toy(self)


class Toy(ReplacementLayer):
    """Pairs of halves, each adding a fixed direction."""

    def __init__(self, config):
        super().__init__(config)
        n, d, o = config.halves, config.d_in, config.d_out
        self.first = nn.Parameter(torch.randn(HEADS, n, d // 2))
        self.second = nn.Parameter(torch.randn(HEADS, n, d - d // 2))
        self.decoder = linear_init(n * n, o, fan_in=n)
        self.unused = zeros(0)

    @property
    def gates(self):
        return ProductGate(self.first, self.second)

    def _unit_output(self, n, x):
        return self.decoder[n].expand(*x.shape[:-1], -1)

    def unit_weight(self, n):
        return self.decoder[n : n + 1]

    def unit_norms(self):
        return self.decoder.norm(dim=-1)

    def factor_norms(self):
        return self.unit_norms()

    def _hidden(self, x):
        return x.new_empty(len(x), 0)

    def _decode(self, x, code, hidden):
        if isinstance(code, PairCode):  # without forming the list
            table = self.decoder.unflatten(0, (self.config.halves, self.config.halves))
            return torch.einsum("thi,thj,ijo->to", code.first, code.second, table) + self.bias
        return code_product(code, self.decoder) + self.bias


@pytest.fixture
def layer():
    config = ToyConfig(d_in=6, d_out=3, halves=HALVES, num_units=HALVES**2)
    torch.manual_seed(0)
    return config.build().double().eval()


@pytest.fixture
def x():
    return torch.randn(7, 6, dtype=torch.float64)


def materialised(layer, head):
    """All rows of a head's gate, from the definition."""
    pairs = [(i, j) for i in range(HALVES) for j in range(HALVES)]
    return torch.stack([torch.cat([layer.first[head, i], layer.second[head, j]]) for i, j in pairs]).detach()


def dense(layer, x):
    """All activations ``[tokens, N]``, pair by pair."""
    gate, found = layer.gates, torch.zeros(len(x), HALVES**2, dtype=x.dtype)
    one, other = gate.half_scores(x)
    for h in range(HEADS):
        for t in range(len(x)):
            halves = []
            for scores in (one[t, h], other[t, h]):
                top = scores.topk(K).indices
                value = torch.zeros(HALVES, dtype=x.dtype)
                value[top] = torch.exp(scores[top]) / torch.exp(scores[top]).sum()
                halves.append(value)
            found[t] += torch.outer(*halves).flatten()
    return found


def test_scores_rows_and_projections_are_those_of_the_matrix(layer, x):
    for head in range(HEADS):
        weight = materialised(layer, head)
        torch.testing.assert_close(layer.gates.scores(x)[:, head], x @ weight.T)
        torch.testing.assert_close(layer.gates.project(x[0], head), weight @ x[0])
        ids = torch.tensor([3, 24, 0])
        torch.testing.assert_close(layer.gates.rows(ids, head)[0], weight[ids])
    both = torch.stack([x @ materialised(layer, head).T for head in range(HEADS)])
    torch.testing.assert_close(layer.pre_activations(x), both.amax(0))


def test_scores_too_many_to_form_are_refused(layer, x):
    gate = layer.gates
    gate.units = MOST_SCORES
    with pytest.raises(MxdError, match="give fewer tokens at a time"):
        gate.scores(x)


def test_the_code_answers_without_its_list_what_its_list_says(layer, x):
    code, expected = layer.encode(x.view(7, 1, 6)), dense(layer, x)
    assert isinstance(code, PairCode) and code.first.shape == (7, 1, HEADS, HALVES)
    listed = torch.zeros_like(expected).scatter_add(1, code.indices[:, 0], code.activations[:, 0])
    torch.testing.assert_close(listed, expected)
    assert code.active_count() == (expected > 0).sum() == (code.activations > 0).sum()
    assert torch.equal(code.active_units(25), (expected > 0).any(0))
    for row in range(7):  # a code is a set
        active = code.indices[row, 0][code.activations[row, 0] > 0].tolist()
        assert len(set(active)) == len(active)
    torch.testing.assert_close(expected.sum(1), torch.full((7,), float(HEADS), dtype=torch.float64))


@pytest.mark.parametrize("limit", [1, 2**26])
def test_the_list_does_not_depend_on_how_many_tokens_are_listed_at_a_time(layer, x, limit, monkeypatch):
    monkeypatch.setattr("mxd.layers.gates.LISTED", limit)
    code = layer.encode(x)
    torch.testing.assert_close(
        torch.zeros(7, 25).double().scatter_add(1, code.indices, code.activations), dense(layer, x)
    )
    assert layer.encode(x[:0]).activations.shape[0] == 0


def test_pairs_and_lists_decode_alike_and_masks_and_steering_go_through_the_code(layer, x):
    code, weight = layer.encode(x), layer.decoder
    torch.testing.assert_close(layer(x), dense(layer, x) @ weight + layer.bias)
    torch.testing.assert_close(layer.decode(x, Code(code.activations, code.indices)), layer(x))
    off = torch.zeros(25, dtype=torch.bool)
    off[int(code.indices[0, 0])] = True
    masked = dense(layer, x).masked_fill(off, 0)
    torch.testing.assert_close(layer.decode(x, code.without(off)), masked @ weight + layer.bias)
    units = torch.stack([layer.unit_output(n, x) for n in range(25)], -2)
    torch.testing.assert_close(layer(x), layer.bias + (dense(layer, x).unsqueeze(-1) * units).sum(-2))
    kept = torch.arange(7) % 2 == 0
    torch.testing.assert_close(layer.decode(x[kept], code.at(kept)), layer(x)[kept])


def test_running_statistics_are_state_that_only_training_changes(layer, x):
    layer(x)
    assert layer.sparsity.scale == 1
    layer.train()(x)
    assert layer.sparsity.scale != 1
    other = layer.config.build().double().eval()
    other.load_state_dict(layer.state_dict(), strict=True)
    torch.testing.assert_close(other(x), layer.eval()(x))
    layer.train()
    code = layer.encode(x)
    (layer.decode(x, code).square().mean() + layer.penalty(code)).backward()
    assert all(p.grad is not None for p in (layer.first, layer.second, layer.decoder))


@pytest.mark.parametrize("expansion", [1, 2, 5])
def test_sizing_solves_for_the_methods_own_field(expansion):
    config = size(ToyConfig().resolve(MLPShape(d_in=6, d_out=3)), expansion)
    budget = transcoder_params(6, 3, 6 * expansion)
    off = {n: abs(config.model_copy(update={"halves": n}).learned_params - budget) for n in range(1, 20)}
    assert off[config.halves] == min(off.values())
    assert config.num_units == config.halves**2
    assert config.num_params == sum(p.numel() for p in config.build().parameters())


@torch.no_grad()
def test_a_probe_is_that_of_the_materialised_matrix(layer, x):
    pooled = x.float()
    product = ProductGate(layer.first[:1].float(), layer.second[:1].float())
    linear = LinearGate(materialised(layer, 0).float(), torch.zeros(25))
    rows = np.arange(7) % 2 == 0
    one, other = Units(pooled, product), Units(pooled, linear)
    torch.testing.assert_close(one.differences(rows, ~rows), other.differences(rows, ~rows))
    chosen = torch.tensor([24, 3, 11])
    np.testing.assert_allclose(one.columns(chosen), other.columns(chosen), rtol=1e-5, atol=1e-6)
    assert one.named(24) == {"unit": 24}


@torch.no_grad()
def test_with_several_heads_a_candidate_is_a_unit_of_one_head(layer, x):
    units, rows = Units(x.float(), layer.float().gates), np.arange(7) % 2 == 0
    both = torch.cat([materialised(layer, head) for head in range(HEADS)])
    expected = x.float() @ both.T
    gap = expected[rows].mean(0) - expected[~rows].mean(0)
    torch.testing.assert_close(units.differences(rows, ~rows), gap, rtol=1e-4, atol=1e-5)
    chosen = torch.tensor([30, 2, 49])
    np.testing.assert_allclose(units.columns(chosen), expected[:, chosen], rtol=1e-4, atol=1e-5)
    assert units.named(30) == {"unit": 5, "head": 1}


def test_a_layer_that_is_not_additive_has_no_unit_outputs(layer, x, monkeypatch):
    """Its units are masked, which needs nothing but a changed code."""
    monkeypatch.setattr(Toy, "additive", False)
    with pytest.raises(MxdError, match=r"a unit of Toy adds no direction of its own .* mask it instead"):
        layer.unit_output(0, x)
    assert layer.decode(x, layer.encode(x).without(torch.ones(25, dtype=torch.bool))).shape == (7, 3)
