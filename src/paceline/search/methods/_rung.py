"""One rung of a halving bracket: the results that were compared there."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from paceline.search._inputs_and_operations import encode_search_float


class Rung:
    """Hold a rung's entries in ranked order, where smaller values are better.

    Numbers are kept in two parallel lists, so that a search among 100,000 entries compares plain
    floats. Entries without a finite number (NaN, infinity, or a trial that failed) rank behind all
    of them.
    """

    __slots__ = ("_ids", "_unranked", "_values", "units")

    def __init__(self, units: int) -> None:
        self.units = units
        self._values: list[float] = []
        self._ids: list[str] = []
        self._unranked: list[str] = []

    def __len__(self) -> int:
        return len(self._values) + len(self._unranked)

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """Iterate over request ids and values, the best first; the last ones may be NaN."""
        yield from zip(self._ids, self._values, strict=True)
        for request_id in self._unranked:
            yield request_id, math.nan

    def insert(self, request_id: str, value: float) -> int:
        """Insert an entry behind those that are equal or better and return its rank from 0."""
        if not math.isfinite(value):
            self._unranked.append(request_id)
            return len(self) - 1
        rank = bisect_right(self._values, value)
        self._values.insert(rank, value)
        self._ids.insert(rank, request_id)
        return rank

    def remove(self, request_id: str) -> None:
        """Remove a trial's entry, which takes time in proportion to the rung's size."""
        if request_id in self._unranked:
            self._unranked.remove(request_id)
            return
        rank = self._ids.index(request_id)
        del self._ids[rank], self._values[rank]

    def snapshot(self) -> dict[str, Any]:
        """Return the entries as JSON-able data."""
        return {
            "units": self.units,
            "values": [encode_search_float(value) for value in self._values],
            "ids": list(self._ids),
            "unranked": list(self._unranked),
        }

    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the entries over from a snapshot."""
        self._values = [float(value) for value in snapshot["values"]]
        self._ids = list(snapshot["ids"])
        self._unranked = list(snapshot["unranked"])
