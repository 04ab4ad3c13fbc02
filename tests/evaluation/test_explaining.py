"""Self-explained units: a vector in a word's place is that word, texts are held out, and scores have a chance."""

import json

import numpy as np
import pytest
import torch
from command import mxd
from small_layers import contexts_of, dense_code, layer_for, trained_on

from mxd.artifacts.checkpoint import save_layer
from mxd.common.errors import MxdError
from mxd.data.labelled import labelled_texts
from mxd.evaluation import explaining
from mxd.evaluation.deciding import decided, scored
from mxd.evaluation.explaining import PROMPTS, SLOT, evaluate_explaining, mean_embedding, written
from mxd.evaluation.judging import NoAnswer
from mxd.model.loading import load_frozen
from mxd.questions import ExplainingConfig

TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}:"


def instruct(model):
    """The same model with a tokenizer that has a chat template."""
    tokenizer = type(model.tokenizer).from_pretrained(model.tokenizer.name_or_path)
    tokenizer.chat_template = TEMPLATE
    return load_frozen(model.module, tokenizer=tokenizer)


def chat(question):
    return f"<{question}>:"


def test_an_embedding_in_the_words_place_writes_what_the_word_does(family):
    """Token by token, everything computed again, for several words at once."""
    model, (question, begun) = instruct(family), PROMPTS[1]
    words = [" wheat", " law", " river"]
    ids = [model.tokenizer(word)["input_ids"][-1] for word in words]
    vectors = torch.stack([mean_embedding(model, np.array([i] * 3)) for i in ids])
    found = written(model, vectors, chat, question, begun, 6)
    parts = [text.rstrip(" ") for text in (chat(question) + begun).split(SLOT)]
    for i, text in zip(ids, found, strict=True):
        row = model.tokenizer(parts[0])["input_ids"]
        for part in parts[1:]:
            row = [*row, i, *model.tokenizer(part)["input_ids"]]
        start = len(row)
        while len(row) < start + 6 and (new := int(model.logits(torch.tensor([row]))[0, -1].argmax())) != 0:
            row.append(new)
        assert text == model.tokenizer.decode(row[start:])
    assert written(model, vectors[1:2], chat, question, begun, 6) == found[1:2]
    assert written(model, vectors[:1], chat, question, begun, 2)[0] in found[0]


def test_the_mean_counts_a_token_as_often_as_it_is_there(gpt2):
    weight = gpt2.module.get_input_embeddings().weight
    torch.testing.assert_close(mean_embedding(gpt2, np.array([5, 9, 5])), (2 * weight[5] + weight[9]) / 3)


def rows_of(model, count=24, seq=48):
    """The beginnings of texts of all topics."""
    texts = [text for text in labelled_texts("factbook").texts[::7] if len(text) > 400]
    return np.array([[0, *model.tokenizer(text)["input_ids"][: seq - 1]] for text in texts[:count]])


