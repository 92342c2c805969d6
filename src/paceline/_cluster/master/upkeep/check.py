"""`paceline home check`: a home's database against its files, and repairs."""

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import sqlalchemy as sa

from paceline._base.files import DamagedSecretError, read_regular, read_secret, regular_opener
from paceline._base.journal_records import check_seal
from paceline._cluster.master.home_directory import (
    RESTORING_NAME,
    Home,
    LostDatabaseError,
    check_for_lost_database,
    find_wrong_entries,
    move_lost_files_aside,
)
from paceline._cluster.master.notify.notices import NOTIFY_FILE, read_notify_file
from paceline._cluster.master.starters.pool_runners import POOL_FILE, read_pool_definitions
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Database, DatabaseVersionError
from paceline._cluster.master.store.recovery_rows import are_records_begun, note_experiment
from paceline._cluster.master.store.upgrades import copy_database, find_log_damage, open_read_only
from paceline._cluster.master.upkeep.backup_directories import DATABASE, BackupError
from paceline._cluster.master.upkeep.check_files import (
    CheckPace,
    Finding,
    Report,
    check_checkpoints,
    check_contexts,
    check_directories,
    check_journals,
    check_logs,
    check_run_files,
)
from paceline._cluster.master.upkeep.rebuild import rebuild_database
from paceline._cluster.master.upkeep.recovery_records import (
    check_records,
    mend_recorded_row,
    rows_to_mend,
    write_some,
)
from paceline._cluster.messages.states import CheckpointState, ExperimentState
from paceline._cluster.runner.attempt_directory import FILE_NAME as SECRET_FILE_NAME
from paceline._cluster.runner.attempt_directory import SecretFileError, read_secret_file

_STARTS = "the master makes a new one when it starts"
_SECRETS = {
    "token": f"{_STARTS}: sign in again, and copy it where it is used",
    "attempt_key": f"{_STARTS}: attempts that run are lost, and their trials continue in others",
}
_FORK = "fork the experiment with its secrets"


def check_small_files(
    home: Path, connection: sa.Connection, report: Report, *, without: Collection[str]
) -> None:
    """Check a home's small files, except entries of the wrong kind."""

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
    for name in (POOL_FILE, NOTIFY_FILE):
        problem = _definition_problem(home / name) if name not in without else None
        if problem is not None:
            tell(name, problem, "write the file again, or move it away")
    try:
        if (home / "master.json").exists():
            msgspec.json.decode(check_seal(read_regular(home / "master.json")))
    except (msgspec.DecodeError, OSError):
        hint = "start the master again; programs do not find it until then"
        tell("master.json", "is damaged", hint)


def _definition_problem(path: Path) -> str | None:
    try:
        if path.exists():
            (read_pool_definitions if path.name == POOL_FILE else read_notify_file)(path)
    except ValueError as error:
        return f"cannot be used ({str(error).partition(chr(10))[0].rstrip('.')})"
    return None


def _secret_problem(path: Path) -> str | None:
    try:
        return None if read_secret(path) else "is empty"
    except FileNotFoundError:
        return "is missing"
    except DamagedSecretError:
        return "is damaged"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _identity_problem(path: Path, connection: sa.Connection) -> str | None:
    meta = tables.meta.c
    stored = connection.scalar(sa.select(meta.value).where(meta.key == "cluster_id"))
    try:
        found = read_regular(path).decode(errors="replace").strip()
    except FileNotFoundError:
        return None if stored is None else "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not found:
        return "is empty"
    return None if found == stored or stored is None else "has another identity than the database"


