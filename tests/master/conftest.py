"""A master behind its real server, with its parts at hand."""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import httpx2
import pytest
from sqlalchemy import event

from paceline._cluster.master.api.request_limits import ConnectionLimits
from paceline._cluster.master.experiments.attempts import read_attempt
from paceline._cluster.master.home_directory import Home
from paceline._cluster.master.master import Master
from paceline._cluster.master.notify.notices import NOTIFY_FILE, read_notify_file
from paceline._cluster.master.oidc_provider import OIDC_FILE, read_oidc_file
from paceline._cluster.master.server import _listen_for_master, _Server
from paceline._cluster.master.store import log_files as _log_file
from paceline.storage._checkpoint_files import origin_of

_DETACH = 2


class ServedMaster:
    """A master on a free loopback port, served from a thread of this process.

    Its reconciler makes passes only when `schedule` is called, so no process is ever started.
    """

    def __init__(self, home: Path, num_slots: int, limits: ConnectionLimits | None = None) -> None:
        self.home = Home(home)
        self.home.prepare()
        notify = read_notify_file(home / NOTIFY_FILE)
        oidc = read_oidc_file(home / OIDC_FILE)
        self.core = Master(self.home, ["cpu"] * num_slots, notify=notify, oidc=oidc)
        self._listener = _listen_for_master("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/api/v1"
        self.headers = {"Authorization": f"Bearer {self.home.token}"}
        self.server = _Server(self.core, lambda: None, limits)
        self._thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self._listener]}, name="test-server"
        )
        self._thread.start()
        # Certificates play no part on the loopback interface, and take long to load.
        self.http = httpx2.Client(base_url=self.url, headers=self.headers, timeout=60, verify=False)
        while not self.server.started:
            assert self._thread.is_alive()
            time.sleep(0.005)

    def keep_one_thread(self) -> None:
        """Let one thread do what the routes leave to threads, so that no test starts another."""
        loop = self.core.controls._loop
        assert loop is not None
        executor = ThreadPoolExecutor(1)
        executor.submit(int).result()
        loop.call_soon_threadsafe(loop.set_default_executor, executor)

    @property
    def app(self) -> Any:
        """The application."""
        return self.server.config.app

    def create(self, **changed: Any) -> int:
        """Create an experiment through the API and return its id."""
        config = {
            "name": "served",
            "entrypoint": "python3 train.py",
            "hyperparameters": {"lr": {"type": "double", "minval": 0.0, "maxval": 1.0}},
            "searcher": {"name": "random", "metric": "loss", "max_trials": 2},
        }
        reply = self.http.post("/experiments", json={"config": config | changed})
        assert reply.status_code == 201, reply.text
        return int(reply.json()["id"])

    def schedule(self) -> None:
        """Let the reconciler give slots to waiting trials."""
        self.core.database.write(self.core.reconciler._pass).result()

    def origin(self, attempt_id: int) -> str:
        """Return what the manifests of an attempt's checkpoints have."""
        with self.core.database.read() as connection:
            attempt = read_attempt(connection, attempt_id)
        return origin_of(self.home.cluster_id, attempt.trial_id, attempt.number)

    def attempt(self, attempt_id: int, path: str, **body: Any) -> httpx2.Response:
        """Send a runner's message."""
        return self.http.post(f"/attempts/{attempt_id}/{path}", json=body)

    def report(
        self, attempt_id: int, first: int, *reports: tuple[str, int, dict[str, Any]]
    ) -> None:
        """Send metric reports (group, step, metrics) from a sequence number on."""
        records = [
            [
                number,
                {"type": "metrics", "time": float(number), "group": group,
                 "steps_completed": step, "metrics": metrics},
            ]
            for number, (group, step, metrics) in enumerate(reports, first)
        ]  # fmt: skip
        batch = {"generation": 0, "rank": 0, "records": records}
        reply = self.attempt(attempt_id, "records", batches=[batch])
        assert reply.status_code == 200, reply.text

    def close(self) -> None:
        """Stop serving and close the database."""
        self.http.close()
        self.server._stop()
        self._thread.join()
        self._listener.close()
        self.core.sampler_answers.close()
        self.core.notifier.close()
        self.core.database.close()


