"""Every replacement layer in each of its forms, and the kinds of sparsity: what the contract's tests run over."""

from mxd.layers import LAYERS, parse_layer

UNITS = 11

SPARSITIES = {
    "topk": {"kind": "topk", "k": 3},
    "random_k": {"kind": "random_k", "k": 4, "spread": 2},
    "relu_l1": {"kind": "relu_l1", "l1": 0.01},
    "jumprelu": {"kind": "jumprelu"},
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
    "topk_sae": {"method": "topk_sae"},
    "molt": {"method": "molt"},
    "molt-skip-rank-1": {"method": "molt", "rank": 1, "skip": True},
    "molt-rank-3": {"method": "molt", "rank": 3, "halvings": 0},
}
"""The forms of every method, as fields of its config; the first of each is its name."""

ALL_KINDS = ("mxd", "transcoder", "molt")
"""Forms that are tested with every general kind; the others with top-k alone, or with their own kinds."""


def kinds(variant):
    """The kinds of sparsity that a form is tested with."""
    own = LAYERS[VARIANTS[variant]["method"]].kinds
    general = [name for name, fields in SPARSITIES.items() if parse(variant, name, check=False).sparsity.general]
    return own or (general if variant in ALL_KINDS else ("topk",))


def parse(variant, kind, check=True):
    """The config of a form with a kind of sparsity; a form that sets its own number of units keeps it."""
    fields = {"num_units": UNITS} | VARIANTS[variant] | {"sparsity": SPARSITIES[kind]}
    return parse_layer(fields if check else {"method": "transcoder", "sparsity": SPARSITIES[kind]})


CASES = [(variant, kind) for variant in VARIANTS for kind in kinds(variant)]
"""Every pair of form and kind that is tested."""

GENERAL = [name for name, config in LAYERS.items() if not config.kinds]
"""The methods that work with every general kind of sparsity."""
