"""The sparse operations against their dense reference: values, every gradient, and the edges.

Codes are compared as dense vectors, since the order of the K chosen units is free.
"""

from itertools import combinations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mxd.ops import Selection, candidate_dtype, reference, sparse, sparse_decode, topk_linear
from mxd.ops.sparse import _topk

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
SHAPES = [  # tokens, d_in, units, k
    (1, 1, 1, 1),
    (7, 5, 11, 3),
    (13, 4, 9, 1),
    (6, 3, 8, 8),
    (33, 16, 70, 10),
    (4, 3, 203, 4),  # three tiles; two stages
    (4, 3, 190, 100),  # more than a tile's units
]
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.float64: {"rtol": 1e-10, "atol": 1e-12}}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def small_tiles(monkeypatch):
    """Make tiles of 3 tokens and about 88 units in float64: a call needs several, the last ones partial."""
    tiles = (3, 3 * 88 * 8)
    monkeypatch.setattr("mxd.ops.sparse.TILES", {"cpu": tiles, "cuda": tiles})


def dense(values, indices, units):
    return values.new_zeros(len(values), units).scatter_add(1, indices, values)


def topk_inputs(tokens, d_in, units, dtype=torch.float64, device="cpu"):
    shapes = [(tokens, d_in), (units, d_in), (units,)]
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


def decode_inputs(tokens, k, units, d_out, dtype=torch.float64, device="cpu"):
    """Random values at random indices, some of them repeated within a row."""
    values = torch.randn(tokens, k, dtype=dtype, device=device)
    indices = torch.randint(units, (tokens, k), device=device)
    return values, indices, torch.randn(units, d_out, dtype=dtype, device=device)


def grads(function, inputs, upstream, wanted):
    leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
    (function(*leaves) * upstream).sum().backward()
    return [x.grad for x in leaves]


def subsets(n):
    return [set(c) for size in range(1, n + 1) for c in combinations(range(n), size)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("tokens", "d_in", "units", "k"), SHAPES)
def test_topk_linear_is_the_reference(tokens, d_in, units, k, dtype, device, small_tiles):
    inputs = topk_inputs(tokens, d_in, units, dtype, device)
    values, indices = topk_linear(*inputs, k)
    assert values.shape == indices.shape == (tokens, k)
    assert values.dtype == dtype
    expected = dense(*reference.topk_linear(*inputs, k), units)
    torch.testing.assert_close(dense(values, indices, units), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("tokens", "d_in", "units", "k"), SHAPES)
def test_topk_linear_gradients_are_the_references(tokens, d_in, units, k, dtype, device, small_tiles):
    """Of x, weight and bias, and each of them is also right where others are frozen (and those get none)."""
    inputs = topk_inputs(tokens, d_in, units, dtype, device)
    upstream = torch.randn(tokens, units, dtype=dtype, device=device)
    for wanted in subsets(3):
        got = grads(lambda *p: dense(*topk_linear(*p, k), units), inputs, upstream, wanted)
        expected = grads(lambda *p: dense(*reference.topk_linear(*p, k), units), inputs, upstream, wanted)
        for i in range(3):
            assert (got[i] is not None) == (i in wanted)
            if i in wanted:
                torch.testing.assert_close(got[i], expected[i], **TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("tokens", "d_out", "units", "k"), SHAPES)
def test_sparse_decode_is_the_reference(tokens, d_out, units, k, dtype, device):
    values, indices, weight = decode_inputs(tokens, k, units, d_out, dtype, device)
    expected = reference.sparse_decode(values, indices, weight)
    torch.testing.assert_close(sparse_decode(values, indices, weight), expected, **TOLERANCE[dtype])
    upstream = torch.randn(tokens, d_out, dtype=dtype, device=device)
    for wanted in subsets(2):
        got = grads(lambda v, w: sparse_decode(v, indices, w), [values, weight], upstream, wanted)
        oracle = grads(lambda v, w: reference.sparse_decode(v, indices, w), [values, weight], upstream, wanted)
        for i in range(2):
            assert (got[i] is not None) == (i in wanted)
            if i in wanted:
                torch.testing.assert_close(got[i], oracle[i], **TOLERANCE[dtype])


