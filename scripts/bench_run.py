"""Time a whole run, live and from a cache, and evaluation; where the time goes, as shares.

    python scripts/fetch_models.py
    python scripts/bench_run.py [--batches 16] [--json FILE] [--check]
    python scripts/bench_run.py --model tiny-gpt2 --block 2 --expansion 32

A run of 4 methods x 4 K at one block: the base model's forward alone, each replacement's step alone on one batch (the
median), then `mxd train` as it is, reading live and reading a cache; what the run takes beyond forward and steps is its
overhead. It also counts the rows of the live run whose candidates were computed in bfloat16, and those whose candidates
were not proven. Evaluation: one replacement of the block against eight.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

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
from mxd.training.source import activation_stream, cache_activations
from mxd.training.step import new_trainee, train_step
from mxd.training.trainer import train

SMOLLM2 = "models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
REPLACEMENTS: list[dict[str, Any]] = [
    {"method": "mxd"},
    {"method": "transcoder"},
    {"method": "transcoder", "skip": True},
    {"method": "cp_mumoe"},
]
KS = [4, 8, 16, 32]


def seconds(call: Callable[[], object]) -> float:
    """Return the wall time of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def configure(args: argparse.Namespace, folder: str, run: str, **data: Any) -> RunConfig:
    """The run's config."""
    batch = 4096
    return parse_config(
        {
            "run": run,
            "out": folder,
            "blocks": [args.block],
            "model": {"source": args.model},
            "data": data,
            "sizing": {"expansion": args.expansion},
            "replacements": [{**method, "sparsity": {"kind": "topk", "k": KS}} for method in REPLACEMENTS],
            "training": {
                "recipe": "short",
                "tokens": args.batches * batch,
                "buffer_tokens": min(args.batches, 16) * batch,
                "save_every": 10**9,
            },
        }
    )


def forward_seconds(config: RunConfig, base: FrozenModel) -> float:
    """The base model's forward over the run's contexts, up to the block, and nothing else."""
    data = config.data
    contexts = token_contexts(documents(data.source, data.split), base.tokenizer, data.context, data.bos, config.seed)
    rows = contexts(0)
    contexts_per_forward = 4096 // data.context
    counted = data.context - bool(base.tokenizer.bos_token_id is not None and data.bos)  # BOS does not count
    forwards = -(-config.training.steps * config.training.batch_tokens // (contexts_per_forward * counted))
    ids = [
        torch.stack([torch.from_numpy(next(rows).astype("int64")) for _ in range(contexts_per_forward)])
        for _ in range(forwards)
    ]
    base.record(ids[0], config.blocks)
    return seconds(lambda: [base.record(part, config.blocks) for part in ids])


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
    results: dict[str, Any] = {"steps": steps, "forward": forward_seconds(live, base)}
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
    }


def missed(results: dict[str, Any]) -> list[str]:
    """Return the targets missed, each as one line."""
    ratios = {
        "live run / (forward + steps)": (results["live run"] / (results["forward"] + results["all steps"]), 1.10),
        "cached run, waiting / whole": (results["cached run, waiting"] / results["cached run"], 0.05),
        "evaluating 8 / evaluating 1": (results["evaluating 8"] / results["evaluating 1"], 3.0),
    }
    for name, (got, most) in ratios.items():
        print(f"{name}: {got:.3f}, at most {most}")
    return [f"{name}: {got:.3f}, at most {most}" for name, (got, most) in ratios.items() if got > most]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--block", type=int, default=9)
    parser.add_argument("--expansion", type=int, default=8)
    parser.add_argument("--batches", type=int, default=16, help="batches of 4,096 tokens in a run")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens evaluated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 and name each target that is missed")
    args = parser.parse_args()
    base = load_frozen(args.model)
    with tempfile.TemporaryDirectory() as folder:
        results = runs(args, base, folder) | evaluations(args, base, folder)
    tokens = args.batches * 4096
    print(f"{base.source}, block {args.block}, {tokens:,} tokens, {torch.get_num_threads()} threads\n")
    print("| | seconds | share of the live run | tokens/s |\n|---|---|---|---|")
    for name in ("forward", "all steps", "live run", "live run, waiting", "cached run", "cached run, waiting"):
        taken = results[name]
        print(f"| {name} | {taken:.2f} | {taken / results['live run']:.1%} | {tokens / taken:,.0f} |")
    for name in ("writing the cache", "evaluating 1", "evaluating 8"):
        print(f"| {name} | {results[name]:.2f} | | |")
    print(f"\nrows proposed for: {results['rows proposed for']:,}, searched anew: {results['rows searched anew']:,}\n")
    misses = missed(results)
    if args.json:
        machine = {"threads": torch.get_num_threads()}
        args.json.write_text(json.dumps({"machine": machine, "versions": versions(), **results}, indent=2) + "\n")
    if args.check:
        print("\n".join(misses) or "every target is met")
        sys.exit(1 if misses else 0)


if __name__ == "__main__":
    main()
