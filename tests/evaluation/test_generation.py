"""Generation: batched and cached it is what one prompt at a time gives without; what agrees is counted by hand."""

import itertools
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mxd.artifacts.checkpoint import Trained
from mxd.artifacts.provenance import Provenance
from mxd.common.errors import MxdError
from mxd.config import DataConfig
from mxd.evaluation.checkpoints import Subject
from mxd.evaluation.faithfulness import Constant
from mxd.evaluation.generation import (
    answer,
    evaluate_generation,
    generation_match,
    greedy,
    openings,
    prompts,
    wilson_interval,
)
from mxd.layers.sparsity import RandomKConfig, TopKConfig
from mxd.layers.transcoder import TranscoderConfig
from mxd.model.loading import load_frozen
from mxd.questions import GenerationConfig, checked
from mxd.splice import spliced

LAYER = 2
TEXTS = [
    "The President of the United States",
    "The",
    "The economy of",
    "A constitution",
    "In",
    "Agriculture - products: wheat, barley, and potatoes,",
]
"""Lengths 7, 2, 4, 3, 2, 18 in tokens: two alike, not in order."""


def starts(model):
    return [[0, *ids] for ids in model.tokenizer(TEXTS)["input_ids"]]


def transcoder(model, noise=0.3, number=LAYER, sparsity=None):
    d = model.mlp_shape(number).d_in
    layer = TranscoderConfig(d_in=d, d_out=d, num_units=48, sparsity=sparsity or TopKConfig(k=8)).build(0)
    layer.decoder.data.normal_(std=noise, generator=torch.Generator().manual_seed(0))
    return layer


def zero(model):
    return Constant(torch.zeros(model.mlp_shape(LAYER).d_out))


def oracle(model, prompt, new_tokens, layer=None, masked=()):
    """One prompt alone, one token at a time, everything computed again; a splice as a plain hook on the MLP."""
    ids = list(prompt)

    def replace(module, args, output):
        keep = torch.tensor([[i in masked for i in ids]]).unsqueeze(-1)
        return torch.where(keep, output, layer(args[0]))

    handle = model.mlp(LAYER).register_forward_hook(replace) if layer is not None else None
    try:
        for _ in range(new_tokens):
            logits = model.logits(torch.tensor([ids]))[0, -1].numpy()
            assert np.subtract(*np.sort(logits)[:-3:-1]) > 3e-4, "two tokens nearly tie; choose another prompt"
            ids.append(int(logits.argmax()))
    finally:
        if handle is not None:
            handle.remove()
    return ids[len(prompt) :]


@contextmanager
def forwards(model):
    """Collect the ids of every forward of this context."""
    seen = []
    handle = model.module.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def cacheless(model):
    """The model as one that answers without a cache."""
    handle = model.module.register_forward_hook(lambda module, args, out: setattr(out, "past_key_values", None))
    try:
        yield
    finally:
        handle.remove()


# Greedy continuations


def test_batched_and_cached_generation_is_the_uncached_one(trained):
    given = starts(trained)
    expected = [oracle(trained, prompt, 8) for prompt in given]
    for batch in (1, 32):
        assert greedy(trained, given, 8, batch).tolist() == expected


def test_random_models_of_every_family_too(family):
    rng = np.random.default_rng(0)
    given = [rng.integers(1, 4096, length).tolist() for length in (5, 1, 9, 5, 3, 9)]
    assert greedy(family, given, 6, batch=4).tolist() == [oracle(family, prompt, 6) for prompt in given]


def test_a_transformer_lens_bridge_generates_what_its_model_does(family, bridge):
    given = [[5, 7, 9], [3, 1], [8, 8, 2]]
    assert torch.equal(greedy(load_frozen(bridge), given, 6), greedy(family, given, 6))


