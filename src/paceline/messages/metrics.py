"""Models of the REST API on metrics: rows, summaries and series."""

from typing import Any

from pydantic import Field

from paceline.messages.base import Message, Number, Request


class MetricName(Message):
    """The name of a metric in its group, such as `validation` and `loss`."""

    group: str
    name: str


class MetricSummary(Message):
    """Summary of one visible series; the numeric fields are None for other values."""

    count: int
    last: Any
    last_step: int
    min: Number | None = None
    max: Number | None = None
    mean: Number | None = None


class MetricRow(Message):
    """What one attempt reported for one group and step; superseded rows are not listed."""

    group: str
    steps_completed: int
    attempt: int
    time: float
    metrics: dict[str, Any]


class SeriesOf(Request):
    """Which series to read, and beyond which step if only what is new is wanted."""

    trial_id: int = Field(ge=1, le=2**62)
    group: str
    name: str
    after_step: int = Field(default=-1, ge=-1, le=2**62)


class SeriesRequest(Request):
    """Series to read, each down-sampled to `max_points` so that no extreme is lost.

    `x` is "batches", "time" (seconds since the epoch) or the name of a metric of the same group;
    `x_min` and `x_max` cut all series, inclusive. `smoothing_steps` asks for the exponential moving
    average with respect to batches: the weight of what lies before falls to 1/e every so many of
    them, however often the metric was reported.
    """

    series: list[SeriesOf] = Field(min_length=1, max_length=1000)
    max_points: int = Field(default=1000, ge=4, le=100_000)
    x: str = "batches"
    x_min: float | None = None
    x_max: float | None = None
    smoothing_steps: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class Series(Message):
    """Points of one series: `y` is null where a value is NaN, infinite or no number.

    `steps` has the batches of the points whatever `x` is. `num_points` counts those in the range
    before down-sampling, `num_gaps` those of them that are no finite number, `last_step` is the
    newest step of all; pass it as `after_step` for what comes later. `smoothed` is there if it was
    asked for: the average at each of the points, made of all points of the series up to there.
    """

    trial_id: int
    group: str
    name: str
    x: list[float]
    y: list[float | None]
    steps: list[int]
    num_points: int
    num_gaps: int
    last_step: int
    is_sampled: bool
    smoothed: list[float | None] | None = None


class SeriesReply(Message):
    """The series asked for, in that order; trials that do not exist have none."""

    series: list[Series]
