"""Hierarchies: units of one expert from each level, against the naive sum over materialised experts."""

import math

import numpy as np
import pytest
import torch

import mxd.layers.levels
from mxd.common.errors import MxdError
from mxd.config import parse_config
from mxd.evaluation.probes import Units
from mxd.layers import Code, MLPShape, parse_layer, size
from mxd.layers.gates import LinearGate
from mxd.layers.hierarchy import LevelCode
from mxd.layers.sizing import transcoder_params
from mxd.ops import Selection

METHODS = {
    "mxd": {},
    "cp_mumoe": {"rank": 3},
    "tr_mumoe": {"rank_1": 2, "rank_2": 3, "rank_3": 2},
    "tucker_mumoe": {"rank_units": 2, "rank_in": 3, "rank_out": 4},
}
TWO = {"levels": [4, 3], "sparsity": {"kind": "levels", "levels": [3, 2]}}
THREE = {"levels": [4, 3, 2], "sparsity": {"kind": "levels", "levels": [2, 2, 1]}}
SHAPES = {"two": TWO, "three": THREE}


def make(method, mlp, randomise, fields):
    return randomise(parse_layer({"method": method} | METHODS[method] | fields).resolve(mlp).build())


def one_level(method, mlp, randomise, k=3):
    return make(method, mlp, randomise, {"num_units": 4, "sparsity": {"kind": "topk", "k": k}})


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


@pytest.fixture(params=SHAPES)
def layer(request, method, mlp, randomise):
    return make(method, mlp, randomise, SHAPES[request.param])


@pytest.fixture
def x():
    return torch.randn(7, 6, dtype=torch.float64)


def levels_of(layer):
    """Gate, biases, table and K of each level."""
    sizes = list(layer.config.levels[1:])
    first = (layer.gate, layer.gate_bias, layer.table)
    later = zip(layer.later_gate.split(sizes), layer.later_gate_bias.split(sizes), layer.later_tables, strict=True)
    return [(*level, k.k) for level, k in zip([first, *later], layer.config.sparsity.levels, strict=True)]


def activations(layer, x):
    """All units' activations ``[tokens, N]``: the outer product of the levels' K largest."""
    found = torch.ones(len(x), 1, dtype=x.dtype)
    for gate, bias, _, k in levels_of(layer):
        positive = (x @ gate.T + bias).relu()
        kept = torch.where(positive >= positive.sort(-1, descending=True).values[:, k - 1 : k], positive, 0)
        found = torch.einsum("tn,tm->tnm", found, kept).flatten(1)
    return found


def experts(layer):
    """Every unit's matrix ``[hidden, d_out]``, from the definitions."""
    tables, config = [table for _, _, table, _ in levels_of(layer)], layer.config
    matrices = []
    for unit in np.ndindex(*config.levels):
        rows = [table[n] for table, n in zip(tables, unit, strict=True)]
        if config.method == "mxd":
            matrices.append(layer.decoder @ torch.diag(math.prod(rows)))
        elif config.method == "cp_mumoe":
            matrices.append(layer.input_factor @ torch.diag(math.prod(rows)) @ layer.output_factor)
        elif config.method == "tr_mumoe":
            core = rows[0].view(2, 3)
            for row in rows[1:]:
                core = core @ row.view(3, 3)
            into, out = layer.input_factor.view(8, 3, 2), layer.output_factor.view(2, 2, 5)
            matrices.append(torch.einsum("ab,hbc,aco->ho", core, into, out))
        else:
            core = layer.core.view(*map(len, rows), 3, 4)
            for row in rows:
                core = torch.einsum("p...,p->...", core, row)
            matrices.append(layer.input_factor @ core @ layer.output_factor)
    return torch.stack(matrices)


@torch.no_grad()
def test_the_output_is_the_sum_over_outer_products(layer, x):
    naive = torch.einsum("tn,th,nho->to", activations(layer, x), layer.encoder(x), experts(layer))
    torch.testing.assert_close(layer(x), naive + layer.bias)
    assert layer.num_units == math.prod(layer.config.levels)
    assert layer.config.num_params == sum(p.numel() for p in layer.parameters())


