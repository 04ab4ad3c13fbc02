"""Rewriting by expert: gates by hand, an oracle layer with one unit for each cell, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command import mxd
from small_layers import UNITS, layer_for, trained_on
from tables import write_table

from mxd.artifacts.checkpoint import save_layer
from mxd.common.errors import MxdError
from mxd.data.contexts import special_ids
from mxd.data.grouped import grouped_texts
from mxd.evaluation import rewrite
from mxd.evaluation.fairness import Cells
from mxd.evaluation.rewrite import CONTROLS, GAINS, chosen_edits, evaluate_rewrite, sign_of
from mxd.evaluation.rewriting import BLIND, Gate, Rewriting, direction_of
from mxd.evaluation.splitting import Split, split_texts
from mxd.evaluation.walk import evaluating
from mxd.layers import Code
from mxd.metrics.rewritten import REWRITE, SEPARATION
from mxd.questions import RewriteConfig, changed, checked
from mxd.splice import spliced

WORDS = {"law": [" court", " law", " government", " president"], "sea": [" water", " island", " river", " ocean"]}
MARKERS = {("law", "x"): " oil", ("law", "y"): " war", ("sea", "x"): " food", ("sea", "y"): " tax"}
TARGET = ("law", "y")


def made(n=16, rare=12):
    """Texts of four cells, each with markers; those of the target have mostly the other label's words."""
    rng = np.random.default_rng(0)
    rows = []
    for (label, group), marker in MARKERS.items():
        for _ in range(rare if (label, group) == TARGET else n):
            own = 0.2 if (label, group) == TARGET else 0.9
            other = "sea" if label == "law" else "law"
            drawn = [rng.choice(WORDS[label if rng.random() < own else other]) for _ in range(5)]
            for _ in range(2):
                drawn.insert(int(rng.integers(0, 5)), marker)
            rows.append(("".join(drawn), label, group))
    return [list(column) for column in zip(*rows, strict=True)]


TEXTS, LABELS, GROUPS = made()
BLOCK = 1


def ids_of(model):
    return {cell: model.tokenizer(marker, add_special_tokens=False)["input_ids"] for cell, marker in MARKERS.items()}


def one_unit_for_each_cell(model):
    """A transcoder that answers with the MLP's mean output, and whose unit n is active at cell n's marker alone."""
    layer = layer_for(model, BLOCK, "transcoder", {"kind": "relu_l1", "l1": 0.1})
    tokens, inputs, outputs = [], [], []
    for text in TEXTS:
        ids = [0, *model.tokenizer(text, add_special_tokens=False)["input_ids"]]
        x, y = model.record(torch.tensor([ids]), [BLOCK])[BLOCK]
        tokens += ids
        inputs.append(x[0])
        outputs.append(y[0])
    x, tokens = torch.cat(inputs).double(), torch.tensor(tokens)
    padded = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    with torch.no_grad():
        for parameter in (layer.encoder, layer.encoder_bias, layer.decoder):
            parameter.zero_()
        layer.encoder_bias -= 1
        layer.bias.copy_(torch.cat(outputs).mean(0))
        for unit, ids in enumerate(ids_of(model).values()):
            assert len(ids) == 1
            wanted = (tokens == ids[0]).double() * 2 - 1
            found = torch.linalg.lstsq(padded, wanted).solution
            # from a regression to a unit that is zero at every other token
            off = (padded @ found)[wanted < 0].max()
            assert (padded @ found)[wanted > 0].min() > off
            layer.encoder[unit] = found[:-1]
            layer.encoder_bias[unit] = found[-1] - off - 0.01
    return layer


@pytest.fixture(scope="module")
def oracle(trained_gpt2):
    return trained_on(trained_gpt2, BLOCK, one_unit_for_each_cell(trained_gpt2))


HOW = RewriteConfig(strengths=(2,), draws=1, target_label="law", target_group="y", support=1)


@pytest.fixture(scope="module")
def found(trained_gpt2, oracle):
    return evaluate_rewrite(trained_gpt2, {"a": oracle}, TEXTS, LABELS, GROUPS, HOW)["a"]


