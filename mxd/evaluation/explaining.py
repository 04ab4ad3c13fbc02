"""What does the model itself say that a unit means, and does that tell the unit's text from other text?

After Monet's self-explained experts (ICLR 2025, section 4): the model is asked ``What is the meaning of the word X?``,
where the mean embedding of the tokens on which the unit fires most stands in the place of X, and answers greedily. The
paper shows some answers and has no number for them. Here a judge is given the answer and two held-out texts, one on
which the unit fires and one on which it hardly does, and says which of them it fits (``deciding.py``).
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mxd.artifacts.checkpoint import Trained
from mxd.common.errors import MxdError
from mxd.common.numbers import plural
from mxd.common.progress import Advance, progress
from mxd.data.contexts import Contexts
from mxd.evaluation.checkpoints import Subject
from mxd.evaluation.deciding import decided
from mxd.evaluation.generation import step_cached
from mxd.evaluation.judging import Judge, check_judges
from mxd.evaluation.units import WINDOW, contributing, token_strings
from mxd.evaluation.walk import CodeMoments, check_units, codes, evaluating, streamed
from mxd.model.frozen import FrozenModel
from mxd.questions import EXPLAINING, ExplainingConfig

SLOT = "[[X]]"
"""Stands for the word in the text of a prompt."""
PROMPTS = (
    (f"What is the meaning of the word {SLOT}?", f"Sure! The meaning of the word {SLOT} is"),
    (f"What does the word {SLOT} mean?", f"The word {SLOT} means"),
    (f"Please define the word {SLOT} for me.", f"The definition of the word {SLOT} is"),
)
"""What the model is asked, and how its answer begins: Monet's prompt, and two paraphrases."""
QUIET = 0.5
"""In the text without a unit it stays below this share of its activation in the text with it."""

Activations = Float[np.ndarray, "units contexts seq"]


def answer(
    subject: Subject,
    how: ExplainingConfig = EXPLAINING,
    units: Sequence[int] | None = None,
    judges: Sequence[Judge] = (),
) -> dict[str, Any]:
    """Have the base model of checkpoints explain their units, and judges decide what the explanations are worth.

    Args:
        subject: the checkpoints.
        how: how much is read and written.
        units: which units; by default those that add most to the output.
        judges: who decides; nobody by default.

    Raises:
        MxdError: as ``evaluate_explaining``.
    """
    results = evaluate_explaining(subject.base, subject.trained, subject.contexts(how.seed), how, units, judges)
    asked = how.model_dump(mode="json") | {"judges": [judge.name for judge in judges]}
    return subject.document(results, asked=asked, replacements=subject.members)


@torch.no_grad()
def evaluate_explaining(
    model: FrozenModel,
    layers: Mapping[str, Trained],
    contexts: Contexts,
    how: ExplainingConfig = EXPLAINING,
    units: Sequence[int] | None = None,
    judges: Sequence[Judge] = (),
) -> dict[str, dict[str, Any]]:
    """Have a model explain units, from one half of a text, and judges decide on the other half.

    Args:
        model: the frozen base model, an instruct model.
        layers: name -> a layer with its provenance.
        contexts: the text.
        how: how much is read and written.
        units: which units; by default those that add most (``contributing``).
        judges: who decides; nobody by default.

    Returns:
        Name -> ``block``, ``left_out`` (units that do not fire in both halves, or fire everywhere), and ``units``: for
        each the top ``tokens``, the ``explanations``, one for each of ``PROMPTS``, and ``pairs`` of held-out texts,
        ``active`` and ``random``. With judges what ``decided`` returns.

    Raises:
        MxdError: not an instruct model, no such unit, too short a text, layers of another model, or two judges of one
            name.
    """
    check_judges(judges)
    template = _template(model)
    check_units(layers, units)
    batches = list(streamed(contexts, how.tokens))
    rows = np.concatenate(batches)
    if len(rows) < 2:
        raise MxdError("the text holds a single context; one half of it explains, the other decides. Raise --tokens.")
    with evaluating(model, layers):
        chosen = {name: _chosen(model, name, trained, rows, how, units) for name, trained in layers.items()}
        fired = _fired(model, layers, chosen, batches)
    results: dict[str, dict[str, Any]] = {}
    with progress(
        f"explaining units of {plural(len(layers), 'layer')}", len(layers) * len(PROMPTS), "prompts"
    ) as advance:
        for number, (name, trained) in enumerate(layers.items()):
            rng = np.random.default_rng([how.seed, number])
            found = zip(chosen[name], fired[name], strict=True)
            known = {unit: one for unit, of in found if (one := _seen(model, of, rows, how, rng)) is not None}
            _explain(model, known, template, how.new_tokens, advance)
            results[name] = {"block": trained.provenance.block, "left_out": len(chosen[name]) - len(known)}
            results[name]["units"] = {str(unit): one for unit, one in known.items()}
    if judges:
        decided(results, judges, how.seed)
    return results


def _explain(
    model: FrozenModel, units: Mapping[int, dict[str, Any]], template: Any, new_tokens: int, advance: Advance
) -> None:
    """Put explanations in the place of the units' top tokens' ``ids``; arguments as ``written``."""
    vectors = [mean_embedding(model, one.pop("ids")) for one in units.values()]
    for prompt in PROMPTS if units else ():
        texts = written(model, torch.stack(vectors), template, *prompt, new_tokens)
        for one, text in zip(units.values(), texts, strict=True):
            one.setdefault("explanations", []).append(text)
        advance(1)


