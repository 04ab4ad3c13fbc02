"""Is a continuation garbage? How often it repeats itself, and how improbable the base model finds it.

A spliced model that has lost its way writes either the same words over and over, which shows in the share of repeated
4-grams (seq-rep-4 of Welleck et al., ICLR 2020), or words that nobody would expect, which shows in the base model's
cross-entropy of them. Each stands beside the same number of what the base model itself writes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mxd.evaluation.generation import batches_of_one_length
from mxd.evaluation.walk import Mean, cross_entropy
from mxd.model.frozen import FrozenModel

GRAM = 4
"""Tokens in a row that count as a repetition if they came before in the same continuation."""


def repeated_share(continuation: Sequence[int], n: int = GRAM) -> float:
    """Return ``1 - distinct n-grams / n-grams``; 0 where there is none."""
    grams = [tuple(continuation[start : start + n]) for start in range(len(continuation) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@torch.no_grad()
def ce_of_added(
    model: FrozenModel, prompts: Sequence[Sequence[int]], added: Int[Tensor, "prompts n"], batch: int
) -> Float[Tensor, "prompts n"]:
    """Return the model's cross-entropy of each added token, given its prompt and the tokens before.

    Args:
        model: the model as it is, spliced or not.
        prompts: token ids.
        added: the continuations.
        batch: prompts in one forward.
    """
    ce = torch.empty(added.shape)
    for numbers in batches_of_one_length(prompts, batch):
        begun = torch.tensor([list(prompts[number]) for number in numbers])
        ids = torch.cat([begun, added[numbers]], 1).to(model.device)
        logp = model.logits(ids)[:, begun.shape[1] - 1 : -1].log_softmax(-1)
        ce[numbers] = cross_entropy(logp, ids[:, begun.shape[1] :]).cpu()
    return ce


def signs(added: Int[Tensor, "prompts n"], ce: Float[Tensor, "prompts n"]) -> dict[str, Any]:
    """Return what tells garbage from text, as means over prompts with standard errors.

    Args:
        added: the continuations.
        ce: the base model's cross-entropy of each of their tokens.
    """
    repeated = Mean.of([repeated_share(row) for row in added.tolist()], [1] * len(added))
    improbable = Mean()
    improbable.see(ce, torch.ones_like(ce, dtype=torch.bool))
    return {
        "repeated": repeated.value,
        "repeated_se": repeated.standard_error,
        "base_ce": improbable.value,
        "base_ce_se": improbable.standard_error,
    }
