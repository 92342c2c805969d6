"""Arguments of a trainer and of `run`: config classes, checks, chosen settings, data sets."""

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from os import PathLike
from typing import Any

from paceline import core
from paceline._base.arguments_and_errors import count, one_of
from paceline._base.gpus import num_visible_gpus
from paceline._training.workers.joined_pool import JoinedPool
from paceline._training.workers.ray.cluster import RayShards, is_ray_dataset
from paceline._training.workers.worker_settings import (
    WorkerResources,
    WorkerSettings,
    chosen_cluster,
)
from paceline._training.workers.workers import ElasticLimits
from paceline.core._distributed_context import DistributedContext
from paceline.core._exceptions import NotOfferedError
from paceline.core._launcher_place import launched_place
from paceline.core._run_storage import check_shared_storage
from paceline.core._trackers import Tracker, as_trackers
from paceline.data._dataset import Dataset, Fold, read
from paceline.storage._storage_from_url import storage_from
from paceline.train._run_protocol import (
    Checkpoint,
    Instance,
    RunSpec,
    current_session,
    is_pool_worker,
)
from paceline.train._training_callbacks import (
    PrintCallback,
    ProgressCallback,
    RunLines,
    TrainingCallback,
)

logger = logging.getLogger(__name__)


_COLLECTIVES = (None, "gloo", "nccl")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchConfig:
    """Settings of the process group.

    Attributes:
        backend: "gloo" or "nccl"; by default NCCL with GPUs, else gloo.
        init_method: "env" or "tcp": how they find each other; both lead to the same address.
        timeout_s: How long a collective call waits for other workers, in seconds.

    Raises:
        ValueError: A value is unknown or out of range.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if self.backend not in _COLLECTIVES:
            raise ValueError(f"`backend` must be 'gloo' or 'nccl', but got {self.backend!r}.")
        if self.init_method not in ("env", "tcp"):
            raise ValueError(f"`init_method` must be 'env' or 'tcp', but got {self.init_method!r}.")
        if not self.timeout_s > 0:
            raise ValueError(f"`timeout_s` must be above 0, but got {self.timeout_s!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig:
    """Settings of an elastic group.

    Attributes:
        max_wait_s: How long to wait while fewer workers than the least number can run, in seconds.
        first_delay_s: After how many seconds to look again for the first time; each further delay
            is twice as long.
        longest_delay_s: The longest of these delays, in seconds.
        capacity: Returns how many workers could run at the moment, those that run included, where
            something else than the cluster decides it, such as a scheduler that lends slots. It
            is asked often, so it must return at once.
        num_shards: The shards of a global batch, which is also the most workers that a run can
            grow to. By default the most workers asked for; without a bound, as in
            `(4, math.inf)`, twice the workers of the first start, where more can ever run.

    Raises:
        TypeError: `num_shards` is no integer.
        ValueError: A value is out of range.
    """

    max_wait_s: float = 600.0
    first_delay_s: float = 1.0
    longest_delay_s: float = 30.0
    capacity: Callable[[], int] | None = None
    num_shards: int | None = None

    def __post_init__(self) -> None:
        self.limits(1)
        if self.num_shards is None:
            return
        if not isinstance(self.num_shards, int) or isinstance(self.num_shards, bool):
            raise TypeError(f"`num_shards` must be an integer, but got {self.num_shards!r}.")
        if self.num_shards < 1:
            raise ValueError(f"`num_shards` must be at least 1, but got {self.num_shards}.")

    def limits(self, num_workers: Any) -> ElasticLimits:
        """Return the limits of a group.

        Args:
            num_workers: A number, or a pair of the least and the most.

        Raises:
            TypeError: It is neither.
            ValueError: It is out of range.
        """
        return ElasticLimits.of(
            num_workers,
            max_wait_s=self.max_wait_s,
            first_delay_s=self.first_delay_s,
            longest_delay_s=self.longest_delay_s,
        )


_BACKENDS = ("torch", "pytorch", "horovod")
_ORDERS = ("max", "min")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStrategy:
    """Policy for keeping checkpoints of a run; the newest always stays, for resuming.

    Attributes:
        num_to_keep: How many; None for all.
        checkpoint_score_attribute: The value by which the best are kept, from the state that is
            saved or else the last report; None keeps the newest.
        checkpoint_score_order: "max" if larger values are better, or "min".

    Raises:
        ValueError: A value is unknown or out of range.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = "max"

    def __post_init__(self) -> None:
        if self.num_to_keep is not None and self.num_to_keep < 1:
            raise ValueError(
                f"`num_to_keep` must be at least 1, or None for all, but got {self.num_to_keep!r}."
            )
        if self.checkpoint_score_order not in _ORDERS:
            raise ValueError(
                "`checkpoint_score_order` must be 'max' or 'min', but got"
                f" {self.checkpoint_score_order!r}."
            )


