from collections import Counter
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from paceline._cluster.master.experiments import retention as _sweep
from paceline._cluster.master.experiments.checkpoint_places import CheckpointPlace
from paceline._cluster.master.experiments.checkpoints import delete_files
from paceline._cluster.master.experiments.retention import sweep_checkpoints
from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.master.experiments.storage_calls import StorageCalls
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import settle_cluster_id
from paceline.journal import CheckpointStored
from paceline.storage import DirectoryStorage, storage_from
from paceline.storage._checkpoint_files import origin_of


def commit(storage: Path, uuid: str, origin: str = "", *, created: float | None = None) -> None:
    """Store a real checkpoint, and report it to nobody."""
    opened = DirectoryStorage(storage)
    with opened.store_path(uuid) as path:
        (path / "model").write_text("1")
    manifest = opened.commit(uuid, {"steps_completed": 1}, origin=origin)
    if created is not None:
        opened.replace_manifest(msgspec.structs.replace(manifest, created=created))


def store(bench: Any, attempt_id: int, step: int, storage: Path) -> str:
    """Store a real checkpoint and report it."""
    uuid, opened = str(uuid4()), storage_from(str(storage))
    with opened.store_path(uuid) as path:
        (path / "model").write_text(str(step))
    opened.commit(uuid, {"steps_completed": step})
    bench.send(
        attempt_id,
        CheckpointStored(
            time=float(step), uuid=uuid, steps_completed=step, metadata={}, resources={"model": 1},
            storage=str(storage),
        ),
    )  # fmt: skip
    return uuid


def names(storage: Path) -> set[str]:
    return {path.name for path in storage.iterdir()}


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Return where checkpoints go."""
    return tmp_path / "checkpoints"


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({}, {3, 5}),
        ({"save_trial_latest": 2}, {3, 4, 5}),
        ({"save_trial_best": 0, "save_trial_latest": 0}, set()),
        ({"save_trial_best": 0, "save_trial_latest": 0, "save_experiment_best": 2}, {2, 3}),
    ],
)
def test_files_and_rows_follow_the_policy_of_the_experiment(
    bench: Any, storage: Path, policy: dict[str, int], kept: set[int]
) -> None:
    experiment_id = bench.create(
        "single",
        checkpoint_storage={"type": "directory", "path": str(storage)} | policy,
    )
    attempt_id = bench.start(1)
    uuids = {}
    for step, loss in ((1, 0.9), (2, 0.5), (3, 0.2), (4, None), (5, 0.8)):
        if loss is not None:
            bench.validate(attempt_id, step, loss=loss)
        uuids[step] = store(bench, attempt_id, step, storage)
    bench.end(attempt_id)
    for _ in range(2):
        sweep_checkpoints(bench.changes, bench.database, experiment_id, Counter())
        assert names(storage) == {uuids[step] for step in kept}
        states = {row.steps_completed: row.state for row in bench.rows(tables.checkpoints)}
        assert states == {step: "COMPLETED" if step in kept else "DELETED" for step in range(1, 6)}
    assert bench.experiment(experiment_id).retention_done


def test_bytes_and_age_bound_what_an_ended_experiment_keeps(
    bench: Any, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of a byte each, stored at the times 1 to 5; that of step 2 is the best."""
    rules = {"save_age": 7, "save_bytes": 3}
    experiment_id = bench.create(
        "single", checkpoint_storage={"type": "directory", "path": str(storage)} | rules
    )
    attempt_id = bench.start(1)
    bench.validate(attempt_id, 2, loss=0.5)
    uuids = {step: store(bench, attempt_id, step, storage) for step in range(1, 6)}
    bench.end(attempt_id)
    # At the time 9.5 those of 3 to 5 are young, but with the best they are a byte too many.
    for now_s, kept, next_s in [(9.5, {2, 4, 5}, 11.0), (11.5, {2, 5}, None)]:
        monkeypatch.setattr(_sweep.time, "time", lambda now_s=now_s: now_s)
        assert sweep_checkpoints(bench.changes, bench.database, experiment_id, Counter()) == next_s
        assert names(storage) == {uuids[step] for step in kept}
        assert bench.experiment(experiment_id).retention_done == (next_s is None)


