"""What the README shows works: its Python runs as it stands, its commands and files exist."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SHORT = ["--training.tokens", "2048", "--training.batch_tokens", "512", "--training.buffer_tokens", "1024"]


@pytest.mark.long
def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    import mxd

    real = mxd.load_config
    overrides = [*SHORT, "--out", str(tmp_path), "--data.split", "validation", "--model.device", "cpu"]
    monkeypatch.setattr(mxd, "load_config", lambda path, words: real(ROOT / path, [*words, *overrides]))
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    names: dict = {}
    exec(code, names)
    assert capsys.readouterr().out.startswith("The President of the")
    assert names["code"].activations.shape == (1, names["ids"].shape[1], 32)
    assert names["push"].shape == names["y"].shape


def test_commands_configs_and_links_exist() -> None:
    from mxd.cli.entry import app

    for command in re.findall(r"^mxd ([\w-]+)", TEXT, re.M):
        assert command in app, command
    for path in re.findall(r"configs/[\w.-]+\.yaml", TEXT):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(((?!http)[^)#]+)\)", TEXT):
        assert (ROOT / link).exists(), link


def test_options_named_in_the_readme_are_fields() -> None:
    from mxd.config import load_config

    for line in re.findall(r"^mxd train (configs/.+)$", TEXT.replace("\\\n", ""), re.M):
        config, *words = shlex.split(line, comments=True)
        load_config(ROOT / config, words)
