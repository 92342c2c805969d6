"""Summary of the end of a training, with the run directory and the last checkpoint."""

import os

from paceline.display._progress_line import COMPLETED


def ending_of(error: BaseException | None) -> str:
    """Return the word for an end by an exception, or by none."""
    # The command line shows tables without the core API, which would double its start.
    from paceline.core import Outcome, outcome_of

    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return (
        COMPLETED if outcome_of(error) is Outcome.COMPLETED else f"failed ({type(error).__name__})"
    )


def locations_of(
    run_dir: str | os.PathLike[str], storage: str | None, checkpoint: str | None
) -> tuple[str, ...]:
    """Return where a run is, and its last checkpoint.

    Args:
        run_dir: The run directory.
        storage: Where the last checkpoint is stored, a path or a URL; None without one.
        checkpoint: Its UUID.
    """
    run = f"run {_shortest(os.fspath(run_dir))}"
    if storage is None or checkpoint is None:
        return (run,)
    is_inside = storage.startswith(os.path.join(run_dir, ""))
    return run, f"checkpoint {checkpoint if is_inside else f'{_shortest(storage)}/{checkpoint}'}"


def _shortest(location: str) -> str:
    """Return a path relative to the working directory if it is below it."""
    try:
        relative = os.path.relpath(location)
    except OSError:
        # The working directory is gone.
        return location
    return location if "://" in location or relative.startswith(os.pardir) else relative
