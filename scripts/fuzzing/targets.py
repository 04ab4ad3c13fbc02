"""Everything that reads files that others wrote: how hostile input for it is made, and what is called with it."""

import contextlib
import csv
import gzip
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import strategies as st

from fuzzing import models
from fuzzing.strategies import (
    MARK,
    Draw,
    atoms,
    chances,
    damaged,
    damaged_tensors,
    localised,
    numbers,
    replace_file,
    spoil_folder,
    spoilt,
    texts,
    values,
    write_json,
)

HERE = Path(__file__).resolve().parents[2]

Load = Callable[[], object]
"""Reads one input; must return, or raise MxdError."""


@dataclass(frozen=True)
class Target:
    """One loader."""

    prepare: Callable[[Path], Any]
    """Makes valid files once, in a folder of its own."""
    make: Callable[[Draw, Path, Any], Load]
    """Writes one input under ``root/input`` and returns what reads it; only ``root/out`` may change then."""
    share: int = 10
    """The share of inputs it gets, relative to the others."""
    own: tuple[str, ...] = ("out",)
    """What it may change in the watched folder."""


def frozen() -> Any:
    """Return the bundled model that everything here is made for."""
    from mxd.model.loading import load_frozen

    return load_frozen("tiny-gpt2", device="cpu")


def layers(folder: Path) -> Path:
    """Write one small layer of every method and sparsity."""
    from mxd.artifacts.checkpoint import save_layer
    from mxd.artifacts.provenance import Provenance
    from mxd.layers import parse_layer

    encoder = {"hidden": 8, "activation": "relu", "glu": True}
    kinds = [
        {"method": "mxd", "sparsity": {"kind": "random_k", "k": 2}, **encoder},
        {"method": "transcoder", "skip": True},
        {"method": "transcoder", "sparsity": {"kind": "jumprelu"}},
        {"method": "cp_mumoe", "rank": 3, "sparsity": {"kind": "topk", "k": 3}, **encoder},
        {"method": "tr_mumoe", "rank_3": 3, "start": "replicate", **encoder},
        {"method": "tucker_mumoe", "rank_units": 2, "rank_in": 3, "rank_out": 2, "expert_bias": True, **encoder},
        {"method": "moe", **encoder},
        {"method": "topk_sae", "sparsity": {"kind": "relu_l1", "l1": 0.1}},
    ]
    for number, fields in enumerate(kinds):
        sizes = {"d_in": 6, "d_out": 6, "num_units": 7, "sparsity": {"kind": "topk", "k": 2}, **fields}
        config = parse_layer(sizes)
        about = Provenance(
            model="tiny-gpt2",
            revision=None,
            block=number,
            fingerprint="0" * 16,
            excluded_ids=(0,),
            data={"source": "bundled", "split": "train", "context": 16},
            training={"recipe": "short", "steps": 10, "settings": {"lr": 0.001}},
            tokens=1000,
            versions={"mxd": "0"},
        )
        save_layer(folder / f"block{number}-{config.slug}", config.build(), about, {"training": {"fvu": 0.5}})
    return folder


def others(folder: Path, suffix: str) -> list[bytes]:
    """Return all files of a kind, from which bytes are spliced in."""
    return [path.read_bytes() for path in sorted(folder.rglob(f"*{suffix}"))]


def spoil_files(draw: Draw, folder: Path, root: Path, source: Path) -> None:
    """Spoil one or two files of a folder by their kind, and perhaps the folder itself."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for _ in range(draw(st.integers(1, 2))):
        path = files[draw(chances) % len(files)]
        kind = draw(st.integers(0, 15))
        if kind == 0:
            replace_file(draw, path, root)
        elif path.is_symlink() or not path.is_file():
            continue
        elif kind == 1:
            path.write_bytes(pickled(draw, root))
        elif path.suffix == ".safetensors":
            path.write_bytes(damaged_tensors(draw, path.read_bytes(), others(source, ".safetensors")))
        elif path.suffix == ".json" and kind < 12:
            with contextlib.suppress(ValueError, RecursionError):
                write_json(path, spoilt(draw, json.loads(path.read_bytes())), root)
        elif path.suffix == ".json" and kind == 12:
            path.write_text("[" * 50_000 if draw(st.booleans()) else '{"a":' * 50_000)
        else:
            path.write_bytes(damaged(draw, path.read_bytes(), others(source, path.suffix)))
    spoil_folder(draw, folder, root)


class _Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


def pickled(draw: Draw, root: Path) -> bytes:
    """Return a pickle that would touch a file in the watched folder: bare, as torch's, as numpy's."""
    import numpy as np

    payload = {"cfg": {"is_transcoder": True}, "state_dict": {}, "x": _Payload(f"touch {root}/escaped")}
    kind = draw(st.integers(0, 4))
    if kind < 2:
        return pickle.dumps(payload, protocol=draw(st.integers(0, 5)))
    buffer = io.BytesIO()
    if kind == 4:
        np.savez(buffer, a=np.array([payload], dtype=object))
    else:
        torch.save(payload, buffer, _use_new_zipfile_serialization=kind == 2)
    return buffer.getvalue()


# Checkpoints


def one_layer(draw: Draw, root: Path, source: Path) -> Load:
    """One layer's folder; the attacker knows how to make its hash fit."""
    from mxd.artifacts.checkpoint import load_layer

    folder = sorted(source.iterdir())[draw(st.integers(0, 4))]
    shutil.copytree(folder, root / "input")
    spoil_files(draw, root / "input", root, source)
    if draw(st.booleans()):
        _fit_hash(root / "input")

    def load() -> None:
        layer = load_layer(root / "input").layer
        layer(torch.zeros(2, layer.config.d_in or 0))

    return load


