"""What a worker of a run tells its driver: facts about itself, and the outcome."""

from typing import Any, NamedTuple


class WorkerFacts(NamedTuple):
    """Facts about a worker, for the driver's table."""

    node: str
    pid: int
    device: str
    node_rank: int = 0


class RankOutcome(NamedTuple):
    """Outcome of the function on one rank.

    Attributes:
        value: What it returned.
        num_reports: How often it reported.
        num_saves: How often it saved a checkpoint.
        num_pending: Of these, how many wait for parts of other ranks.
        is_stopped: Whether the driver of a stepwise run has stopped it at a report.
        is_preempted: Whether it has ended because it was told to make room.
        is_to_compare: Whether the ranks are compared yet, as they were trained since the last
            checkpoint.
    """

    value: Any
    num_reports: int
    num_saves: int
    num_pending: int
    is_stopped: bool = False
    is_preempted: bool = False
    is_to_compare: bool = False
