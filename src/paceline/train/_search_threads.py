"""Threads that run the trials of a search, each with workers of its own that stay warm."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.search import ExitReason
from paceline.train._config import CheckpointStrategy
from paceline.train._search_run import NextMove, SearchRun, SearchTrial, reason_of
from paceline.train._trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialWork:
    """What each trial runs.

    Attributes:
        function: The train function.
        dataset: Its data set.
        strategy: Which checkpoints of a trial to keep.
    """

    function: Callable[..., Any]
    dataset: Any
    strategy: CheckpointStrategy


class TrialThread(threading.Thread):
    """Run one trial after the other.

    Args:
        search: Hands out trials and judges their reports.
        trainer: The workers.
        work: What a trial runs.

    Attributes:
        failure: The error that has ended the whole search.
    """

    def __init__(self, search: SearchRun, trainer: Trainer, work: TrialWork) -> None:
        super().__init__(name="paceline-search", daemon=True)
        self.failure: BaseException | None = None
        self._search = search
        self._trainer = trainer
        self._work = work

    def run(self) -> None:
        """Run trials until there are none left."""
        try:
            while (trial := self._search.next_trial()) is not None:
                self._run_trial(trial)
        except BaseException as error:
            # An error of the search itself; those of trials are inputs of it.
            self.failure = error
            self._search.close()

    def _run_trial(self, trial: SearchTrial) -> None:
        work = self._work
        try:
            run = self._trainer.run_stepwise(
                work.function,
                dict(trial.result.config),
                work.dataset,
                checkpoint_strategy=work.strategy,
                known=trial.known,
                run_dir=trial.result.run_dir,
                seed=trial.create.trial_seed,
            )
        except Exception as error:
            self._fail(trial, error)
            return
        while True:
            try:
                report = next(run, None)
                if report is None:
                    run.get_results()
            except Exception as error:
                self._fail(trial, error)
                return
            move = NextMove.END if report is None else self._search.take_report(trial, report)
            if move is not NextMove.GO_ON:
                break
        run.stop()
        if move is NextMove.PAUSE:
            self._search.pause(trial)
        else:
            self._search.end(trial, ExitReason.COMPLETED, None)

    def _fail(self, trial: SearchTrial, error: Exception) -> None:
        told = error.__cause__ or error
        logger.warning("Trial %d has failed: %s", trial.result.number, told)
        self._search.end(trial, reason_of(error), error)
