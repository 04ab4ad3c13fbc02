"""Ranks against NumPy and against what the theory says; leading units against the codes written out."""

import json

import numpy as np
import pytest
from command import mxd
from small_layers import UNITS, K, contexts_of, dense_code, layer_for, trained_on
from variants import GENERAL

from mxd.artifacts.checkpoint import save_layer
from mxd.common.errors import MxdError
from mxd.evaluation import ranks as ranks_module
from mxd.evaluation.ranks import weight_ranks
from mxd.evaluation.structure import evaluate_structure, leading_units
from mxd.evaluation.walk import streamed
from mxd.questions import DEFAULTS, StructureConfig, checked


def whole(rows, **fields):
    """Ask of all rows."""
    return StructureConfig(tokens=rows.size, **fields)


@pytest.fixture(scope="module")
def rows():
    """24 contexts of 16 tokens, special tokens (0) among them."""
    rows = np.random.default_rng(0).integers(1, 60, (24, 16))
    rows[:, 0] = 0
    rows[::3, 7] = 0
    return rows


def normalized_rank(layer, first=UNITS):
    """The mean over the first units."""
    return float(weight_ranks(layer, range(first))[0].mean())


@pytest.mark.parametrize("method", GENERAL)
@pytest.mark.parametrize("numbers", [2**23, 5000, 1])
def test_ranks_agree_with_numpy(gpt2, method, numbers, monkeypatch):
    """However many weights are looked at together."""
    monkeypatch.setattr(ranks_module, "RANK_NUMBERS", numbers)
    layer = layer_for(gpt2, 1, method)
    weights = [layer.unit_weight(n).detach().numpy() for n in range(UNITS)]
    ranks = [np.linalg.matrix_rank(weight) / min(weight.shape) for weight in weights]
    stable = [np.linalg.norm(weight) ** 2 / np.linalg.norm(weight, 2) ** 2 for weight in weights]
    found = weight_ranks(layer, [3, *range(UNITS)])
    assert found[0] == pytest.approx([ranks[3], *ranks]) and found[1] == pytest.approx([stable[3], *stable], rel=1e-4)
    assert normalized_rank(layer) == pytest.approx(np.mean(ranks))
    assert normalized_rank(layer, first=7) == pytest.approx(np.mean(ranks[:7]))
    layer.bias.data.add_(100)
    assert normalized_rank(layer) == pytest.approx(np.mean(ranks)), "the bias belongs to no unit"


def test_spread_and_deficient_experts_agree_with_numpy(gpt2, rows):
    """Two experts without rank, one of rank 12 of 32, one with its energy in one direction, all others full."""
    layer = layer_for(gpt2, 1)
    layer.expert_scale.data[:2] = 0
    layer.expert_scale.data[2, 12:] = 0
    layer.expert_scale.data[3, 0] = 100
    how = whole(rows, experts=9, prompts=["The people"])
    (got,) = evaluate_structure(gpt2, {"a": trained_on(gpt2, 1, layer)}, contexts_of(rows), how).values()
    weights = [layer.unit_weight(n).detach().numpy() for n in range(9)]
    ranks = np.array([np.linalg.matrix_rank(weight) / 32 for weight in weights])
    norms = np.array([[np.linalg.norm(weight), np.linalg.norm(weight, 2)] for weight in weights])
    stable = np.divide(*norms.T, out=np.zeros(9), where=norms[:, 1] > 0) ** 2
    assert ranks.tolist() == [0, 0, 12 / 32, *[1] * 6] and stable[3] < 1.1 < 3 < stable[4:].min()
    found = [got[f"{name}{end}"] for name in ("normalized_rank", "stable_rank") for end in ("", "_sd")]
    assert found == pytest.approx([ranks.mean(), ranks.std(), stable.mean(), stable.std()], rel=1e-4)
    assert got["deficient"] == 3 and got["experts"] == 9


