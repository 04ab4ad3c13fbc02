"""One rule: a file imports only from files above it. Read from the import statements themselves."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mxd

ROOT = Path(mxd.__file__).parent
CONTRIBUTING = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")

ORDER = [
    "assets",
    "common",
    "ops",
    "layers",
    "model",
    "metrics",
    "artifacts",
    "questions",
    "tuning",
    "data",
    "config",
    "splice",
    "joint",
    "planning",
    "training",
    "share",
    "evaluation",
    "report",
    "reproduction",
    "api",
    "cli",
    "__main__",
]
"""Files and folders of mxd, from the bottom up: each may import those before it. A new one gets its place here."""

LAYERS_ORDER = [
    "gates",
    "hierarchy",
    "product_gate",
    "sparsity.base",
    "KINDS",
    "sparsity.levels",
    "sparsity",
    "config",
    "losses",
    "base",
    "objective",
    "sizing",
    "encoder",
    "experts",
    "levels",
    "mumoe",
    "transcoder",
    "METHODS",
    "__init__",
]
"""The same within ``layers``, where METHODS is every other file: methods do not import one another. Nor do the kinds of
sparsity, KINDS: the other files of that folder."""

FORBIDDEN = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def module_name(path):
    """``mxd.layers.base`` for its file; a package's ``__init__`` goes by the package's name."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py")) if "assets" not in path.parts}


def imports(name):
    """Every module that a file imports, at its top or inside a function; submodules are told from attributes.

    What is imported for annotations alone, of a config and the layer it builds, is not imported when a program runs.
    """
    path, found = FILES[name], set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if name == "mxd.layers.config" and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            for _ in range(node.level - 1):
                package = package.rpartition(".")[0]
            source = ".".join(filter(None, [package, node.module])) if node.level else node.module
            members = {f"{source}.{alias.name}" for alias in node.names} & set(FILES)
            found |= members
            if len(members) < len(node.names):
                found.add(source)
    return found


def ours(name):
    return {module for module in imports(name) if module.partition(".")[0] == "mxd"}


def part(module):
    """``layers`` for ``mxd.layers.base``."""
    return module.split(".")[1] if "." in module else ""


def layer_place(module):
    last = module.removeprefix("mxd.layers").removeprefix(".") or "__init__"
    other = "KINDS" if last.startswith("sparsity.") else "METHODS"
    return LAYERS_ORDER.index(last if last in LAYERS_ORDER else other)


modules = pytest.mark.parametrize("name", [name for name in FILES if name != "mxd"])


def test_every_file_has_its_place():
    unplaced = {part(name) for name in FILES if name != "mxd"} - set(ORDER)
    assert not unplaced, f"add to ORDER, where DESIGN puts them: {unplaced}"


def test_contributing_has_the_same_list():
    house = CONTRIBUTING.split("## Packages")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", house, re.M) == [name for name in ORDER if name != "__main__"]


def test_the_way_of_a_batch_is_short_and_as_contributing_says():
    """At most ten files and 2,500 lines to follow token ids to an update of the weights."""
    way = CONTRIBUTING.split("## A batch's way")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", way, re.M)
    lines = {file: (ROOT / file).read_text(encoding="utf-8").count("\n") for file, _ in rows}
    assert 5 <= len(rows) <= 10 and sum(lines.values()) <= 2500
    assert all(abs(lines[file] - int(said)) <= 0.1 * lines[file] for file, said in rows), lines


def test_the_reader_sees_imports():
    """That the tests below look at something: known imports, at the top, inside functions, and by relative name."""
    assert "mxd.layers.base" in imports("mxd.layers.mxd")
    assert "mxd.config" in imports("mxd.cli.train")  # inside a function
    assert "torch" in imports("mxd.layers.objective")
    assert "mxd.common.errors" in imports("mxd.cli.entry")  # from mxd.common import errors
    assert sum(len(ours(name)) for name in FILES) > 50


@modules
def test_a_file_imports_only_from_files_above_it(name):
    for module in ours(name) - {"mxd"}:
        same_folder = part(module) == part(name)
        assert same_folder or ORDER.index(part(module)) < ORDER.index(part(name)), f"{name} imports {module}"


@pytest.mark.parametrize("name", [name for name in FILES if part(name) == "layers"])
def test_within_layers_what_is_shared_stands_below_the_methods(name):
    for module in ours(name):
        if part(module) == "layers":
            assert layer_place(module) < layer_place(name), f"{name} imports {module}"


def test_no_cycles():
    """Not inside a folder either."""
    graph = {name: ours(name) & set(FILES) - {"mxd", name} for name in FILES if name != "mxd"}
    while graph:
        free = {name for name, needs in graph.items() if not needs & set(graph)}
        assert free, f"cycle among {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in free}


@modules
def test_configs_reach_only_what_a_run_is_made_of(name):
    if "mxd.config" in imports(name):
        assert part(name) in {"planning", "training", "evaluation", "reproduction", "api", "cli"}


@modules
def test_only_train_imports_accelerate(name):
    uses = any(module.partition(".")[0] == "accelerate" for module in imports(name))
    assert uses == (name == "mxd.training.trainer")


@modules
def test_nothing_is_pickled(name):
    allowed = {"pickle"} if name == "mxd.share.formats.reference" else set()  # for the error that torch.load raises
    assert not {module.partition(".")[0] for module in imports(name)} & (FORBIDDEN - allowed)
    calls = [
        ast.unparse(node) for node in ast.walk(ast.parse(FILES[name].read_text())) if isinstance(node, ast.Attribute)
    ]
    if name == "mxd.share.formats.reference":  # reads others' pickles, tensors and plain values only
        text = FILES[name].read_text()
        assert text.count("torch.load(") == text.count("weights_only=True)") == 1
        calls.remove("torch.load")
    assert not {"torch.save", "torch.load", "numpy.load", "np.load", "pandas.read_pickle"} & set(calls)


def test_the_package_itself_imports_nothing_of_its_own():
    assert imports("mxd") <= {"ast", "importlib", "pathlib", "sys", "types", "typing"}


def test_every_public_name_is_found():
    for name in dir(mxd):
        assert getattr(mxd, name) is not None
    with pytest.raises(AttributeError, match=r"no attribute 'lode_layer'; public names: .*load_layer"):
        mxd.lode_layer  # noqa: B018


HEAVY = "sorted({'torch', 'transformers', 'datasets', 'accelerate', 'matplotlib'} & set(sys.modules))"


@pytest.mark.parametrize(
    "code",
    [
        "import mxd",
        "import mxd, mxd.cli",
        "import mxd.cli\nsys.argv = ['mxd', '--help']\ntry: mxd.cli.main()\nexcept SystemExit: pass",
    ],
    ids=["import", "cli", "help"],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code):
    """``import mxd`` and ``mxd --help`` answer at once."""
    script = f"import sys\n{code}\nprint('heavy:', {HEAVY})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"
    assert ("evaluate" in done.stdout) == ("--help" in code)
