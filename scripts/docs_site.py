"""What MkDocs asks before it builds the site: the pages, under the paths that they have in the repository.

So a relative link leads to the same file on the site as it does in a checkout, and MkDocs can check every one.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SHOWN = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "checkpoints/README.md", "mxd/assets/README.md", "docs/**/*")
"""The pages, and what lies beside them."""
LINKED = ("LICENSE", "CITATION.cff", "constraints.txt", "configs/*.yaml", "scripts/*.py", "tests/*.py")
"""Files that pages link to; copied as they are."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take the repository's own paths in place of those below ``docs_dir``, and add the list of commands."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for path in sorted({path for pattern in (*SHOWN, *LINKED) for path in ROOT.glob(pattern) if path.is_file()}):
        files.append(File(path.relative_to(ROOT).as_posix(), str(ROOT), config.site_dir, config.use_directory_urls))
    files.append(File.generated(config, "docs/commands.md", content=commands()))
    return files


def commands() -> str:
    """Return what ``mxd --help`` and every command's ``--help`` say."""
    import mxd.cli.entry  # noqa: F401  the commands, for ``app``
    from mxd.cli.shared import app

    text = app.generate_docs(output_format="markdown", heading_level=1)
    return text.replace("][", "]\\[")  # [/folder][@revision] is no link
