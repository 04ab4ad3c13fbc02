"""Training: one stream of activations, many replacements. The only file that imports accelerate.

A run trains ``replacements x layers`` side by side from one forward of the base model. Its whole state is the
parameters, Adam's moments, the counters below and a place in the text, so a resumed run continues exactly: bit for bit
on a CPU; on a GPU up to the order in which atomic additions happen.
"""

import ctypes
import json
import math
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxd.activations import Batch, Cursor
from mxd.checkpoint import Provenance, fit_tensors, save_layer, versions
from mxd.config import RunConfig, dump_config
from mxd.errors import MxdError
from mxd.jobs import Job, learning_rate, new_job, train_step
from mxd.model import FrozenModel
from mxd.plan import check_memory, plan_layers
from mxd.progress import console, progress
from mxd.state import load_state, save_state
from mxd.stream import activation_stream, fingerprints, load_base, masked_ids_of


class Interrupted(MxdError):
    """Training was stopped by the user; everything was saved."""


def train(config: RunConfig, resume: bool = False, model: Any = None) -> Path:
    """Train every replacement of a run and write them under ``config.folder``.

    Args:
        config: the run.
        resume: continue an interrupted run; it ends exactly as if it had not been interrupted.
        model: a loaded base model, used in place of ``config.model.source``.

    Returns:
        The run's folder: ``config.yaml``, ``metrics.jsonl``, ``state/`` and one folder for each replacement.

    Raises:
        MxdError: a bad input, found before training where it can be; or ``Interrupted`` after Ctrl-C or SIGTERM,
            when everything was saved.
    """
    from accelerate import Accelerator

    _claim(config, resume)
    try:
        accelerator = Accelerator(log_with=list(config.training.trackers) or None, project_dir=config.folder)
    except (ValueError, ImportError) as error:
        raise MxdError(f"cannot use trackers {list(config.training.trackers)}: {error}") from error
    if accelerator.num_processes > 1:
        raise MxdError(f"started as {accelerator.num_processes} processes; mxd trains in one process so far.")
    keep_freed_memory()
    base = load_base(config, model)
    plans = plan_layers(config, base)
    check_memory(config, base, plans)
    jobs = [
        new_job(name, number, layer, config.seed, base.device, config.training.proposals)
        for name, (number, layer) in plans.items()
    ]
    run = _Run(config, base, jobs, accelerator)
    state = load_state(config.folder / "state") if resume else None
    if state is not None:
        run.restore(*state)
    elif resume:  # killed before its first saved state: what it reported will be reported again
        run.metrics.unlink(missing_ok=True)
    stream = activation_stream(config, base, run.cursor)
    try:
        config.folder.mkdir(parents=True, exist_ok=True)
        (config.folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    except OSError as error:
        raise MxdError(
            f"cannot write to {config.folder}: {error.strerror}; choose another folder with --out."
        ) from error
    with _products(config.training.tf32):
        run.loop(stream)
    return config.folder


class _Run:
    """A run under way: what ``train`` sets up and ``loop`` drives."""

    def __init__(self, config: RunConfig, base: FrozenModel, jobs: Sequence[Job], accelerator: Any) -> None:
        self.config, self.base, self.jobs, self.accelerator = config, base, list(jobs), accelerator
        self.step = 0
        self.cursor = Cursor()
        self.metrics = config.folder / "metrics.jsonl"
        self.reported: dict[str, dict[str, float]] = {}
        self.clock = time.monotonic()

    @property
    def seen(self) -> int:
        """Tokens trained on."""
        return self.step * self.config.training.batch_tokens

    def loop(self, stream: Iterator[Batch]) -> None:
        training = self.config.training
        trackers = bool(training.trackers)
        if trackers:
            self.accelerator.init_trackers("mxd", config=_flat(self.config.model_dump(mode="json")))
        title = f"training {len(self.jobs)} replacement{'s' if len(self.jobs) > 1 else ''}"
        with _stop_signal() as stop, progress(title, training.steps * training.batch_tokens, done=self.seen) as advance:
            while self.step < training.steps:
                batch = self.next_batch(stream)
                self.train_batch(batch)
                due = self.step % training.log_every == 0 or self.step == training.steps
                if due or self.step % training.save_every == 0 or stop.is_set:
                    self.check_losses()
                if due:
                    self.report()
                if self.step % training.save_every == 0 or self.step == training.steps or stop.is_set:
                    self.save()
                advance(training.batch_tokens, self.note())
                if stop.is_set and self.step < training.steps:
                    raise Interrupted(
                        f"stopped at step {self.step:,} of {training.steps:,}; everything is saved. "
                        f"To continue: mxd train {self.config.folder / 'config.yaml'} --resume"
                    )
        if trackers:
            self.accelerator.end_training()
        for job in self.jobs:
            self.finish(job)

    def train_batch(self, batch: Batch) -> None:
        training = self.config.training
        seen = (self.step + 1) * training.batch_tokens
        for job in self.jobs:
            x, y = batch.sites[job.number]
            if self.step == 0:
                mean_in, mean_out = batch.means[job.number]
                mean_read = mean_in if job.layer.config.reads == "mlp_in" else mean_out
                job.layer.start(mean_read, mean_out, training.settings.start)
            read = x if job.layer.config.reads == "mlp_in" else y
            lr = learning_rate(self.step, training)
            train_step(job, read, y, lr, seen, training.accumulation, training.clip_norm)
        self.step += 1
        self.cursor = batch.cursor

    def next_batch(self, stream: Iterator[Batch]) -> Batch:
        try:
            return next(stream)
        except StopIteration:
            if self.step:
                self.save()
            for job in self.jobs:
                self.finish(job)
            raise MxdError(
                f"the text ended after {self.seen:,} tokens, before the {self.config.training.tokens:,} asked for "
                f"(streamed text is read once). The layers as they are stand in {self.config.folder}."
            ) from None
        except MxdError:
            if self.step:
                self.save()
            raise

    def check_losses(self) -> None:
        for job in self.jobs:
            if not math.isfinite(float(job.stats.sums["loss"])):
                raise MxdError(
                    f"{job.name} diverged before step {self.step:,}: its loss is not finite. The last saved state is "
                    "from before; in a new run lower training.lr, set training.clip_norm or leave this one out."
                )

    def report(self) -> None:
        training = self.config.training
        seen = self.seen
        now = time.monotonic()
        rate = self.jobs[0].stats.tokens / max(now - self.clock, 1e-9)
        with self.metrics.open("a", encoding="utf-8") as file:
            for job in self.jobs:
                values = job.stats.report(seen, min(training.dead_after, training.tokens // 4))
                self.reported[job.name] = values
                line = {"step": self.step, "tokens": seen, "replacement": job.name, **values}
                line |= {"lr": learning_rate(self.step - 1, training), "seconds": round(now - self.clock, 3)}
                line["tokens_per_second"] = round(rate, 1)
                file.write(json.dumps(line) + "\n")
                if training.trackers:
                    self.accelerator.log({f"{job.name}/{k}": v for k, v in values.items()}, step=self.step)
        self.clock = now

    def note(self) -> str:
        shown = list(self.reported.items())[:3]
        return "  ".join(
            f"{name}: NMSE {v['normalized_mse']:.4f} FVU {v['fvu']:.2f} L0 {v['l0']:.0f} dead {v['dead_share']:.0%}"
            for name, v in shown
        ) + (f"  (+{len(self.reported) - 3} more)" if len(self.reported) > 3 else "")

    def save(self) -> None:
        tensors = {f"{job.name}/{k}": v for job in self.jobs for k, v in job.tensors().items()}
        info = {
            "cursor": asdict(self.cursor),
            "counted": {job.name: job.stats.tokens for job in self.jobs},
            "metrics_bytes": self.metrics.stat().st_size if self.metrics.exists() else 0,
            "reported": self.reported,
            "fingerprints": fingerprints(self.config, self.base),
        }
        save_state(self.config.folder / "state", self.step, tensors, info)

    def restore(self, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        if info["fingerprints"] != fingerprints(self.config, self.base):
            raise MxdError(
                f"{self.config.folder} was trained on another base model than "
                f"{self.base.source!r}; resume with that one."
            )
        expected = {f"{job.name}/{k}": v for job in self.jobs for k, v in job.tensors().items()}
        shapeless = {k: tensors[k] if "/adam/" in k and k in tensors else v for k, v in expected.items()}
        fit_tensors(shapeless, tensors, str(self.config.folder / "state"))
        for job in self.jobs:
            prefix = f"{job.name}/"
            job.restore({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
            job.stats.tokens = info["counted"][job.name]
        self.step, self.cursor, self.reported = info["step"], Cursor(**info["cursor"]), info["reported"]
        with self.metrics.open("ab") as file:  # lines written after the state was saved will be written again
            file.truncate(info["metrics_bytes"])

    def finish(self, job: Job) -> None:
        config, training = self.config, self.config.training
        provenance = Provenance(
            model=self.base.source,
            revision=self.base.revision,
            layer=job.number,
            fingerprint=self.base.fingerprint(job.number),
            model_dtype=str(next(self.base.module.parameters()).dtype).removeprefix("torch."),
            masked_ids=tuple(masked_ids_of(config, self.base)),
            data=config.data.model_dump(),
            training=training.model_dump() | {"steps": training.steps, "settings": training.settings.model_dump()},
            tokens=self.seen,
            seed=config.seed,
            versions=versions(),
        )
        save_layer(config.folder / job.name, job.layer, provenance, {"training": self.reported.get(job.name, {})})


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
    if folder.is_file():
        raise MxdError(f"{folder} is a file; choose another run or out.")
    if not resume and folder.exists() and any(child.name != "config.yaml" for child in folder.iterdir()):
        raise MxdError(
            f"{folder} already holds a run. Continue it with --resume, or choose another name with --run NAME."
        )
    if resume and not existing.exists():
        raise MxdError(f"nothing to resume in {folder}: there is no config.yaml. Start without --resume.")
    if resume and existing.read_text(encoding="utf-8") != dump_config(config):
        raise MxdError(
            f"{existing} differs from this config, so the run cannot continue as it was. "
            f"Resume with: mxd train {existing} --resume"
        )


@dataclass
class _Stop:
    is_set: bool = False


@contextmanager
def _stop_signal() -> Iterator[_Stop]:
    """Turn the first Ctrl-C or SIGTERM into a flag; the second acts as usual. Outside the main thread: no handling."""
    stop = _Stop()
    names = (signal.SIGINT, signal.SIGTERM)

    def ask(number: int, frame: Any) -> None:
        stop.is_set = True
        console.print("stopping: this step is finished and everything saved; once more to leave at once")
        for name, handler in previous.items():
            signal.signal(name, handler)

    try:
        previous = {name: signal.signal(name, ask) for name in names}
    except ValueError:
        yield stop
        return
    try:
        yield stop
    finally:
        for name, handler in previous.items():
            signal.signal(name, handler)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings for trackers, which take scalars only."""
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{prefix}{key}.").items()}
    return {prefix.rstrip("."): value if isinstance(value, int | float | str | bool) else str(value)}
