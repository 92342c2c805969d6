"""Section `checkpoint_storage`: directories, shared file systems, buckets and URLs."""

import posixpath
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote, unquote, urlsplit

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from paceline.config import _fields_and_problems as fields
from paceline.storage._storage_from_url import added_schemes, is_added_scheme, scheme_of

if TYPE_CHECKING:
    pass


CLOUD_TYPES = ("gcs", "azure")
_CLOUD_SCHEMES = ("gcs", "abfs", "abfss", "azure")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")


class CheckpointStorage(fields.Section):
    """Checkpoints in the default location, and how many are kept.

    A checkpoint is kept if the rules on the best, the latest or the age keep it, and the bytes
    allow it.
    """

    type: Literal["directory", "shared_fs", "s3", "url"] | None = Field(
        default=None, description="Kind of storage; null is the master's default location."
    )
    save_experiment_best: fields.NonNegative = Field(
        default=0, description="Checkpoints kept as the best of the experiment."
    )
    save_trial_best: fields.NonNegative = Field(
        default=1, description="Checkpoints kept as the best of each trial."
    )
    save_trial_latest: fields.NonNegative = Field(
        default=1, description="Checkpoints kept as the latest of each trial."
    )
    save_age: fields.Age | None = Field(
        default=None,
        description="Checkpoints kept as younger: seconds, or text such as `7d`; null is no rule.",
    )
    save_bytes: fields.NumBytes | None = Field(
        default=None,
        description="Bytes of checkpoints kept at most, such as `500GB`; null is no limit.",
    )

    @property
    def root(self) -> str | None:
        """Return the absolute path or URL of the storage, None for the default location."""
        return None


def _read_location(value: str) -> str:
    parts = urlsplit(value) if "://" in value else None
    if parts is None:
        path = value
    elif parts.scheme == "file" and parts.netloc in ("", "localhost"):
        path = unquote(parts.path)
    elif parts.scheme in _CLOUD_SCHEMES:
        raise fields.refused(
            f"is not offered yet for `{parts.scheme}://` URLs",
            "an absolute path or a file:// URL",
        )
    elif parts.scheme in ("", "file"):
        path = ""
    elif parts.scheme in added_schemes():
        raise fields.refused(
            "must be a place in a file system",
            "an absolute path or a file:// URL",
            hint=f"checkpoint_storage: {value}",
        )
    else:
        raise _not_offered(parts.scheme)
    if not path.startswith("/") or "\0" in path:
        raise fields.refused(
            "must be a place in a file system", "an absolute path or a file:// URL"
        )
    return path


class DirectoryStorage(CheckpointStorage):
    """Checkpoints in a directory."""

    type: Literal["directory"] = Field(default="directory", description="Kind of storage.")
    path: Annotated[str, fields.text_field(_read_location)] = Field(
        validation_alias=AliasChoices("path", "container_path"),
        description="Absolute path or file:// URL of the directory that holds the checkpoints.",
    )

    @property
    def root(self) -> str:
        """Return the absolute path of the checkpoints' directory."""
        return self.path


class SharedFsStorage(CheckpointStorage):
    """Checkpoints in a file system mounted on all nodes at the same path."""

    type: Literal["shared_fs"] = Field(default="shared_fs", description="Kind of storage.")
    host_path: fields.AbsolutePath = Field(
        description="Absolute path where the file system is mounted."
    )
    storage_path: str | None = Field(
        default=None,
        description="Directory in it, relative to `host_path` or absolute under it.",
    )

    @field_validator("storage_path")
    @classmethod
    def _check_storage_path(cls, value: str | None, info: ValidationInfo) -> str | None:
        host_path = info.data.get("host_path")
        if value is None or host_path is None:
            return value
        top = posixpath.normpath(host_path)
        inside = posixpath.normpath(posixpath.join(top, value))
        if "\0" in value or not (inside == top or inside.startswith(top.rstrip("/") + "/")):
            raise fields.refused(
                "must not lead out of `checkpoint_storage.host_path`",
                f"a relative path without `..`, or an absolute path under {host_path}",
            )
        return value

    @property
    def root(self) -> str:
        """Return the absolute path of the checkpoints' directory."""
        return posixpath.normpath(posixpath.join(self.host_path, self.storage_path or ""))


def _read_bucket(value: str) -> str:
    if not _BUCKET.fullmatch(value):
        raise fields.refused(
            "must be the name of a bucket", "3 to 63 letters, digits, dots and hyphens"
        )
    return value


class S3Storage(CheckpointStorage):
    """Checkpoints in a bucket of S3, with credentials and server from the environment."""

    type: Literal["s3"] = Field(default="s3", description="Kind of storage.")
    bucket: Annotated[str, fields.text_field(_read_bucket)] = Field(
        description="Name of the bucket."
    )
    prefix: str | None = Field(
        default=None, description="What the keys of all checkpoints begin with."
    )

    @property
    def root(self) -> str:
        """Return the URL of the bucket and the prefix."""
        return f"s3://{self.bucket}/{quote((self.prefix or '').strip('/'))}".rstrip("/")


def _read_url(value: str) -> str:
    scheme = scheme_of(value)
    if not scheme:
        raise fields.refused("must be a URL", _offered_urls())
    if not is_added_scheme(value):
        raise _not_offered(scheme)
    return value


def _not_offered(scheme: str) -> PydanticCustomError:
    return fields.refused(
        f"must have a scheme that is known, but no installed package offers {scheme}://",
        f"an absolute path or a URL ({_offered_urls()})",
        hint="install the package that offers it.",
    )


def _offered_urls() -> str:
    return ", ".join(["file://", *(f"{scheme}://" for scheme in added_schemes())])


class UrlStorage(CheckpointStorage):
    """Checkpoints in a storage named by URL, offered by Paceline or an installed package."""

    type: Literal["url"] = Field(default="url", description="Kind of storage.")
    url: Annotated[str, fields.text_field(_read_url)] = Field(description="URL of the storage.")

    @property
    def root(self) -> str:
        """Return the URL of the storage."""
        return self.url


class DefaultStorage(CheckpointStorage):
    """Checkpoints in the default location."""

    type: None = Field(default=None, description="The default location.")


def _storage_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "default" if kind is None else str(kind)


def expand_location(value: Any) -> Any:
    """Turn the short form, a path or URL alone, into a section."""
    if not isinstance(value, str):
        return value
    if is_added_scheme(value):
        return {"type": "url", "url": value}
    return {"type": "directory", "path": value}


AnyStorage = Annotated[
    Annotated[
        Annotated[DirectoryStorage, Tag("directory")]
        | Annotated[SharedFsStorage, Tag("shared_fs")]
        | Annotated[S3Storage, Tag("s3")]
        | Annotated[UrlStorage, Tag("url")]
        | Annotated[DefaultStorage, Tag("default")],
        Discriminator(_storage_kind),
    ],
    BeforeValidator(expand_location),
]
_ADAPTER: TypeAdapter[CheckpointStorage] = TypeAdapter(AnyStorage)


def storage_root(section: Any) -> str | None:
    """Return the path or URL of a storage in a config, None for the default location."""
    return None if section is None else _ADAPTER.validate_python(section).root