def test_one_expert_for_each_group_moves_that_group_alone(found):
    plain, expert = found["ways"]["plain"], found["ways"]["expert"]
    assert [(c["label"], c["group"]) for c in found["cells"]] == list(MARKERS) and found["target"] == 1
    assert plain["target_accuracy"] < 1, "there is something to rewrite"
    assert expert["rewrite_score"] == pytest.approx(1 - plain["target_accuracy"]) == found["best"]
    assert expert["cells"] == [1.0 if n == 1 else accuracy for n, accuracy in enumerate(plain["cells"])]
    assert expert["strengths"] == [2]
    assert found["separation"]["expert"]["auc"] == found["separation"]["expert"]["auc_least"] == 1
    assert found["token"] == {"text": MARKERS[TARGET], "present": True, "auc": 1.0}, "found by its marker alone"


def test_blind_moves_all_and_is_chosen_as_little_as_is_good_for_it(found):
    strongest = found["tried"]["blind"][-1]
    assert strongest["strength"] == 2
    # everything is called law: the target gains all it can, the other law too, and both groups of sea are lost
    assert strongest["target"] > 0 and strongest["others"] > 1.5
    assert found["tried"]["expert"][-1]["others"] == 0 and found["tried"]["contrast"][-1]["target"] > 0
    assert found["ways"]["blind"]["rewrite_score"] < found["ways"]["expert"]["rewrite_score"]
    assert found["gain"] == pytest.approx(
        found["ways"]["expert"]["rewrite_score"] - found["ways"]["blind"]["rewrite_score"]
    )
    assert found["gain"] > 0 and found["gain_random"] > 0
    blind = found["ways"]["blind"]
    assert (blind["strengths"], blind["rewrite_score"]) == ([0], 0), "no strength of it does any good"
    assert found["separation"]["random"]["auc"] < 0.6, "units of other texts do not find the target"


def test_a_gain_is_what_its_title_says_and_random_texts_are_those_of_the_same_way():
    gains = {metric.key: metric.title for metric in REWRITE if metric.key in GAINS}
    assert list(gains) == list(GAINS)
    for key, (way, other) in GAINS.items():
        assert other in (BLIND, CONTROLS[way])
        assert gains[key] == f"by {way} - {other if other == BLIND else 'random'}"


def test_gates_of_random_texts_are_made_of_their_own_codes_and_those_of_all_others(trained_gpt2):
    class Fitted(Rewriting):
        def __init__(self):
            self.simplex, self.gates = False, {}

        def fit(self, numbers, probed, members, advance):
            made = torch.rand(len(members), 5, generator=torch.Generator().manual_seed(0))
            self.means = dict(zip(members, made, strict=True))
            return self.means

    rewriting, split = Fitted(), split_texts(trained_gpt2, TEXTS, LABELS, GROUPS, HOW, 128, True)
    rewrite._fit(rewriting, split, changed(HOW, draws=2), lambda n: None)
    means = rewriting.means
    for ways, name in ((("expert", "contrast"), "target"), (("random 0", "random_contrast 0"), "0")):
        by_mean, by_contrast = (rewriting.gates[way] for way in ways)
        assert torch.equal(by_mean.weight, Gate.by_mean(means[f"{name}+"], False).weight)
        assert torch.equal(by_contrast.weight, Gate.by_contrast(means[f"{name}+"], means[f"{name}-"]).weight)
    assert list(rewriting.gates)[4:] == ["random 1", "random_contrast 1"]


