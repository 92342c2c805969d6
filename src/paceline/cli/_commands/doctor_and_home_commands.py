"""Commands `paceline backup`, `restore`, `home` and `doctor`: the home and the machine checked."""

import importlib.metadata
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from paceline._base.progress_display import format_duration
from paceline.cli import _console_output as console
from paceline.cli import _options as options
from paceline.cli._command_groups import CommandGroup
from paceline.cli._connection import chosen_master, connect
from paceline.cli._errors import CommandError, report_error

if TYPE_CHECKING:
    from paceline._cluster.master.upkeep.backup import Backup, BackupResult
    from paceline._cluster.master.upkeep.restore import RestoredAccess, RestoreResult


_DAMAGED = 3
_EVERY_S = 60.0


def backup(
    to: Annotated[
        Path, typer.Argument(help="Directory of the backups, outside the home.", metavar="TO")
    ],
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Also copy the checkpoints in the home.")
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Keep running, and make a new backup after each change. It replaces the backup"
            " before it. Ctrl-C ends the command.",
        ),
    ] = False,
    every: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="With -f: shortest time between two backups. The default is 60.",
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Keep the newest N backups in TO, and delete others."
        ),
    ] = None,
    home: options.Home = None,
    json: options.Json = False,
) -> None:
    """Back up the home of a master; the master may run meanwhile.

    A backup has the database, the logs, the uploaded code and the journals of running trials.
    Files that have not changed are shared with the backup before it. Secrets are left out.
    """
    from paceline._cluster.master.upkeep.backup import Backup

    if every is not None and not follow:
        raise CommandError("`--every` must come with `--follow`, but it is missing.")
    directory = options.home_of(home)
    made = Backup(directory, to.expanduser(), checkpoints=checkpoints)
    with made.hold():
        if follow:
            _follow_home(made, directory, every or _EVERY_S, keep, json=json)
            return
        try:
            result = made.make()
        except OSError as error:
            raise CommandError(
                f"The backup cannot be written ({error}). Earlier ones are untouched."
            ) from error
        if keep is not None:
            made.keep(keep)
    _tell_backup(result, json=json)


def _follow_home(made: "Backup", home: Path, every: float, keep: int | None, *, json: bool) -> None:

    from paceline._cluster.master.upkeep.backup import follow_home

    stop = threading.Event()
    # The signal ends the loop, not the backup under way.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    for result in follow_home(made, home, every, stop, lambda error: report_error(str(error))):
        if keep is not None:
            made.keep(keep)
        _tell_backup(result, json=json)


def _tell_backup(result: "BackupResult", *, json: bool) -> None:

    content = result.content
    if json:
        console.print_json_line(
            {
                "path": str(result.path),
                "num_files": len(content.files),
                "num_bytes": content.num_bytes,
                "num_copied": result.num_copied,
                "num_bytes_copied": result.num_bytes_copied,
                "left_out": content.left_out,
            }
        )
        sys.stdout.flush()
        return
    typer.echo(
        f"Backed up {len(content.files)} files ({console.format_bytes(content.num_bytes)}) to"
        f" {result.path}; new or changed: {result.num_copied}"
        f" ({console.format_bytes(result.num_bytes_copied)})."
    )
    if content.left_out:
        typer.echo(f"Left out: {', '.join(content.left_out)}.")


def restore(
    source: Annotated[
        Path,
        typer.Argument(
            help="Directory of backups, whose newest is taken, or one of the dated ones in it; or "
            "the copy of a database that an upgrade has kept in the home.",
            metavar="FROM",
        ),
    ],
    old_home: Annotated[
        Path | None,
        typer.Option(
            "--old-home",
            metavar="DIR",
            help="Home of before, if it is there: tokens that were revoked since the backup stay"
            " revoked, and passwords are those that it has.",
        ),
    ] = None,
    keep_tokens: Annotated[
        list[str] | None,
        typer.Option(
            "--keep-tokens",
            metavar="NAME",
            help="Without --old-home: a token that stays valid, or `all`. Can be repeated. The"
            " others are revoked.",
        ),
    ] = None,
    keep_passwords: Annotated[
        bool, typer.Option("--keep-passwords", help="Without --old-home: keep passwords.")
    ] = False,
    home: options.Home = None,
    json: options.Json = False,
) -> None:
    """Make an empty or missing home from a backup.

    All browsers are signed out. The exit code is 0 if all files are as they were backed up, and 3
    if some are damaged or missing. These are named, and the rest is restored.

    To go back to an earlier version, name the database copy that the upgrade has kept, such as
    master.version-13.sqlite. It replaces the database of its home.
    """
    from paceline._cluster.master.upkeep.restore import restore as restore_home

    if source.expanduser().is_file():
        if old_home or keep_tokens or keep_passwords:
            raise CommandError(
                "`--old-home`, `--keep-tokens` and `--keep-passwords` must come with a backup, but"
                f" {str(source)!r} is a copy of the database. Hint: leave them out; the database of"
                " its home tells what is kept."
            )
        _restore_copy(source.expanduser().absolute(), json=json)
        return
    directory = options.home_of(home)
    try:
        result = restore_home(
            source.expanduser(),
            directory,
            old_home=old_home and old_home.expanduser(),
            keep_tokens=keep_tokens or (),
            keep_passwords=keep_passwords,
        )
    except OSError as error:
        raise CommandError(
            f"The home cannot be written ({error}). Hint: once that is mended, run it again."
        ) from error
    _tell_restored(result, directory, json=json)
    if result.damaged:
        raise typer.Exit(_DAMAGED)


