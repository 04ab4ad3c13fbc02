"""Progress on a terminal and elsewhere; numbers in texts."""

import io
import re

import pytest

from mxd.common import progress
from mxd.common.numbers import plural, shown
from mxd.common.progress import PlainConsole

NOTE = "\n".join(
    f"block2-mxd-k{k}: NMSE 0.0171 FVU 0.55 L0 8 dead 55%, and more than fits into the line" for k in (8, 32)
)


class Terminal(io.StringIO):
    """A terminal that remembers what was written to it."""

    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, width: int, title: str, note: str = NOTE) -> list[str]:
    """The lines of a bar as it last stood on a terminal of this width, after a quarter of what was expected."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = PlainConsole()
    screen.file = Terminal()
    monkeypatch.setattr(progress, "console", screen)
    with progress.progress(title, 1000, "tokens through the model") as advance:
        advance(250, note)
    seen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.file.getvalue().replace("\r", "\n"))
    return [line.rstrip() for line in seen.splitlines() if line.strip()][-3:]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_note_and_no_title_takes_room_from_the_bar(monkeypatch, width) -> None:
    title = "continuing prompts under 12 masks of a run with a long name"
    bar, *notes = drawn(monkeypatch, width, title)
    assert len(bar) <= width and bar.startswith(title[:5])
    assert bar.count("━") + bar.count("╸") + bar.count("╺") >= 8
    assert " 100% " in bar, "the work ended early, as where a text ends"
    assert " tokens/s " in bar and bar.rsplit(" ", 1)[1].count(":") == 2
    assert [note[:21] for note in notes] == ["block2-mxd-k8: NMSE 0", "block2-mxd-k32: NMSE "]
    assert all(len(note) <= width and note.endswith("…") == (width < 90) for note in notes)


def test_elsewhere_lines_hold_all(capsys) -> None:
    with progress.progress("judging", 10, "collections", done=9) as advance:
        advance(1, NOTE)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("judging: 10/10 collections, ") and line.endswith("0 s left; " + NOTE.replace("\n", "  "))


def test_colours_in_a_file_break_no_line_and_draw_no_bar(monkeypatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("COLUMNS", raising=False)
    screen = PlainConsole(stderr=True)
    monkeypatch.setattr(progress, "console", screen)
    assert screen.width == progress.WIDTH
    with progress.progress("judging", 10, "collections", done=9) as advance:
        advance(1, NOTE)
    screen.tell(SENTENCE * 2)
    screen.print("bold", style="bold")
    told, sentence, bold = capsys.readouterr().err.splitlines()
    assert told.startswith("judging: 10/10 collections, ") and sentence == SENTENCE * 2 and bold == "\x1b[1mbold\x1b[0m"


def test_nothing_is_shown_within_quiet(capsys) -> None:
    with progress.quiet(), progress.quiet(False):
        with progress.progress("judging", 1) as advance:
            advance(1)
        progress.console.print("a note")
    assert capsys.readouterr().err == "" and not progress.console.quiet


def test_a_slow_rate_is_not_zero() -> None:
    assert [progress._rate(rate, "texts") for rate in (0.004, 0.25, 1.0, 1234.5)] == [
        "0.004 texts/s",
        "0.2 texts/s",
        "1.0 texts/s",
        "1,234 texts/s",
    ]


def test_the_width_is_that_of_columns_where_there_is_no_terminal(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "77")
    assert PlainConsole().width == 77
    monkeypatch.delenv("COLUMNS")
    assert PlainConsole().width == progress.WIDTH


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        ("{:.4f}", 0.0132, "0.0132"),
        ("{:.4f}", 0.00003214, "3.2e-05"),
        ("{:+.4f}", 0.00003214, "+3.2e-05"),
        ("{:+.4f}", -0.00003214, "-3.2e-05"),
        ("{:.0%}", 0.004, "0.4%"),
        ("{:,.0f}", 0.3, "0.3"),
        ("{:.4f}", 0.0, "0.0000"),
        ("{:.2f}", 6.2e-17, "0.00"),
        ("{:.4f}", float("nan"), "nan"),
        ("{:.4f}", float("inf"), "inf"),
    ],
)
def test_only_zero_reads_as_zero(form, value, text) -> None:
    assert shown(form, value) == text


def test_plurals() -> None:
    assert [plural(n, "splice") for n in (0, 1, 1200)] == ["0 splices", "1 splice", "1,200 splices"]
    assert plural(2, "class", "classes") == "2 classes"


PATH = "/home/someone/with-a-name/and-many-folders/of-which-one-is-deeper/than/a-terminal-is-wide/config.yaml"
SENTENCE = (
    f"cannot read config {PATH}: No such file; write one with `mxd init own --out new.yaml`, or see 'a folder of mine'."
)


def test_sentences_are_broken_between_words_and_what_is_copied_is_whole(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = PlainConsole()
    for terminal, lines in (
        (False, [f"    {SENTENCE}"]),
        (
            True,
            [
                "    cannot read config",
                f"    {PATH}:",
                "    No such file; write one with",
                "    `mxd init own --out new.yaml`, or",
                "    see 'a folder of mine'.",
            ],
        ),
    ):
        screen.file = Terminal() if terminal else io.StringIO()
        screen.tell(f"    {SENTENCE}")
        assert screen.file.getvalue().splitlines() == lines
