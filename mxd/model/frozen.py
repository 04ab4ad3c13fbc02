"""A frozen base model: its MLPs, their activations, and hashes that identify it."""

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
from mxd.common.numbers import plural
from mxd.layers import MLPShape, MLPWeights
from mxd.model.families import mlp_shape, mlp_slot, mlp_weights, mlp_widths, unwrap

_BESIDE = re.compile(
    r"_name_or_path|architectures|transformers_version|(torch_)?dtype|quantization_config|use_cache|return_dict|"
    r"problem_type|id2label|label2id|output_.*|summary_.*|.*_token_id|.*drop.*|initializer_range"
)
"""Settings that no activation depends on. Those that are off do not count either: later versions add more of them."""

Record = Callable[
    [Int[Tensor, "batch seq"], Sequence[int]],
    dict[int, tuple[Float[Tensor, "batch seq d_in"], Float[Tensor, "batch seq d_out"]]],
]
"""Token ids, blocks -> the inputs and outputs of their MLPs: ``FrozenModel.record``, or the same through a splice."""


@dataclass(frozen=True, repr=False)
class FrozenModel:
    """A causal language model in evaluation mode whose parameters take no gradient."""

    module: nn.Module
    """The Hugging Face model."""
    tokenizer: Any
    """Its tokenizer, or ``None``."""
    source: str
    """Hub id, path or bundled name."""
    revision: str | None
    """The commit that it was loaded from, where known."""
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
        """The dtype it runs in, by ``load_frozen``'s names."""
        if getattr(self.module, "is_loaded_in_8bit", False):
            return "int8"
        return str(next(self.module.parameters()).dtype).removeprefix("torch.")

    def __repr__(self) -> str:
        about = f"{plural(self.num_blocks, 'block')}, width {self.mlp_widths(0)[0]}, {self.dtype} on {self.device}"
        return f"FrozenModel {self.source}: {type(self.module).__name__}, {about}"

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def check_block(self, block: int) -> None:
        """Check that a block exists.

        Raises:
            MxdError: the block is out of range.
        """
        if not 0 <= block < self.num_blocks:
            there = f"{self.num_blocks} blocks, 0 ... {self.num_blocks - 1}"
            raise MxdError(f"block {block} is out of range: {self.source} has {there}.")

    def check_context(self, tokens: int) -> None:
        """Check that the model has positions for a context of so many tokens.

        Raises:
            MxdError: it has fewer.
        """
        positions = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and tokens > positions:
            raise MxdError(
                f"a context of {tokens:,} tokens is more than the {positions:,} positions of {self.source}; lower "
                "data.context (--context)."
            )

    def slot(self, block: int) -> tuple[nn.Module, str]:
        """Return the module and attribute that hold the block's MLP, so that ``setattr`` replaces it."""
        self.check_block(block)
        return mlp_slot(self.blocks[block])

    def mlp(self, block: int) -> nn.Module:
        """Return the block's MLP module, or the module that is spliced in its place."""
        parent, name = self.slot(block)
        return cast(nn.Module, getattr(parent, name))

    def mlp_widths(self, block: int) -> tuple[int, int]:
        """Return the input and output width of the block's MLP.

        Raises:
            MxdError: it does not map one tensor to one tensor of the same shape.
        """
        mlp = getattr(self.mlp(block), "base", self.mlp(block))  # of a spliced block: the original MLP
        return mlp_widths(mlp, self.module, f"{self.source}: the MLP of block {block}")

    def mlp_shape(self, block: int) -> MLPShape:
        """Return the form of the block's MLP, with ``None`` for what cannot be read."""
        return mlp_shape(self.mlp(block), self.config, self.mlp_widths(block))

    def mlp_weights(self, block: int) -> MLPWeights:
        """Return the MLP's weights in this project's layout.

        Raises:
            MxdError: the MLP's form is not one of ``FAMILIES``, its gate has a bias, or its weights are in 8 bits.
        """
        mlp = self.mlp(block)
        if self.dtype == "int8":
            raise MxdError(f"{self.source} is loaded in 8 bits; load it in float32 to copy the weights of an MLP.")
        return mlp_weights(mlp)

    def fingerprint(self, block: int) -> str:
        """Return a short hash of the block's MLP weights, the same for float32, bfloat16 and copies of the model.

        A strided sample of each tensor, rounded to bfloat16, is hashed. Replacements store it, so that splicing into
        another model or another block is noticed whatever the model is called.
        """
        digest = hashlib.sha256()
        _sample(digest, self.mlp(block).parameters())
        return digest.hexdigest()[:16]

    def base_fingerprint(self) -> str:
        """Return a short hash of the whole model: its settings, and all its weights as ``fingerprint`` samples them.

        It depends on everything that the model computes with (embeddings, norms, every block, the base of the rotary
        embedding), but not on where the model was loaded from, nor on its dtype. A TransformerLens bridge, which splits
        the attention weights, has a different hash.
        """
        settings = {k: v for k, v in self.config.to_dict().items() if v and not _BESIDE.fullmatch(k)}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
        _sample(digest, self.module.parameters())
        return digest.hexdigest()[:16]

    @property
    def vocabulary(self) -> int:
        """The number of token ids that it has embeddings for."""
        return len(cast(Any, self.module).get_input_embeddings().weight)

    @torch.no_grad()
    def logits(self, ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
        """Return the next-token logits, in float32."""
        return self.module(input_ids=ids.to(self.device), use_cache=False).logits.float()

    def ids(self, text: str) -> Int[Tensor, "1 seq"]:
        """Return a text's token ids as training contexts hold them: after BOS, where the tokenizer has one.

        Raises:
            MxdError: the model has no tokenizer, or the text no token.
        """
        if self.tokenizer is None:
            raise MxdError(f"{self.source} has no tokenizer; give token ids, or mxd.load_frozen(model, tokenizer=...).")
        bos = self.tokenizer.bos_token_id
        ids = [*([] if bos is None else [bos]), *self.tokenizer(text, add_special_tokens=False)["input_ids"]]
        if not ids:
            raise MxdError(f"the tokenizer finds no token in {text!r}.")
        return torch.tensor([ids], device=self.device)

    @torch.no_grad()
    def record(
        self, ids: Int[Tensor, "batch seq"] | str, blocks: Sequence[int] | int
    ) -> dict[int, tuple[Float[Tensor, "batch seq d_in"], Float[Tensor, "batch seq d_out"]]]:
        """Return block -> its MLP's inputs and outputs; the forward stops after the last of the blocks.

        Args:
            ids: token ids, or one text (``ids``).
            blocks: numbers of blocks, or one number.
        """
        ids = self.ids(ids) if isinstance(ids, str) else ids
        with self.watched([blocks] if isinstance(blocks, int) else blocks, stop=True) as recorded:
            self.module(input_ids=ids.to(self.device), use_cache=False)
        return recorded

    @contextmanager
    def watched(self, blocks: Sequence[int], stop: bool = False) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
        """Collect ``block -> (MLP input, MLP output)`` from the forward passes inside the ``with`` block.

        With ``stop``, the first forward pass ends after the last of the blocks, and the ``with`` block with it.
        """
        recorded: dict[int, tuple[Tensor, Tensor]] = {}

        def keep(block: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
                recorded[block] = (args[0], output.clone())  # Falcon adds attention's output in place
                if stop and block == max(blocks):
                    raise StopForward

            return hook

        handles = [self.mlp(block).register_forward_hook(keep(block)) for block in sorted(set(blocks))]
        try:
            yield recorded
        except StopForward:
            pass
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def resumed(self, block: int, hidden: Any) -> Iterator[None]:
        """Start forward passes at block ``block``: the blocks below return ``hidden`` without computing anything.

        Args:
            block: the first block that runs.
            hidden: what block ``block - 1`` returned for the same input (``block_outputs``); unused for block 0.
        """
        below = [unwrap(module) for module in self.blocks[:block]]  # a bridge around a block returns what it returns
        hooked = [module.__dict__.get("forward") for module in below]  # set where accelerate has hooked a block
        for module in below:
            module.forward = lambda *args, **kwargs: hidden
        try:
            yield
        finally:
            for module, forward in zip(below, hooked, strict=True):
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward

    @contextmanager
    def block_outputs(self, blocks: Sequence[int]) -> Iterator[dict[int, Any]]:
        """Collect, for each given block, what the block below it returns in forwards inside the ``with`` block."""
        outputs: dict[int, Any] = {}

        def keep(block: int) -> Callable[..., None]:
            return lambda module, args, output: outputs.__setitem__(block, output)

        handles = [unwrap(self.blocks[block - 1]).register_forward_hook(keep(block)) for block in blocks if block > 0]
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()


def _sample(digest: Any, parameters: Iterable[Tensor]) -> None:
    """Add the shapes of some weights, and about 65,536 values of each in bfloat16, to a hash."""
    for parameter in parameters:
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 65536)].to("cpu", torch.bfloat16)
        digest.update(str(tuple(parameter.shape)).encode())
        digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())


class StopForward(Exception):
    """Ends a forward pass whose remaining blocks are not needed."""
