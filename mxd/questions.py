"""The questions an evaluation can ask, each with one frozen config, the only place for its defaults.

A question's function (``answer`` in ``mxd/evaluation/QUESTION.py``), its command (whose options are the config's
fields, with their docstrings as help) and the ``evaluation`` section of a run's config, which `mxd compare` reads, all
take this config; ``DEFAULTS`` holds all of them unchanged. ``Parameter`` says where an option differs from its field.
"""

import re
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from cyclopts import Parameter
from pydantic import (
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from mxd.common.errors import MxdError, nearest, redact, told
from mxd.common.settings import Frozen

S = TypeVar("S", bound="Settings")
T = TypeVar("T")

NoOption = Annotated[T, Parameter(parse=False)]
"""A field that is not an option of its command, or is one in another form."""

Count = Annotated[int, Field(gt=0)]
"""How many: at least one."""

Words = Annotated[int, Field(gt=0, le=10_000)]
"""Words of a text that make a prompt."""

Question = Literal[
    "faithfulness",
    "generation",
    "whole",
    "structure",
    "units",
    "probing",
    "steering",
    "masking",
    "toxicity",
    "ablation",
    "subset",
    "rewrite",
]
"""The questions of `mxd compare`, in the order of the report's sections; a section has the name of its question."""

SubsetMode = Literal["token", "whole", "prefix", "global"]
"""Where the units of a subset are chosen: at each token, in each text, in its first half, or in a corpus."""

PROMPTS = (
    *(f"The capital of {country} is" for country in ("France", "Japan", "Egypt", "Brazil")),
    *(f"The {noun} of the United States" for noun in ("President", "population", "economy", "army")),
)
"""Two templates, each filled in four ways; the paper's figure 21 does not spell out its template."""


class Settings(Frozen):
    """Base of the configs of runs and questions, in which secrets are refused.

    Where a list stands, one value may be written as it is, and several that are not free text divided by commas.
    """

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str) and redact(value) != value:
            raise ValueError(
                "holds a user, a password, a query or a key, which the run's files would record; give it to what needs "
                "it in the environment or in its own files"
            )
        annotation = cls.model_fields[info.field_name or ""].annotation
        if get_origin(annotation) is tuple and isinstance(value, str | int | float):
            if isinstance(value, str) and get_args(annotation)[0] is not str:
                return [part.strip() for part in value.split(",")]
            return [value]
        return value


class FaithfulnessConfig(Settings):
    """Is the splice faithful?"""

    tokens: Count = 65_536
    """Positions to read."""
    seed: NonNegativeInt = 0
    """Draws the order of the text, and so the part that is read."""


class GenerationConfig(Settings):
    """Does it write what the base model writes?"""

    limit: Count = 512
    """Prompts."""
    words: Words = 4
    """Words of a text that make a prompt."""
    tokens: Count = 32
    """Tokens to add."""
    seed: NonNegativeInt = 0
    """Draws the texts."""


class WholeConfig(Settings):
    """Is the model still the model with all of a set's blocks replaced, and where does the error come from?"""

    tokens: Count = 16_384
    """Positions to read; about three splices for each block run over them."""
    draws: Count = 3
    """Random orders in which blocks are replaced."""
    limit: Count = 128
    """Prompts to continue."""
    words: Words = 4
    """Words of a text that make a prompt."""
    new_tokens: Count = 32
    """Tokens to add."""
    seed: NonNegativeInt = 0
    """Draws the order of the text, the prompts and the orders of blocks."""


class UnitsConfig(Settings):
    """How often do units fire, and on what?"""

    tokens: Count = 1_000_000
    """Positions to read, or fewer where the text ends; the split ``train`` has more."""
    top: NonNegativeInt = 10
    """Units of each layer to show where none are named: those that add most to the output."""
    contexts: Count = 5
    """Contexts to show from each of six intervals of activation."""
    sample: Count = 65_536
    """Positions, the first of those read, over which the directions and activations of the units shown are taken."""
    shared: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Units active at more than this share of the tokens count as shared."""
    neurons: bool = False
    """Measure the base MLPs' own neurons as well, a control that every replacement should beat."""
    seed: NonNegativeInt = 0
    """Draws the contexts."""


