"""Record of the exit of a worker's process."""

import signal
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """Record of a worker's exit.

    Attributes:
        rank: The worker's rank.
        code: The verdict: 0 for success. It is what the worker said itself if it did, else its
            exit code, or 128 + the number of the signal that ended it.
        signal: The number of the signal that ended the process, if one did.
        finished: The worker itself said that it had run to its end; what happened to the process
            after that is no failure.
        error: The type and text of the exception that ended it, if it said so.
        time: When it failed or ended, in seconds since the epoch.
        is_consequence: The error only answers the failure of another rank, or the group's own
            signal.
        lost_with: What the worker was lost with, such as its node, if nothing else is known.
        silence: Why it was ended, if it had given no sign of life.
    """

    rank: int
    code: int
    signal: int | None = None
    finished: bool = False
    error: str | None = None
    time: float = 0.0
    is_consequence: bool = False
    lost_with: str | None = None
    silence: str | None = None

    @property
    def is_failure(self) -> bool:
        """Whether the worker did not succeed."""
        return self.code != 0

    def describe(self) -> str:
        """Return one phrase such as "rank 1 exited with code 3"."""
        if self.lost_with is not None:
            return f"rank {self.rank} was lost with {self.lost_with}"
        if self.silence is not None:
            return f"rank {self.rank} {self.silence}"
        if self.signal is not None and not self.finished:
            return f"rank {self.rank} was ended by {signal_name(self.signal)}"
        reason = f" ({self.error})" if self.error else ""
        return f"rank {self.rank} exited with code {self.code}{reason}"


def signal_name(signum: int) -> str:
    """Return the name of a signal, such as "SIGTERM"."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
