"""mxd in Python: what can be given, what comes back, and what is refused."""

import ast
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from glob import glob
from pathlib import Path

import pytest
import torch
from runs import assert_same_run, small, stop_after
from torch import nn

import mxd
import mxd.api
from mxd.artifacts.sets import as_trained
from mxd.common.bundled import bundled_path
from mxd.common.errors import MxdError
from mxd.common.progress import say_once
from mxd.data.text import documents, in_memory
from mxd.training.source import own_documents
from mxd.training.trainer import train as run_training

ROOT = Path(__file__).parents[1]
TEXTS = [f"The President of country {i} has said that {i * i} is the number of people there." for i in range(300)]
KEPT = ("block1-mxd-k4", "block1-mxd-k8")


def fields(out, **changes):
    return {
        "run": "r",
        "out": str(out),
        "blocks": [1],
        "replacements": [{"method": "mxd", "sparsity": {"kind": "topk", "k": [4, 8]}}],
        "data": {"context": 16},
        "sizing": {"expansion": 9},
        "training": {"recipe": "short", "tokens": 512, "batch_tokens": 256, "buffer_tokens": 256, "log_every": 1},
    } | changes


@pytest.fixture(scope="module")
def run(gpt2, tmp_path_factory):
    return mxd.train(fields(tmp_path_factory.mktemp("runs")), TEXTS, model=gpt2)


def test_a_run_is_its_folder_layers_and_metrics(run):
    assert sorted(run.names) == sorted(run.layers) == sorted(KEPT)
    assert (run / "config.yaml").is_file() and Path(run) == run.folder == mxd.Run(str(run.folder)).folder
    trained = run[KEPT[0]]
    assert torch.equal(trained.layer.bias, run.layers[KEPT[0]].layer.bias)
    table = run.to_pandas()
    assert list(table["step"]) == [1, 1, 2, 2] and set(table["replacement"]) == set(KEPT)
    with pytest.raises(MxdError, match=r"unknown layer 'x'; choose one of: block1-mxd-k4"):
        run["x"]
    with pytest.raises(MxdError, match=r"metrics.jsonl"):
        mxd.Run(run.folder / KEPT[0]).to_pandas()


def test_a_config_may_be_a_path_plain_data_or_a_config(run, gpt2, tmp_path):
    config = mxd.load_config(run / "config.yaml")
    (tmp_path / "c.yaml").write_text((run / "config.yaml").read_text())
    for given in (config, str(tmp_path / "c.yaml"), config.model_dump(mode="json")):
        again = mxd.train(given, TEXTS, model=gpt2, resume=True)
        assert again.folder == run.folder
    with pytest.raises(MxdError, match=r"blocs.*Did you mean 'blocks'"):
        mxd.train(fields(tmp_path, blocs=1))


def test_what_evaluate_is_asked_reaches_what_measures(monkeypatch):
    asked = []
    monkeypatch.setattr(mxd.api, "open_checkpoints", lambda *subject: subject)
    monkeypatch.setattr(mxd.api, "answer", lambda *words: asked.extend(words) or {"results": {}})
    mxd.evaluate("layers", ["text"], tokens=7, seed=3, together=True, model="m", device="cpu")
    subject, how, together = asked
    assert subject == ("layers", None, "m", "cpu", ["text"])
    assert (how.tokens, how.seed, together) == (7, 3, True)