def _fit_hash(folder: Path) -> None:
    config, tensors = folder / "config.json", folder / "model.safetensors"
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        if all(path.is_file() and not path.is_symlink() for path in (config, tensors)):
            sealed = json.loads(config.read_text()) | {
                "tensors_sha256": hashlib.sha256(tensors.read_bytes()).hexdigest()
            }
            config.write_text(json.dumps(sealed))


def huge_layer(draw: Draw, root: Path, source: Path) -> Load:
    """A layer whose config promises more than its file holds: refused before anything is allocated."""
    from mxd.artifacts.checkpoint import load_layer

    folder = sorted(source.iterdir())[draw(st.integers(0, 4))]
    shutil.copytree(folder, root / "input")
    config = json.loads((root / "input" / "config.json").read_text())
    sizes = ("num_units", "d_in", "d_out", "hidden", "rank")
    for _ in range(draw(st.integers(1, 3))):
        config["layer"][draw(st.sampled_from(sizes))] = draw(numbers)
    write_json(root / "input" / "config.json", config, root)
    return lambda: load_layer(root / "input")


def layer_set(draw: Draw, root: Path, source: Path) -> Load:
    """A folder of layers, loaded and described."""
    from mxd.artifacts.checkpoint import load_layers

    shutil.copytree(source, root / "input", symlinks=True)
    spoil_files(draw, root / "input", root, source)
    if draw(st.booleans()):
        for folder in (root / "input").iterdir():
            _fit_hash(folder)
    pattern = draw(st.sampled_from(("*", "block0*", "[", "*" * 50, "../*", "\0")))

    def load() -> None:
        if pattern == "*":
            command("info", str(root / "input"))
        load_layers(root / "input", pattern)

    return load


def state(folder: Path) -> Path:
    """Write two saved states of a run."""
    from mxd.data.activations import Cursor
    from mxd.training.state import Info, save_state

    for step in (1, 2):
        tensors = {"layer/encoder": torch.ones(3, 2), "last_active": torch.zeros(3, dtype=torch.int64)}
        info = Info(
            run_id="0" * 32,
            step=step,
            tokens=16 * step,
            origin={"seed": 0, "blocks": [1]},
            cursor=Cursor(batch=step, text="f" * 32),
            counted={"a": 1, "b": 1},
            metrics_bytes=100,
            reported={"a": {"fvu": 0.5}},
        )
        save_state(folder / "state", {"a": tensors, "b": tensors}, info)
    return folder


def run_state(draw: Draw, root: Path, source: Path) -> Load:
    """The saved states of a run; the attacker knows how to make a manifest fit."""
    from mxd.training.state import load_state

    shutil.copytree(source, root / "input")
    spoil_files(draw, root / "input", root, source)
    if draw(st.booleans()):
        for folder in (root / "input" / "state").iterdir():
            _fit_manifest(folder)

    def load() -> None:
        newest = load_state(root / "input" / "state")
        for part in newest.parts if newest else ():
            newest.tensors(part)

    return load


def _fit_manifest(folder: Path) -> None:
    files = [f for f in folder.glob("*") if f.is_file() and not f.is_symlink() and f.name != "manifest.json"]
    entries = {f.name: {"bytes": f.stat().st_size, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()} for f in files}
    if folder.is_dir() and not (folder / "manifest.json").is_dir() and not (folder / "manifest.json").is_fifo():
        (folder / "manifest.json").unlink(missing_ok=True)
        (folder / "manifest.json").write_text(json.dumps({"format": 4, "files": entries}, ensure_ascii=True))


def cache(folder: Path) -> Any:
    """Write a small activation cache."""
    from mxd.config import parse_config
    from mxd.training.source import cache_activations

    raw = {"replacements": [{"method": "transcoder", "num_units": 64}], "blocks": [0], "model": {"device": "cpu"}}
    (folder / "train.txt").write_text("some words to read. " * 200)
    raw |= {
        "data": {"source": str(folder), "context": 16},
        "training": {"tokens": 96, "batch_tokens": 16, "buffer_tokens": 32},
    }
    config, base = parse_config(raw), frozen()
    cache_activations(config, folder / "cache", base)
    about = json.loads((folder / "cache" / "cache.json").read_text())
    return folder, {name: value for name, value in about.items() if name not in ("format", "dtype")}


