"""The report's page and its Markdown twin: every number is the file's, nothing runs but the page's own script."""

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from command import mxd
from full_run import EVIL, fill, replacements

from mxd.common.errors import MxdError
from mxd.common.files import write_json
from mxd.metrics import RESULTS
from mxd.metrics.judged import STEERING
from mxd.report.page import SECTIONS, build_sections, write_report
from mxd.report.parts import NOTHING
from mxd.report.replacements import Replacement, usual
from mxd.report.run import read_run
from mxd.report.sections import (
    ablation,
    explaining,
    faithfulness,
    generation,
    masking,
    rewrite,
    similarity,
    steering,
    structure,
    toxicity,
    under_mask,
    units,
    whole,
)
from mxd.report.sections.generation import continuations, pieces
from mxd.report.source import Node
from mxd.report.tables import PLACES


class Reader(HTMLParser):
    """What a browser would make of the page: tags, cells by their sources, ids, and the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.cells: list[tuple[str, str]] = []
        self.scripts: list[tuple[dict, str]] = []
        self.styles: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open = [tag]

    def handle_data(self, data: str) -> None:
        if self.open == ["script"]:
            self.scripts.append((self.tags[-1][1], data))
        if self.open == ["style"]:
            self.styles.append(data)
        if self.open in (["td"], ["th"]):
            self.cells.append((self.tags[-1][1].get("data-source", ""), data))

    def handle_endtag(self, tag: str) -> None:
        self.open = []


@pytest.fixture(scope="module")
def page(run):
    return (run / "report.html").read_text()


def looked_up(run: Path, source: str):
    """Follow a source, file and JSON pointer, by hand."""
    file, _, pointer = source.partition("#")
    value = json.loads((run / file).read_text())
    for key in pointer.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


@pytest.mark.long
def test_every_number_in_a_table_is_the_one_its_source_holds(run, page):
    seen = 0
    for source, text in Reader(page).cells:
        if not source or "safetensors" in source:
            continue
        value = looked_up(run, source)
        shown = re.sub(r"[,%+]| #\d+$", "", text)
        if isinstance(value, float) and re.fullmatch(r"-?\d+(\.\d+)?", shown):
            scale = 100 if "%" in text else 1
            decimals = len(shown.partition(".")[2])
            assert float(shown) == pytest.approx(value * scale, abs=0.51 * 10**-decimals), source
            seen += 1
    assert seen > 150


@pytest.mark.long
def test_every_kind_of_result_has_its_section_and_only_then(run, tmp_path):
    titles = {
        "faithfulness": {"faithfulness"},
        "generation": {"generation"},
        "whole": {"whole"},
        "tuned": {"tuned"},
        "structure": {"structure"},
        "units": {"units", "similarity"},
        "probing": {"probing"},
        "steering": {"steering"},
        "masking": {"masking", "under_mask"},
        "purging": {"masking"},
        "explaining": {"explaining"},
        "toxicity": {"toxicity"},
        "ablation": {"ablation"},
        "subset": {"subset"},
        "rewrite": {"rewrite"},
    }
    everything = {section.id for section in build_sections(read_run(run))}
    assert everything == {"summary", "trained", "training"}.union(*titles.values())
    folder = tmp_path / "made-up"
    folder.mkdir()
    for path in run.glob("block*"):
        (folder / path.name).symlink_to(path)
    for kind in titles:
        (folder / f"{kind}.json").symlink_to(run / f"{kind}.json")
        found = read_run(folder)
        assert found.missing == [other for other in RESULTS if other != kind]
        assert {section.id for section in build_sections(found)} == {"summary", "trained"} | titles[kind]
        (folder / f"{kind}.json").unlink()


def test_a_section_file_or_a_named_number_belongs_to_the_page():
    """The page finds the section of a new question by its name; this finds one with another name."""
    files = Path(faithfulness.__file__).parent.glob("*.py")
    assert sorted(path.stem for path in files) == sorted(["__init__", *SECTIONS])


def test_text_from_outside_is_shown_and_is_no_markup(page):
    reader = Reader(page)
    assert {tag for tag, _ in reader.tags} >= {"table", "svg", "details", "del", "ins"}
    assert len([tag for tag, _ in reader.tags if tag == "script"]) == 2
    assert not [attributes for _, attributes in reader.tags if any(name.startswith("on") for name in attributes)]
    images = [attributes["src"] for tag, attributes in reader.tags if tag == "img"]
    assert images and all(src.startswith("data:image/png;base64,") for src in images)
    assert not [attributes for _, attributes in reader.tags if "style" in attributes]
    (data,) = [json.loads(text) for attributes, text in reader.scripts if attributes.get("type") == "application/json"]
    assert f" {EVIL}" in data["tokens"]


def test_the_policy_lets_only_the_pages_own_script_and_style_in(page):
    reader = Reader(page)
    (policy,) = [a["content"] for tag, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    (script,) = [text for attributes, text in reader.scripts if "type" not in attributes]
    for name, text in (("script", script), ("style", reader.styles[0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert not re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?:https?:)?//", page)


def test_what_is_drawn_belongs_to_a_line_of_its_legend(page):
    drawn = [figure for figure in re.findall(r'<figure class="drawn">.*?</figure>', page, re.S) if "<input" in figure]
    assert len(drawn) > 10
    for figure in drawn:
        tags = Reader(figure).tags
        series = {attributes["data-series"] for _, attributes in tags if "data-series" in attributes}
        assert series <= {attributes["value"] for tag, attributes in tags if tag == "input"} and series


def test_the_page_lists_its_files_with_their_hashes(run, page):
    for name in [*(f"{kind}.json" for kind in RESULTS), "metrics.jsonl", "config.yaml"]:
        assert name in page and hashlib.sha256((run / name).read_bytes()).hexdigest() in page
    assert "block1-mxd-k8/config.json" in page
    folded = "".join(re.findall(r"<details>.*?</details>", page, re.S))
    for once in (hashlib.sha256((run / "units.json").read_bytes()).hexdigest(), "torch 2"):
        assert once in folded and page.count(once) == folded.count(once)


def test_everything_is_named_for_those_who_do_not_see_it(page):
    reader = Reader(page)
    assert all(
        attributes.get("aria-label")
        for tag, attributes in reader.tags
        if tag == "svg" and "chart" in attributes.get("class", "")
    )
    assert all(attributes.get("alt") for tag, attributes in reader.tags if tag == "img")
    heads = [attributes for tag, attributes in reader.tags if tag == "th"]
    assert heads and all(attributes.get("scope") in ("col", "row") for attributes in heads)
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _ in reader.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and all(b - a <= 1 for a, b in pairwise(levels))


def test_markdown_has_the_same_tables_and_shows_text_literally(run, page):
    twin = (run / "report.md").read_text()
    assert "| MxD, k8 | 0.0100 | 0.100 | 3.5100 | +0.0100 | 0.0010 | +0.0200 | 90.0% |" in twin
    assert "<" not in twin and "&lt;script>" in twin
    for title in ("What was trained", "Faithfulness", "Sparse probing", "Masking", "Files"):
        assert f"## {title}\n" in twin
    rows = [line for line in twin.splitlines() if line.startswith("|")]
    assert len(rows) > 50 and all(line.endswith("|") for line in rows)


def test_the_units_that_lead_at_a_prompt_stand_with_strength_and_rate(run, page):
    shown = {text: source for source, text in Reader(page).cells if re.fullmatch(r"structure.*/units", source)}
    assert set(shown) == {"#0 1.5 (12.5%),\n#1 0.5 (25.0%)", "#1 0.5 (25.0%)"}
    assert all(looked_up(run, source)[0]["unit"] == int(text[1]) for text, source in shown.items())
    assert r"\#0 1.5 (12.5%), \#1 0.5 (25.0%)" in (run / "report.md").read_text()


def test_units_that_lead_token_by_token_share_a_colour_where_they_are_the_same(run, page):
    table, *others = [part for part in structure.section(read_run(run)).parts if part.kind == "table" and part.folded]
    assert others and [column.title for column in table.columns] == ["token", *PLACES, "prompt"]
    assert [[cell.text for cell in row] for row in table.rows[:4]] == [
        [f"the {EVIL}", "#7", "#3", "#2", "#5", f"p0 {EVIL}"],
        ["", "#7", "#2", "–", "–", ""],
        ["\n", "–", "–", "–", "–", ""],
        ["", "#7", "#2", "–", "–", f"p1 {EVIL}"],
    ]
    colours = {(cell.text, cell.colour) for row in table.rows for cell in row[1:5]}
    assert colours == {("#7", 0), ("#2", 1), ("#3", None), ("#5", None), ("–", None)}
    for row in table.rows:
        assert all(looked_up(run, cell.source) == int(cell.text[1:]) for cell in row[1:5] if cell.text != "–")
    drawn = re.findall(
        r'<td class="dyed s(\d+)" data-source="(structure[^"]*)" title="[^"]*"><span>#(\d+)</span>', page
    )
    assert {(colour, unit) for colour, _, unit in drawn} == {("0", "7"), ("1", "2")}
    assert all(looked_up(run, source) == int(unit) for _, source, unit in drawn)


def test_purging_stands_with_its_errors_and_the_units_that_follow_the_score(run):
    changes, followers, scatter = masking.section(read_run(run)).parts[-3:]
    assert "#0, block 1, r = +0.50" in scatter.panels[0].title and "active at 12.5%" in scatter.panels[0].drawing
    assert "mean 0.25" in changes.caption and len(changes.rows) == 12
    texts = [[cell.text for cell in row] for row in changes.rows]
    control = ["+0.0625 ± 0.0100", "+0.0625 ± 0.0200"]
    assert texts[0] == ["MxD, k8", "0.2", "3", "2.5%", "4", "+0.1250 ± 0.0100", "+0.5000 ± 0.0200", *control]
    assert texts[1][3:7] == ["7.5%", "12", "+0.2500 ± 0.0300", "+0.7500"]  # an infinite error says nothing
    assert [cell.text for cell in followers.rows[2]] == ["3", "–", "(#2, block 1: +0.25, +0.75)", "–"]
    for cell in changes.rows[1][1:7]:
        assert looked_up(run, cell.source) is not None
    twin = (run / "report.md").read_text()
    assert "+0.1250 ± 0.0100" in twin and r"\#1, block 1: +0.38, +0.75" in twin


def test_dropped_units_stand_beside_random_coefficients(run):
    means, by_units, histograms, *leading = ablation.section(read_run(run)).parts
    assert [cell.text for cell in means.rows[0]] == [
        *("MxD, k8", "120", "62.5%", "3", "2", "0.354 ± 0.250", "50.0%", "1", "0.000"),
        *("2", "0.938 ± 0.250", "6.2%"),
    ]
    assert [panel.title for panel in by_units.panels] == ["k8", "k32"]
    assert {key.label for key in by_units.keys} >= {"MxD", "MxD (random coefficients)"}
    assert "MxD: 0.354 at 120" in by_units.panels[0].alt
    assert "MxD (random coefficients): 0.938 at 120" in by_units.panels[0].alt
    assert len(histograms.panels) == len(leading) == 3
    assert histograms.panels[0].title == "MxD, k32, 120 units"
    assert [[cell.text for cell in row] for row in leading[0].rows] == [
        ["#3", "25.000%", "0.000", "sport 100.0%"],
        ["(#4)", "25.000%", "0.707", f"sport 50.0%, law {EVIL} 50.0%"],
    ]


def test_rewriting_shows_every_cell_before_and_after_and_the_gain_over_blind(run):
    cells, gains, separation, *tables, tried = rewrite.section(read_run(run)).parts
    assert len(cells.panels) == len(tables) == len(tried.panels) == 3
    assert [key.label for key in cells.keys] == ["unchanged", "blind", "by expert", "by contrast"]
    assert f"» sport {EVIL}, long: unchanged 25%, blind 38%, by expert 50%, by contrast 75%" in cells.panels[0].alt
    assert "» law" not in cells.panels[0].alt
    assert [cell.text for cell in gains.rows[1]] == ["MxD, k32", *["+0.750 ± 0.125"] * 4, "0.750"]
    assert [cell.text for cell in separation.rows[0]][1:8] == [*("0.750", "0.625") * 2, "0.500", "0.500", "0.625"]
    assert separation.rows[0][-1].text.endswith("present") and separation.rows[1][-1].text.endswith("absent")
    expert = tables[0].rows[2]
    assert [cell.text for cell in expert[:4]] == ["by expert", "0.125, 0.25", "+0.250 ± 0.062", "25.0% ± 6.2%"]
    assert [cell.text for cell in expert[-3:]] == ["50.0% ± 6.2%", "75.0% ± 3.1%", "50.0% ± 12.5%"]
    assert looked_up(run, expert[-1].source) == 0.5
    assert "law, long: 3 + 3 + 6" in tables[0].caption
    assert len(tried.keys) == 5 and "by contrast, random texts" in tried.panels[0].alt


@pytest.mark.long
def test_thousands_of_units_fit_into_a_budget_and_the_page_says_what_it_leaves_out(tmp_path, monkeypatch):
    folder = fill(tmp_path / "big", ks=(32,))
    document = json.loads((folder / "units.json").read_text())
    context = {"tokens": [f"word{i} " for i in range(30)], "activations": [0.5] * 30, "at": 20, "value": 3.0}
    interval = {"low": 0.0, "high": 3.0, "contexts": [context] * 2}
    for result in document["results"].values():
        adds = next(iter(result["units"].values()))  # what it promotes
        one = adds | {"rate": 0.1, "mean": 1.0, "max": 3.0, "intervals": [interval] * 6}
        result |= {"rates": [0.1] * 40_000, "units": {str(n): one for n in range(80)}}
    (folder / "units.json").write_text(json.dumps(document))
    monkeypatch.setattr(units, "BUDGET", 90_000)
    page = write_report(folder)[0]
    assert page.stat().st_size < 5_000_000 - 2_400_000
    (text,) = [t for a, t in Reader(page.read_text()).scripts if a.get("type") == "application/json"]
    for one in json.loads(text)["sets"]:
        assert one["count"] == 40_000 and one["given"] == 80
        assert 20 < len(one["units"]) < 80 and len(json.dumps(one["units"], separators=(",", ":"))) < 30_000
        assert len(one["listed"]) == len(one["rates"]) == len(one["maxima"]) == units.LISTED // 3
        assert {int(n) for n in one["units"]} <= set(one["listed"])


@pytest.mark.long
def test_other_tools_numbers_and_promoted_tokens_are_folded_tables(run):
    (table,) = [p for p in faithfulness.section(read_run(run)).parts if p.kind == "table" and p.folded]
    head = [column.title for column in table.columns]
    for title, text, source in (
        ("SAELens EV", "0.900", "/blocks/1/conventions/saelens/explained_variance"),
        ("SAELens CE score", "75.0%", "/conventions/saelens/ce_loss_score"),
        ("SAELens KL score", "–", "/conventions/saelens/kl_div_score"),
        ("sparsify FVU", "0.200", "/blocks/1/conventions/sparsify/fvu"),
    ):
        cell = table.rows[0][head.index(title)]
        assert cell.text == text and cell.source.endswith(source)
    (table,) = [p for p in units.section(read_run(run)).parts if p.kind == "table" and p.folded]
    assert "LayerNorm" in table.caption and "is centred" in table.caption and "By chance" not in table.caption
    assert [cell.text for cell in table.rows[0][3:]] == ["4.0", "0.62"]
    assert table.rows[0][1].text.startswith("·up0 ") and "·down0" in table.rows[0][2].text
    page = (run / "report.html").read_text()
    assert page.count("<details><summary>") >= 2 and "Peak by chance: 3.5" in page


@pytest.mark.long
def test_pages_of_results_without_them_have_neither(run, tmp_path):
    folder = tmp_path / "before"
    shutil.copytree(run, folder)
    for name in ("faithfulness", "units"):
        document = json.loads((folder / f"{name}.json").read_text())
        for result in document["results"].values():
            for one in (result, *result.get("blocks", {}).values()):
                one.pop("conventions", None)
            result.pop("logits", None)
            for unit in result.get("units", {}).values():
                for key in ("promoted", "suppressed", "peak", "cosine", "activations"):
                    unit.pop(key)
        (folder / f"{name}.json").write_text(json.dumps(document))
    shown = read_run(folder)
    parts = [*faithfulness.section(shown).parts, *units.section(shown).parts]
    assert not [p for p in parts if p.kind == "table" and p.folded]
    assert parts[-1].data["sets"][0]["chance"] is None and parts[-1].data["sets"][0]["units"]["0"][1] is None


def test_a_context_is_cut_around_its_token_and_keeps_activations():
    activations = [0.0] * 100
    activations[50], activations[49], activations[48] = 9.0, 4.4, 0.01
    value = {"tokens": [f"t{i}" for i in range(100)], "activations": activations, "at": 50, "value": 9.0}
    words: dict[str, int] = {}
    at, activation, tokens, values = units._context(Node(value, "units.json"), words)
    names = list(words)
    assert names[tokens[at]] == "t50" and activation == 9.0
    assert [names[t] for t in tokens] == [f"t{i}" for i in range(36, 59)]
    assert values[at - 3 : at + 2] == [0, 0.01, 4.4, 9.0, 0]


def test_variants_of_a_method_are_told_apart_by_what_differs(tmp_path):
    encoder = {"method": "mxd", "hidden": 16, "glu": False}
    extra = {
        "block1-mxd-k32-v2": {**encoder, "activation": "gelu", "sparsity": {"kind": "topk", "k": 32}},
        "block1-mxd-randomk32": {**encoder, "activation": "relu", "sparsity": {"kind": "random_k", "k": 32}},
        "block1-mxd-l1-0.001": {**encoder, "activation": "relu", "sparsity": {"kind": "relu_l1", "l1": 1e-3}},
        "block1-cp-mumoe-r2-k32": {**replacements(32)["block1-cp-mumoe-r4-k32"], "rank": 2},
    }
    run = read_run(fill(tmp_path / "v", extra=extra))
    said = {name: replacement.line for name, replacement in run.replacements.items()}
    assert said["block1-mxd-k32-v2"] == "MxD (topk, gelu)"
    assert said["block1-mxd-k8"] == said["block1-mxd-k32"] == "MxD (topk, relu)"
    assert said["block1-mxd-randomk32"] == "MxD (random k, relu)"
    assert said["block1-cp-mumoe-r2-k32"] == "CP-muMoE (rank 2)"
    assert said["block1-tc-k32"] == "TC"
    captions = [block.caption for block in faithfulness.section(run).parts]
    for figure in ("After figures 10 and 3", "After figure 18", "After figure 19", "After figure 12"):
        assert any(figure in caption for caption in captions), figure


def test_figures_are_after_the_papers_and_not_as_they_are(run):
    """Tokens, penalty or protocol differ from the paper's in every one; so does what a judge is asked."""
    twin = " ".join((run / "report.md").read_text().split())
    named = re.findall(r"(\w+) figures? \d+", twin)
    assert len(named) > 8 and set(named) == {"After"}
    assert "asked with a paraphrase of the paper's prompt" in twin


