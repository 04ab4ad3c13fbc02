"""The state of a run: what is saved comes back; what is damaged is passed over, said and kept; nothing good is lost."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from runs import seal_state
from safetensors.torch import save_file

from mxd.common.errors import MxdError
from mxd.common.files import clear_partials
from mxd.common.processes import Processes
from mxd.data.activations import Cursor
from mxd.training.state import Info, load_state, new_run, run_of, save_state

RUN = "0123456789abcdef" * 2


def about(step, parts="ab", **fields):
    """What is said beside the tensors of some parts."""
    given = {
        "run_id": RUN,
        "step": step,
        "tokens": 16 * step,
        "origin": {"seed": 0},
        "cursor": Cursor(batch=step, text="f" * 32),
        "counted": dict.fromkeys(parts, 16),
        "metrics_bytes": 100,
        "reported": {part: {"fvu": 0.5} for part in parts},
    }
    return Info(**given | fields)


def save(folder, step, keep=2):
    """A state of two parts whose numbers tell the step."""
    tensors = {"w": torch.full((9,), float(step), dtype=torch.float64), "t": torch.tensor(step)}
    return save_state(folder / "state", {"a": tensors, "b": tensors}, about(step), keep=keep)


def names(folder):
    return sorted(path.name for path in (folder / "state").iterdir())


def found(folder):
    """The step of the state that is found, checked to be whole."""
    state = load_state(folder / "state")
    for part in ("a", "b"):
        assert state.tensors(part)["w"].tolist() == [float(state.info.step)] * 9
    assert state.info.cursor == Cursor(0, 0, state.info.step, "f" * 32)
    return state.info.step


# Round trip


def test_a_state_comes_back_part_by_part(tmp_path):
    given = {"t": torch.arange(6.0).reshape(2, 3).T, "n": torch.tensor(3), "p": torch.nn.Parameter(torch.ones(2))}
    said = about(
        7, ("one", "none"), reported={"one": {"x": 0.1, "y": float("inf")}}, origin={"a": [1, None, {"b": "c"}]}
    )
    path = save_state(tmp_path / "state", {"one": given, "none": {}}, said)
    state = load_state(tmp_path / "state")
    assert (state.folder, state.info) == (path, said)
    assert set(state.parts) == {"one", "none"} and state.tensors("none") == {}
    tensors = state.tensors("one")
    assert tensors.keys() == given.keys()
    assert all(torch.equal(tensors[k], given[k]) and tensors[k].dtype == given[k].dtype for k in given)
    with pytest.raises(MxdError, match="has no 'two'; it has: "):
        state.tensors("two")


def test_what_is_loaded_does_not_hang_on_the_file(tmp_path):
    tensors = load_state(save(tmp_path, 1).parent).tensors("a")
    for file in (tmp_path / "state").rglob("*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))  # in place: a mapped tensor would now read zeros
    assert tensors["w"].tolist() == [1.0] * 9


def test_there_is_no_state_yet(tmp_path):
    assert load_state(tmp_path / "none") is None
    assert load_state(tmp_path) is None


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_states_are_kept(tmp_path, keep):
    steps = (5, 10, 200, 999_999_999, 1_000_000_000)
    for step in steps:
        save(tmp_path, step, keep)
        assert found(tmp_path) == step
    assert {int(name.removeprefix("step-")) for name in names(tmp_path)} == set(steps[-keep:])


def test_a_state_of_a_step_takes_the_place_of_an_earlier_one_of_it(tmp_path):
    save(tmp_path, 5)
    save_state(tmp_path / "state", {"a": {}}, about(5, "a"))
    assert load_state(tmp_path / "state").parts == ("a",)
    assert names(tmp_path) == ["step-000000005"]


# Damage

FILES = ["a.safetensors", "b.safetensors", "state.json", "manifest.json"]


def flip(path, place):
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1 << place % 8
    path.write_bytes(raw)


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "missing": Path.unlink,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_is_passed_over_named_and_kept(tmp_path, capfd, name, damage):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    DAMAGE[damage](newest / name)
    assert found(tmp_path) == 1
    message = capfd.readouterr().err
    assert f"{newest} is damaged and skipped: " in message and name in message
    assert "kept as damaged-step-000000002. Continuing from step 1." in message
    assert names(tmp_path) == ["damaged-step-000000002", "step-000000001"]
    assert found(tmp_path) == 1 and capfd.readouterr().err == ""  # said once


@pytest.mark.parametrize("name", FILES[:3])
def test_a_state_whose_manifest_lacks_a_file_is_damaged(tmp_path, capfd, name):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["files"][name]
    file.write_text(json.dumps(manifest))
    assert found(tmp_path) == 1
    assert f"its manifest.json and its state.json disagree on {name}; it is kept" in capfd.readouterr().err


EDITS = {
    "a string": (lambda said: said.update(step="2"), "step: expected a whole number, got "),
    "another step": (lambda said: said.update(step=3, tokens=48), "its state.json is that of step 3"),
    "no cursor": (lambda said: said.pop("cursor"), "cursor: it is missing"),
    "a list": (lambda said: said.update(cursor=[1]), "cursor: expected a mapping of fields, got "),
    "negative": (lambda said: said["cursor"].update(context=-1), "cursor.context = -1 cannot be after 32 tokens"),
    "far": (lambda said: said["cursor"].update(context=2**62), "cursor.context = 4611686018427387904 cannot be"),
    "offset": (lambda said: said["cursor"].update(offset=2**40), "cursor.offset = 1099511627776 cannot be after 32"),
    "a number": (lambda said: said["cursor"].update(batch=1.5), "cursor.batch: expected a whole number, got "),
    "no text": (lambda said: said["cursor"].update(text=""), "cursor.text = '' is not a hash of a text"),
    "counted": (lambda said: said["counted"].update(a=10**9), "counted is more than 32 tokens"),
    "null": (lambda said: said["counted"].update(a=None), "counted.a: expected a whole number, got "),
    "one less": (lambda said: said["counted"].pop("a"), "its manifest.json and its state.json disagree on a.safetens"),
    "metrics": (
        lambda said: said.update(metrics_bytes=-1),
        "metrics_bytes: expected a number of at least 0, got ",
    ),
    "reported": (lambda said: said.update(reported={"a": 3}), "reported.a: expected a mapping of fields, got "),
    "a run": (lambda said: said.update(run_id="../../x"), "run_id: expected text of the form ^[0-9a-f]{32}$, got "),
    "more": (lambda said: said.update(more=1), "more: there is no such field"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_state_edited_by_hand_is_damaged_even_if_its_manifest_fits(tmp_path, capfd, edit):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / "state.json"
    said = json.loads(file.read_text())
    change, message = EDITS[edit]
    change(said)
    file.write_text(json.dumps(said))
    seal_state(file.parent)
    assert found(tmp_path) == 1
    printed = capfd.readouterr().err
    assert f"damaged and skipped: {message}" in printed or f"damaged and skipped: state.json: {message}" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path, capfd, name):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    for place in range(0, file.stat().st_size, 7):
        flip(file, place)
        assert found(tmp_path) == 1
        (tmp_path / "state" / "damaged-step-000000002").rename(file.parent)
        flip(file, place)
    assert found(tmp_path) == 2
    expected = "manifest.json: " if name == FILES[-1] else "has another SHA-256 than when it was"
    assert expected in capfd.readouterr().err


def test_several_damaged_states_are_all_named_and_no_earlier_one_is_overwritten(tmp_path, capfd):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=3)
    for step in (2, 3):
        (tmp_path / "state" / f"step-{step:09d}" / "a.safetensors").unlink()
    assert found(tmp_path) == 1
    assert capfd.readouterr().err.count("is damaged and skipped") == 2
    (save(tmp_path, 2) / "state.json").unlink()
    assert found(tmp_path) == 1
    kept = ["damaged-step-000000002", "damaged-step-000000002-2", "damaged-step-000000003", "step-000000001"]
    assert names(tmp_path) == kept


def test_when_all_states_are_damaged_the_run_does_not_begin_anew(tmp_path):
    for step in (1, 2):
        (save(tmp_path, step) / "b.safetensors").unlink()
    for _ in range(2):
        with pytest.raises(MxdError, match=r"every saved state in .* step-000000002: b.safetensors: No such.*anew"):
            load_state(tmp_path / "state")
    assert names(tmp_path) == ["step-000000001", "step-000000002"]


def test_other_files_do_not_matter(tmp_path, capfd):
    state = save(tmp_path, 3)
    (state / ".nfs0001").write_text("x")
    (state / "c.safetensors").write_text("not of this state")
    (state.parent / "step-notes").mkdir()
    (state.parent / "step-000000009").write_text("a file")
    (state.parent / "notes.txt").write_text("mine")
    assert found(tmp_path) == 3
    assert load_state(tmp_path / "state").parts == ("a", "b")
    save(tmp_path, 4, keep=1)
    assert {"notes.txt", "step-notes", "step-000000009", "step-000000004"} == set(names(tmp_path))
    assert capfd.readouterr().err == ""


def test_a_manifest_does_not_reach_outside(tmp_path):
    save(tmp_path, 1)
    state = save(tmp_path, 2)
    manifest = json.loads((state / "manifest.json").read_text())
    manifest["files"]["../../x.safetensors"] = manifest["files"]["a.safetensors"]
    (tmp_path / "x.safetensors").write_bytes((state / "a.safetensors").read_bytes())
    (state / "manifest.json").write_text(json.dumps(manifest))
    assert found(tmp_path) == 1


@pytest.mark.parametrize("number", [1, 2])
def test_a_state_of_a_format_before_is_said_to_be_one(tmp_path, number):
    old = tmp_path / "state" / "step-000000005"
    old.mkdir(parents=True)
    save_file({"a/w": torch.ones(1)}, old / ("state.safetensors" if number == 1 else "a.safetensors"))
    (old / "state.json").write_text(json.dumps({"format": number, "step": 5}))
    if number == 2:
        files = {name: {"bytes": 1, "sha256": "0"} for name in ("a.safetensors", "state.json")}
        (old / "manifest.json").write_text(json.dumps({"format": 2, "files": files}))
    with pytest.raises(MxdError, match=r"earlier version of mxd, .*\(6\).*--run NAME"):
        load_state(tmp_path / "state")
    assert names(tmp_path) == ["step-000000005"]


def test_a_damaged_state_may_look_older_in_one_of_its_files(tmp_path):
    save(tmp_path, 1)
    for step, name in enumerate(("manifest.json", "state.json"), 2):
        file = save(tmp_path, step) / name
        file.write_text(file.read_text().replace('"format": 6', '"format": 4'))
        assert found(tmp_path) == 1


# Which run a folder is of


def test_a_folder_says_which_run_it_is_of(tmp_path):
    assert run_of(tmp_path) is None
    first = new_run(tmp_path)
    assert run_of(tmp_path) == first
    assert new_run(tmp_path) != first != run_of(tmp_path)
    for text in ("", first[:-1], first.upper() + "!", first * 2, f"{first} {first}", "x" * 50_000, "\xff"):
        (tmp_path / "run_id").write_bytes(text.encode("latin-1"))
        with pytest.raises(MxdError, match=r"run_id does not name a run; put back the one that was there") as error:
            run_of(tmp_path)
        assert "\n" not in str(error.value)


# Failing and dying on the way


def full_disk_at(monkeypatch, name):
    """Fill the disk while a file of that name is written."""
    module = __import__("mxd.training.state", fromlist=["state"])
    for function in ("save_file", "write_json"):
        real = getattr(module, function)

        def write(first, second, real=real):
            path = first if isinstance(first, Path) else second
            if path.name == name:
                path.write_bytes(b"the first half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(first, second)

        monkeypatch.setattr(module, function, write)


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_leaves_the_states_before(tmp_path, monkeypatch, name):
    for step in (1, 2):
        save(tmp_path, step)
    full_disk_at(monkeypatch, name)
    with pytest.raises(MxdError, match=r"cannot write .*step-000000003: .*No space left on device.*Free space"):
        save(tmp_path, 3)
    assert names(tmp_path) == ["step-000000001", "step-000000002"]
    assert found(tmp_path) == 2


def test_no_state_is_removed_before_the_new_one_is_on_the_disk(tmp_path, monkeypatch):
    """At every fsync and rename: the states that stand under their names, all whole."""
    save(tmp_path, 1, keep=1)
    steps, real = [], {name: getattr(os, name) for name in ("fsync", "rename")}
    synced = []

    def fsync(handle):
        steps.append(found_names())
        real["fsync"](handle)
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))

    def found_names():
        return [path.name for path in (tmp_path / "state").glob("step-*")]

    monkeypatch.setattr(os, "fsync", fsync)
    save(tmp_path, 2, keep=1)
    assert all("step-000000001" in there for there in steps)
    assert "step-000000002" in steps[-1]
    partial = next(Path(path).parent for path in synced if path.endswith("a.safetensors"))
    assert partial.name.startswith(".step-000000002.")
    expected = {str(partial / name) for name in FILES} | {str(p) for p in (partial, tmp_path / "state", tmp_path)}
    assert expected == set(synced)
    assert synced.index(str(partial)) > max(synced.index(str(partial / name)) for name in FILES)
    assert synced.index(str(tmp_path / "state")) > synced.index(str(partial))
    assert names(tmp_path) == ["step-000000002"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_save_leaves_no_trace(tmp_path, monkeypatch, error):
    save(tmp_path, 1)

    def interrupt(*args):
        raise error

    monkeypatch.setattr("mxd.training.state.publish", interrupt)
    with pytest.raises(error):
        save(tmp_path, 2)
    assert names(tmp_path) == ["step-000000001"]


def test_what_killed_saves_left_is_removed_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    partial = save(tmp_path, 2).rename(tmp_path / "state" / ".step-000000002.0123abcd")
    (tmp_path / "state" / ".step-000000002.txt").mkdir()
    (tmp_path / "state" / ".notes.0123abcde").write_text("a file")
    assert found(tmp_path) == 1
    assert not partial.exists()
    assert names(tmp_path) == [".notes.0123abcde", ".step-000000002.txt", "step-000000001"]
    clear_partials(tmp_path / "none")


# Many processes, here threads that pass values to one another


class Threads(Processes):
    """Processes that are threads of this one."""

    def gather(self, value):
        values, barrier = self.group
        values[self.rank] = value
        barrier.wait(10)
        found = list(values)
        barrier.wait(10)
        return found


def launch(world, work):
    """Run ``work(processes)`` on each; return what each returned or raised."""
    group = [None] * world, threading.Barrier(world)
    results = [None] * world

    def run(rank):
        try:
            results[rank] = work(Threads(rank, world, group))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def save_together(folder, step, owned):
    def work(processes):
        parts = {name: {"w": torch.full((3,), float(step))} for name in owned[processes.rank]}
        return save_state(folder, parts, about(step, "".join(owned), metrics_bytes=processes.rank), processes)

    return launch(len(owned), work)


def test_each_process_writes_its_own_parts_of_one_state(tmp_path):
    assert save_together(tmp_path, 4, ["ab", "", "c"]) == [tmp_path / "step-000000004"] * 3
    states = launch(2, lambda processes: load_state(tmp_path, processes))  # two now
    assert states[0] == states[1]
    assert sorted(states[0].parts) == ["a", "b", "c"]
    assert states[1].info.metrics_bytes == 0
    assert states[1].tensors("c")["w"].tolist() == [4.0] * 3


def test_a_part_given_twice_is_refused(tmp_path):
    assert all(isinstance(error, ValueError) for error in save_together(tmp_path, 4, ["ab", "b"]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.safetensors", "c.safetensors", "manifest.json"])
def test_what_fails_on_one_process_fails_on_all(tmp_path, monkeypatch, name):
    save_together(tmp_path, 3, ["ab", "c"])
    full_disk_at(monkeypatch, name)
    for error in save_together(tmp_path, 4, ["ab", "c"]):
        assert isinstance(error, MxdError) and "No space left on device" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000003"]


def test_all_processes_hear_that_every_state_is_damaged(tmp_path):
    save_together(tmp_path, 3, ["a", "b"])
    (tmp_path / "step-000000003" / "b.safetensors").unlink()
    for error in launch(2, lambda processes: load_state(tmp_path, processes)):
        assert isinstance(error, MxdError) and "every saved state" in str(error)
