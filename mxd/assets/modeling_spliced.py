"""A causal language model in which sparse layers replace some of the MLPs, as `mxd export-model` writes it.

Plain PyTorch on top of the base model's own class, for inference; it needs only torch and transformers (5.0 or later).
"mxd" in config.json says in which blocks MLPs are replaced, by what, how that was trained, and for which base model.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config as BaseConfig
from transformers import GPT2LMHeadModel as BaseModel
from transformers import __version__

ACTIVATIONS = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class SplicedConfig(BaseConfig):
    """The base model's config, and what is spliced in under ``mxd``."""

    model_type = f"mxd_{BaseConfig.model_type}"


class SparseLayer(nn.Module):
    """A replacement layer; units are rows of its weights, so ``x G`` of the papers is ``x @ gate.T`` here.

    mxd         y = (a C) * (z D) + b               a: the active units, z: the dense encoder's hidden state
    cp_mumoe    y = ((a C') * (z D')) W + b
    tr_mumoe    y = ((a U1) (z U2)) U3 + b, a ring of tensors
    tucker_mumoe  y = (((a A1) (x) (z A2)) . Z) A3 + b
    moe         y = sum_n a_n (z W_n) + b
    mumoe_block y = ((a C2) * ([h, 1] A2)) W2 + b,   h = phi(((a C1) * ([x, 1] A1)) W1)
    transcoder  y = a D + b, plus x S with a skip
    topk_sae    the same, of the base MLP's output
    monet       y = sum_ij a_ij E_ij(x) + b, E_ij of halves i and j: V_j u_i + c_j, or one half of its units from each
    peer        y = sum_n a_n phi(u_n . x) v_n + b, n pairs of keys
    smoe        y = sum_n a_n V_n phi(U_n x) + b
    mov         y = ((a C) * z) D + b
    linear      y = x S + b
    low_rank    y = (x A) B + b
    molt        y = sum_t a_t (x V_t^T) U_t + b, plus x S with a skip; the rows of all V lie one below the other

    With ``bos_radius``, the output is a stored constant where the input is that of BOS in position 0, up to this
    distance, relative to its norm.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        self.spec = spec
        for name, shape in spec["shapes"].items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output ``[..., d_out]`` for ``x [..., d_in]``, in its dtype; computed in that of the weights."""
        rows = x.reshape(-1, x.shape[-1]).to(self.bias.dtype)
        out = FORWARDS[self.spec["method"]](self, rows)
        if self.spec["bos_radius"] is not None:
            square = self.bos_in.square().sum()
            distance = rows.square().sum(-1) - 2 * (rows @ self.bos_in) + square  # |row - bos_in|^2
            out = torch.where((distance < self.spec["bos_radius"] ** 2 * square).unsqueeze(-1), self.bos_out, out)
        return out.reshape(*x.shape[:-1], out.shape[-1]).to(x.dtype)

    def mxd(self, rows: Tensor) -> Tensor:
        """Return the output of a Mixture of Decoders."""
        experts = self.mixture(rows, self.expert_scale)
        return torch.addcmul(self.bias, experts, self.project(rows, self.decoder))

    def cp_mumoe(self, rows: Tensor) -> Tensor:
        """Return the output of a CP-factorised mixture of experts."""
        experts = self.mixture(rows, self.expert_factor)
        return (experts * self.project(rows, self.input_factor)) @ self.output_factor + self.bias

    def tr_mumoe(self, rows: Tensor) -> Tensor:
        """Return the output of a mixture of experts that are slices of a tensor ring."""
        experts = self.mixture(rows, self.expert_factor)
        one, two = self.spec["rank_1"], self.spec["rank_2"]
        ring = experts.view(-1, one, two) @ self.project(rows, self.input_factor).view(-1, two, self.spec["rank_3"])
        return ring.flatten(1) @ self.output_factor + self.bias

    def tucker_mumoe(self, rows: Tensor) -> Tensor:
        """Return the output of a Tucker-factorised mixture of experts."""
        experts = self.mixture(rows, self.expert_factor)
        hidden = self.project(rows, self.input_factor)
        parts = zip(experts.split(1024), hidden.split(1024), strict=True)  # outer products are large
        inner = [(e.unsqueeze(2) * h.unsqueeze(1)).flatten(1) @ self.core.flatten(0, 1) for e, h in parts]
        return torch.cat(inner) @ self.output_factor + self.bias

    def moe(self, rows: Tensor) -> Tensor:
        """Return the output of a mixture of unfactorised experts, which are few."""
        each = self.active(rows, self.gate, self.gate_bias, torch.eye(len(self.gate)).to(self.gate))
        hidden, out = self.inputs(rows), self.bias.expand(len(rows), -1).clone()
        for activations, expert in zip(each.T, self.experts, strict=True):
            at = activations.nonzero().squeeze(1)
            out[at] += activations[at].unsqueeze(1) * (hidden[at] @ expert)
        return out

    def mumoe_block(self, rows: Tensor) -> Tensor:
        """Return the output of two CP-factorised mixtures with the same activations."""
        tables = (self.first_experts, self.second_experts)
        first, second = self.active(rows, self.gate, self.gate_bias, torch.cat(tables, 1)).chunk(2, 1)
        read = F.layer_norm(rows, rows.shape[-1:]) if self.spec["layer_norm"] else rows
        between = (first * (read @ self.first_in + self.first_bias)) @ self.first_out
        between = ACTIVATIONS[self.spec["activation"]](between)
        return (second * (between @ self.second_in + self.second_bias)) @ self.second_out + self.bias

    def mov(self, rows: Tensor) -> Tensor:
        """Return the output of a mixture of (IA)^3 vectors."""
        experts = self.active(rows, self.gate, self.gate_bias, self.expert_scale)
        return (experts * self.inputs(rows)) @ self.decoder + self.bias

    def linear(self, rows: Tensor) -> Tensor:
        """Return the output of a linear map."""
        return torch.addmm(self.bias, rows, self.weight)

    def low_rank(self, rows: Tensor) -> Tensor:
        """Return the output of a linear map of low rank."""
        return torch.addmm(self.bias, rows @ self.input_factor, self.output_factor)

    def transcoder(self, rows: Tensor) -> Tensor:
        """Return the output of a transcoder, with or without skip, or of an autoencoder."""
        out = self.active(rows, self.encoder, self.encoder_bias, self.decoder) + self.bias
        return out + rows @ self.skip if "skip" in self.spec["shapes"] else out

    def mixture(self, rows: Tensor, table: Tensor) -> Tensor:
        """Return the mixture of the experts' rows; in a hierarchy, the product of its levels' mixtures."""
        if not self.spec["levels"]:
            return self.active(rows, self.gate, self.gate_bias, table)
        kinds, sizes = self.spec["sparsity"]["levels"], self.spec["levels"][1:]
        product = self.active(rows, self.gate, self.gate_bias, table, kinds[0])
        later = zip(self.later_gate.split(sizes), self.later_gate_bias.split(sizes), kinds[1:], strict=True)
        for number, (gate, bias, kind) in enumerate(later):
            level = self.active(rows, gate, bias, getattr(self, f"later_tables_{number}"), kind)
            if self.spec["method"] == "tr_mumoe":
                two = self.spec["rank_2"]
                product = (product.unflatten(1, (-1, two)) @ level.unflatten(1, (two, two))).flatten(1)
            elif self.spec["method"] == "tucker_mumoe":
                product = (product.unsqueeze(2) * level.unsqueeze(1)).flatten(1)
            else:
                product = product * level
        return product

    def monet(self, rows: Tensor) -> Tensor:
        """Return the output of a Monet: pairs of the halves that each head keeps, through ``[tokens, heads, m]``."""
        one, other = (self.kept(scores, side) for side, scores in enumerate(self.key_scores(rows)))
        hidden = ACTIVATIONS[self.spec["activation"]](F.linear(rows, self.encoder, self.encoder_bias))
        first, second = (one * other.sum(-1, True)).sum(1), (other * one.sum(-1, True)).sum(1)
        n = one.shape[-1]
        if self.spec["decompose"] == "horizontal":
            sent = other.mT @ (one @ hidden.unflatten(1, (n, -1)))
            return sent.flatten(1) @ self.decoder + second @ self.decoder_bias + self.bias
        u1, u2 = (half.unflatten(1, (n, -1)) for half in hidden.chunk(2, dim=1))
        top = torch.cat([first.unsqueeze(-1) * u1, one.mT @ (other @ u2)], 1).flatten(1) @ self.top
        bottom = torch.cat([other.mT @ (one @ u1), second.unsqueeze(-1) * u2], 1).flatten(1) @ self.bottom
        biases = torch.cat([first @ self.top_bias, second @ self.bottom_bias], 1)
        return torch.cat([top, bottom], 1) + biases + self.bias

    def peer(self, rows: Tensor) -> Tensor:
        """Return the output of single-neuron experts: each head's k best pairs of keys, which are among the k best."""
        k = self.spec["sparsity"]["k"]
        (first, one), (second, other) = (s.topk(min(k, s.shape[-1])) for s in self.key_scores(rows))
        scores, pairs = (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(-2).topk(k)
        width = other.shape[-1]
        keys = self.first_keys.shape[0] // self.spec["sparsity"]["heads"]
        units = (one.gather(-1, pairs // width) * keys + other.gather(-1, pairs % width)).flatten(1)
        hidden = ACTIVATIONS[self.spec["activation"]](torch.einsum("td,tkd->tk", rows, self.encoder[units]))
        strength = scores.softmax(-1).flatten(1) * hidden
        return F.embedding_bag(units, self.decoder, per_sample_weights=strength, mode="sum") + self.bias

    def smoe(self, rows: Tensor) -> Tensor:
        """Return the output of a mixture of small MLPs, expert by expert."""
        experts = len(self.gate)
        strength = self.active(rows, self.gate, self.gate_bias, torch.eye(experts, dtype=rows.dtype).to(rows.device))
        out = self.bias.expand(len(rows), -1).clone()
        for n, (u, v) in enumerate(zip(self.encoder.chunk(experts), self.decoder.chunk(experts), strict=True)):
            chosen = strength[:, n].nonzero().squeeze(1)
            hidden = ACTIVATIONS[self.spec["activation"]](rows[chosen] @ u.T)
            out.index_add_(0, chosen, (hidden @ v) * strength[chosen, n : n + 1])
        return out

    def key_scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores ``[tokens, heads, n]`` of the keys of both sides."""
        heads, width = self.spec["sparsity"]["heads"], self.first_keys.shape[1]
        read = x.unsqueeze(1).expand(-1, heads, -1)
        if "query" in self.spec["shapes"]:
            read = F.linear(x, self.query).unflatten(1, (heads, -1))
        parts = (read, read) if self.spec.get("key_input") == "whole" else (read[..., :width], read[..., width:])
        keys = (self.first_keys.unflatten(0, (heads, -1)), self.second_keys.unflatten(0, (heads, -1)))
        one, other = (torch.einsum("thd,hnd->thn", part, key) for part, key in zip(parts, keys, strict=True))
        return one, other

    def kept(self, scores: Tensor, side: int) -> Tensor:
        """Return the softmax over the halves that are kept: the k largest, or those above a quantile."""
        k, n = self.spec["sparsity"]["k"], scores.shape[-1]
        if self.spec["sparsity"]["kind"] == "product_topk":
            values, chosen = scores.topk(k)
            return torch.zeros_like(scores).scatter(-1, chosen, values.softmax(-1))
        mean, variance = self.sparsity_mean[side].unsqueeze(-1), self.sparsity_variance[side].unsqueeze(-1)
        deviations = (scores - mean) * (variance + 1e-5).rsqrt()
        threshold = float(torch.special.ndtri(torch.tensor(1 - k / n, dtype=torch.float64)))  # normal quantile
        kept = deviations >= deviations.amax(-1, keepdim=True).clamp_max(threshold)
        return scores.masked_fill(~kept, -torch.inf).softmax(-1)

    def molt(self, rows: Tensor) -> Tensor:
        """Return the output of a mixture of low-rank linear transforms: ranks halve while their numbers double."""
        units, ranks = self.gate.shape[0], [self.spec["rank"] >> step for step in range(self.spec["halvings"] + 1)]
        ranks = [rank for rank in ranks if rank]
        whole = 2 ** len(ranks) - 1
        ends = [(2 * units * (2**group - 1) + whole) // (2 * whole) for group in range(len(ranks) + 1)]
        counts = torch.tensor(ends).diff()
        owner = torch.arange(units).repeat_interleave(torch.tensor(ranks).repeat_interleave(counts)).to(rows.device)
        values, listed = self.code(rows, self.gate, self.gate_bias)
        activation = values if listed is None else values.new_zeros(len(rows), units).scatter(1, listed, values)
        out = (activation[:, owner] * (rows @ self.down.T)) @ self.up + self.bias
        return out + rows @ self.skip if "skip" in self.spec["shapes"] else out

    def active(
        self, x: Tensor, weight: Tensor, bias: Tensor, table: Tensor, sparsity: dict[str, Any] | None = None
    ) -> Tensor:
        """Return ``a @ table``, where ``a`` are the active units' activations and the table has a row for each unit."""
        values, units = self.code(x, weight, bias, sparsity)
        if units is None:
            return values @ table
        return F.embedding_bag(units, table, per_sample_weights=values, mode="sum")

    def code(
        self, x: Tensor, weight: Tensor, bias: Tensor, sparsity: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the active units' activations and their numbers; without numbers, the activations of all units."""
        sparsity, scores = sparsity or self.spec["sparsity"], F.linear(x, weight, bias)
        kind, activation = sparsity["kind"], scores.relu()
        if kind == "topk_softmax":
            values, units = scores.topk(sparsity["k"])
            return values.softmax(-1), units
        if kind in ("topk", "random_k"):
            values, units = activation.topk(sparsity["k"])
            return values, units
        if kind in ("softmax", "entmax"):
            activation = self.shares(scores)
        elif kind == "group_max":
            groups = activation.unflatten(-1, (sparsity["k"], -1))
            best = F.one_hot(groups.argmax(-1), groups.shape[-1])
            activation = (groups * best).flatten(-2)
        elif kind in ("jumprelu", "batch_topk"):
            activation = activation * (activation > self.sparsity_threshold)
        return activation, None

    def project(self, x: Tensor, factor: Tensor) -> Tensor:
        """Return ``z @ factor``; where experts have biases, ``factor`` has a row more, for a hidden unit that is 1."""
        z = self.hidden(x)
        return z @ factor[:-1] + factor[-1] if self.spec["expert_bias"] else z @ factor

    def inputs(self, x: Tensor) -> Tensor:
        """Return ``z``, followed by 1 where experts have biases."""
        z = self.hidden(x)
        return F.pad(z, (0, 1), value=1.0) if self.spec["expert_bias"] else z

    def shares(self, scores: Tensor) -> Tensor:
        """Return shares of the units that sum to 1: softmax or entmax of normalised scores."""
        sparsity = self.spec["sparsity"]
        if sparsity["norm"] == "layer":
            scores = F.layer_norm(scores, scores.shape[-1:], eps=1e-5)
        elif sparsity["norm"] == "batch":
            scores = (scores - self.sparsity_mean) * (self.sparsity_variance + 1e-5).rsqrt()
        if sparsity["kind"] == "softmax":
            return scores.softmax(-1)
        half = (scores - scores.amax(-1, keepdim=True)) / 2  # entmax: max(half - tau, 0)^2, of which tau makes sum 1
        ordered = half.sort(-1, descending=True).values
        count = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
        mean = ordered.cumsum(-1) / count
        spread = ordered.square().cumsum(-1) - count * mean.square()
        tau = mean - ((1 - spread) / count).clamp_min(0).sqrt()
        support = (tau <= ordered).sum(-1, keepdim=True)
        return (half - tau.gather(-1, support - 1)).clamp_min(0).square()

    def hidden(self, x: Tensor) -> Tensor:
        """Return the dense encoder's hidden state, in the base MLP's form: plain or gated."""
        activation = ACTIVATIONS[self.spec["activation"]]
        linear = F.linear(x, self.encoder_weight, self.encoder_bias)
        if not self.spec["glu"]:
            return activation(linear)
        return activation(F.linear(x, self.encoder_glu_weight, self.encoder_glu_bias)) * linear


FORWARDS = {
    "mxd": SparseLayer.mxd,
    "cp_mumoe": SparseLayer.cp_mumoe,
    "tr_mumoe": SparseLayer.tr_mumoe,
    "tucker_mumoe": SparseLayer.tucker_mumoe,
    "moe": SparseLayer.moe,
    "mumoe_block": SparseLayer.mumoe_block,
    "transcoder": SparseLayer.transcoder,
    "topk_sae": SparseLayer.transcoder,
    "monet": SparseLayer.monet,
    "peer": SparseLayer.peer,
    "smoe": SparseLayer.smoe,
    "mov": SparseLayer.mov,
    "linear": SparseLayer.linear,
    "low_rank": SparseLayer.low_rank,
    "molt": SparseLayer.molt,
}
"""Method -> the function that computes its output."""


class SplicedMLP(nn.Module):
    """A sparse layer in an MLP's place; the MLP is kept if the layer reads its output."""

    def __init__(self, spec: dict[str, Any], mlp: nn.Module) -> None:
        super().__init__()
        self.layer = SparseLayer(spec)
        self.original = mlp if spec["reads"] == "mlp_out" else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the sparse layer's output."""
        return self.layer(x if self.original is None else self.original(x))


class SplicedForCausalLM(BaseModel):
    """The base model with the layers of ``config.mxd`` spliced in; the layers stay in float32 whatever its dtype."""

    config_class = SplicedConfig
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = [*(BaseModel._keep_in_fp32_modules_strict or ()), "mlp.layer"]

    def __init__(self, config: SplicedConfig) -> None:
        super().__init__(config)
        blocks = self.get_submodule(config.mxd["blocks"])
        for number, spec in config.mxd["layers"].items():
            blocks[int(number)].mlp = SplicedMLP(spec, blocks[int(number)].mlp)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load strictly, while transformers only warns of missing tensors and leaves them random."""
        kwargs.setdefault("key_mapping", renamed())
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        wrong = [f"{kind}: {', '.join(sorted(map(str, names)))}" for kind, names in info.items() if names]
        if wrong:
            version = model.config.mxd["versions"]["transformers"]
            hint = f"the repository is damaged, or was made for another transformers ({version}; this is {__version__})"
            raise ValueError(f"{hint}: {'; '.join(wrong)}")
        return (model, info) if output_loading_info else model


def renamed() -> dict[str, str] | None:
    """Return renames of tensors: the head of GPT-NeoX has different names in different releases of transformers."""
    if BaseConfig.model_type != "gpt_neox":
        return None
    head = next(iter(BaseModel._tied_weights_keys)).partition(".")[0]
    return {rf"^{name}\.": f"{head}." for name in ("embed_out", "lm_head") if name != head}
