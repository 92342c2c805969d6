"""Trackers: base class, registry, and threads sending a run's records to the trackers."""

import json
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from paceline._base.imports import loaded_class, offered_points
from paceline._base.journal_reading_and_writing import Entry
from paceline._base.journal_records import CheckpointDeleted, CheckpointStored, MetricsReported
from paceline._base.run_directory import JournalKey, RunDirectory, RunInfo
from paceline._base.run_tail_and_files import RunTail
from paceline.core._arguments import Outcome, numbers_of
from paceline.core._run_opening import OpenedRun

logger = logging.getLogger(__name__)

_GROUPS = ("training", "validation")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Facts of a run for a tracker: identity, name, directory, hyperparameters and attempt.

    Attributes:
        run_id: Its identity, the same in all attempts.
        name: Its name; a trial of a master is named after its experiment and trial.
        run_dir: The run directory.
        config: The hyperparameters.
        attempt: Which attempt it is, from 0.
        tracked_as: The result of `Tracker.start` in the last attempt, None in the first.
    """

    run_id: str
    name: str
    run_dir: Path
    config: Mapping[str, Any]
    attempt: int
    tracked_as: str | None


class MetricPoint(NamedTuple):
    """Number from a report, named e.g. "loss", "validation/loss" or "rank_2/loss"."""

    name: str
    value: float
    step: int
    time: float


class Tracker(ABC):
    """Base class of trackers, for showing runs in another system, for example MLflow.

    Training never waits for a tracker. Its methods are called by one thread, which is not that of
    training, one at a time and in the order start, log, finish. They may block, and may raise: the
    call is then repeated for some time. Calls lost in the end are counted.

    To write one, override the abstract methods, set `name`, and import the library in `__init__`,
    so that a library that is missing is an error where the user makes the tracker.

    Args:
        ranks: Whose metrics: a rank, several of them, or None for all. Those of other ranks than 0
            have names such as "rank_2/loss".
        groups: Which groups of metrics; None for all, the groups of profiling included.
        close_timeout_s: How long the end of a run waits for the tracker, in seconds.

    Attributes:
        name: The tracker's name in messages and in the run directory.
        num_lost: How many reports and checkpoints the tracker has not taken.

    Raises:
        ValueError: A rank is negative, or the timeout.
    """

    name: ClassVar[str] = "tracker"

    def __init__(
        self,
        ranks: int | Iterable[int] | None = 0,
        *,
        groups: Collection[str] | None = _GROUPS,
        close_timeout_s: float = 10.0,
    ) -> None:
        self.ranks = _as_ranks(ranks)
        self.groups = None if groups is None else frozenset(groups)
        if not close_timeout_s >= 0:
            raise ValueError(f"`close_timeout_s` must be at least 0, but got {close_timeout_s!r}.")
        self.close_timeout_s = close_timeout_s
        self.num_lost = 0
        # A thread that hangs keeps it, so that no other one calls the same object.
        self.turn = threading.Lock()

    @abstractmethod
    def start(self, run: TrackedRun) -> str | None:
        """Begin to show a run, or continue with a run begun by an earlier attempt.

        Args:
            run: The run.

        Returns:
            The tracker's name for the run; the next attempt gets it as `run.tracked_as`.
        """

    @abstractmethod
    def log_metrics(self, points: Sequence[MetricPoint]) -> None:
        """Add points; after a failed call some points may already be there."""

    @abstractmethod
    def log_checkpoints(self, checkpoints: Mapping[str, str], newest: str) -> None:
        """Replace the shown checkpoints by the existing checkpoints.

        Args:
            checkpoints: The UUID of each one that exists, with its path or URL, oldest first.
            newest: The UUID of the newest one; it may have been deleted already.
        """

    @abstractmethod
    def finish(self, outcome: Outcome, error: str | None) -> None:
        """End: the run is over, or stopped to continue in a further attempt.

        Args:
            outcome: How it has ended.
            error: The exception that has ended it, as text.
        """

    def abandon(self) -> None:  # noqa: B027  # most have nothing to do
        """Release anything able to block the process's exit; called while a method hangs."""

    def takes(self, group: str, rank: int) -> bool:
        """Return whether metrics of a group and rank are wanted."""
        is_rank = self.ranks is None or rank in self.ranks
        return is_rank and (self.groups is None or group in self.groups)


