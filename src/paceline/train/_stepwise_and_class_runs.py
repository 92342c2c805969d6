"""Run of a class, with its instances staying in the workers of a trainer."""

import atexit
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from paceline import core
from paceline._base.journal_records import encode_metrics
from paceline._base.run_directory import Control, RunDirectory
from paceline._training.workers.worker_failures import without_our_frames
from paceline._training.workers.worker_pools import PendingCall
from paceline.core._exceptions import GivenUpError
from paceline.train._results import Report, Results, check_saves, warn_of_reports
from paceline.train._run_driver import RunDriver
from paceline.train._run_protocol import Checkpoint, RankOutcome

logger = logging.getLogger(__name__)


class RunIterator(Iterator[Report]):
    """Iterator over the reports of a live run; see `Trainer.run_iterator`.

    Args:
        driver: The run, started.
        ranks: Whose reports; None for all.
        on_end: Called when the run has ended.
    """

    def __init__(
        self, driver: RunDriver, ranks: Collection[int] | None, on_end: Callable[[], None]
    ) -> None:
        self._driver = driver
        self._ranks = ranks
        self._on_end = on_end
        self._waiting: deque[Report] = deque()
        self._error: Exception | None = None

    def __next__(self) -> Report:
        """Return the next report.

        Raises:
            StopIteration: The run is finished.
            Exception: The error that ended the run.
        """
        while not self._waiting:
            if self._driver.is_finished:
                self._on_end()
                self._raise_error()
                raise StopIteration
            self._advance()
        return self._waiting.popleft()

    def is_finished(self) -> bool:
        """Tell whether the run has ended and all its reports were taken."""
        return self._driver.is_finished and not self._waiting

    def get_results(self) -> Results:
        """Return the return values of the function, after waiting for the run's end.

        Raises:
            Exception: The error that ended the run.
        """
        while not self._driver.is_finished:
            self._advance()
        self._on_end()
        error, self._error = self._error or self._driver.error, None
        if error is not None:
            raise without_our_frames(error)
        assert self._driver.results is not None
        return self._driver.results

    def get_returns(self) -> Results:
        """Return the results like `get_results`.

        Raises:
            Exception: The error that ended the run.
        """
        return self.get_results()

    def close(self) -> None:
        """Abandon an unfinished run and stop its workers."""
        self._driver.close()
        self._on_end()

    def _advance(self) -> None:
        try:
            reports = self._driver.advance()
        except BaseException as error:
            self._on_end()
            if not isinstance(error, Exception):
                raise
            # Reports before the error: they are returned first.
            reports, self._error = self._driver.take_reports(), error
        self._waiting.extend(
            report for report in reports if self._ranks is None or report.rank in self._ranks
        )
        if not self._waiting:
            self._raise_error()

    def _raise_error(self) -> None:
        """Raise the error of the run, only once."""
        error, self._error = self._error, None
        if error is not None:
            raise without_our_frames(error)


def as_ranks(ranks: Any) -> Collection[int] | None:
    """Return the set of wanted ranks; None for all."""
    if ranks is None:
        return None
    return {ranks} if isinstance(ranks, int) else set(ranks)


# How long the ranks may take to come to the report at which a run is stopped, in seconds.
_STOP_S = 2.0