def _restore_copy(copy: Path, *, json: bool) -> None:
    from paceline._cluster.master.upkeep.restore import restore_copy

    moved_to, access = restore_copy(copy)
    if json:
        found = {"backup": str(copy), "home": str(copy.parent), "set_aside": str(moved_to)}
        console.print_json(found | _access_as_json(access))
        return
    typer.echo(
        f"Restored {copy.name} as the database of {copy.parent}. The newer one is in {moved_to}.\n"
        "Start the earlier version of Paceline with `paceline up --set-aside`."
    )
    _tell_access(access)


def _access_as_json(access: "RestoredAccess") -> dict[str, object]:

    return {
        "tokens": [asdict(token) for token in access.tokens],
        "voided_passwords": access.voided_passwords,
    }


def _tell_access(access: "RestoredAccess") -> None:
    """Print the tokens and passwords still valid in the restored home, and the revoked ones."""

    for is_kept, title in ((True, "Tokens that stay valid"), (False, "Tokens that are revoked")):
        found = [
            f"  {token.name} (scope {token.scope}, made"
            f" {format_duration(time.time() - token.created_at)} ago)"
            for token in access.tokens
            if token.is_kept is is_kept
        ]
        if found:
            typer.echo("\n".join((f"{title}:", *found)))
    if access.voided_passwords:
        typer.echo(
            f"Without a password until one is set again: {', '.join(access.voided_passwords)}."
        )
    if access.old_home is None and any(not token.is_kept for token in access.tokens):
        typer.echo(
            "One of them may have been revoked since the backup: make new ones with `paceline token"
            " create`."
        )


def _tell_restored(result: "RestoreResult", home: Path, *, json: bool) -> None:

    content = result.content
    if json:
        console.print_json(
            {
                "backup": str(result.path),
                "created": content.created,
                "home": str(home),
                "num_files": len(content.files),
                "left_out": content.left_out,
                "damaged": result.damaged,
                "num_lost_checkpoints": result.num_lost_checkpoints,
                **_access_as_json(result.access),
            }
        )
        return
    typer.echo(
        f"Restored {len(content.files)} files ({console.format_bytes(content.num_bytes)}) of"
        f" {console.format_moment(content.created)} into {home}."
    )
    if content.left_out:
        typer.echo(f"Not in the backup: {', '.join(content.left_out)}.")
    if result.num_lost_checkpoints:
        typer.echo(
            "Neither in the backup nor in the home, and so counted as deleted:"
            f" {result.num_lost_checkpoints} of the checkpoints."
        )
    _tell_access(result.access)
    for text in result.damaged:
        report_error(f"In the backup, {text}.")
    typer.echo("Start the master with `paceline up`.")


home_app = CommandGroup(help="Check the home of a master.")

_DIFFERENT = 1


@home_app.callback()
def _home() -> None:
    """Check the home of a master."""


@home_app.command()
def check(
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Mend what can be mended; the master must be stopped. A lost database is made"
            " from the records and journals in the home.",
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Compare sizes of checkpoints instead of their bytes.")
    ] = False,
    home: options.Home = None,
    json: options.Json = False,
) -> None:
    """Compare the database of a home with its records, code, logs, journals and checkpoints.

    The master may run or not. The exit code is 0 if there is no difference, or if all are fixed,
    and 1 otherwise.
    """
    from paceline._cluster.master.upkeep.check import check
    from paceline._cluster.master.upkeep.check import fix as fix_damage

    directory = options.home_of(home)
    result = (fix_damage if fix else check)(directory, is_quick=quick)
    if json:
        findings = [asdict(finding) for finding in result.findings]
        console.print_json(
            {"home": str(directory), "master_runs": result.master_runs, "findings": findings}
        )
    else:
        for finding in result.findings:
            typer.echo(finding.text)
        typer.echo(
            _home_summary(
                len(result.findings), result.num_left, master_runs=result.master_runs, is_fixed=fix
            )
        )
    if result.num_left:
        raise typer.Exit(_DIFFERENT)


def _home_summary(num_found: int, num_left: int, *, master_runs: bool, is_fixed: bool) -> str:
    note = " A master is at work: what has not been stored yet was not looked at." * master_runs
    if not num_found:
        return f"No differences.{note}"
    found = "1 difference" if num_found == 1 else f"{num_found} differences"
    if num_left == 0:
        return f"{found}, all fixed.{note}"
    left = "" if num_left == num_found else f", {num_left} not fixed"
    hint = "see docs/durability.md"
    if not is_fixed:
        hint = f"`--fix` mends what can be mended, {hint}"
    return f"{found}{left}. Hint: {hint}.{note}"


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
    console.print_list(
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
    yield check_directory("Home", options.home_of(None))
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
    if is_port_free(_PORT) or running_master(options.home_of(None)) is not None:
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
    if not is_named and running_master(options.home_of(None)) is None:
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
