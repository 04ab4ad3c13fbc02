"""Tables and figures say what the numbers say."""

from pathlib import Path

import numpy as np
import pytest
from full_run import EVIL, dropped, masked, purged, rewritten

from mxd.common.errors import MxdError
from mxd.metrics.dropped import ABLATION, POLYSEMANTICITY
from mxd.metrics.masks import MASKING, PURGING
from mxd.metrics.rewritten import REWRITE, SEPARATION, WAYS
from mxd.metrics.units import LEADER, RANKS
from mxd.report.figures import frontier
from mxd.report.tables import caption, markdown_tables, most_affected, most_lost, tables
from mxd.report.terminal import (
    ablation_table,
    dropped_table,
    masking_table,
    purging_table,
    rewrite_tables,
    structure_table,
    terminal_diff,
)


def result(method: str, k: int | None, layer: int, increase: float) -> dict:
    metrics = {"normalized_mse": 0.01, "fvu": 0.2, "l0": 4.0, "dead_share": 0.5, "routed_share": 0.7}
    metrics |= {"nmse_fixed_directions": 0.03, "interaction_share": 0.125, "stable_rank": 2.5}
    what = {"method": method, "sparsity": f"k{k}", "k": k, "block": layer, "units": 10, "params": 1000}
    return {
        "tokens": 100,
        "ce_base": 3.0,
        "ce_base_se": 0.1,
        "ce_spliced": 3.0 + increase,
        "ce_increase": increase,
        "ce_increase_se": 0.01,
        "ce_zero": 5.0,
        "ce_mean": 4.0,
        "loss_recovered": 1 - increase / 2,
        "kl": 0.02,
        "top1_agreement": 0.9,
        "params": 1000,
        "active_params": 100.0,
        "flops": 3000.0,
        "around_special": {"ce_increase": increase / 2},
        "blocks": {str(layer): metrics},
        "replacements": [what],
    }


def evaluation(results: dict) -> dict:
    return {"model": "m", "data": {"source": "s", "split": "validation"}, "results": results}


def first(rows: list[list[str]]) -> dict[str, str]:
    return dict(zip(rows[0], rows[1], strict=True))


def test_a_share_of_noise_is_not_printed() -> None:
    found = evaluation({"a": {**result("TC", 8, 3, 0.5), "loss_recovered": None}})
    assert first(tables(found)[0])["recovered"] == "n/a"


def test_one_row_for_each_splice_with_its_numbers() -> None:
    found = evaluation({"b": result("TC", 16, 3, 0.5), "c": result("TC", 8, 3, 0.5), "a": result("MxD", 4, 2, 0.25)})
    faithful, decomposed, cost = tables(found)
    assert first(faithful) == {
        "method": "MxD",
        "block": "2",
        "sparsity": "k4",
        "NMSE": "0.0100",
        "FVU": "0.200",
        "CE": "3.2500",
        "CE increase": "+0.2500",
        "± s.e.": "0.0100",
        "around special": "+0.1250",
        "recovered": "87.5%",
        "KL": "0.0200",
        "top-1": "90.0%",
    }
    cells = first(decomposed)
    assert [cells[name] for name in ("NMSE", "fixed", "routed", "interaction", "stable rank", "L0", "dead")] == [
        "0.0100",
        "0.0300",
        "0.70",
        "0.125",
        "2.5",
        "4.0",
        "50%",
    ]
    assert first(cost) | {"L0": ""} == {
        "method": "MxD",
        "block": "2",
        "sparsity": "k4",
        "params": "1,000",
        "active params": "100",
        "FLOPs": "3,000",
        "L0": "",
    }
    assert cells["mean gate"] == cells["skip"] == "-", "not measured"
    assert [row[2] for row in faithful[1:]] == [row[2] for row in decomposed[1:]] == ["k4", "k8", "k16"]
    markdown = markdown_tables(found)
    assert markdown.count("| TC | 3 | k8 |") == 3 and "*fixed*: NMSE when" in markdown
    assert "block 2: zero-ablated 5.0000" in caption(found) and "block 3" in caption(found)


