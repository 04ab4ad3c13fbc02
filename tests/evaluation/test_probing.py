"""Probing: what is pooled is the mean of pre-activations by hand, and the probes are scikit-learn's run by hand."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from transformers import ByT5Tokenizer

from mxd.artifacts.checkpoint import Trained
from mxd.artifacts.provenance import Provenance
from mxd.common.errors import MxdError
from mxd.data.labelled import LabelledTexts, labelled_texts
from mxd.evaluation.probes import Units, f1, k_sparse_accuracy, probe_class
from mxd.evaluation.probing import _pool, _read, _shares, evaluate_probing
from mxd.layers.sae import TopKSAEConfig
from mxd.layers.sparsity import TopKConfig
from mxd.layers.transcoder import TranscoderConfig
from mxd.model.loading import load_frozen
from mxd.questions import ProbingConfig, checked

SHARED = " of the world in a year and more than half by law"
WORDS = {"people": "the president and the citizens of this nation", "goods": "wheat, coffee, sugar, cotton and rice"}


def trained_layer(model, number=1, kind=TranscoderConfig, masked=(0,), units=40, seed=0):
    d = model.mlp_shape(number).d_in
    config = kind(d_in=d, d_out=d, num_units=units, sparsity=TopKConfig(k=4))
    layer = config.resolve(model.mlp_shape(number)).build(seed)
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.2, generator=torch.Generator().manual_seed(seed + parameter.numel()))
    provenance = Provenance(
        model=model.source, revision=None, block=number, fingerprint=model.fingerprint(number), excluded_ids=masked
    )
    return Trained(layer.eval().requires_grad_(False), provenance, Path())


def texts(count=60, seed=0, name="some", share=0.5, spans=False):
    """Sentences of two vocabularies, of many lengths, in no order; some of their words marked as a span."""
    rng = np.random.default_rng(seed)
    labels = [list(WORDS)[int(draw > share)] for draw in rng.random(count)]
    pools = {label: (words + SHARED).split() for label, words in WORDS.items()}
    made = [" ".join(rng.choice(pools[label], rng.integers(9, 20))) for label in labels]
    return LabelledTexts(name, made, labels, [marked(text, rng) for text in made] if spans else None)


def marked(text, rng):
    """The characters of one to three words of a text."""
    words = [match.span() for match in re.finditer(r"\S+", text)]
    first = int(rng.integers(len(words) - 2))
    return words[first][0], words[first + int(rng.integers(3))][1]


def by_hand(model, given, pre, context=248, side="first", masked=(0,), level="sample"):
    """Pooled pre-activations, one text at a time; ``pre`` maps the input of the forward to ``[1, seq, units]``."""
    rows = []
    for text in given.texts:
        ids = model.tokenizer(text)["input_ids"]
        ids = [0, *(ids[: context - 1] if side == "first" else ids[-(context - 1) :])]
        values = pre(torch.tensor([ids]))[0].double().numpy()
        kept = [i for i in range(1, len(ids)) if ids[i] not in masked]
        if level == "span":
            kept = [i for i in kept if i in spelt(model.tokenizer, text, *given.spans[len(rows)], ids, side)]
        rows.append(values[kept[-1]] if level == "token" else values[kept].mean(0) if kept else None)
    return rows


def spelt(tokenizer, text, start, end, ids, side):
    """Which tokens of the cut text write at least one letter of the span: by decoding, without offsets."""
    whole = tokenizer(text)["input_ids"]
    bounds = np.cumsum([0, *(len(tokenizer.decode([i])) for i in whole)])
    assert bounds[-1] == len(text)
    shift = 1 if side == "first" else 1 + len(ids) - 1 - len(whole)
    return [i + shift for i in range(len(whole)) if bounds[i] < end and bounds[i + 1] > start and i + shift >= 1]


def protocol(features, labels, label, seed=42, candidates=100):
    """The paper's protocol by hand: best held-out F1, its unit, and the held-out F1 of the unit best in training."""
    features, order = np.stack(features), np.arange(len(labels))
    np.random.seed(seed)
    np.random.shuffle(order)
    x, y = features[order], np.array(labels)[order] == label
    cut = int(0.8 * len(y))
    gap = x[:cut][y[:cut]].mean(0) - x[:cut][~y[:cut]].mean(0)
    scores = {}
    for unit in np.argsort(-gap)[:candidates]:
        probe = LogisticRegression(class_weight="balanced", solver="newton-cholesky", max_iter=200)
        probe.fit(x[:cut, [unit]], y[:cut])
        answers = probe.predict(x[:, [unit]])
        scores[int(unit)] = f1_score(y[cut:], answers[cut:]), f1_score(y[:cut], answers[:cut])
    choice = max(scores, key=lambda unit: scores[unit][1])
    return scores, choice


