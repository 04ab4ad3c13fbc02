"""sae-lens reads what mxd writes, and mxd reads what its ``save_model`` writes; outputs are compared."""

from pathlib import Path

from interop.common import check, main


def give(work: Path) -> None:
    """Write transcoders of tiny-gpt2 for SAELens to read, thresholds fitted, with inputs and outputs."""
    from interop.layers import write_cases

    write_cases(work, "saelens")


def peer(work: Path) -> None:
    """Load them with SAELens's own loader; then write random ones of every architecture with its own save."""
    import torch
    from sae_lens import SAE
    from sae_lens.saes import sae, transcoder
    from safetensors.torch import load_file, save_file

    cases = load_file(work / "cases.safetensors")
    x = cases["x2"]
    for name in ("tc", "stc"):
        loaded = SAE.load_from_disk(work / name / "blocks.2.mlp")
        check(work, f"it reads mxd's {name} as a {loaded.cfg.architecture()}", loaded(x), cases[f"{name}2"], 1e-5)
    outputs = {}
    for kind in ("Transcoder", "SkipTranscoder", "JumpReLUTranscoder", "JumpReLUSkipTranscoder"):
        metadata = sae.SAEMetadata(
            model_name="tiny-gpt2", hook_name="blocks.2.mlp.hook_in", hook_name_out="blocks.2.hook_mlp_out"
        )
        sizes = {"d_in": x.shape[1], "d_sae": 512, "d_out": x.shape[1]}
        config = getattr(transcoder, f"{kind}Config")(**sizes, apply_b_dec_to_input=False, metadata=metadata)
        torch.manual_seed(0)
        made = getattr(transcoder, kind)(config)
        for name, parameter in made.named_parameters():
            parameter.data.normal_(std=0.1)
            if name == "threshold":
                parameter.data.abs_()
        made.save_model(work / f"saved-{config.architecture()}")
        outputs[f"saved-{config.architecture()}"] = made(x).detach()
    save_file(outputs, work / "outputs.safetensors")


def take(work: Path) -> None:
    """Import what SAELens wrote."""
    from interop.layers import check_imports

    saved = sorted(work.glob("saved-*"))
    check_imports(work, "saelens", {path.name: path.name.removeprefix("saved-") for path in saved})


main(give, peer, take)
