"""Real masters for whole-process tests: started, killed and started again."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from fault_lab.machines import Network
from fault_lab.masters import MasterProcess
from fault_lab.nodes import NodeProcess
from fault_lab.object_requests import FaultyServer


@pytest.fixture(scope="session")
def master_class(master_server: Any) -> Callable[..., MasterProcess]:
    """Return a function that makes a master, for fixtures that outlive a test."""
    return partial(MasterProcess, server=master_server)


@pytest.fixture
def make_master(tmp_path: Path, master_class: Any) -> Iterator[Callable[..., MasterProcess]]:
    """Return a function that makes a master; all are stopped at the end."""
    made: list[MasterProcess] = []

    def make(num_slots: int = 1, name: str = "home", *options: str, **given: Any) -> MasterProcess:
        made.append(master_class(tmp_path / name, num_slots, *options, **given))
        return made[-1]

    yield make
    for master in made:
        master.close()


@pytest.fixture
def master(make_master: Callable[..., MasterProcess]) -> MasterProcess:
    """Return a running master with two slots."""
    return make_master(2).start()


@pytest.fixture
def faulty(s3: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """Return a server on the way to S3's; the URL of the `s3` fixture goes through it."""
    server = FaultyServer(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    yield server
    server.close()


@pytest.fixture
def write_context(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a context directory of one script, `train.py`."""

    def write(script: str, name: str = "context") -> Path:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "train.py").write_text(script)
        return directory

    return write


@pytest.fixture
def make_node(master: Any, tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Return a function that makes a node of the master; all are ended."""
    made: list[NodeProcess] = []
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(master.client().create_token("nodes", scope="runner").secret)

    def make(name: str, *options: str, hidden: Sequence[Path] = ()) -> NodeProcess:
        made.append(NodeProcess(master, token, tmp_path / name, *options, hidden=hidden))
        return made[-1]

    yield make
    for node in made:
        node.close()


@pytest.fixture
def network() -> Iterator[Network]:
    """Return a network to which machines can be added; see `has_namespaces`."""
    made = Network()
    yield made
    made.close()
