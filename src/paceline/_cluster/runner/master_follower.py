"""Following of the master during an attempt: orders reach the processes in time."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from paceline._base.gpus import CUDA_VARIABLE, ask_gpu_program
from paceline._base.run_directory import Control, RunDirectory
from paceline._cluster.messages.runner_messages import AttemptControl
from paceline._cluster.messages.states import ExitReason
from paceline._cluster.runner.master_link import (
    MasterBackoff,
    MasterLink,
    RefusedByMasterError,
    UnreachableError,
)
from paceline._training.workers.processes.leftover_processes import use_by_marked
from paceline._training.workers.processes.local_worker_group import LocalGroup

logger = logging.getLogger(__name__)

KILL_GRACE_S = 5.0

_CONTROL_WAIT_S = 30.0
# A master that is about to leave answers at once, again and again.
_PAUSE_S = 0.1
_MEETING_TICK_S = 0.2
# A runner asked to leave by the system gives its attempt so long to checkpoint.
TERMINATION_S = 30.0
_NOT_FOUND = 404


_USE_SHARE = 0.05
_USE_BYTES_PER_S = 256 * 1024
# A look takes a while: shorter intervals would measure it.
_LEAST_INTERVAL_S = 1.0
_GPU_LIMIT_S = 5.0
_GPU_PROGRAM = """
import sys
sys.path[:] = sys.argv.pop(1).split(":")
from paceline._base.gpus import Nvml, visible_gpus
nvml, uuids = Nvml(), {gpu.uuid for gpu in visible_gpus()}
print(max(gpu.use_percent() for gpu in nvml.gpus if gpu.uuid in uuids))
"""


def gpu_variables(gpu_ids: Sequence[str]) -> dict[str, str]:
    """Return variables by which a process finds some GPUs, counted as nvidia-smi counts."""
    return {CUDA_VARIABLE: ",".join(gpu_ids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


class UseMeter:
    """Meter of the use of an attempt's slots on this node.

    An interval has use if its processes take 5 % of a core, or read and write 256 KiB/s, or if a
    GPU of theirs computes for 5 % of the time. Unknown use of a GPU counts as use.

    Args:
        mark: The mark of its processes; None if they have none.
        gpu_ids: Its GPUs, as in CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, mark: str | None, gpu_ids: Sequence[str]) -> None:
        self._mark, self._gpu_ids = mark, gpu_ids
        self._before: tuple[float, float, int] | None = None
        self._used_at = time.monotonic()

    def unused_s(self) -> float | None:
        """Return for how many seconds the slots have not been used; None if that is unknown."""
        if self._mark is None or sys.platform != "linux":
            return None
        now = time.monotonic()
        if self._before is None or now - self._before[0] >= _LEAST_INTERVAL_S:
            cpu_s, num_bytes = use_by_marked(self._mark)
            begin, cpu_before_s, bytes_before = self._before or (now, 0.0, 0)
            length_s, self._before = now - begin, (now, cpu_s, num_bytes)
            # Less than before: processes have ended, which is a sign of life.
            is_used = cpu_s < cpu_before_s or cpu_s - cpu_before_s >= _USE_SHARE * length_s
            is_used |= num_bytes - bytes_before >= _USE_BYTES_PER_S * length_s
            if is_used or self._uses_gpu():
                self._used_at = now
        return now - self._used_at

    def _uses_gpu(self) -> bool:
        if not self._gpu_ids:
            return False
        command = [sys.executable, "-c", _GPU_PROGRAM, ":".join(sys.path)]
        environment = {**os.environ, **gpu_variables(self._gpu_ids)}
        try:
            # Another process asks: a driver may hang.
            told = ask_gpu_program(command, None, limit_s=_GPU_LIMIT_S, environment=environment)
            return float(told.split()[-1]) >= 100 * _USE_SHARE
        except (OSError, ValueError, IndexError, subprocess.SubprocessError):
            return True


