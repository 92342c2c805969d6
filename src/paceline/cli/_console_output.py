"""Console output: tables, JSON, formats of numbers and times, words for states."""

import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import typer

from paceline._base.imports import flatten
from paceline._base.journal_records import decode_value
from paceline._base.progress_display import format_duration
from paceline._base.terminal_text import escape_in_json, terminal_text
from paceline.cli._options import check_fields, chosen_fields, is_agent, is_json, output_format

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    from paceline._base.journal_records import AlertRaised
    from paceline._cluster.messages.experiment_models import Alert
    from paceline._cluster.messages.experiment_models import Experiment as ExperimentData


# Wide enough that no table is cut in a pipe, where there is no edge to fit.
_PIPE_WIDTH = 240
_AGENT_WIDTH = 100_000
_MIN_NAME_WIDTH = 8
_SENTENCE_WIDTH = 40

_STATE_STYLES = {
    "RUNNING": "cyan",
    "STOPPED": "green",
    "PAUSED": "yellow",
    "COMPLETED": "green",
    "CANCELED": "yellow",
    "ERROR": "red",
    "DELETED": "dim",
}


def stdout() -> "Console":
    """Return a console on stdout; without colours and borders if stdout is no terminal."""
    return _make_console(stderr=False)


def stderr() -> "Console":
    """Return a console on stderr, for all output except the command's answer."""
    return _make_console(stderr=True)


def _make_console(*, stderr: bool) -> "Console":
    from rich.console import Console
    from rich.segment import Segment

    class TerminalConsole(Console):
        """Console with texts made safe: only its own control sequences reach the terminal."""

        def render_str(self, text: str, **options: Any) -> "Text":
            return super().render_str(terminal_text(text), **options)

        def render(self, *arguments: Any, **options: Any) -> "Iterable[Segment]":
            for text, style, control in super().render(*arguments, **options):
                yield Segment(text if control else terminal_text(text), style, control)

    stream = sys.stderr if stderr else sys.stdout
    options: dict[str, Any] = {"width": None if stream.isatty() else _PIPE_WIDTH}
    if is_agent():
        # As in a pipe, and nothing is cut or goes on in a second line.
        options = {"width": _AGENT_WIDTH, "force_terminal": False}
    return TerminalConsole(stderr=stderr, highlight=False, markup=False, emoji=False, **options)


def print_warning(text: str) -> None:
    """Print a warning to stderr."""
    stderr().print(f"Warning: {text}", style="yellow", soft_wrap=True)


def print_json(value: Any) -> None:
    """Print messages, or lists and dictionaries of them, as JSON and nothing else.

    With `--fields` an object, or each entry of a list, has these alone.
    """
    if (fields := chosen_fields.get()) is not None:
        several = isinstance(value, (list, tuple))
        value = [_picked(one, fields) for one in value] if several else _picked(value, fields)
    _write_json(value, indent=2)


def print_json_line(value: Any, stream: TextIO | None = None) -> None:
    """Print a message as a single line of JSON, on stdout by default."""
    _write_json(value, indent=None, stream=stream)


def _write_json(value: Any, indent: int | None, stream: TextIO | None = None) -> None:
    document = json.dumps(plain_for_console(value), indent=indent, ensure_ascii=False)
    (stream or sys.stdout).write(escape_in_json(document) + "\n")


def print_answer(value: Any, text: str) -> None:
    """Print the answer of a command: a JSON document for programs, or a text for people."""
    if is_json():
        print_json(value)
    else:
        typer.echo(text)


def print_note(text: str) -> None:
    """Print a line beside the answer of a command: on stdout, but with JSON on stderr."""
    typer.echo(text, err=is_json())


def print_hint(text: str) -> None:
    """Print a next command to stderr."""
    typer.echo(f"Hint: {text}", err=True)


def print_agent_hint(text: str) -> None:
    """Print a next command to stderr for an agent; people know theirs."""
    if is_agent():
        print_hint(text)


def print_list(
    values: Any, columns: Sequence[str], rows: Iterable[Sequence[Any]], **options: Any
) -> None:
    """Print a list in the chosen format: a table, JSON or tab-separated values.

    Args:
        values: The messages of the list, for JSON.
        columns: The titles.
        rows: Cells as for `print_table`.
        options: Further arguments of `print_table`.
    """
    if output_format.get() == "json":
        print_json(values)
    elif output_format.get() == "table":
        print_table(columns, rows, **options)
    else:
        for row in (columns, *rows):
            sys.stdout.write("\t".join(map(_tsv_cell, row)) + "\n")


def _picked(value: Any, fields: Sequence[str]) -> dict[str, Any]:
    known = plain_for_console(value)
    check_fields(fields, known)
    return {name: known[name] for name in fields}


def _tsv_cell(value: Any) -> str:
    """Return a whole value in a single cell; empty for None."""

    value = value.moment if isinstance(value, Age) else decode_value(value)
    text = "" if value is None else str(value)
    return re.sub(r"[\\\t\n\r]", lambda found: repr(found[0])[1:-1], text)


