"""Sets up a tuning: trained layers, by the sets that are spliced in together, and the text that they are tuned on."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import save

from mxd.artifacts.checkpoint import Trained
from mxd.artifacts.folders import layer_name, read_config
from mxd.artifacts.provenance import Provenance, versions
from mxd.artifacts.sets import base_model, named_layers
from mxd.common.errors import MxdError, typed
from mxd.common.hardware import amount
from mxd.common.lock import locked
from mxd.common.numbers import plural
from mxd.common.processes import Processes, launched
from mxd.common.progress import console, quiet
from mxd.config import RunConfig, load_config, recorded, tuning_as_training
from mxd.data.activations import Cursor
from mxd.data.contexts import special_ids
from mxd.data.text import given_text
from mxd.layers import ReplacementLayer
from mxd.model.frozen import FrozenModel
from mxd.model.unembedding import Unembedding
from mxd.ops import candidate_dtype
from mxd.planning.layout import plan_layers
from mxd.planning.memory import check_memory
from mxd.planning.plan import peak
from mxd.planning.tuning import LOWER, plan_tuning
from mxd.questions import refusal
from mxd.splice import check_provenance, check_siblings
from mxd.training.optimizers import Optimizer
from mxd.training.phases import at_once
from mxd.training.saving import Saver, trained_layer
from mxd.training.source import check_held_out, load_base, own_documents, text_contexts
from mxd.training.state import load_state
from mxd.training.step import Trainee, learned
from mxd.training.trainer import claim, clear, keep_freed_memory
from mxd.training.tuning import TunedSet, TunedStats, TuneLoop, TuneMetrics, batches_of
from mxd.tuning import UNCHANGED, TuneConfig

MEMORY = ("accumulation", "checkpointing")
"""What may change when a tuning is resumed, since it changes no layer but by rounding."""


def tune(
    paths: Sequence[str | Path],
    how: TuneConfig = UNCHANGED,
    run: str | None = None,
    out: str | None = None,
    resume: bool = False,
    model: Any = None,
    source: str | None = None,
    text: Any = None,
    overwrite: bool = False,
) -> Path:
    """Tune trained layers together, spliced into their base model, and write them as a run of their own.

    Layers that are alike but for their block (method, sparsity, K) are a set, which is spliced in together; several
    sets are tuned side by side. The layers that are read stay as they are.

    Args:
        paths: layers, runs or Hub references; or, to resume, the ``config.yaml`` of a tuning.
        how: the loss and the recipe; fields that are not given are what a run's ``config.yaml`` says under ``tune``. A
            tuning that is resumed keeps them, but for ``MEMORY``.
        run: name of the run that is written; by default the read one's with ``-tuned``.
        out: folder that holds it; by default that of the run that is read.
        resume: continue an interrupted tuning, exactly as if it had not been interrupted.
        model: a loaded base model, used in place of the one that the layers name.
        source: another name, folder or Hub id of the base model.
        text: what to tune on in place of the layers' text: a source, or documents that Python code holds
            (``in_memory``).
        overwrite: delete what an earlier run left in the folder, once it is known that this one can begin.

    Returns:
        The run's folder, as ``train`` writes it.

    Raises:
        MxdError: layers that do not belong together, or as ``train``.
    """
    known, own = given_text(text)
    config, layers = tune_config(paths, how, run, out, source, known)
    now = _as_asked(config, how, known) if resume else config.tune
    with launched(config.timeout) as processes, ExitStack() as stack:
        options = {"--resume": resume, "overwrite": overwrite, "now": now.model_dump()}
        processes.agree(recorded(config) | options)
        stack.enter_context(quiet(not processes.first))
        with processes.together():
            if processes.first:
                stack.enter_context(locked(config.folder))
                claim(config, resume, "tune", overwrite)
                if overwrite:
                    _check_apart(config.folder, layers)
        _tune(config, now, layers, resume, model, processes, own, overwrite)
    return config.folder


def _check_apart(folder: Path, layers: Mapping[str, Trained]) -> None:
    """Refuse to overwrite what is read.

    Raises:
        MxdError: a layer lies in the folder that would be deleted.
    """
    if inside := [name for name, trained in layers.items() if trained.path.resolve().is_relative_to(folder.resolve())]:
        raise MxdError(f"{folder} holds {', '.join(inside)}, to be tuned here, so it is not overwritten; give a run.")


def _as_asked(config: RunConfig, asked: TuneConfig, text: Mapping[str, Any]) -> TuneConfig:
    """Return how a tuning goes on: as it began, but for ``MEMORY``.

    Args:
        config: the tuning as it began.
        asked: what it is asked for now.
        text: fields of its text that are given now.

    Raises:
        MxdError: something else is asked for.
    """
    began = config.tune
    given = {name: getattr(asked, name) for name in sorted(asked.model_fields_set - {"of"})}
    pairs = {name: (getattr(began, name), value) for name, value in given.items() if name not in MEMORY}
    pairs |= {f"data.{name}": (getattr(config.data, name), value) for name, value in text.items()}
    changed = [f"{name} was {before}, not {value}" for name, (before, value) in pairs.items() if value != before]
    if changed:
        raise MxdError(
            f"a tuning goes on as it began: {'; '.join(changed)}. Only {' and '.join(MEMORY)} may change; for another "
            "recipe start anew under another name with --run NAME."
        )
    return began.model_copy(update=given)


def tune_config(
    paths: Sequence[str | Path],
    how: TuneConfig = UNCHANGED,
    run: str | None = None,
    out: str | None = None,
    source: str | None = None,
    text: Mapping[str, Any] | None = None,
) -> tuple[RunConfig, dict[str, Trained]]:
    """Return a tuning as the config of a run, and name -> the layers that it begins with; arguments as ``tune``.

    But ``text`` is the fields of ``data`` that differ from the layers'.

    Raises:
        MxdError: layers that do not belong together, a config that is not a tuning's, or a bad value.
    """
    known: RunConfig | None = None
    if len(paths) == 1 and str(paths[0]).endswith((".yaml", ".yml")):
        known = load_config(paths[0])
        if not known.tune.of:
            raise MxdError(f"{paths[0]} is no tuning's config; give the trained run: mxd tune {known.folder}")
        paths = known.tune.of
    named = named_layers(paths)
    source_of, revision, dtype = base_model(named)
    layers: dict[str, Trained] = {}
    for trained in named.values():
        if layer_name(trained.path) in layers:
            raise MxdError(f"two layers are called {layer_name(trained.path)}; tune them apart.")
        layers[layer_name(trained.path)] = trained
    if known is not None:
        return known, layers
    first = Path(paths[0])
    is_run = (first / "config.yaml").is_file()
    section = load_config(first / "config.yaml").tune if is_run else UNCHANGED
    given = {name: getattr(how, name) for name in how.model_fields_set} | {"of": tuple(map(str, paths))}
    how = section.model_copy(update=given)
    provenance = next(iter(layers.values())).provenance
    distinct = dict.fromkeys(trained.layer.config for trained in layers.values())
    fields = {
        "run": run or (f"{first.resolve().name}-tuned" if is_run else "tuned"),
        "out": out or (str(first.parent) if is_run else "checkpoints"),
        "seed": provenance.seed,
        "blocks": sorted({trained.provenance.block for trained in layers.values()}),
        "replacements": list(distinct),
        "model": {"source": source or source_of, "revision": None if source else revision, "dtype": dtype},
        "data": provenance.data | {"cache": None, "mix_shards": 0} | dict(text or {}),
        "tune": how,
    }
    try:
        return RunConfig.model_validate(fields | {"training": tuning_as_training(how)}), layers
    except ValidationError as error:
        raise refusal(error) from error


def _tune(
    config: RunConfig,
    how: TuneConfig,
    layers: dict[str, Trained],
    resume: bool,
    model: Any,
    processes: Processes,
    text: Any,
    overwrite: bool,
) -> None:
    keep_freed_memory()
    with processes.together():
        plan = plan_tuning(config.model_copy(update={"tune": how}), model, processes.world, layers)
        check_memory(config, plan, LOWER)
    base = load_base(config, model)
    for trained in layers.values():
        check_provenance(base, trained.provenance.block, trained.provenance)
    check_siblings(trained.provenance for trained in layers.values())
    if not resume:
        for path in config.tune.of:
            _check_whole(Path(path), layers, base)
    with processes.together():
        if not resume:
            check_held_out(config, base, text)
        own = own_documents(config, base, text)
        if overwrite:
            text_contexts(config, base, None, own)  # raises what would end the new run
            if processes.first:
                clear(config.folder)
    trainees = {name: tuned_trainee(name, trained, base, how, processes) for name, trained in layers.items()}
    sets = {name: [trainees[n] for n in members] for name, members in plan.sets.items()}
    stats = {name: trainee.stats for name, trainee in trainees.items()}
    names = {name: [trainee.name for trainee in members] for name, members in sets.items()}
    metrics = TuneMetrics(config, list(trainees), stats, processes, processes, None, sets=names, loss=how.loss)
    ordered = list(trainees.values())
    phase = at_once(config, base, plan.replacements, plan.layout, resume, "tuning")
    with processes.together():
        saver = TuneSaver(config, base, ordered, metrics, processes, processes, phase, layers=layers, sets=sets)
    state = load_state(phase.states, processes) if resume else None
    if state is not None:
        saver.restore(state, shard=False)
    step, cursor = (state.info.step, state.info.cursor) if state is not None else (0, Cursor())
    with processes.together():
        contexts = text_contexts(config, base, cursor, own)
        unembedding = Unembedding.of(base, torch.tensor([base.tokenizer("Any text will do.")["input_ids"]]))
    saver.begin(state)
    doing, needed = peak(plan.memory)
    said = f"{plural(len(ordered), 'layer')} in {plural(len(sets), 'set')}, {plan.params:,} parameters"
    recipe = f"{how.loss} + {how.nmse:g} NMSE, {how.tokens:,} tokens, {how.batch_tokens:,} a step, rate {how.lr:g}"
    memory = f"memory on {plan.device}: {amount(needed)} while {doing}"
    console.tell(f"{said}; {recipe}; {memory}")
    TuneLoop(
        phase,
        base,
        ordered,
        metrics,
        saver,
        processes,
        False,
        step,
        cursor,
        how,
        [TunedSet.of(name, members, base) for name, members in sets.items()],
        unembedding,
        special_ids(base.tokenizer),
    ).run(batches_of(contexts, cursor, how.batch_tokens // config.data.context))


def _check_whole(run: Path, layers: Mapping[str, Trained], base: FrozenModel) -> None:
    """Check that of a run's folder all layers are there that its config names.

    Args:
        run: a run's folder; of any other path nothing is known.
        layers: those that were found.
        base: the base model.

    Raises:
        MxdError: one is missing.
    """
    if not (run / "config.yaml").is_file():
        return
    config = load_config(run / "config.yaml")
    missing = [] if config.tune.of else sorted(plan_layers(config, base).keys() - layers.keys())
    if missing:
        raise MxdError(
            f"{run} lacks {', '.join(missing)}, which its config.yaml names. Finish it (mxd train "
            f"{typed(run / 'config.yaml')} --resume), or give the layers to be tuned one by one: mxd tune "
            f"{typed(run / next(iter(layers)))} ..."
        )


def tuned_trainee(name: str, trained: Trained, base: FrozenModel, how: TuneConfig, processes: Processes) -> Trainee:
    """Return a trained layer at the beginning of its tuning.

    Args:
        name: its name in the run.
        trained: the layer.
        base: the base model, on whose device it is tuned.
        how: the tuning.
        processes: those that tune it together.
    """
    layer, block = trained.layer.to(base.device).eval(), trained.provenance.block
    with torch.device("meta"):
        anew = layer.config.build()
    for own, fresh in zip(layer.parameters(), anew.parameters(), strict=True):
        own.requires_grad_(fresh.requires_grad)  # not a stored constant
    layer.sparsity.candidates = candidate_dtype(base.device)
    layer.sparsity.processes = processes
    stats = TunedStats(layer.num_units, layer.config.d_out or 0, base.device, how.loss)
    return Trainee(name, block, layer, Optimizer(learned(layer), "adam", {}, 1.0), stats, processes=processes)


@dataclass
class TuneSaver(Saver):
    """As a run's; each layer keeps its provenance, to which the tuning is added."""

    layers: Mapping[str, Trained] = field(default_factory=dict)
    """What the tuning began with."""
    sets: Mapping[str, Sequence[Trainee]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.members: dict[str, dict[str, str]] = {}
        began = {name: read_config(trained.path).get("tensors_sha256") for name, trained in self.layers.items()}
        self.origin = self.origin | {"layers that are tuned (hashes of their tensors)": began}

    def finish(self, step: int, cursor: Cursor) -> None:
        """Write every layer as it is now; arguments as for ``save``."""
        for members in self.sets.values():
            digests = {str(trainee.number): tensors_hash(trained_layer(trainee)) for trainee in members}
            self.members |= {trainee.name: digests for trainee in members}
        super().finish(step, cursor)

    def provenance(self, trainee: Trainee, step: int, cursor: Cursor) -> Provenance:
        """Return a layer's provenance; arguments as for ``save``."""
        tuning = self.config.tune.model_dump() | {
            "steps": step,
            "tokens": step * self.config.training.batch_tokens,
            "source": self.config.data.source,
            "text_hash": cursor.text,
            "members": self.members[trainee.name],
        }
        before = self.layers[trainee.name].provenance
        return before.model_copy(update={"tuning": (*before.tuning, tuning), "versions": versions()})


def tensors_hash(layer: ReplacementLayer) -> str:
    """Return the hash of a layer's tensors that its checkpoint's ``config.json`` holds."""
    return hashlib.sha256(save({k: v.detach().contiguous() for k, v in layer.state_dict().items()})).hexdigest()
