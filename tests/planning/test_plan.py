"""What a run needs: costs found on the meta device are those of the real code, and the sums are right."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from command import mxd
from runs import small

from mxd.common import hardware
from mxd.common.errors import MxdError
from mxd.common.hardware import _group_limits, copy_speed, free_disk, product_speed
from mxd.data.spool import MOST_IN_MEMORY
from mxd.layers import LAYERS, MLPShape, size
from mxd.layers.objective import forward_backward
from mxd.model.loading import load_frozen, outline
from mxd.ops import metered_as
from mxd.ops.sparse import BOUNDS
from mxd.planning import memory as plan_module
from mxd.planning import process
from mxd.planning.layout import fitting_groups, plan_layers
from mxd.planning.memory import check_memory, plan_run, prepare
from mxd.planning.plan import peak
from mxd.planning.process import GZIP_RATIO, TEXT_BYTES, text_bytes
from mxd.planning.profiler import meter
from mxd.planning.time import Speeds, expected, product_seconds, step_times
from mxd.splice import Splice, recorder
from mxd.training.trainer import as_recorded, train

MIB = 2**20
EVERYTHING = [
    {"method": "mxd", "sparsity": {"kind": "topk", "k": 8}},
    {"method": "transcoder", "sparsity": {"kind": "random_k", "k": 8}},
    {"method": "transcoder", "skip": True, "sparsity": {"kind": "relu_l1"}},
    {"method": "cp_mumoe", "rank": 64, "sparsity": {"kind": "topk", "k": 8}},
    {"method": "topk_sae", "sparsity": {"kind": "topk", "k": 8}},
]
EXPERTS = [
    {"method": "tr_mumoe", "sparsity": {"kind": "topk", "k": 8}},
    {"method": "tucker_mumoe", "sparsity": {"kind": "topk", "k": 8}},
    {"method": "moe", "sparsity": {"kind": "topk", "k": 2}},
    {"method": "moe", "sparsity": {"kind": "relu_l1"}},
    {"method": "mumoe_block", "sparsity": {"kind": "topk", "k": 8}},
    {"method": "mxd", "levels": [None, 4], "sparsity": {"kind": "levels", "levels": [8, 2]}},
]


def test_a_meter_counts_products_traffic_and_what_is_alive() -> None:
    x, w = torch.empty(100, 30, device="meta"), torch.empty(30, 50, device="meta")

    def run() -> torch.Tensor:
        a = x @ w  # 20,000 bytes
        b = a.relu()  # as many
        del a
        return b.view(50, 100).sum()

    cost = meter(run)
    assert cost.flops == 2 * 100 * 30 * 50
    assert cost.peak == 2 * 20_000 and cost.largest == 20_000
    assert cost.moved == (4 * (3000 + 1500) + 20_000) + 40_000 + 20_004  # nothing for the view


def test_a_meter_answers_questions_about_numbers_that_are_not_there() -> None:
    x = torch.empty(5, dtype=torch.int64, device="meta")
    assert meter(lambda: float(x.sum()) == 0 and bool((x == 3).all()) and x.bincount(minlength=7)).flops == 0
    found = []
    meter(lambda: found.extend((float(x.sum()), bool((x == 3).all()), tuple(x.bincount(minlength=7).shape))))
    assert found == [0.0, True, (7,)]


@pytest.mark.parametrize(
    "fields", EVERYTHING + EXPERTS, ids=lambda fields: fields["method"] + fields["sparsity"]["kind"]
)
def test_a_step_costs_on_the_meta_device_what_it_costs_on_the_cpu(fields: dict) -> None:
    shape = MLPShape(64, 64, 256, "gelu_tanh", False)
    method = LAYERS[fields["method"]]
    config = size(method.model_validate(fields).resolve(shape), 16)

    def step(device: str) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            layer = config.with_defaults().build().train()
        x = torch.randn(2500, 64, device=device)
        if fields["sparsity"]["kind"] == "random_k":
            layer.sparsity.reach = 0  # draws no number
        forward_backward(layer, x, x)

    with metered_as("cpu"):
        there, here = meter(lambda: step("meta")), meter(lambda: step("cpu"))
    assert there.flops == here.flops > 0
    assert there.peak == pytest.approx(here.peak, rel=0.02)
    assert there.moved == pytest.approx(here.moved, rel=0.02)


@pytest.mark.parametrize("fields", (*EVERYTHING[:3], {"method": "molt", "sparsity": {"kind": "topk", "k": 4}}))
def test_on_a_device_without_sparse_operations_a_step_is_planned_as_dense_ones(fields: dict, monkeypatch) -> None:
    """MPS, say: what the meta device then says is what the CPU does without its sparse operations."""
    method = LAYERS[fields["method"]]
    config = size(method.model_validate(fields).resolve(MLPShape(32, 32, 64, "gelu_tanh", False)), 8)

    def step(device: str) -> None:
        with torch.device(device):
            layer = config.with_defaults().build().train()
        x = torch.randn(500, 32, device=device)
        if fields["sparsity"]["kind"] == "random_k":
            layer.sparsity.reach = 0  # draws no number
        forward_backward(layer, x, x)

    with metered_as("mps"):
        there = meter(lambda: step("meta"))
    sparse = []
    for name in ("cpu", "cuda"):
        with metered_as(name):
            sparse.append(meter(lambda: step("meta")).sparse)
    cpu, cuda = sparse
    assert cpu <= cuda <= 1.1 * cpu  # spans of lists are summed once more on a GPU
    assert bool(cpu) == (fields["sparsity"]["kind"] != "relu_l1")
    monkeypatch.setattr("mxd.ops.devices.DEVICES", ())
    here = meter(lambda: step("cpu"))
    assert there.flops == here.flops > 0 == there.sparse
    assert there.peak == pytest.approx(here.peak, rel=0.02)


def test_what_is_metered_is_what_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained_gpt2) -> None:
    """The function, the rows and the parts."""
    calls = {"mxd.planning.memory": [], "mxd.training.step": []}
    for name, seen in calls.items():

        def noted(layer, x, y, parts, *revived, seen=seen):
            seen.append((layer.config, x.shape, y.shape, parts))
            return forward_backward(layer, x, y, parts, *revived)

        monkeypatch.setattr(f"{name}.forward_backward", noted)
    train(small(tmp_path, replacements=EVERYTHING[::2], training={"accumulation": 2}), model=trained_gpt2)
    metered, trained = ({repr(call) for call in seen} for seen in calls.values())
    assert metered == trained and len(trained) == 3


def test_products_of_a_step_are_those_that_none_avoids(tmp_path: Path) -> None:
    plan = plan_run(small(tmp_path, replacements=EVERYTHING))
    d, hidden = 128, 512
    units = {name: layer.num_units for name, (_, layer) in plan.replacements.items()}
    flops = {name: work.flops for name, work in plan.work.items()}
    encoder = 2 * 2 * d * hidden  # forward, and for its own gradient
    assert flops["block2-mxd-k8"] == 2 * d * units["block2-mxd-k8"] + encoder + 3 * 2 * hidden * d
    assert flops["block2-tc-randomk8"] == 2 * d * units["block2-tc-randomk8"]
    rank = 3 * 2 * hidden * 64 + 3 * 2 * 64 * d
    assert flops["block2-cp-mumoe-r64-k8"] == 2 * d * units["block2-cp-mumoe-r64-k8"] + encoder + rank
    per_block = 2 * 12 * d * d + 2 * 2 * 128 * d  # attention over 128 positions; the last block ends with its MLP
    assert flops["base model"] == 3 * per_block


def test_memory_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    config = small(tmp_path, blocks=[1, 2], replacements=EVERYTHING[:2])
    plan = plan_run(config)
    steps, record = plan.memory["taking steps"], plan.memory["recording activations"]
    state = steps["replacements"] + steps["gradients"] + steps["moments"]
    assert plan.params == sum(layer.num_params for _, layer in plan.replacements.values())
    assert state == 16 * plan.params
    sites = 2 * 2 * 128 * 4
    training = config.training
    assert steps["activations"] == sites * (training.buffer_tokens + training.batch_tokens)
    assert training.tokens > training.buffer_tokens and record["activations"] == sites * training.buffer_tokens
    assert steps["base model"] == 4 * sum(p.numel() for p in outline("tiny-gpt2").module.parameters())
    assert peak(plan.memory) == max(((n, sum(p.values())) for n, p in plan.memory.items()), key=lambda item: item[1])
    assert plan.disk["layers"] == 4 * plan.params and plan.disk["3 states"] >= 3 * 12 * plan.params
    once = plan_run(small(tmp_path, training={"tokens": training.buffer_tokens}))
    assert "gradients" not in once.memory["recording activations"]  # one window: recorded before the first step


def test_a_plan_needs_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = outline("tiny-gpt2")
    shape.config.save_pretrained(tmp_path / "model")
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["config.json"]
    here = plan_run(small(tmp_path, model={"source": str(tmp_path / "model")}))
    assert here.work == plan_run(small(tmp_path)).work
    loaded = plan_run(small(tmp_path), load_frozen("tiny-gpt2", device="cpu").module)
    assert loaded.work == here.work and loaded.replacements == here.replacements
    with pytest.raises(MxdError, match=r"cannot load base model .*; expected .*a local folder with a config.json"):
        outline(tmp_path)


def test_half_precision_halves_the_base_model_alone(tmp_path: Path) -> None:
    whole, half = (plan_run(small(tmp_path, model={"dtype": dtype})) for dtype in ("float32", "bfloat16"))
    a, b = whole.memory["recording activations"], half.memory["recording activations"]
    assert b["base model"] == a["base model"] // 2 and b["forward"] < 0.8 * a["forward"]
    assert b["activations"] == a["activations"]


@pytest.mark.long
def test_batches_are_split_in_as_few_parts_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = {"batch_tokens": 4096, "buffer_tokens": 4096, "tokens": 8192}
    monkeypatch.setattr(process, "resident", lambda: 500 * MIB)  # it grows while the test runs
    dense = [{"method": "transcoder", "sparsity": {"kind": "relu_l1"}}]  # whose codes are as large as can be
    config = small(tmp_path, replacements=dense, training=batches)
    given = [small(tmp_path, replacements=dense, training={**batches, "accumulation": n}) for n in (1, 2, 4)]
    needs = [peak(plan_run(one).memory)[1] for one in given]
    assert needs[0] > needs[1] + 20 * MIB > needs[2] + 30 * MIB
    assert plan_run(config).accumulation == 1
    for free, number in ((needs[0] + 5 * MIB, 1), (needs[1] + 5 * MIB, 2), (needs[2] + 5 * MIB, 4)):
        monkeypatch.setattr(plan_module, "free_memory", lambda device, free=free: free)
        assert prepare(config)[0].training.accumulation == number
    monkeypatch.setattr(plan_module, "free_memory", lambda device: MIB)
    with pytest.raises(MxdError, match=r"set training.accumulation to auto"):
        prepare(config)


@pytest.mark.long
def test_a_resumed_run_keeps_its_number_of_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(tmp_path)
    monkeypatch.setattr(plan_module, "_fits", lambda plan: plan.accumulation == 2)
    folder = train(config)
    assert yaml.safe_load((folder / "config.yaml").read_text())["training"]["accumulation"] == 2
    monkeypatch.undo()
    assert plan_run(config).accumulation == 1
    assert as_recorded(config).training.accumulation == 2
    assert train(config, resume=True) == folder  # and is not refused as another config
    other = small(tmp_path, training={"accumulation": 4})
    assert as_recorded(other) == other


def test_what_cannot_fit_is_refused_with_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(tmp_path, training={"buffer_tokens": 65536})
    plan = plan_run(config)
    needed = peak(plan.memory)[1]
    monkeypatch.setattr(plan_module, "free_memory", lambda device: needed)
    check_memory(config, plan)
    monkeypatch.setattr(plan_module, "free_memory", lambda device: needed - 1)
    with pytest.raises(MxdError, match=r"iB are free on cpu: .*activations \d.*Lower training.buffer_tokens"):
        check_memory(config, plan)
    monkeypatch.undo()
    monkeypatch.setattr(plan_module, "free_disk", lambda folder: sum(plan.disk.values()) - 1)
    with pytest.raises(MxdError, match=r"iB are free at .*3 states \d.*Choose another folder"):
        check_memory(config, plan)
    beside = replace(plan, memory={"a": {"b": 1}}, host={"a": {"b": 2**60}})
    with pytest.raises(MxdError, match="free on the host"):
        check_memory(config, beside)


@pytest.mark.long
def test_the_seconds_of_a_step_follow_the_formula(tmp_path: Path) -> None:
    config = small(tmp_path, blocks=[1, 2], replacements=EVERYTHING[:1])
    speeds = Speeds(products=1e9, rounded=4e9, base=2e9, copies=1e8, network=1e7)
    tokens, site = config.training.batch_tokens, 2 * 128 * 4
    one = step_times(plan_run(config), tokens, speeds)
    work = plan_run(config).work
    base = work.pop("base model")
    assert one.base == pytest.approx(tokens * (base.flops / 2e9 + base.moved / 1e8))
    assert one.steps == pytest.approx(tokens * sum(w.flops / 1e9 + w.moved / 1e8 for w in work.values()))
    assert one.exchange == one.gradients == 0
    apart = step_times(plan_run(config, world=2), tokens, speeds)  # a block each
    assert apart.base == pytest.approx(one.base / 2) and apart.steps == pytest.approx(one.steps / 2)
    assert apart.optimizer == pytest.approx(one.optimizer / 2) and apart.gradients == 0
    assert apart.exchange == pytest.approx(tokens * site / 2 / 1e7)  # half of its block's rows come from the other
    shared = step_times(plan_run(config, world=2, groups=1), tokens, speeds)
    assert shared.optimizer == pytest.approx(one.optimizer)  # each takes the whole step
    assert shared.steps == pytest.approx(one.steps / 2, rel=0.1)  # but for the weights, which both read
    params = sum(layer.num_params for _, layer in plan_run(config).replacements.values())
    assert shared.gradients == pytest.approx(4 * params / 1e7)  # 2 (s - 1) / s of them, for s = 2
    assert shared.exchange == pytest.approx(tokens / 2 * 2 * site / 2 / 1e7)
    assert step_times(plan_run(config), tokens, speeds, factor=3.0).step == pytest.approx(3 * one.step)


def test_products_in_bfloat16_are_counted_apart_and_take_their_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mxd.ops.sparse.WORTH", (1, 0))
    found = {
        candidates: plan_run(
            small(tmp_path, replacements=EVERYTHING[1:2], training={"candidates": candidates, "accumulation": n})
        )
        for candidates, n in (("float32", 1), ("bfloat16", 2))
    }
    (name,) = found["float32"].replacements
    exact, rounded = (plan.work[name] for plan in found.values())
    _, layer = found["float32"].replacements[name]
    bounds = 2 * BOUNDS * layer.num_units  # columns that carry the proof
    assert (exact.rounded, rounded.rounded) == (0, 2 * layer.d_in * layer.num_units + bounds)
    assert exact.flops == rounded.flops - bounds
    speeds = Speeds(products=1e9, rounded=4e9, base=2e9, copies=1e8)
    saved = product_seconds(exact, speeds) - product_seconds(rounded, speeds)
    assert saved == pytest.approx(rounded.rounded * (1 / 1e9 - 1 / 4e9) - bounds / 1e9)


def test_dense_products_in_bfloat16_are_counted_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxd.ops.dense.WORTH", 1)
    work = {}
    for dense in ("float32", "bfloat16"):
        plan = plan_run(
            small(tmp_path, replacements=EVERYTHING[:1], training={"candidates": "float32", "dense": dense})
        )
        name = min(plan.replacements)
        work[dense] = plan.work[name]
    _, layer = plan.replacements[name]
    # Forward, and the gradients of weights and hidden states: three products with D, two with the encoder.
    assert work["float32"].rounded == 0
    assert work["bfloat16"].rounded == 2 * layer.hidden * (3 * layer.d_out + 2 * layer.d_in)
    assert work["float32"].flops == work["bfloat16"].flops


@pytest.mark.long
def test_a_measured_rate_takes_the_place_of_the_model(tmp_path: Path) -> None:
    config = small(tmp_path, blocks=[1, 2], replacements=EVERYTHING[:1])
    plan = plan_run(config, world=2)
    _, times = expected(config, plan, tokens_per_second=1000.0)
    rate = config.training.batch_tokens / times.step
    assert rate == pytest.approx(2000.0)  # two blocks alike on two processes, and a network that takes no time
    _, slower = expected(config, plan, network=1e-6, tokens_per_second=1000.0)
    assert slower.exchange > 1 and slower.step > times.step


@pytest.mark.long
def test_the_command_prints_every_part_and_writes_all_numbers(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "plan.json"
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(small(tmp_path).model_dump(mode="json")))
    code, out, _ = mxd(capsys, "plan", config, "--json", file, "--processes", "2", "--groups", "1", "--network", "1")
    assert code == 0
    for word in ("block2-mxd-k8", "base model", "gradients", "moments", "forward", "largest step", "3 states"):
        assert word in out
    assert "2 processes, groups of 2" in out and out.endswith("it fits\n")
    found = json.loads(file.read_text())
    (name, unfactorised), *_ = found["unfactorised"].items()
    assert f"{unfactorised:,}" in out and unfactorised > found["replacements"][name]
    assert found["peak_bytes"] == max(sum(parts.values()) for parts in found["memory_bytes"].values())
    assert not (tmp_path / "r").exists()
    code, _, err = mxd(capsys, "plan", config, "--blocks", "[99]")
    assert code == 1 and "out of range" in err
    code, _, err = mxd(capsys, "plan", config, "--processes", "2", "--groups", "3")
    assert code == 1 and "cannot make 3 groups" in err


def test_limits_of_control_groups_count(tmp_path: Path) -> None:
    def group(path: Path, most: str, used: int, cached: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "memory.max").write_text(f"{most}\n")
        (path / "memory.current").write_text(f"{used}\n")
        (path / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")

    root, own = tmp_path / "cgroup", tmp_path / "own"
    group(root / "job", "1000", 700, 50)
    group(root / "job" / "step", "max", 700, 50)
    own.write_text("4:memory:/elsewhere\n0::/job/step\n")
    assert list(_group_limits(root, own)) == [350]
    assert list(_group_limits(root, tmp_path / "none")) == []


@pytest.mark.long
def test_speeds_and_free_disk_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "LENGTH", 0.01)
    cpu = torch.device("cpu")
    assert product_speed(cpu) > 1e8 and copy_speed(cpu) > 1e7
    assert free_disk(tmp_path / "not" / "there") == pytest.approx(free_disk(tmp_path), rel=0.1)


def test_the_memory_of_a_text_is_that_of_all_its_files_whatever_names_them(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text('{"text": "words"}\n' * 100)
    (tmp_path / "packed.jsonl.gz").write_bytes(b"." * 50)
    plain = sum(file.stat().st_size for file in tmp_path.glob("*.jsonl"))
    for source, total in (("*.jsonl", plain), ("0.jsonl", plain // 2), ("*.gz", 50 * GZIP_RATIO), ("none.txt", 0)):
        config = small(tmp_path / "runs", data={"source": str(tmp_path / source)})
        assert text_bytes(config) == TEXT_BYTES * total
    with (tmp_path / "0.jsonl").open("ab") as file:
        file.truncate(10 * MOST_IN_MEMORY)
    assert (
        text_bytes(small(tmp_path / "runs", data={"source": str(tmp_path / "*.jsonl")})) == TEXT_BYTES * MOST_IN_MEMORY
    )


def test_what_was_planned_before_changes_no_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards are kept, since many runs of one base model may follow each other: each with its own layers below."""
    monkeypatch.setattr(plan_module, "_FORWARDS", {})
    base = process.base_process(small(tmp_path, blocks=[1]), None)
    (layer,) = (layer for _, layer in plan_layers(small(tmp_path, blocks=[1]), base.shape).values())
    ways = [((), "same"), (((1, layer),), "same"), (((1, layer),), "base")]
    after = [plan_module._forward(base, (2, 16), (2,), *way) for way in ways]
    assert len({cost.flops for cost in after}) == 3
    for way, cost in zip(ways, after, strict=True):
        plan_module._FORWARDS.clear()
        assert plan_module._forward(base, (2, 16), (2,), *way) == cost


