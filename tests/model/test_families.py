"""Families of models: those that docs/models.md says work do, from recording to export; the others say why not.

Each is a tiny random model of transformers' own class.
"""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from runs import small
from transformers import AutoModelForCausalLM

from mxd.artifacts.checkpoint import load_layer
from mxd.common.errors import MxdError
from mxd.evaluation.faithfulness import Constant
from mxd.layers import MLPShape
from mxd.layers.mxd import MxDConfig
from mxd.layers.sparsity import TopKConfig
from mxd.model.loading import load_frozen
from mxd.share.export import export_model
from mxd.splice import spliced
from mxd.training.trainer import train

DOCS = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}
GATED = {"intermediate_size": 96, "num_key_value_heads": 2}
HEADS = GATED | {"head_dim": 8}
IMAGES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

# What a family's tiny model is made with, and its MLP's hidden width, activation and gate
READ = {
    "gpt2": ({}, 128, "gelu_tanh", False),
    "gpt_neo": ({"attention_types": [[["global", "local"], 1]], "num_heads": 4, "num_layers": 2}, 128, "gelu_tanh", 0),
    "gpt_neox": ({"intermediate_size": 128}, 128, "gelu", False),
    "gptj": ({"rotary_dim": 4}, 128, "gelu_tanh", False),
    "codegen": ({"rotary_dim": 4}, 128, "gelu_tanh", False),
    "gpt_bigcode": ({}, 128, "gelu_tanh", False),
    "starcoder2": (GATED, 96, "gelu_tanh", False),
    "falcon": ({}, 128, "gelu", False),
    "phi": ({"intermediate_size": 96}, 96, "gelu_tanh", False),
    "phi3": (GATED, 96, "silu", True),
    "llama": (GATED, 96, "silu", True),
    "mistral": (GATED, 96, "silu", True),
    "qwen2": (GATED, 96, "silu", True),
    "qwen3": (HEADS, 96, "silu", True),
    "gemma": (HEADS, 96, "gelu_tanh", True),
    "gemma2": (HEADS, 96, "gelu_tanh", True),
    "gemma3_text": (HEADS, 96, "gelu_tanh", True),
    "olmo": (GATED, 96, "silu", True),
    "olmo2": (GATED, 96, "silu", True),
    "smollm3": (GATED, 96, "silu", True),
    "granite": (GATED, 96, "silu", True),
    "cohere": (GATED, 96, "silu", True),
    "stablelm": (GATED, 96, "silu", True),
    "glm4": (HEADS, 96, "silu", True),
    "nemotron": (GATED, 96, "relu2", False),
    "persimmon": (GATED, 96, "relu2", False),
}
STATED = {
    "mixtral": (GATED | {"num_local_experts": 2}, None, None, None),
    "qwen3_moe": (HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, None, None, None),
    "openai-gpt": ({}, 128, None, False),
    "apertus": (GATED, None, None, None),
}
REFUSED = {
    "opt": ({"ffn_dim": 64, "word_embed_proj_dim": 32}, "no list of blocks .*its blocks hold self_attn, .*fc1, fc2"),
    "bloom": ({}, "BloomMLP.*takes the residual stream, too"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, "no list of blocks .*its blocks hold .*ffn"),
    "gpt_oss": (HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2}, "GptOssMLP.*returns a tuple"),
    "mamba": ({"state_size": 4}, "no list of blocks .*its blocks hold norm, mixer"),
}


def build(build_model, kind, options):
    return build_model(kind, num_hidden_layers=2, pad_token_id=4095, **options)


@pytest.fixture(scope="module", params=READ)
def read(request, build_model, tokenizer):
    """A family whose MLPs can be read, and their shape."""
    options, hidden, activation, glu = READ[request.param]
    model = load_frozen(build(build_model, request.param, options), tokenizer=tokenizer)
    return model, MLPShape(32, 32, hidden, activation, bool(glu))


def mlp_formula(weights, activation, x):
    """``act(x E^T + b_E) D + b``, with the gate of a GLU."""
    linear = F.linear(x, weights.encoder, weights.encoder_bias)
    act = ACTIVATIONS[activation]
    hidden = act(linear) if weights.encoder_glu is None else act(x @ weights.encoder_glu.T) * linear
    bias = 0 if weights.decoder_bias is None else weights.decoder_bias
    return hidden @ weights.decoder + bias


