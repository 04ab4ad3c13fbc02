"""One replacement under training, and the step it takes: from a batch to an update of the weights."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from mxd.common.processes import ALONE, Processes
from mxd.config import TrainingConfig
from mxd.layers import Covariance, Initialisation, ReplacementConfig, ReplacementLayer
from mxd.layers.objective import forward_backward
from mxd.ops import CandidateDtype, candidate_dtype
from mxd.training.metrics import Stats

Site = tuple[Float[Tensor, "*batch d_in"], Float[Tensor, "*batch d_out"]]
"""Input and output of an MLP."""


@dataclass
class Trainee:
    """One replacement under training."""

    name: str
    number: int
    """The block whose MLP it replaces."""
    layer: ReplacementLayer
    optimizer: torch.optim.Adam
    stats: Stats
    processes: Processes = ALONE
    """Its group: they take each step together, each with an equal part of the batch."""

    def initialise(
        self, means: Site, bos: Site | None, initialisation: Initialisation, covariance: Covariance | None = None
    ) -> None:
        """Initialise from the data what is not drawn at random.

        Args:
            means: means of the MLP's inputs and outputs.
            bos: input and output at BOS in position 0, for a layer that stores them.
            initialisation: as for ``ReplacementLayer.initialise``.
            covariance: second moments, for a layer that asks for them.
        """
        self.layer.initialise(self.layer.read(*means), means[1], initialisation, covariance)
        if bos is not None:
            self.layer.store_bos(self.layer.read(*bos), bos[1])

    @property
    def sharded(self) -> bool:
        """Whether each process keeps only a part of the weights, gradients and moments."""
        return isinstance(self.layer.bias, DTensor)

    def shard(self) -> None:
        """Divide weights, gradients and moments among the processes (torch's ``fully_shard``, ZeRO stage 3).

        A step gathers the weights of this trainee alone, and frees them afterwards.
        """
        mesh = self.processes.mesh(self.layer.bias.device.type)
        fully_shard(self.layer, mesh=mesh, reshard_after_forward=False)
        for method in ("encode", "decode"):
            register_fsdp_forward_method(self.layer, method)
        self.optimizer = _adam(self.layer)


def train_step(
    trainee: Trainee,
    x: Float[Tensor, "tokens d_in"],
    y: Float[Tensor, "tokens d_out"],
    lr: float,
    tokens_seen: int,
    accumulation: int = 1,
    clip_norm: float | None = None,
) -> None:
    """Take one optimiser step of one replacement (MxD, section 3.1).

    Args:
        trainee: the replacement.
        x: the MLP's inputs.
        y: the MLP's outputs.
        lr: learning rate of this step.
        tokens_seen: tokens trained on, this batch included.
        accumulation: number of equal parts the batch is processed in.
        clip_norm: largest gradient norm.
    """
    trainee.optimizer.zero_grad(set_to_none=True)
    for x_part, y_part in zip(x.chunk(accumulation), y.chunk(accumulation), strict=True):
        result = forward_backward(trainee.layer, x_part, y_part, accumulation)
        with torch.no_grad():
            measures = trainee.layer.sparsity.measures(result.code)
        trainee.stats.see(y_part, result.error, result.loss, result.code, tokens_seen, measures)
    if not trainee.sharded:  # where it is, the backward pass averaged
        trainee.processes.average(
            [parameter.grad for parameter in trainee.layer.parameters() if parameter.grad is not None]
        )
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(trainee.layer.parameters(), clip_norm)
    for group in trainee.optimizer.param_groups:
        group["lr"] = lr
    trainee.optimizer.step()


def learning_rate(step: int, training: TrainingConfig) -> float:
    """Return the rate of a step, counted from 0: linear warm-up, then constant, or falling to zero after the last."""
    settings = training.settings
    rise = min(1.0, (step + 1) / (settings.warmup_steps + 1))
    left = (training.steps - step) / max(1, training.steps - settings.warmup_steps)
    return settings.lr * rise * (min(1.0, left) if settings.decay else 1.0)


def new_trainee(
    name: str,
    number: int,
    config: ReplacementConfig,
    seed: int,
    device: torch.device,
    candidates: Literal["auto"] | CandidateDtype = "float32",
    processes: Processes = ALONE,
) -> Trainee:
    """Return a replacement at the beginning of its training.

    Args:
        name: its name in the run.
        number: the block whose MLP it replaces.
        config: its complete config.
        seed: of its weights and draws.
        device: where it is trained.
        candidates: dtype that all pre-activations are first computed in (``training.candidates``).
        processes: those that train it together.
    """
    layer = config.build(seed).to(device).train()
    layer.sparsity.candidates = candidate_dtype(device, candidates)
    layer.sparsity.processes = processes
    stats = Stats(layer.num_units, config.d_out or 0, device, layer.sparsity.measured)
    return Trainee(name, number, layer, _adam(layer), stats, processes)


def learned(layer: ReplacementLayer) -> dict[str, torch.nn.Parameter]:
    """Return name -> parameter for all that are trained, which a stored constant is not."""
    return {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}


def _adam(layer: ReplacementLayer) -> torch.optim.Adam:
    return torch.optim.Adam(learned(layer).values(), fused=layer.bias.device.type in ("cpu", "cuda"))
