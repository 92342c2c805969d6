"""Base classes of exceptions, and their texts and copies in other processes."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


class PicklableError(Exception):
    """Base of picklable exceptions with more `__init__` arguments than the message.

    Python makes a copy of an exception by calling its class with `args`, here the message alone.
    Such exceptions are made again without their `__init__`, so they survive pickling and copying,
    with their attributes and notes; subclasses with an `__init__` of their own do so too.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt_error, (type(self), self.args, dict(vars(self)))


class CollectiveMismatchError(RuntimeError):
    """Raised when ranks wait in a collective operation not joined by the other ranks.

    No rank was lost: the program itself must have all ranks make the same calls.
    """


def text_of(error: BaseException) -> str:
    """Return the text of an exception, or Python's placeholder if its `__str__` fails.

    The class may be the user's, whose `__str__` can fail.
    """
    try:
        return str(error)
    # A user's `__str__` may raise anything.
    except Exception:
        return "<exception str() failed>"


def add_note(error: BaseException, text: str) -> None:
    """Add a line to an exception's printed text; Python 3.10 keeps the note without printing."""
    vars(error).setdefault("__notes__", []).append(text)


def rebuilt_error(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    """Return an exception rebuilt from its parts, without its `__init__`."""
    error = kind.__new__(kind, *args)
    # Classes such as frozen dataclasses forbid it by a `__setattr__` of their own.
    BaseException.__setattr__(error, "args", args)
    vars(error).update(state)
    return error
