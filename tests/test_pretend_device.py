"""Training and questions on a pretend GPU: nothing mixes devices, and every wait for the GPU is known and counted.

Nothing here has run on a GPU; what a GPU computes is another question.
"""

from importlib import import_module

import pytest
import torch
from pretend import DEVICE, Pretended, pretended
from runs import small, tensors
from safetensors.torch import load, save
from variants import CASES, SPARSITIES, VARIANTS

from mxd.common.errors import LostError
from mxd.common.processes import Processes
from mxd.config import TrainingConfig
from mxd.data.activations import activation_batches
from mxd.data.reading import cached_batches
from mxd.evaluation.checkpoints import open_checkpoints
from mxd.layers import Code, MLPShape, parse_layer
from mxd.layers.encoder import DenseEncoder
from mxd.layers.gates import LinearGate
from mxd.layers.mxd import MxD
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen
from mxd.ops import Selection, sparse
from mxd.questions import EvaluationConfig
from mxd.training.saving import restore_tensors, tensors_of
from mxd.training.source import cache_activations
from mxd.training.step import new_trainee, train_step
from mxd.training.trainer import train

SHAPE = MLPShape(d_in=6, d_out=5, hidden=8, activation="gelu_tanh", glu=False)
CPU = torch.device("cpu")
TOKENS = 24
TRAINING = TrainingConfig.model_validate(
    {"recipe": "short", "tokens": 4 * TOKENS, "batch_tokens": TOKENS, "buffer_tokens": TOKENS}
    | {"candidates": "bfloat16", "clip_norm": 1.0, "accumulation": 1}
)

PROOF = ("number", "mxd/ops/sparse.py _from_candidates")
"""Is the choice of every row proven?"""
WAITS = {
    "topk": {PROOF: 1},
    "random_k": {PROOF: 1},
    "levels": {PROOF: 2},
    "batch_topk": {
        PROOF: 1,
        ("number", "mxd/layers/sparsity/batch_topk.py _full"): 1,
        ("number", "mxd/layers/sparsity/batch_topk.py _shortened"): 1,
    },
    "entmax": {("number", "mxd/layers/sparsity/simplex.py _threshold"): 1},
    "pair_topk": {("to the device", "mxd/layers/product_gate.py best_pairs"): 1},
}
"""Where a step waits for the GPU, by kind of sparsity; those that are not named never do."""
SIZES = ("number", "mxd/ops/sparse.py sizes")
"""How many tokens has each unit?"""
BY_UNIT = ("moe", "moe-bias", "smoe", "molt", "molt-rank-3")
"""Forms that work through their lists unit by unit."""
QUICK = {"mxd-topk", "mxd-random_k", "transcoder-groups-topk", "mxd-levels-levels", "smoe-topk", "transcoder-relu_l1"}


@pytest.fixture
def gpu():
    with pretended() as gpu:
        yield gpu


# The pretence itself


