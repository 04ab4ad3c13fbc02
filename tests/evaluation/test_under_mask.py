"""Under a mask: held-out text, continuations and tasks beside the same splice without it, against the same by hand."""

import json

import numpy as np
import pytest
import torch
from command import mxd
from small_layers import contexts_of, layer_for, trained_on
from stand_in import IDS
from tables import write_table

from mxd.artifacts.checkpoint import save_layer
from mxd.common.errors import MxdError
from mxd.evaluation.garbage import repeated_share
from mxd.evaluation.generation import greedy
from mxd.evaluation.harness import find_tasks
from mxd.evaluation.masks import Ablation, Texts, matrices
from mxd.evaluation.task_domains import accuracy, by_domain, difference, read_groups
from mxd.evaluation.under_mask import Masked, UnderMask
from mxd.questions import TasksConfig, UnderMaskConfig
from mxd.report.page import write_report
from mxd.report.run import read_run
from mxd.report.sections import under_mask
from mxd.splice import spliced

OTHER = {
    **{"global_facts": 100, "miscellaneous": 783, "professional_accounting": 282, "high_school_geography": 198},
    **{"high_school_government_and_politics": 193, "public_relations": 110, "security_studies": 245},
    **{"us_foreign_policy": 100, "human_sexuality": 131, "sociology": 201},
}
"""The subjects of the largest category, with their questions."""
DOMAINS = ["arc_easy", "law"]
MASKS = [{1: list(range(20))}, {1: []}]
RANDOM = [{1: list(range(20, 40))}, {1: []}]
PROMPTS = [[[0, 5, 9], [0, 6, 8, 4]], [[0, 17, 300]]]


def test_mmlus_57_subjects_are_in_14_categories_as_many_questions_large_as_monets():
    """Monet, app. D.1: the largest category, "Other", has 2,343 questions, the smallest, "Engineering", 145."""
    groups = read_groups("mmlu")
    assert len(groups) == 57 and len(set(groups.values())) == 14
    assert {task for task, domain in groups.items() if domain == "other"} == {f"mmlu_{name}" for name in OTHER}
    assert sum(OTHER.values()) == 2343
    assert [task for task, domain in groups.items() if domain == "engineering"] == ["mmlu_electrical_engineering"]
    assert groups["mmlu_prehistory"] == "history" and groups["mmlu_professional_law"] == "law"


def test_any_table_says_which_domain_a_task_is_of(tmp_path):
    rows = [{"task": "b", "domain": "law"}, {"task": "a", "domain": "maths"}, {"task": "c", "domain": "law"}]
    groups = read_groups(str(write_table(tmp_path / "t.csv", rows)))
    assert by_domain(["a", "b", "c"], groups, ["law"]) == {"law": ["b", "c"], "maths": ["a"]}
    assert list(by_domain(["a", "b"], groups, ["maths", "none"])) == ["maths", "law"]
    assert by_domain(["a", "b"], None, []) == {"a": ["a"], "b": ["b"]}
    with pytest.raises(MxdError, match="domain of the lm-eval task 'd' is not in the table"):
        by_domain(["a", "d"], groups, [])
    twice = write_table(tmp_path / "two.csv", [*rows, {"task": "a", "domain": "law"}])
    with pytest.raises(MxdError, match=r"line 5: the task 'a' is of 'law' here and of 'maths' before"):
        read_groups(str(twice))
    with pytest.raises(MxdError, match="no domains of tasks 'mmul'; bundled are: mmlu"):
        read_groups("mmul")


def test_a_domains_tasks_weigh_the_same_and_its_error_is_that_of_paired_documents():
    rng = np.random.default_rng(0)
    plain = {"a": (rng.random(50) < 0.5).astype(float), "b": (rng.random(200) < 0.7).astype(float)}
    worse = {task: np.where(rng.random(len(each)) < 0.1, 0.0, each) for task, each in plain.items()}
    got = accuracy(difference(worse, plain), ["a", "b"])
    means = [worse[task].mean() - plain[task].mean() for task in "ab"]
    assert got.value == pytest.approx(sum(means) / 2) and got.value < 0
    of_means = [np.var(worse[t] - plain[t], ddof=1) / len(plain[t]) for t in "ab"]
    assert got.standard_error == pytest.approx(np.sqrt(sum(of_means)) / 2)
    unpaired = np.sqrt(sum(np.var(v, ddof=1) / len(v) for way in (plain, worse) for v in way.values())) / 2
    assert got.standard_error < 0.6 * unpaired
    assert accuracy({"a": np.ones(1), "b": np.ones(9)}, ["a", "b"]).standard_error == np.inf


