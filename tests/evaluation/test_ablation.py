"""Dropping single units: polysemanticity by hand, and the counts against a loop with explicit masks, text by text."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from command import mxd
from small_layers import UNITS, layer_for, trained_on
from tables import write_table

from mxd.artifacts.checkpoint import save_layer
from mxd.common.errors import MxdError
from mxd.data.contexts import special_ids
from mxd.data.labelled import labelled_texts
from mxd.evaluation import ablation
from mxd.evaluation.ablation import beyond_chance, evaluate_ablation, frequent, polysemanticity
from mxd.evaluation.dropping import Activity, Dropping
from mxd.evaluation.masks import halves
from mxd.evaluation.targets import NextTokens
from mxd.evaluation.walk import CodeMoments, padded
from mxd.layers import parse_layer
from mxd.layers.neurons import Neurons
from mxd.questions import AblationConfig
from mxd.splice import spliced

CLASSES = ["Economy", "Geography", "Military"]
_ALL = labelled_texts("factbook")
ROWS = [
    (text[:120], label)
    for name in CLASSES
    for text, label in [(t, c) for t, c in zip(_ALL.texts, _ALL.labels, strict=True) if c == name][:10]
]
TEXTS, LABELS = ([row[i] for row in ROWS] for i in (0, 1))
GROUPS = [CLASSES.index(label) for label in LABELS]
LIMIT = 10


# The measure


def test_a_unit_that_carries_one_class_alone_has_none():
    drops = np.zeros((1, 4))
    drops[0, 2] = 1
    assert polysemanticity(drops).tolist() == [0]


@pytest.mark.parametrize("classes", [2, 5, 9])
def test_a_unit_that_halves_every_class(classes):
    expected = np.sqrt(0.25 + 0.25 * (classes - 1))
    assert polysemanticity(np.full((1, classes), 0.5))[0] == pytest.approx(expected)


def test_units_that_change_nothing_are_left_out_and_so_are_classes_without_accuracy():
    drops = np.array([[0.0, 0.0, np.nan], [0.5, 0.0, np.nan], [-0.5, 0.0, np.nan]])
    p = polysemanticity(drops)
    assert np.isnan(p[0]) and p[1] == 0.5
    assert p[2] == pytest.approx(np.sqrt(0.25 + 1)), "the nearest class is the one that does not gain"
    assert np.isnan(polysemanticity(np.full((2, 3), np.nan))).all()
    assert polysemanticity(np.zeros((0, 3))).shape == (0,)
    said = ablation.summarised(p, np.array([0.0, 0.5, 0.0]))
    assert said["affecting"] == 2 and said["polysemanticity"] == pytest.approx(p[1:].mean())
    assert said["polysemanticity_se"] == pytest.approx(np.std(p[1:], ddof=1) / np.sqrt(2))
    assert said["largest_drop"] == pytest.approx(0.5 / 3)
    none = ablation.summarised(np.array([np.nan]), np.zeros(1))
    assert none["polysemanticity"] is None and none["polysemanticity_se"] is None and none["affecting"] == 0


def test_beyond_chance_is_beyond_controls_of_like_size():
    rng = np.random.default_rng(0)
    sizes = rng.permutation(np.r_[np.arange(100), np.arange(10_000, 10_100)])
    control = np.where(sizes > 5000, 0.8, 0.1) + 0.01 * rng.random(200)
    largest = np.full(200, 0.5)
    clear = (sizes < 100 - 20) | (sizes > 5000)  # the neighbours of the others are of both sizes
    assert (beyond_chance(largest, control, sizes) == (sizes < 5000))[clear].all()
    # of units that are like their controls, about 1 in 20
    assert 0.02 < beyond_chance(rng.random(4000), rng.random(4000), rng.permutation(4000)).mean() < 0.08
    # among 40 the quantile lies a twentieth of a step above the third largest
    order = rng.permutation(40)
    near = np.where(order % 2, 37.04, 37.06)
    assert (beyond_chance(near, order.astype(float), order) == (near > 37.05)).all()
    assert beyond_chance(np.ones(3), np.zeros(3), np.arange(3)).all()
    assert not beyond_chance(np.zeros(3), np.zeros(3), np.arange(3)).any()


def test_the_units_that_fire_most_often_are_dropped(gpt2):
    moments = CodeMoments(layer_for(gpt2, 1))
    moments.tokens = 100
    moments.counts[[3, 5, 7, 9, 11]] = torch.tensor([90, 40, 40, 10, 60])
    moments.sums[[5, 7]] = torch.tensor([1.0, 2.0]).double()
    assert frequent(moments, 2, 0.5) == ([3, 5, 7, 11], 0)
    assert frequent(moments, 1, 0.5) == ([3, 7], 1), "7 is stronger than 5"
    assert frequent(moments, 9, 0.5) == ([3, 5, 7, 9, 11], 0), "units that never fire are not"
    assert frequent(moments, 9, 0.95) == ([3, 5, 7, 9, 11], 0)


def test_what_is_said_of_units_and_of_their_controls():
    """Unit 4 carries one class, 7 halves both, 9 helps one a little; of the controls one changes nothing."""
    activity = Activity([4, 7, 9], np.array([[0, 1, 2], [3, 0, 0]]), np.array([5, 5]), np.zeros((2, 3), dtype=int))
    changes = np.array([[[-10, 0], [-5, -2], [1, 0]], [[-1, 0], [0, 0], [0, -1]]])
    counts = ablation._Found(activity, np.array([10, 4]), np.array([20, 5]), changes, [20, 5])
    found = ablation._report(counts, [4, 7, 9], [n / 10 for n in range(10)])
    units = list(found["units"].values())
    assert [unit["d"] for unit in units] == [[1, 0], [0.5, 0.5], [-0.1, 0]]
    assert [unit["p"] for unit in units] == [0, pytest.approx(0.5**0.5), pytest.approx(1.01**0.5)]
    assert [unit["control"] for unit in units] == [
        {"d": [0.1, 0], "p": 0.9},
        {"d": [0, 0], "p": None},
        {"d": [0, 0.25], "p": 0.75},
    ]
    assert [(unit["rate"], unit["coefficients"]) for unit in units] == [(0.4, 3), (0.7, 1), (0.9, 2)]
    assert [unit["beyond_chance"] for unit in units] == [True, True, False], "0.235 is the quantile"
    assert (found["affecting"], found["beyond_chance"]["affecting"], found["control"]["affecting"]) == (3, 2, 2)
    assert (found["beyond_chance"]["units"], found["beyond_chance"]["largest_drop"]) == (2, 0.75)
    assert found["beyond_chance"]["polysemanticity"] == pytest.approx(0.5**0.5 / 2)
    assert (found["largest_drop"], found["control"]["largest_drop"]) == (0.5, pytest.approx(0.35 / 3))
    assert found["control"]["polysemanticity"] == pytest.approx(0.825)
    assert (found["accuracy"], found["mean_accuracy"]) == ([0.5, 0.8], pytest.approx(0.65))
    histogram = found["histogram"]
    assert [sum(histogram[which]) for which in ("units", "beyond_chance", "control")] == [3, 2, 2]


# The counts, against explicit masks


def predicted(model, row):
    return model.logits(torch.tensor([row]))[0, :-1].argmax(-1).numpy()


def token_rights(model, rows, numbers):
    """How many next tokens are right in each text, run by itself."""
    special = special_ids(model.tokenizer)
    return {
        n: int(((predicted(model, rows[n]) == rows[n][1:]) & ~np.isin(rows[n][1:], special)).sum()) for n in numbers
    }


def pooled(model, row):
    """The mean of the final hidden states of a text's tokens, from the transformer without its head."""
    with torch.no_grad():
        states = model.module.transformer(torch.tensor([row])).last_hidden_state[0].double().numpy()
    return states[~np.isin(row, special_ids(model.tokenizer))].mean(0)


