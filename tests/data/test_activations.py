"""The activation stream: the right tokens, each exactly once, shuffled, and resumable from between any two batches.

Every token a batch hands out is traced back to its place in the text: its activations are looked up among those of a
plain forward over the whole text, where no two places are alike.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice

import numpy as np
import pytest
import torch

from mxd.common.errors import MxdError
from mxd.data.activations import Cursor, _plan, activation_batches, buffer_bytes
from mxd.data.contexts import counted_positions, token_contexts
from mxd.data.prefetch import ahead
from mxd.model.loading import load_frozen

CONTEXT, BATCH = 9, 8
MASKED = (0, 1, 2, 3, 4)


@pytest.fixture(scope="module")
def rows():
    """40 contexts; about a quarter of the tokens are masked ones, in varying numbers, and context 7 is all masked."""
    rng = np.random.default_rng(0)
    rows = rng.integers(5, 4096, (40, CONTEXT), dtype=np.int32)
    hide = rng.random(rows.shape) < 0.25
    hide[:, 0] = hide[7] = True
    rows[hide] = rng.choice(MASKED, hide.sum())
    return rows


def finite(rows):
    return lambda start: iter(rows[start:])


def endless(rows):
    def blocks(start):
        while True:
            yield rows[start % len(rows)]
            start += 1

    return blocks


def batches(model, contexts, blocks=(1, 2), **options):
    options = {
        "batch_tokens": BATCH,
        "buffer_tokens": 3 * BATCH,
        "excluded_ids": MASKED,
        "forward_contexts": 2,
        **options,
    }
    return activation_batches(model, blocks, contexts, **options)


def places(model, rows, batch, block=2):
    """Return each token's place in the text, context * CONTEXT + position, by its activations; they must match."""
    x, y = (t.reshape(-1, 32) for t in model.record(torch.from_numpy(rows).long(), [block])[block])
    got_x, got_y = batch.sites[block]
    distances = torch.cdist(got_x, x, compute_mode="donot_use_mm_for_euclid_dist")
    found = distances.argmin(1)
    torch.testing.assert_close(got_x, x[found], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got_y, y[found], atol=1e-4, rtol=1e-4)
    assert ((distances < 1e-2).sum(1) == 1).all()  # no other place is near
    return found.tolist()


def same(a, b):
    return (
        torch.equal(a.ids, b.ids)
        and a.cursor == b.cursor
        and all(torch.equal(s, t) for n in a.sites for s, t in zip(a.sites[n], b.sites[n], strict=True))
        and all(torch.equal(s, t) for n in a.sites for s, t in zip(a.means[n], b.means[n], strict=True))
    )


def all_same(stream, other):
    stream, other = list(stream), list(other)
    return len(stream) == len(other) > 0 and all(map(same, stream, other))


def test_every_counted_token_appears_once_with_its_activations(family, rows):
    counted = np.flatnonzero(~np.isin(rows.reshape(-1), MASKED))
    found = []
    for batch in batches(family, finite(rows)):
        here = places(family, rows, batch)
        assert len(here) == BATCH
        assert rows.reshape(-1)[here].tolist() == batch.ids.tolist()
        found += here
    assert len(found) == len(counted) // BATCH * BATCH
    assert len(set(found)) == len(found)
    assert set(found) <= set(counted.tolist())
    assert len(found) > 24 * 5  # several windows


def test_windows_follow_the_text_and_may_cut_a_context(gpt2, rows):
    """The first window's tokens are the first 24 counted ones, and so on, shuffled; some borders cut a context."""
    counted = np.flatnonzero(~np.isin(rows.reshape(-1), MASKED)).tolist()
    stream = list(batches(gpt2, finite(rows)))
    found = [place for batch in stream for place in places(gpt2, rows, batch)]
    cuts = 0
    for first in range(0, len(found) - 24, 24):
        window = found[first : first + 24]
        assert sorted(window) == counted[first : first + 24]
        assert window != sorted(window)
        cuts += counted[first + 23] // CONTEXT == counted[first + 24] // CONTEXT
    assert cuts > 2
    assert [b.cursor.batch for b in stream[:6]] == [1, 2, 0, 1, 2, 0]
    assert any(batch.cursor.offset for batch in stream)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.97])
