"""Training in the cells of a notebook, run by a real kernel."""

import asyncio
import contextlib
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kernels import TIMEOUT_S, code_notebook, notebook_client, read_notebook

from paceline import core
from paceline.journal import RunDirectory

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pytorch_trainer"

IMPORTS = """
import torch
from paceline import pytorch
"""

# Trains until it is told to stop, and says after which batch it has begun to.
TRIAL = """
class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=1e-3))

    def train_batch(self, batch, epoch_idx, batch_idx):
        open("started", "w").close()
        loss = self.model(batch).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"validation_loss": self.model(batch).square().mean()}

    def build_training_data_loader(self):
        return pytorch.DataLoader(torch.ones(64, 1), batch_size=2)

    build_validation_data_loader = build_training_data_loader
"""

TRAIN = """
with pytorch.init({"global_batch_size": 2}, seed=1, name="cell") as context:
    trainer = pytorch.Trainer(Trial(context), context)
    result = trainer.fit(max_length=pytorch.Batch(10**9))
"""

SHOW = "print(result.stop_reason, result.checkpoints == [context.core.latest_checkpoint])"


class Notebook:
    """A notebook whose cells are run one by one in a directory, in a kernel of its own."""

    def __init__(self, notebook: Any, directory: Path) -> None:
        self.cells = notebook.cells
        self._client = notebook_client(notebook, directory)

    @contextlib.asynccontextmanager
    async def kernel(self, environment: dict[str, str]) -> AsyncIterator[None]:
        """Start a kernel for a block, and end it afterwards."""
        async with self._client.async_setup_kernel(env=environment):
            yield

    async def run(self, index: int) -> str:
        """Run a cell and return what it printed and showed, as text."""
        cell = await self._client.async_execute_cell(self.cells[index], index)
        parts = (
            output.text if output.output_type == "stream" else output.data["text/plain"]
            for output in cell.outputs
        )
        return "\n".join(parts)

    async def interrupt(self) -> None:
        """Press the button that interrupts the kernel."""
        await self._client.km.interrupt_kernel()


@pytest.fixture
def environment(tmp_path: Path, clean_environment: dict[str, str]) -> dict[str, str]:
    """Return an environment with one thread per process, and no Fashion-MNIST."""
    own = {"OMP_NUM_THREADS": "1", "FASHION_MNIST": str(tmp_path / "nowhere")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{clean_environment['PATH']}"
    return {**clean_environment, **own, "PATH": path}


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S)
def test_the_example_trains_shows_its_history_and_starts_two_workers(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    directory = tmp_path / "example"
    shutil.copytree(EXAMPLE, directory, ignore=shutil.ignore_patterns("paceline_runs", "__py*"))
    written = read_notebook(directory / "notebook.ipynb")
    for cell in written.cells:
        cell.source = cell.source.replace("BATCHES = 1000", "BATCHES = 300")
    notebook = Notebook(written, directory)

    async def run_all() -> list[str]:
        async with notebook.kernel({**environment, "CI": ""}):
            numbers = [i for i, cell in enumerate(written.cells) if cell.cell_type == "code"]
            return [await notebook.run(number) for number in numbers]

    _, trained, history, answers, launched = asyncio.run(run_all())
    assert re.search(r"batch 300 of 300  .*100%  .*completed in .*\nrun paceline_runs/", trained)
    assert "reached max_length" in trained
    assert re.findall(r"^(\d+) +0\.9\d+", history, re.MULTILINE) == ["250", "300"]
    answered, expected = re.findall(r"\[(\d.*?)\]", answers)
    assert answered.split(",")[:3] == expected.split(",")[:3]
    assert "reached max_length: 300 batches" in launched
    assert "'accuracy': 0.9" in launched
    names = sorted(summary.name for summary in core.list_runs(directory / "paceline_runs"))
    assert len(names) == 2
    assert names[0] == "notebook"


@pytest.mark.timeout(TIMEOUT_S)
def test_what_a_cell_prints_is_whole_beside_the_output_of_a_run(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """A kernel sends what was printed every now and then, also in the middle of a line."""
    source = """
from paceline import train

def function():
    print("within", end=" ", flush=True)
    print("the function")
    train.report(loss=0.5)

callbacks = [train.PrintCallback(), train.ProgressCallback(1)]
train.Trainer(num_workers=0).run(function, callbacks=callbacks)
print("after", end=" ", flush=True)
print("the run")
"""
    notebook = Notebook(code_notebook(source), tmp_path)

    async def run() -> str:
        async with notebook.kernel({**environment, "CI": ""}):
            return await notebook.run(0)

    text = asyncio.run(run())
    assert "within the function\nreport 1: loss=0.5\nafter the run\n" in text
    assert "report 1 of 1" in text


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_interrupting_the_kernel_stores_a_checkpoint_and_ends_the_cell(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    notebook = Notebook(code_notebook(IMPORTS + TRIAL, TRAIN, SHOW), tmp_path)

    async def interrupt_the_second_cell() -> str:
        async with notebook.kernel(environment):
            await notebook.run(0)
            training = asyncio.create_task(notebook.run(1))
            while not (tmp_path / "started").exists():
                assert not training.done(), await training
                await asyncio.sleep(0.05)
            await notebook.interrupt()
            await training
            return await notebook.run(2)

    assert asyncio.run(interrupt_the_second_cell()).strip() == "interrupted True"
    [summary] = core.list_runs(tmp_path / "paceline_runs")
    assert len(core.read_checkpoints(RunDirectory(summary.path))) == 1
    assert summary.state is core.RunState.PREEMPTED
