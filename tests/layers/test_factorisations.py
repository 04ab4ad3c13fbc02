"""Mixtures of linear experts against the sum over materialised experts; their biases, starts and published sizes."""

import math

import pytest
import torch
from torch.nn import functional as F

from mxd.layers import LAYERS, Code, MLPShape, MLPWeights, parse_layer, size
from mxd.layers.mxd import MxDConfig

N, HIDDEN, OUT = 11, 8, 5
METHODS = ["mxd", "cp_mumoe", "tr_mumoe", "tucker_mumoe", "moe"]
FACTORISED = ["cp_mumoe", "tr_mumoe", "tucker_mumoe"]


def make(method, mlp, randomise, **fields):
    config = {"method": method, "num_units": N, "sparsity": {"kind": "topk", "k": 3}, **fields}
    return randomise(parse_layer(config).resolve(mlp).build())


def activations(layer, x):
    code = layer.encode(x)
    return torch.zeros(len(x), N, dtype=x.dtype).scatter(1, code.indices, code.activations)


def tensor(layer):
    """All experts' weights ``[N, H, O]`` from the factors, by the definitions in the papers."""
    config, p = layer.config, dict(layer.named_parameters())
    if config.method == "mxd":
        return torch.einsum("no,ho->nho", p["expert_scale"], p["decoder"])
    if config.method == "moe":
        return p["experts"]
    factors = p["expert_factor"], p["input_factor"], p["output_factor"]
    if config.method == "cp_mumoe":
        return torch.einsum("nr,hr,ro->nho", *factors)
    if config.method == "tucker_mumoe":
        return torch.einsum("np,hq,ro,pqr->nho", *factors, p["core"])
    one, two, three = config.rank_1, config.rank_2, config.rank_3
    slices = factors[0].view(-1, one, two), factors[1].view(-1, two, three), factors[2].view(one, three, -1)
    return torch.einsum("nab,hbc,aco->nho", *slices)


@pytest.fixture
def x():
    return torch.randn(7, 6, dtype=torch.float64)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_mixture_is_the_sum_over_its_materialised_experts(method, bias, mlp, randomise, x):
    """``y^ = sum_n a_n (z W_n) + b``, where ``z`` ends with a 1 if experts have biases."""
    layer = make(method, mlp, randomise, expert_bias=bias)
    z, weights = layer.encoder(x), tensor(layer)
    if bias:
        z = torch.cat([z, torch.ones(7, 1, dtype=z.dtype)], 1)
    assert weights.shape == (N, HIDDEN + bias, OUT)
    torch.testing.assert_close(layer(x), torch.einsum("tn,th,nho->to", activations(layer, x), z, weights) + layer.bias)
    for n in (0, 7):
        torch.testing.assert_close(layer.unit_weight(n), weights[n])
        torch.testing.assert_close(layer.unit_output(n, x), z @ weights[n])
    torch.testing.assert_close(layer.unit_norms(), weights.square().sum((1, 2)).sqrt())


@pytest.mark.parametrize("method", METHODS)
def test_an_experts_bias_is_what_it_adds_to_a_hidden_state_of_zero(method, mlp, randomise, x):
    layer = make(method, mlp, randomise, expert_bias=True)
    layer.encoder.weight.data.zero_()
    layer.encoder.bias.data.zero_()  # gelu(0) = 0
    on = Code(torch.full((7, 1), 2.0, dtype=torch.float64), torch.full((7, 1), 4))
    expected = 2 * layer.unit_weight(4)[-1] + layer.bias
    torch.testing.assert_close(layer.decode(x, on), expected.expand(7, -1))


@pytest.mark.parametrize("method", METHODS)
def test_the_bias_adds_one_row_and_is_named_where_it_is_on(method, mlp):
    plain, biased = (
        parse_layer(
            {"method": method, "num_units": N, "sparsity": {"kind": "topk", "k": 3}, "expert_bias": on}
        ).resolve(mlp)
        for on in (False, True)
    )
    row = {"mxd": 5, "cp_mumoe": 2, "tr_mumoe": 8, "tucker_mumoe": 2, "moe": 5 * N}[method]  # O, R, R2 R3, RI
    assert biased.num_params - plain.num_params == row
    assert "bias" in biased.slug and "bias" not in plain.slug
    assert biased.slug.replace("-bias", "") == plain.slug


