"""Which initialisation and recipe make an MxD that is faithful and a decomposition? The study of docs/recipes.md.

    python scripts/study_recipes.py [--settings NAME ...] [--seeds 3] [--split validation] [--json FILE] [--check]

Trains an MxD (tiny-gpt2, block 2, K = 32) under each setting, all seeds of a setting from one stream, and measures on
held-out text both how faithful it is and what it is made of (docs/evaluation.md, the account). `--set` changes the
config, for example `--set blocks=[0] model.source=tiny-llama`.

`--check` tells whether `fast` has the error of `short, all tokens`, and is as little of a transcoder: its error with
fixed directions, beside its error, is at least nine tenths of the other's.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from check_quality import held_out_activations, pairs
from goals import conclude
from torch import Tensor

from mxd.common.errors import MxdError
from mxd.common.progress import progress
from mxd.config import RunConfig, load_config
from mxd.evaluation.account import Account
from mxd.evaluation.faithfulness import Reconstruction
from mxd.layers import Code, MLPWeights
from mxd.layers.base import code_product
from mxd.layers.mxd import SPREAD, MxD, MxDConfig
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen
from mxd.planning.layout import plan_layers
from mxd.training.source import activation_stream
from mxd.training.step import Trainee, new_trainee, train_step

CONFIG = Path(__file__).parent.parent / "configs" / "tiny.yaml"
SHARES = ("gate_share", "dense_share", "interaction_share", "routed_share")
METRICS = ("normalized_mse", "nmse_fixed_directions", *SHARES, "stable_rank", "dead_share")
Means = tuple[Tensor, Tensor]


class Penalised(MxD):
    """An MxD with a penalty on the part of the output that does not depend on the token's gates."""

    config: "PenalisedConfig"
    rows: Tensor

    def encode(self, x: Tensor) -> Code:
        """Encode as an MxD does, and keep the input for the penalty."""
        self.rows = x
        return super().encode(x)

    def penalty(self, code: Code) -> Tensor:
        """Return the weighted share of the output's energy that the mean gate alone gives."""
        dense, gates = self.hidden(self.rows), code_product(code, self.expert_scale)
        whole = (gates * dense).square().sum().clamp_min(1e-30)
        return self.config.penalty * (gates.mean(0) * dense).square().sum() / whole


class PenalisedConfig(MxDConfig):
    """As MxD, with the penalty's weight."""

    penalty: float

    def _make(self) -> Penalised:
        return Penalised(self)


def paper(layer: MxD, mlp: MLPWeights, means: Means) -> None:
    """As the paper draws it."""
    layer.initialise(*means, "paper")


def transcoder(layer: MxD, mlp: MLPWeights, means: Means) -> None:
    """A transcoder in MxD form: hidden unit 0 constant, ``z D = 1``, ``C = 0``; `fast` began with this once."""
    layer.initialise(*means, "centred")
    for name, parameter in layer.encoder.named_parameters():
        parameter.data[0] = float("bias" in name)
    layer.decoder.data.zero_()[0] = 1 / layer.encoder(means[0][None])[0, 0]
    layer.expert_scale.data.zero_()


def centred(layer: MxD, mlp: MLPWeights, means: Means) -> None:
    """As `training.initialisation: centred`."""
    layer.initialise(*means, "centred")


def gates_centred(layer: MxD, mlp: MLPWeights, means: Means) -> None:
    """The centred gates alone, C as drawn."""
    layer.initialise(*means, "centred")
    layer.expert_scale.data /= SPREAD


def encoder_copied(layer: MxD, mlp: MLPWeights, means: Means) -> None:
    """The paper's, with the base MLP's encoder."""
    layer.encoder.copy_from(mlp)
    layer.initialise(*means, "paper")


def encoder_decoder_copied(layer: MxD, mlp: MLPWeights, means: Means) -> None:
    """The paper's, with the base MLP's encoder and decoder."""
    encoder_copied(layer, mlp, means)
    layer.decoder.data.copy_(mlp.decoder)


def whole_base(layer: MxD, mlp: MLPWeights, means: Means) -> None:
    """The base MLP itself: the output bias is copied as well, and expert 0 is always on."""
    paper(layer, mlp, means)
    layer.copy_base(mlp)


@dataclass(frozen=True)
class Setting:
    """One row of the study."""

    fields: str
    """Fields of `training`, separated by blanks."""
    initialise: Callable[[MxD, MLPWeights, Means], None]
    penalty: float | None = None
    """Weight of the penalty on the mean gate."""


THIRD, WHOLE = "tokens=545792", "tokens=1638400"
FAST = f"recipe=fast {THIRD}"
SETTINGS = {
    "short, all tokens": Setting(f"recipe=short {WHOLE}", paper),
    "short": Setting("recipe=short tokens=544768", paper),
    "fast": Setting(FAST, centred),
    "fast, paper's start": Setting(FAST, paper),
    "fast, gates centred alone": Setting(FAST, gates_centred),
    "fast, as a transcoder": Setting(FAST, transcoder),
    "paper's start, E copied": Setting(FAST, encoder_copied),
    "E and D copied": Setting(FAST, encoder_decoder_copied),
    "whole base": Setting(FAST, whole_base),
    "paper's start, penalty 0.001": Setting(FAST, paper, penalty=0.001),
}
"""What the study compares."""

