"""Commands that measure and show: a command for each question, compare, report."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from mxd.cli.shared import HELD_OUT, HeldOut, app, numbers, ranges, save, say, show, show_faithfulness
from mxd.common.errors import MxdError
from mxd.questions import (
    DEFAULTS,
    PURGING,
    FaithfulnessConfig,
    GenerationConfig,
    MaskingConfig,
    ProbingConfig,
    PurgingConfig,
    SteeringConfig,
    StructureConfig,
    UnitsConfig,
    checked,
)


@app.command
def evaluate(
    *checkpoints: str,
    together: bool = False,
    tokens: int = DEFAULTS.faithfulness.tokens,
    seed: int = DEFAULTS.faithfulness.seed,
    on: HeldOut = HELD_OUT,
    out: Path | None = None,
    lm_eval: str | None = None,
    lm_eval_limit: int | None = None,
    lm_eval_include: Path | None = None,
) -> None:
    """Splice trained layers into their base model and measure faithfulness on held-out text.

    Args:
        checkpoints: layer folders, run folders (every layer in them), or Hub references org/name[/folder][@revision].
        together: splice all of them at once, instead of each alone.
        tokens: positions to read.
        seed: draws the order of the text, and so the part that is read.
        on: the text and the base model.
        out: JSON file; by default faithfulness.json in the first folder (faithfulness-together.json with --together),
            and for a Hub reference faithfulness-NAME.json in this one.
        lm_eval: tasks of the lm-evaluation-harness to score the base and each splice on, too: arc_easy,hellaswag. Needs
            pip install 'mxd[lm-eval]'.
        lm_eval_limit: documents of each task to use, at most.
        lm_eval_include: folder with task files of your own.
    """
    how = checked(FaithfulnessConfig, tokens=tokens, seed=seed)
    if lm_eval is None and (lm_eval_limit is not None or lm_eval_include is not None):
        raise MxdError("--lm-eval-limit and --lm-eval-include need --lm-eval TASKS.")
    from mxd.evaluation.answers import faithfulness
    from mxd.evaluation.harness import find_tasks

    tasks = find_tasks(lm_eval.split(","), lm_eval_limit, lm_eval_include) if lm_eval is not None else None
    found = faithfulness(on.open("evaluate", checkpoints), how, together, tasks)
    show_faithfulness(found)
    save(found, checkpoints, "faithfulness-together" if together else "faithfulness", out)


@app.command
def generate(
    *checkpoints: str,
    prompt: str | None = None,
    together: bool = False,
    limit: int = DEFAULTS.generation.limit,
    words: int = DEFAULTS.generation.words,
    tokens: int = DEFAULTS.generation.tokens,
    seed: int = DEFAULTS.generation.seed,
    on: HeldOut = HELD_OUT,
    out: Path | None = None,
) -> None:
    """Continue prompts with the base and with the spliced model, greedily, and compare token by token.

    Args:
        checkpoints: as for evaluate.
        prompt: continue this text and show it; by default the openings of held-out texts are continued and counted.
        together: splice all of them at once, instead of each alone.
        limit: prompts.
        words: words of a text that make a prompt.
        tokens: tokens to add.
        seed: draws the texts.
        on: the text and the base model.
        out: JSON file; by default generation.json in the first folder (with --prompt none).
    """
    how = checked(GenerationConfig, limit=limit, words=words, tokens=tokens, seed=seed)
    subject = on.open("generate", checkpoints)
    from mxd.evaluation.generation import generate_checkpoints
    from mxd.report.terminal import terminal_diff

    found = generate_checkpoints(subject, how, together, prompt)
    for name, result in found["results"].items():
        say(name)
        show(*map(terminal_diff, result["examples"]))
        at = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= tokens]
        shares = ", ".join(f"{result['match'][n - 1]:.1%} to {n}" for n in at)
        if prompt is None:
            say(f"of {result['prompts']} prompts the same: {shares}; mean {result['agreed_tokens']:.1f} tokens\n")
    if prompt is None or out is not None:
        save(found, checkpoints, "generation-together" if together else "generation", out)


@app.command
def units(
    *checkpoints: str,
    tokens: int = DEFAULTS.units.tokens,
    units: str | None = None,
    top: int = DEFAULTS.units.top,
    contexts: int = DEFAULTS.units.contexts,
    shared: float = DEFAULTS.units.shared,
    seed: int = DEFAULTS.units.seed,
    on: HeldOut = HELD_OUT,
    out: Path | None = None,
) -> None:
    """Count how often the units of trained layers fire, and show the text that some of them fire on.

    Args:
        checkpoints: as for evaluate.
        tokens: positions to read, as far as there is text; --split train has more.
        units: units to show, 3,17; by default those that add most to the output.
        top: how many to show where none are named.
        contexts: contexts to show from each of six bands of strength.
        shared: units active at more than this share of the tokens count as shared.
        seed: draws the contexts.
        on: the text and the base model.
        out: JSON file; by default units.json in the first folder.
    """
    named = numbers("--units", units, int) if units is not None else None
    how = checked(UnitsConfig, tokens=tokens, top=top, contexts=contexts, shared=shared, seed=seed)
    subject = on.open("units", checkpoints)
    from mxd.evaluation import answers
    from mxd.report.terminal import unit_lines

    found = answers.units(subject, how, named)
    for name, result in found["results"].items():
        show(*unit_lines(name, result))
    save(found, checkpoints, "units", out)


@app.command
def structure(
    *checkpoints: str,
    tokens: int = DEFAULTS.structure.tokens,
    experts: int = DEFAULTS.structure.experts,
    prompts: Annotated[
        tuple[str, ...], Parameter(name="--prompt", negative="", show_default=False)
    ] = DEFAULTS.structure.prompts,
    seed: int = DEFAULTS.structure.seed,
    on: HeldOut = HELD_OUT,
    out: Path | None = None,
) -> None:
    """Measure the rank of the units' weights, and name the units that lead on the text and at template prompts.

    Args:
        checkpoints: as for evaluate.
        tokens: positions over which leads and rates are counted.
        experts: units whose rank is computed, from unit 0 on.
        prompts: a prompt at whose last token to name the three leading units, repeated for several; by default eight.
        seed: draws the order of the text, and so the part that is read.
        on: the text and the base model.
        out: JSON file; by default structure.json in the first folder.
    """
    how = checked(StructureConfig, tokens=tokens, experts=experts, prompts=prompts, seed=seed)
    subject = on.open("structure", checkpoints)
    from mxd.evaluation import answers
    from mxd.report.terminal import leaders_table, structure_table

    found = answers.structure(subject, how)
    show(structure_table(found), *(leaders_table(name, one) for name, one in found["results"].items()))
    save(found, checkpoints, "structure", out)


@app.command
def mask(
    *checkpoints: str,
    domains: str | None = None,
    scores: Path | None = None,
    text_column: str = DEFAULTS.masking.text_column,
    label_column: str = DEFAULTS.masking.label_column,
    score_column: str = PURGING.score_column,
    ratio: float = DEFAULTS.masking.ratio,
    thresholds: str = ",".join(map(str, PURGING.thresholds)),
    limit: int | None = None,
    seed: int = DEFAULTS.masking.seed,
    together: bool = False,
    on: HeldOut = HELD_OUT,
    out: Path | None = None,
) -> None:
    """Mask the units of a topic, or those that go with a score of the text, and measure what that does to the loss.

    Args:
        checkpoints: as for evaluate.
        domains: labelled texts: a bundled set (factbook, languages), a .csv, .jsonl or .parquet file, or a Hub dataset.
        scores: texts with a number each (or a list, one for each token), a .csv, .jsonl or .parquet file: units are
            masked that correlate with it over tokens, more than by chance.
        text_column: field that holds the text.
        label_column: field that holds the domain.
        score_column: field that holds the number.
        ratio: a unit belongs to a domain if it is at least so many times as strong there as in any other.
        thresholds: correlations from which on a unit is masked.
        limit: texts of each domain, by default 100, or below and above the mean score, 500; half of them choose
            units, half are measured.
        seed: draws the texts and the units of the control.
        together: splice and mask all layers at once, instead of each alone.
        on: context and base model.
        out: JSON file; by default masking.json, or purging.json with --scores, in the first folder.
    """
    if (domains is None) == (scores is None):
        raise MxdError("give either labelled texts, --domains factbook, or scored texts, --scores FILE.")
    limits = numbers("--thresholds", thresholds, float)
    given: dict[str, Any] = {"text_column": text_column, "seed": seed, **({} if limit is None else {"limit": limit})}
    by_domain = checked(MaskingConfig, domains=domains or "", label_column=label_column, ratio=ratio, **given)
    by_score = checked(PurgingConfig, score_column=score_column, thresholds=limits, **given)
    subject = on.open("mask", checkpoints)
    from mxd.evaluation.answers import masking, purging
    from mxd.report.terminal import masking_table, purging_table

    if scores is None:
        kind, table, found = "masking", masking_table, masking(subject, by_domain, together)
    else:
        kind, table, found = "purging", purging_table, purging(subject, by_score, scores, together)
    for name, result in found["results"].items():
        show(table(name, result))
    save(found, checkpoints, f"{kind}-together" if together else kind, out)


@app.command
def probe(
    *checkpoints: str,
    sets: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = DEFAULTS.probing.sets,
    level: Literal["sample", "span", "token"] | None = DEFAULTS.probing.level,
    last: Annotated[bool | None, Parameter(negative="--first")] = None,
    limit: int = DEFAULTS.probing.limit,
    seed: int = DEFAULTS.probing.seed,
    text_column: str = DEFAULTS.probing.text_column,
    label_column: str = DEFAULTS.probing.label_column,
    split: str = DEFAULTS.probing.split,
    model: str | None = None,
    device: str = "auto",
    out: Path | None = None,
) -> None:
    """Find the single units that tell classes of text apart, beside the base MLP's neurons.

    Args:
        checkpoints: as for evaluate.
        sets: labelled set, repeated for several: factbook, languages, gender; a .csv, .jsonl or .parquet file; or a Hub
            dataset. `python scripts/fetch_probing.py` fetches more.
        level: probe the mean over a text's tokens, over those of its span (columns start and end: characters), or its
            last token; by default the span where the set has one.
        last: which 128 tokens of a longer text are read; by default the first, at other levels than sample the last.
            The paper reads the last of source code.
        limit: texts of a set, drawn with the seed.
        seed: orders the texts before they are split 80/20.
        text_column: field that holds the text.
        label_column: field that holds the class.
        split: split of a Hub dataset.
        model: base model in place of the one named in the checkpoints.
        device: auto (CUDA where there is one), cpu, cuda.
        out: JSON file; by default probing.json in the first folder.
    """
    side = {True: "last", False: "first", None: DEFAULTS.probing.side}[last]
    fields = {"text_column": text_column, "label_column": label_column, "split": split, "limit": limit, "seed": seed}
    how = checked(ProbingConfig, sets=sets, level=level, side=side, **fields)
    subject = HeldOut(model=model, device=device).open("probe", checkpoints)
    from mxd.evaluation.probing import probe_checkpoints, summary

    found = probe_checkpoints(subject, how)
    say(summary(found["results"]))
    save(found, checkpoints, "probing", out)


@app.command
def steer(
    *checkpoints: str,
    units: str = f"0-{DEFAULTS.steering.first - 1}",
    scale: float = DEFAULTS.steering.scale,
    prompt: str = DEFAULTS.steering.prompt,
    samples: int = DEFAULTS.steering.samples,
    tokens: int = DEFAULTS.steering.tokens,
    temperature: float = DEFAULTS.steering.temperature,
    top_p: float = DEFAULTS.steering.top_p,
    frequency_penalty: float = DEFAULTS.steering.frequency_penalty,
    on: Literal["replacement", "base"] = DEFAULTS.steering.on,
    seed: int = DEFAULTS.steering.seed,
    judge: str | None = None,
    judge_model: str | None = None,
    judge_key: str = "MXD_JUDGE_KEY",
    judge_local: str | None = None,
    repeats: int = DEFAULTS.steering.repeats,
    model: str | None = None,
    device: str = "auto",
    out: Path | None = None,
) -> None:
    """Generate text while one unit is made stronger, for many units, and have a language model judge it.

    Args:
        checkpoints: as for evaluate.
        units: units, such as 0-99 or 3,17,40-49; of the default as many as there are.
        scale: how much of a unit's output is added at every position.
        prompt: text to continue.
        samples: continuations for each unit.
        tokens: tokens of each.
        temperature: divides the logits; 0 is greedy.
        top_p: draw from the likeliest tokens that hold this much probability.
        frequency_penalty: lowers a token's logit for each time it came before; 1 in the paper's code.
        on: add to the output of the spliced replacement, as the paper's code does, or to that of the base MLP.
        seed: draws the tokens.
        judge: OpenAI-compatible endpoint that rates each unit's texts, such as https://api.example.com/v1.
        judge_model: model to ask there.
        judge_key: environment variable that holds the endpoint's key.
        judge_local: causal language model to judge instead, loaded like a base model.
        repeats: times each unit's texts are judged.
        model: base model in place of the one named in the checkpoints.
        device: auto (CUDA where there is one), cpu, cuda.
        out: JSON file; by default steering.json in the first folder.
    """
    if (judge is None) != (judge_model is None) or (judge is not None and judge_local is not None):
        raise MxdError("give --judge URL with --judge-model NAME, or --judge-local MODEL alone.")
    named = None if units == f"0-{DEFAULTS.steering.first - 1}" else ranges("--units", units)
    fields: dict[str, Any] = {"scale": scale, "prompt": prompt, "samples": samples, "tokens": tokens, "seed": seed}
    fields |= {"temperature": temperature, "top_p": top_p, "frequency_penalty": frequency_penalty}
    how = checked(SteeringConfig, on=on, repeats=repeats, **fields)
    subject = HeldOut(model=model, device=device).open("steer", checkpoints)
    from mxd.evaluation.steering import Endpoint, Judge, LocalJudge, steer_checkpoints, summary

    asked: Judge | None = LocalJudge.load(judge_local, device) if judge_local is not None else None
    if judge is not None and judge_model is not None:
        asked = Endpoint(judge, judge_model, judge_key)
    found = steer_checkpoints(subject, how, named, asked)
    say(summary(found["results"]))
    save(found, checkpoints, "steering", out)


@app.command
def compare(config: Path, *overrides: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Train every replacement of a run, answer the questions its config asks, and write the report.

    The questions are --evaluation.questions '[faithfulness, generation, units, structure, probing, masking, steering]'.
    Run it again to go on after an interruption, or to ask more: what is there already is kept.

    Args:
        config: YAML file; see configs/.
        overrides: fields to set, by dotted name; `mxd fields` lists them.
    """
    from mxd.config import load_config
    from mxd.evaluation.compare import compare as run
    from mxd.report.page import write_report

    folder = run(load_config(config, overrides))
    page, twin = write_report(folder)
    say(f"page:     {page}\nmarkdown: {twin}")


@app.command
def report(run: Path, out: Path | None = None) -> None:
    """Write one page, and the same in Markdown, of whatever is in a run's folder: what was trained and measured.

    Args:
        run: a run folder, or one layer's.
        out: HTML file; by default report.html in the folder. The Markdown goes beside it.
    """
    from mxd.report.page import write_report

    page, twin = write_report(run, out)
    say(f"page:     {page}\nmarkdown: {twin}")
