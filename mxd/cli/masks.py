"""Commands that drop units, mask them or rewrite by them, and measure what comes of it.

The options of a question are the fields of its config (``mxd/questions.py``).
"""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from mxd.cli.shared import (
    FLAT,
    HELD_OUT,
    NO_TASKS,
    HeldOut,
    LmEval,
    OutFile,
    Whole,
    app,
    check_answers,
    fraction,
    numbers,
    ranges,
    save,
    show,
)
from mxd.common.errors import MxdError
from mxd.questions import (
    DEFAULTS,
    PURGING,
    UNDER_MASK,
    AblationConfig,
    ClassifierConfig,
    EndpointConfig,
    MaskingConfig,
    PurgingConfig,
    RewriteConfig,
    SubsetConfig,
    TasksConfig,
    ToxicityConfig,
    UnderMaskConfig,
    WordsConfig,
    changed,
    checked,
)

SHARED = {"text_column", "neurons", "seed"}
"""Options of ``mask`` that domains and scores have in common."""
THRESHOLDS = ",".join(map(str, PURGING.thresholds))


@app.command
def mask(
    *checkpoints: str,
    domains: str | None = None,
    scores: str | None = None,
    by_domain: Annotated[MaskingConfig, FLAT] = DEFAULTS.masking,
    by_score: Annotated[PurgingConfig, FLAT] = PURGING,
    thresholds: str = THRESHOLDS,
    limit: Whole | None = None,
    under: Annotated[UnderMaskConfig, FLAT] = UNDER_MASK,
    tasks: LmEval = NO_TASKS,
    lm_eval_groups: str | None = None,
    together: bool = False,
    on: HeldOut = HELD_OUT,
    out: OutFile = None,
) -> None:
    """Mask the units of a topic, or those that correlate with a score, and measure what that does to the loss.

    Args:
        checkpoints: As for evaluate.
        domains: Labelled texts: a bundled set (factbook, languages), a file, folder or pattern, or a Hub dataset, as
            for probe.
        scores: Texts with a score (one number, or a list with one for each token), read likewise: units are masked that
            correlate with it over tokens more than by chance.
        by_domain: The config for domains.
        by_score: The config for scores.
        thresholds: Correlations from which on a unit is masked.
        limit: Texts of each domain, by default 100, or below and above the mean score, 500; half of them choose
            units, half are measured.
        under: The config of what else is measured under each mask.
        tasks: What is scored under each mask and its control.
        lm_eval_groups: Which domain each task is of: mmlu (57 subjects in 14 categories), or a file with the columns
            task and domain; by default each task is a domain of its own.
        together: Splice and mask all layers of a kind at once, as for evaluate, instead of each alone.
        on: Context and base model.
        out: JSON file; by default masking.json, or purging.json with --scores, in the first folder.

    Raises:
        MxdError: not exactly one of domains and scores, or options of lm-eval without its tasks.
    """
    if (domains is None) == (scores is None):
        raise MxdError("give either labelled texts, --domains factbook, or scored texts, --scores FILE.")
    if scores is not None and by_domain is not DEFAULTS.masking:
        _refuse(by_domain.model_fields_set - SHARED, "--domains")
    if scores is None:
        _refuse({"thresholds"} if thresholds != THRESHOLDS else set(), "--scores")
        _refuse(by_score.model_fields_set if by_score is not PURGING else set(), "--scores")
    under = _with_tasks(under, tasks, lm_eval_groups)
    shared: dict[str, Any] = {"under": under} | ({} if limit is None else {"limit": limit})
    by_domain = changed(by_domain, domains=domains or "", **shared)
    shared |= by_domain.model_dump(include=SHARED)
    by_score = changed(by_score, thresholds=numbers("--thresholds", thresholds, float), **shared)
    subject = on.open("mask", checkpoints)
    from mxd.evaluation import masking, purging
    from mxd.report.terminal import masking_table, purging_table, under_mask_tables

    if scores is None:
        kind, table, results = "masking", masking_table, masking.answer(subject, by_domain, together)
    else:
        kind, table, results = "purging", purging_table, purging.answer(subject, by_score, scores, together)
    for name, result in results["results"].items():
        show(table(name, result), *under_mask_tables(name, result))
    save(results, checkpoints, f"{kind}-together" if together else kind, out)


