"""What a training script does with MLflow's client, and what it must read back; any release.

python mlflow_script.py http://api:TOKEN@HOST:PORT
"""

import math
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import mlflow
import numpy as np
from mlflow import MlflowClient


def main(url: str) -> None:
    """Log a run with everything in it, and check what the server says of it."""
    mpl.use("agg")
    mlflow.set_tracking_uri(url)
    mlflow.set_experiment("lines")
    with mlflow.start_run(run_name="first", tags={"kind": "test"}) as run:
        log_values()
        log_files()
    run_id = run.info.run_id
    check_run(run_id)
    check_artifacts(run_id)
    check_search(run_id)
    check_registry(run_id)
    check_life(run_id)


def log_values() -> None:
    """Log parameters, metrics and tags."""
    mlflow.log_params({"lr": 0.1, "layers": 3, "name": "x"})
    for step in range(5):
        mlflow.log_metrics({"loss": 1 / (step + 1), "accuracy": step / 10}, step=step)
    mlflow.log_metric("nan", float("nan"))
    mlflow.log_metric("inf", float("inf"))
    mlflow.log_metric("same", 1, step=0)
    mlflow.log_metric("same", 2, step=0)
    mlflow.set_tag("stage", "dev")


def log_files() -> None:
    """Log artifacts of every kind."""
    mlflow.log_text("hi", "texts/x.txt")
    mlflow.log_dict({"a": 1}, "d.json")
    image = np.zeros((4, 4, 3), dtype=np.uint8)
    mlflow.log_image(image, "image.png")
    if hasattr(mlflow, "log_image") and tuple(map(int, mlflow.__version__.split(".")[:2])) > (2, 9):
        mlflow.log_image(image, key="sample/a", step=3)
    from matplotlib import pyplot as plt

    mlflow.log_figure(plt.figure(), "figure.png")
    mlflow.log_table({"a": [1, 2], "b": ["x", "y"]}, "table.json")
    mlflow.log_table({"a": [3], "b": ["z"]}, "table.json")
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "sub").mkdir()
        (directory / "sub" / "f.bin").write_bytes(b"123")
        (directory / "g").write_text("g")
        mlflow.log_artifacts(scratch, "directory")


def check_run(run_id: str) -> None:
    """Check values, and the history of a metric with two values at one step."""
    client = MlflowClient()
    run = client.get_run(run_id)
    metrics = dict(run.data.metrics)
    assert math.isnan(metrics.pop("nan"))
    assert metrics == {"loss": 0.2, "accuracy": 0.4, "inf": math.inf, "same": 2.0}, metrics
    assert run.data.params == {"lr": "0.1", "layers": "3", "name": "x"}
    assert run.data.tags["stage"] == "dev"
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert [m.value for m in client.get_metric_history(run_id, "same")] == [1.0, 2.0]
    assert [m.step for m in client.get_metric_history(run_id, "loss")] == [*range(5)]


def check_artifacts(run_id: str) -> None:
    """Check lists and contents of artifacts."""
    client = MlflowClient()
    root = client.get_run(run_id).info.artifact_uri
    listed = {one.path: one.is_dir for one in client.list_artifacts(run_id)}
    assert listed["directory"]
    assert listed["texts"]
    assert not listed["d.json"]
    inside = {one.path: one.file_size for one in client.list_artifacts(run_id, "directory")}
    assert inside == {"directory/g": 1, "directory/sub": None}
    assert client.list_artifacts(run_id, "d.json") == []
    assert mlflow.artifacts.load_text(f"{root}/texts/x.txt") == "hi"
    assert mlflow.load_table("table.json", run_ids=[run_id]).shape == (3, 2)
    fetched = Path(mlflow.artifacts.download_artifacts(f"{root}/directory"))
    assert (fetched / "sub" / "f.bin").read_bytes() == b"123"


def check_search(run_id: str) -> None:
    """Check a search with a filter over everything."""
    found = mlflow.search_runs(
        filter_string="metrics.loss < 0.5 and params.name = 'x' and tags.stage LIKE 'd%'"
        " and attributes.status = 'FINISHED'",
        order_by=["metrics.loss DESC"],
    )
    assert [*found["run_id"]] == [run_id]
    assert mlflow.search_runs(filter_string="metrics.loss > 0.5").empty


def check_registry(run_id: str) -> None:
    """Check a registered model with a version and an alias."""
    client = MlflowClient()
    name = f"model-{run_id}"
    client.create_registered_model(name)
    source = f"{client.get_run(run_id).info.artifact_uri}/directory"
    version = client.create_model_version(name, source, run_id)
    client.set_registered_model_alias(name, "champion", version.version)
    found = client.get_model_version_by_alias(name, "champion")
    assert (int(found.version), found.run_id, found.status) == (1, run_id, "READY")
    assert [model.name for model in client.search_registered_models()] == [name]
    assert [one.version for one in client.search_model_versions(f"name = '{name}'")] == [
        found.version
    ]
    fetched = Path(mlflow.artifacts.download_artifacts(f"models:/{name}@champion"))
    assert (fetched / "g").read_text() == "g"


def check_life(run_id: str) -> None:
    """Check that a run is deleted, restored and resumed."""
    client = MlflowClient()
    client.delete_run(run_id)
    assert client.get_run(run_id).info.lifecycle_stage == "deleted"
    client.restore_run(run_id)
    with mlflow.start_run(run_id=run_id):
        assert client.get_run(run_id).info.status == "RUNNING"
        mlflow.log_metric("loss", 0.1, step=0)
    run = client.get_run(run_id)
    # The last value is that of the highest step.
    assert (run.info.status, run.data.metrics["loss"]) == ("FINISHED", 0.2)
    assert len(client.get_metric_history(run_id, "loss")) == 6


if __name__ == "__main__":
    main(sys.argv[1])
