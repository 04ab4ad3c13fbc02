"""Write a spliced model as a normal transformers repository, which loads where mxd is not installed.

config.json             the base model's, with a ``model_type`` of its own; ``mxd`` describes what is spliced in
model.safetensors       all weights, without the MLPs that are no longer needed
modeling_spliced.py     the code: plain PyTorch on top of the base model's class
and the tokenizer, the generation config, a README
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from huggingface_hub import ModelCardData, save_torch_state_dict
from torch import Tensor, nn

from mxd.artifacts.checkpoint import Trained, load_layer
from mxd.artifacts.folders import FORMAT
from mxd.artifacts.provenance import versions
from mxd.artifacts.sets import check_base, named_layers, only_set, sets_of
from mxd.assets.modeling_spliced import FORWARDS
from mxd.common.bundled import bundled_path
from mxd.common.errors import MxdError, printable, unknown
from mxd.common.files import atomic_folder, read_json, write_json
from mxd.layers import ReplacementLayer
from mxd.layers.base import BOS_RADIUS
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen, wrap
from mxd.splice import Replacement, SplicedMLP, Where, spliced

CODE = "modeling_spliced.py"
MODEL_CLASS = "SplicedForCausalLM"


def export_model(
    model: Any,
    replacements: Mapping[int, Replacement | Where],
    out: str | Path,
    check: bool = True,
) -> Path:
    """Write the model with the replacements spliced in, whole or not at all; the model in memory stays as it is.

    ``AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)`` gives the spliced model's logits.

    Args:
        model: a ``FrozenModel`` or a loaded Hugging Face model.
        replacements: block number -> layer, what ``load_layer`` returned, or a path or Hub reference for it.
        out: the folder: new or empty.
        check: compare provenance with the model.

    Raises:
        MxdError: as ``spliced``; nothing to splice; a model whose class is not transformers' own; a module that is
            none of mxd's layers; a folder that holds something else or cannot be written.
    """
    frozen, out = wrap(model), Path(out)
    loaded = {n: load_layer(r) if isinstance(r, str | Path) else r for n, r in sorted(replacements.items())}
    if not loaded:
        raise MxdError("nothing to export: give at least one replacement.")
    code = _code(frozen)
    _check_free(out)
    module: Any = frozen.module
    base_size = _size(module.state_dict().values())
    with spliced(frozen, loaded, check=check), atomic_folder(out) as partial:
        mlps = {number: cast(SplicedMLP, frozen.mlp(number)) for number in loaded}
        config = _config(frozen, mlps, loaded)
        tensors = _tensors(frozen, config["mxd"]["blocks"], mlps)
        config["mxd"]["size"] = {"base": base_size, "spliced": _size(tensors.values())}
        save_torch_state_dict(tensors, partial, shared_tensors_to_discard=[*module.all_tied_weights_keys])
        (partial / CODE).write_text(code, encoding="utf-8")
        (partial / "README.md").write_text(printable(_card(frozen, mlps, config["mxd"]["size"])), encoding="utf-8")
        module.generation_config.to_json_file(partial / "generation_config.json")
        if frozen.tokenizer is not None:
            frozen.tokenizer.save_pretrained(partial)
        write_json(partial / "config.json", config)
    return out


def export_checkpoints(
    model: str, checkpoints: Sequence[str | Path], out: str | Path, named: str | None = None
) -> Path:
    """Load a base model and checkpoints that replace different blocks of it, and export them together.

    The model is loaded in the dtype the checkpoints were trained with, and, if they name the same model, at the
    revision they name.

    Args:
        model: the base model, as ``load_frozen`` takes it.
        checkpoints: layer folders, run folders, or Hub references to either.
        out: as in ``export_model``.
        named: the set of layers to export (``sets_of``), where the checkpoints make several.

    Raises:
        MxdError: a damaged checkpoint, two for the same block, several sets, different dtypes, or as ``export_model``.
    """
    _check_free(Path(out))
    loaded = only_set(sets_of(named_layers(checkpoints)), named)
    trained_on = {
        (t.provenance.revision if t.provenance.model == model else None, t.provenance.model_dtype)
        for t in loaded.values()
    }
    if len(trained_on) != 1:
        raise MxdError(
            f"the checkpoints were trained on different revisions or dtypes: {sorted(map(str, trained_on))}."
        )
    revision, dtype = trained_on.pop()
    base = load_frozen(model, revision=revision, dtype=dtype, device="cpu")
    check_base(base, {str(trained.path): trained for trained in loaded.values()}, "MODEL")
    return export_model(base, loaded, out)


def _code(model: FrozenModel) -> str:
    """Return the text of the code file, with this model's classes as its base classes.

    Raises:
        MxdError: the classes are not transformers' own, or the model is wrapped, spliced or quantized.
    """
    import transformers

    names = {"model": type(model.module).__name__, "config": type(model.config).__name__}
    classes = [getattr(transformers, name, None) for name in names.values()]
    known = classes == [type(model.module), type(model.config)]
    changed = any(
        isinstance(m, SplicedMLP) or "_original_component" in name for name, m in model.module.named_modules()
    )
    quantization = getattr(model.config, "quantization_config", None)
    packed = (
        quantization is not None and getattr(quantization, "quant_method", None) != "gguf"
    )  # which is unpacked on loading
    if not known or changed or packed:
        raise MxdError(
            f"cannot export {model.source!r} (a {names['model']}): expected a plain, unquantized model of a class of "
            "transformers' own, not an earlier export, a TransformerLens bridge or a model that is spliced already; "
            "load the base model anew and give all checkpoints at once."
        )
    text = bundled_path(CODE).read_text(encoding="utf-8")
    return text.replace("GPT2Config as", f"{names['config']} as").replace("GPT2LMHeadModel as", f"{names['model']} as")


def _config(
    model: FrozenModel, mlps: Mapping[int, SplicedMLP], replacements: Mapping[int, Replacement]
) -> dict[str, Any]:
    """Return the base model's config, and under ``mxd`` what is spliced in."""
    config = json.loads(model.config.to_json_string())
    config.pop("quantization_config", None)  # of a GGUF file
    names = {module: name for name, module in model.module.named_modules()}
    dtype = str(model.module.dtype).removeprefix("torch.")
    spliced_in = {
        "format": FORMAT,
        "base": {"model": model.source, "revision": model.revision, "class": type(model.module).__name__},
        "versions": versions(),
        "blocks": names[model.blocks],
        "layers": {str(number): _spec(mlp, replacements[number]) for number, mlp in mlps.items()},
    }
    module = CODE.removesuffix(".py")
    return config | {
        "model_type": f"mxd_{config['model_type']}",
        "architectures": [MODEL_CLASS],
        "auto_map": {"AutoConfig": f"{module}.SplicedConfig", "AutoModelForCausalLM": f"{module}.{MODEL_CLASS}"},
        "dtype": dtype,
        "mxd": spliced_in,
    }


