"""The benchmarks still run, at toy sizes; what they print is not looked at, and no time is."""

import importlib.util
import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from pretend import pretended

import mxd
from mxd.common.errors import MxdError
from mxd.layers import LAYERS, MLPShape
from mxd.ops import reference
from mxd.training.step import Trainee

SCRIPTS = Path(mxd.__file__).parent.parent / "scripts"
sys.path.append(str(SCRIPTS))  # where scripts find each other


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
    monkeypatch.setattr("mxd.ops.sparse.WORTH", (8, 0))
    monkeypatch.setattr("mxd.training.step.candidate_dtype", lambda device, asked: "bfloat16")
    words = "--model tiny-gpt2 --block 2 --expansion 8 --batches 1 --tokens 256 --repeats 1"
    found = run(monkeypatch, tmp_path, "bench_run", *words.split())
    assert len(found["steps"]) == 16 and found["all steps"] == sum(found["steps"].values())
    assert found["rows proposed for"] > found["rows searched anew"]
    assert found["rows proposed for"] % 4096 == 0
    assert found["forward"] == found["forward in float32"]  # too narrow for autocast
    errors = [found[f"FVU of outputs {how}"] for how in ("under autocast", "in bfloat16")]
    assert 0 < errors[0] < errors[1] < 0.01
    monkeypatch.setattr("mxd.model.autocast.WIDE", 1)
    monkeypatch.setattr("mxd.ops.dense.candidate_dtype", lambda device: "bfloat16")
    found = run(monkeypatch, tmp_path, "bench_run", *words.split(), "--single", "--batch-tokens", "256")
    assert list(found["steps"]) == ["block2-tc-k32"] and found["forward"] == found["forward under autocast"]
    assert found["stream"] > 0 < found["text"]


def test_bench_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    module = script("bench_cache")
    monkeypatch.setattr(module, "BATCH", 64)
    monkeypatch.setattr(module, "WINDOW", 2)
    file, words = tmp_path / "found.json", ["--tokens", "1024", "--width", "4", "--folder", str(tmp_path)]
    for fast, code in ((0, "0"), (10**12, "1")):
        monkeypatch.setattr(module, "FAST", fast)
        monkeypatch.setattr(sys, "argv", ["bench_cache", *words, "--json", str(file), "--check"])
        with pytest.raises(SystemExit, match=code):
            module.main()
    found = json.loads(file.read_text())
    assert all(found[dtype][way] > 0 for dtype in ("float32", "float16", "bfloat16") for way in module.READ)
    assert "bfloat16, mixed: " in capsys.readouterr().out and list(tmp_path.iterdir()) == [file]


