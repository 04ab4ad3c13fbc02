"""A base model's files, looked at before transformers reads them: no pickle, no foreign code, no size beyond reason.

What is wrong with them is a ``ValueError`` or an ``OSError`` that says so in one line; callers add which model it was.
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
"""Layers, heads, experts, labels: what a config counts is looped over before anything is built."""
_COUNTED = re.compile(
    r"(^|[._])(num|n)_\w*(layer|label|head|expert)|layers?$|depths?$|dense_replace|attention_types"
    r"|(block|head|expert)_count"
)
_KERNELS = frozenset({"eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm"})
"""Implementations that are transformers' and PyTorch's own; others come from packages or from repositories."""

MOST_PARTS = 20_000
"""Modules and tensors of a model whose weights are not at hand. Of 173 types of causal models in transformers none has
4,000 at its usual size; a second or two pass until so many are made."""
PARTS_PER_TENSOR = 10
"""The same for each tensor of weights: 3.8 at most."""
VALUES_PER_VALUE = 8
"""Values for each value: 3 at most, where tensors are registered again to tie them; 4-bit weights are two in one."""
MOST_BUFFERS = 2**26
"""Values of buffers, such as causal masks, beyond twice the weights."""
MOST_INDEX_BYTES = 10**8


@dataclass(frozen=True)
class Place:
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
        """What transformers is told about it, whatever it reads there."""
        return {
            **({} if self.revision is None else {"revision": self.revision}),
            **({} if self.gguf is None else {"gguf_file": self.gguf.name}),
            "local_files_only": self.local_files_only,
            "trust_remote_code": self.trust_remote_code,
        }

    def find(self, name: str) -> Path | None:
        """Return one of its files, fetched from the Hub where need be, or ``None``."""
        from transformers.utils import cached_file

        found = cached_file(
            self.where,
            name,
            revision=self.revision,
            local_files_only=self.local_files_only,
            _raise_exceptions_for_missing_entries=False,
        )
        return None if found is None else regular(Path(found))

    def has(self, name: str) -> bool:
        """Return whether it has a file, without fetching it."""
        from transformers.utils import has_file

        return has_file(self.where, name, revision=self.revision, local_files_only=self.local_files_only)


@dataclass(frozen=True)
class Held:
    """How much the files of a model's weights hold."""

    values: int
    tensors: int


def read_config(place: Place) -> Any:
    """Return a model's transformers config, once it is seen to ask for nothing it should not.

    Raises:
        OSError: there is none.
        ValueError: it is refused; transformers raises whatever it likes for one that is malformed.
    """
    from transformers import AutoConfig, PreTrainedConfig

    if place.gguf is not None:
        measure_gguf(place.gguf)
    else:
        options = {key: value for key, value in place.options.items() if key != "trust_remote_code"}
        raw, _ = PreTrainedConfig.get_config_dict(place.where, **options)
        if raw == {}:
            raise FileNotFoundError("there is no config.json, or it is empty")
        check_config(raw, place.trust_remote_code)
        if place.find("adapter_config.json"):
            raise ValueError(
                "it holds an adapter (adapter_config.json), which would be left out or put in depending on whether "
                "peft is installed; merge it (peft's merge_and_unload) and save the whole model, or delete that file"
            )
    return AutoConfig.from_pretrained(place.where, **place.options)


