"""Other tools' files: one module for each format, and the two directions.

    import_layers(path, out, "sparsify", model="gpt2")           their files -> mxd checkpoints
    export_layers({name: layer}, base, text, out, "sparsify")    mxd layers -> their files

This is the one place outside ``layers/`` that asks which method a layer is: the formats hold nothing but transcoders.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from jaxtyping import Float
from pydantic import ValidationError
from torch import Tensor, nn

from mxd.artifacts.checkpoint import Trained, save_layer
from mxd.artifacts.provenance import Provenance, versions
from mxd.artifacts.tensors import fit_tensors
from mxd.common.errors import MxdError, told, unknown
from mxd.data.activations import activation_batches
from mxd.data.contexts import Contexts
from mxd.layers.transcoder import Transcoder
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen
from mxd.share.formats import circuit_tracer, gemma_scope, reference, saelens, sparsify
from mxd.share.formats.base import Format, Incoming, Input, Outgoing, weights_of
from mxd.share.formats.conventions import affine, norms, shift_input
from mxd.share.formats.jumprelu import Loss, fit_and_measure, measure, same_as_jumprelu

FORMATS = {
    "sparsify": sparsify.FORMAT,
    "saelens": saelens.FORMAT,
    "circuit-tracer": circuit_tracer.FORMAT,
    "gemma-scope": gemma_scope.FORMAT,
    "reference": reference.FORMAT,
}

FEWEST = 256
"""Fewest tokens of which the loss of a conversion is measured; half of them fit thresholds."""


@dataclass(frozen=True)
class Converted:
    """One layer that was converted."""

    source: str
    path: Path
    loss: Loss | None = None
    """What the conversion loses, if anything."""
    notes: tuple[str, ...] = ()
    """What a person should know about it."""


def import_layers(
    source: str | Path,
    out: str | Path,
    tool: str,
    model: str | None = None,
    block: int | None = None,
    input: Input | None = None,
    device: str = "auto",
) -> list[Converted]:
    """Convert another tool's files to checkpoints, ``OUT/block8-tc-k32``.

    Args:
        source: file or folder.
        out: folder to which a folder for each layer is written.
        tool: name in ``FORMATS``.
        model: base model; by default what the files name.
        block: the block that is replaced, where the files do not say; of several, the one to convert.
        input: what the layers read, where the files leave that open: ``mlp_in`` or ``normalized``.
        device: where the base model is loaded, to fingerprint it and to read its norms.

    Raises:
        MxdError: unknown format, files of another format, conventions that no layer of mxd has, a base model that does
            not fit, or a base model or block that nothing names.
    """
    incoming = [item for item in _format(tool).read(Path(source)) if block is None or item.block in (None, block)]
    if not incoming:
        raise MxdError(f"{source} holds no layer for block {block}; leave --block out to see what it holds.")
    name = model or next((item.base_model for item in incoming if item.base_model), None)
    if name is None:
        raise MxdError(f"{source} does not say what its base model is; give it: --model.")
    base = load_frozen(name, device=device)
    adapted = [_adapt(item, base, block, input) for item in incoming]
    names = [f"block{provenance.block}-{item.config.slug}" for item, provenance in adapted]
    if len(set(names)) < len(names):
        raise MxdError(
            f"{source} holds several layers that would be called {max(names, key=names.count)}; convert them apart."
        )
    converted = []
    for (item, provenance), folder in zip(adapted, names, strict=True):
        layer = item.config.build()
        fit_tensors(layer.state_dict(), item.tensors, item.where)
        layer.load_state_dict(dict(item.tensors))
        path = save_layer(Path(out) / folder, layer, provenance)
        converted.append(Converted(item.where, path, notes=item.notes))
    return converted


def export_layers(
    layers: Mapping[str, Trained],
    base: FrozenModel,
    held_out: Callable[[], Contexts],
    out: str | Path,
    tool: str,
    jumprelu: bool = False,
    tokens: int = 32_768,
) -> list[Converted]:
    """Convert layers to another tool's files, and measure what that loses, if anything.

    Args:
        layers: name -> layer of this base model.
        base: the base model, whose module names become hookpoints and whose activations fit thresholds.
        held_out: returns the contexts to fit and measure on; called only if something is lost.
        out: new folder.
        tool: name in ``FORMATS``.
        jumprelu: write fitted JumpReLU thresholds even where the tool has TopK.
        tokens: held-out tokens; half of them fit thresholds, the other half measure.

    Raises:
        MxdError: unknown or import-only format, a layer that it cannot hold or of another base model, or a folder that
            exists.
    """
    write = _format(tool).write
    if write is None:
        raise unknown("format to write", tool, [name for name, item in FORMATS.items() if item.write])
    for name, trained in layers.items():
        _check_transcoder(name, trained, tool)
        if trained.provenance.fingerprint != base.fingerprint(trained.provenance.block):
            raise MxdError(
                f"{name} was trained for {trained.provenance.model!r}; {base.source!r} has other weights there."
            )
    outgoing, losses, notes = [], [], []
    for name, trained in layers.items():
        layer, loss = _prepare(name, trained, base, held_out, tool, jumprelu, tokens)
        outgoing.append(Outgoing(layer, trained.provenance, asdict(loss) if loss else {}))
        losses.append(loss)
        notes.append(_without_bos(layer))
    paths = write(outgoing, Path(out), base)
    return [Converted(*fields) for fields in zip(layers, paths, losses, notes, strict=True)]


def _format(tool: str) -> Format:
    if tool not in FORMATS:
        raise unknown("format", tool, FORMATS)
    return FORMATS[tool]


def _check_transcoder(name: str, trained: Trained, tool: str) -> None:
    """Refuse layers that no format can hold."""
    if not isinstance(trained.layer, Transcoder):
        raise MxdError(
            f"{name}: {tool} holds transcoders and skip transcoders. This is an {trained.layer.config.label}, which "
            "only mxd's own files hold, and a model that `mxd export-model` writes."
        )


def _prepare(
    name: str,
    trained: Trained,
    base: FrozenModel,
    held_out: Callable[[], Contexts],
    tool: str,
    jumprelu: bool,
    tokens: int,
) -> tuple[Transcoder, Loss | None]:
    """Return the layer in a form that the format holds, and what that loses."""
    layer, form = trained.layer, FORMATS[tool]
    assert isinstance(layer, Transcoder)
    kind = layer.config.sparsity.kind
    if kind not in form.kinds and "jumprelu" in form.kinds and (same := same_as_jumprelu(layer)) is not None:
        return same, None
    is_topk, fit = kind in ("topk", "random_k"), jumprelu or kind not in form.kinds
    if fit and not (is_topk and "jumprelu" in form.kinds):
        held = "jumprelu" if kind == "batch_topk" else kind
        holders = ", ".join(other for other, item in FORMATS.items() if held in item.kinds)
        raise MxdError(
            f"{name}: {tool} holds {', '.join(form.kinds) or 'nothing that mxd writes'}, and this layer is {kind}; "
            "only TopK can be turned into JumpReLU, where a format has that. Formats that hold it as it is: "
            f"{holders or 'none, but a model that `mxd export-model` writes does'}."
        )
    if not fit and (form.forward is None or not is_topk):
        return layer, None
    layer = layer.to(base.device)
    x, y = _record(base, trained.provenance, not layer.config.bos_constant, held_out(), tokens)
    if fit:
        half = len(x) // 2
        return fit_and_measure(layer, x[:half], x[half:], y[half:])
    assert form.forward is not None
    return layer, measure(layer, *form.forward(layer, x), x, y)


@torch.no_grad()
def _without_bos(layer: Transcoder) -> tuple[str, ...]:
    """Return a note on the error at BOS of a layer without its stored constant, which every format leaves out."""
    if layer.bos_in is None or layer.bos_out is None or not layer.bos_in.any():
        return ()
    bare = layer.config.model_copy(update={"bos_constant": False}).build()
    bare.load_state_dict(weights_of(layer))
    x, y = layer.bos_in.cpu().float(), layer.bos_out.cpu().float()
    share = float((bare(x) - y).norm() / y.norm())
    return (
        f"its stored constant at BOS is left out: the converted layer is off by {share:.0%} of the MLP's output there; "
        "leave that position to the base MLP, or train with data.bos_constant: false",
    )


def _record(
    base: FrozenModel, provenance: Provenance, bos: bool, contexts: Contexts, tokens: int
) -> tuple[Float[Tensor, "tokens d_in"], Float[Tensor, "tokens d_out"]]:
    """Return MLP inputs and outputs on held-out text, with or without BOS; the halves come from different contexts."""
    if tokens < FEWEST:
        raise MxdError(f"tokens = {tokens:,} is too few to measure what is lost; expected {FEWEST:,} or more.")
    half = tokens // 2
    batch_tokens = min(1024, half)
    bos_id = None if bos or base.tokenizer is None else base.tokenizer.bos_token_id
    # A buffer holds one half, so that the tokens of both are not mixed.
    stream = activation_batches(base, [provenance.block], contexts, batch_tokens, half, provenance.excluded_ids, bos_id)
    pairs = [batch.sites[provenance.block] for batch in islice(stream, 2 * (half // batch_tokens))]
    if len(pairs) < 2:
        raise MxdError(
            f"the held-out text is shorter than {2 * batch_tokens:,} tokens; lower --tokens or give another --source."
        )
    x, y = zip(*pairs, strict=True)
    return torch.cat(x), torch.cat(y)


def _adapt(item: Incoming, base: FrozenModel, block: int | None, input: Input | None) -> tuple[Incoming, Provenance]:
    """Bring a layer to mxd's conventions for one block of the base model."""
    number = item.block if item.block is not None else block
    if number is None:
        raise MxdError(f"{item.where} does not say which block it replaces; give it: --block.")
    shape = base.mlp_shape(number)
    if (item.config.d_in, item.config.d_out) != (shape.d_in, shape.d_out):
        raise MxdError(
            f"{item.where} has widths {(item.config.d_in, item.config.d_out)}, block {number} of {base.source!r} "
            f"{(shape.d_in, shape.d_out)}: another base model."
        )
    before, after = norms(base, number)
    if _input(item, before, input) == "normalized":
        item = replace(item, tensors=shift_input(item.tensors, *affine(before, shape.d_in)))
    provenance = _provenance(item, base, number)
    if item.writes == "added" and after is not None:
        name = next(name for name, module in base.blocks[number].named_modules() if module is after)
        note = f"it predicts the output of {name}, not of the mlp module: it can be read, and not be spliced"
        item, provenance = _noted(item, note), provenance.model_copy(update={"site": f"mlp and {name}"})
    if item.writes == "centred" and isinstance(before, nn.LayerNorm):
        note = "its outputs are centred (less their mean over the width), which no later layer norm sees"
        convention = f"{provenance.input_convention}; {note}"
        item, provenance = _noted(item, note), provenance.model_copy(update={"input_convention": convention})
    return item, provenance


