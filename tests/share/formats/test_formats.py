"""Each format against its tool's own formula in NumPy, there and back, and what is refused.

The tools themselves are run by scripts/check_interop.py.
"""

import json

import numpy as np
import pytest
import torch
import yaml
from command import mxd
from safetensors.torch import load_file, save_file

from mxd.artifacts.checkpoint import load_layer
from mxd.common.errors import MxdError
from mxd.model.loading import load_frozen
from mxd.share.formats import FORMATS, export_layers, import_layers

D, N, K = 32, 40, 5
TOPK, RELU, JUMP = {"kind": "topk", "k": K}, {"kind": "relu_l1", "l1": 0.0}, {"kind": "jumprelu"}
GROUPS, BATCH = {"kind": "group_max", "k": K}, {"kind": "batch_topk", "k": K}


@pytest.fixture(scope="module")
def base(gpt2_folder):
    return load_frozen(gpt2_folder, device="cpu")


@pytest.fixture
def x():
    return torch.randn(50, D)


def no_text():
    raise AssertionError("nothing is lost here, so no text is read")


def rows(text=2):
    """Held-out contexts of random words, as many as are asked for."""
    rng = np.random.default_rng(text)
    return lambda start: (rng.integers(1, 4096, 16) for _ in range(400))


def numbers(path):
    """A file's tensors in NumPy, float64."""
    return {name: tensor.double().numpy() for name, tensor in load_file(path).items()}


def topk(pre, k=K):
    """The k largest of each row, the rest zero."""
    kth = np.sort(pre, axis=-1)[:, -k:][:, :1]
    return np.where(pre >= kth, pre, 0.0)


def relu(a):
    return np.maximum(a, 0.0)


def close(got, expected):
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=1e-4, atol=1e-5)


