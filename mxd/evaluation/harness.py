"""Tasks of EleutherAI's lm-evaluation-harness, for the base model and each splice: pip install 'mxd[lm-eval]'."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from mxd.common.errors import MxdError
from mxd.evaluation.walk import Sets
from mxd.model.frozen import FrozenModel
from mxd.splice import spliced

BATCH = 8
"""Requests in one forward."""

Scores = dict[str, dict[str, float]]
"""Task -> metric -> number, by the harness's own names."""


@dataclass(frozen=True)
class Tasks:
    """Tasks that exist: what ``find_tasks`` returns."""

    names: tuple[str, ...]
    limit: int | None
    manager: Any
    """The harness's ``TaskManager``."""


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
    from lm_eval.models.huggingface import HFLM

    if model.tokenizer is None:
        raise MxdError("the base model has no tokenizer.")
    tokenizer = copy.deepcopy(model.tokenizer)  # the harness changes its padding
    harnessed = HFLM(pretrained=model.module, tokenizer=tokenizer, batch_size=BATCH)
    base = _run(harnessed, tasks)
    scores: dict[str, Scores] = {}
    for name, replacements in sets.items():
        with spliced(model, replacements):
            scores[name] = _run(harnessed, tasks)
    return {"version": version("lm_eval"), "limit": tasks.limit, "base": base, "spliced": scores}


def _run(model: Any, tasks: Tasks) -> Scores:
    from lm_eval import simple_evaluate

    try:
        results = simple_evaluate(
            model, tasks=list(tasks.names), limit=tasks.limit, task_manager=tasks.manager, log_samples=False
        )
    except (OSError, ValueError) as error:
        raise MxdError(f"lm-eval cannot run {', '.join(tasks.names)}: {error}") from error
    return {task: _numbers(metrics) for task, metrics in results["results"].items()}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
