"""Hostile input is accepted or refused with an MxdError; it never runs, hangs, fills the memory or writes elsewhere.

What `scripts/fuzz.py` has found stands here case by case, and a short part of the fuzz itself.
"""

import io
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from command import mxd as run_mxd
from damage import fit_hash
from rich.table import Table
from rich.text import Text
from safetensors.torch import load_file, save_file

import mxd
from mxd.artifacts.checkpoint import load_layer, load_layers, save_layer
from mxd.artifacts.provenance import Provenance
from mxd.common.errors import MxdError, MxdWarning, printable, redact, typed
from mxd.common.files import read_json, read_text, regular
from mxd.common.parsing import MOST_VALUES, parse_json, parse_yaml, without_surrogates
from mxd.common.progress import PlainConsole
from mxd.config import RunConfig, load_config, parse_config
from mxd.data.labelled import labelled_texts
from mxd.data.text import documents
from mxd.layers import parse_layer
from mxd.layers.sae import TopKSAEConfig
from mxd.layers.transcoder import TranscoderConfig
from mxd.share.formats.base import ToolConfig, read_tensors, read_tool_config
from mxd.splice import RevisionWarning

SCRIPTS = Path(mxd.__file__).parent.parent / "scripts"
ENCODER = {"activation": "gelu", "glu": False, "sparsity": {"kind": "topk", "k": 2}}
CONFIG = {"replacements": [{"method": "transcoder", "num_units": 8}]}


@pytest.fixture
def layer(tmp_path):
    """A small layer's folder."""
    config = parse_layer(
        {"method": "transcoder", "d_in": 4, "d_out": 4, "num_units": 6, "sparsity": {"kind": "topk", "k": 2}}
    )
    about = Provenance(model="tiny-gpt2", revision=None, block=0, fingerprint="0" * 16)
    return save_layer(tmp_path / "layer", config.build(), about)


