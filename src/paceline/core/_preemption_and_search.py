"""Preemption, and the search's operations and decisions, from the runner's control file."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import msgspec

from paceline._base import journal_records as records
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.run_directory import Control, RunDirectory, configured_length
from paceline.core._arguments import PreemptMode
from paceline.core._distributed_context import DistributedContext

logger = logging.getLogger(__name__)

# A file that was written so short a time ago may be replaced by one with the same time and number.
_SETTLED_NS = 100_000_000


class ControlFile:
    """Reader of a run directory's `control.json`; an unchanged file costs only a `stat` per read.

    A damaged file says nothing; the runner writes it anew.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._path = os.fspath(run.control_path)
        self._identity: tuple[int, int] | None = None
        self._is_settled = False
        self._control = Control()
        self._num_changes = 0

    @property
    def num_changes(self) -> int:
        """The number of changed control files found by `read` so far."""
        return self._num_changes

    def read(self) -> Control:
        """Return the runner's latest message, or the defaults before the first message."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return self._control
        # The file is replaced as a whole: a new inode or time means new content.
        identity = (status.st_ino, status.st_mtime_ns)
        if identity != self._identity or not self._is_settled:
            self._take_control(identity)
        return self._control

    def _take_control(self, identity: tuple[int, int]) -> None:
        is_settled = time.time_ns() - identity[1] > _SETTLED_NS
        try:
            control = self._run.read_control()
        except msgspec.DecodeError as error:
            control = self._control
            if identity != self._identity:
                logger.warning("%s is damaged (%s), and says nothing.", self._path, error)
        self._num_changes += identity != self._identity or control != self._control
        self._control, self._identity, self._is_settled = control, identity, is_settled


DECISION_TIMEOUT_S = 10.0
"""How long a training process waits for a search's decision at most."""

_POLL_S = 0.002


