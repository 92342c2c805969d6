"""An experiment as the master knows it."""

import heapq
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from paceline.client._checkpoint import Checkpoint
from paceline.client._errors import DownloadError, MasterUnreachableError, NoCheckpointError
from paceline.client._event_stream import EventStream
from paceline.client._http_session import HttpSession
from paceline.client._trial import Trial, _number_of_metric

if TYPE_CHECKING:
    from paceline.messages.experiments import Experiment as ExperimentData
    from paceline.messages.experiments import Loss
    from paceline.messages.logs import LogLine
    from paceline.messages.searches import SearchView
    from paceline.messages.states import ExperimentState, ShownState

# A master may be restarted while somebody waits for an experiment.
_PATIENCE_S = 600.0
_FIRST_PAUSE_S = 0.1


class Experiment:
    """A configuration, its code and its trials; `data` is what the master last said of it."""

    def __init__(self, session: HttpSession, data: "ExperimentData") -> None:
        self._session = session
        self._num_damaged_lines = 0
        self.data = data

    def __repr__(self) -> str:
        return f"Experiment(id={self.id}, name={self.name!r}, state={self.state.value})"

    @property
    def id(self) -> int:
        """The experiment's number."""
        return self.data.id

    @property
    def name(self) -> str:
        """The name that its configuration gives."""
        return self.data.name

    @property
    def state(self) -> "ExperimentState | ShownState":
        """Where the experiment stood when it was last read, in the words of the command line.

        `data.state` is the state that the master stores.
        """
        stored, shown = self.data.state, self.data.shown_state
        # Scripts compare by `is ExperimentState.COMPLETED`.
        return stored if stored.value == shown.value else shown

    @property
    def progress(self) -> float:
        """The part of the search that is done, from 0 to 1 inclusive."""
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
        """Read the experiment again and return it."""
        from paceline.messages.experiments import Experiment as ExperimentData

        self.data = self._session.get(f"experiments/{self.id}", ExperimentData)
        return self

    def pause(self) -> "Experiment":
        """Let running trials store a checkpoint and leave; `activate` goes on from there."""
        return self._command("pause")

    def activate(self) -> "Experiment":
        """Go on after `pause`, or start an experiment that was created paused."""
        return self._command("activate")

    def cancel(self) -> "Experiment":
        """Let running trials store a checkpoint and leave, and end the experiment."""
        return self._command("cancel")

    def kill(self) -> "Experiment":
        """End all trials at once, without checkpoints, and end the experiment."""
        return self._command("kill")

    def archive(self) -> "Experiment":
        """Put an ended experiment into the archive, where lists leave it out."""
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

        Trials that run go on. Raises like `set_priority`.
        """
        return self._change(max_slots=max_slots or 0)

    def fork(self, config: dict[str, Any] | None = None, *, activate: bool = True) -> "Experiment":
        """Create an experiment with this one's code, and return it.

        Args:
            config: Fields of the configuration to change.
            activate: Whether the new experiment starts at once; else it is paused.
        """
        from paceline.messages.experiments import Experiment as ExperimentData
        from paceline.messages.experiments import ForkExperiment

        body = ForkExperiment(config=config or {}, activate=activate)
        path = f"experiments/{self.id}/fork"
        data = self._session.call("POST", path, ExperimentData, body=body, has_key=True)
        return Experiment(self._session, data)

    def download_code(self, path: str | Path) -> int:
        """Copy the code and the configuration, as `config.yaml`, into a new or empty directory.

        Returns:
            The number of files of the code.

        Raises:
            DownloadError: The directory holds files already, or a file lies outside of the code.
            ApiError: The master refused.
        """
        from paceline.messages.configs import CodeFile, ConfigView

        target = Path(path)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise DownloadError(
                f"`path` must be a new or empty directory, but {str(target)!r} is not."
                " Hint: choose another one."
            )
        of = f"experiments/{self.id}"
        config = self._session.get(f"{of}/config", ConfigView)
        files = self._session.get(f"{of}/files", list[CodeFile])
        for file in files:
            place = target / file.path
            if not place.resolve().is_relative_to(target.resolve()):
                raise DownloadError(f"A file must lie in the code, but {file.path!r} does not.")
            place.parent.mkdir(parents=True, exist_ok=True)
            self._session.stream_to_file(f"{of}/files/{quote(file.path)}", place)
        target.mkdir(parents=True, exist_ok=True)
        text = config.resolved_yaml if config.submitted is None else config.submitted
        if not (target / "config.yaml").exists():
            (target / "config.yaml").write_text(text, encoding="utf-8")
        return len(files)

    def loss(self) -> "Loss":
        """Return what `delete` would take away, and what stands in its way if something does."""
        from paceline.messages.experiments import Loss

        return self._session.get(f"experiments/{self.id}/loss", Loss)

    def delete(self) -> list[str]:
        """Delete an ended experiment with its metrics, logs and checkpoints.

        Returns:
            The files that could not be removed.
        """
        from paceline.messages.experiments import Deletion

        return self._session.call("DELETE", f"experiments/{self.id}", Deletion).left_behind

    def continue_(self, config: dict[str, Any] | None = None) -> "Experiment":
        """Reopen an ended experiment: its unfinished trials go on from their checkpoints.

        Args:
            config: Fields of the configuration to change; only for a `single` search.
        """
        from paceline.messages.experiments import ContinueExperiment

        return self._command("continue", ContinueExperiment(config=config or {}))

    def wait(self, interval: float = 1.0) -> "ExperimentState":
        """Wait until the experiment has ended and return its last state.

        Args:
            interval: Seconds between two looks; the first ones come sooner.

        Raises:
            ValueError: The experiment is paused, so that waiting could last for ever.
            MasterUnreachableError: No master answered for ten minutes.
        """
        last_contact = time.monotonic()
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
            time.sleep(pause_s)
            pause_s = min(interval, pause_s * 1.5)

    def trials(
        self, *, sort_by: Literal["id", "metric"] = "id", limit: int | None = None
    ) -> list[Trial]:
        """Return the experiment's trials; by "metric", the best come first."""
        from paceline.messages.trials import Trial as TrialData

        path = f"experiments/{self.id}/trials"
        pages = self._session.pages(path, TrialData, limit=limit, sort_by=sort_by)
        return [Trial(self._session, data) for data in pages]

    def checkpoints(
        self, *, sort_by: Literal["steps", "metric"] = "steps", limit: int | None = None
    ) -> list[Checkpoint]:
        """Return the checkpoints of all trials; by "metric", the best come first."""
        from paceline.messages.checkpoints import Checkpoint as CheckpointData

        path = f"experiments/{self.id}/checkpoints"
        pages = self._session.pages(path, CheckpointData, limit=limit, sort_by=sort_by)
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

    def search(self) -> "SearchView":
        """Return the rungs of the search; empty for searches that do not halve."""
        from paceline.messages.searches import SearchView

        return self._session.get(f"experiments/{self.id}/search", SearchView)

    def events(self, *, after: int | None = 0) -> EventStream:
        """Return the experiment's stream of events.

        Args:
            after: The cursor to start after; 0 for all events, None for new ones only.
        """
        return EventStream(self._session, after=after, experiment_id=self.id)

    def iter_logs(self, *, tail: int | None = None) -> Iterator["LogLine"]:
        """Yield the lines that the processes of all trials printed, in their order of time.

        Args:
            tail: Only this many lines before the end.
        """
        from paceline.messages.logs import LogPage

        if tail is not None:
            path = f"experiments/{self.id}/logs"
            page = self._session.get(path, LogPage, tail=tail, limit=tail)
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
        from paceline.messages.experiments import EditExperiment
        from paceline.messages.experiments import Experiment as ExperimentData

        path, body = f"experiments/{self.id}", EditExperiment(**fields)
        self.data = self._session.call("PATCH", path, ExperimentData, body=body)
        return self

    def _command(self, verb: str, body: Any = None) -> "Experiment":
        from paceline.messages.experiments import Experiment as ExperimentData

        path = f"experiments/{self.id}/{verb}"
        has_key = verb == "continue"
        self.data = self._session.call("POST", path, ExperimentData, body=body, has_key=has_key)
        return self
