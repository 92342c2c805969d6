"""Where an attempt on a node keeps its checkpoints."""

from pathlib import Path

import msgspec

from paceline._regular_files import open_regular_below, opened_directory, read_limited
from paceline.journal import RunDirectory, RunInfo
from paceline.messages.attempts import AttemptSpec, StorageMark


def place_checkpoints(
    spec: AttemptSpec, info: RunInfo, run: RunDirectory
) -> tuple[AttemptSpec, RunInfo]:
    """Return what an attempt gets on this node, which may not share the master's directory.

    Without a mark, the storage is an object store, or the master cannot write to the directory. Of
    an attempt on several nodes, the place follows when all are there: see `place_on_each_node`.

    Args:
        spec: What the master says.
        info: What the processes of the attempt are to get.
        run: The run directory of the attempt, which is not made yet.
    """
    if spec.storage_mark is None or _is_seen(spec.storage_mark):
        return spec, info
    spec = msgspec.structs.replace(spec, sends_checkpoints=True)
    if spec.num_members > 1:
        return spec, info
    return spec, msgspec.structs.replace(info, checkpoint_storage=str(run.checkpoints_path))


def place_on_each_node(run: RunDirectory) -> None:
    """Have each node of an attempt on several keep its own files of checkpoints."""
    info = run.read_info()
    place = str(run.checkpoints_path)
    run.write_info(msgspec.structs.replace(info, checkpoint_storage=place, storage_per_node=True))


def sends_checkpoints(spec: AttemptSpec, run: RunDirectory) -> bool:
    """Tell whether the runner of an attempt sends its checkpoints to the master."""
    if spec.num_members > 1:
        return run.read_info().storage_per_node
    return spec.sends_checkpoints


def _is_seen(mark: StorageMark) -> bool:
    path = Path(mark.path)
    try:
        # Others may write to the directory.
        with (
            opened_directory(path.parent) as directory,
            open_regular_below(directory, path.name) as file,
        ):
            return read_limited(file, len(mark.text)) == mark.text.encode()
    except OSError:
        return False
