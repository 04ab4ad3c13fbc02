"""The units: the rank of their weights (MxD, arXiv 2505.21364, app. B.4), and which of them leads (C.2, figure 21)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mxd.artifacts.checkpoint import Trained
from mxd.common.numbers import plural
from mxd.common.progress import progress
from mxd.data.contexts import Contexts, head_ids, prompt_ids
from mxd.evaluation.checkpoints import Subject
from mxd.evaluation.ranks import weight_ranks
from mxd.evaluation.units import token_strings
from mxd.evaluation.walk import CodeMoments, codes, evaluating, streamed
from mxd.layers import Code
from mxd.model.frozen import FrozenModel
from mxd.questions import DEFAULTS, StructureConfig

LEADERS = 4
"""Units named for each token of a prompt, as in figure 21."""


def answer(subject: Subject, how: StructureConfig = DEFAULTS.structure) -> dict[str, Any]:
    """Look at the units of checkpoints.

    Raises:
        MxdError: as ``evaluate_structure``.
    """
    results = evaluate_structure(subject.base, subject.trained, subject.contexts(how.seed), how)
    return subject.document(results, replacements=subject.members, tokens_asked=how.tokens, seed=how.seed)


@torch.no_grad()
def evaluate_structure(
    model: FrozenModel,
    layers: Mapping[str, Trained],
    contexts: Contexts,
    how: StructureConfig = DEFAULTS.structure,
    forward_contexts: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Look at the units of trained layers: their ranks, and which of them lead.

    The unit that leads at a token is the one with the largest activation. A shared expert leads everywhere; training
    with a random K is meant to end that.

    Args:
        model: the frozen base model.
        layers: name -> a layer with its provenance; the base model runs once for all of them.
        contexts: the text over which leads and rates are counted.
        how: what is asked. Positions are rounded up to whole contexts; those a layer was trained without do not count.
        forward_contexts: contexts in one forward, by default about 1,024 tokens.

    Returns:
        Name -> mean ``normalized_rank`` and ``stable_rank`` of ``experts`` units whose weights have ``shape``, with
        their standard deviations ``*_sd``, and how many of the units are rank-``deficient``; over the text's
        ``tokens``, the unit that leads most often and its share of them, ``leader``; and for each prompt, under
        ``leading``, as ``leading_units`` returns it, with the ``rate`` of each of the ``units`` over the text.

    Raises:
        MxdError: no layers, no text, or layers of another model.
    """
    counted = {name: _Counted(trained) for name, trained in layers.items()}
    for prompt in how.prompts:  # before the text is read
        prompt_ids(model.tokenizer, prompt)
    with evaluating(model, layers):
        with progress(f"structure: leading units of {plural(len(layers), 'layer')}", how.tokens) as advance:
            for batch in streamed(contexts, how.tokens, forward_contexts):
                for name, code, _ in codes(model, layers, batch):
                    counted[name].see(code)
                advance(batch.size)
        counts = {name: min(how.experts, trained.layer.num_units) for name, trained in layers.items()}
        with progress(f"structure: ranks of {plural(len(layers), 'layer')}", sum(counts.values()), "units") as advance:
            ranks = {
                name: weight_ranks(trained.layer, range(counts[name]), advance) for name, trained in layers.items()
            }
        prompted = leading_units(model, layers, how.prompts)
    return {
        name: {
            "block": trained.provenance.block,
            **_ranked(*ranks[name]),
            "shape": list(trained.layer.unit_weight(0).shape),
            **counted[name].report(),
            "leading": [row | {"units": counted[name].with_rates(row["units"])} for row in prompted[name]],
        }
        for name, trained in layers.items()
    }


class _Counted:
    """Over a text: at how many tokens each unit of a layer fires, and at how many it leads."""

    def __init__(self, trained: Trained) -> None:
        self.moments = CodeMoments(trained.layer)
        self.leads = torch.zeros(trained.layer.num_units, dtype=torch.int64)

    def see(self, code: Code) -> None:
        """Count the code of some tokens."""
        self.moments.count(code)
        unit, activation = _leading(code)
        self.leads += torch.bincount(unit[activation > 0].cpu(), minlength=len(self.leads))

    def report(self) -> dict[str, Any]:
        """Return the number of tokens, and the unit that leads most often."""
        tokens = self.moments.tokens
        leader = {"unit": int(self.leads.argmax()), "share": float(self.leads.max()) / max(tokens, 1)}
        return {"tokens": tokens, "leader": leader}

    def with_rates(self, units: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return units with their firing rates."""
        return [{**unit, "rate": float(self.moments.rates[unit["unit"]])} for unit in units]


def _ranked(normalized: Float[Tensor, " units"], stable: Float[Tensor, " units"]) -> dict[str, Any]:
    """Return what is said of the ranks of some units."""
    return {
        **_mean_and_spread("normalized_rank", normalized),
        **_mean_and_spread("stable_rank", stable),
        "deficient": int((normalized < 1).sum()),
        "experts": len(normalized),
    }


def leading_units(
    model: FrozenModel, layers: Mapping[str, Trained], prompts: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return for each layer and prompt the units with the largest activations, token by token (figure 21).

    Args:
        model: the frozen base model, with its tokenizer.
        layers: name -> a layer with its provenance.
        prompts: the prompts.

    Returns:
        Name -> for each prompt at whose last token a unit is active ``prompt``; ``units``: up to four there, each with
        its ``activation``, the strongest first; and ``tokens``: for each of its tokens the text, ``token``, and the
        numbers of its ``units``, none at a token that does not count for the layer.

    Raises:
        MxdError: the model has no tokenizer, or a prompt has no token.
    """
    head = head_ids(model.tokenizer)
    leading: dict[str, list[dict[str, Any]]] = {name: [] for name in layers}
    for prompt in prompts:
        ids = prompt_ids(model.tokenizer, prompt)
        words = token_strings(model.tokenizer, ids)
        for name, code, position in codes(model, layers, np.array([head + ids])):
            at = dict(zip(position - len(head), _strongest(code), strict=True))
            strongest = [at.get(n, []) for n in range(len(ids))]
            if strongest[-1]:
                tokens = [
                    {"token": word, "units": [unit["unit"] for unit in units]}
                    for word, units in zip(words, strongest, strict=True)
                ]
                leading[name].append({"prompt": prompt, "units": strongest[-1], "tokens": tokens})
    return leading


def _mean_and_spread(name: str, values: Float[Tensor, " units"]) -> dict[str, float]:
    return {name: float(values.mean()), f"{name}_sd": float(values.std(correction=0))}


def _leading(code: Code) -> tuple[Int[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Return for each token the unit with the largest activation, and that activation."""
    activation, column = code.activations.max(-1)
    return code.indices.gather(-1, column.unsqueeze(-1)).squeeze(-1), activation


def _strongest(code: Code) -> list[list[dict[str, Any]]]:
    """Return for each token the active units with the largest activations, the strongest first."""
    activations, columns = code.activations.topk(min(LEADERS, code.activations.shape[-1]))
    units = code.indices.gather(-1, columns)
    return [
        [{"unit": unit, "activation": activation} for unit, activation in zip(*token, strict=True) if activation > 0]
        for token in zip(units.tolist(), activations.tolist(), strict=True)
    ]
