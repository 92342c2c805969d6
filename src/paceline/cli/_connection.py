"""The client that a command talks through, from the options of `paceline` itself."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.client import Client

# Set by the `--master` option, before the command runs.
chosen_master: ContextVar[str | None] = ContextVar("chosen_master", default=None)


def trust(ca_file: Path) -> None:
    """Trust the authorities in a file; so do processes that this one starts."""
    from paceline._certificates import CA_FILE_VARIABLE

    os.environ[CA_FILE_VARIABLE] = str(ca_file.expanduser().absolute())


@contextmanager
def connect() -> "Iterator[Client]":
    """Give a client of the master that the options or the environment name."""
    from paceline.client import Client

    with Client(chosen_master.get()) as client:
        yield client
