"""What a run needs, for people: its work, memory by part and phase, disk and time; and the same as plain numbers."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from mxd.common.numbers import plural
from mxd.planning.plan import Plan, peak
from mxd.planning.time import Speeds, Times, product_seconds


def plan_tables(plan: Plan, speeds: Speeds, times: Times, tokens: int, steps: int) -> Iterator[Table | str]:
    """Yield the work of a run, its memory by part and phase, what it writes, and how long it takes.

    Args:
        plan: what the run needs.
        speeds: of the machine, measured.
        times: seconds of one step, by part.
        tokens: tokens of one step.
        steps: steps of the run.
    """
    yield _work(plan, speeds)
    yield _memory(f"memory of a process on {plan.device}, MiB", plan.memory)
    if plan.host:
        yield _memory("memory of a process on the host, MiB", plan.host)
    written = ", ".join(f"{part} {n / 2**20:,.0f}" for part, n in plan.disk.items())
    yield f"disk, MiB: {written}; in all {sum(plan.disk.values()) / 2**20:,.0f}"
    if plan.accumulation > 1:
        yield f"each batch is processed in {plan.accumulation} parts"
    yield from _time(plan, times, tokens, steps)


def plan_numbers(plan: Plan, speeds: Speeds, times: Times, tokens: int, steps: int) -> dict[str, Any]:
    """Return the numbers behind the tables; arguments as ``plan_tables``."""
    return {
        **({"sets": {name: list(own) for name, own in plan.sets.items()}} if plan.sets else {}),
        "replacements": {name: layer.num_params for name, (_, layer) in plan.replacements.items()},
        "unfactorised": {name: layer.unfactorised_params for name, (_, layer) in plan.replacements.items()},
        "device": str(plan.device),
        "accumulation": plan.accumulation,
        "memory_bytes": plan.memory,
        "host_bytes": plan.host,
        "peak_bytes": peak(plan.memory)[1],
        "disk_bytes": plan.disk,
        "work_per_token": {name: asdict(work) for name, work in plan.work.items()},
        "groups": plan.layout.groups,
        "speeds": asdict(speeds),
        "steps": steps,
        "seconds_per_step": {**asdict(times), "step": times.step},
        "tokens_per_second": tokens / times.step,
    }


def _work(plan: Plan, speeds: Speeds) -> Table:
    table = Table(
        title=f"{plural(len(plan.replacements), 'replacement')}, {plan.params:,} parameters; work of {_doing(plan)}",
        title_justify="left",
    )
    for title in ("", "units", "parameters", "unfactorised", "MFLOP a token", "kB moved a token", "floor, us a token"):
        table.add_column(title, justify="right" if title else "left")
    for name, work in plan.work.items():
        members = plan.sets.get(name, (name,) if name in plan.replacements else ())
        layers = [plan.replacements[member][1] for member in members]
        counts = (sum(layer.num_units or 0 for layer in layers), sum(layer.num_params for layer in layers))
        unfactorised = sum(layer.unfactorised_params for layer in layers)
        params = (*(f"{count:,}" for count in counts), f"{unfactorised:,}") if layers else ("",) * 3
        floor = product_seconds(work, speeds) if layers else work.flops / speeds.base
        cells = (f"{work.flops / 1e6:,.2f}", f"{(work.moved + work.fixed) / 1e3:,.0f}", f"{1e6 * floor:,.1f}")
        table.add_row(name, *params, *cells)
    return table


def _doing(plan: Plan) -> str:
    return "tuning" if plan.sets else "training"


def _time(plan: Plan, times: Times, tokens: int, steps: int) -> Iterator[str]:
    world = len(plan.layout.shares)
    parts = {"base model": times.base, "steps": times.steps, "optimiser": times.optimizer}
    if world > 1:
        parts |= {"exchange of activations": times.exchange, "sum of gradients": times.gradients}
        yield (
            f"{world} processes, groups of {plan.layout.parts}; for each step a process receives "
            f"{times.exchanged / 2**20:,.1f} MiB of activations and sends {times.reduced / 2**20:,.1f} MiB of gradients"
        )
    listed = ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items())
    yield f"expected: {times.step:.3f} s a step ({listed}), {tokens / times.step:,.0f} tokens/s"
    if plan.phases > 1:
        yield f"{plan.phases} blocks one after the other: a step here is one of each; memory is that of the largest"
    yield f"in all {plural(steps, 'step')} of {_doing(plan)}, {_span(steps * times.step)}"


def _span(seconds: float) -> str:
    hours = seconds / 3600
    return f"{seconds / 60:,.1f} minutes" if hours < 2 else f"{hours:,.1f} hours"


def _memory(title: str, phases: Mapping[str, Mapping[str, int]]) -> Table:
    table = Table("part", title=title, title_justify="left")
    for phase in phases:
        table.add_column(phase, justify="right")
    for part in dict.fromkeys(part for parts in phases.values() for part in parts):
        cells = (f"{parts[part] / 2**20:,.0f}" if part in parts else "" for parts in phases.values())
        table.add_row(part, *cells)
    table.add_section()
    table.add_row("all", *(f"{sum(parts.values()) / 2**20:,.0f}" for parts in phases.values()), style="bold")
    return table
