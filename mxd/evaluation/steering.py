"""Do units steer? Text generated while one unit is made stronger, judged on two axes by a language model.

The protocol is that of the MxD paper (arXiv 2505.21364, section 3.2.2 and app. D.1): at every position ``lambda``
times a unit's output, ``d_n`` or ``z W_n`` (``ReplacementLayer.unit_output``), is added to the layer's output; the
first 100 units one by one, ``lambda`` = 100, 10 samples of 32 tokens to one prompt. The paper's code adds it while the
replacement is spliced in, which is the default here; ``on="base"`` adds it to the base MLP's output. It also lowers the
logit of a token by 1 for each time it came before, which the paper does not say: ``frequency_penalty=1``. Masked tokens
(BOS) are not steered, since the layers were trained without them.

A judge rates each collection for concept coherence and grammatical fluency, from 0 to 1. It is asked with a paraphrase
of the paper's prompt, not with its words (``INSTRUCTIONS``). Its answer must be two numbers as in "0.75, 0.50".
Everything else is a failure: counted, and never replaced by a number.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

import httpx
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mxd.artifacts.checkpoint import Trained
from mxd.common.errors import MxdError
from mxd.common.progress import progress
from mxd.data.contexts import head_ids
from mxd.evaluation.checkpoints import Subject
from mxd.evaluation.generation import continued, greedy
from mxd.layers import ReplacementLayer
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen
from mxd.questions import DEFAULTS, SteeringConfig
from mxd.splice import check_provenance, spliced

INSTRUCTIONS = """You are an expert evaluator of synthetic text.

TASK: Rate a collection of {count} samples along two independent axes.

AXIS 1 - CONCEPT COHERENCE:
0.00 no shared concepts, themes or style.
0.25 faint overlap.
0.50 some overlap, or similar structure.
0.75 mostly the same concepts or structure; a few partial drifts.
1.00 all samples clearly share the same concepts, themes, style or structure.

AXIS 2 - GRAMMATICAL FLUENCY:
0.00 incomprehensible.
0.25 dense errors; meaning often obscured.
0.50 frequent errors; meaning still mostly recoverable.
0.75 minor errors that rarely hinder comprehension.
1.00 completely grammatical and natural.
(Do not lower fluency because a sample starts or ends abruptly.)

SCORING: Choose any real value from 0 to 1 for each axis.

OUTPUT FORMAT: Answer with exactly two numbers in the form "0.00, 0.00", in the order coherence, fluency, and nothing
else.

