"""Questions about checkpoints: those and the question's config in, the document that is saved out.

The commands and `mxd compare` both call these (and ``generate_checkpoints``, ``probe_checkpoints``,
``steer_checkpoints``), so a question is answered in one way. Each raises ``MxdError`` as the function it calls.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mxd.data.labelled import labelled_texts, scored_texts
from mxd.evaluation.checkpoints import Subject, describe, measure
from mxd.evaluation.harness import Tasks
from mxd.evaluation.masking import evaluate_masking, evaluate_purging
from mxd.evaluation.structure import evaluate_structure
from mxd.evaluation.units import evaluate_units
from mxd.questions import FaithfulnessConfig, MaskingConfig, PurgingConfig, StructureConfig, UnitsConfig


def faithfulness(
    subject: Subject, how: FaithfulnessConfig, together: bool = False, tasks: Tasks | None = None
) -> dict[str, Any]:
    """Is the splice faithful? All layers at once with ``together``; lm-eval ``tasks`` are scored, too."""
    return measure(subject, together, how.tokens, tasks, how.seed)


def units(subject: Subject, how: UnitsConfig, shown: Sequence[int] | None = None) -> dict[str, Any]:
    """How often do units fire, and on what? ``shown`` names units in place of those that add most."""
    where = subject.base, subject.trained, subject.blocks(how.seed)
    found = evaluate_units(*where, how.tokens, shown, how.top, how.contexts, how.shared, how.seed)
    return _document(subject, found, tokens_asked=how.tokens, seed=how.seed)


def structure(subject: Subject, how: StructureConfig) -> dict[str, Any]:
    """What rank do units have, and which of them lead?"""
    where = subject.base, subject.trained, subject.blocks(how.seed)
    found = evaluate_structure(*where, how.tokens, how.experts, how.prompts)
    return _document(subject, found, tokens_asked=how.tokens, seed=how.seed)


def masking(subject: Subject, how: MaskingConfig, together: bool = False) -> dict[str, Any]:
    """Can a topic be switched off?"""
    given, text = labelled_texts(how.domains, how.text_column, how.label_column), subject.text
    where = subject.base, subject.sets(together), given.texts, given.labels
    found = evaluate_masking(*where, how.ratio, how.limit, text.context, text.bos, how.seed)
    return _document(subject, found, texts=how.domains, limit=how.limit, seed=how.seed)


def purging(subject: Subject, how: PurgingConfig, scores: Path, together: bool = False) -> dict[str, Any]:
    """Can what goes with a score be switched off? ``scores`` is a file of texts with a number each."""
    text, where = subject.text, (subject.base, subject.sets(together))
    given = scored_texts(scores, how.text_column, how.score_column)
    found = evaluate_purging(*where, *given, how.thresholds, how.limit, text.context, text.bos, how.seed)
    return _document(subject, found, texts=str(scores), limit=how.limit, seed=how.seed)


def _document(subject: Subject, results: dict[str, Any], **asked: Any) -> dict[str, Any]:
    members = {name: describe(trained) for name, trained in subject.trained.items()}
    return subject.document(results, replacements=members, **asked)
