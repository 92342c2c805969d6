"""Workers that are formed again after a loss, from the state that their driver has kept."""

from collections.abc import Callable
from itertools import count
from typing import Any

from paceline.creators import _worker
from paceline.creators._group import ReplicaGroup
from paceline.creators._kept import KeptState, MemoryFile
from paceline.creators._state import parts_of
from paceline.workers import RestartPolicy, TrainingFailedError


class RecoveringGroup:
    """The workers of a trainer, and what they go on from if they are lost.

    Args:
        group: The workers, which are formed here.

    Raises:
        Exception: They could not be formed.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._kept: KeptState | None = None
        self._next: MemoryFile | None = None
        self._is_current = False
        try:
            group.form()
        except BaseException:
            group.stop(force=True)
            raise

    @property
    def num_workers(self) -> int:
        """How many workers there are, or were at last."""
        return self._group.num_workers

    @property
    def is_state_kept(self) -> bool:
        """Whether the present state is in this process."""
        return self._is_current

    def state(self) -> dict[str, Any]:
        """Return the present state, and keep it."""
        return self._current().whole()

    def keep(self, parts: list[Any] | None) -> None:
        """Take a state for the present one.

        Args:
            parts: Its parts, the chief's None if that is in the file for the next state; or None
                if nobody has fetched them.
        """
        if self._kept is not None:
            self._kept.close()
        self._kept, self._is_current = None, parts is not None
        if parts is not None:
            self._kept = KeptState(parts, self._next)
            if parts[0] is None:
                self._next = None

    def load(self, state: dict[str, Any]) -> None:
        """Have the workers go on from a state."""
        self._load(KeptState(parts_of(state)))
        self.keep(parts_of(state))

    def form(self) -> None:
        """Start the workers if they are not alive, and have them go on from what was kept.

        Raises:
            TrainingFailedError: Nothing was kept.
            Exception: They cannot be formed.
        """
        if self._group.is_alive:
            return
        if self._kept is None:
            raise TrainingFailedError(
                "The workers were lost, and there is no state to go on from, as none was kept."
                " Hint: load(path); with `max_retries` above 0 `train` keeps the state."
            )
        self._load(self._kept)

    def end_to_resize(self) -> None:
        """End the workers if more can run, or the nodes of some will be taken away.

        The state is kept, so the next call goes on with others.
        """
        if self._group.is_alive and self._group.next_size() is not None:
            self._current()
            self._group.end_generation()

    def call(
        self, function: Callable[..., Any], *args: Any, changes_state: bool = False, **options: Any
    ) -> list[Any]:
        """Have workers call a function, and return what they returned, in rank order.

        Args:
            function: The function.
            args: Its arguments.
            changes_state: Whether the state is another one afterwards.
            options: Of `ReplicaGroup.call`.
        """
        self.form()
        try:
            return self._group.call(function, *args, **options)
        finally:
            self._is_current = self._is_current and not changes_state

    def call_until_done(
        self,
        function: Callable[..., Any],
        *args: Any,
        max_retries: int,
        keeps_state: bool = False,
        source: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Have workers call a function, again after each loss, and return what they returned.

        Args:
            function: The function.
            args: Its arguments.
            max_retries: How often workers may be lost.
            keeps_state: Whether to keep the present state before. The function is then also given
                the file for the next one, or None.
            source: The state to go on from after a loss; by default what was kept.

        Raises:
            WorkersLostError: They were lost too often.
            Exception: What the function raised.
        """
        attempts = count()

        def attempt() -> list[Any]:
            if source is not None and next(attempts):
                self.keep(parts_of(source))
            self.form()
            if keeps_state:
                self._current()
                # That one must stay whole until the function has stored the next.
                return self._group.call(function, *args, self._path_for_next())
            return self._group.call(function, *args)

        policy = RestartPolicy(max_retries)
        return self._group.call_until_done(attempt, policy, "from the state that was kept")

    def stop(self, *, force: bool) -> None:
        """End the workers, in bounded time."""
        self.keep(None)
        if self._next is not None:
            self._next.close()
            self._next = None
        self._group.stop(force=force)

    def _current(self) -> KeptState:
        if not self._is_current:
            self.form()
            self.keep(self._group.call(_worker.state, self._path_for_next()))
        assert self._kept is not None
        return self._kept

    def _path_for_next(self) -> str | None:
        """Return a file for the next state; None if the workers cannot reach one."""
        if self._next is None and self._group.is_local and MemoryFile.is_possible():
            self._next = MemoryFile()
        return None if self._next is None else self._next.path

    def _load(self, state: KeptState) -> None:
        if not self._group.is_alive:
            self._group.form()
        self._group.call(_worker.load_state, state.path, state.parts)
        self._is_current = True