class MasterFollower:
    """Follower passing the master's orders on: the control file, and kills within their time.

    Args:
        run: The run directory of the attempt's processes.
        attempt_id: The attempt's number with the master.
        link: A connection of its own.
        member: Which of the attempt's nodes this is.
        port: A port that is free here, for an attempt on several nodes.
        sends_checkpoints: Whether this node does not share the checkpoint directory.
        first: The master's orders when it started the runner; None asks for them.
        give_sign: Gives a sign of life that needs no network; called again and again.
        measure: Returns for how many seconds the slots have not been used.
        on_return: Called when a master answers after one was away: its database may be another.
    """

    def __init__(
        self,
        run: RunDirectory,
        attempt_id: int,
        link: MasterLink,
        *,
        member: int = 0,
        port: int | None = None,
        sends_checkpoints: bool = False,
        first: AttemptControl | None = None,
        give_sign: Callable[[], object] = lambda: None,
        measure: Callable[[], float | None] = lambda: None,
        on_return: Callable[[], object] = lambda: None,
    ) -> None:
        self._run = run
        self._path = f"/attempts/{attempt_id}/control"
        self._link = link
        self._first = first
        self._member = member
        self._port = port
        self._has_own_disk = sends_checkpoints
        self._sends_checkpoints = False
        self._meeting_port: int | None = None
        self._has_met = threading.Event()
        self._begins = True
        self._give_sign = give_sign
        self._measure = measure
        self._on_return = on_return
        self._group: LocalGroup | None = None
        self._stop_grace_s: float | None = None
        self._has_lost = threading.Event()
        self._heard_at = 0.0
        # Reentrant, as a signal handler may interrupt itself.
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._has_left = threading.Event()
        # Version of the current orders; answers to two requests may arrive out of order.
        self._version = 0
        self._wanted = Control()
        self._judged: tuple[int, int] | None = None
        self._written: Control | None = None
        self._is_terminating = False
        self._write_timer: threading.Timer | None = None
        self._write_backoff = MasterBackoff()
        self._kill_timer: threading.Timer | None = None
        self._kill_at = float("inf")
        self._kill_reason: ExitReason | None = None

    @property
    def kill_reason(self) -> ExitReason | None:
        """Why the processes were asked to end, None if they were not."""
        return self._kill_reason

    @property
    def is_terminating(self) -> bool:
        """Whether the system has asked this runner to end."""
        return self._is_terminating

    @property
    def has_lost(self) -> bool:
        """Whether the master has ended the attempt, forbidding further starts and reports."""
        return self._has_lost.is_set()

    @property
    def meeting_port(self) -> int | None:
        """Where the nodes of the attempt meet, on the first of them; None until all are there."""
        return self._meeting_port

    @property
    def sends_checkpoints(self) -> bool:
        """Whether all nodes of the attempt send their checkpoints, known once all are there."""
        return self._sends_checkpoints

    def await_others(self) -> None:
        """Wait until all nodes of the attempt have met, or the attempt is over here."""
        while not self._has_met.wait(_MEETING_TICK_S):
            if self.has_lost or self._kill_reason is not None or self._wanted.should_preempt:
                return

    def lead(self, group: LocalGroup) -> None:
        """Take over the attempt's processes just before their start; earlier orders apply."""
        with self._lock:
            self._group = group
            if self._stop_grace_s is not None:
                group.request_stop(self._stop_grace_s)

    def await_permission(self, lease_s: float, since: float) -> None:
        """Wait until the attempt certainly still belongs to this runner.

        A runner that was held up may have lost it. Other runners start without asking a master.

        Args:
            lease_s: How long the master waits for a sign of life, in seconds; 0 if that is unknown.
            since: When the runner began, in seconds of the monotonic clock.
        """
        backoff = MasterBackoff()
        while lease_s and not self.has_lost:
            with self._lock:
                heard_at = max(self._heard_at, since)
            # Half of the lease is left to end the processes before another runner begins.
            if time.monotonic() < heard_at + lease_s / 2:
                return
            self._has_lost.wait(backoff.next_s())

    def start(self) -> None:
        """Begin to follow, in a thread of its own."""
        if self._first is not None:
            self._obey(self._first)
        threading.Thread(target=self._follow, name="control", daemon=True).start()

    def stop(self) -> None:
        """Stop passing orders on; polling continues as a sign of life for the master."""
        with self._lock:
            self._is_over.set()
            for timer in (self._write_timer, self._kill_timer):
                if timer is not None:
                    timer.cancel()

    def leave(self) -> None:
        """Ask no more; the thread may wait for an answer a while longer."""
        self._has_left.set()

    def pass_on(self, control: AttemptControl | None, judged: tuple[int, int]) -> None:
        """Inform the processes of a record judged by the search; callable from any thread.

        Args:
            control: The master's orders since then, None if that has not changed.
            judged: The generation and the sequence number of the record, of the chief's journal.
        """
        with self._lock:
            # Threads may come here in another order than their answers.
            self._judged = max(judged, self._judged or judged)
            if control is None:
                self._write()
            else:
                self._obey(control)

    def terminate(self) -> None:
        """Let the attempt checkpoint and leave, as the system shuts down; for signal handlers."""
        with self._lock:
            self._is_terminating = True
            self._kill_later(TERMINATION_S)
            self._write()

    def _follow(self) -> None:
        version = self._version
        is_away = False
        backoff = MasterBackoff()
        while not self._has_left.is_set():
            pause = _PAUSE_S
            try:
                self._give_sign()
                # Version 0 after an outage: a restarted master may know less; it answers at once.
                control = self._ask(0 if is_away else version)
                self._heard_at = time.monotonic()
                if is_away:
                    is_away = False
                    self._on_return()
                if control.version != version:
                    self._obey(control)
                    version, pause = control.version, 0.0
                self._mend()
                backoff.reset()
            except UnreachableError:
                is_away = True
                pause = backoff.next_s()
            except RefusedByMasterError as error:
                if error.is_over:
                    self._lose(error)
                    return
                if self._is_over.is_set():
                    return
                if error.status == _NOT_FOUND:
                    logger.error("The master no longer knows this attempt: %s", error)
                    return
                logger.error("The master refuses to say what it wants: %s", error)
                pause = backoff.next_s()
            except Exception:
                # Whatever it is, an attempt that nobody can stop any more would be worse.
                logger.exception("What the master wants could not be passed on; trying again.")
                pause = backoff.next_s()
            self._has_left.wait(pause)

    def _ask(self, version: int) -> AttemptControl:
        query = f"?after={version}&timeout_s={_CONTROL_WAIT_S}"
        if self._begins:
            query += "&begins=true" + (f"&port={self._port}" if self._port else "")
            query += "&sends_checkpoints=true" if self._has_own_disk else ""
        if self._member:
            query += f"&member={self._member}"
        if self._group is not None and (unused_s := self._measure()) is not None:
            query += f"&unused_s={unused_s:.3f}"
        reply = self._link.get(self._path + query, timeout_s=_CONTROL_WAIT_S + 10)
        # Cleared flag only after an answer: a failed first request must announce the start again.
        self._begins = False
        return msgspec.json.decode(reply, type=AttemptControl)

    def _obey(self, control: AttemptControl) -> None:
        if self._is_over.is_set():
            return
        # Before the file is written, which a full disk may prevent.
        if control.should_kill:
            self._kill(ExitReason.KILLED, control.kill_grace_s)
        elif control.should_preempt:
            self._kill_later(control.preempt_timeout_s)
        if control.meeting_port is not None:
            self._meeting_port = control.meeting_port
            self._sends_checkpoints = control.sends_checkpoints
            self._has_met.set()
        with self._lock:
            self._take_control(control)
            self._write()

    def _take_control(self, control: AttemptControl) -> None:
        # Answers may overtake each other.
        if control.version < self._version:
            return
        self._version = control.version
        self._wanted = Control(
            should_preempt=control.should_preempt,
            operation_length=control.operation_length,
            operations_closed=control.operations_closed,
            best_validation=control.best_validation,
        )

    def _write(self) -> None:
        """Write the control file, or try again later."""
        with self._lock:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None
            if self._is_over.is_set():
                return
            should_preempt = self._wanted.should_preempt or self._is_terminating
            control = msgspec.structs.replace(
                self._wanted, should_preempt=should_preempt, judged=self._judged
            )
            try:
                self._run.write_control(control)
                self._written = control
                self._write_backoff.reset()
            except OSError as error:
                logger.warning("The control file cannot be written yet: %s", error)
                self._write_timer = _start_timer(self._write_backoff.next_s(), self._write)

    def _mend(self) -> None:
        """Rewrite the control file if its content differs from the last written control."""
        with self._lock:
            if self._is_over.is_set() or self._written is None or self._write_timer is not None:
                return
            try:
                is_whole = self._run.read_control() == self._written
            except (OSError, msgspec.DecodeError):
                is_whole = False
            if not is_whole:
                logger.warning("The control file does not hold what was written; it is mended.")
                self._write()

    def _kill_later(self, timeout_s: float) -> None:
        """Kill the processes within `timeout_s`, including the grace time after SIGTERM."""
        with self._lock:
            kill_at = time.monotonic() + timeout_s
            # The earliest deadline counts.
            if kill_at >= self._kill_at or self._is_over.is_set():
                return
            if self._kill_timer is not None:
                self._kill_timer.cancel()
            self._kill_at = kill_at
            grace_s = min(KILL_GRACE_S, timeout_s / 2)
            self._kill_timer = _start_timer(
                timeout_s - grace_s, self._kill, ExitReason.PREEMPTION_TIMEOUT, grace_s
            )

    def _kill(self, reason: ExitReason, grace_s: float) -> None:
        # An order to kill outweighs a timeout.
        if self._kill_reason is None or reason is ExitReason.KILLED:
            self._kill_reason = reason
        with self._lock:
            earlier_s = grace_s if self._stop_grace_s is None else self._stop_grace_s
            self._stop_grace_s = min(grace_s, earlier_s)
            if self._group is not None:
                self._group.request_stop(grace_s)

    def _lose(self, error: RefusedByMasterError) -> None:
        """End the processes at once: another attempt of the trial may be at work."""
        with self._lock:
            if self._is_over.is_set():
                return
            self._has_lost.set()
        logger.error("The attempt was given away, so its processes end: %s", error)
        self._kill(ExitReason.KILLED, 0.0)


def _start_timer(
    delay_s: float, function: Callable[..., None], *arguments: object
) -> threading.Timer:
    # Timers refuse longer delays.
    timer = threading.Timer(min(delay_s, threading.TIMEOUT_MAX), function, arguments)
    timer.daemon = True
    timer.start()
    return timer
