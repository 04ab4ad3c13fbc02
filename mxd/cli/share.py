"""Commands that exchange layers and models: info, push, pull, convert, export-model."""

from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from mxd.cli.shared import HELD_OUT, HeldOut, Whole, app, say, show, suggest
from mxd.common.errors import MxdError, typed


@app.command
def convert(
    *sources_and_out: str,
    from_: Annotated[str | None, Parameter("--from")] = None,
    to: str | None = None,
    block: Whole | None = None,
    input: Literal["mlp_in", "normalized"] | None = None,
    jumprelu: Annotated[bool, Parameter(negative="")] = False,
    tokens: Whole = 32_768,
    on: HeldOut = HELD_OUT,
) -> None:
    """Convert other tools' transcoders to checkpoints, SOURCE OUT --from TOOL, or back, CHECKPOINT... OUT --to TOOL.

    Both: sparsify, saelens, circuit-tracer. From: gemma-scope, reference (the papers' .pt files). See docs/formats.md.

    Args:
        sources_and_out: the tool's file or folder, or checkpoints as for evaluate; last the folder to write.
        from_: the tool whose files to read. The base model is the one they name, or --model.
        to: the tool whose files to write.
        block: the block that is replaced, where the files do not say; of several, the one to convert.
        input: what layers read, where the files leave it open: mlp_in, or normalized (before the norm's affine part).
        jumprelu: write JumpReLU thresholds, fitted on held-out text, also where the tool has TopK.
        tokens: held-out tokens for thresholds and for measuring what is lost.
        on: the text and the base model.

    Raises:
        MxdError: nothing to convert, not exactly one of from_ and to, or several sources for --from.
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
        converted = import_layers(sources[0], out, from_, on.model, block, input, on.device)
    else:
        subject = on.open("convert", sources)
        converted = export_layers(subject.trained, subject.base, subject.contexts, out, to or "", jumprelu, tokens)
    for item in converted:
        say("\n  ".join([f"{item.source} -> {item.path}", *item.notes, *([item.loss.line] if item.loss else [])]))


@app.command
def export_model(
    model: str, /, *checkpoints_and_out: str, named: Annotated[str | None, Parameter("--set")] = None
) -> None:
    """Write a model with trained layers spliced in as a normal transformers repository: MODEL CHECKPOINT... OUT.

    AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True) loads it where mxd is not installed. The MLPs that
    are replaced are left out, unless a layer reads their output; with a layer for each block, none is left.

    Args:
        model: the base model: a bundled name, a Hub id, a folder or a .gguf file.
        checkpoints_and_out: layer folders, run folders or Hub references; last the folder to write, which is new or
            empty.
        named: the set of layers to export where there are several, such as mxd-k32: all layers of one kind.

    Raises:
        MxdError: no checkpoints.
    """
    *checkpoints, out = checkpoints_and_out or [""]
    if not checkpoints:
        raise MxdError("give a model, checkpoints and a folder to write: mxd export-model MODEL CHECKPOINT... OUT")
    from mxd.share.export import export_checkpoints, exported_size

    export_checkpoints(model, checkpoints, out, named)
    say(f"done: {out}\nsize: {exported_size(out)}")
    suggest(f"AutoModelForCausalLM.from_pretrained({out!r}, trust_remote_code=True)")


@app.command
def info(checkpoint: str, json: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Print a checkpoint's config, parameters and provenance.

    Unfactorised parameters are how many they would be if every expert had a matrix of its own.

    Args:
        checkpoint: a layer folder, a run folder (every layer in it), or a Hub reference to either.
        json: Print everything as JSON, for other programs.
    """
    from mxd.artifacts.folders import find_layers, read_layer
    from mxd.artifacts.hub import cached_reference
    from mxd.report.info import info_tables

    paths = find_layers(checkpoint, weights=False)
    if json:
        say(dumps({str(cached_reference(path) or path): _described(path) for path in paths}, indent=2))
    else:
        show(
            *info_tables(
                checkpoint, {str(cached_reference(path) or path.name or path): read_layer(path) for path in paths}
            )
        )
        suggest(f"mxd info {typed(checkpoint)} --json (every field)")


def _described(path: Path) -> dict[str, Any]:
    """Return a layer's config as it is stored, with its numbers of parameters."""
    from mxd.artifacts.folders import read_config
    from mxd.layers import parse_layer

    config = read_config(path)
    layer = parse_layer(config.get("layer"))
    return {"parameters": layer.num_params, "unfactorised_parameters": layer.unfactorised_params, **config}


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
        checkpoint: a layer folder, or a run folder (every layer in it, its faithfulness.json, whole.json and a figure).
        repo: org/name; created if it does not exist.
        private: make the repository private.
        revision: branch to push to; created if it does not exist.
        create_pr: open a pull request instead.
        license: license of the layers, by the Hub's name (apache-2.0, mit, ...).
        message: commit message.
    """
    from mxd.artifacts.transfer import push as send

    _draw(checkpoint)
    pushed = send(checkpoint, repo, private, revision, create_pr, None, license, message)
    say(f"pushed: {pushed.url}\nrevision: {pushed.revision}")
    suggest(f"mxd info {typed(f'{repo}@{pushed.revision}')}")


@app.command
def pull(reference: str, folder: Path | None = None, *, pattern: str = "*") -> None:
    """Copy a layer, or a set of layers, from the Hugging Face Hub into a folder; existing layers stay.

    Args:
        reference: org/name[/subfolder][@revision].
        folder: where the layer goes, or the layers of a set; by default checkpoints/NAME.
        pattern: copy only the layers of a set whose names match, for example '*-k32'.
    """
    from mxd.artifacts.transfer import pull as fetch

    paths = fetch(reference, folder, pattern)
    for path in paths:
        say(f"pulled: {path}")
    suggest(f"mxd evaluate {typed(*paths)}")


def _draw(folder: Path) -> None:
    """Draw the figure of an evaluated run, where it is missing or older than the numbers."""
    from mxd.artifacts.measured import Evaluation
    from mxd.common.files import read_json
    from mxd.report.figures import frontier

    results, figure = folder / "faithfulness.json", folder / "frontier.png"
    is_set = Evaluation.read(results) is not None and not (folder / "config.json").exists()
    if is_set and (not figure.exists() or figure.stat().st_mtime < results.stat().st_mtime):
        frontier(read_json(results), figure)
