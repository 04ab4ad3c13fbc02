"""Tuning: the replacements of several blocks, spliced into the base model together, take each step together.

A batch is whole contexts. What is minimised is the loss of the spliced model's predictions (``TuneConfig.loss``), each
layer's normalized MSE and the penalty of its sparsity. Layers run as they are evaluated: a sparsity's thresholds and
running statistics stay as they were trained. The base model's forward is shared by all sets.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxd.common.errors import MxdError
from mxd.common.stop import Stop
from mxd.data.activations import Batch, Cursor
from mxd.data.checks import check_text
from mxd.data.contexts import counted_positions
from mxd.layers.losses import normalize, squared_error
from mxd.model.families import unwrap
from mxd.model.frozen import FrozenModel
from mxd.model.unembedding import Unembedding
from mxd.ops.tiled import tiled_sum
from mxd.splice import Splice
from mxd.training.loop import Loop
from mxd.training.metrics import Metrics, Stats
from mxd.training.step import Trainee, learned, learning_rate, mean_sizes
from mxd.tuning import TuneConfig

LOGITS = 2**24
"""Logits that exist at a time, of the base and of the spliced model each: 64 MiB in float32."""

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
    stream, number = contexts(start.context), start.context
    while len(rows := list(islice(stream, size))) == size:
        if start.text and number == start.context:
            check_text(start.text, contexts.digest(number))
        number += size
        ids = torch.from_numpy(np.concatenate(rows)).long()
        yield Batch({}, ids, {}, Cursor(number, 0, 0, contexts.digest(number)))


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


class TunedMLP(nn.Module):
    """A layer in its MLP's place, which remembers what its last forward adds to the loss."""

    def __init__(self, trainee: Trainee, base: nn.Module) -> None:
        super().__init__()
        self.layer = trainee.layer
        self._beside = trainee.stats, base  # in a tuple: no modules of this one
        self.counted: Bool[Tensor, " tokens"] | None = None
        """Where the layer is compared with the base MLP in the next forward; ``None``: nowhere."""
        self.held = False
        """Whether the normalized MSE is part of the loss; gradients then flow through the base MLP, too."""
        self.again = False
        """Whether the next forward repeats the last one (checkpointing): nothing is counted twice."""
        self.tokens_seen = 0
        self.nmse: Tensor = torch.zeros(())
        """Sum of the normalized MSE over the positions that count."""
        self.penalty: Tensor = torch.zeros(())

    def forward(self, x: Float[Tensor, "batch seq d_in"]) -> Float[Tensor, "batch seq d_out"]:
        """Return the layer's output."""
        stats, base = self._beside
        rows, y = x.flatten(0, -2), None
        if self.counted is not None or self.reads_output:
            with torch.set_grad_enabled(self.held or self.reads_output):
                y = base(x).flatten(0, -2)
        read = rows if y is None else self.layer.read(rows, y)
        code = self.layer.encode(read)
        out = self.layer.decode(read, code)
        self.penalty = self.layer.penalty(code)
        stats.last_active[code.active_units(len(stats.last_active))] = self.tokens_seen
        if self.counted is not None and y is not None:
            self._compare(read[self.counted], out[self.counted], y[self.counted].float())
        self.again = True
        return out.view(*x.shape[:-1], -1).to(x.dtype)

    def _compare(
        self, read: Float[Tensor, "tokens d_in"], out: Float[Tensor, "tokens d_out"], y: Float[Tensor, "tokens d_out"]
    ) -> None:
        """Take the normalized MSE against the base MLP's output, and count it."""
        error = squared_error(out, y)
        self.nmse = normalize(error, y) * len(y)
        if not self.again:
            with torch.no_grad():
                stats = self._beside[0]
                stats.see(y, error, self.nmse / max(len(y), 1), self.layer.encode(read), self.tokens_seen)

    @property
    def reads_output(self) -> bool:
        """Whether the layer reads the base MLP's output."""
        return self.layer.config.reads != "mlp_in"