def test_mixing_devices_is_refused_as_on_a_gpu(gpu):
    here, there = torch.ones(3, 3), torch.ones(3, 3, device=DEVICE)
    assert isinstance(there, Pretended) and there.device == DEVICE and there.is_cuda and not here.is_cuda
    for mixed in (
        lambda: here + there,
        lambda: there @ here,
        lambda: torch.cat([here, there]),
        lambda: here[there > 0],
        lambda: here.add_(there),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    for numpy in (there.numpy, there.__array__):
        with pytest.raises(TypeError, match="cuda:0"):
            numpy()
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(2, device=DEVICE, generator=torch.Generator())
    assert torch.equal((there + torch.tensor(2.0)).cpu(), torch.full((3, 3), 3.0))  # a single number is no mixture


def test_every_way_to_wait_is_noted_and_no_other(gpu):
    there = torch.arange(4.0, device=DEVICE)
    (there.masked_fill(there > 1, 0) @ there + there[:2].sum()).exp().to(DEVICE).clone()
    there.to(DEVICE, torch.float64).index_select(0, torch.arange(2, device=DEVICE))
    assert not gpu.waits
    ways = {
        "number": [there.sum().item, there.tolist, lambda: bool(there.any()), lambda: float(there[0])],
        "size": [there.nonzero, lambda: there[there > 1], lambda: there.long().bincount()],
        "to the host": [there.cpu, lambda: there.to("cpu"), lambda: torch.zeros(4).copy_(there)],
        "to the device": [
            lambda: torch.ones(2).to(DEVICE),
            lambda: torch.tensor([1], device=DEVICE),
            lambda: there[[0, 1]],
            lambda: there[torch.tensor([0, 1])],
            lambda: there.copy_(torch.ones(4)),
        ],
    }
    for why, calls in ways.items():
        for call in calls:
            gpu.waits.clear()
            call()
            assert why in {wait.why for wait in gpu.waits}, (why, call)


# Steps


@pytest.mark.parametrize(
    ("tokens", "k", "units"), [(7, 3, 11), (20, 2, 2), (3, 2, 60), (0, 2, 4), (4, 0, 5), (5, 1, 1)]
)
def test_a_gpus_way_to_sort_by_unit_and_to_count_gives_the_same(tokens, k, units, gpu):
    torch.manual_seed(0)
    indices = torch.rand(tokens, units).topk(k).indices
    code = Code(torch.randn(tokens, k).relu(), indices)
    there = Code(code.activations.to(DEVICE), indices.to(DEVICE))
    gpu.waits.clear()
    found = Selection().by_unit(there.indices, units), there.active_units(units), there.active_count()
    assert not gpu.waits
    expected = Selection().by_unit(indices, units)
    for name in ("order", "starts", "tokens"):
        own, right = getattr(found[0], name).cpu(), getattr(expected, name)
        assert torch.equal(own, right) and own.dtype == right.dtype, name
    active = {int(unit) for unit in indices[code.activations > 0]}
    assert found[1].cpu().nonzero().flatten().tolist() == sorted(active)
    assert int(found[2]) == int((code.activations > 0).sum())


@pytest.mark.parametrize("span", [1, 2, 3, 64])
@pytest.mark.parametrize(("tokens", "k", "units"), [(9, 3, 11), (20, 2, 60), (6, 1, 1), (0, 2, 4), (4, 0, 5)])
def test_a_gpu_sums_long_lists_in_spans(tokens, k, units, span, gpu, monkeypatch):
    """Without waiting; unit 0 is on in every token, others in none."""
    torch.manual_seed(0)
    monkeypatch.setattr(sparse, "SPAN", span)
    indices, values = torch.rand(tokens, units).topk(k).indices, torch.randn(tokens, k, dtype=torch.float64)
    indices[:, :1] = 0
    rows, lengths, real = torch.randn(tokens, 5, dtype=torch.float64), [], sparse._sum_lists

    def noted(*args):
        lengths.append(args[3].diff())
        return real(*args)

    monkeypatch.setattr(sparse, "_sum_lists", noted)
    there = [tensor.to(DEVICE) for tensor in (values, indices, rows)]
    gpu.waits.clear()
    found = sparse._scatter_rows(*there, units, Selection())
    assert not gpu.waits
    code = torch.zeros(tokens, units, dtype=torch.float64).scatter_add(1, indices, values)
    torch.testing.assert_close(found.cpu(), code.T @ rows)
    if indices.numel():
        first, second = (length.cpu() for length in lengths)
        assert first.max() <= span and first.sum() == tokens * k
        assert len(second) == units and second.sum() == len(first) and second.max() <= tokens // span + 2


@pytest.mark.parametrize("units", [45, 48])
def test_a_gpu_dots_candidates_unsorted(units, gpu, monkeypatch):
    """The same units and values as on a CPU; infinite inputs lead to no unit that is not there."""
    torch.manual_seed(0)
    monkeypatch.setattr(sparse, "WORTH", (1, 0))
    x, weight, bias = torch.randn(20, 7), torch.randn(units, 7), torch.randn(units)
    with monkeypatch.context() as unsorted:
        unsorted.setattr(Selection, "by_unit", None)
        found = sparse.topk_linear(x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), 3, "bfloat16")
    order = found[1].cpu().argsort(dim=1)
    pre = torch.addmm(bias, x, weight.T).relu()
    expected = pre.topk(3).indices.sort(dim=1).values
    positive = pre.gather(1, expected) > 0
    assert torch.equal(found[1].cpu().gather(1, order)[positive], expected[positive])
    torch.testing.assert_close(found[0].cpu().gather(1, order), pre.gather(1, expected))
    x[0, 0], x[1, 0], weight[:, 0] = torch.inf, -torch.inf, weight[:, 0].abs()
    _, chosen = sparse.topk_linear(x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), 3, "bfloat16")
    assert chosen.cpu().max() < units
    _, chosen = sparse.topk_linear(x, weight, bias, 3, "bfloat16")
    assert chosen.max() < units


