"""How much of the bundled held-out text occurs word for word in its training text: shares of 20-grams, by document.

    python scripts/measure_overlap.py
    python scripts/measure_overlap.py --length 8 --json overlap.json --check

Splits are by document, but the Factbook's sections repeat each other's phrases from country to country. The table is in
mxd/assets/README.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from goals import conclude

from mxd.data.text import documents

SOURCES = {"sotu": "State of the Union", "factbook": "Factbook"}
Numbered = Callable[[str], np.ndarray]
"""A text's words or characters as numbers, equal ones with equal numbers."""


def characters(text: str) -> np.ndarray:
    """Return the characters of a text as numbers."""
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def words() -> Numbered:
    """Return a function that numbers words in the order of their first occurrence."""
    known: dict[str, int] = {}
    return lambda text: np.array([known.setdefault(word, len(known)) for word in text.split()], np.uint32)


def grams(numbers: np.ndarray, n: int) -> np.ndarray:
    """Return a hash of each n-gram."""
    scattered = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    scattered ^= scattered >> np.uint64(29)
    hashes = np.zeros(max(0, len(numbers) - n + 1), np.uint64)
    for k in range(n):
        hashes = hashes * np.uint64(0x100000001B3) + scattered[k : k + len(hashes)]
    return hashes


def overlap(train: Sequence[str], held_out: Sequence[str], numbered: Numbered, n: int = 20) -> list[float]:
    """Return the share of n-grams that are in the training text, for each held-out document that has any."""
    known = np.unique(np.concatenate([grams(numbered(text), n) for text in train]))
    per_text = (grams(numbered(text), n) for text in held_out)
    hits = (
        known[np.searchsorted(known, hashes).clip(max=len(known) - 1)] == hashes for hashes in per_text if len(hashes)
    )
    return [float(hashes.mean()) for hashes in hits]


def known(table: dict[str, dict[str, dict[str, float]]]) -> Iterator[str]:
    """Yield the held-out parts of which a document shares half of its text, or more, with the training text."""
    for name, units in table.items():
        for unit, numbers in units.items():
            if numbers["largest"] >= 0.5:
                yield f"{name}: a document shares {numbers['largest']:.0%} of its runs of {unit} with the training text"


def main() -> None:
    """Measure, print a table, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=20, help="words or characters in an n-gram")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit with 1 where half of a held-out document is known")
    args = parser.parse_args()
    parts = [(split, source) for split in ("validation", "test") for source in SOURCES]
    held_out = {part: list(documents(f"bundled:{part[1]}", part[0])) for part in parts}
    train = list(documents("bundled", "train"))
    table: dict[str, dict[str, dict[str, float]]] = {}
    for unit, numbered in {"words": words(), "characters": characters}.items():
        long = [text for texts in held_out.values() for text in texts if len(numbered(text)) >= args.length]
        share = dict(zip(long, overlap(train, long, numbered, args.length), strict=True))
        for (split, source), texts in held_out.items():
            shares = [share[text] for text in texts if text in share]
            numbers = {"documents": len(shares), "median": float(np.median(shares)), "largest": max(shares)}
            table.setdefault(f"{split}, {SOURCES[source]}", {})[unit] = numbers
    n = args.length
    print(f"| held out | documents | {n} words: median | largest | {n} characters: median | largest |")
    print("|---|---|---|---|---|---|")
    for name, units in table.items():
        cells = [f"{units[unit][key]:.1%}" for unit in ("words", "characters") for key in ("median", "largest")]
        print(f"| {name} | {units['characters']['documents']} | {' | '.join(cells)} |")
    if args.json:
        args.json.write_text(json.dumps(table, indent=2) + "\n")
    if args.check:
        conclude([*known(table)], "no held-out document shares half of its text with the training text")


if __name__ == "__main__":
    main()
