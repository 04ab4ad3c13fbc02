"""Does it write what the base model writes? Greedy continuations by the base and by spliced models, compared.

The protocol is that of the MxD paper (arXiv 2505.21364, app. B.1): the first 4 words of 512 texts, 32 new tokens each,
and the share of prompts whose continuations agree in the first n tokens. One early difference changes everything
after it, so this is a harder test than top-1 agreement on given text.
"""

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import signature
from itertools import chain, islice
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mxd.common.errors import MxdError
from mxd.common.numbers import plural
from mxd.common.progress import progress
from mxd.data.contexts import head_ids, prompt_ids
from mxd.evaluation.checkpoints import Subject, describe
from mxd.evaluation.walk import Sets
from mxd.model.frozen import FrozenModel
from mxd.questions import DEFAULTS, GenerationConfig
from mxd.splice import Splice

Choice = Callable[[int, Float[Tensor, "batch vocab"], Int[Tensor, "batch seq"]], Int[Tensor, " batch"]]
"""(step, logits of the next token, tokens so far) -> the next token."""

Z = 1.959964
"""Standard normal quantile of a two-sided 95% interval."""


def answer(
    subject: Subject,
    how: GenerationConfig = DEFAULTS.generation,
    together: bool = False,
    prompt: str | None = None,
    batch: int = 32,
) -> dict[str, Any]:
    """Measure how long checkpoints write what their base model writes.

    Args:
        subject: the checkpoints.
        how: which prompts, and how many tokens are added.
        together: splice in sets of them, instead of each alone (``Subject.sets``).
        prompt: continue only this text; by default the openings of held-out texts.
        batch: prompts in one forward.

    Returns:
        The numbers of ``evaluate_generation`` with what they depend on; examples also hold their tokens as text.

    Raises:
        MxdError: as ``evaluate_generation``.
    """
    tokenizer, bos = subject.base.tokenizer, subject.text.bos
    sets = subject.sets(together)
    if prompt is None:
        ids = prompts(openings(subject.texts(), how.limit, how.seed), tokenizer, how, bos)
    else:
        how = how.model_copy(update={"words": max(1, len(prompt.split()))})
        ids = [head_ids(tokenizer, bos) + prompt_ids(tokenizer, prompt)]
    results = evaluate_generation(subject.base, sets, ids, how.tokens, batch)
    for name, members in sets.items():
        results[name]["replacements"] = [describe(trained) for trained in members.values()]
        for example in results[name]["examples"]:
            example["prompt_text"] = tokenizer.decode(example["prompt"], skip_special_tokens=True)
            for key in ("base", "spliced"):
                example[f"{key}_tokens"] = [tokenizer.decode([token]) for token in example[key]]
    return subject.document(results, asked={"prompt": prompt, **how.model_dump()})


def openings(texts: Iterable[str], limit: int, seed: int) -> Iterator[str]:
    """Yield texts whose first words may be prompts: documents in a drawn order, then their later paragraphs.

    Paragraphs serve where there are fewer documents than prompts; the second of each document come before any third.

    Args:
        texts: documents, of which the first ``16 limit`` are read.
        limit: prompts wanted.
        seed: draws the order.
    """
    drawn = list(islice(texts, 16 * limit))
    random.Random(seed).shuffle(drawn)
    paragraphs = [text.split("\n\n") for text in drawn]
    longest = max(map(len, paragraphs), default=0)
    later = (parts[n] for n in range(1, longest) for parts in paragraphs if n < len(parts))
    return chain(drawn, later)


def prompts(
    texts: Iterable[str],
    tokenizer: Any,
    how: GenerationConfig = DEFAULTS.generation,
    bos: bool = True,
) -> list[list[int]]:
    """Return the first words of texts as token ids.

    White space between the words stays as it is in the text. Texts with fewer words are skipped, and so are openings
    that came before: a greedy continuation is a function of its prompt, so a repeat would count one outcome twice.

    Args:
        texts: documents; read only as far as needed.
        tokenizer: a Hugging Face tokenizer.
        how: how many prompts, of how many words, as divided by white space.
        bos: begin each prompt with BOS where the tokenizer has one.

    Raises:
        MxdError: no text has that many words, or there is no tokenizer.
    """
    head = head_ids(tokenizer, bos)
    opening = re.compile(rf"\s*(\S+(?:\s+\S+){{{how.words - 1}}})")
    starts: dict[str, None] = {}
    for text in texts:
        if match := opening.match(text):
            starts[match[1]] = None
        if len(starts) == how.limit:
            break
    if not starts:
        raise MxdError(
            f"no prompts: no text has {plural(how.words, 'word')}; give other texts or a smaller number of words."
        )
    return [head + ids for ids in tokenizer(list(starts), add_special_tokens=False, verbose=False)["input_ids"]]


