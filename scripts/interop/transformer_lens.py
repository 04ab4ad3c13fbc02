"""TransformerLens: a spliced bridge gives the spliced model's logits, recordings and metrics; then the bridge tests."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from interop.common import check, main
from transformer_lens.model_bridge.sources import build_bridge_from_module

import mxd
from mxd.evaluation.faithfulness import evaluate
from mxd.layers import parse_layer

TESTS = (
    "tests/model/test_bridge.py",
    "tests/test_splice.py",
    "tests/model/test_model.py",
    "tests/evaluation/test_generation.py",
)


def peer(work: Path) -> None:
    """Compare on the bundled models, one of each family."""
    release = version("transformer-lens")
    rows = np.random.default_rng(0).integers(0, 4096, (4, 32), dtype=np.int64)
    ids = torch.from_numpy(rows)
    for name in ("tiny-gpt2", "tiny-neox", "tiny-llama"):
        model, other = mxd.load_frozen(name, device="cpu"), mxd.load_frozen(name, device="cpu").module
        bridge = build_bridge_from_module(other, type(other).__name__, hf_config=other.config, tokenizer=None)
        layers = {2: layer_for(model, 2), 4: layer_for(model, 4)}
        with mxd.spliced(model, layers, base_at=[0, int(ids[0, 3])]):
            expected, (x, y) = model.logits(ids), model.record(ids, [4])[4]
        with mxd.spliced(bridge, layers, base_at=[0, int(ids[0, 3])]), torch.no_grad():
            logits, cache = bridge.run_with_cache(ids, names_filter=["blocks.4.mlp.hook_in", "blocks.4.mlp.hook_out"])
        largest = expected.abs().max()  # about 16; the plain bridge differs from the plain model as much
        check(work, f"{release} {name}: logits, relative to the largest", logits / largest, expected / largest, 1e-5)
        check(work, f"{release} {name}: input of the replacement", cache["blocks.4.mlp.hook_in"], x, 1e-5)
        check(work, f"{release} {name}: output of the replacement", cache["blocks.4.mlp.hook_out"], y, 1e-5)
        numbers_of = [
            evaluate(m, {"both": layers}, lambda start: iter(rows[start:]), rows.size)["both"]
            for m in (model, mxd.load_frozen(bridge))
        ]
        for key in ("ce_spliced", "ce_increase", "kl", "ce_zero"):
            ours, theirs = (torch.tensor(numbers[key], dtype=torch.float64) for numbers in numbers_of)
            check(work, f"{release} {name}: {key} {ours:.4f}", theirs, ours, 1e-5)
    words = [sys.executable, "-m", "pytest", "-k", "bridge", *TESTS]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], env=dict(os.environ), check=False)
    check(work, f"{release}: exit code of the bridge tests", torch.tensor(done.returncode), torch.tensor(0))


def layer_for(model: mxd.FrozenModel, number: int) -> mxd.ReplacementLayer:
    """An MxD with random weights."""
    fields = {"method": "mxd", "num_units": 64, "sparsity": {"kind": "topk", "k": 4}}
    layer = parse_layer(fields).resolve(model.mlp_shape(number)).build(seed=number)
    layer.decoder.data.normal_(std=0.3, generator=torch.Generator().manual_seed(number))
    return layer.eval()


if __name__ == "__main__":
    main(peer)
