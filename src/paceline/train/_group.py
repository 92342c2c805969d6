"""The workers of a trainer: formed, formed again, and set up each time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from paceline.train._config import TorchConfig
from paceline.train._output import WorkerOutput
from paceline.train._spec import Instance, Job
from paceline.workers import LocalPool, PendingCall, WorkerPool


class InWorker:
    """A function of `paceline.train._worker`, which the driver does not import, as it loads torch.

    Args:
        name: The function.
        func: A function of the user's that it is to call, whose script's names the worker needs.
    """

    def __init__(self, name: str, func: Any = None) -> None:
        self._name = name
        # The pool looks for it under the name that `functools.partial` has for it.
        self.func = func

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return getattr(import_module("paceline.train._worker"), self._name)(*args)


@dataclass(slots=True, kw_only=True)
class GroupSettings:
    """How workers are started and set up.

    Attributes:
        num_workers: How many.
        config: How they meet.
        cpus_per_worker: The cores of each, or None to share them.
        gpus_per_worker: The GPUs of each, or None for one if there are any.
        heartbeat_timeout_s: How long one may give no sign of life, in seconds.
        environment: Variables for the workers.
        hook: Called by each of them before anything else.
        instance: What each of them makes.
    """

    num_workers: int
    config: TorchConfig
    cpus_per_worker: int | None = None
    gpus_per_worker: float | None = None
    heartbeat_timeout_s: float = 30.0
    environment: Mapping[str, str] = field(default_factory=dict)
    hook: Callable[[], Any] | None = None
    instance: Instance | None = None


class Call(Protocol):
    """What is known of a call: `paceline.workers.PendingCall`, or one that has ended."""

    def wait(self, timeout_s: float | None = None) -> list[Any] | None:
        """Return what the function returned, or raise what it raised."""

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """Call a function once the call has ended."""


class TrainGroup:
    """The workers on this machine; they stay until `stop`.

    Args:
        settings: How they are started.
        output: Where their lines go.
    """

    def __init__(self, settings: GroupSettings, output: WorkerOutput) -> None:
        self.settings = settings
        self.facts: Sequence[Any] = ()
        self._output = output
        self._pool: WorkerPool | None = None

    @property
    def num_workers(self) -> int:
        """How many workers there are, or will be."""
        return self.settings.num_workers

    @property
    def is_alive(self) -> bool:
        """Whether all workers are there and take calls."""
        return self._pool is not None and self._pool.is_alive

    def form(self) -> None:
        """Start the workers and set them up.

        Raises:
            WorkerFailedError: One was lost meanwhile.
            WorkerStartError: One cannot be started.
            Exception: What the user's hook or class raised.
        """
        settings = self.settings
        if self._pool is None:
            self._pool = LocalPool(
                settings.num_workers,
                environment=settings.environment,
                on_line=self._output,
                heartbeat_timeout_s=settings.heartbeat_timeout_s,
                threads_per_worker=settings.cpus_per_worker,
            )
        self._pool.start()
        call = self._pool.submit(
            InWorker("set_up", settings.hook),
            (settings.config, settings.gpus_per_worker, settings.hook, settings.instance),
        )
        self.facts = call.wait() or ()

    def submit(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        *,
        ranks: Sequence[int] | None = None,
    ) -> PendingCall:
        """Have workers call a function; see `WorkerPool.submit`."""
        assert self._pool is not None
        return self._pool.submit(function, args, ranks=ranks)

    def stop(self, *, force: bool = False) -> None:
        """End the workers, in bounded time."""
        if self._pool is not None:
            self._pool.shutdown(force)
            self._pool = None
            self.facts = ()


class InlineGroup:
    """No workers: functions run in the driver's own process, where debuggers can follow them.

    Args:
        settings: What workers would be set up with.
    """

    num_workers = 0
    is_alive = True
    facts: Sequence[Any] = ()

    def __init__(self, settings: GroupSettings) -> None:
        self._settings = settings

    def run(self, job: Job, on_report: Callable[[], None]) -> Call:
        """Run a train function, and return its end."""
        from paceline.train._worker import run_in_driver

        try:
            return _Ended([run_in_driver(job, on_report)], None)
        except Exception as error:
            return _Ended([], error)

    def form(self) -> None:
        """Call the user's hook and make the instance of a class, if they are given."""
        from paceline.train._worker import set_up_in_driver

        set_up_in_driver(self._settings.hook, self._settings.instance)

    def submit(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        *,
        ranks: Sequence[int] | None = None,
    ) -> Call:
        """Call a function, and return its end."""
        return _Ended([function(*args)], None)

    def stop(self, *, force: bool = False) -> None:
        """Do nothing, as there is nothing to stop."""


class _Ended:
    """A call that has ended already."""

    def __init__(self, values: list[Any], error: Exception | None) -> None:
        self._values = values
        self._error = error

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._values

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        function(self)
