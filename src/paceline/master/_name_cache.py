"""Names that are costly to gather, kept while nothing that they follow from has come or gone."""

import time
from collections.abc import Callable, Hashable

# Whoever overrides the hyperparameters of an experiment that is continued waits so long at most.
_FRESH_S = 5.0


class NameCache:
    """The names of the last call; used by several threads, which may gather them at once."""

    def __init__(self) -> None:
        self._kept: tuple[Hashable, float, list[str]] | None = None

    def read(self, state: Hashable, gather: Callable[[], list[str]]) -> list[str]:
        """Return the kept names if they are of this state and some seconds old at most."""
        kept, now = self._kept, time.monotonic()
        if kept is not None and kept[0] == state and now < kept[1] + _FRESH_S:
            return kept[2]
        names = gather()
        self._kept = (state, now, names)
        return names
