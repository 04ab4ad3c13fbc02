"""Masking: splices with units switched off, and the losses by domain and by score, against the same written out."""

import json

import numpy as np
import pytest
import torch
from command import mxd
from small_layers import UNITS, K, dense_code, layer_for, trained_on
from tables import write_table
from variants import GENERAL, SOME_GENERAL

from mxd.artifacts.checkpoint import save_layer
from mxd.common.errors import MxdError
from mxd.evaluation import masks, purging
from mxd.evaluation.correlation import Correlations
from mxd.evaluation.masking import belonging, evaluate_masking
from mxd.evaluation.masks import control_masks, halves
from mxd.evaluation.purging import _leading, _split, _token_scores, evaluate_purging
from mxd.evaluation.scatter import Scatter
from mxd.layers import Code
from mxd.questions import MaskingConfig, PurgingConfig, checked
from mxd.report.page import write_report
from mxd.splice import splice, spliced

SPARSITIES = [{"kind": "topk", "k": K}, {"kind": "random_k", "k": K}, {"kind": "relu_l1"}, {"kind": "jumprelu"}]

ANIMALS = [
    "The cat sat on the mat",
    "A dog and a cat",
    "Horses run",
    "The dog runs after the cat",
    "Cats sleep all day",
]
NUMBERS = ["1 2 3 4 5 6", "10 20 30", "3 4 5", "7 8 9 10 11 12 13 14", "100 200 300 400"]
LAWS = [
    "The Congress shall pass the law",
    "Taxes and tariffs",
    "A treaty with Spain",
    "The Senate of the United States",
]
TEXTS = [*ANIMALS, *NUMBERS, *LAWS]
LABELS = ["animals"] * 5 + ["numbers"] * 5 + ["laws"] * 4
MANY = [
    text
    for n in range(10, 46)
    for text in (f"{n} {n * n} 1 {'2 ' * (n % 5)}", f"The {'cat' if n % 2 else 'law'} of {'a dog ' * (n % 4 + 1)}runs")
]
"""72 texts, half of which hold numbers."""


def every_kind(test):
    test = pytest.mark.parametrize("sparsity", SPARSITIES, ids=lambda sparsity: sparsity["kind"])(test)
    return pytest.mark.parametrize("method", GENERAL)(test)


# Splices with a mask


@every_kind
def test_masking_no_units_changes_nothing(gpt2, ids, method, sparsity):
    layer = layer_for(gpt2, 1, method, sparsity)
    with spliced(gpt2, {1: layer}):
        plain = gpt2.logits(ids)
    with spliced(gpt2, {1: layer}, mask={1: []}):
        assert torch.equal(gpt2.logits(ids), plain)
    idle = np.flatnonzero(~dense_code(gpt2, 1, layer, ids.numpy()).any((0, 1))).tolist()
    with spliced(gpt2, {1: layer}, mask={1: idle}):
        assert torch.equal(gpt2.logits(ids), plain), "units that never fire"


@every_kind
def test_masking_all_units_leaves_the_zero_gate(gpt2, ids, method, sparsity):
    layer = layer_for(gpt2, 1, method, sparsity)
    base = gpt2.mlp(1)
    with spliced(gpt2, {1: layer}, mask={1: range(UNITS)}), torch.no_grad():
        x, y = gpt2.record(ids, [1])[1]
        read = x if layer.config.reads == "mlp_in" else base(x)
        code = layer.encode(read)
        assert code.activations.max() > 0
        assert torch.equal(
            y, layer.decode(read, Code(torch.zeros_like(code.activations), code.indices, code.all_units))
        )
    assert not torch.equal(y, layer(read))


@every_kind
def test_masking_a_unit_drops_its_term(gpt2, ids, method, sparsity):
    """y^ without unit n is y^ - a_n * unit_output(n); the others' activations stay."""
    layer = layer_for(gpt2, 1, method, sparsity)
    base = gpt2.mlp(1)
    off = np.argsort(-dense_code(gpt2, 1, layer, ids.numpy()).sum((0, 1)))[:3].tolist()
    with spliced(gpt2, {1: layer}, mask={1: off}), torch.no_grad():
        x, y = gpt2.record(ids, [1])[1]
        read = x if layer.config.reads == "mlp_in" else base(x)
        code = layer.encode(read)
        expected = layer(read)
        for n in off:
            activation = (code.activations * (code.indices == n)).sum(-1, keepdim=True)
            expected = expected - activation * layer.unit_output(n, read)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert (y - layer(read)).abs().max() > 1e-3


