"""Commands that train: init, train, cache, plan, fields, demo."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from mxd.cli.shared import (
    FLAT,
    OutFile,
    Rate,
    Whole,
    app,
    configured,
    rank,
    save_table,
    say,
    show,
    show_faithfulness,
    suggest,
)
from mxd.common.errors import MxdError, typed
from mxd.tuning import GUARD_TOKENS, UNCHANGED, TuneConfig

TRAIN = ("resume", "groups", "shard", "deterministic")
PLAN = ("processes", "groups", "shard", "network", "tokens-per-second", "json")
CONFIGS = {"gpt2": "gpt2", "pythia": "pythia-410m", "llama": "llama-3.2-3b", "own": "own"}
"""What `mxd init` writes, by the name of the shipped config."""
DEMO_TOKENS = 32_768
"""Held-out tokens that the demo measures on."""
READ = (
    "How to read it: first CE increase, what a layer costs the model; then routed, near 0 for a dense MLP in disguise, "
    "and fixed, which is well above NMSE for a mixture of decoders and equal to it for a transcoder."
)
"""What the demo says last."""


@app.command
def train(
    config: Path,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True)],
    resume: bool = False,
    groups: Whole | None = None,
    shard: Annotated[bool, Parameter(negative="")] = False,
    deterministic: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Train every replacement of a run, from one stream of activations.

    Any field of the config can be set: --training.tokens 1000000, --blocks [3,5], --replacements.0.sparsity.k [8,32].
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
    overrides += ("--training.deterministic", "true") if deterministic else ()
    parsed = configured(config, overrides, TRAIN)
    from mxd.training.trainer import train as run

    folder = run(parsed, resume=resume, groups=groups, shard=shard)
    say(f"done: {folder}")
    suggest(f"mxd evaluate {typed(folder)}")


@app.command
def tune(
    *checkpoints: str,
    how: Annotated[TuneConfig, FLAT] = UNCHANGED,
    run: str | None = None,
    out: str | None = None,
    model: str | None = None,
    source: str | None = None,
    resume: bool = False,
    guard_tokens: Whole = GUARD_TOKENS,
) -> None:
    """Tune the layers of several blocks together, spliced into their base model, and write them as a run of their own.

    Layers that are alike but for their block are one set; several sets are tuned side by side.

    Args:
        checkpoints: A run, layers of one or several runs, or Hub references; to resume, the config.yaml of the tuning.
        how: The loss and the recipe; by default what the run's config.yaml says under tune.
        run: Name of the run that is written; by default the read one's with -tuned.
        out: Folder that holds it; by default that of the run that is read.
        model: Base model in place of the one named in the checkpoints.
        source: Text to tune on in place of the one that the layers were trained on, as data.source names it.
        resume: Continue an interrupted tuning exactly where it stopped. With --accumulation and --checkpointing it then
            takes less memory; other options stay as they were.
        guard_tokens: Held-out tokens on which all layers are measured at the end, before and after, whether they still
            describe their MLPs; 0: not measured.
    """
    from mxd.training.tune import tune as begin

    folder = begin(checkpoints, how, run, out, resume, source=model, text=source)
    say(f"done: {folder}")
    if guard_tokens > 0 and not rank():
        from mxd.evaluation.checkpoints import save_results
        from mxd.evaluation.tuned import before_and_after
        from mxd.report.terminal import tuned_tables

        results = before_and_after(folder, guard_tokens)
        show(*tuned_tables(results))
        say(f"numbers: {save_results(results, folder / 'tuned.json')}")
    suggest(f"mxd whole {typed(*checkpoints[: 0 if resume else None], folder)}")


@app.command
def cache(
    config: Path,
    folder: str,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True)],
    dtype: Literal["float32", "float16", "bfloat16", "int8"] = "float32",
    worker: str | None = None,
) -> None:
    """Write the activations a run trains on to disk once; `mxd train --data.cache FOLDER` then reads them.

    Existing shards are verified; missing and damaged ones are written. Size: 4 bytes (2 with --dtype bfloat16, 1 with
    int8) x (d_in + d_out) x blocks for each token.

    Args:
        config: YAML file of a run.
        folder: where the cache goes: a folder, or a URL that fsspec knows, s3://bucket/folder.
        overrides: fields to set, by dotted name.
        dtype: what activations are rounded to; training reads them as float32. int8: with a scale for each token.
        worker: 2/4 is the second of four that write one cache at the same time; under torchrun each process is one.
    """
    parsed = configured(config, overrides, ("dtype", "worker"))
    from mxd.training.source import cache_activations

    cache_activations(parsed, folder, dtype=dtype, worker=_worker(worker))
    say(f"done: {folder}")
    suggest(f"mxd train {typed(config)} --data.cache {typed(folder)} (with the same overrides)")


@app.command
def plan(
    config: Path,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True)],
    processes: Annotated[Whole, Parameter(validator=Number(gte=1))] = 1,
    groups: Whole | None = None,
    shard: Annotated[bool, Parameter(negative="")] = False,
    network: Rate | None = None,
    tokens_per_second: Rate | None = None,
    json: OutFile = None,
) -> None:
    """Say what a run needs before anything is loaded: parameters, memory and disk by part, FLOPs, the expected time.

    Where the config has a section tune, the same of `mxd tune`; of the config.yaml that it wrote, of that alone.

    Args:
        config: YAML file of a run.
        overrides: fields to set, by dotted name.
        processes: how many are to be launched.
        groups: as for train.
        shard: as for train.
        network: gigabytes a second between processes; without it their exchanges take no time.
        tokens_per_second: measured rate of one process on this config, in place of this machine's speeds.
        json: file for all numbers.
    """
    run = configured(config, overrides, PLAN)
    from mxd.common.files import whole_file, write_json
    from mxd.planning.memory import LOWER, check_memory, plan_run
    from mxd.planning.time import expected
    from mxd.planning.tuning import LOWER as LOWER_TUNING
    from mxd.planning.tuning import as_tuning, plan_tuning
    from mxd.report.plan import plan_numbers, plan_tables

    plans = [] if run.tune.of else [(run, plan_run(run, world=processes, groups=groups, shard=shard), LOWER)]
    if "tune" in run.model_fields_set:
        tuning = as_tuning(run)
        plans.append((tuning, plan_tuning(tuning, world=processes), LOWER_TUNING))
    numbers: dict[str, Any] = {}
    for own, needs, _ in plans:
        rate = None if needs.sets and not run.tune.of else tokens_per_second
        speeds, times = expected(own, needs, network, rate)
        facts = needs, speeds, times, own.training.batch_tokens, own.training.steps
        show(*plan_tables(*facts))
        numbers |= {"tuning": plan_numbers(*facts)} if needs.sets else plan_numbers(*facts)
    if json is not None:
        with whole_file(json) as file:
            write_json(file, numbers)
    for own, needs, lower in plans:
        check_memory(own, needs, lower)
    say("it fits")


@app.command
def init(kind: Literal["gpt2", "pythia", "llama", "own"] = "own", out: Path | None = None) -> None:
    """Write a commented config to begin with.

    Args:
        kind: the MxD paper's run on GPT-2, Pythia-410M or Llama-3.2-3B; or own, for your model and text, which trains
            as it stands.
        out: the file; by default named after the model, in this folder.

    Raises:
        MxdError: the file is there already.
    """
    from mxd.common.bundled import bundled_path
    from mxd.common.files import whole_file

    source = bundled_path(f"configs/{CONFIGS[kind]}.yaml")
    target = out or Path(source.name)
    if target.exists():
        raise MxdError(f"{target} is there already; give another file with --out, or delete it.")
    with whole_file(target) as file:
        text = source.read_text(encoding="utf-8")
        file.write_text(text.replace(f"`mxd train {source.name}`", f"`mxd train {target}`"), "utf-8")
    say(f"config: {target}\nnext:   mxd plan {typed(target)}, then mxd train {typed(target)}")


@app.command
def fields(section: str = "", /) -> None:
    """List every field of a run's config, with its meaning and default.

    Args:
        section: only fields whose names begin so, as ``training`` or ``data.source``.
    """
    from mxd.cli.fields import fields_help
    from mxd.common.progress import PlainConsole

    PlainConsole().tell(fields_help(section))


@app.command
def demo(out: str = "checkpoints", run: str = "demo") -> None:
    """Train MxD, TC, STC and CP-muMoE at two K on a bundled language model, splice them in, and measure.

    Args:
        out: folder that holds runs.
        run: name of the run; an earlier demo of that name is replaced, an interrupted one continued.
    """
    import shutil

    from mxd.common.bundled import bundled_path
    from mxd.config import dump_config, load_config
    from mxd.evaluation.checkpoints import open_checkpoints, save_results
    from mxd.evaluation.faithfulness import answer
    from mxd.questions import FaithfulnessConfig
    from mxd.report.figures import frontier
    from mxd.training.trainer import train as run_training

    config = load_config(bundled_path("demo.yaml"), ["--out", out, "--run", run])
    numbers = config.folder / "faithfulness.json"
    earlier = config.folder / "config.yaml"
    is_demo = earlier.exists() and earlier.read_text("utf-8", "replace") == dump_config(config)
    interrupted = is_demo and not numbers.exists()  # they are written last
    if is_demo and not interrupted:
        shutil.rmtree(config.folder)
    folder = run_training(config, resume=interrupted)
    how = FaithfulnessConfig(tokens=DEMO_TOKENS)
    results = answer(open_checkpoints([folder], device=config.model.device), how)
    table = save_table(results, numbers)
    figure = frontier(results, folder / "frontier.png")
    save_results(results, numbers)
    show_faithfulness(results)
    say(f"numbers: {numbers}\ntable:   {table} (every column, and what each means)\nfigure:  {figure}\n")
    show(READ)


def _worker(text: str | None) -> tuple[int, int] | None:
    """Parse 2/4 as (1, 4)."""
    if text is None:
        return None
    number, _, workers = text.partition("/")
    if not (number.isdecimal() and workers.isdecimal() and 1 <= int(number) <= int(workers)):
        raise MxdError(f"--worker takes one of 1/4, 2/4, 3/4, 4/4 (of four), got {text!r}.")
    return int(number) - 1, int(workers)
