"""Layers are listed from their cards, and a release's layers are packed so that they load and show their numbers."""

import sys
import tarfile

import pytest
from test_scripts import script

import mxd
from mxd.artifacts.measured import Evaluation
from mxd.artifacts.provenance import Provenance
from mxd.artifacts.transfer import write_cards
from mxd.common.errors import MxdError
from mxd.common.files import write_json
from mxd.layers import LAYERS, MLPShape
from mxd.layers.sparsity import TopKConfig

SHORT = ["--training.tokens", "1024", "--training.batch_tokens", "512", "--training.buffer_tokens", "1024"]


@pytest.fixture
def run(tmp_path):
    """A run of two layers of which one was measured."""
    folder, results = tmp_path / "run", {}
    for method, k in (("mxd", 2), ("transcoder", 3)):
        config = LAYERS[method](num_units=12, sparsity=TopKConfig(k=k)).resolve(MLPShape(8, 8, 16, "gelu_tanh", False))
        origin = Provenance(block=3, model="org/<base>|x", revision=None, fingerprint="abc", tokens=4000, seed=7)
        mxd.save_layer(folder / f"block3-{method}-k{k}", config.build(), origin)
    replaced = {"method": "MxD", "sparsity": "k2", "block": 3, "units": 12, "params": 0, "tokens_trained": 4000}
    replaced["params"] = mxd.load_layer(folder / "block3-mxd-k2").layer.config.num_params
    site = {"normalized_mse": 0.25, "fvu": 0.5}
    numbers = {"tokens": 50, "ce_base": 3.5, "ce_increase": 0.0625, "blocks": {"3": site}, "replacements": [replaced]}
    results["run/block3-mxd-k2"] = numbers
    write_json(folder / "faithfulness.json", {"model": "org/base", "data": {"source": "a"}, "results": results})
    assert Evaluation.read(folder / "faithfulness.json")
    return folder


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()]


def test_the_table_shows_what_the_cards_say(run):
    zoo = script("zoo")
    header, _, mxd_row, tc_row = cells(zoo.table([run]))
    assert (mxd_row[header.index("NMSE")], tc_row[header.index("NMSE")]) == ("–", "–")  # the cards are from before
    write_cards(run, "mit")
    header, _, mxd_row, tc_row = cells(zoo.table([run]))
    measured, other = dict(zip(header, mxd_row, strict=True)), dict(zip(header, tc_row, strict=True))
    assert (measured["NMSE"], measured["CE increase"], measured["KL"]) == ("0.2500", "0.0625", "–")
    assert (other["NMSE"], other["license"]) == ("–", "mit")
    assert (measured["method"], measured["sparsity"], measured["units"]) == ("MxD", "k2", "12")
    assert measured["base model"] == r"org/&lt;base>\|x"
    assert measured["parameters"] == f"{mxd.load_layer(run / 'block3-mxd-k2').layer.config.num_params:,}"


def test_a_page_keeps_what_stands_around_its_table():
    zoo = script("zoo")
    page = f"before\n{zoo.BEGIN}\nold\n{zoo.END}\nafter\n"
    assert zoo.written(page, "new") == f"before\n{zoo.BEGIN}\n\nnew\n\n{zoo.END}\nafter\n"
    assert zoo.written(zoo.written(page, "new"), "new") == zoo.written(page, "new")


def test_cards_are_those_of_a_push_but_for_the_address(run):
    cards = write_cards(run)
    assert cards[-1] == run / "README.md" and len(cards) == 3
    text = (run / "block3-mxd-k2" / "README.md").read_text()
    assert "0.2500" in text and 'mxd.spliced(model, {3: "path/to/this/folder"})' in text
    (one,) = write_cards(run / "block3-mxd-k2", "mit")
    assert one == run / "block3-mxd-k2" / "README.md" and "license: mit" in one.read_text()
    with pytest.raises(MxdError, match="no checkpoint"):
        write_cards(run / "absent")


@pytest.mark.long
def test_layers_of_a_release_load_and_show_their_numbers(tmp_path, monkeypatch):
    words = ["--out", str(tmp_path / "dist"), *SHORT, "--data.split", "validation"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["release_layers", *words])
    script("release_layers").main()
    with tarfile.open(tmp_path / "dist" / "tiny-gpt2-layers.tar.gz") as tar:
        tar.extractall(tmp_path / "got", filter="data")
    folder = tmp_path / "got" / "tiny-gpt2-layers"
    assert not (folder / "state").exists() and (folder / "faithfulness.json").is_file()
    assert set(mxd.load_layers(folder)) == {"block2-mxd-k32", "block2-stc-k32", "block2-tc-k32"}
    header, _, *rows = cells(script("zoo").table([folder]))
    assert all(float(row[header.index("NMSE")]) > 0 and row[-1] == "apache-2.0" for row in rows)