def test_what_tune_is_asked_reaches_what_tunes(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(mxd.api, "run_tuning", lambda *words: asked.append(words) or tmp_path)
    for model, expected in ((3, (3, None)), ("tiny-gpt2", (None, "tiny-gpt2"))):
        mxd.tune("r", {"tokens": 7}, text=["a"], run="x", out="o", resume=True, overwrite=True, model=model)
        assert asked.pop() == (["r"], mxd.TuneConfig(tokens=7), "x", "o", True, *expected, ["a"], True)


def test_text_that_is_given_takes_the_configs_place(tmp_path):
    raw = fields(tmp_path, data={"context": 16, "source": "org/name", "streaming": True})
    config, own = mxd.api._config(raw, ["text"])
    assert own == ["text"] and not config.data.streaming and config.data.source != "org/name"
    config, own = mxd.api._config(raw | {"data": {"source": ["other"]}}, ["text"])
    assert own == ["text"]
    config, own = mxd.api._config(raw, tmp_path / "a.txt")
    assert own is None and config.data.source == str(tmp_path / "a.txt") and config.data.streaming


def test_a_model_that_is_given_takes_the_configs_place(gpt2, tmp_path):
    raw = fields(tmp_path, model={"source": "org/name", "revision": "r", "dtype": "bfloat16"})
    config, own = mxd.api._config(raw, None)
    assert own is None
    loaded, base = mxd.api._with_model(config, gpt2, None)
    assert base is not None and loaded.model.source == base.source
    assert (loaded.model.revision, loaded.model.dtype) == (None, "float32")
    named, base = mxd.api._with_model(config, "tiny-neox", None)
    assert base is None and (named.model.source, named.model.revision) == ("tiny-neox", None)


def test_given_text_is_read_as_the_config_says(gpt2, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("mxd.training.source.in_memory", lambda *words: asked.append(words) or "documents")
    monkeypatch.setattr(mxd.api, "run_training", lambda *words: asked.append(words) or tmp_path)
    raw = fields(tmp_path, seed=7, data={"context": 16, "column": "said", "part": "train"})
    for model in (gpt2, "tiny-gpt2"):
        asked.clear()
        mxd.train(raw, ["a"], model=model, resume=True, groups=2, shard=True, overwrite=True)
        ((config, *rest),) = asked
        assert rest == [True, gpt2 if model is gpt2 else None, 2, True, ["a"], True]
    assert own_documents(config, gpt2, ["a"]) == "documents"
    assert asked[-1] == (["a"], "train", "said", 7, "train", gpt2.tokenizer)
    own_documents(config, gpt2, ["a"], "test")
    assert asked[-1][1] == "test" and own_documents(config, gpt2, None) is None


def test_records_say_which_model_and_that_the_text_was_in_memory(run, gpt2):
    config = mxd.load_config(run / "config.yaml")
    assert config.model.source == gpt2.source and config.data.source == "memory"
    about = run[KEPT[0]].provenance
    assert (
        about.model == gpt2.source
        and about.data["source"] == "memory"
        and re.fullmatch("[0-9a-f]{32}", about.text_hash)
    )


@pytest.mark.long
def test_layers_are_tuned_on_text_in_memory(run, gpt2, tmp_path):
    """The side of it that they were trained on; what it was is kept, and nothing else continues or is evaluated on."""

    def tuned(text=None, folder=run, **options):
        return mxd.tune(folder, {"tokens": 256, "batch_tokens": 128}, text=text, model=gpt2, **options)

    with pytest.raises(MxdError, match=r"held by Python code.*mxd.tune"):
        tuned(out=tmp_path)
    found = tuned(TEXTS, out=tmp_path)
    about = found[KEPT[0]].provenance
    assert mxd.load_config(found / "config.yaml").data.source == "memory"
    assert about.tuning[0]["text_hash"] == about.text_hash == run[KEPT[0]].provenance.text_hash
    config = found / "config.yaml"
    with pytest.raises(MxdError, match="the text or its tokenizer has changed"):
        tuned([text.upper() for text in TEXTS], config, resume=True)
    with pytest.raises(MxdError, match=r"goes on as it began: data.source was memory, not bundled\."):
        tuned("bundled", config, resume=True)
    assert tuned(TEXTS, config, resume=True).folder == found.folder
    with pytest.raises(MxdError, match=r"already holds a run.*overwrite=True"):
        tuned(TEXTS, out=tmp_path)
    streamed = tuned(iter(TEXTS), out=tmp_path, overwrite=True)[KEPT[0]].provenance
    assert streamed.tuning[0]["text_hash"] not in ("", about.text_hash)
    with pytest.raises(MxdError, match="holds block1-mxd-k4, block1-mxd-k8, to be tuned here"):
        tuned(TEXTS, run=run.folder.name, overwrite=True)
    assert sorted(run.layers) == sorted(KEPT)
    elsewhere = about.model_copy(update={"data": {"source": "bundled", "context": 16}})
    for tuning, read in ((elsewhere.tuning, in_memory(TEXTS, "validation")), ((), TEXTS)):
        layer = mxd.Trained(run[KEPT[0]].layer, elsewhere.model_copy(update={"tuning": tuning}))
        assert list(mxd.open_checkpoints(layer, text=TEXTS, model=gpt2).texts()) == list(read)


@pytest.mark.long
def test_documents_are_trained_on_as_those_of_a_file(run, gpt2, tmp_path):
    """The same token ids in the same order, however they are given; as they come, in an order of their own."""
    import datasets

    for name in ("all", "train"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in TEXTS))
    given = {
        "file": str(tmp_path / "all.jsonl"),
        "tuple": tuple(TEXTS),
        "stream": (text for text in TEXTS),
        "whole-file": str(tmp_path / "train.jsonl"),
        "split": {"train": TEXTS, "other": [3]},
        "dataset": datasets.Dataset.from_dict({"text": TEXTS}),
    }
    hashes = {}
    for name, text in given.items():
        made = mxd.train(fields(tmp_path, run=name), text, model=gpt2)
        hashes[name] = made[KEPT[0]].provenance.text_hash
        same = torch.equal(made[KEPT[0]].layer.bias, run[KEPT[0]].layer.bias)
        assert same == (name in ("file", "tuple")), name
    expected = run[KEPT[0]].provenance.text_hash
    assert [name for name in given if hashes[name] == expected] == ["file", "tuple"]
    assert hashes["whole-file"] == hashes["split"] == hashes["dataset"]
    in_config = fields(tmp_path, run="config", data={"context": 16, "source": TEXTS})
    assert mxd.train(in_config, model=gpt2)[KEPT[0]].provenance.text_hash == expected


def test_documents_in_memory_have_a_held_out_side_as_those_of_a_file(tmp_path, run, gpt2, capsys):
    """No document is on two sides, in whatever form they are given; what is not trained on is evaluated on."""
    (tmp_path / "all.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in TEXTS))
    book = [" ".join(TEXTS)]
    (tmp_path / "book.txt").write_text(*book)
    for split in ("train", "validation", "test"):
        expected = list(documents(str(tmp_path / "all.jsonl"), split))
        assert list(in_memory(TEXTS, split)) == list(in_memory(iter(TEXTS), split)) == expected
        assert list(in_memory({split: TEXTS, "x": []}, split)) == list(in_memory(TEXTS, None)) == TEXTS
        assert list(in_memory(book, split)) == list(documents(str(tmp_path / "book.txt"), split)) != book
    say_once.cache_clear()
    held = list(in_memory(TEXTS, "validation"))
    for given, read in ((TEXTS, held), ({"validation": TEXTS[:50]}, TEXTS[:50]), (iter(TEXTS), held)):
        assert list(mxd.open_checkpoints(run, text=given, model=gpt2).texts()) == read
    assert capsys.readouterr().err.count(f"the held-out side is read, {len(held)} of 300 documents") == 1
    about = run[KEPT[0]].provenance.model_copy(update={"data": {"source": "bundled", "context": 16}})
    elsewhere = mxd.Trained(run[KEPT[0]].layer, about)
    assert list(mxd.open_checkpoints(elsewhere, text=TEXTS, model=gpt2).texts()) == TEXTS


def test_a_part_of_a_dataset_is_held_out_where_the_config_asks_for_it(gpt2, tmp_path):
    import datasets

    table = datasets.Dataset.from_dict({"text": TEXTS})
    run = mxd.train(fields(tmp_path, data={"context": 16, "part": "train"}), table, model=gpt2)
    held = list(mxd.open_checkpoints(run, text=table, model=gpt2).texts())
    assert held == list(in_memory(TEXTS, "validation"))


@pytest.mark.long
def test_chats_in_a_dataset_find_the_template_of_a_model_that_is_named(tmp_path):
    import datasets

    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "Is it?"}] for text in TEXTS]
    table = datasets.Dataset.from_dict({"messages": chats})
    config = fields(tmp_path, data={"context": 16, "column": "messages"})
    with pytest.raises(MxdError, match="a chat needs the tokenizer's chat template, and the base model's has none"):
        mxd.train(config, table, model="tiny-gpt2")
    named = shutil.copytree(bundled_path("tiny-gpt2"), tmp_path / "named")
    (named / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert mxd.train(config, table, model=named, overwrite=True)[KEPT[0]].provenance.tokens == 512


@pytest.mark.long
def test_tuning_and_comparing_return_the_run_with_what_was_measured(gpt2, run, tmp_path):
    how = {"tokens": 32, "batch_tokens": 16, "nmse": 0.5}
    data = {"context": 16}
    made = mxd.train(fields(tmp_path, run="a", data=data), model=gpt2)
    tuned = mxd.tune(made, how, model=gpt2)
    assert tuned.folder == tmp_path / "a-tuned" and sorted(tuned.names) == sorted(KEPT) and tuned.results == {}
    assert tuned[KEPT[0]].provenance.tuning[-1]["nmse"] == 0.5
    other = mxd.tune([made / KEPT[0]], mxd.TuneConfig(**how), run="b", out=tmp_path / "deep", model=gpt2)
    assert other.folder == tmp_path / "deep" / "b" and other.names == [KEPT[0]]
    with pytest.raises(MxdError, match="tokens: expected a whole number, got 'many'"):
        mxd.tune(made, {"tokens": "many"})
    with pytest.raises(MxdError, match=r"tokns: there is no such field. Did you mean 'tokens'\?"):
        mxd.tune(made, {"tokns": 3})
    with pytest.raises(MxdError, match=r"compare reads text by its name"):
        mxd.compare(fields(tmp_path, data={"source": TEXTS}))
    evaluation = {"questions": ["faithfulness"], "faithfulness": {"tokens": 32}}
    model = {"source": "tiny-gpt2", "device": "cpu"}
    compared = mxd.compare(fields(tmp_path, run="c", data=data, model=model, evaluation=evaluation))
    assert list(compared.results) == ["faithfulness"] and repr(compared).endswith("\n  results: faithfulness")
    found = mxd.Faithfulness(compared.results["faithfulness"])
    assert found.names == [f"c/{name}" for name in KEPT]


@pytest.mark.long
@pytest.mark.parametrize("streamed", [False, True], ids=["list", "stream"])
def test_a_resumed_run_ends_as_one_that_was_not_stopped_and_refuses_another_text(streamed, gpt2, tmp_path):
    def text(documents):
        return (document for document in documents) if streamed else documents

    data = {"source": "memory", "split": "train", "context": 16}
    replacements = [{"method": "mxd", "sparsity": {"kind": "topk", "k": 8}}]
    training = {"tokens": 2048, "batch_tokens": 256, "buffer_tokens": 512, "save_every": 2}
    whole, part = (
        small(tmp_path, run=name, blocks=[1], data=data, training=training, replacements=replacements)
        for name in ("whole", "part")
    )
    run_training(whole, model=gpt2, text=text(TEXTS))
    stop_after(5, part, gpt2, text=text(TEXTS))
    others = [[text.upper() for text in TEXTS], *([] if streamed else [TEXTS[:-1]])]  # a stream's end was not read yet
    for other in others:
        with pytest.raises(MxdError, match="the text or its tokenizer has changed"):
            run_training(part, resume=True, model=gpt2, text=text(other))
    with pytest.raises(MxdError, match=r"held by Python code.*text="):
        run_training(part, resume=True, model=gpt2)
    run_training(part, resume=True, model=gpt2, text=text(TEXTS))
    assert_same_run(part.folder, whole.folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (3, "of type int; expected documents"),
        ({"trian": TEXTS}, "unknown split 'train'; choose one of: trian"),
        ([TEXTS[0], 3], "document 1 of the text is of type int"),
        (["short"], "the text in memory is too short to hold some of it out: 1 different piece "),
        ([], "the text in memory is too short to hold some of it out"),
        ([str(i) for i in range(60)], "the held-out side of the text in memory is less than one context of 16"),
        ({"train": ["short"]}, "less than one context"),
        (Path("nothing.txt"), "no text at 'nothing.txt'"),
    ],
    ids=["number", "mapping", "item", "short", "empty", "little", "shorter", "path"],
)
def test_what_is_not_a_text_is_refused_and_leaves_an_earlier_run(text, message, run, gpt2):
    before = (run / "run_id").read_text()
    with pytest.raises(MxdError, match=message):
        mxd.train(fields(run.folder.parent), text, model=gpt2, overwrite=True)
    assert (run / "run_id").read_text() == before and sorted(run.names) == sorted(KEPT)


