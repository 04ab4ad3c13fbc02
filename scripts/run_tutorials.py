"""Run the tutorials, and write below each block of code what it prints: `make tutorials`.

A tutorial is a Markdown page. Its blocks of Python share their names, as cells of a notebook do; blocks of shell run
in the same folder, a temporary one, with ``mxd`` at hand. Nothing is downloaded.
"""

import io
import os
import re
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

TUTORIALS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```\n(?:\n```text\n.*?^```\n)?", re.MULTILINE | re.DOTALL)


def executed(text: str, folder: Path) -> str:
    """Run a tutorial in a folder, and return its text with what its blocks print now."""
    names: dict[str, object] = {}

    def block(match: re.Match[str]) -> str:
        language, code = match.groups()
        printed = python(code, names) if language == "python" else shell(code)
        printed = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())
        below = f"\n```text\n{printed}\n```\n" if printed else ""
        return f"```{language}\n{code}```\n{below}"

    with chdir(folder):
        return BLOCK.sub(block, text)


def python(code: str, names: dict[str, object]) -> str:
    """Run a block of Python with the names of those before it, and return what it prints."""
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "tutorial", "exec"), names)
    return out.getvalue()


def shell(code: str) -> str:
    """Run a block of commands, and return what they print; a command that fails is an error."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "COLUMNS": "120"}
    words = ["bash", "-euo", "pipefail", "-c", code]
    return subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    """Write the output of all tutorials anew."""
    for page in TUTORIALS:
        with TemporaryDirectory() as folder:
            page.write_text(executed(page.read_text(encoding="utf-8"), Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
