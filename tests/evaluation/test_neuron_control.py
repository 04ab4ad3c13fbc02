"""The base MLPs' neurons beside trained layers, wherever units are looked at or masked."""

import json

import pytest
from command import mxd
from small_layers import layer_for, trained_on

from mxd.artifacts.checkpoint import save_layer
from mxd.data.labelled import labelled_texts
from mxd.evaluation.checkpoints import open_checkpoints


@pytest.fixture
def run(trained_gpt2, tmp_path):
    """Two layers of block 1 and one of block 2."""
    for name, number, fields in (("a", 1, {}), ("b", 1, {"seed": 1}), ("c", 2, {})):
        made = trained_on(trained_gpt2, number, layer_for(trained_gpt2, number, **fields), model="tiny-gpt2")
        save_layer(tmp_path / "r" / name, made.layer, made.provenance)
    return tmp_path / "r"


def test_each_block_has_its_neurons_once(run, trained_gpt2):
    subject = open_checkpoints([run], model=trained_gpt2)
    assert not subject.neurons and subject.with_neurons(False) is subject
    both = subject.with_neurons()
    names = ["MLP neurons, block 1", "MLP neurons, block 2"]
    assert list(both.neurons) == names and list(both.layers) == [*subject.trained, *names]
    assert both.members[names[0]]["method"] == "MLP neurons" and both.members[names[0]]["block"] == 1
    assert both.members[names[0]]["params"] == sum(p.numel() for p in trained_gpt2.mlp(1).parameters())
    assert both.neurons[names[1]].provenance.excluded_ids == (0,)
    assert both.neurons[names[1]].provenance.tokens == 0
    assert set(both.sets()) == {*subject.trained, *names}
    some = open_checkpoints([run / "a", run / "c"], model=trained_gpt2)
    together = some.with_neurons().sets(together=True)
    assert set(together) == {*some.sets(together=True), "neurons"} and list(together["neurons"]) == [1, 2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "file"),
    [
        (["mask", "--domains", "factbook", "--limit", 2], "masking"),
        (["units", "--tokens", 256, "--top", 1], "units"),
    ],
)
def test_commands_measure_neurons_where_asked(run, capsys, words, file):
    code, out, _ = mxd(capsys, words[0], run / "a", *words[1:], "--neurons", "--device", "cpu")
    assert code == 0 and "MLP neurons, block 1" in out
    results = json.loads((run / "a" / f"{file}.json").read_text())["results"]
    assert set(results) == {"r/a", "MLP neurons, block 1"}
    if file == "masking":
        domains = labelled_texts("factbook").classes
        found = results["MLP neurons, block 1"]
        assert found["domains"] == domains
        assert found["loss"] == pytest.approx(found["loss_base"], abs=1e-4)  # nothing masked: the base model
