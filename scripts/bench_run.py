"""Time a whole run, live and from a cache, and evaluation; where the time goes, as shares.

    python scripts/fetch_models.py
    python scripts/bench_run.py [--batches 16] [--json FILE] [--check]
    python scripts/bench_run.py --single --batch-tokens 1024 --batches 64
    python scripts/bench_run.py --model tiny-gpt2 --block 2 --expansion 32

A run of 4 methods x 4 K at one block: the text's tokens alone, the base model's forward alone (in float32; under
autocast and in bfloat16, with the errors that these make; and as the run takes it), all of the stream alone, each
replacement's step alone on one batch (the median), then `mxd train` as it is, reading live and reading a cache; what
the run takes beyond forward and steps is its overhead. With --single the run has one transcoder, and the base model's
forward is most of it. The rows of the live run whose candidates were computed in bfloat16 are counted, and those whose
candidates were not proven. Evaluation: one replacement of the block against eight.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from goals import conclude

from mxd.artifacts.provenance import versions
from mxd.config import RunConfig, parse_config
from mxd.data.activations import Batch
from mxd.data.contexts import token_contexts
from mxd.data.text import documents
from mxd.evaluation.faithfulness import evaluate
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen
from mxd.ops import sparse
from mxd.planning.layout import plan_layers
from mxd.training.source import activation_stream, autocasts, bos_id_of, cache_activations, text_contexts
from mxd.training.step import new_trainee, train_step
from mxd.training.trainer import train

SMOLLM2 = "models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
METHODS: list[dict[str, Any]] = [
    {"method": "mxd"},
    {"method": "transcoder"},
    {"method": "transcoder", "skip": True},
    {"method": "cp_mumoe"},
]
REPLACEMENTS = [{**method, "sparsity": {"kind": "topk", "k": [4, 8, 16, 32]}} for method in METHODS]
RUNS = "live run", "cached run"
FORWARDS = "in float32", "under autocast", "in bfloat16"
SITES = "inputs", "outputs"
SINGLE = [{"method": "transcoder", "sparsity": {"kind": "topk", "k": 32}}]


def seconds(call: Callable[[], object]) -> float:
    """Return the wall time of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def configure(args: argparse.Namespace, folder: str, run: str, **data: Any) -> RunConfig:
    """The run's config."""
    return parse_config(
        {
            "run": run,
            "out": folder,
            "blocks": [args.block],
            "model": {"source": args.model},
            "data": data,
            "sizing": {"expansion": args.expansion},
            "replacements": SINGLE if args.single else REPLACEMENTS,
            "training": {
                "recipe": "short",
                "tokens": args.batches * args.batch_tokens,
                "batch_tokens": args.batch_tokens,
                "buffer_tokens": min(args.batches, 16) * args.batch_tokens,
                "save_every": 10**9,
            },
        }
    )