def test_judges_have_a_point_for_each_method_a_table_each_and_their_agreement(run):
    figure, said, each, agreed = steering.section(read_run(run)).parts[:4]
    alt = figure.panels[0].alt
    assert "MxD: 0.75 at 0.625; MxD (not steered): 0.875 at 0.75; TC: 0 at 0.625" in alt
    assert [column.title for column in said.columns][2:6] == [m.title for m in STEERING[:4]]
    assert [cell.text for cell in said.rows[0][2:6]] == ["0.625 ± 0.125", "0.000", "0.750", "0.875"]
    assert len(each.rows) == 2 * len(agreed.rows) and each.rows[1][1].text == "another"
    texts = [cell.text for cell in agreed.rows[0][2:]]
    assert texts == ["-0.250 ± 0.125", NOTHING, "0.88", "-0.250 ± 0.125", "+0.75", "0.88"]


def test_explanations_are_shown_with_what_they_are_worth_beyond_another_units(run):
    figure, table, *said = explaining.section(read_run(run)).parts
    panel, *_ = figure.panels  # one for each layer
    assert "the unit's explanation 0.5, another unit's 0.375." in panel.alt
    assert panel.drawing.count('class="bar"') == 2, "both have a standard error"
    assert [column.title for column in table.columns][2:6] == ["units", "beyond it", "score", "score, other unit"]
    assert [cell.text for cell in table.rows[0][2:]] == [
        *("2", "+0.125", "+0.500 ± 0.250", "+0.375 ± 0.250"),
        *("75.0% ± 12.5%", "24", "1"),
    ]
    assert len(table.rows) == 3 and {part.kind for part in said} == {"samples"} and len(said) == 2 * 3


