"""Treatment of `sys.exit()` in a worker's function."""

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.workers._errors import RemoteTraceback, WorkerFailedError
from paceline.workers.pools._worker_call import traceback_text
from paceline.workers.processes._worker_program import describe_exit, exit_code_of


def left_error(
    rank: int, world_size: int, left_by: str | None, exit_code: int, traceback: str = ""
) -> WorkerFailedError:
    """Return the error for a worker that ended before its function had returned or raised.

    Args:
        rank: The worker.
        world_size: The number of workers.
        left_by: What it left by, such as "sys.exit(3)"; None if only its process is known to end.
        exit_code: With which code.
        traceback: Where it left, if that is known; becomes the error's cause.
    """
    what = f"rank {rank} left by `{left_by}` with exit code {exit_code}"
    if left_by is None:
        what = f"the process of rank {rank} ended with exit code {exit_code}"
    count = f", the first of {world_size} to fail" if world_size > 1 else ""
    error = WorkerFailedError(
        f"The function of a worker must return or raise an exception, but {what}{count}."
        " Hint: `return`.",
        rank,
        exit_code,
    )
    if traceback:
        error.__cause__ = RemoteTraceback(f"Rank {rank} left here:\n\n{traceback}")
    return error


@contextmanager
def exit_as_error(rank: int = 0, world_size: int = 1) -> Iterator[None]:
    """Turn `sys.exit()` within the block into the error that it is in any other worker.

    Args:
        rank: The rank of this process.
        world_size: The number of workers.

    Raises:
        WorkerFailedError: The block has left by `sys.exit()`.
    """
    try:
        yield
    except SystemExit as request:
        text = traceback_text(request, __file__)
        left_by, code = describe_exit(request.code), exit_code_of(request.code)
        error = left_error(rank, world_size, left_by, code, text)
        raise error from error.__cause__
