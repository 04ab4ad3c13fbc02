"""Units: firing rates and contexts against NumPy, for every method; sampling in intervals against the whole stream."""

import json
import math

import numpy as np
import pytest
import torch
from command import mxd
from small_layers import UNITS, K, contexts_of, dense_code, layer_for, trained_on
from variants import GENERAL, SOME_GENERAL

from mxd.artifacts.checkpoint import save_layer
from mxd.common.errors import MxdError
from mxd.evaluation import intervals as bands_module
from mxd.evaluation.intervals import DEPTH, INTERVALS, STEPS, IntervalSamples
from mxd.evaluation.units import WINDOW, contributing, evaluate_units, firing, token_strings
from mxd.evaluation.walk import CodeMoments
from mxd.layers import Code
from mxd.questions import UnitsConfig, checked


def whole(rows, **fields):
    """Ask of all rows."""
    return UnitsConfig(tokens=rows.size, **fields)


@pytest.fixture(scope="module")
def rows():
    """24 contexts of 16 tokens, with special tokens (0) at the beginning of each and here and there."""
    rows = np.random.default_rng(0).integers(1, 60, (24, 16))
    rows[:, 0] = 0
    rows[::3, 7] = 0
    return rows


@pytest.mark.parametrize("method", SOME_GENERAL)
def test_rates_and_strengths_agree_with_numpy(gpt2, rows, method):
    """Several layers at once; special tokens do not count."""
    layers = {number: layer_for(gpt2, number, method, seed=number) for number in (0, 2)}
    trained = {f"at {number}": trained_on(gpt2, number, layer) for number, layer in layers.items()}
    found = evaluate_units(gpt2, trained, contexts_of(rows), whole(rows), forward_contexts=5)
    assert list(found) == ["at 0", "at 2"]
    for number, layer in layers.items():
        got, code = found[f"at {number}"], dense_code(gpt2, number, layer, rows)[rows != 0]
        active = code > 0
        assert got["block"] == number
        assert got["tokens"] == len(code) < rows.size
        np.testing.assert_allclose(got["rates"], active.mean(0))
        np.testing.assert_allclose(got["means"], code.sum(0) / np.maximum(active.sum(0), 1), rtol=1e-4)
        np.testing.assert_allclose(got["maxima"], code.max(0), rtol=1e-4)
        assert got["dead"] == (active.sum(0) == 0).sum()
        alive = active.mean(0)[active.any(0)]
        edges = got["histogram"]["log10_edges"]
        assert edges[0] <= math.log10(1 / len(code)) and edges[-1] == 0
        assert got["histogram"]["counts"] == np.histogram(np.log10(alive), edges)[0].tolist()
        assert sum(got["histogram"]["counts"]) + got["dead"] == UNITS


def test_shared_and_dead_units_are_named(gpt2, rows):
    layer = layer_for(gpt2, 1, sparsity={"kind": "relu_l1"})
    layer.gate_bias.data[3] = 1e3
    layer.gate_bias.data[5] = -1e3
    trained = {"a": trained_on(gpt2, 1, layer)}
    got = evaluate_units(gpt2, trained, contexts_of(rows), whole(rows, shared=0.9))["a"]
    assert got["shared"][0] == {"unit": 3, "rate": 1.0}
    assert all(one["rate"] > 0.9 == got["shared_above"] for one in got["shared"])
    assert [one["unit"] for one in got["shared"]] != sorted(range(UNITS))
    assert got["dead"] >= 1 and got["rates"][5] == 0
    assert not {"3", "5"} & set(got["units"])
    shown = evaluate_units(gpt2, trained, contexts_of(rows), whole(rows), units=[5, 3])["a"]["units"]
    assert list(shown) == ["5", "3"] and shown["5"]["intervals"] == [] and len(shown["3"]["intervals"]) >= 1


