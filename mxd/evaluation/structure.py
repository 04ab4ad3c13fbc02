"""The units: the rank of their weights (MxD, arXiv 2505.21364, app. B.4), and which of them leads (C.2, figure 21)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mxd.artifacts.checkpoint import Trained
from mxd.common.errors import MxdError
from mxd.common.progress import progress
from mxd.data.contexts import Contexts, head_ids
from mxd.evaluation.checkpoints import Subject
from mxd.evaluation.ranks import weight_ranks
from mxd.evaluation.walk import CodeMoments, codes, evaluating, streamed
from mxd.layers import Code
from mxd.model.frozen import FrozenModel
from mxd.questions import DEFAULTS, StructureConfig

LEADERS = 3
"""Units named for each prompt."""


def answer(subject: Subject, how: StructureConfig = DEFAULTS.structure) -> dict[str, Any]:
    """Look at the units of checkpoints; errors as ``evaluate_structure``."""
    found = evaluate_structure(subject.base, subject.trained, subject.contexts(how.seed), how)
    return subject.document(found, replacements=subject.members, tokens_asked=how.tokens, seed=how.seed)


@torch.no_grad()
def evaluate_structure(
    model: FrozenModel,
    trained: Mapping[str, Trained],
    contexts: Contexts,
    how: StructureConfig = DEFAULTS.structure,
    forward_contexts: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Look at the units of trained layers: their ranks, and which of them lead.

    The unit that leads at a token is the one with the largest activation. A shared expert leads everywhere; training
    with a random K is meant to end that.

    Args:
        model: the frozen base model.
        trained: name -> layer; the base model runs once for all of them, up to the last.
        contexts: the text over which leads and rates are counted.
        how: what is asked. Positions are rounded up to whole contexts; those a layer was trained without do not count.
        forward_contexts: contexts in one forward, by default about 1,024 tokens.

    Returns:
        Name -> mean ``normalized_rank`` and ``stable_rank`` of ``experts`` units whose weights have ``shape``, with
        their standard deviations ``*_sd``, and how many of the units are rank-``deficient``; over the text's
        ``tokens``, the unit that leads most often and its share of them, ``leader``; and for each prompt, under
        ``leading``, the ``units`` that are strongest at its last token, with their ``activation`` there and their
        ``rate`` over the text.

    Raises:
        MxdError: no layers, no text, or layers of another model.
    """
    leaders = {name: torch.zeros(one.layer.num_units, dtype=torch.int64) for name, one in trained.items()}
    moments = {name: CodeMoments(one.layer) for name, one in trained.items()}
    with evaluating(model, trained):
        with progress(f"structure: leading units of {len(trained)} layers", how.tokens) as advance:
            for batch in streamed(contexts, how.tokens, forward_contexts):
                for name, code, _ in codes(model, trained, batch):
                    moments[name].count(code)
                    unit, activation = _leading(code)
                    leaders[name] += torch.bincount(unit[activation > 0].cpu(), minlength=len(leaders[name]))
                advance(batch.size)
        counts = {name: min(how.experts, one.layer.num_units) for name, one in trained.items()}
        with progress(f"structure: ranks of {len(trained)} layers", sum(counts.values()), "units") as advance:
            ranks = {name: weight_ranks(one.layer, range(counts[name]), advance) for name, one in trained.items()}
        prompted = leading_units(model, trained, how.prompts)
    return {
        name: {
            "block": one.provenance.block,
            **_mean_and_spread("normalized_rank", ranks[name][0]),
            **_mean_and_spread("stable_rank", ranks[name][1]),
            "deficient": int((ranks[name][0] < 1).sum()),
            "experts": counts[name],
            "shape": list(one.layer.unit_weight(0).shape),
            "tokens": moments[name].tokens,
            "leader": {
                "unit": int(leaders[name].argmax()),
                "share": float(leaders[name].max()) / max(moments[name].tokens, 1),
            },
            "leading": [
                {**row, "units": [{**one, "rate": float(moments[name].rates[one["unit"]])} for one in row["units"]]}
                for row in prompted[name]
            ],
        }
        for name, one in trained.items()
    }


def leading_units(
    model: FrozenModel, trained: Mapping[str, Trained], prompts: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return for each layer and prompt the units with the largest activations at the last token (figure 21).

    Returns:
        Name -> for each prompt at whose last token a unit is active ``prompt`` and ``units``: up to three, each with
        its ``activation``, the strongest first.

    Raises:
        MxdError: the model has no tokenizer, or a prompt has no token.
    """
    head = head_ids(model.tokenizer)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in trained}
    for prompt in prompts:
        ids = model.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if not ids:
            raise MxdError(f"the prompt {prompt!r} has no tokens; give it a word.")
        row = np.array([head + ids])
        last = np.arange(row.size)[None] == row.size - 1
        for name, code, _ in codes(model, trained, row, last):
            if units := _strongest(code):
                found[name].append({"prompt": prompt, "units": units})
    return found


def _mean_and_spread(name: str, values: Float[Tensor, " units"]) -> dict[str, float]:
    return {name: float(values.mean()), f"{name}_sd": float(values.std(correction=0))}


def _leading(code: Code) -> tuple[Int[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Return for each token the unit with the largest activation, and that activation."""
    activation, place = code.activations.max(-1)
    return code.indices.gather(-1, place.unsqueeze(-1)).squeeze(-1), activation


def _strongest(code: Code) -> list[dict[str, Any]]:
    """Return the active units of a single token with the largest activations, the strongest first."""
    activations, places = code.activations[0].topk(min(LEADERS, code.activations.shape[-1]))
    found = zip(code.indices[0, places].tolist(), activations.tolist(), strict=True)
    return [{"unit": unit, "activation": activation} for unit, activation in found if activation > 0]
