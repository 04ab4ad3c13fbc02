"""mxd: train, share and splice faithful sparse replacement layers for frozen language models.

The public names are loaded on first use, so that ``import mxd`` and ``mxd --help`` stay fast.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "LAYERS": "mxd.layers",
    "Code": "mxd.layers",
    "MLPShape": "mxd.layers",
    "ReplacementConfig": "mxd.layers",
    "ReplacementLayer": "mxd.layers",
    "FrozenModel": "mxd.model.frozen",
    "load_frozen": "mxd.model.loading",
    "Provenance": "mxd.artifacts.checkpoint",
    "from_pretrained": "mxd.artifacts.checkpoint",
    "load_layer": "mxd.artifacts.checkpoint",
    "load_layers": "mxd.artifacts.checkpoint",
    "save_layer": "mxd.artifacts.checkpoint",
    "RunConfig": "mxd.config",
    "load_config": "mxd.config",
    "splice": "mxd.splice",
    "spliced": "mxd.splice",
    "export_model": "mxd.share.export",
    "train": "mxd.training.trainer",
    "tune": "mxd.training.tune",
    "TuneConfig": "mxd.tuning",
    "evaluate": "mxd.evaluation.faithfulness",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import a public name from the file that defines it.

    Raises:
        AttributeError: ``name`` is not public; the message lists the choices.
    """
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mxd' has no attribute {name!r}; public names: {', '.join(sorted(_PUBLIC))}")
    value = getattr(import_module(_PUBLIC[name]), name)
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
    return sorted(__all__)
