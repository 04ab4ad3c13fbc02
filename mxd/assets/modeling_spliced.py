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
    transcoder  y = a D + b, plus x S with a skip
    topk_sae    the same, of the base MLP's output
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
        experts = self.active(rows, self.gate, self.gate_bias, self.expert_scale)
        return torch.addcmul(self.bias, experts, self.hidden(rows) @ self.decoder)

    def cp_mumoe(self, rows: Tensor) -> Tensor:
        """Return the output of a CP-factorised mixture of experts."""
        experts = self.active(rows, self.gate, self.gate_bias, self.expert_factor)
        return (experts * (self.hidden(rows) @ self.input_factor)) @ self.output_factor + self.bias

    def transcoder(self, rows: Tensor) -> Tensor:
        """Return the output of a transcoder, with or without skip, or of an autoencoder."""
        out = self.active(rows, self.encoder, self.encoder_bias, self.decoder) + self.bias
        return out + rows @ self.skip if "skip" in self.spec["shapes"] else out

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

    def active(self, x: Tensor, weight: Tensor, bias: Tensor, table: Tensor) -> Tensor:
        """Return ``a @ table``, where ``a`` are the active units' activations and the table has a row for each unit."""
        values, units = self.code(x, weight, bias)
        if units is None:
            return values @ table
        return F.embedding_bag(units, table, per_sample_weights=values, mode="sum")

    def code(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the active units' activations and their numbers; without numbers, the activations of all units."""
        sparsity, activation = self.spec["sparsity"], F.linear(x, weight, bias).relu()
        if sparsity["kind"] in ("topk", "random_k"):
            values, units = activation.topk(sparsity["k"])
            return values, units
        if sparsity["kind"] == "jumprelu":
            activation = activation * (activation > self.sparsity_threshold)
        return activation, None

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
    "transcoder": SparseLayer.transcoder,
    "topk_sae": SparseLayer.transcoder,
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
