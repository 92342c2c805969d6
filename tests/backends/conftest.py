"""Trainings by the real libraries, which `make test-backends` installs."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).parent
_TIMEOUT_S = 240
_BUILD_S = 850
_BUILD = "from deepspeed.comm.torch import build_shm_op as build; build()"


class Outcome(NamedTuple):
    """How a training ended, and where what its ranks stored is."""

    code: int
    output: str
    directory: Path

    def states(self, name: str = "rank") -> list[dict[str, Any]]:
        """Return what each rank stored at the end."""
        import torch

        files = sorted(self.directory.glob(f"out/{name}_*.pt"))
        return [torch.load(file) for file in files]

    @property
    def run_directory(self) -> Path:
        """The directory of the only run."""
        (run,) = (self.directory / "paceline_runs").iterdir()
        return run


Train = Callable[..., Outcome]


@pytest.fixture(scope="session")
def extensions() -> Path:
    """Return where DeepSpeed keeps what it builds, once that is there.

    A process that is killed while it builds leaves a lock for which all others wait.
    """
    directory = Path(sys.prefix) / "torch_extensions"
    if find_spec("deepspeed") is not None:
        for lock in directory.glob("*/lock"):
            lock.unlink()
        subprocess.run(
            [sys.executable, "-c", _BUILD],
            env=_environment(directory, {"TORCH_EXTENSIONS_DIR": directory}),
            stdout=subprocess.DEVNULL,
            timeout=_BUILD_S,
            check=True,
        )
    return directory


@pytest.fixture(scope="module")
def train(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, extensions: Path
) -> Train:
    """Run the script of the tests' back end on some ranks; equal calls share one training."""
    backend = request.module.BACKEND
    known: dict[Any, Outcome] = {}

    def run(
        num_ranks: int,
        *,
        at: Path | None = None,
        launcher: tuple[str, ...] | None = None,
        **variables: object,
    ) -> Outcome:
        key = (num_ranks, at, launcher, tuple(sorted(variables.items())))
        if at is None and key in known:
            return known[key]
        directory = at or tmp_path_factory.mktemp(backend)
        (directory / "out").mkdir(exist_ok=True)
        start = launcher or (
            *(sys.executable, "-m", f"paceline.launch.{backend}"),
            *("--nproc-per-node", str(num_ranks), "--max-restarts", "1"),
        )
        result = subprocess.run(
            [*start, str(HERE / f"{backend}_script.py")],
            cwd=directory,
            env=_environment(directory, variables | {"TORCH_EXTENSIONS_DIR": extensions}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        known[key] = outcome = Outcome(result.returncode, result.stdout, directory)
        return outcome

    return run


def _environment(directory: Path, variables: dict[str, object]) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {name: str(value) for name, value in variables.items()}
    own = {"OUT": str(directory / "out"), "OMP_NUM_THREADS": "1", "PATH": path}
    return {**os.environ, **own, **given}


def is_same(first: Any, second: Any) -> bool:
    """Tell whether two nested states have the same bits."""
    import torch

    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        is_alike = first.keys() == second.keys()
        return is_alike and all(is_same(first[name], second[name]) for name in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(is_same, first, second))
    return bool(first == second)


@pytest.fixture
def check_same() -> Callable[[Outcome, Outcome, int], None]:
    """Check that two trainings ended in the same bits on every rank."""

    def check(first: Outcome, second: Outcome, num_ranks: int) -> None:
        for outcome in (first, second):
            assert outcome.code == 0, outcome.output
            assert len(outcome.states()) == num_ranks
        assert is_same(first.states(), second.states())

    return check
