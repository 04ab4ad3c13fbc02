"""Put replacements into a model in place of its MLPs: for the length of a ``with`` block, or for good.

with mxd.spliced(model, {3: layer}):
model.module.generate(...)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from warnings import warn

import torch
from torch import Tensor, nn

from mxd.artifacts.checkpoint import Trained, load_layer
from mxd.artifacts.provenance import Provenance
from mxd.common.errors import MxdError, MxdWarning
from mxd.layers import ReplacementLayer
from mxd.model.frozen import FrozenModel
from mxd.model.loading import wrap

T = TypeVar("T")

Replacement = nn.Module | Trained
"""A layer, any module that maps one tensor to one tensor, or a layer with its provenance."""
Where = str | Path
"""Where a layer with its provenance lies: its folder, or a Hub reference ``org/name[/subfolder][@revision]``."""


class RevisionWarning(MxdWarning):
    """A replacement was trained on another revision of the base model, whose MLP is the same."""


@contextmanager
def spliced(
    model: Any,
    replacements: Mapping[int, Replacement | Where],
    base_at: Sequence[int] = (),
    check: bool = True,
    mask: Mapping[int, Sequence[int]] | None = None,
) -> Iterator[FrozenModel]:
    """Splice replacements in for the length of the block; the model is as before afterwards, also after an exception.

    The replacements are in evaluation mode for that length.

    Args:
        model: a ``FrozenModel``, a loaded Hugging Face model or a TransformerLens bridge.
        replacements: block number -> layer, module, what ``load_layer`` returned, or a path or Hub reference for it.
        base_at: at positions that hold one of these tokens the base MLP answers in the replacements' place. By default
            nowhere: a replacement that needs the MLP at some tokens does not replace it.
        check: compare provenance with the model.
        mask: block number -> units that are switched off: their terms are dropped from the replacement's output.

    Raises:
        MxdError: no such layer or unit, wrong width, or a replacement that was trained for another model or block.
    """
    frozen = wrap(model)
    with Splice(frozen, replacements, base_at, check, mask).entered():
        yield frozen


def splice(
    model: Any,
    replacements: Mapping[int, Replacement | Where],
    base_at: Sequence[int] = (),
    check: bool = True,
    mask: Mapping[int, Sequence[int]] | None = None,
) -> FrozenModel:
    """Splice replacements in for good; arguments and errors as ``spliced``."""
    frozen = wrap(model)
    Splice(frozen, replacements, base_at, check, mask).insert()
    return frozen


def check_provenance(model: FrozenModel, block: int, provenance: Provenance) -> None:
    """Check that a replacement was trained for this block of this model.

    The same MLP in another revision of the model is a ``RevisionWarning``.

    Raises:
        MxdError: another block, or other base weights.
    """
    if provenance.block != block:
        raise MxdError(
            f"this replacement was trained for block {provenance.block}, not {block}; splice it there, or pass "
            "check=False to insist."
        )
    if provenance.site != "mlp":
        raise MxdError(
            f"this replacement predicts the output of {provenance.site!r}, not of the mlp module, in whose place it "
            "would stand; pass check=False to insist."
        )
    if provenance.fingerprint != model.fingerprint(block):
        raise MxdError(
            f"this replacement was trained for block {block} of {provenance.model!r} (revision {provenance.revision}, "
            f"MLP fingerprint {provenance.fingerprint}); {model.source!r} has other weights there (fingerprint "
            f"{model.fingerprint(block)}). Load that model, or pass check=False to insist."
        )
    if provenance.revision and model.revision and provenance.revision != model.revision:
        warn(
            f"the replacement of block {block} was trained on {provenance.model!r} at revision {provenance.revision}; "
            f"{model.source!r} is at revision {model.revision}. This MLP is the same in both; the rest may differ.",
            RevisionWarning,
            stacklevel=2,
        )


@dataclass
class _TokenIds:
    """The ids of the forward under way, noted by a hook on the model, read by the spliced modules."""

    ids: Tensor | None = None


class SplicedMLP(nn.Module):
    """A replacement in an MLP's place; at tokens ``base_at``, and for layers that read it, the base MLP runs."""

    off: Tensor | None

    def __init__(
        self, layer: nn.Module, base: nn.Module, base_at: Sequence[int], off: Tensor | None, seen: _TokenIds
    ) -> None:
        super().__init__()
        self.layer = layer
        self.base = base
        self.base_at = list(base_at)
        self.register_buffer("off", off, persistent=False)
        self._seen = seen

    def forward(self, x: Tensor) -> Tensor:
        """Return the replacement's output, and the base MLP's at tokens ``base_at``."""
        if not self.base_at:
            return self._replaced(self.read(nn.Identity(), self.base)(x))
        base_out = self.base(x)
        out = self._replaced(self.read(x, base_out))
        ids = self._seen.ids
        if ids is None or ids.shape != x.shape[:-1]:
            raise MxdError(
                "a splice with base_at needs the model to be called with input_ids that match its hidden states; "
                "leave base_at out to splice at every position."
            )
        here = torch.isin(ids, torch.tensor(self.base_at, device=ids.device))
        return torch.where(here.unsqueeze(-1).to(x.device), base_out, out)

    def read(self, x: T, y: T) -> T:
        """Return which of the two the replacement reads (``ReplacementLayer.read``); another module, the first."""
        return self.layer.read(x, y) if isinstance(self.layer, ReplacementLayer) else x

    def _replaced(self, x: Tensor) -> Tensor:
        if self.off is None or not isinstance(self.layer, ReplacementLayer):
            return self.layer(x)
        code = self.layer.encode(x)
        return self.layer.decode(x, code.without(self.off))


