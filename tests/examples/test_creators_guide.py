"""What the guide to creators shows runs, and its links exist."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDE = (DOCS / "creators.md").read_text()


def test_the_code_runs_from_top_to_bottom(run_with_torch: Callable[..., Any]) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL))
    result = run_with_torch(code)
    assert result.returncode == 0, result.stderr


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", GUIDE):
        assert (DOCS / target.partition("#")[0]).exists(), target
