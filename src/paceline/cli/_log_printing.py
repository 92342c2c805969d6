"""Printing of log lines."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from paceline._terminal_text import terminal_text
from paceline.cli._console_output import console, print_json_line

if TYPE_CHECKING:
    from paceline.messages.logs import LogLine

_LEVEL_COLORS = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}


def print_log_lines(
    lines: "Iterable[LogLine]",
    *,
    json: bool = False,
    timestamps: bool = False,
    show_trial: bool = False,
) -> None:
    """Print lines as they come."""
    output = console()
    for line in lines:
        if json:
            print_json_line(line)
        else:
            text = format_log_line(line, timestamps=timestamps, show_trial=show_trial)
            if color := _LEVEL_COLORS.get(line.level or ""):
                output.print(text, style=color, soft_wrap=True)
            else:
                typer.echo(text)


def print_damaged_log_lines(number: int) -> None:
    """Say how many damaged lines were left out, if there are some."""
    if number:
        left_out = "1 damaged line is" if number == 1 else f"{number} damaged lines are"
        typer.echo(f"{left_out} left out.", err=True)


def format_log_line(line: "LogLine", *, timestamps: bool = False, show_trial: bool = False) -> str:
    """Return a line with what is asked for in front of it."""
    prefix = ""
    if timestamps:
        from paceline.cli._console_output import format_moment

        prefix += f"{format_moment(line.time)} "
    if show_trial:
        prefix += f"[trial {line.trial_id}] "
    if line.rank is not None and line.rank > 0:
        prefix += f"[rank={line.rank}] "
    return prefix + terminal_text(line.text)
