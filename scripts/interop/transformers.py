"""Earlier transformers, without mxd: an exported model gives the spliced model's logits and greedy tokens there."""

import os
import sys
from pathlib import Path

import torch
from interop.common import check, main
from safetensors.torch import load_file, save_file

MODELS = ("tiny-gpt2", "tiny-neox", "tiny-llama")
GREEDY = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False, "pad_token_id": 0}


def give(work: Path) -> None:
    """Export spliced models, and note what they answer."""
    import mxd
    from mxd.layers import parse_layer

    for name in MODELS:
        model = mxd.load_frozen(name, device="cpu")
        layers = {}
        for number, method in ((1, "transcoder"), (2, "mxd"), (4, "cp_mumoe")):
            fields = {"method": method, "num_units": 64, "sparsity": {"kind": "topk", "k": 4}}
            layer = layers[number] = parse_layer(fields).resolve(model.mlp_shape(number)).build()
            for parameter in layer.parameters():
                parameter.data.normal_(std=0.2, generator=torch.Generator().manual_seed(number))
        ids = torch.tensor([[0, *model.tokenizer("The President of the United States")["input_ids"]]])
        mxd.export_model(model, layers, work / name)
        with mxd.spliced(model, layers):
            logits = model.logits(ids)
            text = model.module.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
        save_file({"ids": ids, "logits": logits, "text": text}, work / f"{name}.safetensors")


def peer(work: Path) -> None:
    """Load them with a transformers of its own."""
    os.environ["HF_MODULES_CACHE"] = str(work / "code")
    sys.modules["mxd"] = None  # type: ignore[assignment]
    from transformers import AutoModelForCausalLM, __version__

    for name in MODELS:
        expected = load_file(work / f"{name}.safetensors")
        model = AutoModelForCausalLM.from_pretrained(work / name, trust_remote_code=True)
        ids = expected["ids"]
        with torch.no_grad():
            logits = model(ids).logits
            text = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
        check(work, f"{__version__} {name}: logits", logits, expected["logits"], 1e-5)
        check(work, f"{__version__} {name}: 32 greedy tokens", text, expected["text"])
        model = AutoModelForCausalLM.from_pretrained(work / name, trust_remote_code=True, dtype=torch.bfloat16)
        kinds = {p.dtype == torch.float32 for n, p in model.named_parameters() if ".mlp.layer." in n}
        check(work, f"{__version__} {name}: layers in float32", torch.tensor(kinds == {True}), torch.tensor(True))


if __name__ == "__main__":
    main(give, peer)
