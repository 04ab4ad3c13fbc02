"""The Hub: what one pushes another splices in, bit for bit; every failure is one line that says what to do.

All of it goes through huggingface_hub's own client over HTTP to a Hub on 127.0.0.1.
"""

import errno
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest
import torch
from command import mxd as run_mxd
from damage import flipped, forget_hash
from huggingface_hub import ModelCard, close_session, constants
from loopback_hub import Blob, LoopbackHub, Repo

import mxd
from mxd.artifacts.checkpoint import load_layer, load_layers, save_layer
from mxd.artifacts.folders import UnhashedWarning, find_layers
from mxd.artifacts.hub import HubReference, cached_reference, reference_of
from mxd.artifacts.provenance import Provenance
from mxd.artifacts.sets import name_of, named_layers, sets_of
from mxd.artifacts.transfer import pull, push
from mxd.common.errors import MxdError
from mxd.evaluation.checkpoints import describe
from mxd.layers.sparsity import TopKConfig
from mxd.layers.transcoder import TranscoderConfig
from mxd.model.loading import outline
from mxd.splice import RevisionWarning, spliced

WRITER, READER = "hf_thewriter1", "hf_thereader1"
OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A running Hub that the client asks, an empty cache, and a token that may write to ``org``."""
    with LoopbackHub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", WRITER)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client waits between its tries
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        yield server
        close_session()


def make(k, seed=0):
    layer = TranscoderConfig(d_in=32, d_out=32, num_units=48, sparsity=TopKConfig(k=k)).build(seed)
    layer.decoder.data.normal_(generator=torch.Generator().manual_seed(seed))
    return layer.eval()


def provenance(base, number, **fields):
    known = {"model": "org/base", "revision": OLD, "tokens": 1000}
    return Provenance(block=number, fingerprint=base.fingerprint(number), **known | fields)


@pytest.fixture
def single(tmp_path, gpt2):
    """A layer's folder."""
    return save_layer(tmp_path / "single", make(4), provenance(gpt2, 1), {"loss": 0.5})


@pytest.fixture
def run(tmp_path, gpt2):
    """A run's folder: two blocks x two K, and what a run leaves beside them."""
    for number in (0, 1):
        for k in (4, 8):
            save_layer(tmp_path / "run" / f"block{number}-tc-k{k}", make(k, 10 * number + k), provenance(gpt2, number))
    (tmp_path / "run" / "state" / "step-1").mkdir(parents=True)
    for private in ("state/step-1/state.safetensors", "metrics.jsonl", "config.yaml", "block0-tc-k4/notes.txt"):
        (tmp_path / "run" / private).write_text("not to be shared")
    (tmp_path / "run" / ".block9-tc-k4.abc").mkdir()
    (tmp_path / "run" / ".block9-tc-k4.abc" / "config.json").write_text("{}")
    return tmp_path / "run"


def logits(model, ids, replacements):
    with spliced(model, replacements):
        return model.logits(ids)


def command(capsys, *words):
    """Run the command line: exit code, output, and the message, which is one line."""
    code, out, err = run_mxd(capsys, *words)
    assert WRITER not in err + out
    assert err.count("mxd: ") == (code != 0)
    message = err.splitlines()[-1] if code else ""
    assert message.startswith("mxd: ") == bool(code)
    return code, out, message


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# References


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("org/name", ("org/name", "", None)),
        ("org/name@v1.0", ("org/name", "", "v1.0")),
        ("org/name/block3-mxd-k32", ("org/name", "block3-mxd-k32", None)),
        ("org/name/a/b_c.d+e=f@refs/pr/1", ("org/name", "a/b_c.d+e=f", "refs/pr/1")),
        (f"hf://org/name/sub@{NEW}", ("org/name", "sub", NEW)),
    ],
)
def test_a_reference_is_read_into_its_parts(text, parts):
    found = HubReference.parse(text)
    assert (found.repo, found.subfolder, found.revision) == parts
    assert str(found) == text.removeprefix("hf://")
    assert found.name == (parts[1] or parts[0]).split("/")[-1]


@pytest.mark.parametrize(
    "text",
    [
        "name",
        "org/",
        "/org/name",
        "org/name/",
        "org/name@",
        "org/name//sub",
        "org/name/../other",
        "org/name/sub/..",
        "org/name/.git",
        "org/name/a..b",
        "org/name/a\\b",
        "org/name/*",
        "org/name@../main",
        "org/name@a b",
        "org/na--me",
        "org/..",
        "hf:///etc/passwd",
        "org/name/sub\n",
        "org/naïve",
    ],
)
def test_nothing_that_could_lead_elsewhere_is_a_reference(text):
    with pytest.raises(MxdError, match=r"not a Hub reference; expected org/name\[/subfolder\]\[@revision\]"):
        HubReference.parse(text)