def test_what_is_chosen_depends_on_no_measured_text_and_is_the_best_of_what_was_tried(
    trained_gpt2, oracle, monkeypatch
):
    """A word of the other label is added, so less of it is better; then other texts take the measured ones' place."""
    how = changed(HOW, strengths=(2, 1), draws=2, direction="token: water", seed=3)
    seeds, compared, sets = [], rewrite.compared, Split.sets
    monkeypatch.setattr(rewrite, "compared", lambda *args: seeds.append(args[-1]) or compared(*args))
    monkeypatch.setattr(Split, "sets", lambda self, draws, seed: seeds.append(seed) or sets(self, draws, seed))
    texts, labels, groups = made(n=8, rare=8)
    measured = split_texts(trained_gpt2, texts, labels, groups, how, 128, True).measuring
    others = [" food tax" if n in measured else text for n, text in enumerate(texts)]
    one, other = (
        evaluate_rewrite(trained_gpt2, {"a": oracle}, each, labels, groups, how)["a"] for each in (texts, others)
    )
    assert one["ways"]["plain"] != other["ways"]["plain"] and one["separation"] != other["separation"]
    for found in (one, other):
        assert found["tried"] == one["tried"] and found["token"]["text"] == one["token"]["text"]
        for way, numbers in found["ways"].items():
            assert numbers.get("strengths") == one["ways"][way].get("strengths"), way
    for way in ("expert", "contrast"):
        assert [point["strength"] for point in one["tried"][way]] == [-1, -2], "from the weakest"
        best = max(one["tried"][way], key=lambda point: point["target"] - point["others"])
        strength = best["strength"] if best["target"] > best["others"] else 0
        assert one["ways"][way]["strengths"] == [strength]
    assert len(one["ways"]["random"]["strengths"]) == len(one["ways"]["random_contrast"]["strengths"]) == 2
    assert seeds == [3] * 4


def test_the_direction_is_that_of_the_targets_label(trained_gpt2, oracle, monkeypatch):
    class Enough(Exception):
        pass

    def of_label(named, rewriting, label):
        raise Enough(f"{named} {label}")

    monkeypatch.setattr(rewrite, "direction_of", of_label)
    for number, label in enumerate(WORDS):
        with pytest.raises(Enough, match=f"probe {number}"):
            how = changed(HOW, target_label=label, target_group="x")
            evaluate_rewrite(trained_gpt2, {"a": oracle}, TEXTS, LABELS, GROUPS, how)


def test_bos_the_context_and_the_seed_reach_the_texts(trained_gpt2):
    one = split_texts(trained_gpt2, TEXTS, LABELS, GROUPS, HOW, 4, True)
    other = split_texts(trained_gpt2, TEXTS, LABELS, GROUPS, changed(HOW, seed=1), 3, False)
    for split, context, bos in ((one, 4, True), (other, 3, False)):
        assert all(len(row) == context and (row[0] == 0) == bos for row in split.rows)
    assert one.measuring != other.measuring