def _as_ranks(ranks: Any) -> frozenset[int] | None:
    if ranks is None:
        return None
    chosen = frozenset([ranks] if isinstance(ranks, int) else ranks)
    if not all(isinstance(rank, int) and rank >= 0 for rank in chosen):
        raise ValueError(f"`ranks` must be ranks of at least 0, but got {ranks!r}.")
    return chosen


ENTRY_POINTS = "paceline.trackers"
"""The group of entry points: each names a tracker and refers to its class."""

_OWN = {
    "mlflow": "paceline.integrations._trackers:MLflowTracker",
    "tensorboard": "paceline.integrations._trackers:TensorBoardTracker",
    "wandb": "paceline.integrations._trackers:WandbTracker",
}


def tracker_names() -> Sequence[str]:
    """Return the names of all trackers, sorted."""
    return sorted(offered_points(ENTRY_POINTS, _OWN))


def tracker_named(name: str) -> Tracker:
    """Return a new tracker of a name, with its default options.

    Raises:
        ImportError: Its library is not installed.
        TypeError: The package that offers it names something else than a `Tracker`.
        ValueError: Nobody offers one of this name.
    """
    points = offered_points(ENTRY_POINTS, _OWN)
    if name not in points:
        raise ValueError(
            f"A tracker must be {', '.join(sorted(points))}, but got {name!r}. Hint: install the"
            " package that offers it."
        )
    kind: type[Tracker] = loaded_class(points[name], Tracker)
    return kind()


def as_trackers(trackers: Iterable[Tracker | str] | None) -> list[Tracker]:
    """Return tracker objects for a list of trackers and names.

    Raises:
        ImportError: A library is not installed.
        TypeError: One is neither a `Tracker` nor a name.
        ValueError: A name is unknown.
    """
    if isinstance(trackers, (str, Tracker)):
        trackers = [trackers]
    chosen = []
    for tracker in trackers or ():
        if isinstance(tracker, str):
            tracker = tracker_named(tracker)
        if not isinstance(tracker, Tracker):
            raise TypeError(
                f"`trackers` must be Tracker objects or names, but got {tracker!r}. Hint:"
                ' trackers=["mlflow"].'
            )
        chosen.append(tracker)
    return chosen


_FOLDER = "trackers"
_INTERVAL_S = 0.5
# A call with one piece lasts as long as a server takes for it.
_ENTRIES = 500
_LONGEST_DELAY_S = 60.0
# About two minutes, besides the library's own retries.
_NUM_TRIES = 8
# The end of a run waits for these.
_TRIES_AT_THE_END = 3
_DELAY_AT_THE_END_S = 0.1
_BEYOND_ALL = 1 << 62


class TrackingGroup:
    """Trackers of a run, each fed by its own thread from creation until `finish`.

    Args:
        trackers: The trackers.
        run: The run directory; records already in its journals are sent only if an earlier attempt
            was to send it and has not.
        opened: The attempt that begins.
    """

    def __init__(self, trackers: Sequence[Tracker], run: RunDirectory, opened: OpenedRun) -> None:
        names: dict[str, int] = {}
        self._all = []
        for tracker in trackers:
            names[tracker.name] = number = names.get(tracker.name, 0) + 1
            name = tracker.name if number == 1 else f"{tracker.name}-{number}"
            self._all.append(_Tracking(tracker, name, run, opened))
        for tracking in self._all:
            tracking.start()

    def finish(self, outcome: Outcome, error: str | None) -> None:
        """Send the rest of the run to each tracker, as far as its time limit allows.

        Args:
            outcome: How the run has ended.
            error: The exception that has ended it, as text.
        """
        began = time.monotonic()
        # All get the order first, so that their time limits run at once.
        for tracking in self._all:
            tracking.end(outcome, error)
        for tracking in self._all:
            tracking.join(began)


