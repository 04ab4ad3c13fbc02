"""Model cards: what people, and the Hub, should know about a layer or a set of layers.

The metadata at the top has the Hub's format, written and checked by huggingface_hub. Text from outside (names of models
and texts) is escaped.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from mxd.artifacts.measured import Evaluation, Replaced, Result, Together, Whole
from mxd.artifacts.provenance import Provenance
from mxd.common.errors import printable
from mxd.common.markdown import grid, literal
from mxd.common.numbers import plural
from mxd.common.parsing import without_surrogates
from mxd.layers import ReplacementConfig
from mxd.metrics import QUESTIONS, explained
from mxd.metrics.faithful import CE_INCREASE, FVU, KL, NMSE, RECOVERED
from mxd.metrics.metric import Metric
from mxd.metrics.whole import WHOLE

TAGS = {
    "MxD": ("mixture-of-decoders",),
    "TC": ("transcoder",),
    "STC": ("transcoder", "skip-transcoder"),
    "SAE": ("sparse-autoencoder",),
    "Monet-HD": ("monet", "mixture-of-experts", "product-keys"),
    "Monet-VD": ("monet", "mixture-of-experts", "product-keys"),
    "PEER": ("peer", "mixture-of-experts", "product-keys"),
    "SMoE": ("mixture-of-experts",),
    "MoV": ("mixture-of-vectors",),
    "M-TC": ("transcoder", "matryoshka"),
    "M-STC": ("transcoder", "skip-transcoder", "matryoshka"),
    "M-SAE": ("sparse-autoencoder", "matryoshka"),
    "MOLT": ("mixture-of-linear-transforms",),
    "SMOLT": ("mixture-of-linear-transforms",),
}
"""Tags that people search for; other methods are tagged with their label."""

HUB_METRICS = {
    "cross_entropy_increase": CE_INCREASE,
    "loss_recovered": RECOVERED,
    "kl_divergence": KL,
    "normalized_mse": NMSE,
    "fraction_of_variance_unexplained": FVU,
}
"""Metrics in the metadata, by their type on the Hub."""

LOCAL = "path/to/this/folder"
"""Where the card of a layer that was not pushed says to load it from."""
UNMEASURED = "Not evaluated yet: `mxd evaluate` measures it on held-out text."
FIGURE = "frontier.png"
UNKNOWN = "unknown"
"""The Hub's name for a license that is not stated."""


@dataclass(frozen=True)
class Member:
    """A layer as its card sees it."""

    name: str
    """Its folder in a set; "" for a single layer."""
    config: ReplacementConfig
    origin: Provenance
    evaluation: Evaluation | None = None
    called: str = ""
    """The last part of its name in the evaluation, where that is not ``name``."""

    @property
    def replaced(self) -> Replaced:
        """What results say of this layer."""
        config, origin = self.config, self.origin
        return Replaced(
            method=config.label,
            sparsity=config.sparsity.slug,
            block=origin.block,
            units=config.num_units or 0,
            params=config.num_params,
            tokens_trained=origin.tokens,
        )

    @property
    def result(self) -> Result | None:
        """The evaluation of this layer, spliced in alone."""
        this = self.replaced
        results = self.evaluation.results if self.evaluation else {}
        fitting = {key: result for key, result in results.items() if result.replacements == [this]}
        if len(fitting) > 1:  # variants with the same method, sparsity and size differ only in name
            fitting = {k: r for k, r in fitting.items() if k.rpartition("/")[2] == (self.called or self.name)}
        return next(iter(fitting.values()), None)


def layer_card(member: Member, address: str | None = None, license: str | None = None, title: str | None = None) -> str:
    """Return the card of one layer.

    Args:
        member: the layer.
        address: its reference on the Hub; ``None`` before it is pushed.
        license: the Hub's name of a license.
        title: the layer's name in the evaluation results; by default its folder.
    """
    origin = member.origin
    text = [
        f"# {member.config.label} for the MLP of block {origin.block} of {literal(origin.model)}",
        f"This layer replaces the MLP of block {origin.block} (counted from 0) of {literal(origin.model)}. "
        f"Method: **{member.config.label}** with {plural(member.config.num_units or 0, 'unit')} and sparsity "
        f"`{member.config.sparsity.slug}`, trained with mxd on {origin.tokens:,} token activations of that MLP."
        + _through(origin),
        *_use(member, address, None),
        *_what([member]),
        *_training([member]),
        *_measured([member], figure=False),
        *_limits([member], license),
    ]
    return _card(text, [member], license, title or member.name or "layer")


