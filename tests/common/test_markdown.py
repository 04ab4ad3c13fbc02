"""Text in Markdown is shown as it is."""

import pytest

from mxd.common.markdown import grid, literal


@pytest.mark.parametrize("mark", "\\`*_{}[]|~#")
def test_marks_are_escaped(mark):
    assert literal(f"a{mark}b") == f"a\\{mark}b"


def test_a_text_is_one_line_without_tags_or_links():
    assert literal("a\n\n<b> &amp; http://x 1:2") == "a &lt;b> &amp;amp; http\\://x 1:2"
    assert literal(3) == "3"


def test_a_table_has_its_first_row_as_head():
    assert grid([["a", "b"], ["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"
