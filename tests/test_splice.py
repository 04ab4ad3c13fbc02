"""Splicing: what is put in is what answers, what was there comes back, and a wrong replacement changes nothing."""

import copy
import sys
from pathlib import Path

import pytest
import torch

from mxd.artifacts.checkpoint import Trained
from mxd.artifacts.provenance import Provenance
from mxd.common.errors import MxdError
from mxd.evaluation.generation import step_cached
from mxd.layers.mxd import MxDConfig
from mxd.layers.sae import TopKSAEConfig
from mxd.layers.sparsity import RandomKConfig, TopKConfig
from mxd.layers.transcoder import TranscoderConfig
from mxd.model.loading import load_frozen
from mxd.splice import Splice, SplicedMLP, splice, spliced


def transcoder(width=32, seed=0, **options):
    """A transcoder with random weights: its outputs are not those of any MLP."""
    layer = TranscoderConfig(d_in=width, d_out=width, num_units=48, sparsity=TopKConfig(k=8), **options).build(seed)
    layer.decoder.data.normal_(generator=torch.Generator().manual_seed(seed))
    return layer


def mixture(model, number):
    """An MxD that is the base MLP of a block."""
    layer = MxDConfig(num_units=8, sparsity=TopKConfig(k=2)).resolve(model.mlp_shape(number)).build()
    layer.copy_base(model.mlp_weights(number))
    return layer


def trained_on(model, number, layer, **fields):
    known = {"model": "a/name", "revision": None, "block": number, "fingerprint": model.fingerprint(number)}
    return Trained(layer, Provenance(**{**known, **fields}), Path())


def hooked_logits(model, ids, layers):
    """Logits when plain forward hooks overwrite the MLPs' outputs: splicing, written out."""
    handles = [
        model.mlp(number).register_forward_hook(lambda module, args, output, layer=layer: layer(args[0]))
        for number, layer in layers.items()
    ]
    logits = model.logits(ids)
    for handle in handles:
        handle.remove()
    return logits


def text_ids(model):
    text = "The economy of the country depends on agriculture, and the government of the United States has"
    return torch.tensor([[0, *model.tokenizer(text)["input_ids"]]])


@pytest.fixture
def fresh(build_model, tokenizer):
    """A tiny random GPT-2 that a test may change for good."""
    return load_frozen(build_model("gpt2"), tokenizer=tokenizer)


# What answers


def test_splicing_an_mlp_into_its_own_place_changes_no_bit(family, ids):
    before = family.logits(ids)
    with spliced(family, {number: family.mlp(number) for number in range(3)}):
        assert isinstance(family.mlp(1), SplicedMLP)
        assert torch.equal(family.logits(ids), before)


def test_the_base_mlp_as_a_mixture_of_decoders_gives_the_same_logits(family, ids):
    before = family.logits(ids)
    for layers in ([0], [1], [2], [0, 1, 2]):
        with spliced(family, {number: mixture(family, number) for number in layers}):
            torch.testing.assert_close(family.logits(ids), before, atol=1e-4, rtol=1e-4)


def test_trained_models_keep_their_logits_too(trained):
    ids = text_ids(trained)
    before = trained.logits(ids)
    with spliced(trained, {2: trained.mlp(2)}):
        assert torch.equal(trained.logits(ids), before)
    with spliced(trained, {number: mixture(trained, number) for number in (1, 4)}):
        torch.testing.assert_close(trained.logits(ids), before, atol=1e-4, rtol=1e-4)
    with spliced(trained, {2: transcoder(trained.mlp_shape(2).d_in)}):
        assert (trained.logits(ids) - before).abs().max() > 0.5


@pytest.mark.parametrize("layers", [[0], [1], [2], [0, 2], [0, 1, 2]])
def test_the_replacement_is_what_answers(family, ids, layers):
    replacements = {number: transcoder(seed=number) for number in layers}
    expected = hooked_logits(family, ids, replacements)
    assert (expected - family.logits(ids)).abs().max() > 0.1
    with spliced(family, replacements) as model:
        assert model is family
        assert torch.equal(family.logits(ids), expected)


def test_any_module_can_be_spliced(family, ids):
    layer = torch.nn.Linear(32, 32)
    with spliced(family, {1: layer}):
        got = family.logits(ids)
    assert torch.equal(got, hooked_logits(family, ids, {1: layer}))


