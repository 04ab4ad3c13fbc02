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

import psutil
import torch
from jaxtyping import Float
from torch import Tensor

from mxd.activations import Batch, Cursor, activation_batches, ahead, buffer_bytes
from mxd.cache import cache_bytes, cached_batches, cached_tokens, check_cache, claim_cache, write_cache
from mxd.checkpoint import Provenance, fit_tensors, load_state, save_layer, save_state, versions
from mxd.config import RunConfig, TrainingConfig, dump_config
from mxd.data import documents, special_ids, token_blocks
from mxd.errors import MxdError
from mxd.layers import Code, ReplacementConfig, ReplacementLayer, size
from mxd.losses import normalize, squared_error
from mxd.model import FrozenModel, load_frozen
from mxd.ops import Proposals
from mxd.progress import console, progress

ADAM_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Interrupted(MxdError):
    """Training was stopped by the user; everything was saved."""


class Stats:
    """What is counted between two lines of metrics, and when each unit was last active. All of it is saved."""

    def __init__(self, units: int, width: int, device: torch.device) -> None:
        self.sums = {
            name: torch.zeros(shape, device=device)
            for name, shape in {"loss": (), "error": (), "y": (width,), "y_squared": (), "active": ()}.items()
        }
        self.tokens = 0
        self.last_active = torch.zeros(units, dtype=torch.int64, device=device)

    @torch.no_grad()
    def see(self, y: Tensor, error: Tensor, loss: Tensor, code: Code, tokens_seen: int) -> None:
        """Count one (micro-)batch."""
        self.tokens += len(y)
        self.sums["loss"] += loss.detach() * len(y)
        self.sums["error"] += error.detach().sum()
        self.sums["y"] += y.sum(0)
        self.sums["y_squared"] += torch.linalg.vector_norm(y).square()
        active = code.values > 0
        self.sums["active"] += active.sum()
        if code.all_units:
            self.last_active[active.any(0)] = tokens_seen
        else:
            self.last_active[code.indices[active]] = tokens_seen

    def report(self, tokens_seen: int, dead_after: int) -> dict[str, float]:
        """Return the metrics since the last report, and begin anew."""
        n = max(self.tokens, 1)
        total = self.sums["y_squared"] - self.sums["y"].square().sum() / n
        values = {
            "normalized_mse": float(self.sums["loss"] / n),
            "fvu": float(self.sums["error"] / total),
            "l0": float(self.sums["active"] / n),
            "dead_share": float((tokens_seen - self.last_active >= dead_after).float().mean()),
        }
        for value in self.sums.values():
            value.zero_()
        self.tokens = 0
        return values