def test_local_paths_win_over_references(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert reference_of("org/name") == HubReference("org/name")
    assert reference_of(Path("org/name")) is None
    for local in ("name", "./org/name", "../org/name", "/org/name", "~/org/name"):
        assert reference_of(local) is None
    (tmp_path / "org").mkdir()
    assert reference_of("org/name") is None  # a mistyped path asks nobody
    assert reference_of("hf://org/name") == HubReference("org/name")


def test_a_revision_is_given_once():
    assert reference_of("org/name/sub", "v1") == HubReference("org/name", "sub", "v1")
    assert reference_of("org/name@v1", "v1") == HubReference("org/name", "", "v1")
    with pytest.raises(MxdError, match="two revisions"):
        reference_of("org/name@v1", "v2")
    with pytest.raises(MxdError, match=r"local path, which has no revision 'v1'"):
        reference_of(Path("here"), "v1")
    with pytest.raises(MxdError, match="not a Hub reference"):
        reference_of("org/name", "../v1")


# There and back


def test_a_pushed_layer_gives_the_same_logits_bit_for_bit(hub, single, gpt2, ids):
    expected = logits(gpt2, ids, {1: load_layer(single)})
    assert not torch.equal(expected, gpt2.logits(ids))
    pushed = load_layer(single).push_to_hub("org/one")
    assert pushed.url == f"{hub.url}/org/one"
    trained = mxd.from_pretrained(f"org/one@{pushed.revision}")
    assert trained.provenance == load_layer(single).provenance
    assert torch.equal(logits(gpt2, ids, {1: trained}), expected)
    assert torch.equal(logits(gpt2, ids, {1: "org/one"}), expected)  # the reference itself
    assert torch.equal(logits(gpt2, ids, {1: single}), expected)
    (copy,) = pull("org/one")
    assert copy == Path("checkpoints/one")
    assert torch.equal(logits(gpt2, ids, {1: copy}), expected)


def test_a_pushed_set_gives_the_same_logits_whole_and_by_pattern(hub, run, gpt2, ids):
    local = load_layers(run)
    assert list(local) == ["block0-tc-k4", "block0-tc-k8", "block1-tc-k4", "block1-tc-k8"]
    revision = push(run, "org/set").revision
    assert list(mxd.load_layers("org/set")) == list(local)
    some = mxd.load_layers("org/set", "*-k8", revision=revision)
    assert list(some) == ["block0-tc-k8", "block1-tc-k8"]
    expected = logits(gpt2, ids, {0: local["block0-tc-k8"], 1: local["block1-tc-k8"]})
    assert torch.equal(logits(gpt2, ids, {0: some["block0-tc-k8"], 1: some["block1-tc-k8"]}), expected)
    assert torch.equal(logits(gpt2, ids, {0: "org/set/block0-tc-k8", 1: f"org/set/block1-tc-k8@{revision}"}), expected)
    copies = pull("org/set", "mine", "block1-*")
    assert copies == [Path("mine/block1-tc-k4"), Path("mine/block1-tc-k8")]
    assert torch.equal(logits(gpt2, ids, {0: local["block0-tc-k8"], 1: copies[1]}), expected)


def test_a_pattern_downloads_no_other_weights(hub, run):
    push(run, "org/set")
    load_layers("org/set", "block0-*-k4")
    assert len(hub.asked("GET", "safetensors")) == 1
    find_layers("org/set", "block1-*", weights=False)
    assert len(hub.asked("GET", "safetensors")) == 1


def test_only_what_a_checkpoint_is_made_of_is_sent(hub, run):
    push(run, "org/set")
    sent = set(hub.files("org/set")) - {".gitattributes", "README.md"}
    names = ("config.json", "metrics.json", "model.safetensors", "README.md")
    assert sent == {f"block{n}-tc-k{k}/{name}" for n in (0, 1) for k in (4, 8) for name in names}


def test_a_link_is_not_followed_to_what_it_leads_to(hub, single, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (single / "metrics.json").unlink()
    (single / "metrics.json").symlink_to(secret)
    with pytest.raises(MxdError, match=r"metrics.json is a link, which could lead to anything"):
        push(single, "org/one")
    assert not hub.uploads and "org/one" not in hub.repos


def test_pushing_twice_changes_nothing(hub, run, single):
    for folder, repo in ((run, "org/set"), (single, "org/one")):
        first = push(folder, repo, license="mit")
        before, uploads = list(hub.repos[repo].messages), len(hub.uploads)
        assert push(folder, repo) == first
        assert hub.repos[repo].messages == before
        assert len(hub.uploads) == uploads
        assert ModelCard(hub.files(repo)["README.md"].decode()).data.license == "mit"


def test_the_pinned_revision_holds_the_whole_checkpoint_and_stands_in_the_card(hub, run):
    revision = push(run, "org/set").revision
    there, now = hub.files("org/set", revision), hub.files("org/set")
    assert set(there) == set(now)
    assert {path for path in now if now[path] != there[path]} == {path for path in now if path.endswith("README.md")}
    assert f'"org/set@{revision}"' in now["README.md"].decode()
    assert f'"org/set/block0-tc-k4@{revision}"' in now["block0-tc-k4/README.md"].decode()


def test_new_weights_get_a_new_pin_and_the_old_one_still_gives_the_old(hub, single, gpt2):
    old = push(single, "org/one")
    save_layer(single, make(4, seed=5), provenance(gpt2, 1))
    new = push(single, "org/one")
    assert new.revision != old.revision
    card = hub.files("org/one")["README.md"].decode()
    assert new.revision in card and old.revision not in card
    for pushed, seed in ((old, 0), (new, 5)):
        found = mxd.from_pretrained("org/one", revision=pushed.revision).layer
        assert torch.equal(found.decoder, make(4, seed).decoder)
    assert torch.equal(mxd.from_pretrained("org/one").layer.decoder, make(4, 5).decoder)


def test_a_card_that_pins_other_weights_is_not_trusted(hub, single, gpt2):
    """As after a push that was stopped between its two commits."""
    old = push(single, "org/one")
    card = hub.files("org/one")["README.md"]
    save_layer(single, make(4, seed=5), provenance(gpt2, 1))
    push(single, "org/one")
    files = {**hub.repos["org/one"].commits[hub.repos["org/one"].branches["main"]], "README.md": Blob(card, False)}
    hub.repos["org/one"].commit("main", files, "stopped here")
    again = push(single, "org/one")
    assert again.revision != old.revision
    assert torch.equal(mxd.from_pretrained(f"org/one@{again.revision}").layer.decoder, make(4, 5).decoder)
    assert again.revision in hub.files("org/one")["README.md"].decode()


def test_a_branch_and_a_pull_request(hub, single, gpt2):
    push(single, "org/one")
    save_layer(single, make(4, seed=5), provenance(gpt2, 1))
    branch = push(single, "org/one", revision="wider")
    save_layer(single, make(4, seed=6), provenance(gpt2, 1))
    request = push(single, "org/one", create_pr=True)
    assert branch.url == f"{hub.url}/org/one" and request.url == f"{hub.url}/org/one/discussions/1"
    for revision, seed in ((None, 0), ("wider", 5), ("refs/pr/1", 6), (request.revision, 6)):
        assert torch.equal(mxd.from_pretrained("org/one", revision=revision).layer.decoder, make(4, seed).decoder)
    save_layer(single, make(4, seed=7), provenance(gpt2, 1))
    push(single, "org/one", revision="refs/pr/1")  # the open request goes on
    assert torch.equal(mxd.from_pretrained("org/one@refs/pr/1").layer.decoder, make(4, 7).decoder)
    assert set(hub.repos["org/one"].branches) == {"main", "wider", "refs/pr/1"}
    with pytest.raises(MxdError, match="pull request goes to main"):
        push(single, "org/one", revision="wider", create_pr=True)


def test_a_reader_may_open_a_pull_request_and_nothing_else(hub, single, gpt2):
    push(single, "org/one")
    save_layer(single, make(4, seed=5), provenance(gpt2, 1))
    before = hub.files("org/one")
    with pytest.raises(MxdError, match="write access to it; log in with `hf auth login`"):
        push(single, "org/one", token=READER)
    assert push(single, "org/one", create_pr=True, token=READER).url.endswith("/discussions/1")
    assert hub.files("org/one") == before


def test_private_is_private(hub, single, run):
    push(single, "org/one", private=True)
    assert hub.repos["org/one"].private
    assert mxd.from_pretrained("org/one").provenance.block == 1
    with pytest.raises(MxdError, match="no repository org/one on the Hub"):
        load_layer("org/one", token=READER, cache_dir="other")
    push(run, "org/open")
    before = hub.files("org/open")
    (run / "block0-tc-k4" / "metrics.json").write_text('{"secret": 1}')
    with pytest.raises(MxdError, match="exists already and is public, so nothing was sent"):
        push(run, "org/open", private=True)
    assert hub.files("org/open") == before


def test_a_layer_and_a_set_do_not_share_a_repository(hub, single, run):
    push(single, "org/one")
    push(run, "org/set")
    with pytest.raises(MxdError, match="org/one holds one layer, so this set needs a repository of its own"):
        push(run, "org/one")
    with pytest.raises(MxdError, match="org/set holds a set of layers, so this layer needs a repository of its own"):
        push(single, "org/set")
    with pytest.raises(MxdError, match="is not a repository"):
        push(single, "org/one/sub")


def test_a_set_is_not_one_layer_and_a_layer_no_set(hub, single, run):
    push(single, "org/one")
    push(run, "org/set")
    with pytest.raises(MxdError, match="holds 4 layers; add the name of one, or use load_layers: block0-tc-k4, "):
        load_layer("org/set")
    with pytest.raises(MxdError, match="is one layer, from which pattern"):
        load_layers("org/one", "*-k4")
    with pytest.raises(MxdError, match=r"no layer at 'org/set' matches '\*-k9'; there are: block0-tc-k4, "):
        load_layers("org/set", "*-k9")
    assert list(load_layers("org/one")) == ["one"]
    with pytest.raises(MxdError, match="no checkpoint at 'org/set/block7'"):
        load_layer("org/set/block7")


def test_a_changed_layer_is_pushed_as_it_is_on_disk(hub, single):
    trained = load_layer(single)
    trained.layer.decoder.data.zero_()
    trained.push_to_hub("org/one", license="mit", private=True)
    assert torch.equal(mxd.from_pretrained("org/one").layer.decoder, make(4).decoder)


def test_another_revision_of_the_base_model_warns_and_another_model_is_refused(hub, single, gpt2, ids, build_model):
    push(single, "org/one")
    other = mxd.FrozenModel(gpt2.module, gpt2.tokenizer, gpt2.source, NEW, gpt2.blocks)
    with (
        pytest.warns(RevisionWarning, match=f"at revision {OLD}; .* is at revision {NEW}"),
        spliced(other, {1: "org/one"}),
    ):
        pass
    same = mxd.FrozenModel(gpt2.module, gpt2.tokenizer, gpt2.source, OLD, gpt2.blocks)
    with spliced(same, {1: "org/one"}), spliced(gpt2, {}):  # no warning, which would be an error here
        pass
    with pytest.raises(MxdError, match="has other weights there"), spliced(build_model("gpt2", 3), {1: "org/one"}):
        pass
    with pytest.raises(MxdError, match="trained for block 1, not 0"), spliced(gpt2, {0: "org/one"}):
        pass


# Interruptions


def test_an_interrupted_upload_shows_nothing_and_resumes(hub, run, capsys):
    repo, weights = "org/set", {path.parent.name: path for path in run.glob("*/model.safetensors")}
    stuck = re.escape(_sha256(weights["block1-tc-k8"]))
    hub.fault("PUT", stuck, cut=100)
    code, _, message = command(capsys, "push", run, repo)
    assert code == 1
    assert "the connection to" in message and "what arrived is not sent twice" in message
    assert set(hub.files(repo)) == {".gitattributes"}
    sent = set(hub.uploads)
    assert len(sent) == 3
    hub.faults.clear()
    assert command(capsys, "push", run, repo)[0] == 0
    assert len(hub.uploads) == len(set(hub.uploads)) == 4  # each object once
    assert list(load_layers(repo)) == sorted(weights)


def test_an_upload_that_stops_at_the_commit_shows_nothing_and_resumes(hub, run):
    hub.fault("POST", "/commit/", cut=50)
    with pytest.raises(MxdError, match="no incomplete upload is visible"):
        push(run, "org/set")
    assert set(hub.files("org/set")) == {".gitattributes"}
    hub.faults.clear()
    push(run, "org/set")
    assert len(hub.uploads) == 4


def test_an_upload_that_stops_between_its_commits_resumes(hub, run):
    hub.fault("POST", "/commit/", status=500, message="oops", after=1, times=1)
    with pytest.raises(MxdError, match=r"trouble \(HTTP 500\) \(oops\)\. Try later\. Run the same command again"):
        push(run, "org/set")
    assert list(load_layers("org/set")) == list(load_layers(run))  # whole already
    first = push(run, "org/set")
    assert push(run, "org/set") == first
    assert f"@{first.revision}" in hub.files("org/set")["README.md"].decode()
    assert len(hub.repos["org/set"].messages) == 3


def test_no_half_file_is_ever_loaded(hub, single, gpt2, ids, tmp_path):
    push(single, "org/one")
    size = len(hub.files("org/one")["model.safetensors"])
    hub.fault("GET", "safetensors", cut=size // 2, times=1)
    hub.fault("GET", "safetensors", cut=0)
    with pytest.raises(MxdError, match=r"connection to .* failed .*no incomplete file is ever loaded"):
        mxd.from_pretrained("org/one")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size == size // 2]
    with pytest.raises(MxdError, match=r"not complete in the local cache\. Leave local_files_only out"):
        mxd.from_pretrained("org/one", local_files_only=True)
    hub.faults.clear()
    assert torch.equal(mxd.from_pretrained("org/one").layer.decoder, make(4).decoder)


def test_a_download_that_breaks_off_once_goes_on_where_it_was(hub, single, monkeypatch):
    push(single, "org/one")
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 512)
    hub.fault("GET", "safetensors", cut=1000, times=1)
    assert torch.equal(mxd.from_pretrained("org/one").layer.decoder, make(4).decoder)
    assert hub.ranges == ["bytes=512-"]


def test_a_set_of_which_a_part_is_missing_is_not_taken_for_the_whole(hub, run):
    push(run, "org/set")
    load_layers("org/set", "block0-*")
    assert list(load_layers("org/set", "block0-*", local_files_only=True)) == ["block0-tc-k4", "block0-tc-k8"]
    with pytest.raises(MxdError, match="not complete in the local cache"):
        load_layers("org/set", local_files_only=True)


def test_what_is_in_the_cache_needs_no_hub(hub, single, monkeypatch):
    revision = push(single, "org/one").revision
    mxd.from_pretrained("org/one", cache_dir="kept")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.log)
    for options in ({}, {"local_files_only": True}):
        assert mxd.from_pretrained("org/one", cache_dir="kept", **options).provenance.block == 1
    assert len(hub.log) == asked
    with pytest.raises(MxdError, match=r"offline mode is on \(HF_HUB_OFFLINE\), and org/one@.* is not complete"):
        mxd.from_pretrained("org/one", revision=revision, cache_dir="other")


# Failures


def refuse_connections(hub, monkeypatch):
    hub.__exit__()
    close_session()


def full_cache(hub, monkeypatch):
    def fail(url, file, **options):
        file.write(b"the first half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)


def fault(*args, **options):
    return lambda hub, monkeypatch: hub.fault(*args, **options)


def gate(hub, monkeypatch):
    hub.repos["org/one"].gated = True
    monkeypatch.setenv("HF_TOKEN", READER)


def use_token(token):
    return lambda hub, monkeypatch: monkeypatch.setenv("HF_TOKEN", token)


PULL = {
    "no network": (refuse_connections, "org/one", r"Hub \(http://127.0.0.1:.*\) cannot be reached.*Check the network"),
    "offline": (
        lambda hub, monkeypatch: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True),
        "org/one",
        r"offline mode is on \(HF_HUB_OFFLINE\).*Unset",
    ),
    "bad token": (use_token("hf_forgotten"), "org/one", "the Hub wants a valid token .*: log in with"),
    "403": (fault("GET", "/api/models", 403, message="no reads"), "org/one", r"refuses access to org/one \(.*no reads"),
    "no repository": (lambda *_: None, "org/none", "no repository org/none on the Hub .*Check the name, and log in"),
    "no revision": (lambda *_: None, "org/one@v9", "org/one has no revision 'v9'; give a branch, a tag or a commit"),
    "no such commit": (lambda *_: None, f"org/one@{NEW}", f"org/one has no revision '{NEW}'"),
    "gated": (gate, "org/one", "org/one is gated: ask for access at http://.*/org/one, then log in with"),
    "500": (fault("GET", "/api/models", 500, message="oops"), "org/one", r"trouble \(HTTP 500\).*Try later"),
    "429": (fault("GET", "/api/models", 429), "org/one", "asks to wait: too many requests"),
    "entry gone": (
        fault("GET", "resolve/.*safetensors", 404, "EntryNotFound", "Entry not found"),
        "org/one",
        "no such file on the Hub",
    ),
    "interrupted": (
        fault("GET", "safetensors", cut=10**9),
        "org/broken",
        r"model.safetensors is not what was saved: .*Delete .*/blobs/\w+ and download it again",
    ),
    "disk full": (
        full_cache,
        "org/one",
        "the disk is full .*free space, or move the cache with HF_HOME.*no incomplete file",
    ),
    "strange": (
        fault("GET", "/api/models", 418, message="a\nteapot"),
        "org/one",
        r"refuses the download .*\(HTTP 418\)",
    ),
}


@pytest.mark.parametrize("case", PULL)
@pytest.mark.parametrize("verb", ["pull", "info"])
def test_a_failed_download_is_one_line_and_leaves_nothing(hub, single, capsys, monkeypatch, case, verb):
    push(single, "org/one")
    files = {**hub.files("org/one"), "model.safetensors": b"\x08"}
    hub.repos["org/broken"] = Repo()
    hub.repos["org/broken"].commit("main", {path: Blob(content, False) for path, content in files.items()}, "broken")
    setup, reference, expected = PULL[case]
    setup(hub, monkeypatch)
    code, out, message = command(capsys, verb, reference)
    if verb == "info" and case in ("entry gone", "interrupted"):  # it does not want the weights
        assert code == 0 and "Base model and training" in out
        return
    assert code == 1
    assert re.search(expected, message), message
    assert "hf_forgotten" not in message
    assert not list(Path().iterdir())


PUSH = {
    "no network": (refuse_connections, "org/one", r"Hub \(http://127.0.0.1:.*\) cannot be reached.*Check the network"),
    "offline": (
        lambda hub, monkeypatch: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True),
        "org/one",
        "offline mode is on",
    ),
    "no token": (
        lambda hub, monkeypatch: monkeypatch.delenv("HF_TOKEN"),
        "org/one",
        r"the Hub wants a valid token \(.*\): log in with `hf auth login`, or set HF_TOKEN",
    ),
    "bad token": (use_token("hf_forgotten"), "org/one", "the Hub wants a valid token .*: log in with"),
    "foreign": (lambda *_: None, "else/one", "refuses access to else/one .*a token with write access"),
    "not a name": (lambda *_: None, "one", "'one' is not a Hub reference"),
    "500": (fault("POST", "/api/repos/create", 500), "org/one", r"trouble \(HTTP 500\)"),
    "LFS refused": (fault("POST", "objects/batch", 403, message="quota"), "org/one", r"refuses access .*quota"),
    "LFS broken": (fault("PUT", "/lfs/", 500, message="oops"), "org/one", r"trouble \(HTTP 500\).*not sent twice"),
    "too large": (fault("POST", "/commit/", 413, message="too\nlarge"), "org/one", r"\(HTTP 413\).*too large"),
}


