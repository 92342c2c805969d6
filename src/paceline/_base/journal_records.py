"""Records of a journal: types, JSON with checksums, metric values, the accounting of time."""

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from math import inf, isfinite, isnan
from typing import Any, Literal, TypeAlias

import msgspec

FORMAT_VERSION = 1


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Event in a training process; `time` is seconds since the epoch."""

    time: float


class AttemptStarted(Record, frozen=True, kw_only=True, tag="attempt_started"):
    """A rank began its part of an attempt.

    Rows of earlier attempts beyond `steps_completed` are superseded: it is the step of the
    checkpoint that was handed to the attempt, 0 without one, and the last step where a driver
    continues to record. `environment` describes the chief's software and hardware.
    `restart_causes` has a sentence for each restart of workers after a failure since the last
    recorded start, with the reason.
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
    """Metrics of a group at a step.

    `validation` says which metrics of a train function's report count as a validation too, for
    searches: all if True, nothing if False, else these metrics. `number` is the report's number,
    unless it is the step.
    """

    group: str
    steps_completed: int
    metrics: dict[str, Any]
    validation: bool | dict[str, Any] = False
    number: int | None = None


class MediaFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """File of a run: its path below the run's `files` directory, SHA-256 in hex, bytes.

    `facts` are numbers and texts that describe it, such as an image's width in pixels.
    """

    path: str
    digest: str
    size: int
    media_type: str
    caption: str | None = None
    facts: dict[str, Any] = {}


class MediaReported(Record, frozen=True, kw_only=True, tag="media", omit_defaults=True):
    """Media of a group at a step, for people to look at.

    `kind` is among `MEDIA_KINDS`. Media without a file have their content as `value`: a text, or
    the `bins` (edges) and `counts` of a histogram.
    """

    group: str
    steps_completed: int
    name: str
    kind: str
    files: list[MediaFile] = []
    value: Any = None


class ProgressReported(Record, frozen=True, kw_only=True, tag="progress"):
    """Completed fraction of the whole training, from 0 to 1 inclusive."""

    progress: float


class StatusReported(Record, frozen=True, kw_only=True, tag="status"):
    """Free text about the present work of the process."""

    status: str


class EarlyExitReported(Record, frozen=True, kw_only=True, tag="early_exit"):
    """The user's code wants no further attempt; `reason` is among `EARLY_EXIT_REASONS`."""

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
    """The user's code deleted files of a checkpoint; `resources` are the remaining files."""

    uuid: str
    resources: dict[str, int]


class CheckpointSentApart(Record, frozen=True, kw_only=True, tag="checkpoint_sent_apart"):
    """Substitute for a record about a checkpoint; no process writes this kind.

    The runner sends the record itself with the files of the checkpoint.
    """

    uuid: str


class RunMetadataSet(Record, frozen=True, kw_only=True, tag="run_metadata"):
    """Metadata of the run from the user's code, replacing the metadata before."""

    metadata: dict[str, Any]


class AlertRaised(Record, frozen=True, kw_only=True, tag="alert"):
    """Alert of the user's code for people to see; `level` is among `ALERT_LEVELS`."""

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
    """`should_preempt()` asked the user's code to checkpoint and leave."""


class TimeSpent(Record, frozen=True, kw_only=True, tag="time_spent"):
    """The chief's time since the start of training, by use.

    `seconds` maps "data_wait", "validation", "checkpoint", "other" and "lost" to sums since the
    record whose `event` is "start"; all else was training. After "checkpoint", training continues
    from a state that can be restored; "report" comes in between, and "end" when training has ended.
    """

    event: Literal["start", "report", "checkpoint", "end"]
    steps_completed: int
    seconds: dict[str, float]


class SearchInputTaken(Record, frozen=True, kw_only=True, tag="search_input"):
    """Input taken by a search without a master; the inputs in order determine the whole search.

    `input` is the JSON of one of `paceline.search`. If it is a report, `number` is the number of
    the report in its trial and `metrics` has all its metrics.
    """

    input: dict[str, Any]
    number: int = 0
    metrics: dict[str, Any] | None = None


class RecordsDropped(Record, frozen=True, kw_only=True, tag="dropped"):
    """`count` reports were lost because the disk stayed full for too long."""

    count: int


