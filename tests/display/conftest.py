"""A terminal with someone at it."""

import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest


class Terminal:
    """A pseudo-terminal: `stream` is what a program writes to, `screen` what a person sees."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream: TextIO = os.fdopen(slave, "w")
        self.raw = ""
        self.resize(100)

    def resize(self, columns: int) -> None:
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def read(self) -> str:
        """Return what was written since the last call; `raw` has everything."""
        os.set_blocking(self._master, False)
        data = b""
        while True:
            try:
                data += os.read(self._master, 1 << 16)
            except OSError:
                break
        text = data.decode()
        self.raw += text
        return text

    def type(self, keys: str) -> None:
        """Type at the keyboard."""
        os.write(self._master, keys.encode())

    @property
    def screen(self) -> list[str]:
        """The lines as a terminal shows them, without blanks at their ends."""
        self.read()
        lines, row, column = [""], 0, 0
        for token in re.findall(r"\x1b\[K|\r|\n|[^\x1b\r\n]+", self.raw):
            line = lines[row]
            if token == "\r":
                column = 0
            elif token == "\n":
                row += 1
                lines.append("")
            elif token == "\x1b[K":
                lines[row] = line[:column]
            else:
                lines[row] = line[:column].ljust(column) + token + line[column + len(token) :]
                column += len(token)
        return [line.rstrip() for line in lines]

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Return a terminal of 100 columns, in an environment that has nothing against progress."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PACELINE_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    yield terminal
    terminal.close()
