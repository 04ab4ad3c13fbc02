"""What a run needs, as one record."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace

import torch

from mxd.layers import ReplacementConfig
from mxd.planning.layout import ParallelLayout
from mxd.planning.profiler import Cost


@dataclass(frozen=True)
class Work:
    """What the base model or a replacement does for one token."""

    flops: float
    """FLOPs of dense products."""
    rounded: float
    """Those among them that are in bfloat16."""
    moved: float
    """Bytes read and written, in proportion to the tokens."""
    fixed: float = 0.0
    """Bytes read and written once in a step, divided by its tokens."""


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
    """The same in the host's memory; empty where the device is the CPU."""
    disk: dict[str, int]
    """Part -> bytes."""
    layout: ParallelLayout
    """Which process trains what in a launch of many; the memory is that of the process that needs most."""
    site_bytes: dict[int, int]
    """Block -> bytes of one token's activations there, input and output."""
    work: dict[str, Work]
    """``base model`` and every replacement, or set of them that is tuned -> work for a token."""
    phases: int = 1
    """Blocks that are trained one after the other: the memory is that of the one that needs most, and a step of the run
    is one of each."""
    sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of a tuning, set -> names of its layers; ``work`` is then by set."""
    fitting: tuple[tuple[int, ...], ...] = ()
    """Where not all blocks fit into one run: groups of them that do, as few as can be."""

    @property
    def params(self) -> int:
        """Parameters of all replacements."""
        return sum(config.num_params for _, config in self.replacements.values())


def work_per_token(cost: Cost, tokens: int | float, fixed: float = 0.0) -> Work:
    """Divide a cost by the number of tokens that it is for.

    Args:
        cost: of one call.
        tokens: for so many.
        fixed: bytes read and written once in a step, divided by its tokens.
    """
    return Work(cost.flops / tokens, cost.rounded / tokens, cost.moved / tokens, fixed)


def peak(phases: Mapping[str, Mapping[str, int]]) -> tuple[str, int]:
    """Return the phase that needs the most memory, and how much that is."""
    name = max(phases, key=lambda phase: sum(phases[phase].values()), default="")
    return name, sum(phases[name].values()) if name else 0


def one_by_one(whole: Plan, first: Plan, last: Plan) -> Plan:
    """Return the plan of a run whose blocks are trained one after the other.

    The base model's work is metered at two blocks; that at the others lies between, by their numbers.

    Args:
        whole: as if all blocks were trained at once, by one group of processes.
        first: that of the lowest block alone.
        last: that of the highest block alone, with layers in the blocks below: it needs the most memory.
    """
    numbers = sorted(block for block, _ in whole.replacements.values())
    share = sum((number - numbers[0]) / max(1, numbers[-1] - numbers[0]) for number in numbers)
    ends = zip(astuple(first.work["base model"]), astuple(last.work["base model"]), strict=True)
    base = Work(*((len(numbers) - share) * a + share * b for a, b in ends))
    disk = last.disk | {"layers": whole.disk["layers"]}
    work, phases = whole.work | {"base model": base}, len(numbers)
    return replace(whole, memory=last.memory, host=last.host, disk=disk, work=work, phases=phases)
