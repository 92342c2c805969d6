"""Runs made without a master: how one master takes them up and shows them."""

import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from paceline._base.journal_reading_and_writing import JournalWriter, frame_line
from paceline._base.run_directory import JournalKey, RunInfo, TrialInfo
from paceline._base.run_tail_and_files import RunTail
from paceline._cluster.master.experiments import directory_watchers
from paceline._cluster.master.experiments.directory_watchers import RunsWatcher
from paceline._cluster.master.experiments.record_ingest import RecordIngest
from paceline._cluster.master.experiments.state_decisions import end_of_run
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.experiments.unmanaged_runs import Unmanaged, config_of_run
from paceline._cluster.master.searches.stored_searches import Searches
from paceline._cluster.master.store import tables, user_tables
from paceline._cluster.master.store.database import Database
from paceline._cluster.master.store.metric_rows import read_rows
from paceline._cluster.master.store.trial_logs import LogStore
from paceline._cluster.messages.runner_messages import RunBatch, RunMark
from paceline.client import ApiError, Client
from paceline.client._code_and_run_uploads import RunSync
from paceline.journal import (
    AnyRecord,
    AttemptFinished,
    AttemptStarted,
    CheckpointStored,
    MetricsReported,
    ProgressReported,
    RunDirectory,
)
from paceline.storage import DirectoryStorage
from paceline.storage._storage_from_url import storage_from


class HandRun:
    """A run directory that is written by hand, record by record."""

    def __init__(self, path: Path, **changed: Any) -> None:
        values = {
            "run_id": path.name, "name": "hand", "created": 100.0,
            "checkpoint_storage": str(path / "checkpoints"), "arguments": ["train.py", "--lr=1"],
        }  # fmt: skip
        self.directory = RunDirectory.create(path, RunInfo(**(values | changed)))
        self.path = path
        self._time = 100.0
        self._key = JournalKey(-1, 0, 0)
        self._journals: dict[JournalKey, JournalWriter] = {}
        self._lock = ExitStack()

    @property
    def sync_url(self) -> str:
        return f"/runs/{self.directory.read_info().run_id}"

    def begin(self, steps: int = 0, *, attempt: int | None = None, generation: int = 0) -> None:
        """Begin an attempt: the next one, unless told which."""
        number = self._key.attempt + 1 if attempt is None else attempt
        self._key = JournalKey(number, generation, 0)
        self.write(self._started(steps, 0))

    def begin_rank(self, rank: int) -> None:
        self.write(self._started(0, rank), rank=rank)

    @property
    def writer(self) -> JournalWriter:
        """The chief's journal of the present attempt."""
        return self._journals[self._key]

    def write(self, record: AnyRecord, rank: int = 0) -> None:
        key = JournalKey(self._key.attempt, self._key.generation, rank)
        if key not in self._journals:
            self._journals[key] = JournalWriter(self.directory.journal_path(key))
        self._journals[key].append(record)

    def report(self, step: int, loss: Any, group: str = "validation") -> None:
        metrics = {"loss": loss}
        self.write(
            MetricsReported(time=self._tick(), group=group, steps_completed=step, metrics=metrics)
        )

    def store_checkpoint(self, uuid: str, step: int) -> None:
        """Store a real checkpoint of one file."""
        storage = DirectoryStorage(self.directory.read_info().checkpoint_storage)
        with storage.store_path(uuid) as path:
            (path / "state.txt").write_text(f"{step}")
        manifest = storage.commit(uuid, {"steps_completed": step})
        self.write(
            CheckpointStored(
                time=self._tick(), uuid=uuid, steps_completed=step, storage=storage.url,
                metadata={"steps_completed": step}, resources=manifest.resources,
            )
        )  # fmt: skip

    def finish(self, outcome: str = "completed", error: str | None = None) -> None:
        self.write(AttemptFinished(time=self._tick(), outcome=outcome, error=error))

    def live(self) -> None:
        """Be alive, as the process that holds the lock."""
        self._lock.enter_context(self.directory.hold_attempt_lock())

    def die(self) -> None:
        self._lock.close()

    def close(self) -> None:
        self.die()
        for journal in self._journals.values():
            journal.close()

    def _started(self, steps: int, rank: int) -> AttemptStarted:
        return AttemptStarted(
            time=self._tick(), attempt=self._key.attempt, generation=self._key.generation,
            rank=rank, world_size=1, pid=7, host="node7", resumed_from="c" if steps else None,
            steps_completed=steps,
        )  # fmt: skip

    def _tick(self) -> float:
        self._time += 1
        return self._time


@pytest.fixture
def runs_path(tmp_path: Path) -> Path:
    """Return an empty directory for runs."""
    path = tmp_path / "runs"
    path.mkdir()
    return path


@pytest.fixture
def make_run(runs_path: Path) -> Iterator[Callable[..., HandRun]]:
    """Return a function that makes a run directory by hand."""
    made: list[HandRun] = []

    def make(name: str = "one", **changed: Any) -> HandRun:
        made.append(HandRun(runs_path / name, **changed))
        return made[-1]

    yield make
    for run in made:
        run.close()


@pytest.fixture
def run(make_run: Callable[..., HandRun]) -> HandRun:
    """Return a run that has not begun."""
    return make_run()


@pytest.fixture
def client(master: Any) -> Iterator[Client]:
    """Return a client of the served master."""
    with Client(f"http://127.0.0.1:{master.port}", master.home.token) as client:
        yield client


@pytest.fixture
def send(client: Client) -> Callable[[HandRun], Any]:
    """Return a function that sends a run as a new process would."""
    return lambda run: RunSync(client, run.path).send()


@pytest.fixture
def watcher(master: Any, runs_path: Path) -> RunsWatcher:
    """Return a watcher of the runs that looks when it is told to."""
    return RunsWatcher(runs_path, master.core.database, master.core.unmanaged, master.core.files)


def dump(master: Any) -> dict[str, list[Any]]:
    """Return all rows of all tables, without the log of requests."""
    with master.core.database.read() as connection:
        return {
            name: [tuple(row) for row in connection.execute(select(table))]
            for name, table in user_tables.metadata.tables.items()
            if name != "audit"
        }


def losses(master: Any, trial_id: int = 1) -> list[tuple[int, int, Any]]:
    """Return the visible validation rows: step, attempt and loss."""
    with master.core.database.read() as connection:
        rows = read_rows(connection, trial_id, "validation")
    return [(row.step, row.attempt, row.metrics["loss"]) for row in rows]