def same_state(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- sparsify -----------------------------------------------------------------------------------------------------


def sparsify_formula(folder, x):
    """``TopK(relu(x encoder.weight^T + encoder.bias)) W_dec + b_dec + x W_skip^T``."""
    t, x = numbers(folder / "sae.safetensors"), x.double().numpy()
    a = topk(relu(x @ t["encoder.weight"].T + t["encoder.bias"]), json.loads((folder / "cfg.json").read_text())["k"])
    return a @ t["W_dec"] + t["b_dec"] + (x @ t["W_skip"].T if "W_skip" in t else 0)


@pytest.mark.parametrize("skip", [False, True])
def test_sparsify_computes_the_same_from_what_is_written(base, make, x, tmp_path, skip):
    trained = make(base, tmp_path, skip=skip)
    (written,) = export_layers({"a": trained}, base, no_text, tmp_path / "out", "sparsify")
    assert written.path == tmp_path / "out" / "h.1.mlp" and written.loss is None
    close(trained.layer(x), sparsify_formula(written.path, x))
    settings = json.loads((written.path / "cfg.json").read_text())
    assert settings["transcode"] and settings["skip_connection"] == skip
    assert (settings["d_in"], settings["num_latents"], settings["k"], settings["activation"]) == (D, N, K, "topk")


def test_sparsify_has_group_max(base, make, x, tmp_path):
    """The largest of each of k contiguous groups, after ReLU, as its ``fused_encoder`` computes it."""
    trained = make(base, tmp_path, sparsity=GROUPS)
    (written,) = export_layers({"a": trained}, base, no_text, tmp_path / "out", "sparsify")
    settings, t = json.loads((written.path / "cfg.json").read_text()), numbers(written.path / "sae.safetensors")
    assert (settings["activation"], settings["k"]) == ("groupmax", K)
    groups = relu(x.double().numpy() @ t["encoder.weight"].T + t["encoder.bias"]).reshape(50, K, N // K)
    a = np.where(groups == groups.max(-1, keepdims=True), groups, 0).reshape(50, N)
    close(trained.layer(x), a @ t["W_dec"] + t["b_dec"])


@pytest.mark.parametrize("family", ["gpt2", "neox-parallel", "llama"])
def test_hookpoints_are_paths_under_the_base_model(family, folder_of, make, tmp_path):
    base = load_frozen(folder_of(family), device="cpu")
    (written,) = export_layers({"a": make(base, tmp_path)}, base, no_text, tmp_path / "out", "sparsify")
    assert written.path.name == ("h.1.mlp" if family == "gpt2" else "layers.1.mlp")
    assert base.module.base_model.get_submodule(written.path.name) is base.mlp(1)


# --- there and back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    ("tool", "sparsity"),
    [
        ("sparsify", TOPK),
        ("sparsify", GROUPS),
        ("circuit-tracer", TOPK),
        ("circuit-tracer", RELU),
        ("circuit-tracer", JUMP),
        ("saelens", RELU),
        ("saelens", JUMP),
    ],
)
def test_there_and_back_is_bit_exact(base, make, tmp_path, tool, sparsity, skip):
    """Weights, thresholds and provenance; the base model is the one that mxd noted, the block the one in the files."""
    trained = {str(i): make(base, tmp_path, i, skip=skip, sparsity=sparsity) for i in (1, 0)}
    written = export_layers(trained, base, rows, tmp_path / "out", tool, tokens=256)
    assert [item.source for item in written] == ["1", "0"] and all(
        str(i) in item.path.name for i, item in zip((1, 0), written, strict=True)
    )
    found = import_layers(tmp_path / "out", tmp_path / "back", tool, device="cpu")
    assert len(found) == 2
    for item in found:
        back = load_layer(item.path)
        original = trained[str(back.provenance.block)]
        assert back.layer.config == original.layer.config and same_state(back.layer, original.layer)
        assert back.provenance == original.provenance


@pytest.mark.parametrize("tool", ["sparsify", "circuit-tracer", "saelens"])
def test_the_constant_at_bos_is_left_out_with_a_word(base, make, tmp_path, tool):
    sparsity = TOPK if tool == "sparsify" else RELU
    one = make(base, tmp_path, block=0, sparsity=sparsity, bos_constant=True)
    x, y = torch.randn(D), torch.randn(D)
    one.layer.store_bos(x, y)
    (found,) = export_layers({"a": one}, base, no_text, tmp_path / "out", tool)
    back = import_layers(tmp_path / "out", tmp_path / "back", tool, model=base.source)
    bare = load_layer(back[0].path).layer
    assert bare.config == one.layer.config.model_copy(update={"bos_constant": False})
    assert torch.equal(one.layer(x), y)
    off = np.linalg.norm(bare(x) - y) / np.linalg.norm(y)
    assert f"off by {off:.0%} of the MLP's output there" in found.notes[0]
    one.layer.store_bos(torch.zeros(D), y)  # nothing stored
    assert export_layers({"a": one}, base, no_text, tmp_path / "none", tool)[0].notes == ()


@pytest.mark.parametrize("tool", ["sparsify", "circuit-tracer", "saelens"])
def test_another_base_model_is_refused_on_the_way_back(base, make, folder_of, tmp_path, tool):
    layers = {"a": make(base, tmp_path, 0, sparsity=RELU if tool == "saelens" else TOPK)}
    export_layers(layers, base, rows, tmp_path / "out", tool, tokens=256)
    other = folder_of("gpt2", seed=7)
    with pytest.raises(MxdError, match=r"was trained for block 0 of .* \(MLP fingerprint"):
        import_layers(tmp_path / "out", tmp_path / "back", tool, model=other, device="cpu")
    with pytest.raises(MxdError, match="has other weights there"):
        export_layers(layers, load_frozen(other, device="cpu"), rows, tmp_path / "again", tool)


def test_random_k_goes_out_as_its_k_of_evaluation(base, make, x, tmp_path):
    trained = make(base, tmp_path, sparsity={"kind": "random_k", "k": K, "spread": 2})
    (written,) = export_layers({"a": trained}, base, no_text, tmp_path / "out", "sparsify")
    close(trained.layer(x), sparsify_formula(written.path, x))


# --- SAELens ------------------------------------------------------------------------------------------------------


def saelens_formula(folder, x):
    """``(relu(pre) * (pre > threshold)) W_dec + b_dec + x W_skip^T``, ``pre = x W_enc + b_enc``."""
    t, x = numbers(folder / "sae_weights.safetensors"), x.double().numpy()
    pre = x @ t["W_enc"] + t["b_enc"]
    a = relu(pre) * (pre > t["threshold"]) if "threshold" in t else relu(pre)
    return a @ t["W_dec"] + t["b_dec"] + (x @ t["W_skip"].T if "W_skip" in t else 0)


def saelens_folder(folder, architecture, **metadata):
    """A folder as SAELens's ``save_model`` writes it, with random weights."""
    tensors = {"W_enc": (D, N), "b_enc": (N,), "W_dec": (N, D), "b_dec": (D,)}
    tensors |= {"threshold": (N,)} if "jumprelu" in architecture else {}
    tensors |= {"W_skip": (D, D)} if "skip" in architecture else {}
    folder.mkdir()
    save_file({name: torch.randn(shape) for name, shape in tensors.items()}, folder / "sae_weights.safetensors")
    metadata = {"sae_lens_version": "6.54.12", "hook_name": "blocks.1.mlp.hook_in"} | metadata
    settings = {"d_in": D, "d_sae": N, "d_out": D, "apply_b_dec_to_input": False, "normalize_activations": "none"}
    settings |= {"architecture": architecture, "reshape_activations": "none", "metadata": metadata}
    (folder / "cfg.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("sparsity", [RELU, JUMP], ids=["relu", "jumprelu"])
def test_saelens_computes_the_same_from_what_is_written(base, make, x, tmp_path, sparsity, skip):
    trained = make(base, tmp_path, skip=skip, sparsity=sparsity)
    (written,) = export_layers({"a": trained}, base, no_text, tmp_path / "out", "saelens")
    close(trained.layer(x), saelens_formula(written.path, x))
    settings = json.loads((written.path / "cfg.json").read_text())
    assert settings["architecture"] == f"{'jumprelu_' * (sparsity is JUMP)}{'skip_' * skip}transcoder"
    assert settings["metadata"]["hf_hook_name"] == "transformer.h.1.mlp.input"
    assert settings["metadata"]["hook_name_out"] == "blocks.1.hook_mlp_out" and not settings["apply_b_dec_to_input"]


@pytest.mark.parametrize(
    "architecture", ["transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder"]
)
def test_every_architecture_of_saelens_is_read(gpt2_folder, x, tmp_path, architecture):
    """Negative thresholds among them, which its ReLU makes zeros."""
    folder = saelens_folder(tmp_path / "theirs", architecture, dataset_path="some/text", context_size=64)
    (found,) = import_layers(folder, tmp_path / "ours", "saelens", gpt2_folder, device="cpu")
    loaded = load_layer(found.path)
    close(loaded.layer(x), saelens_formula(folder, x))
    assert loaded.provenance.block == 1 and loaded.provenance.data == {"source": "some/text", "context": 64}
    assert found.path.parent == tmp_path / "ours"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "topk"}, "unknown architecture 'topk'; choose one of: transcoder"),
        ({"apply_b_dec_to_input": True}, "apply_b_dec_to_input is true"),
        ({"normalize_activations": "layer_norm"}, "normalize_activations is 'layer_norm'"),
        ({"reshape_activations": "hook_z"}, "for attention outputs"),
        ({"d_sae": N + 1}, f"d_sae = {N + 1}, the tensors {N}"),
        ({"d_sae": "many"}, "d_sae: expected a whole number, got 'many'"),
        ({"architecture": "skip_transcoder"}, "not those of a skip_transcoder"),
        ({"metadata": {"hook_name": "blocks.1.hook_resid_mid"}}, "choose one of: mlp.hook_in"),
        ({"metadata": {"hook_name_out": "blocks.2.hook_mlp_out"}}, "reads block 1 and writes block 2"),
        ({"metadata": {"hook_name": "blocks.7.mlp.hook_in"}}, "block 7 is out of range"),
        ({"metadata": {"hook_name": "blocks.1.ln2.hook_normalized"}}, "Say which: --input mlp_in"),
    ],
)
def test_what_saelens_has_and_mxd_has_not_is_refused(gpt2_folder, tmp_path, changes, message):
    folder = saelens_folder(tmp_path / "theirs", "transcoder")
    settings = json.loads((folder / "cfg.json").read_text())
    metadata = settings["metadata"] | changes.get("metadata", {})
    (folder / "cfg.json").write_text(json.dumps(settings | changes | {"metadata": metadata}))
    with pytest.raises(MxdError, match=message):
        import_layers(folder, tmp_path / "ours", "saelens", gpt2_folder, device="cpu")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_inputs_before_the_affine_part_are_folded(kind, folder_of, ids, tmp_path):
    """On a real input: what the transcoder makes of the normalized tensor, ours makes of the MLP's input."""
    name = folder_of(kind)
    base = load_frozen(name, device="cpu")
    folder = saelens_folder(tmp_path / "theirs", "jumprelu_skip_transcoder", hook_name="blocks.1.ln2.hook_normalized")
    (found,) = import_layers(
        folder, tmp_path / "ours", "saelens", name, input="normalized" if kind == "gpt2" else None, device="cpu"
    )
    m = base.record(ids, [1])[1][0].reshape(-1, D)
    norm = base.blocks[1].ln_2 if kind == "gpt2" else base.blocks[1].post_attention_layernorm
    normalized = (m - norm.bias) / norm.weight if kind == "gpt2" else m / norm.weight
    assert (norm.weight - 1).abs().max() > 0.1
    close(load_layer(found.path).layer(m), saelens_formula(folder, normalized))


