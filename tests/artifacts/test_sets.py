"""Layers make sets by what they are, whatever their folders are called."""

from pathlib import Path

import pytest

from mxd.artifacts.checkpoint import Trained
from mxd.artifacts.provenance import Provenance
from mxd.artifacts.sets import only_set, sets_of
from mxd.common.errors import MxdError
from mxd.layers import parse_layer


def trained(block, method="transcoder", k=4, **fields):
    config = parse_layer({"method": method, "d_in": 4, "d_out": 4, "num_units": 8, **fields, "sparsity": sparsity(k)})
    return Trained(config.build(), Provenance(model="m", revision=None, block=block, fingerprint="f"), Path())


def sparsity(k):
    return {"kind": "topk", "k": k} if isinstance(k, int) else {"kind": k}


def blocks(layers):
    return {name: list(members) for name, members in sets_of(layers).items()}


def test_a_run_holds_a_set_for_each_method_form_sparsity_and_k():
    kinds = {
        "tc-k4": {},
        "tc-k8": {"k": 8},
        "stc-k4": {"skip": True},
        "tc-l1-0.001": {"k": "relu_l1"},
        "m-tc-0.5-0.5-k4": {"groups": [0.5, 0.5]},
    }
    layers = {f"r/{n}-{block}": trained(block, **kinds[n]) for block in (10, 2) for n in kinds}
    found = sets_of(layers)
    assert {name: list(members) for name, members in found.items()} == {name: [2, 10] for name in kinds}
    assert all(found[n][block] is layers[f"r/{n}-{block}"] for n in kinds for block in (2, 10))


def test_layers_of_different_blocks_are_one_set_whatever_they_are():
    mixed = {"a/block3": trained(3), "b/block1": trained(1, k=8)}
    assert blocks(mixed) == {"together": [1, 3]}
    assert blocks({"a/block3": trained(3), "b/block1": trained(1)}) == {"tc-k4": [1, 3]}


def test_the_same_kind_twice_is_told_apart_by_the_runs():
    layers = {f"{run}/block{n}": trained(n) for run in ("org/before", "after") for n in (0, 1)}
    assert blocks(layers) == {"org/before/tc-k4": [0, 1], "after/tc-k4": [0, 1]}


def test_two_of_a_kind_in_one_run_are_refused():
    layers = {f"r/{name}": trained(1, num_units=units) for name, units in (("a", 8), ("b", 9))} | {"r/c": trained(2)}
    with pytest.raises(MxdError, match=r"two checkpoints replace block 1, r/a and r/b; give one\.$"):
        sets_of(layers)


def test_one_set_is_chosen_by_its_name():
    several = sets_of({f"r/{k}": trained(1, k=k) for k in (4, 8)})
    assert only_set(several, "tc-k8") is several["tc-k8"]
    assert only_set({"x": several["tc-k4"]}) is several["tc-k4"]
    with pytest.raises(MxdError, match="there are several sets of layers; choose one with --set: tc-k4, tc-k8"):
        only_set(several)
    with pytest.raises(MxdError, match="there is no set of layers 'tc'; choose one with --set: tc-k4, tc-k8"):
        only_set(several, "tc")