def shown(master: Any, experiment_id: int = 1) -> tuple[str, str]:
    """Return the states of an experiment and its trial."""
    experiment = master.http.get(f"/experiments/{experiment_id}").json()
    trial = master.http.get(f"/experiments/{experiment_id}/trials").json()["items"][0]
    return experiment["state"], trial["state"]


def states_of_runs(master: Any) -> dict[str, str]:
    """Return the states of all runs by the names of their directories."""
    items = master.http.get("/experiments").json()["items"]
    return {Path(item["run_dir"]).name: item["state"] for item in items}


# ---- pure --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "experiment", "trial", "error"),
    [
        ({"is_alive": True}, "ACTIVE", "ACTIVE", None),
        ({"is_alive": True, "has_begun": False}, "ACTIVE", "ACTIVE", None),
        ({"outcome": "completed"}, "COMPLETED", "COMPLETED", None),
        ({"outcome": "completed", "is_alive": True}, "COMPLETED", "COMPLETED", None),
        ({"outcome": "invalid_hp"}, "ERROR", "COMPLETED", "its hyperparameters: InvalidHP."),
        (
            {"outcome": "invalid_hp", "error": "InvalidHP: odd"},
            *("ERROR", "COMPLETED", "its hyperparameters: InvalidHP: odd."),
        ),
        ({"outcome": "preempted"}, "PAUSED", "ACTIVE", None),
        ({"outcome": "error", "error": "ValueError: no"}, "ERROR", "ERROR", "ValueError: no"),
        ({}, "ERROR", "ERROR", "without a word"),
        ({"has_begun": False}, "ERROR", "ERROR", "before it recorded anything"),
    ],
)
def test_a_runs_states_follow_from_its_newest_attempt(
    facts: dict[str, Any], experiment: str, trial: str, error: str | None
) -> None:
    given = {"is_alive": False, "has_begun": True, "outcome": None, "error": None} | facts
    result = end_of_run(**given)
    assert (result.experiment.value, result.trial.value) == (experiment, trial)
    assert error in result.error if error else result.error is None
    assert result.reason == ("invalid_hp" if given["outcome"] == "invalid_hp" else None)


def test_a_run_without_a_config_gets_one_that_holds_its_arguments() -> None:
    info = RunInfo(
        run_id="r", name="mine", created=1.0, checkpoint_storage="/c",
        arguments=["train.py", "--text=${hparams.lr}"],
    )  # fmt: skip
    config = config_of_run(info).to_json()
    assert config["name"] == "mine"
    assert config["entrypoint"] == ["python3", "train.py", "--text=$${hparams.lr}"]
    searcher = config["searcher"]
    assert (searcher["name"], searcher["metric"]) == ("single", "loss")
    assert searcher["smaller_is_better"]


def test_the_hyperparameters_and_the_seed_that_a_run_recorded_are_shown(
    master: Any, runs_path: Path, send: Callable[..., Any]
) -> None:
    run = HandRun(runs_path / "with-hparams", seed=7, hparams={"lr": 0.5})
    run.begin()
    run.finish()
    result = send(run)
    run.close()
    trial = master.http.get(f"/trials/{result.trial_id}").json()
    assert (trial["hparams"], trial["seed"]) == ({"lr": 0.5}, 7)


def test_a_run_with_a_config_keeps_it_but_for_the_search() -> None:
    given = {
        "entrypoint": "python3 x.py", "data": {"a": 1}, "hyperparameters": {"lr": 0.5},
        "searcher": {"name": "random", "max_trials": 4, "metric": "acc",
                     "smaller_is_better": False},
    }  # fmt: skip
    trial = TrialInfo(trial_id=0, experiment_id=0, trial_seed=3, hparams={"lr": 0.5}, config=given)
    info = RunInfo(run_id="r", name="mine", created=1.0, checkpoint_storage="/c", trial=trial)
    config = config_of_run(info).to_json()
    assert (config["entrypoint"], config["data"]) == ("python3 x.py", {"a": 1})
    searcher = config["searcher"]
    assert (searcher["name"], searcher["metric"]) == ("single", "acc")
    assert not searcher["smaller_is_better"]


# ---- one run -----------------------------------------------------------------------------------


def test_a_finished_run_is_a_completed_experiment_with_one_trial(
    master: Any, run: HandRun, send: Callable[..., Any]
) -> None:
    run.begin()
    run.report(1, 0.5)
    run.report(2, 0.25)
    run.store_checkpoint("11111111-1111-4111-8111-111111111111", 2)
    run.write(ProgressReported(time=105.0, progress=0.5))
    run.finish()
    result = send(run)
    assert (result.num_records, result.is_alive) == (6, False)
    experiment = master.http.get(f"/experiments/{result.experiment_id}").json()
    assert experiment["is_unmanaged"]
    assert experiment["run_dir"] == str(run.path)
    assert (experiment["name"], experiment["state"], experiment["progress"]) == (
        "hand", "COMPLETED", 1.0,
    )  # fmt: skip
    assert (experiment["created_at"], experiment["ended_at"]) == (100.0, 105.0)
    assert (experiment["best_metric"], experiment["num_trials"]) == (0.25, 1)
    trial = master.http.get(f"/trials/{result.trial_id}").json()
    assert (trial["state"], trial["steps_completed"], trial["best_step"]) == ("COMPLETED", 2, 2)
    assert trial["latest_checkpoint"] == "11111111-1111-4111-8111-111111111111"
    [attempt] = trial["attempts"]
    assert (attempt["number"], attempt["state"], attempt["slots"]) == (1, "ENDED", [])
    assert (attempt["started_at"], attempt["ended_at"]) == (101.0, 105.0)
    assert attempt["exit"]["outcome"] == "completed"
    logs = master.http.get(f"/trials/{result.trial_id}/logs").json()["items"]
    assert "process 7 on node7" in logs[0]["text"]


def test_sending_twice_changes_nothing(master: Any, run: HandRun, send: Callable[..., Any]) -> None:
    run.begin()
    run.report(1, {"$float": "nan"})
    run.report(2, 1.0)
    run.begin(1)
    run.report(2, 2.0)
    run.finish("error", "ValueError: no")
    send(run)
    before = dump(master)
    assert send(run).num_records == 0
    assert dump(master) == before


