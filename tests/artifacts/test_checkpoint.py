"""Checkpoints: what is saved comes back, what is damaged is refused, and a failure loses nothing."""

import errno
import hashlib
import json
import os
import pickle
import shutil
import stat
import warnings
from pathlib import Path

import pytest
import torch
from damage import fit_hash, flipped, forget_hash
from safetensors.torch import load_file, save_file
from variants import GENERAL

from mxd.artifacts.checkpoint import load_layer, load_layers, save_layer
from mxd.artifacts.folders import UnhashedWarning, find_layers
from mxd.artifacts.listing import layers_in
from mxd.artifacts.provenance import Provenance
from mxd.artifacts.readme import update_cards
from mxd.artifacts.tensors import fit_tensors
from mxd.common.errors import MxdError
from mxd.common.files import atomic_folder
from mxd.layers import LAYERS, MLPShape
from mxd.layers.mxd import MxDConfig
from mxd.layers.sparsity import RandomKConfig, ReLUL1Config, TopKConfig

SHAPE = MLPShape(8, 8, 16, "gelu_tanh", False)
PROVENANCE = Provenance(
    model="org/model",
    revision="abc",
    block=3,
    fingerprint="0123",
    excluded_ids=(0, 2),
    data={"source": "bundled", "context": 128},
    tokens=1000,
    seed=7,
    versions={"torch": "2"},
)


def make(method="mxd", sparsity=None, seed=0):
    layer = LAYERS[method](num_units=12, sparsity=sparsity or TopKConfig(k=3)).resolve(SHAPE).build()
    torch.manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.normal_()
    return layer.eval()


@pytest.fixture
def saved(tmp_path):
    """A saved layer's folder."""
    return save_layer(tmp_path / "layer", make(), PROVENANCE, {"loss": 0.5})


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def edit(path, change):
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


# Round trip


@pytest.mark.parametrize("method", GENERAL)
@pytest.mark.parametrize("sparsity", [TopKConfig(k=3), RandomKConfig(k=3), ReLUL1Config(l1=0.1)], ids=lambda s: s.kind)
def test_a_layer_comes_back_as_it_was(tmp_path, method, sparsity):
    layer = make(method, sparsity)
    x = torch.randn(5, 8)
    found = load_layer(save_layer(tmp_path / "layer", layer, PROVENANCE))
    assert torch.equal(found.layer(x), layer(x))
    assert found.layer.config == layer.config
    assert found.provenance == PROVENANCE
    assert found.path == tmp_path / "layer"


def test_the_state_of_the_sparsity_comes_back(tmp_path):
    layer = make(sparsity=RandomKConfig(k=3)).train()
    layer(torch.randn(5, 8))
    found = load_layer(save_layer(tmp_path / "layer", layer, PROVENANCE)).layer
    assert found.sparsity.draws == layer.sparsity.draws == 1


def test_a_loaded_layer_is_frozen(saved):
    layer = load_layer(str(saved)).layer
    assert not layer.training
    assert not any(p.requires_grad for p in layer.parameters())


def test_the_folder_explains_itself(saved):
    assert set(contents(saved)) == {"config.json", "model.safetensors", "metrics.json", "README.md"}
    config = json.loads((saved / "config.json").read_text())
    assert config["layer"]["method"] == "mxd"
    assert config["provenance"]["model"] == "org/model"
    assert json.loads((saved / "metrics.json").read_text()) == {"loss": 0.5}
    assert "# MxD for the MLP of block 3 of org/model" in (saved / "README.md").read_text()


