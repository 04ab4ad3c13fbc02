"""What one process of a launch does in tests/test_distributed.py where no model is needed: it talks, and one is gone.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python tests/talking.py WHAT

WHAT the last process does, while the others wait for it: kill (dies), stop (SIGSTOP; stop-late: the others have a short
timeout), late (comes after it), leave (fails outside of ``together``), fail (inside, with an error that nobody
foresaw).
"""

import os
import signal
import sys
import time

import torch

from mxd.common import processes as launch
from mxd.common.errors import MxdError
from mxd.common.processes import Processes, launched
from mxd.common.stop import stop_signal


def gone(what: str, processes: Processes) -> None:
    """Be gone, in one way or another."""
    if what in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    if what == "late":
        time.sleep(5)
    if what == "leave":
        raise MxdError("out of luck\nand of memory")
    with processes.together():
        if what == "fail":
            raise ValueError("an oversight")


def main(what: str) -> None:
    """Say that it is ready; once told to, talk, and be gone or wait."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    launch.QUIET, launch.PATIENCE = 1.5, 2.0
    with launched(0.05 if what in ("stop-late", "late") else 10.0) as processes:
        assert processes.gather(processes.rank) == list(range(processes.world))
        assert torch.equal(processes.add(torch.ones(3)), torch.full((3,), float(processes.world)))
        if processes.rank == processes.world - 1:
            gone(what.removesuffix("-late"), processes)
        with stop_signal(), processes.together():
            sys.stdout.write("waiting\n")
            sys.stdout.flush()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except MxdError as error:
        sys.stderr.write(f"{type(error).__name__}, {'shared' if error.shared else 'own'}: {error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)  # as the command line does
