"""Labelled sets: the bundled ones are what their README says, files are read strictly, mistakes end in one message."""

import json
from collections import Counter

import datasets
import pytest
from tables import SUFFIXES, write_table

from mxd.common.bundled import bundled_path
from mxd.common.errors import MxdError
from mxd.data.labelled import BUNDLED_SETS, labelled_texts, scored_texts

ROWS = [("one, and\ntwo", "yes"), ('"quoted"', "no"), ("three", "yes")]


def write(folder, suffix, text="text", label="label", rows=ROWS):
    return write_table(folder / f"some{suffix}", [{text: t, label: c} for t, c in rows])


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


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_hold_texts_and_labels_in_order(tmp_path, suffix):
    path = write(tmp_path, suffix, "review", "stars")
    found = labelled_texts(path, "review", "stars")
    assert list(zip(found.texts, found.labels, strict=True)) == ROWS
    assert (found.name, found.level, found.classes) == ("some", "sample", ["no", "yes"])


def test_a_long_text_in_a_csv_and_a_byte_order_mark_are_read(tmp_path):
    path = write(tmp_path, ".csv", rows=[("x" * 200_000, "a"), ("y", "b")])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [len(text) for text in labelled_texts(path).texts] == [200_000, 1]


def test_whole_numbers_and_booleans_are_labels(tmp_path):
    path = tmp_path / "n.jsonl"
    path.write_text('{"text": "a", "label": 3}\n{"text": "b", "label": true}\n')
    assert labelled_texts(path).classes == ["3", "True"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_missing_column_is_named_with_those_there_are(tmp_path, suffix):
    with pytest.raises(MxdError, match=r"(row 1|line [12]): no column 'kind'; it has: text, label.*--label-column"):
        labelled_texts(write(tmp_path, suffix), label_column="kind")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a", "label": null}', "line 2: 'label' is None; expected the name or number of a class"),
        ('{"text": "a", "label": ""}', "line 2: 'label' is ''"),
        ('{"text": "a", "label": [1]}', r"line 2: 'label' is \[1\]"),
        ('{"text": 7, "label": "b"}', "line 2: 'text' is 7; expected a text"),
        ('["a", "b"]', "line 2: expected an object with fields, got list"),
        ("{", "cannot read text"),
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
    with pytest.raises(MxdError, match="line 3: 1 cells, expected 2"):
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


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_set_may_say_which_characters_its_labels_speak_of(tmp_path, suffix):
    rows = [
        {"text": "Ann, née O", "label": "a", "start": 5, "end": 8},
        {"text": "Bo", "label": "b", "start": 0, "end": 2},
    ]
    found = labelled_texts(write_table(tmp_path / f"some{suffix}", rows))
    assert found.level == "span" and found.spans == [(5, 8), (0, 2)]
    assert [text[start:end] for text, (start, end) in zip(found.texts, found.spans, strict=True)] == ["née", "Bo"]


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ({"start": 2, "end": 6}, r"line 2: start and end are 2 and 6; expected .* 0 <= start < end <= 5\. Rename"),
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
        ("data/nothing.jsonl", "no labelled texts at 'data/nothing.jsonl'; expected a file, a folder, or a pat"),
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
    assert asked == [(("org/name", "part"), {"split": "test", "streaming": False, "revision": "v1"})]
    assert found.groups is None
    grouped = table.add_column("team", [0, 1]).cast_column("team", datasets.ClassLabel(names=["red", "blue"]))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: grouped)
    found = labelled_texts("org/name", group_column="team")
    assert (found.labels, found.groups) == (["yes", "no"], ["red", "blue"])
    assert labelled_texts("org/name", group_column="label").groups == ["yes", "no"]
    unlabelled = datasets.Dataset.from_dict({"text": ["a"], "label": [-1]}, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: unlabelled)
    with pytest.raises(MxdError, match="row 1: 'label' is None"):
        labelled_texts("org/name")


