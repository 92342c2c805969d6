"""How much of the logs is read, and that one long log keeps nobody waiting."""

import os
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._cluster.master.store.log_files import StoredLine
from paceline._cluster.master.store.trial_logs import LogStore, merge_lines
from paceline._cluster.messages.runner_messages import LogEntry


class CountingStore(LogStore):
    """A log store that counts the lines it hands out, by trial."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.num_lines: dict[int, int] = {}

    def blocks(self, trial_id: int, *, newest_first: bool = False) -> Iterator[list[StoredLine]]:
        """Count lines."""
        self.num_lines[trial_id] = 0
        for block in super().blocks(trial_id, newest_first=newest_first):
            self.num_lines[trial_id] += len(block)
            yield block


def fill(logs: LogStore, trial_id: int, times: list[float], attempt: int = 1) -> None:
    entries = [
        LogEntry(number, time, 0, "stdout", "INFO", f"{trial_id} {time}")
        for number, time in enumerate(times)
    ]
    logs.append(trial_id, attempt, entries)


@pytest.mark.parametrize("newest_first", [False, True])
def test_a_merge_opens_only_the_trials_it_has_reached_and_reads_little_of_them(
    tmp_path: Path, newest_first: bool
) -> None:
    """Trial n runs from time 1000 n to 1000 n + 1500, so that never more than two overlap."""
    logs = CountingStore(tmp_path)
    for trial_id in range(20):
        fill(logs, trial_id, [1000.0 * trial_id + n for n in range(1500)])
    if newest_first:
        trials = [(trial_id, 1000.0 * trial_id + 1500) for trial_id in reversed(range(20))]
    else:
        trials = [(trial_id, 1000.0 * trial_id) for trial_id in range(20)]
    found = list(islice(merge_lines(logs, trials, newest_first=newest_first), 100))
    first = 20_499.0 if newest_first else 0.0
    sign = -1 if newest_first else 1
    assert [line.time for _, line in found] == [first + sign * n for n in range(100)]
    assert set(logs.num_lines) == {19 if newest_first else 0}
    assert 100 <= sum(logs.num_lines.values()) <= 300


def test_many_trials_are_read_side_by_side_with_no_file_left_open(tmp_path: Path) -> None:
    logs = LogStore(tmp_path)
    for trial_id in range(300):
        fill(logs, trial_id, [float(trial_id + 300 * n) for n in range(40)])
    merged = merge_lines(logs, [(trial_id, 0.0) for trial_id in range(300)])
    before = len(os.listdir("/proc/self/fd"))
    found = list(islice(merged, 5000))
    assert len(os.listdir("/proc/self/fd")) <= before
    assert [line.time for _, line in found] == [float(n) for n in range(5000)]


def test_lines_of_one_trial_keep_their_order_whatever_their_clocks_say(logs: LogStore) -> None:
    fill(logs, 1, [5.0, 3.0, 9.0])
    fill(logs, 2, [4.0, 6.0, 1.0])
    found = [line.text for _, line in merge_lines(logs, [(1, 2.0), (2, 2.0)])]
    assert found == ["2 4.0", "1 5.0", "1 3.0", "2 6.0", "2 1.0", "1 9.0"]


def test_a_line_counts_as_no_older_than_its_trial(logs: LogStore) -> None:
    """The clock of the second trial's node is behind."""
    fill(logs, 1, [10.0, 20.0, 30.0])
    fill(logs, 2, [1.0, 25.0])
    found = [line.text for _, line in merge_lines(logs, [(1, 10.0), (2, 15.0)])]
    assert found == ["1 10.0", "2 1.0", "1 20.0", "2 25.0", "1 30.0"]


# Per trial: the times of its lines in order, over several attempts.
trials = st.lists(
    st.lists(st.lists(st.integers(0, 50), max_size=40).map(sorted), max_size=3), max_size=6
)


@settings(max_examples=40, deadline=None)
@given(trials, st.booleans())
def test_a_merge_holds_every_line_in_order_of_time(
    tmp_path_factory: pytest.TempPathFactory, trials: list[list[list[int]]], newest_first: bool
) -> None:
    logs = LogStore(tmp_path_factory.mktemp("logs"))
    spans, expected = [], []
    for trial_id, attempts in enumerate(trials):
        times = sorted(time for attempt in attempts for time in attempt)
        start = 0
        for number, attempt in enumerate(attempts, 1):
            part = [float(time) for time in times[start : start + len(attempt)]]
            fill(logs, trial_id, part, number)
            start += len(attempt)
        expected += [(float(time), trial_id) for time in times]
        if times:
            spans.append((trial_id, float(times[-1] if newest_first else times[0])))
    spans.sort(key=lambda span: (span[1], span[0]), reverse=newest_first)
    found = merge_lines(logs, spans, newest_first=newest_first)
    assert [(line.time, trial_id) for trial_id, line in found] == sorted(
        expected, reverse=newest_first
    )
    endless = [(trial_id, inf) for trial_id, _ in spans]
    if newest_first:
        again = merge_lines(logs, endless, newest_first=True)
        assert [line.time for _, line in again] == sorted((t for t, _ in expected), reverse=True)


def test_the_first_look_at_a_long_log_keeps_no_other_waiting(
    tmp_path: Path, make_slow_log: Callable[[Path], Callable[[], None]]
) -> None:
    release = make_slow_log(tmp_path / "logs" / "trial-1" / "attempt-1.jsonl")
    logs = LogStore(tmp_path / "logs")
    found: list[int] = []
    first = threading.Thread(target=lambda: found.append(logs.last_sequence(1, 1)))
    second = threading.Thread(target=lambda: fill(logs, 2, [1.0]))
    first.start()
    while (1, 1) not in logs._files:
        first.join(0.005)
    second.start()
    second.join(60)
    was_kept_waiting = second.is_alive()
    release()
    first.join()
    second.join()
    assert not was_kept_waiting
    assert found == [-1]
    assert [line.text for line in logs.read(2)] == ["2 1.0"]


def test_a_file_in_use_is_not_forgotten(tmp_path: Path) -> None:
    """Two objects of one file would each cut off what the other one appends."""
    logs = LogStore(tmp_path)
    fill(logs, 1, [1.0])
    with logs._using(1, 1) as file:
        for trial_id in range(2, 400):
            logs.append_note(trial_id, 1, "INFO", "x")
        with logs._using(1, 1) as again:
            assert again is file
    assert len(logs._files) <= 256
