"""Health of storages in use: answers, latency, failed writes, space, bytes, and faults."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert

from paceline._cluster.master.experiments import storage_calls, storage_health
from paceline._cluster.master.store import tables

CONFIG = {
    "name": "own",
    "entrypoint": "python3 t.py",
    "searcher": {"name": "single", "metric": "loss"},
}


def create(client: Any, storage: Any, **more: Any) -> int:
    config = CONFIG | {"checkpoint_storage": storage}
    reply = client.post("/experiments", json={"config": config, **more})
    assert reply.status_code == 201, reply.text
    return int(reply.json()["id"])


def add_checkpoint(master: Any, experiment_id: int, size: int, storage: str) -> None:
    trial = master.http.get(f"/experiments/{experiment_id}/trials").json()["items"][0]["id"]
    values = {
        "uuid": f"u{experiment_id}", "trial_id": trial, "experiment_id": experiment_id,
        "attempt": 1, "steps_completed": 1, "state": "COMPLETED", "metadata": {}, "resources": {},
        "size": size, "storage": storage, "created_at": 1.0,
    }  # fmt: skip
    statement = insert(tables.checkpoints).values(**values)
    master.core.database.write(lambda job: job.connection.execute(statement)).result()


def look(master: Any, **later: Any) -> list[dict[str, Any]]:
    """Check all storages now, whenever they were checked last, and list them."""
    health = master.core.storage_health
    health._health = {
        key: storage_health.replace(one, checked_at=one.checked_at - storage_health.CHECK_EVERY_S)
        for key, one in health._health.items()
    }
    health.look()
    found: list[dict[str, Any]] = master.http.get("/storages").json()
    return found


def problems(master: Any) -> list[str]:
    return [one for one in master.http.get("/status").json()["problems"] if "has failed" in one]


def test_a_storage_tells_latency_space_and_whose_bytes_it_has(
    master: Any, add: Any, tmp_path: Path
) -> None:
    place = tmp_path / "lab"
    ada = add("ada", role=None)
    master.http.post("/projects", json={"name": "lab"})
    master.http.put("/projects/lab/members/ada", json={"role": "editor"})
    of_ada, own = create(ada, str(place)), create(master.http, str(place))
    [found] = look(master)
    # No attempt has made the directory, and no check makes one.
    assert (found["is_reachable"], found["failing_since"], place.exists()) == (None, None, False)
    place.mkdir()
    add_checkpoint(master, of_ada, 300, str(place))
    add_checkpoint(master, own, 200, str(place))
    [found] = look(master)
    assert (found["storage"], found["is_reachable"]) == (str(place), True)
    assert 0 < found["latency_s"] < 5
    assert found["num_failed_writes"] == 0
    assert 0 < found["free_bytes"] < found["total_bytes"]
    assert list(place.iterdir()) == []
    assert found["num_bytes"] == 500
    pairs = {
        key: [(one["name"], one["num_bytes"]) for one in found[key]]
        for key in ("by_project", "by_user", "by_experiment")
    }
    assert pairs == {
        "by_project": [("lab", 300), ("Default", 200)],
        "by_user": [("ada", 300), ("admin", 200)],
        "by_experiment": [("own", 300), ("own", 200)],
    }
    # Others see what is in their projects.
    [seen] = ada.get("/storages").json()
    assert (seen["num_bytes"], [one["name"] for one in seen["by_user"]]) == (300, ["ada"])
    assert add("bob", role=None).get("/storages").json() == []


def test_a_storage_is_checked_again_after_a_while_and_not_before(
    master: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(master.http, str(tmp_path))
    num_probes = 0
    probe = storage_health._probe

    def counted(*given: Any, **more: Any) -> Any:
        nonlocal num_probes
        num_probes += 1
        return probe(*given, **more)

    monkeypatch.setattr(storage_health, "_probe", counted)
    for _ in range(3):
        master.core.storage_health.look()
        master.http.get("/storages")
    assert num_probes == 1
    look(master)
    assert num_probes == 2


def test_a_removed_directory_fails_from_then_on_and_is_well_when_it_is_back(
    master: Any, tmp_path: Path
) -> None:
    place = tmp_path / "lab"
    place.mkdir()
    add_checkpoint(master, create(master.http, str(place)), 1, str(place))
    assert look(master)[0]["is_reachable"]
    shutil.rmtree(place)
    begin = time.time()
    [found] = look(master)
    assert (found["is_reachable"], found["reason"]) == (False, "No such file or directory")
    since = found["failing_since"]
    assert begin <= since <= time.time()
    [found] = look(master)
    assert (found["failing_since"], found["num_failed_writes"]) == (since, 2)
    [told] = problems(master)
    assert told.startswith(f"The storage {place} has failed for ")
    assert "No such file or directory. Hint: `paceline storage list`" in told
    place.mkdir()
    [found] = look(master)
    assert (found["is_reachable"], found["failing_since"], found["reason"]) == (True, None, None)
    assert problems(master) == []


def test_two_names_of_a_directory_are_two_storages_and_a_link_of_others_is_not_followed(
    master: Any, tmp_path: Path
) -> None:
    place, link, taken = tmp_path / "lab", tmp_path / "link", tmp_path / "taken"
    place.mkdir()
    link.symlink_to(place)
    taken.write_text("a file")
    for one in (place, f"{place}/", link, taken):
        add_checkpoint(master, create(master.http, str(one)), 1, str(one))
    found = {one["storage"]: one for one in look(master)}
    assert found.keys() == {str(place), str(link), str(taken)}
    assert found[str(place)]["is_reachable"]
    assert found[str(link)]["is_reachable"]
    assert found[str(taken)]["reason"] == "Not a directory"
    assert taken.read_text() == "a file"
    assert found[str(place)]["num_bytes"] == 2


@pytest.mark.root
def test_a_full_disk_fails_and_leaves_nothing(
    master: Any, small_disk: Path, fill_disk: Any
) -> None:
    add_checkpoint(master, create(master.http, str(small_disk)), 1, str(small_disk))
    assert look(master)[0]["is_reachable"]
    fill_disk(small_disk)
    [found] = look(master)
    assert (found["reason"], found["is_reachable"]) == ("No space left on device", False)
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
    assert problems(master)


@pytest.mark.root
def test_a_hanging_disk_holds_one_thread_and_no_other_storage(
    master: Any, hanging_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_calls, "_SILENT_S", 1.5)
    add_checkpoint(master, create(master.http, str(hanging_disk)), 9, str(hanging_disk))
    create(master.http, str(tmp_path))
    begin = time.monotonic()
    found = {one["storage"]: one for one in look(master)}
    assert found[str(tmp_path)]["is_reachable"]
    assert found[str(hanging_disk)]["checked_at"] is None
    time.sleep(1)
    for _ in range(3):
        found = {one["storage"]: one for one in look(master)}
    assert time.monotonic() - begin < 20
    assert found[str(hanging_disk)]["reason"] == "The storage does not answer"
    assert len(master.core.changes.storage_calls._running) == 1
    assert master.http.get("/status").status_code == 200


def test_a_bucket_tells_its_health_with_a_real_server(master: Any, s3: str) -> None:
    add_checkpoint(master, create(master.http, s3), 1, s3)
    [found] = look(master)
    assert (found["storage"], found["is_reachable"]) == (s3, True)
    assert found["latency_s"] > 0
    assert found["free_bytes"] is None
    from paceline.storage import storage_from

    assert storage_from(s3).objects("") == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", "must name a server that answers"),
        ("AWS_ENDPOINT_URL", "http://nowhere.invalid", ""),
    ],
)
def test_an_endpoint_that_nobody_answers_at_fails_in_bounded_time(
    master: Any, s3: str, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, reason: str
) -> None:
    add_checkpoint(master, create(master.http, s3), 1, s3)
    monkeypatch.setenv(variable, value)
    begin = time.monotonic()
    while not (found := look(master)[0])["checked_at"]:
        assert time.monotonic() - begin < 60
        time.sleep(0.2)
    assert found["is_reachable"] is False
    assert reason in found["reason"].lower()


def test_wrong_credentials_are_told(master: Any, s3: str, strict_s3: str, monkeypatch: Any) -> None:
    add_checkpoint(master, create(master.http, s3), 1, s3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", strict_s3)
    while not (found := look(master)[0])["checked_at"]:
        time.sleep(0.2)
    assert found["is_reachable"] is False, found
    assert "InvalidAccessKeyId" in found["reason"] or "403" in found["reason"]


_STRICT = """
import sys
from moto.core import set_initial_no_auth_action_count
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.readline()
server.stop()
"""


@pytest.fixture
def strict_s3() -> Iterator[str]:
    """Return the URL of an S3 server that knows no keys at all, and checks them."""
    environment = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "0"}
    process = subprocess.Popen(
        [sys.executable, "-c", _STRICT], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.communicate("\n")


@pytest.mark.long
def test_a_stopped_server_of_a_bucket_holds_no_other_storage(
    master: Any, s3: str, own_s3: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, pid = own_s3
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setattr(storage_calls, "_SILENT_S", 1.5)
    add_checkpoint(master, create(master.http, s3), 9, s3)
    create(master.http, str(tmp_path))
    os.kill(pid, signal.SIGSTOP)
    try:
        found = {one["storage"]: one for one in look(master)}
        assert found[str(tmp_path)]["is_reachable"]
        time.sleep(1)
        found = {one["storage"]: one for one in look(master)}
        assert (found[s3]["is_reachable"], found[s3]["reason"]) == (
            False, "The storage does not answer",
        )  # fmt: skip
        begin = time.monotonic()
        assert master.http.get("/experiments").status_code == 200
        assert time.monotonic() - begin < 5
    finally:
        os.kill(pid, signal.SIGCONT)
    begin = time.monotonic()
    while not {one["storage"]: one for one in look(master)}[s3]["is_reachable"]:
        assert time.monotonic() - begin < 60
        time.sleep(0.2)


@pytest.fixture
def own_s3() -> Iterator[tuple[str, int]]:
    """Return URL and process of an S3 server of this test alone."""
    program = _STRICT.replace("from moto.core import set_initial_no_auth_action_count\n", "")
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    url = f"http://127.0.0.1:{int(process.stdout.readline())}"
    import urllib.request

    urllib.request.urlopen(urllib.request.Request(f"{url}/checkpoints", method="PUT")).close()
    yield url, process.pid
    process.communicate("\n")


def test_failed_writes_that_trials_report_count_for_their_own_storage_only(
    master: Any, tmp_path: Path
) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for place in (mine, other):
        place.mkdir()
        create(master.http, str(place))
    master.schedule()
    records = [
        [n, {"type": "store", "time": 1.0, "storage": str(place), "reason": "away"}]
        for n, place in enumerate((mine, f"{mine}/", other, "/etc"))
    ]
    batch = {"generation": 0, "rank": 0, "records": records}
    assert master.attempt(1, "records", batches=[batch]).status_code == 200
    found = {one["storage"]: one["num_failed_writes"] for one in look(master)}
    assert found == {str(mine): 2, str(other): 0}