@pytest.mark.parametrize("tokens", [1, 8, 24, 100, 5000])
def test_windows_are_those_that_positions_counted_one_by_one_give(tokens, share):
    """Where each window ends, which positions it holds, and that no context is read before it is needed."""
    rng = np.random.default_rng(0)
    rows = rng.integers(5, 50, (60, CONTEXT), dtype=np.int32)
    rows[rng.random(rows.shape) < share] = 0
    places = [(context, at) for context in range(60) for at in range(CONTEXT) if rows[context, at] != 0]
    read = []

    def text():
        for number, row in enumerate(rows):
            read.append(number)
            yield row

    source, split, cursor, found = text(), None, Cursor(), []
    while True:
        before = cursor
        window, split = _plan(source, split, cursor, tokens, lambda ids: counted_positions(ids, [0]))
        if window is None:
            break
        cursor = window.next
        own = [(before.context + row, at) for row, at in np.argwhere(window.counted)]
        assert own == places[len(found) : len(found) + tokens]
        assert np.array_equal(window.rows, rows[before.context : before.context + len(window.rows)])
        found += own
        assert window.tokens == len(own)
        if len(found) < len(places):
            assert len(read) == found[-1][0] + 1  # up to the context of the window's last token
            here = sum(context == found[-1][0] for context, _ in found)  # its tokens that have been given
            rest = sum(context == found[-1][0] for context, _ in places) - here
            expected = (found[-1][0], here) if rest else (found[-1][0] + 1, 0)
            assert (cursor.context, cursor.offset) == expected and (split is not None) == bool(rest)
    assert found == places and len(read) == 60


def test_masked_tokens_never_appear(gpt2, rows):
    seen = torch.cat([batch.ids for batch in batches(gpt2, finite(rows))])
    assert not set(seen.tolist()) & set(MASKED)
    everything = torch.cat([batch.ids for batch in batches(gpt2, finite(rows), excluded_ids=())])
    assert sorted(everything.tolist()) == sorted(rows.reshape(-1).tolist())


def test_layers_share_the_order_of_tokens(gpt2, rows):
    for batch in islice(batches(gpt2, finite(rows)), 6):
        assert places(gpt2, rows, batch, 1) == places(gpt2, rows, batch, 2)
        assert all(t.dtype == torch.float32 for pair in batch.sites.values() for t in pair)


def test_layers_do_not_depend_on_what_else_is_recorded(gpt2, rows):
    both, alone = (list(batches(gpt2, finite(rows), blocks)) for blocks in ((0, 2), (2,)))
    assert all(torch.equal(a.sites[2][1], b.sites[2][1]) for a, b in zip(both, alone, strict=True))


def test_means_are_those_of_the_window(gpt2, rows):
    stream = list(batches(gpt2, finite(rows)))
    for i in (0, 1):
        for window in (stream[:3], stream[3:6]):
            mean = torch.cat([batch.sites[1][i] for batch in window]).mean(0)
            for batch in window:
                torch.testing.assert_close(batch.means[1][i], mean)
        assert not torch.equal(stream[0].means[1][i], stream[3].means[1][i])


def test_the_stream_is_drawn_from_the_seed(gpt2, rows):
    first, again, other = (list(batches(gpt2, finite(rows), seed=seed)) for seed in (0, 0, 1))
    assert all_same(first, again)
    assert first[0].ids.tolist() != other[0].ids.tolist()
    for n in range(0, len(first) - 3, 3):  # another order of the same tokens
        a, b = (torch.cat([batch.ids for batch in stream[n : n + 3]]) for stream in (first, other))
        assert sorted(a.tolist()) == sorted(b.tolist())