@pytest.mark.long
@pytest.mark.parametrize("targets", ["same", "base"])
def test_blocks_one_after_the_other_need_the_memory_of_the_last_and_the_work_of_all(
    tmp_path: Path, targets: str
) -> None:
    """Against the meter at every block, through the layers below."""
    config = small(tmp_path, blocks=[1, 2, 3], training={"inputs": "spliced", "targets": targets, "accumulation": 1})
    plan, side_by_side = plan_run(config), plan_run(small(tmp_path, blocks=[1, 2, 3], training={"accumulation": 1}))
    assert plan.replacements == side_by_side.replacements and plan.phases == 3
    one = plan.params // 3
    needed = plan.memory["taking steps"]
    assert needed["layers below"] == plan.memory["recording activations"]["layers below"] == 4 * 2 * one
    assert (needed["replacements"], needed["moments"]) == (4 * one, 8 * one)
    assert needed["activations"] == side_by_side.memory["taking steps"]["activations"] // 3
    assert plan.disk == side_by_side.disk | {"3 states": side_by_side.disk["3 states"] // 3}
    shape, layers = outline("tiny-gpt2"), {}
    shape.module.float()
    ids = torch.zeros(config.data.forward_contexts, config.data.context, dtype=torch.int64, device="meta")
    flops = 0
    for number, layer in plan.replacements.values():
        record = recorder(Splice(shape, layers), targets == "base")
        flops += meter(partial(record, ids, [number])).flops
        with torch.device("meta"):
            layers[number] = layer.build()
    work = dict(plan.work)
    assert work.pop("base model").flops * ids.numel() == pytest.approx(flops, rel=1e-9)
    assert work == {name: work for name, work in side_by_side.work.items() if name != "base model"}
    with pytest.raises(MxdError, match="cannot make 2 groups"):
        plan_run(config, world=2, groups=2)


@pytest.mark.long
def test_where_all_blocks_do_not_fit_the_plan_says_which_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxd.planning.process.resident", lambda: 2**29)  # else what is loaded meanwhile counts
    one = {"accumulation": 1}
    config = small(tmp_path, blocks="all", training=one)
    two, three = (peak(plan_run(small(tmp_path, blocks=[*range(6 - n, 6)], training=one)).memory)[1] for n in (2, 3))
    monkeypatch.setattr(plan_module, "free_memory", lambda device: (two + three) // 2)
    plan = plan_run(config)
    assert plan.fitting == ((0, 1), (2, 3), (4, 5))
    said = r"3 runs fit.*--blocks '\[0, 1\]' and --blocks '\[2, 3\]' and --blocks '\[4, 5\]'"
    with pytest.raises(MxdError, match=said):
        check_memory(config, plan)
    monkeypatch.setattr(plan_module, "free_memory", lambda device: two // 2)
    assert plan_run(config).fitting == ()
    with pytest.raises(MxdError, match=r"or train fewer replacements at a time\."):
        check_memory(config, replace(plan, fitting=()))


@pytest.mark.parametrize(("most", "groups"), [(6, [4, 3]), (4, [4, 3]), (3, [3, 2, 2]), (1, [1] * 7), (0, ())])
def test_groups_are_as_few_as_fit(most: int, groups: list[int]) -> None:
    found = fitting_groups(range(10, 17), lambda some: 0 < len(some) <= most)
    assert sorted(map(len, found), reverse=True) == list(groups)
    assert sum(found, ()) == (tuple(range(10, 17)) if groups else ())
