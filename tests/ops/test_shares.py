"""Work dealt out to threads: what comes out, in which modes, and that torch's own threads stay as they are."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import pytest
import torch

from mxd.ops import low_rank_mixture, reference, shares
from mxd.ops.shares import MOST, in_shares

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 3, MOST + 3])
def threads(request):
    """Torch's threads, set back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("costs", [[], [5], [1, 9, 1, 4, 4, 2, 7, 7, 3, 1, 1, 1, 1]])
def test_each_number_is_in_one_share(threads, costs):
    dealt = in_shares(sorted, costs, CPU)
    assert len(dealt) == max(1, min(threads, MOST, len(costs)))
    assert sorted(number for share in dealt for number in share) == list(range(len(costs)))
    loads = [sum(costs[number] for number in share) for share in dealt]
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_other_devices_have_one_share(threads):
    assert in_shares(list, [1] * 5, torch.device("meta")) == [[0, 1, 2, 3, 4]]


def test_threads_share_torch_threads_and_leave_the_rest(threads):
    inside = in_shares(lambda _: torch.get_num_threads(), [1] * 40, CPU)
    assert inside == [max(1, threads // MOST)] * min(threads, MOST)
    assert torch.get_num_threads() == threads


def test_threads_that_start_later_get_all_of_them(threads):
    shares._pool.cache_clear()
    in_shares(len, [1] * 40, CPU)
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == threads


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_work_runs_in_the_mode_of_its_caller(threads, mode):
    with mode():
        asked = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        assert set(in_shares(lambda _: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()), [1] * 9, CPU)) == {
            asked
        }


def test_an_error_of_one_share_is_raised(threads):
    with pytest.raises(ZeroDivisionError):
        in_shares(lambda share: 1 // (7 not in share), [1] * 9, CPU)


def test_a_mixture_is_the_reference_and_the_same_each_time(threads):
    torch.manual_seed(0)
    ranks = [4, 4, 3, 2, 2, 1, 5, 1, 1]
    firsts = [0, *accumulate(ranks)]
    x, values, down, up = (
        torch.randn(size, dtype=torch.float64, requires_grad=True)
        for size in ((6, 4), (6, 3), (firsts[-1], 4), (firsts[-1], 5))
    )
    indices = torch.rand(6, 8).argsort(1)[:, :3]  # nobody uses the last unit

    def outputs(function):
        out = function(x, values, indices, down, up, firsts)
        return [out, *torch.autograd.grad(out.square().sum(), (x, values, down, up))]

    first, second = outputs(low_rank_mixture), outputs(low_rank_mixture)
    for got, again, expected in zip(first, second, outputs(reference.low_rank_mixture), strict=True):
        torch.testing.assert_close(got, expected)
        assert torch.equal(got, again)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_starts_threads_of_its_own():
    code = """
import os, torch
from mxd.ops.shares import in_shares
torch.set_num_threads(2)
print(in_shares(sum, [1] * 4, torch.device("cpu")), flush=True)
if (child := os.fork()) == 0:
    print(in_shares(sum, [1] * 4, torch.device("cpu")), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.splitlines() == ["[2, 4]"] * 2, run.stderr
