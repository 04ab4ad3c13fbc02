"""Install built archives into an empty environment, and use them outside of the checkout: `make dist`.

Dependencies are installed once, in the versions of constraints.txt; then each archive takes the place of the last.
"""

import argparse
import os
import re
import subprocess
import tempfile
import venv
from pathlib import Path
from zipfile import ZipFile

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
RUN = """
run: tried
blocks: [2]
model: {source: tiny-gpt2, device: cpu}
data: {split: validation}
sizing: {expansion: 8}
replacements: [{method: mxd, sparsity: {kind: topk, k: 4}}]
training: {recipe: short, tokens: 2048, batch_tokens: 512, buffer_tokens: 1024}
"""
LARGEST = 8
"""Files of the wheel to name."""


def run(*words: str | Path, folder: Path) -> str:
    """Run a command there, without the checkout on Python's path and without the Hub, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(words, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def use(bin_: Path, folder: Path, version: str) -> None:
    """Do with an installed package what a first try does."""
    where = run(bin_ / "python", "-c", "import mxd; print(mxd.__version__, mxd.__file__)", folder=folder).split()
    assert where[0] == version and Path(where[1]).is_relative_to(bin_.parent), where
    assert run(bin_ / "mxd", "--version", folder=folder).strip() == version
    assert "training.tokens" in run(bin_ / "mxd", "fields", folder=folder)
    (folder / "run.yaml").write_text(RUN)
    run(bin_ / "mxd", "train", "run.yaml", folder=folder)
    shown = run(bin_ / "mxd", "info", "checkpoints/tried/block2-mxd-k4", "--json", folder=folder)
    assert '"model": "tiny-gpt2"' in shown


def main() -> None:
    """Try every archive that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", nargs="+", type=Path, help="wheels and source distributions")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        venv.create(folder / "env", with_pip=True)
        bin_ = folder / "env" / "bin"
        pip = (bin_ / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        (torch,) = re.findall(r"^torch==.*$", CONSTRAINTS.read_text(), re.MULTILINE)
        run(*pip, torch, folder=folder)  # alone and pinned, as in the Makefile
        for number, archive in enumerate(path.resolve() for path in args.archives):
            again = ("--force-reinstall", "--no-deps") if number else ("-c", CONSTRAINTS)
            run(*pip, *again, archive, folder=folder)
            (tried := folder / str(number)).mkdir()
            use(bin_, tried, re.findall(r"-([\d.]+\w*?)(?:-py3|\.tar)", archive.name)[0])
            print(f"{archive.name}: {archive.stat().st_size / 1e6:.1f} MB, installed and used")
            if archive.suffix == ".whl":
                files = sorted(ZipFile(archive).infolist(), key=lambda file: -file.compress_size)
                for file in files[:LARGEST]:
                    print(f"  {file.compress_size / 1e6:5.1f} MB  {file.filename}")


if __name__ == "__main__":
    main()
