"""Checks of a machine: driver, torch, a product of matrices, disks and memory."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from paceline._base.gpus import NO_DRIVER, ask_gpu_program

logger = logging.getLogger(__name__)

LIMIT_S = 10.0
# On a busy machine, the import of torch from a network disk takes minutes.
_TORCH_LIMIT_S = 120.0
_LEAST_GIB, _FEW_GIB = 1.0, 10.0
_SLOW_SYNC_S = 0.1
_LEAST_MEMORY_MIB = 128
_MAX_CLOCK_OFFSET_S = 5.0
FAILURES = (OSError, ValueError, IndexError, subprocess.SubprocessError)


class Finding(NamedTuple):
    """Result of a check: `level` is ok, warning or problem, and `hint` says what to do."""

    name: str
    detail: str
    level: str = "ok"
    hint: str = ""


def _answer(program: str, limit_s: float, *arguments: str, niceness: int = 0) -> dict[str, Any]:
    """Return the JSON that a Python program prints last, in a process of its own.

    Raises:
        subprocess.TimeoutExpired: It hangs, and was killed.
        Exception: Another one of `FAILURES`.
    """
    # Module path of this process for the child: both find the same packages.
    start = f"import os, sys; os.nice({niceness}); sys.path[:] = sys.argv.pop(1).split(':')\n"
    command = [sys.executable, "-c", start + program, ":".join(sys.path), *arguments]
    told = ask_gpu_program(command, None, limit_s=limit_s)
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


def failure_reason(error: Exception) -> str:
    """Return the last line that a failed program wrote, or the error's own text."""
    lines = str(getattr(error, "stderr", None) or "").strip().splitlines()
    return lines[-1] if lines else str(error)


_DRIVER_PROGRAM = f"""
import json, pynvml
from paceline._base.gpus import Nvml
problems = []
try:
    nvml = Nvml(problems)
except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
    sys.exit({NO_DRIVER})
driver, gpus = pynvml.nvmlSystemGetDriverVersion(), [gpu.name() for gpu in nvml.gpus]
print("\\n" + json.dumps({{"driver": str(driver), "gpus": gpus, "problems": problems}}))
"""
# Digest of a product whose numbers are exact, in whatever order they are added.
_PRODUCT = "767038b2ffa8c413c84bb2625e3d057a978be2973a9e1b9ae0d760bf71319424"
_TORCH_PROGRAM = """
import json, os
if sys.argv[1:]:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
import hashlib, torch
torch.set_num_threads(1)
numbers = (torch.arange(512 * 512) % 7).reshape(512, 512).float()
product = (numbers @ numbers).numpy().tobytes()
has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
print("\\n" + json.dumps({
    "version": torch.__version__,
    "build": torch.version.cuda and f"CUDA {torch.version.cuda}" or torch.version.hip
        and f"ROCm {torch.version.hip}" or "for CPUs",
    "num_gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    "product": hashlib.sha256(product).hexdigest(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
}))
"""


def check_devices(
    driver_limit_s: float = LIMIT_S, torch_limit_s: float = _TORCH_LIMIT_S, niceness: int = 0
) -> Iterator[Finding]:
    """Yield findings about the NVIDIA driver, torch, its arithmetic and NCCL.

    Args:
        driver_limit_s: Seconds after which the driver counts as hung.
        torch_limit_s: The same of torch.
        niceness: How far the checks stand back behind other processes.
    """
    num_gpus, hangs = 0, False
    try:
        found = _answer(_DRIVER_PROGRAM, driver_limit_s, niceness=niceness)
        num_gpus = len(found["gpus"])
        detail = f"{found['driver']}, {', '.join(found['gpus']) or 'no GPUs'}"
        if found["problems"]:
            hint = "look at `nvidia-smi` and `dmesg`; a GPU that fell off the bus needs a restart."
            detail = f"{detail}. {' '.join(found['problems'])}"
            yield Finding("GPU driver", detail, "problem", hint)
        else:
            yield Finding("GPU driver", detail)
    except subprocess.TimeoutExpired:
        hangs = True
        hint = "look at `dmesg`, and restart the machine; trainings would hang, too."
        yield Finding("GPU driver", f"no answer within {driver_limit_s:g} s", "problem", hint)
    except FAILURES as error:
        if getattr(error, "returncode", None) == NO_DRIVER:
            yield Finding("GPU driver", "no NVIDIA driver")
        else:
            yield Finding("GPU driver", failure_reason(error), "problem", "look at `nvidia-smi`.")
    try:
        # Torch would wait for a driver that hangs.
        hide = ["without GPUs"] * hangs
        torch = _answer(_TORCH_PROGRAM, torch_limit_s, *hide, niceness=niceness)
    except subprocess.TimeoutExpired:
        hint = "look at the disk from which it is loaded."
        yield Finding("torch", f"no answer within {torch_limit_s:g} s", "problem", hint)
        return
    except FAILURES as error:
        hint = "pip install --force-reinstall torch"
        yield Finding("torch", failure_reason(error), "problem", hint)
        return
    if torch["product"] != _PRODUCT:
        detail = "a product of matrices has another digest than on other machines"
        yield Finding("Arithmetic", detail, "problem", "test the memory and the processor.")
    detail = f"{torch['version']}, built {torch['build']}, {torch['num_gpus']} GPUs in use"
    if torch["num_gpus"] < num_gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
        hint = "install a build for the driver's CUDA version, see pytorch.org."
        yield Finding("torch", f"{detail} of {num_gpus}", "problem", hint)
    else:
        yield Finding("torch", detail)
    if torch["nccl"] or torch["num_gpus"] < 2:
        yield Finding("NCCL", torch["nccl"] or "not in this build of torch")
    else:
        yield Finding("NCCL", "not in this build", "problem", "several GPUs need it.")


