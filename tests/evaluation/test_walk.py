"""The way through held-out text: contexts as they come, padded texts, and a mean over contexts."""

import numpy as np
import pytest
import torch
from small_layers import contexts_of, layer_for

from mxd.evaluation.walk import Mean, Totals, next_token_logits, padded_batches, streamed
from mxd.splice import Splice, spliced


def test_the_text_is_streamed_in_whole_contexts():
    rows = np.arange(10 * 16).reshape(10, 16)
    read = []

    def blocks(start):
        for row in rows[start:]:
            read.append(row)
            yield row

    batches = list(streamed(blocks, 5 * 16 + 1, 4))
    assert [len(batch) for batch in batches] == [4, 2] and len(read) == 6
    np.testing.assert_array_equal(np.concatenate(batches), rows[:6])
    assert [len(batch) for batch in streamed(contexts_of(np.zeros((100, 16))), 10**6)] == [64, 36]


def test_standard_error_is_over_contexts() -> None:
    rng = np.random.default_rng(0)
    values, counted = rng.normal(size=(40, 7)), rng.random((40, 7)) > 0.3
    mean = Mean()
    mean.see(torch.from_numpy(values), torch.from_numpy(counted))
    assert mean.value == pytest.approx(values[counted].mean())
    resampled = []
    for _ in range(4000):
        pick = rng.integers(0, 40, 40)
        resampled.append((values[pick] * counted[pick]).sum() / counted[pick].sum())
    assert mean.standard_error == pytest.approx(np.std(resampled), rel=0.1)
    lone = Mean()
    lone.see(torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool))
    assert lone.standard_error == float("inf")


def test_sums_on_a_cpu_keep_no_tensors() -> None:
    # A tensor kept between a batch's logits and the next ones makes the heap grow by logits (6 GiB for 8,192 tokens).
    mean, totals = Mean(), Totals("error")
    for _ in range(3):
        mean.see(torch.ones(2, 4), torch.ones(2, 4, dtype=torch.bool))
        totals.add("error", torch.tensor(2.0), 2)
    assert mean._unread == [] and not any(isinstance(total, torch.Tensor) for total in totals._totals.values())
    assert mean.totals == [4.0] * 6 and mean.counts == [4] * 6 and totals["error"] == 12.0


def test_texts_of_similar_length_run_together_padded_on_the_right():
    rows = [[5, 6, 7, 8], [1], [2, 3], [4, 4, 4]]
    first, second = padded_batches(rows, [0, 1, 3], 2)
    assert (first.numbers, second.numbers) == ([1, 3], [0])
    assert first.ids.tolist() == [[1, 0, 0], [4, 4, 4]] and first.real.sum(1).tolist() == [1, 3]
    assert first.row(np.array([0, 3, 5])).tolist() == [0, 1, 1]
    assert second.ids.tolist() == [rows[0]] and second.real.all()


def test_a_splice_runs_from_its_lowest_block_on(gpt2, ids):
    splice = Splice(gpt2, {1: layer_for(gpt2, 1), 2: layer_for(gpt2, 2)})
    with gpt2.block_outputs([1]) as below:
        base = gpt2.logits(ids)
    with spliced(gpt2, splice.layers):
        whole = gpt2.logits(ids)[:, :-1]
    calls = []
    handle = gpt2.blocks[0].attn.register_forward_pre_hook(lambda module, args: calls.append(module))
    got = next_token_logits(splice, ids, below)
    handle.remove()
    assert torch.equal(got, whole) and not torch.equal(got, base[:, :-1]) and not calls