def test_topk_linear_gradcheck(small_tiles):
    inputs = [t.requires_grad_() for t in topk_inputs(8, 5, 9)]
    assert torch.autograd.gradcheck(lambda *p: dense(*topk_linear(*p, 4), 9), inputs)


def test_sparse_decode_gradcheck():
    values, indices, weight = decode_inputs(6, 3, 7, 4)
    inputs = (values.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda v, w: sparse_decode(v, indices, w), inputs)


def test_second_derivatives_are_refused():
    """Rather than silently wrong: the backward passes are not themselves differentiable."""
    x, weight, bias = (t.requires_grad_() for t in topk_inputs(6, 5, 9))
    values, indices = topk_linear(x, weight, bias, 3)
    out = sparse_decode(values, indices, weight)
    for result, leaf in ((values, x), (out, weight)):
        (first,) = torch.autograd.grad(result.square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward(retain_graph=True)


@pytest.mark.parametrize("tiles", [(1, 1), (1, 100), (5, 8), (13, 16), (26, 24), (100, 100)])
@pytest.mark.parametrize(("units", "k"), [(11, 5), (64, 1), (83, 3)])
def test_the_tile_size_does_not_change_the_result(tiles, units, k, monkeypatch):
    """Tiles of one token or all, that do and do not divide the tokens and units, and larger than both."""
    inputs = topk_inputs(26, 4, units)
    monkeypatch.setattr("mxd.ops.sparse.TILES", {"cpu": (tiles[0], 8 * tiles[0] * tiles[1])})
    got = dense(*topk_linear(*inputs, k), units)
    torch.testing.assert_close(got, dense(*reference.topk_linear(*inputs, k), units), **TOLERANCE[torch.float64])


def test_two_stages_find_the_largest_wherever_they_are():
    """All in one group, one in each, in the first and last columns, and the rest equal or minus infinity."""
    pre = torch.full((5, 80), -torch.inf)
    pre[0, ::10] = torch.arange(8.0)  # one group: columns 0, 10, 20 ...
    pre[1, :10] = torch.arange(10.0)  # one in each group
    pre[2, -3:] = torch.tensor([3.0, 1.0, 2.0])
    pre[3] = 1.0
    pre[4, 40] = 5.0
    values, indices = _topk(pre, 3)
    torch.testing.assert_close(values.sort().values, pre.topk(3).values.flip(1))
    torch.testing.assert_close(pre.gather(1, indices), values)
    assert all(len(set(row)) == 3 for row in indices.tolist())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_numbers_are_chosen_in_their_order(dtype):
    """Also below zero, where an integer's order is the other way round; infinity is above all, and so is NaN."""
    numbers = torch.linspace(-3, 3, 40, dtype=dtype)[torch.randperm(40)].repeat(4, 1)
    numbers[1] = -numbers[1].abs() - 1
    numbers[2, 5], numbers[2, 6] = torch.inf, -torch.inf
    numbers[3, 7], numbers[3, 8] = torch.nan, -torch.nan
    values, chosen = sparse._topk_of(numbers, 4)
    assert torch.equal(values.sort().values[:3], numbers[:3].topk(4).values.flip(1))
    assert torch.equal(values.nan_to_num(9), numbers.gather(1, chosen).nan_to_num(9))
    assert set(chosen[3].tolist()) >= {7, 8} and all(len(set(row)) == 4 for row in chosen.tolist())
    _, chosen = sparse._topk_of(torch.tensor([[-torch.inf, -9, -torch.finfo(dtype).max]], dtype=dtype), 2)
    assert set(chosen[0].tolist()) == {1, 2}


def bfloat16_case(kind, tokens=256, d=64, units=4096):
    x, weight, bias = topk_inputs(tokens, d, units, torch.float32)
    if kind == "clustered":  # all units nearly alike, so that bfloat16 cannot order them
        weight, bias = weight[:1] + 1e-3 * weight, 1e-3 * bias
    if kind == "offset":  # a large common bias eats bfloat16's digits
        bias = bias + 50
    if kind == "outlier":  # its bound must not be that of the others, too
        weight[7] *= 300
    return x, weight, bias


@pytest.fixture
def searched(monkeypatch):
    """Let candidates be made however few the units, and list the dtype and rows of each search through all units."""
    found, real = [], sparse._largest

    def noting(x, weight, bias, k):
        found.append((x.dtype, len(x)))
        return real(x, weight, bias, k)

    monkeypatch.setattr(sparse, "WORTH", (1, 0))
    monkeypatch.setattr(sparse, "_largest", noting)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["normal", "clustered", "offset", "outlier"])
