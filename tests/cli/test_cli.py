"""The command line, in process: exit codes, messages without tracebacks, files left behind."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from command import mxd

from mxd import __version__
from mxd.cli.entry import NO_BARS, app
from mxd.cli.train import READ
from mxd.common import progress
from mxd.common.errors import MxdError
from mxd.common.stop import Preempted

CONFIG = """
run: r
blocks: [1]
model: {source: tiny-gpt2, device: cpu}
data: {split: validation}
sizing: {expansion: 9}
replacements:
  - {method: [mxd], sparsity: {kind: topk, k: [2, 4]}}
training: {recipe: short, tokens: 1024, batch_tokens: 512, buffer_tokens: 1024, log_every: 1}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG + f"out: {tmp_path}\n")
    return path


def test_train_evaluate_info(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, out, err = mxd(capsys, "train", str(config), "--training.tokens", "2048", "--run", "abc")
    assert code == 0 and "mxd evaluate" in out and "tokens/s" in err
    assert len((tmp_path / "abc" / "metrics.jsonl").read_text().splitlines()) == 8
    code, out, _ = mxd(capsys, "evaluate", str(tmp_path / "abc"), "--tokens", "256")
    assert code == 0 and "CE increase" in out and "zero-ablated" in out
    assert f"table:   {tmp_path / 'abc' / 'table.md'}" in out and (tmp_path / "abc" / "table.md").exists()
    results = json.loads((tmp_path / "abc" / "faithfulness.json").read_text())["results"]
    assert set(results) == {"abc/block1-mxd-k2", "abc/block1-mxd-k4"}
    code, out, _ = mxd(capsys, "info", str(tmp_path / "abc" / "block1-mxd-k2"), "--json")
    (described,) = json.loads(out).values()
    assert (
        described["unfactorised_parameters"] > described["parameters"] > 0
        and described["provenance"]["model"] == "tiny-gpt2"
    )
    told = "".join(mxd(capsys, "info", str(tmp_path / "abc"))[1:2])
    units, parameters = (f"{described['layer']['num_units']:,}", f"{described['parameters']:,}")
    assert re.search(rf"block1-mxd-k4 +│ +MxD │ +1 │ +k4 │ +{units} │ +{parameters} │", told)
    assert told.count("tiny-gpt2") == 1, "base model and training stand once for all layers"
    code, _, err = mxd(capsys, "train", str(config), "--run", "abc")
    assert code == 1 and "already holds a run" in err
    code, _, _ = mxd(capsys, "train", str(tmp_path / "abc" / "config.yaml"), "--resume")
    assert code == 0
    single = str(tmp_path / "abc" / "block1-mxd-k2")
    code, out, _ = mxd(capsys, "evaluate", single, "--together", "--tokens", "256", "--out", str(tmp_path / "e.json"))
    assert code == 0 and (tmp_path / "e.json").exists()


def test_init_writes_a_config_that_loads_and_keeps_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mxd.config import load_config

    monkeypatch.chdir(tmp_path)
    for kind, name in {"own": "own", "gpt2": "gpt2", "pythia": "pythia-410m", "llama": "llama-3.2-3b"}.items():
        code, out, _ = mxd(capsys, "init", *(() if kind == "own" else (kind,)))
        assert code == 0 and f"mxd train {name}.yaml" in out
        assert load_config(f"{name}.yaml").run == name and Path(f"{name}.yaml").read_text().startswith("# ")
    code, _, _ = mxd(capsys, "init", "own", "--out", "deep/mine.yaml")
    assert code == 0 and "`mxd train deep/mine.yaml`" in Path("deep/mine.yaml").read_text()
    Path("own.yaml").write_text("mine")
    code, _, err = mxd(capsys, "init")
    assert code == 1 and "own.yaml is there already" in err and Path("own.yaml").read_text() == "mine"
    code, _, err = mxd(capsys, "init", "gpt3")
    assert code == 2 and "pythia" in err


@pytest.mark.long
def test_generate(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert mxd(capsys, "train", str(config))[0] == 0
    single = str(tmp_path / "r" / "block1-mxd-k2")
    code, out, _ = mxd(capsys, "generate", single, "--prompt", "The President of the", "--tokens", "3")
    assert code == 0 and "prompt   The President of the" in out and "of 3 tokens agree" in out and "numbers" not in out
    code, out, _ = mxd(capsys, "generate", str(tmp_path / "r"), "--limit", "9", "--words", "2", "--tokens", "5")
    assert code == 0 and out.count("of 9 prompts the same") == 2 and " to 4; mean" in out
    found = json.loads((tmp_path / "r" / "generation.json").read_text())
    assert found["asked"]["words"] == 2 and len(found["results"]["r/block1-mxd-k4"]["agreed"]) == 9
    code, _, err = mxd(capsys, "generate")
    assert code == 1 and "mxd generate checkpoints/RUN" in err


@pytest.mark.long
def test_cache_and_train_from_it(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def run(name: str, *words: str) -> tuple[int, str]:
        code, _, err = mxd(capsys, "train", str(config), "--run", name, *words)
        return code, err

    def results(name: str) -> list[dict]:
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [
            {k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second", "step_seconds")}
            for line in lines
        ]

    folder = tmp_path / "some" / "cache"
    for _ in range(2):  # the second finds it done
        code, out, err = mxd(capsys, "cache", str(config), str(folder))
        assert code == 0, err
        assert f"done: {folder}\nnext: mxd train {config} --data.cache {folder}" in out
        assert [path.name for path in sorted(folder.iterdir())] == [
            "cache.json",
            "shard-000000.json",
            "shard-000000.safetensors",
        ]
    assert run("live")[0] == run("cached", "--data.cache", str(folder))[0] == 0
    assert results("live") == results("cached")
    assert len(results("live")) == 4
    for words, message in (
        (["--seed", "1"], "seed: 0, asked for 1"),
        (["--blocks", "[0]"], "it has blocks 1, asked for 0"),
        (["--training.tokens", "2048"], "holds 1,024 tokens, the run asks for 2,048"),
    ):
        code, err = run("other", "--data.cache", str(folder), *words)
        assert code == 1 and message in err and not (tmp_path / "other").exists()
    assert mxd(capsys, "cache", str(config), str(folder), "--training.tokens", "2048")[0] == 0
    assert run("longer", "--data.cache", str(folder), "--training.tokens", "2048")[0] == 0


def test_numbers_of_options_are_written_as_those_of_configs() -> None:
    _, bound, _ = app.parse_args("convert a b --to sparsify --tokens 10k --block 1e1 --context 1_000")
    asked = bound.arguments
    assert (asked["tokens"], asked["block"], asked["on"].context) == (10_000, 10, 1000)


@pytest.mark.long
@pytest.mark.usefixtures("signals")
def test_commands_to_copy_are_words_of_a_shell(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("mxd.training.loop")

    def shown(text: str, before: str) -> list[str]:
        return shlex.split(text.partition(before)[2].partition("\n")[0].removesuffix("."))

    place, step = tmp_path / "a b; $(touch escaped)", module.train_step
    words = ["train", str(config), "--out", str(place), "--run", "r", "--replacements.0.sparsity.k", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "train_step", lambda *a: (os.kill(os.getpid(), signal.SIGTERM), step(*a))[1])
        code, _, err = mxd(capsys, *words)
    again = ["mxd", "train", str(place / "r" / "config.yaml"), "--resume"]
    assert code == 0 and shown(err, "To continue: ") == again
    code, _, err = mxd(capsys, *words, "--seed", "7", "--resume")
    assert code == 1 and shown(err, "Resume with: ") == again
    code, out, _ = mxd(capsys, *again[1:])
    assert code == 0 and shown(out, "next: ") == ["mxd", "evaluate", str(place / "r")]
    code, _, err = mxd(capsys, *words, "--run", "s", "--data.cache", str(place / "no where"))
    assert code == 1 and shown(err, "write one with: ") == ["mxd", "cache", "CONFIG", str(place / "no where")]
    code, out, _ = mxd(capsys, "cache", str(config), str(place / "c"))
    told = shown(out.replace(" (with the same overrides)", ""), "next: ")
    assert code == 0 and told == ["mxd", "train", str(config), "--data.cache", str(place / "c")]
    code, _, err = mxd(capsys, *words, "--run", "s", "--data.cache", str(place / "c"), "--training.tokens", "2048")
    assert code == 1 and shown(err, "continue with: ") == ["mxd", "cache", "CONFIG", str(place / "c")]
    held = json.loads((place / "c" / "cache.json").read_text())
    (place / "c" / "cache.json").write_text(json.dumps(held | {"format": 0}))
    code, _, err = mxd(capsys, *words, "--run", "s", "--data.cache", str(place / "c"))
    assert code == 1 and shown(err, "write it again: ") == ["mxd", "cache", "CONFIG", str(place / "c")]


def test_interrupt_exits_130(config: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mxd.config.parse_config", stop)
    assert mxd(capsys, "train", str(config)) == (130, "", "mxd: interrupted\n")


def test_what_has_parts_is_continued_by_the_same_words(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether training, which alone would name `mxd train`, is interrupted or what comes after it."""

    def trained(*_: object) -> None:
        raise Preempted("stopped at step 1 of 2; everything is saved.", "mxd train elsewhere --resume")

    def answered(*_: object) -> None:
        raise KeyboardInterrupt

    folder = str(tmp_path / "a b")
    words = ("compare", str(config), "--out", folder), ("reproduce", "2505.21364", "tiny", "--out", folder)
    monkeypatch.setattr("mxd.reproduction.run.planned", lambda *_: [])
    commands = "mxd.evaluation.compare.compare", "mxd.reproduction.run.reproduce"
    for (command, *options), function in zip(words, commands, strict=True):
        again = shlex.join(["mxd", command, *options])
        monkeypatch.setattr(function, trained)
        code, _, err = mxd(capsys, command, *options)
        assert (code, err) == (0, f"mxd: stopped at step 1 of 2; everything is saved. To continue: {again}\n")
        monkeypatch.setattr(function, answered)
        code, _, err = mxd(capsys, command, *options)
        assert (code, err) == (130, f"mxd: interrupted; what is finished is saved. To continue: {again}\n")


def test_a_message_has_a_line_of_its_own_after_an_unfinished_bar(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import tqdm

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", None)

    def transfer() -> None:
        bar = tqdm(total=10, mininterval=0, disable=False)
        bar.update(3)
        held = [bar]
        held.append(held)  # in a cycle, as some of the Hub's bars are
        raise OSError("the line is dead")

    def fail(*_: object, **__: object) -> None:
        try:
            transfer()
        except OSError as error:
            raise MxdError("cannot reach the Hub.") from error

    monkeypatch.setattr("mxd.artifacts.folders.find_layers", fail)
    code, _, err = mxd(capsys, "info", "org/name")
    assert code == 1 and "3/10" in err
    assert err.endswith("\nmxd: cannot reach the Hub.\n")


def test_help_version_and_fields(capsys: pytest.CaptureFixture) -> None:
    assert "faithful" in mxd(capsys, "--help")[1]
    assert mxd(capsys, "--version")[1].strip() == __version__
    assert "--training.tokens" in mxd(capsys, "fields")[1]
    assert mxd(capsys, "no-such-command")[0] != 0


def test_quiet_leaves_errors_and_results(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, out, err = mxd(capsys, "train", str(config), "--quiet", "--replacements.0.sparsity.k", "2")
    assert (code, out, err) == (0, f"done: {tmp_path / 'r'}\n", "")
    code, out, err = mxd(capsys, "--quiet", "info", "nowhere")
    assert code == 1 and out == "" and err.startswith("mxd: no checkpoint at 'nowhere'")
    assert not progress.console.quiet, "the next command speaks again"


def test_bars_of_other_libraries_are_off_where_nobody_watches(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, terminal, told in ((["fields"], True, [None] * 3), (["fields"], False, ["1", "0", "1"])):
        for name in NO_BARS:
            monkeypatch.setenv(name, "")  # so that it is put back
            monkeypatch.delenv(name)
        if not terminal:
            monkeypatch.setenv(NO_BARS[1], "0")
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
            assert mxd(capsys, *words)[0] == 0
        assert [os.environ.get(name) for name in NO_BARS] == told


def test_completion_knows_commands_options_and_choices() -> None:
    script = app.generate_completion(shell="bash", prog_name="mxd")
    for word in ("evaluate", "--quiet", "--resume", "bfloat16", "complete -F _mxd mxd"):
        assert word in script


def test_help_and_what_shows_at_once_need_no_torch(config: Path) -> None:
    lines = f"""
        --help
        train nowhere.yaml
        train {config} --training.tokens
        train {config} --resmue
        train {config} --model.source ./nowhere
        train {config} --data.source nowhere.txt
        train {config} --data.split valid
        evaluate nowhere
        evaluate {config.parent}
        evaluate {config} --out {config.parent}
        steer {config} --scale nan
        steer {config} --units 0-
    """
    script = f"""import sys, mxd.cli
for line in {lines!r}.strip().splitlines():
    sys.argv = ["mxd", *line.split()]
    try: mxd.cli.main()
    except SystemExit as stop: assert bool(stop.code) == ("--help" not in line), line
    assert not {{"torch", "transformers"}} & set(sys.modules), line
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_demo_leaves_table_and_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "demo.yaml"
    from mxd.common.bundled import bundled_path

    text = bundled_path("demo.yaml").read_text()
    training = CONFIG.split("\n")[-2].replace("training: {", "training: {accumulation: 1, ")
    small.write_text(text.replace("expansion: 32", "expansion: 9").split("training:")[0] + training)
    monkeypatch.setattr(
        "mxd.common.bundled.bundled_path", lambda name: small if name == "demo.yaml" else bundled_path(name)
    )
    monkeypatch.setattr("mxd.cli.train.DEMO_TOKENS", 256)
    for _ in range(2):  # the second replaces the first
        code, out, err = mxd(capsys, "demo", "--out", str(tmp_path), "--run", "d")
        assert code == 0, err
    (tmp_path / "d" / "faithfulness.json").unlink()  # as after an interruption: continued
    assert mxd(capsys, "demo", "--out", str(tmp_path), "--run", "d")[0] == 0
    (tmp_path / "mine").mkdir()
    for name in ("config.yaml", "faithfulness.json"):  # somebody else's run, measured: refused, not replaced
        (tmp_path / "mine" / name).write_text("{}")
    code, _, err = mxd(capsys, "demo", "--out", str(tmp_path), "--run", "mine")
    assert code == 1 and "already holds a run" in err and (tmp_path / "mine" / "faithfulness.json").exists()
    (tmp_path / "mine" / "config.yaml").write_bytes(b"\xff")
    code, _, err = mxd(capsys, "demo", "--out", str(tmp_path), "--run", "mine")
    assert code == 1 and "already holds a run" in err
    for method in ("MxD", "TC", "STC", "CP-muMoE"):
        assert f"| {method} |" in (tmp_path / "d" / "table.md").read_text()
        assert method in out
    assert " ".join(out.split()).endswith(READ)
    assert (tmp_path / "d" / "frontier.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "d" / "faithfulness.json").read_text())["results"]
    params = {r["replacements"][0]["params"] for r in results.values()}
    assert len(results) == 8 and max(params) / min(params) < 1.01


def test_importing_mxd_is_quick_to_answer_typos() -> None:
    import mxd as package

    with pytest.raises(AttributeError, match="public names"):
        _ = package.splised
    assert "spliced" in dir(package)
    assert callable(package.spliced)


@pytest.mark.long
def test_public_functions_stay_functions_after_their_files_are_imported() -> None:
    script = "import mxd, mxd.splice; from mxd.api import train; from mxd.splice import splice\n"
    script += "assert mxd.train is train and mxd.splice is splice and callable(mxd.spliced)"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=120)


def test_ctrl_c_is_heard_while_the_command_line_is_imported(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    entry = ModuleType("mxd.cli.entry")
    entry.__getattr__ = interrupted  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "mxd.cli.entry", entry)
    assert mxd(capsys, "--help") == (130, "", "mxd: interrupted\n")


def test_tokens_that_fill_no_batch_are_told(config: Path, capsys: pytest.CaptureFixture) -> None:
    tokens = yaml.safe_load(config.read_text())["training"]["batch_tokens"]
    _, _, err = mxd(capsys, "train", config, "--training.tokens", 2 * tokens + 1, "--training.buffer_tokens", tokens)
    assert f"{2 * tokens:,} of {2 * tokens + 1:,} tokens, whole batches; memory on cpu" in err