def check_config(config: Any, trust_remote_code: bool = False) -> None:
    """Refuse a config that counts beyond reason, holds NaN, or, unless trusted, asks for code from elsewhere.

    Args:
        config: what a ``config.json`` holds, or numbers of a GGUF file's header by their names.
        trust_remote_code: whether code from elsewhere is asked for by name.

    Raises:
        ValueError: it is refused.
    """
    if not isinstance(config, dict):
        raise ValueError(f"its config.json holds a {type(config).__name__}, expected an object")
    for names, value in _leaves(config):
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
    """Yield every value that holds no others, with the keys that lead to it."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, (*names, str(key)))
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each, names)
    else:
        yield names, value


# How much there is


def find_weights(place: Place, named: Any = None, allow_pickle: bool = False) -> Held:
    """Find a model's weights, fetch them from the Hub where need be, and count what they hold.

    Args:
        place: the model.
        named: the file of weights that its config names (``transformers_weights``).
        allow_pickle: take ``pytorch_model.bin`` where there is nothing else.

    Raises:
        OSError: a file cannot be read.
        ValueError: there are none, only a pickle, or something is wrong with them.
    """
    if place.gguf is not None:
        return measure_gguf(place.gguf)
    wanted = [(name, ".safetensors") for name in (SAFE if named is None else (str(named),))]
    for name, suffix in [*wanted, *((name, ".bin") for name in PICKLED if allow_pickle)]:
        if not name.endswith((suffix, f"{suffix}.index.json")):
            raise ValueError(f"its config.json names {name!r} as weights, expected a .safetensors file or its index")
        found = place.find(name)
        if found is not None:
            return measure(_shards(place, found, suffix) if name.endswith(".json") else [found])
    pickled = next((name for name in PICKLED if place.has(name)), None)
    if pickled is None:
        looked_for = ", ".join(name for name, _ in wanted)
        raise ValueError(f"no weights are found: none of {looked_for} is there, or cached where the Hub is not reached")
    raise ValueError(
        f"its weights are a pickle ({pickled}), which can run code when it is opened, no safetensors file. Where you "
        "trust it, set model.allow_pickle (load_frozen(..., allow_pickle=True)), or convert it once with transformers: "
        "AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER), and its AutoTokenizer likewise"
    )


def _shards(place: Place, index: Path, suffix: str) -> list[Path]:
    """Return the files that an index names, each a plain name beside it."""
    from transformers.utils.hub import get_checkpoint_shard_files

    held = parse_json(read_text(index, MOST_INDEX_BYTES))
    names = held.get("weight_map") if isinstance(held, dict) else None
    if not isinstance(names, dict) or not names or not isinstance(held.get("metadata"), dict):
        raise ValueError(f"{index.name} is not an index of weights: expected metadata and a weight_map")
    for name in names.values():
        parts = PurePosixPath(name).parts if isinstance(name, str) else ()
        if not parts or name.startswith("/") or ".." in parts or not re.fullmatch(rf"[\w./-]+\{suffix}", name):
            raise ValueError(f"{index.name} names {name!r}, expected {suffix} files beside it")
    where, local = place.where, place.local_files_only
    found, _ = get_checkpoint_shard_files(where, str(index), revision=place.revision, local_files_only=local)
    missing = next((path for path in found if not Path(path).is_file()), None)
    if missing is not None:
        raise ValueError(f"{index.name} names {Path(missing).name!r}, which is not there")
    return [Path(path) for path in found]


def measure(paths: list[Path]) -> Held:
    """Count what safetensors files hold, from their headers; of pickles, what they may hold at most.

    Raises:
        OSError: a file cannot be read.
        SafetensorError: its header does not fit its size.
    """
    values = tensors = 0
    for path in paths:
        if path.suffix == ".bin":
            size = regular(path).stat().st_size
            values, tensors = values + size, tensors + size // 100  # a zip file takes that much for each entry
            continue
        with safe_open(regular(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it cannot be iterated over
                values += math.prod(file.get_slice(name).get_shape())
                tensors += 1
    return Held(values, tensors)


def measure_gguf(path: Path) -> Held:
    """Count what a GGUF file holds, from its header.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none, is cut off, or counts beyond reason.
    """
    with regular(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = GGUFHeader(data)
        check_config({name: value for name, value in header.settings.items() if not isinstance(value, bytes)})
        return Held(*header.weights())


# How much is built


@contextmanager
def bounded(held: Held | None = None) -> Iterator[None]:
    """Stop the building of a model, on the meta device, that has more to it than its weights account for.

    Args:
        held: its weights; without, only the number of modules and tensors is bounded.

    Raises:
        ValueError: out of the constructor that went too far.
    """
    rooms = {"modules and tensors": MOST_PARTS}
    if held is not None:
        rooms = {"modules and tensors": 1000 + PARTS_PER_TENSOR * held.tensors}
        rooms |= {"weights": VALUES_PER_VALUE * held.values, "values of buffers": MOST_BUFFERS + 2 * held.values}
    counted: Counter[str] = Counter()

    def count(kind: str, size: int) -> None:
        counted.update({"modules and tensors": 1, kind: size})
        for what, most in rooms.items():
            if counted[what] > most:
                raise ValueError(f"its config asks for more than {most:,} {what}{_than(held)}")

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


def _than(held: Held | None) -> str:
    return "" if held is None else f", and its files hold {held.tensors:,} tensors of {held.values:,} values in all"
