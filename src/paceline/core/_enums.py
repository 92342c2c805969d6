"""The choices of `core.init()` and of a context's reports."""

from enum import Enum


class PreemptMode(Enum):
    """Who asks whether an attempt is to be preempted; only `WorkersAskChief` is offered yet."""

    WorkersAskChief = "workers_ask_chief"
    ChiefOnly = "chief_only"
    WorkersAskMaster = "workers_ask_master"


class TensorboardMode(Enum):
    """Who writes TensorBoard files; only `OFF` is offered yet."""

    OFF = "off"
    AUTO = "auto"
    MANUAL = "manual"


class EarlyExitReason(Enum):
    """Why the user's code wants no further attempt of a trial."""

    INVALID_HP = "invalid_hp"
    USER_REQUESTED_STOP = "user_requested_stop"


class Outcome(Enum):
    """End of an attempt, as recorded in its journal."""

    COMPLETED = "completed"
    PREEMPTED = "preempted"
    INVALID_HP = "invalid_hp"
    ERROR = "error"