@pytest.mark.long
def test_probes_are_those_of_scikit_learn_run_by_hand_on_pre_activations(trained_gpt2):
    model, given = trained_gpt2, texts(share=0.25)
    members = {
        "tc": trained_layer(model),
        "sae": trained_layer(model, kind=TopKSAEConfig),
        "up": trained_layer(model, 3),
    }
    found = evaluate_probing(model, members, [given], ProbingConfig(candidates=6), forward_tokens=64)
    down = model.mlp(1).c_proj
    neurons = []
    handle = down.register_forward_pre_hook(lambda module, args: neurons.append(args[0]))

    def hidden(ids):
        model.logits(ids)
        return neurons[-1]

    features = {
        "tc": by_hand(model, given, lambda ids: members["tc"].layer.pre_activations(model.record(ids, [1])[1][0])),
        "sae": by_hand(model, given, lambda ids: members["sae"].layer.pre_activations(model.record(ids, [1])[1][1])),
        "up": by_hand(model, given, lambda ids: members["up"].layer.pre_activations(model.record(ids, [3])[3][0])),
        "MLP neurons, block 1": by_hand(model, given, hidden),
    }
    handle.remove()
    assert set(found) == {*features, "MLP neurons, block 3"}
    for name, values in features.items():
        result = found[name]["some"]
        assert (result["n_train"], result["n_test"], result["texts"], result["skipped"]) == (48, 12, 60, 0)
        for label in WORDS:
            scores, choice = protocol(values, given.labels, label, candidates=6)
            one = result["classes"][label]
            assert one["f1"] == pytest.approx(max(score for score, _ in scores.values()))
            assert scores[one["unit"]][0] == pytest.approx(one["f1"])
            assert one["train_choice"] == {"unit": choice, "f1": pytest.approx(scores[choice][0])}
        assert result["mean_f1"] == pytest.approx(np.mean([c["f1"] for c in result["classes"].values()]))


@pytest.mark.long
def test_pooling_and_cutting_are_right_for_every_family_side_and_level(family):
    masked = (0, *family.tokenizer(" the")["input_ids"])
    layer = trained_layer(family, masked=masked).layer
    given = texts(40, spans=True)
    lengths = [len(family.tokenizer(text)["input_ids"]) for text in given.texts]
    assert min(lengths) < 23 < max(lengths)  # some are padded, some cut
    order = np.random.RandomState(0).permutation(40)
    for level, side in (
        ("sample", "first"),
        ("sample", "last"),
        ("span", "first"),
        ("span", "last"),
        ("token", "last"),
    ):
        probes = ProbingConfig(level=level, side=side, context=24, seed=0)
        read = _read(given, family.tokenizer, probes, True, set(masked))
        expected = by_hand(
            family,
            given,
            lambda ids: layer.pre_activations(family.record(ids, [1])[1][0]),
            context=24,
            side=side,
            masked=masked,
            level=level,
        )
        kept = [i for i in order if expected[i] is not None]
        assert read.skipped == 40 - len(kept)
        assert read.labels.tolist() == [given.labels[i] for i in kept]
        site = (1, "mlp_in", masked)
        pooled = _pool(family, read, {site}, {}, 100, lambda amount: None)[site]
        units = Units(pooled, layer.gates)
        expected = np.stack([expected[i] for i in kept])
        np.testing.assert_allclose(units.columns(torch.arange(40)), expected, atol=2e-4)
        rows = np.arange(len(kept)) % 3 == 0
        gap = expected[rows].mean(0) - expected[~rows].mean(0)
        np.testing.assert_allclose(units.differences(rows, ~rows), gap, atol=2e-4)


