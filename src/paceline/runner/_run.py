"""Running an attempt: prepare, start the entrypoint, follow the master, report the end."""

import logging
import os
import shutil
import signal
import tarfile
import threading
import time
import zlib
from pathlib import Path

import msgspec

from paceline.journal import RUN_DIRECTORY_VARIABLE, Control, JournalVersionError
from paceline.messages.attempts import AttemptControl, AttemptEnd
from paceline.messages.states import ExitReason
from paceline.runner._directory import AttemptDirectory
from paceline.runner._link import (
    Backoff,
    MasterLink,
    RefusedByMasterError,
    UnreachableError,
)
from paceline.runner._output import OutputSpool
from paceline.runner._ship import Shipper
from paceline.testing import faults
from paceline.workers import (
    THREADS_MARK,
    THREADS_VARIABLE,
    LocalGroup,
    WorkerSpec,
    WorkerStartError,
    kill_leftover,
)

logger = logging.getLogger(__name__)

faults.register("runner.started", "runner.ended", "runner.end_shipped")

_CONTROL_WAIT_S = 30.0
_KILL_GRACE_S = 5.0
# A runner asked to leave by the system gives its attempt so long to checkpoint.
_TERMINATION_S = 30.0
# How long a runner whose attempt has ended tries to reach a master before it leaves the rest to
# the next one.
_LAST_WORDS_S = 5.0
# The last two come from an archive that is cut short or damaged inside.
_START_ERRORS = (OSError, ValueError, tarfile.TarError, WorkerStartError, EOFError, zlib.error)
_PRIVATE_VARIABLES = ("PACELINE_TOKEN", "PACELINE_MASTER", "PACELINE_HOME", "PACELINE_RESUME")


def run_attempt(directory: AttemptDirectory) -> None:
    """Run the attempt of a directory to its end; does nothing if another runner has it."""
    with directory.hold_lock() as is_mine:
        if not is_mine:
            return
        if directory.read_end() is not None or directory.was_started:
            _ship_leftovers(directory)
            return
        AttemptRun(directory).run()


def ship_attempt(directory: AttemptDirectory) -> None:
    """Send what a runner that died or left has not sent; the attempt is over."""
    with directory.hold_lock() as is_mine:
        if is_mine:
            _ship_leftovers(directory)


def _ship_leftovers(directory: AttemptDirectory) -> None:
    spec = directory.read_spec()
    process = directory.read_process()
    if process is not None:
        kill_leftover(*process)
    end = directory.read_end()
    if end is None:
        end = AttemptEnd(reason=ExitReason.RUNNER_LOST, code=None, signal=None, time=time.time())
        directory.write_end(end)
    _ship_end(Shipper(directory, spec.attempt_id, MasterLink(Path(spec.home))), end)


def _ship_end(shipper: Shipper, end: AttemptEnd) -> None:
    """Send the rest and the end, or leave them for the next master."""
    deadline = time.monotonic() + _LAST_WORDS_S
    backoff = Backoff()
    is_rest_usable = True
    while True:
        try:
            if is_rest_usable:
                shipper.ship_rest()
            shipper.ship_end(end)
            faults.reach("runner.end_shipped")
            return
        except UnreachableError as error:
            shipper.forget_positions()
            if time.monotonic() > deadline:
                logger.info("The master is away (%s); the next one will ship the rest.", error)
                return
            time.sleep(backoff.next_s())
        except (RefusedByMasterError, JournalVersionError, OSError) as error:
            logger.error("What the attempt left cannot be sent: %s", error)
            if not is_rest_usable:
                return
            # The end must arrive all the same, or the trial would wait for it for ever.
            is_rest_usable = False
            end = _failed_end(end, f"What the attempt reported cannot be stored: {error}")


def _failed_end(end: AttemptEnd, why: str) -> AttemptEnd:
    detail = why if end.detail is None else f"{end.detail} {why}"
    return msgspec.structs.replace(end, code=end.code or 1, detail=detail)


