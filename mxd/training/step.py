"""One replacement under training: its layer, its optimiser, what is counted, and the step that all of them take."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from mxd.common.processes import ALONE, Processes, placed_as, whole
from mxd.config import TrainingConfig
from mxd.layers import Code, ReplacementConfig, ReplacementLayer
from mxd.ops import Proposals, proposals_on
from mxd.ops.losses import normalize, squared_error

ADAM_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Stats:
    """What is counted between two lines of metrics, and when each unit was last active. All of it is saved."""

    def __init__(self, units: int, width: int, device: torch.device) -> None:
        self.sums = {
            name: torch.zeros(shape, device=device)
            for name, shape in {"loss": (), "error": (), "y": (width,), "y_squared": (), "active": ()}.items()
        }
        self.tokens = 0
        self.last_active = torch.zeros(units, dtype=torch.int64, device=device)

    @torch.no_grad()
    def see(self, y: Tensor, error: Tensor, loss: Tensor, code: Code, tokens_seen: int) -> None:
        """Count one (micro-)batch."""
        self.tokens += len(y)
        self.sums["loss"] += loss.detach() * len(y)
        self.sums["error"] += error.detach().sum()
        self.sums["y"] += y.sum(0)
        self.sums["y_squared"] += torch.linalg.vector_norm(y).square()
        active = code.values > 0
        self.sums["active"] += active.sum()
        if code.all_units:
            self.last_active[active.any(0)] = tokens_seen
        else:
            self.last_active[code.indices[active]] = tokens_seen

    def merge(self, processes: Processes) -> None:
        """Hand what the processes of a group counted to the first of them; the others begin anew."""
        if not processes.many:
            return
        for value in self.sums.values():
            processes.add(value)
        self.tokens = sum(processes.gather(self.tokens))
        processes.largest(self.last_active)
        if not processes.first:
            self.clear()

    def clear(self) -> None:
        """Forget what was counted since the last report."""
        for value in self.sums.values():
            value.zero_()
        self.tokens = 0

    def report(self, tokens_seen: int, dead_after: int) -> dict[str, float]:
        """Return the metrics since the last report, and begin anew."""
        n = max(self.tokens, 1)
        total = self.sums["y_squared"] - self.sums["y"].square().sum() / n
        values = {
            "normalized_mse": float(self.sums["loss"] / n),
            "fvu": float(self.sums["error"] / total),
            "l0": float(self.sums["active"] / n),
            "dead_share": float((tokens_seen - self.last_active >= dead_after).float().mean()),
        }
        self.clear()
        return values


@dataclass
class Job:
    """One replacement under training."""

    name: str
    number: int
    layer: ReplacementLayer
    optimizer: torch.optim.Adam
    stats: Stats
    processes: Processes = ALONE
    """Those that take each step together, with an equal part of the batch."""

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the job's state, whole, by name; all processes of the job call this together."""
        found = {f"layer/{k}": whole(v) for k, v in self.layer.state_dict().items()}
        for key, parameter in _learned(self.layer).items():
            for moment in ADAM_MOMENTS:
                value = self.optimizer.state[parameter].get(moment)
                found[f"adam/{moment}/{key}"] = torch.zeros(()) if value is None else whole(value)
        found |= {f"sum/{k}": v for k, v in self.stats.sums.items()}
        return found | {"last_active": self.stats.last_active}

    def trained(self) -> ReplacementLayer:
        """Return the layer as one process has it; all processes of the job call this together."""
        if not self.sharded:
            return self.layer
        layer = self.layer.config.build()
        layer.load_state_dict({k: whole(v) for k, v in self.layer.state_dict().items()})
        return layer

    @property
    def sharded(self) -> bool:
        """Whether each process keeps but a part of the weights, gradients and moments."""
        return isinstance(self.layer.bias, DTensor)

    def shard(self) -> None:
        """Divide weights, gradients and moments among the processes (torch's ``fully_shard``, ZeRO stage 3).

        A step gathers the weights of this job alone, and lets go of them again.
        """
        mesh = self.processes.mesh(self.layer.bias.device.type)
        fully_shard(self.layer, mesh=mesh, reshard_after_forward=False)
        for method in ("encode", "decode"):
            register_fsdp_forward_method(self.layer, method)
        self.optimizer = _adam(self.layer)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put saved tensors back in place."""
        own = {k.removeprefix("layer/"): v for k, v in tensors.items() if k.startswith("layer/")}
        self.layer.load_state_dict({k: placed_as(v, own[k]) for k, v in self.layer.state_dict().items()})
        state = {
            i: {m: placed_as(parameter if m != "step" else None, tensors[f"adam/{m}/{key}"]) for m in ADAM_MOMENTS}
            for i, (key, parameter) in enumerate(_learned(self.layer).items())
        }
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})
        for key, value in self.stats.sums.items():
            value.copy_(tensors[f"sum/{key}"])
        self.stats.last_active.copy_(tensors["last_active"])


def train_step(
    job: Job,
    x: Float[Tensor, "tokens d_in"],
    y: Float[Tensor, "tokens d_out"],
    lr: float,
    tokens_seen: int,
    accumulation: int = 1,
    clip_norm: float | None = None,
) -> None:
    """Take one optimiser step of one replacement (MxD, section 3.1).

    Args:
        job: the replacement.
        x: what the layer reads.
        y: the MLP's outputs.
        lr: learning rate of this step.
        tokens_seen: tokens trained on, this batch included.
        accumulation: number of equal parts the batch is processed in.
        clip_norm: largest gradient norm.
    """
    job.optimizer.zero_grad(set_to_none=True)
    for x_part, y_part in zip(x.chunk(accumulation), y.chunk(accumulation), strict=True):
        code = job.layer.encode(x_part)
        error = squared_error(job.layer.decode(x_part, code), y_part)
        loss = normalize(error, y_part)
        ((loss + job.layer.penalty(code)) / accumulation).backward()
        job.stats.see(y_part, error, loss, code, tokens_seen)
    if not job.sharded:  # else the backward pass has averaged
        job.processes.average([parameter.grad for parameter in job.layer.parameters() if parameter.grad is not None])
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(job.layer.parameters(), clip_norm)
    for group in job.optimizer.param_groups:
        group["lr"] = lr
    job.optimizer.step()


def learning_rate(step: int, training: TrainingConfig) -> float:
    """Return the rate of step 0, 1, ...: linear warm-up, then constant, or falling linearly to zero after the last."""
    settings = training.settings
    rise = min(1.0, (step + 1) / (settings.warmup_steps + 1))
    left = (training.steps - step) / max(1, training.steps - settings.warmup_steps)
    return settings.lr * rise * (min(1.0, left) if settings.decay else 1.0)


def new_job(
    name: str,
    number: int,
    config: ReplacementConfig,
    seed: int,
    device: torch.device,
    proposals: Literal["auto"] | Proposals = "float32",
    processes: Processes = ALONE,
) -> Job:
    """Return a replacement at the beginning of its training."""
    layer = config.build(seed).to(device).train()
    layer.sparsity.proposals = proposals_on(device, proposals)
    stats = Stats(layer.num_units, config.d_out or 0, device)
    return Job(name, number, layer, _adam(layer), stats, processes)


def _learned(layer: ReplacementLayer) -> dict[str, torch.nn.Parameter]:
    """Return name -> parameter of those that are trained; a stored constant is not."""
    return {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}


def _adam(layer: ReplacementLayer) -> torch.optim.Adam:
    return torch.optim.Adam(_learned(layer).values(), fused=layer.bias.device.type in ("cpu", "cuda"))
