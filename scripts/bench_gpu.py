"""Measure training on an NVIDIA GPU: tokens/s end to end, where the time goes, the floor, the kernels, the memory.

    python scripts/bench_gpu.py [--base-dtype bfloat16|float32] [--tf32] [--candidates float32|bfloat16] [--triton]
                                [--json FILE] [--check]

The base model is GPT-2 small (124M) with random weights and random tokens, so nothing is downloaded; the replacement is
an MxD of the paper's size (K = 32, N = 21,490) at block 8, in float32. The end-to-end rate comes first, undisturbed:
stream and steps as in `mxd train`, without its progress bar, metrics and checkpoints. The parts are timed one by one in
a second pass, where nothing overlaps, so their sum may exceed it; buffer and shuffle are the stream's time less that of
its forwards. Times are medians, with the device idle at both ends. `--device cpu --small` runs the same lines at toy
sizes to try the script out: it compares no kernels, measures no memory, and its numbers mean nothing.
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mxd.artifacts.provenance import versions
from mxd.config import TrainingConfig
from mxd.data.activations import activation_batches
from mxd.layers import LAYERS, MLPShape, ReplacementConfig, size
from mxd.layers.losses import normalize, squared_error
from mxd.model.frozen import FrozenModel
from mxd.model.loading import DTYPES, load_frozen
from mxd.ops import use_triton
from mxd.training.step import Trainee, new_trainee, train_step

TARGET = 800_000
"""Tokens per second, end to end, that GPT-2's block 8 with MxD, K = 32, must reach."""
LLAMA = MLPShape(3072, 3072, 8192, "silu", True)


def recipe(sizes: "Sizes", candidates: str, steps: int = 1) -> TrainingConfig:
    """Return the paper's recipe, its warm-up left out."""
    fields = {"candidates": candidates, "batch_tokens": sizes.batch, "buffer_tokens": sizes.batch}
    return TrainingConfig.model_validate({**fields, "tokens": steps * sizes.batch, "warmup_steps": 0})


@dataclass(frozen=True)
class Sizes:
    """What is run."""

    gpt2: dict[str, int]
    block: int
    context: int
    batch: int
    window: int
    k: int
    llama: MLPShape
    ceiling: int
    """Side of the square matrices, and square root of the numbers copied, that the device's rates are taken from."""


FULL = Sizes({}, 8, 128, 4096, 131_072, 32, LLAMA, 16_384)
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
    llama=MLPShape(48, 48, 128, "silu", True),
    ceiling=256,
)


class Device:
    """A clock that waits for the device."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object], calls: int = 10, repeats: int = 5) -> float:
        """Return the median time of a call, from ``repeats`` runs of ``calls`` in a row, after two that warm up."""
        run(), run()
        times = []
        for _ in range(repeats):
            self.wait()
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            self.wait()
            times.append((time.perf_counter() - begin) / calls)
        return statistics.median(times)

    @contextmanager
    def part(self, times: dict[str, list[float]], name: str) -> Iterator[None]:
        """Time a block and add it to ``times``."""
        self.wait()
        begin = time.perf_counter()
        yield
        self.wait()
        times[name].append(time.perf_counter() - begin)


def ceilings(device: Device, side: int, base_dtype: str) -> dict[str, float]:
    """Return FLOP/s of a big square product in each dtype used, and bytes/s (read plus written) of a big copy."""
    rates = {}
    for name in {"float32", "bfloat16", base_dtype}:
        a, b = (torch.randn(side, side, device=device.device).to(DTYPES[name]) for _ in range(2))
        rates[name] = 2 * side**3 / device.seconds(lambda a=a, b=b: torch.mm(a, b), calls=3)
    source = torch.randn(side, side, device=device.device)
    target = torch.empty_like(source)
    rates["copy"] = 2 * 4 * side**2 / device.seconds(lambda: target.copy_(source))
    return rates


def random_gpt2(sizes: Sizes, dtype: str, device: torch.device) -> FrozenModel:
    """GPT-2 small with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return load_frozen(GPT2LMHeadModel(GPT2Config(**sizes.gpt2)).to(device, DTYPES[dtype]))


