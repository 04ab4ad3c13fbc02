"""Parameter matching: table 2 of the MxD paper, and the exact matching that is the default."""

import pytest
from variants import GENERAL

from mxd.common.errors import MxdError
from mxd.layers import LAYERS, MLPShape, parse_layer, size
from mxd.layers.mxd import MxDConfig
from mxd.layers.sizing import transcoder_params
from mxd.layers.sparsity import ReLUL1Config, TopKConfig
from mxd.layers.transcoder import TranscoderConfig

GPT2 = MLPShape(768, 768, 3072, "gelu_tanh", False)
PYTHIA_410M = MLPShape(1024, 1024, 4096, "gelu", False)
PYTHIA_1B4 = MLPShape(2048, 2048, 8192, "gelu", False)
LLAMA_3B = MLPShape(3072, 3072, 8192, "silu", True)
BASES = {"gpt2": GPT2, "pythia-410m": PYTHIA_410M, "pythia-1.4b": PYTHIA_1B4, "llama-3.2-3b": LLAMA_3B}
AFFINE = [name for name in GENERAL if name != "molt"]
METHODS = [(name, {}) for name in AFFINE] + [
    ("transcoder", {"skip": True}),
    ("cp_mumoe", {"rank_share": 2.0}),
    ("molt", {"rank": 32, "halvings": 0}),
]
"""Those whose units all cost the same."""


@pytest.mark.parametrize(
    ("base", "features", "experts", "params"),
    [
        (GPT2, 24_576, 21_490, (37.7e6, 38.4e6, 37.7e6)),
        (PYTHIA_410M, 32_768, 28_658, (67.1e6, 68.2e6, 67.1e6)),
        (PYTHIA_1B4, 65_536, 57_330, (268.5e6, 272.7e6, 268.4e6)),
        (LLAMA_3B, 98_304, 86_015, (604e6, 614e6, 604e6)),
    ],
    ids=BASES,
)
def test_table_2_of_the_paper(base, features, experts, params):
    """The numbers of units exactly, and the parameters to the precision in which the paper prints them."""
    tc, stc, mxd = (
        size(config.resolve(base), expansion=32, match="paper")
        for config in (TranscoderConfig(), TranscoderConfig(skip=True), MxDConfig())
    )
    assert (tc.num_units, stc.num_units, mxd.num_units) == (features, features, experts)
    digit = 1e6 if base is LLAMA_3B else 1e5
    assert (tc.num_params, stc.num_params, mxd.num_params) == pytest.approx(params, abs=digit)
    assert mxd.num_params == pytest.approx(tc.num_params, rel=1e-3)


@pytest.mark.parametrize(("expansion", "experts"), [(4, 6), (5, 7), (6, 9)])
def test_the_papers_convention_rounds_to_the_nearest(expansion, experts):
    """``(2 d H_tc - 2 d H*) / (2 d + 1)`` with d = 2, H* = 1: 5.6, 7.2 and 8.8."""
    config = MxDConfig(sparsity=TopKConfig(k=1)).resolve(MLPShape(2, 2, 1, "relu", False))
    assert size(config, expansion=expansion, match="paper").num_units == experts


@pytest.mark.parametrize("hidden", range(5, 12))
def test_the_papers_convention_for_glu_is_the_most_units_the_budget_pays_for(hidden):
    """Its counts are true, and it rounds down."""
    config = MxDConfig(sparsity=TopKConfig(k=1)).resolve(MLPShape(7, 7, hidden, "silu", True))
    n, budget = size(config, expansion=8, match="paper").num_units, transcoder_params(7, 7, 56)
    assert config.model_copy(update={"num_units": n}).num_params <= budget
    assert config.model_copy(update={"num_units": n + 1}).num_params > budget


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize(("method", "fields"), METHODS)
def test_exact_matching_is_as_near_as_a_whole_unit_allows(method, fields, base):
    config = size(LAYERS[method](**fields).resolve(base), expansion=32)
    budget = 32 * base.d_in * (base.d_in + 1 + base.d_out) + base.d_out
    one_more = config.model_copy(update={"num_units": config.num_units + 1})
    per_unit = one_more.num_params - config.num_params
    assert per_unit > 0
    assert abs(config.num_params - budget) <= per_unit / 2


@pytest.mark.parametrize(("method", "fields"), METHODS)
def test_sizing_meets_a_budget_that_can_be_met(method, fields, mlp):
    config = LAYERS[method](sparsity=TopKConfig(k=1), **fields).resolve(mlp)
    for units in (1, 2, 17, 1000):
        budget = config.model_copy(update={"num_units": units}).num_params
        assert config.sized(budget).num_units == units
        assert config.sized(budget + 1).num_units == config.sized(budget - 1).num_units == units


def test_a_transcoder_gets_its_own_width(mlp):
    config = size(TranscoderConfig(sparsity=TopKConfig(k=4)).resolve(mlp), expansion=3)
    assert config.num_units == 3 * mlp.d_in
    assert config.num_params == transcoder_params(mlp.d_in, mlp.d_out, 18) == 18 * 7 + 18 * 5 + 5


def test_every_unit_of_mxd_costs_a_gate_row_a_row_of_c_and_a_bias():
    config = MxDConfig(num_units=100).resolve(GPT2)
    assert config.model_copy(update={"num_units": 101}).num_params - config.num_params == 2 * 768 + 1


@pytest.mark.parametrize("match", ["exact", "paper"])
@pytest.mark.parametrize("sparsity", [TopKConfig(k=1), ReLUL1Config()], ids=["topk", "relu_l1"])
@pytest.mark.parametrize("method", ["mxd", "cp_mumoe"])
def test_a_budget_below_what_the_units_share_is_an_error(method, sparsity, match):
    """At expansion 2 the transcoder costs less than the dense encoder and the decoder alone."""
    with pytest.raises(MxdError, match=r"raise sizing.expansion"):
        size(LAYERS[method](sparsity=sparsity).resolve(GPT2), expansion=2, match=match)


def test_a_skip_alone_can_exceed_the_budget():
    with pytest.raises(MxdError, match=r"STC: a budget of 10 parameters does not pay for .* \(590,592\)"):
        TranscoderConfig(skip=True).resolve(GPT2).sized(10)


def test_more_active_units_than_units_found_is_an_error(mlp):
    config = TranscoderConfig(sparsity=TopKConfig(k=7)).resolve(mlp)
    assert size(config, expansion=2).num_units == 12
    with pytest.raises(MxdError, match="k = 7 is more than its 6 units"):
        size(config, expansion=1)


def test_a_stated_number_of_units_is_kept():
    """Also where the budget would pay for none."""
    config = MxDConfig(num_units=40).resolve(GPT2)
    assert size(config, expansion=2) == config


@pytest.mark.parametrize("method", LAYERS)
def test_widths_are_needed_to_size_a_layer(method):
    """An error, and no search without end for a count that does not grow."""
    config = LAYERS[method]()
    if method in ("linear", "low_rank"):
        pytest.skip("sized by the widths alone, or by the rank")
    with pytest.raises(MxdError, match=r"d_in and d_out not set; call config\.resolve"):
        config.sized(1_000_000)


def test_what_does_not_fit_once_the_size_is_known_is_one_line(mlp):
    config = parse_layer({"method": "transcoder", "sparsity": {"kind": "jumprelu", "l0": 100_000}}).resolve(mlp)
    with pytest.raises(MxdError, match=r"\ATC: l0 = 100000 is more than num_units = \d+.*\.\Z"):
        size(config)
