"""What the guide to other libraries shows runs."""

from collections.abc import Callable
from typing import Any

import pytest
from guides import Guide

GUIDE = Guide("docs/integrations.md")


@pytest.mark.slow
def test_the_code_runs_from_top_to_bottom(run_with_torch: Callable[..., Any]) -> None:
    result = run_with_torch(GUIDE.code())
    assert result.returncode == 0, result.stderr