@pytest.mark.parametrize("case", PUSH)
def test_a_failed_upload_is_one_line_and_loses_nothing(hub, single, capsys, monkeypatch, case):
    before = contents(single)
    setup, repo, expected = PUSH[case]
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "none")
    setup(hub, monkeypatch)
    code, _, message = command(capsys, "push", single, repo)
    assert code == 1
    assert re.search(expected, message), message
    assert contents(single) == before
    assert all(set(hub.files(repo)) == {".gitattributes"} for repo in hub.repos)


def test_a_license_the_hub_does_not_know_is_refused_before_anything_is_sent(hub, single, capsys):
    code, _, message = command(capsys, "push", single, "org/one", "--license", "mine")
    assert code == 1 and '"license" must be one of' in message
    assert not hub.uploads


@pytest.mark.parametrize("token", ["hf_abcdefgh\n", "a secret\r\n", "hf_abcdefgh"])
def test_no_message_shows_a_token(hub, single, token, monkeypatch):
    """A line break in a token makes the HTTP client quote the whole header."""
    hub.fault("GET", "/api/models", 403, message=f"the token {token.strip()} of a secret may not")
    for act in (lambda: mxd.from_pretrained("org/one", token=token), lambda: push(single, "org/one", token=token)):
        with pytest.raises(MxdError) as caught:
            act()
        shown = str(caught.value)
        assert "hf_abc" not in shown and "a secret" not in shown.replace("of a secret may", "")
        assert "\n" not in shown
        assert "hf_abc" not in "".join(traceback.format_exception(caught.value))


