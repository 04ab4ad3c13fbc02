"""How fast does a wholly replaced model generate, beside the base model? Tokens/s of greedy continuations.

    python scripts/fetch_models.py
    python scripts/bench_generate.py [--layers MxD TC STC] [--batches 1 8] [--json FILE] [--check]
    python scripts/bench_generate.py --model tiny-gpt2 --new-tokens 16 --repeats 2

Every MLP is replaced by a layer of random weights, sized as in a run: speed does not depend on what was learnt. Prompts
are random tokens of one length. The base model and the spliced one take turns, from the same prompts, with a key-value
cache, and the prompt's forward is part of the time; the numbers are medians over the turns.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from bench_step import METHODS, methods
from goals import conclude

from mxd.artifacts.provenance import versions
from mxd.evaluation.generation import greedy
from mxd.layers import ReplacementLayer, parse_layer, size
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen
from mxd.splice import Splice

SMOLLM2 = "models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"


def random_layers(base: FrozenModel, label: str, k: int, expansion: float) -> dict[int, ReplacementLayer]:
    """A layer of random weights for every block.

    Args:
        base: the base model.
        label: what ``bench_step.py`` calls the layer.
        k: units active for a token, where the layer has a K.
        expansion: the layer's size, as ``sizing.expansion`` of a run.
    """
    layers = {}
    for block in range(base.num_blocks):
        config = size(parse_layer(methods(k)[label]).resolve(base.mlp_shape(block)), expansion)
        layers[block] = config.build(seed=block).to(base.device).eval()
        for parameter in layers[block].parameters():
            parameter.data.normal_(std=0.02)
    return layers


def bench(base: FrozenModel, label: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Time the base model and the one with all MLPs replaced, in turn in each repeat, after one that warms up."""
    layers = random_layers(base, label, args.k, args.expansion)
    splice = Splice(base, layers)
    prompts = torch.randint(0, base.vocabulary, (batch, args.prompt_tokens)).tolist()
    rates: dict[str, list[float]] = {"base": [], "spliced": []}
    for repeat in range(args.repeats + 1):
        for which, found in rates.items():
            undo = splice.insert() if which == "spliced" else None
            begin = time.perf_counter()
            greedy(base, prompts, args.new_tokens, batch)
            seconds = time.perf_counter() - begin
            if undo is not None:
                undo()
            if repeat:
                found.append(batch * args.new_tokens / seconds)
    medians = {f"{which}_tokens_per_second": statistics.median(found) for which, found in rates.items()}
    return {
        "layer": label,
        "batch": batch,
        "units": layers[0].num_units,
        "params": sum(layer.config.num_params for layer in layers.values()),
        "base_params": sum(parameter.numel() for parameter in base.module.parameters()),
        **medians,
        "ratio": medians["spliced_tokens_per_second"] / medians["base_tokens_per_second"],
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", nargs="+", choices=METHODS, default=["MxD", "TC", "STC"])
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--expansion", type=float, default=8)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 and name what is slower than the base model")
    args = parser.parse_args()
    base = load_frozen(args.model, device=args.device)
    machine = {"device": str(base.device), "threads": torch.get_num_threads()}
    print(f"{base.source}, {base.num_blocks} blocks, {machine['threads']} threads, K = {args.k}")
    print("\n| layer | batch | base, tokens/s | replaced, tokens/s | ratio |\n|---|---|---|---|---|")
    rows = []
    for label in args.layers:
        for batch in args.batches:
            row = bench(base, label, batch, args)
            rates = f"{row['base_tokens_per_second']:,.1f} | {row['spliced_tokens_per_second']:,.1f}"
            print(f"| {label}, N = {row['units']:,} | {batch} | {rates} | {row['ratio']:.2f} |", flush=True)
            rows.append(row)
    if args.json:
        found = {"machine": machine, "versions": versions(), "model": base.source, "k": args.k, "rows": rows}
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    if args.check:
        slower = [f"{row['layer']}, batch {row['batch']}: {row['ratio']:.2f}" for row in rows if row["ratio"] < 1]
        conclude(slower, "nothing is slower than the base model")


if __name__ == "__main__":
    main()
