import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline._cluster.master.store.log_files import LogFilter, StoredLine, linear_pattern
from paceline._cluster.master.store.trial_logs import LogStore
from paceline._cluster.messages.runner_messages import LogEntry


def entry(sequence: int, text: str = "", **changed: object) -> LogEntry:
    usual = {"time": float(sequence), "rank": 0, "stream": "stdout", "level": "INFO"}
    return LogEntry(sequence, text=text or f"line {sequence}", **usual | changed)


def texts(lines: list[StoredLine]) -> list[str]:
    return [line.text for line in lines]


def test_lines_come_back_as_they_were(logs: LogStore) -> None:
    given = [
        LogEntry(0, 1.5, 3, "stderr", "ERROR", 'tab\t quote" back\\ ünïcode \u2028 \x1b[31m'),
        LogEntry(1, 2.5, None, "stdout", None, ""),
    ]
    logs.append(1, 1, given)
    assert [
        (line.attempt, line.time, line.rank, line.stream, line.level, line.text)
        for line in logs.read(1)
    ] == [(1, e.time, e.rank, e.stream, e.level, e.text) for e in given]


def test_half_a_surrogate_pair_is_kept_as_a_line(logs: LogStore) -> None:
    logs.append(1, 1, [entry(0, "broken \ud800 text"), entry(1, "next")])
    first, second = texts(logs.read(1))
    assert first.startswith("broken ")
    assert second == "next"


def test_appending_twice_stores_once(logs: LogStore) -> None:
    lines = [entry(number) for number in range(5)]
    logs.append(1, 1, lines[:3])
    logs.append(1, 1, lines[:3])
    logs.append(1, 1, lines)
    assert texts(logs.read(1)) == [line.text for line in lines]
    assert logs.last_sequence(1, 1) == 4


def test_lines_of_the_master_stand_between_and_do_not_count(logs: LogStore) -> None:
    logs.append(1, 1, [entry(0)])
    logs.append_note(1, 1, "WARNING", "two\nlines")
    logs.append(1, 1, [entry(0), entry(1)])
    assert texts(logs.read(1)) == ["line 0", "two", "lines", "line 1"]
    assert [line.level for line in logs.read(1, only=LogFilter(stream="master"))] == ["WARNING"] * 2
    assert logs.last_sequence(1, 1) == 1


def test_appending_returns_the_id_of_the_newest_line(logs: LogStore) -> None:
    first = logs.append(1, 1, [entry(0)])
    assert logs.append(1, 1, [entry(0)]) == first
    second = logs.append(1, 1, [entry(1), entry(2)])
    assert logs.read(1)[-1].id == second
    assert texts(logs.read(1, after=first)) == ["line 1", "line 2"]


def test_an_unknown_trial_has_no_lines(logs: LogStore) -> None:
    assert logs.read(9) == []
    assert logs.tail(9, 5) == []
    assert logs.last_sequence(9, 1) == -1


@pytest.mark.parametrize("torn", [b'[3, 3.0, 0, "std', b"[", b"\xff\xfe"])
def test_a_line_torn_by_a_crash_is_forgotten_and_comes_again(tmp_path: Path, torn: bytes) -> None:
    root = tmp_path / "logs"
    LogStore(root).append(1, 1, [entry(number) for number in range(3)])
    path = root / "trial-1" / "attempt-1.jsonl"
    with path.open("ab") as file:
        file.write(torn)
    again = LogStore(root)
    assert again.last_sequence(1, 1) == 2
    assert texts(again.read(1)) == ["line 0", "line 1", "line 2"]
    again.append(1, 1, [entry(2), entry(3), entry(4)])
    assert texts(again.read(1)) == [f"line {number}" for number in range(5)]
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


@pytest.mark.parametrize("is_started_again", [True, False])
@pytest.mark.parametrize("index", [None, b"", b"\x07\x00", b"\xff" * 80, b"\x05" + b"\0" * 7])
def test_an_index_that_is_lost_or_damaged_is_done_without(
    tmp_path: Path, index: bytes | None, is_started_again: bool
) -> None:
    root = tmp_path / "logs"
    store = LogStore(root)
    store.append(1, 1, [entry(number) for number in range(1000)])
    path = root / "trial-1" / "attempt-1.index"
    if index is None:
        path.unlink()
    else:
        path.write_bytes(index)
    again = LogStore(root) if is_started_again else store
    first = again.read(1, limit=1)[0].id
    assert texts(again.read(1, after=first + 700, limit=2)) == ["line 701", "line 702"]
    assert texts(again.tail(1, 2)) == ["line 998", "line 999"]


