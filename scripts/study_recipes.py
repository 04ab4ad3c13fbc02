"""Which beginning and which recipe make an MxD that is faithful and a decomposition? The study of docs/recipes.md.

    python scripts/study_recipes.py [--settings NAME ...] [--seeds 3] [--split validation] [--json FILE]

Trains an MxD (tiny-gpt2, block 2, K = 32) under each setting, all seeds of a setting from one stream, and measures on
held-out text both how faithful it is and what it is made of (docs/evaluation.md, the account). `--set` changes the
config, for example `--set layers=[0] model.source=tiny-llama`.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from check_quality import held_out_activations, pairs
from torch import Tensor

from mxd.config import RunConfig, load_config
from mxd.errors import MxdError
from mxd.evaluation.account import Account
from mxd.evaluation.faithfulness import Reconstruction
from mxd.jobs import Job, learning_rate, new_job, train_step
from mxd.layers import Code, MLPWeights
from mxd.layers.base import code_product
from mxd.layers.mxd import MxD, MxDConfig
from mxd.model import FrozenModel, load_frozen
from mxd.plan import plan_layers
from mxd.progress import progress
from mxd.stream import activation_stream

CONFIG = Path(__file__).parent.parent / "configs" / "tiny.yaml"
SHARES = ("gate_share", "dense_share", "interaction_share", "routed_share")
METRICS = ("normalized_mse", "nmse_fixed_directions", *SHARES, "stable_rank", "dead_share")
Means = tuple[Tensor, Tensor]


class Studied(MxD):
    """An MxD that may have an expert held out of the K, and a penalty on what does not depend on the token."""

    config: "StudiedConfig"
    rows: Tensor

    def encode(self, x: Tensor) -> Code:
        """Choose among all experts; or, with one held out, among the others, and add that with strength 1."""
        self.rows = x
        if not self.config.held_out:
            return super().encode(x)
        values, indices, _ = self.sparsity(x, self.gate[1:], self.gate_bias[1:])
        first = indices.new_zeros(len(indices), 1)
        return Code(torch.cat([torch.ones_like(values[:, :1]), values], 1), torch.cat([first, indices + 1], 1))

    def penalty(self, code: Code) -> Tensor:
        """Return the weighted share of the output's energy that expert 0, or the mean gate, has by itself."""
        if self.config.penalised == "nothing":
            return self.bias.new_zeros(())
        dense, gates = self.encoder(self.rows) @ self.decoder, code_product(code, self.expert_scale)
        part = self.expert_scale[0] if self.config.penalised == "expert 0" else gates.mean(0)
        whole = (gates * dense).square().sum().clamp_min(1e-30)
        return self.config.weight * (part * dense).square().sum() / whole


class StudiedConfig(MxDConfig):
    """As MxD, with what the study changes."""

    held_out: bool = False
    penalised: Literal["nothing", "expert 0", "mean gate"] = "nothing"
    weight: float = 0.0

    def _make(self) -> Studied:
        return Studied(self)


def paper(layer: MxD, mlp: MLPWeights, means: Means) -> None:
    """As the paper draws it."""
    layer.start(*means, "paper")


def transcoder(layer: MxD, mlp: MLPWeights, means: Means) -> None:
    """As `training.start: transcoder`."""
    layer.start(*means, "transcoder")


def encoder_copied(layer: MxD, mlp: MLPWeights, means: Means) -> None:
    """The paper's, with the base MLP's encoder."""
    layer.encoder.copy_from(mlp)
    layer.start(*means, "paper")


def transcoder_encoder_copied(layer: MxD, mlp: MLPWeights, means: Means) -> None:
    """A transcoder's, with the base MLP's encoder in all hidden units but one."""
    layer.encoder.copy_from(mlp)
    layer.start(*means, "transcoder")


def encoder_decoder_copied(layer: MxD, mlp: MLPWeights, means: Means) -> None:
    """The paper's, with the base MLP's encoder and decoder."""
    encoder_copied(layer, mlp, means)
    layer.decoder.data.copy_(mlp.decoder)


def whole_base(layer: MxD, mlp: MLPWeights, means: Means) -> None:
    """The base MLP itself: the output bias copied, too, and expert 0 always on."""
    paper(layer, mlp, means)
    layer.copy_base(mlp)


def base_held_out(layer: MxD, mlp: MLPWeights, means: Means) -> None:
    """The base MLP itself, by way of the expert held out; the others have drawn, centred gates and begin at zero."""
    layer.start(*means, "transcoder")
    gates = layer.gate.data.clone(), layer.gate_bias.data.clone()
    layer.copy_base(mlp)
    layer.gate.data, layer.gate_bias.data = gates


