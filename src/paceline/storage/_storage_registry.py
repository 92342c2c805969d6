"""The kinds of storage that installed packages add, by the scheme of their URLs."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from paceline._entry_points import loaded_class, offered_points
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.storage._errors import StorageNotInstalledError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "paceline.storages"
"""The group of entry points: the name of each is a URL's scheme, its object a storage's class."""

_OWN = {
    "az": "paceline.storage._azure:AzureStorage",
    "s3": "paceline.storage._s3:S3Storage",
}
# What must be installed for them.
_EXTRAS = {"az": "paceline[azure]", "s3": "paceline[s3]"}


def scheme_of(url: str) -> str:
    """Return the scheme of a URL in lower case; empty for a path."""
    return urlsplit(url).scheme if "://" in url else ""


def added_schemes() -> Sequence[str]:
    """Return the schemes that installed packages offer, sorted."""
    return sorted(_points())


def is_added_scheme(url: str) -> bool:
    """Tell whether an installed package offers the scheme of a URL; no path has one."""
    scheme = scheme_of(url)
    # To look what all packages offer takes 40 ms, which a worker's start must not.
    return bool(scheme) and scheme in _points()


def added_storage(url: str) -> CheckpointStorage:
    """Return the storage of a URL whose scheme an installed package offers.

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
