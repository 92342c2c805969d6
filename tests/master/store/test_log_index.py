"""Searches of logs through their bytes and the index of times, beside a look at every line."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._base.journal_records import seal_line
from paceline._cluster.master.store import log_files as _log_file
from paceline._cluster.master.store import trial_logs as _trial_logs
from paceline._cluster.master.store.log_files import LogFilter, StoredLine
from paceline._cluster.master.store.trial_logs import LogStore, merge_lines
from paceline._cluster.messages.runner_messages import LogEntry

# Letters whose small ones depend on what follows, are two, or lie within ASCII; and what JSON
# writes in another way.
LETTERS = (
    'abkiKIzZ0 9."\\/\n\t\x1b\x7f\u0130\u0131\u212a\u03a3\u03c3\u03c2\u00df\u1e9e\u00c5\u212b'
    "\U0001f600\u2588"
)
texts = st.text(st.sampled_from(LETTERS) | st.characters(), max_size=12)
lines = st.lists(
    st.tuples(texts, st.sampled_from(["INFO", "ERROR", "WARNING", None, "odd"]),
              st.sampled_from(["stdout", "stderr", "master"]), st.integers(0, 2),
              st.integers(0, 50)),
    max_size=40,
)  # fmt: skip
filters = st.builds(
    LogFilter,
    rank=st.none() | st.integers(0, 2),
    level=st.none() | st.sampled_from(["TRACE", "INFO", "WARNING", "ERROR"]),
    stream=st.none() | st.sampled_from(["stdout", "stderr", "other"]),
    since=st.none() | st.integers(0, 50),
    until=st.none() | st.integers(0, 50),
)


def entries(rows: list[Any], first: int = 0) -> list[LogEntry]:
    return [
        LogEntry(number, float(time), rank, stream, level, text)
        for number, (text, level, stream, rank, time) in enumerate(rows, first)
    ]


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Make blocks of four lines, so that a few lines fill many."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (_log_file, _trial_logs):
            patch.setattr(module, "BLOCK_LINES", 4)
        yield


def whole(logs: LogStore, trial_id: int) -> list[StoredLine]:
    return [line for block in logs.blocks(trial_id) for line in block]


@given(data=st.data(), rows=lines, only=filters)
@settings(max_examples=30, deadline=None)
def test_a_search_finds_the_lines_that_a_look_at_all_finds(
    data: Any, tmp_path_factory: Any, rows: list[Any], only: LogFilter
) -> None:
    logs = LogStore(tmp_path_factory.mktemp("logs"))
    cut = data.draw(st.integers(0, len(rows)))
    logs.append(1, 1, entries(rows[:cut]))
    logs.append(1, 1, entries(rows[cut:], cut))
    logs.append(1, 2, entries(rows[::-1]))
    pieces = [text[n : n + 5] for text, *_ in rows for n in range(0, len(text), 3)] or ["a"]
    wanted = data.draw(
        st.none()
        | st.sampled_from(pieces)
        | st.sampled_from(pieces).map(str.upper)
        | st.sampled_from(pieces).map(str.swapcase)
        | texts
    )
    only = LogFilter(only.rank, only.level, only.stream, wanted, only.since, only.until)
    everything = whole(logs, 1)
    expected = [line for line in everything if only.matches(line)]
    assert logs.read(1, only=only, limit=10_000) == expected
    assert logs.tail(1, 10_000, only=only) == expected
    limit = data.draw(st.integers(1, 5))
    assert logs.tail(1, limit, only=only) == expected[-limit:]
    after = data.draw(st.sampled_from([-1, *(line.id for line in everything)]))
    later = [line for line in expected if line.id > after]
    assert logs.read(1, after=after, limit=limit, only=only) == later[:limit]
    again = LogStore(logs._root)
    assert again.read(1, only=only, limit=10_000) == expected


@given(seed=st.integers(0, 10**6), wanted=st.sampled_from(["a", "ab", "word", "7", "\u03c3"]))
@settings(max_examples=15, deadline=None)
def test_a_search_of_many_trials_keeps_the_order_of_all_their_lines(
    tmp_path_factory: Any, seed: int, wanted: str
) -> None:
    dice = random.Random(seed)
    logs = LogStore(tmp_path_factory.mktemp("logs"))
    for trial_id in (1, 2, 3):
        rows = [
            (dice.choice(["ab word", "Word \u03a3", "7", "x"]), "INFO", "stdout", 0,
             dice.randint(0, 30))
            for _ in range(dice.randint(0, 20))
        ]  # fmt: skip
        logs.append(trial_id, 1, entries(rows))
    only = LogFilter(search=wanted)
    for newest_first, trials in ((False, [(1, 0.0), (2, 3.0), (3, 9.0)]),
                                 (True, [(3, 40.0), (1, 20.0), (2, 10.0)])):  # fmt: skip
        everything = merge_lines(logs, trials, newest_first=newest_first)
        expected = [pair for pair in everything if only.matches(pair[1])]
        found = merge_lines(logs, trials, newest_first=newest_first, only=only)
        assert list(found) == expected


def test_no_letter_but_two_has_a_small_one_within_ascii() -> None:
    # There is no letter with a small one beyond.
    letters = map(chr, range(128, 0x20000))
    odd = [one for one in letters if any(c.isascii() for c in one.lower())]
    assert odd == ["\u0130", "\u212a"]


@pytest.mark.parametrize("search", ["K9", "k9x", "300K9X at last", "300\u212a9x"])
@pytest.mark.parametrize("letter", ["k", "K", "\u212a"])
def test_the_sign_of_kelvin_is_found_as_a_k(tmp_path: Path, search: str, letter: str) -> None:
    logs = LogStore(tmp_path)
    rows = [(f"line {n}", "INFO", "stdout", 0, n) for n in range(40)]
    rows[21] = (f"300{letter}9x at last", "INFO", "stdout", 0, 21)
    logs.append(1, 1, entries(rows))
    found = logs.read(1, only=LogFilter(search=search))
    assert [line.text for line in found] == [f"300{letter}9x at last"]


def test_only_lines_that_can_match_are_decoded(tmp_path: Path, monkeypatch: Any) -> None:
    logs = LogStore(tmp_path)
    logs.append(1, 1, entries([(f"line {n:05d}", "INFO", "stdout", 0, n) for n in range(4000)]))
    decoded = []
    decode = _log_file.LogFile._decode

    def note(file: Any, number: int, line: bytes) -> Any:
        decoded.append(number)
        return decode(file, number, line)

    monkeypatch.setattr(_log_file.LogFile, "_decode", note)
    [found] = logs.read(1, only=LogFilter(search="LINE 01234"))
    assert (found.text, decoded) == ("line 01234", [1234])
    decoded.clear()
    assert logs.read(1, only=LogFilter(level="ERROR")) == []
    assert [line.text for line in logs.read(1, only=LogFilter(since=3999))] == ["line 03999"]
    assert set(decoded) <= set(range(3996, 4000))


@pytest.mark.parametrize("damage", ["lost", "empty", "cut", "flipped", "of other lines"])
def test_an_index_that_is_damaged_hides_no_line(tmp_path: Path, damage: str) -> None:
    logs = LogStore(tmp_path)
    rows = [(f"number {n}", "INFO", "stdout", 0, n) for n in range(30)]
    logs.append(1, 1, entries(rows))
    [path] = tmp_path.rglob("*.index")
    whole_index = path.read_bytes()
    if damage == "lost":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut":
        path.write_bytes(whole_index[:100])
    elif damage == "flipped":
        path.write_bytes(bytes(byte & 0x0F for byte in whole_index))
    else:
        size = len(whole_index) // 7
        path.write_bytes(b"".join(whole_index[n * size : (n + 1) * size] for n in range(6, -1, -1)))
    for store in (logs, LogStore(tmp_path)):
        for number in (0, 5, 13, 29):
            found = store.read(1, only=LogFilter(search="Number", since=number, until=number))
            assert [line.text for line in found] == [f"number {number}"]
    assert path.read_bytes() == whole_index


def test_lines_that_changed_under_the_index_are_found_as_they_are(tmp_path: Path) -> None:
    LogStore(tmp_path).append(1, 1, entries([(f"n {n}", "INFO", "stdout", 0, n) for n in range(9)]))
    [path] = tmp_path.rglob("*.jsonl")
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    rows = [row[:6] for row in rows]
    rows[2][5] = "another"
    damaged = b"".join(seal_line(json.dumps(row).encode()) for row in rows[:8]) + b"nonsense\n"
    path.write_bytes(damaged)
    logs = LogStore(tmp_path)
    assert [line.text for line in logs.read(1, only=LogFilter(search="anoth"))] == ["another"]
    assert logs.read(1, only=LogFilter(search="n 2")) == []
    assert (logs.last_sequence(1, 1), logs.num_damaged(1)) == (7, 1)
    for _ in range(2):
        assert LogStore(tmp_path).last_sequence(1, 1) == 7