# --- thresholds ---------------------------------------------------------------------------------------------------


def test_thresholds_minimise_the_squared_error_of_each_units_activations(base, make, tmp_path):
    """No threshold between any two of a unit's pre-activations does better, by trying all of them."""
    from mxd.share.formats.jumprelu import fit_thresholds

    layer, x = make(base, tmp_path).layer, torch.randn(200, D)
    pre = layer.pre_activations(x).double().numpy()
    target = topk(relu(pre))
    fitted = fit_thresholds(layer, x).double().numpy()

    def error(n, t):
        return ((pre[:, n] * (pre[:, n] > t) - target[:, n]) ** 2).sum()

    for n in range(N):
        candidates = np.concatenate([[0.0], relu(pre[:, n])])
        assert error(n, fitted[n]) <= min(error(n, t) for t in candidates) + 1e-6
    assert (fitted >= 0).all() and len(set(fitted.round(3))) > N / 2


def test_thresholds_by_hand():
    """One unit, TopK drops its 5 and keeps two 3s: all off costs 18, all on 25. Without the 5: on, halfway to the 1."""
    from mxd.share.formats.jumprelu import _fit

    smallest = torch.tensor([[torch.inf], [3.0], [2.0]])
    assert _fit(torch.tensor([[5.0], [3.0], [3.0]]), smallest).item() == 5
    assert _fit(torch.tensor([[1.0], [3.0], [3.0]]), smallest).item() == 2


