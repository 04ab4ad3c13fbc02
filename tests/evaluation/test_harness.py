"""lm-eval tasks: what is handed to the harness, and what comes back. A stand-in plays the harness here, whose real
command line scripts/interop/lm_eval.py compares with."""

import json
import sys

import pytest
import torch
from stand_in import IDS

from mxd import cli
from mxd.artifacts.checkpoint import save_layer
from mxd.artifacts.provenance import Provenance
from mxd.common.errors import MxdError
from mxd.evaluation.harness import find_tasks, score
from mxd.layers import parse_layer
from mxd.report.tables import tasks_table
from mxd.splice import spliced


def layer_for(model, number):
    fields = {"method": "transcoder", "num_units": 48, "sparsity": {"kind": "topk", "k": 5}}
    layer = parse_layer(fields).resolve(model.mlp_shape(number)).build()
    layer.decoder.data.normal_(generator=torch.Generator().manual_seed(number))
    return layer.eval()


def logit(model):
    return float(model.logits(IDS)[0, -1, 7])


def test_the_base_and_each_splice_are_scored(gpt2, stand_in):
    sets = {"one": {1: layer_for(gpt2, 1)}, "two": {0: layer_for(gpt2, 0), 2: layer_for(gpt2, 2)}}
    padding = gpt2.tokenizer.pad_token
    found = score(gpt2, sets, find_tasks(["arc_*"], 20))
    expected = {}
    for name, layers in sets.items():
        with spliced(gpt2, layers):
            expected[name] = {t: {"acc,none": logit(gpt2), "acc_stderr,none": 0.5} for t in ("arc_easy", "arc_hard")}
    base = {t: {"acc,none": logit(gpt2), "acc_stderr,none": 0.5} for t in ("arc_easy", "arc_hard")}
    assert found == {"version": "0.9", "limit": 20, "base": base, "spliced": expected}
    assert len({float(s["arc_easy"]["acc,none"]) for s in (base, *expected.values())}) == 3
    assert stand_in.calls == [(["arc_easy", "arc_hard"], 20)] * 3
    assert gpt2.tokenizer.pad_token == padding


def test_the_table_has_a_column_for_the_base_and_each_splice(gpt2, stand_in):
    found = score(gpt2, {"mine": {1: layer_for(gpt2, 1)}}, find_tasks(["arc_easy"]))
    table = tasks_table(found)
    assert [column.header for column in table.columns] == ["task", "metric", "base", "mine"]
    cells = [list(column.cells) for column in table.columns]
    assert cells[:3] == [["arc_easy"], ["acc"], [f"{logit(gpt2):.4f} ± 0.5000"]]
    assert cells[3] != cells[2]


@pytest.mark.parametrize("error", [FileNotFoundError("no data set"), ValueError("no data set")])
def test_a_task_whose_data_cannot_be_had_is_one_line(gpt2, stand_in, error):
    stand_in.error = error
    with pytest.raises(MxdError, match="lm-eval cannot run arc_easy: no data set"):
        score(gpt2, {"mine": {1: layer_for(gpt2, 1)}}, find_tasks(["arc_easy"]))


def test_mistakes_show_before_anything_is_measured(stand_in, tmp_path):
    with pytest.raises(MxdError, match=r"has no task 'arc_eazy'.*--lm-eval-include"):
        find_tasks(["arc_easy", "arc_eazy"])
    with pytest.raises(MxdError, match="at least 1, got 0"):
        find_tasks(["arc_easy"], 0)
    with pytest.raises(MxdError, match="no folder with lm-eval task files"):
        find_tasks(["arc_easy"], include=tmp_path / "none")
    stand_in.included.clear()
    find_tasks(["arc_easy"], include=tmp_path)
    find_tasks(["arc_easy"])
    assert stand_in.included == [str(tmp_path), None]


def test_without_the_extra_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(MxdError, match=r"pip install 'mxd\[lm-eval\]'"):
        find_tasks(["arc_easy"])


def test_scores_go_into_the_evaluations_file(trained_gpt2, stand_in, tmp_path, capsys):
    layer = layer_for(trained_gpt2, 1)
    known = {"model": "tiny-gpt2", "revision": None, "block": 1, "fingerprint": trained_gpt2.fingerprint(1)}
    data = {"source": "bundled", "split": "train", "context": 32}
    save_layer(tmp_path / "run" / "mine", layer, Provenance(**known, data=data))
    words = [str(tmp_path / "run"), "--tokens", "64", "--device", "cpu"]
    assert _mxd(*words, "--lm-eval-limit", "3") == 1
    assert "--lm-eval-limit is given without tasks; add --lm-eval TASKS." in capsys.readouterr().err
    assert _mxd(*words, "--lm-eval", "arc_easy,arc_hard", "--lm-eval-limit", "3") == 0
    printed = capsys.readouterr().out
    assert "arc_hard" in printed and "at most 3 documents" in printed
    found = json.loads((tmp_path / "run" / "faithfulness.json").read_text())
    assert found["lm_eval"]["limit"] == 3
    with spliced(trained_gpt2, {1: layer}):
        expected = logit(trained_gpt2)
    assert found["lm_eval"]["spliced"]["run/mine"]["arc_easy"]["acc,none"] == pytest.approx(expected, abs=1e-4)
    assert found["lm_eval"]["base"]["arc_easy"]["acc,none"] == pytest.approx(logit(trained_gpt2), abs=1e-4)
    assert found["results"]["run/mine"]["ce_increase"] != 0


def _mxd(*words):
    sys.argv = ["mxd", "evaluate", *words]
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0
