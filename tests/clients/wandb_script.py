"""What one release of W&B's client must be able to do here; run by `run_clients.py`."""

import pathlib
import subprocess
import sys

import numpy as np
import wandb

PROJECT = "matrix"
RUN = "release-" + wandb.__version__.replace(".", "-")


def log() -> None:
    """Log what training scripts log."""
    with wandb.init(project=PROJECT, id=RUN, config={"lr": 0.1}, tags=["a"], group="g") as run:
        run.define_metric("val/*", step_metric="epoch")
        for step in range(10):
            run.log({"loss": 1 / (step + 1), "val/loss": step, "epoch": step})
        table = wandb.Table(columns=["a", "b"], data=[[1, "x"], [2, "y"]])
        image = wandb.Image(np.zeros((4, 4, 3), dtype=np.uint8), caption="black")
        run.log({"image": image, "table": table, "histogram": wandb.Histogram([1, 2, 3])})
        pathlib.Path("weights.bin").write_bytes(wandb.__version__.encode())
        artifact = wandb.Artifact("weights", type="model")
        artifact.add_file("weights.bin")
        run.log_artifact(artifact, aliases=["best"]).wait()
        pathlib.Path("kept.txt").write_text("kept")
        run.save("kept.txt")


def resume() -> None:
    """Go on with the run, and use what it has logged."""
    with wandb.init(project=PROJECT, id=RUN, resume="must") as run:
        run.log({"loss": 0.0})
        folder = run.use_artifact("weights:best").download("got")
        assert (pathlib.Path(folder) / "weights.bin").read_text() == wandb.__version__


def read() -> None:
    """Read all that through the public API."""
    run = wandb.Api().run(f"{PROJECT}/{RUN}")
    assert (run.state, run.config, run.tags) == ("finished", {"lr": 0.1}, ["a"]), run.state
    losses = [row["loss"] for row in run.scan_history(keys=["loss"])]
    assert losses == [*(1 / (step + 1) for step in range(10)), 0.0], losses
    assert RUN in [each.id for each in wandb.Api().runs(PROJECT, filters={"config.lr": 0.1})]
    run.file("kept.txt").download(root="files", replace=True)
    assert pathlib.Path("files/kept.txt").read_text() == "kept"


def sync() -> None:
    """Log without a network, and send it later."""
    with wandb.init(project=PROJECT, id=f"{RUN}-offline", mode="offline") as run:
        run.log({"loss": 1.0})
        folder = pathlib.Path(run.dir).parent
    subprocess.run([sys.executable, "-m", "wandb", "sync", str(folder)], check=True)
    assert wandb.Api().run(f"{PROJECT}/{RUN}-offline").state == "finished"


if __name__ == "__main__":
    for part in (log, resume, read, sync):
        part()
        print(f"{part.__name__} works", flush=True)
