"""One replacement under training, and the step it takes: from a batch to an update of the weights."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from mxd.common.hardware import tf32_products
from mxd.common.processes import ALONE, Processes
from mxd.config import OptimizerKind, Recipe, TrainingConfig
from mxd.layers import Covariance, ReplacementConfig, ReplacementLayer
from mxd.layers.objective import forward_backward
from mxd.ops import candidate_dtype, dense_dtype, rounded_products
from mxd.training.metrics import Stats
from mxd.training.optimizers import Optimizer

Site = tuple[Float[Tensor, "*batch d_in"], Float[Tensor, "*batch d_out"]]
"""Input and output of an MLP."""


@dataclass
class Trainee:
    """One replacement under training."""

    name: str
    number: int
    """The block whose MLP it replaces."""
    layer: ReplacementLayer
    optimizer: Optimizer
    stats: Stats
    kind: OptimizerKind = "adam"
    """The kind of its optimiser."""
    processes: Processes = ALONE
    """Its group: they take each step together, each with an equal part of the batch."""
    scales: tuple[float, float] = (1.0, 1.0)
    """What the MLP's inputs and outputs are multiplied by, in effect: see ``scale``."""

    def initialise(self, means: Site, bos: Site | None, settings: Recipe, covariance: Covariance | None = None) -> None:
        """Initialise from the data what is not drawn at random.

        Args:
            means: means of the MLP's inputs and outputs.
            bos: input and output at BOS in position 0, for a layer that stores them.
            settings: the recipe's.
            covariance: second moments, for a layer that asks for them.
        """
        self.layer.initialise(self.layer.read(*means), means[1], settings.initialisation, covariance)
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
        for method in ("begin_step", "encode", "decode", "dead_code", "rest"):
            register_fsdp_forward_method(self.layer, method)
        self.optimizer = self._new_optimizer()

    def scale(self, scales: tuple[float, float]) -> None:
        """Train as if inputs and outputs were multiplied by two numbers.

        The layer goes on reading and writing activations as they are: its parameters are multiplied instead
        (``enlarge``), and so are their learning rates (``ReplacementLayer.scaling``). Adam then takes the steps that it
        would take on scaled activations, up to rounding, and nothing is to be folded into the weights afterwards.

        Args:
            scales: the factor of the inputs, and that of the outputs.
        """
        self.scales = scales
        self.optimizer = self._new_optimizer()

    @torch.no_grad()
    def enlarge(self) -> None:
        """Multiply the parameters, as drawn, by their factors."""
        factors = self._factors()
        for name, parameter in learned(self.layer).items():
            parameter.mul_(factors.get(name, 1.0))

    def dead(self, tokens_seen: int, training: TrainingConfig) -> Bool[Tensor, " units"] | None:
        """Return which units are dead, the same in all processes of the group, where the AuxK loss asks for it."""
        if not training.settings.auxk:
            return None
        last_active = self.processes.largest(self.stats.last_active.clone())
        return tokens_seen - last_active >= training.dead_tokens

    def _factors(self) -> dict[str, float]:
        """Return name -> factor of each parameter that has a unit."""
        read, out = self.layer.read(self.scales[0], self.scales[1]), self.scales[1]
        return {name: read**i * out**o for name, (i, o) in self.layer.scaling().items()}

    def _new_optimizer(self) -> Optimizer:
        return Optimizer(learned(self.layer), self.kind, self._factors(), self.scales[1])


def train_step(
    trainee: Trainee,
    x: Float[Tensor, "tokens d_in"],
    y: Float[Tensor, "tokens d_out"],
    training: TrainingConfig,
    step: int,
) -> None:
    """Take one optimiser step of one replacement (MxD, section 3.1).

    Args:
        trainee: the replacement.
        x: the MLP's inputs.
        y: the MLP's outputs.
        training: the recipe.
        step: how many steps have been taken.
    """
    trainee.optimizer.zero_grad()
    layer = trainee.layer
    layer.sparsity.widening = widening(step, training)
    layer.begin_step(layer.read(x, y).chunk(training.parts))
    dead, weight = trainee.dead(step * training.batch_tokens, training), training.settings.auxk
    seen = (step + 1) * training.batch_tokens
    heard, rounded = trainee.processes.together_on(x.device), rounded_products(dense_dtype(x.device, training.dense))
    with tf32_products(training.tf32 != "off"), rounded, heard:
        for x_part, y_part in zip(x.chunk(training.parts), y.chunk(training.parts), strict=True):
            result = forward_backward(layer, x_part, y_part, training.parts, dead, weight)
            with torch.no_grad():
                measures = layer.sparsity.measures(result.code)
            trainee.stats.see(y_part, result.error, result.loss, result.code, seen, measures)
    if not trainee.sharded:  # where it is, the backward pass averaged
        trainee.processes.average([parameter.grad for parameter in layer.parameters() if parameter.grad is not None])
    if training.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(layer.parameters(), training.clip_norm)
    trainee.optimizer.step(learning_rate(step, training))
    layer.sparsity.end_step()


def learning_rate(step: int, training: TrainingConfig) -> float:
    """Return the rate of a step, counted from 0: linear warm-up, then constant, or falling to zero after the last."""
    settings = training.settings
    rise = min(1.0, (step + 1) / (settings.warmup_steps + 1))
    left = (training.steps - step) / max(1, training.steps - settings.warmup_steps)
    return settings.lr * rise * (min(1.0, left) if settings.decay else 1.0)


def mean_sizes(site: Site, processes: Processes) -> tuple[float, float]:
    """Return what inputs and outputs are multiplied by so that tokens have the norm ``sqrt(width)`` on average.

    Args:
        site: a batch of inputs and outputs, or this process' part of it.
        processes: those that have the other parts.
    """
    sums = torch.stack([torch.linalg.vector_norm(t, dim=-1).double().sum() / t.shape[-1] ** 0.5 for t in site])
    tokens = sum(processes.gather(len(site[0])))
    sizes = (processes.add(sums) / tokens).tolist()
    return 1 / sizes[0], 1 / sizes[1]


def widening(step: int, training: TrainingConfig) -> float:
    """Return K of a step, counted from 0, as a multiple of K: ``k_start`` at first, 1 after half of the steps."""
    return 1 + (training.settings.k_start - 1) * max(0.0, 1 - 2 * step / training.steps)


def new_trainee(
    name: str,
    number: int,
    config: ReplacementConfig,
    seed: int,
    device: torch.device,
    training: TrainingConfig,
    processes: Processes = ALONE,
) -> Trainee:
    """Return a replacement at the beginning of its training.

    Args:
        name: its name in the run.
        number: the block whose MLP it replaces.
        config: its complete config.
        seed: of its weights and draws.
        device: where it is trained.
        training: the recipe.
        processes: those that train it together.
    """
    layer = config.build(seed).to(device).train()
    layer.sparsity.candidates = candidate_dtype(device, training.candidates)
    layer.sparsity.processes = processes
    stats = Stats(layer.num_units, config.d_out or 0, device, layer.sparsity.measured)
    kind = training.settings.optimizer
    return Trainee(name, number, layer, Optimizer(learned(layer), kind, {}, 1.0), stats, kind, processes)


def learned(layer: ReplacementLayer) -> dict[str, torch.nn.Parameter]:
    """Return name -> parameter for all that are trained, which a stored constant is not."""
    return {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}
