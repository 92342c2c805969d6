"""Process of a run: environment, cluster facts, determinism, heartbeats, live reports."""

import logging
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import paceline
from paceline._base.gpus import machine_gpus, names_in_variable
from paceline._base.run_directory import RUN_DIRECTORY_VARIABLE, RunDirectory, RunInfo, TrialInfo

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfo:
    """Facts of this process's attempt: ids, slots, nodes and trial.

    Attributes:
        cluster_id: The master's identity; empty when the trial runs without one.
        agent_id: The node's name within the cluster.
        slot_ids: The slots that the attempt holds on this node.
        task_id: The trial's run, the same in all its attempts.
        allocation_id: The id of this attempt.
        task_type: "TRIAL".
        latest_checkpoint: The UUID of the checkpoint to restore, or None.
        user_data: The config's `data`.
        container_addrs: The addresses of the attempt's nodes.
        container_slot_counts: The number of slots on each of them.
        container_rank: This node's place among them.
        trial: The trial's ids, seed, hyperparameters and config.
    """

    cluster_id: str
    agent_id: str
    slot_ids: list[int]
    task_id: str
    allocation_id: str
    task_type: str
    latest_checkpoint: str | None
    user_data: Any
    container_addrs: list[str]
    container_slot_counts: list[int]
    container_rank: int
    trial: TrialInfo

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            """Raise AttributeError, with a hint for attributes of the trial."""
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in TrialInfo.__struct_fields__:
                text += f". Hint: `get_cluster_info().trial.{name}`"
            raise AttributeError(text, name=name, obj=self)

    @property
    def gpu_uuids(self) -> list[str]:
        """The UUIDs of the attempt's GPUs on this node; empty if no driver reports UUIDs.

        For a device of a GPU that is divided by MIG, it is the UUID of the device.
        """
        # A slot need not be the GPU of the same number: a master may have been given some of them.
        held = names_in_variable()
        if held is None:
            held = [str(slot) for slot in self.slot_ids]
        gpus = machine_gpus() if held else []
        found = [
            # A UUID that no list contains is believed.
            next(
                (gpu.uuid for gpu in gpus if gpu.is_called(name)), "" if name.isdecimal() else name
            )
            for name in held
        ]
        return [uuid for uuid in found if uuid]


def get_cluster_info() -> ClusterInfo | None:
    """Return the facts of this process's trial, or None without a cluster.

    Raises:
        NotARunDirectoryError: PACELINE_RUN_DIR names no run directory.
        RunVersionError: That has another format version.
    """
    path = os.environ.get(RUN_DIRECTORY_VARIABLE)
    return cluster_info_of(RunDirectory(Path(path)).read_info()) if path else None


def cluster_info_of(info: RunInfo) -> ClusterInfo | None:
    """Return the cluster facts of a run's info, or None for a run without a trial."""
    if info.trial is None:
        return None
    addresses = list(info.container_addrs) or ["127.0.0.1"]
    return ClusterInfo(
        cluster_id=info.cluster_id,
        agent_id=info.agent_id,
        slot_ids=list(info.slot_ids),
        task_id=info.run_id,
        allocation_id=f"{info.run_id}.{info.attempt}",
        task_type="TRIAL",
        latest_checkpoint=info.latest_checkpoint,
        user_data=info.trial.config.get("data") or {},
        container_addrs=addresses,
        container_slot_counts=list(info.container_slot_counts)
        or [len(info.slot_ids)] * len(addresses),
        container_rank=info.container_rank,
        trial=info.trial,
    )


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

# A fraction of `HEARTBEAT_LIMIT_S`, as a file system may show a change late.
_INTERVAL_S = 10.0
# A run that is over sooner needs none.
_FIRST_S = 1.0


class _Heartbeats:
    """Heartbeats for all runs of this process, sent by a single thread.

    The thread ends when it finds no run. Runs that follow each other share it, because starting a
    thread takes long compared with an empty run.
    """

    def __init__(self) -> None:
        # Each run with the time of its next sign of life.
        self._runs: dict[RunDirectory, float] = {}
        # Reentrant: garbage collection may close a forgotten context within this thread's own hold.
        self._lock = threading.RLock()
        self._has_thread = False

    def add(self, run: RunDirectory) -> None:
        """Send heartbeats for a run until its removal."""
        with self._lock:
            # Due at once: the thread beats for a new run in its next round.
            self._runs[run] = 0.0
            if not self._has_thread:
                threading.Thread(
                    target=self._beat, name="paceline-run-heartbeats", daemon=True
                ).start()
                self._has_thread = True

    def remove(self, run: RunDirectory) -> None:
        """Give no further sign of life of a run, if this process gave some."""
        with self._lock:
            if self._runs.pop(run, None) is not None:
                run.end_heartbeat()

    def forget(self) -> None:
        """Drop all runs in a forked child: the parent process alone sends their heartbeats."""
        self._runs, self._has_thread = {}, False
        self._lock = threading.RLock()

    def _beat(self) -> None:
        while True:
            time.sleep(min(_FIRST_S, _INTERVAL_S))
            with self._lock:
                now = time.monotonic()
                for run in [run for run, due in self._runs.items() if due <= now]:
                    with suppress(OSError):
                        run.beat()
                    if run in self._runs:
                        self._runs[run] = now + _INTERVAL_S
                    else:
                        run.end_heartbeat()
                # Under the lock: a run added now starts a new thread.
                if not self._runs:
                    self._has_thread = False
                    return


