"""One contract, every replacement layer: the matrix of all methods and all kinds of sparsity."""

import json
from typing import get_args

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from variants import CASES, SPARSITIES, VARIANTS, parse

from mxd.common.errors import MxdError
from mxd.layers import LAYERS, AnyReplacement, Code, parse_layer
from mxd.layers.sparsity import AnySparsity

SECOND = [case for case in CASES if case[0] == "transcoder" and case[1] not in ("topk", "jumprelu")]
"""Kinds of sparsity that the short run tries on MxD alone."""


def params():
    """Every pair of form and kind, and which of them the short run leaves out."""
    return [pytest.param(case, marks=pytest.mark.long if case in SECOND else (), id="-".join(case)) for case in CASES]


@pytest.fixture(params=params())
def config(request, mlp):
    return parse(*request.param).resolve(mlp)


@pytest.fixture
def layer(config, randomise):
    """A layer with random weights, in evaluation mode and float64."""
    return randomise(config.build())


@pytest.fixture
def x(layer):
    return torch.randn(2, 4, layer.config.d_in, dtype=torch.float64)


def dense(code, units):
    """The code as a vector of all units' activations."""
    empty = code.activations.new_zeros(*code.activations.shape[:-1], units)
    return empty.scatter_add(-1, code.indices.expand(code.activations.shape), code.activations)


def needs_unit_outputs(layer):
    """Skip a test of what units add to the output, for a layer whose units do not add up."""
    if not layer.additive:
        with pytest.raises(MxdError, match="adds no direction of its own"):
            layer.unit_output(0, torch.zeros(layer.config.d_in))
        pytest.skip("not additive")


def test_the_matrix_is_complete():
    unions = (get_args(get_args(AnyReplacement)[0]), get_args(get_args(AnySparsity)[0]))
    assert set(unions[0]) == set(LAYERS.values()) == {LAYERS[fields["method"]] for fields in VARIANTS.values()}
    assert {kind.model_fields["kind"].default for kind in unions[1]} == set(SPARSITIES)
    assert {kind for _, kind in CASES} == set(SPARSITIES)
    assert all(cls.model_fields["method"].default == name for name, cls in LAYERS.items())


# --- what training begins with ------------------------------------------------------------------------------------


def means(layer):
    read = layer.config.d_in
    return torch.randn(read, dtype=torch.float64), torch.randn(layer.config.d_out, dtype=torch.float64)


def test_the_papers_start_sets_the_output_bias_alone(layer):
    before = {name: p.clone() for name, p in layer.named_parameters()}
    mean_in, mean_out = means(layer)
    layer.initialise(mean_in, mean_out)
    assert torch.equal(layer.bias, mean_out)
    assert all(torch.equal(p, before[name]) for name, p in layer.named_parameters() if name != "bias")


def test_the_centred_start_centres_the_gates(layer):
    mean_in, mean_out = means(layer)
    layer.initialise(mean_in, mean_out, "centred")
    pre = torch.full((layer.num_units,), float(layer.config.sparsity.kind == "always"), dtype=torch.float64)
    torch.testing.assert_close(layer.pre_activations(mean_in), pre)
    assert torch.equal(layer.bias, mean_out)


def test_the_centred_start_answers_the_mean_and_can_learn(config):
    """As drawn, and not only with random weights: the output is the bias, and something below it has a gradient."""
    if config.reads == "mlp_out":
        pytest.skip("autoencoders begin with decoders tied to their encoders")
    layer = config.build().train()
    mean_in, mean_out = (m.float() for m in means(layer))
    layer.initialise(mean_in, mean_out, "centred")
    x = torch.randn(9, config.d_in)
    out = layer(x)
    torch.testing.assert_close(out, mean_out.expand(9, -1))
    (out * torch.randn_like(out)).sum().backward()
    assert sum(float(p.grad.abs().sum()) > 0 for name, p in layer.named_parameters() if name != "bias") >= 1


# --- the forward pass ---------------------------------------------------------------------------------------------


