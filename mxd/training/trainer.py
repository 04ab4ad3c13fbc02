"""Sets up a run: one stream of activations, many replacements. The only file that imports accelerate.

A run trains ``replacements x blocks`` side by side from one forward of the base model (``loop``), or one block after
the other (``phases``). Its whole state is the parameters, Adam's moments, the counts and a position in the text
(``saving``), so a resumed run continues exactly: bit for bit on a CPU; on a GPU up to the order in which atomic
additions happen.
"""

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from mxd.common.errors import MxdError, typed
from mxd.common.files import clear_partials, is_partial, writing
from mxd.common.hardware import tf32_products
from mxd.common.lock import LOCK_FILE, locked
from mxd.common.parsing import differences
from mxd.common.processes import Processes, launched
from mxd.common.progress import quiet
from mxd.config import RunConfig, load_config, plain_config, recorded
from mxd.data.activations import Cursor
from mxd.model.frozen import FrozenModel
from mxd.planning.memory import prepare
from mxd.training.loop import Loop
from mxd.training.metrics import Metrics
from mxd.training.phases import Phase, phases
from mxd.training.saving import Saver
from mxd.training.source import activation_stream, check_held_out, load_base, own_documents, text_contexts
from mxd.training.state import RUN_FILE, load_state, run_of
from mxd.training.step import new_trainee


def train(
    config: RunConfig,
    resume: bool = False,
    model: Any = None,
    groups: int | None = None,
    shard: bool = False,
    text: Any = None,
    overwrite: bool = False,
) -> Path:
    """Train every replacement of a run and write them under ``config.folder``.

    Every process of a launch calls this with the same arguments.

    Args:
        config: the run.
        resume: continue an interrupted run, which ends exactly as if it had not been interrupted; refused where config,
            text, base model or cache have changed. The number of processes may change.
        model: a loaded base model, used in place of ``config.model.source``.
        groups: groups of processes, each of which trains replacements of its own (``parallel_layout``).
        shard: divide weights, gradients and moments among the processes of a group, for layers too large for one.
        text: what Python code holds to be read in place of ``config.data.source`` (``in_memory``).
        overwrite: delete what an earlier run left in the folder, once it is known that this one can begin.

    Returns:
        The run's folder: ``config.yaml``, ``metrics.jsonl``, ``state/`` and one folder for each replacement.

    Raises:
        MxdError: a bad input, found before training where possible; or ``Interrupted`` after Ctrl-C or SIGTERM, once
            everything is saved.
    """
    if resume:
        config = as_recorded(config)
    with launched(config.timeout) as processes, ExitStack() as stack:
        options = {"--resume": resume, "--groups": groups, "--shard": shard, "overwrite": overwrite}
        processes.agree(recorded(config) | options)
        stack.enter_context(quiet(not processes.first))
        with processes.together():
            if processes.first:
                stack.enter_context(locked(config.folder))
                claim(config, resume, "train", overwrite)
        return _train(config, resume, model, processes, groups, shard, text, overwrite)


def _train(
    config: RunConfig,
    resume: bool,
    model: Any,
    processes: Processes,
    groups: int | None,
    shard: bool,
    text: Any,
    overwrite: bool,
) -> Path:
    from accelerate import Accelerator
    from accelerate.tracking import get_available_trackers

    trackers = list(config.training.trackers)
    there = {tracker.value for tracker in get_available_trackers()}
    if missing := [name for name in trackers if name not in there]:  # accelerate would only warn
        raise MxdError(f"training.trackers: {', '.join(missing)} is not installed; pip install {typed(*missing)}")
    try:
        accelerator = Accelerator(log_with=trackers or None, project_dir=config.folder)
    except (ValueError, ImportError) as error:
        raise MxdError(f"cannot use trackers {trackers}: {error}") from error
    keep_freed_memory()
    if config.training.deterministic:  # cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    config, plan = prepare(config, model, processes, groups, shard)
    base = load_base(config, model)
    with processes.together():
        if not resume:
            check_held_out(config, base, text)
        own = own_documents(config, base, text)
        if overwrite:
            if config.data.cache is None:
                text_contexts(config, base, None, own)  # raises what would end the new run
            if processes.first:
                clear(config.folder)
    with tf32_products(config.training.tf32 == "all"), _repeatable(config.training.deterministic):
        for phase in phases(config, base, plan, processes, resume, own):
            _train_phase(phase, config, base, accelerator, processes, resume, shard)
    return config.folder


