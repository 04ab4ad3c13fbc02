"""The Triton kernels against dense products in float64: compiled where there is a GPU, else in Triton's interpreter.

The interpreter runs what the kernels say, not what the compiler makes of it; that they compile is a test of its own.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from mxd.ops import devices, reference, sparse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [  # tokens, k, units, d
    (1, 1, 1, 1),
    (7, 1, 5, 6),
    (3, 4, 4, 300),  # several blocks of columns in every kernel, the last one partial
    (5, 8, 8, 256),  # whole tiles
    (2, 45, 50, 70),  # several blocks of slots
    (20, 2, 2, 5),  # lists of several tiles
    (3, 2, 60, 20),  # units never chosen
]
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-5},  # one rounding, at the end, where the interpreter cuts off
}
GUARD = 4096
NAMES = {"gather_sum", "gather_dot", "sum_lists", "largest", "lowered"}


@pytest.fixture(scope="module")
def kernels():
    """The file under test. Other files may have imported triton already, and so its own ``tl.sum`` for the compiler."""
    triton = pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            from triton.runtime.interpreter import InterpretedFunction

            patch.setenv("TRITON_INTERPRET", "1")
            for name in ("sum", "cumsum"):
                patch.setattr(triton.language, name, InterpretedFunction(getattr(triton.language, name).fn))
        from mxd.ops import kernels

        yield kernels


@pytest.fixture(autouse=True)
def guarded(monkeypatch):
    """Outputs begin as NaN, inside a larger buffer of NaN that must stay so: nothing is left out, nothing overrun."""
    torch.manual_seed(0)
    made = []
    plain = torch.Tensor.new_empty

    def new_empty(like, *shape, **options):
        if options:  # one of the interpreter's own
            return plain(like, *shape, **options)
        size = torch.Size(shape).numel()
        buffer = torch.full((size + 2 * GUARD,), torch.nan, dtype=like.dtype, device=like.device)
        made.append((buffer, size))
        return buffer[GUARD : GUARD + size].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    yield
    for buffer, size in made:
        assert buffer[:GUARD].isnan().all()
        assert buffer[GUARD + size :].isnan().all()


def draw(tokens, k, units, d, dtype=torch.float32):
    """Random values, indices (distinct within a row, as top-k gives them), weight rows and token rows."""
    values, weight, rows = (torch.randn(s, device=DEVICE).to(dtype) for s in [(tokens, k), (units, d), (tokens, d)])
    return values, torch.rand(tokens, units, device=DEVICE).topk(k).indices, weight, rows


def by_unit(indices, units):
    """The selection sorted by unit: positions, where each unit's begin, tokens."""
    flat = indices.reshape(-1)
    order = flat.argsort(stable=True)
    starts = torch.cat([flat.new_zeros(1), torch.bincount(flat, minlength=units).cumsum(0)])
    return order, starts, order // max(indices.shape[1], 1)


def check(kernels, values, indices, weight, rows):
    """Compare all three, in the dtype of the weight and the rows."""
    v, w, r = (t.double() for t in (values, weight, rows))
    code = v.new_zeros(len(v), len(w)).scatter_add(1, indices, v)
    pairs = [
        (kernels.gather_sum(values, indices, weight), reference.sparse_decode(v, indices, w)),
        (kernels.gather_dot(rows, indices, weight), (r @ w.T).gather(1, indices)),
        (kernels.sum_lists(values, rows, *by_unit(indices, len(w))), code.T @ r),
    ]
    for got, expected in pairs:
        torch.testing.assert_close(got, expected.to(weight.dtype), **TOLERANCE[weight.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "k", "units", "d"), SHAPES)
def test_kernels_are_the_dense_products(kernels, tokens, k, units, d, dtype):
    check(kernels, *draw(tokens, k, units, d, dtype))


def test_units_repeated_in_a_row(kernels):
    values, _, weight, rows = draw(6, 5, 5, 7)
    check(kernels, values, torch.randint(2, (6, 5), device=DEVICE), weight, rows)
    check(kernels, values, torch.full((6, 5), 3, device=DEVICE), weight, rows)