def test_a_unit_that_never_fires_is_switched_off(base, make, tmp_path):
    from mxd.share.formats.jumprelu import fit_thresholds

    layer, x = make(base, tmp_path).layer, torch.randn(200, D)
    layer.encoder[7] *= 1e-3
    layer.encoder_bias[7] = 0.01  # positive at times, never among the largest
    pre = layer.pre_activations(x)[:, 7]
    assert (pre > 0).any() and fit_thresholds(layer, x)[7] >= pre.max()


def test_a_loss_is_not_measured_of_a_few_tokens(base, make, tmp_path):
    with pytest.raises(MxdError, match="tokens = 255 is too few to measure what is lost; expected 256 or more"):
        export_layers({"a": make(base, tmp_path, 0)}, base, rows, tmp_path / "out", "saelens", True, tokens=255)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tool", ["saelens", "circuit-tracer"])
def test_topk_goes_out_with_fitted_thresholds_and_says_what_that_loses(base, make, tmp_path, tool):
    trained = make(base, tmp_path, 0, skip=True)
    (written,) = export_layers({"a": trained}, base, rows, tmp_path / "out", tool, jumprelu=True, tokens=2048)
    (found,) = import_layers(tmp_path / "out", tmp_path / "back", tool, device="cpu")
    back = load_layer(found.path).layer
    assert back.config.sparsity.kind == "jumprelu" and (back.sparsity.threshold > 0).all()
    assert all(torch.equal(back.state_dict()[k], v) for k, v in trained.layer.state_dict().items())
    loss = written.loss
    assert loss.tokens == 1024 and loss.l0 == K and 0.5 * K < loss.l0_converted < 1.5 * K and 0.3 < loss.changed <= 1
    x, y = (t.reshape(-1, D) for t in base.record(torch.randint(1, 4096, (40, 16)), [0])[0])
    norm = y.norm(dim=-1)
    for layer, noted in ((trained.layer, loss.nmse), (back, loss.nmse_converted)):
        assert ((layer(x) - y).square().sum(-1) / norm).mean() / D == pytest.approx(noted, rel=0.1)
    assert loss.nmse != loss.nmse_converted and f"{loss.nmse:.5f} -> {loss.nmse_converted:.5f}" in loss.line
    if tool == "saelens":
        noted = json.loads((written.path / "cfg.json").read_text())["metadata"]["mxd"]["loss"]
        assert (noted["nmse"], noted["nmse_converted"]) == (loss.nmse, loss.nmse_converted)


