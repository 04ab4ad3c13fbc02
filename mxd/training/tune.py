"""Sets up a tuning: trained layers, by the sets that are spliced in together, and the text that they are tuned on."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import save

from mxd.artifacts.checkpoint import Trained, load_layer
from mxd.artifacts.folders import find_layers, layer_name, read_config
from mxd.artifacts.provenance import Provenance, versions
from mxd.common.errors import MxdError
from mxd.common.lock import locked
from mxd.common.processes import Processes, launched
from mxd.common.progress import console
from mxd.config import RunConfig, load_config, recorded, tuning_as_training
from mxd.data.activations import Cursor
from mxd.data.contexts import special_ids
from mxd.layers import ReplacementLayer
from mxd.model.frozen import FrozenModel
from mxd.model.unembedding import Unembedding
from mxd.ops import candidate_dtype
from mxd.planning.layout import ParallelLayout
from mxd.splice import check_provenance
from mxd.training.optimizers import Optimizer
from mxd.training.phases import at_once
from mxd.training.saving import Saver, trained_layer
from mxd.training.source import load_base, text_contexts
from mxd.training.state import load_state
from mxd.training.step import Trainee, learned
from mxd.training.trainer import claim, keep_freed_memory
from mxd.training.tuning import TunedSet, TunedStats, TuneLoop, TuneMetrics, batches_of
from mxd.tuning import UNCHANGED, TuneConfig


def tune(
    paths: Sequence[str | Path],
    how: TuneConfig = UNCHANGED,
    run: str | None = None,
    out: str | None = None,
    resume: bool = False,
    model: Any = None,
    source: str | None = None,
) -> Path:
    """Tune trained layers together, spliced into their base model, and write them as a run of their own.

    Layers that are alike but for their block (method, sparsity, K) are a set, which is spliced in together; several
    sets are tuned side by side. The layers that are read stay as they are.

    Args:
        paths: layers, runs or Hub references; or, to resume, the ``config.yaml`` of a tuning.
        how: the loss and the recipe; fields that are not given are what a run's ``config.yaml`` says under ``tune``.
        run: name of the run that is written; by default the read one's with ``-tuned``.
        out: folder that holds it; by default that of the run that is read.
        resume: continue an interrupted tuning, exactly as if it had not been interrupted.
        model: a loaded base model, used in place of the one that the layers name.
        source: another name, folder or Hub id of the base model.

    Returns:
        The run's folder, as ``train`` writes it.

    Raises:
        MxdError: layers that do not belong together, or as ``train``.
    """
    config, layers = tune_config(paths, how, run, out, source)
    with launched(config.timeout) as processes, ExitStack() as stack:
        processes.agree(recorded(config) | {"--resume": resume})
        console.quiet = not processes.first
        stack.callback(setattr, console, "quiet", False)
        with processes.together():
            if processes.first:
                stack.enter_context(locked(config.folder))
                claim(config, resume, "tune")
        _tune(config, layers, resume, model, processes)
    return config.folder


def tune_config(
    paths: Sequence[str | Path],
    how: TuneConfig = UNCHANGED,
    run: str | None = None,
    out: str | None = None,
    source: str | None = None,
) -> tuple[RunConfig, dict[str, Trained]]:
    """Return a tuning as the config of a run, and name -> the layers that it begins with; arguments as ``tune``.

    Raises:
        MxdError: layers that do not belong together, a config that is not a tuning's, or a bad value.
    """
    known: RunConfig | None = None
    if len(paths) == 1 and str(paths[0]).endswith((".yaml", ".yml")):
        known = load_config(paths[0])
        if not known.tune.of:
            raise MxdError(f"{paths[0]} is no tuning's config; give the trained run: mxd tune {known.folder}")
        paths = known.tune.of
    layers: dict[str, Trained] = {}
    for folder in chain.from_iterable(map(find_layers, paths)):
        if layer_name(folder) in layers:
            raise MxdError(f"two layers are called {layer_name(folder)}; tune them apart.")
        layers[layer_name(folder)] = load_layer(folder)
    _check_together(layers)
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
        "model": {
            "source": source or provenance.model,
            "revision": None if source else provenance.revision,
            "dtype": provenance.model_dtype,
        },
        "data": provenance.data | {"cache": None, "mix_shards": 0},
        "tune": how,
    }
    try:
        return RunConfig.model_validate(fields | {"training": tuning_as_training(how)}), layers
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise MxdError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error


def sets_of(layers: Mapping[str, Trained]) -> dict[str, dict[int, str]]:
    """Return set -> block -> name of a layer: what is alike but for its block is one set.

    Raises:
        MxdError: two layers of one kind replace the same MLP.
    """
    sets: dict[str, dict[int, str]] = {}
    for name, trained in layers.items():
        members = sets.setdefault(trained.layer.config.slug, {})
        block = trained.provenance.block
        if block in members:
            raise MxdError(f"{members[block]} and {name} are of one kind and replace the same MLP; tune them apart.")
        members[block] = name
    return sets


def _check_together(layers: Mapping[str, Trained]) -> None:
    """Refuse layers of several base models, and two of one kind at one block."""
    sets_of(layers)
    sources = {(t.provenance.model, t.provenance.revision, t.provenance.model_dtype) for t in layers.values()}
    if len(sources) > 1:
        raise MxdError(f"the layers replace MLPs of different base models ({sorted(map(str, sources))}).")


def _tune(config: RunConfig, layers: dict[str, Trained], resume: bool, model: Any, processes: Processes) -> None:
    keep_freed_memory()
    base, how = load_base(config, model), config.tune
    for trained in layers.values():
        check_provenance(base, trained.provenance.block, trained.provenance)
    size = _contexts_of_a_step(config, processes)
    trainees = {name: tuned_trainee(name, trained, base, how, processes) for name, trained in layers.items()}
    sets = {name: [trainees[n] for _, n in sorted(own.items())] for name, own in sets_of(layers).items()}
    stats = {name: trainee.stats for name, trainee in trainees.items()}
    names = {name: [trainee.name for trainee in members] for name, members in sets.items()}
    metrics = TuneMetrics(config, list(trainees), stats, processes, processes, None, sets=names, loss=how.loss)
    ordered = list(trainees.values())
    replacements = {t.name: (t.number, t.layer.config) for t in ordered}
    layout = ParallelLayout((tuple(trainees),), processes.world, ())
    phase = at_once(config, base, replacements, layout, resume, "tuning")
    with processes.together():
        saver = TuneSaver(config, base, ordered, metrics, processes, processes, phase, layers=layers, sets=sets)
    state = load_state(phase.states, processes) if resume else None
    if state is not None:
        saver.restore(state, shard=False)
    step, cursor = (state.info.step, state.info.cursor) if state is not None else (0, Cursor())
    with processes.together():
        contexts = text_contexts(config, base, cursor)
        unembedding = Unembedding.of(base, torch.tensor([base.tokenizer("Any text will do.")["input_ids"]]))
    saver.begin(state)
    number = sum(t.layer.config.num_params for t in ordered)
    console.print(f"{len(ordered)} layers in {len(sets)} sets, {number:,} parameters")
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
    ).run(batches_of(contexts, cursor, size))


def _contexts_of_a_step(config: RunConfig, processes: Processes) -> int:
    """Return how many contexts a step takes.

    Raises:
        MxdError: they cannot be divided into whole contexts, processes and parts.
    """
    how, context = config.tune, config.data.context
    parts = context * processes.world * how.accumulation
    if how.batch_tokens % parts:
        raise MxdError(
            f"batch_tokens = {how.batch_tokens} must be a multiple of {parts}: contexts of {context} tokens x "
            f"{processes.world} processes x accumulation {how.accumulation}."
        )
    return how.batch_tokens // context


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
            "text_hash": cursor.text,
            "members": self.members[trainee.name],
        }
        before = self.layers[trainee.name].provenance
        return before.model_copy(update={"tuning": (*before.tuning, tuning), "versions": versions()})


def tensors_hash(layer: ReplacementLayer) -> str:
    """Return the hash of a layer's tensors that its checkpoint's ``config.json`` holds."""
    return hashlib.sha256(save({k: v.detach().contiguous() for k, v in layer.state_dict().items()})).hexdigest()
