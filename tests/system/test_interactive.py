"""Notebooks, shells and TensorBoards on slots: real ones, by a real master, through the tunnel."""

import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from fcntl import ioctl
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import psutil
import pytest
from fault_lab.masters import MasterProcess
from optional_modules import Needed

from paceline.cli._commands.interactive_commands import _Wish
from paceline.client import ApiError, Client
from paceline.launch.interactive import DATA, EXIT, HEAD, read_frames

websocket: Any = Needed("websocket")
Needed("jupyterlab")


@pytest.fixture
def num_slots() -> int:
    """Return how many slots the master's own machine has."""
    return 2


@pytest.fixture
def master(
    make_master: Callable[..., MasterProcess],
    free_port: int,
    num_slots: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> MasterProcess:
    """Return a running master, which comes back at the same address."""
    # Shells read what the person at this machine has written for them, which may take long.
    home = tmp_path / "person"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    options = ("--port", str(free_port), "--runner-timeout", "10")
    return make_master(num_slots, "home", *options).start()


@pytest.fixture
def start(master: MasterProcess, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that starts an interactive task as the command line does."""

    def start_task(kind: str, idle: str | float = "1h", **changed: Any) -> Any:
        directory = tmp_path / "work"
        directory.mkdir(exist_ok=True)
        wish = _Wish(kind, 1, None, None, idle, None, None, directory)  # type: ignore[arg-type]
        return master.client().create_experiment(wish.config() | changed)

    return start_task


@contextmanager
def opened(client: Client, experiment_id: int) -> Iterator[str]:
    """Yield the URL at which a task is open through a tunnel."""
    with client.open_tunnel(experiment_id) as tunnel:
        is_over = threading.Event()
        server = threading.Thread(target=tunnel.serve, args=(lambda: not is_over.is_set(),))
        server.start()
        try:
            yield tunnel.url
        finally:
            is_over.set()
            server.join()


def ready(client: Client, experiment: Any) -> str:
    """Return the path of a task's link, once it listens."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        with suppress(ApiError):
            if (path := client.interactive_link(experiment.id).path) is not None:
                return path
        experiment.reload()
        assert not experiment.data.state.is_terminal, trial_of(experiment).data
        time.sleep(0.1)
    raise AssertionError("the task does not listen")


def trial_of(experiment: Any) -> Any:
    return experiment.trials()[0].reload()


def call(url: str, token: str, method: str = "GET", body: Any = None) -> Any:
    """Send a request to Jupyter and return its answer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"token {token}"}
    request = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read()
    return json.loads(text) if text else None


def execute(url: str, token: str, kernel: str, code: str, *, waits: bool = True) -> str:
    """Execute code in a kernel over a WebSocket, and return its result."""
    message = uuid.uuid4().hex
    header = {"msg_id": message, "username": "u", "session": "s", "version": "5.3",
              "msg_type": "execute_request"}  # fmt: skip
    place = f"{url.replace('http', 'ws', 1)}/api/kernels/{kernel}/channels?token={token}"
    with closing(websocket.create_connection(place, timeout=120)) as channels:
        sent = {"header": header, "parent_header": {}, "metadata": {}, "buffers": [],
                "content": {"code": code, "silent": False}, "channel": "shell"}  # fmt: skip
        channels.send(json.dumps(sent))
        found = ""
        while waits:
            answer = json.loads(channels.recv())
            if answer["parent_header"].get("msg_id") != message:
                continue
            if answer["msg_type"] == "execute_result":
                found = answer["content"]["data"]["text/plain"]
            # The reply may come before the result, this does not.
            if answer["content"].get("execution_state") == "idle":
                break
    return found


_RESTS: WeakKeyDictionary[socket.socket, bytearray] = WeakKeyDictionary()


def frames(stream: socket.socket, until: Callable[[bytes, list[int]], bool]) -> tuple[bytes, Any]:
    """Return the output of a shell and its exit codes, read until they fulfil a condition."""
    # Parts of frames that have not arrived wait for the next call.
    received = _RESTS.setdefault(stream, bytearray())
    output, codes = bytearray(), []
    stream.settimeout(60)
    while not until(bytes(output[-4096:]), codes):
        data = stream.recv(65536)
        if not data:
            break
        received += data
        for kind, content in read_frames(received) or ():
            if kind == DATA:
                output += content
            elif kind == EXIT:
                codes += struct.unpack(">i", content)
    return bytes(output), codes


def typed(text: str) -> bytes:
    return HEAD.pack(DATA, len(text)) + text.encode()


@pytest.mark.long
def test_notebook_runs_a_cell_and_its_end_frees_the_slot(
    master: MasterProcess, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "paceline.cli", "notebook", str(tmp_path), "--name", "mine"]
    environment = {**os.environ, "PACELINE_HOME": str(master.home)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = next(one for one in process.stdout if one.startswith("Open "))
        url, _, token = line.split()[1].partition("/lab?token=")
        (experiment,) = master.client().list_experiments(where=[("kind", "=", "notebook")])
        assert (experiment.data.kind, experiment.data.name) == ("notebook", "mine")
        assert sum(slot.is_used for slot in master.client().slots()) == 1
        with pytest.raises(urllib.error.HTTPError, match="403"):
            call(f"{url}/api/kernels", "wrong")
        kernel = call(f"{url}/api/kernels", token, "POST", {"name": "python3"})["id"]
        assert execute(url, token, kernel, "1+1") == "2"
        # A kernel is no part of a trial: what it runs would be taken for the notebook's records.
        code = "import os; [k for k in os.environ if k in ('PACELINE_RUN_DIR', 'PACELINE_TOKEN')]"
        assert execute(url, token, kernel, code) == "[]"
        # Larger than all buffers on the way.
        assert execute(url, token, kernel, "'y' * 3_000_000").count("y") == 3_000_000
        texts = [line.text for line in trial_of(experiment).iter_logs()]
        assert any("is running at" in text for text in texts)
        assert not any(token in text for text in texts)
        with suppress(urllib.error.URLError, ConnectionError):
            call(f"{url}/api/shutdown", token, "POST")
        rest = process.stdout.read()
        assert process.wait(120) == 0, rest
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert experiment.reload().data.state.value == "COMPLETED"
    assert [one.number for one in trial_of(experiment).data.attempts] == [1]
    assert not any(slot.is_used for slot in master.client().slots())


@pytest.mark.long
def test_shell_in_a_terminal(master: MasterProcess, tmp_path: Path) -> None:
    """Keys, the window's size, Ctrl-C and the exit code pass; output is the shell's."""
    command = [sys.executable, "-m", "paceline.cli", "shell", str(tmp_path)]
    environment = {**os.environ, "PACELINE_HOME": str(master.home), "SHELL": "/bin/bash"}
    terminal, other = pty.openpty()
    ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    process = subprocess.Popen(
        command, env=environment, stdin=other, stdout=other, stderr=other, start_new_session=True
    )
    os.close(other)
    output = b""

    def read_until(text: bytes) -> None:
        nonlocal output
        deadline = time.monotonic() + 90
        while text not in output:
            assert time.monotonic() < deadline, output
            assert process.poll() is None, output
            if select.select([terminal], [], [], 1)[0]:
                output += os.read(terminal, 65536)
        output = output.partition(text)[2]

    try:
        read_until(b"Ctrl-] leaves")
        os.write(terminal, b"echo a$((6*7))b; stty size\n")
        read_until(b"a42b")
        read_until(b"33 77")
        ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 44, 99, 0, 0))
        process.send_signal(signal.SIGWINCH)
        os.write(terminal, b"sleep 0.5; stty size; sleep 600\n")
        read_until(b"44 99")
        time.sleep(0.5)
        os.write(terminal, b"\x03")
        os.write(terminal, b"echo interrupted=$?\n")
        read_until(b"interrupted=130")
        os.write(terminal, b"exit 7\n")
        read_until(b"ended with 7")
        assert process.wait(60) == 7
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    (experiment,) = master.client().list_experiments()
    experiment.wait(60)
    # The code is of interest to whoever typed; the task itself has done what it should.
    assert experiment.data.state.value == "COMPLETED"


@pytest.mark.long
def test_shell_is_found_again_after_the_master_was_killed(
    master: MasterProcess, start: Callable[..., Any]
) -> None:
    experiment = start("shell")
    client = master.client()
    ready(client, experiment)
    with client.connect_to_task(experiment.id) as stream:
        stream.sendall(typed("kept=here\necho it-is-$kept\n"))
        assert b"it-is-here" in frames(stream, lambda out, _: b"it-is-here" in out)[0]
        master.kill()
        master.start()
        # The stream ends, the shell does not.
        assert frames(stream, lambda *_: False) == (b"", [])
    client = master.client()
    experiment = client.get_experiment(experiment.id)
    ready(client, experiment)
    with client.connect_to_task(experiment.id) as stream:
        # What was printed before is shown again.
        assert b"it-is-here" in frames(stream, lambda out, _: b"it-is-here" in out)[0]
        stream.sendall(typed("echo again-$kept; exit 3\n"))
        output, codes = frames(stream, lambda _, codes: bool(codes))
        assert b"again-here" in output
        assert codes == [3]
    experiment.wait(60)
    assert len(trial_of(experiment).data.attempts) == 1


@pytest.mark.long
def test_terminal_that_does_not_read_holds_up_nothing_else(
    master: MasterProcess, start: Callable[..., Any]
) -> None:
    """Its shell waits; the runner's own requests and other streams go on, within bounds."""
    experiment = start("shell")
    client = master.client()
    ready(client, experiment)
    with client.connect_to_task(experiment.id) as stream:
        processes = [
            psutil.Process(master.processes()[0].pid),
            *(one for one in master.processes() if "paceline.launch.interactive" in one.cmdline()),
        ]
        assert len(processes) == 2
        before = [one.memory_info().rss for one in processes]
        stream.sendall(typed("yes | head -c 30000000; echo all-of-it\n"))
        time.sleep(4)
        grown = [one.memory_info().rss - size for one, size in zip(processes, before, strict=True)]
        assert max(grown) < 10_000_000
        assert trial_of(experiment).data.is_running
        assert b"all-of-it\r" in frames(stream, lambda out, _: b"all-of-it\r" in out)[0]
        stream.sendall(typed("exit\n"))
        assert frames(stream, lambda _, codes: bool(codes))[1] == [0]
    experiment.wait(60)


@pytest.mark.long
def test_tensorboard_shows_what_a_trial_wrote(
    master: MasterProcess, start: Callable[..., Any]
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    client = master.client()
    place = master.home / "checkpoints" / "tensorboard" / client.master().cluster_id / "trial_1"
    writer = SummaryWriter(str(place))
    writer.add_scalar("loss", 0.5, 1)
    writer.close()
    program = ["python3", "-m", "paceline.launch.interactive", "tensorboard", f"trial_1={place}"]
    experiment = start("tensorboard", entrypoint=program)
    assert ready(client, experiment) == "/"
    with opened(client, experiment.id) as url:
        deadline = time.monotonic() + 120
        while not (found := call(f"{url}/data/plugin/scalars/tags", "")):
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert {run: list(tags) for run, tags in found.items()} == {"trial_1": ["loss"]}
    experiment.kill()
    experiment.wait(60)


@pytest.mark.long
def test_idle_task_ends_and_one_at_work_does_not(
    master: MasterProcess, start: Callable[..., Any]
) -> None:
    shell, notebook = start("shell", 4.0), start("notebook", 4.0)
    client = master.client()
    path = ready(client, notebook)
    token = path.partition("token=")[2]
    with opened(client, notebook.id) as url:
        kernel = call(f"{url}/api/kernels", token, "POST", {"name": "python3"})["id"]
        execute(url, token, kernel, "import time; time.sleep(9); open('done', 'w')", waits=False)
        began = time.monotonic()
        # An open page asks for news all the time: that is no use.
        while not notebook.reload().data.state.is_terminal:
            with suppress(OSError):
                call(f"{url}/api/kernels", token)
            time.sleep(0.3)
            assert time.monotonic() < began + 120
    assert time.monotonic() - began > 9
    assert notebook.data.state.value == "COMPLETED"
    assert trial_of(notebook).data.stop_reason == "idle for 4s"
    shell.wait(60)
    assert trial_of(shell).data.stop_reason == "idle for 4s"
    assert not any(slot.is_used for slot in client.slots())


@pytest.mark.long
def test_shell_with_a_program_in_front_is_not_idle(
    master: MasterProcess, start: Callable[..., Any]
) -> None:
    experiment = start("shell", 3.0)
    client = master.client()
    ready(client, experiment)
    with client.connect_to_task(experiment.id) as stream:
        stream.sendall(typed("sleep 8\n"))
        frames(stream, lambda out, _: b"sleep" in out)
    began = time.monotonic()
    experiment.wait(120)
    assert time.monotonic() - began > 8
    assert trial_of(experiment).data.stop_reason == "idle for 3s"


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "error"), [("task", "killed by signal 9"), ("runner", "The task was lost")]
)
def test_killed_task_ends_and_is_not_started_again(
    master: MasterProcess, start: Callable[..., Any], victim: str, error: str
) -> None:
    experiment = start("shell")
    client = master.client()
    ready(client, experiment)
    with client.connect_to_task(experiment.id) as stream:
        stream.sendall(typed("echo pid=$PPID=\n"))
        found = re.compile(rb"pid=(\d+)=")
        output, _ = frames(stream, lambda out, _: bool(found.search(out)))
        pid = int(found.findall(output)[0])
        process = psutil.Process(pid)
        (process if victim == "task" else process.parent()).kill()
        assert frames(stream, lambda *_: False)[1] == []
    experiment.wait(120)
    assert experiment.data.state.value == "ERROR"
    trial = trial_of(experiment)
    assert error in trial.data.error
    assert len(trial.data.attempts) == 1
    assert not any(slot.is_used for slot in client.slots())
    with pytest.raises(ApiError, match="must run to be opened") as refused:
        client.interactive_link(experiment.id)
    assert refused.value.code == "not_running"


@pytest.mark.long
def test_paused_task_gives_its_slots_back_and_starts_anew(
    master: MasterProcess, start: Callable[..., Any]
) -> None:
    experiment = start("shell")
    client = master.client()
    ready(client, experiment)
    experiment.pause()
    deadline = time.monotonic() + 60
    while any(slot.is_used for slot in client.slots()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    experiment.activate()
    ready(client, experiment)
    experiment.kill()
    experiment.wait(60)
    assert experiment.data.state.value == "CANCELED"


@pytest.mark.long
def test_only_its_owner_opens_a_task(master: MasterProcess, start: Callable[..., Any]) -> None:
    admin = master.client()
    experiment = start("shell")
    ready(admin, experiment)
    admin.add_user("bob", role="editor")
    url = admin.url
    tokens = {
        "other_owner": admin.create_token("b", scope="submit", user="bob").secret,
        "scope_too_low": admin.create_token("r", scope="read").secret,
    }
    name = f"experiments/{experiment.id}/streams/{'ab' * 16}"
    with admin.connect_to_task(experiment.id) as stream:
        stream.sendall(typed("echo secret\n"))
        frames(stream, lambda out, _: b"secret" in out)
        for code, token in tokens.items():
            with Client(url, token) as other:
                with pytest.raises(ApiError) as refused:
                    other.interactive_link(experiment.id)
                assert (refused.value.status, refused.value.code) == (403, code)
                with pytest.raises(ApiError) as refused:
                    other._session.send("GET", name, params={"offset": 0})
                assert (refused.value.status, refused.value.code) == (403, code)
        # The name of somebody's stream opens nothing either, nor another experiment's path.
        mine = admin._session.send("GET", name, params={"offset": 0})
        assert mine.status_code == 200
        with Client(url, tokens["other_owner"]) as other:
            for method in ("GET", "PUT", "DELETE"):
                with pytest.raises(ApiError) as refused:
                    other._session.send(method, name, params={"offset": 1})
                assert refused.value.status == 404
        path = f"attempts/{trial_of(experiment).data.attempts[0].id}/streams"
        with Client(url, tokens["scope_too_low"]) as other, pytest.raises(ApiError) as refused:
            other._session.send("POST", path, content=b"{}")
        assert refused.value.status == 403
    experiment.kill()
    experiment.wait(60)
    audit = [entry.action for entry in admin.audit(limit=100)]
    assert any(action == f"POST /experiments/{experiment.id}/link" for action in audit)
    assert not any("/streams/" in action for action in audit)


@pytest.mark.parametrize(
    ("body", "params", "status"),
    [
        (b"x" * (128 * 1024 + 1), {"offset": 0}, 413),
        (b"x", {"offset": -1}, 422),
        (b"x", {"offset": 5}, 404),
        (b"x", {}, 422),
    ],
)
def test_wrong_pieces_are_refused(
    master: MasterProcess, body: bytes, params: dict[str, int], status: int
) -> None:
    config = {"entrypoint": "sleep 1", "searcher": {"name": "single", "metric": "m"}}
    experiment = master.client().create_experiment(config)
    path = f"experiments/{experiment.id}/streams/{'cd' * 16}"
    with pytest.raises(ApiError) as refused:
        master.client()._session.send("PUT", path, params=params, content=body)
    assert refused.value.status == status
    # A trial is no interactive task.
    with pytest.raises(ApiError) as refused:
        master.client().interactive_link(experiment.id)
    assert (refused.value.status, refused.value.code) == (409, "not_interactive")


@pytest.mark.long
@pytest.mark.parametrize("num_slots", [0])
def test_task_on_a_node_is_opened_and_lost_with_it(
    master: MasterProcess, start: Callable[..., Any], make_node: Callable[..., Any]
) -> None:
    node = make_node("box").start()
    client = master.client()
    deadline = time.monotonic() + 60
    while not client.nodes():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    experiment = start("shell")
    ready(client, experiment)
    with client.connect_to_task(experiment.id) as stream:
        stream.sendall(typed("echo there-$((6*7))\n"))
        assert b"there-42" in frames(stream, lambda out, _: b"there-42" in out)[0]
        # As if its power went: nobody says a last word.
        node.close()
        experiment.wait(120)
        assert frames(stream, lambda *_: False)[1] == []
    assert experiment.data.state.value == "ERROR"
    assert "The task was lost" in trial_of(experiment).data.error
    assert len(trial_of(experiment).data.attempts) == 1


@pytest.mark.long
def test_quota_holds_for_tasks(master: MasterProcess, start: Callable[..., Any]) -> None:
    client = master.client()
    client.set_quota(user="admin", max_slots=1)
    first, second = start("shell"), start("shell")
    ready(client, first)
    (waiting,) = client.queue()
    assert waiting.experiment_id == second.id
    assert waiting.detail.startswith("Quota: the user admin")
    command = [sys.executable, "-m", "paceline.cli", "open", str(first.id), "--json"]
    environment = {**os.environ, "PACELINE_HOME": str(master.home)}
    # Without a terminal the shell reads what is sent, and its end.
    used = subprocess.run(
        command, env=environment, input="exit 4\n", capture_output=True, text=True, check=False
    )
    assert used.returncode == 4, used.stderr
    told = {"experiment_id": first.id, "kind": "shell", "url": None, "exit_code": 4}
    assert json.loads(used.stdout) == told
    # Its slot is the next one's.
    ready(client, second)
    second.kill()
    second.wait(60)


@pytest.mark.parametrize("num_slots", [0])
def test_notebook_is_refused_where_no_node_has_jupyterlab(
    master: MasterProcess, start: Callable[..., Any]
) -> None:
    facts = {
        "name": "bare", "key": "k", "version": client_version(), "protocol": 1,
        "python": "python3", "python_version": "3.11.7", "devices": ["cpu"], "device_kind": "CPU",
        "num_cores": 1, "memory_bytes": 1, "packages": ["tensorboard"],
    }  # fmt: skip
    client = master.client()
    client._session.send("POST", "nodes", content=json.dumps(facts).encode())
    with pytest.raises(ApiError, match="pip install jupyterlab") as refused:
        start("notebook")
    assert refused.value.code == "not_installed"
    # One with an interpreter of its own may have it.
    start("notebook", environment={"python": "/usr/bin/python3"}).kill()
    start("tensorboard").kill()
    with pytest.raises(ApiError, match="must be at most 1 for a shell"):
        start("shell", resources={"slots_per_trial": 2})


def client_version() -> str:
    import paceline

    return paceline.__version__
