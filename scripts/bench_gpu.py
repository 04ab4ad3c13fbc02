"""Measure training on an NVIDIA GPU, part by part: what a step takes, what limits it, and what the choices cost.

    python scripts/bench_gpu.py [--parts NAME ...] [--json FILE] [--check] [--base-dtype bfloat16|float32]
                                [--tf32 off|encoder|all] [--candidates float32|bfloat16] [--triton]

The base model is GPT-2 small (124M) with random weights, so nothing is downloaded; the replacement is an MxD of the
paper's size (K = 32, N = 21,490) at block 8, in float32. The parts, each with a table of its own:

    run       tokens/s of stream and steps as in `mxd train`, without progress bar, metrics and states: as it is, with
              nothing or more masked, with a unit that is on in every token, random K, smaller batches, other methods
    step      a step's functions one by one, each without those that it calls, waiting after each
    trace     kernels of a step, how long the GPU is busy, and where the processor waits for it
    ceilings  products at the step's shapes, in each way of rounding, a large one, a copy; and the floor of a step
    forwards  the base model's forward by its size, with its own GELU and with torch's
    kernels   the library's sparse operations in PyTorch and in Triton: units drawn evenly, and one in every token
    topk      ways to find the K largest
    exact     units chosen by way of bfloat16, against float64
    host      what the processor does: text to ids, planning a window, a batch to the device
    large     a step at Llama-3.2-3B's MLP shape, and its peak memory

A part that fails is noted, and the next begins; ``--json`` is written after each. Times are medians, with the device
idle at both ends. `--device cpu --small` runs the same lines at toy sizes to try the script out: there are no kernels
and no memory to compare, and its numbers mean nothing. Not run on a GPU yet. Reading a cache is not measured here.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from mxd.artifacts.provenance import versions
from mxd.common.bundled import bundled_path
from mxd.common.hardware import tf32_products
from mxd.config import TrainingConfig
from mxd.data.activations import Cursor, _plan, activation_batches
from mxd.data.contexts import counted_positions, token_contexts
from mxd.data.text import documents
from mxd.layers import LAYERS, MLPShape, ReplacementConfig, size
from mxd.model.frozen import FrozenModel
from mxd.model.loading import DTYPES, load_frozen
from mxd.ops import Selection, sparse, topk_linear, use_triton
from mxd.training.step import Trainee, new_trainee, train_step

TARGET = 800_000
"""Tokens per second, end to end, that GPT-2's block 8 with MxD, K = 32, must reach."""
LLAMA = MLPShape(3072, 3072, 8192, "silu", True)
BOS = 0

Row = dict[str, Any]
Work = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """What is run."""

    gpt2: dict[str, int]
    block: int
    context: int
    batch: int
    window: int
    k: int
    other_k: int
    llama: MLPShape
    ceiling: int
    """Side of the square matrices, and square root of the numbers copied, that the device's rates are taken from."""
    forwards: tuple[int, ...]
    """Tokens in a forward of the base model."""
    exact: int
    """Batches whose choice of units is compared with float64's."""


