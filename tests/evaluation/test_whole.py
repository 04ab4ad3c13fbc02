"""Whole models: every number against plain hooks and NumPy, whichever blocks are replaced, and what tells garbage."""

import json
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
from command import mxd
from oracles import check_reconstruction, log_softmax
from small_layers import contexts_of, layer_for, trained_on

from mxd.artifacts.checkpoint import save_layer
from mxd.common.errors import MxdError
from mxd.config import DataConfig
from mxd.data.contexts import counted_positions
from mxd.evaluation.checkpoints import Subject
from mxd.evaluation.garbage import ce_of_added, repeated_share, signs
from mxd.evaluation.generation import evaluate_generation
from mxd.evaluation.orders import numbers_replaced, orders
from mxd.evaluation.whole import answer, evaluate_continuations, evaluate_whole
from mxd.questions import WholeConfig

ROWS = np.random.default_rng(0).integers(0, 12, (6, 16))
"""Tokens of a few kinds, one of which, 0, is excluded."""
HOW = WholeConfig(tokens=ROWS.size, draws=2, seed=5)
KEYS = ("ce_spliced", "ce_increase", "kl", "top1_agreement")


@pytest.fixture(scope="module")
def layers(gpt2):
    """A layer for every block, of three methods; one of them reads what the MLP returns."""
    return {n: layer_for(gpt2, n, method) for n, method in enumerate(("mxd", "topk_sae", "transcoder"))}


@pytest.fixture(scope="module")
def found(gpt2, layers):
    return evaluate_whole(gpt2, {"a": layers}, contexts_of(ROWS), HOW, [0], forward_contexts=4)["a"]


@contextmanager
def patched(model, layers, blocks, at=None):
    """The model with plain hooks on some MLPs, independent of splice.py; yields what these read and return."""
    seen = {}

    def hook(number):
        def replace(module, args, y):
            with torch.no_grad():
                hat = layers[number](layers[number].read(args[0], y))
            seen[number] = args[0], y
            return hat if at is None else torch.where(at.unsqueeze(-1), hat, y)

        return replace

    with ExitStack() as stack:
        for number in blocks:
            stack.callback(model.mlp(number).register_forward_hook(hook(number)).remove)
        yield seen


class Oracle:
    """The increases of every target, by the blocks that are replaced."""

    def __init__(self, model, layers):
        self.model, self.layers, self.ids = model, layers, torch.from_numpy(ROWS)
        self.counted = counted_positions(ROWS[:, 1:], [0])
        self.base = self.logp(())

    def logp(self, blocks, at=None):
        with patched(self.model, self.layers, blocks, at):
            return log_softmax(self.model.logits(self.ids).double().numpy())[:, :-1]

    def ce(self, logp):
        return -np.take_along_axis(logp, ROWS[:, 1:, None], -1)[..., 0]

    def metrics(self, blocks, at=None):
        logp = self.logp(blocks, at)
        values = {
            "ce_spliced": self.ce(logp),
            "ce_increase": self.ce(logp) - self.ce(self.base),
            "kl": (np.exp(self.base) * (self.base - logp)).sum(-1),
            "top1_agreement": (self.base.argmax(-1) == logp.argmax(-1)).astype(float),
        }
        return values

    def mean(self, values):
        return values[self.counted].mean()

    def error(self, values):
        """The ratio estimator's standard error over contexts."""
        totals, counts = (values * self.counted).sum(1), self.counted.sum(1)
        residuals = totals - totals.sum() / counts.sum() * counts
        n = len(counts)
        return np.sqrt(n / (n - 1) * (residuals**2).sum()) / counts.sum()

    def check(self, got, blocks, at=None):
        values = self.metrics(blocks, at)
        for key in KEYS:
            assert got[key] == pytest.approx(self.mean(values[key]), rel=2e-3, abs=1e-4), (blocks, key)
        for key in KEYS[:3]:
            assert got[f"{key}_se"] == pytest.approx(self.error(values[key]), rel=1e-2, abs=1e-5), (blocks, key)


@pytest.fixture(scope="module")
def oracle(gpt2, layers):
    return Oracle(gpt2, layers)


# What is replaced


def test_blocks_are_counted_in_powers_of_two_up_to_all():
    assert [numbers_replaced(n) for n in (1, 2, 3, 4, 6, 8)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]