def test_units_never_chosen_get_exact_zeros(kernels):
    values, indices, _, rows = draw(3, 2, 60, 20)
    out = kernels.sum_lists(values, rows, *by_unit(indices, 60))
    never = torch.bincount(indices.flatten(), minlength=60) == 0
    assert (out[never] == 0).all()
    assert (out[~never] != 0).all()


def test_non_contiguous_inputs(kernels):
    values, indices, weight, rows = draw(6, 3, 9, 10)
    spaced = [torch.stack([t, t + 1], -1)[..., 0] for t in (values, indices, weight, rows)]
    turned = [t.T.contiguous().T for t in (values, indices, weight, rows)]
    for inputs in (spaced, turned):
        assert not any(t.is_contiguous() for t in inputs)
        check(kernels, *inputs)
    plan = by_unit(indices, 9)
    got = kernels.sum_lists(values, rows, *(torch.stack([t, t + 1], -1)[..., 0] for t in plan))
    torch.testing.assert_close(got, kernels.sum_lists(values, rows, *plan))


@pytest.mark.parametrize(("tokens", "k", "units", "d"), [(0, 2, 4, 3), (2, 0, 4, 3), (0, 0, 4, 3), (2, 1, 4, 0)])
def test_nothing_to_sum_is_zeros_without_a_launch(kernels, tokens, k, units, d, monkeypatch):
    for name in ("_gather_sum", "_gather_dot", "_sum_lists"):
        monkeypatch.setattr(kernels, name, None)
    check(kernels, *draw(tokens, k, units, d))


def test_bfloat16_is_summed_in_float32(kernels):
    """One and 256 times 2**-9 is 1.5; sums kept in bfloat16 would stay at 1."""
    small = torch.full((1, 257), 2.0**-9, dtype=torch.bfloat16, device=DEVICE)
    small[0, 0] = 1
    one, each = torch.ones_like(small), torch.arange(257, device=DEVICE)[None]
    assert kernels.gather_sum(small, each, one.T).tolist() == [[1.5]]
    assert kernels.gather_dot(small, torch.zeros_like(each[:, :1]), one).tolist() == [[1.5]]
    assert kernels.sum_lists(small, one[:, :1], *by_unit(torch.zeros_like(each), 1)).tolist() == [[1.5]]


def test_float32_values_of_bfloat16_rows(kernels):
    """Gradients of a layer in lower precision: the values are not rounded before they are used."""
    values, indices, weight, rows = draw(4, 3, 6, 5, torch.bfloat16)
    check(kernels, torch.randn_like(values, dtype=torch.float32), indices, weight, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "width", "k"), [(1, 1, 1), (3, 40, 7), (2, 40, 40), (2, 5000, 9)])
def test_the_largest_are_found_whatever_their_sign(kernels, rows, width, k, dtype):
    """Several tiles of columns, ties, infinities of both signs, zeros of both, and NaN, which is above all."""
    numbers = torch.randn(rows, width, device=DEVICE).to(dtype)
    numbers[-1, 1::3] = numbers[-1, 0]
    numbers[:, width // 2 :] -= 2
    if width > 5:
        numbers[0, :5] = torch.tensor([torch.inf, -torch.inf, -0.0, 0.0, torch.nan])
    values, columns = kernels.largest(numbers, k)
    assert torch.equal(values.nan_to_num(99), numbers.gather(1, columns).nan_to_num(99))
    assert torch.equal(values.sort(descending=True).values.nan_to_num(99), numbers.topk(k).values.nan_to_num(99))
    assert (columns.diff() > 0).all()


def test_of_equal_numbers_the_first_are_taken_and_rows_may_lie_apart(kernels):
    numbers = torch.tensor([[1.0, 2, 1, 1, 3, 1, 9, 9], [-1, -1, -5, -1, -1, -3, 9, 9]], device=DEVICE)
    values, columns = kernels.largest(numbers[:, :6], 3)
    assert values.tolist() == [[1, 2, 3], [-1, -1, -1]] and columns.tolist() == [[0, 1, 4], [0, 1, 3]]
    values, columns = kernels.largest(torch.full((1, 3), -torch.inf, device=DEVICE), 2)
    assert values.tolist() == [[-torch.inf] * 2] and columns.tolist() == [[0, 1]]
    assert kernels.largest(numbers[:0], 3)[0].shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "d"), [(0, 3), (1, 1), (5, 40), (2, 3000)])