@pytest.mark.long
def test_bench_tune(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = "--models tiny-gpt2 --methods mxd --expansion 6 --contexts 1 --context 16 --repeats 1 --k 4"
    plain, with_nmse = run(monkeypatch, tmp_path, "bench_tune", *words.split())["rows"]
    assert (plain["nmse"], with_nmse["nmse"]) == (0, 1) and plain["tokens"] == 16
    assert plain["ratio"] == plain["seconds"]["step"] / plain["seconds"]["passes"] > 0


@pytest.mark.long
def test_check_quality(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fields = "training.tokens=256 training.batch_tokens=128 training.buffer_tokens=256"
    methods = "replacements=[{method:transcoder,sparsity:{kind:topk,k:[16,64]}}]".replace(":", ": ")
    dense, plain = reference.topk_linear, []
    monkeypatch.setattr(reference, "topk_linear", lambda *inputs: (plain.append(1), dense(*inputs))[1])
    monkeypatch.setattr("mxd.ops.sparse.WORTH", (100, 0))  # candidates for K = 16 of 4,096 units, not for 64
    words = f"{SCRIPTS.parent}/configs/tiny.yaml --seeds 2 --held-out 256 --set {fields}".split()
    rows = run(monkeypatch, tmp_path, "check_quality", *words, methods)["rows"]
    assert [(row["replacement"][-3:], row["path"]) for row in rows] == [
        *(("k16", path) for path in ("plain", "float32", "bfloat16")),
        *(("k64", path) for path in ("plain", "float32")),
    ]
    assert len(plain) == 8  # steps of two batches, seeds and replacements, on the plain path alone
    assert [row.get("rows proposed for") for row in rows] == [None, None, 512, None, None]
    assert rows[0]["normalized_mse"] == pytest.approx(rows[2]["normalized_mse"], rel=1e-4)
    assert rows[0]["normalized_mse"][0] != rows[0]["normalized_mse"][1]
    scales: list[tuple[float, float]] = []
    scale = Trainee.scale
    monkeypatch.setattr(Trainee, "scale", lambda trainee, sizes: (scales.append(sizes), scale(trainee, sizes))[1])
    rows = run(monkeypatch, tmp_path, "check_quality", *words, methods, "training.recipe=scaled", "--paths", "float32")
    assert [row["path"] for row in rows["rows"]] == ["float32"] * 2 and len(plain) == 8 and len(scales) == 4
    rows = run(monkeypatch, tmp_path, "check_quality", *words, methods, "--paths", "float32", "autocast")["rows"]
    assert [row["path"] for row in rows] == ["float32", "autocast"] * 2
    assert rows[0]["normalized_mse"] == pytest.approx(rows[1]["normalized_mse"], rel=1e-2)
    assert rows[0]["normalized_mse"] != rows[1]["normalized_mse"]


@pytest.mark.long
def test_study_recipes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fields = "training.tokens=256 training.batch_tokens=128 training.buffer_tokens=256"
    words = f"--seeds 2 --held-out 256 --set {fields} --settings".split()
    names = ["fast", "fast, as a transcoder", "whole base", "paper's start, penalty 0.001", "fast, paper's start"]
    found = run(monkeypatch, tmp_path, "study_recipes", *words, *names)
    fast, disguised, base, penalised, paper = (found[name][0] for name in names)
    assert base["normalized_mse"] < 0.1 * fast["normalized_mse"] and base["dense_share"] > 0.9
    assert disguised["nmse_fixed_directions"] == pytest.approx(disguised["normalized_mse"], rel=0.01)
    assert disguised["stable_rank"] < 1.1 < fast["stable_rank"]
    assert paper != penalised
    with pytest.raises(SystemExit, match="2"):  # that which it is compared with is not among them
        run(monkeypatch, tmp_path, "study_recipes", *words, "fast", "--check")


def test_fast_is_checked_against_the_recipe_that_it_stands_for() -> None:
    module = script("study_recipes")
    fast, short = ([{"normalized_mse": e, "nmse_fixed_directions": 4 * e}] for e in (0.1, 0.2))
    assert module.missed({"fast": fast, "short, all tokens": short}) == []
    (line,) = module.missed({"fast": short, "short, all tokens": fast})
    assert line == "fast: NMSE 0.20000, 0.10000 of short, all tokens"
    disguised = [{"normalized_mse": 0.1, "nmse_fixed_directions": 0.35}]
    (line,) = module.missed({"fast": disguised, "short, all tokens": short})
    assert line == "fast: fixed / NMSE 3.50, 4.00 of short, all tokens"


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
    assert list(module.known({"a": {"words": {"largest": 0.49}, "characters": {"largest": 0.5}}})) == [
        "a: a document shares 50% of its runs of characters with the training text"
    ]


@pytest.mark.long
def test_bench_gpu_tried_out_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = run(monkeypatch, tmp_path, "bench_gpu", *["--device", "cpu", "--small", "--repeats", "1", "--windows", "1"])
    assert found["settings"]["candidates"] == "bfloat16"
    rows = {name: part["rows"] for name, part in found["parts"].items()}
    assert not any("error" in part for part in found["parts"].values())
    assert rows.pop("trace") == [] and all(rows.values())  # there are no kernels to trace
    assert rows["exact"][0]["furthest below"] < 1e-5
    functions = {row["function"]: row["ms"] for row in rows["step"]}
    assert {"proof", "dense encoder", "dense backward", "optimiser"} <= functions.keys()


@pytest.mark.long
def test_bench_gpu_tried_out_on_a_pretend_gpu() -> None:
    """Nothing in it mixes devices; kernels, traces and memory are a real one's."""
    module = script("bench_gpu")
    args = Namespace(repeats=1, windows=1, base_dtype="bfloat16", candidates="bfloat16", tf32="encoder", triton=False)
    with pretended() as gpu:
        bench = module.Bench(gpu.device, module.SMALL, args)
        for name in ("run", "step", "ceilings", "forwards", "topk", "exact"):
            assert list(module.PARTS[name](bench)), name


def test_a_part_of_bench_gpu_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    module, file, written = script("bench_gpu"), tmp_path / "found.json", []

    def good(bench):
        """Count."""
        yield {"number": 1}
        written.append(json.loads(file.read_text())["parts"] if file.exists() else None)
        yield {"number": 2, "more": 3.0}

    def bad(bench):
        """Fail."""
        yield {"number": 1}
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    monkeypatch.setattr(module, "PARTS", {"first": bad, "second": good})
    monkeypatch.setattr(sys, "argv", ["bench_gpu", "--device", "cpu", "--small", "--json", str(file)])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 1
    found = json.loads(file.read_text())["parts"]
    assert found["first"]["rows"] == [{"number": 1}]
    assert found["first"]["error"] == "OutOfMemoryError: CUDA out of memory"
    assert found["second"] == {"rows": [{"number": 1}, {"number": 2, "more": 3.0}]}
    assert list(written[0]) == ["first"]  # before the second part began
    assert "first failed: OutOfMemoryError" in capsys.readouterr().out


def test_bench_generate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The base model is the base model and the spliced one has all blocks replaced, in turn."""
    seen = []
    monkeypatch.setattr("mxd.evaluation.generation.greedy", lambda model, prompts, n, batch: seen.append(
        (len(prompts), len(prompts[0]), n, batch, [type(model.mlp(b)).__name__ for b in range(model.num_blocks)])
    ))  # fmt: skip
    words = "--model tiny-gpt2 --layers MxD STC --batches 1 3 --prompt-tokens 4 --new-tokens 2 --repeats 1 --k 4"
    found = run(monkeypatch, tmp_path, "bench_generate", *words.split())
    plain, replaced = ["GPT2MLP"] * 6, ["SplicedMLP"] * 6
    turns = [(batch, 4, 2, batch, mlps) for batch in (1, 3) for mlps in 2 * (plain, replaced)]
    assert seen == turns * 2
    assert [(row["layer"], row["batch"]) for row in found["rows"]] == [(n, b) for n in ("MxD", "STC") for b in (1, 3)]
    for row in found["rows"]:
        ratio = row["spliced_tokens_per_second"] / row["base_tokens_per_second"]
        assert row["ratio"] == pytest.approx(ratio) and row["params"] > 6 * row["units"] * 128
    for ratio, code in ((0.5, "1"), (1.5, "0")):
        module, row = script("bench_generate"), found["rows"][0] | {"ratio": ratio}
        monkeypatch.setattr(module, "bench", lambda *_, row=row: row)
        monkeypatch.setattr(sys, "argv", ["bench_generate", *words.split(), "--check"])
        with pytest.raises(SystemExit, match=code):
            module.main()


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is only made up, with a layer of another kind of sparsity and one that chooses nothing."""
    extra = {
        "block1-tc-batchk8": {"method": "transcoder", "sparsity": {"kind": "batch_topk", "k": 8}},
        "block1-linear": {"method": "linear", "num_units": 1},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent / "report")
        from full_run import fill
    return fill(tmp_path_factory.mktemp("runs") / "seed", extra=extra)


@pytest.fixture
def seeds(tmp_path: Path, made_up: Path) -> list[Path]:
    """The run under two seeds; under the second the errors are three times as large."""
    folders = [tmp_path / "seed-7", tmp_path / "seed-8"]
    for folder in folders:
        shutil.copytree(made_up, folder)
    for config in folders[1].glob("block*/config.json"):
        config.write_text(config.read_text().replace('"seed": 7', '"seed": 8'))
    file = folders[1] / "faithfulness.json"
    found = json.loads(file.read_text())
    for result in found["results"].values():
        result["blocks"]["1"]["normalized_mse"] *= 3
    file.write_text(json.dumps(found))
    return folders


def test_frontier(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seeds: list[Path], capsys) -> None:
    (group,) = run(monkeypatch, tmp_path, "frontier", *map(str, seeds), "--markdown")
    assert [group[key] for key in ("model", "block", "tokens")] == ["made-up", 1, 409_600]
    assert group["runs"] == [{"folder": "seed-7", "seed": 7}, {"folder": "seed-8", "seed": 8}]
    # By K, within it by CE increase; batch top-k stands with the K that is its L0, and what chooses nothing is last.
    names = ["mxd-k8", "tc-k8", "cp-mumoe-r4-k8", "tc-batchk8", "mxd-k32", "tc-k32", "cp-mumoe-r4-k32", "linear"]
    assert [row["layer"] for row in group["rows"]] == [f"block1-{name}" for name in names]
    row = group["rows"][1]
    assert row["seeds"] == [7, 8] and row["k"] == 8 and row["units"] == 120 and row["line"] == "TC (topk)"
    spread = {key: pytest.approx(0.005 * times) for key, times in (("mean", 2), ("low", 1), ("high", 3))}
    assert row["metrics"]["normalized_mse"] == spread
    assert row["metrics"]["mixture"]["mean"] == pytest.approx((0.03 / 0.005 + 0.03 / 0.015) / 2)
    assert row["metrics"]["step_ms"]["mean"] == pytest.approx(20)
    assert row["metrics"]["token_us"]["mean"] == pytest.approx(20_000 / 4096)
    assert row["metrics"]["dead_in_training"]["mean"] == pytest.approx(0.5 / 150)
    text = capsys.readouterr().out
    faithful = "| 8 | 8.0 | 0.0100 (0.0050 to 0.0150) | 0.100 | +0.0200 ± 0.0010 | 0.0200 | 3.5 |"
    assert f"| TC (topk), k8 | 120 {faithful}" in text and "| TC (batch topk), batchk8 | 120 | – | 8.0 |" in text
    assert "| NMSE (range) |" in text and "tokens agreed ± s.e. |" in text
    with pytest.raises(SystemExit, match="0"):  # MxD is the best of both K
        run(monkeypatch, tmp_path, "frontier", *map(str, seeds), "--check")


def test_frontier_takes_runs_apart_that_cannot_be_averaged(tmp_path: Path, seeds: list[Path]) -> None:
    module, groups = script("frontier"), {}
    module.read(seeds[0], groups)
    with pytest.raises(MxdError, match=r"same seed \(7\)"):
        module.read(seeds[0], groups)
    for config in seeds[1].glob("block*/config.json"):
        config.write_text(config.read_text().replace('"tokens": 409600', '"tokens": 819200'))
    module.read(seeds[1], groups)
    assert [group.about["tokens"] for group in groups.values()] == [409_600, 819_200]
    (seeds[0] / "faithfulness.json").unlink()
    with pytest.raises(MxdError, match="seed-7 holds no faithfulness"):
        module.read(seeds[0], groups)


def test_frontier_names_layers_by_what_tells_them_apart_in_all_runs(seeds: list[Path]) -> None:
    for folder in seeds[1].glob("block1-*"):
        if folder.name != "block1-tc-batchk8":
            shutil.rmtree(folder)
    module, groups = script("frontier"), {}
    for folder, name in ((seeds[1], "TC"), (seeds[0], "TC (batch topk)")):
        module.read(folder, groups)
        (group,) = groups.values()
        assert group.rows["block1-tc-batchk8"].replacement.line == name


def test_frontier_compares_layers_on_the_same_contexts_and_seeds(seeds: list[Path]) -> None:
    """The standard error is that of the differences over contexts, once they are averaged over the seeds."""
    random, tokens, kept = np.random.default_rng(0), [31, 30, 12, 31], {}
    module, groups = script("frontier"), {}
    for folder in seeds:
        found = json.loads((folder / "faithfulness.json").read_text())
        for name, result in found["results"].items():
            layer = name.split("/")[-1]
            values = random.normal(size=4).round(6).tolist()
            kept.setdefault(layer, []).append(values)
            result["by_context"] = {"tokens": tokens, "ce_increase": values}
            result["ce_increase"] = float(np.average(values, weights=tokens))
        (folder / "faithfulness.json").write_text(json.dumps(found))
        module.read(folder, groups)
    (group,) = groups.values()
    assert "block1-linear" not in {row.layer.name for row in group.rows.values() if module.ABOVE.key in row.values}
    for k, number in ((8, 4), (32, 3)):
        rows = [row for row in group.rows.values() if row.near([8, 32]) == k and not row.replacement.floor]
        best, *others = sorted(rows, key=lambda row: row.mean(module.CE_INCREASE))
        assert len(rows) == number and module.ABOVE.key not in best.values
        for row in others:
            ours, theirs = (np.mean(kept[one.layer.name], axis=0) for one in (row, best))
            mean = np.average(ours - theirs, weights=tokens)
            residuals = (ours - theirs - mean) * tokens
            assert row.mean(module.ABOVE) == pytest.approx(mean) and mean > 0
            expected = np.sqrt(4 / 3 * (residuals**2).sum()) / sum(tokens)
            assert row.mean(module.ABOVE_SE) == pytest.approx(expected)
            assert row.shown(module.ABOVE) == f"{mean:+.4f} ± {expected:.4f}"
    mxd, tc = group.rows["block1-mxd-k8"], group.rows["block1-tc-k8"]
    mxd.values["ce_increase"], mxd.values[module.ABOVE.key], mxd.values[module.ABOVE_SE.key] = [9.0], [0.5], [0.25]
    at_8 = [line for line in group.behind() if "K = 8" in line]
    mxd.values[module.ABOVE.key] = [0.51]
    (line,) = [line for line in group.behind() if "K = 8" in line]
    assert not at_8 and line.startswith("made-up, block 1, 409,600 tokens, K = 8: MxD is +0.5100 ± 0.2500 nats above ")
    del mxd.values[module.ABOVE.key]
    assert any("K = 8: not compared" in line for line in group.behind())
    tc.values["ce_increase"], mxd.values["ce_increase"] = [0.0], [-1.0]
    assert not any("K = 8" in line for line in group.behind())


@pytest.mark.long
def test_frontier_draws_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seeds: list[Path]) -> None:
    from matplotlib.axes import Axes

    drawn, levels = [], []
    points, level = Axes.errorbar, Axes.axhline
    monkeypatch.setattr(Axes, "errorbar", lambda self, x, y, **k: drawn.append((x, y, k)) or points(self, x, y, **k))
    monkeypatch.setattr(Axes, "axhline", lambda self, y, **k: levels.append(y) or level(self, y, **k))
    module, groups = script("frontier"), {}
    for folder in seeds:
        module.read(folder, groups)
    (group,) = groups.values()
    assert module.draw(group, "l0", tmp_path / "l0.png").read_bytes().startswith(b"\x89PNG")
    assert len(drawn) == 2 * 7 and len(levels) == 2  # the linear map chooses nothing
    x, y, how = drawn[1]
    assert (x, y) == (8, pytest.approx(0.01)) and how["yerr"] == [[pytest.approx(0.005)]] * 2
    drawn.clear()
    assert module.draw(group, "cost", tmp_path / "cost.png").stat().st_size
    assert len(drawn) == 3 * 8 and len(levels) == 2
    for row in group.rows.values():
        row.values = {key: values for key, values in row.values.items() if key == "l0"}
    assert module.draw(group, "decomposition", tmp_path / "none.png") is None and not (tmp_path / "none.png").exists()


@pytest.fixture
def bench_step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = script("bench_step")
    monkeypatch.setattr(module, "SHAPES", {"toy": MLPShape(16, 12, 32, "silu", True)})
    monkeypatch.setattr(module, "TOKENS", 256)
    monkeypatch.setattr(module, "keep_freed_memory", lambda: None)
    monkeypatch.setattr("step_floor.COPIED", 1024)
    return module


def rows_of_bench_step(module: ModuleType, labels: Sequence[str]) -> list[dict]:
    found = []
    for label in labels:
        row = module.bench("toy", label, 4, 1)
        row["peak_bytes"] = {key: module.peak_bytes("toy", label, 4, key) for key in row["seconds"]}
        assert all(line.startswith(f"toy {label}: ") for line in module.missed(row))
        module.print_row(row)
        found.append(row)
    return found


@pytest.mark.long
def test_bench_step(monkeypatch: pytest.MonkeyPatch, bench_step: ModuleType) -> None:
    """The floor of the paper's layers, read off their steps, is the products that one counts by hand."""
    monkeypatch.setattr("mxd.ops.sparse.WORTH", (1, 0))
    monkeypatch.setattr("mxd.training.step.candidate_dtype", lambda device, asked: "bfloat16")
    monkeypatch.setattr(bench_step, "candidate_dtype", lambda device: "bfloat16")
    tokens, d, o, h = 256, 16, 12, 32
    rows = rows_of_bench_step(bench_step, ["MxD", "TC", "STC"])
    for row in rows:
        assert row["seconds"].keys() >= {"train", "float32", "ours", "dense"}
        # Of MxD's E, E_glu and D: forward and own gradients, and D once more for that of the hidden state.
        beside = {"MxD": h * (4 * d + 3 * o), "TC": 0, "STC": 2 * d * o}[row["layer"]]
        assert row["flops"] == 2 * tokens * (d * row["units"] + beside)
        # Rows of width o: to decode, for the activations' gradient and the table's; those of the input for the gate's.
        listed = 4 * tokens * 4 * (3 * o + d)
        assert listed <= row["moved_bytes"] - 28 * row["params"] < 1.1 * listed
        row["floors"]["train"] = {"products": 1e-9, "floor": 1e-9}
        assert "1.30" in bench_step.missed(row)[0] or row["layer"] == "MxD"


@pytest.mark.long
def test_bench_step_of_every_layer(bench_step: ModuleType) -> None:
    labels = [label for label in bench_step.METHODS if label not in ("MxD", "TC", "STC")]
    rows = rows_of_bench_step(bench_step, labels)
    assert {bench_step.methods(4)[label]["method"] for label in bench_step.METHODS} == LAYERS.keys()
    for row in rows:
        assert row["seconds"].keys() == {"train", "ours"} and row["flops"] > 0
        row["floors"]["train"] = {"products": 1e-9, "floor": 1.0}
        assert bench_step.missed(row) == []  # where products are few, bytes count
        row["floors"]["train"] = {"products": 1e-9, "floor": 1e-9}
        (line,) = bench_step.missed(row)
        assert line.endswith("2.00" if "Monet" in line else "1.30")


def test_goals_of_a_shape_stand_in_place_of_the_usual_ones() -> None:
    module = script("bench_step")
    row = {"layer": "STC", "seconds": {"train": 0.34, "sparsify": 9.0}, "peak_bytes": {"train": 1, "sparsify": 2}}
    row |= {"floors": {"train": {"products": 1.0, "floor": 1.0}}}
    assert module.missed(row | {"shape": "gpt2"}) == ["gpt2 STC: 0.34 x floor, at most 0.33"]
    assert module.missed(row | {"shape": "smollm2"}) == []


def together(folder: Path, increase: float, nmse: tuple[float, float], gate: tuple[float, float]) -> Path:
    """A run whose set was measured."""
    blocks = {
        str(n): {"normalized_mse": e, "nmse_mean_gate": g, "nmse_fixed_directions": 2 * e, "dead_share": 0.1 * n}
        for n, (e, g) in enumerate(zip(nmse, gate, strict=True))
    }
    found = {"ce_increase": increase, "kl": increase / 2, "top1_agreement": 0.9, "blocks": blocks}
    found["by_context"] = {"tokens": [7, 8]}
    folder.mkdir()
    document = {"model": "tiny-gpt2", "results": {"mxd-k8": found}}
    folder.joinpath("faithfulness-together.json").write_text(json.dumps(document))
    return folder


def test_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    first = [together(tmp_path / f"a{n}", 0.2, (0.1, 0.2), (0.4, 0.4)) for n in range(2)]
    tuned = [together(tmp_path / f"b{n}", 0.1 * n, (0.1, 0.4), (0.4, 0.6)) for n in range(1, 3)]
    stages = [f"{name}={runs[0]},{runs[1]}" for name, runs in (("separate", first), ("tuned", tuned))]
    before, after = run(monkeypatch, tmp_path, "whole", *stages, "--markdown")
    assert before["metrics"]["beside_first"] == {"mean": 1, "low": 1, "high": 1}
    assert after["metrics"]["beside_first"] == pytest.approx({"mean": 0.75, "low": 0.5, "high": 1.0})
    assert after["metrics"]["normalized_mse"]["mean"] == pytest.approx(0.25)
    assert after["metrics"]["nmse_mean_gate"]["low"] == pytest.approx(0.75)  # of block 1: 0.6 / 0.4 for 0.4 / 0.2
    assert after["metrics"]["nmse_fixed_directions"]["low"] == pytest.approx(1)
    assert after["metrics"]["dead_share"]["high"] == pytest.approx(0.1)
    assert "| mxd-k8 | tuned | +0.150 (+0.100 to +0.200) | 0.75 |" in capsys.readouterr().out
    apart = together(tmp_path / "c", 0.1, (0.1, 0.4), (0.4, 0.6)) / "faithfulness-together.json"
    apart.write_text(apart.read_text().replace("mxd-k8", "tc-k8"))
    rows = run(monkeypatch, tmp_path, "whole", f"a={first[0]}+{apart.parent}", "--markdown")
    assert [(row["set"], row["runs"]) for row in rows] == [
        (name, [f"{first[0]}+{apart.parent}"]) for name in ("mxd-k8", "tc-k8")
    ]
    capsys.readouterr()
    with pytest.raises(SystemExit, match="1"):
        run(monkeypatch, tmp_path, "whole", *stages, "--check")
    assert capsys.readouterr().out.splitlines() == [
        "mxd-k8, tuned: CE increase 1.00 x that of the first stage",
        "mxd-k8, tuned: mean gate 0.75 of the first stage's, at least 0.90",
    ]
    better = together(tmp_path / "d", 0.1, (0.1, 0.2), (0.4, 0.4))
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, tmp_path, "whole", f"separate={first[0]}", f"tuned={better}", "--check")


