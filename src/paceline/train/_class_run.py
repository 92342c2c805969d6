"""The run of a class, whose instances stay in the workers of a trainer."""

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from paceline import core
from paceline.train._outcome_checks import check_saves, warn_of_reports
from paceline.train._run_driver import RunDriver
from paceline.workers import PendingCall
from paceline.workers.runs import Job, RankOutcome


class ClassRun(RunDriver):
    """Have each worker make an instance of a class, and call functions with it until `finish`.

    The instances and the functions are in one run: they have the place of their worker, prepared
    models, loaders and optimizers stay prepared, and reports and checkpoints are those of the run.
    A call that fails leaves the run open. The next call starts other workers if these have ended,
    which make new instances; `load_checkpoint()` returns the last checkpoint in them.
    """

    def start(self, lock: ExitStack) -> None:
        """Tell the callbacks, and have the workers make their instances.

        Args:
            lock: Holds the run's lock, which is given back at the end.

        Raises:
            WorkersLostError: Workers were lost too often.
            NotEnoughWorkersError: There were too few workers for too long.
            Exception: What the class or a callback raised.
        """
        self._num_formed = -1
        self._failure: BaseException | None = None
        self._pid = os.getpid()
        super().start(lock)
        with self._ending():
            self._await_instances()
        atexit.register(self._finish_unasked)

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ranks: Sequence[int] | None,
    ) -> list[Any]:
        """Call a function with the instances, and return what it returned, in rank order.

        Args:
            function: What to call.
            args: What it is given besides the instance.
            kwargs: What it is given by keywords.
            ranks: Which workers call it; None for all.

        Raises:
            IncompleteCheckpointError: Ranks have saved unequally many checkpoints.
            PreemptedError: The run has made room; it can go on from its last checkpoint.
            Exception: What the function or a callback raised.
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
            error: What ends it; else the last call tells.
        """
        if self.is_finished:
            return
        error = error or self._failure
        if error is None and not self._has_instances:
            error = core.GivenUpError("The workers were ended before the run.")
        if error is None:
            with self._ending():
                self._end_instances()
        self._end(error)

    # ---- the calls -----------------------------------------------------------------------

    @property
    def _has_instances(self) -> bool:
        """Whether the workers have instances of this run, and no call is under way."""
        is_same = self._num_formed == self._group.num_formed
        return is_same and self._group.is_alive and self._has_ended.is_set()

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
        self._num_formed = self._group.num_formed

    def _hand_over(self, job: Job) -> PendingCall:
        return self._group.make_instances(job, self._follower.follow)

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
        self._call = call = self._group.ask(name, arguments, func=function, ranks=ranks)
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
        """See to the checkpoints that a call of all ranks has saved."""
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
        """End the run by what the block raises."""
        try:
            yield
        except BaseException as error:
            self._end(error)
            raise

    def _end(self, error: BaseException | None) -> None:
        atexit.unregister(self._finish_unasked)
        super()._end(error)

    def _finish_unasked(self) -> None:
        """End the run of a trainer that nobody shut down, by how the program ends."""
        if os.getpid() != self._pid:
            return
        # In a notebook or a console an error ends a cell or a line, but not the program.
        is_interactive = hasattr(sys, "ps1")
        self.finish(None if is_interactive else getattr(sys, "last_value", None))
