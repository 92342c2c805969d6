"""Fork server: a process with the runner loaded, for starting runners without delay.

It has one thread and knows nothing of masters. It ends with the one that started it, and its
runners continue.
"""

import ctypes
import gc
import json
import logging
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline._training.workers.processes.worker_process import prepare_start

# Numbers of Linux's prctl.
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
# An idle host keeps memory for nobody.
_IDLE_S = 600.0
_MAX_MESSAGE_BYTES = 65536
# Modules imported lazily elsewhere, loaded here to save time in each runner.
_LOADED_LATE = ("gzip", "encodings.idna")


def serve_runners(control_number: int) -> tuple[Path, bool] | None:
    """Fork runners on request until the requester is gone; returns a directory only in runners.

    Args:
        control_number: The descriptor of the socket on which requests arrive: a directory, whether
            to ship only, a file for output and the working directory. The answer is a process id,
            with a descriptor that closes at the end, or the number and text of an error.

    Returns:
        The directory of an attempt, and whether to ship only; None once nobody asks any more.
    """
    control = socket.socket(fileno=control_number)
    control.set_inheritable(False)
    libc = ctypes.CDLL(None, use_errno=True)
    # A host that is stopped shall go as well.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for name in _LOADED_LATE:
        import_module(name)
    prepare_start()
    # Nobody else asks how a runner ended, so that the system may forget it at once.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    # Frozen objects stay in memory pages shared with the runners: no collection writes to them.
    gc.freeze()
    while select.select([control], [], [], _IDLE_S)[0]:
        data = control.recv(_MAX_MESSAGE_BYTES)
        if not data:
            return None
        request = json.loads(data)
        try:
            pid = os.fork()
        except OSError as error:
            control.send(json.dumps({"errno": error.errno, "error": str(error)}).encode())
            continue
        if pid == 0:
            control.close()
            _become_runner(request)
            libc.prctl(_PR_SET_NAME, f"runner-{Path(request['directory']).name}".encode(), 0, 0, 0)
            return Path(request["directory"]), bool(request["ship"])
        _answer_with_runner(control, pid)
    return None


def _answer_with_runner(control: socket.socket, pid: int) -> None:
    answer = json.dumps({"pid": pid}).encode()
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        control.send(answer)
        return
    socket.send_fds(control, [answer], [watch])
    # Receiver has its own copy: an open descriptor here would leak for each runner.
    os.close(watch)


def _become_runner(request: dict[str, Any]) -> None:
    """Set this process up as a new interpreter would have been."""
    os.setsid()
    # Default action again: with SIGCHLD ignored, the runner could not wait for its children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    os.chdir(request["cwd"])


def leave_forked_runner() -> None:
    """End a forked runner without cleanup: its resources need no tidying."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)