def test_a_full_disk_at_the_target_leaves_what_was_there(hub, run, capsys, monkeypatch):
    push(run, "org/set")
    pull("org/set", "mine", "block0-*")
    before = contents(Path("mine"))

    def fail(source, target):
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("mxd.artifacts.transfer.shutil.copyfile", fail)
        code, _, message = command(capsys, "pull", "org/set", "mine")
        assert code == 1 and "No space left on device" in message and "Free space" in message
        assert contents(Path("mine")) == before
    assert command(capsys, "pull", "org/set", "mine")[0] == 0
    assert list(load_layers("mine")) == list(load_layers(run))


# What comes from the Hub is not trusted


def serve(hub, name, files):
    hub.repos[name] = Repo()
    hub.repos[name].commit(
        "main", {path: Blob(content, path.endswith("safetensors")) for path, content in files.items()}, ""
    )


def test_somebody_elses_model_is_refused_before_its_weights_come(hub):
    serve(hub, "org/base", {"config.json": b'{"model_type": "gpt2"}', "model.safetensors": b"gigabytes"})
    for reference in ("org/base", "org/base@main"):
        with pytest.raises(MxdError, match="is a language model; expected a layer's folder"):
            load_layer(reference)
    assert not hub.asked("GET", "safetensors")


def test_a_path_that_leads_out_of_the_repository_writes_nothing(hub, single, tmp_path):
    push(single, "org/one")
    files = hub.files("org/one")
    serve(hub, "org/evil", {"../../../../config.json": files["config.json"], **files})
    before = set(contents(tmp_path))
    with pytest.raises(MxdError, match=r"download of org/evil failed: Invalid filename"):
        load_layer("org/evil")
    assert all(path.startswith("cache/") for path in set(contents(tmp_path)) - before)


