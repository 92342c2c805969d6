"""What the ranks of two nodes do together: ranks 0 and 1 are on one node, rank 2 is on another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline._base.run_directory import RunInfo
from paceline.core._background_checkpoints import NEWEST_REPORT
from paceline.core._node_memory import _newest, _NodeStates
from paceline.core._read_runs import read_alerts
from paceline.core._run_opening import OpenedRun
from paceline.journal import MetricsReported, RunDirectory
from paceline.storage._checkpoint_files import FileEntry, Manifest

CODE = """
import os
import sys
from pathlib import Path

rank = int(os.environ["RANK"])
node = rank // 2
os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE=str(2 - node))
os.environ.update(GROUP_RANK=str(node), GROUP_WORLD_SIZE="2")

from paceline import core
from paceline.core import DownloadMode, PreemptMode
from paceline.storage import DirectoryStorage

num_downloads = 0
original = DirectoryStorage.download

def counting(*arguments, **options):
    global num_downloads
    num_downloads += 1
    return original(*arguments, **options)

DirectoryStorage.download = counting
SHARED = DownloadMode.LocalWorkersShareDownload

def error_of(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def names(path):
    return sorted(each.name for each in Path(path).iterdir())

with core.init(preempt_mode=PreemptMode.ChiefOnly) as context:
    distributed, checkpoint = context.distributed, context.checkpoint
    # In this order, as there might be a sample before the fifth step otherwise.
    context.profiler.note_steps(5)
    context.profiler.on(0.1, 1)

    if rank == 0:
        assert not context.preempt.should_preempt()
        with checkpoint.store_path({"steps_completed": 5}) as (path, uuid):
            for each in range(4):
                (path / f"part_{each}").write_text(str(each))
    else:
        told = error_of(context.preempt.should_preempt)
        assert told.startswith("RuntimeError: Only the chief may call `should_preempt()`"), told
        assert f"but rank {rank} did" in told, told
        told = error_of(lambda: checkpoint.delete("x", ["part_*"]))
        assert f"Only the chief may delete checkpoints, but rank {rank} tried to" in told, told
    uuid = distributed.broadcast(context.latest_checkpoint)

    context.alert(f"from rank {rank}", level="debug")
    if rank == 0:
        context.train.set_metadata({"data": "v1"})
    else:
        told = error_of(lambda: context.train.set_metadata({"data": "v2"}))
        assert f"Only the chief may report this, but rank {rank} did" in told, told
    distributed.allgather(None)
    assert context.train.get_metadata() == {"data": "v1"}

    # One rank of each node fetches what its node needs.
    checkpoint.download(uuid, f"node_{node}", SHARED, selector=lambda name: name == f"part_{rank}")
    assert num_downloads == (rank != 1)
    assert names(f"node_{node}") == [["part_0", "part_1"], ["part_2"]][node]
    with checkpoint.restore_path(uuid, SHARED) as path:
        assert (path / f"part_{rank}").read_text() == str(rank)
        places = distributed.allgather_local(str(path))
        assert len(set(places)) == 1
    # A rank by itself.
    if rank == 2:
        checkpoint.download(uuid, "alone", selector=lambda name: name == "part_3")
        assert names("alone") == ["part_3"]

    # What fails on rank 2 fails on all, and no rank waits in vain.
    told = error_of(lambda: checkpoint.download(uuid if rank < 2 else "lost", "other", SHARED))
    wanted = "CheckpointNotFoundError: " if rank == 2 else "DistributedPeerError: "
    assert told.startswith(wanted), told
    assert rank == 2 or "but rank 2 failed: CheckpointNotFoundError" in told, told

    def fail():
        with checkpoint.restore_path(uuid, SHARED):
            if rank == 2:
                raise OSError("cannot be read")

    told = error_of(fail)
    assert "cannot be read" in told, told

    def alter():
        with checkpoint.restore_path(uuid, SHARED) as path:
            if rank == 1:
                (path / "part_0").chmod(0o644)
                (path / "part_0").write_text("other")

    told = error_of(alter)
    assert "part_0 was altered" in told, told
    told = error_of(lambda: checkpoint.download(uuid, f"rank_{rank}", SHARED))
    if node == 0:
        assert "`ckpt_dir` must be the same on all ranks of a node" in told, told
    distributed.allgather(None)

# Each rank asks by itself, and not equally often.
with core.init(preempt_mode=PreemptMode.WorkersAskMaster, name="by-itself") as context:
    for _ in range(rank + 1):
        assert not context.preempt.should_preempt()
    context.distributed.allgather(None)
"""


def test_three_ranks_on_two_nodes(
    start_ranks: Callable[..., Any],
    finish_ranks: Callable[..., Any],
    work_directory: Path,
    records_of: Callable[..., Any],
) -> None:
    for exit_code, _, errors in finish_ranks(start_ranks(CODE)):
        assert exit_code == 0, errors
    [run] = (work_directory / "paceline_runs").glob("*-ranks")
    # The first rank of each node samples.
    found = {
        rank: [(row.group, row.steps_completed) for row in records_of(run, MetricsReported, rank)]
        for rank in range(3)
    }
    assert sorted(alert.title for alert in read_alerts(RunDirectory(run))) == [
        f"from rank {rank}" for rank in range(3)
    ]
    assert found == {0: [("system", 5)], 1: [], 2: [("system_rank_2", 5)]}


@pytest.mark.parametrize(
    ("newest_report", "steps"),
    [
        (None, 9),
        (("a1.g0.r0", 8), 9),
        (("a1.g0.r0", 7), 5),
        (("a1.g0.r0", 2), None),
        (("a1.g1.r0", 99), None),
        (("a2.g0.r0", 99), None),
        # They are of another process of this attempt.
        (("a0.g0.r0", 0), 9),
    ],
)
def test_no_state_in_memory_is_used_whose_reports_may_be_lost(
    newest_report: tuple[str, int] | None, steps: int | None
) -> None:
    manifests = {}
    for uuid, steps_completed, number in (("old", 5, 3), ("new", 9, 8)):
        metadata = {"steps_completed": steps_completed, NEWEST_REPORT: ["a1.g0.r0", number]}
        entry = FileEntry(1, "digest")
        manifest = Manifest(uuid=uuid, created=0.0, metadata=metadata, files={"state": entry})
        manifests[uuid] = msgspec.json.encode(manifest)
    node = _NodeStates(0, manifests, {uuid: {"state": 1} for uuid in manifests})
    info = RunInfo(
        run_id="r",
        name="n",
        created=0.0,
        checkpoint_storage="/nowhere",
        newest_report=newest_report,
    )
    attempt = 1 if newest_report and newest_report[0].startswith("a0") else 3
    opened = OpenedRun(
        path=Path(), info=info, seed=0, attempt=attempt, generation=0, latest_checkpoint=None,
        steps_completed=4,
    )  # fmt: skip
    found = _newest([node], opened)
    assert steps == (None if found is None else found.metadata["steps_completed"])