def backend_config(backend: Any, config: TorchConfig | None) -> TorchConfig:
    """Return the config of a backend given by name or by its config.

    Raises:
        TypeError: A value has another type.
        ValueError: The backend is unknown.
    """
    if isinstance(backend, TorchConfig) and config is None:
        return backend
    one_of(*_BACKENDS)("backend", backend)
    if config is not None and not isinstance(config, TorchConfig):
        raise TypeError(
            f"`backend_config` must be a train.TorchConfig, but got {type(config).__name__}."
        )
    return config or TorchConfig()


@dataclass(slots=True, kw_only=True)
class TrainWorkerSettings(WorkerSettings):
    """Settings for the start and the set-up of workers.

    Of a pair of numbers of workers, `num_workers` is the most, or the least if that is no bound; it
    is 0 for functions that run in the driver's process.

    Attributes:
        functions: The module of the functions that they call.
        limits: How many there may be; None if `num_workers` is 0.
        config: How they meet.
        preload: Modules besides that they need at once.
        elastic: How to deal with workers that come and go.
        uses_horovod: Whether they meet in Horovod as well.
        hook: Called by each of them before anything else.
    """

    functions: str
    limits: ElasticLimits | None
    config: TorchConfig
    preload: Sequence[str] = ()
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    uses_horovod: bool = False
    hook: Callable[[], Any] | None = None


NOT_GIVEN: Any = object()


def given_num_workers(num_workers: Any, workers: Any, gpus_per_worker: float | None) -> Any:
    """Return the number of workers asked for, by default from the launcher or the machine."""
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
    return own, as_trackers(trackers)


def with_run_lines(
    callbacks: list[TrainingCallback], *, shows_reports: bool = True
) -> list[TrainingCallback]:
    """Return callbacks, with a display of progress.

    Args:
        callbacks: The user's.
        shows_reports: Whether to show reports that no callback shows, besides beginning and end.
    """
    if any(isinstance(callback, ProgressCallback) for callback in callbacks):
        return callbacks
    is_printed = any(isinstance(callback, PrintCallback) for callback in callbacks)
    return [RunLines(shows_reports=shows_reports and not is_printed), *callbacks]


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
    """Refuse a worker process, unless its trainer has joined the other workers.

    Raises:
        RuntimeError: It is one.
    """
    is_worker = core.launched_place() is not None and not is_joined
    if current_session() is not None or is_worker:
        raise RuntimeError(
            "A Trainer must be used in a process that works alone, but this is a worker"
            " itself. Hint: call the train function directly here."
        )


# Module name: importing the module would load torch.
_WORKER_FUNCTIONS = "paceline.train._worker_jobs"
# Modules used by train functions: without preload, each worker loads them before its first batch.
_FUNCTIONS_USE = ("paceline.train",)


def chosen_settings(
    num_workers: Any,
    config: TorchConfig,
    resources: WorkerResources,
    *,
    cluster: str,
    heartbeat_timeout_s: float,
    elastic: ElasticConfig,
    uses_horovod: bool = False,
) -> TrainWorkerSettings:
    """Return how workers are started and set up; see `Trainer` for the arguments.

    Raises:
        ImportError: Ray or Horovod is wanted, but not installed.
        NotOfferedError: Horovod is to work on a Ray cluster.
        ResourcesError: The workers want more than this machine has.
        TypeError: A value has another type.
        ValueError: A value is unknown or out of range.
    """
    limits = trainer_worker_limits(num_workers, elastic)
    if not heartbeat_timeout_s > 0:
        raise ValueError(f"`heartbeat_timeout_s` must be above 0, but got {heartbeat_timeout_s!r}.")
    resources.check_backend(config.backend)
    can_join = launched_place() is not None and not is_pool_worker()
    cluster = chosen_cluster(cluster, can_join=can_join)
    if cluster == "local":
        resources.check_machine(0 if limits is None else limits.least)
    if uses_horovod:
        _check_horovod(cluster)
    return TrainWorkerSettings(
        functions=_WORKER_FUNCTIONS,
        preload=_FUNCTIONS_USE,
        num_workers=0 if limits is None else limits.num_asked_for,
        limits=limits,
        elastic=elastic,
        uses_horovod=uses_horovod,
        config=config,
        resources=resources,
        cluster=cluster,
        heartbeat_timeout_s=heartbeat_timeout_s,
    )


def _check_horovod(cluster: str) -> None:
    if cluster == "ray":
        raise NotOfferedError(
            '`backend="horovod"` is not offered on a Ray cluster. Hint: cluster="local", or the'
            ' backend "torch", which computes the same.'
        )
    if find_spec("horovod") is None:
        raise ImportError(
            '`backend="horovod"` needs Horovod, but it is not installed. Hint: docs/backends.md'
            " shows how to build it."
        )