def test_a_hugging_face_model_and_ids_by_position(build_model, ids):
    module = build_model("llama")
    model, layer = load_frozen(copy.deepcopy(module)), transcoder()
    replacement = trained_on(model, 1, layer)
    with spliced(model, {1: replacement}, base_at=[int(ids[0, 3])]):
        expected = model.logits(ids)
    with spliced(module, {1: replacement}, base_at=[int(ids[0, 3])]), torch.no_grad():
        assert torch.equal(module(ids).logits, expected)


def test_a_replacement_answers_in_the_models_dtype(build_model, ids):
    model = load_frozen(build_model("llama").to(torch.bfloat16))
    layer = transcoder()
    with spliced(model, {1: layer}, base_at=[int(ids[0, 3])]):
        x, y = model.record(ids, [1])[1]
        assert y.dtype == torch.bfloat16
        assert torch.equal(y[1], layer(x)[1])
        assert model.logits(ids).isfinite().all()
    assert layer.decoder.dtype == torch.float32


def test_an_autoencoder_is_given_the_base_mlps_output(family, ids):
    sae = TopKSAEConfig(d_in=32, d_out=32, num_units=64, sparsity=TopKConfig(k=8)).build()
    handle = family.mlp(1).register_forward_hook(lambda module, args, output: sae(output))
    expected = family.logits(ids)
    handle.remove()
    with spliced(family, {1: sae}):
        assert torch.equal(family.logits(ids), expected)
    assert not torch.equal(family.logits(ids), expected)


def test_replacements_are_evaluated_in_evaluation_mode_and_left_in_theirs(gpt2, ids):
    layer = TranscoderConfig(d_in=32, d_out=32, num_units=48, sparsity=RandomKConfig(k=8)).build().train()
    with spliced(gpt2, {0: layer, 1: layer}):
        gpt2.logits(ids)
        assert not layer.training
    assert layer.training
    assert layer.sparsity.training
    assert layer.sparsity.draws == 0


# What comes back


