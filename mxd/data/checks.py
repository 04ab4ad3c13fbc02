"""What no stream of activations may hold: another text than before, numbers that no block can be trained on."""

import torch
from torch import Tensor

from mxd.common.errors import MxdError
from mxd.model.frozen import FrozenModel

MOST_USELESS = 1000
"""Contexts in a row that may hold nothing but excluded tokens."""


def check_text(before: str, now: str) -> None:
    """Compare the hashes of the token ids that a stream was read from, and is read from now.

    Raises:
        MxdError: they differ.
    """
    if now != before:
        raise MxdError(
            f"the text, or its tokenizer, is not what it was: its token ids had the hash {before} and have "
            f"{now or 'none, for it ends before'}. A text that is added to or sorted is another one, too: put it back, "
            "or begin anew under another name."
        )


def check_activations(block: int, x: Tensor, y: Tensor, ids: Tensor, model: FrozenModel) -> None:
    """Refuse what would poison every later step: a NaN, an infinity, a target whose norm is zero.

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
