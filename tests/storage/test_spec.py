from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config._checkpoint_storage_section import expand_location
from paceline.storage import DirectoryStorage, _storage_from_url, storage_from


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("/a/b", "/a/b"),
        (Path("/a/b"), "/a/b"),
        ("file:///a/b%20c", "/a/b c"),
        ("file://localhost/a", "/a"),
        ({"type": "directory", "path": "/a"}, "/a"),
        ({"type": "directory", "container_path": "/a"}, "/a"),
        ({"path": "/a"}, "/a"),
        ({"type": "shared_fs", "host_path": "/a"}, "/a"),
        ({"type": "shared_fs", "host_path": "/a", "storage_path": "b/c"}, "/a/b/c"),
        ({"type": "shared_fs", "host_path": "/a", "storage_path": "/a/b"}, "/a/b"),
    ],
)
def test_specification_names_a_directory(spec: Any, expected: str) -> None:
    found = storage_from(spec)
    assert isinstance(found, DirectoryStorage)
    assert found.url == expected


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ({"type": "s3", "bucket": "bucket"}, "s3://bucket"),
        ({"type": "s3", "bucket": "bucket", "prefix": "/a b"}, "s3://bucket/a%20b"),
    ],
)
def test_specification_names_a_bucket(spec: Any, expected: str) -> None:
    assert storage_from(spec).url == expected


def test_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert storage_from("a").url == str(tmp_path / "a")


@pytest.mark.parametrize(
    ("spec", "error", "match"),
    [
        ("", ValueError, "empty string"),
        ("s3://", ValueError, "must be like s3://bucket/prefix"),
        ("s3://key:secret@bucket", ValueError, "come from the environment"),
        ("gs://", ValueError, "must be like gs://bucket/prefix"),
        ("nope://bucket", ValueError, "no installed package offers nope://"),
        ("az://", ValueError, "must be like az://container/prefix"),
        ("file://host/a", ValueError, "file:// URL of a path and nothing else"),
        ("file:///a?b=c", ValueError, "file:// URL of a path and nothing else"),
        ("file://", ValueError, "file:// URL of a path and nothing else"),
        ({"type": "s3"}, ValueError, "must be like s3://bucket/prefix"),
        ({"type": "gcs"}, ValueError, "'gcs': it is not offered yet. Hint: gs://bucket"),
        ({"type": "azure"}, ValueError, "'azure': it is not offered yet. Hint: az://container"),
        ({"type": "strange"}, ValueError, "must be a path"),
        ({"type": "directory"}, ValueError, "with its path"),
        (
            {"type": "shared_fs", "host_path": "/a", "storage_path": "../b"},
            ValueError,
            "under '/a'",
        ),
        ({"type": "shared_fs", "host_path": "/a", "storage_path": "/b"}, ValueError, "under '/a'"),
        (3, TypeError, "must be a path.* but got 3"),
    ],
)
def test_other_specification_is_refused(spec: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        storage_from(spec)


def test_a_path_does_not_have_all_packages_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start of a worker would take 40 ms longer."""

    def search() -> None:
        raise AssertionError("What all packages offer was looked at.")

    monkeypatch.setattr(_storage_from_url, "_points", search)
    assert storage_from(str(tmp_path)).url == str(tmp_path)
    assert expand_location(str(tmp_path)) == {"type": "directory", "path": str(tmp_path)}
    with pytest.raises(AssertionError, match="was looked at"):
        storage_from("s3://bucket")


def test_storage_loads_neither_torch_nor_fsspec(run_python: Callable[..., Any]) -> None:
    result = run_python(
        "import sys, paceline.storage; print({'torch', 'fsspec', 'numpy'} & sys.modules.keys())"
    )
    assert result.stdout == "set()\n"
