"""Options and arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

ExperimentId = Annotated[int, typer.Argument(help="The experiment's number.", metavar="ID")]
TrialId = Annotated[int, typer.Argument(help="The trial's number.", metavar="ID")]
Uuid = Annotated[str, typer.Argument(help="The checkpoint's UUID.", metavar="UUID")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Limit = Annotated[int, typer.Option("--limit", min=1, help="Show at most this many.")]
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
Tail = Annotated[int | None, typer.Option("--tail", min=1, help="Only the last lines.")]
Rank = Annotated[int | None, typer.Option("--rank", min=0, help="Only lines of this rank.")]
Level = Annotated[
    str | None, typer.Option("--level", help="Only lines of this level and above: WARNING, ...")
]
Stream = Annotated[str | None, typer.Option("--stream", help="Only stdout or stderr.")]
Search = Annotated[str | None, typer.Option("--search", help="Only lines with this text.")]
Timestamps = Annotated[bool, typer.Option("--timestamps", "-t", help="Print each line's time.")]
Home = Annotated[
    Path | None,
    typer.Option("--home", help="The master's home; $PACELINE_HOME or ~/.paceline by default."),
]