@pytest.fixture(scope="session")
def serve_master() -> Callable[..., ServedMaster]:
    """Return a function that serves a master, for fixtures that live longer than one test."""

    def serve(home: Path, num_slots: int = 2) -> ServedMaster:
        served = ServedMaster(home, num_slots)
        served.keep_one_thread()
        return served

    return serve


@pytest.fixture
def make_master(tmp_path: Path) -> Iterator[Callable[..., ServedMaster]]:
    """Return a function that serves a master; all are closed at the end."""
    made: list[ServedMaster] = []

    def make(num_slots: int = 2, name: str = "home", **options: Any) -> ServedMaster:
        made.append(ServedMaster(tmp_path / name, num_slots, **options))
        return made[-1]

    yield make
    for master in made:
        master.close()


@pytest.fixture
def master(make_master: Callable[..., ServedMaster]) -> ServedMaster:
    """Return a served master with two slots."""
    return make_master()


@pytest.fixture
def hanging_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a mounted directory that never answers, like a file server that is away."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("NOT TESTED: a disk that hangs needs root and /dev/fuse")
    disk = tmp_path / "hanging_disk"
    disk.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"hangs", bytes(disk), b"fuse", 0, options) != 0:
        os.close(server)
        pytest.skip("NOT TESTED: a disk that hangs needs the right to mount a FUSE file system")
    try:
        yield disk
    finally:
        # Whoever waits gets an error.
        os.close(server)
        libc.umount2(bytes(disk), _DETACH)


class Reads:
    """What was read from a database: statements, rows, and the bytes of their binary columns."""

    def __init__(self) -> None:
        self.num_statements = 0
        self.num_rows = 0
        self.num_bytes = 0

    def row(self, _cursor: Any, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """Count a row that SQLite hands over."""
        self.num_rows += 1
        self.num_bytes += sum(len(value) for value in row if isinstance(value, bytes))
        return row


@pytest.fixture
def count_reads() -> Callable[[Any], AbstractContextManager[Reads]]:
    """Return a context manager that counts what an engine's connections read."""

    @contextmanager
    def counting(engine: Any) -> Iterator[Reads]:
        reads = Reads()

        def checked_out(connection: Any, *_: Any) -> None:
            connection.row_factory = reads.row

        def checked_in(connection: Any, *_: Any) -> None:
            if connection is not None:
                connection.row_factory = None

        def executed(*_: Any) -> None:
            reads.num_statements += 1

        listeners = [("checkout", checked_out), ("checkin", checked_in),
                     ("before_cursor_execute", executed)]  # fmt: skip
        for name, listener in listeners:
            event.listen(engine, name, listener)
        try:
            yield reads
        finally:
            for name, listener in listeners:
                event.remove(engine, name, listener)

    return counting


@pytest.fixture
def make_slow_log(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Path], Callable[[], None]]]:
    """Return a function that creates a log file whose readers wait; it returns what lets them."""
    is_released = threading.Event()
    open_to_read = _log_file._open_to_read

    def make(path: Path) -> Callable[[], None]:
        def wait_and_open(opened: Path) -> BinaryIO:
            if opened == path:
                is_released.wait()
            return open_to_read(opened)

        path.parent.mkdir(parents=True)
        path.touch()
        monkeypatch.setattr(_log_file, "_open_to_read", wait_and_open)
        return is_released.set

    yield make
    is_released.set()


@pytest.fixture
def add(master: Any, add_to: Callable[..., httpx2.Client]) -> Callable[..., httpx2.Client]:
    """Return a function that adds a user and returns a client with the user's token."""
    return partial(add_to, master)


@pytest.fixture
def add_to() -> Iterator[Callable[..., httpx2.Client]]:
    """Return `add` for a master that it is given."""
    clients = []

    def make(master: Any, name: str, scope: str = "admin", **fields: Any) -> httpx2.Client:
        reply = master.http.post("/users", json={"name": name, **fields})
        assert reply.status_code == 201, reply.text
        body = {"name": f"of-{name}", "scope": scope, "user": name}
        secret = master.http.post("/tokens", json=body).json()["secret"]
        headers = {"Authorization": f"Bearer {secret}"}
        clients.append(
            httpx2.Client(base_url=master.url, headers=headers, timeout=60, verify=False)
        )
        return clients[-1]

    yield make
    for client in clients:
        client.close()
