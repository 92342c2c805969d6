"""What the guide to other libraries shows runs, and its links exist."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDE = (DOCS / "integrations.md").read_text()


@pytest.mark.slow
def test_the_code_runs_from_top_to_bottom(run_with_torch: Callable[..., Any]) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL))
    result = run_with_torch(code)
    assert result.returncode == 0, result.stderr


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", GUIDE):
        name = target.partition("#")[0]
        assert not name or (DOCS / name).exists(), target
