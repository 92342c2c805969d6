"""What a release has stored opens, and trainings resume from it to the same end."""

import hashlib
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from paceline._training.engine.checkpoints import state_format
from paceline._training.engine.checkpoints.state_format import (
    read_training,
    read_versioned_part,
    save_state,
)
from paceline.creators._pass_states import checked_pass_state
from paceline.storage import _checkpoint_errors
from paceline.storage._checkpoint_errors import STATE_VERSION, CheckpointMismatchError
from paceline.train._run_protocol import checked_metadata

HERE = Path(__file__).parent
# How many steps are left; the train function has four, and stores at the end of an epoch.
LEFT = {"core": 3, "trial": 3, "trial_of_two": 3, "function": 2}


def unpack(name: str, directory: Path) -> Path:
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory


def run_stored(door: str, stored: Path, environment: dict[str, str], torch_ranks: Any) -> Any:
    shutil.copy(HERE / "work.py", stored)
    (stored / "steps").unlink(missing_ok=True)
    return torch_ranks.run_to_end(
        str(stored / "work.py"),
        door,
        directory=stored,
        environment={**environment, "OMP_NUM_THREADS": "1", "PACELINE_RESUME": "auto"},
    )


@pytest.mark.parametrize("door", [*LEFT, "creators"])
def test_a_training_resumes_from_what_a_release_has_stored(
    door: str, tmp_path: Path, clean_environment: dict[str, str], torch_ranks: Any
) -> None:
    stored = unpack(door, tmp_path)
    done = run_stored(door, stored, clean_environment, torch_ranks)
    assert done.returncode == 0, done.stderr
    assert (stored / "end").read_text() == (stored / "expected").read_text()
    if door in LEFT:
        assert len((stored / "steps").read_text().splitlines()) == LEFT[door]
        # It is the same run.
        assert len([path for path in (stored / "paceline_runs").iterdir() if path.is_dir()]) == 1


def test_a_checkpoint_of_before_the_first_release_is_refused_and_left_as_it_is(
    tmp_path: Path, clean_environment: dict[str, str], torch_ranks: Any
) -> None:
    def digests() -> dict[Path, str]:
        return {
            path: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (stored / "paceline_runs").glob("*/checkpoints/**/*")
            if path.is_file()
        }

    stored = unpack("unreleased_trial", tmp_path)
    before = digests()
    done = run_stored("trial", stored, clean_environment, torch_ranks)
    assert done.returncode != 0
    assert f"must have version {STATE_VERSION}, but has 2. Hint: use the version" in done.stderr
    assert before
    assert digests() == before
    assert not (stored / "steps").exists()


@pytest.mark.parametrize("version", [*range(1, STATE_VERSION), STATE_VERSION + 1])
def test_all_front_doors_refuse_states_of_unknown_versions(version: int, tmp_path: Path) -> None:
    save_state({"version": version, "paceline": "9.8"}, tmp_path, "training")
    problem = f"must have version {STATE_VERSION}, but has {version}. Hint: use the version"
    with pytest.raises(CheckpointMismatchError, match=problem) as refused:
        read_training(tmp_path)
    assert ("9.8" in str(refused.value)) == (version > STATE_VERSION)
    with pytest.raises(ValueError, match=problem):
        checked_metadata("a", {"version": version, "num_shards": 1})
    with pytest.raises(ValueError, match=problem):
        checked_pass_state({"version": version, "ranks": []})


def test_each_part_of_an_earlier_state_is_upgraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state({"version": STATE_VERSION, "paceline": "0.1.0", "size": 2}, tmp_path, "training")
    save_state({"means": 1.0}, tmp_path, "rank_0")

    def rename(name: str, part: dict[str, Any]) -> None:
        part[f"new of {name}"] = part.pop("size" if name == "training" else "means")

    monkeypatch.setattr(_checkpoint_errors, "STATE_VERSION", STATE_VERSION + 1)
    monkeypatch.setitem(state_format._STEPS, STATE_VERSION, rename)
    training = read_training(tmp_path)
    assert training["new of training"] == 2
    # The other parts are upgraded from the version of the files.
    assert training["version"] == STATE_VERSION
    assert read_versioned_part(tmp_path, "rank_0", training) == {"new of rank_0": 1.0}
