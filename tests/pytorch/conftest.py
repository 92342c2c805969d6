"""Fixtures for the tests of the trial class."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))

from sharded_runs import Training


@pytest.fixture(scope="session")
def forked_ranks(torch_ranks: Any) -> None:
    """Have the ranks of each `Training` forked."""
    Training.server = torch_ranks


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, forked_ranks: None) -> Training:
    """Return the training of the whole model by one process."""
    return Training(tmp_path_factory.mktemp("whole")).run(1, "flat")
