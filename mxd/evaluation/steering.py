"""Do units steer? Text is generated under the influence of one unit, and a language model judges it on two axes.

The protocol is that of the MxD paper (arXiv 2505.21364, section 3.2.2 and app. D.1): at every position ``lambda``
times a unit's output, ``d_n`` or ``z W_n`` (``ReplacementLayer.unit_output``), is added to the layer's output. This is
done for the first 100 units one by one, with ``lambda`` = 100 and 10 samples of 32 tokens to one prompt. The paper's
code does so with the replacement spliced in, which is the default here; ``on="base"`` adds to the base MLP's output.
That code also lowers the logit of a token by 1 for each earlier occurrence, which the paper does not mention:
``frequency_penalty=1``.

With ``at="input"`` a unit is made stronger as in the muMoE paper (arXiv 2402.12550, app. G.2): its gate's row, the
"expert cluster center vector", is added to what the layer reads, and the layer answers as usual. The paper does not
say how strongly; here ``lambda`` is in units of the input's length.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mxd.artifacts.checkpoint import Trained
from mxd.common.errors import MxdError
from mxd.common.numbers import plural
from mxd.common.progress import progress
from mxd.data.contexts import head_ids
from mxd.evaluation.checkpoints import Subject
from mxd.evaluation.generation import continued
from mxd.evaluation.judging import Judge, check_judges
from mxd.evaluation.panel import judge_all
from mxd.evaluation.walk import check_units
from mxd.layers import ReplacementLayer
from mxd.layers.gates import ConstantGate
from mxd.model.frozen import FrozenModel
from mxd.questions import DEFAULTS, SteeringConfig
from mxd.splice import Splice, spliced


def answer(
    subject: Subject,
    how: SteeringConfig = DEFAULTS.steering,
    units: Sequence[int] | None = None,
    judges: Sequence[Judge] = (),
) -> dict[str, Any]:
    """Steer with units of checkpoints, each spliced in alone, and have the texts judged.

    Args:
        subject: the checkpoints.
        how: how text is generated.
        units: which units; by default the first ``how.first``.
        judges: who rates the texts; nobody by default.

    Raises:
        MxdError: as ``evaluate_steering``.
    """
    results = evaluate_steering(subject.base, subject.trained, units, how, judges, subject.text.bos)
    asked = how.model_dump(mode="json", exclude={"prompt"})
    judged_by = ", ".join(judge.name for judge in judges) or None
    return subject.document(results, asked=asked, prompt=how.prompt, judge=judged_by)


def evaluate_steering(
    model: FrozenModel,
    layers: Mapping[str, Trained],
    units: Sequence[int] | None = None,
    how: SteeringConfig = DEFAULTS.steering,
    judges: Sequence[Judge] = (),
    bos: bool = True,
    batch: int = 160,
) -> dict[str, dict[str, Any]]:
    """Generate text under the influence of single units, and have each unit's collection judged.

    Args:
        model: the frozen base model.
        layers: name -> a layer with its provenance.
        units: which units; by default the first ``how.first``.
        how: how text is generated.
        judges: who rates the texts; nobody by default.
        bos: begin the prompt with BOS where the tokenizer has one.
        batch: samples in one forward, rounded up to whole units.

    Returns:
        Name -> ``block``, ``prompt``, ``at``, ``judge``, ``unsteered`` (the first unit's draws with ``scale`` 0), and
        ``units``: for each its ``scale``, its ``samples`` (continuations alone) and, with judges, what ``combined``
        returns; so for the unsteered samples under ``unsteered_judged``; and over all units what ``panel`` returns.

    Raises:
        MxdError: no tokenizer, no such unit, a prompt that does not fit, layers of another model, or two judges that
            are the same; at the output, layers that are not additive; at the input, layers that read the MLP's output
            or have no gate rows.
    """
    check_judges(judges)
    for name, trained in layers.items():
        _check_input(name, trained.layer) if how.at == "input" else trained.layer.check_additive()
    ids = _prompt(model, how, bos)
    check_units(layers, units)
    chosen = {name: _units(trained.layer, units, how.first) for name, trained in layers.items()}
    for trained in layers.values():
        Splice(model, {trained.provenance.block: trained})  # for its checks; what is spliced in later is ``Steered``
    results = {}
    total = sum(len(numbers) + 1 for numbers in chosen.values()) * how.samples * how.tokens
    with progress(f"steering with {plural(sum(map(len, chosen.values())), 'unit')}", total) as advance:
        for name, trained in layers.items():
            results[name] = _generated(model, trained, chosen[name], how, ids, batch, advance)
    if judges:
        judge_all(results, judges, how.prompt, how.repeats, how.rubric)
    return results


def summary(results: Mapping[str, Mapping[str, Any]], shown: int = 10) -> str:
    """Return the results of ``evaluate_steering`` as lines: for the first units a sample and the judge's numbers."""
    lines = []
    for name, result in results.items():
        lines += [name, f"  prompt: {result['prompt']!r}", f"  not steered: {result['unsteered'][0]!r}"]
        for unit, steered in list(result["units"].items())[:shown]:
            rated = ""
            if result["judge"] is not None:
                rated = f" [{_number(steered['coherence'])}, {_number(steered['fluency'])}]"
            lines.append(f"  unit {unit}{rated}: {steered['samples'][0]!r}")
        if result["judge"] is not None:
            lines += [_judged(judge, one) for judge, one in result["judges"].items()]
            if result["agreement"]:
                lines.append(f"  mean over judges: {_axes(result)}")
            lines.append(f"  not steered: {_axes(result['unsteered_judged'])}")
            lines += map(_agreed, result["agreement"])
    return "\n".join(lines)


def _axes(rated: Mapping[str, Any]) -> str:
    return f"coherence {_number(rated['coherence'])}, fluency {_number(rated['fluency'])}"


def _judged(judge: str, one: Mapping[str, Any]) -> str:
    return (
        f"  judged by {judge}: {_axes(one)}; of {one['asked']} answers {one['failures']} failed "
        f"{one['reasons'] or ''}; {plural(one['disagreements'], 'unit')} with answers that disagree"
    )


def _agreed(pair: Mapping[str, Any]) -> str:
    said = ", ".join(
        f"{axis}: difference {_number(pair[axis]['difference'])}, rank correlation {_number(pair[axis]['spearman'])} "
        f"(95% of chance within {_number(pair[axis]['chance'])})"
        for axis in ("coherence", "fluency")
    )
    return f"  {pair['judges'][0]} against {pair['judges'][1]}, {said}"


def _number(value: float | None) -> str:
    return "no answer" if value is None else f"{value:.2f}"


class Steered(nn.Module):
    """Takes an MLP's place: the replacement or the base MLP, with ``scale`` times one unit's push at one of its ends.

    The rows of a batch are divided among the units, the same number for each.
    """

    def __init__(
        self,
        layer: ReplacementLayer,
        base: nn.Module,
        on: str,
        units: Sequence[int],
        scale: float,
        rows: Float[Tensor, "units d_in"] | None = None,
    ) -> None:
        """Take what is steered.

        Args:
            layer: the replacement.
            base: the MLP in whose place it stands.
            on: which of the two answers, ``replacement`` or ``base``.
            units: which units.
            scale: how much is added.
            rows: what is added to the input for each unit; ``None``: the unit's output is added to the output.
        """
        super().__init__()
        self.rows = rows
        self.layer = layer
        self.on, self.units, self.scale = on, list(units), scale
        self._base = [base]  # in a list, so that it is no submodule: leaving the splice sets the mode of all submodules
        self.training = layer.training

    def forward(self, x: Float[Tensor, "rows seq d_in"]) -> Float[Tensor, "rows seq d_out"]:
        """Return the steered output."""
        if self.rows is not None:
            return self._pushed(x, self.rows)
        read = self.layer.read(nn.Identity(), self._base[0])(x)
        out = self.layer(read) if self.on == "replacement" else self._base[0](x)
        pushes = zip(self.units, read.chunk(len(self.units)), strict=True)
        return out + self.scale * torch.cat([self.layer.unit_output(n, rows) for n, rows in pushes]).to(out.dtype)

    def _pushed(
        self, x: Float[Tensor, "rows seq d_in"], rows: Float[Tensor, "units d_in"]
    ) -> Float[Tensor, "rows seq d_out"]:
        """Return the output for a pushed input; where the layer knows BOS by its input, that stays as it is."""
        push = rows.to(x).repeat_interleave(len(x) // len(rows), 0).unsqueeze(1)
        read = torch.where(self.layer.at_bos(x).unsqueeze(-1), x, x + self.scale * push)
        return self.layer(read) if self.on == "replacement" else self._base[0](read)


def choose(
    logits: Float[Tensor, "rows vocab"], draws: Float[Tensor, " rows"], temperature: float, top_p: float
) -> Int[Tensor, " rows"]:
    """Return one token per row, drawn from the smallest set of likeliest tokens with ``top_p`` of the probability.

    Args:
        logits: of the next token.
        draws: uniform numbers in [0, 1): where in the set's cumulative probability the token lies.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: nucleus (Holtzman et al. 2020).
    """
    if temperature == 0:
        return logits.argmax(-1)
    p, order = (logits.double() / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    below = p.cumsum(-1) - p  # probability of all likelier tokens; the set ends where it reaches top_p
    up_to = (p * (below < top_p)).cumsum(-1)  # the inverse of this, scaled to the set's total, gives the token
    reached = up_to > draws.to(p).unsqueeze(-1) * up_to[:, -1:]
    return order.gather(-1, reached.int().argmax(-1, keepdim=True)).squeeze(-1)


def _prompt(model: FrozenModel, how: SteeringConfig, bos: bool) -> list[int]:
    head = head_ids(model.tokenizer, bos)
    ids = head + model.tokenizer(how.prompt, add_special_tokens=False)["input_ids"]
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not ids:
        raise MxdError("the prompt has no tokens; give it a word.")
    if positions and len(ids) + how.tokens > positions:
        raise MxdError(
            f"a prompt of {len(ids)} tokens and {how.tokens} new ones do not fit into the {positions} positions of "
            f"{model.source!r}; shorten the prompt or lower --tokens."
        )
    return ids


def _units(layer: ReplacementLayer, units: Sequence[int] | None, first: int) -> list[int]:
    if units is None:
        return list(range(min(first, layer.num_units)))
    if not units:
        raise MxdError("no units to steer with; give at least one.")
    return list(dict.fromkeys(units))


def _check_input(name: str, layer: ReplacementLayer) -> None:
    if layer.config.reads != "mlp_in":
        raise MxdError(
            f"{name} is an autoencoder: it reads the MLP's output and has no gate row at its input; give --at output."
        )
    if isinstance(layer.gates, ConstantGate):
        raise MxdError(f"the units of {name} are always on and have no gate rows; give --at output.")


@torch.no_grad()
def _gate_rows(
    model: FrozenModel, trained: Trained, units: Sequence[int], prompt: Sequence[int]
) -> Float[Tensor, "units d_in"]:
    """Return the units' gate rows, summed over heads, as long as the prompt's inputs are on average."""
    block, gates = trained.provenance.block, trained.layer.gates
    x, _ = model.record(torch.tensor([prompt]), [block])[block]
    numbers = torch.tensor(units, device=trained.layer.bias.device)
    rows = torch.stack([gates.rows(numbers, head)[0].float() for head in range(gates.heads)]).sum(0)
    return float(x.float().norm(dim=-1).mean()) * nn.functional.normalize(rows, dim=-1)


def _generated(
    model: FrozenModel,
    trained: Trained,
    units: Sequence[int],
    how: SteeringConfig,
    prompt: Sequence[int],
    batch: int,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    together = max(1, batch // how.samples)
    parts = [list(units[i : i + together]) for i in range(0, len(units), together)]
    samples: dict[int, list[str]] = {}
    for part in parts:
        texts = _sampled(model, trained, part, how.scale, how, prompt, advance)
        samples |= {unit: texts[i * how.samples : (i + 1) * how.samples] for i, unit in enumerate(part)}
    return {
        "block": trained.provenance.block,
        "prompt": how.prompt,
        "at": how.at,
        "judge": None,
        "unsteered": _sampled(model, trained, [units[0]], 0.0, how, prompt, advance),
        "units": {str(unit): {"scale": how.scale, "samples": samples[unit]} for unit in units},
    }


@torch.no_grad()
def _sampled(
    model: FrozenModel,
    trained: Trained,
    units: Sequence[int],
    scale: float,
    how: SteeringConfig,
    prompt: Sequence[int],
    advance: Callable[[int], None],
) -> list[str]:
    """Return ``how.samples`` continuations for each unit, unit by unit."""
    number = trained.provenance.block
    rows = _gate_rows(model, trained, units, prompt) if how.at == "input" else None
    steered = Steered(trained.layer, model.mlp(number), how.on, units, scale, rows)
    draws = np.concatenate([np.random.default_rng([how.seed, n]).random((how.samples, how.tokens)) for n in units])
    with spliced(model, {number: steered}):
        added = _continue(model, prompt, torch.from_numpy(draws), how)
    advance(added.numel())
    return model.tokenizer.batch_decode(added.tolist(), skip_special_tokens=True)


def _continue(
    model: FrozenModel, prompt: Sequence[int], draws: Float[Tensor, "rows new_tokens"], how: SteeringConfig
) -> Int[Tensor, "rows new_tokens"]:
    """Return drawn continuations of one prompt."""
    ids = torch.tensor(prompt, device=model.device).expand(len(draws), -1)

    def drawn(step: int, logits: Tensor, whole: Tensor) -> Tensor:
        logits = logits.float()
        if how.frequency_penalty:
            seen = torch.zeros_like(logits).scatter_add_(1, whole, torch.ones_like(whole, dtype=logits.dtype))
            logits = logits - how.frequency_penalty * seen
        return choose(logits, draws[:, step], how.temperature, how.top_p)

    return continued(model, ids, draws.shape[1], drawn).cpu()
