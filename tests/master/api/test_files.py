"""Files and media of runs: their way to the master by each sender, and what readers get."""

import hashlib
import io
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image
from sqlalchemy import select

from paceline import core
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.journal_records import MediaFile, MediaReported
from paceline._base.run_directory import JournalKey, RunDirectory
from paceline._cluster.master.experiments.directory_watchers import RunsWatcher
from paceline._cluster.master.experiments.retention import Retention
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Database
from paceline._cluster.master.upkeep.backup import Backup
from paceline._cluster.master.upkeep.check import check
from paceline._cluster.master.upkeep.rebuild import rebuild_database
from paceline._cluster.master.upkeep.recovery_records import write_some
from paceline._cluster.master.upkeep.restore import restore
from paceline.client import ApiError, Client
from paceline.client._code_and_run_uploads import RunSync

NOISE = np.random.default_rng(0).integers(0, 255, (200, 200, 3), np.uint8)


@pytest.fixture(autouse=True)
def work_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run scripts in an empty directory, without the variables of a job."""
    for name in [name for name in os.environ if name.startswith(("PACELINE_", "RANK", "WORLD_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def client(master: Any) -> Iterator[Client]:
    """Return a client of the served master."""
    with Client(f"http://127.0.0.1:{master.port}", master.home.token) as client:
        yield client


@pytest.fixture
def reporter(master: Any) -> Iterator[Client]:
    """Return a client whose token only reports."""
    token = master.http.post("/tokens", json={"name": "far", "scope": "report"}).json()["secret"]
    with Client(f"http://127.0.0.1:{master.port}", token) as client:
        yield client


@pytest.fixture(params=["sync", "report token", "watcher"])
def send(request: pytest.FixtureRequest, master: Any) -> Callable[[Path], object]:
    """Return a function that brings a run to the master, in each way that there is."""
    if request.param == "watcher":
        core_ = master.core

        def look(path: Path) -> None:
            RunsWatcher(path, core_.database, core_.unmanaged, core_.files).scan()

        return look
    sender = request.getfixturevalue("client" if request.param == "sync" else "reporter")
    return lambda path: RunSync(sender, path).send()


def make_run(name: str = "one") -> Path:
    """Make a run with an image, a large file, a text and a histogram, and a metric at the end."""
    with core.init(name=name) as context:
        context.train.report_image(1, "val/noise", [NOISE, NOISE[:2]], captions="noise")
        context.train.report_text(1, "said", "hello")
        context.train.report_histogram(2, "weights", [0.0, 1.0], num_bins=2)
        context.train.report_training_metrics(3, {"loss": 1.0})
    return context.run_dir


def file_at(path: Path, name: str = "val/noise") -> Path:
    """Return the place of the first file of media in a run directory."""
    [row] = core.read_media(RunDirectory(path), name)
    return path / "files" / row.report.files[0].path


def num_lost(master: Any) -> int:
    with master.core.database.read() as connection:
        return int(connection.execute(select(tables.trials.c.num_records_lost)).scalar_one())


def contents(master: Any) -> set[str]:
    return {path.name for path in (master.home.path / "files").rglob("*") if path.is_file()}


def test_media_arrive_as_they_were_reported(
    send: Callable[[Path], object], master: Any, client: Client, tmp_path: Path
) -> None:
    path = make_run()
    send(path)
    send(path)
    trial = client.get_trial(1)
    assert [(one.name, one.kind) for one in trial.media_names()] == [
        ("said", "text"), ("val/noise", "image"), ("weights", "histogram"),
    ]  # fmt: skip
    [image] = trial.media("val/noise")
    assert (image.steps_completed, image.attempt, image.kind) == (1, 1, "image")
    assert [one.value for one in trial.media("said")] == ["hello"]
    assert trial.media("weights")[0].value == {"bins": [0.0, 0.5, 1.0], "counts": [1, 1]}
    files = trial.files("media/val/")
    assert [file.path for file in files] == [file["path"] for file in image.files]
    assert image.files[0]["facts"] == {"width": 200, "height": 200}
    for file in files:
        copy = trial.download_file(file.path, tmp_path / "copy.png")
        assert copy.read_bytes() == (path / "files" / file.path).read_bytes()
        assert (file.size, file.media_type) == (copy.stat().st_size, "image/png")
    assert contents(master) == {file.digest for file in files}
    assert num_lost(master) == 0
    with pytest.raises(ApiError, match="There is no file 'media/none'"):
        trial.download_file("media/none", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_content_that_is_there_is_not_sent_again(master: Any, client: Client) -> None:
    first, second = make_run("first"), make_run("second")
    RunSync(client, first).send()
    sent = []
    session = client._session
    send, session.send = session.send, lambda *a, **k: sent.append((a, k)) or send(*a, **k)  # type: ignore[method-assign,func-returns-value,assignment]
    RunSync(client, second).send()
    large = [k for a, k in sent if "files" in a[1] and "is_known" in k["params"]]
    assert len(large) == 1
    # The small image is sent without asking first.
    assert sum(k.get("content") is not None for a, k in sent if "/files/" in a[1]) == 1
    assert len(client.get_trial(2).files()) == 2
    assert len(contents(master)) == 2


def as_link(path: Path, secret: Path) -> None:
    path.unlink()
    path.symlink_to(secret)


def as_pipe(path: Path, _: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_directory_link(path: Path, secret: Path) -> None:
    path.rename(secret.parent / path.name)
    path.parent.rename(path.parent.with_name("moved"))
    path.parent.symlink_to(secret.parent)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (as_link, "No link"),
        (as_pipe, "A regular file must be there"),
        (as_directory_link, "No link"),
        (lambda path, _: path.unlink(), "No such file"),
        (lambda path, _: path.write_bytes(b"\0" * path.stat().st_size), "digest of the file"),
        (lambda path, _: path.write_bytes(b"\0"), "bytes, but has 1"),
    ],
    ids=["link", "pipe", "linked directory", "missing", "changed", "cut"],
)
def test_a_file_that_is_not_what_was_reported_is_counted_as_lost(
    damage: Callable[[Path, Path], object],
    why: str,
    send: Callable[[Path], object],
    master: Any,
    client: Client,
    tmp_path: Path,
) -> None:
    path = make_run()
    secret = tmp_path / "secrets" / "key"
    secret.parent.mkdir()
    secret.write_text("secret")
    damage(file_at(path), secret)
    send(path)
    trial = client.get_trial(1)
    # What is behind the lost report has arrived.
    assert trial.data.summary["training"]["loss"].count == 1
    assert [one.name for one in trial.media_names()] == ["said", "weights"]
    assert num_lost(master) == 1
    [line] = [line.text for line in trial.iter_logs() if "is lost" in line.text]
    assert "image 'val/noise' at step 1: its file 'media/val/noise/1-0-" in line
    assert why in line
    assert hashlib.sha256(b"secret").hexdigest() not in contents(master)


def test_a_record_that_names_a_file_elsewhere_is_counted_as_lost(
    send: Callable[[Path], object], master: Any
) -> None:
    path = make_run()
    passwords = Path("/etc/passwd").read_bytes()
    file = MediaFile(
        path="../../../../../../../../etc/passwd",
        digest=hashlib.sha256(passwords).hexdigest(),
        size=len(passwords),
        media_type="text/plain",
    )
    journal = JournalWriter(RunDirectory(path).journal_path(JournalKey(0, 0, 1)))
    journal.append(
        MediaReported(
            time=1.0, group="training", steps_completed=1, name="x", kind="file", files=[file]
        )
    )
    journal.close()
    send(path)
    assert num_lost(master) == 1
    assert file.digest not in contents(master)


def test_a_master_that_cannot_keep_a_file_holds_up_no_record(
    master: Any, client: Client, tmp_path: Path
) -> None:
    path = make_run()
    place = master.home.path / "files"
    place.rename(tmp_path / "away")
    place.write_text("no directory")
    sync = RunSync(client, path)
    failures = []
    for _ in range(20):
        try:
            sync.send()
            break
        except ApiError as error:
            failures.append(error.status)
    # Four tries for each of two files of the report, at most.
    assert set(failures) == {507}
    assert 4 <= len(failures) <= 8
    trial = client.get_trial(1)
    assert trial.data.summary["training"]["loss"].count == 1
    assert num_lost(master) == 1


@pytest.fixture
def put(master: Any, client: Client) -> Callable[..., httpx2.Response]:
    """Return a function that sends a file of a registered run."""
    RunSync(client, make_run()).send()
    with master.core.database.read() as connection:
        run_id = connection.execute(select(tables.experiments.c.external_id)).scalar_one()

    def put(path: str, data: bytes = b"data", run: str = run_id, **query: Any) -> httpx2.Response:
        query = {"digest": hashlib.sha256(data).hexdigest(), **query}
        return master.http.put(f"/runs/{run}/files/{path}", content=data, params=query)

    return put


@pytest.mark.parametrize("path", ["%2e%2e/x", "a/%2e%2e/x", "a//b", "a%5cb", "a%0ab", "x" * 1025])
def test_a_path_that_leads_elsewhere_is_refused(
    path: str, put: Callable[..., httpx2.Response]
) -> None:
    reply = put(path)
    assert (reply.status_code, reply.json()["code"]) in [
        (422, "invalid_path"), (422, "invalid_request"), (404, "not_found"),
    ]  # fmt: skip


def test_what_a_sender_claims_is_checked(
    put: Callable[..., httpx2.Response], master: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(master)
    answers = [
        put("a", digest="0" * 64),
        put("a", digest="0" * 63),
        put("a", media_type="text/html\r\nx: y"),
        put("a", run="none"),
        put("a", is_known=True),
    ]
    found = [(reply.status_code, reply.json()["code"]) for reply in answers]
    assert found == [
        (422, "wrong_digest"), (422, "invalid_request"), (422, "invalid_request"),
        (404, "not_found"), (404, "content_wanted"),
    ]  # fmt: skip
    assert contents(master) == before
    assert put("a").status_code == 204
    monkeypatch.setenv("PACELINE_MAX_RUN_FILES_MIB", "1")
    refused = put("b", b"x" * 2**20)
    assert (refused.status_code, refused.json()["code"]) == (413, "file_too_large")
    assert "The files of the run have reached their limit" in refused.json()["detail"]
    monkeypatch.delenv("PACELINE_MAX_RUN_FILES_MIB")
    # A later file of the same path takes the place of the earlier one.
    assert put("a", b"other").status_code == 204
    assert master.http.get("/trials/1/files/a").content == b"other"


def test_a_token_that_reports_sends_no_file_to_the_run_of_another(
    put: Callable[..., httpx2.Response], master: Any, reporter: Client
) -> None:
    with master.core.database.read() as connection:
        run_id = connection.execute(select(tables.experiments.c.external_id)).scalar_one()
    digest = hashlib.sha256(b"data").hexdigest()
    with pytest.raises(ApiError, match="must send runs that such a token registered"):
        reporter._session.send(
            "PUT", f"runs/{run_id}/files/x", params={"digest": digest}, content=b"data"
        )
    with pytest.raises(ApiError, match="scope"):
        reporter._session.send("GET", "trials/1/files")


def test_an_upload_that_is_cut_off_leaves_nothing(
    put: Callable[..., httpx2.Response], master: Any
) -> None:
    with master.core.database.read() as connection:
        run_id = connection.execute(select(tables.experiments.c.external_id)).scalar_one()
    before = contents(master)
    incoming = master.home.path / "files" / "incoming"
    head = (
        f"PUT /api/v1/runs/{run_id}/files/x?digest={'0' * 64} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {master.home.token}\r\nContent-Length: 1000000\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", master.port)) as sender:
        sender.sendall(head.encode() + b"x" * 300_000)
        deadline = time.monotonic() + 60
        while not list(incoming.iterdir()):
            assert time.monotonic() < deadline
    while list(incoming.iterdir()):
        assert time.monotonic() < deadline
    assert contents(master) == before


@pytest.mark.parametrize(
    ("media_type", "disposition"),
    [
        ("image/png", "inline"),
        ("video/mp4", "inline"),
        ("application/json", "inline"),
        ("text/plain", "inline"),
        ("text/html", "attachment"),
        ("image/svg+xml", "attachment"),
        ("application/xhtml+xml", "attachment"),
        ("text/javascript", "attachment"),
    ],
)
def test_no_file_can_act_on_the_origin_of_the_master(
    media_type: str, disposition: str, put: Callable[..., httpx2.Response], master: Any
) -> None:
    assert put("dir/b%C3%A4d%22.x", media_type=media_type).status_code == 204
    reply = master.http.get("/trials/1/files/dir/b%C3%A4d%22.x")
    assert reply.content == b"data"
    headers = reply.headers
    assert headers["content-disposition"] == f"{disposition}; filename*=utf-8''b%C3%A4d%22.x"
    assert headers["content-type"].partition(";")[0] == media_type
    assert headers["x-content-type-options"] == "nosniff"
    policy = headers["content-security-policy"]
    assert policy.startswith("sandbox; default-src 'none';")
    assert "script-src" not in policy
    assert "allow-" not in policy
    known = {"If-None-Match": headers["etag"]}
    again = master.http.get("/trials/1/files/dir/b%C3%A4d%22.x", headers=known)
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    ("asked", "content", "span"),
    [
        ("bytes=2-4", b"234", "2-4"),
        ("bytes=7-", b"789", "7-9"),
        ("bytes=-3", b"789", "7-9"),
        ("bytes=8-99", b"89", "8-9"),
        ("bytes=0-9", b"0123456789", "0-9"),
        *((asked, b"0123456789", None) for asked in ("bytes=9-2", "bytes=10-", "bytes=-", "0-3")),
    ],
)
def test_a_range_of_a_file_is_read(
    asked: str, content: bytes, span: str | None, put: Callable[..., httpx2.Response], master: Any
) -> None:
    assert put("film.mp4", b"0123456789", media_type="video/mp4").status_code == 204
    headers = {"Range": asked}
    reply = master.http.get("/trials/1/files/film.mp4", headers=headers)
    assert (reply.status_code, reply.content) == (206 if span else 200, content)
    assert reply.headers.get("content-range") == (f"bytes {span}/10" if span else None)
    # A file that was replaced meanwhile comes as a whole.
    reply = master.http.get("/trials/1/files/film.mp4", headers=headers | {"If-Range": '"old"'})
    assert (reply.status_code, reply.content) == (200, b"0123456789")


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "WEBP lossless", "JPEG"])
def test_an_image_of_too_many_pixels_is_refused_if_asked_so(
    kind: str, put: Callable[..., httpx2.Response], master: Any
) -> None:
    target = io.BytesIO()
    name, _, lossless = kind.partition(" ")
    Image.new("RGB", (300, 20)).save(target, name, **({"lossless": True} if lossless else {}))
    assert put("image", target.getvalue(), media_type=f"image/{name.lower()}").status_code == 204
    reply = master.http.get("/trials/1/files/image", params={"max_pixels": 5999})
    assert (reply.status_code, reply.json()["code"]) == (413, "too_many_pixels")
    assert "300 x 20 pixels" in reply.json()["detail"]
    assert master.http.get("/trials/1/files/image", params={"max_pixels": 6000}).content == (
        target.getvalue()
    )


def test_media_that_a_resumed_run_repeats_are_left_out_and_pages_go_on(client: Client) -> None:
    with core.init(name="again") as context:
        for step in range(1, 5):
            context.train.report_text(step, "said", f"first {step}")
            if step == 2:
                with context.checkpoint.store_path({"steps_completed": 2}) as (path, _):
                    (path / "state").write_text("")
    RunSync(client, context.run_dir).send()
    with core.init(name="again", resume=context.run_dir) as context:
        context.train.report_text(3, "said", "second 3")
    RunSync(client, context.run_dir).send()
    shown = [one.value for one in client.get_trial(1).media("said")]
    assert shown == ["first 1", "first 2", "second 3"]
    pages, cursor = [], None
    while cursor is not None or not pages:
        query = {"name": "said", "limit": 1, "cursor": cursor}
        reply = client._session.send("GET", "trials/1/media", params=query).json()
        pages.append([one["value"] for one in reply["items"]])
        cursor = reply["next_cursor"]
    assert pages == [["first 1"], ["first 2"], ["second 3"]]
    get = client._session.send
    steps = {"name": "said", "group": "training"}
    assert get("GET", "trials/1/media-steps", params=steps).json() == [1, 2, 3]
    assert get("GET", "trials/1/media-steps").json() == [1, 2, 3]
    assert get("GET", "trials/1/media-steps", params={"name": "none"}).json() == []
    chosen = get("GET", "trials/1/media", params={"name": "said", "step": [4, 3, 1]}).json()
    assert [one["value"] for one in chosen["items"]] == ["first 1", "second 3"]


def test_contents_go_when_no_run_names_them_and_a_day_has_passed(
    master: Any, client: Client
) -> None:
    first, second = make_run("first"), make_run("second")
    with core.init(name="third") as context:
        context.train.report_html(1, "page", "<p>only here</p>")
    for path in (first, second, context.run_dir):
        RunSync(client, path).send()
    kept = {file.digest for file in client.get_trial(2).files()}
    for number in (1, 3):
        shutil.rmtree({1: first, 3: context.run_dir}[number])
        client.get_experiment(number).delete()
    retention = Retention(master.core.database, master.core.changes, master.core.files)
    retention.sweep_contents()
    assert len(contents(master)) == 3
    for path in (master.home.path / "files").rglob("*"):
        if path.is_file():
            os.utime(path, (0, 0))
    # A file that is named anew is young.
    again = master.core.files.keep(next(iter(contents(master) - kept)))
    assert again == len("<p>only here</p>")
    retention.sweep_contents()
    assert len(contents(master)) == 3
    os.utime(next(p for p in (master.home.path / "files").rglob("*") if p.name not in kept
                  and p.is_file()), (0, 0))  # fmt: skip
    retention.sweep_contents()
    assert contents(master) == kept


def test_a_backup_has_the_files_and_the_check_names_damage(
    make_master: Callable[..., Any], tmp_path: Path
) -> None:
    master = make_master()
    with Client(f"http://127.0.0.1:{master.port}", master.home.token) as client:
        RunSync(client, make_run()).send()
    (master.home.path / "files" / "incoming" / "left").write_text("cut off")
    backup = Backup(master.home.path, tmp_path / "backups")
    with backup.hold():
        made = backup.make()
    assert sum(name.startswith("files/") for name in made.content.files) == 2
    restored = tmp_path / "restored"
    restore(tmp_path / "backups", restored)
    assert [one for one in check(restored).findings if one.kind == "file"] == []
    first, second = sorted(path for path in (restored / "files").rglob("*") if len(path.name) == 64)
    first.unlink()
    second.write_bytes(b"\0" * second.stat().st_size)
    found = [one for one in check(restored).findings if one.kind == "file"]
    assert {one.problem for one in found} == {"is missing", "is damaged"}
    assert all("of trial 1" in one.where and one.hint for one in found)
    quick = [one for one in check(restored, is_quick=True).findings if one.kind == "file"]
    assert [one.problem for one in quick] == ["is missing"]
    with suppress(FileNotFoundError):
        second.unlink()


def test_a_database_that_is_made_again_knows_media_and_files(
    master: Any, client: Client, tmp_path: Path
) -> None:
    def rows(database: Database) -> list[Any]:
        with database.read() as connection:
            return [
                dict(row)
                for table in (tables.media, tables.run_files)
                for row in connection.execute(select(table)).mappings()
            ]

    RunSync(client, make_run()).send()
    while write_some(master.core.database, master.home.path):
        pass
    lost = shutil.ignore_patterns("master.*")
    copy = shutil.copytree(master.home.path, tmp_path / "copy", ignore=lost)
    rebuild_database(copy)
    database = Database(copy / "master.sqlite")
    try:
        assert len(rows(database)) == 5
        assert rows(database) == rows(master.core.database)
    finally:
        database.close()


def test_labels_of_a_run_are_those_of_its_experiment(client: Client) -> None:
    with core.init(name="marked", labels=["project:digits", "${x}"]) as context:
        context.train.report_training_metrics(1, {"loss": 1.0})
    RunSync(client, context.run_dir).send()
    assert client.get_experiment(1).data.labels == ["project:digits", "${x}"]


def test_contents_that_replace_each_other_fill_no_disk(
    put: Callable[..., httpx2.Response], master: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_MAX_RUN_FILES_MIB", "1")
    answers = [put("same", bytes([number]) * 400_000).status_code for number in range(5)]
    assert answers == [204, 204, 413, 413, 413]
    assert "at most 1,048,576 bytes of files a day" in put("same", b"y" * 400_000).text
    # What was refused counts for nothing.
    assert put("small", b"z").status_code == 204
