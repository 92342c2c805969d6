"""What the parts of `gpu.py` tell: rows of its table, one JSON line each as soon as it is known."""

import json
import os
import time
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from figures import Figure

# Where a part writes its rows; without it they are printed alone.
ROWS_VARIABLE = "PACELINE_GPU_ROWS"
_COLUMNS = ("part", "what", "result", "bar", "met", "beside it, or why")


class Status(str, Enum):
    """What became of a row.

    TOLD is for facts and for figures without a bar.
    """

    MET = "yes"
    NOT_MET = "**no**"
    TOLD = "-"
    NOT_RUN = "NOT RUN"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table.

    Attributes:
        what: What was measured, tried or left out.
        status: What became of it.
        result: The value, as it is shown.
        bar: What the value is to meet, as it is shown.
        why: What stands beside it, or why it failed or was left out.
        raw: All values.
    """

    what: str
    status: Status
    result: str = ""
    bar: str = ""
    why: str = ""
    raw: Any = None

    def line(self, part: str) -> str:
        """Return a line of the Markdown table."""
        cells = (part, self.what, self.result, self.bar, self.status.value, self.why)
        return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def emit(row: Row) -> None:
    """Tell a row: print it, and write it where the command finds it if this part is killed."""
    name = os.environ.get(ROWS_VARIABLE)
    if name is None:
        print(row.line(""), flush=True)
        return
    with open(name, "ab", buffering=0) as file:
        file.write(json.dumps(asdict(row)).encode() + b"\n")


def tell(what: str, result: str = "", why: str = "", raw: Any = None) -> None:
    """Tell a fact."""
    emit(Row(what=what, status=Status.TOLD, result=result, why=why, raw=raw))


def leave_out(what: str, why: str) -> None:
    """Tell that something was not run."""
    emit(Row(what=what, status=Status.NOT_RUN, why=why))


def check(what: str, is_met: bool, *, result: str = "", bar: str = "", why: str = "") -> None:
    """Tell whether something holds."""
    status = Status.MET if is_met else Status.NOT_MET
    emit(Row(what=what, status=status, result=result, bar=bar, why=why))


def emit_figure(figure: Figure) -> None:
    """Tell a figure of a benchmark: its median, and how far it spreads."""
    result = figure.shown(figure.median)
    if len(figure.values) > 1:
        result += f" ({figure.shown(min(figure.values))} to {figure.shown(max(figure.values))})"
    status, bar = Status.TOLD, ""
    if figure.bar is not None:
        status = Status.MET if figure.is_met else Status.NOT_MET
        bar = f"{'<=' if figure.is_smaller_better else '>='} {figure.shown(figure.bar)}"
    raw = figure.to_json()
    emit(Row(what=figure.what, status=status, result=result, bar=bar, why=figure.beside, raw=raw))


def rows_in(path: Path) -> list[Row]:
    """Return the rows that a part has written so far; a line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    fields = [json.loads(line) for line in lines]
    return [Row(**{**one, "status": Status(one["status"])}) for one in fields]


def table_head() -> str:
    """Return the first two lines of the Markdown table."""
    return f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}"


class Results:
    """The rows of all parts, in two files that are whole at any time.

    Args:
        directory: Where they go.
        name: Their names, without the ending.
        facts: What is known before any part has run.
    """

    def __init__(self, directory: Path, name: str, facts: dict[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.json_path = directory / f"{name}.json"
        self.table_path = directory / f"{name}.md"
        self._facts = facts
        self._began = time.monotonic()
        self._parts: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, list[Row]] = {}

    def update(self, part: str, rows: list[Row], **facts: Any) -> None:
        """Take in what is known of a part, and write the files."""
        self._rows[part] = rows
        self._parts[part] = {**self._parts.get(part, {}), **facts}
        self.write(is_complete=False)

    def write(self, *, is_complete: bool) -> None:
        """Write the files.

        Args:
            is_complete: Whether all parts have had their turn.
        """
        record = {
            **self._facts,
            "is_complete": is_complete,
            "seconds": round(time.monotonic() - self._began, 1),
            "parts": [
                {"name": name, **facts, "rows": [asdict(row) for row in self._rows[name]]}
                for name, facts in self._parts.items()
            ],
        }
        _replace(self.json_path, json.dumps(record, indent=1) + "\n")
        _replace(self.table_path, self._table(is_complete))

    def _table(self, is_complete: bool) -> str:
        lines = [f"{name}: {value}" for name, value in self._facts.items()]
        if not is_complete:
            lines.append("**The command has not come to its end.**")
        rows = [row.line(part) for part, found in self._rows.items() for row in found]
        return "\n\n".join(lines) + "\n\n" + "\n".join([table_head(), *rows]) + "\n"


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.replace(path)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
