"""Health of the storages in use: a small write, read and deletion now and then, in own threads."""

import logging
import shutil
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from paceline._cluster.master.experiments.checkpoint_places import storage_for_others
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.experiments.storage_calls import StoragePendingError
from paceline._cluster.master.store import tables, user_tables
from paceline._cluster.master.store.database import Database
from paceline._cluster.master.store.row_ids_and_counts import CHECKPOINTS, ids_parameter, many_ids
from paceline._cluster.messages.master_models import Storage, StorageUse
from paceline._cluster.messages.states import CheckpointState, ExperimentState
from paceline.config._checkpoint_storage_section import storage_root
from paceline.storage._checkpoint_errors import CheckpointError
from paceline.storage._storage_from_url import storage_from

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 300.0
_LOOK_S = 10.0
# Those with most bytes first: each check may take a second, and a thread if it hangs.
_MOST_CHECKED = 200
_MOST_EXPERIMENTS = 10
_MOST_TEXT = 500
_OVER = [one.value for one in ExperimentState if one.is_terminal]


@dataclass(frozen=True, slots=True)
class _Health:
    """Outcome of the newest checks of a storage; times are in seconds since the epoch."""

    checked_at: float
    latency_s: float | None = None
    failing_since: float | None = None
    reason: str | None = None
    space: tuple[int, int] | None = None
    is_there: bool = True


class _Use(NamedTuple):
    """Experiment that has checkpoints, or may get some, in a storage."""

    storage: str
    experiment_id: int
    name: str
    user: str
    project: str
    num_bytes: int


class StorageHealth:
    """Checks of storages, each at most every five minutes, and what they have found.

    A storage that hangs holds one thread until it answers, and nothing else.

    Args:
        database: The database.
        changes: Has the calls to storages, and the failures that trials report.
    """

    def __init__(self, database: Database, changes: StateChanges) -> None:
        self._database = database
        self._changes = changes
        self._health: dict[str, _Health] = {}
        self._pending: set[str] = set()
        self._places: dict[int, str] = {}
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="storage-health", daemon=True)

    def start(self) -> None:
        """Begin to check."""
        self._thread.start()

    def close(self) -> None:
        """Stop checking."""
        self._is_closed.set()

    def _run(self) -> None:
        while not self._is_closed.wait(_LOOK_S):
            try:
                self.look()
            # The next look may find another database and other storages.
            except Exception:
                logger.exception("The storages could not be checked.")

    def look(self) -> None:
        """Check the storages that are due; those that do not answer at once are asked again."""
        with self._database.read(everything=True) as connection:
            sizes: Counter[str] = Counter()
            for use in self._uses(connection):
                sizes[use.storage] += use.num_bytes
        now = time.time()
        # Of a clock that was set back, nothing is due in the future.
        self._health = {key: one for key, one in self._health.items() if key in sizes}
        for storage, num_bytes in sizes.most_common(_MOST_CHECKED):
            known = self._health.get(storage)
            is_due = known is None or not 0 <= now - known.checked_at < CHECK_EVERY_S
            if is_due or storage in self._pending:
                self._check(storage, now, has_checkpoints=num_bytes > 0)

    def _check(self, storage: str, now: float, *, has_checkpoints: bool) -> None:
        before = self._health.get(storage, _Health(now))
        try:
            call = partial(_probe, storage, has_checkpoints=has_checkpoints)
            found = self._changes.storage_calls.poll("health", storage, call)
        except StoragePendingError:
            self._pending.add(storage)
            return
        except (OSError, ValueError, RuntimeError, CheckpointError) as error:
            self._changes.storage_calls.note_failure(storage)
            told = str(getattr(error, "strerror", None) or error)
            since = before.failing_since or now
            reason = " ".join(told.split())[:_MOST_TEXT]
            found = replace(
                before, checked_at=now, failing_since=since, reason=reason, is_there=True
            )
        self._pending.discard(storage)
        self._health[storage] = found

    def read(self, connection: sa.Connection) -> list[Storage]:
        """Return the storages in use by what a connection shows, those that fail first."""
        uses = self._uses(connection)
        failed: Counter[str] = Counter(self._changes.storage_calls.num_failed)
        of_trials = self._changes.failing_stores.counts()
        own = {one.experiment_id: one.storage for one in uses}
        for (experiment_id, place), number in of_trials.items():
            if experiment_id in own and _canonical(place) == own[experiment_id]:
                failed[own[experiment_id]] += number
        by_storage: dict[str, list[_Use]] = {}
        for one in uses:
            by_storage.setdefault(one.storage, []).append(one)
        found = [
            _view(storage, self._health.get(storage), failed[storage], of_storage)
            for storage, of_storage in by_storage.items()
        ]
        return sorted(
            found, key=lambda one: (one.failing_since is None, -one.num_bytes, one.storage)
        )

    def problems(self, connection: sa.Connection) -> list[str]:
        """Return a sentence for each storage that fails."""
        if all(one.failing_since is None for one in self._health.copy().values()):
            return []
        return [
            f"The storage {one.storage} has failed for"
            f" {max(time.time() - one.failing_since, 0):.0f} s: {one.reason.rstrip('.')}. Hint:"
            " `paceline storage list` shows whose checkpoints it has."
            for one in self.read(connection)
            if one.failing_since is not None and one.reason is not None
        ]

    def _uses(self, connection: sa.Connection) -> list[_Use]:
        experiments, counts, projects = (
            tables.experiments.c,
            tables.counts.c,
            user_tables.projects.c,
        )
        num_bytes = sa.func.coalesce(sa.func.sum(counts.num_bytes), 0).label("num_bytes")
        of_experiment = sa.and_(
            counts.experiment_id == experiments.id,
            counts.kind == CHECKPOINTS,
            counts.state != CheckpointState.DELETED.value,
        )
        query = (
            sa.select(
                experiments.id, experiments.name, experiments.owner,
                projects.name.label("project"), num_bytes,
            )
            .join(user_tables.projects, projects.id == experiments.project_id)
            .outerjoin(tables.counts, of_experiment)
            .where(experiments.external_id.is_(None))
            .group_by(experiments.id)
            .having(sa.or_(num_bytes > 0, experiments.state.not_in(_OVER)))
        )  # fmt: skip
        rows = connection.execute(query).all()
        self._learn_places(connection, [row.id for row in rows if row.id not in self._places])
        return [_Use(self._places[row.id], *row) for row in rows if row.id in self._places]

    def _learn_places(self, connection: sa.Connection, ids: list[int]) -> None:
        """Keep where experiments store: it never changes, and configs are slow to read."""
        experiments, default = tables.experiments.c, _canonical(self._changes.default_storage)
        section = experiments.config["checkpoint_storage"].as_string()
        query = sa.select(experiments.id, section).where(experiments.id.in_(many_ids()))
        for number, text in connection.execute(query, ids_parameter(ids)):
            self._places[number] = _place(text) or default