def cached(draw: Draw, root: Path, prepared: Any) -> Load:
    """An activation cache; the attacker knows how to seal one."""
    from mxd.data.reading import cached_batches, cached_tokens, check_cache

    source, identity = prepared
    shutil.copytree(source / "cache", root / "input")
    spoil_files(draw, root / "input", root, source)
    if draw(st.booleans()):
        _seal_shards(root / "input")

    def load() -> None:
        check_cache(root / "input", identity)
        cached_tokens(root / "input")
        for _ in cached_batches(root / "input", [0]):
            pass

    return load


def _seal_shards(folder: Path) -> None:
    from mxd.data.shards import seal_of

    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        for path in folder.glob("shard-*.json"):
            if not all(p.is_file() and not p.is_symlink() for p in (path, folder / "cache.json")):
                continue
            entry = json.loads(path.read_text())
            data = path.with_suffix(".safetensors")
            if data.is_file() and not data.is_symlink():
                entry |= {"size": data.stat().st_size, "sha256": hashlib.sha256(data.read_bytes()).hexdigest()}
            entry.pop("seal", None)
            entry["seal"] = seal_of(json.loads((folder / "cache.json").read_text()), entry)
            path.write_text(json.dumps(entry))


# Other tools' files


def foreign(folder: Path) -> Any:
    """Write transcoders for two blocks in every format that is read, for a model of width 64."""
    from mxd.artifacts.checkpoint import Trained
    from mxd.artifacts.provenance import Provenance
    from mxd.layers import parse_layer
    from mxd.share.formats import FORMATS
    from mxd.share.formats.base import Outgoing

    base = frozen()
    width = base.mlp_shape(0).d_in
    for tool, kind in (("sparsify", "topk"), ("saelens", "jumprelu"), ("circuit-tracer", "topk")):
        sparsity = {"kind": kind} | ({"k": 2} if kind == "topk" else {})
        fields = {"method": "transcoder", "num_units": 5, "d_in": width, "d_out": width, "sparsity": sparsity}
        outgoing = []
        for block in (0, 1):
            about = Provenance(model="tiny-gpt2", revision=None, block=block, fingerprint=base.fingerprint(block))
            trained = Trained(parse_layer(fields).build(), about, folder)
            outgoing.append(Outgoing(trained.layer, about))
        write = FORMATS[tool].write
        assert write is not None
        write(outgoing, folder / tool, base)
    _gemma(folder / "gemma-scope", width)
    _reference(folder / "reference", width)
    return folder, base


def _gemma(folder: Path, width: int) -> None:
    from safetensors.torch import save_file

    shapes = {"w_enc": (width, 5), "b_enc": (5,), "w_dec": (5, width), "b_dec": (width,), "threshold": (5,)}
    folder.mkdir()
    save_file({name: torch.rand(shape) for name, shape in shapes.items()}, folder / "params.safetensors")
    norm = "transformer.h.1.ln_2.output"
    settings = {"architecture": "jump_relu", "hf_hook_point_in": "transformer.h.1.mlp.input", "width": 5, "n": norm}
    settings |= {"hf_hook_point_out": "transformer.h.1.mlp.output", "model_name": "tiny-gpt2"}
    (folder / "config.json").write_text(json.dumps(settings))


def _reference(folder: Path, width: int) -> None:
    folder.mkdir()
    cfg = {"is_transcoder": True, "hook_point": "blocks.1.ln2.hook_normalized", "model_name": "tiny-gpt2"}
    cfg |= {"out_hook_point": "blocks.1.hook_mlp_out", "mlp_activation_fn": "relu", "topk": 2, "seed": 0}
    shapes = {"W_enc": (width, 5), "b_enc": (5,), "W_dec": (5, width), "b_dec_out": (width,)}
    tensors = {name: torch.rand(shape) for name, shape in shapes.items()}
    torch.save({"cfg": cfg, "state_dict": tensors | {"b_dec": torch.rand(width)}}, folder / "dunefsky.pt")
    conditional = {"gate": (4, width), "gate_bias": (4,), "W_cond": (width, 4)}
    tensors |= {name: torch.rand(shape) for name, shape in conditional.items()}
    torch.save({"cfg": cfg | {"use_conditional": True}, "state_dict": tensors}, folder / "mxd.pt")


