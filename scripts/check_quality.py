"""Does the fast path train as well as plain dense operations? Held-out normalized MSE of each path.

    python scripts/check_quality.py CONFIG [--set training.tokens=1048576 ...] [--seeds 3] [--json FILE] [--check]
    python scripts/check_quality.py CONFIG --paths float32 dense    # where plain operations would take too long

From one stream of activations, recorded in float32, each replacement of the config is trained several times for each
seed, from the same initial weights and on the same batches: with dense codes and dense products differentiated by
autograd (`plain`), with the sparse operations of `mxd train` (`float32`), with `training.candidates: bfloat16`, whose
rows are counted (this path is left out where there are too few units for it to pay), with `training.dense: bfloat16`
(`dense`; left out where no product of a step is large enough), and, if asked for, with `data.autocast` (`autocast`: the
same tokens, recorded once more). Held-out activations are float32's for all. The first of the paths that are asked for
is what the others are compared with. With --check the script exits 1 if a path's mean exceeds that of the first by more
than twice the first's own standard error over the seeds.
"""

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bench_run import candidates
from goals import conclude
from step_floor import step_cost
from torch import Tensor

from mxd.common.progress import progress
from mxd.config import DataConfig, RunConfig, load_config
from mxd.evaluation.checkpoints import held_out_contexts
from mxd.evaluation.faithfulness import Reconstruction
from mxd.layers import ReplacementConfig
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen
from mxd.ops import reference
from mxd.ops.sparse import candidates_pay
from mxd.planning.layout import blocks_of, plan_layers
from mxd.training.source import activation_stream
from mxd.training.step import Trainee, mean_sizes, new_trainee, train_step

Counts = dict[str, Counter[str]]
PATHS: dict[str, dict[str, str]] = {
    path: {"candidates": "float32", "dense": "float32"} | fields
    for path, fields in (
        ("plain", {}),
        ("float32", {}),
        ("bfloat16", {"candidates": "bfloat16"}),
        ("dense", {"dense": "bfloat16"}),
        ("autocast", {}),
    )
}
DEFAULT = ["plain", "float32", "bfloat16", "dense"]


@contextmanager
def plain_operations() -> Iterator[None]:
    """Dense codes and dense products in place of the sparse operations."""

    def topk_linear(x: Any, weight: Any, bias: Any, k: int, candidates: Any, selection: Any) -> Any:
        return reference.topk_linear(x, weight, bias, k)

    with (
        mock.patch("mxd.layers.gates.topk_linear", topk_linear),
        mock.patch("mxd.layers.base.sparse_decode", lambda *inputs: reference.sparse_decode(*inputs[:3])),
    ):
        yield


def paths_of(layer: ReplacementConfig, tokens: int, asked: Sequence[str]) -> list[str]:
    """Return the paths that were asked for and differ for a layer."""
    left_out = set() if candidates_pay(layer.sparsity.k, layer.num_units, layer.d_in) else {"bfloat16"}
    if not step_cost(layer, tokens, dense="bfloat16").rounded:
        left_out.add("dense")
    return [path for path in asked if path not in left_out]


def train_all(
    config: RunConfig, base: FrozenModel, seeds: int, paths: Sequence[str]
) -> tuple[dict[tuple[str, str, int], Trainee], Counts]:
    """Train every replacement on every path with every seed; keys are (replacement, path, seed).

    Also returns, for each replacement, how many rows had bfloat16 candidates and how many were searched anew.
    """
    training = config.training
    recipes = {path: training.model_copy(update=fields) for path, fields in PATHS.items()}
    trainees = {
        (name, path, seed): new_trainee(name, number, layer, seed, base.device, recipes[path])
        for name, (number, layer) in plan_layers(config, base).items()
        for path in paths_of(layer, training.batch_tokens, paths)
        for seed in range(seeds)
    }
    counts: Counts = {name: Counter() for name, _, _ in trainees}
    streams = {low: activation_stream(_recorded(config, low), base) for low in {path == "autocast" for path in paths}}
    with progress(f"training {len(trainees)} replacements", training.steps * training.batch_tokens) as advance:
        for step in range(training.steps):
            batches = {low: next(stream) for low, stream in streams.items()}
            for (name, path, _), trainee in trainees.items():
                batch = batches[path == "autocast"]
                x, y = batch.sites[trainee.number]
                if step == 0:
                    if training.settings.scaled:
                        trainee.scale(mean_sizes((x, y), trainee.processes))
                        trainee.enlarge()
                    trainee.initialise(batch.means[trainee.number], None, training.settings)
                with plain_operations() if path == "plain" else candidates() as rows:
                    train_step(trainee, x, y, recipes[path], step)
                counts[name].update(rows or {})
            advance(training.batch_tokens)
    return trainees, counts


