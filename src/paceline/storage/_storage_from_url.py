"""Storage at a URL, a path or a config: schemes of our own and of installed packages."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit
from uuid import UUID

from paceline._base.imports import loaded_class, offered_points
from paceline.storage._checkpoint_errors import CheckpointNotFoundError, StorageNotInstalledError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint
from paceline.storage._checkpoint_storage import (
    UUID_FORM,
    CheckpointStorage,
    reporting_deletion,
    restored,
)

ENTRY_POINTS = "paceline.storages"
"""The group of entry points: the name of each is a URL's scheme, its object a storage's class."""
_OWN = {
    "az": "paceline.storage._s3_azure_gcs_storage:AzureStorage",
    "gs": "paceline.storage._s3_azure_gcs_storage:GoogleStorage",
    "s3": "paceline.storage._s3_azure_gcs_storage:S3Storage",
}
# Extras to install for the schemes.
_EXTRAS = {"az": "paceline[azure]", "gs": "paceline[gcs]", "s3": "paceline[s3]"}


def scheme_of(url: str) -> str:
    """Return the scheme of a URL in lower case; empty for a path."""
    return urlsplit(url).scheme if "://" in url else ""


def added_schemes() -> Sequence[str]:
    """Return the schemes offered by installed packages, sorted."""
    return sorted(_points())


def is_added_scheme(url: str) -> bool:
    """Return whether an installed package offers the scheme of a URL; a path has no scheme."""
    scheme = scheme_of(url)
    # Scheme first: a look at all packages' entry points takes 40 ms, too long for a worker's start.
    return bool(scheme) and scheme in _points()


def added_storage(url: str) -> CheckpointStorage:
    """Return the storage of a URL with a scheme offered by an installed package.

    Raises:
        StorageNotInstalledError: The package cannot be imported.
        TypeError: The package offers something else than a `CheckpointStorage`.
        ValueError: The storage's class does not take the URL.
    """
    point = _points()[scheme_of(url)]
    try:
        kind: type[CheckpointStorage] = loaded_class(point, CheckpointStorage)
    except ImportError as error:
        extra = _EXTRAS.get(point.name)
        hint = f" Hint: pip install '{extra}'." if extra else ""
        raise StorageNotInstalledError(
            f"The package for {point.name}:// URLs must be installed whole, but {point.value}"
            f" cannot be imported: {error}.{hint}"
        ) from error
    return kind.from_url(url)


@cache
def _points() -> "dict[str, EntryPoint]":
    points = offered_points(ENTRY_POINTS, _OWN)
    return {name.lower(): point for name, point in points.items()}


# Types of other systems, and the URL that names the same here.
_LATER_TYPES = {"azure": "az://container/prefix", "gcs": "gs://bucket/prefix"}
_URL_HINT = (
    "the URL of a checkpoint is that of its storage, a slash and the UUID: s3://bucket/prefix/UUID."
)


def _allowed() -> str:
    """Return the accepted forms of a storage setting as text, including added schemes."""
    return (
        f"a path, a URL ({_url_schemes()}), or a mapping of type 'directory', 'shared_fs' or 's3'"
    )


def _url_schemes() -> str:
    return ", ".join(["file://", *(f"{scheme}://" for scheme in added_schemes())])


def storage_from(spec: str | Path | Mapping[str, Any]) -> CheckpointStorage:
    """Return the storage named by a path, a URL or a config's `checkpoint_storage`.

    Raises:
        TypeError: `spec` has another type.
        StorageNotInstalledError: It is a URL whose scheme no installed package offers.
        ValueError: It names no directory.
    """
    if isinstance(spec, Mapping) and spec.get("type") == "url":
        return storage_from(str(spec.get("url", "")))
    if isinstance(spec, Mapping) and spec.get("type") == "s3":
        return storage_from(f"s3://{spec.get('bucket') or ''}/{quote(spec.get('prefix') or '')}")
    if isinstance(spec, Mapping):
        return _directory_storage(_mapping_path(spec))
    if isinstance(spec, Path):
        return _directory_storage(spec)
    if isinstance(spec, str) and is_added_scheme(spec):
        return added_storage(spec)
    if isinstance(spec, str):
        return _directory_storage(_string_path(spec))
    raise TypeError(f"`checkpoint_storage` must be {_allowed()}, but got {spec!r}.")


def _directory_storage(path: Path) -> CheckpointStorage:
    # Late: it derives from the class of this file.
    from paceline.storage._directory_storage import DirectoryStorage

    return DirectoryStorage(path)


def checkpoint_at(place: str | os.PathLike[str]) -> tuple[CheckpointStorage, str]:
    """Return the storage and the UUID of the checkpoint at a path or URL.

    Args:
        place: The directory of the checkpoint, or its storage's URL, a slash and the UUID.

    Raises:
        StorageNotInstalledError: No installed package offers the URL's scheme.
        ValueError: The place is no such URL.
    """
    text = os.fspath(place)
    if "://" not in text:
        path = Path(os.path.abspath(text))
        return _directory_storage(path.parent), path.name
    scheme = scheme_of(text)
    if scheme != "file" and not is_added_scheme(text):
        raise StorageNotInstalledError(
            f"A checkpoint must be named by a path or a URL ({_url_schemes()}), but got {text!r}."
            " Hint: download its files, and give their directory."
        )
    storage, _, uuid = text.rstrip("/").rpartition("/")
    if storage.endswith("/") or not UUID_FORM.fullmatch(uuid):
        raise ValueError(
            f"A checkpoint must be named by its storage and its UUID, but got {text!r}. Hint:"
            f" {_URL_HINT}"
        )
    return storage_from(storage), uuid


@contextmanager
def directory_of_checkpoint(place: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the directory at a path, or a directory with verified copies of the files at a URL.

    Args:
        place: A directory or file, or the URL of a checkpoint: that of its storage, a slash and the
            UUID.

    Raises:
        CheckpointCorruptError: Files at the URL are missing or altered.
        CheckpointNotFoundError: There is no checkpoint at the URL, or it was deleted meanwhile.
        StorageNotInstalledError: No installed package offers the URL's scheme.
        ValueError: It is no such URL.
    """
    if "://" not in os.fspath(place):
        with reporting_deletion(Path(place)):
            yield Path(place)
        return
    storage, uuid = checkpoint_at(place)
    with ExitStack() as stack:
        try:
            path = stack.enter_context(restored(storage, uuid))
        except CheckpointNotFoundError as error:
            if _is_uuid(uuid):
                raise
            # The URL of a storage, perhaps.
            raise CheckpointNotFoundError(f"{error} Hint: {_URL_HINT}") from None
        yield path


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


