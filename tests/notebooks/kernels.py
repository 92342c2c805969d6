"""Notebooks that run in a kernel of their own."""

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbclient import NotebookClient
    from nbformat import NotebookNode

# Each process of the suite collects the tests, so functions load what takes more than a second.

TIMEOUT_S = 200


def notebook_client(notebook: "NotebookNode", directory: Path, **options: Any) -> "NotebookClient":
    """Return what runs the cells of a notebook in a directory."""
    from nbclient import NotebookClient
    from traitlets.config import Config

    # By files, as another process may take a port before the kernel does. Their paths are short.
    sockets = tempfile.mkdtemp()
    client = NotebookClient(
        notebook,
        config=Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"}),
        timeout=TIMEOUT_S,
        iopub_timeout=TIMEOUT_S,
        # A line comes in pieces if the kernel sends what it has in the middle of it.
        coalesce_streams=True,
        kernel_name="python3",
        resources={"metadata": {"path": str(directory)}},
        **options,
    )
    weakref.finalize(client, shutil.rmtree, sockets, ignore_errors=True)
    return client


def read_notebook(path: Path) -> "NotebookNode":
    """Return the notebook of a file."""
    import nbformat

    return nbformat.read(path, as_version=4)


def code_notebook(*sources: str) -> "NotebookNode":
    """Return a notebook with a cell of code per source."""
    from nbformat.v4 import new_code_cell, new_notebook

    return new_notebook(cells=[new_code_cell(source) for source in sources])
