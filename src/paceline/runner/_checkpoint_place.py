"""Where an attempt on a node keeps its checkpoints."""

from pathlib import Path

import msgspec

from paceline.journal import RunDirectory, RunInfo
from paceline.messages.attempts import AttemptSpec, StorageMark


def place_checkpoints(
    spec: AttemptSpec, info: RunInfo, run: RunDirectory
) -> tuple[AttemptSpec, RunInfo]:
    """Return what an attempt gets on this node, which may not share the master's directory.

    Without a mark, the storage is an object store, or the master cannot write to the directory. The
    nodes of an attempt on several must share the directory in any case, to store in it together.

    Args:
        spec: What the master says.
        info: What the processes of the attempt are to get.
        run: The run directory of the attempt, which is not made yet.
    """
    if spec.storage_mark is None or spec.num_members > 1 or _is_seen(spec.storage_mark):
        return spec, info
    return (
        msgspec.structs.replace(spec, sends_checkpoints=True),
        msgspec.structs.replace(info, checkpoint_storage=str(run.checkpoints_path)),
    )


def _is_seen(mark: StorageMark) -> bool:
    try:
        return Path(mark.path).read_text() == mark.text
    except (OSError, UnicodeDecodeError):
        return False
