"""The job scripts for HPC sites, run by a real Slurm and, in place of PALS, by MPICH."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core import RunState, list_runs

Run = Callable[..., str]


@pytest.fixture
def example_name() -> str:
    """Return the name of the example."""
    return "hpc"


@pytest.fixture
def environment(environment: dict[str, str]) -> dict[str, str]:
    """Return an environment whose `python3` is this interpreter's."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return {**environment, "PATH": path}


@pytest.mark.long
def test_the_training_learns_alone(run: Run, example: Path) -> None:
    output = run("train.py", "--epochs", "5")
    (accuracy,) = re.findall(r"Of the validation images ([\d.]+)% are", output)
    # One in ten by chance. How a sum is rounded, and so the exact number, depends on the processor.
    assert float(accuracy) > 70
    assert (example / "results" / "final_model.pth").exists()


def test_every_file_is_in_the_guide(example: Path) -> None:
    named = set(re.findall(r"`([\w.]+\.(?:py|sh|pbs))`", (example / "README.md").read_text()))
    assert named == {path.name for path in example.iterdir() if path.suffix != ".md"}


@pytest.mark.parametrize("name", ["slurm.sh", "polaris.pbs"])
def test_a_job_script_has_no_error_of_syntax(example: Path, name: str) -> None:
    subprocess.run(["bash", "-n", str(example / name)], check=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_of_pbs_leaves_in_time_and_is_submitted_again(
    example: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    mpich = shutil.which("mpirun.mpich")
    if mpich is None:
        pytest.skip("NOT TESTED: needs mpirun.mpich. Hint: apt-get install mpich")
    programs = tmp_path / "programs"
    programs.mkdir()
    # MPICH takes what PALS takes, with one hyphen; PBS is no more than a note of what it was told.
    _write_program(programs / "mpiexec", f'exec {mpich} -n "$2" -ppn "$4" "${{@:5}}"')
    _write_program(programs / "qsub", 'echo "$@" > submitted')
    (tmp_path / "nodes").write_text("localhost\n")
    variables = {
        **environment,
        "PATH": f"{programs}{os.pathsep}{environment['PATH']}",
        "PBS_O_WORKDIR": str(example),
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PER_NODE": "2",
        "MASTER_PORT": "29561",
    }

    def submit(**more: str) -> str:
        job = subprocess.run(
            ["bash", "polaris.pbs"],
            cwd=example,
            env={**variables, **more},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert job.returncode == 0, job.stdout + job.stderr
        return job.stdout + job.stderr

    submit(MINUTES="0.25", ARGUMENTS="--epochs 12 --pause 0.1")
    assert (example / "submitted").read_text() == "-v GOES_ON=1 polaris.pbs\n"
    (example / "submitted").unlink()
    output = submit(GOES_ON="1", ARGUMENTS="--epochs 12")
    assert "Going on after" in output
    assert not (example / "submitted").exists()
    [summary] = list_runs(example / "paceline_runs")
    assert (summary.state, summary.num_attempts) == (RunState.COMPLETED, 2)


def _write_program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/bash\n{line}\n")
    path.chmod(0o755)


@pytest.mark.slow
@pytest.mark.timeout(560)
def test_a_job_of_slurm_is_queued_again_before_its_time_is_over(
    slurm: dict[str, str], example: Path, environment: dict[str, str]
) -> None:
    variables = {**environment, **slurm}

    def call(*command: str) -> str:
        return subprocess.run(
            command, cwd=example, env=variables, capture_output=True, text=True, check=True
        ).stdout

    # The signal comes when 20 s are left, or up to 30 s earlier, as often as the controller looks.
    options = ("--time=2", "--signal=USR1@20")
    arguments = ("--epochs", "10", "--pause", "0.5")
    job = call("sbatch", "--parsable", *options, "slurm.sh", *arguments).strip()
    log = example / f"digits-{job}.log"
    deadline = time.monotonic() + 500
    num_released = 0
    while not (example / "results" / "final_model.pth").exists():
        text = log.read_text() if log.exists() else ""
        assert time.monotonic() < deadline, text
        state = call("squeue", "--noheader", "--format=%T", "--jobs", job).strip()
        assert state, text
        if state == "PENDING" and text.count("Left in epoch") > num_released:
            # A job that is queued again waits for two minutes, unless it is told otherwise.
            num_released += 1
            call("scontrol", "update", f"JobId={job}", "StartTime=now")
        time.sleep(1)
    text = log.read_text()
    assert text.count("Going on after") == text.count("Left in epoch") > 0
    [summary] = list_runs(example / "paceline_runs")
    assert summary.num_attempts == 1 + text.count("Left in epoch")
    assert summary.last_step == 260
