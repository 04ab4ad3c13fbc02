"""Public functions say what they take, raise and are shaped like; read from the source."""

import ast
from pathlib import Path

import pytest

import mxd

ROOT = Path(mxd.__file__).parent
FILES = {str(p.relative_to(ROOT)): p for p in sorted(ROOT.rglob("*.py")) if "assets" not in p.parts}


def public_functions(tree):
    """Every function and method whose own name and whose classes' names are public, with what it is called."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from ((f"{node.name}.{name}", function) for name, function in public_functions(node))
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, node


def arguments(function):
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs, function.args.vararg]
    return [arg.arg for arg in every if arg is not None and arg.arg not in ("self", "cls")]


def own_nodes(function):
    """All nodes of a function's body but those of functions inside it."""
    waiting = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)


def is_overload(function):
    """Whether the function only fills in a contract that stands elsewhere, or is a handler of a framework's."""
    return function.name in ("forward", "backward")


@pytest.mark.parametrize("file", FILES)
def test_public_functions_describe_their_arguments(file):
    """Three or more: each has a line under ``Args``, or the docstring says whose arguments they are (``As ...``)."""
    for name, function in public_functions(ast.parse(FILES[file].read_text())):
        text = ast.get_docstring(function) or ""
        if (
            len(arguments(function)) >= 3
            and not is_overload(function)
            and "rguments" not in text
            and not text.startswith("As ")
        ):
            assert "Args:" in text, f"{file}: {name} has {len(arguments(function))} arguments and no Args"


@pytest.mark.parametrize("file", FILES)
def test_public_functions_say_what_they_raise(file):
    for name, function in public_functions(ast.parse(FILES[file].read_text())):
        text = ast.get_docstring(function) or ""
        raised = [node for node in own_nodes(function) if isinstance(node, ast.Raise) and node.exc is not None]
        if raised:
            assert any(word in text for word in ("Raises", "raises", "rrors")), (
                f"{file}: {name} raises and does not say so"
            )
