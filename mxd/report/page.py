"""A run's report: one self-contained HTML page, and the same in Markdown."""

import base64
import hashlib
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import get_args

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mxd.artifacts.provenance import versions
from mxd.common.errors import MxdError, printable
from mxd.common.files import whole_file
from mxd.questions import Question
from mxd.report.markdown import markdown
from mxd.report.parts import Section, Text
from mxd.report.run import Run, read_run
from mxd.report.svg import swatch

FOLLOWING = {
    "faithfulness": ("training",),
    "whole": ("tuned",),
    "units": ("explaining", "similarity"),
    "masking": ("under_mask",),
}
"""Sections beside those of the questions, by the question they follow."""
SECTIONS = (
    "summary",
    "trained",
    *(name for question in get_args(Question) for name in (question, *FOLLOWING.get(question, ()))),
)
"""The files in ``sections/`` in the order of the page; each is shown where the run holds what it needs."""


def write_report(folder: str | PathLike[str], out: str | PathLike[str] | None = None) -> tuple[Path, Path]:
    """Write the report of whatever is in a run's folder.

    Args:
        folder: a run's folder, or one layer's.
        out: HTML file; by default ``report.html`` in the folder. The Markdown goes beside it.

    Returns:
        The HTML file and the Markdown file.

    Raises:
        MxdError: nothing to report, a damaged file, or a file that cannot be written.
    """
    folder = Path(folder)
    page = folder / "report.html" if out is None else Path(out)
    if page.suffix.lower() not in (".html", ".htm"):
        raise MxdError(f"--out is {str(page)!r}; expected a name that ends in .html.")
    run = read_run(folder)
    sections = build_sections(run)
    twin = page.with_suffix(".md")
    texts = {page: html(run, sections), twin: markdown(run, title(run), sections, page.name)}
    for path, text in texts.items():
        with whole_file(path) as file:
            file.write_bytes(printable(text).encode("utf-8", "replace"))
    return page, twin


def build_sections(run: Run) -> list[Section]:
    """Return the sections for which the run holds results."""
    sections = []
    for name in SECTIONS:
        section = import_module(f"mxd.report.sections.{name}").section(run)
        if section is not None:
            apart = f"Measured apart, perhaps on other text: {', '.join(run.apart(name))}."
            sections.append(replace(section, parts=[*section.parts, *([Text(apart)] if run.apart(name) else [])]))
    return sections


def title(run: Run) -> str:
    """Return the report's title: the run, and what it is about."""
    models = sorted({short_name(layer.provenance.model) for layer in run.layers})
    name = run.folder.resolve().name
    return f"{name}: replacements for MLPs of {', '.join(models)}" if models else name


def short_name(model: str) -> str:
    """Return a base model's name without the folders it lies in; a Hub id stays whole."""
    return model if model.count("/") < 2 else model.rpartition("/")[2]


def html(run: Run, sections: list[Section]) -> str:
    """Return the page. It loads nothing from elsewhere, and its policy lets no other script run."""
    style, script = _asset("style.css"), _asset("page.js")
    environment = Environment(
        loader=PackageLoader("mxd.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["swatch"] = swatch
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return environment.get_template("page.html.j2").render(
        title=title(run),
        sections=sections,
        files=run.files,
        missing=run.missing,
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        version=versions()["mxd"],
    )


def _asset(name: str) -> str:
    return (files("mxd.report") / "templates" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
