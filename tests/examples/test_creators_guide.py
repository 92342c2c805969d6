"""What the guide to creators shows runs."""

from collections.abc import Callable
from typing import Any

from guides import Guide

GUIDE = Guide("docs/creators.md")


def test_the_code_runs_from_top_to_bottom(run_with_torch: Callable[..., Any]) -> None:
    result = run_with_torch(GUIDE.code())
    assert result.returncode == 0, result.stderr