def importing(tool: str) -> Target:
    """Return the import of one format."""

    def make(draw: Draw, root: Path, prepared: Any) -> Load:
        from mxd.share import formats

        source, base = prepared
        shutil.copytree(source / tool, root / "input")
        at = root / "input"
        if tool == "reference":
            at = at / draw(st.sampled_from(("dunefsky.pt", "mxd.pt")))
            if draw(st.booleans()):
                saved = torch.load(at, weights_only=True)
                spoil = draw(st.sampled_from(("cfg", "state_dict", "whole", "tensor")))
                if spoil == "tensor":
                    name = sorted(saved["state_dict"])[draw(st.integers(0, 4))]
                    shape = draw(st.sampled_from(((), (0,), (5,), (5, 5), (0, 64), (64, 0), (5, 64, 1))))
                    kinds = (torch.float64, torch.int64, torch.complex64, torch.bool)
                    saved["state_dict"][name] = torch.ones(shape, dtype=draw(st.sampled_from(kinds)))
                elif spoil == "whole":
                    saved = localised(spoilt(draw, saved), root)
                else:
                    saved[spoil] = localised(spoilt(draw, saved[spoil]), root)
                torch.save(saved, at)
        else:
            at = root / "input"
        if not (tool == "reference" and draw(st.booleans())):
            spoil_files(draw, root / "input", root, source)
        formats.load_frozen = lambda name, device="auto": base  # whatever the files call it
        layer = draw(st.sampled_from((None, None, 0, 1, -1, 10**9)))
        reads = draw(st.sampled_from((None, "mlp_in", "normalized")))
        return lambda: formats.import_layers(at, root / "out", tool, "tiny-gpt2", layer, reads)

    return Target(foreign, make, share=2)


# Configs


def configs(folder: Path) -> Any:
    """Return a valid config."""
    raw = {
        "run": "fuzz",
        "out": "nowhere",
        "blocks": [0, 1],
        "seed": 0,
        "replacements": [{"method": ["mxd", "transcoder"], "sparsity": {"kind": "topk", "k": [2, 4]}}],
        "model": {"source": "tiny-gpt2", "dtype": "float32"},
        "data": {"source": "bundled", "context": 16},
        "sizing": {"expansion": 2},
        "training": {"recipe": "short", "tokens": 10_000, "batch_tokens": 100, "buffer_tokens": 1000},
        "evaluation": {"questions": ["units"], "units": {"tokens": 10}},
    }
    return raw


def _bomb(draw: Draw, depth: int, width: int) -> str:
    """Return aliases of aliases: flow lists, mappings, or merged keys."""
    kind = draw(st.integers(0, 2))
    lines = ["a0: &a0 [1, 2]" if kind == 0 else "a0: &a0 {x: 1}"]
    for level in range(1, depth):
        inner = ", ".join([f"*a{level - 1}"] * width)
        if kind == 0:
            lines.append(f"a{level}: &a{level} [{inner}]")
        elif kind == 1:
            named = ", ".join(f"k{n}: *a{level - 1}" for n in range(width))
            lines.append(f"a{level}: &a{level} {{{named}}}")
        else:
            lines.append(f"a{level}: &a{level} {{<<: [{inner}], y{level}: 1}}")
    field = draw(st.sampled_from(("replacements", "blocks", "run", "data")))
    return "\n".join([*lines, f"{field}: {'[' if kind else ''}*a{depth - 1}{']' if kind else ''}", ""])


def yaml_text(draw: Draw, raw: Any, root: Path) -> bytes:
    """Return a hostile config."""
    kind = draw(st.integers(0, 11))
    if kind < 5:
        text = yaml.safe_dump(localised(spoilt(draw, raw), root), allow_unicode=False)
    elif kind == 5:
        text = _bomb(draw, draw(st.sampled_from((3, 10, 30))), draw(st.sampled_from((2, 10))))
    elif kind == 6:
        opening, closing = draw(st.sampled_from((("[", "]"), ("{a: ", "}"), ("- ", ""), ("? ", ""))))
        depth = draw(st.sampled_from((10, 500, 5000)))
        text = "replacements: \n" + opening * depth + "1" + closing * depth
    elif kind == 7:
        tags = ("!!python/object/apply:os.system", "!!python/name:os.system", "!!binary", "!!timestamp", "!!set", "!x")
        text = f"run: {draw(st.sampled_from(tags))} ['touch {root}/escaped']\n" + yaml.safe_dump(raw)
    elif kind == 8:
        lists = {f"f{n}": list(range(10)) for n in range(draw(st.sampled_from((2, 5, 12))))}
        text = yaml.safe_dump(raw | {"replacements": [{"method": "mxd", **lists}]})
    elif kind == 9:
        name = draw(st.sampled_from(("seed", "blocks", "run", "training")))
        odd = (
            "2026-13-45",
            "0x" + "f" * 99,
            "1_" * 3000,
            "1:60:60",
            ".nan",
            "=",
            "<<",
            "~",
            "'\\0'",
            "*a",
            "&a",
            "1" * 9000,
        )
        text = yaml.safe_dump(raw) + f"\n{name}: {draw(st.sampled_from(odd))}\n"
    elif kind == 10:
        return yaml.safe_dump(raw).encode(draw(st.sampled_from(("utf-16", "utf-32", "cp037", "utf-8-sig"))))
    else:
        text = yaml.safe_dump(raw)
    return damaged(draw, text.encode(), [yaml.safe_dump(raw).encode()], most=2)


