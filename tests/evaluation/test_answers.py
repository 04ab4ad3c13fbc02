"""What a question was asked with reaches what measures it: the text's BOS and its contexts, and the seed."""

import inspect
from importlib import import_module

import pytest
from small_layers import contexts_of, layer_for, trained_on
from tables import write_table

from mxd.config import DataConfig
from mxd.evaluation.checkpoints import Subject
from mxd.questions import DEFAULTS, EXPLAINING, PURGING, changed


class Scores:
    """Scores nothing: nothing is written."""

    name = "nobody"

    def __call__(self, texts):
        return []


@pytest.mark.parametrize(
    "question", ["masking", "purging", "toxicity", "ablation", "rewrite", "steering", "explaining", "subset"]
)
def test_bos_contexts_and_the_seed_reach_what_measures(question, gpt2, tmp_path, monkeypatch):
    rows = [{"text": f"{n} cats", "label": "ab"[n % 2], "group": "xy"[n // 2], "score": n / 4} for n in range(4)]
    table = str(write_table(tmp_path / "table.csv", rows))
    module = import_module(f"mxd.evaluation.{question}")
    how = {"purging": PURGING, "explaining": EXPLAINING}.get(question) or getattr(DEFAULTS, question)
    named = {"masking": ["domains"], "ablation": ["set"], "rewrite": ["set"], "toxicity": ["scores", "prompts"]}
    how = changed(how, seed=5, **dict.fromkeys(named.get(question, []), table))
    more = {"purging": {"scores": table}, "toxicity": {"by": Scores()}}
    name = "evaluate_purging" if question == "toxicity" else f"evaluate_{question}"
    signature, seen = inspect.signature(getattr(module, name)), {}
    monkeypatch.setattr(module, name, lambda *args, **rest: seen.update(signature.bind(*args, **rest).arguments) or {})
    monkeypatch.setattr(Subject, "contexts", lambda self, seed: contexts_of([seed]))
    text = DataConfig(source="bundled", context=24, bos=False)
    module.answer(Subject({"a": trained_on(gpt2, 1, layer_for(gpt2, 1))}, gpt2, text), how, **more.get(question, {}))
    assert seen["how"].seed == 5
    for key, expected in (("bos", False), ("context", 24)):
        assert seen.get(key) == (expected if key in signature.parameters else None)
    beside = seen.get("beside")
    if question == "toxicity":
        assert beside.how == how and all(row[0] != 0 for row in beside.begun)
        beside = beside.under
    for held_out in filter(None, (seen.get("contexts"), beside and beside.contexts)):
        assert list(held_out(0)) == [5]
