"""Fixtures of the fault laboratory."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fault_lab.library import FaultLab, NoCompilerError


@pytest.fixture
def make_lab(tmp_path: Path) -> Iterator[Callable[[], FaultLab]]:
    """Return a function that makes a laboratory."""
    made: list[FaultLab] = []

    def make() -> FaultLab:
        try:
            made.append(FaultLab(tmp_path / f"lab-{len(made)}"))
        except NoCompilerError as error:
            pytest.skip(str(error))
        return made[-1]

    yield make
    for lab in made:
        lab.close()


@pytest.fixture
def lab(make_lab: Callable[[], FaultLab]) -> FaultLab:
    """Return a laboratory without rules."""
    return make_lab()