def test_each_prompt_runs_once_unpadded_and_then_only_its_new_tokens(trained_gpt2):
    given = starts(trained_gpt2)
    with forwards(trained_gpt2) as seen:
        greedy(trained_gpt2, [*given, *given], 3, batch=3)
    firsts = [batch for batch in seen if len(batch[0]) > 1]
    assert sorted(row for batch in firsts for row in batch) == sorted([*given, *given])
    assert sorted(map(len, firsts)) == [1, 2, 2, 2, 2, 3]
    assert [len(batch[0]) for batch in seen[1:3]] == [1, 1]
    assert len(seen) == 3 * len(firsts)


def test_a_model_without_a_cache_gives_the_same(trained_gpt2):
    given = starts(trained_gpt2)
    expected = greedy(trained_gpt2, given, 6)
    with cacheless(trained_gpt2), forwards(trained_gpt2) as seen:
        assert torch.equal(greedy(trained_gpt2, given, 6), expected)
    assert max(len(batch[0]) for batch in seen) == 18 + 5


def test_a_cache_is_handed_on_by_the_name_that_the_model_knows(trained_gpt2, monkeypatch):
    """transformers renamed it, and tells so at every use of the former name."""
    given = starts(trained_gpt2)
    expected = greedy(trained_gpt2, given, 6)
    former, length = trained_gpt2.module.forward, []
    known = "cache" if "cache" in signature(former).parameters else "past_key_values"

    def forward(input_ids, cache=None, use_cache=None):
        length.append(input_ids.shape[1])
        out = former(input_ids=input_ids, use_cache=use_cache, **{known: cache})
        return SimpleNamespace(logits=out.logits, cache=out[known])

    monkeypatch.setattr(trained_gpt2.module, "forward", forward)
    assert torch.equal(greedy(trained_gpt2, given, 6), expected)
    assert length.count(1) > len(length) / 2, "later tokens are read alone"


def test_generation_goes_on_after_eos():
    model = load_frozen("tiny-llama", device="cpu")
    given = prompts(["Senegal - Transnational Issues none"], model.tokenizer)
    found = greedy(model, given, 16)
    at = found[0].tolist().index(model.tokenizer.eos_token_id)
    assert model.tokenizer.decode(found[0, at + 1 :]).strip()
    assert found[0].tolist() == oracle(model, given[0], 16)


# Spliced models


def test_a_spliced_model_generates_what_the_hooked_one_does(trained):
    layer = transcoder(trained)
    with spliced(trained, {LAYER: layer}):
        found = greedy(trained, starts(trained), 5)
    assert found.tolist() == [oracle(trained, prompt, 5, layer) for prompt in starts(trained)]
    assert not torch.equal(found, greedy(trained, starts(trained), 5))


def test_tokens_are_spliced_around_in_prompts_and_in_new_tokens(trained):
    given, layer = starts(trained), transcoder(trained, noise=1)
    masked = (0, *trained.tokenizer(" the of, and\n in a")["input_ids"])
    with spliced(trained, {LAYER: layer}, base_at=masked):
        found = greedy(trained, given, 6)
    assert found.tolist() == [oracle(trained, prompt, 6, layer, masked) for prompt in given]
    assert np.isin(found[:, :-1], masked).mean() > 0.1
    with spliced(trained, {LAYER: layer}):
        assert not torch.equal(greedy(trained, given, 6), found)


# What agrees


def test_generation_match_is_what_a_loop_counts():
    rng = np.random.default_rng(0)
    base, other = rng.integers(0, 3, (50, 9)), rng.integers(0, 3, (50, 9))
    other[:20] = base[:20]
    other[:10, 4] += 1
    expected = []
    for n in range(1, 10):
        same = 0
        for a, b in zip(base, other, strict=True):
            same += all(a[i] == b[i] for i in range(n))
        expected.append(same / 50)
    found = generation_match(torch.from_numpy(base), torch.from_numpy(other))
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert expected[3] > expected[4]


@pytest.mark.parametrize("count", [1, 10, 512])
def test_the_wilson_interval_ends_where_the_score_test_rejects(count):
    share = torch.arange(count + 1, dtype=torch.float64) / count
    low, high = wilson_interval(share, count, z=1.7)
    for end in (low, high):
        p = end.numpy()
        np.testing.assert_allclose(np.abs(share - p), 1.7 * np.sqrt(p * (1 - p) / count), atol=1e-7)
    assert (low <= share).all() and (share <= high).all() and (low < high).all()
    assert low[0] == 0 and high[-1] == 1


