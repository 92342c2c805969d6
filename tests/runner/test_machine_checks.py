"""Checks of a machine by its runner."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from paceline._base import machine_checks
from paceline._base.machine_checks import MachineWatch, check_devices, check_memory

# Each in the place of torch: one hangs, one adds up wrongly.
HANGS = "import time\ntime.sleep(1000)\n"
WRONG = """
import os, sys
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.dirname(__file__))]
del sys.modules["torch"]
import torch
product = torch.Tensor.__matmul__
def wrong(a, b):
    c = product(a, b)
    c[17, 3] += 1
    return c
torch.Tensor.__matmul__ = wrong
"""


def put_torch(source: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a module in the place of torch, for the processes of checks."""
    (place / "torch").mkdir()
    (place / "torch" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(str(place))


def test_the_digest_is_that_of_the_exact_product() -> None:
    """Whole numbers below 2**24 are exact in float32, in any order of addition."""
    numbers = (np.arange(512 * 512) % 7).reshape(512, 512)
    exact = (numbers @ numbers).astype(np.float32)
    assert exact.max() < 2**24
    assert hashlib.sha256(exact.tobytes()).hexdigest() == machine_checks._PRODUCT


@pytest.mark.long
def test_a_healthy_machine_has_no_problem(tmp_path: Path) -> None:
    """No problem, and no file is left."""
    assert MachineWatch(tmp_path, 60.0).find_problem() == ""
    assert list(tmp_path.iterdir()) == []
    assert check_memory().level == "ok"


def test_a_check_that_hangs_ends_and_counts_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that hangs is named."""
    put_torch(HANGS, tmp_path, monkeypatch)
    problem = MachineWatch(tmp_path, 60.0).find_problem(limit_s=2.0)
    # On a busy machine, the other checks may need more as well.
    assert "torch: no answer within 2 s" in problem.split("; "), f"{problem=}"


def test_a_machine_that_computes_wrongly_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number of a product is wrong."""
    put_torch(WRONG, tmp_path, monkeypatch)
    problem = MachineWatch(tmp_path, 60.0).find_problem()
    assert problem.startswith("Arithmetic: a product of matrices has another digest"), f"{problem=}"


def test_a_disk_without_room_and_a_gpu_that_cannot_be_used_are_problems(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk and an error of NVML."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("NOT TESTED: a GPU in trouble needs a C compiler")
    source_text = """
    int nvmlInitWithFlags(unsigned flags) { return 0; }
    int nvmlShutdown(void) { return 0; }
    int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
    int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { return 15; }
    int nvmlSystemGetDriverVersion(char *text, unsigned size) { text[0] = 0; return 0; }
    """
    source = tmp_path / "lost.c"
    source.write_text(source_text)
    command = [compiler, "-shared", "-fPIC", "-o", str(tmp_path / "libnvidia-ml.so.1"), str(source)]
    subprocess.run(command, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    problem = MachineWatch(small_disk, 60.0).find_problem()
    assert "GPU 0 cannot be used: GPU is lost" in problem, f"{problem=}"
    assert f"Directory: {small_disk}: 0.0 GiB free" in problem, f"{problem=}"


@pytest.mark.long
def test_each_part_stands_back_behind_trials(tmp_path: Path) -> None:
    """The processes of a check are niced."""
    program = "import json, os\nprint(json.dumps({'nice': os.nice(0)}))\n"
    found = machine_checks._answer(program, 60.0, niceness=10)
    assert found["nice"] == 10, f"{found=}"
    assert [one.level for one in check_devices(niceness=10)][1] == "ok"
