"""TensorBoard files of a run: their directory, their writer, and their upload to a storage."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline._base.run_directory import RunInfo
from paceline.core._arguments import TensorboardMode, numbers_of
from paceline.storage._checkpoint_storage import CheckpointStorage

logger = logging.getLogger(__name__)


PathSelector = Callable[[Path], bool]
PathMangler = Callable[[Path, int], Path]


class TensorboardFiles:
    """TensorBoard files of a single rank: directory, writer and uploads.

    The chief has the directory itself, rank 2 has ``rank_2`` in it. A run has ``tensorboard`` in
    its run directory. A trial has ``tensorboard/<cluster>/trial_<id>`` in its storage, as its run
    directory goes with the attempt. If the storage is no directory, the files are uploaded there.

    Args:
        mode: Who writes them.
        info: The run's description.
        run_path: The run directory on this node.
        storage: Where the checkpoints are.
        rank: This rank.
        first_step: Points of earlier attempts from this step on are hidden, None for a first one.
    """

    def __init__(
        self,
        mode: TensorboardMode,
        *,
        info: RunInfo,
        run_path: Path,
        storage: CheckpointStorage,
        rank: int,
        first_step: int | None,
    ) -> None:
        if mode is TensorboardMode.AUTO:
            _check_installed()
        self.mode = mode
        self._rank = rank
        self._first_step = first_step
        self._storage = storage
        self._key = f"tensorboard/run_{info.run_id}"
        place = run_path / "tensorboard"
        if info.trial is not None and info.cluster_id:
            self._key = f"tensorboard/{info.cluster_id}/trial_{info.trial.trial_id}"
            # A directory needs no upload: files are written there at once.
            if storage.local_root is not None:
                place = storage.local_root / self._key
        own = [f"rank_{rank}"] if rank else []
        self.path = place.joinpath(*own)
        self._key = "/".join([self._key, *own])
        self._lock = threading.Lock()
        self._writer: Any = None
        self._uploaded: dict[str, tuple[int, int]] = {}
        self._has_failed = False

    def make_path(self) -> Path | None:
        """Create and return this rank's directory; None in the mode `OFF`."""
        if self.mode is TensorboardMode.OFF:
            return None
        self.path.mkdir(parents=True, exist_ok=True)
        return self.path

    def write(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Write the numbers among metrics as scalars, in the mode `AUTO`."""
        if self.mode is not TensorboardMode.AUTO or self._has_failed:
            return
        try:
            with self._lock:
                writer = self._open()
                for name, value in numbers_of(metrics, f"{group}/"):
                    writer.add_scalar(name, value, steps_completed, walltime=time.time())
        except OSError as error:
            self._give_up(error)

    def upload(
        self, selector: PathSelector | None = None, mangler: PathMangler | None = None
    ) -> None:
        """Upload files changed since the last upload, unless the storage is a directory.

        Raises:
            OSError: The storage does not take it.
            NotImplementedError: The storage keeps checkpoints alone.
        """
        if self._storage.local_root is not None or not self.path.is_dir():
            return
        with self._lock:
            if self._writer is not None:
                self._writer.flush()
            for file in sorted(path for path in self.path.rglob("*") if path.is_file()):
                relative = file.relative_to(self.path)
                if selector is not None and not selector(relative):
                    continue
                name = relative if mangler is None else Path(mangler(relative, self._rank))
                # Taken before the upload: lines written meanwhile count as a change.
                facts = file.stat()
                stamp = facts.st_mtime_ns, facts.st_size
                if self._uploaded.get(name.as_posix()) != stamp:
                    self._storage.put_file(f"{self._key}/{name.as_posix()}", file)
                    self._uploaded[name.as_posix()] = stamp

    def upload_quietly(self) -> None:
        """Upload in the mode `AUTO`; errors are only logged, as training must continue."""
        if self.mode is TensorboardMode.AUTO:
            try:
                self.upload()
            except Exception as error:
                logger.warning("TensorBoard files cannot be uploaded now: %s", error)

    def add_trace(self, name: str, write: Callable[[Path], object]) -> Path:
        """Write a trace beside the other files, in every mode, and upload the trace.

        Args:
            name: The name of the file; if there is one already, a number is added.
            write: Writes the trace to a path.
        """
        stem, _, suffix = name.partition(".")
        path, number = self.path / name, 1
        # Another attempt may have written a trace of the same name.
        while path.exists():
            number += 1
            path = self.path / f"{stem}-{number}.{suffix}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
            self.upload(lambda relative: relative.name == path.name)
        except Exception as error:
            logger.warning("The trace %s cannot be kept: %s", path, error)
        return path

    def close(self) -> None:
        """Close the writer and upload its last files."""
        with self._lock:
            writer, self._writer = self._writer, None
            if writer is not None:
                try:
                    writer.close()
                except OSError as error:
                    self._give_up(error)
        # Outside of the lock, which `upload` takes.
        if writer is not None:
            self.upload_quietly()

    def _open(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.path), purge_step=self._first_step)
        return self._writer

    def _give_up(self, error: OSError) -> None:
        self._has_failed = True
        logger.warning("TensorBoard files in %s end here: %s", self.path, error)


def _check_installed() -> None:
    if find_spec("tensorboard") is None:
        raise ImportError(
            "`TensorboardMode.AUTO` needs TensorBoard, which is not installed. Hint: pip install"
            " 'paceline[tensorboard]'"
        )
