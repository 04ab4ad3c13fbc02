"""Exported models: what transformers loads from the folder, without mxd, is the spliced model; else it refuses."""

import ast
import copy
import functools
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import get_args

import pytest
import torch
from command import mxd as command
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import quantization_config
from variants import GENERAL
from variants import VARIANTS as ALL_VARIANTS

import mxd.share.export
from mxd.artifacts.checkpoint import Trained, save_layer
from mxd.artifacts.provenance import Provenance
from mxd.assets.modeling_spliced import FORWARDS
from mxd.common.bundled import bundled_path
from mxd.common.errors import MxdError
from mxd.evaluation.generation import step_cached
from mxd.layers import parse_layer
from mxd.layers.sparsity import AnySparsity, TopKConfig
from mxd.model.loading import load_frozen
from mxd.share.export import export_checkpoints, export_model
from mxd.splice import splice, spliced

KINDS = [kind for kind in get_args(get_args(AnySparsity)[0]) if kind.general]
VARIANTS = {name: {"method": name} for name in GENERAL} | {
    "transcoder-skip": {"method": "transcoder", "skip": True},
    "molt-skip": {"method": "molt", "skip": True, "rank": 3},
}
OWN = {
    "monet": {"kind": "product_topk", "heads": 2, "k": 3},
    "monet-vd": {"kind": "product_quantile", "heads": 2, "k": 3},
    "peer": {"kind": "pair_topk", "heads": 2, "k": 3},
    "peer-query": {"kind": "pair_topk", "heads": 2, "k": 3},
}
"""Forms of methods with kinds of sparsity of their own -> one of them."""
GREEDY = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False, "pad_token_id": 0}

EXPORTED = [
    pytest.param(variant, family, marks=() if (first + other) % 3 == 0 else pytest.mark.long)
    for first, variant in enumerate(VARIANTS)
    for other, family in enumerate(("gpt2", "neox-parallel", "llama"))
]
"""Every form in every family; in the short run each form in one, and each family with several."""


