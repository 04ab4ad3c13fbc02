"""Train, share and splice faithful sparse replacement layers for the MLPs of frozen language models.

    run = mxd.train("config.yaml")                  train (a path, a dict or a RunConfig; text=, model=); a Run
    run["block2-mxd-k32"], run.to_pandas()          a trained layer of it; its training metrics
    mxd.evaluate(run).to_pandas()                   what splicing each layer in costs, on held-out text

    model = mxd.load_frozen("tiny-gpt2")            a base model: a name, a folder, a loaded model
    trained = mxd.load_layer("org/name/layer")      a layer: a folder, a Hub reference (load_layers: several)
    x, y = model.record("Some text", 2)[2]          what goes into the MLP of block 2 and comes out
    trained(x), trained.layer.encode(x)             the replacement's output; which units are active
    with mxd.spliced(model, {2: trained}): ...      the model with the replacement in the MLP's place (splice: for good)

    mxd.tune(run), mxd.compare(config)              as the commands; a Run (run.results: what was measured of it)
    mxd.write_report(run)                           one page of what was measured
    mxd.push, mxd.pull, mxd.export_model            share
    mxd.save_layer, mxd.Provenance.of(model, 2)     keep a layer that a loop of your own has trained
    mxd.units(mxd.open_checkpoints(run))            a question's answer; also ablation, explaining, faithfulness,
        generation, masking, probing, purging, rewrite, steering, structure, subset, toxicity, whole
    mxd.RunConfig, mxd.MxDConfig, ...               configs, of runs, questions (UnitsConfig), layers and sparsities
    mxd.MxdError                                    every mistake that a message can explain

`help(mxd.train)` describes one of them, `dir(mxd)` lists all; docs/python.md shows them at work. They are loaded
on first use, so that ``import mxd`` and ``mxd --help`` stay fast.
"""

import ast
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

__version__ = "0.1.0"


def _listed() -> dict[str, tuple[str, str]]:
    """Return public name -> the file that defines it, and its name there, as ``__init__.pyi`` imports them."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    sources = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: (str(node.module), alias.name) for node in sources for alias in node.names}


_PUBLIC = _listed()  # no ``__all__``: with it, ``help(mxd)`` would load and describe them all


def __getattr__(name: str) -> Any:
    """Import a public name from the file that defines it.

    Raises:
        AttributeError: ``name`` is not public; the message lists the choices.
    """
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mxd' has no attribute {name!r}; public names: {', '.join(sorted(_PUBLIC))}")
    module, own = _PUBLIC[name]
    value = getattr(import_module(module), own)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Keeps ``mxd.splice`` the function, also after the file of that name was imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PUBLIC and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(["__version__", *_PUBLIC])
