"""The names that the guide to back ends uses exist; `tests/backends` runs the libraries."""

import ast
import inspect
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from guides import ROOT, Guide

from paceline import core, pytorch
from paceline.pytorch.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext

GUIDE = Guide("docs/backends.md")


def test_the_trial_of_deepspeed_has_what_a_trial_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace())  # type: ignore[arg-type]
    block = GUIDE.block("import deepspeed")
    names: dict[str, Any] = {"torch": torch}
    GUIDE.run([block.partition("\nwith ")[0]], names)
    assert issubclass(names["MyTrial"], DeepSpeedTrial)
    assert not names["MyTrial"].__abstractmethods__
    calls = re.findall(r"context\.(\w+)\(", block)
    assert [name for name in calls if not hasattr(DeepSpeedTrialContext, name)] == []


def test_options_exist() -> None:
    functions = {
        "init": pytorch.init,
        "fit": pytorch.Trainer.fit,
        "from_deepspeed": core.DistributedContext.from_deepspeed,
    }
    for block in GUIDE.blocks("python"):
        for call in ast.walk(ast.parse(block)):
            if isinstance(call, ast.Call):
                name = getattr(call.func, "attr", getattr(call.func, "id", ""))
                if name in functions:
                    options = {keyword.arg for keyword in call.keywords}
                    assert options <= inspect.signature(functions[name]).parameters.keys()
    for name in re.findall(r"DistributedContext\.(\w+)\(", GUIDE.text):
        assert hasattr(core.DistributedContext, name)


def test_files_of_the_installation_exist() -> None:
    for path in re.findall(r"tests/backends[\w/.]*", GUIDE.text):
        assert (ROOT / path).exists(), path
    [version] = re.findall(r"deepspeed==[\d.]+", GUIDE.text)
    assert version in (ROOT / "Makefile").read_text()
