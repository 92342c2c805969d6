"""Functions executed in the workers of a trainer, and their data sets."""

import inspect
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline._training.engine.devices import suitable_backend, use_own_device
from paceline._training.engine.gradient_reduction import AllReduce, HorovodSum, join_horovod_as
from paceline._training.workers.processes.worker_process import RankInfo, join_process_group
from paceline._training.workers.ray.cluster import RayShards
from paceline._training.workers.worker_pools import prepare_joined, skip_interpreter_shutdown
from paceline.core._distributed_context import DistributedContext
from paceline.core._launcher_place import launched_place
from paceline.data._dataset import Dataset, Fold
from paceline.data._torch_loaders import release_device_memory
from paceline.train._prepared_loader_and_steps import UserLoop
from paceline.train._rank_session import LooseSession, PlaceSession, RankSession
from paceline.train._run_protocol import (
    Instance,
    Job,
    RankOutcome,
    StoppedError,
    WorkerFacts,
    become_pool_worker,
    enter_session,
    leave_session,
)
from paceline.train._trainer_arguments import (
    TorchConfig,
    given_dataset,
    is_made,
    is_pair,
    is_several,
    made_dataset,
)


class _Worker:
    """State of this process between calls."""

    def __init__(self) -> None:
        self.rank_info = RankInfo()
        self.device = torch.device("cpu")
        # Instance of the class API, and the run of its creation.
        self.instance: Any = None
        self.instance_session: RankSession | None = None
        self.place_session: PlaceSession | None = None
        # Sum of gradients by another library, in place of the process group.
        self.all_reduce: AllReduce | None = None
        self.open_session: RankSession | None = None
        self.distributed: DistributedContext | None = None


_worker = _Worker()


def set_up(
    config: TorchConfig,
    gpus_per_worker: float | None,
    hook: Callable[[], Any] | None,
    horovod: Sequence[Mapping[str, str]] | None = None,
) -> WorkerFacts:
    """Run the user's hook, and join the others, also in Horovod if its variables are given."""
    become_pool_worker()
    if horovod is not None:
        # Horovod is loaded after this.
        os.environ |= horovod[RankInfo.from_environment().rank]
    if hook is not None:
        hook()
    method = "env://"
    if config.init_method == "tcp":
        method = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    facts = _set_up_job_worker(config, gpus_per_worker, RankInfo.from_environment(), method)
    if horovod is not None:
        _use_horovod()
    return facts


def _use_horovod() -> None:
    join_horovod_as(_worker.rank_info.rank, _worker.rank_info.world_size)
    _worker.all_reduce = HorovodSum()


def set_up_joined(
    config: TorchConfig,
    gpus_per_worker: float | None,
    hook: Callable[[], Any] | None,
    distributed: DistributedContext,
    uses_horovod: bool = False,
) -> WorkerFacts:
    """Set up a process started by an outer launcher, as `set_up` does for a pool's worker."""
    if hook is not None:
        hook()
    launched = launched_place()
    assert launched is not None
    address, port = launched.meeting_point()
    prepare_joined(distributed)
    _worker.distributed = distributed
    rank_info = RankInfo(
        rank=distributed.rank,
        world_size=distributed.size,
        local_rank=distributed.local_rank,
        local_world_size=distributed.local_size,
        node_rank=distributed.cross_rank,
    )
    # The environment names a store that torchrun hosts.
    method = "env://" if launched.launcher == "torchrun" else f"tcp://{address}:{port}"
    facts = _set_up_job_worker(config, gpus_per_worker, rank_info, method)
    if uses_horovod:
        _use_horovod()
    skip_interpreter_shutdown()
    return facts