def by_class(rights, numbers):
    return np.array([sum(rights[n] for n in numbers if GROUPS[n] == c) for c in range(3)])


def drawn_of(model, limit=LIMIT):
    return halves(model.tokenizer, TEXTS, GROUPS, CLASSES, limit, 128)


def check(found, model, layer, rights_of, units, drawn):
    """d and p of every unit from masks of the whole unit, all texts run again each time."""
    with spliced(model, {1: layer}):
        whole = by_class(rights_of(), drawn.measuring)
    assert (whole > 0).any()
    for unit in units:
        with spliced(model, {1: layer}, mask={1: [unit]}):
            masked = by_class(rights_of(), drawn.measuring)
        d = [(a - b) / a if a else None for a, b in zip(whole.tolist(), masked.tolist(), strict=True)]
        got = found["units"][str(unit)]
        assert got["d"] == [None if v is None else pytest.approx(v, abs=1e-6) for v in d], unit
        known = np.array([v for v in d if v is not None])
        p = np.linalg.norm(known - np.eye(len(known))[known.argmax()]) if known.any() else None
        assert got["p"] == (None if p is None else pytest.approx(p, abs=1e-6)), unit
    p = [unit["p"] for unit in found["units"].values() if unit["p"] is not None]
    assert found["affecting"] == len(p) and found["ablated"] == len(found["units"])
    assert found["polysemanticity"] == (pytest.approx(np.mean(p), abs=1e-5) if p else None)
    assert sum(found["histogram"]["units"]) == len(p)
    return whole