def _through(origin: Provenance) -> str:
    """Say which blocks below were replaced, too, while the layer was trained."""
    if not origin.below:
        return ""
    blocks = ", ".join(map(str, origin.below))
    return f" Meanwhile layers of the same run were spliced into blocks {blocks}; it is meant to be used with them."


def set_card(
    members: Sequence[Member],
    address: str | None = None,
    license: str | None = None,
    title: str = "set",
    figure: bool = False,
    whole: Whole | None = None,
) -> str:
    """Return the card of a set of layers, one folder each.

    Args:
        members: the layers.
        address: their repository's reference on the Hub; ``None`` before it is pushed.
        license: the Hub's name of a license.
        title: the set's name in the evaluation results.
        figure: whether ``frontier.png`` lies beside the card.
        whole: what was measured of layers spliced in together.
    """
    members = sorted(members, key=lambda m: (m.origin.block, m.config.label, m.config.sparsity.shown_k or 0, m.name))
    models = sorted({m.origin.model for m in members})
    blocks = sorted({m.origin.block for m in members})
    methods = sorted({m.config.label for m in members})
    many = "s" if len(blocks) > 1 else ""
    text = [
        f"# Sparse replacements for MLPs of {_list(models)}",
        f"{plural(len(members), 'layer')} ({', '.join(methods)}) for the MLP{many} of block{many} "
        f"{', '.join(map(str, blocks))} (counted from 0) of {_list(models)}. Each folder is one layer, with a card of "
        "its own.",
        *_use(members[0], address, members),
        *_what(members),
        *_training(members),
        *_measured(members, figure),
        *_together(members, whole),
        *_limits(members, license, bool(_together(members, whole))),
    ]
    return _card(text, members, license, title)


def license_of(readme: str) -> str | None:
    """Return the license that a card states, if any."""
    try:
        stated = ModelCard(readme, ignore_metadata_errors=True).data.get("license") if readme else None
    except Exception:  # anybody may have written the file: if it cannot be read, it states no license
        return None
    return stated if isinstance(stated, str) and stated != UNKNOWN else None


def _card(text: Iterable[str], members: Sequence[Member], license: str | None, title: str) -> str:
    results = [result for m in members for result in _eval_results(m)]
    bases = sorted({m.origin.model for m in members if _on_hub(m.origin)})
    data = ModelCardData(
        license=license or UNKNOWN,
        library_name="mxd",
        base_model=bases or None,
        base_model_relation="adapter" if bases else None,  # otherwise the Hub lists it as fine-tuned from the base
        datasets=sorted({d for m in members if (d := _dataset(m.origin.data)) is not None}) or None,
        tags=["mechanistic-interpretability", "interpretability", "replacement-layer", *_tags(members)],
        model_name=title if results else None,
        eval_results=results or None,
    )
    return printable(without_surrogates(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(text) + "\n"))


def _tags(members: Sequence[Member]) -> list[str]:
    labels = sorted({m.config.label for m in members})
    return list(dict.fromkeys(tag for label in labels for tag in TAGS.get(label, (label.lower(),))))


def _eval_results(member: Member) -> list[EvalResult]:
    result, evaluation = member.result, member.evaluation
    if result is None or evaluation is None:
        return []
    values = {(kind, metric.label): metric.of(result.model_dump()) for kind, metric in HUB_METRICS.items()}
    source = str(evaluation.data.get("source"))
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Next-token prediction with the replacement spliced in",
            dataset_type=_dataset(evaluation.data) or _code(Path(source).name),
            dataset_name=source,
            dataset_split=str(evaluation.data.get("split")),
            metric_type=kind,
            metric_name=f"{name}, {member.name}" if member.name else name,
            metric_value=value,
        )
        for (kind, name), value in values.items()
        if value is not None and math.isfinite(value)
    ]


