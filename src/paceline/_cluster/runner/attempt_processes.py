"""Attempts of a machine: a directory and a runner process for each wanted attempt.

The master loads this module, so it must not load the workers.
"""

import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from paceline._base.files import open_private
from paceline._base.run_directory import RunDirectory, RunInfo
from paceline._cluster.messages.runner_messages import AttemptSpec, MasterAddress, NodeLaunch
from paceline._cluster.messages.states import ExitReason
from paceline._cluster.runner.attempt_directory import AttemptDirectory, place_checkpoints
from paceline._cluster.runner.attempt_preparation import is_shortage
from paceline._cluster.runner.master_link import (
    MasterBackoff,
    MasterLink,
    RefusedByMasterError,
    UnreachableError,
    encode,
)
from paceline._cluster.runner.trial_memories import TrialMemories

if TYPE_CHECKING:
    from paceline._training.workers.processes.template_client import Template

logger = logging.getLogger(__name__)

_CAN_FORK = sys.platform == "linux" and hasattr(os, "pidfd_open")
# Token variable, removed from runners: attempts can read the environment of parent processes,
# and the token may be an administrator's.
_TOKEN_VARIABLE = "PACELINE_TOKEN"  # noqa: S105 - the name of a variable, no secret


class StartedRunner(ABC):
    """Runner started by this process."""

    @abstractmethod
    def is_alive(self) -> bool:
        """Return whether the runner is still alive."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the runner with SIGKILL, unless the runner has ended."""


CommandWrapper: TypeAlias = Callable[[int, list[str]], list[str]]
"""Return the command that starts the runner of an attempt, from the command of the runner alone."""


class RunnerHost:
    """Starter of runners, for a single thread; the template is started when needed.

    Args:
        cwd: Where runners work.
        wrap: Makes the command of each runner; None for runners forked without a command.
    """

    def __init__(self, cwd: Path, wrap: CommandWrapper | None = None) -> None:
        self._cwd = cwd
        self._wrap = wrap
        self._template: Template | None = None
        self._can_fork = _CAN_FORK and wrap is None

    def start(self, directory: AttemptDirectory, *, is_shipping: bool) -> StartedRunner:
        """Start a runner.

        Raises:
            OSError: It cannot be started.
        """
        # The first template may have left because it was idle.
        for is_last in (False, True) if self._can_fork else ():
            try:
                return self._fork(directory, is_shipping)
            except (OSError, RuntimeError, ValueError) as error:
                if is_shortage(error):
                    raise
                self.close()
                if is_last:
                    logger.warning("Runners start slowly, as new interpreters: %s", error)
                    self._can_fork = False
        return self._spawn(directory, is_shipping)

    def close(self) -> None:
        """End the template; its runners continue."""
        template, self._template = self._template, None
        if template is not None:
            template.close()

    def _fork(self, directory: AttemptDirectory, is_shipping: bool) -> StartedRunner:
        # Loaded late: most of it is for workers, which the master does not need.
        from paceline._training.workers.processes.templates import template_of_runners
        from paceline._training.workers.processes.worker_process import WorkerSpec

        environment = _environment_of_runners()
        template = self._template = self._template or template_of_runners(environment)
        spec = WorkerSpec(
            command=_command(directory, is_shipping),
            environment=environment,
            working_directory=self._cwd,
        )
        with open_private(directory.runner_log_path, "ab") as log, open(os.devnull, "rb") as null:
            streams = [null.fileno(), log.fileno(), log.fileno()]
            return _Forked(template.fork(spec, environment, streams)[1])

    def _spawn(self, directory: AttemptDirectory, is_shipping: bool) -> StartedRunner:
        command = _command(directory, is_shipping)
        if self._wrap is not None:
            command = self._wrap(int(directory.path.name), command)
        with open_private(directory.runner_log_path, "ab") as log:
            return _Spawned(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._cwd,
                    start_new_session=True,
                    env=_environment_of_runners(),
                )
            )


def _command(directory: AttemptDirectory, is_shipping: bool) -> list[str]:
    command = [sys.executable, "-m", "paceline._cluster.runner", str(directory.path)]
    return [*command, "--ship"] if is_shipping else command


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
    """Forked runner, watched by a descriptor; None for a runner already ended."""

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
                # Descriptor instead of the process id: the id may belong to another process by now.
                signal.pidfd_send_signal(self._watch, signal.SIGKILL)

    def __del__(self) -> None:
        if self._watch is not None:
            os.close(self._watch)


# How long an unwanted attempt may take to leave by itself: it has just ended, or gets the order
# soon.
_LEAVE_S = 10.0


