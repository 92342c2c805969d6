"""Follower of an experiment until its end, and the printing of log lines."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from paceline._base.progress_display import format_duration
from paceline._base.terminal_text import join_colors, terminal_text
from paceline._cluster.messages.states import ExperimentState
from paceline.cli import _console_output as console
from paceline.cli._event_feed import EventFeed, FeedLine
from paceline.cli._options import is_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from paceline._cluster.messages.experiment_models import LogLine
    from paceline._cluster.messages.master_models import Event
    from paceline.client._client import Client
    from paceline.client._experiment_and_trial import Experiment, Trial


_LEVEL_COLORS = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}


def print_log_lines(
    lines: "Iterable[LogLine]",
    *,
    json: bool = False,
    timestamps: bool = False,
    show_trial: bool = False,
) -> None:
    """Print lines as they come."""
    output = console.stdout()
    for line in lines:
        if json:
            console.print_json_line(line)
        else:
            text = format_log_line(line, timestamps=timestamps, show_trial=show_trial)
            is_colored = line.level in _LEVEL_COLORS or line.colors
            if is_colored and output.is_terminal:
                output.print(colored_log_line(line, text), soft_wrap=True)
            else:
                typer.echo(text)


def print_damaged_log_lines(number: int) -> None:
    """Say how many damaged lines were left out, if there are some."""
    if number:
        left_out = "1 damaged line is" if number == 1 else f"{number} damaged lines are"
        typer.echo(f"{left_out} left out.", err=True)


def format_log_line(line: "LogLine", *, timestamps: bool = False, show_trial: bool = False) -> str:
    """Return a log line with the requested prefix: time, trial, rank."""
    prefix = ""
    if timestamps:
        prefix += f"{console.format_moment(line.time)} "
    if show_trial:
        prefix += f"[trial {line.trial_id}] "
    if line.rank is not None and line.rank > 0:
        prefix += f"[rank={line.rank}] "
    return prefix + terminal_text(line.text)


def colored_log_line(line: "LogLine", text: str) -> "Text":
    """Return a formatted log line in the colours that it was printed in, or those of its level."""
    from rich.text import Text

    if not line.colors:
        return Text(text, style=_LEVEL_COLORS.get(line.level or "", ""))
    size = len(text) - len(line.text)
    # Blanks stand for unsafe characters one by one, so the places stay.
    return Text(text[:size]).append_text(Text.from_ansi(join_colors(text[size:], line.colors)))


# 128 + SIGINT, as shells report it.
_INTERRUPTED = 130
_PROGRESS_STEP = 0.1
# A restart of the master takes a moment that is not worth a line.
_SILENCE_S = 3.0
# Trials that start soon and changed reasons for a wait are not worth a line either.
_WAIT_S = 5.0
_NEXT_WAIT_S = 60.0
# How far it is looked for the experiment in the queue; the most that the master sends.
_LONGEST_QUEUE = 1000
_NUM_LAST_WORDS = 10
_ATTEMPT_FAILED = "The attempt failed ("
# An end and its event are written in one step, but their times come from two clocks.
_SAME_MOMENT_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowOptions:
    """Options of a follower.

    Attributes:
        all_logs: Every line that trials of a search print, not only warnings and errors.
        timestamps: The time in front of each line that a trial printed.
        is_from_now: Show only new events, not all since the start.
        tail: With `is_from_now`, this many lines that were printed before.
        is_json: Standard output is for JSON alone, so all goes to standard error.
    """

    all_logs: bool = False
    timestamps: bool = False
    is_from_now: bool = False
    tail: int | None = None
    is_json: bool = field(default_factory=is_json)


class ExperimentFollower:
    """Follower of an experiment: its event feed, and the printed position in each trial's log.

    A follower from now sees all events after its creation.
    """

    def __init__(
        self, experiment: "Experiment", client: "Client", options: FollowOptions | None = None
    ) -> None:
        self._experiment = experiment
        self._client = client
        self._options = options or FollowOptions()
        self._is_single = experiment.data.searcher == "single"
        self._level = None if self._options.all_logs or self._is_single else "WARNING"
        self._feed = EventFeed(experiment.data, is_from_now=self._options.is_from_now)
        self._console: Console = console.stderr() if self._options.is_json else console.stdout()
        self._trials: dict[int, Trial] = {}
        self._printed_logs: dict[int, int] = {}
        self._trials_with_errors: set[int] = set()
        self._printed_progress = 0.0
        self._bar: Any = None
        self._task: Any = None
        self._last_contact = time.monotonic()
        self._is_told = False
        self._next_look = time.monotonic() + _WAIT_S
        self._told_wait: str | None = None
        self._stream = experiment.events(after=None if self._options.is_from_now else 0)
        self._events = iter(self._stream)
        if self._options.is_from_now:
            self._begin_now()

    def follow(self) -> int:
        """Print events until the experiment has ended, and return the exit code.

        Ctrl-C leaves the experiment running.
        """
        experiment = self._experiment
        try:
            with self._display():
                self._run()
        except KeyboardInterrupt:
            console.stderr().print(
                f"Left experiment {experiment.id} running."
                f" `paceline e logs {experiment.id} -f` follows it again,"
                f" `paceline e cancel {experiment.id}` ends it.",
                soft_wrap=True,
            )
            self._print_result()
            return _INTERRUPTED
        self._print_end()
        self._print_result()
        return console.exit_code(experiment.data)

    def _print_result(self) -> None:
        """Print the experiment as JSON if asked: its state at the end, and its best trial."""
        from paceline.cli._experiment_description import experiment_result

        if self._options.is_json:
            console.print_json(experiment_result(self._client, self._experiment.reload()))

    def _begin_now(self) -> None:
        """Connect first, so no later event is missed; then skip everything before."""
        for _ in self._events:
            if self._stream.is_connected:
                break
        for trial in self._experiment.trials():
            self._trials[trial.id] = trial
            self._feed.adopt(trial.data)
            for line in trial.iter_logs(tail=1):
                self._printed_logs[trial.id] = line.id
        if self._options.tail is not None:
            for line in self._experiment.iter_logs(tail=self._options.tail):
                self._printed_logs[line.trial_id] = max(
                    line.id, self._printed_logs.get(line.trial_id, line.id)
                )
                self._print_log(line)

    @contextmanager
    def _display(self) -> Iterator[None]:
        """Show a progress bar below the lines on a terminal."""
        if not self._console.is_terminal:
            yield
            return
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (BarColumn(bar_width=10), TextColumn("{task.description}"))
        with Progress(*columns, console=self._console, transient=True, refresh_per_second=4) as bar:
            self._bar, self._task = bar, bar.add_task(self._feed.summary(), total=1.0)
            yield
        self._bar = None

    def _run(self) -> None:
        """Print until the experiment has ended."""
        has_ended = self._options.is_from_now and self._experiment.reload().state.is_terminal
        if not has_ended:
            self._print_events()
        self._experiment.reload()
        # Last log lines: they may arrive after the last event, so each log is read again.
        for trial_id in self._feed.trial_ids():
            self._print_logs(trial_id)

    def _print_events(self) -> None:
        for event in self._events:
            if event is None:
                self._note_connection(self._stream.is_connected)
                self._note_wait()
                # The end may have come before this connection, whose stream then lacks it.
                if self._stream.is_current and self._experiment.reload().state.is_terminal:
                    return
                continue
            self._note_connection(True)
            if event.kind in ("logs", "attempt_ended") and event.trial_id is not None:
                self._print_logs(event.trial_id)
            for line in self._feed.handle(event):
                self._print(line)
            self._show_progress()
            if event.kind == "experiment_state" and self._is_end(event):
                return

    def _is_end(self, event: "Event") -> bool:
        """Return whether an event ends the experiment for good, not an end before a reopening."""

        try:
            is_terminal = ExperimentState(event.data.get("state")).is_terminal
        except ValueError:
            return False
        if not (is_terminal and self._experiment.reload().state.is_terminal):
            return False
        ended_at = self._experiment.data.ended_at
        return ended_at is None or event.time > ended_at - _SAME_MOMENT_S

    def _print_end(self) -> None:
        """Print the end of the experiment: the best trials of a search, and the state."""
        from paceline.cli._experiment_description import print_leaderboard

        data = self._experiment.data
        print_leaderboard(self._experiment, self._console)
        started_at = self._feed.started_at or data.created_at
        took = format_duration(max((data.ended_at or started_at) - started_at, 0.0))
        style = "bold green" if data.state.value == "COMPLETED" else "bold red"
        text = f"Experiment {data.id} ({data.name}) is {data.state.value} after {took}."
        self._console.print(text, style=style, soft_wrap=True)
        if data.end_reason is not None:
            self._console.print(f"It ended as {data.end_reason}.", soft_wrap=True)
        if data.error and not self._feed.has_told(data.error):
            self._console.print(data.error, style="red", soft_wrap=True)
        if data.num_records_lost:
            lost = console.lost_records_text(data.num_records_lost)
            text = f"{lost}; `paceline e logs {data.id}` says which."
            self._console.print(text, style="bold red", soft_wrap=True)
        self._print_next()

    def _print_next(self) -> None:
        """Print how to look at the experiment and how to go on with it, as scripts do."""
        data = self._experiment.data
        page = f"{self._client.url}/experiments/{data.id}"
        go_on = f"paceline e continue {data.id}"
        if data.state.value != "COMPLETED":
            word = "resume"
        elif self._is_single:
            word, go_on = "continue", f"paceline e fork {data.id} --config FIELD=VALUE"
        else:
            word, go_on = "continue", f"{go_on} --max-trials N"
        lines = [f"look: paceline e describe {data.id}, or {page}"]
        # A script's own run goes on by the script.
        lines += [] if data.is_unmanaged else [f"{word}: {go_on}"]
        console.stderr().print("\n".join(lines), soft_wrap=True)

    def _print(self, line: FeedLine) -> None:
        from rich.text import Text

        # A terminal shows the start of a long line; a file or a pipe gets the whole line.
        is_terminal = self._console.is_terminal
        self._console.print(
            Text(str(line), style=line.style),
            no_wrap=is_terminal,
            overflow="ellipsis" if is_terminal else "ignore",
            crop=is_terminal,
            soft_wrap=not is_terminal,
        )
        if line.failed_trial_id is not None:
            self._print_last_words(line.failed_trial_id)

    def _print_last_words(self, trial_id: int) -> None:
        """Print a failed trial's last lines, if not shown yet, and the command for all lines."""
        if not self._is_single and trial_id not in self._trials_with_errors:
            last = self._trial(trial_id).iter_logs(tail=_NUM_LAST_WORDS, stream="stderr")
            for line in last:
                self._print_log(line)
        self._trials_with_errors.discard(trial_id)
        text = f"      `paceline t logs {trial_id}` shows all that it printed."
        self._console.print(text, style="dim", soft_wrap=True)

    def _trial(self, trial_id: int) -> "Trial":
        if trial_id not in self._trials:
            self._trials[trial_id] = self._client.get_trial(trial_id)
        return self._trials[trial_id]

    def _print_logs(self, trial_id: int) -> None:
        lines = self._trial(trial_id).iter_logs(
            after=self._printed_logs.get(trial_id), level=self._level
        )
        for line in lines:
            self._printed_logs[trial_id] = line.id
            self._print_log(line)

    def _print_log(self, line: "LogLine") -> None:
        if line.stream == "master":
            if line.text.startswith(_ATTEMPT_FAILED):
                # The attempt's end comes as an event too.
                return
        elif line.level in ("ERROR", "CRITICAL"):
            self._trials_with_errors.add(line.trial_id)
        text = format_log_line(
            line, timestamps=self._options.timestamps, show_trial=not self._is_single
        )
        self._console.print(colored_log_line(line, text), soft_wrap=True)

    def _show_progress(self) -> None:
        summary = self._feed.summary()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._feed.progress, description=summary)
        elif self._feed.progress >= self._printed_progress + _PROGRESS_STEP:
            self._printed_progress = self._feed.progress
            self._console.print(f"      {summary}", soft_wrap=True)

    def _note_wait(self) -> None:
        """Print why no trial of the experiment runs, after a while of waiting."""
        from paceline.client._http_session import ApiError, MasterUnreachableError

        now = time.monotonic()
        if self._feed.is_running:
            self._next_look, self._told_wait = now + _WAIT_S, None
            return
        if now < self._next_look or not self._stream.is_connected:
            return
        self._next_look = now + _WAIT_S
        pool = self._experiment.data.config.get("resources", {}).get("pool")
        with suppress(ApiError, MasterUnreachableError):
            for entry in self._client.queue(pool=pool, limit=_LONGEST_QUEUE):
                if entry.experiment_id != self._experiment.id:
                    continue
                if entry.detail != self._told_wait:
                    text = f"      trial {entry.trial_id} waits: {entry.detail}"
                    self._console.print(text, style="yellow", soft_wrap=True)
                    self._next_look = now + _NEXT_WAIT_S
                self._told_wait = entry.detail
                return

    def _note_connection(self, is_connected: bool) -> None:
        """Print a line when the master stops answering, and another when the master is back."""
        now = time.monotonic()
        if is_connected:
            if self._is_told:
                console.stderr().print("The master is back.")
            self._last_contact, self._is_told = now, False
        elif not self._is_told and now - self._last_contact > _SILENCE_S:
            self._is_told = True
            console.stderr().print("The master does not answer; waiting for it.", style="yellow")
