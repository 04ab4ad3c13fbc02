"""Toxic generation: prompts continued and scored under each mask, against the same by hand."""

import json

import numpy as np
import pytest
import torch
from command import mxd
from small_layers import contexts_of, layer_for, trained_on
from tables import write_table

from mxd.artifacts.checkpoint import save_layer
from mxd.artifacts.provenance import Provenance
from mxd.common.errors import MxdError
from mxd.evaluation.generation import greedy
from mxd.evaluation.masks import Ablation, Texts
from mxd.evaluation.toxicity import Toxicity, check, drawn_prompts, mean_score, summary
from mxd.evaluation.under_mask import Masked, UnderMask
from mxd.questions import ToxicityConfig, UnderMaskConfig
from mxd.report.page import write_report
from mxd.splice import spliced

MASKS, RANDOM = [{1: list(range(20))}, {1: []}], [{1: list(range(20, 40))}, {1: []}]
HOW = ToxicityConfig(samples=4, tokens=5, greedy_tokens=6, top_p=0.5, temperature=0.8, seed=3)


class ByLength:
    """Scores a text by its number of characters; nothing with an "e" in it."""

    name = "lengths"

    def __call__(self, texts):
        return ["has an e" if "e" in text else len(text) % 7 / 6 for text in texts]


def test_the_expected_maximum_and_the_probability_are_those_of_the_definition():
    """Gehman et al. 2020: the mean over prompts of the largest of 25, and the share of prompts with one above 0.5."""
    rng = np.random.default_rng(0)
    scores = rng.random((40, 25)) ** 8
    got = summary(scores.tolist())
    assert got["expected_max"] == pytest.approx(scores.max(1).mean())
    assert got["expected_max_se"] == pytest.approx(scores.max(1).std(ddof=1) / np.sqrt(40))
    assert got["probability"] == pytest.approx((scores > 0.5).any(1).mean()) and 0 < got["probability"] < 1
    assert summary([[0.5, 0.1]])["probability"] == 0 and summary([[0.51]])["probability"] == 1


def test_failures_are_counted_and_never_replaced():
    got = summary([[0.25, "refused"], [0.5, 0.75], ["refused", "refused"]])
    assert (got["expected_max"], got["probability"], got["incomplete"]) == (0.75, 1, 2)
    assert summary([["refused"]]) == {
        **{"expected_max": None, "expected_max_se": None, "probability": None, "probability_se": None},
        "incomplete": 1,
    }
    assert mean_score([0.5, "refused", 1.0])["greedy"] == 0.75 and mean_score([])["greedy"] is None


def test_prompts_are_drawn_of_both_kinds(tokenizer):
    texts = [f"The text {n}" for n in range(20)] + [" "]
    scores = [n / 20 for n in range(20)] + [0.9]
    rows, toxic = drawn_prompts(tokenizer, texts, scores, ToxicityConfig(limit=4), True)
    assert toxic == [True] * 4 + [False] * 4 and all(row[0] == 0 for row in rows)
    numbers = [int(tokenizer.decode(row[1:]).split()[-1]) for row in rows]
    assert all((scores[n] > 0.5) == kind for n, kind in zip(numbers, toxic, strict=True)) and len(set(numbers)) == 8
    assert drawn_prompts(tokenizer, texts, scores, ToxicityConfig(limit=4), True)[0] == rows
    assert drawn_prompts(tokenizer, texts, scores, ToxicityConfig(limit=4, seed=1), True)[0] != rows
    assert sum(drawn_prompts(tokenizer, texts, scores, ToxicityConfig(limit=20), True)[1]) == 9, "0.5 is not above it"
    without = drawn_prompts(tokenizer, texts, scores, ToxicityConfig(limit=4), False)[0]
    assert without == [row[1:] for row in rows]
    with pytest.raises(MxdError, match="a prompt has a list of scores"):
        drawn_prompts(tokenizer, ["a"], [[0.5]], HOW, True)
    with pytest.raises(MxdError, match="no prompts"):
        drawn_prompts(tokenizer, [" "], [0.5], HOW, True)


def sampled(model, row, number):
    """Continuations of one prompt, one by one and without a cache: nucleus sampling written out."""
    texts = []
    for u in np.random.default_rng([HOW.seed, number]).random((HOW.samples, HOW.tokens)):
        ids = list(row)
        for draw in u:
            logits = model.logits(torch.tensor([ids]))[0, -1].double().numpy() / HOW.temperature
            p = np.exp(logits - logits.max())
            p /= p.sum()
            order = np.argsort(-p, kind="stable")
            kept = order[np.cumsum(p[order]) - p[order] < HOW.top_p]
            ids.append(int(kept[np.searchsorted(np.cumsum(p[kept]), draw * p[kept].sum(), side="right")]))
        texts.append(text_of(model, ids[len(row) :]))
    return texts


def text_of(model, ids):
    ids = ids[: ids.index(0)] if 0 in ids else ids
    return model.tokenizer.decode(ids, skip_special_tokens=True)


@torch.no_grad()
def test_samples_are_drawn_from_the_nucleus_with_the_seed_and_the_prompts_number(gpt2):
    begun = [[0, 17, 300], [0, 6, 8, 4], [0, 5, 9]]
    under = UnderMask(UnderMaskConfig(), contexts_of([]), None, None)
    found = dict(Toxicity(HOW, ByLength(), begun, [True] * 3, under)._sampled(gpt2))
    assert found == {n: sampled(gpt2, row, n) for n, row in enumerate(begun)}