def test_texts_are_divided_once(found):
    for cell in found["cells"]:
        n = TEXTS and sum((a, b) == (cell["label"], cell["group"]) for a, b in zip(LABELS, GROUPS, strict=True))
        assert (cell["fitted"], cell["tuned"], cell["measured"]) == (n // 4, n // 4, n // 2)


# Gates


def test_gates_by_hand():
    codes = torch.tensor([[0.0, 2.0, 1.0], [1.0, 0.0, 3.0], [2.0, 0.0, 0.0]])
    mean, others = codes[:2].mean(0), codes[2]
    listed = Code(codes, torch.arange(3).expand(3, 3))
    dense = Code(codes, torch.arange(3).expand(3, 3), all_units=True)
    for code in (listed, dense):
        by_mean = Gate.by_mean(mean, simplex=False).strength(code).numpy()
        expected = [float(mean @ row) / float(mean @ mean) for row in codes]
        assert by_mean == pytest.approx(expected) and by_mean[:2].mean() == pytest.approx(1)
        contrast = Gate.by_contrast(mean, others).strength(code).numpy()
        assert contrast[:2].mean() == pytest.approx(1) and contrast[2] == pytest.approx(0, abs=1e-6)
        d = (mean - others).numpy()
        assert contrast == pytest.approx([d @ (row - others.numpy()) / (d @ d) for row in codes.numpy()], abs=1e-6)
        # where coefficients sum to 1 the paper's scale is the number of units: an even code gets 1
        even = Gate.by_mean(torch.full((3,), 1 / 3), simplex=True).strength(Code(code.activations / 3, *_of(code)))
        assert even.numpy() == pytest.approx((codes.sum(1) / 3).numpy())
    short = Code(torch.tensor([[2.0, 1.0]]), torch.tensor([[1, 2]]))
    assert Gate.by_mean(mean, False).strength(short)[0] == pytest.approx(float(mean @ codes[0] / (mean @ mean)))
    assert (Gate.by_mean(torch.zeros(3), False).strength(listed) == 0).all()


def _of(code):
    return code.indices, code.all_units


@pytest.mark.parametrize("form", ["mxd", "entmax", "topk_sae", "bos"])
@torch.no_grad()
def test_mean_codes_lengths_and_edits_are_those_of_a_loop_over_texts(trained_gpt2, form):
    """Where a layer answers BOS with a constant, nothing is added there."""
    model = trained_gpt2
    forms = {"entmax": ("mxd", {"sparsity": {"kind": "entmax"}}), "bos": ("transcoder", {"bos_constant": True})}
    method, how = forms.get(form, (form, {}))
    layer = layer_for(model, BLOCK, method, **how)
    if form == "bos":
        x, y = model.record(torch.tensor([[0, 5]]), [BLOCK])[BLOCK]
        layer.store_bos(x[0, 0], y[0, 0])
    trained = trained_on(model, BLOCK, layer)
    rows = [
        [0, *model.tokenizer(text, add_special_tokens=False)["input_ids"]][: 6 + n] for n, text in enumerate(TEXTS[:8])
    ]
    labels = [n % 2 for n in range(8)]
    with evaluating(model, {"": trained}):
        made = Rewriting(model, trained, rows, labels, size=3)
        assert made.simplex == (form == "entmax")
        means = made.fit(range(8), range(6), {"some": [1, 4]}, lambda n: None)
        total, tokens, lengths = torch.zeros(UNITS), 0, []
        outs = {}
        for n, row in enumerate(rows):
            x, y = model.record(torch.tensor([row]), [BLOCK])[BLOCK]
            read = layer.read(x, y)[0]
            there = torch.arange(len(row)) >= (form == "bos")
            code, outs[n] = layer.encode(read), layer(read)
            lengths += outs[n].norm(dim=-1)[there].tolist()
            if n in (1, 4):
                active = code.activations * there[:, None]
                total.index_add_(0, code.indices.expand(active.shape).reshape(-1), active.reshape(-1))
                tokens += int(there.sum())
        torch.testing.assert_close(means["some"], total / tokens, rtol=1e-4, atol=1e-5)
        assert made.length == pytest.approx(np.mean(lengths), rel=1e-4)
        # an edit is that vector at every such token, and the model goes on from there; shorter texts beside it
        made.gates = {"some": Gate.by_mean(means["some"], made.simplex)}
        direction = direction_of("token: the", made, 0)
        seen = []
        real = made.probe.right
        made.probe.right = lambda texts: seen.append((texts, made.probe.pooled(texts))) or real(texts)
        pooled = made.run([2, 5], [("some", 0.5), (BLIND, 0.5)], direction, lambda n: None).strengths["some"]
        for number, found in zip((2, 5), pooled, strict=True):
            row = rows[number]
            x, y = model.record(torch.tensor([row]), [BLOCK])[BLOCK]
            there = torch.arange(len(row)) >= (form == "bos")
            strength = made.gates["some"].strength(layer.encode(layer.read(x, y))) * there
            assert found == pytest.approx(float(strength.sum() / there.sum()), rel=1e-4)
        head = model.module.get_output_embeddings().weight
        the = model.tokenizer(" the", add_special_tokens=False)["input_ids"][0]
        norm = model.module.transformer.ln_f
        v = head[the] * norm.weight
        v = (v - v.mean()) / (v - v.mean()).norm() * made.length

        class Edited(torch.nn.Module):
            def __init__(self, strength):
                super().__init__()
                self.strength = strength

            def forward(self, _):
                return outs[5][None] + 0.5 * self.strength[..., None] * v

        counted = ~np.isin(row, special_ids(model.tokenizer))
        for (_, states), much in zip(seen, (strength, there[None].float()), strict=True):
            with spliced(model, {BLOCK: Edited(much)}):
                hidden = model.module.transformer(torch.tensor([row])).last_hidden_state[0]
            np.testing.assert_allclose(states[-1], hidden[counted].double().mean(0).numpy(), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_directions(trained_gpt2, oracle):
    """The probe's direction raises its score of the label; a unit's own output is that of the layer."""
    model = trained_gpt2
    layer = layer_for(model, BLOCK)
    rows = [[0, *model.tokenizer(text, add_special_tokens=False)["input_ids"]] for text in TEXTS[::8]]
    for labels in ([n % 2 for n in range(len(rows))], [n % 3 for n in range(len(rows))]):
        made = Rewriting(model, trained_on(model, BLOCK, layer), rows, labels, 4)
        with evaluating(model, {"": trained_on(model, BLOCK, layer)}):
            made.fit(range(len(rows)), range(len(rows)), {}, lambda n: None)
        classifier = made.probe._probe
        states = np.random.default_rng(0).normal(size=(5, len(made.probe.direction(0))))
        for label in set(labels):
            step = states + 1e-3 * made.probe.direction(label)
            before, after = (classifier.predict_log_proba(s)[:, label] for s in (states, step))
            assert (after > before).all()
        site = next(made._sites([0]))
        added = direction_of("unit:3", made, 0)(site)
        raw = layer.unit_output(3, site.read)
        assert torch.nn.functional.cosine_similarity(added, raw, dim=-1).min() > 0.999
        assert added.norm(dim=-1).numpy() == pytest.approx(np.full(added.shape[:2], made.length), rel=1e-3)
    with pytest.raises(MxdError, match=f"direction is 'unit:{UNITS}'; the layer has units 0 ... {UNITS - 1}"):
        direction_of(f"unit:{UNITS}", made, 0)
    with pytest.raises(MxdError, match=r"'president court' is \d tokens"):
        direction_of("token:president court", made, 0)


# Choosing


CELLS = Cells(["a", "a", "b"], ["x", "y", "x"], np.array([9, 9, 9]), 0)


def test_the_best_score_is_chosen_for_each_way_and_nothing_where_nothing_helps():
    edits = [("blind", 0.0), ("blind", 1.0), ("blind", 2.0), ("good", 1.0), ("good", 2.0), ("bad", 1.0)]
    accuracies = np.array([[0.5, 0.5, 1], [0.6, 0.7, 0.9], [1, 1, 0], [0.7, 0.5, 1], [0.7, 0.5, 1], [0.4, 0.5, 1]])
    assert chosen_edits(edits, accuracies, CELLS) == {
        "blind": ("blind", 0.0),
        "good": ("good", 1.0),
        "bad": ("bad", 0.0),
    }
    assert (sign_of(np.array([0.4, 0.6, 0.5, 0.4])), sign_of(np.array([0.4, 0.5, 0.5, 0.5]))) == (1, -1)
    assert sign_of(np.array([0.5, 0.5])) == 1


def test_a_set_has_labels_and_groups():
    labelled, groups = grouped_texts("figures")
    pairs = list(zip(labelled.labels, groups, strict=True))
    counts = {pair: pairs.count(pair) for pair in set(pairs)}
    assert counts == {("economy", "figures"): 294, ("economy", "words"): 36} | {
        ("country", "figures"): 210,
        ("country", "words"): 120,
    }
    assert all(
        (group == "figures") == any(c in "0123456789" for c in t)
        for t, group in zip(labelled.texts, groups, strict=True)
    )


def test_columns_are_named(tmp_path):
    rows = [{"a": f"text {n}", "b": "xy"[n % 2], "c": "uv"[n // 2]} for n in range(4)]
    labelled, groups = grouped_texts(write_table(tmp_path / "set.csv", rows), "a", "b", "c")
    assert (labelled.texts, labelled.labels) == ([f"text {n}" for n in range(4)], [*"xyxy"]) and groups == [*"uuvv"]


def small(**fields):
    return checked(RewriteConfig, **{"strengths": (1,), "draws": 1, **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"target_label": "fish"},
            "no texts of the target, label 'fish' and group None; there are: law, x; law, y; sea",
        ),
        ({"target_label": "law", "target_group": "z"}, "label 'law' and group 'z'"),
    ],
)
def test_a_target_that_is_not_there(trained_gpt2, oracle, fields, said):
    with pytest.raises(MxdError, match=said):
        evaluate_rewrite(trained_gpt2, {"a": oracle}, TEXTS, LABELS, GROUPS, small(**fields))


def test_what_there_is_too_little_of(trained_gpt2, oracle):
    def ask(texts, labels, groups):
        evaluate_rewrite(trained_gpt2, {"a": oracle}, texts, labels, groups, small())

    with pytest.raises(MxdError, match="'b, y' has 3 texts; expected at least 4"):
        ask(["one two"] * 15, [*"aaaa" * 2, *"bbbb", *"bbb"], [*"xxxxyyyy", *"xxxx", *"yyy"])
    for labels, groups in (("aaaabbbb", "xxxxyyyy"), ("aaaaaaaa", "xxxxyyyy")):
        with pytest.raises(MxdError, match="expected texts of another label, and of this label in another group"):
            ask(["one two"] * 8, [*labels], [*groups])
    with pytest.raises(MxdError, match="direction: expected probe, token:WORD or unit:NUMBER, got 'norm'"):
        small(direction="norm")


def test_the_rarest_cell_is_the_target_and_the_command_writes_it(tmp_path, trained_gpt2, capsys):
    rows = [{"text": t, "label": a, "team": b} for t, a, b in zip(TEXTS, LABELS, GROUPS, strict=True)]
    table = write_table(tmp_path / "set.csv", rows)
    layer = trained_on(trained_gpt2, BLOCK, layer_for(trained_gpt2, BLOCK), model="tiny-gpt2")
    save_layer(tmp_path / "layer", layer.layer, layer.provenance)
    asked = [
        "rewrite",
        tmp_path / "layer",
        "--set",
        table,
        "--group-column",
        "team",
        "--strengths",
        "1/8",
        "--draws",
        1,
    ]
    code, out, err = mxd(capsys, *asked, "--limit", 8, "--neurons", "--device", "cpu")
    assert code == 0, err
    document = json.loads((tmp_path / "layer" / "rewrite.json").read_text())
    assert document["asked"]["strengths"] == [0.125] and document["asked"]["group_column"] == "team"
    assert {Path(name).name for name in document["results"]} == {"layer", f"MLP neurons, block {BLOCK}"}
    for result in document["results"].values():
        assert (result["cells"][result["target"]]["label"], result["cells"][result["target"]]["group"]) == TARGET
        assert [cell["measured"] for cell in result["cells"]] == [4] * 4
        assert all(metric.of(result) is not None for metric in SEPARATION)
    assert "rewritten for law, y" in " ".join(out.split())
    code, _, err = mxd(capsys, *asked[:4])
    assert code == 1 and "group" in err and "--group-column" in err
    one = write_table(tmp_path / "one.csv", [row | {"team": "x"} for row in rows])
    code, _, err = mxd(capsys, *asked[:3], one, *asked[4:])
    assert code == 1 and "has one group, 'x'" in err


def test_controls_are_as_many_texts_of_other_cells(trained_gpt2):
    split = split_texts(trained_gpt2, TEXTS, LABELS, GROUPS, HOW, 128, True)
    sets = split.sets(draws=9, seed=0)
    assert list(sets) == ["target", *map(str, range(9))]
    mine, rest = sets["target"]
    assert {split.cell_of[n] for n in mine} == {1} and sorted(mine + rest) == sorted(split.fitting)
    for drawn, others in (both for name, both in sets.items() if name != "target"):
        assert len(set(drawn)) == len(mine) and not {split.cell_of[n] for n in drawn} & {1}
        assert sorted(drawn + others) == sorted(split.fitting)
    assert sets["0"] != sets["1"]
    probed = split.probed(1)
    assert sum(split.cell_of[n] == 1 for n in probed) == 1 and len(probed) == len(rest) + 1
    assert split.probed(None) == split.fitting
    assert not set(split.fitting) & set(split.tuning) and not set(split.measuring) & {*split.fitting, *split.tuning}