def _set_up_job_worker(
    config: TorchConfig, gpus_per_worker: float | None, rank_info: RankInfo, method: str
) -> WorkerFacts:
    _worker.rank_info = rank_info
    _worker.device = device = use_own_device(rank_info.local_rank, gpus_per_rank=gpus_per_worker)
    if not dist.is_initialized():
        shares_gpu = gpus_per_worker is not None and 0 < gpus_per_worker < 1
        join_process_group(
            config.backend or suitable_backend(device, shares_gpu=shares_gpu),
            timeout_s=config.timeout_s,
            method=method,
            rank=rank_info.rank,
            world_size=rank_info.world_size,
        )
    return WorkerFacts(socket.gethostname(), os.getpid(), str(device), rank_info.node_rank)


def _new_session(job: Job, on_report: Callable[[], None] | None) -> RankSession:
    worker = _worker
    session = RankSession(job, worker.rank_info, worker.device, on_report, worker.distributed)
    session.gradients.sum_by(worker.all_reduce)
    return session


def run_job(job: Job, on_report: Callable[[], None] | None = None) -> RankOutcome:
    """Run a train function on this rank."""
    release_device_memory()
    session = _new_session(job, on_report)
    directory = _working_directory()
    mode, benchmark = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    enter_session(session)
    try:
        value = _call_train_function(job.function, job.config)
    except StoppedError as error:
        session.finish(error)
        reporter = session.reporter
        return RankOutcome(
            None, reporter.num_reports, session.checkpoints.num_saves, 0, is_stopped=True
        )
    except BaseException as error:
        session.finish(error)
        raise
    finally:
        leave_session()
        # State changed by the function, reset for the next: directory, deterministic switches.
        if directory is not None:
            os.chdir(directory)
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = benchmark
    session.finish(None)
    _worker.open_session = session if session.is_to_settle else None
    return _outcome_of(session, value)


def settle(num_expected: int, timeout_s: float) -> int:
    """Do the work that awaits the ends of all functions; return how many checkpoints lack a part.

    Raises:
        RanksDifferError: Ranks have drifted apart since their last checkpoint.
    """
    session, _worker.open_session = _worker.open_session, None
    if session is None:
        return 0
    session.settle(num_expected, timeout_s)
    return session.checkpoints.num_pending


def call_function(function: Callable[..., Any], args: Any, kwargs: Any, seed: int) -> Any:
    """Call a function outside of a run, with this worker's place among the others."""
    if _worker.place_session is None:
        _worker.place_session = PlaceSession(_worker.rank_info, _worker.device, seed)
        _worker.place_session.gradients.sum_by(_worker.all_reduce)
    with _working_for(_worker.place_session):
        return function(*args, **kwargs)


def make_instance(job: Job, on_report: Callable[[], None] | None = None) -> None:
    """Make the instance of a class, in a run lasting until `end_instance`."""
    release_device_memory()
    session = _new_session(job, on_report)
    instance: Instance = job.function
    try:
        with _working_for(session):
            _worker.instance = instance.make()
    except BaseException as error:
        session.finish(error)
        raise
    _worker.instance_session = session


def call_with_instance(function: Callable[..., Any], args: Any, kwargs: Any) -> RankOutcome:
    """Call a function with the instance of this worker."""
    session = _worker.instance_session
    assert session is not None
    with _working_for(session):
        value = function(_worker.instance, *args, **kwargs)
    session.checkpoints.settle()
    return _outcome_of(session, value)


def await_commits(num_expected: int, timeout_s: float) -> int:
    """Wait for all instances' parts of checkpoints; return the number of incomplete ones."""
    session = _worker.instance_session
    assert session is not None
    session.checkpoints.await_commits(num_expected, timeout_s)
    return session.checkpoints.num_pending


def end_instance() -> RankOutcome:
    """End the run of the instance."""
    session, _worker.instance_session, _worker.instance = _worker.instance_session, None, None
    assert session is not None
    session.finish(None)
    _worker.open_session = session if session.is_to_settle else None
    return _outcome_of(session, None)


