"""The states of experiments, trials, attempts and checkpoints."""

from enum import Enum


class ExperimentState(str, Enum):
    """Where an experiment stands; the STOPPING states wait for running attempts to end."""

    ACTIVE = "ACTIVE"
    PAUSED = "PAUSED"
    STOPPING_COMPLETED = "STOPPING_COMPLETED"
    STOPPING_CANCELED = "STOPPING_CANCELED"
    STOPPING_KILLED = "STOPPING_KILLED"
    STOPPING_ERROR = "STOPPING_ERROR"
    COMPLETED = "COMPLETED"
    CANCELED = "CANCELED"
    ERROR = "ERROR"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing will run any more unless the experiment is continued."""
        return self in (self.COMPLETED, self.CANCELED, self.ERROR)

    @property
    def is_stopping(self) -> bool:
        """Whether the experiment only waits for its attempts to end."""
        return self.value.startswith("STOPPING_")


class TrialState(str, Enum):
    """Where a trial stands; an ACTIVE trial runs, waits for slots or is paused."""

    ACTIVE = "ACTIVE"
    STOPPING_COMPLETED = "STOPPING_COMPLETED"
    STOPPING_CANCELED = "STOPPING_CANCELED"
    STOPPING_KILLED = "STOPPING_KILLED"
    STOPPING_ERROR = "STOPPING_ERROR"
    COMPLETED = "COMPLETED"
    CANCELED = "CANCELED"
    ERROR = "ERROR"

    @property
    def is_terminal(self) -> bool:
        """Whether the trial has ended."""
        return self in (self.COMPLETED, self.CANCELED, self.ERROR)

    @property
    def is_stopping(self) -> bool:
        """Whether the trial only waits for its attempt to end."""
        return self.value.startswith("STOPPING_")


class AttemptState(str, Enum):
    """Where an attempt stands."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    ENDED = "ENDED"


class CheckpointState(str, Enum):
    """Whether a checkpoint's files are there."""

    COMPLETED = "COMPLETED"
    DELETED = "DELETED"


class ExitReason(str, Enum):
    """Why an attempt ended, as its runner saw it.

    SHORTAGE tells that the machine lacked what a start needs: disk space, inodes, open files,
    processes or memory.
    """

    EXITED = "exited"
    KILLED = "killed"
    PREEMPTION_TIMEOUT = "preemption_timeout"
    START_FAILED = "start_failed"
    SHORTAGE = "shortage"
    RUNNER_LOST = "runner_lost"
