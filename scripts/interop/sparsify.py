"""eai-sparsify reads what mxd writes, and mxd reads what its ``save_to_disk`` writes; outputs are compared."""

import os
from pathlib import Path

from interop.common import check, main


def give(work: Path) -> None:
    """Write transcoders of tiny-gpt2 for sparsify to read, with inputs and outputs."""
    from interop.layers import write_cases

    write_cases(work, "sparsify")


def peer(work: Path) -> None:
    """Load them with sparsify's own loader; then write random ones with its own save."""
    os.environ["SPARSIFY_DISABLE_TRITON"] = "1"  # it takes Triton for a sign of a GPU
    import torch
    from safetensors.torch import load_file, save_file
    from sparsify import SparseCoder, SparseCoderConfig

    cases = load_file(work / "cases.safetensors")
    x = cases["x2"]
    for name in ("tc", "stc"):
        (loaded,) = SparseCoder.load_many(str(work / name), local=True).values()
        check(work, f"it reads mxd's {name}", loaded(x, y=x).sae_out, cases[f"{name}2"], 1e-5)
    outputs = {}
    for skip in (False, True):
        torch.manual_seed(0)
        config = SparseCoderConfig(num_latents=512, k=16, transcode=True, skip_connection=skip)
        coder = SparseCoder(x.shape[1], config)
        for parameter in coder.parameters():
            parameter.data.normal_(std=0.1)
        coder.save_to_disk(work / f"saved-{skip}" / "h.2.mlp")
        outputs[f"saved-{skip}"] = coder(x, y=x).sae_out.detach()
    save_file(outputs, work / "outputs.safetensors")


def take(work: Path) -> None:
    """Import what sparsify wrote."""
    from interop.layers import check_imports

    check_imports(work, "sparsify", {"saved-False": "transcoder", "saved-True": "skip transcoder"})


main(give, peer, take)
