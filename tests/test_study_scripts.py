"""What the scripts make of measured files and layers: a study, polysemanticity, laws, the proof of candidates."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_scripts import run, script

import mxd


def layer(method: str, k: int, increases: list[float], block: int = 3) -> dict[str, Any]:
    """What `mxd evaluate` says of one layer."""
    account = dict.fromkeys(("nmse_mean_gate", "nmse_fixed_directions", "routed_share", "stable_rank"), 1.0)
    account |= {"normalized_mse": 0.1 * k, "dead_share": 0.0}
    return {
        "tokens": 30,
        "ce_base": 3.0,
        "ce_increase": float(np.average(increases, weights=[10, 20])),
        **dict.fromkeys(("ce_increase_se", "kl", "kl_se", "top1_agreement", "params"), 0.5),
        "by_context": {"tokens": [10, 20], "ce_increase": increases},
        "blocks": {str(block): account},
        "replacements": [{"method": method, "sparsity": f"k{k}", "k": k, "block": block}],
    }


def written(folder: Path, *layers: dict[str, Any], model: str = "tiny-gpt2") -> Path:
    folder.mkdir()
    file = folder / "faithfulness.json"
    file.write_text(json.dumps({"model": model, "results": {str(n): one for n, one in enumerate(layers)}}))
    return file


def test_study_pairs_contexts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    first = written(tmp_path / "a", layer("MxD", 8, [0.2, 0.5]), layer("STC", 8, [0.1, 0.3]))
    second = written(tmp_path / "b", layer("STC", 4, [0.1, 0.2]), layer("MxD", 4, [0.1, 0.2]))
    files = [str(first), str(second), "--figure", str(tmp_path / "study.png")]
    low, high = run(monkeypatch, tmp_path, "study", *files)
    assert (low["block"], low["k"], high["k"]) == (3, 4, 8)
    assert low["difference"] == low["difference_se"] == 0
    totals, counts = np.array([0.1 * 10, 0.2 * 20]), np.array([10, 20])
    mean = totals.sum() / 30
    assert high["difference"] == pytest.approx(mean)
    # The error of a ratio of two contexts: sqrt(2 / 1) times the root of the squared residuals, over all tokens.
    assert high["difference_se"] == pytest.approx(np.sqrt(2 * ((totals - mean * counts) ** 2).sum()) / 30)
    assert high["methods"]["MxD"]["normalized_mse"] == pytest.approx(0.8)
    assert "| 3 | 8 | +0.4000 ± 0.5000 | +0.2333 ± 0.5000 | 0.8000 | 0.8000 | +0.1667 ±" in capsys.readouterr().out
    assert (tmp_path / "study.png").stat().st_size > 1000
    swapped = run(monkeypatch, tmp_path, "study", str(first), "--method", "STC", "--beside", "MxD")
    assert swapped[0]["difference"] == pytest.approx(-mean)
    with pytest.raises(SystemExit, match="1"):
        run(monkeypatch, tmp_path, "study", *files[:2], "--check")
    said = "block 3, K = 4: MxD is not below STC by two standard errors\nblock 3, K = 8: MxD is not below STC"
    assert said in capsys.readouterr().out
    clear = written(tmp_path / "c", layer("MxD", 8, [0.1, 0.2]), layer("STC", 8, [0.3, 0.4]))
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, tmp_path, "study", str(clear), "--check")


def test_study_refuses_what_cannot_be_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = written(tmp_path / "a", layer("MxD", 8, [0.2, 0.5]))
    with pytest.raises(SystemExit, match="no STC here: there are MxD"):
        run(monkeypatch, tmp_path, "study", str(first))
    other = written(tmp_path / "b", layer("STC", 8, [0.2, 0.5]), model="tiny-llama")
    with pytest.raises(SystemExit, match="another base model or text"):
        run(monkeypatch, tmp_path, "study", str(first), str(other))
    with pytest.raises(SystemExit, match="mxd evaluate"):
        run(monkeypatch, tmp_path, "study", str(tmp_path / "none" / "faithfulness.json"))


def ablated(folder: Path, p: float | None, units: int = 32, beyond: int = 1) -> Path:
    """A run whose units were dropped, of one layer and the base MLP's neurons."""
    summary = {"polysemanticity": p, "largest_drop": 0.25}
    found = {"block": 3, "num_units": units, "ablated": 4, **summary}
    found |= {"beyond_chance": summary | {"units": beyond}, "control": {"polysemanticity": 0.9, "largest_drop": 0.1}}
    written(folder, layer("MxD", 8, [0.2, 0.5]))
    results = {"0": found, "neurons": found | {"num_units": 512}}
    folder.joinpath("ablation.json").write_text(json.dumps({"results": results}))
    return folder


