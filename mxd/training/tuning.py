"""Tuning: the replacements of several blocks, spliced into the base model together, take each step together.

A batch is whole contexts. What is minimised is the loss of the spliced model's predictions (``TuneConfig.loss``), each
layer's normalized MSE and the penalty of its sparsity. Layers run as they are evaluated: a sparsity's thresholds and
running statistics stay as they were trained. The base model's forward is shared by all sets.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from mxd.common.errors import MxdError, typed
from mxd.common.stop import Stop
from mxd.data.activations import Batch, Cursor, locating
from mxd.data.checks import check_text
from mxd.data.contexts import counted_positions
from mxd.joint import Shares, TunedMLP, joint_backward
from mxd.model.frozen import FrozenModel
from mxd.model.unembedding import Unembedding
from mxd.splice import Splice
from mxd.training.loop import Loop, memory
from mxd.training.metrics import Metrics, Stats
from mxd.training.step import Trainee, learned, learning_rate, mean_sizes
from mxd.tuning import TuneConfig

SCALE_CONTEXTS = 8
"""Contexts of the first batch on which the size of activations is measured."""


def batches_of(contexts: Any, start: Cursor, size: int) -> Iterator[Batch]:
    """Yield batches of whole contexts, one after another, without activations.

    Args:
        contexts: a text's (``token_contexts``).
        start: where to begin.
        size: contexts in a batch.

    Raises:
        MxdError: the text differs from the one that was read up to ``start``.
    """
    stream, cursor, located = contexts(start.context), start, locating(contexts)
    rows = list(islice(stream, size))
    if start.text:
        check_text(start.text, located(start).text)
    while len(rows) == size:
        cursor = located(Cursor(cursor.context + size))
        yield Batch({}, torch.from_numpy(np.concatenate(rows)).long(), {}, cursor)
        rows = list(islice(stream, size))


class TunedStats(Stats):
    """What is counted of a layer, and the loss of the set that it is tuned with."""

    def __init__(self, units: int, width: int, device: torch.device, loss: str) -> None:
        super().__init__(units, width, device)
        self.loss = loss
        self.sums |= {name: torch.zeros((), dtype=torch.float64, device=device) for name in (loss, "counted")}

    def see_loss(self, total: float, counted: int) -> None:
        """Count the set's loss over one process' part of a step: its sum, and over how many targets."""
        self.sums[self.loss] += total
        self.sums["counted"] += counted

    def report(self, tokens_seen: int, dead_after: int) -> dict[str, float]:
        """Return the metrics since the last report, and clear the counts."""
        loss = float(self.sums[self.loss] / self.sums["counted"].clamp_min(1))
        return super().report(tokens_seen, dead_after) | {self.loss: loss}


@dataclass
class TuneMetrics(Metrics):
    """As a run's; the note beside the progress bar is about sets."""

    sets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Set -> names of its layers."""
    loss: str = "kl"

    def note(self) -> str:
        """Return the last loss of each set, and its layers' mean error."""
        parts = []
        for name, members in self.sets.items() if self.reported else ():
            lines = [self.reported[member] for member in members]
            nmse = sum(line["normalized_mse"] for line in lines) / len(lines)
            parts.append(f"{name}: {self.loss.upper()} {lines[0][self.loss]:.4f} NMSE {nmse:.4f}")
        return "  ".join(parts)


@dataclass
class TunedSet:
    """The replacements that are spliced in together."""

    name: str
    trainees: Sequence[Trainee]
    splice: Splice
    modules: Sequence[TunedMLP]

    @staticmethod
    def of(name: str, trainees: Sequence[Trainee], base: FrozenModel) -> "TunedSet":
        """Return a set with everything that splices it into the base model.

        Args:
            name: of the set.
            trainees: its layers, of different blocks.
            base: the base model.
        """
        modules = [TunedMLP(trainee.layer, base.mlp(trainee.number)).eval() for trainee in trainees]
        splice = Splice(base, {t.number: module for t, module in zip(trainees, modules, strict=True)})
        return TunedSet(name, trainees, splice, modules)

    def parameters(self) -> list[nn.Parameter]:
        """Return all that is tuned."""
        return [p for trainee in self.trainees for p in learned(trainee.layer).values()]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for trainee in self.trainees:
            trainee.optimizer.zero_grad()

    def clip(self, most: float) -> None:
        """Clip the gradient of all layers together to a norm; a parameter counts as its optimiser sees it, scaled."""
        parts = [
            trainee.optimizer.factors.get(name, 1.0) * torch.linalg.vector_norm(p.grad)
            for trainee in self.trainees
            for name, p in trainee.optimizer.parameters.items()
            if p.grad is not None
        ]
        norm = torch.linalg.vector_norm(torch.stack(parts))
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_((most / (norm + 1e-6)).clamp_max(1.0))

    def step(self, lr: float) -> None:
        """Update the weights."""
        for trainee in self.trainees:
            trainee.optimizer.step(lr)


