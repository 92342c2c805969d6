import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import journal
from paceline._base.files import NotRegularFileError
from paceline._base.journal_reading_and_writing import JournalWriter, frame_line, segment_name
from paceline._base.journal_records import encode_record
from paceline.journal import (
    AnyRecord,
    JournalReader,
    JournalVersionError,
    MetricsReported,
    RecordsDropped,
    StatusReported,
    decode_record,
)


def status(text: str) -> StatusReported:
    return StatusReported(time=1.0, status=text)


def texts(reader: JournalReader) -> list[str]:
    records = [entry.decode() for entry in reader]
    return [record.status for record in records if isinstance(record, StatusReported)]


def journal_line(text: str) -> bytes:
    return encode_record(status(text))


def write(directory: Path, *names: str, **options: Any) -> None:
    writer = JournalWriter(directory, **options)
    for name in names:
        writer.append(status(name))
    writer.close()


@pytest.mark.parametrize(
    "record",
    [
        journal.AttemptStarted(
            time=1.5,
            attempt=1,
            generation=2,
            rank=3,
            world_size=4,
            pid=5,
            host="h",
            resumed_from=None,
            steps_completed=6,
        ),
        MetricsReported(time=1, group="g", steps_completed=1, metrics={"a": [1, {"b": "c"}]}),
        journal.ProgressReported(time=1, progress=0.5),
        status("warming up"),
        journal.EarlyExitReported(time=1, reason="invalid_hp"),
        journal.CheckpointStored(
            time=1,
            uuid="u",
            steps_completed=1,
            metadata={"k": None},
            resources={"f": 1},
            storage="/s",
        ),
        journal.CheckpointDeleted(time=1, uuid="u"),
        journal.OperationsRequested(time=1),
        journal.OperationCompleted(time=1, length=3, metric={"$float": "nan"}),
        journal.PreemptionAcknowledged(time=1),
        RecordsDropped(time=1, count=3),
        journal.RecordLost(time=1, reason="damaged"),
        journal.AttemptFinished(time=1, outcome="error", error="ValueError: x"),
    ],
    ids=lambda record: type(record).__name__,
)
def test_record_is_read_as_it_was_written(record: AnyRecord) -> None:
    payload = encode_record(record)
    assert b"\n" not in payload
    assert decode_record(payload) == record


def test_unknown_record_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="strange"):
        decode_record(b'{"type":"strange","time":1}')


