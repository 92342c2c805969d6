"""The five steps of the fifth source document: a guide to the core API, from a script to a search.

The scripts are typed anew from what the guide says of them, with its names, arguments and commands.
They needed these corrections and no others:

1. `import determined as det` is `import paceline as det`, `determined.launch` is
   `paceline.launch`, and the command `det` is `paceline`.
2. The model is one weight, and training one line, so that 500 trials take minutes. Step 5 trains
   with torch.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Paceline = Callable[..., str]

MODEL = """
import json, sys, time

weight = 8.0

def train_one_batch(weight, learning_rate):
    return weight - learning_rate * weight

def loss_of(weight):
    return weight**2
"""

# Step 1: no word of Paceline.
MODEL_DEF = f"""{MODEL}
for epoch in range(3):
    weight = train_one_batch(weight, 0.1)
    print(f"Train Epoch: {{epoch}} Loss: {{loss_of(weight):.6f}}", flush=True)
"""

# Step 2: report metrics.
METRICS = f"""
import paceline as det
{MODEL}
def train(core_context, epoch, train_loader):
    global weight
    for batch_idx in range(len(train_loader)):
        weight = train_one_batch(weight, 0.1)
        # Report epoch-based training metrics.
        core_context.train.report_training_metrics(
            steps_completed=(batch_idx + 1) + epoch * len(train_loader),
            metrics={{"train_loss": loss_of(weight), "epoch": epoch}},
        )

def test(core_context, epoch, steps_completed):
    core_context.train.report_validation_metrics(
        steps_completed=steps_completed, metrics={{"test_loss": loss_of(weight), "epoch": epoch}}
    )

def main(core_context):
    train_loader = range(4)
    for epoch in range(3):
        train(core_context, epoch, train_loader)
        # Calculate steps_completed for plotting test metrics.
        steps_completed = (epoch + 1) * len(train_loader)
        test(core_context, epoch, steps_completed)

if __name__ == "__main__":
    with det.core.init() as core_context:
        main(core_context=core_context)
"""

# Step 3: checkpoints; a pause goes on from the same epoch, a continued trial from the first one.
CHECKPOINTS = f"""
import paceline as det
{MODEL}
def load_state(checkpoint_directory, trial_id):
    checkpoint_directory = __import__("pathlib").Path(checkpoint_directory)
    weight = json.loads((checkpoint_directory / "checkpoint.pt").read_text())
    with checkpoint_directory.joinpath("state").open("r") as f:
        epochs_completed, ckpt_trial_id = [int(field) for field in f.read().split(",")]
    # If trial IDs don't match, training starts from the first epoch.
    return weight, (epochs_completed if ckpt_trial_id == trial_id else 0)

def main(core_context):
    global weight
    info = det.get_cluster_info()
    assert info is not None
    latest_checkpoint = info.latest_checkpoint
    start_epoch = 0
    if latest_checkpoint is not None:
        with core_context.checkpoint.restore_path(latest_checkpoint) as path:
            weight, start_epoch = load_state(path, info.trial.trial_id)
    print(f"begins at epoch {{start_epoch}} with {{weight:.4f}}", flush=True)
    for epoch in range(start_epoch, 12):
        weight = train_one_batch(weight, 0.1)
        steps_completed = epoch + 1
        core_context.train.report_validation_metrics(
            steps_completed=steps_completed, metrics={{"test_loss": loss_of(weight)}}
        )
        # Save checkpoint.
        checkpoint_metadata_dict = {{"steps_completed": steps_completed}}
        with core_context.checkpoint.store_path(checkpoint_metadata_dict) as (path, storage_id):
            (path / "checkpoint.pt").write_text(json.dumps(weight))
            with path.joinpath("state").open("w") as f:
                f.write(f"{{epoch + 1}},{{info.trial.trial_id}}")
        # Whoever pauses it has the time to: the first attempt goes no further than to epoch 6.
        while epoch == 6 and latest_checkpoint is None:
            if core_context.preempt.should_preempt():
                return
            time.sleep(0.1)
        # Detect when the experiment is paused by the WebUI.
        if core_context.preempt.should_preempt():
            return

if __name__ == "__main__":
    with det.core.init() as core_context:
        main(core_context)
"""

# Step 4: train until a point chosen by the search, validate, report.
ADAPTIVE = f"""
import paceline as det
{MODEL}
def main(core_context):
    global weight
    # Get hparams chosen for this trial from cluster info object.
    info = det.get_cluster_info()
    hparams = info.trial.hparams
    epoch = 0
    for op in core_context.searcher.operations():
        while epoch < op.length:
            weight = train_one_batch(weight, hparams["learning_rate"])
            epoch += 1
            core_context.train.report_validation_metrics(
                steps_completed=epoch, metrics={{"test_loss": loss_of(weight), "epoch": epoch}}
            )
        op.report_completed(loss_of(weight))

if __name__ == "__main__":
    with det.core.init() as core_context:
        main(core_context)
"""

# Step 5: distributed training.
DISTRIBUTED = """
import os
import paceline as det
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