def test_a_wilson_interval_from_a_textbook():
    """5 of 10 at 95%: 0.2366 to 0.7634."""
    found = wilson_interval(torch.tensor([0.5], dtype=torch.float64), 10)
    assert found[:, 0].tolist() == pytest.approx([0.2366, 0.7634], abs=5e-5)


def test_a_model_spliced_with_its_own_mlps_writes_the_same(trained):
    own = {number: trained.mlp(number) for number in range(trained.num_blocks)}
    found = evaluate_generation(trained, {"own": own}, starts(trained), 6, batch=3)["own"]
    assert found["match"] == found["match_high"] == [1.0] * 6
    assert found["agreed"] == [6] * len(TEXTS)
    assert (found["agreed_tokens"], found["agreed_tokens_se"]) == (6, 0)
    assert max(found["match_low"]) < 1


def test_evaluate_generation_against_the_oracle(trained_gpt2):
    given, layer = starts(trained_gpt2), transcoder(trained_gpt2)
    sets = {"zero": {LAYER: zero(trained_gpt2)}, "block": {LAYER: layer}}
    found = evaluate_generation(trained_gpt2, sets, given, 5, batch=2, examples=3)
    base = [oracle(trained_gpt2, prompt, 5) for prompt in given]
    assert list(found) == ["zero", "block"]
    for name, members in sets.items():
        changed = [oracle(trained_gpt2, prompt, 5, members[LAYER]) for prompt in given]
        agreed = [next((i for i in range(5) if a[i] != b[i]), 5) for a, b in zip(base, changed, strict=True)]
        got = found[name]
        assert got["agreed"] == agreed
        assert got["match"] == [sum(length >= n for length in agreed) / len(given) for n in range(1, 6)]
        assert got["match"][-1] < 1
        assert got["match"] == sorted(got["match"], reverse=True)
        assert all(low < m < high or m in (0, 1) for low, m, high in triples(got))
        assert got["agreed_tokens"] == pytest.approx(np.mean(agreed))
        assert got["agreed_tokens_se"] == pytest.approx(np.std(agreed, ddof=1) / len(given) ** 0.5)
        assert (got["prompts"], got["new_tokens"]) == (len(given), 5)
        expected = zip(given[:3], base, changed, strict=False)
        assert [tuple(example.values()) for example in got["examples"]] == list(expected)
        assert all(list(example) == ["prompt", "base", "spliced"] for example in got["examples"])


def triples(found):
    return zip(found["match_low"], found["match"], found["match_high"], strict=True)


def test_a_removed_block_is_noticed_and_the_curve_only_falls(trained):
    found = evaluate_generation(trained, {"zero": {0: zero(trained)}}, starts(trained), 5)["zero"]
    assert found["match"][-1] < 1
    assert all(a >= b for a, b in itertools.pairwise(found["match"]))


def test_the_base_runs_once_and_comes_back_as_it_was(trained_gpt2):
    given = starts(trained_gpt2)
    before = greedy(trained_gpt2, given, 2)
    sets = {name: {LAYER: zero(trained_gpt2)} for name in "abc"}
    with forwards(trained_gpt2) as seen:
        evaluate_generation(trained_gpt2, sets, given, 2)
    assert len(seen) == (1 + 3) * 5 * 2  # base and sets, lengths, tokens
    assert torch.equal(greedy(trained_gpt2, given, 2), before)


def test_layers_run_in_evaluation_mode_and_are_handed_back_in_theirs(trained_gpt2):
    layer = transcoder(trained_gpt2, sparsity=RandomKConfig(k=8)).train()
    evaluate_generation(trained_gpt2, {"a": {LAYER: layer}}, starts(trained_gpt2), 2)
    assert int(layer.sparsity.draws) == 0
    assert layer.training
    evaluate_generation(trained_gpt2, {"a": {LAYER: layer.eval()}}, starts(trained_gpt2), 2)
    assert not layer.training