# --- circuit-tracer -----------------------------------------------------------------------------------------------


def circuit_tracer_formula(file, x, k=None):
    """TopK without ReLU, or ``pre * (pre > threshold)``, or ReLU; ``a W_dec + b_dec + x W_skip^T``."""
    t, x = numbers(file), x.double().numpy()
    pre = x @ t["W_enc"].T + t["b_enc"]
    threshold = t.get("activation_function.threshold", np.zeros(1))
    a = topk(pre, k) if k else pre * (pre > threshold)
    return a @ t["W_dec"] + t["b_dec"] + (x @ t["W_skip"].T if "W_skip" in t else 0)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("sparsity", [TOPK, RELU, JUMP], ids=["topk", "relu", "jumprelu"])
def test_circuit_tracer_computes_the_same_from_what_is_written(base, make, x, tmp_path, sparsity, skip):
    layers = {str(i): make(base, tmp_path, i, skip=skip, sparsity=sparsity) for i in (0, 1)}
    written = export_layers(layers, base, rows, tmp_path / "out", "circuit-tracer", tokens=256)
    settings = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert settings["model_kind"] == "transcoder_set" and settings.get("k") == (K if sparsity is TOPK else None)
    assert (settings["feature_input_hook"], settings["feature_output_hook"]) == ("mlp.hook_in", "hook_mlp_out")
    for item, trained in zip(written, layers.values(), strict=True):
        close(trained.layer(x), circuit_tracer_formula(item.path, x, settings.get("k")))
        assert (item.loss is None) == (sparsity is not TOPK)
        names = {"W_enc", "W_dec", "b_enc", "b_dec"} | ({"W_skip"} if skip else set())
        assert set(numbers(item.path)) == names | ({"activation_function.threshold"} if sparsity is JUMP else set())


