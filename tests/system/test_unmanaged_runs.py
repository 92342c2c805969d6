"""Scripts that run without a master, shown by one: live and sent later."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.client import Client

# Trains as far as the file `go` says, and ends once that is the last step.
SCRIPT = """
import pathlib, sys, time
import paceline

last = int(sys.argv[1])
with paceline.core.init() as context:
    print(context.run_dir, flush=True)
    done = 0
    if context.latest_checkpoint:
        done = context.checkpoint.get_metadata(context.latest_checkpoint)["steps_completed"]
    for step in range(done + 1, last + 1):
        while step > int(pathlib.Path("go").read_text() or 0) and not (
            context.preempt.should_preempt()
        ):
            time.sleep(0.01)
        if context.preempt.should_preempt():
            break
        context.train.report_validation_metrics(step, {"loss": float(sys.argv[2]) / step})
        if step % 2 == 0:
            with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "state.txt").write_text(f"{step}")
"""


class Desk:
    """A user's directory: scripts run here, and the command line talks to one master."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.home = path / "home"
        self._processes: list[subprocess.Popen[str]] = []
        (path / "train.py").write_text(SCRIPT)
        self.go_to(0)

    def go_to(self, step: int) -> None:
        """Let the script train up to a step."""
        new = self.path / "go.new"
        new.write_text(str(step))
        new.rename(self.path / "go")

    def start(self, *command: str, **variables: str) -> "subprocess.Popen[str]":
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=self.path,
            env=kept | {"PACELINE_HOME": str(self.home)} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._processes.append(process)
        return process

    def train(self, last: int, scale: float = 1.0, **variables: str) -> tuple[Any, Path]:
        """Start the script; return its process and its run directory."""
        process = self.start("train.py", str(last), str(scale), **variables)
        assert process.stdout is not None
        while not (line := process.stdout.readline().strip()).startswith("/"):
            assert line, "the script ended before it began"
        return process, Path(line)

    def start_paceline(self, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
        return self.start("-m", "paceline.cli", *arguments, **variables)

    def paceline(self, *arguments: str, code: int = 0) -> str:
        """Run a command to its end and return what it printed."""
        process = self.start_paceline(*arguments)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == code, output
        return output

    def up(self, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
        """Start a master and wait until it answers or has died."""
        (self.home / "master.json").unlink(missing_ok=True)
        master = self.start_paceline("up", "--port", "0", "--slots", "1", *arguments, **variables)
        while not (self.home / "master.json").exists() and master.poll() is None:
            time.sleep(0.02)
        return master

    @contextmanager
    def client(self) -> Iterator[Client]:
        """Give a client of the master that runs now."""
        address = json.loads((self.home / "master.json").read_text())
        with Client(address["url"], (self.home / "token").read_text().strip()) as client:
            yield client

    def experiments(self) -> list[Any]:
        """Return the experiments, the newest first."""
        with self.client() as client:
            return [experiment.data for experiment in client.list_experiments()]

    def states(self) -> list[str]:
        """Return the states of the experiments."""
        return [experiment.state.value for experiment in self.experiments()]

    def rows(self) -> list[tuple[int, int, float]]:
        """Return trial 1's validation rows: step, attempt and loss."""
        with self.client() as client:
            rows = list(client.get_trial(1).iter_metrics("validation"))
        return [(row.steps_completed, row.attempt, row.metrics["loss"]) for row in rows]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """Return an empty desk; whatever was started on it is killed at the end."""
    made = Desk(tmp_path)
    yield made
    made.close()


@pytest.mark.long
def test_a_master_shows_runs_live_through_a_kill_and_a_resume(
    desk: Desk, wait_until: Callable[..., None]
) -> None:
    master = desk.up("--runs", "paceline_runs")
    script, run_dir = desk.train(5)
    desk.go_to(3)
    wait_until(lambda: desk.experiments() and len(desk.rows()) == 3)
    [experiment] = desk.experiments()
    assert (experiment.state.value, experiment.is_unmanaged) == ("ACTIVE", True)
    assert experiment.run_dir == str(run_dir)
    assert re.search(r"1 +train +RUNNING", desk.paceline("e", "list"))
    assert "must be managed by this master" in desk.paceline("e", "pause", "1", code=1)
    script.send_signal(signal.SIGKILL)
    wait_until(lambda: desk.states() == ["ERROR"])
    assert "without a word" in desk.experiments()[0].error
    # Step 3 was reported after the checkpoint of step 2, so it is made again.
    again, same_dir = desk.train(5, scale=2.0, PACELINE_RESUME=str(run_dir))
    assert same_dir == run_dir
    wait_until(lambda: desk.states() == ["ACTIVE"] and desk.rows()[-1][1] == 2)
    assert desk.rows() == [(1, 1, 1.0), (2, 1, 0.5), (3, 2, 2 / 3)]
    desk.go_to(5)
    assert again.wait(200) == 0
    wait_until(lambda: desk.states() == ["COMPLETED"])
    lines = desk.paceline("t", "metrics", "1", "--json").splitlines()
    assert [json.loads(line)["steps_completed"] for line in lines] == [1, 2, 3, 4, 5]
    listed = json.loads(desk.paceline("e", "list-checkpoints", "1", "--json"))
    assert [(c["steps_completed"], c["attempt"]) for c in listed] == [(4, 2), (2, 1)]
    assert listed[0]["storage"] == str(run_dir / "checkpoints")
    master.send_signal(signal.SIGINT)
    assert master.wait(60) == 0
    output, _ = master.communicate()
    assert "Traceback" not in output


@pytest.mark.long
def test_sync_sends_a_run_that_ended_and_then_nothing_more(desk: Desk) -> None:
    desk.go_to(2)
    script, run_dir = desk.train(4)
    wait = time.monotonic() + 60
    while not list(run_dir.glob("checkpoints/*/manifest.json")):
        assert time.monotonic() < wait
        time.sleep(0.02)
    script.send_signal(signal.SIGTERM)
    assert script.wait(200) == 0
    desk.up()
    output = desk.paceline("sync", str(run_dir))
    assert re.search(r"^train is experiment 1: sent \d records\.$", output.strip()), output
    # It was preempted, so it waits for its resumption.
    assert desk.states() == ["PAUSED"]
    assert desk.paceline("sync", run_dir.name).strip() == "train is experiment 1: sent 0 records."
    assert [step for step, _, _ in desk.rows()] == [1, 2]
    assert "`RUN_DIR` must be a run directory" in desk.paceline("sync", "nothing", code=1)


@pytest.mark.long
def test_sync_goes_on_until_the_run_has_ended_and_survives_the_master(
    desk: Desk, wait_until: Callable[..., None]
) -> None:
    master = desk.up()
    script, run_dir = desk.train(4)
    desk.go_to(1)
    sync = desk.start_paceline("sync", str(run_dir), "--watch")
    assert sync.stdout is not None
    assert sync.stdout.readline().endswith("; the run goes on.\n")
    wait_until(lambda: len(desk.rows()) == 1)
    master.kill()
    master.wait()
    desk.go_to(4)
    assert script.wait(200) == 0
    desk.up()
    output, _ = sync.communicate(timeout=200)
    assert sync.returncode == 0, output
    assert output.splitlines()[-1] == "train has ended."
    assert [step for step, _, _ in desk.rows()] == [1, 2, 3, 4]
    assert desk.states() == ["COMPLETED"]


@pytest.mark.long
def test_a_master_that_dies_while_it_takes_up_a_run_loses_and_doubles_nothing(
    desk: Desk, wait_until: Callable[..., None]
) -> None:
    desk.go_to(4)
    script, _ = desk.train(4)
    assert script.wait(200) == 0
    killed = desk.up("--runs", "paceline_runs", PACELINE_FAULT="master.records.stored")
    assert killed.wait(200) == -signal.SIGKILL
    desk.up("--runs", "paceline_runs")
    wait_until(lambda: desk.states() == ["COMPLETED"])
    assert desk.rows() == [(1, 1, 1.0), (2, 1, 0.5), (3, 1, 1 / 3), (4, 1, 0.25)]


@pytest.mark.long
def test_runs_that_are_no_directory_are_refused(desk: Desk) -> None:
    (desk.path / "file").write_text("")
    output = desk.paceline("up", "--port", "0", "--runs", "file", code=1)
    assert "`runs` must be a directory" in output
