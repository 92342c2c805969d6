"""Output of workers: bytes to lines with rank, level and time.

Also: on the driver's streams and in files.

Folding of the stacks that workers write when they hang: frames of users first.
"""

import codecs
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import IO, Literal

import paceline
from paceline._base.terminal_text import Colors, split_colors, terminal_text

_STACK = re.compile(r"(?:Current thread|Thread|Stack)\b.* ?\(most recent call first\):$")
_FRAME = re.compile(r'  File "(.*)", line (?:\d+|\?\?\?) in ')
_OURS = Path(paceline.__file__).parent.as_posix()
_PACKAGE = re.compile(rf"(?:{re.escape(_OURS)}|.*/(?:site|dist)-packages/paceline)/")
_TORCH = re.compile(r".*/(?:site|dist)-packages/torch/")
_PYTHON = re.compile(r"<frozen |.*/lib/python3\.\d+/(?!(?:site|dist)-packages/)")
_MACHINERY = {"paceline": _PACKAGE, "torch": _TORCH, "python": _PYTHON}
# A stack is written at once.
_END_S = 0.5
# Python writes no more frames of a thread; a script that prints such lines must fill no memory.
_MOST_FRAMES = 100
Stream = Literal["stdout", "stderr"]
LINE_CHARACTERS = 8192
_LINE_END = re.compile(r"\r*\n|\r+")
_ESCAPE_CHARACTERS = 64
_OPEN_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?|[ -/]*)\Z")
_RANK = re.compile(r"\[rank=(\d+)\] ?")
# The form that PyTorch's own hook for exceptions writes.
_TORCH_RANK = re.compile(r"\[rank(\d+)\]: ?")
_LEVEL = re.compile(r"\[?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b\]?(?=[:\s\[]|$)")
_LEVEL_NAMES = {"WARN": "WARNING", "FATAL": "CRITICAL"}
_TRACEBACK = "Traceback (most recent call last):"
_TRACEBACK_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


class StackFolder:
    """Shortener of each stack to its newest frame, the frames of users, and a count of others.

    Attributes:
        due: When `tick` has something to deliver, in seconds since the epoch; None if nothing.
    """

    def __init__(self) -> None:
        self.due: float | None = None
        self._stacks: dict[int | None, list[OutputLine]] = {}

    def feed(self, line: "OutputLine") -> "list[OutputLine]":
        """Return the lines to show once this one was read."""
        stack = self._stacks.get(line.rank)
        if stack is not None and len(stack) < _MOST_FRAMES and _FRAME.match(line.text):
            stack.append(line)
            self.due = line.time + _END_S
            return []
        lines = [*_folded(self._stacks.pop(line.rank, [])), line]
        if _STACK.match(line.text):
            self._stacks[line.rank] = []
        return lines

    def tick(self, now: float) -> "list[OutputLine]":
        """Return stacks that have ended without another line behind them."""
        return [] if self.due is None or now < self.due else self.close()

    def close(self) -> "list[OutputLine]":
        """Return the rest."""
        stacks, self._stacks, self.due = self._stacks, {}, None
        return [line for stack in stacks.values() for line in _folded(stack)]


def _folded(stack: "Sequence[OutputLine]") -> "list[OutputLine]":
    kept, packages = list(stack[:1]), []
    for line in stack[1:]:
        match = _FRAME.match(line.text)
        file = "" if match is None else match[1]
        package = next((name for name, path in _MACHINERY.items() if path.match(file)), None)
        if package is None:
            kept.append(line)
        else:
            packages.append(package)
    if len(packages) > 1:
        names = " and ".join(dict.fromkeys(packages))
        text = f"  ... {len(packages)} frames of {names}"
        kept.append(replace(stack[-1], text=text, colors=()))
        return kept
    return list(stack)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLine:
    """Line printed by a worker.

    Attributes:
        rank: The rank that printed it; None if unknown.
        stream: Where it was printed.
        level: The log level that the line begins with, or ERROR for a traceback, else None.
        time: When it was read, in seconds since the epoch.
        text: The line without its end, its rank prefix and terminal control sequences.
        is_continued: The line was too long, and the next one of this rank and stream continues it.
        colors: Its changes of colour.
    """

    rank: int | None
    stream: Stream
    level: str | None
    time: float
    text: str
    is_continued: bool = False
    colors: Colors = ()