def test_a_word_of_three_tokens_is_the_mean_of_the_three(gpt2):
    """Not its last token, as at the token level; a letter of it is enough for a whole token."""
    text = "We met Wendell today"
    tokens = [gpt2.tokenizer.decode([i]) for i in gpt2.tokenizer(text)["input_ids"]]
    first = tokens.index(" today") - 3
    assert "".join(tokens[first : first + 3]) == " Wendell", tokens
    (x, _) = gpt2.record(torch.tensor([[0, *gpt2.tokenizer(text)["input_ids"]]]), [1])[1]
    site = (1, "mlp_in", (0,))
    for span, counted in (((7, 14), [0, 1, 2]), ((13, 14), [2]), ((6, 7), [0])):
        given = LabelledTexts("one", [text] * 10, ["a", "b"] * 5, [span] * 10)
        assert given.level == "span"
        pooled = _pool(gpt2, _read(given, gpt2.tokenizer, ProbingConfig(), True, {0}), {site}, {}, 100, lambda n: None)
        expected = x[0, [1 + first + n for n in counted]].mean(0)
        torch.testing.assert_close(pooled[site], expected.expand(10, -1), rtol=1e-4, atol=1e-5)


def test_a_text_whose_span_is_cut_off_or_masked_is_left_out(gpt2):
    text = "Wendell met us there on the way to the house by the river"
    ids = gpt2.tokenizer(text)["input_ids"]
    given = LabelledTexts("one", [text, text] * 5, ["a", "b"] * 5, [(0, 7), (len(text) - 5, len(text))] * 5)
    for side, count, places in (("first", 4, range(1, 4)), ("last", 0, range(6, 8))):
        with pytest.raises(MxdError, match=f"of the 4 training texts {count} are of class 'a'"):
            _read(given, gpt2.tokenizer, ProbingConfig(side=side, context=8), True, {0})
        both = LabelledTexts("both", given.texts, ["a", "b"] * 5, [given.spans[side == "last"]] * 10)
        read = _read(both, gpt2.tokenizer, ProbingConfig(side=side, context=8), True, {0})
        assert read.positions == [places] * 10 and read.ids[0] == [0, *(ids[:7] if side == "first" else ids[-7:])]
    with pytest.raises(MxdError, match="of the 0 training texts 0 are"):
        _read(both, gpt2.tokenizer, ProbingConfig(context=8), True, {0, *ids[-2:]})


def test_a_set_may_say_which_side_is_read_and_the_question_has_the_last_word(gpt2):
    given = replace(texts(30), side="last")
    sides = [(None, None, "first"), ("last", None, "last"), ("last", "first", "first")]
    for own, asked, read in sides:
        how = ProbingConfig(side=asked, context=8)
        assert _read(replace(given, side=own), gpt2.tokenizer, how, True, {0}).side == read


def test_of_each_text_the_positions_counted_weigh_the_same():
    ids = torch.tensor([[0, 5, 6, 5], [0, 6, 9, 0]])
    whole, spans = [range(1, 4), range(1, 3)], [range(2, 4), range(1, 2)]
    assert _shares(ids, whole, "sample", [5]).tolist() == [[0, 0, 1, 0], [0, 0.5, 0.5, 0]]
    assert _shares(ids, spans, "span", [7]).tolist() == [[0, 0, 0.5, 0.5], [0, 1, 0, 0]]
    assert _shares(ids, whole, "token", [5]).tolist() == [[0, 0, 1, 0], [0, 0, 1, 0]]


def test_the_base_model_runs_once_a_set_whatever_the_number_of_layers(gpt2):
    forwards = []
    handle = gpt2.blocks[0].register_forward_hook(lambda *args: forwards.append(1))
    given = [texts(30, name="one"), texts(30, seed=1, name="two")]
    members = {f"l{i}": trained_layer(gpt2, i % 3, seed=i) for i in range(6)}
    evaluate_probing(gpt2, members, given, ProbingConfig(candidates=2), forward_tokens=10_000)
    handle.remove()
    assert len(forwards) == 2