def test_entries_carry_consecutive_sequence_numbers(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c")
    assert [entry.sequence for entry in JournalReader(tmp_path)] == [0, 1, 2]


def test_journal_files_are_private(tmp_path: Path) -> None:
    write(tmp_path / "journal", "a")
    (segment,) = (tmp_path / "journal").iterdir()
    assert segment.stat().st_mode & 0o077 == 0
    assert (tmp_path / "journal").stat().st_mode & 0o077 == 0


def test_second_writer_of_a_journal_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a")
    with pytest.raises(FileExistsError, match="one process only"):
        JournalWriter(tmp_path)


def test_reader_of_a_missing_journal_finds_nothing(tmp_path: Path) -> None:
    assert JournalReader(tmp_path / "none").read() == []


@given(
    names=st.lists(st.text(st.characters(codec="utf-8")), max_size=30),
    segment_bytes=st.integers(1, 2000),
    max_entries=st.integers(1, 7),
    resume_at=st.integers(0, 30),
)
def test_every_record_is_read_once_whatever_the_segments(
    tmp_path_factory: pytest.TempPathFactory,
    names: list[str],
    segment_bytes: int,
    max_entries: int,
    resume_at: int,
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    write(directory, *names, segment_bytes=segment_bytes)
    reader = JournalReader(directory)
    seen: list[int] = []
    while entries := reader.read(max_entries):
        assert len(entries) <= max_entries
        seen += [entry.sequence for entry in entries]
    assert seen == list(range(len(names)))
    assert texts(JournalReader(directory, after=resume_at - 1)) == names[resume_at:]


def test_half_written_line_counts_once_it_is_whole(tmp_path: Path) -> None:
    write(tmp_path, "a")
    (segment,) = tmp_path.iterdir()
    line = frame_line(1, encode_record(status("b")))
    reader = JournalReader(tmp_path)
    assert texts(reader) == ["a"]
    for piece, expected in [(line[:20], []), (line[20:-1], []), (line[-1:], ["b"])]:
        with segment.open("ab") as file:
            file.write(piece)
        assert texts(reader) == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line.replace(b"status", b"statuS", 1),
        lambda line: line[:15] + b"\n",
        lambda line: b"zzzzzzzz" + line[8:],
        lambda line: b"\x00" * 40 + b"\r\n",
        lambda line: b"\n",
        lambda line: b"%08x zz {}\n" % zlib.crc32(b"zz {}"),
        lambda line: frame_line(-7, b"{}"),
        lambda line: frame_line(2**53, line.partition(b"{")[1] + line.partition(b"{")[2]),
    ],
    ids=["altered", "torn", "no checksum", "zeros", "empty", "no number", "below", "far on"],
)
def test_damaged_line_is_skipped_and_the_others_stay(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    write(tmp_path, "a", "b", "c")
    (segment,) = tmp_path.iterdir()
    lines = segment.read_bytes().splitlines(keepends=True)
    lines[2] = damage(lines[2])
    segment.write_bytes(b"".join(lines))
    assert texts(JournalReader(tmp_path)) == ["a", "c"]


def test_line_longer_than_a_chunk_is_read(tmp_path: Path) -> None:
    long = "x" * 3_000_000
    write(tmp_path, "a", long, "c")
    assert texts(JournalReader(tmp_path)) == ["a", long, "c"]


def test_a_line_that_never_ends_takes_no_memory_and_counts_as_damaged(tmp_path: Path) -> None:
    write(tmp_path, "a", segment_bytes=1)
    with open(tmp_path / segment_name(0), "ab") as file:
        file.truncate(2**31)
    later = frame_line(-1, b'{"journal_version":1}') + frame_line(2, journal_line("c"))
    (tmp_path / segment_name(2)).write_bytes(later)
    reader = JournalReader(tmp_path)
    tracemalloc.start()
    try:
        assert texts(reader) == ["a", "c"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**23
    # Known by then: nothing is read again.
    assert (reader.read(), reader.num_read) == ([], 0)


def test_a_read_ends_at_its_limit_of_bytes_and_says_so(tmp_path: Path) -> None:
    names = [str(number) * 600_000 for number in range(5)]
    write(tmp_path, *names)
    reader, seen, reads = JournalReader(tmp_path), [], 0
    while not reads or reader.has_more:
        reads += 1
        seen += [entry.sequence for entry in reader.read(max_bytes=1)]
        assert reader.num_read <= 2**20
    assert seen == [0, 1, 2, 3, 4]
    assert reads > 2


@pytest.mark.parametrize("what", ["journal", "segment", "fifo", "directory"])
def test_links_and_special_files_in_a_journal_are_refused(tmp_path: Path, what: str) -> None:
    write(tmp_path / "private", "secret")
    journal_path = tmp_path / "run" / "journal"
    place = journal_path if what == "journal" else journal_path / segment_name(0)
    place.parent.mkdir(parents=True)
    if what == "journal":
        place.symlink_to(tmp_path / "private")
    elif what == "segment":
        place.symlink_to(tmp_path / "private" / segment_name(0))
    elif what == "fifo":
        os.mkfifo(place)
    else:
        place.mkdir()
    with pytest.raises(NotRegularFileError):
        JournalReader(journal_path, root=tmp_path / "run").read()


@pytest.mark.parametrize("number", [b"9" * 5000, b"-5", b"1_0", b""])
def test_a_sequence_number_that_no_writer_counts_is_damage(
    tmp_path: Path, number: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "a", "b")
    (segment,) = tmp_path.iterdir()
    body = number + b" SECRET"
    segment.write_bytes(segment.read_bytes() + b"%08x %b\n" % (zlib.crc32(body), body))
    (tmp_path / "zz.journal").write_text("SECRET")
    assert texts(JournalReader(tmp_path)) == ["a", "b"]
    assert f"{len(body) + 9} bytes long" in caplog.text
    assert "SECRET" not in caplog.text


def test_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    header = frame_line(-1, b'{"journal_version":2}')
    (tmp_path / segment_name(0)).write_bytes(header + frame_line(0, encode_record(status("a"))))
    with pytest.raises(JournalVersionError, match="format version 1, but has 2"):
        JournalReader(tmp_path).read()


def test_a_header_that_is_no_header_is_one_of_another_version(tmp_path: Path) -> None:
    (tmp_path / segment_name(0)).write_bytes(frame_line(-1, b"[]"))
    with pytest.raises(JournalVersionError, match="format version 1, but has None"):
        JournalReader(tmp_path).read()


def test_other_files_are_no_segments(tmp_path: Path) -> None:
    write(tmp_path, "a")
    (tmp_path / "zz.journal").touch()
    assert texts(JournalReader(tmp_path)) == ["a"]


def test_reader_follows_a_live_writer_over_segments(tmp_path: Path) -> None:
    names = [f"record {number}" for number in range(3000)]
    thread = threading.Thread(target=write, args=(tmp_path, *names), kwargs={"segment_bytes": 3000})
    reader = JournalReader(tmp_path)
    seen: list[str] = []
    thread.start()
    deadline = time.monotonic() + 60
    while len(seen) < len(names) and time.monotonic() < deadline:
        seen += texts(reader)
    thread.join()
    assert seen == names
    assert len(list(tmp_path.iterdir())) > 10


def test_what_is_forced_to_disk_includes_segments_that_are_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    sync = os.fsync

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def note(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    writer = JournalWriter(tmp_path / "journal", segment_bytes=1)
    for name in "abc":
        writer.append(status(name))
    # What a disk refuses once is forced again.
    monkeypatch.setattr(os, "fsync", fail)
    writer.sync()
    monkeypatch.setattr(os, "fsync", note)
    writer.sync()
    segments = {path.stat().st_ino for path in (tmp_path / "journal").iterdir()}
    assert len(segments) == 3
    assert segments | {(tmp_path / "journal").stat().st_ino} <= synced
    # Full segments that are on disk are not forced again.
    synced.clear()
    writer.sync()
    assert len(synced) == 1
    writer.close()


def test_a_thread_waits_for_what_another_one_forces_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = JournalWriter(tmp_path / "journal", segment_bytes=1)
    writer.append(status("a"))
    writer.append(status("b"))
    is_forcing, may_force, sync = threading.Event(), threading.Event(), os.fsync

    def wait(descriptor: int) -> None:
        is_forcing.set()
        assert may_force.wait(60)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", wait)
    first = threading.Thread(target=writer.sync)
    first.start()
    assert is_forcing.wait(60)
    second = threading.Thread(target=writer.sync)
    second.start()
    second.join(0.2)
    was_early = not second.is_alive()
    may_force.set()
    first.join()
    second.join()
    assert not was_early
    writer.close()


def test_threads_share_one_writer(tmp_path: Path, often_switching_threads: None) -> None:
    # Small segments, as a change of the file is where threads could meet.
    writer = JournalWriter(tmp_path, segment_bytes=2000)
    sequences: list[int] = []

    def append(letter: str) -> None:
        for number in range(300):
            sequences.append(writer.append(status(f"{letter}{number}")))

    threads = [threading.Thread(target=append, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    seen = texts(JournalReader(tmp_path))
    assert len(seen) == 1200
    assert sorted(sequences) == list(range(1200))
    for letter in "abcd":
        own = [name for name in seen if name[0] == letter]
        assert own == [f"{letter}{number}" for number in range(300)]


def test_killed_process_loses_no_acknowledged_record(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    code = """
import sys
from pathlib import Path
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline.journal import StatusReported
writer = JournalWriter(Path(sys.argv[1]), segment_bytes=2000)
number = 0
while True:
    writer.append(StatusReported(time=0, status=str(number)))
    print(number, flush=True)
    number += 1
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "journal")],
        stdout=subprocess.PIPE,
        env=clean_environment,
    )
    assert process.stdout is not None
    acknowledged = [int(process.stdout.readline()) for _ in range(500)]
    process.send_signal(signal.SIGKILL)
    acknowledged += [int(line) for line in process.stdout.read().split(b"\n")[:-1]]
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    seen = [int(text) for text in texts(JournalReader(tmp_path / "journal"))]
    assert seen == list(range(len(seen)))
    assert seen[: len(acknowledged)] == acknowledged


def metrics(step: int, group: str = "training") -> MetricsReported:
    return MetricsReported(time=1.0, group=group, steps_completed=step, metrics={"text": "x" * 400})


def steps_in(directory: Path, group: str) -> list[int]:
    records = [entry.decode() for entry in JournalReader(directory)]
    return [
        record.steps_completed
        for record in records
        if isinstance(record, MetricsReported) and record.group == group
    ]


@pytest.mark.root
def test_full_disk_delays_records_and_loses_none_within_the_bound(
    small_disk: Path, fill_disk: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    writer = JournalWriter(small_disk / "journal")
    writer.append(metrics(0))
    fill_disk(small_disk, leave_bytes=1)
    for step in range(1, 40):
        writer.append(metrics(step))
    assert caplog.text.count("Training goes on") == 1
    assert len(list(JournalReader(small_disk / "journal"))) < 40
    (small_disk / "filler").unlink()
    writer.append(metrics(40))
    writer.close()
    assert "can be written again" in caplog.text
    assert steps_in(small_disk / "journal", "training") == list(range(41))


@pytest.mark.root
def test_full_disk_at_the_first_record_still_gives_a_journal_with_header(
    small_disk: Path, fill_disk: Callable[..., None]
) -> None:
    writer = JournalWriter(small_disk / "journal")
    fill_disk(small_disk)
    writer.append(status("a"))
    (small_disk / "filler").unlink()
    writer.append(status("b"))
    writer.close()
    assert texts(JournalReader(small_disk / "journal")) == ["a", "b"]
    segments = sorted((small_disk / "journal").iterdir())
    assert b"journal_version" in segments[0].read_bytes()


@pytest.mark.root
@pytest.mark.parametrize("group", ["training", "validation", "mine"])
def test_beyond_the_bound_oldest_reports_are_dropped_and_counted(
    small_disk: Path, fill_disk: Callable[..., None], group: str
) -> None:
    writer = JournalWriter(small_disk / "journal", pending_bytes=5000)
    writer.append(status("begin"))
    fill_disk(small_disk)
    writer.append(journal.CheckpointDeleted(time=1, uuid="kept"))
    for step in range(1000):
        writer.append(metrics(step, group))
    (small_disk / "filler").unlink()
    writer.append(status("end"))
    writer.close()
    records = [entry.decode() for entry in JournalReader(small_disk / "journal")]
    (dropped,) = [record.count for record in records if isinstance(record, RecordsDropped)]
    kept = steps_in(small_disk / "journal", group)
    assert [record.uuid for record in records if isinstance(record, journal.CheckpointDeleted)]
    assert kept[-5:] == [995, 996, 997, 998, 999]
    assert dropped + len(kept) == 1000


@pytest.mark.root
def test_progress_and_status_are_bound_as_well_and_what_decides_is_kept(
    small_disk: Path, fill_disk: Callable[..., None]
) -> None:
    writer = JournalWriter(small_disk / "journal", pending_bytes=5000)
    writer.append(status("begin"))
    fill_disk(small_disk)
    for number in range(400):
        writer.append(status(f"{number} " + "x" * 100))
        writer.append(journal.ProgressReported(time=1, progress=number / 400))
        writer.append(journal.OperationCompleted(time=1, length=number, metric=0.5))
    (small_disk / "filler").unlink()
    writer.append(journal.AttemptFinished(time=1, outcome="completed"))
    writer.close()
    entries = list(JournalReader(small_disk / "journal"))
    records = [entry.decode() for entry in entries]
    lengths = [r.length for r in records if isinstance(r, journal.OperationCompleted)]
    assert lengths == list(range(400))
    (dropped,) = [record.count for record in records if isinstance(record, RecordsDropped)]
    reported = [r for r in records if isinstance(r, (StatusReported, journal.ProgressReported))]
    assert dropped + len(reported) == 1 + 800
    assert len(reported) < 100
    assert [entry.sequence for entry in entries] == sorted(entry.sequence for entry in entries)


@pytest.mark.root
def test_a_full_disk_is_tried_at_intervals_and_not_at_every_report(
    small_disk: Path, fill_disk: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still but for one second, in which one more write may fail."""
    now, num_failed, write = [100.0], [0], os.write

    def count(descriptor: int, data: bytes) -> int:
        try:
            return write(descriptor, data)
        except OSError:
            num_failed[0] += 1
            raise

    clock = SimpleNamespace(time=time.time, monotonic=lambda: now[0])
    monkeypatch.setattr("paceline._base.journal_reading_and_writing.time", clock)
    writer = JournalWriter(small_disk / "journal")
    writer.append(status("begin"))
    fill_disk(small_disk)
    monkeypatch.setattr(os, "write", count)
    for step in range(500):
        writer.append(metrics(step))
        if step == 250:
            now[0] += 1.0
    assert num_failed == [2]
    (small_disk / "filler").unlink()
    now[0] += 1.0
    writer.append(metrics(500))
    assert steps_in(small_disk / "journal", "training") == list(range(501))
    writer.close()


@pytest.mark.root
def test_records_that_never_find_space_are_counted_at_close(
    small_disk: Path, fill_disk: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    writer = JournalWriter(small_disk / "journal", close_patience_s=0.1)
    writer.append(status("a"))
    fill_disk(small_disk)
    for _ in range(20):
        writer.append(metrics(1))
    with caplog.at_level(logging.ERROR):
        writer.close()
    assert "records are lost" in caplog.text


@pytest.mark.root
def test_a_journal_waits_for_space_when_it_begins_and_when_it_ends(
    make_small_disk: Callable[..., Path],
) -> None:
    """There is no inode for its directory, and then one that comes while the process ends."""
    disk = make_small_disk(size="1m", nr_inodes=3)
    fillers = [disk / "one", disk / "two"]
    for filler in fillers:
        filler.touch()
    writer = JournalWriter(disk / "journal")
    writer.append(status("a"))
    assert not (disk / "journal").exists()
    closing = threading.Thread(target=writer.close)
    closing.start()
    for filler in fillers:
        filler.unlink()
    closing.join()
    assert texts(JournalReader(disk / "journal")) == ["a"]


def test_journal_is_not_inherited_by_child_processes(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    writer.append(status("a"))
    links = subprocess.run(
        ["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True
    ).stdout
    writer.close()
    assert str(tmp_path) not in links


def lost(reader: JournalReader, *, is_complete: bool = True) -> list[int]:
    """Return the numbers of the records that a journal has lost at its end."""
    assert list(reader) is not None
    entries = reader.finish(is_complete=is_complete)
    assert all(isinstance(entry.decode(), journal.RecordLost) for entry in entries)
    return [entry.sequence for entry in entries]


def damage_line(path: Path, number: int, *, at: int = 20) -> None:
    """Flip a bit of a line, counted from the header; -1 is the last one's end."""
    lines = path.read_bytes().splitlines(keepends=True)
    line = bytearray(lines[number])
    line[at] ^= 1
    lines[number] = bytes(line)
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    ("damaged", "found", "missing"),
    [
        ([], [0, 1, 2, 3], []),
        ([0], [0, 1, 2, 3], []),
        ([2], [0, 2, 3], []),
        ([4], [0, 1, 2], [3]),
        ([3, 4], [0, 1], [2, 3]),
        ([1, 2, 3, 4], [], [0, 1, 2, 3]),
    ],
)
def test_damaged_lines_at_the_end_are_told_once_nothing_more_is_written(
    tmp_path: Path, damaged: list[int], found: list[int], missing: list[int]
) -> None:
    """What is missing before a whole line is seen by its number."""
    write(tmp_path, "a", "b", "c", "d")
    (segment,) = tmp_path.iterdir()
    for number in damaged:
        damage_line(segment, number)
    reader = JournalReader(tmp_path)
    assert [entry.sequence for entry in reader] == found
    assert lost(reader) == missing
    assert lost(reader) == []
    # Another reader goes on after what was told, and one that was told of less tells the rest.
    assert lost(JournalReader(tmp_path, after=3)) == []
    if len(missing) > 1:
        assert lost(JournalReader(tmp_path, after=missing[0])) == missing[1:]


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_last_line_without_its_end_is_lost_only_if_its_writer_is_dead(
    tmp_path: Path, is_complete: bool
) -> None:
    write(tmp_path, "a", "b")
    (segment,) = tmp_path.iterdir()
    damage_line(segment, -1, at=-1)
    assert lost(JournalReader(tmp_path), is_complete=is_complete) == ([1] if is_complete else [])


def test_a_damaged_line_before_a_new_segment_is_told_by_the_number_that_follows(
    tmp_path: Path,
) -> None:
    write(tmp_path, *"abcdef", segment_bytes=150)
    first, second, *_ = sorted(tmp_path.iterdir())
    damage_line(first, -1)
    reader = JournalReader(tmp_path)
    expected = [number for number in range(6) if number != int(second.stem) - 1]
    assert [entry.sequence for entry in reader] == expected
    assert lost(reader) == []


def test_a_journal_without_a_file_has_lost_nothing(tmp_path: Path) -> None:
    assert lost(JournalReader(tmp_path)) == []
