"""Run everything twice, each time in processes of its own, and compare every bit of what was written.

    python scripts/check_determinism.py                                        # the bundled GPT-2, on the CPU
    python scripts/check_determinism.py --device cuda --training.deterministic true

Trains one replacement of every method, random K among them, and asks all of mxd's questions about them. Times and rates
are left out; all other numbers, texts and tensors must be equal. Exit code 1 where one differs; `--json` names
each file. More options are overrides of the config.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from goals import conclude

from mxd.artifacts.provenance import versions

TIMED = {"seconds", "tokens_per_second", "step_seconds", "out", "run_id"}
"""Fields that say how long something took, the run's folder, and its name."""

RUN: dict[str, Any] = {
    "run": "twice",
    "seed": 3,
    "blocks": [1],
    "replacements": [
        {"method": "mxd", "num_units": 64, "sparsity": {"kind": "random_k", "k": 8}},
        {"method": "mxd", "num_units": 64, "sparsity": {"kind": "topk", "k": 8}},
        {"method": "transcoder", "num_units": 96, "skip": True, "sparsity": {"kind": "topk", "k": 8}},
        {"method": "transcoder", "num_units": 96, "sparsity": {"kind": "relu_l1", "l1": 0.001}},
        {"method": "cp_mumoe", "num_units": 64, "sparsity": {"kind": "topk", "k": 8}},
        {"method": "tr_mumoe", "num_units": 64, "sparsity": {"kind": "topk", "k": 8}},
        {"method": "tucker_mumoe", "num_units": 64, "sparsity": {"kind": "topk", "k": 8}},
        {"method": "moe", "num_units": 8, "sparsity": {"kind": "topk", "k": 2}},
        {"method": "topk_sae", "num_units": 96, "sparsity": {"kind": "topk", "k": 8}},
    ],
    "model": {"source": "tiny-gpt2"},
    "data": {"source": "bundled", "context": 32},
    "training": {"recipe": "fast", "tokens": 8192, "batch_tokens": 512, "buffer_tokens": 2048, "log_every": 4},
    "evaluation": {
        "questions": ["faithfulness", "generation", "units", "structure", "probing", "masking", "steering"],
        "faithfulness": {"tokens": 1024},
        "generation": {"limit": 8},
        "units": {"tokens": 2048, "top": 2},
        "structure": {"tokens": 1024},
        "probing": {"sets": ["gender"], "limit": 80},
        "masking": {"limit": 2},
        "steering": {"first": 2},
    },
}


def once(folder: Path, device: str, overrides: list[str]) -> dict[str, Any]:
    """Run everything, and return what was written: file -> its content, times left out."""
    folder.mkdir()
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(RUN | {"out": str(folder), "model": RUN["model"] | {"device": device}}))
    command = [sys.executable, "-m", "mxd", "compare", str(config), *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    contents: dict[str, Any] = {}
    for path in sorted((folder / "twice").rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix in (".json", ".jsonl") and path.name != "manifest.json":  # that hashes files with times in them
            contents[name] = [untimed(json.loads(line)) for line in _documents(path)]
        elif path.suffix == ".safetensors" or path.name == "README.md":
            contents[name] = path.read_bytes()
    return contents


def _documents(path: Path) -> list[str]:
    text = path.read_text()
    return text.splitlines() if path.suffix == ".jsonl" else [text]


def untimed(value: Any) -> Any:
    """Return a value without the times in it."""
    if isinstance(value, dict):
        return {key: untimed(item) for key, item in value.items() if key not in TIMED | {"metrics_bytes"}}
    return [untimed(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write what was compared")
    asked, overrides = parser.parse_known_args()
    print(f"device {asked.device}, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mxd-twice-") as work:
        first, second = (once(Path(work, name), asked.device, overrides) for name in ("a", "b"))
    different = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    same = sorted(first.keys() - set(different))
    if asked.json:
        found = {"device": asked.device, "overrides": overrides, "same": same, "different": different}
        asked.json.write_text(json.dumps({"versions": versions(), **found}, indent=1) + "\n")
    print(f"{len(first)} files, {len(same)} the same bit by bit")
    conclude([f"differs: {name}" for name in different] or ["nothing was written"] * (not first), "none differs")


if __name__ == "__main__":
    main()
