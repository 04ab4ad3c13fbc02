"""Shares of the active units: what is kept, and what that does, against the same written out in NumPy."""

import itertools
import json

import numpy as np
import pytest
import torch
from command import mxd
from oracles import decode_dense, log_softmax
from small_layers import UNITS, K, contexts_of, dense_code, layer_for, trained_on

from mxd.artifacts.checkpoint import save_layer
from mxd.cli.shared import fraction, numbers
from mxd.common.errors import MxdError
from mxd.data.contexts import counted_positions, special_ids
from mxd.evaluation.choosing import drawn, limited, ranking
from mxd.evaluation.decoding import shortened
from mxd.evaluation.subset import evaluate_subset
from mxd.layers import Code
from mxd.questions import SubsetConfig, checked
from mxd.report.page import write_report
from mxd.splice import spliced

MODES = ("token", "whole", "prefix", "global")
BLOCK = 1


@pytest.fixture(scope="module")
def rows():
    """Eight texts of 10 tokens, some of them special; the first four choose for the corpus."""
    drawn = np.random.default_rng(0).integers(1, 200, (8, 10))
    drawn[:, 3] = 0
    return drawn


@pytest.fixture(scope="module")
def plain(rows):
    """The same without special tokens, where units are never switched off."""
    return np.where(rows == 0, 1, rows)


def config(**fields):
    return SubsetConfig(**{"tokens": 40, "keep": (0.5, 0.25), "draws": 2, "timings": 0, **fields})


def subset(model, layer, rows, **fields):
    asked = config(**fields)
    layers = {"a": trained_on(model, BLOCK, layer)}
    (found,) = evaluate_subset(model, layers, contexts_of(rows), asked, forward_contexts=3).values()
    return found


def point(found, mode, share):
    (one,) = (one for one in found["modes"][mode]["points"] if one["share"] == share)
    return one


# What is kept


def test_a_share_is_rounded_up_and_of_the_active_units_alone():
    order = ranking(torch.tensor([[0.0, 3.0, 1.0, 2.0], [0.0, 0.0, 5.0, 0.0]]))
    assert order.active.tolist() == [3, 1]
    assert order.places[0].tolist() == [3, 0, 2, 1] and order.places[1, 2] == 0
    for share, counts in ((1.0, [3, 1]), (0.5, [2, 1]), (1 / 3, [1, 1]), (0.0, [0, 0])):
        assert order.kept(share).tolist() == counts
        assert order.first(share).sum(-1).tolist() == counts
    assert order.first(0.5).tolist() == [[False, True, False, True], [False, False, True, False]]
    hundred = ranking(torch.arange(1.0, 101.0))
    assert [int(hundred.kept(share)) for share in (0.07, 0.07005)] == [7, 8], "0.07 times 100 is a little above 7"


def test_random_scores_order_the_active_units_alone():
    strong = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    order = ranking(strong, torch.tensor([[0.9, 0.1, 0.8, 0.0]]))
    assert order.first(1.0).tolist() == [[False, True, True, True]]
    assert order.first(0.5).tolist() == [[False, True, True, False]]


def test_masks_of_a_quarter_of_a_million_units_are_one_row_for_each_text():
    units, at = 2**18, torch.ones(2, 2, dtype=torch.bool)
    code = Code(torch.ones(2, 2, 2), torch.tensor([[[5, 7], [7, units - 1]], [[5, 7], [7, units - 1]]]))
    kept = torch.zeros(2, units, dtype=torch.bool)
    kept[0, 7] = kept[1, units - 1] = True
    whole = [[[0, 1], [1, 0]], [[0, 0], [0, 1]]]
    assert limited("whole", code, kept, at).activations.tolist() == whole
    assert limited("global", code, kept[:1], at).activations.tolist() == [[[0, 1], [1, 0]]] * 2
    assert limited("token", code, code.indices == 7, at).activations.tolist() == [[[0, 1], [1, 0]]] * 2
    at[:, 0] = False
    assert limited("prefix", code, kept, at).activations.tolist() == [[[1, 1], [1, 0]], [[1, 1], [0, 1]]]