def test_one_half_explains_and_the_other_gives_texts_with_and_without_the_unit(trained_gpt2):
    model = instruct(trained_gpt2)
    layer, rows = layer_for(model, 1), rows_of(model)
    how = ExplainingConfig(tokens=rows.size, top=16, words=4, contexts=2, new_tokens=3, shared=0.9)
    layers = {"a": trained_on(model, 1, layer)}
    found = evaluate_explaining(model, layers, contexts_of(rows), how)["a"]
    fired = dense_code(model, 1, layer, rows)
    fired[rows == 0] = 0  # the excluded token
    half, tokenizer = len(rows) // 2, model.tokenizer
    adds = fired[:half].sum((0, 1)) * layer.unit_norms().detach().numpy()
    counted = (rows[:half] != 0).sum()
    adds[(fired[:half] > 0).sum((0, 1)) > 0.9 * counted] = -1
    expected = np.argsort(-adds, kind="stable")[:16]
    assert set(found["units"]) <= {str(unit) for unit in expected} and len(found["units"]) + found["left_out"] == 16
    assert len(found["units"]) > 2
    for unit, one in found["units"].items():
        own = fired[..., int(unit)]
        top = np.argsort(-own[:half].ravel(), kind="stable")[:4]
        strongest = rows[:half].ravel()[top[own[:half].ravel()[top] > 0]]
        assert [tokenizer(token, add_special_tokens=False)["input_ids"] for token in one["tokens"]] == [
            [i] for i in strongest.tolist()
        ]
        assert len(one["explanations"]) == 3 and 1 <= len(one["pairs"]) <= 2
        word = mean_embedding(model, strongest)[None]
        assert one["explanations"] == [written(model, word, chat, *prompt, 3)[0] for prompt in PROMPTS]
        expected_pairs = []
        for best in half + np.argsort(-own[half:].max(-1), kind="stable")[:2]:
            at = int(own[best].argmax())
            window = slice(max(0, at - 20), at + 9)
            quiet = [n for n in range(half, len(rows)) if own[n, window].max() < own[best, at] / 2]
            if not quiet:
                break
            active, *others = (tokenizer.decode(rows[n, window], skip_special_tokens=True) for n in (best, *quiet))
            expected_pairs.append((active, set(others)))
        assert [pair["active"] for pair in one["pairs"]] == [active for active, _ in expected_pairs]
        for pair, (_, others) in zip(one["pairs"], expected_pairs, strict=True):
            assert pair["random"] in others
    assert json.loads(json.dumps(found)) == found and "judges" not in found
    named = evaluate_explaining(model, layers, contexts_of(rows), how, [int(expected[1]), int(expected[0])])["a"]
    assert {unit: one["tokens"] for unit, one in named["units"].items()}.items() <= {
        unit: one["tokens"] for unit, one in found["units"].items()
    }.items()


def test_units_are_chosen_on_the_half_that_explains(trained_gpt2):
    layer, rows = trained_on(trained_gpt2, 1, layer_for(trained_gpt2, 1)), rows_of(trained_gpt2, 12, 16)

    def chosen(rows):
        return explaining._chosen(trained_gpt2, "a", layer, rows, ExplainingConfig(top=5, shared=0.9), None)

    assert chosen(rows) == chosen(np.concatenate([rows[:6]] * 2)) != chosen(rows[::-1])


def test_the_seed_draws_the_texts_without_the_unit_for_each_layer_anew_and_reaches_the_judges(
    trained_gpt2, monkeypatch
):
    model, seeds = instruct(trained_gpt2), []
    monkeypatch.setattr(explaining, "decided", lambda results, judges, seed: seeds.append(seed))
    rows, layer = rows_of(model, 16, 24), trained_on(model, 1, layer_for(model, 1))

    def drawn(seed):
        how = ExplainingConfig(tokens=rows.size, top=16, contexts=2, new_tokens=1, shared=0.9, seed=seed)
        layers = {"a": layer, "b": layer}
        found = evaluate_explaining(model, layers, contexts_of(rows), how, judges=[Judge(lambda *_: "A")])
        pairs = [[pair for unit in found[name]["units"].values() for pair in unit["pairs"]] for name in "ab"]
        return [[[pair[kind] for pair in each] for each in pairs] for kind in ("active", "random")]

    (active, random), (again, others) = drawn(3), drawn(4)
    assert active == again and active[0] == active[1] and len(active[0]) > 4, "the same texts with the units"
    assert random[0] != random[1] and random != others and seeds == [3, 4]


def test_a_unit_that_never_fires_is_left_out_and_counted(trained_gpt2):
    model = instruct(trained_gpt2)
    layer, rows = layer_for(model, 1), rows_of(model)
    silent = np.flatnonzero(dense_code(model, 1, layer, rows).max((0, 1)) == 0)
    how = ExplainingConfig(tokens=rows.size, new_tokens=2)
    found = evaluate_explaining(model, {"a": trained_on(model, 1, layer)}, contexts_of(rows), how, [int(silent[0])])
    assert found["a"]["left_out"] == 1 and found["a"]["units"] == {}


