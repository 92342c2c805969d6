"""What the guide to config objects shows runs, and its links exist."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.config import parse_yaml
from paceline.declarative import TrainingConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDE = (DOCS / "declarative.md").read_text()


def test_the_code_runs_from_top_to_bottom(run_with_torch: Callable[..., Any]) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL))
    result = run_with_torch(code)
    assert result.returncode == 0, result.stderr


def test_the_fields_of_the_file_exist() -> None:
    for text in re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL):
        assert parse_yaml(text).keys() <= TrainingConfig.__dataclass_fields__.keys()


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", GUIDE):
        assert (DOCS / target.partition("#")[0]).exists(), target