class RecordLost(Record, frozen=True, kw_only=True, tag="lost"):
    """Substitute for an unreadable or unstorable record; no process writes this kind.

    `reason` ends the sentence "The record is lost: ...".
    """

    reason: str


class StoreChecked(Record, frozen=True, kw_only=True, tag="store"):
    """A storage does not answer for the `reason`; with None, the storage answers again."""

    storage: str
    reason: str | None


class AttemptFinished(Record, frozen=True, kw_only=True, tag="finished"):
    """The context was closed; `error` is the type and text of the closing exception.

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
    | MediaReported
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
MEDIA_KINDS = (
    "image", "audio", "video", "table", "histogram", "text", "figure", "html", "file"
)  # fmt: skip
OUTCOMES = ("completed", "preempted", "invalid_hp", "error")

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)


encode_record: Callable[[AnyRecord], bytes] = _encoder.encode
"""Return the record as one line of JSON, without the line end."""


def decode_record(payload: bytes) -> AnyRecord:
    """Return the record written by `encode_record`.

    Raises:
        msgspec.ValidationError: The payload is JSON but no known record.
        msgspec.DecodeError: The payload is not JSON.
    """
    return _decoder.decode(payload)


MAX_GAP = 1_000_000
"""Most records that are missing in one place of a journal: a number further on is damaged."""
MAX_STATUS = 64 * 1024
"""Most characters of a status."""
MAX_METADATA_BYTES = 1024 * 1024
"""Most bytes of the metadata of a run or a checkpoint, as JSON."""

NON_FINITE_KEY = "$float"
NON_FINITE = ("nan", "inf", "-inf")
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_PLAIN = (bool, str)


def encode_float(value: float) -> float | dict[str, str]:
    """Return `value`, tagged if JSON has no form for the number."""
    if isfinite(value):
        return value
    return {NON_FINITE_KEY: "nan" if isnan(value) else "inf" if value > 0 else "-inf"}


def encode_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON-able copy of reported metrics.

    Accepts numbers, strings, booleans, lists, nested dictionaries, NumPy scalars, 0-d tensors,
    NaN and infinities.

    Raises:
        TypeError: `metrics` or a value in it has another type; the message names its path.
        ValueError: A key is empty or reserved, or an integer needs more than 64 bits.
    """
    if type(metrics) is not dict and not hasattr(metrics, "items"):
        raise TypeError(
            f"`metrics` must be a dictionary of names to values, but got {type(metrics).__name__}."
        )
    encoded = {}
    for key, value in metrics.items():
        if type(value) is float and isfinite(value) and type(key) is str and key:
            encoded[key] = value
        else:
            encoded[_checked_key(key, "")] = _encode_metric(value, str(key))
    return encoded


def decode_value(value: Any) -> Any:
    """Return the value given to `encode_metrics` (tuples come back as lists)."""
    if isinstance(value, dict):
        # Other texts stay unchanged: the user's metadata may have any key.
        if len(value) == 1 and value.get(NON_FINITE_KEY) in NON_FINITE:
            return float(value[NON_FINITE_KEY])
        return {key: decode_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    return value


def same_value(left: Any, right: Any) -> bool:
    """Compare two decoded or encoded metric values; NaN equals NaN."""
    if isinstance(left, float) and isinstance(right, float) and isnan(left) and isnan(right):
        return True
    if isinstance(left, bool) != isinstance(right, bool):
        return False
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_value(left[k], right[k]) for k in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_value, left, right))
    return bool(left == right)


def _checked_key(key: Any, path: str) -> str:
    where = f" in `{path}`" if path else ""
    if not isinstance(key, str):
        raise TypeError(
            f"Metric names must be strings, but got {key!r} ({type(key).__name__}){where}."
        )
    if not key or key == NON_FINITE_KEY:
        raise ValueError(
            f"Metric names must be non-empty and other than {NON_FINITE_KEY!r},"
            f" but got {key!r}{where}."
        )
    return key


