"""Errors for users: one line and a hint, without a Python traceback."""

import sys

# Where each error that is the user's to mend lives. A class counts only if its package is loaded
# already, as nothing else can have raised it; importing them all would slow every command down.
_USER_ERRORS = {
    "paceline.client": ("ClientError",),
    "paceline.config": ("ConfigError",),
    "paceline.core": ("NotOfferedError",),
    "paceline.journal": ("NotARunDirectoryError", "RunVersionError", "JournalVersionError"),
    "paceline.master": (
        "PortInUseError",
        "HomeInUseError",
        "HomeUnusableError",
        "SecretFileError",
        "DatabaseVersionError",
        "LostDatabaseError",
    ),  # fmt: skip
    "paceline.master.upkeep": ("BackupError",),
    "paceline.pytorch": ("CheckpointMismatchError",),
    "paceline.runner.node": ("NodeStoppedError",),
    "paceline.search": ("SearchMethodError", "SpaceError"),
    "paceline.storage": ("CheckpointError",),
}


class CommandError(Exception):
    """Raised by a command that cannot do what it was asked to do."""


def is_cli_user_error(error: BaseException) -> bool:
    """Tell whether an error is the user's to mend, so that its text is all there is to show."""
    if isinstance(error, CommandError):
        return True
    for package, names in _USER_ERRORS.items():
        module = sys.modules.get(package)
        for name in names:
            kind = getattr(module, name, None)
            if isinstance(kind, type) and isinstance(error, kind):
                return True
    return False


def report_error(message: str) -> None:
    """Print an error to stderr: what is wrong in red, the hint below it."""
    from rich.text import Text

    from paceline.cli._console_output import error_console

    console = error_console()
    for line in message.strip().splitlines():
        problem, separator, hint = line.partition("Hint:")
        if problem.strip():
            text = Text("Error: ", style="bold red").append(problem.strip(), style="not bold red")
            console.print(text, soft_wrap=True)
        if separator:
            text = Text("Hint: ", style="bold").append(hint.strip(), style="not bold")
            console.print(text, soft_wrap=True)
