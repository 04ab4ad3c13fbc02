"""SAEBench's core evaluation and its probes, and SAELens's evaluation, of an autoencoder of mxd: mxd's own numbers.

Both run offline, on one batch of the bundled text, through a TransformerLens bridge around tiny-gpt2. Contexts end in
a special token, so that the tools' KL, which they take at the last position, too, is where there is a target.
"""

from inspect import unwrap
from pathlib import Path

import numpy as np
import torch
from interop.common import check, main
from interop.layers import train
from sae_bench.custom_saes.topk_sae import TopKSAE
from sae_bench.evals.core.eval_config import CoreEvalConfig
from sae_bench.evals.core.main import run_evals as run_core
from sae_bench.evals.sparse_probing.probe_training import train_probe_on_activations
from sae_lens import evals
from sae_lens.saes import sae, topk_sae
from transformer_lens.model_bridge.sources import build_bridge_from_module

import mxd
from mxd.data.contexts import token_contexts
from mxd.data.labelled import labelled_texts
from mxd.data.text import documents
from mxd.evaluation.faithfulness import evaluate
from mxd.evaluation.probes import SAEBENCH_K, Units, k_sparse_accuracy
from mxd.layers.sae import TopKSAEConfig
from mxd.layers.sparsity import TopKConfig

BLOCK, CONTEXTS, K, UNITS, TEXTS = 2, 48, 16, 512, 100
HOOK = f"blocks.{BLOCK}.hook_mlp_out"
OF_VARIANCE = ("explained_variance", "explained_variance_legacy")