def change(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    config["layer"] |= fields
    (folder / "config.json").write_text(json.dumps(config))


def written(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# Checkpoints


@pytest.mark.parametrize("units", [10**6, 10**12, 2**62])
def test_a_layer_larger_than_its_file_is_refused_before_it_is_made(layer, units, monkeypatch):
    change(layer, num_units=units)
    monkeypatch.setattr(TranscoderConfig, "build", lambda *_: pytest.fail("was built"))
    with pytest.raises(MxdError, match=r"config.json describes [\d,]+ parameters, model.safetensors holds 58\."):
        load_layer(layer)


@pytest.mark.parametrize("digits", [30, 4000])
def test_numbers_beyond_all_sizes_are_refused_where_they_are_read(layer, digits):
    change(layer, num_units=10**digits)
    with pytest.raises(MxdError, match=r"whole number 1000.*too large"):
        load_layer(layer)


@pytest.mark.parametrize("method", [[], {}, None, 1, "x"])
def test_a_method_is_one_of_the_names(layer, method):
    change(layer, method=method)
    with pytest.raises(MxdError, match="unknown method"):
        load_layer(layer)


def test_an_autoencoder_of_two_widths_is_refused():
    with pytest.raises(ValueError, match="an autoencoder has one width"):
        TopKSAEConfig(d_in=6, d_out=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(layer, value):
    tensors = load_file(layer / "model.safetensors")
    tensors["decoder"][1, 2] = value
    save_file(tensors, layer / "model.safetensors")
    fit_hash(layer)
    with pytest.raises(MxdError, match="decoder holds values that are not finite"):
        load_layer(layer)


def test_a_threshold_that_is_no_number_is_refused(layer):
    change(layer, sparsity={"kind": "batch_topk", "k": 4})
    tensors = load_file(layer / "model.safetensors")
    state = {"sparsity.threshold": torch.tensor(float("nan")).double(), "sparsity.steps": torch.tensor(1)}
    save_file(tensors | state, layer / "model.safetensors")
    fit_hash(layer)
    with pytest.raises(MxdError, match=r"sparsity\.threshold holds values that are not finite"):
        load_layer(layer)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_whole_numbers_in_the_place_of_weights_are_refused(layer, dtype):
    tensors = load_file(layer / "model.safetensors")
    tensors["decoder"] = tensors["decoder"].to(dtype)
    save_file(tensors, layer / "model.safetensors")
    fit_hash(layer)
    with pytest.raises(MxdError, match=rf"decoder is {dtype}, expected torch.float32"):
        load_layer(layer)


@pytest.mark.parametrize("fields", [[1], "x", 3, None, {}], ids=str)
def test_a_layer_that_is_no_mapping_is_refused_wherever_it_is_read(layer, fields, capsys):
    held = json.loads((layer / "config.json").read_text())
    (layer / "config.json").write_text(json.dumps(held | {"layer": fields}))
    with pytest.raises(MxdError, match="unknown method None; choose one of: "):
        load_layer(layer)
    code, _, err = run_mxd(capsys, "info", layer)
    assert code == 1 and "unknown method None" in err


def test_half_precision_weights_are_read_as_they_always_were(layer):
    tensors = load_file(layer / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, layer / "model.safetensors")
    fit_hash(layer)
    loaded = load_layer(layer).layer
    assert loaded.encoder.dtype == torch.float32
    assert torch.equal(loaded.encoder, tensors["encoder"].bfloat16().float())


def test_a_layers_tensors_are_its_own_and_not_the_files(layer):
    loaded = load_layer(layer).layer
    before = loaded.encoder.clone()
    with (layer / "model.safetensors").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\0" * 100)
    assert torch.equal(loaded.encoder, before)


SPECIAL = {
    "pipe": lambda path: os.mkfifo(path),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "loop": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_pipes_devices_folders_and_loops_are_no_files(layer, name, kind):
    """A pipe would block for ever, a device never end."""
    (layer / name).unlink()
    SPECIAL[kind](layer / name)
    with pytest.raises(MxdError):
        load_layer(layer)
    with pytest.raises(OSError):
        regular(layer / name)
    with pytest.raises(OSError):
        read_text(layer / name)
    with pytest.raises(MxdError):
        read_tensors(layer / name)
    with pytest.raises(MxdError):
        read_tool_config(layer / name, ToolConfig)


def test_a_file_of_plain_data_is_read_up_to_a_bound(tmp_path):
    path = written(tmp_path / "a.json", "x" * 11)
    assert read_text(path, 11) == "x" * 11
    with pytest.raises(ValueError, match="larger than 10 bytes"):
        read_text(path, 10)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000], ids=["lists", "objects"])
def test_deep_json_is_refused(layer, text):
    written(layer / "config.json", text)
    with pytest.raises(MxdError, match="nested too deeply"):
        load_layer(layer)
    with pytest.raises(MxdError, match="nested too deeply"):
        read_json(layer / "config.json")


@pytest.mark.parametrize(
    "name",
    ["a" * 300, "a" * 5000, "a\0b", "~" * 300, "org/" + "a" * 5000],
    ids=["long", "longer", "NUL", "home", "long reference"],
)
def test_names_that_no_system_knows_are_refused(name):
    for read in (load_layer, load_layers, documents, labelled_texts):
        with pytest.raises(MxdError):
            read(name)


# Pickles


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("form", ["bare", "torch", "torch-old", "numpy"])
def test_a_pickle_offered_as_anything_is_refused_and_does_not_run(layer, tmp_path, form):
    payload, path = {"cfg": {}, "state_dict": {}, "x": Payload(tmp_path / "escaped")}, tmp_path / "payload.pt"
    if form == "bare":
        path.write_bytes(pickle.dumps(payload))
    elif form == "numpy":
        np.savez(path.with_suffix(".npz"), a=np.array([payload], dtype=object))
        path.with_suffix(".npz").rename(path)
    else:
        torch.save(payload, path, _use_new_zipfile_serialization=form == "torch")
    from mxd.share.formats import FORMATS

    def offered(name):
        shutil.copyfile(path, layer / name)
        return layer

    readers = [
        lambda: FORMATS["reference"].read(path),
        lambda: load_layer(offered("model.safetensors"), verify=False),
        lambda: load_layer(offered("config.json")),
        lambda: load_config(path),
        lambda: FORMATS["sparsify"].read(offered("cfg.json")),
        lambda: list(documents(str(offered("train.parquet") / "train.parquet"))),
        lambda: labelled_texts(offered("set.parquet") / "set.parquet"),
    ]
    for read in readers:
        with pytest.raises(MxdError):
            read()
    assert not (tmp_path / "escaped").exists()
    if form == "bare":  # that it would have run
        pickle.loads(path.read_bytes())
        assert (tmp_path / "escaped").exists()


# Plain data


def bomb(form, depth=30, width=10):
    first = "a0: &a0 [1]" if form == "lists" else "a0: &a0 {x: 1}"
    lines = [first]
    for n in range(1, depth):
        inner = ", ".join([f"*a{n - 1}"] * width)
        lines.append(f"a{n}: &a{n} [{inner}]" if form == "lists" else f"a{n}: &a{n} {{<<: [{inner}], y{n}: 1}}")
    return "\n".join(lines)


@pytest.mark.parametrize("form", ["lists", "merged keys"])
def test_aliases_of_aliases_are_refused_before_they_are_followed(tmp_path, form):
    with pytest.raises(ValueError, match=f"more than {MOST_VALUES:,} values"):
        parse_yaml(bomb(form))
    with pytest.raises(MxdError, match="more than 100,000 values"):
        load_config(written(tmp_path / "c.yaml", bomb(form)))


def test_aliases_and_merged_keys_as_people_use_them_are_followed():
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: *a") == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 3, "y": 2},
        "c": {"x": 1, "y": 2},
    }
    assert parse_yaml("") is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 5000, "nested too deeply"),
        ("- " * 5000, "nested too deeply"),
        ("a: 1\nb: 2\na: 3", "it gives 'a' twice"),
        ("a: &a [*a]", "contains itself"),
        ("a: " + "9" * 400, "too large"),
        ("a: " + "9" * 5000, "digits"),
        ("a: 0x" + "f" * 40, "too large"),
        ("!!python/object/apply:os.system [touch escaped]", "could not determine a constructor"),
        ("!!python/name:os.system x", "could not determine a constructor"),
        ("a: !!int [1]", "expected a scalar node"),
        ("a: !!timestamp x", "not of the kind"),
        ("? {a: 1}\n: 2", "unhashable"),
        ("a: \x00", "special characters"),
        ("x" * 400_001, "larger than 400,000"),
    ],
    ids=range(14),
)
def test_yaml_that_is_refused(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_yaml(text)


def test_whole_numbers_in_json_have_a_bound():
    assert parse_json(f"[{2**63 - 1}, {-(2**63) + 1}, 1e999]") == [2**63 - 1, -(2**63) + 1, float("inf")]
    for number in (2**63, -(2**63), 10**5000):
        with pytest.raises(ValueError, match="too large"):
            parse_json(json.dumps(number) if number < 10**19 else "1" + "0" * 5000)


def test_lists_that_make_too_many_replacements_are_refused_before_they_are_made():
    lists = {f"field{n}": list(range(10)) for n in range(12)}
    with pytest.raises(MxdError, match=r"the lists make 1,000,000,000,000 replacements"):
        parse_config({"replacements": [{"method": "mxd", **lists}]})


@pytest.mark.parametrize("recipe", [["paper"], {}, None, 1])
def test_a_recipe_that_is_no_name_is_refused(recipe):
    with pytest.raises(MxdError, match=r"training.recipe: expected paper, short, fast or scaled"):
        parse_config(CONFIG | {"training": {"recipe": recipe}})


@pytest.mark.parametrize("part", ["²", "-1", "1", "9" * 5000, "٣"], ids=["square", "negative", "one", "long", "arabic"])
def test_indices_of_overrides_are_ordinary_numbers(tmp_path, part):
    path = written(tmp_path / "c.yaml", yaml.safe_dump(CONFIG))
    with pytest.raises(MxdError, match=r"is not one of the indices 0 \.\.\. 0"):
        load_config(path, [f"--replacements.{part}.num_units", "3"])


@pytest.mark.parametrize(
    "value", ["[" * 5000, "&a [*a]", "!!python/name:os.system x", "9" * 5000], ids=["deep", "itself", "python", "long"]
)
def test_values_of_overrides_are_plain_data(tmp_path, value):
    path = written(tmp_path / "c.yaml", yaml.safe_dump(CONFIG))
    with pytest.raises(MxdError, match=r"is not a YAML value"):
        load_config(path, [f"--seed={value}"])


# Text


def test_half_characters_in_texts_are_replaced(tmp_path, tokenizer):
    """JSON can hold lone surrogates; UTF-8, and so a tokenizer, cannot."""
    rows = "".join(json.dumps({"text": f"word \ud800 {n}", "label": f"l\udfff{n % 2}"}) + "\n" for n in range(40))
    found = documents(str(written(tmp_path / "t.jsonl", rows)))
    tokenizer(list(found))
    labelled = labelled_texts(tmp_path / "t.jsonl")
    tokenizer(labelled.texts)
    assert labelled.classes == ["l?0", "l?1"] and labelled.texts[0] == "word ? 0"
    assert without_surrogates("ünchanged 😀") == "ünchanged 😀"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".txt", ".csv"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_texts_come_from_ordinary_files(tmp_path, suffix, kind):
    path = tmp_path / f"t{suffix}"
    SPECIAL[kind](path)
    with pytest.raises(MxdError):
        documents(str(path))
    with pytest.raises(MxdError):
        labelled_texts(path)


def test_deep_or_endless_lines_are_refused(tmp_path):
    for text in ("[" * 100_000, "1" * 9000):
        path = written(tmp_path / "t.jsonl", text)
        with pytest.raises(MxdError, match="cannot read text"):
            documents(str(path))
        with pytest.raises(MxdError, match="cannot read text"):
            labelled_texts(path)


# Secrets


SECRETS = {"HF_TOKEN": "hf_" + "Q" * 34, "WANDB_API_KEY": "wandbsecret" * 3, "OPENAI_API_KEY": "plainlookingvalue"}


@pytest.fixture
def secrets(monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    return [*SECRETS.values(), "pa55word", "querysecret"]


def test_messages_hold_no_secret_no_escape_and_no_novel(secrets):
    said = str(MxdError(f"see {SECRETS} at https://me:pa55word@host/x?token=querysecret for hf_hook_point \x1b[2Jx"))
    assert not [secret for secret in secrets if secret in said]
    assert "https://host/x" in said and "hf_hook_point" in said and "\x1b" not in said
    assert len(str(MxdError("x" * 10**6))) < 10_000
    assert repr(MxdError(SECRETS["HF_TOKEN"])) == "MxdError('<secret>')"


def test_keys_are_known_by_their_form_where_the_environment_does_not_hold_them():
    for key in ("hf_" + "a" * 34, "sk-proj-" + "b" * 40, "ghp_" + "c" * 36, "AKIA" + "D" * 16):
        assert redact(f"with {key}.") == "with <secret>."
    assert redact("hf_hook_point_in, task-specific, org/name@main") == "hf_hook_point_in, task-specific, org/name@main"


@pytest.mark.parametrize("field", ["data.source", "data.cache", "model.source", "out", "data.column"])
def test_a_config_with_a_secret_in_it_is_refused(secrets, tmp_path, field):
    """Configs are written to the run's folder, its checkpoints, and the trackers."""
    for value in ("https://me:pa55word@host/t.jsonl", "s3://b/k?sig=querysecret", SECRETS["OPENAI_API_KEY"]):
        with pytest.raises(MxdError, match="holds a user, a password, a query or a key") as caught:
            load_config(written(tmp_path / "c.yaml", yaml.safe_dump(CONFIG)), [f"--{field}={value}"])
        assert not [secret for secret in secrets if secret in str(caught.value)]


@pytest.mark.long
def test_nothing_a_command_writes_or_prints_holds_a_secret(secrets, tmp_path, layer):
    """Commands that fail, with secrets in the environment, in URLs and where keys belong."""
    url = "https://me:pa55word@127.0.0.1:1/v1?key=querysecret"
    plain = url.replace("https", "http").replace("127.0.0.1", "host.invalid")
    commands = [
        ["evaluate", layer, "--source", url, "--out", tmp_path / "e.json"],
        ["evaluate", layer, "--model", url],
        ["steer", layer, "--judge", "ftp" + url[5:], "--judge-model", "m"],
        ["steer", layer, "--judge", plain, "--judge-model", "m", "--judge-key", "OPENAI_API_KEY"],
        ["cache", written(tmp_path / "c.yaml", yaml.safe_dump(CONFIG)), url],
        ["train", tmp_path / "c.yaml", "--data.source", url],
        ["info", f"org/name@{SECRETS['HF_TOKEN']}"],
        ["push", layer, f"org/{SECRETS['OPENAI_API_KEY']}/x"],
        ["pull", url],
    ]
    program = "import sys, json\nfrom mxd import cli\nfor words in json.loads(sys.argv[1]):\n"
    program += "    sys.argv = ['mxd', *words]\n    try: cli.main()\n    except SystemExit as end: print(end.code)\n"
    words = json.dumps([[str(word) for word in command] for command in commands])
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["1"] * len(commands), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    texts = [done.stderr, *(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())]
    for secret in secrets:
        assert not [text[:3000] for text in texts if secret in text], secret


# Control characters


HOSTILE = "\x1b[2J\x1b]0;t\x07 [/b] \x9b1m :bomb: \x7f\x08"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def test_a_printable_text_has_marks_in_their_place():
    assert printable(HOSTILE) == "\ufffd[2J\ufffd]0;t\ufffd [/b] \ufffd1m :bomb: \ufffd\ufffd"
    assert printable("Größe\t漢字\nüber 😀") == "Größe\t漢字\nüber 😀"
    assert not CONTROL.search(str(MxdError(HOSTILE)) + str(MxdWarning(HOSTILE)))
    with pytest.warns(RevisionWarning) as found:
        warnings.warn(HOSTILE, RevisionWarning, stacklevel=1)
    assert str(found[0].message) == printable(HOSTILE)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_console_shows_text_as_text_and_keeps_its_own_styles(monkeypatch, terminal):
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    console = PlainConsole()
    console.file = io.StringIO()
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE)
    for shown in (HOSTILE, Text(HOSTILE), Text("bold", style="bold"), table):
        console.print(shown)
    said = console.file.getvalue()
    assert ("\x1b[1mbold\x1b[0m" in said) == terminal
    own = re.sub(r"\x1b\[[\d;]*m", "", said) if terminal else said
    assert not CONTROL.search(own)
    assert own.count("[/b] \ufffd1m :bomb:") == 5
    widths = {len(line) for line in own.splitlines() if line[0] in "┏┃┡│└"}
    assert len(widths) == 1 and max(widths) == len(printable(HOSTILE)) + 4  # no cell is cut


@pytest.mark.long
def test_no_command_hands_on_a_control_character(tmp_path, capsys, trained_gpt2):
    """Those of a config's provenance, of names on the disk, of prompts and of texts."""
    run = tmp_path / f"run {HOSTILE.replace('/', '')}"
    config = parse_layer({"method": "mxd", "d_in": 128, "d_out": 128, "num_units": 60, "hidden": 16, **ENCODER})
    data = {"source": str(written(tmp_path / f"{HOSTILE.replace('/', '')}.txt", f"one {HOSTILE} word " * 400))}
    about = Provenance(
        model=f"$tiny {HOSTILE}$",
        revision=None,
        block=1,
        fingerprint=trained_gpt2.fingerprint(1),
        input_convention=HOSTILE,
        data=data | {"split": "train", "context": 16},
        training={"recipe": HOSTILE},
        versions={HOSTILE: HOSTILE},
    )
    save_layer(run / f"block1 {HOSTILE.replace('/', '')}", config.build(), about)
    told, on = "", ["--model", "tiny-gpt2", "--source", "bundled", "--tokens", "64"]
    for words in (
        ["evaluate", run, *on],
        ["generate", run, *on[:-1], "2", "--prompt", f"The {HOSTILE}"],
        ["units", run, *on, "--top", "1"],
        ["structure", run, *on, "--experts", "2", "--prompt", f"The {HOSTILE}"],
        ["info", run],
        ["report", run],
        ["push", run, "org/name"],
        ["convert", run, tmp_path / HOSTILE, "--to", "sparsify", *on],
        ["train", written(tmp_path / "\x1b[2J.yaml", "x: \x07")],
    ):
        code, out, err = run_mxd(capsys, *words)
        assert code == (words[0] in ("push", "convert", "train")), err
        told += out + err
    assert not CONTROL.search(told)
    assert told.count("\ufffd[2J") > 10
    files = [path for path in run.rglob("*") if path.suffix in (".md", ".html", ".json")]
    names = {path.name for path in files}
    assert names >= {"README.md", "report.html", "report.md", "faithfulness.json", "config.json"}
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not CONTROL.search(text.replace("\x7f", "") if path.suffix == ".json" else text), path.name
        assert "2J" in text or path.name == "metrics.json", path.name


def test_words_of_commands_are_quoted():
    for words in (
        ["a b", "$(touch x)", "`x`", "it's", "a;b", "*", ""],
        ["s3://bucket/a", "org/name@main", "checkpoints/r"],
    ):
        assert shlex.split(typed(*words)) == words
    assert typed("checkpoints/r", "s3://b/c") == "checkpoints/r s3://b/c"
    assert shlex.split(typed(Path("--opt"), "-x y")) == ["./--opt", "./-x y"]


# The fuzz


@pytest.mark.long
def test_a_short_fuzz_finds_nothing(tmp_path):
    """A part of it that takes seconds; `python scripts/fuzz.py` is the whole."""
    names = ["layer", "huge layer", "run state", "config", "overrides", "labelled set", "text", "base model"]
    names += ["reference to the Hub"]
    command = [sys.executable, str(SCRIPTS / "fuzz.py"), "--inputs", "250", "--json", str(tmp_path / "fuzz.json")]
    command += [word for name in names for word in ("--only", name)] + ["--findings", str(tmp_path / "findings")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    loaders = json.loads((tmp_path / "fuzz.json").read_text())["loaders"]
    assert set(loaders) == set(names)
    counts = {key: sum(each["counts"].get(key, 0) for each in loaders.values()) for key in ("inputs", "refused")}
    assert counts["inputs"] >= 250 and counts["refused"] >= 100


@pytest.mark.long
def test_the_fuzz_finds_what_is_there(tmp_path):
    """With a hole made on purpose: a loader that runs pickles."""
    sitecustomize = "import mxd.artifacts.folders as c, pickle\nold = c.read_json\n"
    sitecustomize += "def hole(path):\n    data = path.read_bytes()\n"
    sitecustomize += "    return pickle.loads(data) if data[:1] == b'\\x80' else old(path)\nc.read_json = hole\n"
    command = (
        f"{sitecustomize}import sys, runpy\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    )
    words = [str(SCRIPTS / "fuzz.py"), "--only", "layer", "--inputs", "400", "--findings", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", command, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "wrote outside its place" in done.stdout, done.stdout + done.stderr
    assert list(tmp_path.glob("layer-*/watched/escaped"))


def test_config_fields_are_all_guarded():
    """The guard against secrets is on every section, nested ones included."""
    with pytest.raises(ValueError, match="holds a user"):
        RunConfig.model_validate(CONFIG | {"out": "ftp://a:b@c/d"})
