"""Learning that the attempt is to make room."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from paceline.core._control_file import ControlFile
from paceline.core._distributed_context import DistributedContext
from paceline.core._enums import PreemptMode
from paceline.core._search_decision import SearchDecision
from paceline.journal import JournalWriter, PreemptionAcknowledged

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_INTERRUPTED = "Finishing this batch and storing a checkpoint; press Ctrl-C again to leave now."


class PreemptContext:
    """Ask whether to checkpoint and leave.

    The answer turns True when the runner says so, or after SIGTERM or SIGUSR1. With several ranks
    all must call equally often: each call takes the answer of all, so a signal to any rank counts.
    `core.init(preempt_mode=)` has other ways, see `PreemptMode`.

    Where a search may stop the trial, the first call after a validation report waits for what the
    search decides on it, `DECISION_TIMEOUT_S` at most. If the decision does not come in time, later
    calls do not wait until something comes from the master again. Without such a search, and after
    any other report, no call waits.
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
        # One voice is enough where every rank gets the signal.
        self._signals = SignalWatch(is_quiet=distributed.rank != 0, is_supervised=is_supervised)
        self._is_installed = False
        self._is_preempted = False
        self._is_acknowledged = False

    @property
    def is_acknowledged(self) -> bool:
        """Whether the user's code was told, and will leave in order to go on later."""
        return self._is_acknowledged

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Tell whether to store a checkpoint and leave; once True it stays so.

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
        """Say that the code is going to leave because of the preemption.

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
                self._journal.append(PreemptionAcknowledged(time=time.time()))

    @property
    def is_interrupted(self) -> bool:
        """Whether this process was interrupted by Ctrl-C while it watched for that."""
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
        """Give SIGINT back; does nothing if it is not watched."""
        self._signals.restore(signal.SIGINT)

    @property
    def has_signal(self) -> bool:
        """Whether this process has received one of the signals that it watches."""
        return self._signals.has_come

    def settle(self) -> None:
        """Take a True answer that the ranks have agreed on by other means, and acknowledge it."""
        self._is_preempted = True
        self.acknowledge_preemption_signal()

    @property
    def follows_search(self) -> bool:
        """Whether a validation may stop the trial, the same on every rank."""
        return self._decision.is_expected

    def is_wanted(self) -> bool:
        """Tell what this process knows by itself, without asking the chief.

        Like `should_preempt`, it waits for the search's decision on what this process reported.
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
    """Note the first signal, and leave a second one to what it would have done before.

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
        """Take over signals; only the main thread can, elsewhere it does nothing.

        Args:
            numbers: SIGTERM, SIGUSR1 or both.
        """
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
        is_forked = os.getpid() != self._pid
        self.has_come = True
        for watched, ours in self._ours.items():
            if signal.getsignal(watched) == ours:
                self._ours[watched] = self._second_action(watched)
                signal.signal(watched, self._ours[watched])
        if number == signal.SIGINT:
            self.is_interrupted = True
            # A loader's process, which Ctrl-C reaches too, goes on to serve the last batch.
            if not is_forked and not self._is_quiet:
                logger.warning(_INTERRUPTED)
        elif is_forked:
            # A process that was forked meanwhile has nothing to save.
            signal.raise_signal(number)
        elif callable(previous := self._previous.get(number)):
            previous(number, frame)

    def _second_action(self, number: int) -> Any:
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
