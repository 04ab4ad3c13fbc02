"""Kill a run at random moments and resume it until it is done; then damage its files: is anything lost or wrong?

    python scripts/soak.py [--minutes 10] [--kills 20] [--seed 0] [--json FILE]

A small run of `mxd train` on a bundled model is started in a process of its own and killed with SIGKILL: at any moment
(loading included), between steps, in the middle of a save, and while the finished layers are written. Each time it is
continued with --resume. In the end its layers, its last state, its metrics (except times) and the ids of the tokens it
was trained on are compared with those of a run that was never killed. Then one fault at a time: files of the newest
state truncated, flipped in one bit, emptied or deleted, a full disk, a limit on file sizes, SIGTERM.

Exits with 1 if anything was lost, repeated or wrong, or a traceback was shown. When the time is up nothing more is
started; the output names what was left out.
"""

import argparse
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

RUN = {
    "blocks": [2],
    "model": {"source": "tiny-gpt2", "device": "cpu"},
    "data": {"split": "validation"},
    "sizing": {"expansion": 9},
    "replacements": [
        {"method": "mxd", "sparsity": [{"kind": "topk", "k": 8}, {"kind": "random_k", "k": 8}]},
        {"method": "transcoder", "skip": True, "sparsity": {"kind": "topk", "k": 8}},
    ],
    "training": {"recipe": "short", "batch_tokens": 256, "buffer_tokens": 4096, "log_every": 5, "save_every": 3},
}
LONG, SHORT = 360, 36
"""Steps of the run that is killed, and of those for the other faults."""


# The process under test: `mxd train`, with the ids of every batch written down


def child(record: Path, words: list[str]) -> None:
    """Run ``mxd WORDS``; each batch's token ids become a line of ``record``, before it is trained on.

    Lines recorded after the state from which a run continues did not happen, and are cut off.
    """
    from dataclasses import asdict

    from mxd import cli

    train = importlib.import_module("mxd.training.trainer")
    stream = train.activation_stream

    def recorded(config, base, start, *rest):
        lines = read_record(record)
        ends = [line["end"] for line in lines]
        begin = asdict(start)
        if any(begin.values()) and begin not in ends:
            raise AssertionError(f"the run continues at {begin}, where no batch ended")
        kept = lines[: ends.index(begin) + 1] if any(begin.values()) else []
        with record.open("w") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
            file.flush()
            for batch in stream(config, base, start, *rest):
                file.write(json.dumps({"end": asdict(batch.cursor), "ids": batch.ids.tolist()}) + "\n")
                file.flush()
                yield batch

    train.activation_stream = recorded
    sys.argv = ["mxd", *words]
    cli.main()


def read_record(record: Path) -> list[dict]:
    """Return the complete lines of a record; a kill may have cut the last."""
    lines = record.read_text().split("\n")[:-1] if record.exists() else []
    return [json.loads(line) for line in lines]


# The soak