@pytest.mark.parametrize("damage", ["missing", "half", "other"])
def test_damaged_weights_are_refused(hub, single, damage):
    push(single, "org/one")
    files = hub.files("org/one")
    weights = files.pop("model.safetensors")
    push_damaged = {"missing": {}, "half": {"model.safetensors": weights[:-4]}, "other": {"model.safetensors": b"{}"}}
    serve(hub, "org/bad", files | push_damaged[damage])
    message = r"cannot read .*model.safetensors" if damage == "missing" else "model.safetensors is not what was saved"
    with pytest.raises(MxdError, match=message):
        mxd.from_pretrained("org/bad")
    with pytest.raises(MxdError, match=message):
        pull("org/bad")
    assert not Path("checkpoints").exists()


@pytest.mark.long
def test_no_flipped_bit_in_the_cache_is_loaded_or_pulled(hub, single):
    push(single, "org/one")
    blob = (find_layers("org/one")[0] / "model.safetensors").resolve()
    for _ in flipped(blob, 40):
        for act in (load_layer, pull, lambda reference: load_layers(reference, local_files_only=True)):
            with pytest.raises(MxdError, match=r"model.safetensors is not what was saved: its SHA-256 is") as caught:
                act("org/one")
    assert not Path("checkpoints").exists()
    blob.write_bytes(b"\0" + blob.read_bytes()[1:])
    named = re.search(r"Delete (\S+) and download it again", str(caught.value))[1]
    assert Path(named) == blob
    blob.unlink()  # as the message says
    assert torch.equal(load_layer("org/one").layer.decoder, make(4).decoder)


