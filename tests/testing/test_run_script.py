"""A script that is watched while it runs."""

import sys
from pathlib import Path

from paceline.testing._verify_resume import Script, prepare_script_directory, start_script

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
