"""Tasks of EleutherAI's lm-evaluation-harness, for the base model and each splice: pip install 'mxd[lm-eval]'."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float

from mxd.common.errors import MxdError
from mxd.evaluation.walk import Sets
from mxd.model.frozen import FrozenModel
from mxd.splice import Splice, spliced

K = TypeVar("K")

BATCH = 8
"""Requests in one forward."""

Scores = dict[str, dict[str, float]]
"""Task -> metric -> number, by the harness's own names."""
Outcomes = dict[str, Float[np.ndarray, " documents"]]
"""Task -> what a metric says of each of its documents."""


@dataclass(frozen=True)
class Tasks:
    """Tasks that exist: what ``find_tasks`` returns."""

    names: tuple[str, ...]
    limit: int | None
    manager: Any
    """The harness's ``TaskManager``."""

    @property
    def version(self) -> str:
        """The harness's."""
        return version("lm_eval")


def find_tasks(names: Sequence[str], limit: int | None = None, include: str | Path | None = None) -> Tasks:
    """Look tasks up, so that a mistake is found before anything is measured.

    Args:
        names: names or patterns of tasks, groups or tags.
        limit: documents of each task to use, at most; all by default.
        include: folder with task files of your own.

    Raises:
        MxdError: the harness is not installed, no such task or folder, or a limit below 1.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MxdError(f"lm-eval tasks need the package lm_eval ({error}): pip install 'mxd[lm-eval]'") from error
    if limit is not None and limit < 1:
        raise MxdError(f"the limit of documents must be at least 1, got {limit}.")
    if include is not None and not Path(include).is_dir():
        raise MxdError(f"no folder with lm-eval task files at {str(include)!r}.")
    manager = TaskManager(include_path=None if include is None else str(include))
    for name in names:
        if not manager.match_tasks([name]):
            raise MxdError(
                f"lm-eval {version('lm_eval')} has no task {name!r}; `lm-eval ls tasks` lists those it has, and "
                "--lm-eval-include FOLDER adds your own."
            )
    return Tasks(tuple(manager.match_tasks(list(names))), limit, manager)


@torch.no_grad()
def score(model: FrozenModel, sets: Sets, tasks: Tasks) -> dict[str, Any]:
    """Score the base model and each set of replacements on the same documents.

    Args:
        model: the frozen base model, with its tokenizer.
        sets: name -> what is spliced in together.
        tasks: what ``find_tasks`` returned.

    Returns:
        ``base`` -> scores, ``spliced`` -> name -> scores, with the tasks' ``limit`` and the harness's ``version``.

    Raises:
        MxdError: no tokenizer, replacements that do not fit the model, or a task whose data cannot be loaded.
    """
    harnessed = _harnessed(model)
    base = _scores(_run(harnessed, tasks))
    scores: dict[str, Scores] = {}
    for name, replacements in sets.items():
        with spliced(model, replacements):
            scores[name] = _scores(_run(harnessed, tasks))
    return {"version": tasks.version, "limit": tasks.limit, "base": base, "spliced": scores}


@torch.no_grad()
def outcomes(model: FrozenModel, splices: Mapping[K, Splice | None], tasks: Tasks, metric: str) -> dict[K, Outcomes]:
    """Return what a metric says of each document, so that ways of running the model are compared document by document.

    Args:
        model: the frozen base model, with its tokenizer.
        splices: the ways; ``None`` is the base model as it is.
        tasks: what ``find_tasks`` returned.
        metric: its name in the harness, ``acc``.

    Raises:
        MxdError: a task without the metric for each document, and as ``score``.
    """
    harnessed, found = _harnessed(model), {}
    for key, splice in splices.items():
        with nullcontext() if splice is None else splice.entered():
            found[key] = _outcomes(_run(harnessed, tasks, log_samples=True), metric)
    return found


def _harnessed(model: FrozenModel) -> Any:
    """Return the model as the harness takes it.

    Raises:
        MxdError: it has no tokenizer.
    """
    from lm_eval.models.huggingface import HFLM

    if model.tokenizer is None:
        raise MxdError("the base model has no tokenizer.")
    tokenizer = copy.deepcopy(model.tokenizer)  # the harness changes its padding
    return HFLM(pretrained=model.module, tokenizer=tokenizer, batch_size=BATCH)


def _run(model: Any, tasks: Tasks, log_samples: bool = False) -> Mapping[str, Any]:
    from lm_eval import simple_evaluate

    try:
        results: Mapping[str, Any] = simple_evaluate(
            model, tasks=list(tasks.names), limit=tasks.limit, task_manager=tasks.manager, log_samples=log_samples
        )
    except (OSError, ValueError) as error:
        raise MxdError(f"lm-eval cannot run {', '.join(tasks.names)}: {error}") from error
    return results


def _scores(results: Mapping[str, Any]) -> Scores:
    return {task: _numbers(metrics) for task, metrics in results["results"].items()}


def _outcomes(results: Mapping[str, Any], metric: str) -> Outcomes:
    """Return a metric of each document, in order; of several filters of the answers the first counts."""
    found = {}
    for task, samples in results["samples"].items():
        first = [sample for sample in samples if sample.get("filter") == samples[0].get("filter")]
        values = {sample["doc_id"]: sample.get(metric) for sample in first}
        if not values or not all(isinstance(value, int | float) for value in values.values()):
            has = sorted(name for name in (samples[0].get("metrics", ()) if samples else ()))
            raise MxdError(
                f"the lm-eval task {task!r} has no {metric!r} for each document; it has {', '.join(has) or 'none'}."
            )
        found[task] = np.array([float(values[number]) for number in sorted(values)])
    return found


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
