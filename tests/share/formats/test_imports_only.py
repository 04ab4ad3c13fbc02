"""Gemma Scope 2 and the reference code's pickles, against their formulas in NumPy, on real inputs."""

import json
import pickle
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mxd.artifacts.checkpoint import load_layer
from mxd.common.errors import MxdError
from mxd.model.loading import load_frozen
from mxd.share.formats import import_layers
from mxd.share.formats.reference import CONFIG_CLASS
from mxd.splice import spliced

D, N = 32, 40


def relu(a):
    return np.maximum(a, 0.0)


def topk(a, k):
    return np.where(a >= np.sort(a, axis=-1)[:, -k:][:, :1], a, 0.0)


def close(got, expected):
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=1e-3, atol=1e-4)


# --- Gemma Scope 2 ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma(folder_of):
    """A tiny Gemma 3, whose blocks have a norm after the MLP, too."""
    return folder_of("gemma3_text", intermediate_size=64, num_key_value_heads=2, head_dim=8, sliding_window=16)


def scope(folder, skip=True, **changes):
    """A folder as Gemma Scope 2 has them, with random weights."""
    tensors = {"w_enc": (D, N), "b_enc": (N,), "w_dec": (N, D), "b_dec": (D,)}
    tensors |= {"affine_skip_connection": (D, D)} if skip else {}
    found = {name: torch.randn(shape) for name, shape in tensors.items()} | {"threshold": torch.rand(N)}
    folder.mkdir()
    save_file(found, folder / "params.safetensors")
    block = "model.layers.1"
    hooks = {"in": f"{block}.pre_feedforward_layernorm.output", "out": f"{block}.post_feedforward_layernorm.output"}
    settings = {"architecture": "jump_relu", "width": N, "l0": 7, "model_name": "tiny/gemma"}
    settings |= {f"hf_hook_point_{way}": name for way, name in hooks.items()}
    (folder / "config.json").write_text(json.dumps(settings | changes))
    return {name: t.double().numpy() for name, t in found.items()}


@pytest.mark.parametrize("skip", [False, True])
def test_gemma_scope_gives_its_outputs_and_is_not_spliced_before_the_norm_it_predicts(gemma, ids, tmp_path, skip):
    t = scope(tmp_path / "theirs", skip)
    (found,) = import_layers(tmp_path / "theirs", tmp_path / "ours", "gemma-scope", gemma, device="cpu")
    base = load_frozen(gemma, device="cpu")
    loaded, x = load_layer(found.path), base.record(ids, [1])[1][0].reshape(-1, D)
    m = x.double().numpy()
    pre = m @ t["w_enc"] + t["b_enc"]
    a = pre * (pre > t["threshold"])
    close(loaded.layer(x), a @ t["w_dec"] + t["b_dec"] + (m @ t["affine_skip_connection"] if skip else 0))
    assert loaded.provenance.block == 1 and loaded.provenance.site == "mlp and post_feedforward_layernorm"
    assert any("not be spliced" in note for note in found.notes)
    with pytest.raises(MxdError, match="'mlp and post_feedforward_layernorm', not of the mlp module"):
        spliced(base, {1: loaded}).__enter__()


def test_the_hook_points_are_what_the_model_has_there(gemma, ids):
    """Input: what the norm before hands to the mlp module. Output: not the module's, but what the norm after makes."""
    base = load_frozen(gemma, device="cpu")
    block, seen = base.blocks[1], {}
    for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
        getattr(block, name).register_forward_hook(
            lambda _, args, out, name=name: seen.__setitem__(name, (args[0], out))
        )
    with base.watched([1]) as found:
        base.logits(ids)
    x, y = found[1]
    assert torch.equal(seen["pre_feedforward_layernorm"][1], x)
    assert torch.equal(seen["post_feedforward_layernorm"][0], y)
    assert not torch.allclose(seen["post_feedforward_layernorm"][1], y)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "relu"}, "expected 'jump_relu'"),
        ({"hf_hook_point_out": None}, "is an autoencoder"),
        ({"width": 16384}, "width = 16384, the tensors 40"),
        ({"hf_hook_point_in": "model.layers.1.output"}, "unknown input"),
    ],
)
def test_other_gemma_scopes_are_refused(gemma, tmp_path, changes, message):
    scope(tmp_path / "theirs", **changes)
    with pytest.raises(MxdError, match=message):
        import_layers(tmp_path / "theirs", tmp_path / "ours", "gemma-scope", gemma, device="cpu")


