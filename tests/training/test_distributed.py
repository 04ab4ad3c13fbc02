"""Many processes (gloo, on this machine) train what one process trains, from the same tokens, and fail together."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from streams import write_files
from torch.distributed import TCPStore

from mxd.common.errors import MxdError
from mxd.common.processes import ALONE, Processes, _differences, launched, local_device
from mxd.config import parse_config
from mxd.data.exchange import RankPart
from mxd.layers.sparsity import TopKConfig
from mxd.layers.transcoder import TranscoderConfig
from mxd.planning.layout import parallel_layout
from mxd.training.source import cache_activations
from mxd.training.trainer import train

SCRIPT = Path(__file__).parents[1] / "launched.py"
STEPS, BATCH = 12, 512
LOSS_TOLERANCE = 1e-5
"""Relative: sums of the same float32 numbers in another order, over some steps of Adam."""


def config(out: Path, run: str, **training) -> dict:
    return {
        "run": run,
        "out": str(out),
        "blocks": [1, 2],
        "model": {"source": "tiny-gpt2", "device": "cpu"},
        "data": {"split": "validation"},
        "sizing": {"expansion": 9},
        "replacements": [
            {"method": "mxd", "sparsity": {"kind": "topk", "k": 8}},
            {"method": "transcoder", "skip": True, "sparsity": {"kind": "random_k", "k": 8}},
            {"method": "transcoder", "sparsity": {"kind": "relu_l1"}},
        ],
        "training": {"recipe": "short", "tokens": STEPS * BATCH, "batch_tokens": BATCH, "buffer_tokens": 2048}
        | {"log_every": 2, "save_every": 5, "accumulation": 1, "clip_norm": 1.0, **training},
    }


def launch(world: int, *trainees: dict, code: int = 0) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    found = subprocess.run(
        [*command, str(SCRIPT), *map(json.dumps, trainees)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert found.returncode == code, found.stderr[-6000:]
    return found


@contextmanager
def talking(what: str, world: int = 2) -> Iterator[list[subprocess.Popen]]:
    """Start tests/talking.py in so many processes, without torchrun, which would end the others when one ends."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place |= {"WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT.with_name("talking.py")), what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | place | {"RANK": str(rank)},
        )
        for rank in range(world)
    ]
    try:
        assert [process.stdout.readline() for process in started] == ["ready\n"] * world
        for process in started:  # all at once: their timeout is short
            process.stdin.write("go\n")
            process.stdin.flush()
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def said(process: subprocess.Popen) -> str:
    """Wait for the end of one that leaves with exit code 1; return what it said."""
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1, errors
    return errors


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("block*/model.safetensors"))
    return {f"{file.parent.name}/{k}": v for file in files for k, v in load_file(file).items()}


def assert_same_training(a: Path, b: Path, replacements: int = 6) -> None:
    """The same to float tolerance: every metric of every step, and every weight."""
    assert len(lines(a)) == replacements * STEPS / 2
    for left, right in zip(lines(a), lines(b), strict=True):
        assert (left["step"], left["replacement"]) == (right["step"], right["replacement"])
        for name in ("normalized_mse", "fvu", "l0"):
            assert right[name] == pytest.approx(left[name], rel=LOSS_TOLERANCE), (left["step"], name)
        assert right["dead_share"] == pytest.approx(left["dead_share"], abs=0.01)
    ours, theirs = weights(a), weights(b)
    assert ours.keys() == theirs.keys() and len(ours) > 8
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], atol=1e-5), name


