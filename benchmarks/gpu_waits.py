"""Part of `gpu.py`: where the steps of each front door wait for the device.

torch tells of each host synchronisation in a run of steps; those of the reports are expected, once
in 100 steps. Events that a thread in the background waits for are not meant, and not seen.
"""

import argparse
import linecache
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu_machine import part_arguments
from gpu_record import check, leave_out
from step_loops import BLOCK, LOOPS, Model, Place, empty_directory
from step_models import NULL

import paceline

DOORS = ("paceline", "train", "creators", "declarative")
PRECISIONS = ("fp32", "bf16", "fp16")
_NUM_BLOCKS = 2
_MESSAGE = "called a synchronizing CUDA operation"
_NUM_AT_ONCE = 4
_PACELINE = str(Path(paceline.__file__).parent)


def main() -> None:
    """Watch every front door in every precision, each in a process of its own."""
    parser = part_arguments(__doc__)
    parser.add_argument("--child", nargs=2, metavar=("DOOR", "PRECISION"))
    given = parser.parse_args()
    if given.child:
        watch_door(*given.child, given.device)
        return
    cases = list(product(DOORS, PRECISIONS))
    if given.device == "cpu":
        # The others differ from it in nothing that a CPU shows.
        cases = [("paceline", "fp16")]
    for first in range(0, len(cases), _NUM_AT_ONCE):
        _watch_at_once(cases[first : first + _NUM_AT_ONCE], given)


def _watch_at_once(cases: list[tuple[str, str]], given: argparse.Namespace) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--child", *case, "--device", given.device],
            stderr=subprocess.PIPE,
            text=True,
        )
        for case in cases
    ]
    for case, child in zip(cases, children, strict=True):
        _, errors = child.communicate()
        if child.returncode:
            last = errors.strip().splitlines()[-1:]
            check(_title(*case), False, why=f"exit code {child.returncode}: {last}")
            print(errors, file=sys.stderr)


def watch_door(door: str, precision: str, device: str) -> None:
    """Train by a front door, and tell of the waits in some of its steps."""
    place = Place(device=device, precision=precision)
    waits = Waits()
    watching = waits.watching(is_cuda=place.is_cuda)
    num_blocks = 0

    def interlude(begin: int, end: int) -> None:
        nonlocal num_blocks
        num_blocks += 1
        if num_blocks == 1:
            watching.__enter__()
        elif num_blocks == 1 + _NUM_BLOCKS:
            watching.__exit__(None, None, None)

    # Counted without a look at the device, which would be a wait of its own.
    model = Model(interlude=interlude)
    num_steps = (1 + _NUM_BLOCKS) * BLOCK + 1
    with empty_directory():
        LOOPS[door](model, NULL.loader(num_steps), num_steps, place)
    assert num_blocks > _NUM_BLOCKS
    if not place.is_cuda:
        leave_out(_title(door, precision), "no GPU to wait for; the steps ran")
        return
    check(
        _title(door, precision),
        waits.number <= _NUM_BLOCKS,
        result=f"{waits.number} in {_NUM_BLOCKS * BLOCK} steps",
        bar=f"<= {_NUM_BLOCKS}, one a report",
        why=waits.told(),
    )


def _title(door: str, precision: str) -> str:
    return f"{door}, {precision}: host synchronisations"


class Waits:
    """The host synchronisations in a block of code, by the lines that caused them."""

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()

    @property
    def number(self) -> int:
        """How many there were."""
        return self.places.total()

    def told(self) -> str:
        """Return the lines, the most frequent first."""
        return "; ".join(f"{place} ({number} times)" for place, number in self.places.most_common())

    @contextmanager
    def watching(self, *, is_cuda: bool) -> Iterator[None]:
        """Note the waits of a block, of which torch warns."""
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = self._take  # type: ignore[assignment]
            if is_cuda:
                torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                if is_cuda:
                    torch.cuda.set_sync_debug_mode("default")

    def _take(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if _MESSAGE not in str(message):
            return
        stack = [frame for frame in traceback.extract_stack()[:-1] if "warnings.py" not in frame[0]]
        last = stack[-1]
        place = _place_of(last)
        ours = [frame for frame in stack if frame.filename.startswith(_PACELINE)]
        if ours and ours[-1] is not last:
            place += f", called at {_place_of(ours[-1])}"
        self.places[place] += 1


def _place_of(frame: traceback.FrameSummary) -> str:
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} `{line}`"


if __name__ == "__main__":
    main()
