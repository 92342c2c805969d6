"""Options and arguments that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

ExperimentId = Annotated[int, typer.Argument(help="The experiment's number.", metavar="ID")]
TrialId = Annotated[int, typer.Argument(help="The trial's number.", metavar="ID")]
Uuid = Annotated[str, typer.Argument(help="The checkpoint's UUID.", metavar="UUID")]
AllLogs = Annotated[
    bool, typer.Option("--logs", help="With -f, every line that a search's trials print.")
]
JsonLines = Annotated[
    bool, typer.Option("--json", help="Print JSON lines, one object each, and nothing else.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Limit = Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Show at most this many.")]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--config", metavar="KEY=VALUE", help="Change a field of the config; may be repeated."
    ),
]
ConfigFile = Annotated[Path, typer.Argument(help="The experiment's config.", metavar="CONFIG")]
Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Go on until the end; Ctrl-C leaves it running.")
]
Tail = Annotated[
    int | None,
    typer.Option(
        "--tail", min=1, metavar="N", help="Only the last N lines; with -f, and what follows."
    ),
]
Rank = Annotated[
    int | None, typer.Option("--rank", min=0, metavar="N", help="Only lines of this rank.")
]
Level = Annotated[
    Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None,
    typer.Option("--level", case_sensitive=False, help="Only lines of this level and above."),
]
Stream = Annotated[
    Literal["stdout", "stderr", "master"] | None,
    typer.Option(
        "--stream",
        case_sensitive=False,
        help="Only what the trial wrote there, or the master's notes.",
    ),
]
Search = Annotated[
    str | None, typer.Option("--search", metavar="TEXT", help="Only lines with this text.")
]
Timestamps = Annotated[bool, typer.Option("--timestamps", "-t", help="Print each line's time.")]
Home = Annotated[
    Path | None,
    typer.Option(
        "--home", metavar="DIR", help="The master's home; $PACELINE_HOME or ~/.paceline by default."
    ),
]
