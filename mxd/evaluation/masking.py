"""Can a topic be switched off? The units of each domain are masked, and the loss is measured on every domain.

After Monet (ICLR 2025, section 5.1): a unit belongs to the domain where its mean activation is at least twice that in
any other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mxd.artifacts.checkpoint import Trained
from mxd.common.numbers import plural
from mxd.data.labelled import labelled_texts
from mxd.evaluation.checkpoints import Subject
from mxd.evaluation.correlation import text_sums
from mxd.evaluation.masks import Ablation, Chosen, LayerKey, ablate, at_least, halves, keyed_layers, matrices
from mxd.evaluation.under_mask import Beside, Masked, UnderMask
from mxd.evaluation.walk import PaddedTexts, TrainedSets
from mxd.layers import Code
from mxd.model.frozen import FrozenModel
from mxd.questions import DEFAULTS, MaskingConfig


def answer(subject: Subject, how: MaskingConfig = DEFAULTS.masking, together: bool = False) -> dict[str, Any]:
    """Mask the domains of a labelled set in checkpoints.

    Args:
        subject: the checkpoints.
        how: which labelled set, and how units are chosen.
        together: splice in sets of them, instead of each alone (``Subject.sets``).

    Raises:
        MxdError: as ``labelled_texts`` and ``evaluate_masking``.
    """
    subject = subject.with_neurons(how.neurons)
    labelled, text = labelled_texts(how.domains, how.text_column, how.label_column), subject.text
    what = subject.base, subject.sets(together), labelled.texts, labelled.labels
    beside = UnderMask.of(subject, how.under, how.seed)
    results = evaluate_masking(*what, how, text.context, text.bos, beside=beside)
    asked = {"texts": how.domains, "limit": how.limit, "seed": how.seed}
    return subject.document(results, replacements=subject.members, **asked)


class ByDomain:
    """Chooses the units of each domain, by their mean activations there."""

    def __init__(self, layers: Mapping[LayerKey, Trained], groups: Sequence[int], domains: int, ratio: float) -> None:
        self.num_masks = domains
        self.groups, self.ratio = groups, ratio
        self.sums = {key: torch.zeros(domains, trained.layer.num_units).double() for key, trained in layers.items()}
        self.tokens = {key: torch.zeros(domains).double() for key in layers}

    def see(self, key: LayerKey, code: Code, at: Int[np.ndarray, " tokens"], batch: PaddedTexts) -> None:
        """Add up a layer's activations by domain; arguments as ``Chooser.see``."""
        domain, row = torch.tensor([self.groups[number] for number in batch.numbers]), batch.row(at)
        self.sums[key].index_add_(0, domain, text_sums(code, row, len(domain), self.sums[key].shape[1]))
        self.tokens[key] += torch.bincount(domain[row], minlength=self.num_masks)

    def chosen(self, key: LayerKey) -> Chosen:
        """Return the units of each domain."""
        scores = self.sums[key] / self.tokens[key].clamp_min(1).unsqueeze(-1)
        domain_of = belonging(scores, self.ratio)
        return Chosen([domain_of == domain for domain in range(self.num_masks)], scores.sum(0) > 0)


def evaluate_masking(
    model: FrozenModel,
    sets: TrainedSets,
    texts: Sequence[str],
    labels: Sequence[str],
    how: MaskingConfig = DEFAULTS.masking,
    context: int = 128,
    bos: bool = True,
    batch: int = 8,
    beside: Beside | None = None,
) -> dict[str, dict[str, Any]]:
    """Mask each domain's units, and measure what that does to the loss on every domain.

    Args:
        model: the frozen base model.
        sets: name -> what is spliced in together.
        texts: texts of all domains.
        labels: the domain of each.
        how: what is asked.
        context: tokens of a text that are read.
        bos: begin each text with BOS where the tokenizer has one.
        batch: texts in one forward.
        beside: what else is measured under each mask; nothing by default.

    Returns:
        Name -> ``domains``; how many ``units`` each has, and ``members``, which (domain -> block -> int32 array); on
        each domain's measured ``texts``, the ``loss`` of the splice and ``loss_base`` of the base model, in nats per
        token; ``matrix[i][j]``, the change of the loss on domain j when the units of domain i are masked, with standard
        errors over texts ``matrix_se``; ``control`` and ``control_se``, the same for units drawn at random; and the
        means of the diagonals and of the rest, ``target``, ``others``, ``control_target``, ``control_others``; and what
        ``beside.measure`` returns.

    Raises:
        MxdError: fewer than two domains, a domain with fewer than two texts, no tokenizer, numbers that make no sense,
            or layers that do not fit the model.
    """
    domains = sorted(set(labels))
    at_least("the number of domains", len(domains), 2)
    groups = [domains.index(label) for label in labels]
    text = halves(model.tokenizer, texts, groups, domains, how.limit, context, bos, how.seed)
    chooser = ByDomain(keyed_layers(sets), groups, len(domains), how.ratio)
    title = f"masking {plural(len(domains), 'domain')} in {plural(len(sets), 'splice')}"
    begun = [] if beside is None else beside.prompts(model, text, texts, domains, bos)
    ablations = ablate(model, sets, text, chooser, title, how.seed, batch)
    about = {"domains": domains, "ratio": how.ratio, "texts": text.measured}
    extra: dict[str, dict[str, Any]] = {name: {} for name in sets}
    if beside is not None:
        extra = beside.measure(Masked(model, sets, ablations, domains, domains, begun))
    return {name: about | _report(domains, ablation) | extra[name] for name, ablation in ablations.items()}


def _report(domains: Sequence[str], ablation: Ablation) -> dict[str, Any]:
    members = [{str(number): np.array(units, np.int32) for number, units in mask.items()} for mask in ablation.masks]
    return {
        "units": dict(zip(domains, ablation.sizes, strict=True)),
        "members": dict(zip(domains, members, strict=True)),
        **ablation.report(),
        **matrices(domains, domains, ablation.changes, ablation.control),
    }


def belonging(scores: Float[Tensor, "domains units"], ratio: float) -> Int[Tensor, " units"]:
    """Return the domain of each unit, -1 for none: where its score is at least ``ratio`` times the next largest."""
    best, second = scores.topk(2, dim=0).values
    return torch.where((best > 0) & (best >= ratio * second), scores.argmax(0), -1)