def set_up_in_driver(
    hook: Callable[[], Any] | None, gpus_per_worker: float | None, uses_horovod: bool = False
) -> None:
    """Do the user's part of `set_up` in the driver's own process."""
    if hook is not None:
        hook()
    if uses_horovod:
        join_horovod_as(0, 1)
    _worker.rank_info = RankInfo()
    _worker.device = use_own_device(0, gpus_per_rank=gpus_per_worker)
    _worker.place_session = None


def run_in_driver(
    job: Job, gpus_per_worker: float | None, on_report: Callable[[], None]
) -> RankOutcome:
    """Run a train function in the driver's own process."""
    _worker.rank_info = RankInfo()
    _worker.device = use_own_device(0, gpus_per_rank=gpus_per_worker)
    return run_job(job, on_report)


@contextmanager
def _working_for(session: LooseSession) -> Iterator[None]:
    enter_session(session)
    try:
        yield
    finally:
        leave_session()


def _outcome_of(session: RankSession, value: Any) -> RankOutcome:
    return RankOutcome(
        value,
        session.reporter.num_reports,
        session.checkpoints.num_saves,
        session.checkpoints.num_pending,
        is_preempted=session.is_preempted,
        is_to_compare=session.is_to_compare,
    )


def _working_directory() -> str | None:
    """Return the working directory; None if removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _call_train_function(function: Callable[..., Any], config: dict[str, Any] | None) -> Any:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        # Callable written in C: its signature is unknown.
        return function() if config is None else function(config)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional:
        return function(config or {})
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return function(config) if takes_any and config is not None else function()


if TYPE_CHECKING:
    from paceline.train._prepared_loader_and_steps import PreparedLoader
    from paceline.train._rank_session import RankSession


class RayDataset:
    """Part of a Ray data set read by a worker.

    Args:
        shards: The parts.
        session: The run.
    """

    def __init__(self, shards: RayShards, session: UserLoop) -> None:
        self._session = session
        self._own = shards.of_rank(session.rank_info.rank)

    def get_shard(self, rank: int | None = None) -> "RayDataset":
        """Return this worker's part.

        Args:
            rank: This worker's rank, which is the default.

        Raises:
            ValueError: It is the rank of another worker, whose part is only there.
        """
        own = self._session.rank_info.rank
        if rank not in (None, own):
            raise ValueError(f"`rank` must be this worker's, {own}, but got {rank!r}.")
        return self

    def get_split(self) -> "RayDataset":
        """Return this worker's part."""
        return self

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows of an epoch; all workers must begin each epoch."""
        return iter(self._own.iter_rows())

    def to_torch(
        self, batch_size: int = 1, *, move_to_device: bool = True, **options: Any
    ) -> "RayLoader":
        """Return a loader of this worker's part, in batches.

        Args:
            batch_size: The rows of one worker's batch.
            move_to_device: Whether batches are moved to this worker's device.
            options: Further options of Ray's `iter_torch_batches`, such as
                `local_shuffle_buffer_size` and `collate_fn`.
        """
        device = str(self._session.device) if move_to_device else "cpu"
        options = {"batch_size": batch_size, "device": device, **options}
        if "collate_fn" in options:
            # Ray leaves the batches of a `collate_fn` where that has put them.
            options.pop("device")
        return RayLoader(self._own, self._session, options)


class RayLoader:
    """Loader of batches from a worker's part of a Ray data set; each iteration is an epoch.

    Args:
        own: Ray's iterator over the part.
        session: The run.
        options: Options of `iter_torch_batches`.
    """

    def __init__(self, own: Any, session: UserLoop, options: dict[str, Any]) -> None:
        self._own = own
        self._session = session
        self._options = options

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch; all workers must begin each epoch."""
        session = self._session
        batches = session.open_data(
            lambda: iter(self._own.iter_torch_batches(**self._options)), was_open=False
        )
        size = session.rank_info.world_size
        try:
            batch, wait_s = _next(batches)
            while batch is not None:
                # Look-ahead by a batch: `is_last` must be known before the batch is used.
                following, following_wait_s = _next(batches)
                num_own = _num_rows(batch)
                # All parts have equally many rows, so all batches of a step have the same size.
                session.begin_batch(
                    num_own, num_own * size, is_last=following is None, wait_s=wait_s
                )
                began = time.perf_counter()
                yield batch
                session.end_batch(time.perf_counter() - began)
                batch, wait_s = following, following_wait_s
        finally:
            session.end_data()