def test_a_table_is_refused_and_its_column_is_not():
    import pandas

    table = pandas.DataFrame({"text": TEXTS})
    with pytest.raises(MxdError, match="the text in memory has columns, 'text'"):
        in_memory(table)
    assert in_memory(table["text"], None) == TEXTS


def test_an_iterator_is_not_read_twice(gpt2, tmp_path):
    linear = fields(tmp_path, replacements=[{"method": "linear"}])
    with pytest.raises(MxdError, match="an iterator, which can be read only once"):
        mxd.train(linear, iter(TEXTS), model=gpt2)
    mxd.train(linear, dict.fromkeys(TEXTS).keys(), model=gpt2)


def test_a_text_beside_a_cache_is_refused(tmp_path, gpt2):
    with pytest.raises(MxdError, match=r"data.cache holds.*leave out text"):
        mxd.train(fields(tmp_path, data={"cache": str(tmp_path)}), TEXTS, model=gpt2)


def test_only_a_run_is_overwritten(gpt2, tmp_path):
    first = mxd.train(fields(tmp_path), TEXTS, model=gpt2)
    ids = [(first / "run_id").read_text()]
    (first / "old.txt").write_text("of the earlier run")
    with pytest.raises(MxdError, match=r"already holds a run.*overwrite=True"):
        mxd.train(fields(tmp_path), TEXTS, model=gpt2)
    again = mxd.train(fields(tmp_path, seed=1), TEXTS, model=gpt2, overwrite=True)
    ids.append((again / "run_id").read_text())
    assert ids[0] != ids[1] and not (again / "old.txt").exists() and again[KEPT[0]].provenance.seed == 1
    with pytest.raises(MxdError, match="give one of them"):
        mxd.train(fields(tmp_path), TEXTS, model=gpt2, overwrite=True, resume=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(MxdError, match="is not a run"):
        mxd.train(fields(tmp_path, run="mine"), TEXTS, model=gpt2, overwrite=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"
    mxd.train(fields(again.folder, run="inside"), TEXTS, model=gpt2)
    with pytest.raises(MxdError, match=r"holds other runs \(inside\)"):
        mxd.train(fields(tmp_path), TEXTS, model=gpt2, overwrite=True)


@pytest.mark.long
def test_one_block_after_another_is_overwritten_too(gpt2, tmp_path):
    """Layers of the earlier run must not be taken for finished ones of this."""
    config = fields(
        tmp_path, blocks=[0, 1], replacements=[{"method": "transcoder", "sparsity": {"kind": "topk", "k": 4}}]
    )
    config["training"] = config["training"] | {"inputs": "spliced"}
    mxd.train(config, TEXTS, model=gpt2)
    again = mxd.train(config | {"seed": 1}, TEXTS, model=gpt2, overwrite=True)
    assert {layer.provenance.seed for layer in again.layers.values()} == {1}


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(d), nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Own(nn.Module):
    """A model that knows nothing of transformers."""

    def __init__(self, many=False):
        super().__init__()
        self.embedding, self.many = nn.Embedding(4096, 16), many
        self.blocks, self.head = nn.ModuleList(Block(16) for _ in range(2)), nn.Linear(16, 4096)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return (self.head(x), None) if self.many else self.head(x)


@pytest.mark.parametrize("many", [False, True], ids=["logits", "tuple"])
def test_a_module_of_ones_own_is_a_base_model(many, tokenizer, tmp_path):
    torch.manual_seed(0)
    module = Own(many)
    config = fields(tmp_path, replacements=[{"method": "transcoder", "sparsity": {"kind": "topk", "k": 4}}])
    run = mxd.train(config, TEXTS, model=module, tokenizer=tokenizer)
    assert run["block1-tc-k4"].provenance.model == "Own"
    model = mxd.load_frozen(module, tokenizer=tokenizer)
    ids = model.ids("The President")
    x, y = model.record(ids, [1])[1]
    assert torch.equal(y, module.blocks[1].mlp(x))
    logits = model.logits(ids)
    assert torch.equal(logits, module(ids)[0] if many else module(ids))
    with mxd.spliced(model, {1: run["block1-tc-k4"]}):
        expected = module.head(module.blocks[0](module.embedding(ids)) + run["block1-tc-k4"](x))
        assert torch.allclose(model.logits(ids), expected, atol=1e-5)
    assert torch.equal(model.logits(ids), logits)
    assert mxd.evaluate(run, TEXTS, tokens=32, model=model).only.tokens > 0
    with pytest.raises(MxdError, match=r"nn.Embedding"):
        mxd.load_frozen(nn.Linear(2, 2))


def test_a_tokenizer_belongs_to_a_loaded_model(gpt2, tokenizer, tmp_path):
    with pytest.raises(MxdError, match="tokenizer belongs to a loaded model"):
        mxd.train(fields(tmp_path), TEXTS, model="tiny-gpt2", tokenizer=tokenizer)
    bare = mxd.load_frozen(gpt2.module)
    with pytest.raises(MxdError, match="no tokenizer"):
        mxd.train(fields(tmp_path), TEXTS, model=bare)
    assert mxd.load_frozen(bare, tokenizer=tokenizer).tokenizer is tokenizer


def test_numbers_are_attributes_and_a_table(run, gpt2, tmp_path):
    results = mxd.evaluate(run, {"validation": TEXTS[:50]}, tokens=128, model=gpt2)
    assert results.names == [f"r/{name}" for name in KEPT] and len(results) == 2
    document = results.document["results"]
    one = results[results.names[0]]
    assert one.ce_increase == document[one.name]["ce_increase"]
    assert one.normalized_mse == document[one.name]["blocks"]["1"]["normalized_mse"]
    with pytest.raises(AttributeError, match=r"'ce_incrase' was not measured.*Did you mean 'ce_increase'"):
        one.ce_incrase  # noqa: B018
    with pytest.raises(MxdError, match="unknown splice 'x'"):
        results["x"]
    with pytest.raises(MxdError, match="choose one of: r/"):
        results.only  # noqa: B018
    table = results.to_pandas()
    assert list(table["name"]) == results.names and list(table["k"]) == [4, 8]
    assert list(table["ce_increase"]) == [measured.ce_increase for measured in results]
    assert list(table["l0"]) == [measured.l0 for measured in results]
    assert "CE increase" in repr(one) and repr(results).count("\n") == 1
    assert mxd.common.files.read_json(results.save(tmp_path / "f.json"))["results"].keys() == document.keys()
    other = mxd.evaluate(run, {"validation": TEXTS[:49]}, tokens=128, model=gpt2).document["data"]
    assert other["source"] == "memory" != other["documents_sha256"] != results.document["data"]["documents_sha256"]


def test_layers_may_be_given_as_they_are(run, gpt2):
    layers = run.layers
    first = layers[KEPT[0]]
    expected = mxd.evaluate(run / KEPT[0], TEXTS, tokens=32, model=gpt2).only.ce_increase
    for given in (first, [first], {1: first}, {1: str(run / KEPT[0])}, [run / KEPT[0]]):
        found = mxd.evaluate(given, TEXTS, tokens=32, model=gpt2).only
        assert found.ce_increase == expected
    unsaved = mxd.Trained(first.layer, first.provenance)
    assert mxd.evaluate(unsaved, TEXTS, tokens=32, model=gpt2).names == [KEPT[0]]
    with pytest.raises(MxdError, match=r"does not say what it replaces.*Provenance.of"):
        as_trained(first.layer)
    with pytest.raises(MxdError, match="at least one layer"):
        mxd.evaluate([], TEXTS, model=gpt2)
    with pytest.raises(MxdError, match="never saved"):
        unsaved.push_to_hub("org/name")
    with pytest.raises(MxdError, match=r"held by Python code.*mxd.evaluate"):
        mxd.evaluate(run, model=gpt2)
    with pytest.raises(MxdError, match="tokens: expected a number greater than 0, got 0"):
        mxd.evaluate(run, TEXTS, tokens=0, model=gpt2)


def test_pandas_is_named_where_it_is_missing(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MxdError, match="pip install pandas"):
        run.to_pandas()


def test_a_layer_of_ones_own_loop_is_saved_with_what_the_model_tells(gpt2, tmp_path):
    layer = mxd.size(mxd.TranscoderConfig().resolve(gpt2.mlp_shape(1)), 9).build()
    about = mxd.Provenance.of(gpt2, 1, tokens=7, seed=3)
    saved = mxd.save_layer(tmp_path / "layer", layer, about)
    found = mxd.load_layer(saved)
    assert found.provenance == about and (about.tokens, about.seed, about.block) == (7, 3, 1)
    assert about.fingerprint == gpt2.fingerprint(1) and about.base_fingerprint == gpt2.base_fingerprint()
    x, _ = gpt2.record("The President", 1)[1]
    with mxd.spliced(gpt2, {1: found}):
        spliced = gpt2.mlp(1)(x)
    assert torch.equal(found(x), layer(x)) and torch.equal(spliced, found(x))
    with pytest.raises(MxdError, match="provenance: tokns"):
        mxd.Provenance.of(gpt2, 1, tokns=7)
    with pytest.raises(MxdError, match="block 9 is out of range"):
        mxd.Provenance.of(gpt2, 9)


def test_a_text_is_recorded_as_its_token_ids(gpt2):
    ids = torch.tensor([[0, *gpt2.tokenizer("The President")["input_ids"]]])
    assert torch.equal(gpt2.ids("The President"), ids)
    a, b = gpt2.record("The President", 1), gpt2.record(ids, [1])
    assert a.keys() == b.keys() == {1} and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))
    with pytest.raises(MxdError, match="no tokenizer"):
        mxd.load_frozen(gpt2.module).record("The President", 1)


