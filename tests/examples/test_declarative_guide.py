"""What the guide to config objects shows runs."""

from collections.abc import Callable
from typing import Any

from guides import Guide

from paceline.config._read_yaml import parse_yaml
from paceline.declarative import TrainingConfig

GUIDE = Guide("docs/declarative.md")


def test_the_code_runs_from_top_to_bottom(run_with_torch: Callable[..., Any]) -> None:
    result = run_with_torch(GUIDE.code())
    assert result.returncode == 0, result.stderr


def test_the_fields_of_the_file_exist() -> None:
    for text in GUIDE.blocks("yaml"):
        assert parse_yaml(text).keys() <= TrainingConfig.__dataclass_fields__.keys()
