"""What the guide to data sets shows runs, and its names and links exist."""

import re
from pathlib import Path
from typing import Any

import pytest

from paceline import data
from paceline.storage import storage_from

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDE = (DOCS / "data.md").read_text()


def test_the_code_runs_from_top_to_bottom(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
        if "s3://bucket/data" in code:
            storage: Any = storage_from(s3)
            for path in tmp_path.glob("*.parquet"):
                storage.put_file(f"data/{path.name}", path)
            code = code.replace("s3://bucket/data", f"{s3}/data")
        exec(compile(code, "data.md", "exec"), names)


def test_every_operation_is_named() -> None:
    own = {
        "apply_stages",
        "epoch_order",
        "fetch",
        "has_stages",
        "identity",
        "is_stream",
        "plan",
        "read_by",
        "source",
    }
    operations = {name for name in vars(data.Dataset) if not name.startswith("_")} - own
    functions = {name for name in data.__all__ if name.islower()}
    assert operations | functions <= set(re.findall(r"\w+", GUIDE))


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", GUIDE):
        assert (DOCS / target).exists(), target