def test_forward_is_decode_of_encode(layer, x):
    assert torch.equal(layer(x), layer.decode(x, layer.encode(x)))
    assert layer(x).shape == (2, 4, layer.config.d_out)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_any_leading_shape(layer, lead):
    x = torch.randn(*lead, layer.config.d_in, dtype=torch.float64)
    code, y = layer.encode(x), layer(x)
    assert code.activations.shape == code.indices.shape == (*lead, code.activations.shape[-1])
    assert y.shape == (*lead, layer.config.d_out)
    rows = x.reshape(-1, layer.config.d_in)
    for row, out in zip(rows, y.reshape(-1, layer.config.d_out), strict=True):
        torch.testing.assert_close(layer(row), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_of_the_input_is_the_dtype_of_the_output(layer, x, dtype):
    """Parameters stay float32 and so does the arithmetic: only input and output are rounded."""
    layer.float()
    x = x.to(dtype)
    y, exact = layer(x), layer(x.float())
    assert y.dtype == dtype
    assert torch.equal(y, exact.to(dtype))
    assert not layer.additive or layer.unit_output(0, x).dtype == dtype
    assert {p.dtype for p in layer.parameters()} == {torch.float32}


@pytest.mark.parametrize("candidates", ["float32", "bfloat16"])
@pytest.mark.parametrize("training", [True, False])
def test_a_layer_in_inference_mode(config, randomise, candidates, training, monkeypatch):
    """As without gradients, in training mode, too, and where units are proposed in bfloat16."""
    monkeypatch.setattr("mxd.ops.sparse.WORTH", (1, 0))
    config = config.grown(config.sparsity.nearest_units(64))
    layers = [randomise(config.build()).float().train(training) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    layers[0].sparsity.candidates = candidates
    x = torch.randn(2, 4, config.d_in)
    with torch.inference_mode():
        got = layers[0](x)
    with torch.no_grad():
        torch.testing.assert_close(got, layers[1](x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("candidates", ["float32", "bfloat16"])
def test_a_layer_in_float16(config, randomise, candidates, monkeypatch):
    """Output and every gradient in training mode are those of float64, to the rounding of float16."""
    monkeypatch.setattr("mxd.ops.sparse.WORTH", (1, 0))
    config = config.grown(config.sparsity.nearest_units(64))
    exact = randomise(config.build())
    for parameter in exact.parameters():
        parameter.data = (0.5 * parameter).half().double()  # products of four factors stay in range
    half = config.build().half()
    half.load_state_dict(exact.state_dict())
    half.sparsity.candidates = candidates
    x = torch.randn(2, 4, config.d_in).half()
    found = []
    for layer, rows in ((half, x), (exact, x.double())):
        code = layer.train().encode(rows)
        out = layer.decode(rows, code)
        (out.square().mean() + layer.penalty(code)).backward()
        lists_differ = config.sparsity.kind == "batch_topk"  # in length, where few units are above the cutoff
        chosen = dense(code, config.num_units) > 0 if lists_differ else code.indices.sort().values
        found.append([chosen, out, *(p.grad for p in layer.parameters())])
    assert torch.equal(found[0][0], found[1][0])
    for got, expected in zip(found[0][1:], found[1][1:], strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=0.01 * expected.abs().max().item())
    assert found[0][1].dtype == torch.float16


def test_the_wrong_width_is_refused(layer, x):
    wide = torch.zeros(2, layer.config.d_in + 1, dtype=torch.float64)
    with pytest.raises(MxdError, match=rf"width {layer.config.d_in}, got \(2, {layer.config.d_in + 1}\)"):
        layer(wide)
    with pytest.raises(MxdError, match="width"):
        layer.encode(wide)
    with pytest.raises(MxdError, match="width"):
        layer.decode(wide, layer.encode(x[0, :2]))


# --- the code -----------------------------------------------------------------------------------------------------


def test_the_code_is_the_largest_positive_pre_activations(layer, x):
    """ReLU first, then the K largest of them (all of them, where nothing bounds K)."""
    kind = layer.config.sparsity.kind
    if kind not in ("topk", "random_k", "relu_l1"):
        pytest.skip("chooses by another rule, which its own test states")
    code, k = layer.encode(x), {"topk": 3, "random_k": 4}.get(kind, layer.num_units)
    weight, bias = layer.gates.rows(torch.arange(layer.num_units))
    pre = x @ weight.T + bias
    torch.testing.assert_close(layer.pre_activations(x), pre)
    kth = pre.sort(dim=-1, descending=True).values[..., k - 1 : k]
    torch.testing.assert_close(dense(code, layer.num_units), torch.where(pre >= kth, pre, 0).relu())


def test_values_are_non_negative_and_few(layer, x):
    for training in (True, False):
        code = layer.train(training).encode(50 * x)
        assert (code.activations >= 0).all()
        assert (code.activations > 0).any()
        most = layer.config.sparsity.max_k or layer.num_units
        assert (code.activations > 0).sum(-1).max() <= most <= layer.num_units
        rows = zip(code.indices.flatten(0, -2), code.activations.flatten(0, -2), strict=True)
        assert all(len(set(active)) == len(active) for active in (units[a > 0].tolist() for units, a in rows))
        in_order = code.indices.flatten(0, -2).tolist() == [list(range(layer.num_units))] * 8
        assert code.all_units == in_order
        general = layer.config.sparsity.general and layer.config.sparsity.kind != "batch_topk"
        assert code.all_units == (most == layer.num_units) or not general


def test_a_code_is_a_set(layer, x):
    """The order of the slots does not matter, nor whether the code claims to list all units in order."""
    code = layer.encode(x)
    order = torch.randperm(code.activations.shape[-1])
    shuffled = Code(code.activations[..., order], code.indices[..., order])
    torch.testing.assert_close(layer.decode(x, shuffled), layer(x))


def test_one_code_for_every_token(layer, x):
    """A code expanded over the tokens (the mean gate) is decoded as its copies are."""
    values, indices = (
        torch.rand(layer.num_units, dtype=torch.float64).expand(2, 4, -1),
        torch.arange(layer.num_units).expand(2, 4, -1),
    )
    copies = Code(values.contiguous(), indices.contiguous())
    torch.testing.assert_close(layer.decode(x, Code(values, indices, True)), layer.decode(x, copies))
    torch.testing.assert_close(
        layer.decode(x[0, :1], Code(values[0, :1], indices[0, :1], True)), layer.decode(x, copies)[0, :1]
    )


def test_the_mean_hidden_state_makes_units_add_their_mean_directions(layer, x):
    """``unit_output`` is linear in the hidden state, so its mean is its value at the mean hidden state."""
    needs_unit_outputs(layer)
    hidden = layer.hidden(x)
    assert hidden.shape[:-1] == x.shape[:-1]
    code, mean = layer.encode(x), hidden.reshape(8, -1).mean(0)
    rest = layer.decode(x, code.with_activations(torch.zeros_like(code.activations)))
    means = torch.stack([layer.unit_output(n, x).reshape(8, -1).mean(0) for n in range(layer.num_units)])
    torch.testing.assert_close(layer.decode(x, code, mean), rest + dense(code, layer.num_units) @ means)
    torch.testing.assert_close(layer.decode(x[0, :1], layer.encode(x[0, :1]), hidden[0, 0]), layer(x[0, :1]))


# --- the units ----------------------------------------------------------------------------------------------------


def test_the_output_is_the_sum_of_its_units(layer, x):
    """``y^ = rest + sum_n a_n unit_output(n, x)``, the rest being what an empty code leaves."""
    needs_unit_outputs(layer)
    code = layer.encode(x)
    rest = layer.decode(x, code.with_activations(torch.zeros_like(code.activations)))
    units = torch.stack([layer.unit_output(n, x) for n in range(layer.num_units)], dim=-2)
    total = rest + (dense(code, layer.num_units).unsqueeze(-1) * units).sum(-2)
    torch.testing.assert_close(layer(x), total)
    assert not torch.allclose(layer(x), rest)
    for n in (-1, layer.num_units):
        with pytest.raises(MxdError, match=rf"units are numbered 0 \.\.\. .*, got {n}"):
            layer.unit_output(n, x)


def test_ablating_a_unit_drops_its_term_and_steering_adds_one(layer, x):
    """Section 3.2.2: to add ``lambda`` to a unit's activation is to add ``lambda * unit_output`` to the output."""
    needs_unit_outputs(layer)
    code = layer.encode(x)
    n, activation = code.indices[0, 0, min(1, layer.num_units - 1)].item(), dense(code, layer.num_units)
    for change in (-activation[..., n], torch.full((2, 4), 100.0).double()):
        changed = activation.clone()
        changed[..., n] += change
        got = layer.decode(x, Code(changed, torch.arange(layer.num_units).expand(2, 4, -1), True))
        torch.testing.assert_close(got, layer(x) + change.unsqueeze(-1) * layer.unit_output(n, x))


def test_unit_norms_are_the_norms_of_the_unit_weights(layer):
    weights = [layer.unit_weight(n) for n in range(layer.num_units)]
    assert all(w.shape[-1] == layer.config.d_out for w in weights)
    torch.testing.assert_close(layer.unit_norms(), torch.stack([w.norm() for w in weights]))


def test_unit_norms_of_a_fresh_layer_can_be_differentiated(config):
    """Decoders start at zero, where a norm has no gradient: it must not be NaN."""
    layer = config.build()
    (layer.unit_norms() + layer.factor_norms()).sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


def test_the_penalty(layer, x):
    """``l1 * mean_tokens sum_n |a_n| ||W_n||_F`` with the L1 sparsity (appendix B.6.1), nothing with the others."""
    code = layer.encode(x)
    activation = dense(code, layer.num_units).reshape(8, layer.num_units)
    explicit = sum(activation[t, n] * layer.unit_weight(n).norm() for t in range(8) for n in range(layer.num_units)) / 8
    l1 = getattr(layer.config.sparsity, "l1", 0.0)
    torch.testing.assert_close(layer.penalty(code), l1 * explicit)
    assert (layer.penalty(code) > 0) == (l1 > 0)
    if l1:  # its gradient reaches the gate and, through the norms, the decoder
        parameters = list(layer.parameters())
        both = [layer.penalty(code), l1 * explicit]
        pair = [torch.autograd.grad(p, parameters, retain_graph=True, allow_unused=True) for p in both]
        for got, expected in zip(*pair, strict=True):
            assert (got is None) == (expected is None)
            if got is not None:
                torch.testing.assert_close(got, expected)


# --- parameters, training and state ---------------------------------------------------------------------------------


def test_num_params_is_exact(config):
    layer = config.build()
    assert config.num_params == sum(p.numel() for p in layer.parameters())
    assert layer.num_units == config.num_units
    assert layer.config == config


def test_a_fresh_layer_is_float32_on_the_cpu(config):
    assert {(p.dtype, p.device.type, p.requires_grad) for p in config.build().parameters()} == {
        (torch.float32, "cpu", True)
    }


def test_training_moves_every_parameter(config):
    """Where a factor starts at zero the others get no gradient in the first step; all have one by the third."""
    layer = config.build().train()
    start = {name: p.clone() for name, p in layer.named_parameters()}
    x, y = torch.randn(16, config.d_in), torch.randn(16, config.d_out)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        code = layer.encode(x)
        loss = (layer.decode(x, code) - y).square().mean()
        (loss + layer.penalty(code)).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    still = {name for name, p in layer.named_parameters() if torch.equal(p, start[name])}
    assert still <= {"sparsity.threshold"}  # which learns from pre-activations near it, of which there need be none


def test_gradients_are_those_of_finite_differences(layer, x):
    """Along a random direction in the space of all parameters: sparse and dense backward passes together.

    All but thresholds, whose gradients are estimates: test_jumprelu.py.
    """
    parameters = {name: p for name, p in layer.named_parameters() if name != "sparsity.threshold"}
    upstream = torch.randn(3, layer.config.d_out, dtype=torch.float64)
    rows = x[0, :3]

    def loss(*values):
        return torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), rows).mul(upstream).sum()

    directions = [torch.randn_like(p) for p in parameters.values()]
    values = [p.detach().requires_grad_() for p in parameters.values()]
    grads = torch.autograd.grad(loss(*values), values)
    slope = sum((g * d).sum() for g, d in zip(grads, directions, strict=True))
    step = 1e-6
    ahead, behind = (loss(*[v + s * d for v, d in zip(values, directions, strict=True)]) for s in (step, -step))
    torch.testing.assert_close(slope, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-6)


def test_parameters_scale_with_the_units_of_input_and_output(config, randomise):
    """In units of input ``s`` times and of output ``t`` times as small, the scaled layer is the same function."""
    layer, scaled = (randomise(config.build()) for _ in range(2))
    s, t = 4.0, 0.5
    scaled.load_state_dict(layer.state_dict())
    parameters = dict(scaled.named_parameters())
    for name, (i, o) in layer.scaling().items():
        parameters[name].data *= s**i * t**o
    x = torch.randn(7, config.d_in, dtype=torch.float64)
    torch.testing.assert_close(scaled(x), layer(s * x) / t, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scaled.pre_activations(x), layer.pre_activations(s * x))


def test_the_state_dict_restores_the_layer(config, layer, x, tmp_path):
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = config.build(seed=1).double().eval()
    assert not torch.equal(other(x), layer(x))
    state = load_file(tmp_path / "layer.safetensors")
    other.load_state_dict(state, strict=True)
    assert torch.equal(other(x), layer(x))
    state.pop(next(iter(dict(layer.named_parameters()))))
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(state, strict=True)


def test_the_seed_determines_the_weights(config):
    """And building a layer neither reads nor moves the global generator."""
    one, other = config.build(5).state_dict(), config.build(6).state_dict()
    torch.rand(3)
    before = torch.get_rng_state()
    again = config.build(5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], again[name]) for name in one)
    drawn = any(tensor.any() for tensor in one.values())  # a linear map begins at zero, whatever the seed
    assert any(not torch.equal(one[name], other[name]) for name in one) == drawn == (config.method != "linear")


