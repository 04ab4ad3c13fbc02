"""Damage to files: bits that flip, and a layer's hash made to fit what was changed on purpose."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path


def flipped(path: Path, times: int, seed: int = 0) -> Iterator[int]:
    """Flip one bit of a file at a random place, ``times`` times, and yield which; the file is whole in the end."""
    whole, rng = path.read_bytes(), random.Random(seed)
    for _ in range(times):
        bit = rng.randrange(8 * len(whole))
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        yield bit
    path.write_bytes(whole)


def fit_hash(folder: Path) -> None:
    """Let a layer's config name the hash of the tensors that are there."""
    config = json.loads((folder / "config.json").read_text())
    config["tensors_sha256"] = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    (folder / "config.json").write_text(json.dumps(config))


def forget_hash(folder: Path) -> None:
    """Make a layer one of those that were saved before configs named hashes."""
    config = json.loads((folder / "config.json").read_text())
    del config["tensors_sha256"]
    (folder / "config.json").write_text(json.dumps(config))
