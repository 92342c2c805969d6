"""Lines of many trials in order of time, reading only as far as they are asked for."""

import heapq
from collections.abc import Iterable, Iterator

from paceline.master.store._log_filter import LogFilter, StoredLine
from paceline.master.store._trial_logs import LogStore

# A line's place among those of other trials: its time, made to agree with the order of the lines of
# its own trial.
_Entry = tuple[float, int, int, StoredLine]


def merge_lines(
    logs: LogStore,
    trials: Iterable[tuple[int, float]],
    *,
    newest_first: bool = False,
    only: LogFilter | None = None,
) -> Iterator[tuple[int, StoredLine]]:
    """Yield (trial id, line) of many trials by time; those of one trial stay in their order.

    With a filter, the lines are those that pass of the whole, in its order.

    `trials` gives trials with the time at which they began, in that order; or, for
    `newest_first`, with the time at which they ended, the latest first (infinity for those that
    go on). No line counts as older or newer than that, whatever the clock of its node said, so a
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
    for line, time in lines:
        # Those that do not pass have their part in the order.
        place = max(place, sign * time)
        if line is not None:
            yield place, sign * trial_id, sign * line.id, line