def stream_seconds(config: RunConfig, base: FrozenModel) -> dict[str, float]:
    """The times of the stream's parts, each over the run's tokens: the text, the forward, and the stream as it is."""
    per_forward, counted = config.data.forward_contexts, config.data.context - (bos_id_of(config, base) is not None)
    forwards = -(-config.training.steps * config.training.batch_tokens // (per_forward * counted))
    begin = time.perf_counter()
    rows = list(islice(text_contexts(config, base, None)(0), forwards * per_forward))
    found = {"text": time.perf_counter() - begin}
    ids = torch.from_numpy(np.stack(rows)).long().split(per_forward)
    base.record(ids[0], config.blocks)
    rounded = load_frozen(config.model.source, dtype="bfloat16")
    first: dict[str, list[torch.Tensor]] = {}
    for name, model, enabled in zip(FORWARDS, (base, base, rounded), (False, True, False), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found[f"forward {name}"] = seconds(lambda: [model.record(part, config.blocks) for part in ids])  # noqa: B023
            sites = model.record(ids[0], config.blocks)[config.blocks[0]]
        first[name] = [site[:, 1:].flatten(0, 1).float() for site in sites]
    for name in FORWARDS[1:]:
        for site, exact, low in zip(SITES, first[FORWARDS[0]], first[name], strict=True):
            error = (low - exact).square().sum() / (exact - exact.mean(0)).square().sum()
            found[f"FVU of {site} {name}"] = float(error)
    found["forward"] = found["forward under autocast" if autocasts(config, base) else "forward in float32"]
    found["stream"] = seconds(lambda: list(islice(activation_stream(config, base), config.training.steps)))
    return found


def step_seconds(config: RunConfig, base: FrozenModel, repeats: int) -> dict[str, float]:
    """The median time of one step of each replacement, alone on one batch."""
    batch = next(activation_stream(config, base))
    medians = {}
    for name, (number, layer) in plan_layers(config, base).items():
        trainee = new_trainee(name, number, layer, config.seed, base.device, config.training)
        x, y = batch.sites[number]
        times = [
            seconds(lambda trainee=trainee, x=x, y=y: train_step(trainee, x, y, config.training, 0))
            for _ in range(repeats + 1)
        ]
        medians[name] = statistics.median(times[1:])
    return medians


@contextmanager
def waiting() -> Iterator[list[float]]:
    """Collect the times `mxd train` spends waiting for a batch."""
    import importlib

    module = importlib.import_module("mxd.training.loop")
    original, waits = module.Loop.next_batch, []

    def timed(*arguments: Any) -> Batch:
        begin = time.perf_counter()
        try:
            return original(*arguments)
        finally:
            waits.append(time.perf_counter() - begin)

    module.Loop.next_batch = timed
    try:
        yield waits
    finally:
        module.Loop.next_batch = original


@contextmanager
def candidates() -> Iterator[dict[str, int]]:
    """Count the rows whose candidates are computed in bfloat16, and those searched anew in float32."""
    proposed, largest, counts = (
        sparse._from_candidates,
        sparse._largest,
        {"rows proposed for": 0, "rows searched anew": 0},
    )
    searched: list[tuple[bool, int]] = []

    def noting(x: Any, *rest: Any) -> Any:
        searched.append((x.dtype is torch.bfloat16, 0 if x.is_meta else len(x)))
        return largest(x, *rest)

    def counting(*inputs: Any) -> Any:
        searched.clear()
        result = proposed(*inputs)
        if searched[0][0]:
            counts["rows proposed for"] += searched[0][1]
            counts["rows searched anew"] += sum(rows for _, rows in searched[1:])
        return result

    with mock.patch.object(sparse, "_from_candidates", counting), mock.patch.object(sparse, "_largest", noting):
        yield counts


def runs(args: argparse.Namespace, base: FrozenModel, folder: str) -> dict[str, Any]:
    """Measure the run's parts, the live run and the cached run."""
    live = configure(args, folder, "live")
    cached = configure(args, folder, "cached", cache=f"{folder}/cache")
    steps = step_seconds(live, base, args.repeats)
    results: dict[str, Any] = {"steps": steps} | stream_seconds(live, base)
    results["all steps"] = args.batches * sum(steps.values())
    with waiting() as waits, candidates() as rows:
        results["live run"] = seconds(lambda: train(live, model=base))
        results["live run, waiting"] = sum(waits)
    results |= rows
    results["writing the cache"] = seconds(lambda: cache_activations(live, Path(folder) / "cache", model=base))
    with waiting() as waits:
        results["cached run"] = seconds(lambda: train(cached, model=base))
        results["cached run, waiting"] = sum(waits)
    return results


def evaluations(args: argparse.Namespace, base: FrozenModel, folder: str) -> dict[str, float]:
    """Measure the evaluation of one replacement and of eight."""
    config = configure(args, folder, "evaluation")
    layers = {name: layer.build() for name, (_, layer) in plan_layers(config, base).items()}
    text = documents("bundled", "validation")
    contexts = token_contexts(text, base.tokenizer, config.data.context, seed=0, repeat=False)
    names = list(layers)[::2][:8]
    return {
        f"evaluating {n}": seconds(
            lambda n=n: evaluate(base, {name: {args.block: layers[name]} for name in names[:n]}, contexts, args.tokens)
        )
        for n in (1, 8)
        if n <= len(names)
    }


def missed(results: dict[str, Any]) -> list[str]:
    """Return the targets missed, each as one line."""
    ratios = {
        "live run / (forward + steps)": (results["live run"] / (results["forward"] + results["all steps"]), 1.05),
        "cached run, waiting / whole": (results["cached run, waiting"] / results["cached run"], 0.05),
    }
    if "evaluating 8" in results:
        ratios["evaluating 8 / evaluating 1"] = results["evaluating 8"] / results["evaluating 1"], 3.0
    for name, (got, most) in ratios.items():
        print(f"{name}: {got:.3f}, at most {most}")
    return [f"{name}: {got:.3f}, at most {most}" for name, (got, most) in ratios.items() if got > most]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--block", type=int, default=9)
    parser.add_argument("--expansion", type=int, default=8)
    parser.add_argument("--batches", type=int, default=16, help="batches in a run")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--single", action="store_true", help="one transcoder with K = 32 in place of all")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens evaluated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 and name each target that is missed")
    args = parser.parse_args()
    base = load_frozen(args.model)
    with tempfile.TemporaryDirectory() as folder:
        results = runs(args, base, folder) | evaluations(args, base, folder)
    tokens = args.batches * args.batch_tokens
    print(f"{base.source}, block {args.block}, {tokens:,} tokens, {torch.get_num_threads()} threads\n")
    print("| | seconds | share of the live run | tokens/s |\n|---|---|---|---|")
    forwards = (f"forward {name}" for name in FORWARDS)
    for name in ("text", *forwards, "stream", "all steps", *(f"{run}{of}" for run in RUNS for of in ("", ", waiting"))):
        taken = results[name]
        print(f"| {name} | {taken:.2f} | {taken / results['live run']:.1%} | {tokens / taken:,.0f} |")
    for name in ("writing the cache", "evaluating 1", "evaluating 8"):
        if name in results:
            print(f"| {name} | {results[name]:.2f} | | |")
    for name in FORWARDS[1:]:
        inputs, outputs = (results[f"FVU of {site} {name}"] for site in SITES)
        print(f"\nFVU of what is recorded {name}: inputs {inputs:.1e}, outputs {outputs:.1e}")
    print(f"\nrows proposed for: {results['rows proposed for']:,}, searched anew: {results['rows searched anew']:,}\n")
    misses = missed(results)
    if args.json:
        machine = {"threads": torch.get_num_threads()}
        args.json.write_text(json.dumps({"machine": machine, "versions": versions(), **results}, indent=2) + "\n")
    if args.check:
        conclude(misses)


if __name__ == "__main__":
    main()