def test_representations_are_short(run, gpt2):
    trained = run[KEPT[0]]
    config = trained.layer.config
    summary = f"MxD k4, N = {config.num_units}, 32 -> 32, {config.num_params:,} parameters"
    assert repr(trained.layer) == summary
    assert repr(trained) == f"Trained {summary}, for block 1 of {gpt2.source}"
    assert repr(gpt2).startswith(f"FrozenModel {gpt2.source}: GPT2LMHeadModel, 3 blocks, width 32, float32")
    assert repr(run).splitlines()[1] == f"  block1-mxd-k4: {summary}, 512 tokens"
    assert repr(mxd.Run(Path("nowhere"))) == "Run nowhere"


def test_the_stub_lists_what_is_there():
    stub = ast.parse((ROOT / "mxd" / "__init__.pyi").read_text())
    (listed,) = (ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign))
    assert sorted(listed) == dir(mxd)
    assert {config.__name__ for config in mxd.LAYERS.values()} <= set(listed)
    from mxd.layers.sparsity import SPARSITIES
    from mxd.metrics import METRICS

    assert {config.__name__ for config in SPARSITIES.values()} <= set(listed)
    for question in METRICS:
        assert getattr(mxd, question) is importlib.import_module(f"mxd.evaluation.{question}").answer
        assert f"{question.capitalize()}Config" in listed