@pytest.mark.parametrize(
    ("outcome", "states"),
    [
        ("completed", ("COMPLETED", "COMPLETED")),
        ("preempted", ("PAUSED", "ACTIVE")),
        ("invalid_hp", ("ERROR", "COMPLETED")),
        ("error", ("ERROR", "ERROR")),
        (None, ("ERROR", "ERROR")),
    ],
)
def test_a_run_that_ended_is_shown_so_and_active_again_once_it_is_resumed(
    master: Any,
    run: HandRun,
    send: Callable[..., Any],
    outcome: str | None,
    states: tuple[str, str],
) -> None:
    run.begin()
    run.report(1, 1.0)
    if outcome:
        run.finish(outcome, "ValueError: no" if outcome == "error" else None)
    send(run)
    assert shown(master) == states
    before = dump(master)
    assert send(run).num_records == 0
    assert dump(master) == before
    run.live()
    run.begin(1)
    assert send(run).is_alive
    assert shown(master) == ("ACTIVE", "ACTIVE")
    trial = master.http.get("/trials/1").json()
    assert (trial["error"], trial["ended_at"], trial["stop_reason"]) == (None, None, None)
    assert master.http.get("/experiments/1").json()["error"] is None
    assert [attempt["state"] for attempt in trial["attempts"]] == ["ENDED", "RUNNING"]
    run.finish()
    run.die()
    send(run)
    assert shown(master) == ("COMPLETED", "COMPLETED")


def test_rows_beyond_the_step_that_a_run_was_resumed_from_are_superseded(
    master: Any, run: HandRun, send: Callable[..., Any]
) -> None:
    run.begin()
    for step, loss in ((1, 3.0), (2, 2.0), (3, 0.1)):
        run.report(step, loss)
    send(run)
    assert master.http.get("/trials/1").json()["best_metric"] == 0.1
    run.begin(2)
    run.report(3, 1.0)
    run.finish()
    send(run)
    assert losses(master) == [(1, 1, 3.0), (2, 1, 2.0), (3, 2, 1.0)]
    trial = master.http.get("/trials/1").json()
    assert (trial["best_metric"], trial["best_step"]) == (1.0, 3)
    assert [attempt["resumed_steps"] for attempt in trial["attempts"]] == [0, 2]
    assert master.http.get("/experiments/1").json()["best_metric"] == 1.0


def test_a_generation_supersedes_as_an_attempt_does(
    master: Any, run: HandRun, send: Callable[..., Any]
) -> None:
    run.begin()
    run.report(1, 3.0)
    run.report(2, 2.0)
    run.begin(1, attempt=0, generation=1)
    run.report(2, 1.0)
    run.finish()
    send(run)
    assert losses(master) == [(1, 1, 3.0), (2, 2, 1.0)]
    reply = master.http.post(f"{run.sync_url}/records", json={"batches": [], "is_alive": False})
    marks = msgspec.convert(reply.json()["marks"], list[RunMark])
    assert marks == [RunMark(0, 0, 0, 2), RunMark(0, 1, 0, 2)]


def test_a_run_that_only_looked_dead_goes_on(
    master: Any, run: HandRun, send: Callable[..., Any]
) -> None:
    run.begin()
    run.report(1, 2.0)
    send(run)
    assert shown(master) == ("ERROR", "ERROR")
    run.report(2, 1.0)
    run.finish()
    send(run)
    assert shown(master) == ("COMPLETED", "COMPLETED")
    assert losses(master) == [(1, 1, 2.0), (2, 1, 1.0)]
    [attempt] = master.http.get("/trials/1").json()["attempts"]
    assert (attempt["exit"]["outcome"], attempt["exit"]["error"]) == ("completed", None)


def test_what_another_rank_writes_late_does_not_undo_the_end(
    master: Any, run: HandRun, send: Callable[..., Any]
) -> None:
    run.begin()
    run.begin_rank(1)
    run.finish()
    send(run)
    run.write(AttemptFinished(time=110.0, outcome="error", error="late"), rank=1)
    send(run)
    assert shown(master) == ("COMPLETED", "COMPLETED")
    [attempt] = master.http.get("/trials/1").json()["attempts"]
    assert (attempt["state"], attempt["exit"]["outcome"]) == ("ENDED", "completed")


def test_an_end_is_told_once_though_another_rank_writes_late(
    master: Any, run: HandRun, send: Callable[..., Any]
) -> None:
    run.begin()
    run.begin_rank(1)
    run.finish("error", "ValueError: odd data")
    send(run)
    run.write(AttemptFinished(time=110.0, outcome="error", error="peer"), rank=1)
    send(run)
    assert shown(master) == ("ERROR", "ERROR")
    assert [event[4] for event in dump(master)["events"]].count("attempt_ended") == 1
    [attempt] = master.http.get("/trials/1").json()["attempts"]
    assert (attempt["state"], attempt["exit"]["error"]) == ("ENDED", "ValueError: odd data")


def test_a_late_row_of_a_superseded_step_is_not_the_best(
    master: Any, run: HandRun, send: Callable[..., Any]
) -> None:
    run.begin()
    run.report(1, 3.0)
    late = run.writer
    run.begin(1)
    run.report(2, 2.0)
    send(run)
    late.append(
        MetricsReported(time=200.0, group="validation", steps_completed=2, metrics={"loss": 1.0})
    )
    run.finish()
    send(run)
    assert losses(master) == [(1, 1, 3.0), (2, 2, 2.0)]
    assert master.http.get("/trials/1").json()["best_metric"] == 2.0
    assert master.http.get("/experiments/1").json()["best_metric"] == 2.0
    assert shown(master) == ("COMPLETED", "COMPLETED")


def test_an_attempt_without_its_first_line_supersedes_nothing(
    master: Any, run: HandRun, send: Callable[..., Any]
) -> None:
    run.begin()
    run.report(1, 2.0)
    run.begin(0)
    run.report(2, 1.0)
    run.finish()
    [journal] = run.directory.journal_path(JournalKey(1, 0, 0)).iterdir()
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + b"torn" + lines[1][10:] + b"".join(lines[2:]))
    send(run)
    assert losses(master) == [(1, 1, 2.0), (2, 2, 1.0)]


