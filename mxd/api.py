"""Python: what a person has at hand, then one function of the house, as the command line does."""

from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from mxd.artifacts.run import Run
from mxd.common.errors import MxdError
from mxd.config import RunConfig, load_config, parse_config
from mxd.data.text import IN_MEMORY, given_text
from mxd.evaluation.checkpoints import Layers, open_checkpoints
from mxd.evaluation.compare import compare as run_comparison
from mxd.evaluation.faithfulness import answer
from mxd.evaluation.results import Faithfulness
from mxd.model.frozen import FrozenModel
from mxd.model.loading import DTYPES, load_frozen
from mxd.questions import DEFAULTS, FaithfulnessConfig, checked
from mxd.training.trainer import train as run_training
from mxd.training.tune import tune as run_tuning
from mxd.tuning import UNCHANGED, TuneConfig

Text = str | PathLike[str] | Iterable[Any]
"""A source as ``data.source`` names it; or documents: a list or another iterable of strings, a ``datasets.Dataset``; or
by the names of splits, ``{"train": documents, "validation": others}``."""


def train(
    config: RunConfig | Mapping[str, Any] | str | PathLike[str],
    text: Text | None = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    resume: bool = False,
    overwrite: bool = False,
    groups: int | None = None,
    shard: bool = False,
) -> Run:
    """Train every replacement of a run and write them under ``out/run`` of its config.

    Every process of a launch calls this with the same arguments.

    Args:
        config: the run: a config, its fields as plain data, or a YAML file's path.
        text: what to train on, in place of the config's ``data.source``; a part of the documents is held out, as of a
            file's (docs/text.md). They are trained on in a new order every epoch if their number is known, else once
            and in their own order. They can stand in plain data, too, as ``data.source``.
        model: the base model, in place of the config's: a name, a ``FrozenModel``, a loaded Hugging Face model, a
            TransformerLens bridge, or a module from token ids to logits (``PlainModel``).
        tokenizer: the tokenizer of a loaded ``model``.
        resume: continue an interrupted run, which ends exactly as if it had not been interrupted; refused where config,
            text, base model or cache have changed.
        overwrite: delete what an earlier run left in the folder, once it is known that this one can begin; refused
            where the folder is not a run's.
        groups: groups of processes, each of which trains replacements of its own.
        shard: divide weights, gradients and moments among the processes of a group, for layers too large for one.

    Returns:
        The run: its folder, layers and metrics.

    Raises:
        MxdError: a bad input, found before training where possible; or ``Interrupted`` after Ctrl-C or SIGTERM, once
            everything is saved.
    """
    stated, own = _config(config, text)
    complete, base = _with_model(stated, model, tokenizer)
    return Run(run_training(complete, resume, base, groups, shard, own, overwrite))


def tune(
    layers: str | PathLike[str] | Iterable[str | PathLike[str]],
    how: TuneConfig | Mapping[str, Any] = UNCHANGED,
    *,
    text: Text | None = None,
    run: str | None = None,
    out: str | PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    model: Any = None,
) -> Run:
    """Tune trained layers together, spliced into their base model, and write them as a run of their own.

    Layers that are alike but for their block (method, sparsity, K) are a set, which is spliced in together; several
    sets are tuned side by side. The layers that are read stay as they are.

    Args:
        layers: a run, or folders of layers or runs, or Hub references; to resume, the ``config.yaml`` of a tuning.
        how: the loss and the recipe, as a config or its fields; fields that are not given are what a run's
            ``config.yaml`` says under ``tune``. A tuning that is resumed keeps them.
        text: what to tune on, as for ``train``; by default what the layers were trained on. Layers that were trained on
            documents which Python code holds need it, and to resume the same again.
        run: name of the run that is written; by default the read one's with ``-tuned``.
        out: folder that holds it; by default that of the run that is read.
        resume: continue an interrupted tuning, exactly as if it had not been interrupted.
        overwrite: delete what an earlier tuning left in the folder, as for ``train``.
        model: the base model, in place of the one that the layers name: a name, or loaded.

    Returns:
        The run that was written.

    Raises:
        MxdError: layers that do not belong together, or as ``train``.
    """
    paths = [layers] if isinstance(layers, str | PathLike) else list(layers)
    stated = how if isinstance(how, TuneConfig) else checked(TuneConfig, **how)
    named = isinstance(model, str | PathLike)
    folder = None if out is None else str(out)
    loaded, source = (None, str(model)) if named else (model, None)
    given = [fspath(path) for path in paths]
    return Run(run_tuning(given, stated, run, folder, resume, loaded, source, text, overwrite))


