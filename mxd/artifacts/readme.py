"""The card in a layer's folder: what it says of numbers follows the files that lie beside it."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

from mxd.artifacts.card import LOCAL, UNMEASURED, Member, layer_card, license_of
from mxd.artifacts.folders import layer_name, read_layer
from mxd.artifacts.listing import layers_in
from mxd.artifacts.measured import Evaluation
from mxd.artifacts.provenance import Provenance
from mxd.common.errors import MxdError
from mxd.common.files import whole_file
from mxd.layers import ReplacementConfig

Read = Callable[[Path], Evaluation | None]


def member_of(folder: Path, name: str, config: ReplacementConfig, origin: Provenance, read: Read) -> Member:
    """Return a layer as its card sees it.

    Its evaluation is in its own folder or in the set's: the first that has results of this layer is taken.

    Args:
        folder: the layer's.
        name: its folder in a set; "" for a single layer.
        config: its config.
        origin: its provenance.
        read: reads a file of results (``Evaluation.read``).

    Raises:
        MxdError: as ``read``.
    """
    evaluations = [read(place / "faithfulness.json") for place in (folder, folder.resolve().parent)]
    members = [Member(name, config, origin, evaluation, layer_name(folder)) for evaluation in evaluations]
    return next((member for member in members if member.result), members[0])


def update_cards(folder: Path) -> None:
    """Write the numbers that lie in a folder, a layer's or a run's, into the cards of its layers.

    A card that names a repository on the Hub tells what was pushed there, and one that somebody wrote is theirs: both
    stay, unless they say that nothing was measured.

    Raises:
        MxdError: a damaged layer or file of results, or a card that cannot be written.
    """
    try:
        layers = layers_in(folder, "*", str(folder))
    except MxdError:
        return  # numbers of layers that lie elsewhere
    read: Read = cache(Evaluation.read)
    for layer in layers:
        path = layer / "README.md"
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        if LOCAL in text or UNMEASURED in text:
            card = layer_card(member_of(layer, "", *read_layer(layer), read), license=license_of(text))
            with whole_file(path) as file:
                file.write_text(card, encoding="utf-8")
