"""What a process records of its environment."""

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import core
from paceline.core import _process_environment as _environment
from paceline.core._process_environment import MAX_DIFF_BYTES, describe_environment, describe_source
from paceline.journal import AttemptStarted


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that calls git in a new repository."""
    for variable in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL",
                     "GIT_COMMITTER_EMAIL"):  # fmt: skip
        monkeypatch.setenv(variable, "a@b")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)

    def call(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    call("init", "-q", "-b", "trunk")
    return call


def test_the_commit_and_what_is_not_committed_are_told(
    git: Callable[..., str], tmp_path: Path
) -> None:
    assert describe_source(tmp_path) is None
    (tmp_path / "train.py").write_text("lr = 1\n")
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    clean = {"commit": commit, "branch": "trunk", "num_diff_bytes": 0, "num_untracked_files": 0}
    assert describe_source(tmp_path) == clean
    (tmp_path / "train.py").write_text("lr = 2\n")
    (tmp_path / "new.py").touch()
    git("checkout", "-q", "--detach")
    found: Any = describe_source(tmp_path)
    assert (found["branch"], found["num_untracked_files"]) == (None, 1)
    assert "-lr = 1\n+lr = 2\n" in found["diff"]
    assert found["num_diff_bytes"] == len(found["diff"])


def test_a_large_change_is_cut_off_and_left_out_on_request(
    git: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.txt").touch()
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "data.txt").write_text("secret\n" * 100_000)
    found: Any = describe_source(tmp_path)
    assert len(found["diff"]) == MAX_DIFF_BYTES
    assert found["num_diff_bytes"] > 700_000
    monkeypatch.setenv("PACELINE_RECORD_DIFF", "0")
    found = describe_source(tmp_path)
    assert "diff" not in found
    assert found["num_diff_bytes"] > 700_000


def test_packages_are_those_that_the_interpreter_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", "hidden")
    found = describe_environment(with_source=False)
    for name in ("torch", "numpy", "pydantic-core"):
        assert found["packages"][name] == importlib.metadata.version(name)
    assert found["python"]["executable"] == sys.executable
    assert found["host"]["name"] == os.uname().nodename
    assert "hidden" not in str(found)


@pytest.mark.parametrize(
    "version",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build",
    ],
)
def test_the_driver_and_the_models_of_gpus_come_from_files_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    for number in range(2):
        place = tmp_path / "gpus" / f"0000:0{number}:00.0"
        place.mkdir(parents=True)
        text = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\n"
        (place / "information").write_text(text)
    (tmp_path / "version").write_text(f"{version}\nGCC version:  gcc version 12.2.0\n")
    monkeypatch.setattr(_environment, "_NVIDIA", tmp_path)
    _environment._environment_gpus.cache_clear()
    found = describe_environment(with_source=False)["gpus"]
    assert found == {"driver": "550.54.15", "models": ["NVIDIA H100 80GB HBM3"] * 2}
    monkeypatch.setattr(_environment, "_NVIDIA", tmp_path / "nothing")
    monkeypatch.setattr(_environment, "_AMD_DRIVER", tmp_path / "nothing")
    _environment._environment_gpus.cache_clear()
    assert "gpus" not in describe_environment(with_source=False)
    _environment._environment_gpus.cache_clear()


def test_a_run_records_it_once_by_its_chief(
    git: Callable[..., str], work_directory: Path, records_of: Callable[..., Any]
) -> None:
    (work_directory / "train.py").touch()
    git("add", ".")
    git("commit", "-qm", "first")
    with core.init(name="one") as context:
        pass
    [started] = records_of(context.run_dir, AttemptStarted)
    assert started.environment["source"]["commit"] == git("rev-parse", "HEAD")
    assert "torch" in started.environment["packages"]
