"""A run's config -> the batches it trains on: from its cache where it names one, else live from the base model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mxd.activations import Batch, Cursor, activation_batches, ahead
from mxd.cache import cache_bytes, cached_batches, cached_tokens, check_cache, claim_cache, write_cache
from mxd.config import RunConfig
from mxd.data import documents, special_ids, token_blocks
from mxd.errors import MxdError
from mxd.model import FrozenModel, load_frozen


def activation_stream(config: RunConfig, base: FrozenModel, start: Cursor | None = None) -> Iterator[Batch]:
    """Return the batches a run trains on: from its cache where ``data.cache`` names one, else live from the model.

    Raises:
        MxdError: no text, no tokenizer, or a cache of something else or with too few tokens.
    """
    data, training = config.data, config.training
    if data.cache is not None:
        folder = Path(data.cache)
        check_cache(folder, _identity(config, base))
        if cached_tokens(folder) < training.steps * training.batch_tokens:
            raise MxdError(
                f"the activation cache {folder} holds {cached_tokens(folder):,} tokens, the run asks for "
                f"{training.tokens:,}; lower training.tokens, or go on with: mxd cache CONFIG {folder}"
            )
        return ahead(cached_batches(folder, config.layers, start, base.device), depth=2)
    if base.tokenizer is None:
        raise MxdError("the base model has no tokenizer; pass one to load_frozen(..., tokenizer=...).")
    texts = documents(data.source, data.split, data.column, data.streaming, config.seed, data.part)
    blocks = token_blocks(texts, base.tokenizer, data.context, data.bos, config.seed)
    contexts = max(1, training.buffer_tokens // data.context)
    return activation_batches(
        base,
        config.layers,
        (lambda first: ahead(blocks(first), contexts)) if data.streaming else blocks,
        training.batch_tokens,
        training.buffer_tokens,
        masked_ids_of(config, base),
        config.seed,
        forward_contexts=max(1, 4096 // data.context),
        start=start,
    )


def cache_activations(config: RunConfig, folder: Path, model: Any = None) -> None:
    """Write the activations that a run trains on to disk; an interrupted cache is continued.

    Args:
        config: the run; ``layers``, ``data``, ``seed`` and the sizes and number of its batches count.
        folder: where the cache goes.
        model: a loaded base model, used in place of ``config.model.source``.

    Raises:
        MxdError: anything wrong with config, model, text or disk.
    """
    config = config.model_copy(update={"data": config.data.model_copy(update={"cache": None})})
    base = load_base(config, model)
    for number in config.layers:
        base.check_layer(number)
    tokens = config.training.steps * config.training.batch_tokens
    widths = [(shape.d_in, shape.d_out) for shape in map(base.mlp_shape, config.layers)]
    start = claim_cache(folder, _identity(config, base), cache_bytes(widths, tokens))
    write_cache(folder, activation_stream(config, base, start), tokens)


def load_base(config: RunConfig, model: Any = None) -> FrozenModel:
    """Load the base model that a config names, or wrap a loaded one."""
    settings = config.model
    return load_frozen(
        model if model is not None else settings.source,
        revision=settings.revision,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
    )


def masked_ids_of(config: RunConfig, base: FrozenModel) -> list[int]:
    """Return the tokens that a run leaves out."""
    return special_ids(base.tokenizer) if config.data.mask_special and base.tokenizer is not None else []


def fingerprints(config: RunConfig, base: FrozenModel) -> dict[str, str]:
    """Return block -> hash of its MLP, for the blocks of a run."""
    return {str(number): base.fingerprint(number) for number in config.layers}


def _identity(config: RunConfig, base: FrozenModel) -> dict[str, Any]:
    """What makes a stream of batches what it is: equal identities give equal batches."""
    return {
        "data": config.data.model_dump(exclude={"cache"}),
        "masked_ids": masked_ids_of(config, base),
        "seed": config.seed,
        "batch_tokens": config.training.batch_tokens,
        "buffer_tokens": config.training.buffer_tokens,
        "model_dtype": str(next(base.module.parameters()).dtype).removeprefix("torch."),
        "fingerprints": fingerprints(config, base),
    }
