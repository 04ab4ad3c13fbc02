"""The batches a run trains on: read from the cache its config names, else recorded live from the base model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mxd.common.errors import MxdError, typed
from mxd.common.processes import ALONE, Processes, launched, local_device
from mxd.common.progress import say_once
from mxd.config import RunConfig, plain_config, recorded
from mxd.data.activations import Batch, Cursor, WindowFilter, activation_batches, locating
from mxd.data.cache import Dtype, cache_bytes, claim_cache, write_cache
from mxd.data.checks import check_activations, check_text
from mxd.data.contexts import Finite, Streamed, special_ids, token_contexts
from mxd.data.exchange import RankPart
from mxd.data.prefetch import ahead
from mxd.data.reading import cache_hash, cached_batches, cached_tokens, check_cache, mixed_batches
from mxd.data.shards import identity_of
from mxd.data.store import Location, open_store
from mxd.data.text import MEMORY, documents, held_out, in_memory, text_hash
from mxd.layers import Covariance
from mxd.model.autocast import under_autocast
from mxd.model.frozen import FrozenModel, Record
from mxd.model.loading import load_frozen
from mxd.planning.layout import blocks_of

ORDER = ("seed", "batch_tokens", "buffer_tokens")
"""Parts of a stream's identity that determine only its order, which a mixed cache draws anew."""

BESIDE = {"cache", "mix_shards", "bos_constant", "exclude_special", "forward_tokens", "autocast"}
"""Fields of ``data`` that a stream's tokens do not depend on, or that stand in its identity by another name."""

BASE = "base model (hash of its settings and all its weights)"
AUTOCAST = "base model under autocast"


def activation_stream(
    config: RunConfig,
    base: FrozenModel,
    start: Cursor | None = None,
    processes: Processes = ALONE,
    shares: Sequence[RankPart] | None = None,
    record: Record | None = None,
    text: Iterable[str] | None = None,
) -> Iterator[Batch]:
    """Return the batches a run trains on: from ``data.cache`` where it is set, else live from the base model.

    Args:
        config: the run.
        base: its base model.
        start: where to begin.
        processes: those that fill one buffer together.
        shares: the part of every batch that each process takes; by default all of it.
        record: runs the base model; by default as it is.
        text: documents to read in place of ``data.source``.

    Raises:
        MxdError: no text, no tokenizer, a cache with another identity or too few tokens, or a text that differs from
            the one read up to ``start``: a streamed text is compared while it is read again, any other at once.
    """
    shares = shares or [RankPart(blocks_of(config, base))] * processes.world
    if config.data.cache is not None:
        return ahead(_cached(config, base, start, shares[processes.rank]), depth=2)
    return _live(config, base, start, processes, shares, record=record, text=text)


def cache_activations(
    config: RunConfig,
    location: Location,
    model: Any = None,
    dtype: Dtype = "float32",
    worker: tuple[int, int] | None = None,
) -> None:
    """Write the activations that a run trains on to disk: every shard that is missing or damaged.

    Args:
        config: the run; its ``blocks``, ``data``, ``seed`` and the size and number of its batches matter.
        location: folder or URL where the cache goes.
        model: a loaded base model, used in place of ``config.model.source``.
        dtype: what activations are rounded to.
        worker: ``(r, w)``: this is worker r, counted from 0, of w that divide the shards; by default the rank and size
            of the launch.

    Raises:
        MxdError: anything wrong with config, model, text or disk.
    """
    if config.training.inputs == "spliced":
        raise MxdError(
            "a cache holds activations of the base model, and training.inputs: spliced asks for those of the spliced "
            "one; write it with --training.inputs base."
        )
    with launched(config.timeout) as processes:
        processes.agree(recorded(config) | {"folder": str(location), "--dtype": dtype})
        base = load_base(config, model)
        tokens = config.training.steps * config.training.batch_tokens
        widths = [(shape.d_in, shape.d_out) for shape in map(base.mlp_shape, blocks_of(config, base))]
        text = _documents(config, base)
        text_contexts(config, base, None, text)  # raises what would end it, before there is a folder
        claim_cache(location, _identity(config, base), cache_bytes(widths, tokens, dtype), dtype)

        def stream(start: Cursor, accept: WindowFilter) -> Iterator[Batch]:
            return _live(config, base, start, accept=accept, text=text)

        write_cache(location, stream, tokens, worker or (processes.rank, processes.world))


