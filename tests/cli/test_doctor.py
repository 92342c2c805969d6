"""`paceline doctor`: what it finds on this machine, and on machines in trouble."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NAMES = ["Python", "GPU driver", "torch", "NCCL", "Ray", "Slurm", "Run directory", "Home"]
# A library in the place of the driver's: one function hangs, or one GPU is there.
HUNG = "#include <unistd.h>\nint nvmlInitWithFlags(unsigned flags) { return sleep(1000); }\n"
ONE_GPU = """
#include <string.h>
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = handle; return 0; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) { strcpy(text, "GPU-1"); return 0; }
int nvmlDeviceGetName(void *handle, char *text, unsigned size) { strcpy(text, "One"); return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strcpy(text, "1.2.3"); return 0; }
"""


def findings(paceline: Any, *options: str, cwd: Path, code: int | None = None) -> dict[str, Any]:
    """Return what is found by name, once the exit code was compared with the levels."""
    result = paceline(*options, "doctor", "--json", cwd=cwd, code=code)
    found = json.loads(result.stdout)
    assert all(one["hint"] for one in found if one["level"] != "ok")
    assert result.returncode == any(one["level"] == "problem" for one in found)
    assert "Traceback" not in result.stderr
    return {one["name"]: one for one in found}


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that puts a library of this source in the place of the driver's."""

    def build(source: str) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("NOT TESTED: a driver in trouble needs a C compiler")
        place = tmp_path / "driver"
        place.mkdir()
        (place / "nvml.c").write_text(source)
        target = place / "libnvidia-ml.so.1"
        command = [compiler, "-shared", "-fPIC", "-o", str(target), str(place / "nvml.c")]
        subprocess.run(command, check=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(place))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return build


@pytest.mark.long
def test_each_check_says_how_it_stands(paceline: Any, tmp_path: Path) -> None:
    found = findings(paceline, cwd=tmp_path)
    assert [name for name in found if name in NAMES] == NAMES
    assert str(tmp_path) in found["Run directory"]["detail"]
    assert found["Master"]["detail"].startswith("none runs in this home")
    text = paceline("doctor", cwd=tmp_path, code=None).stdout
    assert text.splitlines()[2].split()[:2] == ["ok", "Python"]
    assert all(name in text for name in NAMES)
    # Files of the checks are gone.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_driver_that_hangs_is_named_and_stops_no_other_check(
    paceline: Any, tmp_path: Path, driver: Callable[[str], None]
) -> None:
    driver(HUNG)
    found = findings(paceline, cwd=tmp_path, code=1)
    assert found["GPU driver"]["level"] == "problem"
    assert found["GPU driver"]["detail"] == "no answer within 10 s"
    assert found["torch"]["level"] == "ok"
    assert "Master" in found


@pytest.mark.long
def test_torch_that_sees_fewer_gpus_than_the_driver_is_a_problem(
    paceline: Any, tmp_path: Path, driver: Callable[[str], None]
) -> None:
    driver(ONE_GPU)
    found = findings(paceline, cwd=tmp_path, code=1)
    assert (found["GPU driver"]["level"], found["GPU driver"]["detail"]) == ("ok", "1.2.3, One")
    assert found["torch"]["level"] == "problem"
    assert found["torch"]["detail"].endswith("0 GPUs in use of 1")


@pytest.mark.long
def test_a_disk_without_room_and_a_dead_master_are_problems(
    paceline: Any, small_disk: Path, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "token").touch(mode=0o600)
    (tmp_path / "home" / "token").write_text("secret")
    found = findings(paceline, "--master", "http://127.0.0.1:1", cwd=small_disk, code=1)
    assert found["Run directory"]["level"] == "problem"
    assert "0.0 GiB free" in found["Run directory"]["detail"]
    assert found["Master"]["level"] == "problem"
    assert "127.0.0.1:1" in found["Master"]["detail"]


@pytest.mark.long
def test_a_directory_that_cannot_be_written_is_a_problem(
    paceline: Any,
) -> None:
    found = findings(paceline, cwd=Path("/proc"), code=1)
    assert found["Run directory"]["level"] == "problem"
    assert "/proc cannot be used" in found["Run directory"]["detail"]
