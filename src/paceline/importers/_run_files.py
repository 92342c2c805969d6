"""Files of imported runs: contents below `<run directory>/files`, with digests."""

import hashlib
import mimetypes
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from paceline._base.files import (
    open_regular_below,
    opened_directory,
    replacing_atomically,
    write_atomically,
)
from paceline._base.journal_records import MediaFile
from paceline._base.run_directory import check_file_path

_CHUNK_BYTES = 1024 * 1024
_UNFIT = re.compile(r"[^A-Za-z0-9._/-]+")
_KINDS = ("image", "audio", "video")


def kind_of(media_type: str) -> str:
    """Return the kind of media for a MIME type: "image", "audio", "video", "html" or "file"."""
    if media_type == "text/html":
        return "html"
    first = media_type.partition("/")[0]
    return first if first in _KINDS and media_type != "image/svg+xml" else "file"


def files_below(root: Path) -> Iterator[str]:
    """Yield the relative POSIX paths of the regular files below a directory, without links."""
    for folder, folders, names in os.walk(root, followlinks=False):
        folders[:] = sorted(name for name in folders if not os.path.islink(Path(folder, name)))
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(root).as_posix()


def links_below(root: Path) -> Iterator[str]:
    """Yield the relative POSIX paths of links below a directory: they are not followed."""
    for folder, folders, names in os.walk(root, followlinks=False):
        for name in sorted([*folders, *names]):
            if os.path.islink(Path(folder, name)):
                yield Path(folder, name).relative_to(root).as_posix()


class RunFiles:
    """Takes up the files of one run.

    Args:
        root: The `files` directory of the run; None only computes digests, and writes nothing.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self.num_files = 0

    def beside(self, name: str) -> "RunFiles":
        """Return one for another directory of the same run."""
        return RunFiles(None if self._root is None else self._root.parent / name)

    def add_media(
        self, name: str, steps_completed: int, data: bytes, suffix: str, **facts: Any
    ) -> MediaFile:
        """Store the content of media under its own name, and return the record of the file.

        Args:
            name: The name of the media.
            steps_completed: The step.
            data: The content.
            suffix: The ending of the file's name, with its dot.
            facts: Numbers and texts that describe it; `caption` and `index` have places of
                their own.
        """
        caption, index = facts.pop("caption", None), facts.pop("index", 0)
        digest = hashlib.sha256(data).hexdigest()
        folder = "/".join(part for part in _UNFIT.sub("-", name).split("/") if part.strip("."))
        path = f"media/{folder[:200]}/{steps_completed}-{index}-{digest[:12]}{suffix}"
        if self._root is not None and not (self._root / path).exists():
            (self._root / path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self._root / path, data)
        return self._taken(path, digest, len(data), caption, facts)

    def copy(self, store: Path, source: str, path: str, caption: str | None = None) -> MediaFile:
        """Copy a file of a store, and return its record.

        Args:
            store: The directory below which no link is followed.
            source: The path of the file in it.
            path: The path below the run's files.
            caption: A text for people.

        Raises:
            ValueError: One of the paths leads outside.
            OSError: The file cannot be read, or is no regular file.
        """
        digest, size = hashlib.sha256(), 0
        with ExitStack() as stack:
            directory = stack.enter_context(opened_directory(store))
            file = stack.enter_context(open_regular_below(directory, check_file_path(source)))
            written: IO[bytes] | None = None
            if self._root is not None:
                place = self._root / check_file_path(path)
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                # The block that is entered last ends first: the file is closed when it is renamed.
                part = stack.enter_context(replacing_atomically(place, mode=0o600))
                written = stack.enter_context(open(part, "wb"))
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                if written is not None:
                    written.write(chunk)
        return self._taken(check_file_path(path), digest.hexdigest(), size, caption, {})

    def _taken(
        self, path: str, digest: str, size: int, caption: str | None, facts: dict[str, Any]
    ) -> MediaFile:
        self.num_files += 1
        media_type = mimetypes.guess_type(path)[0] or "application/octet-stream"
        return MediaFile(
            path=path, digest=digest, size=size, media_type=media_type, caption=caption, facts=facts
        )
