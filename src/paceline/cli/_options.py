"""Options and arguments that several commands share."""

import os
import sys
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from paceline.cli._completions import complete_checkpoint, complete_experiment, complete_trial
from paceline.cli._errors import CommandError

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


def home_of(home: Path | None) -> Path:
    """Return the home named by an option, or the default home, as an absolute path."""
    from paceline.client._http_session import home_directory

    return home_directory() if home is None else home.expanduser().absolute()


# Set by `--json` and `--format`, before the command runs.
output_format: ContextVar[Literal["table", "json", "tsv"]] = ContextVar(
    "output_format", default="table"
)
# Set by `--fields`.
chosen_fields: ContextVar[list[str] | None] = ContextVar("chosen_fields", default=None)


def is_json() -> bool:
    """Return whether standard output is for a JSON document alone."""
    return output_format.get() == "json"


def is_agent() -> bool:
    """Return whether an agent, and no person, reads what the commands print."""
    return any(os.environ.get(name) for name in ("PACELINE_AGENT", "AI_AGENT"))


def nested_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return changes like `searcher.max_length=5` as nested fields.

    Raises:
        ConfigError: A change is not of the form `key=value`.
    """
    from paceline.config._read_yaml import apply_overrides

    return apply_overrides({}, overrides)


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


def check_fields(fields: Sequence[str], known: Collection[str]) -> None:
    """Refuse names of `--fields` that an object does not have."""
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise CommandError(
            f"`--fields` must name fields that there are ({', '.join(sorted(known))}), but got"
            f" {unknown[0]!r}."
        )
