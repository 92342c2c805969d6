"""Signs of life of a run, and its reports to a master while it runs."""

import logging
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from paceline._base.run_directory import RunDirectory

logger = logging.getLogger(__name__)


# A fraction of `HEARTBEAT_LIMIT_S`, as a file system may show a change late.
_INTERVAL_S = 10.0
# A run that is over sooner needs none.
_FIRST_S = 1.0


class _Heartbeats:
    """Heartbeats for all runs of this process, sent by a single thread.

    The thread ends when it finds no run. Runs that follow each other share it, because starting a
    thread takes long compared with an empty run.
    """

    def __init__(self) -> None:
        # Each run with the time of its next sign of life.
        self._runs: dict[RunDirectory, float] = {}
        # Reentrant: garbage collection may close a forgotten context within this thread's own hold.
        self._lock = threading.RLock()
        self._has_thread = False

    def add(self, run: RunDirectory) -> None:
        """Send heartbeats for a run until its removal."""
        with self._lock:
            # Due at once: the thread beats for a new run in its next round.
            self._runs[run] = 0.0
            if not self._has_thread:
                threading.Thread(
                    target=self._beat, name="paceline-run-heartbeats", daemon=True
                ).start()
                self._has_thread = True

    def remove(self, run: RunDirectory) -> None:
        """Give no further sign of life of a run, if this process gave some."""
        with self._lock:
            if self._runs.pop(run, None) is not None:
                run.end_heartbeat()

    def forget(self) -> None:
        """Drop all runs in a forked child: the parent process alone sends their heartbeats."""
        self._runs, self._has_thread = {}, False
        self._lock = threading.RLock()

    def _beat(self) -> None:
        while True:
            time.sleep(min(_FIRST_S, _INTERVAL_S))
            with self._lock:
                now = time.monotonic()
                for run in [run for run, due in self._runs.items() if due <= now]:
                    with suppress(OSError):
                        run.beat()
                    if run in self._runs:
                        self._runs[run] = now + _INTERVAL_S
                    else:
                        run.end_heartbeat()
                # Under the lock: a run added now starts a new thread.
                if not self._runs:
                    self._has_thread = False
                    return


_heartbeats = _Heartbeats()


@contextmanager
def sending_heartbeats(run: RunDirectory) -> Iterator[None]:
    """Give signs of life of a run within the block; a full disk is no error."""
    heartbeats = _heartbeats
    try:
        heartbeats.add(run)
        yield
    finally:
        # A forked child may come here too; it gives none, and the run continues.
        heartbeats.remove(run)


REPORT_TO_VARIABLE = "PACELINE_REPORT_TO"
# Module name of the reporter: `client` stands above `core`, so no import.
_PROGRAM = "paceline.client._report_run"
# The reporter replies sooner if all is sent, or if it continues in the background.
_END_LIMIT_S = 10.0
_URL = re.compile(r"(https?://)?[A-Za-z0-9.\[\]:_-]+/?")


def master_to_report_to(given: str | None) -> str | None:
    """Return the URL of the master to report a run to; None without live reports.

    Args:
        given: The script's value; the variable PACELINE_REPORT_TO by default.

    Raises:
        TypeError: It is no text.
        ValueError: It is no URL of a master.
    """
    name = "master" if given is not None else REPORT_TO_VARIABLE
    url = os.environ.get(REPORT_TO_VARIABLE) or None if given is None else given
    if url is None:
        return None
    if not isinstance(url, str):
        raise TypeError(f"`master` must be the URL of a master, but got {url!r}.")
    if not _URL.fullmatch(url):
        raise ValueError(
            f"`{name}` must be the URL of a master, such as https://head:8080, but got {url!r}."
        )
    return url


@contextmanager
def reporting(run: RunDirectory, master: str | None) -> Iterator[Callable[[], None]]:
    """Yield a function starting the live reports of a run; leaving the block sends the rest.

    The run's lock must be taken and released within the block. A master that does not answer is
    no error: the reporter continues without the script for a while.

    Args:
        run: The run directory of this machine.
        master: The URL of the master; None reports nothing.
    """
    started: list[subprocess.Popen[bytes]] = []
    owner = os.getpid()

    def start() -> None:
        if master is not None:
            try:
                started.append(_start_live_reports(run.path, master))
            except OSError as error:
                logger.warning(
                    "The run is not reported to %s, as no process can be started (%s)."
                    " Hint: `paceline sync %s` sends it later.",
                    master,
                    error,
                    run.path,
                )

    try:
        yield start
    finally:
        # A forked child may come here too; the run continues then.
        if os.getpid() == owner:
            for process in started:
                _end_live_reports(process)


def _start_live_reports(path: Path, master: str) -> "subprocess.Popen[bytes]":
    source = str(Path(__file__).parents[2])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", _PROGRAM, str(path), master],
        # End of file at the reporter: the script has ended, in any way.
        stdin=subprocess.PIPE,
        # End of file at the script: the reporter no longer needs the script.
        stdout=subprocess.PIPE,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(paths),
            # Files of the script's directory must not stand in for modules.
            "PYTHONSAFEPATH": "1",
        },
        # Ctrl-C is for the script.
        start_new_session=True,
    )


def _end_live_reports(process: "subprocess.Popen[bytes]") -> None:
    """Let the reporter send the rest of the run, for at most 10 seconds."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    _await_end(process.stdout)
    process.stdout.close()
    # Reporter exited already: its work continues in a child, which may outlive this script.
    process.wait()


def _await_end(stream: IO[bytes]) -> None:
    deadline = time.monotonic() + _END_LIMIT_S
    while (left_s := deadline - time.monotonic()) > 0:
        readable, _, _ = select.select([stream], [], [], left_s)
        # An empty read: the other process has closed the stream.
        if readable and not os.read(stream.fileno(), 1024):
            return