# Scores


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_scored_texts_of_every_format(tmp_path, suffix):
    rows = [{"text": 'a "b",\nc', "score": 0.5, "toxic": 1}, {"text": "é", "score": 2.0, "toxic": 0}]
    path = write_table(tmp_path / f"scored{suffix}", rows)
    assert scored_texts(path) == (['a "b",\nc', "é"], [0.5, 2.0])
    assert scored_texts(path, score_column="toxic")[1] == [1.0, 0.0]
    with pytest.raises(MxdError, match=r"no column 'body'; it has: text, score, toxic. Set --text-column"):
        scored_texts(path, "body")
    assert scored_texts(write_table(path, [{"text": "a", "score": True}])) == (["a"], [1.0])
    if ".csv" not in suffix:
        own = write_table(path, [{"text": "a b", "score": [0.5, 1]}, {"text": "c", "score": [2.0]}])
        assert scored_texts(own) == (["a b", "c"], [[0.5, 1], [2.0]])


def test_bad_scored_texts_are_named(tmp_path):
    for name, content, message in (
        ("a.txt", "x", r"no scored texts at .*a\.txt'; expected a file, a folder, or a pattern"),
        ("b.csv", "text,score\na,high\nb,low\n", "line 2: got the text 'a' and the score 'high'; expected a number"),
        ("c.csv", "text,score\na,1\nb,\n", "line 3: got the text 'b' and the score ''"),
        ("k.csv", "text,score\na\n", "line 2: 1 cells, expected 2"),
        ("h.csv", "text,score\na,nan\n", "line 2: got the text 'a' and the score nan"),
        ("i.jsonl", '{"text": "a", "score": 1}\n[1]\n', "line 2: expected an object with fields, got list"),
        ("j.jsonl", '{"text": "a"}\n', "line 1: no column 'score'; it has: text"),
        (
            "f.jsonl",
            '{"text": "a", "score": []}',
            r"the score \[\]; expected a number, or a list of them, one for each",
        ),
        ("g.jsonl", '{"text": "a", "score": [1, null]}', r"the score \[1, None\]; expected a number"),
        ("d.jsonl", '{"text": "a", "score": 1}\n{"te', "cannot read text"),
        ("e.parquet", "no", "cannot read text"),
        ("f.jsonl", b'{"text": "a", "sc\xf4": 1}\n', "cannot read text"),
    ):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(MxdError, match=message):
            scored_texts(path)
    with pytest.raises(MxdError, match=r"no scored texts at 'nowhere\.csv'"):
        scored_texts("nowhere.csv")


def test_a_folder_or_a_pattern_is_one_set(tmp_path):
    """In the order of the files' names; a bad row is named with its file."""
    rows = [{"text": f"text {n}", "label": f"class {n % 2}", "score": n / 4} for n in range(6)]
    for name, part in (("b.jsonl.gz", rows[2:4]), ("a.csv", rows[:2]), ("c.json", rows[4:])):
        write_table(tmp_path / name, part)
    (tmp_path / "notes.md").write_text("not a table")
    for source in (tmp_path, f"{tmp_path}/*.*", f"{tmp_path}/[a-c].*"):
        found = labelled_texts(source)
        assert found.texts == [row["text"] for row in rows] and found.labels == [row["label"] for row in rows]
        assert found.name == str(source)
        assert scored_texts(source) == (found.texts, [row["score"] for row in rows])
    assert labelled_texts(f"{tmp_path}/b*").name == "b"
    write_table(tmp_path / "d.jsonl", [rows[0], {"text": 3, "label": "x", "score": "high"}])
    for read, message in ((labelled_texts, "'text' is 3"), (scored_texts, "the score 'high'")):
        with pytest.raises(MxdError, match=rf"{tmp_path}/d\.jsonl, line 2: .*{message}"):
            read(f"{tmp_path}/*")
    with pytest.raises(MxdError, match=r"no labelled texts at .*/\*\.parquet'"):
        labelled_texts(f"{tmp_path}/*.parquet")


def test_scores_of_a_hub_dataset(monkeypatch):
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "toxicity": [0.25, 1.0]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: table)
    assert scored_texts("org/name", score_column="toxicity") == (["a", "b"], [0.25, 1.0])
    with pytest.raises(MxdError, match="org/name, row 1: no column 'score'; it has: text, toxicity"):
        scored_texts("org/name")