def _recorded(config: RunConfig, autocast: bool) -> RunConfig:
    return config.model_copy(update={"data": config.data.model_copy(update={"autocast": autocast})})


@torch.no_grad()
def held_out_activations(
    config: RunConfig, base: FrozenModel, tokens: int, split: str = "validation"
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return inputs and outputs of each block's MLP on held-out text, special tokens left out."""
    text = DataConfig.model_validate(config.data.model_dump() | {"split": split})
    contexts = held_out_contexts(base, text)(0)
    special = torch.tensor(base.tokenizer.all_special_ids)
    recorded: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for _ in range(math.ceil(tokens / text.context)):
        ids = torch.tensor(next(contexts), dtype=torch.int64)[None]
        kept = ~torch.isin(ids, special)
        for number, (x, y) in base.record(ids, blocks_of(config, base)).items():
            recorded.setdefault(number, []).append((x[kept], y[kept]))
    return {
        number: (torch.cat([x for x, _ in sites]), torch.cat([y for _, y in sites]))
        for number, sites in recorded.items()
    }


@torch.no_grad()
def held_out(trainees: dict[Any, Trainee], activations: dict[int, tuple[Tensor, Tensor]]) -> dict[Any, float]:
    """Normalized MSE of every trainee."""
    errors = {}
    for key, trainee in trainees.items():
        reconstruction = Reconstruction(trainee.layer.eval(), None)
        for x, y in zip(*(site.split(1024) for site in activations[trainee.number]), strict=True):
            reconstruction.see(x, y)
        errors[key] = reconstruction.report()["normalized_mse"]
    return errors


def pairs(changes: list[str]) -> list[str]:
    """Return FIELD=VALUE ... as the words `mxd train` takes."""
    return [word for change in changes for word in (f"--{change.split('=', 1)[0]}", change.split("=", 1)[1])]


def main() -> None:
    """Parse, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the config to change")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--held-out", type=int, default=32_768, help="held-out tokens")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=DEFAULT)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    config = load_config(args.config, pairs(args.set))
    base = load_frozen(config.model.source, device="cpu")
    trainees, counts = train_all(config, base, args.seeds, args.paths)
    errors = held_out(trainees, held_out_activations(config, base, args.held_out))
    print(f"{config.model.source}, {config.training.tokens:,} tokens, held-out normalized MSE, {args.seeds} seeds\n")
    print(
        "| replacement | path | "
        + " | ".join(f"seed {s}" for s in range(args.seeds))
        + f" | mean | against {args.paths[0]} |"
    )
    print("|---|---|" + "---|" * (args.seeds + 2))
    worse, rows = [], []
    for name in dict.fromkeys(name for name, _, _ in errors):
        paths = [path for path in args.paths if (name, path, 0) in errors]
        series = {path: [errors[name, path, seed] for seed in range(args.seeds)] for path in paths}
        first = statistics.mean(series[paths[0]])
        noise = 2 * statistics.stdev(series[paths[0]]) / math.sqrt(args.seeds) if args.seeds > 1 else math.inf
        for path, errors_of_path in series.items():
            mean = statistics.mean(errors_of_path)
            cells = " | ".join(f"{value:.5f}" for value in errors_of_path)
            print(f"| {name} | {path} | {cells} | {mean:.5f} | {100 * (mean / first - 1):+.2f}% |")
            rows.append({"replacement": name, "path": path, "normalized_mse": errors_of_path})
            rows[-1] |= counts[name] if path == "bfloat16" else {}
            if mean - first > noise:
                worse.append(f"{name}, {path}: {mean:.5f} against {first:.5f}, noise {noise:.5f}")
    for name, count in counts.items():
        if count["rows proposed for"]:
            print(f"\n{name}: {count['rows proposed for']:,} rows proposed for, {count['rows searched anew']:,} anew")
    if args.json:
        args.json.write_text(json.dumps({"config": config.model_dump(mode="json"), "rows": rows}, indent=2) + "\n")
    if args.check:
        conclude(worse, f"\nevery path is within the noise of {args.paths[0]}")


if __name__ == "__main__":
    main()
