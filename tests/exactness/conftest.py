"""Straight runs that the tests share, over all processes of the test run."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from forked_processes import RankServer, RankService

from paceline.testing import Fault, FaultOutcome, verify_resume

HERE = Path(__file__).parent

Verify = Callable[..., FaultOutcome]


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory that all processes of this test run share."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "straight_runs"


@pytest.fixture(scope="session")
def fork_command(torch_ranks: RankServer) -> Iterator[list[str]]:
    """Return a command that runs a script as forked ranks; their number and the script follow."""
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory() as directory:
        address = Path(directory) / "ranks"
        service = RankService(torch_ranks, address)
        yield [str(service.program), str(address)]
        service.close()


def is_of_all_ranks(fault: Fault) -> bool:
    """Tell whether each rank comes to where the fault hits; then a kill is the last one's."""
    return fault.point is None or fault.point.startswith("engine.")


@pytest.fixture
def verify(shared_directory: Path, tmp_path: Path, fork_command: list[str]) -> Verify:
    """Return a function that checks `train.py` with one fault.

    What decides the bits of a straight run (`num_workers` and the variables in `options`) names
    it; `others` concern the interrupted run alone. Without the launcher, the ranks are forked.
    """

    def check(
        num_workers: int,
        fault: Fault,
        options: dict[str, str],
        *,
        has_launcher: bool = True,
        **others: str,
    ) -> FaultOutcome:
        name = "-".join([str(num_workers), *(f"{key}={options[key]}" for key in sorted(options))])
        command = [sys.executable, str(HERE / "train.py")]
        if not has_launcher and num_workers > 1:
            name += "-forked"
            command[1:1] = [*fork_command, str(num_workers)]
            if fault.kind == "kill" and fault.rank is None and is_of_all_ranks(fault):
                fault = replace(fault, rank=num_workers - 1)
        verdict = verify_resume(
            command,
            faults=[fault],
            num_workers=num_workers if has_launcher else 1,
            environment={"OMP_NUM_THREADS": "1", **options, **others},
            directory=tmp_path,
            straight=shared_directory / name,
            # One thread a rank adds up in one order, and torch's switches cost a second a start.
            deterministic=False,
            timeout_s=180,
        )
        [outcome] = verdict.outcomes
        assert verdict.threads == outcome.threads == dict.fromkeys(range(num_workers), 1)
        return outcome

    return check
