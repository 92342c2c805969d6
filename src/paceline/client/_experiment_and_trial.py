"""Experiments and trials as the master knows them: states, metrics, log lines."""

import heapq
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote
from zlib import crc32

from paceline._base.imports import DataFrames, Rows, flatten, html_table, metric_rows
from paceline.client import _late_models as models
from paceline.client._checkpoint import Checkpoint, check_new_directory
from paceline.client._event_stream import EventStream
from paceline.client._experiment_lineage import (
    ROLES,
    Arm,
    Lineage,
    Repeats,
    compared,
    repeated_config,
    upload_code,
)
from paceline.client._http_session import (
    DownloadError,
    HttpSession,
    MasterUnreachableError,
    NoCheckpointError,
    checked_key,
)

if TYPE_CHECKING:
    from paceline._cluster.messages.states import ExperimentState, ShownState, TrialState


_LOG_PAGE = 1000
_FOLLOW_INTERVAL_S = 0.5


class Trial(DataFrames):
    """Training run with fixed hyperparameters; `data` is the master's last known state."""

    def __init__(self, session: HttpSession, data: "models.Trial") -> None:
        self._session = session
        self._num_damaged_lines = 0
        self.data = data

    def __repr__(self) -> str:
        return f"Trial(id={self.id}, state={self.state.value})"

    def _repr_html_(self) -> str:
        facts = {
            "experiment": self.experiment_id,
            "state": self.state.value,
            "batches": self.steps_completed,
            "best metric": "-" if self.best_metric is None else self.best_metric,
            **flatten(self.hparams),
        }
        return html_table(f"Trial {self.id}", (), facts.items())

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
        """State of the trial when last read, in the words of the command line.

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
        """Read the trial again, with its summary and attempts, and return the trial."""

        self.data = self._session.get(f"trials/{self.id}", models.Trial)
        return self

    def experiment(self) -> "Experiment":
        """Return the trial's experiment."""

        data = self._session.get(f"experiments/{self.experiment_id}", models.Experiment)
        return Experiment(self._session, data)

    def time(self) -> "models.TrialTime":
        """Return the trial's time by use, for example training, starts and lost work."""

        return self._session.get(f"trials/{self.id}/time", models.TrialTime)

    def decisions(self) -> "models.TrialDecisions":
        """Return who proposed the trial, and what the search decided about it at its rungs."""

        return self._session.get(f"trials/{self.id}/decisions", models.TrialDecisions)

    def environments(self) -> "list[models.AttemptEnvironment]":
        """Return the environments of the trial's attempts, the earliest first."""

        return self._session.get(f"trials/{self.id}/environments", list[models.AttemptEnvironment])

    def kill(self) -> "Trial":
        """End the trial at once, without a checkpoint, and return its present state."""

        self.data = self._session.call("POST", f"trials/{self.id}/kill", models.Trial)
        return self

    def stop(self) -> "Trial":
        """Let the trial store a checkpoint and end, and return its present state."""

        self.data = self._session.call("POST", f"trials/{self.id}/stop", models.Trial)
        return self

    def continue_(
        self,
        config: dict[str, Any] | None = None,
        *,
        activate: bool = True,
        key: str | None = None,
        code: str | Path | None = None,
    ) -> "Experiment":
        """Continue from the latest checkpoint as a new trial of a new experiment.

        Args:
            config: Fields of the configuration to change, nested as in the configuration file.
            activate: Whether to start at once; otherwise the experiment waits, paused.
            key: A key of your own, as for `Client.create_experiment`.
            code: A directory with changed code; None takes the code of the trial.
        """

        given = upload_code(self._session, code)
        body = models.ContinueTrial(config=config or {}, activate=activate, **given)
        path = f"trials/{self.id}/continue"
        data = self._session.call("POST", path, models.Experiment, body=body, key=checked_key(key))
        return Experiment(self._session, data)

    def iter_metrics(self, group: str | None = None) -> Iterator["models.MetricRow"]:
        """Yield the reported metrics, by group and step, without superseded rows.

        Args:
            group: "training", "validation" or another reported group; None for all.
        """
        from paceline._base.journal_records import decode_value

        if group is not None:
            groups = {group}
        elif (data := self.reload().data).has_more_metrics:
            names = f"experiments/{data.experiment_id}/metric-names"
            groups = {name.group for name in self._session.pages(names, models.MetricName)}
        else:
            groups = set(data.summary)
        path = f"trials/{self.id}/metrics"
        for name in sorted(groups):
            for row in self._session.pages(path, models.MetricRow, group=name):
                yield row.model_copy(update={"metrics": decode_value(row.metrics)})

    def rows(self, group: str | None = None) -> Rows:
        """Return the reported metrics as rows for data frames, as `to_pandas` has them.

        Args:
            group: As for `iter_metrics`.
        """
        rows = metric_rows(
            (row.model_dump(include={"group", "steps_completed", "attempt"}), row.metrics)
            for row in self.iter_metrics(group)
        )
        return Rows(f"reports of trial {self.id}", rows)

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
        pattern: str | None = None,
    ) -> Iterator["models.LogLine"]:
        """Yield the lines printed by the trial's processes.

        Args:
            follow: Continue until the trial has ended.
            after: Start after the line with this `id`.
            tail: Start at this many lines before the end.
            rank: Only lines of this rank.
            level: Only lines of this level and above, such as "WARNING".
            stream: "stdout" or "stderr" only.
            search: Only lines that contain this text.
            pattern: Only lines that hold this regular expression of RE2, regardless of case.
        """
        filters = {"rank": rank, "level": level, "stream": stream, "search": search}
        filters["pattern"] = pattern
        if tail is not None:
            for line in self._log_page(tail=tail, limit=max(tail, 1), **filters):
                after = line.id
                yield line
            # Nothing matched: a line that matches later is new, wherever it stands.
            after = -1 if after is None else after
        while True:
            # Read before the lines: all output up to the end is then among them.
            has_ended = not follow or _has_ended(self.reload())
            for line in self._log_lines(after, filters):
                after = line.id
                yield line
            if has_ended:
                return
            time.sleep(_FOLLOW_INTERVAL_S)

    def _log_lines(self, after: int | None, filters: dict[str, Any]) -> Iterator["models.LogLine"]:
        while lines := self._log_page(after=after, limit=_LOG_PAGE, **filters):
            after = lines[-1].id
            yield from lines
            if len(lines) < _LOG_PAGE:
                return

    def _log_page(self, **params: Any) -> list["models.LogLine"]:

        page = self._session.get(f"trials/{self.id}/logs", models.LogPage, **params)
        self._num_damaged_lines = page.num_damaged
        return page.items

    @property
    def num_damaged_lines(self) -> int:
        """Number of damaged output lines found and left out so far."""
        return self._num_damaged_lines

    def media_names(self) -> "list[models.MediaName]":
        """Return group, name and kind of the media that the trial has reported."""

        return self._session.get(f"trials/{self.id}/media-names", list[models.MediaName])

    def media(self, name: str, group: str = "training") -> "list[models.Media]":
        """Return the media reported under a name, by step, without what was repeated later."""

        path = f"trials/{self.id}/media"
        return [*self._session.pages(path, models.Media, name=name, group=group)]

    def files(self, prefix: str = "") -> "list[models.RunFile]":
        """Return the trial's files by path, those whose path begins with `prefix`."""

        return [*self._session.pages(f"trials/{self.id}/files", models.RunFile, prefix=prefix)]

    def download_file(self, path: str, to: str | Path) -> Path:
        """Copy a file of the trial, such as one of its media, and return its place here.

        Args:
            path: The file, as in `files`.
            to: The file to write; one that is there is replaced.

        Raises:
            ApiError: The trial has no such file.
            OSError: It cannot be written.
        """
        from paceline._base.files import replacing_atomically

        target = Path(to)
        with replacing_atomically(target) as written:
            self._session.stream_to_file(f"trials/{self.id}/files/{quote(path)}", written)
        return target

    def checkpoints(self) -> list[Checkpoint]:
        """Return the trial's checkpoints."""

        pages = self._session.pages(f"trials/{self.id}/checkpoints", models.Checkpoint)
        return [Checkpoint(self._session, data) for data in pages]

    def top_checkpoint(self) -> Checkpoint:
        """Return the checkpoint with the best searched metric, else the latest checkpoint.

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
    from paceline._base.journal_records import decode_value

    decoded = decode_value(value)
    return None if decoded is None else float(decoded)


# A master may be restarted while somebody waits for an experiment.
_PATIENCE_S = 600.0
_FIRST_PAUSE_S = 0.1


class Experiment(Lineage, DataFrames):
    """Configuration, code and trials; `data` is the master's last known state."""

    def __init__(self, session: HttpSession, data: "models.Experiment") -> None:
        self._session = session
        self._num_damaged_lines = 0
        self.data = data

    def __repr__(self) -> str:
        return f"Experiment(id={self.id}, name={self.name!r}, state={self.state.value})"

    def _repr_html_(self) -> str:
        facts = {
            "state": self.state.value,
            "progress": f"{self.progress:.0%}",
            "trials": self.data.num_trials,
            f"best {self.metric}": "-" if self.best_metric is None else self.best_metric,
            "best trial": self.data.best_trial_id or "-",
            "labels": ", ".join(self.data.labels),
        }
        return html_table(f"Experiment {self.id}: {self.name}", (), facts.items())

    @property
    def id(self) -> int:
        """The experiment's number."""
        return self.data.id

    @property
    def name(self) -> str:
        """Name from the experiment's configuration."""
        return self.data.name

    @property
    def state(self) -> "ExperimentState | ShownState":
        """State of the experiment when last read, in the words of the command line.

        `data.state` is the state that the master stores.
        """
        stored, shown = self.data.state, self.data.shown_state
        # Scripts compare by `is ExperimentState.COMPLETED`.
        return stored if stored.value == shown.value else shown

    @property
    def progress(self) -> float:
        """Completed part of the search, from 0 to 1 inclusive."""
        return self.data.progress

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return self.data.config

    @property
    def metric(self) -> str:
        """The name of the searched metric."""
        return self.data.metric

    @property
    def smaller_is_better(self) -> bool:
        """Whether the search looks for the smallest value of the metric."""
        return self.data.smaller_is_better

    @property
    def best_metric(self) -> float | None:
        """The best searched metric of all trials; None before the first validation."""
        return _number_of_metric(self.data.best_metric)

    def reload(self) -> "Experiment":
        """Read the experiment again and return the experiment."""

        self.data = self._session.get(f"experiments/{self.id}", models.Experiment)
        return self

    def pause(self) -> "Experiment":
        """Let running trials store a checkpoint and leave; `activate` resumes from there."""
        return self._command("pause")

    def activate(self) -> "Experiment":
        """Resume after `pause`, or start an experiment created paused."""
        return self._command("activate")

    def cancel(self) -> "Experiment":
        """Let running trials store a checkpoint and leave, and end the experiment."""
        return self._command("cancel")

    def kill(self) -> "Experiment":
        """End all trials at once, without checkpoints, and end the experiment."""
        return self._command("kill")

    def archive(self) -> "Experiment":
        """Archive an ended experiment, so lists leave the experiment out."""
        return self._command("archive")

    def unarchive(self) -> "Experiment":
        """Take an experiment back from the archive."""
        return self._command("unarchive")

    def set_priority(self, priority: int) -> "Experiment":
        """Set the priority in pools with the policy `priority`: 1 comes first, 99 last.

        Raises:
            ApiError: The experiment has ended, or the priority is not possible.
        """
        return self._change(priority=priority)

    def set_weight(self, weight: float) -> "Experiment":
        """Set the weight in pools with the policy `fair_share`; raises like `set_priority`."""
        return self._change(weight=weight)

    def set_max_slots(self, max_slots: int | None) -> "Experiment":
        """Set how many slots its trials may use at once; None removes the limit.

        Running trials continue. Raises like `set_priority`.
        """
        return self._change(max_slots=max_slots or 0)

    def edit(
        self,
        *,
        name: str | None = None,
        labels: Sequence[str] | None = None,
        notes: str | None = None,
        priority: int | None = None,
        weight: float | None = None,
        max_slots: int | None = None,
        limits: Mapping[str, float | None] | None = None,
        project: str | None = None,
    ) -> "Experiment":
        """Change several fields together, or none of them; None leaves a field as it is.

        Args:
            name: The new name.
            labels: The new labels, in place of those before.
            notes: The new notes.
            priority: As `set_priority` takes it.
            weight: As `set_weight` takes it.
            max_slots: As `set_max_slots` takes it, but 0 removes the limit.
            limits: New limits of the search, by their names in `searcher.limits`; None removes one.
            project: The project to move it into.

        Raises:
            ApiError: One of them is not possible.
        """
        return self._change(
            name=name,
            labels=None if labels is None else list(labels),
            notes=notes,
            priority=priority,
            weight=weight,
            max_slots=max_slots,
            limits=None if limits is None else dict(limits),
            project=project,
        )

    def fork(
        self,
        config: dict[str, Any] | None = None,
        *,
        activate: bool = True,
        key: str | None = None,
        code: str | Path | None = None,
    ) -> "Experiment":
        """Create an experiment with this experiment's code, and return the new experiment.

        Args:
            config: Fields of the configuration to change.
            activate: Whether the new experiment starts at once; else it is paused.
            key: A key of your own, as for `Client.create_experiment`.
            code: A directory with changed code; `diff` shows the changes.
        """

        given = upload_code(self._session, code)
        body = models.ForkExperiment(config=config or {}, activate=activate, **given)
        path = f"experiments/{self.id}/fork"
        data = self._session.call("POST", path, models.Experiment, body=body, key=checked_key(key))
        return Experiment(self._session, data)

    def repeat(
        self,
        seeds: int = 5,
        *,
        trial: int | None = None,
        baseline: int | None = None,
        activate: bool = True,
        key: str | None = None,
    ) -> "list[Experiment]":
        """Train a trial again with other seeds, and a baseline with the same ones.

        Each becomes an experiment of `seeds` trials; `repeats` compares them.

        Args:
            seeds: How many times, at least 2.
            trial: The trial; by default the best one.
            baseline: A trial of any experiment of this code to compare with; None for none.
            activate: Whether they start at once; otherwise they wait, paused.
            key: A key of your own, as for `Client.create_experiment`.

        Raises:
            ValueError: There are fewer than 2 seeds, or no trial has been validated yet.
            ApiError: The master refused.
        """

        chosen = self.data.best_trial_id if trial is None else trial
        if seeds < 2 or chosen is None:
            raise ValueError(
                f"`seeds` must be at least 2, and a trial must be there, but got {seeds} and"
                f" {chosen}. Hint: wait for the first validation."
            )
        # A repeated request must be the same one.
        seed = secrets.randbelow(2**31) if key is None else crc32(key.encode()) >> 1
        made = []
        for role, number in (("repeat", chosen), ("baseline", baseline)):
            if number is not None:
                hparams = self._session.get(f"trials/{number}", models.Trial).hparams
                config = repeated_config(self.data, hparams, f"{role}:{number}", seeds, seed)
                body = models.ForkExperiment(config=config, replaces_config=True, activate=activate)
                path = f"experiments/{self.id}/fork"
                once = None if key is None else checked_key(f"{key}:{role}")
                data = self._session.call("POST", path, models.Experiment, body=body, key=once)
                made.append(Experiment(self._session, data))
        return made

    def repeats(self) -> "Repeats | None":
        """Return what the repeats of its trials say about its gain; None without repeats."""

        arms: dict[str, Arm] = {}
        for one in self.tree():
            roles = [label for label in one.labels if label.partition(":")[0] in ROLES]
            if one.parent == self.id and roles:
                role, _, number = roles[-1].partition(":")
                pages = self._session.pages(f"experiments/{one.id}/trials", models.Trial)
                values = {trial.seed: _number_of_metric(trial.best_metric) for trial in pages}
                # The newest of each kind counts.
                arms[role] = Arm(int(number), one.id, values, one.state == "COMPLETED")
        if "repeat" not in arms:
            return None
        return compared(arms["repeat"], arms.get("baseline"), self.data)

    def forked_config(self, config: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the configuration that `fork` would store for the same changes.

        Raises:
            ConfigError: The configuration would be wrong.
        """
        from paceline.config._validate_config import merge_configs, validate_config

        low = {**self.config, "name": f"{self.name} (fork)"}
        return validate_config(merge_configs(low, config or {})).to_json()

    def download_code(self, path: str | Path) -> int:
        """Copy the code and the configuration, as `config.yaml`, into a new or empty directory.

        Returns:
            The number of files of the code.

        Raises:
            DownloadError: The directory holds files already, or a file lies outside of the code.
            ApiError: The master refused.
        """

        target = Path(path)
        check_new_directory(target)
        of = f"experiments/{self.id}"
        config = self._session.get(f"{of}/config", models.ConfigView)
        files = self._session.get(f"{of}/files", list[models.CodeFile])
        for file in files:
            place = target / file.path
            # The names come from the master: none may lead outside of `target`.
            if not place.resolve().is_relative_to(target.resolve()):
                raise DownloadError(f"A file must lie in the code, but {file.path!r} does not.")
            place.parent.mkdir(parents=True, exist_ok=True)
            self._session.stream_to_file(f"{of}/files/{quote(file.path)}", place)
        target.mkdir(parents=True, exist_ok=True)
        text = config.resolved_yaml if config.submitted is None else config.submitted
        # The code may have a file of this name itself.
        if not (target / "config.yaml").exists():
            (target / "config.yaml").write_text(text, encoding="utf-8")
        return len(files)

    def loss(self) -> "models.Loss":
        """Return the data `delete` would remove, and an obstacle to the deletion, if any."""

        return self._session.get(f"experiments/{self.id}/loss", models.Loss)

    def delete(self) -> list[str]:
        """Delete an ended experiment with its metrics, logs and checkpoints.

        Returns:
            The files that could not be removed.
        """

        return self._session.call("DELETE", f"experiments/{self.id}", models.Deletion).left_behind

    def continue_(
        self,
        config: dict[str, Any] | None = None,
        *,
        limits: Mapping[str, float | None] | None = None,
        key: str | None = None,
    ) -> "Experiment":
        """Reopen an ended experiment: its unfinished trials resume from their checkpoints.

        Args:
            config: Fields of the configuration to change; only for a `single` search.
            limits: Limits of the search to change, as in `edit`: the search goes on with more
                trials, such as ``{"max_trials": 40}``.
            key: A key of your own: a call that is repeated with it within a day reopens nothing.
        """

        # A repeated request must not reopen the experiment twice.
        given = dict(limits) if limits else None
        body = models.ContinueExperiment(config=config or {}, limits=given)
        return self._command("continue", body, checked_key(key))

    def wait(self, interval: float = 1.0, timeout: float | None = None) -> "ExperimentState":
        """Wait until the experiment has ended and return its last state.

        Args:
            interval: Seconds between two looks; the first ones come sooner.
            timeout: Seconds to wait at most; None for no limit.

        Raises:
            TimeoutError: The experiment has not ended in time.
            ValueError: The experiment is paused, so that waiting could last for ever.
            MasterUnreachableError: No master answered for ten minutes.
        """
        last_contact = time.monotonic()
        deadline = inf if timeout is None else last_contact + timeout
        pause_s = min(interval, _FIRST_PAUSE_S)
        while True:
            try:
                state = self.reload().data.state
                last_contact = time.monotonic()
            except MasterUnreachableError:
                if time.monotonic() - last_contact > _PATIENCE_S:
                    raise
            else:
                if state.is_terminal:
                    return state
                if state.value == "PAUSED":
                    raise ValueError(
                        f"Experiment {self.id} must be running to wait for it, but is paused."
                        f" Hint: `paceline e activate {self.id}` first."
                    )
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"Experiment {self.id} has not ended within {timeout:g} s.")
            time.sleep(min(pause_s, left_s))
            pause_s = min(interval, pause_s * 1.5)

    def trials(
        self, *, sort_by: Literal["id", "metric"] = "id", limit: int | None = None
    ) -> list[Trial]:
        """Return the experiment's trials; by "metric", the best come first."""

        path = f"experiments/{self.id}/trials"
        pages = self._session.pages(path, models.Trial, limit=limit, sort_by=sort_by)
        return [Trial(self._session, data) for data in pages]

    def rows(self) -> Rows:
        """Return a row for each trial with its hyperparameters, as `to_pandas` has them."""
        return Rows(
            f"trials of experiment {self.id}",
            (
                {
                    "trial": trial.id,
                    "state": trial.state.value,
                    "steps_completed": trial.steps_completed,
                    "best_metric": trial.best_metric,
                    "created_at": trial.data.created_at,
                    "ended_at": trial.data.ended_at,
                    **flatten(trial.hparams, "hparams."),
                }
                for trial in self.trials()
            ),
        )

    def checkpoints(
        self, *, sort_by: Literal["steps", "metric"] = "steps", limit: int | None = None
    ) -> list[Checkpoint]:
        """Return the checkpoints of all trials; by "metric", the best come first."""

        path = f"experiments/{self.id}/checkpoints"
        pages = self._session.pages(path, models.Checkpoint, limit=limit, sort_by=sort_by)
        return [Checkpoint(self._session, data) for data in pages]

    def top_checkpoint(self) -> Checkpoint:
        """Return the checkpoint with the best searched metric.

        Raises:
            NoCheckpointError: No checkpoint is stored.
        """
        for checkpoint in self.checkpoints(sort_by="metric"):
            if checkpoint.state.value == "COMPLETED":
                return checkpoint
        raise NoCheckpointError(f"Experiment {self.id} must have a checkpoint, but has none.")

    def search(self) -> "models.SearchView":
        """Return the rungs of the search; empty for searches without halving."""

        return self._session.get(f"experiments/{self.id}/search", models.SearchView)

    def events(self, *, after: int | None = 0) -> EventStream:
        """Return the experiment's stream of events.

        Args:
            after: The cursor to start after; 0 for all events, None for new ones only.
        """
        return EventStream(self._session, after=after, experiment_id=self.id)

    def iter_logs(self, *, tail: int | None = None) -> Iterator["models.LogLine"]:
        """Yield the lines printed by the processes of all trials, in order of time.

        Args:
            tail: Only this many lines before the end.
        """

        if tail is not None:
            path = f"experiments/{self.id}/logs"
            page = self._session.get(path, models.LogPage, tail=tail, limit=tail)
            self._num_damaged_lines = page.num_damaged
            yield from page.items
            return
        trials = self.trials()
        yield from heapq.merge(*(t.iter_logs() for t in trials), key=lambda line: line.time)
        self._num_damaged_lines = sum(trial.num_damaged_lines for trial in trials)

    @property
    def num_damaged_lines(self) -> int:
        """How many damaged lines of output `iter_logs` has found and left out."""
        return self._num_damaged_lines

    def _change(self, **fields: Any) -> "Experiment":

        # The master checks the fields and says what is wrong in its own words.
        path, body = f"experiments/{self.id}", models.EditExperiment.model_construct(**fields)
        self.data = self._session.call("PATCH", path, models.Experiment, body=body)
        return self

    def _command(self, verb: str, body: Any = None, key: str | None = None) -> "Experiment":

        path = f"experiments/{self.id}/{verb}"
        self.data = self._session.call("POST", path, models.Experiment, body=body, key=key)
        return self
