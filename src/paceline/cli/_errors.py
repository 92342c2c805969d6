"""Errors that are for the user to mend, and how they are printed."""

import re
import sys

from paceline.cli import _options as options

# By name: to import all of their modules would slow every command down.
_USER_ERRORS = frozenset(
    f"paceline.{name}"
    for name in (
        "_base.journal_reading_and_writing.JournalVersionError",
        "_base.run_directory.NotARunDirectoryError",
        "_base.run_directory.RunVersionError",
        "_cluster.master.home_directory.HomeInUseError",
        "_cluster.master.home_directory.HomeUnusableError",
        "_cluster.master.home_directory.LostDatabaseError",
        "_cluster.master.server.PortInUseError",
        "_cluster.master.store.database.DatabaseVersionError",
        "_cluster.master.upkeep.backup_directories.BackupError",
        "_cluster.runner.attempt_directory.SecretFileError",
        "_cluster.runner.node_runner.NodeStoppedError",
        "client.ClientError",
        "config.ConfigError",
        "core.NotOfferedError",
        "search.SpaceError",
        "search.SearchMethodError",
        "storage.CheckpointError",
        "storage.CheckpointMismatchError",
    )
)


class CommandError(Exception):
    """Raised when a command cannot do the requested work."""


def is_cli_user_error(error: BaseException) -> bool:
    """Return whether an error is for the user to fix, so only its text is shown."""
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    return isinstance(error, CommandError) or not kinds.isdisjoint(_USER_ERRORS)


def error_code(error: BaseException) -> str:
    """Return the stable code of an error, for programs: the master's, or one from its class."""
    name = type(error).__name__.removesuffix("Error")
    return str(getattr(error, "code", None) or re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())


def report_error(message: str, code: str = "command") -> None:
    """Print an error to stderr: the problem in red, the hint below; with `--json`, one JSON line.

    Args:
        message: The problem, and the hint behind `Hint:`.
        code: Code of the error for programs.
    """
    from rich.text import Text

    from paceline.cli import _console_output as console

    lines = [line.partition("Hint:") for line in message.strip().splitlines()]
    parts = [(problem.strip(), hint.strip()) for problem, _, hint in lines]
    if options.is_json():
        problems, hints = ("\n".join(filter(None, texts)) for texts in zip(*parts, strict=True))
        error = {"code": code, "message": problems, "hint": hints or None}
        console.print_json_line(error, sys.stderr)
        return
    shown = console.stderr()
    for problem, hint in parts:
        if problem:
            text = Text("Error: ", style="bold red").append(problem, style="not bold red")
            shown.print(text, soft_wrap=True)
        if hint:
            text = Text("Hint: ", style="bold").append(hint, style="not bold")
            shown.print(text, soft_wrap=True)