def _encode_metric(value: Any, path: str) -> Any:
    if isinstance(value, _PLAIN) and type(value) in _PLAIN:
        return value
    if type(value) is int:
        if not _INT64_MIN <= value <= _INT64_MAX:
            raise ValueError(
                f"Metric `{path}` must fit a signed 64-bit integer, but got {value}."
                " Hint: report it as a float or a string."
            )
        return value
    if isinstance(value, float):
        return encode_float(float(value))
    if isinstance(value, dict):
        return {_checked_key(k, path): _encode_metric(v, f"{path}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode_metric(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, (int, str)):  # enumerations and other subclasses
        return _encode_metric(int(value) if isinstance(value, int) else str(value), path)
    return _encode_metric(_metric_scalar(value, path), path)


def _metric_scalar(value: Any, path: str) -> Any:
    """Return the Python scalar in a NumPy scalar, a 0-d array or a 0-d tensor."""
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "item"):
        raise TypeError(
            f"Metric `{path}` must be a number, string, boolean, list or nested dictionary,"
            f" but got {value!r} ({type(value).__name__})."
        )
    if len(shape) != 0:
        raise TypeError(
            f"Metric `{path}` must hold one value, but got {type(value).__name__} of shape"
            f" {tuple(shape)}. Hint: report `.mean()` of it, or `.tolist()` for a list."
        )
    scalar = value.item()
    if not isinstance(scalar, (bool, int, float, str)):
        raise TypeError(
            f"Metric `{path}` must hold a real number, string or boolean, but got {scalar!r}."
        )
    return scalar


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptTimes:
    """Lifetime of an attempt, and its chief's time records.

    Attributes:
        created_at: When it was launched, in seconds since the epoch.
        ended_at: When it ended; None while it runs.
        sessions: The records of each of its chief's journals, oldest first; those of a restart
            within the attempt are a journal of their own.
    """

    created_at: float
    ended_at: float | None
    sessions: Sequence[Sequence[TimeSpent]]


@dataclass(kw_only=True, slots=True)
class TimeShares:
    """Seconds by use; their sum is the whole time.

    Attributes:
        training_s: Steps whose result was kept: forward and backward pass, optimizer.
        data_wait_s: The devices were idle, as they waited for data.
        validation_s: Validation.
        checkpoint_s: Training stood still while a checkpoint was stored.
        lost_s: Work after the last checkpoint before a stop; it was lost, and done once more where
            the training continued.
        start_s: From the launch of a process to its first step: imports, restoring, restarts.
        other_s: Time of the script between and after its trainings.
        undivided_s: Time of attempts that report no activity, such as hand-written loops.
        waiting_s: No process was there: queued, paused, or before a restart.
    """

    training_s: float = 0.0
    data_wait_s: float = 0.0
    validation_s: float = 0.0
    checkpoint_s: float = 0.0
    lost_s: float = 0.0
    start_s: float = 0.0
    other_s: float = 0.0
    undivided_s: float = 0.0
    waiting_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The whole time."""
        return sum(self.seconds().values())

    @property
    def goodput(self) -> float | None:
        """Training's fraction of the time with processes, None if not known."""
        used_s = self.total_s - self.waiting_s
        return None if self.undivided_s or used_s <= 0 else self.training_s / used_s

    def seconds(self) -> dict[str, float]:
        """Return the seconds by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a share."""
        setattr(self, name, getattr(self, name) + seconds)


_SHARES = ("data_wait", "validation", "checkpoint", "other", "lost")


def divide_time(began: float, until: float, attempts: Sequence[AttemptTimes]) -> TimeShares:
    """Divide the time from `began` to `until` by use.

    Work is lost from the checkpoint on from which the next session resumed. Clocks of several
    machines may differ: times outside of an attempt are moved to its bounds.

    Args:
        began: When the training was asked for, in seconds since the epoch.
        until: When it ended, or now.
        attempts: Its attempts, oldest first.
    """
    shares, clock = TimeShares(), began
    all_sessions = [session for attempt in attempts for session in attempt.sessions if session]
    next_starts = iter([*(session[0].steps_completed for session in all_sessions[1:]), None])
    for attempt in attempts:
        begin = min(max(attempt.created_at, clock), max(until, clock))
        end = until if attempt.ended_at is None else min(attempt.ended_at, until)
        end = max(end, begin)
        shares.waiting_s += begin - clock
        sessions = [session for session in attempt.sessions if session]
        if sessions:
            starts = [next(next_starts) for _ in sessions]
            is_running = attempt.ended_at is None
            _divide_attempt(shares, begin, end, sessions, starts, is_running=is_running)
        else:
            # Attempt without records in a trainer with others: training never started there.
            shares.add("start_s" if all_sessions else "undivided_s", end - begin)
        clock = end
    shares.waiting_s += max(until - clock, 0.0)
    return shares


def _divide_attempt(
    shares: TimeShares,
    begin: float,
    end: float,
    sessions: Sequence[Sequence[TimeSpent]],
    next_starts: Sequence[int | None],
    *,
    is_running: bool,
) -> None:
    clock = begin
    for session, next_start in zip(sessions, next_starts, strict=True):
        first = min(max(session[0].time, clock), end)
        shares.start_s += first - clock
        clock = first
        kept_steps = inf if next_start is None else next_start
        for earlier, later in zip(session, session[1:], strict=False):
            time = min(max(later.time, clock), end)
            _divide_piece(shares, time - clock, earlier, later, kept_steps)
            clock = time
    last = sessions[-1][-1]
    if last.event == "end":
        shares.other_s += end - clock
    else:
        shares.add("training_s" if is_running else "lost_s", end - clock)


def _divide_piece(
    shares: TimeShares, seconds: float, earlier: TimeSpent, later: TimeSpent, kept_steps: float
) -> None:
    """Divide the time between two records."""
    lost_s = seconds * _lost_fraction(earlier.steps_completed, later.steps_completed, kept_steps)
    shares.lost_s += lost_s
    kept_s = left_s = seconds - lost_s
    for name, spent_s in _spent_between(earlier, later):
        share_s = min(spent_s * (kept_s / seconds if seconds else 0.0), left_s)
        shares.add(f"{name}_s", share_s)
        left_s -= share_s
    shares.training_s += left_s


def _spent_between(earlier: TimeSpent, later: TimeSpent) -> Iterator[tuple[str, float]]:
    for name in _SHARES:
        yield name, max(later.seconds.get(name, 0.0) - earlier.seconds.get(name, 0.0), 0.0)


def _lost_fraction(earlier: int, later: int, kept_steps: float) -> float:
    """Return the fraction of the way between two steps beyond the steps kept."""
    if later <= kept_steps:
        return 0.0
    return 1.0 if earlier >= kept_steps else (later - kept_steps) / (later - earlier)


MAX_DEPTH = 64


def is_too_deep(value: Any) -> bool:
    """Return whether dictionaries and lists are in each other more than `MAX_DEPTH` times."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [each for each in level if isinstance(each, (dict, list))]
        if not level:
            return False
        level = [
            item for each in level for item in (each.values() if isinstance(each, dict) else each)
        ]
    return True


_SEAL = re.compile(rb',\s*"checksum":\s*"([0-9a-f]{8})"\s*\}\s*\Z')


def seal(data: bytes) -> bytes:
    """Return a non-empty JSON object with a checksum of everything before the checksum."""
    content = data.rstrip()
    assert content.endswith(b"}"), data
    content = content[:-1].rstrip()
    line = b"\n " if b"\n" in content else b""
    end = b"\n" if line else b""
    return b'%b,%b"checksum": "%08x"%b}' % (content, line, zlib.crc32(content), end)


def check_seal(data: bytes) -> bytes:
    """Return a JSON object unchanged, after comparing its content with its checksum.

    Raises:
        msgspec.DecodeError: It has another checksum.
    """
    try:
        data.decode()
    except UnicodeDecodeError as error:
        # Decoding JSON raises this as it is, where a name is concerned.
        raise msgspec.DecodeError(str(error)) from error
    found = _SEAL.search(data)
    if found is not None and int(found[1], 16) != zlib.crc32(data[: found.start()]):
        raise msgspec.DecodeError("its checksum does not fit")
    return data


def seal_line(line: bytes) -> bytes:
    """Return a JSON array as a line with a checksum of everything before the checksum."""
    content = line.removesuffix(b"]")
    return b"%b, %d]\n" % (content, zlib.crc32(content))


def check_line(line: bytes) -> bytes:
    """Return the JSON array of a line without its checksum.

    Raises:
        ValueError: The checksum is missing or does not fit.
    """
    line, _, checksum = line.removesuffix(b"\n").rpartition(b", ")
    if int(checksum.removesuffix(b"]")) != zlib.crc32(line):
        raise ValueError("The checksum of a line does not fit.")
    return line + b"]"
