"""Workers that each hold an instance of a user's class."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from paceline.train._trainer_workers import TrainerWorkers


class ClassWorkers(Sequence["WorkerHandle"]):
    """Handles of the workers, in rank order; see `Trainer.to_worker_group`.

    Args:
        trainer: The trainer that has started the workers.
    """

    def __init__(self, trainer: "TrainerWorkers") -> None:
        self._trainer = trainer

    def __len__(self) -> int:
        return max(1, self._trainer.num_workers)

    @overload
    def __getitem__(self, index: int) -> "WorkerHandle": ...

    @overload
    def __getitem__(self, index: slice) -> "list[WorkerHandle]": ...

    def __getitem__(self, index: int | slice) -> "WorkerHandle | list[WorkerHandle]":
        ranks = range(len(self))[index]
        if isinstance(ranks, int):
            return WorkerHandle(self._trainer, ranks)
        return [WorkerHandle(self._trainer, rank) for rank in ranks]

    def execute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function with each worker's instance, and return what it returned."""
        return self._trainer.execute(function, *args, **kwargs)

    def shutdown(self) -> None:
        """End the workers."""
        self._trainer.shutdown()


class WorkerHandle:
    """The instance in one worker: its methods are called there, and return their values here.

    Args:
        trainer: The trainer.
        rank: The worker.
    """

    def __init__(self, trainer: "TrainerWorkers", rank: int) -> None:
        self._trainer = trainer
        self._rank = rank

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._trainer.execute_single(_call_method, name, args, kwargs, rank=self._rank)

        return call


def _call_method(instance: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(instance, name)(*args, **kwargs)
