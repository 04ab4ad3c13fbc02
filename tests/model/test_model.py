"""Base models: every family and source gives the same FrozenModel, and what cannot be handled is refused."""

import copy
import json
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mxd.common.bundled import bundled_path
from mxd.common.errors import MxdError
from mxd.layers import MLPShape
from mxd.model.frozen import FrozenModel
from mxd.model.loading import BUNDLED, load_frozen, pick_device, wrap

SHAPES = {
    "gpt2": MLPShape(32, 32, 128, "gelu_tanh", False),
    "neox-parallel": MLPShape(32, 32, 128, "gelu", False),
    "neox-sequential": MLPShape(32, 32, 128, "gelu", False),
    "llama": MLPShape(32, 32, 96, "silu", True),
}
MLP_PATHS = {"gpt2": "transformer.h.{}.mlp", "gpt_neox": "gpt_neox.layers.{}.mlp", "llama": "model.layers.{}.mlp"}


# The form of the MLPs


def test_mlp_shape(family_name, family):
    assert family.num_blocks == 3
    assert [family.mlp_shape(layer) for layer in range(3)] == [SHAPES[family_name]] * 3


def test_an_mlp_with_more_weights_than_the_form_has_is_not_taken_for_it(build_model):
    module = build_model("gpt2")
    module.transformer.h[1].mlp.norm = torch.nn.LayerNorm(32)
    model = load_frozen(module)
    assert model.mlp_shape(0) == SHAPES["gpt2"]
    assert model.mlp_shape(1) == MLPShape(32, 32, None, None, None)


def test_a_gate_with_a_bias_is_not_silently_dropped(build_model):
    model = load_frozen(build_model("llama", mlp_bias=True))
    with pytest.raises(MxdError, match="bias on its gate"):
        model.mlp_weights(0)


# Recording


def test_record_equals_plain_hooks(family, ids):
    found = {}
    path = MLP_PATHS[family.config.model_type]
    handles = [
        family.module.get_submodule(path.format(layer)).register_forward_hook(
            lambda module, args, output, layer=layer: found.__setitem__(layer, (args[0], output))
        )
        for layer in range(3)
    ]
    with torch.no_grad():
        family.module(ids)
    for handle in handles:
        handle.remove()
    recorded = family.record(ids, [2, 0, 1])
    assert recorded.keys() == found.keys()
    for layer, (x, y) in found.items():
        assert torch.equal(recorded[layer][0], x)
        assert torch.equal(recorded[layer][1], y)


def test_the_forward_stops_after_the_last_site(family, ids):
    calls = []
    handles = [
        block.register_forward_pre_hook(lambda module, args, number=number: calls.append(number))
        for number, block in enumerate(family.blocks)
    ]
    head = family.module.get_output_embeddings().register_forward_pre_hook(lambda module, args: calls.append("head"))
    family.record(ids, [1, 0])
    stopped = calls.copy()
    calls.clear()
    family.logits(ids)
    for handle in [*handles, head]:
        handle.remove()
    assert stopped == [0, 1]
    assert calls == [0, 1, 2, "head"]


def test_recording_leaves_no_hook_even_after_an_exception(gpt2, ids):
    before = gpt2.logits(ids)
    gpt2.record(ids, [0])
    with pytest.raises(ZeroDivisionError), gpt2.watched([1]):
        raise ZeroDivisionError
    assert not any(module._forward_hooks for module in gpt2.module.modules())
    assert torch.equal(gpt2.logits(ids), before)


@pytest.mark.parametrize("layer", range(3))
def test_a_resumed_forward_is_the_whole_forward(family, ids, layer):
    with family.block_outputs([layer]) as outputs:
        whole = family.logits(ids)
    ran = []
    handles = [block.mlp.register_forward_hook(lambda *args: ran.append(1)) for block in family.blocks]
    with family.resumed(layer, outputs.get(layer)):
        resumed = family.logits(ids)
    for handle in handles:
        handle.remove()
    assert torch.equal(resumed, whole)
    assert len(ran) == 3 - layer
    assert torch.equal(family.logits(ids), whole)  # and nothing stays behind
    assert not any("forward" in vars(block) for block in family.blocks)


# Freezing and identity


def test_models_are_frozen(build_model):
    module = build_model("gpt2").train().requires_grad_(True)
    model = load_frozen(module)
    assert not any(p.requires_grad for p in model.module.parameters())
    assert not any(m.training for m in model.module.modules())


def test_wrapping_changes_nothing(build_model, ids):
    module = build_model("gpt2").train().requires_grad_(True)
    model = wrap(module)
    assert model.module is module
    assert model.source == "GPT2LMHeadModel"
    assert all(p.requires_grad for p in module.parameters())
    assert all(m.training for m in module.modules())


