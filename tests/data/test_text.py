"""A person's own text: held out by document or by paragraph, chats, memory."""

import json
import tracemalloc

import pytest
from runs import small

from mxd.common.errors import MxdError
from mxd.common.progress import say_once
from mxd.data import spool
from mxd.data.cutting import PIECE, cut_out, pieces
from mxd.data.spool import Documents
from mxd.data.text import _hash_split, documents
from mxd.training.source import text_contexts

SPLITS = ("train", "validation", "test")
BOOK = "\n\n".join(f"Paragraph {n} says that " + f"{n} is a number. " * (5 + n % 40) for n in range(200))
CHAT = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hi."}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if messages | length > 2 %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ strftime_now('%Y') }}, {{ date_string }}{{ eos_token }}"
)


@pytest.fixture
def chatty(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE, raising=False)
    return tokenizer


def splits(source, **options):
    return {split: list(documents(str(source), split, **options)) for split in SPLITS}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Held-out text


def test_pieces_are_the_text_cut_at_paragraphs():
    found = list(pieces(BOOK))
    assert "".join(found) == BOOK and len(found) > 20
    assert all(PIECE / 2 <= len(piece) <= PIECE for piece in found[:-1])
    assert all(piece.endswith("\n\n") for piece in found[:-1])
    assert list(pieces(BOOK + "\n\nmore"))[: len(found) - 1] == found[:-1]
    for mark in ("\n", " ", "x"):  # without paragraphs: lines, words, anything
        text = ("word" * 100 + mark) * 40
        assert "".join(pieces(text)) == text and all(p.endswith(mark) for p in list(pieces(text))[:-1] if mark != "x")


def test_a_piece_ends_at_the_last_blank_line_of_its_second_half_else_at_a_line():
    blank, line, rest = "\n\n", "\n", "x" * 3000
    two = "a" * 1098 + blank + "b" * 198 + blank + "c" * 598 + line + "d" * 50 + " " + rest
    early = "a" * 500 + blank + "b" * 899 + line + rest
    windows = "a" * 1200 + "\r\n\r\n" + "b" * 300 + "\r\n" + rest
    assert [len(next(pieces(text))) for text in (two, early, windows)] == [1300, 1402, 1204]


def test_so_many_per_cent_of_the_pieces_are_held_out_and_as_many_for_tests():
    with pytest.raises(ValueError, match="2 different pieces"):
        list(cut_out(lambda: ["one", "two", "one"], "train", 5))
    texts = [f"piece {n}" for n in range(100)] * 2
    found = {split: list(cut_out(lambda: texts, split, 5)) for split in SPLITS}
    assert {split: len(set(kept)) for split, kept in found.items()} == {"train": 90, "validation": 5, "test": 5}
    assert sorted(text for kept in found.values() for text in kept) == sorted(texts)


@pytest.mark.parametrize("suffix", [".txt", ".md", ".jsonl"])
def test_one_document_is_held_out_by_paragraph(tmp_path, suffix):
    path = tmp_path / f"book{suffix}"
    write_rows(path, [{"text": BOOK}]) if suffix == ".jsonl" else path.write_text(BOOK)
    found = splits(path)
    assert sum(len(text) for texts in found.values() for text in texts) == len(BOOK)
    parts = {
        split: {piece for text in texts for piece in text.split("\n\n") if piece} for split, texts in found.items()
    }
    assert set.union(*parts.values()) == set(BOOK.split("\n\n"))
    assert not parts["train"] & parts["validation"] and not parts["train"] & parts["test"]
    assert not parts["validation"] & parts["test"]
    held = sum(map(len, found["validation"])) / len(BOOK)
    assert 0.02 < held < 0.12
    assert len(found["train"]) <= len(found["validation"]) + len(found["test"]) + 1  # neighbours are one text
    assert splits(path) == found


