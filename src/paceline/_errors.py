"""Base of the exceptions of several packages."""

from typing import Any


class PicklableError(Exception):
    """A base of exceptions whose `__init__` takes more than the message.

    Python makes a copy of an exception by calling its class with `args`, here the message alone.
    Such exceptions are made again without their `__init__`, so they survive pickling and copying,
    with their attributes and notes; subclasses with an `__init__` of their own do so too.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt_error, (type(self), self.args, dict(vars(self)))


class CollectiveMismatchError(RuntimeError):
    """Raised when ranks wait in a collective operation that the others do not take part in.

    No rank was lost: the program itself must have all ranks make the same calls.
    """


def text_of(error: BaseException) -> str:
    """Return the text of an exception, or as Python does that there is none.

    The class may be the user's, whose `__str__` can fail.
    """
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def add_note(error: BaseException, text: str) -> None:
    """Add a line to what is printed of an exception; Python 3.10 keeps it and does not print it."""
    vars(error).setdefault("__notes__", []).append(text)


def rebuilt_error(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    """Return an exception that is made of its parts, without its `__init__`."""
    error = kind.__new__(kind, *args)
    # Classes such as frozen dataclasses forbid it by a `__setattr__` of their own.
    BaseException.__setattr__(error, "args", args)
    vars(error).update(state)
    return error