def test_several_layers_at_once_are_one_row_of_averages() -> None:
    both = result("MxD", 4, 2, 0.25)
    both["blocks"]["3"] = {**both["blocks"]["2"], "normalized_mse": 0.03}
    both["replacements"].append({**both["replacements"][0], "block": 3})
    cells = first(tables(evaluation({"together": both}))[0])
    assert (cells["method"], cells["block"], cells["NMSE"]) == ("together", "2 layers", "0.0200")


def test_the_figure_is_drawn_from_single_splices_with_a_k(tmp_path: Path, monkeypatch) -> None:
    from matplotlib.axes import Axes

    drawn = []
    real = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, *a, **k: drawn.append((k.get("label"), a)) or real(self, *a, **k))
    found = {
        "a": result("MxD", 8, 2, 0.25),
        "b": result("MxD", 4, 2, 0.5),
        "c": result("TC", 4, 3, 0.5),
        "no-k": result("SAE", None, 2, 0.1),
    }
    path = frontier(evaluation(found), tmp_path / "f.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    labels = [label for label, _ in drawn if label]
    assert labels == ["MxD, block 2", "TC, block 3"]
    assert list(drawn[0][1][0]) == [4, 8]


def test_a_layer_that_chooses_nothing_is_a_level_line(tmp_path: Path, monkeypatch) -> None:
    from matplotlib.axes import Axes

    drawn = []
    real = Axes.axhline
    monkeypatch.setattr(Axes, "axhline", lambda self, y, **k: drawn.append((k["label"], y)) or real(self, y, **k))
    linear = result("Linear", None, 3, 0.75)
    linear["replacements"][0]["sparsity"] = "always"
    for others, where in (({"a": result("MxD", 8, 2, 0.25)}, ", block 3"), ({}, "")):
        drawn.clear()
        frontier(evaluation(others | {"floor": linear}), tmp_path / "f.png")
        assert drawn == [(f"Linear{where}", 0.01), (f"Linear{where}", 0.75)]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda found: found["data"].pop("source"), r"faithfulness.json#/data has no 'source'"),
        (lambda found: found.update(model=3), r"faithfulness.json#/model is not a text"),
        (lambda found: found["results"]["a"].update(replacements=[]), r"#/results/a/replacements has no 0"),
        (lambda found: found["results"]["a"]["replacements"][0].pop("k"), r"#/results/a/replacements/0 has no 'k'"),
        (lambda found: found["results"]["a"].update(blocks={}), r"#/results/a/blocks has no '2'"),
        (lambda found: found["results"]["a"].update(ce_increase="x"), r"#/results/a/ce_increase is not a number"),
    ],
    ids=range(6),
)
def test_a_figure_of_a_damaged_evaluation_names_what_is_missing(tmp_path: Path, damage, said) -> None:
    found = evaluation({"a": result("MxD", 8, 2, 0.25)})
    damage(found)
    with pytest.raises(MxdError, match=said):
        frontier(found, tmp_path / "f.png")
    assert not list(tmp_path.iterdir())


def test_names_in_a_figure_are_text_and_no_formulas(tmp_path: Path) -> None:
    found = evaluation({"a": result("$\\frac{$", 8, 2, 0.25)}) | {"model": "$\\frac{$ \ud800"}
    assert frontier(found, tmp_path / "f.png").stat().st_size


def test_continuations_are_green_as_far_as_they_agree_and_red_from_there() -> None:
    example = {"prompt_text": "A [bold]", "base_tokens": [" b", " c", " d"], "spliced_tokens": [" b", " x", " d"]}
    text = terminal_diff(example)
    assert text.plain == "prompt   A [bold]\nbase      b c d\nspliced   b x d\n         1 of 3 tokens agree\n"
    assert [(text.plain[s.start : s.end], s.style) for s in text.spans] == [(" b", "green"), (" x d", "red underline")]