def _refuse(foreign: Set[str], other: str) -> None:
    """Refuse options that are for the other kind of text.

    Raises:
        MxdError: there is one.
    """
    if foreign:
        raise MxdError(f"--{min(foreign).replace('_', '-')} is for {other}; leave it out.")


def _with_tasks(under: UnderMaskConfig, tasks: LmEval, groups: str | None = None) -> UnderMaskConfig:
    """Return what is measured under each mask, with the tasks of lm-eval that were named."""
    if (names := tasks.names(groups)) is None:
        return under
    include = None if tasks.lm_eval_include is None else str(tasks.lm_eval_include)
    asked = checked(TasksConfig, tasks=tuple(names), limit=tasks.lm_eval_limit, include=include, groups=groups)
    return changed(under, lm_eval=asked)


@Parameter(name="*")
@dataclass(frozen=True)
class ScoredBy:
    """Who scores what is written: one of three."""

    scorer: str | None = None
    """OpenAI-compatible endpoint that scores what is written, such as https://api.example.com/v1."""
    scorer_model: str | None = None
    """Model to ask there."""
    scorer_key: str = "MXD_JUDGE_KEY"
    """Environment variable that holds the endpoint's key."""
    scorer_local: str | None = None
    """Sequence-classification model to score instead, a folder or a Hub id."""
    scorer_label: str | None = None
    """Its class whose probability is the score; of two classes by default the second."""
    scorer_words: Path | None = None
    """File of words, one a line: a text with one of them scores 1, any other 0."""

    def config(self) -> WordsConfig | ClassifierConfig | EndpointConfig:
        """Return the scorer's config.

        Raises:
            MxdError: not exactly one scorer, or one that is named only in part.
        """
        named = [self.scorer, self.scorer_local, self.scorer_words]
        if (self.scorer is None) != (self.scorer_model is None) or named.count(None) != 2:
            raise MxdError(
                "give --scorer URL with --scorer-model NAME, or --scorer-local MODEL, or --scorer-words FILE."
            )
        if self.scorer_label is not None and self.scorer_local is None:
            raise MxdError("--scorer-label names a class of --scorer-local MODEL.")
        if self.scorer is not None:
            return checked(EndpointConfig, url=self.scorer, model=self.scorer_model, key_variable=self.scorer_key)
        if self.scorer_local is not None:
            return checked(ClassifierConfig, model=self.scorer_local, label=self.scorer_label)
        return checked(WordsConfig, file=str(self.scorer_words))


NOBODY = ScoredBy()


@app.command
def toxicity(
    *checkpoints: str,
    scores: str,
    prompts: str,
    by: ScoredBy = NOBODY,
    how: Annotated[ToxicityConfig, FLAT] = DEFAULTS.toxicity,
    text_column: str = PURGING.text_column,
    score_column: str = PURGING.score_column,
    thresholds: str = THRESHOLDS,
    neurons: bool = False,
    tasks: LmEval = NO_TASKS,
    together: bool = False,
    on: HeldOut = HELD_OUT,
    out: OutFile = None,
) -> None:
    """Mask the units that follow a score, continue prompts, and have somebody score what is written.

    Each prompt is continued 25 times by sampling and once greedily, by the base model, by the splice, under each mask
    and with as many random units off.

    Args:
        checkpoints: As for evaluate.
        scores: Texts with a score, by which units are chosen; as for mask.
        prompts: Texts to continue, with a score each: a file, folder or pattern, or a Hub dataset.
        by: Who scores what is written.
        how: The question's config.
        text_column: Field that holds the text, in both files.
        score_column: Field that holds the number, in both files.
        thresholds: Correlations from which on a unit is masked.
        neurons: Measure the base MLPs' own neurons as well, a control that every replacement should beat.
        tasks: What is scored under each mask and its control: what is left of helpfulness.
        together: Splice and mask all layers of a kind at once, as for evaluate, instead of each alone.
        on: Context, held-out text and base model.
        out: JSON file; by default toxicity.json in the first folder.

    Raises:
        MxdError: not exactly one scorer, or one that is named only in part.
    """
    named = by.config()
    columns = {"text_column": text_column, "score_column": score_column, "neurons": neurons}
    under = _with_tasks(how.purging.under, tasks)
    reached = numbers("--thresholds", thresholds, float)
    by_score = changed(how.purging, under=under, thresholds=reached, **columns)
    how = changed(how, scores=scores, prompts=prompts, scorer=named, purging=by_score)
    subject = on.open("toxicity", checkpoints)
    from mxd.evaluation.toxicity import answer
    from mxd.report.terminal import toxicity_table, under_mask_tables

    results = answer(subject, how, together)
    for name, result in results["results"].items():
        show(toxicity_table(name, result), *under_mask_tables(name, result))
    save(results, checkpoints, "toxicity-together" if together else "toxicity", out)
    scored = {
        name: {"judges": {"the scorer": result["toxicity"]["base"]}} for name, result in results["results"].items()
    }
    check_answers({"results": scored})