def _train_phase(
    phase: Phase,
    config: RunConfig,
    base: FrozenModel,
    accelerator: Any,
    processes: Processes,
    resume: bool,
    shard: bool,
) -> None:
    layout = phase.layout
    number, group = processes.split(len(layout.groups))
    shard = shard and group.many
    trainees = [
        new_trainee(name, block, layer, config.seed, base.device, config.training, group)
        for name, (block, layer) in phase.replacements.items()
        if name in layout.groups[number]
    ]
    stats = {trainee.name: trainee.stats for trainee in trainees}
    metrics = Metrics(config, list(phase.replacements), stats, processes, group, accelerator)
    with processes.together():
        saver = Saver(config, base, trainees, metrics, processes, group, phase)
    state = load_state(phase.states, processes) if resume else None
    if state is not None:
        saver.restore(state, shard)
    step, cursor = (state.info.step, state.info.cursor) if state is not None else (0, Cursor())
    with processes.together():
        stream = activation_stream(phase.config, base, cursor, processes, layout.shares, phase.record, phase.text)
    saver.begin(state)
    Loop(phase, base, trainees, metrics, saver, processes, shard, step, cursor).run(stream)


@contextmanager
def _repeatable(on: bool) -> Iterator[None]:
    """Let PyTorch run deterministic operations only, in the ``with`` block; it raises where it has none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if on:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, for the whole process; without glibc nothing happens.

    Every step allocates and frees the same gradients and activations. By default each allocation is mapped anew, and
    the kernel fills it with zeros page by page: 7% of a step's time on 2 cores (docs/benchmarks).
    """
    if sys.platform == "linux":
        try:
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-4, 0)  # M_MMAP_MAX: no allocation has a mapping of its own
            libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap's end is never handed back
        except (OSError, AttributeError):
            pass


def as_recorded(config: RunConfig) -> RunConfig:
    """Return a run's config with ``accumulation`` as the run began with it, where the config says ``auto``."""
    file = config.folder / "config.yaml"
    if config.training.accumulation != "auto" or not file.is_file():
        return config
    number = load_config(file).training.accumulation
    return config.model_copy(update={"training": config.training.model_copy(update={"accumulation": number})})


def _told_apart(config: RunConfig, existing: Path) -> str:
    """Say where the run that a folder holds differs from this one."""
    try:
        before, config = plain_config(load_config(existing)), as_recorded(config)
    except MxdError:
        return ""
    changed = differences(before, plain_config(config))
    return f", with other settings ({'; '.join(changed)})" if changed else ", with these very settings"


def claim(config: RunConfig, resume: bool, command: str, overwrite: bool = False) -> None:
    """Refuse to mix two runs in one folder.

    Args:
        config: the run.
        resume: whether it continues one that is there.
        command: of mxd, with which it would be resumed.
        overwrite: whether it takes the place of one that is there.

    Raises:
        MxdError: the folder holds another run, none to resume, or something that is not a run's to overwrite.
    """
    folder = config.folder
    existing = folder / "config.yaml"
    others = {child.name for child in folder.iterdir() if not is_partial(child)} - {"config.yaml", RUN_FILE, LOCK_FILE}
    if overwrite and resume:
        raise MxdError("resume continues a run and overwrite deletes it; give one of them.")
    if others and overwrite:
        check_run(folder)
    elif others and not resume:
        raise MxdError(
            f"{folder} already holds a run{_told_apart(config, existing)}. Continue it with --resume, or choose "
            "another name with --run NAME. (In Python: resume=True, overwrite=True, or another run in the config.)"
        )
    if resume and not existing.exists():
        raise MxdError(
            f"nothing to resume in {folder}: there is no config.yaml. Start without --resume, "
            f"or name the run that is to go on: mxd {command} FOLDER/config.yaml --resume."
        )
    changed = differences(plain_config(load_config(existing)), plain_config(config)) if resume else []
    if changed:
        raise MxdError(
            f"{existing} differs from this config, so the run cannot continue as it was: {'; '.join(changed)}. "
            "Begin another with --run NAME, or give its own config. "
            f"Resume with: mxd {command} {typed(existing)} --resume"
        )
    clear_partials(folder)


def check_run(folder: Path) -> None:
    """Refuse to delete a folder that is not a run's and nothing else.

    Raises:
        MxdError: it lacks what every run begins with, or other runs lie inside.
    """
    inside = [child.name for child in folder.iterdir() if (child / RUN_FILE).exists()]
    if folder.is_symlink() or inside or not (folder / "config.yaml").is_file() or run_of(folder) is None:
        why = f"holds other runs ({', '.join(inside)})" if inside else f"is not a run ({RUN_FILE} and config.yaml)"
        raise MxdError(f"{folder} {why}, so it is not overwritten. Move it away, or choose another run or out.")


def clear(folder: Path) -> None:
    """Delete what a run left, what tells that it is one last; the lock stays.

    Raises:
        MxdError: something cannot be deleted.
    """
    last = ("config.yaml", RUN_FILE)
    with writing(folder):
        for child in sorted(folder.iterdir(), key=lambda child: child.name in last):
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            elif child.name != LOCK_FILE:
                child.unlink()
