"""Training on several processes of this machine, from a script or a notebook."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline._argument_checks import check_count, count
from paceline.core import launched_place
from paceline.workers import call_in_workers


def launch(
    main: Callable[..., Any],
    num_workers: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
    heartbeat_timeout_s: float | None = 30.0,
    collective_timeout_s: float = 1800.0,
) -> list[Any]:
    """Run a function in several worker processes and return its values, in rank order.

    `init()` in the function makes the process group. The function may be defined in the script or
    in a cell of the notebook; what it uses from there travels with it. Returned tensors and models
    arrive on the CPU.

    A Ctrl-C reaches all workers: within `fit` the first one stores a checkpoint and ends the
    training, a second one ends the workers. They also end when this process does.

    Args:
        main: The function.
        num_workers: The number of workers; each takes one GPU if there are any.
        args: The function's positional arguments.
        kwargs: The function's keyword arguments.
        max_restarts: How often the workers may be started again when one of them is lost or
            raises. Training goes on from the run's last checkpoint then. The same exception twice
            in a row is raised.
        heartbeat_timeout_s: How long a worker may be stopped or hold Python's lock, in seconds;
            None for ever.
        collective_timeout_s: How long workers may wait for others in a collective operation, in
            seconds. Then an error names those that are missing.

    Raises:
        TypeError: `main` cannot be called or `num_workers` is no number; as `NotSendableError`
            if the function, an argument or a value that it returned cannot be pickled.
        ValueError: `num_workers` is below 1, `max_restarts` below 0, or a timeout not above 0.
        RuntimeError: This process is one of several workers itself; as `WorkerFailedError` if a
            worker was killed or left by `sys.exit()`, also with exit code 0.
        Exception: What the function raised on the rank that failed first. The whole traceback of
            that rank is its cause.
    """
    if not callable(main):
        raise TypeError(f"`main` must be a function, but got {type(main).__name__}.")
    count(1)("num_workers", num_workers)
    check_count("max_restarts", max_restarts, 0)
    place = launched_place()
    if place is not None:
        raise RuntimeError(
            "`launch` must be called in a process that works alone, but this is one of"
            f" {place.size} workers of {place.launcher}. Hint: call `main` directly here, or start"
            " the script with plain `python`."
        )
    return call_in_workers(
        main,
        num_workers,
        args,
        kwargs,
        max_restarts=max_restarts,
        heartbeat_timeout_s=heartbeat_timeout_s,
        collective_timeout_s=collective_timeout_s,
    )
