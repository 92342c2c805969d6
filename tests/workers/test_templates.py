"""Workers that are forked are as good as new interpreters."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from paceline._training.workers.channels import ListenerAddress
from paceline._training.workers.process_pools import LocalPool
from paceline._training.workers.processes import templates
from paceline._training.workers.processes.leftover_processes import adopting_orphan_processes
from paceline._training.workers.processes.process_facts_and_signals import read_process
from paceline._training.workers.processes.rank_environment import NodeLayout
from paceline._training.workers.processes.templates import (
    ProgramStart,
    stop_templates,
    template_of_ranks,
)
from paceline._training.workers.processes.worker_process import WorkerSpec
from paceline._training.workers.processes.worker_program import PROGRAM_FILE
from paceline._training.workers.ray.host_process import HostOrder, warm_up
from paceline._training.workers.worker_failures import WorkerFailedError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

RunPython = Callable[..., Any]
WaitUntil = Callable[[Callable[[], object]], None]
LONG_S = 600.0


@pytest.fixture(autouse=True)
def _is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have forks, also where all other tests run without them."""
    monkeypatch.setenv("PACELINE_WARM", "1")


@pytest.fixture(scope="module", autouse=True)
def _own_fork_server() -> Iterator[None]:
    stop_templates()
    yield
    stop_templates()


def is_there(pid: int) -> bool:
    facts = read_process(pid)
    return facts is not None and not facts.is_zombie


def server_of(pool: LocalPool) -> int:
    values = pool.submit(os.getppid, ranks=[0]).wait()
    assert values is not None
    return int(values[0])


def kind_of(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}").split(":")[0]
    except FileNotFoundError:
        # It was that of the listing.
        return ""


def facts() -> dict[str, Any]:
    """Return all that a worker is set up with, as far as it is the same each time."""
    import gc
    import tempfile

    import numpy
    import torch

    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines)
    left_out = ("PACELINE_WORKER_GROUP", "MASTER_PORT", "RANK", "LOCAL_RANK", "KMP_", "_")
    # A shell on the way to a new interpreter sets it to the working directory.
    left_out += ("PWD",)
    return {
        "environment": {k: v for k, v in os.environ.items() if not k.startswith(left_out)},
        "of its children": subprocess.check_output(["sh", "-c", "echo $OMP_NUM_THREADS"]),
        "directory": os.getcwd(),
        "arguments": sys.argv,
        "path": sys.path,
        "flags": tuple(sys.flags),
        "main": sorted(name for name in vars(sys.modules["__main__"]) if name.startswith("__")),
        "open": [kind_of(name) for name in os.listdir("/proc/self/fd")],
        "input": sys.stdin.read(),
        "is leader": os.getsid(0) == os.getpgrp() == os.getpid(),
        "handlers": [str(signal.getsignal(number)) for number in (1, 10, 12, 13, 15)],
        "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
        "mask": status["Umask"],
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": [thread.name for thread in threading.enumerate()],
        "torch threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_initialized(),
        "collects": gc.isenabled(),
        "temporary": tempfile.gettempdir(),
        "zone": time.tzname,
        "numpy": numpy.__version__,
    }


@pytest.mark.long
def test_a_forked_worker_is_set_up_as_a_new_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalPool(1) as pool:
        first = pool.submit(os.getpid).wait()
    # All of it differs from what the fork server was started with.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("SOME_VARIABLE", "\udcff and more")
    monkeypatch.setattr(sys, "argv", ["driver.py", "--flag"])
    before = os.umask(0o27)
    try:
        told = []
        for fork_server in (True, False):
            with LocalPool(1, fork_server=fork_server, threads_per_worker=2) as pool:
                told += pool.submit(facts).wait() or []
    finally:
        os.umask(before)
    assert first != [os.getpid()]
    assert told[0] == told[1]
    assert told[0]["torch threads"] == 2
    assert told[0]["zone"][0] == "JST"


