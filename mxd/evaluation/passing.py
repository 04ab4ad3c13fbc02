"""How likely is a solution among k samples? For code that was generated and tested elsewhere: mxd runs none."""

from mxd.common.errors import MxdError


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return ``1 - C(n - c, k) / C(n, k)``, the unbiased estimate of the probability that any of k samples is correct.

    From Chen et al. 2021 (arXiv 2107.03374, equation 1), as a product, so that no binomial coefficient overflows.

    Args:
        samples: ``n``, of one problem.
        correct: ``c``, how many of them are correct.
        k: how many are drawn, without putting any back.

    Raises:
        MxdError: not ``0 <= c <= n`` and ``1 <= k <= n``.
    """
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise MxdError(
            f"of {samples} samples {correct} are correct and {k} are drawn; expected c and k up to n, k >= 1."
        )
    missed = 1.0
    for drawn in range(k):
        missed *= max(samples - correct - drawn, 0) / (samples - drawn)
    return 1 - missed