class Splice:
    """Replacements that fit a model: all checks are made here, once; then they go in and out at no cost.

    Arguments and errors as ``spliced``.
    """

    def __init__(
        self,
        model: FrozenModel,
        replacements: Mapping[int, Replacement | Where],
        base_at: Sequence[int] = (),
        check: bool = True,
        mask: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.model = model
        self.layers = {number: _prepare(model, number, one, check) for number, one in replacements.items()}
        """Block number -> the module that answers there."""
        off = {number: _switched_off(units, number, self.layers) for number, units in (mask or {}).items()}
        self._seen = _TokenIds()
        self._modules = {
            number: SplicedMLP(layer, model.mlp(number), base_at, off.get(number), self._seen)
            for number, layer in self.layers.items()
        }

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have the replacements in the model, in evaluation mode, for the length of the block."""
        undo = self.insert()
        try:
            yield
        finally:
            undo()

    def insert(self) -> Callable[[], None]:
        """Put the replacements in, in evaluation mode.

        Returns:
            What puts the MLPs back, and every module's mode.

        Raises:
            MxdError: one of the blocks is spliced already.
        """
        for number in self._modules:
            _check_free(self.model, number)
        handle = self.model.module.register_forward_pre_hook(
            lambda module, args, kwargs: setattr(self._seen, "ids", kwargs.get("input_ids", args[0] if args else None)),
            with_kwargs=True,
        )
        originals = []
        for number, spliced_mlp in self._modules.items():
            parent, name = self.model.slot(number)
            base, layer = spliced_mlp.base, spliced_mlp.layer
            originals.append((parent, name, base, base.training, layer, layer.training))
            setattr(parent, name, spliced_mlp.eval())

        def undo() -> None:
            handle.remove()
            for parent, name, base, base_training, layer, layer_training in reversed(originals):
                setattr(parent, name, base.train(base_training))
                layer.train(layer_training)

        return undo


def _check_free(model: FrozenModel, number: int) -> None:
    if isinstance(model.mlp(number), SplicedMLP):
        raise MxdError(f"block {number} is spliced already; leave that block first.")


def _prepare(model: FrozenModel, number: int, replacement: Replacement | Where, check: bool) -> nn.Module:
    """Check one replacement before anything is changed."""
    model.check_block(number)
    _check_free(model, number)
    if isinstance(replacement, str | Path):
        replacement = load_layer(replacement)
    provenance = replacement.provenance if isinstance(replacement, Trained) else None
    layer = replacement.layer if isinstance(replacement, Trained) else replacement
    if isinstance(layer, ReplacementLayer):
        shape = model.mlp_shape(number)
        expected = (layer.read(shape.d_in, shape.d_out), shape.d_out)
        if (layer.config.d_in, layer.config.d_out) != expected:
            raise MxdError(
                f"block {number} of {model.source!r} needs widths {expected}, the replacement has "
                f"{(layer.config.d_in, layer.config.d_out)}."
            )
        layer.to(model.device)
    if provenance is not None and check:
        check_provenance(model, number, provenance)
    return layer


def _switched_off(units: Sequence[int], number: int, ready: Mapping[int, nn.Module]) -> Tensor | None:
    """Return which units of a block's replacement are masked, or ``None`` for none."""
    if number not in ready:
        raise MxdError(f"mask names block {number}; spliced are: {', '.join(map(str, ready))}.")
    layer = ready[number]
    if not isinstance(layer, ReplacementLayer):
        raise MxdError(f"mask: the {type(layer).__name__} at block {number} has no units; only mxd's layers have.")
    wrong = [unit for unit in units if not 0 <= unit < layer.num_units]
    if wrong:
        raise MxdError(f"mask: block {number} has units 0 ... {layer.num_units - 1}, got {wrong[0]}.")
    if not units:
        return None
    off = torch.zeros(layer.num_units, dtype=torch.bool, device=layer.bias.device)
    off[list(units)] = True
    return off