def gentle(model, layer):
    """A layer about the MLP's mean output, whose single units are small enough to leave a model, and matter."""
    _, y = model.record(torch.tensor([model.tokenizer(TEXTS[0])["input_ids"]]), [1])[1]
    with torch.no_grad():
        layer.bias.copy_(y[0].mean(0))
    return layer


def neurons(model):
    weights = model.mlp_weights(1)
    return Neurons.of(model.mlp_shape(1), replace(weights, decoder=10 * weights.decoder))


FORMS = {
    "mxd": lambda model: gentle(model, layer_for(model, 1)),
    "sae": lambda model: gentle(model, layer_for(model, 1, "topk_sae")),
    "entmax": lambda model: gentle(model, layer_for(model, 1, sparsity={"kind": "entmax"})),
    "bos": lambda model: gentle(model, layer_for(model, 1, "transcoder", bos_constant=True)),
    "neurons": neurons,
}


@pytest.mark.parametrize(
    "form", ["mxd", *(pytest.param(form, marks=pytest.mark.long) for form in FORMS if form != "mxd")]
)
def test_next_tokens_agree_with_masks_of_whole_units(trained_gpt2, form):
    model, layer = trained_gpt2, FORMS[form](trained_gpt2)
    if form == "bos":
        x, y = model.record(torch.tensor([[0, 5]]), [1])[1]
        layer.store_bos(x[0, 0], y[0, 0])
    how, drawn = AblationConfig(target="token", limit=LIMIT), drawn_of(model)
    units = list(range(0, UNITS, 5))
    found = evaluate_ablation(model, {"a": trained_on(model, 1, layer)}, TEXTS, LABELS, how, units, batch=4)["a"]
    check(found, model, layer, lambda: token_rights(model, drawn.rows, drawn.measuring), units, drawn)
    assert found["affecting"] >= 1 and found["num_units"] == layer.num_units
    assert found["texts"] == [5, 5, 5] and found["classes"] == CLASSES


