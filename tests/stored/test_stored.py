"""What an earlier version has stored opens, and trainings go on from it to the same end."""

import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# How many steps are left; the train function has four, and stores at the end of an epoch.
LEFT = {"core": 3, "trial": 3, "trial_of_two": 3, "function": 2}


def unpack(name: str, directory: Path) -> Path:
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.mark.parametrize("door", [*LEFT, "creators"])
def test_a_training_goes_on_from_what_an_earlier_version_has_stored(
    door: str, tmp_path: Path, clean_environment: dict[str, str], torch_ranks: Any
) -> None:
    stored = unpack(door, tmp_path)
    shutil.copy(HERE / "work.py", stored)
    steps = stored / "steps"
    steps.unlink(missing_ok=True)
    done = torch_ranks.run_to_end(
        str(stored / "work.py"),
        door,
        directory=stored,
        environment={**clean_environment, "OMP_NUM_THREADS": "1", "PACELINE_RESUME": "auto"},
    )
    assert done.returncode == 0, done.stderr
    assert (stored / "end").read_text() == (stored / "expected").read_text()
    if door in LEFT:
        assert len(steps.read_text().splitlines()) == LEFT[door]
        # It is the same run.
        assert len([path for path in (stored / "paceline_runs").iterdir() if path.is_dir()]) == 1