def test_whole_refuses_what_cannot_be_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = together(tmp_path / "a", 0.2, (0.1, 0.2), (0.4, 0.4))
    other = together(tmp_path / "b", 0.2, (0.1, 0.2), (0.4, 0.4))
    file = other / "faithfulness-together.json"
    for change, message in (
        (("7", "9"), "different text"),
        (("tiny-gpt2", "x"), "base models"),
        (("mxd", "tc"), "no mxd"),
    ):
        text = file.read_text()
        file.write_text(text.replace(*change))
        with pytest.raises(SystemExit, match=message):
            run(monkeypatch, tmp_path, "whole", f"a={first}", f"b={other}", "--markdown")
        file.write_text(text)
    file.write_text(text.replace("tiny-gpt2", "x"))
    with pytest.raises(SystemExit, match="not of one base model"):
        run(monkeypatch, tmp_path, "whole", f"a={first}+{other}", "--markdown")
    with pytest.raises(SystemExit, match="evaluate"):
        run(monkeypatch, tmp_path, "whole", f"a={tmp_path}", "--markdown")
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "whole", "runs", "--markdown")


def test_one_expert_sees_no_difference_between_inputs_whose_norms_grow_apart() -> None:
    """Theorem 1 of "Implicit bias in Soft MoE": what it sees converges, or is the same, while norms differ by O(a)."""
    rows = script("soft_moe").theorem((3, 10, 100))
    for first, gap in ((1.0, 2**0.5 - 1), (0.0, 1 - 2**-0.5)):
        some = [row for row in rows if row["phi_1"] == first]
        assert [row["norms"] for row in some] == pytest.approx([3 * gap, 10 * gap, 100 * gap])
        apart = [row["expert"] for row in some]
        if first:
            assert apart[0] > 0.1 > 1e-3 > apart[1] > 1e-12 > apart[2]
        else:
            assert apart == pytest.approx([0, 0, 0], abs=1e-12)


