"""One contract for all pools, each in a process of its own."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = Path(__file__).with_name("pool_contract.py")
_LAUNCHER = ["-m", "paceline.launch.torch_distributed", "--nproc-per-node=2"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["inline", "forked", "new", "joined", "ray"])
def test_a_pool_keeps_the_contract(
    kind: str, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    if kind == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("NOT TESTED: Ray is not installed")
    start = _LAUNCHER if kind == "joined" else []
    result = subprocess.run(
        [sys.executable, *start, str(_PROGRAM), kind],
        cwd=tmp_path,
        env=clean_environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("kept") == (2 if kind == "joined" else 1)