class ExplainingConfig(Settings):
    """What does the model itself say a unit means? Not among `mxd compare`'s questions: few models can be asked."""

    tokens: Count = 65_536
    """Positions to read: the units are explained from one half, and judges decide on the other."""
    top: Count = 10
    """Units of each layer to explain where none are named: those that add most to the output."""
    words: Count = 10
    """Tokens on which a unit fires most, whose mean embedding is explained."""
    contexts: Count = 2
    """Held-out texts with the unit, each beside one without, that judges are asked about."""
    new_tokens: Count = 30
    """Tokens of an explanation."""
    shared: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Units active at more than this share of the tokens count as shared, and are not explained."""
    seed: NonNegativeInt = 0
    """Draws the order of the text, the texts without a unit and the units whose explanations are the control."""


class StructureConfig(Settings):
    """What rank do units have, and which of them lead?"""

    tokens: Count = 65_536
    """Positions over which leads and rates are counted."""
    experts: Count = 2000
    """Units whose rank is computed, from unit 0 on."""
    prompts: Annotated[tuple[str, ...], Parameter(name="--prompt", show_default=False)] = PROMPTS
    """Prompts for each token of which the four leading units are named; by default eight."""
    seed: NonNegativeInt = 0
    """Draws the order of the text, and so the part that is read."""


class ProbingConfig(Settings):
    """What do single units know?"""

    sets: Annotated[tuple[str, ...], Field(min_length=1), Parameter(name="--set")] = ("factbook", "languages", "gender")
    """Labelled sets: bundled names (factbook, languages, gender); the MxD paper's, fetched from the Hub (paper:ag_news,
    github-code, amazon_sentiment, europarl, bias_in_bios); .csv, .json, .jsonl (each also .gz) or .parquet files,
    folders of them or patterns ('folder/*.csv'); Hub datasets. `python scripts/fetch_probing.py` fetches more."""
    level: Literal["sample", "span", "token"] | None = None
    """What is probed: the mean over a text's tokens (``sample``), over those of its marked ``span`` (columns start and
    end: characters), or its last ``token``; by default the span where a set marks one, else the sample."""
    side: NoOption[Literal["first", "last"] | None] = None
    """Which tokens of a longer text are kept; by default the first at the sample level (the paper takes the last of
    source code, to avoid licence headers), else the last."""
    limit: Count = 10_000
    """Texts of each set, drawn with the seed."""
    seed: NonNegativeInt = 42
    """Orders the texts before they are split 80/20; the paper's."""
    context: NoOption[Annotated[int, Field(ge=6)]] = 128
    """Tokens of a text, BOS included."""
    candidates: NoOption[Count] = 100
    """Units that are probed for each class."""
    text_column: str = "text"
    """Field that holds the text."""
    label_column: str = "label"
    """Field that holds the class."""
    split: str = "train"
    """Split of a Hub dataset."""


class TasksConfig(Settings):
    """Which tasks of the lm-evaluation-harness are scored under each mask."""

    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names or patterns of tasks, groups or tags."""
    limit: Count | None = None
    """Documents of each task, at most; all by default."""
    include: str | None = None
    """Folder with task files of your own."""
    groups: str | None = None
    """Which domain each task is of: ``mmlu``, or a file with the columns task and domain; by default each task is a
    domain of its own."""
    metric: str = "acc"
    """The metric that is compared; every task must have it, with one number for each document."""


class UnderMaskConfig(Settings):
    """What is measured under each mask and its control, beside the losses of the labelled or scored texts."""

    then: tuple[Literal["faithfulness", "generation"], ...] = ()
    """What else is measured under each mask and its control: ``faithfulness`` on held-out text, ``generation`` of
    continuations of the texts that are measured."""
    tokens: Count = 16_384
    """Positions of held-out text to read."""
    prompts: Count = 16
    """Texts of each domain that are continued, greedily."""
    words: Words = 8
    """Words of a text that make a prompt."""
    new_tokens: Count = 32
    """Tokens to add."""
    lm_eval: NoOption[TasksConfig | None] = None
    """Tasks of the lm-evaluation-harness to score under each mask and its control; none by default."""


class MaskingConfig(Settings):
    """Can a topic be switched off?"""

    domains: NoOption[str] = "factbook"
    """Labelled set whose labels are the domains."""
    text_column: str = "text"
    """Field that holds the text."""
    label_column: str = "label"
    """Field that holds the domain."""
    ratio: Annotated[float, Field(ge=1)] = 2.0
    """A unit belongs to a domain if it is at least this many times as active there as in any other (Monet, 5.1)."""
    limit: NoOption[Annotated[int, Field(ge=2)]] = 100
    """Texts of each domain, at most; half of them choose units, half are measured."""
    neurons: bool = False
    """Measure the base MLPs' own neurons as well, a control that every replacement should beat."""
    seed: NonNegativeInt = 0
    """Draws the texts and the units of the control."""
    under: NoOption[UnderMaskConfig] = UnderMaskConfig()
    """What else is measured under each mask."""


