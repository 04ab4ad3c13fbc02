"""Small runs on a bundled model, and whether two of them are the same."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mxd.common.stop import Interrupted
from mxd.config import RunConfig, parse_config
from mxd.training.loop import Loop
from mxd.training.trainer import train

TIMING = ("seconds", "tokens_per_second", "step_seconds")


def small(tmp_path: Path, **fields) -> RunConfig:
    raw = {
        "run": "r",
        "out": str(tmp_path),
        "blocks": [2],
        "model": {"source": "tiny-gpt2", "device": "cpu"},
        "data": {"split": "validation"},
        "sizing": {"expansion": 9},
        "replacements": [{"method": "mxd", "sparsity": {"kind": "topk", "k": 8}}],
        "training": {
            "recipe": "short",
            "tokens": 6144,
            "batch_tokens": 512,
            "buffer_tokens": 2048,
            "log_every": 2,
            "save_every": 5,
        },
    }
    for key, value in fields.items():
        raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
    return parse_config(raw)


def metrics(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMING} for line in lines]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything a run leaves: the layers and its last state (weights, moments, counters)."""
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        if "state" in path.parts[-3:]:
            continue
        found |= {f"{path.parent.name}/{k}": v for k, v in load_file(path).items()}
    newest = sorted((folder / "state").glob("step-*"))[-1]
    for path in newest.glob("*.safetensors"):
        found |= {f"state/{path.stem}/{k}": v for k, v in load_file(path).items()}
    return found


def seal_state(state: Path) -> None:
    """Make the manifest of a saved state fit what was edited."""
    manifest = json.loads((state / "manifest.json").read_text())
    for name in manifest["files"]:
        content = (state / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (state / "manifest.json").write_text(json.dumps(manifest))


def assert_same_run(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    left, right = tensors(a), tensors(b)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def stop_after(step: int, config: RunConfig, model, resume: bool = False, text=None) -> None:
    """Train up to a step and stop there, as Ctrl-C does."""

    def stopping(run, stop) -> bool:
        return run.step == step

    def stopped(run, stop) -> Interrupted:
        return Interrupted(f"stopped at step {run.step}", "mxd")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "stopping", stopping)
        patch.setattr(Loop, "stopped", stopped)
        with pytest.raises(Interrupted, match=f"stopped at step {step}"):
            train(config, resume=resume, model=model, text=text)