# --- the reference code -------------------------------------------------------------------------------------------


def config(**fields):
    """A config as the reference code pickles it: an instance of a class of its own, with a dtype and a device in it."""
    return {
        "is_transcoder": True,
        "model_name": "gpt2-small",
        "hook_point": "blocks.1.ln2.hook_normalized",
        "out_hook_point": "blocks.1.hook_mlp_out",
        "dataset_path": "Skylion007/openwebtext",
        "context_size": 128,
        "total_training_tokens": 60_000_000,
        "seed": 42,
        "lr": 4e-4,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "n_experts": [3],
        **fields,
    }


OURS = {"use_conditional": False, "use_glu": False, "use_skip": False, "mlp_activation_fn": "relu", "topk": 5}
HIDDEN, EXPERTS = 24, 17


def save(path, cfg, shapes, monkeypatch):
    """Save as the reference does, under its class's name; return the tensors in NumPy."""
    state = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    module, _, name = CONFIG_CLASS.rpartition(".")
    made = type(name, (), {"__module__": module})()
    made.__dict__ |= cfg
    with monkeypatch.context() as patch:  # the class exists where the file is written, and not where it is read
        patch.setitem(sys.modules, module.partition(".")[0], ModuleType("sae_training"))
        patch.setitem(sys.modules, module, ModuleType(module))
        setattr(sys.modules[module], name, type(made))
        torch.save({"cfg": made, "state_dict": state}, path)
    return {name: tensor.double().numpy() for name, tensor in state.items()}


TRANSCODER = {"W_enc": (D, N), "b_enc": (N,), "W_dec": (N, D), "b_dec": (D,), "b_dec_out": (D,)}
MXD = {"W_enc": (D, HIDDEN), "b_enc": (HIDDEN,), "W_dec": (HIDDEN, D), "b_dec": (D,), "b_dec_out": (D,)}
MXD |= {"gate": (EXPERTS, D), "gate_bias": (EXPERTS,), "W_cond": (D, EXPERTS)}


def dunefsky(t, x, _):
    return relu((x - t["b_dec"]) @ t["W_enc"] + t["b_enc"]) @ t["W_dec"] + t["b_dec_out"]


def transcoder(t, x, cfg):
    cfg = SimpleNamespace(**cfg)
    a = relu(x @ t["W_enc"] + t["b_enc"])
    a = topk(a, cfg.topk) if cfg.topk > 0 else a
    return a @ t["W_dec"] + t["b_dec_out"] + (x @ t["W_skip.weight"].T if cfg.use_skip else 0)


def gelu(a):
    return 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))


def mxd(t, x, cfg):
    cfg = SimpleNamespace(**cfg)
    z = gelu(x @ t["W_enc"] + t["b_enc"])
    if cfg.use_glu:
        z = z * (x @ t["W_glu.weight"].T + t["W_glu.bias"])
    a = topk(relu(x @ t["gate"].T + t["gate_bias"]), cfg.topk)
    return (z @ t["W_dec"]) * (a @ t["W_cond"].T) + t["b_dec_out"]


GELU = {"use_conditional": True, "mlp_activation_fn": "gelu_pytorch_tanh"}
FORMS = {
    "dunefsky": ({}, TRANSCODER, dunefsky),
    "transcoder": (OURS, TRANSCODER, transcoder),
    "l1": (OURS | {"topk": -1}, TRANSCODER, transcoder),
    "skip": (OURS | {"use_skip": True}, TRANSCODER | {"W_skip.weight": (D, D)}, transcoder),
    "mxd": (OURS | GELU, MXD, mxd),
    "mxd-glu": (OURS | GELU | {"use_glu": True}, MXD | {"W_glu.weight": (HIDDEN, D), "W_glu.bias": (HIDDEN,)}, mxd),
}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("form", FORMS)
def test_reference_files_give_the_reference_outputs(form, kind, folder_of, ids, tmp_path, monkeypatch):
    """On the model's own inputs: theirs of the normalized tensor is ours of the MLP's input."""
    fields, shapes, formula = FORMS[form]
    name = folder_of(kind)
    cfg = config(**fields)
    t = save(tmp_path / "theirs.pt", cfg, shapes, monkeypatch)
    (found,) = import_layers(tmp_path / "theirs.pt", tmp_path / "ours", "reference", name, device="cpu")
    base, loaded = load_frozen(name, device="cpu"), load_layer(found.path)
    m, block = base.record(ids, [1])[1][0].reshape(-1, D), base.blocks[1]
    norm = block.ln_2 if kind == "gpt2" else block.post_attention_layernorm
    normalized = (m - norm.bias) / norm.weight if kind == "gpt2" else m / norm.weight
    close(loaded.layer(m), formula(t, normalized.double().numpy(), cfg))
    about = loaded.provenance
    assert (about.block, about.tokens, about.seed) == (1, 60_000_000, 42)
    assert about.data == {"source": "Skylion007/openwebtext", "context": 128} and about.training["lr"] == 4e-4
    assert ("centred" in about.input_convention) == (kind == "gpt2") == any("centred" in note for note in found.notes)