def test_polysemanticity_over_seeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    runs = [ablated(tmp_path / "a", 0.5), ablated(tmp_path / "b", 0.75, beyond=3)]
    words = [*map(str, runs), "--figure", str(tmp_path / "p.png")]
    mxd, neurons = run(monkeypatch, tmp_path, "polysemanticity", *words)
    assert (mxd["layer"], mxd["gate"], mxd["num_units"], mxd["runs"]) == ("MxD", "k8", 32, 2)
    assert (neurons["layer"], neurons["num_units"]) == ("neurons", 512)
    assert mxd["metrics"]["polysemanticity"] == {"mean": 0.625, "low": 0.5, "high": 0.75}
    assert mxd["metrics"]["beyond_chance"] == {"mean": 0.5, "low": 0.25, "high": 0.75}
    assert mxd["metrics"]["normalized_mse"]["mean"] == pytest.approx(0.8) and "normalized_mse" not in neurons["metrics"]
    assert mxd["metrics"]["control"]["mean"] == 0.9 and mxd["metrics"]["control_largest_drop"]["mean"] == 0.1
    assert "| MxD | k8 | 32 | 0.8000 | 0.625 (0.500 to 0.750) | 0.900 | 50% |" in capsys.readouterr().out
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_polysemanticity_that_does_not_fall_is_named() -> None:
    module = script("polysemanticity")

    def row(units: int, p: float, control: float = 0.9) -> dict:
        metrics = {"polysemanticity": {"mean": p}, "control": {"mean": control}}
        return {"layer": "MxD", "gate": "k8", "num_units": units, "metrics": metrics}

    neurons = row(512, 1.0) | {"layer": "neurons"}
    assert module.missed([row(32, 0.8), row(64, 0.7), neurons]) == []
    assert module.missed([row(32, 0.7), row(64, 0.8)]) == ["MxD, k8: p 0.700 of the fewest units, 0.800 of 64"]
    assert module.missed([row(32, 0.8), row(64, 0.7, control=0.6)]) == [
        "MxD, k8: p 0.700 of 64 units, 0.600 of random coefficients"
    ]


def test_polysemanticity_of_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    mxd, _ = run(monkeypatch, tmp_path, "polysemanticity", str(ablated(tmp_path / "a", None)))
    assert "polysemanticity" not in mxd["metrics"] and "| - |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, tmp_path, "polysemanticity", str(tmp_path / "a"), "--check")
    other = ablated(tmp_path / "b", 0.5, units=64)
    with pytest.raises(SystemExit, match="not of one config"):
        run(monkeypatch, tmp_path, "polysemanticity", str(tmp_path / "a"), str(other))
    (other / "ablation.json").unlink()
    with pytest.raises(SystemExit, match="mxd ablate"):
        run(monkeypatch, tmp_path, "polysemanticity", str(other))


