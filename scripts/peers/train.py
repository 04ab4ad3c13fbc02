"""Train one tool's layer on stored activations and time its steps: run by scripts/bench_peers.py, a process for each.

    python -P scripts/peers/train.py TOOL METHOD WORK OUT

WORK holds ``activations.safetensors`` (x, y, and of held-out text x_test, y_test) and ``asked.json``. Every tool gets
the same batches in the same order and takes the steps of its own trainer with its own defaults (learning rate, start,
bookkeeping). Only steps are timed; held-out errors are measured between them, four times.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file
from torch import Tensor

Step = Callable[[Tensor, Tensor, int], None]
Reconstruct = Callable[[Tensor, Tensor], Tensor]

MEASURED = 4
"""How often held-out errors are measured."""


def mxd(method: str, asked: dict, x: Tensor, y: Tensor) -> tuple[Step, Reconstruct]:
    """The step that `mxd train` takes, by the recipe ``scaled``."""
    from mxd.config import TrainingConfig
    from mxd.layers import parse_layer
    from mxd.training.step import mean_sizes, new_trainee, train_step
    from mxd.training.trainer import keep_freed_memory

    keep_freed_memory()
    forms = {
        "TC": {"method": "transcoder"},
        "STC": {"method": "transcoder", "skip": True},
        "SAE": {"method": "topk_sae"},
    }
    sized = {"d_in": x.shape[1], "d_out": y.shape[1], "num_units": asked["width"]}
    config = parse_layer(forms[method] | sized | {"sparsity": {"kind": "topk", "k": asked["k"]}})
    size = asked["batch_tokens"]
    training = TrainingConfig(recipe="scaled", tokens=len(x), batch_tokens=size, buffer_tokens=size)
    trainee = new_trainee(method, 0, config, 0, torch.device("cpu"), training)
    trainee.scale(mean_sizes((x[:size], y[:size]), trainee.processes))
    trainee.enlarge()
    trainee.initialise((x[:size].mean(0), y[:size].mean(0)), None, training.settings)
    layer = trainee.layer

    def reconstruct(x: Tensor, y: Tensor) -> Tensor:
        layer.eval()
        out = layer(layer.read(x, y))
        layer.train()
        return out

    return lambda x, y, number: train_step(trainee, x, y, training, number), reconstruct


def sparsify(method: str, asked: dict, x: Tensor, y: Tensor) -> tuple[Step, Reconstruct]:
    """The step of its ``Trainer``, which runs the language model itself: loss, optimiser and start as there."""
    os.environ["SPARSIFY_DISABLE_TRITON"] = "1"  # its kernels need a GPU
    from schedulefree import ScheduleFreeWrapper
    from sparsify import SparseCoder, SparseCoderConfig
    from sparsify.sign_sgd import SignSGD

    coded = method == "SAE"
    config = SparseCoderConfig(
        num_latents=asked["width"], k=asked["k"], transcode=not coded, skip_connection=method == "STC"
    )
    coder = SparseCoder(x.shape[1], config, device="cpu", dtype=torch.float32)
    coder.b_dec.data = y[: asked["batch_tokens"]].mean(0)
    rate = 5e-3 / (asked["width"] / 2**14) ** 0.5
    optimizer = ScheduleFreeWrapper(SignSGD([{"params": coder.parameters(), "lr": rate}]), momentum=0.95)
    optimizer.train()

    def step(x: Tensor, y: Tensor, number: int) -> None:
        coder(y if coded else x, y).fvu.backward()
        if coded:
            coder.remove_gradient_parallel_to_decoder_directions()
        optimizer.step()
        optimizer.zero_grad()
        if coded:
            coder.set_decoder_norm_to_unit_norm()

    def reconstruct(x: Tensor, y: Tensor) -> Tensor:
        optimizer.eval()
        out = coder(y if coded else x, y).sae_out
        optimizer.train()
        return out

    return step, reconstruct


def sae_lens(method: str, asked: dict, x: Tensor, y: Tensor) -> tuple[Step, Reconstruct]:
    """``SAETrainer.step`` of its top-k autoencoder; SAELens does not train transcoders."""
    from sae_lens.config import SAETrainerConfig
    from sae_lens.saes.topk_sae import TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.training.sae_trainer import SAETrainer

    coder = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=y.shape[1], d_sae=asked["width"], k=asked["k"]))
    config = SAETrainerConfig(
        total_training_samples=len(y), train_batch_size_samples=asked["batch_tokens"], lr_end=3e-5
    )
    trainer = SAETrainer(config, coder, iter(()))

    def step(x: Tensor, y: Tensor, number: int) -> None:
        trainer.step(y)
        trainer.n_training_steps += 1

    return step, lambda x, y: coder.decode(coder.encode(y))


def dictionary_learning(method: str, asked: dict, x: Tensor, y: Tensor) -> tuple[Step, Reconstruct]:
    """``TopKTrainer.update``; its warm-up of 1,000 steps is cut to a tenth of the steps, or nothing would be learnt."""
    from dictionary_learning.trainers.top_k import TopKTrainer

    steps = len(y) // asked["batch_tokens"]
    trainer = TopKTrainer(
        steps=steps, activation_dim=y.shape[1], dict_size=asked["width"], k=asked["k"], layer=0, lm_name="",
        warmup_steps=steps // 10, threshold_start_step=steps // 2, device="cpu",
    )  # fmt: skip
    return lambda x, y, number: trainer.update(number, y), lambda x, y: trainer.ae(y)


def overcomplete(method: str, asked: dict, x: Tensor, y: Tensor) -> tuple[Step, Reconstruct]:
    """``train_sae`` over one batch at a time, with Adam at 5e-4 and the squared error, as in its tutorials."""
    from overcomplete.sae import TopKSAE, train_sae

    coder = TopKSAE(y.shape[1], nb_concepts=asked["width"], top_k=asked["k"], device="cpu")
    optimizer = torch.optim.Adam(coder.parameters(), lr=5e-4)

    def loss(x: Tensor, x_hat: Tensor, pre: Tensor, codes: Tensor, dictionary: Tensor) -> Tensor:
        return (x - x_hat).square().mean()

    def step(x: Tensor, y: Tensor, number: int) -> None:
        train_sae(coder, [y], loss, optimizer, nb_epochs=1, monitoring=0)

    def reconstruct(x: Tensor, y: Tensor) -> Tensor:
        coder.eval()
        out = coder(y)[2]
        coder.train()
        return out

    return step, reconstruct


TOOLS = {
    "mxd": mxd,
    "sparsify": sparsify,
    "sae-lens": sae_lens,
    "dictionary-learning": dictionary_learning,
    "overcomplete": overcomplete,
}
STOOD_IN = {
    "dictionary-learning": ("nnsight",),
    "overcomplete": ("overcomplete.models", "overcomplete.visualization"),  # torchvision, OpenCV, an older matplotlib
}
"""What a tool imports and training does not use; empty modules take their places."""


@torch.no_grad()
def errors(reconstruct: Reconstruct, x: Tensor, y: Tensor) -> dict[str, float]:
    """Held-out normalized MSE (MxD, section 3.1) and fraction of variance unexplained."""
    parts = zip(x.split(1024), y.split(1024), strict=True)
    squared = torch.cat([(reconstruct(a, b) - b).square().sum(-1) for a, b in parts]).double()
    norms = y.norm(dim=-1).clamp_min(1e-30)
    variance = (y - y.mean(0)).double().square().sum()
    return {"nmse": float((squared / norms).mean() / y.shape[1]), "fvu": float(squared.sum() / variance)}


def peak_mib() -> float:
    """Most memory that this process has held; ``getrusage`` would count what its parent held when it was started."""
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) / 2**10


def main(tool: str, method: str, work: str, out: str) -> None:
    """Train, and write seconds and errors."""
    for name in STOOD_IN.get(tool, ()):
        sys.modules[name] = MagicMock()
    torch.manual_seed(0)
    asked = json.loads((Path(work) / "asked.json").read_text())
    data = load_file(str(Path(work) / "activations.safetensors"))
    x, y, size = data["x"], data["y"], asked["batch_tokens"]
    base = peak_mib()
    step, reconstruct = TOOLS[tool](method, asked, x, y)
    steps, seconds, curve = len(x) // size, 0.0, []
    for number in range(steps):
        part = slice(number * size, (number + 1) * size)
        begin = time.perf_counter()
        step(x[part], y[part], number)
        seconds += time.perf_counter() - begin
        if number == 0:
            seconds = 0.0  # the first step allocates and compiles
        if (number + 1) % max(1, steps // MEASURED) == 0:
            curve.append(
                {"tokens": (number + 1) * size, "seconds": seconds}
                | errors(reconstruct, data["x_test"], data["y_test"])
            )
    rate = (steps - 1) * size / seconds
    found = {"tokens_per_second": rate, "peak_mib": peak_mib(), "before_mib": base, "curve": curve}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
