"""Train on 1, 2 and 4 processes of this machine; compare their losses, and the seconds of a step with the cost model's.

    python scripts/check_scaling.py [--worlds 1 2 4] [--config configs/tiny.yaml] [--json FILE] [--check]

Each process has one thread. The speeds that the model divides by are measured in a launch of as many processes, all at
once: they share cores and memory, and exchange through gloo. What is checked is how time changes with the number of
processes: the model is scaled to the run of one. `--check` exits 1 where it is then off by more than a half, or where
a loss differs from that of one process by more than a ten-thousandth.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from goals import conclude

MOST = 1.5
"""By how much model and measurement may differ, as a factor."""

SAME = 1e-4
"""By how much a loss may differ from that of one process, relatively: the same sums, in another order."""

WORDS = [
    *("--training.tokens", "98304", "--training.buffer_tokens", "16384", "--training.log_every", "4"),
    *("--model.device", "cpu", "--replacements"),
    '[{"method": "mxd", "sparsity": {"kind": "topk", "k": [8, 32]}},'
    ' {"method": "transcoder", "sparsity": {"kind": "topk", "k": [8, 32]}}]',
]
"""Four replacements; four steps per window of activations and per line of metrics."""


def launch(world: int, *words: str) -> None:
    """Run Python with these words in ``world`` processes."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), *words]
    if world == 1:
        command = [word for word in words if word != "--no-python"]
    done = subprocess.run([sys.executable, *command], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    if done.returncode:
        sys.exit(done.stderr.decode()[-2000:])


def train(world: int, groups: int, config: str) -> tuple[float, list[float]]:
    """Train; return the seconds per step, the median over all windows except the first, and every reported loss."""
    with tempfile.TemporaryDirectory() as folder:
        launch(world, "-m", "mxd", "train", config, *WORDS, "--out", folder, "--groups", str(groups))
        lines = [json.loads(line) for line in next(Path(folder).glob("*/metrics.jsonl")).read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if line["replacement"] == lines[0]["replacement"]]
    return statistics.median(seconds[1:]) / 4, [line["normalized_mse"] for line in lines]


def speeds(world: int) -> dict[str, float]:
    """Return the speeds of one of ``world`` processes while all of them work."""
    with tempfile.TemporaryDirectory() as folder:
        launch(world, __file__, "--measure", str(Path(folder, "speeds.json")))
        return json.loads(Path(folder, "speeds.json").read_text())


def measure(file: Path) -> None:
    """Measure in this process, one of a launch."""
    import torch

    from mxd.common.hardware import copy_speed, product_speed
    from mxd.common.processes import launched

    with launched() as processes:
        measured = []
        for _ in range(3):
            processes.gather(None)  # begin together
            products = product_speed(torch.device("cpu"))
            processes.gather(None)  # begin together
            measured.append((products, copy_speed(torch.device("cpu")), network_speed(processes)))
        together = [statistics.fmean(part) for part in zip(*measured, strict=True)]
        shared = [statistics.fmean(part) for part in zip(*processes.gather(together), strict=True)]
        if processes.first:
            file.write_text(json.dumps(dict(zip(("products", "copies", "network"), shared, strict=True))))


def network_speed(processes: Any) -> float:
    """Return the bytes per second that this process receives while all send rows to one another."""
    import torch

    if not processes.many:
        return 1e12
    rows = torch.zeros(processes.world * 4096, 256)
    counts = [4096] * processes.world
    processes.exchange(rows, counts, counts)
    begin = time.perf_counter()
    for _ in range(5):
        processes.exchange(rows, counts, counts)
    return 5 * rows.numel() * 4 * (processes.world - 1) / processes.world / (time.perf_counter() - begin)


def modelled(world: int, groups: int, config: str, measured: dict[str, float]) -> dict[str, float]:
    """Return the seconds per step that the cost model predicts, by part."""
    from dataclasses import asdict

    from mxd.config import load_config
    from mxd.planning.memory import plan_run
    from mxd.planning.time import Speeds, step_times

    run = load_config(config, WORDS)
    at = Speeds(
        measured["products"], measured["products"], measured["products"], measured["copies"], measured["network"]
    )
    times = step_times(plan_run(run, world=world, groups=groups), run.training.batch_tokens, at)
    return {**asdict(times), "step": times.step}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--config", default="configs/tiny.yaml")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help=f"exit 1 where a factor is beyond {MOST}")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure)
        return
    columns = ["processes", "groups", "loss differs by", "s a step", "model", "model / measured", "scaled"]
    columns += ["GFLOP/s", "copy, GB/s", "gloo, GB/s"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    rows: list[dict[str, Any]] = []
    wrong = []
    for world in args.worlds:
        measured = speeds(world)
        for groups in sorted({world, 1}, reverse=True):
            (seconds, losses), model = train(world, groups, args.config), modelled(world, groups, args.config, measured)
            row = {"processes": world, "groups": groups, "seconds": seconds, "model": model, "speeds": measured}
            row["losses"] = losses
            first = rows[0]["losses"] if rows else losses
            off = max(abs(a / b - 1) for a, b in zip(losses, first, strict=True))
            rows.append(row | {"ratio": model["step"] / seconds})
            relative = rows[-1]["ratio"] / rows[0]["ratio"]
            rates = " | ".join(f"{measured[name] / 1e9:,.1f}" for name in ("products", "copies"))
            network = f"{measured['network'] / 1e9:,.2f}" if world > 1 else ""
            print(
                f"| {world} | {groups} | {off:.1e} | {seconds:.3f} | {model['step']:.3f} | {rows[-1]['ratio']:.2f} | "
                f"{relative:.2f} | {rates} | {network} |",
                flush=True,
            )
            if off > SAME:
                wrong.append(f"{world} processes in {groups} groups: a loss differs by {off:.1e}")
            if not 1 / MOST < relative < MOST:
                wrong.append(f"{world} processes in {groups} groups: {relative:.2f} x the ratio of one process")
    if args.json:
        args.json.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=2) + "\n")
    if args.check:
        conclude(wrong, f"every loss is within {SAME}, every time within a factor of {MOST}")


if __name__ == "__main__":
    main()
