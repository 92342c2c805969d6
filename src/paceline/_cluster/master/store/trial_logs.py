"""Logs of trials: the files of their attempts beside the database, merged and filtered."""

import heapq
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path

from paceline._base.process_and_network import integer_setting
from paceline._cluster.master.store.log_files import (
    BLOCK_LINES,
    LogFile,
    LogFilter,
    StoredLine,
    line_id,
    numbered_of_member,
    own_sequence,
)
from paceline._cluster.messages.runner_messages import LogEntry

logger = logging.getLogger(__name__)


_FIRST_BLOCK_LINES = 16
_MAX_FILES = 256
MASTER_STREAM = "master"


class LogStore:
    """Append-only log files: ``<root>/trial-<id>/attempt-<n>.jsonl`` and ``.index``.

    A line is ``[sequence, time, rank, stream, level, text, colors]``, the last one where there are
    some. The runner's sequence numbers make
    shipping twice harmless, and the master's own lines have -1. The index has the time span of each
    block of lines; it is made anew if it is lost or damaged. A search looks through the bytes, and
    decodes only lines that can match. A damaged line is left out wherever it is met, and counted;
    it keeps its id. Safe to call from several threads.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._max_bytes = integer_setting("PACELINE_MAX_LOG_MIB", 1024) * 1024 * 1024
        # May be taken again by its holder: a forgotten iterator of `blocks` ends at any time.
        self._lock = threading.RLock()
        self._files: dict[tuple[int, int], LogFile] = {}
        # The ids of each trial's damaged lines, as far as its files were read.
        self._damaged: dict[int, set[int]] = {}

    def append(self, trial_id: int, attempt: int, entries: list[LogEntry], member: int = 0) -> int:
        """Store the new entries and return the id of the attempt's newest line.

        A log at its size limit says so once, and takes no more lines. Each node of an
        attempt counts its own lines.
        """
        entries = [numbered_of_member(entry, member) for entry in entries] if member else entries
        with self._using(trial_id, attempt) as file, file.lock:
            known = file.last_sequence_of(member)
            fresh = [entry for entry in entries if entry.sequence > known]
            if file.size < self._max_bytes:
                file.append(fresh)
            elif fresh:
                if not file.is_full:
                    file.append(_notes_in_log("WARNING", _full_text(file.size)))
                file.drop(fresh)
            return line_id(attempt, file.num_lines - 1)

    def append_note(self, trial_id: int, attempt: int, level: str, text: str) -> None:
        """Add lines of the master itself."""
        entries = _notes_in_log(level, text)
        with self._using(trial_id, attempt) as file, file.lock:
            file.append(entries)

    def last_sequence(self, trial_id: int, attempt: int, member: int = 0) -> int:
        """Return the highest stored sequence number of a runner's lines, or -1."""
        with self._using(trial_id, attempt) as file, file.lock:
            return own_sequence(file.last_sequence_of(member))

    def num_lines(self, trial_id: int) -> int:
        """Return how many lines a trial has printed so far, the damaged ones among them."""
        total = 0
        for attempt in self._attempts(trial_id):
            with self._using(trial_id, attempt) as file:
                total += file.num_lines
        return total

    def num_damaged(self, trial_id: int) -> int:
        """Return how many damaged lines of a trial were met so far."""
        return len(self._damaged.get(trial_id, ()))

    def read(
        self, trial_id: int, *, after: int = -1, limit: int = 1000, only: LogFilter | None = None
    ) -> list[StoredLine]:
        """Return up to `limit` matching lines beyond the line id `after`, oldest first."""
        lines: list[StoredLine] = []
        for attempt in self._attempts(trial_id):
            if line_id(attempt + 1, 0) <= after:
                continue
            start = max(0, after + 1 - line_id(attempt, 0))
            with self._using(trial_id, attempt) as file:
                found = file.lines(start) if only is None else file.matching(only, start)
                lines += islice(found, limit - len(lines))
            if len(lines) >= limit:
                break
        return lines

    def tail(
        self, trial_id: int, num_lines: int, *, only: LogFilter | None = None
    ) -> list[StoredLine]:
        """Return the last `num_lines` matching lines, oldest first."""
        found: list[StoredLine] = []
        for attempt in reversed(self._attempts(trial_id)):
            if len(found) >= num_lines:
                break
            with self._using(trial_id, attempt) as file:
                num_left = num_lines - len(found)
                if only is not None:
                    found += islice(file.matching(only, newest_first=True), num_left)
                    continue
                end = file.num_lines
                while end > 0 and num_left > 0:
                    start = max(0, end - min(num_left, BLOCK_LINES))
                    block = list(file.lines(start, end))
                    found += reversed(block)
                    end, num_left = start, num_left - len(block)
        return found[::-1]

    def blocks(self, trial_id: int, *, newest_first: bool = False) -> Iterator[list[StoredLine]]:
        """Yield all lines of a trial in small blocks, in order or from the end.

        No file stays open between two blocks, so any number of trials can be read side by side.
        """
        attempts = self._attempts(trial_id)
        for attempt in reversed(attempts) if newest_first else attempts:
            with self._using(trial_id, attempt) as file:
                done, size, num_lines = 0, _FIRST_BLOCK_LINES, file.num_lines
                while done < num_lines:
                    end = min(num_lines, done + size)
                    bounds = (num_lines - end, num_lines - done) if newest_first else (done, end)
                    block = list(file.lines(*bounds))
                    yield block[::-1] if newest_first else block
                    # Small at first, as most readers need few lines.
                    done, size = end, min(2 * size, BLOCK_LINES)

    def matching(
        self, trial_id: int, only: LogFilter, *, newest_first: bool = False
    ) -> Iterator[tuple[StoredLine | None, float]]:
        """Yield the matching lines of a trial in either order, with their times.

        For lines that do not pass, None and a time come instead: see `LogFile.matching_in_time`.
        """
        attempts = self._attempts(trial_id)
        for attempt in reversed(attempts) if newest_first else attempts:
            with self._using(trial_id, attempt) as file:
                yield from file.matching_in_time(only, newest_first=newest_first)

    def delete(self, trial_id: int) -> None:
        """Delete a trial's lines.

        Raises:
            OSError: The files cannot be removed.
        """
        with self._lock:
            for key in [key for key in self._files if key[0] == trial_id]:
                del self._files[key]
            self._damaged.pop(trial_id, None)
        with suppress(FileNotFoundError):
            shutil.rmtree(self._root / f"trial-{trial_id}")

    def _note_damaged(self, trial_id: int, line_id: int) -> None:
        self._damaged.setdefault(trial_id, set()).add(line_id)

    def _attempts(self, trial_id: int) -> list[int]:
        # A merge asks this of each trial: most of the time must not go to objects for paths.
        try:
            names = os.listdir(f"{self._root}/trial-{trial_id}")
        except FileNotFoundError:
            return []
        return sorted(int(name[8:-6]) for name in names if name.endswith(".jsonl"))

    @contextmanager
    def _using(self, trial_id: int, attempt: int) -> "Iterator[LogFile]":
        """Provide the shared file object of an attempt: at most a single object exists per file.

        The store's lock is held for a moment only: a long file is read under its own.
        """
        key = (trial_id, attempt)
        with self._lock:
            file = self._files.pop(key, None)
            if file is None:
                path = self._root / f"trial-{trial_id}" / f"attempt-{attempt}.jsonl"
                file = LogFile(path, attempt, partial(self._note_damaged, trial_id))
            # Reinserted last: the order of the dictionary is the order of use, see `_forget`.
            self._files[key] = file
            file.num_users += 1
        try:
            with file.lock:
                file.load()
            yield file
        finally:
            with self._lock:
                file.num_users -= 1
                self._forget()

    def _forget(self) -> None:
        """Forget the least recently used files beyond a number, but none in use."""
        surplus = len(self._files) - _MAX_FILES
        if surplus > 0:
            unused = (key for key, file in self._files.items() if file.num_users == 0)
            for key in list(islice(unused, surplus)):
                del self._files[key]


