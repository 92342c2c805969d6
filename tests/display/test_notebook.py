"""Progress in a real notebook."""

import sys
from typing import Any

import pytest

CELL = """
from paceline.display import TrainingProgress

progress = TrainingProgress(3, "epochs")
progress.start(0)
for batch in range(1, 31):
    progress.update(batch / 10, batch * 32, {"loss": 1 / batch})
    if batch == 10:
        print("a printed line")
progress.close()
"""


@pytest.mark.slow
def test_a_cell_has_one_line_of_progress_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "NOT TESTED: notebooks need nbclient and ipykernel"
    pytest.importorskip("ipykernel", reason=reason)
    nbclient: Any = pytest.importorskip("nbclient", reason=reason)
    nbformat: Any = pytest.importorskip("nbformat", reason=reason)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PACELINE_PROGRESS", raising=False)
    kernel = {"name": "python3", "display_name": sys.executable, "language": "python"}
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(CELL)], metadata={"kernelspec": kernel}
    )
    nbclient.NotebookClient(notebook, timeout=60, iopub_timeout=60).execute()
    shown, printed = notebook.cells[0].outputs
    assert shown["data"]["text/plain"].startswith("[####################]  3/3 epochs")
    assert "loss=0.03333" in shown["data"]["text/plain"]
    assert printed["text"] == "a printed line\n"
