"""A function of the driver, run in worker processes on this machine."""

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.workers._elastic_size import ElasticLimits
from paceline.workers._launch_run import LaunchGroup, LaunchRun
from paceline.workers._restart_policy import RestartPolicy
from paceline.workers._worker_resources import check_crowd
from paceline.workers.pools._local_pool import LocalPool
from paceline.workers.pools._served_pool import ServedPool, pack_call
from paceline.workers.pools._shared_buffer_cache import SharedBuffers

_FOR_EVER_S = 1e9


def call_in_workers(
    function: Callable[..., Any],
    num_workers: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    grace_s: float = 10.0,
    max_restarts: int = 0,
    heartbeat_timeout_s: float | None = 30.0,
    collective_timeout_s: float = 1800.0,
) -> list[Any]:
    """Call a function in new worker processes and return what it returned, in rank order.

    The workers see the driver's environment, working directory and module path. What they print
    goes to the driver's `sys.stdout` and `sys.stderr`, with the rank before each line if there are
    several.

    Args:
        function: What to call, in every worker alike.
        num_workers: The number of workers.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        grace_s: The time in seconds that the other workers get when one fails.
        max_restarts: How often the workers are started again after a failure, see
            `RestartPolicy`. A run of the function goes on from its last checkpoint then.
        heartbeat_timeout_s: How long a worker may be stopped or hold Python's lock, in seconds;
            None for ever.
        collective_timeout_s: How long ranks may wait for others in a collective operation, in
            seconds.

    Raises:
        NotSendableError: The function, an argument or a value that it returned cannot be pickled.
        ResourcesError: There are far more workers than cores of this machine.
        CollectiveMismatchError: Ranks wait in a collective operation that others do not join.
        WorkerFailedError: A worker was ended by a signal, hung or left by `sys.exit()`.
        WorkerStartError: A worker cannot be started.
        Exception: What the function raised on the rank that failed first, with the traceback of
            that rank as its cause.
    """

    check_crowd(num_workers)

    def make_pool() -> ServedPool:
        return LocalPool(
            num_workers,
            grace_s=grace_s,
            heartbeat_timeout_s=heartbeat_timeout_s or _FOR_EVER_S,
            collective_timeout_s=collective_timeout_s,
        )

    group = LaunchGroup(ElasticLimits.of(num_workers), make_pool)
    policy = RestartPolicy(max_restarts, option="max_restarts", retries_errors=True)
    runner = LaunchRun(group, policy)
    packed = pack_call(function, args, kwargs, SharedBuffers())
    try:
        return runner.run(lambda: group.pool.submit_packed(packed))
    except Exception as error:
        signum = getattr(error, "signal", None)
        if signum in runner.received and signum != signal.SIGINT:
            # The driver was asked to end, and its workers did not take that as their own affair.
            signal.raise_signal(signum)
        if signal.SIGINT in runner.received:
            raise KeyboardInterrupt from error
        raise