def test_what_was_pulled_already_is_compared_again(hub, single):
    push(single, "org/one")
    (copy,) = pull("org/one")
    mine, blob = copy / "model.safetensors", (find_layers("org/one")[0] / "model.safetensors").resolve()
    whole = mine.read_bytes()
    for _ in flipped(blob, 1):
        for held in (whole, blob.read_bytes()):  # a copy that is whole, and one that was made before hashes were
            mine.write_bytes(held)
            with pytest.raises(MxdError, match=r"model.safetensors is not what was saved"):
                pull("org/one")
    mine.write_bytes(whole)
    assert pull("org/one") == [copy]


def test_no_flipped_bit_is_pushed(hub, single, run):
    for _ in flipped(single / "model.safetensors", 40):
        with pytest.raises(MxdError, match=r"single/model.safetensors is not what was saved"):
            push(single, "org/one")
    for _ in flipped(run / "block1-tc-k4" / "model.safetensors", 1):
        with pytest.raises(MxdError, match=r"block1-tc-k4/model.safetensors is not what was saved"):
            push(run, "org/set")
    assert not hub.uploads and not hub.repos


def test_a_layer_saved_before_there_were_hashes_goes_there_and_back_with_a_warning(hub, single):
    forget_hash(single)
    with pytest.warns(UnhashedWarning, match="names no SHA-256") as found:
        push(single, "org/one")
    assert [each.category for each in found].count(UnhashedWarning) == 1
    with pytest.warns(UnhashedWarning, match="names no SHA-256") as found:
        (copy,) = pull("org/one")
    assert [each.category for each in found].count(UnhashedWarning) == 1
    assert {p: c for p, c in contents(copy).items() if p != "README.md"} == {
        p: c for p, c in contents(single).items() if p != "README.md"
    }


HOSTILE = ("$(touch escaped)", "a b", "--opt", "-x", "\x1b[2Jk", "k\x9b2J", "k;ls", "a..b", "naïve", "x\n", "\u202e")


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_set_with_a_name_that_push_would_refuse_is_refused_by_pull(hub, run, capsys, name):
    push(run, "org/set")
    files = hub.files("org/set")
    evil = {
        f"{name}/{path.partition('/')[2]}": data for path, data in files.items() if path.startswith("block1-tc-k8/")
    }
    serve(hub, "org/evil", {path: data for path, data in files.items() if "block1-tc-k8" not in path} | evil)
    for verb in ("pull", "info"):
        code, out, message = command(capsys, verb, "org/evil")
        assert code == 1 and not out
        assert "org/evil holds a layer in a folder called " in message
        assert message.isprintable()
    assert not Path("checkpoints").exists() and not hub.asked("GET", "evil.*safetensors")
    assert [path.name for path in pull("org/evil", pattern="block0-*")] == ["block0-tc-k4", "block0-tc-k8"]


@pytest.mark.parametrize("folder", ["./--opt", "a b; $(touch escaped)", "it's"])
def test_the_command_that_pull_shows_names_what_was_pulled(hub, run, capsys, folder):
    push(run, "org/set")
    code, out, _ = command(capsys, "pull", "org/set", folder)
    mxd, evaluate, *places = shlex.split(out.partition("next: ")[2])
    assert code == 0 and (mxd, evaluate) == ("mxd", "evaluate")
    assert [Path(place) for place in places] == find_layers(Path(folder)) and not places[0].startswith("-")


