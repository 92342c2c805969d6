"""Options and arguments that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

ExperimentId = Annotated[int, typer.Argument(help="Number of the experiment.", metavar="ID")]
TrialId = Annotated[int, typer.Argument(help="Number of the trial.", metavar="ID")]
Uuid = Annotated[str, typer.Argument(help="UUID of the checkpoint.", metavar="UUID")]
AllLogs = Annotated[
    bool, typer.Option("--logs", help="With -f: print all output of a search's trials.")
]
JsonLines = Annotated[bool, typer.Option("--json", help="Print JSON only, one object per line.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Limit = Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Show at most N entries.")]
Overrides = Annotated[
    list[str],
    typer.Option("--config", metavar="KEY=VALUE", help="Set a field of the config. Repeatable."),
]
ConfigFile = Annotated[
    Path, typer.Argument(help="Config file of the experiment.", metavar="CONFIG")
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
    """Return the home that an option names, or the default one, as an absolute path."""
    from paceline.client import home_directory

    return home_directory() if home is None else home.expanduser().absolute()
