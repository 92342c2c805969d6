"""Workers made of small commands."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline._training.workers.processes.local_worker_group import LocalGroup
from paceline._training.workers.processes.worker_output import OutputLine
from paceline._training.workers.processes.worker_process import WorkerSpec

MakeGroup = Callable[..., LocalGroup]


@pytest.fixture
def lines() -> list[OutputLine]:
    """Collect what the workers of `make_group` print."""
    return []


@pytest.fixture
def make_group(tmp_path: Path, lines: list[OutputLine]) -> Iterator[MakeGroup]:
    """Make groups of which every worker runs one Python or shell text."""
    groups: list[LocalGroup] = []

    def make(*texts: str, shell: bool = False, **settings: Any) -> LocalGroup:
        program = ["sh", "-c"] if shell else [sys.executable, "-S", "-c"]
        specs = [
            WorkerSpec(
                command=[*program, text],
                environment=dict(os.environ),
                working_directory=tmp_path,
                rank=rank,
                local_rank=rank,
                world_size=len(texts),
            )
            for rank, text in enumerate(texts)
        ]
        group = LocalGroup(specs, lines.append, **settings)
        groups.append(group)
        return group

    yield make
    for group in groups:
        if group.processes and group.wait(0.0) is None:
            group.stop(grace_s=0.0)
