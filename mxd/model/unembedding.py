"""The last map of a model, from final hidden states to logits, apart from what comes before it."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mxd.model.frozen import FrozenModel, StopForward


@dataclass(frozen=True)
class Unembedding:
    """Final hidden states, and the logits that they become.

    So logits can be formed for some tokens at a time: those of 1,024 tokens take 200 MB for a vocabulary of 49,152.
    """

    model: FrozenModel
    head: nn.Module | None
    """The output embeddings; ``None`` for a model that does something else to its logits (a cap, say): its hidden
    states are then its logits, of all tokens at once."""

    @staticmethod
    @torch.no_grad()
    def of(model: FrozenModel, ids: Int[Tensor, "batch seq"]) -> "Unembedding":
        """Find a model's output embeddings, and try them on a few tokens.

        Args:
            model: the model.
            ids: what they are tried on.
        """
        found = Unembedding(model, getattr(model.module, "get_output_embeddings", lambda: None)())
        whole = Unembedding(model, None)
        if found.head is None:
            return whole
        alike = torch.allclose(found.logits(found.hidden(ids)), model.logits(ids), rtol=1e-3, atol=1e-3)
        return found if alike else whole

    def hidden(self, ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq width"]:
        """Run the model up to its final hidden states."""
        run = {"input_ids": ids.to(self.model.device), "use_cache": False}
        if self.head is None:
            return self.model.module(**run).logits
        kept: list[Tensor] = []

        def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
            kept.append(args[0])
            raise StopForward

        handle = self.head.register_forward_pre_hook(keep)
        try:
            with suppress(StopForward):
                self.model.module(**run)
        finally:
            handle.remove()
        return kept[0]

    def logits(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocab"]:
        """Return the logits of hidden states, in float32."""
        return (hidden if self.head is None else self.head(hidden)).float()