def test_the_order_is_new_in_every_window(gpt2, rows):
    """Two epochs of the same windows come in two orders."""
    text = rows[:4, 1:]  # 32 tokens
    stream = list(islice(batches(gpt2, endless(text), buffer_tokens=32, excluded_ids=()), 8))
    first, second = (torch.cat([batch.ids for batch in half]).tolist() for half in (stream[:4], stream[4:]))
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.parametrize("forward_contexts", [1, 3, 100])
def test_the_forwards_size_changes_nothing_but_rounding(gpt2, rows, forward_contexts):
    for a, b in zip(
        batches(gpt2, finite(rows)), batches(gpt2, finite(rows), forward_contexts=forward_contexts), strict=True
    ):
        assert a.ids.tolist() == b.ids.tolist()
        torch.testing.assert_close(a.sites[2][1], b.sites[2][1], atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_a_stream_resumes_from_between_any_two_batches(gpt2, rows):
    whole = list(islice(batches(gpt2, endless(rows)), 14))
    for n in range(13):
        rest = list(islice(batches(gpt2, endless(rows), start=whole[n].cursor), 13 - n))
        assert all_same(rest, whole[n + 1 :])
    assert any(batch.cursor.offset and batch.cursor.batch for batch in whole)  # inside a window that cuts a context


def test_a_resumed_stream_crosses_epochs_of_text(gpt2):
    texts = [f"{chr(97 + i)} is the letter number {i} of the alphabet, and this is sentence {i}." for i in range(12)]
    blocks = token_contexts(texts, gpt2.tokenizer, context=16, seed=4)
    whole = list(islice(batches(gpt2, blocks, excluded_ids=(0,)), 60))
    assert whole[-1].cursor.context > 2 * 12 * 20 // 16  # more than one epoch
    rest = list(islice(batches(gpt2, blocks, excluded_ids=(0,), start=whole[40].cursor), 19))
    assert all_same(rest, whole[41:])


def test_the_start_is_the_default_cursor(gpt2, rows):
    assert same(next(batches(gpt2, finite(rows))), next(batches(gpt2, finite(rows), start=Cursor())))


def test_a_finite_stream_ends_and_resumes_to_its_end(gpt2, rows):
    whole = list(batches(gpt2, finite(rows)))
    assert all_same(batches(gpt2, finite(rows), start=whole[-3].cursor), whole[-2:])
    assert not list(batches(gpt2, finite(rows), start=whole[-1].cursor))


@pytest.mark.parametrize("buffer_tokens", [1, BATCH, 2 * BATCH - 1])
def test_a_window_holds_whole_batches_and_at_least_one(gpt2, rows, buffer_tokens):
    counted = np.flatnonzero(~np.isin(rows.reshape(-1), MASKED)).tolist()
    for n, batch in enumerate(islice(batches(gpt2, finite(rows), buffer_tokens=buffer_tokens), 5)):
        assert sorted(places(gpt2, rows, batch)) == counted[n * BATCH : (n + 1) * BATCH]


def test_a_context_may_be_longer_than_several_windows(gpt2):
    rows = np.random.default_rng(1).permutation(np.arange(1, 97, dtype=np.int32)).reshape(2, 48)
    stream = list(islice(batches(gpt2, finite(rows), batch_tokens=16, buffer_tokens=16), 10))
    found = [places(gpt2, rows, batch) for batch in stream]
    masked = [place for place in range(96) if rows.reshape(-1)[place] in MASKED]
    left = [place for place in range(96) if place not in masked]
    assert [sorted(window) for window in found] == [left[n : n + 16] for n in range(0, len(left) - 15, 16)]
    assert len({tuple(np.argsort(window)) for window in found}) == len(found) == 5  # each has its own order
    for n, batch in enumerate(stream[:-1]):
        rest = batches(gpt2, finite(rows), batch_tokens=16, buffer_tokens=16, start=batch.cursor)
        assert all_same(rest, stream[n + 1 :])


def test_buffer_bytes_is_what_the_window_holds(gpt2, rows):
    window = list(islice(batches(gpt2, finite(rows), blocks=(0, 2)), 3))
    held = sum(t.numel() * t.element_size() for batch in window for pair in batch.sites.values() for t in pair)
    assert buffer_bytes([(32, 32), (32, 32)], 3 * BATCH) == held == 24 * 4 * 128
    assert buffer_bytes([(768, 768), (2048, 512)], 131_072) == 131_072 * 4 * 4096


def test_a_half_precision_model_gives_float32_batches(build_model, rows):
    model = load_frozen(build_model("llama").to(torch.bfloat16))
    batch = next(batches(model, finite(rows)))
    assert {t.dtype for pair in batch.sites.values() for t in pair} == {torch.float32}


# What would poison training is refused


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_activation_that_is_not_finite_is_refused(build_model, tokenizer, rows, value):
    module = build_model("gpt2")
    module.transformer.h[1].mlp.c_proj.bias.data[3] = value
    model = load_frozen(module, tokenizer=tokenizer)
    assert next(batches(model, finite(rows), blocks=(0,)))
    with pytest.raises(MxdError, match="block 1: an activation is not finite in 24 of 24 tokens"):
        next(batches(model, finite(rows), blocks=(1,)))


class Forgiving(torch.nn.Module):
    """An MLP whose output is finite whatever its input."""

    def forward(self, x):
        return torch.nan_to_num(x) + 1


def test_an_input_that_is_not_finite_is_refused(build_model, rows):
    model = load_frozen(build_model("gpt2"))
    model.blocks[1].mlp = Forgiving()
    model.blocks[1].ln_2.bias.data[0] = float("nan")
    with pytest.raises(MxdError, match="block 1: an activation is not finite"):
        next(batches(model, finite(rows), blocks=(1,)))


def test_a_target_of_norm_zero_is_refused_and_its_token_named(build_model, tokenizer):
    module = build_model("gpt2")
    mlp = module.transformer.h[1].mlp
    mlp.c_proj.weight.data.zero_()
    mlp.c_proj.bias.data.zero_()
    model = load_frozen(module, tokenizer=tokenizer)
    token = tokenizer(" state")["input_ids"][0]
    rows = np.full((4, 8), token, dtype=np.int32)
    with pytest.raises(MxdError, match=rf"block 1: an activation has norm zero.* token id {token} '.*Mask such tokens"):
        next(batches(model, finite(rows), blocks=(1,)))


def test_a_mask_that_leaves_nothing_is_refused(gpt2):
    masked = np.zeros((3, CONTEXT), dtype=np.int32)
    with pytest.raises(MxdError, match=r"nothing but excluded tokens; check data.exclude_special"):
        next(batches(gpt2, endless(masked)))
    assert not list(batches(gpt2, finite(masked)))


# Preparing ahead


def waiting():
    """The threads that prepare something now."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("mxd-ahead")]


@pytest.mark.parametrize("depth", [1, 3, 100])
@pytest.mark.parametrize("n", [0, 1, 3, 4, 50])
def test_ahead_yields_the_same_items_in_order(n, depth):
    assert list(ahead(iter(range(n)), depth)) == list(range(n))
    assert not waiting()


@pytest.mark.long
def test_a_stream_may_be_prepared_ahead(gpt2, rows):
    assert all_same(ahead(batches(gpt2, finite(rows)), 3), batches(gpt2, finite(rows)))
    assert all_same(batches(gpt2, lambda first: ahead(iter(rows[first:]), 5)), batches(gpt2, finite(rows)))


@pytest.mark.parametrize("depth", [1, 3, 100])
def test_ahead_raises_in_its_place(depth):
    """Items that were prepared before the failure are handed out before it is raised."""

    def items():
        yield from range(5)
        raise MxdError("the disk is gone")

    found = []
    with pytest.raises(MxdError, match="the disk is gone"):
        found.extend(iter_into(found, ahead(items(), depth)))
    assert found == list(range(5))
    assert not waiting()


def iter_into(found, stream):
    for item in stream:
        found.append(item)
    return []


@pytest.mark.parametrize(("depth", "taken"), [(1, 1), (3, 1), (3, 4)])
def test_ahead_prepares_depth_items_and_no_more_in_one_other_thread(depth, taken):
    made, threads = [], set()
    done = threading.Event()

    def items():
        for i in count():
            made.append(i)
            threads.add(threading.get_ident())
            if len(made) == taken + depth:
                done.set()
            yield i

    stream = ahead(items(), depth)
    assert made == []  # nothing before it is asked for
    assert list(islice(stream, taken)) == list(range(taken))
    assert done.wait(60)  # while nobody asks, the next ``depth`` are prepared
    stream.close()
    assert made == list(range(taken + depth))
    assert len(threads) == 1 and threads != {threading.get_ident()}


def test_an_abandoned_stream_ends_its_thread_and_prepares_nothing_more(monkeypatch):
    begun, go = threading.Event(), threading.Event()

    class Executor(ThreadPoolExecutor):
        """Lets the item under way finish as soon as the rest was told to stop."""

        def shutdown(self, wait=True, *, cancel_futures=False):
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            go.set()
            super().shutdown(wait=wait)

    monkeypatch.setattr("mxd.data.prefetch.ThreadPoolExecutor", Executor)
    made = []

    def items():
        for i in count():
            if i == 1:
                begun.set()
                assert go.wait(60)
            made.append(i)
            yield i

    stream = ahead(items(), 10)
    assert next(stream) == 0
    assert begun.wait(60)
    del stream
    assert made == [0, 1]
    assert not waiting()