@pytest.mark.parametrize("k", [1, 8, 32])
def test_bfloat16_proposals_choose_the_largest(kind, k, dtype, searched):
    """To the rounding of the input's dtype, on any data; and where it is benign, hardly a row needs a second search."""
    x, weight, bias = (t.to(dtype) for t in bfloat16_case(kind))
    values, indices = topk_linear(x, weight, bias, k, "bfloat16")
    pre = torch.relu(x.double() @ weight.double().T + bias.double())
    torch.testing.assert_close(values, pre.gather(1, indices).to(dtype), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values.sort(descending=True).values, pre.topk(k).values.to(dtype), rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == k for row in indices.tolist())
    anew = sum(rows for kind_, rows in searched if kind_ == dtype)
    assert searched[0] == (torch.bfloat16, 256)
    assert anew >= {"clustered": 100}.get(kind, 0)  # about half the rows have positive units at all
    assert anew <= {"normal": 8, "outlier": 8}.get(kind, 256)


def misled(by, units=40):
    """Return x, weight and bias where unit 0 comes second and bfloat16, exact for the others, has it at zero.

    "the sum": all are alike in bfloat16, and in row n unit n is the largest, proposed or not.
    """
    if by == "the sum":
        x = torch.cat([torch.ones(units, 2), torch.eye(units)], 1)
        first = torch.tensor([[1.0, 2**-10]]).expand(units, 2)
        return x, torch.cat([first, torch.eye(units) * (2**-9 + 2**-11)], 1), torch.zeros(units)
    down = 1.0039  # rounds to 1
    x, weight, bias = torch.ones(1, 34), torch.zeros(units, 34), torch.zeros(units)
    weight[0, :32], weight[0, 32] = 1, -32
    if by == "x":
        x[0, :32] = down
    if by == "weight":
        weight[0, :32] = down
    if by == "bias":
        bias[0], weight[0, :32], weight[0, 32] = down, 0, -1
    second = torch.addmm(bias, x, weight.T)[0, 0]
    weight[1:, 33] = torch.linspace(0.4, 0.9, units - 1).mul(second).bfloat16().float()
    weight[1, 33] *= 5
    return x, weight, bias


@pytest.mark.parametrize("by", ["x", "weight", "bias", "the sum"])
def test_a_unit_that_bfloat16_ranks_too_low_is_found(by, searched):
    x, weight, bias = misled(by)
    low = torch.addmm(*(t.bfloat16() for t in (bias, x, weight.T))).float()
    if by == "the sum":
        assert (low == low[0, 0]).all()
    else:
        assert low[0, 0] == 0 < low[0, 1:].min()
        assert torch.equal(low[0, 1:], weight[1:, 33])
    _, indices = topk_linear(x, weight, bias, 1 if by == "the sum" else 2, "bfloat16")
    assert indices.sort().values.tolist() == ([[n] for n in range(len(x))] if by == "the sum" else [[0, 1]])
    anew = [(torch.float32, len(x))] if by == "the sum" else []  # there no few candidates are enough
    assert searched == [(torch.bfloat16, len(x)), *anew]


def test_a_bound_that_is_met_is_not_rounded_below(searched):
    """All of what rounding takes from x points along unit 0, and every other unit is a bias that bfloat16 holds."""
    signs = torch.tensor([1.0, -1.0]).repeat(16)
    x = (1 + 0.0019 * signs).unsqueeze(0)  # all round to 1
    weight, bias = torch.zeros(41, 32), torch.zeros(41)
    weight[0] = signs
    second = (x @ weight.T)[0, 0]
    bias[1:] = torch.linspace(0.89, 0.98, 40).mul(second).bfloat16().float()
    _, indices = topk_linear(x, weight, bias, 1, "bfloat16")
    assert (x.bfloat16() == 1).all() and bias.max() < second
    assert indices.tolist() == [[0]] and searched == [(torch.bfloat16, 1)]