CHECKED = ("fast", "short, all tokens")
"""A setting, and the one whose error it is to have."""

KEPT = 0.9
"""The least share of ``fixed / NMSE`` that it may have of the other's."""


def configure(setting: Setting, changes: list[str]) -> RunConfig:
    """Return the run of one setting."""
    replacement = "replacements=[{method: mxd, sparsity: {kind: topk, k: 32}}]"
    fields = [f"training.{field}" for field in setting.fields.split()]
    return load_config(CONFIG, pairs([replacement, *fields, *changes]))


def train_all(name: str, setting: Setting, config: RunConfig, base: FrozenModel, seeds: int) -> list[Trainee]:
    """Train one MxD for each seed, from one stream."""
    training = config.training
    ((number, layer),) = plan_layers(config, base).values()
    if setting.penalty is not None:
        layer = PenalisedConfig(**layer.model_dump(), penalty=setting.penalty)
    trainees = [new_trainee(name, number, layer, seed, base.device, training) for seed in range(seeds)]
    stream = activation_stream(config, base)
    with progress(name, training.steps * training.batch_tokens) as advance:
        for step in range(training.steps):
            batch = next(stream)
            for trainee in trainees:
                if step == 0:
                    assert isinstance(trainee.layer, MxD)
                    setting.initialise(trainee.layer, base.mlp_weights(number), batch.means[number])
                train_step(trainee, *batch.sites[number], training, step)
            advance(training.batch_tokens)
    return trainees


@torch.no_grad()
def measure(trainee: Trainee, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return the error on held-out activations, and the account."""
    layer = trainee.layer.eval()
    account = Account(layer)
    for part in x.split(4096):
        account.see_means(part)
    reconstruction = Reconstruction(layer, account)
    for x_part, y_part in zip(x.split(4096), y.split(4096), strict=True):
        reconstruction.see(x_part, y_part)
    report = reconstruction.report()
    return {key: report[key] for key in METRICS}


def fixed_beside_error(seeds: list[dict[str, float]]) -> float:
    """Return the error with fixed directions beside the error, the mean over the seeds."""
    return statistics.mean(seed["nmse_fixed_directions"] / max(seed["normalized_mse"], 1e-30) for seed in seeds)


def missed(results: dict[str, list[dict[str, float]]]) -> list[str]:
    """Return in what the setting that is checked is behind the other."""
    one, other = (results[name] for name in CHECKED)
    errors = [statistics.mean(seed["normalized_mse"] for seed in seeds) for seeds in (one, other)]
    ratios = [fixed_beside_error(seeds) for seeds in (one, other)]
    lines = []
    if errors[0] > errors[1]:
        lines.append(f"{CHECKED[0]}: NMSE {errors[0]:.5f}, {errors[1]:.5f} of {CHECKED[1]}")
    if ratios[0] < KEPT * ratios[1]:
        lines.append(f"{CHECKED[0]}: fixed / NMSE {ratios[0]:.2f}, {ratios[1]:.2f} of {CHECKED[1]}")
    return lines


def row(name: str, tokens: int, seeds: list[dict[str, float]]) -> str:
    """Return one line of the table: means over the seeds, and the range of the error."""
    mean: dict[str, Any] = {key: statistics.mean(seed[key] for seed in seeds) for key in METRICS}
    error, errors = mean["normalized_mse"], [seed["normalized_mse"] for seed in seeds]
    ratio = fixed_beside_error(seeds)
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
    parser.add_argument("--check", action="store_true", help=f"exit 1 where {CHECKED[0]} is behind {CHECKED[1]}")
    args = parser.parse_args()
    if unknown := set(args.settings) - set(SETTINGS):
        raise SystemExit(f"no settings {sorted(unknown)}; choose from: {'; '.join(SETTINGS)}")
    if args.check and not set(CHECKED) <= set(args.settings):
        parser.error(f"--check needs the settings {' and '.join(CHECKED)}")
    try:
        configs = {name: configure(SETTINGS[name], args.set) for name in args.settings}
    except MxdError as error:
        raise SystemExit(str(error)) from None
    config = next(iter(configs.values()))
    base = load_frozen(config.model.source, device="cpu")
    ((x, y),) = held_out_activations(config, base, args.held_out, args.split).values()
    print(f"{config.model.source}, block {config.blocks}, {len(x):,} tokens of {args.split}, {args.seeds} seeds\n")
    print("| setting | tokens | NMSE | fixed / NMSE | gate | dense | interaction | routed | stable rank | dead |")
    print("|---" * 10 + "|")
    results = {}
    for name, config in configs.items():
        trainees = train_all(name, SETTINGS[name], config, base, args.seeds)
        results[name] = [measure(trainee, x, y) for trainee in trainees]
        print(row(name, config.training.steps * config.training.batch_tokens, results[name]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=2) + "\n")
    if args.check:
        conclude(missed(results), f"{CHECKED[0]} is not behind {CHECKED[1]}")


if __name__ == "__main__":
    main()
