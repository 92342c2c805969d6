"""Plugin of pytest with which MLflow's own tests meet Paceline instead of MLflow's server.

It runs in an environment of MLflow's; `PACELINE_PYTHON` names the interpreter that serves masters.
"""

import os
import posixpath
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
from mlflow.tracking._tracking_service import utils
from mlflow.utils import file_utils
from run_mlflow import listed

_local_path = file_utils.local_file_uri_to_path
_use_tracking_uri = utils._use_tracking_uri
_servers: list["subprocess.Popen[str]"] = []


_urls: dict[str, str] = {}


def master_of_test() -> str:
    """Return the URL of the test's master, empty at first, with its token as the password."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test not in _urls:
        _urls.clear()
        _urls[test] = _new_master()
    return _urls[test]


def _new_master() -> str:
    if not _servers:
        program = [os.environ["PACELINE_PYTHON"], str(Path(__file__).with_name("run_mlflow.py"))]
        _servers.append(
            subprocess.Popen(
                [*program, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
    server = _servers[0]
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("new\n")
    server.stdin.flush()
    return server.stdout.readline().strip()


class ServedByPaceline:
    """Stand-in for the thread that serves MLflow's own application."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.url = master_of_test()

    def __enter__(self) -> str:
        return self.url

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def init_server(*_: Any, **__: Any) -> Iterator[str]:
    """Stand in for the function that starts MLflow's server."""
    mlflow.set_tracking_uri(None)
    yield master_of_test()


@contextmanager
def use_tracking_uri(uri: str) -> Iterator[None]:
    """Use a master where a test would use a database of MLflow's."""
    with _use_tracking_uri(master_of_test() if str(uri).startswith("sqlite") else uri):
        yield


def local_path(uri: str) -> str:
    """Return where artifacts lie, fetched from the master where a test would look at a disk."""
    if str(uri).startswith("mlflow-artifacts:"):
        path = posixpath.normpath(str(uri).removeprefix("mlflow-artifacts:"))
        return str(mlflow.artifacts.download_artifacts(artifact_uri=f"mlflow-artifacts:{path}"))
    return str(_local_path(uri))


# Before the tests and their configuration import them from there.
utils._use_tracking_uri = use_tracking_uri
file_utils.local_file_uri_to_path = local_path


def pytest_sessionstart() -> None:
    """Replace what starts servers, before the tests import it."""
    sys.path.insert(0, os.getcwd())
    from tests.tracking import integration_test_utils

    integration_test_utils.ServerThread = ServedByPaceline
    integration_test_utils._init_server = init_server


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep the tests that are listed."""
    names = dict(listed())
    items[:] = [item for item in items if f"{item.path.name}::{item.name}" in names]


def pytest_sessionfinish() -> None:
    """End the masters."""
    for server in _servers:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()