@torch.no_grad()
def test_units_are_numbered_row_major(layer):
    weights = torch.stack([layer.unit_weight(n) for n in range(layer.num_units)])
    torch.testing.assert_close(weights, experts(layer))
    torch.testing.assert_close(layer.unit_norms(), weights.flatten(1).norm(dim=1))


@torch.no_grad()
def test_a_second_level_of_one_expert_that_is_always_on_is_no_level(method, mlp, randomise, x):
    fields = {"levels": [4, 1], "start": "replicate", "sparsity": {"kind": "levels", "levels": [3, 1]}}
    if method == "mxd":
        fields.pop("start")
    layer, plain = make(method, mlp, randomise, fields), one_level(method, mlp, randomise)
    layer.load_state_dict(plain.state_dict(), strict=False)
    layer.later_gate.zero_()
    layer.later_gate_bias.fill_(1)
    row = torch.eye(3).flatten() if method == "tr_mumoe" else torch.ones(layer.later_tables[0].shape[1])
    layer.later_tables[0].copy_(row)
    torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(layer.unit_norms(), plain.unit_norms())


@torch.no_grad()
@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("mxd", "tucker_mumoe")], indirect=True)
def test_the_start_replicate_is_that_of_one_level(method, mlp, x):
    """Where the further levels' activations add up to 1, whichever of their experts are on."""
    fields = {"method": method, "start": "replicate"} | METHODS[method]
    layer = parse_layer(fields | TWO).resolve(mlp).build().double()
    for table in layer.later_tables:
        torch.testing.assert_close(table, layer.neutral_row(table.shape[1]).expand(len(table), -1).double())
    first = Code(torch.rand(7, 2).double(), torch.tensor([[0, 3]]).expand(7, 2))
    share = torch.rand(7, 1).double()
    later = Code(torch.cat([share, 1 - share], 1), torch.tensor([[1, 2]]).expand(7, 2))
    layer.output_factor.normal_()
    plain = parse_layer(fields | {"num_units": 4, "sparsity": {"kind": "topk", "k": 3}}).resolve(mlp).build().double()
    plain.load_state_dict({name: layer.state_dict()[name] for name in plain.state_dict()})
    torch.testing.assert_close(layer.decode(x, LevelCode(first, later, 3)), plain.decode(x, first))


def test_further_levels_are_drawn_as_nn_linear_by_default():
    shape = MLPShape(25, 16, 36, "relu", False)
    fields = {"method": "cp_mumoe", "levels": [100, 9], "rank": 30, "sparsity": {"kind": "levels", "levels": [4, 1]}}
    layer = parse_layer(fields).resolve(shape).build()
    for factor, fan_in in ((layer.later_gate, 25), (layer.later_tables[0], 9), (layer.expert_factor, 100)):
        assert 0.9 / math.sqrt(fan_in) < factor.abs().max() <= 1 / math.sqrt(fan_in)
    assert not layer.later_gate_bias.any()


# --- the code -----------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("formed", [1, 2**26])
def test_lists_masks_and_dense_codes_decode_as_the_code_does(layer, x, formed, monkeypatch):
    monkeypatch.setattr(mxd.layers.levels, "FORMED", formed)
    code, each = layer.encode(x), experts(layer)
    torch.testing.assert_close(layer.decode(x, Code(code.activations, code.indices)), layer(x))

    def naive(dense):
        return torch.einsum("tn,th,nho->to", dense, layer.encoder(x), each) + layer.bias

    off = torch.zeros(layer.num_units, dtype=torch.bool)
    off[code.indices[0, 0]] = True
    masked = activations(layer, x).masked_fill(off, 0)
    torch.testing.assert_close(layer.decode(x, code.without(off)), naive(masked))
    everyone = torch.arange(layer.num_units).expand(7, -1)
    torch.testing.assert_close(layer.decode(x, Code(masked, everyone, all_units=True)), naive(masked))
    mean = masked.mean(0).expand(7, -1)
    torch.testing.assert_close(layer.decode(x, Code(mean, everyone, all_units=True)), naive(mean))
    nothing = Code(code.activations[:, :0], code.indices[:, :0])
    torch.testing.assert_close(layer.decode(x, nothing), layer.bias.expand(7, -1))
    kept = torch.arange(7) % 2 == 0
    torch.testing.assert_close(layer.decode(x[kept], code.at(kept)), layer(x)[kept])


