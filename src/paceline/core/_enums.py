"""The choices of `core.init()` and of a context's reports."""

from enum import Enum


class PreemptMode(Enum):
    """Who may call `should_preempt()`, and where the answer comes from.

    - `WorkersAskChief`: all ranks call equally often, and all get the same answer. A signal to any
      of them counts.
    - `ChiefOnly`: the chief alone calls, and tells the others in its own way.
    - `WorkersAskMaster`: any rank calls, as often as it likes, and does not wait for the others.
      One may know sooner than another one. A signal counts for the rank that gets it.
    """

    WorkersAskChief = "workers_ask_chief"
    ChiefOnly = "chief_only"
    WorkersAskMaster = "workers_ask_master"


class TensorboardMode(Enum):
    """Who writes TensorBoard files.

    - `OFF`: nobody.
    - `AUTO`: reported numbers become scalars by themselves.
    - `MANUAL`: the script writes to `train.get_tensorboard_path()`.
    """

    OFF = "off"
    AUTO = "auto"
    MANUAL = "manual"


class DownloadMode(Enum):
    """Whether the ranks of a node fetch a checkpoint together.

    - `NoSharedDownload`: each rank that calls fetches by itself.
    - `LocalWorkersShareDownload`: all ranks call. The first rank of each node fetches what the
      ranks of its node select, and all of them use that directory.
    """

    NoSharedDownload = "no_shared_download"
    LocalWorkersShareDownload = "local_workers_share_download"


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
