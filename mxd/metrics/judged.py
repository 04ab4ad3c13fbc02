"""Numbers that judges give: of what steering makes the model say, and of what units are said to mean."""

from mxd.metrics.metric import Metric

# steering.json

COHERENCE = Metric(
    "coherence",
    "coherence",
    "{:.3f}",
    "mean over units and judges: do the samples share a concept? Units that a judge did not rate are left out",
    "higher",
    error="coherence_se",
)
FLUENCY = Metric(
    "fluency", "fluency", "{:.3f}", "mean over units and judges: are they grammatical?", "higher", error="fluency_se"
)
UNSTEERED_COHERENCE = Metric(
    "unsteered_judged.coherence", "coherence, not steered", "{:.3f}", "the same of samples that are not steered"
)
UNSTEERED_FLUENCY = Metric("unsteered_judged.fluency", "fluency, not steered", "{:.3f}", "the same of these samples")
ASKED = Metric("asked", "asked", "{:.0f}", "questions to judges about units")
FAILURES = Metric("failures", "failures", "{:.0f}", "answers that could not be read; they count in no mean", "lower")
DISAGREEMENTS = Metric(
    "disagreements",
    "disagreements",
    "{:.0f}",
    "units on which the answers of one judge, asked more than once, differ much",
    "lower",
    "units",
)
AGREEMENT = tuple(
    metric
    for axis in ("coherence", "fluency")
    for metric in (
        Metric(
            f"agreement.*.{axis}.difference",
            f"{axis}, difference",
            "{:+.3f}",
            "mean over units of the first judge's number less the second's",
            error=f"agreement.*.{axis}.difference_se",
        ),
        Metric(
            f"agreement.*.{axis}.spearman",
            f"{axis}, rank correlation",
            "{:+.2f}",
            "Spearman's, of two judges' numbers over units; none where one of them always says the same",
            "higher",
        ),
        Metric(
            f"agreement.*.{axis}.chance",
            f"{axis}, chance",
            "{:.2f}",
            "within plus and minus this lie 95% of the rank correlations of judges that know nothing of one another",
        ),
    )
)

JUDGED = (COHERENCE, FLUENCY, ASKED, FAILURES, DISAGREEMENTS)
STEERING = (COHERENCE, FLUENCY, UNSTEERED_COHERENCE, UNSTEERED_FLUENCY, ASKED, FAILURES, DISAGREEMENTS)

# explaining.json

DECIDED = Metric(
    "judges.*.accuracy",
    "right",
    "{:.1%}",
    "share of a judge's answers that name the held-out text on which the unit fires, mean over units; 50% by chance",
    "higher",
    "share",
    error="judges.*.accuracy_se",
)
EXPLAINED = Metric(
    "judges.*.score",
    "score",
    "{:+.3f}",
    "twice that less 1: 0 by chance, 1 at best",
    "higher",
    error="judges.*.score_se",
)
EXPLAINED_BY_OTHER = Metric(
    "judges.*.control_score",
    "score, other unit",
    "{:+.3f}",
    "the same with the explanation of another unit of the layer",
    error="judges.*.control_score_se",
)
BEYOND_OTHER = Metric(
    "judges.*.beyond", "beyond it", "{:+.3f}", "mean over units of the difference", "higher", error="judges.*.beyond_se"
)
EXPLAINING_ASKED = Metric("judges.*.asked", "asked", "{:.0f}", "questions to the judge, half of them of the control")
UNDECIDED = Metric(
    "judges.*.failures", "failures", "{:.0f}", "answers that are neither A nor B; they count in no mean", "lower"
)

EXPLAINING = (BEYOND_OTHER, EXPLAINED, EXPLAINED_BY_OTHER, DECIDED, EXPLAINING_ASKED, UNDECIDED)