def config_file(draw: Draw, root: Path, raw: Any) -> Load:
    """A config as a file."""
    from mxd.config import dump_config, load_config

    path = root / "input" / "config.yaml"
    path.parent.mkdir()
    path.write_bytes(yaml_text(draw, raw, root))
    if draw(st.integers(0, 19)) == 13:
        replace_file(draw, path, root)
    return lambda: dump_config(load_config(path))


def overrides(draw: Draw, root: Path, raw: Any) -> Load:
    """Words of a command line."""
    from mxd.config import dump_config, load_config

    path = root / "input" / "config.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(raw))
    names = ("training.tokens", "blocks", "replacements.0.sparsity.k", "replacements", "data.source", "seed", "run")
    parts = st.sampled_from(("training", "replacements", "0", "²", "١", "9" * 5000, "-1", "", "seed", "x"))
    name = st.sampled_from(names) | st.lists(parts, min_size=1, max_size=4).map(".".join)
    word = st.one_of(
        name.map("--{}".format),
        st.tuples(name, texts | numbers.map(repr)).map(lambda pair: f"--{pair[0]}={pair[1]}"),
        texts,
        st.sampled_from(("[" * 5000, "{a: " * 5000, "&a [*a]", "&a [*a, *a]", "[1, 2", "!!python/name:os.system x")),
        values.map(lambda value: yaml.safe_dump(value) if _encodable(value) else "x"),
    )
    words = draw(st.lists(word, max_size=5))
    return lambda: dump_config(load_config(path, words))


def _encodable(value: Any) -> bool:
    return "\\ud8" not in json.dumps(value)


# Text


def tables(folder: Path) -> Path:
    """Write one small table of texts, labels, their spans and scores in every format."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"text": f"some words, number {n}", "label": f"class {n % 3}", "score": n / 10} for n in range(12)]
    rows = [{**row, "start": n % 5, "end": n % 5 + 4} for n, row in enumerate(rows)]
    with (folder / "t.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "t.json").write_text(json.dumps(rows))
    for suffix in (".txt", ".md"):
        (folder / f"t{suffix}").write_text("some words. " * 20)
    parquet.write_table(pa.Table.from_pylist(rows), folder / "t.parquet")
    nested = [{"text": {"a": [1]}, "label": [1, 2], "score": None}, {"text": None, "label": None, "score": 1e300}]
    parquet.write_table(pa.Table.from_pylist(nested), folder / "nested.parquet")
    return folder


def table(draw: Draw, root: Path, source: Path, suffixes: tuple[str, ...]) -> Path:
    """Write a spoilt table."""
    suffix = draw(st.sampled_from(suffixes))
    path = root / "input" / f"train{suffix}"
    path.parent.mkdir()
    packed, suffix = suffix.endswith(".gz"), suffix.removesuffix(".gz")
    kind = draw(st.integers(0, 9))
    files = sorted(source.glob(f"*{suffix}"))
    data = files[draw(chances) % len(files)].read_bytes()
    if kind < 3 and suffix == ".jsonl":
        lines = [json.dumps(localised(spoilt(draw, json.loads(line)), root)) for line in data.splitlines()]
        data = "\n".join(lines).encode()
    elif kind < 3 and suffix == ".json":
        data = json.dumps(localised(spoilt(draw, json.loads(data)), root)).encode()
    elif kind < 3 and suffix == ".csv":
        buffer = io.StringIO()
        writer = csv.writer(buffer, quoting=draw(st.sampled_from((0, 1))))
        for row in draw(st.lists(st.lists(atoms, max_size=4), max_size=5)):
            writer.writerow([str(cell)[:300] for cell in row])
        head = "" if draw(st.integers(0, 2)) == 0 else "text,label,score,start,end\n"
        data = (head + buffer.getvalue()).encode("utf-8", "replace")
    elif kind == 3:
        data = pickled(draw, root)
    elif kind == 4:
        big = b"x" * draw(st.sampled_from((200_000, 2_000_000)))
        data = {".csv": b'text,label\n"' + big, ".jsonl": b'{"text": "' + big + b'"}'}.get(suffix, big)
    elif kind == 5 and suffix in (".json", ".jsonl"):
        data = draw(st.sampled_from((b"[" * 50_000, b'{"text": ' * 50_000, b"1" * 9000, b'{"text": "\\ud800"}\n' * 3)))
    if packed:  # damaged before or after
        data = gzip.compress(damaged(draw, data) if draw(st.booleans()) else data, 1)
    path.write_bytes(damaged(draw, data, [file.read_bytes() for file in files]))
    if draw(st.integers(0, 19)) == 13:
        replace_file(draw, path, root)
    return path


def labelled(draw: Draw, root: Path, source: Path) -> Load:
    """A labelled set."""
    from mxd.data.labelled import labelled_texts
    from mxd.data.tables import TABLES

    path = table(draw, root, source, TABLES)
    columns = draw(
        st.sampled_from((("text", "label"), ("text", "label"), ("label", "text"), ("\0", ""), ("text",) * 2))
    )
    at = draw(st.sampled_from((path, path.parent, path.parent / "*")))
    return lambda: _utf8(labelled_texts(at, *columns).texts)


def scored(draw: Draw, root: Path, source: Path) -> Load:
    """Texts with scores."""
    from mxd.data.labelled import scored_texts
    from mxd.data.tables import TABLES

    path = table(draw, root, source, TABLES)
    return lambda: _utf8(scored_texts(path)[0])


def documents(draw: Draw, root: Path, source: Path) -> Load:
    """Training text."""
    from mxd.data.tables import DOCUMENTS
    from mxd.data.text import documents as read

    path = table(draw, root, source, DOCUMENTS)
    at = draw(st.sampled_from((path, path.parent, path.parent / "*")))
    split = draw(st.sampled_from(("train", "train", "test", "../x")))
    return lambda: _utf8(list(read(str(at), split)))


def _utf8(texts: list[str]) -> None:
    """Make sure that a tokenizer can read the texts."""
    for text in texts:
        text.encode()


# Results for people


def results(folder: Path) -> Path:
    """Write a run's folder with results of every kind."""
    sys.path.insert(0, str(HERE / "tests" / "report"))
    from full_run import fill

    return fill(folder / "run", ks=(2,))