class AttemptProcesses:
    """Attempts in ``<root>/<attempt id>/``: start, find, kill, clean up; for a single thread.

    Started runners continue without this process, and the next process finds them again.

    Args:
        root: The directory of the attempts' directories.
        cwd: Where runners work.
        wrap: Makes the command of each runner; None for runners forked without a command.
    """

    def __init__(self, root: Path, cwd: Path, wrap: CommandWrapper | None = None) -> None:
        self._root = root
        self._host = RunnerHost(cwd, wrap)
        self._children: dict[int, StartedRunner] = {}
        self._unwanted_at: dict[int, float] = {}
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._memories = TrialMemories(root)

    def prepare(
        self, spec: AttemptSpec, info: RunInfo, secrets: dict[str, str] | None = None
    ) -> None:
        """Write the directory of an attempt, unless the directory exists.

        Args:
            spec: All that the attempt's runner needs.
            info: All that the attempt's processes need.
            secrets: Values for a runner that does not see the home, which it removes.
        """
        path = self.directory(spec.attempt_id).path
        directory = AttemptDirectory.create(path, spec)
        if not directory.was_started:
            # A power cut may have left a part of an earlier preparation.
            shutil.rmtree(directory.run.path, ignore_errors=True)
        if secrets:
            directory.write_secrets(secrets)
        RunDirectory.create(directory.run.path, info)

    def start(self, attempt_id: int) -> None:
        """Start the runner of a prepared attempt; a started attempt is never run again."""
        # The runner names what is damaged.
        with suppress(OSError, ValueError):
            self._memories.give(self.directory(attempt_id).read_spec())
        self._start_runner(attempt_id, is_shipping=False)

    def ship(self, attempt_id: int) -> None:
        """Start a runner to send the reports left by a dead or departed runner."""
        self._start_runner(attempt_id, is_shipping=True)

    def is_prepared(self, attempt_id: int) -> bool:
        """Return whether an attempt's directory holds everything a runner needs."""
        return self.directory(attempt_id).is_prepared

    def is_alive(self, attempt_id: int) -> bool:
        """Return whether an attempt's runner is at work."""
        child = self._children.get(attempt_id)
        if child is not None:
            if child.is_alive():
                return True
            self._children.pop(attempt_id, None)
        # A process before this one may have started the runner.
        return self.directory(attempt_id).runner_pid() is not None

    def was_started(self, attempt_id: int) -> bool:
        """Return whether an attempt's entrypoint was ever started here."""
        return self.directory(attempt_id).was_started

    def sign_of_life(self, attempt_id: int) -> object:
        """Return when a runner last gave a sign of life."""
        return self.directory(attempt_id).sign_of_life()

    def kill_runner(self, attempt_id: int) -> None:
        """Kill a runner; its remaining processes are ended later, before the rest is shipped."""
        child = self._children.get(attempt_id)
        if child is not None and child.is_alive():
            # Runner without the lock yet: only its process handle can reach it.
            child.kill()
        else:
            self.signal_runner(attempt_id, signal.SIGKILL)

    def signal_runner(self, attempt_id: int, number: signal.Signals) -> None:
        """Send a signal to an active runner; a runner ending at this moment is ignored."""
        if pid := self.directory(attempt_id).runner_pid():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def all(self) -> list[int]:
        """Return the ids of all attempts with a directory, sorted."""
        return sorted(int(path.name) for path in self._paths())

    def clean(self, keep: set[int]) -> None:
        """Remove directories of ended attempts without a runner, except those in `keep`.

        A runner that does not leave by itself is killed after a while.
        """
        self._end_unwanted(keep)
        for attempt_id in list(self._children):
            if not self._children[attempt_id].is_alive():
                del self._children[attempt_id]
        for path in self._paths():
            if int(path.name) in keep | self._children.keys():
                continue
            directory = AttemptDirectory(path)
            if directory.runner_pid() is not None:
                continue
            if directory.was_started and not directory.has_end:
                # Runner lost after the master ended the attempt: nothing else ends its processes.
                self._end_leftovers(directory)
            if not _is_kept(directory):
                shutil.rmtree(path, ignore_errors=True)
        self._memories.sweep(lambda attempt_id: attempt_id in keep or self.is_alive(attempt_id))

    def close(self) -> None:
        """End the template; the runners continue."""
        self._host.close()
        self._memories.close(self.is_alive)

    def directory(self, attempt_id: int) -> AttemptDirectory:
        """Return the directory object of an attempt; the directory may not exist."""
        return AttemptDirectory(self._root / str(attempt_id))

    def _paths(self) -> Iterator[Path]:
        return (path for path in self._root.iterdir() if path.name.isdecimal())

    def _end_unwanted(self, wanted: set[int]) -> None:
        """Kill runners still alive some time after their attempts ended for the master."""
        now = time.monotonic()
        here = {id_ for id_ in self.all() if id_ not in wanted}
        for attempt_id in self._unwanted_at.keys() - here:
            del self._unwanted_at[attempt_id]
        for attempt_id in here:
            since = self._unwanted_at.setdefault(attempt_id, now)
            if now > since + _LEAVE_S and self.is_alive(attempt_id):
                logger.warning("Attempt %d is not wanted any more and is killed.", attempt_id)
                self.kill_runner(attempt_id)

    @staticmethod
    def _end_leftovers(directory: AttemptDirectory) -> None:
        # Seldom needed, and it loads more of the runner than the master needs.
        from paceline._cluster.runner.attempt_end import (
            end_leftovers,
            make_attempt_end,
            write_attempt_end,
        )

        end_leftovers(directory)
        write_attempt_end(directory, make_attempt_end(ExitReason.RUNNER_LOST))

    def _start_runner(self, attempt_id: int, *, is_shipping: bool) -> None:
        directory = self.directory(attempt_id)
        self._children[attempt_id] = self._host.start(directory, is_shipping=is_shipping)