@torch.no_grad()
def greedy(
    model: FrozenModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    batch: int = 32,
) -> Int[Tensor, "prompts new_tokens"]:
    """Continue each prompt with the most probable token, ``new_tokens`` times; also inside ``spliced``.

    Generation does not stop at EOS, so that all continuations have one length. Prompts of one length run together,
    without padding: no attention mask, no shifted positions, nothing but real tokens for a splice to look at. Each step
    computes the new token only, from the model's key-value cache.

    Args:
        model: the frozen model.
        prompts: token ids.
        new_tokens: tokens to add.
        batch: prompts in one forward.

    Returns:
        The added tokens, in the order of the prompts, on the CPU.

    Raises:
        MxdError: no prompts, a prompt that is empty, foreign to the vocabulary or too long for the model's positions
            together with its continuation, or ``new_tokens`` or ``batch`` below 1.
    """
    _check(model, prompts, new_tokens, batch)
    return _greedy(model, prompts, new_tokens, batch, lambda amount: None)


def generation_match(base: Int[Tensor, "prompts n"], spliced_in: Int[Tensor, "prompts n"]) -> Float[Tensor, " n"]:
    """Return the share of prompts whose first n tokens are the same in both, for n = 1, 2, ... (paper, app. B.1)."""
    return _agreeing(base, spliced_in).double().mean(0)


def wilson_interval(share: Float[Tensor, " n"], count: int, z: float = Z) -> Float[Tensor, "2 n"]:
    """Return the lower and upper ends of the Wilson score interval of shares of ``count`` independent trials.

    Its ends are the true shares p with ``|share - p| = z sqrt(p (1 - p) / count)`` (Wilson 1927, JASA 22:209), so it
    is informative at shares of 0 and 1, too, where a binomial standard error is 0.

    Args:
        share: observed shares.
        count: trials behind each of them.
        z: standard normal quantile of the interval.
    """
    shrink = 1 + z**2 / count
    centre = (share + z**2 / (2 * count)) / shrink
    half = z / shrink * (share * (1 - share) / count + z**2 / (4 * count**2)).sqrt()
    return torch.stack([centre - half, centre + half]).clamp(0, 1)


@torch.no_grad()
def evaluate_generation(
    model: FrozenModel,
    sets: Sets,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    batch: int = 32,
    examples: int = 8,
) -> dict[str, dict[str, Any]]:
    """Measure how long each set of replacements writes what the base model writes.

    The base model's continuations are computed once, in the same batches as the spliced models'. Everything is checked
    before anything runs.

    Args:
        model: the frozen base model.
        sets: name -> what is spliced in together.
        prompts: token ids.
        new_tokens: tokens to add to each prompt.
        batch: prompts in one forward.
        examples: of that many first prompts the tokens are returned (the paper shows 8).

    Returns:
        Name -> ``match`` for n = 1 ... ``new_tokens`` with the ends of its 95% Wilson interval ``match_low`` and
        ``match_high``; ``agreed``, for each prompt the number of tokens before the first difference, with its mean
        ``agreed_tokens`` and standard error ``agreed_tokens_se`` over prompts; ``prompts`` and ``new_tokens``, their
        numbers; ``examples``, token ids of ``prompt``, ``base`` and ``spliced``.

    Raises:
        MxdError: as ``greedy``; no sets, or replacements that do not fit the model.
    """
    _check(model, prompts, new_tokens, batch)
    if not sets or not all(sets.values()):
        raise MxdError("nothing to evaluate: give at least one replacement in each set.")
    splices = {name: Splice(model, members) for name, members in sets.items()}
    results = {}
    with progress(
        f"generating with {plural(len(sets), 'splice')}", (1 + len(sets)) * len(prompts) * new_tokens
    ) as advance:
        base = _greedy(model, prompts, new_tokens, batch, advance)
        for name, splice in splices.items():
            with splice.entered():
                changed = _greedy(model, prompts, new_tokens, batch, advance)
            results[name] = _summary(base, changed) | {
                "examples": [
                    {"prompt": list(prompts[i]), "base": base[i].tolist(), "spliced": changed[i].tolist()}
                    for i in range(min(examples, len(prompts)))
                ]
            }
    return results