class Soak:
    """The runs of one soak, and their results."""

    def __init__(self, folder: Path, deadline: float, seed: int) -> None:
        self.folder, self.deadline, self.random = folder, deadline, random.Random(seed)
        self.patience = 600.0
        """Seconds that a run may take."""
        self.failures: list[str] = []
        self.rows: list[dict] = []

    def config(self, name: str, steps: int, out: Path | None = None) -> Path:
        """Write the config of a run; return its file."""
        out = out or self.folder
        training = {**RUN["training"], "tokens": steps * RUN["training"]["batch_tokens"]}
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**RUN, "run": name, "out": str(out), "training": training}))
        return file

    def start(self, config: Path, *words: str, limit: int | None = None) -> subprocess.Popen:
        """Start `mxd train` on a config, or resume it where there is a run already."""
        folder = Path(yaml.safe_load(config.read_text())["out"]) / config.stem
        resume = ["--resume"] if (folder / "config.yaml").exists() else []
        script = [sys.executable, __file__, "--child", config.with_suffix(".ids"), "train", config, *resume, *words]
        log = config.with_suffix(".log").open("a")

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        return subprocess.Popen(script, stdout=log, stderr=log, preexec_fn=limited if limit else None)

    def finish(self, config: Path, expected: int = 0, **options) -> str:
        """Run to the end; return what it printed."""
        log = config.with_suffix(".log")
        before = log.stat().st_size if log.exists() else 0
        began = time.monotonic()
        process = self.start(config, **options)
        try:
            code = process.wait(self.patience)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
            self.check(False, f"{config.stem} did not end within {self.patience:.0f} s")
        self.patience = max(self.patience, 5 * (time.monotonic() - began))
        output = log.read_text()[before:]
        self.check(code == expected, f"{config.stem} ended with {code}, expected {expected}: {output[-500:]}")
        return output

    def check(self, good: bool, message: str) -> bool:
        """Note a failure."""
        if not good:
            self.failures.append(message)
            print(f"FAILED: {message}", flush=True)
        return good

    def time_left(self, seconds: float) -> bool:
        """Return whether something that takes about ``seconds`` may still be started."""
        return time.monotonic() + seconds < self.deadline

    def row(self, what: str, count: int, outcome: str) -> None:
        """Note a line of the table."""
        self.rows.append({"what": what, "count": count, "outcome": outcome})
        print(f"{what}: {count}; {outcome}", flush=True)

    def same(self, config: Path, whole: Path, folder: Path | None = None) -> dict[str, int]:
        """Compare a finished run with the undisturbed one."""
        folder, expected = folder or config.with_suffix(""), whole.with_suffix("")
        layers = sorted(path.parent.name for path in expected.glob("*/model.safetensors"))
        self.check(len(layers) == 3, f"{folder.name}: layers {layers}")
        for path in [Path(name, "model.safetensors") for name in layers] + newest_parts(expected):
            there = (folder / path).exists() and (folder / path).read_bytes() == (expected / path).read_bytes()
            self.check(there, f"{folder.name}: {path} is not that of the undisturbed run")
        self.check(timeless(folder) == timeless(expected), f"{folder.name}: other lines of metrics")
        left = [path.name for path in folder.rglob(".*")]
        self.check(not left, f"{folder.name}: left behind: {left}")
        ours, theirs = (ids_by_step(file.with_suffix(".ids")) for file in (config, whole))
        steps = range(max(len(ours), len(theirs)))
        pairs = [(Counter(ours.get(i, ())), Counter(theirs.get(i, ()))) for i in steps]
        lost = sum(((b - a).total() for a, b in pairs), 0)
        repeated = sum(((a - b).total() for a, b in pairs), 0)
        self.check(ours == theirs, f"{folder.name}: {lost} tokens lost, {repeated} repeated, or another order")
        return {"lost": lost, "repeated": repeated, "trained": sum(map(len, ours.values()))}

    def no_traceback(self) -> int:
        """Count tracebacks in everything that was printed."""
        counts = {log.stem: log.read_text().count("Traceback") for log in self.folder.glob("*.log")}
        self.check(not any(counts.values()), f"tracebacks: {counts}")
        return sum(counts.values())


def newest_parts(folder: Path) -> list[Path]:
    """Return the tensor files of the last state, relative to the run's folder."""
    return sorted(path.relative_to(folder) for path in max((folder / "state").glob("step-*")).glob("*.safetensors"))


def timeless(folder: Path) -> list[dict]:
    """Return the lines of metrics without times and rates."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


def ids_by_step(record: Path) -> dict[int, list[int]]:
    """Return step -> token ids of its batch."""
    return dict(enumerate(line["ids"] for line in read_record(record)))


def wait_for(condition, process: subprocess.Popen, seconds: float = 120, every: float = 0.001) -> bool:
    """Wait until a condition holds; False if the process or the time ended before."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if condition():
            return True
        time.sleep(every)
    return False


