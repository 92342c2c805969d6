"""The client that a command talks through, from the options of `paceline` itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.client import Client

# Set by the `--master` option, before the command runs.
chosen_master: ContextVar[str | None] = ContextVar("chosen_master", default=None)


@contextmanager
def connect() -> "Iterator[Client]":
    """Give a client of the master that the options or the environment name."""
    from paceline.client import Client

    with Client(chosen_master.get()) as client:
        yield client
