"""Do tuned layers still describe their MLPs? Each set before and after its tuning, on the same held-out text.

Layers that are tuned together may compensate for one another. What shows it is each layer's reconstruction and account
on the base model's inputs, beside what all of them together do to the model's predictions (``whole``).
"""

from pathlib import Path
from typing import Any

from mxd.artifacts.folders import layer_name
from mxd.artifacts.sets import named_layers
from mxd.common.errors import MxdError
from mxd.config import load_config
from mxd.evaluation.checkpoints import describe, open_checkpoints
from mxd.evaluation.whole import evaluate_whole
from mxd.model.frozen import FrozenModel
from mxd.questions import WholeConfig, changed
from mxd.tuning import GUARD_TOKENS


def before_and_after(
    folder: str | Path, tokens: int = GUARD_TOKENS, model: FrozenModel | None = None
) -> dict[str, Any]:
    """Measure the sets of a tuning, and what they were before.

    Args:
        folder: the tuning's run.
        tokens: held-out positions to read.
        model: the base model, where it is loaded.

    Returns:
        Set -> ``before`` and ``after``: what ``evaluate_whole`` measures without its parts, with everything they depend
        on.

    Raises:
        MxdError: no tuning, or layers that it began with are no longer there.
    """
    config = load_config(Path(folder) / "config.yaml")
    if not config.tune.of:
        raise MxdError(f"{folder} holds no tuning; give the run that mxd tune wrote.")
    source = config.model
    subject = open_checkpoints([folder], model=model or source.source, device=source.device)
    began = {layer_name(trained.path): trained for trained in named_layers(config.tune.of).values()}
    sets, asked = subject.sets(together=True), changed(WholeConfig(), tokens=tokens)
    before = {
        name: {block: began[layer_name(trained.path)] for block, trained in members.items()}
        for name, members in sets.items()
    }
    both = {(name, when): own[name] for name in sets for when, own in (("before", before), ("after", sets))}
    named = {f"{name}, {when}": members for (name, when), members in both.items()}
    found = evaluate_whole(subject.base, named, subject.contexts(asked.seed), asked, parts=False)
    results: dict[str, Any] = {
        name: {when: found[f"{name}, {when}"] for when in ("before", "after")}
        | {"replacements": [describe(trained) for trained in members.values()]}
        for name, members in sets.items()
    }
    return subject.document(results, asked={"tokens": tokens, "seed": asked.seed})