def test_saving_again_replaces_the_layer(saved):
    layer = make(seed=1)
    save_layer(saved, layer, PROVENANCE)
    assert torch.equal(load_layer(saved).layer.decoder, layer.decoder)
    assert [path.name for path in saved.parent.iterdir()] == ["layer"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_files_have_the_modes_that_any_new_file_has(tmp_path, umask):
    def mode(path):
        return stat.S_IMODE(path.stat().st_mode)

    before = os.umask(umask)
    try:
        folder = save_layer(tmp_path / "runs" / "layer", make(), PROVENANCE)
        (tmp_path / "plain").mkdir()
        (tmp_path / "plain" / "file").touch()
    finally:
        os.umask(before)
    assert mode(folder) == mode(folder.parent) == mode(tmp_path / "plain")
    assert {mode(path) for path in folder.iterdir()} == {mode(tmp_path / "plain" / "file")}


# What may not be overwritten


def test_other_folders_are_not_overwritten(tmp_path, build_model):
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "notes.txt").write_text("mine")
    base = tmp_path / "base"
    build_model("gpt2").save_pretrained(base)  # has a config.json and a model.safetensors, too
    for folder in (notes, base):
        before = contents(folder)
        with pytest.raises(MxdError, match="holds something else; choose another folder"):
            save_layer(folder, make(), PROVENANCE)
        assert contents(folder) == before
    with pytest.raises(MxdError, match="holds something else"):
        save_layer(notes / "notes.txt", make(), PROVENANCE)
    assert (notes / "notes.txt").read_text() == "mine"
    with pytest.raises(MxdError, match="cannot write to"):
        save_layer(notes / "notes.txt" / "layer", make(), PROVENANCE)


def test_an_empty_folder_may_be_used(tmp_path):
    (tmp_path / "layer").mkdir()
    assert load_layer(save_layer(tmp_path / "layer", make(), PROVENANCE)).provenance == PROVENANCE


# Damage


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "renamed"])
def test_wrong_tensors_are_refused_and_named(saved, damage):
    path = saved / "model.safetensors"
    tensors = load_file(path)
    if damage in ("missing", "renamed"):
        gate = tensors.pop("gate")
    if damage == "renamed":
        tensors["gates"] = gate
    if damage == "extra":
        tensors["b_dec"] = torch.zeros(8)
    if damage == "shape":
        tensors["gate"] = tensors["gate"].T.contiguous()
    save_file(tensors, path)
    fit_hash(saved)
    message = {
        "missing": r"missing tensors: \['gate'\]; unexpected tensors: none",
        "extra": r"missing tensors: none; unexpected tensors: \['b_dec'\]",
        "shape": r"gate has shape \(8, 12\), expected \(12, 8\)",
        "renamed": r"missing tensors: \['gate'\]; unexpected tensors: \['gates'\]",
    }[damage]
    with pytest.raises(MxdError, match=message):
        load_layer(saved)


def test_fit_tensors_accepts_what_fits():
    assert fit_tensors({"a": torch.zeros(2)}, {"a": torch.ones(2)}, "here") is None


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_tensors_are_refused(saved, keep):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(MxdError, match=r"model.safetensors is not what was saved: its SHA-256 is .*again"):
        load_layer(saved)
    fit_hash(saved)
    with pytest.raises(MxdError, match=r"cannot read .*model.safetensors.*again"):
        load_layer(saved)


def test_no_tensors_are_refused(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(MxdError, match=r"cannot read .*model.safetensors"):
        load_layer(saved)


class Malicious:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


def test_a_pickle_is_refused_and_not_run(saved):
    trace = saved / "ran"
    (saved / "model.safetensors").write_bytes(pickle.dumps(Malicious(trace)))
    fit_hash(saved)
    with pytest.raises(MxdError, match=r"cannot read .*model.safetensors"):
        load_layer(saved)
    torch.save(Malicious(trace), saved / "model.safetensors")
    fit_hash(saved)
    with pytest.raises(MxdError, match=r"cannot read .*model.safetensors"):
        load_layer(saved)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format=1), "not an mxd layer of format 2"),
        (lambda c: c.pop("format"), "not an mxd layer of format 2"),
        (lambda c: c["layer"].update(method="mxdd"), "unknown method 'mxdd'; choose one of: mxd, transcoder"),
        (lambda c: c.pop("layer"), "unknown method None"),
        (lambda c: c.update(layer=["mxd"]), "unknown method None"),
        (lambda c: c["layer"].update(colour="red"), "bad mxd config: (.|\n)*colour"),
        (lambda c: c["layer"].update(num_units=-1), "bad mxd config: (.|\n)*num_units"),
        (lambda c: c["layer"].update(num_units=None), "num_units not set"),
        (lambda c: c["layer"].update(num_units=20), r"has shape .* expected \(20"),
        (lambda c: c["provenance"].pop("fingerprint"), "bad provenance: (.|\n)*fingerprint"),
        (lambda c: c.pop("provenance"), "bad provenance"),
    ],
)
def test_a_wrong_config_is_refused(saved, change, message):
    edit(saved / "config.json", change)
    with pytest.raises(MxdError, match=message):
        load_layer(saved)


