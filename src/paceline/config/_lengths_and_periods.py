"""Lengths and periods: numbers of batches, epochs or records; sizes and ages."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic.json_schema import WithJsonSchema

from paceline._quantities import (
    AGE_FORMS,
    AGE_PATTERN,
    SIZE_FORMS,
    SIZE_PATTERN,
    bytes_of,
    seconds_of,
)
from paceline.config._config_problems import refused

CONTINUOUS = "continuous"
UNITS = ("batches", "epochs", "records")
_MAX_LENGTH = 2**53 - 1


def split_length(value: Any, *, minimum: int = 1) -> tuple[str, int] | None:
    """Return the unit and number of a length, or None if it is not one."""
    if _is_count(value, minimum):
        return "batches", value
    if isinstance(value, dict) and len(value) == 1:
        [(unit, number)] = value.items()
        if unit in UNITS and _is_count(number, minimum):
            return unit, number
    return None


def _is_count(value: Any, minimum: int) -> bool:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return is_integer and minimum <= value <= _MAX_LENGTH


def _check_length(kind: str, minimum: int, *words: str) -> BeforeValidator:
    units = ", ".join(f"{{{unit}: N}}" for unit in UNITS)
    allowed = ", or ".join([f"an integer >= {minimum}", f"one of {units}", *words])

    def check(value: Any) -> Any:
        if isinstance(value, str) and value in words:
            return value
        if split_length(value, minimum=minimum) is None:
            raise refused(f"must be a {kind}", allowed)
        return dict(value) if isinstance(value, dict) else value

    return BeforeValidator(check)


def _length_schema(minimum: int, *words: str) -> WithJsonSchema:
    number = {"type": "integer", "minimum": minimum}
    units = {
        "type": "object",
        "properties": dict.fromkeys(UNITS, number),
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    return WithJsonSchema({"anyOf": [number, *({"const": word} for word in words), units]})


def _quantity(read: Callable[[Any], Any], kind: str, allowed: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        number = read(value)
        if number is None:
            raise refused(f"must be {kind}", allowed)
        return number

    return BeforeValidator(check)


def _quantity_schema(number: dict[str, Any], pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [number, {"type": "string", "pattern": pattern}]})


MaxLength = Annotated[int | dict[str, int], _check_length("length", 1), _length_schema(1)]
Period = Annotated[int | dict[str, int], _check_length("period", 0), _length_schema(0)]
CheckpointPeriod = Annotated[
    int | str | dict[str, int],
    _check_length("period", 0, CONTINUOUS),
    _length_schema(0, CONTINUOUS),
]
NumBytes = Annotated[
    int,
    _quantity(bytes_of, "a size", SIZE_FORMS),
    _quantity_schema({"type": "integer", "minimum": 1}, SIZE_PATTERN),
]
Age = Annotated[
    float,
    _quantity(seconds_of, "a time", AGE_FORMS),
    _quantity_schema({"type": "number", "exclusiveMinimum": 0}, AGE_PATTERN),
]
