"""The optimisers that a replacement can be trained with: torch's Adam and Muon, and Signum.

Each parameter has a factor, with which its rate is multiplied. With ``training.scaled`` the factors are those that make
training the same as if input and output had been divided by their mean size (``ReplacementLayer.scaling``); otherwise
all are 1.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mxd.common.processes import placed_as, whole
from mxd.config import OptimizerKind

EPS = 1e-8
"""Adam's, for a factor of 1."""


class Signum(torch.optim.Optimizer):
    """The sign of a running mean of gradients (Bernstein et al., 2018): ``p -= lr * sign(m)``.

    A unit whose gradient is always zero stays where it is; one with a rare gradient takes whole steps for a while.
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.95) -> None:
        """Take parameters or groups of them.

        Args:
            params: as torch's optimisers.
            lr: learning rate.
            momentum: weight of the past in the running mean.
        """
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step; ``closure`` is not supported."""
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, 1 - group["momentum"])
                parameter.add_(state["mean"].sign(), alpha=-group["lr"])


MOMENTS = {
    torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.Muon: ("momentum_buffer",),
    Signum: ("mean",),
}
"""The tensors that each optimiser keeps for a parameter."""


class Optimizer:
    """One replacement's optimiser; Muon leaves what is not a matrix to Adam."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], kind: OptimizerKind, factors: Mapping[str, float], loss: float
    ) -> None:
        """Make the optimiser.

        Args:
            parameters: name -> parameter, all that is trained.
            kind: which one.
            factors: name -> factor of its rate; 1 where it is not named.
            loss: what the loss would be multiplied by where the factors are made for another unit of the output; Adam's
                eps is that of such a loss.
        """
        self.parameters, self.factors = parameters, factors
        matrices = [name for name, p in parameters.items() if kind == "muon" and p.ndim == 2]
        rest = [name for name in parameters if name not in matrices]
        self.parts: list[torch.optim.Optimizer] = []
        if kind == "signum":
            self.parts.append(Signum(self._groups(rest), lr=0.0))
        elif rest:
            fused = next(iter(parameters.values())).device.type in ("cpu", "cuda")
            groups = [group | {"eps": EPS / (group["factor"] * loss)} for group in self._groups(rest)]
            self.parts.append(torch.optim.Adam(groups, fused=fused))
        if matrices:
            muon = torch.optim.Muon(self._groups(matrices), weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
            self.parts.append(muon)

    def _groups(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Return one group of parameters for each factor."""
        groups: dict[float, list[nn.Parameter]] = {}
        for name in names:
            groups.setdefault(self.factors.get(name, 1.0), []).append(self.parameters[name])
        return [{"params": group, "factor": factor} for factor, group in groups.items()]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def step(self, lr: float) -> None:
        """Update the parameters, with a learning rate for factors of 1."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr * group["factor"]
            part.step()

    def state(self) -> dict[str, Tensor]:
        """Return the moments, unsharded, as ``moment/parameter``; a single zero where there are none yet."""
        found = {}
        for name, parameter in self.parameters.items():
            part = self._part(parameter)
            for moment in MOMENTS[type(part)]:
                value = part.state[parameter].get(moment)
                found[f"{moment}/{name}"] = torch.zeros(()) if value is None else whole(value)
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what ``state`` returned."""
        for name, parameter in self.parameters.items():
            part = self._part(parameter)
            for moment in MOMENTS[type(part)]:  # ``step`` is never sharded
                value = placed_as(parameter if moment != "step" else None, tensors[f"{moment}/{name}"])
                part.state[parameter][moment] = value.to(parameter.device)

    def _part(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        return next(p for p in self.parts if any(parameter is q for group in p.param_groups for q in group["params"]))