def test_a_masks_own_domain_stands_beside_the_others_and_random_units(run):
    table, figure, *_ = masking.section(read_run(run)).parts
    alt = figure.panels[0].alt
    assert "sport: own domain 0.5, mean of the others -0.01, own domain, random units 0.125;" in alt
    assert alt.endswith(f"own domain 0.25, mean of the others {NOTHING}, own domain, random units 0.0625.")
    assert [[cell.shade for cell in row[2:]] for row in table.rows] == [[9, 0], [0, 4]]
    assert [[cell.marked for cell in row[2:]] for row in table.rows] == [[True, False], [False, True]]


def test_each_mask_has_its_own_numbers(run):
    _, table, *_ = toxicity.section(read_run(run)).parts
    ways = [(row[1].text, row[2].text, "/".join(row[5].source.split("/")[-4:-1])) for row in table.rows[:6]]
    assert [count for _, count, _ in ways] == [NOTHING, NOTHING, "3", "3", "9", "9"]
    assert ways[2][::2] == ("correlation 0.2", "masked/0/toxic")
    assert ways[5][::2] == ("as many as 0.1, random", "control/1/toxic")
    left, *_ = under_mask.section(read_run(run)).parts
    assert [row[2].text for row in left.rows[:2]] == ["+0.1250 ± 0.0625", "+0.2500"]


