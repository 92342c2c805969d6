"""Masters in processes of their own, and attempts in the state that a test needs."""

import hashlib
import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.run_directory import JournalKey, RunInfo
from paceline._cluster.messages.runner_messages import AttemptSpec
from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline.journal import MetricsReported, RunDirectory

SERVE = """
import json, sys
from pathlib import Path
from paceline._cluster.master.server import serve
serve(Path(sys.argv[1]), port=0, num_slots=int(sys.argv[2]), **json.loads(sys.argv[3]))
"""


class MasterProcess:
    """A master in a process of its own, on a free port of the loopback interface."""

    def __init__(self, server: Any, home: Path, num_slots: int, **options: Any) -> None:
        self._server = server
        self.home = home
        self.num_slots = num_slots
        self.options = options
        self._process: Any = None
        self._http: httpx2.Client | None = None

    def start(self, **environment: str) -> "MasterProcess":
        """Start and wait until it answers."""
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "master.json").unlink(missing_ok=True)
        script = self.home.with_name("serve.py")
        script.write_text(SERVE)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        with (self.home / "master.log").open("ab") as log:
            arguments = str(self.home), str(self.num_slots), json.dumps(self.options)
            self._process = self._server.start_daemon(
                str(script), *arguments, output=log, environment=clean | environment
            )
        deadline = time.monotonic() + 60
        while not (self.home / "master.json").exists():
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.01)
        return self

    @property
    def pid(self) -> int:
        """The id of its process."""
        assert self._process is not None
        pid: int = self._process.pid
        return pid

    def kill(self) -> None:
        """Kill it with SIGKILL, unless it has ended."""
        if self._http is not None:
            self._http.close()
            self._http = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def send(self, signum: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(signum)

    def wait(self) -> int:
        """Wait for its end and return its exit code."""
        assert self._process is not None
        code: int = self._process.wait(120)
        return code

    def log(self) -> str:
        """Return what it printed."""
        return (self.home / "master.log").read_text()

    @property
    def http(self) -> httpx2.Client:
        """A client of the API of the master that runs now."""
        if self._http is None:
            url = json.loads((self.home / "master.json").read_text())["url"]
            token = (self.home / "token").read_text().strip()
            headers = {"Authorization": f"Bearer {token}"}
            self._http = httpx2.Client(
                base_url=f"{url}/api/v1", headers=headers, timeout=60, verify=False
            )
        return self._http

    def read(self, path: str, **query: Any) -> Any:
        """Return a resource."""
        reply = self.http.get(path, params=query)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def post(self, path: str, **body: Any) -> Any:
        """Send a request and return its answer."""
        reply = self.http.post(path, json=body)
        assert reply.status_code < 300, reply.text
        return reply.json() if reply.content else None

    def create(self, script: str | bytes, **changed: Any) -> int:
        """Create an experiment that runs a script (or a damaged archive); returns its id."""
        if isinstance(script, str):
            script = packed(script)
        digest = hashlib.sha256(script).hexdigest()
        assert self.http.put(f"/contexts/{digest}", content=script).status_code == 204
        config = {
            "entrypoint": "python3 train.py",
            "searcher": {"name": "single", "metric": "loss"},
            "max_restarts": 0,
        }
        body = {"config": config | changed, "context_digest": digest}
        return int(self.post("/experiments", **body)["id"])

    def trial(self, experiment_id: int) -> Any:
        """Return an experiment's first trial with its attempts."""
        listed = self.read(f"/experiments/{experiment_id}/trials")["items"]
        return self.read(f"/trials/{listed[0]['id']}")

    def wait_for_end(self, experiment_id: int) -> Any:
        """Wait until an experiment has ended and return its first trial."""
        deadline = time.monotonic() + 120
        while not self.read(f"/experiments/{experiment_id}")["ended_at"]:
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)
        return self.trial(experiment_id)

    def output(self, trial: Any) -> list[str]:
        """Return a trial's output, without what the master wrote."""
        lines = self.read(f"/trials/{trial['id']}/logs")["items"]
        return [line["text"] for line in lines if line["stream"] != "master"]

    def runner(self, attempt_id: int) -> psutil.Process:
        """Return the runner of an attempt."""
        directory = AttemptDirectory(self.home / "attempts" / str(attempt_id))
        deadline = time.monotonic() + 60
        # It may not have its lock yet, or not have written its id.
        while not (pid := directory.runner_pid()):
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)
        return psutil.Process(pid)

    def processes(self) -> list[psutil.Process]:
        """Return every process that works for this home."""
        found = []
        for process in psutil.process_iter():
            try:
                words = [*process.cmdline(), process.environ().get("PACELINE_RUN_DIR", "")]
                # A forked runner is known by its directory alone.
                words.append(process.cwd())
            except psutil.Error:
                continue
            if any(word.startswith(str(self.home)) for word in words):
                found.append(process)
        return found

    def close(self) -> None:
        """Kill everything that belongs to the home."""
        self.kill()
        # What is killed may have started more meanwhile.
        while left := self.processes():
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.02)


