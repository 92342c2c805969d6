"""A script that is watched while it runs."""

import sys
from pathlib import Path

import pytest

from paceline.testing._script_runs import Script, prepare_script_directory, start_script

# The kernel shows others a write that crosses a page of the file in two parts.
SCRIPT = """
import os, time
with open(os.environ["PACELINE_FAULT_LOG"], "ab", buffering=0) as log:
    log.write(b'{"signal": null, "pid": 1}\\n{"signal": nu')
    time.sleep(0.5)
    log.write(b'll, "pid": 2}\\n')
"""


def test_a_note_that_is_written_in_parts_is_read_once_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    script = Script(
        command=(sys.executable, str(tmp_path / "script.py")),
        num_workers=1,
        environment={},
        links=None,
        timeout_s=120,
    )
    prepare_script_directory(script, tmp_path / "run")
    end = start_script(script, tmp_path / "run", "straight")
    assert end.code == 0, end.tail()
    assert [note["pid"] for note in end.notes] == [1, 2]


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("warm", ["1", "0"])
def test_all_starts_are_forks_of_one_process_that_has_loaded_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: str, num_workers: int
) -> None:
    """Workers of the launcher too, whether or not the user has chosen the number of threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "script.py").write_text("import sys; print('loaded', 'torch' in sys.modules)")
    script = Script(
        command=(str(tmp_path / "script.py"),),
        num_workers=num_workers,
        environment={"PACELINE_WARM": warm},
        links=None,
        timeout_s=120,
    )
    for label in ("straight", "again"):
        prepare_script_directory(script, tmp_path / label)
        end = start_script(script, tmp_path / label, label)
        assert end.code == 0, end.tail()
        assert end.output.read_text().count(f"loaded {warm == '1'}") == num_workers, end.tail()


def test_a_script_that_is_killed_ends_with_its_signal(tmp_path: Path) -> None:
    """The code is that of a new interpreter: minus the signal."""
    (tmp_path / "script.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    script = Script(
        command=(str(tmp_path / "script.py"),),
        num_workers=1,
        environment={},
        links=None,
        timeout_s=120,
    )
    prepare_script_directory(script, tmp_path / "run")
    assert start_script(script, tmp_path / "run", "straight").code == -9
