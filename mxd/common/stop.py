"""Requests to stop: by Ctrl-C, or by a scheduler's SIGTERM."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from mxd.common.errors import MxdError
from mxd.common.progress import console


class Interrupted(MxdError):
    """Work was stopped by the user; everything was saved."""

    exit_code, shared = 130, True

    def __init__(self, saved: str, command: str) -> None:
        """Take what was saved, as a sentence, and the command that continues it."""
        super().__init__(f"{saved} To continue: {command}")
        self.saved = saved


class Preempted(Interrupted):
    """Training was stopped by SIGTERM; everything was saved, so that this is an orderly end."""

    exit_code = 0


class Stopped(BaseException):
    """Ends a block that may be interrupted anywhere (``Stop.at_once``); never leaves mxd."""


class Stop:
    """Whether and how the process was asked to stop."""

    def __init__(self) -> None:
        self.number = 0
        """The signal, or 0."""
        self._at_once = False

    @property
    def is_set(self) -> bool:
        """Whether the process was asked to stop."""
        return self.number != 0

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a request interrupt the block with ``Stopped``, instead of only setting the flag.

        For work that may take long and can be discarded, such as waiting for text or filling a window.

        Raises:
            Stopped: the process was asked to stop, before or within the block.
        """
        self._at_once = True
        try:
            if self.number:
                raise Stopped
            yield
        finally:
            self._at_once = False

    def ask(self, number: int) -> None:
        """Take note of a signal.

        Raises:
            Stopped: it came within ``at_once``.
        """
        self.number = number
        with suppress(RuntimeError, OSError):  # the signal may have come in the middle of other output
            console.tell("stopping once everything up to the last step is saved; press again to quit at once")
        if self._at_once:
            raise Stopped

    def error(self, saved: str, command: str) -> Interrupted:
        """Return the error to raise when everything is saved; arguments as those of ``Interrupted``."""
        return (Preempted if self.number == signal.SIGTERM else Interrupted)(saved, command)


@contextmanager
def continued_by(command: str) -> Iterator[None]:
    """Tell whoever interrupts a block of several parts what continues the whole of it.

    Raises:
        Interrupted: the block was interrupted, in a part that saves itself or between two.
    """
    try:
        yield
    except Interrupted as error:
        raise type(error)(error.saved, command) from None
    except KeyboardInterrupt:
        raise Interrupted("interrupted; what is finished is saved.", command) from None


_listening: list[Stop] = []


def asked_to_stop() -> bool:
    """Return whether this process was asked to stop."""
    return any(stop.is_set for stop in _listening)


@contextmanager
def stop_signal() -> Iterator[Stop]:
    """Turn the first Ctrl-C or SIGTERM into a request; the second acts as usual.

    A signal that the process was started to ignore, as shells do for jobs in the background of a script, stays ignored.
    Outside the main thread, where Python sets no handlers, nothing changes.
    """
    stop = Stop()

    def ask(number: int, frame: Any) -> None:
        for name, handler in previous.items():
            signal.signal(name, handler)
        stop.ask(number)

    try:
        handled = [name for name in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(name) != signal.SIG_IGN]
        previous = {name: signal.signal(name, ask) for name in handled}
    except ValueError:
        yield stop
        return
    _listening.append(stop)
    try:
        yield stop
    finally:
        _listening.remove(stop)
        for name, handler in previous.items():
            signal.signal(name, handler)
