"""Does it decompose? How much of a replacement's output is routing, and how much a dense MLP in disguise.

An MxD contains the base MLP as a special case (one expert always on), so a small cross-entropy increase alone does
not show a decomposition. These numbers stand beside every faithfulness number.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mxd.layers import Code, ReplacementLayer
from mxd.losses import normalized_mse


class CodeMoments:
    """First pass over the tokens: the mean code and how often each unit is active."""

    def __init__(self, layer: ReplacementLayer) -> None:
        self.layer = layer
        self.sums = torch.zeros(layer.num_units, dtype=torch.float64)
        self.counts = torch.zeros(layer.num_units, dtype=torch.int64)
        self.tokens = 0

    def see(self, x: Float[Tensor, "tokens d_in"]) -> None:
        """Count a batch of the layer's inputs."""
        code = self.layer.encode(x)
        values, indices = code.values.cpu().reshape(-1), code.indices.cpu().reshape(-1)
        self.tokens += len(x)
        self.sums.index_add_(0, indices, values.double())
        self.counts.index_add_(0, indices, (values > 0).long())

    def mean_code(self, like: Tensor) -> Code:
        """Return the mean coefficients of all units as a code for every row of ``like``."""
        mean = (self.sums / max(self.tokens, 1)).to(like)
        indices = torch.arange(len(mean), device=like.device)
        return Code(mean.expand(len(like), -1), indices.expand(len(like), -1), all_units=True)

    @property
    def leading_unit(self) -> int:
        """The unit that is active most often."""
        return int(self.counts.argmax())

    @property
    def dead_share(self) -> float:
        """Share of units that were never active."""
        return float((self.counts == 0).float().mean())


class Structure:
    """Second pass: the shares of the output that routing, and that one shared expert, account for."""

    def __init__(self, moments: CodeMoments) -> None:
        self.moments = moments
        self.sums = dict.fromkeys(("output", "routed", "shared", "mean_gate", "effective", "tokens"), 0.0)

    def see(
        self,
        x: Float[Tensor, "tokens d_in"],
        y: Float[Tensor, "tokens d_out"],
        code: Code,
        prediction: Float[Tensor, "tokens d_out"],
    ) -> None:
        """Count a batch, given the code and prediction computed for it."""
        layer = self.moments.layer
        mean_gate = layer.decode(x, self.moments.mean_code(x))
        shared = layer.decode(x, _only(code, self.moments.leading_unit))
        n = len(x)
        self.sums["tokens"] += n
        self.sums["output"] += float((prediction - layer.bias).square().sum())
        self.sums["routed"] += float((prediction - mean_gate).square().sum())
        self.sums["shared"] += float((shared - layer.bias).square().sum())
        self.sums["mean_gate"] += float(normalized_mse(mean_gate, y)) * n
        self.sums["effective"] += float(effective_units(code.values).sum())

    def report(self) -> dict[str, float]:
        """Return the metrics that tell a decomposition from a dense MLP in disguise."""
        output, tokens = max(self.sums["output"], 1e-30), max(self.sums["tokens"], 1)
        return {
            "routed_share": self.sums["routed"] / output,
            "shared_share": self.sums["shared"] / output,
            "nmse_mean_gate": self.sums["mean_gate"] / tokens,
            "effective_units": self.sums["effective"] / tokens,
        }


def effective_units(values: Float[Tensor, "tokens k"]) -> Float[Tensor, " tokens"]:
    """Return ``exp(entropy(a / sum a))``: the number of equally strong units that would be as spread; 0 for none."""
    total = values.sum(-1, keepdim=True)
    p = values / total.clamp_min(1e-30)
    entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
    return torch.where(total.squeeze(-1) > 0, entropy.exp(), 0.0)


def _only(code: Code, unit: int) -> Code:
    """Return the code with all units but one switched off."""
    indices: Int[Tensor, "tokens k"] = code.indices
    return Code(code.values * (indices == unit), indices, code.all_units)
