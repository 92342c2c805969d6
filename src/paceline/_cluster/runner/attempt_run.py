"""Run of an attempt from preparation to the reported end, and the meeting point of its nodes."""

import contextlib
import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from paceline import faults
from paceline._base.process_and_network import PortReservation, interface_of
from paceline._base.run_directory import MEETING_PORT_VARIABLE, RUN_DIRECTORY_VARIABLE, RunDirectory
from paceline._base.run_memory import MEMORY_VARIABLES, TRIAL_MEMORY_VARIABLE
from paceline._cluster.messages.runner_messages import AttemptControl, AttemptEnd, AttemptSpec
from paceline._cluster.messages.states import ExitReason
from paceline._cluster.runner.attempt_directory import (
    FILE_NAME,
    AttemptDirectory,
    place_on_each_node,
    read_secret_file,
)
from paceline._cluster.runner.attempt_end import (
    make_attempt_end,
    read_attempt_finish,
    read_end,
    read_failing_store,
    report_failed_start,
    ship_end,
    ship_leftover_reports,
    write_attempt_end,
)
from paceline._cluster.runner.attempt_preparation import (
    UnusableConfigError,
    judge_start,
    sync_environment,
)
from paceline._cluster.runner.checkpoint_and_code_fetching import fetch_checkpoint, fetch_code
from paceline._cluster.runner.code_archive import (
    ArchiveLimits,
    ArchiveTooLargeError,
    unpack_archive,
)
from paceline._cluster.runner.interactive_task import InteractiveTask
from paceline._cluster.runner.master_follower import MasterFollower, UseMeter
from paceline._cluster.runner.master_link import MasterLink
from paceline._cluster.runner.output_spool import OutputSpool
from paceline._cluster.runner.record_shipping import Shipper
from paceline._cluster.runner.trial_memories import hold_memory, keep_memory
from paceline._training.workers.processes.local_worker_group import LocalGroup
from paceline._training.workers.processes.rank_environment import (
    SHARDS_VARIABLE,
    THREADS_MARK,
    THREADS_VARIABLE,
)
from paceline._training.workers.processes.template_client import FRESH_START_VARIABLE, Template
from paceline._training.workers.processes.worker_output import OutputLine
from paceline._training.workers.processes.worker_process import (
    ProcessHandle,
    WorkerSpec,
    start_process,
)
from paceline._training.workers.worker_failures import WorkerExit
from paceline.core._launcher_place import forget_launcher
from paceline.core._run_storage import discard_unfinished

logger = logging.getLogger(__name__)

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