def test_a_code_of_all_units_comes_back_without_their_numbers(gpu):
    values = torch.randn(3, 5)
    for all_units, copies in ((True, 1), (False, 2)):
        indices = torch.arange(5, device=DEVICE).expand(3, -1)
        there = Code(values.to(DEVICE), indices, all_units)
        gpu.waits.clear()
        back = there.cpu()
        assert gpu.places() == {("to the host", "mxd/layers/gates.py cpu"): copies}
        assert torch.equal(back.activations, values) and back.indices.tolist() == [list(range(5))] * 3
        assert back.all_units == all_units


def test_random_k_draws_what_it_draws_on_a_cpu_and_keeps_the_number_of_draws_there(gpu):
    def built(seed, device):
        return layer_config("mxd", "random_k").build(seed).to(device).train()

    def drawn(layer):
        x = torch.ones(1, 6, device=layer.bias.device)
        return [layer.encode(x).activations.shape[1] for _ in range(9)]

    here, there, restored = built(7, CPU), built(7, DEVICE), built(1, DEVICE)
    gpu.waits.clear()
    first = drawn(there)
    assert first == drawn(here) and len(set(first)) > 2
    assert not gpu.waits
    restored.load_state_dict(there.state_dict())
    assert drawn(restored) == drawn(there) != first


def layer_config(variant, kind):
    return parse_layer({"num_units": 48} | VARIANTS[variant] | {"sparsity": SPARSITIES[kind]}).resolve(SHAPE)


def batches(count):
    torch.manual_seed(0)
    return [(torch.randn(TOKENS, SHAPE.d_in), torch.randn(TOKENS, SHAPE.d_out)) for _ in range(count)]


def take(trainee, steps, device):
    for number, (x, y) in steps:
        train_step(trainee, x.to(device), y.to(device), TRAINING, number)
    return {name: float(total) for name, total in trainee.stats.sums.items() if not total.dim()}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if "-".join(c) in QUICK else pytest.mark.long, id="-".join(c)) for c in CASES],
)
def test_every_method_trains_saves_and_restores_and_waits_where_it_must(case, gpu, monkeypatch):
    """The numbers are the CPU's; a state that is read on the CPU goes on exactly."""
    monkeypatch.setattr("mxd.ops.sparse.WORTH", (1, 0))
    config, steps = layer_config(*case), list(enumerate(batches(3)))
    trainee = new_trainee("it", 0, config, 0, DEVICE, TRAINING)
    plain = new_trainee("it", 0, config, 0, CPU, TRAINING)
    assert take(trainee, steps[:1], DEVICE) == pytest.approx(take(plain, steps[:1], CPU), rel=1e-4)
    x, y = (part.to(DEVICE) for part in steps[1][1])
    gpu.waits.clear()
    train_step(trainee, x, y, TRAINING, 1)
    variant, kind = case
    by_unit = {SIZES: 1} if variant in BY_UNIT and kind == "topk" else {}
    assert gpu.places() == WAITS.get(kind, {}) | by_unit, gpu.waits
    saved = load(save({name: tensor.cpu().contiguous() for name, tensor in tensors_of(trainee).items()}))
    assert all(tensor.device in (DEVICE, CPU) for tensor in tensors_of(trainee).values())
    restored = new_trainee("it", 0, config, 1, DEVICE, TRAINING)
    restore_tensors(restored, saved)
    assert take(restored, steps[2:], DEVICE) == take(trainee, steps[2:], DEVICE)
    for tensor in (*trainee.layer.parameters(), *restored.layer.parameters()):
        assert isinstance(tensor, Pretended)


@pytest.mark.parametrize(("tf32", "dense"), [("off", "none"), ("encoder", "tf32"), ("all", "tf32")])
@pytest.mark.parametrize("kind", ["topk", "relu_l1"])
def test_tf32_is_for_dense_encoders_and_never_for_the_choice_of_units(tf32, dense, kind, gpu, monkeypatch):
    """What torch is told while each part of a step runs; afterwards it is told what it was before."""
    matmul, told = torch.backends.cuda.matmul, {}

    def noted(part, function):
        return lambda *args: (told.setdefault(part, set()).add(matmul.fp32_precision), function(*args))[1]

    before = matmul.fp32_precision
    for owner, name, part in (
        (sparse, "_largest", "choice"),
        (LinearGate, "_scores", "choice"),
        (DenseEncoder, "forward", "encoder"),
        (MxD, "_decode", "decoder"),
    ):
        monkeypatch.setattr(owner, name, noted(part, getattr(owner, name)))
    trainee = new_trainee("it", 0, layer_config("mxd", kind), 0, DEVICE, TRAINING)
    trainee.layer.encoder.weight.register_hook(noted("backward", lambda gradient: None))
    ((x, y),) = batches(1)
    training = TRAINING.model_copy(update={"tf32": tf32, "candidates": "float32"})
    train_step(trainee, x.to(DEVICE), y.to(DEVICE), training, 0)
    assert told == {"choice": {"ieee"}} | {part: {dense} for part in ("encoder", "decoder", "backward")}
    assert matmul.fp32_precision == before == "none"