@pytest.mark.parametrize("method", FACTORISED)
def test_mixtures_of_experts_are_cases_of_the_unfactorised_one(method, mlp, randomise, x):
    layer, moe = make(method, mlp, randomise), make("moe", mlp, randomise)
    shared = {name: p for name, p in layer.state_dict().items() if name in moe.state_dict()}
    experts = torch.stack([layer.unit_weight(n) for n in range(N)])
    moe.load_state_dict(shared | {"experts": experts})
    torch.testing.assert_close(moe(x), layer(x))


# --- starts -------------------------------------------------------------------------------------------------------


def wide(method, start):
    config = parse_layer({"method": method, "num_units": 400, "start": start, "sparsity": {"kind": "topk", "k": 3}})
    return config.resolve(MLPShape(d_in=25, d_out=64, hidden=100, activation="relu", glu=False)).build()


@pytest.mark.parametrize("method", FACTORISED)
@pytest.mark.parametrize("start", ["paper", "replicate"])
def test_the_output_factor_starts_at_zero(method, start):
    layer = wide(method, start)
    zero = layer.output_factor
    assert torch.equal(zero, torch.zeros_like(zero))
    assert ("replicate" in layer.config.slug) == (start == "replicate")


@pytest.mark.parametrize("method", FACTORISED)
def test_the_papers_start_draws_factors_as_linear_layers(method):
    layer = wide(method, "paper").requires_grad_(False)
    bounded = [(layer.expert_factor, 400), (layer.input_factor, 100)]
    if method == "tucker_mumoe":
        bounded.append((layer.core, 16 * 16))
    for parameter, fan_in in bounded:
        bound = 1 / math.sqrt(fan_in)
        assert 0.97 * bound < parameter.abs().max() <= bound * (1 + 1e-6)
        assert abs(float(parameter.mean())) < 0.05 * bound


@pytest.mark.parametrize("method", FACTORISED)
def test_replicated_experts_begin_alike_up_to_noise(method):
    """The muMoE paper's start: N(1, 1), for a tensor ring on the diagonal of each expert's matrix."""
    layer = wide(method, "replicate").requires_grad_(False)
    rows = layer.expert_factor
    if method == "tr_mumoe":
        rows = rows.view(400, 4, 4)
        off = rows - torch.diag_embed(rows.diagonal(dim1=1, dim2=2))
        assert torch.equal(off, torch.zeros_like(off))
        rows = rows.diagonal(dim1=1, dim2=2)
    assert abs(float(rows.mean()) - 1) < 0.1 and abs(float(rows.std()) - 1) < 0.1
    if method == "tucker_mumoe":
        torch.testing.assert_close(layer.input_factor.norm(dim=1), torch.ones(100))
        torch.testing.assert_close(layer.core.norm(), torch.tensor(1.0))
    else:  # the other factors as in the paper's start
        assert 0.09 < layer.input_factor.abs().max() <= 0.1


def test_a_start_that_is_not_asked_for_draws_nothing():
    """The start changes the experts' factor alone, so that the factors drawn before and after it stay the same."""
    paper, replicate = wide("cp_mumoe", "paper"), wide("cp_mumoe", "replicate")
    for name, parameter in paper.named_parameters():
        assert torch.equal(parameter, replicate.get_parameter(name)) == (name != "expert_factor")


# --- sizes --------------------------------------------------------------------------------------------------------


def final_layer(method, levels, ranks, inputs=769, outputs=1000):
    """Parameters of a muMoE as a classifier's last layer: gates without biases, and the factors (muMoE, section 4).

    Each further level of a hierarchy adds a gate and a factor; in a tensor ring a core of ``R1 x N x R1``, in Tucker's
    form a mode of rank N to the core.
    """
    gates = (inputs - 1) * sum(levels)
    if method == "cp_mumoe":
        return gates + ranks[0] * (sum(levels) + inputs + outputs)
    if method == "tr_mumoe":
        one, two, three = ranks
        further = one * one * sum(levels[1:])
        return gates + one * levels[0] * two + further + two * inputs * three + three * outputs * one
    of_levels = [ranks[0], *levels[1:]]
    factors = sum(n * r for n, r in zip(levels, of_levels, strict=True)) + inputs * ranks[1] + outputs * ranks[2]
    return gates + factors + math.prod(of_levels) * ranks[1] * ranks[2]


