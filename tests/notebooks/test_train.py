"""Train functions that are defined in the cells of a notebook, run by a real kernel."""

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from kernels import TIMEOUT_S, code_notebook, notebook_client, read_notebook

from paceline import core

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_function"
TRAIN = "trainer.run(train_digits"


def text_of(cell: Any) -> str:
    """Return what a cell printed and showed."""
    return "\n".join(
        output.text if output.output_type == "stream" else output.data["text/plain"]
        for output in cell.outputs
    )


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S)
def test_r5_a_function_is_developed_trained_and_validated_in_a_notebook(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    """Its cells run on workers that stay warm, and the model that comes back is evaluated there."""
    directory = tmp_path / "example"
    shutil.copytree(EXAMPLE, directory, ignore=shutil.ignore_patterns("paceline_runs", "__py*"))
    notebook = read_notebook(directory / "notebook.ipynb")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (training,) = (cell for cell in cells if TRAIN in cell.source)
    pids = "print('pids', trainer.execute(__import__('os').getpid))"
    training.source += f"\n{pids}"
    source = training.source.replace('"epochs": 5', '"epochs": 1').replace("0.1", "0.2")
    (again,) = code_notebook(source).cells
    notebook.cells.insert(notebook.cells.index(training) + 1, again)
    # The model of the first run is evaluated.
    again.source = again.source.replace("results =", "others =")
    client = notebook_client(notebook, directory)

    async def run_all() -> None:
        async with client.async_setup_kernel(env={**clean_environment, "OMP_NUM_THREADS": "1"}):
            for index, cell in enumerate(notebook.cells):
                await client.async_execute_cell(cell, index)

    asyncio.run(run_all())
    first, second = text_of(training), text_of(again)
    assert re.findall(r"report (\d): epoch=\d  accuracy=0\.\d+", first) == list("12345")
    assert re.findall(r"report (\d): epoch=\d  accuracy=0\.\d+", second) == ["1"]
    assert re.findall(r"pids .*", first) == re.findall(r"pids .*", second)
    shown = text_of(next(cell for cell in cells if cell.source.endswith("trainer")))
    assert "2 worker(s), running on 1 node(s)" in shown
    (trained,) = re.findall(r"([\d.]+)% of the test images", "".join(map(text_of, cells)))
    assert float(trained) > 90
    (alone,) = re.findall(r"([\d.]+)% after one epoch", "".join(map(text_of, cells)))
    assert float(alone) > 30
    runs = core.list_runs(directory / "paceline_runs")
    assert [run.state for run in runs] == [core.RunState.COMPLETED] * 2


RERUN = """
import threading
import time
from paceline import train

def fit(config):
    for epoch in range(3):
        train.report(epoch=epoch, loss=0.5 ** epoch)
        if config["fails"]:
            raise ValueError("in the middle")
    train.save_checkpoint(epoch=epoch)

trainer = train.Trainer(num_workers=0)
fails = globals().setdefault("runs", []) == [1]
runs.append(1)
progress = train.ProgressCallback(3, unit="epochs")
results = trainer.run(fit, {"fails": fails}, [progress, "tensorboard"])
def left():
    return [t.name for t in threading.enumerate() if t.name.startswith("paceline")]

# The one for signs of life looks once a second whether there is another run.
end = time.monotonic() + 30
while left() and time.monotonic() < end:
    time.sleep(0.1)
print("threads", left())
results
"""


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_a_cell_that_is_run_again_shows_one_line_of_progress_and_leaves_no_thread(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    """It runs to its end, fails in the middle, and runs to its end again."""
    notebook = code_notebook(RERUN)
    (cell,) = notebook.cells
    client = notebook_client(notebook, tmp_path, allow_errors=True)
    shown: list[list[Any]] = []

    async def run_three_times() -> None:
        async with client.async_setup_kernel(env={**clean_environment, "CI": ""}):
            for _ in range(3):
                await client.async_execute_cell(cell, 0)
                shown.append(cell.outputs)

    asyncio.run(run_three_times())
    for outputs, ending in zip(
        shown, ("completed", "failed (ValueError)", "completed"), strict=True
    ):
        displays = [o.data["text/plain"] for o in outputs if o.output_type == "display_data"]
        begin, progress = displays
        assert re.fullmatch(r"notebook(-\d)?  run paceline_runs/\S+", begin)
        assert ending in progress
        if ending == "completed":
            assert "threads []" in "".join(o.text for o in outputs if o.output_type == "stream")
            (result,) = (o.data for o in outputs if o.output_type == "execute_result")
            assert "3 report(s) of rank 0" in result["text/html"]