class Store:
    """What the tools take of their store of activations: one batch of tokens, as often as they ask."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.store_batch_size_prompts, self.context_size = rows.shape

    def get_batch_tokens(self, batch_size: int) -> torch.Tensor:
        """Return the batch."""
        return self.rows

    def reset_input_dataset(self) -> None:
        """Do nothing: every batch is the same."""


def peer(work: Path) -> None:
    """Evaluate one autoencoder in three ways."""
    model, other = mxd.load_frozen("tiny-gpt2", device="cpu"), mxd.load_frozen("tiny-gpt2", device="cpu")
    stream = token_contexts(documents("bundled", "test"), model.tokenizer, 64)(0)
    rows = np.stack([next(stream) for _ in range(CONTEXTS)])
    rows[:, -1] = 0
    _, y = model.record(torch.from_numpy(rows).long(), [BLOCK])[BLOCK]
    config = TopKSAEConfig(num_units=UNITS, sparsity=TopKConfig(k=K)).resolve(model.mlp_shape(BLOCK))
    layer = train(config, *[y[:, 1:-1].reshape(-1, y.shape[-1])] * 2)
    ours = evaluate(model, {"sae": {BLOCK: layer}}, lambda start: iter(rows[start:]), rows.size, [0])["sae"]
    bridge = build_bridge_from_module(
        other.module, "GPT2LMHeadModel", hf_config=other.module.config, tokenizer=model.tokenizer
    )
    bridge.enable_compatibility_mode(no_processing=True)
    store = Store(torch.from_numpy(rows).long())
    core, _ = run_core(in_sae_bench(layer), store, bridge, everything(CoreEvalConfig), ignore_tokens={0})
    lens, _ = evals.run_evals(
        in_saelens(layer),
        store,
        bridge,
        activation_scaler=evals.ActivationScaler(),
        eval_config=everything(evals.EvalConfig),
        exclude_special_tokens=[0],
    )
    compare(work, "SAEBench", "sae_bench", core, ours, ("explained_variance", "ce_loss_score"))
    compare(work, "SAELens", "saelens", lens, ours, (*OF_VARIANCE, "ce_loss_score", "kl_div_score"))
    legacy = core["reconstruction_quality"]["explained_variance_legacy"]
    same(work, "SAEBench: explained_variance_legacy", legacy, by_name(ours, "saelens")["explained_variance_legacy"])
    around, full = (theirs["model_performance_preservation"]["ce_loss_with_sae"] for theirs in (lens, core))
    differ = torch.tensor(abs(around - full) > 1e-5)
    check(work, "SAELens keeps the base model at special tokens, SAEBench does not", differ, torch.tensor(True))
    probes(work, model, layer)


def probes(work: Path, model: mxd.FrozenModel, layer: mxd.ReplacementLayer) -> None:
    """Compare the accuracy of SAEBench's sparse probes with mxd's, on the same mean pre-activations.

    SAEBench draws the texts of the other classes; of two classes with as many texts it takes all.
    """
    labelled = labelled_texts("factbook")
    of_class = {label: [n for n, one in enumerate(labelled.labels) if one == label] for label in labelled.classes[:2]}
    chosen = [n for numbers in of_class.values() for n in numbers[:TEXTS]]
    pooled = torch.stack([mean_output(model, labelled.texts[n][:300]) for n in chosen])
    train = np.tile(np.arange(TEXTS) < 0.8 * TEXTS, len(of_class))
    units = Units(pooled, layer.gates)
    columns = torch.from_numpy(units.columns(torch.arange(layer.num_units))).float()
    labels = np.array([labelled.labels[n] for n in chosen])
    sides = [
        {label: columns[torch.from_numpy(side & (labels == label))] for label in of_class} for side in (train, ~train)
    ]
    trained = unwrap(train_probe_on_activations)  # its types take the texts of one class and of two to be as many
    for k in SAEBENCH_K:
        _, theirs = trained(*sides, select_top_k=k)
        for label, accuracy in theirs.items():
            ours = k_sparse_accuracy(units, labels == label, train, seed=0)[str(k)]
            same(work, f"SAEBench: probe of {k} units, {label}", accuracy, ours)


@torch.no_grad()
def mean_output(model: mxd.FrozenModel, text: str) -> torch.Tensor:
    """Return the mean of the MLP's outputs over a text's tokens but BOS."""
    ids = [model.tokenizer.bos_token_id, *model.tokenizer(text)["input_ids"]]
    _, y = model.record(torch.tensor([ids]), [BLOCK])[BLOCK]
    return y[0, 1:].mean(0)


def everything(config: type) -> object:
    """Return a config of one batch that asks for every number compared here."""
    asked = (
        "compute_kl",
        "compute_ce_loss",
        "compute_l2_norms",
        "compute_sparsity_metrics",
        "compute_variance_metrics",
    )
    batches = {"n_eval_reconstruction_batches": 1, "n_eval_sparsity_variance_batches": 1}
    return config(batch_size_prompts=CONTEXTS, **batches, **dict.fromkeys(asked, True))


def in_sae_bench(layer: torch.nn.Module) -> TopKSAE:
    """Return the autoencoder as SAEBench's own, which takes the decoder's bias off what it reads: b_enc adds that."""
    width = layer.bias.shape[0]
    made = TopKSAE(width, UNITS, K, "tiny-gpt2", BLOCK, torch.device("cpu"), torch.float32, hook_name=HOOK)
    made.W_enc.data, made.W_dec.data, made.b_dec.data = layer.encoder.data.T, layer.decoder.data, layer.bias.data
    made.b_enc.data = layer.encoder_bias.data + layer.encoder.data @ layer.bias.data
    return made


def in_saelens(layer: torch.nn.Module) -> topk_sae.TopKSAE:
    """Return the autoencoder as SAELens's own."""
    metadata = sae.SAEMetadata(model_name="tiny-gpt2", hook_name=HOOK)
    sizes = {"d_in": layer.bias.shape[0], "d_sae": UNITS, "k": K}
    made = topk_sae.TopKSAE(topk_sae.TopKSAEConfig(**sizes, apply_b_dec_to_input=False, metadata=metadata))
    made.W_enc.data, made.W_dec.data, made.b_dec.data = layer.encoder.data.T, layer.decoder.data, layer.bias.data
    made.b_enc.data = layer.encoder_bias.data
    return made


def by_name(ours: dict, tool: str) -> dict:
    """Return mxd's numbers under a tool's names."""
    return ours["conventions"][tool] | ours["blocks"][str(BLOCK)]["conventions"][tool]


def compare(work: Path, title: str, tool: str, theirs: dict, ours: dict, names: tuple[str, ...]) -> None:
    """Compare the numbers of one tool, and its L0 and losses."""
    flat = {name: value for group in theirs.values() for name, value in group.items()}
    for name in names:
        same(work, f"{title}: {name}", flat[name], by_name(ours, tool)[name])
    same(work, f"{title}: l0", flat["l0"], ours["blocks"][str(BLOCK)]["l0"])


def same(work: Path, name: str, theirs: float, ours: float) -> None:
    """Compare two numbers."""
    got, expected = (torch.tensor(value, dtype=torch.float64) for value in (theirs, ours))
    check(work, f"{name} {ours:.4f}", got, expected, 1e-4)


main(peer)
