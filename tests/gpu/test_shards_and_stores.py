"""Sharded models, system metrics and object stores where the tensors are on a GPU."""

import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import core, pytorch
from paceline.journal import RunDirectory

# `REHEARSE_ON_CPU=1` runs them without one, as far as they can.
IS_REHEARSAL = "REHEARSE_ON_CPU" in os.environ
NEEDS_GPU = pytest.mark.skipif(
    not (torch.cuda.is_available() or IS_REHEARSAL),
    reason="NOT RUN: needs a GPU, as tests/pytorch and tests/system show the rest",
)
NEEDS_TWO = pytest.mark.skipif(
    torch.cuda.device_count() < 2 and not IS_REHEARSAL, reason="NOT RUN: needs two GPUs"
)

SHARDED = """
import sys
import torch
from torch import nn
from paceline import pytorch


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
        self.model = context.wrap_model(nn.Sequential(*layers, nn.Linear(64, 2)))
        adam = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.optimizer = context.wrap_optimizer(adam)

    def loss_of(self, batch):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss_of(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"loss": self.loss_of(batch)}

    def build_training_data_loader(self):
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
        return pytorch.DataLoader(data, batch_size=16)

    build_validation_data_loader = build_training_data_loader


def main(data_parallel, precision):
    hparams = {"global_batch_size": 32}
    with pytorch.init(
        hparams, seed=1, precision=precision, data_parallel=data_parallel
    ) as context:
        result = pytorch.Trainer(Trial(context), context).fit(
            max_length=pytorch.Batch(24), checkpoint_period=pytorch.Batch(12)
        )
    return result.metrics["loss"]


if __name__ == "__main__":
    losses = pytorch.launch(main, 2, args=sys.argv[1:])
    print(losses[0])
"""


@NEEDS_TWO
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sharded_model_trains_as_a_whole_one(
    precision: str, run_script: Callable[..., str]
) -> None:
    losses = []
    for data_parallel in ("flat", "fsdp"):
        code = SHARDED.replace("sys.argv[1:]", repr([data_parallel, precision]))
        losses.append(float(run_script(code)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4 if precision == "fp32" else 2e-2)


@NEEDS_GPU
def test_system_metrics_tell_of_the_gpu(trial_class: Any, fit: Callable[..., Any]) -> None:

    class Trial(trial_class):  # type: ignore[misc]
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.core.profiler.on(sampling_interval=0.1, samples_per_report=2)

    result = fit(Trial, 200, reporting_period=pytorch.Batch(20))
    rows = list(core.read_metrics(RunDirectory(result.run_dir), "system"))
    assert rows
    names = rows[-1].metrics.keys()
    assert "cpu_percent" in names
    if not IS_REHEARSAL:
        assert {"gpu_0_percent", "gpu_0_memory_used_bytes", "gpu_0_power_w"} <= names
        assert rows[-1].metrics["gpu_0_memory_used_bytes"] > 0


S3_SERVER = """
import sys
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of an empty place in a bucket of a local S3 server."""
    for module in ("obstore", "moto", "flask"):
        pytest.importorskip(module, reason=f"NOT RUN: needs {module}")
    process = subprocess.Popen(
        [sys.executable, "-c", S3_SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    url = f"http://127.0.0.1:{int(process.stdout.readline())}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/checkpoints", method="PUT")).close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield "s3://checkpoints/gpu"
    process.communicate()


@NEEDS_GPU
def test_a_training_goes_on_from_a_bucket(
    bucket: str, trial_class: Any, device: torch.device, tmp_path: Path
) -> None:
    """In the same bits as one that was not interrupted."""
    weights = []
    for lengths in ((20,), (10, 20)):
        run_dir = None
        for length in lengths:
            with pytorch.init(
                {"global_batch_size": 64}, seed=1, checkpoint_storage=bucket, resume=run_dir
            ) as context:
                trial = trial_class(context)
                pytorch.Trainer(trial, context).fit(
                    max_length=pytorch.Batch(length), validation_period=pytorch.Batch(10)
                )
                run_dir = context.core.run_dir
        assert trial.model[0].weight.device.type == device.type
        weights.append([value.detach().cpu() for value in trial.model.state_dict().values()])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
