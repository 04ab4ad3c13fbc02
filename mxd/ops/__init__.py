"""The hot path: pure functions on tensors, no modules and no configuration.

``topk_linear`` and ``sparse_decode`` never build the dense ``[tokens, units]`` code; their backward passes cost
``O(tokens * K * d)``. ``low_rank_mixture`` and ``nested_decode`` stand on them. ``reference`` holds the same functions
in plain dense PyTorch, the oracle of the tests.
"""

from mxd.common.hardware import exact_products
from mxd.ops.cutoff import kth_largest
from mxd.ops.dense import DenseDtype, add_product, dense_dtype, linear, product, rounded_products
from mxd.ops.devices import CandidateDtype, candidate_dtype, metered_as, use_triton
from mxd.ops.experts import bilinear, experts_into_rows, grouped_linear, rows_into_experts
from mxd.ops.low_rank import low_rank_mixture
from mxd.ops.nested import nested_decode
from mxd.ops.sparse import Selection, linear_at, sparse_decode, topk_linear

__all__ = [
    "CandidateDtype",
    "DenseDtype",
    "Selection",
    "add_product",
    "bilinear",
    "candidate_dtype",
    "dense_dtype",
    "exact_products",
    "experts_into_rows",
    "grouped_linear",
    "kth_largest",
    "linear",
    "linear_at",
    "low_rank_mixture",
    "metered_as",
    "nested_decode",
    "product",
    "rounded_products",
    "rows_into_experts",
    "sparse_decode",
    "topk_linear",
    "use_triton",
]
