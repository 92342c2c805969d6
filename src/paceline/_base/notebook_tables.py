"""Tables for notebooks, as the rich displays of trainers, results and data sets."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_MOST_ROWS = 20
_LONGEST = 200


def html_table(title: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in HTML; of many rows the first and the last ones.

    Args:
        title: The line above it.
        header: The names of the columns; none for a table of names and values.
        rows: The cells; a number is shown short.
    """
    shown = [[_text(cell) for cell in row] for row in rows]
    if len(shown) > _MOST_ROWS:
        num_left_out = len(shown) - _MOST_ROWS
        half = _MOST_ROWS // 2
        shown = [*shown[:half], [f"... {num_left_out} more ..."], *shown[-half:]]
    lines = [f"<div><b>{escape(title)}</b></div>"]
    if shown:
        lines.append("<table>")
        if header:
            lines.append(_row("th", [escape(name) for name in header]))
        lines += [_row("td", row) for row in shown]
        lines.append("</table>")
    return "\n".join(lines)


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


def _text(cell: Any) -> str:
    text = f"{cell:.6g}" if isinstance(cell, float) else str(cell)
    return escape(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")