def test_orders_go_up_and_down_and_as_the_seed_draws():
    blocks = [7, 2, 9, 4]
    found = orders(blocks, 20, seed=1)
    assert (found["bottom"], found["top"]) == ([[2, 4, 7, 9]], [[9, 7, 4, 2]])
    assert all(sorted(order) == sorted(blocks) for order in found["random"]) and len(found["random"]) == 20
    assert len({tuple(order) for order in found["random"]}) > 5
    assert orders(blocks, 20, 1) == found != orders(blocks, 20, 2)
    json.dumps(found)


# Every number


def test_the_splice_of_all_blocks_is_that_of_plain_hooks(found, oracle):
    oracle.check(found, (0, 1, 2))
    oracle.check(found["around_special"], (0, 1, 2), torch.from_numpy(ROWS != 0))
    assert found["ce_increase"] != found["around_special"]["ce_increase"]
    assert found["ce_base"] == pytest.approx(oracle.mean(oracle.ce(oracle.base)), abs=1e-5)
    assert (found["tokens"], found["contexts"], found["excluded"]) == (oracle.counted.sum(), 6, [0])
    increase = oracle.metrics((0, 1, 2))["ce_increase"] * oracle.counted
    assert found["by_context"]["ce_increase"] == pytest.approx(increase.sum(1) / oracle.counted.sum(1), abs=1e-3)


def test_by_number_of_blocks_in_every_order(found, oracle):
    by_number = found["by_number"]
    assert by_number["numbers"] == [1, 2, 3]
    assert {order: by_number[order]["orders"] for order in ("bottom", "top", "random")} == orders(range(3), 2, 5)
    for order, blocks in (("bottom", [0, 1, 2]), ("top", [2, 1, 0])):
        for n, point in zip((1, 2, 3), by_number[order]["points"], strict=True):
            oracle.check(point, blocks[:n])
    drawn = by_number["random"]
    for n, point in zip((1, 2, 3), drawn["points"], strict=True):
        each = [oracle.metrics(order[:n]) for order in drawn["orders"]]
        for key in KEYS[1:]:
            mean = np.mean([oracle.mean(values[key]) for values in each])
            assert point[key] == pytest.approx(mean, rel=2e-3, abs=1e-4)
        increases = [oracle.mean(values["ce_increase"]) for values in each]
        assert point["drawn"] == pytest.approx(increases, rel=2e-3)
        assert (point["low"], point["high"]) == pytest.approx((min(increases), max(increases)), rel=2e-3)
    assert drawn["points"][0]["low"] < drawn["points"][0]["high"]


def test_where_the_error_comes_from(found, oracle):
    whole = oracle.metrics((0, 1, 2))["ce_increase"]
    alone = [oracle.metrics((n,))["ce_increase"] for n in range(3)]
    for n in range(3):
        block, rest = found["blocks"][str(n)], [other for other in range(3) if other != n]
        oracle.check(block["alone"], (n,))
        oracle.check(block["without"], rest)
        won_back = whole - oracle.metrics(rest)["ce_increase"]
        assert block["without"]["won_back"] == pytest.approx(oracle.mean(won_back), rel=2e-3, abs=1e-4)
        assert block["without"]["won_back_se"] == pytest.approx(oracle.error(won_back), rel=1e-2)
    assert found["alone_sum"] == pytest.approx(sum(map(oracle.mean, alone)), rel=2e-3)
    assert found["alone_sum_se"] == pytest.approx(oracle.error(sum(alone)), rel=1e-2)


def test_the_account_on_the_base_models_inputs_and_on_the_spliced_models(gpt2, layers, found, oracle):
    keep = torch.from_numpy(counted_positions(ROWS, [0]))
    sites = {}
    for name, blocks in (("base", ()), ("spliced", (0, 1, 2))):
        with patched(gpt2, layers, blocks) as seen, gpt2.watched([0, 1, 2]) as recorded:
            gpt2.logits(oracle.ids)
        sites[name] = seen or recorded
    for n, layer in layers.items():
        for name, got in (("base", found["blocks"][str(n)]), ("spliced", found["blocks"][str(n)]["spliced"])):
            x, y = sites[name][n]
            check_reconstruction(got, layer, layer.read(x, y)[keep], y[keep])
    errors = [(block["normalized_mse"], block["spliced"]["normalized_mse"]) for block in found["blocks"].values()]
    assert errors[0][0] == pytest.approx(errors[0][1]) and all(abs(a - b) > 1e-3 * a for a, b in errors[1:])


