"""What a new user gets wrong: each ends in a message that says what to do, at once, and leaves nothing behind."""

import json
import re
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import mxd

from mxd.common.progress import say_once
from mxd.config import load_config
from mxd.model.frozen import FrozenModel
from mxd.training.source import text_contexts
from mxd.training.trainer import train

CONFIG = """
run: new
blocks: [1]
model: {source: tiny-gpt2, device: cpu}
data: {split: validation}
sizing: {expansion: 9}
replacements:
  - {method: mxd, sparsity: {kind: topk, k: 2}}
training: {recipe: short, tokens: 1024, batch_tokens: 512, buffer_tokens: 1024}
"""

MISTAKES = """
# fields
train c.yaml --layers 1 | layers: there is no such field | Did you mean 'blocks'?
train c.yaml --tokens 1k | tokens: there is no such field | Did you mean 'training.tokens'?
train c.yaml --training.token 1k | training.token: there is no such field | Did you mean 'tokens'?
train c.yaml --training.learning_rate 1 | fields here: recipe, | Did you mean 'lr'?
train c.yaml --replacements.0.sparsity.kk 3 | replacements.0.sparsity.kk: there is no such field; fields here: kind, k.
train c.yaml --replacements.0.expert_bia true | replacements.0.expert_bia: | Did you mean 'expert_bias'?
train c.yaml --replacements.1.method mxd | '1' is not one of the indices 0 ... 0
--quiet=maybe | Invalid value for --quiet
train c.yaml --resmue | unknown option '--resmue'. Did you mean '--resume'?
train c.yaml --training.tokens | override --training.tokens has no value
train c.yaml tokens 5 | expected an override like --training.tokens 100000, got 'tokens'
# names
train c.yaml --replacements.0.method mxdd | replacements.0: unknown method 'mxdd' | Did you mean 'mxd'?
train c.yaml --replacements.0.sparsity.kind topkk | replacements.0.sparsity: unknown kind 'topkk' | Did you mean 'topk'?
train c.yaml --training.recipe fsat | expected paper, short, fast or scaled, got 'fsat'. Did you mean 'fast'?
train c.yaml --training.trackers tensorbord | training.trackers.0: expected tensorboard, | Did you mean 'tensorboard'?
train c.yaml --model.source tiny-gpt | no folder 'tiny-gpt' here | Did you mean 'tiny-gpt2'?
train c.yaml --data.source bundeld | no text 'bundeld' here | Did you mean 'bundled'?
train c.yaml --data.source bundled:stou | unknown bundled text | Did you mean 'bundled:sotu'?
train c.yaml --data.source factbook | Did you mean 'bundled:factbook'?
train c.yaml --data.split valid | unknown split 'valid' | Did you mean 'validation'?
train c.yaml --evaluation.questions faithful | questions.0: expected faithfulness, | Did you mean 'faithfulness'?
trian c.yaml | Did you mean "train"?
evaluate done --token 5 | Did you mean --tokens?
evaluate | give at least one checkpoint
convert done out --to sparsfy | unknown format 'sparsfy' | Did you mean 'sparsify'?
# values
train c.yaml --replacements.0.sparsity.k two | replacements.0.sparsity.k: expected a whole number, got 'two'
train c.yaml --replacements.0.sparsity topk | replacements.0.sparsity: expected a mapping of fields, got 'topk'
train c.yaml --replacements mxd | replacements: expected a list of mappings such as {method: mxd}, got 'mxd'
train c.yaml --replacements.0.num_units 1 | replacements.0: k = 2 is more than num_units = 1
train c.yaml --replacements.0.sparsity.k 9000 | MxD: k = 9000 is more than its 640 units
train c.yaml --blocks foo | blocks: expected numbers such as 0,3 | got 'foo'
train c.yaml --blocks 4-1 | blocks: expected numbers such as 0,3 | got '4-1'
train c.yaml --blocks 6 | block 6 is out of range: tiny-gpt2 has 6 blocks
train c.yaml --blocks -1,5 | blocks [-1, 5] name a block twice
train c.yaml --training.tokens 10 | tokens = 10 is less than one batch of 512
train c.yaml --training.tokens many | training.tokens: expected a whole number, got 'many'
train c.yaml --training.lr .inf | training.lr: expected a finite number, got inf
train c.yaml --training.lr -1 | training.lr: expected a number greater than 0, got -1
train c.yaml --training.warmup_steps 9 | the warm-up of 9 steps is longer than the run, 2 steps
train c.yaml --training.recipe paper --training.batch_tokens 512 | warm-up of 5,000 steps | use recipe: short
train c.yaml --data.context 1 | data.context: expected a number of at least 2, got 1
train c.yaml --data.context 1000 | a context of 1,000 tokens is more than the 128 positions of tiny-gpt2
train c.yaml --model.device gpu | device 'gpu' is not available; choose auto, cpu or cuda
train c.yaml --run ../x | run: expected letters, digits, '.', '_' and '-'
train c.yaml --groups 0 | cannot make 0 groups; choose one of 1
plan c.yaml --processes 0 | Must be >= 1
plan c.yaml --network nan | expected a finite number greater than 0, got nan
plan c.yaml --tokens-per-second 0 | expected a finite number greater than 0, got 0
plan c.yaml --tune.tokens 1 | tokens = 1 is less than one batch of 1024; raise it or lower batch_tokens
generate done --words 5e9 | words: expected a number of at most 10000, got 5000000000
evaluate done --tokens 1 --context 2 | the MLP's output is the same at all positions that count (1)
mask done --domains languages --score-column s | --score-column is for --scores
mask done --domains languages --thresholds 0.9 | --thresholds is for --scores
mask done --scores few.jsonl --ratio 3 | --ratio is for --domains
evaluate done --tokens 0 | tokens: expected a number greater than 0, got 0
evaluate done --context many | --context | expected a whole number, got 'many'
steer done --scale nan | scale: expected a finite number, got 'nan'
steer done --units 0- | --units is '0-'; expected numbers and ranges such as 3,17,40-49
steer done --units 700 | has units 0 ... 639, got 700
rewrite done --direction up | direction: expected probe, token:WORD or unit:NUMBER, got 'up'
# files
train nowhere.yaml | cannot read config 'nowhere.yaml': No such file or directory. `mxd init` writes one
train c.yaml --model.source done/own | there is no folder 'done/own' here; expected a bundled name
train c.yaml --data.source nowhere.txt | no text at 'nowhere.txt'; expected a file, a folder, or a pattern
train c.yaml --data.source ./texts | there is no text './texts' here
train c.yaml --data.source few.jsonl --data.split train | held-out side of 'few.jsonl' is less than one
train c.yaml --data.cache nowhere | no activation cache at 'nowhere'; write one with: mxd cache
train c.yaml --data.cache done | no activation cache at 'done'
cache c.yaml new --blocks foo | blocks: expected numbers such as 0,3 | got 'foo'
cache c.yaml new --blocks 6 | block 6 is out of range: tiny-gpt2 has 6 blocks
cache c.yaml new --data.context 1000 | a context of 1,000 tokens is more than the 128 positions of tiny-gpt2
cache c.yaml new --data.column body | no column 'body'; it has: text, source. Set data.column
cache c.yaml done | done exists and is not an activation cache; choose another folder
cache c.yaml c.yaml | c.yaml exists and is not an activation cache
cache c.yaml c.yaml/below | Not a directory; choose another folder
train c.yaml --model.source no/such-model | cannot load base model 'no/such-model'
train c.yaml --data.source no/such-data | cannot load dataset | on the Hub (HF_HUB_OFFLINE is set); expected `bundled`
compare c.yaml --data.source no/such-data | cannot load dataset | (HF_HUB_OFFLINE is set); expected `bundled`
train c.yaml --data.column body | no column 'body'; it has: text, source. Set data.column
train c.yaml --out c.yaml | cannot write to c.yaml/new: Not a directory; choose another folder
train c.yaml --run done --out . | done already holds a run, with other settings | data.split was 'train', is 'valid
train c.yaml --resume | nothing to resume in | Start without --resume
compare c.yaml --evaluation.questions probing --evaluation.probing.sets x.csv | no labelled texts at 'x.csv'
compare c.yaml --evaluation.split nope | unknown split 'nope'; choose one of: train, validation, test
plan c.yaml --json . | '.' is a folder; give the file to write
info nowhere | no checkpoint at 'nowhere': expected a folder
tune done --source nowhere.txt | no text at 'nowhere.txt'; expected a file, a folder, or a pattern
evaluate nowhere | no checkpoint at 'nowhere': expected a folder
evaluate done --out . | '.' is a folder; give the file to write, such as 'results.json'
evaluate done --out c.yaml/x.json | cannot write 'c.yaml/x.json'
evaluate done --source no/such-data | cannot load dataset | on the Hub (HF_HUB_OFFLINE is set)
evaluate done --model tiny-llama | was trained for block 1 of 'tiny-gpt2', and --model tiny-llama has
evaluate org/name | there is no folder org/name here, offline mode is on
probe done --set factbok | no labelled set 'factbok' | Did you mean 'factbook'?
mask done --scores few.jsonl | few.jsonl, line 1: no column 'score'; it has: text. Set --text-column
export-model tiny-gpt2 done done | done exists and is not an empty folder
export-model tiny-llama done new | was trained for block 1 of 'tiny-gpt2', and MODEL tiny-llama has
# packages that are not there
train c.yaml --training.trackers dvclive | training.trackers: dvclive is not installed; pip install dvclive
evaluate done --lm-eval arc_easy | pip install 'mxd[lm-eval]'
train c.yaml --model.source m.gguf | pip install 'mxd[gguf]'
train c.yaml --model.dtype int8 | pip install 'mxd[bnb]'
"""
ROWS = [tuple(map(str.strip, line.split("|"))) for line in MISTAKES.splitlines() if line and line[0] != "#"]
JARGON = ("Input should", "Extra inputs", "Value error", "literal", "tuple", "union", " tag", "pydantic", "[type=")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: a config, a few texts, and the run ``done``, trained on them."""
    place = tmp_path_factory.mktemp("user")
    (place / "c.yaml").write_text(CONFIG)
    (place / "few.jsonl").write_text("".join(json.dumps({"text": f"The President is {i}."}) + "\n" for i in range(60)))
    (place / "m.gguf").write_bytes(b"GGUF")
    text = ["--data.source", str(place / "few.jsonl"), "--data.split", "train", "--data.context", "8"]
    train(load_config(place / "c.yaml", ["--out", str(place), "--run", "done", *text]))
    return place


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_mistake_ends_in_a_message(
    row: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, *parts = row
    monkeypatch.chdir(folder)
    for package in ("lm_eval", "gguf", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, package, None)
    before = sorted(folder.rglob("*"))
    code, _, err = mxd(capsys, *shlex.split(command))
    told = " ".join(err.replace("│", " ").split())
    assert code in (1, 2) and [part for part in parts if part not in told] == [], told
    assert not [word for word in JARGON if word in told], told
    assert "cannot load" not in told or err.partition("mxd: ")[2].count("\n") == 1, "one line"
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("command", ["train c.yaml --data.split", "compare c.yaml --evaluation.split"])
def test_the_hub_is_asked_for_the_text_before_a_model_is_loaded(
    command: str, folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    asked: list[tuple[str | None, ...]] = []
    builder = SimpleNamespace(info=SimpleNamespace(splits={"train": None, "validation": None}))
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *name, **_: asked.append(name) or builder)
    monkeypatch.setattr("mxd.training.source.load_frozen", None)
    for split in ("valid", "train"):
        with nullcontext() if split == "valid" else pytest.raises(TypeError, match="NoneType"):
            code, _, err = mxd(capsys, *shlex.split(command), split, "--data.source", "org/name:small")
            assert (
                code == 1 and "split 'valid': it has no such split; it has train, validation; expected `bundled`" in err
            )
    assert set(asked) == {("org/name", "small")}


def test_a_judge_that_never_answers_is_a_failure(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mxd.evaluation.judging.time.sleep", lambda seconds: None)
    judge = ["--judge", "http://127.0.0.1:9/v1", "--judge-model", "m", "--out", tmp_path / "s.json"]
    code, _, err = mxd(capsys, "steer", folder / "done", "--units", 0, "--samples", 1, "--tokens", 1, *judge)
    assert code == 1 and "m at 127.0.0.1 gave no answer that counts, of 1 asked for: cannot be reached (1)" in err
    assert (tmp_path / "s.json").exists()


def test_few_texts_are_said_to_be_read_again(
    folder: Path, trained_gpt2: FrozenModel, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    config = load_config("c.yaml", ["--data.source", "few.jsonl", "--data.split", "train"])
    say_once.cache_clear()
    text_contexts(config, trained_gpt2, None)
    assert re.search(r"The text holds [\d,]+ tokens, so 1,024 of training are 4\.\d epochs", capsys.readouterr().err)
    text_contexts(load_config("c.yaml"), trained_gpt2, None)
    assert not capsys.readouterr().err