def test_a_lone_prompt_has_no_standard_error(trained_gpt2):
    found = evaluate_generation(trained_gpt2, {"z": {LAYER: zero(trained_gpt2)}}, starts(trained_gpt2)[:1], 2)["z"]
    assert found["agreed_tokens_se"] == float("inf")
    assert len(found["examples"]) == 1


def test_progress_ends_at_the_total(trained_gpt2, capsys):
    evaluate_generation(trained_gpt2, {"z": {LAYER: zero(trained_gpt2)}}, starts(trained_gpt2), 5, batch=2)
    assert "60/60 tokens" in capsys.readouterr().err.splitlines()[-1]


# Prompts


def test_prompts_are_the_first_words_after_bos(tokenizer):
    texts = ["  One two\n\nthree four five", "too short", "", "five six seven eight"]
    found = prompts(texts, tokenizer)
    assert [tokenizer.decode(ids) for ids in found] == [
        "<|endoftext|>One two\n\nthree four",
        "<|endoftext|>five six seven eight",
    ]
    assert prompts(texts, tokenizer, bos=False) == [ids[1:] for ids in found]
    assert prompts(["One two"], tokenizer, GenerationConfig(words=1)) == [[0, *tokenizer("One")["input_ids"]]]


def test_prompts_leave_out_repeats_and_read_no_further_than_needed(tokenizer):
    read = []

    def endless():
        for n in itertools.count():
            read.append(n)
            yield f"document number {n // 3} says something"

    found = prompts(endless(), tokenizer, GenerationConfig(limit=4))
    assert [tokenizer.decode(ids[1:]) for ids in found] == [f"document number {n} says" for n in range(4)]
    assert len(read) == 10


def test_a_tokenizer_without_bos(tokenizer):
    class NoBos:
        bos_token_id = None

        def __call__(self, texts, **options):
            return tokenizer(texts, **options)

    assert prompts(["one two three four"], NoBos()) == prompts(["one two three four"], tokenizer, bos=False)


# Mistakes


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([], {}, "no prompts"),
        ([[1, 2], []], {}, "prompt 1 has no tokens"),
        ([[1]], {"new_tokens": 0}, "new_tokens is 0; expected at least 1"),
        ([[1]], {"batch": 0}, "batch is 0; expected at least 1"),
        ([[1], [1] * 97], {}, r"prompt 1 of 97 tokens and 32 new ones do not fit into the 128 positions of .*shorten"),
        ([[1, 4096]], {}, r"prompt 0 holds token ids 1 ... 4096; .* has tokens 0 ... 4095. .*own tokenizer"),
        ([[-1, 3]], {}, "holds token ids -1"),
    ],
)
def test_what_cannot_be_continued(trained, given, options, message):
    options = {"new_tokens": 32, **options}
    with pytest.raises(MxdError, match=message):
        greedy(trained, given, **options)
    with pytest.raises(MxdError, match=message):
        evaluate_generation(trained, {"z": {LAYER: zero(trained)}}, given, **options)


def test_the_last_position_can_be_filled(trained):
    assert greedy(trained, [[1] * 126], 2).shape == (1, 2)
    with pytest.raises(MxdError, match="do not fit"):
        greedy(trained, [[1] * 127], 2)


def test_bad_sets_are_refused_before_anything_runs(trained_gpt2):
    good = {LAYER: zero(trained_gpt2)}
    with forwards(trained_gpt2) as seen:
        for sets, message in [
            ({}, "nothing to evaluate"),
            ({"a": good, "b": {}}, "nothing to evaluate"),
            ({"a": good, "b": {77: zero(trained_gpt2)}}, "out of range"),
        ]:
            with pytest.raises(MxdError, match=message):
                evaluate_generation(trained_gpt2, sets, [[1]], 1)
    assert not seen


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["one two three"], {}, "no text has 4 words"),
        ([], {}, "no text has 4 words"),
        (["one"], {"words": 0}, "words: expected a number greater than 0, got 0"),
        (["one"], {"words": 1, "limit": 0}, "limit: expected a number greater than 0, got 0"),
    ],
)
def test_texts_that_give_no_prompts(tokenizer, texts, options, message):
    with pytest.raises(MxdError, match=message):
        prompts(texts, tokenizer, checked(GenerationConfig, **options))