def mean_embedding(model: FrozenModel, ids: Int[np.ndarray, " tokens"]) -> Float[Tensor, " width"]:
    """Return the mean of the model's embeddings of some tokens, each as often as it is there."""
    return _embeddings(model)(torch.from_numpy(ids).long().to(model.device)).mean(0)


def written(
    model: FrozenModel, words: Float[Tensor, "units width"], template: Any, question: str, begun: str, new_tokens: int
) -> list[str]:
    """Return what the model writes about words that are given as vectors, greedily, up to its end-of-text token.

    Args:
        model: the frozen model.
        words: a vector for each text; it stands wherever ``SLOT`` does.
        template: takes a question to the text of a chat, as far as the answer.
        question: what is asked.
        begun: how the answer begins.
        new_tokens: the most tokens to add.

    Raises:
        MxdError: the prompt does not fit into the model.
    """
    tokenizer, embed = model.tokenizer, _embeddings(model)
    *before, last = (template(question) + begun).split(SLOT)
    parts: list[Tensor] = []
    for piece in (*(text.rstrip(" ") for text in before), last):  # a word's token brings its own space
        if parts:
            parts.append(words.unsqueeze(1))
        ids = torch.tensor([tokenizer(piece, add_special_tokens=False)["input_ids"]], device=model.device).long()
        parts.append(embed(ids).expand(len(words), -1, -1))
    whole = torch.cat(parts, 1)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions and whole.shape[1] + new_tokens > positions:
        raise MxdError(
            f"a prompt of {whole.shape[1]} tokens and {new_tokens} new ones do not fit into the {positions} positions "
            f"of {model.source!r}; lower --new-tokens."
        )
    fed, cache, added = whole, None, []
    for _ in range(new_tokens):
        logits, cache = step_cached(model, cache, inputs_embeds=fed)
        added.append(logits[:, -1].argmax(-1))
        new = embed(added[-1]).unsqueeze(1)
        fed = torch.cat([fed, new], 1) if cache is None else new
    rows = torch.stack(added, 1).tolist()
    ends = [row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else None for row in rows]
    return [tokenizer.decode(row[:end], skip_special_tokens=True) for row, end in zip(rows, ends, strict=True)]


def _template(model: FrozenModel) -> Any:
    """Return what makes a chat of a question; refuse models that are not for chats."""
    tokenizer = model.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise MxdError(
            f"{model.source!r} has no chat template: only an instruct model can be asked what a unit means. Train "
            "replacements for one, or look at the units' text with `mxd units`."
        )

    def chat(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        return cast(str, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    return chat


def _embeddings(model: FrozenModel) -> Any:
    return cast(Any, model.module).get_input_embeddings()


def _chosen(
    model: FrozenModel,
    name: str,
    trained: Trained,
    rows: Int[np.ndarray, "contexts seq"],
    how: ExplainingConfig,
    units: Sequence[int] | None,
) -> list[int]:
    """Return the units to explain, by default those that add most to the output in the first half of the text."""
    if units is not None:
        return list(dict.fromkeys(units))
    moments = CodeMoments(trained.layer)
    for row in rows[: len(rows) // 2]:
        for _, code, _ in codes(model, {name: trained}, row[None]):
            moments.count(code)
    return contributing(moments, how.top, how.shared)


def _fired(
    model: FrozenModel,
    layers: Mapping[str, Trained],
    chosen: Mapping[str, Sequence[int]],
    batches: Sequence[Int[np.ndarray, "_ seq"]],
) -> dict[str, Activations]:
    """Return the activations of the chosen units at every token; zero where tokens do not count."""
    parts: dict[str, list[Activations]] = {name: [] for name in layers}
    for batch in batches:
        for name, code, position in codes(model, layers, batch):
            code = code.cpu()
            values, indices = code.activations.numpy(), code.indices.numpy()
            dense = np.zeros((len(chosen[name]), batch.size))
            for line, unit in zip(dense, chosen[name], strict=True):
                line[position] = (values * (indices == unit)).sum(-1)
            parts[name].append(dense.reshape(-1, *batch.shape))
    return {name: np.concatenate(some, 1) for name, some in parts.items()}


def _seen(
    model: FrozenModel,
    fired: Float[np.ndarray, "contexts seq"],
    rows: Int[np.ndarray, "contexts seq"],
    how: ExplainingConfig,
    rng: np.random.Generator,
) -> dict[str, Any] | None:
    """Return a unit's top tokens in the first half and pairs of texts of the second; ``None`` where it has none."""
    half = len(rows) // 2
    first = fired[:half].ravel()
    top = np.argsort(-first, kind="stable")[: how.words]
    ids = rows[:half].ravel()[top[first[top] > 0]]
    pairs: list[dict[str, str]] = []
    held_out = np.arange(half, len(rows))
    for context in held_out[np.argsort(-fired[half:].max(-1), kind="stable")]:
        at = int(fired[context].argmax())
        window = slice(max(0, at - WINDOW[0]), at + WINDOW[1] + 1)
        quiet = held_out[fired[half:, window].max(-1) < QUIET * fired[context, at]]
        if not len(quiet) or len(pairs) == how.contexts:
            break
        texts = (rows[number, window].tolist() for number in (context, rng.choice(quiet)))
        active, other = (model.tokenizer.decode(text, skip_special_tokens=True) for text in texts)
        pairs.append({"active": active, "random": other})
    if not len(ids) or not pairs:
        return None
    return {"ids": ids, "tokens": token_strings(model.tokenizer, ids.tolist()), "pairs": pairs}