def _use(member: Member, address: str | None, members: Sequence[Member] | None) -> list[str]:
    origin = member.origin
    pinned = f", revision={json.dumps(origin.revision)}" if origin.revision else ""
    load = f"model = mxd.load_frozen({json.dumps(origin.model)}{pinned})"
    lines = ["import mxd", "", load]
    where = address or LOCAL
    if members is None:
        lines += [f"with mxd.spliced(model, {{{origin.block}: {json.dumps(where)}}}):", "    ..."]
    else:
        path, at, revision = where.partition("@")
        layer = f"{path}/{member.name}{at}{revision}"
        pattern = json.dumps(f"*-{member.config.sparsity.slug}")
        lines += [
            f"layers = mxd.load_layers({json.dumps(where)})  # or some of them: pattern={pattern}",
            f"with mxd.spliced(model, {{{origin.block}: layers[{json.dumps(member.name)}]}}):",
            "    ...",
            "",
            f"trained = mxd.from_pretrained({json.dumps(layer)})  # one of them, alone",
            *_use_together(member, where, members),
        ]
    code = "\n".join(["```python", *lines, "```"])
    if _on_hub(origin):
        return ["## Use", code]
    return [
        "## Use",
        code,
        "The base model is named as it was in training: a bundled model, or a path on that machine.",
    ]


def _what(members: Sequence[Member]) -> list[str]:
    first = members[0].origin
    rows = [
        ["layer", "method", "block", "sparsity", "units", "parameters", "base MLP's fingerprint"],
        *(
            [
                f"`{m.name}`" if m.name else "this",
                m.config.label,
                str(m.origin.block),
                f"`{m.config.sparsity.slug}`",
                f"{m.config.num_units:,}",
                f"{m.config.num_params:,}",
                f"`{_code(m.origin.fingerprint)}`",
            ]
            for m in members
        ),
    ]
    bases = sorted(
        {f"{literal(m.origin.model)}, revision {literal(m.origin.revision or 'not known')}" for m in members}
    )
    reads = sorted({literal(m.origin.input_convention) for m in members})
    masked = sorted({i for m in members for i in m.origin.excluded_ids})
    stored = all(m.config.bos_constant for m in members)
    return [
        "## What it is",
        grid(rows),
        f"- Base model: {'; '.join(bases)}; run in {literal(first.recorded_in)}. Splicing compares the fingerprint.\n"
        f"- Reads: {'; '.join(reads)}.\n"
        f"- Trained without tokens: {f'ids {masked}' if masked else 'none'}.\n"
        f"- BOS in position 0: {'its output is stored' if stored else 'nothing is stored for it'}.",
    ]


def _training(members: Sequence[Member]) -> list[str]:
    """Return text and recipe, once for all layers that share them."""
    recipes: dict[str, list[str]] = {}
    for m in members:
        recipes.setdefault(_recipe(m.origin), []).append(m.name)
    if len(recipes) == 1:
        return ["## Training", *recipes]
    return ["## Training", *(f"{', '.join(f'`{n}`' for n in names)}:\n\n{recipe}" for recipe, names in recipes.items())]


def _recipe(origin: Provenance) -> str:
    data, training = origin.data, origin.training
    settings = training.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    facts = {
        "text": data.get("source"),
        "split": data.get("split"),
        "context": data.get("context"),
        "tokens": f"{origin.tokens:,}",
        "recipe": training.get("recipe"),
        "steps": training.get("steps"),
        "tokens in a step": training.get("batch_tokens"),
        "learning rate": settings.get("lr"),
        "seed": origin.seed,
        "versions": ", ".join(f"{name} {version}" for name, version in origin.versions.items()),
    }
    rows = [[name, literal(value)] for name, value in facts.items() if value not in (None, "")]
    return grid([["setting", "value"], *rows]) + "\n\n`config.json` holds every setting."


def _measured(members: Sequence[Member], figure: bool) -> list[str]:
    measured = [m for m in members if m.result is not None]
    if not measured:
        return ["## Evaluation", UNMEASURED]
    text = ["## Evaluation", " ".join(sorted({_caption(m) for m in measured}))]
    for title, metrics in QUESTIONS.items():
        header = ["layer", *(metric.title for metric in metrics)]
        text += [f"**{title}**", grid([header, *(_row(m, metrics) for m in members)]), explained(metrics)]
    if figure:
        text.append(f"![{NMSE.name} and {CE_INCREASE.name} against K]({FIGURE})")
    return text


def _use_together(member: Member, where: str, members: Sequence[Member]) -> list[str]:
    """Return the lines that splice in all layers of one kind at once, where there are several and a pattern finds them.

    Args:
        member: one of the kind.
        where: the set's address.
        members: all layers of the set.
    """
    pattern = f"*-{member.config.slug}"
    alike = [m.name for m in members if m.config.slug == member.config.slug]
    blocks = {m.origin.block for m in members if m.name in alike}
    found = [m.name for m in members if fnmatchcase(m.name, pattern)]
    if found != alike or len(blocks) < len(alike) or len(alike) < 2:
        return []
    return [
        "",
        f"layers = mxd.load_layers({json.dumps(where)}, {json.dumps(pattern)})  # {len(alike)} blocks at once",
        "with mxd.spliced(model, {layer.provenance.block: layer for layer in layers.values()}):",
        "    ...",
    ]


