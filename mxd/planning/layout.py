"""What a run consists of: replacements with their names and complete configs, and which processes train which."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mxd.common.errors import MxdError
from mxd.config import RunConfig
from mxd.data.exchange import RankPart
from mxd.layers import ReplacementConfig, size
from mxd.model.frozen import FrozenModel

Replacements = Mapping[str, tuple[int, ReplacementConfig]]
"""Name -> (block, complete config)."""


def blocks_of(config: RunConfig, base: FrozenModel) -> tuple[int, ...]:
    """Return the numbers of a run's blocks, where its config may say ``all`` or count from the end.

    Raises:
        MxdError: the base model has no such block, or one is named twice.
    """
    if config.blocks == "all":
        return tuple(range(base.num_blocks))
    numbers = tuple(n + base.num_blocks if -base.num_blocks <= n < 0 else n for n in config.blocks)
    for number in numbers:
        base.check_block(number)
    if len(set(numbers)) < len(numbers):
        raise MxdError(f"blocks {list(config.blocks)} name a block twice: {base.source} has {base.num_blocks} blocks.")
    return numbers


def plan_layers(config: RunConfig, base: FrozenModel) -> dict[str, tuple[int, ReplacementConfig]]:
    """Return name -> (block, complete config) for everything the run trains.

    Raises:
        MxdError: a block out of range, a width or size that does not fit, or two replacements that are the same.
    """
    plans: dict[str, tuple[int, ReplacementConfig]] = {}
    for number in blocks_of(config, base):
        shape = base.mlp_shape(number)
        for replacement in config.replacements:
            for name in ("d_in", "d_out"):
                stated, own = getattr(replacement, name), getattr(shape, name)
                if stated not in (None, own):
                    raise MxdError(
                        f"{replacement.label}: {name} = {stated}, and that of block {number}'s MLP is {own}; leave "
                        f"{name} out of the config."
                    )
            complete = size(replacement.resolve(shape), config.sizing.expansion, config.sizing.match)
            complete = complete.model_copy(update={"bos_constant": config.data.bos and config.data.bos_constant})
            name = f"block{number}-{complete.slug}"
            alike = [n for n in plans if n == name or n.startswith(f"{name}-v")]
            if any(plans[n] == (number, complete) for n in alike):
                raise MxdError(f"the run trains {name} twice with the same settings; remove one from replacements.")
            plans[f"{name}-v{len(alike) + 1}" if alike else name] = (number, complete)
    return plans


@dataclass(frozen=True)
class ParallelLayout:
    """Groups of processes, each of which trains its own replacements; the processes of a group divide each batch."""

    groups: tuple[tuple[str, ...], ...]
    """The replacements that each group trains."""
    parts: int
    """Processes in a group."""
    shares: tuple[RankPart, ...]
    """The part of the stream that each process takes, by rank: group 0's processes come first."""


def parallel_layout(plans: Replacements, world: int, batch_tokens: int, groups: int | None = None) -> ParallelLayout:
    """Spread replacements over the processes of a launch.

    Groups cost nothing, since they train independently, while the processes of one group exchange gradients. So by
    default there are as many groups as replacements and processes allow, with about equally many parameters.

    Args:
        plans: name -> (block, complete config) of the replacements.
        world: number of processes.
        batch_tokens: tokens in a step.
        groups: number of groups; a divisor of ``world``, and no more than there are replacements.

    Raises:
        MxdError: the processes cannot form that many groups, or a group cannot divide a batch equally.
    """
    possible = [n for n in range(1, world + 1) if world % n == 0 and n <= len(plans)]
    count = possible[-1] if groups is None else groups
    if count not in possible:
        raise MxdError(
            f"{world} processes that train {len(plans)} replacements cannot make {count} groups; choose one of "
            f"{', '.join(map(str, possible))}."
        )
    parts = world // count
    if batch_tokens % parts:
        raise MxdError(
            f"the {parts} processes of a group cannot divide training.batch_tokens = {batch_tokens} equally; change "
            "it, the number of processes, or --groups."
        )
    loads = [0] * count  # parameters of each group; the largest replacement goes first, always to the lightest group
    members: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(plans, key=lambda name: -plans[name][1].num_params):
        lightest = loads.index(min(loads))
        loads[lightest] += plans[name][1].num_params
        members[lightest].append(name)
    blocks = [tuple(sorted({plans[name][0] for name in names})) for names in members]
    return ParallelLayout(
        groups=tuple(tuple(sorted(names, key=list(plans).index)) for names in members),
        parts=parts,
        shares=tuple(RankPart(blocks[rank // parts], rank % parts, parts) for rank in range(world)),
    )


def fitting_groups(blocks: Sequence[int], fits: Callable[[tuple[int, ...]], bool]) -> tuple[tuple[int, ...], ...]:
    """Divide blocks into as few groups of neighbours as fit, about equally large; into none where nothing fits.

    Args:
        blocks: at least one.
        fits: whether some of them fit together; asked of the last group, which is the largest and the highest.
    """

    def divided(number: int) -> list[tuple[int, ...]]:
        ends = [len(blocks) * i // number for i in range(number + 1)]
        return [tuple(blocks[start:end]) for start, end in itertools.pairwise(ends)]

    numbers = range(2, len(blocks) + 1)
    found = bisect_left(numbers, True, key=lambda number: fits(divided(number)[-1]))
    return tuple(divided(numbers[found])) if found < len(numbers) else ()
