"""What the tests of evaluations share."""

import sys
from types import ModuleType

import pytest
from stand_in import StandIn

from mxd.evaluation import harness


@pytest.fixture
def stand_in(monkeypatch):
    made = StandIn()
    parts = {
        "lm_eval": {"simple_evaluate": made.simple_evaluate},
        "lm_eval.tasks": {"TaskManager": made.manager},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": made.model},
    }
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(harness, "version", lambda name: "0.9")
    return made
