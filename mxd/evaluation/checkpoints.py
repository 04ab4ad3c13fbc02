"""Evaluate checkpoints: load them and their base model, measure, keep the numbers as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mxd.artifacts.checkpoint import Trained
from mxd.artifacts.provenance import Provenance, versions
from mxd.artifacts.readme import update_cards
from mxd.artifacts.sets import base_model, named_layers, sets_of
from mxd.common.errors import MxdError
from mxd.common.files import whole_file, write_json
from mxd.config import DataConfig
from mxd.data.contexts import Contexts, token_contexts
from mxd.data.text import documents
from mxd.layers.neurons import Neurons
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen


@dataclass(frozen=True)
class Subject:
    """What an evaluation is about: trained layers by name, their base model, and held-out text."""

    trained: dict[str, Trained]
    base: FrozenModel
    text: DataConfig
    neurons: dict[str, Trained] = field(default_factory=dict)
    """The base MLPs' own neurons as layers, where they are measured beside the trained ones (``with_neurons``)."""

    @property
    def layers(self) -> dict[str, Trained]:
        """All that is measured: the trained layers, and the neurons."""
        return self.trained | self.neurons

    def with_neurons(self, wanted: bool = True) -> "Subject":
        """Return the same subject with the neurons of every MLP that a layer replaces: ``MLP neurons, block L``.

        They count the same tokens as that layer.

        Args:
            wanted: else the subject as it is.

        Raises:
            MxdError: the form of an MLP is not known.
        """
        if not wanted:
            return self
        by_block = {trained.provenance.block: trained for trained in reversed(self.trained.values())}
        neurons = {
            f"MLP neurons, block {number}": _neurons(self.base, trained) for number, trained in sorted(by_block.items())
        }
        return replace(self, neurons=neurons)

    def sets(self, together: bool = False) -> dict[str, dict[int, Trained]]:
        """Return what is spliced in: each layer alone under its name, or sets of them together (``sets_of``).

        Neurons that are measured together are the set ``neurons``.

        Raises:
            MxdError: two of the layers to splice in together replace the same MLP.
        """
        if together:
            return sets_of(self.trained) | (sets_of(self.neurons) if self.neurons else {})
        return {name: {trained.provenance.block: trained} for name, trained in self.layers.items()}

    @property
    def members(self) -> dict[str, dict[str, Any]]:
        """What tables and figures say of each layer."""
        return {name: describe(trained) for name, trained in self.layers.items()}

    def contexts(self, seed: int = 0) -> Contexts:
        """Return the held-out contexts, once, in an order drawn from the seed."""
        return held_out_contexts(self.base, self.text, seed)

    def texts(self) -> Iterable[str]:
        """Return the held-out documents."""
        text = self.text
        return documents(text.source, text.split, text.column, text.streaming, part=text.part)

    def document(self, results: Mapping[str, Any], **asked: Any) -> dict[str, Any]:
        """Return results together with everything they depend on; ``asked`` are the arguments of the evaluation."""
        return {
            "model": next(iter(self.trained.values())).provenance.model,
            "revision": self.base.revision,
            "data": self.text.model_dump(),
            **asked,
            "versions": versions(),
            "results": dict(results),
        }


def open_checkpoints(
    paths: Sequence[str | Path],
    data: Mapping[str, Any] | None = None,
    model: str | FrozenModel | None = None,
    device: str = "auto",
) -> Subject:
    """Load checkpoints of one base model, and that model.

    Args:
        paths: layer folders, run folders (all layers in them), or Hub references to either.
        data: fields of the training text to change; its held-out side is read unless a split is given here.
        model: base model to use in place of the one the checkpoints name: a local copy of it, say, or a loaded one.
        device: where to run; a loaded model stays where it is.

    Raises:
        MxdError: a damaged checkpoint, or checkpoints of several base models.
    """
    loaded = named_layers(paths)
    source, revision, dtype = base_model(loaded)
    text = _held_out(next(iter(loaded.values())), data or {})
    base = load_frozen(model or source, revision=None if model else revision, dtype=dtype, device=device)
    return Subject(loaded, base, text)


def held_out_contexts(base: FrozenModel, text: DataConfig, seed: int = 0) -> Any:
    """Return the contexts of an evaluation text once, in a drawn order, so that any part is like the whole.

    Args:
        base: the frozen base model, with its tokenizer.
        text: which text, and how long its contexts are.
        seed: draws the order.

    Raises:
        MxdError: the model has no tokenizer, or the text cannot be read.
    """
    if base.tokenizer is None:
        raise MxdError("the base model has no tokenizer.")
    texts = documents(text.source, text.split, text.column, text.streaming, part=text.part)
    return token_contexts(texts, base.tokenizer, text.context, text.bos, seed, repeat=False, vocabulary=base.vocabulary)


def save_results(results: Mapping[str, Any], path: str | Path) -> Path:
    """Write results as JSON; a file of that name is replaced only once the new one is complete.

    Where they are what cards show, the cards of the layers in the same folder follow.

    Raises:
        MxdError: the file or a card cannot be written.
    """
    path = Path(path)
    with whole_file(path) as file:
        write_json(file, dict(results))
    if path.name == "faithfulness.json":
        update_cards(path.parent)
    return path


def _held_out(trained: Trained, changes: Mapping[str, Any]) -> DataConfig:
    """Return the training text's held-out side, with the caller's changes."""
    fields = dict(trained.provenance.data)
    if fields.get("part", "all") == "all" or "split" in changes or "source" in changes:
        fields |= {"split": "validation", "part": "all"}
    else:
        fields["part"] = "validation"
    try:
        return DataConfig.model_validate(fields | dict(changes))
    except ValidationError as error:
        raise MxdError(f"bad evaluation text: {error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}") from error


def _neurons(base: FrozenModel, trained: Trained) -> Trained:
    """Return the neurons of the MLP that a layer replaces, with what its provenance says of model and text."""
    about = trained.provenance
    kept = {"model", "revision", "block", "fingerprint", "model_dtype", "excluded_ids", "data"}
    layer = Neurons.of(base.mlp_shape(about.block), base.mlp_weights(about.block))
    return Trained(layer, Provenance(**about.model_dump(include=kept)), trained.path)


def describe(trained: Trained) -> dict[str, Any]:
    """Return what tables and figures say of a layer: method, sparsity, K, block, units, parameters, tokens."""
    config = trained.layer.config
    return {
        "method": config.label,
        "sparsity": config.sparsity.slug,
        "k": config.sparsity.shown_k,
        "block": trained.provenance.block,
        "units": config.num_units,
        "params": config.num_params,
        "tokens_trained": trained.provenance.tokens,
    }
