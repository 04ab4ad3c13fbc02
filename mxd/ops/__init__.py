"""The hot path: pure functions on tensors, no modules and no configuration.

``topk_linear`` and ``sparse_decode`` never build the dense ``[tokens, units]`` code; their backward passes cost
``O(tokens * K * d)``. ``reference`` holds the same functions in plain dense PyTorch, the oracle of the tests.
"""

from mxd.ops.cutoff import kth_largest
from mxd.ops.experts import bilinear, grouped_linear
from mxd.ops.sparse import (
    CandidateDtype,
    Selection,
    candidate_dtype,
    gathered_linear,
    linear_at,
    metered_as,
    sparse_decode,
    topk_linear,
    use_triton,
)

__all__ = [
    "CandidateDtype",
    "Selection",
    "bilinear",
    "candidate_dtype",
    "gathered_linear",
    "grouped_linear",
    "kth_largest",
    "linear_at",
    "metered_as",
    "sparse_decode",
    "topk_linear",
    "use_triton",
]
