"""Train a model of 25 million parameters while its workers are killed again and again.

Paceline, Ray Train and Lightning under torchrun do the same number of steps on two workers, one
after another, with equally many checkpoints. Every two minutes one worker, chosen by a seed, gets
SIGKILL. Then Paceline does it once more under a master that is dead for a while. The table says
how long each took and how much of that time was work. Usage: python benchmarks/proof/prove.py.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
LAUNCHER = ["-m", "paceline.launch.torch_distributed", "--nproc-per-node", "2"]
COMMANDS = {
    "paceline": [*LAUNCHER, "--max-restarts", "1000", str(HERE / "paceline_trial.py")],
    "ray": [str(HERE / "ray_loop.py")],
    "lightning": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                  "--max-restarts", "1000", str(HERE / "lightning_loop.py")],
    "nvrx": ["-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--rdzv_backend", "c10d",
             "--rdzv_endpoint", "localhost:0", "--nproc-per-node", "2", "--max-restarts", "1000",
             str(HERE / "ddp_loop.py")],
    "torchft": [str(HERE / "torchft_loop.py")],
    "paceline-master": [],
}  # fmt: skip
# Those that need no other packages than `make proof` installs.
USUAL = ["paceline", "ray", "lightning", "paceline-master"]
NAMES = {
    "paceline": "Paceline, trial class",
    "ray": "Ray Train",
    "lightning": "Lightning, torchrun's restarts",
    "nvrx": "NVRx's ft_launcher, a loop with DDP",
    "torchft": "torchft, two replicas",
    "paceline-master": "Paceline, under a master that is dead for a while",
}


@dataclass
class Outcome:
    """What one way did; times in seconds."""

    way: str
    returncode: int
    wall_s: float
    begun: float = 0.0
    kills: list[float] = field(default_factory=list)
    outage: tuple[float, float] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    """Measure the ways asked for, print a table and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", nargs="*", choices=[*COMMANDS, []], help=", ".join(COMMANDS))
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--checkpoint-period", type=int, default=20, help="in steps")
    parser.add_argument("--kill-every-s", type=float, default=120.0)
    parser.add_argument("--outage-s", type=float, default=600.0, help="how long the master is dead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try this script")
    options = parser.parse_args()
    path = RESULTS / time.strftime("proof-%Y%m%d-%H%M%S.json")
    outcomes = []
    for way in options.ways or USUAL:
        outcomes.append(measure(way, options))
        path.write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n")
    print(table(outcomes, options.steps))
    print(f"\nraw figures: benchmarks/results/{path.name}")


def measure(way: str, options: argparse.Namespace) -> Outcome:
    """Train one way to the end in a directory of its own, with its kills."""
    directory = Path(tempfile.mkdtemp(prefix="paceline-proof-"))
    environment = os.environ | {
        "PROOF_DIRECTORY": str(directory),
        "PROOF_STEPS": str(options.steps),
        "PROOF_CHECKPOINT_PERIOD": str(options.checkpoint_period),
        "PACELINE_HOME": str(directory / "home"),
        "PYTHONPATH": str(HERE),
        "OMP_NUM_THREADS": "1",
        # Ray's workers are nicer than the others otherwise, and give way to all else that runs.
        "RAY_worker_niceness": "0",
    }
    if options.small:
        environment |= {"PROOF_WIDTH": "64", "PROOF_LAYERS": "2"}
    print(f"{NAMES[way]} in {directory} ...", flush=True)
    master = Master(directory, environment, options) if way == "paceline-master" else None
    command = master.command() if master else [sys.executable, *COMMANDS[way]]
    with (directory / "output").open("wb") as output:
        begin = time.time()
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        outcome = Outcome(way, returncode=0, wall_s=0.0)
        disturb(process, directory, outcome, master, options)
        outcome.wall_s, outcome.begun = time.time() - begin, begin
    outcome.returncode = process.returncode
    if outcome.returncode:
        print((directory / "output").read_text(errors="replace")[-3000:])
    outcome.facts = read_steps(directory, outcome)
    if master:
        outcome.facts |= master.end(options.steps)
    shutil.rmtree(directory, ignore_errors=True)
    return outcome


def disturb(
    process: subprocess.Popen[bytes],
    directory: Path,
    outcome: Outcome,
    master: "Master | None",
    options: argparse.Namespace,
) -> None:
    """Kill one of the two workers each time that the period is over, until the end."""
    generator = random.Random(options.seed)
    due = None
    while process.poll() is None:
        time.sleep(0.1)
        now = time.time()
        if due is None:
            if (directory / "steps-0.jsonl").exists():
                due = now + options.kill_every_s
                if master:
                    master.due = now + options.kill_every_s / 2
            continue
        if master:
            master.step(now, outcome)
        if now >= due:
            rank = generator.randrange(2)
            if kill(directory / f"rank-{rank}.pid"):
                outcome.kills.append(now)
                due = now + options.kill_every_s


def kill(mark: Path) -> bool:
    """Kill the process that a rank's file names; false if it has ended already."""
    try:
        pid = int(mark.read_text())
        os.kill(pid, signal.SIGKILL)
    except (OSError, ValueError):
        return False
    return True