def test_checkpoints_are_downloaded_through_the_master_and_deleted_on_request_only(
    master: Any, run: HandRun, send: Callable[..., Any], client: Client, tmp_path: Path
) -> None:
    uuids = [f"{number}1111111-1111-4111-8111-111111111111" for number in (1, 2, 3)]
    run.begin()
    for step, uuid in enumerate(uuids, 1):
        run.store_checkpoint(uuid, step)
    run.finish()
    send(run)
    master.core.retention.make_pass()
    listed = master.http.get("/experiments/1/checkpoints").json()["items"]
    assert [c["uuid"] for c in listed if c["state"] == "COMPLETED"] == uuids[::-1]
    assert {c["storage"] for c in listed} == {str(run.path / "checkpoints")}
    client.get_checkpoint(uuids[0]).download(tmp_path / "copy", mode="master")
    assert (tmp_path / "copy" / "state.txt").read_text() == "1"
    assert master.http.delete(f"/checkpoints/{uuids[0]}").json()["state"] == "DELETED"
    assert not (run.path / "checkpoints" / uuids[0]).exists()
    assert (run.path / "checkpoints" / uuids[1]).exists()


def test_checkpoints_are_found_after_the_run_directory_was_moved(
    master: Any, run: HandRun, client: Client, send: Callable[..., Any], tmp_path: Path
) -> None:
    uuid = "11111111-1111-4111-8111-111111111111"
    run.begin()
    run.store_checkpoint(uuid, 1)
    run.finish()
    send(run)
    moved = run.path.rename(tmp_path / "elsewhere")
    RunSync(client, moved).send()
    assert master.http.get(f"/checkpoints/{uuid}/files/state.txt").text == "1"
    assert master.http.get("/experiments/1").json()["run_dir"] == str(moved)


_UUID = "11111111-1111-4111-8111-111111111111"


@pytest.fixture
def private(tmp_path: Path) -> Iterator[HandRun]:
    """Return a run of the master's user with a checkpoint, which nobody has sent."""
    run = HandRun(tmp_path / "private")
    run.begin()
    run.store_checkpoint(_UUID, 1)
    yield run
    run.close()


def claim(run: HandRun, storage: Path | str) -> None:
    """Have a run say that a checkpoint of somewhere else is its own."""
    run.begin()
    run.write(
        CheckpointStored(
            time=1.0, uuid=_UUID, steps_completed=1, storage=str(storage), metadata={},
            resources={"state.txt": 1},
        )
    )  # fmt: skip
    run.finish()


