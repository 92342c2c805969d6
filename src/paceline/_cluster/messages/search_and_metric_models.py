"""Pydantic models: searches, hyperparameters, configs to check, series and groups of metrics."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from paceline._cluster.messages.experiment_models import Message, MetricName, Number, Request
from paceline._cluster.messages.states import TrialState

RowId = Annotated[int, Field(ge=1, le=2**62)]


class SeriesOf(Request):
    """Selector of a series; `after_step` restricts the answer to points after a step."""

    trial_id: RowId
    group: str
    name: str
    after_step: int = Field(default=-1, ge=-1, le=2**62)


class SeriesRequest(Request):
    """Request for series, each down-sampled to `max_points` with all extremes kept.

    `x` is "batches", "time" (seconds since the epoch) or the name of a metric of the same group;
    `x_min` and `x_max` cut all series, inclusive. `smoothing_steps` asks for the exponential moving
    average with respect to batches: the weight of earlier points falls to 1/e every so many
    batches, however often the metric was reported.
    """

    series: list[SeriesOf] = Field(min_length=1, max_length=1000)
    max_points: int = Field(default=1000, ge=4, le=100_000)
    x: str = "batches"
    x_min: float | None = None
    x_max: float | None = None
    smoothing_steps: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class Series(Message):
    """Points of a series: `y` is null for NaN, infinite and non-numeric values.

    `steps` has the batches of the points whatever `x` is. `num_points` counts those in the range
    before down-sampling, `num_gaps` the values that are not finite, `last_step` is the
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
    """Requested series in request order, without entries for missing trials."""

    series: list[Series]


class MetricNamesRequest(Request):
    """Request for the names of the metrics that any of some trials has reported."""

    trial_ids: list[RowId] = Field(min_length=1, max_length=1000)


class CountedName(MetricName):
    """Name of a numeric metric, and how many of the trials have it.

    It has an `x_axis` if that is the same one for all of them.
    """

    num_trials: int


_MOST_GROUPED = 1000


class GroupedName(Request):
    """Name of a metric to read of groups."""

    group: str
    name: str


class GroupsRequest(Request):
    """Request for metrics of groups of trials, each group as one curve with its spread.

    `x`, `x_min`, `x_max` and `smoothing_steps` are those of a request for series, but with "time"
    as `x` each trial begins at 0 s. Means and deviations are of the smoothed series; the least and
    the greatest values are of the series as reported. `quantile` asks for that quantile and the
    opposite one of the trials' smoothed values, in place of the least and the greatest value.
    """

    metrics: list[GroupedName] = Field(min_length=1, max_length=100)
    groups: list[Annotated[list[RowId], Field(max_length=1000)]] = Field(
        min_length=1, max_length=1000
    )
    max_points: int = Field(default=400, ge=4, le=10_000)
    x: str = "batches"
    x_min: float | None = None
    x_max: float | None = None
    smoothing_steps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    quantile: float | None = Field(default=None, gt=0, lt=0.5)

    @model_validator(mode="after")
    def _check_size(self) -> "GroupsRequest":
        total = sum(map(len, self.groups))
        if total > _MOST_GROUPED:
            raise ValueError(
                f"All groups must have at most {_MOST_GROUPED} trials, but got {total}."
            )
        return self


class GroupCurve(Message):
    """Curve of a group: at each `x` the mean over the `counts` trials that reach it.

    A trial without a value there counts with the line between its neighbors. `deviations` are
    sample standard deviations (0 for one trial); `lows` and `highs` keep all extremes, also
    those between two `x`. `num_trials` counts the trials with any number in the range.
    """

    x: list[float]
    means: list[float]
    deviations: list[float]
    lows: list[float]
    highs: list[float]
    counts: list[int]
    num_trials: int


class GroupedMetric(Message):
    """Curves of a metric, in the order of the request's groups."""

    groups: list[GroupCurve]


class GroupsReply(Message):
    """Metrics in the order of the request."""

    metrics: list[GroupedMetric]


class NewProposal(Request):
    """Hyperparameters for the next trial of a search; those left out come from a draw."""

    hparams: dict[str, Any] = Field(min_length=1)
    by: str = Field(default="", max_length=100)
    why: str = Field(default="", max_length=500)


class Proposal(Message):
    """Proposal for a search: `trial_id` is None while it waits for the next trial.

    `problem` says why no trial was made of it, after all.
    """

    number: int
    hparams: dict[str, Any]
    by: str
    why: str
    problem: str | None
    created_at: float
    trial_id: int | None


class SearchAsk(Message):
    """Trial that waits for its hyperparameters: `hparams` is the draw that stands in for them."""

    id: str
    hparams: dict[str, Any]


class SearchObjective(Message):
    """Metric of a search that looks at several."""

    metric: str
    smaller_is_better: bool


class SearchObservation(Message):
    """Trial of a search as samplers see it; see `paceline.search.Observation`."""

    id: str
    hparams: dict[str, Any]
    state: str
    loss: float | None
    time: float
    note: Any
    is_earlier: bool
    losses: list[float] = []


class SearchAsks(Message):
    """Open asks of a search, the hyperparameters that vary, and its trials so far.

    A `loss` is smaller for better trials, also where larger values of the metric are better. With
    several `objectives`, observations have `losses` in their order.
    """

    metric: str
    smaller_is_better: bool
    objectives: list[SearchObjective] = []
    parameters: list[dict[str, Any]] = []
    asks: list[SearchAsk] = []
    observations: list[SearchObservation] = []


