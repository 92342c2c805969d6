"""Trackers for MLflow, TensorBoard, and Weights & Biases."""

import atexit
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline._base.imports import required_library
from paceline.core._arguments import Outcome
from paceline.core._trackers import MetricPoint, TrackedRun, Tracker

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

    A resumed run stays one run of MLflow. Its status is FINISHED, FAILED, or KILLED if it was
    preempted. The newest checkpoint is the tag `paceline.checkpoint`; all that exist are the tags
    `paceline.checkpoint.<UUID>`.

    Args:
        tracking_uri: Where MLflow keeps runs; by default MLflow's own choice, such as the
            variable MLFLOW_TRACKING_URI.
        experiment_name: The experiment of MLflow, made if it is not there; by default what the
            variable MLFLOW_EXPERIMENT_NAME says, else MLflow's own default.
        run_name: The name of the run there; by default the run's own.
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
        """Create a run, or set an earlier run running again."""
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
        """Return the run created by an earlier attempt, in case the run directory is gone."""
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
    """Return a name with only the characters allowed by MLflow."""
    allowed = _NOT_IN_NAMES.sub("_", name)[:_LONGEST_NAME]
    # A name must not look like a path out of the run, or one that begins at the root.
    return "/".join("_" if part in ("", ".", "..") else part for part in allowed.split("/"))


class TensorBoardTracker(Tracker):
    """Write runs as TensorBoard files: metrics, hyperparameters, URLs of checkpoints, the end.

    Args:
        logdir: The directory; ``tensorboard`` in the run directory by default.
        ranks: Whose metrics, see `core.Tracker`.
        groups: Which groups of metrics, see `core.Tracker`.
        close_timeout_s: How long the end of a run waits for the file system, in seconds.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    name = "tensorboard"

    def __init__(
        self,
        logdir: str | Path | None = None,
        *,
        ranks: int | Iterable[int] | None = 0,
        groups: Collection[str] | None = ("training", "validation"),
        close_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(ranks, groups=groups, close_timeout_s=close_timeout_s)
        required_library("tensorboard", "TensorBoardTracker", "paceline[tensorboard]")
        self._writers = required_library(
            "torch.utils.tensorboard", "TensorBoardTracker", "paceline[tensorboard]"
        )
        self._logdir = None if logdir is None else Path(logdir)
        self._writer: Any = None
        self._step = 0

    def start(self, run: TrackedRun) -> str:
        """Open the directory."""
        path = str(self._logdir or run.run_dir / "tensorboard")
        self._writer = self._writers.SummaryWriter(path)
        self._writer.add_text("config", f"```\n{json.dumps(dict(run.config), indent=2)}\n```")
        return path

    def log_metrics(self, points: Sequence[MetricPoint]) -> None:
        """Write scalars."""
        for each in points:
            self._writer.add_scalar(each.name, each.value, each.step, walltime=each.time)
            self._step = max(self._step, each.step)
        self._writer.flush()

    def log_checkpoints(self, checkpoints: Mapping[str, str], newest: str) -> None:
        """Write their URLs as text."""
        urls = "\n".join(f"- {url}" for url in checkpoints.values())
        self._writer.add_text("checkpoints", urls, self._step)
        self._writer.flush()

    def finish(self, outcome: Outcome, error: str | None) -> None:
        """Write how the run has ended, and close the file."""
        text = outcome.value if error is None else f"{outcome.value}: {error}"
        self._writer.add_text("outcome", text, self._step)
        self._writer.close()


_STEP = "step"


class WandbTracker(Tracker):
    """Show runs in Weights & Biases: metrics, hyperparameters, URLs of checkpoints, and the end.

    A resumed run stays one run there. Metrics have their step as "step", which is the axis of
    their charts. The summary has "checkpoint", the URL of the newest one, and "checkpoints", the
    URLs of all that exist.

    Args:
        project: The project; by default W&B's own choice, such as the variable WANDB_PROJECT.
        entity: The team or user; W&B's own default.
        mode: "online", "offline" or "disabled"; by default the value of the variable WANDB_MODE.
        run_name: The name of the run there; by default the run's own.
        directory: Where W&B keeps its files; the run directory by default.
        tags: Tags of the run.
        ranks: Whose metrics, see `core.Tracker`.
        groups: Which groups of metrics, see `core.Tracker`.
        close_timeout_s: How long the end of a run waits for W&B, in seconds.

    Raises:
        ImportError: W&B is not installed.
    """

    name = "wandb"

    def __init__(
        self,
        project: str | None = None,
        *,
        entity: str | None = None,
        mode: Any = None,
        run_name: str | None = None,
        directory: str | None = None,
        tags: Iterable[str] = (),
        ranks: int | Iterable[int] | None = 0,
        groups: Collection[str] | None = ("training", "validation"),
        close_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(ranks, groups=groups, close_timeout_s=close_timeout_s)
        # Here, so that loading it takes no time of training.
        self._wandb: Any = required_library("wandb", "WandbTracker", "paceline[wandb]")
        self._options = {"project": project, "entity": entity, "mode": mode, "tags": [*tags]}
        self._run_name = run_name
        self._directory = directory
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        """Create a run, or resume an earlier run."""
        self._run = self._wandb.init(
            **self._options,
            id=run.run_id,
            name=self._run_name or run.name,
            dir=self._directory or str(run.run_dir),
            config=dict(run.config),
            resume="allow",
            # Another run of this process may be active, such as one of the user's own.
            reinit="create_new",
            settings=self._wandb.Settings(silent=True, console="off", disable_git=True),
        )
        self._run.define_metric("*", step_metric=_STEP)
        return run.run_id

    def log_metrics(self, points: Sequence[MetricPoint]) -> None:
        """Add points; the points of a report become a single row."""
        rows: dict[tuple[int, float], dict[str, float]] = {}
        for each in points:
            rows.setdefault((each.step, each.time), {})[each.name] = each.value
        for (step, time), row in rows.items():
            self._run.log({**row, _STEP: step, "_timestamp": time})

    def log_checkpoints(self, checkpoints: Mapping[str, str], newest: str) -> None:
        """Set their URLs in the summary."""
        self._run.summary["checkpoint"] = checkpoints.get(newest, newest)
        self._run.summary["checkpoints"] = dict(checkpoints)

    def finish(self, outcome: Outcome, error: str | None) -> None:
        """Set the status; a preempted run counts as failed in W&B until the run resumes."""
        self._run.summary["outcome"] = outcome.value
        if error is not None:
            self._run.summary["error"] = error
        self._run.finish(exit_code=0 if outcome is Outcome.COMPLETED else 1)

    def abandon(self) -> None:
        """Keep this process's exit from waiting for W&B's own exit if W&B still hangs then."""
        # Handlers run last in, first out: before W&B's own, which waits without a limit.
        atexit.register(self._end_service)

    def _end_service(self) -> None:
        if not self.turn.locked():
            return
        # Checked with wandb 0.31, which offers no public way.
        setup: Any = self._wandb.setup()
        connection = getattr(setup, "_connection", None)
        process = getattr(getattr(connection, "_proc", None), "_process", None)
        if process is not None:
            process.kill()
