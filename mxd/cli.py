"""The command line: parse, then call one function. Heavy imports stand inside the commands."""

import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import App, Parameter

from mxd import __version__
from mxd.common.errors import MxdError, printable, typed
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

if TYPE_CHECKING:
    from mxd.evaluation.checkpoints import Subject

N = TypeVar("N")

MOST_UNITS = 100_000
"""Units that can be named at a time."""

DEMO_TOKENS = 32_768
"""Held-out tokens the demo measures on."""

app = App(
    name="mxd",
    version=__version__,
    help="Train, share and splice faithful sparse replacement layers for the MLPs of frozen language models.",
    suppress_keyboard_interrupt=False,  # ``main`` says that it was one
)


@Parameter(name="*")
@dataclass(frozen=True)
class HeldOut:
    """The text an evaluation reads and the base model it runs."""

    source: str | None = None
    """text to read; by default that of training"""
    split: str | None = None
    """split of it; by default validation"""
    column: str | None = None
    """field that holds the text"""
    context: int | None = None
    """tokens in a context"""
    model: str | None = None
    """base model in place of the one named in the checkpoints"""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda"""

    def open(self, command: str, checkpoints: Sequence[str]) -> "Subject":
        """Load the checkpoints a command was given.

        Raises:
            MxdError: none was given, or as ``open_checkpoints``.
        """
        if not checkpoints:
            raise MxdError(f"give at least one checkpoint: mxd {command} checkpoints/RUN")
        from mxd.evaluation.checkpoints import open_checkpoints

        given = {k: v for k, v in asdict(self).items() if k not in ("model", "device") and v is not None}
        return open_checkpoints(checkpoints, given, self.model, self.device)


HELD_OUT = HeldOut()


@app.command
def train(
    config: Path,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True)],
    resume: bool = False,
    groups: int | None = None,
    shard: Annotated[bool, Parameter(negative="")] = False,
    deterministic: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Train every replacement of a run, from one stream of activations.

    Any field of the config can be set: --training.tokens 1000000, --layers [3,5], --replacements.0.sparsity.k [8,32].
    `mxd fields` lists them. On eight GPUs: torchrun --nproc-per-node 8 -m mxd train CONFIG (docs/scaling.md).

    Args:
        config: YAML file; see configs/.
        overrides: fields to set, by dotted name.
        resume: continue an interrupted run exactly where it stopped, on as many processes as there are now; refused
            where config, text or base model have changed.
        groups: of many processes, how many groups train replacements of their own; the processes of one group divide
            each batch. By default as many as can be.
        shard: divide weights, gradients and moments among the processes of a group: for layers too large for one.
        deterministic: the same as --training.deterministic true: on a GPU the same bits twice, more slowly.
    """
    from mxd.config import load_config
    from mxd.training.trainer import train as run

    overrides += ("--training.deterministic", "true") if deterministic else ()
    folder = run(load_config(config, overrides), resume=resume, groups=groups, shard=shard)
    _say(f"done: {folder}\nnext: mxd evaluate {typed(folder)}")


@app.command
def cache(
    config: Path,
    folder: str,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True)],
    dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    worker: str | None = None,
) -> None:
    """Write the activations a run trains on to disk once; `mxd train --data.cache FOLDER` then reads them.

    What is there is verified; what is missing or damaged is written. Size: 4 bytes (2 with --dtype bfloat16) x
    (d_in + d_out) x layers for each token.

    Args:
        config: YAML file of a run.
        folder: where the cache goes: a folder, or a URL that fsspec knows, s3://bucket/folder.
        overrides: fields to set, by dotted name.
        dtype: what activations are rounded to; training reads them as float32.
        worker: 2/4 is the second of four that write one cache at the same time; under torchrun each process is one.
    """
    from mxd.config import load_config
    from mxd.training.source import cache_activations

    cache_activations(load_config(config, overrides), folder, dtype=dtype, worker=_worker(worker))
    _say(f"done: {folder}\nnext: mxd train {typed(config)} --data.cache {typed(folder)} (with the same overrides)")


