"""The route that gives all points of series as CSV, however many there are."""

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import Query
from fastapi.responses import StreamingResponse
from sqlalchemy import Connection

from paceline.master._master import Master
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._problem_answers import ApiError
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import MasterOf, trial_row
from paceline.master.store import Selection, iter_points

router = ApiRouter(tags=["trials"], route_class=ReadingRoute)

_ROWS_PER_READ = 16_384
_SERIES = re.compile("([0-9]+)/([^/]+)/(.+)", re.DOTALL)
# A spreadsheet takes text that begins so for a formula, and runs it.
_FORMULA = re.compile(r"[=+\-@\t\r]")

SeriesNames = Annotated[
    list[str],
    Query(
        min_length=1,
        max_length=1000,
        description="Each is TRIAL/GROUP/NAME. Percent-encode group and name.",
    ),
]


@router.get(
    "/metric-series.csv",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
def export_metric_series(
    master: MasterOf, series: SeriesNames, x: str = "batches"
) -> StreamingResponse:
    """Export every point of series as CSV, in step order, one series after the other.

    The columns are `series`, `x`, `value`, and `batches` unless that is `x`. With "time" as `x`
    they are in seconds since the epoch. If `x` is a metric, a step at which it was not reported
    has an empty cell.
    """
    selections = [(name, _csv_selection(name)) for name in series]
    with master.database.read() as connection:
        for _, selection in selections:
            trial_row(connection, selection.trial_id)
    return StreamingResponse(
        _csv_lines(master, selections, x),
        media_type="text/csv",
        headers={"Content-Disposition": "attachment", "Cache-Control": "no-store"},
    )


def _csv_selection(name: str) -> Selection:
    found = _SERIES.fullmatch(name)
    if found is None:
        raise ApiError(
            422,
            "invalid_request",
            f"`series` must be TRIAL/GROUP/NAME, but got {name!r}. Hint: 3/validation/loss.",
        )
    trial, group, key = found.groups()
    return Selection(trial_id=int(trial), group=unquote(group), key=unquote(key))


def _csv_lines(master: Master, selections: list[tuple[str, Selection]], x: str) -> Iterator[bytes]:
    batches = [] if x == "batches" else ["batches"]
    yield _encoded([["series", _csv_text(x), "value", *batches]])
    for name, selection in selections:
        after: int | None = -1
        # No read stays open while the client takes its time: it would hold old pages on disk.
        while after is not None:
            with master.database.read() as connection:
                points = _csv_points(connection, replace(selection, after_step=after), x)
                read = list(islice(points, _ROWS_PER_READ))
            after = read[-1][0] if len(read) == _ROWS_PER_READ else None
            yield _encoded(
                [name, _csv_cell(along), _csv_cell(value), *([step] if batches else [])]
                for step, along, value in read
            )


def _csv_points(
    connection: Connection, selection: Selection, x: str
) -> Iterator[tuple[int, Any, Any]]:
    """Yield (step, place on the x axis, value)."""
    points = iter_points(connection, selection)
    if x == "batches":
        yield from ((step, step, value) for step, _, value in points)
    elif x == "time":
        yield from points
    else:
        others = iter_points(connection, replace(selection, key=x))
        other = next(others, None)
        for step, _, value in points:
            while other is not None and other[0] < step:
                other = next(others, None)
            yield step, other[2] if other is not None and other[0] == step else None, value


def _encoded(rows: Any) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "replace")


def _csv_cell(value: Any) -> Any:
    """Return a reported value as a cell: numbers exact, also those that are not finite."""
    if isinstance(value, str):
        return _csv_text(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number or value is None else json.dumps(value)


def _csv_text(text: str) -> str:
    return f"'{text}" if _FORMULA.match(text) else text
