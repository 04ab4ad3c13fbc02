"""Files that mxd came with (``mxd/assets``): tiny models, text and labelled sets."""

import os
from functools import cache
from importlib import resources
from pathlib import Path

from mxd.common.errors import MxdError, nearest
from mxd.common.files import file_sha256, names_a_path, read_text
from mxd.common.parsing import parse_json

MODELS = ("tiny-gpt2", "tiny-neox", "tiny-llama")
"""Names of bundled models."""


def check_model(name: str) -> None:
    """Refuse the name of a base model that can only be a path, where there is nothing.

    Raises:
        MxdError: there is nothing.
    """
    if name in MODELS or os.path.exists(name):  # False for what no path can be, which Path.exists raises for
        return
    if name.endswith(".gguf"):
        raise MxdError(f"no GGUF file at {name!r}; `python scripts/fetch_models.py` fetches SmolLM2-135M.")
    if names_a_path(name) or ("/" not in name and nearest(name, MODELS)):
        raise MxdError(
            f"there is no folder {name!r} here; expected a bundled name ({', '.join(MODELS)}), a folder with a "
            f"config.json, a .gguf file, or a Hub id org/name.{nearest(name, MODELS)}"
        )


def bundled_path(name: str) -> Path:
    """Return where a bundled file or folder lies."""
    return Path(str(resources.files("mxd") / "assets" / name))


@cache
def bundled(name: str) -> Path:
    """Return a bundled file or folder, after comparing its files with their SHA-256 in ``assets.json``.

    The comparison happens once per process: about 4 ms for a model, 3 ms for the text.

    Raises:
        MxdError: a file is not what was bundled, or cannot be read.
    """
    try:
        known = parse_json(read_text(bundled_path("assets.json")))["files"]
        files = [file for file in known if file == name or file.startswith(f"{name}/")]
        if not files:
            raise LookupError(f"assets.json names no {name}")
        for file in files:
            if (digest := file_sha256(bundled_path(file))) != known[file]["sha256"]:
                raise MxdError(
                    f"{bundled_path(file)} is not what mxd came with: its SHA-256 is {digest}, assets.json names "
                    f"{known[file]['sha256']}. Install mxd again."
                )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise MxdError(f"cannot read the files that mxd came with: {error}. Install mxd again.") from error
    return bundled_path(name)
