"""The least that a training step takes: its dense products, and the bytes that no step avoids, both in float32.

Both are read off the very code that trains, run on the meta device: a new layer needs nothing here. Products are those
of the forward and backward pass over one batch with float32 candidates. Bytes are 28 for each parameter, which Adam
reads with its gradient and two moments and writes but for the gradient, and the rows of tables that are read by number.
What lies in a cache is read faster than that. A product that a layer takes twice rather than keep counts twice.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from mxd.layers import ReplacementConfig
from mxd.layers.objective import forward_backward
from mxd.layers.sparsity import BatchTopKConfig, TopKConfig
from mxd.ops import CandidateDtype, DenseDtype, metered_as, rounded_products
from mxd.planning.memory import ADAM_BYTES
from mxd.planning.profiler import Cost, Factor, Product, meter

Step = Callable[[], object]

COPIED = 2**25
"""Numbers that are copied to measure the speed of memory: 128 MiB in float32, more than fits into most caches."""


def step_cost(
    config: ReplacementConfig, tokens: int, candidates: CandidateDtype = "float32", dense: DenseDtype = "float32"
) -> Cost:
    """Return the cost of one step, without the optimiser's update."""
    with torch.device("meta"):
        layer = config.build().train()
        x, y = (torch.empty(tokens, width or 0) for width in (config.d_in, config.d_out))
    layer.sparsity.candidates = candidates

    def step() -> None:
        layer.begin_step([layer.read(x, y)])
        forward_backward(layer, x, y)

    with metered_as("cpu"), rounded_products(dense):
        return meter(step)


@dataclass(frozen=True)
class Floor:
    """The floor of one layer's step."""

    products: Counter[Product]
    """How often each dense product is needed."""
    flops: int
    """FLOPs of the products."""
    moved: int
    """Bytes that no step avoids."""

    @staticmethod
    def of(config: ReplacementConfig, tokens: int) -> "Floor":
        """Return the floor of a step over so many tokens."""
        sparsity = config.sparsity
        if isinstance(sparsity, BatchTopKConfig):  # K units on average; how many each token has is not known
            sparsity = TopKConfig(k=sparsity.k)
        cost = step_cost(config.model_copy(update={"sparsity": sparsity}), tokens)
        return Floor(cost.products, cost.flops, ADAM_BYTES * config.num_params + cost.gathered)

    def steps(self) -> dict[str, Step]:
        """Return what is to be timed: every different product once, into an existing buffer, and a copy."""
        sizes = [(left.numbers, right.numbers, _out(left, right)) for left, right in self.products]
        memory = [torch.randn(max(size)) for size in zip(*sizes, strict=True)]
        source, target = torch.zeros(2, COPIED).unbind()
        found: dict[str, Step] = {"copy": lambda: target.copy_(source)}
        for number, (left, right) in enumerate(self.products):
            found[f"product {number}"] = partial(_product, left, right, memory)
        return found

    def seconds(self, times: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of the products, and of products and bytes, from the times of ``steps``."""
        products = sum(count * times[f"product {n}"] for n, count in enumerate(self.products.values()))
        bytes_a_second = 2 * 4 * COPIED / times["copy"]
        return {"products": products, "floor": products + self.moved / bytes_a_second}


def _product(left: Factor, right: Factor, memory: list[Tensor]) -> None:
    """Take a product of numbers that lie in the first two of three pieces of memory into the third."""
    shape = (*left.shape[:-1], right.shape[-1])
    factors = [part.as_strided(f.shape, f.stride) for part, f in zip(memory, (left, right), strict=False)]
    (torch.mm if len(shape) == 2 else torch.bmm)(*factors, out=memory[2][: prod(shape)].view(shape))


def _out(left: Factor, right: Factor) -> int:
    """Return how many numbers a product has."""
    return prod(left.shape[:-1]) * right.shape[-1]
