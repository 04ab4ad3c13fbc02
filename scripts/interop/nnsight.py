"""nnsight: trace a spliced model, read a replacement's output and a unit's activation, and intervene on the unit."""

from pathlib import Path

import torch
from interop.common import check, main
from nnsight import NNsight

import mxd
from mxd.layers import parse_layer


def example(layer: mxd.ReplacementLayer) -> dict[str, torch.Tensor]:
    """Run the code of docs/interop.md."""
    model = mxd.load_frozen("tiny-gpt2", device="cpu")
    ids = model.tokenizer("The President of the", return_tensors="pt").input_ids
    with mxd.spliced(model, {2: layer}):
        traced = NNsight(model.module)
        mlp = traced.transformer.h[2].mlp

        with traced.trace(ids):
            code = mlp.layer.sparsity.output  # the active units of each token
            activations, units = code.activations.save(), code.indices.save()
            y = mlp.output.save()  # what the replacement answers
            logits = traced.lm_head.output.save()

        unit = units[-1, activations[-1].argmax()]  # the most active at the last token
        with traced.trace(ids):
            mlp.layer.sparsity.output.activations[units == unit] = 0  # switch it off at every token
            y_off = mlp.output.save()
            logits_off = traced.lm_head.output.save()

    return {
        "y": y,
        "logits": logits,
        "unit": unit,
        "activations": activations,
        "y_off": y_off,
        "logits_off": logits_off,
    }


def peer(work: Path) -> None:
    """Compare with mxd's own views of the same layer."""
    model = mxd.load_frozen("tiny-gpt2", device="cpu")
    fields = {"method": "mxd", "num_units": 64, "sparsity": {"kind": "topk", "k": 4}}
    layer = parse_layer(fields).resolve(model.mlp_shape(2)).build()
    layer.decoder.data.normal_(generator=torch.Generator().manual_seed(0))
    layer.eval().requires_grad_(False)
    seen = example(layer)

    ids = model.tokenizer("The President of the", return_tensors="pt").input_ids
    with mxd.spliced(model, {2: layer}):
        x, y = model.record(ids, [2])[2]
        logits = model.logits(ids)
    code = layer.encode(x)
    off = layer.decode(x, code.with_activations(code.activations * (code.indices != seen["unit"])))
    check(work, "the replacement's output", seen["y"], y)
    check(work, "the logits", seen["logits"], logits)
    check(work, "the units' activations", seen["activations"], code.activations[0])
    check(work, "the output with one unit switched off", seen["y_off"], off, 1e-6)
    check(work, "its part of the last token", (y - off)[0, -1], push(layer, x, seen), 1e-4)
    changed = (seen["logits_off"] - logits).abs().amax((0, 2)) > 0
    check(work, "the logits of the last token change", changed[-1:], torch.tensor([True]))


def push(layer: mxd.ReplacementLayer, x: torch.Tensor, seen: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the unit adds to the last token's output, by mxd's own account."""
    return seen["activations"][-1].max() * layer.unit_output(int(seen["unit"]), x)[0, -1]


if __name__ == "__main__":
    main(peer)
