"""Every method has a look of its own, and figures of faithfulness against anything draw the numbers of the file."""

import json
import math
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from full_run import fill
from variants import CASES, parse

from mxd.report import svg, tradeoffs
from mxd.report.figures import OTHERS, PALETTE, STYLES
from mxd.report.markers import OUTLINES, marker
from mxd.report.parts import Key, slots
from mxd.report.run import read_run
from mxd.report.sections import faithfulness
from mxd.report.source import Node

STYLE = (Path(svg.__file__).parent / "templates" / "style.css").read_text()
LIGHT, DARK = (re.findall(r"--s\d+: (#[0-9a-f]{6})", part) for part in STYLE.split("@media", 2)[:2])

VISION = {
    "all cones": np.eye(3),
    "no L cones": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no M cones": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no S cones": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""What is seen of linear RGB (Machado, Oliveira and Fernandes 2009, severity 1)."""
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.119192, 0.9503041]]
)


def seen(colour: str, vision: str) -> np.ndarray:
    """A colour in CIE Lab, whose distances are about those that are seen."""
    rgb = np.array([int(colour[n : n + 2], 16) for n in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(np.array(VISION[vision]) @ linear, 0, 1) / TO_XYZ.sum(1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_every_method_has_a_style_of_its_own():
    labels = {parse(*case).label for case in CASES}
    assert labels <= set(STYLES)
    looks = [*STYLES.values(), *OTHERS]
    assert len(set(looks)) == len(looks)
    assert {marker for _, marker in looks} <= set(OUTLINES) | {"o"}
    assert list(PALETTE.values()) == LIGHT and len(DARK) == len(LIGHT)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_methods_with_the_same_marker_are_told_apart_by_colour(colours, vision):
    number = {name: n for n, name in enumerate(PALETTE)}
    for (a, mark), (b, other) in combinations(STYLES.values(), 2):
        if mark == other:
            apart = np.linalg.norm(seen(colours[number[a]], vision) - seen(colours[number[b]], vision))
            assert apart > 20, (a, b, mark)


def test_lines_look_the_same_in_any_order_and_variants_differ():
    lines = [f"TC (kind {n})" for n in range(8)] + ["MxD", "unheard of", "unknown"]
    keys = slots(lines)
    assert {line: keys[line] for line in lines} == slots(sorted(lines, reverse=True)) | {
        line: keys[line] for line in lines[-2:]
    }
    assert keys["unheard of"] != keys["unknown"]
    drawn = {(key.colour, str(marker(key, 0.0, 0.0))) for key in keys.values()}
    assert len(drawn) == len(lines)


@pytest.mark.parametrize("letter", ["o", *OUTLINES])
def test_a_marker_is_around_its_place(letter):
    drawn = str(marker(Key("a", 0, letter), 20.0, 30.0))
    if letter == "o":
        assert 'cx="20.0" cy="30.0"' in drawn
        return
    steps = [tuple(map(float, step)) for step in re.findall(r"(-?[\d.]+) (-?[\d.]+)", drawn)]
    corners = np.cumsum(steps, 0)[1:]
    assert np.allclose(corners.min(0) + corners.max(0), [40, 60], atol=1.6)
    assert np.all(np.abs(corners - [20, 30]) < 5.5)


def test_numbers_of_an_axis_do_not_run_into_each_other():
    key = slots(["MxD"])["MxD"]
    points = [svg.Point(x, 1.0) for x in (30.0, 31.0, 32.0, 4000.0)]
    panel = svg.lines("y", svg.Axis("x", "log", [30.0, 31.0, 32.0, 4000.0]), svg.Axis("y"), [svg.Line(key, points)])
    assert re.findall(r'class="t xl"[^>]*>([^<]*)', panel.drawing) == ["30", "4,000"]
    assert panel.drawing.count("data-source") == 4


@pytest.mark.parametrize(("high", "ticks"), [(1.5, 4), (3.0, 4), (60.0, 6), (5e4, 5)])
def test_a_logarithmic_axis_has_some_numbers_however_short(high, ticks):
    key = slots(["MxD"])["MxD"]
    points = [svg.Point(x, 1.0) for x in (1.0, high)]
    panel = svg.lines("y", svg.Axis("x", "log"), svg.Axis("y"), [svg.Line(key, points)])
    assert len(re.findall(r'class="t xl"', panel.drawing)) == ticks


@pytest.mark.parametrize(
    ("values", "bars", "low"),
    [([0.01, 0.02], [0.0], 0.0), ([0.01, -0.002], [], None), ([0.01, 0.02], [-0.001], None)],
    ids=["above", "value", "bar"],
)
def test_an_axis_begins_at_zero_or_below_what_is_negative(values, bars, low):
    assert tradeoffs._axis("y", values, bars=bars) == svg.Axis("y", "linear", low=low)


def test_a_line_whose_points_are_not_marked_has_a_few_markers_elsewhere_than_its_neighbours():
    keys = slots(["MxD", "TC"])
    points = [svg.Point(float(x), 1.0) for x in range(1, 101)]
    drawn = [svg.Line(key, points, marks=False) for key in keys.values()]
    panel = svg.lines("y", svg.Axis("x"), svg.Axis("y"), drawn)
    circles = set(re.findall(r'<svg x="([\d.]+)%" y="[\d.]+"><circle class="mark"', panel.drawing))
    squares = set(re.findall(r'<svg x="([\d.]+)%" y="[\d.]+"><path class="mark"', panel.drawing))
    assert len(circles) == len(squares) == svg.SPARSE_MARKS and not circles & squares
    assert "<title>TC, 34: 1</title>" in panel.drawing and 2 * svg.HOVER / 2 < panel.drawing.count("<title>") <= 80


def figures(run) -> dict:
    """The figures of the section by the first words of their captions."""
    parts = faithfulness.section(read_run(run)).parts
    return {re.split("[:,]", part.caption)[0]: part for part in parts if part.kind == "figure"}


def test_decomposition_and_cost_are_drawn_from_the_file(run):
    found = figures(run)
    assert list(found) == ["The frontier", "Faithfulness against decomposition", "What faithfulness costs"]
    figure = found["Faithfulness against decomposition"]
    assert len(figure.panels) == 6 and [key.label for key in figure.keys] == ["MxD", "TC", "CP-muMoE"]
    first, second, third, *increase = figure.panels
    # fixed 0.03 over an error of 0.01 / (n + 1), for n = 0 and 3
    said = "normalized MSE against NMSE with fixed directions / NMSE. MxD: 0.01 at 3, 0.0025 at 12"
    assert said in first.alt and "MxD: 0.01 at 0.7" in second.alt and "MxD: 0.01 at 0.15" in third.alt
    assert increase[0].alt.startswith("cross-entropy increase, nats against NMSE with fixed")
    assert all('class="line' not in str(panel.drawing) for panel in figure.panels)
    assert [str(panel.drawing).count('data-source="faith') for panel in figure.panels] == [6] * 6
    cost = found["What faithfulness costs"].panels
    assert "MxD: 0.01 at 3,000, 0.04 at 12k" in cost[0].alt and "TC: 0.02 at 200, 0.05 at 500" in cost[1].alt


@pytest.fixture
def changed(tmp_path):
    """A run with a batch top-k transcoder whose results are changed before they are read."""

    def change(edit) -> dict:
        extra = {"block1-tc-batchk8": {"method": "transcoder", "sparsity": {"kind": "batch_topk", "k": 8}}}
        folder = fill(tmp_path / "changed", ks=(8,), extra=extra)
        file = folder / "faithfulness.json"
        found = json.loads(file.read_text())
        for name, result in found["results"].items():
            edit(name, result)
        file.write_text(json.dumps(found))
        return figures(folder)

    return change


def test_what_has_no_k_stands_at_its_l0(changed):
    def edit(name, result):
        result["blocks"]["1"]["l0"] = 700.0 if "batch" in name else 8.0

    figure = changed(edit)["All kinds of sparsity"]
    assert "TC (batch topk): 0.0025 at 700" in figure.panels[0].alt and "MxD: 0.01 at 8" in figure.panels[0].alt
    ticks = re.findall(r'class="t xl"[^>]*>([^<]*)', str(figure.panels[0].drawing))
    assert ticks == ["10", "20", "50", "100", "200", "500"]  # decades: a logarithmic axis


def test_what_has_no_account_is_no_point_among_decompositions(changed):
    def edit(name, result):
        if "mxd" in name:
            for key in ("nmse_fixed_directions", "routed_share", "interaction_share"):
                del result["blocks"]["1"][key]
        del result["flops"]

    found = changed(edit)
    figure = found["Faithfulness against decomposition"]
    assert "MxD" not in {key.label for key in figure.keys} and "MxD" not in figure.panels[0].alt
    assert [panel.alt.split(" against ")[1].split(".")[0] for panel in found["What faithfulness costs"].panels] == [
        "active parameters a token"
    ]


def test_bars_stand_on_zero_side_by_side_and_hang_below_it():
    """The heights are in proportion, and each is where its place is."""
    keys = list(slots(["a", "b"]).values())
    heights = ((0.0, 2.0), (1.0, -1.0), (4.0, 4.0))
    first = svg.Line(keys[0], [svg.Point(x, y, y - 0.5, y + 0.5, f"f#/{x:g}") for x, y in heights])
    second = svg.Line(Key("b", 3, "s", 1), [svg.Point(0.0, 1.0), svg.Point(1.0, math.nan), svg.Point(4.0, 1.0)])
    panel = svg.bars("t", svg.Axis("block"), svg.Axis("y"), [first, second])
    shapes = re.findall(
        r'<rect class="column( hollow)?" x="(.*?)%" y="(.*?)" width="(.*?)%" height="(.*?)"/>', panel.drawing
    )
    found = [(hollow, *map(float, numbers)) for hollow, *numbers in shapes]
    assert [bool(hollow) for hollow, *_ in found] == [False] * 3 + [True] * 2
    (_, x0, y0, width, h0), (_, x1, y1, _, h1), (_, x4, y4, _, h4), (_, b0, _, _, hb0), _ = found
    assert h4 == pytest.approx(2 * h0, abs=0.3) and h1 == pytest.approx(h0 / 2, abs=0.3) == pytest.approx(hb0, abs=0.3)
    assert y0 + h0 == pytest.approx(y1, abs=0.2) == pytest.approx(y4 + h4, abs=0.2)  # zero: -1 hangs from it
    assert (
        b0 == pytest.approx(x0 + width, abs=0.2)
        and 5 < width < (x1 - x0) / 2
        and x4 - x0 == pytest.approx(4 * (x1 - x0), abs=0.5)
    )
    assert panel.drawing.count('class="bar"') == 3 and 'data-source="f#/4"' in panel.drawing
    assert "a: 2 at 0, 4 at 4; b: 1 at 0, 1 at 4" in panel.alt
    assert "a, 1: -1 (f#/1)" in panel.drawing
    high = [svg.Point(0.0, 7.0), svg.Point(1.0, 8.0)]  # bars stand on zero, even where all are far from it
    drawn = svg.bars("t", svg.Axis("block"), svg.Axis("y"), [svg.Line(keys[0], high)]).drawing
    heights = [float(height) for height in re.findall(r'<rect .*? height="(.*?)"/>', drawn)]
    assert heights[0] == pytest.approx(7 / 8 * heights[1], abs=0.2)


def test_a_dot_has_a_bar_of_one_standard_error_to_both_sides_where_there_is_one():
    key, numbers = Key("a", 0, "o"), Node({"x": [2.0, 4.0, 3.0], "se": [1.0, math.inf, None]}, "f.json")
    drawn = [(key, svg.dot(numbers["x"][i], numbers.follow(f"se.{i}"))) for i in range(3)]
    panel = svg.dots("t", svg.Axis("x", low=0.0, high=4.0), [("row", drawn)])
    bars = re.findall(r'class="bar" x1="([\d.]+)%" x2="([\d.]+)%" y1="([\d.]+)" y2="([\d.]+)"', panel.drawing)
    assert [(float(a), float(b)) for a, b, *_ in bars] == [(25.0, 75.0)] and bars[0][2] == bars[0][3]
    marks = re.findall(r'<svg x="([\d.]+)%" y="([\d.]+)">', panel.drawing)
    assert [float(x) for x, _ in marks] == [50.0, 100.0, 75.0] and marks[0][1] == bars[0][2]
    wide = svg.dots("t", svg.Axis("x"), [("row", drawn[:1])])
    (ends,) = re.findall(r'class="bar" x1="([\d.]+)%" x2="([\d.]+)%"', wide.drawing)
    assert tuple(map(float, ends)) == (0.0, 100.0), "the axis holds the bar"