def test_help_is_one_screen():
    shown = io.StringIO()
    with redirect_stdout(shown):
        help(mxd)
    assert len(shown.getvalue().splitlines()) < 70
    for name in re.findall(r"mxd\.(\w+)", mxd.__doc__):
        assert hasattr(mxd, name), name


def test_the_package_holds_the_configs_the_stub_and_its_types():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["mxd"]
    held = {name for pattern in patterns for name in glob(pattern, root_dir=ROOT / "mxd", recursive=True)}
    shipped = {f"assets/configs/{path.name}" for path in ROOT.joinpath("configs").glob("*.yaml")}
    assert len(shipped) > 10 and shipped | {"py.typed", "__init__.pyi"} <= held


@pytest.mark.long
def test_type_checkers_see_through_the_lazy_imports(tmp_path):
    (tmp_path / "right.py").write_text(
        "import mxd, torch\nfrom typing import assert_type\n"
        "run = mxd.train({}, ['a'], overwrite=True)\nassert_type(run, mxd.Run)\n"
        "assert_type(run['x'](torch.zeros(1)), torch.Tensor)\n"
        "with mxd.spliced(mxd.load_frozen('tiny-gpt2'), {2: run['x']}) as model: assert_type(model, mxd.FrozenModel)\n"
        "mxd.probing(mxd.open_checkpoints(run), mxd.ProbingConfig(limit=10))\n"
    )
    (tmp_path / "wrong.py").write_text("import mxd\nmxd.train(3)\nmxd.lode_layer\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--ignore-missing-imports"]
    environment = os.environ | {"MYPYPATH": str(ROOT)}  # mypy cannot follow an editable install
    given = [*command, "right.py", "wrong.py"]
    done = subprocess.run(given, cwd=tmp_path, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert [line.partition(": error")[0] for line in lines[:-1]] == ["wrong.py:2", "wrong.py:3"], done.stdout
    assert "load_layer" in lines[1]
