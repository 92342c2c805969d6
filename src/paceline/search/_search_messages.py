"""Inputs of a search method and its operations, and their JSON."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import msgspec


class ExitReason(str, Enum):
    """Return why a trial ended."""

    COMPLETED = "completed"
    ERROR = "error"
    CANCELED = "canceled"
    INVALID_HP = "invalid_hp"


class Started(msgspec.Struct, frozen=True, tag="started", kw_only=True):
    """Begin the search; the first input, given once."""


class Reported(msgspec.Struct, frozen=True, tag="reported", kw_only=True, omit_defaults=True):
    """Input: a validation result of a trial.

    `time` is the trial's absolute training time, in the unit of the search's time metric. A
    report at a time that is not finite changes nothing.
    `metric` is the searched metric as the trial reported it; a value that is not finite ranks
    behind every finite number. `others` has the values of the other objectives in their order.
    """

    request_id: str
    time: float
    metric: float
    others: tuple[float, ...] = ()


class Progressed(msgspec.Struct, frozen=True, tag="progressed", kw_only=True):
    """Input: a trial's own progress from 0 to 1."""

    request_id: str
    progress: float


class Exited(msgspec.Struct, frozen=True, tag="exited", kw_only=True):
    """Input: the final exit of a trial, and the reason; an error can be a want of memory."""

    request_id: str
    reason: ExitReason
    is_out_of_memory: bool = False


class Proposed(msgspec.Struct, frozen=True, tag="proposed", kw_only=True):
    """Input: the hyperparameters of a trial, as asked for by the search.

    `hparams` of None means the search's own draw at random. With `is_fallback` it stands in for an
    answer that was wrong, late or missing; `why` says which. `note` is the sampler's, as JSON.
    """

    request_id: str
    hparams: dict[str, Any] | None
    by: str
    why: str = ""
    is_fallback: bool = False
    note: Any = None


class Limited(msgspec.Struct, frozen=True, tag="limited", kw_only=True):
    """Input: what the search may use from now on, before `Started` or at any later time.

    Attributes:
        max_trials: How many trials it may create; those that refuse their hyperparameters do not
            count. More than the method has makes the method create more.
        max_slot_hours: How many hours its trials may hold slots, in sum.
        max_wall_time: How many seconds it may take.
        target: The value of the metric at which it ends.
        max_failures: At how many failed trials it ends.
        best: The best value of the metric so far, for a search that was told none; None for nothing
            new.
    """

    max_trials: int | None = None
    max_slot_hours: float | None = None
    max_wall_time: float | None = None
    target: float | None = None
    max_failures: int | None = None
    best: float | None = None


class Spent(msgspec.Struct, frozen=True, tag="spent", kw_only=True):
    """Input: what the search has taken since its beginning; less than before changes nothing.

    Attributes:
        wall_s: Seconds in which it was active.
        slot_s: Seconds for which its trials held slots, in sum.
    """

    wall_s: float
    slot_s: float = 0.0


class Recalled(msgspec.Struct, frozen=True, tag="recalled", kw_only=True):
    """Input: ended trials from before the search, from which its sampler learns.

    Attributes:
        source: Where they are from, for people.
        trials: Of each the hyperparameters, the best finite value of the metric, and its time.
    """

    source: str
    trials: list[tuple[dict[str, Any], float, float]]


class Create(msgspec.Struct, frozen=True, tag="create", kw_only=True):
    """Ask for a new trial with these hyperparameters.

    With `parent`, it starts from the latest checkpoint of that trial, and counts its time from its
    own beginning.
    """

    request_id: str
    trial_seed: int
    hparams: dict[str, Any]
    parent: str | None = None


class Train(msgspec.Struct, frozen=True, tag="train", kw_only=True):
    """Operation: set the absolute length of a trial's next training."""

    request_id: str
    length: int


class Stop(msgspec.Struct, frozen=True, tag="stop", kw_only=True):
    """Operation: stop a trial, since the search needs no more of its results."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", kw_only=True):
    """Operation: end the search, after the end of all its trials."""

    failure: bool
    cancel: bool


Input = Started | Reported | Progressed | Exited | Proposed | Limited | Spent | Recalled
Operation = Create | Train | Stop | Shutdown


def encode_search_float(number: float) -> float | str:
    """Encode a float for JSON, a format without NaN and infinities."""
    if math.isfinite(number):
        return number
    return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"


def message_to_json(message: Input | Operation) -> str:
    """Encode an input or an operation as JSON with NaN and infinities preserved."""
    fields = msgspec.to_builtins(message)
    for name, value in fields.items():
        if isinstance(value, float):
            fields[name] = encode_search_float(value)
        elif name == "others":
            fields[name] = [*map(encode_search_float, value)]
    return msgspec.json.encode(fields).decode()


def input_from_json(text: str | bytes) -> Input:
    """Decode an input encoded by `message_to_json`.

    Raises:
        msgspec.ValidationError: If the text is JSON but no input.
        msgspec.DecodeError: If the text is not JSON.
    """
    # Only lax decoding turns the strings "nan", "inf" and "-inf" back into floats.
    decoded: Input = msgspec.json.decode(text, type=Input, strict=False)
    return decoded


def operation_from_json(text: str | bytes) -> Operation:
    """Decode an operation encoded by `message_to_json`.

    Raises:
        msgspec.ValidationError: If the text is JSON but no operation.
        msgspec.DecodeError: If the text is not JSON.
    """
    decoded: Operation = msgspec.json.decode(text, type=Operation)
    return decoded
