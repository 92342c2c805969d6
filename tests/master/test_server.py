import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from paceline._cluster.master.api.web_ui_files import has_web_ui
from paceline._cluster.master.home_directory import Home, HomeInUseError, HomeUnusableError
from paceline._cluster.master.server import PortInUseError, serve
from paceline._cluster.master.store.database import DatabaseVersionError
from paceline._cluster.runner.node_facts import find_slots
from paceline.cli._master_process import sign_in_link
from paceline.client import Client
from paceline.client._http_session import read_master_file

SERVE = """
import sys
from pathlib import Path
from paceline._cluster.master.server import serve
serve(Path(sys.argv[1]), port=int(sys.argv[2]), num_slots=1)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a home that no master has used."""
    return tmp_path / "home"


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts a master's process on the home and waits for its address."""
    made: list[subprocess.Popen[str]] = []

    def run(port: int = 0) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(home), str(port)], stderr=subprocess.PIPE, text=True
        )
        made.append(process)
        deadline = time.monotonic() + 60
        while not (home / "master.json").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return process

    yield run
    for process in made:
        process.kill()
        process.communicate()


def address(home: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home / "master.json").read_text())
    return found


def client(home: Path) -> httpx2.Client:
    token = (home / "token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    return httpx2.Client(base_url=address(home)["url"] + "/api/v1", headers=headers, timeout=60)


def test_a_port_in_use_is_refused_with_a_hint(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"listens on 127.0.0.1:{port}. Hint: `--port 0`"):
            serve(home, port=port)
    assert not home.exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_a_host_that_is_not_loopback_is_refused(home: Path, host: str) -> None:
    with pytest.raises(ValueError, match=r"`host` must be a loopback address .* but got"):
        serve(home, host=host, port=0)
    assert not home.exists()


def test_a_master_for_all_interfaces_tells_an_address_that_others_reach(
    home: Path, master_server: Any
) -> None:
    master = master_server.start_master(
        home, "--port", 0, "--slots", 1, "--host", "0.0.0.0", "--unencrypted"
    )
    try:
        told = address(home)
        port = told["port"]
        assert told["url"] == f"http://127.0.0.1:{port}"
        public = told["public_url"]
        assert public.startswith("http://")
        assert not re.search(r"0\.0\.0\.0|127\.|localhost", public)
        token = (home / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        assert httpx2.get(
            f"{public}/api/v1/master", headers=headers, timeout=60, trust_env=False
        ).is_success
        deadline = time.monotonic() + 60
        while f"The master runs at {public} " not in (text := (home / "master.log").read_text()):
            assert time.monotonic() < deadline, text
            time.sleep(0.05)
        if has_web_ui():
            # A browser is answered beyond loopback by TLS only.
            with Client(told["url"], token) as known:
                link = sign_in_link(known, read_master_file(home))
            assert link.startswith(f"http://127.0.0.1:{port}/")
    finally:
        master.kill()


@pytest.mark.long
def test_a_second_master_on_a_home_is_refused_and_harms_the_first_nothing(
    home: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    first = start()
    before = address(home)
    with pytest.raises(HomeInUseError, match=r"has one already. Hint: `paceline status`"):
        serve(home, port=0)
    assert address(home) == before
    assert before["pid"] == first.pid
    with client(home) as http:
        assert http.get("/master").status_code == 200


def test_a_database_of_another_version_is_refused(home: Path) -> None:
    home.mkdir()
    (home / "master.sqlite").write_text("something else entirely" * 100)
    with pytest.raises(DatabaseVersionError, match="must be a Paceline database"):
        serve(home, port=0)
    assert not (home / "master.json").exists()


@pytest.mark.long
def test_the_home_is_private_and_token_and_identity_stay(
    home: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    seen = []
    for _ in range(2):
        process = start()
        with client(home) as http:
            seen.append(((home / "token").read_text(), http.get("/master").json()["cluster_id"]))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
        assert not (home / "master.json").exists()
    assert seen[0] == seen[1]
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    for path in (home / "token", home / "cluster_id", home / "master.sqlite"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@pytest.mark.long
def test_a_master_killed_and_started_again_takes_the_home_over(
    home: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    first = start()
    first.kill()
    first.wait()
    (home / "master.json").unlink()
    second = start()
    assert address(home)["pid"] == second.pid
    with client(home) as http:
        assert http.get("/slots").status_code == 200


@pytest.mark.long
@pytest.mark.parametrize("keep_trials", [True, False])
def test_a_shutdown_request_closes_streams_and_ends_the_process(
    home: Path, start: Callable[..., subprocess.Popen[str]], keep_trials: bool
) -> None:
    process = start()
    with client(home) as http, http.stream("GET", "/events") as reply:
        lines = reply.iter_lines()
        assert next(lines) == "event: connected"
        with client(home) as other:
            body = {"keep_trials": keep_trials}
            assert other.post("/master/shutdown", json=body).status_code == 202
        assert [line for line in lines if line] == []
    assert process.wait(60) == 0
    assert not (home / "master.json").exists()


HANGING = """
import sys, time
from pathlib import Path
from paceline._cluster.master import server as _server
from paceline._cluster.master.server import serve
from paceline._cluster.master.experiments.reconciler import Reconciler
from paceline._cluster.master.store.database import Database
_server._END_S = 1.0
_server.RUNNER_GRACE_S = 0.0
def hang(_):
    if (Path(sys.argv[1]) / "master.json").exists():
        print("hangs", flush=True)
        time.sleep(1e6)
if sys.argv[2] == "database-writer":
    Database._look_at_files = hang
else:
    Reconciler._watch_attempts = hang
serve(Path(sys.argv[1]), port=0, num_slots=1)
"""


@pytest.mark.long
@pytest.mark.parametrize(("thread", "code"), [("reconciler", 0), ("database-writer", 1)])
def test_a_signal_ends_a_master_whatever_hangs(home: Path, thread: str, code: int) -> None:
    """The first thread waits for a storage that is away, the second for the disk of the home."""
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, str(home), thread],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "hangs\n"
        # The first one gives attempts 30 s, the second one none.
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == code, told
    assert "The master did not end within 1 s of its own, and is ended now." in told
    assert f"{thread}: hang (" in told


WITH_HANGING_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(1e6,)).start()
from paceline.cli._app import main
main()
"""


@pytest.mark.long
def test_a_command_that_was_the_master_ends_without_threads_that_hang(home: Path) -> None:
    """A thread of a request may wait for a storage that is away; Python would wait for it."""
    command = ["up", "--port", "0", "--slots", "1", "--home", str(home)]
    process = subprocess.Popen(
        [sys.executable, "-c", WITH_HANGING_THREAD, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert "The master runs at" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        told, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, told


def test_homes_are_prepared_once(home: Path) -> None:
    assign_slots = Home(home)
    assign_slots.prepare()
    token, identity = assign_slots.token, assign_slots.cluster_id
    home.chmod(0o755)
    assign_slots.prepare()
    assert (assign_slots.token, assign_slots.cluster_id) == (token, identity)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert len(token) >= 32
    with assign_slots.hold(), pytest.raises(HomeInUseError), Home(home).hold():
        pytest.fail("held twice")
    with assign_slots.hold():
        (home / "master.lock").unlink()
        with pytest.raises(HomeInUseError), Home(home).hold():
            pytest.fail("held twice, as its lock was removed")
    with assign_slots.hold():
        assign_slots.write_address("http://127.0.0.1:1", 1, "0")
        assert address(home)["pid"] == os.getpid()
        assign_slots.remove_address()
        assign_slots.remove_address()


def test_a_home_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    for place in (tmp_path / "file", tmp_path / "file" / "home", Path("/proc/no_home")):
        with pytest.raises(HomeUnusableError, match=r"must be a directory that.*Hint: choose"):
            serve(place, port=0)


@pytest.mark.parametrize(
    ("visible", "num_slots", "expected"),
    [
        ("", 3, ["cpu"] * 3),
        ("-1", 1, ["cpu"]),
        ("0,2", None, ["0", "2"]),
        ("0, GPU-7", 1, ["0"]),
        ("5", 1, ["5"]),
    ],
)
def test_slots_are_gpus_or_else_cores(
    monkeypatch: pytest.MonkeyPatch, visible: str, num_slots: int | None, expected: list[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [slot.id for slot in find_slots(num_slots)] == expected


def test_without_a_number_there_is_a_slot_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert [slot.id for slot in find_slots(None)] == ["cpu"] * len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("visible", "num_slots", "message"),
    [("", 0, "at least 1, but got 0"), ("0,1", 3, "at most 2, the number of GPUs, but got 3")],
)
def test_a_number_of_slots_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, visible: str, num_slots: int, message: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(ValueError, match=message):
            find_slots(num_slots)
