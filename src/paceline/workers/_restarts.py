"""Whether workers are started again after one of them has failed."""

import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from paceline.workers._spec import WorkerExit, WorkerProcess, signal_name

if TYPE_CHECKING:
    from paceline.core import BegunRuns

logger = logging.getLogger(__name__)

_MASTERS_VARIABLE = "PACELINE_RUN_DIR"


class Verdict(NamedTuple):
    """Whether there is another start, and what to say of it."""

    is_restart: bool
    text: str


class Restarts:
    """Counts the restarts of workers, and decides whether there is another one.

    A worker that was ended by a signal is lost, and its group starts again. So it does after an
    exception or an exit code, since restarts were asked for; but when a start ends by the same one
    as the start before and has committed no checkpoint, the program is at fault and another start
    would be of no use. What this process was asked to end is not started again.

    Args:
        max_restarts: How many there may be.
    """

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.num_restarts = 0
        self._last_error: str | None = None

    def judge(
        self, failure: WorkerExit, received: Collection[int], *, has_progressed: bool
    ) -> Verdict:
        """Decide what follows a failure.

        Args:
            failure: That of the worker which failed first.
            received: The signals that this process has received meanwhile.
            has_progressed: Whether a checkpoint was committed meanwhile.
        """
        error = None if _is_loss(failure) else f"{failure.code} {failure.error}"
        is_same = error is not None and error == self._last_error and not has_progressed
        self._last_error = error
        if received:
            names = " and ".join(sorted(signal_name(number) for number in received))
            return Verdict(False, f"after the launcher had received {names}")
        if not self.max_restarts:
            return Verdict(False, "")
        if not failure.code:
            return Verdict(False, "as it left with exit code 0")
        if is_same:
            return Verdict(
                False, "as the time before: the program itself fails, and is not started again"
            )
        if self.num_restarts >= self.max_restarts:
            return Verdict(False, f"and no restart is left of {self.max_restarts}")
        self.num_restarts += 1
        return Verdict(True, f"restart {self.num_restarts} of {self.max_restarts}")


def _is_loss(failure: WorkerExit) -> bool:
    return failure.signal is not None and not failure.finished


def offered_restarts(max_restarts: int) -> int:
    """Return how many restarts there are here: none under a master, whose own they are."""
    if max_restarts and os.environ.get(_MASTERS_VARIABLE):
        logger.warning(
            "%d restart(s) were asked for, but under a master its own count: `max_restarts` of the"
            " experiment's configuration.",
            max_restarts,
        )
        return 0
    return max_restarts


def describe_failure(failure: WorkerExit, num_workers: int) -> str:
    """Return what happened, such as "Rank 1 was ended by SIGKILL, the first of 2 to fail"."""
    text = failure.describe().replace("rank", "Rank", 1)
    return text if num_workers == 1 else f"{text}, the first of {num_workers} to fail"


class Start:
    """One start of workers, and what the next one has to know of it.

    Args:
        is_python: The workers' processes are the programs themselves, not shells that start them.
    """

    def __init__(self, *, is_python: bool = True) -> None:
        self._is_python = is_python
        self._since = time.time()
        self._pids: set[int] = set()

    def note(self, processes: Sequence[WorkerProcess]) -> None:
        """Note the processes, while they are known."""
        self._pids |= {process.pid for process in processes}

    def num_checkpoints(self) -> int:
        """Return how many checkpoints the processes have committed."""
        return self._runs().num_checkpoints()

    def follow(self, restarts: Restarts, failure: WorkerExit, received: Collection[int]) -> Verdict:
        """Decide what follows the failure of this start; see `Restarts.judge`."""
        # Without restarts there is no need to look.
        has_progressed = restarts.max_restarts > 0 and self.num_checkpoints() > 0
        return restarts.judge(failure, received, has_progressed=has_progressed)

    def is_completed(self) -> bool:
        """Tell whether the processes had runs, and all of these have come to their end."""
        return self._runs().are_completed()

    def resume_variables(self) -> Mapping[str, str]:
        """Return the variables that have the next start go on where this one ended, and say so."""
        variables = self._runs().variables()
        for value in variables.values():
            logger.info("The next start goes on from the last checkpoint (%s).", value)
        return variables

    def _runs(self) -> "BegunRuns":
        # It costs a good part of a launcher's start.
        from paceline.core import BegunRuns

        return BegunRuns(self._since, self._pids if self._is_python else None)
