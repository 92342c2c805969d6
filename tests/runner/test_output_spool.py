import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline._base.journal_records import seal_line
from paceline._cluster.messages.runner_messages import LogEntry
from paceline._cluster.runner.output_spool import OutputSpool, SpoolReader
from paceline._training.workers.processes.worker_output import OutputLine


def line(text: str, rank: int = 0, level: str | None = "INFO", **more: Any) -> OutputLine:
    return OutputLine(time=1.5, rank=rank, stream="stdout", level=level, text=text, **more)


def texts(entries: list[LogEntry]) -> list[str]:
    return [entry.text for entry in entries]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return where the spool lies."""
    return tmp_path / "output.jsonl"


def test_lines_come_back_numbered_as_they_were(path: Path) -> None:
    spool = OutputSpool(path)
    spool.add(line("first", rank=3, level=None))
    spool.add(line('ünïcode \u2028 \\ " \t'))
    spool.close()
    assert SpoolReader(path).read(10) == [
        LogEntry(0, 1.5, 3, "stdout", None, "first"),
        LogEntry(1, 1.5, 0, "stdout", "INFO", 'ünïcode \u2028 \\ " \t'),
    ]


def test_a_masked_line_loses_its_colours(path: Path) -> None:
    """Colours may stand in the middle of a secret, so its text alone tells what to mask."""
    spool = OutputSpool(path, ["longsecret"])
    spool.add(line("plain", colors=((0, "31"),)))
    spool.add(line("a longsecret", colors=((4, "31"), (6, "0"))))
    spool.close()
    found = [(entry.text, entry.colors) for entry in SpoolReader(path).read(10)]
    assert found == [("plain", ((0, "31"),)), ("a ***", ())]


def test_a_reader_follows_while_lines_are_added(path: Path) -> None:
    reader = SpoolReader(path)
    assert reader.read(10) == []
    spool = OutputSpool(path)
    found = []
    for number in range(25):
        spool.add(line(str(number)))
        if number % 7 == 0:
            found += texts(reader.read(3))
    while entries := reader.read(3):
        found += texts(entries)
    spool.close()
    assert found == [str(number) for number in range(25)]
    assert reader.read(3) == []


@pytest.mark.parametrize("after", [-1, 0, 5, 9, 20])
def test_a_reader_starts_after_a_sequence_number(path: Path, after: int) -> None:
    spool = OutputSpool(path)
    for number in range(10):
        spool.add(line(str(number)))
    spool.close()
    reader = SpoolReader(path, after=after)
    assert texts(reader.read(100)) == [str(number) for number in range(after + 1, 10)]
    assert reader.last_sequence == max(9, after)


def test_a_line_whose_end_is_missing_waits_for_it(path: Path) -> None:
    spool = OutputSpool(path)
    spool.add(line("whole"))
    spool.close()
    reader = SpoolReader(path)
    whole = seal_line(b'[1, 1.5, 0, "stdout", null, "late"]')
    for size in range(len(whole)):
        with path.open("ab") as file:
            file.write(whole[size : size + 1])
        expected = [["whole"]] if size == 0 else [[]]
        if size == len(whole) - 1:
            expected = [["late"]]
        assert [texts(reader.read(10))] == expected


@pytest.mark.parametrize("torn", [b"[1, 1.5", b"", b"\xff\xfe", b"{}", b"[1]", b"null", b"7"])
def test_a_damaged_line_in_the_middle_is_left_out_and_told(path: Path, torn: bytes) -> None:
    path.write_bytes(
        seal_line(b'[0, 1.5, 0, "stdout", null, "before"]')
        + torn
        + b"\n"
        + seal_line(b'[2, 1.5, 0, "stdout", null, "after"]')
    )
    before, told, after = SpoolReader(path).read(10)
    assert (before.text, after.text) == ("before", "after")
    assert (told.sequence, told.level) == (1, "WARNING")
    assert "damaged" in told.text
    # One that the master has is not told again.
    assert texts(SpoolReader(path, after=1).read(10)) == ["after"]


def test_lines_from_several_threads_are_all_there(path: Path) -> None:
    spool = OutputSpool(path)

    def add(name: int) -> None:
        for number in range(100):
            spool.add(line(f"{name}/{number}"))

    threads = [threading.Thread(target=add, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spool.close()
    entries = SpoolReader(path).read(1000)
    assert [entry.sequence for entry in entries] == list(range(400))
    for name in range(4):
        mine = [text for text in texts(entries) if text.startswith(f"{name}/")]
        assert mine == [f"{name}/{number}" for number in range(100)]


def test_on_a_full_disk_lines_wait_for_space(
    small_disk: Path, fill_disk: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    path = small_disk / "output.jsonl"
    spool = OutputSpool(path)
    spool.add(line("before"))
    fill_disk(small_disk, leave_bytes=100)
    for number in range(3000):
        spool.add(line(f"full {number}"))
    (small_disk / "filler").unlink()
    for number in range(10):
        spool.add(line(f"after {number}"))
    assert spool.finish() is None
    spool.close()
    expected = ["before", *(f"full {n}" for n in range(3000)), *(f"after {n}" for n in range(10))]
    assert texts(SpoolReader(path).read(10_000)) == expected
    assert caplog.text.count("Output cannot be kept") == 1


def test_lines_beyond_what_memory_holds_are_lost_and_counted(
    small_disk: Path, fill_disk: Callable[..., None]
) -> None:
    path = small_disk / "output.jsonl"
    spool = OutputSpool(path)
    fill_disk(small_disk)
    for number in range(12):
        spool.add(line(f"{number} " + "x" * 2**20))
    told = spool.finish(patience_s=0)
    assert told == "12 lines of the attempt's output could not be kept, because its disk was full."
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    spool.add(line("after"))
    told = spool.finish()
    spool.close()
    found = texts(SpoolReader(path).read(100))
    assert [text.split()[0] for text in found] == [*map(str, range(7)), "after"]
    assert told == "5 lines of the attempt's output could not be kept, because its disk was full."


def test_the_end_waits_for_space(small_disk: Path, fill_disk: Callable[..., None]) -> None:
    path = small_disk / "output.jsonl"
    spool = OutputSpool(path)
    fill_disk(small_disk)
    spool.add(line("last"))
    later = threading.Timer(0.5, (small_disk / "filler").unlink)
    later.start()
    assert spool.finish(patience_s=60) is None
    later.join()
    spool.close()
    assert texts(SpoolReader(path).read(10)) == ["last"]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=20)), st.integers(1, 7))
def test_any_text_comes_back(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], size: int
) -> None:
    path = tmp_path_factory.mktemp("spool") / "output.jsonl"
    spool = OutputSpool(path)
    for text in lines:
        spool.add(line(text))
    spool.close()
    reader, found = SpoolReader(path), []
    while entries := reader.read(size):
        found += texts(entries)
    assert found == lines