FULL = Sizes({}, 8, 128, 4096, 131_072, 32, 80, LLAMA, 16_384, (4096, 16_384, 65_536), 64)
SMALL = Sizes(
    {
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": 500,
        "n_positions": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    block=1,
    context=32,
    batch=256,
    window=1024,
    k=4,
    other_k=6,
    llama=MLPShape(48, 48, 128, "silu", True),
    ceiling=64,
    forwards=(64, 256),
    exact=1,
)


@dataclass
class Bench:
    """What is measured, and with what."""

    device: torch.device
    sizes: Sizes
    args: argparse.Namespace

    @property
    def cuda(self) -> bool:
        """Whether there is a GPU."""
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, run: Work, calls: int = 10) -> float:
        """Return the median time of a call, from some runs of ``calls`` in a row, after two that warm up."""
        run(), run()
        times = []
        for _ in range(min(5, self.args.repeats)):
            self.wait()
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            self.wait()
            times.append((time.perf_counter() - begin) / calls)
        return statistics.median(times)

    @cached_property
    def base(self) -> FrozenModel:
        """GPT-2 small with random weights."""
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(**self.sizes.gpt2))
        return load_frozen(model.to(self.device, DTYPES[self.args.base_dtype]))

    def config(self, method: str = "mxd", kind: str = "topk", **fields: Any) -> ReplacementConfig:
        """Return a replacement sized by the paper's convention."""
        shape = self.base.mlp_shape(self.sizes.block)
        fields |= {"sparsity": {"kind": kind} | ({} if kind == "relu_l1" else {"k": self.sizes.k})}
        return size(LAYERS[method].model_validate(fields).resolve(shape), match="paper")

    def training(self, batch: int, steps: int = 1) -> TrainingConfig:
        """Return the paper's recipe, its warm-up left out."""
        sizes = {"tokens": steps * batch, "batch_tokens": batch, "buffer_tokens": max(batch, self.sizes.window)}
        chosen = {"candidates": self.args.candidates, "tf32": self.args.tf32, "warmup_steps": 0}
        return TrainingConfig.model_validate(chosen | sizes)

    def trainee(self, config: ReplacementConfig | None = None, batch: int | None = None) -> Trainee:
        """Return a replacement at the beginning of its training."""
        training = self.training(batch or self.sizes.batch)
        return new_trainee("it", self.sizes.block, config or self.config(), 0, self.device, training)

    def ids(self, contexts: int, special: float = 0.0) -> np.ndarray:
        """Return contexts of random token ids that begin with BOS, and have it elsewhere with some probability."""
        rng = np.random.default_rng(0)
        rows = rng.integers(1, self.base.config.vocab_size, (contexts, self.sizes.context), dtype=np.int32)
        rows[rng.random(rows.shape) < special] = BOS
        rows[:, 0] = BOS
        return rows

    def site(self) -> tuple[Tensor, Tensor]:
        """Return inputs and outputs of the block's MLP for one batch."""
        rows = torch.from_numpy(self.ids(-(-self.sizes.batch // self.sizes.context))).to(self.device)
        x, y = self.base.record(rows.long(), [self.sizes.block])[self.sizes.block]
        return x.flatten(0, 1)[: self.sizes.batch].float(), y.flatten(0, 1)[: self.sizes.batch].float()


def run(bench: Bench) -> Iterator[Row]:
    """Tokens/s of whole windows: their base forwards, their shuffle and their steps."""
    sizes, plain = bench.sizes, bench.config()
    yield _run(bench, "as it is", plain)
    yield _run(bench, "nothing masked", plain, bos=None)
    yield _run(bench, "1% of the tokens masked", plain, excluded=(BOS,))
    yield _run(bench, "unit 0 always on", plain, always=True)
    yield _run(bench, "random K", bench.config(kind="random_k"))
    yield _run(bench, f"batches of {sizes.batch // 4:,}", plain, batch=sizes.batch // 4)
    yield _run(bench, f"forwards of {sizes.forwards[1]:,}", plain, forward=sizes.forwards[1])
    yield _run(bench, "transcoder", bench.config("transcoder"))
    yield _run(bench, "transcoder with skip", bench.config("transcoder", skip=True))
    yield _run(bench, "transcoder, BatchTopK", bench.config("transcoder", "batch_topk"))


def _run(
    bench: Bench,
    name: str,
    config: ReplacementConfig,
    bos: int | None = BOS,
    excluded: Sequence[int] = (),
    always: bool = False,
    batch: int | None = None,
    forward: int | None = None,
) -> Row:
    sizes, windows = bench.sizes, bench.args.windows
    batch, forward = batch or sizes.batch, forward or sizes.forwards[0]
    steps = sizes.window // batch
    training, trainee = bench.training(batch, (windows + 1) * steps), bench.trainee(config, batch)
    if always:
        with torch.no_grad():
            dict(trainee.layer.named_parameters())["gate_bias"][0] = 10
    pool = bench.ids(4 * sizes.window // sizes.context, 0.01 if excluded else 0.0)
    stream = activation_batches(
        bench.base,
        [sizes.block],
        lambda first: (pool[i % len(pool)] for i in count(first)),
        batch,
        sizes.window,
        excluded,
        bos,
        forward_contexts=max(1, forward // sizes.context),
    )
    rates = []
    for window in range(windows + 1):
        bench.wait()
        begin = time.perf_counter()
        for number, part in enumerate(islice(stream, steps)):
            train_step(trainee, *part.sites[sizes.block], training, window * steps + number)
        bench.wait()
        if window:  # the first is to warm up
            rates.append(sizes.window / (time.perf_counter() - begin))
    loss = trainee.stats.report(0, 1)["normalized_mse"]
    found = {"tokens/s": statistics.median(rates), "slowest": min(rates), "fastest": max(rates)}
    return {"case": name, **found, "mean loss": loss}


PROOF = "proof"


@dataclass
class Stopwatch:
    """Times functions without the timed ones that they call."""

    bench: Bench
    spent: Counter[str] = field(default_factory=Counter)
    inner: list[tuple[str, float]] = field(default_factory=list)
    """The functions under way, and what those that they called have taken."""

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, which notes its time under a name."""

        def run(*args: Any, **options: Any) -> Any:
            self.bench.wait()
            begin = time.perf_counter()
            part = name + " (candidates)" * any(outer == PROOF for outer, _ in self.inner)
            self.inner.append((name, 0.0))
            try:
                return function(*args, **options)
            finally:
                self.bench.wait()
                took = time.perf_counter() - begin
                self.spent[part] += took - self.inner.pop()[1]
                if self.inner:
                    outer, inside = self.inner[-1]
                    self.inner[-1] = outer, inside + took

        return run


def step(bench: Bench) -> Iterator[Row]:
    """A step's functions, one by one."""
    trainee, (x, y) = bench.trainee(), bench.site()
    training, watch, spent = bench.training(bench.sizes.batch), Stopwatch(bench), []
    functions = {
        "bfloat16 copies and norms": (sparse, "_lowered"),
        "pre-activations": (sparse, "_largest"),
        "top-k": (sparse, "_topk"),
        "dot products": (sparse, "_gather_dot"),
        "sort by unit": (sparse.Selection, "by_unit"),
        PROOF: (sparse, "_from_candidates"),
        "decode": (sparse, "_gather_sum"),
        "gradients of rows": (sparse, "_scatter_rows"),
        "dense encoder": (type(trainee.layer.encoder), "forward"),
        "product with D, loss": (type(trainee.layer), "loss"),
        "dense backward": (Tensor, "backward"),
        "counts": (type(trainee.stats), "see"),
        "optimiser": (type(trainee.optimizer), "step"),
    }
    whole = bench.seconds(lambda: train_step(trainee, x, y, training, 0))
    with ExitStack() as stack:
        for name, (owner, attribute) in functions.items():
            stack.enter_context(patch.object(owner, attribute, watch.timed(name, getattr(owner, attribute))))
        one = watch.timed("the rest", train_step)
        for number in range(bench.args.repeats + 1):
            watch.spent.clear()
            one(trainee, x, y, training, 0)
            spent += [dict(watch.spent)] if number else []  # the first is to warm up
    for name in spent[0]:
        yield {"function": name, "ms": 1e3 * statistics.median(times[name] for times in spent)}
    yield {"function": "sum", "ms": 1e3 * statistics.median(sum(times.values()) for times in spent)}
    yield {"function": "a whole step, undisturbed", "ms": 1e3 * whole}
    rows, proven = _searched_again(bench, trainee, x)
    yield {"function": f"rows searched again: {rows:,} of {proven:,}", "ms": 0.0}


def _searched_again(bench: Bench, trainee: Trainee, x: Tensor) -> tuple[int, int]:
    searched: list[int] = []
    real = sparse._largest

    def noted(rows: Tensor, *rest: Any) -> Any:
        searched.append(len(rows))
        return real(rows, *rest)

    with patch.object(sparse, "_largest", noted):
        trainee.layer.encode(x)
    return sum(searched[1:]), len(x)


def trace(bench: Bench) -> Iterator[Row]:
    """What a step asks of the GPU, and where it waits for it."""
    trainee, (x, y) = bench.trainee(), bench.site()
    training = bench.training(bench.sizes.batch)
    one: Work = lambda: train_step(trainee, x, y, training, 0)  # noqa: E731
    one(), one()
    if not bench.cuda:
        return
    steps = 20
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    bench.wait()
    with torch.profiler.profile(activities=activities) as profile:
        begin = time.perf_counter()
        for _ in range(steps):
            one()
        bench.wait()
        wall = time.perf_counter() - begin
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(kernel.self_device_time_total for kernel in kernels) / 1e6
    yield {"what": "kernels and copies a step", "number": len(kernels) / steps}
    yield {"what": "GPU busy, ms a step", "number": 1e3 * busy / steps}
    yield {"what": "a step under the profiler, ms", "number": 1e3 * wall / steps}
    totals: Counter[str] = Counter()
    for kernel in kernels:
        totals[kernel.name[:60]] += kernel.self_device_time_total
    for name, total in totals.most_common(12):
        yield {"what": f"kernel {name}, ms a step", "number": total / 1e3 / steps}
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            one()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for wait in waits:
        yield {"what": f"waits at {Path(wait.filename).name}:{wait.lineno}", "number": 1}


def ceilings(bench: Bench) -> Iterator[Row]:
    """Rates of products and copies, and the floor of a step: the work that none avoids, each part at its own rate."""
    sizes, config = bench.sizes, bench.config()
    d, h, n, t = config.d_in or 0, config.hidden or 0, config.num_units or 0, sizes.batch
    side, rates = sizes.ceiling, {}
    encoder = "float32" if bench.args.tf32 == "off" else "float32, TF32"
    shapes = {"gate": (t, d, n), "encoder": (t, d, h), "base MLP": (sizes.forwards[0], d, 4 * d), "large": (side,) * 3}
    for shape, (rows, inner, columns) in shapes.items():
        for kind in ("float32", "float32, TF32", "bfloat16"):
            a = torch.randn(rows, inner, device=bench.device).to(DTYPES[kind.partition(",")[0]])
            b = torch.randn(columns, inner, device=bench.device).to(a.dtype)
            with tf32_products(kind.endswith("TF32")):
                seconds = bench.seconds(lambda a=a, b=b: a @ b.T, calls=3)
            rates[shape, kind] = 2 * rows * inner * columns / seconds
            yield {"what": f"{shape}: {rows:,} x {inner:,} x {columns:,}, {kind}", "ms": 1e3 * seconds} | {
                "TFLOP/s or TB/s": rates[shape, kind] / 1e12
            }
    source = torch.randn(side, side, device=bench.device)
    target = torch.empty_like(source)
    seconds = bench.seconds(lambda: target.copy_(source))
    copied = 2 * 4 * side**2 / seconds
    yield {"what": "copy, read and written", "ms": 1e3 * seconds, "TFLOP/s or TB/s": copied / 1e12}
    # Not counted: the sparse products (2 K d a token each), what normalisation and activations move, and
    # pre-activations, which are written for top-k to read. Nothing needs the gradient of x.
    block = 2 * 4 * d * d + 2 * 2 * h * d + 2 * 2 * sizes.context * d
    dense = 2 * t * h * d * (2 if config.glu else 1), 2 * t * h * d
    floor = {
        "base forward": t * block * (sizes.block + 1) / rates["base MLP", bench.args.base_dtype],
        "gate": 2 * t * n * d / rates["gate", bench.args.candidates],
        "encoder and D": sum(dense) / rates["encoder", encoder],
        "their backward": (dense[0] + 2 * dense[1]) / rates["encoder", encoder],
        "Adam": 7 * 4 * config.num_params / copied,
    }
    for name, seconds in floor.items():
        yield {"what": f"floor: {name}", "ms": 1e3 * seconds}
    total = sum(floor.values())
    yield {"what": f"floor: {t / total:,.0f} tokens/s", "ms": 1e3 * total}


def forwards(bench: Bench) -> Iterator[Row]:
    """The base model's forward up to the block, by its size and its GELU."""
    sizes, model = bench.sizes, bench.base
    own = {block.mlp: block.mlp.act for block in model.blocks}
    try:
        for name, act in {"the model's GELU": None, "torch's GELU": nn.GELU("tanh")}.items():
            for mlp in own:
                mlp.act = act or own[mlp]
            for tokens in sizes.forwards:
                rows = torch.from_numpy(bench.ids(max(1, tokens // sizes.context))).long().to(bench.device)
                seconds = bench.seconds(lambda rows=rows: model.record(rows, [sizes.block]), calls=3)
                row = {"tokens": rows.numel(), "GELU": name, "ms": 1e3 * seconds}
                yield row | {"tokens/s": rows.numel() / seconds}
    finally:
        for mlp, act in own.items():
            mlp.act = act


def kernels(bench: Bench) -> Iterator[Row]:
    """The sparse operations as the library calls them."""
    config, tokens = bench.config(), bench.sizes.batch
    units, d = config.num_units or 0, config.d_in or 0
    weight, rows = torch.randn(units, d, device=bench.device), torch.randn(tokens, d, device=bench.device)
    for k in (bench.sizes.k, bench.sizes.other_k):
        values = torch.rand(tokens, k, device=bench.device)
        even = torch.rand(tokens, units, device=bench.device).topk(k).indices
        always = even.clone()
        always[:, 0] = 0
        for selection, indices in {"even": even, "one unit always": always}.items():
            plan = Selection()
            plan.by_unit(indices, units)
            seconds = bench.seconds(lambda indices=indices: Selection().by_unit(indices, units))
            yield {"operation": "sort by unit", "K": k, "selection": selection, "PyTorch ms": 1e3 * seconds}
            operations: dict[str, Callable[..., Tensor]] = {
                "gather_sum": lambda i=indices, v=values: sparse._gather_sum(v, i, weight),
                "gather_dot": lambda i=indices, p=plan: sparse._gather_dot(rows, i, weight, p),
                "scatter_rows": lambda i=indices, v=values, p=plan: sparse._scatter_rows(v, i, rows, units, p),
            }
            for name, operation in operations.items():
                about = {"operation": name, "K": k, "selection": selection}
                yield about | _both_ways(bench, operation, 4 * tokens * k * d)
        pre = torch.randn(tokens, units // 64 * 64, device=bench.device).bfloat16()
        largest = _both_ways(bench, lambda pre=pre, k=k: sparse._topk(pre, k)[0].float().sum(1), 2 * pre.numel())
        yield {"operation": "the largest", "K": k, "selection": ""} | largest
    lowered = _both_ways(bench, lambda: sparse._lowered(weight)[2], 6 * units * d)
    yield {"operation": "rows to bfloat16, norms", "K": 0, "selection": ""} | lowered


def _both_ways(bench: Bench, operation: Callable[[], Tensor], moved: int) -> Row:
    """Time an operation in PyTorch and, on a GPU, in Triton, which moves so many bytes."""
    expected, seconds = operation(), bench.seconds(operation)
    row = {"PyTorch ms": 1e3 * seconds}
    if bench.cuda:
        use_triton(True)
        try:
            got, seconds = operation(), bench.seconds(operation)
        finally:
            use_triton(bench.args.triton)
        row |= {"Triton ms": 1e3 * seconds, "GB/s": moved / seconds / 1e9}
        row |= {"difference": float((got - expected).norm() / expected.norm())}
    return row


def topk(bench: Bench) -> Iterator[Row]:
    """Ways to find the K largest of a row; those in groups are the library's."""
    units = (bench.config().num_units or 0) // 64 * 64
    for dtype in (torch.bfloat16, torch.float32):
        pre = torch.randn(bench.sizes.batch, units, device=bench.device).to(dtype)
        for k in (bench.sizes.k, bench.sizes.other_k):
            ways: dict[str, Work] = {"topk": lambda pre=pre, k=k: pre.topk(k, sorted=False)}
            for group in (2, 4, 8, 16):
                ways[f"groups of {group}"] = lambda pre=pre, k=k, group=group: _grouped(pre, k, group)
            for name, way in ways.items():
                yield {"way": name, "K": k, "dtype": str(dtype)[6:], "ms": 1e3 * bench.seconds(way)}


def _grouped(pre: Tensor, k: int, group: int) -> object:
    with patch.object(sparse, "GROUP", group):
        return sparse._topk(pre, k)


def exact(bench: Bench) -> Iterator[Row]:
    """How far the smallest unit chosen lies below the K-th largest of float64, relative to it (rounding: 1e-6)."""
    trainee, (x, y) = bench.trainee(), bench.site()
    for number in range(10):
        train_step(trainee, x, y, bench.training(bench.sizes.batch), number)
    k = bench.sizes.k
    units = torch.arange(trainee.layer.num_units, device=bench.device)
    weight, bias = (part.detach() for part in trainee.layer.gates.rows(units))
    worst = torch.zeros((), dtype=torch.float64, device=bench.device)
    for seed in range(bench.sizes.exact):
        torch.manual_seed(seed)
        rows = x[torch.randperm(len(x), device=bench.device)] + 0.1 * x.std() * torch.randn_like(x)
        _, chosen = topk_linear(rows, weight, bias, k, bench.args.candidates)
        pre = torch.addmm(bias.double(), rows.double(), weight.double().T).relu()
        last = pre.topk(k).values[:, -1]
        below = (last - pre.gather(1, chosen).amin(1)) / last.clamp_min(1e-12)
        worst = torch.maximum(worst, below.amax())
    yield {"rows": bench.sizes.exact * len(x), "furthest below": float(worst)}


def host(bench: Bench) -> Iterator[Row]:
    """What the processor does while the GPU would wait."""
    from transformers import AutoTokenizer

    sizes = bench.sizes
    tokenizer = AutoTokenizer.from_pretrained(bundled_path("tiny-gpt2"))
    texts = list(islice(documents("bundled", "train"), 512))
    begin = time.perf_counter()
    read = sum(map(len, token_contexts(iter(texts), tokenizer, sizes.context)(0)))
    took = time.perf_counter() - begin
    yield {"what": "text to ids, a thread", "ms": 1e3 * took, "tokens/s": read / took}
    rows = bench.ids(2 * sizes.window // sizes.context, 0.01)
    for name, excluded in {"nothing": [], "one id": [BOS], "256 ids": list(range(256))}.items():

        def plan(excluded: list[int] = excluded) -> object:
            return _plan(iter(rows), None, Cursor(), sizes.window // 2, lambda ids: counted_positions(ids, excluded))

        seconds = bench.seconds(plan, calls=3)
        yield {"what": f"planning a window, {name} masked", "ms": 1e3 * seconds} | {
            "tokens/s": sizes.window // 2 / seconds
        }
    batch = torch.randn(sizes.batch, bench.config().d_in or 0)
    ways: dict[str, Work] = {"pageable": lambda: batch.to(bench.device)}
    if bench.cuda:
        pinned = batch.pin_memory()
        ways["pinned"] = lambda: pinned.to(bench.device, non_blocking=True)
    for name, way in ways.items():
        seconds = bench.seconds(way)
        yield {"what": f"a batch to the device, {name}", "ms": 1e3 * seconds, "tokens/s": sizes.batch / seconds}


def large(bench: Bench) -> Iterator[Row]:
    """A step of a large layer, and its peak memory, its inputs and targets included."""
    shape, sizes = bench.sizes.llama, bench.sizes
    if bench.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if bench.cuda else 0
    fields = {"sparsity": {"kind": "topk", "k": sizes.k}}
    config = size(LAYERS["mxd"].model_validate(fields).resolve(shape), match="paper")
    trainee, training = bench.trainee(config), bench.training(sizes.batch)
    x, y = (torch.randn(sizes.batch, width, device=bench.device) for width in (shape.d_in, shape.d_out))
    seconds = bench.seconds(lambda: train_step(trainee, x, y, training, 0), calls=3)
    row = {"d": shape.d_in, "hidden": shape.hidden, "N": config.num_units, "ms": 1e3 * seconds}
    row |= {"tokens/s": sizes.batch / seconds, "weights, gradients, moments GiB": 16 * config.num_params / 2**30}
    yield row | ({"peak GiB": (torch.cuda.max_memory_allocated() - before) / 2**30} if bench.cuda else {})


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    part.__name__: part for part in (run, step, trace, ceilings, forwards, kernels, topk, exact, host, large)
}


def show(name: str, row: Row, before: Row | None) -> None:
    """Print a row of a part's table, with a head where its columns are new."""
    if before is None or list(before) != list(row):
        title = f"\n{name}: {(PARTS[name].__doc__ or '').splitlines()[0]}\n" if before is None else ""
        print(f"{title}\n| {' | '.join(row)} |\n|{'---|' * len(row)}")
    cells = (f"{value:,.4g}" if isinstance(value, float) and value < 1e5 else _plain(value) for value in row.values())
    print(f"| {' | '.join(cells)} |", flush=True)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,.0f}"


def missed(parts: dict[str, Any]) -> list[str]:
    """Return each missed target, and each part that failed, as a line."""
    lines = [f"{name} failed: {found['error']}" for name, found in parts.items() if "error" in found]
    for row in parts.get("run", {}).get("rows", [])[:1]:
        if row["tokens/s"] < TARGET:
            lines.append(f"GPT-2 block 8, MxD K = 32: {row['tokens/s']:,.0f} tokens/s end to end, at least {TARGET:,}")
    for row in parts.get("kernels", {}).get("rows", []):
        if not row.get("difference", 0) < 1e-4:  # NaN, too
            lines.append(f"{row['operation']}, {row['selection']}: Triton is off by {row['difference']:.1e} of PyTorch")
    for row in parts.get("exact", {}).get("rows", []):
        if not row["furthest below"] < 1e-4:
            lines.append(f"a unit was chosen that lies {row['furthest below']:.1e} below the K-th largest")
    return lines


def measure(bench: Bench, names: Sequence[str], file: Path | None, result: dict[str, Any]) -> None:
    """Run the parts in turn; what each has found is written before the next begins, also where it failed."""
    for name in names:
        found: dict[str, Any] = {"rows": []}
        result["parts"][name] = found
        try:
            for row in PARTS[name](bench):
                show(name, row, found["rows"][-1] if found["rows"] else None)
                found["rows"].append(row)
        except Exception as error:  # whatever it is, the other parts are worth having
            found["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            found["traceback"] = traceback.format_exc()
            print(f"\n{name} failed: {found['error']}\n{found['traceback']}", flush=True)
        if file is not None:
            file.write_text(json.dumps(result, indent=2) + "\n")


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure; all by default"
    )
    parser.add_argument("--base-dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tf32", choices=["off", "encoder", "all"], default="off", help="see the training config")
    parser.add_argument(
        "--candidates", choices=["float32", "bfloat16"], default="bfloat16", help="see the training config"
    )
    parser.add_argument("--triton", action="store_true", help="train through the Triton kernels")
    parser.add_argument("--windows", type=int, default=8, help="windows of each run")
    parser.add_argument("--repeats", type=int, default=20, help="steps whose functions are timed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 and name each target that is missed")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the script out")
    args = parser.parse_args()
    if args.device == "cpu" and not args.small:
        parser.error(
            "--device cpu is there to try this script out; give --small as well (scripts/bench_step.py times CPUs)"
        )
    if args.small and args.check:
        parser.error("--check needs the full sizes; leave out --small")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device; this benchmark needs an NVIDIA GPU (to try it out: --device cpu --small)")
    use_triton(args.triton)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    name += ", toy sizes: the numbers mean nothing" if args.small else ""
    settings = {"device": name, "layer_dtype": "float32", "tf32": args.tf32}
    settings |= {"base_dtype": args.base_dtype, "candidates": args.candidates, "triton": args.triton}
    print(
        "; ".join(f"{key.replace('_', ' ')} {value}" for key, value in settings.items()), f"torch {torch.__version__}"
    )
    result: dict[str, Any] = {"settings": settings, "versions": versions(), "parts": {}}
    bench = Bench(torch.device(args.device), SMALL if args.small else FULL, args)
    with tf32_products(args.tf32 == "all"):
        measure(bench, args.parts, args.json, result)
    lines = missed(result["parts"]) if args.check else []
    print("\n".join(["", *(lines or ["every target is met"] * args.check)]))
    failed = any("error" in found for found in result["parts"].values())
    if lines or failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
