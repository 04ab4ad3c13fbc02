"""Products with experts' weights are those of dense tensors, and so are their gradients."""

import pytest
import torch

from mxd.ops import Selection, bilinear, experts_into_rows, grouped_linear, rows_into_experts

T, N, K, D, O = 6, 5, 3, 4, 2  # noqa: E741
DOUBLE = {"dtype": torch.float64}


@pytest.fixture
def rows():
    torch.manual_seed(0)
    return torch.randn(T, D, **DOUBLE, requires_grad=True)


@pytest.fixture
def weight():
    return torch.randn(N, D, O, **DOUBLE, requires_grad=True)


@pytest.fixture
def code(rows):
    """Different units for each token; unit 2 at none."""
    indices = torch.stack([torch.tensor([0, 1, 3, 4])[torch.randperm(4)[:K]] for _ in range(T)])
    return torch.randn(T, K, **DOUBLE, requires_grad=True), indices


def dense(values, indices, rows, weight):
    """The sum over all units for each token, one at a time."""
    terms = [sum(v * rows[t] @ weight[n] for v, n in zip(values[t], indices[t], strict=True)) for t in range(len(rows))]
    return torch.stack(terms)


def test_grouped_products_and_their_gradients(rows, weight, code):
    values, indices = code
    inputs = (values, rows, weight)
    got, expected = grouped_linear(values, indices, rows, weight), dense(values, indices, rows, weight)
    torch.testing.assert_close(got, expected)
    upstream = torch.randn_like(got)
    found, true = (torch.autograd.grad(out, inputs, upstream) for out in (got, expected))
    torch.testing.assert_close(found, true)
    assert torch.equal(found[2][2], torch.zeros(D, O, **DOUBLE))  # of a unit that no token has


def test_rows_go_into_experts_and_back(rows, weight, code):
    """States in the middle, half as wide as rows: each is a product, sorted by unit; and so are all gradients."""
    values, indices = code
    back, selection = torch.randn(N, D, O, **DOUBLE, requires_grad=True), Selection()
    order = selection.by_unit(indices, N).order
    states = rows_into_experts(rows, weight.mT, indices, selection)
    tokens, units = order // K, indices.flatten()[order]
    torch.testing.assert_close(states, torch.einsum("ed,edo->eo", rows[tokens], weight[units]))
    assert units.tolist() == sorted(indices.flatten().tolist())
    got = experts_into_rows(states.sin() * values.flatten()[order].unsqueeze(1), back.mT, indices, selection)
    between = torch.einsum("td,tkdo->tko", rows, weight[indices]).sin() * values.unsqueeze(2)
    expected = torch.einsum("tko,tkdo->td", between, back[indices])
    torch.testing.assert_close(got, expected)
    inputs, upstream = (values, rows, weight, back), torch.randn_like(got)
    found, true = (torch.autograd.grad(out, inputs, upstream) for out in (got, expected))
    torch.testing.assert_close(found, true)
    assert torch.equal(found[3][2], torch.zeros(D, O, **DOUBLE))


def test_a_selection_is_sorted_once(rows, weight, code, monkeypatch):
    values, indices = code
    selection = Selection()
    plan = selection.by_unit(indices, N)
    monkeypatch.setattr(torch, "bincount", None)  # sorting again would fail
    grouped_linear(values, indices, rows, weight, selection).sum().backward()
    assert selection.by_unit(indices, N) is plan


def test_grouped_products_of_no_tokens(weight):
    rows, values = torch.empty(0, D, **DOUBLE), torch.empty(0, K, **DOUBLE, requires_grad=True)
    out = grouped_linear(values, torch.empty(0, K, dtype=torch.int64), rows, weight)
    assert out.shape == (0, O)
    out.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("tile", [1, 2 * 3 * D, 2**24])
def test_a_bilinear_map_and_its_gradients(tile, rows, monkeypatch):
    """In tiles of 1, 2 and all tokens."""
    monkeypatch.setattr("mxd.ops.experts.TILE", tile)
    left = torch.randn(T, 3, **DOUBLE, requires_grad=True)
    core = torch.randn(3, D, O, **DOUBLE, requires_grad=True)
    got, expected = bilinear(left, rows, core), torch.einsum("tp,tq,pqr->tr", left, rows, core)
    torch.testing.assert_close(got, expected)
    upstream = torch.randn_like(got)
    found, true = (torch.autograd.grad(out, (left, rows, core), upstream) for out in (got, expected))
    torch.testing.assert_close(found, true)
    assert bilinear(left[:0], rows[:0], core).shape == (0, O)