class _Tracking:
    """Thread feeding a single tracker from the journals of a run."""

    def __init__(self, tracker: Tracker, name: str, run: RunDirectory, opened: OpenedRun) -> None:
        self._tracker = tracker
        self._name = name
        self._run = run
        self._path = run.path / _FOLDER / f"{name}.json"
        state = _read_tracker_state(self._path)
        # Other ranks may have begun already.
        now = (opened.attempt, opened.generation)
        earlier = [key for key in run.journal_keys() if (key.attempt, key.generation) < now]
        there = dict.fromkeys(earlier, _BEYOND_ALL)
        if state:
            sent = state["marks"]
            there = {key: sent.get(key.directory_name, -1) for key in there}
        self._marks: dict[JournalKey, int] = there
        self._checkpoints: dict[str, str] = state.get("checkpoints", {})
        info = opened.info
        self._run_facts = TrackedRun(
            run_id=info.run_id,
            name=_name_of(info),
            run_dir=run.path,
            config=(info.trial.hparams if info.trial is not None else info.hparams) or {},
            attempt=opened.attempt,
            tracked_as=state.get("tracked_as"),
        )
        self._tracked_as = self._run_facts.tracked_as
        self._ending: tuple[Outcome, str | None] | None = None
        self._has_ended = threading.Event()
        self._is_given_up = False
        self._has_warned = False
        self._thread = threading.Thread(target=self._work, name=f"paceline-{name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def end(self, outcome: Outcome, error: str | None) -> None:
        """Signal the end to the thread without waiting."""
        self._ending = outcome, error
        self._has_ended.set()

    def join(self, began: float) -> None:
        """Wait for the thread within the tracker's time limit, and log the lost records."""
        left_s = began + self._tracker.close_timeout_s - time.monotonic()
        self._thread.join(max(left_s, 0.0))
        tracker = self._tracker
        if self._thread.is_alive():
            self._is_given_up = True
            tracker.num_lost += self._count_rest()
            logger.warning(
                "The tracker %r has not come to its end within %g s and is left behind.",
                self._name,
                tracker.close_timeout_s,
            )
            try:
                tracker.abandon()
            except Exception:
                logger.exception("The tracker %r cannot be left behind.", self._name)
        if tracker.num_lost:
            logger.warning(
                "The tracker %r lacks %d report(s) or checkpoint(s) of the run. All of them are in"
                " the run directory %s.",
                self._name,
                tracker.num_lost,
                self._run.path,
            )

    # ---- the thread ----------------------------------------------------------------------

    def _work(self) -> None:
        try:
            with self._tracker.turn:
                self._tracker.num_lost = 0
                if self._try(self._start, tries=None):
                    self._follow()
                    assert self._ending is not None
                    outcome, error = self._ending
                    self._try(lambda: self._tracker.finish(outcome, error))
                else:
                    self._lose(self._count_rest())
        except Exception:
            # A defect here must not look like one of training.
            logger.exception("Tracking by %r has failed.", self._name)

    def _start(self) -> None:
        self._tracked_as = self._tracker.start(self._run_facts)
        self._write_state()

    def _follow(self) -> None:
        tail = RunTail(self._run, dict(self._marks))
        while not self._is_given_up:
            # All that is to be sent was written before the end.
            is_last = self._has_ended.is_set()
            found = tail.read(_ENTRIES)
            if found:
                self._send(found)
            elif is_last:
                return
            if not is_last:
                self._has_ended.wait(_INTERVAL_S)

    def _send(self, found: Sequence[tuple[JournalKey, Sequence[Entry]]]) -> None:
        points: list[MetricPoint] = []
        num_reports = num_checkpoints = 0
        newest = None
        for key, entries in found:
            for entry in entries:
                record = entry.decode()
                if isinstance(record, MetricsReported):
                    new = list(self._points(key.rank, record))
                    points += new
                    num_reports += bool(new)
                elif isinstance(record, CheckpointStored):
                    self._checkpoints[record.uuid] = f"{record.storage}/{record.uuid}"
                    newest = record.uuid
                    num_checkpoints += 1
                elif isinstance(record, CheckpointDeleted):
                    self._checkpoints.pop(record.uuid, None)
        if points and not self._try(lambda: self._tracker.log_metrics(points)):
            self._lose(num_reports)
        if newest is not None:
            last, there = newest, dict(self._checkpoints)
            if not self._try(lambda: self._tracker.log_checkpoints(there, last)):
                self._lose(num_checkpoints)
        for key, entries in found:
            self._marks[key] = entries[-1].sequence
        self._write_state()

    def _points(self, rank: int, record: MetricsReported) -> Iterator[MetricPoint]:
        group = record.group.removesuffix(f"_rank_{rank}") if rank else record.group
        if self._tracker.takes(group, rank):
            prefix = f"rank_{rank}/" if rank else ""
            if group != "training":
                prefix += f"{group}/"
            for name, value in numbers_of(record.metrics, prefix):
                yield MetricPoint(name, value, record.steps_completed, record.time)

    def _try(self, call: Callable[[], object], tries: int | None = _NUM_TRIES) -> bool:
        """Call the tracker, with retries and delays after failures; return False if all failed.

        Args:
            call: The method to call.
            tries: How often at most; None for as long as the run lasts.
        """
        number = num_at_the_end = 0
        while not self._is_given_up:
            number += 1
            num_at_the_end += self._has_ended.is_set()
            try:
                call()
            except BaseException as error:
                # A library may leave by `sys.exit()`, or cancel a task: here that is a failure too.
                self._warn(error)
                if number == tries or num_at_the_end == _TRIES_AT_THE_END:
                    return False
                if num_at_the_end:
                    time.sleep(_DELAY_AT_THE_END_S)
                else:
                    self._has_ended.wait(min(2.0 ** (number - 1), _LONGEST_DELAY_S))
            else:
                return True
        return False

    def _warn(self, error: BaseException) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The tracker %r has failed: %s: %s. Training goes on, and the tracker is tried"
                " again; further failures are not logged.",
                self._name,
                type(error).__name__,
                error,
            )

    # ---- small parts ---------------------------------------------------------------------

    def _lose(self, count: int) -> None:
        # Whoever has given up has counted all that was left.
        if not self._is_given_up:
            self._tracker.num_lost += count

    def _count_rest(self) -> int:
        """Return how many reports and checkpoints are not sent."""
        tail = RunTail(self._run, dict(self._marks))
        num_lost = 0
        while found := tail.read():
            for key, entries in found:
                for entry in entries:
                    record = entry.decode()
                    if isinstance(record, MetricsReported):
                        num_lost += any(True for _ in self._points(key.rank, record))
                    else:
                        num_lost += isinstance(record, CheckpointStored)
        return num_lost

    def _write_state(self) -> None:
        state = {
            "tracked_as": self._tracked_as,
            "marks": {key.directory_name: mark for key, mark in self._marks.items()},
            "checkpoints": self._checkpoints,
        }
        try:
            self._path.parent.mkdir(exist_ok=True)
            written = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            written.write_text(json.dumps(state))
            # Atomic rename: a killed process leaves either the old or the new state.
            written.replace(self._path)
        except OSError as error:
            # On a full disk a later attempt may send some records twice.
            logger.debug("%s cannot be written: %s", self._path, error)


def _read_tracker_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    is_known = isinstance(state, dict) and isinstance(state.get("marks"), dict)
    return state if is_known else {}


def _name_of(info: RunInfo) -> str:
    trial = info.trial
    return info.name if trial is None else f"{info.name}-trial-{trial.trial_id}"