def trained_on(folder: Path, parts: int) -> np.ndarray:
    """The token ids of every step's whole batch, put together from the processes of one group."""
    return np.concatenate([np.load(folder / f"{rank}.npy") for rank in range(parts)], axis=1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    out = tmp_path_factory.mktemp("alone")
    launch(1, {"config": config(out, "r"), "ids": str(out / "ids")})
    return out


@pytest.mark.long
@pytest.mark.parametrize("world, groups", [(2, (1, 2)), (4, (2, 4))])
def test_any_number_of_processes_trains_the_same(tmp_path: Path, alone: Path, world: int, groups: tuple[int]) -> None:
    trainees = [
        {"config": config(tmp_path, f"g{g}"), "groups": g if g < world else None, "ids": str(tmp_path / f"ids{g}")}
        for g in groups
    ]
    launch(world, *trainees)
    for g in groups:
        assert_same_training(alone / "r", tmp_path / f"g{g}")
        ids = trained_on(tmp_path / f"ids{g}", world // g)
        assert ids.shape == (STEPS, BATCH)
        assert (ids == trained_on(alone / "ids", 1)).all()


@pytest.mark.long
def test_processes_begin_at_the_same_fit(tmp_path: Path) -> None:
    """Second moments over parts of batches add up to one process's: in a group of two, divided, and in two groups."""
    mov = {"method": "mov", "num_units": 64, "sparsity": {"kind": "topk", "k": 8}}
    fitted = [{"method": "linear"}, {"method": "low_rank", "rank": 4}, mov]
    runs = {name: config(tmp_path, name) | {"replacements": fitted} for name in ("alone", "one", "shards", "two")}
    launch(1, {"config": runs["alone"]})
    launch(
        2,
        {"config": runs["one"], "groups": 1},
        {"config": runs["shards"], "groups": 1, "shard": True},
        {"config": runs["two"], "groups": 2},
    )
    for name in ("one", "shards", "two"):
        assert_same_training(tmp_path / "alone", tmp_path / name)


@pytest.mark.long
def test_processes_train_one_block_after_the_other(tmp_path: Path) -> None:
    """Two of them, which stop in between and go on, train what one does."""
    runs = {name: config(tmp_path, name, inputs="spliced", targets="base") for name in ("one", "two")}
    for run in runs.values():
        run["replacements"] = [{"method": "transcoder", "sparsity": {"kind": "batch_topk", "k": 8}}]
    launch(1, {"config": runs["one"]})
    launch(2, {"config": runs["two"], "stop": 2, "expect": "everything is saved"})
    launch(2, {"config": runs["two"], "resume": True})
    assert [line["replacement"][:6] for line in lines(tmp_path / "two")] == ["block1"] * 6 + ["block2"] * 6
    assert_same_training(tmp_path / "one", tmp_path / "two", replacements=2)


@pytest.mark.long
def test_processes_read_their_parts_of_a_cache_and_go_on_in_it(tmp_path: Path, alone: Path) -> None:
    """Written by two processes, read by two that stop, and by one that goes on."""
    run, cache = config(tmp_path, "r"), str(tmp_path / "cache")
    cached = run | {"data": run["data"] | {"cache": cache}}
    ids = [str(tmp_path / name) for name in ("two", "one")]
    first = {"config": cached, "groups": 1, "stop": 2, "ids": ids[0], "expect": "everything is saved"}
    launch(2, {"config": run, "cache": cache}, first)
    launch(1, {"config": cached, "resume": True, "ids": ids[1]})
    parts = [trained_on(tmp_path / "two", 2)[:8], trained_on(tmp_path / "one", 1)]
    assert (np.concatenate(parts) == trained_on(alone / "ids", 1)).all()
    assert_same_training(alone / "r", tmp_path / "r")


@pytest.mark.long
def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path, alone: Path) -> None:
    """Stopped by a SIGTERM to one process of two, resumed by one, then by four: no token twice, none left out.

    The two, and the four, divide the weights among them, too.
    """
    run = config(tmp_path, "r")
    two, one, four = (str(tmp_path / name) for name in ("two", "one", "four"))
    expect = "everything is saved"
    launch(
        2, {"config": run, "groups": 1, "shard": True, "stop": 2, "ids": two, "expect": expect}
    )  # heard after 8 steps
    launch(1, {"config": run, "resume": True, "stop": 1, "ids": one, "expect": expect})
    launch(4, {"config": run, "resume": True, "groups": 2, "shard": True, "ids": four})
    parts = [
        trained_on(tmp_path / name, n)[:steps] for name, n, steps in (("two", 2, 8), ("one", 1, 1), ("four", 2, 3))
    ]
    assert (np.concatenate(parts) == trained_on(alone / "ids", 1)).all()
    assert_same_training(alone / "r", tmp_path / "r")


@pytest.mark.long
def test_processes_read_a_stream_on_where_it_was(tmp_path: Path) -> None:
    """Stopped twice by a SIGTERM to one process of two, with an odd number of contexts in a window of activations."""
    hub = tmp_path / "hub"
    write_files(hub, "jsonl", [f"{i} is a number, and {i * i} its square." for i in range(1500)])
    jobs = []
    for run in ("whole", "r"):
        job = config(tmp_path, run, tokens=20 * BATCH)
        jobs.append(
            {"config": job | {"data": {"source": "org/name", "streaming": True, "context": 48}}, "hub": str(hub)}
        )
    whole, part = jobs
    launch(2, whole)
    expect = "everything is saved"
    launch(2, part | {"stop": 2, "expect": expect}, part | {"resume": True, "stop": 2, "expect": expect})
    bookmark = json.loads((tmp_path / "r" / "state" / "step-000000016" / "state.json").read_text())["cursor"][
        "bookmark"
    ]
    assert bookmark["place"]["window"] > 0
    launch(2, part | {"resume": True})
    ours, theirs = weights(tmp_path / "r"), weights(tmp_path / "whole")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.long
def test_a_fault_of_one_process_stops_all_and_loses_nothing(tmp_path: Path, alone: Path) -> None:
    run = config(tmp_path, "r")
    poisoned = {"config": run, "poison": [1, 1], "expect": "an activation is not finite"}
    other = {"config": run, "expect": "already holds a run"}
    launch(2, poisoned, other, {"config": run, "resume": True, "groups": 1})
    assert_same_training(alone / "r", tmp_path / "r")


@pytest.mark.long
def test_processes_that_were_told_different_things_write_nothing(tmp_path: Path) -> None:
    """Each field that differs is named, with who was told what; before any folder is made."""
    run, out = config(tmp_path / "out", "r"), tmp_path / "out"
    other = {"run": "other", "seed": 7, "training": run["training"] | {"lr": 0.5}}
    told = "run is 'r' in rank 0, 'other' in rank 1; seed is 0 in rank 0, 7 in rank 1; "
    told += "training.lr is None in rank 0, 0.5 in rank 1. Start all of them with the same"
    sparser = [run["replacements"][0] | {"sparsity": {"kind": "topk", "k": 4}}, *run["replacements"][1:]]
    launch(
        2,
        {"config": run, "own": {"1": {"config": run | other}}, "expect": told},
        {"config": run, "own": {"1": {"groups": 1}}, "expect": "--groups is None in rank 0, 1 in rank 1. Start"},
        {"config": run, "own": {"0": {"resume": True}}, "expect": "--resume is True in rank 0, False in rank 1. Start"},
        {"config": run, "own": {"1": {"config": run | {"replacements": sparser}}}}
        | {"expect": "settings: replacements.0.sparsity.k is 8 in rank 0, 4 in rank 1. Start"},
        {"config": run, "cache": str(out / "a"), "own": {"1": {"cache": str(out / "b")}}}
        | {"expect": f"settings: folder is '{out}/a' in rank 0, '{out}/b' in rank 1. Start"},
        {"config": run, "cache": str(out / "a"), "own": {"1": {"config": run | {"seed": 7}}}}
        | {"expect": "settings: seed is 0 in rank 0, 7 in rank 1. Start"},
    )
    assert not out.exists()


@pytest.mark.long
def test_a_killed_process_is_named_and_the_run_goes_on(tmp_path: Path, alone: Path) -> None:
    run = config(tmp_path, "r")
    killed = {"config": run, "groups": 1, "kill": [1, 7], "ids": str(tmp_path / "ids")}
    done = launch(2, killed | {"expect": "rank 1 of 2 ended or does not answer. The last save is intact"}, code=1)
    assert "AssertionError" not in done.stderr and [path.name for path in (tmp_path / "ids").iterdir()] == ["0.npy"]
    assert [path.name for path in (tmp_path / "r" / "state").iterdir()] == ["step-000000005"]
    launch(2, {"config": run, "groups": 1, "resume": True})
    assert_same_training(alone / "r", tmp_path / "r")


@pytest.mark.long
def test_the_first_process_that_lives_names_the_one_that_was_killed() -> None:
    with talking("kill", world=3) as (first, second, third):
        third.wait(100)
        assert "LostError, shared: rank 2 of 3 ended or does not answer. The last save is intact" in said(first)
        assert "LostError, shared: rank 2 of 3 ended or does not answer." in said(second)


@pytest.mark.long
def test_a_stopped_process_is_not_waited_for_after_sigterm() -> None:
    """The signal is heard while the other is waited for, and nobody waits longer than for a sign of life."""
    with talking("stop") as (first, second):
        assert first.stdout.readline() == "waiting\n"
        while psutil.Process(second.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        heard = said(first)
    assert heard.startswith("stopping once everything up to the last step is saved")
    assert "LostError, shared: rank 1 of 2 ended or does not answer. The last save is intact" in heard


@pytest.mark.long
def test_nobody_waits_longer_than_the_timeout() -> None:
    """Who gives no sign of life is named."""
    with talking("stop-late") as (first, _):
        assert "LostError, shared: rank 1 of 2 ended or does not answer." in said(first)


@pytest.mark.long
def test_where_all_live_one_of_them_took_longer_than_allowed() -> None:
    late = (
        "the 2 processes of the launch are alive but did not meet within 0.05 minutes; allow more time with --timeout"
    )
    with talking("late") as (first, second):
        assert f"LostError, own: {late} MINUTES." in said(first)
        assert said(second).startswith("LostError, own: ")


@pytest.mark.long
@pytest.mark.parametrize("what", ["fail", "leave"])
def test_what_one_process_raises_is_heard_by_all(what: str) -> None:
    """Its own error with all that belongs to it, and in the others one line that names it."""
    heard = {
        "fail": "LostError, shared: rank 1 of 2 failed: ValueError: an oversight. Earlier saves are intact.\n",
        "leave": "start the whole launch again with --resume.\nrank 1: out of luck\n",
    }
    own = {"fail": 'raise ValueError("an oversight")', "leave": "MxdError, own: out of luck\nand of memory\n"}
    with talking(what) as (first, second):
        assert said(first).endswith(heard[what])
        assert own[what] in said(second)


def test_a_runs_timeout_is_its_launchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def joined(minutes: float) -> None:
        raise TimeoutError(minutes)

    run = parse_config(config(Path("none"), "r") | {"timeout": 3})
    for where, begin in (("trainer", lambda: train(run)), ("source", lambda: cache_activations(run, "none"))):
        monkeypatch.setattr(import_module(f"mxd.training.{where}"), "launched", joined)
        with pytest.raises(TimeoutError, match=r"^3\.0$"):
            begin()


def test_differences_are_listed_field_by_field() -> None:
    told = [{"a": {"b": n // 9, "c": [1, 2]}, "d": [1] * (1 + n // 10)} for n in range(12)]
    del told[0]["a"]["c"]
    assert list(_differences("", told)) == [
        "a.b is 0 in ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more, 1 in ranks 9, 10 and 11",
        "a.c is None in rank 0, [1, 2] in ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more",
        "d is [1] in ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more, [1, 1] in ranks 10 and 11",
    ]
    assert not list(_differences("", [told[1]] * 3))


def plans(*sizes: int) -> dict:
    return {
        f"r{i}": (i % 2, TranscoderConfig(d_in=4, d_out=4, num_units=n, sparsity=TopKConfig(k=1)))
        for i, n in enumerate(sizes)
    }


def test_replacements_are_spread_by_their_size() -> None:
    layout = parallel_layout(plans(10, 40, 20, 12), world=4, batch_tokens=8, groups=2)
    assert layout.groups == (("r1",), ("r0", "r2", "r3"))
    assert layout.parts == 2
    assert layout.shares == (RankPart((1,), 0, 2), RankPart((1,), 1, 2), RankPart((0, 1), 0, 2), RankPart((0, 1), 1, 2))
    assert [share.rows(8) for share in layout.shares[:2]] == [slice(0, 4), slice(4, 8)]


def test_by_default_there_are_as_many_groups_as_can_be() -> None:
    counts = {world: len(parallel_layout(plans(1, 2, 3), world, batch_tokens=8).groups) for world in (1, 2, 3, 4, 6, 8)}
    assert counts == {1: 1, 2: 2, 3: 3, 4: 2, 6: 3, 8: 2}


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(MxdError, match=r"4 processes that train 3 replacements cannot make 4 groups; choose .* 1, 2"):
        parallel_layout(plans(1, 2, 3), 4, batch_tokens=8, groups=4)
    with pytest.raises(MxdError, match=r"the 3 processes of a group cannot divide training.batch_tokens = 8 equally"):
        parallel_layout(plans(1), 3, batch_tokens=8)


@pytest.mark.parametrize("world, rank", [("2", None), ("two", "0"), ("2", "2")])
def test_a_launch_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, world: str, rank: str | None) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(MxdError, match="do not name a process of a launch"), launched():
        pass


def test_each_process_takes_its_gpu_before_anything_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call to open a context would otherwise open it on GPU 0, in every process."""
    done: list[object] = []

    def refuse(*_: object, **__: object) -> None:
        done.append("joined")
        raise ValueError("there is no network here")

    for name, value in {"WORLD_SIZE": "8", "RANK": "6", "LOCAL_RANK": "6"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.set_device", done.append)
    monkeypatch.setattr("torch.distributed.init_process_group", refuse)
    with pytest.raises(MxdError, match="did not find each other"), launched():
        pass
    assert done == [2, "joined"]
    assert [local_device(name) for name in ("auto", "cuda", "cuda:1", "cpu")] == ["cuda:2", "cuda:2", "cuda:1", "cpu"]


def test_small_gradients_are_averaged_in_a_bucket_of_their_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    def all_reduce(tensor: torch.Tensor, group: object, async_op: bool) -> SimpleNamespace:
        sent.append(tensor.numel())
        tensor *= 3  # the other's are twice as large
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr("mxd.common.processes.dist.all_reduce", all_reduce)
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in ((3, 5), (512, 513), (7,), ())] + [torch.randn(2).double()]
    before = [tensor.clone() for tensor in tensors]
    Processes(0, 2).average(tensors)
    assert sent == [15 + 7 + 1, 2, 512 * 513]
    for tensor, old in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, 1.5 * old)


def test_alone_nobody_is_asked() -> None:
    x = torch.arange(3.0)
    with launched() as processes:
        assert processes == ALONE
        assert processes.gather(5) == [5] and processes.any(True) and not processes.any(False)
        assert torch.equal(processes.add(x.clone()), x) and torch.equal(processes.exchange(x, [3], [3]), x)
        processes.average([x])
        processes.agree({"a": 1})
        assert processes.split(1) == (0, ALONE)
        with pytest.raises(MxdError, match="1 processes cannot be divided into 2"):
            processes.split(2)
        with pytest.raises(MxdError, match="own"), processes.together():
            raise MxdError("own")
    assert torch.equal(x, torch.arange(3.0))
