"""Notebooks that run in a kernel of their own."""

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

TIMEOUT_S = 200


def notebook_client(
    notebook: nbformat.NotebookNode, directory: Path, **options: Any
) -> NotebookClient:
    """Return what runs the cells of a notebook in a directory."""
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