class LineSplitter:
    """Splitter of a stream's bytes into lines.

    Line ends are "\\n", "\\r\\n" and a bare "\\r". States of a progress bar, which rewrites its
    line with a bare "\\r", come through at most once per `progress_interval_s`, the last one
    always. Invalid UTF-8 is replaced, and longer lines are cut at `max_characters`. Stacks that
    `faulthandler` writes are folded.

    With `rank` every line belongs to it; else the rank is taken from a "[rank=N] " prefix.
    Does no I/O and reads no clock; not safe to share between threads.
    """

    def __init__(
        self,
        stream: Stream,
        rank: int | None = None,
        *,
        progress_interval_s: float = 0.5,
        max_characters: int = LINE_CHARACTERS,
    ) -> None:
        self._pieces = _LinePieceReader(max_characters)
        self._annotator = _LineAnnotator(stream, rank)
        self._interval_s = progress_interval_s
        self._held_state: _Piece | None = None
        self._due = float("-inf")
        self._stacks = StackFolder()

    @property
    def due(self) -> float | None:
        """When `tick` has something to deliver, in seconds since the epoch; None if nothing."""
        if self._held_state is None:
            return self._stacks.due
        return self._due if self._stacks.due is None else min(self._due, self._stacks.due)

    def feed(self, data: bytes, now: float) -> list[OutputLine]:
        """Return the lines completed by data read at `now`."""
        lines = self._take_pieces(self._pieces.feed(data), now)
        return lines + self.tick(now)

    def tick(self, now: float) -> list[OutputLine]:
        """Return what was held back and is due: the state of a progress bar, a folded stack."""
        stacks = self._stacks.tick(now)
        if self._held_state is None or now < self._due:
            return stacks
        return stacks + self._release(now)

    def close(self, now: float) -> list[OutputLine]:
        """Return the rest at the end of the stream."""
        lines = self._take_pieces(self._pieces.close(), now)
        return lines + self._stacks.close() + self._release(now)

    def _take_pieces(self, pieces: "Iterator[_Piece]", now: float) -> list[OutputLine]:
        lines = []
        for piece in pieces:
            if piece.ending is _Ending.REWRITE:
                if piece.text.strip():
                    self._held_state = piece
                continue
            lines += self._release(now)
            lines += self._stacks.feed(self._annotator.annotate(piece, now))
        return lines

    def _release(self, now: float) -> list[OutputLine]:
        if self._held_state is None:
            return []
        line = self._annotator.annotate(self._held_state, now)
        self._held_state = None
        self._due = now + self._interval_s
        return [line]


class _Ending(Enum):
    LINE = auto()
    REWRITE = auto()
    CUT = auto()


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    colors: Colors
    ending: _Ending


class _LinePieceReader:
    """Cut a stream of bytes into pieces; however the bytes arrive, the pieces are the same."""

    def __init__(self, max_characters: int) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._max_characters = max_characters
        self._rest = ""

    def feed(self, data: bytes) -> Iterator[_Piece]:
        return self._split(self._decoder.decode(data), is_final=False)

    def close(self) -> Iterator[_Piece]:
        return self._split(self._decoder.decode(b"", final=True), is_final=True)

    def _split(self, text: str, is_final: bool) -> Iterator[_Piece]:
        text = self._rest + text
        start = 0
        for end in _LINE_END.finditer(text):
            if end.end() == len(text) and text[-1] == "\r" and not is_final:
                # Only the next character tells "\r" from "\r\n".
                break
            *cuts, last = self._cut(text[start : end.start()])
            yield from (_Piece(*split_colors(cut), _Ending.CUT) for cut in cuts)
            ending = _Ending.LINE if end.group().endswith("\n") else _Ending.REWRITE
            yield _Piece(*split_colors(last), ending)
            start = end.end()
        rest = text[start:]
        returns = len(rest) - len(rest.rstrip("\r"))
        *cuts, last = self._cut(rest[: len(rest) - returns])
        yield from (_Piece(*split_colors(cut), _Ending.CUT) for cut in cuts)
        self._rest = last + "\r" * returns
        if is_final and self._rest:
            yield _Piece(*split_colors(self._rest), _Ending.LINE)
            self._rest = ""

    def _cut(self, line: str) -> list[str]:
        """Cut a line at the length limit, but not in the middle of a control sequence."""
        parts = []
        while len(line) > self._max_characters:
            window = line[: self._max_characters]
            size = len(window)
            open_escape = _OPEN_ESCAPE.search(window, max(1, size - _ESCAPE_CHARACTERS))
            if open_escape:
                size = open_escape.start()
            parts.append(line[:size])
            line = line[size:]
        return [*parts, line]


class _Traceback(Enum):
    OUTSIDE = auto()
    INSIDE = auto()
    INSIDE_GROUP = auto()