@dataclass(frozen=True, slots=True)
class Age:
    """Cell with a moment in seconds since the epoch; a table shows its age."""

    moment: float | None

    def __str__(self) -> str:
        return format_age(self.moment)


def make_table() -> "Table":
    """Return a table without rows in the style of all tables."""
    from rich import box
    from rich.table import Table

    return Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
        header_style="bold",
    )


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    right: Sequence[str] = (),
    shortened: Sequence[str] = (),
    wrapped: str | None = None,
    spare: Sequence[str] = (),
    empty: str = "Nothing to show.",
) -> None:
    """Print a table; only the last column may continue in a second line.

    Args:
        columns: The titles.
        rows: Strings, numbers or rich texts; None shows as a dash.
        right: Titles of the columns to align to the right.
        shortened: Titles of the columns of long names, which end in an ellipsis for lack of room.
        wrapped: Title of a column of sentences, which continue in further lines.
        spare: Titles of the columns that a narrow terminal leaves out, the first one first.
        empty: Text to print when there are no rows.
    """
    output = stdout()
    cells = [[_cell(value) for value in row] for row in rows]
    columns, cells = _without_spare(list(columns), cells, spare, output.width)
    table = make_table()
    for title in columns:
        is_short = title in shortened
        table.add_column(
            title,
            justify="right" if title in right else "left",
            overflow="ellipsis" if is_short else "fold",
            no_wrap=title != wrapped and (bool(shortened) or title != columns[-1]),
        )
    for row in cells:
        table.add_row(*row)
    _shorten(table, shortened, output.width)
    if table.row_count:
        _print_without_padding(output, table)
    else:
        output.print(empty)


def _without_spare(
    columns: list[str], cells: list[list[Any]], spare: Sequence[str], width: int
) -> tuple[list[str], list[list[Any]]]:
    """Return titles and rows without the columns for which the terminal has no room."""
    for title in spare:
        widths = [
            max(len(str(cell)) for cell in column) for column in zip(columns, *cells, strict=True)
        ]
        if sum(widths) + 2 * len(widths) <= width:
            break
        place = columns.index(title)
        columns, *cells = ([*row[:place], *row[place + 1 :]] for row in (columns, *cells))
    return columns, cells


def _shorten(table: "Table", titles: Sequence[str], width: int) -> None:
    """Limit the columns with these titles to the width left over by the other columns."""
    for column in table.columns:
        if column.header in titles:
            taken = sum(_width(other) for other in table.columns if other is not column)
            column.max_width = max(width - taken - 2 * len(table.columns), _MIN_NAME_WIDTH)


def _width(column: "Column") -> int:
    longest = max(len(str(cell)) for cell in [column.header, *column.cells])
    return longest if column.no_wrap else min(longest, _SENTENCE_WIDTH)


