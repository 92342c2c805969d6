"""Leftovers of a supervisor that is gone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline._training.workers.processes.leftover_processes import kill_leftover
from paceline._training.workers.processes.local_worker_group import LocalGroup
from paceline._training.workers.processes.process_facts_and_signals import (
    has_pending_signal,
    read_process,
)
from paceline._training.workers.processes.worker_process import WorkerSpec

WaitUntil = Callable[[Callable[[], object]], None]
Family = tuple[subprocess.Popen[bytes], list[int]]

# A shell whose child stands in its group, and whose grandchild has left it.
FAMILY = "setsid sleep 300 & echo $!; sleep 300 & echo $!; wait"


def _is_alive(pid: int) -> bool:
    facts = read_process(pid)
    return facts is not None and not facts.is_zombie


@pytest.fixture
def family(wait_until: WaitUntil) -> Iterator[Family]:
    process = subprocess.Popen(["sh", "-c", FAMILY], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    children = [int(process.stdout.readline()) for _ in range(2)]
    wait_until(lambda: os.getpgid(children[0]) != process.pid)
    yield process, children
    for pid in (process.pid, *children):
        if _is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    process.stdout.close()
    process.wait()


def test_a_leftover_is_killed_with_its_descendants(family: Family, wait_until: WaitUntil) -> None:
    process, children = family
    facts = read_process(process.pid)
    assert facts is not None
    assert kill_leftover(process.pid, facts.start_time) == 3
    wait_until(lambda: not any(map(_is_alive, [process.pid, *children])))
    assert kill_leftover(process.pid, facts.start_time) == 0


def test_members_are_killed_when_the_leader_is_gone(family: Family, wait_until: WaitUntil) -> None:
    process, (_, child) = family
    facts = read_process(process.pid)
    assert facts is not None
    process.kill()
    process.wait()
    assert kill_leftover(process.pid, facts.start_time) == 1
    wait_until(lambda: not _is_alive(child))


def test_another_process_with_the_same_id_is_left_alone(
    family: Family,
) -> None:
    process, _ = family
    facts = read_process(process.pid)
    assert facts is not None
    assert kill_leftover(process.pid, facts.start_time - 1.0) == 0
    assert process.poll() is None


@pytest.mark.parametrize("pgid", [0, 1, -1, os.getpgrp()])
def test_the_own_process_group_is_never_killed(pgid: int) -> None:
    with pytest.raises(ValueError, match="`pgid` must name the process group of a worker"):
        kill_leftover(pgid, 0.0)


STRAYS = """
import os, subprocess, sys, time
from pathlib import Path
from paceline._training.workers.processes.local_worker_group import LocalGroup
from paceline._training.workers.processes.worker_process import WorkerSpec

bystander = subprocess.Popen(["sleep", "300"], start_new_session=True)
stray = "echo $$ >stray; while true; do sleep 300; done"
script = f"setsid sh -c '{stray}' & while [ ! -s stray ]; do sleep 0.05; done"
spec = WorkerSpec(
    command=["sh", "-c", script], environment=os.environ, working_directory=Path.cwd()
)
group = LocalGroup([spec], print, adopt_strays=True)
group.start()
group.wait()
assert bystander.poll() is None
bystander.kill()
bystander.wait()
stray = int(Path("stray").read_text())
try:
    os.kill(stray, 0)
except ProcessLookupError:
    sys.exit(0)
sys.exit(f"{stray} is still there")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's child subreaper")
def test_strays_in_other_sessions_are_killed_and_other_children_are_not(tmp_path: object) -> None:
    result = subprocess.run(
        [sys.executable, "-c", STRAYS], cwd=str(tmp_path), timeout=240, capture_output=True
    )
    assert result.returncode == 0, result.stderr.decode()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's child subreaper")
def test_a_process_adopts_no_longer_than_its_groups_live(tmp_path: Path) -> None:
    def orphan_parent() -> int:
        program = "sleep 60 >/dev/null 2>&1 & echo $!"
        orphan = int(subprocess.check_output(["sh", "-c", program]))
        facts = read_process(orphan)
        os.kill(orphan, signal.SIGKILL)
        assert facts is not None
        if facts.parent == os.getpid():
            os.waitpid(orphan, 0)
        return facts.parent

    def group(*command: str) -> LocalGroup:
        spec = WorkerSpec(command=command, environment=os.environ, working_directory=tmp_path)
        return LocalGroup([spec], adopt_strays=True)

    adopter = orphan_parent()
    assert adopter != os.getpid()
    with group("sleep", "60") as long:
        with group("true") as short:
            short.wait()
        assert orphan_parent() == os.getpid()
        long.stop(0.0)
    assert orphan_parent() == adopter


DYING_STRAYS = """
import os, signal, subprocess, sys, time
from pathlib import Path
from paceline._training.workers.processes.local_worker_group import LocalGroup
from paceline._training.workers.processes.worker_process import WorkerSpec

# A process with so much memory that dying takes it a while, and a child of its own. Neither holds
# the group's output open, which would be waited for.
large = (
    "import subprocess, time; from pathlib import Path; memory = b'x' * 10**9;"
    " child = subprocess.Popen(['sleep', '300'], start_new_session=True);"
    " Path('new').write_text(str(child.pid)); Path('new').rename('child'); time.sleep(300)"
)
program = (
    f"import subprocess, sys; large = [sys.executable, '-c', {large!r}];"
    " subprocess.run(large, start_new_session=True, stdout=-3, stderr=-3)"
)
spec = WorkerSpec(
    command=[sys.executable, "-c", program],
    environment=os.environ,
    working_directory=Path.cwd(),
)
group = LocalGroup([spec], print, adopt_strays=True)
group.start()
while not Path("child").exists():
    time.sleep(0.01)
[pid] = subprocess.check_output(["pgrep", "-P", str(group.processes[0].pid)]).split()
os.kill(int(pid), signal.SIGKILL)
group.stop(0.0)
child = Path("child").read_text()
if Path(f"/proc/{child}").exists():
    os.kill(int(child), signal.SIGKILL)
    sys.exit(f"{child} is still there")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's child subreaper")
def test_children_of_a_stray_that_takes_long_to_die_are_killed_too(tmp_path: object) -> None:
    result = subprocess.run(
        [sys.executable, "-c", DYING_STRAYS], cwd=str(tmp_path), timeout=240, capture_output=True
    )
    assert result.returncode == 0, result.stderr.decode()


BLOCKS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
print("blocked", flush=True)
input()
signal.signal(signal.SIGUSR1, lambda *_: print("handled", flush=True))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
input()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of signals that wait")
def test_a_signal_is_pending_until_it_is_handled() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "blocked\n"
        assert not has_pending_signal(process.pid, signal.SIGUSR1)
        process.send_signal(signal.SIGUSR1)
        assert has_pending_signal(process.pid, signal.SIGUSR1)
        assert not has_pending_signal(process.pid, signal.SIGUSR2)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "handled\n"
        assert not has_pending_signal(process.pid, signal.SIGUSR1)
        process.communicate("\n")
    assert not has_pending_signal(process.pid, signal.SIGUSR1)


def test_start_times_tell_processes_apart() -> None:
    first = subprocess.Popen(["sleep", "60"])
    time.sleep(0.05)
    second = subprocess.Popen(["sleep", "60"])
    facts = [read_process(first.pid), read_process(second.pid)]
    for process in (first, second):
        process.kill()
        process.wait()
    assert facts[0] is not None
    assert facts[1] is not None
    assert facts[0].start_time < facts[1].start_time
    assert read_process(first.pid) is None
