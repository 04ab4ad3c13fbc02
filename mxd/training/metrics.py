"""What is counted during training, and where it goes: ``metrics.jsonl``, trackers, the note beside the progress bar."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from mxd.common.errors import MxdError, first_line
from mxd.common.files import atomic_file, settle, writing
from mxd.common.numbers import shown
from mxd.common.parsing import parse_json
from mxd.common.processes import Processes
from mxd.common.progress import console
from mxd.config import RunConfig
from mxd.layers import Code
from mxd.metrics.faithful import DEAD, NMSE

T = TypeVar("T")


class Stats:
    """Sums between two lines of metrics, and when each unit was last active; all but the time is part of the state."""

    def __init__(self, units: int, width: int, device: torch.device, measured: Sequence[str] = ()) -> None:
        """Begin with nothing counted.

        Args:
            units: of the layer.
            width: of its output.
            device: where it is trained.
            measured: what the layer's sparsity measures of a code (``Sparsity.measured``).
        """
        self.measured = tuple(measured)
        self.sums = {
            name: torch.zeros(shape, device=device)
            for name, shape in {"loss": (), "error": (), "y": (width,), "y_squared": (), "active": ()}.items()
        } | {name: torch.zeros((), device=device) for name in self.measured}
        self.tokens, self.seconds = 0, 0.0
        self.last_active = torch.zeros(units, dtype=torch.int64, device=device)

    @torch.no_grad()
    def see(
        self,
        y: Float[Tensor, "tokens d_out"],
        error: Float[Tensor, " tokens"],
        loss: Float[Tensor, ""],
        code: Code,
        tokens_seen: int,
        measures: Mapping[str, Float[Tensor, ""]] | None = None,
    ) -> None:
        """Count one part of a batch.

        Args:
            y: the MLP's outputs.
            error: squared error of each token.
            loss: normalized MSE of the part.
            code: the units active on it.
            tokens_seen: tokens trained on so far, the whole batch included.
            measures: the numbers of ``measured``, for this part.
        """
        self.tokens += len(y)
        self.sums["loss"] += loss.detach() * len(y)
        self.sums["error"] += error.detach().sum()
        self.sums["y"] += y.sum(0)
        self.sums["y_squared"] += torch.linalg.vector_norm(y).square()
        self.sums["active"] += code.active_count()
        for name, value in (measures or {}).items():
            self.sums[name] += value * len(y)
        self.last_active.masked_fill_(code.active_units(len(self.last_active)), tokens_seen)

    def merge(self, processes: Processes) -> None:
        """Add up what the processes of a group counted in the first of them; the others start again from zero."""
        if not processes.many:
            return
        for total in self.sums.values():
            processes.add(total)
        self.tokens = sum(processes.gather(self.tokens))
        processes.largest(self.last_active)
        if not processes.first:
            self.clear()

    def clear(self) -> None:
        """Set all counts to zero."""
        for total in self.sums.values():
            total.zero_()
        self.tokens, self.seconds = 0, 0.0

    def report(self, tokens_seen: int, dead_after: int) -> dict[str, float]:
        """Return the metrics since the last report, and clear the counts."""
        n = max(self.tokens, 1)
        variance = self.sums["y_squared"] - self.sums["y"].square().sum() / n  # sum |y - mean|^2 from two running sums
        values = {
            "normalized_mse": float(self.sums["loss"] / n),
            "fvu": float(self.sums["error"] / variance),
            "l0": float(self.sums["active"] / n),
            "dead_share": float((tokens_seen - self.last_active >= dead_after).float().mean()),
            **{name: float(self.sums[name] / n) for name in self.measured},
        }
        self.clear()
        return values


@dataclass
class Metrics:
    """The metrics of a run."""

    config: RunConfig
    names: Sequence[str]
    """All replacements of the run."""
    stats: Mapping[str, Stats]
    """Counts of the replacements that this process trains, by name."""
    processes: Processes
    """All processes of the run."""
    group: Processes
    """Those that train the same replacements."""
    accelerator: Any
    """accelerate's, which holds the trackers."""
    reported: dict[str, dict[str, float]] = field(default_factory=dict)
    """Replacement -> its last line of metrics."""

    def __post_init__(self) -> None:
        self.file = self.config.folder / "metrics.jsonl"

    def begin(self, step: int) -> None:
        """Start the trackers, and the clock of the first report; ``step`` is the last finished one.

        Raises:
            MxdError: a tracker does not start.
        """
        if self.config.training.trackers:
            try:
                self.accelerator.init_trackers("mxd", config=_flat(self.config.model_dump(mode="json")))
            except Exception as error:  # each tracker has errors of its own: no key, no server
                names = ", ".join(self.config.training.trackers)
                raise MxdError(f"cannot start the trackers {names}: {first_line(error)}") from error
        self.clock, self.clock_step = time.monotonic(), step

    def end(self) -> None:
        """End the trackers."""
        if self.config.training.trackers:
            self.accelerator.end_training()

    def merge(self) -> None:
        """As ``Stats.merge``, for every replacement of the group."""
        for stats in self.stats.values():
            stats.merge(self.group)

    def of_all(self, values: dict[str, T]) -> dict[str, T]:
        """Return name -> value for all replacements of the run; the first process of each group contributes its own."""
        parts = self.processes.gather(values if self.group.first else {})
        merged = {name: value for part in parts for name, value in part.items()}
        return {name: merged[name] for name in self.names if name in merged}

    def report(self, step: int, lr: float) -> None:
        """Write the metrics since the last report, and clear the counts.

        Args:
            step: the last finished step.
            lr: its learning rate.
        """
        training, now = self.config.training, time.monotonic()
        seen, dead_after = step * training.batch_tokens, training.dead_tokens
        rate = (step - self.clock_step) * training.batch_tokens / max(now - self.clock, 1e-9)
        self.merge()
        alone = self.of_all(
            {name: stats.seconds / max(step - self.clock_step, 1) for name, stats in self.stats.items()}
        )
        self.reported = self.of_all({name: stats.report(seen, dead_after) for name, stats in self.stats.items()})
        timing = {"seconds": round(now - self.clock, 3), "tokens_per_second": round(rate, 1)}
        with self.processes.together():
            if self.processes.first:
                self._write({"step": step, "tokens": seen}, {"lr": lr} | timing, alone)
        if training.trackers:
            for name, values in self.reported.items():
                self.accelerator.log({f"{name}/{k}": v for k, v in values.items()}, step=step)
        self.clock, self.clock_step = now, step

    def _write(self, before: dict[str, Any], after: dict[str, Any], alone: Mapping[str, float]) -> None:
        with writing(self.file), self.file.open("a", encoding="utf-8") as file:
            for name, values in self.reported.items():
                own = {"step_seconds": round(alone[name], 5)}  # of this replacement; the others are of all together
                file.write(json.dumps(before | {"replacement": name} | values | after | own) + "\n")

    def note(self) -> str:
        """Return the last report of the first three replacements, a line for each."""
        lines = [
            f"{name}: NMSE {NMSE.text(v['normalized_mse'])} FVU {shown('{:.2f}', v['fvu'])} "
            f"L0 {shown('{:.0f}', v['l0'])} dead {DEAD.text(v['dead_share'])}"
            for name, v in list(self.reported.items())[:3]
        ]
        more = len(self.reported) - len(lines)
        return "\n".join(lines) + (f" (and {more:,} more)" if more else "")

    def settle(self) -> int:
        """Flush ``metrics.jsonl`` to the disk, and return its size in bytes."""
        if not self.file.exists():
            return 0
        if self.processes.first:
            settle(self.file)
        return self.file.stat().st_size

    def cut(self, size: int, step: int) -> None:
        """Cut off the lines that were written after a state was saved: they will be written again.

        Args:
            size: bytes in the file when the state was saved.
            step: the step of that state.
        """
        with writing(self.file), self.file.open("ab") as file:
            if file.tell() < size:
                message = f"{self.file} is shorter than it was at step {step:,}: lines are missing"
                console.tell(message)
            file.truncate(min(file.tell(), size))

    def restart(self) -> None:
        """Remove the lines of these replacements, which will be written again, and any that has no end."""
        if not self.file.exists():
            return
        with writing(self.file):
            lines = self.file.read_bytes().splitlines(keepends=True)
        with atomic_file(self.file) as file:
            file.write_bytes(b"".join(line for line in lines if _replacement(line) not in (None, *self.names)))


def _replacement(line: bytes) -> str | None:
    """Return the replacement that a line is of; of a line that was not written to its end, ``None``."""
    try:
        return str(parse_json(line)["replacement"])
    except (ValueError, KeyError, TypeError):
        return None


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings for trackers, which take scalars only."""
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{prefix}{key}.").items()}
    return {prefix.rstrip("."): value if isinstance(value, int | float | str | bool) else str(value)}
