"""Command `paceline doctor`: what this machine offers to trainings, and what to mend."""

import importlib.metadata
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from paceline._base.gpus import ask_gpu_program
from paceline._base.machine_checks import (
    FAILURES,
    LIMIT_S,
    Finding,
    check_devices,
    check_directory,
    failure_reason,
)
from paceline.cli._console_output import print_list
from paceline.cli._options_and_errors import chosen_master, connect, home_of

_PROBLEM_FOUND = 1
_PORT = 8080
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


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


def _check_clusters() -> Iterator[Finding]:
    ray = _installed_version("ray")
    yield Finding("Ray", ray or "not installed; only the back end `ray` needs it")
    if shutil.which("sinfo") is None:
        yield Finding("Slurm", "not here")
        return
    try:
        version = ask_gpu_program(["sinfo", "--version"], None, limit_s=LIMIT_S).strip()
        ask_gpu_program(["sinfo", "--noheader", "--summarize"], None, limit_s=LIMIT_S)
        yield Finding("Slurm", version)
    except FAILURES as error:
        hint = "ask its controller: `scontrol ping`."
        yield Finding("Slurm", f"sinfo fails: {failure_reason(error)}", "problem", hint)


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
