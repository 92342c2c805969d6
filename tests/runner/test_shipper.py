"""Shipping to a real master that dies, moves to another port and comes back.

The attempts that the master starts only sleep; what is shipped lies in a directory of the test's.
"""

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline._base.journal_reading_and_writing import JournalWriter, frame_line, segment_name
from paceline._cluster.master.store.upgrades import copy_database
from paceline._cluster.messages.runner_messages import AttemptControl, AttemptEnd
from paceline._cluster.messages.states import ExitReason
from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline._cluster.runner.master_link import (
    MasterBackoff,
    MasterFailedError,
    MasterLink,
    RefusedByMasterError,
    UnreachableError,
)
from paceline._cluster.runner.output_spool import OutputSpool
from paceline._cluster.runner.record_shipping import Shipper
from paceline._training.workers.processes.worker_output import OutputLine
from paceline.core import MediaReports
from paceline.journal import CheckpointStored, MetricsReported, StatusReported

SLEEP = "import time\ntime.sleep(120)\n"
Report = Callable[[int], MetricsReported]


class Shipment:
    """An attempt's directory, what is written into it, and its shipper."""

    def __init__(
        self, directory: AttemptDirectory, master: Any, write_journal: Callable[..., JournalWriter]
    ) -> None:
        self.directory = directory
        self.master = master
        self.journals = [write_journal(directory, rank) for rank in (0, 1)]
        self.spool = OutputSpool(directory.output_path)
        self.link = MasterLink.of_home(master.home)
        self.shippers: list[Shipper] = []
        self.shipper = self.new_shipper()

    def new_shipper(self, attempt_id: int = 1, **options: Any) -> Shipper:
        """Return another shipper, as a runner's successor has."""
        link = MasterLink.of_home(self.master.home)
        self.shippers.append(Shipper(self.directory, attempt_id, link, **options))
        return self.shippers[-1]

    def ship_once(self) -> bool:
        """Send up to one request of each kind; False when there was nothing."""
        has_records = self.shipper.records.ship_once()
        return self.shipper.output.ship_once() or has_records

    def ship_rest(self) -> None:
        """Send everything."""
        self.shipper.records.ship_rest()
        self.shipper.output.ship_rest()

    def say(self, text: str) -> None:
        """Add a line of output."""
        self.spool.add(OutputLine(rank=0, stream="stdout", level="INFO", time=1.0, text=text))

    def check(self, num_reports: int, num_lines: int) -> None:
        """Check that everything arrived once and in order."""
        rows = self.master.read("/trials/1/metrics", group="training")["items"]
        assert [(row["steps_completed"], row["metrics"]) for row in rows] == [
            (step, {"x": step * 0.5}) for step in range(num_reports)
        ]
        trial = self.master.read("/trials/1")
        if num_reports:
            assert trial["summary"]["training"]["x"]["count"] == num_reports
        assert self.master.output(trial) == [f"line {number}" for number in range(num_lines)]

    def close(self) -> None:
        """Close what is open."""
        for journal in self.journals:
            journal.close()
        self.spool.close()
        self.link.close()
        for shipper in self.shippers:
            shipper.stop()
            shipper.output.join()
            shipper.close()


@pytest.fixture
def shipment(
    master: Any,
    make_attempt: Callable[..., AttemptDirectory],
    write_journal: Callable[..., JournalWriter],
    wait_until: Callable[..., None],
) -> Iterator[Shipment]:
    """Return a shipment to a started master whose attempt 1 runs."""
    master.start()
    experiment_id = master.create(SLEEP)
    wait_until(lambda: master.trial(experiment_id)["attempts"])
    made = Shipment(make_attempt(master.home), master, write_journal)
    yield made
    made.close()


