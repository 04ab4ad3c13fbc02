"""Time a step of `mxd tune` against the passes that no step avoids, written plainly.

    python scripts/bench_tune.py [--models tiny-llama tiny-gpt2] [--methods mxd transcoder] [--nmse 0 1] [--k 32]
        [--contexts 8] [--repeats 7] [--json FILE] [--check]

Every MLP of a model is replaced by a layer as it is drawn at random; the time does not depend on what it learned.
In turn, in one process, medians over repeats:

- *step*: forward of the base model, forward and backward of the spliced one, clipping, Adam (``TuneLoop.train_batch``);
- *passes*: the base model's logits, the spliced model's with their graph, their divergence, and the backward pass, by
  PyTorch alone.

With an NMSE of 1, which is the default of `mxd tune`, both also run the base MLPs on what the layers read and add the
normalized MSE.

`--check` names where a step takes more than 1.15 times as long.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from bench_step import medians
from goals import conclude
from torch import Tensor, nn

from mxd.artifacts.checkpoint import Trained
from mxd.artifacts.provenance import Provenance, versions
from mxd.common.processes import ALONE
from mxd.config import RunConfig, tuning_as_training
from mxd.data.activations import Batch, Cursor
from mxd.layers import parse_layer, size
from mxd.layers.losses import normalized_mse
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen
from mxd.model.unembedding import Unembedding
from mxd.splice import Splice
from mxd.training.trainer import keep_freed_memory
from mxd.training.tune import tuned_trainee
from mxd.training.tuning import TunedSet, TuneLoop
from mxd.tuning import TuneConfig

MOST = 1.15


class Beside(nn.Module):
    """A layer in its MLP's place, with its normalized MSE from that MLP on the same input."""

    error: Tensor

    def __init__(self, layer: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._mlp = (mlp,)  # in a tuple: no module of this one

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        out, y = self.layer(x), self._mlp[0](x)
        self.error = normalized_mse(out.flatten(0, -2), y.flatten(0, -2))
        return out


def steps(
    base: FrozenModel, layer: dict[str, Any], expansion: int, contexts: int, context: int, nmse: float
) -> dict[str, Callable[[], Any]]:
    """Return what is timed.

    Args:
        base: the model.
        layer: what replaces each of its MLPs.
        expansion: their size, as a multiple of the model's width.
        contexts: contexts in a step.
        context: tokens in a context.
        nmse: weight of the normalized MSE.
    """
    how = TuneConfig(batch_tokens=contexts * context, log_every=10**6, nmse=nmse)
    config = RunConfig.model_validate(
        {"replacements": [layer], "data": {"context": context}, "training": tuning_as_training(how), "tune": how}
    )
    trainees = []
    for block in range(base.num_blocks):
        complete = size(parse_layer(layer).resolve(base.mlp_shape(block)), expansion)
        provenance = Provenance(model=base.source, revision=None, block=block, fingerprint="")
        trained = Trained(complete.build(block), provenance, Path())
        trainees.append(tuned_trainee(f"block{block}", trained, base, how, ALONE))
    ids = torch.randint(base.vocabulary, (contexts, context))
    tuned = TunedSet.of("all", trainees, base)
    loop = object.__new__(TuneLoop)  # without what saves and reports: a step needs none of it
    loop.phase = SimpleNamespace(config=config)
    loop.base, loop.trainees, loop.processes, loop.step = base, trainees, ALONE, 0
    loop.how, loop.sets, loop.excluded, loop.unembedding = how, [tuned], (), Unembedding.of(base, ids[:1, :8])
    batch = Batch({}, ids.flatten(), {}, Cursor())
    plain = {t.number: Beside(t.layer, base.mlp(t.number)) if nmse else t.layer for t in trainees}
    splice = Splice(base, plain, check=False)

    def passes() -> None:
        tuned.zero_grad()
        expected = base.logits(ids)[:, :-1].log_softmax(-1)
        with splice.entered():
            found = base.module(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
            loss = F.kl_div(found, expected, reduction="none", log_target=True).sum(-1).mean()
            if nmse:
                loss = loss + nmse * sum(module.error for module in plain.values())
            loss.backward()

    return {"step": lambda: loop.train_batch(batch), "passes": passes}


def measure(base: FrozenModel, method: str, nmse: float, args: argparse.Namespace) -> dict[str, Any]:
    """Time a step and its passes in turn; return the medians and their ratio."""
    torch.manual_seed(0)
    layer = {"method": method, "sparsity": {"kind": "topk", "k": args.k}}
    seconds = medians(steps(base, layer, args.expansion, args.contexts, args.context, nmse), args.repeats)
    about = {"model": base.source, "method": method, "nmse": nmse, "tokens": args.contexts * args.context}
    return about | {"seconds": seconds, "ratio": seconds["step"] / seconds["passes"]}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny-llama", "tiny-gpt2"])
    parser.add_argument("--methods", nargs="+", default=["mxd", "transcoder"])
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--expansion", type=int, default=8)
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--nmse", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help=f"exit 1 where a step takes over {MOST} x the passes")
    args = parser.parse_args()
    keep_freed_memory()
    print(f"K = {args.k}, {args.contexts * args.context:,} tokens a step, {torch.get_num_threads()} threads\n")
    print("| model | method | NMSE | step, s | passes, s | step / passes |\n|---|---|---|---|---|---|")
    rows = []
    for name in args.models:
        base = load_frozen(name)
        for method, nmse in itertools.product(args.methods, args.nmse):
            rows.append(measure(base, method, nmse, args))
            seconds = " | ".join(f"{value:.3f}" for value in rows[-1]["seconds"].values())
            print(f"| {name} | {method} | {nmse:g} | {seconds} | {rows[-1]['ratio']:.2f} |", flush=True)
    if args.json:
        machine = {"threads": torch.get_num_threads()}
        found = {"machine": machine, "versions": versions(), "k": args.k, "rows": rows}
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    if args.check:
        slow = [row for row in rows if row["ratio"] > MOST]
        lines = [f"{row['model']}, {row['method']}, NMSE {row['nmse']:g}: {row['ratio']:.2f}" for row in slow]
        conclude([f"{line} x the passes, at most {MOST}" for line in lines])


if __name__ == "__main__":
    main()