def test_lists_are_shortened_to_the_strongest():
    code = Code(torch.tensor([[0.0, 2.0, 3.0, 1.0], [4.0, 0.0, 0.0, 0.0]]), torch.tensor([[3, 5, 7, 9], [1, 2, 4, 6]]))
    (three, two) = shortened(code, (1.0, 0.5))
    assert (three[0], two[0]) == (3, 2)
    assert three[1].indices[0].tolist() == [7, 5, 9] and two[1].indices[0].tolist() == [7, 5]
    assert two[1].activations.tolist() == [[3, 2], [4, 0]]


# What that does


def keep_oracle(mode, dense, coded, corpus, share, scores=None):
    """The kept entries of ``dense [texts, seq, units]``: written out text by text."""
    texts, seq, _ = dense.shape
    kept = np.zeros(dense.shape, bool)

    def best(strong, score):
        active = np.flatnonzero(strong > 0)
        order = active[np.argsort(-score[active], kind="stable")]
        return order[: int(np.ceil(share * len(active) - 1e-9))]

    for t in range(texts):
        for p in range(seq):
            if mode == "token":
                kept[t, p, best(dense[t, p], dense[t, p] if scores is None else scores[t][p])] = True
                continue
            halves = {"whole": slice(None), "prefix": slice(seq // 2), "global": None}[mode]
            strong = corpus if halves is None else (dense[t, halves] * coded[t, halves, None]).sum(0)
            kept[t, p, best(strong, strong if scores is None else scores[t])] = True
            if mode == "prefix" and p < seq // 2:
                kept[t, p] = True
    return kept | ~coded[..., None]


def effect_oracle(model, layer, rows, dense, mode):
    """CE increase and NMSE by text, of the MLP's output patched by a plain hook: sums over counted positions."""
    ids, at = torch.from_numpy(rows), np.arange(rows.shape[1]) >= (rows.shape[1] // 2 if mode == "prefix" else 0)
    counted = counted_positions(rows, special_ids(model.tokenizer))
    x, y = model.record(ids, [BLOCK])[BLOCK]
    read = (x if layer.config.reads == "mlp_in" else y).flatten(0, 1)
    out = decode_dense(layer, read, dense.reshape(-1, dense.shape[-1])).reshape(y.shape)
    base = log_softmax(model.logits(ids).double().numpy())
    handle = model.mlp(BLOCK).register_forward_hook(lambda *_: torch.from_numpy(out).float())
    patched = log_softmax(model.logits(ids).double().numpy())
    handle.remove()
    increase = np.take_along_axis((base - patched)[:, :-1], rows[:, 1:, None], -1)[..., 0]
    target = y.double().numpy()
    error = ((out - target) ** 2).mean(-1) / np.linalg.norm(target, axis=-1)
    return (increase, counted[:, 1:] & at[:-1]), (error, counted & at)


def mean_and_error(values, counted):
    """The mean over what counts, and its standard error over texts by the jackknife's linear form."""
    totals, counts = (values * counted).sum(1), counted.sum(1)
    mean, n = totals.sum() / counts.sum(), len(totals)
    return mean, np.sqrt(n / (n - 1) * ((totals - mean * counts) ** 2).sum()) / counts.sum()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("method", "sparsity", "fields"),
    [("mxd", None, {}), ("transcoder", {"kind": "relu_l1"}, {"skip": True}), ("topk_sae", None, {})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_everything_agrees_with_numpy(gpt2, rows, mode, method, sparsity, fields):
    layer = layer_for(gpt2, BLOCK, method, sparsity, **fields)
    found = subset(gpt2, layer, rows, modes=(mode,), seed=3)
    dense, corpus = dense_code(gpt2, BLOCK, layer, rows[4:]), dense_code(gpt2, BLOCK, layer, rows[:4])
    coded = counted_positions(rows[4:], [0])
    corpus = corpus[counted_positions(rows[:4], [0])].sum(0)
    at = coded & (np.arange(10) >= (5 if mode == "prefix" else 0))
    assert found["texts"] == 4 and found["tokens"] == coded[:, 1:].sum()
    sums = {"whole": slice(None), "prefix": slice(5)}
    strong = {"token": dense[coded], "global": corpus[None]}.get(mode)
    if strong is None:
        strong = (dense * coded[..., None])[:, sums[mode]].sum(1)
    active = (strong > 0).sum(-1)
    for share in (1.0, 0.5, 0.25, 0.0):
        got = point(found, mode, share)
        assert got["active"] == pytest.approx(active.mean())
        assert got["units"] == pytest.approx(np.ceil(share * active).mean())
        cases = [(got, None)]
        for draw in range(2) if 0 < share < 1 else ():
            cases.append((draw, draw))
        for one, draw in cases:
            scores = None
            if draw is not None and mode == "global":
                scores = [np.random.default_rng([3, draw]).random((1, UNITS))[0]] * 4
            elif draw is not None:
                width = layer.encode(torch.zeros(layer.config.d_in)).indices.shape[-1]
                shape = (10, width) if mode == "token" else (UNITS,)
                scores = [np.random.default_rng([3, draw, t]).random(shape, dtype=np.float32) for t in range(4)]
                if mode == "token":  # drawn for the entries that the code lists
                    scores = by_unit(gpt2, layer, rows[4:], scores)
            kept = keep_oracle(mode, dense, coded, corpus, share, scores)
            (increase, targets), (error, tokens) = effect_oracle(gpt2, layer, rows[4:], dense * kept, mode)
            ce, ce_se = mean_and_error(increase, targets)
            if draw is not None:
                assert got["random"]["draws"][draw] == pytest.approx(ce, abs=2e-5)
                continue
            nmse, nmse_se = mean_and_error(error, tokens)
            assert (one["ce_increase"], one["ce_increase_se"]) == pytest.approx((ce, ce_se), abs=2e-5)
            assert (one["normalized_mse"], one["normalized_mse_se"]) == pytest.approx((nmse, nmse_se), rel=1e-3)
            assert one["mass"] == pytest.approx((dense * kept)[at].sum() / dense[at].sum(), rel=1e-5)
            assert one["l0"] == pytest.approx(((dense * kept)[at] > 0).sum(-1).mean())
        if "random" in got:
            random = got["random"]
            assert random["ce_increase"] == pytest.approx(np.mean(random["draws"]))
            assert random["ce_increase_sd"] == pytest.approx(np.std(random["draws"], ddof=1))
            gain = random["ce_increase"] - got["ce_increase"]
            assert got["z"] == pytest.approx(gain / random["ce_increase_sd"])


def by_unit(model, layer, rows, scores):
    """Scores of the entries of a code, by unit."""
    x, y = model.record(torch.from_numpy(rows), [BLOCK])[BLOCK]
    indices = layer.encode(layer.read(x, y)).indices.numpy()
    dense = np.zeros((*rows.shape, UNITS), np.float32)
    np.put_along_axis(dense, indices, np.stack(scores), -1)
    return dense


@pytest.mark.parametrize("method", ["mxd", "transcoder", "monet", "mumoe_block"])
def test_all_units_change_nothing_and_none_leave_the_bias_and_a_skip(gpt2, plain, method):
    fields = (
        {"num_units": 49, "expert_width": 4} if method == "monet" else {"skip": True} if method == "transcoder" else {}
    )
    layer = layer_any(gpt2, method, **fields)
    found = subset(gpt2, layer, plain)
    ids = torch.from_numpy(plain[4:])
    counted = counted_positions(plain[4:], special_ids(gpt2.tokenizer))[:, 1:]

    def increase(mask):
        with spliced(gpt2, {BLOCK: layer}, mask=mask):
            logits = gpt2.logits(ids).double().numpy()
        change = log_softmax(gpt2.logits(ids).double().numpy()) - log_softmax(logits)
        return np.take_along_axis(change[:, :-1], plain[4:, 1:, None], -1)[..., 0][counted].mean()

    unchanged, nothing = increase(None), increase({BLOCK: range(layer.num_units)})
    assert abs(unchanged - nothing) > 1e-4
    for mode in ("token", "whole"):
        assert point(found, mode, 1.0)["ce_increase"] == found["modes"][mode]["full"]["ce_increase"]
        assert point(found, mode, 1.0)["mass"] == 1 and point(found, mode, 0.0)["mass"] == 0
        assert point(found, mode, 1.0)["ce_increase"] == pytest.approx(unchanged, abs=1e-5)
        assert point(found, mode, 0.0)["ce_increase"] == pytest.approx(nothing, abs=1e-5)
    assert point(found, "prefix", 1.0)["mass"] < 1  # units that were not active in the first half are left out
    assert point(found, "global", 0.0)["ce_increase"] == pytest.approx(nothing, abs=1e-5)


def layer_any(model, method, **fields):
    """As ``layer_for``, also for methods with sparsity of their own."""
    if method != "monet":
        return layer_for(model, BLOCK, method, **fields)
    from mxd.layers import LAYERS

    sparsity = {"kind": "product_topk", "heads": 2, "k": 2, "balance": 0}
    config = LAYERS[method](sparsity=sparsity, **fields).resolve(model.mlp_shape(BLOCK))
    layer = config.build(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    return layer.eval()


def test_no_subset_of_a_text_is_better_than_the_best_of_all(gpt2, plain):
    """Exhaustively, over the subsets of at most 8 units of one text; each through the splice's own mask."""
    from mxd.layers import LAYERS

    config = LAYERS["transcoder"](sparsity={"kind": "relu_l1"}, num_units=7).resolve(gpt2.mlp_shape(BLOCK))
    layer = config.build(1).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    found = subset(gpt2, layer, plain[:2], tokens=10, draws=4, modes=("whole",))
    ids = torch.from_numpy(plain[1:2])
    counted = counted_positions(plain[1:2], special_ids(gpt2.tokenizer))
    active = np.flatnonzero(dense_code(gpt2, BLOCK, layer, plain[1:2])[counted].sum(0)).tolist()
    assert 4 < len(active) <= 8
    base = log_softmax(gpt2.logits(ids).double().numpy())
    for share in (0.5, 0.25):
        increases = {}
        for kept in itertools.combinations(active, int(np.ceil(share * len(active)))):
            with spliced(gpt2, {BLOCK: layer}, mask={BLOCK: sorted({*range(7)} - {*kept})}):
                change = base - log_softmax(gpt2.logits(ids).double().numpy())
            change = np.take_along_axis(change[:, :-1], plain[1:2, 1:, None], -1)[..., 0]
            increases[kept] = change[counted[:, 1:]].mean()
        values, got = np.array(list(increases.values())), point(found, "whole", share)
        assert got["units"] == np.ceil(share * len(active)) and got["active"] == len(active)
        assert values.max() - values.min() > 1e-4
        for one in (got["ce_increase"], *got["random"]["draws"]):
            assert values.min() - 1e-6 <= one and np.abs(values - one).min() < 1e-5  # it is one of the subsets


@pytest.mark.long
def test_texts_do_not_depend_on_those_they_are_read_with(gpt2, rows):
    layer = trained_on(gpt2, BLOCK, layer_for(gpt2, BLOCK))
    asked, contexts = config(), contexts_of(rows)
    one, four = (evaluate_subset(gpt2, {"a": layer}, contexts, asked, size)["a"] for size in (1, 4))
    for mode in MODES:
        for a, b in zip(one["modes"][mode]["points"], four["modes"][mode]["points"], strict=True):
            assert a["ce_increase"] == pytest.approx(b["ce_increase"], abs=1e-5)
            assert a["units"] == b["units"] and a["mass"] == pytest.approx(b["mass"])
            if "random" in a:
                assert a["random"]["draws"] == pytest.approx(b["random"]["draws"], abs=1e-5)
    scores = [drawn("whole", torch.ones(2, 5), range(2), 0, draw) for draw in (0, 0, 1)]
    assert torch.equal(scores[0], scores[1]) and not torch.equal(scores[0], scores[2])


def test_idle_units_are_found_and_say_that_nothing_else_was_shown(gpt2, rows):
    """Where one unit carries everything, a small share is as good as all of it, and the mass says why."""
    layer = layer_for(gpt2, BLOCK)
    with torch.no_grad():
        layer.gate_bias[:] = 1.0
        layer.gate[:] = 0.0
        layer.gate_bias[5] = 1e4
    found = subset(gpt2, layer, rows, keep=(0.25,), modes=("token",))
    got, full = point(found, "token", 0.25), found["modes"]["token"]["full"]
    assert got["mass"] > 0.999 and got["ce_increase"] == pytest.approx(full["ce_increase"], abs=1e-3)
    assert got["random"]["mass"] < 0.9


def test_a_layer_with_nothing_to_choose_has_no_z(gpt2, rows):
    from mxd.layers import LAYERS

    layer = LAYERS["linear"](num_units=1).resolve(gpt2.mlp_shape(BLOCK)).build(0).eval()
    got = point(subset(gpt2, layer, rows), "whole", 0.5)
    assert got["z"] is None and got["mass"] == got["random"]["mass"] == 1


# From outside


def test_decoding_is_timed_where_it_is_asked_for(gpt2, rows):
    found = subset(gpt2, layer_for(gpt2, BLOCK), rows, timings=1, modes=("token",))
    assert [row["k"] for row in found["decoding"]] == [None, K, K // 2, K // 4]
    assert all(row["ms"] > 0 for row in found["decoding"])
    assert subset(gpt2, layer_for(gpt2, BLOCK), rows, modes=("token",))["decoding"] == []


def test_shares_are_fractions_or_decimals():
    assert numbers("--keep", "1/2,0.25, 1/8", fraction) == [0.5, 0.25, 0.125]
    for wrong in ("1/0", "half", "1e999/1"):
        with pytest.raises(MxdError, match="--keep is"):
            numbers("--keep", wrong, fraction)


def test_mistakes_are_named(gpt2, rows):
    for fields, message in (
        ({"keep": (1.5,)}, r"keep\.0: expected a number of at most 1, got 1\.5"),
        ({"draws": 1}, "draws: expected a number of at least 2, got 1"),
        ({"modes": ("text",)}, r"modes\.0: expected token"),
    ):
        with pytest.raises(MxdError, match=message):
            checked(SubsetConfig, **fields)
    with pytest.raises(MxdError, match="holds one context; expected at least 2"):
        subset(gpt2, layer_for(gpt2, BLOCK), rows[:1])
    with pytest.raises(MxdError, match="at least one trained layer"):
        evaluate_subset(gpt2, {}, contexts_of(rows), config())


def test_the_command_writes_what_it_shows_and_the_page_shows_it(trained_gpt2, tmp_path, capsys):
    data = {"source": "bundled", "split": "train", "context": 32}
    one = trained_on(trained_gpt2, BLOCK, layer_for(trained_gpt2, BLOCK), model="tiny-gpt2", data=data)
    save_layer(tmp_path / "block1", one.layer, one.provenance)
    words = ["--tokens", "64", "--keep", "1/2", "--draws", "2", "--timings", "1", "--mode", "token", "--mode", "whole"]
    code, out, err = mxd(capsys, "subset", tmp_path, *words, "--device", "cpu")
    assert code == 0, err
    document = json.loads((tmp_path / "subset.json").read_text())
    (result,) = document["results"].values()
    assert list(result["modes"]) == ["token", "whole"] and result["texts"] == 2
    half = point(result, "whole", 0.5)
    assert f"{half['ce_increase']:+.4f} ± {half['ce_increase_se']:.4f}" in out and f"{half['mass']:.1%}" in out
    assert "whole text: 50.0%" in out and "each token: 50.0%" in out  # a row says which it is
    page, twin = write_report(tmp_path)
    assert "Fewer units" in page.read_text() and "whole text, random" in page.read_text()
    assert f"{half['random']['normalized_mse']:.4f}" in twin.read_text()


def test_a_bad_share_is_one_line(capsys):
    for keep, said in (("2", "keep.0: expected a number of at most 1, got 2.0."), ("a", "--keep is 'a'; ")):
        code, out, err = mxd(capsys, "subset", "x", "--keep", keep)
        assert code == 1 and said in err and not out