class NodeGroup:
    """Nodes of an attempt, as seen by the runner on any of them.

    The runner of the first node keeps a port free on which the launchers of all nodes meet.

    Args:
        run: The run directory of the attempt on this node.
        spec: The attempt.
    """

    def __init__(self, run: RunDirectory, spec: AttemptSpec) -> None:
        self._run = run
        self.has_others = spec.num_members > 1
        is_first = self.has_others and spec.member == 0
        self._reservation = PortReservation() if is_first else None

    @property
    def port(self) -> int | None:
        """Reserved port of the first node for the meeting of all nodes; None on others."""
        return None if self._reservation is None else self._reservation.port

    def variables(self, port: int, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables for a launcher to find the other nodes.

        Args:
            port: Where the nodes meet.
            environment: The variables of the entrypoint.
        """
        found = {MEETING_PORT_VARIABLE: str(port)}
        info = self._run.read_info()
        # Gloo would take the address of the host's name, which others may not reach.
        if _INTERFACE_VARIABLE not in environment:
            interface = interface_of(info.container_addrs[info.container_rank])
            if interface is not None:
                found[_INTERFACE_VARIABLE] = interface
        return found

    def close(self) -> None:
        """Give the port back."""
        if self._reservation is not None:
            self._reservation.close()


faults.register("runner.prepared", "runner.started", "runner.ended")

# How long an entrypoint may be stopped, as by SIGSTOP, until it counts as lost.
_STOPPED_S = 30.0
_PRIVATE_VARIABLES = (
    "PACELINE_TOKEN",
    "PACELINE_TOKEN_FILE",
    "PACELINE_REPORT_TO",
    "PACELINE_MASTER",
    "PACELINE_HOME",
    "PACELINE_RESUME",
    "PACELINE_TEST_MODE",
)
# Final outcomes outranking the order to end, by kill reason. A process killed outright may have
# left early, but completed work must not be trained again.
_OUTCOMES_THAT_COUNT = {
    # Signal from outside the runner, for example by a system signalling all processes of a job.
    None: ("completed", "preempted"),
    ExitReason.KILLED: ("completed",),
    ExitReason.PREEMPTION_TIMEOUT: ("completed", "preempted"),
}


def run_attempt(directory: AttemptDirectory, template: Template | None = None) -> None:
    """Run a directory's attempt to its end; does nothing if another runner holds the lock.

    Args:
        directory: The attempt's directory.
        template: A template for the entrypoint, if there is one.
    """
    with directory.hold_lock() as is_mine:
        if not is_mine:
            return
        # An entrypoint starts once: a second runner only reports.
        if directory.was_started or read_end(directory) is not None:
            ship_leftover_reports(directory)
            return
        try:
            spec = directory.read_spec()
        except Exception as error:
            logger.exception("The attempt's specification cannot be read.")
            report_failed_start(directory, error)
            return
        AttemptRun(directory, spec, template).run()


def ship_attempt(directory: AttemptDirectory) -> None:
    """Send the unsent reports of a dead or departed runner; the attempt is over."""
    with directory.hold_lock() as is_mine:
        if is_mine:
            ship_leftover_reports(directory)


class AttemptRun:
    """Run of an attempt: worker group, shipping threads, and a thread following the master."""

    def __init__(
        self, directory: AttemptDirectory, spec: AttemptSpec, template: Template | None = None
    ) -> None:
        self._template = template
        self._directory = directory
        self._spec = spec
        self._link = MasterLink.of_attempt(spec)
        self._shipper = Shipper(
            directory,
            spec.attempt_id,
            self._link.another(),
            member=spec.member,
            on_judged=self._pass_on,
            is_first=True,
        )
        self._sends_checkpoints = spec.sends_checkpoints and spec.num_members == 1
        if self._sends_checkpoints:
            self._shipper.send_checkpoints()
        self._group = NodeGroup(directory.run, spec)
        self._task: InteractiveTask | None = None
        if spec.interactive:
            self._task = InteractiveTask(spec, directory.run, self._link.another())
        self._spool: OutputSpool | None = None
        self._secrets: dict[str, str] = {}
        self._begun_at = time.monotonic()
        self._num_oom_kills = _count_oom_kills()
        # Follower, ready before the processes run: their first reports may be judged at once.
        self._follower = MasterFollower(
            directory.run,
            spec.attempt_id,
            self._link.another(),
            member=spec.member,
            port=self._group.port,
            sends_checkpoints=spec.sends_checkpoints,
            first=spec.control,
            give_sign=directory.give_sign,
            measure=UseMeter(spec.mark, spec.gpu_ids).unused_s,
            on_return=self._shipper.doubt_positions,
        )

    def run(self) -> None:
        """Run to the end and send everything, or leave the rest for the next master."""
        self._shipper.start()
        end = self._run_entrypoint()
        end = msgspec.structs.replace(end, is_leaving=self._follower.is_terminating)
        self._follower.stop()
        self._group.close()
        discard_unfinished(self._directory.run)
        end = keep_memory(self._directory, end)
        # Written before anything is sent: if this runner is killed, the next one reports the same
        # end.
        write_attempt_end(self._directory, end)
        faults.reach("runner.ended")
        lost = None if self._spool is None else self._spool.finish()
        self._shipper.stop()
        if self._follower.has_lost:
            logger.error("The master has ended the attempt; nothing is sent for it any more.")
        else:
            ship_end(self._shipper, end, lost)
        self._follower.leave()
        if self._spool is not None:
            with contextlib.suppress(OSError):
                self._spool.close()

    def _pass_on(self, control: AttemptControl | None, judged: tuple[int, int]) -> None:
        self._follower.pass_on(control, judged)

    def _run_entrypoint(self) -> AttemptEnd:
        # Follower start before the preparation: unpacking a large context takes time.
        self._follower.start()
        try:
            group = self._start()
        except Exception as error:
            logger.exception("The attempt cannot start.")
            with contextlib.suppress(OSError):
                self._directory.mark_started()
            reason, kind = judge_start(error)
            return make_attempt_end(reason, detail=str(error) or type(error).__name__, kind=kind)
        if group is None:
            return make_attempt_end(
                self._follower.kill_reason or ExitReason.KILLED, detail="not started"
            )
        process = group.processes[0]
        try:
            self._directory.write_process(process.pgid, process.start_time)
        except OSError as error:
            logger.warning("The attempt's process cannot be noted: %s", error)
        faults.reach("runner.started")
        signal.signal(signal.SIGTERM, lambda _number, _frame: self._follower.terminate())
        if self._task is not None:
            self._task.start(group.request_stop)
        exits = group.wait()
        if self._task is not None:
            self._task.close()
        self._follower.stop()
        assert exits is not None
        return self._end(exits[0], self._follower.kill_reason)

    def _start(self) -> LocalGroup | None:
        """Start the entrypoint and return its group; None if the attempt is unwanted now."""
        self._secrets = self._read_secrets()
        hidden = [*self._secrets.values(), *([self._task.token] if self._task is not None else ())]
        self._spool = OutputSpool(self._directory.output_path, hidden)
        environment = self._environment()
        working_directory = self._prepare_directory()
        if working_directory is None:
            return None
        if self._spec.uses_uv:
            environment = sync_environment(
                working_directory, environment, self._tell, lambda: self._is_unwanted
            )
        if self._group.has_others:
            self._follower.await_others()
            if self._follower.meeting_port is None:
                return None
            environment |= self._group.variables(self._follower.meeting_port, environment)
            if self._follower.sends_checkpoints:
                place_on_each_node(self._directory.run)
                self._sends_checkpoints = True
                self._shipper.send_checkpoints()
        worker = WorkerSpec(
            command=self._command(),
            environment=environment,
            working_directory=working_directory,
            changes_session=self._spec.has_prefix,
        )
        self._fetch_start()
        faults.reach("runner.prepared")
        group = LocalGroup(
            [worker],
            self._spool.add,
            adopt_strays=True,
            heartbeat_timeout_s=_STOPPED_S,
            mark=self._spec.mark,
            start=self._start_process,
        )
        self._directory.mark_started()
        self._follower.await_permission(self._spec.lease_s, self._begun_at)
        if self._is_unwanted:
            return None
        self._follower.lead(group)
        group.start()
        return group

    def _end(self, exit_: WorkerExit, kill_reason: ExitReason | None) -> AttemptEnd:
        if self._task is not None and self._task.end_reason is not None and kill_reason is None:
            code = 0 if self._task.is_ready else 1
            return make_attempt_end(ExitReason.EXITED, code=code, detail=self._task.end_reason)
        if exit_.signal == signal.SIGTERM or (kill_reason is not None and _is_ours(exit_)):
            finish = read_attempt_finish(self._directory.run)
            if finish is not None and finish.outcome in _OUTCOMES_THAT_COUNT[kill_reason]:
                # Signal after finished work: it ended only a wrapping shell or later code.
                return make_attempt_end(ExitReason.EXITED, code=0, detail=exit_.error)
        reason = kill_reason or ExitReason.EXITED
        launch_error = None
        has_failed = exit_.is_failure and kill_reason is None
        if self._group.has_others or has_failed:
            launch_error = self._directory.run.read_launch_error()
        was_killed = exit_.signal == signal.SIGKILL or exit_.code == 128 + signal.SIGKILL
        detail = launch_error or _why_process_ended(exit_)
        # The count is that of the machine, so another trial may have been the one: only a hint.
        if has_failed and was_killed and _count_oom_kills() > self._num_oom_kills:
            told = "The system has ended a process for want of memory meanwhile, perhaps this one."
            detail = f"{detail} {told}" if detail else told
        return make_attempt_end(
            reason,
            code=exit_.code,
            signum=exit_.signal,
            detail=detail,
            is_launch_error=bool(launch_error),
            store=read_failing_store(self._directory.run) if has_failed else None,
        )

    def _read_secrets(self) -> dict[str, str]:
        spec = self._spec
        if not spec.secret_names:
            return {}
        if spec.home is None:
            found = self._directory.read_secrets()
        else:
            path = Path(spec.home) / FILE_NAME
            found = read_secret_file(path).get(spec.experiment_id or 0, {})
        missing = [name for name in spec.secret_names if name not in found]
        if missing:
            raise UnusableConfigError(
                f"`environment.secrets` must have a value for each name, but {', '.join(missing)}"
                f" has none in {FILE_NAME!r}, which no backup holds. Hint: fork the experiment"
                " with the values."
            )
        return {name: found[name] for name in spec.secret_names}

    def _prepare_directory(self) -> Path | None:
        """Unpack the code; return the working directory, None if the attempt is unwanted."""
        spec = self._spec
        target = self._directory.context_path
        target.mkdir(mode=0o700, exist_ok=True)
        if spec.context_digest is not None:
            name = f"{spec.context_digest}.tar.gz"
            if spec.home is not None:
                _unpack_code(Path(spec.home) / "contexts" / name, target)
            else:
                archive = self._directory.path / name
                is_there = fetch_code(
                    self._link,
                    spec.context_digest,
                    archive,
                    lambda: not self._is_unwanted,
                    self._tell,
                )
                if not is_there:
                    return None
                _unpack_code(archive, target)
                archive.unlink()
        if spec.working_dir is None:
            return target
        if not Path(spec.working_dir).is_dir():
            raise UnusableConfigError(
                f"`environment.working_dir` must be a directory, but got {spec.working_dir!r}."
            )
        return Path(spec.working_dir)

    def _tell(self, line: str) -> None:
        assert self._spool is not None
        self._spool.add(
            OutputLine(time=time.time(), rank=0, stream="stderr", level=None, text=line)
        )

    def _fetch_start(self) -> None:
        """Fetch the checkpoint to resume from, if only the master has the checkpoint."""
        uuid = self._directory.run.read_info().latest_checkpoint
        if self._sends_checkpoints and uuid is not None:
            target = self._directory.run.checkpoints_path
            fetch_checkpoint(
                self._link, self._spec.attempt_id, uuid, target, lambda: not self._is_unwanted
            )

    @property
    def _is_unwanted(self) -> bool:
        return self._follower.has_lost or self._follower.kill_reason is not None

    def _command(self) -> list[str]:
        entrypoint = self._spec.entrypoint
        return ["sh", "-c", entrypoint] if isinstance(entrypoint, str) else list(entrypoint)

    def _start_process(
        self, spec: WorkerSpec, environment: Mapping[str, str], is_read: bool
    ) -> ProcessHandle:
        """Start the entrypoint as a fork of the template if that is the same, else afresh."""
        template, self._template = self._template, None
        if template is None:
            return start_process(spec, environment, is_read)
        try:
            words = _plain_words(self._spec.entrypoint)
            warm = replace(spec, command=words or spec.command)
            reason = template.difference(warm, environment)
            if reason is None:
                return template.start((), warm, environment, is_read)
            return start_process(spec, {**environment, FRESH_START_VARIABLE: reason}, is_read)
        finally:
            template.close()

    def _environment(self) -> dict[str, str]:
        spec = self._spec
        python = shutil.which(spec.python)
        if python is None and not spec.has_prefix:
            raise UnusableConfigError(
                f"`environment.python` must be an interpreter, but {spec.python!r} is none."
            )
        environment = dict(os.environ)
        for name in (*_PRIVATE_VARIABLES, *MEMORY_VARIABLES, faults.FAULT_VARIABLE):
            environment.pop(name, None)
        # The runner may be a task of Slurm itself; its processes are not.
        forget_launcher(environment)
        if python is not None:
            # Interpreter directory, even if missing here: the command prefix may lead elsewhere.
            environment["PATH"] = os.pathsep.join(
                [str(Path(python).parent), environment.get("PATH", os.defpath)]
            )
        environment["PYTHONUNBUFFERED"] = "1"
        environment[THREADS_VARIABLE] = str(spec.num_threads)
        environment[THREADS_MARK] = str(spec.num_threads)
        if spec.gpu_ids:
            if "CUDA_VISIBLE_DEVICES" not in os.environ:
                # The numbers then count as nvidia-smi does; CUDA counts in another order.
                environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpu_ids)
            if "HIP_VISIBLE_DEVICES" in os.environ:
                # ROCm reads the other one unless there is this one.
                environment["HIP_VISIBLE_DEVICES"] = environment["CUDA_VISIBLE_DEVICES"]
        if spec.num_shards is not None:
            # An attempt on another number of slots continues with the same global batches.
            environment[SHARDS_VARIABLE] = str(spec.num_shards)
        environment |= spec.variables | self._secrets
        environment |= {} if self._task is None else self._task.variables
        if THREADS_VARIABLE in spec.variables:
            # The mark lets a launcher divide the number among its workers; the user's stays.
            environment.pop(THREADS_MARK, None)
        environment[RUN_DIRECTORY_VARIABLE] = str(self._directory.run.path)
        if (memory := hold_memory(self._directory, spec)) is not None:
            environment[TRIAL_MEMORY_VARIABLE] = memory
        return environment


# What a shell would leave as it is; a word with a sign of equality may set a variable.
_PLAIN = re.compile(r"[\w@%+:,./-]+(?: +[\w@%+=:,./-]+)*", re.ASCII)


def _plain_words(entrypoint: str | list[str]) -> list[str] | None:
    """Return the words of a command, or None if only a shell can read the command."""
    if not isinstance(entrypoint, str):
        return list(entrypoint)
    return entrypoint.split() if _PLAIN.fullmatch(entrypoint) else None


def _why_process_ended(exit_: WorkerExit) -> str | None:
    if exit_.error is None and exit_.silence is not None:
        return f"The entrypoint {exit_.silence}"
    return exit_.error


def _count_oom_kills() -> int:
    """Return how many processes the system has killed for want of memory since it started."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _is_ours(exit_: WorkerExit) -> bool:
    """Return whether the exit is explained by the runner's own signal alone."""
    ends = (signal.SIGTERM, signal.SIGKILL)
    return exit_.signal in ends or exit_.code in (0, *(128 + number for number in ends))


def _unpack_code(archive: Path, target: Path) -> None:
    limits = ArchiveLimits.from_environment()
    try:
        unpack_archive(archive, target, limits)
    except ArchiveTooLargeError:
        raise
    except Exception as error:
        # An archive that is cut short or damaged inside raises the decompressor's own errors.
        raise ValueError(
            f"The context {str(archive)!r} must be an archive that can be unpacked, but got"
            f" {type(error).__name__}: {error}. Hint: create the experiment again."
        ) from error