def test_equal_pieces_are_on_the_same_side(tmp_path):
    (tmp_path / "a.txt").write_text(BOOK)
    (tmp_path / "b.txt").write_text(BOOK)
    found = splits(tmp_path)
    once = splits(tmp_path / "a.txt")
    assert {split: texts[: len(texts) // 2] for split, texts in found.items()} == once


def test_few_documents_are_held_out_and_many_stay_whole(tmp_path):
    few = [f"document {n}" for n in range(100) if _hash_split(f"document {n}") != "validation"][:8]
    found = splits(write_rows(tmp_path / "few.jsonl", [{"text": text} for text in few]))
    assert sorted(text for texts in found.values() for text in texts) == sorted(few)
    assert [len(found[split]) for split in SPLITS] == [6, 1, 1]
    many = [f"{n}: {BOOK[: 9 * PIECE]}" for n in range(60)]
    assert {_hash_split(text) for text in many} >= {"train", "validation"}
    found = splits(write_rows(tmp_path / "many.jsonl", [{"text": text} for text in many]))
    assert found == {split: [text for text in many if _hash_split(text) == split] for split in SPLITS}


def test_too_little_to_hold_out_is_refused_before_training(tmp_path):
    (tmp_path / "note.txt").write_text("Only this.")
    for split in SPLITS:
        with pytest.raises(
            MxdError, match=r"note.txt' is too short to hold some of it out: 1 different.*Give more text"
        ):
            documents(str(tmp_path / "note.txt"), split)


def test_no_file_that_is_trained_on_is_held_out(tmp_path, capsys):
    """A file named as a split is that split alone."""
    path = write_rows(tmp_path / "train.jsonl", [{"text": f"document {n}"} for n in range(400)])
    for source in (path, tmp_path):
        say_once.cache_clear()
        assert len(documents(str(source), "train")) == 400
        assert f"All of {source} is trained on, for its name is that of a split." in capsys.readouterr().err
        with pytest.raises(MxdError, match=r"has no validation text: train.jsonl holds that of its name alone"):
            documents(str(source), "validation")
    write_rows(tmp_path / "validation.jsonl", [{"text": "held out"}])
    say_once.cache_clear()
    assert len(documents(str(tmp_path), "train")) == 400 and capsys.readouterr().err == ""
    assert list(documents(str(tmp_path), "validation")) == ["held out"]
    path.rename(tmp_path / "other.jsonl")
    assert 300 < len(documents(str(tmp_path), "train")) < 400
    assert "held out" not in list(documents(str(tmp_path), "train"))


# Chats


def test_chats_go_through_the_chat_template(tmp_path, chatty):
    """The day is always the same; BOS and EOS around the chat are those of the contexts."""
    path = write_rows(tmp_path / "train.jsonl", [{"messages": CHAT}, {"messages": "plain"}])
    found = list(documents(str(path), column="messages", tokenizer=chatty))
    assert found == ["<user>Hello?<assistant>Hi.01 Jan 2025, 01 Jan 2025", "plain"]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (CHAT * 2, "line 1: the tokenizer's chat template refuses this chat: roles must alternate"),
        ([], r"expected a text or a chat, a list of .*got \[\]"),
        ([{"from": "user", "value": "Hi"}], "line 1: expected a text or a chat.*'from'"),
        ([{"role": "user", "content": None}], "line 1: expected a text or a chat"),
        ([{"role": "user", "words": "Hi" * 200}], r"got .{200} \.\.\.\.$"),
        ({"role": "user", "content": "Hi"}, "line 1: expected a text or a chat"),
    ],
)
def test_what_is_no_chat_is_refused(tmp_path, chatty, cell, message):
    path = write_rows(tmp_path / "train.jsonl", [{"messages": cell}])
    with pytest.raises(MxdError, match=message):
        documents(str(path), column="messages", tokenizer=chatty)


def test_a_chat_needs_a_template(tmp_path, tokenizer):
    path = write_rows(tmp_path / "train.jsonl", [{"messages": CHAT}])
    for given in (tokenizer, None):
        with pytest.raises(
            MxdError, match=r"line 1: a chat needs the tokenizer's chat template, and .* has none; choose"
        ):
            documents(str(path), column="messages", tokenizer=given)


# Memory, epochs


def test_documents_are_a_sequence_wherever_they_are_kept(monkeypatch):
    texts = ["a", "", "ünï😀", "\ud800", "b" * 100]
    for most in (50, 10**6):
        monkeypatch.setattr(spool, "MOST_IN_MEMORY", most)
        kept = Documents(iter(texts))
        assert list(kept) == texts and kept[-1] == texts[-1] and kept[1:3] == texts[1:3] and len(kept) == 5
        with pytest.raises(IndexError):
            kept[5]


def test_a_full_temporary_folder_is_one_message(monkeypatch):
    monkeypatch.setattr(spool, "MOST_IN_MEMORY", 10)
    monkeypatch.setattr("tempfile.tempdir", "/none/such")
    with pytest.raises(MxdError, match=r"cannot keep the text in the temporary folder /none/such: No such .*TMPDIR"):
        Documents(["a" * 100])


def test_a_long_file_is_read_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(spool, "MOST_IN_MEMORY", 2**14)
    path = write_rows(tmp_path / "long.jsonl", ({"text": f"{n} " + "word " * 200} for n in range(1500)))
    assert path.stat().st_size > 1.5e6
    tracemalloc.start()
    found = documents(str(path))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) > 1200 and most < 4e5


def test_epochs_are_told_once(gpt2, tmp_path, capsys):
    (tmp_path / "book.txt").write_text(BOOK)
    data = {"source": str(tmp_path / "book.txt"), "split": "train", "context": 32}
    say_once.cache_clear()
    for _ in range(2):
        contexts = text_contexts(small(tmp_path, data=data), gpt2, None)
    said = capsys.readouterr().err
    tokens = 31 * len(contexts.rows)
    assert f"The text holds {tokens:,} tokens" in said or tokens >= 6144
    wanted = small(tmp_path, data=data, training={"tokens": 10 * 512 * (tokens // 512 + 1)})
    for _ in range(2):
        text_contexts(wanted, gpt2, None)
    epochs = wanted.training.steps * 512 / tokens
    line = f"The text holds {tokens:,} tokens, so {wanted.training.steps * 512:,} of training are {epochs:.1f} epochs."
    assert capsys.readouterr().err.count(line) == 1
