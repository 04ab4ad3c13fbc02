"""The frontier: train everything a config names in one pass, then answer every question it asks.

What is there already is kept, so an interrupted comparison goes on with the piece it was at.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mxd.checkpoint import read_json
from mxd.config import EvaluationConfig, Question, RunConfig
from mxd.evaluation.checkpoints import Subject, describe, measure, open_checkpoints, save_results
from mxd.evaluation.generation import generate_checkpoints
from mxd.evaluation.labelled import labelled_texts
from mxd.evaluation.masking import evaluate_masking
from mxd.evaluation.probing import probe_checkpoints
from mxd.evaluation.steering import steer_checkpoints
from mxd.evaluation.structure import evaluate_structure
from mxd.evaluation.units import evaluate_units
from mxd.plan import check_memory, plan_run
from mxd.progress import console
from mxd.stream import load_base
from mxd.train import train

RATIO = 2.0
"""A unit belongs to a domain if it is at least so many times as strong there as in any other (Monet, section 5.1)."""

Answer = Callable[[Subject, EvaluationConfig], dict[str, Any]]


def compare(config: RunConfig) -> Path:
    """Train a run, or what is left of it, and write one JSON file for each of its questions that has none yet.

    A file is written anew where it was made with other settings.

    Returns:
        The run's folder.

    Raises:
        MxdError: as ``train`` and the evaluations; what was answered before stays.
    """
    check_memory(config, plan_run(config))  # as ``train`` does, but before anything is loaded
    base = load_base(config)
    folder = train(config, resume=(config.folder / "config.yaml").exists(), model=base)
    asked = config.evaluation
    open_questions = [question for question in asked.questions if not _answered(folder, question, asked)]
    if not open_questions:
        return folder
    subject = open_checkpoints([folder], {"split": asked.split}, base)
    for question in open_questions:
        console.print(f"{question}:")
        answer, _ = ANSWERS[question]
        save_results(answer(subject, asked) | {"compare": _settings(question, asked)}, _file(folder, question))
    return folder


def _answered(folder: Path, question: Question, asked: EvaluationConfig) -> bool:
    file = _file(folder, question)
    return file.is_file() and read_json(file).get("compare") == _settings(question, asked)


def _settings(question: Question, asked: EvaluationConfig) -> dict[str, Any]:
    """Return the settings that a question's answer depends on."""
    return asked.model_dump(mode="json", include=set(ANSWERS[question][1]))


def _file(folder: Path, question: Question) -> Path:
    return folder / f"{question}.json"


def _faithfulness(subject: Subject, asked: EvaluationConfig) -> dict[str, Any]:
    return measure(subject, tokens=asked.tokens, seed=asked.seed)


def _generation(subject: Subject, asked: EvaluationConfig) -> dict[str, Any]:
    return generate_checkpoints(subject, limit=asked.prompts, seed=asked.seed)


def _units(subject: Subject, asked: EvaluationConfig) -> dict[str, Any]:
    base, trained, blocks = subject.base, subject.trained, subject.blocks(asked.seed)
    found = evaluate_units(base, trained, blocks, asked.unit_tokens, top=asked.pages, seed=asked.seed)
    return _document(subject, found)


def _structure(subject: Subject, asked: EvaluationConfig) -> dict[str, Any]:
    blocks = subject.blocks(asked.seed)
    return _document(subject, evaluate_structure(subject.base, subject.trained, blocks, asked.tokens))


def _probing(subject: Subject, asked: EvaluationConfig) -> dict[str, Any]:
    return probe_checkpoints(subject, asked.sets, limit=asked.texts, seed=asked.seed)


def _masking(subject: Subject, asked: EvaluationConfig) -> dict[str, Any]:
    given = labelled_texts(asked.domains)
    base, sets, text = subject.base, subject.sets(), subject.text
    how = (asked.domain_texts, text.context, text.bos, asked.seed)
    found = evaluate_masking(base, sets, given.texts, given.labels, RATIO, *how)
    return _document(subject, found) | {"texts": asked.domains}


def _steering(subject: Subject, asked: EvaluationConfig) -> dict[str, Any]:
    fewest = min(trained.layer.num_units for trained in subject.trained.values())
    return steer_checkpoints(subject, range(min(asked.steered, fewest)), seed=asked.seed)


def _document(subject: Subject, results: dict[str, Any]) -> dict[str, Any]:
    members = {name: describe(trained) for name, trained in subject.trained.items()}
    return subject.document(results, replacements=members)


ANSWERS: dict[Question, tuple[Answer, tuple[str, ...]]] = {
    "evaluation": (_faithfulness, ("split", "tokens", "seed")),
    "generation": (_generation, ("split", "prompts", "seed")),
    "units": (_units, ("split", "unit_tokens", "pages", "seed")),
    "structure": (_structure, ("split", "tokens", "seed")),
    "probing": (_probing, ("sets", "texts", "seed")),
    "masking": (_masking, ("domains", "domain_texts", "seed")),
    "steering": (_steering, ("steered", "seed")),
}
"""Question -> what answers it, and the settings the answer depends on."""