def compute() -> tuple[list[float], list[float], int]:
    import numpy
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1))
    loss = model(torch.rand(2000, 300)).square().mean()
    loss.backward()
    matrix = numpy.random.default_rng(0).random((400, 400))
    product = (matrix @ matrix).sum(axis=0)
    return (
        [loss.item(), *model[0].weight.grad[0].tolist()],
        product.tolist(),
        len(os.listdir("/proc/self/task")),
    )


def draw() -> tuple[float, float, float]:
    import numpy
    import torch

    return random.random(), float(numpy.random.random()), torch.rand(()).item()


@pytest.mark.long
def test_forked_workers_compute_the_same_bits_with_their_own_threads_and_seeds() -> None:
    answers = {}
    for threads in (1, 2):
        for fork_server in (True, False):
            with LocalPool(2, fork_server=fork_server, threads_per_worker=threads) as pool:
                drawn = pool.submit(draw).wait()
                answers[threads, fork_server] = pool.submit(compute).wait()
            assert drawn is not None
            assert [len(set(column)) for column in zip(*drawn, strict=True)] == [2, 2, 2]
    assert answers[1, True] == answers[1, False]
    assert answers[2, True] == answers[2, False]


def test_one_fork_server_serves_all_pools_that_agree_on_what_is_read_at_import() -> None:
    def hashed() -> int:
        return hash("paceline")

    servers = []
    with LocalPool(1) as pool:
        servers.append(server_of(pool))
    with LocalPool(2, environment={"ANYTHING": "else"}) as pool:
        servers.append(server_of(pool))
        with LocalPool(1, environment={"PYTHONHASHSEED": "7"}) as other:
            servers.append(server_of(other))
            seventh = other.submit(hashed).wait()
            # The first one lives on as long as it has workers.
            assert pool.submit(os.getppid).wait() == [servers[0]] * 2
    with LocalPool(1, environment={"PYTHONHASHSEED": "7"}, fork_server=False) as pool:
        assert pool.submit(hashed).wait() == seventh
        assert server_of(pool) == os.getpid()
    assert servers[0] == servers[1] != servers[2]
    stop_templates()
    assert not any(map(is_there, servers))