@torch.no_grad()
def test_the_code_answers_without_its_list_what_its_list_says(layer, x):
    code, expected = layer.encode(x.view(7, 1, 6)), activations(layer, x)
    assert isinstance(code, LevelCode)
    listed = torch.zeros_like(expected).scatter_add(1, code.indices[:, 0], code.activations[:, 0])
    torch.testing.assert_close(listed, expected)
    assert code.active_count() == (expected > 0).sum() > 0
    assert torch.equal(code.active_units(layer.num_units), (expected > 0).any(0))
    one = code.reshape((7,)).at(torch.arange(7) == 2)
    assert torch.equal(one.active_units(layer.num_units), expected[2] > 0)
    assert code.zero() == 0 and code.zero().dtype == torch.float64
    assert all(len(set(row)) == len(row) for row in code.indices[:, 0].tolist())


@torch.no_grad()
def test_the_gates_rows_are_the_sums_of_the_levels(layer, x):
    gate, parts = layer.gates, levels_of(layer)
    units = list(np.ndindex(*layer.config.levels))
    weight = torch.stack([sum(part[0][n] for part, n in zip(parts, unit, strict=True)) for unit in units])
    bias = torch.stack([sum(part[1][n] for part, n in zip(parts, unit, strict=True)) for unit in units])
    torch.testing.assert_close(gate.scores(x)[:, 0], x @ weight.T + bias)
    torch.testing.assert_close(gate.project(x[0]), weight @ x[0])
    ids = torch.tensor([5, 0, 11])
    for found, expected in zip(gate.rows(ids), (weight[ids], bias[ids]), strict=True):
        torch.testing.assert_close(found, expected)
    values, indices = gate.top(x, 4, "float32", Selection())
    torch.testing.assert_close(values, (x @ weight.T + bias).relu().sort(descending=True).values[:, :4])
    torch.testing.assert_close((x @ weight.T + bias).relu().gather(1, indices), values)
    rows = np.arange(7) % 2 == 0
    small = layer.float().gates
    one, other = Units(x.float(), small), Units(x.float(), LinearGate(weight.float(), bias.float()))
    found = one.differences(rows, ~rows)
    torch.testing.assert_close(found, other.differences(rows, ~rows), rtol=1e-4, atol=1e-5)


def test_where_k_falls_during_training_that_of_the_first_level_does(mlp, randomise, x):
    layer = make("mxd", mlp, randomise, {"levels": [9, 5], "sparsity": {"kind": "levels", "levels": [3, 2]}}).train()
    layer.sparsity.widening = 2.0
    code = layer.encode(x)
    assert (code.first.activations.shape[1], code.later.activations.shape[1]) == (6, 2)
    layer.sparsity.candidates = "bfloat16"
    layer.encode(x)
    assert [level.candidates for level in layer.sparsity.levels] == ["bfloat16"] * 2


# --- configs ------------------------------------------------------------------------------------------------------


