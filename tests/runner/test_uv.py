"""`environment.uv`: the real `uv` installs a small project into the attempt's copy of the code."""

import io
import os
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from paceline._cluster.runner.attempt_preparation import (
    UnusableConfigError,
    find_uv,
    sync_environment,
)
from paceline.client import ContextError
from paceline.client._client import _check_lock
from paceline.config import ConfigError, validate_config

UV = find_uv(os.environ)
needs_uv = pytest.mark.skipif(UV is None, reason="uv is not installed")

PROJECT = """
[project]
name = "small"
version = "1"
requires-python = ">=3.10"
dependencies = ["helper"]

[tool.uv]
package = false

[tool.uv.sources]
helper = {path = "helper-1.0-py3-none-any.whl"}
"""
SCRIPT = """
import os, sys
import helper
print(helper.WHERE, sys.prefix, os.environ["VIRTUAL_ENV"] == sys.prefix, os.getcwd())
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with one package and a lock file, for which no network is needed."""
    path = tmp_path_factory.mktemp("project")
    (path / "pyproject.toml").write_text(PROJECT)
    (path / "train.py").write_text(SCRIPT)
    info = "helper-1.0.dist-info/"
    with zipfile.ZipFile(path / "helper-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("helper.py", "WHERE = 'from the lock file'\n")
        wheel.writestr(f"{info}METADATA", "Metadata-Version: 2.1\nName: helper\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}WHEEL", tags)
        names = ("helper.py", f"{info}METADATA", f"{info}WHEEL", f"{info}RECORD")
        wheel.writestr(f"{info}RECORD", "".join(f"{name},,\n" for name in names))
    if UV is not None:
        subprocess.run(
            [UV, "lock", "--offline", "--python", sys.executable], cwd=path, check=True,
            capture_output=True,
        )  # fmt: skip
    return path


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `uv` take this interpreter and ask no network."""
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_PYTHON", sys.executable)


def archive(path: Path, *names: str) -> bytes:
    """Return the context with some files of a directory."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name in names:
            tar.add(path / name, name)
    return buffer.getvalue()


@pytest.mark.long
@needs_uv
def test_a_trial_runs_in_the_environment_of_its_lock_file(
    master: Any, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert UV is not None
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{Path(UV).parent}")
    master.start()
    everything = [path.name for path in project.iterdir() if path.name != ".venv"]
    number = master.create(
        archive(project, *everything), environment={"uv": True, "python": sys.executable}
    )
    trial = master.wait_for_end(number)
    assert trial["state"] == "COMPLETED", trial
    told = master.output(trial)
    assert any("helper==1.0" in line for line in told)
    assert any(line.startswith("from the lock file ") and " True " in line for line in told)
    # One without the file tells so, and is not tried again.
    number = master.create(archive(project, "train.py"), environment={"uv": True})
    trial = master.wait_for_end(number)
    assert "needs the file 'uv.lock'" in trial["error"]
    assert (trial["error_kind"], len(trial["attempts"])) == ("user", 1)


@needs_uv
def test_a_lock_file_that_is_damaged_is_told_in_the_words_of_uv(
    project: Path, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "uv.lock").write_text("version = {")
    lines: list[str] = []
    with pytest.raises(UnusableConfigError, match=r"(?s)ended with code \d:.*uv\.lock"):
        sync_environment(tmp_path, dict(os.environ), lines.append)
    assert lines


def test_an_installation_ends_with_its_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uv.lock").touch()
    program = tmp_path / "bin" / "uv"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    program.chmod(0o755)
    variables = {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    pid = tmp_path / "pid"
    sync_environment(tmp_path, variables, print, lambda: pid.exists() and pid.read_text() != "")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), signal.SIGCONT)


def test_a_missing_uv_is_told_with_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uv.lock").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UnusableConfigError, match=f"`uv` on '{os.uname().nodename}'.*pip install"):
        sync_environment(tmp_path, {"PATH": str(tmp_path)}, print)


@pytest.mark.parametrize("other", [{"working_dir": "/tmp"}, {"prefix": ["nice"]}])
def test_what_does_not_go_with_it_is_refused(other: dict[str, Any]) -> None:
    config = {"entrypoint": "true", "searcher": {"name": "single", "metric": "loss"},
              "environment": {"uv": True} | other}  # fmt: skip
    [name] = other
    with pytest.raises(ConfigError, match=f"must not be given with `environment.{name}`"):
        validate_config(config)


def test_a_directory_without_a_lock_file_is_not_submitted(
    tmp_path: Path,
) -> None:
    with pytest.raises(ContextError, match="Hint: `uv lock` makes it"):
        _check_lock(tmp_path)
    (tmp_path / "uv.lock").touch()
    _check_lock(tmp_path)
