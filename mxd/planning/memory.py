"""What a run needs: memory, disk and work, known before any weight is loaded.

The code that trains is metered on the meta device (``mxd.planning.profiler``); the rest is counted from shapes.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from mxd.common.errors import MxdError
from mxd.common.hardware import amount, free_disk, free_memory
from mxd.common.numbers import plural
from mxd.common.processes import ALONE, Processes
from mxd.common.progress import console
from mxd.config import RunConfig
from mxd.data.activations import buffer_bytes
from mxd.layers import ReplacementConfig
from mxd.layers.objective import forward_backward
from mxd.ops import CandidateDtype, DenseDtype, candidate_dtype, dense_dtype, metered_as, rounded_products
from mxd.planning.layout import ParallelLayout, Replacements, blocks_of, fitting_groups, parallel_layout, plan_layers
from mxd.planning.plan import Plan, one_by_one, peak, work_per_token
from mxd.planning.process import BaseProcess, base_process, state_disk
from mxd.planning.profiler import Cost, meter
from mxd.splice import Splice, recorder

ADAM_BYTES = 28
"""Adam reads a parameter, its gradient and two moments, and writes all but the gradient: 7 float32."""

MOMENT_BYTES = {"adam": 8, "signum": 4, "muon": 4}
"""Bytes of moments for each parameter."""


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
        MxdError: no such model, block or device, or a size that does not fit.
    """
    process = base_process(config, model)
    replacements = plan_layers(config, process.shape)
    tokens = config.training.batch_tokens

    def parts(replacements: Replacements, groups: int | None, below: Replacements | None = None) -> _Parts:
        layout = parallel_layout(replacements, world, tokens, groups)
        return _Parts(config, process, replacements, layout, shard, below or {})

    def together(numbers: Sequence[int], groups: int | None = None) -> Plan:
        some = parts({name: item for name, item in replacements.items() if item[0] in numbers}, groups)
        return _fewest_parts(config, some.plan, some.layout)

    if config.training.inputs == "spliced":
        items = sorted(replacements.items(), key=lambda item: item[1][0])
        whole = parts(replacements, 1)
        first, last = parts(dict(items[:1]), groups), parts(dict(items[-1:]), groups, dict(items[:-1]))
        ends = whole, first, last
        return _fewest_parts(config, lambda n: one_by_one(*(some.plan(n) for some in ends)), whole.layout)
    blocks = blocks_of(config, process.shape)
    plan = together(blocks, groups)
    return plan if _fits(plan) else replace(plan, fitting=fitting_groups(blocks, lambda some: _fits(together(some))))


