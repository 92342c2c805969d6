"""The example of streamed data: learned within the memory that it allows."""

import re
from collections.abc import Callable

import pytest

Run = Callable[..., str]


@pytest.fixture
def example_name() -> str:
    """Return the name of the example."""
    return "streamed_data"


@pytest.mark.slow
def test_workers_learn_from_files_that_they_do_not_keep(run: Run) -> None:
    output = run("train.py")
    found = re.findall(r"rank \d: loss ([\d.]+), (\d+) MB of memory for (\d+) MB", output)
    assert len(found) == 2
    for loss, memory_mb, size_mb in found:
        assert float(loss) < 0.01
        # Besides the samples there are the model, the optimizer and torch's own buffers.
        assert int(memory_mb) < int(size_mb)
