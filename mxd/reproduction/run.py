"""Runs a reproduction, or the rest of it, and writes what was found beside what the paper says."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mxd.artifacts.provenance import versions
from mxd.common.errors import MxdError
from mxd.common.files import whole_file, write_json
from mxd.common.markdown import grid, literal
from mxd.common.numbers import plural
from mxd.common.progress import console
from mxd.config import RunConfig
from mxd.evaluation.compare import compare
from mxd.planning.memory import plan_run
from mxd.planning.plan import peak
from mxd.planning.time import expected
from mxd.report.page import write_report
from mxd.reproduction.claims import CLAIMS, Answers
from mxd.reproduction.paper import Paper, read_paper, run_configs

Runs = Mapping[tuple[str, str], RunConfig]
"""By model and experiment."""

HEAD = ("item", "model", "paper", "ours", "difference", "verdict")


def reproduce(number: str, scale: str, out: str | Path, only: Sequence[str] = ()) -> Path:
    """Train and measure whatever of a paper's experiments is not there yet, and write what was found.

    Args:
        number: the paper's arXiv number.
        scale: one of its scales.
        out: the folder for all runs; what is in it already is kept.
        only: names of models; by default all of the scale.

    Returns:
        The folder: a run for each model and experiment with its page, ``reproduction.md`` and ``reproduction.json``.

    Raises:
        MxdError: as ``run_configs`` and ``compare``; finished parts stay.
    """
    paper, folder = read_paper(number), Path(out)
    runs = run_configs(paper, scale, out, only)
    for place, ((model, experiment), config) in enumerate(runs.items(), 1):
        console.print(f"{model}, {experiment} ({place} of {len(runs)}):")
        write_report(compare(config))
        write_findings(folder, paper, scale, runs)
    return folder


def planned(number: str, scale: str, out: str | Path, only: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield what each run of a reproduction trains and takes; nothing is trained, and no base model is loaded.

    Args:
        number: the paper's arXiv number.
        scale: one of its scales.
        out: the folder for all runs.
        only: names of models; by default all of the scale.

    Yields:
        ``model``, ``experiment``, ``layers``, ``tokens``; of training ``gib`` of memory and ``hours`` on this machine,
        or why they are ``unknown``: a model's config that cannot be read.
    """
    for (model, experiment), config in run_configs(read_paper(number), scale, out, only).items():
        found = {
            "model": model,
            "experiment": experiment,
            "layers": len(config.replacements) * len(config.blocks),
            "tokens": config.training.tokens,
        }
        try:
            plan = plan_run(config)
            _, times = expected(config, plan)
        except MxdError as error:
            yield found | {"unknown": str(error)}
            continue
        memory = peak(plan.memory)[1] / 2**30
        yield found | {"gib": memory, "hours": config.training.steps * times.step / 3600}


def findings(paper: Paper, runs: Runs) -> list[dict[str, Any]]:
    """Return what each claim came to on each model.

    Args:
        paper: what is reproduced.
        runs: its runs, finished or not.

    Returns:
        Rows of ``HEAD``. The verdict is ``not measured`` where no run has answered yet, and ``not comparable`` where
        layers have come out too different.

    Raises:
        MxdError: a damaged file.
    """
    rows = []
    for claim in CLAIMS:
        for model in dict.fromkeys(model for model, _ in runs):
            configs = [runs[model, name] for name in claim.experiments if (model, name) in runs]
            if len(configs) < len(claim.experiments) or (claim.published and model not in paper.published):
                continue
            answers = Answers(answer for config in configs for answer in Answers.read(config.folder, claim.question))
            found = claim.look(answers, paper.published.get(model))
            missing = dict.fromkeys(HEAD[2:5], "") | {"verdict": "not comparable" if answers else "not measured"}
            rows.append({"item": claim.item, "model": model} | (asdict(found) if found else missing))
    return rows


def write_findings(folder: Path, paper: Paper, scale: str, runs: Runs) -> Path:
    """Write what was found so far as JSON and as Markdown, and return the Markdown file.

    Args:
        folder: of the reproduction.
        paper: what is reproduced.
        scale: the scale.
        runs: its runs.

    Raises:
        MxdError: a damaged file, or one that cannot be written.
    """
    rows = findings(paper, runs)
    with whole_file(folder / "reproduction.json") as file:
        write_json(file, {"paper": paper.title, "scale": scale, "findings": rows, "versions": versions()})
    counts = {
        verdict: sum(row["verdict"] == verdict for row in rows) for verdict in dict.fromkeys(r["verdict"] for r in rows)
    }
    pages = [
        f"- [{model}, {experiment}]({config.run}/report.html)"
        for (model, experiment), config in runs.items()
        if (config.folder / "report.html").is_file()
    ]
    text = [
        f"# {literal(paper.title)}: scale {scale}",
        f"{plural(len(rows), 'finding')}: "
        + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        + ". "
        "A difference counts beyond two standard errors over contexts; seeds are not varied.",
        grid([HEAD, *([literal(row[key]) for key in HEAD] for row in rows)]),
        "Judged figures (5) are not part of it; texts (8, 9, 14, 15, 17, 23, 24) are in the pages:",
        "\n".join(pages),
    ]
    path = folder / "reproduction.md"
    with whole_file(path) as file:
        file.write_text("\n\n".join(text) + "\n", "utf-8")
    return path
