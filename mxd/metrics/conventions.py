"""What other tools call faithfulness, with their names (mxd/evaluation/conventions.py)."""

from mxd.metrics.metric import Metric

# faithfulness.json: the same as other tools define it, with their names (mxd/evaluation/conventions.py)

CONVENTIONS = (
    Metric(
        "conventions.saelens.explained_variance",
        "SAELens EV",
        "{:.3f}",
        "1 - FVU, without special tokens; ours is the same",
        "higher",
        "share",
    ),
    Metric(
        "conventions.saelens.explained_variance_legacy",
        "SAELens EV, legacy",
        "{:.3f}",
        "and SAEBench's: mean over tokens of 1 - ||e||² / ||y - mean||²; tokens near the mean weigh most",
        "higher",
        "share",
    ),
    Metric(
        "conventions.saelens.ce_loss_score",
        "SAELens CE score",
        "{:.1%}",
        "loss recovered with the base MLP at special tokens but zero-ablation everywhere; positions are left out by "
        "their own token",
        "higher",
        "share",
    ),
    Metric(
        "conventions.saelens.kl_div_score",
        "SAELens KL score",
        "{:.1%}",
        "the same of the KL divergence from the base model",
        "higher",
        "share",
    ),
    Metric(
        "conventions.sae_bench.explained_variance",
        "SAEBench EV",
        "{:.3f}",
        "1 - FVU, with a variance that is nearly about zero, so it is larger where outputs have a mean",
        "higher",
        "share",
    ),
    Metric(
        "conventions.sae_bench.ce_loss_score",
        "SAEBench CE score",
        "{:.1%}",
        "loss recovered with the replacement everywhere; positions are left out by their own token",
        "higher",
        "share",
    ),
    Metric(
        "conventions.sparsify.fvu",
        "sparsify FVU",
        "{:.3f}",
        "FVU at every token, special ones too",
        "lower",
        "share",
    ),
    Metric(
        "conventions.dictionary_learning.frac_variance_explained",
        "dictionary_learning EV",
        "{:.3f}",
        "1 - var(e) / var(y) at every token, which does not see a constant error",
        "higher",
        "share",
    ),
    Metric(
        "conventions.dictionary_learning.frac_recovered",
        "dictionary_learning recovered",
        "{:.1%}",
        "loss recovered with the replacement everywhere, over every target but padding",
        "higher",
        "share",
    ),
    Metric(
        "conventions.gemma_scope.fvu",
        "Gemma Scope FVU",
        "{:.3f}",
        "FVU without special tokens; ours is the same",
        "lower",
        "share",
    ),
    Metric(
        "conventions.gemma_scope.delta_loss",
        "Gemma Scope delta loss",
        "{:+.4f}",
        "the CE increase, without special tokens; ours is the same",
        "lower",
        "nats",
    ),
)
"""The same as other tools define it."""