@pytest.mark.long
def test_probed_classes_agree_with_masks_of_whole_units(trained_gpt2):
    from sklearn.linear_model import LogisticRegression

    model, layer = trained_gpt2, gentle(trained_gpt2, layer_for(trained_gpt2, 1))
    layer.expert_scale.data.mul_(4)  # a probe's answers change less easily than a token
    drawn, units = drawn_of(model), list(range(0, UNITS, 3))
    with spliced(model, {1: layer}):
        states = np.array([pooled(model, drawn.rows[n]) for n in drawn.choosing])
    mean, spread = states.mean(0), states.std(0)
    probe = LogisticRegression(max_iter=1000).fit((states - mean) / spread, [GROUPS[n] for n in drawn.choosing])

    def rights():
        answers = {n: probe.predict([(pooled(model, drawn.rows[n]) - mean) / spread])[0] for n in drawn.measuring}
        return {n: int(answer == GROUPS[n]) for n, answer in answers.items()}

    how = AblationConfig(target="probe", limit=LIMIT)
    found = evaluate_ablation(model, {"a": trained_on(model, 1, layer)}, TEXTS, LABELS, how, units, batch=4)["a"]
    whole = check(found, model, layer, rights, units, drawn)
    assert found["accuracy"] == pytest.approx(whole / 5) and found["affecting"] >= 1


def test_an_expert_that_alone_carries_a_class_and_one_that_is_never_used(trained_gpt2):
    """Unit 0 writes what undoes one class's words; without unit 0 that class, and nothing else, is lost."""
    model, drawn = trained_gpt2, drawn_of(trained_gpt2)
    layer = layer_for(model, 1, "transcoder", {"kind": "topk", "k": 1})
    found = {}

    class Toy(NextTokens):
        """Right where the text's class has its own unit: read off the output that stands in the MLP's place."""

        def right(self, batch):
            out = model.record(torch.from_numpy(batch.ids), [1])[1][1]
            on = out[:, 1].abs().sum(-1) > 0.5
            return (on | (torch.tensor(GROUPS)[batch.numbers] != 2)).numpy().astype(int)

        def asked(self, batch):
            return np.ones(len(batch.numbers), dtype=int)

    with torch.no_grad():
        layer.bias.zero_()
        layer.decoder.fill_(1.0)
        layer.encoder.zero_()
        layer.encoder_bias.copy_(torch.zeros(UNITS))
        layer.encoder_bias[0] = 1.0  # unit 0 is active everywhere, the others nowhere
    how = AblationConfig(target="token", limit=LIMIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ablation, "NextTokens", Toy)
        found = evaluate_ablation(model, {"a": trained_on(model, 1, layer)}, TEXTS, LABELS, how, [0, 7])["a"]
    assert found["units"]["0"]["d"] == [0, 0, 1] and found["units"]["0"]["p"] == 0
    assert found["units"]["7"]["p"] is None and found["units"]["7"]["coefficients"] == 0
    assert found["affecting"] == 1 and found["polysemanticity"] == 0 and found["polysemanticity_se"] is None
    assert sum(found["texts"]) == len(drawn.measuring)


def test_bos_the_context_and_the_seed_reach_texts_and_controls(gpt2, monkeypatch):
    class Enough(Exception):
        pass

    def seeded(model, trained, units, seed):
        raise Enough(seed)

    seen = []
    monkeypatch.setattr(ablation, "halves", lambda *args: seen.append(args[4:]) or halves(*args))
    monkeypatch.setattr(ablation, "Dropping", seeded)
    with pytest.raises(Enough, match="5"):
        how = AblationConfig(target="token", limit=4, seed=5)
        evaluate_ablation(
            gpt2, {"a": trained_on(gpt2, 1, layer_for(gpt2, 1))}, TEXTS, LABELS, how, context=9, bos=False
        )
    assert seen == [(4, 9, False, 5)]


# What runs again, and the control


