"""Mixture of Decoders: the paper's lemmas and appendix A, its initialisation, and numbers worked by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from mxd.common.errors import MxdError
from mxd.layers import Code, MLPShape, MLPWeights
from mxd.layers.encoder import DenseEncoder
from mxd.layers.mxd import MxDConfig
from mxd.layers.sparsity import RandomKConfig, ReLUL1Config, TopKConfig

N = 11


@pytest.fixture
def config(mlp):
    return MxDConfig(num_units=N, sparsity=TopKConfig(k=3)).resolve(mlp)


@pytest.fixture
def layer(config, randomise):
    return randomise(config.build())


@pytest.fixture
def x(layer):
    return torch.randn(7, layer.config.d_in, dtype=torch.float64)


def explicit_experts(layer):
    """Equation 4, written out: the tensor of all ``W_n = D diag(c_n)``, shape [N, H, O]."""
    return torch.stack([layer.decoder @ torch.diag(c) for c in layer.expert_scale])


def all_on(layer, activation):
    return Code(activation, torch.arange(layer.num_units).expand(activation.shape), True)


# --- the form: equations 4 and 5, lemma 2, appendix A.3 -----------------------------------------------------------


def test_by_hand():
    """d = O = H = N = 2, K = 1, ReLU: every number below is worked out on paper."""
    layer = MxDConfig(
        d_in=2, d_out=2, num_units=2, hidden=2, activation="relu", glu=False, sparsity=TopKConfig(k=1)
    ).build()
    values = {
        "encoder.weight": [[1.0, 0.0], [1.0, 1.0]],
        "encoder.bias": [0.0, -1.0],
        "gate": [[1.0, 0.0], [0.0, 1.0]],
        "gate_bias": [0.5, 0.0],
        "expert_scale": [[1.0, 2.0], [3.0, -1.0]],
        "decoder": [[1.0, 2.0], [0.0, 1.0]],
        "bias": [10.0, 20.0],
    }
    layer.load_state_dict({name: torch.tensor(v) for name, v in values.items()})
    # x = (1, 2):   z = relu(1, 3 - 1) = (1, 2);  z D = (1, 4);  a = top1(1.5, 2) = (0, 2);  a C = (6, -2)
    # x = (1, -3):  z = relu(1, -3) = (1, 0);     z D = (1, 2);  a = top1(1.5, 0) = (1.5, 0); a C = (1.5, 3)
    # x = (-1, -1): z = relu(-1, -3) = (0, 0);    a = relu(-0.5, -1) = (0, 0)
    x = torch.tensor([[1.0, 2.0], [1.0, -3.0], [-1.0, -1.0]])
    assert layer(x).tolist() == [[16.0, 12.0], [11.5, 26.0], [10.0, 20.0]]
    assert layer.unit_weight(1).tolist() == [[3.0, -2.0], [0.0, -1.0]]
    assert layer.unit_output(1, x).tolist() == [[3.0, -4.0], [3.0, -2.0], [0.0, 0.0]]


@pytest.mark.parametrize("glu", [False, True])
def test_lemma_2(config, randomise, glu):
    """``sum_n a_n (z W_n) == (a C) * (z D)``, the left side with every W_n formed."""
    layer = randomise(config.model_copy(update={"glu": glu}).build())
    x = torch.randn(7, 6, dtype=torch.float64)
    code = layer.encode(x)
    a = torch.zeros(7, N, dtype=torch.float64).scatter(1, code.indices, code.activations)
    mixture = torch.einsum("tn,th,nho->to", a, layer.encoder(x), explicit_experts(layer))
    torch.testing.assert_close(layer(x), mixture + layer.bias)


def test_unit_views_are_equation_4(layer, x):
    for n, expert in enumerate(explicit_experts(layer)):
        torch.testing.assert_close(layer.unit_weight(n), expert)
        torch.testing.assert_close(layer.unit_output(n, x), layer.encoder(x) @ expert)


def test_intervention_adds_a_multiple_of_the_experts_map(layer, x):
    """Section 3.2.2: ``lambda * (z W_n) = lambda * c_n * (z D)`` is what a larger activation adds."""
    activation = torch.rand(7, N, dtype=torch.float64)
    pushed = activation + 100 * F.one_hot(torch.tensor(4), N)
    added = layer.decode(x, all_on(layer, pushed)) - layer.decode(x, all_on(layer, activation))
    torch.testing.assert_close(added, 100 * layer.encoder(x) @ explicit_experts(layer)[4])
    torch.testing.assert_close(100 * layer.unit_output(4, x), added)


def test_a3_mode_3_unfolding_is_a_khatri_rao_product(layer):
    """Equation 15: ``W_(3) = (C kr D)^T``, column-wise Kronecker products; [N, H, O] unfolds to [O, N H]."""
    tensor = torch.stack([layer.unit_weight(n) for n in range(N)])
    unfolding = tensor.permute(2, 0, 1).reshape(5, N * 8)
    columns = [torch.kron(layer.expert_scale[:, o], layer.decoder[:, o]) for o in range(5)]
    torch.testing.assert_close(unfolding, torch.stack(columns))


def test_a3_forward_is_two_tensor_contractions(layer, x):
    """Equation 16: ``y^ = W x_1 a x_2 z``."""
    activation = torch.rand(7, N, dtype=torch.float64)
    tensor = torch.stack([layer.unit_weight(n) for n in range(N)])
    for t in range(7):
        contracted = torch.tensordot(layer.encoder(x)[t], torch.tensordot(activation[t], tensor, dims=1), dims=1)
        torch.testing.assert_close(layer.decode(x, all_on(layer, activation))[t], contracted + layer.bias)


def test_the_factorised_decoders_cost_o_times_n_plus_h(layer):
    """Section 2.2: ``O (N + H)`` parameters stand for ``N H O``."""
    naive = sum(layer.unit_weight(n).numel() for n in range(N))
    assert naive == N * 8 * 5
    assert layer.expert_scale.numel() + layer.decoder.numel() == 5 * (N + 8)


# --- ranks: lemma 1, appendix A.4 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_lemma_1(layer, rank):
    """``rank(W_n) == rank(D)`` where ``c_n`` has no zero, also for a D that lacks rank; each zero can cost one."""
    layer.decoder.data = torch.randn(8, rank, dtype=torch.float64) @ torch.randn(rank, 5, dtype=torch.float64)
    sign = layer.expert_scale.data.sign()
    layer.expert_scale.data = sign * (0.5 + torch.rand_like(sign))
    ranks = [torch.linalg.matrix_rank(layer.unit_weight(n)).item() for n in range(N)]
    assert ranks == [torch.linalg.matrix_rank(layer.decoder).item()] * N == [rank] * N
    layer.expert_scale.data[0, 1:] = 0
    assert torch.linalg.matrix_rank(layer.unit_weight(0)) == 1


def test_a4_a_glu_encoder_is_an_mxd_with_identity_c():
    """Equations 17-21: experts ``W_n = E diag(e_n)``, of rank one, gated by ``psi(x E_glu)``.

    The MxD's own encoder passes x through (x is positive, its matrix the identity); its D is E, its gate E_glu.
    """
    width, hidden = 4, 6
    fields = {"d_in": width, "d_out": hidden, "activation": "relu"}
    glu = DenseEncoder(MxDConfig(hidden=hidden, num_units=1, glu=True, **fields, sparsity=TopKConfig(k=1))).double()
    for parameter in glu.parameters():
        parameter.data.normal_()
    glu.bias.data.zero_()
    mxd = MxDConfig(hidden=width, num_units=hidden, glu=False, **fields, sparsity=ReLUL1Config()).build().double()
    mxd.encoder.weight.data = torch.eye(width).double()
    mxd.decoder.data = glu.weight.data.T.contiguous()
    mxd.gate.data, mxd.gate_bias.data = glu.glu_weight.data, glu.glu_bias.data
    mxd.expert_scale.data = torch.eye(hidden).double()
    x = torch.rand(9, width, dtype=torch.float64)
    torch.testing.assert_close(mxd(x), glu(x))  # psi = ReLU is the gate itself
    assert [torch.linalg.matrix_rank(mxd.unit_weight(n)).item() for n in range(hidden)] == [1] * hidden
    assert torch.equal(mxd.unit_weight(2), F.one_hot(torch.tensor(2), hidden) * glu.weight.T)

    glu.activation = F.silu  # any psi, its dense values taken as the code
    gates = F.silu(F.linear(x, glu.glu_weight, glu.glu_bias))
    torch.testing.assert_close(mxd.decode(x, all_on(mxd, gates)), glu(x))


# --- encoders -----------------------------------------------------------------------------------------------------


ACTIVATIONS = {
    "relu": lambda v: v.clamp_min(0),
    "gelu": lambda v: v * (1 + torch.erf(v / math.sqrt(2))) / 2,
    "gelu_tanh": lambda v: v * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) / 2,
    "silu": lambda v: v / (1 + torch.exp(-v)),
}


@pytest.mark.parametrize("glu", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_encoder_is_the_formula(config, randomise, activation, glu):
    """Section 2.5; the activation's exact form matters (tanh or erf GELU)."""
    layer = randomise(config.model_copy(update={"activation": activation, "glu": glu}).build())
    encoder, x = layer.encoder, torch.randn(7, 6, dtype=torch.float64)
    linear = x @ encoder.weight.T + encoder.bias
    act = ACTIVATIONS[activation]
    expected = act(x @ encoder.glu_weight.T + encoder.glu_bias) * linear if glu else act(linear)
    torch.testing.assert_close(encoder(x), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("missing", ["hidden", "activation", "glu"])
def test_what_cannot_be_read_from_the_base_must_be_stated(missing):
    shape = {"d_in": 6, "d_out": 5, "hidden": 8, "activation": "relu", "glu": False}
    with pytest.raises(MxdError, match=f"base MLP's {missing} could not be read"):
        MxDConfig().resolve(MLPShape(**shape | {missing: None}))
    stated = MxDConfig(**{missing: shape[missing]}).resolve(MLPShape(**shape | {missing: None}))
    assert stated == MxDConfig().resolve(MLPShape(**shape))


# --- initialisation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("glu", [False, True])
def test_initialisation(glu):
    """Section 3.1: D and all biases zero, everything else as ``nn.Linear``: uniform within 1/sqrt(fan_in)."""
    d, o, h, n = 25, 16, 36, 100
    layer = MxDConfig(d_in=d, d_out=o, hidden=h, num_units=n, activation="relu", glu=glu).build()
    fan_in = {"encoder.weight": d, "encoder.glu_weight": d, "gate": d, "expert_scale": n}
    drawn = {name: p for name, p in layer.named_parameters() if name in fan_in}
    assert len(drawn) == 3 + glu
    for name, parameter in drawn.items():
        bound = 1 / math.sqrt(fan_in[name])
        assert 0.97 * bound < parameter.abs().max() <= bound
        assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
        assert abs(parameter.mean()) < 0.1 * bound
    zero = [p for name, p in layer.named_parameters() if name not in fan_in]
    assert len(zero) == 4 + glu  # b_E, b_G, D, b and b_glu
    assert all(torch.equal(p, torch.zeros_like(p)) for p in zero)
    assert torch.equal(layer(torch.randn(5, d)), torch.zeros(5, o))


# --- the base MLP is a special case -------------------------------------------------------------------------------


def base_weights(glu, biases):
    return MLPWeights(
        encoder=torch.randn(8, 6, dtype=torch.float64),
        encoder_bias=torch.randn(8, dtype=torch.float64) if biases else None,
        encoder_glu=torch.randn(8, 6, dtype=torch.float64) if glu else None,
        decoder=torch.randn(8, 5, dtype=torch.float64),
        decoder_bias=torch.randn(5, dtype=torch.float64) if biases else None,
    )


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "sparsity", [TopKConfig(k=1), TopKConfig(k=N), RandomKConfig(k=4), ReLUL1Config()], ids=lambda s: s.slug
)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("glu", [False, True])
def test_copy_base_is_the_base_mlp(config, randomise, glu, biases, sparsity, training):
    """With one expert always on, ``c = a = 1`` and E, D, b copied, MxD is the base MLP, whatever it was before."""
    layer = randomise(config.model_copy(update={"glu": glu, "sparsity": sparsity}).build()).train(training)
    base, x = base_weights(glu, biases), torch.randn(7, 6, dtype=torch.float64)
    layer.copy_base(base)
    linear = x @ base.encoder.T + (base.encoder_bias if biases else 0)
    gelu = ACTIVATIONS["gelu_tanh"]
    hidden = gelu(x @ base.encoder_glu.T) * linear if glu else gelu(linear)
    torch.testing.assert_close(layer(x), hidden @ base.decoder + (base.decoder_bias if biases else 0))
    code = layer.encode(x)
    assert code.indices[code.activations > 0].tolist() == [0] * 7
    assert code.activations[code.activations > 0].tolist() == [1.0] * 7