def test_experts_of_mxd_have_the_rank_of_the_decoder(gpt2):
    """Lemma 1: full rank where no activation is zero; each zero costs one."""
    layer = layer_for(gpt2, 1)
    assert normalized_rank(layer) == 1
    layer.expert_scale.data[0, :4] = 0
    assert normalized_rank(layer, first=1) == (32 - 4) / 32
    assert normalized_rank(layer) == pytest.approx(1 - 4 / 32 / UNITS)
    layer.decoder.data[:, 16:] = layer.decoder.data[:, :16]
    assert normalized_rank(layer, first=5) == pytest.approx((12 + 4 + 4 * 16) / 32 / 5)  # c_0 leaves the copies of 4
    layer.decoder.data.zero_()
    assert weight_ranks(layer, range(UNITS))[1].tolist() == [0] * UNITS and normalized_rank(layer) == 0


def test_a_full_rank_may_have_its_energy_in_one_direction(gpt2):
    layer = layer_for(gpt2, 1)
    layer.decoder.data[0] += 30
    normalized, stable = weight_ranks(layer, range(UNITS))
    assert normalized.mean() > 0.99 and stable.max() < 1.1


@pytest.mark.parametrize("rank", [1, 8, 24])
def test_experts_of_cp_mumoe_have_rank_r_at_most(gpt2, rank):
    assert normalized_rank(layer_for(gpt2, 1, "cp_mumoe", rank=rank)) == rank / 32


def test_progress_is_told_of_every_unit(gpt2, monkeypatch):
    monkeypatch.setattr(ranks_module, "RANK_NUMBERS", 3 * 128 * 32)
    told = []
    weight_ranks(layer_for(gpt2, 1), range(20), told.append)
    assert sum(told) == 20 and max(told) == 3


@pytest.mark.parametrize("method", GENERAL)
def test_leading_units_and_rates_agree_with_numpy(gpt2, rows, method):
    """Several layers at once; special tokens do not count in the text."""
    layers = {number: layer_for(gpt2, number, method, seed=number) for number in (0, 2)}
    trained = {str(number): trained_on(gpt2, number, layer) for number, layer in layers.items()}
    prompts = ["The people", "of the United States", "1990"]
    found = evaluate_structure(
        gpt2,
        trained,
        contexts_of(rows),
        whole(rows, experts=10, prompts=prompts),
        forward_contexts=5,
    )
    for number, layer in layers.items():
        got, code = found[str(number)], dense_code(gpt2, number, layer, rows)[rows != 0]
        leads = np.bincount(code.argmax(-1)[code.max(-1) > 0], minlength=UNITS)
        assert got["block"] == number and got["tokens"] == len(code) and got["experts"] == 10
        assert got["shape"] == list(layer.unit_weight(0).shape)
        assert leads[got["leader"]["unit"]] == leads.max()
        assert got["leader"]["share"] == pytest.approx(leads.max() / len(code))
        assert [one["prompt"] for one in got["leading"]] == prompts
        for row in got["leading"]:
            ids = np.array([[0, *gpt2.tokenizer(row["prompt"])["input_ids"]]])
            dense = dense_code(gpt2, number, layer, ids)[0, 1:]
            last, strongest = dense[-1], np.argsort(-dense)[:, :4].tolist()
            assert [one["unit"] for one in row["units"]] == strongest[-1]
            assert [token["units"] for token in row["tokens"]] == strongest
            assert "".join(token["token"] for token in row["tokens"]) == row["prompt"]
            for one in row["units"]:
                assert one["activation"] == pytest.approx(last[one["unit"]], rel=1e-4)
                assert one["rate"] == pytest.approx((code[:, one["unit"]] > 0).mean())


def test_a_shared_expert_leads_everywhere(gpt2, rows):
    layer = layer_for(gpt2, 1)
    layer.gate_bias.data[6] = 1e3
    (got,) = evaluate_structure(gpt2, {"a": trained_on(gpt2, 1, layer)}, contexts_of(rows), whole(rows)).values()
    assert got["leader"] == {"unit": 6, "share": 1.0}
    first, second = ([row["units"][place] for row in got["leading"]] for place in (0, 1))
    assert {one["unit"] for one in first} == {6} and len(first) == len(DEFAULTS.structure.prompts)
    assert {one["rate"] for one in first} == {1.0} and all(one["rate"] < 1 for one in second)


def test_fewer_units_are_named_where_fewer_are_active(gpt2):
    layer = layer_for(gpt2, 1)
    layer.gate_bias.data.fill_(-1e3)
    layer.gate_bias.data[4], layer.gate_bias.data[9] = 1e3, 2e3
    ((row,),) = leading_units(gpt2, {"a": trained_on(gpt2, 1, layer)}, ["The army"]).values()
    assert [one["unit"] for one in row["units"]] == [9, 4]
    assert {tuple(token["units"]) for token in row["tokens"]} == {(9, 4)} and len(row["tokens"]) > 1


def test_tokens_that_do_not_count_have_no_leading_unit(gpt2):
    """Nor do they move those of the others."""
    one = trained_on(gpt2, 1, layer_for(gpt2, 1))
    ((row,),) = leading_units(gpt2, {"a": one}, ["The army of the States"]).values()
    (of,) = gpt2.tokenizer(" of")["input_ids"]
    excluded = trained_on(gpt2, 1, one.layer, excluded_ids=[0, of])
    ((other,),) = leading_units(gpt2, {"a": excluded}, ["The army of the States"]).values()
    expected = [token | {"units": []} if token["token"] == " of" else token for token in row["tokens"]]
    assert other["tokens"] == expected and expected != row["tokens"]


def test_a_layer_that_is_never_active_leads_nowhere(gpt2, rows):
    layer = layer_for(gpt2, 1)
    layer.gate_bias.data.fill_(-1e3)
    (got,) = evaluate_structure(gpt2, {"a": trained_on(gpt2, 1, layer)}, contexts_of(rows), whole(rows)).values()
    assert got["leader"]["share"] == 0 and got["leading"] == []


def test_a_random_k_is_its_mean_here(gpt2):
    layer = layer_for(gpt2, 1, sparsity={"kind": "random_k", "k": K}).train()
    one = trained_on(gpt2, 1, layer)
    evaluate_structure(gpt2, {"a": one}, contexts_of(np.full((2, 8), 5)), StructureConfig(tokens=16, experts=2))
    assert layer.training and int(layer.sparsity.draws) == 0


def test_mistakes_are_named(gpt2, rows):
    one = {"a": trained_on(gpt2, 1, layer_for(gpt2, 1))}
    for field in ("tokens", "experts"):
        with pytest.raises(MxdError, match=f"{field}: expected a number greater than 0, got 0"):
            checked(StructureConfig, **{field: 0})
    with pytest.raises(MxdError, match="tokens is 0; expected at least 1"):
        next(streamed(contexts_of(rows), 0))
    with pytest.raises(MxdError, match="no complete context"):
        evaluate_structure(gpt2, one, contexts_of(rows[:0]))
    with pytest.raises(MxdError, match="at least one trained layer"):
        evaluate_structure(gpt2, {}, contexts_of(rows))
    with pytest.raises(MxdError, match="prompt '' has no tokens"):
        leading_units(gpt2, one, [""])


def test_prompts_are_checked_before_the_text_is_read(trained_gpt2):
    def unread(start):
        raise AssertionError("the text was read")

    one = {"a": trained_on(trained_gpt2, 1, layer_for(trained_gpt2, 1))}
    with pytest.raises(MxdError, match="prompt '' has no tokens"):
        evaluate_structure(trained_gpt2, one, unread, StructureConfig(prompts=("The", "")))


def test_the_command_writes_what_it_shows(trained_gpt2, tmp_path, capsys):
    data = {"source": "bundled", "split": "train", "context": 32}
    one = trained_on(trained_gpt2, 1, layer_for(trained_gpt2, 1), model="tiny-gpt2", data=data)
    save_layer(tmp_path / "block1", one.layer, one.provenance)
    words = ["--tokens", "256", "--experts", "5", "--prompt", "The army", "--prompt", "In 1990", "--device", "cpu"]
    code, out, err = mxd(capsys, "structure", tmp_path, *words)
    assert code == 0, err
    (result,) = json.loads((tmp_path / "structure.json").read_text())["results"].values()
    assert result["experts"] == 5 and result["normalized_rank"] == 1
    assert [one["prompt"] for one in result["leading"]] == ["The army", "In 1990"]
    assert "1.0000" in out
    for row in result["leading"]:
        (line,) = [line for line in out.splitlines() if f" {row['prompt']} " in line]
        for one in row["units"][:3]:
            assert f"#{one['unit']} {one['activation']:.3g} ({one['rate']:.1%})" in line
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    for token in (token for row in result["leading"] for token in row["tokens"]):
        assert [token["token"].strip(), *(f"#{unit}" for unit in token["units"])] in lines