@pytest.mark.long
def test_every_way_is_scored_and_agrees_with_sampling_written_out(gpt2):
    begun, toxic = [[0, 17, 300], [0, 5, 9], [0, 6, 8, 4]], [False, True, True]
    sets = {"mine": {1: trained_on(gpt2, 1, layer_for(gpt2, 1))}}
    under = UnderMask(UnderMaskConfig(), contexts_of([]), None, None)
    ablations = {"mine": Ablation(MASKS, RANDOM, [], [], [], [])}
    masked = Masked(gpt2, sets, ablations, ["0.2", "0.1"], [], [])
    got = Toxicity(HOW, ByLength(), begun, toxic, under).measure(masked)["mine"]
    assert set(got) == {"toxicity"}
    got = got["toxicity"]

    def expected():
        scores = [ByLength()(sampled(gpt2, row, n)) for n, row in enumerate(begun)]
        once = ByLength()([text_of(gpt2, row) for row in greedy(gpt2, begun, HOW.greedy_tokens).tolist()])
        failed = sum(isinstance(score, str) for each in [*scores, once] for score in each)
        found = {"asked": 15, "failures": failed}
        found["toxic"] = summary(scores[1:]) | mean_score(once[1:])
        found["other"] = summary(scores[:1]) | mean_score(once[:1])
        return found | {"reasons": {"has an e": failed} if failed else {}}, [scores, once]

    base, seen = expected()
    assert got["base"] == base
    alike = [seen]
    for which, mask in (("unmasked", {}), ("masked", MASKS[0]), ("control", RANDOM[0])):
        with spliced(gpt2, sets["mine"], mask=mask):
            way, seen = expected()
        found = got[which] if which == "unmasked" else got[which][0]
        assert found == way, which
        assert seen not in alike, "every way writes something else"
        alike.append(seen)
    assert got["masked"][1] == got["control"][1] == got["unmasked"], "a mask without units changes nothing"
    assert got["prompts"] == {"toxic": 2, "other": 1} and got["scorer"] == "lengths"
    shown = got["examples"][0]
    assert [one["prompt"] for one in shown] == [begun[1], begun[2], begun[0]], "toxic ones first"
    assert shown[0]["base"] != shown[0]["spliced"]
    for key in ("base", "spliced"):
        texts = [text_of(gpt2, one[key]) for one in shown]
        expected = [score if isinstance(score, float) else None for score in ByLength()(texts)]
        assert [one[f"{key}_score"] for one in shown] == expected
    assert any(one["base_score"] != one["spliced_score"] for one in shown)


def test_prompts_that_do_not_fit_are_refused_before_anything_is_measured(gpt2):
    under = UnderMask(UnderMaskConfig(), contexts_of([]), None, None)
    longest = Toxicity(HOW, ByLength(), [[0] * 60], [True], under)
    with pytest.raises(MxdError, match=r"have 66 tokens, .* has 64 positions; give shorter prompts"):
        longest.prompts(gpt2, Texts([], [], [], []), [], [], True)


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(MxdError, match="of which prompts, scorer is not given"):
        check(ToxicityConfig(scores="a.csv"))
    check(ToxicityConfig(scores="a.csv", prompts="b.csv"), True)


@pytest.mark.long
def test_the_command_and_the_page(trained_gpt2, tmp_path, capsys):
    known = {"model": "tiny-gpt2", "revision": None, "block": 1, "fingerprint": trained_gpt2.fingerprint(1)}
    data = {"source": "bundled", "split": "train", "context": 32}
    save_layer(tmp_path / "run" / "mine", layer_for(trained_gpt2, 1), Provenance(**known, data=data))
    rows = [{"text": f"{n} {n * n} 1 2", "score": 1.0} for n in range(40)]
    rows += [{"text": f"The law of {n} dogs runs", "score": 0.0} for n in range(40)]
    scored = write_table(tmp_path / "scored.csv", rows)
    words = tmp_path / "<i>words.txt"
    words.write_text("the\nof\n")
    asked = ["toxicity", tmp_path / "run", "--scores", scored, "--prompts", scored, "--device", "cpu", "--limit", 3]
    also = ["--samples", 2, "--tokens", 4, "--greedy-tokens", 5, "--thresholds", "0.3,0.1"]
    code, out, err = mxd(capsys, *asked, *also, "--scorer-words", words)
    assert code == 0, err
    assert "3 toxic and 3 other prompts" in out and "as many at random" in out and "what is left under each mask" in out
    document = json.loads((tmp_path / "run" / "toxicity.json").read_text())
    assert set(document["results"]) == {"run/mine"}
    result = document["results"]["run/mine"]
    assert result["toxicity"]["unmasked"]["asked"] == 18 and "faithfulness" in result and result["units"][1] > 0
    page, twin = write_report(tmp_path / "run")
    assert "Toxicity" in twin.read_text() and "<i>words" not in page.read_text()
    for wrong, said in (
        ([], "give --scorer URL with --scorer-model NAME, or --scorer-local MODEL, or --scorer-words FILE"),
        (["--scorer-words", words, "--scorer-local", "x"], "give --scorer URL"),
        (["--scorer-words", words, "--scorer-label", "x"], "--scorer-label names a class of --scorer-local"),
        (["--scorer-words", words, "--lm-eval-limit", 3], "add --lm-eval TASKS"),
        (["--scorer-words", tmp_path / "none"], "cannot read words"),
    ):
        code, _, err = mxd(capsys, *asked, *wrong)
        assert code == 1 and said in err
