"""Arguments of the core API: choices, checks of reports, labels and JSON."""

import json
import logging
import operator
import secrets
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from math import isfinite
from typing import Any

import msgspec

from paceline._base.journal_records import MAX_DEPTH, decode_value, is_too_deep, same_value
from paceline._base.run_directory import RunInfo

logger = logging.getLogger(__name__)


class PreemptMode(Enum):
    """Who may call `should_preempt()`, and where the answer comes from.

    - `WorkersAskChief`: all ranks call equally often, and all get the same answer. A signal to any
      of them counts.
    - `ChiefOnly`: the chief alone calls, and informs the others in its own way.
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


RESERVED_GROUPS = frozenset({"cpu", "disk", "gpu", "memory", "network"})
# Step limit: the largest integer that every store of numbers holds (signed, 64 bits).
MAX_STEPS = 2**63 - 1


def rank_group(group: str, rank: int) -> str:
    """Return the metric group of a rank's reports; the plain group name is the chief's."""
    return group if rank == 0 else f"{group}_rank_{rank}"


def new_metrics(
    group: str, steps_completed: int, known: dict[str, Any], metrics: dict[str, Any]
) -> dict[str, Any]:
    """Return the metrics not yet reported at this step; raise ValueError for a changed value."""
    for key in known.keys() & metrics.keys():
        if not same_value(known[key], metrics[key]):
            raise ValueError(
                f"A metric must not change once reported, but {group} metric {key!r} at"
                f" `steps_completed`={steps_completed} was {decode_value(known[key])!r} and is now"
                f" {decode_value(metrics[key])!r}. Hint: count steps on over epochs, and report"
                " each only once."
            )
    return {key: value for key, value in metrics.items() if key not in known}


def searched_metrics(searcher: Mapping[str, Any], judged: Sequence[str] | None) -> tuple[str, ...]:
    """Return the metrics required to be numbers because a search compares its trials by them.

    Args:
        searcher: The `searcher` section of the trial's config; empty without one.
        judged: The metrics that the search needs to judge a report, if it judges them.
    """
    if not searcher or searcher.get("name") == "single":
        return ()
    return tuple(judged or filter(None, [searcher.get("metric")]))


def check_judged(metrics: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse a report with a non-numeric value for a metric needed by a search.

    Args:
        metrics: The report, encoded.
        names: The result of `searched_metrics`.

    Raises:
        TypeError: One is no number.
    """
    for name in names:
        value = decode_value(metrics.get(name, 0))
        if type(value) not in (int, float):
            raise TypeError(
                f"The metric {name!r} must be a number, as the search goes by it, but got"
                f" {value!r}. Hint: report a float, or set the metric of the searcher to another"
                " name."
            )


def checked_steps(steps_completed: object) -> int:
    """Return a plain integer for NumPy's and the like."""
    try:
        # Booleans are integers in Python: only an explicit check refuses True as a step.
        if isinstance(steps_completed, bool):
            raise TypeError
        value = operator.index(steps_completed)  # type: ignore[arg-type]  # refused below
    except TypeError:
        raise TypeError(
            f"`steps_completed` must be an integer, but got {steps_completed!r}"
            f" ({type(steps_completed).__name__})."
        ) from None
    if value < 0:
        raise ValueError(f"`steps_completed` must be at least 0, but got {value}.")
    if value > MAX_STEPS:
        raise ValueError(
            f"`steps_completed` must be below 2**63, but got {value}."
            " Hint: it counts batches, not samples or time."
        )
    return value


def check_group(group: object) -> None:
    if not isinstance(group, str):
        raise TypeError(f"`group` must be a string, but got {group!r}.")
    if not group or "." in group or group in RESERVED_GROUPS:
        reserved = ", ".join(sorted(RESERVED_GROUPS))
        raise ValueError(
            f"`group` must be a non-empty name without dots and none of {reserved},"
            f" but got {group!r}."
        )


def plain_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `metadata` in plain JSON types.

    Raises:
        TypeError: It is no dictionary, is nested too deep, or holds a value that JSON cannot.
    """
    if not isinstance(metadata, Mapping):
        raise TypeError(f"`metadata` must be a dictionary, but got {metadata!r}.")
    try:
        copy: dict[str, Any] = json.loads(json.dumps(metadata, allow_nan=False))
        # Second encoder: refuses integers beyond 64 bits, unlike `json`.
        msgspec.json.encode(copy)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(
            f"`metadata` must be JSON-able, but {error}. Hint: use strings, finite numbers,"
            " booleans, lists and dictionaries."
        ) from error
    if is_too_deep(copy):
        raise TypeError(f"`metadata` must not be nested more than {MAX_DEPTH} times.")
    return copy


def numbers_of(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the name and value of each numeric metric; nested dictionaries give names like "a/b".

    Args:
        metrics: The metrics, also as a journal has them.
        prefix: Text before each name.
    """
    for name, value in metrics.items():
        number = decode_value(value)
        if isinstance(number, Mapping):
            yield from numbers_of(number, f"{prefix}{name}/")
        elif isinstance(number, (int, float)):
            yield f"{prefix}{name}", float(number)


_MAX_LABEL = 100
_MAX_SEED = 2**31
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def drawn_seed() -> int:
    """Return a new seed."""
    return secrets.randbelow(_MAX_SEED)


def checked_labels(labels: Sequence[str]) -> list[str]:
    """Return the labels of a run.

    Raises:
        TypeError: One is no text, or there is one text in place of a list.
        ValueError: One is empty or longer than 100 characters.
    """
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        raise TypeError(f"`labels` must be a list of texts, but got {labels!r}.")
    for label in labels:
        if not 0 < len(label) <= _MAX_LABEL or not label.isprintable():
            raise ValueError(
                f"A label must have 1 to {_MAX_LABEL} printable characters, but got {label!r:.200}."
            )
    return [*dict.fromkeys(labels)]


def recordable(value: Any) -> Any:
    """Return a JSON copy of hyperparameters; values unknown to JSON become text."""
    if isinstance(value, Mapping):
        return {str(key): recordable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [recordable(item) for item in value]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        # A NumPy scalar or a 0-d tensor.
        value = value.item()
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int and _INT64_MIN <= value <= _INT64_MAX:
        return value
    if type(value) is float and isfinite(value):
        return value
    return str(value)


def warn_changed_hparams(info: RunInfo, hparams: Mapping[str, Any] | None) -> None:
    """Warn if a resumed run has other hyperparameters than at its beginning."""
    if hparams is None or info.hparams is None:
        return
    before, now = info.hparams, recordable(hparams)
    changed = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if changed:
        logger.warning(
            "The run %r resumes with other hyperparameters than it began with, which stay on"
            " record: %s.",
            info.name,
            "; ".join(changed),
        )