@pytest.mark.parametrize("text", ["{", "", "[1]", '"layer"', "\x00"])
def test_a_config_that_is_no_json_object_is_refused(saved, text):
    (saved / "config.json").write_text(text)
    with pytest.raises(MxdError, match=r"config.json"):
        load_layer(saved)


def test_no_checkpoint_there(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(MxdError, match=r"no checkpoint at .* expected a folder with config.json"):
            load_layer(path)


# The tensors' hash


def test_the_config_names_the_hash_of_the_tensors(saved):
    config = json.loads((saved / "config.json").read_text())
    assert config["tensors_sha256"] == hashlib.sha256((saved / "model.safetensors").read_bytes()).hexdigest()


def test_no_flipped_bit_is_accepted(saved):
    path = saved / "model.safetensors"
    numbers = 8 + int.from_bytes(path.read_bytes()[:8], "little")  # behind the header: what nothing else would notice
    seen = 0
    for bit in flipped(path, 300):
        with pytest.raises(MxdError, match=r"model\.safetensors is not what was saved: .* checkpoint again\."):
            load_layer(saved)
        seen += bit >= 8 * numbers
    assert seen > 100
    assert torch.equal(load_layer(saved).layer.decoder, make().decoder)


def test_in_a_set_the_damaged_layer_is_named(tmp_path):
    for name in ("a", "b"):
        save_layer(tmp_path / "run" / name, make(), PROVENANCE)
    for _ in flipped(tmp_path / "run" / "b" / "model.safetensors", 1):
        with pytest.raises(MxdError, match=r"run/b/model\.safetensors is not what was saved"):
            load_layers(tmp_path / "run")
        assert list(load_layers(tmp_path / "run", "a")) == ["a"]


def test_the_comparison_can_be_left_out_in_python(saved):
    last = 8 * (saved / "model.safetensors").stat().st_size - 1
    tensors = bytearray((saved / "model.safetensors").read_bytes())
    tensors[last // 8] ^= 1  # the sign or a digit of the last number
    (saved / "model.safetensors").write_bytes(tensors)
    with pytest.raises(MxdError, match="not what was saved"):
        load_layer(saved)
    assert load_layer(saved, verify=False).provenance == PROVENANCE
    assert list(load_layers(saved, verify=False)) == ["layer"]


@pytest.mark.parametrize("value", [None, 5, "", "0" * 64, ["0" * 64], {"x": 1}])
def test_a_hash_that_is_none_does_not_fit(saved, value):
    edit(saved / "config.json", lambda config: config.update(tensors_sha256=value))
    with pytest.raises(MxdError, match="not what was saved"):
        load_layer(saved)


def test_a_layer_saved_before_there_were_hashes_loads_with_one_warning(saved):
    forget_hash(saved)
    with pytest.warns(
        UnhashedWarning, match=r"layer/config\.json, .*, names no SHA-256 of model\.safetensors"
    ) as found:
        layer = load_layer(saved).layer
    assert torch.equal(layer.decoder, make().decoder)
    assert [each.category for each in found] == [UnhashedWarning]
    load_layer(saved, verify=False)  # a warning would be an error here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnhashedWarning)
        load_layer(saved)


# Atomic writes


@pytest.fixture
def full_disk(monkeypatch):
    """Fill the disk in the middle of writing tensors."""

    def fail(tensors, path, *rest, **options):
        Path(path).write_bytes(b"the first half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("mxd.artifacts.checkpoint.save_file", fail)


def test_a_full_disk_leaves_the_old_layer(saved, full_disk):
    before = contents(saved)
    with pytest.raises(MxdError, match=r"cannot write .*No space left on device.*Free space"):
        save_layer(saved, make(seed=1), PROVENANCE)
    assert contents(saved) == before
    assert [path.name for path in saved.parent.iterdir()] == ["layer"]
    assert load_layer(saved).provenance == PROVENANCE


def test_a_full_disk_leaves_no_half_written_layer(tmp_path, full_disk):
    with pytest.raises(MxdError, match="No space left on device"):
        save_layer(tmp_path / "layer", make(), PROVENANCE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_any_failure_leaves_no_trace(tmp_path, error):
    target = tmp_path / "folder"
    with pytest.raises(error), atomic_folder(target) as partial:
        (partial / "file").write_text("half")
        assert not target.exists()
        raise error
    assert not list(tmp_path.iterdir())


def test_an_atomic_folder_replaces_the_whole_folder(tmp_path):
    target = tmp_path / "deep" / "folder"
    for name in ("first", "second"):
        with atomic_folder(target) as partial:
            (partial / name).write_text(name)
        assert [path.name for path in target.iterdir()] == [name]


# Finding layers


def test_find_layers(tmp_path):
    a, b = (save_layer(tmp_path / "run" / name, make(), PROVENANCE) for name in ("a", "b"))
    (tmp_path / "run" / "state").mkdir()
    assert find_layers(a) == [a]
    assert find_layers(str(tmp_path / "run")) == [a, b]
    for nothing in (tmp_path, tmp_path / "none", tmp_path / "run" / "state", a / "README.md"):
        with pytest.raises(MxdError, match="no checkpoint at"):
            find_layers(nothing)


def test_a_language_model_beside_layers_is_none_of_them(saved):
    """What `mxd export-model` writes has a config, weights and a README that names its own folder, too."""
    exported = saved.parent / "exported"
    exported.mkdir()
    (exported / "config.json").write_text('{"model_type": "mxd_gpt2"}')
    (exported / "model.safetensors").write_bytes(b"")
    assert find_layers(str(saved.parent)) == [saved]
    update_cards(saved.parent)
    with pytest.raises(MxdError, match=r"exported' is a language model; expected a layer's folder"):
        load_layer(exported)


def test_layers_are_listed_by_the_numbers_in_their_names(saved):
    names = ["block10-tc-k4", "block2-mxd-k16", "block2-mxd-k4", "block2-tc-k8"]
    for name in names:
        shutil.copytree(saved, saved.parent / "run" / name)
    found = [layer.name for layer in layers_in(saved.parent / "run", "*", "it")]
    assert found == ["block2-mxd-k4", "block2-mxd-k16", "block2-tc-k8", "block10-tc-k4"]


def test_a_folder_that_cannot_be_looked_into_is_one_message(tmp_path):
    with pytest.raises(MxdError, match=r"^cannot read 'it': File name too long\.$"):
        layers_in(tmp_path / ("x" * 5000), "*", "it")


def test_what_a_killed_save_left_is_not_a_layer(saved):
    saved.rename(saved.parent / ".layer.1234")
    with pytest.raises(MxdError, match="no checkpoint at"):
        find_layers(saved.parent)


def test_provenance_is_frozen_and_knows_its_fields():
    with pytest.raises(ValueError, match="frozen"):
        PROVENANCE.layer = 4
    with pytest.raises(ValueError, match="colour"):
        Provenance(model="m", revision=None, block=0, fingerprint="f", colour="red")


def test_a_config_without_sizes_cannot_be_built():
    with pytest.raises(MxdError, match=r"cannot build MxD: .*num_units"):
        MxDConfig().resolve(SHAPE).build()
