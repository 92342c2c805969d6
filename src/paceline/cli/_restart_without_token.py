"""Restart of a command whose environment has a token that it does not need.

Trials can read the environment that processes of their user were started with
(`/proc/PID/environ`). It shows a variable also after the process has removed it.
"""

import os
import sys
from contextvars import ContextVar

# Spelled out, as the client takes long to load.
_TOKEN_VARIABLE = "PACELINE_TOKEN"  # noqa: S105 - the name of a variable, no secret
# Set by the `paceline` command: a program that calls one of its functions must not be restarted.
is_paceline_command: ContextVar[bool] = ContextVar("is_paceline_command", default=False)


def restart_without_token() -> None:
    """Restart this process without the user's token, if its environment has one.

    It keeps its number, its arguments and its open files. Call it before anything is begun.
    """
    if not os.environ.get(_TOKEN_VARIABLE) or not _can_restart():
        return
    del os.environ[_TOKEN_VARIABLE]
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - no shell


def _can_restart() -> bool:
    """Tell whether the arguments of this process are those of the command."""
    arguments = sys.argv[1:]
    first = len(sys.orig_argv) - len(arguments)
    return is_paceline_command.get() and sys.orig_argv[first:] == arguments