@pytest.mark.long
@pytest.mark.parametrize(("tf32", "base"), [("off", "none"), ("encoder", "none"), ("all", "tf32")])
def test_the_base_model_rounds_only_where_all_may(tf32, base, tmp_path, monkeypatch):
    told, record = set(), FrozenModel.record

    def noted(*args):
        told.add(torch.backends.cuda.matmul.fp32_precision)
        return record(*args)

    monkeypatch.setattr(FrozenModel, "record", noted)
    train(small(tmp_path, training={"tokens": 512, "tf32": tf32}))
    assert told == {base}


class Two(Processes):
    """The first of two processes, whose neighbour is always well."""

    def gather(self, value):
        return [value, None]

    def average(self, tensors):
        self.averaged.append(len(tensors))


def test_a_process_that_runs_out_of_memory_tells_the_others_before_gradients_are_averaged(gpu, monkeypatch):
    trainee = new_trainee("it", 0, layer_config("mxd", "topk"), 0, DEVICE, TRAINING, Two(0, 2))
    object.__setattr__(trainee.processes, "averaged", [])
    take(trainee, enumerate(batches(1)), DEVICE)
    assert len(trainee.processes.averaged) == 1

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    told = []
    monkeypatch.setattr(Two, "gather", lambda self, value: told.append(value) or [value, None])
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr("mxd.training.step.forward_backward", full)
        take(trainee, enumerate(batches(1)), DEVICE)
    assert told == [("OutOfMemoryError: CUDA out of memory", False)]
    monkeypatch.setattr(Two, "gather", lambda self, value: [value, ("OutOfMemoryError: CUDA out of memory", False)])
    with pytest.raises(LostError, match="rank 1 of 2 failed: OutOfMemoryError"):
        take(trainee, enumerate(batches(1)), DEVICE)
    assert len(trainee.processes.averaged) == 1


# The stream, a run, and every question


def test_the_stream_gives_a_cpus_batches_and_waits_a_few_times_a_window(gpu, build_model):
    model, there = build_model("gpt2"), load_frozen(build_model("gpt2").to(DEVICE))
    rows = torch.randint(5, 4096, (6, 16), dtype=torch.int32).numpy()
    options = {"batch_tokens": 24, "buffer_tokens": 48, "bos_id": int(rows[0, 0]), "forward_contexts": 2}

    def stream(model):
        return list(activation_batches(model, [1, 2], lambda n: iter(rows[n:]), **options))

    expected = stream(load_frozen(model))
    gpu.waits.clear()
    found = stream(there)
    windows, forwards, blocks = 2, 4, 2
    assert gpu.places() == {
        ("to the device", "mxd/data/activations.py _fill"): 2 * windows,  # ids, and which are kept
        ("to the device", "mxd/data/activations.py activation_batches"): windows,  # the order of the tokens
        ("number", "mxd/data/checks.py check_activations"): 2 * windows * blocks,
        ("number", "mxd/model/frozen.py record"): forwards,  # transformers looks for packed sequences
    }
    assert len(found) == len(expected) == 3
    for theirs, mine in zip(found, expected, strict=True):
        assert torch.equal(theirs.ids.cpu(), mine.ids) and theirs.cursor == mine.cursor
        for number, site in mine.sites.items():
            for a, b in zip(site, theirs.sites[number], strict=True):
                assert isinstance(b, Pretended)
                torch.testing.assert_close(b.cpu(), a)