def test_tokens_with_few_positive_pre_activations_are_counted(base, make, tmp_path):
    """Where fewer than K are positive, circuit-tracer's TopK hands on negative ones; here, for some tokens."""
    trained = make(base, tmp_path, 0)
    x, y = (t.reshape(-1, D) for t in base.record(torch.randint(1, 4096, (60, 16)), [0])[0])
    trained.layer.encoder_bias -= trained.layer.pre_activations(x).topk(K).values[:, -1].median()
    few = ((trained.layer.pre_activations(x) > 0).sum(-1) < K).float().mean().item()
    assert 0.05 < few < 0.95
    (written,) = export_layers({"a": trained}, base, rows, tmp_path / "out", "circuit-tracer", tokens=1024)
    assert written.loss.changed == pytest.approx(few, abs=0.08)
    theirs = torch.from_numpy(circuit_tracer_formula(written.path, x, K))
    nmse = ((theirs - y).square().sum(-1) / y.norm(dim=-1)).mean().item() / D
    assert (
        written.loss.nmse_converted == pytest.approx(nmse, rel=0.1) and written.loss.l0 < written.loss.l0_converted == K
    )


def test_a_set_is_contiguous_and_of_one_form(base, make, tmp_path):
    for layers, message in (
        ({"a": make(base, tmp_path, 1)}, r"one layer for each block from 0 on; these replace \[1\]"),
        ({"a": make(base, tmp_path, 0), "b": make(base, tmp_path, 1, units=41)}, "one width, one activation"),
        ({"a": make(base, tmp_path, 0), "b": make(base, tmp_path, 1, skip=True)}, "skips everywhere or nowhere"),
        (
            {"a": make(base, tmp_path, 0), "b": make(base, tmp_path, 0, sparsity={"kind": "topk", "k": 6})},
            r"2 layers replace block 0 \(tc-k5, tc-k6\)",
        ),
    ):
        with pytest.raises(MxdError, match=message):
            export_layers(layers, base, rows, tmp_path / "out", "circuit-tracer", tokens=256)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transcoders": ["hf://org/name/layer_0.safetensors"]}, "names 'hf://org/name/layer_0.safetensors'"),
        ({"transcoders": ["../elsewhere.safetensors"]}, "not in this folder"),
        ({"transcoders": ["/etc/passwd"]}, "not in this folder"),
        ({"model_kind": "cross_layer_transcoder"}, "writes to all later blocks"),
        ({"activation": "topk", "k": None}, "k is not given"),
        ({"feature_input_hook": "hook_resid_mid"}, "choose one of: mlp.hook_in"),
        ({"activation": ["relu"]}, "activation: expected "),
    ],
)
def test_what_circuit_tracer_has_and_mxd_has_not_is_refused(base, make, tmp_path, change, message):
    export_layers({"a": make(base, tmp_path, 0, sparsity=RELU)}, base, rows, tmp_path / "out", "circuit-tracer")
    config = tmp_path / "out" / "config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | change))
    with pytest.raises(MxdError, match=message):
        import_layers(tmp_path / "out", tmp_path / "back", "circuit-tracer", device="cpu")


def test_negative_thresholds_are_refused_where_they_would_matter(base, make, tmp_path):
    trained = make(base, tmp_path, 0, sparsity=JUMP)
    trained.layer.sparsity.threshold[3] = -1.0
    export_layers({"a": trained}, base, rows, tmp_path / "out", "circuit-tracer")
    with pytest.raises(MxdError, match="some thresholds are negative"):
        import_layers(tmp_path / "out", tmp_path / "back", "circuit-tracer", device="cpu")


# --- what no format holds, and files that are not what they seem --------------------------------------------------


@pytest.mark.parametrize("tool", ["sparsify", "saelens", "circuit-tracer"])
@pytest.mark.parametrize("method", ["mxd", "cp_mumoe", "topk_sae"])
def test_other_methods_are_refused_with_what_holds_them(base, make, tmp_path, tool, method):
    trained = make(base, tmp_path, 0, method=method)
    with pytest.raises(MxdError, match=rf"{tool} holds transcoders and skip transcoders.*export-model"):
        export_layers({"a": trained}, base, no_text, tmp_path / "out", tool)
    assert not (tmp_path / "out").exists()