def check_out_of_reach(master: Any, private: HandRun) -> None:
    """Check that a checkpoint is listed, and its files are neither read nor deleted."""
    assert master.http.get("/experiments/1/checkpoints").json()["items"][0]["uuid"] == _UUID
    assert master.http.get(f"/checkpoints/{_UUID}/files/state.txt").status_code == 409
    assert master.http.delete(f"/checkpoints/{_UUID}").status_code == 409
    assert (private.path / "checkpoints" / _UUID / "state.txt").read_text() == "1"


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: a run of another user needs root")
@pytest.mark.parametrize("what", ["named", "link", "gone", "linked run"])
def test_a_run_of_another_user_names_no_checkpoint_of_the_masters_user(
    master: Any, watcher: RunsWatcher, run: HandRun, private: HandRun, what: str
) -> None:
    storage = private.path / "checkpoints"
    if what == "link":
        (run.path / "checkpoints").symlink_to(storage)
        storage = run.path / "checkpoints"
    claim(run, storage)
    for path in (run.path, *run.path.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    watcher.scan()
    if what in ("gone", "linked run"):
        run.path.rename(run.path.with_name("elsewhere"))
    if what == "linked run":
        run.path.symlink_to(private.path)
        os.chown(run.path, 65534, 65534, follow_symlinks=False)
    check_out_of_reach(master, private)


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: a run of another user needs root")
def test_a_checkpoint_of_another_user_is_read_and_deleted_through_the_master(
    master: Any, watcher: RunsWatcher, run: HandRun
) -> None:
    run.begin()
    run.store_checkpoint(_UUID, 1)
    run.finish()
    for path in (run.path, *run.path.rglob("*")):
        os.chown(path, 65534, 65534)
    watcher.scan()
    assert master.http.get(f"/checkpoints/{_UUID}/files/state.txt").text == "1"
    assert master.http.delete(f"/checkpoints/{_UUID}").json()["state"] == "DELETED"
    assert not (run.path / "checkpoints" / _UUID).exists()


def test_a_token_that_only_reports_names_no_checkpoint_that_the_master_opens(
    master: Any, run: HandRun, private: HandRun
) -> None:
    secret = master.http.post("/tokens", json={"name": "far", "scope": "report"}).json()["secret"]
    claim(run, private.path / "checkpoints")
    with Client(f"http://127.0.0.1:{master.port}", secret) as reporter:
        RunSync(reporter, run.path).send()
        RunSync(reporter, run.path).send()
    assert master.http.get("/experiments/1").json()["run_dir"] == str(run.path)
    check_out_of_reach(master, private)
    assert "scope `report`" in master.http.delete(f"/checkpoints/{_UUID}").json()["detail"]


@pytest.mark.parametrize("sender", ["report token", "other user", "other user, gone"])
def test_a_stranger_names_no_object_store_that_the_master_opens(
    master: Any, watcher: RunsWatcher, run: HandRun, s3: str, sender: str
) -> None:
    storage = storage_from(s3)
    with storage.store_path(_UUID) as path:
        (path / "state.txt").write_text("of others")
    storage.commit(_UUID, {"steps_completed": 1})
    claim(run, s3)
    if sender == "report token":
        body = {"name": "far", "scope": "report"}
        secret = master.http.post("/tokens", json=body).json()["secret"]
        with Client(f"http://127.0.0.1:{master.port}", secret) as reporter:
            RunSync(reporter, run.path).send()
    elif os.geteuid() != 0:
        pytest.skip("NOT TESTED: a run of another user needs root")
    else:
        for path in (run.path, *run.path.rglob("*")):
            os.chown(path, 65534, 65534)
        watcher.scan()
    if "gone" in sender:
        run.path.rename(run.path.with_name("elsewhere"))
    for reply in (
        master.http.get(f"/checkpoints/{_UUID}/files/state.txt"),
        master.http.delete(f"/checkpoints/{_UUID}"),
    ):
        assert (reply.status_code, reply.json()["code"]) == (409, "other_storage"), reply.text
    assert storage.manifest(_UUID).resources == {"state.txt": 9}


@pytest.mark.parametrize("is_far", [False, True])
def test_an_object_store_of_a_trusted_sender_is_read(
    master: Any, run: HandRun, s3: str, send: Callable[..., Any], is_far: bool
) -> None:
    storage = storage_from(s3)
    with storage.store_path(_UUID) as path:
        (path / "state.txt").write_text("mine")
    storage.commit(_UUID, {"steps_completed": 1})
    claim(run, s3)
    send(run)
    if is_far:
        # As of another machine: the master sees nothing of where it lies.
        shutil.rmtree(run.path.parent)
    assert master.http.get(f"/checkpoints/{_UUID}/files/state.txt").text == "mine"


def test_a_token_that_only_reports_adds_nothing_to_the_run_of_another(
    master: Any, run: HandRun, send: Callable[..., Any]
) -> None:
    secret = master.http.post("/tokens", json={"name": "far", "scope": "report"}).json()["secret"]
    run.begin()
    send(run)
    before = dump(master)
    forged = b'{"batches":[],"is_alive":false}'
    with Client(f"http://127.0.0.1:{master.port}", secret) as reporter:
        with pytest.raises(ApiError, match="experiment 1 was registered by another"):
            RunSync(reporter, run.path).send()
        with pytest.raises(ApiError, match="experiment 1 was registered by another"):
            reporter._session.send("POST", f"{run.sync_url}/records", content=forged)
    assert dump(master) == before


def test_a_run_that_reports_goes_to_the_master_that_begins_to_watch_it(
    master: Any, watcher: RunsWatcher, run: HandRun
) -> None:
    secret = master.http.post("/tokens", json={"name": "far", "scope": "report"}).json()["secret"]
    run.live()
    run.begin()
    run.report(1, 1.0)
    with Client(f"http://127.0.0.1:{master.port}", secret) as reporter:
        sync = RunSync(reporter, run.path)
        sync.send()
        run.report(2, 1.0)
        watcher.scan()
        with pytest.raises(ApiError, match="it reads the records there"):
            sync.send()
    run.report(3, 1.0)
    watcher.scan()
    assert master.http.get("/trials/1").json()["steps_completed"] == 3


@pytest.mark.parametrize("is_alive", [True, False])
def test_commands_are_refused(
    master: Any, run: HandRun, send: Callable[..., Any], is_alive: bool
) -> None:
    run.begin()
    if is_alive:
        run.live()
    else:
        run.finish()
    send(run)
    before = dump(master)
    verbs = ("pause", "activate", "cancel", "kill", "continue")
    paths = [*(f"/experiments/1/{verb}" for verb in verbs), "/trials/1/kill", "/trials/1/continue"]
    for path in paths:
        reply = master.http.post(path, json={})
        assert (reply.status_code, reply.json()["code"]) == (409, "unmanaged"), path
        assert f"PACELINE_RESUME={run.path}" in reply.json()["detail"]
    assert dump(master) == before


def test_the_reconciler_leaves_live_and_waiting_runs_alone(
    master: Any, make_run: Callable[..., HandRun], send: Callable[..., Any]
) -> None:
    live, preempted, silent = make_run("live"), make_run("preempted"), make_run("silent")
    for run in (live, silent):
        run.live()
    for run in (live, preempted):
        run.begin()
    preempted.finish("preempted")
    for run in (live, preempted, silent):
        send(run)
    assert [shown(master, number)[0] for number in (1, 2, 3)] == ["ACTIVE", "PAUSED", "ACTIVE"]
    before = dump(master)
    master.schedule()
    master.core.reconciler._watch_attempts()
    master.core.reconciler.drain(0.1)
    master.schedule()
    assert dump(master) == before
    assert list(master.home.attempts_path.iterdir()) == []


def test_runs_take_no_slots_from_experiments(
    master: Any, run: HandRun, send: Callable[..., Any]
) -> None:
    run.live()
    run.begin()
    send(run)
    master.create()
    master.schedule()
    slots = master.http.get("/slots").json()
    assert [slot["experiment_id"] for slot in slots] == [2, 2]


# ---- requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "status", "code"),
    [
        ({"cluster_id": "c1"}, 409, "managed_run"),
        ({"version": 9}, 409, "wrong_version"),
        ({"name": ""}, 422, "invalid_config"),
        ({"run_id": "another"}, 422, "invalid_request"),
        ({"created": "yesterday"}, 422, "invalid_request"),
    ],
)
def test_a_run_that_cannot_be_shown_is_refused(
    master: Any, changed: dict[str, Any], status: int, code: str
) -> None:
    info = {"run_id": "r1", "name": "n", "created": 1.0, "checkpoint_storage": "/c"} | {
        "version": 1
    }
    reply = master.http.put("/runs/r1", json={"info": info | changed, "path": "/p"})
    assert (reply.status_code, reply.json()["code"]) == (status, code)
    assert master.http.get("/experiments").json()["items"] == []


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"batches": [], "is_alive": False}, 404, "not_found"),
        ({"batches": []}, 422, "invalid_request"),
        ({"batches": [[0, 0, 0, [[0, {"type": "?"}]]]], "is_alive": True}, 422, "invalid_request"),
    ],
)
def test_records_of_an_unknown_run_or_form_are_refused(
    master: Any, body: dict[str, Any], status: int, code: str
) -> None:
    reply = master.http.post("/runs/r1/records", json=body)
    assert (reply.status_code, reply.json()["code"]) == (status, code)


def test_an_attempt_of_a_master_is_not_sent(
    make_run: Callable[..., HandRun], send: Callable[..., Any]
) -> None:
    run = make_run(cluster_id="c1")
    run.begin()
    with pytest.raises(ApiError, match="is an attempt that a master started"):
        send(run)


# ---- any way to send ---------------------------------------------------------------------------


@pytest.fixture
def recorded(run: HandRun) -> tuple[RunInfo, list[RunBatch]]:
    """Return a resumed run and its records, one a batch."""
    run.begin()
    for step in (1, 2, 3):
        run.report(step, 1.0 / step)
    run.store_checkpoint("11111111-1111-4111-8111-111111111111", 2)
    run.begin(2)
    run.report(3, 0.75)
    run.report(4, 0.5)
    run.finish()
    batches = [
        RunBatch(key.attempt, key.generation, key.rank, [(entry.sequence, entry.decode())])
        for key, entries in RunTail(run.directory, {}).read()
        for entry in entries
    ]
    return run.directory.read_info(), batches