def test_dead_and_shared_units_are_counted_and_the_busiest_are_listed(run):
    result = read_run(run).results("units")[0][1]
    _, table, *_ = units.section(read_run(run)).parts
    share = result["dead"].number() / len(result["rates"].value)
    assert [cell.text for cell in table.rows[0][2:5]] == ["1", f"{share:.1%}", "3 (99%)"] and share < 0.01
    assert units._listed(Node({"rates": [0.1, 0.5, 0.3, 0.9]}, "f.json"), {0}, 3) == [0, 1, 3]


def test_shares_are_those_after_so_many_tokens(run):
    _, table, *_ = generation.section(read_run(run)).parts
    shares = dict(zip([column.title for column in table.columns], table.rows[0], strict=True))
    assert {n: shares[f"n = {n}"].text for n in (1, 2, 8, 32)} == {1: "97.0%", 2: "94.1%", 8: "78.4%", 32: "37.7%"}


def test_the_first_continuations_are_shown_each_on_one_line():
    told = {"spliced": [2], "base_tokens": ["one\n", "two"], "spliced_tokens": ["one\n", "three"]}
    examples = [{"prompt": [n], "base": [1]} | told for n in range(5)]
    (part,) = continuations([(Replacement("x", "X"), Node(examples, "f.json"))], 3, pieces, "And so on.")
    assert part.caption == "The first prompts (3). And so on." and [diff.prompt for diff in part.diffs] == [*"012"]
    for diff in part.diffs:
        ((label, shown, _),) = diff.rows
        assert (label, diff.base) == ("X", "one↵two")
        assert [(piece.how, piece.text) for piece in shown] == [
            ("same", "one↵"),
            ("removed", "two"),
            ("added", "three"),
        ]