# --- configs ------------------------------------------------------------------------------------------------------


def test_the_config_survives_json(config):
    again = parse_layer(json.loads(config.model_dump_json()))
    assert again == config
    assert type(again) is type(config)


def test_a_config_is_frozen(config):
    with pytest.raises(ValidationError, match="frozen"):
        config.num_units = 3


def test_more_active_units_than_units_is_an_error(config):
    fields, sparsity = config.model_dump(), config.sparsity
    if config.own_kinds:
        pytest.skip("each level has a K of its own; the number of pairs is a square")
    k = sparsity.max_k or getattr(sparsity, "k", None) or getattr(sparsity, "l0", None)
    if k is None:
        assert parse_layer(fields | {"num_units": 1}).build().num_units == 1
        return
    assert parse_layer(fields | {"num_units": k}).build().num_units == k
    with pytest.raises(MxdError, match=rf"(k|l0) = {k:g} is more than num_units = {k - 1:g}"):
        parse_layer(fields | {"num_units": k - 1})


def test_open_fields_cannot_be_built(config):
    for name in type(config).model_fields:
        if type(config).model_fields[name].default is None:
            with pytest.raises(MxdError, match=rf"cannot build {config.label}: {name} not set"):
                config.model_copy(update={name: None}).build()


def test_inherit_fills_only_what_is_open(config, mlp):
    other = type(mlp)(d_in=60, d_out=50, hidden=80, activation="relu", glu=True)
    assert config.resolve(other) == config
    bare = type(config)().resolve(other)
    assert bare.d_out == 50
    assert bare.d_in == (60 if bare.reads == "mlp_in" else 50)
    left = {name for name in type(bare).model_fields if getattr(bare, name) is None}
    assert left == {"linear": set(), "low_rank": {"num_units", "rank"}}.get(config.method, {"num_units", bare.solves})
    assert None not in bare.sized(100_000).model_dump().values()


def test_an_unknown_field_is_an_error(config):
    with pytest.raises(MxdError, match="widht"):
        parse_layer(config.model_dump() | {"widht": 3})


def test_slugs_tell_runs_apart(mlp):
    configs = [parse(*case).resolve(mlp) for case in CASES if case[0] not in ("mxd-glu", "mxd-relu", "mov-glu")]
    slugs = [config.slug for config in configs]
    assert len(set(slugs)) == len(slugs)
    assert all(slug == slug.lower() and "/" not in slug and " " not in slug for slug in slugs)


@pytest.mark.parametrize("method", [None, "mxdd", 3])
def test_an_unknown_method_lists_the_choices(method):
    with pytest.raises(MxdError, match="unknown method .*choose one of: " + ", ".join(LAYERS)):
        parse_layer({"method": method})