class _LineAnnotator:
    """Find the rank and the level of each line."""

    def __init__(self, stream: Stream, rank: int | None) -> None:
        self._stream: Stream = stream
        self._own_rank = rank
        # A launcher's stream carries several ranks, whose tracebacks may alternate line by line.
        self._states: dict[int | None, _Traceback] = {}
        self._continued: OutputLine | None = None

    def annotate(self, piece: _Piece, now: float) -> OutputLine:
        text, is_continued = piece.text, piece.ending is _Ending.CUT
        if self._continued is not None:
            rank, level = self._continued.rank, self._continued.level
        else:
            rank, text = self._split_rank(text)
            level = self._level(rank, text)
        line = OutputLine(
            rank=rank,
            stream=self._stream,
            level=level,
            time=now,
            text=text,
            is_continued=is_continued,
            colors=_without_prefix(piece.colors, len(piece.text) - len(text)),
        )
        self._continued = line if is_continued else None
        return line

    def _split_rank(self, text: str) -> tuple[int | None, str]:
        rank = self._own_rank
        for pattern in (_RANK, _TORCH_RANK) if text.startswith("[rank") else ():
            match = pattern.match(text)
            if match and rank in (None, int(match[1])):
                rank, text = int(match[1]), text[match.end() :]
        return rank, text

    def _level(self, rank: int | None, text: str) -> str | None:
        state = self._states.get(rank, _Traceback.OUTSIDE)
        if text.strip().removeprefix("+ Exception Group ") == _TRACEBACK:
            is_group = "Exception Group" in text
            if state is _Traceback.OUTSIDE:
                self._states[rank] = _Traceback.INSIDE_GROUP if is_group else _Traceback.INSIDE
            return "ERROR"
        if state is not _Traceback.OUTSIDE:
            if not text or text[0].isspace():
                return "ERROR"
            # The first line that is not indented: the exception itself, which a group has above.
            self._states[rank] = _Traceback.OUTSIDE
            if state is _Traceback.INSIDE:
                return "ERROR"
        if text in _TRACEBACK_CHAIN:
            return "ERROR"
        match = _LEVEL.match(text)
        return _LEVEL_NAMES.get(match[1], match[1]) if match else None


def _without_prefix(colors: Colors, size: int) -> Colors:
    return tuple((max(0, at - size), color) for at, color in colors) if size else colors


class WorkerOutput:
    """Show the lines of workers, and write them to ``rank-<n>.log`` of the present run.

    Args:
        is_of_several: Whether each line begins with the rank, as there may be several workers.
    """

    def __init__(self, is_of_several: bool) -> None:
        self._is_one_of_many = is_of_several
        self._lock = threading.Lock()
        self._directory: Path | None = None
        self._files: dict[int, IO[str]] = {}

    def __call__(self, line: OutputLine) -> None:
        """Show and store a line; called from a thread of the workers' pool."""
        stream = sys.stdout if line.stream == "stdout" else sys.stderr
        prefix = f"[rank={line.rank}] " if self._is_one_of_many else ""
        # Training continues when nobody reads any more, and on a full disk.
        with suppress(OSError, ValueError, AttributeError):
            stream.write(f"{prefix}{line.text}\n")
            stream.flush()
        with self._lock, suppress(OSError):
            file = self._file_of(line.rank or 0)
            if file is not None:
                file.write(f"{line.text}\n")

    def open(self, directory: Path) -> None:
        """Write to files in a directory from now on, until the next run or the end of workers."""
        with self._lock:
            self._close_files()
            self._directory = directory

    def close(self) -> None:
        """Write to no files any more."""
        with self._lock:
            self._close_files()
            self._directory = None

    def _file_of(self, rank: int) -> IO[str] | None:
        if self._directory is None:
            return None
        if rank not in self._files:
            self._directory.mkdir(exist_ok=True)
            path = self._directory / f"rank-{rank}.log"
            # Each line at once, so that output before a crash is there.
            self._files[rank] = path.open("a", encoding="utf-8", buffering=1)
        return self._files[rank]

    def _close_files(self) -> None:
        for file in self._files.values():
            with suppress(OSError):
                file.close()
        self._files.clear()


class LinePrinter:
    """Printer of the workers' lines on the driver's standard streams of the moment.

    Args:
        num_workers: Returns the number of workers.
    """

    def __init__(self, num_workers: Callable[[], int]) -> None:
        self._num_workers = num_workers

    def __call__(self, line: OutputLine) -> None:
        """Write a line."""
        stream = sys.stdout if line.stream == "stdout" else sys.stderr
        prefix = f"[rank={line.rank}] " if self._num_workers() > 1 else ""
        # Training continues when nobody reads any more.
        with suppress(OSError, ValueError, AttributeError):
            stream.write(f"{prefix}{terminal_text(line.text)}\n")
            stream.flush()
