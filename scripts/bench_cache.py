"""Time writing and reading a cache of activations: in order and mixed, in each dtype, with and without verification.

    python scripts/bench_cache.py [--tokens 262144] [--width 768] [--folder FOLDER] [--json FILE] [--check]

The activations are random, so no base model is timed. The first reading verifies every shard, the second does not.
Files just written are in memory, so the disk's own speed is not measured. `mixed` mixes eight shards in batches of
4,096. `--check` names what is read at less than twice the rate of a transcoder's steps (28,000: peers.json).
"""

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import get_args

import torch
from goals import conclude

from mxd.artifacts.provenance import versions
from mxd.data.activations import Batch, Cursor, WindowFilter
from mxd.data.cache import Dtype, Stream, cache_bytes, claim_cache, write_cache
from mxd.data.prefetch import ahead
from mxd.data.reading import cached_batches, mixed_batches

BATCH, WINDOW = 4096, 32
"""Tokens in a batch, batches in a window: the defaults of a run."""

FAST = 56_000
"""Tokens a second that reading is to reach, so that it keeps no step waiting."""

READ = ("in order, verified", "in order", "mixed")


def stream(width: int) -> Stream:
    """Random batches of one layer, the same for every window."""
    x, y = torch.randn(2, BATCH, width, generator=torch.Generator().manual_seed(0))
    ids, means = torch.arange(BATCH), {0: (x.mean(0), y.mean(0))}

    def batches(start: Cursor, accept: WindowFilter) -> Iterator[Batch]:
        window = start.context
        while True:
            if accept(Cursor(window), WINDOW):
                for b in range(WINDOW):
                    end = Cursor(window, 0, b + 1) if b + 1 < WINDOW else Cursor(window + 1)
                    yield Batch({0: (x, y)}, ids, means, end)
            window += 1

    return batches


def tokens_per_second(batches: Iterator[Batch], tokens: int) -> float:
    """Read as training does, and use every number once, as any step must."""
    begin = time.perf_counter()
    for batch in islice(ahead(batches, 2), tokens // BATCH):
        assert batch.sites[0][0].sum().isfinite() and batch.sites[0][1].sum().isfinite()
    return tokens / (time.perf_counter() - begin)


def measure(folder: Path, dtype: Dtype, tokens: int, width: int) -> dict[str, float]:
    """Write a cache, and read it in every way."""
    identity = {"batch_tokens": BATCH, "buffer_tokens": BATCH * WINDOW, "fingerprints": {"0": "random"}}
    claim_cache(folder, identity, cache_bytes([(width, width)], tokens, dtype), dtype)
    begin = time.perf_counter()
    write_cache(folder, stream(width), tokens)
    rates = {"writing": tokens / (time.perf_counter() - begin)}
    begin = time.perf_counter()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as handle:
            hashlib.file_digest(handle, "sha256")
    rates["SHA-256 alone"] = tokens / (time.perf_counter() - begin)
    fresh = folder.rename(folder.with_name(f"{folder.name}-moved"))  # under another name it is verified anew
    rates["in order, verified"] = tokens_per_second(cached_batches(fresh, [0]), tokens)
    rates["in order"] = tokens_per_second(cached_batches(fresh, [0]), tokens)
    rates["mixed"] = tokens_per_second(mixed_batches(fresh, [0], BATCH, 8), tokens)
    return rates


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--folder", type=Path, help="where the caches are written, and removed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help=f"exit 1 where fewer than {FAST:,} tokens/s are read")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rates = {d: measure(Path(folder, d), d, args.tokens, args.width) for d in get_args(Dtype)}
    print(f"{args.tokens:,} tokens, one layer, width {args.width}, {torch.get_num_threads()} threads; tokens/s\n")
    print(f"| | {' | '.join(rates)} |\n|---|{'---|' * len(rates)}")
    for name in rates["float32"]:
        print(f"| {name} | {' | '.join(f'{rates[dtype][name]:,.0f}' for dtype in rates)} |")
    if args.json:
        args.json.write_text(json.dumps({"versions": versions(), **rates}, indent=2) + "\n")
    if args.check:
        slow = [(d, way) for d, of in rates.items() for way in READ if of[way] < FAST]
        conclude([f"{d}, {way}: {rates[d][way]:,.0f} tokens/s, at least {FAST:,}" for d, way in slow])


if __name__ == "__main__":
    main()
