"""The same evaluation as other tools define it: SAELens, SAEBench, sparsify, dictionary_learning, Gemma Scope.

They differ in what the variance is about, in which positions count, in where the base model's activation stays, and in
what is ablated. With ``y`` the MLP's outputs, ``e`` the errors and sums over tokens, numbers have their tools' names:

saelens              explained_variance         1 - sum ||e||^2 / sum ||y - ybar||^2, without special tokens
                     explained_variance_legacy  mean over tokens of 1 - ||e||^2 / ||y - ybar||^2
                     ce_loss_score              (CE_zero - CE) / (CE_zero - CE_base): the base MLP stays at special
                                                tokens, but zero-ablation is everywhere; a position is left out by
                                                its own token, not by the one that it predicts
                     kl_div_score               (KL_zero - KL) / KL_zero, likewise; here without the last position
sae_bench            explained_variance         1 - sum ||e||^2 / (sum ||y||^2 - n m^2), m the mean of y^2 over tokens
                                                and coordinates: about zero, nearly, and not about the mean
                     ce_loss_score              as SAELens's, but the replacement is everywhere
sparsify             fvu                        sum ||e||^2 / sum ||y - ybar||^2, at every token
dictionary_learning  frac_variance_explained    1 - sum ||e - ebar||^2 / sum ||y - ybar||^2, at every token
                     frac_recovered             ce_loss_score with the replacement and zero everywhere, over every
                                                target but padding
gemma_scope          fvu, delta_loss            ours: the replacement everywhere, special tokens count nowhere

Read from SAELens 6.54.12 (``evals.py``), SAEBench 0.6.0 (``evals/core/main.py``), sparsify 1.3.3 (``sparse_coder.py``),
dictionary_learning at 60ec6bf (``evaluation.py``) and Gemma Scope, arXiv 2408.05147, section 4. The tools take these
over each of their batches and average; here one batch holds the whole text, so no number depends on a batch's size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mxd.common.hardware import in_double
from mxd.evaluation.walk import Mean


class Variances:
    """Variances of one replacement's errors over the tokens that count, and over all."""

    def __init__(self, mean: Float[Tensor, " d_out"]) -> None:
        """Begin with the mean of the MLP's outputs over the tokens that count."""
        self.mean = mean
        self.counted, self.excluded = _Sums(), _Sums()
        self.legacy: Tensor | float = 0.0

    def see(self, y: Float[Tensor, "tokens d_out"], prediction: Float[Tensor, "tokens d_out"]) -> None:
        """Count the MLP's outputs and the replacement's at a batch of tokens that count."""
        y, error = in_double(y), in_double(y - prediction)
        self.counted.see(y, error)
        about = (y - self.mean.to(y)).square().sum(-1).clamp_min(1e-30)
        self.legacy = self.legacy + (1 - error.square().sum(-1) / about).sum()

    def see_excluded(self, y: Float[Tensor, "tokens d_out"], prediction: Float[Tensor, "tokens d_out"]) -> None:
        """Count both at a batch of tokens that do not count."""
        self.excluded.see(in_double(y), in_double(y - prediction))

    def report(self) -> dict[str, dict[str, int | float]]:
        """Return the numbers of each tool, with the ``tokens`` over which they are taken."""
        counted, every = self.counted, self.counted.plus(self.excluded)
        tokens = {"tokens": counted.tokens}
        saelens = {
            "explained_variance": 1 - counted.fvu,
            "explained_variance_legacy": float(self.legacy) / counted.tokens,
        }
        return {
            "saelens": tokens | saelens,
            "sae_bench": tokens | {"explained_variance": 1 - counted.errors / counted.about_zero},
            "sparsify": {"tokens": every.tokens, "fvu": every.fvu},
            "dictionary_learning": {"tokens": every.tokens, "frac_variance_explained": 1 - every.centred_fvu},
            "gemma_scope": tokens | {"fvu": counted.fvu},
        }