def is_data_set(value: Any) -> bool:
    """Tell whether a value can only be a data set, and no sample."""
    if isinstance(value, (Dataset, RayShards)) or is_ray_dataset(value):
        return True
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(value, data.Dataset)


def is_pair(value: Any) -> bool:
    """Return whether a value is a tuple of a training and a validation data set."""
    return isinstance(value, tuple) and len(value) == 2 and all(map(is_data_set, value))


def is_several(value: Any) -> bool:
    """Return whether a value holds several data sets; a sequence of samples does not."""
    if isinstance(value, Mapping):
        return True
    is_sequence = isinstance(value, (list, tuple)) and len(value) > 0
    return is_sequence and all(is_data_set(each) or is_pair(each) for each in value)


def is_made(value: Any) -> bool:
    """Return whether a value is a function making data sets."""
    return callable(value) and not is_data_set(value) and not hasattr(value, "__getitem__")


def made_dataset(function: Any, config: dict[str, Any] | None) -> Any:
    """Call a function of the config, or without parameters, and return its data set."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # Callable written in C: its signature is unknown.
        return function()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [each for each in parameters if each.kind in kinds]
    if positional and (positional[0].default is inspect.Parameter.empty):
        return function(config or {})
    return function()


def given_dataset(data: Any, name: str = "dataset") -> Any:
    """Return data with the contents of files in place of paths and URLs.

    Raises:
        TypeError: One is bytes.
        ValueError: A dictionary is empty, or one of several has no samples.
        DataError: See `paceline.data.read`.
    """
    if isinstance(data, bytes):
        raise TypeError(f"`{name}` must be a data set, a path or a URL, but got bytes.")
    if isinstance(data, (str, PathLike)):
        return read(data)
    if isinstance(data, Mapping):
        if not data:
            raise ValueError(f"`{name}` must have a data set for each name, but got {data!r}.")
        return {key: given_dataset(each, f"{name}[{key!r}]") for key, each in data.items()}
    for path, each in _dataset_parts(data, name) if is_several(data) else ():
        if _is_empty(each):
            raise ValueError(
                f"Each of several data sets must have samples, but `{path}` has none. Hint: fewer"
                " folds."
            )
    return data


def _dataset_parts(data: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each of several data sets, with its path in the argument."""
    names = data._fields if isinstance(data, Fold) else range(len(data))
    for key, each in zip(names, data, strict=True):
        path = f"{name}.{key}" if isinstance(data, Fold) else f"{name}[{key}]"
        if is_pair(each):
            yield from _dataset_parts(each, path)
        else:
            yield path, each


def _is_empty(data: Any) -> bool:
    try:
        return len(data) == 0
    except (AttributeError, TypeError):
        # A stream, or a data set of Ray.
        return False


def joined_limits(num_asked_for: int) -> ElasticLimits:
    """Return the limits under an outer launcher: as many workers as it has started processes."""
    num_workers = JoinedPool().num_workers
    if num_asked_for != num_workers:
        logger.warning(
            "The launcher has started %d processes, each of which is one worker, however many"
            " are asked for (%d).",
            num_workers,
            num_asked_for,
        )
    return ElasticLimits.of(num_workers)


def check_storage(distributed: DistributedContext, spec: RunSpec) -> None:
    """Check that all ranks see one storage, before any rank writes to it."""
    if not spec.storage_per_node:
        check_shared_storage(storage_from(spec.storage), distributed)
    # None begins to write before all know the files that were there already.
    distributed.allgather(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Arguments of `Trainer.run`.

    Attributes:
        function: The train function, or the instance of a class to make.
        callbacks: The followers of the run.
        trackers: Further displays of the run.
        max_retries: How often workers may be lost.
        config: The argument of the function.
        dataset: The result of `get_dataset` in the function, if any.
        checkpoint: The checkpoint to resume from, if there is one.
        state: The same, if it is a state in memory.
        strategy: Which checkpoints to keep.
        is_seed_given: Whether the user has asked for a seed.
        check_ranks: Whether workers are compared, see `Trainer`.
        is_stepwise: Whether the function waits at each report until it may continue.
    """

    function: Callable[..., Any] | Instance
    callbacks: Sequence[TrainingCallback]
    trackers: Sequence[Tracker]
    max_retries: float
    config: dict[str, Any] | None = None
    dataset: Any = None
    checkpoint: Checkpoint | None = None
    state: Any = None
    strategy: CheckpointStrategy = CheckpointStrategy()
    is_seed_given: bool = False
    check_ranks: bool | tuple[str, ...] = True
    is_stepwise: bool = False