def soak_kills(soak: Soak, whole: Path, kills: int, alone: float) -> dict:
    """Kill a run again and again, and compare its end; undisturbed it takes ``alone`` seconds."""
    config = soak.config("killed", LONG)
    folder, counts = config.with_suffix(""), Counter()

    def saving() -> bool:
        return any((folder / "state").glob(".step-*")) if folder.exists() else False

    def saved() -> int:
        return max((int(path.name[5:]) for path in (folder / "state").glob("step-*")), default=0)

    def writing_layers() -> bool:
        return any(folder.glob(".block*")) if folder.exists() else False

    while counts["all"] < kills and soak.time_left(2 * alone):
        last = counts["all"] == kills - 1
        kind = "layers" if last else ("step", "save", "any", "save")[counts["all"] % 4]
        process = soak.start(config)
        if kind == "any":
            time.sleep(soak.random.uniform(0, alone / 2))
        elif kind == "layers":
            wait_for(writing_layers, process, soak.patience)
        else:
            goal = saved() + soak.random.randint(1, max(2, LONG // kills))
            wait_for(lambda goal=goal: saved() >= goal, process, soak.patience)
            time.sleep(soak.random.uniform(0, 0.2))
            if kind == "save":
                wait_for(saving, process, seconds=alone / 30, every=0.0002)  # on a busy machine a save may be missed
                time.sleep(soak.random.uniform(0, 0.02))
        process.kill()
        if process.wait() != -signal.SIGKILL:
            soak.check(process.returncode == 0, f"killed: ended with {process.returncode} by itself")
            break
        counts["all"] += 1
        counts[kind] += 1
        counts["in a save"] += saving()
        counts["in a layer"] += writing_layers()
    soak.finish(config)
    tokens = soak.same(config, whole)
    left_out = "" if counts["all"] == kills else f" of {kills}, the time was up or the run done"
    soak.row(
        "kills survived (SIGKILL)",
        counts["all"],
        f"{counts['in a save']} left half a state, {counts['in a layer']} half a layer{left_out}",
    )
    soak.row("tokens trained on", tokens["trained"], f"lost {tokens['lost']}, repeated {tokens['repeated']}")
    return {**counts, **tokens}


DAMAGE = {
    "truncated": lambda path, at: path.write_bytes(path.read_bytes()[: at % path.stat().st_size]),
    "one bit flipped": lambda path, at: flip(path, at),
    "emptied": lambda path, at: path.write_bytes(b""),
    "deleted": lambda path, at: path.unlink(),
}


def flip(path: Path, at: int) -> None:
    """Flip one bit."""
    raw = bytearray(path.read_bytes())
    raw[at // 8 % len(raw)] ^= 1 << at % 8
    path.write_bytes(raw)


def soak_damage(soak: Soak, whole: Path) -> None:
    """Damage the newest state of a stopped run in every way, continue, and compare."""
    stopped = stop_in_the_middle(soak)
    newest = max((stopped.with_suffix("") / "state").glob("step-*")).name
    done = Counter()
    for damage, act in DAMAGE.items():
        for name in ("block2-mxd-k8.safetensors", "state.json", "manifest.json"):
            if not soak.time_left(40):
                continue
            config = soak.config(f"{damage.replace(' ', '-')}-{name.partition('.')[0]}", SHORT)
            take_over(stopped, config)
            act(config.with_suffix("") / "state" / newest / name, soak.random.randrange(10**9))
            output = soak.finish(config).replace("\n", " ")
            named = f"{newest} is damaged and skipped: " in output
            named = named and (name in output or name == "manifest.json")  # whose flipped hash is another file's
            soak.check(named, f"{config.stem}: not named: {output}")
            soak.same(config, whole)
            done[damage] += 1
    for damage in DAMAGE:
        left_out = "" if done[damage] == 3 else "; the rest was left out, the time was up"
        soak.row(f"newest state {damage}", done[damage], f"named, skipped, kept aside; the run ends the same{left_out}")


def stop_in_the_middle(soak: Soak) -> Path:
    """Stop a short run with SIGTERM; it saves and ends with 0."""
    config = soak.config("stopped", SHORT)
    record = config.with_suffix(".ids")
    process = soak.start(config)
    wait_for(lambda: record.exists() and record.read_bytes().count(b"\n") >= SHORT // 2, process)
    began = time.monotonic()
    process.terminate()
    code = process.wait(60)
    seconds = time.monotonic() - began
    output = config.with_suffix(".log").read_text()
    soak.check(code == 0 and "everything is saved" in output, f"SIGTERM: exit code {code}")
    soak.row("SIGTERM", 1, f"exit code {code} after {seconds:.1f} s, everything saved")
    return config


def take_over(stopped: Path, config: Path) -> None:
    """Give a run the folder and the record of the one that was stopped."""
    folder = config.with_suffix("")
    shutil.copytree(stopped.with_suffix(""), folder)
    shutil.copy(stopped.with_suffix(".ids"), config.with_suffix(".ids"))
    copied = folder / "config.yaml"
    copied.write_text(copied.read_text().replace(f"run: {stopped.stem}\n", f"run: {config.stem}\n"))


def soak_disk(soak: Soak, whole: Path) -> None:
    """Fill the disk, in two ways, then make room and continue."""
    config = soak.config("limited", SHORT)
    output = soak.finish(config, expected=1, limit=300_000)
    soak.check("mxd: cannot write " in output and "nothing was lost" in output, f"limited: {output[-300:]}")
    soak.finish(config)
    soak.same(config, whole)
    soak.row("limit on file sizes (RLIMIT_FSIZE)", 1, "one clear message; the run ends the same")
    with tmpfs(soak.folder / "disk", "100m") as disk:
        if disk is None:
            soak.row("full disk (tmpfs)", 0, "left out: this user cannot mount one")
            return
        config = soak.config("full", SHORT, out=disk)
        process, states = soak.start(config), disk / "full" / "state"
        wait_for(lambda: any(states.glob("step-*")), process, soak.patience)
        with (disk / "filler").open("wb", buffering=0) as filler:
            while process.poll() is None:  # the run itself makes room when it removes an old state
                with suppress(OSError):
                    filler.write(bytes(10_000))
        output = config.with_suffix(".log").read_text()
        good = process.returncode == 1 and "No space left on device" in output
        soak.check(good, f"full: ended with {process.returncode}: {output[-300:]}")
        kept = len(list(states.glob("step-*")))
        (disk / "filler").unlink()
        soak.finish(config)
        soak.same(config, whole, disk / "full")
        soak.row("full disk (tmpfs)", 1, f"one clear message, {kept} states kept; with room the run ends the same")


@contextmanager
def tmpfs(folder: Path, size: str):
    """Mount a small disk, or give None where that is not allowed."""
    folder.mkdir()
    mounted = shutil.which("mount") and os.geteuid() == 0
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    mounted = mounted and subprocess.run(words, capture_output=True).returncode == 0
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", folder], check=True)


def main() -> None:
    """Run the soak and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mxd-soak-") as folder:
        soak = Soak(Path(folder), began + 60 * args.minutes, args.seed)
        whole = {steps: soak.config(f"whole{steps}", steps) for steps in (LONG, SHORT)}
        soak.finish(whole[SHORT])
        start = time.monotonic()
        soak.finish(whole[LONG])
        kills = soak_kills(soak, whole[LONG], args.kills, time.monotonic() - start)
        soak_damage(soak, whole[SHORT])
        if soak.time_left(60):
            soak_disk(soak, whole[SHORT])
        else:
            soak.row("full disk", 0, "left out, the time was up")
        tracebacks = soak.no_traceback()
    soak.row("tracebacks", tracebacks, "")
    seconds = round(time.monotonic() - began)
    table = [f"| {row['what']} | {row['count']:,} | {row['outcome']} |" for row in soak.rows]
    print("\n".join(["", "| | count | |", "|---|---|---|", *table]))
    print(f"\n{seconds} s, {len(soak.failures)} failures")
    if args.json:
        report = {"seconds": seconds, "kills": kills, "rows": soak.rows, "failures": soak.failures}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(1 if soak.failures else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
