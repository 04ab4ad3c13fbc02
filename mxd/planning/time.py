"""How long a run takes, on one process or many: work divided by measured speeds.

    step = base / P + exchange + max over groups (steps / s + Adam) + gradients

for P processes in groups of s: all P share the base model's forward, the s of a group share its replacements' steps,
and each of them updates all parameters. Computation takes ``FLOPs / product speed + bytes / copy speed``; the exchange
of activations and the sum of gradients take ``bytes / network speed``. Nothing is assumed to overlap.
"""

from dataclasses import dataclass, replace

import torch

from mxd.common.hardware import copy_speed, product_speed
from mxd.config import RunConfig
from mxd.data.exchange import RankPart
from mxd.model.autocast import under_autocast
from mxd.model.loading import DTYPES
from mxd.planning.layout import ParallelLayout
from mxd.planning.plan import Plan, Work


@dataclass(frozen=True)
class Speeds:
    """Speeds of one process's device, while the other processes run, too."""

    products: float
    """FLOPs a second of float32 products, or TF32 ones where a run asks for them."""
    rounded: float
    """FLOPs a second of bfloat16 products, which select the candidate units."""
    base: float
    """FLOPs a second in the base model's dtype."""
    copies: float
    """Bytes a second read and written."""
    network: float | None = None
    """Bytes a second that a process sends while it receives as many; ``None``: unknown."""


@dataclass(frozen=True)
class Times:
    """Where the seconds of a step go, for the slowest group."""

    base: float
    """The base model's forward, over a process's share of the tokens."""
    steps: float
    """Forward and backward of the replacements."""
    optimizer: float
    """Optimiser steps, the same in every process of a group."""
    exchange: float
    """Sending activations to the processes that train on them."""
    gradients: float
    """Summing gradients over a group."""
    exchanged: float
    """Bytes of activations that a process receives for a step."""
    reduced: float
    """Bytes of gradients that a process sends for a step."""

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.base + self.steps + self.optimizer + self.exchange + self.gradients


def measured_speeds(config: RunConfig, device: torch.device, width: int, network: float | None = None) -> Speeds:
    """Measure the device at hand, in about a second.

    Args:
        config: the run, which says in what dtypes products are computed.
        device: the device.
        width: of the base model.
        network: bytes a second between processes.
    """
    tf32 = config.training.tf32
    products = product_speed(device, tf32=tf32 != "off")
    exact = config.training.candidates == config.training.dense == "float32"
    rounded = products if exact else product_speed(device, torch.bfloat16)
    dtype = DTYPES[config.model.dtype]
    if config.training.inputs == "base" and under_autocast(config.data.autocast, config.model.dtype, device, width):
        dtype = torch.bfloat16
    base = products if dtype == torch.float32 and tf32 != "encoder" else product_speed(device, dtype)
    return Speeds(products, rounded, base, copy_speed(device), network)


def product_seconds(work: Work, speeds: Speeds) -> float:
    """Return the seconds that a replacement's products take for a token."""
    return (work.flops - work.rounded) / speeds.products + work.rounded / speeds.rounded


def step_times(plan: Plan, tokens: int, speeds: Speeds, factor: float = 1.0) -> Times:
    """Return where the seconds of a step go.

    Args:
        plan: what the run needs, and how it is divided.
        tokens: tokens in a step.
        speeds: those of each process.
        factor: multiplies the time of everything that is computed.
    """
    world, parts = len(plan.layout.shares), plan.layout.parts
    base = plan.work["base model"]
    times = []
    for group, share in zip(plan.layout.groups, plan.layout.shares[::parts], strict=True):
        work = [plan.work[name] for name in plan.sets or group]
        params = sum(plan.replacements[name][1].num_params for name in group)
        # Every process recorded 1 / world of the tokens itself; the rest of its part comes from the others.
        received = tokens / parts * sum(plan.site_bytes[block] for block in share.blocks) * (world - 1) / world
        # A ring all-reduce sends each float32 gradient (parts - 1) / parts times twice: to sum, and to spread the sums.
        reduced = 8 * params * (parts - 1) / parts
        times.append(
            Times(
                base=factor * tokens / world * (base.flops / speeds.base + base.moved / speeds.copies),
                steps=factor * tokens / parts * sum(product_seconds(w, speeds) + w.moved / speeds.copies for w in work),
                optimizer=factor * tokens * sum(w.fixed for w in work) / speeds.copies,
                exchange=received / speeds.network if speeds.network else 0.0,
                gradients=reduced / speeds.network if speeds.network else 0.0,
                exchanged=received,
                reduced=reduced,
            )
        )
    return max(times, key=lambda group: group.step)


def expected(
    config: RunConfig, plan: Plan, network: float | None = None, tokens_per_second: float | None = None
) -> tuple[Speeds, Times]:
    """Measure the device at hand, and return its speeds and the times of a step.

    Args:
        config: the run.
        plan: what it needs.
        network: gigabytes a second between processes.
        tokens_per_second: measured rate of one process on this config, to which the computed time is scaled.
    """
    width = min(layer.d_in or 0 for _, layer in plan.replacements.values())
    speeds = measured_speeds(config, plan.device, width, network and network * 1e9)
    tokens = config.training.batch_tokens
    if tokens_per_second is None:
        return speeds, step_times(plan, tokens, speeds)
    groups = (tuple(plan.replacements),)
    alone = replace(plan, layout=ParallelLayout(groups, 1, (RankPart(tuple(plan.site_bytes)),)))
    bare = step_times(alone, tokens, speeds).step
    return speeds, step_times(plan, tokens, speeds, tokens / tokens_per_second / bare)
