"""The frontier: train everything a config names in one pass, then answer every question it asks.

Finished parts are kept, so an interrupted comparison continues with the part that was under way.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from mxd.common.files import read_json
from mxd.common.progress import console
from mxd.config import RunConfig
from mxd.data.grouped import FIGURES
from mxd.data.labelled import check_set
from mxd.data.text import check_source
from mxd.evaluation.checkpoints import open_checkpoints, save_results
from mxd.evaluation.toxicity import check
from mxd.planning.memory import check_memory, plan_run
from mxd.questions import EvaluationConfig, Question
from mxd.training.source import load_base
from mxd.training.trainer import train


def compare(config: RunConfig) -> Path:
    """Train a run, or the rest of it, and write a JSON file for each of its questions that has none yet.

    A file that was made with other settings is written anew.

    Returns:
        The run's folder.

    Raises:
        MxdError: as ``train`` and the evaluations; earlier answers stay.
    """
    asked = config.evaluation
    if "toxicity" in asked.questions:
        check(asked.toxicity)
    _check_texts(config)
    check_memory(config, plan_run(config))  # as ``train`` does, but before anything is loaded
    base = load_base(config)
    folder = train(config, resume=(config.folder / "config.yaml").exists(), model=base)
    open_questions = [question for question in asked.questions if not _answered(folder, question, asked)]
    if not open_questions:
        return folder
    subject = open_checkpoints([folder], {} if asked.split is None else {"split": asked.split}, base)
    for question in open_questions:
        console.print(f"{question}:")
        results = import_module(f"mxd.evaluation.{question}").answer(subject, getattr(asked, question))
        save_results(results | {"compare": _settings(question, asked)}, _file(folder, question))
    return folder


def _check_texts(config: RunConfig) -> None:
    """Refuse held-out text and labelled sets that are not there, before anything is trained."""
    asked = config.evaluation
    if asked.split is not None:
        check_source(config.data.source, asked.split)
    sets = {
        "probing": asked.probing.sets,
        "masking": (asked.masking.domains,),
        "ablation": (asked.ablation.set,),
        "rewrite": () if asked.rewrite.set == FIGURES else (asked.rewrite.set,),
    }
    for question, sources in sets.items():
        for source in sources if question in asked.questions else ():
            check_set(source)


def _answered(folder: Path, question: Question, asked: EvaluationConfig) -> bool:
    file = _file(folder, question)
    return file.is_file() and read_json(file).get("compare") == _settings(question, asked)


def _settings(question: Question, asked: EvaluationConfig) -> dict[str, Any]:
    """Return the settings that a question's answer depends on."""
    return {"split": asked.split} | getattr(asked, question).model_dump(mode="json")


def _file(folder: Path, question: Question) -> Path:
    return folder / f"{question}.json"
