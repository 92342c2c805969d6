"""Scripts of mpiexec that use mpi4py beside Paceline; skipped where one of both is missing."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="NOT TESTED: needs mpi4py. Hint: pip install mpi4py")

Start = Callable[..., "subprocess.CompletedProcess[str]"]

# Rank 1 ends at once; rank 0 has work of its own until mpiexec has heard of that.
WORK_AFTER_TRAINING = """
import os, sys, time
from mpi4py import MPI
from paceline import train

def work():
    train.report(rank=train.world_rank())
    return train.world_size()

with train.Trainer() as trainer:
    assert list(trainer.run(work)) == [2, 2]
if MPI.COMM_WORLD.Get_rank() == 1:
    sys.exit(int(os.environ["CODE"]))
time.sleep(3)
print("rank 0 has finished", flush=True)
"""

# Processes of aprun, which tells them their rank alone, as far as there is none here.
PLACE = """
import os
rank = os.environ.pop("OMPI_COMM_WORLD_RANK")
if os.environ.get("KNOWS_MPI"):
    from mpi4py import MPI
for name in [name for name in os.environ if name.startswith("OMPI_COMM_WORLD")]:
    del os.environ[name]
os.environ |= {"ALPS_APP_PE": rank, "ALPS_APP_ID": "1", "MASTER_ADDR": "127.0.0.1"}
from paceline import core
try:
    distributed = core.DistributedContext.from_torch_distributed(timeout_s=60)
except ValueError as error:
    print(f"refused: {error}\\n", end="", flush=True)
else:
    place = distributed.rank, distributed.size, distributed.local_rank, distributed.cross_size
    print(f"place {place}\\n", end="", flush=True)
    distributed.close()
"""


def test_mpiexec_lets_rank_0_finish_what_follows_a_training(
    open_mpi: Start, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(WORK_AFTER_TRAINING)
    done = open_mpi(CODE="0")
    assert done.returncode == 0, done.stderr
    assert "rank 0 has finished" in done.stdout


def test_mpiexec_still_hears_of_a_rank_that_has_failed(open_mpi: Start, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WORK_AFTER_TRAINING)
    done = open_mpi(CODE="3")
    assert done.returncode == 3, done.stderr
    assert "rank 0 has finished" not in done.stdout


def test_the_size_of_mpi_is_that_of_aprun(open_mpi: Start, tmp_path: Path, free_port: int) -> None:
    (tmp_path / "script.py").write_text(PLACE)
    done = open_mpi(KNOWS_MPI="1", MASTER_PORT=str(free_port))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["place (0, 2, 0, 1)", "place (1, 2, 1, 1)"]


def test_no_process_of_aprun_works_while_the_size_is_unknown(
    open_mpi: Start, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(PLACE)
    done = open_mpi()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("refused: The environment variable WORLD_SIZE must be a number")
