"""Environment of a run's process: packages, sources, GPUs, determinism."""

import logging
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import paceline
from paceline.core._heartbeats_and_live_reports import _heartbeats

# Limit for recorded uncommitted changes: a diff may be arbitrarily large.
MAX_DIFF_BYTES = 100_000
DIFF_VARIABLE = "PACELINE_RECORD_DIFF"

# git may hang on a network file system; a record without its answer does.
_GIT_LIMIT_S = 5.0
_NVIDIA = Path("/proc/driver/nvidia")
_AMD_DRIVER = Path("/sys/module/amdgpu/version")


def describe_environment(*, with_source: bool) -> dict[str, Any]:
    """Return this process's environment (interpreter, host, packages, GPUs, source) as JSON data.

    Variables are left out, as they may be secret.

    Args:
        with_source: Whether to record the git repository that the process works in.
    """
    machine = os.uname()
    # `platform` has the same facts, but takes a tenth of a second.
    found: dict[str, Any] = {
        "paceline": paceline.__version__,
        "python": {
            "version": sys.version.split()[0],
            "implementation": sys.implementation.name,
            "executable": sys.executable,
        },
        "host": {
            "name": machine.nodename,
            "platform": f"{machine.sysname} {machine.release} {machine.machine}",
            "num_cores": os.cpu_count(),
        },
        "packages": _environment_packages(tuple(sys.path)),
        "start": _start(),
    }
    if gpus := _environment_gpus():
        found["gpus"] = gpus
    if with_source and (source := describe_source(Path.cwd())) is not None:
        found["source"] = source
    return found


def _start() -> str:
    """Return whether this process is a fork of a template, or why not."""
    template = sys.modules.get("paceline._training.workers.processes.template_process")
    if getattr(template, "is_fork", False):
        return "warm"
    reason = os.environ.get("PACELINE_FRESH_START")
    return f"fresh, as {reason}" if reason else "fresh"


def describe_source(directory: Path) -> dict[str, Any] | None:
    """Return the commit of a directory and its uncommitted changes; None without git.

    Changes beyond `MAX_DIFF_BYTES` are cut off. PACELINE_RECORD_DIFF=0 leaves all of them out.
    """
    directory = directory.absolute()
    if not any((one / ".git").exists() for one in (directory, *directory.parents)):
        return None
    deadline = time.monotonic() + _GIT_LIMIT_S
    try:
        # Single request for nearly all facts: the script waits for each git process.
        status = _run_git(
            directory, deadline, "status", "--porcelain=v2", "--branch", "--untracked-files=all",
            "--no-renames", "--", ".",
        )  # fmt: skip
        lines = [line.split(" ") for line in status.decode(errors="replace").splitlines()]
        kinds = [line[0] for line in lines]
        head = {line[1]: line[2] for line in lines if line[0] == "#"}
        if head["branch.oid"] == "(initial)":
            return None
        has_changes = "1" in kinds or "u" in kinds
        changes = ("diff", "HEAD", "--no-ext-diff", "--no-color", "--", ".")
        diff = _run_git(directory, deadline, *changes) if has_changes else b""
    except (OSError, subprocess.SubprocessError):
        # No git here, or one that takes too long.
        return None
    found: dict[str, Any] = {
        "commit": head["branch.oid"],
        "branch": None if head["branch.head"] == "(detached)" else head["branch.head"],
        "num_diff_bytes": len(diff),
        "num_untracked_files": kinds.count("?"),
    }
    if diff and os.environ.get(DIFF_VARIABLE) != "0":
        found["diff"] = diff[:MAX_DIFF_BYTES].decode(errors="replace")
    return found


def _run_git(directory: Path, deadline: float, *arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-c", "core.fsmonitor=false", *arguments],  # noqa: S607 # the user's own
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=max(0.0, deadline - time.monotonic()),
        check=True,
        # No optional locks: a status query must not disturb git commands of the user.
        env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
    ).stdout


@cache
def _environment_packages(paths: tuple[str, ...]) -> dict[str, str]:
    """Return the installed packages with their versions, by the names of their directories.

    Reading their metadata takes a hundred times as long.
    """
    found: dict[str, str] = {}
    for path in paths:
        try:
            names = os.listdir(path or ".")
        except OSError:
            continue
        for name in names:
            stem, _, kind = name.rpartition(".")
            if kind in ("dist-info", "egg-info"):
                package, _, version = stem.partition("-")
                # The first place is the one that imports find.
                found.setdefault(package.replace("_", "-").lower(), version.split("-")[0])
    return dict(sorted(found.items()))


@cache
def _environment_gpus() -> dict[str, Any]:
    """Return the driver and the models of this machine's GPUs, as the kernel reports them."""
    found: dict[str, Any] = {}
    try:
        lines = (_NVIDIA / "version").read_text().splitlines()
        words = lines[0].split()
        # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar ..."
        found["driver"] = next(word for word in words if word.count(".") and word[0].isdigit())
        found["models"] = [
            line.partition(":")[2].strip()
            for path in sorted((_NVIDIA / "gpus").glob("*/information"))
            for line in path.read_text().splitlines()
            if line.startswith("Model:")
        ]
    except (OSError, IndexError, StopIteration):
        found = {}
    if not found and _AMD_DRIVER.exists():
        try:
            found["driver"] = f"amdgpu {_AMD_DRIVER.read_text().strip()}"
        except OSError:
            return {}
    return found


DETERMINISM_VARIABLE = "PACELINE_DETERMINISTIC"

_MODES = ("1", "warn")


def apply_determinism() -> None:
    """Apply PACELINE_DETERMINISTIC to torch; do nothing if unset.

    With "1" an operation that has no deterministic implementation raises, with "warn" it warns
    and continues.

    Raises:
        ValueError: The variable has another value.
    """
    mode = os.environ.get(DETERMINISM_VARIABLE)
    if not mode:
        return
    if mode not in _MODES:
        raise ValueError(f"{DETERMINISM_VARIABLE} must be one of {_MODES}, but got {mode!r}.")
    # Read when the first handle is made, so that it comes early enough here.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.backends.cudnn.benchmark = False
    # Unlike `use_deterministic_algorithms` this does not load torch's compiler.
    torch.set_deterministic_debug_mode("warn" if mode == "warn" else "error")


logger = logging.getLogger(__name__)


# Fork copies the list of runs without its thread, and the lock in any state.
os.register_at_fork(after_in_child=lambda: _heartbeats.forget())