@dataclass
class Job:
    """One replacement under training."""

    name: str
    number: int
    layer: ReplacementLayer
    optimizer: torch.optim.Adam
    stats: Stats

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the job's state, by name."""
        found = {f"layer/{k}": v for k, v in self.layer.state_dict().items()}
        for key, parameter in self.layer.named_parameters():
            for moment in ADAM_MOMENTS:
                value = self.optimizer.state[parameter].get(moment)
                found[f"adam/{moment}/{key}"] = torch.zeros(()) if value is None else value
        found |= {f"sum/{k}": v for k, v in self.stats.sums.items()}
        return found | {"last_active": self.stats.last_active}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put saved tensors back in place."""
        self.layer.load_state_dict({k.removeprefix("layer/"): v for k, v in tensors.items() if k.startswith("layer/")})
        names = [key for key, _ in self.layer.named_parameters()]
        state = {i: {m: tensors[f"adam/{m}/{key}"] for m in ADAM_MOMENTS} for i, key in enumerate(names)}
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})
        for key, value in self.stats.sums.items():
            value.copy_(tensors[f"sum/{key}"])
        self.stats.last_active.copy_(tensors["last_active"])


def train_step(
    job: Job,
    x: Float[Tensor, "tokens d_in"],
    y: Float[Tensor, "tokens d_out"],
    lr: float,
    tokens_seen: int,
    accumulation: int = 1,
    clip_norm: float | None = None,
) -> None:
    """Take one optimiser step of one replacement (MxD, section 3.1).

    Args:
        job: the replacement.
        x: what the layer reads.
        y: the MLP's outputs.
        lr: learning rate of this step.
        tokens_seen: tokens trained on, this batch included.
        accumulation: number of equal parts the batch is processed in.
        clip_norm: largest gradient norm.
    """
    job.optimizer.zero_grad(set_to_none=True)
    for x_part, y_part in zip(x.chunk(accumulation), y.chunk(accumulation), strict=True):
        code = job.layer.encode(x_part)
        error = squared_error(job.layer.decode(x_part, code), y_part)
        loss = normalize(error, y_part)
        ((loss + job.layer.penalty(code)) / accumulation).backward()
        job.stats.see(y_part, error, loss, code, tokens_seen)
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(job.layer.parameters(), clip_norm)
    for group in job.optimizer.param_groups:
        group["lr"] = lr
    job.optimizer.step()


def learning_rate(step: int, training: TrainingConfig) -> float:
    """Return the rate of step 0, 1, ...: linear warm-up, then constant, or falling linearly to zero after the last."""
    settings = training.settings
    rise = min(1.0, (step + 1) / (settings.warmup_steps + 1))
    left = (training.steps - step) / max(1, training.steps - settings.warmup_steps)
    return settings.lr * rise * (min(1.0, left) if settings.decay else 1.0)


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
    base = _load_base(config, model)
    plans = plan_layers(config, base)
    _check_memory(config, base, plans)
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


def activation_stream(config: RunConfig, base: FrozenModel, start: Cursor | None = None) -> Iterator[Batch]:
    """Return the batches a run trains on: from its cache where ``data.cache`` names one, else live from the model.

    Raises:
        MxdError: no text, no tokenizer, or a cache of something else or with too few tokens.
    """
    data, training = config.data, config.training
    if data.cache is not None:
        folder = Path(data.cache)
        check_cache(folder, _identity(config, base))
        if cached_tokens(folder) < training.steps * training.batch_tokens:
            raise MxdError(
                f"the activation cache {folder} holds {cached_tokens(folder):,} tokens, the run asks for "
                f"{training.tokens:,}; lower training.tokens, or go on with: mxd cache CONFIG {folder}"
            )
        return ahead(cached_batches(folder, config.layers, start, base.device), depth=2)
    if base.tokenizer is None:
        raise MxdError("the base model has no tokenizer; pass one to load_frozen(..., tokenizer=...).")
    texts = documents(data.source, data.split, data.column, data.streaming, config.seed, data.part)
    blocks = token_blocks(texts, base.tokenizer, data.context, data.bos, config.seed)
    contexts = max(1, training.buffer_tokens // data.context)
    return activation_batches(
        base,
        config.layers,
        (lambda first: ahead(blocks(first), contexts)) if data.streaming else blocks,
        training.batch_tokens,
        training.buffer_tokens,
        _masked_ids(config, base),
        config.seed,
        forward_contexts=max(1, 4096 // data.context),
        start=start,
    )


def cache_activations(config: RunConfig, folder: Path, model: Any = None) -> None:
    """Write the activations that a run trains on to disk; an interrupted cache is continued.

    Args:
        config: the run; ``layers``, ``data``, ``seed`` and the sizes and number of its batches count.
        folder: where the cache goes.
        model: a loaded base model, used in place of ``config.model.source``.

    Raises:
        MxdError: anything wrong with config, model, text or disk.
    """
    config = config.model_copy(update={"data": config.data.model_copy(update={"cache": None})})
    base = _load_base(config, model)
    for number in config.layers:
        base.check_layer(number)
    tokens = config.training.steps * config.training.batch_tokens
    widths = [(shape.d_in, shape.d_out) for shape in map(base.mlp_shape, config.layers)]
    start = claim_cache(folder, _identity(config, base), cache_bytes(widths, tokens))
    write_cache(folder, activation_stream(config, base, start), tokens)


def _load_base(config: RunConfig, model: Any) -> FrozenModel:
    settings = config.model
    return load_frozen(
        model if model is not None else settings.source,
        revision=settings.revision,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
    )


def _masked_ids(config: RunConfig, base: FrozenModel) -> list[int]:
    return special_ids(base.tokenizer) if config.data.mask_special and base.tokenizer is not None else []


def _fingerprints(config: RunConfig, base: FrozenModel) -> dict[str, str]:
    return {str(number): base.fingerprint(number) for number in config.layers}


def _identity(config: RunConfig, base: FrozenModel) -> dict[str, Any]:
    """What makes a stream of batches what it is: equal identities give equal batches."""
    return {
        "data": config.data.model_dump(exclude={"cache"}),
        "masked_ids": _masked_ids(config, base),
        "seed": config.seed,
        "batch_tokens": config.training.batch_tokens,
        "buffer_tokens": config.training.buffer_tokens,
        "model_dtype": str(next(base.module.parameters()).dtype).removeprefix("torch."),
        "fingerprints": _fingerprints(config, base),
    }


def plan_layers(config: RunConfig, base: FrozenModel) -> dict[str, tuple[int, ReplacementConfig]]:
    """Return name -> (block, complete config) for everything the run trains.

    Raises:
        MxdError: a layer out of range, a size that does not fit, or two replacements that are the same.
    """
    plans: dict[str, tuple[int, ReplacementConfig]] = {}
    for number in config.layers:
        base.check_layer(number)
        shape = base.mlp_shape(number)
        for wanted in config.replacements:
            complete = size(wanted.inherit(shape), config.sizing.expansion, config.sizing.match)
            name = f"layer{number}-{complete.slug}"
            taken = [n for n in plans if n == name or n.startswith(f"{name}-v")]
            if any(plans[n] == (number, complete) for n in taken):
                raise MxdError(f"the run trains {name} twice with the same settings; remove one from replacements.")
            plans[f"{name}-v{len(taken) + 1}" if taken else name] = (number, complete)
    return plans


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
            "fingerprints": _fingerprints(self.config, self.base),
        }
        save_state(self.config.folder / "state", self.step, tensors, info)

    def restore(self, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        if info["fingerprints"] != _fingerprints(self.config, self.base):
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
            masked_ids=tuple(_masked_ids(config, self.base)),
            data=config.data.model_dump(),
            training=training.model_dump() | {"steps": training.steps, "settings": training.settings.model_dump()},
            tokens=self.seen,
            seed=config.seed,
            versions=versions(),
        )
        save_layer(config.folder / job.name, job.layer, provenance, {"training": self.reported.get(job.name, {})})


def new_job(
    name: str, number: int, config: ReplacementConfig, seed: int, device: torch.device, proposals: Proposals = "float32"
) -> Job:
    """Return a replacement at the beginning of its training."""
    layer = config.build(seed).to(device).train()
    layer.sparsity.proposals = proposals
    optimizer = torch.optim.Adam(layer.parameters(), fused=device.type in ("cpu", "cuda"))
    return Job(name, number, layer, optimizer, Stats(layer.num_units, config.d_out or 0, device))


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


def _check_memory(config: RunConfig, base: FrozenModel, plans: Mapping[str, tuple[int, ReplacementConfig]]) -> None:
    """Say so before starting if parameters, gradients, moments and the buffer cannot fit."""
    state = sum(16 * layer.num_params for _, layer in plans.values())
    shapes = [base.mlp_shape(number) for number in config.layers]
    buffer = buffer_bytes([(s.d_in, s.d_out) for s in shapes], config.training.buffer_tokens)
    free = torch.cuda.mem_get_info(base.device)[0] if base.device.type == "cuda" else psutil.virtual_memory().available
    if state + buffer > free:
        raise MxdError(
            f"the run needs {(state + buffer) / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free on {base.device}: "
            f"{state / 2**30:.1f} GiB for weights, gradients and Adam's moments of {len(plans)} replacements, "
            f"{buffer / 2**30:.1f} GiB for the activation buffer. Lower training.buffer_tokens or sizing.expansion, or "
            "train fewer replacements at a time."
        )
    console.print(
        f"{len(plans)} replacements, {sum(c.num_params for _, c in plans.values()):,} parameters; "
        f"memory: {state / 2**30:.2f} GiB of state, {buffer / 2**30:.2f} GiB of activations",
        soft_wrap=True,
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
