"""Base models in 8 bits: what is refused, and where bitsandbytes is installed, what they give."""

import sys

import pytest
import torch
from runs import small

from mxd.artifacts.checkpoint import load_layer
from mxd.common.errors import MxdError
from mxd.model.loading import load_frozen
from mxd.planning.memory import plan_run
from mxd.splice import spliced
from mxd.training.trainer import train


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MxdError, match=r"pip install 'mxd\[bnb\]'"):
        load_frozen("tiny-gpt2", dtype="int8", device="cpu")


def test_a_gguf_file_is_refused(tmp_path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(MxdError, match="quantized already"):
        load_frozen(tmp_path / "a.gguf", dtype="int8", device="cpu")


def test_a_device_that_the_package_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Package:
        supported_torch_devices = frozenset({"cuda"})

    monkeypatch.setitem(sys.modules, "bitsandbytes", Package)
    with pytest.raises(MxdError, match=r"does not run on 'cpu', but on cuda"):
        load_frozen("tiny-gpt2", dtype="int8", device="cpu")


def test_the_plan_counts_eight_bit_weights(tmp_path) -> None:
    whole, packed = (plan_run(small(tmp_path, model={"dtype": dtype})) for dtype in ("float16", "int8"))
    saved = whole.memory["loading"]["base model"] - packed.memory["loading"]["base model"]
    d, blocks = 128, 6
    assert saved == blocks * (12 * d * d - 4 * (3 * d + d + 4 * d + d))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("source", ["tiny-gpt2", "tiny-neox", "tiny-llama"])
def test_eight_bits_give_nearly_the_same_logits_and_can_be_trained_on(source, tmp_path) -> None:
    pytest.importorskip("bitsandbytes")
    config = small(tmp_path, model={"source": source, "dtype": "int8"})
    packed, whole = (load_frozen(source, dtype=dtype, device="cpu") for dtype in ("int8", "float32"))
    assert packed.dtype == "int8" and whole.dtype == "float32"
    ids = torch.randint(1, 4096, (2, 32), generator=torch.Generator().manual_seed(0))
    a, b = packed.logits(ids), whole.logits(ids)
    assert 0 < (a - b).norm() < 0.05 * b.norm()
    assert packed.mlp_shape(2) == whole.mlp_shape(2)
    with pytest.raises(MxdError, match="loaded in 8 bits"):
        packed.mlp_weights(2)
    planned = plan_run(config).memory["loading"]["base model"]
    held = sum(t.numel() * t.element_size() for t in (*packed.module.parameters(), *packed.module.buffers()))
    assert held == pytest.approx(planned, rel=0.02)
    trained = load_layer(train(config) / "block2-mxd-k8")
    assert trained.provenance.model_dtype == "int8"
    with spliced(packed, {2: trained}):
        assert torch.isfinite(packed.logits(ids)).all()
    with pytest.raises(MxdError):  # of another base model, as its weights are others
        spliced(whole, {2: trained}).__enter__()
