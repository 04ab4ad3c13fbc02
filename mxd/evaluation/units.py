"""What did the units learn? How often each fires, and the text it fires on (MxD, arXiv 2505.21364, app. C.1 and E).

One pass over the text serves every layer: the base model runs once, up to the last of them. Memory does not depend on
the length of the text; its token ids wait in a temporary file until it is known which units and contexts are shown.
These units alone carry contexts, histograms and the tokens that they promote (``directions.py``), however many others
there are.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import torch
from jaxtyping import Float, Int

from mxd.artifacts.checkpoint import Trained
from mxd.common.errors import MxdError
from mxd.common.numbers import plural
from mxd.common.progress import progress
from mxd.data.contexts import Contexts
from mxd.evaluation.checkpoints import Subject
from mxd.evaluation.directions import described, sampled
from mxd.evaluation.intervals import Interval, IntervalSamples
from mxd.evaluation.walk import CodeMoments, check_units, codes, evaluating, streamed
from mxd.layers import Code
from mxd.model.frozen import FrozenModel
from mxd.model.lens import Lens
from mxd.questions import DEFAULTS, UnitsConfig

BINS = 4
"""Bins of the histogram per factor of ten."""
LOAD = 0.5
"""The coefficient from which on a token counts to a unit's load, where coefficients sum to 1 (muMoE, app. H.4)."""
WINDOW = (20, 8)
"""Tokens shown before and after the one that was drawn."""

Activations = dict[tuple[int, int], Float[np.ndarray, " seq"]]
"""(unit, context) -> the unit's activation at each token of the context that is shown, zero at the others."""


def answer(subject: Subject, how: UnitsConfig = DEFAULTS.units, shown: Sequence[int] | None = None) -> dict[str, Any]:
    """Look at the units of checkpoints.

    Args:
        subject: the checkpoints.
        how: how much is read and shown.
        shown: units to show; by default those that add most to the output.

    Raises:
        MxdError: as ``evaluate_units``.
    """
    subject = subject.with_neurons(how.neurons)
    results = evaluate_units(subject.base, subject.layers, subject.contexts(how.seed), how, shown)
    return subject.document(results, replacements=subject.members, tokens_asked=how.tokens, seed=how.seed)