def _string_path(spec: str) -> Path:
    if not spec:
        raise ValueError(f"`checkpoint_storage` must be {_allowed()}, but got an empty string.")
    if "://" not in spec:
        return Path(spec)
    url = urlsplit(spec)
    if url.scheme != "file":
        raise StorageNotInstalledError(
            f"`checkpoint_storage` must be {_allowed()}, but got {spec!r}: no installed"
            f" package offers {url.scheme}://. Hint: install the package that does."
        )
    if url.netloc not in ("", "localhost") or url.query or url.fragment or not url.path:
        raise ValueError(
            "`checkpoint_storage` must be a file:// URL of a path and nothing else,"
            f" but got {spec!r}. Hint: file:///absolute/path."
        )
    return Path(unquote(url.path))


def _mapping_path(spec: Mapping[str, Any]) -> Path:
    kind = spec.get("type", "directory")
    if kind in _LATER_TYPES:
        raise ValueError(
            f"`checkpoint_storage` must be {_allowed()}, but got type {kind!r}: it is not offered"
            f" yet. Hint: {_LATER_TYPES[kind]}."
        )
    if kind == "directory":
        path = spec.get("path", spec.get("container_path"))
        if isinstance(path, (str, os.PathLike)) and str(path):
            return Path(path)
    if kind == "shared_fs" and isinstance(spec.get("host_path"), str):
        return _shared_path(Path(spec["host_path"]), spec.get("storage_path"))
    raise ValueError(f"`checkpoint_storage` must be {_allowed()} with its path, but got {spec!r}.")


def _shared_path(host_path: Path, storage_path: str | None) -> Path:
    path = Path(os.path.normpath(host_path / (storage_path or "")))
    if not path.is_relative_to(os.path.normpath(host_path)):
        raise ValueError(
            f"`checkpoint_storage.storage_path` must lie under {str(host_path)!r},"
            f" but got {storage_path!r}."
        )
    return path
