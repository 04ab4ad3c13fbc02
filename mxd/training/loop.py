"""The loop of a run: it takes batches from the stream, and every replacement takes a step on each."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, TypeVar

from mxd.common.errors import MxdError, SharedError, typed
from mxd.common.processes import Processes
from mxd.common.progress import progress
from mxd.common.stop import Interrupted, Stop, Stopped, stop_signal
from mxd.config import RunConfig
from mxd.data.activations import Batch, Cursor
from mxd.layers import Covariance
from mxd.model.frozen import FrozenModel
from mxd.training.metrics import Metrics
from mxd.training.phases import Phase
from mxd.training.saving import Saver
from mxd.training.source import bos_activations, covariances
from mxd.training.step import Trainee, learning_rate, mean_sizes, train_step

T = TypeVar("T")

STOP_EVERY = 8
"""Steps between two exchanges in which the processes of a launch learn whether one of them was told to stop."""


@dataclass
class Loop:
    """A phase of a run under way."""

    phase: Phase
    """What is trained."""
    base: FrozenModel
    trainees: Sequence[Trainee]
    """The replacements that this process trains."""
    metrics: Metrics
    saver: Saver
    processes: Processes
    """All processes of the run."""
    shard: bool
    """Whether each replacement, once initialised, is divided among the processes of a group."""
    step: int
    """The last finished step."""
    cursor: Cursor
    """The position in the text after that step."""
    command: ClassVar[str] = "train"
    """Of mxd, with which the run is resumed."""

    @property
    def config(self) -> RunConfig:
        """The run, with the blocks of this phase."""
        return self.phase.config

    def run(self, stream: Iterator[Batch]) -> None:
        """Train to the last step and write every layer.

        Raises:
            Interrupted: after Ctrl-C or SIGTERM, once everything is saved and something is left to train.
            MxdError: the text ended or failed, memory ran out, or a layer diverged.
        """
        training = self.config.training
        done, total = self.step * training.batch_tokens, training.steps * training.batch_tokens
        self.metrics.begin(self.step)
        with stop_signal() as stop, progress(self.phase.title, total, done=done) as advance:
            batches = self.batches(stream, stop)
            if self.step == 0:
                batches = self.initialised(batches, stop)
            for batch in batches:
                self.train_batch(batch)
                last = self.step == training.steps
                if self.step % training.log_every == 0 or last:
                    self.saver.check_losses(self.step)
                    self.metrics.report(self.step, learning_rate(self.step - 1, training))
                stopping = self.stopping(stop)
                if self.step % training.save_every == 0 or last or stopping:
                    self.save()
                advance(training.batch_tokens, self.metrics.note())
                if stopping and not last:
                    raise self.stopped(stop)
        self.metrics.end()
        self.saver.finish(self.step, self.cursor)
        if self.phase.more and self.processes.any(stop.is_set):
            raise self.stopped(stop)

    def train_batch(self, batch: Batch) -> None:
        """Let every replacement take a step."""
        training = self.config.training
        for trainee in self.trainees:
            begin = time.perf_counter()
            with memory(f"at step {self.step:,}, in {trainee.name}"):
                train_step(trainee, *batch.sites[trainee.number], training, self.step)
            trainee.stats.seconds += time.perf_counter() - begin  # on a GPU: until its work is queued
        self.step += 1
        self.cursor = batch.cursor

    def batches(self, stream: Iterator[Batch], stop: Stop) -> Iterator[Batch]:
        """Yield a batch for each remaining step."""
        while self.step < self.config.training.steps:
            yield self.next_batch(stream, stop)

    def initialised(self, batches: Iterator[Batch], stop: Stop) -> Iterator[Batch]:
        """Initialise every replacement from the means that come with the first batch, and return all batches.

        Replacements are divided among processes only afterwards, since each is initialised as a whole.
        """
        moments = self.covariances(stop)  # before the first batch is asked for: one window is in memory at a time
        first = next(batches)
        with self.processes.together():
            bos = bos_activations(self.config, self.base)
        settings = self.config.training.settings
        for trainee in self.trainees:
            block = trainee.number
            if settings.scaled:
                trainee.scale(mean_sizes(first.sites[block], trainee.processes))
                trainee.enlarge()
            trainee.initialise(first.means[block], bos.get(block), settings, moments.get(block))
            if self.shard:
                trainee.shard()
        return chain(iter([first]), batches)  # ``iter``: a list would keep the first batch alive during the whole run

    def covariances(self, stop: Stop) -> dict[int, Covariance]:
        """Return block -> second moments of the first tokens, if some replacement of the run asks for them.

        Raises:
            Interrupted: as ``next_batch``; and whatever else it raises, but a text that ends is no error here.
        """
        if not any(replacement.needs_covariance for replacement in self.config.replacements):
            return {}
        group, shares = self.trainees[0].processes, self.phase.layout.shares
        args = self.config, self.base, self.processes, group, shares, self.phase.record, self.phase.text
        return self.filled(lambda: covariances(*args), stop)

    def next_batch(self, stream: Iterator[Batch], stop: Stop) -> Batch:
        """Return the next batch; where there is none, save what has been trained so far.

        Raises:
            Interrupted: stopped while the buffer was filled.
            MxdError: the text ended, or whatever the stream raises.
        """
        batch = self.filled(lambda: next(stream, None), stop)
        if batch is not None:
            return batch
        self.save()
        self.saver.finish(self.step, self.cursor)
        training = self.config.training
        raise MxdError(
            f"the text ended after {self.step * training.batch_tokens:,} tokens, before the {training.tokens:,} "
            f"asked for (streamed text is read once). The layers trained so far are in {self.config.folder}."
        )

    def filled(self, ask: Callable[[], T], stop: Stop) -> T:
        """Return what a stream answers; where that fails or is stopped, save what has been trained so far.

        Args:
            ask: asks a stream, which may fill the buffer first.
            stop: tells that the run was told to stop.

        Raises:
            Interrupted: stopped while the buffer was filled.
            MxdError: whatever the stream raises.
        """
        try:
            at_once = nullcontext() if self.processes.many else stop.at_once()  # else the others would wait for it
            with at_once, memory(f"after step {self.step:,}, where the base model fills the buffer"):
                return ask()
        except Stopped:
            self.save()
            raise self.stopped(stop) from None
        except MxdError as error:
            if not self.processes.many or isinstance(error, SharedError):  # a save needs all processes
                self.save()
            raise

    def save(self) -> None:
        """Save the state after the last finished step."""
        self.saver.save(self.step, self.cursor)

    def stopping(self, stop: Stop) -> bool:
        """Whether to stop after this step; the answer is the same in all processes."""
        if not self.processes.many:
            return stop.is_set
        return self.step % STOP_EVERY == 0 and self.processes.any(stop.is_set)

    def stopped(self, stop: Stop) -> Interrupted:
        """Return the error to raise once everything is saved."""
        return stop.error(
            f"stopped at step {self.step:,} of {self.config.training.steps:,}; everything is saved.",
            f"mxd {self.command} {typed(self.config.folder / 'config.yaml')} --resume",
        )


LESS = (
    "free memory and continue with --resume. Or start anew, with a larger training.accumulation (the batch in more "
    "parts), a smaller training.buffer_tokens or sizing.expansion, or fewer replacements."
)
"""What to do where memory runs out."""


@contextmanager
def memory(where: str, less: str = LESS) -> Iterator[None]:
    """Turn running out of memory into an error.

    Args:
        where: where that is.
        less: what to do about it.

    Raises:
        MxdError: memory ran out.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("allocate memory|out of memory|ALLOC_FAILED", str(error)):
            raise
        raise MxdError(
            f"out of memory {where}. The last saved state is kept: {less}\n"
            f"{(str(error) or type(error).__name__).splitlines()[0]}"
        ) from error
