"""Local groups of real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline._training.workers.processes.leftover_processes import kill_leftover
from paceline._training.workers.processes.local_worker_group import LocalGroup
from paceline._training.workers.processes.process_facts_and_signals import (
    living_members,
    read_process,
)
from paceline._training.workers.processes.worker_output import OutputLine
from paceline._training.workers.processes.worker_process import WorkerSpec
from paceline._training.workers.worker_failures import WorkerStartError

MakeGroup = Callable[..., LocalGroup]
WaitUntil = Callable[[Callable[[], object]], None]

IGNORE_TERM = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); "


def _run(group: LocalGroup) -> list[int]:
    group.start()
    exits = group.wait(120)
    assert exits is not None
    return [exit_.code for exit_ in exits]


def _is_alive(pid: int) -> bool:
    facts = read_process(pid)
    return facts is not None and not facts.is_zombie


def test_output_arrives_whole_and_in_order_per_stream(
    make_group: MakeGroup, lines: list[OutputLine]
) -> None:
    text = "import sys\nfor i in range(500): print(i); print(-i, file=sys.stderr)"
    assert _run(make_group(text, text)) == [0, 0]
    for rank in (0, 1):
        printed = [line for line in lines if line.rank == rank]
        out = [int(line.text) for line in printed if line.stream == "stdout"]
        err = [int(line.text) for line in printed if line.stream == "stderr"]
        assert out == list(range(500))
        assert err == [-i for i in range(500)]


def test_a_lone_worker_has_no_rank_unless_its_output_names_one(
    make_group: MakeGroup, lines: list[OutputLine]
) -> None:
    _run(make_group("print('plain'); print('[rank=2] prefixed', end='')"))
    assert [(line.rank, line.text) for line in lines] == [(None, "plain"), (2, "prefixed")]


def test_exit_codes_and_signals_are_told_apart(make_group: MakeGroup) -> None:
    group = make_group("exit 0", "exit 3", "kill -9 $$", shell=True)
    assert _run(group) == [0, 3, 137]
    assert [exit_.signal for exit_ in group.wait() or []] == [None, None, 9]
    assert not any(exit_.finished for exit_ in group.poll())


@pytest.mark.parametrize(
    ("make_command", "code", "text"),
    [
        (lambda path: ["no-such-program"], 127, "'no-such-program' was not found"),
        (lambda path: [str(path / "data")], 126, "cannot be run: Permission denied"),
    ],
)
def test_a_command_that_cannot_run_ends_as_in_a_shell(
    tmp_path: Path,
    lines: list[OutputLine],
    make_command: Callable[[Path], list[str]],
    code: int,
    text: str,
) -> None:
    (tmp_path / "data").write_text("no program")
    spec = WorkerSpec(
        command=make_command(tmp_path), environment=os.environ, working_directory=tmp_path
    )
    assert _run(LocalGroup([spec], lines.append)) == [code]
    assert text in lines[0].text


def test_a_missing_working_directory_is_an_error_and_starts_nothing(tmp_path: Path) -> None:
    good, bad = (
        WorkerSpec(
            command=["sleep", "60"],
            environment=os.environ,
            working_directory=directory,
            rank=rank,
            world_size=2,
        )
        for rank, directory in enumerate([tmp_path, tmp_path / "missing"])
    )
    group = LocalGroup([good, bad], print)
    with pytest.raises(WorkerStartError, match="missing"):
        group.start()
    assert [_is_alive(process.pid) for process in group.processes] == [False]


def test_workers_go_on_after_a_failure(make_group: MakeGroup) -> None:
    group = make_group("1 / 0", "import time; time.sleep(0.5)")
    assert _run(group) == [1, 0]


def test_stop_ends_workers_that_ignore_it(
    make_group: MakeGroup, lines: list[OutputLine], wait_until: WaitUntil
) -> None:
    group = make_group(IGNORE_TERM + "time.sleep(60)")
    group.start()
    wait_until(lambda: lines)
    assert [exit_.signal for exit_ in group.stop(grace_s=0.2)] == [signal.SIGKILL]
    assert group.stop(grace_s=0.2) == group.wait()


def test_stop_lets_what_a_shell_started_save_its_work(
    make_group: MakeGroup, lines: list[OutputLine], wait_until: WaitUntil
) -> None:
    python = (
        "import signal, time; "
        "signal.signal(15, lambda *_: (time.sleep(3), print('saved', flush=True), exit())); "
        "print('up', flush=True); time.sleep(60)"
    )
    group = make_group(f'{sys.executable} -c "{python}"; echo never', shell=True)
    group.start()
    wait_until(lambda: lines)
    exits = group.stop(grace_s=60.0)
    assert [exit_.signal for exit_ in exits] == [signal.SIGTERM]
    assert [line.text for line in lines] == ["up", "saved"]


def test_the_end_does_not_wait_for_background_processes(
    make_group: MakeGroup, lines: list[OutputLine]
) -> None:
    group = make_group("sleep 300 & echo $!", shell=True)
    assert _run(group) == [0]
    assert not _is_alive(int(lines[0].text))


def test_signals_reach_the_whole_group(
    make_group: MakeGroup, lines: list[OutputLine], wait_until: WaitUntil
) -> None:
    # A child that was just forked loses the signal, so the child itself says that it is up.
    command = "trap 'echo got; exit 5' USR1; (echo up; exec sleep 300) & wait"
    group = make_group(command, shell=True)
    group.start()
    wait_until(lambda: lines)
    group.signal(signal.SIGUSR1)
    exits = group.wait(120)
    assert exits is not None
    assert exits[0].code == 5
    assert lines[-1].text == "got"


def test_a_signal_can_be_meant_for_the_worker_process_alone(
    tmp_path: Path, lines: list[OutputLine], wait_until: WaitUntil
) -> None:
    child = "while [ ! -e released ]; do sleep 0.05; done"
    spec = WorkerSpec(
        command=["sh", "-c", f"trap 'wait $!; echo child $?' USR1; ({child}) & echo up; wait $!"],
        environment=os.environ,
        working_directory=tmp_path,
        signals_whole_group=False,
    )
    with LocalGroup([spec], lines.append) as group:
        wait_until(lambda: lines)
        group.signal(signal.SIGUSR1)
        (tmp_path / "released").touch()
        group.wait(120)
    assert lines[-1].text == "child 0"


def test_an_error_in_on_line_does_not_end_the_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(line: OutputLine) -> None:
        raise KeyError(line.text)

    spec = WorkerSpec(command=["echo", "text"], environment=os.environ, working_directory=tmp_path)
    assert _run(LocalGroup([spec], refuse)) == [0]
    assert "could not be passed on" in caplog.text


def test_a_blocked_on_line_cannot_hold_a_kill_up(tmp_path: Path, wait_until: WaitUntil) -> None:
    is_released = False

    def block(_: OutputLine) -> None:
        wait_until(lambda: is_released)

    spec = WorkerSpec(
        command=["sh", "-c", "echo up; sleep 300"],
        environment=os.environ,
        working_directory=tmp_path,
    )
    with LocalGroup([spec], block) as group:
        group.request_stop(grace_s=0.0)
        wait_until(group.poll)
        is_released = True
        exits = group.wait(120)
    assert exits is not None
    assert exits[0].signal == signal.SIGKILL


def test_states_of_a_progress_bar_are_delivered_while_the_worker_is_silent(
    make_group: MakeGroup, lines: list[OutputLine], wait_until: WaitUntil
) -> None:
    text = "import time\nfor i in range(100): print(i, end='\\r', flush=True)\ntime.sleep(60)"
    group = make_group(text)
    group.start()
    # The carriage return of the very last state may yet become a line end.
    wait_until(lambda: lines and lines[-1].text == "98")
    group.stop(grace_s=0.0)
    # More than two of them if the worker had to wait for the processor in between.
    assert len(lines) < 50
    assert lines[-1].text == "99"


def test_a_group_starts_once_and_is_waited_for_after_that(make_group: MakeGroup) -> None:
    group = make_group("pass")
    with pytest.raises(RuntimeError, match="must be started before"):
        group.wait()
    group.start()
    with pytest.raises(RuntimeError, match="started once only"):
        group.start()
    assert group.wait(120) is not None


def test_wait_returns_none_when_its_time_is_over(make_group: MakeGroup) -> None:
    group = make_group("import time; time.sleep(60)")
    group.start()
    assert group.wait(0.05) is None
    assert group.poll() == []


def test_a_worker_without_on_line_has_the_streams_of_its_supervisor(tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path\n"
        "from paceline._training.workers.processes.local_worker_group import LocalGroup\n"
        "from paceline._training.workers.processes.worker_process import WorkerSpec\n"
        "spec = WorkerSpec(command=['cat'], environment=os.environ, working_directory=Path.cwd())\n"
        "group = LocalGroup([spec]); group.start(); group.wait()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], input=b"through\r", capture_output=True, cwd=tmp_path
    )
    assert (result.stdout, result.stderr) == (b"through\r", b"")


SUPERVISOR = """
import os, sys, threading, time
from pathlib import Path
from paceline._training.workers.processes.local_worker_group import LocalGroup
from paceline._training.workers.processes.worker_process import WorkerSpec
spec = WorkerSpec(
    command=["sh", "-c", sys.argv[1]], environment=os.environ, working_directory=Path.cwd()
)
group = LocalGroup([spec], print)
# The thread that starts the group ends at once, which must not matter to the workers.
thread = threading.Thread(target=group.start)
thread.start()
thread.join()
process = group.processes[0]
print(process.pgid, process.start_time, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends workers with their parent")
def test_workers_end_with_a_supervisor_that_is_killed(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, "exec sleep 300"], stdout=subprocess.PIPE, cwd=tmp_path
    )
    with supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline().split()[0])
        time.sleep(0.3)
        assert _is_alive(pid)
        supervisor.kill()
        wait_until(lambda: not _is_alive(pid))


