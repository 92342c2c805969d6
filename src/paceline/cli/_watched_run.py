"""`paceline run --watch`: the run in a process of its own, and its progress in one line."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from paceline._base.journal_records import AttemptStarted, MetricsReported, decode_value
from paceline._base.process_and_network import exit_code
from paceline._base.progress_display import COMPLETED, TrainingProgress
from paceline._base.progress_regions import SWITCH_VARIABLE
from paceline._base.run_directory import JournalKey, RunDirectory, RunTail
from paceline.cli._local_trial import signals_passed_to

_RUNS = Path("paceline_runs")
_INTERVAL_S = 0.2
_SIGNALLED = 128
# Newest directories to look through for the run that begins.
_NUM_LOOKED_AT = 50


def run_watched(arguments: list[str]) -> int:
    """Run the command line with these arguments in a child process, and show its progress.

    Returns:
        The exit code of the child process.
    """
    known = dict(_newest_journals())
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # One display is enough, and its lines come as soon as they are written.
        env={**os.environ, SWITCH_VARIABLE: "0", "PYTHONUNBUFFERED": "1"},
    )
    pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    readers = [threading.Thread(target=_forward_lines, args=pair, daemon=True) for pair in pairs]
    for reader in readers:
        reader.start()
    progress = _RunProgress(known)
    with signals_passed_to(process):
        while process.poll() is None:
            progress.show_news()
            time.sleep(_INTERVAL_S)
        code = exit_code(process)
    for reader in readers:
        # A process that the script has left behind may keep its output open.
        reader.join(_INTERVAL_S)
    progress.show_news()
    code = code if code >= 0 else _SIGNALLED - code
    progress.end(COMPLETED if code == 0 else f"ended with exit code {code}")
    return code


def _forward_lines(source: IO[bytes], target: Any) -> None:
    # A reader such as `head` that has seen enough does not end the training.
    with suppress(OSError, ValueError):
        for line in source:
            target.write(line.decode(errors="replace"))
            target.flush()
    with suppress(OSError, ValueError):
        for _ in source:
            pass


def _newest_journals() -> Iterator[tuple[Path, list[JournalKey]]]:
    """Yield the newest run directories with their journals."""
    names = sorted(os.listdir(_RUNS), reverse=True) if _RUNS.is_dir() else []
    for name in names[:_NUM_LOOKED_AT]:
        yield _RUNS / name, RunDirectory(_RUNS / name).journal_keys()


class _RunProgress:
    """Progress line of the run that begins after this object was made.

    Args:
        known: The journals there are, by run directory.
    """

    def __init__(self, known: dict[Path, list[JournalKey]]) -> None:
        self._known = known
        self._path: Path | None = None
        self._tail: RunTail | None = None
        self._progress = TrainingProgress(None, "batches")

    def show_news(self) -> None:
        """Show what the chief has reported since the last call."""
        if self._tail is None:
            self._find_run()
        while self._tail is not None and (found := self._tail.read()):
            for key, entries in found:
                if key.rank == 0 and key not in self._known.get(self._path or _RUNS, ()):
                    for entry in entries:
                        self._show_record(entry.decode())

    def end(self, how: str) -> None:
        """Show how the run has ended, and where it is."""
        self._progress.end(how, *([f"run {self._path}"] if self._path else []))

    def _find_run(self) -> None:
        for path, keys in _newest_journals():
            if set(keys) - set(self._known.get(path, ())):
                self._path, self._tail = path, RunTail(RunDirectory(path), {})
                return

    def _show_record(self, record: Any) -> None:
        if isinstance(record, AttemptStarted):
            self._progress.start(record.steps_completed)
        elif isinstance(record, MetricsReported):
            self._progress.update(record.steps_completed, 0)
            self._progress.report(decode_value(record.metrics), record.group)