class HparamRow(Message):
    """A trial in the hyperparameter table; `hparams` are flat, nested names joined by dots."""

    trial_id: int
    state: TrialState
    hparams: dict[str, Any]
    steps_completed: int
    metric: Number | None


class HparamAxis(Message):
    """Hyperparameter: its type in the search space, and whether its value differs by trial."""

    name: str
    type: str
    is_log: bool
    is_varied: bool
    minval: float | None = None
    maxval: float | None = None
    vals: list[Any] | None = None


class HparamTable(Message):
    """Hyperparameters of an experiment's trials, with a metric value per trial.

    `num_trials` counts all of them. If `is_sampled`, half of the rows are the best trials by the
    searched metric, and the others are spread evenly.
    """

    metric: MetricName
    smaller_is_better: bool
    axes: list[HparamAxis]
    rows: list[HparamRow]
    num_trials: int
    is_sampled: bool


class ConfigView(Message):
    """Experiment configuration: as submitted, None if not from a text, and as resolved."""

    submitted: str | None
    resolved: dict[str, Any]
    resolved_yaml: str


class ConfigText(Request):
    """A configuration as YAML, to be checked for an experiment of a project with a template."""

    text: str = Field(max_length=1_000_000)
    project: str | None = Field(default=None, max_length=64)
    template: str | None = Field(default=None, max_length=64)


class ConfigProblem(Message):
    """Problem at a path of a configuration; line numbers start at 1."""

    path: str
    message: str
    line: int | None = None


class CheckedConfig(Message):
    """Configuration parsed from a text, or None, and the problems found, possibly none.

    `filled` are the fields that it gets from templates and policies, each with their name, and
    `resolved` is the whole configuration with them, if it is valid.
    """

    config: dict[str, Any] | None
    problems: list[ConfigProblem]
    warnings: list[str] = []
    filled: dict[str, str] = {}
    resolved: dict[str, Any] | None = None


class RungArrival(Message):
    """State of a rung when a trial arrived: the decision was made from this.

    `order` counts the trials that had arrived, `rank` is the trial's among them, `num_kept` is how
    many could continue. `cutoff` is the metric of the last one that could, None if there was none.
    """

    order: int
    rank: int
    num_kept: int
    cutoff: Number | None


class RungEntry(Message):
    """Trial in a rung; `metric` is None if the trial failed or has not reached the rung.

    `decision` is "waiting" for a trial on its way there, else one of "continued", "stopped",
    "paused", "finished" and "failed". `arrival` is None before the decision, and for decisions of
    earlier versions.
    """

    trial_id: int
    metric: Number | None
    decision: str
    arrival: RungArrival | None = None


class Rung(Message):
    """Rung of a halving search; `length` is the training length at the decision.

    `num_by_decision` counts all of its trials. Of a large rung `entries` has a part, spread evenly
    over the ranks, the first and the last one included.
    """

    length: int
    entries: list[RungEntry]
    num_by_decision: dict[str, int]


class SearchSampler(Message):
    """Sampler of a search: its name, and how many trials have got their hyperparameters.

    `num_fallbacks` of them are draws at random in place of an answer of the sampler; `last_fault`
    says why the last one is.
    """

    name: str
    num_proposed: int
    num_fallbacks: int
    last_fault: str | None


class FrontTrial(Message):
    """Trial of a Pareto front: the values of all objectives at its newest report that counts."""

    trial_id: int
    values: list[Number]
    hparams: dict[str, Any]


class SearchView(Message):
    """Rungs of each bracket; empty for searches without halving.

    `sampler` is None if the search draws by itself. `num_out_of_memory` of its trials have ended
    for want of memory. `front` has the trials that no other dominates, if there are several
    `objectives`, at most 1,000 of `num_in_front`.
    """

    brackets: list[list[Rung]]
    sampler: SearchSampler | None = None
    num_out_of_memory: int = 0
    objectives: list[SearchObjective] = []
    front: list[FrontTrial] = []
    num_in_front: int = 0


class TrialProposal(Message):
    """Who proposed the hyperparameters of a trial, and why.

    With `is_fallback` they are a draw at random in place of an answer of the sampler.
    """

    by: str
    why: str
    is_fallback: bool


class TrialRung(Message):
    """Decision about a trial at a rung; see `RungEntry`."""

    bracket: int
    length: int
    metric: Number | None
    decision: str
    arrival: RungArrival | None


class TrialDecisions(Message):
    """Decisions of the search about a trial: who proposed it, and what it met at the rungs.

    `proposal` is None if the search draws by itself. A rung of more than 1,000 trials can be
    missing in `rungs`.
    """

    proposal: TrialProposal | None
    rungs: list[TrialRung]


class PreviewRow(Message):
    """How many trials will train how long; `length` None means to completion."""

    num_trials: int
    length: int | None


class SearchPreview(Message):
    """Trials and training lengths planned by a search."""

    searcher: str
    unit: str | None
    rows: list[PreviewRow]


class PreviewSearch(Request):
    """Request to preview the search of a configuration."""

    config: dict[str, Any]
