"""A process that waits for the end of this one, and ends what its workers leave if it is killed."""

import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from paceline.workers.processes._leftover_processes import (
    GROUP_VARIABLE,
    end_marked,
    nested_group_mark,
)
from paceline.workers.processes._signals import JOB_SIGNALS


@contextmanager
def sweeping_after_kill() -> Iterator[dict[str, str]]:
    """Have what workers started ended by another process if this one is killed within the block.

    Workers end with this process by themselves, but what they have started does not. To be entered
    before this process starts threads, as it forks.

    Yields:
        The variables that mark what is to be ended, for the environment of the workers.
    """
    if sys.platform != "linux":
        yield {}
        return
    group_id = secrets.token_hex(8)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            _await_end(ours, theirs, group_id)
        finally:
            os._exit(0)
    theirs.close()
    try:
        yield {GROUP_VARIABLE: nested_group_mark(group_id, os.environ.get(GROUP_VARIABLE))}
    finally:
        with ours, suppress(OSError):
            ours.send(b"\0")
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _await_end(other: socket.socket, own: socket.socket, group_id: str) -> None:
    # It has to outlive what is sent to the whole job.
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Whoever reads this process's output waits for no more than its own end.
    other.close()
    silence = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(silence, standard)
    os.closerange(3, own.fileno())
    os.closerange(own.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    if not own.recv(1):
        end_marked(group_id)
