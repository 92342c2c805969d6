"""Base of the threads that follow what scripts write into a directory."""

import logging
import threading
from abc import ABC, abstractmethod
from pathlib import Path

from paceline._cluster.master.experiments.unmanaged_runs import Unmanaged
from paceline._cluster.master.store.database import Database
from paceline._cluster.master.store.run_files import FileContents

logger = logging.getLogger(__name__)

_SCAN_S = 1.0


class DirectoryWatcher(ABC):
    """Thread that looks at a directory about once a second.

    Args:
        directory: The directory; it may be made later.
        database: The database for the records.
        unmanaged: The ingest of unmanaged runs.
        contents: The place for the contents of files.
    """

    def __init__(
        self, directory: Path, database: Database, unmanaged: Unmanaged, contents: FileContents
    ) -> None:
        self._directory = directory
        self._database = database
        self._unmanaged = unmanaged
        self._contents = contents
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Stop following; all records read so far are stored."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    @abstractmethod
    def scan(self) -> None:
        """Look at everything once; returns early when `_stopping` is set."""

    def has_more(self) -> bool:
        """Return whether the last scan left something to read."""
        return False

    def _run(self) -> None:
        while True:
            try:
                self.scan()
            except Exception:
                # The next scan may succeed, so the thread stays.
                logger.exception("What is in %s could not be read.", self._directory)
            if self._stopping.wait(0.0 if self.has_more() else _SCAN_S):
                return
