"""Activations on disk: the batches of a live stream, written once in their order and read back for any number of runs.

A cache is a folder of shards, each whole or not there; an interrupted cache is continued. Reading is sequential, since
the tokens were shuffled before they were written, and cached batches equal live ones bit for bit.

cache.json                        what the activations are of
shard-000000/activations.safetensors  ids, and x, y and their means for every layer
shard-000000/shard.json           where in the text each batch ends
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mxd.activations import Batch, Cursor
from mxd.checkpoint import atomic_folder, read_json, write_json
from mxd.errors import MxdError
from mxd.progress import progress

FORMAT = 1

SHARD_BATCHES = 16
"""Batches in a shard."""

ANEW = "Delete it and all after it; `mxd cache` writes them anew."
"""What to do about a shard that is damaged or missing."""


def cache_bytes(widths: Sequence[tuple[int, int]], tokens: int) -> int:
    """Return the size on disk of ``tokens`` tokens at sites of the given (d_in, d_out), in float32."""
    return tokens * (8 + 4 * sum(d_in + d_out for d_in, d_out in widths))


def claim_cache(folder: Path, identity: Mapping[str, Any], size: int) -> Cursor:
    """Begin a cache or continue one; return where in the text the next batch is.

    Args:
        folder: the cache's folder.
        identity: what the activations are of; a cache that holds any must be of the same.
        size: its size in bytes when it is done.

    Raises:
        MxdError: the folder holds something else, or the disk has no room for the rest.
    """
    cursors = _cursors(folder)
    if (folder / "cache.json").is_file():
        layers = _held(folder)["fingerprints"]
        if cursors:
            check_cache(folder, identity)
        if cursors and layers.keys() != identity["fingerprints"].keys():
            raise MxdError(
                f"the activation cache {folder} has layers {', '.join(layers)}, asked for "
                f"{', '.join(identity['fingerprints'])}; it goes on with the same layers, or choose another folder."
            )
    elif folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise MxdError(f"{folder} exists and is not an activation cache; choose another folder.")
    there = sum(file.stat().st_size for file in folder.glob("shard-*/*.safetensors"))
    existing_parent = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(existing_parent).free
    if size - there > free:
        raise MxdError(
            f"the cache needs {(size - there) / 2**30:.1f} GiB more and {free / 2**30:.1f} GiB are free at {folder}; "
            "lower training.tokens, cache fewer layers, or choose another disk."
        )
    if not cursors:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "cache.json", {"format": FORMAT, **identity})
        except OSError as error:
            raise MxdError(f"cannot write to {folder}: {error.strerror}; choose another folder.") from error
    return cursors[-1] if cursors else Cursor()


def write_cache(folder: Path, stream: Iterator[Batch], tokens: int) -> None:
    """Write batches until the cache holds ``tokens`` tokens.

    Args:
        folder: a folder that ``claim_cache`` returned a place for.
        stream: the batches from that place on.
        tokens: tokens the cache is to hold, in whole batches.

    Raises:
        MxdError: the disk is full, the text ends before, or another process writes to the cache, too.
    """
    done, number, held = cached_tokens(folder), len(_shards(folder)), _held(folder)
    with progress(f"caching to {folder}", tokens, done=min(done, tokens)) as advance:
        while done < tokens:
            batches: list[Batch] = []
            for batch in islice(stream, SHARD_BATCHES):
                batches.append(batch)
                done += len(batch.ids)
                advance(len(batch.ids))
                if done >= tokens:
                    break
            if not batches:
                raise MxdError(
                    f"the text ended after {done:,} tokens of {tokens:,}; the cache in {folder} holds those."
                )
            if len(_shards(folder)) != number or _held(folder) != held:
                raise MxdError(f"another process is writing to the cache {folder}, too; wait until it is done.")
            _write_shard(folder / f"shard-{number:06d}", batches)
            number += 1


def check_cache(folder: Path, identity: Mapping[str, Any]) -> None:
    """Check that a cache holds what is asked for.

    Args:
        folder: the cache.
        identity: what is asked for; of ``fingerprints`` (layer -> hash of its MLP) some of the cache's.

    Raises:
        MxdError: no cache there, or one of other activations; the differences are named.
    """
    if not (folder / "cache.json").is_file():
        raise MxdError(f"no activation cache at {str(folder)!r}; write one with: mxd cache CONFIG {folder}")
    held = _held(folder)
    wanted = {"format": FORMAT, **identity}
    differences = [
        f"{key}: {held.get(key)!r}, asked for {value!r}"
        for key, value in wanted.items()
        if key != "fingerprints" and held.get(key) != value
    ]
    for layer, fingerprint in identity["fingerprints"].items():
        own = held["fingerprints"].get(layer)
        if own is None:
            differences.append(f"it has layers {', '.join(held['fingerprints'])}, asked for {layer}")
        elif own != fingerprint:
            differences.append(f"layer {layer} is of another base model (fingerprint {own}, asked for {fingerprint})")
    if differences:
        raise MxdError(f"the activation cache {folder} holds something else:\n  " + "\n  ".join(differences))


def cached_tokens(folder: Path) -> int:
    """Return how many tokens a cache holds."""
    return sum(_described(shard)["tokens"] for shard in _shards(folder))


def cached_batches(
    folder: Path, layers: Sequence[int], start: Cursor | None = None, device: torch.device | str = "cpu"
) -> Iterator[Batch]:
    """Yield a cache's batches, the same as the live stream's.

    Args:
        folder: the cache.
        layers: which of its layers.
        start: where to begin; a place between two of its batches.
        device: where the activations go.

    Raises:
        MxdError: a shard is damaged, or ``start`` is not in the cache.
    """
    starts = [Cursor(), *_cursors(folder)]
    if (start or Cursor()) not in starts:
        raise MxdError(f"the activation cache {folder} has no batch that begins at {start}; it ends at {starts[-1]}.")
    skip = starts.index(start or Cursor())
    for shard in _shards(folder):
        ends = _ends(shard)
        for b in range(min(skip, len(ends)), len(ends)):
            yield _read(shard, layers, b, len(ends), ends[b], device)
        skip = max(0, skip - len(ends))


def _read(shard: Path, layers: Sequence[int], b: int, batches: int, end: Cursor, device: torch.device | str) -> Batch:
    try:
        with safe_open(shard / "activations.safetensors", "pt") as file:
            rows = file.get_slice("ids").get_shape()[0] // batches
            part = slice(b * rows, (b + 1) * rows)

            def read(name: str, which: slice | int = part) -> torch.Tensor:
                return file.get_slice(name)[which].to(device)

            return Batch(
                sites={layer: (read(f"{layer}.x"), read(f"{layer}.y")) for layer in layers},
                ids=read("ids"),
                means={
                    layer: (read(f"{layer}.x_mean", slice(b, b + 1))[0], read(f"{layer}.y_mean", slice(b, b + 1))[0])
                    for layer in layers
                },
                cursor=end,
            )
    except (OSError, SafetensorError) as error:
        raise MxdError(f"cannot read {shard}: {error}. {ANEW}") from error


def _write_shard(shard: Path, batches: Sequence[Batch]) -> None:
    tensors = {"ids": torch.cat([batch.ids for batch in batches])}
    for layer in batches[0].sites:
        for i, name in enumerate(("x", "y")):
            tensors[f"{layer}.{name}"] = torch.cat([batch.sites[layer][i] for batch in batches])
            tensors[f"{layer}.{name}_mean"] = torch.stack([batch.means[layer][i] for batch in batches])
    with atomic_folder(shard) as partial:
        save_file(tensors, partial / "activations.safetensors")
        ends = [asdict(batch.cursor) for batch in batches]
        write_json(partial / "shard.json", {"tokens": len(tensors["ids"]), "ends": ends})


def _held(folder: Path) -> dict[str, Any]:
    held = read_json(folder / "cache.json")
    if not isinstance(held, dict) or not isinstance(held.get("fingerprints"), dict):
        raise MxdError(f"{folder / 'cache.json'} is not an activation cache's; choose another folder.")
    return held


def _shards(folder: Path) -> list[Path]:
    shards = sorted(folder.glob("shard-*"))
    for number, shard in enumerate(shards):
        expected = folder / f"shard-{number:06d}"
        if shard != expected:
            raise MxdError(f"{expected} is missing. {ANEW}")
    return shards


def _described(shard: Path) -> dict[str, Any]:
    try:
        return read_json(shard / "shard.json")
    except MxdError as error:
        raise MxdError(f"{error}. {ANEW}") from error


def _ends(shard: Path) -> list[Cursor]:
    return [Cursor(**end) for end in _described(shard)["ends"]]


def _cursors(folder: Path) -> list[Cursor]:
    return [end for shard in _shards(folder) for end in _ends(shard)]
