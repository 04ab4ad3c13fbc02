"""The command that makes a paper's figures and tables anew."""

from typing import Annotated

from cyclopts import Parameter

from mxd.cli.shared import app, same_again, say, show


@app.command
def reproduce(
    paper: str,
    scale: str = "paper",
    *,
    model: tuple[str, ...] = (),
    out: str | None = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Make every figure and table of a paper that needs no judge, and say where ours differ.

    Trains and measures an experiment after the other, each as `mxd compare` does, with a page of its own; a table sets
    what was found beside what the paper says. Run it again to continue after an interruption.

    Args:
        paper: Its arXiv number: 2505.21364 (Mixture of Decoders).
        scale: paper: its models and tokens, from the Hub, for GPUs; smollm2 or tiny: the same on what is at hand.
        model: Only these of the scale's models.
        out: Folder for all runs; by default checkpoints/PAPER-SCALE.
        dry_run: Say what would be trained, the memory and the expected time on this machine, and stop.
    """
    folder = out or f"checkpoints/{paper}-{scale}"
    from mxd.common.files import read_json
    from mxd.report.reproduction import findings_table, plan_table
    from mxd.reproduction.run import planned
    from mxd.reproduction.run import reproduce as run

    plans = list(planned(paper, scale, folder, model))
    show(plan_table(plans))
    if unknown := dict.fromkeys(plan["model"] for plan in plans if "unknown" in plan):
        say(f"not known for {', '.join(unknown)}: {next(plan['unknown'] for plan in plans if 'unknown' in plan)}")
    if dry_run:
        return
    with same_again():
        found = run(paper, scale, folder, model)
    show(findings_table(read_json(found / "reproduction.json")["findings"]))
    say(f"table:   {found / 'reproduction.md'}\nnumbers: {found / 'reproduction.json'}")
