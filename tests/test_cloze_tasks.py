"""Tasks of next sentences: the right one follows, the wrong ones are of the topic, and nothing chose units with it."""

import csv
import json
import re
from pathlib import Path

import pytest
import yaml
from test_scripts import script

from mxd.common.errors import MxdError

cloze = script("cloze_tasks")
TOPICS = ("law and order", "sport")
FIRST, WORDS = (
    ("Judge", "Goal"),
    [f"{a}{b}" for a in ("red", "sea", "old", "far") for b in ("land", "ship", "king", "fire")],
)


def sentence(number: int, place: int, topic: int) -> str:
    """Nine words that tell passage, place and topic, and are of other texts only in other orders."""
    words = [WORDS[(number * 5 + place * 3 + i * (1 + number % 7)) % 16] for i in range(6)]
    return f"{FIRST[topic]} p{number}x{place} {' '.join(words)} ends."


@pytest.fixture(scope="module")
def passages() -> list[dict]:
    texts = [" ".join(sentence(n, place, n % 2) for place in range(4)) for n in range(120)]
    return [{"text": text, "label": TOPICS[n % 2]} for n, text in enumerate(texts)]


@pytest.fixture(scope="module")
def made(passages, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cloze")
    write_rows(folder / "texts.jsonl", passages)
    assert cloze.make(folder / "a", str(folder / "texts.jsonl"), 10, 12, 3) == dict.fromkeys(TOPICS, 10)
    return folder


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def asked(folder: Path) -> dict[str, list[dict]]:
    """Domain -> questions, as lm-eval and mxd find them: by the table and the task files."""
    found = {}
    with (folder / "domains.csv").open() as file:
        for row in csv.DictReader(file):
            task = yaml.safe_load((folder / "tasks" / f"{row['task']}.yaml").read_text())
            assert task["task"] == row["task"] and task["output_type"] == "multiple_choice"
            assert [metric["metric"] for metric in task["metric_list"]] == ["acc"]
            found[row["domain"]] = rows(Path(task["dataset_kwargs"]["data_files"]["test"]))
    return found


def test_one_choice_follows_and_the_others_follow_elsewhere_in_the_topic(made, passages):
    for topic, questions in asked(made / "a").items():
        texts = [passage["text"] for passage in passages if passage["label"] == topic]
        assert len({question["context"] for question in questions}) == len(questions) == 10
        for question in questions:
            begun = [text for text in texts if text.startswith(question["context"])]
            follows = [f"{question['context']} {choice}" in begun[0] for choice in question["choices"]]
            assert len(begun) == 1 and follows.index(True) == question["label"] and sum(follows) == 1
            assert len(set(question["choices"])) == 4
            assert all(any(choice in text for text in texts) for choice in question["choices"])
    assert {q["label"] for questions in asked(made / "a").values() for q in questions} == {0, 1, 2, 3}


def test_no_text_chooses_units_and_makes_a_task(made):
    chosen = {re.search(r"p(\d+)x", row["text"])[1] for row in rows(made / "a" / "select.jsonl")}
    used = re.findall(r"p(\d+)x", json.dumps(asked(made / "a")))
    assert len(chosen) == 24 and len(used) > 80 and not chosen & set(used)


def test_what_recurs_word_for_word_is_left_out():
    known = cloze.runs("The Goal one two three four, five six and seven eight.")
    texts = ("Goal ONE two three four five six and more words here. A next one of six words follows.",
             "Goal one two three four five six or more words here. A next one of six other words.")  # fmt: skip
    found = cloze.items([cloze.Passage(str(n), "sport", text) for n, text in enumerate(texts)], known)
    assert [item.owner for item in found["sport"]] == ["1"]
    texts = (f"A team of {n} won here in these days. So it was for all of {n} years." for n in (7, 8, 9))
    again = [cloze.Passage(str(n), "sport", text) for n, text in enumerate(texts)]
    assert [item.owner for item in cloze.items(again, set())["sport"]] == ["0"]


@pytest.mark.long
def test_of_countries_too_none_does_both():
    choosing, asking = cloze.halves(cloze.factbook(), 0)
    assert not {p.owner for p in choosing} & {p.owner for p in asking} and len({p.domain for p in asking}) == 9
    assert 100 < len({p.owner for p in choosing}) < 160


def test_the_seed_decides(made):
    files = ("select.jsonl", "domains.csv", "tasks/cloze_sport.jsonl")
    for folder, seed in (("b", 3), ("c", 4)):
        cloze.make(made / folder, str(made / "texts.jsonl"), 10, 12, seed)
    assert all((made / "a" / name).read_bytes() == (made / "b" / name).read_bytes() for name in files)
    assert [(made / "a" / n).read_bytes() == (made / "c" / n).read_bytes() for n in files] == [False, True, False]


def test_a_topic_with_too_little_text_is_refused_before_anything_is_written(tmp_path):
    write_rows(tmp_path / "t.jsonl", [{"text": "Too short.", "label": label} for label in TOPICS])
    with pytest.raises(MxdError, match="too little text for a task on law and order, sport"):
        cloze.make(tmp_path / "out", str(tmp_path / "t.jsonl"), 5, 5, 0)
    assert not (tmp_path / "out").exists()