def print_facts(facts: Iterable[tuple[str, Any]]) -> None:
    """Print names and values in two columns; facts with the value None are left out."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts:
        if value is not None:
            table.add_row(name, _cell(value))
    _print_without_padding(stdout(), table)


def _print_without_padding(output: "Console", table: "Table") -> None:
    """Print a table; without trailing blanks in a pipe, where a long cell widens all lines."""
    if output.is_terminal:
        output.print(table)
        return
    with output.capture() as capture:
        output.print(table)
    output.file.write("\n".join(line.rstrip() for line in capture.get().split("\n")))


def state_text(state: str) -> "Text":
    """Return a state in its colour."""
    from rich.text import Text

    return Text(state, style=_STATE_STYLES.get(state, "yellow"))


def format_number(value: Any) -> str:
    """Return a metric value in at most four significant digits; a dash for None."""

    value = decode_value(value)
    if value is None:
        return "-"
    if isinstance(value, float):
        is_count = 1e5 <= abs(value) < 1e16 and value.is_integer()
        return f"{value:.0f}" if is_count else f"{value:.4g}"
    return str(value)


def format_values(values: dict[str, Any]) -> str:
    """Return names and values as `a=1 b=0.25`, nested names dotted; rounded only for people."""
    if output_format.get() == "tsv":
        return " ".join(f"{name}={_tsv_cell(value)}" for name, value in flatten(values).items())
    return " ".join(f"{name}={format_number(value)}" for name, value in flatten(values).items())


def format_age(moment: float | None) -> str:
    """Return the age of a moment (seconds since the epoch) as text: `3m ago`, or `-` for None."""
    if moment is None:
        return "-"
    return f"{format_duration(max(time.time() - moment, 0.0))} ago"


def format_bytes(size: int) -> str:
    """Return a size in binary units, for example `1.5 MiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_moment(moment: float | None) -> str | None:
    """Return a moment in local time; None for None."""
    if moment is None:
        return None
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def restarts_text(causes: Sequence[str | None], number: int | None = None) -> str | None:
    """Return how often workers were started again, and why the last time; None if they were not.

    Args:
        causes: The reasons of their ends, oldest first.
        number: How often it was, if not all causes are known.
    """
    number = len(causes) if number is None else number
    if not number:
        return None
    last = "" if number == 1 else ", the last one"
    return f"{number}{last}: {causes[-1]}"


def _cell(value: Any) -> "str | Text":
    from rich.text import Text

    if isinstance(value, Text):
        return value
    return "-" if value is None else format_number(value)


def plain_for_console(value: Any) -> Any:
    """Return messages, and lists and dictionaries of them, as plain JSON values."""
    if hasattr(value, "model_dump"):
        fields = value.model_dump(mode="json")
        if "shown_state" in fields:
            # Same words for states as in tables, the SDK and the web UI; no stored names.
            fields["state"] = fields.pop("shown_state")
            fields.pop("experiment_state", None)
        return fields
    if isinstance(value, dict):
        return {key: plain_for_console(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_for_console(item) for item in value]
    return value


# The words of an experiment, and the stored states behind each.
EXPERIMENT_WORDS: dict[str, tuple[str, ...]] = {
    "QUEUED": ("ACTIVE",),
    "RUNNING": ("ACTIVE",),
    "PAUSED": ("PAUSED",),
    "STOPPING": (
        "STOPPING_COMPLETED",
        "STOPPING_CANCELED",
        "STOPPING_KILLED",
        "STOPPING_ERROR",
    ),
    "COMPLETED": ("COMPLETED",),
    "CANCELED": ("CANCELED",),
    "ERROR": ("ERROR",),
}
# Explanation of each error kind for the person who has to fix the error.
ERROR_KINDS = {
    "memory": "out of memory (of a GPU or of the machine)",
    "transient": "transient (it may pass: continue the experiment once it has)",
    "user": "user (in the code or the configuration)",
    "permanent": "permanent (of the home or the installation)",
}
_FAILED, _INCOMPLETE, _UNMEASURED = 1, 3, 4


def experiment_word(data: "ExperimentData") -> str:
    """Return where an experiment stands."""
    return data.shown_state.value


def progress_text(data: "ExperimentData") -> str:
    """Return the progress as a percentage; a dash while no progress was reported."""
    return "-" if data.progress == 0.0 and not data.state.is_terminal else f"{data.progress:.0%}"


def num_trials_text(num_trials: int) -> str:
    """Return a number of trials as text, for example `1 trial`."""
    return "1 trial" if num_trials == 1 else f"{num_trials} trials"


def lost_records_text(num_records: int) -> str:
    """Return the number of lost records as text, for example `1 record is lost`."""
    return "1 record is lost" if num_records == 1 else f"{num_records} records are lost"


def exit_code(data: "ExperimentData") -> int:
    """Return the exit code of a command after waiting for an experiment's end."""
    if data.state.value != "COMPLETED":
        return _UNMEASURED if data.is_unmeasured else _FAILED
    return _INCOMPLETE if data.num_records_lost else 0


def print_alerts(alerts: "Sequence[AlertRaised | Alert]") -> None:
    """Print the alerts of a run or of a trial, if there are any."""
    if not alerts:
        return
    rows = [
        (format_moment(alert.time), alert.level, alert_text(alert.title, alert.description))
        for alert in alerts
    ]
    stdout().print()
    print_table(["Time", "Level", "Alert"], rows)


def alert_text(title: str | None, description: str | None) -> str:
    """Return the text of an alert as a single line."""
    return " ".join(": ".join(filter(None, (title, description))).split())


_LABELS = {
    "training_s": "Training",
    "data_wait_s": "Waiting for data",
    "validation_s": "Validation",
    "checkpoint_s": "Checkpoints",
    "lost_s": "Lost work",
    "start_s": "Starts",
    "other_s": "Other",
    "undivided_s": "Not divided",
    "waiting_s": "No process",
}
_MEANINGS = {
    "training_s": "steps whose result was kept",
    "data_wait_s": "devices idle until data came",
    "validation_s": "measuring on other data",
    "checkpoint_s": "training stood still to store state",
    "lost_s": "trained after the last checkpoint before a stop",
    "start_s": "from the launch of a process to its first step",
    "other_s": "between and after trainings",
    "undivided_s": "the script does not tell what it does",
    "waiting_s": "queued, paused, or before a restart",
}


def print_time_table(seconds: dict[str, float], total_s: float, goodput: float | None) -> None:
    """Print the non-zero shares of a time, and the goodput."""

    rows: list[tuple[Any, ...]] = [
        (
            label,
            f"{seconds[name]:,.1f} s",
            f"{seconds[name] / total_s:.1%}",
            _MEANINGS[name],
        )
        for name, label in _LABELS.items()
        if seconds[name] > 0
    ]
    print_table(
        ["Share", "Time", "Of all", "What it is"],
        rows,
        right=["Time", "Of all"],
        empty="No time was recorded.",
    )
    if goodput is not None:
        used_s = total_s - seconds["waiting_s"]
        told = f"Goodput {goodput:.1%}: of {format_duration(used_s)} with processes,"
        stdout().print(f"\n{told} {format_duration(seconds['training_s'])} trained.")