class Judge:
    """Answers by a function of the explanation and the two texts."""

    def __init__(self, answer, name="judge"):
        self.answer, self.name, self.asked = answer, name, []

    def __call__(self, prompt):
        explanation = prompt.split("poor:\n\n")[1].split("\n\nIt is active")[0]
        a, b = prompt.split("TEXT A: ")[1].split("\n\nAnswer")[0].split("\n\nTEXT B: ")
        self.asked.append((explanation, a, b))
        answer = self.answer(explanation, a, b)
        if isinstance(answer, Exception):
            raise answer
        return answer


def explained(units, pairs=2):
    """Units with texts that name them, beside texts that name none."""
    return {
        "a": {
            "units": {
                str(n): {
                    "explanations": [f"means {n}", f"is {n}", f"about {n}"],
                    "pairs": [{"active": f"text of {n} ({i})", "random": f"other ({i})"} for i in range(pairs)],
                }
                for n in range(units)
            }
        }
    }


def test_a_judge_that_always_says_a_is_at_chance_and_one_that_follows_explanations_beats_the_control():
    results = explained(8)
    constant = Judge(lambda e, a, b: "A", "constant")
    blind = Judge(lambda e, a, b: " A\n" if "text of" in a else "B", "blind")
    reader = Judge(lambda e, a, b: "A" if f"of {e.split()[1]} " in a else "B", "reader")
    decided(results, [constant, blind, reader], 0)
    found = results["a"]["judges"]
    assert (found["constant"]["accuracy"], found["constant"]["score"], found["constant"]["beyond"]) == (0.5, 0.0, 0.0)
    # one that needs no explanation is always right, and the control shows that none was needed
    assert (found["blind"]["score"], found["blind"]["control_score"], found["blind"]["beyond"]) == (1.0, 1.0, 0.0)
    assert (found["reader"]["score"], found["reader"]["control_score"], found["reader"]["beyond"]) == (1.0, 0.0, 1.0)
    assert found["reader"]["asked"] == len(reader.asked) == 8 * 3 * 2 * 2 and found["reader"]["failures"] == 0
    others = {unit: one["other"] for unit, one in results["a"]["units"].items()}
    assert sorted(others.values()) == sorted(others) and all(unit != other for unit, other in others.items())
    assert {e for e, *_ in reader.asked} == {f"{w} {n}" for n in range(8) for w in ("means", "is", "about")}


def test_the_right_text_stands_first_in_every_other_question_of_units_with_an_odd_number_of_them():
    results = explained(4, pairs=1)
    decided(results, [Judge(lambda e, a, b: "A")], 0)
    right = [unit["judges"]["judge"]["own"]["right"] for unit in results["a"]["units"].values()]
    assert right == [2, 1, 2, 1] and results["a"]["judges"]["judge"]["accuracy"] == pytest.approx(0.5)


def test_the_seed_draws_whose_explanations_are_the_control():
    def others(seed):
        results = explained(8, pairs=1) | {"b": explained(8, pairs=1)["a"]}
        decided(results, [Judge(lambda e, a, b: "A")], seed)
        return [[unit["other"] for unit in result["units"].values()] for result in results.values()]

    assert others(0) == others(0) != others(1) and len({tuple(each) for each in (*others(0), *others(1))}) == 4


def test_a_judge_that_guesses_is_within_its_standard_errors_of_chance():
    rng = np.random.default_rng(0)
    results = explained(200)
    decided(results, [Judge(lambda e, a, b: "AB"[rng.integers(2)])], 0)
    found = results["a"]["judges"]["judge"]
    for key in ("score", "control_score", "beyond"):
        assert abs(found[key]) < 4 * found[f"{key}_se"] and 0.02 < found[f"{key}_se"] < 0.12


def test_scores_are_means_over_units_of_what_was_answered():
    units = [
        {
            "own": {"right": 3, "answered": 4, "reasons": {"x": 2}},
            "control": {"right": 1, "answered": 2, "reasons": {}},
        },
        {
            "own": {"right": 1, "answered": 2, "reasons": {}},
            "control": {"right": 0, "answered": 0, "reasons": {"x": 6}},
        },
        {"own": {"right": 2, "answered": 2, "reasons": {}}, "control": {"right": 1, "answered": 4, "reasons": {}}},
    ]
    found = scored(units)
    assert found["accuracy"] == pytest.approx(0.75) and found["score"] == pytest.approx(0.5)
    assert found["score_se"] == pytest.approx(np.std([0.5, 0.0, 1.0], ddof=1) / 3**0.5)
    assert found["control_score"] == pytest.approx(-0.25) and found["beyond"] == pytest.approx(2 * (0.25 + 0.75) / 2)
    assert (found["asked"], found["failures"], found["reasons"], found["units"]) == (22, 8, {"x": 8}, 3)