class AblationConfig(Settings):
    """What would be lost without a unit?"""

    set: str = "factbook"
    """Labelled texts: a bundled set, a file, folder or pattern, or a Hub dataset, as for probe."""
    target: Literal["token", "probe"] = "token"
    """What accuracy is of: each next ``token`` in the texts of a class, or the texts' classes, by a ``probe`` of the
    spliced model's final hidden states (the nearest to the paper's classifier, but few units change its answers)."""
    top: Count = 256
    """Units of each layer to drop where none are named: those that fire most often, and at most as many shared ones."""
    shared: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Units active at more than this share of the tokens count as shared."""
    neurons: bool = False
    """Measure the base MLPs' own neurons as well, a control that every replacement should beat."""
    text_column: str = "text"
    """Field that holds the text."""
    label_column: str = "label"
    """Field that holds the class."""
    limit: Annotated[int, Field(ge=2)] = 50
    """Texts of each class, at most; half of them choose units and fit the probe, half are measured."""
    seed: NonNegativeInt = 0
    """Draws the texts and the coefficients of the control."""


class PurgingConfig(Settings):
    """Can what goes with a score be masked? Not among `mxd compare`'s questions: no scored texts are bundled."""

    text_column: NoOption[str] = "text"
    """Field that holds the text."""
    score_column: str = "score"
    """Field that holds the number."""
    thresholds: NoOption[Annotated[tuple[float, ...], Field(min_length=1)]] = (0.2, 0.1, 0.05)
    """Correlations from which on a unit is masked (Monet's, for toxicity)."""
    limit: NoOption[Annotated[int, Field(ge=2)]] = 500
    """Texts with scores up to the mean, and above it, at most; half of them choose units, half are measured."""
    neurons: NoOption[bool] = False
    """Measure the base MLPs' own neurons as well, a control that every replacement should beat."""
    seed: NoOption[NonNegativeInt] = 0
    """Draws the texts and the units of the control."""
    under: NoOption[UnderMaskConfig] = UnderMaskConfig()
    """What else is measured under each mask."""


class WordsConfig(Settings):
    """Scores a text 1 if it has a word of a list, else 0: for tests and for words that are known."""

    kind: Literal["words"] = "words"
    file: str
    """The words, one a line."""


class ClassifierConfig(Settings):
    """Scores a text by a sequence-classification model on this machine: the probability of one of its classes."""

    kind: Literal["classifier"] = "classifier"
    model: str
    """A folder or a Hub id."""
    label: str | None = None
    """The class; of two classes by default the second."""


class EndpointConfig(Settings):
    """Scores a text by a model behind an OpenAI-compatible endpoint, which is asked for a number from 0 to 1."""

    kind: Literal["endpoint"] = "endpoint"
    url: str
    """Such as https://api.example.com/v1."""
    model: str
    """Which model to ask there."""
    key_variable: str = "MXD_JUDGE_KEY"
    """Environment variable that holds the endpoint's key."""


def _kind(value: Any) -> Any:
    return value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)


SCORERS: dict[str, type[Settings]] = {"words": WordsConfig, "classifier": ClassifierConfig, "endpoint": EndpointConfig}
"""Kind -> config of who scores texts."""

