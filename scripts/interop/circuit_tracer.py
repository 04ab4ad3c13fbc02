"""circuit-tracer reads what mxd writes, and mxd reads what its ``to_safetensors`` writes; outputs are compared.

Release 0.5.0 does not read ``activation: topk`` of a config.yaml (its repository does): here the TopK of its own
package is put in, as the repository's loader does.
"""

from pathlib import Path

from interop.common import check, main

LAYERS = (0, 1)


def give(work: Path) -> None:
    """Write sets of blocks 0 and 1 of tiny-gpt2, with TopK and with fitted thresholds, with inputs and outputs."""
    from interop.layers import write_cases

    write_cases(work, "circuit-tracer", LAYERS)
    write_cases(work, "circuit-tracer", LAYERS, jumprelu=True)


def peer(work: Path) -> None:
    """Load them with circuit-tracer's own loader; then write random ones with its own save."""
    import torch
    import torch.nn.functional as F
    import yaml
    from circuit_tracer.transcoder.activation_functions import JumpReLU, TopK
    from circuit_tracer.transcoder.single_layer_transcoder import SingleLayerTranscoder, TranscoderSet
    from circuit_tracer.utils.caching import load_transcoders_from_cache
    from safetensors.torch import load_file, save_file

    cpu = torch.device("cpu")
    cases = load_file(work / "cases.safetensors")
    for name in ("tc", "stc", "tc-jumprelu", "stc-jumprelu"):
        loaded, config = load_transcoders_from_cache(name, cache_dir=work, device=cpu, dtype=torch.float32)
        for layer in LAYERS:
            if config["activation"] == "topk":
                loaded[layer].activation_function = TopK(config["k"])
            out = loaded[layer](cases[f"x{layer}"]).detach()
            check(work, f"it reads mxd's {name}, block {layer}", out, cases[f"{name}{layer}"], 1e-5)
    d, n, outputs = cases["x0"].shape[1], 512, {}
    for name, activation in (("relu", F.relu), ("jumprelu", JumpReLU(torch.rand(n)))):
        made = {
            i: SingleLayerTranscoder(d, n, activation, i, name == "relu", device=cpu, dtype=torch.float32)
            for i in LAYERS
        }
        for layer in LAYERS:
            for key, parameter in made[layer].named_parameters():
                if "threshold" not in key:
                    parameter.data.normal_(std=0.1)
            outputs[f"saved-{name}{layer}"] = made[layer](cases[f"x{layer}"]).detach()
        TranscoderSet(made, "mlp.hook_in", "hook_mlp_out").to_safetensors(str(work / f"saved-{name}"))
        settings = {
            "model_name": "tiny-gpt2",
            "model_kind": "transcoder_set",
            "feature_input_hook": "mlp.hook_in",
            "feature_output_hook": "hook_mlp_out",
        }
        (work / f"saved-{name}" / "config.yaml").write_text(yaml.safe_dump(settings))
    save_file(outputs, work / "outputs.safetensors")


def take(work: Path) -> None:
    """Import what circuit-tracer wrote."""
    from safetensors.torch import load_file

    import mxd
    from mxd.share.formats import import_layers

    cases, outputs = load_file(work / "cases.safetensors"), load_file(work / "outputs.safetensors")
    for name in ("relu", "jumprelu"):
        imported = import_layers(work / f"saved-{name}", work / f"imported-{name}", "circuit-tracer", device="cpu")
        for layer, item in zip(LAYERS, imported, strict=True):
            out = mxd.load_layer(item.path).layer(cases[f"x{layer}"])
            check(work, f"mxd reads its {name} set, block {layer}", out, outputs[f"saved-{name}{layer}"], 1e-5)


main(give, peer, take)
