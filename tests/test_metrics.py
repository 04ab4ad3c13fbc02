"""Every number has one name, one form and one explanation, and the documentation gives the same."""

from pathlib import Path

import pytest

from mxd.common.markdown import grid
from mxd.metrics import METRICS, explained
from mxd.metrics.faithful import AROUND_SPECIAL, CE_INCREASE, NMSE, TOP1
from mxd.metrics.whole import REPEATED

DOCS = Path(__file__).parents[1] / "docs" / "evaluation.md"
HEAD = ["file", "number", "called", "unit", "better", "meaning"]


def reference() -> str:
    """Return the table of all numbers, as the documentation holds it."""
    rows = [
        [f"`{file}.json`", f"`{m.key}`", m.title + (f", {m.name}" if m.name else ""), m.unit, m.better, m.says]
        for file, metrics in METRICS.items()
        for m in metrics
    ]
    return grid([HEAD, *([cell.replace("|", "\\|") for cell in row] for row in rows)])


def test_the_documentation_explains_every_number_with_its_name():
    """Where this fails, put what ``reference()`` returns into the documentation."""
    missing = [row for row in reference().splitlines() if row not in DOCS.read_text(encoding="utf-8").splitlines()]
    assert not missing


@pytest.mark.parametrize("file", METRICS)
def test_no_two_numbers_of_a_file_share_a_name(file):
    titles = [metric.title for metric in METRICS[file] if not metric.title.startswith("±")]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("metric", [metric for metrics in METRICS.values() for metric in metrics], ids=lambda m: m.key)
def test_every_number_can_be_printed_and_is_explained(metric):
    assert metric.form.format(3) and metric.title and metric.note
    assert not metric.says.endswith(".") and ", in nats" not in metric.says, "added where it is said"


def test_a_unit_is_said_once():
    assert CE_INCREASE.label == "cross-entropy increase, nats"
    assert CE_INCREASE.note.endswith(", in nats")
    assert (NMSE.label, NMSE.note) == ("normalized MSE", NMSE.says)
    assert explained((TOP1,)) == "*top-1*: positions whose most probable token is unchanged."


def test_a_number_is_a_results_own_or_the_mean_over_its_layers():
    blocks = {"1": {"normalized_mse": 0.25}, "2": {"normalized_mse": 0.75}, "3": {}}
    assert NMSE.shown({"blocks": blocks}) == "0.5000"
    assert AROUND_SPECIAL.shown({"blocks": {}, "around_special": {"ce_increase": 0.5}}) == "+0.5000"
    assert CE_INCREASE.shown({"blocks": {}}) == "-"
    assert CE_INCREASE.shown({"blocks": {}, "ce_increase": None}) == "n/a"


def test_a_standard_error_has_the_form_of_its_number_and_no_sign():
    assert CE_INCREASE.with_error({"ce_increase": 0.5, "ce_increase_se": 0.25}) == "+0.5000 ± 0.2500"
    assert CE_INCREASE.with_error({"ce_increase": 0.5, "ce_increase_se": float("inf")}) == "+0.5000"
    assert CE_INCREASE.with_error({}) == "-" and TOP1.with_error({"top1_agreement": 0.5}) == "50.0%"
    repeated = {"generation": {"garbage": {"repeated": 0.5, "repeated_se": 0.25}}}
    assert REPEATED.with_error(repeated) == "50.0% ± 25.0%"