@pytest.mark.parametrize(("by", "size"), [(0.00158, 1.5078125), (0.001385, 1.4140625), (0.001386, 1.65625)])
def test_a_bound_that_a_bias_takes_away_again_is_not_rounded_below(by, size, searched):
    """What is left of unit 0 is less than what bfloat16 would take from the two norms whose product is its bound."""
    x, weight, bias = torch.tensor([[1 + by, 1 - by]]), torch.zeros(41, 2), torch.zeros(41)
    weight[0] = torch.tensor([size, -size])
    bias[0] = -(x @ weight.T)[0, 0].bfloat16().float()
    left = torch.addmm(bias, x, weight.T)[0, 0]
    bias[1:] = torch.linspace(0.2, 0.9, 40).mul(left).bfloat16().float()
    _, indices = topk_linear(x, weight, bias, 1, "bfloat16")
    assert (x.bfloat16() == 1).all() and 0 < bias[1:].max() < left < 4e-3 * -bias[0]
    assert indices.tolist() == [[0]]


def test_what_sums_lose_is_part_of_the_bound(searched):
    """Nothing is rounded here but sums in float32, to which 1 is nothing beside 2^30."""
    x, weight, bias = torch.ones(1, 34).double(), torch.zeros(41, 34).double(), torch.zeros(41).double()
    weight[0, 0], weight[0, 1:33], weight[0, 33] = 2.0**30, 1, -(2.0**30)
    bias[1:] = torch.linspace(8, 16, 40).bfloat16().double()
    assert torch.addmm(*(t.bfloat16() for t in (bias, x, weight.T)))[0, 0] < 8
    assert (x @ weight[0]).item() == 32
    _, indices = topk_linear(x, weight, bias, 1, "bfloat16")
    assert indices.tolist() == [[0]]


def test_what_lowered_rows_are_widened_by_is_zero():
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN
    try:
        low, _, _ = sparse._lowered(torch.ones(3, 4))
    finally:
        torch.use_deterministic_algorithms(False)
    assert (low[:, :4] == 1).all() and (low[:, 4:] == 0).all()


