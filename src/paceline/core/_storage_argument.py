"""The checkpoint storage that a script names."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from paceline.journal import RunInfo
from paceline.storage import CheckpointStorage, storage_from

GivenStorage: TypeAlias = CheckpointStorage | str | Path | Mapping[str, Any] | None

# Where the mappings that `storage_from` takes hold their path.
_PATH_NAMES = ("host_path", "path", "container_path")


def given_storage(spec: GivenStorage) -> CheckpointStorage | None:
    """Return the storage that a script names; None for that of the run.

    Raises:
        TypeError: `spec` has another type.
        ValueError: It names no storage, or a path where no directory can be made.
    """
    storage = spec if spec is None or isinstance(spec, CheckpointStorage) else storage_from(spec)
    if storage is not None and storage.local_root is not None:
        _check_directory(storage.local_root)
    return storage


def _check_directory(root: Path) -> None:
    """Check that a storage's directory is there or can be made, before the first checkpoint."""
    place = next((each for each in (root, *root.parents) if os.path.lexists(each)), None)
    if place is None or place.is_dir():
        return
    if place.is_symlink():
        found = f"a link to {os.readlink(place)!r}, where no directory is"
        hint = "make the directory that it names, mount its disk, or remove the link"
    else:
        found, hint = "a file", "remove it, or name another path"
    raise ValueError(
        f"`checkpoint_storage` must be a directory, or a path where one can be made, but"
        f" {str(place)!r} is {found}. Hint: {hint}."
    )


def check_given_storage(spec: GivenStorage, info: RunInfo) -> None:
    """Refuse what would put checkpoints into a directory that is deleted with the attempt.

    Args:
        spec: What the script names.
        info: The run.

    Raises:
        ValueError: It is a relative path, and the run is a trial of a master.
    """
    path: object = spec
    if isinstance(spec, Mapping):
        path = next((spec[name] for name in _PATH_NAMES if spec.get(name)), None)
    is_path = isinstance(path, Path) or (isinstance(path, str) and "://" not in path)
    if not info.cluster_id or not is_path or os.path.isabs(os.path.expanduser(str(path))):
        return
    raise ValueError(
        "`checkpoint_storage` must be an absolute path under a master, which deletes the"
        f" attempt's directory afterwards, but got {str(path)!r}. Hint: give an absolute path,"
        " or leave it out to use the experiment's storage."
    )
