"""A run whose reports are taken one by one."""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

from paceline.train._results import Report, Results
from paceline.train._run_driver import RunDriver


class RunIterator(Iterator[Report]):
    """Yield the reports of a run while it goes on; see `Trainer.run_iterator`.

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
            Exception: What ended the run.
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
        """Return what the functions returned, after waiting for the run's end.

        Raises:
            Exception: What ended the run.
        """
        while not self._driver.is_finished:
            self._advance()
        self._on_end()
        error, self._error = self._error or self._driver.error, None
        if error is not None:
            raise error
        assert self._driver.results is not None
        return self._driver.results

    def get_returns(self) -> Results:
        """Return what the functions returned, after waiting for the run's end.

        Raises:
            Exception: What ended the run.
        """
        return self.get_results()

    def close(self) -> None:
        """Give up a run that is not finished; its workers are stopped."""
        self._driver.close()
        self._on_end()

    def _advance(self) -> None:
        try:
            reports = self._driver.advance()
        except BaseException as error:
            self._on_end()
            if not isinstance(error, Exception):
                raise
            # What was reported before the error comes before it.
            reports, self._error = self._driver.take_reports(), error
        self._waiting.extend(
            report for report in reports if self._ranks is None or report.rank in self._ranks
        )
        if not self._waiting:
            self._raise_error()

    def _raise_error(self) -> None:
        """Raise what ended the run, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def as_ranks(ranks: Any) -> Collection[int] | None:
    """Return the ranks whose reports are wanted; None for all."""
    if ranks is None:
        return None
    return {ranks} if isinstance(ranks, int) else set(ranks)
