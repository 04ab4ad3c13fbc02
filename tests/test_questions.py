"""One default for each setting: command, config and function agree, whatever is asked and however."""

import inspect
from importlib import import_module

import pytest

from mxd.cli import evaluate as commands
from mxd.cli import shared
from mxd.common.errors import MxdError
from mxd.config import parse_config
from mxd.questions import DEFAULTS, PURGING, EvaluationConfig, ProbingConfig, Section, checked

COMMANDS = {
    "evaluate": [DEFAULTS.faithfulness],
    "generate": [DEFAULTS.generation],
    "units": [DEFAULTS.units],
    "structure": [DEFAULTS.structure],
    "probe": [DEFAULTS.probing],
    "mask": [DEFAULTS.masking, PURGING],
    "steer": [DEFAULTS.steering],
}
OTHERWISE = {"domains": None, "side": None, "first": "0-99", "thresholds": "0.2,0.1,0.05", "limit": None}
"""Fields that a command takes in another form, or leaves to the config: what stands there."""
NAMES = {"side": "last", "first": "units"}
"""What those fields are called there."""
NO_OPTION = {"context", "candidates"}

MODULES = {
    "faithfulness": DEFAULTS.faithfulness,
    "checkpoints": DEFAULTS.faithfulness,
    "generation": DEFAULTS.generation,
    "units": DEFAULTS.units,
    "structure": DEFAULTS.structure,
    "probing": DEFAULTS.probing,
    "labelled": DEFAULTS.probing,
    "masking": DEFAULTS.masking,
    "steering": DEFAULTS.steering,
}
ALIASES = {"new_tokens": "tokens", ("structure", "first"): "experts"}


def defaults(function):
    """The parameters of a function that have a default."""
    return {name: p.default for name, p in inspect.signature(function).parameters.items() if p.default is not p.empty}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_defaults_of_its_questions_config(command):
    found = defaults(getattr(commands, command))
    for config in COMMANDS[command]:
        for name in set(type(config).model_fields) - NO_OPTION:
            given = found[NAMES.get(name, name)]
            if name in OTHERWISE and given == OTHERWISE[name]:
                continue
            assert given == getattr(config, name), f"mxd {command}, {name}"


def test_what_a_command_takes_in_another_form_says_the_same():
    words = " ".join(inspect.getdoc(commands.mask).split())
    assert f"by default {DEFAULTS.masking.limit}, or below and above the mean score, {PURGING.limit};" in words
    assert shared.numbers("", defaults(commands.mask)["thresholds"], float) == list(PURGING.thresholds)
    assert shared.ranges("", defaults(commands.steer)["units"]) == list(range(DEFAULTS.steering.first))
    assert DEFAULTS.probing.side is None and DEFAULTS.masking.seed == PURGING.seed
    assert DEFAULTS.masking.text_column == PURGING.text_column


def functions():
    """Every public function of the evaluations with the config of its question."""
    for module, config in MODULES.items():
        path = f"mxd.{'data' if module == 'labelled' else 'evaluation'}.{module}"
        for name, function in inspect.getmembers(import_module(path), inspect.isfunction):
            if function.__module__ == path and not name.startswith("_"):
                yield module, name, function, PURGING if name in ("evaluate_purging", "scored_texts") else config


def test_a_function_has_the_defaults_of_its_questions_config():
    seen = set()
    for module, name, function, config in functions():
        for parameter, default in defaults(function).items():
            field = ALIASES.get((module, parameter), ALIASES.get(parameter, parameter))
            if field in type(config).model_fields:
                assert default == getattr(config, field), f"{module}.{name}: {parameter}"
                seen.add((module, field))
            assert not isinstance(default, Section) or default == config, f"{module}.{name}: {parameter}"
    assert len(seen) > 20


def test_a_runs_config_begins_with_the_same_defaults():
    assert parse_config({"replacements": [{"method": "mxd"}]}).evaluation == DEFAULTS == EvaluationConfig()
    raw = {"replacements": [{"method": "mxd"}], "evaluation": {"probing": {"limt": 3}}}
    with pytest.raises(MxdError, match=r"evaluation.probing.limt: .*fields here: sets, level, side, limit"):
        parse_config(raw)


def test_a_bad_setting_is_named_in_one_message():
    with pytest.raises(MxdError, match=r"^limit is 0; input should be greater than 0\.$"):
        checked(ProbingConfig, limit=0)
    with pytest.raises(MxdError, match=r"^sets\.0 is 3; input should be a valid string\.$"):
        checked(ProbingConfig, sets=(3,))