def test_the_frontier_draws_the_numbers_of_the_file(run):
    figure = faithfulness.section(read_run(run)).parts[0]
    assert [key.label for key in figure.keys] == ["MxD", "TC", "CP-muMoE"]
    assert "normalized MSE against K. MxD: 0.01 at 8, 0.0025 at 32; TC: 0.005 at 8" in figure.panels[0].alt
    ends = {n: 0.01 * (n + 1) for n in range(6)}
    assert f"MxD: {ends[0]:.3g} at 8, {ends[3]:.3g} at 32" in figure.panels[1].alt
    assert figure.panels[1].drawing.count("data-source") == 6


def test_the_frontier_shows_the_floor_at_every_k(tmp_path):
    """A linear map has no K: a level line below or above the others, and no place among penalties."""
    run = read_run(fill(tmp_path / "floor", extra={"block1-linear": {"method": "linear", "num_units": 1}}))
    captions = [block.caption for block in faithfulness.section(run).parts]
    assert not any("After figure 18" in caption for caption in captions)
    figure = faithfulness.section(run).parts[0]
    assert [key.label for key in figure.keys] == ["MxD", "TC", "CP-muMoE", "Linear"]
    level = f"{0.01 / 7:.3g}"
    assert f"Linear: {level} at 8, {level} at 32" in figure.panels[0].alt
    assert "Level lines" in figure.caption
    one = read_run(fill(tmp_path / "one", ks=(8,), extra={"block1-linear": {"method": "linear", "num_units": 1}}))
    assert f"Linear: {0.01 / 4:.3g} at 8." in faithfulness.section(one).parts[0].panels[0].alt


