"""Tracker for MLflow."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from paceline.core import MetricPoint, Outcome, TrackedRun, Tracker
from paceline.integrations._required_library import required_library

_STATUS = {Outcome.COMPLETED: "FINISHED", Outcome.PREEMPTED: "KILLED"}
_RUN_TAG = "paceline.run_id"
_CHECKPOINT_TAG = "paceline.checkpoint"
# MLflow's limits: metrics and parameters of a call, and characters of a value and of a name.
_MOST_METRICS = 1000
_MOST_PARAMETERS = 100
_LONGEST_PARAMETER = 6000
_LONGEST_TAG = 5000
_LONGEST_NAME = 250
_NOT_IN_NAMES = re.compile(r"[^\w./ :-]")


class MLflowTracker(Tracker):
    """Show runs in MLflow: metrics, hyperparameters, URLs of checkpoints, and how the run ended.

    A run that goes on stays one run of MLflow. Its status is FINISHED, FAILED, or KILLED if it was
    preempted. The newest checkpoint is the tag `paceline.checkpoint`; all that exist are the tags
    `paceline.checkpoint.<UUID>`.

    Args:
        tracking_uri: Where MLflow keeps runs; by default what MLflow itself takes, such as the
            variable MLFLOW_TRACKING_URI.
        experiment_name: The experiment of MLflow, made if it is not there; by default what the
            variable MLFLOW_EXPERIMENT_NAME says, else MLflow's own default.
        run_name: The name of the run there; by default that of the run.
        tags: Further tags.
        ranks: Whose metrics, see `core.Tracker`.
        groups: Which groups of metrics, see `core.Tracker`.
        close_timeout_s: How long the end of a run waits for MLflow, in seconds.

    Raises:
        ImportError: MLflow is not installed.
    """

    name = "mlflow"

    def __init__(
        self,
        tracking_uri: str | None = None,
        *,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
        ranks: int | Iterable[int] | None = 0,
        groups: Collection[str] | None = ("training", "validation"),
        close_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(ranks, groups=groups, close_timeout_s=close_timeout_s)
        # Here, so that loading it takes no time of training.
        self._tracking = required_library("mlflow.tracking", "MLflowTracker", "paceline[mlflow]")
        self._entities = required_library("mlflow.entities", "MLflowTracker", "paceline[mlflow]")
        self._tracking_uri = tracking_uri
        self._experiment_name = experiment_name
        self._run_name = run_name
        self._tags = dict(tags or {})
        self._client: Any = None
        self._run_id = ""
        self._checkpoints: set[str] = set()

    def start(self, run: TrackedRun) -> str:
        """Make a run, or set an earlier one running again."""
        self._client = self._tracking.MlflowClient(self._tracking_uri)
        experiment = self._experiment()
        found = run.tracked_as or self._earlier(experiment, run)
        if found is None:
            tags = {_RUN_TAG: run.run_id, "paceline.run_dir": str(run.run_dir), **self._tags}
            name = self._run_name or run.name
            found = self._client.create_run(experiment, tags=tags, run_name=name).info.run_id
            self._run_id = found
        else:
            self._run_id = found
            self._client.update_run(found, status="RUNNING")
        known = self._client.get_run(found).data
        self._checkpoints = {tag for tag in known.tags if tag.startswith(f"{_CHECKPOINT_TAG}.")}
        # MLflow refuses another value of a parameter that it has.
        new = {key: value for key, value in _parameters(run.config) if key not in known.params}
        parameters = [self._entities.Param(key, value) for key, value in new.items()]
        for index in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(
                self._run_id, params=parameters[index : index + _MOST_PARAMETERS]
            )
        return self._run_id

    def log_metrics(self, points: Sequence[MetricPoint]) -> None:
        """Add points."""
        metrics = [
            self._entities.Metric(_name(each.name), each.value, int(each.time * 1000), each.step)
            for each in points
        ]
        for index in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[index : index + _MOST_METRICS])

    def log_checkpoints(self, checkpoints: Mapping[str, str], newest: str) -> None:
        """Set tags with their URLs."""
        urls = {f"{_CHECKPOINT_TAG}.{uuid}": url for uuid, url in checkpoints.items()}
        tags = {name: url for name, url in urls.items() if name not in self._checkpoints}
        tags[_CHECKPOINT_TAG] = checkpoints.get(newest, newest)
        all_tags = [self._entities.RunTag(key, url[:_LONGEST_TAG]) for key, url in tags.items()]
        self._client.log_batch(self._run_id, tags=all_tags)
        for name in self._checkpoints - urls.keys():
            self._client.delete_tag(self._run_id, name)
        self._checkpoints = set(urls)

    def finish(self, outcome: Outcome, error: str | None) -> None:
        """Set the status."""
        tags = {"paceline.outcome": outcome.value, "paceline.error": error}
        for key, value in tags.items():
            if value is not None:
                self._client.set_tag(self._run_id, key, value[:_LONGEST_TAG])
        self._client.set_terminated(self._run_id, _STATUS.get(outcome, "FAILED"))

    def _experiment(self) -> str:
        """Return the identity of the experiment."""
        name = self._experiment_name
        if name is None:
            fluent = required_library("mlflow.tracking.fluent", "MLflowTracker", "paceline[mlflow]")
            found: str = fluent._get_experiment_id()
            return found
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            made: str = self._client.create_experiment(name)
            return made
        return str(experiment.experiment_id)

    def _earlier(self, experiment: str, run: TrackedRun) -> str | None:
        """Return the run that another attempt has made, if its run directory is gone."""
        if not run.attempt:
            return None
        runs = self._client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{run.run_id}'")
        return runs[0].info.run_id if runs else None


def _parameters(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _parameters(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield _name(f"{prefix}{name}"), text[:_LONGEST_PARAMETER]


def _name(name: str) -> str:
    """Return a name with the characters that MLflow allows."""
    allowed = _NOT_IN_NAMES.sub("_", name)[:_LONGEST_NAME]
    # A name must not look like a path out of the run, or one that begins at the root.
    return "/".join("_" if part in ("", ".", "..") else part for part in allowed.split("/"))
