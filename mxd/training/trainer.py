"""Training: one stream of activations, many replacements. The only file that imports accelerate.

A run trains ``replacements x layers`` side by side from one forward of the base model. Its whole state is the
parameters, Adam's moments, the counters below and a place in the text, so a resumed run continues exactly: bit for bit
on a CPU; on a GPU up to the order in which atomic additions happen.
"""

import ctypes
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mxd.artifacts.checkpoint import save_layer
from mxd.artifacts.provenance import Provenance, versions
from mxd.artifacts.tensors import fit_tensors
from mxd.common.errors import MxdError, SharedError, typed
from mxd.common.files import atomic_file, clear_partials, is_partial, settle, writing
from mxd.common.lock import LOCK_FILE, locked
from mxd.common.parsing import differences
from mxd.common.processes import Processes, launched
from mxd.common.progress import console, progress
from mxd.common.stop import Interrupted, Stop, Stopped, stop_signal
from mxd.config import RunConfig, config_hash, dump_config, load_config, plain_config, recorded
from mxd.data.activations import Batch, Cursor
from mxd.layers import ReplacementLayer
from mxd.model.frozen import FrozenModel
from mxd.planning.memory import as_recorded, prepare
from mxd.training.source import BASE, activation_stream, bos_activations, load_base, masked_ids_of, origin
from mxd.training.state import RUN_FILE, Info, State, load_state, new_run, run_of, save_state
from mxd.training.step import Job, learning_rate, new_job, train_step

T = TypeVar("T")

STOP_EVERY = 8
"""Steps after which the processes of a launch ask one another whether one was told to stop."""


def train(
    config: RunConfig, resume: bool = False, model: Any = None, groups: int | None = None, shard: bool = False
) -> Path:
    """Train every replacement of a run and write them under ``config.folder``.

    Every process of a launch calls this with the same arguments.

    Args:
        config: the run.
        resume: continue an interrupted run; it ends exactly as if it had not been interrupted, and does not begin where
            config, text, base model, cache or state are others. The number of processes may be another than before.
        model: a loaded base model, used in place of ``config.model.source``.
        groups: groups of processes, each of which trains replacements of its own (``divide``).
        shard: divide weights, gradients and moments among the processes of a group, for layers too large for one.

    Returns:
        The run's folder: ``config.yaml``, ``metrics.jsonl``, ``state/`` and one folder for each replacement.

    Raises:
        MxdError: a bad input, found before training where it can be; or ``Interrupted`` after Ctrl-C or SIGTERM,
            when everything was saved.
    """
    if resume:
        config = as_recorded(config)
    with launched(config.timeout) as processes, ExitStack() as held:
        processes.agree(recorded(config) | {"--resume": resume, "--groups": groups, "--shard": shard})
        console.quiet = not processes.first
        held.callback(setattr, console, "quiet", False)
        with processes.together():
            if processes.first:
                held.enter_context(locked(config.folder))
                _claim(config, resume)
        return _train(config, resume, model, processes, groups, shard)


def _train(config: RunConfig, resume: bool, model: Any, processes: Processes, groups: int | None, shard: bool) -> Path:
    from accelerate import Accelerator

    try:
        accelerator = Accelerator(log_with=list(config.training.trackers) or None, project_dir=config.folder)
    except (ValueError, ImportError) as error:
        raise MxdError(f"cannot use trackers {list(config.training.trackers)}: {error}") from error
    keep_freed_memory()
    if config.training.deterministic:  # cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    config, plan = prepare(config, model, processes, groups, shard)
    plans, division = plan.replacements, plan.division
    base = load_base(config, model)
    own, group = processes.split(len(division.groups))
    jobs = [
        new_job(name, number, layer, config.seed, base.device, config.training.proposals, group)
        for name, (number, layer) in plans.items()
        if name in division.groups[own]
    ]
    with processes.together():
        run = _Run(config, base, plans, jobs, accelerator, processes, group, shard)
    state = load_state(config.folder / "state", processes) if resume else None
    if state is not None:
        run.restore(state)
    with processes.together():
        stream = activation_stream(config, base, run.cursor, processes, division.shares)
    run.begin(state, resume)
    with _products(config.training.tf32), _repeatable(config.training.deterministic):
        run.loop(stream)
    return config.folder