def test_of_several_k_units_are_shown_at_the_one_nearest_to_32(tmp_path):
    run = read_run(fill(tmp_path / "k", ks=(4, 64, 100)))
    assert {r.k for r, _ in usual(run.results("generation"))} == {64}
    assert len(run.results("generation")) == 9


def test_the_whole_model_is_drawn_by_number_of_blocks_and_by_block(run):
    parts = whole.section(read_run(run)).parts
    by_number, by_block = (part for part in parts if part.kind == "figure")
    assert [panel.title for panel in by_number.panels] == ["mxd-k8", "mxd-k32"]
    assert [key.label for key in by_number.keys] == ["from the bottom", "from the top", "random order"]
    alt, drawing = by_number.panels[0].alt, by_number.panels[0].drawing
    assert drawing.count('class="interval"') == 1 and drawing.count('class="bar"') == 2
    assert "from the bottom: 0 at 1, 0.02 at 3; from the top: 0.02 at 1, 0.02 at 3; random order: 0.07 at 1" in alt
    first, errors, *_ = by_block.panels
    assert "replaced alone: 0.0625 at 1, 0.188 at 4" in first.alt and "won back: 0.125 at 1, 0.375 at 4" in first.alt
    assert "base inputs: 0.01 at 1, 0.01 at 4; spliced inputs: 0.02 at 1, 0.02 at 4" in errors.alt
    numbers = next(part for part in parts if part.kind == "table" and len(part.rows) == 6)
    assert [cell.text for cell in numbers.rows[0]] == [
        "mxd-k8, from the bottom", "+0.0000 ± 0.0010", "+0.0100 ± 0.0010", "+0.0200 ± 0.0010",
    ]  # fmt: skip
    assert [cell.text for cell in numbers.rows[2]][1:] == ["+0.0700 (+0.0600 to +0.0800)"] * 3
    (told,) = (part for part in parts if part.kind == "diffs")
    (_, shown, source), *_ = told.diffs[0].rows
    assert [(p.how, p.text) for p in shown] == [("same", " the"), ("added", f" dog{EVIL} sat")]
    assert source == "whole.json#/results/mxd-k8/generation/examples/0"


