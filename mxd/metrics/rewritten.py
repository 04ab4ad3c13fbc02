"""Numbers of outputs that are rewritten by expert."""

from mxd.metrics.metric import Metric

# rewrite.json: of each way of rewriting, then of the layer

REWRITE_SCORE = Metric(
    "rewrite_score",
    "rewrite score",
    "{:+.3f}",
    "what the target's accuracy gains, less all that the accuracies of the other cells move, up or down",
    "higher",
    error="rewrite_score_se",
)
TARGET_ACCURACY = Metric(
    "target_accuracy",
    "target",
    "{:.1%}",
    "accuracy on the target, a group's texts of one label",
    "higher",
    "share",
    name="target's accuracy",
    error="target_accuracy_se",
)
OPPORTUNITY = Metric(
    "equality_of_opportunity",
    "equality of opportunity",
    "{:.3f}",
    "how far the target's accuracy is from that on texts of its label in the other groups",
    "lower",
    error="equality_of_opportunity_se",
)
STD_BIAS = Metric(
    "std_bias", "STD bias", "{:.3f}", "standard deviation of the cells' accuracies", "lower", error="std_bias_se"
)
MAX_MIN = Metric("max_min", "max-min", "{:.1%}", "the least accuracy of a cell", "higher", "share", error="max_min_se")
OVERALL = Metric(
    "accuracy",
    "overall",
    "{:.1%}",
    "accuracy on all measured texts: of little weight for a rare cell, so it may rise while the target is given up",
    "higher",
    "share",
    name="overall accuracy",
    error="accuracy_se",
)

REWRITTEN = (REWRITE_SCORE, TARGET_ACCURACY, OPPORTUNITY, STD_BIAS, MAX_MIN, OVERALL)
"""What a way of rewriting does."""

CELL_ACCURACY = Metric("cells", "accuracy", "{:.1%}", "accuracy on a cell", "higher", "share", error="cells_se")

REWRITE_GAIN = Metric(
    "gain",
    "by expert - blind",
    "{:+.3f}",
    "the rewrite score by expert less that of the best blind rewriting: the headline",
    "higher",
    error="gain_se",
)
REWRITE_GAIN_RANDOM = Metric(
    "gain_random",
    "by expert - random",
    "{:+.3f}",
    "the rewrite score by expert less that with random texts' mean codes",
    "higher",
    error="gain_random_se",
)
CONTRAST_GAIN = Metric(
    "gain_contrast",
    "by contrast - blind",
    "{:+.3f}",
    "the rewrite score by contrast less that of the best blind rewriting",
    "higher",
    error="gain_contrast_se",
)
CONTRAST_GAIN_RANDOM = Metric(
    "gain_contrast_random",
    "by contrast - random",
    "{:+.3f}",
    "the rewrite score by contrast less that of random texts' contrast",
    "higher",
    error="gain_contrast_random_se",
)
BEST_SCORE = Metric(
    "best", "best possible", "{:.3f}", "the largest rewrite score there is, 1 less the target's accuracy unchanged"
)
AUC_EXPERT = Metric(
    "separation.expert.auc",
    "AUC by expert",
    "{:.3f}",
    "how well texts of the target are told from all others by the mean code: area under the ROC curve, 0.5 is chance",
    "higher",
)
AUC_EXPERT_LEAST = Metric(
    "separation.expert.auc_least", "nearest cell", "{:.3f}", "the same from the one cell that is most like it", "higher"
)
AUC_CONTRAST = Metric("separation.contrast.auc", "AUC by contrast", "{:.3f}", "AUC by the contrast", "higher")
AUC_CONTRAST_LEAST = Metric(
    "separation.contrast.auc_least", "nearest cell, contrast", "{:.3f}", "the same from the cell most like it", "higher"
)
AUC_RANDOM = Metric("separation.random.auc", "AUC, random", "{:.3f}", "AUC by the mean codes of random other texts")
AUC_RANDOM_CONTRAST = Metric(
    "separation.random_contrast.auc", "AUC, random contrast", "{:.3f}", "AUC by the contrast of random other texts"
)
AUC_TOKEN = Metric(
    "token.auc",
    "AUC of a token",
    "{:.3f}",
    "AUC by whether a text has one token, the best of other texts: near the gates' where the target is little more",
)

REWRITE = (REWRITE_GAIN, REWRITE_GAIN_RANDOM, CONTRAST_GAIN, CONTRAST_GAIN_RANDOM, BEST_SCORE)
"""Is rewriting by expert better than blind?"""
SEPARATION = (
    AUC_EXPERT,
    AUC_EXPERT_LEAST,
    AUC_CONTRAST,
    AUC_CONTRAST_LEAST,
    AUC_RANDOM,
    AUC_RANDOM_CONTRAST,
    AUC_TOKEN,
)
"""Can units tell the target from other texts?"""
WAYS = {
    "plain": "unchanged",
    "blind": "blind",
    "expert": "by expert",
    "random": "by expert, random texts",
    "contrast": "by contrast",
    "random_contrast": "by contrast, random texts",
}
"""What the ways of rewriting are called."""
