"""What the guide to the train function shows runs; it names every function."""

import re
from collections.abc import Callable
from typing import Any

from guides import Guide

from paceline import train

GUIDE = Guide("docs/train.md")


def test_the_code_runs_from_top_to_bottom(run_with_torch: Callable[..., Any]) -> None:
    result = run_with_torch(GUIDE.code())
    assert result.returncode == 0, result.stderr


def test_every_function_is_named() -> None:
    functions = {name for name in train.__all__ if name.islower()}
    assert len(functions) == 23
    assert functions <= set(re.findall(r"\w+", GUIDE.text))