@pytest.mark.parametrize("method", ["mxd", "monet", "cp_mumoe"])
def test_controls_drop_as_many_active_coefficients_and_only_touched_texts_run(trained_gpt2, method):
    model, drawn = trained_gpt2, drawn_of(trained_gpt2)
    layer = monet(model) if method == "monet" else layer_for(model, 1, method)
    units = list(range(0, layer.num_units, 3))
    dropping = Dropping(model, trained_on(model, 1, layer), units, seed=3)
    batches = lambda: (padded(drawn.rows, drawn.measuring[i : i + 4]) for i in range(0, 15, 4))  # noqa: E731
    activity = dropping.activity(batches())
    for n in drawn.measuring:
        x, _ = model.record(torch.tensor([drawn.rows[n]]), [1])[1]
        code = layer.encode(x[0])
        on = code.activations > 0
        assert activity.active[n] == on.sum()
        assert activity.coefficients[n].tolist() == [int((on & (code.indices == u)).sum()) for u in units]
    assert (activity.controls.sum(0) == activity.coefficients.sum(0)).all()
    assert (activity.controls <= activity.active[:, None]).all()
    ran, seen = 0, set()
    for batch in batches():
        site = dropping.at(batch)
        for rows, kinds, places, dropped in site.drops(activity, 5):
            assert len(rows) <= 5
            ran += len(rows)
            for row, kind, place, mask in zip(rows, kinds, places, dropped, strict=True):
                number, length = batch.numbers[row], len(drawn.rows[batch.numbers[row]])
                seen.add((kind, place, number))
                if kind == 0:
                    assert (mask == (site.code.indices[row] == units[place])).all()
                else:
                    assert mask.sum() == activity.controls[number, place] > 0
                    assert (site.code.activations[row][mask] > 0).all() and not mask[length:].any()
    assert ran == activity.again == len(seen)
    assert {(p, n) for kind, p, n in seen if kind == 0} == {
        (p, n) for n in drawn.measuring for p in range(len(units)) if activity.coefficients[n, p]
    }


def monet(model):
    """A layer whose units are pairs, more of them than are listed as one would."""
    raw = {
        "method": "monet",
        "num_units": 25,
        "expert_width": 4,
        "sparsity": {"kind": "product_topk", "heads": 2, "k": 3},
    }
    layer = parse_layer(raw).resolve(model.mlp_shape(1)).build().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    return layer


@torch.no_grad()
def test_a_control_is_drawn_evenly_from_all_active_coefficients(trained_gpt2):
    model, drawn, layer = trained_gpt2, drawn_of(trained_gpt2), layer_for(trained_gpt2, 1)
    batch = padded(drawn.rows, drawn.measuring)
    hits, total = 0, 0
    for seed in range(30):
        dropping = Dropping(model, trained_on(model, 1, layer), list(range(UNITS)), seed)
        activity = dropping.activity([batch])
        hits, total = hits + activity.controls, total + activity.coefficients.sum()
    share = hits.sum(1)[drawn.measuring] / total
    expected = activity.active[drawn.measuring] / activity.active.sum()
    assert np.abs(share / expected - 1).max() < 0.1


@torch.no_grad()
def test_a_control_depends_on_its_unit_the_text_and_the_seed_and_not_on_other_units(trained_gpt2):
    """Neurons, so that all units have as many coefficients, of one text read twice, from which as many are dropped."""
    model, layer = trained_gpt2, neurons(trained_gpt2)
    rows = [drawn_of(model).rows[0]] * 2

    def controls(units, seed):
        batch, dropping = padded(rows, [0, 1]), Dropping(model, trained_on(model, 1, layer), units, seed)
        activity = dropping.activity([batch])
        even = replace(activity, controls=np.full_like(activity.controls, 5))
        found = {}
        for at, kinds, places, dropped in dropping.at(batch).drops(even, 8):
            for row, kind, place, mask in zip(at, kinds, places, dropped, strict=True):
                if kind == 1:
                    found[units[place], row] = tuple(mask.flatten().nonzero().flatten().tolist())
        return activity.controls.T.tolist(), found

    (four, seven), both = controls([4, 7], 3)
    ((alone,), of_seven), ((other,), of_other) = controls([7], 3), controls([7], 4)
    assert four != seven == alone != other
    assert len(set(both.values())) == 4 and all(len(mask) == 5 for mask in both.values())
    assert of_seven.items() <= both.items() and not set(of_other.values()) & set(both.values())


