"""What the guide to the train function shows runs, and its names and links exist."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import train

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDE = (DOCS / "train.md").read_text()


def test_the_code_runs_from_top_to_bottom(run_with_torch: Callable[..., Any]) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL))
    result = run_with_torch(code)
    assert result.returncode == 0, result.stderr


def test_every_function_is_named() -> None:
    functions = {name for name in train.__all__ if name.islower()}
    assert len(functions) == 23
    assert functions <= set(re.findall(r"\w+", GUIDE))


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", GUIDE):
        assert (DOCS / target.partition("#")[0]).exists(), target