def test_sets_do_not_disturb_each_other_nor_depend_on_batching(gpt2, layers, found):
    part = {n: layers[n] for n in (1, 2)}
    both = evaluate_whole(gpt2, {"a": layers, "part": part}, contexts_of(ROWS), HOW, [0], forward_contexts=6)
    alone = evaluate_whole(gpt2, {"part": part}, contexts_of(ROWS), HOW, [0], forward_contexts=2)["part"]
    for got, expected in ((both["a"], found), (both["part"], alone)):
        for (path, value), (other, right) in zip(leaves(got), leaves(expected), strict=True):
            assert path == other and value == pytest.approx(right, rel=2e-3, abs=1e-4), path
    assert both["part"]["ce_increase"] == both["a"]["blocks"]["0"]["without"]["ce_increase"]


def leaves(value, path=""):
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(one, f"{path}/{key}")
    else:
        yield path, value


def test_each_splice_runs_once_and_no_block_that_another_has_run(gpt2, layers):
    part, calls = {n: layers[n] for n in (1, 2)}, {0: 0, 1: 0}
    handles = [
        gpt2.blocks[n].attn.register_forward_hook(lambda *_, n=n: calls.__setitem__(n, calls[n] + 1)) for n in calls
    ]
    evaluate_whole(gpt2, {"part": part}, contexts_of(ROWS), HOW, [0], forward_contexts=3)
    for handle in handles:
        handle.remove()
    # Two batches, in two passes: the base model and the recorded splice. In the second also around special tokens; {2}
    # begins with the base model's hidden states, {1} and {1, 2} with those of the recorded splice.
    assert calls == {0: 2 * 4, 1: 2 * (4 + 1)}


def test_the_base_mlps_themselves_change_nothing(gpt2):
    own = {n: gpt2.mlp(n) for n in range(3)}
    found = evaluate_whole(gpt2, {"own": own}, contexts_of(ROWS), HOW, [])["own"]
    assert found["ce_increase"] == found["alone_sum"] == found["blocks"]["1"]["without"]["won_back"] == 0
    assert found["kl"] == pytest.approx(0, abs=1e-9) and found["top1_agreement"] == 1
    assert found["blocks"]["2"]["spliced"]["fvu"] == 0


def test_a_set_of_one_block_has_no_others(gpt2, layers):
    found = evaluate_whole(gpt2, {"one": {1: layers[1]}}, contexts_of(ROWS), HOW, [0])["one"]
    assert found["by_number"]["numbers"] == [1] and "without" not in found["blocks"]["1"]
    assert found["alone_sum"] == found["ce_increase"] == found["blocks"]["1"]["alone"]["ce_increase"]


def test_the_model_and_the_layers_are_handed_back_as_they_were(gpt2, layers, ids):
    before = gpt2.logits(ids)
    layers[0].train()
    evaluate_whole(gpt2, {"a": layers}, contexts_of(ROWS), HOW, [0])
    assert torch.equal(gpt2.logits(ids), before) and layers[0].training and not layers[1].training
    layers[0].eval()


def test_mistakes(gpt2, layers):
    for sets, contexts, excluded, message in (
        ({}, contexts_of(ROWS), [], "nothing to evaluate"),
        ({"a": layers, "b": {}}, contexts_of(ROWS), [], "nothing to evaluate"),
        ({"a": {7: layers[0]}}, contexts_of(ROWS), [], "out of range"),
        ({"a": layers}, lambda start: iter(()), [], "no complete context"),
        ({"a": layers}, contexts_of(ROWS), range(12), "every token of the evaluation text is excluded"),
    ):
        with pytest.raises(MxdError, match=message):
            evaluate_whole(gpt2, sets, contexts, HOW, excluded)


# Garbage


def test_repeated_grams_are_counted():
    assert repeated_share([1, 2, 3, 4, 5]) == 0
    assert repeated_share([1] * 8) == pytest.approx(4 / 5)  # five 4-grams, all the same
    assert repeated_share([1, 2, 3, 1, 2, 3, 1, 2]) == pytest.approx(2 / 5)  # 1231 2312 3123 1231 2312
    assert repeated_share([1, 1, 1]) == 0 and repeated_share([1, 2, 1, 2], n=2) == pytest.approx(1 / 3)


