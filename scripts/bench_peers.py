"""Train beside the peers: tokens/s, peak memory and held-out error on the same activations, width, K and batches.

    python scripts/fetch_models.py
    python scripts/bench_peers.py --json docs/benchmarks/peers.json --check
    python scripts/bench_peers.py --model tiny-gpt2 --block 2 --width 1024 --tokens 16384 --repeats 1

Activations are recorded once. Each tool (``scripts/peers/train.py``) trains in a process of its own, in turn,
``--repeats`` times, through the step of its own trainer with its own defaults; peers are installed as
`check_interop.py` does. In the table medians of the runs; ratios are of ours to theirs in the same turn. *In their
time*: our error at the last measurement that had taken no longer than the peer's whole training. `--check` fails where
we are less than 3 x as fast as the fastest peer, or worse than the best peer at equal tokens.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from check_interop import PEERS as INSTALLED
from check_interop import ROOT, install
from safetensors.torch import save_file

from mxd.artifacts.provenance import versions
from mxd.config import DataConfig, RunConfig
from mxd.model.loading import load_frozen
from mxd.training.source import text_contexts

SMOLLM2 = "models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
FASTER = 3.0
"""How many times the fastest peer's tokens/s are wanted."""

REQUIREMENTS = {
    "mxd": (),
    "sparsify": INSTALLED["sparsify"].requirements,
    "sae-lens": INSTALLED["sae-lens"].requirements,
    "dictionary-learning": ("dictionary-learning==0.1.0",),
    "overcomplete": ("overcomplete==0.3.0",),
}
METHODS = {"TC": ("mxd", "sparsify"), "STC": ("mxd", "sparsify"), "SAE": tuple(REQUIREMENTS)}
"""Method -> the tools that train it."""


def record(model: str, block: int, tokens: int, held_out: int, work: Path) -> None:
    """Store a block's activations on bundled text, of contexts of 128 without their first token, shuffled."""
    base = load_frozen(model)
    config = RunConfig.model_validate(
        {"replacements": [{"method": "linear"}], "blocks": [block], "data": DataConfig().model_dump()}
    )
    stream, sites, seen = text_contexts(config, base, None)(0), [], 0
    with torch.no_grad():
        while seen < tokens + held_out:
            rows = torch.tensor([next(stream) for _ in range(8)])
            x, y = base.record(rows, [block])[block]
            sites.append((x[:, 1:].flatten(0, 1), y[:, 1:].flatten(0, 1)))
            seen += len(sites[-1][0])
    x, y = (torch.cat(parts).float() for parts in zip(*sites, strict=True))
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
    save_file(
        {"x": x[order], "y": y[order], "x_test": x[-held_out:].contiguous(), "y_test": y[-held_out:].contiguous()},
        str(work / "activations.safetensors"),
    )


def trained(tool: str, method: str, work: Path, cache: Path) -> dict:
    """Train one tool's layer in a process of its own."""
    packages = install(REQUIREMENTS[tool], cache)
    paths = [str(ROOT), *([str(packages)] if REQUIREMENTS[tool] else [])]
    out = work / "found.json"
    command = [sys.executable, "-P", str(ROOT / "scripts" / "peers" / "train.py"), tool, method, str(work), str(out)]
    subprocess.run(
        command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "WANDB_MODE": "disabled"}, check=True
    )
    return json.loads(out.read_text())


def row(method: str, tool: str, runs: dict[tuple[str, str], list[dict]]) -> dict:
    """Return a tool's medians, and what is ours beside them."""
    own, theirs = runs[method, "mxd"], runs[method, tool]
    last = [run["curve"][-1] for run in theirs]
    faster = statistics.median(
        a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(own, theirs, strict=True)
    )
    in_time = [point for point in own[0]["curve"] if point["seconds"] <= last[0]["seconds"]]
    return {
        "method": method,
        "tool": tool,
        "tokens_per_second": statistics.median(run["tokens_per_second"] for run in theirs),
        "faster": faster,
        "peak_mib": statistics.median(run["peak_mib"] for run in theirs),
        "nmse": statistics.median(point["nmse"] for point in last),
        "fvu": statistics.median(point["fvu"] for point in last),
        "ours_in_their_time": (in_time or [{"nmse": None}])[-1]["nmse"],
        "runs": theirs,
    }


def misses(rows: list[dict]) -> list[str]:
    """Return what falls short of the goals."""
    lines = []
    for method in METHODS:
        peers = [row for row in rows if row["method"] == method and row["tool"] != "mxd"]
        own = next(row for row in rows if row["method"] == method and row["tool"] == "mxd")
        fastest, best = min(peers, key=lambda row: row["faster"]), min(peers, key=lambda row: row["nmse"])
        if fastest["faster"] < FASTER:
            lines.append(f"{method}: {fastest['faster']:.1f} x {fastest['tool']}'s tokens/s, {FASTER:g} were wanted")
        if own["nmse"] > best["nmse"]:
            lines.append(f"{method}: NMSE {own['nmse']:.4f}, {best['tool']} has {best['nmse']:.4f}")
    return lines


def main() -> None:
    """Parse, record, train in turn, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--block", type=int, default=9)
    parser.add_argument("--width", type=int, default=4608)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--held-out", type=int, default=8128)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "mxd-interop", help="installed peers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    args = parser.parse_args()
    runs: dict[tuple[str, str], list[dict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        record(args.model, args.block, args.tokens, args.held_out, work)
        asked = {"width": args.width, "k": args.k, "batch_tokens": args.batch_tokens}
        (work / "asked.json").write_text(json.dumps(asked))
        for _ in range(args.repeats):
            for method, tools in METHODS.items():
                for tool in tools:
                    runs.setdefault((method, tool), []).append(trained(tool, method, work, args.cache))
    rows = [row(method, tool, runs) for method, tool in runs]
    print("| method | tool | tokens/s | ours are faster by | peak MiB | NMSE | FVU | our NMSE in their time |")
    print("|---|---|---|---|---|---|---|---|")
    for found in rows:
        in_time = "-" if found["ours_in_their_time"] is None else f"{found['ours_in_their_time']:.4f}"
        print(
            f"| {found['method']} | {found['tool']} | {found['tokens_per_second']:,.0f} | {found['faster']:.1f} x | "
            f"{found['peak_mib']:,.0f} | {found['nmse']:.4f} | {found['fvu']:.3f} | {in_time} |"
        )
    if args.json:
        arguments = {name: str(value) for name, value in vars(args).items() if name not in ("json", "cache")}
        document = {"arguments": arguments, "threads": torch.get_num_threads(), "rows": rows, "versions": versions()}
        args.json.write_text(json.dumps(document | {"peers": REQUIREMENTS}, indent=1) + "\n")
    lines = misses(rows)
    print("\n".join(lines))
    if args.check and lines:
        sys.exit(1)


if __name__ == "__main__":
    main()
