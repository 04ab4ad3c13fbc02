"""mxd's side of the checks of formats: transcoders of tiny-gpt2 to write, and imports to compare."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from interop.common import check
from safetensors.torch import load_file, save_file
from torch import Tensor

import mxd
from mxd.artifacts.checkpoint import Trained
from mxd.artifacts.provenance import Provenance
from mxd.data.activations import activation_batches
from mxd.data.contexts import special_ids, token_contexts
from mxd.data.text import documents
from mxd.layers.losses import normalized_mse
from mxd.layers.sparsity import TopKConfig
from mxd.layers.transcoder import TranscoderConfig
from mxd.share.formats import export_layers, import_layers

K, UNITS, TOKENS = 8, 512, 2048


def write_cases(work: Path, tool: str, layers: Sequence[int] = (2,), jumprelu: bool = False) -> None:
    """Write ``tc`` and ``stc`` for a tool, a layer for each block; inputs and outputs into ``cases.safetensors``."""
    base = mxd.load_frozen("tiny-gpt2", device="cpu")
    blocks = token_contexts(documents("bundled", "test"), base.tokenizer)
    batch = next(activation_batches(base, layers, blocks, TOKENS, TOKENS, special_ids(base.tokenizer)))
    cases = {f"x{layer}": x for layer, (x, _) in batch.sites.items()}
    for skip, prefix in ((False, "tc"), (True, "stc")):
        name = f"{prefix}-jumprelu" if jumprelu else prefix
        trained = {}
        for layer in layers:
            x, y = batch.sites[layer]
            config = TranscoderConfig(num_units=UNITS, skip=skip, sparsity=TopKConfig(k=K))
            built = train(config.resolve(base.mlp_shape(layer)), x, y)
            about = Provenance(model="tiny-gpt2", revision=None, block=layer, fingerprint=base.fingerprint(layer))
            trained[f"{name}{layer}"] = Trained(built, about, Path())
        written = export_layers(trained, base, lambda: blocks, work / name, tool, jumprelu, tokens=16_384)
        if all(item.loss is None for item in written):
            outputs = {key: t.layer(cases[f"x{t.provenance.block}"]) for key, t in trained.items()}
        else:  # what was written is another function; mxd's own reader says which
            for item in written:
                print(f"{item.source}: {item.loss.line}" if item.loss else item.source)
            imported = import_layers(work / name, work / f"again-{name}", tool, "tiny-gpt2", device="cpu")
            again = [mxd.load_layer(item.path) for item in imported]
            outputs = {f"{name}{t.provenance.block}": t.layer(cases[f"x{t.provenance.block}"]) for t in again}
        cases |= outputs
    old = load_file(work / "cases.safetensors") if (work / "cases.safetensors").exists() else {}
    save_file(old | cases, work / "cases.safetensors")


def train(config: TranscoderConfig, x: Tensor, y: Tensor) -> torch.nn.Module:
    """Return a transcoder trained for a moment, so that activations and sparsity are as in use."""
    layer = config.build().train()
    layer.initialise(x.mean(0), y.mean(0))
    optimizer = torch.optim.Adam(layer.parameters(), lr=2e-3)
    for _ in range(60):
        optimizer.zero_grad()
        normalized_mse(layer(x), y).backward()
        optimizer.step()
    return layer.eval().requires_grad_(False)


def check_imports(work: Path, tool: str, saved: Mapping[str, str], limit: float = 1e-5) -> None:
    """Import what a tool saved; ``outputs.safetensors`` has, by the same names, what the tool makes of ``x2``."""
    x, outputs = load_file(work / "cases.safetensors")["x2"], load_file(work / "outputs.safetensors")
    for name, title in saved.items():
        (imported,) = import_layers(work / name, work / f"imported-{name}", tool, "tiny-gpt2", block=2, device="cpu")
        check(work, f"mxd reads its {title}", mxd.load_layer(imported.path).layer(x), outputs[name], limit)