def paper_config(shape: MLPShape, k: int) -> ReplacementConfig:
    """An MxD sized by the paper's convention."""
    return size(LAYERS["mxd"](sparsity={"kind": "topk", "k": k}).resolve(shape), match="paper")


def end_to_end(
    device: Device, base: FrozenModel, trainee: Trainee, training: TrainingConfig, sizes: Sizes, windows: int
) -> list[float]:
    """Return tokens/s of each window: its base forwards, its shuffle and its steps."""
    vocabulary = base.config.vocab_size
    pool = np.random.default_rng(0).integers(vocabulary, size=(8192, sizes.context), dtype=np.int32)

    def contexts_from(first: int) -> Iterator[np.ndarray]:
        return (pool[i % len(pool)] for i in count(first))

    contexts = max(1, 4096 // sizes.context)
    stream = activation_batches(
        base, [sizes.block], contexts_from, sizes.batch, sizes.window, forward_contexts=contexts
    )
    step, rates = 0, []
    for window in range(windows + 1):
        device.wait()
        begin = time.perf_counter()
        for batch in islice(stream, sizes.window // sizes.batch):
            train_step(trainee, *batch.sites[sizes.block], training, step)
            step += 1
        device.wait()
        if window:  # the first is to warm up
            rates.append(sizes.window / (time.perf_counter() - begin))
    assert step == (windows + 1) * (sizes.window // sizes.batch)
    return rates


def time_parts(
    device: Device, base: FrozenModel, trainee: Trainee, training: TrainingConfig, sizes: Sizes, repeats: int
) -> dict[str, float]:
    """Return the seconds of each part of a step, the base model's for as many tokens, each on its own."""
    contexts = max(1, 4096 // sizes.context)
    ids = torch.randint(base.config.vocab_size, (contexts, sizes.context), device=device.device)
    per_step = sizes.batch / ids.numel()
    parts = {"base forward": per_step * device.seconds(lambda: base.record(ids, [sizes.block]))}
    fixed = [row.numpy().astype(np.int32) for row in ids.cpu()]

    def one_window() -> list[Any]:
        stream = activation_batches(
            base,
            [sizes.block],
            lambda _: (fixed[i % contexts] for i in count()),
            sizes.batch,
            sizes.window,
            forward_contexts=contexts,
        )
        return [batch.ids[0] for batch in islice(stream, sizes.window // sizes.batch)]

    stream = device.seconds(one_window, calls=1) * sizes.batch / sizes.window
    parts["buffer and shuffle"] = stream - parts["base forward"]
    x, y = (t.reshape(-1, t.shape[-1]).float() for t in base.record(ids, [sizes.block])[sizes.block])
    x, y = (t.repeat(-(-sizes.batch // len(t)), 1)[: sizes.batch] for t in (x, y))
    times: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats + 1):
        if repeat == 1:
            times.clear()
        trainee.optimizer.zero_grad()
        with device.part(times, "gate and top-k"):
            code = trainee.layer.encode(x)
        with device.part(times, "encoder and decode"):
            prediction = trainee.layer.decode(x, code)
        with device.part(times, "loss and counts"):
            error = squared_error(prediction, y)
            loss = normalize(error, y)
            trainee.stats.see(y, error, loss, code, 0)
        with device.part(times, "backward"):
            loss.backward()
        with device.part(times, "Adam"):
            trainee.optimizer.step(training.settings.lr)
    parts |= {name: statistics.median(measured) for name, measured in times.items()}
    parts["whole step"] = device.seconds(lambda: train_step(trainee, x, y, training, 0))
    return parts


def work(base: FrozenModel, config: ReplacementConfig, sizes: Sizes, candidates: str) -> dict[str, tuple[str, float]]:
    """Return the work that no step avoids, by part: the ceiling that limits it, and its FLOPs, or bytes for ``copy``.

    Base forward: the linear maps and attention products up to the block, its MLP included. Backward: the gradients of
    the dense encoder's E and D, and of the hidden state; nothing needs the gradient of x. Adam: weight, gradient and
    both moments are read, all except the gradient written. Not counted: the sparse products (2 K d a token each), what
    normalisation and activations move, and pre-activations that are written for top-k to read.
    """
    t, d, h, n = sizes.batch, config.d_in or 0, config.hidden or 0, config.num_units or 0
    dtype = str(next(base.module.parameters()).dtype).removeprefix("torch.")
    block = 2 * 4 * d * d + 2 * 2 * h * d + 2 * 2 * sizes.context * d
    encoder = 2 * t * h * d * (2 if config.glu else 1)
    decoder = 2 * t * h * d
    return {
        "base forward": (dtype, t * block * (sizes.block + 1)),
        "gate and top-k": (candidates, 2 * t * n * d),
        "encoder and decode": ("float32", encoder + decoder),
        "backward": ("float32", encoder + 2 * decoder),
        "Adam": ("copy", 7 * 4 * config.num_params),
    }


def print_parts(parts: dict[str, float], needed: dict[str, tuple[str, float]], rates: dict[str, float]) -> float:
    """Print the table of parts and return the floor in seconds: each part's work at its ceiling, one by one."""
    total = sum(seconds for name, seconds in parts.items() if name != "whole step")
    print("\n| part of a step | ms | share | work | achieved | ceiling | floor ms |\n|---|---|---|---|---|---|---|")
    for name, seconds in parts.items():
        share = "" if name == "whole step" else f"{seconds / total:.1%}"
        line = f"| {name} | {1e3 * seconds:.3f} | {share} |"
        if name in needed:
            kind, amount = needed[name]
            unit = ("GB", 1e9) if kind == "copy" else ("TFLOP", 1e12)
            achieved, most = amount / seconds / unit[1], rates[kind] / unit[1]
            line += f" {amount / unit[1]:.3f} {unit[0]} | {achieved:,.1f} {unit[0]}/s | {most:,.1f} ({kind})"
            line += f" | {1e3 * amount / rates[kind]:.3f} |"
        else:
            line += " | | | |"
        print(line)
    return sum(amount / rates[kind] for kind, amount in needed.values())


def torch_gather_sum(values: Tensor, indices: Tensor, weight: Tensor) -> Tensor:
    """The sparse decode in PyTorch."""
    return F.embedding_bag(indices, weight, per_sample_weights=values, mode="sum")


def torch_gather_dot(grad: Tensor, indices: Tensor, weight: Tensor) -> Tensor:
    """The gradient of its activations: embedding_bag's own backward, which needs a forward first."""
    probe = torch.zeros(indices.shape, dtype=weight.dtype, device=weight.device, requires_grad=True)
    return torch.autograd.grad(torch_gather_sum(probe, indices, weight), probe, grad)[0]


def torch_scatter_rows(values: Tensor, rows: Tensor, order: Tensor, starts: Tensor, tokens: Tensor) -> Tensor:
    """The gradient of its weight, as one CSR product."""
    shape = (len(starts) - 1, len(rows))
    code = torch.sparse_csr_tensor(starts, tokens, values.reshape(-1)[order], shape, check_invariants=False)
    return code @ rows


def by_unit(indices: Tensor, units: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort a selection by unit."""
    flat = indices.reshape(-1)
    order = flat.to(torch.int32).argsort(stable=True)
    starts = F.pad(torch.bincount(flat, minlength=units).cumsum(0), (1, 0))
    return order, starts, order // indices.shape[1]


def compare_kernels(device: Device, tokens: int, k: int, units: int, d: int) -> list[dict[str, Any]]:
    """Time the three sparse operations in PyTorch and in Triton: units drawn evenly, and one unit in every token."""
    from mxd.ops import kernels

    rows = []
    weight, grad = torch.randn(units, d, device=device.device), torch.randn(tokens, d, device=device.device)
    values = torch.rand(tokens, k, device=device.device)
    even = torch.rand(tokens, units, device=device.device).topk(k).indices
    popular = even.clone()
    popular[:, 0] = 0
    for selection, indices in {"even": even, "one unit always": popular}.items():
        plan = by_unit(indices, units)
        pairs: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = {
            "gather_sum": (torch_gather_sum, kernels.gather_sum, (values, indices, weight)),
            "gather_dot": (torch_gather_dot, kernels.gather_dot, (grad, indices, weight)),
            "scatter_rows": (torch_scatter_rows, kernels.scatter_rows, (values, grad, *plan)),
        }
        for name, (plain, ours, inputs) in pairs.items():
            expected, got = plain(*inputs), ours(*inputs)
            row = {
                "operation": name,
                "selection": selection,
                "torch": device.seconds(lambda plain=plain, inputs=inputs: plain(*inputs)),
                "triton": device.seconds(lambda ours=ours, inputs=inputs: ours(*inputs)),
                "gathered_bytes": 4 * tokens * k * d,
                "difference": float((got - expected).norm() / expected.norm()),
            }
            rows.append(row)
        seconds = device.seconds(lambda indices=indices: by_unit(indices, units))
        rows.append({"operation": "sort by unit", "selection": selection, "torch": seconds})
    return rows


def print_kernels(rows: list[dict[str, Any]], rates: dict[str, float]) -> None:
    """Print the table of the sparse operations."""
    print(f"\nGathered rows come from L2 where they fit; a copy in memory moves {rates['copy'] / 1e9:,.0f} GB/s.")
    print("\n| operation | selection | torch ms | Triton ms | ratio | Triton GB/s gathered | difference |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        line = f"| {row['operation']} | {row['selection']} | {1e3 * row['torch']:.3f} |"
        if "triton" in row:
            line += f" {1e3 * row['triton']:.3f} | {row['torch'] / row['triton']:.2f} |"
            line += f" {row['gathered_bytes'] / row['triton'] / 1e9:,.0f} | {row['difference']:.1e} |"
        print(line if "triton" in row else line + " | | | |")


def large_step(device: Device, shape: MLPShape, sizes: Sizes, candidates: str) -> dict[str, Any]:
    """Time a step of a large layer and take its peak memory, its inputs and targets included."""
    cuda = device.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    config, training = paper_config(shape, sizes.k), recipe(sizes, candidates)
    trainee = new_trainee("large", 0, config, 0, device.device, training)
    x, y = (torch.randn(sizes.batch, width, device=device.device) for width in (shape.d_in, shape.d_out))
    seconds = device.seconds(lambda: train_step(trainee, x, y, training, 0), calls=3)
    peak = torch.cuda.max_memory_allocated() - before if cuda else None
    state = 16 * config.num_params
    return {"units": config.num_units, "params": config.num_params, "seconds": seconds, "peak": peak, "state": state}


def missed(result: dict[str, Any]) -> list[str]:
    """Return each missed target as a line."""
    lines = []
    rate = result["tokens_per_second"]
    if rate < TARGET:
        lines.append(f"GPT-2 block 8, MxD K = 32: {rate:,.0f} tokens/s end to end, at least {TARGET:,}")
    for row in result["kernels"]:
        if not row.get("difference", 0) < 1e-4:  # NaN, too
            lines.append(f"{row['operation']}, {row['selection']}: Triton is off by {row['difference']:.1e} of torch")
    return lines


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tf32", action="store_true", help="round the inputs of float32 products to TF32")
    parser.add_argument(
        "--candidates", choices=["float32", "bfloat16"], default="bfloat16", help="see the training config"
    )
    parser.add_argument("--triton", action="store_true", help="train through the Triton kernels")
    parser.add_argument("--windows", type=int, default=8, help="windows of the end-to-end measurement")
    parser.add_argument("--repeats", type=int, default=20, help="steps of the pass that times the parts")
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
    if args.device == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32" if args.tf32 else "ieee"
    device, sizes = Device(args.device), SMALL if args.small else FULL
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    name += ", toy sizes: the numbers mean nothing" if args.small else ""
    products = "TF32" if args.tf32 else "IEEE float32"
    settings = {"base_dtype": args.base_dtype, "layer_dtype": "float32", "products": products}
    settings |= {"candidates": args.candidates, "triton": args.triton, "device": name}
    print(f"{name}; torch {torch.__version__}")
    print(
        f"base model {args.base_dtype}; layer float32, its products {products}; candidates {args.candidates}; "
        f"sparse operations in {'Triton' if args.triton else 'PyTorch'}"
    )

    rates = ceilings(device, sizes.ceiling, args.base_dtype)
    base = random_gpt2(sizes, args.base_dtype, device.device)
    config = paper_config(base.mlp_shape(sizes.block), sizes.k)
    training = recipe(sizes, args.candidates, (args.windows + 1) * (sizes.window // sizes.batch))
    trainee = new_trainee("MxD", sizes.block, config, 0, device.device, training)
    window_rates = end_to_end(device, base, trainee, training, sizes, args.windows)
    loss = trainee.stats.report(0, 1)["normalized_mse"]
    rate = statistics.median(window_rates)
    print(f"\nMxD, K = {sizes.k}, N = {config.num_units:,}, block {sizes.block}, batches of {sizes.batch:,} tokens:")
    slowest, fastest = min(window_rates), max(window_rates)
    print(f"{rate:,.0f} tokens/s end to end ({slowest:,.0f} to {fastest:,.0f}); mean loss {loss:.4f}")

    parts = time_parts(device, base, trainee, training, sizes, args.repeats)
    needed = work(base, config, sizes, args.candidates)
    floor = print_parts(parts, needed, rates)
    print(f"\nfloor {1e3 * floor:.3f} ms a step, {sizes.batch / floor:,.0f} tokens/s")
    print(f"end to end {rate * floor / sizes.batch:.1%} of the floor's rate,", end=" ")
    flops = sum(amount for kind, amount in needed.values() if kind != "copy")
    print(f"{flops * rate / sizes.batch / 1e12:,.1f} TFLOP/s of the products above")

    d, units = config.d_in or 0, config.num_units or 0
    del trainee, base
    compared = compare_kernels(device, sizes.batch, sizes.k, units, d) if args.device == "cuda" else []
    print_kernels(compared, rates) if compared else print("\nkernels: compared on CUDA only")
    large = large_step(device, sizes.llama, sizes, args.candidates)
    peak = "not measured" if large["peak"] is None else f"{large['peak'] / 2**30:.2f} GiB"
    llama, state = sizes.llama, f"{large['state'] / 2**30:.2f} GiB"
    print(
        f"\nMxD at Llama-3.2-3B's MLP shape: d = {llama.d_in:,}, hidden {llama.hidden:,}, GLU, N = {large['units']:,}:"
    )
    print(f"{1e3 * large['seconds']:.2f} ms a step, {sizes.batch / large['seconds']:,.0f} tokens/s", end="; ")
    print(f"peak memory {peak}, of which weights, gradients and moments {state}")
    result = {
        "settings": settings,
        "versions": versions(),
        "ceilings": rates,
        "tokens_per_second": rate,
        "windows": window_rates,
        "parts": parts,
        "work": needed,
        "floor": floor,
        "kernels": compared,
        "large": large,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    if args.check:
        lines = missed(result)
        print("\n".join(["", *lines]) if lines else "\nevery target is met")
        sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
