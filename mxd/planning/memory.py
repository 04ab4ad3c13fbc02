"""What a run needs: memory, disk and work, known before any weight is loaded.

Costs are found on the meta device by the code that trains (``mxd.planning.profiler``); the rest is counted from shapes.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mxd.common.bundled import bundled
from mxd.common.errors import MxdError
from mxd.common.hardware import free_disk, free_memory, resident
from mxd.common.processes import ALONE, Processes, local_device
from mxd.common.progress import console
from mxd.config import RunConfig
from mxd.data.activations import buffer_bytes
from mxd.data.tables import DOCUMENTS, find_files
from mxd.data.text import BUNDLED
from mxd.layers import ReplacementConfig
from mxd.layers.objective import forward_backward
from mxd.layers.sparsity import TopKConfig
from mxd.model.frozen import FrozenModel
from mxd.model.loading import DTYPES, outline, pick_device, wrap
from mxd.ops import CandidateDtype, candidate_dtype, metered_as
from mxd.planning.layout import ParallelLayout, parallel_layout, plan_layers
from mxd.planning.profiler import Cost, meter

ADAM_BYTES = 28
"""Adam reads a parameter, its gradient and two moments, and writes all but the gradient: 7 float32."""

TEXT_BYTES = 5
"""Memory for each byte of a local text: documents, the tables they are read from, and token ids; measured."""


GZIP_RATIO = 4
"""What text in .gz files is taken to unpack to, times their size."""


@dataclass(frozen=True)
class Work:
    """What a part of a run does for one token."""

    flops: float
    """Of dense products."""
    rounded: float
    """Of them, those in bfloat16."""
    moved: float
    """Bytes read and written that grow with the tokens."""
    fixed: float = 0.0
    """Bytes read and written once a step, divided by its tokens."""


@dataclass(frozen=True)
class Plan:
    """What a run needs."""

    replacements: dict[str, tuple[int, ReplacementConfig]]
    """Name -> (block, complete config)."""
    device: torch.device
    """Where it runs."""
    accumulation: int
    """Parts that each batch is processed in."""
    memory: dict[str, dict[str, int]]
    """Phase -> part -> bytes on the device."""
    host: dict[str, dict[str, int]]
    """The same beside the device; empty where the device is the CPU."""
    disk: dict[str, int]
    """Part -> bytes."""
    layout: ParallelLayout
    """Who trains what, in a launch of many processes; the memory is that of the process that needs most."""
    site_bytes: dict[int, int]
    """Block -> bytes of a token's activations there, input and output."""
    work: dict[str, Work]
    """``base model`` and every replacement -> work for a token."""

    @property
    def params(self) -> int:
        """Parameters of all replacements."""
        return sum(config.num_params for _, config in self.replacements.values())


def peak(phases: Mapping[str, Mapping[str, int]]) -> tuple[str, int]:
    """Return the phase that holds the most memory, and how much."""
    name = max(phases, key=lambda phase: sum(phases[phase].values()), default="")
    return name, sum(phases[name].values()) if name else 0


