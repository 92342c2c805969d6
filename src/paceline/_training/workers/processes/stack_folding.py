"""Folding of the stacks that workers write when they hang: frames of users first."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import paceline

if TYPE_CHECKING:
    from paceline._training.workers.processes.worker_output import OutputLine

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
        kept.append(replace(stack[-1], text=f"  ... {len(packages)} frames of {names}"))
        return kept
    return list(stack)
