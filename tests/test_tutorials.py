"""The tutorials run as they stand, and show what they print but for the numbers, which differ between machines."""

import re

import pytest
from test_scripts import script

TUTORIALS = script("run_tutorials").TUTORIALS
OUTPUT = re.compile(r"^```text\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def labels(text):
    """The first word of each line that a tutorial prints, numbers blanked."""
    words = [line.split()[:1] for block in OUTPUT.findall(text) for line in block.splitlines()]
    return [re.sub(r"[-+]?\d[\d.,]*", "#", word) for found in words for word in found]


@pytest.mark.long
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_and_prints_what_it_shows(page, tmp_path):
    text = page.read_text(encoding="utf-8")
    found = script("run_tutorials").executed(text, tmp_path)
    assert OUTPUT.sub("", found) == OUTPUT.sub("", text)
    assert labels(found) == labels(text)


def test_blocks_share_names_and_print_below_themselves(tmp_path):
    executed = script("run_tutorials").executed
    text = "a\n\n```python\nx = 2\n```\n\n```python\nprint(x + 1)\n```\n\n```text\nold\n```\n\n"
    text += "```sh\npwd; echo here > file\n```\nb\n"
    found = executed(text, tmp_path)
    assert found == text.replace("old", "3").replace("file\n```\n", f"file\n```\n\n```text\n{tmp_path}\n```\n")
    assert executed(found, tmp_path) == found and (tmp_path / "file").read_text() == "here\n"
    with pytest.raises(Exception, match="non-zero exit status 1"):
        executed("```sh\nfalse | true\n```\n", tmp_path)
