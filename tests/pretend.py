"""A pretend GPU: tensors that say ``cuda:0`` and hold their numbers on the CPU.

Two mistakes of code that has only ever run on a CPU show on it. Operations that mix devices raise, as on a GPU; and
each time the processor would wait for the GPU is noted, with the line that makes it wait. What a GPU computes, and how
fast, it cannot tell, and Triton's kernels do not run.

    with pretended() as gpu:
        layer.to(gpu.device)
        ...
    print(gpu.waits)

To torch's own code these tensors are on the meta device, which no autograd thread and no stream belongs to.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import mxd

ROOT = Path(mxd.__file__).parent.parent
DEVICE = torch.device("cuda", 0)
MEMORY = 2**36

aten = torch.ops.aten
SIZES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten.equal.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten._linalg_eigh.default,
    aten._linalg_svd.default,
    aten._linalg_solve_ex.default,
    aten.linalg_lstsq.default,
}
"""Operations whose result has a size, or an error, that only the GPU knows."""
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
MOVING = {aten._to_copy.default, aten.copy_.default}


class Wait(NamedTuple):
    """What the processor waits for, and where."""

    why: str
    """``number``, ``size``, ``to the host`` or ``to the device``."""
    where: str
    """The innermost function of the package that asks for it: file and name."""
    line: int


@dataclass
class Gpu:
    """The pretend GPU, while there is one."""

    device: torch.device = DEVICE
    waits: Counter[Wait] = field(default_factory=Counter)

    def note(self, why: str) -> None:
        frame = sys._getframe(1)
        while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(ROOT / "mxd"):
            frame = frame.f_back
        where, line = "outside", 0
        if frame is not None:
            file = Path(frame.f_code.co_filename).relative_to(ROOT)
            where, line = f"{file} {frame.f_code.co_name}", frame.f_lineno
        self.waits[Wait(why, where, line)] += 1

    def places(self) -> Counter[tuple[str, str]]:
        """How often the processor waited for what, without line numbers."""
        found: Counter[tuple[str, str]] = Counter()
        for wait, times in self.waits.items():
            found[wait.why, wait.where] += times
        return found


_gpu = Gpu()


class Pretended(torch.Tensor):
    """Says that it is on a GPU; every operation on it comes to ``_run``."""

    held: Tensor
    device = DEVICE
    is_cuda = True
    is_meta = is_cpu = False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, real: Tensor) -> "Pretended":
        shape, strides, offset = real.shape, real.stride(), real.storage_offset()
        own = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, storage_offset=offset, dtype=real.dtype, device="meta"
        )
        own.held = real
        return own

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def __repr__(self):
        return f"Pretended({self.held!r})"

    def get_device(self):
        return 0

    def to(self, *args, copy=False, **options):
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, later, _ = torch._C._nn._parse_to(*args, **options)
        if not copy and device in (None, DEVICE) and dtype in (None, self.dtype):
            return self
        return super().to(device=device or DEVICE, dtype=dtype or self.dtype, non_blocking=later, copy=copy)

    def tolist(self):
        _gpu.note("number")
        return self.held.tolist()

    def new_tensor(self, data, **options):
        return torch.tensor(data, device=DEVICE, **{"dtype": self.dtype} | options)

    def numpy(self, *args, **options):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __array__(self, *args, **options):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __getitem__(self, index):
        return super().__getitem__(_placed(index))

    def __setitem__(self, index, value):
        super().__setitem__(_placed(index), value)


def _placed(index: Any) -> Any:
    """Turn lists in an index into tensors on the device, as torch does."""
    if isinstance(index, tuple):
        return tuple(map(_placed, index))
    return torch.tensor(index, device=DEVICE) if isinstance(index, list | np.ndarray) else index


def _real(value: Any) -> Any:
    return value.held if isinstance(value, Pretended) else value


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, Pretended)]
    target = kwargs.get("device")
    target = None if target is None else torch.device(target).type
    on = bool(ours) if target is None else target == "cuda" or (target == "meta" and bool(ours))
    if target == "meta" and not ours:  # asked for by torch's own code, to which pretended tensors are on that device?
        on = func is aten.scalar_tensor.default and not _planning()  # ``pretended[...] = 0.0``
        on = on or (func is aten._to_copy.default and not tensors[0].is_meta)  # ``cpu.to(pretended)``
    if func is aten.copy_.default or func in INDEXING:
        on = isinstance(args[0], Pretended)
    if not ours and not on:
        return func(*args, **kwargs)
    _check(func, args, kwargs, ours, [tensor for tensor in tensors if not isinstance(tensor, Pretended)])
    _note(func, args, kwargs, bool(ours), on)
    options = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    if target is not None:
        options["device"] = torch.device("cpu")
    out = func(*tree_map(_real, args), **tree_map(_real, options))
    if not on or func is aten._local_scalar_dense.default:
        return out
    known = {id(tensor.held): tensor for tensor in ours} if func._schema.is_mutable else {}
    for tensor in known.values():
        if (tensor.shape, tensor.stride()) != (tensor.held.shape, tensor.held.stride()):
            raise NotImplementedError(f"{func} gives a pretended tensor another shape")
    return tree_map(lambda t: known[id(t)] if id(t) in known else Pretended(t) if isinstance(t, Tensor) else t, out)


def _planning() -> bool:
    """Whether a plan is made, on the meta device itself."""
    frame = sys._getframe(1)
    while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(ROOT / "mxd" / "planning"):
        frame = frame.f_back
    return frame is not None


def _check(func: Any, args: Any, kwargs: Any, ours: list[Pretended], others: list[Tensor]) -> None:
    """Refuse what a GPU refuses: operands on several devices, and random numbers of a generator on the CPU."""
    if any(isinstance(leaf, torch.Generator) and leaf.device.type == "cpu" for leaf in tree_leaves((args, kwargs))):
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if func in MOVING or not ours:
        return
    if func in INDEXING:
        if not isinstance(args[0], Pretended):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        others = [value for value in args[2:3] if isinstance(value, Tensor) and not isinstance(value, Pretended)]
    if any(tensor.dim() for tensor in others) or (others and str(func).startswith("aten._fused")):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu in {func}")


def _note(func: Any, args: Any, kwargs: Any, ours: bool, on: bool) -> None:
    if func is aten._local_scalar_dense.default:
        _gpu.note("number")
    elif func in SIZES:
        _gpu.note("size")
    elif func in INDEXING:
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            _gpu.note("size")
        elif not all(isinstance(index, Pretended) for index in indices):
            _gpu.note("to the device")
    elif func in MOVING:
        copied = args[1] if func is aten.copy_.default else args[0]
        later = kwargs.get("non_blocking") or (func is aten.copy_.default and len(args) > 2 and args[2])
        if isinstance(copied, Pretended) != on and not later:
            _gpu.note("to the device" if on else "to the host")


class _Mode(TorchDispatchMode):
    """Sees what is made on the device from nothing, and what is moved there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


