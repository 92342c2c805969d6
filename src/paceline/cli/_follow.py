"""Following an experiment until it ends."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.cli._feed import Feed, FeedLine
from paceline.cli._logs import format_line
from paceline.cli._output import console, error_console

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.client import Client, Experiment, Trial

_INTERRUPTED = 130
_PROGRESS_STEP = 0.1
# A restart of the master takes a moment that is not worth a line.
_SILENCE_S = 3.0


def follow_experiment(experiment: "Experiment", client: "Client", *, all_logs: bool = False) -> int:
    """Print what happens until the experiment has ended, and return the exit code.

    Ctrl-C leaves the experiment running.

    Args:
        experiment: The experiment; everything since its start is shown.
        client: The client for log lines.
        all_logs: Show every line that trials of a search print, not only warnings and errors.
    """
    follower = _Follower(experiment, client, all_logs=all_logs)
    try:
        with follower.display():
            follower.run()
    except KeyboardInterrupt:
        error_console().print(
            f"Left experiment {experiment.id} running."
            f" `paceline e logs {experiment.id} -f` follows it again,"
            f" `paceline e cancel {experiment.id}` ends it.",
            soft_wrap=True,
        )
        return _INTERRUPTED
    follower.print_end()
    return 0 if experiment.state.value == "COMPLETED" else 1


class _Follower:
    """One look at one experiment: its feed, and how far each trial's log was printed."""

    def __init__(self, experiment: "Experiment", client: "Client", *, all_logs: bool) -> None:
        self._experiment = experiment
        self._client = client
        self._is_single = experiment.data.searcher == "single"
        self._level = None if all_logs or self._is_single else "WARNING"
        self._feed = Feed(experiment.data)
        self._console: Console = console()
        self._trials: dict[int, Trial] = {}
        self._printed_logs: dict[int, int] = {}
        self._printed_progress = 0.0
        self._bar: Any = None
        self._task: Any = None
        self._last_contact = time.monotonic()
        self._is_told = False

    @contextmanager
    def display(self) -> Iterator[None]:
        """Show a progress bar below the lines on a terminal."""
        if self._is_single or not sys.stdout.isatty():
            yield
            return
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (BarColumn(bar_width=10), TextColumn("{task.description}"))
        with Progress(*columns, console=self._console, transient=True, refresh_per_second=4) as bar:
            self._bar, self._task = bar, bar.add_task(self._feed.summary(), total=1.0)
            yield
        self._bar = None

    def run(self) -> None:
        """Print until the experiment has ended."""
        stream = self._experiment.events(after=0)
        for event in stream:
            if event is None:
                self._note_connection(stream.is_connected)
                if stream.is_connected and self._experiment.reload().state.is_terminal:
                    break
                continue
            self._note_connection(True)
            if event.kind == "logs" and event.trial_id is not None:
                self._print_logs(event.trial_id)
            for line in self._feed.handle(event):
                self._print(line)
            self._show_progress()
            if event.kind == "experiment_state" and _is_terminal(event.data.get("state")):
                break
        self._experiment.reload()
        # What a trial printed last may have arrived after the last event that was read.
        for trial_id in self._feed.trial_ids():
            self._print_logs(trial_id)

    def print_end(self) -> None:
        """Print how it ended: the best trials of a search, and the state."""
        from paceline.cli._leaderboard import print_leaderboard
        from paceline.cli._output import format_duration

        data = self._experiment.data
        print_leaderboard(self._experiment)
        took = format_duration((data.ended_at or data.created_at) - data.created_at)
        style = "bold green" if data.state.value == "COMPLETED" else "bold red"
        text = f"Experiment {data.id} ({data.name}) is {data.state.value} after {took}."
        self._console.print(text, style=style, soft_wrap=True)
        if data.error:
            self._console.print(data.error, style="red", soft_wrap=True)

    def _print(self, line: FeedLine) -> None:
        from rich.text import Text

        # A terminal shows the start of a long line; a file or a pipe gets all of it.
        is_terminal = self._console.is_terminal
        self._console.print(
            Text(str(line), style=line.style),
            no_wrap=is_terminal,
            overflow="ellipsis" if is_terminal else "ignore",
            crop=is_terminal,
            soft_wrap=not is_terminal,
        )

    def _print_logs(self, trial_id: int) -> None:
        from rich.text import Text

        if trial_id not in self._trials:
            self._trials[trial_id] = self._client.get_trial(trial_id)
        lines = self._trials[trial_id].iter_logs(
            after=self._printed_logs.get(trial_id), level=self._level
        )
        for line in lines:
            self._printed_logs[trial_id] = line.id
            style = {"WARNING": "yellow", "ERROR": "red"}.get(line.level or "", "")
            text = format_line(line, show_trial=not self._is_single)
            self._console.print(Text(text, style=style), soft_wrap=True)

    def _show_progress(self) -> None:
        if self._is_single:
            return
        summary = self._feed.summary()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._feed.progress, description=summary)
        elif self._feed.progress >= self._printed_progress + _PROGRESS_STEP:
            self._printed_progress = self._feed.progress
            self._console.print(f"      {summary}", soft_wrap=True)

    def _note_connection(self, is_connected: bool) -> None:
        """Say once that the master does not answer, and that it does again."""
        now = time.monotonic()
        if is_connected:
            if self._is_told:
                error_console().print("The master is back.")
            self._last_contact, self._is_told = now, False
        elif not self._is_told and now - self._last_contact > _SILENCE_S:
            self._is_told = True
            error_console().print("The master does not answer; waiting for it.", style="yellow")


def _is_terminal(state: Any) -> bool:
    from paceline.messages.states import ExperimentState

    try:
        return ExperimentState(state).is_terminal
    except ValueError:
        return False
