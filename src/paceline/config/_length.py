"""Lengths and periods: numbers of batches, epochs or records."""

from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic.json_schema import WithJsonSchema

from paceline.config._problems import refused

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


def _check(kind: str, minimum: int) -> BeforeValidator:
    units = ", ".join(f"{{{unit}: N}}" for unit in UNITS)
    allowed = f"an integer >= {minimum}, or one of {units}"

    def check(value: Any) -> Any:
        if split_length(value, minimum=minimum) is None:
            raise refused(f"must be a {kind}", allowed)
        return dict(value) if isinstance(value, dict) else value

    return BeforeValidator(check)


def _schema(minimum: int) -> WithJsonSchema:
    number = {"type": "integer", "minimum": minimum}
    units = {
        "type": "object",
        "properties": dict.fromkeys(UNITS, number),
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    return WithJsonSchema({"anyOf": [number, units]})


MaxLength = Annotated[int | dict[str, int], _check("length", 1), _schema(1)]
Period = Annotated[int | dict[str, int], _check("period", 0), _schema(0)]