def test_tables_on_the_terminal_are_named_as_on_the_page() -> None:
    rng = np.random.default_rng(0)
    matrix = [[0.5, -0.25], [0.125, 0.25]]
    errors = [[0.01, 0.02], [0.03, 0.04]]
    masking = {**masked(rng, "", 0), "matrix": matrix, "loss": [3.0, 4.0], "control": matrix}
    masking |= {"matrix_se": errors, "control_se": errors}
    page = {metric.title for metric in MASKING}
    table = masking_table("a", masking)
    assert page <= {column.header for column in table.columns}
    assert [list(column.cells)[-1] for column in table.columns][3:] == ["+0.3750", "-0.0100", "+0.1250", "+0.0625"]
    assert list(table.columns[4].cells)[:2] == ["-0.2500", "+0.1250"]
    purging = {**purged(rng, "", 0), "changes_se": errors}
    table = purging_table("a", {**purging, "control_se": errors})
    assert [column.header for column in table.columns] == [metric.title for metric in PURGING]
    assert [list(column.cells)[1] for column in table.columns][:5] == ["0.1", "9", "7.5%", "12", "+0.2500 ± 0.0300"]
    ranks = {"normalized_rank": 0.5, "normalized_rank_sd": 0.25, "stable_rank": 2.5, "stable_rank_sd": 1.25}
    ranks |= {"deficient": 1100, "experts": 1200}
    table = structure_table({"results": {"a": ranks | {"shape": [3, 4], "leader": {"unit": 7, "share": 0.25}}}})
    cells = {column.header: list(column.cells) for column in table.columns}
    numbers = [["0.5000"], ["0.2500"], ["1,100"], ["1,200"], ["2.5"], ["1.2"]]
    assert cells == {
        "layer": ["a"],
        **dict(zip((metric.title for metric in RANKS), numbers, strict=True)),
        "shape": ["3 x 4"],
        LEADER.title: ["25.0% #7"],
    }


def test_dropped_units_on_the_terminal_are_those_that_cost_a_class_most() -> None:
    result = dropped(np.random.default_rng(0), "", 0)
    table = dropped_table("a", result)
    assert [list(column.cells) for column in table.columns] == [
        ["#3", "(#4)"],
        ["25.000%", "25.000%"],
        ["0.000", "0.707"],
        ["sport 100.0%", f"sport 50.0%, law {EVIL} 50.0%"],
    ]
    summary = ablation_table({"a": result})
    assert [column.header for column in summary.columns] == ["layer", *(metric.title for metric in ABLATION)]
    cells = {column.header: next(iter(column.cells)) for column in summary.columns}
    assert cells[POLYSEMANTICITY.title] == "0.354 ± 0.250" and cells["mean p, random"] == "0.938 ± 0.250"
    assert cells["beyond chance"] == "1" and cells["mean p, beyond chance"] == "0.000"


def test_rewritten_outputs_on_the_terminal() -> None:
    ways, cells, gains, separation = rewrite_tables({"a": rewritten(np.random.default_rng(0), "", 1)})
    assert f"for sport {EVIL}, long; 6 texts" in str(ways.title)
    assert list(ways.columns[0].cells) == list(cells.columns[0].cells) == list(WAYS.values())
    assert list(ways.columns[1].cells)[2] == "+0.250 ± 0.062" and list(ways.columns[2].cells)[2] == "25.0% ± 6.2%"
    assert [column.header for column in cells.columns][2:] == ["law, long", f"law, short {EVIL}", f"sport {EVIL}, long"]
    assert list(cells.columns[1].cells)[:3] == ["", "0", "0.125, 0.25"]
    assert list(cells.columns[4].cells)[5] == "87.5% ± 12.5%"
    assert [column.header for column in gains.columns] == ["layer", *(metric.title for metric in REWRITE)]
    assert next(iter(gains.columns[1].cells)) == "+0.250 ± 0.125"
    assert [column.header for column in separation.columns] == ["layer", *(metric.title for metric in SEPARATION)]
    assert str(separation.title).endswith(f"the token is {f' the {EVIL}'!r}, absent")


def test_the_classes_that_a_unit_affects_most() -> None:
    nan = float("nan")
    assert most_affected("abcde", [0.0, -0.5, 0.25, nan, 0.75]) == "e 75.0%, b -50.0%, c 25.0%"
    assert most_lost({"1": [0.1, nan], "2": [-1.0, 0.0], "3": [0.5, 0.0], "4": [nan]}) == ["3", "1"]