class SearchDecision:
    """Newest report pending a search's decision, with a bounded wait for the decision.

    The chief's process reports and waits. Once a decision has not come in time, no later one is
    waited for until the runner has written the control file again.

    Args:
        control: The runner's decisions.
        generation: The generation of this process's journal.
        metrics: The validation metrics that the search needs to judge a report; None if there is
            no search that stops trials.
    """

    def __init__(
        self, *, control: ControlFile, generation: int, metrics: Sequence[str] | None
    ) -> None:
        self._control = control
        self._generation = generation
        self._metrics = metrics
        self._lock = threading.Lock()
        self._pending: tuple[int, int] | None = None
        self._pending_step = 0
        # How often the control file had changed when a decision failed to come.
        self._silent_at: int | None = None

    @property
    def metrics(self) -> Sequence[str] | None:
        """The validation metrics needed by the search; None if no search stops trials."""
        return self._metrics

    @property
    def is_expected(self) -> bool:
        """Whether the search judges validation reports, the same on every rank."""
        return self._metrics is not None

    def expect_none(self) -> None:
        """Stop waiting for decisions on reports: the search judges whole operations instead."""
        self._metrics = self._pending = None

    def reported(self, sequence: int, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Note a validation report.

        Args:
            sequence: The number of its record in the journal.
            steps_completed: The step of the report.
            metrics: All that was reported of that step, encoded.
        """
        # The search judges only reports with all its metrics; a wait for another one would never
        # end.
        if self._metrics is None or not all(_is_number(metrics.get(n)) for n in self._metrics):
            return
        with self._lock:
            self._pending = (self._generation, sequence)
            self._pending_step = steps_completed

    def wait(self, is_over: Callable[[], bool]) -> bool:
        """Wait until the newest report is decided on, for `DECISION_TIMEOUT_S` at most.

        Args:
            is_over: Tells whether there is nothing to wait for any more, such as after a signal.

        Returns:
            Whether there was a report to wait for.
        """
        with self._lock:
            pending, self._pending = self._pending, None
        if pending is None or self._is_silent():
            return False
        deadline = time.monotonic() + DECISION_TIMEOUT_S
        # Pairs of generation and record number: they compare in order of writing.
        while not is_over() and (self._control.read().judged or (-1, -1)) < pending:
            if time.monotonic() >= deadline:
                self._silent_at = self._control.num_changes
                logger.warning(
                    "The search's decision on the validation at step %d has not come within %g s."
                    " Training goes on, and waits for no other decision until the master answers"
                    " again.",
                    self._pending_step,
                    DECISION_TIMEOUT_S,
                )
                break
            time.sleep(_POLL_S)
        return True

    def _is_silent(self) -> bool:
        """Return whether nothing has come from the runner since a decision failed to come."""
        self._control.read()
        return self._silent_at == self._control.num_changes


def _is_number(value: Any) -> bool:
    return type(records.decode_value(value)) in (int, float)


_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_INTERRUPTED = "Finishing this batch and storing a checkpoint; press Ctrl-C again to leave now."


class PreemptContext:
    """Ask whether to checkpoint and leave.

    The answer turns True when the runner says so, or after SIGTERM or SIGUSR1. With several ranks
    all must call equally often: each call takes the answer of all, so a signal to any rank counts.
    `core.init(preempt_mode=)` has other ways, see `PreemptMode`.

    Where a search may stop the trial, the first call after a validation report waits for the
    search's decision on it, `DECISION_TIMEOUT_S` at most. If the decision does not come in time,
    later calls do not wait until something comes from the master again. Without such a search, and
    after any other report, no call waits.
    """

    def __init__(
        self,
        *,
        control: ControlFile,
        decision: SearchDecision,
        distributed: DistributedContext,
        journal: JournalWriter,
        mode: PreemptMode = PreemptMode.WorkersAskChief,
        is_supervised: bool = False,
    ) -> None:
        self._mode = mode
        self._control = control
        self._decision = decision
        self._distributed = distributed
        self._journal = journal
        # Message of Ctrl-C only on rank 0: every rank gets the signal, a single message suffices.
        self._signals = SignalWatch(is_quiet=distributed.rank != 0, is_supervised=is_supervised)
        self._is_installed = False
        self._is_preempted = False
        self._is_acknowledged = False

    @property
    def is_acknowledged(self) -> bool:
        """Whether the user's code was asked to leave, and will resume later."""
        return self._is_acknowledged

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Return True when the code should store a checkpoint and leave; True stays True.

        The first call, if it comes from the main thread, takes over SIGTERM and SIGUSR1: the
        first such signal turns the answer to True, and a second one has its default action.

        Args:
            auto_ack: Take a True answer as acknowledged. Without it, call
                `acknowledge_preemption_signal()` before leaving.

        Raises:
            DistributedTimeoutError: The chief did not answer in time.
            RuntimeError: This process is not the chief, in the mode `ChiefOnly`.
        """
        rank = self._distributed.rank
        if self._mode is PreemptMode.ChiefOnly and rank != 0:
            raise RuntimeError(
                "Only the chief may call `should_preempt()` in the mode `PreemptMode.ChiefOnly`,"
                f" but rank {rank} did. Hint: guard it by `if context.distributed.rank == 0:`, or"
                " leave out `preempt_mode`."
            )
        self.watch_signals()
        if not self._is_preempted:
            if self._mode is PreemptMode.WorkersAskChief:
                # A signal may reach any rank, as where the node of one is drained.
                answer = self.is_wanted() if rank == 0 else self.has_signal
                self._is_preempted = any(self._distributed.allgather(answer))
            else:
                self._is_preempted = self.is_wanted()
        if self._is_preempted and auto_ack and not self._is_acknowledged:
            self.acknowledge_preemption_signal()
        return self._is_preempted

    def acknowledge_preemption_signal(self) -> None:
        """Record the user code's intention to leave because of the preemption.

        Raises:
            RuntimeError: `should_preempt()` has not returned True.
        """
        if not self._is_preempted:
            raise RuntimeError(
                "A preemption must be acknowledged after `should_preempt()` has returned True,"
                " but it has not."
            )
        if not self._is_acknowledged:
            self._is_acknowledged = True
            if self._distributed.rank == 0:
                self._journal.append(records.PreemptionAcknowledged(time=time.time()))

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C interrupted this process while SIGINT was watched."""
        return self._signals.is_interrupted

    def watch_signals(self, interrupt: bool = False) -> None:
        """Take over SIGTERM and SIGUSR1, as the first `should_preempt()` does.

        Args:
            interrupt: Whether to watch for SIGINT, until `release_interrupt()`: the first Ctrl-C
                then preempts, and a second one raises KeyboardInterrupt. A handler that the user
                has set stays.
        """
        if not self._is_installed:
            self._is_installed = True
            self._signals.install()
        if interrupt:
            self._signals.install_interrupt()

    def release_interrupt(self) -> None:
        """Restore the previous SIGINT handler; does nothing if SIGINT is not watched."""
        self._signals.restore(signal.SIGINT)

    @property
    def has_signal(self) -> bool:
        """Whether this process has received a watched signal."""
        return self._signals.has_come

    def settle(self) -> None:
        """Accept and acknowledge a preemption agreed on by the ranks by other means."""
        self._is_preempted = True
        self.acknowledge_preemption_signal()

    @property
    def follows_search(self) -> bool:
        """Whether a validation may stop the trial, the same on every rank."""
        return self._decision.is_expected

    def is_wanted(self) -> bool:
        """Return whether this process itself knows of a preemption, without asking the chief.

        Like `should_preempt`, it waits for the search's decision on the report of this process.
        """
        if not self._is_known():
            self._decision.wait(self._is_known)
        return self._is_known()

    def _is_known(self) -> bool:
        return self._is_preempted or self._signals.has_come or self._control.read().should_preempt

    def close(self) -> None:
        """Give the signals back."""
        self._signals.restore()


class SignalWatch:
    """Handler of the first signal, restoring the default or previous action for a second signal.

    After SIGTERM and SIGUSR1 that is their default action, after SIGINT a KeyboardInterrupt.

    Args:
        is_quiet: Whether to leave out the message that answers a Ctrl-C.
        is_supervised: Whether a runner kills this process if it does not leave in time. SIGTERM and
            SIGUSR1 then do nothing a second time: Slurm, srun and launchers each send them.
    """

    def __init__(self, *, is_quiet: bool = False, is_supervised: bool = False) -> None:
        self.has_come = False
        self.is_interrupted = False
        self._is_quiet = is_quiet
        self._is_supervised = is_supervised
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {}
        self._ours: dict[int, Any] = {}

    def install(self, numbers: Iterable[int] = _SIGNALS) -> None:
        """Install handlers for signals; outside the main thread only log a warning.

        Args:
            numbers: SIGTERM, SIGUSR1 or both.
        """
        # Python allows handlers in the main thread only.
        if not _is_main_thread():
            logger.warning(
                "`should_preempt()` was first called outside the main thread, so SIGTERM and"
                " SIGUSR1 keep their action and do not preempt."
            )
            return
        for number in numbers:
            self._take_over(number)

    def install_interrupt(self) -> None:
        """Take over SIGINT, unless someone else has or this is not the main thread."""
        if _is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._take_over(signal.SIGINT)

    def restore(self, *numbers: int) -> None:
        """Put the previous handlers back, except where someone else has changed them since.

        Args:
            numbers: The signals; all by default.
        """
        if not _is_main_thread():
            return
        for number in numbers or tuple(self._previous):
            previous = self._previous.pop(number, None)
            # None stands for a handler that was not installed from Python.
            if previous is not None and signal.getsignal(number) == self._ours[number]:
                signal.signal(number, previous)

    def _take_over(self, number: int) -> None:
        self._previous[number] = signal.getsignal(number)
        self._ours[number] = self._handle
        signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Forked children, such as workers of a data loader, inherit this handler.
        is_forked = os.getpid() != self._pid
        self.has_come = True
        for watched, ours in self._ours.items():
            if signal.getsignal(watched) == ours:
                # All watched signals change together: the second signal may be of another kind.
                self._ours[watched] = self._second_action(watched)
                signal.signal(watched, self._ours[watched])
        if number == signal.SIGINT:
            self.is_interrupted = True
            # A loader's process, which Ctrl-C reaches too, continues to serve the last batch.
            if not is_forked and not self._is_quiet:
                logger.warning(_INTERRUPTED)
        elif is_forked:
            # A process that was forked meanwhile has nothing to save.
            signal.raise_signal(number)
        elif callable(previous := self._previous.get(number)):
            previous(number, frame)

    def _second_action(self, number: int) -> Any:
        # A second Ctrl-C leaves at once, as in any script.
        if number == signal.SIGINT:
            return self._previous[number]
        return self._handle_again if self._is_supervised else signal.SIG_DFL

    def _handle_again(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A process that was forked has nothing to save.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_ASK_POLL_S = 0.02
_LONGEST_SILENCE_S = 5.0
_WAIT, _END = 0, -1


class SearcherOperation:
    """Train until `length` (absolute, in the search's unit), validate, and report the metric."""

    def __init__(
        self, *, length: int, max_length: int, journal: JournalWriter, is_chief: bool
    ) -> None:
        self._length = length
        self._max_length = max(length, max_length)
        self._journal = journal
        self._is_chief = is_chief
        self._is_completed = False

    def __repr__(self) -> str:
        return f"SearcherOperation(length={self._length})"

    @property
    def length(self) -> int:
        """Until where to train, counted from the start of the trial."""
        return self._length

    @property
    def is_completed(self) -> bool:
        """Whether `report_completed` was called."""
        return self._is_completed

    def report_progress(self, length: float) -> None:
        """Report how far training has come, from 0 to `length` inclusive.

        Raises:
            RuntimeError: This process is not the chief, or the operation is completed.
            ValueError: `length` is out of range.
        """
        self._check("report_progress")
        if not 0 <= length <= self._length:
            raise ValueError(
                f"`length` must be from 0 to {self._length} inclusive, but got {length}."
            )
        progress = float(length / self._max_length)
        self._journal.append(records.ProgressReported(time=time.time(), progress=progress))

    def report_completed(self, metric: Any) -> None:
        """Report the searched metric, measured after training to `length`.

        Args:
            metric: A number, NumPy scalar or 0-d tensor; NaN is kept and counts as worst.

        Raises:
            RuntimeError: This process is not the chief, or the operation is completed.
            TypeError: `metric` is no number.
        """
        self._check("report_completed")
        value = records.encode_metrics({"metric": metric})["metric"]
        if type(records.decode_value(value)) not in (int, float):
            raise TypeError(f"`metric` must be a number, but got {metric!r}.")
        self._is_completed = True
        self._journal.append(
            records.OperationCompleted(time=time.time(), length=self._length, metric=value)
        )

    def _check(self, call: str) -> None:
        if not self._is_chief:
            raise RuntimeError(
                f"Only the chief may call `{call}`, but another rank did."
                " Hint: guard the call by `if context.distributed.rank == 0:`."
            )
        if self._is_completed:
            raise RuntimeError(
                f"`{call}` must come before the operation is completed, but that of length"
                f" {self._length} is."
            )


class SearcherContext:
    """Take part in a hyperparameter search.

    Without a master there is one operation, as long as the config's searcher says, else 1.
    """

    def __init__(
        self,
        *,
        control: ControlFile,
        decision: SearchDecision,
        distributed: DistributedContext,
        preempt: PreemptContext,
        journal: JournalWriter,
        searcher: Mapping[str, Any],
        is_managed: bool,
        completed_length: int,
    ) -> None:
        self._control = control
        self._decision = decision
        self._distributed = distributed
        self._preempt = preempt
        self._journal = journal
        self._max_length = configured_length(searcher)
        self._has_objectives = bool(searcher.get("objectives"))
        self._is_managed = is_managed
        self._completed_length = completed_length
        self._has_asked = False

    def operations(self) -> Iterator[SearcherOperation]:
        """Yield the search's operations until the search ends.

        The next one may take long to come, as it depends on other trials. The iteration also ends
        when the attempt is preempted: ask `should_preempt()` afterwards. All ranks iterate.

        Raises:
            RuntimeError: The last operation was not completed, or the search has several
                objectives.
            DistributedTimeoutError: Other ranks do not iterate.
        """
        if self._has_objectives:
            raise RuntimeError(
                "A search must have one metric to judge whole operations, but this one has several"
                " objectives. Hint: report all of them with `report_validation_metrics`."
            )
        is_chief = self._distributed.rank == 0
        self._decision.expect_none()
        if is_chief and not self._has_asked:
            self._has_asked = True
            self._journal.append(records.OperationsRequested(time=time.time()))
        while (length := self._next_length()) != _END:
            operation = SearcherOperation(
                length=length,
                max_length=self._max_length or 0,
                journal=self._journal,
                is_chief=is_chief,
            )
            yield operation
            if is_chief and not operation.is_completed:
                raise RuntimeError(
                    "An operation must be completed before the next one, but that of length"
                    f" {length} is not. Hint: call `report_completed(metric)`."
                )
            self._completed_length = max(self._completed_length, length)

    def _next_length(self) -> int:
        """Return the next operation's length on every rank, or the mark of the end."""
        while True:
            answer = self._wait_for_runner() if self._distributed.rank == 0 else _WAIT
            # The chief reports its wait again and again: silence would look like a dead rank.
            answer = self._distributed.broadcast(answer)
            if answer != _WAIT:
                return answer

    def _wait_for_runner(self) -> int:
        if not self._is_managed:
            length = self._max_length or 1
            return length if length > self._completed_length else _END
        # Shorter than the timeout of the other ranks, who wait for this answer.
        deadline = time.monotonic() + min(_LONGEST_SILENCE_S, self._distributed.timeout_s / 4)
        while time.monotonic() < deadline:
            control = self._control.read()
            if control.operations_closed or self._preempt.is_wanted():
                return _END
            if (control.operation_length or 0) > self._completed_length:
                return int(control.operation_length or 0)
            time.sleep(_ASK_POLL_S)
        return _WAIT