def test_what_is_no_letter_is_a_failure_and_a_silent_judge_is_not_asked_on():
    results = explained(3)
    decided(results, [Judge(lambda e, a, b: "A." if "0" in e else "A")], 0)
    found = results["a"]["judges"]["judge"]
    assert found["reasons"] == {"neither A nor B": found["failures"]} and found["failures"] == 12
    dead = Judge(lambda e, a, b: NoAnswer("timed out"))
    decided(results, [dead], 0)
    found = results["a"]["judges"]["judge"]
    assert len(dead.asked) == 3 and found["reasons"] == {"timed out": 3, "not asked": 33}
    assert found["score"] is found["beyond"] is None and found["units"] == 0
    turns = iter(range(36))
    halting = Judge(lambda e, a, b: NoAnswer("timed out") if next(turns) % 3 else "A")
    decided(results, [halting], 0)
    assert results["a"]["judges"]["judge"]["reasons"] == {"timed out": 24}, "an answer between two silences ends them"


def test_one_unit_alone_has_no_control():
    results = explained(1)
    decided(results, [Judge(lambda e, a, b: "A")], 0)
    assert results["a"]["units"]["0"]["other"] is None
    found = results["a"]["judges"]["judge"]
    assert found["score"] == 0.0 and found["score_se"] is found["control_score"] is found["beyond"] is None


def test_mistakes_are_refused_with_a_remedy(trained_gpt2):
    model, rows = instruct(trained_gpt2), rows_of(trained_gpt2, seq=12)
    layers = {"a": trained_on(model, 1, layer_for(model, 1))}
    with pytest.raises(MxdError, match=r"has no chat template: only an instruct model can be asked .* `mxd units`"):
        evaluate_explaining(trained_gpt2, layers, contexts_of(rows))
    with pytest.raises(MxdError, match=r"single context.*Raise --tokens"):
        evaluate_explaining(model, layers, contexts_of(rows[:1]))
    with pytest.raises(MxdError, match=r"a has units 0 \.\.\. 39, got 40"):
        evaluate_explaining(model, layers, contexts_of(rows), units=[40])
    with pytest.raises(MxdError, match=r"and 5000 new ones do not fit into the \d+ positions .*--new-tokens"):
        evaluate_explaining(model, layers, contexts_of(rows), ExplainingConfig(tokens=144, new_tokens=5000))


@pytest.mark.long
def test_mxd_explain_writes_what_the_model_says_and_what_the_judge_decides(tmp_path, trained_gpt2, capsys):
    model, folder = instruct(trained_gpt2), tmp_path / "instruct"
    trained_gpt2.module.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    layer = trained_on(model, 1, layer_for(model, 1), data={"source": "bundled", "split": "validation", "context": 64})
    path = save_layer(tmp_path / "block1", layer.layer, layer.provenance)
    words = ("--tokens", 640, "--top", 3, "--new-tokens", 4, "--model", folder, "--device", "cpu")
    code, out, err = mxd(capsys, "explain", path, *words, "--judge-local", folder)
    assert code == 0, err
    document = json.loads((path / "explaining.json").read_text())
    (result,) = document["results"].values()
    assert len(result["units"]) + result["left_out"] == 3 and document["asked"]["top"] == 3
    (judge,) = result["judges"].values()
    assert judge["failures"] <= judge["asked"] and "units explained" in out and "on this machine: beyond it" in out
    code, _, err = mxd(capsys, "explain", path, "--model", "tiny-gpt2", "--device", "cpu")
    assert code == 1 and "has no chat template" in err and err.count("\n") == 1
    code, _, err = mxd(capsys, "explain", path, "--judge", "http://127.0.0.1:9")
    assert code == 1 and "got 1 --judge, 0 --judge-model" in err
