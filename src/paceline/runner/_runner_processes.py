"""Starting runners on this machine: forked from a process that has them loaded, or as new ones."""

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

from paceline._private_files import open_private
from paceline.runner._attempt_directory import AttemptDirectory
from paceline.runner._start_errors import is_shortage

logger = logging.getLogger(__name__)

_CAN_FORK = sys.platform == "linux" and hasattr(os, "pidfd_open")
# What a host may take for its first answer, as it loads, and for each later one.
_FIRST_ANSWER_S = 60.0
_ANSWER_S = 10.0
_MAX_ANSWER_BYTES = 4096
# It may be an administrator's, and attempts can read the environment of what is above them.
_TOKEN_VARIABLE = "PACELINE_TOKEN"  # noqa: S105 - the name of a variable, no secret


class StartedRunner(ABC):
    """A runner that this process has started."""

    @abstractmethod
    def is_alive(self) -> bool:
        """Tell whether it has not ended."""

    @abstractmethod
    def kill(self) -> None:
        """Kill it with SIGKILL, unless it has ended."""


class RunnerHost:
    """Start runners; used by one thread. The process that forks them is started when needed.

    Args:
        cwd: Where runners work.
    """

    def __init__(self, cwd: Path) -> None:
        self._cwd = cwd
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._can_fork = _CAN_FORK

    def start(self, directory: AttemptDirectory, *, is_shipping: bool) -> StartedRunner:
        """Start a runner.

        Raises:
            OSError: It cannot be started.
        """
        # The first host may have left because it was idle.
        for is_last in (False, True) if self._can_fork else ():
            try:
                return self._fork(directory, is_shipping)
            except (OSError, ValueError) as error:
                if is_shortage(error):
                    raise
                self.close()
                if is_last:
                    logger.warning("Runners start slowly, as new interpreters: %s", error)
                    self._can_fork = False
        return self._spawn(directory, is_shipping)

    def close(self) -> None:
        """End the process that forks runners; the runners go on."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    def _fork(self, directory: AttemptDirectory, is_shipping: bool) -> StartedRunner:
        wait_s = _ANSWER_S if self._control else _FIRST_ANSWER_S
        control = self._control or self._begin()
        request = {
            "directory": str(directory.path),
            "ship": is_shipping,
            "log": str(directory.runner_log_path),
            "cwd": str(self._cwd),
        }
        control.send(json.dumps(request).encode())
        if not select.select([control], [], [], wait_s)[0]:
            raise TimeoutError(f"the process that forks them is silent for {wait_s:g} s")
        data, descriptors, _, _ = socket.recv_fds(control, _MAX_ANSWER_BYTES, 1)
        if not data:
            raise ConnectionResetError("the process that forks them has ended")
        answer = json.loads(data)
        if "errno" in answer:
            raise OSError(answer["errno"], f"A runner cannot be forked: {answer['error']}")
        return _Forked(descriptors[0] if descriptors else None)

    def _begin(self) -> socket.socket:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.runner", "--host", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                cwd=self._cwd,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                env=_environment_of_runners(),
            )
        return self._control

    def _spawn(self, directory: AttemptDirectory, is_shipping: bool) -> StartedRunner:
        with open_private(directory.runner_log_path, "ab") as log:
            return _Spawned(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "paceline.runner", str(directory.path)),
                        *(["--ship"] if is_shipping else []),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._cwd,
                    start_new_session=True,
                    env=_environment_of_runners(),
                )
            )


def _environment_of_runners() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != _TOKEN_VARIABLE}


class _Spawned(StartedRunner):
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()


class _Forked(StartedRunner):
    """A runner whose end a descriptor tells; None if it has ended already."""

    def __init__(self, watch: int | None) -> None:
        self._watch = watch

    def is_alive(self) -> bool:
        if self._watch is None:
            return False
        poll = select.poll()
        poll.register(self._watch, select.POLLIN)
        if not poll.poll(0):
            return True
        os.close(self._watch)
        self._watch = None
        return False

    def kill(self) -> None:
        if self._watch is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._watch, signal.SIGKILL)

    def __del__(self) -> None:
        if self._watch is not None:
            os.close(self._watch)