_tensor, _attention = torch.tensor, F.scaled_dot_product_attention


def _made(data: Any, *, device: Any = None, requires_grad: bool = False, **options: Any) -> Tensor:
    """``torch.tensor``, which moves what it made by a way that passes no mode."""
    made = _tensor(data, **options)
    if device is not None and torch.device(device).type == "cuda":
        _gpu.note("to the device")
        made = Pretended(made)
    elif device is not None:
        made = made.to(device)
    return made.requires_grad_() if requires_grad else made


def _attended(*args: Any, **options: Any) -> Tensor:
    """``F.scaled_dot_product_attention``, which chooses its way by the device."""
    tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
    if not any(isinstance(tensor, Pretended) for tensor in tensors):
        return _attention(*args, **options)
    assert all(isinstance(tensor, Pretended) and not tensor.requires_grad for tensor in tensors)
    return Pretended(_attention(*tree_map(_real, args), **tree_map(_real, options)))


@contextmanager
def pretended() -> Iterator[Gpu]:
    """Let there be a GPU, ``cuda:0``, for the length of the ``with`` block."""
    _gpu.waits = Counter()
    with pytest.MonkeyPatch.context() as patch, _Mode():
        for name, answer in {
            "_lazy_init": lambda: None,
            "get_device_capability": lambda device=None: (9, 0),
            "mem_get_info": lambda device=None: (MEMORY, MEMORY),
            "memory_reserved": lambda device=None: 0,
            "synchronize": lambda device=None: None,
        }.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(torch, "tensor", _made)
        patch.setattr(Tensor, "pin_memory", lambda self: self)
        patch.setattr(F, "scaled_dot_product_attention", _attended)
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            yield _gpu
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(before)