@torch.no_grad()
def test_what_is_dropped_changes_that_texts_output_and_no_other(trained_gpt2):
    model, drawn, layer = trained_gpt2, drawn_of(trained_gpt2), layer_for(trained_gpt2, 1)
    batch = padded(drawn.rows, drawn.measuring[:4])
    site = Dropping(model, trained_on(model, 1, layer), [0], 0).at(batch)
    dropped = torch.zeros_like(site.active[:2])
    dropped[1] = True
    with site.entered(np.array([2, 2]), dropped) as texts:
        first, second = model.logits(torch.from_numpy(texts.ids))
    with spliced(model, {1: layer}):
        whole = model.logits(torch.from_numpy(batch.ids[2:3]))[0]
    with spliced(model, {1: layer}, mask={1: range(UNITS)}):
        nothing = model.logits(torch.from_numpy(batch.ids[2:3]))[0]
    torch.testing.assert_close(first, whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second, nothing, rtol=1e-4, atol=1e-4)
    assert (first - second).abs().max() > 0.01
    assert not hasattr(model.mlp(1), "layer"), "the model is as it was"


# Commands and mistakes


def test_neurons_and_shared_units_are_bounded_and_said(trained_gpt2):
    neurons = Neurons.of(trained_gpt2.mlp_shape(1), trained_gpt2.mlp_weights(1))
    how = AblationConfig(target="token", limit=2, top=3)
    found = evaluate_ablation(trained_gpt2, {"n": trained_on(trained_gpt2, 1, neurons)}, TEXTS, LABELS, how)["n"]
    assert found["ablated"] == 3 and found["shared_left_out"] == neurons.num_units - 3
    assert all(unit["rate"] == 1 for unit in found["units"].values())
    assert all(unit["coefficients"] == sum_of_tokens(trained_gpt2) for unit in found["units"].values())


def sum_of_tokens(model):
    drawn = drawn_of(model, limit=2)
    return sum(len(drawn.rows[n]) for n in drawn.measuring)


def test_mistakes_are_refused_before_anything_runs(gpt2, monkeypatch):
    monkeypatch.setattr(ablation, "_moments", None)
    layers = {"a": trained_on(gpt2, 1, layer_for(gpt2, 1))}
    for texts, labels, units, message in (
        (TEXTS, LABELS, [0, UNITS], r"a has units 0 \.\.\. 39, got 40"),
        (TEXTS[:10], LABELS[:10], None, "number of classes is 1; expected at least 2"),
        (TEXTS[:11], LABELS[:11], None, "texts of 'Geography' is 1; expected at least 2"),
    ):
        with pytest.raises(MxdError, match=message):
            evaluate_ablation(gpt2, layers, texts, labels, units=units)


@pytest.mark.long
def test_the_command_writes_what_it_shows(trained_gpt2, tmp_path, capsys):
    made = trained_on(trained_gpt2, 1, gentle(trained_gpt2, layer_for(trained_gpt2, 1)), model="tiny-gpt2")
    save_layer(tmp_path / "r" / "a", made.layer, made.provenance)
    texts = write_table(tmp_path / "own.csv", [{"text": t, "label": c} for t, c in zip(TEXTS, LABELS, strict=True)])
    words = ["ablate", tmp_path / "r" / "a", "--set", texts, "--units", "3,5-8", "--target", "token", "--neurons"]
    code, out, _ = mxd(capsys, *words, "--device", "cpu")
    document = json.loads((tmp_path / "r" / "a" / "ablation.json").read_text())
    assert code == 0 and set(document["results"]) == {"r/a", "MLP neurons, block 1"} == set(document["replacements"])
    found = document["results"]["r/a"]
    assert list(found["units"]) == ["3", "5", "6", "7", "8"] and document["asked"]["target"] == "token"
    assert f"{found['polysemanticity']:.3f}" in out and f"{found['control']['polysemanticity']:.3f}" in out
    again = evaluate_ablation(
        trained_gpt2, {"r/a": made}, TEXTS, LABELS, AblationConfig(target="token"), [3, 5, 6, 7, 8], batch=3
    )
    assert again["r/a"] == found, "whatever the batch"
    code, out, err = mxd(capsys, *words[:4], "--units", "x")
    assert code == 1 and "--units is 'x'; expected numbers and ranges" in err
