"""A rank is killed at each boundary of what is written of a checkpoint: all of it, or nothing.

Every checkpoint that is there loads as it was stored, and a run that goes on removes what is left.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import core, faults
from paceline.journal import RunDirectory
from paceline.storage import CheckpointStorage, ObjectStorage, storage_from

SCRIPT = """
import json, os, sys
from contextlib import suppress
from uuid import uuid4
from paceline import core
from paceline.journal import RunDirectory
from paceline.storage import CheckpointNotFoundError

with core.init(name="faulty", resume="auto", checkpoint_storage=sys.argv[1]) as context:
    checkpoint, distributed, stored = context.checkpoint, context.distributed, []
    rank, latest = distributed.rank, distributed.broadcast(context.latest_checkpoint)
    step = 0
    if latest is not None:
        with checkpoint.restore_path(latest) as path:
            found = {json.loads((path / f"of_{rank}" / name).read_text()) for name in "ab"}
        (step,) = found
    if rank == 0:
        stored = [each.uuid for each in core.read_checkpoints(RunDirectory(context.run_dir))]
    parts = checkpoint.parts(lambda record: stored.append(record.uuid))
    while step < 4:
        step += 1
        uuid = distributed.broadcast(str(uuid4()))
        with parts.store(uuid, {"steps_completed": step}) as (path, _):
            (path / f"of_{rank}").mkdir()
            for name in "ab":
                (path / f"of_{rank}" / name).write_text(json.dumps(step))
        # Whoever waits for a rank that was killed is told here.
        distributed.allgather(None)
        parts.finish()
        while rank == 0 and len(stored) > 1:
            with suppress(CheckpointNotFoundError):
                checkpoint.delete(stored.pop(0))
    parts.close()
sys.stdout.flush()
os._exit(0)
"""

# Where: the point, how often it has been reached by then, and on which ranks. What the chief does
# alone comes last. The second checkpoint is struck, or the deletion of the first one.
PLACES = {
    "storage.begun": {0: [2], 2: [2]},
    "storage.between_files": {0: [2], 2: [2]},
    "storage.before_move": {0: [3, 4], 2: [3, 4]},
    # On the chief, the list of its files and the manifest.
    "storage.before_rename": {0: [3, 4], 2: [2]},
    "storage.before_done": {0: [2], 2: [2]},
    "storage.after_done": {0: [2], 2: [2]},
    "storage.before_manifest": {0: [2]},
    "storage.after_manifest": {0: [2]},
    "storage.after_manifest_deleted": {0: [1]},
}
OF_DIRECTORIES = {"storage.before_move", "storage.before_rename"}
# `delete_files` replaces a manifest; see `tests/storage/test_directory.py`. Others are reached by a
# master that takes in a node's checkpoint; see `tests/system/test_node_checkpoints.py`.
ELSEWHERE = {
    "storage.after_manifest_replaced", "storage.piece_written", "storage.before_moved_in",
}  # fmt: skip
QUICK = {("directory", "storage.after_manifest:2", 0)}
CELLS = [
    (kind, f"{point}:{count}", rank)
    for kind in ("directory", "s3")
    for point, by_rank in PLACES.items()
    if kind == "directory" or point not in OF_DIRECTORIES
    for rank, counts in by_rank.items()
    for count in counts
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "place", "rank"),
    [pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.slow) for cell in CELLS],
)
def test_a_kill_at_a_boundary_leaves_whole_checkpoints_and_no_rest(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    start_ranks: Callable[..., Any],
    finish_ranks: Callable[..., Any],
    kind: str,
    place: str,
    rank: int,
) -> None:
    url = request.getfixturevalue("s3") if kind == "s3" else str(tmp_path / "checkpoints")
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    variables["TMPDIR"] = str(tmp_path / "temporary")
    (tmp_path / "temporary").mkdir()
    script = SCRIPT.replace("sys.argv[1]", repr(url))
    fault = {"PACELINE_FAULT": f"{place},rank={rank}"}

    codes = [code for code, _, _ in finish_ranks(start_ranks(script, **variables, **fault))]
    assert codes[rank] == -signal.SIGKILL
    assert codes.count(0) == 0
    storage = storage_from(url)
    steps = [step_of(storage, uuid) for uuid in storage.list()]
    assert steps in ([1], [2], [1, 2], [2, 1])

    for code, _, errors in finish_ranks(start_ranks(script, **variables)):
        assert code == 0, errors
    [summary] = core.list_runs(tmp_path / "paceline_runs")
    run = RunDirectory(summary.path)
    # A deletion that was not recorded is no harm: what is not there is passed over.
    [stored] = [each for each in core.read_checkpoints(run) if storage.exists(each.uuid)]
    assert storage.list() == [stored.uuid]
    assert step_of(storage, stored.uuid) == 4
    # Nothing else is left, in the storage or outside of it.
    assert run.begun_checkpoints() == {}
    assert roots_of(storage) == {stored.uuid}
    assert list((tmp_path / "temporary").iterdir()) == []


def step_of(storage: CheckpointStorage, uuid: str) -> int:
    """Return the step of a checkpoint, in which all files must be of it."""
    with storage.restore_path(uuid) as path:
        steps = [json.loads((path / f"of_{r}" / n).read_text()) for r in range(3) for n in "ab"]
    assert set(steps) == {storage.manifest(uuid).metadata["steps_completed"]}
    return int(steps[0])


def roots_of(storage: CheckpointStorage) -> set[str]:
    """Return the first part of the names of all that is there."""
    if isinstance(storage, ObjectStorage):
        return {stored.key.partition("/")[0] for stored in storage.objects("")}
    assert storage.local_root is not None
    return {path.name for path in storage.local_root.iterdir()}


def test_every_boundary_is_struck() -> None:
    points = {point for point in faults.points() if point.startswith("storage.")}
    assert points == {*PLACES, *ELSEWHERE}
    assert {(kind, place, rank) for kind, place, rank in CELLS} >= QUICK
