"""Asking the hyperparameter search how far to train."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.core._control_file import ControlFile
from paceline.core._distributed_context import DistributedContext
from paceline.core._preempt_context import PreemptContext
from paceline.core._search_decision import SearchDecision
from paceline.journal import (
    JournalWriter,
    OperationCompleted,
    OperationsRequested,
    ProgressReported,
    decode_value,
    encode_metrics,
)

_POLL_S = 0.02
_LONGEST_SILENCE_S = 5.0
_WAIT, _END = 0, -1


class SearcherOperation:
    """Train until `length` (absolute, in the search's unit), validate, and report the metric."""

    def __init__(
        self, *, length: int, max_length: int, journal: JournalWriter, is_chief: bool
    ) -> None:
        self._length = length
        self._max_length = max(length, max_length)
        self._journal = journal
        self._is_chief = is_chief
        self._is_completed = False

    def __repr__(self) -> str:
        return f"SearcherOperation(length={self._length})"

    @property
    def length(self) -> int:
        """Until where to train, counted from the start of the trial."""
        return self._length

    @property
    def is_completed(self) -> bool:
        """Whether `report_completed` was called."""
        return self._is_completed

    def report_progress(self, length: float) -> None:
        """Report how far training has come, from 0 to `length` inclusive.

        Raises:
            RuntimeError: This process is not the chief, or the operation is completed.
            ValueError: `length` is out of range.
        """
        self._check("report_progress")
        if not 0 <= length <= self._length:
            raise ValueError(
                f"`length` must be from 0 to {self._length} inclusive, but got {length}."
            )
        progress = float(length / self._max_length)
        self._journal.append(ProgressReported(time=time.time(), progress=progress))

    def report_completed(self, metric: Any) -> None:
        """Report the searched metric, measured after training to `length`.

        Args:
            metric: A number, NumPy scalar or 0-d tensor; NaN is kept and counts as worst.

        Raises:
            RuntimeError: This process is not the chief, or the operation is completed.
            TypeError: `metric` is no number.
        """
        self._check("report_completed")
        value = encode_metrics({"metric": metric})["metric"]
        if type(decode_value(value)) not in (int, float):
            raise TypeError(f"`metric` must be a number, but got {metric!r}.")
        self._is_completed = True
        self._journal.append(
            OperationCompleted(time=time.time(), length=self._length, metric=value)
        )

    def _check(self, call: str) -> None:
        if not self._is_chief:
            raise RuntimeError(
                f"Only the chief may call `{call}`, but another rank did."
                " Hint: guard the call by `if context.distributed.rank == 0:`."
            )
        if self._is_completed:
            raise RuntimeError(
                f"`{call}` must come before the operation is completed, but that of length"
                f" {self._length} is."
            )


class SearcherContext:
    """Take part in a hyperparameter search.

    Without a master there is one operation, as long as the config's searcher says, else 1.
    """

    def __init__(
        self,
        *,
        control: ControlFile,
        decision: SearchDecision,
        distributed: DistributedContext,
        preempt: PreemptContext,
        journal: JournalWriter,
        searcher: Mapping[str, Any],
        is_managed: bool,
        completed_length: int,
    ) -> None:
        self._control = control
        self._decision = decision
        self._distributed = distributed
        self._preempt = preempt
        self._journal = journal
        self._max_length = configured_length(searcher)
        self._is_managed = is_managed
        self._completed_length = completed_length
        self._has_asked = False

    def operations(self) -> Iterator[SearcherOperation]:
        """Yield the search's operations until there is no further one.

        The next one may take long to come, as it depends on other trials. The iteration also ends
        when the attempt is preempted: ask `should_preempt()` afterwards. All ranks iterate.

        Raises:
            RuntimeError: The last operation was not completed.
            DistributedTimeoutError: Other ranks do not iterate.
        """
        is_chief = self._distributed.rank == 0
        self._decision.expect_none()
        if is_chief and not self._has_asked:
            self._has_asked = True
            self._journal.append(OperationsRequested(time=time.time()))
        while (length := self._next_length()) != _END:
            operation = SearcherOperation(
                length=length,
                max_length=self._max_length or 0,
                journal=self._journal,
                is_chief=is_chief,
            )
            yield operation
            if is_chief and not operation.is_completed:
                raise RuntimeError(
                    "An operation must be completed before the next one, but that of length"
                    f" {length} is not. Hint: call `report_completed(metric)`."
                )
            self._completed_length = max(self._completed_length, length)

    def _next_length(self) -> int:
        """Return the next operation's length on every rank, or the mark of the end."""
        while True:
            answer = self._wait_for_runner() if self._distributed.rank == 0 else _WAIT
            # While the chief waits it tells so: silence would look like a dead rank.
            answer = self._distributed.broadcast(answer)
            if answer != _WAIT:
                return answer

    def _wait_for_runner(self) -> int:
        if not self._is_managed:
            length = self._max_length or 1
            return length if length > self._completed_length else _END
        deadline = time.monotonic() + min(_LONGEST_SILENCE_S, self._distributed.timeout_s / 4)
        while time.monotonic() < deadline:
            control = self._control.read()
            if control.operations_closed or self._preempt.is_wanted():
                return _END
            if (control.operation_length or 0) > self._completed_length:
                return int(control.operation_length or 0)
            time.sleep(_POLL_S)
        return _WAIT


def configured_length(searcher: Mapping[str, Any]) -> int | None:
    """Return the longest training that a searcher config asks for, or None if it says none."""
    length = searcher.get("max_length", searcher.get("max_time"))
    if isinstance(length, Mapping):
        length = next(iter(length.values()), None)
    return length if isinstance(length, int) and length > 0 else None
