"""Fixtures for the tests of the trial class."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from sharded_runs import Training


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Return the training of the whole model by one process."""
    return Training(tmp_path_factory.mktemp("whole")).run(1, "flat")