def test_a_diff_gives_back_both_texts():
    rng = np.random.default_rng(0)
    for _ in range(50):
        base, spliced = ([f" w{n}" for n in rng.integers(0, 4, 12)] for _ in range(2))
        found = list(pieces(base, spliced))
        assert "".join(p.text for p in found if p.how != "added") == "".join(base)
        assert "".join(p.text for p in found if p.how != "removed") == "".join(spliced)


def test_similarity_is_the_cosine_of_the_busiest_units_gate_rows(run):
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(5, 8))
    rows[3] = 2 * rows[0]
    similar = similarity.cosines(rows)
    assert similar[1, 2] == pytest.approx(rows[1] @ rows[2] / np.linalg.norm(rows[1]) / np.linalg.norm(rows[2]))
    assert similarity.closest(similar)[0] == (0, 3)
    order = similarity.chain(similar)
    assert sorted(order) == list(range(5)) and order[:2] == [0, 3]
    rates = [0.5, 0.0, 0.9, 0.1]
    assert similarity.busiest(Node(rates, "units.json")) == [2, 0, 3]
    assert len(similarity.section(read_run(run)).parts[0].pictures) == 3


def test_results_without_layers_make_a_report_and_layers_without_results_do(run, tmp_path):
    alone = tmp_path / "results"
    alone.mkdir()
    (alone / "faithfulness.json").write_bytes((run / "faithfulness.json").read_bytes())
    assert "MxD (made-up), k8, block 1" in write_report(alone)[1].read_text()
    page, _ = write_report(run / "block1-mxd-k8", tmp_path / "deep" / "one.html")
    assert "What was trained" in page.read_text()