@dataclass
class TunedSet:
    """The replacements that are spliced in together."""

    name: str
    trainees: Sequence[Trainee]
    splice: Splice
    modules: Sequence[TunedMLP]

    @staticmethod
    def of(name: str, trainees: Sequence[Trainee], base: FrozenModel) -> "TunedSet":
        """Return a set with everything that splices it into the base model."""
        modules = [TunedMLP(trainee, base.mlp(trainee.number)) for trainee in trainees]
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
        begin, how, training = time.perf_counter(), self.how, self.config.training
        ids = self._contexts(batch)
        own = ids[self.processes.rank :: self.processes.world]
        counted = torch.from_numpy(counted_positions(ids.numpy(), self.excluded))
        shares = Shares(int(counted[:, 1:].sum()), int(counted.sum()), self.processes.world)
        measured = (self.step + 1) % training.log_every == 0 or self.step + 1 == training.steps
        for tuned in self.sets:
            tuned.zero_grad()
        for part in own.chunk(how.accumulation):
            self._part(part, shares, compared=measured or how.nmse > 0)
        for tuned in self.sets:
            self.processes.average([p.grad for p in tuned.parameters() if p.grad is not None])
            if how.clip_norm is not None:
                tuned.clip(how.clip_norm)
            tuned.step(learning_rate(self.step, training))
        self.step += 1
        self.cursor = batch.cursor
        for trainee in self.trainees:
            trainee.stats.seconds += (time.perf_counter() - begin) / len(self.trainees)

    def _contexts(self, batch: Batch) -> Int[Tensor, "contexts seq"]:
        return batch.ids.view(-1, self.config.data.context)

    def _part(self, ids: Int[Tensor, "contexts seq"], shares: "Shares", compared: bool) -> None:
        """Run every set forward and backward over some contexts of a step, and add to its gradients."""
        how, unembedding = self.how, self.unembedding
        assert unembedding is not None
        ids = ids.to(self.base.device)
        counted = torch.from_numpy(counted_positions(ids.cpu().numpy(), self.excluded)).to(ids.device)
        with torch.no_grad():
            base = unembedding.hidden(ids)[:, :-1].flatten(0, 1) if how.loss == "kl" else None
        targets, kept = ids[:, 1:].flatten(), counted[:, 1:].flatten()
        loss = partial(_tile_loss, unembedding, base, targets, kept)
        size = max(1, LOGITS // self.base.vocabulary)
        for tuned in self.sets:
            for module in tuned.modules:
                module.counted = counted.flatten() if compared else None
                module.held, module.again = how.nmse > 0, False
                module.tokens_seen = (self.step + 1) * self.config.training.batch_tokens
            with tuned.splice.entered(), _checkpointed(self.base) if how.checkpointing else nullcontext():
                hidden = unembedding.hidden(ids)[:, :-1].flatten(0, 1)
                total = tiled_sum(hidden, loss, size)
                objective = total * shares.of_target
                objective = objective + sum(m.penalty for m in tuned.modules) * (counted.sum() * shares.of_token)
                if how.nmse:
                    objective = objective + how.nmse * shares.of_token * sum(m.nmse for m in tuned.modules)
                if not objective.isfinite():
                    raise MxdError(self._diverged(tuned))
                objective.backward()
            for trainee in tuned.trainees:
                assert isinstance(trainee.stats, TunedStats)
                trainee.stats.see_loss(float(total.detach()), int(kept.sum()))

    def _diverged(self, tuned: TunedSet) -> str:
        return (
            f"{tuned.name} diverged at step {self.step + 1:,}: its loss is not finite. The last saved state stays; in "
            "a new run lower --lr or --clip-norm, or leave this set out."
        )


@dataclass(frozen=True)
class Shares:
    """By what sums over one process' part of a step are multiplied, so that the processes' average is the mean."""

    targets: int
    """Targets of the step, over all processes."""
    tokens: int
    """Tokens of it that count."""
    world: int

    @property
    def of_target(self) -> float:
        """For sums over targets."""
        return self.world / max(self.targets, 1)

    @property
    def of_token(self) -> float:
        """For sums over tokens."""
        return self.world / max(self.tokens, 1)


def _tile_loss(
    unembedding: Unembedding,
    base: Float[Tensor, "tokens width"] | None,
    targets: Int[Tensor, " tokens"],
    kept: Bool[Tensor, " tokens"],
    hidden: Float[Tensor, "some width"],
    part: slice,
) -> Float[Tensor, ""]:
    """Return the sum of some targets' losses: the divergence from the base model, or their cross-entropy.

    Args:
        unembedding: makes logits of hidden states.
        base: the base model's final hidden states; ``None`` for the cross-entropy.
        targets: the tokens to predict.
        kept: which of them count.
        hidden: the spliced model's final hidden states of some tokens.
        part: where these are.
    """
    logits = unembedding.logits(hidden)
    if base is None:
        losses = F.cross_entropy(logits, targets[part].to(logits.device), reduction="none")
    else:
        with torch.no_grad():
            expected = unembedding.logits(base[part]).log_softmax(-1)
        losses = F.kl_div(logits.log_softmax(-1), expected, reduction="none", log_target=True).sum(-1)
    return losses[kept[part].to(losses.device)].sum()


@contextmanager
def _checkpointed(base: FrozenModel) -> Iterator[None]:
    """Run every block again in the backward pass, in place of keeping what happens inside it."""
    blocks = [unwrap(block) for block in base.blocks]
    own = [block.__dict__.get("forward") for block in blocks]  # set where accelerate has hooked a block

    def again(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for block in blocks:
        block.forward = again(block.forward)
    try:
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward
