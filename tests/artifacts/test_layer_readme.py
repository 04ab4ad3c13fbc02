"""The card in a layer's folder says what was measured, as soon as it was."""

import pytest

from mxd.artifacts.card import Member, layer_card
from mxd.artifacts.checkpoint import save_layer
from mxd.artifacts.provenance import Provenance
from mxd.evaluation.checkpoints import save_results
from mxd.layers import parse_layer

FIELDS = {"method": "transcoder", "d_in": 4, "d_out": 4, "num_units": 6, "sparsity": {"kind": "topk", "k": 2}}


@pytest.fixture
def folder(tmp_path):
    origin = Provenance(model="tiny", revision=None, block=1, fingerprint="f" * 16, tokens=64, seed=0)
    return save_layer(tmp_path / "run" / "block1-tc-k2", parse_layer(FIELDS).build(seed=0), origin)


def results(increase, **about):
    replaced = {"method": "TC", "sparsity": "k2", "block": 1, "units": 6, "tokens_trained": 64}
    replaced["params"] = parse_layer(FIELDS).num_params
    result = {"tokens": 5000, "ce_base": 3.5, "ce_increase": increase, "blocks": {"1": {"normalized_mse": 0.25}}}
    result["replacements"] = [replaced | about]
    return {"model": "tiny", "data": {"source": "s"}, "results": {"run/block1-tc-k2": result}}


def test_numbers_of_the_run_and_of_the_layer_reach_its_card(folder):
    card = folder / "README.md"
    assert "Not evaluated yet" in card.read_text()
    save_results(results(0.125, tokens_trained=1), folder.parent / "faithfulness.json")  # of another layer
    save_results(results(0.125), folder.parent / "elsewhere.json")
    save_results(results(0.125), folder.parent.parent / "faithfulness.json")  # where no layers are
    assert "Not evaluated yet" in card.read_text()
    save_results(results(0.125), folder.parent / "faithfulness.json")
    assert "Not evaluated yet" not in card.read_text() and "| +0.1250 |" in card.read_text()
    assert "Fidelity is measured on one text" in card.read_text()
    save_results(results(0.25), folder / "faithfulness.json")
    assert "| +0.2500 |" in card.read_text()
    save_results(results(0.5), folder.parent / "faithfulness.json")  # the layer's own numbers stay, as when pushed
    assert "| +0.2500 |" in card.read_text()


def test_cards_of_the_hub_and_of_others_stay_but_keep_no_false_word(folder):
    from mxd.artifacts.folders import read_layer

    card = folder / "README.md"
    card.write_text("# Mine\n")
    save_results(results(0.125), folder / "faithfulness.json")
    assert card.read_text() == "# Mine\n"
    card.write_text(layer_card(Member("", *read_layer(folder)), "org/name@" + "0" * 40, "mit"))
    save_results(results(0.125), folder / "faithfulness.json")
    assert "Not evaluated yet" not in card.read_text() and "license: mit" in card.read_text()
    card.unlink()
    save_results(results(0.125), folder / "faithfulness.json")
    assert not card.exists()
