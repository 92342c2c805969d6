"""Progress of a search without a master: trials, their best value, time left, end."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline._base.progress_display import TrainingProgress
from paceline.core._run_feedback import RunFeedback, ending_of

if TYPE_CHECKING:
    from paceline._training.masterless_search import SearchRun, SearchStanding

_LONGEST_CONFIG = 200


class SearchProgress:
    """Display of a search, for the thread that waits for the trials.

    Args:
        feedback: The lines of the search's run.
        metric: The searched metric.
        num_at_once: How many trials run at once.
    """

    def __init__(self, feedback: RunFeedback, metric: str, num_at_once: int) -> None:
        self._feedback, self._metric = feedback, metric
        self._num_at_once = num_at_once
        self._progress = TrainingProgress(None, "trials", is_quiet=feedback.is_quiet)
        self._told: tuple[int, float | None] = (0, None)
        self._best = ""

    def begin(self, run: "SearchRun", more: str) -> None:
        """Show where the search begins."""
        standing = run.standing()
        at_once = f", {self._num_at_once} at once" if self._num_at_once > 1 else ""
        self._feedback.begin(f"search of {standing.num_trials} trial(s){at_once}", more)
        self._told = (standing.num_ended, standing.best_value)
        self._progress.start(standing.fraction * standing.num_trials, epoch=standing.num_ended)

    def update(self, run: "SearchRun") -> None:
        """Show how far the search is."""
        self._show(run.standing())

    def end(self, run: "SearchRun", error: BaseException | None) -> None:
        """Show how the search has ended, its best trial, and how to continue."""
        self._show(run.standing())
        ending, directory = ending_of(error), str(run.directory)
        resume = f"the same call with directory={directory!r}"
        details = self._feedback.details(ending, None, None, resume)
        self._progress.end(ending, *filter(None, (self._best,)), *details)

    def _show(self, standing: "SearchStanding") -> None:
        self._progress.expect(standing.num_trials)
        done, best = standing.fraction * standing.num_trials, standing.best_value
        metrics: Mapping[str, Any] = {} if best is None else {f"best_{self._metric}": best}
        self._progress.update(done, 0, metrics, epoch=standing.num_ended)
        self._progress.note(f"{standing.num_running} running")
        if best is not None:
            config = ", ".join(f"{name}={value}" for name, value in standing.best_config.items())
            self._best = f"best trial {standing.best_number}: {config}"[:_LONGEST_CONFIG]
        news = (standing.num_ended, best)
        if news != self._told:
            self._told = news
            self._progress.report(metrics)
