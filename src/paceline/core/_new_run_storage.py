"""Where a new run without a master keeps its checkpoints, and what it begins with."""

import os
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from paceline.journal import RunDirectory
from paceline.storage import CheckpointStorage, DirectoryStorage, checkpoint_at, storage_from

RUNS_VARIABLE = "PACELINE_RUNS"
RESUME_VARIABLE = "PACELINE_RESUME"


class NewRunStart(NamedTuple):
    """The checkpoint of another machine's run that a new run goes on from.

    `seed` is that of the training, if the checkpoint tells.
    """

    storage: CheckpointStorage
    uuid: str
    steps_completed: int
    seed: int | None


def storage_of_new_run(path: Path) -> CheckpointStorage:
    """Return the storage of the run at a path: there, or below the URL that PACELINE_RUNS names.

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
        # As it is first: without a bucket, the name of the run would be taken for one.
        storage_from(url)
        return storage_from(f"{url.rstrip('/')}/{quote(path.name)}")
    except ValueError as error:
        # It names the argument that the text usually comes from.
        text = str(error).replace("`checkpoint_storage`", f"`{RUNS_VARIABLE}`")
        raise type(error)(text) from error


def is_storage_in_environment() -> bool:
    """Tell whether a variable says where a new run keeps its checkpoints."""
    return bool(os.environ.get(RUNS_VARIABLE)) or is_checkpoint_url(os.environ.get(RESUME_VARIABLE))


def is_checkpoint_url(resume: str | os.PathLike[str] | None) -> bool:
    """Tell whether what a run is to go on from is a checkpoint by its URL, not a run directory."""
    return isinstance(resume, str) and "://" in resume


def starting_point(url: str, storage: CheckpointStorage | None) -> NewRunStart:
    """Return the checkpoint at a URL. The new run keeps its own checkpoints beside it.

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
            f" got {url!r}. Hint: leave `checkpoint_storage` out, and the run goes on there."
        )
    metadata = found.manifest(uuid).metadata
    steps, seed = metadata.get("steps_completed"), metadata.get("seed")
    return NewRunStart(
        found, uuid, steps if isinstance(steps, int) else 0, seed if isinstance(seed, int) else None
    )