def compare(config: RunConfig | Mapping[str, Any] | str | PathLike[str]) -> Run:
    """Train a run, or the rest of it, and answer each of its config's questions that has no answer yet.

    Args:
        config: the run: a config, its fields as plain data, or a YAML file's path.

    Returns:
        The run, with an answer to each question in ``results``.

    Raises:
        MxdError: as ``train`` and the evaluations; earlier answers stay.
    """
    stated, own = _config(config, None)
    if own is not None:
        raise MxdError("compare reads text by its name; give data.source a file, a folder or a dataset.")
    return Run(run_comparison(stated))


def evaluate(
    layers: Layers,
    text: Text | None = None,
    *,
    tokens: int = DEFAULTS.faithfulness.tokens,
    seed: int = DEFAULTS.faithfulness.seed,
    together: bool = False,
    model: Any = None,
    device: str = "auto",
) -> Faithfulness:
    """Splice trained layers into their base model and measure faithfulness on held-out text.

    Args:
        layers: what to splice in.
        text: what to read; by default the held-out side of the text that the layers were trained on. Of documents that
            Python code holds only the held-out side is read if the layers were trained on such.
        tokens: positions to read, rounded up to whole contexts.
        seed: draws the order of the text, and so the part that is read.
        together: splice in all layers of a kind at once, as a set, in place of each alone; layers of different blocks
            are one set.
        model: the base model, as for ``train``; by default the one that the layers name.
        device: where to run; a loaded model stays where it is.

    Returns:
        The numbers: of each splice as attributes, of all as a data frame or as the document that is saved.

    Raises:
        MxdError: damaged layers, layers of several base models, or no text.
    """
    how = checked(FaithfulnessConfig, tokens=tokens, seed=seed)
    return Faithfulness(answer(open_checkpoints(layers, None, model, device, text), how, together))


def _config(config: RunConfig | Mapping[str, Any] | str | PathLike[str], text: Text | None) -> tuple[RunConfig, Any]:
    """Return a run's config and the text that Python code holds, if it is given any; the config says so."""
    if isinstance(config, Mapping):
        data = config.get("data")
        if isinstance(data, Mapping) and not isinstance(data.get("source", ""), str):
            text = data["source"] if text is None else text
            config = {**config, "data": {**data, "source": IN_MEMORY}}
        config = parse_config(dict(config))
    elif not isinstance(config, RunConfig):
        config = load_config(Path(config))
    if text is None:
        return config, None
    data = config.data
    if data.cache is not None:
        raise MxdError("data.cache holds the activations of a text already; leave out text, or the cache.")
    known, own = given_text(text)
    return config.model_copy(update={"data": data.model_copy(update=known)}), own


def _with_model(config: RunConfig, model: Any, tokenizer: Any) -> tuple[RunConfig, FrozenModel | None]:
    """Return a config that names the base model it is given, and the model if it is loaded already."""
    known: dict[str, Any]
    if model is None or isinstance(model, str | PathLike):
        if tokenizer is not None:
            raise MxdError("tokenizer belongs to a loaded model; give that as model, or leave tokenizer out.")
        known = {} if model is None else {"source": str(model), "revision": None}
        return config.model_copy(update={"model": config.model.model_copy(update=known)}), None
    base = load_frozen(model, tokenizer=tokenizer)
    known = {"source": base.source, "revision": base.revision}
    known |= {"dtype": base.dtype} if base.dtype in DTYPES else {}
    return config.model_copy(update={"model": config.model.model_copy(update=known)}), base
