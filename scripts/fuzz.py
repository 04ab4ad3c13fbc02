"""Feed hostile input to everything that reads files, names or words from elsewhere.

    python scripts/fuzz.py                                  # 10,000 inputs
    python scripts/fuzz.py --inputs 100000 --minutes 30 --seed 7 --json fuzz.json
    python scripts/fuzz.py --only layer --only config

Each input must be accepted, or refused with an MxdError. Anything else is a finding, and so is a loader that takes
longer than 5 seconds, that needs more than 1 GiB, that ends the process, or that changes anything in the watched folder
around the input but its own output. Every finding is made smaller (hypothesis) and saved. Exit code 1 if there is one.

Each loader runs in a process of its own. Inputs are drawn anew from the seed; the same seed gives the same inputs.
"""

import argparse
import contextlib
import faulthandler
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.errors import Flaky  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fuzzing.targets import TARGETS, Target  # noqa: E402

from mxd.common.errors import MxdError  # noqa: E402

SECONDS = 5.0
"""A loader that takes more time of the processor hangs."""
WAIT = 30.0
"""So does one that waits longer."""
STUCK = 60.0
"""So long, and it is ended from outside: it does not even hear an alarm."""
MEMORY = 2**30
"""Bytes that a loader may need beyond what the process has when it begins to read an input."""
BATCH = 100
"""Inputs between two looks at the clock."""


class Finding(Exception):
    """Something that must not happen."""


class Hang(BaseException):
    """Raised by the alarm; no loader catches it."""


def _alarm(*_: Any) -> None:
    raise Hang(f"longer than {SECONDS} s of work or {WAIT} s in all")


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    """End the body after ``SECONDS`` of work, or ``WAIT`` in all."""
    timers = {signal.SIGPROF: (signal.ITIMER_PROF, SECONDS), signal.SIGALRM: (signal.ITIMER_REAL, WAIT)}
    for number, (timer, limit) in timers.items():
        signal.signal(number, _alarm)
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)


def watched(root: Path, ignored: Collection[str]) -> dict[str, tuple[Any, ...]]:
    """Return the entries of a folder, except ``ignored``: name -> kind, size, time of change, target."""
    seen: dict[str, tuple[Any, ...]] = {}
    base = os.fsencode(root)
    for folder, folders, files in os.walk(base):
        if folder == base:
            folders[:] = [name for name in folders if os.fsdecode(name) not in ignored]
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            about = os.lstat(path)
            target = os.readlink(path) if os.path.islink(path) else b""
            seen[os.fsdecode(path)] = (about.st_mode, about.st_size, about.st_mtime_ns, target)
    return seen


class Fuzzer:
    """One loader under attack."""

    def __init__(self, name: str, target: Target, root: Path, findings: Path, started: Any) -> None:
        self.name, self.target, self.root, self.findings = name, target, root, findings
        self.started = started
        """When the current input was started; shared with the watching process."""
        self.counts: Counter[str] = Counter()
        self.found: dict[str, str] = {}
        """Finding -> where it is saved."""
        self.wanted: str | None = None
        """The finding that is being made smaller."""
        (root / "prepared").mkdir(parents=True)
        self.prepared = target.prepare(root / "prepared")
        self.place = root / "watched"

    def attack(self, data: Any) -> None:
        """Make one input, read it, and raise ``Finding`` if something went wrong."""
        shutil.rmtree(self.place, ignore_errors=True)
        (self.place / "out").mkdir(parents=True)
        (self.place / "here").mkdir()
        (self.place / "canary").write_text("as it was")
        os.chdir(self.place / "here")
        load = self.target.make(data.draw, self.place, self.prepared)
        before = watched(self.place, self.target.own)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
        self.started.value = time.time()
        outcome, problem = "accepted", None
        try:
            with alarm():
                load()
        except MxdError as error:
            outcome = "refused"
            if len(str(error)) > 20_000:
                problem = f"a message of more than 20,000 characters at {_where(error)}"
        except (Exception, Hang) as error:
            problem = f"{type(error).__name__} at {_where(error)}"
            self.last = "".join(traceback.format_exception(error))[-6000:]
        finally:
            self.started.value = 0.0
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if problem is None and (changed := _changes(before, watched(self.place, self.target.own))):
            problem, self.last = f"wrote outside its place: {changed[0]}", "\n".join(changed)
        if self.wanted is None:
            self.counts["inputs"] += 1
            self.counts["findings" if problem else outcome] += 1
        if problem is not None and (self.wanted or problem) == problem and problem not in self.found:
            self.wanted = problem
            self.save(problem)
            raise Finding(problem)

    def save(self, problem: str) -> None:
        """Keep the input that led to a finding; the last one saved is the smallest."""
        folder = self.findings / f"{self.name.replace(' ', '-')}-{len(self.found)}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        subprocess.run(["cp", "-a", str(self.place), str(folder / "watched")], check=False)
        (folder / "finding.txt").write_text(f"{problem}\n\n{getattr(self, 'last', '')}", "utf-8", "backslashreplace")

    def run(self, inputs: int, number: int, deadline: float) -> None:
        """Attack with ``inputs`` inputs, or until the deadline."""
        batch = 0
        while self.counts["inputs"] < inputs and time.time() < deadline:
            amount = min(BATCH, inputs - self.counts["inputs"])
            attack = settings(
                max_examples=amount,
                phases=[Phase.generate, Phase.shrink],
                database=None,
                deadline=None,
                verbosity=Verbosity.quiet,
                suppress_health_check=list(HealthCheck),
            )(given(st.data())(self.attack))
            try:
                seed(number * 1_000_003 + batch)(attack)()
            except (Finding, Flaky):  # a finding that does not recur counts as well
                where = self.findings / f"{self.name.replace(' ', '-')}-{len(self.found)}"
                assert self.wanted is not None
                self.found[self.wanted] = str(where)
            self.wanted = None
            batch += 1


