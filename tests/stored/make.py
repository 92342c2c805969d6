"""Make the samples that `test_stored.py` goes on from, with the Paceline of this interpreter.

    PYTHON_OF_THE_EARLIER_VERSION make.py

Each archive has the directory of a training that was stopped, and what it ends with if it is not.
Samples are kept: those of an earlier version are not to be made again by a later one.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
DOORS = ("core", "trial", "trial_of_two", "function", "creators")


def run(door: str, directory: Path, **variables: str) -> None:
    directory.mkdir()
    shutil.copy(HERE / "work.py", directory)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    subprocess.run([sys.executable, "work.py", door], cwd=directory, env=environment, check=False)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for door in DOORS:
            stopped, whole = Path(scratch, f"{door}-stopped"), Path(scratch, f"{door}-whole")
            run(door, stopped, STOP="1")
            run(door, whole)
            assert not (stopped / "end").exists(), door
            shutil.copy(whole / "end", stopped / "expected")
            (stopped / "work.py").unlink()
            with tarfile.open(HERE / f"{door}.tar.xz", "w:xz") as archive:
                archive.add(stopped, ".")


if __name__ == "__main__":
    main()