class AttemptRun:
    """One attempt: a worker group of one, a thread that ships, and one that follows the master."""

    def __init__(self, directory: AttemptDirectory) -> None:
        self._directory = directory
        self._spec = directory.read_spec()
        home = Path(self._spec.home)
        self._shipper = Shipper(directory, self._spec.attempt_id, MasterLink(home))
        self._control_link = MasterLink(home)
        self._group: LocalGroup | None = None
        self._kill_timer: threading.Timer | None = None
        self._kill_at = float("inf")
        self._kill_reason: ExitReason | None = None
        self._is_over = threading.Event()
        # Reentrant, as a signal handler may interrupt itself.
        self._control_lock = threading.RLock()
        self._is_terminating = False

    def run(self) -> None:
        """Run to the end and send everything, or leave it where the next master finds it."""
        shipping = threading.Thread(target=self._ship, name="shipper", daemon=True)
        shipping.start()
        following = threading.Thread(target=self._follow_master, name="control", daemon=True)
        end = self._run_entrypoint(following)
        self._is_over.set()
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self._directory.write_end(end)
        faults.reach("runner.ended")
        self._shipper.stop()
        shipping.join()
        _ship_end(self._shipper, end)

    def _ship(self) -> None:
        try:
            self._shipper.run()
        except Exception:
            # Training goes on; the end is reported all the same, and says what was refused.
            logger.exception("Shipping stopped.")
            self._shipper.forget_positions()

    def _run_entrypoint(self, following: threading.Thread) -> AttemptEnd:
        spool = OutputSpool(self._directory.output_path)
        try:
            working_directory = self._prepare_directory()
            worker = WorkerSpec(
                command=self._command(),
                environment=self._environment(),
                working_directory=working_directory,
            )
            group = LocalGroup([worker], spool.add, adopt_strays=True, grace_s=_KILL_GRACE_S)
            self._directory.mark_started()
            group.start()
        except _START_ERRORS as error:
            self._directory.mark_started()
            spool.close()
            return _end(ExitReason.START_FAILED, detail=str(error))
        process = group.processes[0]
        self._directory.write_process(process.pgid, process.start_time)
        faults.reach("runner.started")
        self._group = group
        signal.signal(signal.SIGTERM, self._on_termination)
        following.start()
        exits = group.wait()
        spool.close()
        assert exits is not None
        reason = self._kill_reason or ExitReason.EXITED
        return _end(reason, code=exits[0].code, signum=exits[0].signal, detail=exits[0].error)

    def _prepare_directory(self) -> Path:
        spec = self._spec
        target = self._directory.context_path
        target.mkdir(mode=0o700, exist_ok=True)
        if spec.context_digest is not None:
            archive = Path(spec.home) / "contexts" / f"{spec.context_digest}.tar.gz"
            with tarfile.open(archive) as tar:
                tar.extractall(target, filter="data")  # the filter refuses escapes
        if spec.working_dir is None:
            return target
        if not Path(spec.working_dir).is_dir():
            raise NotADirectoryError(
                f"`environment.working_dir` must be a directory, but got {spec.working_dir!r}."
            )
        return Path(spec.working_dir)

    def _command(self) -> list[str]:
        entrypoint = self._spec.entrypoint
        return ["sh", "-c", entrypoint] if isinstance(entrypoint, str) else list(entrypoint)

    def _environment(self) -> dict[str, str]:
        spec = self._spec
        python = shutil.which(spec.python)
        if python is None:
            raise FileNotFoundError(
                f"`environment.python` must be an interpreter, but {spec.python!r} is none."
            )
        environment = dict(os.environ)
        for name in (*_PRIVATE_VARIABLES, faults.FAULT_VARIABLE):
            environment.pop(name, None)
        environment["PATH"] = os.pathsep.join(
            [str(Path(python).parent), environment.get("PATH", os.defpath)]
        )
        environment["PYTHONUNBUFFERED"] = "1"
        environment[THREADS_VARIABLE] = str(spec.num_threads)
        environment[THREADS_MARK] = str(spec.num_threads)
        if spec.gpu_ids:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpu_ids)
        environment |= spec.variables
        if THREADS_VARIABLE in spec.variables:
            # The mark lets a launcher divide the number among its workers; the user's stays.
            environment.pop(THREADS_MARK, None)
        environment[RUN_DIRECTORY_VARIABLE] = str(self._directory.run.path)
        return environment

    # ---- following the master ------------------------------------------------------------

    def _follow_master(self) -> None:
        version = 0
        backoff = Backoff()
        while not self._is_over.is_set():
            path = (
                f"/attempts/{self._spec.attempt_id}/control"
                f"?after={version}&timeout_s={_CONTROL_WAIT_S}"
            )
            try:
                reply = self._control_link.get(path, timeout_s=_CONTROL_WAIT_S + 10)
                backoff.reset()
            except UnreachableError:
                self._is_over.wait(backoff.next_s())
                continue
            except RefusedByMasterError:
                logger.exception("The master no longer knows this attempt.")
                return
            control = msgspec.json.decode(reply, type=AttemptControl)
            if control.version != version:
                version = control.version
                self._obey(control)

    def _obey(self, control: AttemptControl) -> None:
        assert self._group is not None
        with self._control_lock:
            should_leave = control.should_preempt or control.should_kill or self._is_terminating
            self._directory.run.write_control(
                Control(
                    should_preempt=should_leave,
                    operation_length=control.operation_length,
                    operations_closed=control.operations_closed,
                    best_validation=control.best_validation,
                )
            )
        if control.should_kill:
            self._kill(ExitReason.KILLED)
        elif control.should_preempt:
            self._kill_later(control.preempt_timeout_s)

    def _kill_later(self, timeout_s: float) -> None:
        kill_at = time.monotonic() + timeout_s
        if kill_at >= self._kill_at:
            return
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self._kill_at = kill_at
        self._kill_timer = threading.Timer(timeout_s, self._kill, [ExitReason.PREEMPTION_TIMEOUT])
        self._kill_timer.daemon = True
        self._kill_timer.start()

    def _kill(self, reason: ExitReason) -> None:
        assert self._group is not None
        self._kill_reason = self._kill_reason or reason
        self._group.request_stop(_KILL_GRACE_S)

    def _on_termination(self, _signum: int, _frame: object) -> None:
        """Let the attempt checkpoint and leave when the system shuts down."""
        with self._control_lock:
            self._is_terminating = True
            control = self._directory.run.read_control()
            self._directory.run.write_control(msgspec.structs.replace(control, should_preempt=True))
        self._kill_later(_TERMINATION_S)


def _end(
    reason: ExitReason,
    *,
    code: int | None = None,
    signum: int | None = None,
    detail: str | None = None,
) -> AttemptEnd:
    return AttemptEnd(reason=reason, code=code, signal=signum, time=time.time(), detail=detail)
