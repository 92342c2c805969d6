"""Messages between the launchers of several nodes: JSON in small frames."""

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from paceline.workers._errors import (
    CollectiveMismatchError,
    NotEnoughWorkersError,
    WorkerFailedError,
)
from paceline.workers._restart_policy import describe_failure
from paceline.workers.pools._channel import ChannelFrame, FrameKind
from paceline.workers.pools._failure_detector import HyperparametersRefusedError
from paceline.workers.pools._thread_progress import Progress
from paceline.workers.pools._watchdog import WatchedRank

PROTOCOL = 2
LONGEST_BYTES = 64 * 1024
_TEXT_CHARACTERS = 8000
# Of what a rank is at.
_PLACE_CHARACTERS = 120


class NodeFailureCause(str, Enum):
    """Cause of the end of a generation."""

    FAILED = "failed"
    MISMATCH = "mismatch"
    REFUSED = "refused"
    # Launchers did not come in time.
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailure:
    """A failure on a node; see `WorkerFailedError`."""

    cause: str = NodeFailureCause.FAILED
    text: str
    rank: int = 0
    exit_code: int | None = None
    signal: int | None = None
    is_consequence: bool = False

    @classmethod
    def of(cls, error: BaseException) -> "NodeFailure":
        """Return what to tell of an error."""
        kinds: dict[type[BaseException], NodeFailureCause] = {
            CollectiveMismatchError: NodeFailureCause.MISMATCH,
            HyperparametersRefusedError: NodeFailureCause.REFUSED,
        }
        return cls(
            cause=kinds.get(type(error), NodeFailureCause.FAILED),
            text=describe_failure(error)[:_TEXT_CHARACTERS],
            rank=getattr(error, "rank", 0),
            exit_code=getattr(error, "exit_code", None),
            signal=getattr(error, "signal", None),
            is_consequence=getattr(error, "is_consequence", False),
        )

    @classmethod
    def of_launcher(cls, node_rank: int, why: str) -> "NodeFailure":
        """Return what to tell of a launcher that was lost; its workers count as killed."""
        text = f"The launcher of node {node_rank} was lost: {why}."
        return cls(text=text, signal=signal.SIGKILL)

    def error(self) -> Exception:
        """Return the error to raise."""
        if self.cause == NodeFailureCause.MISMATCH:
            return CollectiveMismatchError(self.text)
        if self.cause == NodeFailureCause.ABSENT:
            return NotEnoughWorkersError(self.text, 0, 0)
        return WorkerFailedError(self.text, self.rank, self.exit_code, self.signal)


class NodeMessageKind(str, Enum):
    """The kind of a message between launchers."""

    # To node 0: the first words, the first failure, the end of all workers, and an early leave.
    HELLO = "hello"
    FAILED = "failed"
    ENDED = "ended"
    LEAVING = "leaving"
    # To node 0, all the time: what the ranks of a node are at.
    PROGRESS = "progress"
    # From node 0.
    REFUSED = "refused"
    WELCOME = "welcome"
    START = "start"
    END = "end"
    # Ranks wait in vain: all end, with their stacks.
    HANG = "hang"
    VERDICT = "verdict"
    # Both ways.
    SIGNAL = "signal"
    # Only within a launcher: node 0 is not there any more.
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMessage:
    """One message; fields that its kind does not use have their defaults."""

    word: str
    node_rank: int = 0
    options: Mapping[str, int] = field(default_factory=dict)
    failure: NodeFailure | None = None
    num_commits: int = 0
    received: Sequence[int] = ()
    resume: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    is_restart: bool = False
    text: str = ""
    signum: int = 0
    ranks: Sequence[Sequence[Any]] = ()
    returned: Sequence[int] = ()

    @classmethod
    def of_progress(cls, ranks: Sequence[WatchedRank]) -> "NodeMessage":
        """Return what tells of the ranks of a node; see `watched_ranks`."""
        return cls(word=NodeMessageKind.PROGRESS, ranks=ranks)

    def watched_ranks(self) -> list[WatchedRank]:
        """Return what a node tells of its ranks.

        Raises:
            TypeError: That is of other kinds.
            ValueError: That is of other kinds.
        """
        return [
            WatchedRank(
                int(rank),
                bool(has_returned),
                Progress(
                    float(stuck_s),
                    bool(is_waiting),
                    str(operation)[:_PLACE_CHARACTERS],
                    int(num_collectives),
                    str(place)[:_PLACE_CHARACTERS],
                    float(idle_s),
                ),
            )
            for rank, has_returned, (
                stuck_s, is_waiting, operation, num_collectives, place, idle_s,
            ) in self.ranks
        ]  # fmt: skip

    def frame(self) -> ChannelFrame:
        """Return the frame that carries the message."""
        return ChannelFrame(FrameKind.NODE, body=json.dumps(asdict(self)).encode())

    @classmethod
    def of(cls, frame: ChannelFrame) -> "NodeMessage":
        """Read the message of a frame.

        Raises:
            ValueError: The frame has none.
        """
        try:
            content: dict[str, Any] = json.loads(frame.body)
            failure = content.pop("failure", None)
            return cls(failure=None if failure is None else NodeFailure(**failure), **content)
        except (AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"A frame must hold a message, but {error}.") from None