DRIVER = """
import os, signal, subprocess, sys, time
from paceline._training.workers.process_pools import LocalPool

def start_children():
    return [
        subprocess.Popen(["sleep", "600"], start_new_session=is_away).pid
        for is_away in (False, True)
    ]

def hang(seconds):
    import ctypes
    # Keeps Python's lock all the time.
    ctypes.PyDLL(None).sleep(seconds)

if __name__ == "__main__":
    pool = LocalPool(2, fork_server=sys.argv[1] == "True")
    pool.start()
    pids = [process.pid for process in pool.processes]
    servers = pool.submit(os.getppid).wait()
    children = pool.submit(start_children).wait() if sys.argv[1] == "True" else []
    print(*pids, *servers, *sum(children, []), flush=True)
    if sys.argv[2] == "stopped":
        os.kill(servers[0], signal.SIGSTOP)
    pool.submit(hang, (600,), ranks=[0])
    time.sleep(600)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("fork_server", "state"), [(True, "running"), (True, "stopped"), (False, "running")]
)
def test_all_end_when_the_driver_is_killed(
    fork_server: bool, state: str, tmp_path: Path, wait_until: WaitUntil
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    with subprocess.Popen(
        [sys.executable, str(script), str(fork_server), state], stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == (8 if fork_server else 4)
        assert all(map(is_there, pids))
        driver.kill()
    wait_until(lambda: not any(map(is_there, pids)))


@pytest.mark.long
def test_a_fork_server_that_loads_a_module_ends_with_its_driver(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    (tmp_path / "takes_long.py").write_text(
        "import os, time\nopen('part', 'w').write(str(os.getpid()))\nos.rename('part', 'server')\n"
        "for _ in range(60000):\n    time.sleep(0.01)\n"
    )
    (tmp_path / "driver.py").write_text(
        "from paceline._training.workers.process_pools import LocalPool\n"
        "LocalPool(1, preload=['takes_long']).start()\n"
    )
    with subprocess.Popen([sys.executable, "driver.py"], cwd=tmp_path) as driver:
        wait_until((tmp_path / "server").exists)
        server = int((tmp_path / "server").read_text())
        assert is_there(server)
        driver.kill()
    wait_until(lambda: not is_there(server))


@pytest.mark.long
def test_the_end_of_the_fork_server_is_that_of_its_workers_and_another_one_follows(
    wait_until: WaitUntil,
) -> None:
    with LocalPool(2, heartbeat_timeout_s=LONG_S) as pool:
        server = server_of(pool)
        pids = [process.pid for process in pool.processes]
        call = pool.submit(time.sleep, (LONG_S,))
        os.kill(server, signal.SIGKILL)
        with pytest.raises(WorkerFailedError, match="was ended by SIGKILL"):
            call.wait()
        pool.start()
        wait_until(lambda: not any(map(is_there, pids)))
        assert server_of(pool) != server


@pytest.mark.long
def test_workers_that_are_started_later_have_what_optimizers_import(wait_until: WaitUntil) -> None:
    def has_it() -> bool:
        return "torch._dynamo" in sys.modules

    def has_it_in_a_new_worker() -> bool:
        with LocalPool(1, heartbeat_timeout_s=LONG_S) as pool:
            return pool.submit(has_it).wait() == [True]

    stop_templates()
    # The first ones do not wait for it, but on a busy machine it may be there already.
    wait_until(has_it_in_a_new_worker)


@pytest.mark.long
def test_a_host_that_was_warmed_up_has_all_that_its_first_worker_imports() -> None:
    def what_it_has() -> list[bool]:
        return [name in sys.modules for name in ("wave", "torch._dynamo")]

    order = HostOrder(
        rank=0,
        world_size=1,
        local_rank=0,
        layout=NodeLayout(num_local_workers=1, master_port=0),
        host_address="127.0.0.1",
        driver=ListenerAddress("127.0.0.1", 0),
        key=b"",
        environment={},
        flags=[],
        beat_s=1.0,
        preload=["wave"],
        directory="",
    )
    stop_templates()
    warm_up(order)
    # Its requests do not name these modules.
    with LocalPool(1, heartbeat_timeout_s=LONG_S) as pool:
        assert pool.submit(what_it_has).wait() == [[True, True]]


def test_a_signal_to_the_whole_job_leaves_the_fork_server_to_its_workers(
    wait_until: WaitUntil,
) -> None:
    def ask() -> str:
        asked = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: asked.set())
        open(os.environ["ASKED"], "w").close()
        while not asked.is_set():
            time.sleep(0.01)
        return "saved"

    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        mark = os.path.join(directory, "ready")
        with LocalPool(1, environment={"ASKED": mark}) as pool:
            server = server_of(pool)
            call = pool.submit(ask)
            wait_until(lambda: os.path.exists(mark))
            for pid in (server, pool.processes[0].pid):
                os.kill(pid, signal.SIGTERM)
            assert call.wait() == ["saved"]


def test_without_a_server_workers_are_new_interpreters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('broken on purpose')")
    monkeypatch.syspath_prepend(tmp_path)
    with LocalPool(1, environment={"PYTHONHASHSEED": "8"}) as pool:
        assert server_of(pool) == os.getpid()
    assert "as new interpreters: ImportError: broken on purpose." in caplog.text


def train_a_little() -> list[float]:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    data = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, num_workers=1)
    total = torch.stack(list(data)).sum()
    distributed.all_reduce(total)
    return [total.item()]


def listening_sockets() -> set[str]:
    files = Path("/proc/net/tcp"), Path("/proc/net/tcp6")
    rows = [line.split() for path in files for line in path.read_text().splitlines()[1:]]
    return {f"socket:[{words[9]}]" for words in rows if words[3] == "0A"}


def sockets_of(pid: int) -> set[str]:
    """Return the sockets that a process listens to."""
    opened = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        # It may have been closed meanwhile.
        with suppress(FileNotFoundError):
            opened.add(os.readlink(path))
    return opened & listening_sockets()


def shared_memory_of(pids: Sequence[int]) -> list[str]:
    """Return the blocks of shared memory that processes have named after themselves."""
    return [
        name for name in os.listdir("/dev/shm") if {*map(str, pids)} & {*re.findall(r"\d+", name)}
    ]


@pytest.mark.long
@pytest.mark.parametrize("is_forced", [False, True])
def test_nothing_is_left_after_a_shutdown(is_forced: bool) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with LocalPool(2) as pool:
        server = server_of(pool)
        assert pool.submit(train_a_little).wait() == [[56.0]] * 2
        call = pool.submit(time.sleep, (LONG_S,)) if is_forced else None
        group = [process.pgid for process in pool.processes]
        sockets = sockets_of(pool.processes[0].pid)
        assert sockets
        pool.shutdown(force=is_forced)
    assert call is None or call.is_done
    for pid in os.listdir("/proc"):
        if pid.isdigit() and is_there(int(pid)):
            try:
                assert os.getpgid(int(pid)) not in group
            except ProcessLookupError:
                continue
    assert shared_memory_of(group) == []
    assert not sockets & listening_sockets()
    # It looks into files of other processes.
    for thread in threading.enumerate():
        if thread.name == "paceline-sweep":
            thread.join()
    # One more: the connection to the fork server.
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1
    assert is_there(server)


def test_a_process_forked_from_the_driver_leaves_its_server_alone() -> None:
    with LocalPool(1) as pool:
        server = server_of(pool)
        child = os.fork()
        if child == 0:
            stop_templates()
            os._exit(0)
        os.waitpid(child, 0)
        assert pool.submit(os.getppid).wait() == [server]


def test_nothing_is_started_before_it_is_needed(run_python: RunPython) -> None:
    result = run_python(
        "import os, paceline._training.workers.process_pools as w\n"
        "pool = w.LocalPool(2)\n"
        "print(open(f'/proc/self/task/{os.getpid()}/children').read(), end='')"
    )
    assert (result.returncode, result.stdout) == (0, "")


def test_sockets_of_the_driver_do_not_reach_the_workers() -> None:
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    with LocalPool(1) as pool:
        few = pool.submit(num_open).wait()
        with socket.socket(), socket.socket(), LocalPool(1) as other:
            assert other.submit(num_open).wait() == few


@pytest.mark.long
def test_a_template_that_was_started_without_a_report_loads_the_modules_of_a_later_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wait_until: WaitUntil
) -> None:
    import torch  # noqa: F401 - this process is the program that has loaded it

    monkeypatch.setattr(templates, "_LEARN_S", 0.01)
    monkeypatch.setattr(templates, "_PATIENCE_S", 0.0)
    reported: list[Any] = [None]
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('wave' in sys.modules)\n")
    command = (sys.executable, PROGRAM_FILE, "script", str(script))
    spec = WorkerSpec(command=command, environment=os.environ, working_directory=tmp_path)
    start = ProgramStart(spec.command, lambda: reported[0])

    def output() -> bytes:
        process = start.start(spec, os.environ, is_read=True)
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdout, process.stderr:
            text = process.stdout.read()
        process.await_end()
        process.reap()
        return bytes(text)

    with adopting_orphan_processes():
        start.learn(os.getpid(), os.environ)
        try:
            wait_until(lambda: start._template is not None)
            assert output() == b"False\n"
            reported[0] = ["wave"]
            wait_until(lambda: output() == b"True\n")
        finally:
            start.close()


def test_a_launcher_waits_for_no_writer_of_a_fifo_in_the_place_of_its_script(
    tmp_path: Path,
) -> None:
    """The interpreter of each worker reads it, or says what is wrong."""
    os.mkfifo(tmp_path / "train.py")
    command = (sys.executable, PROGRAM_FILE, "script", str(tmp_path / "train.py"))
    assert template_of_ranks(command, os.environ) is None
