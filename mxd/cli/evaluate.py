"""Commands that measure whole splices, and those that do and show everything: compare, report.

The options of a question are the fields of its config (``mxd/questions.py``).
"""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mxd.cli.shared import (
    FLAT,
    HELD_OUT,
    NO_TASKS,
    HeldOut,
    LmEval,
    OutFile,
    app,
    check_checkpoints,
    configured,
    same_again,
    save,
    save_table,
    say,
    show,
    show_faithfulness,
)
from mxd.common.numbers import plural
from mxd.questions import (
    DEFAULTS,
    FaithfulnessConfig,
    GenerationConfig,
    WholeConfig,
)


@app.command
def evaluate(
    *checkpoints: str,
    together: bool = False,
    how: Annotated[FaithfulnessConfig, FLAT] = DEFAULTS.faithfulness,
    on: HeldOut = HELD_OUT,
    out: OutFile = None,
    tasks: LmEval = NO_TASKS,
) -> None:
    """Splice trained layers into their base model and measure faithfulness on held-out text.

    Args:
        checkpoints: Layer folders, run folders (every layer in them), or Hub references org/name[/folder][@revision].
        together: Splice in all layers of a kind at once, as a set, instead of each alone; layers of different blocks
            are one set, whatever they are.
        how: The question's config.
        on: The text and the base model.
        out: JSON file; by default faithfulness.json in the first folder (faithfulness-together.json with --together),
            and for a Hub reference faithfulness-NAME.json in this one. Without this option table.md goes
            beside it, with every column.
        tasks: What the base and each splice are scored on as well.

    Raises:
        MxdError: options of lm-eval without its tasks.
    """
    names = tasks.names()
    check_checkpoints(checkpoints)
    from mxd.evaluation.faithfulness import answer
    from mxd.evaluation.harness import find_tasks

    found = None if names is None else find_tasks(names, tasks.lm_eval_limit, tasks.lm_eval_include)
    results = answer(on.open("evaluate", checkpoints), how, together, found)
    show_faithfulness(results)
    numbers = save(results, checkpoints, "faithfulness-together" if together else "faithfulness", out)
    if out is None:
        say(f"table:   {save_table(results, numbers)} (every column, and what each means)")


@app.command
def generate(
    *checkpoints: str,
    prompt: str | None = None,
    together: bool = False,
    how: Annotated[GenerationConfig, FLAT] = DEFAULTS.generation,
    on: HeldOut = HELD_OUT,
    out: OutFile = None,
) -> None:
    """Continue prompts with the base and with the spliced model, greedily, and compare token by token.

    Args:
        checkpoints: As for evaluate.
        prompt: Continue this text and show it; by default the openings of held-out texts are continued and counted.
        together: Splice in all layers of a kind at once, as a set, instead of each alone; layers of different blocks
            are one set, whatever they are.
        how: The question's config.
        on: The text and the base model.
        out: JSON file; by default generation.json in the first folder (with --prompt none).
    """
    subject = on.open("generate", checkpoints)
    from mxd.evaluation.generation import answer
    from mxd.report.terminal import terminal_diff

    results = answer(subject, how, together, prompt)
    for name, result in results["results"].items():
        say(name)
        show(*map(terminal_diff, result["examples"]))
        lengths = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= how.tokens]
        shares = ", ".join(f"{result['match'][n - 1]:.1%} to {n}" for n in lengths)
        if prompt is None:
            prompts, agreed = plural(result["prompts"], "prompt"), result["agreed_tokens"]
            say(f"of {prompts} the same: {shares}; mean {agreed:.1f} tokens\n")
    if prompt is None or out is not None:
        save(results, checkpoints, "generation-together" if together else "generation", out)


@app.command
def whole(
    *checkpoints: str,
    how: Annotated[WholeConfig, FLAT] = DEFAULTS.whole,
    on: HeldOut = HELD_OUT,
    out: OutFile = None,
) -> None:
    """Replace all blocks of each set of layers at once: is it still the model, and where does the error come from?

    All layers of a kind are a set (mxd-k32 of every block). CE increase, KL and top-1 of all blocks at once, by the
    number of blocks replaced, and block by block; continuations side by side, with what tells garbage from text.

    Args:
        checkpoints: As for evaluate; layers of different blocks are one set, whatever they are.
        how: The question's config.
        on: The text and the base model.
        out: JSON file; by default whole.json in the first folder.
    """
    subject = on.open("whole", checkpoints)
    from mxd.evaluation.whole import answer
    from mxd.report.terminal import terminal_diff, whole_tables

    results = answer(subject, how)
    for name, result in results["results"].items():
        say(name)
        show(*map(terminal_diff, result["generation"]["examples"]))
    show(*whole_tables(results))
    save(results, checkpoints, "whole", out)


@app.command
def compare(config: Path, *overrides: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Train every replacement of a run, answer the questions its config asks, and write the report.

    The questions are --evaluation.questions
    '[faithfulness, generation, whole, units, structure, probing, masking, steering, toxicity, ablation, subset,
    rewrite]'.
    Run it again to continue after an interruption, or to ask more: existing results are kept.

    Args:
        config: YAML file; see configs/.
        overrides: fields to set, by dotted name; `mxd fields` lists them.
    """
    parsed = configured(config, overrides)
    from mxd.evaluation.compare import compare as run
    from mxd.report.page import write_report

    with same_again():
        page, twin = write_report(run(parsed))
    say(f"page:     {page}\nmarkdown: {twin}")


@app.command
def report(run: Path, out: OutFile = None) -> None:
    """Write one page, and the same in Markdown, of what was trained and measured in a run's folder.

    Args:
        run: a run folder, or one layer's.
        out: HTML file; by default report.html in the folder. The Markdown goes beside it.
    """
    from mxd.report.page import write_report

    page, twin = write_report(run, out)
    say(f"page:     {page}\nmarkdown: {twin}")
