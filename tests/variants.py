"""Every replacement layer in each of its forms, and the kinds of sparsity: what the contract's tests run over."""

import pytest
from pydantic import TypeAdapter

from mxd.layers import LAYERS, parse_layer
from mxd.layers.sparsity import AnySparsity

UNITS = 12

SPARSITIES = {
    "topk": {"kind": "topk", "k": 3},
    "random_k": {"kind": "random_k", "k": 4, "spread": 2},
    "batch_topk": {"kind": "batch_topk", "k": 3},
    "group_max": {"kind": "group_max", "k": 3},
    "relu_l1": {"kind": "relu_l1", "l1": 0.01},
    "jumprelu": {"kind": "jumprelu", "l0": 3},
    "softmax": {"kind": "softmax", "norm": "batch"},
    "entmax": {"kind": "entmax"},
    "levels": {"kind": "levels", "levels": [3, 2]},
    "topk_softmax": {"kind": "topk_softmax", "k": 3},
    "product_topk": {"kind": "product_topk", "heads": 2, "k": 2, "balance": 0},
    "product_quantile": {"kind": "product_quantile", "heads": 2, "k": 2, "balance": 0},
    "pair_topk": {"kind": "pair_topk", "heads": 2, "k": 3},
    "always": {"kind": "always"},
}
"""One of each kind, by name."""

VARIANTS = {
    "mxd": {"method": "mxd"},
    "mxd-glu": {"method": "mxd", "glu": True, "activation": "silu"},
    "mxd-relu": {"method": "mxd", "activation": "relu", "hidden": 3},
    "transcoder": {"method": "transcoder"},
    "transcoder-skip": {"method": "transcoder", "skip": True},
    "transcoder-groups": {"method": "transcoder", "groups": (0.25, 0.25, 0.5)},
    "cp_mumoe": {"method": "cp_mumoe"},
    "cp_mumoe-glu": {"method": "cp_mumoe", "glu": True, "activation": "gelu", "rank": 3},
    "cp_mumoe-bias": {"method": "cp_mumoe", "expert_bias": True, "start": "replicate"},
    "mxd-bias": {"method": "mxd", "expert_bias": True},
    "tr_mumoe": {"method": "tr_mumoe"},
    "tr_mumoe-bias": {"method": "tr_mumoe", "rank_1": 2, "rank_2": 3, "expert_bias": True, "start": "replicate"},
    "tt_mumoe": {"method": "tr_mumoe", "rank_1": 1},
    "tucker_mumoe": {"method": "tucker_mumoe"},
    "tucker_mumoe-bias": {"method": "tucker_mumoe", "expert_bias": True, "start": "replicate", "rank_units": 3},
    "mxd-levels": {"method": "mxd", "num_units": 12, "levels": [4, 3]},
    "cp_mumoe-levels": {"method": "cp_mumoe", "num_units": 12, "levels": [4, 3], "expert_bias": True},
    "tr_mumoe-levels": {"method": "tr_mumoe", "num_units": 12, "levels": [4, 3], "start": "replicate", "rank_1": 3},
    "tucker_mumoe-levels": {"method": "tucker_mumoe", "num_units": 12, "levels": [4, 3]},
    "moe": {"method": "moe"},
    "moe-bias": {"method": "moe", "expert_bias": True},
    "topk_sae": {"method": "topk_sae"},
    "mumoe_block": {"method": "mumoe_block"},
    "mumoe_block-ln": {"method": "mumoe_block", "layer_norm": True, "start": "replicate", "rank": 4},
    "monet": {"method": "monet", "num_units": 25, "expert_width": 4, "activation": "relu2"},
    "monet-vd": {"method": "monet", "num_units": 25, "expert_width": 4, "decompose": "vertical", "key_input": "halves"},
    "peer": {"method": "peer", "num_units": 25},
    "peer-query": {"method": "peer", "num_units": 25, "query": "linear"},
    "smoe": {"method": "smoe", "expert_width": 3},
    "mov": {"method": "mov"},
    "mov-glu": {"method": "mov", "glu": True, "activation": "silu"},
    "mov-bias": {"method": "mov", "expert_bias": True},
    "linear": {"method": "linear", "num_units": 1},
    "low_rank": {"method": "low_rank", "num_units": 1, "rank": 3},
    "molt": {"method": "molt"},
    "molt-skip-rank-1": {"method": "molt", "rank": 1, "skip": True},
    "molt-rank-3": {"method": "molt", "rank": 3, "halvings": 0},
}
"""The forms of every method, as fields of its config; the first of each is its name."""

ALL_KINDS = ("mxd", "transcoder")
"""Forms that are tested with every general kind; the others with top-k alone, or with their own kinds."""

SOME_KINDS = {"molt": ("topk", "relu_l1")}
"""Forms whose dense codes take another way than their lists."""


parse_sparsity = TypeAdapter(AnySparsity).validate_python


def kinds(variant):
    """The kinds of sparsity that a form is tested with."""
    own = ("levels",) if "levels" in VARIANTS[variant] else LAYERS[VARIANTS[variant]["method"]].kinds
    general = [name for name, fields in SPARSITIES.items() if parse_sparsity(fields).general]
    return own or (general if variant in ALL_KINDS else SOME_KINDS.get(variant, ("topk",)))


def parse(variant, kind):
    """The config of a form with a kind of sparsity; a form that sets its own number of units keeps it."""
    return parse_layer({"num_units": UNITS} | VARIANTS[variant] | {"sparsity": SPARSITIES[kind]})


CASES = [(variant, kind) for variant in VARIANTS for kind in kinds(variant)]
"""Every pair of form and kind that is tested."""

FEW_UNITS_OR_NO_SUM = ("moe", "mumoe_block")

GENERAL = [name for name, config in LAYERS.items() if not config.kinds and name not in FEW_UNITS_OR_NO_SUM]
"""The methods with as many units as one likes that add up, and that work with every general kind of sparsity."""

SOME_GENERAL = [
    pytest.param(name, marks=() if number % 3 == 0 else pytest.mark.long) for number, name in enumerate(GENERAL)
]
"""The same; a third of them in the short run."""
