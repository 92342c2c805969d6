"""Routes of metric series for charts: many at once, down-sampled here."""

from dataclasses import replace

import msgspec
import numpy as np
from fastapi import Response
from numpy.typing import NDArray
from sqlalchemy import Connection

from paceline.master.api._api_router import ApiRouter
from paceline.master.api._experiment_routes import ExperimentId
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import (
    MAX_PAGE,
    Cursor,
    Limit,
    MasterOf,
    RecordsOf,
    experiment_row,
    position_in_rows,
)
from paceline.master.store import (
    Selection,
    cut_curve,
    encode_cursor,
    metric_names,
    read_curve,
    sample_curve,
    smooth_at,
)
from paceline.messages.base import Page
from paceline.messages.metrics import MetricName, SeriesOf, SeriesReply, SeriesRequest

router = ApiRouter(tags=["trials"], route_class=ReadingRoute)


@router.post("/metric-series", response_model=SeriesReply)
def read_metric_series(request: SeriesRequest, master: MasterOf) -> Response:
    """Read points of many series, each down-sampled so that no extreme is lost.

    With `smoothing_steps` each point also has the moving average of the whole series up to it.
    """
    with master.database.read() as connection:
        found = [_read_series(connection, one, request) for one in request.series]
    # Straight to bytes: a model would look at each of a hundred thousand points.
    return Response(msgspec.json.encode({"series": found}), media_type="application/json")


@router.get("/experiments/{experiment_id}/metric-names")
def list_metric_names(
    experiment_id: ExperimentId, records: RecordsOf, limit: Limit = MAX_PAGE, cursor: Cursor = None
) -> Page[MetricName]:
    """List the metrics that an experiment's trials reported so far, by group and name."""
    group, name = position_in_rows(cursor, ["", ""])
    with records.database.read() as connection:
        experiment_row(connection, experiment_id)
        names = metric_names(connection, experiment_id, after=(group, name), limit=limit + 1)
    more = encode_cursor(*names[limit - 1]) if len(names) > limit else None
    items = [MetricName(group=group, name=name) for group, name in names[:limit]]
    return Page(items=items, next_cursor=more)


def _read_series(
    connection: Connection, wanted: SeriesOf, request: SeriesRequest
) -> dict[str, object]:
    selection = Selection(
        trial_id=wanted.trial_id, group=wanted.group, key=wanted.name, after_step=wanted.after_step
    )
    whole, last_step = read_curve(connection, selection, x=request.x)
    curve = cut_curve(whole, request.x_min, request.x_max)
    shown = sample_curve(curve, request.max_points)
    smoothed = {}
    if request.smoothing_steps is not None:
        # Of the whole series, whatever part of it is shown: what comes before counts as well.
        series, everything = whole, replace(selection, after_step=-1)
        if request.x != "batches" or selection != everything:
            series, _ = read_curve(connection, everything)
        smoothed["smoothed"] = _with_gaps(smooth_at(series, shown.steps, request.smoothing_steps))
    return {
        "trial_id": wanted.trial_id,
        "group": wanted.group,
        "name": wanted.name,
        "x": shown.x.tolist(),
        "y": _with_gaps(shown.y),
        "steps": shown.steps.tolist(),
        "num_points": len(curve.x),
        "num_gaps": int(np.count_nonzero(~np.isfinite(curve.y))),
        "last_step": last_step,
        "is_sampled": len(shown.x) < len(curve.x),
        **smoothed,
    }


def _with_gaps(values: NDArray[np.float64]) -> list[float | None]:
    is_finite = np.isfinite(values).tolist()
    return [
        value if finite else None for value, finite in zip(values.tolist(), is_finite, strict=True)
    ]
