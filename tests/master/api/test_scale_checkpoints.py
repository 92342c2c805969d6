"""What lists and downloads of checkpoints read, counted."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert

from paceline._cluster.master.store import tables
from paceline.storage import DirectoryStorage, _checkpoint_files

NUM_CHECKPOINTS = 200
BEST_FIRST = [97, 53, 11, 180]


def add_checkpoints(master: Any, metrics: dict[int, float | None]) -> None:
    """Store checkpoints of the two trials in turn; their numbers are their steps."""
    values = [
        {
            "uuid": f"c{number}", "trial_id": number % 2 + 1, "experiment_id": 1, "attempt": 1,
            "steps_completed": number, "state": "COMPLETED", "metadata": {}, "resources": {},
            "size": 0, "storage": "/nowhere", "created_at": 1.0, "metric": metrics.get(number),
        }
        for number in range(NUM_CHECKPOINTS)
    ]  # fmt: skip
    master.core.database.write(
        lambda transaction: transaction.connection.execute(insert(tables.checkpoints), values)
    ).result()


def pages(master: Any, path: str, **query: Any) -> list[int]:
    found, cursor = [], None
    while True:
        given = query if cursor is None else query | {"cursor": cursor}
        page = master.http.get(path, params=given).json()
        assert len(page["items"]) <= query["limit"]
        found += [item["steps_completed"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


@pytest.mark.parametrize("smaller", [True, False])
def test_checkpoints_are_listed_the_best_first_and_the_unmeasured_last(
    master: Any, smaller: bool
) -> None:
    master.create(searcher={"name": "random", "metric": "loss", "max_trials": 2,
                            "smaller_is_better": smaller})  # fmt: skip
    sign = 1.0 if smaller else -1.0
    add_checkpoints(master, {step: sign * rank for rank, step in enumerate(BEST_FIRST)})
    others = [step for step in reversed(range(NUM_CHECKPOINTS)) if step not in BEST_FIRST]
    path = "/experiments/1/checkpoints"
    for limit in (3, 4, 199, 200, 1000):
        assert pages(master, path, limit=limit, sort_by="metric") == BEST_FIRST + others
    assert pages(master, path, limit=70) == list(reversed(range(NUM_CHECKPOINTS)))
    [first] = master.http.get(path, params={"limit": 1, "sort_by": "metric"}).json()["items"]
    assert (first["uuid"], first["metric"]) == ("c97", 0.0)


@pytest.mark.parametrize("sort_by", ["steps", "metric"])
def test_a_page_of_checkpoints_reads_its_own_rows_and_no_metrics(
    master: Any, count_reads: Any, sort_by: str
) -> None:
    master.create()
    add_checkpoints(master, {step: float(step) for step in range(NUM_CHECKPOINTS)})
    with count_reads(master.core.database._reader._engine) as reads:
        reply = master.http.get(
            "/experiments/1/checkpoints", params={"limit": 5, "sort_by": sort_by}
        )
    assert len(reply.json()["items"]) == 5
    # BEGIN, the experiment, then the page and one row to know whether there is more.
    assert (reads.num_statements, reads.num_rows) == (3, 1 + 6)


@pytest.fixture
def stored(master: Any, tmp_path: Path) -> DirectoryStorage:
    """Return a storage with the committed checkpoint `kept` of trial 1: files `a` and `b/c`."""
    storage = DirectoryStorage(tmp_path / "checkpoints")
    master.create(checkpoint_storage={"type": "directory", "path": storage.url})
    master.schedule()
    master.report(1, 0)
    with storage.store_path("kept") as path:
        (path / "a").write_bytes(b"first")
        (path / "b").mkdir()
        (path / "b" / "c").write_bytes(b"second")
    manifest = storage.commit("kept", {"steps_completed": 3}, origin=master.origin(1))
    record = {
        "type": "checkpoint", "time": 1.0, "uuid": "kept", "steps_completed": 3,
        "metadata": {}, "resources": manifest.resources | {"../outside": 1, "manifest.json": 1},
        "storage": storage.url,
    }  # fmt: skip
    batch = {"generation": 0, "rank": 0, "records": [[0, record]]}
    assert master.attempt(1, "records", batches=[batch]).status_code == 200
    return storage


def test_a_download_reads_the_requested_file_only_and_once_to_check_it(
    master: Any, stored: DirectoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested: list[str] = []
    digest_stream = _checkpoint_files.digest_stream

    def counting(file: Any, *options: Any) -> Any:
        digested.append(file.name)
        return digest_stream(file, *options)

    monkeypatch.setattr(_checkpoint_files, "digest_stream", counting)
    for name, content in (("a", b"first"), ("b/c", b"second")):
        reply = master.http.get(f"/checkpoints/kept/files/{name}")
        assert (reply.status_code, reply.content) == (200, content)
    assert digested == ["a", "b/c"]


def test_damage_to_one_file_does_not_keep_the_others_back(
    master: Any, stored: DirectoryStorage
) -> None:
    (stored.root / "kept" / "a").write_bytes(b"fixed")
    assert master.http.get("/checkpoints/kept/files/b/c").content == b"second"
    reply = master.http.get("/checkpoints/kept/files/a")
    assert (reply.status_code, reply.json()["code"]) == (409, "checkpoint_unusable")
    assert "'a' of checkpoint kept was altered" in reply.json()["detail"]
    (stored.root / "kept" / "a").unlink()
    assert (
        "'a' of checkpoint kept is missing"
        in master.http.get("/checkpoints/kept/files/a").json()["detail"]
    )


@pytest.mark.parametrize(
    "path",
    ["..%2Foutside", "b%2F..%2Fa", ".%2Fa", "%2Fetc%2Fpasswd", "b", "b%2F%2Fc", "none",
     "manifest.json"],
)  # fmt: skip
def test_only_what_the_manifest_lists_is_served(
    master: Any, stored: DirectoryStorage, path: str
) -> None:
    """The record named `../outside` and the manifest among its files; the manifest decides."""
    (stored.root / "outside").write_bytes(b"x")
    reply = master.http.get(f"/checkpoints/kept/files/{path}")
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")
