"""Upgrade of a database after a copy was made; reading, checking and copying of databases."""

import os
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from numpy.typing import NDArray
from sqlalchemy.exc import DatabaseError

from paceline._base.files import regular_opener, sync_directory
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Transaction, copy_of_version, unreadable
from paceline._cluster.master.store.row_ids_and_counts import new_id
from paceline._cluster.master.store.tables import FIRST_SCHEMA_VERSION


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Return a connection for reading only; a leftover rollback journal needs mode `rw`."""
    # A database whose first change was interrupted can be read only once that is taken back.
    mode = "rw" if path.with_name(f"{path.name}-journal").exists() else "ro"
    address = f"file:{quote(str(path.absolute()))}?mode={mode}"
    return sqlite3.connect(address, uri=True, timeout=30)


@contextmanager
def open_read_only(path: Path) -> Iterator[sa.Connection]:
    """Open a read-only connection to a database without a `Database` object.

    Raises:
        DatabaseVersionError: It is damaged, or no database.
    """
    engine = _reader(path)
    try:
        with engine.connect() as connection:
            yield connection
    except (DatabaseError, sqlite3.DatabaseError) as error:
        raise unreadable(path, getattr(error, "orig", error)) from error
    finally:
        engine.dispose()


def _reader(path: Path) -> sa.Engine:
    return sa.create_engine(
        "sqlite://", creator=lambda: connect_to_read(path), poolclass=sa.NullPool
    )


def copy_database(source: Path, target: Path) -> None:
    """Copy a database with SQLite's online backup: a single consistent state, forced to disk.

    Writers continue meanwhile. Nothing else is in the copy's directory afterwards.

    Args:
        source: The database; its log beside it belongs to it.
        target: The copy; a file that is there is replaced.

    Raises:
        DatabaseVersionError: The source cannot be read as a database.
        OSError: The copy cannot be written.
    """
    target.unlink(missing_ok=True)
    try:
        with closing(connect_to_read(source)) as reader:
            _fill_copy(reader, target)
    except sqlite3.DatabaseError as error:
        target.unlink(missing_ok=True)
        if isinstance(error, sqlite3.OperationalError) and source.exists():
            raise OSError(
                f"{str(source)!r} cannot be copied to {str(target)!r}: {error}"
            ) from error
        raise unreadable(source, error) from error


def _fill_copy(reader: sqlite3.Connection, target: Path) -> None:
    # Made first, so that nobody else can ever read it.
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    with closing(sqlite3.connect(target)) as writer:
        # Backup in one step: a change of the source between two steps would restart the copy.
        reader.backup(writer)
        # A single file, which nobody needs to put together.
        writer.execute("PRAGMA journal_mode=DELETE")
    with target.open("rb") as file:
        os.fsync(file.fileno())


def check_copy(path: Path) -> None:
    """Check the pages of a database without writers.

    Raises:
        DatabaseDamagedError: Some are damaged.
    """
    # `immutable`: SQLite takes no locks and makes no files beside the copy.
    address = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(address, uri=True)) as connection:
            (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        raise unreadable(path, error) from error
    if problem != "ok":
        raise unreadable(path, sqlite3.DatabaseError(" ".join(str(problem).split())))


_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_MAGIC = 0x377F0682
_BLOCK_FRAMES = 1024
_MASK = 2**32 - 1

Words = NDArray[np.uint32]


def find_log_damage(database: Path) -> str | None:
    """Describe the unreadable part of a database's WAL; None if the log is intact.

    For a database that nobody has open. An unfinished write of a killed process is no damage.
    """
    path = database.with_name(f"{database.name}-wal")
    try:
        with open(path, "rb", opener=regular_opener) as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return None
            magic, _, page_size, _, *salts, sum_1, sum_2 = _HEADER.unpack(header)
            frame_size = _FRAME.size + page_size
            is_known = magic & ~1 == _MAGIC and page_size in (2**n for n in range(9, 17))
            # WAL format: the lowest bit of the magic number is the byte order of checksums.
            order = ">" if magic & 1 else "<"
            if not is_known or _add_wal_checksum((0, 0), _words(header[:24], order)) != (
                sum_1,
                sum_2,
            ):
                size = path.stat().st_size - _HEADER.size
                return (
                    f"its header is damaged, so that {size} bytes are not taken" if size else None
                )
            sums, num_whole, num_frames, num_lost = (sum_1, sum_2), 0, 0, 0
            is_whole = True
            while block := file.read(frame_size * _BLOCK_FRAMES):
                for frame in _frames(block, frame_size):
                    _, _, *frame_salts, sum_1, sum_2 = _FRAME.unpack(frame[: _FRAME.size])
                    num_frames += 1
                    if frame_salts != salts and is_whole:
                        # Different salts: frames of an earlier log generation,
                        # unless frames with the current salts follow.
                        is_whole, num_whole = False, num_frames - 1
                        continue
                    if is_whole:
                        # WAL format: the checksum covers 8 bytes of the frame header, and the page.
                        covered = frame[:8] + frame[_FRAME.size :]
                        sums = _add_wal_checksum(sums, _words(covered, order))
                        if sums == (sum_1, sum_2):
                            continue
                        is_whole, num_whole = False, num_frames - 1
                    num_lost += frame_salts == salts
    except FileNotFoundError:
        return None
    if not num_lost:
        return None
    return f"page {num_whole + 1} of it is damaged, so that {num_frames - num_whole} are not taken"


def _frames(block: bytes, size: int) -> Iterator[bytes]:
    """Yield whole frames."""
    for start in range(0, len(block) - size + 1, size):
        yield block[start : start + size]


def _words(data: bytes, order: str) -> Words:
    return np.frombuffer(data, f"{order}u4").astype(np.uint32)


_Start = tuple[tuple[int, int], tuple[int, int]]
_weights: dict[int, tuple[_Start, Words, Words]] = {}


def _add_wal_checksum(sums: tuple[int, int], words: Words) -> tuple[int, int]:
    """Return the checksum of words after others, all modulo 2**32.

    For each pair of words, s0 += x0 + s1 and then s1 += x1 + s0. That is linear, so each result is
    a sum of all words with weights that follow from their number.
    """
    if len(words) not in _weights:
        _weights[len(words)] = _wal_weights(len(words))
    starts, *weights = _weights[len(words)]
    s0, s1 = (
        sum(a * b for a, b in zip(sums, start, strict=True))
        + int((words * weight).sum(dtype=np.uint32))
        for start, weight in zip(starts, weights, strict=True)
    )
    return s0 & _MASK, s1 & _MASK


def _wal_weights(num_words: int) -> tuple[_Start, Words, Words]:
    """Return the weights of the two sums before, and of the words in each of the two results."""
    first, second = np.zeros(num_words, np.uint32), np.zeros(num_words, np.uint32)
    # The step is (s0, s1) -> (s0 + s1, s0 + 2 s1), and the words add (x0, x0 + x1). `power` has the
    # weights of both sums before the pairs that were looked at, which begins at the last one.
    power: _Start = ((1, 0), (0, 1))
    for pair in range(num_words // 2 - 1, -1, -1):
        (a, b), (c, d) = power
        first[2 * pair], first[2 * pair + 1] = (a + b) & _MASK, b
        second[2 * pair], second[2 * pair + 1] = (c + d) & _MASK, d
        power = (
            ((a + b) & _MASK, (a + 2 * b) & _MASK),
            ((c + d) & _MASK, (c + 2 * d) & _MASK),
        )
    return power, first, second


# A larger database takes too long to read as a whole at each start.
_MAX_CHECKED_BYTES = 2**30
_CONTEXT = "context:"


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownFiles:
    """Newest ids and upload digests recorded in a database; the defaults fit an empty database.

    Deleted trials and attempts count as known, because their files may have stayed.
    """

    newest_experiment: int = 0
    newest_trial: int = 0
    newest_attempt: int = 0
    contexts: frozenset[str] = frozenset()


def read_known_files(path: Path) -> KnownFiles:
    """Return the ids and uploads known to a database.

    The database must exist. It is only read, so that a refused start changes nothing.

    Raises:
        DatabaseVersionError: It is damaged, or no database of Paceline.
    """
    with open_read_only(path) as connection:
        if path.stat().st_size <= _MAX_CHECKED_BYTES:
            _check_pages(connection)
        if not sa.inspect(connection).get_table_names():
            return KnownFiles()
        return KnownFiles(
            newest_experiment=new_id(connection, tables.experiments) - 1,
            newest_trial=new_id(connection, tables.trials) - 1,
            newest_attempt=new_id(connection, tables.attempts) - 1,
            contexts=_known_contexts(connection),
        )


def note_contexts(transaction: Transaction, *digests: str) -> None:
    """Record the digests of uploads; call this before a file is written."""
    for digest in digests:
        row = sa.insert(tables.meta).prefix_with("OR IGNORE")
        transaction.connection.execute(row.values(key=_CONTEXT + digest, value="1"))
    # After a power cut the file may be there, and a database that does not know it is refused.
    transaction.force()


def _check_pages(connection: sa.Connection) -> None:
    problem = connection.execute(sa.text("PRAGMA quick_check(1)")).scalar()
    if problem != "ok":
        raise sqlite3.DatabaseError(" ".join(str(problem).split()))


def _known_contexts(connection: sa.Connection) -> frozenset[str]:
    keys = sa.select(tables.meta.c.key).where(tables.meta.c.key.startswith(_CONTEXT))
    noted = {key.removeprefix(_CONTEXT) for key in connection.execute(keys).scalars()}
    used = connection.execute(sa.select(tables.experiments.c.context_digest)).scalars()
    return frozenset(noted | {digest for digest in used if digest is not None})


# Step n leads from schema version `FIRST_SCHEMA_VERSION + n` to the next. Each step is written out:
# a later change of the tables must not change what an earlier step does.


def _add_files_media_and_documents(operations: Operations) -> None:
    operations.create_table(
        "run_files",
        sa.Column("trial_id", sa.Integer, sa.ForeignKey("trials.id"), primary_key=True),
        sa.Column("path", sa.String, primary_key=True),
        sa.Column("experiment_id", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("media_type", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sqlite_with_rowid=False,
    )
    operations.create_index("ix_run_files_digest", "run_files", ["digest"])
    operations.create_index("ix_run_files_experiment", "run_files", ["experiment_id"])
    operations.create_table(
        "media",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("trial_id", sa.Integer, sa.ForeignKey("trials.id"), nullable=False),
        sa.Column("experiment_id", sa.BigInteger, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("group", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("steps_completed", sa.BigInteger, nullable=False),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("files", sa.JSON, nullable=False),
        sa.Column("value", sa.Text),
    )
    places = ["trial_id", "group", "name", "steps_completed", "id"]
    operations.create_index("ix_media_trial", "media", places)
    operations.create_index("ix_media_experiment", "media", ["experiment_id"])
    operations.create_table(
        "documents",
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("parent", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("content", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("changed_at", sa.Float, nullable=False),
        sa.Column("experiment_id", sa.BigInteger),
        sqlite_with_rowid=False,
    )
    operations.create_index("ix_documents_experiment", "documents", ["experiment_id"])


def _add_backfill_and_waiting_trials(operations: Operations) -> None:
    for table, name in (
        ("attempts", "is_filler"),
        ("pools", "backfill"),
        ("trials", "is_waiting"),
    ):
        operations.add_column(
            table, sa.Column(name, sa.Boolean, nullable=False, server_default=sa.false())
        )


def _add_views(operations: Operations) -> None:
    operations.create_table(
        "views",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("search", sa.Text, nullable=False),
        sa.Column("is_default", sa.Boolean, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("changed_at", sa.Float, nullable=False),
        sqlite_autoincrement=True,
    )


def _add_users_and_projects(operations: Operations) -> None:
    for name, default in (("is_admin", "0"), ("is_active", "1"), ("is_service", "0")):
        column = sa.Column(name, sa.Boolean, nullable=False, server_default=sa.text(default))
        operations.add_column("users", column)
    operations.create_table(
        "projects",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("name", sa.String, nullable=False, unique=True),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    operations.create_table(
        "members",
        sa.Column("project_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("user", sa.String, primary_key=True),
        sa.Column("role", sa.String, nullable=False),
    )
    operations.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("user", sa.String, nullable=False),
        sa.Column("token", sa.String),
        sa.Column("action", sa.String, nullable=False),
        sa.Column("objects", sa.JSON, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
    )
    # What was there belongs to the only user of before.
    for table in ("experiments", "documents"):
        if table == "experiments":
            owner = sa.Column("owner", sa.String, nullable=False, server_default="admin")
            operations.add_column(table, owner)
        project = sa.Column("project_id", sa.BigInteger, nullable=False, server_default="1")
        operations.add_column(table, project)
    user = sa.Column("user", sa.String, nullable=False, server_default="admin")
    operations.add_column("tokens", user)
    columns = ["project_id", "state", "is_archived"]
    operations.create_index("ix_experiments_project", "experiments", columns)
    operations.create_index("ix_experiments_owner", "experiments", ["owner"])
    # Made anew, with the columns that are watched since.
    for table in ("users", "experiments"):
        operations.execute(f"DROP TRIGGER IF EXISTS recorded_{table}")
    for change in ("UPDATE", "DELETE"):
        operations.execute(
            f"CREATE TRIGGER audit_no_{change.lower()} BEFORE {change} ON audit"
            " BEGIN SELECT RAISE(ABORT, 'the audit log is only added to'); END"
        )


def _add_usage(operations: Operations) -> None:
    operations.create_table(
        "usage",
        sa.Column("month", sa.String, primary_key=True),
        sa.Column("user", sa.String, primary_key=True),
        sa.Column("project_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("pool", sa.String, primary_key=True),
        sa.Column("slot_s", sa.Float, nullable=False),
        sa.Column("wait_s", sa.Float, nullable=False),
        sa.Column("num_trials", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )


def _add_quotas_and_reservations(operations: Operations) -> None:
    operations.create_table(
        "quotas",
        sa.Column("user", sa.String, primary_key=True),
        sa.Column("project_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("weight", sa.Float, nullable=False),
        sa.Column("max_slots", sa.Integer),
        sa.Column("slot_hours", sa.Float),
        sa.Column("checkpoint_bytes", sa.BigInteger),
        sa.Column("revision", sa.Integer, nullable=False),
    )
    operations.create_table(
        "slot_use",
        sa.Column("month", sa.String, primary_key=True),
        sa.Column("user", sa.String, primary_key=True),
        sa.Column("project_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("pool", sa.String, primary_key=True),
        sa.Column("slot_s", sa.Float, nullable=False),
        sa.Column("recent_s", sa.Float, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sqlite_with_rowid=False,
    )
    operations.create_table(
        "reservations",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("node", sa.String, nullable=False),
        sa.Column("user", sa.String, nullable=False),
        sa.Column("begins_at", sa.Float, nullable=False),
        sa.Column("ends_at", sa.Float, nullable=False),
        sqlite_autoincrement=True,
    )
    operations.add_column("pools", sa.Column("half_life_hours", sa.Float))


def _add_groups_and_rules_of_pools(operations: Operations) -> None:
    for name in ("silent_after_s", "unused_after_s", "pause_after_s"):
        operations.add_column("pools", sa.Column(name, sa.Float))
    operations.add_column("pools", sa.Column("best_priority", sa.Integer))
    operations.add_column("pools", sa.Column("open_to", sa.JSON))
    own = sa.Column("own_runners", sa.Boolean, nullable=False, server_default=sa.false())
    operations.add_column("pools", own)
    operations.add_column("users", sa.Column("member_of", sa.String))
    # Made anew, with the columns that are watched since.
    operations.execute("DROP TRIGGER IF EXISTS recorded_users")
    operations.add_column("attempts", sa.Column("log_hits", sa.JSON))
    operations.create_index(
        "ix_attempts_hits", "attempts", ["trial_id"], sqlite_where=sa.text("log_hits IS NOT NULL")
    )


def _add_oidc(operations: Operations) -> None:
    for name in ("oidc_issuer", "oidc_subject"):
        operations.add_column("users", sa.Column(name, sa.String))
    # Made anew, with the columns that are watched since.
    operations.execute("DROP TRIGGER IF EXISTS recorded_users")


def _add_interactive_hours(operations: Operations) -> None:
    operations.add_column("pools", sa.Column("interactive_first", sa.String))


_ADD_FILE = (
    "INSERT INTO counts VALUES ('run_files', {experiment}, '', {sign}1, {sign}{row}.size)"
    " ON CONFLICT DO UPDATE SET number = number + excluded.number,"
    " num_bytes = num_bytes + excluded.num_bytes;"
)


def _add_gpu_hours_lost_work_and_quotas_of_media(operations: Operations) -> None:
    operations.add_column("quotas", sa.Column("media_bytes", sa.BigInteger))
    # Made anew, with the columns that are watched since.
    operations.execute("DROP TRIGGER IF EXISTS recorded_quotas")
    added, removed = (
        " ".join(
            _ADD_FILE.format(experiment=experiment, sign=sign, row=row)
            for experiment in ("0", f"{row}.experiment_id")
        )
        for row, sign in (("NEW", ""), ("OLD", "-"))
    )
    for number, event, statements in (
        (1, "INSERT", added),
        (2, "DELETE", removed),
        (3, "UPDATE OF size", f"{removed} {added}"),
    ):
        operations.execute(
            f"CREATE TRIGGER count_run_files_{number} AFTER {event} ON run_files"
            f" BEGIN {statements} END"
        )
    for experiment in ("0", "experiment_id"):
        operations.execute(
            f"INSERT INTO counts SELECT 'run_files', {experiment}, '', count(*), sum(size)"  # noqa: S608
            " FROM run_files WHERE true GROUP BY 2"
        )
    operations.add_column("attempts", sa.Column("num_gpus", sa.Integer))
    operations.add_column("attempts", sa.Column("spent", sa.JSON))
    for name in ("gpu_s", "training_s", "lost_s", "known_s"):
        operations.add_column(
            "usage", sa.Column(name, sa.Float, nullable=False, server_default="0")
        )


STEPS: tuple[Callable[[Operations], None], ...] = (
    _add_files_media_and_documents,
    _add_backfill_and_waiting_trials,
    _add_views,
    _add_users_and_projects,
    _add_usage,
    _add_quotas_and_reservations,
    _add_groups_and_rules_of_pools,
    _add_oidc,
    _add_interactive_hours,
    _add_gpu_hours_lost_work_and_quotas_of_media,
)


def back_up_before_upgrade(path: Path, version: int) -> Path:
    """Copy a database beside itself for an upgrade, and return the copy's path."""
    copy = copy_of_version(path, version)
    part = copy.with_suffix(".part")
    copy_database(path, part)
    # Rename once complete: a crash leaves no partial copy under the final name.
    part.replace(copy)
    sync_directory(copy.parent)
    return copy


def upgrade(connection: sa.Connection, version: int) -> None:
    """Upgrade the tables of a database from a known, earlier version to the current version."""
    operations = Operations(MigrationContext.configure(connection))
    for step in STEPS[version - FIRST_SCHEMA_VERSION :]:
        step(operations)
