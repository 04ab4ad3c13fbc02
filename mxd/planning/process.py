"""What a process takes whatever it trains: the base model, the text, Python itself; and what a computation leaves."""

from dataclasses import dataclass
from typing import Any

import torch

from mxd.common.bundled import bundled
from mxd.common.hardware import resident
from mxd.common.processes import local_device
from mxd.config import RunConfig
from mxd.data.spool import MOST_IN_MEMORY
from mxd.data.tables import DOCUMENTS, find_files, suffix_of
from mxd.data.text import BUNDLED, IN_MEMORY
from mxd.model.frozen import FrozenModel
from mxd.model.loading import DTYPES, outline, pick_device, wrap

TEXT_BYTES = 5
"""Bytes of memory for each byte of a local text that is kept there: documents, tables, token ids; measured."""

GZIP_RATIO = 4
"""Assumed size of unpacked text, relative to its .gz file."""


@dataclass(frozen=True)
class BaseProcess:
    """A process that runs the base model."""

    shape: FrozenModel
    """The base model on the meta device, in the dtype that it runs in."""
    device: torch.device
    dtype: str
    weights: int
    """Bytes of the base model's weights."""
    reading: int
    """Bytes that reading them takes for a while."""
    text: int
    """Bytes of the text and its reader."""
    python: int
    """Bytes of Python and its libraries."""

    @property
    def loading(self) -> dict[str, int]:
        """Part -> bytes in the host's memory while the base model is loaded, but for a model that runs there."""
        beside = self.weights if self.device.type != "cpu" else 0
        return {"Python, libraries": self.python, "reading the weights": self.reading + beside}

    def running(self, writing: int = 0) -> dict[str, int]:
        """Return part -> bytes in the host's memory after that.

        Args:
            writing: bytes that are copied there to be saved, where layers are on another device.
        """
        parts = {"Python, libraries": self.python, "text": self.text}
        return parts | ({"writing": writing} if writing and self.device.type != "cpu" else {})


def base_process(config: RunConfig, model: Any = None) -> BaseProcess:
    """Return what a run's processes take at least. Nothing is loaded but the base model's configuration.

    Args:
        config: the run.
        model: a loaded base model, used in place of ``config.model.source``.

    Raises:
        MxdError: no such model or device.
    """
    loaded = None if model is None else wrap(model)
    device = pick_device(local_device(config.model.device)) if loaded is None else loaded.device
    shape = outline(
        config.model.source if loaded is None else loaded.module,
        revision=config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
    )
    dtype = config.model.dtype if loaded is None else loaded.dtype
    shape.check_context(config.data.context)
    shape.module.to(DTYPES.get(dtype, torch.float32))
    tensors = [*shape.module.parameters(), *shape.module.buffers()]
    weights = sum(t.numel() * t.element_size() for t in tensors)
    weights -= _saved(shape.module) if dtype == "int8" else 0
    # The resident memory of a process that was handed a model on the CPU includes its weights.
    counted = weights if loaded is not None and loaded.device.type == "cpu" else 0
    return BaseProcess(
        shape=shape,
        device=device,
        dtype=dtype,
        weights=weights,
        reading=0 if loaded else _reading_bytes(config.model.source, weights, max(map(torch.numel, tensors))),
        text=text_bytes(config),
        python=max(0, resident() - counted),
    )


def state_disk(params: int, units: int, keep: int) -> dict[str, int]:
    """Return part -> bytes that a run writes; a new state is written before an old one is removed.

    Args:
        params: parameters of all layers.
        units: units of all layers.
        keep: states that are kept.
    """
    # A state holds weights and two moments in float32, and when each unit was last active in int64.
    return {f"{keep + 1} states": (keep + 1) * (12 * params + 8 * units), "layers": 4 * params}


def text_bytes(config: RunConfig) -> int:
    """Return the memory that a local text and its reader take; 0 where its size cannot be known."""
    import pyarrow.parquet as pq

    if config.data.cache is not None or config.data.source == IN_MEMORY:  # which is there already
        return 0
    source = bundled("text/train.parquet") if config.data.source in BUNDLED else config.data.source
    whole = rows = 0
    for file in find_files(source, DOCUMENTS):
        if file.suffix == ".parquet":
            groups = pq.ParquetFile(file).metadata
            rows += sum(groups.row_group(i).total_byte_size for i in range(groups.num_row_groups))
            continue
        size = file.stat().st_size * (GZIP_RATIO if file.suffix == ".gz" else 1)
        if suffix_of(file).startswith((".csv", ".jsonl")):
            rows += size
        else:
            whole += size
    return TEXT_BYTES * (whole + min(rows, MOST_IN_MEMORY))


def _saved(module: Any) -> int:
    """Return the bytes that int8 saves against float16: linear maps, except the head, in 8 bits with float32 scales."""
    head = module.get_output_embeddings()
    maps = [(type(m).__name__, m.weight) for m in module.modules() if m is not head and hasattr(m, "weight")]
    sizes = {"Linear": 0, "Conv1D": 1}  # the dimension of the outputs, each with a scale
    return sum(w.numel() - 4 * w.shape[sizes[kind]] for kind, w in maps if kind in sizes)


def _reading_bytes(source: str, weights: int, largest: int) -> int:
    """Return the memory that reading takes beside the weights: for GGUF one tensor twice in float32, else the file."""
    return 8 * largest if source.endswith(".gguf") else weights