def test_prompts_need_a_tokenizer():
    with pytest.raises(MxdError, match="no tokenizer"):
        prompts(["one two three four"], None)


def test_openings_are_documents_first_then_paragraphs_in_turn():
    texts = ["a0\n\na1\n\na2", "b0", "c0\n\nc1"]
    drawn = list(openings(iter(texts), 5, seed=3))
    assert sorted(drawn[:3]) == sorted(texts)
    order = [text[0] for text in drawn[:3]]
    assert drawn[3:] == [f"{name}1" for name in order if name != "b"] + ["a2"]
    assert drawn == list(openings(iter(texts), 5, seed=3))
    assert len({tuple(openings(iter(texts), 5, seed)) for seed in range(9)}) > 1
    endless = (str(n) for n in itertools.count())
    assert sorted(map(int, openings(endless, 2, 0))) == list(range(32))
    assert list(openings([], 4, 0)) == []


def subject(model, *numbers, bos=True):
    trained = {}
    for number in numbers:
        provenance = Provenance(
            model="tiny-gpt2", revision=None, block=number, fingerprint=model.fingerprint(number), tokens=7
        )
        trained[f"r/{number}"] = Trained(transcoder(model, number=number), provenance, Path("r") / str(number))
    return Subject(trained, model, DataConfig(split="validation", bos=bos))


def test_checkpoints_continue_openings_of_held_out_texts_and_say_what_of(trained_gpt2):
    one = subject(trained_gpt2, LAYER)
    found = answer(one, GenerationConfig(limit=12, words=3, tokens=4, seed=1))
    result = found["results"]["r/2"]
    assert result["prompts"] == 12 and len(result["match"]) == 4
    assert result["replacements"][0] == {
        "method": "TC", "sparsity": "k8", "k": 8, "block": LAYER, "units": 48,
        "params": one.trained["r/2"].layer.config.num_params, "tokens_trained": 7,
    }  # fmt: skip
    assert found["data"]["split"] == "validation" and found["asked"]["seed"] == 1
    for example in result["examples"]:
        assert len(example["prompt_text"].split()) == 3 and example["prompt"][0] == 0
        assert "".join(example["base_tokens"]) == trained_gpt2.tokenizer.decode(example["base"])
        assert [trained_gpt2.tokenizer.decode([t]) for t in example["spliced"]] == example["spliced_tokens"]
    texts = openings(one.texts(), 12, 1)
    ids = prompts(texts, trained_gpt2.tokenizer, GenerationConfig(words=3, limit=12))
    assert [e["prompt"] for e in result["examples"]] == ids[:8]
    other = answer(one, GenerationConfig(limit=12, words=3, tokens=4, seed=2))
    other = other["results"]["r/2"]["examples"]
    assert [e["prompt"] for e in other] != [e["prompt"] for e in result["examples"]]


def test_one_prompt_is_continued_whole(trained_gpt2):
    found = answer(subject(trained_gpt2, 1, LAYER, bos=False), GenerationConfig(tokens=3), True, TEXTS[0])
    assert list(found["results"]) == ["tc-k8"]
    (example,) = found["results"]["tc-k8"]["examples"]
    assert example["prompt_text"] == TEXTS[0]
    assert example["prompt"] == trained_gpt2.tokenizer(TEXTS[0])["input_ids"]
    assert len(found["results"]["tc-k8"]["replacements"]) == 2
    with pytest.raises(MxdError, match="the prompt '' has no tokens"):
        answer(subject(trained_gpt2, LAYER), prompt="")


def test_white_space_around_a_prompt_is_part_of_it(trained_gpt2):
    found = answer(subject(trained_gpt2, LAYER, bos=False), GenerationConfig(tokens=3), prompt="\n President ")
    (example,) = found["results"]["r/2"]["examples"]
    assert example["prompt"] == trained_gpt2.tokenizer("\n President ")["input_ids"]