def test_continuous_checkpoints_are_deleted_while_the_experiment_runs(
    bench: Any, storage: Path
) -> None:
    rules = {"save_trial_latest": 0}
    fields = {"checkpoint_storage": {"type": "directory", "path": str(storage)} | rules}
    experiment_id = bench.create("single", min_checkpoint_period="continuous", **fields)
    attempt_id = bench.start(1)
    first = store(bench, attempt_id, 1, storage)
    bench.command("pause", experiment_id)
    bench.leave(attempt_id)
    bench.command("activate", experiment_id)
    attempt_id = bench.start(1)
    for step in (2, 3):
        bench.validate(attempt_id, step, loss=step)
    uuids = {step: store(bench, attempt_id, step, storage) for step in (2, 3, 4)}
    bench.retention.make_pass()
    # What the attempt has gone on from, the best and what the next attempt will go on from.
    assert names(storage) == {first, uuids[2], uuids[4]}
    assert bench.experiment(experiment_id).retention_done
    uuids[5] = store(bench, attempt_id, 5, storage)
    bench.retention.make_pass()
    assert names(storage) == {first, uuids[2], uuids[5]}
    bench.end(attempt_id)
    bench.retention.make_pass()
    assert names(storage) == {uuids[2]}


def test_nothing_is_deleted_while_an_experiment_with_a_period_runs(
    bench: Any, storage: Path
) -> None:
    fields = {"checkpoint_storage": {"type": "directory", "path": str(storage)}}
    bench.create("single", min_checkpoint_period=1, **fields)
    attempt_id = bench.start(1)
    uuids = {store(bench, attempt_id, step, storage) for step in (1, 2, 3)}
    bench.retention.make_pass()
    assert names(storage) == uuids


def test_what_another_experiment_starts_from_is_kept(bench: Any, storage: Path) -> None:
    experiment_id = bench.create("single", checkpoint_storage={"save_trial_latest": 0})
    attempt_id = bench.start(1)
    uuid, other = (store(bench, attempt_id, step, storage) for step in (2, 1))
    bench.command("continue_trial", 1, {}, activate=False)
    bench.end(attempt_id)
    sweep_checkpoints(bench.changes, bench.database, experiment_id, Counter())
    assert uuid in names(storage)
    assert other not in names(storage)