def measured(folder: Path, tokens: int, floor: float = 0.0, grow: float = 1.0) -> Path:
    """A run of a 4 x 3 grid of units and K whose errors follow a law of tokens, units and K, with 1% of scatter."""
    results = {}
    scatter = np.random.default_rng(tokens)
    for n, (units, k) in enumerate((u, k) for u in (64, 128, 256, 512) for k in (8, 16, 32)):
        error = floor + grow * 40 * tokens**-0.25 * (units / 16) ** -0.5 * k**-0.125
        error *= np.exp(scatter.normal(scale=0.01))
        about = {"method": "TC", "k": k, "units": units, "tokens_trained": tokens, "block": 3}
        results[f"{folder.name}/layer{n}"] = {
            "kl": error,
            "ce_increase": error,
            "blocks": {"3": {"normalized_mse": error}},
            "replacements": [about],
        }
        (folder / f"layer{n}").mkdir(parents=True)
        (folder / f"layer{n}" / "config.json").write_text(json.dumps({"layer": {"d_in": 16}}))
    (folder / "faithfulness.json").write_text(json.dumps({"results": results}))
    return folder


def test_scaling_laws_are_found_again_and_tested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    runs = [str(measured(tmp_path / f"t{tokens}", tokens)) for tokens in (1000, 2000, 4000)]
    beyond = [str(measured(tmp_path / "far", 40_000)), str(measured(tmp_path / "off", 40_001, grow=1.1))]
    beyond.append(str(measured(tmp_path / "within", 2001)))
    words = [*runs, "--beyond", *beyond, "--metric", "normalized_mse", "--figure", str(tmp_path / "laws.png")]
    laws = {row["form"]: row for row in run(monkeypatch, tmp_path, "scaling_laws", *words)}
    exponents = laws["power"]["exponents"]
    for name, true in {"T": -0.25, "N": -0.5, "K": -0.125}.items():
        assert exponents[name]["value"] == pytest.approx(true, abs=0.02)
        assert exponents[name]["low"] < true < exponents[name]["high"]
    assert laws["power"]["error"] == pytest.approx(0.01, abs=0.004)
    assert abs(laws["interaction"]["exponents"]["NK"]["value"]) < 0.02 and len(laws["interaction"]["exponents"]) == 6
    inside = {name: [one["inside"] for one in laws["power"]["beyond"] if one["run"] == name] for name in ("far", "off")}
    widths = [one["high"] / one["low"] for one in laws["power"]["beyond"] if one["run"] == "within"]
    assert min(widths) > 1.03  # the scatter, which the mean's own interval would leave out
    assert sum(inside["far"]) >= 10 and not any(inside["off"])
    assert "**no**" in capsys.readouterr().out and (tmp_path / "laws.png").stat().st_size > 1000
    with pytest.raises(SystemExit, match="1"):
        run(monkeypatch, tmp_path, "scaling_laws", *words, "--check")
    assert ", normalized_mse, power: " in capsys.readouterr().out
    near = [str(measured(tmp_path / f"near{tokens}", tokens)) for tokens in range(2002, 2012)]  # 120 layers
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, tmp_path, "scaling_laws", *runs, "--beyond", *near, "--metric", "normalized_mse", "--check")
    assert "every law holds" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--check needs --beyond"):
        run(monkeypatch, tmp_path, "scaling_laws", *runs, "--metric", "normalized_mse", "--check")


def test_scaling_laws_find_a_floor_and_refuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = [str(measured(tmp_path / f"t{tokens}", tokens, floor=0.5)) for tokens in (1000, 8000, 64_000)]
    laws = run(monkeypatch, tmp_path, "scaling_laws", *runs, "--metric", "normalized_mse")
    power, _, floor = laws
    assert floor["floor"] == pytest.approx(0.5, abs=0.05) and floor["error"] < power["error"] / 2
    with pytest.raises(SystemExit, match="not above 0"):
        run(monkeypatch, tmp_path, "scaling_laws", *runs, "--metric", "l0")
    with pytest.raises(SystemExit, match="mxd evaluate"):
        run(monkeypatch, tmp_path, "scaling_laws", str(tmp_path / "none"))
    few = measured(tmp_path / "few", 1000)
    (few / "faithfulness.json").write_text(
        json.dumps({"results": dict(list(json.loads((few / "faithfulness.json").read_text())["results"].items())[:5])})
    )
    with pytest.raises(SystemExit, match="too few"):
        run(monkeypatch, tmp_path, "scaling_laws", str(few))