def _check_secrets(path: Path, connection: sa.Connection, report: Report) -> None:
    """Compare the secrets with the needs of unfinished experiments."""
    try:
        known = read_secret_file(path)
    except SecretFileError:
        hint = f"move it away, and {_FORK}"
        report(Finding(kind="home", where=path.name, problem="is damaged", hint=hint))
        return
    experiments = tables.experiments.c
    query = sa.select(experiments.id, experiments.config).where(
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


# A difference that is only a moment in the work of a master is gone by then.
_SECOND_LOOK_S = 2.0
# A directory without any of them is no home.
_HOME_DIRECTORIES = ("records", "attempts", "contexts", "logs", "files", "checkpoints")
_HOME_FILES = (DATABASE, "master.lock", *_HOME_DIRECTORIES)


@dataclass(kw_only=True, slots=True)
class CheckResult:
    """Result of a check.

    Attributes:
        findings: The differences; those that were fixed say how.
        master_runs: Whether a master was at work meanwhile.
    """

    findings: list[Finding] = field(default_factory=list)
    master_runs: bool = False

    @property
    def num_left(self) -> int:
        """How many differences are not fixed."""
        return sum(finding.fix is None for finding in self.findings)


def check(home: Path, *, is_quick: bool = False) -> CheckResult:
    """Compare a home's database with its records, code, logs, journals and checkpoints.

    Nothing is changed. A master may be at work: differences that are gone at a second look, two
    seconds later, are left out.

    Args:
        home: The home.
        is_quick: Look at the sizes of checkpoints' files, and not at their bytes.

    Raises:
        BackupError: There is no home.
    """
    if not home.is_dir():
        raise BackupError(
            f"A home must be a directory, but {str(home)!r} is none. Hint: `--home` names it."
        )
    if not any(os.path.lexists(home / name) for name in _HOME_FILES):
        raise BackupError(
            f"A home must have a database or what goes with it, but {str(home)!r} has neither."
            " Hint: `--home` names the home of the master."
        )
    result = CheckResult(master_runs=_is_held(home))
    # Before the database is opened: SQLite silently drops a damaged log.
    damage = None if result.master_runs else _log_damage(home)
    result.findings = _look_at_home(home, is_quick=is_quick)
    if result.findings and result.master_runs:
        # A master at work changes the home meanwhile: a finding counts if it stays.
        time.sleep(_SECOND_LOOK_S)
        again = set(_look_at_home(home, is_quick=is_quick))
        result.findings = [finding for finding in result.findings if finding in again]
    if damage is not None:
        finding = Finding(kind="database", where=f"{DATABASE}-wal", problem=damage)
        result.findings.insert(0, finding)
    return result


def fix(home: Path, *, is_quick: bool = False) -> CheckResult:
    """Check a home and repair the problems found; the home must have no master.

    A missing or damaged database is made from the records and journals. Rows that differ from
    their record get its values. Records that are damaged are written anew. Checkpoints that are
    gone count as deleted. Files that a fix replaces are kept in ``set_aside`` in the home.

    Raises:
        HomeInUseError: A master serves the home.
        BackupError: There is no home.
    """
    before = check(home, is_quick=is_quick)
    if not before.findings:
        return before
    with Home(home).hold():
        mended = [_mend_database(home, one) for one in before.findings]
        if mended == before.findings and not _is_unreadable(before.findings):
            try:
                _mend_home_rows(home, is_quick=is_quick)
            except OSError as error:
                raise BackupError(
                    "A home must be one that can be written to, to be mended, but is not"
                    f" ({error})."
                    " Hint: `paceline home check` says what is in the way; move that away."
                ) from error
    # Findings absent from the second check are fixed, and only those.
    after = check(home, is_quick=is_quick).findings
    left = {(one.kind, one.where) for one in after}
    result = CheckResult()
    for one in mended:
        if one.fix is None and (one.kind, one.where) not in left:
            one = replace(one, fix=_FIXES.get(one.kind, "it was mended"))
        result.findings.append(one)
    told = {(one.kind, one.where) for one in result.findings}
    result.findings += [one for one in after if (one.kind, one.where) not in told]
    return result


_FIXES = {
    "record": "the record was written anew",
    "database": "it has the values of its record again",
    "checkpoint": "it counts as deleted",
}


def _is_unreadable(findings: list[Finding]) -> bool:
    return any(one.where == DATABASE for one in findings)


def _look_at_home(home: Path, *, is_quick: bool) -> list[Finding]:
    """Return all findings; for a database beyond opening, only the reasons for this."""
    wrong = find_wrong_entries(home)
    findings = [
        Finding(kind="home", where=one.name, problem=one.problem, hint=one.hint) for one in wrong
    ]
    unusable = {one.name for one in wrong}
    if any(name.startswith(DATABASE) for name in unusable):
        return findings
    if not unusable.isdisjoint(_HOME_DIRECTORIES):
        # The check of the whole database compares it with the contents of these directories.
        return findings
    problem = _database_problem(home, is_quick=is_quick)
    if problem is not None:
        return [*findings, Finding(kind="database", where=DATABASE, problem=problem)]
    pace = CheckPace()
    with open_read_only(home / DATABASE) as connection:

        def tell(finding: Finding) -> None:
            if finding.where not in unusable:
                findings.append(finding)

        checks: list[Callable[[], object]] = [
            lambda: check_small_files(home, connection, tell, without=unusable),
            lambda: check_directories(home, connection, findings.append),
            lambda: check_records(home, connection, tell),
            lambda: check_contexts(home, connection, findings.append, pace),
            lambda: check_logs(home, findings.append, pace),
            lambda: check_journals(home, connection, findings.append),
            lambda: check_run_files(
                home, connection, findings.append, pace, reads_bytes=not is_quick
            ),
            lambda: check_checkpoints(
                home, connection, findings.append, pace, reads_bytes=not is_quick
            ),
        ]
        for one in checks:
            one()
            # Each looks at the newest state, and holds up no checkpoint of SQLite's meanwhile.
            connection.rollback()
    return findings


def _database_problem(home: Path, *, is_quick: bool) -> str | None:
    """Return the problem of the database as a whole, None without a problem."""
    database = home / DATABASE
    if not database.exists() or database.stat().st_size == 0:
        return "is empty" if database.exists() else "is missing"
    try:
        with open_read_only(database) as connection:
            found = connection.execute(
                sa.text(f"PRAGMA {'quick' if is_quick else 'integrity'}_check")
            )
            problems = [str(problem) for problem in found.scalars()]
            if problems != ["ok"]:
                return f"is damaged ({' '.join(problems[0].split())})"
            version = connection.execute(tables.VERSION).scalar()
            if version != str(tables.SCHEMA_VERSION):
                return (
                    f"must have version {tables.SCHEMA_VERSION} to be checked, but has {version}:"
                    " `paceline up` brings it there, or refuses it"
                )
            orphans = connection.execute(sa.text("PRAGMA foreign_key_check")).all()
            if orphans:
                return f"has {len(orphans)} rows that refer to nothing"
        # Age check: the database may be older than the files of its home.
        check_for_lost_database(home, database)
    except DatabaseVersionError as error:
        return f"is damaged ({getattr(error.__cause__, 'orig', None) or error.__cause__})"
    except LostDatabaseError as error:
        return f"is older than the home: {str(error).partition(' Nothing was')[0]}"
    return None


def _log_damage(home: Path) -> str | None:
    try:
        return find_log_damage(home / DATABASE)
    except OSError:
        return None  # another check names the object in its place


def _mend_database(home: Path, finding: Finding) -> Finding:
    if finding.where != DATABASE or "version" in finding.problem:
        return finding
    try:
        made = rebuild_database(home)
    except (BackupError, LostDatabaseError):
        return finding
    told = (
        f"it was made from the records, with {made.num_experiments} experiments and"
        f" {made.num_trials} trials"
    )
    if made.moved_to is not None:
        is_whole = (made.moved_to / DATABASE).exists()
        kept = "the old one" if is_whole else "what was left of the old one"
        told += f"; {kept} is in {str(made.moved_to)!r}"
    if made.lost:
        told += f"; lost: {'; '.join(made.lost)}"
    return replace(finding, fix=told)


def _mend_home_rows(home: Path, *, is_quick: bool) -> None:
    """Repair rows of the database, records, and missing checkpoints."""
    with open_read_only(home / DATABASE) as connection:
        wrong = check_records(home, connection, lambda _: None)
        gone = check_checkpoints(
            home, connection, lambda _: None, CheckPace(), reads_bytes=not is_quick
        )
        connection.rollback()
        ids = [row[0] for row in connection.execute(sa.text("SELECT id FROM experiments"))]
        if not are_records_begun(connection):
            ids = []
        rows = [
            row
            for experiment_id in ids
            if experiment_id not in wrong
            for row in rows_to_mend(home, connection, experiment_id)
        ]
    if rows or gone:
        # The values that are replaced may be wanted after all.
        kept = home / "master.before-fix.sqlite"
        copy_database(home / DATABASE, kept)
        move_lost_files_aside(home, [kept])
        with closing(sqlite3.connect(home / DATABASE)) as writer, writer:
            for row in rows:
                mend_recorded_row(writer, row)
            writer.executemany(
                "UPDATE checkpoints SET state = ? WHERE uuid = ?",
                [(CheckpointState.DELETED.value, row.uuid) for row in gone],
            )
    _write_records(home, wrong)


def _write_records(home: Path, experiments: list[int | None]) -> None:
    database = Database(home / DATABASE)
    try:

        def note(connection: sa.Connection) -> None:
            for experiment_id in experiments:
                note_experiment(connection, experiment_id)

        database.write(lambda transaction: note(transaction.connection)).result()
        while write_some(database, home):
            pass
    finally:
        database.close()


def _is_held(home: Path) -> bool:
    """Return whether a master serves the home."""
    try:
        with open(home / "master.lock", opener=regular_opener) as file:
            try:
                # A shared lock: two checks must not take each other for a master.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
    except OSError:
        pass  # another check names the object in its place
    return False
