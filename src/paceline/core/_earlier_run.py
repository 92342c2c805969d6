"""The earlier run of a name: a start goes on with it, or begins a new run and tells of it."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from paceline.core._journal_history import read_history
from paceline.core._new_run_storage import RESUME_VARIABLE, RUNS_VARIABLE
from paceline.core._run_summaries import (
    RunState,
    latest_checkpoint,
    newest_run_named,
    run_state,
    storage_of_run,
)
from paceline.journal import NotARunDirectoryError, RunDirectory

logger = logging.getLogger(__name__)

_resume_hint: ContextVar[str] = ContextVar(
    "resume_hint", default=', or pass resume="auto" to init()'
)


@contextmanager
def resuming_by(hint: str) -> Iterator[None]:
    """Have a hint about an earlier run end with what the caller's users can write."""
    token = _resume_hint.set(hint)
    try:
        yield
    finally:
        _resume_hint.reset(token)


def run_to_resume(
    root: Path, name: str, resume: str | os.PathLike[str] | None
) -> RunDirectory | None:
    """Return the run that a start goes on with; None if it begins a new one.

    Args:
        root: The directory of runs.
        name: The name of the run.
        resume: "auto" for the newest run of the name, unless it is completed; or a run directory.

    Raises:
        NotARunDirectoryError: There is no run at `resume`.
    """
    if not resume:
        return None
    if resume != "auto":
        path = Path(os.path.abspath(resume))
        if (path / "manifest.json").exists() and not (path / "run.json").exists():
            raise NotARunDirectoryError(
                f"`resume` must name a run directory or the URL of a checkpoint, but {str(path)!r}"
                f" is the directory of a checkpoint. Hint: {path.as_uri()!r} is its URL."
            )
        return RunDirectory.open(path)
    run = newest_run_named(root, name)
    if run is None:
        elsewhere = (
            f" To go on with a run of another machine, set {RESUME_VARIABLE} to the URL of its"
            " checkpoint."
        )
        hint = elsewhere if os.environ.get(RUNS_VARIABLE) else ""
        logger.info("No earlier run %r in %s: starting a new one.%s", name, root, hint)
        return None
    state = run_state(run, read_history(run))
    if state in (RunState.COMPLETED, RunState.INVALID_HP):
        logger.info("The last run %r (%s) is %s: starting a new one.", name, run.path, state.value)
        return None
    return run


def tell_of_earlier_run(run: RunDirectory, name: str) -> None:
    """Warn if the last run of a name did not end well, as a new run begins beside it."""
    history = read_history(run)
    state = run_state(run, history)
    if state not in (RunState.CRASHED, RunState.PREEMPTED):
        return
    uuid, steps = latest_checkpoint(storage_of_run(run, run.read_info()), history)
    found = f"its latest checkpoint is {uuid} at step {steps}" if uuid else "it has no checkpoint"
    logger.warning(
        "The last run %r (%s) %s at step %d; %s. This start begins a new run. To go on with that"
        " one instead, set %s=%s%s.",
        name,
        run.path,
        "crashed" if state is RunState.CRASHED else "was preempted",
        max(history.last_steps.values(), default=0),
        found,
        RESUME_VARIABLE,
        run.path,
        _resume_hint.get(),
    )