def listed(title):
    """The model types in the first column of a section's table."""
    section = DOCS.split(f"\n## {title}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return re.findall("`(.*?)`", " ".join(cells))


def test_the_tables_of_the_docs_name_these_families():
    assert listed("Read from the model") == list(READ)
    assert listed("Stated in the config") == list(STATED)
    assert listed("Refused") == list(REFUSED)


def test_the_form_of_an_mlp_is_read(read, ids):
    model, shape = read
    assert [model.mlp_shape(block) for block in (0, 1)] == [shape, shape]
    sites = model.record(ids, [0, 1])
    with torch.no_grad():
        for block, (x, y) in sites.items():
            torch.testing.assert_close(model.mlp(block)(x), y)  # also where the block goes on in place, as Falcon's
    torch.testing.assert_close(mlp_formula(model.mlp_weights(1), shape.activation, x), y, atol=1e-4, rtol=1e-4)


def test_an_exact_replacement_changes_no_logit(read, ids):
    model, shape = read
    layer = MxDConfig(num_units=4, sparsity=TopKConfig(k=2)).resolve(shape).build()
    layer.copy_base(model.mlp_weights(1))
    before = model.logits(ids)
    with spliced(model, {1: layer}):
        torch.testing.assert_close(model.logits(ids), before, atol=1e-4, rtol=1e-4)
        layer.bias.data[0] += 1
        assert (model.logits(ids) - before).abs().max() > 0.01
    assert torch.equal(model.logits(ids), before)


def test_an_ablated_mlp_answers_the_same_everywhere(read, ids):
    model, _ = read
    everywhere = torch.nn.Linear(32, 32)
    everywhere.weight.data.zero_()
    with spliced(model, {1: everywhere}):
        expected = model.logits(ids)
    with spliced(model, {1: Constant(everywhere.bias.detach())}):
        assert torch.equal(model.logits(ids), expected)


@pytest.mark.parametrize("kind", STATED)
def test_what_cannot_be_read_is_asked_for_at_once(build_model, ids, kind):
    options, hidden, activation, glu = STATED[kind]
    model = load_frozen(build(build_model, kind, options))
    shape = model.mlp_shape(1)
    assert shape == MLPShape(32, 32, hidden, activation, glu)
    missing = ", ".join(name for name in ("hidden", "activation", "glu") if getattr(shape, name) is None)
    with pytest.raises(
        MxdError, match=f"base MLP's {missing} could not be read from the model; set {missing} of the r"
    ):
        MxDConfig().resolve(shape)
    layer = (
        MxDConfig(num_units=4, sparsity=TopKConfig(k=2), hidden=8, activation="silu", glu=True).resolve(shape).build()
    )
    before = model.logits(ids)
    with spliced(model, {1: model.mlp(1)}):
        assert torch.equal(model.logits(ids), before)
    with spliced(model, {1: layer}):
        assert (model.logits(ids) - before).abs().max() > 0.01


@pytest.mark.parametrize("kind", REFUSED)
def test_a_family_that_is_refused_says_why(build_model, kind):
    options, message = REFUSED[kind]
    with pytest.raises(MxdError, match=f"{message}.*docs/models.md"):
        load_frozen(build(build_model, kind, options))


def test_of_a_model_that_reads_images_the_text_blocks_are_taken(ids):
    from transformers import AutoConfig

    text = HEADS | {"vocab_size": 4096, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    images = IMAGES | {"image_size": 32, "patch_size": 16}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=images)
    model = load_frozen(AutoModelForCausalLM.from_config(config))
    assert model.num_blocks == 2 and type(model.blocks[0]).__name__ == "Gemma3DecoderLayer"
    before = model.logits(ids)
    with spliced(model, {1: torch.nn.Linear(32, 32)}):
        assert (model.logits(ids) - before).abs().max() > 1e-3


@pytest.mark.long
def test_a_family_is_trained_spliced_and_exported(read, ids, tmp_path, monkeypatch):
    """One step, and the exported model is the spliced one."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    model, _ = read
    steps = {"tokens": 512, "batch_tokens": 512, "buffer_tokens": 512}
    folder = train(small(tmp_path, blocks=[1], data={"context": 32}, training=steps), model=model)
    trained = load_layer(next(folder.glob("block1-*")))
    assert all(p.isfinite().all() for p in trained.layer.parameters())
    before = model.logits(ids)
    with spliced(model, {1: trained}):
        expected = model.logits(ids)
    assert (expected - before).abs().max() > 0.01
    out = export_model(model, {1: trained}, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    with torch.no_grad():
        torch.testing.assert_close(exported(ids).logits, expected, atol=1e-4, rtol=1e-4)
