"""One forward and backward pass of a model whose MLPs are replaced together, for the loss of its predictions.

``joint_backward`` is what tuning runs and what the planner measures.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxd.layers import Code, ReplacementLayer
from mxd.layers.losses import squared_error
from mxd.model.families import unwrap
from mxd.model.frozen import FrozenModel
from mxd.model.unembedding import Unembedding
from mxd.ops.tiled import tiled_sum
from mxd.splice import Splice
from mxd.tuning import TuneConfig

LOGITS = 2**24
"""Logits that exist at a time, of the base and of the spliced model each: 64 MiB in float32."""


@dataclass
class Compared:
    """A layer beside its base MLP, on the same inputs."""

    y: Float[Tensor, "tokens d_out"]
    """The base MLP's output."""
    error: Float[Tensor, " tokens"]
    """Squared error of each token."""
    nmse: Float[Tensor, " tokens"]
    """The normalized MSE's term of each token."""


class TunedMLP(nn.Module):
    """A layer in its MLP's place, which keeps what its last forward adds to the loss."""

    code: Code
    penalty: Tensor
    compared: Compared | None = None

    def __init__(self, layer: ReplacementLayer, base: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._base = (base,)  # in a tuple: no module of this one
        self.compare = False
        """Whether the next forward compares the layer with the base MLP."""
        self.held = False
        """Whether the normalized MSE is part of the loss; gradients then flow through the base MLP, too."""

    def forward(self, x: Float[Tensor, "batch seq d_in"]) -> Float[Tensor, "batch seq d_out"]:
        """Return the layer's output."""
        rows, y, reads_output = x.flatten(0, -2), None, self.layer.config.reads != "mlp_in"
        if self.compare or reads_output:
            with torch.set_grad_enabled(self.held or reads_output):
                y = self._base[0](x).flatten(0, -2)
        read = rows if y is None else self.layer.read(rows, y)
        self.code = self.layer.encode(read)
        out = self.layer.decode(read, self.code)
        self.penalty = self.layer.penalty(self.code)
        if self.compare and y is not None:
            y = y.float()
            error = squared_error(out, y)
            norm = torch.linalg.vector_norm(y, dim=-1).clamp_min(1e-30)
            self.compared = Compared(y, error, error / norm / y.shape[-1])
        return out.view(*x.shape[:-1], -1).to(x.dtype)


def joint_backward(
    base: FrozenModel,
    unembedding: Unembedding,
    splice: Splice,
    modules: Sequence[TunedMLP],
    ids: Int[Tensor, "contexts seq"],
    counted: Bool[Tensor, "contexts seq"],
    how: TuneConfig,
    shares: "Shares",
    hidden: Float[Tensor, "contexts seq width"] | None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Run a spliced model forward and backward over some contexts, and add to its replacements' gradients.

    Args:
        base: the frozen base model.
        unembedding: its last map.
        splice: puts the modules into it.
        modules: the replacements.
        ids: the contexts.
        counted: which tokens count, as targets and where layers are compared with their MLPs.
        how: the loss.
        shares: what sums over these contexts are multiplied by.
        hidden: the base model's final hidden states, for the divergence from it.

    Returns:
        The sum of the targets' losses, and what was minimised.
    """
    expected = None if hidden is None else hidden[:, :-1].flatten(0, 1)
    loss = partial(_tile_loss, unembedding, expected, ids[:, 1:].flatten(), counted[:, 1:].flatten())
    with splice.entered(), checkpointed(base) if how.checkpointing else nullcontext():
        found = unembedding.hidden(ids)[:, :-1].flatten(0, 1)
        total = tiled_sum(found, loss, max(1, LOGITS // base.vocabulary))
        objective = total * shares.of_target
        objective = objective + sum(module.penalty for module in modules) * (counted.sum() * shares.of_token)
        if how.nmse:
            terms = (module.compared.nmse for module in modules if module.compared is not None)
            objective = objective + how.nmse * shares.of_token * sum((t * counted.flatten()).sum() for t in terms)
        objective.backward()
    return total.detach(), objective.detach()


@dataclass(frozen=True)
class Shares:
    """By what sums over one process' part of a step are multiplied, so that the processes' average is the mean."""

    targets: int
    """Targets of the step, over all processes."""
    tokens: int
    """Tokens of it that count."""
    world: int

    @property
    def of_target(self) -> float:
        """For sums over targets."""
        return self.world / max(self.targets, 1)

    @property
    def of_token(self) -> float:
        """For sums over tokens."""
        return self.world / max(self.tokens, 1)


def _tile_loss(
    unembedding: Unembedding,
    base: Float[Tensor, "tokens width"] | None,
    targets: Int[Tensor, " tokens"],
    kept: Bool[Tensor, " tokens"],
    hidden: Float[Tensor, "some width"],
    part: slice,
) -> Float[Tensor, ""]:
    """Return the sum of some targets' losses: the divergence from the base model, or their cross-entropy.

    Args:
        unembedding: makes logits of hidden states.
        base: the base model's final hidden states; ``None`` for the cross-entropy.
        targets: the tokens to predict.
        kept: which of them count.
        hidden: the spliced model's final hidden states of some tokens.
        part: where these are.
    """
    logits = unembedding.logits(hidden)
    if base is None:
        losses = F.cross_entropy(logits, targets[part].to(logits.device), reduction="none")
    else:
        with torch.no_grad():
            expected = unembedding.logits(base[part]).log_softmax(-1)
        losses = F.kl_div(logits.log_softmax(-1), expected, reduction="none", log_target=True).sum(-1)
    return (losses * kept[part].to(losses.device)).sum()


@contextmanager
def checkpointed(base: FrozenModel) -> Iterator[None]:
    """Run every block again in the backward pass, in place of keeping what happens inside it."""
    blocks = [unwrap(block) for block in base.blocks]
    own = [block.__dict__.get("forward") for block in blocks]  # set where accelerate has hooked a block

    def again(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for block in blocks:
        block.forward = again(block.forward)
    try:
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward
