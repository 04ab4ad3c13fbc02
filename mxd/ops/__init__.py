"""The hot path: pure functions on tensors, no modules and no configuration.

``topk_linear`` and ``sparse_decode`` never build the dense ``[tokens, units]`` code; their backward passes cost
``O(tokens * K * d)``. ``reference`` holds the same functions in plain dense PyTorch, the oracle of the tests.
"""

from mxd.ops.sparse import (
    CandidateDtype,
    Selection,
    candidate_dtype,
    gathered_linear,
    metered_as,
    sparse_decode,
    topk_linear,
    use_triton,
)

__all__ = [
    "CandidateDtype",
    "Selection",
    "candidate_dtype",
    "gathered_linear",
    "metered_as",
    "sparse_decode",
    "topk_linear",
    "use_triton",
]
