"""A module of one's own as a base model: token ids in, logits out, with a list of blocks that have an ``mlp`` each."""

import copy
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from mxd.common.errors import MxdError


class PlainModel(nn.Module):
    """Calls a module as transformers' models are called, so that the rest of mxd can use it.

    Args:
        module: maps token ids ``[batch, seq]`` to logits ``[batch, seq, vocab]``, to a tuple that begins with them, or
            to an object that has ``logits``. Its first ``nn.Embedding`` is that of the tokens.

    Raises:
        MxdError: it has no embedding.
    """

    def __init__(self, module: nn.Module) -> None:
        from transformers import PretrainedConfig

        super().__init__()
        embeddings = [child for child in module.modules() if isinstance(child, nn.Embedding)]
        if not embeddings:
            raise MxdError(
                f"a {type(module).__name__} is not a base model, for it has no nn.Embedding of tokens; give a name, a "
                "path, a loaded causal LM, or a module that maps token ids to logits."
            )
        self.module = module
        vocabulary, width = embeddings[0].weight.shape
        known: dict[str, Any] = {"hidden_size": width, "vocab_size": vocabulary, "name_or_path": type(module).__name__}
        self.config = PretrainedConfig(**known)

    def forward(self, input_ids: Int[Tensor, "batch seq"], **_: Any) -> Any:
        """Return an object that has the logits; options of transformers' models are left out."""
        out = self.module(input_ids)
        out = out[0] if isinstance(out, tuple) else out
        return SimpleNamespace(logits=out) if isinstance(out, Tensor) else out

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embedding of the tokens."""
        return next(child for child in self.module.modules() if isinstance(child, nn.Embedding))

    def get_output_embeddings(self) -> None:
        """Return ``None``: which map makes the logits is not known."""

    def on_meta(self) -> "PlainModel":
        """Return a copy without weights."""
        tensors = chain(self.parameters(), self.buffers())
        without = {id(tensor): _empty(tensor) for tensor in tensors}
        return copy.deepcopy(self, cast(dict[int, Any], without))


def _empty(tensor: Tensor) -> Tensor:
    meta = torch.empty_like(tensor, device="meta")
    return nn.Parameter(meta, requires_grad=False) if isinstance(tensor, nn.Parameter) else meta
