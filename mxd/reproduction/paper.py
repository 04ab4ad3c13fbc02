"""What a reproduction trains and measures: a paper's experiments, on the models of a scale, as configs of runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from mxd.common.bundled import bundled_path
from mxd.common.errors import unknown
from mxd.common.overrides import read_fields
from mxd.config import RunConfig, parse_config
from mxd.questions import Question, Settings, refusal

PAPERS = ("2505.21364",)
"""arXiv numbers of the papers that can be reproduced."""


class Experiment(Settings):
    """One run for each model: replacements, and what is asked of them."""

    replacements: tuple[dict[str, Any], ...]
    """As a run's; without a ``sparsity`` they take top-k at the experiment's K."""
    questions: tuple[Question, ...]
    """What `mxd compare` measures."""
    block: Literal["main", "other"] = "main"
    """Which of a model's two blocks is replaced."""
    k: tuple[int, ...] = ()
    """By default the scale's."""
    models: tuple[str, ...] = ()
    """On which models; by default on all."""


class Model(Settings):
    """A base model, and what a run on it has in common with the others."""

    config: str
    """The bundled config that says so; its block is the main one."""
    other: int
    """The other block."""
    fields: dict[str, Any] = Field(default_factory=dict)
    """Fields in place of the config's."""


class Scale(Settings):
    """How large a reproduction is."""

    k: tuple[int, ...]
    """Active units."""
    models: dict[str, Model]
    """The base models, by name."""
    evaluation: dict[str, Any] = Field(default_factory=dict)
    """Fields of the questions."""


class Form(Settings):
    """A row of a table of sizes."""

    units: int
    """Features or experts."""
    millions: float
    """Millions of parameters, as the paper rounds them."""


class Published(Settings):
    """What the paper's text says of a model in numbers."""

    tc: Form
    """Its transcoder."""
    stc: Form
    """Its skip transcoder."""
    mxd: Form
    """Its MxD."""
    rank: float
    """Mean normalized rank of its experts."""


class Paper(Settings):
    """A paper."""

    title: str
    """Its title and where it is."""
    experiments: dict[str, Experiment]
    """By name."""
    scales: dict[str, Scale] = Field(min_length=1)
    """By name."""
    published: dict[str, Published] = Field(default_factory=dict)
    """Model -> the paper's numbers."""


def read_paper(number: str) -> Paper:
    """Return what is known of a paper.

    Args:
        number: its arXiv number.

    Raises:
        MxdError: it is not one of ``PAPERS``.
    """
    if number not in PAPERS:
        raise unknown("paper", number, PAPERS)
    try:
        return Paper.model_validate(read_fields(bundled_path(f"reproduce/{number}.yaml")))
    except ValidationError as error:
        raise refusal(error) from error


def run_configs(
    paper: Paper, scale: str, out: str | Path, only: Sequence[str] = ()
) -> dict[tuple[str, str], RunConfig]:
    """Return the configs of all runs, by model and experiment.

    Args:
        paper: the paper.
        scale: one of its scales.
        out: the folder that holds all runs.
        only: names of models; by default all of the scale.

    Raises:
        MxdError: no such scale or model.
    """
    if scale not in paper.scales:
        raise unknown("scale", scale, paper.scales)
    size = paper.scales[scale]
    for name in only:
        if name not in size.models:
            raise unknown("model", name, size.models)
    return {
        (name, title): _config(f"{name}-{title}", model, experiment, size, out)
        for name, model in size.models.items()
        for title, experiment in paper.experiments.items()
        if name in (only or size.models) and name in (experiment.models or size.models)
    }


def _config(run: str, model: Model, experiment: Experiment, scale: Scale, out: str | Path) -> RunConfig:
    """Return the config of one run."""
    fields = read_fields(bundled_path(f"configs/{model.config}.yaml")) | dict(model.fields)
    topk = {"kind": "topk", "k": list(experiment.k or scale.k)}
    replacements = [{"sparsity": topk} | replacement for replacement in experiment.replacements]
    asked = {"questions": list(experiment.questions)} | _of(scale.evaluation, experiment.questions)
    fields |= {"run": run, "out": str(out), "replacements": replacements, "evaluation": asked}
    if experiment.block == "other":
        fields["blocks"] = [model.other]
    return parse_config(fields, run)


def _of(evaluation: Mapping[str, Any], questions: Sequence[Question]) -> dict[str, Any]:
    """Return the fields of those questions that are asked."""
    return {name: fields for name, fields in evaluation.items() if name in questions}
