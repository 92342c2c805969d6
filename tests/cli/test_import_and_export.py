"""Exports from a master, data frames of its trials, and imported runs on a master."""

import json
from pathlib import Path
from typing import Any

import pytest
from optional_modules import Needed

from paceline import client

Needed("pyarrow")
pandas: Any = Needed("pandas")


@pytest.mark.long
def test_trials_leave_a_master_and_come_back_as_runs(
    mastered: Any, code: Path, tmp_path: Path
) -> None:
    created = mastered("e", "create", "config.yaml", "--json", cwd=code).stdout
    number = json.loads(created)["id"]
    mastered("e", "wait", number, cwd=code)
    mastered("export", number, "-o", "export", "--checkpoints", cwd=tmp_path)
    told = json.loads(mastered("import", "export", "--json", cwd=tmp_path).stdout)
    (run,) = told["runs"]
    assert (run["state"], run["num_points"], run["problems"]) == ("new", 9, [])
    shown = json.loads(mastered("runs", "show", "last", "--json", cwd=tmp_path).stdout)
    assert shown["state"] == "completed"
    validations = [row for row in shown["metrics"] if row["group"] == "validation"]
    assert [row["metrics"]["loss"] for row in validations] == [1.0, 1 / 2, 1 / 3]
    state = tmp_path / run["path"] / "checkpoints" / shown["latest_checkpoint"] / "state.txt"
    assert state.read_text() == "3"

    status = json.loads(mastered("status", "--json").stdout)
    home = json.loads(mastered("token", "create", "frames", "--json").stdout)
    with client.Client(status["url"], token=home["secret"]) as master:
        experiment = master.get_experiment(number)
        (trial,) = experiment.trials()
        frame = trial.to_pandas()
        assert list(frame[frame["group"] == "validation"]["loss"]) == [1.0, 1 / 2, 1 / 3]
        assert list(trial.rows("validation").to_pandas()["epochs"]) == [1, 2, 3]
        assert list(experiment.to_pandas()["best_metric"]) == [1 / 3]
        assert f"<td>{experiment.id}</td>" in trial._repr_html_()
        assert f"Experiment {number}: small" in experiment._repr_html_()


def test_imported_runs_are_sent_to_a_master(mastered: Any, tmp_path: Path) -> None:
    run = tmp_path / "mlruns" / "1" / ("0" * 32)
    for folder in ("metrics", "params", "artifacts"):
        (run / folder).mkdir(parents=True)
    (run.parent / "meta.yaml").write_text("name: project\n")
    (run / "meta.yaml").write_text("run_name: old\nstart_time: 1700000000000\nstatus: 3\n")
    (run / "metrics" / "loss").write_text("1700000000000 0.5 1\n1700000001000 nan 2\n")
    (run / "params" / "lr").write_text("0.1")
    (run / "artifacts" / "note.txt").write_text("note")
    mastered("import", "mlruns", cwd=tmp_path)
    (synced,) = json.loads(mastered("sync", "last", "--json", cwd=tmp_path).stdout)
    described = mastered("e", "describe", synced["experiment_id"], "--json").stdout
    experiment = json.loads(described)
    assert (experiment["name"], experiment["state"]) == ("old", "COMPLETED")
    (trial,) = json.loads(mastered("e", "lt", synced["experiment_id"], "--json").stdout)
    rows = mastered("t", "metrics", trial["id"], "--json").stdout.splitlines()
    metrics = [json.loads(row)["metrics"]["loss"] for row in rows]
    assert metrics == [0.5, {"$float": "nan"}]
    assert trial["hparams"] == {"lr": 0.1}
