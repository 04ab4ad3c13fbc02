"""The constant that a layer stores for BOS: exact there, nowhere else, whatever the code; and counted."""

import pytest
import torch
from variants import GENERAL

from mxd.common.errors import MxdError
from mxd.layers import LAYERS, MLPShape, parse_layer, size
from mxd.layers.base import BOS_RADIUS

VARIANTS = [*({"method": name} for name in GENERAL), {"method": "transcoder", "skip": True}]


@pytest.fixture(params=VARIANTS, ids=lambda fields: "-".join(map(str, fields.values())))
def config(request, mlp):
    return parse_layer(
        request.param | {"sparsity": {"kind": "topk", "k": 3}, "num_units": 11, "bos_constant": True}
    ).resolve(mlp)


@pytest.fixture
def at_bos(config):
    return torch.randn(config.d_in, dtype=torch.float64), 1e4 * torch.randn(config.d_out, dtype=torch.float64)


@pytest.fixture
def layer(config, randomise, at_bos):
    layer = randomise(config.build())
    layer.store_bos(*at_bos)
    return layer


@pytest.fixture
def without(config, layer):
    """The same layer without its constant."""
    plain = config.model_copy(update={"bos_constant": False}).build().double().eval()
    state = {name: tensor for name, tensor in layer.state_dict().items() if not name.startswith("bos_")}
    plain.load_state_dict(state, strict=True)
    return plain


def test_the_constant_answers_at_bos_and_nowhere_else(layer, without, at_bos):
    x = torch.randn(2, 5, layer.config.d_in, dtype=torch.float64)
    x[:, 0] = at_bos[0]
    assert layer.at_bos(x).tolist() == [[True, False, False, False, False]] * 2
    assert not without.at_bos(x).any()
    out = layer(x)
    assert torch.equal(out[:, 0], at_bos[1].expand(2, -1))
    assert torch.equal(out[:, 1:], without(x)[:, 1:])
    assert torch.equal(layer.encode(x).activations, without.encode(x).activations)


def test_any_code_decodes_to_the_constant_at_bos(layer, at_bos):
    x = at_bos[0].expand(3, -1)
    code = layer.encode(x)
    nothing = code.with_activations(torch.zeros_like(code.activations))
    for other in (nothing, code.with_activations(code.activations + 1)):
        assert torch.equal(layer.decode(x, other), at_bos[1].expand(3, -1))
        assert torch.equal(layer.decode(x, other, layer.hidden(x).mean(0)), at_bos[1].expand(3, -1))


def test_how_near_an_input_must_be(layer, at_bos):
    away = torch.nn.functional.normalize(torch.randn(layer.config.d_in, dtype=torch.float64), dim=0) * at_bos[0].norm()
    assert layer.at_bos(at_bos[0] + 0.99 * BOS_RADIUS * away)
    assert not layer.at_bos(at_bos[0] + 1.01 * BOS_RADIUS * away)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rounded_input_is_still_the_one_at_bos(layer, at_bos, dtype):
    layer.float()
    for factor in (0.1, 1.0, 10.0):
        layer.store_bos(factor * at_bos[0], at_bos[1])
        assert layer.at_bos((factor * at_bos[0]).to(dtype))


def test_nothing_stored_matches_nothing(config, mlp):
    """Where a model has no BOS the constant is zero, and an input of zeros is an input like any other."""
    layer = config.build().eval()
    assert not layer.at_bos(torch.zeros(4, config.d_in)).any()
    assert torch.equal(layer(torch.zeros(4, config.d_in)), layer.bias.expand(4, -1)) or config.method == "topk_sae"


def test_the_constant_is_counted_and_not_trained(config):
    layer = config.build().train()
    stored = config.d_in + config.d_out
    assert config.num_params == config.learned_params + stored == sum(p.numel() for p in layer.parameters())
    x0, y0 = torch.randn(config.d_in), torch.randn(config.d_out)
    layer.store_bos(x0, y0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.cat([torch.randn(16, config.d_in), x0.expand(4, -1)])
    (layer(x) - 1).square().sum().backward()
    optimizer.step()
    assert torch.equal(layer.bos_in, x0) and torch.equal(layer.bos_out, y0)
    at_bos = [p.grad for p in layer.parameters() if p.requires_grad]
    layer.zero_grad()
    (layer(x0.expand(4, -1)) - 1).square().sum().backward()
    assert any(g is not None and g.abs().sum() > 0 for g in at_bos)
    assert all(p.grad is None or not p.grad.any() for p in layer.parameters()), "what is stored teaches nothing"


def test_sizes_are_matched_without_it():
    shape = MLPShape(16, 16, 64, "gelu", False)
    for method in GENERAL:
        config = LAYERS[method](sparsity={"kind": "topk", "k": 2}).resolve(shape)
        stored = config.model_copy(update={"bos_constant": True})
        assert size(stored, 40).num_units == size(config, 40).num_units


def test_a_layer_without_one_stores_none(without, at_bos):
    with pytest.raises(MxdError, match="stores no constant; set bos_constant"):
        without.store_bos(*at_bos)