class StepwiseRun(Iterator[Report]):
    """Iterator over the chief's reports, pausing the run at each; see `Trainer.run_stepwise`.

    Asking for the next report lets the function continue after the last one.

    Args:
        driver: The run, started.
        iterator: Its reports.
        known: The `recent` of an earlier run that this one continues.
    """

    def __init__(
        self, driver: RunDriver, iterator: RunIterator, known: Mapping[int, Mapping[str, Any]]
    ) -> None:
        self._driver = driver
        self._iterator = iterator
        self._recent = {number: dict(metrics) for number, metrics in known.items()}
        self._released = 0
        self._run = RunDirectory(driver.run_dir)

    def __next__(self) -> Report:
        """Let the function continue, and return its next report.

        Raises:
            StopIteration: The run is finished.
            Exception: The error that ended the run.
        """
        while True:
            self._run.write_control(Control(reports_released=self._released))
            report = next(self._iterator)
            # Maximum: reports repeated after a restart were released already.
            self._released = max(self._released, report.number)
            if self._is_new(report):
                return report

    @property
    def recent(self) -> dict[int, dict[str, Any]]:
        """The encoded metrics since the latest checkpoint, by the numbers of their reports.

        A run resumed from that checkpoint may report them again.
        """
        latest = self.latest_checkpoint
        first = 0 if latest is None else int(latest.metadata["num_reports"])
        self._recent = {n: metrics for n, metrics in self._recent.items() if n > first}
        return dict(self._recent)

    def _is_new(self, report: Report) -> bool:
        """Note a report; return False for a repeat of a report from before a restart.

        A function that saves after it reports repeats the last report. One that saves before it
        reports has another report of the same number; its metrics show that.
        """
        metrics = encode_metrics(report)
        if self._recent.get(report.number) == metrics:
            return False
        self._recent = {n: known for n, known in self._recent.items() if n < report.number}
        self._recent[report.number] = metrics
        return True

    @property
    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint saved by the function before its current report."""
        return self._driver.latest_checkpoint

    def get_results(self) -> Results:
        """Return the return values of the function, after the end of the run.

        Raises:
            Exception: The error that ended the run.
        """
        return self._iterator.get_results()

    def stop(self, timeout_s: float = _STOP_S) -> None:
        """End the run at its present report.

        `train.report` raises an exception in the function. The workers stay if all of them come to
        the report in time; else they are killed, and started again for the next run.

        Args:
            timeout_s: How long to wait for them, in seconds.
        """
        if self._driver.is_finished:
            return
        self._run.write_control(Control(reports_released=self._released, is_stopped=True))
        deadline = time.monotonic() + timeout_s
        try:
            while not self._driver.is_finished and time.monotonic() < deadline:
                self._driver.advance(max(0.0, deadline - time.monotonic()))
        except Exception:
            # Nobody waits for the results of this run.
            logger.debug("A stopped run has failed.", exc_info=True)
        self.close()

    def close(self) -> None:
        """Abandon an unfinished run and kill its workers."""
        self._iterator.close()


class ClassRun(RunDriver):
    """Run of a class: a lasting instance in each worker, with functions called until `finish`.

    The instances and the functions are in one run: they have the place of their worker, prepared
    models, loaders and optimizers stay prepared, and reports and checkpoints belong to the run.
    A call that fails leaves the run open. The next call starts other workers if these have ended,
    which make new instances; `load_checkpoint()` returns the last checkpoint in them.
    """

    def start(self, lock: ExitStack) -> None:
        """Call the callbacks, and have the workers make their instances.

        Args:
            lock: Holds the run's lock, which is given back at the end.

        Raises:
            WorkersLostError: Workers were lost too often.
            NotEnoughWorkersError: There were too few workers for too long.
            Exception: The error of the class or of a callback.
        """
        self._num_formed = -1
        self._failure: BaseException | None = None
        self._pid = os.getpid()
        super().start(lock)
        with self._ending():
            self._await_instances()
        # A program that leaves without `shutdown` must not leave the run open.
        atexit.register(self._finish_unasked)

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ranks: Sequence[int] | None,
    ) -> list[Any]:
        """Call a function with the instances, and return its results in rank order.

        Args:
            function: The function to call.
            args: Its arguments besides the instance.
            kwargs: Its keyword arguments.
            ranks: Which workers call it; None for all.

        Raises:
            IncompleteCheckpointError: Ranks have saved unequally many checkpoints.
            PreemptedError: The run has made room; it can resume from its last checkpoint.
            Exception: The error of the function or of a callback.
        """
        with self._ending():
            self._form_if_needed()
        call = self._ask("call_with_instance", (function, args, kwargs), function, ranks)
        with self._ending():
            self._await_end()
        try:
            outcomes: list[RankOutcome] = call.wait() or []
        except Exception as error:
            self._failure = error
            raise
        self._failure = None
        with self._ending():
            self._check(outcomes, is_whole=ranks is None)
        return [outcome.value for outcome in outcomes]

    def finish(self, error: BaseException | None = None) -> None:
        """End the run; does nothing the second time.

        Args:
            error: The error that ends it; by default the last call's, if it failed.
        """
        if self.is_finished:
            return
        error = error or self._failure
        if error is None and not self._has_instances:
            error = GivenUpError("The workers were ended before the run.")
        if error is None:
            with self._ending():
                self._end_instances()
        self._end(error)

    # ---- the calls -----------------------------------------------------------------------

    @property
    def _has_instances(self) -> bool:
        """Whether the workers have instances of this run, and no call is under way."""
        is_same = self._num_formed == self._workers.num_formed
        return is_same and self._workers.is_alive and self._has_ended.is_set()

    def _form_if_needed(self) -> None:
        if self._has_instances:
            return
        if isinstance(self._failure, self._retried):
            self._take_failure(self._failure)
            self.begin()
        else:
            self._begin_next()
        self._await_instances()

    def _await_instances(self) -> None:
        while True:
            self._await_end()
            if self.take_end() is not None:
                break
        self._num_formed = self._workers.num_formed

    def _prepare_next(self) -> None:
        # A master has all runs of a script in one directory: others may have begun meanwhile.
        attempt = self._opened.attempt
        others = [key.generation for key in self._run.journal_keys() if key.attempt == attempt]
        self._generation = max([self._generation, *others])
        super()._prepare_next()

    def _ask(
        self,
        name: str,
        arguments: tuple[Any, ...] = (),
        function: Callable[..., Any] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> PendingCall:
        self._call = call = self._workers.ask(name, arguments, func=function, ranks=ranks)
        self._has_ended.clear()
        call.add_done_callback(self._note_end)
        return call

    def _await_end(self) -> None:
        """Wait for the end of the present call, and for its workers first."""
        with self._preemption.watching():
            while not self.wait():
                self._follower.follow()
                if self._preemption.is_due(self.num_commits):
                    raise core.PreemptedError
                if self._form_at is not None:
                    self.go_on()
        # After the end the journals hold all that was reported.
        self._follower.follow()

    def _values_of(self, call: PendingCall) -> list[Any]:
        return call.wait() or []

    # ---- the outcomes --------------------------------------------------------------------

    def _check(self, outcomes: Sequence[RankOutcome], *, is_whole: bool) -> None:
        """Check and settle the checkpoints saved by a call of all ranks."""
        if any(outcome.is_preempted for outcome in outcomes):
            raise core.PreemptedError
        if is_whole:
            num_lacking = self._settle(outcomes, "await_commits")
            self._follower.follow()
            check_saves(self._busy(outcomes), num_lacking, self._results_of(outcomes))

    def _end_instances(self) -> None:
        call = self._ask("end_instance")
        self._await_end()
        outcomes: list[RankOutcome] = call.wait() or []
        num_lacking = self._settle(outcomes)
        self._follower.follow()
        self.results = self._results_of(outcomes)
        check_saves(self._busy(outcomes), num_lacking, self.results)
        warn_of_reports(outcomes)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """End the run if the block raises, with the exception as its error."""
        try:
            yield
        except BaseException as error:
            self._end(error)
            raise

    def _end(self, error: BaseException | None) -> None:
        atexit.unregister(self._finish_unasked)
        super()._end(error)

    def _finish_unasked(self) -> None:
        """End the run of a trainer never shut down, with the program's own error, if any."""
        # Forked child: exit handlers are inherited, but the run is the parent's.
        if os.getpid() != self._pid:
            return
        # Interactive sessions: an error ends a cell or a line, but not the program.
        is_interactive = hasattr(sys, "ps1")
        self.finish(None if is_interactive else getattr(sys, "last_value", None))
