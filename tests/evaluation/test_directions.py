"""What units add: directions, histograms and promoted tokens against NumPy, for one direction and for many."""

import numpy as np
import pytest
import torch
from small_layers import contexts_of, dense_code, layer_for, trained_on
from variants import GENERAL

from mxd.common.errors import MxdError
from mxd.evaluation import directions as directions_module
from mxd.evaluation.checkpoints import save_results
from mxd.evaluation.units import evaluate_units
from mxd.layers import LAYERS, parse_layer
from mxd.questions import UnitsConfig

FIXED = ("transcoder", "topk_sae")
"""Methods among ``GENERAL`` whose units add one direction."""


@pytest.fixture(scope="module")
def rows():
    """24 contexts of 16 tokens, with special tokens (0) at the beginning of each and here and there."""
    rows = np.random.default_rng(0).integers(1, 4000, (24, 16))
    rows[:, 0] = 0
    rows[::3, 7] = 0
    return rows


def looked_at(model, layer, rows, units=None, number=1, **fields):
    how = UnitsConfig(tokens=rows.size, **fields)
    return evaluate_units(model, {"a": trained_on(model, number, layer)}, contexts_of(rows), how, units, 5)["a"]


def by_hand(model, direction):
    """The logits of a direction through tiny-gpt2's LayerNorm or tiny-llama's RMSNorm."""
    module = model.module
    gpt2 = module.config.model_type == "gpt2"
    norm = module.transformer.ln_f if gpt2 else module.model.norm
    direction = direction - direction.mean() if gpt2 else direction
    unembedding = module.get_output_embeddings().weight.detach().double().numpy()
    logits = unembedding @ (norm.weight.detach().double().numpy() * direction)
    return logits - logits.mean()


