"""Groups of features: the loss over prefixes against the dense formula, one group against none, and their config."""

import copy

import pytest
import torch
from pydantic import ValidationError

from mxd.artifacts.provenance import Provenance
from mxd.common.errors import MxdError
from mxd.layers import LAYERS, MLPShape, parse_layer, size
from mxd.layers.losses import normalized_mse
from mxd.layers.objective import forward_backward
from mxd.layers.sae import TopKSAEConfig
from mxd.layers.transcoder import TranscoderConfig
from mxd.share.formats.base import Outgoing

D, UNITS, GROUPS, ENDS = 6, 16, (0.125, 0.25, 0.625), (2, 6, 16)
FORMS = {
    "transcoder": {"method": "transcoder"},
    "skip": {"method": "transcoder", "skip": True},
    "random-k": {"method": "transcoder", "sparsity": {"kind": "random_k", "k": 4}},
    "relu-l1": {"method": "transcoder", "sparsity": {"kind": "relu_l1", "l1": 0.1}},
    "autoencoder": {"method": "topk_sae"},
}


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def fields(request):
    return {"d_in": D, "d_out": D, "num_units": UNITS, "sparsity": {"kind": "topk", "k": 4}} | request.param


def build(fields, randomise, **more):
    return randomise(parse_layer(fields | more).build()).train()


def sites(dtype=torch.float64):
    return torch.randn(9, D, dtype=dtype), torch.randn(9, D, dtype=dtype)


def nested_loss(layer, read, code, y):
    """``mean_m NMSE(z[:, :m] D[:m] + b + x S)``, dense."""
    z = torch.zeros(len(y), UNITS, dtype=y.dtype).scatter_add(1, code.indices, code.activations)
    rest = layer.bias + (read @ layer.skip if getattr(layer, "skip", None) is not None else 0)
    losses = [normalized_mse(z[:, :m] @ layer.decoder[:m] + rest, y) for m in ENDS]
    return sum(losses) / len(losses)


def gradients(layer):
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


def test_the_loss_and_its_gradients_are_those_of_the_dense_formula(fields, randomise):
    layer = build(fields, randomise, groups=GROUPS)
    other, (x, y) = copy.deepcopy(layer), sites()
    found, read = forward_backward(layer, x, y), layer.read(x, y)
    code = other.encode(read)
    expected = nested_loss(other, read, code, y)
    (expected + other.penalty(code)).backward()
    torch.testing.assert_close(found.loss, expected.float(), check_dtype=False)
    whole = other.decode(read, code)
    torch.testing.assert_close(found.error, (whole - y).square().sum(1).float())  # of all features
    torch.testing.assert_close(gradients(layer), gradients(other), rtol=1e-5, atol=1e-6)
    assert (expected - normalized_mse(whole, y)).abs() > 1e-3


def test_one_group_is_the_plain_layer_bit_for_bit(fields, randomise):
    x, y = sites(torch.float32)
    found = []
    for groups in ((), (1.0,)):
        torch.manual_seed(1)
        layer = build(fields, randomise, groups=groups).float()
        found.append([*forward_backward(layer, x, y)[1:], *gradients(layer).values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_function_does_not_depend_on_the_groups(fields, randomise):
    plain, nested = (build(fields, randomise, groups=groups).eval() for groups in ((), GROUPS))
    nested.load_state_dict(plain.state_dict())
    x, _ = sites()
    assert torch.equal(plain(x), nested(x))


def test_the_stored_constant_is_every_prefixes_answer(fields, randomise):
    layer = build(fields, randomise, groups=GROUPS, bos_constant=True)
    x, y = sites()
    read = layer.read(x, y)
    layer.store_bos(read[0], y[0])
    error, _ = layer.loss(read, layer.encode(read), y)
    assert error[0] == 0 < error[1]
    rest = layer.eval().loss(read[1:], layer.encode(read[1:]), y[1:])[1]
    torch.testing.assert_close(layer.loss(read, layer.encode(read), y)[1], rest * 8 / 9)


# --- the config -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1/8 1/4 5/8", "0.125 0.25 0.625", (0.125, 0.25, 0.625)])
def test_groups_are_written_as_text(text):
    """Since a list in a run's YAML stands for several replacements; a dump is text, too, and read again."""
    config = TranscoderConfig(groups=text)
    assert config.groups == GROUPS
    for dump in (config.model_dump(), config.model_dump(mode="json")):
        assert isinstance(dump["groups"], str)
        assert TranscoderConfig.model_validate(dump) == config
    thirds = TranscoderConfig(groups="1/3 2/3")
    assert TranscoderConfig.model_validate(thirds.model_dump()) == thirds


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("1/4 1/4", r"add up to 0\.5; give positive shares that add up to 1"),
        ("-1/4 5/4", "give positive shares"),
        ("a half", "'a half' are not shares; write numbers or fractions"),
        ("1/0 1", "are not shares"),
        ("0.01 0.99", r"16 units end at \[0, 16\]: one is empty; give fewer groups or more units"),
    ],
)
def test_wrong_groups_are_refused(groups, message):
    with pytest.raises(ValidationError, match=message):
        TranscoderConfig(num_units=16, groups=groups, sparsity={"kind": "topk", "k": 4})


def test_groups_that_sizing_would_leave_empty_are_refused():
    shape = MLPShape(d_in=4, d_out=4)
    config = TranscoderConfig(groups="0.01 0.99", sparsity={"kind": "topk", "k": 2}).resolve(shape)
    with pytest.raises(MxdError, match=r"(?s)M-TC: .*one is empty"):
        size(config, expansion=2)
    assert size(config, expansion=50).nested_widths == (2, 200)


def test_widths_labels_slugs_and_counts():
    fields = {"d_in": D, "d_out": D, "num_units": UNITS, "sparsity": {"kind": "topk", "k": 4}}
    plain, nested = (TranscoderConfig(groups=groups, **fields) for groups in ((), GROUPS))
    assert (plain.nested_widths, nested.nested_widths) == ((16,), ENDS)
    assert (plain.slug, nested.slug) == ("tc-k4", "m-tc-0.125-0.25-0.625-k4")
    assert plain.num_params == nested.num_params
    assert TranscoderConfig(skip=True, groups=GROUPS).label == "M-STC"
    assert TopKSAEConfig(groups=GROUPS).label == "M-SAE"
    assert {name for name, cls in LAYERS.items() if "groups" in cls.model_fields} == {"transcoder", "topk_sae"}


def test_what_other_tools_are_told_names_the_groups(randomise):
    """Their files hold the function, which is that of any transcoder."""
    told = Provenance(model="m", revision=None, block=0, fingerprint="f")
    notes = [
        Outgoing(
            build(
                {
                    "method": "transcoder",
                    "d_in": D,
                    "d_out": D,
                    "num_units": UNITS,
                    "groups": groups,
                    "sparsity": {"kind": "topk", "k": 4},
                },
                randomise,
            ),
            told,
        ).note
        for groups in ((), GROUPS)
    ]
    assert "groups" not in notes[0]
    assert notes[1]["groups"] == list(GROUPS)
