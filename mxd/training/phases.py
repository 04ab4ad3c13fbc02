"""What a run trains at a time: all of it, or with ``training.inputs: spliced`` one block after the other.

Then each block learns from activations of the model with the layers of the blocks below spliced in. These are read from
their folders, as a resumed run reads them, so that both continue with the same bits. A finished layer is one that its
folder says was trained to the end, by this run, above the layers that are there now; its states are then removed.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mxd.artifacts.checkpoint import Trained, load_layer
from mxd.artifacts.folders import read_config
from mxd.common.errors import MxdError
from mxd.common.parsing import differences
from mxd.common.processes import Processes
from mxd.config import RunConfig, config_hash
from mxd.model.frozen import FrozenModel, Record
from mxd.planning.layout import ParallelLayout, Replacements, parallel_layout
from mxd.planning.plan import Plan
from mxd.splice import Splice, recorder
from mxd.training.source import recording


@dataclass(frozen=True)
class Phase:
    """Replacements that are trained side by side, from one stream of activations."""

    config: RunConfig
    """The run, with the blocks of this phase alone."""
    replacements: Replacements
    layout: ParallelLayout
    record: Record
    """Runs the base model, with whatever is spliced into it."""
    states: Path
    """The folder of its states."""
    title: str
    below: Mapping[int, str]
    """Block number -> SHA-256 of the tensors of the layer that is spliced in there."""
    begun: bool
    """Whether the run's folder has been written to before."""
    more: bool = False
    """Whether other phases follow."""
    text: Iterable[str] | None = None
    """Documents to read in place of the config's source."""


def phases(
    config: RunConfig,
    base: FrozenModel,
    plan: Plan,
    processes: Processes,
    resume: bool,
    text: Iterable[str] | None = None,
) -> Iterator[Phase]:
    """Yield what is to be trained; each phase must be finished before the next is asked for.

    Args:
        config: the run.
        base: its base model.
        plan: the run's.
        processes: those of the launch.
        resume: whether the run is resumed.
        text: as for ``Phase``.

    Raises:
        MxdError: a layer that is there is damaged, or not the one that this run trained.
    """
    if config.training.inputs == "base":
        yield replace(at_once(config, base, plan.replacements, plan.layout, resume), text=text)
        return
    states, number = config.folder / "state", len(plan.replacements)
    below: dict[int, Trained] = {}
    digests: dict[int, str] = {}
    base_hash = base.base_fingerprint()
    for place, (name, item) in enumerate(sorted(plan.replacements.items(), key=lambda entry: entry[1][0]), 1):
        block, folder = item[0], config.folder / name
        with processes.together():
            layer = finished_layer(folder, config, base_hash, digests)
        if layer is None:
            alone = {name: item}
            yield Phase(
                config=config.model_copy(update={"blocks": (block,)}),
                replacements=alone,
                layout=parallel_layout(alone, processes.world, config.training.batch_tokens),
                record=recorder(Splice(base, below), config.training.targets == "base"),
                states=states / f"block{block}",
                title=f"training block {block}, {place} of {number}",
                below=dict(digests),
                begun=resume or place > 1,
                more=place < number,
                text=text,
            )
            with processes.together():
                layer = load_layer(folder)
        if processes.first:
            shutil.rmtree(states / f"block{block}", ignore_errors=True)
        below[block], digests[block] = layer, read_config(folder)["tensors_sha256"]


def at_once(
    config: RunConfig,
    base: FrozenModel,
    replacements: Replacements,
    layout: ParallelLayout,
    begun: bool,
    doing: str = "training",
) -> Phase:
    """Return a run whose replacements are all trained at once.

    Args:
        config: the run.
        base: its base model.
        replacements: what it trains.
        layout: which process trains what.
        begun: as for ``Phase``.
        doing: what is shown beside the progress bar.
    """
    number = len(replacements)
    title = f"{doing} {number} replacement{'s' if number > 1 else ''}"
    return Phase(config, replacements, layout, recording(config, base), config.folder / "state", title, {}, begun)


def finished_layer(folder: Path, config: RunConfig, base_hash: str, below: Mapping[int, str]) -> Trained | None:
    """Return the layer in a folder, or ``None`` where there is none or one that was not trained to the end.

    Args:
        folder: the layer's.
        config: the run.
        base_hash: the base model's fingerprint.
        below: as for ``Phase``.

    Raises:
        MxdError: it is damaged, or of another run, base model, or other layers below.
    """
    if not (folder / "config.json").is_file():
        return None
    layer = load_layer(folder)
    found, training = layer.provenance, config.training
    if found.tokens < training.steps * training.batch_tokens:
        return None
    before = {"config": found.config_hash, "base model": found.base_fingerprint, "layers below": found.below}
    changed = differences(before, {"config": config_hash(config), "base model": base_hash, "layers below": dict(below)})
    if changed:
        raise MxdError(
            f"{folder} does not belong to this run as it is now: {'; '.join(changed)} (hashes). Put back what was "
            "there, or start anew under another name with --run NAME."
        )
    return layer
