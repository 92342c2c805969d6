"""Every public exception survives pickling and copying, as between processes and nodes."""

import copy
import errno
import importlib
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import paceline
from paceline import train
from paceline._training.workers.worker_failures import WorkerFailedError

TEXT = "`x` must be 1, but got 2. Hint: x=1."


def results() -> Any:
    report = train.Report({"loss": 0.5}, rank=1, number=3)
    options: dict[str, Any] = {"checkpoints": [], "best": None, "report_lags_s": {0: 0.1}}
    place = {"run_dir": Path("run"), "attempt": 1, "generations": range(2)}
    return train.Results([1, [report]], **place, num_restarts=1, **options)


def problems() -> Any:
    from paceline.config._fields_and_problems import MISSING, Problem

    return [
        Problem(path="searcher.name", message="must be known", value="x", hint="`random`."),
        Problem(path="entrypoint", message="must be given", value=MISSING),
    ]


# Those that the code makes from something else than a text.
ARGUMENTS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "paceline.client.ApiError": lambda: ((404, "not_found", TEXT), {}),
    "paceline.config.ConfigError": lambda: ((problems(),), {}),
    "paceline.core.DistributedPeerError": lambda: ((TEXT,), {"error_type": "KeyError"}),
    "paceline._cluster.master.experiments.state_decisions.RefusedError": lambda: (
        ("conflict", TEXT),
        {},
    ),
    "paceline._cluster.master.nodes.registration_checks.NodeRefusedError": lambda: (
        ("name_taken", TEXT),
        {},
    ),
    "paceline.search.SpaceError": lambda: (
        ("model.lr", "It must be.", "Let it."),
        {},
    ),
    "paceline.storage.CheckpointWriteError": lambda: ((errno.ENOSPC, TEXT), {}),
    "paceline.train.IncompleteCheckpointError": lambda: (
        (TEXT, results()),
        {},
    ),
    "paceline._training.workers.worker_failures.NotEnoughWorkersError": lambda: (
        (TEXT, 3, 1),
        {},
    ),
    "paceline._training.workers.worker_failures.WorkerFailedError": lambda: (
        (TEXT, 2, 0),
        {},
    ),
    "paceline._training.workers.worker_failures.WorkersLostError": lambda: ((TEXT, 4), {}),
}


def packages() -> Iterator[Any]:
    """Yield the public packages, and the modules of special exceptions elsewhere."""
    yield paceline
    special = {name.rpartition(".")[0] for name in ARGUMENTS}
    for found in pkgutil.walk_packages(paceline.__path__, "paceline."):
        if (found.ispkg and "._" not in found.name) or found.name in special:
            yield importlib.import_module(found.name)


# Not when tests are listed: all processes of a run of tests would load all packages.
@pytest.fixture(scope="module")
def public_exceptions() -> list[type[BaseException]]:
    """Return the exceptions that packages offer; some change variables when they are loaded."""
    found = {
        value
        for package in packages()
        for name in getattr(package, "__all__", None) or vars(package)
        if not name.startswith("_")
        if isinstance(value := getattr(package, name), type) and issubclass(value, BaseException)
        if value.__module__.startswith("paceline")
    }
    return sorted(found, key=name_of)


def name_of(kind: type[BaseException]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),
    "protocol 2": lambda error: pickle.loads(pickle.dumps(error, protocol=2)),
    "cloudpickle": lambda error: cloudpickle.loads(cloudpickle.dumps(error)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.long
def test_public_exceptions_survive_pickling_and_copying(
    public_exceptions: list[type[BaseException]],
) -> None:
    for kind in public_exceptions:
        arguments, options = ARGUMENTS.get(name_of(kind), lambda: ((TEXT,), {}))()
        error = kind(*arguments, **options)
        error.__notes__ = ["It was at batch 3."]
        for way, send in WAYS.items():
            other = send(error)
            case = (name_of(kind), way)
            assert type(other) is kind, case
            assert (str(other), other.args) == (str(error), error.args), case
            assert vars(other) == vars(error), case
            assert getattr(other, "errno", None) == getattr(error, "errno", None), case


def test_exceptions_show_no_private_module(public_exceptions: list[type[BaseException]]) -> None:
    offered = (vars(package).values() for package in packages() if "._" not in package.__name__)
    kinds = {v for values in offered for v in values if v in public_exceptions}
    # Machinery raises its errors for several packages; a worker may have loaded none of them, and
    # cloudpickle would send a class by value whose module is not loaded.
    wings = ("paceline._base.", "paceline._training.")
    assert [k for k in kinds if "._" in k.__module__ and not k.__module__.startswith(wings)] == []


def test_all_special_exceptions_are_public(public_exceptions: list[type[BaseException]]) -> None:
    assert set(ARGUMENTS) <= {name_of(kind) for kind in public_exceptions}
    assert len(public_exceptions) > 40


def test_the_results_in_an_exception_survive_whole() -> None:
    before = train.IncompleteCheckpointError(TEXT, results())
    for way, send in WAYS.items():
        other = send(before)
        assert vars(other.results) == vars(before.results), way
        (report,) = other.results[1]
        assert vars(report) == vars(before.results[1][0]), way


def test_an_exception_of_the_users_with_arguments_of_its_own_survives_too() -> None:
    # It is found by its name, as the user's module is there on both sides.
    error = pickle.loads(pickle.dumps(UsersError("lost", 2, place="node7")))
    assert (type(error), str(error), error.rank, error.place) == (UsersError, "lost", 2, "node7")


class UsersError(WorkerFailedError):
    def __init__(self, message: str, rank: int, *, place: str) -> None:
        super().__init__(message, rank)
        self.place = place