@app.command
def plan(
    config: Path,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True)],
    processes: int = 1,
    groups: int | None = None,
    shard: Annotated[bool, Parameter(negative="")] = False,
    network: float | None = None,
    tokens_per_second: float | None = None,
    json: Path | None = None,
) -> None:
    """Say what a run needs before anything is loaded: parameters, memory and disk by part, FLOPs, the expected time.

    Args:
        config: YAML file of a run.
        overrides: fields to set, by dotted name.
        processes: as if so many were launched.
        groups: as for train.
        shard: as for train.
        network: gigabytes a second between processes; without it their exchanges take no time.
        tokens_per_second: what one process was measured to train on this config, in place of this machine's speeds.
        json: file for all numbers.
    """
    from mxd.common.files import write_json
    from mxd.config import load_config
    from mxd.planning.memory import check_memory, plan_run
    from mxd.planning.time import expected
    from mxd.report.plan import plan_numbers, plan_tables

    run = load_config(config, overrides)
    found = plan_run(run, world=processes, groups=groups, shard=shard)
    speeds, times = expected(run, found, network, tokens_per_second)
    about = found, speeds, times, run.training.batch_tokens, run.training.steps
    _print(*plan_tables(*about))
    if json is not None:
        write_json(json, plan_numbers(*about))
    check_memory(run, found)
    _say("it fits")


@app.command
def fields() -> None:
    """List every field of a run's config, with its meaning and default."""
    from mxd.config import fields_help

    _say(fields_help())


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
        out: JSON file; by default evaluation.json in the first folder (evaluation-together.json with --together), and
            for a Hub reference evaluation-NAME.json in this one.
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
    _show(found)
    _save(found, checkpoints, "evaluation-together" if together else "evaluation", out)


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
        _say(name)
        _print(*map(terminal_diff, result["examples"]))
        at = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= tokens]
        shares = ", ".join(f"{result['match'][n - 1]:.1%} to {n}" for n in at)
        if prompt is None:
            _say(f"of {result['prompts']} prompts the same: {shares}; mean {result['agreed_tokens']:.1f} tokens\n")
    if prompt is None or out is not None:
        _save(found, checkpoints, "generation-together" if together else "generation", out)


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
    named = _numbers("--units", units, int) if units is not None else None
    how = checked(UnitsConfig, tokens=tokens, top=top, contexts=contexts, shared=shared, seed=seed)
    subject = on.open("units", checkpoints)
    from mxd.evaluation import answers
    from mxd.report.terminal import unit_lines

    found = answers.units(subject, how, named)
    for name, result in found["results"].items():
        _print(*unit_lines(name, result))
    _save(found, checkpoints, "units", out)


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
    _print(structure_table(found), *(leaders_table(name, one) for name, one in found["results"].items()))
    _save(found, checkpoints, "structure", out)


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
    limits = _numbers("--thresholds", thresholds, float)
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
        _print(table(name, result))
    _save(found, checkpoints, f"{kind}-together" if together else kind, out)