TEXT TO EVALUATE:
{samples}"""
"""A paraphrase of the prompt of the paper's judges (app. D.1): the same axes, anchors and form of answer in other
words, so that a judge's numbers need not be those it would give to the paper's."""
ANSWER = re.compile(r"([01]\.\d\d), ([01]\.\d\d)")
DISAGREEMENT = 0.25
"""Repeats whose answers lie at least one anchor apart on an axis disagree."""
GIVE_UP = 3
"""After so many collections without any answer a judge is not asked again."""


@runtime_checkable
class Judge(Protocol):
    """Anything that answers a prompt; where it cannot, it raises ``NoAnswer``."""

    @property
    def name(self) -> str:
        """Who answers, for the record."""

    def __call__(self, prompt: str) -> str:
        """Return the answer."""


class NoAnswer(Exception):
    """A judge that was asked and did not answer; says why in a few words, never with the key."""


@dataclass
class Verdict:
    """What a judge said of one collection, asked once or more often."""

    answers: list[tuple[float, float]] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def report(self) -> dict[str, Any]:
        """Return means of the answers, ``None`` where there is none, and how often the judge failed, by reason."""
        axes = [[answer[axis] for answer in self.answers] for axis in (0, 1)]
        spread = max(max(values) - min(values) for values in axes) if self.answers else 0.0
        return {
            "coherence": float(np.mean(axes[0])) if self.answers else None,
            "fluency": float(np.mean(axes[1])) if self.answers else None,
            "answers": [list(answer) for answer in self.answers],
            "failures": sum(self.failures.values()),
            "reasons": dict(self.failures),
            "disagreement": spread >= DISAGREEMENT - 1e-9,
        }


def steer_checkpoints(
    subject: Subject,
    how: SteeringConfig = DEFAULTS.steering,
    units: Sequence[int] | None = None,
    judge: Judge | None = None,
) -> dict[str, Any]:
    """Steer with units of checkpoints, each spliced in alone, and have the texts judged.

    Args:
        subject: the checkpoints.
        how: how text is generated.
        units: which units; by default the first there are.
        judge: who rates the texts; nobody by default.

    Raises:
        MxdError: as ``evaluate_steering``.
    """
    results = evaluate_steering(subject.base, subject.trained, units, how, judge, subject.text.bos)
    asked, judged_by = how.model_dump(mode="json", exclude={"prompt"}), judge.name if judge else None
    return subject.document(results, asked=asked, prompt=how.prompt, judge=judged_by)


def evaluate_steering(
    model: FrozenModel,
    layers: Mapping[str, Trained],
    units: Sequence[int] | None = None,
    how: SteeringConfig = DEFAULTS.steering,
    judge: Judge | None = None,
    bos: bool = True,
    batch: int = 160,
) -> dict[str, dict[str, Any]]:
    """Generate text under the influence of single units, and have each unit's collection judged.

    Args:
        model: the frozen base model.
        layers: name -> a layer with its provenance.
        units: which units; by default the first there are (``how.first``).
        how: how text is generated.
        judge: who rates the texts; nobody by default.
        bos: begin the prompt with BOS where the tokenizer has one.
        batch: samples in one forward, rounded up to whole units.

    Returns:
        Name -> ``layer``, ``prompt``, ``judge``, ``unsteered`` (the first unit's draws with ``scale`` 0), and
        ``units``: for each its ``scale``, its ``samples`` (continuations alone) and, with a judge, ``Verdict.report``;
        over all units the means ``coherence`` and ``fluency``, and the numbers ``asked``, ``failures``,
        ``disagreements``.

    Raises:
        MxdError: no tokenizer, no such unit, a prompt that does not fit, or layers of another model.
    """
    ids = _prompt(model, how, bos)
    chosen = {name: _units(name, trained.layer, units, how.first) for name, trained in layers.items()}
    for trained in layers.values():
        check_provenance(model, trained.provenance.layer, trained.provenance)
        with spliced(model, {trained.provenance.layer: trained}):  # only to hear now what does not fit
            pass
    results = {}
    total = sum(len(numbers) + 1 for numbers in chosen.values()) * how.samples * how.tokens
    with progress(f"steering with {sum(map(len, chosen.values()))} units", total) as advance:
        for name, trained in layers.items():
            results[name] = _generated(model, trained, chosen[name], how, ids, batch, advance)
    if judge is not None:
        _judge_all(results, judge, how.prompt, how.repeats)
    return results


def summary(results: Mapping[str, Mapping[str, Any]], shown: int = 10) -> str:
    """Return what ``evaluate_steering`` found as lines: for the first units a sample and the judge's numbers."""
    lines = []
    for name, result in results.items():
        lines += [name, f"  not steered: {result['unsteered'][0]!r}"]
        for unit, one in list(result["units"].items())[:shown]:
            rated = "" if result["judge"] is None else f" [{_number(one['coherence'])}, {_number(one['fluency'])}]"
            lines.append(f"  unit {unit}{rated}: {one['samples'][0]!r}")
        if result["judge"] is not None:
            lines.append(
                f"  judged by {result['judge']}: coherence {_number(result['coherence'])}, fluency "
                f"{_number(result['fluency'])}; of {result['asked']} answers {result['failures']} failed "
                f"{result['reasons'] or ''}; {result['disagreements']} units with answers that disagree"
            )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "no answer" if value is None else f"{value:.2f}"


def read_answer(answer: str) -> tuple[float, float] | None:
    """Return coherence and fluency from an answer of exactly the form "0.75, 0.50", else ``None``."""
    match = ANSWER.fullmatch(answer.strip())
    if match is None:
        return None
    coherence, fluency = float(match[1]), float(match[2])
    return (coherence, fluency) if max(coherence, fluency) <= 1 else None


def judge_prompt(samples: Sequence[str]) -> str:
    """Return what a judge is asked about a collection, after app. D.1 of the paper."""
    marked = "\n".join(f"<sample>{sample}</sample>" for sample in samples)
    return INSTRUCTIONS.format(count=len(samples), samples=marked)


def judged(judge: Judge, samples: Sequence[str], repeats: int = 1) -> Verdict:
    """Ask a judge about a collection of texts, ``repeats`` times."""
    verdict, prompt = Verdict(), judge_prompt(samples)
    for _ in range(repeats):
        try:
            answer = read_answer(judge(prompt))
        except NoAnswer as problem:
            verdict.failures[str(problem)] += 1
            continue
        if answer is None:
            verdict.failures["not two numbers"] += 1
        else:
            verdict.answers.append(answer)
    return verdict


@dataclass(frozen=True)
class Endpoint:
    """A judge behind an OpenAI-compatible endpoint, ``URL/chat/completions``.

    The key is taken from an environment variable, sent to that address alone (redirects are not followed), only over
    https or to this machine, and never shown.
    """

    url: str
    model: str
    key_variable: str = "MXD_JUDGE_KEY"
    timeout: float = 120.0
    attempts: int = 3
    """A server's errors, rate limits and time-outs are tried again, so many times in all."""
    pause: float = 2.0
    """Seconds before the second attempt; twice that before the third."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise MxdError(f"--judge is {self.url!r}; expected an address such as https://api.example.com/v1.")
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        if parts.scheme == "http" and not local and os.environ.get(self.key_variable):
            raise MxdError(f"the key in {self.key_variable} is not sent over http to {parts.hostname}; use https.")

    @property
    def name(self) -> str:
        """Who answers, for the record."""
        return f"{self.model} at {urlsplit(self.url).hostname}"

    def __call__(self, prompt: str) -> str:
        """Return the endpoint's answer to one message.

        Raises:
            NoAnswer: it cannot be reached, is too slow, refuses, or sends something else than a chat completion.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return self._ask(prompt)
            except _Temporary as problem:
                if attempt == self.attempts:
                    raise NoAnswer(str(problem)) from None
                time.sleep(self.pause * attempt)
        raise AssertionError

    def _ask(self, prompt: str) -> str:
        key = os.environ.get(self.key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}]}
        try:
            address = self.url.rstrip("/") + "/chat/completions"
            answer = httpx.post(address, json=body, headers=headers, timeout=self.timeout, follow_redirects=False)
        except httpx.TimeoutException:
            raise _Temporary("timed out") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError):
            raise _Temporary("cannot be reached") from None
        if answer.status_code == 429 or answer.status_code >= 500:
            raise _Temporary(f"HTTP {answer.status_code}")
        if answer.status_code != 200:
            raise NoAnswer(f"HTTP {answer.status_code}")
        try:
            content = answer.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            content = None
        if not isinstance(content, str):
            raise NoAnswer("no chat completion")
        return content