def test_what_a_worker_started_is_found_after_its_supervisor_was_killed(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, "sleep 300; echo never"],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
    )
    with supervisor:
        assert supervisor.stdout is not None
        pgid, start_time = supervisor.stdout.readline().split()
        wait_until(lambda: len(living_members(int(pgid))) == 2)
        supervisor.kill()
    assert kill_leftover(int(pgid), float(start_time)) >= 1
    assert living_members(int(pgid)) == []


def _lack_threads(monkeypatch: pytest.MonkeyPatch, lacks: Callable[[str], bool]) -> None:
    start = threading.Thread.start

    def start_unless(thread: threading.Thread) -> None:
        if lacks(thread.name):
            # What Python raises at the limit of the user or of the container.
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless)


@pytest.mark.parametrize(
    "lacking", ["paceline-worker-0", "paceline-worker-2", "paceline-workers", "paceline-pulse"]
)
def test_a_lack_of_threads_is_an_error_that_leaves_no_worker(
    lacking: str, make_group: MakeGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lack_threads(monkeypatch, lambda name: name == lacking)
    commands = [f"echo $$ > {tmp_path}/{i}; exec sleep 600" for i in range(3)]
    group = make_group(*commands, shell=True, heartbeat_timeout_s=60.0)
    begin = time.monotonic()
    with pytest.raises(WorkerStartError, match="could not be started: can't start new thread"):
        group.start()
    assert time.monotonic() - begin < 60
    pids = [int(path.read_text()) for path in tmp_path.iterdir() if path.read_text()]
    assert not any(map(_is_alive, pids))


def test_without_more_threads_a_stop_kills_at_once(
    make_group: MakeGroup,
    lines: list[OutputLine],
    wait_until: WaitUntil,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = make_group(IGNORE_TERM + "time.sleep(600)", IGNORE_TERM + "time.sleep(600)")
    group.start()
    wait_until(lambda: len(lines) == 2)
    _lack_threads(monkeypatch, lambda name: name.startswith("Thread-"))
    assert [exit_.signal for exit_ in group.stop(30.0)] == [signal.SIGKILL] * 2
