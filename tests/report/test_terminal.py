"""Tables on terminals of every width: no number is cut off, and what is essential comes first."""

import re

import numpy as np
import pytest
from full_run import dropped, purged, rewritten
from rich.console import Console
from rich.table import Table
from test_report import evaluation, result

from mxd.report.tables import fitted, hanging, terminal_tables
from mxd.report.terminal import ablation_table, purging_table, rewrite_tables, terminal_diff, unit_lines

WIDTHS = (80, 100, 145, 200)


def printed(tables, width: int) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    return capture.get()


def found() -> dict:
    results = {f"{method}{k}": result(method, k, 2, 0.0153) for method in ("MxD", "CP-muMoE") for k in (8, 32)}
    return evaluation(results | {"far": result("TC", 16, 11, 0.00001234)})


@pytest.mark.parametrize("width", WIDTHS)
def test_an_evaluation_shows_what_is_essential_in_one_table(width) -> None:
    first, *others = terminal_tables(found(), width)
    text = printed([first, *others], width)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    cells = {str(column.header): list(column.cells) for column in first.columns}
    if width == 200:
        assert [table.row_count for table in (first, *others)] == [5, 5, 5] and cells["FVU"] == ["0.200"] * 5
        return
    assert not others and list(cells) == ["method", "block", "K", "NMSE", "CE increase", "dead", "fixed", "routed"]
    assert cells["method"] == ["CP-muMoE", "CP-muMoE", "MxD", "MxD", "TC"] and cells["block"][3:] == ["2", "11"]
    assert cells["CE increase"] == ["+0.0153 ± 0.0100"] * 4 + ["+1.2e-05 ± 0.0100"]
    assert cells["dead"] == ["50%"] * 5 and cells["fixed"] == ["0.0300"] * 5 and cells["routed"] == ["0.70"] * 5
    assert re.search(r"│ MxD +│ +2 │ +k32 │ 0\.0100 │ +\+0\.0153 ± 0\.0100 │ +50% │ 0\.0300 │ +0\.70 │", text)


def test_below_that_parts_begin_with_what_tells_rows_apart() -> None:
    parts = terminal_tables(found(), 60)
    heads = [[str(column.header) for column in part.columns] for part in parts]
    assert heads == [
        ["method", "block", "K", "NMSE", "CE increase"],
        ["method", "block", "K", "dead", "fixed", "routed"],
    ]
    assert parts[0].title and parts[1].title == "continued"


@pytest.mark.parametrize("width", [40, *WIDTHS])
@pytest.mark.parametrize("name", ["rewrite", "purging", "ablation"])
def test_wide_tables_keep_every_number(name, width) -> None:
    rng = np.random.default_rng(0)
    table = {
        "rewrite": lambda: next(rewrite_tables({"a": rewritten(rng, "", 1)})),
        "purging": lambda: purging_table("a", purged(rng, "", 0)),
        "ablation": lambda: ablation_table({"a layer with a name of many words": dropped(rng, "", 0)}),
    }[name]()
    text = printed(fitted(table, width), width)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    if width >= 80:
        for column in table.columns:
            assert str(column.header) in text and all(str(cell) in text for cell in column.cells if len(cell) < 20)


def test_a_table_that_fits_stays_as_it_is() -> None:
    table = Table("", "rate", title="a title")
    table.add_row("a cell of so many words that it could be broken", "0.5", style="bold", end_section=True)
    (part,) = fitted(table, 160)
    assert printed([part], 160) == printed([table], 160)
    assert (part.rows[0].style, part.rows[0].end_section) == ("bold", True)


def test_broken_lines_go_on_below_their_text() -> None:
    example = {"prompt_text": "one\ntwo", "base_tokens": [" a" * 9, "\n"], "spliced_tokens": [" a" * 9, " [b]"]}
    lines = list(hanging(terminal_diff(example), Console(width=21)))
    assert [line.plain.rstrip() for line in lines] == [
        "prompt   one",
        "         two",
        "base      a a a a a a",
        "         a a a",
        "",
        "spliced   a a a a a a",
        "         a a a [b]",
        "         1 of 2",
        "         tokens agree",
        "",
    ]
    styles = [line.plain[span.start : span.end].strip() for line in lines for span in line.spans if span.style]
    assert styles == ["a a a a a a", "a a a", "[b]"]


def test_a_unit_that_was_never_active_is_told() -> None:
    page = {"rate": 0.0, "mean": 0.0, "max": 0.0, "intervals": [], "promoted": []}
    result = {"shared": [], "shared_above": 0.1, "rates": [0.0, 0.5], "tokens": 5, "dead": 1, "units": {"0": page}}
    *_, line = unit_lines("layer", result | {"logits": {"norm": None, "missing": "no directions"}})
    assert line.plain.endswith("  never active here")
    *_, line = unit_lines(
        "layer", result | {"logits": {"norm": None, "missing": ""}, "units": {"1": page | {"rate": 0.5}}}
    )
    assert "never" not in line.plain