def view_of(root: Path, info: RunInfo, requests: list[list[RunBatch]]) -> list[Any]:
    """Return what a new master shows after these requests."""
    root.mkdir()
    database = Database(root / "master.sqlite")
    changes = StateChanges(Searches(), LogStore(root / "logs"))
    unmanaged = Unmanaged(changes, RecordIngest(changes))
    try:
        database.write(lambda t: unmanaged.register(t, info, "/p")).result()
        for number, request in enumerate(requests, 1):
            is_alive = number < len(requests)
            database.write(
                lambda t, request=request, is_alive=is_alive: unmanaged.take(  # type: ignore[misc]
                    t, info.run_id, request, is_alive=is_alive
                )
            ).result()
        with database.read() as connection:
            trial = connection.execute(select(tables.trials)).one()
            attempts = connection.execute(select(tables.attempts)).all()
            return [
                [(r.step, r.attempt, r.metrics) for r in read_rows(connection, 1, "validation")],
                [trial.state, trial.best_metric, trial.best_step, trial.steps_completed],
                [(a.number, a.state, a.resumed_steps, a.outcome, a.ended_at) for a in attempts],
                [tuple(row) for row in connection.execute(select(tables.checkpoints.c.uuid))],
                [tuple(row) for row in connection.execute(select(tables.journal_marks))],
                connection.execute(
                    select(tables.events.c.data).where(tables.events.c.kind == "attempt_ended")
                )
                .scalars()
                .all(),
            ]
    finally:
        database.close()
        shutil.rmtree(root)


