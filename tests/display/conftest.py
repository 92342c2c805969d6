"""A terminal with someone at it."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

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


class Script:
    """A script at a terminal, which is its controlling terminal."""

    def __init__(
        self, terminal: Any, directory: Path, code: str, *arguments: str, columns: int = 80
    ) -> None:
        (directory / "script.py").write_text(code)
        terminal.resize(columns)
        self._terminal = terminal
        slave = terminal.stream.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "script.py", *arguments],
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def await_text(self, pattern: str) -> None:
        """Wait until something was shown."""
        deadline = time.monotonic() + 90
        while not re.search(pattern, self._terminal.raw):
            assert time.monotonic() < deadline, self._terminal.raw
            assert self._process.poll() is None, self._terminal.raw
            self._terminal.read()
            time.sleep(0.01)

    def finish(self) -> tuple[list[str], int]:
        """Wait for its end, and return what the terminal shows then."""
        deadline = time.monotonic() + 90
        try:
            while self._process.poll() is None:
                assert time.monotonic() < deadline, self._terminal.raw
                self._terminal.read()
                time.sleep(0.01)
        finally:
            self._process.kill()
            self._process.wait()
        lines = self._terminal.screen
        assert lines[-1] == ""
        return lines[:-1], self._process.returncode


@pytest.fixture
def start_script(terminal: Terminal, tmp_path: Path) -> Callable[..., Script]:
    """Return a function that starts a script at the terminal."""
    return partial(Script, terminal, tmp_path)
