"""Put replacements into a model in place of its MLPs: for the length of a ``with`` block, or for good.

with mxd.spliced(model, {3: layer}):
model.module.generate(...)
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mxd.checkpoint import Provenance, Trained
from mxd.errors import MxdError
from mxd.layers import ReplacementLayer
from mxd.model import FrozenModel, wrap

Replacement = nn.Module | Trained
"""A layer, any module that maps one tensor to one tensor, or a layer with its provenance."""


@contextmanager
def spliced(
    model: Any,
    replacements: Mapping[int, Replacement],
    masked_ids: Sequence[int] | None = None,
    check: bool = True,
) -> Iterator[FrozenModel]:
    """Splice replacements in for the length of the block; the model is as before afterwards, also after an exception.

    The replacements are in evaluation mode for that length.

    Args:
        model: a ``FrozenModel``, a loaded Hugging Face model or a TransformerLens bridge.
        replacements: block number -> layer, module, or what ``load_layer`` returned.
        masked_ids: at positions that hold one of these tokens the base MLP answers, since replacements were trained
            without them (attention sinks). By default what each replacement's provenance says; for bare modules none.
        check: compare provenance with the model.

    Raises:
        MxdError: no such layer, wrong width, or a replacement that was trained for another model or block.
    """
    frozen = wrap(model)
    undo = _splice(frozen, replacements, masked_ids, check)
    try:
        yield frozen
    finally:
        undo()


def splice(
    model: Any,
    replacements: Mapping[int, Replacement],
    masked_ids: Sequence[int] | None = None,
    check: bool = True,
) -> FrozenModel:
    """Splice replacements in for good; arguments and errors as ``spliced``."""
    frozen = wrap(model)
    _splice(frozen, replacements, masked_ids, check)
    return frozen


def check_provenance(model: FrozenModel, layer: int, provenance: Provenance) -> None:
    """Check that a replacement was trained for this block of this model.

    Raises:
        MxdError: another block, or other base weights.
    """
    if provenance.layer != layer:
        raise MxdError(
            f"this replacement was trained for layer {provenance.layer}, not {layer}; splice it there, or pass "
            "check=False to insist."
        )
    if provenance.fingerprint != model.fingerprint(layer):
        raise MxdError(
            f"this replacement was trained for layer {layer} of {provenance.model!r} (revision {provenance.revision}, "
            f"MLP fingerprint {provenance.fingerprint}); {model.source!r} has other weights there (fingerprint "
            f"{model.fingerprint(layer)}). Load that model, or pass check=False to insist."
        )


@dataclass
class _TokenIds:
    """The ids of the forward under way, noted by a hook on the model, read by the spliced modules."""

    ids: Tensor | None = None


class SplicedMLP(nn.Module):
    """A replacement in an MLP's place; where ``masked_ids`` stand, and for layers that read it, the base MLP runs."""

    def __init__(self, layer: nn.Module, base: nn.Module, masked_ids: Sequence[int], seen: _TokenIds) -> None:
        super().__init__()
        self.layer = layer
        self.base = base
        self.masked_ids = list(masked_ids)
        self.reads = layer.config.reads if isinstance(layer, ReplacementLayer) else "mlp_in"
        self._seen = seen

    def forward(self, x: Tensor) -> Tensor:
        """Return the replacement's output, and the base MLP's at masked positions."""
        if not self.masked_ids and self.reads == "mlp_in":
            return self.layer(x)
        base_out = self.base(x)
        out = self.layer(x if self.reads == "mlp_in" else base_out)
        if not self.masked_ids:
            return out
        ids = self._seen.ids
        if ids is None or ids.shape != x.shape[:-1]:
            raise MxdError(
                "a splice with masked tokens needs the model to be called with input_ids that match its hidden states; "
                "pass masked_ids=() to splice at every position."
            )
        masked = torch.isin(ids, torch.tensor(self.masked_ids, device=ids.device))
        return torch.where(masked.unsqueeze(-1).to(x.device), base_out, out)


def _splice(
    model: FrozenModel, replacements: Mapping[int, Replacement], masked_ids: Sequence[int] | None, check: bool
) -> Any:
    ready = {
        number: _prepare(model, number, replacement, masked_ids, check) for number, replacement in replacements.items()
    }
    seen = _TokenIds()
    handle = model.module.register_forward_pre_hook(
        lambda module, args, kwargs: setattr(seen, "ids", kwargs.get("input_ids", args[0] if args else None)),
        with_kwargs=True,
    )
    originals = []
    for number, (layer, masked) in ready.items():
        parent, name = model.slot(number)
        base = getattr(parent, name)
        originals.append((parent, name, base, base.training, layer, layer.training))
        setattr(parent, name, SplicedMLP(layer, base, masked, seen).eval())

    def undo() -> None:
        handle.remove()
        for parent, name, base, base_training, layer, layer_training in reversed(originals):
            setattr(parent, name, base.train(base_training))
            layer.train(layer_training)

    return undo


def _prepare(
    model: FrozenModel, number: int, replacement: Replacement, masked_ids: Sequence[int] | None, check: bool
) -> tuple[nn.Module, Sequence[int]]:
    """Check one replacement before anything is changed."""
    model.check_layer(number)
    base = model.mlp(number)
    if isinstance(base, SplicedMLP):
        raise MxdError(f"layer {number} is spliced already; leave that block first.")
    provenance = replacement.provenance if isinstance(replacement, Trained) else None
    layer = replacement.layer if isinstance(replacement, Trained) else replacement
    if isinstance(layer, ReplacementLayer):
        shape = model.mlp_shape(number)
        expected = (shape.d_in if layer.config.reads == "mlp_in" else shape.d_out, shape.d_out)
        if (layer.config.d_in, layer.config.d_out) != expected:
            raise MxdError(
                f"layer {number} of {model.source!r} needs widths {expected}, the replacement has "
                f"{(layer.config.d_in, layer.config.d_out)}."
            )
        layer.to(model.device)
    if provenance is not None and check:
        check_provenance(model, number, provenance)
    if masked_ids is None:
        masked_ids = provenance.masked_ids if provenance is not None else ()
    return layer, masked_ids
