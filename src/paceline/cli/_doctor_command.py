"""Command `paceline doctor`: what this machine offers to trainings, and what to mend."""

import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

from paceline._base.gpus import NO_DRIVER, ask_gpu_program
from paceline.cli._console_output import print_list
from paceline.cli._options_and_errors import chosen_master, connect, home_of

_PROBLEM_FOUND = 1
_LIMIT_S = 10.0
# On a busy machine, the import of torch from a network disk takes minutes.
_TORCH_LIMIT_S = 120.0
_LEAST_GIB, _FEW_GIB = 1.0, 10.0
_SLOW_SYNC_S = 0.1
_MAX_CLOCK_OFFSET_S = 5.0
_PORT = 8080
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_FAILURES = (OSError, ValueError, IndexError, subprocess.SubprocessError)


class Finding(NamedTuple):
    """Result of a check: `level` is ok, warning or problem, and `hint` says what to do."""

    name: str
    detail: str
    level: str = "ok"
    hint: str = ""


def doctor() -> None:
    """Check this machine: Python, torch, GPUs, clusters, disks, ports, packages and the master.

    Each check is ok, a warning or a problem, with what to do. A check that hangs is ended. The exit
    code is 1 if there is a problem.
    """
    from rich.text import Text

    found = list(_findings())
    print_list(
        [finding._asdict() for finding in found],
        ["Level", "Check", "Detail"],
        [
            (
                Text(finding.level, style=_STYLES[finding.level]),
                finding.name,
                finding.detail + (f"\nHint: {finding.hint}" if finding.hint else ""),
            )
            for finding in found
        ],
    )
    if any(finding.level == "problem" for finding in found):
        raise typer.Exit(_PROBLEM_FOUND)


def _findings() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    paceline = importlib.metadata.version("paceline")
    yield Finding("Python", f"{version} ({sys.executable}), Paceline {paceline}")
    yield from check_devices()
    yield from _check_clusters()
    yield check_directory("Run directory", Path("paceline_runs"))
    yield check_directory("Home", home_of(None))
    yield from _check_network()
    yield from _check_packages()
    yield _check_master()


def _answer(program: str, limit_s: float, *arguments: str) -> dict[str, Any]:
    """Return the JSON that a Python program prints last, in a process of its own.

    Raises:
        subprocess.TimeoutExpired: It hangs, and was killed.
        Exception: Another one of `_FAILURES`.
    """
    # Module path of this process for the child: both find the same packages.
    start = "import sys; sys.path[:] = sys.argv.pop(1).split(':')\n"
    command = [sys.executable, "-c", start + program, ":".join(sys.path), *arguments]
    told = ask_gpu_program(command, None, limit_s=limit_s)
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


def _reason(error: Exception) -> str:
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
_TORCH_PROGRAM = """
import json, os
if sys.argv[1:]:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
import torch
has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
print("\\n" + json.dumps({
    "version": torch.__version__,
    "build": torch.version.cuda and f"CUDA {torch.version.cuda}" or torch.version.hip
        and f"ROCm {torch.version.hip}" or "for CPUs",
    "num_gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
}))
"""


def check_devices(driver_limit_s: float = _LIMIT_S) -> Iterator[Finding]:
    """Yield findings about the NVIDIA driver, torch and NCCL.

    Args:
        driver_limit_s: Seconds after which the driver counts as hung.
    """
    num_gpus, hangs = 0, False
    try:
        found = _answer(_DRIVER_PROGRAM, driver_limit_s)
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
    except _FAILURES as error:
        if getattr(error, "returncode", None) == NO_DRIVER:
            yield Finding("GPU driver", "no NVIDIA driver")
        else:
            yield Finding("GPU driver", _reason(error), "problem", "look at `nvidia-smi`.")
    try:
        # Torch would wait for a driver that hangs.
        torch = _answer(_TORCH_PROGRAM, _TORCH_LIMIT_S, *["without GPUs"] * hangs)
    except _FAILURES as error:
        yield Finding("torch", _reason(error), "problem", "pip install --force-reinstall torch")
        return
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


