"""Checks of a home's small files: identity, token, keys, secrets, pools and address."""

from collections.abc import Collection
from pathlib import Path

import msgspec
from sqlalchemy import Connection, select

from paceline._checked_secrets import DamagedSecretError, read_secret
from paceline._regular_files import read_regular
from paceline._sealed_json import check_seal
from paceline.master._home_directory import RESTORING_NAME
from paceline.master.starters import POOL_FILE, read_pool_definitions
from paceline.master.store import tables
from paceline.master.upkeep._check_findings import Finding, Report
from paceline.messages.states import ExperimentState
from paceline.runner import SECRET_FILE_NAME, SecretFileError, read_secret_file

_STARTS = "the master makes a new one when it starts"
_SECRETS = {
    "token": f"{_STARTS}: sign in again, and copy it where it is used",
    "attempt_key": f"{_STARTS}: attempts that run are lost, and their trials go on in other ones",
}
_FORK = "fork the experiment with its secrets"


def check_small_files(
    home: Path, connection: Connection, report: Report, *, without: Collection[str]
) -> None:
    """Look at the files of a home that are read as a whole, without those that are no files."""

    def tell(name: str, problem: str, hint: str) -> None:
        if name not in without:
            report(Finding(kind="home", where=name, problem=problem, hint=hint))

    if (home / RESTORING_NAME).exists():
        tell(RESTORING_NAME, "is there: a restore was cut off", "run `paceline restore` once more")
    # A restored home has neither, until a master starts.
    has_any = any((home / name).exists() for name in _SECRETS)
    for name, hint in _SECRETS.items():
        problem = _secret_problem(home / name) if has_any else None
        if problem is not None:
            tell(name, problem, hint)
    problem = _identity_problem(home / "cluster_id", connection)
    if problem is not None:
        tell("cluster_id", problem, "the master mends it when it starts")
    if SECRET_FILE_NAME not in without:
        _check_secrets(home / SECRET_FILE_NAME, connection, report)
    if POOL_FILE not in without and (home / POOL_FILE).exists():
        try:
            read_pool_definitions(home / POOL_FILE)
        except ValueError as error:
            problem = f"cannot be used ({str(error).partition(chr(10))[0].rstrip('.')})"
            tell(POOL_FILE, problem, "put the pools there again, or move it away")
    try:
        if (home / "master.json").exists():
            msgspec.json.decode(check_seal(read_regular(home / "master.json")))
    except (msgspec.DecodeError, OSError):
        hint = "start the master again; programs do not find it until then"
        tell("master.json", "is damaged", hint)


def _secret_problem(path: Path) -> str | None:
    try:
        return None if read_secret(path) else "is empty"
    except FileNotFoundError:
        return "is missing"
    except DamagedSecretError:
        return "is damaged"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _identity_problem(path: Path, connection: Connection) -> str | None:
    meta = tables.meta.c
    stored = connection.scalar(select(meta.value).where(meta.key == "cluster_id"))
    try:
        found = read_regular(path).decode(errors="replace").strip()
    except FileNotFoundError:
        return None if stored is None else "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not found:
        return "is empty"
    return None if found == stored or stored is None else "has another identity than the database"


def _check_secrets(path: Path, connection: Connection, report: Report) -> None:
    """Compare the secrets with the experiments that have not ended and need some."""
    try:
        known = read_secret_file(path)
    except SecretFileError:
        hint = f"move it away, and {_FORK}"
        report(Finding(kind="home", where=path.name, problem="is damaged", hint=hint))
        return
    experiments = tables.experiments.c
    query = select(experiments.id, experiments.config).where(
        experiments.state.not_in([state.value for state in ExperimentState if state.is_terminal])
    )
    for experiment_id, config in connection.execute(query.order_by(experiments.id)):
        environment = config.get("environment") or {}
        missing = sorted(
            set(environment.get("secrets") or ()) - known.get(experiment_id, {}).keys()
        )
        if missing:
            problem = f"lacks {', '.join(missing)} of experiment {experiment_id}"
            report(Finding(kind="home", where=path.name, problem=problem, hint=_FORK))