def test_several_layers_at_once_are_shown_beside_the_others(run, tmp_path):
    folder = tmp_path / "made-up"
    folder.mkdir()
    for path in run.iterdir():
        (folder / path.name).symlink_to(path)
    document = json.loads((run / "faithfulness.json").read_text())
    result = next(iter(document["results"].values()))
    result |= {"blocks": {"1": result["blocks"]["1"], "2": result["blocks"]["1"]}}
    result["replacements"] *= 2
    write_json(folder / "faithfulness-together.json", document | {"results": {"together": result}})
    shown = [b for b in faithfulness.section(read_run(folder)).parts if b.kind == "table"]
    assert [(table.rows[-1][0].text, len(table.rows)) for table in shown] == [("together: 2 layers at once", 7)] * 4


def test_scores_of_lm_eval_stand_beside_the_base_models(run, tmp_path):
    folder = tmp_path / "made-up"
    folder.mkdir()
    for path in run.glob("block*"):
        (folder / path.name).symlink_to(path)
    document = json.loads((run / "faithfulness.json").read_text())
    name = next(iter(document["results"]))
    base, spliced = ({"arc": {"acc,none": acc, "acc_stderr,none": 0.0125, "alias": 1}} for acc in (0.5, 0.4375))
    scores = {"version": "0.4.9", "limit": 10, "base": base, "spliced": {name: spliced}}
    write_json(folder / "faithfulness.json", document | {"lm_eval": scores})
    page, twin = write_report(folder)
    assert "| arc: acc | 0.5000 ± 0.0125 | 0.4375 ± 0.0125 |" in twin.read_text()
    shown = dict(Reader(page.read_text()).cells)
    assert shown["faithfulness.json#/lm_eval/base/arc/acc,none"].startswith("0.5000")


LINE = b'{"replacement": "a", "normalized_mse": 0.5, "tokens": 64}\n'


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("units.json", "{", "cannot read .*units.json"),
        ("units.json", "[]", "does not hold a JSON object"),
        (
            "probing.json",
            '{"results": {"a": {"set": {"level": "sample"}}}}',
            r"probing.json#/results/a/set has no 'classes'",
        ),
        ("masking.json", '{"results": {"a": {"domains": ["x"], "units": {}, "matrix": [["y"]]}}}', "is not a number"),
        ("generation.json", '{"results": []}', "generation.json#/results is not an object"),
        ("metrics.jsonl", '{"step": 1}\n', "metrics.jsonl, line 1"),
        ("metrics.jsonl", LINE + b"\xff" + LINE, "metrics.jsonl, line 2"),
        ("metrics.jsonl", LINE + b"[" * 100_000, "metrics.jsonl, line 2"),
        ("metrics.jsonl", LINE.replace(b"64", b"1e999"), "metrics.jsonl, line 1"),
        ("metrics.jsonl", LINE.replace(b"0.5", b"9" * 400), "metrics.jsonl, line 1"),
        ("metrics.jsonl", LINE.replace(b'"a"', b"null"), "metrics.jsonl, line 1"),
    ],
    ids=range(11),
)
def test_a_damaged_file_is_named(tmp_path, file, text, said):
    (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(MxdError, match=said):
        write_report(tmp_path)


def test_the_command_writes_both_files(run, tmp_path, capsys):
    code, out, _ = mxd(capsys, "report", run / "block1-tc-k8", "--out", tmp_path / "r.html")
    assert code == 0 and f"page:     {tmp_path / 'r.html'}" in out
    assert (tmp_path / "r.md").read_text().startswith("# block1-tc-k8: replacements for MLPs of made-up")


def test_nothing_to_report_is_said(tmp_path):
    with pytest.raises(MxdError, match="nothing to report"):
        write_report(tmp_path)
    with pytest.raises(MxdError, match="no run at"):
        write_report(tmp_path / "absent")
    with pytest.raises(MxdError, match=r"ends in .html"):
        write_report(tmp_path, tmp_path / "out.txt")


def test_pointers_follow_rfc_6901():
    node = Node({"a/b": {"c~d": [5]}}, "x.json")
    assert node["a/b"]["c~d"][0].source == "x.json#/a~1b/c~0d/0"
    assert node.get("absent") is None