def _together(members: Sequence[Member], whole: Whole | None) -> list[str]:
    """Return what was measured of these layers spliced in together."""
    known = [member.replaced for member in members]
    results = whole.results if whole else {}
    fitting = {name: found for name, found in results.items() if all(one in known for one in found.replacements)}
    if whole is None or not fitting:
        return []
    rows = [
        [literal(name), str(len(found.replacements)), *(metric.with_error(found.model_dump()) for metric in WHOLE)]
        for name, found in fitting.items()
    ]
    first: Together = next(iter(fitting.values()))
    caption = (
        f"All layers of a kind spliced in at once, on {first.tokens:,} held-out tokens of "
        f"{literal(whole.data.get('source'))} ({literal(whole.data.get('split'))}): the base model's cross-entropy is "
        f"{first.ce_base:.4f} nats per token."
    )
    return ["**All at once**", caption, grid([["set", "layers", *(m.title for m in WHOLE)], *rows]), explained(WHOLE)]


def _caption(member: Member) -> str:
    result, evaluation = member.result, member.evaluation
    assert result is not None and evaluation is not None
    zero = f", {result.ce_zero:.4f} with the MLP of block {member.origin.block} zero-ablated" if result.ce_zero else ""
    return (
        f"On {result.tokens:,} held-out tokens of {literal(evaluation.data.get('source'))} "
        f"({literal(evaluation.data.get('split'))}), each layer spliced in alone: the base model's cross-entropy is "
        f"{result.ce_base:.4f} nats per token{zero}."
    )


def _row(member: Member, metrics: Sequence[Metric]) -> list[str]:
    name = f"`{member.name}`" if member.name else "this"
    if member.result is None:
        return [name, "not evaluated", *[""] * (len(metrics) - 1)]
    result = member.result.model_dump(exclude_unset=True)
    return [name, *(metric.shown(result) for metric in metrics)]


def _limits(members: Sequence[Member], license: str | None, together: bool = False) -> list[str]:
    limits = [
        "Made for exactly these weights of the base model: a fine-tuned or otherwise changed one is refused.",
        "Fidelity is measured on one text, one layer at a time"
        if any(m.result for m in members)
        else "Not measured yet",
        "A layer can be faithful without being sparse in anything that matters: one whose *routed* is near 0 is a "
        "dense MLP in disguise, an MxD whose *fixed* is near its NMSE a transcoder in disguise. Read both tables.",
    ]
    at_once = "" if together else "several layers spliced at once, "
    limits[1] += (
        f". Not measured: other domains and languages, downstream tasks, {at_once}other seeds, and whether the units "
        "mean anything to a person."
    )
    if any(m.origin.excluded_ids for m in members):
        limits.append("Trained without some tokens (above): in a splice it answers there all the same, untaught.")
    if any(m.config.reads != "mlp_in" for m in members):
        limits.append("An autoencoder reads the MLP's output: it explains the MLP, but the MLP still has to run.")
    if license is None:
        limits.append("The license is not stated; ask the author. The base model's own license holds for that model.")
    return ["## Limits", "\n".join(f"- {limit}" for limit in limits)]


def _on_hub(origin: Provenance) -> bool:
    """Return whether the base model came from the Hub: its name is a valid id, and its commit is known."""
    return _is_id(origin.model) and re.fullmatch(r"[0-9a-f]{40}", origin.revision or "") is not None


def _dataset(data: Mapping[str, Any]) -> str | None:
    """Return a text's name on the Hub, if it has one; ``org/name[:config][@revision]`` in the data."""
    source = str(data.get("source", ""))
    name = source.partition("@")[0].partition(":")[0]
    if (
        "/" not in name
        or not _is_id(name)
        or Path(name).suffix in (".txt", ".csv", ".json", ".jsonl", ".gz", ".parquet")
    ):
        return None
    return None if Path(name).exists() else name


def _is_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _list(values: Iterable[str]) -> str:
    return ", ".join(literal(value) for value in values)


def _code(value: str) -> str:
    """Return a value that is safe between backticks in a table."""
    return re.sub(r"[^\w.+=-]", "?", value)