def _spec(mlp: SplicedMLP, replacement: Replacement) -> dict[str, Any]:
    """Return what the code file needs to build a replacement, and its provenance."""
    if not isinstance(mlp.layer, ReplacementLayer):
        raise MxdError(f"cannot export a {type(mlp.layer).__name__}: expected one of mxd's replacement layers.")
    config = mlp.layer.config.model_dump(exclude={"bos_constant"})
    if config["method"] not in FORWARDS:
        raise unknown("method of an exported layer", config["method"], FORWARDS)
    return {
        **config,
        "bos_radius": BOS_RADIUS if mlp.layer.config.bos_constant else None,
        "reads": mlp.layer.config.reads,
        "shapes": {name: list(tensor.shape) for name, tensor in _layer_tensors(mlp.layer).items()},
        "provenance": replacement.provenance.model_dump() if isinstance(replacement, Trained) else None,
    }


def _layer_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Return a layer's tensors by their names in the code file; counters of training are left out."""
    state = layer.state_dict()
    return {name.replace(".", "_"): tensor for name, tensor in state.items() if tensor.is_floating_point()}


def _tensors(model: FrozenModel, blocks: str, mlps: Mapping[int, SplicedMLP]) -> dict[str, Tensor]:
    """Return the spliced model's tensors by their names in the code file."""
    prefixes = {f"{blocks}.{number}.mlp.": mlp for number, mlp in mlps.items()}
    tensors = {k: v for k, v in model.module.state_dict().items() if not k.startswith(tuple(prefixes))}
    for prefix, mlp in prefixes.items():
        tensors |= {f"{prefix}layer.{name}": tensor for name, tensor in _layer_tensors(mlp.layer).items()}
        original = mlp.read({}, mlp.base.state_dict())  # the MLP is kept if the layer reads its output
        tensors |= {f"{prefix}original.{name}": tensor for name, tensor in original.items()}
    return tensors


def _size(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Return how many parameters tensors hold and in how many bytes; those that share memory count once."""
    distinct = {tensor.data_ptr(): tensor for tensor in tensors}.values()
    return {"parameters": sum(t.numel() for t in distinct), "bytes": sum(t.nbytes for t in distinct)}


def exported_size(out: str | Path) -> str:
    """Return how large an exported model's weights are beside those of its base model, as one line."""
    return _size_line(read_json(Path(out) / "config.json")["mxd"]["size"])


def _size_line(size: Mapping[str, Mapping[str, int]]) -> str:
    own, base = (f"{of['parameters']:,} parameters in {of['bytes']:,} bytes" for of in (size["spliced"], size["base"]))
    return f"{own}, {size['spliced']['bytes'] / size['base']['bytes']:.2f} times the base model's {base}"


def _check_free(out: Path) -> None:
    """Refuse to write over anything."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise MxdError(f"{out} exists and is not an empty folder; choose another, or remove it first.")


def _card(model: FrozenModel, mlps: Mapping[int, SplicedMLP], size: Mapping[str, Mapping[str, int]]) -> str:
    data = ModelCardData(
        base_model=model.source if model.revision else None,  # only models from the Hub have a revision
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["mxd", "interpretability"],
    )
    revision = f", revision {model.revision}" if model.revision else ""
    rows = []
    for number, mlp in mlps.items():
        config = cast(ReplacementLayer, mlp.layer).config
        rows.append(f"| {number} | {config.label} | {config.sparsity.slug} | {config.num_units:,} |")
    return f"""---
{data.to_yaml()}
---

# {model.source} with sparse layers in place of MLPs

Written by `mxd export-model` (mxd {versions()["mxd"]}) from `{model.source}`{revision}.
The layers answer at every position, in {len(mlps)} of {model.num_blocks} blocks. {_kept(mlps)}

Size: {_size_line(size)}.

| block (from 0) | method | sparsity | units |
|---|---|---|---|
{chr(10).join(rows)}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder", trust_remote_code=True)
```

The code is `{CODE}`: plain PyTorch, to be read before it is trusted. `mxd` in `config.json` holds each layer's
configuration and provenance. The licence is the base model's.
"""


def _kept(mlps: Mapping[int, SplicedMLP]) -> str:
    """Return in words which of the replaced MLPs are in the file: those whose output a layer reads."""
    kept = [str(number) for number, mlp in mlps.items() if mlp.read(False, True)]
    if not kept:
        return "None of the MLPs they replace is in the file."
    return f"The MLPs of blocks {', '.join(kept)} are in the file, since the layers there read their outputs."