@pytest.mark.long
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 9), max_size=5), again=st.lists(st.booleans(), min_size=6))
def test_records_give_the_same_view_however_they_are_cut_and_repeated(
    recorded: tuple[RunInfo, list[RunBatch]], tmp_path: Path, cuts: list[int], again: list[bool]
) -> None:
    info, batches = recorded
    edges = [0, *sorted(cuts), len(batches)]
    parts = [batches[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    requests = [
        (parts[index - 1] if index and again[index] else []) + part
        for index, part in enumerate(parts)
    ]
    whole = view_of(tmp_path / "whole", info, [batches])
    assert view_of(tmp_path / "parts", info, requests) == whole
    assert whole[0] == [(1, 1, {"loss": 1.0}), (2, 1, {"loss": 0.5}), (3, 2, {"loss": 0.75}),
                        (4, 2, {"loss": 0.5})]  # fmt: skip


def test_records_that_a_master_lost_are_sent_again(
    make_master: Any, run: HandRun, runs_path: Path
) -> None:
    """A master on a database of before, and one that has none, answer at the address."""
    run.live()
    masters = [make_master(name=name) for name in ("whole", "older", "empty")]
    clients = [Client(f"http://127.0.0.1:{one.port}", one.home.token) for one in masters]
    run.begin()
    run.report(1, 2.0)
    RunSync(clients[1], run.path).send()
    sync = RunSync(clients[0], run.path)
    for step, client in ((2, clients[0]), (3, clients[1])):
        run.report(step, 1.0 / step)
        sync._session = client._session
        sync.send()
    assert [step for step, _, _ in losses(masters[1])] == [1, 2, 3]
    run.report(4, 0.1)
    sync._session = clients[2]._session
    with pytest.raises(ApiError, match="There is no run"):
        sync.send()
    sync.send()
    assert [step for step, _, _ in losses(masters[2])] == [1, 2, 3, 4]
    assert shown(masters[2]) == ("ACTIVE", "ACTIVE")
    for client in clients:
        client.close()


def test_a_run_that_is_reported_live_is_lost_once_nothing_is_heard_of_it(
    master: Any, client: Client, run: HandRun
) -> None:
    run.live()
    run.begin()
    run.report(1, 2.0)
    RunSync(client, run.path, lease_s=3600.0).send()
    master.schedule()
    assert shown(master) == ("ACTIVE", "ACTIVE")
    # After a start of the master it has its time once more.
    unmanaged = master.core.unmanaged
    unmanaged._deadlines.clear()
    master.schedule()
    assert shown(master) == ("ACTIVE", "ACTIVE")
    unmanaged._deadlines[1] -= 3601
    master.schedule()
    assert shown(master) == ("ERROR", "ERROR")
    error = master.http.get("/experiments/1").json()["error"]
    assert error.startswith("Nothing was heard of the run for 3600 s")
    before = dump(master)
    master.schedule()
    assert dump(master) == before
    run.report(2, 1.0)
    RunSync(client, run.path, lease_s=3600.0).send()
    assert shown(master) == ("ACTIVE", "ACTIVE")
    assert [step for step, _, _ in losses(master)] == [1, 2]


def test_a_run_that_goes_on_without_news_is_told_of_seldom(
    master: Any, client: Client, run: HandRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.live()
    run.begin()
    sync = RunSync(client, run.path, lease_s=3600.0)
    sync.send()
    posted = []
    post = sync._post
    monkeypatch.setattr(sync, "_post", lambda *a, **k: (posted.append(a), post(*a, **k))[1])
    assert sync.send().is_alive
    assert posted == []
    sync._last_at -= 1300
    sync.send()
    assert len(posted) == 1
    run.die()
    assert not sync.send().is_alive
    assert shown(master) == ("ERROR", "ERROR")


# ---- following a directory ---------------------------------------------------------------------


def test_a_scan_takes_up_what_is_new_since_the_last_one(
    master: Any, watcher: RunsWatcher, run: HandRun
) -> None:
    watcher.scan()
    assert master.http.get("/experiments").json()["items"] == []
    run.live()
    run.begin()
    run.report(1, 2.0)
    watcher.scan()
    assert shown(master) == ("ACTIVE", "ACTIVE")
    assert losses(master) == [(1, 1, 2.0)]
    run.report(2, 1.0)
    watcher.scan()
    assert losses(master) == [(1, 1, 2.0), (2, 1, 1.0)]
    run.die()
    watcher.scan()
    assert shown(master) == ("ERROR", "ERROR")
    run.live()
    run.begin(1)
    watcher.scan()
    assert shown(master) == ("ACTIVE", "ACTIVE")
    before = dump(master)
    watcher.scan()
    assert dump(master) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: a link of another user needs root")
@pytest.mark.parametrize("what", ["run", "run.json", "journal", "fifo"])
def test_a_link_by_another_user_shows_no_run_of_the_masters_user(
    master: Any,
    watcher: RunsWatcher,
    runs_path: Path,
    tmp_path: Path,
    what: str,
) -> None:
    private = HandRun(tmp_path / "private")
    private.begin()
    private.close()
    place = runs_path / "theirs"
    if what == "run":
        place.symlink_to(private.path)
        os.lchown(place, 65534, 65534)
    else:
        place.mkdir()
        for path in private.path.iterdir():
            if path.name == what:
                (place / path.name).symlink_to(path)
            elif path.is_file():
                shutil.copy(path, place)
            else:
                shutil.copytree(path, place / path.name)
    if what == "fifo":
        (place / "run.json").unlink()
        os.mkfifo(place / "run.json")
    watcher.scan()
    assert master.http.get("/experiments").json()["items"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: a link of another user needs root")
@pytest.mark.parametrize("what", ["journal", "segment", "hard link", "log"])
def test_a_link_below_a_journal_shows_nothing_of_the_masters_user(
    master: Any,
    watcher: RunsWatcher,
    make_run: Callable[..., HandRun],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    private = HandRun(tmp_path / "private")
    private.begin()
    private.report(1, 0.125)
    private.close()
    [theirs] = (private.path / "journal").iterdir()
    [segment] = theirs.iterdir()
    secret = tmp_path / "shadow"
    secret.write_text("games:x:1\nroot:y:2\n")
    run = make_run("theirs")
    place = run.directory.journal_path(JournalKey(0, 0, 0))
    if what == "journal":
        place.parent.mkdir()
        place.symlink_to(theirs)
    else:
        place.mkdir(parents=True)
        if what == "hard link":
            (place / segment.name).hardlink_to(segment)
        else:
            (place / segment.name).symlink_to(segment if what == "segment" else secret)
    for path in (run.path, *run.path.rglob("*")):
        if not path.is_file() or path.is_symlink() or path.stat().st_nlink == 1:
            os.chown(path, 65534, 65534, follow_symlinks=False)
    watcher.scan()
    assert "is left out" in caplog.text
    assert not any(name in caplog.text for name in ("games", "root:"))
    assert dump(master)["series"] == []


def test_a_run_with_much_to_read_does_not_hold_up_another_one(
    master: Any,
    watcher: RunsWatcher,
    make_run: Callable[..., HandRun],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directory_watchers, "_TURN_BYTES", 100_000)
    for name, number in (("much", 12_000), ("little", 1)):
        run = make_run(name)
        run.begin()
        for step in range(number):
            run.report(step, 1.0)
        run.finish()
    watcher.scan()
    states = {
        e["run_dir"][-4:]: e["state"] for e in master.http.get("/experiments").json()["items"]
    }
    assert states == {"much": "ACTIVE", "ttle": "COMPLETED"}
    for _ in range(20):
        watcher.scan()
    states = {
        e["run_dir"][-4:]: e["state"] for e in master.http.get("/experiments").json()["items"]
    }
    assert states == {"much": "COMPLETED", "ttle": "COMPLETED"}
    trial = 1 + (master.http.get("/experiments/1").json()["run_dir"][-4:] != "much")
    assert len(losses(master, trial)) == 12_000


def test_a_run_is_one_run_however_many_requests_it_takes(
    master: Any, watcher: RunsWatcher, make_run: Callable[..., HandRun], send: Callable[..., Any]
) -> None:
    for name, take in (("seen", lambda _: watcher.scan()), ("sent", send)):
        run = make_run(name)
        run.begin()
        for step in range(1500):
            run.report(step, 1.0)
        take(run)
    assert [len(losses(master, trial)) for trial in (1, 2)] == [1500, 1500]
    # It did not seem to end in between.
    ends = [event[2] for event in dump(master)["events"] if event[4] == "attempt_ended"]
    assert ends == [1, 2]


def test_a_directory_that_is_a_run_is_followed_itself(master: Any, run: HandRun) -> None:
    run.begin()
    run.finish()
    RunsWatcher(run.path, master.core.database, master.core.unmanaged, master.core.files).scan()
    assert shown(master) == ("COMPLETED", "COMPLETED")


def test_a_directory_that_is_not_there_yet_is_waited_for(
    master: Any, tmp_path: Path, run: HandRun
) -> None:
    watcher = RunsWatcher(
        tmp_path / "later", master.core.database, master.core.unmanaged, master.core.files
    )
    watcher.scan()
    run.begin()
    run.path.parent.rename(tmp_path / "later")
    watcher.scan()
    assert shown(master) == ("ERROR", "ERROR")


def test_what_cannot_be_shown_is_logged_once_and_hides_no_other_run(
    master: Any,
    watcher: RunsWatcher,
    make_run: Callable[..., HandRun],
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = ["damaged", "foreign", "good", "managed", "other-journal"]
    runs = {name: make_run(name, cluster_id="c" * (name == "managed")) for name in names}
    for run in runs.values():
        run.begin()
        run.finish()
    (runs["damaged"].path / "run.json").write_text("{")
    text = (runs["foreign"].path / "run.json").read_text()
    (runs["foreign"].path / "run.json").write_text(json.dumps(json.loads(text) | {"version": 9}))
    journal = runs["other-journal"].directory.journal_path(JournalKey(0, 0, 0))
    [segment] = journal.iterdir()
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(frame_line(-1, b'{"journal_version":9}') + b"".join(lines[1:]))
    with caplog.at_level(logging.WARNING):
        watcher.scan()
        watcher.scan()
    names_shown = {e["run_dir"] for e in master.http.get("/experiments").json()["items"]}
    assert str(runs["good"].path) in names_shown
    assert not {str(runs[name].path) for name in ("damaged", "foreign", "managed")} & names_shown
    messages = [record.getMessage() for record in caplog.records]
    assert sorted(m.split()[3] for m in messages) == sorted(
        str(runs[name].path) for name in names if name != "good"
    )
    # Once it is whole, it is shown.
    (runs["foreign"].path / "run.json").write_text(text)
    watcher.scan()
    names_shown = {e["run_dir"] for e in master.http.get("/experiments").json()["items"]}
    assert str(runs["foreign"].path) in names_shown


def test_a_run_whose_directory_was_removed_has_ended(
    master: Any, watcher: RunsWatcher, run: HandRun
) -> None:
    run.live()
    run.begin()
    watcher.scan()
    assert shown(master) == ("ACTIVE", "ACTIVE")
    shutil.rmtree(run.path)
    watcher.scan()
    assert shown(master) == ("ERROR", "ERROR")


@pytest.mark.parametrize("when", ["begun", "later"])
@pytest.mark.parametrize(
    "what", ["fifo", "digits", "name", "rank", "lock", "run.json", "record", "directory"]
)
def test_a_run_that_cannot_be_read_ends_and_can_be_deleted(
    master: Any, watcher: RunsWatcher, run: HandRun, what: str, when: str
) -> None:
    run.begin()
    run.live()
    if when == "later":
        watcher.scan()
        assert shown(master) == ("ACTIVE", "ACTIVE")
    journal = run.directory.journal_path(JournalKey(0, 0, 0))
    [segment] = journal.iterdir()
    if what == "fifo":
        os.mkfifo(journal / "000000000001.journal")
    elif what in ("digits", "record"):
        body = b"9" * 5000 + b" {}" if what == "digits" else b"1 {"
        with open(segment, "ab") as file:
            file.write(b"%08x %b\n" % (zlib.crc32(body), body))
    elif what == "name":
        (journal / "zz.journal").write_text("x")
    elif what == "rank":
        shutil.copytree(journal, journal.with_name("a0.g0.r" + "9" * 23))
    elif what in ("lock", "run.json"):
        path = run.path / what.replace("lock", "attempt.lock")
        path.unlink()
        os.mkfifo(path)
    else:
        segment.unlink()
        segment.mkdir()
    run.die()
    watcher.scan()
    watcher.scan()
    if (what, when) == ("run.json", "begun"):
        assert master.http.get("/experiments").json()["items"] == []
        return
    assert shown(master) == ("ERROR", "ERROR")
    assert master.http.get("/experiments/1").json()["error"]
    shutil.rmtree(run.path)
    watcher.scan()
    assert master.http.delete("/experiments/1").status_code == 200


@pytest.mark.parametrize("outcome", [None, "preempted"])
@pytest.mark.parametrize("is_master_new", [False, True])
def test_a_run_that_vanished_ends_until_it_comes_back(
    master: Any,
    watcher: RunsWatcher,
    run: HandRun,
    tmp_path: Path,
    outcome: str | None,
    is_master_new: bool,
) -> None:
    run.begin()
    run.live()
    watcher.scan()
    if outcome:
        run.finish(outcome)
        watcher.scan()
    before = shown(master)
    away = run.path.rename(tmp_path / "away")
    if is_master_new:
        watcher = RunsWatcher(
            run.path.parent, master.core.database, master.core.unmanaged, master.core.files
        )
    watcher.scan()
    assert shown(master) == ("ERROR", "ERROR")
    assert "is gone" in master.http.get("/experiments/1").json()["error"]
    away.rename(run.path)
    watcher.scan()
    assert shown(master) == before


def test_a_run_that_moves_within_the_directory_has_not_ended(
    master: Any, watcher: RunsWatcher, run: HandRun
) -> None:
    run.begin()
    run.live()
    watcher.scan()
    run.path.rename(run.path.with_name("new"))
    watcher.scan()
    assert states_of_runs(master) == {"new": "ACTIVE"}


def test_a_run_of_another_machine_is_lost_once_it_gives_no_sign_of_life(
    master: Any, watcher: RunsWatcher, run: HandRun, runs_path: Path
) -> None:
    run.live()
    run.begin()
    heartbeat = run.path / "heartbeat"
    heartbeat.write_text("other")
    watcher.scan()
    assert shown(master) == ("ACTIVE", "ACTIVE")
    os.utime(heartbeat, (1, 1))
    watcher.scan()
    assert shown(master) == ("ERROR", "ERROR")
    # It only lagged.
    os.utime(heartbeat)
    RunsWatcher(runs_path, master.core.database, master.core.unmanaged, master.core.files).scan()
    assert shown(master) == ("ACTIVE", "ACTIVE")


def test_a_second_watcher_and_sync_add_nothing(
    master: Any, watcher: RunsWatcher, run: HandRun, runs_path: Path, send: Callable[..., Any]
) -> None:
    run.begin()
    run.report(1, 1.0)
    run.finish()
    watcher.scan()
    before = dump(master)
    RunsWatcher(runs_path, master.core.database, master.core.unmanaged, master.core.files).scan()
    assert send(run).num_records == 0
    assert dump(master) == before


@pytest.mark.parametrize("is_sent", [False, True])
def test_damaged_lines_of_any_rank_are_told_once_whoever_reads_them(
    master: Any, watcher: RunsWatcher, run: HandRun, send: Callable[..., Any], is_sent: bool
) -> None:
    """One line in the middle of the chief's journal, and the last one of rank 2's."""
    run.begin()
    run.begin_rank(2)
    for step in (1, 2, 3):
        run.report(step, 1.0 / step)
        run.write(ProgressReported(time=1.0, progress=0.1), rank=2)
    run.finish()
    for rank, number in ((0, 3), (2, 4)):
        [path] = run.directory.journal_path(JournalKey(0, 0, rank)).iterdir()
        lines = path.read_bytes().splitlines(keepends=True)
        lines[number] = b"x" + lines[number][1:]
        path.write_bytes(b"".join(lines))
    for _ in range(2):
        if is_sent:
            send(run)
        else:
            watcher.scan()
    RunsWatcher(
        run.path.parent, master.core.database, master.core.unmanaged, master.core.files
    ).scan()
    assert shown(master) == ("COMPLETED", "COMPLETED")
    assert [step for step, _, _ in losses(master)] == [1, 3]
    trial = master.http.get("/trials/1").json()
    assert trial["num_records_lost"] == 2
    logs = master.http.get("/trials/1/logs").json()["items"]
    told = [line["text"].split(" is lost")[0] for line in logs if "lost" in line["text"]]
    assert sorted(told) == [
        "Record 2 of rank 0 (generation 0)", "Record 3 of rank 2 (generation 0)",
    ]  # fmt: skip


def test_the_thread_follows_and_ends(master: Any, watcher: RunsWatcher, run: HandRun) -> None:
    run.begin()
    run.finish()
    watcher.start()
    deadline = time.monotonic() + 60
    while [e["state"] for e in master.http.get("/experiments").json()["items"]] != ["COMPLETED"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    watcher.close()
    assert shown(master) == ("COMPLETED", "COMPLETED")