def test_no_subset_of_experts_beats_the_search_with_the_label_at_hand() -> None:
    """The parts of the logits sum to the network's own, and each subset to that of a layer with the others at zero."""
    import torch

    soft_moe = script("soft_moe")
    torch.manual_seed(0)
    layer, head = soft_moe.SoftMoE(6, 5, 4), torch.nn.Linear(18, 10)
    x, y = torch.randn(50, 3, 6), torch.randint(10, (50,))
    found = soft_moe.subsets(layer, head, x, y, [1, 2, 4], 0)
    assert found["all"] == pytest.approx(float((head(layer(x).flatten(1)).argmax(-1) == y).float().mean()))
    assert found["k"]["4"]["algorithm"] == found["k"]["4"]["best"] == found["all"]
    assert found["k"]["4"]["random_sd"] == 0 and found["k"]["4"]["z"] is None
    for row in found["k"].values():
        assert row["best"] >= row["algorithm"] and row["best"] >= row["random"]
    right, chosen = torch.zeros(50, dtype=torch.bool), 0.0
    combine, out = layer.experts(x)
    for expert in range(4):
        only = torch.zeros(4, 1)
        only[expert] = 1
        correct = head((combine @ (only * out)).flatten(1)).argmax(-1) == y
        right |= correct
        chosen += float((correct & (combine.sum(1).argmax(-1) == expert)).float().mean())
    assert found["k"]["1"]["best"] == pytest.approx(float(right.float().mean()))
    assert found["k"]["1"]["algorithm"] == pytest.approx(chosen)


