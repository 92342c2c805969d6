"""Directories of runs without a master: names, earlier runs, settings."""

import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from paceline._base.progress_regions import is_notebook
from paceline._base.run_directory import NotARunDirectoryError, RunDirectory, RunInfo
from paceline.core._read_runs import (
    RunState,
    latest_checkpoint,
    newest_run_named,
    read_history,
    run_state,
    run_storage,
)
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.storage._directory_storage import DirectoryStorage
from paceline.storage._storage_by_url import checkpoint_at, storage_from

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# A directory's name has no more than 255: a time before it, and perhaps a number behind.
_LONGEST_NAME = 230
_MAX_LABEL = 100


def run_name(file: str | os.PathLike[str] | None = None) -> str:
    """Return a default run name: the stem of a file, by default the script's."""
    script = Path(file if file is not None else sys.argv[0] if sys.argv else "")
    stem = script.parent.name if script.stem == "__main__" else script.stem
    if stem == "ipykernel_launcher":
        stem = "notebook"
    elif stem in ("", "-c"):
        stem = "notebook" if is_notebook() else "python"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem)[:_LONGEST_NAME].strip("-.") or "run"


def checked_run_name(name: str) -> str:
    """Return a given run name, once checked.

    Raises:
        ValueError: It cannot be part of a file name, or is too long.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            "`name` must consist of letters, digits, dots, hyphens and underscores, and begin"
            f" with a letter or digit, but got {name!r}."
        )
    if len(name) > _LONGEST_NAME:
        raise ValueError(
            f"`name` must have {_LONGEST_NAME} characters at most, as it is part of a directory's"
            f" name, but {name[:20]!r}... has {len(name)}. Hint: shorten it; `hparams`"
            " can hold what the run is about."
        )
    return name


def make_run_directory(root: Path, name: str) -> Path:
    """Create a new directory for a run, never shared with another run, and return its path."""
    root.mkdir(exist_ok=True)
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    number = 1
    while True:
        path = root / (base if number == 1 else f"{base}-{number}")
        try:
            # Creation claims the name: runs begun in the same second get different numbers.
            path.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        else:
            return path


def local_directory(
    path: str | os.PathLike[str] | None, name: str, contents: str = "the journal of a run stays"
) -> Path | None:
    """Return a directory of this machine as an absolute path; None for None.

    Args:
        path: The user's path.
        name: The name of the argument.
        contents: The guaranteed contents, for the error.

    Raises:
        ValueError: It is a URL.
    """
    if path is None:
        return None
    if "://" in os.fspath(path):
        raise ValueError(
            f"`{name}` must be a directory of this machine, where {contents}, but got"
            f" {os.fspath(path)!r}. Hint: `checkpoint_storage` takes URLs."
        )
    return Path(os.path.abspath(path))


RUNS_VARIABLE = "PACELINE_RUNS"
RESUME_VARIABLE = "PACELINE_RESUME"


class NewRunStart(NamedTuple):
    """Start of a new run from a checkpoint of another machine's run.

    `seed` is the training's seed, if the checkpoint has it.
    """

    storage: CheckpointStorage
    uuid: str
    steps_completed: int
    seed: int | None


def new_run_storage(path: Path) -> CheckpointStorage:
    """Return the storage of the run at a path: in its directory, or below the PACELINE_RUNS URL.

    Raises:
        StorageNotInstalledError: No installed package offers the URL's scheme.
        ValueError: PACELINE_RUNS is no URL of a storage.
    """
    url = os.environ.get(RUNS_VARIABLE)
    if not url:
        return DirectoryStorage(RunDirectory(path).checkpoints_path)
    if "://" not in url:
        raise ValueError(
            f"`{RUNS_VARIABLE}` must be the URL of an object store for checkpoints, but got"
            f" {url!r}. Hint: s3://bucket/prefix; the journals of runs stay in ./paceline_runs."
        )
    try:
        # Check of the plain URL first: without a bucket, the run's name would pass for a bucket.
        storage_from(url)
        return storage_from(f"{url.rstrip('/')}/{quote(path.name)}")
    except ValueError as error:
        # Argument name in the message: usually `checkpoint_storage`, here the variable.
        text = str(error).replace("`checkpoint_storage`", f"`{RUNS_VARIABLE}`")
        raise type(error)(text) from error


def is_checkpoint_url(resume: str | os.PathLike[str] | None) -> bool:
    """Return whether `resume` is the URL of a checkpoint rather than a run directory."""
    return isinstance(resume, str) and "://" in resume


def starting_point(url: str, storage: CheckpointStorage | None) -> NewRunStart:
    """Return the checkpoint at a URL; the new run stores its own checkpoints beside this start.

    Args:
        url: The URL of the checkpoint.
        storage: The storage that the script names, if it names one.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        ValueError: It is in another storage than the script names.
    """
    found, uuid = checkpoint_at(url)
    if storage is not None and storage.url != found.url:
        raise ValueError(
            f"A checkpoint to resume from must be in the `checkpoint_storage` {storage.url!r}, but"
            f" got {url!r}. Hint: leave `checkpoint_storage` out, and the run continues there."
        )
    metadata = found.manifest(uuid).metadata
    steps, seed = metadata.get("steps_completed"), metadata.get("seed")
    return NewRunStart(
        found, uuid, steps if isinstance(steps, int) else 0, seed if isinstance(seed, int) else None
    )


_resume_hint: ContextVar[str] = ContextVar(
    "resume_hint", default=', or pass resume="auto" to init()'
)


@contextmanager
def resuming_by(hint: str) -> Iterator[None]:
    """Set the ending of hints about earlier runs to code for the caller's users, in the block."""
    token = _resume_hint.set(hint)
    try:
        yield
    finally:
        _resume_hint.reset(token)


