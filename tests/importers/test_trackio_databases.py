"""Trackio's local store as runs: a dump of what its release 0.43.0 has written."""

import math
import sqlite3
from pathlib import Path

import pytest
from imported_runs import Import, media, points, tree

from paceline._base.run_directory import RunDirectory
from paceline.core._read_runs import read_alerts

STORES = Path(__file__).parent / "stores"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "trackio"
    image = root / "media" / "proj" / "run-a" / "3" / "8df542e8-2f1c-4b2d-9645-3719ca6735a7.png"
    image.parent.mkdir(parents=True)
    image.write_bytes(b"\x89PNG")
    with sqlite3.connect(root / "proj.db") as database:
        database.executescript((STORES / "trackio_0_43.sql").read_text())
    database.close()
    return root


def test_run_comes_whole_and_once(store: Path, run_import: Import, tmp_path: Path) -> None:
    (run,), problems = run_import(store)
    assert problems == []
    assert (run.name, run.state, run.num_points) == ("run-a", "new", 9)
    rows = points(run.path)
    assert [row[2]["loss"] for row in rows] == [1.0, 0.5, 1 / 3]
    assert math.isnan(rows[1][2]["train/acc"])
    assert RunDirectory(run.path).read_info().hparams == {"lr": 0.1, "nest": {"a": 1}}
    logged = media(run.path)
    assert logged["img"].steps_completed == 3
    assert logged["img"].files[0].caption == "c"
    assert (run.path / "files" / logged["img"].files[0].path).read_bytes() == b"\x89PNG"
    assert sum(logged["h"].value["counts"]) == 10
    assert [alert.title for alert in read_alerts(RunDirectory(run.path))] == ["title"]
    before = tree(tmp_path / "runs")
    assert run_import(store / "proj.db")[0][0].state == "unchanged"
    assert tree(tmp_path / "runs") == before


def test_media_outside_of_the_store_are_refused(store: Path, run_import: Import) -> None:
    (store.parent / "secret.png").write_bytes(b"secret")
    with sqlite3.connect(store / "proj.db") as database:
        database.execute(
            """UPDATE metrics SET metrics =
            '{"img": {"_type": "trackio.image", "file_path": "../../secret.png"}, "x": 1.0}'
            WHERE step = 3"""
        )
    database.close()
    (run,), problems = run_import(store)
    assert len(problems) == 1
    assert "'img' at step 3 could not be read: The path of a file must be relative" in problems[0]
    assert points(run.path)[-1] == ("training", 3, {"x": 1.0})
    assert not any("secret" in name for name in tree(run.path))