def packed(script: str) -> bytes:
    """Return a context of one script, `train.py`."""
    data, buffer = script.encode(), io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        member = tarfile.TarInfo("train.py")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture(scope="session")
def master_class(master_server: Any) -> Callable[..., MasterProcess]:
    """Return a function that makes a master, for fixtures that outlive a test."""
    return partial(MasterProcess, master_server)


@pytest.fixture(scope="module")
def shared_master(
    tmp_path_factory: pytest.TempPathFactory, master_class: Any
) -> Iterator[MasterProcess]:
    """Return a master with eight slots that a module's tests share and none stops."""
    made = master_class(tmp_path_factory.mktemp("shared") / "home", 8)
    yield made.start(PACELINE_TOKEN="secret", PACELINE_MASTER="http://secret")
    made.close()


@pytest.fixture
def master(tmp_path: Path, master_class: Any) -> Iterator[MasterProcess]:
    """Return a master with two slots, not yet started."""
    made = master_class(tmp_path / "home", 2)
    yield made
    made.close()


@pytest.fixture
def make_attempt(tmp_path: Path) -> Callable[..., AttemptDirectory]:
    """Return a function that prepares an attempt's directory as the master does."""

    def make(home: Path | None = None, attempt_id: int = 1, **changed: Any) -> AttemptDirectory:
        fields: dict[str, Any] = {
            "attempt_id": attempt_id, "trial_id": 1, "number": 1, "entrypoint": ["true"],
            "python": sys.executable, "variables": {}, "working_dir": None,
            "context_digest": None, "slot_ids": [0], "num_threads": 1, "gpu_ids": [],
            "home": str(home or tmp_path / "nowhere"), "keep_directory": True,
        }  # fmt: skip
        path = tmp_path / "attempts" / str(attempt_id)
        directory = AttemptDirectory.create(path, AttemptSpec(**fields | changed))
        info = RunInfo(run_id="trial-1", name="x", created=0.0, checkpoint_storage="/nowhere")
        RunDirectory.create(directory.run.path, info)
        return directory

    return make


@pytest.fixture
def write_journal() -> Callable[..., JournalWriter]:
    """Return a function that opens the journal of a rank."""

    def write(directory: AttemptDirectory, rank: int = 0) -> JournalWriter:
        key = JournalKey(attempt=1, generation=0, rank=rank)
        return JournalWriter(directory.run.journal_path(key), segment_bytes=2000)

    return write


@pytest.fixture
def report() -> Callable[[int], MetricsReported]:
    """Return a function that makes the report of a step."""

    def make(step: int) -> MetricsReported:
        return MetricsReported(
            time=float(step), group="training", steps_completed=step, metrics={"x": step * 0.5}
        )

    return make
