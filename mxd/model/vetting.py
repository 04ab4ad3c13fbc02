"""Checks of a base model's files before transformers reads them: no pickle, no foreign code, no absurd sizes.

Whatever is wrong is a ``ValueError`` or an ``OSError`` that says so in one line; callers add which model it was.
"""

import math
import mmap
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from mxd.common.files import read_text, regular
from mxd.common.parsing import parse_json
from mxd.model.gguf_header import GGUFHeader

SAFE = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")

MOST = 10_000
"""The most layers, heads, experts or labels of a config: transformers loops over them before it builds anything."""
_COUNTED = re.compile(
    r"(^|[._])(num|n)_\w*(layer|label|head|expert)|layers?$|depths?$|dense_replace|attention_types"
    r"|(block|head|expert)_count"
)
OWN = "mxd"
"""Key of an exported model's config that mxd itself wrote: of layers, not of the base model."""

_KERNELS = frozenset({"eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm"})
"""Implementations in transformers and PyTorch themselves; others come from other packages or from repositories."""

MOST_PARTS = 20_000
"""The most modules and tensors of a model whose weights are not read. Of 173 types of causal models in transformers
none has 4,000 at its default size; building 20,000 takes a second or two."""
PARTS_PER_TENSOR = 10
"""The most modules and tensors per stored tensor. Real models have at most 3.8."""
VALUES_PER_VALUE = 8
"""The most values of weights per stored value. Real models have at most 3, where tied tensors are registered again;
4-bit weights are stored two to a value."""
MOST_BUFFERS = 2**26
"""The most values of buffers, such as causal masks, beyond twice the number of weights."""
MOST_INDEX_BYTES = 10**8


@dataclass(frozen=True)
class ModelFiles:
    """Where transformers finds a base model: a folder, a repository on the Hub, or a GGUF file."""

    where: str
    """The folder, or the repository's name."""
    revision: str | None = None
    """The repository's commit."""
    gguf: Path | None = None
    """The file, which lies in the folder."""
    trust_remote_code: bool = False
    local_files_only: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """Arguments for everything that transformers reads there."""
        return {
            **({} if self.revision is None else {"revision": self.revision}),
            **({} if self.gguf is None else {"gguf_file": self.gguf.name}),
            "local_files_only": self.local_files_only,
            "trust_remote_code": self.trust_remote_code,
        }

    def find(self, name: str) -> Path | None:
        """Return one of its files, fetched from the Hub if necessary, or ``None``."""
        from transformers.utils import cached_file

        path = cached_file(
            self.where,
            name,
            revision=self.revision,
            local_files_only=self.local_files_only,
            _raise_exceptions_for_missing_entries=False,
        )
        return None if path is None else regular(Path(path))

    def has(self, name: str) -> bool:
        """Return whether there is a file of that name, without fetching it."""
        from transformers.utils import has_file

        return has_file(self.where, name, revision=self.revision, local_files_only=self.local_files_only)


@dataclass(frozen=True)
class WeightCounts:
    """The numbers of values and tensors in a model's files."""

    values: int
    tensors: int


def read_config(files: ModelFiles) -> Any:
    """Return a model's transformers config, after checking that it asks for nothing dangerous.

    Raises:
        OSError: there is none.
        ValueError: it is refused; for a malformed one transformers may raise anything.
    """
    from transformers import AutoConfig, PreTrainedConfig

    if files.gguf is not None:
        measure_gguf(files.gguf)
    else:
        options = {key: value for key, value in files.options.items() if key != "trust_remote_code"}
        raw, _ = PreTrainedConfig.get_config_dict(files.where, **options)
        if raw == {}:
            raise FileNotFoundError("there is no config.json, or it is empty")
        check_config(raw, files.trust_remote_code)
        if files.find("adapter_config.json"):
            raise ValueError(
                "it holds an adapter (adapter_config.json), which would be left out or put in depending on whether "
                "peft is installed; merge it (peft's merge_and_unload) and save the whole model, or delete that file"
            )
    return AutoConfig.from_pretrained(files.where, **files.options)


def check_config(config: Any, trust_remote_code: bool = False) -> None:
    """Refuse a config with absurd counts or NaN, and, unless it is trusted, one that asks for code from elsewhere.

    Args:
        config: the data of a ``config.json``, or the numbers of a GGUF file's header by name.
        trust_remote_code: whether code from elsewhere is allowed.

    Raises:
        ValueError: it is refused.
    """
    if not isinstance(config, dict):
        raise ValueError(f"its config.json holds a {type(config).__name__}, expected an object")
    for names, value in _leaves({key: part for key, part in config.items() if key != OWN}):
        name = ".".join(names)
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"its config sets {name} to NaN")
        if isinstance(value, int | float) and value > MOST and any(map(_COUNTED.search, names)):
            raise ValueError(f"its config sets {name} to more than {MOST:,}")
        if trust_remote_code or not isinstance(value, str):
            continue
        if re.search("(attn|experts)_implementation", name) and value not in _KERNELS:
            raise ValueError(
                f"its config sets {name} to {value!r}, which may fetch code from the Hub and run it; take it out, "
                f"choose one of {', '.join(sorted(_KERNELS))}, or set model.trust_remote_code"
            )
        if names[-1] == "quant_method" and value != "bitsandbytes":
            raise ValueError(
                f"its weights are quantized by {value!r}, whose kernels come from other packages or from the Hub; give "
                "float weights or a .gguf file, or set model.trust_remote_code"
            )