_DISK_PROGRAM = """
import fcntl, json, os, tempfile, time
with tempfile.NamedTemporaryFile(dir=sys.argv[1], prefix=".paceline-doctor-") as file:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    times = []
    for _ in range(5):
        file.write(b"x" * 4096)
        file.flush()
        times.append(-time.monotonic())
        os.fsync(file.fileno())
        times[-1] += time.monotonic()
    offset_s = os.stat(file.name).st_mtime - time.time()
disk = os.statvfs(sys.argv[1])
free = disk.f_bavail * disk.f_frsize / 2**30
print(json.dumps({"free_gib": free, "sync_s": sorted(times)[2], "offset_s": offset_s}))
"""


def check_directory(
    name: str, directory: Path, limit_s: float = LIMIT_S, niceness: int = 0
) -> Finding:
    """Return how the disk of a directory stands: space, locks, fsync and its clock."""
    place = directory.absolute()
    # A missing directory is made below the nearest one that exists.
    while not place.is_dir():
        place = place.parent
    try:
        disk = _answer(_DISK_PROGRAM, limit_s, str(place), niceness=niceness)
    except FAILURES as error:
        hint = "it must be writable, with locks (flock): choose another directory."
        return Finding(name, f"{place} cannot be used: {failure_reason(error)}", "problem", hint)
    detail = f"{place}: {disk['free_gib']:,.1f} GiB free, fsync {disk['sync_s'] * 1000:.1f} ms"
    if abs(disk["offset_s"]) > _MAX_CLOCK_OFFSET_S:
        detail = f"{detail}, its clock is {disk['offset_s']:+.1f} s off"
        return Finding(name, detail, "problem", "synchronise this machine and its file server.")
    if disk["free_gib"] < _FEW_GIB:
        level = "problem" if disk["free_gib"] < _LEAST_GIB else "warning"
        return Finding(name, detail, level, "make room: `paceline runs prune --keep 20`.")
    if disk["sync_s"] > _SLOW_SYNC_S:
        return Finding(name, detail, "warning", "a local disk stores checkpoints sooner.")
    return Finding(name, detail)


def check_memory() -> Finding:
    """Return how much memory processes can still get; unknown where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return Finding("Memory", "unknown")
    known = {name: words.split() for name, _, words in (line.partition(":") for line in lines)}
    free = int(known["MemAvailable"][0]) >> 10
    if free < _LEAST_MEMORY_MIB:
        hint = "`ps aux --sort=-rss` shows who has the rest."
        return Finding("Memory", f"{free} MiB are left", "problem", hint)
    return Finding("Memory", f"{free} MiB are left")


# Trials come first; a machine in full use takes long all the same.
_NICENESS = 10
_PATIENCE_S = 600.0
# A machine that failed is looked at again soon, as it may be mended.
_AGAIN_S = 60.0
_FIRST = "its first check is not over"


class MachineWatch:
    """Check of this machine at the start and from time to time, in a thread of its own.

    Args:
        directory: Where the machine must be able to write.
        every_s: Seconds between two checks; 0 is no check at all.
    """

    def __init__(self, directory: Path, every_s: float) -> None:
        self._directory = directory
        self._every_s = every_s
        self.problem = _FIRST if every_s else ""
        self.is_checking = bool(every_s)

    def start(self) -> None:
        """Begin."""
        if self._every_s:
            threading.Thread(target=self._run, name="checks", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.is_checking = True
            try:
                problem = self.find_problem()
            except Exception as error:
                logger.exception("A check of this machine failed.")
                problem = f"its check failed: {type(error).__name__}"
            if problem and problem != self.problem:
                logger.warning("This node takes no new trials: %s.", problem)
            elif not problem and self.problem not in ("", _FIRST):
                logger.info("This node takes trials again: a check has passed.")
            self.problem, self.is_checking = problem, False
            time.sleep(min(self._every_s, _AGAIN_S) if problem else self._every_s)

    def find_problem(self, limit_s: float = _PATIENCE_S) -> str:
        """Return the problems found now, in words; empty without any.

        Args:
            limit_s: Seconds after which a part of the check counts as hung.
        """
        found = [
            *check_devices(limit_s, limit_s, _NICENESS),
            check_directory("Directory", self._directory, limit_s, _NICENESS),
            check_memory(),
        ]
        return "; ".join(f"{one.name}: {one.detail}" for one in found if one.level == "problem")
