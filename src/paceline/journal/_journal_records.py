"""The records a training process can write, and their JSON form.

Every record is one frozen struct with a ``type`` tag. Adding a record type or an optional field
keeps the format version; anything else raises `FORMAT_VERSION`.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import msgspec

FORMAT_VERSION = 1


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One thing that happened in a training process; `time` is seconds since the epoch."""

    time: float


class AttemptStarted(Record, frozen=True, kw_only=True, tag="attempt_started"):
    """A rank began its part of an attempt.

    Rows of earlier attempts beyond `steps_completed` are superseded: it is the step of the
    checkpoint that was handed to the attempt, 0 without one, and the last step where a driver goes
    on recording. `environment` is what the chief runs in. `restart_causes` is empty unless workers
    were started again after a failure: what ended those before them, one sentence for each start
    since the last one that was recorded.
    """

    attempt: int
    generation: int
    rank: int
    world_size: int
    pid: int
    host: str
    resumed_from: str | None
    steps_completed: int
    environment: dict[str, Any] | None = None
    restart_causes: tuple[str, ...] = ()


class MetricsReported(Record, frozen=True, kw_only=True, tag="metrics", omit_defaults=True):
    """Metrics of one group at one step.

    `validation` tells what of a train function's report counts as a validation too, for searches:
    all of it if True, nothing if False, else these metrics. `number` is that of the report, unless
    it is the step.
    """

    group: str
    steps_completed: int
    metrics: dict[str, Any]
    validation: bool | dict[str, Any] = False
    number: int | None = None


class ProgressReported(Record, frozen=True, kw_only=True, tag="progress"):
    """The fraction of the whole training that is done, from 0 to 1 inclusive."""

    progress: float


class StatusReported(Record, frozen=True, kw_only=True, tag="status"):
    """A free text that says what the process is doing."""

    status: str


class EarlyExitReported(Record, frozen=True, kw_only=True, tag="early_exit"):
    """The user's code wants no further attempt: `reason` is one of `EARLY_EXIT_REASONS`."""

    reason: str


class CheckpointStored(Record, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint was committed; `resources` maps relative file paths to bytes."""

    uuid: str
    steps_completed: int
    metadata: dict[str, Any]
    resources: dict[str, int]
    storage: str


class CheckpointDeleted(Record, frozen=True, kw_only=True, tag="checkpoint_deleted"):
    """The user's code deleted a checkpoint."""

    uuid: str


class CheckpointFilesDeleted(Record, frozen=True, kw_only=True, tag="checkpoint_files_deleted"):
    """The user's code deleted files of a checkpoint; `resources` are those that are left."""

    uuid: str
    resources: dict[str, int]


class CheckpointSentApart(Record, frozen=True, kw_only=True, tag="checkpoint_sent_apart"):
    """Substitute for a record about a checkpoint; no process writes it.

    The runner sends the record itself with the files of the checkpoint.
    """

    uuid: str


class RunMetadataSet(Record, frozen=True, kw_only=True, tag="run_metadata"):
    """What the user's code says of the run as a whole, in place of what it said before."""

    metadata: dict[str, Any]


class AlertRaised(Record, frozen=True, kw_only=True, tag="alert"):
    """The user's code wants people to see this; `level` is one of `ALERT_LEVELS`."""

    title: str
    description: str
    level: str


class OperationsRequested(Record, frozen=True, kw_only=True, tag="operations_requested"):
    """The trial asks for search operations: its completed operations are the search's input."""


class OperationCompleted(Record, frozen=True, kw_only=True, tag="operation_completed"):
    """The trial trained to `length` (absolute) and measured the searched metric there."""

    length: int
    metric: float | dict[str, str]


class PreemptionAcknowledged(Record, frozen=True, kw_only=True, tag="preemption_acknowledged"):
    """`should_preempt()` told the user's code to checkpoint and leave."""


class TimeSpent(Record, frozen=True, kw_only=True, tag="time_spent"):
    """What the chief has spent its time on since it began to train.

    `seconds` maps "data_wait", "validation", "checkpoint", "other" and "lost" to sums since the
    record whose `event` is "start"; all else was training. After "checkpoint", training goes on
    from a state that can be restored; "report" comes in between, and "end" when training has ended.
    """

    event: Literal["start", "report", "checkpoint", "end"]
    steps_completed: int
    seconds: dict[str, float]


class SearchInputTaken(Record, frozen=True, kw_only=True, tag="search_input"):
    """A search without a master has taken an input; the inputs in their order decide all of it.

    `input` is the JSON of one of `paceline.search`. If it is a report, `number` is the number of
    the report in its trial and `metrics` is all of it.
    """

    input: dict[str, Any]
    number: int = 0
    metrics: dict[str, Any] | None = None


class RecordsDropped(Record, frozen=True, kw_only=True, tag="dropped"):
    """`count` reports were lost because the disk stayed full for too long."""

    count: int


class RecordLost(Record, frozen=True, kw_only=True, tag="lost"):
    """Substitute for a record that cannot be read or stored; no process writes it.

    `reason` ends the sentence "The record is lost: ...".
    """

    reason: str


class StoreChecked(Record, frozen=True, kw_only=True, tag="store"):
    """A storage does not answer for the `reason`, or, if that is None, it answers again."""

    storage: str
    reason: str | None


class AttemptFinished(Record, frozen=True, kw_only=True, tag="finished"):
    """The context was closed; `error` is the type and text of the exception that closed it.

    `store` is the URL of the storage that the exception comes from, because it did not answer.
    `is_consequence` says that another rank had failed before.
    """

    outcome: str
    error: str | None = None
    store: str | None = None
    is_consequence: bool = False


AnyRecord: TypeAlias = (
    AttemptStarted
    | MetricsReported
    | ProgressReported
    | StatusReported
    | EarlyExitReported
    | CheckpointStored
    | CheckpointDeleted
    | CheckpointFilesDeleted
    | CheckpointSentApart
    | RunMetadataSet
    | AlertRaised
    | OperationsRequested
    | OperationCompleted
    | PreemptionAcknowledged
    | TimeSpent
    | SearchInputTaken
    | RecordsDropped
    | RecordLost
    | StoreChecked
    | AttemptFinished
)

EARLY_EXIT_REASONS = ("invalid_hp", "user_requested_stop")
DIVERGED = "diverged"
"""The reason where no code asks for an early exit: the training loss was not finite."""
ALERT_LEVELS = ("debug", "info", "warn", "error")
OUTCOMES = ("completed", "preempted", "invalid_hp", "error")

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)


encode_record: Callable[[AnyRecord], bytes] = _encoder.encode
"""Return the record as one line of JSON, without the line end."""


def decode_record(payload: bytes) -> AnyRecord:
    """Return the record that `encode_record` wrote.

    Raises:
        msgspec.ValidationError: The payload is JSON but no known record.
        msgspec.DecodeError: The payload is not JSON.
    """
    return _decoder.decode(payload)
