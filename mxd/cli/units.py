"""Commands that ask what units are and what they mean.

The options of a question are the fields of its config (``mxd/questions.py``).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from mxd.cli.shared import FLAT, HELD_OUT, HeldOut, OutFile, app, check_answers, ranges, save, say, show
from mxd.common.errors import MxdError
from mxd.questions import (
    DEFAULTS,
    EXPLAINING,
    ExplainingConfig,
    ProbingConfig,
    SteeringConfig,
    StructureConfig,
    UnitsConfig,
    changed,
)

if TYPE_CHECKING:
    from mxd.evaluation.judging import Judge


@Parameter(name="*")
@dataclass(frozen=True)
class Judges:
    """Language models that judge texts."""

    judge: tuple[str, ...] = ()
    """OpenAI-compatible endpoint that judges, such as https://api.example.com/v1; may be repeated."""
    judge_model: tuple[str, ...] = ()
    """Model to ask there, one for each --judge, in the same order."""
    judge_key: tuple[str, ...] = ("MXD_JUDGE_KEY",)
    """Environment variable that holds the endpoint's key: one for all, or one for each --judge."""
    judge_local: tuple[str, ...] = ()
    """Causal language model to judge as well or instead, loaded like a base model; may be repeated."""

    def check(self) -> None:
        """Refuse judges that are named only in part, before anything is loaded.

        Raises:
            MxdError: an endpoint without its model, or another number of keys.
        """
        if len(self.judge) != len(self.judge_model) or len(self.judge_key) not in (1, len(self.judge)):
            keys = f" and {len(self.judge_key)} --judge-key" if self.judge_key != Judges.judge_key else ""
            raise MxdError(
                f"got {len(self.judge)} --judge, {len(self.judge_model)} --judge-model{keys}: give each --judge URL "
                "its --judge-model NAME, and one key for all or one for each; or --judge-local MODEL."
            )

    def loaded(self, device: str) -> "list[Judge]":
        """Return the judges; those of this machine are loaded on a device."""
        from mxd.evaluation.judging import Endpoint, LocalJudge

        keys = self.judge_key * len(self.judge) if len(self.judge_key) == 1 else self.judge_key
        judges: list[Judge] = [Endpoint(*one) for one in zip(self.judge, self.judge_model, keys, strict=True)]
        return judges + [LocalJudge.load(source, device) for source in self.judge_local]


NOBODY = Judges()


@app.command
def units(
    *checkpoints: str,
    units: str | None = None,
    how: Annotated[UnitsConfig, FLAT] = DEFAULTS.units,
    on: HeldOut = HELD_OUT,
    out: OutFile = None,
) -> None:
    """Count how often the units of trained layers fire; show the text that some fire on, and the tokens they promote.

    Args:
        checkpoints: As for evaluate.
        units: Units to show, 3,17,40-49; by default those that add most to the output.
        how: The question's config.
        on: The text and the base model.
        out: JSON file; by default units.json in the first folder.
    """
    named = ranges("--units", units) if units is not None else None
    subject = on.open("units", checkpoints)
    from mxd.evaluation.units import answer
    from mxd.report.terminal import unit_lines

    results = answer(subject, how, named)
    for name, result in results["results"].items():
        show(*unit_lines(name, result))
    save(results, checkpoints, "units", out)


@app.command
def explain(
    *checkpoints: str,
    units: str | None = None,
    how: Annotated[ExplainingConfig, FLAT] = EXPLAINING,
    by: Judges = NOBODY,
    on: HeldOut = HELD_OUT,
    out: OutFile = None,
) -> None:
    """Ask an instruct model what its units mean, and have a judge tell by the answer on which text a unit fires.

    Args:
        checkpoints: As for evaluate.
        units: Units to explain, 3,17,40-49; by default those that add most to the output.
        how: The question's config.
        by: Who decides.
        on: The text and the base model.
        out: JSON file; by default explaining.json in the first folder.

    Raises:
        MxdError: a judge that is named only in part.
    """
    by.check()
    named = ranges("--units", units) if units is not None else None
    subject = on.open("explain", checkpoints)
    from mxd.evaluation.explaining import answer
    from mxd.report.terminal import explained_lines

    results = answer(subject, how, named, by.loaded(on.device))
    for name, result in results["results"].items():
        say("\n".join(explained_lines(name, result)))
    save(results, checkpoints, "explaining", out)
    check_answers(results)


@app.command
def structure(
    *checkpoints: str,
    how: Annotated[StructureConfig, FLAT] = DEFAULTS.structure,
    on: HeldOut = HELD_OUT,
    out: OutFile = None,
) -> None:
    """Measure the rank of the units' weights, and name the units that lead on the text and at template prompts.

    Args:
        checkpoints: As for evaluate.
        how: The question's config.
        on: The text and the base model.
        out: JSON file; by default structure.json in the first folder.
    """
    subject = on.open("structure", checkpoints)
    from mxd.evaluation.structure import answer
    from mxd.report.terminal import leaders_table, structure_table, tokens_table

    results = answer(subject, how)
    tables = (table(name, one) for name, one in results["results"].items() for table in (leaders_table, tokens_table))
    show(structure_table(results), *tables)
    save(results, checkpoints, "structure", out)


@app.command
def probe(
    *checkpoints: str,
    how: Annotated[ProbingConfig, FLAT] = DEFAULTS.probing,
    last: Annotated[bool | None, Parameter(negative="--first")] = None,
    model: str | None = None,
    device: str = "auto",
    out: OutFile = None,
) -> None:
    """Find the single units that tell classes of text apart, beside the base MLP's neurons.

    Args:
        checkpoints: As for evaluate.
        how: The question's config.
        last: Which 128 tokens of a longer text are read; by default the first for --level sample, else the last. The
            paper reads the last of source code.
        model: Base model in place of the one named in the checkpoints.
        device: auto (CUDA where there is one), cpu, cuda.
        out: JSON file; by default probing.json in the first folder.
    """
    if last is not None:
        how = changed(how, side="last" if last else "first")
    subject = HeldOut(model=model, device=device).open("probe", checkpoints)
    from mxd.evaluation.probing import answer, summary

    results = answer(subject, how)
    say(summary(results["results"]))
    save(results, checkpoints, "probing", out)


@app.command
def steer(
    *checkpoints: str,
    units: str = f"0-{DEFAULTS.steering.first - 1}",
    how: Annotated[SteeringConfig, FLAT] = DEFAULTS.steering,
    by: Judges = NOBODY,
    model: str | None = None,
    device: str = "auto",
    out: OutFile = None,
) -> None:
    """Generate text while one unit is made stronger, for many units, and have a language model judge it.

    Args:
        checkpoints: As for evaluate.
        units: Units, such as 0-99 or 3,17,40-49; of the default those that exist.
        how: The question's config.
        by: Who rates each unit's texts.
        model: Base model in place of the one named in the checkpoints.
        device: auto (CUDA where there is one), cpu, cuda.
        out: JSON file; by default steering.json in the first folder.

    Raises:
        MxdError: a judge that is named only in part, or twice.
    """
    by.check()
    named = None if units == f"0-{DEFAULTS.steering.first - 1}" else ranges("--units", units)
    subject = HeldOut(model=model, device=device).open("steer", checkpoints)
    from mxd.evaluation.steering import answer, summary

    results = answer(subject, how, named, by.loaded(device))
    say(summary(results["results"]))
    save(results, checkpoints, "steering", out)
    check_answers(results)
