"""docs/layers.md describes every layer and every kind of sparsity, and what it says of them is so."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from variants import SPARSITIES as EXAMPLES
from variants import parse_sparsity

import mxd
from mxd.cli.entry import app
from mxd.config import TrainingConfig, parse_config
from mxd.layers import LAYERS, MLPShape, size
from mxd.layers.sparsity import SPARSITIES
from mxd.planning.flops import token_flops
from mxd.share.formats import FORMATS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "layers.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
GPT2 = MLPShape(768, 768, 3072, "gelu_tanh", False)
TINY = MLPShape(64, 64, 256, "gelu_tanh", False)
LETTERS = {
    "H": "hidden",
    "N": "num_units",
    "R": "rank",
    "R1": "rank_1",
    "R2": "rank_2",
    "R3": "rank_3",
    "RN": "rank_units",
    "RI": "rank_in",
    "RO": "rank_out",
    "e": "encoder_params",
    "m": "expert_width",
    "n": "keys",
    "h": "heads",
    "r": "total_rank",
}


def section(title):
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title):
    """The cells of the table in a section, without its header."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def sized(entry, shape=GPT2):
    """The configs that an entry of ``replacements`` makes for a model."""
    return [size(config.resolve(shape)) for config in parse_config({"replacements": [entry]}).replacements]


def value(formula, config, **others):
    """A formula of the page, in which neighbours are multiplied, with other numbers in place of the config's."""
    numbers = {letter: getattr(config, name, None) for letter, name in LETTERS.items()}
    if config.method == "peer":
        numbers["n"] = config.num_units**0.5
    numbers |= {"d": config.d_in, "o": config.d_out, "k": getattr(config.sparsity, "k", None)}
    numbers |= {"K": numbers["k"]} | others
    code = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula.strip("`")).replace("^", "**")
    return eval(code, {"__builtins__": {}}, numbers)


COSTS = rows("Parameters and cost")
KINDS = {row[0].strip("`"): row[1:] for row in rows("Kinds of sparsity")}
SNIPPETS = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.M | re.S)
ENTRIES = [entry for text in SNIPPETS if isinstance(listed := yaml.safe_load(text), list) for entry in listed]


def test_every_layer_has_a_section_an_example_and_a_row():
    headings = " ".join(re.findall(r"^### (.*)$", TEXT, re.M))
    assert set(re.findall(r"`(\w+)`", headings)) == set(LAYERS)
    assert {entry["method"] for entry in ENTRIES} == set(LAYERS)
    assert {yaml.safe_load(row[0].strip("`"))["method"] for row in COSTS} == set(LAYERS)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: "-".join(map(str, entry.values())))
def test_every_example_can_be_trained_in_gpt2(entry):
    for config in sized(entry):
        assert config.num_units and config.num_params <= 38.2e6


def test_every_other_example_is_of_training_options():
    others = [options for text in SNIPPETS if isinstance(options := yaml.safe_load(text), dict)]
    assert others
    for options in others:
        assert set(options) == {"training"}
        assert TrainingConfig.model_validate(options["training"]).settings.scaled


@pytest.mark.parametrize(("entry", "params", "solved", "operations", "units", "mflops"), COSTS, ids=lambda cell: cell)
def test_parameters_and_cost_are_as_the_formulas_say(entry, params, solved, operations, units, mflops):
    """The numbers for GPT-2, and the cost as it is metered in a smaller model, which is faster."""
    ((config,), (small,)) = (sized(yaml.safe_load(entry.strip("`")), shape) for shape in (GPT2, TINY))
    assert value(params, config) == config.layer_params
    assert value(params, small) == small.layer_params
    assert units == f"{config.num_units:,}"
    assert mflops == f"{2 * value(operations, config) / 1e6:.1f}"
    assert 2 * value(operations, small) == pytest.approx(token_flops(small), rel=0.01)


@pytest.mark.parametrize("method", ["mxd", "cp_mumoe", "tr_mumoe", "tucker_mumoe", "moe"])
def test_with_expert_biases_the_formulas_have_one_hidden_unit_more(method):
    (formula,) = (row[1] for row in COSTS if yaml.safe_load(row[0].strip("`"))["method"] == method)
    (config,) = sized({"method": method, "expert_bias": True})
    assert value(formula, config, H=3073) == config.layer_params


@pytest.mark.parametrize("method", ["mxd", "cp_mumoe"])
def test_with_levels_the_formulas_have_the_sum_of_them(method):
    (formula,) = (row[1] for row in COSTS if yaml.safe_load(row[0].strip("`"))["method"] == method)
    (config,) = sized({"method": method, "levels": [None, 4, 3], "sparsity": {"kind": "levels", "levels": [8, 2, 1]}})
    assert value(formula, config, N=sum(config.levels)) == config.layer_params


