"""Make the sample of a master's home with the Paceline of this interpreter; see `make.py`.

Its name has the version of the database. A version that has been released keeps its sample.
"""

import json
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline._cluster.master.store import tables
from paceline.client import Client

HERE = Path(__file__).parent
SPACE = {"factor": {"type": "categorical", "vals": [1, 2, 4]}}
SEARCHES: dict[str, dict[str, Any]] = {
    "grid": {"name": "grid", "metric": "loss", "max_concurrent_trials": 2},
    "halving": {
        "name": "async_halving", "metric": "loss", "time_metric": "batches", "num_rungs": 2,
        "max_time": 8, "divisor": 2, "max_trials": 4, "max_concurrent_trials": 2,
    },
    "held": {"name": "single", "metric": "loss"},
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    return {
        "name": name, "entrypoint": "python3 trial.py", "searcher": SEARCHES[name],
        "hyperparameters": {"factor": 2} if name == "held" else SPACE,
        "data": {"hold": name == "held"}, "max_restarts": 0,
        "reproducibility": {"experiment_seed": 5}, "labels": ["kept", name],
    }  # fmt: skip


def facts(client: Client) -> dict[str, Any]:
    """Return what is to stay the same, whoever reads it."""
    found = {}
    for experiment in client.list_experiments():
        data = experiment.data
        trials = [
            {
                "hparams": trial.data.hparams,
                "state": str(trial.data.state.value),
                "metrics": [
                    [row.steps_completed, dict(row.metrics)]
                    for row in trial.iter_metrics("training")
                ],
                "log": [line.text for line in trial.iter_logs()],
                "checkpoints": sorted(
                    c.data.metadata["steps_completed"] for c in trial.checkpoints()
                ),
            }
            for trial in experiment.trials()
        ]
        found[data.name] = {
            "state": str(data.state.value),
            "best": data.best_metric,
            "labels": data.labels,
            "trials": trials,
        }
    return found


def main() -> None:
    sample = f"home_{tables.SCHEMA_VERSION}"
    with tempfile.TemporaryDirectory() as scratch:
        home, code = Path(scratch, "home"), Path(scratch, "code")
        home.mkdir()
        code.mkdir()
        (code / "trial.py").write_text((HERE / "trial.py").read_text())
        command = [sys.executable, "-m", "paceline.cli", "up", "--port", "0", "--slots", "2"]
        master = subprocess.Popen([*command, "--home", str(home)])
        while not (home / "master.json").exists():
            time.sleep(0.1)
        address = json.loads((home / "master.json").read_text())
        client = Client(address["url"], (home / "token").read_text().strip())
        for name in ("grid", "halving"):
            client.create_experiment(config_of(name), code).wait()
        held = client.create_experiment(config_of("held"), code)
        while not list(held.checkpoints()):
            time.sleep(0.1)
        held.pause()
        while any(trial.data.is_running for trial in held.trials()):
            time.sleep(0.1)
        (HERE / f"{sample}.json").write_text(json.dumps(facts(client), indent=1, sort_keys=True))
        master.terminate()
        master.wait()
        with tarfile.open(HERE / f"{sample}.tar.xz", "w:xz") as archive:
            archive.add(home, ".", filter=lambda i: None if i.name.endswith(".log") else i)


if __name__ == "__main__":
    main()