@pytest.mark.long
def test_soft_moe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    found = run(monkeypatch, tmp_path, "soft_moe", "--quick", "--seeds", "1")
    assert [(row["m"], row["n"]) for row in found["norm"]] == [(m, n) for m in (2, 5) for n in (1, 2, 5, 10)]
    assert all(0 < one["last"] < 100 for row in found["norm"] for one in row["runs"])
    assert [list(row["runs"][0]["k"]) for row in found["digits"]] == [["2", "1"], ["4", "2", "1"]]
    out = capsys.readouterr().out
    assert "(46.6%)" in out and "| 2 x 5 | 10 |" in out


def test_findings_of_soft_moe_that_do_not_come_out_are_named() -> None:
    module = script("soft_moe")
    inputs, errors = ((1, 3, 0.2), (1, 9, 0.1), (0, 3, 0.1)), ((2, 1, 2.0), (2, 2, 1.0), (5, 1, 1.5))
    found = {
        "theorem": [{"phi_1": phi, "a": a, "expert": apart} for phi, a, apart in inputs],
        "norm": [{"m": m, "d": 5, "n": n, "runs": [{"last": e}]} for m, n, e in errors],
        "digits": [
            {"n": n, "runs": [{"k": {"1": {"z": z, "best": best, "best_wrong": wrong}}}]}
            for n, z, best, wrong in ((4, 2.0, 0.9, 0.45), (8, 3.0, None, None))
        ],
    }
    assert module.missed(found) == [] == module.missed({})
    found["theorem"][1]["expert"], found["norm"][1]["runs"][0]["last"] = 0.2, 2.0
    found["digits"][0]["runs"][0]["k"]["1"] |= {"z": 1.9, "best_wrong": 0.46}
    assert [line.split(": ")[0] for line in module.missed(found)] == [
        "theorem, Phi_1 = 1",
        "norm, 2 x 5",
        "digits, 1 of 4",
        "digits, 1 of 4",
    ]