PUBLISHED = [
    ("cp_mumoe", [128], [512], 1000, 1_069_568),
    ("cp_mumoe", [128, 2], [512], 1000, 1_072_128),
    ("cp_mumoe", [128, 4, 4, 4], [512], 1000, 1_084_928),
    ("cp_mumoe", [8192], [512], 1000, 11_391_488),
    ("tr_mumoe", [128], [4, 4, 512], 1000, 3_723_264),
    ("tr_mumoe", [128, 2], [4, 4, 512], 1000, 3_724_832),
    ("tr_mumoe", [128, 4], [4, 4, 512], 1000, 3_726_400),
    ("tr_mumoe", [512], [4, 4, 512], 1000, 4_024_320),
    ("tr_mumoe", [1024], [4, 4, 512], 1000, 4_425_728),  # printed as 8,851,456, which is twice as many
    ("tucker_mumoe", [128], [64, 64, 64], 1000, 481_856),
    ("tucker_mumoe", [128, 2], [64, 64, 64], 1000, 745_540),
    ("tucker_mumoe", [128, 4], [64, 64, 64], 1000, 1_271_376),
    ("cp_mumoe", [128], [512], 40, 578_048),
    ("tr_mumoe", [128], [4, 4, 512], 40, 1_757_184),
]
RANKS = {
    "cp_mumoe": ("rank",),
    "tr_mumoe": ("rank_1", "rank_2", "rank_3"),
    "tucker_mumoe": ("rank_units", "rank_in", "rank_out"),
}


@pytest.mark.parametrize(("method", "levels", "ranks", "outputs", "published"), PUBLISHED)
def test_published_sizes(method, levels, ranks, outputs, published):
    """The muMoE paper's tables, and what the layers count for their experts."""
    assert final_layer(method, levels, ranks, outputs=outputs) == published
    named = dict(zip(RANKS[method], ranks, strict=True))
    named |= {"d_in": 768, "d_out": outputs, "hidden": 768, "expert_bias": True}
    if len(levels) == 1:
        named["num_units"] = levels[0]
    else:
        named |= {"levels": levels, "sparsity": {"kind": "levels", "levels": [1] * len(levels)}}
    assert parse_layer({"method": method, **named}).expert_params + 768 * sum(levels) == published


GPT2 = MLPShape(768, 768, 3072, "gelu_tanh", False)


@pytest.mark.parametrize(
    ("method", "fields", "units"),
    [
        ("tr_mumoe", {}, 41_353),
        ("tr_mumoe", {"rank_3": 48}, 44_170),
        ("mxd", {}, 21_504),
        ("cp_mumoe", {"rank_share": 1.0}, 21_120),
        ("moe", {}, 15),
    ],
)
def test_experts_at_gpt2s_budget(method, fields, units):
    config = size(LAYERS[method](**fields).resolve(GPT2))
    assert config.num_units == units
    per_unit = config.model_copy(update={"num_units": units + 1}).num_params - config.num_params
    assert abs(config.num_params - 37_774_080) <= per_unit / 2


def test_llamas_mxd_stands_for_two_trillion_parameters():
    config = MxDConfig(num_units=86_015).resolve(MLPShape(3072, 3072, 8192, "silu", True))
    assert f"{config.unfactorised_params:.2e}" == "2.16e+12"
    n, d, h = 86_015, 3072, 8192
    assert config.unfactorised_params == 2 * h * (d + 1) + n * (d + 1) + n * h * d + d


@pytest.mark.parametrize("method", METHODS)
def test_unfactorised_parameters_are_those_of_the_moe(method, mlp):
    fields = {"num_units": N, "expert_bias": True, "sparsity": {"kind": "jumprelu"}, "bos_constant": True}
    config, moe = (parse_layer({"method": name, **fields}).resolve(mlp) for name in (method, "moe"))
    assert config.unfactorised_params == moe.num_params == moe.unfactorised_params
    assert (config.num_params == moe.num_params) == (method == "moe")


def test_mxd_is_copied_from_a_base_mlp_with_expert_biases_too(mlp, randomise, x):
    """The row of biases is zero."""
    layer = make("mxd", mlp, randomise, expert_bias=True)
    base = MLPWeights(torch.randn(8, 6).double(), None, None, torch.randn(8, 5).double(), None)
    layer.copy_base(base)
    torch.testing.assert_close(layer(x), F.gelu(x @ base.encoder.T, approximate="tanh") @ base.decoder)