def test_masks_of_several_layers_at_once(gpt2, ids):
    layers = {0: layer_for(gpt2, 0), 2: layer_for(gpt2, 2, "transcoder")}
    mask = {0: [1, 2, 3], 2: range(10, 30)}
    with spliced(gpt2, layers, mask=mask):
        both = gpt2.logits(ids)
    with spliced(gpt2, {0: layers[0]}, mask={0: mask[0]}), spliced(gpt2, {2: layers[2]}, mask={2: mask[2]}):
        assert torch.equal(gpt2.logits(ids), both)
    with spliced(gpt2, layers, mask={2: mask[2]}):
        assert not torch.equal(gpt2.logits(ids), both)


def test_the_base_mlp_still_answers_at_masked_tokens(gpt2, ids):
    layer, base, special = layer_for(gpt2, 1), gpt2.mlp(1), int(ids[0, 3])
    with spliced(gpt2, {1: layer}, base_at=[special], mask={1: range(UNITS)}), torch.no_grad():
        x, y = gpt2.record(ids, [1])[1]
        assert torch.equal(y[0, 3], base(x)[0, 3])
        assert not torch.equal(y[0, 4], base(x)[0, 4])


def test_a_mask_for_good_and_its_gradients(build_model, ids):
    from mxd.model.loading import load_frozen

    model = load_frozen(build_model("gpt2"))
    layer = layer_for(model, 1)
    on = int(dense_code(model, 1, layer, ids.numpy()).sum((0, 1)).argmax())
    off = [n for n in range(UNITS) if n != on]
    splice(model, {1: layer}, mask={1: off})
    model.module(ids).logits.square().mean().backward()
    assert layer.expert_scale.grad[off].abs().sum() == 0 < layer.expert_scale.grad[on].abs().sum()
    assert not any(name.endswith("off") for name in model.module.state_dict())


def test_wrong_masks_are_refused_before_anything_changes(gpt2, ids):
    before, layer = gpt2.logits(ids), layer_for(gpt2, 1)
    for replacements, mask, message in (
        ({1: layer}, {2: [0]}, "mask names block 2; spliced are: 1"),
        ({1: layer}, {1: [0, UNITS]}, r"block 1 has units 0 \.\.\. 39, got 40"),
        ({1: layer}, {1: [-1]}, r"block 1 has units 0 \.\.\. 39, got -1"),
        ({1: torch.nn.Identity()}, {1: [0]}, "the Identity at block 1 has no units"),
    ):
        with pytest.raises(MxdError, match=message), spliced(gpt2, replacements, mask=mask):
            pass
        assert torch.equal(gpt2.logits(ids), before)
        assert not gpt2.module._forward_pre_hooks


# Which units


def test_a_unit_belongs_where_it_is_twice_as_strong_as_anywhere_else():
    scores = torch.tensor([[4.0, 3.9, 0.0, 1.0, 0.0], [2.0, 2.0, 0.0, 1.0, 5.0], [1.0, 0.0, 0.0, 0.0, 2.0]])
    assert belonging(scores, 2.0).tolist() == [0, -1, -1, -1, 1]
    assert belonging(scores, ratio=3.0).tolist() == [-1, -1, -1, -1, -1]
    assert belonging(scores, ratio=1.5).tolist() == [0, 0, -1, -1, 1]


def test_halves_are_drawn_from_every_group_and_do_not_meet(tokenizer):
    groups = [("animals", "numbers", "laws").index(label) for label in LABELS]
    names = ["animals", "numbers", "laws"]
    drawn = halves(tokenizer, TEXTS, groups, names, limit=4, context=5)
    assert not {*drawn.choosing} & {*drawn.measuring}
    for numbers in (drawn.choosing, drawn.measuring):
        assert np.bincount([groups[n] for n in numbers]).tolist() == [2, 2, 2]
    for n in (*drawn.choosing, *drawn.measuring):
        assert drawn.rows[n] == [0, *tokenizer(TEXTS[n])["input_ids"]][:5]
    assert halves(tokenizer, TEXTS, groups, names, 4, 5) == drawn
    assert halves(tokenizer, TEXTS, groups, names, 4, 5, seed=1).choosing != drawn.choosing
    assert not any(row[:1] == [0] for row in halves(tokenizer, TEXTS, groups, names, 4, 5, bos=False).rows)
    with pytest.raises(MxdError, match="texts of 'laws' is 1; expected at least 2"):
        halves(tokenizer, [*ANIMALS, "A law", " "], [0] * 5 + [1] * 2, ["animals", "laws"], 4, 5)


