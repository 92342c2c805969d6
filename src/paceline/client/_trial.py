"""A trial as the master knows it: its metrics, log lines and checkpoints."""

import time
from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING, Any

from paceline.client._checkpoint import Checkpoint
from paceline.client._errors import NoCheckpointError
from paceline.client._http_session import HttpSession

if TYPE_CHECKING:
    from paceline.client._experiment import Experiment
    from paceline.messages.logs import LogLine
    from paceline.messages.metrics import MetricRow
    from paceline.messages.states import ShownState, TrialState
    from paceline.messages.trials import AttemptEnvironment, TrialTime
    from paceline.messages.trials import Trial as TrialData

_LOG_PAGE = 1000
_FOLLOW_INTERVAL_S = 0.5


class Trial:
    """A training run with fixed hyperparameters; `data` is what the master last said of it."""

    def __init__(self, session: HttpSession, data: "TrialData") -> None:
        self._session = session
        self._num_damaged_lines = 0
        self.data = data

    def __repr__(self) -> str:
        return f"Trial(id={self.id}, state={self.state.value})"

    @property
    def id(self) -> int:
        """The trial's number."""
        return self.data.id

    @property
    def experiment_id(self) -> int:
        """The number of its experiment."""
        return self.data.experiment_id

    @property
    def state(self) -> "TrialState | ShownState":
        """Where the trial stood when it was last read, in the words of the command line.

        `data.state` is the state that the master stores.
        """
        stored, shown = self.data.state, self.data.shown_state
        # Scripts compare by `is TrialState.COMPLETED`.
        return stored if stored.value == shown.value else shown

    @property
    def hparams(self) -> dict[str, Any]:
        """The trial's hyperparameters."""
        return self.data.hparams

    @property
    def steps_completed(self) -> int:
        """The batches trained so far, as reported."""
        return self.data.steps_completed

    @property
    def best_metric(self) -> float | None:
        """The best searched metric so far; None before the first validation."""
        return _number_of_metric(self.data.best_metric)

    def reload(self) -> "Trial":
        """Read the trial again, with its summary and attempts, and return it."""
        from paceline.messages.trials import Trial as TrialData

        self.data = self._session.get(f"trials/{self.id}", TrialData)
        return self

    def experiment(self) -> "Experiment":
        """Return the trial's experiment."""
        from paceline.client._experiment import Experiment
        from paceline.messages.experiments import Experiment as ExperimentData

        data = self._session.get(f"experiments/{self.experiment_id}", ExperimentData)
        return Experiment(self._session, data)

    def time(self) -> "TrialTime":
        """Return what the trial's time went to, such as training, starts and lost work."""
        from paceline.messages.trials import TrialTime

        return self._session.get(f"trials/{self.id}/time", TrialTime)

    def environments(self) -> "list[AttemptEnvironment]":
        """Return what the attempts of the trial ran in, the earliest first.

        A master of before tells of none.
        """
        from paceline.client._errors import ApiError
        from paceline.messages.trials import AttemptEnvironment

        try:
            return self._session.get(f"trials/{self.id}/environments", list[AttemptEnvironment])
        except ApiError as error:
            if error.status != 404:
                raise
            return []

    def kill(self) -> "Trial":
        """End the trial at once, without a checkpoint, and return it as it stands."""
        from paceline.messages.trials import Trial as TrialData

        self.data = self._session.call("POST", f"trials/{self.id}/kill", TrialData)
        return self

    def continue_(
        self, config: dict[str, Any] | None = None, *, activate: bool = True
    ) -> "Experiment":
        """Continue from the latest checkpoint as a new trial of a new experiment.

        Args:
            config: Fields of the configuration to change, nested as in the configuration file.
            activate: Whether to start at once; otherwise the experiment waits, paused.
        """
        from paceline.client._experiment import Experiment
        from paceline.messages.experiments import ContinueTrial
        from paceline.messages.experiments import Experiment as ExperimentData

        body = ContinueTrial(config=config or {}, activate=activate)
        path = f"trials/{self.id}/continue"
        data = self._session.call("POST", path, ExperimentData, body=body, has_key=True)
        return Experiment(self._session, data)

    def iter_metrics(self, group: str | None = None) -> Iterator["MetricRow"]:
        """Yield what was reported, by group and step, without superseded rows.

        Args:
            group: "training", "validation" or another reported group; None for all.
        """
        from paceline.journal import decode_value
        from paceline.messages.metrics import MetricName, MetricRow

        if group is not None:
            groups = {group}
        elif (data := self.reload().data).has_more_metrics:
            names = f"experiments/{data.experiment_id}/metric-names"
            groups = {name.group for name in self._session.pages(names, MetricName)}
        else:
            groups = set(data.summary)
        path = f"trials/{self.id}/metrics"
        for name in sorted(groups):
            for row in self._session.pages(path, MetricRow, group=name):
                yield row.model_copy(update={"metrics": decode_value(row.metrics)})

    def iter_logs(
        self,
        *,
        follow: bool = False,
        after: int | None = None,
        tail: int | None = None,
        rank: int | None = None,
        level: str | None = None,
        stream: str | None = None,
        search: str | None = None,
    ) -> Iterator["LogLine"]:
        """Yield the lines that the trial's processes printed.

        Args:
            follow: Go on until the trial has ended.
            after: Start after the line with this `id`.
            tail: Start at this many lines before the end.
            rank: Only lines of this rank.
            level: Only lines of this level and above, such as "WARNING".
            stream: "stdout" or "stderr" only.
            search: Only lines that contain this text.
        """
        filters = {"rank": rank, "level": level, "stream": stream, "search": search}
        if tail is not None:
            for line in self._log_page(tail=tail, limit=max(tail, 1), **filters):
                after = line.id
                yield line
            # Nothing matched: a line that matches later is new, wherever it stands.
            after = -1 if after is None else after
        while True:
            # Read before the lines: what was printed until the end is then among them.
            has_ended = not follow or _has_ended(self.reload())
            for line in self._log_lines(after, filters):
                after = line.id
                yield line
            if has_ended:
                return
            time.sleep(_FOLLOW_INTERVAL_S)

    def _log_lines(self, after: int | None, filters: dict[str, Any]) -> Iterator["LogLine"]:
        while lines := self._log_page(after=after, limit=_LOG_PAGE, **filters):
            after = lines[-1].id
            yield from lines
            if len(lines) < _LOG_PAGE:
                return

    def _log_page(self, **params: Any) -> list["LogLine"]:
        from paceline.messages.logs import LogPage

        page = self._session.get(f"trials/{self.id}/logs", LogPage, **params)
        self._num_damaged_lines = page.num_damaged
        return page.items

    @property
    def num_damaged_lines(self) -> int:
        """How many damaged lines of output were found and left out, as far as it was read."""
        return self._num_damaged_lines

    def checkpoints(self) -> list[Checkpoint]:
        """Return the trial's checkpoints."""
        from paceline.messages.checkpoints import Checkpoint as CheckpointData

        pages = self._session.pages(f"trials/{self.id}/checkpoints", CheckpointData)
        return [Checkpoint(self._session, data) for data in pages]

    def top_checkpoint(self) -> Checkpoint:
        """Return the checkpoint with the best searched metric, else the latest one.

        Raises:
            NoCheckpointError: The trial has none.
        """
        stored = [c for c in self.checkpoints() if c.state.value == "COMPLETED"]
        if not stored:
            raise NoCheckpointError(f"Trial {self.id} must have a checkpoint, but has none.")
        measured = [c for c in stored if c.metric is not None and isfinite(c.metric)]
        if not measured:
            return max(stored, key=lambda c: c.steps_completed)
        sign = 1 if self.experiment().smaller_is_better else -1
        return min(measured, key=lambda c: sign * (c.metric or 0.0))


def _has_ended(trial: Trial) -> bool:
    return trial.state.is_terminal and not trial.data.is_running


def _number_of_metric(value: Any) -> float | None:
    from paceline.journal import decode_value

    decoded = decode_value(value)
    return None if decoded is None else float(decoded)
