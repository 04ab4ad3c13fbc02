"""Does it decompose? What a replacement's output is made of: what gates, the dense part, and both together contribute.

An MxD contains two things that are not mixtures of decoders, and a small error cannot tell it from either: the base MLP
(one expert always on: *a dense MLP in disguise*), and a transcoder (``z D`` constant: *a transcoder in disguise*). With
``a`` the code, ``v_n`` what unit n adds (``unit_output``), and a bar for the mean over tokens, every output is

    y^ - b - rest(x) = sum_n abar_n vbar_n              the same for every token
                     + sum_n (a_n - abar_n) vbar_n      gate: all that a transcoder has
                     + sum_n abar_n (v_n - vbar_n)      dense: all that an MLP has
                     + sum_n (a_n - abar_n)(v_n - vbar_n)       interaction: what only a mixture of decoders has

where ``rest`` is what is added whatever the code: a skip, or nothing. A share is the energy of a part about its mean,
over that of ``y^``. The parts covary, so shares need not add up to 1. For an MxD they follow from ``a C`` and ``z D``.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mxd.common.hardware import in_double
from mxd.evaluation.ranks import weight_ranks
from mxd.evaluation.walk import CodeMoments, Totals
from mxd.layers import Code, ReplacementLayer
from mxd.layers.losses import normalized_mse

STABLE_RANKED = 32
"""Units whose stable rank is taken here; `mxd structure` takes it of 2,000."""


class Energy:
    """The energy of vectors about their mean: the sum over n tokens of ``||v - mean v||^2``.

    It is taken as ``sum ||v||^2 - ||sum v||^2 / n``, in one pass and in double precision.
    """

    def __init__(self) -> None:
        self.sum: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0
        self.tokens = 0

    def see(self, vectors: Float[Tensor, "tokens d"]) -> None:
        """Count one vector per token."""
        vectors = in_double(vectors)
        self.sum = self.sum + vectors.sum(0)
        self.squares = self.squares + vectors.square().sum()
        self.tokens += len(vectors)

    @property
    def value(self) -> float:
        """The energy; 0 for no tokens."""
        mean = torch.as_tensor(self.sum).square().sum() / max(self.tokens, 1)
        return max(0.0, float(self.squares) - float(mean))


class Account:
    """What one replacement's output is made of, from two passes over the same tokens: ``see_means``, then ``see``.

    Works from the contract alone: ``encode``, ``hidden`` and ``decode`` with changed codes and hidden states.
    """

    def __init__(self, layer: ReplacementLayer) -> None:
        self.layer = layer
        self.moments = CodeMoments(layer)
        self.hidden: Tensor | float = 0.0
        self.parts = {name: Energy() for name in ("output", "gate", "dense", "interaction", "skip")}
        self.totals = Totals("output", "routed", "shared", "mean_gate", "fixed", "effective")

    def see_means(self, x: Float[Tensor, "tokens d_in"]) -> None:
        """Count a batch of the layer's inputs, leaving out those it answers with its stored constant."""
        x = x[~self.layer.at_bos(x)]
        self.moments.count(self.layer.encode(x))
        self.hidden = self.hidden + in_double(self.layer.hidden(x)).sum(0)

    def see(
        self,
        x: Float[Tensor, "tokens d_in"],
        y: Float[Tensor, "tokens d_out"],
        code: Code,
        prediction: Float[Tensor, "tokens d_out"],
    ) -> None:
        """Count a batch in the second pass; the same tokens count as in ``see_means``.

        Args:
            x: the layer's inputs.
            y: the MLP's outputs.
            code: the layer's code for ``x``.
            prediction: the layer's outputs for ``x``.
        """
        layer, bias = self.layer, self.layer.bias
        kept = layer.at_bos(x).logical_not().nonzero().squeeze(1)  # not a mask: each use of one waits for a GPU
        x, y, prediction = x[kept], y[kept], prediction[kept]
        code = code.at(kept)
        mean_code = self.moments.mean_code(x)
        mean_hidden = torch.as_tensor(self.hidden) / max(self.moments.tokens, 1)
        mean_gate = layer.decode(x, mean_code)
        fixed = layer.decode(x, code, mean_hidden)
        constant = layer.decode(x, mean_code, mean_hidden)  # the same for every token, the skip aside
        skip = layer.decode(x, nothing(code))
        # With a = abar + da and v = vbar + dv: fixed is a vbar, mean_gate abar v and constant abar vbar, each plus bias
        # and skip. These cancel below, where da vbar, abar dv and da dv are taken as differences of decoded outputs.
        self.parts["output"].see(prediction)
        self.parts["gate"].see(fixed - constant)
        self.parts["dense"].see(mean_gate - constant)
        self.parts["interaction"].see(prediction - fixed - mean_gate + constant)
        self.parts["skip"].see(skip)
        self.totals.add("output", (prediction - bias).square().sum())
        self.totals.add("routed", (prediction - mean_gate).square().sum())
        shared = layer.decode(x, only(code, self.moments.leading_unit))
        self.totals.add("shared", (shared - bias).square().sum())
        self.totals.add("mean_gate", normalized_mse(mean_gate, y), len(x))
        self.totals.add("fixed", normalized_mse(fixed, y), len(x))
        self.totals.add("effective", effective_units(code.activations).sum())

    def report(self) -> dict[str, float]:
        """Return the metrics; docs/evaluation.md says what each can and cannot show."""
        tokens, output = max(self.moments.tokens, 1), max(self.totals["output"], 1e-30)
        energy = max(self.parts["output"].value, 1e-30)
        return {
            "dead_share": self.moments.dead_share,
            "routed_share": self.totals["routed"] / output,
            "shared_share": self.totals["shared"] / output,
            "nmse_mean_gate": self.totals["mean_gate"] / tokens,
            "nmse_fixed_directions": self.totals["fixed"] / tokens,
            **{f"{name}_share": self.parts[name].value / energy for name in ("gate", "dense", "interaction", "skip")},
            "stable_rank": self.stable_rank(),
            "effective_units": self.totals["effective"] / tokens,
        }

    def stable_rank(self) -> float:
        """Return the mean stable rank of the weights of the first units that were active; 0 where none was."""
        active = self.moments.counts.nonzero().flatten().tolist()[:STABLE_RANKED]
        return float(weight_ranks(self.layer, active)[1].sum()) / max(len(active), 1)


def effective_units(values: Float[Tensor, "tokens k"]) -> Float[Tensor, " tokens"]:
    """Return ``exp(entropy(a / sum a))``: how many equally active units would be as spread out; 0 where none is."""
    total = values.sum(-1, keepdim=True)
    p = values / total.clamp_min(1e-30)
    entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
    return torch.where(total.squeeze(-1) > 0, entropy.exp(), 0.0)


def only(code: Code, unit: int) -> Code:
    """Return the code with all units except one switched off."""
    return code.with_activations(code.activations * (code.indices == unit))


def nothing(code: Code) -> Code:
    """Return the code with all units switched off."""
    return Code(code.activations[:, :0], code.indices[:, :0])