def plan_run(
    config: RunConfig, model: Any = None, world: int = 1, groups: int | None = None, shard: bool = False
) -> Plan:
    """Return what a run needs. Nothing is loaded but the base model's configuration.

    Args:
        config: the run.
        model: a loaded base model, used in place of ``config.model.source``.
        world: processes that train together.
        groups: groups of them (``parallel_layout``).
        shard: whether a group's processes divide weights, gradients and moments among them.

    Raises:
        MxdError: no such model, layer or device, or a size that does not fit.
    """
    loaded = None if model is None else wrap(model)
    device = pick_device(local_device(config.model.device)) if loaded is None else loaded.device
    shape = outline(
        config.model.source if loaded is None else loaded.module,
        revision=config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
    )
    dtype = config.model.dtype if loaded is None else loaded.dtype
    shape.module.to(DTYPES.get(dtype, torch.float32))
    replacements = plan_layers(config, shape)
    layout = parallel_layout(replacements, world, config.training.batch_tokens, groups)
    parts = _Parts(config, shape, dtype, replacements, layout, shard, device, loaded)
    if config.training.accumulation != "auto":
        return parts.plan(config.training.accumulation)
    plans = (parts.plan(number) for number in _divisors(config.training.batch_tokens // layout.parts))
    first = next(plans)
    return next(filter(_fits, itertools.chain([first], plans)), first)


def _fits(plan: Plan) -> bool:
    return peak(plan.memory)[1] <= free_memory(plan.device)


class _Parts:
    """Everything that a plan adds up, each found once."""

    def __init__(
        self,
        config: RunConfig,
        shape: FrozenModel,
        dtype: str,
        replacements: dict[str, tuple[int, ReplacementConfig]],
        layout: ParallelLayout,
        shard: bool,
        device: torch.device,
        loaded: FrozenModel | None,
    ) -> None:
        self.config, self.device, self.replacements, self.layout = config, device, replacements, layout
        self.shards = layout.parts if shard else 1
        tensors = [*shape.module.parameters(), *shape.module.buffers()]
        self.weights = sum(t.numel() * t.element_size() for t in tensors)
        if dtype == "int8":
            self.weights -= _saved(shape.module)
        self.reading = (
            0 if loaded else _reading_bytes(config.model.source, self.weights, max(map(torch.numel, tensors)))
        )
        self.text = _text_bytes(config)
        inside = self.weights if loaded is not None and loaded.device.type == "cpu" else 0
        self.process = max(0, resident() - inside)
        self.widths = {n: (one.d_in, one.d_out) for n, one in ((n, shape.mlp_shape(n)) for n in config.blocks)}
        self.forward_tokens = config.data.forward_contexts * config.data.context
        self.forward = Cost()
        if config.data.cache is None:
            ids = torch.zeros(config.data.forward_contexts, config.data.context, dtype=torch.int64, device="meta")
            self.forward = meter(lambda: shape.record(ids, config.blocks))

    def plan(self, accumulation: int) -> Plan:
        """Return the plan, for batches that are processed in so many parts."""
        training, parts = self.config.training, self.layout.parts
        rows = -(-training.batch_tokens // parts // accumulation)
        candidates = candidate_dtype(self.device, training.candidates)
        steps = {
            name: _step(layer, rows, accumulation, candidates, self.device)
            for name, (_, layer) in self.replacements.items()
        }
        host = self.beside()
        groups = [self.on_device(group, steps) for group in self.layout.groups]
        device = max(groups, key=lambda phases: peak(phases)[1])
        if self.device.type == "cpu":
            largest = max(cost.largest for cost in (self.forward, *steps.values()))
            device, host = {phase: _kept(host[phase] | device[phase], device, largest) for phase in device}, {}
        work = {"base model": _work(self.forward, self.forward_tokens)}
        sites = {number: buffer_bytes([widths], 1) for number, widths in self.widths.items()}
        tokens = training.batch_tokens
        for name, cost in steps.items():
            work[name] = _work(cost, tokens / parts, ADAM_BYTES * self.params(name) / tokens)
        return Plan(self.replacements, self.device, accumulation, device, host, self.disk(), self.layout, sites, work)

    def params(self, name: str) -> int:
        return self.replacements[name][1].num_params

    def units(self, name: str) -> int:
        return self.replacements[name][1].num_units or 0

    def on_device(self, group: tuple[str, ...], steps: Mapping[str, Cost]) -> dict[str, dict[str, int]]:
        """Return phase -> part -> bytes on the device of a process that trains these replacements."""
        training, world = self.config.training, len(self.layout.shares)
        params = sum(map(self.params, group))
        own = {number: self.widths[number] for number in {self.replacements[name][0] for name in group}}
        batch, window = (
            buffer_bytes(list(own.values()), n // self.layout.parts)
            for n in (training.batch_tokens, training.buffer_tokens)
        )
        recorded = buffer_bytes(list(self.widths.values()), training.buffer_tokens // world)
        several = training.tokens > training.buffer_tokens
        filling = recorded + (window if world > 1 else 0)  # what is recorded, and what is received
        if self.config.data.cache is not None:
            window = filling = 3 * batch
        own_params = params // self.shards
        begun = {"replacements": 4 * own_params, "counters": sum(8 * self.units(name) for name in group)}
        trained = {"gradients": 4 * own_params, "Adam's moments": 8 * own_params}
        whole = 8 * max(map(self.params, group)) if self.shards > 1 else 0  # of one layer at a time
        weights = {"base model": self.weights}
        step = whole + max(steps[name].peak - 4 * self.params(name) for name in group)
        return {
            "loading": weights,
            "recording activations": {
                **weights,
                **begun,
                **(trained if several else {}),
                "activations": filling,
                "forward": self.forward.peak,
            },
            "taking steps": {
                **weights,
                **begun,
                **trained,
                "activations": window + batch,
                "largest step": step + whole,
            },
        }

    def beside(self) -> dict[str, dict[str, int]]:
        """Return phase -> part -> bytes of what is in the host's memory wherever the run takes place."""
        process = {"Python, libraries": self.process}
        writing = max(map(self.params, self.replacements)) * 12 if self.device.type != "cpu" else 0
        loading = self.weights if self.device.type != "cpu" else 0
        running = {**process, "text": self.text}
        return {
            "loading": {**process, "reading the weights": self.reading + loading},
            "recording activations": running,
            "taking steps": {**running, "writing": writing} if writing else running,
        }

    def disk(self) -> dict[str, int]:
        """Return part -> bytes that the run writes; one state more than are kept exists while it is written."""
        params = sum(map(self.params, self.replacements))
        units = sum(map(self.units, self.replacements))
        states = self.config.training.keep_states + 1
        return {f"{states} states": states * (12 * params + 8 * units), "layers": 4 * params}


def _step(
    config: ReplacementConfig, rows: int, accumulation: int, candidates: CandidateDtype, device: torch.device
) -> Cost:
    """Return what a step costs but for Adam's part, in so many parts of so many rows."""
    k = config.sparsity.max_k
    if k is not None:  # the most units that it may draw
        config = config.model_copy(update={"sparsity": TopKConfig(k=k)})
    with torch.device("meta"):
        layer = config.build().train()
    layer.sparsity.candidates = candidates
    x, y = (torch.empty(rows, width or 0, device="meta") for width in (config.d_in, config.d_out))

    part = partial(forward_backward, layer, x, y, accumulation)
    with metered_as(device.type):
        first = meter(part)
        later = meter(part) if accumulation > 1 else Cost()  # the gradient so far is there, too
    return Cost(
        flops=accumulation * first.flops,
        rounded=accumulation * first.rounded,
        moved=first.moved + (accumulation - 1) * later.moved,
        peak=max(first.peak, later.peak + 4 * config.num_params) if accumulation > 1 else first.peak,
        largest=first.largest,
    )


def _work(cost: Cost, tokens: int | float, fixed: float = 0.0) -> Work:
    """Divide a cost by the tokens it is for."""
    return Work(cost.flops / tokens, cost.rounded / tokens, cost.moved / tokens, fixed)


def _kept(parts: dict[str, int], phases: Mapping[str, Mapping[str, int]], largest: int) -> dict[str, int]:
    """Add, once a run is under way, what the heap keeps of freed blocks and cannot use again.

    That is about half of the smaller phase's temporaries, and one place for the largest block, in which a small one
    stands: found by measuring (docs/scaling.md).
    """
    if "activations" not in parts:
        return parts
    temporaries = (phases["recording activations"]["forward"], phases["taking steps"]["largest step"])
    return parts | {"freed, not reused": min(temporaries) // 2 + largest}


def _saved(module: Any) -> int:
    """Return what a float16 model saves with its linear maps, but for the last, in 8 bits and scales in float32."""
    head = module.get_output_embeddings()
    maps = [(type(m).__name__, m.weight) for m in module.modules() if m is not head and hasattr(m, "weight")]
    sizes = {"Linear": 0, "Conv1D": 1}  # which side is the output's
    return sum(w.numel() - 4 * w.shape[sizes[kind]] for kind, w in maps if kind in sizes)


def _reading_bytes(source: str, weights: int, largest: int) -> int:
    """Return what reading a model takes beside its weights: of GGUF a tensor twice in float32, else the mapped file."""
    return 8 * largest if source.endswith(".gguf") else weights


def _text_bytes(config: RunConfig) -> int:
    """Return the memory that a local text and its reader take; nothing where its size cannot be known."""
    import pyarrow.parquet as pq

    if config.data.cache is not None:
        return 0
    source = bundled("text/train.parquet") if config.data.source in BUNDLED else config.data.source
    total = 0
    for file in find_files(source, DOCUMENTS):
        if file.suffix == ".parquet":
            groups = pq.ParquetFile(file).metadata
            total += sum(groups.row_group(i).total_byte_size for i in range(groups.num_row_groups))
        else:
            total += file.stat().st_size * (GZIP_RATIO if file.suffix == ".gz" else 1)
    return TEXT_BYTES * total


def _divisors(number: int) -> Iterator[int]:
    return (n for n in range(1, number + 1) if number % n == 0)


def check_memory(config: RunConfig, plan: Plan) -> None:
    """Say so before starting if a run cannot fit into memory or onto the disk.

    Raises:
        MxdError: with the parts, largest first, and what to lower.
    """
    places = {str(plan.device): (plan.memory, free_memory(plan.device))}
    if plan.host:
        places["the host"] = (plan.host, free_memory(torch.device("cpu")))
    for place, (phases, free) in places.items():
        phase, needed = peak(phases)
        if needed > free:
            raise MxdError(
                f"the run needs {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free on {place}: "
                f"{_listed(phases[phase])} (while {phase}). Lower training.buffer_tokens or sizing.expansion, set "
                "training.accumulation to auto, load the base model in bfloat16 (model.dtype), or train fewer "
                "replacements at a time."
            )
    free, written = free_disk(config.folder), sum(plan.disk.values())
    if written > free:
        raise MxdError(
            f"the run writes {written / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free at {config.folder}: "
            f"{_listed(plan.disk)}. Choose another folder with --out, lower training.keep_states or sizing.expansion, "
            "or train fewer replacements at a time."
        )


def _listed(parts: Mapping[str, int]) -> str:
    """Return the parts that count, largest first."""
    shown = sorted(((n, part) for part, n in parts.items() if n > sum(parts.values()) // 50), reverse=True)
    return ", ".join(f"{part} {n / 2**30:.2f}" for n, part in shown)


def prepare(
    config: RunConfig,
    model: Any = None,
    processes: Processes = ALONE,
    groups: int | None = None,
    shard: bool = False,
) -> tuple[RunConfig, Plan]:
    """Plan a run, refuse what cannot fit, and say what is about to be trained.

    Returns:
        The config with the number of parts of a batch written in, the same in every process, and the plan.

    Raises:
        MxdError: as ``plan_run`` and ``check_memory``.
    """
    with processes.together():
        plan = plan_run(config, model, processes.world, groups, shard)
    number = max(processes.gather(plan.accumulation))
    training = config.training.model_copy(update={"accumulation": number})
    config = config.model_copy(update={"training": training})
    with processes.together():
        if number != plan.accumulation:
            plan = plan_run(config, model, processes.world, groups, shard)
        check_memory(config, plan)
    phase, needed = peak(plan.memory)
    parts = f", each batch in {number} parts" if number > 1 else ""
    console.print(
        f"{len(plan.replacements)} replacements, {plan.params:,} parameters{parts}; memory on {plan.device}: "
        f"{needed / 2**30:.2f} GiB while {phase}",
        soft_wrap=True,
    )
    return config, plan
