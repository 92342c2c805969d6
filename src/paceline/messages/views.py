"""Models of the REST API that the web UI uses beside the common ones."""

from typing import Any, Literal

from pydantic import Field

from paceline.messages.resources import Message, Number, Request
from paceline.messages.states import TrialState


class MetricName(Message):
    """The name of a metric in its group, such as `validation` and `loss`."""

    group: str
    name: str


class ColumnNames(Message):
    """What can be a column of the experiment list beside an experiment's own fields."""

    metrics: list[MetricName]
    hparams: list[str]


class EditExperiment(Request):
    """What to change of an experiment; what is left out or null stays.

    `max_slots` 0 removes the limit.
    """

    name: str | None = Field(default=None, min_length=1, max_length=1000)
    description: str | None = Field(default=None, max_length=100_000)
    labels: list[str] | None = Field(default=None, max_length=100)
    notes: str | None = Field(default=None, max_length=1_000_000)
    priority: int | None = Field(default=None, ge=1, le=99)
    weight: float | None = Field(default=None, gt=0, le=1_000_000)
    max_slots: int | None = Field(default=None, ge=0, le=2**31 - 1)


class ForkExperiment(Request):
    """A new experiment with the code of an existing one.

    `config` overrides fields of the existing configuration, or replaces all of it.
    """

    config: dict[str, Any] = Field(default_factory=dict)
    replaces_config: bool = False
    submitted_config: str | None = Field(default=None, max_length=1_000_000)
    activate: bool = True


class Loss(Message):
    """What deleting an experiment will take away; `obstacle` tells why it cannot be deleted."""

    num_trials: int
    num_checkpoints: int
    checkpoint_bytes: int
    num_metric_points: int
    obstacle: str | None


class Deletion(Message):
    """What was not deleted though it should have been: directories that cannot be removed."""

    left_behind: list[str] = []


class BulkAction(Request):
    """One action on several experiments."""

    action: Literal["pause", "activate", "cancel", "kill", "archive", "unarchive", "delete"]
    experiment_ids: list[int] = Field(min_length=1, max_length=1000)


class BulkResult(Message):
    """How an action on one of several experiments went; `error` None is success."""

    experiment_id: int
    error: str | None = None


class ConfigView(Message):
    """An experiment's configuration: as submitted, if it was a text, and as resolved."""

    submitted: str | None
    resolved: dict[str, Any]
    resolved_yaml: str


class CodeFile(Message):
    """A file of an experiment's code; `size` is in bytes."""

    path: str
    size: int


class ConfigText(Request):
    """A configuration as YAML, to be checked."""

    text: str = Field(max_length=1_000_000)


class ConfigProblem(Message):
    """What is wrong at a place of a configuration; lines count from 1."""

    path: str
    message: str
    line: int | None = None


class CheckedConfig(Message):
    """The configuration in a text, and what is wrong with it; both may be none."""

    config: dict[str, Any] | None
    problems: list[ConfigProblem]
    warnings: list[str] = []


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


class HparamRow(Message):
    """A trial in the hyperparameter table; `hparams` are flat, nested names joined by dots."""

    trial_id: int
    state: TrialState
    hparams: dict[str, Any]
    steps_completed: int
    metric: Number | None


class HparamAxis(Message):
    """A hyperparameter: its type in the search space, and whether it differs between trials."""

    name: str
    type: str
    is_log: bool
    is_varied: bool
    minval: float | None = None
    maxval: float | None = None
    vals: list[Any] | None = None


class HparamTable(Message):
    """The hyperparameters of an experiment's trials, with one metric of each.

    `num_trials` counts all of them. If `is_sampled`, half of the rows are the best trials by the
    searched metric, and the others are spread evenly. A master of before tells neither.
    """

    metric: MetricName
    smaller_is_better: bool
    axes: list[HparamAxis]
    rows: list[HparamRow]
    num_trials: int | None = None
    is_sampled: bool = False


class QueueEntry(Message):
    """A trial that waits for slots, in the order in which they will be given, and why it waits.

    `num_ahead` trials of its pool come before it. The one that holds it up is `behind_trial_id`.
    `priority` and `weight` are there if the policy of its pool asks for them.
    """

    trial_id: int
    experiment_id: int
    experiment_name: str
    num_slots: int
    waiting_since: float
    reason: Literal[
        "slots_in_use",
        "behind_others",
        "max_slots",
        "too_large",
        "pool_limit",
        "preempting",
        "pausing",
        "starting",
    ]
    detail: str
    pool: str = "default"
    num_ahead: int = 0
    behind_trial_id: int | None = None
    behind_experiment_id: int | None = None
    priority: int | None = None
    weight: float | None = None