def _leaves(value: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value that contains no others, with the keys that lead to it."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*names, str(key)))
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item, names)
    else:
        yield names, value


# How much the files hold


def find_weights(files: ModelFiles, named: Any = None, allow_pickle: bool = False) -> WeightCounts:
    """Find a model's weights, fetch them from the Hub if necessary, and count them.

    Args:
        files: the model.
        named: the file of weights that its config names (``transformers_weights``).
        allow_pickle: accept ``pytorch_model.bin`` where there is nothing else.

    Raises:
        OSError: a file cannot be read.
        ValueError: there are none, only a pickle, or something is wrong with them.
    """
    if files.gguf is not None:
        return measure_gguf(files.gguf)
    candidates = [(name, ".safetensors") for name in (SAFE if named is None else (str(named),))]
    for name, suffix in [*candidates, *((name, ".bin") for name in PICKLED if allow_pickle)]:
        if not name.endswith((suffix, f"{suffix}.index.json")):
            raise ValueError(f"its config.json names {name!r} as weights, expected a .safetensors file or its index")
        path = files.find(name)
        if path is not None:
            return measure(_shards(files, path, suffix) if name.endswith(".json") else [path])
    pickled = next((name for name in PICKLED if files.has(name)), None)
    if pickled is None:
        names = ", ".join(name for name, _ in candidates)
        raise ValueError(f"it has no weights: none of {names} is there, or in the cache where the Hub is not reached")
    raise ValueError(
        f"its weights are a pickle ({pickled}), which can run code when it is opened, no safetensors file. Where you "
        "trust it, set model.allow_pickle (load_frozen(..., allow_pickle=True)), or convert it once with transformers: "
        "AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER), and its AutoTokenizer likewise"
    )


def _shards(files: ModelFiles, index: Path, suffix: str) -> list[Path]:
    """Return the files that an index names; all must lie beside or below it."""
    from transformers.utils.hub import get_checkpoint_shard_files

    content = parse_json(read_text(index, MOST_INDEX_BYTES))
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names or not isinstance(content.get("metadata"), dict):
        raise ValueError(f"{index.name} is not an index of weights: expected metadata and a weight_map")
    for name in names.values():
        parts = PurePosixPath(name).parts if isinstance(name, str) else ()
        if not parts or name.startswith("/") or ".." in parts or not re.fullmatch(rf"[\w./-]+\{suffix}", name):
            raise ValueError(f"{index.name} names {name!r}, expected {suffix} files beside it")
    where, local = files.where, files.local_files_only
    paths, _ = get_checkpoint_shard_files(where, str(index), revision=files.revision, local_files_only=local)
    missing = next((path for path in paths if not Path(path).is_file()), None)
    if missing is not None:
        raise ValueError(f"{index.name} names {Path(missing).name!r}, which is not there")
    return [Path(path) for path in paths]


def measure(paths: list[Path]) -> WeightCounts:
    """Count the weights in safetensors files by their headers, and estimate those in pickles from above.

    Raises:
        OSError: a file cannot be read.
        SafetensorError: its header does not fit its size.
    """
    values = tensors = 0
    for path in paths:
        if path.suffix == ".bin":
            size = regular(path).stat().st_size
            # A value takes at least a byte, and a tensor at least 100 bytes as an entry of the zip file.
            values, tensors = values + size, tensors + size // 100
            continue
        with safe_open(regular(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it cannot be iterated over
                values += math.prod(file.get_slice(name).get_shape())
                tensors += 1
    return WeightCounts(values, tensors)


def measure_gguf(path: Path) -> WeightCounts:
    """Count the weights in a GGUF file by its header.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a GGUF file, is cut off, or has absurd counts.
    """
    with regular(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = GGUFHeader(data)
        check_config({name: value for name, value in header.settings.items() if not isinstance(value, bytes)})
        return WeightCounts(*header.weights())


# How much is built


@contextmanager
def bounded(stored: WeightCounts | None = None) -> Iterator[None]:
    """Stop building a model, on the meta device, when it becomes larger than its weights can account for.

    Args:
        stored: its weights; without them only the number of modules and tensors is bounded.

    Raises:
        ValueError: in the constructor that exceeded a limit.
    """
    limits = {"modules and tensors": MOST_PARTS}
    if stored is not None:
        limits = {"modules and tensors": 1000 + PARTS_PER_TENSOR * stored.tensors}
        limits |= {"weights": VALUES_PER_VALUE * stored.values, "values of buffers": MOST_BUFFERS + 2 * stored.values}
    counted: Counter[str] = Counter()

    def count(kind: str, size: int) -> None:
        counted.update({"modules and tensors": 1, kind: size})
        for what, most in limits.items():
            if counted[what] > most:
                raise ValueError(f"its config asks for more than {most:,} {what}{_than(stored)}")

    def tensor(kind: str) -> Any:
        def hook(module: nn.Module, name: str, value: Tensor | None) -> None:
            if value is not None and value.is_meta:
                count(kind, value.numel())

        return hook

    with ExitStack() as stack:
        for handle in (
            hooks.register_module_module_registration_hook(lambda *_: count("modules", 1)),
            hooks.register_module_parameter_registration_hook(tensor("weights")),
            hooks.register_module_buffer_registration_hook(tensor("values of buffers")),
        ):
            stack.callback(handle.remove)
        yield


def _than(stored: WeightCounts | None) -> str:
    if stored is None:
        return ""
    return f", and its files hold {stored.tensors:,} tensors of {stored.values:,} values in all"
