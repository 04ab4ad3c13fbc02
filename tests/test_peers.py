"""The comparison with other tools' training: how errors are measured, how our driver trains, what counts as a miss."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def scripts(monkeypatch):
    """The scripts' folders on the import path, in front."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(SCRIPTS / "peers"))
    yield
    for name in ("train", "bench_peers", "check_interop"):
        sys.modules.pop(name, None)


def test_errors_are_those_of_the_formulas(scripts):
    from train import errors

    y = torch.randn(3000, 6, generator=torch.Generator().manual_seed(0)) + 2
    found = errors(lambda x, y: 0.9 * y, y, y)
    rows = y.double().numpy()
    missed = ((0.1 * rows) ** 2).sum(1)
    assert found["nmse"] == pytest.approx((missed / np.linalg.norm(rows, axis=1)).mean() / 6, rel=1e-5)
    assert found["fvu"] == pytest.approx(missed.sum() / ((rows - rows.mean(0)) ** 2).sum(), rel=1e-5)


@pytest.mark.parametrize("method", ["TC", "STC", "SAE"])
def test_our_driver_learns(scripts, tmp_path, method):
    from train import main

    draw = torch.Generator().manual_seed(0)
    mix = torch.randn(8, 8, generator=draw)
    parts = {name: torch.randn(n, 8, generator=draw) for name, n in (("x", 2048), ("x_test", 256))}
    parts |= {"y": parts["x"].relu() @ mix, "y_test": parts["x_test"].relu() @ mix}
    save_file(parts, str(tmp_path / "activations.safetensors"))
    (tmp_path / "asked.json").write_text(json.dumps({"width": 32, "k": 4, "batch_tokens": 64}))
    main("mxd", method, str(tmp_path), str(tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert [point["tokens"] for point in found["curve"]] == [512, 1024, 1536, 2048]
    assert found["curve"][-1]["fvu"] < 0.92 * found["curve"][0]["fvu"] and found["tokens_per_second"] > 0


def run(rate, *nmse):
    curve = [{"tokens": i, "seconds": float(i) / rate, "nmse": value, "fvu": value} for i, value in enumerate(nmse, 1)]
    return {"tokens_per_second": rate, "peak_mib": 1.0, "curve": curve}


def test_what_is_slow_or_worse_is_named(scripts):
    from bench_peers import METHODS, misses, row

    runs = {
        (method, tool): [run(10.0, 0.5, 0.1)] for method, tools in METHODS.items() for tool in tools if tool == "mxd"
    }
    runs |= {(m, t): [run(2.0, 0.6, 0.2)] for m, tools in METHODS.items() for t in tools if t != "mxd"}
    rows = [row(*key, runs) for key in runs]
    assert misses(rows) == [] and rows[-1]["faster"] == 5 and rows[-1]["ours_in_their_time"] == 0.1
    runs["TC", "sparsify"] = [run(5.0, 0.6, 0.05)]
    assert misses([row(*key, runs) for key in runs]) == [
        "TC: 2.0 x sparsify's tokens/s, 3 were wanted", "TC: NMSE 0.1000, sparsify has 0.0500"
    ]  # fmt: skip
    runs["TC", "sparsify"] = [run(20.0, 0.6, 0.3)]
    assert row("TC", "sparsify", runs)["ours_in_their_time"] == 0.5  # ours at 0.1 s; theirs took 0.1