def test_batch_topk_goes_out_as_one_threshold_and_loses_nothing(base, make, x, tmp_path):
    trained = make(base, tmp_path, 0, sparsity=BATCH)
    for tool, formula in {"saelens": saelens_formula, "circuit-tracer": circuit_tracer_formula}.items():
        (written,) = export_layers({"a": trained}, base, no_text, tmp_path / tool, tool)
        assert written.loss is None
        close(trained.layer(x), formula(written.path, x))
        (back,) = import_layers(tmp_path / tool, tmp_path / f"back-{tool}", tool, device="cpu")
        layer = load_layer(back.path).layer
        assert torch.equal(layer.sparsity.threshold, torch.full((N,), 0.9))
        close(layer(x), trained.layer(x).double().numpy())
    assert 0 < (trained.layer.encode(x).activations > 0).double().mean() < 1


def test_other_sparsities_are_refused_with_what_holds_them(base, make, tmp_path):
    for sparsity in (JUMP, BATCH):
        message = rf"sparsify holds topk, random_k, group_max, and this layer is {sparsity['kind']}.*: saelens, circuit"
        with pytest.raises(MxdError, match=message):
            export_layers({"a": make(base, tmp_path, sparsity=sparsity)}, base, no_text, tmp_path / "out", "sparsify")
    with pytest.raises(MxdError, match=r"this layer is group_max; only TopK .*: sparsify"):
        export_layers({"a": make(base, tmp_path, sparsity=GROUPS)}, base, no_text, tmp_path / "out", "saelens")
    with pytest.raises(MxdError, match=r"this layer is softmax; .*none, but a model that `mxd export-model` writes"):
        fields = {"kind": "softmax"}
        export_layers({"a": make(base, tmp_path, sparsity=fields)}, base, no_text, tmp_path / "out", "saelens")
    with pytest.raises(MxdError, match="only TopK can be turned into JumpReLU"):
        export_layers(
            {"a": make(base, tmp_path, sparsity=RELU)}, base, no_text, tmp_path / "o", "saelens", jumprelu=True
        )
    with pytest.raises(MxdError, match="unknown format to write 'gemma-scope'; choose one of: sparsify, saelens"):
        export_layers({"a": make(base, tmp_path)}, base, no_text, tmp_path / "out", "gemma-scope")
    with pytest.raises(MxdError, match=f"unknown format 'npz'; choose one of: {', '.join(FORMATS)}"):
        import_layers(tmp_path, tmp_path / "out", "npz")


def test_folders_that_exist_are_left_alone(base, make, tmp_path):
    layers = {"a": make(base, tmp_path, 0)}
    for tool in ("sparsify", "circuit-tracer"):
        export_layers(layers, base, rows, tmp_path / tool, tool, tokens=256)
        with pytest.raises(MxdError, match="exists; choose another folder"):
            export_layers(layers, base, rows, tmp_path / tool, tool, tokens=256)


@pytest.fixture
def theirs(base, make, tmp_path):
    """A sparsify folder without mxd's note."""
    (written,) = export_layers({"a": make(base, tmp_path, skip=True)}, base, no_text, tmp_path / "theirs", "sparsify")
    (written.path / "mxd.json").unlink()
    return written.path


