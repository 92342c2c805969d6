"""Reading a checkpoint that its run may delete at the same time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.storage._begun_checkpoints import OPEN_NAME
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.storage._errors import CheckpointError, CheckpointNotFoundError
from paceline.storage._manifest import MANIFEST_NAME


@contextmanager
def restored(storage: CheckpointStorage, uuid: str) -> Iterator[Path]:
    """Yield a directory with the verified files of a checkpoint, to read only.

    Raises:
        CheckpointCorruptError: Files are missing or altered.
        CheckpointNotFoundError: There is no such checkpoint, or it was deleted meanwhile.
    """
    try:
        with storage.restore_path(uuid) as path:
            yield path
    except CheckpointNotFoundError:
        raise
    except (CheckpointError, ValueError, FileNotFoundError) as error:
        if storage.exists(uuid):
            raise
        raise _gone(f"{uuid} in {storage.url!r}", "it was deleted meanwhile") from error


@contextmanager
def telling_of_deletion(path: Path) -> Iterator[None]:
    """Have errors of reading a checkpoint say that it was deleted, if it was.

    Args:
        path: The checkpoint's directory, or another place of weights.

    Raises:
        CheckpointNotFoundError: The body has failed, and the checkpoint is no longer there.
    """
    was_whole, was_there = (path / MANIFEST_NAME).exists(), path.exists()
    try:
        yield
    except CheckpointNotFoundError:
        raise
    except (CheckpointError, ValueError, FileNotFoundError) as error:
        is_whole = (path / MANIFEST_NAME).exists()
        # A deletion takes the manifest first.
        is_unfinished = not is_whole and (path.parent / OPEN_NAME / path.name).exists()
        if (was_whole and not is_whole) or (was_there and not path.exists()):
            happened = "it was deleted meanwhile"
        elif is_unfinished:
            happened = "it is being deleted, or is not whole yet"
        else:
            raise
        raise _gone(f"in {str(path)!r}", happened) from error


def _gone(place: str, happened: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"The checkpoint {place} must be there while it is read, but {happened}. Hint: take a newer"
        " one; a run deletes the checkpoints that its rules do not keep."
    )