@app.command
def convert(
    *sources_and_out: str,
    from_: Annotated[str | None, Parameter("--from")] = None,
    to: str | None = None,
    layer: int | None = None,
    reads: Literal["mlp_in", "normalized"] | None = None,
    jumprelu: Annotated[bool, Parameter(negative="")] = False,
    tokens: int = 32_768,
    on: HeldOut = HELD_OUT,
) -> None:
    """Convert other tools' transcoders to checkpoints, SOURCE OUT --from TOOL, or back, CHECKPOINT... OUT --to TOOL.

    Both: sparsify, saelens, circuit-tracer. From: gemma-scope, reference (the papers' .pt files). See docs/formats.md.

    Args:
        sources_and_out: their file or folder, or checkpoints as for evaluate; last the folder to write.
        from_: the tool whose files to read. The base model is what they name, or --model.
        to: the tool whose files to write.
        layer: block they replace, where their files do not say; of several, the one to convert.
        reads: where their files leave it open: mlp_in, or normalized (before the affine part of the layer norm).
        jumprelu: write JumpReLU thresholds, fitted on held-out text, also where the tool has TopK.
        tokens: held-out tokens for thresholds and for measuring what is lost.
        on: the text and the base model.
    """
    *sources, out = sources_and_out or [""]
    if not sources or (from_ is None) == (to is None):
        raise MxdError(
            "give what to convert, a folder to write, and a tool: mxd convert SOURCE OUT --from (or --to) TOOL"
        )
    from mxd.share.formats import export_layers, import_layers

    if from_ is not None:
        if len(sources) > 1:
            raise MxdError(f"--from reads one file or folder, got {len(sources)}.")
        found = import_layers(sources[0], out, from_, on.model, layer, reads, on.device)
    else:
        subject = on.open("convert", sources)
        found = export_layers(subject.trained, subject.base, subject.blocks, out, to or "", jumprelu, tokens)
    for item in found:
        _say("\n  ".join([f"{item.source} -> {item.path}", *item.notes, *([item.loss.line] if item.loss else [])]))


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
    _say(summary(found["results"]))
    _save(found, checkpoints, "probing", out)


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
    named = None if units == f"0-{DEFAULTS.steering.first - 1}" else _ranges("--units", units)
    fields: dict[str, Any] = {"scale": scale, "prompt": prompt, "samples": samples, "tokens": tokens, "seed": seed}
    fields |= {"temperature": temperature, "top_p": top_p, "frequency_penalty": frequency_penalty}
    how = checked(SteeringConfig, on=on, repeats=repeats, **fields)
    subject = HeldOut(model=model, device=device).open("steer", checkpoints)
    from mxd.evaluation.steering import Endpoint, Judge, LocalJudge, steer_checkpoints, summary

    asked: Judge | None = LocalJudge.load(judge_local, device) if judge_local is not None else None
    if judge is not None and judge_model is not None:
        asked = Endpoint(judge, judge_model, judge_key)
    found = steer_checkpoints(subject, how, named, asked)
    _say(summary(found["results"]))
    _save(found, checkpoints, "steering", out)


@app.command
def export_model(model: str, /, *checkpoints_and_out: str) -> None:
    """Write a model with trained layers spliced in as a normal transformers repository: MODEL CHECKPOINT... OUT.

    AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True) loads it where mxd is not installed.

    Args:
        model: the base model: a bundled name, a Hub id, a folder or a .gguf file.
        checkpoints_and_out: layer folders, run folders or Hub references, one layer for each block; last the folder to
            write, which is new, empty or an earlier export.
    """
    *checkpoints, out = checkpoints_and_out or [""]
    if not checkpoints:
        raise MxdError("give a model, checkpoints and a folder to write: mxd export-model MODEL CHECKPOINT... OUT")
    from mxd.share.export import export_checkpoints

    export_checkpoints(model, checkpoints, out)
    _say(f"done: {out}\nnext: AutoModelForCausalLM.from_pretrained({out!r}, trust_remote_code=True)")


