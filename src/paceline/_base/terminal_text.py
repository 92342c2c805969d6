"""Text of strangers, made safe for terminals, JSON and tables."""

import json
import re
from collections.abc import Iterable
from typing import Any, TextIO, TypeAlias

# Control characters but newline and tab, C1 among them; marks, embeddings and overrides of the
# direction; separators of lines; annotations; halves of surrogate pairs, which no stream takes.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb"
    "\ud800-\udfff]"
)


def terminal_text(text: str) -> str:
    """Return text with a blank in place of each character able to change a terminal."""
    return _UNSAFE.sub(" ", text)


# Control sequences and characters but newline and tab.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours and cursor movements
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # window titles and links
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f]"
)
_COLOR = re.compile(r"\x1b\[([0-9;]{0,40})m")
MAX_COLORS = 200
"""How many changes of colour a line has at most; one with more is shown plain."""
Colors: TypeAlias = tuple[tuple[int, str], ...]
"""Changes of colour in a text: where, in characters of it, and the parameters of the sequence."""


def split_colors(text: str) -> tuple[str, Colors]:
    """Return text without control sequences, and the changes of colour among them."""
    colors: list[tuple[int, str]] = []
    removed = 0
    # Most lines hold none.
    for found in _CONTROL.finditer(text) if "\x1b" in text else ():
        if color := _COLOR.fullmatch(found[0]):
            colors.append((found.start() - removed, color[1]))
        removed += len(found[0])
    return _CONTROL.sub("", text), tuple(colors) if len(colors) <= MAX_COLORS else ()


def join_colors(text: str, colors: Iterable[tuple[int, str]]) -> str:
    """Return text with its changes of colour as control sequences, reset at the end."""
    parts, start = [], 0
    for at, color in colors:
        parts.append(f"{text[start:at]}\x1b[{color}m")
        start = max(start, at)
    return f"{''.join(parts)}{text[start:]}\x1b[0m" if parts else text


def escape_in_json(document: str) -> str:
    """Return JSON with terminal control characters escaped; only strings can contain them."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


# A spreadsheet takes text that begins so for a formula, and runs it.
_FORMULA = re.compile(r"[=+\-@\t\r]")


def csv_text(text: str) -> str:
    """Return a text as a CSV cell that no spreadsheet runs as a formula."""
    return f"'{text}" if _FORMULA.match(text) else text


def csv_cell(value: Any) -> Any:
    """Return a value as a CSV cell: numbers exact, including non-finite numbers."""
    if isinstance(value, str):
        return csv_text(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number or value is None else json.dumps(value)


class TerminalStream:
    """Stream writing the `terminal_text` of its input; for `sys.stdout` and `sys.stderr`.

    Rich, which has sequences of its own to write, writes to `rich_proxied_file`.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write text without the characters able to change a terminal."""
        return self.rich_proxied_file.write(terminal_text(text))

    def writelines(self, lines: Any) -> None:
        """Write lines in the same way."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped stream."""
        return getattr(self.rich_proxied_file, name)