@pytest.mark.parametrize(
    "sparsity",
    [{"kind": "entmax", "norm": "none"}, {"kind": "softmax", "norm": "none"}, {"kind": "topk_softmax", "k": 3}],
    ids=lambda sparsity: sparsity["kind"],
)
def test_the_load_is_the_share_of_tokens_with_half_of_the_coefficients(gpt2, rows, sparsity):
    layer = layer_for(gpt2, 1, sparsity=sparsity)
    with torch.no_grad():
        layer.gate *= 20  # so that single units stand out
    got = evaluate_units(gpt2, {"a": trained_on(gpt2, 1, layer)}, contexts_of(rows), whole(rows))["a"]
    x, _ = gpt2.record(torch.from_numpy(rows), [1])[1]
    code = layer.encode(x[torch.from_numpy(rows != 0)])
    dense = np.zeros((len(code.activations), UNITS))
    np.put_along_axis(dense, code.indices.numpy(), code.activations.detach().numpy(), 1)
    np.testing.assert_allclose(dense.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(got["loads"], (dense >= 0.5).mean(0))
    assert 0 < got["loaded"] == (dense >= 0.5).any(0).sum()
    plain = evaluate_units(gpt2, {"a": trained_on(gpt2, 1, layer_for(gpt2, 1))}, contexts_of(rows), whole(rows))["a"]
    assert "loads" not in plain and "loaded" not in plain


@pytest.mark.parametrize("method", GENERAL)
def test_every_context_shown_is_in_the_text_and_no_band_lacks_one(gpt2, rows, method):
    layer = layer_for(gpt2, 1, method)
    code = dense_code(gpt2, 1, layer, rows) * (rows != 0)[..., None]
    units = [int(n) for n in np.argsort(-(code > 0).sum((0, 1)))[:6]]
    got = evaluate_units(
        gpt2,
        {"a": trained_on(gpt2, 1, layer)},
        contexts_of(rows),
        whole(rows, contexts=3),
        units,
        forward_contexts=5,
    )["a"]["units"]
    assert list(got) == [str(unit) for unit in units]
    for unit in units:
        page, values = got[str(unit)], code[..., unit]
        assert page["max"] == pytest.approx(values.max(), rel=1e-4)
        assert page["rate"] == pytest.approx((values > 0).sum() / (rows != 0).sum())
        edges = [0.0, *(interval["low"] for interval in page["intervals"][::-1] if interval["low"] > 0), page["max"]]
        assert edges == sorted(edges)
        for interval in page["intervals"]:
            inside = (values >= interval["low"] * (1 + 1e-5)) & (values < interval["high"] * (1 - 1e-5)) & (values > 0)
            drawn = [context["value"] for context in interval["contexts"]]
            assert len(drawn) >= min(3, inside.any(1).sum())
            assert len(drawn) <= 3 and drawn == sorted(drawn, reverse=True)
            places = {check_context(gpt2, rows, values, interval, context) for context in interval["contexts"]}
            assert len(places) == len(drawn), "two of one context"


def check_context(model, rows, values, interval, context):
    """Return the number of the context, found in the text by its activation."""
    assert interval["low"] * (1 - 1e-5) <= context["value"] <= interval["high"] * (1 + 1e-5)
    number, place = np.unravel_index(np.abs(values - context["value"]).argmin(), values.shape)
    window = slice(max(0, place - WINDOW[0]), place + WINDOW[1] + 1)
    assert context["tokens"] == [model.tokenizer.decode([i]) for i in rows[number, window]]
    assert context["at"] == place - window.start
    np.testing.assert_allclose(context["activations"], values[number, window], rtol=1e-3, atol=1e-4)
    assert context["activations"][context["at"]] == pytest.approx(context["value"], rel=1e-3)
    return number


def test_the_same_for_every_batch_size_and_another_for_another_seed(gpt2, rows):
    trained = {"a": trained_on(gpt2, 1, layer_for(gpt2, 1))}

    def found(seed=0, batch=4):
        how = UnitsConfig(tokens=320, top=8, contexts=1, seed=seed)
        units = evaluate_units(gpt2, trained, contexts_of(rows), how, forward_contexts=batch)
        return [
            [c["tokens"] for interval in page["intervals"] for c in interval["contexts"]]
            for page in units["a"]["units"].values()
        ]

    assert found() == found(batch=7) != found(seed=1)
    assert len(found()) == 8


def test_the_base_model_runs_once_for_all_layers_and_stops_after_the_last(gpt2, rows):
    trained = {f"{n}-{seed}": trained_on(gpt2, n, layer_for(gpt2, n, seed=seed)) for n in (0, 1) for seed in (0, 1)}
    calls = [0, 0, 0]
    handles = [
        block.register_forward_pre_hook(lambda m, a, n=n: calls.__setitem__(n, calls[n] + 1))
        for n, block in enumerate(gpt2.blocks)
    ]
    try:
        evaluate_units(gpt2, trained, contexts_of(rows), whole(rows), units=[], forward_contexts=4)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == [6, 6, 0]


def test_layers_are_left_in_their_mode_and_measured_in_evaluation_mode(gpt2, rows):
    layer = layer_for(gpt2, 1, sparsity={"kind": "random_k", "k": K}).train()
    got = evaluate_units(gpt2, {"a": trained_on(gpt2, 1, layer)}, contexts_of(rows), whole(rows), units=[])["a"]
    assert layer.training and int(layer.sparsity.draws) == 0
    assert sum(got["rates"]) <= K


def test_text_that_can_be_read_only_once_is_enough(gpt2, rows):
    stream = iter(rows)
    trained = {"a": trained_on(gpt2, 1, layer_for(gpt2, 1))}
    got = evaluate_units(gpt2, trained, lambda start: stream, UnitsConfig(tokens=10**6, top=3))["a"]
    assert got["tokens"] == (rows != 0).sum() and len(got["units"]) == 3


def test_mistakes_are_named(gpt2, trained_gpt2, rows):
    one = {"a": trained_on(gpt2, 1, layer_for(gpt2, 1))}
    for options, message in (
        ({"units": [UNITS]}, r"a has units 0 \.\.\. 39, got 40"),
        ({"tokens": 0}, "tokens: expected a number greater than 0, got 0"),
        ({"contexts": 0}, "contexts: expected a number greater than 0, got 0"),
    ):
        with pytest.raises(MxdError, match=message):
            units = options.pop("units", None)
            evaluate_units(gpt2, one, contexts_of(rows), checked(UnitsConfig, **{"tokens": 32, **options}), units)
    with pytest.raises(MxdError, match="no complete context"):
        evaluate_units(gpt2, one, contexts_of(rows[:0]))
    with pytest.raises(MxdError, match="at least one trained layer"):
        evaluate_units(gpt2, {}, contexts_of(rows))
    with pytest.raises(MxdError, match="other weights there"):
        evaluate_units(trained_gpt2, one, contexts_of(rows))


def test_units_that_add_most_come_first(gpt2):
    layer = layer_for(gpt2, 1)
    moments = CodeMoments(layer)
    values = torch.tensor([[1.0, 2.0, 0.0], [1.0, 0.0, 4.0], [1.0, 2.0, 0.0]])
    moments.count(Code(values, torch.tensor([[7, 8, 9]] * 3)))
    norms = layer.unit_norms()
    adds = {8: 4 * norms[8], 9: 4 * norms[9]}
    assert contributing(moments, 10, 0.5) == [9]  # 7 and 8 are active at more than half the tokens
    assert contributing(moments, 10, shared=0.9) == sorted([8, 9], key=adds.get, reverse=True)
    assert contributing(moments, 1, shared=0.9) == [max(adds, key=adds.get)]
    assert firing(moments, 0.5)["shared"] == [{"unit": 7, "rate": 1.0}, {"unit": 8, "rate": pytest.approx(2 / 3)}]


# Sampling


def stream_of(length, units, seed, width=7, staircase=False):
    """Occurrences whose largest activation keeps growing, smoothly or by jumps: unit, value, context, place."""
    rng = np.random.default_rng(seed)
    scale = 2.0 ** (np.arange(length) // 300 * 0.4) if staircase else np.linspace(0.1, 3, length)
    value = scale * (1 + 0.01 * rng.random(length) if staircase else rng.gamma(2.0, 1.0, length) + 1e-3)
    order = np.arange(length)
    return rng.integers(0, units, length), value.astype(np.float32), order // width, order % width


def feed(samples, stream, batch):
    unit, value, context, at = stream
    for start in range(0, len(unit), batch):
        piece = slice(start, start + batch)
        code = Code(torch.from_numpy(value[piece, None]), torch.from_numpy(unit[piece, None]))
        samples.see(code, context[piece], at[piece])


@pytest.mark.parametrize("staircase", [False, True])
@pytest.mark.parametrize("width", [7, 330])
@pytest.mark.parametrize("batch", [1000, 37])
def test_samples_are_those_that_would_be_drawn_had_the_bands_been_known(monkeypatch, batch, width, staircase):
    """The oracle sees the whole stream with the same keys: of each interval the contexts with the largest keys."""
    monkeypatch.setattr(bands_module, "PATIENCE", 50)
    stream = unit, value, context, at = stream_of(4000, 3, 1, width, staircase)
    samples = IntervalSamples(3, 4, seed=9)
    feed(samples, stream, batch)
    key = np.random.default_rng(9).random(len(unit))
    assert len(samples.kept) <= 3 * (DEPTH + 1) * 4
    for n in range(3):
        got = samples.intervals(n)
        largest = value[unit == n].max()
        assert got[0].high == largest and got[-1].low == 0
        assert [interval.high for interval in got[1:]] == [interval.low for interval in got[:-1]] or staircase
        assert len(got) == INTERVALS or staircase
        for interval in got:
            nearest = largest * max(1, round(INTERVALS * interval.high / largest)) / INTERVALS
            assert interval.high == pytest.approx(nearest, rel=2 ** (0.51 / STEPS) - 1)
            inside = np.flatnonzero(
                (unit == n) & (value >= interval.low) & ((value < interval.high) | (interval is got[0]))
            )
            chosen = {}
            for row in inside[np.argsort(-key[inside])]:
                chosen.setdefault(context[row], row)
            expected = sorted(((value[r], context[r], at[r]) for r in list(chosen.values())[:4]), reverse=True)
            assert [tuple(one) for one in interval.occurrences] == expected


def test_every_context_is_as_likely_as_another():
    drawn = np.zeros(40)
    stream = (np.zeros(40, int), np.linspace(0.95, 1, 40).astype(np.float32), np.arange(40), np.zeros(40, int))
    for seed in range(400):
        samples = IntervalSamples(1, 5, seed)
        feed(samples, stream, 11)
        (interval,) = samples.intervals(0)
        drawn[[one.context for one in interval.occurrences]] += 1
    assert drawn.sum() == 400 * 5
    assert np.abs(drawn - 50).max() < 5 * math.sqrt(50 * 7 / 8)


def test_memory_does_not_grow_with_the_text(monkeypatch):
    monkeypatch.setattr(bands_module, "PATIENCE", 100)
    sizes = []
    for length in (20_000, 80_000):
        samples = IntervalSamples(2, 3, seed=0)
        feed(samples, stream_of(length, 2, seed=2), 500)
        sizes.append(len(samples.kept) + sum(map(len, samples.waiting)))
    assert max(sizes) <= 2 * (DEPTH + 1) * 3 + 100 + 500


def test_a_unit_that_never_fires_has_no_bands():
    samples = IntervalSamples(2, 3)
    assert samples.intervals(0) == []
    feed(samples, (np.zeros(3, int), np.array([1, 0, 2], np.float32), np.arange(3), np.arange(3)), 3)
    assert samples.intervals(1) == []
    assert [one.context for interval in samples.intervals(0) for one in interval.occurrences] == [2, 0]


# Text


class DropsSpaces:
    """Decodes as SentencePiece tokenizers do: the space before the first word is lost."""

    words = (" the", "s", " ")

    def decode(self, ids):
        return "".join(self.words[i] for i in ids).removeprefix(" ")


def test_tokens_keep_their_spaces(tokenizer):
    assert token_strings(DropsSpaces(), [0, 1, 0, 2]) == [" the", "s", " the", " "]
    ids = tokenizer("The people, naïve:\n  and 東", add_special_tokens=False)["input_ids"]
    strings = token_strings(tokenizer, ids)
    assert strings == [tokenizer.decode([i]) for i in ids]
    assert "".join(strings).startswith("The people, na") and " and" in "".join(strings)
    assert token_strings(None, [3, 14]) == ["3", "14"]


def test_the_command_writes_what_it_shows(trained_gpt2, tmp_path, capsys):
    data = {"source": "bundled", "split": "train", "context": 32}
    for number in (1, 2):
        one = trained_on(trained_gpt2, number, layer_for(trained_gpt2, number), model="tiny-gpt2", data=data)
        save_layer(tmp_path / f"block{number}", one.layer, one.provenance)
    words = ("--tokens", 1024, "--units", "3,7", "--contexts", 2, "--device", "cpu")
    code, out, err = mxd(capsys, "units", tmp_path, *words)
    assert code == 0, err
    document = json.loads((tmp_path / "units.json").read_text())
    assert set(document["results"]) == {f"{tmp_path.name}/block1", f"{tmp_path.name}/block2"}
    assert document["tokens_asked"] == 1024 and document["seed"] == 0
    for result in document["results"].values():
        assert list(result["units"]) == ["3", "7"] and result["rates"]["length"] == UNITS
        assert result["tokens"] < 1024
    assert "units.json" in out and f"{tmp_path.name}/block2" in out and "dead" in out
    code, _, err = mxd(capsys, "units", tmp_path, "--units", "3;7")
    assert code == 1 and "--units is '3;7'; expected numbers and ranges" in err