def report(draw: Draw, root: Path, source: Path) -> Load:
    """A run's folder, for the report."""
    from mxd.report.page import write_report

    (root / "input").mkdir()
    for path in source.iterdir():
        if path.is_dir():
            (root / "input" / path.name).symlink_to(path)
    names = sorted(path.name for path in source.iterdir() if path.is_file())
    for name in names:
        if draw(st.booleans()):
            shutil.copyfile(source / name, root / "input" / name)
    name = names[draw(chances) % len(names)]
    path = root / "input" / name
    data = (source / name).read_bytes()
    if path.suffix == ".json":
        write_json(path, spoilt(draw, json.loads(data)), root)
    elif path.suffix == ".jsonl" and draw(st.booleans()):
        rows = [json.loads(line) for line in data.splitlines()[:5]]
        rows = [localised(spoilt(draw, row), root) for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if draw(st.integers(0, 4)) == 0 or not path.exists():
        path.write_bytes(damaged(draw, data))

    def load() -> None:
        for written in write_report(root / "input", root / "out" / "report.html"):
            assert MARK not in written.read_text(), f"{written.name} shows text as it is"

    return load


def cards(folder: Path) -> Any:
    """Return a layer's config and provenance, an evaluation of it, and a card."""
    source = layers(folder)
    path = sorted(source.iterdir())[1]
    config = json.loads((path / "config.json").read_text())
    sys.path.insert(0, str(HERE / "tests" / "report"))
    run = json.loads((results(folder / "results") / "faithfulness.json").read_text())
    return config, run, (path / "README.md").read_text()


def card(draw: Draw, root: Path, prepared: Any) -> Load:
    """The files that model cards are made from."""
    from mxd.artifacts.card import Member, layer_card, license_of, set_card
    from mxd.artifacts.folders import read_layer
    from mxd.artifacts.measured import Evaluation

    config, evaluation, readme = prepared
    folder = root / "input"
    folder.mkdir()
    write_json(folder / "config.json", config | {"provenance": spoilt(draw, config["provenance"])}, root)
    write_json(folder / "faithfulness.json", spoilt(draw, evaluation), root)
    (folder / "README.md").write_bytes(damaged(draw, readme.encode()))
    draw_figure = draw(st.integers(0, 9)) == 0

    def load() -> None:
        license_of((folder / "README.md").read_text("utf-8", "replace"))
        member = Member("one", *read_layer(folder))
        written = [layer_card(member, "org/name"), set_card([member, member], "org/name")]
        for text in written:
            text.encode()
            _, head, body = text.split("---\n", 2)
            assert yaml.safe_load(head)["library_name"] == "mxd"
            assert MARK not in re.sub(r"```python\n.*?\n```\n", "", body, flags=re.DOTALL), "a card shows text as it is"
        evaluated = Evaluation.read(folder / "faithfulness.json")
        if draw_figure and evaluated is not None:
            from mxd.common.files import read_json
            from mxd.report.figures import frontier

            frontier(read_json(folder / "faithfulness.json"), root / "out" / "frontier.png")

    return load


# Names


def reference(draw: Draw, root: Path, _: Any) -> Load:
    """A checkpoint by name: a path, a Hub reference, or neither."""
    from mxd.artifacts.folders import find_layers
    from mxd.artifacts.hub import HubReference

    (root / "input").mkdir()
    parts = (
        "org",
        "name",
        "..",
        ".",
        "a b",
        "-x",
        "",
        "~",
        "name@main",
        "@",
        "@refs/pr/1",
        "hf:",
        "\0",
        "é",
        "a" * 300,
    )
    joined = st.lists(st.sampled_from(parts), min_size=1, max_size=5).map("/".join)
    text = localised(draw(joined | texts | st.text(max_size=30)), root)
    revision = draw(st.none() | texts)

    def load() -> None:
        try:
            found = HubReference.parse(text)
            assert ".." not in found.subfolder.split("/") and not found.subfolder.startswith("/"), "leads out"
        finally:
            find_layers(text, revision=revision, local_files_only=True, cache_dir=root / "out")

    return load


def hub(folder: Path) -> Any:
    """Start a Hub on this machine."""
    sys.path.insert(0, str(HERE / "tests"))
    from huggingface_hub import constants
    from loopback_hub import LoopbackHub

    server = LoopbackHub().__enter__()
    constants.ENDPOINT = server.url
    constants.HUGGINGFACE_CO_URL_TEMPLATE = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_OFFLINE = False
    constants.HF_HUB_DISABLE_XET = True
    source = layers(folder)
    files = {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    return server, source, {name: data for name, data in files.items() if name.startswith("block1")}


def download(draw: Draw, root: Path, prepared: Any) -> Load:
    """A repository whose list of files leads elsewhere."""
    from loopback_hub import Blob, Repo

    from mxd.artifacts.transfer import pull

    server, _, original = prepared
    (root / "input").mkdir()
    known = list(original)
    names = ("../{}", "../../../../../../{}", "/{}", "{}/../../x", "a/b/{}", "{}\n", "./{}", "..", "a//{}", "\u202e{}")
    files = dict(original)
    for _ in range(draw(st.integers(1, 3))):
        name = known[draw(chances) % len(known)]
        data = files.pop(name, original[name])
        if draw(st.booleans()):
            damage = damaged_tensors if name.endswith(".safetensors") else damaged
            data = damage(draw, data)
        form = draw(st.sampled_from((*names, str(root) + "/{}", "{}")))
        files[form.format(name)] = data
    repo = Repo()
    repo.commit("main", {name: Blob(data, name.endswith(".safetensors")) for name, data in files.items()}, "x")
    server.repos = {"org/name": repo}
    return lambda: pull("org/name", root / "out" / "pulled", cache_dir=root / "out" / "cache")


def command(*words: str) -> None:
    """Run the command line; it must end by itself, without a traceback."""
    from mxd import cli
    from mxd.common.errors import MxdError

    sys.argv = ["mxd", *words]
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
            out.flush()
    except SystemExit as stop:
        if stop.code:
            raise MxdError("refused") from None


def words(draw: Draw, root: Path, source: Path) -> Load:
    """A command line."""
    (root / "input").mkdir()
    real = str(sorted(source.iterdir())[draw(st.integers(0, 4))])
    places = st.sampled_from((real, str(source), str(root / "input"), "org/name")) | texts.map(
        lambda t: localised(t, root)
    )
    name = draw(st.sampled_from(("info", "report", "evaluate", "convert", "steer", "units", "pull", "train", "fields")))
    options = ("--tokens", "--seed", "--out", "--from", "--to", "--units", "--block", "--scale", "--judge", "--context")
    odd = texts | numbers.map(str) | st.sampled_from(("0-99999999999999", "1,2,x", "http://[", "sparsify", "9" * 5000))
    given = [name, *draw(st.lists(places, max_size=2))]
    for option in draw(st.lists(st.sampled_from(options), max_size=3)):
        given += [option, draw(odd)]
    if "--out" not in given and name in ("report", "pull"):
        given += ["--out", str(root / "out" / "page.html")] if name == "report" else []
    return lambda: command(*(word.replace("\0", "") for word in given))


# Base models


def base_models(folder: Path) -> Any:
    """Write tiny models of every family and form, and return what a GGUF file is made of."""
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    models.save_all(folder)
    return folder, models.gguf_parts()


def base_model(draw: Draw, root: Path, prepared: Any) -> Load:
    """A base model's folder or GGUF file, loaded and read with, or outlined."""
    from mxd.model.loading import load_frozen, outline

    source, parts = prepared
    name = draw(st.sampled_from((*models.FAMILIES, "pickle", "gguf", "gguf")))
    folder = root / "input"
    shutil.copytree(source / name, folder)
    if name == "gguf":
        if draw(st.integers(0, 3)):
            (folder / "model.gguf").write_bytes(_spoilt_gguf(draw, *parts))
        else:
            spoil_files(draw, folder, root, source)
    elif draw(st.booleans()):
        path = folder / "config.json"
        write_json(path, _spoilt_settings(draw, json.loads(path.read_text())), root)
    else:
        spoil_files(draw, folder, root, source)
    at = folder / "model.gguf" if name == "gguf" else folder
    only_outlined, allow_pickle = draw(st.integers(0, 4)) == 0, draw(st.booleans())

    def load() -> None:
        if only_outlined:
            outline(at).mlp_shape(0)
            return
        base = load_frozen(at, device="cpu", allow_pickle=allow_pickle)
        ids = torch.tensor([base.tokenizer("the end")["input_ids"]])
        base.logits(ids)
        base.record(ids, [0])
        base.mlp_shape(0)
        base.fingerprint(0)

    return load


def _spoilt_settings(draw: Draw, config: Any) -> Any:
    """Return a config.json with other sizes, or with what makes transformers fetch or run something."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return spoilt(draw, config)
    names = sorted(name for name, value in config.items() if isinstance(value, int | float))
    types = ("gpt2", "llama", "gpt_neo", "bloom", "mamba", "mixtral", "qwen3", "gemma2", "opt", "bert", "t5", "x", 3)
    others = {
        "model_type": st.sampled_from(types),
        "_attn_implementation": st.sampled_from(("x/kernel", "flash_attention_2", "eager", {"": "x/y"}, 3)),
        "experts_implementation": st.sampled_from(("x/kernel", "eager", 3)),
        "quantization_config": st.sampled_from(({"quant_method": "gptq"}, {"load_in_8bit": True}, {}, "x")),
        "auto_map": st.sampled_from(({"AutoConfig": "x.Y", "AutoModelForCausalLM": "x--y.Z"}, ["x"], "x")),
        "transformers_weights": st.sampled_from(("adapter_model.bin", "../x.safetensors", "model.safetensors", 3)),
        "configuration_files": st.sampled_from((["config.4.0.0.json"], ["config.1.json"], 3)),
        "rope_parameters": values | st.sampled_from(({"rope_type": "yarn", "factor": 1e9}, {"rope_theta": 0})),
        "num_labels": numbers,
        "layer_types": st.sampled_from((["full_attention"] * 2, ["x"], 3)),
        "dtype": texts | st.sampled_from(("load", "float8_e4m3fn", "int8")),
        "per_layer_config": values,
    }
    for _ in range(draw(st.integers(1, 3))):
        if kind == 1:
            name = draw(st.sampled_from(sorted(others)))
            config[name] = draw(others[name])
        else:
            config[draw(st.sampled_from(names))] = draw(numbers if kind == 2 else atoms)
    return config


def _spoilt_gguf(draw: Draw, pairs: models.Pairs, tensors: models.Tensors) -> bytes:
    """Return a GGUF file with wrong values, kinds, sizes, counts or bytes."""
    pairs, tensors, counts = list(pairs), list(tensors), None
    for _ in range(draw(st.integers(0, 3))):
        at = draw(chances) % len(pairs)
        name, kind, value = pairs[at]
        change = draw(st.integers(0, 7))
        if change == 0:
            del pairs[at]
        elif change == 1:
            pairs[at] = (draw(texts), kind, value)
        elif change == 2:
            pairs[at] = (name, draw(st.sampled_from((0, 3, 4, 6, 8, 10, 12, 99))), draw(atoms))
        elif change == 3:
            pairs[at] = (name, 9, (draw(st.sampled_from((4, 6, 8, 9, 99))), []))
        elif change < 6 and kind in models.NUMBERS:
            pairs[at] = (name, kind, draw(numbers))
        elif change == 6:
            counts = (draw(st.sampled_from((0, 1, 20, 2**31, 2**60))), draw(st.sampled_from((0, 1, 17, 2**31, 2**60))))
        else:
            at = draw(chances) % len(tensors)
            name, shape, kind, data = tensors[at]
            sizes = st.lists(st.sampled_from((0, 1, 8, 260, 2**20, 2**32, 2**62)), max_size=5)
            tensors[at] = (name, draw(st.just(shape) | sizes), draw(st.sampled_from((0, 1, 2, 8, 14, 30, 99))), data)
    data = models.gguf_bytes(pairs, tensors, counts, draw(st.sampled_from((3, 3, 3, 2, 1, 0x03000000))))
    return damaged(draw, data, most=1)


TARGETS = {
    "layer": Target(layers, one_layer, 40),
    "huge layer": Target(layers, huge_layer, 6),
    "set of layers": Target(layers, layer_set, 4),
    "run state": Target(state, run_state, 15, ("out", "input")),
    "activation cache": Target(cache, cached, 8),
    **{tool: importing(tool) for tool in ("sparsify", "saelens", "circuit-tracer", "gemma-scope", "reference")},
    "config": Target(configs, config_file, 30),
    "overrides": Target(configs, overrides, 30),
    "labelled set": Target(tables, labelled, 20),
    "scored texts": Target(tables, scored, 4),
    "text": Target(tables, documents, 20),
    "report": Target(results, report, 2),
    "card": Target(cards, card, 3),
    "base model": Target(base_models, base_model, 12),
    "reference to the Hub": Target(lambda folder: None, reference, 20),
    "download": Target(hub, download, 2),
    "command line": Target(layers, words, 1),
}
"""Every loader, by the name that counts go by."""