def units_of(values):
    return Units(torch.tensor(values, dtype=torch.float32))


def test_a_unit_that_is_the_label_is_found_and_one_of_the_opposite_sign_is_not_a_candidate():
    rng = np.random.default_rng(0)
    positive = rng.random(200) < 0.25
    train = np.arange(200) < 160
    values = rng.normal(size=(200, 8))
    values[:, 3] = 10 * positive + rng.normal(size=200) * 0.1
    values[:, 5] = -20 * positive
    one = probe_class(units_of(values), positive, train, candidates=3)
    assert (one["unit"], one["f1"], one["train_choice"]) == (3, 1.0, {"unit": 3, "f1": 1.0})
    held = int(positive[160:].sum())
    assert (one["n_test"], one["n_positive"]) == (40, held)
    assert one["f1_always"] == pytest.approx(2 * held / (held + 40))
    density = one["density"]
    widths = np.diff(density["edges"])
    for side in ("positive", "negative"):
        assert (np.array(density[side]) * widths).sum() == pytest.approx(1)
    middle = np.searchsorted(density["edges"], 5)
    assert sum(density["positive"][: middle - 1]) == sum(density["negative"][middle:]) == 0


def test_the_unit_best_on_held_out_texts_and_the_one_best_in_training_are_told_apart():
    positive = np.array([True, False] * 50)
    train = np.arange(100) < 80
    noisy_in_training = np.where(train, positive ^ (np.arange(100) % 5 == 0), positive)
    noisy_held_out = np.where(train, positive, positive ^ (np.arange(100) % 5 == 0))
    one = probe_class(units_of(np.stack([noisy_in_training, noisy_held_out], 1) * 5.0), positive, train, 100)
    assert (one["unit"], one["f1"]) == (0, 1.0)
    assert one["train_choice"] == {"unit": 1, "f1": pytest.approx(0.8)}


def test_f1_is_the_harmonic_mean_of_precision_and_recall():
    rng = np.random.default_rng(1)
    for _ in range(20):
        truth, answers = rng.random((2, 15)) < 0.4
        hits = (truth & answers).sum()
        precision, recall = hits / max(answers.sum(), 1), hits / max(truth.sum(), 1)
        expected = 2 * precision * recall / (precision + recall) if hits else 0.0
        assert f1(truth, answers) == pytest.approx(expected)
    assert f1(np.zeros(3, bool), np.zeros(3, bool)) == 0.0


def test_saebench_accuracy_is_scikit_learn_by_hand_on_balanced_texts():
    rng = np.random.default_rng(3)
    positive = np.arange(120) % 4 == 0
    train = np.arange(120) < 96
    values = rng.normal(size=(120, 12)) + np.outer(positive, rng.normal(size=12))
    draw = np.random.default_rng(9)
    kept = positive.copy()
    for part in (train, ~train):
        kept[draw.choice(np.flatnonzero(part & ~positive), int((part & positive).sum()), replace=False)] = True
    fit, test = kept & train, kept & ~train
    assert positive[fit].mean() == positive[test].mean() == 0.5
    order = np.argsort(-abs(values[fit & positive].mean(0) - values[fit & ~positive].mean(0)))
    found = k_sparse_accuracy(units_of(values), positive, train, seed=9)
    for k in (1, 2, 5):
        probe = LogisticRegression(max_iter=1000).fit(values[fit][:, order[:k]], positive[fit])
        assert found[str(k)] == pytest.approx(probe.score(values[test][:, order[:k]], positive[test]))
    assert set(found) == {"1", "2", "5"} and max(found.values()) > 0.6


