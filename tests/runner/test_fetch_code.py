"""Code that a runner fetches from the master, over connections that break."""

import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from paceline._base.journal_records import seal
from paceline._cluster.messages.runner_messages import MAX_PIECE_BYTES, MasterAddress
from paceline._cluster.messages.states import ExitReason
from paceline._cluster.runner.attempt_run import AttemptRun
from paceline._cluster.runner.checkpoint_and_code_fetching import DamagedCodeError, fetch_code
from paceline._cluster.runner.master_link import MasterLink, RefusedByMasterError, encode


class CuttingProxy:
    """Passes bytes between its clients and a server, and cuts each connection after some."""

    def __init__(self, host: str, port: int, num_bytes: int) -> None:
        self.num_connections = 0
        self._target = (host, port)
        self._num_bytes = num_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.num_connections += 1
                threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server:
            back = threading.Thread(target=_pass, args=[client, server, None], daemon=True)
            back.start()
            _pass(server, client, self._num_bytes)

    def close(self) -> None:
        """Take no more connections."""
        # It wakes the thread that waits for one.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _pass(source: socket.socket, target: socket.socket, num_bytes: int | None) -> None:
    left = float("inf") if num_bytes is None else num_bytes
    with suppress(OSError):
        while left > 0 and (data := source.recv(int(min(left, 1 << 16)))):
            target.sendall(data)
            left -= len(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def stored(shared_master: Any) -> Callable[[int], tuple[str, bytes]]:
    """Return a function that stores code of some size at the master; returns its digest."""

    def store(size: int) -> tuple[str, bytes]:
        data = os.urandom(size)
        digest = hashlib.sha256(data).hexdigest()
        # As stored before: the master takes archives alone.
        (shared_master.home / "contexts" / f"{digest}.tar.gz").write_bytes(data)
        return digest, data

    return store


@pytest.fixture
def make_link(shared_master: Any) -> Iterator[Callable[[int], tuple[MasterLink, CuttingProxy]]]:
    """Return a function that links to the master by connections that carry so many bytes."""
    made: list[tuple[MasterLink, CuttingProxy]] = []

    def make(num_bytes: int) -> tuple[MasterLink, CuttingProxy]:
        place = urlsplit(str(shared_master.http.base_url))
        proxy = CuttingProxy(place.hostname or "", place.port or 0, num_bytes)
        token = (shared_master.home / "token").read_text().strip()
        made.append((MasterLink(lambda: MasterAddress(url=proxy.url, token=token)), proxy))
        return made[-1]

    yield make
    for link, proxy in made:
        link.close()
        proxy.close()


PIECES = [0, 1, MAX_PIECE_BYTES - 1, MAX_PIECE_BYTES, MAX_PIECE_BYTES + 1, 3 * MAX_PIECE_BYTES]


@pytest.mark.parametrize("size", PIECES)
def test_code_of_every_size_arrives(size: int, stored: Any, make_link: Any, tmp_path: Path) -> None:
    digest, data = stored(size)
    link, _ = make_link(1 << 40)
    assert fetch_code(link, digest, tmp_path / "code", lambda: True, print)
    assert (tmp_path / "code").read_bytes() == data


@pytest.mark.long
def test_what_arrived_before_a_connection_broke_stays(
    stored: Any, make_link: Any, tmp_path: Path
) -> None:
    digest, data = stored(5 * MAX_PIECE_BYTES)
    # No connection lives long enough for all of it, nor for two pieces.
    link, proxy = make_link(2 * MAX_PIECE_BYTES)
    told: list[str] = []
    assert fetch_code(link, digest, tmp_path / "code", lambda: True, told.append)
    assert (tmp_path / "code").read_bytes() == data
    assert proxy.num_connections >= 3
    assert told
    assert all(text.startswith("The code cannot be fetched now: ") for text in told)


def test_code_that_nobody_wants_any_more_is_fetched_no_longer(
    stored: Any, make_link: Any, tmp_path: Path
) -> None:
    digest, _ = stored(MAX_PIECE_BYTES)
    link, proxy = make_link(1000)
    assert not fetch_code(link, digest, tmp_path / "code", lambda: proxy.num_connections < 3, print)


def test_damaged_code_is_fetched_again_and_then_refused(
    stored: Any, make_link: Any, tmp_path: Path, shared_master: Any
) -> None:
    digest, _ = stored(1000)
    (shared_master.home / "contexts" / f"{digest}.tar.gz").write_bytes(b"other")
    link, _ = make_link(1 << 40)
    with pytest.raises(DamagedCodeError, match=f"must arrive with the SHA-256 {digest}, but has"):
        fetch_code(link, digest, tmp_path / "code", lambda: True, print)
    with pytest.raises(RefusedByMasterError, match="There is no context"):
        fetch_code(link, "0" * 64, tmp_path / "code", lambda: True, print)


@pytest.mark.parametrize("size", PIECES)
def test_a_server_that_knows_no_ranges_sends_all_of_it(
    size: int, stored: Any, make_link: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, data = stored(size)
    link, _ = make_link(1 << 40)
    request = link._request
    monkeypatch.setattr(link, "_request", lambda *given: request(*given[:4], {}))
    assert fetch_code(link, digest, tmp_path / "code", lambda: True, print)
    assert (tmp_path / "code").read_bytes() == data


def test_an_attempt_that_is_ended_while_its_code_is_fetched_goes_no_further(
    make_attempt: Callable[..., Any], tmp_path: Path
) -> None:
    """The next step would miss the file `uv.lock` and blame the user."""
    (tmp_path / "master.json").write_bytes(
        seal(encode(MasterAddress(url="http://127.0.0.1:1", token="none", certificate=None)))
    )
    master = str(tmp_path / "master.json")
    changed = {"home": None, "master": master, "context_digest": "0" * 64, "uses_uv": True}
    directory = make_attempt(**changed)
    spec = msgspec.structs.replace(directory.read_spec(), **changed)
    run = AttemptRun(directory, spec)
    run._follower._kill(ExitReason.PREEMPTION_TIMEOUT, 0.0)
    assert run._start() is None
    assert run._spool is not None
    run._spool.close()
