"""Language models as judges of texts that were generated under the influence of a unit.

A judge rates each collection for concept coherence and grammatical fluency, from 0 to 1. It is asked with a paraphrase
of the prompt of the MxD paper (arXiv 2505.21364, app. D.1), or with its very words (``RUBRICS``). Its answer must be
two numbers as in "0.75, 0.50". Anything else is a failure: counted, and never replaced by a number.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

import httpx
import numpy as np

from mxd.common.errors import MxdError
from mxd.evaluation.generation import greedy
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen

PARAPHRASE = """You are an expert evaluator of synthetic text.

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
words, so a judge may give other numbers than it would with the paper's prompt."""
PAPER = """You are an expert evaluator of synthetic text.
TASK: Rate a collection of {count} samples along two independent axes.
AXIS 1 – CONCEPT COHERENCE:
0.00 no shared concepts/themes/style.
0.25 faint overlap.
0.50 some overlap or similar structure.
0.75 mostly the same concepts or structure; a few partial drifts.
1.00 all snippets clearly share the same concepts, themes, style, or structure.
AXIS 2 – GRAMMATICAL FLUENCY:
0.00 incomprehensible.
0.25 dense errors; meaning often obscured.
0.50 frequent errors; meaning still mostly recoverable.
0.75 minor errors that rarely hinder comprehension.
1.00 completely grammatical and natural.
(Do not penalise fluency if a snippet starts or ends abruptly.).
SCORING: Choose any real value in [0, 1] for each axis.
OUTPUT FORMAT: Respond with exactly two numbers formatted ‘0.00, 0.00’ in the order [coherence, fluency] and no other \
text or symbols.
TEXT TO EVALUATE: {samples}"""
"""The paper's own words, as printed; its line breaks, it says, are there to be read, and its samples' form is not."""
RUBRICS = {"paraphrase": PARAPHRASE, "paper": PAPER}
"""What judges may be asked with."""
ANSWER = re.compile(r"([01]\.\d\d), ([01]\.\d\d)")
DISAGREEMENT = 0.25
"""Repeats whose answers lie at least one anchor apart on an axis disagree."""
GIVE_UP = 3
"""Collections without any answer, one after the other, after which a judge is not asked again."""


@runtime_checkable
class Judge(Protocol):
    """Anything that answers a prompt; where it cannot, it raises ``NoAnswer``."""

    @property
    def name(self) -> str:
        """Who answers, for the record."""

    def __call__(self, prompt: str) -> str:
        """Return the answer."""


class NoAnswer(Exception):
    """A judge was asked and did not answer; the message says why in a few words and never holds the key."""


@dataclass
class Verdict:
    """A judge's answers about one collection, asked once or more often."""

    answers: list[tuple[float, float]] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def report(self) -> dict[str, Any]:
        """Return the means of the answers, ``None`` where there is none, and how often the judge failed, by reason."""
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


def read_answer(answer: str) -> tuple[float, float] | None:
    """Return coherence and fluency from an answer of exactly the form "0.75, 0.50", else ``None``."""
    match = ANSWER.fullmatch(answer.strip())
    if match is None:
        return None
    coherence, fluency = float(match[1]), float(match[2])
    return (coherence, fluency) if max(coherence, fluency) <= 1 else None


def judge_prompt(samples: Sequence[str], rubric: str = "paraphrase") -> str:
    """Return what a judge is asked about a collection, with the words of one of ``RUBRICS``."""
    marked = "\n".join(f"<sample>{sample}</sample>" for sample in samples)
    return RUBRICS[rubric].format(count=len(samples), samples=marked)


def judged(judge: Judge, samples: Sequence[str], repeats: int = 1, rubric: str = "paraphrase") -> Verdict:
    """Ask a judge about a collection of texts.

    Args:
        judge: who is asked.
        samples: the texts.
        repeats: how often it is asked.
        rubric: with which words, one of ``RUBRICS``.
    """
    verdict, prompt = Verdict(), judge_prompt(samples, rubric)
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
    """Attempts in all, where the server has an error, limits the rate or times out."""
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
            NoAnswer: it cannot be reached, is too slow, refuses, or sends something other than a chat completion.
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
    """A failure that may not recur at the next attempt."""


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


def check_judges(judges: Sequence[Judge]) -> None:
    """Check that judges can be told apart.

    Raises:
        MxdError: two of one name.
    """
    names = [judge.name for judge in judges]
    if len(set(names)) < len(names):
        raise MxdError(f"two judges are the same ({', '.join(names)}); name each once.")