def test_every_kind_of_sparsity_has_a_row_and_every_general_one_an_example():
    assert set(KINDS) == set(SPARSITIES)
    shown = {entry["sparsity"]["kind"] for entry in ENTRIES if "sparsity" in entry}
    assert shown | {"always", "product_topk"} == set(SPARSITIES)  # these two are their layers' defaults


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_the_state_the_layers_and_the_formats_that_its_row_says(kind):
    *_, state, layers, tools = KINDS[kind]
    fields = EXAMPLES[kind]
    config = parse_sparsity(fields | ({"norm": "batch"} if "norm" in type(parse_sparsity(fields)).model_fields else {}))
    named = set(re.findall(r"`(\w+)`", state))
    assert named == set(config.build(16).state_dict())
    own = {name for name, layer in LAYERS.items() if kind in layer.kinds}
    if kind == "levels":
        own = {name for name, layer in LAYERS.items() if "levels" in layer.model_fields}
    assert set(re.findall(r"`(\w+)`", layers)) - {"levels"} == own
    assert (layers == "general") == config.general == (not own)
    assert {tool for tool, form in FORMATS.items() if kind in form.kinds} <= set(re.findall(r"`([\w-]+)`", tools))


def test_the_readme_names_every_layer_and_kind():
    table = README.split("\n## Methods\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)[`,]", table))
    assert set(LAYERS) | set(SPARSITIES) <= named


def test_every_example_config_is_named_in_the_documentation():
    text = "".join(page.read_text(encoding="utf-8") for page in ROOT.joinpath("docs").glob("*.md")) + README
    for path in ROOT.joinpath("configs").glob("tiny-*.yaml"):
        assert f"configs/{path.name}" in text, path.name
        head = "".join(line for line in path.read_text(encoding="utf-8").splitlines(True) if line.startswith("# "))
        assert f"configs/{path.name}`" in head, f"{path.name}: give its command"


@pytest.mark.long
def test_the_examples_in_python_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    names = {}
    exec("".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)), names)
    assert len(names["history"]) and names["table"].shape[0] == 2 and names["units"]["results"]
    assert names["prediction"].shape == names["y"].shape and (tmp_path / "faithfulness.json").is_file()
    assert names["mxd"].load_layer("checkpoints/own/block2").provenance.model == "tiny-gpt2"


PAPERS = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["papers", "evaluation"])
def test_commands_that_answer_a_paper_exist_with_these_options(page):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    commands = [shlex.split(command) for command in re.findall(r"`mxd ([^`A-Z][^`]*)`", text)]
    assert len(commands) > 20
    for words in commands:
        if len(words) == 1:
            assert words[0] in app
        else:
            app.parse_args(words, print_error=False, exit_on_error=False)


def test_layers_and_scripts_that_answer_a_paper_exist():
    entries = re.findall(r"`(\{method: .*?\})`", PAPERS)
    assert len(entries) > 8
    for entry in entries:
        assert all(config.num_units for config in sized(yaml.safe_load(entry))), entry
    for script in re.findall(r"`(scripts/\w+\.py)", PAPERS):
        assert (ROOT / script).exists(), script


def test_every_script_that_measures_has_a_page():
    """A script with ``--json`` is named with its folder, as a command, in the documentation, and has ``--check``."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    measuring = [path.name for path in (ROOT / "scripts").glob("*.py") if 'add_argument("--json"' in path.read_text()]
    assert len(measuring) > 20
    assert [name for name in measuring if f"scripts/{name}" not in pages] == []
    always = {"check_determinism.py", "check_interop.py", "fuzz.py", "soak.py"}  # nothing but checks
    unchecked = {name for name in measuring if '"--check"' not in (ROOT / "scripts" / name).read_text()}
    assert unchecked == always


def test_every_numbered_item_of_the_papers_has_its_row():
    """Figures and tables by their numbers; left out are drawings and tables of hyper-parameters."""
    items = {
        "Mixture of Decoders": (range(3, 25), range(1, 7)),
        "Multilinear MoE": ({*range(2, 26)} - {6, 9}, range(1, 11)),
        "MMoE": ({*range(2, 17)} - {4}, range(1, 9)),
        "Monet": (range(2, 11), range(2, 17)),
        "Implicit bias": (range(1, 7), {1, 2, 3, *range(10, 14)}),
    }
    sections = dict(zip(items, PAPERS.split("\n## ")[1:], strict=True))
    for name, (figures, tables) in items.items():
        named = {"figure": set(), "table": set()}
        for cell in re.findall(r"^\| ((?:figure|table) .*?) \|", sections[name], re.M):
            kind = ""
            for word in re.findall(r"figure|table|\d+", cell):
                kind = word if word in named else kind
                if word.isdigit():
                    named[kind].add(int(word))
        assert sections[name].startswith(name)
        assert (set(figures) - named["figure"], set(tables) - named["table"]) == (set(), set()), name


def test_links_exist():
    for link in re.findall(r"\]\(((?!http)[^)#]+)\)", TEXT):
        assert (ROOT / "docs" / link).exists(), link


def test_the_python_reference_has_every_public_name():
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^::: (.+)$", text, re.M))
    assert shown == {f"{module}.{name}" for module, name in mxd._PUBLIC.values() if name != "LAYERS"}


def test_the_changelog_has_this_version():
    assert f"\n## {mxd.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
