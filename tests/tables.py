"""Small tables of every format that texts are read from."""

import gzip
import json

import pyarrow
from pyarrow import csv, parquet

SUFFIXES = [".csv", ".csv.gz", ".json", ".json.gz", ".jsonl", ".jsonl.gz", ".parquet"]


def write_table(path, rows):
    """Write rows in the format that the path's suffix names; returns the path."""
    if path.name.endswith(".gz"):
        plain = write_table(path.with_suffix(""), rows)
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows) + "\n", encoding="utf-8")
    else:
        table = pyarrow.Table.from_pylist(rows)
        csv.write_csv(table, path) if path.suffix == ".csv" else parquet.write_table(table, path)
    return path