def test_what_is_there_is_shipped_in_order_and_once(shipment: Shipment, report: Report) -> None:
    for step in range(2500):
        shipment.journals[0].append(report(step))
    for number in range(1500):
        shipment.say(f"line {number}")
    shipment.journals[1].append(StatusReported(time=1.0, status="not the chief"))
    shipment.ship_rest()
    assert not shipment.ship_once()
    # Another shipper asks first what is there.
    first, shipment.shipper = shipment.shipper, shipment.new_shipper()
    shipment.ship_rest()
    # One that forgot what the master said sends nothing anew.
    shipment.shipper = first
    shipment.shipper.forget_positions()
    assert not shipment.ship_once()
    rows = shipment.master.read("/trials/1/metrics", group="training", limit=1000)
    assert len(rows["items"]) == 1000
    summary = shipment.master.read("/trials/1")["summary"]["training"]["x"]
    assert (summary["count"], summary["last"]) == (2500, 2499 * 0.5)
    tail = shipment.master.read("/trials/1/logs", tail=2000)["items"]
    mine = [line["text"] for line in tail if line["stream"] != "master"]
    assert mine == [f"line {number}" for number in range(1500)]


@pytest.mark.long
def test_a_master_that_dies_between_any_two_requests_loses_and_doubles_nothing(
    shipment: Shipment, report: Report
) -> None:
    """The master comes back on another port each time."""
    master = shipment.master
    num_reports = num_lines = 0
    ports = set()
    for round_ in range(3):
        ports.add(master.http.base_url.port)
        for _ in range(40):
            shipment.journals[0].append(report(num_reports))
            num_reports += 1
            shipment.say(f"line {num_lines}")
            num_lines += 1
        if round_ == 1:
            # Records arrive, output does not.
            assert shipment.shipper.records.ship_once()
        else:
            shipment.ship_once()
        master.kill()
        shipment.journals[0].append(report(num_reports))
        num_reports += 1
        with pytest.raises(UnreachableError):
            shipment.ship_rest()
        shipment.shipper.forget_positions()
        shipment.shipper.close()
        master.start()
    shipment.ship_rest()
    shipment.check(num_reports, num_lines)
    assert len(ports) > 1


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_records_that_an_older_database_lacks_are_sent_again(
    shipment: Shipment, report: Report, tmp_path: Path, rank: int
) -> None:
    """The shipper does not know that the master has another database than before."""
    journal, master = shipment.journals[rank], shipment.master
    for step in range(4):
        journal.append(report(step))
    shipment.ship_rest()
    copy_database(master.home / "master.sqlite", tmp_path / "older.sqlite")
    for step in range(4, 10):
        journal.append(report(step))
    shipment.ship_rest()
    start_with(master, tmp_path / "older.sqlite")
    journal.append(report(10))
    # With another connection, no request fails from which it would follow.
    shipment.shipper.close()
    shipment.ship_rest()
    shipment.check(11, 0)
    assert master.read("/trials/1")["num_records_lost"] == 0


def start_with(master: Any, database: Path) -> None:
    """Kill a master, and start it with an older database."""
    master.kill()
    for end in ("-wal", "-shm"):
        (master.home / f"master.sqlite{end}").unlink(missing_ok=True)
    database.replace(master.home / "master.sqlite")
    master.start()