def settings_with(**changes):
    def change(folder):
        path = folder / "cfg.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def tensors_with(**changes):
    def change(folder):
        tensors = load_file(folder / "sae.safetensors") | changes
        save_file({name: t for name, t in tensors.items() if t is not None}, folder / "sae.safetensors")

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (settings_with(transcode=False), "is an autoencoder"),
        (settings_with(activation="groupmax", k=7), "no multiple of it"),
        (settings_with(activation="relu"), "activation: expected topk or groupmax, got 'relu'"),
        (settings_with(skip_connection=False), "skip_connection is False"),
        (settings_with(d_in=10**12), rf"d_in = {10**12}, the tensors {D}"),
        (settings_with(num_latents=10**12), "num_latents"),
        (settings_with(k=N + 1), "more than num_units"),
        (settings_with(k=-1), "k: expected a number greater than 0, got -1"),
        (settings_with(junk="x" * 1_000_001), "larger than 1,000,000 bytes"),
        (tensors_with(b_dec=None), "missing tensors: .'bias'"),
        (tensors_with(W_dec=None), "decoder is missing"),
        (tensors_with(W_dec=torch.zeros(N + 1, D)), rf"decoder has shape \({N + 1}, {D}\), expected \({N}, {D}\)"),
        (tensors_with(W_gate=torch.zeros(2)), "unexpected tensors W_gate"),
        (tensors_with(b_dec=torch.zeros(D, dtype=torch.float64)), "b_dec is torch.float64"),
        (lambda folder: (folder / "sae.safetensors").write_bytes(b"no"), "cannot read"),
        (lambda folder: (folder / "cfg.json").write_text("{"), "cannot read"),
        (lambda folder: (folder / "cfg.json").write_text("[" * 100_000), "cannot read"),
    ],
)
def test_damaged_or_foreign_files_end_in_one_message(theirs, gpt2_folder, tmp_path, change, message):
    change(theirs)
    with pytest.raises(MxdError, match=message):
        import_layers(theirs, tmp_path / "ours", "sparsify", gpt2_folder, device="cpu")
    assert not (tmp_path / "ours").exists()


def test_model_and_block_are_stated_or_read_and_must_agree(theirs, gpt2_folder, folder_of, tmp_path):
    with pytest.raises(MxdError, match="does not say what its base model is; give it: --model"):
        import_layers(theirs, tmp_path / "ours", "sparsify")
    with pytest.raises(MxdError, match="holds no layer for block 2"):
        import_layers(theirs, tmp_path / "ours", "sparsify", gpt2_folder, block=2, device="cpu")
    (found,) = import_layers(theirs.parent, tmp_path / "ours", "sparsify", gpt2_folder, block=1, device="cpu")
    about = load_layer(found.path).provenance
    assert (about.block, about.model, about.excluded_ids, about.tokens) == (1, gpt2_folder, (), 0)
    assert about.fingerprint == load_frozen(gpt2_folder, device="cpu").fingerprint(1)
    unnamed = theirs.rename(theirs.parent / "mine")
    with pytest.raises(MxdError, match="does not say which block it replaces; give it: --block"):
        import_layers(unnamed, tmp_path / "more", "sparsify", gpt2_folder, device="cpu")
    (found,) = import_layers(unnamed, tmp_path / "more", "sparsify", gpt2_folder, block=0, device="cpu")
    assert load_layer(found.path).provenance.block == 0
    with pytest.raises(MxdError, match=r"hookpoint 'layers.1.attn' is no block's MLP"):
        import_layers(unnamed.rename(unnamed.parent / "layers.1.attn"), tmp_path / "m", "sparsify", gpt2_folder)


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_converts_both_ways(base, make, tmp_path, capsys):
    trained = make(base, tmp_path, 0)
    code, out, err = mxd(capsys, "convert", trained.path, tmp_path / "t", "--to", "saelens", "--tokens", "512")
    assert code == 0, err
    assert f"-> {tmp_path / 't' / 'blocks.0.mlp'}\n  not the same for" in out and "256 held-out tokens: NMSE" in out
    code, out, err = mxd(capsys, "convert", tmp_path / "t", tmp_path / "back", "--from", "saelens", "--device", "cpu")
    assert code == 0, err
    assert (tmp_path / "back" / "block0-tc-jumprelu" / "config.json").exists()
    for words in (
        ["a"],
        ["a", "b"],
        ["a", "b", "--from", "sparsify", "--to", "saelens"],
        ["a", "b", "c", "--from", "sparsify"],
    ):
        code, _, err = mxd(capsys, "convert", *words)
        assert code == 1 and ("and a tool: mxd convert" in err or "reads one file or folder, got 2" in err)
