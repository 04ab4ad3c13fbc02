"""Faults of long runs, one at a time: nothing is lost, nothing wrong is written, and a message tells what to do.

A run that is resumed after the fault equals one without it, bit for bit.
"""

import errno
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from command import mxd
from runs import assert_same_run, metrics, small

from mxd.artifacts.checkpoint import load_layer
from mxd.common.errors import MxdError
from mxd.common.lock import locked
from mxd.common.stop import Interrupted, Preempted
from mxd.config import dump_config
from mxd.data.text import documents
from mxd.training.trainer import train

module = importlib.import_module("mxd.training.loop")
pytestmark = [pytest.mark.usefixtures("signals"), pytest.mark.long]

NAME = "block2-mxd-k8"
STREAM = {"data": {"streaming": True}, "training": {"tokens": 512 * 30, "save_every": 100}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, trained_gpt2):
    """The folder of the run without a fault: 12 steps, states after 5, 10 and 12, metrics after every second step."""
    return train(small(tmp_path_factory.mktemp("whole")), model=trained_gpt2)


@pytest.fixture
def config(tmp_path):
    """The same run, still to be made."""
    return small(tmp_path)


@pytest.fixture
def written(config):
    """Its config as a file."""
    file = config.folder.parent / "config.yaml"
    file.write_text(dump_config(config))
    return file


@pytest.fixture
def at_step(monkeypatch):
    """Do something in the middle of a step, counted from 1; once."""

    def plan(step, act):
        real, calls = module.train_step, []

        def train_step(*args):
            calls.append(1)
            real(*args)
            if len(calls) == step:
                act()

        monkeypatch.setattr(module, "train_step", train_step)

    return plan


def pieces():
    """Short documents: streamed text is tokenised 256 documents at a time."""
    return [text[i : i + 200] for text in documents("bundled", "validation") for i in range(0, 5000, 200)]


def states(config):
    return sorted(int(path.name.removeprefix("step-")) for path in (config.folder / "state").glob("step-*"))


def resumes(whole, config, model):
    """Continue the run; it ends as if nothing had been."""
    train(config, resume=True, model=model)
    assert_same_run(whole, config.folder)
    assert not list(config.folder.rglob(".*"))


@pytest.fixture
def at_forward(trained_gpt2):
    """Do something with block 2's MLP output in the base model's n-th forward over text."""
    hooks = []

    def plan(number, act):
        seen = []

        def hook(module, args, output):
            if args[0].ndim == 3 and args[0].shape[1] == 128:
                seen.append(1)
                return act(output) if len(seen) == number else None

        hooks.append(trained_gpt2.mlp(2).register_forward_hook(hook))
        return seen

    yield plan
    for hook in hooks:
        hook.remove()


def raising(error):
    def act(*args, **kwargs):
        raise error

    return act


def kill_self(*numbers):
    return lambda: [signal.raise_signal(number) for number in numbers]  # handled before the next


# Asked to stop


@pytest.mark.parametrize(
    ("number", "error", "code"), [(signal.SIGTERM, Preempted, 0), (signal.SIGINT, Interrupted, 130)]
)
def test_a_signal_saves_and_says_how_to_go_on(whole, config, trained_gpt2, at_step, monkeypatch, number, error, code):
    before = signal.getsignal(number)
    at_step(7, kill_self(number))
    with pytest.raises(error, match=r"step 7 of 12; everything is saved.*--resume") as caught:
        train(config, model=trained_gpt2)
    assert caught.value.exit_code == code
    assert signal.getsignal(number) is before
    assert states(config) == [5, 7]
    resumes(whole, config, trained_gpt2)


def test_the_command_line_ends_with_0_after_sigterm(written, at_step, capsys):
    at_step(3, kill_self(signal.SIGTERM))
    code, out, err = mxd(capsys, "train", written)
    assert (code, out) == (0, "")
    assert "stopping" in err and "mxd: stopped at step 3 of 12" in err and "--resume" in err


