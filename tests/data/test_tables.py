"""Rows of files: every format says the same, and what is damaged, hostile or no table ends in one message."""

import gzip
import json

import pytest
from tables import SUFFIXES, write_table

from mxd.common.errors import MxdError
from mxd.data import tables
from mxd.data.tables import file_rows, find_files, local_files, stem_of, suffix_of
from mxd.data.text import documents

ROWS = [{"text": 'a "b",\nc\u2028d', "note": "2024-01-01"}, {"text": "é", "note": "NA"}, {"text": "x", "note": "007"}]


def read(path, column=None):
    return [row for _, row in file_rows([path], column)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_cells_are_what_was_written(tmp_path, suffix):
    """No text is taken for a date, a number, or nothing."""
    path = write_table(tmp_path / f"t{suffix}", ROWS)
    assert read(path) == ROWS
    places = {
        ".csv": ["line 2", "line 4", "line 5"],
        ".jsonl": ["line 1", "line 2", "line 3"],
    }  # the first has two lines
    expected = places.get(suffix.removesuffix(".gz"), ["row 1", "row 2", "row 3"])
    assert [where for where, _ in file_rows([path, path])] == [f"{path}, {place}" for place in expected] * 2
    assert [row["text"] for row in read(path, "text")] == [row["text"] for row in ROWS]
    assert set(read(path, "text")[0]) == ({"text"} if suffix == ".parquet" else {"text", "note"})
    assert set(read(path, "body")[0]) == {"text", "note"}  # so that a message can name them


@pytest.mark.parametrize("suffix", [".txt", ".md", ".txt.gz"])
def test_a_text_file_is_one_row(tmp_path, suffix):
    path, raw = tmp_path / f"t{suffix}", "\ufeffone\r\ntwo\n".encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    assert read(path) == [{"text": "one\r\ntwo\n"}]
    assert read(path, "body") == [{"body": "one\r\ntwo\n"}]


def test_bytes_in_parquet_are_text(tmp_path):
    """As older writers of Parquet leave it."""
    path = write_table(tmp_path / "t.parquet", [{"text": "é\n".encode(), "n": 1}])
    assert read(path) == [{"text": "é\n", "n": 1}]
    path = write_table(tmp_path / "t.parquet", [{"text": b"a", "image": b"\xff"}, {"text": b"\xff", "image": b"a"}])
    assert read(path)[0] == {"text": "a", "image": b"\xff"}  # nobody asked for the image
    with pytest.raises(MxdError, match=r"t\.parquet, row 2: 'text' holds bytes that are not text in UTF-8"):
        list(documents(str(path), "train"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,label\nHello, my friend,a\n", "line 2: 3 cells, expected 2; quote texts that hold commas"),
        ("text,label\na,b\nc\n", "line 3: 1 cells, expected 2"),
        ('text\n"a\nb"\n"c\nd\n', "line 4: .*is a quote not closed"),
    ],
)
def test_rows_that_do_not_fit_the_header_are_refused(tmp_path, content, message):
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(MxdError, match=message):
        read(tmp_path / "t.csv")


def test_places_are_lines_of_the_file(tmp_path):
    """Also past empty lines, and past rows of several lines."""
    path = tmp_path / "t.csv"
    path.write_text('text\n\n"a\r\nb\nc"\n\nd\n')
    assert [where for where, _ in file_rows([path])] == [f"{path}, line 3", f"{path}, line 7"]
    path = tmp_path / "t.jsonl"
    path.write_text('\n{"text": "a"}\n\n\n{"text": "b"}\n')
    assert [where for where, _ in file_rows([path])] == [f"{path}, line 2", f"{path}, line 5"]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_json_file_holds_one_array_or_a_row_in_each_line(tmp_path, mark):
    path = tmp_path / "t.json"
    for text in (json.dumps(ROWS), "\n" + json.dumps(ROWS, indent=2), "\n".join(map(json.dumps, ROWS)) + "\n\n"):
        path.write_bytes(mark + text.encode())
        assert read(path) == ROWS
    path.write_bytes(mark)
    assert read(path) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n["b"]\n', "line 3: expected an object with fields, got list"),
        ("b.jsonl", b'{"text": "a"}\n{"te', r"line 2: Unterminated string starting, column 2\Z"),
        ("c.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "line 2: 'utf-8' codec can't decode"),
        ("d.jsonl", b'{"n": ' + b"9" * 40 + b"}", "line 1: it holds the whole number 9+..., which is too large"),
        ("e.jsonl", b'{"n": ' * 50_000, "line 1: it is nested too deeply"),
        ("a.json", b'[{"text": "a"}, "b"]', "row 2: expected an object with fields, got str"),
        ("b.json", b'[{"text": "a"}, {"te', "Unterminated string"),
        ("c.json", b"[" * 50_000, "nested too deeply"),
        ("d.json", b'"text"', "line 1: expected an object with fields, got str"),
        ("a.csv", b"text\n\n\xff\n", "line 3: 'utf-8' codec can't decode .*save the file as UTF-8"),
        ("e.json", b'[\n{"text": "\xff"}]', "line 2: 'utf-8' codec can't decode"),
        ("a.parquet", b"PAR1 no", ""),
        ("b.parquet", b"", ""),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_what_is_damaged_is_named(tmp_path, name, text, message):
    """The same when it is packed."""
    path = tmp_path / name
    path.write_bytes(text)
    with pytest.raises(MxdError, match=rf"^cannot read text from '{path}': .*{message}"):
        read(path)
    if path.suffix != ".parquet":
        packed = tmp_path / f"{name}.gz"
        packed.write_bytes(gzip.compress(text))
        with pytest.raises(MxdError, match=rf"^cannot read text from '{packed}': .*{message}"):
            read(packed)


@pytest.mark.parametrize("suffix", [".csv.gz", ".json.gz", ".jsonl.gz"])
def test_no_cut_or_flipped_packed_file_is_read_whole(tmp_path, suffix):
    path = write_table(tmp_path / f"t{suffix}", ROWS * 50)
    good = path.read_bytes()
    assert len(read(path)) == 150
    for cut in (b"", good[:1], good[:15], good[: len(good) // 2], good[:-1], b"not gzip" * 9, good + b"more"):
        path.write_bytes(cut)
        if cut:
            with pytest.raises(MxdError, match="cannot read text from"):
                read(path)
        else:
            assert read(path) == []  # as of an empty file
    for place in range(10, len(good), 7):
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        with pytest.raises(MxdError, match="cannot read text from"):
            read(path)


@pytest.mark.parametrize("suffix", [".csv.gz", ".json.gz", ".jsonl.gz"])
def test_a_small_file_that_unpacks_to_an_endless_line_is_refused(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(tables, "LONGEST", 10_000)
    path = tmp_path / f"t{suffix}"
    for text in (b"x" * 20_000, b"[\n" + b" " * 9_000 + b"\n" + b" " * 9_000):
        path.write_bytes(gzip.compress(text))
        if suffix == ".json.gz" or text[:1] == b"x":
            with pytest.raises(MxdError, match="longer than 10,000 bytes"):
                read(path)
    assert read(write_table(path, ROWS)) == ROWS


def test_files_are_found_by_path_folder_and_pattern(tmp_path):
    (tmp_path / "below").mkdir()
    for name in ("b.csv", "a.jsonl.gz", "below/c.json", "d.txt", "e.md"):
        (tmp_path / name).write_text("")

    def found(source, suffixes=tables.TABLES):
        return [str(file.relative_to(tmp_path)) for file in find_files(source, suffixes)]

    assert found(tmp_path) == ["a.jsonl.gz", "b.csv"]
    assert found(str(tmp_path), tables.DOCUMENTS) == ["a.jsonl.gz", "b.csv", "d.txt"]
    assert found(tmp_path / "e.md") == ["e.md"]  # the caller says that this is none
    assert found(f"{tmp_path}/*") == ["a.jsonl.gz", "b.csv"]
    assert found(f"{tmp_path}/**/*.[cj]s*") == ["a.jsonl.gz", "b.csv", "below/c.json"]
    assert found(f"{tmp_path}/*.md", tables.DOCUMENTS) == ["e.md"]
    (tmp_path / "below" / "c.json").rename(tmp_path / "below" / "f.md")
    assert found(tmp_path / "below", tables.DOCUMENTS) == [
        "below/f.md"
    ]  # notes are the text where there is nothing else
    assert found(f"{tmp_path}/?.gz") == found("org/name") == found(tmp_path / "none.csv") == []
    (tmp_path / "[x].csv").write_text("")
    assert found(f"{tmp_path}/[x].csv") == ["[x].csv"]  # a file of that very name comes first
    assert [suffix_of(name) for name in ("a.jsonl.gz", "a.tar.gz", "a.parquet", "a")] == [
        ".jsonl.gz",
        "",
        ".parquet",
        "",
    ]
    assert [stem_of(name) for name in ("x/a.b.jsonl.gz", "train.csv", "c")] == ["a.b", "train", "c"]


def test_what_is_not_there_is_no_dataset_of_the_hub(tmp_path):
    assert local_files("org/name", "text") == []
    for source in (tmp_path, tmp_path / "a.csv", f"{tmp_path}/*", "org/name/*", "org/name.jsonl.gz", "a\0/*"):
        with pytest.raises(MxdError, match=r"no text at |cannot read text from "):
            local_files(source, "text")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(MxdError, match="no text at"):
        local_files(tmp_path / "loop", "text")