def test_a_gpus_base_model_takes_one_kernel_for_gelu_and_a_cpus_or_given_one_stays_as_it_is(gpu, build_model):
    """The same function, up to rounding."""

    def kinds(model):
        return {type(block.mlp.act).__name__ for block in model.blocks}

    here, there = load_frozen("tiny-gpt2", device="cpu"), load_frozen("tiny-gpt2", device=str(DEVICE))
    given = load_frozen(build_model("gpt2").to(DEVICE))
    assert kinds(here) == kinds(given) == {"NewGELUActivation"} and kinds(there) == {"GELU"}
    ids = torch.arange(5, 29)[None]
    expected, found = (model.record(ids, [1, 3]) for model in (here, there))
    for number, site in expected.items():
        for a, b in zip(site, found[number], strict=True):
            assert isinstance(b, Pretended)
            torch.testing.assert_close(b.cpu(), a, rtol=1e-4, atol=1e-4)


def run(folder, device):
    return small(
        folder,
        model={"device": str(device)},
        replacements=[
            {"method": "mxd", "num_units": 64, "sparsity": {"kind": "random_k", "k": 4}},
            {"method": "transcoder", "num_units": 64, "skip": True, "sparsity": {"kind": "relu_l1"}},
            {"method": "topk_sae", "num_units": 64, "sparsity": {"kind": "topk", "k": 4}},
        ],
        training={"tokens": 2048, "save_every": 2, "accumulation": 1, "candidates": "bfloat16"},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on the pretend GPU."""
    with pretended():
        return train(run(tmp_path_factory.mktemp("there"), DEVICE))


@pytest.mark.long
def test_a_run_ends_as_on_a_cpu(trained, tmp_path):
    expected = tensors(train(run(tmp_path, CPU)))
    found = tensors(trained)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-2, atol=1e-3)


@pytest.mark.long
def test_a_cache_is_read_without_waiting_but_for_the_means_of_each_shard(tmp_path, gpu):
    location = str(tmp_path / "cache")
    cache_activations(run(tmp_path, CPU), location)
    expected = list(cached_batches(location, [2]))
    gpu.waits.clear()
    found = list(cached_batches(location, [2], device=DEVICE))
    shards = len({id(batch.means[2][0]) for batch in found})
    assert gpu.places() == {("to the device", "mxd/data/reading.py <dictcomp>"): 2 * shards}
    assert len(found) == len(expected) > shards
    for theirs, mine in zip(found, expected, strict=True):
        all_of = [(*batch.sites[2], *batch.means[2], batch.ids) for batch in (theirs, mine)]
        assert all(isinstance(a, Pretended) and torch.equal(a.cpu(), b) for a, b in zip(*all_of, strict=True))


ASKED = {
    "faithfulness": ("*", {"tokens": 256}),
    "units": ("*-stc-*", {"tokens": 256, "top": 1}),
    "structure": ("*-stc-*", {"tokens": 256}),
    "probing": ("*-mxd-*", {"sets": ["gender"], "limit": 40}),
    "subset": ("*-mxd-*", {"tokens": 128, "keep": [0.5], "draws": 2, "timings": 0}),
    "generation": ("*-mxd-*", {"limit": 1}),
    "rewrite": ("*-stc-*", {"limit": 4, "draws": 1, "strengths": [0.125]}),
    "steering": ("*-mxd-*", {"first": 1, "samples": 1, "tokens": 2}),
    "masking": ("*-stc-*", {"limit": 2}),
}
"""The questions that take seconds: the layers asked about, and how."""


def close(found, expected, where=""):
    """The same answers, numbers up to rounding; where a sample or a tie may fall otherwise, nothing is compared."""
    assert type(found) is type(expected), where
    if isinstance(found, dict):
        assert found.keys() == expected.keys(), where
        for key in found:
            close(found[key], expected[key], f"{where}.{key}")
    elif isinstance(found, float):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4, nan_ok=True), where


@pytest.mark.long
@pytest.mark.parametrize("question", ASKED)
def test_questions_are_answered_with_a_cpus_numbers(question, trained):
    layers, fields = ASKED[question]
    paths, held_out = sorted(trained.glob(f"block{layers}")), {"split": "validation"}
    answer = import_module(f"mxd.evaluation.{question}").answer
    how = getattr(EvaluationConfig.model_validate({question: fields}), question)
    expected = answer(open_checkpoints(paths, held_out, device="cpu"), how)["results"]
    with pretended() as gpu:
        found = answer(open_checkpoints(paths, held_out, device=str(DEVICE)), how)["results"]
    close(found, expected)
    assert paths and found
    waits = {where for why, where in gpu.places()}
    assert not any(where.startswith(("mxd/splice.py forward", "mxd/evaluation/walk.py see")) for where in waits)
    assert not any(why == "number" and where.endswith((" see", " count")) for why, where in gpu.places())  # totals stay
