"""Train or tune a few dozen steps of each case in a process of its own, and compare its peak memory with the plan's.

    python scripts/check_plan.py [--cases tiny-gpt2 ...] [--json FILE] [--check]

On a CPU the peak is that of the process's resident memory, on CUDA torch's own count of allocated memory. `--check`
exits 1 where a plan is off by more than 15%. The time that the plan expected is printed beside the one measured.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from goals import conclude

MOST = 0.15
"""By how much a peak may differ from the plan."""

WINDOWS = "--training.log_every 8 --training.tokens 98304 --training.buffer_tokens 65536"
ONE = '--replacements [{"method":"mxd","sparsity":{"kind":"topk","k":32}}]'
SHORT = "--training.tokens 4096 --training.buffer_tokens 4096 --tune.tokens 32768 --tune.log_every 8"
CASES = {
    "tiny-gpt2": f"configs/tiny.yaml {WINDOWS}",
    "tiny-neox": f"configs/tiny.yaml {WINDOWS} --model.source tiny-neox",
    "tiny-llama": f"configs/tiny.yaml {WINDOWS} --model.source tiny-llama",
    "tiny-gpt2, one window": f"configs/tiny.yaml {ONE} --training.tokens 98304",
    "tiny-gpt2, 256 x": f"configs/tiny.yaml {ONE} --sizing.expansion 256 --training.tokens 65536",
    "tiny-gpt2, 256 x, in 4 parts": f"configs/tiny.yaml {ONE} --sizing.expansion 256 --training.tokens 65536"
    " --training.accumulation 4",
    "tiny-gpt2, all blocks": f"configs/tiny.yaml {WINDOWS} {ONE} --blocks all",
    "tiny-gpt2, all blocks, one after the other": f"configs/tiny.yaml {WINDOWS} {ONE} --blocks all"
    " --training.inputs spliced --training.targets base",
    "smollm2-135m": "configs/smollm2-135m.yaml --training.tokens 69632",
    "smollm2-135m, bfloat16, 4 blocks": f"configs/smollm2-135m.yaml {ONE} --blocks [6,7,8,9] --model.dtype bfloat16"
    " --training.tokens 40960 --training.buffer_tokens 32768",
} | {
    f"tuning tiny-gpt2, all blocks{name}": f"configs/tiny.yaml {ONE} --blocks all --sizing.expansion 8 {SHORT} {words}"
    for name, words in {
        "": "",
        ", in 4 parts": "--tune.accumulation 4",
        ", checkpointing": "--tune.checkpointing true",
        ", no NMSE": "--tune.nmse 0",
        ", 4096 tokens a step": "--tune.batch_tokens 4096",
        ", of tiny-llama": "--model.source tiny-llama",
    }.items()
}
"""Name -> words of `mxd train`, with two windows of activations unless the name says one. With words for `mxd tune` the
layers are trained for one step, and tuned."""


def case(words: list[str]) -> dict[str, Any]:
    """Plan a case, train it, and return both."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*words, "--out", folder, "--run", "check"]
        plan = Path(folder, "plan.json")
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([sys.executable, "-m", "mxd", "plan", *words, "--json", str(plan)], check=True, **silent)
        planned = json.loads(plan.read_text())
        measure = [sys.executable, __file__, "--train", *words]
        if any(word.startswith("--tune.") for word in words):
            subprocess.run(measure, check=True, **silent)
            planned, measure = planned["tuning"], [sys.executable, __file__, "--tune", str(Path(folder, "check"))]
        child = subprocess.run(measure, check=True, stdout=subprocess.PIPE, text=True)
    return {"planned": planned, **json.loads(child.stdout.splitlines()[-1])}


def train(words: list[str]) -> dict[str, Any]:
    """Train a case in this process; results as ``measured``."""
    from mxd.config import load_config
    from mxd.training.trainer import train as run

    return measured(lambda: run(load_config(words[0], words[1:])))


def tune(folder: str) -> dict[str, Any]:
    """Tune the layers of a run in this process; results as ``measured``."""
    from mxd.training.tune import tune as run

    return measured(lambda: run([folder]))


def measured(run: Callable[[], Path]) -> dict[str, Any]:
    """Return the peak memory of this process in a run, the run's seconds, and the seconds of its steps."""
    import torch

    begin = time.perf_counter()
    folder = run()
    seconds = time.perf_counter() - begin
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    reports = [next(group) for _, group in groupby(lines, key=lambda line: line["step"])]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident_peak()
    return {"peak_bytes": peak, "seconds": seconds, "training_seconds": sum(line["seconds"] for line in reports)}


def resident_peak() -> int:
    """Return this process's largest resident memory so far."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help=f"exit 1 where a plan is off by more than {MOST:.0%}%")
    parser.add_argument("--train", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("--tune", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        print(json.dumps(train(args.train)))
        return
    if args.tune:
        print(json.dumps(tune(args.tune)))
        return
    print("| case | planned MiB | while | measured MiB | planned / measured | expected s | measured s |")
    print("|---|---|---|---|---|---|---|")
    rows, wrong = [], []
    for name in args.cases:
        row = {"case": name, **case(CASES[name].split())}
        rows.append(row)
        planned = row["planned"]["peak_bytes"]
        phases = row["planned"]["memory_bytes"]
        phase = max(phases, key=lambda name: sum(phases[name].values()))
        ratio = planned / row["peak_bytes"]
        steps = row["planned"]["steps"] * row["planned"]["seconds_per_step"]["step"]
        print(
            f"| {name} | {planned / 2**20:,.0f} | {phase} | {row['peak_bytes'] / 2**20:,.0f} | {ratio:.3f} | "
            f"{steps:,.1f} | {row['training_seconds']:,.1f} |",
            flush=True,
        )
        if abs(ratio - 1) > MOST:
            wrong.append(f"{name}: planned {ratio:.2f} x the peak measured")
    if args.json:
        machine = {"processor": platform.processor() or platform.machine(), "system": platform.platform()}
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    if args.check:
        conclude(wrong, f"every plan is within {MOST:.0%}")


if __name__ == "__main__":
    main()