DAMAGED = [
    b'x2, 2.0, 0, "stdout", "INFO", "line 2"]',
    b'[2, 2.0, 0, "stdout", "INFO", "line \xff"]',
    b'[2, 2.0, 0, "stdout", "INFO", "line 2"',
    b'[2, "2", 0, "stdout", "INFO", "line 2"]',
    b"[2, 2.0]",
    b"\0" * 40,
    b"null",
    b"",
]


def damage(path: Path, number: int, content: bytes) -> None:
    """Replace a line of a file."""
    lines = path.read_bytes().splitlines()
    lines[number] = content
    path.write_bytes(b"\n".join(lines) + b"\n")


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_line_is_left_out_and_counted(tmp_path: Path, content: bytes) -> None:
    root = tmp_path / "logs"
    LogStore(root).append(1, 1, [entry(number) for number in range(600)])
    damage(root / "trial-1" / "attempt-1.jsonl", 2, content)
    again = LogStore(root)
    assert (again.last_sequence(1, 1), again.num_damaged(1)) == (599, 1)
    again.append(1, 1, [entry(599), entry(600)])
    again.append(1, 2, [entry(0, "later")])
    expected = [f"line {number}" for number in range(601) if number != 2]
    assert texts(again.read(1)) == [*expected, "later"]
    assert texts(again.tail(1, 1000)) == [*expected, "later"]
    assert [line.text for block in again.blocks(1) for line in block] == [*expected, "later"]
    third = again.read(1, limit=2)[-1].id
    assert texts(again.read(1, after=third, limit=2)) == ["line 3", "line 4"]
    assert (again.num_damaged(1), again.num_damaged(2)) == (1, 0)
    again.delete(1)
    assert again.num_damaged(1) == 0


def test_a_line_that_is_damaged_after_it_was_counted_is_left_out_as_well(
    logs: LogStore, tmp_path: Path
) -> None:
    logs.append(1, 1, [entry(number) for number in range(600)])
    [path] = tmp_path.rglob("attempt-1.jsonl")
    damage(path, 300, b"x" * len(path.read_bytes().splitlines()[300]))
    assert len(logs.read(1, limit=1000)) == len(logs.tail(1, 1000)) == 599
    assert logs.num_damaged(1) == 1


def test_lines_that_were_cut_off_are_counted(logs: LogStore, tmp_path: Path) -> None:
    logs.append(1, 1, [entry(number) for number in range(10)])
    [path] = tmp_path.rglob("attempt-1.jsonl")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:7]))
    assert texts(logs.read(1)) == [f"line {number}" for number in range(7)]
    assert logs.num_damaged(1) == 3


def test_a_damaged_number_does_not_hide_the_lines_that_follow(tmp_path: Path) -> None:
    """The line is whole to the eye, but its number is far beyond those after it."""
    root = tmp_path / "logs"
    LogStore(root).append(1, 1, [entry(number) for number in range(5)])
    path = root / "trial-1" / "attempt-1.jsonl"
    damage(path, 2, path.read_bytes().splitlines()[2].replace(b"[2,", b"[9002,"))
    again = LogStore(root)
    assert again.last_sequence(1, 1) == 4
    again.append(1, 1, [entry(5)])
    assert texts(again.read(1))[-1] == "line 5"


def test_pages_join_to_the_whole_over_many_attempts(logs: LogStore) -> None:
    expected = []
    for attempt in range(1, 13):
        for number in range(attempt * 100):
            expected.append(f"{attempt}/{number}")
        logs.append(
            1, attempt, [entry(number, f"{attempt}/{number}") for number in range(attempt * 100)]
        )
    found: list[StoredLine] = []
    after = -1
    while page := logs.read(1, after=after, limit=333):
        found += page
        after = page[-1].id
    assert texts(found) == expected
    ids = [line.id for line in found]
    assert ids == sorted(set(ids))
    assert texts(logs.tail(1, 1500)) == expected[-1500:]


def test_late_lines_of_an_earlier_attempt_come_before_those_of_a_later_one(logs: LogStore) -> None:
    logs.append(1, 2, [entry(0, "second attempt")])
    logs.append(1, 1, [entry(0, "first attempt")])
    assert texts(logs.read(1)) == ["first attempt", "second attempt"]