def test_a_layer_norm_model_does_not_see_the_mean_of_an_mlps_output(gpt2_folder, ids):
    """Why centred outputs may stand in a splice: the logits are the same with and without the mean."""
    base = load_frozen(gpt2_folder, device="cpu")
    mlp, plain = base.mlp(1), base.logits(ids)
    handle = mlp.register_forward_hook(lambda _, args, out: out - out.mean(-1, keepdim=True))
    centred = base.logits(ids)
    handle.remove()
    half = mlp.register_forward_hook(lambda _, args, out: out / 2)
    assert not torch.allclose(base.logits(ids), plain, atol=1e-2)
    half.remove()
    torch.testing.assert_close(centred, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"is_transcoder": False}, "is an autoencoder"),
        (OURS | {"use_glu": True}, "use_glu True"),
        (OURS | {"mlp_activation_fn": "gelu"}, "mxd's have ReLU"),
        (OURS | {"use_conditional": True, "mlp_activation_fn": "sigmoid"}, "activation 'sigmoid'"),
        ({"hook_point": "blocks.1.hook_resid_mid"}, "unknown input"),
        (OURS | {"use_conditional": True}, "unexpected tensors|missing"),
    ],
)
def test_reference_forms_that_mxd_has_not_are_refused(gpt2_folder, tmp_path, monkeypatch, fields, message):
    save(tmp_path / "theirs.pt", config(**fields), TRANSCODER, monkeypatch)
    with pytest.raises(MxdError, match=message):
        import_layers(tmp_path / "theirs.pt", tmp_path / "ours", "reference", gpt2_folder, device="cpu")


class Trap:
    """Pickled, it runs a command when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("where", ["cfg", "state_dict", "beside"])
def test_a_pickle_that_runs_code_is_refused_and_does_not_run_it(gpt2_folder, tmp_path, where):
    content = {"cfg": {"is_transcoder": True}, "state_dict": {"W_enc": torch.zeros(D, N)}}
    trap = (
        {where: Trap(tmp_path / "ran")}
        if where == "beside"
        else {where: content[where] | {"x": Trap(tmp_path / "ran")}}
    )
    torch.save(content | trap, tmp_path / "theirs.pt")
    with pytest.raises(MxdError, match=r"is refused: it needs io.open, and mxd reads tensors"):
        import_layers(tmp_path / "theirs.pt", tmp_path / "ours", "reference", gpt2_folder, device="cpu")
    assert not (tmp_path / "ran").exists()


def test_plain_pickles_and_other_files_are_refused(gpt2_folder, tmp_path):
    path = tmp_path / "theirs.pkl"
    for content in (
        pickle.dumps({"cfg": {}, "state_dict": {}}),
        b"",
        b"no pickle",
        pickle.dumps(Trap(tmp_path / "ran")),
    ):
        path.write_bytes(content)
        with pytest.raises(MxdError, match=r"theirs.pkl"):
            import_layers(path, tmp_path / "ours", "reference", gpt2_folder, device="cpu")
    assert not (tmp_path / "ran").exists()
    for found in ([1], {"cfg": {}}, {"cfg": 3, "state_dict": {}}, {"cfg": {}, "state_dict": {"W_enc": 3}}):
        torch.save(found, path)
        with pytest.raises(MxdError, match=r"expected a mapping with cfg and state_dict|is not a tensor"):
            import_layers(path, tmp_path / "ours", "reference", gpt2_folder, device="cpu")
    with pytest.raises(MxdError, match="no file at"):
        import_layers(tmp_path / "none.pt", tmp_path / "ours", "reference", gpt2_folder, device="cpu")
