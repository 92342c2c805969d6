"""Imports into a directory of runs."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))

from imported_runs import Import, import_into

from paceline.importers._run_writer import ImportedRun


@pytest.fixture
def run_import(tmp_path: Path) -> Import:
    """Import a store, by default into `tmp_path / "runs"`."""

    def call(source: Path, **options: Any) -> tuple[list[ImportedRun], list[str]]:
        return import_into(options.pop("into", tmp_path / "runs"), source, **options)

    return call