class Master:
    """A master in the background that is killed once and started again after a while."""

    def __init__(
        self, directory: Path, environment: dict[str, str], options: argparse.Namespace
    ) -> None:
        self.directory, self.environment, self.options = directory, environment, options
        self.due: float | None = None
        self._paceline = [sys.executable, "-m", "paceline.cli"]
        self._start("0")
        self._address = json.loads((directory / "home" / "master.json").read_text())

    def _start(self, port: str) -> None:
        subprocess.run(
            [*self._paceline, "up", "--detach", "--port", port, "--slots", "2"],
            env=self.environment, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def command(self) -> list[str]:
        """Return the command that creates the experiment and follows it to its end."""
        code = self.directory / "code"
        code.mkdir()
        for name in ("work.py", "paceline_trial.py"):
            shutil.copy(HERE / name, code)
        config = {
            "name": "proof",
            # Its own restarts are there while the master is dead.
            "entrypoint": "python -m paceline.launch.torch_distributed --max-restarts 1000"
            " paceline_trial.py",
            "hyperparameters": {"global_batch_size": 8},
            "searcher": {
                "name": "single",
                "metric": "validation_loss",
                "max_length": {"batches": self.options.steps},
            },
            "resources": {"slots_per_trial": 2},
            "max_restarts": 1000,
            "environment": {
                "variables": {
                    name: value
                    for name, value in self.environment.items()
                    if name.startswith("PROOF_") or name == "OMP_NUM_THREADS"
                }
            },
        }
        path = self.directory / "proof.json"
        path.write_text(json.dumps(config))
        create = [*self._paceline, "experiment", "create", str(path), str(code)]
        subprocess.run(create, env=self.environment, check=True)
        return [sys.executable, str(Path(__file__)), "--wait-for-experiment"]

    def step(self, now: float, outcome: Outcome) -> None:
        """Kill the master when it is due, and start it when it was dead for long enough."""
        if self.due is None or now < self.due:
            return
        if outcome.outage is None:
            os.kill(self._address["pid"], signal.SIGKILL)
            outcome.outage = (now, now + self.options.outage_s)
            self.due = now + self.options.outage_s
        else:
            self._start(str(self._address["url"].rsplit(":", 1)[1]))
            self.due = None

    def end(self, num_steps: int) -> dict[str, Any]:
        """Stop the master and say which steps it has not stored exactly once."""
        from paceline.client import Client

        os.environ["PACELINE_HOME"] = self.environment["PACELINE_HOME"]
        with Client() as client:
            (experiment,) = client.list_experiments()
            (trial,) = experiment.trials()
            stored = [row.steps_completed for row in trial.iter_metrics("training")]
        subprocess.run(
            [*self._paceline, "down"], env=self.environment, check=True, stdout=subprocess.DEVNULL
        )
        expected = list(range(1, num_steps + 1))
        return {"state": experiment.state.value, "reports_missing": len({*expected} - {*stored}),
                "reports_doubled": len(stored) - len({*stored})}  # fmt: skip


def wait_for_experiment() -> None:
    """Wait until the only experiment has ended, through any outage of its master."""
    from paceline.client import Client, ClientError

    while True:
        try:
            with Client() as client:
                (experiment,) = client.list_experiments()
                if experiment.state in ("COMPLETED", "ERROR", "CANCELED"):
                    sys.exit(experiment.state != "COMPLETED")
        except (ClientError, OSError):
            pass
        time.sleep(0.2)


def read_steps(directory: Path, outcome: Outcome) -> dict[str, Any]:
    """Return what the log of rank 0 says: executions, times, and repeated steps that differ."""
    lines = [json.loads(line) for line in (directory / "steps-0.jsonl").read_text().splitlines()]
    times = [
        after["end"] - before["end"]
        for before, after in zip(lines, lines[1:], strict=False)
        if before["pid"] == after["pid"]
    ]
    losses: dict[int, set[str]] = {}
    for line in lines:
        losses.setdefault(line["step"], set()).add(line["loss"])
    median = statistics.median(times)
    recoveries = []
    for killed in outcome.kills:
        after = [line["end"] for line in lines if line["end"] > killed + median]
        recoveries += [after[0] - killed] if after else []
    return {
        "executions": len(lines),
        "distinct_steps": len(losses),
        "steps_of_one_rank": sum(line["ranks"] == 1 for line in lines),
        "step_s": median,
        "goodput": len(losses) * median / outcome.wall_s,
        # Where the rest of the time went, but for kills and what was done again.
        "start_s": lines[0]["end"] - median - outcome.begun,
        "slower_steps_s": sum(times) - len(times) * median,
        "end_s": outcome.begun + outcome.wall_s - lines[-1]["end"],
        "lost_steps": len(lines) - len(losses),
        "repeated_with_another_loss": sum(len(values) > 1 for values in losses.values()),
        "recovery_s": statistics.median(recoveries) if recoveries else None,
    }


def table(outcomes: list[Outcome], num_steps: int) -> str:
    """Return the outcomes as a Markdown table."""
    head = ["way", "wall time", "kills", "goodput", "step", "a kill to the next step",
            "steps done again", "of these with another loss", "distinct steps"]  # fmt: skip
    rows = [head, ["---"] * len(head)]
    for one in outcomes:
        facts = one.facts
        recovery = facts["recovery_s"]
        rows.append([
            NAMES[one.way] + ("" if one.returncode == 0 else f" (failed, {one.returncode})"),
            f"{one.wall_s:.0f} s", str(len(one.kills)), f"{facts['goodput']:.1%}",
            f"{facts['step_s']:.2f} s", "-" if recovery is None else f"{recovery:.1f} s",
            str(facts["lost_steps"]), str(facts["repeated_with_another_loss"]),
            f"{facts['distinct_steps']} of {num_steps}",
        ])  # fmt: skip
        if facts["steps_of_one_rank"]:
            rows[-1][0] += f" ({facts['steps_of_one_rank']} steps of one worker alone)"
        if "reports_missing" in facts:
            rows[-1][0] += (
                f" ({facts['state']}; {facts['reports_missing']} reports missing,"
                f" {facts['reports_doubled']} doubled)"
            )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    if sys.argv[1:] == ["--wait-for-experiment"]:
        wait_for_experiment()
    else:
        main()
