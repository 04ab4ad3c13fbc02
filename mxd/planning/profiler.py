"""What a computation costs, without computing it: on PyTorch's meta device tensors have shapes and no numbers.

What is metered is the code that runs, so a new layer or model family needs nothing here.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class Factor:
    """One of the two tensors of a dense product, or of a batch of them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numbers(self) -> int:
        """Numbers of the memory that it lies in."""
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


Product = tuple[Factor, Factor]
"""A dense product, or a batch of them."""


@dataclass(frozen=True)
class Cost:
    """What one call costs."""

    flops: int = 0
    """FLOPs of its dense products, two for each multiply-add."""
    rounded: int = 0
    """Those among them that are in bfloat16."""
    sparse: int = 0
    """FLOPs of its sparse products, two for each number of a table that is read."""
    moved: int = 0
    """Bytes that its operations read and write, as if no cache kept anything between them."""
    peak: int = 0
    """Largest number of bytes that it held at a time, without what was allocated before the call."""
    largest: int = 0
    """Bytes of its largest tensor."""
    kept: int = 0
    """Bytes that are still held after it."""
    gathered: int = 0
    """Bytes of the rows of tables that its operations read by number."""
    products: Counter[Product] = field(default_factory=Counter)
    """How often it takes each dense product."""


def meter(run: Callable[[], Any]) -> Cost:
    """Run a function and return its cost; on the meta device, what it would cost elsewhere.

    Code that asks a meta tensor for its number gets 0, and for a truth value ``True``.
    """
    with _Meter() as costs:
        run()
    return Cost(
        flops=costs.flops,
        rounded=costs.rounded,
        sparse=costs.sparse,
        moved=costs.moved,
        peak=costs.peak,
        largest=costs.largest,
        kept=costs.live,
        gathered=costs.gathered,
        products=costs.products,
    )


_aten = torch.ops.aten

_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}
"""Operations that are a dense product of their last two arguments, or a batch of them."""

_ROWS = {_aten.embedding, _aten.index, _aten.index_select}
"""Operations that return rows of a table."""

_ROWS_READ = {*_ROWS, _aten.gather}
"""Operations that read no more of their table than they return."""

_BAGS = {_aten._embedding_bag, _aten._embedding_bag_forward_only, _aten._embedding_bag_per_sample_weights_backward}
"""Operations that read one row of a table for each index."""


class _Meter(TorchDispatchMode):
    """Sees every operation, also those of the backward pass.

    It counts FLOPs by torch's formulas, but not with its ``FlopCounterMode``, under which no gradient can be taken
    within a function that autograd runs, as a sum in tiles does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.live = self.peak = self.rounded = self.sparse = self.moved = self.largest = self.gathered = 0
        self.products: Counter[Product] = Counter()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype == torch.bool else 0
        out = _of_unknown_size(func, args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
        outputs = list(_tensors(out))
        for tensor in outputs:
            self.hold(tensor)
        if func.overloadpacket in flop_registry:
            flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
            self.flops += flops
            self.rounded += flops if outputs[0].dtype is torch.bfloat16 else 0
        if func.overloadpacket in _PRODUCTS:
            left, right = (Factor(tuple(t.shape), t.stride(), t.dtype) for t in list(_tensors(args))[-2:])
            self.products[left, right] += 1
        if func.overloadpacket in _ROWS and args[0].ndim > 1:
            self.gathered += _bytes(outputs[0])
        if func.overloadpacket in _BAGS:
            self.sparse += 2 * _indices(args).numel() * args[0].shape[1]
            self.gathered += _rows_of_bags(args)
        if not func.is_view:
            self.moved += _traffic(func, list(_tensors((args, kwargs))), outputs)
        return out

    def hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.sizes:
            return
        self.sizes[storage._cdata] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, storage.nbytes())
        weakref.finalize(storage, self.drop, storage._cdata)

    def drop(self, key: int) -> None:
        self.live -= self.sizes.pop(key)


def _of_unknown_size(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation whose size depends on numbers, which meta tensors lack; else ``None``."""
    if func is _aten.bincount.default and args[0].is_meta:
        size = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        return torch.empty(size, dtype=torch.int64, device="meta")
    return None


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _traffic(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Return the bytes that an operation reads and writes."""
    written = sum(map(_bytes, outputs))
    packet = func.overloadpacket
    if packet in _ROWS_READ:  # each row is read once and written once
        return 2 * written
    if packet in _BAGS:  # a bag reads its rows and writes their sum; the gradient's two tables are equally wide
        return written + _bytes(_indices(inputs)) + _rows_of_bags(inputs)
    return written + sum(map(_bytes, inputs))


def _rows_of_bags(inputs: Any) -> int:
    """Return the bytes of the rows that bags read."""
    return _indices(inputs).numel() * inputs[0].shape[1] * inputs[0].element_size()


def _indices(inputs: Any) -> Tensor:
    """Return the indices among the inputs of a bag: offsets, beside them, are fewer."""
    return max((t for t in _tensors(inputs) if not t.is_floating_point()), key=Tensor.numel)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