def test_the_model_is_as_before(family, ids):
    state = {name: tensor.clone() for name, tensor in family.module.state_dict().items()}
    mlps = [block.mlp for block in family.blocks]
    before = family.logits(ids)
    with pytest.raises(ZeroDivisionError), spliced(family, {0: transcoder(), 2: transcoder()}):
        assert "layer.decoder" in dict(family.mlp(2).named_parameters())
        raise ZeroDivisionError
    after = family.module.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], state[name]) for name in state)
    assert all(a is b.mlp for a, b in zip(mlps, family.blocks, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in family.module.modules())
    assert not any(p.requires_grad for p in family.module.parameters())
    assert not any(module.training for module in family.module.modules())
    assert torch.equal(family.logits(ids), before)


def test_a_model_that_is_being_trained_is_left_as_it_was(build_model):
    module = build_model("llama").train()
    module.model.embed_tokens.requires_grad_(False)
    training = {name: m.training for name, m in module.named_modules()}
    grads = {name: p.requires_grad for name, p in module.named_parameters()}
    with spliced(module, {1: transcoder()}):
        pass
    assert {name: m.training for name, m in module.named_modules()} == training
    assert {name: p.requires_grad for name, p in module.named_parameters()} == grads


def test_the_replacement_stays_trainable_and_the_base_frozen(gpt2, ids):
    layer = transcoder()
    with spliced(gpt2, {1: layer}):
        gpt2.module(ids).logits.square().mean().backward()
    assert all(p.requires_grad for p in layer.parameters())
    assert layer.decoder.grad.abs().sum() > 0
    assert all(p.grad is None and not p.requires_grad for p in gpt2.module.parameters())


def test_splicing_for_good(fresh, ids):
    layer = transcoder()
    expected = hooked_logits(fresh, ids, {1: layer})
    base = fresh.mlp(1)
    assert splice(fresh, {1: layer}) is fresh
    assert torch.equal(fresh.logits(ids), expected)
    assert fresh.mlp(1).layer is layer
    assert fresh.mlp(1).base is base


def test_splices_nest(fresh, ids):
    first = trained_on(fresh, 0, transcoder())
    with spliced(fresh, {0: first, 2: transcoder(seed=2)}):
        together = fresh.logits(ids)
    module = fresh.module
    with spliced(module, {0: first}), spliced(module, {2: transcoder(seed=2)}) as inner:
        assert torch.equal(inner.logits(ids), together)
        assert inner.mlp_shape(0).d_out == 32


# What is refused


def test_splicing_a_block_twice_is_refused(gpt2, ids):
    with spliced(gpt2, {1: transcoder()}):
        once = gpt2.logits(ids)
        with (
            pytest.raises(MxdError, match="block 1 is spliced already"),
            spliced(gpt2, {0: transcoder(), 1: transcoder()}),
        ):
            pass
        assert torch.equal(gpt2.logits(ids), once)


def test_a_splice_is_checked_once_and_entered_often(fresh, ids, monkeypatch):
    layer, module = transcoder().train(), sys.modules[Splice.__module__]
    checked, really = [], module._prepare
    monkeypatch.setattr(module, "_prepare", lambda *args: checked.append(args[1]) or really(*args))
    prepared = Splice(fresh, {1: layer}, mask={1: [3, 5]})
    before = fresh.logits(ids)
    for _ in range(3):
        with prepared.entered():
            got = fresh.logits(ids)
            assert not layer.training
        assert layer.training and torch.equal(fresh.logits(ids), before)
    assert checked == [1] and not fresh.module._forward_pre_hooks
    with spliced(fresh, {1: layer}, mask={1: [3, 5]}):
        assert torch.equal(fresh.logits(ids), got) and not torch.equal(got, before)
        with pytest.raises(MxdError, match=r"block 1 is spliced already"), prepared.entered():
            pass


def _wrong(case, model, stranger):
    """Return a replacement that does not fit block 1 of the model."""
    return {
        "layer": (trained_on(model, 2, transcoder()), r"trained for block 2, not 1; .* check=False"),
        "model": (trained_on(stranger, 1, transcoder()), "other weights there .* check=False"),
        "width": (transcoder(16), r"needs widths \(32, 32\), the replacement has \(16, 16\)"),
        "trained width": (trained_on(model, 1, transcoder(16)), r"needs widths \(32, 32\)"),
        "sae width": (TopKSAEConfig(d_in=16, d_out=16, num_units=48).build(), r"needs widths \(32, 32\)"),
    }[case]


@pytest.mark.parametrize("case", ["layer", "model", "width", "trained width", "sae width"])
@pytest.mark.parametrize("way", [spliced, splice])
def test_a_replacement_that_does_not_fit_changes_nothing(fresh, build_model, ids, case, way):
    stranger = load_frozen(build_model("gpt2", seed=1))
    wrong, message = _wrong(case, fresh, stranger)
    before = fresh.logits(ids)
    with pytest.raises(MxdError, match=message):
        result = way(fresh, {0: transcoder(), 1: wrong})
        with result:  # only a context manager checks as late as here
            pass
    assert not any(isinstance(module, SplicedMLP) for module in fresh.module.modules())
    assert not fresh.module._forward_pre_hooks
    assert torch.equal(fresh.logits(ids), before)


@pytest.mark.parametrize("case", ["layer", "model"])
def test_check_false_insists(gpt2, build_model, ids, case):
    stranger = load_frozen(build_model("gpt2", seed=1))
    wrong, _ = _wrong(case, gpt2, stranger)
    with spliced(gpt2, {1: wrong}, check=False):
        got = gpt2.logits(ids)
    assert torch.equal(got, hooked_logits(gpt2, ids, {1: wrong.layer}))


def test_the_same_weights_under_another_name_are_accepted(gpt2):
    renamed = trained_on(gpt2, 1, transcoder(), revision="abc")
    assert renamed.provenance.model != gpt2.source
    with spliced(gpt2, {1: renamed}):
        assert gpt2.mlp(1).layer is renamed.layer


def test_no_such_layer(gpt2):
    with pytest.raises(MxdError, match=r"block 3 is out of range.*0 \.\.\. 2"), spliced(gpt2, {3: transcoder()}):
        pass


# Around tokens


def test_the_base_mlp_answers_at_the_tokens_named_and_at_no_others(family, ids):
    layer = transcoder()
    tokens = [int(ids[0, 0]), int(ids[1, 5])]
    where = torch.isin(ids, torch.tensor(tokens))
    assert where.sum() >= 2
    base = family.mlp(1)
    with spliced(family, {1: layer}, base_at=tokens):
        x, y = family.record(ids, [1])[1]
    with torch.no_grad():
        assert torch.equal(y[where], base(x)[where])
        assert torch.equal(y[~where], layer(x)[~where])
    assert (layer(x)[where] - base(x)[where]).abs().min() > 0


def test_a_replacement_also_answers_at_tokens_it_was_trained_without(gpt2, ids):
    """Whoever asks for a splice gets the replacement, at every position."""
    layer = transcoder()
    replacement = trained_on(gpt2, 1, layer, excluded_ids=tuple(ids[0].tolist()))
    with spliced(gpt2, {1: replacement}):
        assert torch.equal(gpt2.logits(ids), hooked_logits(gpt2, ids, {1: layer}))


def test_an_autoencoder_is_spliced_around_tokens_too(gpt2, ids):
    sae = TopKSAEConfig(d_in=32, d_out=32, num_units=64, sparsity=TopKConfig(k=8)).build()
    base = gpt2.mlp(1)
    with spliced(gpt2, {1: sae}, base_at=[int(ids[0, 3])]):
        x, y = gpt2.record(ids, [1])[1]
    assert torch.equal(y[0, 3], base(x)[0, 3])
    assert torch.equal(y[1], sae(base(x))[1])


def test_splicing_around_tokens_needs_token_ids(gpt2, ids):
    embeddings = gpt2.module.get_input_embeddings()(ids)
    with spliced(gpt2, {1: transcoder()}, base_at=[0]), pytest.raises(MxdError, match=r"input_ids.*leave base_at out"):
        gpt2.module(inputs_embeds=embeddings)
    with spliced(gpt2, {1: transcoder()}), torch.no_grad():
        logits = gpt2.module(inputs_embeds=embeddings).logits
    with spliced(gpt2, {1: transcoder()}):
        assert torch.equal(logits, gpt2.logits(ids))


def test_greedy_generation_with_and_without_a_cache(trained_gpt2):
    ids = text_ids(trained_gpt2)
    layer = mixture(trained_gpt2, 2)
    layer.expert_scale.data[0] *= 4  # not the base MLP any more
    replacement = trained_on(trained_gpt2, 2, layer)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(ids)
    with spliced(trained_gpt2, {2: replacement}, base_at=[0]):
        cached = trained_gpt2.module.generate(ids, attention_mask=mask, use_cache=True, **options)
        plain = trained_gpt2.module.generate(ids, attention_mask=mask, use_cache=False, **options)
        by_hand = ids
        for _ in range(12):
            by_hand = torch.cat([by_hand, trained_gpt2.logits(by_hand)[:, -1:].argmax(-1)], 1)
    base = trained_gpt2.module.generate(ids, attention_mask=mask, **options)
    assert cached.tolist() == plain.tolist() == by_hand.tolist()
    assert cached.tolist() != base.tolist()


def test_cached_steps_give_the_logits_of_the_whole_forward(family, ids):
    tokens = [int(ids[0, 0]), int(ids[0, 8]), int(ids[1, 9])]  # in the prompt and in the cached steps
    with spliced(family, {1: transcoder()}, base_at=tokens), torch.no_grad():
        whole = family.logits(ids)
        logits, cache = step_cached(family, None, input_ids=ids[:, :7])
        found = [logits]
        for position in range(7, 12):
            logits, cache = step_cached(family, cache, input_ids=ids[:, position : position + 1])
            found.append(logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, atol=1e-4, rtol=1e-4)


# TransformerLens


def test_a_bridge_is_spliced_as_the_model_is(family, bridge, ids):
    layers = {0: transcoder(), 2: transcoder(seed=2)}
    before = bridge(ids)
    for tokens in ([], [int(ids[0, 4])]):
        with spliced(family, layers, base_at=tokens):
            expected = family.logits(ids)
        with spliced(bridge, layers, base_at=tokens) as model, torch.no_grad():
            torch.testing.assert_close(bridge(ids), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(model.logits(ids), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(bridge(ids), before)
    assert (expected - before).abs().max() > 0.1


def test_a_bridges_own_mlp_spliced_back_changes_no_bit(bridge, ids):
    before = bridge(ids)
    model = load_frozen(bridge)
    with spliced(bridge, {1: model.mlp(1)}):
        assert torch.equal(bridge(ids), before)


def test_hooks_on_a_bridge_fire_inside_the_splice(bridge, ids):
    layer, seen = transcoder(), {}

    def look(value, hook):
        seen[hook.name] = value

    def zero(value, hook):
        return torch.zeros_like(value)

    names = ["blocks.1.mlp.hook_in", "blocks.1.mlp.hook_out"]
    with spliced(bridge, {1: layer}), torch.no_grad():
        logits = bridge.run_with_hooks(ids, fwd_hooks=[(name, look) for name in names])
        assert torch.equal(seen[names[1]], layer(seen[names[0]]))
        changed = bridge.run_with_hooks(ids, fwd_hooks=[(names[1], zero)])
    with spliced(bridge, {1: Zero()}):
        torch.testing.assert_close(changed, bridge(ids))
    assert (changed - logits).abs().max() > 0.1


class Zero(torch.nn.Module):
    """Answers nothing."""

    def forward(self, x):
        return torch.zeros_like(x)
