"""What a direction in the residual stream adds to the logits by itself: through the final norm and the unembedding.

A final norm divides by the size of the whole stream, which no direction has alone. So the norm's weight is folded into
the unembedding, a LayerNorm's centring is kept, and the division is left out: logits of a direction are known up to one
positive factor for each token, and which tokens come first does not depend on it. A bias of the norm or of the
unembedding is the same for all directions and left out; softmax does not see what all logits share, so their mean over
the vocabulary is taken off.
"""

from copy import deepcopy
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mxd.common.errors import MxdError
from mxd.model.frozen import FrozenModel
from mxd.model.unembedding import Unembedding

ROWS = 8192
"""Tokens of the vocabulary whose rows are cast to float32 at a time."""
DRAWS = 256
"""Random directions that say what is to be expected by chance."""
PROBE = 64.0
"""Size of the numbers that a norm is tried on: a power of two, so that their sums are exact, far above its epsilon."""


@dataclass(frozen=True)
class Lens:
    """The final norm and the unembedding of a model, as one linear map."""

    unembedding: Float[Tensor, "vocab width"]
    scale: Float[Tensor, " width"]
    """The weight that the final norm multiplies by."""
    centred: bool
    """Whether the final norm takes off the mean over the width, as a LayerNorm does and an RMSNorm does not."""
    norm: str
    """The final norm's class."""

    @staticmethod
    @torch.no_grad()
    def of(model: FrozenModel) -> "Lens":
        """Find a model's output embeddings and the norm before them, and try what that norm does.

        Raises:
            MxdError: it has none, or a norm that is neither a LayerNorm nor an RMSNorm.
        """
        head = getattr(model.module, "get_output_embeddings", lambda: None)()
        weight = getattr(head, "weight", None)
        if head is None or weight is None or not weight.is_floating_point():
            raise MxdError(f"{model.source} has no output embeddings that can be read, so no unit promotes tokens.")
        norm = _final_norm(model, head)
        scale, centred = _tried(norm, weight.shape[1], weight.device)
        return Lens(weight, scale, centred, type(norm).__name__)

    @torch.no_grad()
    def logits(self, directions: Float[Tensor, "units width"]) -> Float[Tensor, "units vocab"]:
        """Return what directions add to the logits, about the mean over the vocabulary, undivided by the norm."""
        directions = directions.to(self.scale)
        if self.centred:
            directions = directions - directions.mean(-1, keepdim=True)
        folded = directions * self.scale
        logits = torch.cat([folded @ rows.float().T for rows in self.unembedding.split(ROWS)], -1)
        return logits - logits.mean(-1, keepdim=True)

    def before_norm(self, reading: Float[Tensor, " width"]) -> Float[Tensor, " width"]:
        """Return the direction in the residual stream whose addition a reader of the final states sees most of.

        That is the gradient of ``reading . norm(h)`` at h, up to the norm's division, which is left out as elsewhere.

        Args:
            reading: what the final hidden states are multiplied with: a row of the unembedding, or a probe's weights.
        """
        folded = reading.to(self.scale) * self.scale
        return folded - folded.mean() if self.centred else folded

    def chance(self, seed: int = 0) -> float:
        """Return the mean ``peak`` of random directions, Gaussian in every coordinate."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(DRAWS, len(self.scale), generator=generator)
        return float(torch.cat([peaks(self.logits(part)) for part in drawn.split(32)]).mean())


def peaks(logits: Float[Tensor, "units vocab"]) -> Float[Tensor, " units"]:
    """Return the largest logit of each row in standard deviations over the vocabulary; 0 where all are equal."""
    return logits.amax(-1) / logits.std(-1, correction=0).clamp_min(1e-30)


def _final_norm(model: FrozenModel, head: nn.Module) -> nn.Module:
    """Return the module whose output is what the unembedding reads, the first of them to return."""
    inside = set(model.blocks.modules())
    returned: list[tuple[nn.Module, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda m, args, out: returned.append((m, out)))
        for module in model.module.modules()
        if module not in inside and module is not head
    ]
    try:
        hidden = Unembedding(model, head).hidden(torch.tensor([[0, 1]]))
    finally:
        for handle in handles:
            handle.remove()
    for module, out in returned:
        if isinstance(out, Tensor) and out.shape == hidden.shape and torch.equal(out, hidden):
            return module
    raise MxdError(f"{model.source} has no final norm before its unembedding, so what a unit promotes is not known.")


@torch.no_grad()
def _tried(norm: nn.Module, width: int, device: torch.device) -> tuple[Float[Tensor, " width"], bool]:
    """Return the weight that a norm multiplies by and whether it centres, from what it does, whatever its class."""
    norm = deepcopy(norm).float()
    ones = PROBE * torch.ones(width, device=device)
    signs = torch.where(torch.arange(width, device=device) % 2 == 0, ones, -ones)
    shift = norm(torch.zeros(1, 1, width, device=device))[0, 0]

    def normed(x: Tensor) -> Tensor:
        return norm(x[None, None])[0, 0] - shift

    def divided(x: Tensor) -> Tensor:
        kept = x - x.mean() if centred else x
        return kept / kept.square().mean().sqrt()

    centred = bool(normed(ones).abs().max() <= 1e-3 * normed(signs).abs().max())
    scale = normed(signs) / divided(signs)
    x = PROBE * torch.randn(width, generator=torch.Generator().manual_seed(0)).to(device) + PROBE
    expected = scale * divided(x)
    if not torch.allclose(normed(x), expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max())):
        raise MxdError(
            f"{type(norm).__name__} before the unembedding is neither a LayerNorm nor an RMSNorm, so what a unit "
            "promotes is not known."
        )
    return scale, centred