def test_cut_weights_are_the_best_of_their_rank_and_the_control_is_not() -> None:
    """Eckart and Young: what is lost is the singular values left out, in NumPy's numbers; the control loses more."""
    import torch

    study = script("rank_study")
    for shape in ((12, 5), (5, 12)):
        weight = torch.from_numpy(np.random.default_rng(0).normal(size=shape)).float()
        values = np.linalg.svd(weight.numpy(), compute_uv=False)
        for rank in (1, 3, 5):
            best = study.truncated(weight, rank).numpy()
            control = study.projected(7)(weight, rank).numpy()
            lost = weight.numpy() - best
            assert np.linalg.matrix_rank(best, tol=1e-4) == np.linalg.matrix_rank(control, tol=1e-4) == rank
            assert (lost**2).sum() == pytest.approx((values[rank:] ** 2).sum(), rel=1e-5, abs=1e-9)
            assert np.linalg.norm(lost, 2) == pytest.approx(values[rank] if rank < 5 else 0, abs=1e-5)
            other = ((weight.numpy() - control) ** 2).sum()
            assert other > 1.01 * (lost**2).sum() if rank < 5 else other == pytest.approx(0, abs=1e-9)
    drawn = torch.eye(40)
    assert float(study.projected(0)(drawn, 10).square().sum()) == pytest.approx(10, rel=1e-4)


