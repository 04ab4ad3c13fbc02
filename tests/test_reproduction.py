"""What `mxd reproduce` would run, what it makes of answers, and a whole reproduction in small."""

import json

import pytest
from command import mxd

from mxd.common.errors import MxdError
from mxd.layers import parse_layer
from mxd.reproduction import run as reproduction
from mxd.reproduction.claims import CLAIMS, Answer, Answers
from mxd.reproduction.paper import PAPERS, Published, read_paper, run_configs

PAPER = read_paper("2505.21364")


def test_the_paper_scale_is_the_papers():
    """Its 60 layers of section 3.1 and the 48 of appendix B.3, on four models, with its recipe and sizes."""
    runs = run_configs(PAPER, "paper", "out")
    for experiment, layers, models in (("main", 60, 4), ("other-block", 48, 4)):
        found = [config for (_, name), config in runs.items() if name == experiment]
        assert sum(len(config.replacements) for config in found) == layers and len(found) == models
        assert {config.training.tokens for config in found} == {480_000_000}
        assert {config.sizing.match for config in found} == {"paper"}
    assert {tuple(c.blocks) for (m, e), c in runs.items() if (m, e) == ("gpt2", "main")} == {(8,)}
    assert runs["gpt2", "other-block"].blocks == (4,)
    assert {r.sparsity.kind for r in runs["gpt2", "sparsity"].replacements} == {"topk", "relu_l1"}


@pytest.mark.parametrize("number", PAPERS)
def test_every_claim_has_its_run_and_every_run_a_name_of_its_own(number):
    paper = read_paper(number)
    for scale in paper.scales:
        runs = run_configs(paper, scale, "out")
        assert len({config.folder for config in runs.values()}) == len(runs)
        asked = {(name, question) for (_, name), c in runs.items() for question in c.evaluation.questions}
        assert {(name, claim.question) for claim in CLAIMS for name in claim.experiments} <= asked


def test_mistakes():
    with pytest.raises(MxdError, match=r"unknown paper '2505.21363'; choose one of: 2505.21364"):
        read_paper("2505.21363")
    with pytest.raises(
        MxdError, match=r"unknown scale 'papr'; choose one of: paper, smollm2, tiny. Did you mean 'paper'"
    ):
        run_configs(PAPER, "papr", "out")
    with pytest.raises(MxdError, match="unknown model 'gpt3'"):
        run_configs(PAPER, "paper", "out", ["gpt3"])


def answer(layer, **result):
    """An answer whose cross-entropy increase is the same in eight contexts, but for a little noise."""
    if "increase" in result:
        mean, noise = result.pop("increase"), result.pop("noise", 0.0001)
        values = [mean + noise * (i % 3) for i in range(8)]
        result["by_context"] = {"tokens": [100] * 8, "ce_increase": values}
    blocks = {key: result.pop(key) for key in ("normalized_mse", "l0") if key in result}
    return Answer(parse_layer(layer), result | ({"blocks": {"2": blocks}} if blocks else {}))


def layer(method, k=32, **fields):
    return {"method": method, "sparsity": {"kind": "topk", "k": k}, **fields}


def l1(method, value):
    return {"method": method, "sparsity": {"kind": "relu_l1", "l1": value}}


