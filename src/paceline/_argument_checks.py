"""Checks of arguments and fields, whose errors name the argument and what must hold."""

import math
from collections.abc import Callable, Mapping
from typing import Any

# Returns the value to keep, or raises an error that names the argument.
Check = Callable[[str, Any], Any]


def wrong(name: str, must: str, value: Any, hint: str = "") -> str:
    """Return the text of an error about an argument."""
    shown = value.__name__ if isinstance(value, type) else repr(value)
    shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
    return f"`{name}` must be {must}, but got {shown}." + (f" Hint: {hint}" if hint else "")


def check_count(name: str, value: object, least: int = 1) -> None:
    """Check that an argument is an integer of at least some number.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(wrong(name, f"an integer of at least {least}", value))


def check_function(name: str, value: object) -> None:
    """Check that an argument can be called.

    Raises:
        TypeError: It cannot.
    """
    if not callable(value):
        raise TypeError(wrong(name, "a function", value))


def check_dictionary(name: str, value: object, error: type[Exception] = TypeError) -> None:
    """Check that an argument is a dictionary, if it is given.

    Raises:
        TypeError: It is none, or another error if that is given.
    """
    if value is not None and not isinstance(value, Mapping):
        raise error(f"`{name}` must be a dictionary, but got {type(value).__name__}.")


def optional(check: Check) -> Check:
    """Return a check that lets None pass."""
    return lambda name, value: None if value is None else check(name, value)


def boolean(name: str, value: Any) -> bool:
    """Return a bool.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(wrong(name, "True or False", value))
    return value


def integer(name: str, value: Any) -> int:
    """Return an integer.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(wrong(name, "an integer", value))
    return value


def count(minimum: int) -> Check:
    """Return a check for integers from a minimum on."""

    def check(name: str, value: Any) -> int:
        if integer(name, value) < minimum:
            raise ValueError(wrong(name, f"at least {minimum}", value))
        return int(value)

    return check


def number(name: str, value: Any) -> float:
    """Return a finite number as a float.

    Raises:
        TypeError: It is no number.
        ValueError: It is not finite.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(wrong(name, "a number", value))
    if not math.isfinite(value):
        raise ValueError(wrong(name, "a finite number", value))
    return float(value)


def positive(name: str, value: Any) -> float:
    """Return a number above 0.

    Raises:
        TypeError: It is no number.
        ValueError: It is 0, negative or not finite.
    """
    if number(name, value) <= 0:
        raise ValueError(wrong(name, "above 0", value))
    return float(value)


def one_of(*allowed: Any) -> Check:
    """Return a check for one of some values."""

    def check(name: str, value: Any) -> Any:
        if value not in allowed:
            raise ValueError(wrong(name, f"one of {', '.join(map(repr, allowed))}", value))
        return value

    return check


def text(name: str, value: Any) -> str:
    """Return text that is not empty, such as a name or a path.

    Raises:
        TypeError: It is no text.
        ValueError: It is empty.
    """
    if hasattr(value, "__fspath__"):
        value = value.__fspath__()
    if not isinstance(value, str):
        raise TypeError(wrong(name, "text", value))
    if not value:
        raise ValueError(wrong(name, "text that is not empty", value))
    return value


def ranks_to_check(name: str, value: Any) -> bool | tuple[str, ...]:
    """Return whether ranks are compared, or the tensors that each rank has for itself.

    Raises:
        TypeError: It is neither a bool nor names.
    """
    if isinstance(value, bool):
        return value
    names = value if isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(each, str) for each in names):
        raise TypeError(wrong(name, "True, False or names of tensors", value))
    return tuple(names)