Scorer = Annotated[
    Annotated[WordsConfig, Tag("words")]
    | Annotated[ClassifierConfig, Tag("classifier")]
    | Annotated[EndpointConfig, Tag("endpoint")],
    Discriminator(_kind),
]
"""Who scores texts."""


class ToxicityConfig(Settings):
    """Does the model write what the score is about once the units that follow it are off?"""

    scores: NoOption[str | None] = None
    """Texts with scores, by which units are chosen; as for `mxd mask --scores`."""
    prompts: NoOption[str | None] = None
    """Texts to continue, with a score each."""
    scorer: NoOption[Scorer | None] = None
    """Who scores what is written."""
    limit: Count = 100
    """Prompts with scores above 0.5, and of the others, at most."""
    samples: Count = 25
    """Continuations of each prompt."""
    tokens: Count = 20
    """Tokens of a continuation."""
    temperature: NonNegativeFloat = 1.0
    """Logits are divided by it; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Tokens are drawn from the smallest set that holds this much probability."""
    greedy_tokens: Count = 30
    """Tokens of the one greedy continuation of each prompt."""
    seed: NonNegativeInt = 0
    """Draws the texts, the prompts, the tokens and the units of the control."""
    purging: NoOption[PurgingConfig] = PurgingConfig(under=UnderMaskConfig(then=("faithfulness",)))
    """How units are chosen, and what else is measured under each mask; by default the loss on held-out text."""


class SteeringConfig(Settings):
    """What does a unit make the model say?"""

    first: NoOption[Count] = 100
    """Units to steer with where none are named: the first ones, at most this many."""
    scale: float = 100.0
    """``lambda``: how much of the unit's output, or of its gate's row, is added."""
    at: Literal["output", "input"] = "output"
    """What is added where: the unit's output to the layer's (MxD), or to what it reads the unit's gate row, made as
    long as the inputs on the prompt are on average (muMoE, appendix G.2)."""
    prompt: str = "Let's talk about "
    """Text to continue."""
    samples: Count = 10
    """Continuations of each unit."""
    tokens: Count = 32
    """Tokens of a continuation."""
    temperature: NonNegativeFloat = 1.0
    """Logits are divided by it; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Tokens are drawn from the smallest set that holds this much probability."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it occurred before; 1 in the paper's code."""
    seed: NonNegativeInt = 0
    """Draws the tokens; a unit's samples do not depend on which others are steered."""
    on: Literal["replacement", "base"] = "replacement"
    """Whose input or output that is: the spliced replacement's (the paper's code), or the ``base`` MLP's."""
    repeats: Count = 1
    """Times each unit's texts are judged."""
    rubric: Literal["paraphrase", "paper"] = "paraphrase"
    """What judges are asked with: a ``paraphrase`` of the prompt of the MxD paper's, or its own words (app. D.1)."""


class SubsetConfig(Settings):
    """Does a layer need all of its active units?"""

    tokens: Count = 8_192
    """Positions to measure on; as many others choose the units of the mode ``global``."""
    modes: Annotated[tuple[SubsetMode, ...], Field(min_length=1), Parameter(name="--mode")] = get_args(SubsetMode)
    """Where the strongest units are chosen: at each ``token``; in the ``whole`` text, by their sums over its tokens; in
    its first half, for the second (``prefix``); in other texts, once for all (``global``)."""
    keep: NoOption[Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(min_length=1)]] = (0.5, 0.25, 0.125)
    """Shares of the units active there that are kept; all and none are measured, too."""
    draws: Annotated[int, Field(ge=2)] = 10
    """Random draws of as many active units."""
    timings: NonNegativeInt = 20
    """Times that decoding with each share of a token's units is timed; 0 leaves it out."""
    seed: NonNegativeInt = 0
    """Draws the order of the text, and the random units."""