RANDOM = {"method": "mxd", "sparsity": {"kind": "random_k", "k": 32}}
MXD, TC, STC = layer("mxd"), layer("transcoder"), layer("transcoder", skip=True)
ROWS = {
    "figure 3": [
        ("confirmed", [(MXD, {"increase": 0.1}), (TC, {"increase": 0.3}), (STC, {"increase": 0.2})]),
        ("not confirmed", [(MXD, {"increase": 0.2}), (TC, {"increase": 0.3}), (STC, {"increase": 0.1})]),
        # Below, but by less than two standard errors.
        ("not confirmed", [(MXD, {"increase": 0.2}), (TC, {"increase": 0.200225, "noise": -0.0001})]),
        (
            "in part",
            [
                *((layer("mxd", k), {"increase": 0.1}) for k in (8, 32)),
                *((layer("transcoder", k), {"increase": rise}) for k, rise in ((8, 0.2), (32, 0.05))),
            ],
        ),
    ],
    "figure 10": [
        ("confirmed", [(MXD, {"normalized_mse": 0.1}), (TC, {"normalized_mse": 0.6})]),
        ("in part", [(MXD, {"normalized_mse": 0.1}), (TC, {"normalized_mse": 0.2})]),
        ("not confirmed", [(MXD, {"normalized_mse": 0.3}), (TC, {"normalized_mse": 0.2})]),
    ],
    "figures 6, 7": [
        ("confirmed", [(m, {"agreed_tokens": n, "agreed_tokens_se": 0.5}) for m, n in ((MXD, 9), (TC, 7), (STC, 6))]),
        ("not confirmed", [(m, {"agreed_tokens": n, "agreed_tokens_se": 0.5}) for m, n in ((MXD, 9), (TC, 8))]),
    ],
    "figures 4, 13, 16": [
        (verdict, [(m, {"s": {"mean_f1": f}}) for m, f in ((MXD, f1), (TC, 0.9), (layer("topk_sae"), sae))])
        for verdict, f1, sae in (
            ("confirmed", 0.89, 0.8), ("not confirmed", 0.87, 0.8), ("not confirmed", 0.89, 0.895)
        )
    ],
    "figure 12": [
        (verdict, [(MXD, {"increase": full}), *((layer("cp_mumoe", rank=r), {"increase": x}) for r, x in low)])
        for verdict, full, low in (
            ("confirmed", 0.05, ((8, 0.3), (16, 0.2), (32, 0.1))),
            ("in part", 0.15, ((8, 0.3), (16, 0.2), (32, 0.1))),  # the full rank is not the best
            ("in part", 0.05, ((8, 0.3), (16, 0.3), (32, 0.1))),
            ("not confirmed", 0.4, ((8, 0.1), (16, 0.2), (32, 0.3))),
        )
    ],
    "figure 18": [
        (verdict, [*((layer("mxd", k), {"increase": x, "l0": k}) for k, x in ((8, 0.4), (32, 0.2))),
                   (l1("mxd", 0.1), {"increase": at, "l0": 16.0}), (l1("mxd", 0.2), {"increase": 0.0, "l0": 99.0})])
        for verdict, at in (("confirmed", 0.31), ("not confirmed", 0.29))  # 0.3 in the middle of the logarithms
    ],
    "figure 19": [
        (verdict, [(layer("mxd", activation=a), {"normalized_mse": x}) for a, x in (("relu", 0.2), ("silu", smooth))])
        for verdict, smooth in (("confirmed", 0.1), ("not confirmed", 0.3))
    ],
    "figure 20": [
        (verdict, [(m, {"dead": dead, "rates": [0.0] * 100}) for m, dead in ((MXD, ours), (TC, 20))])
        for verdict, ours in (("confirmed", 25), ("not confirmed", 26))
    ],
    "figure 21": [
        (verdict, [(MXD, {"leader": {"share": before}}), (RANDOM, {"leader": {"share": after}})])
        for verdict, before, after in (
            ("confirmed", 1.0, 0.2), ("in part", 0.4, 0.2), ("in part", 0.9, 0.8), ("not confirmed", 0.1, 0.2)
        )
    ],
    "figure 22": [
        (verdict, [(MXD, {"normalized_mse": 0.1}), (RANDOM, {"normalized_mse": drawn})])
        for verdict, drawn in (("confirmed", 0.105), ("not confirmed", 0.12))
    ],
    "table 3": [
        (verdict, [(MXD, {"normalized_rank": rank, "normalized_rank_sd": 0.0, "stable_rank": 4.0})])
        for verdict, rank in (("confirmed", 0.99), ("not confirmed", 0.98))
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("item", "verdict", "rows"),
    [(item, *case) for item, cases in ROWS.items() for case in cases],
    ids=lambda x: str(x)[:12],
)
def test_each_claim_can_hold_and_fail(item, verdict, rows):
    claim = next(claim for claim in CLAIMS if claim.item == item)
    found = claim.look(Answers(answer(config, **dict(result)) for config, result in rows), None)
    assert found is not None and found.verdict == verdict
    assert claim.look(Answers(), None) is None


def test_what_was_not_measured_is_said_and_sizes_only_of_the_papers_models(tmp_path):
    for scale, sizes in (("paper", 4), ("tiny", 0)):
        rows = reproduction.findings(PAPER, run_configs(PAPER, scale, tmp_path))
        assert {row["verdict"] for row in rows} == {"not measured"}
        assert sum(row["item"] == "table 2" for row in rows) == sizes


def test_sizes_are_the_papers_or_not():
    form = {"tc": {"units": 24576, "millions": 37.7}, "stc": {"units": 24576, "millions": 38.4}}
    published = Published.model_validate(form | {"mxd": {"units": 21490, "millions": 37.7}, "rank": 0.99})
    claim = next(claim for claim in CLAIMS if claim.item == "table 2")
    sized = {"d_in": 768, "d_out": 768}
    mxd = layer("mxd", num_units=21490, hidden=3072, activation="gelu_tanh", glu=False, **sized)
    others = [layer("transcoder", num_units=24576, skip=skip, **sized) for skip in (False, True)]
    found = claim.look(Answers(answer(config) for config in (mxd, *others)), published)
    assert (found.verdict, found.difference) == ("confirmed", "units of 3 of 3 the same; parameters within 0.2%")
    assert claim.look(Answers([answer(mxd | {"num_units": 21489})]), published).verdict == "not confirmed"
    assert claim.look(Answers([answer(mxd)]), None) is None


@pytest.mark.long
def test_a_reproduction_in_small_goes_on_where_it_stopped(tmp_path, monkeypatch):
    fields = PAPER.model_dump()
    training = {"recipe": "fast", "tokens": 8192, "buffer_tokens": 4096, "log_every": 2}
    small = {"config": "tiny", "other": 4, "fields": {"training": training}}
    evaluation = {"faithfulness": {"tokens": 1024}, "structure": {"tokens": 1024, "experts": 4}}
    fields["scales"] = {"tiny": {"k": [4, 8], "models": {"tiny-gpt2": small}, "evaluation": evaluation}}
    fields["experiments"] = {name: fields["experiments"][name] for name in ("rank", "random-k")}
    monkeypatch.setattr(reproduction, "read_paper", lambda number: type(PAPER).model_validate(fields))
    done = []
    compare = reproduction.compare
    monkeypatch.setattr(reproduction, "compare", lambda config: done.append(config.run) or compare(config))
    folder = reproduction.reproduce("2505.21364", "tiny", tmp_path / "out")
    rows = json.loads((folder / "reproduction.json").read_text())["findings"]
    assert [(row["item"], row["verdict"] == "not measured") for row in rows] == [
        ("figure 12", False), ("figure 21", False), ("figure 22", False)
    ]  # fmt: skip
    text = (folder / "reproduction.md").read_text()
    assert "| figure 21 | tiny-gpt2 |" in text and "(tiny-gpt2-rank/report.html)" in text
    weights = {path: path.read_bytes() for path in folder.rglob("model.safetensors")}
    answered = {path: path.stat().st_mtime_ns for path in folder.rglob("faithfulness.json")}
    assert reproduction.reproduce("2505.21364", "tiny", tmp_path / "out") == folder
    assert done == ["tiny-gpt2-rank", "tiny-gpt2-random-k"] * 2
    assert {path: path.read_bytes() for path in folder.rglob("model.safetensors")} == weights
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("faithfulness.json")} == answered
    assert json.loads((folder / "reproduction.json").read_text())["findings"] == rows


def test_the_command_says_what_it_would_take(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def unreachable(config):
        raise MxdError(f"cannot load {config.model.source}")

    monkeypatch.setattr(reproduction, "plan_run", unreachable)
    code, out, _ = mxd(capsys, "reproduce", "2505.21364", "--dry-run", "--model", "gpt2", "--model", "pythia-410m")
    assert code == 0 and "13 runs, 102 layers; training on this machine: not known" in " ".join(out.split())
    assert "not known for gpt2, pythia-410m: cannot load openai-community/gpt2" in out
    assert not list(tmp_path.iterdir())