def test_fingerprint_tells_blocks_and_models_apart_but_not_dtypes(family_name, family, build_model):
    prints = [family.fingerprint(layer) for layer in range(3)]
    assert len(set(prints)) == 3
    half = load_frozen(copy.deepcopy(family.module).to(torch.bfloat16))
    assert [half.fingerprint(layer) for layer in range(3)] == prints
    stranger = load_frozen(build_model(family_name, seed=1))
    assert not set(prints) & {stranger.fingerprint(layer) for layer in range(3)}


def test_the_whole_model_is_known_by_every_weight_and_setting(family_name, family, build_model, tmp_path):
    own = family.base_fingerprint()
    module = build_model(family_name)
    model = load_frozen(module)
    assert model.base_fingerprint() == own
    assert load_frozen(build_model(family_name).to(torch.bfloat16)).base_fingerprint() == own
    module.config.pad_token_id = 7  # many set it; nothing depends on it
    module.save_pretrained(tmp_path)
    assert load_frozen(type(module).from_pretrained(tmp_path)).base_fingerprint() == own
    for name, parameter in module.named_parameters():
        before = parameter.detach().clone()
        parameter.data.mul_(1.05)
        assert model.base_fingerprint() != own, name
        parameter.data.copy_(before)
    assert model.base_fingerprint() == own
    changed = {"gpt2": "layer_norm_epsilon", "llama": "rms_norm_eps"}.get(family_name, "layer_norm_eps")
    setattr(module.config, changed, 1e-3)
    assert model.base_fingerprint() != own


def test_the_vocabulary_is_that_of_the_embeddings(family, bridge):
    assert family.vocabulary == load_frozen(bridge).vocabulary == 4096


def test_fingerprint_notices_a_small_finetune(build_model):
    module = build_model("gpt2")
    before = load_frozen(module).fingerprint(1)
    module.transformer.h[1].mlp.c_proj.weight.data *= 1.02
    assert load_frozen(module).fingerprint(1) != before


# Sources


def test_bundled_models(trained):
    assert trained.source in BUNDLED
    assert next(trained.module.parameters()).dtype == torch.float32
    text = "The President of the United States addressed the Congress on the state of the Union."
    ids = torch.tensor([[trained.tokenizer.bos_token_id, *trained.tokenizer(text)["input_ids"]]])
    ce = F.cross_entropy(trained.logits(ids)[0, :-1], ids[0, 1:])
    assert ce < 6  # a model that learned nothing has log(4096) = 8.3


def test_local_folder(build_model, tokenizer, ids, tmp_path):
    module = build_model("neox-parallel")
    module.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = load_frozen(tmp_path, device="cpu")
    assert torch.equal(model.logits(ids), load_frozen(module).logits(ids))
    assert (model.source, model.tokenizer("a b")["input_ids"]) == (str(tmp_path), tokenizer("a b")["input_ids"])
    half = load_frozen(str(tmp_path), dtype="bfloat16", device="cpu")
    assert next(half.module.parameters()).dtype == torch.bfloat16
    assert half.logits(ids).dtype == torch.float32


def test_a_loaded_object_keeps_what_it_has(build_model, tokenizer):
    module = build_model("llama")
    model = load_frozen(module, tokenizer=tokenizer)
    assert model.module is module
    assert model.tokenizer is tokenizer
    assert load_frozen(model) is model
    assert load_frozen(build_model("llama").to(torch.bfloat16)).module.dtype == torch.bfloat16


@pytest.mark.long
def test_gguf_file(tokenizer, ids, tmp_path):
    gguf = pytest.importorskip("gguf")
    module = _llama()
    _write_gguf(gguf, module, tokenizer, tmp_path / "tiny.gguf")
    model = load_frozen(tmp_path / "tiny.gguf", device="cpu")
    torch.testing.assert_close(model.logits(ids), load_frozen(module).logits(ids), atol=1e-5, rtol=1e-5)
    assert model.mlp_shape(1) == MLPShape(32, 32, 96, "silu", True)
    assert model.tokenizer("Hello world")["input_ids"] == tokenizer("Hello world")["input_ids"]


