"""Ray Train as its guide shows it: a function that reports checkpoints, and unlimited failures."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch

sys.path.insert(0, str(Path(__file__).parent))
import work


def train_function(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    rank = context.get_world_rank()
    log = work.StepLog(rank, Path(config["directory"]))
    torch.manual_seed(1)
    model = ray.train.torch.prepare_model(work.Transformer())
    optimizer = work.optimizer_of(model)
    first_step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory) / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"] + 1
    text = work.Text()
    for step in range(first_step, work.NUM_STEPS):
        loss = work.loss_of(model, work.batch_of(text, step, rank))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        log(step, loss.detach())
        if (step + 1) % work.CHECKPOINT_PERIOD == 0:
            save(rank, step, loss.item(), model, optimizer)


def save(
    rank: int, step: int, loss: float, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Report a loss, with a checkpoint of rank 0."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, Path(directory) / "state.pt")
            checkpoint = ray.train.Checkpoint.from_directory(directory)
        ray.train.report({"loss": loss}, checkpoint=checkpoint)


if __name__ == "__main__":
    environment = {name: value for name, value in os.environ.items() if name.startswith("PROOF_")}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    ray.init("local", num_cpus=3, include_dashboard=False, runtime_env={"env_vars": environment})
    result = ray.train.torch.TorchTrainer(
        train_function,
        train_loop_config={"directory": str(work.DIRECTORY)},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="proof",
            storage_path=str(work.DIRECTORY / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    if result.error:
        raise result.error
