"""Change one thing between a stop and `--resume`: it is refused by name, nothing is touched; unchanged, it continues.

    python scripts/check_resume.py [--json FILE] [--check]

`mxd train` is stopped by SIGTERM and resumed, each time in a process and a folder of its own. With another text,
config, base model, state or cache it must end with exit code 1, one line that names the change, and the run's folder as
it was. Then nothing is changed, except for files that may be lost (those of token ids): layers, last state and metrics
must be those of a run that was never stopped, bit for bit. `--check` exits 1 where one of these is not so.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file, save_file

from mxd.common.bundled import bundled_path
from mxd.data.text import documents

RUN: dict[str, Any] = {
    "run": "r",
    "out": "runs",
    "blocks": [1],
    "model": {"source": "base", "device": "cpu"},
    "data": {"source": "text/train.jsonl", "context": 32},
    "replacements": [{"method": "transcoder", "num_units": 96, "sparsity": {"kind": "topk", "k": 8}}],
    "training": {"recipe": "short", "tokens": 200 * 64, "batch_tokens": 64, "buffer_tokens": 640}
    | {"log_every": 10, "save_every": 20},
}
"""Paths in it are relative to the folder that a case runs in."""


@dataclass(frozen=True)
class Case:
    """One thing that is changed, and the words that must name it."""

    name: str
    change: Callable[[Path], None]
    named: str
    words: tuple[str, ...] = ()
    run: str = "r"


def mxd(folder: Path, *words: str) -> subprocess.Popen:
    """Start a command in a folder."""
    environment = os.environ | {"MXD_CACHE": str(folder / "tokens"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mxd", *words]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def done(process: subprocess.Popen, expected: int = 0) -> str:
    """Wait for a command's end; return its messages."""
    messages = process.communicate()[1]
    if process.returncode != expected:
        sys.exit(f"{process.args} ended with {process.returncode}:\n{messages[-3000:]}")
    return messages


def stop(folder: Path, run: str, *words: str) -> None:
    """Start a run, and ask it to stop when its first state is saved."""
    process = mxd(folder, "train", "run.yaml", "--run", run, *words)
    states = folder / "runs" / run / "state"
    while process.poll() is None and not any(states.glob("step-*")):
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    if "everything is saved" not in done(process):
        sys.exit(f"run {run} was at its end before it could be stopped")


def prepare(folder: Path, pool: ThreadPoolExecutor) -> None:
    """Write text, base model and caches; train the undisturbed runs, and stop the others."""
    write_text(folder, documents("bundled", "validation")[:300])
    shutil.copytree(bundled_path("tiny-gpt2"), folder / "base")
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    begun = [
        pool.submit(lambda: done(mxd(folder, "cache", "run.yaml", "cache"))),
        pool.submit(lambda: done(mxd(folder, "cache", "run.yaml", "rounded", "--dtype", "bfloat16"))),
        pool.submit(lambda: done(mxd(folder, "cache", "run.yaml", "seeded", "--seed", "1"))),
        pool.submit(lambda: done(mxd(folder, "train", "run.yaml", "--run", "whole"))),
        pool.submit(stop, folder, "r"),
        pool.submit(stop, folder, "other"),
    ]
    for task in begun:
        task.result()
    stop(folder, "cached", "--data.cache", "cache")


# What is changed


def write_text(folder: Path, texts: list[str]) -> None:
    """Write the text that the run reads."""
    (folder / "text").mkdir(exist_ok=True)
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "text" / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")


def read_text(folder: Path) -> list[str]:
    """Return that text."""
    lines = (folder / "text" / "train.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line)["text"] for line in lines]


def edit(run: str = "r", **fields: Any) -> Callable[[Path], None]:
    """Edit fields of a run's own config.yaml, from which it is resumed."""

    def change(folder: Path) -> None:
        file = folder / "runs" / run / "config.yaml"
        config = yaml.safe_load(file.read_text())
        for key, value in fields.items():
            config[key] = config[key] | value if isinstance(value, dict) else value
        file.write_text(yaml.safe_dump(config, sort_keys=False))

    return change


def scale_embedding(folder: Path) -> None:
    """Multiply the base model's token embeddings by 1.05: every MLP of it is as before."""
    file = folder / "base" / "model.safetensors"
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith("wte.weight"))
    save_file(tensors | {name: tensors[name] * 1.05}, file, {"format": "pt"})


def take_state(folder: Path) -> None:
    """Put another run's states in place of the run's own."""
    shutil.rmtree(folder / "runs" / "r" / "state")
    shutil.copytree(folder / "runs" / "other" / "state", folder / "runs" / "r" / "state")


def lose_manifest_entry(folder: Path) -> None:
    """Take the weights out of every state's manifest."""
    for file in (folder / "runs" / "r" / "state").glob("step-*/manifest.json"):
        manifest = json.loads(file.read_text())
        manifest["files"] = {name: entry for name, entry in manifest["files"].items() if name == "state.json"}
        file.write_text(json.dumps(manifest))


def take_cache(name: str) -> Callable[[Path], None]:
    """Put another cache in place of the one that the run reads."""

    def change(folder: Path) -> None:
        shutil.rmtree(folder / "cache")
        (folder / name).rename(folder / "cache")

    return change