_heartbeats = _Heartbeats()


@contextmanager
def sending_heartbeats(run: RunDirectory) -> Iterator[None]:
    """Give signs of life of a run within the block; a full disk is no error."""
    heartbeats = _heartbeats
    try:
        heartbeats.add(run)
        yield
    finally:
        # A forked child may come here too; it gives none, and the run continues.
        heartbeats.remove(run)


# Fork copies the list of runs without its thread, and the lock in any state.
os.register_at_fork(after_in_child=lambda: _heartbeats.forget())


REPORT_TO_VARIABLE = "PACELINE_REPORT_TO"

# Module name of the reporter: `client` stands above `core`, so no import.
_PROGRAM = "paceline.client._report_run"
# The reporter replies sooner if all is sent, or if it continues in the background.
_END_LIMIT_S = 10.0
_URL = re.compile(r"(https?://)?[A-Za-z0-9.\[\]:_-]+/?")


def master_to_report_to(given: str | None) -> str | None:
    """Return the URL of the master to report a run to; None without live reports.

    Args:
        given: The script's value; the variable PACELINE_REPORT_TO by default.

    Raises:
        TypeError: It is no text.
        ValueError: It is no URL of a master.
    """
    name = "master" if given is not None else REPORT_TO_VARIABLE
    url = os.environ.get(REPORT_TO_VARIABLE) or None if given is None else given
    if url is None:
        return None
    if not isinstance(url, str):
        raise TypeError(f"`master` must be the URL of a master, but got {url!r}.")
    if not _URL.fullmatch(url):
        raise ValueError(
            f"`{name}` must be the URL of a master, such as https://head:8080, but got {url!r}."
        )
    return url


@contextmanager
def reporting(run: RunDirectory, master: str | None) -> Iterator[Callable[[], None]]:
    """Yield a function starting the live reports of a run; leaving the block sends the rest.

    The run's lock must be taken and released within the block. A master that does not answer is
    no error: the reporter continues without the script for a while.

    Args:
        run: The run directory of this machine.
        master: The URL of the master; None reports nothing.
    """
    started: list[subprocess.Popen[bytes]] = []
    owner = os.getpid()

    def start() -> None:
        if master is not None:
            try:
                started.append(_start_live_reports(run.path, master))
            except OSError as error:
                logger.warning(
                    "The run is not reported to %s, as no process can be started (%s)."
                    " Hint: `paceline sync %s` sends it later.",
                    master,
                    error,
                    run.path,
                )

    try:
        yield start
    finally:
        # A forked child may come here too; the run continues then.
        if os.getpid() == owner:
            for process in started:
                _end_live_reports(process)


def _start_live_reports(path: Path, master: str) -> "subprocess.Popen[bytes]":
    source = str(Path(__file__).parents[2])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", _PROGRAM, str(path), master],
        # End of file at the reporter: the script has ended, in any way.
        stdin=subprocess.PIPE,
        # End of file at the script: the reporter no longer needs the script.
        stdout=subprocess.PIPE,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(paths),
            # Files of the script's directory must not stand in for modules.
            "PYTHONSAFEPATH": "1",
        },
        # Ctrl-C is for the script.
        start_new_session=True,
    )


def _end_live_reports(process: "subprocess.Popen[bytes]") -> None:
    """Let the reporter send the rest of the run, for at most 10 seconds."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    _await_end(process.stdout)
    process.stdout.close()
    # Reporter exited already: its work continues in a child, which may outlive this script.
    process.wait()


def _await_end(stream: IO[bytes]) -> None:
    deadline = time.monotonic() + _END_LIMIT_S
    while (left_s := deadline - time.monotonic()) > 0:
        readable, _, _ = select.select([stream], [], [], left_s)
        # An empty read: the other process has closed the stream.
        if readable and not os.read(stream.fileno(), 1024):
            return