@pytest.mark.parametrize(("d", "units", "k"), [(64, 4096, 1), (576, 4608, 32), (768, 6144, 8), (2048, 4096, 32)])
def test_there_are_candidates_enough_for_random_numbers_and_no_more(d, units, k, searched, monkeypatch):
    """So many prove nearly every row; two thirds of what is there beyond K leave rows to be searched again."""
    x, weight, bias = bfloat16_case("normal", 512, d, units)
    count, shares = sparse.candidate_count(k, units, d), []
    assert k < count < units
    for fewer in (count, k + 2 * (count - k) // 3):
        monkeypatch.setattr(sparse, "candidate_count", lambda *_, fewer=fewer: fewer)
        searched.clear()
        topk_linear(x, weight, bias, k, "bfloat16")
        shares.append(sum(rows for dtype, rows in searched if dtype == torch.float32) / 512)
    assert shares[0] < 0.01 and shares[0] < shares[1]


@pytest.mark.parametrize("candidates", ["float32", "bfloat16"])
def test_units_are_among_those_there_are_where_most_are_minus_infinity(candidates, searched):
    """A row then has fewer units than are asked for, and its tile is padded."""
    bias = torch.full((9,), -torch.inf)
    bias[0] = 1
    values, indices = topk_linear(torch.ones(1, 3), torch.ones(9, 3), bias, 3, candidates)
    assert values.sort().values.tolist() == [[0, 0, 4]] and indices.max() < 9 and indices[values > 0].tolist() == [0]
    values, indices = topk_linear(torch.zeros(2, 0), torch.zeros(9, 0), torch.arange(9.0), 2, candidates)
    assert indices.sort().values.tolist() == [[7, 8]] * 2


def test_candidates_are_no_fewer_than_are_chosen_and_no_more_than_there_are():
    assert [sparse.candidate_count(k, 40, 4096) for k in (1, 30, 40)] == [7, 40, 40]
    counts = [sparse.candidate_count(32, 8 * d, d) for d in (16, 256, 576, 4096)]
    assert counts == sorted(set(counts)) and counts[0] > 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scales", [(1e-25, 1), (1e-18, 1e-10), (1e-38, 1), (1e5, 1e-38), (1e6, 1e-40), (1, 1e-23)])
def test_rows_too_small_for_a_proof_are_searched_anew(scales, dtype, searched):
    """Squares vanish from norms below 1e-19, and from 1e-38 on down bfloat16 instructions take numbers for zero."""
    x, weight, bias = bfloat16_case("clustered", units=500)
    x, weight, bias = (t.to(dtype) * scale for t, scale in zip((x, weight, bias), (*scales, 0), strict=True))
    values, indices = topk_linear(x, weight, bias, 4, "bfloat16")
    pre = torch.relu(x.double() @ weight.double().T)
    bound = 1e-6 * (x.double().norm(dim=1) * weight.double().norm(dim=1).max()).unsqueeze(1)
    chosen = pre.gather(1, indices).sort(descending=True).values
    assert (pre.topk(4).values - chosen <= bound).all()
    assert ((values.double() - pre.gather(1, indices)).abs() <= bound).all()
    if dtype == torch.float32:
        assert searched == [(torch.bfloat16, 256), (torch.float32, 256)]


def test_a_bias_of_ordinary_size_is_proof_enough_for_small_rows(searched):
    """What vanishes is then below everything that tells units apart."""
    x, weight, _ = bfloat16_case("normal", units=500)
    bias = torch.linspace(1, 8, 500)
    _, indices = topk_linear(1e-25 * x, weight, bias, 4, "bfloat16")
    assert indices.sort().values.tolist() == [[496, 497, 498, 499]] * 256
    assert searched == [(torch.bfloat16, 256)]


@pytest.fixture
def loose():
    """What a user may have set: TF32, and sums in bfloat16; put back at the end, and by `exact_products` until then."""
    at, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = at.fp32_precision, cpu.fp32_precision, at.allow_bf16_reduced_precision_reduction

    def settings():
        return at.fp32_precision, cpu.fp32_precision, at.allow_bf16_reduced_precision_reduction

    at.fp32_precision, cpu.fp32_precision, at.allow_bf16_reduced_precision_reduction = "tf32", "tf32", True
    yield settings
    at.fp32_precision, cpu.fp32_precision, at.allow_bf16_reduced_precision_reduction = before


def test_the_proof_sets_what_it_counts_on_and_puts_it_back(loose, searched, monkeypatch):
    """Products in bfloat16 are not summed in it, and none in float32 are rounded, whatever is set outside."""
    during, real = [], sparse._largest

    def noting(*args):
        during.append(loose())
        return real(*args)

    monkeypatch.setattr(sparse, "_largest", noting)
    topk_linear(*bfloat16_case("clustered"), 4, "bfloat16")
    assert during == [("tf32", "ieee", False)] * 2 and [dtype for dtype, _ in searched] == [
        torch.bfloat16,
        torch.float32,
    ]
    assert loose() == ("tf32", "tf32", True)
    topk_linear(*bfloat16_case("normal"), 4, "float32")
    assert during[2] == ("tf32", "tf32", True)  # nothing was promised
    with pytest.raises(RuntimeError), sparse.exact_products(torch.device("cuda")):
        assert loose() == ("ieee", "tf32", False)
        raise RuntimeError
    assert loose() == ("tf32", "tf32", True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_16_bits_are_searched_as_they_are(dtype, searched):
    """A candidate is coarser than what it is for, or is of no use; gradients flow all the same."""
    inputs = [t.to(dtype) for t in bfloat16_case("normal", 16, 8, 200)]
    upstream = torch.randn(16, 5)

    def run(candidates):
        leaves = [t.clone().requires_grad_() for t in inputs]
        values, indices = topk_linear(*leaves, 5, candidates)
        return values, indices, *torch.autograd.grad((values * upstream).sum(), leaves)

    for got, expected in zip(run("bfloat16"), run("float32"), strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    assert searched == [(dtype, 16)] * 2


def test_in_inference_mode_nothing_is_remembered(searched):
    """Inference tensors have no version that tells one selection from the next in the same memory."""
    values, indices, weight = decode_inputs(6, 3, 9, 4)
    with torch.inference_mode():
        x, gate, bias = bfloat16_case("normal", 16, 8, 200)
        got = topk_linear(x, gate, bias, 5, "bfloat16")
        own = indices.clone()
        for _ in range(3):
            own.copy_(torch.randint(9, (6, 3)))
            rows = torch.randn(6, 4, dtype=torch.float64)
            expected = (weight[own] * rows.unsqueeze(1)).sum(-1)
            torch.testing.assert_close(sparse._gather_dot(rows, own, weight), expected)
    torch.testing.assert_close(dense(*got, 200), dense(*topk_linear(x.clone(), gate.clone(), bias.clone(), 5), 200))
    check_decode(values, indices, weight)


def test_rows_that_nothing_can_be_proven_of_are_searched_as_always(searched):
    x, weight, bias = bfloat16_case("normal", tokens=9)
    x[2, 0], x[5, 1] = torch.nan, torch.inf
    values, indices = topk_linear(x, weight, bias, 4, "bfloat16")
    expected, places = topk_linear(x, weight, bias, 4)
    rows = [2, 5]
    assert torch.equal(values[rows].isnan(), expected[rows].isnan()) and values[2].isnan().all()
    assert torch.equal(indices[rows], places[rows])
    assert searched[1] == (torch.float32, 2)


def test_rows_without_positive_units_need_no_proof(searched):
    """Below zero all are alike: the choice among them is free, and no value or gradient depends on it."""
    x, weight, bias = bfloat16_case("clustered", tokens=7)
    values, _ = topk_linear(x, weight, bias - 100, 4, "bfloat16")
    assert torch.equal(values, torch.zeros(7, 4))
    assert searched == [(torch.bfloat16, 7)]


def test_proposals_are_made_where_they_pay_only(searched, monkeypatch):
    x, weight, bias = bfloat16_case("normal", tokens=3, d=64, units=2048)
    each = 2048 // sparse.candidate_count(8, 2048, 64)
    monkeypatch.setattr(sparse, "WORTH", (each - 2, 2 * 64))
    for k, dtype in ((8, torch.bfloat16), (9, torch.float32)):
        topk_linear(x, weight, bias, k, "bfloat16")
        assert searched.pop()[0] == dtype


def test_a_device_proposes_in_bfloat16_where_it_has_it(monkeypatch):
    for has in (True, False):
        expected = "bfloat16" if has else "float32"
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=has: has)
        assert candidate_dtype(torch.device("cpu")) == expected
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, has=has: (8, 0) if has else (7, 5))
        assert candidate_dtype(torch.device("cuda", 0)) == expected
        assert [candidate_dtype(torch.device("cpu"), asked) for asked in ("float32", "bfloat16", "auto")] == [
            *("float32", "bfloat16"),
            expected,
        ]
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert {candidate_dtype(torch.device(name)) for name in ("cpu", "mps")} == {"float32"}


def test_bfloat16_proposals_have_the_gradients_of_the_units_they_chose(searched):
    x, weight, bias = (t.requires_grad_() for t in bfloat16_case("normal", 16, 8, 200))
    values, indices = topk_linear(x, weight, bias, 5, "bfloat16")
    upstream = torch.randn(16, 5)
    got = torch.autograd.grad((values * upstream).sum(), (x, weight, bias))
    chosen = torch.relu(x @ weight.T + bias).gather(1, indices)
    oracle = torch.autograd.grad((chosen * upstream).sum(), (x, weight, bias))
    torch.testing.assert_close(got, oracle, rtol=1e-4, atol=1e-4)


def test_bfloat16_proposals_with_k_near_the_number_of_units(searched):
    x, weight, bias = bfloat16_case("normal", 5, 4, 11)
    for k in (6, 11):
        got = dense(*topk_linear(x, weight, bias, k, "bfloat16"), 11)
        torch.testing.assert_close(got, dense(*reference.topk_linear(x, weight, bias, k), 11))


def test_ties_keep_exactly_k_of_the_tied_units():
    x = torch.ones(4, 1, dtype=torch.float64)
    weight = torch.tensor([[2.0], [1.0], [1.0], [1.0], [0.5]], dtype=torch.float64, requires_grad=True)
    values, indices = topk_linear(x, weight, torch.zeros(5, dtype=torch.float64), 3)
    assert values.sort(dim=-1).values.tolist() == [[1, 1, 2]] * 4
    assert all(len(set(row)) == 3 and 0 in row and 4 not in row for row in indices.tolist())
    values.sum().backward()
    chosen = torch.bincount(indices.flatten(), minlength=5)
    torch.testing.assert_close(weight.grad[:, 0], chosen.double())  # a dropped tied unit gets no gradient


def test_rows_without_a_positive_pre_activation_are_empty_and_pass_no_gradient():
    x, weight, bias = topk_inputs(5, 4, 7)
    bias = torch.full_like(bias, -100.0)
    bias[2] = 100.0
    x[3] = 0
    bias_of_dead = bias.clone()
    bias_of_dead[2] = -100.0
    inputs = [t.requires_grad_() for t in (x, weight, bias_of_dead)]
    values, indices = topk_linear(*inputs, 3)
    assert torch.equal(values, torch.zeros_like(values))
    assert ((indices >= 0) & (indices < 7)).all()
    values.sum().backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in inputs)
    one_alive, _ = topk_linear(x, weight, bias, 3)
    assert ((one_alive > 0).sum(-1) == 1).all()


