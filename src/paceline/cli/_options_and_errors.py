"""Options shared by commands, the client of the chosen master, and errors for users."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli._completions import complete_checkpoint, complete_experiment, complete_trial

if TYPE_CHECKING:
    from paceline.client._checkpoint import Checkpoint
    from paceline.client._client import Client


ExperimentId = Annotated[
    int,
    typer.Argument(
        help="Number of the experiment.", metavar="ID", autocompletion=complete_experiment
    ),
]
TrialId = Annotated[
    int,
    typer.Argument(help="Number of the trial.", metavar="ID", autocompletion=complete_trial),
]
Uuid = Annotated[
    str,
    typer.Argument(
        help="UUID of the checkpoint or its beginning.",
        metavar="UUID",
        autocompletion=complete_checkpoint,
    ),
]
AllLogs = Annotated[
    bool, typer.Option("--logs", help="With -f: print all output of a search's trials.")
]
JsonLines = Annotated[bool, typer.Option("--json", help="Print JSON only, one object per line.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check and print the effect, but change nothing.")
]
RequestKey = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="TEXT",
        help="Key of your own, such as a job's name. If you repeat the command with the same key"
        " within a day, the experiment of the first time is returned.",
    ),
]
Limit = Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Show at most N entries.")]
QueryText = Annotated[
    str | None,
    typer.Option(
        "--query",
        "--where",
        metavar="QUERY",
        help='Show only what a query describes, such as "lr < 0.01 and tag:baseline".',
    ),
]
Overrides = Annotated[
    list[str],
    typer.Option("--config", metavar="KEY=VALUE", help="Set a field of the config. Repeatable."),
]
Limits = Annotated[
    list[str],
    typer.Option(
        "--limit",
        metavar="NAME=VALUE",
        help="Set a limit of the search, such as max_slot_hours=12; null removes it. Repeatable.",
    ),
]
ConfigFile = Annotated[
    Path, typer.Argument(help="Config file of the experiment.", metavar="CONFIG")
]
ChangedCode = Annotated[
    Path | None,
    typer.Argument(
        help="Directory of changed code. The default is the code as it is.", metavar="DIR"
    ),
]
Follow = Annotated[
    bool,
    typer.Option("--follow", "-f", help="Follow it to its end. Ctrl-C ends only this command."),
]
Tail = Annotated[
    int | None,
    typer.Option(
        "--tail", min=1, metavar="N", help="Print the last N lines; with -f, also new lines."
    ),
]
Rank = Annotated[
    int | None, typer.Option("--rank", min=0, metavar="N", help="Print only lines of rank N.")
]
Level = Annotated[
    Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None,
    typer.Option("--level", case_sensitive=False, help="Print only lines of this level or higher."),
]
Stream = Annotated[
    Literal["stdout", "stderr", "master"] | None,
    typer.Option(
        "--stream",
        case_sensitive=False,
        help="Print only this stream of the trial, or the notes of the master.",
    ),
]
Search = Annotated[
    str | None, typer.Option("--search", metavar="TEXT", help="Print only lines with this text.")
]
Pattern = Annotated[
    str | None,
    typer.Option(
        "--pattern", metavar="REGEX", help="Print only lines with this regular expression (RE2)."
    ),
]
Timestamps = Annotated[
    bool, typer.Option("--timestamps", "-t", help="Print the time of each line.")
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        metavar="FILE",
        help="File with trusted CA certificates (PEM). The default is"
        " $PACELINE_CA_FILE, or else what the system trusts.",
    ),
]
Home = Annotated[
    Path | None,
    typer.Option(
        "--home",
        metavar="DIR",
        help="Home of the master. The default is $PACELINE_HOME, or else ~/.paceline.",
    ),
]


_SECONDS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def age_in_seconds(text: str) -> float | None:
    """Return an age such as `30d` or `12h` in seconds; None for another text."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)([mhdw])", text, re.ASCII)
    return None if match is None else float(match[1]) * _SECONDS[match[2]]


def home_of(home: Path | None) -> Path:
    """Return the home named by an option, or the default home, as an absolute path."""
    from paceline.client._http_session import home_directory

    return home_directory() if home is None else home.expanduser().absolute()


# Set by `--json` and `--format`, before the command runs.
output_format: ContextVar[Literal["table", "json", "tsv"]] = ContextVar(
    "output_format", default="table"
)


def is_json() -> bool:
    """Return whether standard output is for a JSON document alone."""
    return output_format.get() == "json"


def is_agent() -> bool:
    """Return whether an agent, and no person, reads what the commands print."""
    return any(os.environ.get(name) for name in ("PACELINE_AGENT", "AI_AGENT"))


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


def nested_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return changes like `searcher.max_length=5` as nested fields.

    Raises:
        ConfigError: A change is not of the form `key=value`.
    """
    from paceline.config._read_yaml import apply_overrides

    return apply_overrides({}, overrides)


# By name: to import all of their modules would slow every command down.
_USER_ERRORS = frozenset(
    f"paceline.{name}"
    for name in (
        "_base.journal_files.JournalVersionError",
        "_base.run_directory.NotARunDirectoryError",
        "_base.run_directory.RunVersionError",
        "_cluster.master.home_directory.HomeInUseError",
        "_cluster.master.home_directory.HomeUnusableError",
        "_cluster.master.home_directory.LostDatabaseError",
        "_cluster.master.server.PortInUseError",
        "_cluster.master.store.database.DatabaseVersionError",
        "_cluster.master.upkeep.backup_snapshots.BackupError",
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


def confirm(question: str, *, is_confirmed: bool) -> None:
    """Ask on a terminal whether to continue, unless `--yes` was given.

    Raises:
        CommandError: There is no terminal.
        typer.Abort: The answer is no.
    """
    if is_confirmed:
        return
    if is_agent() or not sys.stdin.isatty():
        where = "by an agent" if is_agent() else "without a terminal"
        raise CommandError(
            f"`--yes` must be given to confirm {where}: {question} Hint: add `--yes`."
        )
    typer.confirm(question, abort=True, err=True)


def report_error(message: str, code: str = "command") -> None:
    """Print an error to stderr: the problem in red, the hint below; with `--json`, one JSON line.

    Args:
        message: The problem, and the hint behind `Hint:`.
        code: Code of the error for programs.
    """
    from rich.text import Text

    from paceline.cli._console_output import error_console, print_json_line

    lines = [line.partition("Hint:") for line in message.strip().splitlines()]
    parts = [(problem.strip(), hint.strip()) for problem, _, hint in lines]
    if is_json():
        problems, hints = ("\n".join(filter(None, texts)) for texts in zip(*parts, strict=True))
        error = {"code": code, "message": problems, "hint": hints or None}
        print_json_line(error, sys.stderr)
        return
    console = error_console()
    for problem, hint in parts:
        if problem:
            text = Text("Error: ", style="bold red").append(problem, style="not bold red")
            console.print(text, soft_wrap=True)
        if hint:
            text = Text("Hint: ", style="bold").append(hint, style="not bold")
            console.print(text, soft_wrap=True)


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