CASES = (
    Case("text appended", lambda at: write_text(at, [*read_text(at), "One more line."]), "the text or its tokenizer"),
    Case("text reordered", lambda at: write_text(at, read_text(at)[::-1]), "the text or its tokenizer"),
    Case(
        "one word of the text",
        lambda at: write_text(at, ["Word " + read_text(at)[0], *read_text(at)[1:]]),
        "the text or",
    ),
    Case("seed, in config.yaml", edit(seed=1), "seed was 0, is 1"),
    Case("seed, with the command", lambda at: None, "seed was 0, is 1", ("--seed", "1")),
    Case("context", edit(data={"context": 64}), "data.context was 32, is 64"),
    Case("BOS", edit(data={"bos": False}), "data.bos was True, is False"),
    Case("recipe", edit(training={"recipe": "fast"}), "training.recipe was 'short', is 'fast'"),
    Case("embedding x 1.05", scale_embedding, "base model (hash of its settings and all its weights)"),
    Case("another run's state", take_state, "is a state of another run"),
    Case("manifest entry removed", lose_manifest_entry, "every saved state in runs/r/state is damaged"),
    Case("text under a cache", lambda at: write_text(at, read_text(at)[::-1]), "its text, by the hash", run="cached"),
    Case("another cache: bfloat16", take_cache("rounded"), "activation cache (hash of its cache.json)", run="cached"),
    Case("another cache: seed", take_cache("seeded"), "activation cache (hash of its cache.json)", run="cached"),
)


def flip_tokens(folder: Path) -> None:
    """Flip a bit in every file of token ids: they are made again."""
    for file in (folder / "tokens").iterdir():
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


UNCHANGED = (
    Case("nothing", lambda at: None, ""),
    Case("token files damaged", flip_tokens, ""),
    Case("nothing, from a cache", lambda at: None, "", run="cached"),
)


# What the changes lead to


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def resume(source: Path, case: Case) -> tuple[Path, int, str]:
    """Change one thing in a copy of everything, and resume there; return the folder, exit code and messages."""
    folder = Path(shutil.copytree(source, source.with_name(case.name.replace(" ", "-").replace(":", ""))))
    case.change(folder)
    before = contents(folder / "runs" / case.run)
    process = mxd(folder, "train", f"runs/{case.run}/config.yaml", "--resume", *case.words)
    messages = process.communicate()[1]
    if process.returncode and contents(folder / "runs" / case.run) != before:
        messages += "\nmxd: the run's folder was changed"
    return folder, process.returncode, messages


def refused(source: Path, case: Case) -> dict[str, Any]:
    """Return the outcome of a change."""
    folder, code, said = resume(source, case)
    shutil.rmtree(folder)
    messages = [line.removeprefix("mxd: ") for line in said.splitlines() if line.startswith("mxd: ")]
    good = code == 1 and len(messages) == 1 and case.named in messages[0] and "Traceback" not in said
    good = good and said.rstrip("\n").endswith(messages[0])  # the line is the last, so it is one
    return {"changed": case.name, "exit code": code, "said": " / ".join(messages) or said[-300:], "good": good}


def same(source: Path, case: Case) -> dict[str, Any]:
    """Return whether a run that is resumed unchanged ends like one that was never stopped."""
    folder, code, messages = resume(source, case)
    left, right = (left_by(folder / "runs" / case.run), left_by(source / "runs" / "whole"))
    shutil.rmtree(folder)
    different = sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
    good = code == 0 and not different and any(name.endswith("model.safetensors") for name in left)
    outcome = "; ".join(different) or f"{len(left)} files bit for bit those of the run that was never stopped"
    return {"changed": case.name, "exit code": code, "said": outcome if code == 0 else messages[-300:], "good": good}


def left_by(run: Path) -> dict[str, Any]:
    """Return the layers, the last state's tensors and the metrics without times."""
    last = max((run / "state").glob("step-*"))
    files: dict[str, Any] = {str(p.relative_to(run)): p.read_bytes() for p in run.glob("block*/model.safetensors")}
    files |= {str(path.relative_to(run)): path.read_bytes() for path in last.glob("*.safetensors")}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "tokens_per_second")
    return files | {"metrics.jsonl": [{k: v for k, v in line.items() if k not in timed} for line in lines]}


def main() -> None:
    """Run all cases and print their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--check", action="store_true", help="exit 1 where a change is not refused, or a run not the same"
    )
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mxd-resume-") as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        source = Path(work, "source")
        source.mkdir()
        prepare(source, pool)
        rows = list(pool.map(lambda case: refused(source, case), CASES))
        rows += pool.map(lambda case: same(source, case), UNCHANGED)
    seconds = round(time.monotonic() - began)
    print("| changed | exit code | | |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['changed']} | {row['exit code']} | {'good' if row['good'] else 'WRONG'} | {row['said']} |")
    wrong = sum(not row["good"] for row in rows)
    print(f"\n{len(CASES)} changes, {len(UNCHANGED)} runs unchanged: {wrong} wrong, {seconds} s")
    if asked.json:
        asked.json.write_text(json.dumps({"seconds": seconds, "rows": rows}, indent=2) + "\n")
    sys.exit(1 if asked.check and wrong else 0)


if __name__ == "__main__":
    main()
