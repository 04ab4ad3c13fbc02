"""Put replacements into a model in place of its MLPs: for the length of a ``with`` block, or for good.

    with mxd.spliced(model, {3: layer}):
        model.module.generate(...)

All checks are made before the model is touched.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from warnings import warn

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mxd.artifacts.checkpoint import Trained, load_layer
from mxd.artifacts.provenance import Provenance
from mxd.common.errors import MxdError, MxdWarning
from mxd.layers import ReplacementLayer
from mxd.model.frozen import FrozenModel, Record
from mxd.model.loading import wrap

T = TypeVar("T")

Replacement = nn.Module | Trained
"""A layer, any module that maps one tensor to one tensor, or a layer with its provenance."""
Where = str | Path
"""The folder of a layer with its provenance, or a Hub reference ``org/name[/subfolder][@revision]``."""


class RevisionWarning(MxdWarning):
    """A replacement was trained on another revision of the base model, with the same MLP."""


class SiblingWarning(MxdWarning):
    """A replacement was tuned together with others that are not spliced in beside it."""


@contextmanager
def spliced(
    model: Any,
    replacements: Mapping[int, Replacement | Where],
    base_at: Sequence[int] = (),
    check: bool = True,
    mask: Mapping[int, Sequence[int]] | None = None,
) -> Iterator[FrozenModel]:
    """Splice replacements in for the length of the ``with`` block; an exception, too, leaves the model as it was.

    Inside the block the replacements are in evaluation mode.

    Args:
        model: a ``FrozenModel``, a loaded Hugging Face model or a TransformerLens bridge.
        replacements: block number -> layer, module, what ``load_layer`` returned, or a path or Hub reference for it.
        base_at: tokens at which the base MLP runs in the replacements' place. By default none: a replacement that needs
            the MLP at some tokens does not replace it.
        check: compare provenance with the model.
        mask: block number -> units whose terms are dropped from the replacement's output.

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

    Args:
        model: the base model.
        block: where the replacement is to be spliced in.
        provenance: the replacement's.

    Raises:
        MxdError: another block or site, or other base weights.
    """
    if provenance.block != block:
        raise MxdError(
            f"this replacement was trained for block {provenance.block}, not {block}; splice it there. "
            "(In Python check=False insists.)"
        )
    if provenance.site != "mlp":
        raise MxdError(
            f"this replacement predicts the output of {provenance.site!r}, not of the mlp module, whose place it would "
            "take. (In Python check=False insists.)"
        )
    if provenance.fingerprint != model.fingerprint(block):
        raise MxdError(
            f"this replacement was trained for block {block} of {provenance.model!r} (revision {provenance.revision}, "
            f"MLP fingerprint {provenance.fingerprint}); {model.source!r} has other weights there (fingerprint "
            f"{model.fingerprint(block)}). Load that model. (In Python check=False insists.)"
        )
    if provenance.revision and model.revision and provenance.revision != model.revision:
        warn(
            f"the replacement of block {block} was trained on {provenance.model!r} at revision {provenance.revision}; "
            f"{model.source!r} is at revision {model.revision}. This MLP is the same in both; the rest may differ.",
            RevisionWarning,
            stacklevel=2,
        )


def check_siblings(provenances: Iterable[Provenance]) -> None:
    """Warn of replacements that were tuned together with others which are not spliced in beside them.

    Args:
        provenances: of all that is spliced in.
    """
    tuned = [(own.block, own.tuning[-1]["members"]) for own in provenances if own.tuning]
    for block, members in tuned:
        present = {str(other) for other, those in tuned if those == members}
        missing = sorted(map(int, members.keys() - present))
        if missing:
            warn(
                f"the replacement of block {block} was tuned together with others, of which those of blocks "
                f"{', '.join(map(str, missing))} are not spliced in beside it; so it may be worse than it was before.",
                SiblingWarning,
                stacklevel=2,
            )
            return


@dataclass
class _TokenIds:
    """The ids of the forward under way, noted by a hook on the model, read by the spliced modules."""

    ids: Int[Tensor, "rows seq"] | None = None


class SplicedMLP(nn.Module):
    """A replacement in an MLP's place; at tokens ``base_at``, and for layers that read it, the base MLP runs."""

    base_at: Int[Tensor, " ids"]
    masked: Bool[Tensor, " units"] | None

    def __init__(
        self,
        layer: nn.Module,
        base: nn.Module,
        base_at: Int[Tensor, " ids"],
        masked: Bool[Tensor, " units"] | None,
        seen: _TokenIds,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.base = base
        self.register_buffer("base_at", base_at, persistent=False)
        self.register_buffer("masked", masked, persistent=False)
        self._seen = seen

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return the replacement's output, and the base MLP's at tokens ``base_at``.

        Raises:
            MxdError: with ``base_at``, the model was called without ``input_ids`` that match its hidden states.
        """
        if not len(self.base_at):
            return self._replaced(self.read(nn.Identity(), self.base)(x))
        base_out = self.base(x)
        out = self._replaced(self.read(x, base_out))
        ids = self._seen.ids
        if ids is None or ids.shape != x.shape[:-1]:
            raise MxdError(
                "a splice with base_at needs the model to be called with input_ids that match its hidden states; "
                "leave base_at out to splice at every position."
            )
        return torch.where(torch.isin(ids, self.base_at).unsqueeze(-1), base_out, out)

    def read(self, x: T, y: T) -> T:
        """Return which of the two the replacement reads (``ReplacementLayer.read``); other modules read the first."""
        return self.layer.read(x, y) if isinstance(self.layer, ReplacementLayer) else x

    def _replaced(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        if self.masked is None or not isinstance(self.layer, ReplacementLayer):
            return self.layer(x)
        code = self.layer.encode(x)
        return self.layer.decode(x, code.without(self.masked))


class Splice:
    """Replacements for a model: all checks are made once, here; splicing in and out then costs nothing.

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
        prepared = {number: _prepare(model, number, item, check) for number, item in replacements.items()}
        self.layers = {number: layer for number, (layer, _) in prepared.items()}
        """Block number -> the module that is spliced in there."""
        if check:
            check_siblings(provenance for _, provenance in prepared.values() if provenance is not None)
        masked = {number: _masked(units, number, self.layers) for number, units in (mask or {}).items()}
        self._seen = _TokenIds()
        at = torch.tensor(list(base_at), dtype=torch.int64, device=model.device)
        self._modules = {
            number: SplicedMLP(layer, model.mlp(number), at, masked.get(number), self._seen)
            for number, layer in self.layers.items()
        }

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Keep the replacements in the model, in evaluation mode, for the length of the ``with`` block."""
        undo = self.insert()
        try:
            yield
        finally:
            undo()

    def insert(self) -> Callable[[], None]:
        """Put the replacements in, in evaluation mode.

        Returns:
            A function that puts the MLPs back and restores every module's mode.

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


def recorder(splice: Splice, base_targets: bool = False) -> Record:
    """Return a ``FrozenModel.record`` through a splice, for blocks that are not spliced themselves.

    Args:
        splice: is in the model while a forward runs, and only then.
        base_targets: return the MLPs' outputs in the model as it is, from a second forward, beside their inputs in the
            spliced one. Otherwise outputs are the MLPs' for these inputs.
    """
    model = splice.model

    def record(ids: Int[Tensor, "batch seq"], blocks: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        with splice.entered():
            found = model.record(ids, blocks)
        if not base_targets:
            return found
        own = model.record(ids, blocks)
        return {number: (x, own[number][1]) for number, (x, _) in found.items()}

    return record


def _check_free(model: FrozenModel, number: int) -> None:
    if isinstance(model.mlp(number), SplicedMLP):
        raise MxdError(f"block {number} is spliced already; leave that splice first.")


def _prepare(
    model: FrozenModel, number: int, replacement: Replacement | Where, check: bool
) -> tuple[nn.Module, Provenance | None]:
    """Load and check one replacement, and return its module on the model's device, with its provenance."""
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
    return layer, provenance


def _masked(units: Sequence[int], number: int, layers: Mapping[int, nn.Module]) -> Bool[Tensor, " units"] | None:
    """Return which units of a block's replacement are masked, or ``None`` for none."""
    if number not in layers:
        raise MxdError(f"mask names block {number}; spliced are: {', '.join(map(str, layers))}.")
    layer = layers[number]
    if not isinstance(layer, ReplacementLayer):
        raise MxdError(f"mask: the {type(layer).__name__} at block {number} has no units; only mxd's layers have.")
    wrong = [unit for unit in units if not 0 <= unit < layer.num_units]
    if wrong:
        raise MxdError(f"mask: block {number} has units 0 ... {layer.num_units - 1}, got {wrong[0]}.")
    if not units:
        return None
    masked = torch.zeros(layer.num_units, dtype=torch.bool)
    masked[list(units)] = True
    return masked.to(layer.bias.device)