def run_to_resume(
    root: Path, name: str, resume: str | os.PathLike[str] | None
) -> RunDirectory | None:
    """Return the run to resume; None to start a new run.

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
            f" To resume a run of another machine, set {RESUME_VARIABLE} to the URL of its"
            " checkpoint."
        )
        hint = elsewhere if os.environ.get(RUNS_VARIABLE) else ""
        logger.info("No earlier run %r in %s: starting a new one.%s", name, root, hint)
        return None
    state = run_state(run, read_history(run))
    if state in (RunState.COMPLETED, RunState.INVALID_HP):
        logger.warning(
            "The last run %r (%s) is %s: starting a new one.", name, run.path, state.value
        )
        return None
    return run


def warn_earlier_run(run: RunDirectory, name: str) -> None:
    """Warn about a crashed or preempted last run of this name before a new run begins."""
    history = read_history(run)
    state = run_state(run, history)
    if state not in (RunState.CRASHED, RunState.PREEMPTED):
        return
    uuid, steps = latest_checkpoint(run_storage(run, run.read_info()), history)
    found = f"its latest checkpoint is {uuid} at step {steps}" if uuid else "it has no checkpoint"
    logger.warning(
        "The last run %r (%s) %s at step %d; %s. This start begins a new run. To resume that"
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


_MAX_SEED = 2**31
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def drawn_seed() -> int:
    """Return a new seed."""
    return secrets.randbelow(_MAX_SEED)


def checked_labels(labels: Sequence[str]) -> list[str]:
    """Return the labels of a run.

    Raises:
        TypeError: One is no text, or there is one text in place of a list.
        ValueError: One is empty or longer than 100 characters.
    """
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        raise TypeError(f"`labels` must be a list of texts, but got {labels!r}.")
    for label in labels:
        if not 0 < len(label) <= _MAX_LABEL or not label.isprintable():
            raise ValueError(
                f"A label must have 1 to {_MAX_LABEL} printable characters, but got {label!r:.200}."
            )
    return [*dict.fromkeys(labels)]


def recordable(value: Any) -> Any:
    """Return a JSON copy of hyperparameters; values unknown to JSON become text."""
    if isinstance(value, Mapping):
        return {str(key): recordable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [recordable(item) for item in value]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        # A NumPy scalar or a 0-d tensor.
        value = value.item()
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int and _INT64_MIN <= value <= _INT64_MAX:
        return value
    if type(value) is float and isfinite(value):
        return value
    return str(value)


def warn_changed_hparams(info: RunInfo, hparams: Mapping[str, Any] | None) -> None:
    """Warn if a resumed run has other hyperparameters than at its beginning."""
    if hparams is None or info.hparams is None:
        return
    before, now = info.hparams, recordable(hparams)
    changed = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if changed:
        logger.warning(
            "The run %r resumes with other hyperparameters than it began with, which stay on"
            " record: %s.",
            info.name,
            "; ".join(changed),
        )
