"""A TransformerLens bridge is recorded, spliced and evaluated as its model is, and a user's own hooks keep working.

That recordings are the bridge's MLP hooks is in test_model.py, plain splices and MLP hooks are in test_splice.py.
"""

import numpy as np
import pytest
import torch

from mxd.evaluation.faithfulness import evaluate
from mxd.layers import parse_layer
from mxd.model.loading import load_frozen
from mxd.splice import splice, spliced


def layer_for(model, number, method="mxd", **fields):
    """A layer with random weights that fits a block."""
    chosen = {"method": method, "num_units": 48, "sparsity": {"kind": "topk", "k": 5}} | fields
    layer = parse_layer(chosen).resolve(model.mlp_shape(number)).build()
    generator = torch.Generator().manual_seed(number)
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return layer.eval()


@pytest.fixture
def layers(family):
    """Two layers of different methods."""
    return {0: layer_for(family, 0, "transcoder", skip=True), 2: layer_for(family, 2)}


@pytest.fixture
def masked(ids):
    return [int(ids[0, 0]), int(ids[1, 5])]


def agree(got, expected):
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def flat(result, prefix=""):
    """All numbers of a result, by their place."""
    if isinstance(result, dict):
        return {k: v for name, value in result.items() for k, v in flat(value, f"{prefix}/{name}").items()}
    return {prefix: result} if isinstance(result, int | float) else {}


@pytest.mark.long
def test_evaluating_a_bridge_gives_the_models_numbers(family, bridge, layers, masked):
    rows = np.random.default_rng(0).integers(1, 4096, (6, 16), dtype=np.int64)
    sets = {"both": layers, "sae": {1: layer_for(family, 1, "topk_sae")}}
    expected, got = (
        evaluate(model, sets, lambda start: iter(rows[start:]), rows.size, masked, forward_contexts=4)
        for model in (family, load_frozen(bridge))
    )
    for name in sets:
        assert flat(got[name]) == pytest.approx(flat(expected[name]), abs=1e-4, rel=1e-4)
        assert expected[name]["kl"] > 0.01


def test_a_cached_run_of_a_spliced_bridge_holds_the_spliced_streams(family, bridge, layers, masked, ids):
    names = [f"blocks.{number}.{hook}" for number in range(3) for hook in ("mlp.hook_in", "mlp.hook_out")]
    names += [f"blocks.{number}.hook_resid_post" for number in range(3)]
    with spliced(family, layers, base_at=masked):
        expected, sites = family.logits(ids), family.record(ids, [0, 1, 2])
    _, before = bridge.run_with_cache(ids, names_filter=names)
    with spliced(bridge, layers, base_at=masked):
        logits, cache = bridge.run_with_cache(ids, names_filter=names)
        _, short = bridge.run_with_cache(ids, names_filter=names, stop_at_layer=1)
    agree(logits, expected)
    for number, (x, y) in sites.items():
        agree(cache[f"blocks.{number}.mlp.hook_in"], x)
        agree(cache[f"blocks.{number}.mlp.hook_out"], y)
        assert (
            cache[f"blocks.{number}.hook_resid_post"] - before[f"blocks.{number}.hook_resid_post"]
        ).abs().max() > 0.1
    agree(short["blocks.0.mlp.hook_out"], sites[0][1])
    assert "blocks.1.mlp.hook_out" not in short
    _, after = bridge.run_with_cache(ids, names_filter=names)
    assert all(torch.equal(after[name], before[name]) for name in names)


def test_hooks_that_edit_reach_the_replacement_and_what_follows(family, bridge, layers, ids):
    """The stream after block 1 is doubled, and what block 2's replacement reads shifted, by both libraries' hooks."""

    def double(value, hook):
        return 2 * value

    def shift(value, hook):
        return value + 1

    edits = [("blocks.1.hook_resid_post", double), ("blocks.2.mlp.hook_in", shift)]
    with spliced(bridge, layers), torch.no_grad():
        plain, got = bridge(ids), bridge.run_with_hooks(ids, fwd_hooks=edits)
    with spliced(family, layers):

        def double_output(module, args, output):
            return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output

        handles = [
            family.blocks[1].register_forward_hook(double_output),
            family.mlp(2).register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        ]
        expected = family.logits(ids)
        for handle in handles:
            handle.remove()
    agree(got, expected)
    assert (got - plain).abs().max() > 0.1


def test_a_hook_set_before_the_splice_stays_through_and_after_it(bridge, layers, ids):
    seen = []
    bridge.add_hook("blocks.2.mlp.hook_out", lambda value, hook: seen.append(value.clone()))
    try:
        with torch.no_grad():
            bridge(ids)
            with spliced(bridge, layers) as model:
                bridge(ids)
                y = model.record(ids, [2])[2][1]
            bridge(ids)
    finally:
        bridge.reset_hooks()
    first, during, last = seen  # recording stops at the MLP, before the hook
    assert torch.equal(first, last)
    assert torch.equal(during, y)
    assert (during - first).abs().max() > 0.1


def test_a_replacement_answers_a_hooks_gradient(bridge, layers, ids):
    """Attribution by gradients, taken at a hook, goes through the replacement above it."""
    found = {}

    def keep(value, hook):
        found["x"] = value.detach().requires_grad_(True)
        return found["x"]

    load_frozen(bridge)
    with spliced(bridge, layers):
        bridge.run_with_hooks(ids, fwd_hooks=[("blocks.1.hook_resid_post", keep)])[..., 7].sum().backward()
        inside = found["x"].grad
    bridge.run_with_hooks(ids, fwd_hooks=[("blocks.1.hook_resid_post", keep)])[..., 7].sum().backward()
    assert inside.isfinite().all()
    assert (inside - found["x"].grad).abs().max() > 1e-3


def test_a_bridge_spliced_for_good(build_model, ids):
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model = build_model("llama")
    frozen = load_frozen(build_model("llama"))
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config, tokenizer=None)
    layers = {1: layer_for(frozen, 1)}
    splice(bridge, layers)
    with spliced(frozen, layers), torch.no_grad():
        agree(bridge(ids), frozen.logits(ids))
        loss = bridge(ids, return_type="loss")
        agree(loss, torch.nn.functional.cross_entropy(frozen.logits(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