# What masking costs


def row_ce(model, ids):
    """Next-token losses of one text, from its logits."""
    logits = model.logits(torch.tensor([ids]))[0, :-1].double().numpy()
    logp = logits - logits.max(-1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
    return -logp[np.arange(len(ids) - 1), ids[1:]]


def hooked_ce(model, ids, layers, mask):
    """The same where plain hooks subtract the masked units' terms: one text at a time, nothing padded."""

    def replace(number, layer):
        def hook(module, args, y):
            read = args[0] if layer.config.reads == "mlp_in" else y
            code = layer.encode(read)
            out = layer.decode(read, code)
            for n in mask.get(number, ()):
                out = out - (code.activations * (code.indices == n)).sum(-1, keepdim=True) * layer.unit_output(n, read)
            return out

        return hook

    handles = [model.mlp(n).register_forward_hook(replace(n, layer)) for n, layer in layers.items()]
    try:
        with torch.no_grad():
            return row_ce(model, ids)
    finally:
        for handle in handles:
            handle.remove()


def ratio_mean(values):
    """Mean over tokens and its standard error over texts, given the values of each text."""
    totals, counts = np.array([v.sum() for v in values]), np.array([len(v) for v in values])
    mean, n = totals.sum() / counts.sum(), len(values)
    return mean, np.sqrt(n / (n - 1) * ((totals - mean * counts) ** 2).sum()) / counts.sum()


class ByHand:
    """Two layers spliced together, and the losses of the texts that are measured, each run by itself."""

    def __init__(self, model, method, groups, names, texts=TEXTS):
        self.model, self.layers = model, {n: layer_for(model, n, method, seed=n) for n in (0, 2)}
        self.masked = (model.tokenizer(texts[0])["input_ids"][2],)
        self.drawn = halves(model.tokenizer, texts, groups, names, 100, 128)
        self.kept = {n: ~np.isin(row, self.masked) for n, row in enumerate(self.drawn.rows)}
        assert any((~kept).any() for kept in self.kept.values())
        self.targets = {n: ~np.isin(row, model.tokenizer.all_special_ids) for n, row in enumerate(self.drawn.rows)}

    @property
    def sets(self):
        return {"both": {n: trained_on(self.model, n, layer, self.masked) for n, layer in self.layers.items()}}

    def codes(self, number):
        """Text -> activations at the tokens that count."""
        return {
            n: dense_code(self.model, number, self.layers[number], np.array([self.drawn.rows[n]]))[0][self.kept[n]]
            for n in self.drawn.choosing
        }

    def losses(self, mask):
        ce = lambda row: hooked_ce(self.model, row, self.layers, mask)  # noqa: E731
        return {n: ce(self.drawn.rows[n])[self.targets[n][1:]] for n in self.drawn.measuring}

    def base_losses(self):
        return {n: row_ce(self.model, self.drawn.rows[n])[self.targets[n][1:]] for n in self.drawn.measuring}

    def by_group(self, losses, groups):
        """Mean and standard error of each group."""
        return [ratio_mean([v for n, v in losses.items() if self.drawn.groups[n] == g]) for g in range(groups)]

    def check_changes(self, got, key, masks, groups):
        whole = self.losses({})
        for row, mask in enumerate(masks):
            changed = {n: loss - whole[n] for n, loss in self.losses(mask).items()}
            for column, (mean, error) in enumerate(self.by_group(changed, groups)):
                assert got[key][row][column] == pytest.approx(mean, abs=2e-5)
                assert got[f"{key}_se"][row][column] == pytest.approx(error, abs=2e-5)
        assert np.abs(got[key]).max() > 1e-3
        for key, losses in (("loss", whole), ("loss_base", self.base_losses())):
            assert got[key] == pytest.approx([mean for mean, _ in self.by_group(losses, groups)], rel=1e-5)
        assert got["texts"] == np.bincount([self.drawn.groups[n] for n in self.drawn.measuring]).tolist()


def members(masks, domains):
    return {d: {str(n): list(units) for n, units in mask.items()} for d, mask in zip(domains, masks, strict=True)}


def listed(members):
    return {domain: {n: units.tolist() for n, units in mask.items()} for domain, mask in members.items()}


@pytest.mark.parametrize("method", SOME_GENERAL)
def test_domain_masking_agrees_with_numpy(gpt2, method):
    domains = sorted(set(LABELS))
    hand = ByHand(gpt2, method, [domains.index(label) for label in LABELS], domains)
    masks = [{}, {}, {}]
    for number in hand.layers:
        total, count = np.zeros((3, UNITS)), np.zeros((3, 1))
        for n, code in hand.codes(number).items():
            total[hand.drawn.groups[n]] += code.sum(0)
            count[hand.drawn.groups[n]] += len(code)
        scores = total / count
        second, best = np.sort(scores, 0)[-2:]
        for d in range(3):
            belongs = (best > 0) & (best >= 1.1 * second) & (scores.argmax(0) == d)
            masks[d][number] = np.flatnonzero(belongs).tolist()
    got = evaluate_masking(gpt2, hand.sets, TEXTS, LABELS, MaskingConfig(ratio=1.1), batch=3)["both"]
    assert got["domains"] == domains
    assert listed(got["members"]) == members(masks, domains)
    assert got["units"] == {d: sum(map(len, mask.values())) for d, mask in zip(domains, masks, strict=True)}
    assert sum(got["units"].values()) > 6
    hand.check_changes(got, "matrix", masks, 3)
    matrix = np.array(got["matrix"])
    assert got["target"] == pytest.approx(np.diag(matrix).mean())
    assert got["others"] == pytest.approx(matrix[~np.eye(3, dtype=bool)].mean())


def over_chance(codes, scores, seed=0):
    """Correlations over tokens, and the permutation test of ``Correlation`` token by token."""
    rows, rng = np.concatenate(codes), np.random.default_rng(seed)
    rows = rows - rows.mean(0)
    orders = [np.arange(len(codes)), *(rng.permutation(len(codes)) for _ in range(999))]
    dealt = np.array([np.repeat(np.array(scores)[order], [len(code) for code in codes]) for order in orders])
    dealt = dealt - dealt.mean(1, keepdims=True)
    norms = np.linalg.norm(dealt, axis=1)[:, None] * np.linalg.norm(rows, axis=0)
    r = np.where(norms > 1e-9, dealt @ rows / np.maximum(norms, 1e-9), 0)
    activation = r / np.maximum(np.sqrt((r**2).mean(0)), 1e-30)
    return r[0], activation[0] > activation[1:].max()


@pytest.mark.long
@pytest.mark.parametrize("method", ["mxd", "topk_sae"])
def test_purging_agrees_with_numpy(gpt2, method):
    rng = np.random.default_rng(0)
    scores = [float("1" in text) + 0.3 * rng.random() for text in MANY]
    high = [int(score > np.mean(scores)) for score in scores]
    hand = ByHand(gpt2, method, high, ["up to", "above"], MANY)
    masks, reached, thresholds = [{}, {}], [0, 0], (0.34, 0.1)
    for number in hand.layers:
        codes = hand.codes(number)
        order = sorted(codes, key=lambda n: len(hand.drawn.rows[n]))
        r, beyond = over_chance([codes[n] for n in order], [scores[n] for n in order])
        for i, threshold in enumerate(thresholds):
            masks[i][number] = np.flatnonzero((r >= threshold) & beyond).tolist()
            reached[i] += int((r >= threshold).sum())
    got = evaluate_purging(gpt2, hand.sets, MANY, scores, PurgingConfig(thresholds=thresholds), batch=7)["both"]
    assert got["units"] == [sum(map(len, mask.values())) for mask in masks]
    assert got["share"] == [count / (2 * UNITS) for count in got["units"]]
    assert got["removed"] == [count - kept for count, kept in zip(reached, got["units"], strict=True)]
    assert 0 < got["units"][0] < got["units"][1] < 2 * UNITS and got["removed"][1] > 0
    assert got["mean_score"] == pytest.approx(np.mean(scores)) and got["choosing"] == 36
    leading = [one["correlation"] for one in got["leading"]]
    assert len(leading) == 10 and leading == sorted(leading, reverse=True)
    for one in got["leading"]:
        assert (one["unit"] in masks[0][one["block"]]) == (one["beyond_chance"] and one["correlation"] >= 0.34)
    first = got["leading"][0]
    codes = hand.codes(first["block"])
    means = [code[:, first["unit"]].mean() for code in codes.values()]
    assert first["tokens"] == sum(map(len, codes.values())), "points are drawn from the texts that chose"
    assert first["active"] == sum((code[:, first["unit"]] > 0).sum() for code in codes.values())
    assert first["correlation_texts"] == pytest.approx(np.corrcoef(means, [scores[n] for n in codes])[0, 1], abs=1e-6)
    hand.check_changes(got, "changes", masks, 2)
    active = {n: torch.from_numpy(sum(code.sum(0) for code in hand.codes(n).values()) > 0) for n in hand.layers}
    hand.check_changes(got, "control", list(control_masks(masks, active, 0)), 2)


@pytest.mark.long
def test_random_scores_mask_nothing(gpt2):
    sets = {"a": {1: trained_on(gpt2, 1, layer_for(gpt2, 1))}, "b": {2: trained_on(gpt2, 2, layer_for(gpt2, 2))}}
    removed = 0
    for seed in range(2):
        rng = np.random.default_rng(seed)
        for scores in (
            rng.exponential(size=72).tolist(),
            [rng.random(len(gpt2.tokenizer(t)["input_ids"])).tolist() for t in MANY],
        ):
            how = PurgingConfig(thresholds=(0.1, 0.05), seed=seed)
            for got in evaluate_purging(gpt2, sets, MANY, scores, how).values():
                assert got["units"] == [0, 0] and got["changes"] == [[0, 0], [0, 0]]
                removed += got["removed"][1]
    assert removed > 10


def test_tokens_may_have_scores_of_their_own(gpt2):
    """A score that only the digit tokens have finds other units than the mean over each text would."""
    sets = {"a": {1: trained_on(gpt2, 1, layer_for(gpt2, 1, sparsity={"kind": "relu_l1"}))}}
    ids = [gpt2.tokenizer(text)["input_ids"] for text in MANY]
    of_tokens = [[float(gpt2.tokenizer.decode([i]).strip().isdigit()) for i in row] for row in ids]
    groups = np.array([np.mean(each) for each in of_tokens])
    assert ((groups > groups.mean()) == ["1" in t for t in MANY]).all()  # so that the halves are those drawn here
    for bos in (False, True):
        drawn = halves(gpt2.tokenizer, MANY, [int("1" in t) for t in MANY], ["no", "yes"], 500, 128, bos)
        rows = np.concatenate(
            [dense_code(gpt2, 1, sets["a"][1].layer, np.array([drawn.rows[n]]))[0][bos:] for n in drawn.choosing]
        )
        scores = np.concatenate([of_tokens[n] for n in drawn.choosing])
        expected = max(np.corrcoef(rows[:, n], scores)[0, 1] for n in range(UNITS) if np.ptp(rows[:, n]) > 0)
        got = evaluate_purging(gpt2, sets, MANY, of_tokens, PurgingConfig(thresholds=(0.3,)), bos=bos)["a"]
        first = got["leading"][0]
        assert first["correlation"] == pytest.approx(expected, abs=1e-5)
        assert (first["tokens"], first["active"]) == (len(rows), (rows[:, first["unit"]] > 0).sum())
        assert {score for score, _ in first["points"]} == {0, 1}
        for score, value in first["points"]:
            assert np.isclose(rows[scores == score, first["unit"]], value, rtol=1e-3, atol=1e-6).any()
    other = evaluate_purging(gpt2, sets, MANY, groups.tolist(), PurgingConfig(thresholds=(0.3,)))["a"]
    assert other["leading"][0]["correlation"] != pytest.approx(expected, abs=1e-3)
    with pytest.raises(MxdError, match=r"text \d+ has 3 scores for \d+ tokens; give it one number, or one for each"):
        evaluate_purging(gpt2, sets, MANY, [[0.0, 1.0, float(n)] for n in range(len(MANY))])


def test_texts_are_divided_at_the_mean_score(tokenizer):
    scores = [9.0 if n % 6 == 0 else 3.0 for n in range(len(MANY))]
    split = _split(tokenizer, MANY, scores, PurgingConfig(), 128, True)
    assert (split.mean, split.groups) == (4.0, ["scores up to 4", "scores above 4"])
    assert split.text.groups == [int(score == 9) for score in scores] and split.text.measured == [30, 6]
    assert {n: set(each) for n, each in split.of_tokens.items()} == {n: {scores[n]} for n in split.text.choosing}


def test_the_leading_units_are_the_ten_that_correlate_most_of_all_layers():
    rng = np.random.default_rng(0)
    over, texts = {n: torch.from_numpy(rng.normal(size=8)) for n in (2, 0)}, torch.arange(8) / 8
    found = _leading({n: Correlations(r, texts, r > 0.5) for n, r in over.items()})
    order = sorted(((float(r), n, unit) for n in over for unit, r in enumerate(over[n])), reverse=True)
    assert [(one["correlation"], one["block"], one["unit"]) for one in found] == order[:10]
    for one in found:
        assert (one["correlation_texts"], one["beyond_chance"]) == (one["unit"] / 8, one["correlation"] > 0.5)


def test_tokens_that_are_cut_off_take_their_scores_with_them():
    """BOS has the mean of the whole text's scores; token i has score i, also where the context ends before the text."""
    assert _token_scores(0, [1.0, 2.0, 6.0], [0, 7, 8], head=1, context=3).tolist() == [3, 1, 2]
    assert _token_scores(0, [1.0, 2.0, 6.0], [7, 8, 9], head=0, context=9).tolist() == [1, 2, 6]
    assert _token_scores(0, 0.5, [0, 7, 8], head=1, context=9).tolist() == [0.5] * 3
    with pytest.raises(MxdError, match="text 5 has 3 scores for 2 tokens"):
        _token_scores(4, [1.0, 2.0, 6.0], [0, 7, 8], head=1, context=4)


def test_a_planted_unit_is_found_and_its_loss_felt_where_it_fires(gpt2):
    """Unit 5 fires on digits alone and adds much: masking it is felt on numbers, and nowhere else."""
    layer = layer_for(gpt2, 1, "transcoder", {"kind": "relu_l1"})
    layer.encoder_bias.data.add_(100)  # the others fire everywhere
    rows = [[0, *gpt2.tokenizer(text)["input_ids"]] for text in TEXTS]
    x = [gpt2.record(torch.tensor([row]), [1])[1][0][0, 1:] for row in rows]
    digits, rest = torch.cat(x[5:10]), torch.cat(x[:5] + x[10:])
    both = torch.cat([digits, rest])
    target = torch.cat([torch.ones(len(digits)), -torch.ones(len(rest))])
    direction = torch.linalg.lstsq(both - both.mean(0), target - target.mean(), rcond=1e-3, driver="gelsd").solution
    layer.encoder.data[5] = direction
    layer.encoder_bias.data[5] = -(rest @ direction).max() - 1e-3
    layer.decoder.data[5] = torch.linspace(-30, 30, 32)
    got = evaluate_masking(gpt2, {"a": {1: trained_on(gpt2, 1, layer)}}, TEXTS, LABELS, MaskingConfig(ratio=1e6))["a"]
    assert listed(got["members"]) == {"animals": {"1": []}, "laws": {"1": []}, "numbers": {"1": [5]}}
    assert got["matrix"][0] == got["matrix"][1] == got["matrix_se"][1] == [0, 0, 0]
    assert abs(got["matrix"][2][2]) > 0.01 and got["matrix"][2][:2] == [0, 0]
    assert got["control"][0] == [0, 0, 0]


def test_a_control_is_as_large_as_its_mask_while_there_are_others():
    active = {0: torch.tensor([True] * 6 + [False] * 4)}
    asked = [{0: [0, 1]}, {0: [0, 1, 2, 3]}, {0: []}]
    small, large, none = (drawn[0] for drawn in control_masks(asked, active, 0))
    assert len(small) == 2 and {*small} <= {2, 3, 4, 5} and large == [4, 5] and none == []
    assert len({tuple(next(control_masks(asked, active, seed))[0]) for seed in range(9)}) > 1


@torch.no_grad()
def test_masks_and_control_are_measured_alike(gpt2):
    """In each other's places they give the same numbers in each other's places."""
    sets = {"a": {1: trained_on(gpt2, 1, layer_for(gpt2, 1))}}
    text = halves(gpt2.tokenizer, TEXTS, [label == "laws" for label in LABELS], ["other", "laws"], 3, 16)
    ways = [{1: list(range(10))}], [{1: list(range(10, 20))}]
    found = []
    for mask, control in (ways, ways[::-1]):
        got = masks.measure(gpt2, sets, {"a": mask}, {"a": control}, text, 8, lambda n: None)["a"]
        found.append((masks.table("", got.changes), masks.table("", got.control)))
    assert found[0] == found[1][::-1] and found[0][0] != found[0][1]


def test_the_control_is_as_many_other_active_units(gpt2, monkeypatch):
    seen, seeds = [], []
    measure, draw = masks.measure, masks.control_masks

    def spy(model, sets, masks, control, *rest):
        seen.append([*masks["a"], *control["a"]])
        return measure(model, sets, masks, control, *rest)

    monkeypatch.setattr(masks, "measure", spy)
    monkeypatch.setattr(masks, "control_masks", lambda *args: seeds.append(args[2]) or draw(*args))
    layer = layer_for(gpt2, 1)
    sets = {"a": {1: trained_on(gpt2, 1, layer)}}
    for seed in (0, 0, 1):
        got = evaluate_masking(gpt2, sets, TEXTS, LABELS, MaskingConfig(ratio=1.5, seed=seed))["a"]
        assert got["control"] != got["matrix"]
    rows = [np.array([[0, *gpt2.tokenizer(text)["input_ids"]]]) for text in TEXTS]
    active = set(np.flatnonzero(sum(dense_code(gpt2, 1, layer, row).sum((0, 1)) for row in rows)).tolist())
    assert len(active) < UNITS
    for ways in seen:
        for mask, control in zip(ways[:3], ways[3:], strict=True):
            assert {*control[1]} <= active - {*mask[1]}
            assert len(control[1]) == len(set(control[1])) <= len(mask[1])
    assert sum(len(mask[1]) for mask in seen[0][3:]) > 3
    assert seen[0] == seen[1] and seen[0][:3] != seen[2][:3], "other texts choose other units"
    assert seeds == [0, 0, 1]


class Noting:
    """Measures nothing beside the losses, and notes how prompts are to begin."""

    def __init__(self):
        self.bos = []

    def prompts(self, model, text, texts, groups, bos):
        self.bos.append(bos)
        return []

    def measure(self, masked):
        return {name: {} for name in masked.sets}


def test_bos_the_context_and_the_seed_reach_the_texts_and_all_that_is_drawn(gpt2, monkeypatch):
    seen, seeds, beside = [], [], Noting()
    measure, control, report = masks.measure, masks.control_masks, purging.Correlation.report
    monkeypatch.setattr(masks, "measure", lambda *args: seen.append(args[4]) or measure(*args))
    monkeypatch.setattr(masks, "control_masks", lambda *args: seeds.append(args[2]) or control(*args))
    monkeypatch.setattr(purging.Correlation, "report", lambda self, seed: seeds.append(seed) or report(self, seed))
    monkeypatch.setattr(purging, "Scatter", lambda units, seed: seeds.append(seed) or Scatter(units, seed))
    sets = {"a": {1: trained_on(gpt2, 1, layer_for(gpt2, 1))}}
    for bos, context, seed in ((True, 4, 0), (False, 3, 1)):
        evaluate_masking(gpt2, sets, TEXTS, LABELS, MaskingConfig(seed=seed), context, bos, beside=beside)
        scores = [float("1" in text) for text in MANY]
        evaluate_purging(gpt2, sets, MANY, scores, PurgingConfig(seed=seed), context, bos, beside=beside)
    assert seeds == [0] * 4 + [1] * 4, "a control each; permutations; points"
    assert beside.bos == [True, True, False, False]
    for text, (bos, context) in zip(seen, ((True, 4), (True, 4), (False, 3), (False, 3)), strict=True):
        assert max(map(len, text.rows)) == context and all((row[:1] == [0]) == bos for row in text.rows)
    assert seen[0].choosing != seen[2].choosing and seen[1].choosing != seen[3].choosing


@pytest.mark.long
def test_results_do_not_depend_on_the_batch_or_on_what_else_is_measured(gpt2):
    one = {1: trained_on(gpt2, 1, layer_for(gpt2, 1))}
    other = {2: trained_on(gpt2, 2, layer_for(gpt2, 2, "transcoder"))}
    how, sets = MaskingConfig(ratio=1.5), {"b": other, "a": one, "ab": {**one, **other}}
    alone = evaluate_masking(gpt2, {"a": one}, TEXTS, LABELS, how, batch=1)["a"]
    among = evaluate_masking(gpt2, sets, TEXTS, LABELS, how, batch=5)["a"]
    assert listed(alone["members"]) == listed(among["members"])
    for key in ("matrix", "matrix_se", "control", "loss", "loss_base"):
        np.testing.assert_allclose(alone[key], among[key], atol=1e-5)
    assert not any(hasattr(block.mlp, "off") for block in gpt2.blocks)


def test_the_blocks_below_run_once_for_all_splices_and_masks(gpt2):
    sets = {str(seed): {1: trained_on(gpt2, 1, layer_for(gpt2, 1, seed=seed))} for seed in range(3)}
    calls = []
    handle = gpt2.blocks[0].attn.register_forward_pre_hook(lambda module, args: calls.append(module))
    try:
        evaluate_masking(gpt2, sets, TEXTS, LABELS, MaskingConfig(ratio=1.5), batch=100)
    finally:
        handle.remove()
    assert len(calls) == 2  # choosing, measuring


def test_mistakes_are_named(gpt2, trained_gpt2):
    sets = {"a": {1: trained_on(gpt2, 1, layer_for(gpt2, 1))}}
    for options, message in (
        ({"labels": ["a"] * len(TEXTS)}, "number of domains is 1; expected at least 2"),
        ({"labels": ["a", *["b"] * (len(TEXTS) - 1)]}, "texts of 'a' is 1; expected at least 2"),
        ({"context": 1}, "context is 1; expected at least 2"),
    ):
        with pytest.raises(MxdError, match=message):
            evaluate_masking(gpt2, sets, **{"texts": TEXTS, "labels": LABELS, **options})
    for field, value, kind in (
        ("ratio", 0.5, "number of"),
        ("ratio", float("nan"), "finite"),
        ("limit", 1, "number of"),
    ):
        with pytest.raises(MxdError, match=f"{field}: expected a {kind}"):
            checked(MaskingConfig, **{field: value})
    with pytest.raises(MxdError, match="number of different scores is 1"):
        evaluate_purging(gpt2, sets, TEXTS, [1.0] * len(TEXTS))
    with pytest.raises(
        MxdError, match=r"6 texts choose the units; expected at least 30.*give 60 or more, and a --limit"
    ):
        evaluate_purging(gpt2, sets, TEXTS, [float(len(text)) for text in TEXTS])
    with pytest.raises(MxdError, match="other weights there"):
        evaluate_masking(trained_gpt2, sets, TEXTS, LABELS)


# The command


@pytest.mark.long
def test_the_command_writes_what_it_shows(trained_gpt2, tmp_path, capsys):
    data = {"source": "bundled", "split": "train", "context": 16}
    for number in (1, 2):
        one = trained_on(trained_gpt2, number, layer_for(trained_gpt2, number), model="tiny-gpt2", data=data)
        save_layer(tmp_path / f"block{number}", one.layer, one.provenance)
    labelled = tmp_path / "labelled.jsonl"
    rows = zip(TEXTS, LABELS, strict=True)
    labelled.write_text("".join(json.dumps({"text": t, "label": f"[b]{label}"}) + "\n" for t, label in rows))
    code, out, err = mxd(capsys, "mask", tmp_path, "--domains", labelled, "--ratio", "1.2", "--device", "cpu")
    assert code == 0, err
    assert "[b]animals" in out and "own, random" in out
    results = json.loads((tmp_path / "masking.json").read_text())["results"]
    assert set(results) == {f"{tmp_path.name}/block1", f"{tmp_path.name}/block2"}
    assert all(result["domains"] == ["[b]animals", "[b]laws", "[b]numbers"] for result in results.values())
    scored = write_table(tmp_path / "scored.csv", [{"text": t, "score": "1" in t} for t in MANY])
    code, out, err = mxd(capsys, "mask", tmp_path, "--scores", scored, "--together", "--thresholds", "0.3")
    assert code == 0, err
    (result,) = json.loads((tmp_path / "purging-together.json").read_text())["results"].values()
    assert result["thresholds"] == [0.3] and {one["block"] for one in result["leading"]} == {1, 2}
    assert "correlation" in out and "low, random" in out and "by chance" in out and result["units"][0] > 0
    first = result["leading"][0]
    said = f"block {first['block']}: {first['correlation']:+.2f}, {first['correlation_texts']:+.2f}"
    assert said in write_report(tmp_path)[1].read_text()
    for words, message in (
        ([], "give either labelled texts"),
        (["--scores", scored, "--domains", labelled], "give either labelled texts"),
        (["--scores", scored, "--thresholds", "a"], "--thresholds is 'a'"),
    ):
        code, out, err = mxd(capsys, "mask", tmp_path, *words)
        assert code == 1 and message in err