class _Run:
    """A run under way: what ``train`` sets up and ``loop`` drives."""

    def __init__(
        self,
        config: RunConfig,
        base: FrozenModel,
        names: Iterable[str],
        jobs: Sequence[Job],
        accelerator: Any,
        processes: Processes,
        group: Processes,
        shard: bool,
    ) -> None:
        self.config, self.base, self.names, self.jobs, self.accelerator = config, base, list(names), jobs, accelerator
        self.processes, self.group = processes, group
        self.shard = shard and group.many
        self.origin, self.run_id = origin(config, base), ""
        self.step = self.saved = 0
        self.cursor = Cursor()
        self.metrics = config.folder / "metrics.jsonl"
        self.reported: dict[str, dict[str, float]] = {}
        self.clock, self.clock_step = time.monotonic(), 0

    @property
    def seen(self) -> int:
        """Tokens trained on."""
        return self.step * self.config.training.batch_tokens

    def begin(self, state: State | None, resume: bool) -> None:
        """Write which run this folder is of; where it goes on, forget the metrics that will come again."""
        with self.processes.together():
            if self.processes.first:
                folder = self.config.folder
                self.run_id = (run_of(folder) if resume else None) or new_run(folder)
                if not resume:
                    with atomic_file(folder / "config.yaml") as file:
                        file.write_text(dump_config(self.config), encoding="utf-8")
                elif state is not None:
                    self.cut_metrics(state.info.metrics_bytes)
                else:  # killed before its first saved state
                    with writing(self.metrics):
                        self.metrics.unlink(missing_ok=True)
        self.run_id = self.processes.gather(self.run_id)[0]

    def loop(self, stream: Iterator[Batch]) -> None:
        training = self.config.training
        trackers = bool(training.trackers)
        if trackers:
            self.accelerator.init_trackers("mxd", config=_flat(self.config.model_dump(mode="json")))
        title = f"training {len(self.names)} replacement{'s' if len(self.names) > 1 else ''}"
        self.clock, self.clock_step = time.monotonic(), self.step
        with stop_signal() as stop, progress(title, training.steps * training.batch_tokens, done=self.seen) as advance:
            while self.step < training.steps:
                batch = self.next_batch(stream, stop)
                self.train_batch(batch)
                if self.step % training.log_every == 0 or self.step == training.steps:
                    self.check_losses()
                    self.report()
                stopping = self.stopping(stop)
                if self.step % training.save_every == 0 or self.step == training.steps or stopping:
                    self.save()
                advance(training.batch_tokens, self.note())
                if stopping and self.step < training.steps:
                    raise self.stopped(stop)
        if trackers:
            self.accelerator.end_training()
        self.finish()

    def stopping(self, stop: Stop) -> bool:
        """Whether to stop after this step; all processes come to the same answer."""
        if not self.processes.many:
            return stop.is_set
        return self.step % STOP_EVERY == 0 and self.processes.any(stop.is_set)

    def train_batch(self, batch: Batch) -> None:
        training = self.config.training
        seen = (self.step + 1) * training.batch_tokens
        if self.step == 0:
            with self.processes.together():
                at_bos = bos_activations(self.config, self.base)
        for job in self.jobs:
            x, y = batch.sites[job.number]
            if self.step == 0:
                mean_in, mean_out = batch.means[job.number]
                job.layer.start(job.layer.read(mean_in, mean_out), mean_out, training.settings.start)
                if job.number in at_bos:
                    job.layer.store_bos(job.layer.read(*at_bos[job.number]), at_bos[job.number][1])
                if self.shard:
                    job.shard()
            lr = learning_rate(self.step, training)
            with _memory(f"at step {self.step:,}, in {job.name}"):
                train_step(job, job.layer.read(x, y), y, lr, seen, training.parts, training.clip_norm)
        self.step += 1
        self.cursor = batch.cursor

    def next_batch(self, stream: Iterator[Batch], stop: Stop) -> Batch:
        try:
            at_once = nullcontext() if self.processes.many else stop.at_once()  # nobody leaves the others waiting
            with at_once, _memory(f"after step {self.step:,}, where the base model fills the buffer"):
                return next(stream)
        except Stopped:
            self.save()
            raise self.stopped(stop) from None
        except StopIteration:
            self.save()
            self.finish()
            raise MxdError(
                f"the text ended after {self.seen:,} tokens, before the {self.config.training.tokens:,} asked for "
                f"(streamed text is read once). The layers as they are stand in {self.config.folder}."
            ) from None
        except MxdError as error:
            if not self.processes.many or isinstance(error, SharedError):  # else this process is alone with it
                self.save()
            raise

    def stopped(self, stop: Stop) -> Interrupted:
        return stop.error(
            f"stopped at step {self.step:,} of {self.config.training.steps:,}; everything is saved. "
            f"To continue: mxd train {typed(self.config.folder / 'config.yaml')} --resume"
        )

    def check_losses(self) -> None:
        with self.processes.together():
            for job in self.jobs:
                if not math.isfinite(float(job.stats.sums["loss"])):
                    raise self.diverged(job.name, "its loss")

    def check_finite(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Refuse to write tensors that hold a NaN or an infinity."""
        for key, tensor in tensors.items():
            extremes = torch.stack(torch.aminmax(tensor)) if tensor.is_floating_point() and tensor.numel() else None
            if extremes is not None and not extremes.isfinite().all():  # 30 times as fast as to look at each number
                raise self.diverged(name, key)

    def diverged(self, name: str, what: str) -> MxdError:
        good = f"the last good state, state/step-{self.saved:09d}, stays" if self.saved else "there is no earlier state"
        return MxdError(
            f"{name} diverged before step {self.step:,}: {what} is not finite. Nothing of that is saved; {good}. In a "
            "new run lower training.lr, set training.clip_norm or leave this one out."
        )

    def of_all(self, own: dict[str, T]) -> dict[str, T]:
        """Return name -> value for all replacements; each group's first process gives those of its own."""
        found = {k: v for part in self.processes.gather(own if self.group.first else {}) for k, v in part.items()}
        return {name: found[name] for name in self.names if name in found}

    def report(self) -> None:
        training = self.config.training
        seen = self.seen
        now = time.monotonic()
        rate = (self.step - self.clock_step) * training.batch_tokens / max(now - self.clock, 1e-9)
        for job in self.jobs:
            job.stats.merge(self.group)
        dead_after = min(training.dead_after, training.tokens // 4)
        self.reported = self.of_all({job.name: job.stats.report(seen, dead_after) for job in self.jobs})
        with self.processes.together():
            if self.processes.first:
                self.write_metrics(now - self.clock, rate)
        for name, values in self.reported.items():
            if training.trackers:
                self.accelerator.log({f"{name}/{k}": v for k, v in values.items()}, step=self.step)
        self.clock, self.clock_step = now, self.step

    def write_metrics(self, seconds: float, rate: float) -> None:
        with writing(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            for name, values in self.reported.items():
                line = {"step": self.step, "tokens": self.seen, "replacement": name, **values}
                line |= {"lr": learning_rate(self.step - 1, self.config.training), "seconds": round(seconds, 3)}
                line["tokens_per_second"] = round(rate, 1)
                file.write(json.dumps(line) + "\n")

    def note(self) -> str:
        shown = list(self.reported.items())[:3]
        return "  ".join(
            f"{name}: NMSE {v['normalized_mse']:.4f} FVU {v['fvu']:.2f} L0 {v['l0']:.0f} dead {v['dead_share']:.0%}"
            for name, v in shown
        ) + (f"  (+{len(self.reported) - 3} more)" if len(self.reported) > 3 else "")

    def save(self) -> None:
        if self.step in (0, self.saved):
            return
        self.check_losses()
        if self.processes.first and self.metrics.exists():
            settle(self.metrics)
        for job in self.jobs:
            job.stats.merge(self.group)
        info = Info(
            run_id=self.run_id,
            step=self.step,
            tokens=self.seen,
            origin=self.origin,
            cursor=self.cursor,
            counted=self.of_all({job.name: job.stats.tokens for job in self.jobs}),
            metrics_bytes=self.metrics.stat().st_size if self.metrics.exists() else 0,
            reported=self.reported,
        )
        parts = {job.name: job.tensors() for job in self.jobs}
        with self.processes.together():
            for name, tensors in parts.items():
                self.check_finite(name, tensors)
        keep = self.config.training.keep_states
        save_state(self.config.folder / "state", parts if self.group.first else {}, info, self.processes, keep)
        self.saved = self.step

    def restore(self, state: State) -> None:
        info = state.info
        with self.processes.together():
            self.check_own(state)
        for job in self.jobs:
            if self.shard:
                job.shard()
            tensors = state.tensors(job.name)
            expected = {k: tensors.get(k, v) if k.startswith("adam/") else v for k, v in job.tensors().items()}
            fit_tensors(expected, tensors, f"{state.folder}/{job.name}")
            job.restore(tensors)
            job.stats.tokens = info.counted[job.name]
            if not self.group.first:
                job.stats.clear()
        self.step, self.cursor, self.reported = info.step, info.cursor, info.reported
        self.saved = self.step

    def check_own(self, state: State) -> None:
        """Refuse a state of another run, and one of this run from before something was changed."""
        folder, own = self.config.folder, run_of(self.config.folder)
        if own != state.info.run_id:
            raise MxdError(
                f"{state.folder} is a state of another run: it is of {state.info.run_id}, and {folder / RUN_FILE} "
                + (f"names {own}. " if own else "is missing. ")
                + "Put back this run's own, or start anew under another name with --run NAME."
            )
        changed = differences(state.info.origin, self.origin)
        step, training = state.info.step, self.config.training
        if state.info.tokens != step * training.batch_tokens or step > training.steps:
            changed.append(f"step {step:,} of {training.steps:,} cannot be after {state.info.tokens:,} tokens")
        if changed:
            raise MxdError(
                f"{folder} cannot go on as it began: {'; '.join(changed)}. Put that back, or start anew under another "
                "name with --run NAME."
            )

    def cut_metrics(self, size: int) -> None:
        """Forget lines written after the state was saved: they will be written again."""
        with writing(self.metrics), self.metrics.open("ab") as file:
            if file.tell() < size:
                message = f"{self.metrics} is shorter than it was at step {self.step:,}: lines are missing in it"
                console.print(message, soft_wrap=True, markup=False)
            file.truncate(min(file.tell(), size))

    def finish(self) -> None:
        """Write every layer as it is."""
        with self.processes.together():
            for job in self.jobs:
                layer = job.trained()
                self.check_finite(job.name, layer.state_dict())
                if self.group.first:
                    self.write_layer(job, layer)

    def write_layer(self, job: Job, layer: ReplacementLayer) -> None:
        config, training = self.config, self.config.training
        provenance = Provenance(
            model=self.base.source,
            revision=self.base.revision,
            layer=job.number,
            fingerprint=self.base.fingerprint(job.number),
            base_fingerprint=self.origin[BASE],
            model_dtype=self.base.dtype,
            masked_ids=tuple(masked_ids_of(config, self.base)),
            data=config.data.model_dump(),
            text_hash=self.cursor.text,
            training=training.model_dump() | {"steps": training.steps, "settings": training.settings.model_dump()},
            tokens=self.seen,
            seed=config.seed,
            config_hash=config_hash(config),
            versions=versions(),
        )
        save_layer(config.folder / job.name, layer, provenance, {"training": self.reported.get(job.name, {})})


@contextmanager
def _products(tf32: bool) -> Iterator[None]:
    """Let CUDA use TF32 for float32 products, for the length of the block."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32" if tf32 else before
    try:
        yield
    finally:
        settings.fp32_precision = before


@contextmanager
def _repeatable(on: bool) -> Iterator[None]:
    """Let PyTorch run deterministic operations only, for the length of the block; it raises where it has none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if on:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def keep_freed_memory() -> None:
    """Let glibc keep the memory that is freed, for this whole process; nothing happens where there is no glibc.

    Every step allocates and frees the same gradients and activations. By default each such block is mapped anew, and
    the kernel fills it with zeros page by page: 7% of a step's time on 2 cores (docs/benchmarks).
    """
    if sys.platform == "linux":
        try:
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-4, 0)  # M_MMAP_MAX: no block is mapped on its own
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap's end is not handed back
        except (OSError, AttributeError):
            pass


def _claim(config: RunConfig, resume: bool) -> None:
    """Refuse to mix two runs in one folder."""
    folder = config.folder
    existing = folder / "config.yaml"
    held = {child.name for child in folder.iterdir() if not is_partial(child)} - {"config.yaml", RUN_FILE, LOCK_FILE}
    if held and not resume:
        raise MxdError(
            f"{folder} already holds a run. Continue it with --resume, or choose another name with --run NAME."
        )
    if resume and not existing.exists():
        raise MxdError(f"nothing to resume in {folder}: there is no config.yaml. Start without --resume.")
    changed = differences(plain_config(load_config(existing)), plain_config(config)) if resume else []
    if changed:
        raise MxdError(
            f"{existing} differs from this config, so the run cannot continue as it was: {'; '.join(changed)}. "
            f"Resume with: mxd train {typed(existing)} --resume"
        )
    clear_partials(folder)


@contextmanager
def _memory(where: str) -> Iterator[None]:
    """Say what to lower where memory runs out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("allocate memory|out of memory|ALLOC_FAILED", str(error)):
            raise
        raise MxdError(
            f"out of memory {where}. The last saved state is kept: free memory and continue with --resume. Or start "
            "anew, with a larger training.accumulation (the batch in more parts), a smaller training.buffer_tokens or "
            f"sizing.expansion, or fewer replacements.\n{(str(error) or type(error).__name__).splitlines()[0]}"
        ) from error


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings for trackers, which take scalars only."""
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{prefix}{key}.").items()}
    return {prefix.rstrip("."): value if isinstance(value, int | float | str | bool) else str(value)}
