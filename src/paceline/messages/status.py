"""The model of the master's state as people look at it."""

from paceline.messages.resources import MasterInfo


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
