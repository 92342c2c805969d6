"""Groups of worker processes: start them, watch them, read their output, end them in time."""

from paceline.workers._environment import (
    LOOPBACK,
    THREADS_MARK,
    THREADS_VARIABLE,
    Placement,
    PortReservation,
    is_port_free,
    num_cores,
    rank_environment,
    thread_environment,
)
from paceline.workers._group import WorkerGroup, WorkerStartError
from paceline.workers._local import LocalGroup
from paceline.workers._output import LINE_CHARACTERS, LineSplitter, OutputLine
from paceline.workers._processes import GROUP_VARIABLE, kill_leftover
from paceline.workers._spec import (
    WorkerExit,
    WorkerProcess,
    WorkerSpec,
    first_failure,
    signal_name,
)
from paceline.workers._status import STATUS_VARIABLE

__all__ = [
    "GROUP_VARIABLE",
    "LINE_CHARACTERS",
    "LOOPBACK",
    "STATUS_VARIABLE",
    "THREADS_MARK",
    "THREADS_VARIABLE",
    "LineSplitter",
    "LocalGroup",
    "OutputLine",
    "Placement",
    "PortReservation",
    "WorkerExit",
    "WorkerGroup",
    "WorkerProcess",
    "WorkerSpec",
    "WorkerStartError",
    "first_failure",
    "is_port_free",
    "kill_leftover",
    "num_cores",
    "rank_environment",
    "signal_name",
    "thread_environment",
]
