"""Text of others for a terminal: nothing in it moves the cursor or changes what is shown."""

import re
from typing import Any, TextIO

# Control characters but newline and tab, C1 among them; marks, embeddings and overrides of the
# direction; separators of lines; annotations; halves of surrogate pairs, which no stream takes.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb"
    "\ud800-\udfff]"
)


def terminal_text(text: str) -> str:
    """Return text with a blank in place of each character that could change a terminal."""
    return _UNSAFE.sub(" ", text)


def escape_in_json(document: str) -> str:
    """Return JSON without such characters, which stand in strings only: they are escaped."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


class TerminalStream:
    """A stream that writes `terminal_text` of what it is given; for `sys.stdout` and `sys.stderr`.

    Rich, which has sequences of its own to write, writes to `rich_proxied_file`.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write text without what could change a terminal."""
        return self.rich_proxied_file.write(terminal_text(text))

    def writelines(self, lines: Any) -> None:
        """Write lines in the same way."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """Return what the stream itself has."""
        return getattr(self.rich_proxied_file, name)
