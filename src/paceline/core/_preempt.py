"""Learning that the attempt is to make room."""

import logging
import signal
import threading
import time
from types import FrameType
from typing import Any

from paceline.core._control import ControlFile
from paceline.core._distributed import DistributedContext
from paceline.journal import JournalWriter, PreemptionAcknowledged

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class PreemptContext:
    """Ask whether to checkpoint and leave.

    The answer turns True when the runner says so, or after SIGTERM or SIGUSR1. With several ranks
    all must call equally often: every call takes the chief's answer.
    """

    def __init__(
        self, *, control: ControlFile, distributed: DistributedContext, journal: JournalWriter
    ) -> None:
        self._control = control
        self._distributed = distributed
        self._journal = journal
        self._signals = SignalWatch()
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
        """
        self.watch_signals()
        if not self._is_preempted:
            answer = self.is_wanted() if self._distributed.rank == 0 else False
            self._is_preempted = self._distributed.broadcast(answer)
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

    def watch_signals(self) -> None:
        """Take over SIGTERM and SIGUSR1, as the first `should_preempt()` does."""
        if not self._is_installed:
            self._is_installed = True
            self._signals.install()

    def settle(self) -> None:
        """Take a True answer that the ranks have agreed on by other means, and acknowledge it."""
        self._is_preempted = True
        self.acknowledge_preemption_signal()

    def is_wanted(self) -> bool:
        """Tell what this process knows by itself, without asking the chief."""
        return self._is_preempted or self._signals.has_come or self._control.read().should_preempt

    def close(self) -> None:
        """Give the signals back."""
        self._signals.restore()


class SignalWatch:
    """Note the first SIGTERM or SIGUSR1, and leave a second one to its default action."""

    def __init__(self) -> None:
        self.has_come = False
        self._previous: dict[int, Any] = {}
        self._ours: dict[int, Any] = {}

    def install(self) -> None:
        """Take over both signals; only the main thread can, elsewhere it does nothing."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "`should_preempt()` was first called outside the main thread, so SIGTERM and"
                " SIGUSR1 keep their action and do not preempt."
            )
            return
        for number in _SIGNALS:
            self._previous[number] = signal.getsignal(number)
            self._ours[number] = self._handle
            signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put the previous handlers back, except where someone else has changed them since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            # None stands for a handler that was not installed from Python.
            if signal.getsignal(number) == self._ours[number] and previous is not None:
                signal.signal(number, previous)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        for watched in _SIGNALS:
            if signal.getsignal(watched) == self._ours[watched]:
                signal.signal(watched, signal.SIG_DFL)
                self._ours[watched] = signal.SIG_DFL
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)