@app.command
def ablate(
    *checkpoints: str,
    units: str | None = None,
    how: Annotated[AblationConfig, FLAT] = DEFAULTS.ablation,
    context: Whole | None = None,
    model: str | None = None,
    device: str = "auto",
    out: OutFile = None,
) -> None:
    """Drop units one by one, and measure for which classes of text the spliced model gets worse.

    As many random coefficients are dropped beside each unit.

    Args:
        checkpoints: As for evaluate; each layer is spliced in alone.
        units: Units, such as 0-99 or 3,17,40-49; by default those that fire most often.
        how: The question's config.
        context: Tokens of a text that are read; by default as in training.
        model: Base model in place of the one named in the checkpoints.
        device: auto (CUDA where there is one), cpu, cuda.
        out: JSON file; by default ablation.json in the first folder.
    """
    named = ranges("--units", units) if units is not None else None
    subject = HeldOut(context=context, model=model, device=device).open("ablate", checkpoints)
    from mxd.evaluation.ablation import answer
    from mxd.report.terminal import ablation_table, dropped_table

    results = answer(subject, how, named)
    show(*(dropped_table(name, result) for name, result in results["results"].items()))
    show(ablation_table(results["results"]))
    save(results, checkpoints, "ablation", out)


@app.command
def subset(
    *checkpoints: str,
    keep: str = "1/2,1/4,1/8",
    how: Annotated[SubsetConfig, FLAT] = DEFAULTS.subset,
    on: HeldOut = HELD_OUT,
    out: OutFile = None,
) -> None:
    """Keep only the strongest of the active units, or as many random ones, and measure the loss and the error.

    Args:
        checkpoints: As for evaluate.
        keep: Shares of the active units to keep, as fractions or decimals; all and none are measured, too.
        how: The question's config.
        on: The text and the base model.
        out: JSON file; by default subset.json in the first folder.
    """
    how = changed(how, keep=numbers("--keep", keep, fraction))
    subject = on.open("subset", checkpoints)
    from mxd.evaluation.subset import answer
    from mxd.report.terminal import subset_tables

    results = answer(subject, how)
    for name, result in results["results"].items():
        show(*subset_tables(name, result))
    save(results, checkpoints, "subset", out)


@app.command
def rewrite(
    *checkpoints: str,
    strengths: str = "1/32,1/16,1/8,1/4,1/2",
    how: Annotated[RewriteConfig, FLAT] = DEFAULTS.rewrite,
    context: Whole | None = None,
    model: str | None = None,
    device: str = "auto",
    out: OutFile = None,
) -> None:
    """Rewrite outputs for one group's texts of one label, found by their units, and measure what every group gets.

    Blind rewriting, which adds the same everywhere, and random texts' units stand beside it.

    Args:
        checkpoints: As for evaluate; each layer is spliced in alone.
        strengths: How much is added, in lengths of the layer's mean output, as fractions or decimals: one is chosen for
            each way of rewriting, or none.
        how: The question's config.
        context: Tokens of a text that are read; by default as in training.
        model: Base model in place of the one named in the checkpoints.
        device: auto (CUDA where there is one), cpu, cuda.
        out: JSON file; by default rewrite.json in the first folder.
    """
    how = changed(how, strengths=numbers("--strengths", strengths, fraction))
    subject = HeldOut(context=context, model=model, device=device).open("rewrite", checkpoints)
    from mxd.evaluation.rewrite import answer
    from mxd.report.terminal import rewrite_tables

    results = answer(subject, how)
    show(*rewrite_tables(results["results"]))
    save(results, checkpoints, "rewrite", out)
