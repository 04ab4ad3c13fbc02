"""Base models of a few thousand weights, as whole folders and as GGUF files: what hostile ones are made from."""

import json
import struct
from pathlib import Path
from typing import Any

import torch

SIZES = {
    "vocab_size": 260,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt_neox": {"intermediate_size": 16},
    "llama": {"intermediate_size": 16, "num_key_value_heads": 1},
}
GGUF_NAMES = {
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
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's kinds of numbers; 8 is a text, 9 a list."""


def tiny(family: str) -> Any:
    """Return a random model of a family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **FAMILIES[family])).eval()


def tokenizer() -> Any:
    """Return a tokenizer of bytes, with one special token and a few merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    words = ["<|end|>", *letters, *("".join(pair) for pair in merges)]
    inner = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<|end|>", eos_token="<|end|>")


def save_all(folder: Path) -> Path:
    """Write a folder for each family (Llama's in shards), one whose weights are a pickle, and one with a GGUF file."""
    for family in FAMILIES:
        module = tiny(family)
        module.save_pretrained(folder / family, max_shard_size="4KB" if family == "llama" else "1GB")
        tokenizer().save_pretrained(folder / family)
    module = tiny("gpt2")
    module.save_pretrained(folder / "pickle")
    tokenizer().save_pretrained(folder / "pickle")
    (folder / "pickle" / "model.safetensors").unlink()
    torch.save(module.state_dict(), folder / "pickle" / "pytorch_model.bin")
    (folder / "gguf").mkdir()
    (folder / "gguf" / "model.gguf").write_bytes(gguf_bytes(*gguf_parts()))
    return folder


Pairs = list[tuple[str, int, Any]]
"""What a GGUF file says of itself: name, kind, value; a list's value is the kind of its members, and they."""
Tensors = list[tuple[str, list[int], int, bytes]]
"""Its tensors: name, sizes (the innermost first), kind, bytes."""


def gguf_parts() -> tuple[Pairs, Tensors]:
    """Return what the GGUF file of the tiny Llama holds."""
    module = tiny("llama")
    stored = json.loads(tokenizer().backend_tokenizer.to_str())["model"]
    heads, width = SIZES["num_attention_heads"], SIZES["hidden_size"]
    sizes = {
        "block_count": SIZES["num_hidden_layers"],
        "context_length": SIZES["max_position_embeddings"],
        "embedding_length": width,
        "feed_forward_length": 16,
        "attention.head_count": heads,
        "attention.head_count_kv": 1,
        "rope.dimension_count": width // heads,
        "vocab_size": SIZES["vocab_size"],
    }
    pairs: Pairs = [
        ("general.architecture", 8, "llama"),
        *((f"llama.{name}", 4, size) for name, size in sizes.items()),
        ("llama.attention.layer_norm_rms_epsilon", 6, 1e-6),
        ("tokenizer.ggml.model", 8, "gpt2"),
        ("tokenizer.ggml.tokens", 9, (8, sorted(stored["vocab"], key=stored["vocab"].get))),
        ("tokenizer.ggml.token_type", 9, (5, [3] + [1] * (SIZES["vocab_size"] - 1))),
        ("tokenizer.ggml.merges", 9, (8, [" ".join(pair) for pair in stored["merges"]])),
        ("tokenizer.ggml.bos_token_id", 4, 0),
        ("tokenizer.ggml.eos_token_id", 4, 0),
    ]
    tensors: Tensors = []
    for name, parameter in module.named_parameters():
        for theirs, ours in GGUF_NAMES.items():
            name = name.replace(theirs, ours)
        tensor = parameter.detach().contiguous()
        tensors.append((name, list(tensor.shape[::-1]), 0, tensor.numpy().tobytes()))
    return pairs, tensors


def gguf_bytes(pairs: Pairs, tensors: Tensors, counts: tuple[int, int] | None = None, version: int = 3) -> bytes:
    """Return a GGUF file; sizes and kinds that no file can hold are cut to what fits their field."""
    parts = [struct.pack("<4sIQQ", b"GGUF", version, *(counts or (len(tensors), len(pairs))))]
    for name, kind, value in pairs:
        parts += [_text(name), struct.pack("<I", kind % 2**32), _value(kind, value)]
    at, body = 0, b""
    for name, shape, kind, data in tensors:
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *(int(size) % 2**64 for size in shape))
        parts += [_text(name), sizes, struct.pack("<IQ", kind % 2**32, at)]
        body += data + b"\0" * (-len(data) % 32)
        at = len(body)
    head = b"".join(parts)
    return head + b"\0" * (-len(head) % 32) + body


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == 9:
        inner, members = value
        return struct.pack("<IQ", inner % 2**32, len(members)) + b"".join(_value(inner, item) for item in members)
    if kind not in NUMBERS:
        return _text(str(value))
    if NUMBERS[kind] in "fd":
        return struct.pack(f"<{NUMBERS[kind]}", _float(value))
    if not isinstance(value, int | float) or value != value or abs(value) == float("inf"):
        value = 0
    return (int(value) % 2**64).to_bytes(8, "little")[: struct.calcsize(NUMBERS[kind])]


def _float(value: Any) -> float:
    try:
        value = float(value)
        struct.pack("<f", value)
        return value
    except (TypeError, ValueError, OverflowError):
        return float("nan")
