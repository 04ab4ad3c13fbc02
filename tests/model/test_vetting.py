"""A base model's files may be anybody's: each folder and each GGUF file loads, or is refused in one message."""

import importlib.util
import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import mxd
from mxd.common.errors import MxdError
from mxd.config import parse_config
from mxd.model.loading import load_frozen, outline
from mxd.model.vetting import WeightCounts, bounded, check_config, measure_gguf
from mxd.training.source import load_base

_SPEC = importlib.util.spec_from_file_location("models", Path(mxd.__file__).parents[1] / "scripts/fuzzing/models.py")
models = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(models)

IDS = torch.tensor([[0, 5, 9, 259]])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder of each family and form."""
    return models.save_all(tmp_path_factory.mktemp("models"))


@pytest.fixture
def folder(tiny, tmp_path):
    """A copy of one of them: of GPT-2, where no other is asked for."""

    def copy(name="gpt2"):
        return Path(shutil.copytree(tiny / name, tmp_path / "model"))

    return copy


def change(folder, file="config.json", **fields):
    held = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({key: value for key, value in (held | fields).items() if value != "gone"}))
    return folder


def refused(at, message, **options):
    with pytest.raises(MxdError, match=message) as error:
        load_frozen(at, device="cpu", **options)
    return str(error.value)


# Whole ones load


@pytest.mark.parametrize("name", models.FAMILIES)
def test_whole_folders_load(tiny, name):
    assert torch.equal(load_frozen(tiny / name, device="cpu").logits(IDS), models.tiny(name)(IDS).logits)
    assert outline(tiny / name).mlp_shape(1).hidden in (16, 32)


def test_a_whole_gguf_file_loads(tiny):
    at = tiny / "gguf" / "model.gguf"
    expected = models.tiny("llama")
    width = expected.config.hidden_size
    for block in expected.model.layers:  # GGUF interleaves the halves that rotary embeddings turn
        for part, heads in (("q_proj", 2), ("k_proj", 1)):
            weight = getattr(block.self_attn, part).weight
            weight.data = weight.data.reshape(heads, 2, 2, width).swapaxes(1, 2).reshape(weight.shape)
    torch.testing.assert_close(load_frozen(at, device="cpu").logits(IDS), expected(IDS).logits)
    counts = WeightCounts(sum(p.numel() for p in expected.parameters()), len(list(expected.parameters())))
    assert measure_gguf(at) == counts
    assert outline(at).num_blocks == 2


# Pickles


def test_a_pickle_is_refused_unless_it_is_asked_for(tiny, folder):
    at = folder("pickle")
    message = refused(at, r"its weights are a pickle \(pytorch_model.bin\)")
    assert "model.allow_pickle" in message and "save_pretrained(FOLDER)" in message
    assert torch.equal(load_frozen(at, device="cpu", allow_pickle=True).logits(IDS), models.tiny("gpt2")(IDS).logits)
    config = {
        "replacements": [{"method": "transcoder", "num_units": 64}],
        "model": {"source": str(at), "device": "cpu"},
    }
    with pytest.raises(MxdError, match="are a pickle"):
        load_base(parse_config(config))
    config["model"]["allow_pickle"] = True
    assert load_base(parse_config(config)).num_blocks == 2


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_pickle_never_runs(folder, tmp_path, allow_pickle):
    at = folder("pickle")
    torch.save({"x": Payload(tmp_path / "escaped")}, at / "pytorch_model.bin")
    refused(at, "cannot load base model", allow_pickle=allow_pickle)
    assert not (tmp_path / "escaped").exists()
    torch.load(at / "pytorch_model.bin", weights_only=False)  # that it would have
    assert (tmp_path / "escaped").exists()


def test_no_index_and_no_config_leads_to_a_pickle_or_out_of_the_folder(folder, tmp_path):
    at = folder("llama")
    index = at / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    torch.save({}, at / "pytorch_model.bin")
    shutil.copytree(at, tmp_path / "other")
    for name in (
        "pytorch_model.bin",
        "../other/model-00001-of-00004.safetensors",
        "/x.safetensors",
        "a b.safetensors",
        3,
    ):
        first = next(iter(held["weight_map"]))
        index.write_text(json.dumps(held | {"weight_map": held["weight_map"] | {first: name}}))
        refused(at, rf"{index.name} names .*, expected .safetensors files beside it")
    for wrong in ([], {}, {"metadata": {}, "weight_map": []}, {"weight_map": held["weight_map"]}):
        index.write_text(json.dumps(wrong))
        refused(at, "is not an index of weights")
    index.write_text(json.dumps(held))
    (at / "model-00002-of-00004.safetensors").unlink()
    refused(at, "names 'model-00002-of-00004.safetensors', which is not there")
    for name in ("adapter_model.bin", "pytorch_model.bin", 3):
        refused(change(at, transformers_weights=name), "as weights, expected a .safetensors file or its index")


def test_a_folder_without_weights_is_refused(folder):
    at = folder()
    (at / "model.safetensors").unlink()
    refused(at, "it has no weights: none of model.safetensors, model.safetensors.index.json is there")


# Code


@pytest.mark.parametrize(
    "fields",
    [
        {"_attn_implementation": "x/kernel"},
        {"attn_implementation": "x/kernel@main:f"},
        {"attn_implementation": {"": "x/kernel"}},
        {"_attn_implementation": "flash_attention_2"},
        {"_attn_implementation_internal": "x/kernel"},
        {"experts_implementation": "x/kernel"},
        {"text_config": {"attn_implementation": "x/kernel"}},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
    ids=str,
)
def test_code_from_repositories_is_refused_unless_trusted(folder, fields):
    at = change(folder("llama"), **fields)
    for read in (load_frozen, outline):
        with pytest.raises(MxdError, match=r"from the Hub.*set model.trust_remote_code"):
            read(at)
    check_config(fields, trust_remote_code=True)
    assert load_frozen(change(at, **(dict.fromkeys(fields, "gone") | {"attn_implementation": "eager"})), device="cpu")


def test_code_in_the_folder_is_refused_unless_trusted(folder):
    at = change(folder(), model_type="mine", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})
    (at / "code.py").write_text("from pathlib import Path\nPath(__file__).with_name('escaped').touch()\n")
    refused(at, "contains custom code")
    assert not (at / "escaped").exists()


def test_an_adapter_is_refused(folder):
    at = folder()
    (at / "adapter_config.json").write_text('{"base_model_name_or_path": "org/name"}')
    refused(at, r"it holds an adapter \(adapter_config.json\).*merge_and_unload")


# Sizes and kinds


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layer": 300_000}, "its config sets n_layer to more than 10,000"),
        ({"n_layer": 9_000}, "asks for more than 32,768 weights, and its files hold 28 tensors of 4,096 values in all"),
        ({"n_layer": -1}, "block 0 is out of range"),
        ({"n_layer": "2"}, r"transformers cannot read its files .*n_layer.*expected int, got str"),
        ({"n_layer": [2]}, "transformers cannot read its files"),
        ({"n_embd": 2**20}, r"asks for more than [\d,]+ weights, and its files hold 28 tensors"),
        ({"n_embd": 2**62}, "cannot load base model"),
        ({"n_embd": 10**30}, "cannot load base model"),
        ({"n_embd": -8}, "negative dimension"),
        ({"n_embd": None}, "transformers cannot read its files"),
        ({"n_embd": float("nan")}, "its config sets n_embd to NaN"),
        ({"n_head": 10**9}, "its config sets n_head to more than 10,000"),
        ({"n_head": 0}, "cannot load base model"),
        ({"n_positions": 10**6}, r"asks for more than [\d,]+ weights"),
        ({"vocab_size": 300}, r"its weights hold transformer.wte.weight as \[260, 8\], its config asks for \[300, 8\]"),
        ({"num_labels": 10**9}, "its config sets num_labels to more than 10,000"),
        ({"model_type": "gone"}, "model_type"),
        ({"model_type": "x"}, "does not recognize this architecture"),
        ({"model_type": ["gpt2"]}, "transformers cannot read its files"),
        ({"model_type": "bert", "num_hidden_layers": 0, "hidden_size": 12, "vocab_size": 9}, "its weights lack bert"),
        ({"dtype": "x"}, "transformers cannot read its files .*has no attribute 'x'"),
        ({"quantization_config": "x"}, "transformers cannot read its files"),
        ({"per_layer_config": 3}, "cannot load base model"),
    ],
    ids=str,
)
def test_sizes_and_kinds_that_make_no_sense(folder, fields, message):
    refused(change(folder(), **fields), message)


@pytest.mark.parametrize(
    "fields", [{"n_layer": 300_000}, {"n_layer": "2"}, {"n_head": 0}, {"n_embd": 2**62}, {"num_labels": 10**9}], ids=str
)
def test_outlines_of_such_configs(folder, fields):
    with pytest.raises(MxdError, match="cannot load base model"):
        outline(change(folder(), **fields))


def test_an_outline_has_bounds_of_its_own(folder, monkeypatch):
    monkeypatch.setattr("mxd.model.vetting.MOST_PARTS", 1000)
    with pytest.raises(MxdError, match="its config asks for more than 1,000 modules and tensors"):
        outline(change(folder(), n_layer=9_000))


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 126, "num_attention_heads": 128, "n_routed_experts": 512, "first_k_dense_replace": 3},
        {
            "vocab_size_per_layer_input": 262_144,
            "shared_expert_intermediate_size": 20_480,
            "moe_intermediate_size": 10**5,
        },
        {"max_position_embeddings": 10**7, "rope_theta": 10**11, "time_step_limit": [0.0, float("inf")]},
        {"_attn_implementation_autoset": True, "attn_implementation": None, "_attn_implementation": "sdpa"},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        {"qwen2moe.expert_feed_forward_length": 18_944, "llama.attention.head_count_kv": 8, "llama.block_count": 80},
    ],
    ids=range(6),
)
def test_configs_as_there_are_pass(config):
    check_config({"model_type": "x", **config, "text_config": config})


def test_what_an_exported_model_says_of_its_layers_is_no_size_of_the_model():
    ours = {"layers": {"1": {"provenance": {"training": {"tokens": 10**9}}}}}
    check_config({"model_type": "x", "mxd": ours})
    with pytest.raises(ValueError, match=r"its config sets other\.layers\.1\..*more than 10,000"):
        check_config({"model_type": "x", "other": ours})


def test_a_module_may_hold_what_its_weights_account_for():
    with torch.device("meta"):
        with bounded(WeightCounts(values=8 * 8 + 8, tensors=2)):
            tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            tied[1].weight = tied[0].weight
        for build, message in (
            (lambda: nn.Linear(8, 100), "more than 576 weights, and its files hold 2 tensors of 72 values in all"),
            (lambda: nn.Module().register_buffer("mask", torch.zeros(10_000, 10_000)), "more than 67,109,008 values"),
            (lambda: nn.ModuleList(nn.Identity() for _ in range(2_000)), "more than 1,020 modules and tensors"),
        ):
            with pytest.raises(ValueError, match=message), bounded(WeightCounts(72, 2)):
                build()
        nn.Linear(8, 100)  # the bounds are gone with their block


def test_weights_larger_than_the_memory_are_refused(folder, monkeypatch):
    monkeypatch.setattr("mxd.model.loading.free_memory", lambda device: 10_000)
    at = folder()
    refused(at, r"its 4,096 values need 16.0 KiB in float32, and 9.8 KiB of memory are free; choose bfloat16")
    monkeypatch.setattr("mxd.model.loading.free_memory", lambda device: 2 * 4_096)
    assert load_frozen(at, dtype="bfloat16", device="cpu").dtype == "bfloat16"


# Damaged files


def cut(path, amount=100):
    path.write_bytes(path.read_bytes()[:-amount])


def overlapping(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    first, second = [name for name in header if name != "__metadata__"][:2]
    header[second] = header[first]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def lacking(path):
    tensors = load_file(path)
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def endless(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


FILES = {
    ("model.safetensors", "cut"): cut,
    ("model.safetensors", "empty"): lambda path: path.write_bytes(b""),
    ("model.safetensors", "long header"): lambda path: path.write_bytes(struct.pack("<Q", 2**62) + b"{}"),
    ("model.safetensors", "overlapping"): overlapping,
    ("model.safetensors", "lacking"): lacking,
    ("model.safetensors", "pickle"): lambda path: torch.save({"x": torch.ones(1)}, path),
    ("config.json", "list"): lambda path: path.write_text("[]"),
    ("config.json", "cut"): cut,
    ("config.json", "deep"): lambda path: path.write_text('{"a":' * 50_000),
    ("config.json", "long number"): lambda path: path.write_text("1" * 9000),
    ("config.json", "no UTF-8"): lambda path: path.write_bytes(b"\xff\xfe{}"),
    ("config.json", "gone"): lambda path: path.unlink(),
    ("generation_config.json", "list"): lambda path: path.write_text("[1]"),
    ("tokenizer.json", "cut"): cut,
    ("tokenizer.json", "list"): lambda path: path.write_text("[]"),
    ("tokenizer.json", "number"): lambda path: path.write_text('{"model": 3, "version": "1.0"}'),
    ("tokenizer_config.json", "list"): lambda path: path.write_text("[]"),
    ("tokenizer_config.json", "class"): lambda path: path.write_text('{"tokenizer_class": 5}'),
    ("tokenizer_config.json", "token"): lambda path: change(path.parent, path.name, bos_token="<new>"),
    **{(name, kind.__name__): kind for name in ("config.json", "tokenizer.json") for kind in (pipe, endless)},
    **{("model.safetensors", kind.__name__): kind for kind in (pipe, endless)},
}


@pytest.mark.parametrize("damage", FILES, ids=" ".join)
def test_damaged_files(folder, damage):
    at = folder()
    FILES[damage](at / damage[0])
    said = refused(at, "cannot load base model")
    assert "its tokenizer: " in said or "tokenizer" not in damage[0] or damage[1] == "token"


def test_a_tokenizer_with_tokens_that_the_model_does_not_know_is_refused(folder):
    at = change(folder(), "tokenizer_config.json", bos_token="<new>")
    refused(at, "its tokenizer gives token 260, and it knows 260: they belong to different models")


def test_weights_that_are_nan_are_refused(folder):
    at = folder()
    tensors = load_file(at / "model.safetensors")
    tensors["transformer.ln_f.weight"][0] = float("nan")
    save_file(tensors, at / "model.safetensors", metadata={"format": "pt"})
    refused(at, "its logits are NaN")


def test_names_that_are_no_models(folder, tmp_path):
    at = folder()
    refused(at / "model.safetensors", "it is a file; give the folder that it lies in, or a .gguf file")
    for name in ("a" * 300, "a" * 5000, "a\0b", "/dev/null", str(tmp_path)):
        refused(name, "cannot load base model")


# GGUF files


def pairs_with(**fields):
    pairs, tensors = models.gguf_parts()
    return models.gguf_bytes([(name, kind, fields.get(name, value)) for name, kind, value in pairs], tensors)


def without(gone):
    pairs, tensors = models.gguf_parts()
    return models.gguf_bytes([pair for pair in pairs if pair[0] != gone], tensors)


def renamed(family, other):
    pairs, tensors = models.gguf_parts()
    pairs = [(name.replace(family, other), kind, other if value == family else value) for name, kind, value in pairs]
    return models.gguf_bytes(pairs, tensors)


def header(version=3, tensors=0, pairs=0, magic=b"GGUF", rest=b""):
    return struct.pack("<4sIQQ", magic, version, tensors, pairs) + rest


def text(name):
    return struct.pack("<Q", len(name)) + name.encode()


def with_tensor(shape):
    pairs, tensors = models.gguf_parts()
    name, _, kind, data = tensors[0]
    return models.gguf_bytes(pairs, [(name, shape, kind, data), *tensors[1:]])


LLAMA = text("general.architecture") + struct.pack("<I", 8) + text("llama")
GGUF = {
    "24 bytes": (header(), "its header has no general.architecture"),
    "empty": (b"", "empty"),
    "other magic": (header(magic=b"GGML"), "begins with b'GGML', version 3, expected GGUF, version 2 or 3"),
    "version": (header(version=1), "version 1, expected GGUF, version 2 or 3"),
    "pairs without end": (header(pairs=2**60), "cut off, or no GGUF file"),
    "tensors without end": (header(tensors=2**60, pairs=1, rest=LLAMA), "cut off, or no GGUF file"),
    "long name": (header(pairs=1, rest=struct.pack("<Q", 2**62)), "cut off, or no GGUF file"),
    "longer name": (header(pairs=1, rest=struct.pack("<Q", 2**64 - 1)), "cut off, or no GGUF file"),
    "long list": (header(pairs=1, rest=text("a") + struct.pack("<IIQ", 9, 4, 2**60)), "cut off, or no GGUF file"),
    "list of lists": (header(pairs=1, rest=text("a") + struct.pack("<IIQ", 9, 9, 2**60)), r"kind 9 \(9\)"),
    "unknown kind": (header(pairs=1, rest=text("a") + struct.pack("<IIQ", 77, 0, 0)), "kind 77"),
    "blocks": (pairs_with(**{"llama.block_count": 300_000}), "llama.block_count to more than 10,000"),
    "more blocks": (pairs_with(**{"llama.block_count": 32}), "its header counts 32 blocks, its tensors belong to 2"),
    "fewer blocks": (pairs_with(**{"llama.block_count": 1}), "its header counts 1 blocks, its tensors belong to 2"),
    "no blocks": (without("llama.block_count"), "its header counts 0 blocks, its tensors belong to 2"),
    "heads": (pairs_with(**{"llama.attention.head_count": 2**31}), "head_count to more than 10,000"),
    "width": (pairs_with(**{"llama.embedding_length": 2**30}), "asks for more than|cannot load base model"),
    "NaN": (pairs_with(**{"llama.attention.layer_norm_rms_epsilon": float("nan")}), "rms_epsilon to NaN"),
    "architecture": (pairs_with(**{"general.architecture": "x"}), "its header counts 0 blocks"),
    "nothing else": (header(pairs=1, rest=LLAMA), "its header counts 0 blocks, its tensors belong to 0"),
    "other architecture": (renamed("llama", "mamba"), "cannot load base model"),
    "dimensions": (with_tensor([1] * 9), "a tensor 9 dimensions, expected at most 8"),
    "large tensor": (with_tensor([2**40, 2**20]), "its header promises more weights than it has room for"),
    "other tensor": (with_tensor([8, 200]), "cannot load base model"),
    "cut": (pairs_with()[:-3000], "cannot load base model"),
    "half": (pairs_with()[:2000], "cut off, or no GGUF file"),
}


@pytest.mark.parametrize("name", GGUF)
def test_gguf_files_that_are_damaged_or_promise_too_much(tmp_path, name):
    pytest.importorskip("gguf")
    data, message = GGUF[name]
    at = tmp_path / "model.gguf"
    at.write_bytes(data)
    refused(at, message)
    if name not in ("width", "other tensor", "other architecture", "cut"):
        with pytest.raises(MxdError, match=message):
            outline(at)


# What is not the model's fault


def test_mistakes_in_this_package_are_not_laid_on_the_model(folder, monkeypatch):
    at = folder()
    monkeypatch.setattr("mxd.model.loading.free_memory", None)
    with pytest.raises(TypeError, match="not callable"):
        load_frozen(at, device="cpu")


def test_panics_are_explained_and_interrupts_are_not(folder, monkeypatch):
    from torch.distributed.checkpoint.api import CheckpointException
    from transformers import AutoTokenizer

    class PanicException(BaseException):
        """As PyO3 names what its libraries raise; no Exception."""

    def end_with(error):
        def read(*args, **options):
            raise error

        monkeypatch.setattr(AutoTokenizer, "from_pretrained", read)

    at = folder()
    end_with(PanicException("index out of bounds"))
    refused(at, r"its tokenizer: transformers cannot read its files \(PanicException: index out of bounds\)")
    end_with(CheckpointException("half of it is missing", {}))
    refused(at, r"its tokenizer: transformers cannot read its files \(CheckpointException: ")
    end_with(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        load_frozen(at, device="cpu")