def test_copy_base_owns_its_weights(config, randomise):
    base, layer = base_weights(False, True), randomise(config.build())
    layer.copy_base(base)
    layer.decoder.data.add_(1)
    layer.encoder.weight.data.add_(1)
    assert not torch.equal(layer.decoder, base.decoder)
    assert not torch.equal(layer.encoder.weight, base.encoder)


@pytest.mark.parametrize("change", [{"hidden": 9}, {"glu": True}])
def test_copy_base_refuses_another_shape(config, change):
    layer = config.model_copy(update=change).build().double()
    with pytest.raises(MxdError, match=r"cannot copy a base encoder of shape .*leave hidden and glu"):
        layer.copy_base(base_weights(False, True))


# --- the centred start ----------------------------------------------------------------------------------------------


def test_the_centred_start_spreads_c_and_leaves_the_dense_part_as_drawn(config):
    drawn, layer = config.build(seed=3), config.build(seed=3)
    layer.initialise(torch.randn(config.d_in), torch.randn(config.d_out), "centred")
    assert torch.equal(layer.expert_scale, 2 * drawn.expert_scale)
    kept = {"encoder.weight", "encoder.bias", "encoder.glu_weight", "encoder.glu_bias", "gate", "decoder"}
    parameters = dict(layer.named_parameters())
    assert all(torch.equal(parameters[name], p) for name, p in drawn.named_parameters() if name in kept)
