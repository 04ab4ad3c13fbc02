"""The frontier in one command: everything is trained and answered once, and an interrupted comparison goes on."""

import inspect
import json
from importlib import import_module
from typing import get_args

import pytest
from tables import write_table

from mxd.common.errors import MxdError
from mxd.config import parse_config
from mxd.evaluation import compare as file
from mxd.evaluation import faithfulness, structure
from mxd.evaluation.compare import compare
from mxd.model import loading
from mxd.questions import EvaluationConfig, Question

QUESTIONS = get_args(Question)
SMALL = {
    "faithfulness": {"tokens": 256},
    "generation": {"limit": 6},
    "whole": {"tokens": 256, "draws": 2, "limit": 6},
    "units": {"tokens": 512, "top": 2},
    "structure": {"tokens": 256},
    "probing": {"sets": ["gender"], "limit": 60},
    "masking": {"limit": 4},
    "steering": {"first": 2, "samples": 2},
    "ablation": {"limit": 4, "top": 2},
    "rewrite": {"limit": 4, "draws": 1, "strengths": [0.125]},
    "subset": {"tokens": 128, "keep": [0.5], "draws": 2, "timings": 0},
}


def run(folder, questions, **changed):
    rows = [{"text": f"The {'cat' if n % 2 else 'law'} {n} runs", "score": n % 2} for n in range(64)]
    scored = str(write_table(folder / "scored.csv", rows))
    (folder / "words.txt").write_text("the")
    toxicity = {
        **{"scores": scored, "prompts": scored, "scorer": {"kind": "words", "file": str(folder / "words.txt")}},
        **{"limit": 2, "samples": 2, "tokens": 3, "greedy_tokens": 3},
    }
    raw = {
        "run": "r",
        "out": str(folder),
        "blocks": [1],
        "model": {"source": "tiny-gpt2", "device": "cpu"},
        "data": {"split": "validation"},
        "sizing": {"expansion": 9},
        "replacements": [
            {"method": "mxd", "num_units": 64, "sparsity": {"kind": "topk", "k": [2, 4]}},
            {"method": "topk_sae", "num_units": 64, "sparsity": {"kind": "topk", "k": 4}},
        ],
        "training": {"recipe": "short", "tokens": 1024, "batch_tokens": 512, "buffer_tokens": 1024},
        "evaluation": {"questions": questions, **SMALL, "toxicity": toxicity, **changed},
    }
    return parse_config(raw)


def answers(folder):
    return {path.stem: path.read_bytes() for path in folder.glob("*.json")}


def test_every_question_has_a_config_and_an_answer():
    assert set(QUESTIONS) == set(EvaluationConfig.model_fields) - {"questions", "split"}
    for question in QUESTIONS:
        answer = import_module(f"mxd.evaluation.{question}").answer
        assert list(inspect.signature(answer).parameters)[:2] == ["subject", "how"], question


@pytest.mark.long
def test_everything_is_trained_and_answered_for_every_replacement(tmp_path):
    folder = compare(run(tmp_path, list(QUESTIONS)))
    kinds = ("mxd-k2", "mxd-k4", "sae-k4")
    for question in QUESTIONS:
        document = json.loads((folder / f"{question}.json").read_text())
        names = set(kinds) if question == "whole" else {f"r/block1-{kind}" for kind in kinds}
        assert names <= set(document["results"]), question
        assert document["model"] == "tiny-gpt2" and document["versions"], question
    assert json.loads((folder / "generation.json").read_text())["results"]["r/block1-mxd-k2"]["prompts"] == 6
    assert json.loads((folder / "units.json").read_text())["results"]["r/block1-mxd-k2"]["tokens"] <= 512


@pytest.mark.long
def test_the_base_model_is_loaded_once_and_the_text_is_that_of_the_commands(tmp_path, monkeypatch):
    loaded = []
    real = loading._load
    monkeypatch.setattr(loading, "_load", lambda name, *rest: loaded.append(name) or real(name, *rest))
    opened, really = [], file.open_checkpoints
    monkeypatch.setattr(file, "open_checkpoints", lambda *args: opened.append(args[1]) or really(*args))
    compare(run(tmp_path, ["faithfulness"]))
    assert loaded == ["tiny-gpt2"]
    assert opened == [{}]  # the text is that of `mxd evaluate`, for datasets without a held-out split, too


@pytest.mark.long
def test_an_interrupted_comparison_goes_on_and_keeps_what_it_had(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    questions = ["faithfulness", "structure", "generation"]
    with monkeypatch.context() as patch:
        patch.setattr(structure, "answer", stop)
        with pytest.raises(KeyboardInterrupt):
            compare(run(tmp_path, questions))
    folder = tmp_path / "r"
    before = answers(folder)
    assert set(before) == {"faithfulness"}
    trained = (folder / "block1-mxd-k2" / "model.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(faithfulness, "answer", stop)  # not asked again
        compare(run(tmp_path, questions))
    after = answers(folder)
    assert set(after) == set(questions) and after["faithfulness"] == before["faithfulness"]
    assert (folder / "block1-mxd-k2" / "model.safetensors").read_bytes() == trained
    monkeypatch.setattr(file, "open_checkpoints", stop)  # nothing is left to do
    assert compare(run(tmp_path, questions)) == folder
    assert answers(folder) == after


@pytest.mark.long
def test_other_settings_renew_the_answers_that_depend_on_them(tmp_path):
    folder = compare(run(tmp_path, ["faithfulness", "generation"]))
    before = answers(folder)
    compare(run(tmp_path, ["faithfulness", "generation"], generation={"limit": 7}, probing={"limit": 61}))
    after = answers(folder)
    assert after["faithfulness"] == before["faithfulness"] and after["generation"] != before["generation"]
    assert json.loads(after["generation"])["asked"]["limit"] == 7


def test_a_question_that_lacks_its_texts_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(MxdError, match="toxicity needs scores, prompts, scorer, of which scores, prompts, scorer is"):
        compare(run(tmp_path, ["toxicity"], toxicity={}))
    assert not (tmp_path / "r").exists()


@pytest.mark.long
def test_another_training_needs_another_run(tmp_path):
    compare(run(tmp_path, ["structure"]))
    other = run(tmp_path, ["structure"]).model_dump()
    with pytest.raises(MxdError, match="differs from this config"):
        compare(parse_config(other | {"seed": 1}))