class RewriteConfig(Settings):
    """Can outputs be rewritten for one group of texts, found by its units, and for no other?"""

    set: str = "figures"
    """Texts with a label and a group each: ``figures`` (bundled: texts about the economy or the country, with figures
    or in words alone), a file, folder or pattern, or a Hub dataset, as for probe."""
    target_label: str | None = None
    """Label of the target; by default that of the rarest pair of a label and a group."""
    target_group: str | None = None
    """Group of the target; by default that of the rarest pair."""
    support: Count | None = None
    """Texts of the target that the probe is fitted on, at most: fewer make it fail more on the target; by default
    all that there are to fit on."""
    direction: str = "probe"
    """What is added to outputs: the direction of the target's label in the ``probe``, the unembedding of a token
    (``token: yes``), or a unit's own output (``unit:17``)."""
    strengths: NoOption[Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]] = (
        1 / 32,
        1 / 16,
        1 / 8,
        1 / 4,
        1 / 2,
    )
    """How much is added, in lengths of the layer's mean output; nothing at all is tried, too."""
    draws: Count = 2
    """Controls: random texts outside the target in its place."""
    neurons: bool = False
    """Measure the base MLPs' own neurons as well, a control that every replacement should beat."""
    text_column: str = "text"
    """Field that holds the text."""
    label_column: str = "label"
    """Field that holds the label."""
    group_column: str = "group"
    """Field that holds the group."""
    limit: Annotated[int, Field(ge=4)] = 200
    """Texts of each pair of a label and a group, at most: a quarter fits the probe and the units, a quarter chooses
    the strength, half are measured."""
    seed: NonNegativeInt = 0
    """Draws the texts, the controls and the samples of the bootstrap."""

    @field_validator("direction", mode="after")
    @classmethod
    def _is_direction(cls, value: str) -> str:
        if re.fullmatch(r"probe|token:.+|unit:\d+", value) is None:
            raise ValueError(f"expected probe, token:WORD or unit:NUMBER, got {value!r}")
        return value


class EvaluationConfig(Settings):
    """What `mxd compare` measures once everything is trained."""

    questions: tuple[Question, ...] = ("faithfulness", "generation", "units", "structure")
    """Questions to answer; each has a file of its name in ``mxd/evaluation``, and writes a JSON file of its name."""
    split: str | None = None
    """Text that is read; by default, as for the commands, the held-out side of the training text."""
    faithfulness: FaithfulnessConfig = FaithfulnessConfig()
    """As `mxd evaluate`."""
    generation: GenerationConfig = GenerationConfig()
    """As `mxd generate`."""
    whole: WholeConfig = WholeConfig()
    """As `mxd whole`."""
    units: UnitsConfig = UnitsConfig()
    """As `mxd units`."""
    structure: StructureConfig = StructureConfig()
    """As `mxd structure`."""
    probing: ProbingConfig = ProbingConfig()
    """As `mxd probe`."""
    masking: MaskingConfig = MaskingConfig()
    """As `mxd mask --domains`."""
    steering: SteeringConfig = SteeringConfig()
    """As `mxd steer`."""
    toxicity: ToxicityConfig = ToxicityConfig()
    """As `mxd toxicity`."""
    ablation: AblationConfig = AblationConfig()
    """As `mxd ablate`."""
    subset: SubsetConfig = SubsetConfig()
    """As `mxd subset`."""
    rewrite: RewriteConfig = RewriteConfig()
    """As `mxd rewrite`."""


DEFAULTS, PURGING, UNDER_MASK = EvaluationConfig(), PurgingConfig(), UnderMaskConfig()
EXPLAINING = ExplainingConfig()


def checked(kind: type[S], **fields: Any) -> S:
    """Return the config of a question.

    Raises:
        MxdError: a field that does not make sense; the message names it.
    """
    try:
        return kind(**fields)
    except ValidationError as error:
        raise refusal(error, kind) from error


def changed(how: S, **fields: Any) -> S:
    """Return a copy of a config with other values in some fields.

    Raises:
        MxdError: as ``checked``.
    """
    return checked(type(how), **how.model_dump() | fields)


def refusal(error: ValidationError, kind: type[Settings] = Settings) -> MxdError:
    """Return the error for a config that does not make sense; it names the first field at fault.

    Args:
        error: what pydantic found.
        kind: the config, one of whose fields may be misspelt.
    """
    text, problem = told(error), error.errors(include_url=False)[0]
    guess = nearest(problem["loc"][-1], kind.model_fields) if problem["type"] == "extra_forbidden" else ""
    return MxdError(text if text.endswith("?") else f"{text}.{guess}")