FILTERED = [
    entry(0, "epoch 1 Loss 0.5", rank=0, level="INFO"),
    entry(1, "epoch 1 loss 0.6", rank=1, level="DEBUG"),
    entry(2, "cannot open", rank=1, stream="stderr", level="ERROR"),
    entry(3, "no level", rank=None, level=None),
    entry(4, "careful", rank=0, stream="stderr", level="WARNING"),
]


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (LogFilter(), [0, 1, 2, 3, 4]),
        (LogFilter(rank=1), [1, 2]),
        (LogFilter(stream="stderr"), [2, 4]),
        (LogFilter(level="TRACE"), [0, 1, 2, 3, 4]),
        (LogFilter(level="INFO"), [0, 2, 3, 4]),
        (LogFilter(level="WARNING"), [2, 4]),
        (LogFilter(level="CRITICAL"), []),
        (LogFilter(search="LOSS"), [0, 1]),
        (LogFilter(search="loss", rank=1), [1]),
        (LogFilter(search="%"), []),
        (LogFilter(pattern=linear_pattern("l.ss=?")), [0, 1]),
        (LogFilter(pattern=linear_pattern("l.ss"), rank=1), [1]),
        (LogFilter(since=1.0, until=3.0), [1, 2, 3]),
        (LogFilter(rank=1, stream="stderr", level="ERROR", search="open"), [2]),
    ],
)
def test_filters_choose_lines_when_reading_and_from_the_end(
    logs: LogStore, only: LogFilter, expected: list[int]
) -> None:
    logs.append(1, 1, FILTERED)
    wanted = [FILTERED[number].text for number in expected]
    assert texts(logs.read(1, only=only)) == wanted
    assert texts(logs.tail(1, 100, only=only)) == wanted
    assert texts(logs.tail(1, 1, only=only)) == wanted[-1:]


def test_a_filter_finds_rare_lines_among_many_up_to_the_limit(logs: LogStore) -> None:
    logs.append(
        1, 1, [entry(n, f"{'rare' if n % 1000 == 0 else 'often'} {n}") for n in range(5000)]
    )
    only = LogFilter(search="rare")
    assert texts(logs.read(1, limit=2, only=only)) == ["rare 0", "rare 1000"]
    assert texts(logs.tail(1, 2, only=only)) == ["rare 3000", "rare 4000"]


def test_more_trials_than_are_kept_in_memory_keep_their_positions(logs: LogStore) -> None:
    for trial_id in range(300):
        logs.append(trial_id, 1, [entry(0), entry(1)])
    for trial_id in range(0, 300, 7):
        logs.append(trial_id, 1, [entry(1), entry(2)])
        assert texts(logs.read(trial_id)) == ["line 0", "line 1", "line 2"]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=6),
    st.integers(0, 800),
    st.integers(1, 300),
    st.booleans(),
)
def test_any_page_and_any_tail_are_slices_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    start: int,
    limit: int,
    is_reopened: bool,
) -> None:
    root = tmp_path_factory.mktemp("logs")
    logs = LogStore(root)
    expected, sequence = [], 0
    for size in sizes:
        lines = [entry(sequence + number) for number in range(size)]
        logs.append(1, 1, lines)
        expected += [line.text for line in lines]
        sequence += size
    if is_reopened:
        logs = LogStore(root)
    first = (1 << 40) - 1
    assert texts(logs.read(1, after=first + start, limit=limit)) == expected[start:][:limit]
    assert texts(logs.tail(1, limit)) == expected[-limit:]


def test_a_full_log_says_so_once_and_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PACELINE_MAX_LOG_MIB", "1")
        logs = LogStore(tmp_path)
    logs.append(1, 1, [entry(number, "x" * 10_000) for number in range(110)])
    for number in range(110, 120):
        logs.append(1, 1, [entry(number, "left out")])
        assert logs.last_sequence(1, 1) == number
    found = logs.read(1, limit=1000)
    assert len(found) == 111
    assert (found[-1].stream, found[-1].level) == ("master", "WARNING")
    assert "takes at most 1 MiB" in found[-1].text
    logs.append(1, 2, [entry(0, "another attempt")])
    assert logs.tail(1, 1)[0].text == "another attempt"