def _notes_in_log(level: str, text: str) -> list[LogEntry]:
    """Return lines of the master itself."""
    return [
        LogEntry(-1, time.time(), None, MASTER_STREAM, level, line) for line in text.splitlines()
    ]


def _full_text(num_bytes: int) -> str:
    return (
        f"The log of an attempt takes at most {num_bytes // 1024**2} MiB; what comes now is left"
        " out. Hint: PACELINE_MAX_LOG_MIB of the master allows more."
    )


# A line's place among the lines of other trials: its time, made to agree with the order of the
# lines of its own trial.
_Entry = tuple[float, int, int, StoredLine]


def merge_lines(
    logs: LogStore,
    trials: Iterable[tuple[int, float]],
    *,
    newest_first: bool = False,
    only: LogFilter | None = None,
) -> Iterator[tuple[int, StoredLine]]:
    """Yield (trial id, line) of many trials by time, keeping the line order within each trial.

    With a filter, the lines that pass keep the order of all lines.

    `trials` gives trials with the time at which they began, in that order; or, for
    `newest_first`, with the time at which they ended, the latest first (infinity for those that
    resume). No line counts as older or newer than that, whatever the clock of its node said, so a
    trial's log is opened only once the merge has reached it.
    """
    sign = -1.0 if newest_first else 1.0
    waiting: list[tuple[_Entry, Iterator[_Entry]]] = []
    arriving = iter(trials)
    upcoming = next(arriving, None)
    while waiting or upcoming is not None:
        while upcoming is not None and (
            not waiting or (sign * upcoming[1], sign * upcoming[0]) <= waiting[0][0][:2]
        ):
            trial_id, bound = upcoming
            entries = _log_entries(logs, trial_id, sign * bound, newest_first, only)
            _push_log_lines(waiting, entries)
            upcoming = next(arriving, None)
        if waiting:
            (_, trial_key, _, line), entries = heapq.heappop(waiting)
            yield abs(trial_key), line
            _push_log_lines(waiting, entries)


def _push_log_lines(
    waiting: list[tuple[_Entry, Iterator[_Entry]]], entries: Iterator[_Entry]
) -> None:
    entry = next(entries, None)
    if entry is not None:
        heapq.heappush(waiting, (entry, entries))


def _log_entries(
    logs: LogStore, trial_id: int, bound: float, newest_first: bool, only: LogFilter | None
) -> Iterator[_Entry]:
    sign = -1 if newest_first else 1
    place = bound
    lines: Iterator[tuple[StoredLine | None, float]]
    if only is None or only == LogFilter():
        blocks = logs.blocks(trial_id, newest_first=newest_first)
        lines = ((line, line.time) for block in blocks for line in block)
    else:
        lines = logs.matching(trial_id, only, newest_first=newest_first)
    for line, at in lines:
        # Rejected lines still advance the time, so the order is the same with and without a filter.
        place = max(place, sign * at)
        if line is not None:
            yield place, sign * trial_id, sign * line.id, line