@pytest.mark.long
def test_rank_study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    """A GLU, its gate too: at full rank nothing changes; the table says what is kept."""
    words = "tiny-llama --layers 1 2 --shares 0.25 1 --tokens 256 --context 64"
    found = run(monkeypatch, tmp_path, "rank_study", *words.split())
    rows = {(row["blocks"], row["share"]): row for row in found["rows"]}
    assert set(rows) == {(name, share) for name in ("1", "2", "all") for share in (0.25, 1.0)}
    for (name, share), row in rows.items():
        assert set(row["ranks"]) == {"encoder", "encoder_glu", "decoder"}
        if share == 1:
            assert row["energy"] == pytest.approx(1) and row["weights"] > 1
            for kind in ("svd", "random"):
                assert row[kind]["ce_increase"] == pytest.approx(0, abs=1e-6), name
                assert row[kind]["normalized_mse"] < 1e-9
        else:
            assert 0 < row["svd"]["ce_increase"] < row["random"]["ce_increase"]
            assert 0 < row["svd"]["normalized_mse"] < row["random"]["normalized_mse"] and row["energy"] < 1
    assert rows["all", 0.25]["svd"]["ce_increase"] > rows["1", 0.25]["svd"]["ce_increase"]
    assert "| all | 0.25 |" in capsys.readouterr().out


