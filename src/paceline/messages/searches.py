"""Models of the REST API on searches: their rungs, and previews."""

from collections import Counter
from typing import Any

from paceline.messages.base import Message, Number, Request


class RungEntry(Message):
    """A trial's place in a rung; `metric` is None if it has not come there, or failed.

    `decision` is "waiting" for a trial on its way there, else one of "continued", "stopped",
    "finished" and "failed".
    """

    trial_id: int
    metric: Number | None
    decision: str


class Rung(Message):
    """One rung of a halving search; `length` is the training length at which it decides.

    `num_by_decision` counts all of its trials. Of a large rung `entries` has a part, spread evenly
    over the ranks, the first and the last one included. A master of before counts none.
    """

    length: int
    entries: list[RungEntry]
    num_by_decision: dict[str, int] = {}

    @property
    def counts(self) -> dict[str, int]:
        """The number of trials by decision."""
        return self.num_by_decision or dict(Counter(entry.decision for entry in self.entries))


class SearchView(Message):
    """The rungs of each bracket; empty for searches that do not halve."""

    brackets: list[list[Rung]]


class PreviewRow(Message):
    """How many trials will train how long; `length` None means to completion."""

    num_trials: int
    length: int | None


class SearchPreview(Message):
    """What a search would train."""

    searcher: str
    unit: str | None
    rows: list[PreviewRow]


class PreviewSearch(Request):
    """A configuration whose search is to be previewed."""

    config: dict[str, Any]