@pytest.mark.long
def test_mlp_sites_agree_with_least_squares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = "tiny-gpt2 --blocks 2 --fit-tokens 2048 --tokens 512 --context 32"
    found = run(monkeypatch, tmp_path, "mlp_sites", *words.split())["blocks"]["2"]
    model = mxd.load_frozen("tiny-gpt2")
    texts = {}
    for split, tokens in (("train", 2048), ("test", 512)):
        recorded = list(script("mlp_sites").recorded(model, [2], split, tokens, 32, 0))
        pairs = [torch.cat(side).double().numpy() for side in zip(*(one[2][0] for one in recorded), strict=True)]
        texts[split] = np.insert(pairs[0], 0, 1, 1), pairs[1]
        assert tokens <= len(pairs[0]) < tokens + 32
    x, y = texts["test"]
    affine = np.linalg.lstsq(*texts["train"], rcond=None)[0]
    assert found["linear"] == pytest.approx(
        1 - ((y - x @ affine) ** 2).sum() / ((y - y.mean(0)) ** 2).sum(), abs=1e-3
    )  # the ridge
    eigenvalues = np.linalg.eigvalsh(np.cov(y.T))
    assert found["rank"] == pytest.approx(eigenvalues.sum() ** 2 / (eigenvalues**2).sum(), rel=1e-6)
    assert found["first"] == pytest.approx(eigenvalues.max() / eigenvalues.sum(), rel=1e-6)
    norms = np.linalg.norm(y, axis=1)
    assert found["heavy"] == pytest.approx(np.quantile(norms, 0.99) / np.sort(norms)[(len(norms) - 1) // 2], rel=1e-5)
    bos = torch.tensor([[model.tokenizer.bos_token_id, *range(3)]])
    sink = float(model.record(bos, 2)[2][1][0, 0].norm())
    assert found["sink"] == pytest.approx(sink / np.sort(norms)[(len(norms) - 1) // 2], rel=1e-4)
    assert found["linear_on_fit"] > found["linear"] - 0.2
    assert found["in"] == pytest.approx(np.sqrt((x[:, 1:] ** 2).mean())) and found["out"] == pytest.approx(
        np.sqrt((y**2).mean())
    )
    assert found["median"] * found["sink"] == pytest.approx(sink, rel=1e-4)
    noise = script("mlp_sites").fitted_to_noise
    assert noise({"3": {"linear": 0.51, "linear_on_fit": 0.6}}) == []
    (missed,) = noise({"3": {"linear": 0.49, "linear_on_fit": 0.6}})
    assert missed.startswith("block 3: the affine map explains 49.0% of held-out variance, 60.0% where it was fitted")


def test_rows_are_proven_by_as_many_candidates_as_the_proof_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("measure_candidates")
    torch.manual_seed(0)
    x, weight, bias = torch.randn(16, 8), torch.randn(300, 8), torch.randn(300)
    counts = {dtype: module.needed(x, weight, bias, 4, dtype) for dtype in (torch.bfloat16, torch.int8)}
    pre = torch.addmm(bias, x, weight.T)
    for dtype, needed in counts.items():
        low_x, low_weight = module.rounded(x, dtype), module.rounded(weight, dtype)
        bound = (x - low_x).norm(dim=1)[:, None] * low_weight.norm(dim=1)
        bound += x.norm(dim=1)[:, None] * (weight - low_weight).norm(dim=1)
        above = torch.addmm(bias, low_x, low_weight.T) + bound
        assert (above >= pre - 1e-5).all()
        order = above.argsort(1, descending=True)
        for row, count in enumerate(needed.tolist()):  # so many candidates hold the four largest, and no other could
            assert set(pre[row].topk(4).indices.tolist()) <= set(order[row, :count].tolist())
            assert (above[row, order[row, count:]] < pre[row].topk(4).values[-1]).all()
    assert (counts[torch.int8] >= counts[torch.bfloat16]).all() and counts[torch.int8].sum() < 16 * 300
    assert (counts[torch.bfloat16] >= 4).all() and (counts[torch.int8] > counts[torch.bfloat16]).any()
    weight[0] *= 100  # loosens no bound but its own
    own, shared = (module.needed(x, weight, bias, 4, torch.bfloat16, shared) for shared in (False, True))
    assert (shared >= own).all() and shared.sum() > 4 * own.sum()
    ones, weight = torch.ones(1, 1), torch.tensor([[1.001], [0.9985], [0.997]])  # rounded by 0.001, 0.0015, 0.0009
    assert module.needed(ones, weight, torch.zeros(3), 1, torch.bfloat16).tolist() == [2]


@pytest.mark.long
def test_measure_candidates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    module = script("measure_candidates")
    for name, value in {"TILE": 32, "WIDTH": 16, "UNITS": 512}.items():
        monkeypatch.setattr(module, name, value)
    fields = ["--training.tokens", "1024", "--training.batch_tokens", "512", "--training.buffer_tokens", "1024"]
    fields += ["--replacements", "[{method: transcoder, sparsity: {kind: topk, k: 2}}]", "--out", str(tmp_path)]
    folder = mxd.train(mxd.load_config("configs/tiny.yaml", fields))
    monkeypatch.setattr(module, "load_config", lambda path: mxd.load_config(path, fields))
    taken: list[int] = []
    choose = module._from_candidates
    monkeypatch.setattr(module, "_from_candidates", lambda *inputs: (taken.append(len(inputs[1])), choose(*inputs))[1])
    file = tmp_path / "found.json"
    words = [
        "--units",
        "64",
        "256",
        "--d",
        "16",
        "--proven",
        "16",
        "--k",
        "4",
        "--repeats",
        "1",
        "--tokens",
        "256",
        "--json",
        str(file),
    ]
    words += ["--config", "configs/tiny.yaml", "--layer", str(folder / "block2-tc-k2")]
    monkeypatch.setattr("sys.argv", ["measure_candidates", *words])
    module.main()
    found = json.loads(file.read_text())
    assert taken == [64, 64, 256, 256, *[128] * 6, 512, 512] and [row["units"] for row in found["choices"]] == [64, 256]
    assert [(row["k"], row["2 K + 16"]) for row in found["counts"]] == [(1, 18), (4, 24), (16, 48)]
    assert all(row["k"] <= row["candidates"] <= 64 and 0 <= row["unproven"] <= 1 for row in found["counts"])
    assert all(seconds > 0 for seconds in found["parts"].values())
    exact, shared, eights, balanced = found["proofs"]
    assert exact["median"] <= shared["median"] and exact["99%"] <= shared["99%"]
    assert exact["median"] < eights["median"] and balanced["way"] == "int8, balanced"
    assert "| int8, balanced |" in capsys.readouterr().out
    assert not [row for row in found["choices"] if module.candidates_pay(2, row["units"], 16)]
    monkeypatch.setattr("sys.argv", ["measure_candidates", *words, "--check"])
    with pytest.raises(SystemExit, match="0"):  # so few units have none
        module.main()
    monkeypatch.setattr(module, "candidates_pay", lambda k, units, d: units == 256)
    monkeypatch.setattr(module, "medians", lambda ways, repeats: {way: 1.0 + n for n, way in enumerate(ways)})
    with pytest.raises(SystemExit, match="1"):
        module.main()
    assert "256 units of width 16: slower than in float32" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["measure_candidates", *words[:-2]])
    with pytest.raises(SystemExit, match="2"):
        module.main()
