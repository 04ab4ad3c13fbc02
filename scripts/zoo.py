"""List trained layers in one table, from their cards: `python scripts/zoo.py FOLDER ... [--page PAGE]`."""

import argparse
from pathlib import Path

from huggingface_hub import ModelCard

from mxd.artifacts.folders import layers_in, read_layer
from mxd.common.markdown import grid, literal

MEASURED = {"normalized_mse": "NMSE", "cross_entropy_increase": "CE increase", "kl_divergence": "KL"}
"""Metrics of a card's metadata, and what they are called in the table."""
BEGIN, END = "<!-- zoo -->", "<!-- /zoo -->"
"""What stands around the table on a page."""


def row(folder: Path) -> dict[str, str]:
    """Return what the table says of a layer.

    Raises:
        MxdError: the folder holds no layer.
    """
    config, origin = read_layer(folder)
    card = folder / "README.md"
    data = ModelCard.load(card, ignore_metadata_errors=True).data if card.is_file() else None
    values = {result.metric_type: result.metric_value for result in getattr(data, "eval_results", None) or ()}
    return {
        "layer": literal(folder.name),
        "base model": literal(origin.model),
        "block": str(origin.block),
        "method": config.label,
        "sparsity": config.sparsity.slug,
        "units": f"{config.num_units:,}",
        "parameters": f"{config.num_params:,}",
        "MB": f"{(folder / 'model.safetensors').stat().st_size / 1e6:.1f}",
        "tokens": f"{origin.tokens:,}",
        **{title: f"{values[kind]:.4f}" if kind in values else "–" for kind, title in MEASURED.items()},
        "license": literal(getattr(data, "license", None) or "unknown"),
    }


def table(folders: list[Path]) -> str:
    """Return the table of all layers in folders: layers, or runs.

    Raises:
        MxdError: a folder holds no layer.
    """
    rows = [row(layer) for folder in folders for layer in layers_in(folder, "*", str(folder))]
    return grid([list(rows[0]), *(list(one.values()) for one in rows)])


def written(page: str, text: str) -> str:
    """Return a page with the table in the place that it marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Print the table, or write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--page", type=Path, help=f"a page that holds {BEGIN} and {END}")
    asked = parser.parse_args()
    text = table(asked.folders)
    if asked.page is None:
        print(text)
    else:
        asked.page.write_text(written(asked.page.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