def main(core_context):
    num_replicas, rank = core_context.distributed.size, core_context.distributed.rank
    # All IP addresses of every node in the trial, and communication primitives.
    assert det.get_cluster_info().container_addrs == ["127.0.0.1"]
    assert core_context.distributed.allgather(rank) == [0, 1]
    assert core_context.distributed.gather(rank) == ([0, 1] if rank == 0 else None)
    assert core_context.distributed.broadcast(rank) == 0
    # Later versions: system metrics of each node, TensorBoard files, metadata and alerts.
    core_context.profiler.on(sampling_interval=0.1, samples_per_report=1)
    logdir = core_context.train.get_tensorboard_path()
    (logdir / "notes").write_text(f"rank {rank}")
    core_context.train.upload_tensorboard_files()
    if rank == 0:
        core_context.train.set_metadata({"dataset": "ones"})
        core_context.alert(title="Training begins", description="on two slots", level="warn")
    data = TensorDataset(torch.ones(8, 1))
    # Shard the data into num_replicas non-overlapping parts.
    sampler = DistributedSampler(data, num_replicas=num_replicas, rank=rank)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    model = DDP(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for batch_idx, (x,) in enumerate(loader):
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean()
            loss.backward()
            optimizer.step()
        print(f"rank {rank} of {num_replicas} trained epoch {epoch}", flush=True)
        if rank == 0:
            core_context.train.report_validation_metrics(
                steps_completed=(epoch + 1) * len(loader), metrics={"test_loss": loss.item()}
            )
            core_context.train.report_progress((epoch + 1) / 2)
            with core_context.checkpoint.store_path({"steps_completed": epoch + 1}) as (path, _):
                torch.save(model.state_dict(), path / "checkpoint.pt")
                (path / "optimizer.pt").write_text("moments")
        if core_context.preempt.should_preempt():
            return
    # One download per node, of what its workers select.
    storage_id = core_context.distributed.broadcast(core_context.latest_checkpoint)
    with core_context.checkpoint.restore_path(
        storage_id,
        download_mode=det.core.DownloadMode.LocalWorkersShareDownload,
        selector=lambda name: name == "checkpoint.pt",
    ) as path:
        model.load_state_dict(torch.load(path / "checkpoint.pt", weights_only=True))
    if rank == 0:
        core_context.checkpoint.delete(storage_id, globs=["optimizer*"])

if __name__ == "__main__":
    dist.init_process_group("gloo")
    distributed = det.core.DistributedContext.from_torch_distributed()
    with det.core.init(
        distributed=distributed,
        preempt_mode=det.core.PreemptMode.WorkersAskChief,
        tensorboard_mode=det.core.TensorboardMode.MANUAL,
    ) as core_context:
        main(core_context)
"""

SINGLE = "searcher: {name: single, metric: test_loss, smaller_is_better: true}\nmax_restarts: 0\n"
FILES = {
    "model_def.py": MODEL_DEF,
    "const.yaml": f"name: const\n{SINGLE}entrypoint: python3 model_def.py\n",
    "model_def_metrics.py": METRICS,
    "metrics.yaml": f"name: metrics\n{SINGLE}entrypoint: python3 model_def_metrics.py\n",
    "model_def_checkpoints.py": CHECKPOINTS,
    "checkpoints.yaml": f"name: check\n{SINGLE}entrypoint: python3 model_def_checkpoints.py\n",
    "model_def_adaptive.py": ADAPTIVE,
    "adaptive.yaml": """
name: adaptive
hyperparameters:
  learning_rate: {type: double, minval: 0.0001, maxval: 1.0}
searcher:
  name: adaptive_asha
  metric: test_loss
  smaller_is_better: true
  max_trials: 500
  max_length: {epochs: 20}
entrypoint: python3 model_def_adaptive.py
""",
    "model_def_distributed.py": DISTRIBUTED,
    "distributed.yaml": f"""
name: distributed
{SINGLE}
entrypoint: >-
   python3 -m paceline.launch.torch_distributed
   python3 model_def_distributed.py
resources:
  slots_per_trial: 2
""",
}


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the guide's directory."""
    directory = tmp_path_factory.mktemp("guide")
    for name, text in FILES.items():
        (directory / name).write_text(text)
    return directory


@pytest.fixture(scope="module")
def paceline(guide: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Paceline]:
    """Return a function that runs a command in the guide's directory, beside a running master."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    home = tmp_path_factory.mktemp("home")
    environment = {**kept, "PACELINE_HOME": str(home), "OMP_NUM_THREADS": "1"}

    def run(*arguments: object) -> str:
        command = [sys.executable, "-m", "paceline.cli", *map(str, arguments)]
        done = subprocess.run(
            command, cwd=guide, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("up", "--detach", "--port", 0, "--slots", 2)
    yield run
    run("down", "--timeout", 1)


def described(paceline: Paceline, experiment: int) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(paceline("e", "describe", experiment, "--json"))
    return told


def number_of(told: str) -> int:
    found = re.search(r"experiment (\d+)", told)
    assert found is not None
    return int(found.group(1))


@pytest.mark.long
def test_step_1_runs_the_script_as_it_is(paceline: Paceline) -> None:
    told = paceline("e", "create", "const.yaml", ".", "-f")
    assert f"Train Epoch: 2 Loss: {(8 * 0.9**3) ** 2:.6f}" in told
    assert described(paceline, number_of(told))["state"] == "COMPLETED"


@pytest.mark.long
def test_step_2_reports_metrics(paceline: Paceline) -> None:
    experiment = number_of(paceline("e", "create", "metrics.yaml", "."))
    paceline("e", "wait", experiment)
    [trial] = json.loads(paceline("e", "lt", experiment, "--json"))
    rows = [*map(json.loads, paceline("t", "metrics", trial["id"], "--json").splitlines())]
    by_group = {group: [row for row in rows if row["group"] == group] for group in FINAL}
    for group, (num_rows, step, metrics) in FINAL.items():
        assert len(by_group[group]) == num_rows
        assert by_group[group][-1]["steps_completed"] == step
        assert by_group[group][-1]["metrics"] == pytest.approx(metrics)


FINAL = {
    "training": (12, 12, {"train_loss": (8 * 0.9**12) ** 2, "epoch": 2}),
    "validation": (3, 12, {"test_loss": (8 * 0.9**12) ** 2, "epoch": 2}),
}


@pytest.mark.long
def test_step_3_pauses_goes_on_and_continues(paceline: Paceline) -> None:
    experiment = number_of(paceline("e", "create", "checkpoints.yaml", "."))
    while not json.loads(paceline("e", "lc", experiment, "--json")):
        time.sleep(0.1)
    paceline("e", "pause", experiment)
    while described(paceline, experiment)["state"] != "PAUSED":
        time.sleep(0.1)
    [trial] = json.loads(paceline("e", "lt", experiment, "--json"))
    paceline("e", "activate", experiment)
    paceline("e", "wait", experiment)
    begun = re.findall(r"begins at epoch (\d+) with ([\d.]+)", paceline("t", "logs", trial["id"]))
    assert begun[0] == ("0", "8.0000")
    # The paused trial goes on from its epoch, with its weight.
    epoch = int(begun[1][0])
    assert 0 < epoch < 12
    assert begun[1][1] == f"{8 * 0.9**epoch:.4f}"
    # A trial that continues it starts from the first epoch, with the weight of the end.
    told = paceline("t", "continue", trial["id"], "-f")
    assert f"begins at epoch 0 with {8 * 0.9**12:.4f}" in told


@pytest.mark.long
@pytest.mark.parametrize(
    "max_trials", [12, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_step_4_searches_to_the_end(paceline: Paceline, max_trials: int) -> None:
    changes = () if max_trials == 500 else ("--config", f"searcher.max_trials={max_trials}")
    experiment = number_of(paceline("e", "create", "adaptive.yaml", ".", *changes))
    paceline("e", "wait", experiment)
    told = described(paceline, experiment)
    assert (told["state"], told["progress"]) == ("COMPLETED", 1.0)
    trials = json.loads(paceline("e", "lt", experiment, "--json", "--limit", 1000))
    assert len(trials) == max_trials
    assert {trial["state"] for trial in trials} <= {"COMPLETED", "STOPPED"}
    lengths = [trial["steps_completed"] for trial in trials]
    assert max(lengths) == 20
    assert min(lengths) < 20
    # What trained to the end is among the best of all.
    rates = sorted(trial["hparams"]["learning_rate"] for trial in trials)
    longest = [t["hparams"]["learning_rate"] for t in trials if t["steps_completed"] == 20]
    assert max(longest) >= rates[-1 - max_trials // 4]


@pytest.mark.long
def test_step_5_trains_in_two_processes(paceline: Paceline) -> None:
    told = paceline("e", "create", "distributed.yaml", ".", "-f")
    for rank in (0, 1):
        assert f"rank {rank} of 2 trained epoch 1" in told
    experiment = number_of(told)
    assert described(paceline, experiment)["state"] == "COMPLETED"
    found = json.loads(paceline("e", "lc", experiment, "--json"))
    newest = max(found, key=lambda checkpoint: checkpoint["steps_completed"])
    assert newest["steps_completed"] == 2
    assert (newest["state"], [*newest["resources"]]) == ("PARTIALLY_DELETED", ["checkpoint.pt"])
    assert "alert: Training begins: on two slots" in told
    [trial] = json.loads(paceline("e", "lt", experiment, "--json"))
    said = json.loads(paceline("t", "describe", trial["id"], "--json"))
    assert said["metadata"] == {"dataset": "ones"}
    assert [alert["title"] for alert in said["alerts"]] == ["Training begins"]
    assert "Training begins: on two slots" in paceline("t", "describe", trial["id"])
    logged = paceline("t", "logs", trial["id"], "--level", "warning")
    assert logged == "Alert of rank 0: Training begins: on two slots\n"
    assert said["progress"] == 1.0
    assert 0 < said["summary"]["system"]["memory_percent"]["last"] <= 100
    files = Path(newest["storage"]).glob(f"tensorboard/*/trial_{trial['id']}/**/notes")
    assert sorted(file.read_text() for file in files) == ["rank 0", "rank 1"]
