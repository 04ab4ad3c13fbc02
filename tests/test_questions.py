"""One config for each question: command, run's config and function take the same, and a bad field is one message."""

import inspect
from importlib import import_module

import pytest
from command import mxd

from mxd.cli import evaluate, masks, shared, units
from mxd.common.errors import MxdError
from mxd.config import parse_config
from mxd.questions import (
    DEFAULTS,
    EXPLAINING,
    PURGING,
    UNDER_MASK,
    EvaluationConfig,
    ProbingConfig,
    Settings,
    changed,
    checked,
)

COMMANDS = {
    "evaluate": ([DEFAULTS.faithfulness], {"--tokens", "--seed"}),
    "generate": ([DEFAULTS.generation], {"--limit", "--words", "--tokens", "--seed"}),
    "whole": ([DEFAULTS.whole], {"--tokens", "--draws", "--limit", "--words", "--new-tokens", "--seed"}),
    "units": ([DEFAULTS.units], {"--tokens", "--top", "--contexts", "--shared", "--neurons", "--seed"}),
    "explain": (
        [EXPLAINING],
        {"--tokens", "--top", "--words", "--contexts", "--new-tokens", "--shared", "--seed"},
    ),
    "structure": ([DEFAULTS.structure], {"--tokens", "--experts", "--prompt", "--seed"}),
    "probe": (
        [DEFAULTS.probing],
        {"--set", "--level", "--limit", "--seed", "--text-column", "--label-column", "--split"},
    ),
    "mask": (
        [DEFAULTS.masking, PURGING, UNDER_MASK],
        {
            *("--text-column", "--label-column", "--ratio", "--neurons", "--seed", "--score-column"),
            *("--then", "--tokens", "--prompts", "--words", "--new-tokens"),
        },
    ),
    "toxicity": (
        [DEFAULTS.toxicity],
        {"--limit", "--samples", "--tokens", "--temperature", "--top-p", "--greedy-tokens", "--seed"},
    ),
    "ablate": (
        [DEFAULTS.ablation],
        {
            *("--set", "--target", "--top", "--shared", "--neurons", "--text-column", "--label-column", "--limit"),
            "--seed",
        },
    ),
    "subset": ([DEFAULTS.subset], {"--tokens", "--mode", "--draws", "--timings", "--seed"}),
    "rewrite": (
        [DEFAULTS.rewrite],
        {
            *("--set", "--target-label", "--target-group", "--support", "--direction", "--draws", "--neurons"),
            *("--text-column", "--label-column", "--group-column", "--limit", "--seed"),
        },
    ),
    "steer": (
        [DEFAULTS.steering],
        {
            *("--scale", "--prompt", "--samples", "--tokens", "--temperature", "--top-p", "--frequency-penalty"),
            *("--seed", "--on", "--at", "--repeats", "--rubric"),
        },
    ),
}
"""Command -> the configs it takes, and which of their fields are options of their own."""

QUESTIONS = [name for name in EvaluationConfig.model_fields if name not in ("questions", "split")]


def defaults(function):
    """The parameters of a function that have a default."""
    return {name: p.default for name, p in inspect.signature(function).parameters.items() if p.default is not p.empty}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_commands_options_are_its_configs_fields(command):
    configs, expected = COMMANDS[command]
    room = next(room for room in (evaluate, units, masks) if hasattr(room, command))
    given = [value for value in defaults(getattr(room, command)).values() if isinstance(value, Settings)]
    assert given == configs
    found = {}
    for argument in shared.app[command].assemble_argument_collection():
        name = argument.field_info.name
        owners = [config for config in configs if name in type(config).model_fields and len(argument.keys) == 1]
        if argument.parse and owners and argument.parameter.name[0] in expected:
            found[argument.parameter.name[0]] = argument
            assert argument.field_info.default == getattr(owners[0], name), name
            assert argument.parameter.help == type(owners[0]).model_fields[name].description != ""
    assert set(found) == expected


def test_what_a_command_takes_in_another_form_says_the_same():
    words = " ".join(inspect.getdoc(masks.mask).split())
    assert f"by default {DEFAULTS.masking.limit}, or below and above the mean score, {PURGING.limit};" in words
    assert shared.numbers("", defaults(masks.mask)["thresholds"], float) == list(PURGING.thresholds)
    assert shared.numbers("", defaults(masks.subset)["keep"], shared.fraction) == list(DEFAULTS.subset.keep)
    assert shared.numbers("", defaults(masks.rewrite)["strengths"], shared.fraction) == list(DEFAULTS.rewrite.strengths)
    assert shared.ranges("", defaults(units.steer)["units"]) == list(range(DEFAULTS.steering.first))
    assert shared.numbers("", defaults(masks.toxicity)["thresholds"], float) == list(PURGING.thresholds)
    assert DEFAULTS.probing.side is None and DEFAULTS.masking.seed == PURGING.seed
    assert DEFAULTS.masking.text_column == PURGING.text_column


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_functions_of_a_question_take_its_config_and_repeat_no_default_of_it(question):
    module, config = import_module(f"mxd.evaluation.{question}"), getattr(DEFAULTS, question)
    assert defaults(module.answer)["how"] == config
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ == module.__name__ and name != "evaluate":  # public, with the number of tokens
            assert not set(defaults(function)) & set(type(config).model_fields), name
            assert defaults(function).get("how", config) == config, name


def test_the_public_function_reads_as_many_tokens_as_the_question():
    from mxd import evaluate

    assert defaults(evaluate)["tokens"] == DEFAULTS.faithfulness.tokens


def test_a_runs_config_begins_with_the_same_defaults():
    assert parse_config({"replacements": [{"method": "mxd"}]}).evaluation == DEFAULTS == EvaluationConfig()
    raw = {"replacements": [{"method": "mxd"}], "evaluation": {"probing": {"limt": 3}}}
    with pytest.raises(MxdError, match=r"evaluation.probing.limt: .*fields here: sets, level, side, limit"):
        parse_config(raw)


def test_a_bad_setting_is_named_in_one_message():
    with pytest.raises(MxdError, match=r"^limit: expected a number greater than 0, got 0\.$"):
        checked(ProbingConfig, limit=0)
    with pytest.raises(MxdError, match=r"^sets\.0: expected text, got 3\.$"):
        checked(ProbingConfig, sets=(3,))
    with pytest.raises(MxdError, match=r"^limit: expected a number greater than 0, got 0\.$"):
        changed(DEFAULTS.probing, limit=0)
    assert changed(DEFAULTS.probing, limit=3) == ProbingConfig(limit=3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["units", "x", "--tokens", 0], "tokens: expected a number greater than 0, got 0."),
        (["units", "x", "--top", "many"], "top: expected a whole number, got 'many'"),
        (["probe", "x", "--level", "word"], "level: expected sample, span or token, got 'word'."),
        (["steer", "x", "--top-p", 2], "top_p: expected a number of at most 1, got '2'."),
        (["mask", "x", "--domains", "y", "--limit", 1], "limit: expected a number of at least 2, got 1."),
    ],
)
def test_a_bad_option_is_one_line(capsys, words, said):
    code, out, err = mxd(capsys, *words)
    assert code == 1 and err.startswith(f"mxd: {said}") and err.count("\n") == 1 and not out


def test_fields_that_are_no_options_are_not_taken(capsys):
    for words in (["probe", "x", "--candidates", 3], ["steer", "x", "--first", 3], ["mask", "x", "--empty-thresholds"]):
        code, _, err = mxd(capsys, *words)
        assert code == 2 and "Unknown option" in err
