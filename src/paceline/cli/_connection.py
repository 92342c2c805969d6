"""The connection to the master: its address, certificates and tokens."""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from paceline._base.files import DamagedSecretError, read_secret
from paceline.cli._errors import CommandError

if TYPE_CHECKING:
    from paceline.client._checkpoint import Checkpoint
    from paceline.client._client import Client


# Set by the `--master` option, before the command runs.
chosen_master: ContextVar[str | None] = ContextVar("chosen_master", default=None)


def trust(ca_file: Path) -> None:
    """Trust the certificate authorities in a file, in this process and its children."""
    from paceline._base.certificates import CA_FILE_VARIABLE

    os.environ[CA_FILE_VARIABLE] = str(ca_file.expanduser().absolute())


@contextmanager
def connect() -> "Iterator[Client]":
    """Yield a client of the master named by the options or the environment."""
    from paceline.client._client import Client

    with Client(chosen_master.get()) as client:
        yield client


# Shorter ones fit too many checkpoints by chance.
SHORTEST_PREFIX = 4


def checkpoint_by_prefix(client: "Client", text: str) -> "Checkpoint":
    """Return the checkpoint whose UUID is, or alone begins with, a text.

    Raises:
        ApiError: There is no such checkpoint.
        CommandError: The text is the beginning of several.
    """
    found = client.find_checkpoints(text) if len(text) >= SHORTEST_PREFIX else []
    exact = [one for one in found if one.uuid == text]
    if len(found) > 1 and not exact:
        uuids = [f"{one.uuid} (trial {one.data.trial_id})" for one in found]
        raise CommandError(f"`UUID` must fit one checkpoint, but {text!r} fits {', '.join(uuids)}.")
    return (exact or found)[0] if found else client.get_checkpoint(text)


# Spelled out, as the client takes long to load.
_TOKEN_VARIABLE = "PACELINE_TOKEN"  # noqa: S105 - the name of a variable, no secret
# Set by the `paceline` command: a program that calls one of its functions must not be restarted.
is_paceline_command: ContextVar[bool] = ContextVar("is_paceline_command", default=False)


def restart_without_token() -> None:
    """Restart this process without the user's token if the environment has a token.

    The process keeps its id, its arguments and its open files. Call this before any other work.
    """
    if not os.environ.get(_TOKEN_VARIABLE) or not _can_restart():
        return
    del os.environ[_TOKEN_VARIABLE]
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - no shell


def _can_restart() -> bool:
    """Return whether the arguments of this process belong to the command."""
    arguments = sys.argv[1:]
    first = len(sys.orig_argv) - len(arguments)
    return is_paceline_command.get() and sys.orig_argv[first:] == arguments


def check_token_file(path: Path) -> None:
    """Refuse a token file unless only its owner may read the token in the file."""
    try:
        mode = path.expanduser().stat().st_mode
        token = read_secret(path.expanduser())
    except OSError as error:
        raise CommandError(
            f"`--token-file` must be a file with a token, but {str(path)!r} cannot be read"
            f" ({error.strerror})."
        ) from error
    except DamagedSecretError as error:
        raise CommandError(f"{error} Hint: copy the token there again.") from error
    if not token:
        raise CommandError(
            f"`--token-file` must be a file with a token, but {str(path)!r} is empty. Hint:"
            " `paceline token create NAME --scope runner` makes one on the machine of the master."
        )
    if stat.S_IMODE(mode) & 0o077:
        raise CommandError(
            f"`--token-file` must be a file that only its owner may read, but {str(path)!r} has"
            f" mode {stat.S_IMODE(mode):04o}. Hint: chmod 600 {path}"
        )
