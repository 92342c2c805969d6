"""Which run this process works for; apart, as nothing here may load torch."""

from typing import Any

_sessions: list[Any] = []
_is_pool_worker: list[bool] = []


def current_session() -> Any:
    """Return the run that this process works for, or None outside of one."""
    return _sessions[-1] if _sessions else None


def enter_session(session: Any) -> None:
    """Make a run this process's.

    Raises:
        RuntimeError: It works for one already.
    """
    if _sessions:
        raise RuntimeError("A train function must not start another run in its own process.")
    _sessions.append(session)


def leave_session() -> None:
    """End what `enter_session` began."""
    _sessions.clear()


def become_pool_worker() -> None:
    """Note that this process is a worker of a trainer in another process."""
    _is_pool_worker.append(True)


def is_pool_worker() -> bool:
    """Tell whether this process is a worker of a trainer in another process."""
    return bool(_is_pool_worker)
