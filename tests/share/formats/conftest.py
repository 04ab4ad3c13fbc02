"""Fixtures of the formats' tests."""

import pytest
import torch

BLOCK = 1


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def folder_of(build_model, tokenizer, tmp_path_factory):
    """A tiny random model of a family as a folder that can be loaded by name, as conversions do."""

    def save(kind, **options):
        folder = tmp_path_factory.mktemp(kind)
        build_model(kind, **options).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return save


@pytest.fixture(scope="session")
def gpt2_folder(folder_of):
    return folder_of("gpt2")


@pytest.fixture
def make():
    """Build a transcoder with random weights for a block of a model, with its provenance."""
    from mxd.artifacts.checkpoint import Trained, save_layer
    from mxd.artifacts.provenance import Provenance
    from mxd.layers import parse_layer

    def build(base, folder, block=BLOCK, method="transcoder", units=40, **fields):
        fields = {"method": method, "num_units": units, "sparsity": {"kind": "topk", "k": 5}} | fields
        layer = parse_layer(fields).resolve(base.mlp_shape(block)).build()
        for parameter in layer.parameters():
            parameter.data.normal_(std=0.3)
        if layer.config.sparsity.kind == "jumprelu":
            layer.sparsity.threshold.data.uniform_()
        if layer.config.sparsity.kind == "batch_topk":
            layer.sparsity.threshold.fill_(0.9)
        about = Provenance(
            model=base.source,
            revision=base.revision,
            block=block,
            fingerprint=base.fingerprint(block),
            excluded_ids=(0,),
            tokens=123,
            data={"source": "bundled", "context": 16},
        )
        path = save_layer(folder / f"block{block}-{layer.config.slug}", layer, about)
        return Trained(layer.eval().requires_grad_(False), about, path)

    return build
