"""The projects that `paceline init` makes: each runs as it stands, as its README says."""

import compileall
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from paceline.cli import _app
from paceline.cli._app import examples_directory
from paceline.cli._commands.create_command import Door, init

MAIN = {"declarative": "run.yaml"}


def paceline(directory: Path, *arguments: object, code: int = 0) -> str:
    """Run the command line and return its output; errors are shown if the code is another one."""
    result = subprocess.run(
        [sys.executable, "-m", "paceline.cli", *map(str, arguments)],
        cwd=directory,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert result.returncode == code, (result.stdout, result.stderr)
    return result.stdout if code == 0 else result.stderr


@pytest.mark.long
@pytest.mark.parametrize("door", get_args(Door))
def test_a_new_project_runs_as_its_readme_says(tmp_path: Path, door: str) -> None:
    made = json.loads(paceline(tmp_path, "init", "new", "--door", door, "--json"))
    project = tmp_path / "new"
    assert {path.name for path in project.iterdir()} == set(made["files"])
    assert made["main"] == MAIN.get(door, "train.py")
    readme = (project / "README.md").read_text()
    lines = [line.partition("#")[0].split() for line in readme.splitlines() if "   # " in line]
    assert len(lines) == 3
    for words in lines:
        assert words[0] == "paceline"
        paceline(project, *words[1:])
    newest = json.loads(paceline(project, "runs", "show", "last", "--json"))
    assert newest["state"] == "completed"
    # This trainer stores where its script says.
    assert newest["latest_checkpoint"] or (door == "creators" and (project / "checkpoint").exists())
    assert newest["metrics"]


def test_a_directory_with_files_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine")
    for place in (".", tmp_path):
        assert "must be new or without files" in paceline(tmp_path, "init", place, code=1)
    assert "is a file" in paceline(tmp_path, "init", "train.py", code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert (tmp_path / "train.py").read_text() == "mine"


def test_hidden_files_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("mine")
    (tmp_path / ".venv").mkdir()
    told = paceline(tmp_path, "init")
    assert "Start it with: paceline run train.py" in told
    assert (tmp_path / ".gitignore").read_text() == "mine"


def test_what_an_installer_compiles_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = tmp_path / "examples"
    shutil.copytree(examples_directory() / "starters", examples / "starters")
    compileall.compile_dir(examples, quiet=1)
    assert (examples / "starters" / "core" / "__pycache__").is_dir()
    monkeypatch.setattr(_app, "examples_directory", lambda: examples)
    init(tmp_path / "project", "core")
    assert not (tmp_path / "project" / "__pycache__").exists()
    assert (tmp_path / "project" / "train.py").is_file()