def _greedy(
    model: FrozenModel, prompts: Sequence[Sequence[int]], new_tokens: int, batch: int, advance: Callable[[int], None]
) -> Int[Tensor, "prompts new_tokens"]:
    added = torch.empty(len(prompts), new_tokens, dtype=torch.long)
    for numbers in batches_of_one_length(prompts, batch):
        ids = torch.tensor([list(prompts[number]) for number in numbers], device=model.device)
        added[numbers] = continued(model, ids, new_tokens, lambda _, logits, __: logits.argmax(-1)).cpu()
        advance(len(numbers) * new_tokens)
    return added


def batches_of_one_length(prompts: Sequence[Sequence[int]], batch: int) -> list[list[int]]:
    """Return the numbers of all prompts in batches of prompts of one length."""
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(number)
    return [same[i : i + batch] for same in by_length.values() for i in range(0, len(same), batch)]


def continued(
    model: FrozenModel, ids: Int[Tensor, "batch seq"], new_tokens: int, choose: Choice
) -> Int[Tensor, "batch new_tokens"]:
    """Return continuations of prompts of one length; a model without a cache reads the whole text at every step.

    Args:
        model: the frozen model.
        ids: the prompts.
        new_tokens: tokens to add.
        choose: chooses the next tokens.
    """
    whole, fed, cache = ids, ids, None
    for step in range(new_tokens):
        logits, cache = step_cached(model, cache, input_ids=fed)
        chosen = choose(step, logits[:, -1].to(ids.device), whole).unsqueeze(-1)
        whole = torch.cat([whole, chosen], 1)
        fed = whole if cache is None else chosen
    return whole[:, ids.shape[1] :]


def step_cached(
    model: FrozenModel, cache: Any, **fed: Shaped[Tensor, "batch seq *width"]
) -> tuple[Float[Tensor, "batch seq vocab"], Any]:
    """Return the logits of what follows a cache, and the cache that holds it, too: None of a model without one.

    transformers calls the cache ``past_key_values`` before 5.24, and ``cache`` since.

    Args:
        model: the frozen model.
        cache: of the step before; None at the first.
        fed: ``input_ids`` or ``inputs_embeds``.
    """
    name = "cache" if "cache" in signature(model.module.forward).parameters else "past_key_values"
    out = model.module(**fed, **{name: cache}, use_cache=True)
    return out.logits, getattr(out, name)


def _agreeing(base: Int[Tensor, "prompts n"], spliced_in: Int[Tensor, "prompts n"]) -> Bool[Tensor, "prompts n"]:
    """Return whether all tokens up to and including each one are the same in both."""
    return (base == spliced_in).cumprod(-1).bool()


def _summary(base: Int[Tensor, "prompts n"], spliced_in: Int[Tensor, "prompts n"]) -> dict[str, Any]:
    count, new_tokens = base.shape
    match = generation_match(base, spliced_in)
    low, high = wilson_interval(match, count)
    agreed = _agreeing(base, spliced_in).sum(-1)
    return {
        "match": match.tolist(),
        "match_low": low.tolist(),
        "match_high": high.tolist(),
        "agreed": agreed.tolist(),
        "agreed_tokens": float(agreed.double().mean()),
        "agreed_tokens_se": float(agreed.double().std()) / math.sqrt(count) if count > 1 else math.inf,
        "prompts": count,
        "new_tokens": new_tokens,
    }


def _check(model: FrozenModel, prompts: Sequence[Sequence[int]], new_tokens: int, batch: int) -> None:
    for name, value in (("new_tokens", new_tokens), ("batch", batch)):
        if value < 1:
            raise MxdError(f"{name} is {value}; expected at least 1.")
    if not prompts:
        raise MxdError("no prompts to continue; give at least one list of token ids.")
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise MxdError(f"prompt {number} has no tokens; give it a word, or begin it with BOS.")
        if not (min(prompt) >= 0 and max(prompt) < config.vocab_size):
            raise MxdError(
                f"prompt {number} holds token ids {min(prompt)} ... {max(prompt)}; {model.source!r} has tokens 0 ... "
                f"{config.vocab_size - 1}. Make prompts with the model's own tokenizer."
            )
        if len(prompt) + new_tokens > positions:
            raise MxdError(
                f"prompt {number} of {len(prompt)} tokens and {new_tokens} new ones do not fit into the {positions} "
                f"positions of {model.source!r}; shorten the prompt or ask for fewer new tokens."
            )
