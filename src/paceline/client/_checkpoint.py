"""A checkpoint of the master, as clients see and download it."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from paceline.client import _late_models as models
from paceline.client._http_session import DownloadError, HttpSession

if TYPE_CHECKING:
    from paceline._cluster.messages.states import CheckpointState


DownloadMode = Literal["auto", "direct", "master"]


def check_new_directory(path: Path) -> None:
    """Refuse a target of a download that holds files already.

    Raises:
        DownloadError: It does.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DownloadError(
            f"`path` must be a new or empty directory, but {str(path)!r} is not."
            " Hint: choose another one."
        )


@contextmanager
def filled_directory(target: Path) -> Iterator[Path]:
    """Give a directory to fill, and make it a new or empty target at the end; raises like above."""
    check_new_directory(target)
    # Filled beside the target and renamed, so that an interrupted copy is never taken for one.
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if target.exists():
            target.rmdir()
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class Checkpoint:
    """Committed checkpoint; `data` is the master's last known state of the checkpoint."""

    def __init__(self, session: HttpSession, data: "models.Checkpoint") -> None:
        self._session = session
        self.data = data

    def __repr__(self) -> str:
        return f"Checkpoint(uuid={self.uuid!r}, trial_id={self.trial_id})"

    @property
    def uuid(self) -> str:
        """The checkpoint's name."""
        return self.data.uuid

    @property
    def trial_id(self) -> int:
        """Trial owning the checkpoint."""
        return self.data.trial_id

    @property
    def experiment_id(self) -> int:
        """Experiment of the checkpoint's trial."""
        return self.data.experiment_id

    @property
    def steps_completed(self) -> int:
        """Number of batches trained by the trial before this checkpoint."""
        return self.data.steps_completed

    @property
    def state(self) -> "CheckpointState":
        """Whether its files are still there, as last read."""
        return self.data.state

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata given by the training script to `store_path` or `upload`."""
        return self.data.metadata

    @property
    def metric(self) -> float | None:
        """The searched metric at this checkpoint's step; None if none was reported there."""
        from paceline._base.journal_records import decode_value

        value = decode_value(self.data.metric)
        return None if value is None else float(value)

    def reload(self) -> "Checkpoint":
        """Read the checkpoint's data again and return the checkpoint."""

        self.data = self._session.get(f"checkpoints/{self.uuid}", models.Checkpoint)
        return self

    def delete(self, globs: Sequence[str] | None = None) -> None:
        """Delete the checkpoint's files, or some of them; the record of the checkpoint stays.

        Args:
            globs: Patterns of the files to delete, as in a ``.gitignore``; all by default. A
                checkpoint that has lost files is PARTIALLY_DELETED, and no trial resumes from it
                by itself.

        Raises:
            ApiError: The master refuses, for instance because a trial needs the checkpoint.
            TypeError: `globs` is no list of patterns.
        """
        if isinstance(globs, str):
            raise TypeError(f"`globs` must be a list of patterns, but got {globs!r}.")
        params = None if globs is None else {"glob": list(globs)}
        self._session.send("DELETE", f"checkpoints/{self.uuid}", params=params)

    def download(self, path: str | Path | None = None, *, mode: DownloadMode = "auto") -> Path:
        """Copy the checkpoint's files into a new or empty directory and return the directory.

        Args:
            path: The directory; `checkpoints/<uuid>` by default.
            mode: "direct" reads the storage, "master" asks the master for the files, and "auto"
                reads the storage if it can be reached from here.

        Raises:
            DownloadError: The directory holds files already, or a file is missing or incomplete.
            ApiError: The master refused.
        """
        if mode not in ("auto", "direct", "master"):
            raise ValueError(f"`mode` must be auto, direct or master, but got {mode!r}.")
        target = Path(path) if path is not None else Path("checkpoints") / self.uuid
        with filled_directory(target) as partial:
            self._fill(partial, mode)
        return target

    def _fill(self, target: Path, mode: DownloadMode) -> None:
        if mode == "direct" or (mode == "auto" and self._is_near()):
            self._copy_from_storage(target)
        else:
            self._fetch_from_master(target)

    def _is_near(self) -> bool:
        root = self.data.storage.removeprefix("file://")
        try:
            with (Path(root) / self.uuid / "manifest.json").open("rb"):
                return True
        except OSError:  # Of another Unix user, too: the home of a shared master is closed to us.
            return False

    def _copy_from_storage(self, target: Path) -> None:
        from paceline.storage._checkpoint_errors import CheckpointError
        from paceline.storage._storage_from_url import storage_from

        try:
            storage_from(self.data.storage).download(self.uuid, target)
        except (CheckpointError, OSError) as error:
            raise DownloadError(
                f"Checkpoint {self.uuid} must be whole in {self.data.storage!r}: {error}"
                " Hint: try `mode='master'` if the storage is on another machine."
            ) from error

    def _fetch_from_master(self, target: Path) -> None:
        for name, size in sorted(self.data.resources.items()):
            relative = PurePosixPath(name)
            # The names come from the master: none may lead outside of `target`.
            if relative.is_absolute() or ".." in relative.parts:
                raise DownloadError(
                    f"File names of a checkpoint must stay inside it, but got {name!r}."
                )
            path = target / relative
            if name.endswith("/"):
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            received = self._fetch_file(name, path)
            if received != size:
                raise DownloadError(
                    f"File {name!r} of checkpoint {self.uuid} must have {size} bytes, but the"
                    f" master sent {received}. Hint: the file was changed or cut off in"
                    f" {self.data.storage!r}."
                )

    def _fetch_file(self, name: str, path: Path) -> int:

        return self._session.stream_to_file(f"checkpoints/{self.uuid}/files/{quote(name)}", path)
