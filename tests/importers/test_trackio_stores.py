"""Import of Trackio's local stores: databases with the tables of its release 0.43."""

import json
import math
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from imported_runs import Import, media, points, run_script, tree

from paceline._base.journal_records import AlertRaised
from paceline._base.run_directory import RunDirectory
from paceline.core._read_runs import read_history, summarize_run

TABLES = """
CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_id TEXT, timestamp TEXT, run_name TEXT,
                      step INTEGER, metrics TEXT);
CREATE TABLE configs (id INTEGER PRIMARY KEY, run_id TEXT, run_name TEXT, config TEXT,
                      created_at TEXT);
CREATE TABLE system_metrics (id INTEGER PRIMARY KEY, run_id TEXT, timestamp TEXT, run_name TEXT,
                             metrics TEXT);
CREATE TABLE alerts (id INTEGER PRIMARY KEY, run_id TEXT, timestamp TEXT, run_name TEXT,
                     title TEXT, text TEXT, level TEXT, step INTEGER);
"""
AT = "2026-12-01T13:40:18.250000+00:00"
SECONDS = 1796132418.25
CONFIG = {"lr": 0.1, "net": {"n": 2}, "_Username": "ann", "_Created": AT, "_Group": "g"}


Log = Callable[..., None]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with one project, which has one run."""
    root = tmp_path / "trackio"
    (root / "media" / "lines" / "first" / "3").mkdir(parents=True)
    (root / "media" / "lines" / "first" / "3" / "a.png").write_bytes(b"\x89PNG")
    with closing(sqlite3.connect(root / "lines.db")) as database, database:
        database.executescript(TABLES)
        row = ("r1", "first", json.dumps(CONFIG), AT)
        database.execute("INSERT INTO configs VALUES (1, ?, ?, ?, ?)", row)
        database.execute("INSERT INTO system_metrics VALUES (1, 'r1', ?, 'first', ?)",
                         (AT, b'{"cpu": 3.5}'))  # fmt: skip
        database.execute("INSERT INTO alerts VALUES (1, 'r1', ?, 'first', 'bad', 't', 'odd', 2)",
                         (AT,))  # fmt: skip
    return root


@pytest.fixture
def log(store: Path) -> Iterator[Log]:
    """Return a function that adds a row of metrics to the run, as text or an object."""
    with closing(sqlite3.connect(store / "lines.db")) as database:

        def add(step: int, values: dict[str, Any] | str) -> None:
            content = values if isinstance(values, str) else json.dumps(values)
            with database:
                database.execute(
                    "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics)"
                    " VALUES ('r1', ?, 'first', ?, ?)",
                    (AT, step, content.encode()),
                )

        yield add


def of_type(kind: str, **value: Any) -> dict[str, Any]:
    return {"_type": f"trackio.{kind}", **value}


def test_run_comes_whole(store: Path, log: Log, run_import: Import) -> None:
    for step in range(2):
        log(step, {"loss": 1 / (step + 1), "odd": "NaN", "low": "-Infinity", "word": "NaNs"})
    log(3, {"image": of_type("image", file_path="lines/first/3/a.png", caption="c"),
            "table": of_type("table", _value=[{"a": 1}, {"b": None}]),
            "text": of_type("markdown", _value="# hi"),
            "counts": of_type("histogram", bins=[0, 1, 2], values=[3, 4])})  # fmt: skip
    runs, problems = run_import(store)
    assert problems == []
    [run] = runs
    assert (run.name, run.state, run.num_files) == ("first", "new", 2)
    rows = points(run.path)
    assert [(group, step) for group, step, _ in rows] == [
        ("training", 0), ("training", 1), ("system", 0)
    ]  # fmt: skip
    values = rows[1][2]
    assert math.isnan(values.pop("odd"))
    assert values == {"loss": 0.5, "low": -math.inf, "word": "NaNs"}
    assert rows[2][2] == {"cpu": 3.5}
    directory = RunDirectory(run.path)
    assert directory.read_info().hparams == {"lr": 0.1, "net": {"n": 2}}
    assert read_history(directory).metadata == {"project": "lines", "group": "g", "user": "ann"}
    shown = media(run.path)
    assert {name: each.kind for name, each in shown.items()} == {
        "image": "image", "table": "table", "text": "text", "counts": "histogram"
    }  # fmt: skip
    assert {each.steps_completed for each in shown.values()} == {3}
    image, table = shown["image"].files[0], shown["table"].files[0]
    assert (image.caption, (run.path / "files" / image.path).read_bytes()) == ("c", b"\x89PNG")
    content = json.loads((run.path / "files" / table.path).read_bytes())
    assert content == {"columns": ["a", "b"], "rows": [[1, None], [None, None]]}
    assert shown["counts"].value == {"bins": [0, 1, 2], "counts": [3, 4]}
    records = (e.decode() for key in directory.journal_keys() for e in directory.reader(key))
    [alert] = [each for each in records if isinstance(each, AlertRaised)]
    assert (alert.title, alert.description, alert.level) == ("bad", "t", "warn")
    assert summarize_run(run.path).created == SECONDS


def test_second_import_adds_what_is_new(
    store: Path, log: Log, run_import: Import, tmp_path: Path
) -> None:
    log(0, {"loss": 1.0})
    run_import(store)
    before = tree(tmp_path / "runs")
    assert [run.state for run in run_import(store / "lines.db")[0]] == ["unchanged"]
    assert tree(tmp_path / "runs") == before
    log(1, {"loss": 0.5})
    [run] = run_import(store)[0]
    assert (run.state, run.num_points) == ("grown", 1)
    assert [row[1] for row in points(run.path) if row[0] == "training"] == [0, 1]


def test_store_of_an_earlier_release_has_runs_by_name(tmp_path: Path, run_import: Import) -> None:
    with closing(sqlite3.connect(tmp_path / "old.db")) as database, database:
        database.executescript(
            "CREATE TABLE metrics (id, timestamp TEXT, run_name TEXT, step, metrics TEXT);"
            "CREATE TABLE configs (id, run_name TEXT, config TEXT, created_at TEXT);"
        )
        row = (1, "2025-09-01T10:00:00", "old", 0, '{"loss": 1}')
        database.execute("INSERT INTO metrics VALUES (?, ?, ?, ?, ?)", row)
    [run] = run_import(tmp_path / "old.db")[0]
    assert (run.name, points(run.path)) == ("old", [("training", 0, {"loss": 1})])


def test_links_are_not_followed_and_damage_is_named(
    store: Path, log: Log, run_import: Import
) -> None:
    (store / "media" / "link.png").symlink_to("/etc/hostname")
    log(0, {"up": of_type("image", file_path="../../../etc/hostname"), "loss": 1.0})
    log(0, {"link": of_type("image", file_path="link.png")})
    log(0, {"gone": of_type("video", file_path="gone.mp4")})
    log(0, {"flat": of_type("table", _value=7), "less": of_type("histogram", bins=[1])})
    log(0, "{damaged")
    log(0, "[" * 100_000)
    log(-5, {"loss": 2.0})
    runs, problems = run_import(store)
    [run] = runs
    named = ("'up'", "'link'", "'gone'", "'flat'", "'less'", "row is damaged", "row is damaged",
             "step -5")  # fmt: skip
    assert len(problems) == len(named), problems
    for text, problem in zip(named, problems, strict=True):
        assert text in problem, f"{text} is not in {problem}"
    assert points(run.path)[0] == ("training", 0, {"loss": 1.0})
    assert not (run.path / "files").exists()


def test_store_that_the_library_writes_is_read(tmp_path: Path, run_import: Import) -> None:
    pytest.importorskip("trackio", reason="NOT TESTED: needs Trackio")
    script = """
        import trackio
        trackio.init(project="lines", name="first", config={"lr": 0.1}, auto_log_gpu=False)
        trackio.log({"loss": 1.0, "odd": float("inf")})
        trackio.finish()
    """
    run_script(
        "\n".join(line.strip() for line in script.splitlines()),
        TRACKIO_DIR=str(tmp_path / "store"), HF_HOME=str(tmp_path / "hf"),
    )  # fmt: skip
    runs, problems = run_import(tmp_path / "store")
    assert problems == []
    [row] = points(runs[0].path)
    assert row == ("training", 0, {"loss": 1.0, "odd": math.inf})
    assert RunDirectory(runs[0].path).read_info().hparams == {"lr": 0.1}