def test_the_second_ctrl_c_leaves_at_once(whole, config, trained_gpt2, at_step, monkeypatch):
    at_step(7, kill_self(signal.SIGINT, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(config, model=trained_gpt2)
    assert states(config) == [5]
    resumes(whole, config, trained_gpt2)


def test_an_ignored_ctrl_c_stays_ignored(whole, config, trained_gpt2, at_step):
    """As in a job that a script started in the background (``mxd train &``): it runs to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    during = []
    at_step(7, lambda: (signal.raise_signal(signal.SIGINT), during.append(signal.getsignal(signal.SIGINT))))
    train(config, model=trained_gpt2)
    assert during == [signal.SIG_IGN] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert_same_run(whole, config.folder)


WINDOWS = {"tokens": 16 * 2032, "batch_tokens": 2032, "buffer_tokens": 8 * 2032}
"""Two windows of 128 contexts, with 127 tokens in each: four forwards fill one."""


@pytest.fixture(scope="module")
def whole_windows(tmp_path_factory, trained_gpt2):
    """The folder of a run of two windows without a fault."""
    return train(small(tmp_path_factory.mktemp("windows"), training=WINDOWS), model=trained_gpt2)


@pytest.mark.parametrize("window", [0, 1])
def test_a_signal_is_heard_while_the_base_model_fills_a_window(
    whole_windows, tmp_path, trained_gpt2, at_forward, window
):
    """After the second forward no other begins."""
    config = small(tmp_path, training=WINDOWS)
    forwards = at_forward(4 * window + 2, lambda output: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted, match=f"stopped at step {8 * window} of 16"):
        train(config, model=trained_gpt2)
    assert len(forwards) == 4 * window + 2
    assert states(config) == ([5, 8] if window else [])
    resumes(whole_windows, config, trained_gpt2)


def test_a_signal_is_heard_while_the_text_is_waited_for(tmp_path, trained_gpt2, monkeypatch):
    config, over = small(tmp_path, **STREAM), threading.Event()

    def stalling(*args):
        yield from pieces()[:300]
        over.wait(30)

    def ask():
        lines = config.folder / "metrics.jsonl"
        while not (lines.exists() and '"step": 4' in lines.read_text()):
            time.sleep(0.05)
        if not over.wait(1):
            os.kill(os.getpid(), signal.SIGTERM)
        over.wait(4)
        over.set()

    monkeypatch.setattr("mxd.training.source.documents", stalling)
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        with pytest.raises(Preempted, match="everything is saved"):
            train(config, model=trained_gpt2)
        assert not over.is_set()
    finally:
        over.set()
    assert states(config)[0] >= 4


# The disk


@pytest.mark.parametrize("save", [1, 2, 3])
def test_a_disk_that_fills_up_in_a_save(whole, config, trained_gpt2, monkeypatch, save):
    state = importlib.import_module("mxd.training.state")
    real, calls = state.save_file, []

    def full(tensors, path):
        calls.append(1)
        if len(calls) == save:
            path.write_bytes(b"the first half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(state, "save_file", full)
        with pytest.raises(MxdError, match=r"cannot write .*state/step-.*No space left on device.*Free space"):
            train(config, model=trained_gpt2)
    assert states(config) == [5, 10, 12][: save - 1]
    resumes(whole, config, trained_gpt2)


def test_a_disk_that_fills_up_when_the_layers_are_written(whole, config, trained_gpt2, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("mxd.artifacts.checkpoint.save_file", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        with pytest.raises(MxdError, match=r"cannot write .*block2-mxd-k8.*No space left"):
            train(config, model=trained_gpt2)
    assert states(config) == [10, 12] and not (config.folder / NAME).exists()
    resumes(whole, config, trained_gpt2)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.argv = ["mxd", "train", *sys.argv[2:]]
from mxd.cli import main
main()
"""


def test_a_real_limit_on_the_size_of_files(whole, config, written, trained_gpt2):
    """The kernel refuses to write more than 100 kB into a file: text fits, a state does not."""
    done = subprocess.run([sys.executable, "-c", LIMITED, "100000", written], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"mxd: cannot write {config.folder}/state/step-000000005: ")
    assert sorted(path.name for path in config.folder.rglob("*")) == ["config.yaml", "metrics.jsonl", "run_id", "state"]
    resumes(whole, config, trained_gpt2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_metrics_that_cannot_be_written(whole, config, trained_gpt2, at_step, monkeypatch):
    (config.folder / "metrics.jsonl").parent.mkdir()

    def fill():
        (config.folder / "metrics.jsonl").rename(config.folder / "before")
        (config.folder / "metrics.jsonl").symlink_to("/dev/full")

    at_step(7, fill)
    with pytest.raises(MxdError, match=r"cannot write .*metrics.jsonl: .*No space left"):
        train(config, model=trained_gpt2)
    assert states(config) == [5]
    (config.folder / "before").rename(config.folder / "metrics.jsonl")
    resumes(whole, config, trained_gpt2)


def test_a_folder_that_may_not_be_written_to(tmp_path, capsys, monkeypatch, written):
    real = Path.mkdir

    def mkdir(path, *args, **options):
        if path.is_relative_to(tmp_path / "ro"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    code, _, err = mxd(capsys, "train", written, "--out", tmp_path / "ro")
    assert (code, err) == (
        1,
        f"mxd: cannot write to {tmp_path}/ro/r: Read-only file system; choose another folder with --out.\n",
    )


def test_lines_lost_from_the_metrics_are_said_and_not_made_up(config, trained_gpt2, at_step, monkeypatch, capfd):
    at_step(7, kill_self(signal.SIGTERM))
    with pytest.raises(Preempted):
        train(config, model=trained_gpt2)
    (config.folder / "metrics.jsonl").write_text("")
    train(config, resume=True, model=trained_gpt2)
    assert "metrics.jsonl is shorter than it was at step 7" in capfd.readouterr().err.replace("\n", " ")
    assert {line["step"] for line in metrics(config.folder)} == {8, 10, 12}


# The text and its activations


def test_a_nan_in_an_activation(whole, config, trained_gpt2, at_forward):
    at_forward(3, lambda output: output * float("nan"))
    with pytest.raises(MxdError, match="block 2: an activation is not finite"):
        train(config, model=trained_gpt2)
    assert states(config) == [5, 8]
    resumes(whole, config, trained_gpt2)


def test_a_stream_that_breaks_off(tmp_path, trained_gpt2, monkeypatch):
    data = importlib.import_module("mxd.data.tables")

    def breaking():
        yield from pieces()[:600]
        raise ConnectionError("the server hung up\nat once")

    def source(rows):
        monkeypatch.setattr("mxd.training.source.documents", lambda *args: rows)

    source(iter(pieces()))
    whole = train(small(tmp_path, run="whole", **STREAM), model=trained_gpt2)
    config = small(tmp_path, run="cut", **STREAM)
    source(row["text"] for _, row in data.hub_rows("org/set", ({"text": text} for text in breaking())))
    with pytest.raises(MxdError, match=r"reading 'org/set' failed: the server hung up$"):
        train(config, model=trained_gpt2)
    (step,) = states(config)
    assert 0 < step < 30
    source(iter(pieces()))
    resumes(whole, config, trained_gpt2)


def test_a_stream_that_ends_early(tmp_path, trained_gpt2, monkeypatch):
    monkeypatch.setattr("mxd.training.source.documents", lambda *args: iter(pieces()[:300]))
    config = small(tmp_path, **STREAM)
    with pytest.raises(MxdError, match=r"the text ended after .* tokens, before the 15,360 asked for"):
        train(config, model=trained_gpt2)
    (step,) = states(config)
    assert 0 < step < 30
    assert load_layer(config.folder / NAME).provenance.tokens == 512 * step


def test_a_damaged_shard_of_a_cache(tmp_path, whole, config, trained_gpt2):
    stream = importlib.import_module("mxd.training.source")
    cache = tmp_path / "cache"
    stream.cache_activations(small(tmp_path, training={"tokens": 512 * 40}), cache, model=trained_gpt2)
    shards = sorted(cache.rglob("*.safetensors"))
    assert len(shards) > 1
    cached = small(tmp_path, run="cached", data={"cache": str(cache)}, training={"tokens": 512 * 40})
    healthy, broken = (cached.model_copy(update={"run": name}) for name in ("healthy", "broken"))
    expected = train(healthy, model=trained_gpt2)
    good = shards[1].read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    shards[1].write_bytes(bad)
    with pytest.raises(MxdError, match=r"shard-000001"):
        train(broken, model=trained_gpt2)
    assert 0 < states(broken)[-1] <= 16
    shards[1].write_bytes(good)
    resumes(expected, broken, trained_gpt2)


# Memory


def impossible():
    torch.empty(2**60)


@pytest.mark.parametrize(
    "act",
    [impossible, raising(MemoryError()), raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))],
    ids=["cpu", "python", "cuda"],
)
def test_out_of_memory_in_a_step_says_what_to_lower(whole, config, trained_gpt2, at_step, monkeypatch, act):
    at_step(7, act)
    message = r"out of memory at step 6, in block2-mxd-k8.*accumulation.*buffer_tokens.*sizing\.expansion"
    with pytest.raises(MxdError, match=message):
        train(config, model=trained_gpt2)
    assert states(config) == [5]
    resumes(whole, config, trained_gpt2)


def test_out_of_memory_in_the_base_model(whole, config, trained_gpt2, at_forward):
    at_forward(3, lambda output: impossible())
    with pytest.raises(MxdError, match=r"out of memory after step 8, where the base model fills the buffer"):
        train(config, model=trained_gpt2)
    assert states(config) == [5, 8]
    resumes(whole, config, trained_gpt2)


def test_another_error_of_torch_is_not_taken_for_it(config, trained_gpt2, at_step):
    at_step(2, raising(RuntimeError("mat1 and mat2 shapes cannot be multiplied")))
    with pytest.raises(RuntimeError, match="shapes"):
        train(config, model=trained_gpt2)


# Two runs, one folder


HOLDER = """
import sys, time
from pathlib import Path
from mxd.common.lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_the_second_run_on_a_folder_is_refused_until_the_first_is_dead(whole, config, written, trained_gpt2, capsys):
    script = [sys.executable, "-c", HOLDER, config.folder]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        for words in (["train", written], ["train", written, "--resume"], ["compare", written]):
            code, out, err = mxd(capsys, *words)
            holder = f"process {other.pid} on {socket.gethostname()}"
            assert (code, out) == (1, "")
            assert (
                err.startswith(f"mxd: {config.folder} is in use by {holder}; wait until that run ends")
                and err.count("\n") == 1
            )
        assert [path.name for path in config.folder.iterdir()] == [".lock"]
        other.kill()
        other.wait()
    train(config, model=trained_gpt2)  # what the dead one left does not matter
    assert_same_run(whole, config.folder)
    assert not (config.folder / ".lock").exists()


def test_a_run_under_way_holds_its_folder(whole, config, trained_gpt2, at_step):
    refused = []

    def another():
        for resume in (False, True):
            with pytest.raises(MxdError, match=f"in use by process {os.getpid()} on") as caught:
                train(config, resume=resume, model=trained_gpt2)
            refused.append(caught)

    at_step(7, another)
    train(config, model=trained_gpt2)
    assert len(refused) == 2
    assert_same_run(whole, config.folder)


def test_a_folder_that_a_failed_start_made_is_gone(tmp_path):
    for _ in range(2):
        with pytest.raises(RuntimeError), locked(tmp_path / "a" / "b"):
            assert (tmp_path / "a" / "b" / ".lock").exists()
            raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "config.yaml").touch()
    assert [path.name for path in (tmp_path / "a").rglob("*")] == ["b", "config.yaml"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_said_and_used(whole, config, trained_gpt2, monkeypatch, capfd, number):
    monkeypatch.setattr("fcntl.flock", raising(OSError(number, os.strerror(number))))
    train(config, model=trained_gpt2)
    assert "lies on a file system without locks" in capfd.readouterr().err
    assert_same_run(whole, config.folder)
    assert not (config.folder / ".lock").exists()


# Killed, at the worst moments, and what lies around then


def test_a_kill_while_the_config_is_written_does_not_take_the_name(whole, config, trained_gpt2):
    config.folder.mkdir()
    (config.folder / ".config.yaml.0123abcd").write_text("run: r")
    train(config, model=trained_gpt2)
    assert_same_run(whole, config.folder)
    assert not list(config.folder.glob(".*"))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "deleted"])
def test_a_damaged_state_costs_only_the_steps_since_the_one_before(
    whole, config, trained_gpt2, at_step, monkeypatch, capfd, damage
):
    at_step(8, kill_self(signal.SIGTERM))
    with pytest.raises(Preempted):
        train(config, model=trained_gpt2)
    newest = config.folder / "state" / "step-000000008" / f"{NAME}.safetensors"
    raw = bytearray(newest.read_bytes())
    raw[len(raw) // 2] ^= 1
    if damage == "deleted":
        newest.unlink()
    else:
        newest.write_bytes(raw[:1000] if damage == "truncated" else raw)
    left = config.folder / f".{NAME}.0123abcd"
    left.mkdir()
    (left / "model.safetensors").touch()
    resumes(whole, config, trained_gpt2)
    message = capfd.readouterr().err
    assert f"{newest.parent} is damaged and skipped: {newest.name}" in message and "Continuing from step 5" in message
    assert (config.folder / "state" / "damaged-step-000000008").is_dir()


def test_clocks_do_not_matter(whole, config, trained_gpt2, at_step, monkeypatch):
    """The wall clock jumps back by a year, and the files of the newest state are the oldest."""
    year = 365 * 86_400
    real = time.time
    with monkeypatch.context() as patch:
        at_step(8, lambda: (patch.setattr(time, "time", lambda: real() - year), kill_self(signal.SIGTERM)()))
        with pytest.raises(Preempted):
            train(config, model=trained_gpt2)
        for path in (config.folder / "state" / "step-000000008").rglob("*"):
            os.utime(path, (0, 0))
        os.utime(config.folder / "state" / "step-000000008", (0, 0))
    resumes(whole, config, trained_gpt2)
    lines = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["seconds"] < 600 for line in lines)