@dataclass
class TuneLoop(Loop):
    """A tuning under way; its parts are a loop's, but for the batches and what happens on each."""

    how: TuneConfig = field(default_factory=TuneConfig)
    sets: Sequence[TunedSet] = ()
    unembedding: Unembedding | None = None
    excluded: Sequence[int] = ()
    """Tokens that are no targets, and at which layers are not compared with the base MLP: special ones."""
    command: ClassVar[str] = "tune"

    def initialised(self, batches: Iterator[Batch], stop: Stop) -> Iterator[Batch]:
        """Measure the size of activations on the first batch, for the learning rates, and return all batches."""
        first = next(batches)
        sites = self.base.record(
            self._contexts(first)[:SCALE_CONTEXTS], sorted({trainee.number for trainee in self.trainees})
        )
        for trainee in self.trainees:
            x, y = (part[:, 1:].flatten(0, 1).float() for part in sites[trainee.number])  # sinks would count for most
            trainee.scale(mean_sizes((x, y), self.processes))
        return chain(iter([first]), batches)

    def train_batch(self, batch: Batch) -> None:
        """Let every set take a step."""
        with memory(f"at step {self.step:,}", self._less()):
            self._step(batch)
        self.cursor = batch.cursor

    def _step(self, batch: Batch) -> None:
        begin, how, training = time.perf_counter(), self.how, self.config.training
        ids = self._contexts(batch)
        own = ids[self.processes.rank :: self.processes.world]
        counted = torch.from_numpy(counted_positions(ids.numpy(), self.excluded))
        shares = Shares(int(counted[:, 1:].sum()), int(counted.sum()), self.processes.world)
        measured = (self.step + 1) % training.log_every == 0 or self.step + 1 == training.steps
        for tuned in self.sets:
            tuned.zero_grad()
        with self.processes.together_on(self.base.device):
            for part in own.chunk(how.accumulation):
                self._part(part, shares, compared=measured or how.nmse > 0)
        for tuned in self.sets:
            self.processes.average([p.grad for p in tuned.parameters() if p.grad is not None])
            if how.clip_norm is not None:
                tuned.clip(how.clip_norm)
            tuned.step(learning_rate(self.step, training))
        self.step += 1
        for trainee in self.trainees:
            trainee.stats.seconds += (time.perf_counter() - begin) / len(self.trainees)

    def _contexts(self, batch: Batch) -> Int[Tensor, "contexts seq"]:
        return batch.ids.view(-1, self.config.data.context)

    def _part(self, ids: Int[Tensor, "contexts seq"], shares: Shares, compared: bool) -> None:
        """Run every set forward and backward over some contexts of a step, and add to its gradients."""
        base, how, unembedding = self.base, self.how, self.unembedding
        assert unembedding is not None
        counted = torch.from_numpy(counted_positions(ids.numpy(), self.excluded)).to(base.device)
        ids = ids.to(base.device)
        with torch.no_grad():
            hidden = unembedding.hidden(ids) if how.loss == "kl" else None
        for tuned in self.sets:
            for module in tuned.modules:
                module.compare, module.held = compared, how.nmse > 0
            total, objective = joint_backward(
                base, unembedding, tuned.splice, tuned.modules, ids, counted, how, shares, hidden
            )
            if not objective.isfinite():
                raise MxdError(self._diverged(tuned))
            self._count(tuned, counted, float(total))

    def _count(self, tuned: TunedSet, counted: Bool[Tensor, "contexts seq"], loss: float) -> None:
        """Count what the last passes of a set have shown."""
        seen, kept = (self.step + 1) * self.config.training.batch_tokens, counted.flatten()
        for trainee, module in zip(tuned.trainees, tuned.modules, strict=True):
            stats, found = trainee.stats, module.compared
            assert isinstance(stats, TunedStats)
            stats.see_loss(loss, int(counted[:, 1:].sum()))
            stats.last_active.masked_fill_(module.code.active_units(len(stats.last_active)), seen)
            if module.compare and found is not None:
                with torch.no_grad():
                    stats.see(found.y[kept], found.error[kept], found.nmse[kept].mean(), module.code.at(kept), seen)
            module.compared = None

    def _less(self) -> str:
        """Return what to do where memory runs out; both options give the same layers, up to rounding."""
        config = typed(self.config.folder / "config.yaml")
        return (
            f"continue with mxd tune {config} --resume --accumulation {2 * self.how.accumulation} (a step's contexts "
            "in more parts), or --checkpointing. In a new tuning lower --batch-tokens or tune fewer sets at a time."
        )

    def _diverged(self, tuned: TunedSet) -> str:
        return (
            f"{tuned.name} diverged at step {self.step + 1:,}: its loss is not finite. The last saved state stays; in "
            "a new run lower --lr or --clip-norm, or leave this set out."
        )
