"""What follows the options, as the command of a worker."""

import sys
from pathlib import Path

import pytest

from paceline._training.workers.processes.worker_program import PROGRAM_FILE
from paceline.launch._launcher_arguments import LaunchArgumentError, worker_command

HERE = sys.executable
WRAPPER = PROGRAM_FILE
OWN_VERSION = f"python3.{sys.version_info.minor}"


@pytest.fixture(autouse=True)
def in_a_directory_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "program").write_text("")
    (tmp_path / "package").mkdir()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("train.py a -b", [HERE, WRAPPER, "script", "train.py", "a", "-b"]),
        ("-m mod a", [HERE, WRAPPER, "module", "mod", "a"]),
        ("python3 train.py", [HERE, WRAPPER, "script", "train.py"]),
        ("python program", [HERE, WRAPPER, "script", "program"]),
        (f"{OWN_VERSION} train.py", [HERE, WRAPPER, "script", "train.py"]),
        ("/opt/x/python3 train.py", ["/opt/x/python3", WRAPPER, "script", "train.py"]),
        ("python3.6 train.py", ["python3.6", WRAPPER, "script", "train.py"]),
        ("python3 -u -m mod -c", [HERE, "-u", WRAPPER, "module", "mod", "-c"]),
        ("python3 -um mod", [HERE, "-u", WRAPPER, "module", "mod"]),
        ("python3 -mmod a", [HERE, WRAPPER, "module", "mod", "a"]),
        ("python3 -c pass a", [HERE, WRAPPER, "code", "pass", "a"]),
        (
            "python3 -X dev -Werror -OW ignore train.py -u",
            [HERE, "-X", "dev", "-Werror", "-OW", "ignore", WRAPPER, "script", "train.py", "-u"],
        ),
    ],
)
def test_python_programs_run_in_the_wrapper(program: str, command: list[str]) -> None:
    found = worker_command(program.split())
    assert found.is_python
    assert list(found.arguments) == command


@pytest.mark.parametrize(
    "program",
    [
        "bash train.sh",
        "./program",
        "python3",
        "python3 -V",
        "python3 -i train.py",
        "python3 --version",
        "python3 package",
        "python3 -",
        "python3-config --libs",
    ],
)
def test_other_commands_run_as_they_are(program: str) -> None:
    found = worker_command(program.split())
    assert not found.is_python
    assert list(found.arguments) == program.split()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("missing.py", "there is no file 'missing.py' in"),
        ("python3 -u missing.py", "there is no file 'missing.py' in"),
        ("-m", "`-m` must be followed by a module"),
        ("python3 -c", "`-c` must be followed by code"),
    ],
)
def test_programs_that_cannot_run_are_refused(program: str, message: str) -> None:
    with pytest.raises(LaunchArgumentError, match=message):
        worker_command(program.split())