def _check_clusters() -> Iterator[Finding]:
    ray = _installed_version("ray")
    yield Finding("Ray", ray or "not installed; only the back end `ray` needs it")
    if shutil.which("sinfo") is None:
        yield Finding("Slurm", "not here")
        return
    try:
        version = ask_gpu_program(["sinfo", "--version"], None, limit_s=_LIMIT_S).strip()
        ask_gpu_program(["sinfo", "--noheader", "--summarize"], None, limit_s=_LIMIT_S)
        yield Finding("Slurm", version)
    except _FAILURES as error:
        hint = "ask its controller: `scontrol ping`."
        yield Finding("Slurm", f"sinfo fails: {_reason(error)}", "problem", hint)


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


def check_directory(name: str, directory: Path) -> Finding:
    """Return how the disk of a directory stands: space, locks, fsync and its clock."""
    place = directory.absolute()
    # A missing directory is made below the nearest one that exists.
    while not place.is_dir():
        place = place.parent
    try:
        disk = _answer(_DISK_PROGRAM, _LIMIT_S, str(place))
    except _FAILURES as error:
        hint = "it must be writable, with locks (flock): choose another directory."
        return Finding(name, f"{place} cannot be used: {_reason(error)}", "problem", hint)
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


def _check_network() -> Iterator[Finding]:
    from paceline.cli._master_process import is_port_free, running_master

    host = socket.gethostname()
    try:
        yield Finding("Host", f"{host} is {socket.gethostbyname(host)}")
    except OSError as error:
        hint = "several machines need it: add the name to DNS or /etc/hosts."
        yield Finding("Host", f"{host} has no address ({error})", "warning", hint)
    if is_port_free(_PORT) or running_master(home_of(None)) is not None:
        yield Finding("Port", f"{_PORT} is free, or used by the master of this home")
    else:
        hint = "start the master with `paceline up --port 0`."
        yield Finding("Port", f"{_PORT} is taken by another program", "warning", hint)


def _check_packages() -> Iterator[Finding]:
    optional, wrong = {}, []
    for text in importlib.metadata.requires("paceline") or ():
        name, bound, marker = re.split(r"(?=[<>=!~;\[ ])", text, maxsplit=1)[0], text, text
        version, is_optional = _installed_version(name), "extra ==" in marker
        least = re.search(r">=([0-9.]+)", bound)
        if version is None:
            wrong += [] if is_optional else [f"{name} is missing"]
        elif least and _release(version) < _release(least[1]):
            wrong.append(f"{name} {version} is older than {least[1]}")
        elif is_optional and not re.search("extra == '(dev|test)'", marker):
            optional[name] = version
    shown = ", ".join(f"{name} {version}" for name, version in sorted(optional.items()))
    yield Finding("Optional", shown or "no optional packages")
    if wrong:
        hint = "pip install --upgrade paceline"
        yield Finding("Packages", "; ".join(dict.fromkeys(wrong)), "problem", hint)


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3]]


def _check_master() -> Finding:
    from paceline.cli._master_process import running_master
    from paceline.client._http_session import MASTER_VARIABLE, ClientError

    is_named = chosen_master.get() or os.environ.get(MASTER_VARIABLE)
    if not is_named and running_master(home_of(None)) is None:
        return Finding("Master", "none runs in this home; `paceline up` starts one")
    try:
        with connect() as client:
            status = client.status()
            detail = f"{client.url}, version {status.version}"
    except ClientError as error:
        problem, _, hint = str(error).partition(" Hint: ")
        return Finding("Master", problem, "problem", hint or "check the address and the token.")
    if status.problems:
        detail = f"{detail}. {' '.join(status.problems)}"
        return Finding("Master", detail, "warning", "see `paceline status`.")
    return Finding("Master", detail)