def test_gguf_errors(tmp_path, monkeypatch):
    with pytest.raises(MxdError, match="no GGUF file at"):
        load_frozen(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"these bytes are no model")
    with pytest.raises(MxdError, match="cannot load base model"):
        load_frozen(tmp_path / "bad.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MxdError, match="needs the package gguf: pip install"):
        load_frozen(tmp_path / "bad.gguf")


@pytest.mark.parametrize("source", ["no-such-model", "no-such-org/model"])
def test_an_unknown_name_or_unreachable_hub_lists_what_can_be_given(source):
    with pytest.raises(MxdError, match="cannot load base model") as error:
        load_frozen(source)
    assert all(name in str(error.value) for name in BUNDLED)


def test_bad_dtype_lists_the_choices():
    with pytest.raises(MxdError, match="unknown dtype 'float8'; choose one of: float32, bfloat16, float16"):
        load_frozen("tiny-gpt2", dtype="float8")


def test_a_device_that_is_not_there_is_refused():
    assert pick_device("auto").type in ("cpu", "cuda", "mps")
    assert pick_device("cpu") == torch.device("cpu")
    for name in ("cuda:99", "quantum"):
        with pytest.raises(MxdError, match=f"device '{name}' is not available.*choose auto, cpu or cuda"):
            load_frozen("tiny-gpt2", device=name)


def test_weights_on_several_devices_are_refused(build_model):
    """As a ``device_map`` over several GPUs leaves them, or one that keeps some in another memory."""
    model = build_model("gpt2")
    model.transformer.h[1].to("meta")
    for load in (wrap, load_frozen):
        with pytest.raises(MxdError, match=r"several devices \(cpu, meta\).*without device_map.*bfloat16"):
            load(model)


def test_layer_out_of_range_names_the_layers(gpt2, ids):
    for layer in (3, -1):
        with pytest.raises(MxdError, match=rf"block {layer} is out of range.*0 \.\.\. 2"):
            gpt2.record(ids, [layer])


def test_what_is_not_a_causal_language_model_is_refused(build_model):
    for source in (3, torch.nn.Linear(2, 2)):
        with pytest.raises(MxdError, match="is not a base model"):
            load_frozen(source)
    with pytest.raises(MxdError, match=r"GPT2Model has no transformer.h"):
        load_frozen(build_model("gpt2").transformer)


@pytest.mark.parametrize("damage", ["truncated", "missing", "misshapen", "config"])
def test_a_damaged_model_is_refused_rather_than_filled_with_random_weights(build_model, tokenizer, tmp_path, damage):
    build_model("gpt2").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "missing":
        tensors = load_file(weights)
        del tensors["transformer.h.1.mlp.c_fc.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    elif damage == "misshapen":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"n_inner": 64}))
    else:
        (tmp_path / "config.json").write_text("{")
    with pytest.raises(MxdError, match="cannot load base model") as error:
        load_frozen(tmp_path)
    assert damage != "missing" or "transformer.h.1.mlp.c_fc.weight" in str(error.value)


# TransformerLens


def test_a_bridge_gives_the_same_frozen_model(family, bridge, ids):
    model = load_frozen(bridge)
    assert isinstance(model, FrozenModel)
    assert not any(p.requires_grad for p in bridge.parameters())
    assert model.mlp_shape(1) == family.mlp_shape(1)
    assert model.fingerprint(1) == family.fingerprint(1)
    for ours, theirs in zip(vars(model.mlp_weights(1)).values(), vars(family.mlp_weights(1)).values(), strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)
    torch.testing.assert_close(model.logits(ids), family.logits(ids), atol=1e-5, rtol=1e-5)


def test_recordings_are_the_bridges_mlp_hooks(family, bridge, ids):
    names = [f"blocks.{layer}.mlp.{hook}" for layer in range(3) for hook in ("hook_in", "hook_out")]
    _, cache = bridge.run_with_cache(ids, names_filter=names)
    for model in (family, load_frozen(bridge)):
        for layer, (x, y) in model.record(ids, [0, 1, 2]).items():
            torch.testing.assert_close(x, cache[f"blocks.{layer}.mlp.hook_in"], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(y, cache[f"blocks.{layer}.mlp.hook_out"], atol=1e-5, rtol=1e-5)


# A GGUF file is written here tensor by tensor, as llama.cpp's converter names them.

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            max_position_embeddings=64,
            initializer_range=0.2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _write_gguf(gguf, module, tokenizer, path):
    config = module.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(config.vocab_size)
    stored = json.loads((bundled_path("tiny-gpt2") / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(stored["vocab"], key=stored["vocab"].get))
    writer.add_token_types([3] + [1] * 4095)
    writer.add_token_merges([" ".join(pair) for pair in stored["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    for name, parameter in module.named_parameters():
        tensor = parameter.detach()
        if "q_proj" in name or "k_proj" in name:  # GGUF interleaves the halves that rotary embeddings turn
            tensor = tensor.reshape(4, 2, 4, 32).swapaxes(1, 2).reshape(32, 32)
        for ours, theirs in _GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_folder_without_tokenizer_files_is_refused(build_model, tmp_path):
    from mxd.common.errors import MxdError
    from mxd.model.loading import load_frozen

    build_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(MxdError, match=r"tokenizer|vocabulary"):
        load_frozen(str(tmp_path))