def _live(
    config: RunConfig,
    base: FrozenModel,
    start: Cursor | None,
    processes: Processes = ALONE,
    shares: Sequence[RankPart] | None = None,
    accept: WindowFilter | None = None,
    record: Record | None = None,
    text: Iterable[str] | None = None,
) -> Iterator[Batch]:
    data, training = config.data, config.training
    contexts = text_contexts(config, base, start, text)
    per_buffer = max(1, training.buffer_tokens // data.context)
    return activation_batches(
        base,
        blocks_of(config, base),
        (lambda first: ahead(contexts(first), per_buffer)) if data.streaming else contexts,
        training.batch_tokens,
        training.buffer_tokens,
        excluded_ids_of(config, base),
        bos_id_of(config, base),
        config.seed,
        forward_contexts=data.forward_contexts,
        start=start,
        processes=processes,
        shares=shares,
        accept=accept,
        located=locating(contexts),
        record=record or recording(config, base),
    )


def autocasts(config: RunConfig, base: FrozenModel) -> bool:
    """Return whether a run's activations are recorded under autocast; those of a cache, whether they were.

    Raises:
        MxdError: it was asked for, and the base model is not in float32 or is spliced; or there is no such cache.
    """
    if config.data.cache is not None:
        return bool(identity_of(open_store(config.data.cache)).get("autocast"))  # None in older caches
    return _autocasts_live(config, base)


def _autocasts_live(config: RunConfig, base: FrozenModel) -> bool:
    asked = config.data.autocast
    if config.training.inputs == "spliced":
        if asked is True:
            raise MxdError("data.autocast is for the base model as it is; with training.inputs: spliced leave it out.")
        return False
    embeddings = cast(Any, base.module).get_input_embeddings()  # not ``mlp_widths``, which runs an MLP, hooks and all
    return under_autocast(asked, base.dtype, base.device, embeddings.weight.shape[1])


def recording(config: RunConfig, base: FrozenModel) -> Record:
    """Return what runs the base model and records its activations, under autocast where ``autocasts`` says so."""
    enabled = _autocasts_live(config, base)

    def record(ids: Int[Tensor, "batch seq"], blocks: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        with torch.autocast(base.device.type, torch.bfloat16, enabled=enabled):
            return base.record(ids, blocks)

    return record


def text_contexts(
    config: RunConfig, base: FrozenModel, start: Cursor | None, text: Iterable[str] | None = None
) -> Finite | Streamed:
    """Return the contexts of a run's text, to be read from a position on.

    Args:
        config: the run.
        base: its base model, with a tokenizer.
        start: the position; by default the beginning.
        text: as for ``activation_stream``.

    Raises:
        MxdError: no text, no tokenizer, or a text of known length that is not the one read up to ``start``.
    """
    data = config.data
    if base.tokenizer is None:
        raise MxdError("the base model has no tokenizer; pass one to load_frozen(..., tokenizer=...).")
    base.check_context(data.context)
    if text is None:
        text = _documents(config, base)
    contexts = token_contexts(
        text,
        base.tokenizer,
        data.context,
        data.bos,
        config.seed,
        vocabulary=base.vocabulary,
        begin=start.bookmark if start is not None else None,
    )
    if isinstance(contexts, Finite):
        if start is not None and start.text:
            check_text(start.text, contexts.digest(start.context))
        tokens = len(contexts.rows) * (data.context - (bos_id_of(config, base) is not None))
        wanted = config.training.steps * config.training.batch_tokens
        if wanted > tokens:
            say_once(f"The text holds {tokens:,} tokens, so {wanted:,} of training are {wanted / tokens:.1f} epochs.")
    return contexts


def _documents(config: RunConfig, base: FrozenModel) -> Iterable[str]:
    data = config.data
    return documents(data.source, data.split, data.column, data.streaming, config.seed, data.part, base.tokenizer)


def own_documents(config: RunConfig, base: FrozenModel, text: Any, split: str | None = None) -> Iterable[str] | None:
    """Return the documents of a run's text that Python code holds; ``None`` where it holds none.

    Args:
        config: the run.
        base: its base model.
        text: as for ``in_memory``.
        split: another one than the run's.

    Raises:
        MxdError: as ``in_memory``.
    """
    if text is None:
        return None
    data = config.data
    return in_memory(text, split or data.split, data.column, config.seed, data.part, base.tokenizer)


def check_held_out(config: RunConfig, base: FrozenModel, text: Any = None) -> None:
    """Refuse text whose held-out side is less than one context, before layers are trained that could not be evaluated.

    Args:
        config: the run; with a cache, or on another split than ``train``, nothing is known of held-out text.
        base: its base model.
        text: what Python code holds; what may be read only once is left alone.

    Raises:
        MxdError: it is.
    """
    data = config.data
    if data.cache is not None or data.split != "train" or base.tokenizer is None:
        return
    held: Iterable[str] | None = None
    if text is None:
        held = held_out(data.source, data.column, base.tokenizer)
    elif isinstance(text, Sequence) or (isinstance(text, Mapping) and "validation" in text):
        held = own_documents(config, base, text, "validation")
    if held is not None and next(token_contexts(iter(held), base.tokenizer, data.context, data.bos)(0), None) is None:
        raise MxdError(
            f"the held-out side of {MEMORY if text is not None else repr(data.source)} is less than one context of "
            f"{data.context:,} tokens, so what is trained could not be evaluated; lower data.context, give more text, "
            "or say what is held out (docs/text.md)."
        )


def _cached(config: RunConfig, base: FrozenModel, start: Cursor | None, share: RankPart) -> Iterator[Batch]:
    data, training, part = config.data, config.training, (share.part, share.parts)
    identity = _identity(config, base)
    if data.autocast == "auto":
        del identity["autocast"]  # as the cache was written
    location = data.cache or ""
    if data.mix_shards:
        check_cache(location, {key: value for key, value in identity.items() if key not in ORDER})
        return mixed_batches(
            location, share.blocks, training.batch_tokens, data.mix_shards, config.seed, start, base.device, part
        )
    check_cache(location, identity)
    available = cached_tokens(location)
    if available < training.steps * training.batch_tokens:
        raise MxdError(
            f"the activation cache {location} holds {available:,} tokens, the run asks for {training.tokens:,}; lower "
            f"training.tokens, set data.mix_shards to read it several times, or continue with: mxd cache CONFIG "
            f"{typed(location)}"
        )
    return cached_batches(location, share.blocks, start, base.device, part)


def load_base(config: RunConfig, model: Any = None) -> FrozenModel:
    """Load the base model that a config names, or wrap a loaded one."""
    settings = config.model
    return load_frozen(
        model if model is not None else settings.source,
        revision=settings.revision,
        dtype=settings.dtype,
        device=local_device(settings.device),
        trust_remote_code=settings.trust_remote_code,
        allow_pickle=settings.allow_pickle,
    )


def excluded_ids_of(config: RunConfig, base: FrozenModel) -> list[int]:
    """Return the ids of the tokens that a run leaves out of training."""
    return special_ids(base.tokenizer) if config.data.exclude_special and base.tokenizer is not None else []


def bos_id_of(config: RunConfig, base: FrozenModel) -> int | None:
    """Return the token whose activations at position 0 layers store instead of training on them, if there is one."""
    stored = config.data.bos and config.data.bos_constant and base.tokenizer is not None
    return base.tokenizer.bos_token_id if stored else None


def bos_activations(
    config: RunConfig, base: FrozenModel
) -> dict[int, tuple[Float[Tensor, " d_in"], Float[Tensor, " d_out"]]]:
    """Return block -> (MLP input, MLP output) at BOS in position 0, for the blocks of a run; empty without a BOS.

    They are the same where layers that store them are spliced into the blocks below.

    Raises:
        MxdError: one of them is not finite, or an output is zero.
    """
    bos_id = bos_id_of(config, base)
    if bos_id is None:
        return {}
    ids = torch.tensor([[bos_id]])
    sites = base.record(ids, blocks_of(config, base))
    for number, (x, y) in sites.items():
        check_activations(number, x[0], y[0], ids[0], base)
    return {number: (x[0, 0].float(), y[0, 0].float()) for number, (x, y) in sites.items()}


def covariances(
    config: RunConfig,
    base: FrozenModel,
    processes: Processes,
    group: Processes,
    shares: Sequence[RankPart],
    record: Record | None = None,
    text: Iterable[str] | None = None,
) -> dict[int, Covariance]:
    """Return block -> second moments over the first window's batches, for the blocks that this process trains at.

    The stream is read from its beginning for this alone, so the base model runs over the first window once more.

    Args:
        config: the run.
        base: its base model.
        processes: those that fill one buffer together.
        group: those among them that take each step together.
        shares: the part of every batch that each process takes.
        record: runs the base model; by default as it is.
        text: as for ``activation_stream``.
    """
    training = config.training
    batches = min(training.buffer_tokens // training.batch_tokens, training.steps)
    sums: dict[int, list[Tensor]] = {}
    count = 0
    for batch in islice(activation_stream(config, base, None, processes, shares, record, text), batches):
        count += len(batch.ids)
        for block, (x, y) in batch.sites.items():
            x, y = x.double(), y.double()
            parts = [x.sum(0), y.sum(0), x.T @ x, x.T @ y, y.T @ y]
            sums[block] = [a + b for a, b in zip(sums[block], parts, strict=True)] if block in sums else parts
    total = sum(group.gather(count))
    found = {}
    for block, parts in sums.items():
        x, y, xx, xy, yy = (group.add(part) / total for part in parts)
        found[block] = Covariance(xx - x.outer(x), xy - x.outer(y), yy - y.outer(y))
    return found


def origin(config: RunConfig, base: FrozenModel) -> dict[str, Any]:
    """Return what determines a run's layers besides the text, which cursors name: equal origins give equal layers."""
    return {
        **plain_config(config),
        "blocks": list(blocks_of(config, base)),
        BASE: base.base_fingerprint(),
        "dtype of the base model": base.dtype,
        AUTOCAST: autocasts(config, base),
        "excluded tokens": excluded_ids_of(config, base),
        "activation cache (hash of its cache.json)": cache_hash(config.data.cache) if config.data.cache else None,
    }


def _identity(config: RunConfig, base: FrozenModel) -> dict[str, Any]:
    """Return what determines a stream of batches: equal identities give equal batches."""
    return {
        "site": "mlp",
        "data": config.data.model_dump(exclude=BESIDE),
        "text": text_hash(config.data.source, config.data.split),
        "excluded_ids": excluded_ids_of(config, base),
        "bos_id": bos_id_of(config, base),
        "seed": config.seed,
        "batch_tokens": config.training.batch_tokens,
        "buffer_tokens": config.training.buffer_tokens,
        "revision": base.revision,
        "model_dtype": base.dtype,
        "autocast": _autocasts_live(config, base),
        "model": base.base_fingerprint(),
        "fingerprints": {str(number): base.fingerprint(number) for number in blocks_of(config, base)},
    }
