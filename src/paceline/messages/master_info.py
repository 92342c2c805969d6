"""Models of the REST API on the master as a whole."""

from pydantic import Field

from paceline.messages.base import Message, Request


class MasterInfo(Message):
    """What the master is and how busy it is.

    `num_slots` counts all slots: `num_slots_drained` of them get no attempts, and attempts still
    hold `num_slots_draining` of these.
    """

    version: str
    cluster_id: str
    started_at: float
    home: str
    num_slots: int
    num_slots_used: int
    num_slots_drained: int = 0
    num_slots_draining: int = 0
    num_active_experiments: int
    has_web_ui: bool = True


# A runner that still holds on so long after it was told to kill is killed itself; a master that
# stops waits so long for them.
RUNNER_GRACE_S = 30.0


class Shutdown(Request):
    """Ask the master to stop.

    `keep_trials` leaves running trials to their runners; otherwise they are told to checkpoint and
    leave, are killed after `timeout_s` seconds, and go on when the master starts again.
    """

    keep_trials: bool = False
    timeout_s: float = Field(default=30.0, ge=0)


class MasterStatus(MasterInfo):
    """What the master is, how busy it is, and what is wrong.

    `experiments`, `trials` and `attempts` count by stored state. `num_waiting` trials wait for
    slots. `ingest_lag_s` is how old the newest records were when they were stored last, None if
    none were. `num_writes_waiting` changes wait for the database. `num_slow_requests` took at least
    `slow_request_s`, since the start. `sizes` has bytes by part of the home; directories are
    missing until they were measured. Each of `problems` is a sentence.
    """

    experiments: dict[str, int]
    trials: dict[str, int]
    attempts: dict[str, int]
    num_waiting: int
    num_metric_points: int
    num_checkpoints: int
    checkpoint_bytes: int
    ingest_lag_s: float | None
    num_writes_waiting: int
    num_connections: int | None
    num_requests: int
    num_slow_requests: int
    slow_request_s: float
    memory_bytes: int
    sizes: dict[str, int]
    free_bytes: int
    problems: list[str]
