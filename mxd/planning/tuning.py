"""What a tuning needs: memory, disk and work, known before any weight is loaded.

The passes that tuning takes (``mxd.joint``) are metered on the meta device; the rest is counted from shapes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from pydantic import ValidationError
from torch import Tensor, nn

from mxd.artifacts.checkpoint import Trained
from mxd.artifacts.folders import find_layers, layer_name, read_layer
from mxd.artifacts.sets import set_names
from mxd.common.errors import MxdError
from mxd.config import RunConfig, tuning_as_training
from mxd.data.exchange import RankPart
from mxd.joint import Shares, TunedMLP, joint_backward
from mxd.layers import ReplacementConfig
from mxd.model.frozen import FrozenModel
from mxd.model.unembedding import Unembedding
from mxd.ops import candidate_dtype, metered_as
from mxd.planning.layout import ParallelLayout, Replacements, plan_layers
from mxd.planning.memory import ADAM_BYTES, MOMENT_BYTES
from mxd.planning.plan import Plan, work_per_token
from mxd.planning.process import base_process, state_disk
from mxd.planning.profiler import Cost, meter
from mxd.questions import refusal
from mxd.splice import Splice
from mxd.tuning import TuneConfig

LOWER = (
    "Raise accumulation (--accumulation), set checkpointing (--checkpointing), lower batch_tokens (--batch-tokens), "
    "load the base model in bfloat16 (model.dtype), or tune fewer sets at a time"
)
"""What to change where a tuning does not fit."""


def as_tuning(config: RunConfig) -> RunConfig:
    """Return the config of the tuning that a run's config describes; a tuning's own stays as it is.

    Raises:
        MxdError: a value that a tuning cannot have.
    """
    if config.tune.of:
        return config
    try:
        training = tuning_as_training(config.tune)
    except ValidationError as error:
        raise refusal(error, TuneConfig) from error
    return config.model_copy(update={"run": f"{config.run}-tuned", "training": training})


def plan_tuning(
    config: RunConfig, model: Any = None, world: int = 1, layers: Mapping[str, Trained] | None = None
) -> Plan:
    """Return what a tuning needs. Nothing is loaded but the base model's configuration and those of layers.

    Args:
        config: of a tuning, or of a run whose layers are to be tuned as it says under ``tune``.
        model: a loaded base model, used in place of ``config.model.source``.
        world: processes that tune together.
        layers: the layers that are tuned, where they are loaded.

    Raises:
        MxdError: no such model, block, device or layer, a size that does not fit, or as ``contexts_of_a_step``.
    """
    how, process = config.tune, base_process(config, model)
    shape, device = process.shape, process.device
    replacements = _tuned_layers(config, shape, layers)
    sets = {name: tuple(own.values()) for name, own in set_names(replacements).items()}
    contexts = contexts_of_a_step(config, world) // world // how.accumulation
    base, costs = _costs(
        shape, device, how, [[replacements[n] for n in own] for own in sets.values()], (contexts, config.data.context)
    )
    sizes = {name: sum(replacements[n][1].num_params for n in own) for name, own in sets.items()}
    params, units = sum(sizes.values()), sum(layer.num_units or 0 for _, layer in replacements.values())
    loaded = 4 * params if layers is not None else 0  # on the host, in what Python takes now
    process = replace(process, python=max(0, process.python - loaded))
    step = max(cost.peak - 4 * own for cost, own in zip(costs, sizes.values(), strict=True))
    running = process.running(12 * max(layer.num_params for _, layer in replacements.values()))
    host = {"loading": process.loading, "tuning": running}
    memory = {
        "loading": {"base model": process.weights},
        "tuning": {
            "base model": process.weights,
            "replacements": 4 * params,
            "counters": 8 * units,
            "gradients": 4 * params,
            "moments": MOMENT_BYTES["adam"] * params,
            "largest step": step,
        },
    }
    if device.type == "cpu":  # one memory for both
        memory, host = {phase: host[phase] | memory[phase] for phase in memory}, {}
        # What the heap keeps of freed memory and cannot use again: found by measuring (docs/scaling.md).
        memory["tuning"]["freed, not reused"] = step // 4 + 2 * max(cost.largest for cost in costs)
    tokens, rows = how.batch_tokens, contexts * config.data.context
    work = {"base model": work_per_token(base, rows)} | {
        name: work_per_token(cost, rows, ADAM_BYTES * sizes[name] / tokens)
        for name, cost in zip(sets, costs, strict=True)
    }
    layout = ParallelLayout((tuple(replacements),), world, tuple(RankPart((), rank, world) for rank in range(world)))
    disk = state_disk(params, units, tuning_as_training(how).keep_states)
    return Plan(dict(replacements), device, how.accumulation, memory, host, disk, layout, {}, work, sets=sets)


def contexts_of_a_step(config: RunConfig, world: int) -> int:
    """Return how many contexts a step of a tuning takes.

    Args:
        config: the tuning's.
        world: processes that tune together.

    Raises:
        MxdError: they cannot be divided into whole contexts, processes and parts.
    """
    how, context = config.tune, config.data.context
    parts = context * world * how.accumulation
    if how.batch_tokens % parts:
        raise MxdError(
            f"batch_tokens = {how.batch_tokens} must be a multiple of {parts}: contexts of {context} tokens x "
            f"{world} processes x accumulation {how.accumulation}."
        )
    return how.batch_tokens // context


def _tuned_layers(config: RunConfig, shape: FrozenModel, layers: Mapping[str, Trained] | None) -> Replacements:
    """Return name -> (block, complete config) of what is tuned: layers that are there, or those a run would train."""
    if layers is not None:
        return {name: (own.provenance.block, own.layer.config) for name, own in layers.items()}
    if not config.tune.of:
        return plan_layers(config, shape)
    folders = [folder for path in config.tune.of for folder in find_layers(path, weights=False)]
    read = {layer_name(folder): read_layer(folder) for folder in folders}
    return {name: (provenance.block, layer) for name, (layer, provenance) in read.items()}


def _costs(
    shape: FrozenModel,
    device: torch.device,
    how: TuneConfig,
    sets: Sequence[Sequence[tuple[int, ReplacementConfig]]],
    size: tuple[int, int],
) -> tuple[Cost, list[Cost]]:
    """Return the cost of a part of a step, without Adam's: of the base model's forward, and of each set's passes.

    Args:
        shape: the base model, on the meta device (on another one the passes are taken).
        device: where it will run.
        how: the loss.
        sets: block and config of each set's layers.
        size: contexts in a part, and their tokens.
    """
    ids = torch.zeros(size, dtype=torch.int64, device=shape.device)
    with metered_as(device.type):
        unembedding = Unembedding(shape, _head(shape, ids[:1]))
        hidden: list[Float[Tensor, "contexts seq width"]] = []
        base = Cost()
        if how.loss == "kl":
            base = meter(torch.no_grad()(lambda: hidden.append(unembedding.hidden(ids))))
        expected = hidden[0] if hidden else None
        passes = [_Passes(shape, device, how, own, unembedding, ids, expected) for own in sets]
        costs = [own.cost() for own in passes]
    return base, [replace(cost, peak=max(base.peak, base.kept + cost.peak)) for cost in costs]


@torch.no_grad()
def _head(shape: FrozenModel, ids: Int[Tensor, "contexts seq"]) -> nn.Module | None:
    """Return a model's output embeddings, or ``None`` where it does something else to its logits.

    ``Unembedding.of`` compares numbers, which the meta device lacks; here the logits must be what the embeddings gave.
    """
    head = getattr(shape.module, "get_output_embeddings", lambda: None)()
    if head is None:
        return None
    seen: list[Tensor] = []
    handle = head.register_forward_hook(lambda module, args, out: seen.append(out))
    try:
        meter(lambda: seen.append(shape.module(input_ids=ids, use_cache=False).logits))  # it answers for numbers
    finally:
        handle.remove()
    return head if seen[0] is seen[-1] and len(seen) == 2 else None


@dataclass(frozen=True)
class _Passes:
    """Forward and backward of one set over a part of a step."""

    shape: FrozenModel
    device: torch.device
    how: TuneConfig
    layers: Sequence[tuple[int, ReplacementConfig]]
    unembedding: Unembedding
    ids: Int[Tensor, "contexts seq"]
    hidden: Float[Tensor, "contexts seq width"] | None

    def cost(self) -> Cost:
        """Return the cost of a part, where layers are compared with their MLPs only if the loss asks for it.

        Peak memory is that of parts at which they are, also of one that adds to gradients.
        """
        modules = {number: self._module(number, config) for number, config in self.layers}
        params = 4 * sum(config.num_params for _, config in self.layers)
        shares = Shares(self.ids.numel(), self.ids.numel(), 1)
        counted = torch.ones_like(self.ids, dtype=torch.bool)
        args = self.shape, self.unembedding, Splice(self.shape, modules), list(modules.values()), self.ids, counted
        part = partial(joint_backward, *args, self.how, shares, self.hidden)
        compared = meter(part)
        peak = max(compared.peak, params + meter(part).peak) if self.how.accumulation > 1 else compared.peak
        if self.how.nmse:
            return replace(compared, peak=peak)
        for module in modules.values():
            module.compare, module.compared = False, None
        return replace(meter(part), peak=peak, largest=compared.largest)

    def _module(self, number: int, config: ReplacementConfig) -> TunedMLP:
        config = config.model_copy(update={"sparsity": config.sparsity.costliest})
        with torch.device(self.shape.device):
            layer = config.build().eval()
        layer.sparsity.candidates = candidate_dtype(self.device)
        module = TunedMLP(layer, self.shape.mlp(number)).eval()
        module.compare, module.held = True, self.how.nmse > 0
        return module