class _Temporary(Exception):
    """What may go better at the next attempt."""


@dataclass(frozen=True)
class LocalJudge:
    """A judge that is a causal language model on this machine; it answers greedily, so repeats always agree."""

    model: FrozenModel
    new_tokens: int = 24

    @classmethod
    def load(cls, source: str, device: str = "auto") -> "LocalJudge":
        """Load the model, as ``load_frozen``."""
        return cls(load_frozen(source, device=device))

    @property
    def name(self) -> str:
        """Who answers, for the record."""
        return f"{self.model.source} on this machine"

    def __call__(self, prompt: str) -> str:
        """Return the model's answer, by its chat template where it has one.

        Raises:
            NoAnswer: the prompt does not fit into the model.
        """
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise NoAnswer("no tokenizer")
        if tokenizer.chat_template:
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer(prompt, add_special_tokens=not tokenizer.chat_template, verbose=False)["input_ids"]
        try:
            added = greedy(self.model, [ids], self.new_tokens)[0].tolist()
        except MxdError:
            raise NoAnswer("prompt too long") from None
        end = added.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in added else None
        return tokenizer.decode(added[:end], skip_special_tokens=True)


class Steered(nn.Module):
    """What stands in an MLP's place: the replacement or the base MLP, plus ``scale`` times one unit's output.

    The rows of a batch are divided among the units, the same number for each.
    """

    def __init__(self, layer: ReplacementLayer, base: nn.Module, on: str, units: Sequence[int], scale: float) -> None:
        super().__init__()
        self.layer = layer
        self.on, self.units, self.scale = on, list(units), scale
        self._base = [base]  # in a list, and the mode is the layer's: leaving the splice sets the mode of all parts
        self.training = layer.training

    def forward(self, x: Float[Tensor, "rows seq d_in"]) -> Float[Tensor, "rows seq d_out"]:
        """Return the steered output."""
        read = self.layer.read(nn.Identity(), self._base[0])(x)
        out = self.layer(read) if self.on == "replacement" else self._base[0](x)
        pushes = zip(self.units, read.chunk(len(self.units)), strict=True)
        return out + self.scale * torch.cat([self.layer.unit_output(n, rows) for n, rows in pushes]).to(out.dtype)


