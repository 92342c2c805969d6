"""A few rounds of each campaign; `make faults` runs the whole counts."""

import subprocess
import sys
from pathlib import Path

import pytest
from fault_lab.library import NoCompilerError, build_library
from fault_lab.machines import has_namespaces

NEEDS_NAMESPACES = pytest.mark.skipif(
    not has_namespaces(), reason="NOT TESTED: needs root and network namespaces"
)
PROGRAM = Path(__file__).with_name("campaign.py")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("kill", 1),
        pytest.param("kill", 4, marks=pytest.mark.slow),
        pytest.param("failure", 7, marks=pytest.mark.slow),
        pytest.param("failure", 11, marks=pytest.mark.slow),
        pytest.param("power", 1, marks=pytest.mark.slow),
        pytest.param("node", 0, marks=[NEEDS_NAMESPACES, pytest.mark.slow]),
        pytest.param("node", 3, marks=[NEEDS_NAMESPACES, pytest.mark.slow]),
    ],
)
def test_a_round_ends_as_undisturbed(kind: str, number: int, tmp_path: Path) -> None:
    try:
        build_library()
    except NoCompilerError as error:
        pytest.skip(str(error))
    command = [sys.executable, PROGRAM, "--repeat", kind, str(number), "--directory", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"| {kind} | 1 |" in ended.stdout
