"""Workers of a `PyTorchTrainer`, with the state to resume from after a loss."""

from collections.abc import Callable
from itertools import count
from typing import Any

from paceline._base.gpus import num_visible_gpus
from paceline._training.workers.failures_and_restarts import RestartPolicy, TrainingFailedError
from paceline._training.workers.worker_pools import WorkerPool
from paceline._training.workers.worker_resources import WorkerSettings
from paceline._training.workers.workers import ElasticLimits, Workers
from paceline.creators._passes import (
    KeptState,
    MemoryFile,
    join_pass_state,
    read_parts,
    split_pass_state,
)
from paceline.creators._replica import execute, make_replica
from paceline.creators._trainer_arguments import ReplicaSpec, check_gpu

# An optimizer loads the latter, which would take each worker more than a second.
_PRELOAD = ("paceline.creators._replica", "torch._dynamo")


class ReplicaWorkers(Workers[WorkerPool]):
    """The workers of a trainer, each with its replica; they stay until `stop`.

    At first there must be as many as were asked for. When some were lost, it continues with as many
    as can be started, from the state that this process keeps.

    Args:
        settings: How they are started.
        spec: The objects that each makes.

    Attributes:
        num_losses: How often workers were lost.

    Raises:
        ResourcesError: The workers want more than there is.
    """

    def __init__(self, settings: WorkerSettings, spec: ReplicaSpec) -> None:
        limits = ElasticLimits.of(settings.num_workers)
        hint = "free resources, or a smaller `num_workers`."
        super().__init__(limits, self._new_pool, hint=hint)
        self._settings = settings
        self._spec = spec
        self._is_local = settings.cluster == "local"
        self._kept: KeptState | None = None
        self._next: MemoryFile | None = None
        self._is_current = False
        self.num_losses = 0
        if self._is_local:
            settings.resources.check_cores(settings.num_workers, "num_cpus_per_worker")
            if spec.use_gpu is True:
                check_gpu(has_gpu=num_visible_gpus() > 0)
        # A Ray cluster refuses here workers that it can never run.
        self._made_pool = self._new_pool()

    @property
    def num_workers(self) -> int:
        """How many workers there are, or were at last."""
        return self._num_last or self._settings.num_workers

    def _set_up(self) -> None:
        self._wait_for(make_replica, self._spec)
        # Limits relaxed once the requested number has run: having fewer is a loss that may pass.
        self._elastic.limits = ElasticLimits(least=1, most=self._spec.num_shards)

    def _new_pool(self) -> WorkerPool:
        return self._settings.make_pool(
            self._settings.num_workers,
            timeout_s=self._spec.timeout_s,
            preload=_PRELOAD,
            strategy="SPREAD",
        )

    @property
    def is_state_kept(self) -> bool:
        """Whether the present state is in this process."""
        return self._is_current

    def start(self) -> None:
        """Start the first workers; no worker is left if the start fails."""
        try:
            self.form()
        except BaseException:
            self.stop(force=True)
            raise

    def state(self) -> dict[str, Any]:
        """Return the present state; a copy of its parts stays in this process."""
        kept = self._current()
        return join_pass_state(read_parts(kept.path, kept.parts))

    def keep(self, parts: list[Any] | None) -> None:
        """Replace the kept state by the present state.

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
        """Have the workers resume from a state."""
        parts = split_pass_state(state)
        self._load(KeptState(parts))
        self.keep(parts)

    def form_if_lost(self) -> None:
        """Start the workers unless they are alive, and restore the kept state.

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

        The state is kept, so the next call continues with others.
        """
        if self.is_alive and self.next_size() is not None:
            self._current()
            self.end_generation()

    def execute(self, method: str, *args: Any, changes_state: bool = False) -> list[Any]:
        """Call a method of the replica in every worker, and return the values in rank order.

        Args:
            method: Its name.
            args: Its arguments.
            changes_state: Whether the state is another one afterwards.

        Raises:
            WorkerFailedError: A worker was lost.
            Exception: The method's error on the rank that failed first.
        """
        self.form_if_lost()
        try:
            return self._execute(method, *args)
        finally:
            self._is_current = self._is_current and not changes_state

    def execute_with_retries(
        self,
        method: str,
        *args: Any,
        max_retries: int,
        keeps_state: bool = False,
        source: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method as `execute` does, again after each loss.

        Args:
            method: Its name.
            args: Its arguments.
            max_retries: How often workers may be lost.
            keeps_state: Whether to keep the present state before. The method is then also given
                the file for the next one, or None.
            source: The state to resume from after a loss; by default the kept one.

        Raises:
            WorkersLostError: They were lost too often.
            Exception: The method's error.
        """
        attempts = count()

        def attempt() -> list[Any]:
            if source is not None and next(attempts):
                self.keep(split_pass_state(source))
            self.form_if_lost()
            if keeps_state:
                self._current()
                # Kept state must stay whole until the method has stored the next one.
                return self._execute(method, *args, self._path_for_next())
            return self._execute(method, *args)

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
            self.keep(self._execute("state_part", self._path_for_next()))
        assert self._kept is not None
        return self._kept

    def _path_for_next(self) -> str | None:
        """Return the path of a file for the next state; None if out of the workers' reach."""
        if self._next is None and self._is_local and MemoryFile.is_possible():
            self._next = MemoryFile()
        return None if self._next is None else self._next.path

    def _load(self, state: KeptState) -> None:
        if not self.is_alive:
            self.form()
        self._execute("load_state", state.path, state.parts)
        self._is_current = True

    def _execute(self, method: str, *args: Any) -> list[Any]:
        return self._wait_for(execute, method, *args)

    def _wait_for(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        try:
            values = self.pool.submit(function, args).wait()
        except KeyboardInterrupt:
            # Nobody knows how far the workers are.
            super().stop(force=True)
            raise
        assert values is not None
        return values