def choose(
    logits: Float[Tensor, "rows vocab"], draws: Float[Tensor, " rows"], temperature: float, top_p: float
) -> Int[Tensor, " rows"]:
    """Return a token a row, drawn from the smallest set of likeliest tokens that holds ``top_p`` of the probability.

    Args:
        logits: of the next token.
        draws: uniform numbers in [0, 1): where in the set's probability the token lies.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: nucleus (Holtzman et al. 2020).
    """
    if temperature == 0:
        return logits.argmax(-1)
    p, order = (logits.double() / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    below = p.cumsum(-1) - p
    up_to = (p * (below < top_p)).cumsum(-1)
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


def _units(name: str, layer: ReplacementLayer, units: Sequence[int] | None, first: int) -> list[int]:
    if units is None:
        return list(range(min(first, layer.num_units)))
    if not units:
        raise MxdError("no units to steer with; give at least one.")
    wrong = [unit for unit in units if not 0 <= unit < layer.num_units]
    if wrong:
        raise MxdError(f"{name} has units 0 ... {layer.num_units - 1}; got {wrong[0]}.")
    return list(dict.fromkeys(units))


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
        "layer": trained.provenance.layer,
        "prompt": how.prompt,
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
    """Return ``how.samples`` continuations for each unit, one after the other."""
    number = trained.provenance.layer
    steered = Steered(trained.layer, model.mlp(number), how.on, units, scale)
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


def _judge_all(results: Mapping[str, dict[str, Any]], judge: Judge, prompt: str, repeats: int) -> None:
    """Add verdicts to all collections; a judge who has not answered several times running is not asked again."""
    silent = 0
    with progress("judging", sum(len(result["units"]) for result in results.values()), "collections") as advance:
        for result in results.values():
            for collection in result["units"].values():
                if silent < GIVE_UP:
                    # the prompt stands before each sample, as in the paper's code
                    verdict = judged(judge, [prompt + sample for sample in collection["samples"]], repeats)
                    silent = 0 if verdict.answers or "not two numbers" in verdict.failures else silent + 1
                else:
                    verdict = Verdict(failures=Counter({"not asked": repeats}))
                collection |= verdict.report()
                advance(1)
            result |= {"judge": judge.name} | _totals(list(result["units"].values()), repeats)


def _totals(collections: Sequence[Mapping[str, Any]], repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for axis in ("coherence", "fluency"):
        rated = [collection[axis] for collection in collections if collection[axis] is not None]
        found[axis] = float(np.mean(rated)) if rated else None
    reasons = sum((Counter(collection["reasons"]) for collection in collections), Counter[str]())
    return found | {
        "asked": repeats * len(collections),
        "failures": sum(reasons.values()),
        "reasons": dict(reasons),
        "disagreements": sum(collection["disagreement"] for collection in collections),
    }