def test_the_number_of_units_follows_from_the_levels_or_an_open_first_level_from_it():
    sparsity = {"kind": "levels", "levels": [2, 1]}
    assert parse_layer({"method": "mxd", "levels": [8, 3], "sparsity": sparsity}).num_units == 24
    given = parse_layer({"method": "mxd", "levels": [None, 3], "num_units": 24, "sparsity": sparsity})
    assert given.levels == (8, 3)
    assert parse_layer({"method": "mxd", "levels": [None, 3], "sparsity": sparsity}).num_units is None
    levels = parse_layer({"method": "mxd", "levels": [8, 3], "sparsity": sparsity}).sparsity.levels
    assert [(level.kind, level.k) for level in levels] == [("topk", 2), ("topk", 1)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"levels": [8]}, r"levels = \[8\] is no hierarchy; give two or more numbers"),
        ({"levels": [8, None]}, r"levels = \[8, None\] is no hierarchy"),
        ({"levels": [8, 3], "num_units": 25}, r"num_units = 25 is not the product of levels = \[8, 3\]; leave it out"),
        ({"levels": [None, 3], "num_units": 25}, r"num_units = 25 is not the product"),
        ({"levels": [8, 3, 2]}, "3 levels need as many in sparsity.levels, which has 2"),
        ({"levels": [1, 3]}, "k = 2 is more than the 1 experts of level 1"),
        ({"levels": [8, 0]}, "greater than 0"),
        ({"levels": "8x3"}, "levels"),
        ({"levels": [8, 3], "sparsity": {"kind": "topk"}}, "sparsity topk does not work with MxD; choose levels"),
        ({"num_units": 8}, "sparsity levels does not work with MxD; choose topk, random_k, batch_topk,"),
        ({"levels": [8, 3], "sparsity": {"kind": "levels", "levels": [2]}}, "at least 2"),
        ({"levels": [8, 3], "sparsity": {"kind": "levels", "levels": "2x1"}}, "sparsity"),
    ],
)
def test_mistakes(fields, message):
    with pytest.raises(MxdError, match=message):
        parse_layer({"method": "mxd", "sparsity": {"kind": "levels", "levels": [2, 1]}} | fields)


@pytest.mark.parametrize("later", [[2], [4, 4]])
def test_sizing_solves_for_the_first_level(method, later):
    fields = {
        "method": method,
        "levels": [None, *later],
        "sparsity": {"kind": "levels", "levels": [3] + [1] * len(later)},
    }
    config = size(parse_layer(fields).resolve(MLPShape(64, 64, 256, "gelu_tanh", False)), 16)
    budget = transcoder_params(64, 64, 16 * 64)
    first = config.levels[0]
    assert config.levels[1:] == tuple(later) and config.num_units == first * math.prod(later)
    off = {n: abs(config.grown(n).num_params - budget) for n in (first - 1, first, first + 1)}
    assert off[first] == min(off.values())
    assert config.num_params == sum(p.numel() for p in config.build().parameters())
    assert f"-{'x'.join(map(str, config.levels))}-" in config.slug


def test_lists_in_a_run_are_levels_and_lists_of_lists_a_sweep():
    sparsity = {"kind": "levels", "levels": [[2, 1], [4, 2]]}
    run = {"run": "r", "replacements": [{"method": "mxd", "levels": [[None, 2], [None, 4]], "sparsity": sparsity}]}
    found = [(item.levels, [level.k for level in item.sparsity.levels]) for item in parse_config(run).replacements]
    assert found == [((None, n), ks) for n in (2, 4) for ks in ([2, 1], [4, 2])]
    plain = {"method": "cp_mumoe", "levels": [8, 3], "rank": [2, 5], "sparsity": {"kind": "levels", "levels": [2, 1]}}
    found = parse_config({"run": "r", "replacements": [plain]}).replacements
    assert [(item.levels, item.rank) for item in found] == [((8, 3), 2), ((8, 3), 5)]


def test_a_unit_that_a_code_names_twice_is_active_if_it_is_once():
    """As codes do where fewer units than are asked for are above minus infinity: the others are the last, at zero."""
    first = Code(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64))
    for activations in ([0.0, 0.0, 4.0], [4.0, 0.0, 0.0]):
        later = Code(torch.tensor([activations]), torch.full((1, 3), 2))
        assert LevelCode(first, later, 3).active_units(6).tolist() == [False, False, True, False, False, False]