def test_texts_are_drawn_limited_and_left_out_by_the_rules(gpt2):
    given = texts(60)
    short = LabelledTexts("some", [*given.texts, "wheat", ""], [*given.labels, "goods", "goods"])
    layer = {"tc": trained_layer(gpt2)}
    found = evaluate_probing(gpt2, layer, [short], ProbingConfig(candidates=2))["tc"]["some"]
    assert [found[key] for key in ("texts", "skipped", "n_train", "n_test")] == [60, 2, 48, 12]
    found = evaluate_probing(gpt2, layer, [short], ProbingConfig(candidates=2, limit=20))["tc"]["some"]
    assert found["texts"] + found["skipped"] == 20
    found = evaluate_probing(gpt2, layer, [short], ProbingConfig(candidates=2, level="token"))["tc"]["some"]
    assert (found["texts"], found["skipped"], found["level"], found["side"]) == (61, 1, "token", "last")


def test_a_set_with_spans_is_probed_there(gpt2):
    given = [texts(spans=True), replace(labelled_texts("gender"), name="gender")]
    found = evaluate_probing(gpt2, {"tc": trained_layer(gpt2)}, given, ProbingConfig(candidates=2, limit=60))["tc"]
    for name in ("some", "gender"):
        assert (found[name]["level"], found[name]["side"], found[name]["skipped"]) == ("span", "last", 0)
    found = evaluate_probing(gpt2, {"tc": trained_layer(gpt2)}, given, ProbingConfig(candidates=2, level="sample"))
    assert found["tc"]["some"]["level"] == "sample"


def test_spans_need_a_tokenizer_that_says_where_its_tokens_stand(gpt2):
    model, given = load_frozen(gpt2.module, tokenizer=ByT5Tokenizer()), texts(spans=True)
    layer = {"tc": trained_layer(model)}
    with pytest.raises(MxdError, match=r"spans needs a fast tokenizer.*; \w+ does not. Choose --level token"):
        evaluate_probing(model, layer, [given])
    found = evaluate_probing(model, layer, [given], ProbingConfig(candidates=2, level="token", context=40))
    assert found["tc"]["some"]["level"] == "token"
    with pytest.raises(MxdError, match="some has no spans: give it columns start and end, or choose --level sample or"):
        evaluate_probing(gpt2, {"tc": trained_layer(gpt2)}, [texts()], ProbingConfig(level="span"))


def test_an_mlp_of_unknown_form_has_no_neurons_to_compare_with(build_model, tokenizer):
    model = load_frozen(build_model("apertus", intermediate_size=64), tokenizer=tokenizer)
    found = evaluate_probing(model, {"tc": trained_layer(model)}, [texts(30)], ProbingConfig(candidates=2))
    assert set(found) == {"tc"}


def test_mistakes_are_refused_with_a_remedy(gpt2, build_model):
    layer = {"tc": trained_layer(gpt2)}
    for options, message in (
        ({"limit": 0}, "limit: expected a number greater than 0, got 0"),
        ({"candidates": 0}, "candidates: expected a number greater than 0, got 0"),
        ({"context": 5}, "context: expected a number of at least 6, got 5"),
        ({"sets": ()}, "sets: expected a list of at least 1, got "),
        ({"level": "text"}, "level: expected sample, span or token, got 'text'"),
        ({"side": "middle"}, "side: expected first or last, got 'middle'"),
    ):
        with pytest.raises(MxdError, match=message):
            checked(ProbingConfig, **options)
    for members, sets, options, message in (
        ({}, [texts()], {}, "at least one checkpoint and one labelled set"),
        (layer, [], {}, "at least one checkpoint and one labelled set"),
        (layer, [texts(), texts()], {}, "two labelled sets have one name"),
        (layer, [texts()], {"limit": 4}, r"of the 1 held-out texts \d are of class .*raise --limit"),
        (layer, [texts()], {"level": "token", "side": "first"}, "drop --first"),
    ):
        with pytest.raises(MxdError, match=message):
            evaluate_probing(gpt2, members, sets, ProbingConfig(**options))
    with pytest.raises(MxdError, match="no tokenizer"):
        evaluate_probing(load_frozen(build_model("gpt2")), layer, [texts()])
    with pytest.raises(MxdError, match="has other weights there"):
        evaluate_probing(load_frozen(build_model("gpt2", seed=1), tokenizer=gpt2.tokenizer), layer, [texts()])
