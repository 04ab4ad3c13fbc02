"""What the machine at hand has and how fast it is."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

LENGTH = 0.3
"""Seconds for which a speed is measured."""


def amount(size: float) -> str:
    """Say a number of bytes: in GiB, or where there is less than one in MiB or KiB.

    >>> amount(2**10), amount(2**20), amount(3 * 2**29)
    ('1.0 KiB', '1.0 MiB', '1.5 GiB')
    """
    unit, name = next((pair for pair in ((2**30, "GiB"), (2**20, "MiB")) if size >= pair[0]), (2**10, "KiB"))
    return f"{size / unit:.1f} {name}"


def in_double(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on its device; Apple's GPUs have none, so from there on the CPU."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


def free_memory(device: torch.device) -> int:
    """Return how many bytes this process can use on a device in all, those it uses already included.

    On a CPU the limits of the process's control groups (containers, SLURM jobs) count, too.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return min([psutil.virtual_memory().available, *_group_limits()]) + resident()


def resident() -> int:
    """Return the bytes of memory that this process uses now."""
    return psutil.Process().memory_info().rss


def free_disk(folder: Path) -> int:
    """Return the bytes that are free on the disk where a folder is or would be."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return psutil.disk_usage(str(existing)).free


def product_speed(device: torch.device, dtype: torch.dtype = torch.float32, tf32: bool = False) -> float:
    """Return the floating-point operations per second of large matrix products, measured in a third of a second.

    Args:
        device: where.
        dtype: of the matrices.
        tf32: allow TF32 for float32 matrices on a GPU.
    """
    n = 4096 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    with tf32_products(tf32):
        return 2 * n**3 / _seconds(lambda: torch.mm(a, b, out=out), device)


@contextmanager
def tf32_products(on: bool = True) -> Iterator[None]:
    """Let CUDA round the inputs of float32 products to TF32 in the ``with`` block; if not ``on``, nothing changes."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32" if on else before
    try:
        yield
    finally:
        settings.fp32_precision = before


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Inside the ``with`` block, sum no product in bfloat16 and round no float32 inputs (TF32)."""
    backends: Any = torch.backends
    cuda = backends.cuda.matmul
    backend = cuda if device.type == "cuda" else backends.mkldnn.matmul
    required = ((cuda, "allow_bf16_reduced_precision_reduction", False), (backend, "fp32_precision", "ieee"))
    changed = [(owner, name, old, new) for owner, name, new in required if (old := getattr(owner, name)) != new]
    for owner, name, _, new in changed:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, old, _ in changed:
            setattr(owner, name, old)


def copy_speed(device: torch.device) -> float:
    """Return the bytes read and written per second when a tensor larger than any cache is copied."""
    a = torch.zeros(2**26, device=device)
    b = torch.ones_like(a)
    return 2 * a.numel() * 4 / _seconds(lambda: b.copy_(a), device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the time of one call: the shortest of as many as fit into ``LENGTH`` seconds."""
    times: list[float] = []
    run()
    while sum(times) < LENGTH:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)


def _group_limits(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Yield the memory left in each control group (version 2) of this process; cached files count as free."""
    try:
        lines = groups.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    path = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    for group in (root / path, *(root / path).parents):
        try:
            most = (group / "memory.max").read_text(encoding="ascii").strip()
            used = int((group / "memory.current").read_text(encoding="ascii"))
            stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        except (OSError, ValueError):
            continue
        if most != "max":
            yield max(0, int(most) - used + int(stat.get("inactive_file", 0)))
        if group == root:
            return