@torch.no_grad()
def evaluate_units(
    model: FrozenModel,
    layers: Mapping[str, Trained],
    contexts: Contexts,
    how: UnitsConfig = DEFAULTS.units,
    units: Sequence[int] | None = None,
    forward_contexts: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Count how often the units of trained layers fire, and show what some of them fire on.

    Args:
        model: the frozen base model.
        layers: name -> a layer with its provenance.
        contexts: the text.
        how: what is asked. Positions are rounded up to whole contexts; those a layer was trained without do not count.
        units: units to show; by default those that add most (``contributing``).
        forward_contexts: contexts in one forward, by default about 1,024 tokens.

    Returns:
        Name -> what ``firing`` says of all units, and for each unit that is shown, under ``units``: its ``rate``, its
        ``mean`` activation where it is active and its ``max``, what it adds (``directions.described``), and
        ``intervals`` from strong to weak. Each of an interval's ``contexts`` holds the ``tokens`` around the one
        ``at``, the ``activations`` there, and the activation ``value``. ``logits`` says how directions were taken to
        logits: the final ``norm`` and whether it is ``centred``, the ``sample`` of tokens, whether directions are
        ``fixed``, and the ``peak`` of random ones by ``chance``; or what is ``missing``. Where a token's coefficients
        sum to 1, ``loads`` is the share of the tokens at which each unit has at least ``LOAD`` of them, and ``loaded``
        how many units have any.

    Raises:
        MxdError: no layers, no text, or units that a layer does not have.
    """
    check_units(layers, units)
    counted = {name: _Counted(trained, how) for name, trained in layers.items()}
    with evaluating(model, layers), TemporaryFile() as file:
        text = _read(model, counted, contexts, how.tokens, forward_contexts, file)
        per_batch = forward_contexts or max(1, 1024 // text.shape[1])
        chosen = {
            name: contributing(one.moments, how.top, how.shared) if units is None else list(units)
            for name, one in counted.items()
        }
        any_shown = any(chosen.values())
        part = text[: -(-how.sample // text.shape[1]) if any_shown else 0]
        batches = [np.array(part[i : i + per_batch]) for i in range(0, len(part), per_batch)]
        maxima = {name: {n: float(counted[name].moments.maxima[n]) for n in chosen[name]} for name in layers}
        directions = sampled(model, layers, maxima, batches)
        lens, seen = _seen_through(model if any_shown else None)
        results = {}
        for name, one in counted.items():
            logits = seen | {"fixed": directions[name].fixed, "sample": directions[name].tokens}
            adds = described(directions[name], lens, partial(token_strings, model.tokenizer))
            results[name] = one.report(model, {n: adds[n] for n in chosen[name]}, logits, text, per_batch)
    return results


class _Counted:
    """What the units of one layer do on the text."""

    def __init__(self, trained: Trained, how: UnitsConfig) -> None:
        units = trained.layer.num_units
        self.trained, self.shared = trained, how.shared
        self.moments = CodeMoments(trained.layer)
        self.samples = IntervalSamples(units, how.contexts, how.seed)
        self.loads = torch.zeros(units) if trained.layer.config.sparsity.simplex else None

    def see(self, code: Code, context: Int[np.ndarray, " tokens"], at: Int[np.ndarray, " tokens"]) -> None:
        """Count some tokens; arguments as ``IntervalSamples.see``."""
        self.moments.count(code)
        self.samples.see(code, context, at)
        if self.loads is not None:
            self.loads += code.indices[code.activations >= LOAD].cpu().bincount(minlength=len(self.loads))

    def report(
        self,
        model: FrozenModel,
        adds: Mapping[int, dict[str, Any]],
        logits: Mapping[str, Any],
        text: Int[np.ndarray, "contexts seq"],
        per_batch: int,
    ) -> dict[str, Any]:
        """Return what ``evaluate_units`` does of one layer.

        Args:
            model: the frozen base model.
            adds: of the units that are shown, what each adds.
            logits: how their directions were taken to logits.
            text: token ids.
            per_batch: contexts in one forward.
        """
        moments = self.moments
        intervals = {unit: self.samples.intervals(unit) for unit in adds}
        activations = _activations(model, self.trained, intervals, text, per_batch)
        found = {"block": self.trained.provenance.block, **firing(moments, self.shared)}
        found["units"] = {
            str(unit): {"intervals": _pages(model, unit, intervals[unit], activations, text)}
            | added
            | {key: float(found[of][unit]) for key, of in (("rate", "rates"), ("mean", "means"), ("max", "maxima"))}
            for unit, added in adds.items()
        }
        if self.loads is not None:
            found["loads"] = (self.loads / max(moments.tokens, 1)).numpy()
            found["loaded"] = int(self.loads.count_nonzero())
        return found | {"logits": logits}


def _read(
    model: FrozenModel,
    counted: Mapping[str, _Counted],
    contexts: Contexts,
    tokens: int,
    forward_contexts: int | None,
    file: IO[bytes],
) -> Int[np.ndarray, "contexts seq"]:
    """Count the codes of some layers over a text, and return its token ids, which are kept in a file.

    Arguments as ``evaluate_units``.
    """
    read = width = 0
    layers = {name: one.trained for name, one in counted.items()}
    with progress(f"units of {plural(len(layers), 'layer')}", tokens) as advance:
        for batch in streamed(contexts, tokens, forward_contexts):
            width = batch.shape[1]
            for name, code, position in codes(model, layers, batch):
                counted[name].see(code, read + position // width, position % width)
            file.write(batch.astype(np.int32).tobytes())
            read += len(batch)
            advance(batch.size)
    file.flush()
    return np.memmap(file, np.int32, "r", shape=(read, width))


def firing(moments: CodeMoments, shared: float) -> dict[str, Any]:
    """Return how often and how strongly all units fire (app. C.1).

    Returns:
        ``tokens``; for every unit its rate, mean activation where active, and largest, in the float32 arrays ``rates``,
        ``means``, ``maxima``; a ``histogram`` of log10 of the rates of those that fire; how many are ``dead``; and
        which are ``shared``, active at more than ``shared_above`` of the tokens.
    """
    rates, counts = moments.rates, moments.counts
    low = math.floor(-math.log10(max(moments.tokens, 2)))
    edges = np.linspace(low, 0, -low * BINS + 1)
    histogram, _ = np.histogram(rates[counts > 0].log10().numpy(), edges)
    over = [(n, rate) for n, rate in enumerate(rates.tolist()) if rate > shared]
    return {
        "tokens": moments.tokens,
        "rates": rates.float().numpy(),
        "means": (moments.sums / counts.clamp_min(1)).float().numpy(),
        "maxima": moments.maxima.numpy(),
        "histogram": {"log10_edges": edges.tolist(), "counts": histogram.tolist()},
        "dead": int((counts == 0).sum()),
        "shared_above": shared,
        "shared": [{"unit": n, "rate": rate} for n, rate in sorted(over, key=lambda unit: -unit[1])],
    }


def _seen_through(model: FrozenModel | None) -> tuple[Lens | None, dict[str, Any]]:
    """Return what takes directions to logits, and what is to be said of it; ``None``: no unit is shown."""
    try:
        if model is None:
            raise MxdError("no unit is shown.")
        lens = Lens.of(model)
    except MxdError as error:
        return None, {"norm": None, "centred": None, "chance": None, "missing": str(error)}
    return lens, {"norm": lens.norm, "centred": lens.centred, "chance": lens.chance(), "missing": None}


def contributing(moments: CodeMoments, top: int, shared: float) -> list[int]:
    """Return the units that add most to the output, by mean activation times weight norm, without shared and dead ones.

    Args:
        moments: of the layer's codes over a text.
        top: how many.
        shared: units active at more than this share of the tokens count as shared.
    """
    adds = moments.sums * moments.layer.unit_norms().detach().cpu()
    adds[(moments.rates > shared) | (moments.counts == 0)] = -1
    return [n for n in adds.argsort(descending=True, stable=True)[:top].tolist() if adds[n] >= 0]


def token_strings(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token by itself, with the space it begins with; numbers where there is no tokenizer."""
    if tokenizer is None:
        return [str(i) for i in ids]
    once, twice = ({i: tokenizer.decode([i] * times) for i in set(ids)} for times in (1, 2))
    return [twice[i][len(once[i]) :] for i in ids]  # some tokenizers drop the space of the first token


def _activations(
    model: FrozenModel,
    trained: Trained,
    intervals: Mapping[int, Sequence[Interval]],
    text: Int[np.ndarray, "contexts seq"],
    per_batch: int,
) -> Activations:
    """Return the units' activations over the contexts that are shown, by running the model on these again."""
    shown: dict[int, list[tuple[int, slice]]] = {}
    for unit, ranges in intervals.items():
        for occurrence in (occurrence for interval in ranges for occurrence in interval.occurrences):
            shown.setdefault(occurrence.context, []).append((unit, _window(occurrence.at)))
    activations: Activations = {}
    order = sorted(shown)
    for numbers in (order[i : i + per_batch] for i in range(0, len(order), per_batch)):
        mask = np.zeros((len(numbers), text.shape[1]), bool)
        for row, context in enumerate(numbers):
            for _, window in shown[context]:
                mask[row, window] = True
        for _, code, position in codes(model, {"": trained}, text[numbers], mask):
            code = code.cpu()
            values, indices = code.activations.numpy(), code.indices.numpy()
            rows, at = np.divmod(position, text.shape[1])
            for row, context in enumerate(numbers):
                here = rows == row
                for unit, _ in shown[context]:
                    line = np.zeros(text.shape[1])
                    line[at[here]] = (values[here] * (indices[here] == unit)).sum(-1)
                    activations[unit, context] = line
    return activations


def _window(at: int) -> slice:
    before, after = WINDOW
    return slice(max(0, at - before), at + after + 1)


def _pages(
    model: FrozenModel,
    unit: int,
    intervals: Sequence[Interval],
    activations: Activations,
    text: Int[np.ndarray, "contexts seq"],
) -> list[dict[str, Any]]:
    pages = []
    for interval in intervals:
        contexts = []
        for value, context, at in interval.occurrences:
            window = _window(at)
            contexts.append(
                {
                    "tokens": token_strings(model.tokenizer, text[context, window].tolist()),
                    "activations": [float(f"{activation:.4g}") for activation in activations[unit, context][window]],
                    "at": at - window.start,
                    "value": value,
                }
            )
        pages.append({"low": interval.low, "high": interval.high, "contexts": contexts})
    return pages