@app.command
def compare(config: Path, *overrides: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Train every replacement of a run, answer the questions its config asks, and write the report.

    The questions are --evaluation.questions '[evaluation, generation, units, structure, probing, masking, steering]'.
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
    _say(f"page:     {page}\nmarkdown: {twin}")


@app.command
def report(run: Path, out: Path | None = None) -> None:
    """Write one page, and the same in Markdown, of whatever is in a run's folder: what was trained and measured.

    Args:
        run: a run folder, or one layer's.
        out: HTML file; by default report.html in the folder. The Markdown goes beside it.
    """
    from mxd.report.page import write_report

    page, twin = write_report(run, out)
    _say(f"page:     {page}\nmarkdown: {twin}")


@app.command
def info(checkpoint: str) -> None:
    """Print a checkpoint's config, parameters and provenance, as JSON.

    Args:
        checkpoint: a layer folder, a run folder (every layer in it), or a Hub reference to either.
    """
    from mxd.artifacts.folders import find_layers, read_config
    from mxd.artifacts.hub import cached_reference
    from mxd.layers import parse_layer

    described: dict[str, Any] = {}
    for path in find_layers(checkpoint, weights=False):
        config = read_config(path)
        described[str(cached_reference(path) or path)] = {
            "parameters": parse_layer(config.get("layer")).num_params,
            **config,
        }
    _say(json.dumps(described, indent=2))


@app.command
def push(
    checkpoint: Path,
    repo: str,
    private: Annotated[bool, Parameter(negative="")] = False,
    revision: str | None = None,
    create_pr: Annotated[bool, Parameter(negative="")] = False,
    license: str | None = None,
    message: str | None = None,
) -> None:
    """Push a layer, or a run's layers as a set, to the Hugging Face Hub, with a model card written for it.

    Log in first: `hf auth login`, or set HF_TOKEN. An interrupted push is run again as it was.

    Args:
        checkpoint: a layer folder, or a run folder (every layer in it, its evaluation.json and a figure).
        repo: org/name; made where it is not there yet.
        private: make the repository private.
        revision: branch to push to, made where it is not there yet.
        create_pr: open a pull request instead.
        license: license of the layers, by the Hub's name (apache-2.0, mit, ...).
        message: commit message.
    """
    from mxd.artifacts.transfer import push as send

    _draw(checkpoint)
    done = send(checkpoint, repo, private, revision, create_pr, None, license, message)
    _say(f"pushed: {done.url}\nrevision: {done.revision}\nnext: mxd info {typed(f'{repo}@{done.revision}')}")


@app.command
def pull(reference: str, folder: Path | None = None, *, pattern: str = "*") -> None:
    """Copy a layer, or a set of layers, from the Hugging Face Hub into a folder; what is there already stays.

    Args:
        reference: org/name[/subfolder][@revision].
        folder: where the layer goes, or the layers of a set; by default checkpoints/NAME.
        pattern: of a set only the layers whose names match, for example '*-k32'.
    """
    from mxd.artifacts.transfer import pull as fetch

    places = fetch(reference, folder, pattern)
    for place in places:
        _say(f"pulled: {place}")
    _say(f"next: mxd evaluate {typed(*places)}")


def _draw(folder: Path) -> None:
    """Draw the figure of an evaluated run, where it is missing or older than the numbers."""
    from mxd.artifacts.card import Evaluation
    from mxd.common.files import read_json
    from mxd.report.figures import frontier

    numbers, figure = folder / "evaluation.json", folder / "frontier.png"
    is_set = Evaluation.read(numbers) is not None and not (folder / "config.json").exists()
    if is_set and (not figure.exists() or figure.stat().st_mtime < numbers.stat().st_mtime):
        frontier(read_json(numbers), figure)


@app.command
def demo(out: str = "checkpoints", run: str = "demo") -> None:
    """Train MxD, TC, STC and CP-muMoE at two K on a bundled language model, splice them in, and measure.

    Args:
        out: folder that holds runs.
        run: name of the run; an earlier demo of that name is replaced, an interrupted one continued.
    """
    import shutil

    from mxd.common.files import atomic_file
    from mxd.config import dump_config, load_config
    from mxd.evaluation.checkpoints import evaluate_checkpoints, save_results
    from mxd.model import bundled_path
    from mxd.report.figures import frontier
    from mxd.report.tables import markdown_tables
    from mxd.training.trainer import train as run_training

    config = load_config(bundled_path("demo.yaml"), ["--out", out, "--run", run])
    marker = config.folder / "evaluation.json"
    earlier = config.folder / "config.yaml"
    is_demo = earlier.exists() and earlier.read_text("utf-8", "replace") == dump_config(config)
    interrupted = is_demo and not marker.exists()
    if is_demo and not interrupted:
        shutil.rmtree(config.folder)
    folder = run_training(config, resume=interrupted)
    found = evaluate_checkpoints([folder], tokens=DEMO_TOKENS, device=config.model.device)
    with atomic_file(folder / "table.md") as file:
        file.write_text(printable(markdown_tables(found)), encoding="utf-8")
    figure = frontier(found, folder / "frontier.png")
    save_results(found, marker)
    _show(found)
    _say(f"numbers: {marker}\ntable:   {folder / 'table.md'}\nfigure:  {figure}")


def _show(found: dict[str, Any]) -> None:
    from mxd.common.progress import PlainConsole
    from mxd.report.tables import tasks_table, terminal_tables

    _print(*terminal_tables(found, PlainConsole().width))
    if "lm_eval" in found:
        _print(tasks_table(found["lm_eval"]))


def _save(found: dict[str, Any], checkpoints: Sequence[str], name: str, out: Path | None) -> None:
    """Write results to ``out``, by default into the first checkpoint's folder; for a Hub reference here."""
    from mxd.artifacts.hub import reference_of
    from mxd.evaluation.checkpoints import save_results

    reference = reference_of(checkpoints[0])
    place = Path(f"{name}-{reference.name}.json") if reference else Path(checkpoints[0], f"{name}.json")
    _say(f"numbers: {save_results(found, out or place)}")


def _print(*lines: Any) -> None:
    from mxd.common.progress import PlainConsole

    console = PlainConsole()
    for line in lines:
        console.print(line)


def _numbers(option: str, text: str, kind: Callable[[str], N]) -> list[N]:
    """Return the numbers of a list such as 3,17."""
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError as error:
        raise MxdError(f"{option} is {text!r}; expected numbers divided by commas.") from error


def _ranges(option: str, text: str) -> list[int]:
    """Return the numbers of a list such as 3,17,40-49."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.strip().isdecimal() or not (last or first).strip().isdecimal():
            raise MxdError(f"{option} is {text!r}; expected numbers and ranges such as 3,17,40-49.")
        given = range(int(first), int(last or first) + 1)
        if len(numbers) + len(given) > MOST_UNITS:
            raise MxdError(f"{option} is {text!r}; expected {MOST_UNITS:,} numbers at most.")
        numbers += given
    return numbers


def _worker(text: str | None) -> tuple[int, int] | None:
    """Parse 2/4 as (1, 4)."""
    if text is None:
        return None
    number, _, workers = text.partition("/")
    if not (number.isdecimal() and workers.isdecimal() and 1 <= int(number) <= int(workers)):
        raise MxdError(f"--worker takes one of 1/4, 2/4, 3/4, 4/4 (of four), got {text!r}.")
    return int(number) - 1, int(workers)


def _say(text: str) -> None:
    if not _rank():
        sys.stdout.write(printable(text) + "\n")


def _rank() -> int:
    """Return this process's number in its launch; 0 speaks for all."""
    return int(os.environ.get("RANK", 0)) if os.environ.get("WORLD_SIZE", "1") != "1" else 0


def _end_bars() -> None:
    """End the bars that a failed transfer leaves in the middle of a line, so that the message has a line of its own."""
    bars = sys.modules.get("huggingface_hub.utils.tqdm")
    for bar in list(getattr(bars.tqdm, "_instances", ())) if bars else ():  # tqdm has no public list of them
        bar.close()


def main() -> None:
    """Run the command line; a user's mistake is one message and a non-zero exit code, never a traceback."""
    from mxd.common import errors

    if isinstance(sys.stdout, io.TextIOWrapper):  # a name in a file may hold what the terminal's encoding does not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if os.environ.get("WORLD_SIZE", "1") != "1" and sys.argv[1:2] not in (["train"], ["cache"]):
            raise errors.SharedError("only `mxd train` and `mxd cache` run in many processes; start this one in one.")
        app(sys.argv[1:])
    except errors.MxdError as error:
        _end_bars()
        if not (error.shared and _rank()):
            sys.stderr.write(f"mxd: {error}\n")
        if isinstance(error, errors.LostError):  # a thread may wait inside of torch still, where Python's end aborts
            sys.stderr.flush()
            os._exit(error.exit_code)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _end_bars()
        sys.stderr.write("mxd: interrupted\n")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:  # a full disk, a lost mount: what is on disk stays as it was
        sys.stderr.write(f"mxd: {errors.printable(errors.redact(str(error)))}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