def test_what_half_of_the_rank_costs_is_checked() -> None:
    module = script("rank_study")

    def row(share: float, cost: float, control: float) -> dict:
        kinds = {"svd": {"ce_increase": cost}, "random": {"ce_increase": control}}
        return {"blocks": "2", "share": share, "ce_base": 3.0, "ce_zero": 4.0} | kinds

    assert module.missed([row(0.25, 0.4, 0.5), row(0.5, 0.01, 0.2), row(1, 0.0, 0.0)]) == []
    assert module.missed([row(0.5, 0.02, 0.2)]) == [
        "blocks 2, share 0.5: 2.0% of what the model loses without the MLP, at most 1%"
    ]
    assert module.missed([row(0.25, 0.4, 0.4)]) == ["blocks 2, share 0.25: a random subspace costs no more"]


def test_all_maps_of_an_mlp_are_cut() -> None:
    """By hand, from the module's own weights; the biases stay."""
    import torch

    from mxd.model.loading import load_frozen

    study = script("rank_study")
    for name, activation in (("tiny-llama", torch.nn.SiLU()), ("tiny-gpt2", torch.nn.GELU(approximate="tanh"))):
        model = load_frozen(name)
        mlp, cut = model.mlp(1), study.LowRankMLP(model, 1, 0.3, study.truncated)
        x = torch.randn(5, model.mlp_shape(1).d_in, generator=torch.Generator().manual_seed(0))

        def low(weight):
            u, s, v = np.linalg.svd(weight.detach().double().numpy(), full_matrices=False)
            rank = round(0.3 * len(s))
            return torch.from_numpy((u[:, :rank] * s[:rank]) @ v[:rank]).float()

        if name == "tiny-llama":
            gate, up, down = (low(linear.weight) for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
            expected = (activation(x @ gate.T) * (x @ up.T)) @ down.T
        else:
            first, second = mlp.c_fc, mlp.c_proj
            expected = activation(x @ low(first.weight) + first.bias) @ low(second.weight) + second.bias
        torch.testing.assert_close(cut(x), expected, rtol=1e-4, atol=1e-5)
        maps = [p for p in mlp.parameters() if p.ndim == 2]
        stored = sum(round(0.3 * min(p.shape)) * sum(p.shape) for p in maps) / sum(p.numel() for p in maps)
        assert cut.weights == pytest.approx(stored)


@pytest.mark.long
def test_the_checks_of_formats_write_what_other_tools_are_to_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Peers are installed by hand alone, so this side of the check is tried here."""
    from interop.layers import write_cases
    from safetensors.torch import load_file

    write_cases(tmp_path, "sparsify")
    cases = load_file(tmp_path / "cases.safetensors")
    assert {name: tensor.shape for name, tensor in cases.items()} == dict.fromkeys(("x2", "tc2", "stc2"), (2048, 128))
    assert [path.name for path in (tmp_path / "tc").iterdir()]


@pytest.mark.long
def test_profile_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bench_step: ModuleType, capsys) -> None:
    monkeypatch.setitem(sys.modules, "bench_step", bench_step)
    words = ["--shape", "toy", "--layers", "TC", "--tokens", "64", "128", "--k", "4", "--top", "2"]
    few, many = run(monkeypatch, tmp_path, "profile_step", *words)["rows"]
    assert (few["tokens"], many["tokens"]) == (64, 128) and few["seconds"] > 0
    shares = list(few["shares"].values())
    assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)
    module = script("profile_step")
    products = module.products
    assert products(few) == sum(few["shares"].get(name, 0) for name in ("aten::addmm", "aten::mm", "aten::bmm")) > 0
    half, less = (few | {"shares": {"aten::mm": share, "aten::bmm": 0.1}} for share in (0.4, 0.39))
    assert module.small([half, less]) == ["TC, 64 tokens: products take 49% of a step, wanted 50%"]
    assert f"| TC | {many['units']} | 128 |" in capsys.readouterr().out
