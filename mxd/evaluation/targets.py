"""What a model gets right of texts: their next tokens, or their class by a probe of its final hidden states."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mxd.data.contexts import counted_positions, special_ids
from mxd.evaluation.probes import fit
from mxd.evaluation.walk import PaddedTexts
from mxd.model.frozen import FrozenModel
from mxd.model.unembedding import Unembedding


class Target(ABC):
    """Counts what a model, as it is while this is called, gets right of each text."""

    def __init__(self, model: FrozenModel) -> None:
        self.model = model
        self._special = special_ids(model.tokenizer)

    def counted(self, batch: PaddedTexts) -> Bool[np.ndarray, "batch seq"]:
        """Return the tokens that count: those of a text that are not special."""
        return batch.real & counted_positions(batch.ids, self._special)

    @abstractmethod
    def asked(self, batch: PaddedTexts) -> Int[np.ndarray, " batch"]:
        """Return how many answers are wanted of each text."""

    @abstractmethod
    def right(self, batch: PaddedTexts) -> Int[np.ndarray, " batch"]:
        """Run the model and return how many of these it gives."""


class NextTokens(Target):
    """The tokens of a text: right where the most probable token is the next one."""

    def asked(self, batch: PaddedTexts) -> Int[np.ndarray, " batch"]:
        """Return the number of tokens of each text that count, its first one left out."""
        return self.counted(batch)[:, 1:].sum(-1)

    def right(self, batch: PaddedTexts) -> Int[np.ndarray, " batch"]:
        """Return how many are predicted."""
        predicted = self.model.logits(torch.from_numpy(batch.ids))[:, :-1].argmax(-1).cpu().numpy()
        return ((predicted == batch.ids[:, 1:]) & self.counted(batch)[:, 1:]).sum(-1)


class ProbedClass(Target):
    """The class of a text: right where a probe of the final hidden states, averaged over the text's tokens, says so.

    The probe is multinomial logistic regression (l2, C = 1, at most 1,000 iterations) on states that are standardised
    by their moments over the texts it is fitted on, since final states differ in scale from model to model.
    """

    def __init__(self, model: FrozenModel, groups: Sequence[int]) -> None:
        """Take the number of each text's class."""
        super().__init__(model)
        self.groups = np.array(groups)
        self._head: Unembedding | None = None
        self._probe: Any = None

    def fit(self, batches: Iterable[PaddedTexts]) -> None:
        """Fit the probe to the states of some texts; the model is as it is while batches are asked for."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        states, numbers = [], []
        for batch in batches:
            states.append(self.pooled(batch))
            numbers += batch.numbers
        probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        self._probe = fit(probe, np.concatenate(states), self.groups[numbers])

    def asked(self, batch: PaddedTexts) -> Int[np.ndarray, " batch"]:
        """Return 1 for each text."""
        return np.ones(len(batch.numbers), dtype=int)

    def right(self, batch: PaddedTexts) -> Int[np.ndarray, " batch"]:
        """Return 1 for each text whose class the probe names."""
        return (self._probe.predict(self.pooled(batch)) == self.groups[batch.numbers]).astype(int)

    def direction(self, group: int) -> Float[np.ndarray, " width"]:
        """Return along which direction of the final hidden states the probe's score of a class grows fastest.

        Args:
            group: the class's number.
        """
        scaler, regression = self._probe[0], self._probe[-1]
        if len(regression.classes_) == 2:  # one row, which speaks for the second
            row = regression.coef_[0] * (1 if regression.classes_[1] == group else -1)
        else:
            row = regression.coef_[list(regression.classes_).index(group)]
        return row / scaler.scale_

    def pooled(self, batch: PaddedTexts) -> Float[np.ndarray, "batch width"]:
        """Return the mean of each text's final hidden states over the tokens that count."""
        ids = torch.from_numpy(batch.ids)
        if self._head is None:
            self._head = Unembedding.of(self.model, ids)
        states = self._head.hidden(ids)
        weight = torch.from_numpy(self.counted(batch)).to(states.device, torch.float32)
        sums: Tensor = torch.einsum("bsd,bs->bd", states.float(), weight)
        return (sums / weight.sum(-1, keepdim=True).clamp_min(1)).double().cpu().numpy()
