"""A frozen base model: its MLPs, what flows through them, and what it is recognized by."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mxd.common.errors import MxdError
from mxd.layers import MLPShape, MLPWeights
from mxd.model.families import mlp_shape, mlp_slot, mlp_weights, mlp_widths, unwrap

_BESIDE = re.compile(
    r"_name_or_path|architectures|transformers_version|(torch_)?dtype|quantization_config|use_cache|return_dict|"
    r"problem_type|id2label|label2id|output_.*|summary_.*|.*_token_id|.*drop.*|initializer_range"
)
"""Settings of a model that no activation depends on. Nor are those counted that are off: later versions add such."""


@dataclass(frozen=True)
class FrozenModel:
    """A causal language model in evaluation mode whose parameters take no gradient."""

    module: nn.Module
    """The Hugging Face model."""
    tokenizer: Any
    """Its tokenizer, or ``None``."""
    source: str
    """Hub id, path or bundled name."""
    revision: str | None
    """The commit it was loaded at, where known."""
    blocks: nn.ModuleList
    """Its transformer blocks."""

    @property
    def config(self) -> Any:
        """The Hugging Face config."""
        return self.module.config

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> str:
        """What it runs in, as ``load_frozen`` names it."""
        if getattr(self.module, "is_loaded_in_8bit", False):
            return "int8"
        return str(next(self.module.parameters()).dtype).removeprefix("torch.")

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def check_layer(self, layer: int) -> None:
        """Check that a block exists.

        Raises:
            MxdError: the layer is out of range.
        """
        if not 0 <= layer < self.num_layers:
            raise MxdError(f"layer {layer} is out of range: {self.source} has layers 0 ... {self.num_layers - 1}.")

    def slot(self, layer: int) -> tuple[nn.Module, str]:
        """Return the module and attribute that hold the block's MLP, so that ``setattr`` replaces it."""
        self.check_layer(layer)
        return mlp_slot(self.blocks[layer])

    def mlp(self, layer: int) -> nn.Module:
        """Return the block's MLP module, or what is spliced in its place."""
        parent, name = self.slot(layer)
        return cast(nn.Module, getattr(parent, name))

    def mlp_widths(self, layer: int) -> tuple[int, int]:
        """Return the input and output width of the block's MLP.

        Raises:
            MxdError: it does not map one tensor to one tensor of the same shape.
        """
        mlp = getattr(self.mlp(layer), "base", self.mlp(layer))  # of a spliced block: the MLP it had
        return mlp_widths(mlp, self.module, f"{self.source}: the MLP of layer {layer}")

    def mlp_shape(self, layer: int) -> MLPShape:
        """Return the form of the block's MLP, with ``None`` where it cannot be read."""
        return mlp_shape(self.mlp(layer), self.config, self.mlp_widths(layer))

    def mlp_weights(self, layer: int) -> MLPWeights:
        """Return the MLP's weights in this project's layout.

        Raises:
            MxdError: the MLP's form is not one of ``FAMILIES``, its gate has a bias, or its weights are in 8 bits.
        """
        mlp = self.mlp(layer)
        if self.dtype == "int8":
            raise MxdError(f"{self.source} is loaded in 8 bits; load it in float32 to copy the weights of an MLP.")
        return mlp_weights(mlp)

    def fingerprint(self, layer: int) -> str:
        """Return a short hash of the block's MLP weights; the same in float32, bfloat16 and where copied.

        A strided sample of each tensor, rounded to bfloat16, is hashed: replacements carry it, so that splicing
        into another model or another layer is noticed whatever the model is called.
        """
        digest = hashlib.sha256()
        _sample(digest, self.mlp(layer).parameters())
        return digest.hexdigest()[:16]

    def base_fingerprint(self) -> str:
        """Return a short hash of the whole model: its settings, and all its weights as ``fingerprint`` samples them.

        Whatever changes what the model computes changes it: embeddings, norms, any block, the base of its rotary
        embedding. Where it was loaded from, and in which dtype, does not. A TransformerLens bridge, which splits the
        weights of attention, has another.
        """
        settings = {k: v for k, v in self.config.to_dict().items() if v and not _BESIDE.fullmatch(k)}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
        _sample(digest, self.module.parameters())
        return digest.hexdigest()[:16]

    @property
    def vocabulary(self) -> int:
        """How many token ids it has embeddings for."""
        return len(cast(Any, self.module).get_input_embeddings().weight)

    @torch.no_grad()
    def logits(self, ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
        """Return the next-token logits, in float32."""
        return self.module(input_ids=ids.to(self.device), use_cache=False).logits.float()

    @torch.no_grad()
    def record(
        self, ids: Int[Tensor, "batch seq"], layers: Sequence[int]
    ) -> dict[int, tuple[Float[Tensor, "batch seq d_in"], Float[Tensor, "batch seq d_out"]]]:
        """Return the MLPs' inputs and outputs at some layers; the forward stops after the last of them."""
        with self.watched(layers, stop=True) as found:
            self.module(input_ids=ids.to(self.device), use_cache=False)
        return found

    @contextmanager
    def watched(self, layers: Sequence[int], stop: bool = False) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
        """Collect ``layer -> (MLP input, MLP output)`` of the forwards of this context.

        With ``stop``, a forward ends after the last of the layers, and the context ends with it.
        """
        found: dict[int, tuple[Tensor, Tensor]] = {}

        def keep(layer: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
                found[layer] = (args[0], output)
                if stop and layer == max(layers):
                    raise _StopForward

            return hook

        handles = [self.mlp(layer).register_forward_hook(keep(layer)) for layer in sorted(set(layers))]
        try:
            yield found
        except _StopForward:
            pass
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def resumed(self, layer: int, hidden: Any) -> Iterator[None]:
        """Run forwards from block ``layer`` on: the blocks below hand on ``hidden`` without computing anything.

        Args:
            layer: the first block that runs.
            hidden: what block ``layer - 1`` returned for the same input (``block_outputs``); unused for layer 0.
        """
        below = [unwrap(block) for block in self.blocks[:layer]]  # a bridge around it hands on what it is given
        own = [block.__dict__.get("forward") for block in below]  # set where accelerate has hooked a block
        for block in below:
            block.forward = lambda *args, **kwargs: hidden
        try:
            yield
        finally:
            for block, forward in zip(below, own, strict=True):
                if forward is None:
                    del block.forward
                else:
                    block.forward = forward

    @contextmanager
    def block_outputs(self, layers: Sequence[int]) -> Iterator[dict[int, Any]]:
        """Collect, for each given layer, what the block below it returns in the forwards of this context."""
        found: dict[int, Any] = {}

        def keep(layer: int) -> Callable[..., None]:
            return lambda module, args, output: found.__setitem__(layer, output)

        handles = [unwrap(self.blocks[layer - 1]).register_forward_hook(keep(layer)) for layer in layers if layer > 0]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


def _sample(digest: Any, parameters: Iterable[Tensor]) -> None:
    """Add shapes and samples of some weights to a hash."""
    for parameter in parameters:
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 65536)].to("cpu", torch.bfloat16)
        digest.update(str(tuple(parameter.shape)).encode())
        digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())


class _StopForward(Exception):
    """Ends a forward whose remaining blocks nobody needs."""