def test_a_masks_own_domain_is_the_one_of_its_name():
    changes = [[accuracy({"t": np.full(3, float(10 * i + j))}, ["t"]) for j in range(3)] for i in range(2)]
    control = [[accuracy({"t": np.full(3, 0.5)}, ["t"])] * 3] * 2
    got = matrices(["b", "none"], ["a", "b", "c"], changes, control)
    assert got["matrix"] == [[0, 1, 2], [10, 11, 12]]
    assert (got["target"], got["others"], got["control_target"], got["control_others"]) == (1, 1, 0.5, 0.5)
    assert "target" not in matrices(["x", "y"], ["a", "b", "c"], changes, control)


def measured(gpt2, how, contexts=None, tasks=None, masks=DOMAINS):
    sets = {"mine": {1: trained_on(gpt2, 1, layer_for(gpt2, 1))}}
    ablations = {"mine": Ablation(MASKS, RANDOM, [], [], [], [])}
    asked = UnderMask(how, contexts or contexts_of([]), tasks, None)
    return sets, asked.measure(Masked(gpt2, sets, ablations, masks, DOMAINS, PROMPTS))["mine"]


def ways(gpt2, sets, run):
    """What a function returns with no unit masked, under each mask, and under each of the control."""
    found = []
    for mask in ({}, *MASKS, *RANDOM):
        with spliced(gpt2, sets["mine"], mask=mask):
            found.append(run())
    return found[0], found[1:3], found[3:]


def test_held_out_text_under_each_mask(gpt2):
    rows = np.random.default_rng(1).integers(1, 400, (4, 24))
    rows[:, 9] = 0  # a special token is no target
    how = UnderMaskConfig(then=("faithfulness",), tokens=96)
    sets, got = measured(gpt2, how, contexts_of(rows))
    assert set(got) == {"faithfulness"}

    def losses():
        logp = gpt2.logits(torch.from_numpy(rows))[:, :-1].double().log_softmax(-1)
        ce = -logp.gather(-1, torch.from_numpy(rows[:, 1:, None]))[..., 0].numpy()
        return np.delete(ce, 8, 1).mean(1)

    base = losses()
    plain, masked, control = ways(gpt2, sets, losses)
    assert got["faithfulness"]["targets"] == 4 * 22
    assert got["faithfulness"]["unmasked"]["ce_increase"] == pytest.approx((plain - base).mean(), abs=1e-5)
    for kind, expected in (("masked", masked), ("control", control)):
        for found, loss in zip(got["faithfulness"][kind], expected, strict=True):
            added = loss - plain
            assert found["added"] == pytest.approx(added.mean(), abs=1e-5)
            assert found["added_se"] == pytest.approx(added.std(ddof=1) / 2, abs=1e-5)
            assert found["ce_increase"] == pytest.approx((loss - base).mean(), abs=1e-5)
    assert abs(got["faithfulness"]["masked"][0]["added"]) > 1e-4
    assert got["faithfulness"]["masked"][1]["added"] == 0, "a mask without units changes nothing"
    assert got["faithfulness"]["control"][0] != got["faithfulness"]["masked"][0]


def test_continuations_under_each_mask(gpt2):
    sets, got = measured(gpt2, UnderMaskConfig(then=("generation",), new_tokens=12))
    found, flat = got["generation"], [row for rows in PROMPTS for row in rows]
    plain, masked, control = ways(gpt2, sets, lambda: greedy(gpt2, flat, 12).numpy())
    for key, expected in (("matrix", masked), ("control", control)):
        for row, added in zip(found[key], expected, strict=True):
            same = np.cumprod(added == plain, 1).sum(1)
            assert row == [same[:2].mean(), same[2]]
    assert found["matrix"][1] == [12, 12] and min(found["matrix"][0]) < 12
    assert (found["target"], found["others"]) == ((found["matrix"][0][0] + 12) / 2, (found["matrix"][0][1] + 12) / 2)
    assert [len(each) for each in found["examples"]] == [2, 1], "the prompts of the masked domain"
    first = found["examples"][0][0]
    assert first["prompt"] == PROMPTS[0][0] and first["base"] == plain[0].tolist()
    assert first["spliced"] == masked[0][0].tolist() != first["base"]
    for which in ("base", "spliced"):
        assert first[f"{which}_tokens"] == [gpt2.tokenizer.decode([token]) for token in first[which]]
    assert found["repeated_masked"][1] == found["repeated"]
    for key, expected in (("repeated_masked", masked), ("repeated_control", control)):
        assert found[key] == [np.mean([repeated_share(row.tolist()) for row in rows]) for rows in expected]


def test_of_scores_the_texts_with_high_ones_are_shown(gpt2):
    """Thresholds name no group of texts; the second group has the scores above the mean."""
    how = UnderMaskConfig(then=("generation",), new_tokens=2)
    found = measured(gpt2, how, masks=["0.2", "0.1"])[1]["generation"]
    assert [[one["prompt"] for one in each] for each in found["examples"]] == [PROMPTS[1]] * 2