def check(model, layer, rows, number=1, sample=None):
    """Every number of every unit that is active in the sample, written out."""
    x, y = model.record(torch.from_numpy(rows).long(), [number])[number]
    part = slice(None, None if sample is None else -(-sample // rows.shape[1]))
    read = (x if layer.config.reads == "mlp_in" else y)[part][torch.from_numpy(rows[part] != 0)]
    code = dense_code(model, number, layer, rows)
    largest, code = (code * (rows != 0)[..., None]).max((0, 1)), code[part][rows[part] != 0]
    units = [int(n) for n in np.flatnonzero((code > 0).sum(0) > 1)][:8]
    got = looked_at(model, layer, rows, units, number, **({} if sample is None else {"sample": sample}))
    assert got["logits"]["sample"] == len(read) and got["logits"]["missing"] is None
    for unit in units:
        found, active = got["units"][str(unit)], code[:, unit] > 0
        counts = np.histogram(
            code[active, unit], np.linspace(0, largest[unit] * (1 + 1e-6), directions_module.BINS + 1)
        )
        assert np.abs(np.cumsum(found["activations"]["counts"]) - np.cumsum(counts[0])).max() <= 1  # edges in float32
        assert found["activations"]["active"] == active.sum() == sum(found["activations"]["counts"])
        assert found["activations"]["high"] == pytest.approx(largest[unit], rel=1e-4)
        with torch.no_grad():
            added = layer.unit_output(unit, read[torch.from_numpy(active)]).double().numpy()
        u = added / np.linalg.norm(added, axis=1, keepdims=True)
        pairs = (u @ u.T)[~np.eye(len(u), dtype=bool)]
        assert found["cosine"] == pytest.approx(pairs.mean(), abs=1e-5)
        logits = by_hand(model, added.mean(0))
        order = np.argsort(-logits, kind="stable")
        for key, ends in (("promoted", order[:10]), ("suppressed", order[::-1][:10])):
            assert [one["logit"] for one in found[key]] == pytest.approx(logits[ends], rel=2e-3)
            near = np.abs(np.diff(logits[ends])).min() > 1e-5 * np.abs(logits).max()
            assert not near or [one["token"] for one in found[key]] == [model.tokenizer.decode([i]) for i in ends]
        assert found["peak"] == pytest.approx(logits.max() / logits.std(), rel=1e-3)
    return got


@pytest.mark.parametrize("method", GENERAL)
def test_directions_and_histograms_agree_with_numpy(gpt2, rows, method):
    got = check(gpt2, layer_for(gpt2, 1, method), rows)
    assert got["logits"]["fixed"] == (method in FIXED)
    cosines = [unit["cosine"] for unit in got["units"].values()]
    assert all(cosine == 1 for cosine in cosines) == (method in FIXED)


@pytest.mark.parametrize(
    ("name", "norm", "centred"), [("tiny-gpt2", "LayerNorm", True), ("tiny-llama", "LlamaRMSNorm", False)]
)
def test_with_trained_norms_of_both_kinds(name, norm, centred, rows):
    from mxd.model.loading import load_frozen

    model = load_frozen(name, device="cpu")
    for method in ("mxd", "transcoder"):
        got = check(model, layer_for(model, 2, method), rows, number=2)
        assert got["logits"]["norm"] == norm and got["logits"]["centred"] == centred and got["logits"]["chance"] > 2


def test_the_sample_is_the_first_part_of_the_text(gpt2, rows):
    check(gpt2, layer_for(gpt2, 1), rows, sample=100)


def test_a_unit_that_adds_what_a_token_reads_promotes_it(trained_gpt2, rows):
    """The direction of a transcoder's unit set by hand: the token's own unembedding, the norm's weight divided out."""
    layer = layer_for(trained_gpt2, 2, "transcoder")
    weight, norm = (
        trained_gpt2.module.get_output_embeddings().weight.data,
        trained_gpt2.module.transformer.ln_f.weight.data,
    )
    layer.decoder.data[3] = weight[1234] / norm
    layer.decoder.data[4] = -weight[77] / norm
    layer.encoder_bias.data[3:5] = 1e3
    got = looked_at(trained_gpt2, layer, rows, [3, 4], 2)
    token = trained_gpt2.tokenizer.decode
    assert got["units"]["3"]["promoted"][0]["token"] == token([1234])
    assert got["units"]["4"]["suppressed"][0]["token"] == token([77])
    assert got["units"]["3"]["peak"] > 1.5 * got["logits"]["chance"]


def test_the_cosine_does_not_flatter_a_unit_that_is_rarely_active(gpt2, rows):
    """Directions drawn at random: their mean cosine is 0, however few; that to their own mean would be 1/sqrt(n)."""
    layer = layer_for(gpt2, 1)
    seen = directions_module.UnitDirections(layer, {0: 1.0})
    found = []
    for seed in range(300):
        u = torch.nn.functional.normalize(
            torch.randn(3, seen.width, generator=torch.Generator().manual_seed(seed)).double()
        )
        seen.unit_sums[0], seen.histograms[0][:] = u.sum(0), 0
        seen.histograms[0][0] = 3
        found.append(seen.cosine(0))
    assert abs(np.mean(found)) < 0.03
    seen.histograms[0][0] = 1
    assert seen.cosine(0) is None


def test_what_is_not_known_is_left_out(gpt2, rows, monkeypatch):
    layer = layer_for(gpt2, 1)
    layer.gate_bias.data[5] = -1e3
    never = looked_at(gpt2, layer, rows, [5])["units"]["5"]
    assert never["promoted"] == [] and never["cosine"] is None and never["peak"] is None
    assert never["activations"]["active"] == 0
    assert looked_at(gpt2, layer, rows, [])["logits"]["missing"] == "no unit is shown."
    nothing = torch.nn.Module()
    monkeypatch.setattr(type(gpt2.module), "get_output_embeddings", lambda self: nothing)
    got = looked_at(gpt2, layer, rows, top=2)
    assert "no output embeddings" in got["logits"]["missing"] and got["logits"]["norm"] is None
    assert all(not unit["promoted"] and unit["activations"]["active"] for unit in got["units"].values())


def test_a_layer_that_is_not_additive_has_histograms_alone(gpt2, rows):
    config = LAYERS["mumoe_block"](sparsity={"kind": "topk", "k": 3}, num_units=12)
    layer = config.resolve(gpt2.mlp_shape(1)).build(0).eval()
    got = looked_at(gpt2, layer, rows, [0, 1, 2])
    assert sum(unit["activations"]["active"] for unit in got["units"].values()) > 0
    assert all(not unit["promoted"] and unit["cosine"] is None for unit in got["units"].values())


def test_only_the_units_shown_carry_more_than_numbers(gpt2, rows, tmp_path):
    """At N = 262,144 the file holds three numbers for each unit, and no more than ``top`` units with tokens."""
    shape = gpt2.mlp_shape(1)
    fields = {"method": "transcoder", "num_units": 262_144, "sparsity": {"kind": "topk", "k": 4}}
    layer = parse_layer(fields | {"d_in": shape.d_in, "d_out": shape.d_out}).build(0).eval()
    layer.decoder.data.normal_(generator=torch.Generator().manual_seed(0))
    got = looked_at(gpt2, layer, rows[:4], top=3)
    assert len(got["rates"]) == 262_144 and len(got["units"]) == 3
    save_results({"results": {"a": got}}, tmp_path / "units.json")
    assert (tmp_path / "units.json").stat().st_size < 4.5e6
    assert {len(unit["promoted"]) for unit in got["units"].values()} == {directions_module.TOKENS}


def test_a_sample_of_nothing_is_refused():
    from mxd.questions import checked

    with pytest.raises(MxdError, match="sample: expected a number greater than 0, got 0"):
        checked(UnitsConfig, sample=0)
