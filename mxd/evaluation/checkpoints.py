"""Evaluate checkpoints: load them and their base model, measure, keep the numbers as JSON."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mxd.artifacts.checkpoint import Trained
from mxd.artifacts.provenance import Provenance, versions
from mxd.artifacts.readme import update_cards
from mxd.artifacts.sets import as_trained, base_model, check_base, named_layers, sets_of
from mxd.common.arrays import packed
from mxd.common.errors import MxdError
from mxd.common.files import whole_file, write_json
from mxd.common.numbers import plural
from mxd.common.progress import say_once
from mxd.config import DataConfig
from mxd.data.contexts import Contexts, token_contexts
from mxd.data.text import IN_MEMORY, MEMORY, documents, given_text, in_memory
from mxd.layers.neurons import Neurons
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen
from mxd.questions import refusal

Layer = str | PathLike[str] | Trained
"""A layer, its folder or a Hub reference to it; in a list also the folder of a run, or a Hub reference to several."""
Layers = Layer | Iterable[Layer] | Mapping[Any, Layer]
"""One or several; or names, or blocks, and their layers."""


@dataclass(frozen=True)
class Subject:
    """What an evaluation is about: trained layers by name, their base model, and held-out text."""

    trained: dict[str, Trained]
    base: FrozenModel
    text: DataConfig
    own_text: Iterable[str] | None = None
    """Documents to read in place of ``text.source``."""
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
        return held_out_contexts(self.base, self.text, seed, self.own_text)

    def texts(self) -> Iterable[str]:
        """Return the held-out documents."""
        text = self.text
        if self.own_text is not None:
            return self.own_text
        return documents(
            text.source, text.split, text.column, text.streaming, part=text.part, tokenizer=self.base.tokenizer
        )

    def document(self, results: Mapping[str, Any], **asked: Any) -> dict[str, Any]:
        """Return results together with everything they depend on; ``asked`` are the arguments of the evaluation."""
        return {
            "model": next(iter(self.trained.values())).provenance.model,
            "revision": self.base.revision,
            "data": self.text.model_dump() | ({} if self.own_text is None else _identified(self.own_text)),
            **asked,
            "versions": versions(),
            "results": dict(results),
        }


def open_checkpoints(
    paths: Layers,
    data: Mapping[str, Any] | None = None,
    model: Any = None,
    device: str = "auto",
    text: Any = None,
) -> Subject:
    """Load checkpoints of one base model, and that model.

    Args:
        paths: layer folders, run folders (all layers in them), Hub references to either, or layers that are loaded; or
            a mapping of names, or blocks, to layers.
        data: fields of the training text to change; its held-out side is read unless a split is given here.
        model: base model to use in place of the one the checkpoints name: a local copy of it, say, or a loaded one.
        device: where to run; a loaded model stays where it is.
        text: what to read in place of the training text: a source, or documents that Python code holds
            (``in_memory``). Of those only the held-out side is read if the layers were trained on such text.

    Raises:
        MxdError: a damaged checkpoint, or checkpoints of several base models.
    """
    if isinstance(paths, Mapping):
        names = {key: f"block{key}" if isinstance(key, int) else str(key) for key in paths}
        loaded = {names[key]: as_trained(item) for key, item in paths.items()}
    elif isinstance(paths, str | PathLike | Trained) or not isinstance(paths, Iterable):
        loaded = named_layers([paths])
    else:
        loaded = named_layers(list(paths))
    if not loaded:
        raise MxdError("there is nothing to measure: give at least one layer.")
    source, revision, dtype = base_model(loaded)
    known, own = given_text(text)
    about = _held_out(next(iter(loaded.values())), known | dict(data or {}))
    given = model is not None
    base = load_frozen(model if given else source, revision=None if given else revision, dtype=dtype, device=device)
    base.check_context(about.context)
    if isinstance(model, str):
        check_base(base, loaded, "--model")
    return Subject(loaded, base, about, None if own is None else _own_text(own, base, about, loaded.values()))


def _own_text(text: Any, base: FrozenModel, about: DataConfig, layers: Iterable[Trained]) -> Iterable[str]:
    """Return the documents to read of a text that Python code holds: none that a layer may have been trained on."""
    origins = [layer.provenance for layer in layers]
    divided = any(IN_MEMORY in (seen.get("source") for seen in (origin.data, *origin.tuning)) for origin in origins)
    found = in_memory(text, "validation" if divided else None, about.column, part=about.part, tokenizer=base.tokenizer)
    given = len(text) if isinstance(text, Sized) and not isinstance(text, Mapping) else 0
    if isinstance(found, Sized) and len(found) < given:
        say_once(
            f"Of {MEMORY} the held-out side is read, {len(found):,} of {plural(given, 'document')}: the layers were "
            "trained on text in memory, maybe on this. {'validation': documents} is read whole."
        )
    return found


def held_out_contexts(base: FrozenModel, text: DataConfig, seed: int = 0, own_text: Iterable[str] | None = None) -> Any:
    """Return the contexts of an evaluation text once, in a drawn order, so that any part is like the whole.

    Args:
        base: the frozen base model, with its tokenizer.
        text: which text, and how long its contexts are.
        seed: draws the order.
        own_text: documents to read in place of the text's source.

    Raises:
        MxdError: the model has no tokenizer, or the text cannot be read.
    """
    if base.tokenizer is None:
        raise MxdError("the base model has no tokenizer; load it with one, mxd.load_frozen(model, tokenizer=...).")
    texts = own_text
    if texts is None:
        texts = documents(
            text.source, text.split, text.column, text.streaming, part=text.part, tokenizer=base.tokenizer
        )
    return token_contexts(texts, base.tokenizer, text.context, text.bos, seed, repeat=False, vocabulary=base.vocabulary)


def save_results(results: Mapping[str, Any], path: str | Path) -> Path:
    """Write results as JSON; a file of that name is replaced only once the new one is complete.

    Where they are what cards show, the cards of the layers in the same folder follow.

    Raises:
        MxdError: the file or a card cannot be written.
    """
    path = Path(path)
    with whole_file(path) as file:
        write_json(file, dict(results), packed)
    if path.name == "faithfulness.json":
        update_cards(path.parent)
    return path


def _identified(texts: Iterable[str]) -> dict[str, str]:
    """Return what identifies a list of documents: a hash of them; nothing of what can be read only as it comes."""
    if not isinstance(texts, Sequence):
        return {}
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return {"documents_sha256": digest.hexdigest()}


def _held_out(trained: Trained, changes: Mapping[str, Any]) -> DataConfig:
    """Return the training text's held-out side, with the caller's changes."""
    fields = dict(trained.provenance.data)
    moved = changes.get("source", fields.get("source")) != fields.get("source")
    if fields.get("part", "all") == "all" or "split" in changes or moved:
        fields |= {"split": "validation", "part": "all"}
    else:
        fields["part"] = "validation"
    try:
        return DataConfig.model_validate(fields | dict(changes))
    except ValidationError as error:
        raise refusal(error) from error


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