# Pulling into a folder


def test_pulling_changes_nothing_that_is_there(hub, run, single, gpt2):
    push(run, "org/set")
    push(single, "org/one")
    for _ in range(2):  # the second finds it done
        assert [path.name for path in pull("org/set", "mine")] == [path.name for path in find_layers(run)]
        pull("org/one", "layer")
    mine = save_layer("mine/block0-tc-k4", make(4, seed=9), provenance(gpt2, 0))
    before = contents(Path("mine"))
    with pytest.raises(MxdError, match=r"mine/block0-tc-k4 exists and holds something else; choose another folder"):
        pull("org/set", "mine")
    with pytest.raises(MxdError, match="exists and holds something else"):
        pull("org/one", mine)
    with pytest.raises(MxdError, match="exists and holds something else"):
        pull("org/one", "mine")
    Path("notes").write_text("mine")
    with pytest.raises(MxdError, match="exists and holds something else"):
        pull("org/one", "notes")
    assert contents(Path("mine")) == before and Path("notes").read_text() == "mine"
    with pytest.raises(MxdError, match="is not on the Hub"):
        pull("mine")


def test_the_evaluation_of_a_run_is_not_overwritten_by_a_pulled_one(hub, run):
    push(run, "org/set")
    Path("mine").mkdir()
    Path("mine/README.md").write_text("notes")
    with pytest.raises(MxdError, match=r"mine/README.md exists and holds something else"):
        pull("org/set", "mine")
    assert contents(Path("mine")) == {"README.md": b"notes"}


def test_what_was_measured_here_stays_when_more_is_pulled(hub, run):
    """Cards and measurements of this machine are not the Hub's, and no reason to refuse."""
    push(run, "org/set")
    first, *others = [path.name for path in pull("org/set", "mine")]
    for name in others:
        shutil.rmtree(Path("mine", name))
    here = {Path("mine", first, "README.md"): "a card", Path("mine/README.md"): "its card"}
    here[Path("mine", first, "faithfulness.json")] = here[Path("mine/faithfulness.json")] = "{}"
    for path, text in here.items():
        path.write_text(text)
    assert [path.name for path in pull("org/set", "mine")] == [first, *others]
    assert all(path.read_text() == text for path, text in here.items())


def test_a_pulled_set_can_be_pushed_again(hub, run):
    push(run, "org/set")
    pull("org/set", "mine")
    push("mine", "org/copy")
    weights = [
        {p: c for p, c in hub.files(name).items() if p.endswith("safetensors")} for name in ("org/set", "org/copy")
    ]
    assert weights[0] == weights[1] and len(weights[0]) == 4


def test_a_wholly_replaced_model_goes_there_and_back_as_one_set(hub, run, gpt2, ids):
    """All blocks, of two kinds; what was measured of them together goes along."""
    for k in (4, 8):
        save_layer(run / f"block2-tc-k{k}", make(k, 20 + k), provenance(gpt2, 2))
    here = sets_of(named_layers([run]))
    results = {}
    for name, members in here.items():
        known = [describe(trained) for trained in members.values()]
        results[name] = {"tokens": 9, "ce_base": 3.5, "ce_increase": 0.25, "replacements": known}
    (run / "whole.json").write_text(json.dumps({"model": "org/base", "data": {}, "results": results}))
    revision = push(run, "org/whole").revision
    assert "| tc-k8 | 3 | +0.2500 |" in hub.files("org/whole")["README.md"].decode()
    pull(f"org/whole@{revision}", "mine")
    for found in (sets_of(named_layers(["org/whole"])), sets_of(named_layers(["mine"]))):
        assert {name: list(members) for name, members in found.items()} == {"tc-k4": [0, 1, 2], "tc-k8": [0, 1, 2]}
        for name, members in found.items():
            assert torch.equal(logits(gpt2, ids, members), logits(gpt2, ids, here[name]))
    assert Path("mine/whole.json").read_bytes() == (run / "whole.json").read_bytes()
    (run / "whole.json").write_text("{}")
    with pytest.raises(MxdError, match=r"whole\.json is not what `mxd whole` writes"):
        push(run, "org/whole")


def test_names_of_downloaded_layers(hub, run, single):
    revision = push(run, "org/set").revision
    push(single, "org/one")
    assert [name_of(path) for path in find_layers("org/set", "block0-*")] == [
        "org/set/block0-tc-k4",
        "org/set/block0-tc-k8",
    ]
    (one,) = find_layers("org/one")
    assert name_of(one) == "org/one"
    (found,) = find_layers(f"org/set/block1-tc-k8@{revision}")
    assert cached_reference(found) == HubReference("org/set", "block1-tc-k8", revision)
    assert cached_reference(run) is None


# Commands


