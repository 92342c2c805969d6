"""The library strikes the calls that a rule names, and no others."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_lab.library import OPEN, RENAME, SYNC, SYNCED, UNLINK, WRITE, FaultLab

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(lab: FaultLab, tmp_path: Path) -> Run:
    """Return a function that runs code in a process of the laboratory, in a directory of files."""
    (tmp_path / "files").mkdir()

    def run(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path / "files",
            env=os.environ | lab.environment | environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


TRY = """
import errno, fcntl, os, socket, subprocess, sys
MADE = os.O_CREAT | os.O_RDWR
def tell(call, *arguments, **options):
    try:
        print(call(*arguments, **options))
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


@pytest.mark.parametrize(
    ("calls", "code", "error"),
    [
        ("write", "f = os.open('x', os.O_CREAT | os.O_RDWR); tell(os.write, f, b'abc')", "ENOSPC"),
        (
            "write",
            "f = os.open('x', os.O_CREAT | os.O_RDWR); tell(os.pwrite, f, b'a', 7)",
            "EDQUOT",
        ),
        ("sync", "f = open('x', 'w'); tell(os.fsync, f.fileno())", "EIO"),
        ("sync", "f = open('x', 'w'); tell(os.fdatasync, f.fileno())", "EIO"),
        ("rename", "open('x', 'w'); tell(os.rename, 'x', 'y')", "EIO"),
        ("link", "open('x', 'w'); tell(os.link, 'x', 'y')", "EIO"),
        ("unlink", "open('x', 'w'); tell(os.unlink, 'x')", "EIO"),
        ("open", "tell(open, 'x', 'w')", "EMFILE"),
        ("mkdir", "tell(os.mkdir, 'x')", "ENOSPC"),
        ("truncate", "f = open('x', 'w'); tell(f.truncate, 10)", "EIO"),
        ("lock", "f = open('x', 'w'); tell(fcntl.flock, f, fcntl.LOCK_EX)", "ENOLCK"),
        ("lock", "f = open('x', 'w'); tell(fcntl.lockf, f, fcntl.LOCK_EX)", "ENOLCK"),
        ("execve", "tell(subprocess.run, [sys.executable, '-c', ''])", "ENOMEM"),
        ("fork", "tell(os.fork)", "EAGAIN"),
        ("connect", "tell(socket.create_connection, ('127.0.0.1', 9))", "ETIMEDOUT"),
    ],
)
def test_a_call_fails_as_the_rule_says(
    lab: FaultLab, run: Run, calls: str, code: str, error: str
) -> None:
    path = "" if calls in ("execve", "fork", "connect") else "path=*/files/x"
    lab.set_rules(f"fault calls={calls} {path} fail={error}")
    assert run(TRY + code).stdout == f"{error}\n"
    assert len(lab.hits()) == 1


def test_sqlite_meets_the_fault_as_well(lab: FaultLab, run: Run) -> None:
    lab.set_rules("fault calls=write path=*.db-wal nth=2 fail=ENOSPC")
    code = """
import sqlite3
connection = sqlite3.connect("x.db", isolation_level=None)
connection.execute("PRAGMA journal_mode=WAL")
try:
    connection.execute("CREATE TABLE t(x)")
except sqlite3.OperationalError as error:
    print(error)
"""
    assert run(code).stdout == "database or disk is full\n"


def test_only_the_chosen_calls_of_the_chosen_processes_are_struck(lab: FaultLab, run: Run) -> None:
    lab.set_rules("fault calls=mkdir path=*/files/* process=*chosen* rank=2 nth=2 fail=EIO")
    code = TRY + "for name in 'abc': tell(os.mkdir, name)"
    assert run(code, RANK="2").stdout == 3 * "None\n"
    code = code.replace("abc", "jkl") + "  # chosen"
    assert run(code, RANK="0").stdout == 3 * "None\n"
    assert run(code.replace("jkl", "mno"), RANK="2").stdout == "None\nEIO\nNone\n"


def test_chance_strikes_the_same_calls_for_the_same_seed(lab: FaultLab, run: Run) -> None:
    code = TRY + "for number in range(40): tell(os.mkdir, f'{sys.argv}-{number}')"
    seen = []
    for seed in (1, 1, 2):
        lab.set_rules(f"fault calls=mkdir path=*/files/* chance=0.3 seed={seed} fail=EIO")
        seen.append(run(code.replace("sys.argv", str(len(seen)))).stdout)
    assert seen[0] == seen[1] != seen[2]
    assert 4 < seen[0].count("EIO") < 20


@pytest.mark.parametrize(
    ("end", "left"), [("kill=before", 0), ("kill=torn", 3), ("short=2 kill=after", 2)]
)
def test_a_call_is_the_last_one_of_its_process(
    lab: FaultLab, run: Run, tmp_path: Path, end: str, left: int
) -> None:
    lab.set_rules(f"fault calls=write path=*/files/x {end}")
    ended = run("import os; f = open('x', 'wb', 0); f.write(b'abcdef'); print('no')")
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "")
    assert (tmp_path / "files" / "x").stat().st_size == left


def test_rules_change_while_a_process_runs(lab: FaultLab, tmp_path: Path) -> None:
    code = (
        "import sys\nfor line in sys.stdin:\n  try: open('x', 'w')\n  except OSError: print('no')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        cwd=tmp_path,
        env=os.environ | lab.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    while not (tmp_path / "x").exists():
        pass
    lab.set_rules("fault calls=open path=*/x fail=EMFILE")
    assert process.communicate("go\n", 60)[0] == "no\n"


def test_the_recording_has_each_change_in_its_order(
    lab: FaultLab, run: Run, tmp_path: Path
) -> None:
    root = tmp_path / "files"
    lab.set_rules(f"record root={root} sync=skip")
    code = """
import os
f = os.open("x", os.O_CREAT | os.O_RDWR | os.O_APPEND)
os.write(f, b"abc"); os.pwrite(f, b"Z", 1); os.fsync(f); os.write(f, b"def")
os.rename("x", "y"); os.unlink("y")
try: os.unlink("y")
except OSError: pass
"""
    assert run(code).returncode == 0
    seen = [(r.kind, Path(r.path).name, r.number, r.data) for r in lab.records()]
    flags = os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
    assert seen[:6] == [
        (OPEN, "x", flags, b""),
        (WRITE, "x", 0, b"abc"),
        (WRITE, "x", 1, b"Z"),
        (SYNC, "x", 0, b""),
        (SYNCED, "x", 4, b""),
        (WRITE, "x", 4, b"def"),
    ]
    assert [kind for kind, *_ in seen[6:9]] == [RENAME, UNLINK, UNLINK]
    assert seen[9][2] == -1
    assert [record.order for record in lab.records()] == list(range(1, 11))