def _next(batches: Iterator[Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    batch = next(batches, None)
    return batch, time.perf_counter() - began


def _num_rows(batch: Any) -> int:
    while isinstance(batch, (Mapping, list, tuple)):
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(batch)


class WorkerDatasetReader:
    """Reader of a worker's part of the run's data sets.

    Args:
        session: The run.
    """

    def __init__(self, session: "RankSession") -> None:
        self.rank = session.rank_info.rank
        self.world_size = session.rank_info.world_size
        self._session = session

    def prepare(self, loader: Any, *, is_moved: bool) -> "PreparedLoader":
        """Return this worker's part of a loader."""
        return self._session.prepare_loader(loader, is_moved=is_moved)


def dataset_of(session: "RankSession | None", name: str | int | None) -> Any:
    """Return the data set of a run; see `train.get_dataset`."""
    session, data = _given_datasets(session, "get_dataset")
    if not is_several(data):
        if name is not None:
            raise KeyError(f"There is no data set {name!r}, as the run was given a single one.")
        return _read_dataset(session, data)
    names = list(_by_name(data))
    if name is None and len(names) > 1:
        raise ValueError(
            f"`name` must say which data set is meant, but got None for {names}. Hint:"
            " get_datasets() gives all of them."
        )
    if name is not None and name not in names:
        raise KeyError(f"There is no data set {name!r}, only {names}.")
    return _read_dataset(session, _by_name(data)[names[0] if name is None else name])


def datasets_of(session: "RankSession | None") -> Any:
    """Return all data sets of a run; see `train.get_datasets`."""
    session, data = _given_datasets(session, "get_datasets")
    if isinstance(data, Mapping):
        return {name: _read_dataset(session, each) for name, each in data.items()}
    if is_pair(data):
        return _read_dataset(session, data)
    if not isinstance(data, (list, tuple)):
        return [_read_dataset(session, data)]
    return [_read_dataset(session, each) for each in data]


def _given_datasets(session: "RankSession | None", caller: str) -> tuple["RankSession", Any]:
    """Return the session and the data set given to its run; raise RuntimeError without either."""
    if session is None:
        raise RuntimeError(
            f"`{caller}` gives what `Trainer.run(dataset=...)` was given, but this process works"
            " for no run. Hint: `if train.in_worker(): ... else: ...`."
        )
    if session.job.dataset is None:
        raise RuntimeError(
            f"`{caller}` gives what `Trainer.run(dataset=...)` was given, but that got none."
            " Hint: trainer.run(train_func, dataset=my_data_set)."
        )
    return session, _made_dataset(session, session.job.dataset)


def _made_dataset(session: "RankSession", data: Any) -> Any:
    """Return the data, made from the config if given as a function, so no data need travel."""
    if is_made(data):
        data = given_dataset(made_dataset(data, session.job.config))
    return data


def _by_name(data: Any) -> Mapping[Any, Any]:
    if isinstance(data, Mapping):
        return data
    return data._asdict() if isinstance(data, Fold) else dict(enumerate(data))


def _read_dataset(session: "RankSession", data: Any) -> Any:
    """Return a data set, or a pair of data sets, as read by this worker."""
    data = _made_dataset(session, data)
    if isinstance(data, RayShards):
        return RayDataset(data, session)
    if is_pair(data):
        pair = [_read_dataset(session, each) for each in data]
        return Fold(*pair) if isinstance(data, Fold) else tuple(pair)
    return Dataset(data).read_by(WorkerDatasetReader(session))