@pytest.mark.long
def test_a_journal_that_is_silent_is_sent_again_when_the_master_is_back(
    shipment: Shipment, report: Report, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """No record follows from which the shipper could hear what the master lacks."""
    master = shipment.master

    def has(num_reports: int) -> bool:
        return len(master.read("/trials/1/metrics", group="training")["items"]) == num_reports

    shipment.journals[0].append(report(0))
    shipment.shipper.start()
    wait_until(lambda: has(1))
    copy_database(master.home / "master.sqlite", tmp_path / "older.sqlite")
    shipment.journals[0].append(report(1))
    wait_until(lambda: has(2))
    start_with(master, tmp_path / "older.sqlite")
    assert has(1)
    # As the runner does that finds its master again.
    shipment.shipper.doubt_positions()
    wait_until(lambda: has(2))
    shipment.shipper.stop()
    shipment.check(2, 0)
    assert master.read("/trials/1")["num_records_lost"] == 0


@pytest.mark.long
def test_a_shipping_thread_outlives_masters_while_training_goes_on(
    shipment: Shipment, report: Report, wait_until: Callable[..., None]
) -> None:
    master = shipment.master
    shipment.shipper.start()
    for step in range(300):
        shipment.journals[0].append(report(step))
        if step % 10 == 0:
            shipment.say(f"line {step // 10}")
        if step in (100, 200):
            master.kill()
        if step in (150, 250):
            master.start()
        time.sleep(0.001)
    wait_until(
        lambda: (
            len(master.read("/trials/1/metrics", group="training")["items"]) == 300
            and len(master.output(master.read("/trials/1"))) == 30
        )
    )
    shipment.shipper.stop()
    shipment.check(300, 30)


def test_what_an_unknown_master_sends_back_counts_as_away(
    make_attempt: Callable[..., AttemptDirectory],
) -> None:
    directory = make_attempt()
    shipper = Shipper(directory, 1, MasterLink.of_home(directory.path))
    for content in (None, "", "{", "[]", '{"url": "http://127.0.0.1:9"}'):
        if content is not None:
            (directory.path / "master.json").write_text(content)
            (directory.path / "token").write_text("token\n")
        with pytest.raises(UnreachableError):
            shipper.ship_records()
    shipper.close()


def test_a_refused_request_is_told_apart_from_an_absent_master(shipment: Shipment) -> None:
    link = shipment.link
    with pytest.raises(RefusedByMasterError, match=r"HTTP 404: [^{]*no attempt 99"):
        shipment.new_shipper(99).ship_records()
    with pytest.raises(RefusedByMasterError, match="HTTP 422"):
        link.post("/attempts/1/records", b"{}")
    (shipment.master.home / "token").write_text("another\n")
    link.close()
    with pytest.raises(UnreachableError, match="401"):
        link.get("/master")


class Strange(msgspec.Struct, tag="strange", tag_field="type"):
    """A record of a kind that the master does not know."""

    time: float


@pytest.mark.long
def test_records_that_the_master_cannot_take_are_set_aside_and_told_once(
    shipment: Shipment, report: Report, caplog: pytest.LogCaptureFixture
) -> None:
    """The first, two in the middle and the last of many; another rank's go on as well.

    The master refuses some, and fails with one.
    """
    change_database(shipment.master, REFUSE_POISON)
    chief, other = shipment.journals
    strange: Any = Strange(time=1.0)
    chief.append(strange)
    for step in range(700):
        chief.append(report(step if step != 300 else 2**64))
        if step == 500:
            chief.append(POISON)
    chief.append(strange)
    other.append(strange)
    other.append(StatusReported(time=1.0, status="not the chief"))
    shipment.ship_rest()
    shipment.shipper.forget_positions()
    chief.append(report(800))
    shipment.ship_rest()
    trial = shipment.master.read("/trials/1")
    summary = trial["summary"]["training"]["x"]
    assert (summary["count"], summary["last"]) == (700, 400.0)
    named = ["Record 0 of rank 0", "Record 0 of rank 1", "Record 301 of rank 0",
             "Record 502 of rank 0", "Record 702 of rank 0"]  # fmt: skip
    notes = shipment.master.read("/trials/1/logs", stream="master")["items"]
    told = sorted(note["text"] for note in notes)
    assert [text.split(" (generation")[0] for text in told] == named
    assert trial["num_records_lost"] == 5
    kept = shipment.directory.set_aside_path
    assert all(str(kept) in text for text in told)
    assert [("fails with it (HTTP 500" in text, f"{2**64}" in text) for text in told] == [
        (False, False), (False, False), (False, True), (True, False), (False, False),
    ]  # fmt: skip
    lines = [json.loads(line) for line in kept.read_bytes().splitlines()]
    assert sorted((line["rank"], line["sequence"]) for line in lines) == [
        (0, 0), (0, 301), (0, 502), (0, 702), (1, 0),
    ]  # fmt: skip
    assert {line["record"]["type"] for line in lines} == {"strange", "metrics", "checkpoint"}
    assert (shipment.shipper.set_aside or "").endswith("(4 more were set aside.)")
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 5
    marks = shipment.link.post("/attempts/1/records", b'{"batches":[]}')
    assert json.loads(marks)["marks"] == [
        {"generation": 0, "rank": 0, "sequence": 703}, {"generation": 0, "rank": 1, "sequence": 1},
    ]  # fmt: skip


def test_what_was_judged_is_told_with_the_chiefs_newest_record(
    master: Any,
    make_attempt: Callable[..., AttemptDirectory],
    write_journal: Callable[..., JournalWriter],
    wait_until: Callable[..., None],
) -> None:
    """So is a record that the master refuses, and what a runner before this one was told."""
    master.start()
    searcher = {
        "name": "async_halving", "metric": "x", "time_metric": "batches", "max_time": 4,
        "num_rungs": 1, "max_trials": 1, "sampler": "random",
    }  # fmt: skip
    experiment_id = master.create(SLEEP, searcher=searcher)
    wait_until(lambda: master.trial(experiment_id)["attempts"])
    shipment = Shipment(make_attempt(master.home), master, write_journal)
    chief, other = shipment.journals
    told: list[tuple[bool | None, tuple[int, int]]] = []

    def note(control: AttemptControl | None, judged: tuple[int, int]) -> None:
        told.append((control and control.should_preempt, judged))

    def validation(step: int) -> MetricsReported:
        metrics = {"x": 1.0}
        return MetricsReported(time=1.0, group="validation", steps_completed=step, metrics=metrics)

    records = shipment.new_shipper(on_judged=note).records
    records.ship_rest()
    other.append(StatusReported(time=1.0, status="not the chief"))
    chief.append(StatusReported(time=1.0, status="begun"))
    records.ship_rest()
    assert told == []
    for step in (2, 2**64):
        chief.append(validation(step))
        records.ship_rest()
    chief.append(validation(4))
    records.ship_rest()
    assert told == [(False, (0, 1)), (None, (0, 2)), (True, (0, 3))]
    shipment.new_shipper(on_judged=note).records.ship_rest()
    assert told[3:] == [(True, (0, 3))]
    shipment.close()


# A record that the master can decode, and that its database then does not take.
POISON = CheckpointStored(
    time=1.0, uuid="poison", steps_completed=1, metadata={}, resources={}, storage="/nowhere"
)
REFUSE_POISON = """
create trigger refuse_poison before insert on checkpoints when new.uuid = 'poison'
begin select raise(abort, 'poison'); end
"""
REFUSE_RUNNING = """
create trigger refuse_running before update of state on attempts
begin select raise(abort, 'not now'); end
"""


def change_database(master: Any, statement: str) -> None:
    """Change a master's database behind its back."""
    with closing(sqlite3.connect(master.home / "master.sqlite", timeout=60)) as database:
        database.execute(statement)
        database.commit()


@pytest.mark.long
def test_a_master_that_fails_with_everything_has_nothing_set_aside(
    shipment: Shipment, report: Report
) -> None:
    """The first request of an attempt marks it as running, which does not work for a while."""
    change_database(shipment.master, "update attempts set state = 'PENDING'")
    change_database(shipment.master, REFUSE_RUNNING)
    for step in range(3):
        shipment.journals[0].append(report(step))
    shipment.shipper.records._marks = {}
    with pytest.raises(MasterFailedError):
        shipment.shipper.records.ship_rest()
    change_database(shipment.master, "drop trigger refuse_running")
    shipment.shipper.forget_positions()
    shipment.ship_rest()
    shipment.check(3, 0)
    assert shipment.shipper.set_aside is None


def test_an_unknown_attempt_is_no_reason_to_leave_records_out(
    shipment: Shipment, report: Report
) -> None:
    shipper = shipment.new_shipper(99)
    shipper.records._marks = {}
    shipment.journals[0].append(report(0))
    with pytest.raises(RefusedByMasterError, match="no attempt 99"):
        shipper.ship_records()
    assert shipper.set_aside is None


@pytest.mark.long
def test_a_journal_that_cannot_be_read_leaves_the_others_and_the_output_alone(
    shipment: Shipment, report: Report
) -> None:
    path = shipment.directory.run.path / "journal" / "a1.g0.r2"
    path.mkdir(parents=True)
    header = frame_line(-1, b'{"journal_version": 999}')
    (path / segment_name(0)).write_bytes(header)
    shipment.journals[0].append(report(0))
    shipment.say("line 0")
    shipment.ship_rest()
    shipment.check(1, 1)
    assert "has 999" in (shipment.shipper.unreadable or "")


@pytest.mark.long
def test_shipping_outlives_trouble_with_the_files(
    shipment: Shipment, report: Report, wait_until: Callable[..., None]
) -> None:
    """A directory where a journal's file should be cannot be read."""
    path = shipment.directory.run.path / "journal" / "a1.g0.r2" / segment_name(0)
    path.mkdir(parents=True)
    shipment.shipper.start()
    shipment.journals[0].append(report(0))
    time.sleep(0.5)
    path.rmdir()
    shipment.say("line 0")
    wait_until(lambda: shipment.master.output(shipment.master.read("/trials/1")))
    wait_until(lambda: shipment.master.read("/trials/1")["summary"])
    shipment.shipper.stop()
    shipment.check(1, 1)


def test_the_end_is_stored_once_and_the_trial_follows(shipment: Shipment, report: Report) -> None:
    shipment.journals[0].append(report(0))
    shipment.ship_rest()
    end = AttemptEnd(reason=ExitReason.EXITED, code=0, signal=None, time=1.0)
    for _ in range(2):
        shipment.shipper.ship_end(end)
    trial = shipment.master.read("/trials/1")
    assert (trial["state"], len(trial["attempts"])) == ("COMPLETED", 1)


def test_pauses_grow_to_the_longest_and_begin_anew_after_a_success() -> None:
    backoff = MasterBackoff(first_s=0.1, longest_s=0.5)
    pauses = [backoff.next_s() for _ in range(6)]
    assert pauses[0] == 0.1
    assert pauses == sorted(pauses)
    assert pauses[-1] == 0.5
    backoff.reset()
    assert backoff.next_s() == 0.1


@pytest.mark.long
def test_media_are_shipped_before_their_records_and_lost_files_are_counted(
    shipment: Shipment, report: Report
) -> None:
    run, journal = shipment.directory.run, shipment.journals[0]
    media = MediaReports(run=run, journal=journal, rank=0)
    journal.append(report(0))
    media.report_html(0, "large", "x" * 200_000)
    media.report_html(0, "gone", "y")
    media.report_text(0, "said", "hello")
    journal.append(report(1))
    [gone] = (run.files_path / "media" / "gone").iterdir()
    gone.unlink()
    shipment.master.kill()
    with pytest.raises(UnreachableError):
        shipment.shipper.records.ship_once()
    shipment.master.start()
    # The content is there already, as after a runner that died before it sent the record.
    data = b"x" * 200_000
    path = f"/attempts/1/files/before?digest={hashlib.sha256(data).hexdigest()}"
    shipment.link.put(path, data, {})
    shipment.ship_rest()
    shipment.check(2, 0)
    names = [one["name"] for one in shipment.master.read("/trials/1/media-names")]
    assert names == ["large", "said"]
    files = shipment.master.read("/trials/1/files")["items"]
    assert [(one["path"].split("/")[0], one["size"]) for one in files] == [
        ("before", 200_000), ("media", 200_000),
    ]  # fmt: skip
    assert shipment.master.read("/trials/1")["num_records_lost"] == 1
    lines = shipment.master.read("/trials/1/logs", search="is lost")["items"]
    assert "html 'gone' at step 0: its file 'media/gone/0-0-" in lines[0]["text"]
    # An attempt writes no file of another one.
    with pytest.raises(RefusedByMasterError, match="There is no attempt 77"):
        shipment.link.put(path.replace("attempts/1", "attempts/77"), data, {})
