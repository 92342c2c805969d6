"""Checkpoints of an experiment, and of runs without a master, in object stores."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.storage import storage_from
from paceline.testing._compare_runs import compare_runs, read_run_facts

COUNTING = """
import os, signal
import paceline as det

info = det.get_cluster_info()
with det.core.init() as context:
    step = 0
    if info.latest_checkpoint is not None:
        with context.checkpoint.restore_path(info.latest_checkpoint) as path:
            step = int((path / "step").read_text())
        print("restored", step, flush=True)
    while step < 6:
        step += 1
        context.train.report_validation_metrics(step, {"loss": 1.0 / step})
        with context.checkpoint.store_path({"steps_completed": step}) as (path, uuid):
            (path / "step").write_text(str(step))
        if step == 3 and info.latest_checkpoint is None:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "server", ["s3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("google", "azure"))]
)
def test_an_experiment_keeps_its_checkpoints_in_a_bucket(
    server: str,
    request: pytest.FixtureRequest,
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    url = request.getfixturevalue(server)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    in_s3 = {"type": "s3", "bucket": bucket, "prefix": prefix}
    code = write_context(COUNTING)
    config = {
        "entrypoint": "python3 train.py", "max_restarts": 1,
        "checkpoint_storage": in_s3 if server == "s3" else url,
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 6}},
    }  # fmt: skip
    master = make_master(1)
    client = master.start().client()
    experiment = client.create_experiment(config, code)
    assert experiment.wait().value == "COMPLETED"
    [trial] = experiment.trials()
    assert "restored 3" in "\n".join(line.text for line in trial.iter_logs())

    def stored() -> list[Any]:
        return [c for c in trial.checkpoints() if c.data.state.value == "COMPLETED"]

    wait_until(lambda: len(stored()) == 1)
    [kept] = stored()
    storage = storage_from(url)
    wait_until(lambda: storage.list() == [kept.uuid])
    assert kept.data.storage == url
    kept.download(tmp_path / "direct", mode="direct")
    assert (tmp_path / "direct" / "step").read_text() == "6"
    # Who has no credentials gets the files from the master.
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    kept.download(tmp_path / "copy")
    assert (tmp_path / "copy" / "step").read_text() == "6"
    command = [
        sys.executable,
        "-m",
        "paceline.cli",
        "checkpoint",
        "download",
        kept.uuid,
        "-o",
        "cli",
    ]
    environment = os.environ | {"PACELINE_HOME": str(master.home)}
    subprocess.run(command, env=environment, cwd=tmp_path, check=True)
    assert (tmp_path / "cli" / "step").read_text() == "6"
    kept.delete()
    assert storage.list() == []


@pytest.mark.long
def test_a_bucket_that_hangs_holds_up_nothing_else_and_is_swept_later(
    s3: str,
    s3_server: str,
    faulty: Any,
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
) -> None:
    """The server hangs for the master alone, which deletes when the first experiment has ended."""
    faulty.hang("delete")
    master = make_master(1)
    client = master.start().client()
    code = write_context(COUNTING)
    searcher = {"name": "single", "metric": "loss", "max_length": {"batches": 6}}
    config = {"entrypoint": "python3 train.py", "max_restarts": 1, "searcher": searcher}
    in_s3 = {
        "checkpoint_storage": s3,
        "environment": {"environment_variables": {"AWS_ENDPOINT_URL": s3_server}},
    }
    first = client.create_experiment(config | in_s3, code)
    assert first.wait().value == "COMPLETED"
    wait_until(lambda: faulty.num_faults)
    second = client.create_experiment(config, code)
    wait_until(lambda: second.reload().state.value == "COMPLETED", 120)
    [trial] = first.trials()
    assert {each.data.state.value for each in trial.checkpoints()} == {"COMPLETED"}
    master.kill()
    faulty.pass_on()
    [trial] = master.start().client().get_experiment(first.id).trials()

    def kept() -> list[str]:
        stored = trial.checkpoints()
        return [each.uuid for each in stored if each.data.state.value == "COMPLETED"]

    wait_until(lambda: len(kept()) == 1)
    assert storage_from(s3).list() == kept()


TRAINING = """
import os
import signal
import sys
import time
from pathlib import Path
import torch
from torch import nn
from paceline import core, pytorch


def wait_for_checkpoint():
    # It is stored in the background; without it the next attempt begins anew.
    end = time.monotonic() + 120
    while core.list_runs(Path("paceline_runs"))[0].latest_checkpoint is None:
        assert time.monotonic() < end, "no checkpoint was stored"
        time.sleep(0.05)


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1))
        self.model = context.wrap_model(model)
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters()))

    def train_batch(self, batch, epoch_idx, batch_idx):
        if batch_idx == 7 and sys.argv[2] == "killed" and not os.path.exists("killed"):
            wait_for_checkpoint()
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = self.model(batch).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def build_training_data_loader(self):
        data = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
        return pytorch.DataLoader(data, batch_size=2, shuffle=True)

    build_validation_data_loader = build_training_data_loader

    def evaluate_batch(self, batch, batch_idx):
        return {"loss": self.model(batch).mean()}


hparams = {"global_batch_size": 4}
options = {"checkpoint_storage": sys.argv[1], "data_parallel": sys.argv[3]}
with pytorch.init(hparams, seed=1, resume="auto", **options) as context:
    trainer = pytorch.Trainer(Trial(context), context)
    trainer.fit(
        max_length=pytorch.Batch(10),
        checkpoint_period=pytorch.Batch(5),
        checkpoint_policy="all",
    )
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_ranks", "data_parallel"),
    [
        pytest.param(1, "flat", marks=pytest.mark.slow),
        (2, "flat"),
        pytest.param(3, "flat", marks=pytest.mark.slow),
        pytest.param(2, "fsdp", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_from_a_bucket_in_the_same_bits(
    s3: str, tmp_path: Path, num_ranks: int, data_parallel: str
) -> None:
    (tmp_path / "train.py").write_text(TRAINING)

    def train(directory: str, *codes: int) -> Any:
        (tmp_path / directory).mkdir()
        for code in codes:
            command = [sys.executable, "-m", "paceline.launch.torch_distributed"]
            command += [f"--nproc-per-node={num_ranks}", str(tmp_path / "train.py")]
            command += [f"{s3}/{directory}", directory, data_parallel]
            done = subprocess.run(command, cwd=tmp_path / directory)
            assert done.returncode == code
        [run] = (tmp_path / directory / "paceline_runs").iterdir()
        facts = read_run_facts(run)
        assert facts.final_checkpoint is not None
        assert facts.final_checkpoint.storage == f"{s3}/{directory}"
        assert facts.final_checkpoint.metadata["steps_completed"] == 10
        return facts

    straight, killed = train("straight", 0), train("killed", 137, 0)
    # Had it begun anew, it would end in the same bits whatever its checkpoint lacks.
    assert [attempt.start_step for attempt in killed.attempts] == [0, 5]
    assert compare_runs(straight, killed) == []
