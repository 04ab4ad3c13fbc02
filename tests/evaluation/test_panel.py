"""Several judges: means only over what all rated, each one's own numbers, and agreement by oracles of SciPy."""

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr

from mxd.common.errors import MxdError
from mxd.evaluation.explaining import evaluate_explaining
from mxd.evaluation.judging import RUBRICS, NoAnswer, judge_prompt
from mxd.evaluation.panel import combined, judge_all, panel, ranks, spearman
from mxd.evaluation.steering import evaluate_steering


class Scripted:
    """A judge of a name that gives answers in turn; an exception is raised."""

    def __init__(self, name, *answers):
        self.name, self.answers, self.prompts = name, list(answers), []

    def __call__(self, prompt):
        self.prompts.append(prompt)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def steered(units):
    return {"a": {"units": {str(n): {"samples": [f"unit {n}"]} for n in range(units)}, "unsteered": ["still"]}}


def test_ranks_and_their_correlation_are_scipys_ties_too():
    rng = np.random.default_rng(0)
    for size in (3, 10, 41):
        a, b = rng.integers(0, 5, (2, size)) / 4
        a[0], a[1], b[0], b[1] = 0, 1, 1, 0
        np.testing.assert_allclose(ranks(a), rankdata(a))
        assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert spearman(np.arange(5.0), np.ones(5)) is None and spearman(np.arange(2.0), np.arange(2.0)) is None
    assert spearman(np.arange(5.0), np.arange(5.0) ** 3) == pytest.approx(1)


def test_a_mean_over_judges_is_of_units_that_all_rated_and_each_judge_keeps_its_own():
    results = steered(4)
    first = Scripted("one", "0.10, 0.50", "0.20, 0.60", "no", "0.40, 0.80", "1.00, 0.90")
    second = Scripted("two", "0.30, 0.50", "0.20, 0.40", "0.90, 0.90", NoAnswer("HTTP 500"), "0.50, 0.70")
    judge_all(results, [first, second], "Say: ", 1, "paraphrase")
    found = results["a"]
    assert [unit["coherence"] for unit in found["units"].values()] == [
        pytest.approx(0.2),
        pytest.approx(0.2),
        None,
        None,
    ]
    assert (found["coherence"], found["fluency"]) == (pytest.approx(0.2), pytest.approx(0.5))
    assert found["fluency_se"] == pytest.approx(0.0) and found["asked"] == 8 and found["failures"] == 2
    assert found["reasons"] == {"not two numbers": 1, "HTTP 500": 1}
    one, two = found["judges"]["one"], found["judges"]["two"]
    assert (one["coherence"], two["coherence"]) == (pytest.approx(0.7 / 3), pytest.approx(1.4 / 3))
    assert one["coherence_se"] == pytest.approx(np.std([0.1, 0.2, 0.4], ddof=1) / 3**0.5)
    assert (one["asked"], one["failures"], two["failures"]) == (4, 1, 1)
    assert found["unsteered_judged"]["coherence"] == pytest.approx(0.75)
    (pair,) = found["agreement"]
    assert pair["judges"] == ["one", "two"] and pair["coherence"]["units"] == 2
    assert pair["coherence"]["difference"] == pytest.approx(-0.1) and pair["fluency"]["difference"] == pytest.approx(
        0.1
    )
    assert pair["coherence"]["spearman"] is pair["coherence"]["chance"] is None  # of two units
    assert first.prompts[0].endswith("<sample>Say: unit 0</sample>") and "Say: still" in second.prompts[-1]
    assert (found["judge"], found["rubric"]) == ("one, two", "paraphrase")


def test_agreement_is_over_the_units_both_rated_with_its_error_and_what_chance_gives():
    rng = np.random.default_rng(1)
    numbers = rng.integers(0, 101, (3, 30, 2)) / 100
    names = ["x", "y", "z"]

    def report(judge, unit):
        return {"coherence": judge[unit, 0], "fluency": judge[unit, 1], "reasons": {}, "disagreement": False}

    units = [combined({n: report(judge, i) for n, judge in zip(names, numbers, strict=True)}) for i in range(30)]
    found = panel(units, names, 2)
    assert [pair["judges"] for pair in found["agreement"]] == [["x", "y"], ["x", "z"], ["y", "z"]]
    gap = numbers[1, :, 1] - numbers[2, :, 1]
    last = found["agreement"][2]["fluency"]
    assert last["difference"] == pytest.approx(gap.mean())
    assert last["difference_se"] == pytest.approx(gap.std(ddof=1) / 30**0.5)
    assert last["spearman"] == pytest.approx(spearmanr(numbers[1, :, 1], numbers[2, :, 1]).statistic)
    drawn = [spearmanr(*rng.random((2, 30))).statistic for _ in range(400)]
    assert np.mean(np.abs(drawn) < last["chance"]) == pytest.approx(0.95, abs=0.035)
    assert found["asked"] == 180 and found["coherence"] == pytest.approx(numbers[:, :, 0].mean())


def test_one_judge_that_falls_silent_is_not_asked_on_while_the_other_is():
    results = steered(5)
    dead, alive = Scripted("dead", *[NoAnswer("timed out")] * 3), Scripted("alive", *["0.50, 0.50"] * 6)
    judge_all(results, [dead, alive], "", 1, "paraphrase")
    assert len(dead.prompts) == 3 and not alive.answers
    found = results["a"]
    assert found["coherence"] is None and found["judges"]["alive"]["coherence"] == 0.5
    assert found["judges"]["dead"]["reasons"] == {"timed out": 3, "not asked": 2}
    assert found["agreement"][0]["coherence"] == {
        "units": 0,
        **dict.fromkeys(("difference", "difference_se", "spearman", "chance")),
    }


def test_the_same_judge_twice_is_refused_before_any_work(gpt2):
    twice = [Scripted("one"), Scripted("one")]
    for asking in (
        lambda: evaluate_steering(gpt2, {}, judges=twice),
        lambda: evaluate_explaining(gpt2, {}, lambda start: iter(()), judges=twice),
    ):
        with pytest.raises(MxdError, match=r"two judges are the same \(one, one\); name each once"):
            asking()


def test_the_papers_words_have_its_anchors_and_are_not_ours():
    asked = judge_prompt(["one {x}", "two"], "paper")
    assert asked.startswith("You are an expert evaluator of synthetic text.\nTASK: Rate a collection of 2 samples")
    assert (
        "Respond with exactly two numbers formatted ‘0.00, 0.00’ in the order [coherence, fluency] and no other text"
        in asked
    )
    assert asked.endswith("TEXT TO EVALUATE: <sample>one {x}</sample>\n<sample>two</sample>")
    for anchor in ("0.00", "0.25", "0.50", "0.75", "1.00"):
        lines = [[line for line in text.splitlines() if line.startswith(f"{anchor} ")] for text in RUBRICS.values()]
        assert [len(found) for found in lines] == [2, 2]
    assert "snippets" in asked and "snippets" not in judge_prompt(["one"])
