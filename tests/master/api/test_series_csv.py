"""All points of series as CSV, by HTTP."""

import csv
import io
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

from paceline._cluster.master.api.trial_and_series_routes import _csv_lines, _csv_selection
from paceline._cluster.master.store.series_reader import Points
from paceline._cluster.master.store.series_writer import store_columns

NUM_POINTS = 250_000
Rows = list[list[str]]


def rows_of(reply: httpx2.Response) -> Rows:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/csv; charset=utf-8"
    assert reply.headers["content-disposition"].startswith("attachment")
    return list(csv.reader(io.StringIO(reply.text)))


def read(master: Any, *series: str, **query: Any) -> Rows:
    return rows_of(master.http.get("/metric-series.csv", params={"series": series, **query}))


@pytest.fixture
def reported(master: Any) -> Any:
    """Return a master with two trials that have reported."""
    master.create()
    master.schedule()
    return master


@pytest.mark.long
def test_every_point_of_a_long_series_is_there(reported: Any) -> None:
    steps = list(range(1, NUM_POINTS + 1))
    columns = {
        ("training", "wave"): Points(steps, [n / 4 for n in steps], [n / 3 for n in steps]),
        ("training", "epoch"): Points(steps[9::10], [0.0] * (NUM_POINTS // 10), steps[9::10]),
    }
    reported.core.database.write(
        lambda transaction: store_columns(transaction.connection, 1, 1, columns)
    ).result()
    header, *rows = read(reported, "1/training/wave")
    assert header == ["series", "batches", "value"]
    assert len(rows) == NUM_POINTS
    assert rows == [["1/training/wave", str(n), str(n / 3)] for n in steps]
    header, *rows = read(reported, "1/training/wave", x="epoch")
    assert header == ["series", "epoch", "value", "batches"]
    # A point without a value on the x axis has an empty cell: no point is left out.
    assert [row[1] for row in rows] == ["" if n % 10 else str(n) for n in steps]
    assert rows[9] == ["1/training/wave", "10", str(10 / 3), "10"]


def test_it_comes_in_parts_while_the_client_reads(reported: Any) -> None:
    """The length is not known when the answer begins, so it is not held as a whole."""
    reported.report(1, 0, ("training", 1, {"loss": 0.5}))
    query = {"series": "1/training/loss"}
    with reported.http.stream("GET", "/metric-series.csv", params=query) as reply:
        assert reply.headers["transfer-encoding"] == "chunked"
        assert "content-length" not in reply.headers
        assert next(reply.iter_lines()) == "series,batches,value"


def test_little_is_read_for_the_first_rows(reported: Any, count_reads: Any) -> None:
    steps = list(range(100_000))
    columns = {("training", "x"): Points(steps, [0.0] * len(steps), steps)}
    database = reported.core.database
    database.write(
        lambda transaction: store_columns(transaction.connection, 1, 1, columns)
    ).result()
    with count_reads(database._reader._engine) as reads:
        lines = _csv_lines(
            reported.core, [("1/training/x", _csv_selection("1/training/x"))], "batches"
        )
        begin = next(lines) + next(lines)
    assert len(begin.splitlines()) < 20_000
    # A point has 24 bytes there.
    assert reads.num_bytes < 24 * 20_000


def test_several_series_come_one_after_the_other(reported: Any) -> None:
    reported.report(1, 0, ("training", 1, {"loss": 0.5}), ("training", 2, {"loss": 2}))
    reported.report(2, 0, ("validation", 1, {"a/b": 0.25}))
    rows = read(reported, "2/validation/a/b", "1/training/loss", "1/training/none")
    assert rows[1:] == [
        ["2/validation/a/b", "1", "0.25"],
        ["1/training/loss", "1", "0.5"],
        ["1/training/loss", "2", "2"],
    ]


def test_values_are_as_they_were_reported(reported: Any) -> None:
    values = [{"$float": "nan"}, {"$float": "-inf"}, True, "a,b", "=1+1", [1, "x"], 2**60, -0.5]
    reports = [("training", n, {"odd": value}) for n, value in enumerate(values, 1)]
    reported.report(1, 0, *reports)
    rows = read(reported, "1/training/odd")
    assert [row[2] for row in rows[1:]] == [
        "nan", "-inf", "true", "a,b", "'=1+1", '[1, "x"]', str(2**60), "-0.5",
    ]  # fmt: skip


def test_names_may_have_any_characters(reported: Any) -> None:
    group, name = "my/group, é", '=a"b%2F'
    reported.report(1, 0, (group, 1, {name: 1.5, "x": 3}))
    asked = f"1/{quote(group, safe='')}/{quote(name, safe='')}"
    header, row = read(reported, asked, x="x")
    assert header == ["series", "x", "value", "batches"]
    assert row == [asked, "3", "1.5", "1"]
    assert read(reported, asked, x="=x")[0] == ["series", "'=x", "value", "batches"]


def test_time_is_in_seconds_since_1970(reported: Any) -> None:
    reported.report(1, 7, ("training", 3, {"loss": 0.5}))
    header, row = read(reported, "1/training/loss", x="time")
    assert header == ["series", "time", "value", "batches"]
    assert row == ["1/training/loss", "7.0", "0.5", "3"]


@pytest.mark.parametrize("series", ["", "1", "1/training", "one/training/loss", "1//a"])
def test_a_series_that_names_none_is_refused(reported: Any, series: str) -> None:
    reply = reported.http.get("/metric-series.csv", params={"series": series})
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request")
    assert repr(series) in reply.json()["detail"]


def test_a_trial_that_is_not_there_is_told_before_anything_is_sent(reported: Any) -> None:
    query = {"series": ["1/training/loss", "99/training/loss"]}
    reply = reported.http.get("/metric-series.csv", params=query)
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")
