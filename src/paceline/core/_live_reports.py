"""Reporting a run without a master to one while it runs.

A process beside the training sends what the journals hold. So training neither waits for the
network nor holds a token, and the end of a script that is killed is told as well.
"""

import logging
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from paceline.journal import RunDirectory

logger = logging.getLogger(__name__)

REPORT_TO_VARIABLE = "PACELINE_REPORT_TO"

# By its name, as `client` stands above `core`.
_PROGRAM = "paceline.client._report_run"
# The reporter says sooner that it has sent all, or that it goes on in the background.
_END_LIMIT_S = 10.0
_URL = re.compile(r"(https?://)?[A-Za-z0-9.\[\]:_-]+/?")


def master_to_report_to(given: str | None) -> str | None:
    """Return the URL of the master that a run reports to, None if it reports to none.

    Args:
        given: What the script says; the variable PACELINE_REPORT_TO by default.

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
    """Give a function that begins to report a run; at the end of the block the rest is sent.

    The run's lock must be taken and released within the block. A master that does not answer is
    no error: the reporter goes on without the script for a while.

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
        # A forked child may come here too; the run goes on then.
        if os.getpid() == owner:
            for process in started:
                _end_live_reports(process)


def _start_live_reports(path: Path, master: str) -> "subprocess.Popen[bytes]":
    source = str(Path(__file__).parents[2])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", _PROGRAM, str(path), master],
        # Its end tells the reporter that the script has ended, however it did.
        stdin=subprocess.PIPE,
        # Its end tells the script that the reporter needs it no more.
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
    """Let the reporter send the rest, and leave it alone if that takes long."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    _await_end(process.stdout)
    process.stdout.close()
    # It has left its work to a child at once, which outlives this script if need be.
    process.wait()


def _await_end(stream: IO[bytes]) -> None:
    deadline = time.monotonic() + _END_LIMIT_S
    while (left_s := deadline - time.monotonic()) > 0:
        readable, _, _ = select.select([stream], [], [], left_s)
        if readable and not os.read(stream.fileno(), 1024):
            return
