"""Which domain is a task of, and how accurate is the model on a domain? After Monet (ICLR 2025, app. D.1)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mxd.common.bundled import bundled
from mxd.common.errors import MxdError
from mxd.data.tables import check_columns, file_rows, local_files
from mxd.evaluation.harness import Outcomes

BUNDLED_GROUPS = ("mmlu",)
"""Tables that come with mxd (``mxd/assets/tasks``): MMLU's 57 subjects in the 14 categories of MMLU-Pro."""


class Accuracy(NamedTuple):
    """A mean over tasks, and its standard error over their documents."""

    value: float
    standard_error: float


def read_groups(source: str) -> dict[str, str]:
    """Return the domain of each task.

    Args:
        source: ``mmlu``, or a local file with the columns ``task`` and ``domain``.

    Raises:
        MxdError: no such table or file, no such column, or a task with two domains.
    """
    files = [bundled(f"tasks/{source}.csv")] if source in BUNDLED_GROUPS else local_files(source, "domains of tasks")
    if not files:
        raise MxdError(
            f"no domains of tasks {source!r}; bundled are: {', '.join(BUNDLED_GROUPS)}. Or give a file with the "
            "columns task and domain."
        )
    domains: dict[str, str] = {}
    for where, row in file_rows(files):
        check_columns(where, row, {"task": "task", "domain": "domain"})
        task, domain = str(row["task"]), str(row["domain"])
        if domains.setdefault(task, domain) != domain:
            raise MxdError(f"{where}: the task {task!r} is of {domain!r} here and of {domains[task]!r} before.")
    return domains


def by_domain(tasks: Sequence[str], groups: Mapping[str, str] | None, first: Sequence[str]) -> dict[str, list[str]]:
    """Return the tasks of each domain.

    Args:
        tasks: what was scored.
        groups: the domain of each task; by default each is a domain of its own.
        first: domains that come first, in this order, as far as they have tasks.

    Raises:
        MxdError: a task whose domain is not known.
    """
    known = dict(zip(tasks, tasks, strict=True)) if groups is None else groups
    for task in tasks:
        if task not in known:
            raise MxdError(f"the domain of the lm-eval task {task!r} is not in the table of --lm-eval-groups; add it.")
    there = {known[task] for task in tasks}
    order = [*(domain for domain in first if domain in there), *sorted(there.difference(first))]
    return {domain: [task for task in tasks if known[task] == domain] for domain in order}


def accuracy(outcomes: Outcomes, tasks: Sequence[str]) -> Accuracy:
    """Return the accuracy on a domain: the mean over its tasks, each with the same weight.

    So Monet's: its 28.30% on computer science is no whole number of the 412 questions of the four subjects together.
    Of differences between two ways of running a model on the same documents this is the paired standard error.

    Args:
        outcomes: of each document, 1 or 0; or the difference of two.
        tasks: the domain's.
    """
    value = float(np.mean([outcomes[task].mean() for task in tasks]))
    variances = [
        outcomes[task].var(ddof=1) / len(outcomes[task]) if len(outcomes[task]) > 1 else np.inf for task in tasks
    ]
    return Accuracy(value, float(np.sqrt(np.sum(variances))) / len(tasks))


def difference(changed: Outcomes, plain: Outcomes) -> Outcomes:
    """Return what has changed, document by document."""
    return {task: changed[task] - plain[task] for task in plain}