def test_the_base_models_word_on_a_continuation_is_that_of_one_forward_each(gpt2):
    prompts, added = [[5, 6], [7], [8, 9]], torch.tensor([[1, 2, 3], [4, 4, 4], [3, 2, 1]])
    got = ce_of_added(gpt2, prompts, added, batch=8)
    for prompt, row, ce in zip(prompts, added.tolist(), got.tolist(), strict=True):
        for at, token in enumerate(row):
            logp = log_softmax(gpt2.logits(torch.tensor([prompt + row[:at]])).double().numpy())[0, -1]
            assert ce[at] == pytest.approx(-logp[token], abs=1e-4)
    told = signs(added, got)
    assert told["base_ce"] == pytest.approx(got.mean().item()) and told["repeated"] == 0
    assert told["base_ce_se"] == pytest.approx(got.mean(1).std().item() / 3**0.5, rel=1e-4)
    shares = signs(torch.tensor([[1] * 8, [1, 2, 3, 4, 5, 6, 7, 8]]), torch.zeros(2, 8))
    assert (shares["repeated"], shares["repeated_se"]) == pytest.approx((0.4, 0.4))


def test_continuations_of_a_broken_model_are_told_from_the_base_models(trained_gpt2):
    """One that says the same at every position repeats it, and the base model is surprised."""
    from mxd.evaluation.faithfulness import Constant

    always = 100 * torch.randn(128, generator=torch.Generator().manual_seed(0))
    stuck = {n: Constant(always) for n in range(6)}
    prompts = [trained_gpt2.tokenizer(text)["input_ids"] for text in ["The economy of"] * 12]
    found = evaluate_continuations(trained_gpt2, {"stuck": stuck}, prompts, 12, batch=4)["stuck"]
    assert found["garbage"]["repeated"] > 0.8 > 0.5 > found["garbage_base"]["repeated"]
    assert found["garbage"]["base_ce"] > 2 + found["garbage_base"]["base_ce"]
    assert len(found["examples"]) == 10
    expected = evaluate_generation(trained_gpt2, {"stuck": stuck}, prompts, 12, 4)["stuck"]
    assert found["match"] == expected["match"] and found["examples"][:8] == expected["examples"]


# From checkpoints to the page


@pytest.fixture
def checkpoints(trained_gpt2, tmp_path):
    """A run's folder with two kinds of layers of two blocks of the bundled GPT-2."""
    data = {"source": "bundled", "split": "train", "context": 16}
    for number, method in ((n, method) for n in (1, 4) for method in ("mxd", "transcoder")):
        layer = layer_for(trained_gpt2, number, method, seed=number)
        one = trained_on(trained_gpt2, number, layer, model="tiny-gpt2", data=data)
        save_layer(tmp_path / "run" / f"block{number}-{layer.config.slug}", one.layer, one.provenance)
    return tmp_path / "run"


def test_the_command_measures_every_set_and_shows_it(checkpoints, capsys):
    words = ["--tokens", 64, "--draws", 2, "--limit", 3, "--new-tokens", 5, "--device", "cpu"]
    code, out, err = mxd(capsys, "whole", checkpoints, *words)
    assert code == 0, err
    document = json.loads((checkpoints / "whole.json").read_text())
    assert list(document["results"]) == ["mxd-k4", "tc-k4"] and document["asked"]["draws"] == 2
    for name, result in document["results"].items():
        assert [one["block"] for one in result["replacements"]] == [1, 4]
        assert result["params"] == sum(one["params"] for one in result["replacements"])
        assert name in out and f"{result['ce_increase']:+.4f}" in out and f"{result['alone_sum']:+.4f}" in out
        for block in result["blocks"].values():
            assert f"{block['alone']['ce_increase']:+.4f}" in out
            assert f"{block['spliced']['normalized_mse']:.4f}" in out
        for example in result["generation"]["examples"]:
            assert "".join(example["spliced_tokens"]).split("\n")[0] in out
        assert f"{result['generation']['garbage']['repeated']:.1%}" in out
    assert "from the bottom" in out and "random order" in out


@pytest.mark.long
def test_an_answer_depends_on_the_seed_and_on_nothing_else(trained_gpt2, layers):
    one = {f"r/{n}": trained_on(trained_gpt2, n, layer_for(trained_gpt2, n)) for n in (2, 3)}
    subject = Subject(one, trained_gpt2, DataConfig(split="validation", context=16))
    how = WholeConfig(tokens=32, draws=1, limit=3, new_tokens=2)
    first, again, other = (answer(subject, how.model_copy(update={"seed": seed})) for seed in (0, 0, 1))
    assert first["results"] == again["results"] != other["results"]
    numbers = [first["results"]["mxd-k4"]["ce_base"], other["results"]["mxd-k4"]["ce_base"]]
    assert numbers[0] != numbers[1] and first["data"]["split"] == "validation"
    assert all(a <= b for a, b in pairwise(first["results"]["mxd-k4"]["by_number"]["numbers"]))
