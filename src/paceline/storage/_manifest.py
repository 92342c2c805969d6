"""The two JSON files of the commit protocol: `rank-<n>.done` and `manifest.json`.

Every rank writes its files, then its done file with their sizes and digests. The chief merges the
done files into the manifest, which is written last: without it the checkpoint does not exist.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from paceline._sealed_json import check_seal, seal
from paceline.storage._errors import CheckpointCorruptError, CheckpointVersionError

MANIFEST_VERSION = 1
MANIFEST_NAME = "manifest.json"
MAX_TEXT_BYTES = 16 * 2**20
"""How large a manifest or a done file may be: who may write it could fill a reader's memory."""

# Tells by a file's relative POSIX path whether it is wanted.
Selector: TypeAlias = Callable[[str], bool]


class FileEntry(msgspec.Struct, frozen=True):
    """The size in bytes and the xxh3_128 digest of one file."""

    size: int
    digest: str

    def difference(self, found: "FileEntry") -> str:
        """Say what differs of what was found in place of this file."""
        if found.size != self.size:
            return f"was altered ({found.size} bytes instead of {self.size})"
        return "was altered (other content of the same size)"


class ShardDone(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `rank-<n>.done`: which files a rank has written, by relative path."""

    version: int = MANIFEST_VERSION
    rank: int
    files: dict[str, FileEntry]


class _Version(msgspec.Struct):
    version: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content list of a committed checkpoint.

    `created` is in seconds since the epoch; `files` maps relative POSIX paths to their entries.
    `deleted` names the files that were deleted on purpose, by `delete_files`. `origin` tells which
    attempt of which master has stored the checkpoint; it is empty without one.
    """

    version: int = MANIFEST_VERSION
    uuid: str
    created: float
    metadata: dict[str, Any]
    files: dict[str, FileEntry]
    deleted: list[str] = []
    origin: str = ""

    @property
    def resources(self) -> dict[str, int]:
        """The size in bytes of each file."""
        return {path: entry.size for path, entry in self.files.items()}

    def selected(self, selects: Selector | None) -> "Manifest":
        """Return a manifest of the selected files alone; of all of them for None."""
        if selects is None:
            return self
        files = {path: entry for path, entry in self.files.items() if selects(path)}
        return msgspec.structs.replace(self, files=files)


def origin_of(cluster_id: str, trial_id: int, attempt: int) -> str:
    """Return how the manifest of a checkpoint names the attempt that has stored it."""
    return f"{cluster_id}.{trial_id}.{attempt}"


def glob_selector(globs: Sequence[str]) -> Selector:
    """Return what selects the files that patterns match, as in a ``.gitignore``.

    Raises:
        TypeError: `globs` is no list of patterns.
        ValueError: It is empty, or a pattern is not valid.
    """
    from pathspec import GitIgnoreSpec

    if isinstance(globs, str) or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(
            f"`globs` must be a list of patterns, but got {globs!r}. Hint: globs=['optimizer_*']."
        )
    if not any(globs):
        raise ValueError("`globs` must hold a pattern, but is empty.")
    return GitIgnoreSpec.from_lines(globs).match_file


def done_name(rank: int) -> str:
    """Return the name of a rank's done file."""
    return f"rank-{rank}.done"


def is_reserved(path: str) -> bool:
    """Tell whether a relative path inside a checkpoint belongs to the commit protocol."""
    name, _, suffix = path.partition(".")
    is_done_file = suffix == "done" and name.startswith("rank-") and name[5:].isdecimal()
    return path == MANIFEST_NAME or is_done_file


def check_file_names(names: list[str]) -> list[str]:
    """Return the names of a checkpoint's own files.

    Raises:
        ValueError: One is that of a file of the commit protocol.
    """
    for name in names:
        if is_reserved(name):
            raise ValueError(
                "A checkpoint's own files must not be named like those of the commit protocol,"
                f" but got {name!r}. Hint: rename it."
            )
    return names


def encode_with_checksum(document: Manifest | ShardDone) -> bytes:
    """Return the document as indented JSON with a checksum.

    Raises:
        ValueError: It is too large.
    """
    data = seal(msgspec.json.format(msgspec.json.encode(document), indent=1))
    if len(data) > MAX_TEXT_BYTES:
        raise ValueError(
            f"The metadata and the list of files of a checkpoint must have at most {MAX_TEXT_BYTES}"
            f" bytes, but have {len(data)}, for {len(document.files)} files. Hint: store fewer"
            " files, such as archives."
        )
    return data


def decode_manifest(data: bytes, uuid: str) -> Manifest:
    """Return the manifest after checking its version, its UUID and its paths.

    Raises:
        CheckpointVersionError: It has another format version.
        CheckpointCorruptError: It is damaged, or belongs to another checkpoint.
    """
    _check_version(data, uuid, MANIFEST_NAME)
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _damaged(uuid, MANIFEST_NAME, str(error)) from error
    if manifest.uuid != uuid:
        raise _damaged(uuid, MANIFEST_NAME, f"it names checkpoint {manifest.uuid!r}")
    for path in (*manifest.files, *manifest.deleted):
        if path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise _damaged(uuid, MANIFEST_NAME, f"it names the file {path!r} outside")
    return manifest


def decode_done(data: bytes, uuid: str, rank: int) -> ShardDone:
    """Return the done file's content.

    Raises:
        CheckpointVersionError: It has another format version.
        CheckpointCorruptError: It is damaged.
    """
    _check_version(data, uuid, done_name(rank))
    try:
        return msgspec.json.decode(data, type=ShardDone)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _damaged(uuid, done_name(rank), str(error)) from error


def _check_version(data: bytes, uuid: str, name: str) -> None:
    if len(data) > MAX_TEXT_BYTES:
        raise _damaged(uuid, name, f"it has {len(data)} bytes, more than {MAX_TEXT_BYTES}")
    try:
        # All else is skipped: as objects, it would take many times its size.
        version = msgspec.json.decode(data, type=_Version).version
        if version == MANIFEST_VERSION:
            check_seal(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _damaged(uuid, name, str(error)) from error
    if version != MANIFEST_VERSION:
        raise CheckpointVersionError(
            f"Checkpoint {uuid} must have format version {MANIFEST_VERSION}, but {name} has"
            f" {version!r}. Hint: use the Paceline version that wrote it."
        )


def _damaged(uuid: str, name: str, reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"Checkpoint {uuid} must be whole to be used, but {name} is damaged ({reason})."
    )