def test_a_checkpoint_is_started_from_or_deleted_and_never_both(
    bench: Any, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One experiment is created after the plan was made, the others while files are deleted."""
    rules = {"save_trial_best": 0, "save_trial_latest": 0}
    fields = {"checkpoint_storage": {"type": "directory", "path": str(storage)} | rules}
    experiment_id = bench.create("single", **fields)
    attempt_id = bench.start(1)
    first, second, third = (store(bench, attempt_id, step, storage) for step in (1, 2, 3))
    bench.end(attempt_id)
    plan, delete = _sweep._plan_sweep, _sweep.delete_files

    def start_from(uuid: str) -> None:
        bench.create(searcher={"source_checkpoint_uuid": uuid}, activate=False)

    def plan_and_start(*arguments: Any) -> Any:
        planned = plan(*arguments)
        start_from(first)
        return planned

    def start_and_delete(calls: StorageCalls, place: CheckpointPlace, uuid: str) -> bool:
        with pytest.raises(RefusedError, match="is being deleted"):
            start_from(uuid)
        with pytest.raises(RefusedError, match="must have a checkpoint|is being deleted"):
            start_from(third)
        return delete(calls, place, uuid)

    monkeypatch.setattr(_sweep, "_plan_sweep", plan_and_start)
    monkeypatch.setattr(_sweep, "delete_files", start_and_delete)
    sweep_checkpoints(bench.changes, bench.database, experiment_id, Counter())
    assert names(storage) == {first}
    with pytest.raises(RefusedError, match="was deleted"):
        start_from(second)


def test_of_two_checkpoints_at_one_step_the_newer_one_is_the_latest(
    bench: Any, storage: Path
) -> None:
    experiment_id = bench.create("single", checkpoint_storage={"save_trial_best": 0})
    for number in range(4):
        attempt_id = bench.start(1)
        uuid = store(bench, attempt_id, 3, storage)
        if number < 3:
            bench.command("pause", experiment_id)
            bench.leave(attempt_id)
            bench.command("activate", experiment_id)
    bench.end(attempt_id)
    sweep_checkpoints(bench.changes, bench.database, experiment_id, Counter())
    assert names(storage) == {uuid}


def test_what_cannot_be_deleted_is_tried_again(
    bench: Any, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"checkpoint_storage": {"type": "directory", "path": str(storage)}}
    experiment_id = bench.create("single", **fields)
    attempt_id = bench.start(1)
    uuids = [store(bench, attempt_id, step, storage) for step in range(1, 6)]
    bench.end(attempt_id)
    tried: list[str] = []
    delete, now_s = _sweep.delete_files, _sweep.time.time()

    def fail(_calls: StorageCalls, _place: CheckpointPlace, uuid: str) -> bool:
        tried.append(uuid)
        return False

    def states() -> list[str]:
        return [row.state for row in bench.rows(tables.checkpoints)]

    monkeypatch.setattr(_sweep, "delete_files", fail)
    bench.retention.make_pass()
    assert len(tried) == _sweep._MAX_FAILURES
    assert states() == ["COMPLETED"] * 5
    assert not bench.experiment(experiment_id).retention_done
    # Another one in the same storage is not tried either.
    bench.create("single", **fields)
    other_id = bench.start(2)
    others = [store(bench, other_id, step, storage) for step in (1, 2)]
    bench.end(other_id)
    bench.retention.make_pass()
    assert len(tried) == _sweep._MAX_FAILURES
    assert not bench.changes.being_deleted
    monkeypatch.setattr(_sweep, "delete_files", delete)
    monkeypatch.setattr(_sweep.time, "time", lambda: now_s + 2 * _sweep.RETRY_S)
    bench.retention.make_pass()
    assert names(storage) == {uuids[4], others[1]}
    assert sorted(states()) == [*["COMPLETED"] * 2, *["DELETED"] * 5]
    assert bench.experiment(experiment_id).retention_done


def test_an_experiment_that_was_continued_meanwhile_is_swept_again(
    bench: Any, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"checkpoint_storage": {"type": "directory", "path": str(storage)}}
    experiment_id = bench.create("single", **fields)
    attempt_id = bench.start(1)
    store(bench, attempt_id, 1, storage)
    store(bench, attempt_id, 2, storage)
    bench.end(attempt_id)
    delete = _sweep.delete_files
    last: list[str] = []

    def delete_slowly(calls: StorageCalls, place: CheckpointPlace, uuid: str) -> bool:
        if not last:
            bench.command("continue_experiment", experiment_id, {})
            attempt_id = bench.start(1)
            last.append(store(bench, attempt_id, 3, storage))
            bench.end(attempt_id)
        return delete(calls, place, uuid)

    monkeypatch.setattr(_sweep, "delete_files", delete_slowly)
    bench.retention.make_pass()
    assert not bench.experiment(experiment_id).retention_done
    bench.retention.make_pass()
    assert names(storage) == {*last}
    assert bench.experiment(experiment_id).retention_done


def test_what_killed_attempts_have_stored_and_not_told_of_is_removed(
    bench: Any, storage: Path, tmp_path: Path
) -> None:
    """Nothing else is: not of others, of attempts that run, elsewhere, of before, or damaged."""
    settle_cluster_id(bench.database, "bench")
    fields = {"checkpoint_storage": {"type": "directory", "path": str(storage)}}
    first = bench.create("single", **fields)
    bench.create("single", **fields)
    kept = store(bench, bench.start(1), 1, storage)
    bench.start(2)
    own = origin_of("bench", 1, 1)
    commit(storage, "unknown", own)
    stay = {
        "without": "", "other-cluster": origin_of("other", 1, 1),
        "other-attempt": origin_of("bench", 1, 2), "running": origin_of("bench", 2, 1),
        "no-trial": origin_of("bench", 99, 1),
    }  # fmt: skip
    for uuid, origin in stay.items():
        commit(storage, uuid, origin)
    commit(storage, "before", own, created=bench.changes.since_s - 60)
    commit(tmp_path / "elsewhere", "linked", own)
    (storage / "linked").symlink_to(tmp_path / "elsewhere" / "linked")
    commit(storage, "damaged", own)
    (storage / "damaged" / "manifest.json").chmod(0o600)
    (storage / "damaged" / "manifest.json").write_text("{}")
    (storage / "foreign").mkdir()
    bench.end(1)
    bench.retention.make_pass()
    assert names(storage) == {kept, *stay, "before", "linked", "damaged", "foreign"}
    assert (tmp_path / "elsewhere" / "linked" / "model").exists()
    assert bench.experiment(first).retention_done
    bench.end(2)
    bench.retention.make_pass()
    assert names(storage) == {kept, *stay, "before", "linked", "damaged", "foreign"} - {"running"}


def test_files_that_are_gone_already_count_as_deleted(storage: Path) -> None:
    storage.mkdir()
    assert delete_files(StorageCalls(), CheckpointPlace(str(storage)), "never-there")