def test_a_pre_activation_of_exactly_zero_passes_no_gradient():
    """relu'(0) = 0, as in PyTorch."""
    weight = torch.eye(2, dtype=torch.float64, requires_grad=True)
    values, _ = topk_linear(torch.tensor([[0.0, 3.0]]).double(), weight, torch.zeros(2, dtype=torch.float64), 2)
    values.sum().backward()
    assert weight.grad.tolist() == [[0, 0], [0, 3]]


def test_non_contiguous_inputs(small_tiles):
    x = torch.randn(4, 24, dtype=torch.float64).T[::2]
    weight = torch.randn(4, 10, dtype=torch.float64).T
    bias = torch.randn(20, dtype=torch.float64)[::2]
    assert not (x.is_contiguous() or weight.is_contiguous() or bias.is_contiguous())
    upstream = torch.randn(10, 12, dtype=torch.float64).T
    got = grads(lambda *p: dense(*topk_linear(*p, 3), 10), [x, weight, bias], upstream, {0, 1, 2})
    oracle = grads(lambda *p: dense(*reference.topk_linear(*p, 3), 10), [x, weight, bias], upstream, {0, 1, 2})
    torch.testing.assert_close(got, oracle)

    values = torch.randn(3, 12, dtype=torch.float64).T
    indices = torch.randint(10, (3, 12)).T
    upstream = torch.ones(1, dtype=torch.float64).expand(12, 4)
    torch.testing.assert_close(sparse_decode(values, indices, weight), reference.sparse_decode(values, indices, weight))
    got = grads(lambda v, w: sparse_decode(v, indices, w), [values, weight], upstream, {0, 1})
    oracle = grads(lambda v, w: reference.sparse_decode(v, indices, w), [values, weight], upstream, {0, 1})
    torch.testing.assert_close(got, oracle)