def _is_kept(directory: AttemptDirectory) -> bool:
    try:
        return directory.is_prepared and directory.read_spec().keep_directory
    except (OSError, msgspec.DecodeError):
        return False  # damaged: nobody can use it


class WantedAttempts:
    """Reconciler of a node's processes with the master's wishes; for a single thread.

    Args:
        processes: The attempts of this machine.
        address_path: The file from which their runners read the address of the master.
        address: Returns that address with a token.

    Attributes:
        ids: The attempts that are wanted; None until the master has said it.
    """

    def __init__(
        self,
        processes: AttemptProcesses,
        address_path: Path,
        address: Callable[[str], MasterAddress],
    ) -> None:
        self._processes = processes
        self._address_path = address_path
        self._address = address
        self.ids: set[int] | None = None
        self._retry_at: dict[int, float] = {}
        self._pauses: dict[int, MasterBackoff] = {}

    def look_after(self, launches: dict[int, NodeLaunch], kill: list[int]) -> None:
        """Start, ship, kill and clean up attempts until the node matches the master's wishes."""
        if self.ids is None:
            return
        for attempt_id in kill:
            self._processes.kill_runner(attempt_id)
        for attempt_id in sorted(self.ids):
            self._look_after_one(attempt_id, launches.get(attempt_id))
        self._processes.clean(self.ids)
        for attempt_id in self._retry_at.keys() - self.ids:
            self._retry_at.pop(attempt_id, None)
            self._pauses.pop(attempt_id, None)

    def _look_after_one(self, attempt_id: int, launch: NodeLaunch | None) -> None:
        processes = self._processes
        is_prepared = processes.is_prepared(attempt_id)
        is_settled = processes.is_alive(attempt_id) if is_prepared else launch is None
        if is_settled or time.monotonic() < self._retry_at.get(attempt_id, 0.0):
            return
        pauses = self._pauses.setdefault(attempt_id, MasterBackoff(1.0, 30.0))
        self._retry_at[attempt_id] = time.monotonic() + pauses.next_s()
        try:
            if not is_prepared:
                assert launch is not None
                spec = msgspec.structs.replace(launch.spec, master=str(self._address_path))
                run = processes.directory(attempt_id).run
                spec, info = place_checkpoints(spec, launch.info, run)
                processes.prepare(spec, info, launch.secrets)
            if processes.was_started(attempt_id):
                processes.ship(attempt_id)
            else:
                processes.start(attempt_id)
        except Exception as error:
            logger.exception("Attempt %d cannot be started.", attempt_id)
            self._report_failure(attempt_id, launch, error)

    def _report_failure(self, attempt_id: int, launch: NodeLaunch | None, error: Exception) -> None:
        """Report an attempt's failed start to the master, to avoid waiting for its lease."""
        # Loaded late: it needs much that a runner without attempts does not.
        from paceline._cluster.runner.attempt_end import make_attempt_end
        from paceline._cluster.runner.attempt_preparation import judge_start

        if launch is None:
            return
        reason, kind = judge_start(error)
        end = make_attempt_end(reason, detail=f"{type(error).__name__}: {error}", kind=kind)
        address = self._address(launch.spec.token or "")
        try:
            path = f"/attempts/{attempt_id}/end?member={launch.spec.member}"
            sent = msgspec.structs.replace(end, sent_at=time.time())
            MasterLink(lambda: address).post(path, encode(sent))
        except (UnreachableError, RefusedByMasterError) as failure:
            logger.error("The end of attempt %d cannot be reported: %s", attempt_id, failure)
