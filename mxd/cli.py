"""The command line: parse, then call one function. Heavy imports stand inside the commands."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from mxd import __version__
from mxd.errors import MxdError

DEMO_TOKENS = 32_768
"""Held-out tokens the demo measures on."""

app = App(
    name="mxd",
    version=__version__,
    help="Train, share and splice faithful sparse replacement layers for the MLPs of frozen language models.",
)


@app.command
def train(config: Path, *overrides: Annotated[str, Parameter(allow_leading_hyphen=True)], resume: bool = False) -> None:
    """Train every replacement of a run, from one stream of activations.

    Any field of the config can be set: --training.tokens 1000000, --layers [3,5], --replacements.0.sparsity.k [8,32].
    `mxd fields` lists them.

    Args:
        config: YAML file; see configs/.
        overrides: fields to set, by dotted name.
        resume: continue an interrupted run exactly where it stopped.
    """
    from mxd.config import load_config
    from mxd.train import train as run

    folder = run(load_config(config, overrides), resume=resume)
    _say(f"done: {folder}\nnext: mxd evaluate {folder}")


@app.command
def cache(config: Path, folder: Path, *overrides: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Write the activations a run trains on to disk once; `mxd train --data.cache FOLDER` then reads them.

    An interrupted cache goes on where it stopped. Size: 4 bytes x (d_in + d_out) x layers for each token.

    Args:
        config: YAML file of a run.
        folder: where the cache goes.
        overrides: fields to set, by dotted name.
    """
    from mxd.config import load_config
    from mxd.train import cache_activations

    cache_activations(load_config(config, overrides), folder)
    _say(f"done: {folder}\nnext: mxd train {config} --data.cache {folder} (with the same overrides)")


@app.command
def fields() -> None:
    """List every field of a run's config, with its meaning and default."""
    from mxd.config import fields_help

    _say(fields_help())


@app.command
def evaluate(
    *checkpoints: str,
    together: bool = False,
    tokens: int = 65_536,
    source: str | None = None,
    split: str | None = None,
    column: str | None = None,
    context: int | None = None,
    model: str | None = None,
    device: str = "auto",
    out: Path | None = None,
) -> None:
    """Splice trained layers into their base model and measure faithfulness on held-out text.

    Args:
        checkpoints: layer folders, or run folders (every layer in them).
        together: splice all of them at once, instead of each alone.
        tokens: positions to read.
        source: text to read; by default that of training.
        split: split of it; by default validation.
        column: field that holds the text.
        context: tokens in a context.
        model: base model in place of the one named in the checkpoints.
        device: auto (CUDA where there is one), cpu, cuda.
        out: JSON file; by default evaluation.json in the first folder (evaluation-together.json with --together).
    """
    if not checkpoints:
        raise MxdError("give at least one checkpoint: mxd evaluate checkpoints/RUN")
    if tokens < 1:
        raise MxdError(f"--tokens must be at least 1, got {tokens}.")
    from mxd.evaluation.checkpoints import evaluate_checkpoints, save_results

    data = {"source": source, "split": split, "column": column, "context": context}
    given = {key: value for key, value in data.items() if value is not None}
    found = evaluate_checkpoints(checkpoints, together, given, tokens, model, device)
    name = "evaluation-together.json" if together else "evaluation.json"
    path = save_results(found, out or Path(checkpoints[0]) / name)
    _show(found)
    _say(f"numbers: {path}")


@app.command
def info(checkpoint: Path) -> None:
    """Print a checkpoint's config, parameters and provenance, as JSON.

    Args:
        checkpoint: a layer folder, or a run folder (every layer in it).
    """
    from mxd.checkpoint import find_layers, read_config
    from mxd.layers import parse_layer

    described: dict[str, Any] = {}
    for path in find_layers(checkpoint):
        config = read_config(path)
        described[str(path)] = {"parameters": parse_layer(config.get("layer") or {}).num_params, **config}
    _say(json.dumps(described, indent=2))


@app.command
def demo(out: str = "checkpoints", run: str = "demo") -> None:
    """Train MxD, TC, STC and CP-muMoE at two K on a bundled language model, splice them in, and measure.

    Args:
        out: folder that holds runs.
        run: name of the run; an earlier demo of that name is replaced, an interrupted one continued.
    """
    import shutil

    from mxd.checkpoint import write_json
    from mxd.config import dump_config, load_config
    from mxd.evaluation.checkpoints import evaluate_checkpoints
    from mxd.model import bundled_path
    from mxd.report.figures import frontier
    from mxd.report.tables import markdown_table
    from mxd.train import train as run_training

    config = load_config(bundled_path("demo.yaml"), ["--out", out, "--run", run])
    marker = config.folder / "evaluation.json"
    earlier = config.folder / "config.yaml"
    is_demo = earlier.exists() and earlier.read_text(encoding="utf-8") == dump_config(config)
    interrupted = is_demo and not marker.exists()
    if is_demo and not interrupted:
        shutil.rmtree(config.folder)
    folder = run_training(config, resume=interrupted)
    found = evaluate_checkpoints([folder], tokens=DEMO_TOKENS, device=config.model.device)
    write_json(marker, found)
    (folder / "table.md").write_text(markdown_table(found), encoding="utf-8")
    figure = frontier(found, folder / "frontier.png")
    _show(found)
    _say(f"numbers: {marker}\ntable:   {folder / 'table.md'}\nfigure:  {figure}")


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console

    from mxd.report.tables import terminal_table

    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(terminal_table(found))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def main() -> None:
    """Run the command line; a user's mistake is one message and a non-zero exit code, never a traceback."""
    from mxd import errors

    try:
        app(sys.argv[1:])
    except errors.MxdError as error:
        sys.stderr.write(f"mxd: {error}\n")
        sys.exit(130 if type(error).__name__ == "Interrupted" else 1)
    except KeyboardInterrupt:
        sys.stderr.write("mxd: interrupted\n")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:  # a full disk, a lost mount: what is on disk stays as it was
        sys.stderr.write(f"mxd: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
