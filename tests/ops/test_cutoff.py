"""The k-th largest of lists."""

import pytest
import torch

from mxd.ops import kth_largest


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 7, 150])
def test_the_kth_largest(dtype, k):
    lists = [torch.randn(20, 8).relu().to(dtype) * scale for scale in (1, 1e-3, 50)]
    every = torch.cat([part.flatten() for part in lists])
    assert kth_largest(lists, k) == every.sort(descending=True).values[k - 1] > 0


def test_it_is_zero_where_fewer_are_positive_and_sums_over_processes():
    numbers = torch.tensor([[3.0, 0.0, 5.0], [0.0, 1e-42, 0.0]])
    assert [kth_largest([numbers], k).item() for k in (1, 2, 3, 4, 100)] == pytest.approx([5, 3, 1e-42, 0, 0])
    assert kth_largest([numbers], 3, lambda count: 2 * count) == 3  # 5, 5, 3, 3
