"""Other tools' numbers, each written out in NumPy from its definition, from logits of plainly patched models."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import log_softmax
from small_layers import contexts_of, layer_for

from mxd.evaluation.conventions import padding_of
from mxd.evaluation.faithfulness import evaluate
from mxd.metrics.conventions import CONVENTIONS

LAYER = 2
BOS, OTHER, PAD = 0, 5, 9


@pytest.fixture(scope="module")
def rows(tokenizer):
    """16 contexts of held-out text: BOS first, another special token and padding here and there."""
    from mxd.data.contexts import token_contexts
    from mxd.data.text import documents

    stream = token_contexts(documents("bundled", "validation"), tokenizer, 32)(0)
    rows = np.stack([next(stream) for _ in range(16)]).astype(np.int64)
    rows[::2, 6] = OTHER
    rows[::3, 11] = PAD
    return rows


class Padded:
    """A tokenizer with a padding token that is not among those excluded."""

    pad_token_id, eos_token_id, all_special_ids = PAD, BOS, [BOS, OTHER]

    def __getattr__(self, name):
        raise AttributeError(name)


@pytest.fixture(scope="module")
def model(trained_gpt2):
    return replace(trained_gpt2, tokenizer=Padded())


def patched(model, ids, new):
    handle = model.mlp(LAYER).register_forward_hook(lambda m, args, y: new(args[0], y))
    try:
        return model.logits(ids).numpy().astype(np.float64)
    finally:
        handle.remove()


@pytest.mark.parametrize("excluded", [[BOS, OTHER], []])
@pytest.mark.parametrize("method", ["mxd", "topk_sae"])
def test_every_tools_numbers_agree_with_numpy(model, rows, method, excluded):
    layer = layer_for(model, LAYER, method)
    with torch.no_grad():  # nearly zero, so that shares lie between 0 and 1, with a mean error
        for parameter in layer.parameters():
            parameter *= 0.3
        layer.bias += 0.05
    found = evaluate(model, {"a": {LAYER: layer}}, contexts_of(rows), rows.size, excluded, forward_contexts=5)["a"]
    site, loss = found["blocks"][str(LAYER)]["conventions"], found["conventions"]
    ids = torch.from_numpy(rows).long()
    x, y = model.record(ids, [LAYER])[LAYER]
    with torch.no_grad():
        hat = layer(x if layer.config.reads == "mlp_in" else y)
    plain = ~np.isin(rows, excluded)

    y_all, e_all = y.double().numpy().reshape(-1, y.shape[-1]), (y - hat).double().numpy().reshape(-1, y.shape[-1])
    y_some, e_some = y_all[plain.ravel()], e_all[plain.ravel()]
    about = ((y_some - y_some.mean(0)) ** 2).sum(-1)
    assert site["saelens"]["explained_variance"] == pytest.approx(1 - (e_some**2).sum() / about.sum(), rel=1e-4)
    assert site["saelens"]["explained_variance_legacy"] == pytest.approx(
        (1 - (e_some**2).sum(-1) / about).mean(), rel=1e-3
    )
    wrong = (y_some**2).sum(-1).mean() - (y_some**2).mean(0).mean() ** 2
    assert site["sae_bench"]["explained_variance"] == pytest.approx(1 - (e_some**2).sum(-1).mean() / wrong, rel=1e-4)
    everywhere = ((y_all - y_all.mean(0)) ** 2).sum()
    assert site["sparsify"]["fvu"] == pytest.approx((e_all**2).sum() / everywhere, rel=1e-4)
    dl = 1 - e_all.var(0, ddof=1).sum() / y_all.var(0, ddof=1).sum()
    assert site["dictionary_learning"]["frac_variance_explained"] == pytest.approx(dl, rel=1e-4)
    assert site["gemma_scope"]["fvu"] == found["blocks"][str(LAYER)]["fvu"]
    for tool in site:
        expected = rows.size if tool in ("sparsify", "dictionary_learning") else plain.sum()
        assert site[tool]["tokens"] == expected, tool

    keep = torch.from_numpy(plain)[..., None]
    base = log_softmax(model.logits(ids).numpy().astype(np.float64))
    ways = {
        "full": lambda _, old: hat,
        "around": lambda _, old: torch.where(keep, hat, old),
        "zero": lambda _, old: torch.zeros_like(old),
    }
    logp = {name: log_softmax(patched(model, ids, new)) for name, new in ways.items()}

    def ce(lp, mask):
        return -np.take_along_axis(lp[:, :-1], rows[:, 1:, None], -1)[..., 0][mask].mean()

    def kl(lp, mask):
        return (np.exp(base) * (base - lp)).sum(-1)[:, :-1][mask].mean()

    def share(way, mask):
        return (ce(logp["zero"], mask) - ce(logp[way], mask)) / (ce(logp["zero"], mask) - ce(base, mask))

    by_input, unpadded = plain[:, :-1], rows[:, 1:] != PAD
    assert loss["saelens"]["ce_loss_score"] == pytest.approx(share("around", by_input), rel=5e-3)
    score = 1 - kl(logp["around"], by_input) / kl(logp["zero"], by_input)
    assert loss["saelens"]["kl_div_score"] == pytest.approx(score, rel=1e-3)
    assert loss["sae_bench"]["ce_loss_score"] == pytest.approx(share("full", by_input), rel=5e-3)
    assert loss["dictionary_learning"]["frac_recovered"] == pytest.approx(share("full", unpadded), rel=5e-3)
    assert loss["gemma_scope"]["delta_loss"] == found["ce_increase"]
    assert loss["saelens"]["targets"] == loss["sae_bench"]["targets"] == by_input.sum()
    assert loss["dictionary_learning"]["targets"] == unpadded.sum() < rows[:, 1:].size


def test_conventions_differ_where_special_tokens_do(model, rows):
    """A replacement that is wrong at BOS alone: what leaves BOS out does not see it."""

    class WrongAtBos(torch.nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp, (bos, _) = mlp, model.record(torch.tensor([[BOS]]), [LAYER])[LAYER]
            self.bos = bos[0, 0]

        def forward(self, x):
            wrong = (x - self.bos).abs().amax(-1, keepdim=True) < 1e-5
            return torch.where(wrong, 50.0, 1.0) * self.mlp(x)

    found = evaluate(model, {"a": {LAYER: WrongAtBos(model.mlp(LAYER))}}, contexts_of(rows), rows.size, [BOS, OTHER])[
        "a"
    ]
    site, loss = found["blocks"][str(LAYER)]["conventions"], found["conventions"]
    assert site["saelens"]["explained_variance"] == site["sae_bench"]["explained_variance"] == 1
    assert site["sparsify"]["fvu"] > 1 and site["dictionary_learning"]["frac_variance_explained"] < 0
    assert loss["saelens"]["ce_loss_score"] == 1 and loss["sae_bench"]["ce_loss_score"] != 1
    assert loss["gemma_scope"]["delta_loss"] != 0


def test_a_constant_error_is_seen_by_all_but_dictionary_learning(model, rows):
    class Shifted(torch.nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp = mlp

        def forward(self, x):
            return self.mlp(x) + 10.0

    found = evaluate(model, {"a": {LAYER: Shifted(model.mlp(LAYER))}}, contexts_of(rows), rows.size, [BOS, OTHER])["a"]
    site = found["blocks"][str(LAYER)]["conventions"]
    assert site["dictionary_learning"]["frac_variance_explained"] == pytest.approx(1, abs=1e-6)
    assert site["sparsify"]["fvu"] > 1 and site["saelens"]["explained_variance"] < 0


def test_padding_is_eos_where_there_is_no_other(tokenizer):
    assert padding_of(Padded()) == PAD
    assert padding_of(tokenizer) == (tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0)
    assert padding_of(None) is None


def test_every_convention_is_in_the_table(model, rows):
    found = evaluate(model, {"a": {LAYER: layer_for(model, LAYER)}}, contexts_of(rows), rows.size)["a"]
    named = {metric.key.removeprefix("conventions.") for metric in CONVENTIONS}
    measured = {
        f"{tool}.{name}"
        for numbers in (found["conventions"], found["blocks"][str(LAYER)]["conventions"])
        for tool, fields in numbers.items()
        for name in fields
        if name not in ("tokens", "targets")
    }
    assert named == measured
    assert all(metric.of(found) is not None for metric in CONVENTIONS)
