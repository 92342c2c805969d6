"""What every pool promises, as a program: ``python pool_contract.py KIND``."""

import re
import sys
import threading
from typing import Any

import cloudpickle
import pytest

from paceline._training.workers.joined_pool import JoinedPool
from paceline._training.workers.process_pools import LocalPool
from paceline._training.workers.ray.pool import RayPool
from paceline._training.workers.worker_pools import InlinePool, PendingCall, WorkerPool

# Workers have another `__main__`.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def double(value: int, *, more: int = 0) -> int:
    """Return twice a value."""
    return 2 * value + more


def fail() -> None:
    """Raise an error that callers tell by its type."""
    raise ZeroDivisionError("on purpose")


def leave() -> None:
    """End a worker the wrong way."""
    sys.exit(3)


def must_raise(
    kind: type[BaseException], text: str, function: Any, *args: Any, **kwargs: Any
) -> None:
    """Check that a call raises an error with a text."""
    with pytest.raises(kind, match=re.escape(text)):
        function(*args, **kwargs)


def check(pool: WorkerPool, num_workers: int) -> None:
    """Go through the promises of `WorkerPool`, one after the other."""
    assert not pool.is_alive
    assert list(pool.leaving_ranks()) == []
    must_raise(RuntimeError, "must be started", pool.submit, double, (1,))
    pool.start()
    assert pool.is_alive
    assert pool.num_workers == num_workers
    assert pool.capacity() >= num_workers
    assert list(pool.leaving_ranks()) == []
    must_raise(RuntimeError, "must not be started while its workers are alive", pool.start)

    assert pool.submit(double, (4,), {"more": 1}).wait() == [9] * num_workers
    last = num_workers - 1
    assert pool.submit(double, (4,), ranks=[last]).wait() == [8]
    for ranks in ([], [num_workers], [-1]):
        must_raise(ValueError, "`ranks` must name workers", pool.submit, double, (1,), ranks=ranks)
    calls = [pool.submit(double, (number,)) for number in range(5)]
    assert [call.wait() for call in calls] == [[2 * n] * num_workers for n in range(5)]
    assert all(call.is_done for call in calls)

    # Told once of the end, also of one that was long ago.
    told: list[PendingCall] = []
    is_told = threading.Event()
    call = pool.submit(double, (1,))
    call.add_done_callback(lambda call: (told.append(call), is_told.set()))
    assert is_told.wait(60)
    call.add_done_callback(told.append)
    assert told == [call, call]
    pool.drain(1.0)

    for function, kind, text in (
        (fail, ZeroDivisionError, "on purpose"),
        (leave, RuntimeError, "left by `sys.exit(3)`"),
    ):
        must_raise(kind, text, pool.submit(function).wait)
        pool.await_end()
        if not pool.is_alive:
            must_raise(RuntimeError, "", pool.submit, double, (1,))
            pool.start()
        assert pool.submit(double, (2,)).wait() == [4] * num_workers

    pool.stop(grace_s=5.0)
    assert not pool.is_alive
    must_raise(RuntimeError, "must be started", pool.submit, double, (1,))
    # Neither has anybody to reach.
    pool.signal(0)
    pool.request_stop(1.0)
    pool.start(num_workers)
    assert pool.submit(double, (3,)).wait() == [6] * num_workers
    pool.shutdown()
    pool.shutdown(force=True)
    assert not pool.is_alive
    with pool:
        assert pool.is_alive
    assert not pool.is_alive


def main(kind: str) -> None:
    """Check the pool of a kind."""
    if kind == "inline":
        check(InlinePool(), 1)
    elif kind in ("forked", "new"):
        check(LocalPool(2, fork_server=kind == "forked", grace_s=1.0), 2)
    elif kind == "joined":
        check(JoinedPool(timeout_s=60), 2)
    else:
        import ray

        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        check(RayPool(2, grace_s=1.0), 2)
        ray.shutdown()
    print("kept")


if __name__ == "__main__":
    main(sys.argv[1])