def _where(error: BaseException) -> str:
    """Return the innermost function of mxd in a traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/mxd/" in f.filename or "fuzzing" in f.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"


def _changes(before: dict[str, tuple[Any, ...]], after: dict[str, tuple[Any, ...]]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def work(name: str, inputs: int, number: int, minutes: float, root: Path, findings: Path, started: Any) -> None:
    """Attack one loader, in a process of its own."""
    warnings.simplefilter("ignore")
    sys.stdin = open(os.devnull)  # noqa: SIM115
    os.dup2(sys.stdin.fileno(), 0)
    sys.stdout = sys.stderr = open(root / "said.txt", "w")  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), 2)
    faulthandler.enable()
    os.environ |= {"HOME": str(root / "home"), "MXD_CACHE": str(root / "tokens")}
    fuzzer = Fuzzer(name, TARGETS[name], root, findings, started)
    try:
        fuzzer.run(inputs, number, time.time() + 60 * minutes)
    finally:
        os.chdir("/")
        (root / "result.json").write_text(json.dumps({"counts": fuzzer.counts, "found": fuzzer.found}))


def watch(name: str, inputs: int, number: int, minutes: float, findings: Path) -> dict[str, Any]:
    """Run one loader's process, end it if it is stuck, and return its counts and findings."""
    root = Path(tempfile.mkdtemp(prefix="mxd-fuzz-"))
    context = multiprocessing.get_context("fork")
    started = context.Value("d", 0.0, lock=False)
    worker = context.Process(target=work, args=(name, inputs, number, minutes, root, findings, started))
    worker.start()
    stuck = False
    while worker.is_alive():
        worker.join(0.2)
        begun = started.value  # read once: the worker sets it to zero when it is done
        if begun and time.time() - begun > STUCK:
            stuck = True
            worker.kill()
            worker.join()
    result = {"counts": {}, "found": {}}
    if (root / "result.json").exists():
        result = json.loads((root / "result.json").read_text())
    if worker.exitcode:
        folder = findings / f"{name.replace(' ', '-')}-process"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if (root / "watched").exists():
            subprocess.run(["cp", "-a", str(root / "watched"), str(folder)], check=False)
        shutil.copyfile(root / "said.txt", folder / "said.txt")
        how = f"stuck for more than {STUCK:.0f} s" if stuck else f"the process ended with {worker.exitcode}"
        result["found"][how] = str(folder)
    shutil.rmtree(root, ignore_errors=True)
    return result


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit, over all loaders")
    parser.add_argument("--inputs", type=int, default=10_000, help="inputs, over all loaders")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=TARGETS, help="only this loader; several times for several")
    parser.add_argument("--json", type=Path, help="file for counts and findings")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="folder for reproducers")
    args = parser.parse_args()
    names = args.only or list(TARGETS)
    total = sum(TARGETS[name].share for name in names)
    results: dict[str, Any] = {}
    begin = time.time()
    print(f"{'loader':24}{'inputs':>8}{'accepted':>10}{'refused':>9}{'findings':>10}{'seconds':>9}")
    sums: Counter[str] = Counter()
    for name in names:
        share = TARGETS[name].share / total
        start = time.time()
        inputs = -(-args.inputs * TARGETS[name].share // total)
        results[name] = watch(name, inputs, args.seed, args.minutes * share, args.findings.absolute())
        counts = Counter(results[name]["counts"])
        sums += counts
        shown = (counts[key] for key in ("inputs", "accepted", "refused"))
        print(f"{name:24}{''.join(f'{n:>{w}}' for n, w in zip(shown, (8, 10, 9), strict=True))}", end="")
        print(f"{len(results[name]['found']):>10}{time.time() - start:>9.1f}", flush=True)
        for problem, folder in results[name]["found"].items():
            print(f"    {problem}\n        {folder}", flush=True)
    findings = sum(len(result["found"]) for result in results.values())
    print(f"{'all':24}{sums['inputs']:>8}{sums['accepted']:>10}{sums['refused']:>9}{findings:>10}", end="")
    print(f"{time.time() - begin:>9.1f}")
    if args.json:
        about = {"seed": args.seed, "seconds": time.time() - begin, "loaders": results}
        args.json.write_text(json.dumps(about, indent=2) + "\n")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
