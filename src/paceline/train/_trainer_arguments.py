"""Checks of the arguments of a trainer's methods."""

import inspect
import os
from collections.abc import Callable
from typing import Any

from paceline import core
from paceline._argument_checks import count
from paceline.gpus import num_visible_gpus
from paceline.train._checkpoint import Checkpoint
from paceline.train._config import ElasticConfig, TorchConfig, backend_config
from paceline.train._run_callbacks import TrainingCallback
from paceline.workers import ElasticLimits
from paceline.workers.runs import Instance, current_session

NOT_GIVEN: Any = object()


def given_num_workers(num_workers: Any, workers: Any, gpus_per_worker: float | None) -> Any:
    """Return how many workers are asked for; by default what the launcher or the machine has."""
    if num_workers is not NOT_GIVEN and workers is not NOT_GIVEN:
        raise TypeError("`num_workers` and `workers` are the same: give one of them.")
    if num_workers is not NOT_GIVEN:
        return num_workers
    if workers is not NOT_GIVEN:
        return workers
    place = core.launched_place()
    if place is not None:
        return place.size
    # The only process of torchrun counts as one, whatever the machine has.
    if os.environ.get("WORLD_SIZE") == "1" or gpus_per_worker == 0:
        return 1
    return max(1, int(num_visible_gpus() / (gpus_per_worker or 1)))


def trainer_torch_config(
    backend: Any, config: TorchConfig | None, args: TorchConfig | None
) -> TorchConfig:
    if config is not None and args is not None:
        raise TypeError("`backend_config` and `backend_args` are the same: give one of them.")
    return backend_config(backend, config if args is None else args)


def trainer_worker_limits(num_workers: Any, elastic: ElasticConfig | None) -> ElasticLimits | None:
    """Return how many workers there may be; None for none.

    Raises:
        TypeError: `num_workers` is neither a number nor a pair of numbers.
        ValueError: It is out of range.
    """
    if not isinstance(num_workers, (tuple, list)) and count(0)("num_workers", num_workers) == 0:
        return None
    try:
        return (elastic or ElasticConfig()).limits(num_workers)
    except (TypeError, ValueError) as error:
        raise type(error)(
            "`num_workers` must be a number, or a pair of the least and the most such as (2, 8) or"
            f" (4, math.inf), but got {num_workers!r}."
        ) from error


def check_train_function(function: Any) -> None:
    if not callable(function):
        raise TypeError(f"`train_func` must be a function, but got {type(function).__name__}.")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return
    required = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(required) > 1 or keyword_only:
        raise ValueError(
            "`train_func` must take the config or nothing, but"
            f" `{getattr(function, '__name__', function)}` requires {', '.join(required)}. Hint:"
            " put all of it into the config."
        )


def split_callbacks(callbacks: Any) -> tuple[list[TrainingCallback], list[core.Tracker]]:
    """Return the callbacks, and the trackers among them.

    Raises:
        ImportError: The library of a tracker that is named is not installed.
        TypeError: One is neither of both.
        ValueError: There is no tracker of a name.
    """
    own: list[TrainingCallback] = []
    trackers: list[Any] = []
    for callback in callbacks or ():
        if isinstance(callback, TrainingCallback):
            own.append(callback)
        elif isinstance(callback, (core.Tracker, str)):
            trackers.append(callback)
        else:
            kind = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            raise TypeError(
                "`callbacks` must be TrainingCallback objects, trackers or names of trackers, but"
                f" got {kind}."
            )
    return own, core.as_trackers(trackers)


def stored_or_state(checkpoint: Any) -> tuple[Checkpoint | None, Any]:
    if isinstance(checkpoint, Checkpoint):
        return checkpoint, None
    if isinstance(checkpoint, (str, os.PathLike)):
        return Checkpoint.from_path(checkpoint), None
    return None, checkpoint


def instance_of_arguments(
    kind: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Instance | None:
    if kind is None:
        if args or kwargs:
            raise TypeError("`start` must be given a class to be made with arguments.")
        return None
    if not callable(kind):
        raise TypeError(f"`train_cls` must be a class, but got {kind!r}.")
    is_packed = (
        len(args) == 2 and not kwargs and isinstance(args[0], (tuple, list))
    ) and isinstance(args[1], dict)
    if is_packed:
        args, kwargs = tuple(args[0]), dict(args[1])
    return Instance(kind, args, kwargs)


def check_class_callbacks(instance: Instance | None, callbacks: Any) -> None:
    if callbacks and instance is None:
        raise TypeError(
            "`callbacks` of `start` follow the run of a class, but no class was given. Hint:"
            " start(SomeClass, callbacks=[...]), or run(train_func, callbacks=[...])."
        )
    split_callbacks(callbacks)


def check_trainer_alone(*, is_joined: bool) -> None:
    """Require that this process is no worker itself, unless its trainer has joined the others.

    Raises:
        RuntimeError: It is one.
    """
    is_worker = core.launched_place() is not None and not is_joined
    if current_session() is not None or is_worker:
        raise RuntimeError(
            "A Trainer must be used in a process that works alone, but this is a worker"
            " itself. Hint: call the train function directly here."
        )