def test_prompts_are_the_first_words_of_the_measured_texts(gpt2):
    """Not of those that chose the units, and each in its group."""
    texts = [f"{word} {n} and some more" for n in range(3) for word in ("The cat", "A law")]
    text = Texts([], [0, 1] * 3, choosing=[0, 1], measuring=[5, 4, 3, 2])
    under = UnderMask(UnderMaskConfig(then=("generation",), words=3), contexts_of([]), None, None)
    for bos in (True, False):
        got = under.prompts(gpt2, text, texts, DOMAINS, bos)
        assert [[row[0] == 0 for row in rows] for rows in got] == [[bos] * 2] * 2
        said = [[gpt2.tokenizer.decode(row[bos:]) for row in rows] for rows in got]
        assert said == [["The cat 2", "The cat 1"], ["A law 2", "A law 1"]]
    assert UnderMask(UnderMaskConfig(), contexts_of([]), None, None).prompts(gpt2, text, texts, DOMAINS, True) == []


def test_accuracies_under_each_mask(gpt2, stand_in):
    how = UnderMaskConfig(lm_eval=TasksConfig(tasks=("arc_*",)))
    sets, got = measured(gpt2, how, tasks=find_tasks(["arc_*"]))
    assert len(stand_in.calls) == 4, "base, splice, one mask and its control; empty masks are not run"

    def right():
        logits = gpt2.logits(IDS)[0]
        return np.array([(logits[-1, 8:48] > logits[-2, 8:48]).double().numpy()] * 2)

    base = right()
    plain, masked, control = ways(gpt2, sets, right)
    found = got["tasks"]
    assert found["columns"] == ["arc_easy", "arc_hard"] and found["documents"] == [40, 40]
    assert (found["base_mean"], found["unmasked_mean"]) == (pytest.approx(base.mean()), pytest.approx(plain.mean()))
    assert base.mean() != plain.mean()
    assert found["base"] == base.mean(1).tolist() and found["unmasked"] == plain.mean(1).tolist()
    for key, mean, expected in (("matrix", "mean", masked), ("control", "control_mean", control)):
        for n, way in enumerate(expected):
            assert found[key][n] == pytest.approx((way - plain).mean(1))
            assert found[f"{key}_se"][n] == pytest.approx((way - plain).std(1, ddof=1) / np.sqrt(40))
            assert found[mean][n] == pytest.approx(way.mean())
    assert found["matrix"][0][0] != 0 == found["matrix"][1][0]
    assert found["target"] == pytest.approx(found["matrix"][0][0]), "arc_easy is the name of a mask and of a task"
    with pytest.raises(MxdError, match="the lm-eval task 'arc_easy' has no 'f1' for each document; it has acc"):
        measured(gpt2, UnderMaskConfig(lm_eval=TasksConfig(tasks=("arc_*",), metric="f1")), tasks=find_tasks(["arc_*"]))


@pytest.mark.long
def test_the_command_asks_all_of_it_and_the_page_shows_it(trained_gpt2, stand_in, tmp_path, capsys):
    known = {"model": "tiny-gpt2", "revision": None, "block": 1, "fingerprint": trained_gpt2.fingerprint(1)}
    from mxd.artifacts.provenance import Provenance

    data = {"source": "bundled", "split": "train", "context": 32}
    save_layer(tmp_path / "run" / "mine", layer_for(trained_gpt2, 1), Provenance(**known, data=data))
    rows = [{"task": "arc_easy", "domain": "animals"}, {"task": "arc_hard", "domain": "<b>laws"}]
    groups = write_table(tmp_path / "groups.csv", rows)
    texts = [
        {"text": f"{word} {n} runs after the {word} all day long and on", "label": label}
        for label, word in (("animals", "The cat"), ("<b>laws", "A law"))
        for n in range(6)
    ]
    labelled = write_table(tmp_path / "texts.csv", texts)
    words = ["mask", tmp_path / "run", "--domains", labelled, "--ratio", 1.2, "--device", "cpu"]
    also = ["--then", "faithfulness", "--then", "generation", "--tokens", 64, "--prompts", 2, "--new-tokens", 8]
    tasks = ["--lm-eval", "arc_*", "--lm-eval-groups", groups]
    code, out, err = mxd(capsys, *words, *tasks[2:])
    assert code == 1 and "--lm-eval-groups is given without tasks; add --lm-eval TASKS" in err
    code, out, err = mxd(capsys, *words, *also, *tasks)
    assert code == 0, err
    assert "what is left under each mask" in out and "change of the accuracy" in out and "as without the mask" in out
    result = json.loads((tmp_path / "run" / "masking.json").read_text())["results"]["run/mine"]
    assert result["tasks"]["columns"] == ["<b>laws", "animals"] == result["domains"]
    page, twin = write_report(tmp_path / "run")
    assert "Under a mask" in twin.read_text() and "<b>laws" not in page.read_text()
    kinds = [part.kind for part in under_mask.section(read_run(tmp_path / "run")).parts]
    assert kinds.count("diffs") == 2 and "figure" in kinds and kinds.count("table") == 5
