"""Whether ranks on several machines see one storage: asked before they train."""

import os
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from paceline.core._distributed_context import DistributedContext
from paceline.core._node_storage import NodeStorage
from paceline.storage import CheckpointStorage

# A network file system may show another machine's file late.
_PATIENCE_S = 15.0
_LOOK_INTERVAL_S = 0.05


def check_shared_storage(storage: CheckpointStorage, distributed: DistributedContext) -> None:
    """Refuse a directory that some of the machines do not see; all ranks call this together.

    No checkpoint of theirs would ever be whole, which would show only after the training.

    Args:
        storage: Where all ranks are to store their parts of checkpoints.
        distributed: Where the ranks meet.

    Raises:
        ValueError: Some ranks do not see what the chief has written there.
    """
    root = storage.local_root
    if distributed.cross_size == 1 or root is None or isinstance(storage, NodeStorage):
        return
    is_chief = distributed.rank == 0
    mark = distributed.broadcast(_write_mark(root) if is_chief else None)
    try:
        seen = distributed.allgather(mark is None or _is_seen(root / mark))
    finally:
        if is_chief and mark is not None:
            with suppress(OSError):
                (root / mark).unlink()
    blind = [rank for rank, has_seen in enumerate(seen) if not has_seen]
    if blind:
        raise ValueError(
            f"`checkpoint_storage` must be a directory that all machines see, but rank(s)"
            f" {', '.join(map(str, blind))} do not see in {str(root)!r} what rank 0 writes there."
            " Hint: give the path of a file system that is mounted on all of them, or the URL of an"
            " object store."
        )


def _write_mark(root: Path) -> str | None:
    """Return the name of a file there; None if it cannot be written, which a save will tell."""
    name = f".paceline-{uuid4().hex}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / name).touch(exist_ok=False)
    except OSError:
        return None
    return name


def _is_seen(path: Path) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while not _is_there(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_INTERVAL_S)
    return True


def _is_there(path: Path) -> bool:
    """Tell whether a file is there; the server is asked, not what this machine knew before."""
    for directory in (path.parent.parent, path.parent):
        # Opening a directory makes NFS forget that something was not there. Not everyone may.
        with suppress(OSError):
            os.listdir(directory)
    return os.path.exists(path)
