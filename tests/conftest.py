"""Shared fixtures: tiny random models of every family, the bundled trained ones, token ids. Nothing asks the Hub.

Files of mxd are imported inside the fixtures, since its shape checks are switched on after this file is read.
"""

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

D, LAYERS, VOCABULARY = 32, 3, 4096

_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.2,
}
_KINDS = {
    "gpt2": ("gpt2", {}, 171_296),
    "neox-parallel": ("gpt_neox", {"intermediate_size": 4 * D}, 300_320),
    "neox-sequential": ("gpt_neox", {"intermediate_size": 4 * D, "use_parallel_residual": False}, 300_320),
    "llama": ("llama", {"intermediate_size": 96, "num_key_value_heads": 2}, 299_232),
}


def pytest_configure(config):
    """One thread for each of several processes that share the cores, and for whatever they start."""
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _token_folder(tmp_path_factory):
    """Tokenised text is kept for this test run only."""
    os.environ["MXD_CACHE"] = str(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="session", autouse=True)
def _no_power_cuts():
    """What tests write need not be on the disk when they go on, which takes a tenth of their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture
def signals():
    """Ctrl-C and SIGTERM act as usual for the test, also where whoever started it ignores them."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def build_model():
    """Build a tiny random Hugging Face model: one of the families, or any ``model_type`` with its own options."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def build(kind, seed=0, **options):
        model_type, own, size = _KINDS.get(kind, (kind, {}, None))
        torch.manual_seed(seed)
        config = AutoConfig.for_model(model_type, **{**_SMALL, **own, **options})
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():  # biases and norms start as constants, which would hide mistakes
            if parameter.ndim == 1:
                parameter.data.add_(0.3 * torch.randn_like(parameter))
        count = sum(p.numel() for p in model.parameters())
        assert count == size if size and not options else count < 400_000, f"{kind} has {count:,} parameters"
        return model

    return build


@pytest.fixture(scope="session")
def tokenizer():
    """The bundled tokenizer: 4,096 tokens, BOS and EOS are token 0."""
    from transformers import AutoTokenizer

    from mxd.common.bundled import bundled_path

    return AutoTokenizer.from_pretrained(bundled_path("tiny-gpt2"))


@pytest.fixture(scope="session", params=_KINDS)
def family_name(request):
    """Every family in turn, by name."""
    return request.param


@pytest.fixture(scope="session")
def family(family_name, build_model, tokenizer):
    """A frozen tiny random model of every family in turn; not to be changed for good."""
    from mxd.model.loading import load_frozen

    return load_frozen(build_model(family_name), tokenizer=tokenizer)


@pytest.fixture(scope="session")
def gpt2(build_model, tokenizer):
    """The frozen tiny random GPT-2; not to be changed for good."""
    from mxd.model.loading import load_frozen

    return load_frozen(build_model("gpt2"), tokenizer=tokenizer)


@pytest.fixture(scope="session")
def bridge(family_name, build_model):
    """A TransformerLens bridge around the same model as ``family``, by way of its own copy of the weights."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model = build_model(family_name)
    return build_bridge_from_module(model, type(model).__name__, hf_config=model.config, tokenizer=None)


@pytest.fixture(scope="session", params=["tiny-gpt2", "tiny-neox", "tiny-llama"])
def trained(request):
    """The bundled trained models in turn; not to be changed for good."""
    from mxd.model.loading import load_frozen

    return load_frozen(request.param, device="cpu")


@pytest.fixture(scope="session")
def trained_gpt2():
    """The bundled trained GPT-2; not to be changed for good."""
    from mxd.model.loading import load_frozen

    return load_frozen("tiny-gpt2", device="cpu")


@pytest.fixture(scope="session")
def ids():
    """Two sequences of 12 random token ids."""
    return torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
