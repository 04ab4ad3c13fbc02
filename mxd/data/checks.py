"""Checks of a stream of activations: the text is still the same, and a layer can be trained on the numbers."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mxd.common.errors import MxdError
from mxd.model.frozen import FrozenModel

MOST_USELESS = 1000
"""The most contexts in a row that may hold nothing but excluded tokens."""


def check_text(before: str, now: str) -> None:
    """Compare the hashes of a stream's token ids, before and now.

    Raises:
        MxdError: they differ.
    """
    if now != before:
        raise MxdError(
            f"the text or its tokenizer has changed: its token ids had the hash {before} and now have "
            f"{now or 'none, since it ends before'}. To add to a text, or to sort it, changes it, too: put it back, or "
            "start anew under another name."
        )


def check_activations(
    block: int,
    x: Float[Tensor, "tokens d_in"],
    y: Float[Tensor, "tokens d_out"],
    ids: Int[Tensor, " tokens"],
    model: FrozenModel,
) -> None:
    """Refuse numbers that would spoil every later step: a NaN, an infinity, a target whose norm is zero.

    Args:
        block: the block that they are from.
        x: inputs of its MLP.
        y: outputs of its MLP.
        ids: token ids.
        model: the base model, whose tokenizer spells the token in the message.

    Raises:
        MxdError: one of these; it names the first such token.
    """
    norms = torch.linalg.vector_norm(y, dim=-1)
    bad = ~torch.isfinite(norms) | ~torch.isfinite(x.sum(-1))
    problem = "is not finite"
    if not bad.any():
        bad, problem = norms == 0, "has norm zero, so the normalized MSE is not defined"
    if bad.any():
        token = int(ids[bad.nonzero()[0, 0]])
        text = model.tokenizer.decode([token]) if model.tokenizer is not None else ""
        raise MxdError(
            f"block {block}: an activation {problem} in {int(bad.sum()):,} of {len(bad):,} tokens, first at token id "
            f"{token} {text!r}. Mask such tokens (data.exclude_special), choose another block, or load the base model "
            "in float32."
        )