def _noted(item: Incoming, note: str) -> Incoming:
    return replace(item, notes=(*item.notes, note))


def _input(item: Incoming, norm: nn.Module | None, stated: Input | None) -> Input:
    """Return what a layer reads; where the files leave it open, as the user states or as the kind of norm implies."""
    if None not in (item.input, stated) and item.input != stated:
        raise MxdError(f"{item.where} reads {item.input}, not {stated}; leave --input out.")
    convention = item.input or stated or (None if isinstance(norm, nn.LayerNorm) else "normalized")
    if convention is None:
        raise MxdError(
            f"{item.where} reads ln2.hook_normalized of a LayerNorm, which TransformerLens 2 has after the affine part "
            "(before it where weights were folded), TransformerLens 3 before it. Say which: --input mlp_in (after) or "
            "--input normalized (before)."
        )
    return convention


def _provenance(item: Incoming, base: FrozenModel, number: int) -> Provenance:
    """Return the layer's provenance: what mxd left in the files, checked, else what the tool's files say."""
    fingerprint = base.fingerprint(number)
    if item.provenance is None:
        dtype = str(next(base.module.parameters()).dtype).removeprefix("torch.")
        provenance = Provenance(model=base.source, revision=base.revision, block=number, fingerprint=fingerprint)
        return provenance.model_copy(update={"model_dtype": dtype, "versions": versions(), **item.record})
    try:
        recorded = Provenance.model_validate(item.provenance)
    except ValidationError as error:
        raise MxdError(f"{item.where}: what mxd left in the config is damaged: {told(error)}") from error
    if (recorded.block, recorded.fingerprint) != (number, fingerprint):
        raise MxdError(
            f"{item.where} was trained for block {recorded.block} of {recorded.model!r} (MLP fingerprint "
            f"{recorded.fingerprint}), not for block {number} of {base.source!r} ({fingerprint})."
        )
    return recorded.model_copy(update={"model": base.source, "revision": base.revision})
