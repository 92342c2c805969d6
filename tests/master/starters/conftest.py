"""Masters with a pool whose runners they start."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))

from starter_contract import Pool


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[Callable[..., Pool]]:
    """Return a function that starts a master with a pool of a definition."""
    made: list[Pool] = []

    def make(definition: dict[str, Any], variables: dict[str, str]) -> Pool:
        made.append(Pool(tmp_path, definition, variables))
        return made[-1]

    yield make
    for pool in made:
        pool.close()