def test_no_tokens():
    x, weight, bias = (t.requires_grad_() for t in topk_inputs(0, 4, 6))
    values, indices = topk_linear(x, weight, bias, 2)
    out = sparse_decode(values, indices, weight)
    assert values.shape == indices.shape == (0, 2)
    assert out.shape == (0, 4)
    out.sum().backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in (x, weight, bias))


def test_the_two_operations_compose():
    """decode(topk(x)) is a transcoder; its gradients run through both operations."""
    x, encoder, bias = topk_inputs(12, 5, 9)
    decoder, upstream = torch.randn(9, 3, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    inputs = [x, encoder, bias, decoder]
    got = grads(lambda x, e, b, d: sparse_decode(*topk_linear(x, e, b, 4), d), inputs, upstream, set(range(4)))
    oracle = grads(
        lambda x, e, b, d: reference.sparse_decode(*reference.topk_linear(x, e, b, 4), d),
        inputs,
        upstream,
        set(range(4)),
    )
    torch.testing.assert_close(got, oracle)


def check_decode(values, indices, weight):
    """Both gradients of one decode."""
    upstream = torch.randn(len(values), weight.shape[1], dtype=weight.dtype)
    got = grads(lambda v, w: sparse_decode(v, indices, w), [values, weight], upstream, {0, 1})
    oracle = grads(lambda v, w: reference.sparse_decode(v, indices, w), [values, weight], upstream, {0, 1})
    torch.testing.assert_close(got, oracle)


def test_selections_are_not_confused_from_call_to_call():
    """The sorted selection is kept for the next gradient: not for other indices, nor the same ones overwritten."""
    for _ in range(10):
        check_decode(*decode_inputs(6, 3, 9, 4))
    values, indices, weight = decode_inputs(6, 3, 9, 4)
    check_decode(values, indices, weight)
    check_decode(2 * values, indices, weight)
    check_decode(values, indices, torch.randn(20, 4, dtype=torch.float64))  # more units than before
    check_decode(values, indices, weight)
    check_decode(values[:4], indices[:4], weight)  # the same memory, fewer tokens
    check_decode(values.reshape(3, 6), indices.reshape(3, 6), weight)  # the same memory, another K
    check_decode(values, indices, weight)
    indices.copy_(torch.randint(9, (6, 3)))  # the same memory and shape, overwritten
    check_decode(values, indices, weight)
    square, one = torch.randint(9, (5, 5)), torch.randn(5, 5, dtype=torch.float64)
    check_decode(one, square, weight)
    check_decode(one, square.T, weight)  # the same memory and shape, other strides


@pytest.mark.parametrize("shared", [True, False])
def test_a_selection_that_is_handed_on_is_sorted_once(shared, monkeypatch):
    """By the forward pass that chose it to both backward passes; without it each sorts for itself, to the same end."""
    made, real = [], sparse.ByUnit
    monkeypatch.setattr(sparse, "ByUnit", lambda *parts: made.append(1) or real(*parts))
    x, encoder, bias = topk_inputs(12, 5, 9)
    decoder, upstream = torch.randn(9, 3, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)

    def through(x, e, b, d):
        selection = Selection() if shared else None
        values, indices = topk_linear(x, e, b, 4, selection=selection)
        return sparse_decode(values, indices, d, selection)

    inputs = [x, encoder, bias, decoder]
    got = grads(through, inputs, upstream, set(range(4)))
    assert len(made) == (1 if shared else 2)
    oracle = grads(
        lambda x, e, b, d: reference.sparse_decode(*reference.topk_linear(x, e, b, 4), d),
        inputs,
        upstream,
        set(range(4)),
    )
    torch.testing.assert_close(got, oracle)


def test_a_selection_overwritten_before_the_backward_pass_is_refused():
    """By autograd, which knows the version of what was saved: nothing is summed over other units than were used."""
    x, encoder, bias = (t.requires_grad_() for t in topk_inputs(12, 5, 9))
    selection = Selection()
    values, indices = topk_linear(x, encoder, bias, 4, selection=selection)
    out = sparse_decode(values, indices, torch.randn(9, 3, dtype=torch.float64), selection)
    indices.copy_(indices.flip(0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class LargestTensor(TorchDispatchMode):
    """Records the largest dense tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple) else (out,):
            if isinstance(t, torch.Tensor) and t.layout is torch.strided:
                self.numel = max(self.numel, t.numel())
        return out


def test_the_dense_code_is_never_built(small_tiles):
    """Neither forward nor backward allocates anything near ``tokens * units``; the reference does."""
    tokens, d, units, k = 64, 4, 512, 2
    x, weight, bias = (t.requires_grad_() for t in topk_inputs(tokens, d, units))
    with LargestTensor() as ours:
        sparse_decode(*topk_linear(x, weight, bias, k), weight).sum().backward()
    with LargestTensor() as dense_ones:
        reference.topk_linear(x, weight, bias, k)
    assert dense_ones.numel == tokens * units
    assert ours.numel <= max(units * d, 3 * units)


@pytest.mark.parametrize("candidates", ["float32", "bfloat16"])
def test_other_devices_fall_back_on_the_dense_reference(monkeypatch, candidates):
    """As on MPS: plain dense operations, differentiated by autograd, and the same numbers and gradients."""
    x, weight, bias, decoder = (torch.randn(*shape, requires_grad=True) for shape in ((9, 6), (20, 6), (20,), (20, 4)))

    def run():
        values, indices = topk_linear(x, weight, bias, 5, candidates)
        out = sparse_decode(values, indices, decoder)
        return out, torch.autograd.grad(out.square().sum(), (x, weight, bias, decoder))

    expected, gradients = run()
    monkeypatch.setattr("mxd.ops.devices.DEVICES", ())
    for name in ("_TopKLinear", "_SparseDecode"):
        monkeypatch.delattr(f"mxd.ops.sparse.{name}")
    out, found = run()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, gradients)