@pytest.fixture(autouse=True)
def _modules_folder(tmp_path_factory, monkeypatch):
    """Transformers copies the code it is trusted with to a folder: one of this test's own."""
    folder = str(tmp_path_factory.mktemp("modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
    monkeypatch.syspath_prepend(folder)


def replacement(model, number, variant="transcoder", kind=TopKConfig, seed=0, **options):
    """A layer with random weights that fits a block; as first built, decoders are zero."""
    sparsity = kind(k=6) if "k" in kind.model_fields else kind()
    fields = VARIANTS[variant] | {"num_units": 48, "sparsity": sparsity.model_dump()} | options
    return random_weights(parse_layer(fields).resolve(model.mlp_shape(number)).build(), seed)


def random_weights(layer, seed=0):
    """The layer with weights and buffers drawn anew, in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    for buffer in layer.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0, 0.5, generator=generator)
    return layer.eval()


def trained_on(model, number, layer, **fields):
    known = {"model": model.source, "revision": None, "block": number, "fingerprint": model.fingerprint(number)}
    return Trained(layer, Provenance(**known, **fields), Path())


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


def logits_of(module, ids):
    with torch.no_grad():
        return module(input_ids=ids, use_cache=False).logits.float()


def greedy(module, ids):
    return module.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)


def with_bos(model, ids):
    """Two layers; the first stores the MLP's output at the first token."""
    layer = replacement(model, 1, "mxd", bos_constant=True)
    x, y = model.record(ids[:1, :1], [1])[1]
    layer.store_bos(x[0, 0], y[0, 0])
    return {1: layer, 2: replacement(model, 2, seed=2)}


@pytest.fixture
def exported(gpt2, ids, tmp_path):
    """A folder with a spliced GPT-2, one layer of which stores a constant for BOS."""
    return export_model(gpt2, with_bos(gpt2, ids), tmp_path / "exported")


# What is loaded is the spliced model


@pytest.mark.parametrize(("variant", "family_name"), EXPORTED, indirect=["family_name"])
def test_the_exported_model_is_the_spliced_one(family, variant, ids, tmp_path):
    first = list(VARIANTS).index(variant)
    kinds = [KINDS[(3 * first + number) % len(KINDS)] for number in range(3)]
    layers = {number: replacement(family, number, variant, kind, number) for number, kind in enumerate(kinds)}
    base = family.logits(ids)
    module = load(export_model(family, layers, tmp_path / "out"))
    with spliced(family, layers):
        expected = family.logits(ids)
        assert greedy(module, ids).tolist() == greedy(family.module, ids).tolist()
    torch.testing.assert_close(logits_of(module, ids), expected, atol=1e-5, rtol=1e-5)
    assert (expected - base).abs().max() > 0.1


@pytest.mark.parametrize("method", ["mxd", "cp_mumoe", "tr_mumoe", "tucker_mumoe"])
def test_hierarchies(gpt2, ids, tmp_path, method):
    levels = {"levels": [6, 4, 2], "sparsity": {"kind": "levels", "levels": [3, 2, 1]}}
    layer = replacement(gpt2, 1, method, num_units=48, expert_bias=True, **levels)
    module = load(export_model(gpt2, {1: layer}, tmp_path / "out"))
    with spliced(gpt2, {1: layer}):
        torch.testing.assert_close(logits_of(module, ids), gpt2.logits(ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", OWN)
def test_layers_with_kinds_of_sparsity_of_their_own_too(gpt2, form, ids, tmp_path):
    fields = ALL_VARIANTS[form] | {"num_units": 49, "sparsity": OWN[form]}
    layer = random_weights(parse_layer(fields).resolve(gpt2.mlp_shape(1)).build())
    base = gpt2.logits(ids)
    module = load(export_model(gpt2, {1: layer}, tmp_path / "out"))
    with spliced(gpt2, {1: layer}):
        expected = gpt2.logits(ids)
    torch.testing.assert_close(logits_of(module, ids), expected, atol=1e-5, rtol=1e-5)
    assert (expected - base).abs().max() > 0.1


@pytest.mark.parametrize(
    "fields", [{"method": "linear"}, {"method": "low_rank", "rank": 3}], ids=["linear", "low_rank"]
)
def test_linear_maps_too(gpt2, ids, tmp_path, fields):
    layer = parse_layer(fields).resolve(gpt2.mlp_shape(1)).sized(10_000).build()
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    base, module = gpt2.logits(ids), load(export_model(gpt2, {1: layer.eval()}, tmp_path / "out"))
    with spliced(gpt2, {1: layer}):
        expected = gpt2.logits(ids)
    torch.testing.assert_close(logits_of(module, ids), expected, atol=1e-5, rtol=1e-5)
    assert (expected - base).abs().max() > 0.1


def test_every_kind_of_sparsity_is_among_them():
    seen = {KINDS[(3 * first + number) % len(KINDS)] for first in range(len(VARIANTS)) for number in range(3)}
    assert seen == set(KINDS)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma"])
def test_other_families_too(build_model, ids, tmp_path, model_type):
    model = load_frozen(build_model(model_type, intermediate_size=64, num_key_value_heads=2, head_dim=8))
    layers = {1: replacement(model, 1, "transcoder-skip")}
    module = load(export_model(model, layers, tmp_path / "out"))
    with spliced(model, layers):
        torch.testing.assert_close(logits_of(module, ids), model.logits(ids), atol=1e-5, rtol=1e-5)


def test_trained_models_with_their_tokenizers(trained, tmp_path):
    layers = {2: replacement(trained, 2, "mxd"), 4: replacement(trained, 4, "cp_mumoe")}
    folder = export_model(trained, layers, tmp_path / "out")
    tokenizer, module = AutoTokenizer.from_pretrained(folder, trust_remote_code=True), load(folder)
    text = "<|endoftext|>The government of the United States has"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids.tolist() == trained.tokenizer(text, return_tensors="pt").input_ids.tolist()
    assert ids[0, 0] == 0
    with spliced(trained, layers):
        expected = trained.logits(ids)
        torch.testing.assert_close(logits_of(module, ids), expected, atol=1e-5, rtol=1e-5)
        assert greedy(module, ids).tolist() == greedy(trained.module, ids).tolist()
    assert (expected - trained.logits(ids)).abs().max() > 0.1
    assert not module.training


def test_the_constant_for_bos_is_exported(exported, gpt2, ids):
    """The base MLP is not needed for it, and token ids are not either."""
    module, layers = load(exported), with_bos(gpt2, ids)
    assert not [name for name, _ in module.named_parameters() if ".original." in name]
    x, y = gpt2.record(ids[:1, :1], [1])[1]  # more rows at once may be rounded otherwise
    assert torch.equal(layers[1](x[0, 0]), y[0, 0])
    torch.testing.assert_close(module.transformer.h[1].mlp(x[0, :1]), y[0, :1])
    without = copy.deepcopy(layers[1])
    without.bos_in.data.zero_()
    with spliced(gpt2, {1: without, 2: layers[2]}):
        assert (gpt2.logits(ids)[0] - logits_of(module, ids)[0]).abs().max() > 0.01
    embeddings = module.get_input_embeddings()(ids)
    with torch.no_grad():
        torch.testing.assert_close(module(inputs_embeds=embeddings).logits, logits_of(module, ids))


def test_cached_steps_give_the_logits_of_the_whole_forward(exported, ids):
    module = load(exported)
    model = load_frozen(module)
    with torch.no_grad():
        logits, cache = step_cached(model, None, input_ids=ids[:, :7])
        found = [logits]
        for position in range(7, 12):
            logits, cache = step_cached(model, cache, input_ids=ids[:, position : position + 1])
            found.append(logits)
    torch.testing.assert_close(torch.cat(found, 1), logits_of(module, ids), atol=1e-5, rtol=1e-5)


def test_bfloat16_keeps_the_layers_in_float32_as_a_splice_does(build_model, ids, tmp_path):
    model = load_frozen(build_model("gpt2").to(torch.bfloat16))
    layers = {1: replacement(model, 1, "mxd")}
    folder = export_model(model, layers, tmp_path / "out")
    module = load(folder)
    assert module.dtype == torch.bfloat16
    assert module.transformer.h[1].mlp.layer.gate.dtype == torch.float32
    with spliced(model, layers):
        expected = model.logits(ids)
    torch.testing.assert_close(logits_of(module, ids), expected, atol=1e-5, rtol=1e-5)
    assert load(folder, dtype="float32").dtype == torch.float32
    whole = load(folder).to(torch.bfloat16)
    assert logits_of(whole, ids).sub(expected).abs().mean() < 0.1 * expected.abs().mean()  # some choices differ


def test_large_models_are_sharded(gpt2, ids, tmp_path, monkeypatch):
    save = functools.partial(mxd.share.export.save_torch_state_dict, max_shard_size="200KB")
    monkeypatch.setattr(mxd.share.export, "save_torch_state_dict", save)
    layers = {1: replacement(gpt2, 1)}
    folder = export_model(gpt2, layers, tmp_path / "out")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    with spliced(gpt2, layers):
        torch.testing.assert_close(logits_of(load(folder), ids), gpt2.logits(ids), atol=1e-5, rtol=1e-5)


WITHOUT_MXD = """
import sys
sys.modules["mxd"] = None
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
folder, again, out = sys.argv[1:]
ids = torch.tensor(__IDS__)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
model.save_pretrained(again)
model = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
options = __GREEDY__
with torch.no_grad():
    found = {"logits": model(ids).logits, "text": model.generate(ids, attention_mask=torch.ones_like(ids), **options)}
save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)
"""


@pytest.mark.long
def test_it_loads_and_saves_again_where_mxd_is_not_installed(exported, gpt2, ids, tmp_path):
    script = WITHOUT_MXD.replace("__IDS__", str(ids.tolist())).replace("__GREEDY__", str(GREEDY))
    words = [sys.executable, "-c", script, str(exported), str(tmp_path / "again"), str(tmp_path / "found")]
    done = subprocess.run(words, env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "code")}, capture_output=True)
    assert not done.returncode, done.stderr.decode()
    found = load_file(tmp_path / "found")
    with spliced(gpt2, with_bos(gpt2, ids)):
        torch.testing.assert_close(found["logits"], gpt2.logits(ids), atol=1e-5, rtol=1e-5)
        assert found["text"].tolist() == greedy(gpt2.module, ids).tolist()


def test_the_code_file_needs_nothing_else():
    tree = ast.parse(bundled_path("modeling_spliced.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    found = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert found == {"typing", "torch", "torch.nn.functional", "transformers"}


@pytest.mark.parametrize("name", ["lm_head", "embed_out"])
def test_gpt_neox_loads_under_either_name_of_its_last_layer(build_model, ids, tmp_path, name):
    model = load_frozen(build_model("neox-parallel"))
    layers = {1: replacement(model, 1)}
    folder = export_model(model, layers, tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{name}.weight"] = tensors.pop("lm_head.weight", tensors.get("embed_out.weight"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load(folder).save_pretrained(tmp_path / "again")
    with spliced(model, layers):
        for place in (folder, tmp_path / "again"):
            torch.testing.assert_close(logits_of(load(place), ids), model.logits(ids), atol=1e-5, rtol=1e-5)


# What the folder holds


def test_a_replaced_mlp_is_written_only_where_something_reads_it(gpt2, ids, tmp_path):
    layers = {0: replacement(gpt2, 0), 1: replacement(gpt2, 1, "topk_sae")}
    tensors = load_file(export_model(gpt2, layers, tmp_path / "plain") / "model.safetensors")
    kept = {name.split(".mlp.")[0] for name in tensors if ".mlp.original." in name}
    assert kept == {"transformer.h.1"}
    card = (tmp_path / "plain" / "README.md").read_text()
    assert "in 2 of 3 blocks. The MLPs of blocks 1 are in the file, since the layers there read their outputs." in card
    assert not any(name.startswith("transformer.h.0.mlp.c_") for name in tensors)
    assert "lm_head.weight" not in tensors  # tied
    assert torch.equal(tensors["transformer.h.1.mlp.original.c_fc.weight"], gpt2.mlp(1).c_fc.weight)


def test_a_wholly_replaced_model_holds_no_mlp_of_the_base(family, ids, tmp_path):
    """Its size, and the base model's, count what is tied once."""
    layers = {n: replacement(family, n, variant, seed=n) for n, variant in enumerate(("mxd", "transcoder-skip", "mxd"))}
    before = {name: tensor.clone() for name, tensor in family.module.state_dict().items()}
    folder = export_model(family, layers, tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    mlps = {name for name, module in family.module.named_modules() if module in map(family.mlp, layers)}
    replaced = {name for name in before if name.rpartition(".mlp.")[0] + ".mlp" in mlps}
    assert len(mlps) == family.num_blocks and len(replaced) >= 3 * 3
    assert not replaced & set(tensors) and not [name for name in tensors if ".original." in name]
    assert not [n for n, t in tensors.items() for m in replaced if t.shape == before[m].shape and t.equal(before[m])]
    module = load(folder)
    with spliced(family, layers):
        torch.testing.assert_close(logits_of(module, ids), family.logits(ids), atol=1e-5, rtol=1e-5)
    size = json.loads((folder / "config.json").read_text())["mxd"]["size"]
    numbers = {
        "base": sum(parameter.numel() for parameter in family.module.parameters()),
        "spliced": sum(tensor.numel() for tensor in tensors.values()),
    }
    assert size == {key: {"parameters": n, "bytes": 4 * n} for key, n in numbers.items()}
    card = (folder / "README.md").read_text()
    assert "in 3 of 3 blocks. None of the MLPs they replace is in the file." in card
    assert f"{numbers['spliced']:,} parameters in {4 * numbers['spliced']:,} bytes, " in card


def test_provenance_is_in_the_config_and_the_model_stays_as_it_was(gpt2, ids, tmp_path):
    before, state = gpt2.logits(ids), str(gpt2.module.config)
    given = trained_on(gpt2, 1, replacement(gpt2, 1, "mxd"), excluded_ids=(7,), tokens=123)
    export_model(gpt2, {1: given}, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "mxd_gpt2"
    assert config["mxd"]["base"]["class"] == "GPT2LMHeadModel"
    assert config["mxd"]["versions"]["mxd"] == mxd.__version__
    assert config["mxd"]["layers"]["1"]["provenance"] == json.loads(given.provenance.model_dump_json())
    assert load(tmp_path / "out").config.mxd == config["mxd"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| 1 | MxD | k6 | 48 |" in card and "trust_remote_code=True" in card
    assert torch.equal(gpt2.logits(ids), before)
    assert str(gpt2.module.config) == state


def test_a_tokenizer_that_writes_a_folder(build_model, tokenizer, tmp_path):
    several = copy.deepcopy(tokenizer)
    several.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    model = load_frozen(build_model("gpt2"), tokenizer=several)
    folder = export_model(model, {1: replacement(model, 1)}, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(folder, trust_remote_code=True).chat_template == several.chat_template
    assert any(path.is_dir() for path in folder.iterdir())


def test_an_empty_folder_is_written_to_and_an_earlier_export_is_not(gpt2, ids, tmp_path):
    (tmp_path / "out").mkdir()  # empty
    layers = {1: replacement(gpt2, 1)}
    with spliced(gpt2, layers):
        expected = gpt2.logits(ids)
    module = load(export_model(gpt2, layers, tmp_path / "out"))
    torch.testing.assert_close(logits_of(module, ids), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(MxdError, match="out exists and is not an empty folder; choose another, or remove it first"):
        export_model(gpt2, {2: replacement(gpt2, 2, "mxd")}, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# What is refused when loading


def test_without_trust_nothing_is_loaded(exported):
    for _ in range(2):  # also in a process that trusted it before
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=False)
        load(exported)


@pytest.mark.parametrize("damage", ["missing", "missing layer", "extra", "misshapen"])
@pytest.mark.filterwarnings("ignore")
def test_damaged_weights_are_refused(exported, damage):
    tensors = load_file(exported / "model.safetensors")
    name = "transformer.h.1.mlp.layer.gate" if damage == "missing layer" else "transformer.ln_f.weight"
    if damage.startswith("missing"):
        tensors.pop(name)
    else:
        tensors["extra" if damage == "extra" else name] = torch.zeros(3)
    save_file(tensors, exported / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match=r"is damaged.*(extra|missing_keys: )|mismatched"):
        load(exported)


# What is refused when exporting


def test_what_cannot_be_exported_is_refused_and_leaves_nothing_behind(build_model, gpt2, exported, ids, tmp_path):
    layer = replacement(gpt2, 1)
    fresh = load_frozen(build_model("gpt2"))
    splice(fresh, {0: replacement(fresh, 0)})
    plain = export_model(gpt2, {2: layer}, tmp_path / "plain")
    cases = [
        (gpt2, {}, "nothing to export"),
        (gpt2, {1: torch.nn.Linear(32, 32)}, "cannot export a Linear"),
        (gpt2, {3: layer}, "block 3 is out of range"),
        (gpt2, {2: trained_on(gpt2, 1, layer)}, "trained for block 1, not 2"),
        (fresh, {1: layer}, "spliced already"),
        (load(plain), {1: layer}, "cannot export.*SplicedForCausalLM"),
    ]
    for model, layers, message in cases:
        with pytest.raises(MxdError, match=message):
            export_model(model, layers, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "exported"}


def test_models_from_gguf_files_are_exported_and_quantized_ones_refused(build_model, ids, tmp_path):
    """Transformers unpacks a GGUF file as it reads it, and notes in the config where the weights came from."""
    model = load_frozen(build_model("llama"))
    layers = {1: replacement(model, 1)}
    model.config.quantization_config = quantization_config.GgufConfig()
    module = load(export_model(model, layers, tmp_path / "out"))
    with spliced(model, layers):
        torch.testing.assert_close(logits_of(module, ids), model.logits(ids), atol=1e-5, rtol=1e-5)
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(MxdError, match="unquantized"):
        export_model(model, layers, tmp_path / "other")


def test_a_bridge_is_refused(build_model, tmp_path):
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model = build_model("gpt2")
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config, tokenizer=None)
    with pytest.raises(MxdError, match="TransformerLens"):
        export_model(bridge, {1: replacement(load_frozen(bridge), 1)}, tmp_path / "out")


def test_other_folders_are_left_alone(gpt2, tmp_path):
    layer = replacement(gpt2, 1)
    saved = save_layer(tmp_path / "layer", layer, trained_on(gpt2, 1, layer).provenance)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for place in (saved, tmp_path / "other", tmp_path / "file"):
        with pytest.raises(MxdError, match="exists and is not an empty folder"):
            export_model(gpt2, {1: layer}, place)
    assert (tmp_path / "other" / "thesis.txt").read_text() == (tmp_path / "file").read_text() == "mine"


def test_the_readme_holds_no_control_character(gpt2, tmp_path):
    named = mxd.FrozenModel(gpt2.module, gpt2.tokenizer, "base\x1b[2J", None, gpt2.blocks)
    readme = (export_model(named, {1: replacement(gpt2, 1)}, tmp_path / "out") / "README.md").read_text()
    assert "# base\ufffd[2J with" in readme and "\x1b" not in readme and ", revision" not in readme


# Checkpoints and the command line


@pytest.fixture
def checkpoints(trained_gpt2, tmp_path):
    """A run's folder with two layers of the bundled GPT-2."""
    for number in (1, 2):
        layer = replacement(trained_gpt2, number, "mxd", seed=number)
        provenance = trained_on(trained_gpt2, number, layer, excluded_ids=(0,)).provenance
        save_layer(tmp_path / "run" / f"block{number}", layer, provenance)
    return tmp_path / "run"


def test_checkpoints_from_the_command_line(checkpoints, trained_gpt2, ids, tmp_path, capsys):
    code, out, _ = command(capsys, "export-model", "tiny-gpt2", checkpoints, tmp_path / "out")
    assert code == 0 and f"done: {tmp_path / 'out'}" in out
    assert re.search(
        r"^size: [\d,]+ parameters in [\d,]+ bytes, \d\.\d\d times the base model's [\d,]+ param", out, re.M
    )
    layers = {number: mxd.load_layer(checkpoints / f"block{number}") for number in (1, 2)}
    with spliced(trained_gpt2, layers):
        expected = trained_gpt2.logits(ids)
    torch.testing.assert_close(logits_of(load(tmp_path / "out"), ids), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny-gpt2", "OUT"], "MODEL CHECKPOINT... OUT"),
        (["tiny-gpt2", "RUN/block1", "RUN/block1", "OUT"], "two checkpoints are called run/block1"),
        (["tiny-gpt2", "RUN", "OUT", "--set", "tc-k6"], "no set of layers 'tc-k6'; choose one with --set: mxd-k6"),
        (["tiny-llama", "RUN/block1", "OUT"], "other weights there"),
        (["tiny-gpt2", "nowhere", "OUT"], "no checkpoint at"),
        (["no-such-model", "RUN", "OUT"], "cannot load base model"),
    ],
)
def test_mistakes_on_the_command_line(checkpoints, tmp_path, capsys, words, message):
    places = {"OUT": str(tmp_path / "out"), "RUN": str(checkpoints)}
    for short, place in places.items():
        words = [word.replace(short, place) for word in words]
    code, _, err = command(capsys, "export-model", *words)
    assert code == 1 and message in err
    assert not (tmp_path / "out").exists()


def test_one_of_several_sets_from_the_command_line(checkpoints, trained_gpt2, ids, tmp_path, capsys):
    for number in (1, 2):
        layer = replacement(trained_gpt2, number, seed=number)
        save_layer(checkpoints / f"other{number}", layer, trained_on(trained_gpt2, number, layer).provenance)
    code, _, err = command(capsys, "export-model", "tiny-gpt2", checkpoints, tmp_path / "out")
    assert code == 1 and "there are several sets of layers; choose one with --set: mxd-k6, tc-k6." in err
    code, _, _ = command(capsys, "export-model", "tiny-gpt2", checkpoints, tmp_path / "out", "--set", "tc-k6")
    with spliced(trained_gpt2, {n: mxd.load_layer(checkpoints / f"other{n}") for n in (1, 2)}):
        expected = trained_gpt2.logits(ids)
    torch.testing.assert_close(logits_of(load(tmp_path / "out"), ids), expected, atol=1e-5, rtol=1e-5)


def test_checkpoints_of_different_dtypes_are_refused(trained_gpt2, tmp_path):
    for number, dtype in ((1, "float32"), (2, "bfloat16")):
        layer = replacement(trained_gpt2, number)
        provenance = trained_on(trained_gpt2, number, layer, model_dtype=dtype).provenance
        save_layer(tmp_path / f"block{number}", layer, provenance)
    with pytest.raises(MxdError, match="different revisions or dtypes"):
        export_checkpoints("tiny-gpt2", [tmp_path / "block1", tmp_path / "block2"], tmp_path / "out")


# docs/interop.md


def test_the_page_on_other_tools_shows_code_that_runs(trained_gpt2, tmp_path, monkeypatch, capsys):
    """Its nnsight example is run by scripts/interop/nnsight.py, which must hold the same lines."""
    root = Path(__file__).parents[2]
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs/interop.md").read_text(encoding="utf-8"), re.S)
    transformers, bridge, nnsight = blocks
    layer = replacement(trained_gpt2, 2, "mxd")
    provenance = trained_on(trained_gpt2, 2, layer, excluded_ids=(0,)).provenance
    place = save_layer(tmp_path / "checkpoints/demo/block2-mxd-k32", layer, provenance)
    monkeypatch.chdir(tmp_path)
    export_checkpoints("tiny-gpt2", [place], "exported")
    exec(transformers, {})
    assert capsys.readouterr().out.startswith("The President of the")
    names = {}
    exec(bridge, names)
    assert (names["without"] - names["logits"]).abs().max() > 0.1
    example = nnsight[nnsight.index("with mxd.spliced") :]
    assert example in textwrap.dedent(_body_of("example", root / "scripts/interop/nnsight.py"))


def _body_of(function, path):
    source = path.read_text(encoding="utf-8")
    node = next(n for n in ast.parse(source).body if getattr(n, "name", None) == function)
    return "\n".join(source.splitlines()[node.lineno : node.end_lineno]) + "\n"


def test_a_method_that_the_exported_code_has_no_formula_for_is_refused(gpt2, tmp_path, monkeypatch):
    """It is never taken for a transcoder."""
    monkeypatch.delitem(FORWARDS, "mxd")
    with pytest.raises(MxdError, match="unknown method of an exported layer 'mxd'; choose one of: cp_mumoe"):
        export_model(gpt2, {1: replacement(gpt2, 1, "mxd")}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
