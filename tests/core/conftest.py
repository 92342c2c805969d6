"""Fixtures for tests of `paceline.core`."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline._base.run_directory import RunInfo, TrialInfo
from paceline.journal import AnyRecord, RunDirectory


@pytest.fixture(autouse=True)
def work_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run every test in an empty directory, without the variables of a job."""
    for name in list(os.environ):
        if name.startswith(("PACELINE_", "WORLD_SIZE", "RANK", "LOCAL_", "MASTER_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    return tmp_path


@pytest.fixture
def records_of() -> Callable[..., list[AnyRecord]]:
    """Return a function that reads all records of a run directory, or those of one type."""

    def read(path: Path, kind: type[Any] | None = None, rank: int = 0) -> list[AnyRecord]:
        run = RunDirectory(path)
        return [
            record
            for key in run.journal_keys()
            if key.rank == rank
            for entry in run.reader(key)
            if isinstance(record := entry.decode(), kind or object)
        ]

    return read


@pytest.fixture
def cluster_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunDirectory]:
    """Return a function that makes a run directory as a runner does, and enters it."""

    def make(*, config: dict[str, Any] | None = None, **changes: Any) -> RunDirectory:
        trial = TrialInfo(
            trial_id=7,
            experiment_id=3,
            trial_seed=11,
            hparams={"lr": 0.1},
            config=config or {"data": {"path": "/d"}},
        )
        values = {
            "run_id": "run7",
            "name": "trial-7",
            "created": 1.0,
            "attempt": 2,
            "trial": trial,
            "checkpoint_storage": str(tmp_path / "storage"),
            "cluster_id": "c1",
            "agent_id": "node1",
            "slot_ids": [0, 1],
            "container_addrs": ["10.0.0.1"],
        }
        run = RunDirectory.create(tmp_path / "cluster_run", RunInfo(**{**values, **changes}))
        monkeypatch.setenv("PACELINE_RUN_DIR", str(run.path))
        return run

    return make


@pytest.fixture(scope="session")
def rank_server(fork_server_class: Any) -> Iterator[Any]:
    """Return a server of ranks, so that each has torch loaded from its beginning."""
    server = fork_server_class("torch.distributed", "paceline.core")
    yield server
    server.close()


@pytest.fixture
def start_ranks(
    tmp_path: Path, clean_environment: dict[str, str], free_port: int, rank_server: Any
) -> Callable[..., list[Any]]:
    """Return a function that starts ranks of a script as a launcher does."""

    def start(
        code: str, *, size: int = 3, missing: tuple[int, ...] = (), **environment: str
    ) -> list[Any]:
        script = tmp_path / "ranks.py"
        script.write_text(code)
        return [
            rank_server.start(
                str(script),
                directory=tmp_path,
                environment={
                    **clean_environment,
                    "OMP_NUM_THREADS": "1",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(free_port),
                    "WORLD_SIZE": str(size),
                    "LOCAL_WORLD_SIZE": str(size),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    **environment,
                },
            )
            for rank in range(size)
            if rank not in missing
        ]

    return start


@pytest.fixture
def finish_ranks() -> Callable[..., list[tuple[int, str, str]]]:
    """Return a function that waits for ranks: exit code, standard output and error of each."""

    def finish(processes: list[Any], timeout_s: float = 240) -> list[tuple[int, str, str]]:
        results = []
        try:
            for process in processes:
                output, errors = process.communicate(timeout=timeout_s)
                results.append((process.returncode, output, errors))
        finally:
            for process in processes:
                process.kill()
        return results

    return finish
