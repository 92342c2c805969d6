"""Functions executed in the workers of a trainer."""

import inspect
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline._training.engine.devices import suitable_backend, use_own_device
from paceline._training.engine.gradient_reduction import AllReduce
from paceline._training.engine.horovod_reduction import HorovodSum, join_horovod_as
from paceline._training.workers.joined_pool import prepare_joined, skip_interpreter_shutdown
from paceline._training.workers.processes.rank_environment import RankInfo, join_process_group
from paceline.core._distributed_context import DistributedContext
from paceline.core._launcher_place import launched_place
from paceline.data._torch_loaders import release_device_memory
from paceline.train._preemption_watch import StoppedError
from paceline.train._rank_session import LooseSession, PlaceSession, RankSession
from paceline.train._run_protocol import (
    Instance,
    Job,
    RankOutcome,
    WorkerFacts,
    become_pool_worker,
    enter_session,
    leave_session,
)
from paceline.train._trainer_arguments import TorchConfig


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
    from paceline.train._rank_session import RankSession
