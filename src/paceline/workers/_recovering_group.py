"""Warm workers with a state, which are formed again after a loss and go on from it."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from paceline.workers._elastic_group import ElasticGroup
from paceline.workers._elastic_size import ElasticLimits
from paceline.workers._errors import TrainingFailedError
from paceline.workers._kept_worker_state import KeptState, MemoryFile, StateFunctions, read_parts
from paceline.workers._restart_policy import RestartPolicy


class RecoveringGroup(ElasticGroup):
    """The workers of a pool, and the state that they go on from if they are lost.

    Args:
        limits: How many workers there may be.
        hint: What to do about too few of them, which the error says.
        functions: How their state is captured and put back.
    """

    def __init__(self, limits: ElasticLimits, *, hint: str, functions: StateFunctions) -> None:
        super().__init__(limits, hint=hint)
        self._functions = functions
        self._kept: KeptState | None = None
        self._next: MemoryFile | None = None
        self._is_current = False
        self.num_losses = 0

    @property
    @abstractmethod
    def is_local(self) -> bool:
        """Whether all workers are processes of this machine."""

    @property
    def is_state_kept(self) -> bool:
        """Whether the present state is in this process."""
        return self._is_current

    def start(self) -> None:
        """Start the workers at first; none is left if that fails."""
        try:
            self.form()
        except BaseException:
            self.stop(force=True)
            raise

    def state(self) -> dict[str, Any]:
        """Return the present state, and keep it."""
        kept = self._current()
        return self._functions.join(read_parts(kept.path, kept.parts))

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
        parts = self._functions.split(state)
        self._load(KeptState(parts))
        self.keep(parts)

    def form_if_lost(self) -> None:
        """Start the workers if they are not alive, and have them go on from what was kept.

        Raises:
            TrainingFailedError: Nothing was kept.
            Exception: They cannot be formed.
        """
        if self.is_alive:
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
        if self.is_alive and self.next_size() is not None:
            self._current()
            self.end_generation()

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        changes_state: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        """Have workers call a function, and return what they returned, in rank order.

        Args:
            function: The function.
            args: Its arguments.
            changes_state: Whether the state is another one afterwards.
            ranks: Which workers; all by default.

        Raises:
            WorkerFailedError: A worker was lost.
            Exception: What the function raised on the rank that failed first.
        """
        self.form_if_lost()
        try:
            return self._call(function, *args, ranks=ranks)
        finally:
            self._is_current = self._is_current and not changes_state

    def call_with_retries(
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
                self.keep(self._functions.split(source))
            self.form_if_lost()
            if keeps_state:
                self._current()
                # That one must stay whole until the function has stored the next.
                return self._call(function, *args, self._path_for_next())
            return self._call(function, *args)

        policy = RestartPolicy(max_retries)

        def go_on(error: Exception) -> None:
            self.num_losses += 1
            policy.check(error, 0, "from the state that was kept")

        return self.call_until_done(attempt, go_on)

    def stop(self, *, force: bool = False) -> None:
        """End the workers, in bounded time, and forget the state."""
        self.keep(None)
        if self._next is not None:
            self._next.close()
            self._next = None
        super().stop(force=force)

    def _current(self) -> KeptState:
        if not self._is_current:
            self.form_if_lost()
            self.keep(self._call(self._functions.capture, self._path_for_next()))
        assert self._kept is not None
        return self._kept

    def _path_for_next(self) -> str | None:
        """Return a file for the next state; None if the workers cannot reach one."""
        if self._next is None and self.is_local and MemoryFile.is_possible():
            self._next = MemoryFile()
        return None if self._next is None else self._next.path

    def _load(self, state: KeptState) -> None:
        if not self.is_alive:
            self.form()
        self._call(self._functions.restore, state.path, state.parts)
        self._is_current = True

    def _call(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        try:
            values = self.submit(function, args, ranks=ranks).wait()
        except KeyboardInterrupt:
            # Nobody knows how far the workers are.
            super().stop(force=True)
            raise
        assert values is not None
        return values
