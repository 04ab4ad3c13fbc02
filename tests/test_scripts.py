"""The benchmarks still run, at toy sizes; what they print is not looked at, and no time is."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import mxd
from mxd.layers import MLPShape
from mxd.ops import reference

SCRIPTS = Path(mxd.__file__).parent.parent / "scripts"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, *words: str) -> dict:
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [name, *words, "--json", str(file)])
    script(name).main()
    return json.loads(file.read_text())


@pytest.mark.long
def test_bench_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mxd.ops.sparse.WORTH", 8)
    monkeypatch.setattr("mxd.training.step.candidate_dtype", lambda device, asked: "bfloat16")
    words = "--model tiny-gpt2 --block 2 --expansion 8 --batches 1 --tokens 256 --repeats 1"
    found = run(monkeypatch, tmp_path, "bench_run", *words.split())
    assert len(found["steps"]) == 16 and found["all steps"] == sum(found["steps"].values())
    assert found["rows proposed for"] > found["rows searched anew"]
    assert found["rows proposed for"] % 4096 == 0


@pytest.mark.long
def test_check_quality(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    fields = "training.tokens=256 training.batch_tokens=128 training.buffer_tokens=256"
    methods = "replacements=[{method:transcoder,sparsity:{kind:topk,k:[16,32]}}]".replace(":", ": ")
    dense, plain = reference.topk_linear, []
    monkeypatch.setattr(reference, "topk_linear", lambda *inputs: (plain.append(1), dense(*inputs))[1])
    words = f"{SCRIPTS.parent}/configs/tiny.yaml --seeds 2 --held-out 256 --set {fields}".split()
    rows = run(monkeypatch, tmp_path, "check_quality", *words, methods)["rows"]
    assert [(row["replacement"][-3:], row["path"]) for row in rows] == [
        *(("k16", path) for path in ("plain", "float32", "bfloat16")),
        *(("k32", path) for path in ("plain", "float32")),
    ]
    assert len(plain) == 8  # steps of two batches, seeds and replacements, on the plain path alone
    assert [row.get("rows proposed for") for row in rows] == [None, None, 512, None, None]
    assert rows[0]["normalized_mse"] == pytest.approx(rows[2]["normalized_mse"], rel=1e-4)
    assert rows[0]["normalized_mse"][0] != rows[0]["normalized_mse"][1]


@pytest.mark.long
def test_study_recipes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    fields = "training.tokens=256 training.batch_tokens=128 training.buffer_tokens=256"
    words = f"--seeds 2 --held-out 256 --set {fields} --settings".split()
    names = ["fast", "fast, as a transcoder", "whole base", "paper's start, penalty 0.001", "fast, paper's start"]
    found = run(monkeypatch, tmp_path, "study_recipes", *words, *names)
    fast, disguised, base, penalised, paper = (found[name][0] for name in names)
    assert base["normalized_mse"] < 0.1 * fast["normalized_mse"] and base["dense_share"] > 0.9
    assert disguised["nmse_fixed_directions"] == pytest.approx(disguised["normalized_mse"], rel=0.01)
    assert disguised["stable_rank"] < 1.1 < fast["stable_rank"]
    assert paper != penalised


def test_measure_overlap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = script("measure_overlap")
    rng = np.random.default_rng(0)
    train = [" ".join(rng.choice(list("abcdé"), 200)) for _ in range(3)]
    held_out = [" ".join(rng.choice(list("abcdé"), 40)) for _ in range(3)] + [train[1][40:120], "a b", "x y z é ö"]
    for numbered, pieces in ((module.words(), str.split), (module.characters, list)):
        there = {tuple(pieces(text)[i : i + 3]) for text in train for i in range(len(pieces(text)) - 2)}
        runs = [[tuple(pieces(text)[i : i + 3]) for i in range(len(pieces(text)) - 2)] for text in held_out]
        expected = [sum(run in there for run in each) / len(each) for each in runs if each]
        assert module.overlap(train, held_out, numbered, 3) == expected and max(expected) == 1 > min(expected)
    monkeypatch.setattr(module, "documents", lambda source, split: [split * 30, source, f"{source} {split} " * 30])
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["measure_overlap", "--json", str(file)])
    module.main()
    numbers = json.loads(file.read_text())["test, Factbook"]
    assert numbers["words"] == {"documents": 1, "median": 0, "largest": 0}
    assert numbers["characters"]["documents"] == 2


@pytest.mark.long
def test_bench_gpu_tried_out_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = run(monkeypatch, tmp_path, "bench_gpu", *["--device", "cpu", "--small", "--repeats", "1", "--windows", "1"])
    assert found["settings"]["candidates"] == "bfloat16"


@pytest.mark.parametrize("label", ["MxD", "TC", "STC"])
def test_bench_step(monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    module = script("bench_step")
    monkeypatch.setattr(module, "SHAPES", {"toy": MLPShape(16, 16, 32, "silu", True)})
    monkeypatch.setattr(module, "TOKENS", 64)
    monkeypatch.setattr(module, "keep_freed_memory", lambda: None)
    row = module.bench("toy", label, 4, 1)
    assert {"train", "float32", "ours", "dense", "floor", "floor of as mxd train"} <= row["seconds"].keys()
    peaks = {key: module.peak_bytes("toy", label, 4, key) for key in ("train", "dense")}
    row["peak_bytes"] = {**peaks, "sparsify": 1}
    row["seconds"]["sparsify"] = row["seconds"]["train"] / 2
    lines = module.missed(row)
    assert all(line.startswith(f"toy {label}: ") for line in lines)
    module.print_row(row)
