"""Named points in the code at which a test can have the process killed.

``PACELINE_FAULT=storage.before_manifest`` kills the process (SIGKILL) when it first reaches that
point, ``PACELINE_FAULT=storage.between_files:3`` when it reaches it for the third time.
"""

import os
import signal

FAULT_VARIABLE = "PACELINE_FAULT"

_points: set[str] = set()
_num_reached = 0


def register(*names: str) -> None:
    """Make points known, so that a misspelt one is refused instead of never reached."""
    _points.update(names)


def points() -> frozenset[str]:
    """Return the names of all points of the packages imported so far."""
    return frozenset(_points)


def reach(point: str) -> None:
    """Kill this process if `PACELINE_FAULT` asks for it at this point; else do nothing.

    Raises:
        ValueError: `point` was not registered, or the variable's count is no number above 0.
    """
    wanted = os.environ.get(FAULT_VARIABLE)
    if wanted is None:
        return
    if point not in _points:
        raise ValueError(
            f"A fault point must be registered, but got {point!r}."
            f" Hint: `faults.register({point!r})` where it is used."
        )
    name, _, count = wanted.partition(":")
    if name != point:
        return
    if count and not (count.isdecimal() and int(count) > 0):
        raise ValueError(
            f"`{FAULT_VARIABLE}` must be a point or `point:N` with N >= 1, but got {wanted!r}."
        )
    global _num_reached
    _num_reached += 1
    if _num_reached == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
