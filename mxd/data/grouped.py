"""Texts with a label and a group: what is served unevenly is a cell, a group's texts of one label."""

from pathlib import Path

from mxd.common.errors import MxdError
from mxd.data.labelled import LabelledTexts, labelled_texts
from mxd.questions import DEFAULTS

FIGURES = "figures"
"""The set that is made from the bundled Factbook: is a text about the economy, and has it any figures?"""
LABELS = {
    **dict.fromkeys(("Economy", "Communications", "Transportation"), "economy"),
    **dict.fromkeys(("Geography", "Government", "Transnational Issues"), "country"),
}
"""Topics of the Factbook -> labels of ``figures``."""


def grouped_texts(
    source: str | Path,
    text_column: str = DEFAULTS.rewrite.text_column,
    label_column: str = DEFAULTS.rewrite.label_column,
    group_column: str = DEFAULTS.rewrite.group_column,
) -> tuple[LabelledTexts, list[str]]:
    """Read a set whose texts have a label and a group each.

    ``figures`` has 660 texts of the Factbook on six topics, three about the economy, three about the country; those
    with a digit are one group. Of economic texts 36 of 330 have none, of the others 120 of 330, and nothing was drawn
    or planted to make it so.

    Args:
        source: ``figures``, or as for ``labelled_texts``.
        text_column: the field that holds the text.
        label_column: the field that holds the label.
        group_column: the field that holds the group.

    Returns:
        The texts, and the group of each.

    Raises:
        MxdError: as ``labelled_texts``, or there are no two groups.
    """
    if source == FIGURES:
        every = labelled_texts("factbook")
        rows = [(t, LABELS[topic]) for t, topic in zip(every.texts, every.labels, strict=True) if topic in LABELS]
        texts, labels = [text for text, _ in rows], [label for _, label in rows]
        has_figures = [any(character.isdigit() for character in text) for text in texts]
        return LabelledTexts(FIGURES, texts, labels), ["figures" if has else "words" for has in has_figures]
    found = labelled_texts(source, text_column, label_column, group_column=group_column)
    groups = found.groups or []
    if len(set(groups)) < 2:
        got = f"has one group, {groups[0]!r}" if groups else "is none of its columns"
        raise MxdError(f"{found.name}: --group-column {group_column} {got}; expected two groups.")
    return found, groups
