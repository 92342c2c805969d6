"""Progress in a real notebook."""

import re
import sys
from typing import Any

import pytest

CELL = """
from paceline._base.progress_display import TrainingProgress

progress = TrainingProgress(3, "epochs")
progress.start(0)
for batch in range(1, 31):
    progress.update(batch / 10, batch * 32, {"loss": 1 / batch})
    progress.report({"validation_loss": 2.0}, "validation")
    if batch == 10:
        print("a printed line")
"""
END = """
progress.update(3.0, 960)
progress.end("completed", "run here")
print("afterwards")
"""


@pytest.mark.slow
def test_a_cell_has_one_line_of_progress_that_is_replaced_and_a_further_one_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "NOT TESTED: notebooks need nbclient and ipykernel"
    pytest.importorskip("ipykernel", reason=reason)
    nbclient: Any = pytest.importorskip("nbclient", reason=reason)
    nbformat: Any = pytest.importorskip("nbformat", reason=reason)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PACELINE_PROGRESS", raising=False)
    kernel = {"name": "python3", "display_name": sys.executable, "language": "python"}
    notebook = nbformat.v4.new_notebook(
        cells=[*map(nbformat.v4.new_code_cell, (CELL, END))], metadata={"kernelspec": kernel}
    )
    nbclient.NotebookClient(notebook, timeout=200, iopub_timeout=200).execute()
    shown, printed = notebook.cells[0].outputs
    assert shown["data"]["text/plain"].startswith("epoch ")
    assert printed["text"] == "a printed line\n"
    shown, printed = notebook.cells[1].outputs
    last, run = shown["data"]["text/plain"].splitlines()
    assert last.startswith("epoch 3 of 3  [####################]  100%")
    assert "loss=0.03333  validation_loss=2" in last
    assert run == "run here"
    # The curve has the loss, over the epochs.
    [points] = re.findall(r'<polyline points="([^"]+)"', shown["data"]["text/html"])
    heights = [float(point.partition(",")[2]) for point in points.split()]
    assert len(heights) > 5
    assert heights == sorted(heights)
    assert printed["text"] == "afterwards\n"
