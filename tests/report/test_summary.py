"""The page's first words: three sentences from the run's own numbers, and what is missing is said to be missing."""

import math

import pytest
from full_run import evaluated, layer, replaced_whole

from mxd.common.files import write_json
from mxd.layers.sparsity import AlwaysConfig
from mxd.report.markdown import as_markdown
from mxd.report.page import build_sections
from mxd.report.run import Run, read_run
from mxd.report.sections.summary import listed, section
from mxd.report.source import Node


def run(alone=None, whole=None, folder=None):
    """A run with these results by their names, and with the layers of a folder, if one is given."""
    found = read_run(folder) if folder else Run(folder)
    for kind, results in (("faithfulness", alone), ("whole", whole)):
        if results:
            found.documents[kind] = [Node({"results": results}, f"{kind}.json")]
    return found


def answers(found):
    """The three sentences as text, and their numbers."""
    (part,) = section(found).parts
    texts = ["".join(w if isinstance(w, str) else w.text for w in words) for _, words in part.answers]
    return texts, [w for _, words in part.answers for w in words if not isinstance(w, str)]


def splice(increase, error=0.001, k=8, **site):
    result = evaluated(None, f"block1-mxd-k{k}", 0) | {"ce_increase": increase, "ce_increase_se": error}
    result["blocks"]["1"] |= site
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Untrained layers of blocks 1 and 2."""
    folder = tmp_path_factory.mktemp("runs") / "two"
    for block in (1, 2):
        layer(folder, f"block{block}-tc-k8", {"method": "transcoder", "sparsity": {"kind": "topk", "k": 8}}, block)
    return folder


def test_the_headline_is_what_full_splices_add_from_the_least_to_the_most():
    found = run({"r/b": splice(0.25, k=32), "r/a": splice(0.125), "r/c": splice(0.5, k=32)})
    texts, cells = answers(found)
    assert texts[1].startswith(
        "Spliced in one at a time, at every position, they add from +0.1250 ± 0.0010 (MxD (r), k8,"
    )
    assert texts[1].endswith(
        " to +0.5000 ± 0.0010 (MxD (r), k32, block 1) nats to the next-token loss of 3.5000, on 1,000 held-out tokens; "
        "the MLP left out altogether (zero-ablated) adds +1.5000."
    )
    marked = [cell for cell in cells if cell.marked]
    assert [cell.text for cell in marked] == ["+0.1250 ± 0.0010", "+0.5000 ± 0.0010", "0.70"]
    assert [cell.source for cell in marked[:2]] == [f"faithfulness.json#/results/r~1{n}/ce_increase" for n in "ac"]
    assert marked[2].source == "faithfulness.json#/results/r~1a/blocks/1/routed_share"
    assert f"- **How faithful is it?** {texts[1][:40]}" in as_markdown(section(found).parts[0])


def test_where_routing_is_near_0_it_is_called_a_dense_mlp_in_disguise():
    texts, _ = answers(run({"a": splice(0.1, routed_share=0.01)}))
    assert texts[1].startswith("Spliced in at every position, it adds +0.1000")
    assert texts[2].startswith("Routing adds 0.01 of the") and ": a dense MLP in disguise;" in texts[2]
    plain, _ = answers(run({"a": splice(0.1, routed_share=0.25)}))
    assert plain[2].startswith("Routing adds 0.25 of the") and "disguise" not in plain[2]
    several = {"x/1": splice(0.1), "y/2": splice(-0.2, routed_share=0.0), "z/3": splice(0.3, shared_share=0.99)}
    for result, divergence in zip(several.values(), (0.25, 0.5, 0.75), strict=True):
        result["kl"] = divergence  # the least increase of the loss is not the most faithful
    texts, _ = answers(run(several))
    assert texts[2].startswith("In the most faithful (MxD (x), k8, block 1, by KL) routing adds 0.70 of")
    broken = {"x/1": splice(0.1) | {"kl": math.nan}, "y/2": splice(0.2) | {"kl": 0.5}}
    assert answers(run(broken))[0][2].startswith("In the most faithful (MxD (y)")
    assert texts[2].endswith("; 2 of the 3 are dense MLPs in disguise (MxD (y), k8, block 1; MxD (z), k8, block 1).")


def test_the_least_comes_first_whatever_its_k_and_what_chooses_nothing_does_not_decompose():
    texts, _ = answers(run({"r/a": splice(0.5), "r/b": splice(0.125, k=32)}))
    assert " from +0.1250 ± 0.0010 (MxD (r), k32, block 1) to +0.5000 ± 0.0010 (MxD (r), k8, block 1) nats" in texts[1]
    floor = splice(0.0625, routed_share=0.0)
    floor["replacements"][0] |= {"method": "Linear", "sparsity": AlwaysConfig().slug}
    texts, _ = answers(run({"linear": floor, "r/a": splice(0.125)}))
    assert "from +0.0625 ± 0.0010 (Linear" in texts[1] and texts[2].startswith("Routing adds 0.70 of")


def test_layers_together_come_first_and_their_routing_is_the_mean_over_blocks():
    together = replaced_whole(None, "block1-mxd-k8", 0)
    for share, block in zip((0.25, 0.5, 0.75), together["blocks"].values(), strict=True):
        block["routed_share"] = share
    texts, cells = answers(run({"r/a": splice(0.125)}, {"mxd-k8": together}))
    assert texts[1].startswith("All at once, at every position (3 layers), they add +0.5000 ± 0.0010 nats to")
    assert texts[1].endswith("; one at a time +0.1250 ± 0.0010.")
    assert texts[2].startswith("Routing adds 0.50 of")
    assert cells[0].source == "whole.json#/results/mxd-k8/ce_increase"


def test_what_is_missing_is_said_to_be_missing(folder):
    texts, _ = answers(run(folder=folder))
    assert texts[0] == "The MLPs of blocks 1, 2 of made-up, by 2 layers (TC), trained on 409,600 tokens."
    assert texts[1] == "The CE increase of the full splice: not measured (mxd evaluate measures it)."
    assert texts[2] == "What routing adds: not measured (mxd evaluate measures it)."
    texts, _ = answers(run({"two/block1-tc-k8": splice(0.125, float("inf"))}, folder=folder))
    assert "it adds +0.1250 (standard error unknown) nats" in texts[1]
    assert texts[1].endswith("; all blocks at once: not measured (mxd whole); 1 of 2 layers alone: not measured.")
    result = splice(0.125)
    del result["blocks"]["1"]["routed_share"], result["blocks"]["1"]["interaction_share"], result["ce_zero"]
    texts, _ = answers(run({"r/a": result, "r/b": splice(None)}))
    assert texts[1].endswith("held-out tokens.") and texts[1].count("±") == 1
    assert texts[2] == "Routing: not measured."


def test_numbers_are_listed_as_a_range_where_none_is_left_out():
    assert [listed(n) for n in ([4], [1, 2], [0, 1, 2, 3], [3, 9, 21])] == ["4", "1, 2", "0 to 3", "3, 9, 21"]


def test_answers_in_a_layers_folder_reach_the_page_of_its_run(folder):
    """They stand in place of the run's own, and the page says so."""
    name, other = "two/block1-tc-k8", "two/block2-tc-k8"
    own = folder / "block1-tc-k8" / "faithfulness.json"
    document = {"model": "made-up", "data": {"source": "s", "split": "validation"}}
    write_json(own, document | {"results": {name: splice(0.25), other: splice(0.75)}})

    def found():
        shown = read_run(folder)
        numbers = {r.name: (n["ce_increase"].number(), n.file) for r, n in shown.results("faithfulness")}
        (part,) = [s.parts for s in build_sections(shown) if s.id == "faithfulness"]
        return numbers, getattr(part[-1], "text", ""), [file.name for file in shown.files]

    numbers, said, files = found()
    file = "block1-tc-k8/faithfulness.json"
    assert numbers == {"block1-tc-k8": (0.25, file), "block2-tc-k8": (0.75, file)}
    assert not said and file in files
    write_json(folder / "faithfulness.json", document | {"results": {name: splice(0.5), other: splice(1.0)}})
    second = "block2-tc-k8/faithfulness.json"
    write_json(folder / second, document | {"results": {other: splice(0.125), name: splice(2.0)}})
    numbers, said, _ = found()
    assert numbers == {"block1-tc-k8": (0.25, file), "block2-tc-k8": (0.125, second)}
    assert said == f"Measured apart, perhaps on other text: {file}, {second}."
    assert read_run(folder / "block1-tc-k8").results("faithfulness")[0][0].name == "block1-tc-k8"
