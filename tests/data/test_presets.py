"""The paper's probing sets by name: the table is the paper's, and what is fetched is what the table says."""

import re
from collections import Counter
from pathlib import Path

import datasets
import pytest

from mxd.common.errors import MxdError
from mxd.data import presets as module
from mxd.data.labelled import labelled_texts
from mxd.data.presets import presets

DOCS = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
SMALL = {name: {"texts": 4 * len(preset.labels)} for name, preset in presets().items()}


def rows_of(preset):
    """More rows than are needed, of every class and of one that is not asked for; a text says what it should become."""
    wanted = [*preset.classes, "other"]
    for number in range(200):
        raw = wanted[number % len(wanted)]
        label = preset.classes.get(raw, "other")
        text = "." * preset.skip + f"{label} {number} " + "x" * preset.least
        value = number // len(wanted) % 2
        column = preset.label.removeprefix(".")
        yield {
            preset.text: text,
            column: f"folder/file{raw}" if preset.label.startswith(".") else raw,
            preset.balanced.get("column", "unused"): value,
        }


@pytest.fixture
def hub(monkeypatch):
    """A Hub that holds all sets, each smaller; what was asked of it is kept."""
    table = {name: module.Preset(**vars(one) | SMALL[name]) for name, one in presets().items()}
    monkeypatch.setattr(module, "presets", lambda: table)
    asked = []

    def load(name, subset=None, split=None, streaming=False, data_files=None):
        asked.append((data_files or name, subset, split, streaming))
        preset = next(one for one in table.values() if one.source in (name, data_files))
        if not preset.configs:
            return list(rows_of(preset))
        both = subset.split("-")
        return [{preset.text: {code: f"{preset.classes.get(code)} {n} {code}" for code in both}} for n in range(50)]

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def test_there_are_24_tasks_by_text_and_10_by_surname_as_many_texts_as_in_tables_4_and_5():
    sizes = {name: (len(one.labels), one.texts) for name, one in presets().items()}
    assert sizes == {
        "ag_news": (4, 16_000 + 4_000),
        "github-code": (5, 20_000 + 5_000),
        "amazon_sentiment": (2, 8_000 + 2_000),
        "europarl": (5, 20_000 + 5_000),
        "bias_in_bios": (8, 32_000 + 8_000),
        "surname_occupation": (6, 4_784 + 1_195),
        "surname_is_alive": (2, 4_800 + 1_199),
        "surname_gender": (2, 4_800 + 1_200),
    }
    assert sum(classes for name, (classes, _) in sizes.items() if presets()[name].source) == 24
    assert sum(classes for name, (classes, _) in sizes.items() if presets()[name].made) == 10
    assert {name for name, one in presets().items() if one.side} == {"github-code"} and presets()[
        "github-code"
    ].side == "last"


def test_the_page_names_every_set_its_source_and_licence():
    for name, one in presets().items():
        (row,) = re.findall(rf"^\| `paper:{name}` \|.*$", DOCS, re.M)
        source = (one.source or one.made).removeprefix("hf://datasets/").removesuffix("/data/*.parquet")
        for cell in (source, one.licence, f"{one.texts:,}", f"{len(one.labels)}"):
            assert f" {cell} " in row.replace("`", " "), cell


@pytest.mark.parametrize("name", [name for name, one in presets().items() if one.source])
def test_as_many_texts_of_each_class_are_taken_and_nothing_else(hub, name):
    preset = presets()[name]
    found = labelled_texts(f"paper:{name}")
    assert Counter(found.labels) == dict.fromkeys(preset.labels, 4)
    assert all(text.startswith(f"{label} ") for text, label in zip(found.texts, found.labels, strict=True))
    assert len(set(found.texts)) == len(found.texts)
    assert (found.name, found.level, found.side) == (f"paper:{name}", "sample", preset.side)
    assert {one[0] for one in hub} == {preset.source} and {one[2] for one in hub} == {"train"}
    assert {one[3] for one in hub} == {preset.first}
    if preset.configs:
        assert [one[1] for one in hub] == list(preset.configs.values())


def test_streams_give_their_first_texts_and_other_sets_are_drawn_the_same_each_time(hub):
    code = labelled_texts("paper:github-code")
    numbers = {label: [] for label in code.labels}
    for text, label in zip(code.texts, code.labels, strict=True):
        numbers[label].append(int(text.split()[1]))
    wanted = [*presets()["github-code"].classes.values(), "other"]
    for label, taken in numbers.items():
        assert taken == [n for n in range(200) if wanted[n % len(wanted)] == label][:4]
    news = labelled_texts("paper:ag_news")
    assert news.texts == labelled_texts("paper:ag_news").texts
    assert [int(text.split()[1]) for text in news.texts if text.startswith("World")] != [0, 5, 10, 15]


def test_biographies_are_balanced_within_a_profession(hub):
    found, classes = labelled_texts("paper:bias_in_bios"), len(presets()["bias_in_bios"].classes) + 1
    genders = Counter(
        (label, int(text.split()[1]) // classes % 2) for text, label in zip(found.texts, found.labels, strict=True)
    )
    assert set(genders.values()) == {2} and len(genders) == 16


def test_texts_that_are_too_short_are_left_out_and_their_beginning_is_dropped(hub, monkeypatch):
    texts = {"a.py": "x" * 534, "b.py": "#" * 150 + "y" * 385, "c.h": "#" * 150 + "z" * 400}
    rows = [{"content": text, "path": path} for path, text in texts.items()]
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: rows)
    small = module.Preset(**vars(presets()["github-code"]) | {"texts": 2, "classes": {".py": "Python", ".h": "C"}})
    monkeypatch.setattr(module, "presets", lambda: {"github-code": small})
    assert labelled_texts("paper:github-code").texts == ["z" * 400, "y" * 385]


def test_without_the_hub_one_line_says_what_was_asked_and_how_to_go_on(monkeypatch):
    def unreachable(*args, **options):
        raise ConnectionError("Couldn't reach 'fancyzhx/ag_news' on the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(MxdError) as caught:
        labelled_texts("paper:ag_news")
    message = str(caught.value)
    assert "\n" not in message and message.startswith("paper:ag_news is fancyzhx/ag_news on the Hub, which cannot be")
    assert "Couldn't reach" in message and "give --set a file with the columns text and label" in message
    assert message.endswith("(20,000 texts of 4 classes, Business, Sci/Tech, Sports, World).")


def test_sets_that_are_not_there_or_have_changed_are_refused(hub, monkeypatch):
    for name in ("occupation", "is_alive", "gender"):
        with pytest.raises(
            MxdError, match=r"is not on the Hub: make it with .* text, label, and start and end"
        ) as error:
            labelled_texts(f"paper:surname_{name}")
        assert "\n" not in str(error.value)
    with pytest.raises(
        MxdError, match=r"unknown set of the paper 'paper:news'; choose one of: paper:ag_news, paper:git"
    ):
        labelled_texts("paper:news")
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: [{"text": "a", "label": 1}] * 5)
    with pytest.raises(MxdError, match=r"paper:ag_news: fancyzhx/ag_news has 0 texts of Business; expected 4\."):
        labelled_texts("paper:ag_news")
    with pytest.raises(MxdError, match=r"canrager/amazon_reviews_mcauley_1and5 has no column 'rating'; it has changed"):
        labelled_texts("paper:amazon_sentiment")
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: [{"hard_text": "a", "profession": 2}])
    with pytest.raises(MxdError, match="no column 'gender'"):
        labelled_texts("paper:bias_in_bios")