def _fewest_parts(config: RunConfig, plan: Callable[[int], Plan], layout: ParallelLayout) -> Plan:
    """Return the plan for as many parts of a batch as the config says; for ``auto``, for the fewest that fit.

    Where none do, the plan for one part says what is missing.
    """
    if config.training.accumulation != "auto":
        return plan(config.training.accumulation)
    plans = map(plan, _divisors(config.training.batch_tokens // layout.parts))
    first = next(plans)
    return next(filter(_fits, itertools.chain([first], plans)), first)


def _fits(plan: Plan) -> bool:
    return peak(plan.memory)[1] <= free_memory(plan.device)


class _Parts:
    """All that a plan adds up, measured once for every ``accumulation`` that is tried."""

    def __init__(
        self,
        config: RunConfig,
        process: BaseProcess,
        replacements: Replacements,
        layout: ParallelLayout,
        shard: bool,
        below: Replacements,
    ) -> None:
        self.config, self.process, self.replacements, self.layout = config, process, replacements, layout
        self.device, shape = process.device, process.shape
        self.shards = layout.parts if shard else 1
        mlps = {number: shape.mlp_shape(number) for number in dict.fromkeys(n for n, _ in replacements.values())}
        self.widths = {number: (mlp.d_in, mlp.d_out) for number, mlp in mlps.items()}
        self.forward_tokens = config.data.forward_contexts * config.data.context
        self.below = 4 * sum(layer.num_params for _, layer in below.values())
        self.forward = Cost()
        if config.data.cache is None:
            size = config.data.forward_contexts, config.data.context
            self.forward = _forward(process, size, tuple(mlps), tuple(below.values()), config.training.targets)

    def plan(self, accumulation: int) -> Plan:
        """Return the plan for batches that are processed in ``accumulation`` parts."""
        training, parts = self.config.training, self.layout.parts
        rows = -(-training.batch_tokens // parts // accumulation)  # tokens in a part, rounded up
        dtypes = candidate_dtype(self.device, training.candidates), dense_dtype(self.device, training.dense)
        costs = {
            layer: _step(layer, rows, accumulation, dtypes, self.device, training.settings.k_start)
            for layer in dict.fromkeys(layer for _, layer in self.replacements.values())
        }
        steps = {name: costs[layer] for name, (_, layer) in self.replacements.items()}
        host = self.on_host()
        groups = [self.on_device(group, steps) for group in self.layout.groups]
        device = max(groups, key=lambda phases: peak(phases)[1])
        if self.device.type == "cpu":  # one memory for both
            largest = max(cost.largest for cost in (self.forward, *steps.values()))
            device, host = {phase: _with_heap(host[phase] | device[phase], device, largest) for phase in device}, {}
        work = {"base model": work_per_token(self.forward, self.forward_tokens)}
        sites = {number: buffer_bytes([widths], 1) for number, widths in self.widths.items()}
        tokens = training.batch_tokens
        for name, cost in steps.items():
            work[name] = work_per_token(cost, tokens / parts, ADAM_BYTES * self.params(name) / tokens)
        return Plan(
            dict(self.replacements), self.device, accumulation, device, host, self.disk(), self.layout, sites, work
        )

    def params(self, name: str) -> int:
        return self.replacements[name][1].num_params

    def units(self, name: str) -> int:
        return self.replacements[name][1].num_units or 0

    def on_device(self, group: tuple[str, ...], steps: Mapping[str, Cost]) -> dict[str, dict[str, int]]:
        """Return phase -> part -> bytes on the device of a process that trains the replacements of a group."""
        training, world = self.config.training, len(self.layout.shares)
        params = sum(map(self.params, group))
        blocks = {self.replacements[name][0] for name in group}
        # A process records all blocks on its share of the tokens, and receives its group's blocks on its part of them.
        batch, window = (
            buffer_bytes([self.widths[number] for number in blocks], n // self.layout.parts)
            for n in (training.batch_tokens, training.buffer_tokens)
        )
        recorded = buffer_bytes(list(self.widths.values()), training.buffer_tokens // world)
        filling = recorded + (window if world > 1 else 0)
        if self.config.data.cache is not None:
            window = filling = 3 * batch  # the batch in use, and two read ahead
        refilled = training.tokens > training.buffer_tokens  # with gradients and moments in memory
        sharded = params // self.shards
        layers = {"replacements": 4 * sharded, "counters": sum(8 * self.units(name) for name in group)}
        optimizer = {"gradients": 4 * sharded, "moments": MOMENT_BYTES[training.settings.optimizer] * sharded}
        below = {"layers below": self.below} if self.below else {}
        weights = {"base model": self.process.weights, **below}
        # Sharded layers are gathered one at a time: weights and gradients. The gradients that stay are counted above.
        whole = 8 * max(map(self.params, group)) if self.shards > 1 else 0
        fit = any(layer.needs_covariance for _, layer in self.replacements.values())
        moments = {"second moments": sum(map(self.moment_bytes, blocks))} if fit else {}
        step = whole + max(steps[name].peak - 4 * self.params(name) for name in group)
        return {
            "loading": {"base model": self.process.weights},
            "recording activations": {
                **weights,
                **layers,
                **(optimizer if refilled else {}),
                "activations": filling,
                "forward": self.forward.peak,
                **moments,
            },
            "taking steps": {
                **weights,
                **layers,
                **optimizer,
                "activations": window + batch,
                "largest step": step + whole,
            },
        }

    def moment_bytes(self, number: int) -> int:
        """Return the bytes of a block's ``Covariance`` in float64, while as much is added to it."""
        d, o = self.widths[number]
        return 2 * 8 * (d * d + d * o + o * o)

    def on_host(self) -> dict[str, dict[str, int]]:
        """Return phase -> part -> bytes in the host's memory, whatever the device."""
        writing = max(map(self.params, self.replacements)) * 12
        running, process = self.process.running(), self.process
        return {
            "loading": process.loading,
            "recording activations": running,
            "taking steps": process.running(writing),
        }

    def disk(self) -> dict[str, int]:
        """Return part -> bytes that the run writes."""
        params = sum(map(self.params, self.replacements))
        return state_disk(params, sum(map(self.units, self.replacements)), self.config.training.keep_states)


_FORWARDS: dict[Any, Cost] = {}
"""Costs of forwards that were metered in this process, since many runs of one base model may follow each other."""


def _forward(
    process: BaseProcess,
    size: tuple[int, int],
    blocks: tuple[int, ...],
    below: tuple[tuple[int, ReplacementConfig], ...],
    targets: str,
) -> Cost:
    """Return the cost of recording blocks on ``size`` contexts and tokens, above the layers spliced in below them."""
    module = process.shape.module
    key = (type(module), process.shape.config.to_json_string(), process.dtype, size, blocks, below, targets)
    if key not in _FORWARDS:
        with torch.device("meta"):
            ids = torch.zeros(*size, dtype=torch.int64)
            layers = {number: layer.build() for number, layer in below}
        record = recorder(Splice(process.shape, layers), targets == "base")
        _FORWARDS[key] = meter(lambda: record(ids, list(blocks)))
    return _FORWARDS[key]


@lru_cache(1024)
def _step(
    config: ReplacementConfig,
    rows: int,
    accumulation: int,
    dtypes: tuple[CandidateDtype, DenseDtype],
    device: torch.device,
    widening: float,
) -> Cost:
    """Return the cost of a step without Adam's, for ``accumulation`` parts of ``rows`` tokens each."""
    config = config.model_copy(update={"sparsity": config.sparsity.costliest})
    with torch.device("meta"):
        layer = config.build().train()
    layer.sparsity.candidates, layer.sparsity.widening = dtypes[0], widening
    x, y = (torch.empty(rows, width or 0, device="meta") for width in (config.d_in, config.d_out))

    part = partial(forward_backward, layer, x, y, accumulation)
    with metered_as(device.type), rounded_products(dtypes[1]):
        begin = meter(partial(layer.sparsity.begin_step, [layer.read(x, y)] * accumulation, layer.gates))
        first = meter(part)
        later = meter(part) if accumulation > 1 else Cost()  # adds to the gradient, which is held beside it
    held = later.peak + 4 * config.num_params
    return Cost(
        flops=begin.flops + accumulation * first.flops,
        rounded=begin.rounded + accumulation * first.rounded,
        moved=begin.moved + first.moved + (accumulation - 1) * later.moved,
        peak=max(begin.peak, begin.kept + (max(first.peak, held) if accumulation > 1 else first.peak)),
        largest=max(begin.largest, first.largest),
    )


def _with_heap(parts: dict[str, int], phases: Mapping[str, Mapping[str, int]], largest: int) -> dict[str, int]:
    """Add, once a run is under way, the freed memory that the heap keeps and cannot use again.

    That is about half of the smaller phase's temporaries, and a gap of the largest tensor's size that a small one
    keeps from being used: found by measuring (docs/scaling.md).
    """
    if "activations" not in parts:
        return parts
    temporaries = (phases["recording activations"]["forward"], phases["taking steps"]["largest step"])
    return parts | {"freed, not reused": min(temporaries) // 2 + largest}


def _divisors(number: int) -> Iterator[int]:
    return (n for n in range(1, number + 1) if number % n == 0)


LOWER = (
    "Lower training.buffer_tokens or sizing.expansion, set training.accumulation to auto, load the base model in "
    "bfloat16 (model.dtype), or train fewer replacements at a time"
)
"""What to change where a run does not fit."""


def check_memory(config: RunConfig, plan: Plan, lower: str = LOWER) -> None:
    """Check that a run fits into memory and onto the disk.

    Args:
        config: the run.
        plan: what it needs.
        lower: what to change where it does not fit.

    Raises:
        MxdError: it does not; the message lists the parts, largest first, and what to lower.
    """
    memories = {str(plan.device): (plan.memory, free_memory(plan.device))}
    if plan.host:
        memories["the host"] = (plan.host, free_memory(torch.device("cpu")))
    for name, (phases, free) in memories.items():
        phase, needed = peak(phases)
        if needed > free:
            raise MxdError(
                f"the run needs {amount(needed)} and {amount(free)} are free on {name}: "
                f"{_listed(phases[phase])} (while {phase}). {lower}{_divided(plan.fitting)}."
            )
    free, written = free_disk(config.folder), sum(plan.disk.values())
    if written > free:
        raise MxdError(
            f"the run writes {amount(written)} and {amount(free)} are free at {config.folder}: "
            f"{_listed(plan.disk)}. Choose another folder with --out, or train fewer or smaller replacements at a time."
        )


def _divided(groups: Sequence[Sequence[int]]) -> str:
    """Return the options that train groups of blocks in runs of their own."""
    runs = " and ".join(f"--blocks '{list(group)}'" for group in groups)
    return f": {plural(len(groups), 'run')} fit, with names of their own (--run NAME) and {runs}" if groups else ""


def _listed(parts: Mapping[str, int]) -> str:
    """Return the parts of more than 2%, largest first."""
    shown = sorted(((n, part) for part, n in parts.items() if n > sum(parts.values()) // 50), reverse=True)
    return ", ".join(f"{part} {amount(n)}" for n, part in shown)


def prepare(
    config: RunConfig,
    model: Any = None,
    processes: Processes = ALONE,
    groups: int | None = None,
    shard: bool = False,
) -> tuple[RunConfig, Plan]:
    """Plan a run, check that it fits, and print what is about to be trained.

    Args:
        config: the run.
        model: as for ``plan_run``.
        processes: those of the launch.
        groups: as for ``plan_run``.
        shard: as for ``plan_run``.

    Returns:
        The config with ``accumulation`` filled in, the same in every process, and the plan.

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
    one = ", one after the other" if plan.phases > 1 else ""
    parts = f", each batch in {number} parts" if number > 1 else ""
    whole = training.steps * training.batch_tokens
    tokens = f"{whole:,} of {training.tokens:,} tokens, whole batches; " if whole < training.tokens else ""
    console.tell(
        f"{plural(len(plan.replacements), 'replacement')}, {plan.params:,} parameters{one}{parts}; "
        f"{tokens}memory on {plan.device}: {amount(needed)} while {phase}"
    )
    return config, plan