@dataclass(frozen=True)
class Setting:
    """One row of the study."""

    fields: str
    """Fields of `training`, separated by blanks."""
    begin: Callable[[MxD, MLPWeights, Means], None]
    sparsity: str = "topk"
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of ``StudiedConfig``."""


def on(penalised: str, weight: float) -> dict[str, Any]:
    """Return the fields of a penalty."""
    return {"penalised": penalised, "weight": weight}


THIRD, WHOLE = "tokens=545792", "tokens=1638400"
FAST = f"recipe=fast {THIRD}"
HELD_OUT = {"held_out": True}
SETTINGS = {
    "short, all tokens": Setting(f"recipe=short {WHOLE}", paper),
    "short, decaying, all tokens": Setting(f"recipe=short decay=true {WHOLE}", paper),
    "short": Setting("recipe=short tokens=544768", paper),
    "short, decaying": Setting("recipe=short decay=true tokens=544768", paper),
    "fast": Setting(FAST, transcoder),
    "fast, all tokens": Setting(f"recipe=fast {WHOLE}", transcoder),
    "fast, paper's start": Setting(FAST, paper),
    "fast, random-K": Setting(FAST, transcoder, "random_k"),
    "fast, paper's start, random-K": Setting(FAST, paper, "random_k"),
    "paper's start, E copied": Setting(FAST, encoder_copied),
    "paper's start, E copied, random-K": Setting(FAST, encoder_copied, "random_k"),
    "transcoder start, E copied": Setting(FAST, transcoder_encoder_copied),
    "transcoder start, E copied, random-K": Setting(FAST, transcoder_encoder_copied, "random_k"),
    "E and D copied": Setting(FAST, encoder_decoder_copied),
    "E and D copied, random-K": Setting(FAST, encoder_decoder_copied, "random_k"),
    "whole base": Setting(FAST, whole_base),
    "whole base, random-K": Setting(FAST, whole_base, "random_k"),
    "fast, shared expert held out": Setting(FAST, transcoder, changes=HELD_OUT),
    "whole base, held out": Setting(FAST, base_held_out, changes=HELD_OUT),
    "whole base, held out, penalty 0.01 on it": Setting(FAST, base_held_out, changes=HELD_OUT | on("expert 0", 0.01)),
    "whole base, held out, penalty 0.1 on it": Setting(FAST, base_held_out, changes=HELD_OUT | on("expert 0", 0.1)),
    **{
        f"{name}, penalty {weight} on the mean gate": Setting(FAST, begin, changes=other | on("mean gate", weight))
        for name, begin, other in (
            ("paper's start", paper, {}),
            ("paper's start, E copied", encoder_copied, {}),
            ("E and D copied", encoder_decoder_copied, {}),
            ("whole base, held out", base_held_out, HELD_OUT),
        )
        for weight in (0.001, 0.01, 0.1)
    },
}
"""What the study compares."""


def configure(setting: Setting, changes: list[str]) -> RunConfig:
    """Return the run of one setting."""
    replacement = f"replacements=[{{method: mxd, sparsity: {{kind: {setting.sparsity}, k: 32}}}}]"
    fields = [f"training.{one}" for one in setting.fields.split()]
    return load_config(CONFIG, pairs([replacement, *fields, *changes]))


def train_all(name: str, setting: Setting, config: RunConfig, base: FrozenModel, seeds: int) -> list[Job]:
    """Train one MxD for each seed, from one stream."""
    training = config.training
    ((number, layer),) = plan_layers(config, base).values()
    if setting.changes:
        layer = StudiedConfig(**layer.model_dump(), **setting.changes)
    jobs = [new_job(name, number, layer, seed, base.device) for seed in range(seeds)]
    stream = activation_stream(config, base)
    with progress(name, training.steps * training.batch_tokens) as advance:
        for step in range(training.steps):
            batch = next(stream)
            for job in jobs:
                if step == 0:
                    assert isinstance(job.layer, MxD)
                    setting.begin(job.layer, base.mlp_weights(number), batch.means[number])
                train_step(job, *batch.sites[number], learning_rate(step, training), (step + 1) * training.batch_tokens)
            advance(training.batch_tokens)
    return jobs


@torch.no_grad()
def measure(job: Job, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return the error on held-out activations, and the account."""
    layer = job.layer.eval()
    account = Account(layer)
    for part in x.split(4096):
        account.see_means(part)
    found = Reconstruction(layer, account)
    for x_part, y_part in zip(x.split(4096), y.split(4096), strict=True):
        found.see(x_part, y_part)
    report = found.report()
    return {key: report[key] for key in METRICS}


def row(name: str, tokens: int, found: list[dict[str, float]]) -> str:
    """Return one line of the table: means over the seeds, and the range of the error."""
    mean: dict[str, Any] = {key: statistics.mean(one[key] for one in found) for key in METRICS}
    error, errors = mean["normalized_mse"], [one["normalized_mse"] for one in found]
    ratio = statistics.mean(one["nmse_fixed_directions"] / max(one["normalized_mse"], 1e-30) for one in found)
    shares = " | ".join(f"{mean[share]:.3f}" for share in SHARES)
    return (
        f"| {name} | {tokens:,} | {error:.5f} ({min(errors):.5f} to {max(errors):.5f}) | {ratio:.2f} | "
        f"{shares} | {mean['stable_rank']:.2f} | {mean['dead_share']:.1%} |"
    )


def main() -> None:
    """Parse, train, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), metavar="NAME", help="rows; by default all")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the config to change")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--split", default="validation")
    parser.add_argument("--held-out", type=int, default=32_768, help="held-out tokens")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if unknown := set(args.settings) - set(SETTINGS):
        raise SystemExit(f"no settings {sorted(unknown)}; choose from: {'; '.join(SETTINGS)}")
    try:
        configs = {name: configure(SETTINGS[name], args.set) for name in args.settings}
    except MxdError as error:
        raise SystemExit(str(error)) from None
    config = next(iter(configs.values()))
    base = load_frozen(config.model.source, device="cpu")
    ((x, y),) = held_out_activations(config, base, args.held_out, args.split).values()
    print(f"{config.model.source}, block {config.layers}, {len(x):,} tokens of {args.split}, {args.seeds} seeds\n")
    print("| setting | tokens | NMSE | fixed / NMSE | gate | dense | interaction | routed | stable rank | dead |")
    print("|---" * 10 + "|")
    results = {}
    for name, config in configs.items():
        jobs = train_all(name, SETTINGS[name], config, base, args.seeds)
        results[name] = [measure(job, x, y) for job in jobs]
        print(row(name, config.training.steps * config.training.batch_tokens, results[name]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
