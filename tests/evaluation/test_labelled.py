"""Labelled sets: the bundled ones are what their README says, files are read strictly, mistakes end in one message."""

import json
from collections import Counter

import datasets
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from mxd.common.bundled import bundled_path
from mxd.common.errors import MxdError
from mxd.evaluation.labelled import BUNDLED_SETS, labelled_texts

ROWS = [("one, and\ntwo", "yes"), ('"quoted"', "no"), ("three", "yes")]


def write(folder, suffix, text="text", label="label", rows=ROWS):
    path = folder / f"some.{suffix}"
    if suffix == "csv":
        lines = ["{},{}".format(*('"' + c.replace('"', '""') + '"' for c in row)) for row in [(text, label), *rows]]
        path.write_text("\n".join(lines), encoding="utf-8")
    elif suffix == "jsonl":
        path.write_text("\n".join(json.dumps({text: t, label: c}) for t, c in rows) + "\n\n", encoding="utf-8")
    else:
        table = {text: [t for t, _ in rows], label: [c for _, c in rows], "other": [0] * len(rows)}
        pyarrow.parquet.write_table(pyarrow.table(table), path)
    return path


def test_bundled_sets_are_balanced_and_small():
    sizes = {"factbook": (990, 9), "languages": (692, 12), "gender": (1600, 2)}
    for name in BUNDLED_SETS:
        found = labelled_texts(name)
        counts = Counter(found.labels)
        assert (len(found.texts), len(found.classes)) == sizes[name]
        assert max(counts.values()) - min(counts.values()) <= 1
        assert found.level == ("span" if name == "gender" else "sample")
        assert len(set(found.texts)) == len(found.texts)
    assert sum(file.stat().st_size for file in bundled_path("probing").iterdir()) < 400_000


def test_a_bundled_name_stands_at_the_end_and_has_one_gender():
    found = labelled_texts("gender")
    names = [text.split()[-1] for text in found.texts]
    assert [text[start:end] for text, (start, end) in zip(found.texts, found.spans, strict=True)] == names
    assert len(set(names)) == len(names)
    assert {"Mary": "female", "James": "male"}.items() <= dict(zip(names, found.labels, strict=True)).items()


def test_no_topic_is_told_by_the_field_names_of_the_factbook():
    found = labelled_texts("factbook")
    assert not any(text.startswith(("Background:", "Terrain:", "Military branches:")) for text in found.texts)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_files_hold_texts_and_labels_in_order(tmp_path, suffix):
    path = write(tmp_path, suffix, "review", "stars")
    found = labelled_texts(path, "review", "stars")
    assert list(zip(found.texts, found.labels, strict=True)) == ROWS
    assert (found.name, found.level, found.classes) == ("some", "sample", ["no", "yes"])


def test_a_long_text_in_a_csv_and_a_byte_order_mark_are_read(tmp_path):
    path = write(tmp_path, "csv", rows=[("x" * 200_000, "a"), ("y", "b")])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [len(text) for text in labelled_texts(path).texts] == [200_000, 1]


def test_whole_numbers_and_booleans_are_labels(tmp_path):
    path = tmp_path / "n.jsonl"
    path.write_text('{"text": "a", "label": 3}\n{"text": "b", "label": true}\n')
    assert labelled_texts(path).classes == ["3", "True"]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_missing_column_is_named_with_those_there_are(tmp_path, suffix):
    with pytest.raises(MxdError, match=r"some, row 1: no column 'kind'; it has: text, label.*--label-column"):
        labelled_texts(write(tmp_path, suffix), label_column="kind")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a", "label": null}', "row 2: 'label' is None; expected the name or number of a class"),
        ('{"text": "a", "label": ""}', "row 2: 'label' is ''"),
        ('{"text": "a", "label": [1]}', r"row 2: 'label' is \[1\]"),
        ('{"text": 7, "label": "b"}', "row 2: 'text' is 7; expected a text"),
        ('["a", "b"]', "line 2: expected an object with fields, got list"),
        ("{", "cannot read texts"),
        ('{"text": "a", "label": "first"}', "at least two; got only 'first'"),
    ],
)
def test_bad_rows_are_refused(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "t", "label": "first"}\n' + line)
    with pytest.raises(MxdError, match=message):
        labelled_texts(path)


def test_short_rows_broken_files_and_empty_files_are_refused(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text("text,label\na,b\nc\n")
    with pytest.raises(MxdError, match="row 2: 'label' is None"):
        labelled_texts(path)
    path.write_bytes(b"text,label\n\xff\xfe,b\n")
    with pytest.raises(MxdError, match="cannot read"):
        labelled_texts(path)
    path.write_text("")
    with pytest.raises(MxdError, match="got no rows"):
        labelled_texts(path)
    path = tmp_path / "bad.parquet"
    path.write_bytes(b"PAR1 no")
    with pytest.raises(MxdError, match="cannot read"):
        labelled_texts(path)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_set_may_say_which_characters_its_labels_speak_of(tmp_path, suffix):
    rows = [
        {"text": "Ann, née O", "label": "a", "start": 5, "end": 8},
        {"text": "Bo", "label": "b", "start": 0, "end": 2},
    ]
    path = tmp_path / f"some.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.csv.write_csv(table, path) if suffix == "csv" else pyarrow.parquet.write_table(table, path)
    found = labelled_texts(path)
    assert found.level == "span" and found.spans == [(5, 8), (0, 2)]
    assert [text[start:end] for text, (start, end) in zip(found.texts, found.spans, strict=True)] == ["née", "Bo"]


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ({"start": 2, "end": 6}, r"row 2: start and end are 2 and 6; expected .* 0 <= start < end <= 5\. Rename"),
        ({"start": 2, "end": 2}, "start and end are 2 and 2"),
        ({"start": -1, "end": 2}, "start and end are -1 and 2"),
        ({"start": 0.5, "end": 2}, "start and end are 0.5 and 2"),
        ({"start": True, "end": 2}, "start and end are True and 2"),
        ({"start": "1", "end": "x"}, "start and end are '1' and 'x'"),
        ({"start": None, "end": None}, "start and end are None and None"),
        ({}, "some: 1 of 2 rows have a span, start and end; give it to all or none"),
    ],
)
def test_a_span_that_is_none_of_the_texts_is_refused(tmp_path, span, message):
    path = tmp_path / "some.jsonl"
    rows = [{"text": "a cat", "label": "a", "start": 2, "end": 5}, {"text": "a dog", "label": "b", **span}]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(MxdError, match=message):
        labelled_texts(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("factbok", "no labelled set 'factbok'; bundled are: factbook, languages, gender"),
        ("data/nothing.jsonl", "no labelled texts at 'data/nothing.jsonl'; expected a file: .csv, .jsonl, .parquet"),
        (".", r"no labelled texts at '\.'"),
        ("mxd-nobody/nothing", "cannot load dataset 'mxd-nobody/nothing', split 'train'"),
    ],
)
def test_what_is_not_there_says_what_could_be(source, message):
    with pytest.raises(MxdError, match=message):
        labelled_texts(source)


def test_a_hub_dataset_gives_the_names_of_its_classes(monkeypatch):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: asked.append((args, options)) or table)
    found = labelled_texts("org/name:part@v1", split="test")
    assert found.labels == ["yes", "no"] and found.name == "org/name:part@v1"
    assert asked == [(("org/name", "part"), {"split": "test", "revision": "v1"})]
    unlabelled = datasets.Dataset.from_dict({"text": ["a"], "label": [-1]}, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: unlabelled)
    with pytest.raises(MxdError, match="row 1: 'label' is None"):
        labelled_texts("org/name")