class _Sums:
    """What variances are made of, added up where the numbers are: only reading one waits for a GPU."""

    def __init__(self) -> None:
        self.y: Tensor | float = 0.0
        self.error: Tensor | float = 0.0
        self._squares: Tensor | float = 0.0
        self._errors: Tensor | float = 0.0
        self.tokens = 0

    def see(self, y: Float[Tensor, "tokens d_out"], error: Float[Tensor, "tokens d_out"]) -> None:
        self.y, self.error = self.y + y.sum(0), self.error + error.sum(0)
        self._squares = self._squares + y.square().sum()
        self._errors = self._errors + error.square().sum()
        self.tokens += len(y)

    def plus(self, other: "_Sums") -> "_Sums":
        both = _Sums()
        for name in vars(both):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        return both

    @property
    def squares(self) -> float:
        return float(self._squares)

    @property
    def errors(self) -> float:
        return float(self._errors)

    @property
    def variance(self) -> float:
        return self.squares - float(torch.as_tensor(self.y).square().sum()) / self.tokens

    @property
    def fvu(self) -> float:
        return self.errors / self.variance

    @property
    def centred_fvu(self) -> float:
        return (self.errors - float(torch.as_tensor(self.error).square().sum()) / self.tokens) / self.variance

    @property
    def about_zero(self) -> float:
        coordinates = self.tokens * torch.as_tensor(self.y).numel()
        return self.squares - self.tokens * (self.squares / coordinates) ** 2


@dataclass(frozen=True)
class Positions:
    """Which positions count where a position is left out by its own token, and where only padding is."""

    by_input: Bool[Tensor, "batch seq"]
    unpadded: Bool[Tensor, "batch seq"]

    @classmethod
    def of(cls, ids: Int[Tensor, "batch all"], counted: Bool[Tensor, "batch all"], padding: int | None) -> "Positions":
        """Return the positions of a batch that have a target.

        Args:
            ids: token ids.
            counted: which tokens are not special.
            padding: the padding token, if there is one.
        """
        return cls(counted[:, :-1], ids[:, 1:] != (-1 if padding is None else padding))


@dataclass
class Losses:
    """Losses of one way of running the model over these positions."""

    by_input: Mean = field(default_factory=Mean)
    kl_by_input: Mean = field(default_factory=Mean)
    unpadded: Mean = field(default_factory=Mean)

    def see(self, positions: Positions, increase: Float[Tensor, "batch seq"], kl: Float[Tensor, "batch seq"]) -> None:
        """Count a batch.

        Args:
            positions: what counts.
            increase: by how much each target's loss is larger than the base model's.
            kl: KL divergence from the base model's predictions.
        """
        self.by_input.see(increase, positions.by_input)
        self.kl_by_input.see(kl, positions.by_input)
        self.unpadded.see(increase, positions.unpadded)


def losses(full: Losses, around: Losses, zero: Losses, delta: float) -> dict[str, dict[str, Any]]:
    """Return each tool's share of the loss that is recovered, with the ``targets`` over which it is taken.

    Args:
        full: the replacement at every position.
        around: the base MLP at special tokens.
        zero: zero-ablation at every position.
        delta: the increase of the loss over the targets that are not special.
    """
    targets = sum(full.by_input.counts)
    return {
        "saelens": {
            "targets": targets,
            "ce_loss_score": recovered(around.by_input, zero.by_input),
            "kl_div_score": recovered(around.kl_by_input, zero.kl_by_input),
        },
        "sae_bench": {"targets": targets, "ce_loss_score": recovered(full.by_input, zero.by_input)},
        "dictionary_learning": {
            "targets": sum(full.unpadded.counts),
            "frac_recovered": recovered(full.unpadded, zero.unpadded),
        },
        "gemma_scope": {"delta_loss": delta},
    }


def recovered(splice: Mean, zero: Mean) -> float | None:
    """Return the share of the loss from zero-ablation that is won back.

    ``None`` where that loss is within two standard errors of zero: a share of noise would be read as a result.

    Args:
        splice: what the replacement adds to the loss.
        zero: what zero-ablation adds to it.
    """
    gap = zero.value
    return 1 - splice.value / gap if gap > 2 * zero.standard_error else None


def padding_of(tokenizer: Any) -> int | None:
    """Return the token that dictionary_learning's loss leaves out: PAD, or EOS where there is no other (nnsight's)."""
    ids: Mapping[str, int | None] = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "eos")}
    return ids["pad"] if ids["pad"] is not None else ids["eos"]