@pytest.mark.long
def test_push_info_evaluate_pull_by_command(hub, tmp_path, trained_gpt2, capsys):
    layer = TranscoderConfig(d_in=128, d_out=128, num_units=256, sparsity=TopKConfig(k=8)).build()
    data = {"source": "bundled", "split": "validation", "context": 32}
    folder = save_layer(
        tmp_path / "run" / "block2-tc-k8",
        layer,
        provenance(trained_gpt2, 2, model="tiny-gpt2", revision=None, data=data),
    )
    code, _, _ = command(capsys, "evaluate", tmp_path / "run", "--tokens", 128)
    assert code == 0
    code, out, _ = command(
        capsys, "push", tmp_path / "run", "org/set", "--license", "mit", "--message", "first", "--private"
    )
    assert code == 0 and hub.repos["org/set"].messages[1] == "first" and hub.repos["org/set"].private
    revision = re.search("revision: ([0-9a-f]{40})", out)[1]
    assert f"pushed: {hub.url}/org/set\n" in out
    assert {"faithfulness.json", "frontier.png", "README.md"} < set(hub.files("org/set"))
    assert "![" in hub.files("org/set")["README.md"].decode()
    code, out, _ = command(capsys, "info", "--json", f"org/set@{revision}")
    assert code == 0 and list(json.loads(out)) == [f"org/set/block2-tc-k8@{revision}"]
    code, out, _ = command(capsys, "evaluate", "org/set/block2-tc-k8", "--tokens", 128)
    assert code == 0 and "numbers: faithfulness-block2-tc-k8.json" in out
    here = json.loads((tmp_path / "run" / "faithfulness.json").read_text())["results"]["run/block2-tc-k8"]
    there = json.loads(Path("faithfulness-block2-tc-k8.json").read_text())["results"]["org/set/block2-tc-k8"]
    assert there == here
    code, out, _ = command(capsys, "pull", "org/set", "mine", "--pattern", "*-k8")
    assert code == 0 and "pulled: mine/block2-tc-k8\nnext: mxd evaluate mine/block2-tc-k8" in out
    assert set(contents(Path("mine"))) >= {"faithfulness.json", "frontier.png", "README.md"}
    assert contents(Path("mine/block2-tc-k8")).keys() == contents(folder).keys()


@pytest.mark.long
def test_the_endpoint_is_set_by_its_environment_variable(hub, single, tmp_path):
    """In a process of its own, as a user has it: nothing is patched."""
    script = (
        "import sys; from mxd.cli.entry import app; run = lambda words: app(words, result_action='return_value'); "
        "run(['push', sys.argv[1], 'org/one']); run(['pull', 'org/one', 'copy'])"
    )
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": WRITER,
    }
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"} | settings
    done = subprocess.run(
        [sys.executable, "-c", script, single], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert contents(Path("copy")) == {p: c for p, c in hub.files("org/one", "main").items() if p != ".gitattributes"}


def _sha256(path):
    return Blob(path.read_bytes(), True).sha256


# Base models


@pytest.fixture
def base_files(build_model, tokenizer, tmp_path):
    """The files of a tiny GPT-2's repository."""
    build_model("gpt2").save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}


def test_a_base_model_is_pinned_to_the_commit_it_was_read_at(hub, base_files, gpt2, ids):
    serve(hub, "org/base", base_files)
    model = mxd.load_frozen("org/base", device="cpu")
    assert torch.equal(model.logits(ids), gpt2.logits(ids))
    assert model.revision == hub.repos["org/base"].branches["main"]
    hub.repos["org/base"].commit("main", {}, "emptied")
    hub.log.clear()
    again = mxd.load_frozen("org/base", revision=model.revision, device="cpu", local_files_only=True)
    assert torch.equal(again.logits(ids), gpt2.logits(ids)) and not hub.asked("GET", "safetensors")
    assert outline("org/base", revision=model.revision).revision == model.revision


def test_a_base_model_that_is_a_pickle_is_neither_fetched_nor_converted(hub, base_files, gpt2, ids):
    from safetensors.torch import load

    buffer = io.BytesIO()
    torch.save(load(base_files.pop("model.safetensors")), buffer)
    serve(hub, "org/base", base_files | {"pytorch_model.bin": buffer.getvalue()})
    with pytest.raises(MxdError, match=r"its weights are a pickle \(pytorch_model.bin\).*model.allow_pickle"):
        mxd.load_frozen("org/base", device="cpu")
    assert not hub.asked("GET", r"\.bin")
    model = mxd.load_frozen("org/base", device="cpu", allow_pickle=True)
    assert torch.equal(model.logits(ids), gpt2.logits(ids))
    assert not [thread for thread in threading.enumerate() if "conversion" in thread.name]
    assert not hub.asked("POST", "") and not hub.asked("GET", "commits|discussions")  # what a conversion begins with


def test_shards_of_a_base_model_lie_in_its_repository(hub, base_files, gpt2, ids):
    whole = base_files.pop("model.safetensors")
    names = list(gpt2.module.state_dict())
    index = {
        "metadata": {"total_size": len(whole)},
        "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors"),
    }
    files = base_files | {"model-00001-of-00001.safetensors": whole}
    serve(hub, "org/base", files | {"model.safetensors.index.json": json.dumps(index).encode()})
    assert torch.equal(mxd.load_frozen("org/base", device="cpu").logits(ids), gpt2.logits(ids))
    for name in ("../../x.safetensors", "pytorch_model.bin"):
        index["weight_map"][names[0]] = name
        serve(hub, "org/evil", files | {"model.safetensors.index.json": json.dumps(index).encode()})
        with pytest.raises(MxdError, match=r"names .*, expected .safetensors files beside it"):
            mxd.load_frozen("org/evil", device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 300_000}, "n_layer to more than 10,000"),
        ({"_attn_implementation": "x/kernel"}, "may fetch code from the Hub"),
    ],
    ids=["size", "kernel"],
)
def test_a_base_models_config_is_looked_at_before_its_weights_come(hub, base_files, change, message):
    config = json.loads(base_files["config.json"]) | change
    serve(hub, "org/base", base_files | {"config.json": json.dumps(config).encode()})
    for read in (mxd.load_frozen, outline):
        with pytest.raises(MxdError, match=message):
            read("org/base")
    assert not hub.asked("GET", "safetensors")
