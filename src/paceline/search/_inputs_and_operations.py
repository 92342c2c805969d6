"""Inputs and outputs of a search: plain, frozen, JSON-able records."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import msgspec


class ExitReason(str, Enum):
    """Tell why a trial ended."""

    COMPLETED = "completed"
    ERROR = "error"
    CANCELED = "canceled"
    INVALID_HP = "invalid_hp"


class Started(msgspec.Struct, frozen=True, tag="started", kw_only=True):
    """Begin the search; the first input, given once."""


class Reported(msgspec.Struct, frozen=True, tag="reported", kw_only=True):
    """Tell one validation result of a trial.

    `time` is the trial's absolute training time, in the unit of the search's time metric. A
    report at a time that is not finite changes nothing.
    `metric` is the searched metric as the trial reported it; what is not finite ranks behind every
    finite number.
    """

    request_id: str
    time: float
    metric: float


class Progressed(msgspec.Struct, frozen=True, tag="progressed", kw_only=True):
    """Tell how far a trial says it is, from 0 to 1."""

    request_id: str
    progress: float


class Exited(msgspec.Struct, frozen=True, tag="exited", kw_only=True):
    """Tell that a trial has ended for good and why."""

    request_id: str
    reason: ExitReason


class Create(msgspec.Struct, frozen=True, tag="create", kw_only=True):
    """Ask for a new trial with these hyperparameters."""

    request_id: str
    trial_seed: int
    hparams: dict[str, Any]


class Train(msgspec.Struct, frozen=True, tag="train", kw_only=True):
    """Set the absolute length that a trial should train to next."""

    request_id: str
    length: int


class Stop(msgspec.Struct, frozen=True, tag="stop", kw_only=True):
    """Say that the search wants no more of a trial."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", kw_only=True):
    """End the search: every trial it asked for has ended."""

    failure: bool
    cancel: bool


Input = Started | Reported | Progressed | Exited
Operation = Create | Train | Stop | Shutdown


def encode_search_float(number: float) -> float | str:
    """Encode a float for JSON, which knows no NaN and no infinities."""
    if math.isfinite(number):
        return number
    return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"


def message_to_json(message: Input | Operation) -> str:
    """Encode an input or an operation as JSON that keeps NaN and infinities."""
    fields = msgspec.to_builtins(message)
    for name, value in fields.items():
        if isinstance(value, float):
            fields[name] = encode_search_float(value)
    return msgspec.json.encode(fields).decode()


def input_from_json(text: str | bytes) -> Input:
    """Decode what `message_to_json` made of an input.

    Raises:
        msgspec.ValidationError: If the text is JSON but no input.
        msgspec.DecodeError: If the text is not JSON.
    """
    # Lax decoding is what turns the strings "nan", "inf" and "-inf" back into floats.
    decoded: Input = msgspec.json.decode(text, type=Input, strict=False)
    return decoded


def operation_from_json(text: str | bytes) -> Operation:
    """Decode what `message_to_json` made of an operation.

    Raises:
        msgspec.ValidationError: If the text is JSON but no operation.
        msgspec.DecodeError: If the text is not JSON.
    """
    decoded: Operation = msgspec.json.decode(text, type=Operation)
    return decoded
