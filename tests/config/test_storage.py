from collections.abc import Callable
from typing import Any

import pytest

from paceline.config import validate_config
from paceline.config._checkpoint_storage_section import (
    CheckpointStorage,
    DirectoryStorage,
    SharedFsStorage,
)
from paceline.config._fields_and_problems import Problem

Make = Callable[..., dict[str, Any]]
Collect = Callable[[dict[str, Any]], dict[str, Problem]]


@pytest.mark.parametrize(
    ("storage", "kind", "root"),
    [
        ("/ckpts", DirectoryStorage, "/ckpts"),
        ("file:///ckpts/a%20b", DirectoryStorage, "/ckpts/a b"),
        ("file://localhost/ckpts", DirectoryStorage, "/ckpts"),
        ({"type": "directory", "path": "/ckpts"}, DirectoryStorage, "/ckpts"),
        ({"type": "directory", "path": "file:///ckpts"}, DirectoryStorage, "/ckpts"),
        ({"type": "directory", "container_path": "/ckpts"}, DirectoryStorage, "/ckpts"),
        ({"type": "shared_fs", "host_path": "/mnt"}, SharedFsStorage, "/mnt"),
        (
            {"type": "shared_fs", "host_path": "/mnt/", "storage_path": "a/../b"},
            SharedFsStorage,
            "/mnt/b",
        ),
        (
            {"type": "shared_fs", "host_path": "/mnt", "storage_path": "/mnt/b"},
            SharedFsStorage,
            "/mnt/b",
        ),
        ({"type": "shared_fs", "host_path": "/", "storage_path": "b"}, SharedFsStorage, "/b"),
        ({"save_trial_best": 2}, CheckpointStorage, None),
        ({"type": None}, CheckpointStorage, None),
        ({}, CheckpointStorage, None),
    ],
)
def test_a_storage_has_a_root(
    make: Make, storage: object, kind: type[CheckpointStorage], root: str | None
) -> None:
    config = validate_config(make(checkpoint_storage=storage))
    assert isinstance(config.checkpoint_storage, kind)
    assert config.checkpoint_storage.root == root
    assert validate_config(config.to_json()) == config


def test_by_default_the_best_and_latest_of_each_trial_are_kept() -> None:
    default = CheckpointStorage()
    kept = (default.save_experiment_best, default.save_trial_best, default.save_trial_latest)
    assert kept == (0, 1, 1)
    assert default.root is None


@pytest.mark.parametrize(
    ("storage", "path", "message"),
    [
        ("ckpts", "checkpoint_storage.path", "must be a place in a file system"),
        ("", "checkpoint_storage.path", "must be a place in a file system"),
        ("file://host/ckpts", "checkpoint_storage.path", "must be a place in a file system"),
        ("ftp://host/ckpts", "checkpoint_storage.path", "no installed package offers ftp://"),
        (
            {"type": "url", "url": "ftp://x"},
            "checkpoint_storage.url",
            "no installed package offers",
        ),
        ({"type": "url", "url": "/x"}, "checkpoint_storage.url", "must be a URL"),
        ({"type": "directory", "path": "s3://bucket/x"}, "checkpoint_storage.path", "a file syst"),
        ("gcs://bucket/x", "checkpoint_storage.path", "is not offered yet"),
        ({"type": "s3"}, "checkpoint_storage.bucket", "is required"),
        ({"type": "s3", "bucket": "b"}, "checkpoint_storage.bucket", "must be the name of a bucke"),
        (
            {"type": "s3", "bucket": "bucket", "secret_key": "x"},
            "checkpoint_storage.secret_key",
            "comes from the environment",
        ),
        ({"type": "gcs"}, "checkpoint_storage.type", "is not offered yet"),
        ({"type": "azure"}, "checkpoint_storage.type", "is not offered yet"),
        ({"type": "sharedfs"}, "checkpoint_storage.type", "is not known"),
        ({"type": ["directory"]}, "checkpoint_storage.type", "must be a string"),
        (3, "checkpoint_storage", "must be a map of fields"),
        ({"type": "directory"}, "checkpoint_storage.path", "is required"),
        ({"type": "shared_fs"}, "checkpoint_storage.host_path", "is required"),
        ({"path": "/a"}, "checkpoint_storage.path", "needs the type of the storage"),
        ({"host_path": "/a"}, "checkpoint_storage.host_path", "needs the type of the storage"),
        (
            {"type": "directory", "path": "/a", "container_path": "/b"},
            "checkpoint_storage.container_path",
            "is an older name of `path`",
        ),
        (
            {"type": "directory", "path": "/a", "host_path": "/b"},
            "checkpoint_storage.host_path",
            "is not a known field",
        ),
        (
            {"type": "shared_fs", "host_path": "/a", "propagation": "rprivate"},
            "checkpoint_storage.propagation",
            "is not offered, as Paceline runs trials without containers",
        ),
        (
            {"type": "shared_fs", "host_path": "a"},
            "checkpoint_storage.host_path",
            "must be an absolute path",
        ),
        (
            {"type": "shared_fs", "host_path": "/a", "storage_path": "../b"},
            "checkpoint_storage.storage_path",
            "must not lead out",
        ),
        (
            {"type": "shared_fs", "host_path": "/a", "storage_path": "b/../../ab"},
            "checkpoint_storage.storage_path",
            "must not lead out",
        ),
        (
            {"type": "shared_fs", "host_path": "/a", "storage_path": "/ab"},
            "checkpoint_storage.storage_path",
            "must not lead out",
        ),
        (
            {"save_trial_latest": -1},
            "checkpoint_storage.save_trial_latest",
            "must be an integer >= 0",
        ),
    ],
)
def test_a_wrong_storage_is_refused_at_the_field_in_question(
    make: Make, problems_of: Collect, storage: object, path: str, message: str
) -> None:
    problems = problems_of(make(checkpoint_storage=storage))
    assert list(problems) == [path]
    assert message in problems[path].message