def _probe(storage: str, *, has_checkpoints: bool) -> _Health:
    opened = storage_for_others(storage)
    root, begin = opened.local_root, time.perf_counter()
    if root is not None and not has_checkpoints and not root.exists():
        # The first attempt makes it.
        return _Health(time.time(), is_there=False)
    opened.probe()
    latency_s = time.perf_counter() - begin
    space = None
    if root is not None:
        usage = shutil.disk_usage(root)
        space = usage.free, usage.total
    return _Health(time.time(), latency_s, space=space)


@lru_cache(maxsize=1024)
def _canonical(place: str) -> str:
    """Return a path or URL as its storage names it."""
    try:
        return storage_from(place).url
    except (ValueError, RuntimeError):
        return place


@lru_cache(maxsize=1024)
def _place(section: str | None) -> str | None:
    root = None if section is None else storage_root(msgspec.json.decode(section))
    return root and _canonical(root)


def _view(storage: str, health: _Health | None, num_failed: int, uses: list[_Use]) -> Storage:
    def by(field: str) -> list[StorageUse]:
        sums: Counter[str] = Counter()
        for one in uses:
            sums[getattr(one, field)] += one.num_bytes
        return [StorageUse(name=name, num_bytes=n) for name, n in sums.most_common()]

    largest = sorted(uses, key=lambda one: (-one.num_bytes, one.experiment_id))
    seen = health or _Health(0.0, is_there=False)
    space: Any = seen.space or (None, None)
    is_reachable = None if not seen.is_there else seen.failing_since is None
    return Storage(
        storage=storage,
        is_reachable=is_reachable,
        checked_at=seen.checked_at or None,
        latency_s=seen.latency_s,
        failing_since=seen.failing_since,
        reason=seen.reason,
        num_failed_writes=num_failed,
        free_bytes=space[0],
        total_bytes=space[1],
        num_bytes=sum(one.num_bytes for one in uses),
        by_project=by("project"),
        by_user=by("user"),
        by_experiment=[
            StorageUse(name=one.name, num_bytes=one.num_bytes, experiment_id=one.experiment_id)
            for one in largest[:_MOST_EXPERIMENTS]
        ],
    )