def test_rows_are_rounded_with_their_norms(kernels, count, d, dtype):
    """The norms of the errors are those of what was rounded, however it was rounded."""
    rows = torch.randn(d, count, device=DEVICE, dtype=dtype).T
    low, norms, errors = kernels.lowered(rows, d + 5)
    assert low.dtype == torch.bfloat16 and (low[:, d:] == 0).all()
    torch.testing.assert_close(low[:, :d].to(dtype), rows, rtol=2**-7, atol=1e-30)
    torch.testing.assert_close(norms, torch.linalg.vector_norm(rows, dim=1))
    torch.testing.assert_close(errors, torch.linalg.vector_norm(rows - low[:, :d], dim=1))


def test_the_operations_go_through_the_kernels_where_asked(kernels, monkeypatch):
    """Values and every gradient of a transcoder with a unit that is always on, by way of the kernels, are PyTorch's."""
    x, encoder, bias, decoder = (torch.randn(s, device=DEVICE) for s in [(6, 5), (40, 5), (40,), (40, 7)])
    bias[0] = 10

    def run():
        leaves = [t.detach().clone().requires_grad_() for t in (x, encoder, bias, decoder)]
        out = sparse.sparse_decode(*sparse.topk_linear(*leaves[:3], 4, "bfloat16"), leaves[3])
        out.square().sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    monkeypatch.setattr(sparse, "WORTH", (1, 0))
    expected, used = run(), set()
    monkeypatch.setattr(sparse, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(sparse, "device_type", lambda tensor: "cuda")
    monkeypatch.setattr(sparse, "SPAN", 4)
    for name in NAMES:
        own = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, own=own, name=name: used.add(name) or own(*args))
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)
    assert used == NAMES


def test_the_kernels_are_for_cuda_and_used_only_when_switched_on():
    try:
        for on in (False, True):
            devices.use_triton(on)
            assert not devices.runs_triton(torch.zeros(1))
            assert devices.runs_triton(SimpleNamespace(is_cuda=True)) == on
    finally:
        devices.use_triton(False)


COMPILE = """
import jaxtyping, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
with jaxtyping.install_import_hook("mxd", "beartype.beartype"):  # as under pytest
    from mxd.ops import kernels

KINDS = {"indices": "*i64", "order": "*i64", "starts": "*i64", "tokens": "*i64", "columns": "*i64", "low": "*bf16"}
KINDS |= {"K": "i32", "width": "i32", "stride": "i32", "out": "*i16", "bits": "*i16"}
SIZES = {"D": 768, "ROWS": 8, "COLUMNS": 64, "SUM": tl.float32, "BITS": 16, "SPECIAL": 0x7F80, "WIDTH": 776}
for kernel in (kernels._gather_sum, kernels._gather_dot, kernels._sum_lists, kernels._largest, kernels._lowered):
    ks = [parameter for parameter in kernel.params if parameter.name == "K"]
    print(all(k.do_not_specialize and not k.is_constexpr for k in ks))  # one compiled kernel for every K
    for dtype in ("*fp32", "*bf16"):
        sizes = {name: SIZES[name] for name in kernel.arg_names if name in SIZES}
        known = KINDS if "bits" in kernel.arg_names else {name: KINDS[name] for name in KINDS if name != "out"}
        kinds = {name: "constexpr" if name in sizes else known.get(name, dtype) for name in kernel.arg_names}
        source = triton.compiler.ASTSource(kernel, kinds, sizes)
        print(len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]) > 0)
"""


@pytest.mark.long
@pytest.mark.skipif(DEVICE == "cuda", reason="the tests above compile them")
def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path):
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False, env=env)
    assert done.stdout.split() == ["True"] * 15, done.stderr[-2000:]
