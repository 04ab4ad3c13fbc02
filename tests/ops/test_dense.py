"""Dense products of inputs rounded to bfloat16, against products of the rounded numbers in float64."""

import pytest
import torch
from torch import Tensor

from mxd.layers import parse_layer
from mxd.layers.config import MLPShape
from mxd.layers.encoder import DenseEncoder
from mxd.ops import add_product, dense, dense_dtype, linear, product, rounded_products
from mxd.ops.devices import candidate_dtype

ROWS, INNER, COLUMNS = 320, 1024, 1280


@pytest.fixture
def factors() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, matrix = torch.randn(ROWS, INNER), torch.randn(INNER, COLUMNS) / 32
    return x.requires_grad_(), matrix.requires_grad_(), torch.randn(ROWS, COLUMNS)


def rounded(tensor: Tensor) -> Tensor:
    return tensor.detach().bfloat16().double()


def is_rounded_from(result: Tensor, exact: Tensor) -> None:
    """The result is a bfloat16 number, and the exact one up to its rounding and that of float32 sums."""
    assert result.dtype == torch.float32
    assert torch.equal(result, result.bfloat16().float())
    assert ((result - exact).abs() <= 2**-8 * exact.abs() + 1e-4 * exact.abs().max()).all()


def test_a_product_and_its_gradients_are_of_rounded_numbers(factors: tuple[Tensor, ...]) -> None:
    x, matrix, grad = factors
    with rounded_products():
        out = product(x, matrix)
    out.backward(grad)  # outside of the block, and rounded all the same
    is_rounded_from(out.detach(), rounded(x) @ rounded(matrix))
    assert x.grad is not None and matrix.grad is not None
    is_rounded_from(x.grad, rounded(grad) @ rounded(matrix).T)
    is_rounded_from(matrix.grad, rounded(x).T @ rounded(grad))


def test_only_the_gradients_that_are_asked_for_are_taken(factors: tuple[Tensor, ...]) -> None:
    x, matrix, grad = factors[0].detach(), *factors[1:]
    with rounded_products():
        product(x, matrix).backward(grad)
    assert matrix.grad is not None and x.grad is None


def test_what_is_added_is_not_rounded(factors: tuple[Tensor, ...]) -> None:
    x, matrix, added = (factor.detach() for factor in factors)
    with rounded_products():
        plain = product(x, matrix)
        assert torch.equal(linear(x, matrix.T, added[0]), plain + added[0])
        assert torch.equal(add_product(added, x, matrix), added + plain)
        deep = linear(x.unflatten(0, (4, -1)), matrix.T, added[0])
    assert torch.equal(deep.flatten(0, 1), plain + added[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_else_products_are_those_of_torch(dtype: dense.DenseDtype, factors: tuple[Tensor, ...]) -> None:
    """Outside of the block, or where the numbers are too few for rounding to pay, or are not float32."""
    x, matrix, added = (factor.detach() for factor in factors)
    few = slice(None, dense.WORTH // INNER - 1)
    cases = [(x[: dense.WORTH // INNER - 1], matrix), (x, matrix[:, few]), (x.double(), matrix.double())]
    with rounded_products(dtype):
        for a, b in cases if dtype == "bfloat16" else [(x, matrix), *cases]:
            c = added[: len(a), : b.shape[1]].to(a.dtype)
            assert torch.equal(product(a, b), a @ b)
            assert torch.equal(linear(a, b.T, c[0]), torch.nn.functional.linear(a, b.T, c[0]))
            assert torch.equal(add_product(c, a, b), torch.addmm(c, a, b))


def test_blocks_nest() -> None:
    seen = []
    x = torch.ones(1024, 1024) + 2**-10  # rounds to one
    with rounded_products():
        with rounded_products("float32"):
            seen.append(product(x, x)[0, 0].item())
        seen.append(product(x, x)[0, 0].item())
    seen.append(product(x, x)[0, 0].item())
    assert seen[1] == 1024 < seen[0] == seen[2]


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_auto_rounds_on_cpus_with_instructions_for_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for native in (False, True):
        monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda native=native: native)
        wanted = "bfloat16" if native and device == "cpu" else "float32"
        assert dense_dtype(torch.device(device)) == wanted
    assert dense_dtype(torch.device(device), "bfloat16") == "bfloat16"
    assert dense_dtype(torch.device(device), "float32") == "float32"
    assert candidate_dtype(torch.device("cpu")) == "bfloat16"


@pytest.mark.parametrize("glu", [False, True])
def test_an_encoder_is_rounded_before_its_activation(glu: bool) -> None:
    config = parse_layer({"method": "mxd", "num_units": 4, "sparsity": {"kind": "topk", "k": 1}})
    encoder = DenseEncoder(config.resolve(MLPShape(512, 512, 1024, "relu", glu)))  # type: ignore[arg-type]
    x = torch.randn(512, 512)
    with rounded_products():
        z = encoder(x)
    pre = (x.bfloat16() @ encoder.weight.bfloat16().T).float() + encoder.bias
    if encoder.glu_weight is None:
        assert torch.equal(z, pre.relu())
    else:
        gate = (x.bfloat16() @ encoder.glu_weight.bfloat16().T).float() + encoder.glu_bias
        assert torch.equal(z, gate.relu() * pre)
