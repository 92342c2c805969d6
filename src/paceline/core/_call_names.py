"""Names of exchanges between ranks, by which ranks notice that they make different ones."""

import os
import sys
from collections.abc import Mapping
from types import FrameType
from typing import NamedTuple

from paceline._errors import CollectiveMismatchError

_PACKAGE = __name__.partition(".")[0]
# The same exchange serves many callers there: whoever calls them tells which one it is.
_SHARED = frozenset({"failing_together", "decide", "barrier", "_exchange", "submit", "ask"})
_STANDARD = frozenset({"contextlib", "functools"})
_SEPARATOR = "\t"


class CallName(NamedTuple):
    """Name of an exchange.

    Attributes:
        operation: The operation, such as "allgather".
        caller: The function of Paceline that exchanges; empty if the user's code does.
        told: What a message calls it: the function that the user's code calls, and where.
    """

    operation: str
    caller: str
    told: str

    def encode(self) -> bytes:
        """Return the name as the head of a message."""
        return _SEPARATOR.join(self).encode() + b"\n"

    def is_same(self, other: "CallName") -> bool:
        """Tell whether both are one exchange, wherever a script calls it."""
        return (self.operation, self.caller) == (other.operation, other.caller)


def name_of_call(operation: str) -> CallName:
    """Return the name of an exchange that the caller of the calling module begins."""
    module = sys._getframe(1).f_globals["__name__"]
    frame: FrameType | None = sys._getframe(1)
    caller, function = "", f"distributed.{operation}"
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] == _PACKAGE:
            if name != module:
                function = frame.f_code.co_name
                if not caller and function not in _SHARED:
                    caller = f"{name}.{function}"
        elif name not in _STANDARD:
            break
        frame = frame.f_back
    return CallName(operation, caller, f"`{function}`{_place_of(frame)}")


def split_message(message: bytes) -> tuple[CallName, bytes]:
    """Return the name and the value of a message."""
    head, _, value = message.partition(b"\n")
    operation, caller, told = head.decode().split(_SEPARATOR)
    return CallName(operation, caller, told), value


def check_same_call(own: CallName, rank: int, others: Mapping[int, CallName]) -> None:
    """Require that other ranks make the exchange that this one makes.

    Raises:
        CollectiveMismatchError: One makes another one.
    """
    different = {other: name for other, name in others.items() if not own.is_same(name)}
    if not different:
        return
    told = "; ".join(f"rank {other} called {name.told}" for other, name in different.items())
    raise CollectiveMismatchError(
        f"All ranks must make the same calls in the same order, but rank {rank} called {own.told},"
        f" and {told}. Hint: call it on all ranks, not below `if rank == 0:`."
    )


def _place_of(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    code = frame.f_code
    # A line break or a tab in a name would end the head of a message.
    file = " ".join(os.path.basename(code.co_filename).split())
    return f" ({file}:{frame.f_lineno} in {code.co_name})"
