"""The master: its parts put together; what it counts and measures of itself.

Also: in Prometheus text too; size of its home.
"""

import logging
import os
import shutil
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import paceline
from paceline._base.gpus import KnownGpu
from paceline._cluster.master.authentication import (
    AttemptTokens,
    Passwords,
    SignInLinks,
    SignIns,
    Tokens,
)
from paceline._cluster.master.executors import Executor, ExecutorContext, LocalExecutor
from paceline._cluster.master.experiments.attempts import LaunchSources, Leases
from paceline._cluster.master.experiments.experiment_commands import Commands
from paceline._cluster.master.experiments.reconciler import Reconciler
from paceline._cluster.master.experiments.record_ingest import RecordIngest
from paceline._cluster.master.experiments.retention import Retention
from paceline._cluster.master.experiments.runs_watcher import RunsWatcher
from paceline._cluster.master.experiments.state_changes import StateChanges
from paceline._cluster.master.experiments.storage_calls import StorageMarks
from paceline._cluster.master.experiments.stored_searches import (
    Searches,
    SearchViews,
    missing_methods,
    undecided_searches,
)
from paceline._cluster.master.experiments.unmanaged_runs import Unmanaged
from paceline._cluster.master.home_directory import Home, SecretStore
from paceline._cluster.master.nodes.checkpoint_transfers import Transfers
from paceline._cluster.master.nodes.node_registry import Nodes
from paceline._cluster.master.nodes.node_work import LostNodes, NodeExecutor
from paceline._cluster.master.starters.pool_runners import PoolDefinition, PoolRunners
from paceline._cluster.master.starters.starter_base import Starter
from paceline._cluster.master.store.database import Database, Transaction, settle_cluster_id
from paceline._cluster.master.store.database_reading import adopt_contexts
from paceline._cluster.master.store.list_pages import EncodingCache, NameCache
from paceline._cluster.master.store.trial_logs import LogStore
from paceline._cluster.master.upkeep.recovery_records import Recorder
from paceline._cluster.master.waiting import WaitingRequests, Wakeups
from paceline._cluster.messages.runner_messages import LOCAL_NAME, MasterAddress, NodeFacts
from paceline._cluster.runner.attempt_directory import FILE_NAME as SECRET_FILE_NAME
from paceline._cluster.runner.node_runner import describe_machine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusText:
    """Builder of the metrics text; all values of a name are added in a single call."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def gauge(self, name: str, what: str, value: float | None, **labels: str) -> None:
        """Add a gauge, a number able to rise and fall; None values are left out."""
        if value is not None:
            self.series(name, what, "gauge", [(labels, value)])

    def counter(self, name: str, what: str, value: float) -> None:
        """Add a counter, a number able to rise only."""
        self.series(name, what, "counter", [({}, value)])

    def series(
        self,
        name: str,
        what: str,
        kind: str,
        values: Iterable[tuple[Mapping[str, str], float]],
    ) -> None:
        """Add numbers of the same name with different labels."""
        self._head(name, what, kind)
        self._lines += [_line(name, labels, value) for labels, value in values]

    def histogram(
        self,
        name: str,
        what: str,
        bounds: tuple[float, ...],
        values: Iterable[tuple[Mapping[str, str], float, list[int]]],
    ) -> None:
        """Add histograms: labels, the sum, and the numbers up to each bound and in all."""
        self._head(name, what, "histogram")
        for labels, total, cumulative in values:
            for bound, number in zip([*map(str, bounds), "+Inf"], cumulative, strict=True):
                self._lines.append(_line(f"{name}_bucket", {**labels, "le": bound}, number))
            self._lines.append(_line(f"{name}_sum", labels, total))
            self._lines.append(_line(f"{name}_count", labels, cumulative[-1]))

    def text(self) -> str:
        """Return the complete text."""
        return "\n".join(self._lines) + "\n"

    def _head(self, name: str, what: str, kind: str) -> None:
        self._lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{shown}}} {value!r}" if shown else f"{name} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


REQUEST_BOUNDS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)
LAG_BOUNDS_S = (0.1, 0.5, 1.0, 5.0, 30.0, 300.0)
DEFAULT_SLOW_REQUEST_S = 1.0


@dataclass(slots=True)
class Histogram:
    """Values counted by size."""

    bounds: tuple[float, ...]
    sum: float = 0.0
    numbers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self.numbers[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[int]:
        """Return how many values are at most each bound, and how many there are."""
        return list(accumulate(self.numbers))


class Measurements:
    """Counts since the start of the master; safe to use from any thread.

    Args:
        slow_request_s: Seconds until the answer begins, from which on a request is slow.
    """

    def __init__(self, slow_request_s: float = DEFAULT_SLOW_REQUEST_S) -> None:
        self.slow_request_s = slow_request_s
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._seconds: defaultdict[str, Histogram] = defaultdict(
            lambda: Histogram(REQUEST_BOUNDS_S)
        )
        self._slow: Counter[str] = Counter()
        self._lag = Histogram(LAG_BOUNDS_S)
        self._newest_lag_s: float | None = None

    def note_request(self, method: str, route: str, status: int, seconds: float | None) -> bool:
        """Count a request; return whether the request was slow; `seconds` None: a long poll."""
        is_slow = seconds is not None and seconds >= self.slow_request_s
        with self._lock:
            self._requests[method, route, status] += 1
            if seconds is not None:
                self._seconds[route].add(seconds)
            self._slow[route] += is_slow
        return is_slow

    def note_lag(self, seconds: float) -> None:
        """Record the age of a request's newest record at the time of storing."""
        with self._lock:
            self._newest_lag_s = max(seconds, 0.0)
            self._lag.add(self._newest_lag_s)

    def requests(self) -> dict[tuple[str, str, int], int]:
        """Return the number of requests by method, route and status."""
        with self._lock:
            return dict(self._requests)

    def seconds(self) -> dict[str, tuple[float, list[int]]]:
        """Return of each route the sum of its seconds and how many were at most each bound."""
        with self._lock:
            return {route: (one.sum, one.cumulative()) for route, one in self._seconds.items()}

    def slow(self) -> dict[str, int]:
        """Return the number of slow requests by route."""
        with self._lock:
            return {route: number for route, number in self._slow.items() if number}

    def lag(self) -> tuple[float | None, float, list[int]]:
        """Return the newest lag, their sum, and how many were at most each bound."""
        with self._lock:
            return self._newest_lag_s, self._lag.sum, self._lag.cumulative()


_MAX_AGE_S = 600.0
_DIRECTORIES = ("logs", "contexts", "attempts")


class HomeSizes:
    """The bytes of the parts of a home; the directories' are up to ten minutes old."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._measured_at = -_MAX_AGE_S
        self._is_measuring = False
        self._sizes: dict[str, int] = {}

    def read(self) -> dict[str, int]:
        """Return bytes by part; the directories are missing until they were measured once."""
        with self._lock:
            is_due = time.monotonic() - self._measured_at >= _MAX_AGE_S
            if is_due and not self._is_measuring:
                self._is_measuring = True
                threading.Thread(target=self._measure, name="home-sizes", daemon=True).start()
            found = dict(self._sizes)
        for name, suffix in (("database", ""), ("write_ahead_log", "-wal")):
            path = self._home / f"master.sqlite{suffix}"
            found[name] = path.stat().st_size if path.exists() else 0
        return found

    def free_bytes(self) -> int:
        """Return how many bytes are free on the home's disk."""
        return shutil.disk_usage(self._home).free

    def _measure(self) -> None:
        try:
            sizes = {name: _bytes_below(f"{self._home}/{name}") for name in _DIRECTORIES}
        finally:
            with self._lock:
                self._is_measuring = False
                self._measured_at = time.monotonic()
        with self._lock:
            self._sizes = sizes


def _bytes_below(directory: str) -> int:
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(f"{root}/{name}").st_size
            except OSError:
                # Gone meanwhile.
                continue
    return total


logger = logging.getLogger(__name__)


class Master:
    """Everything behind the API; knows nothing of HTTP.

    Args:
        home: A prepared home that this process holds.
        devices: One entry per slot: "cpu" or a GPU's id.
        runs: A directory of runs made without a master, to be shown live.
        executor: The class of what starts the attempts.
        url: Where the master answers other machines.
        leases: How long runners may give no sign of life; the default leases if None.
        measurements: Where requests are counted; a new one if None.
        is_open: Whether it listens beyond loopback: requests with a token may name any host.
        pools: The pools whose runners this master starts.
        certificate: Its certificate (PEM) if it is asked by TLS. Browsers may name any host then.
        machine: What is known of its machine and these devices; the least if None.
    """

    def __init__(
        self,
        home: Home,
        devices: list[str],
        runs: Path | None = None,
        executor: type[Executor] = LocalExecutor,
        url: str = "",
        leases: Leases | None = None,
        measurements: Measurements | None = None,
        is_open: bool = False,
        certificate: str | None = None,
        pools: Mapping[str, tuple[PoolDefinition, Starter]] | None = None,
        machine: NodeFacts | None = None,
    ) -> None:
        self.is_open = is_open
        self.url = url
        self.certificate = certificate
        self.home = home
        self.measurements = measurements or Measurements()
        self.sizes = HomeSizes(home.path)
        self.devices = devices
        self.machine = machine or describe_machine(
            [KnownGpu(id=device) for device in devices], name=LOCAL_NAME
        )
        self.started_at = time.time()
        self.version = paceline.__version__
        self.controls = WaitingRequests()
        self.events = WaitingRequests()
        self.leases = leases or Leases()
        # First, as it may be damaged: nothing else is begun then.
        self.secrets = SecretStore(home.path / SECRET_FILE_NAME)
        self.database = _open_database(home)
        self.logs = LogStore(home.logs_path)
        self.links = SignInLinks()
        self.passwords = Passwords(self.database)
        self.sign_ins = SignIns(self.database)
        self.tokens = Tokens(self.database)
        self.home_token = home.token.encode()
        self.attempt_tokens = AttemptTokens(self.database, home.attempt_key)
        wakeups, default_storage = Wakeups(), str(home.path / "checkpoints")
        self.nodes = Nodes(
            self.database, home.cluster_id, self.tokens, wakeups, devices, self.leases.length_s
        )
        self.lost_nodes = LostNodes(self.nodes)
        self.searches = Searches()
        self.kept_names = NameCache()
        self.encodings = EncodingCache()
        self.search_views = SearchViews(self.database, self.searches)
        self.changes = StateChanges(
            self.searches, self.logs, self.nodes, wakeups, self.controls, default_storage
        )
        self.commands = Commands(self.changes, self.secrets)
        self.ingest = RecordIngest(self.changes)
        self.transfers = Transfers(self.database, home.cluster_id, self.changes)
        self.unmanaged = Unmanaged(self.changes, self.ingest)
        address = MasterAddress(url=url, certificate=certificate)
        self.reconciler = Reconciler(
            self.database,
            self.changes,
            NodeExecutor(self._make_executor(executor, address), self.nodes, self.database),
            self._launch_sources(),
            self.leases,
            (self.unmanaged.end_silent, self.lost_nodes.look),
            self.transfers.forget_ended,
        )
        self.retention = Retention(self.database, self.changes)
        self._watcher = None if runs is None else RunsWatcher(runs, self.database, self.unmanaged)
        self.recorder = Recorder(self.database, home.path)
        self.pool_runners = PoolRunners(
            pools or {},
            self.nodes,
            self.tokens,
            self.reconciler.pool_needs,
            address,
        )
        self.database.on_commit(self._on_commit)
        self.is_closing = False

    def _launch_sources(self) -> LaunchSources:
        cluster_id = self.home.cluster_id
        return LaunchSources(
            cluster_id=cluster_id,
            default_storage=self.changes.default_storage,
            machines=self.nodes,
            tokens=self.attempt_tokens,
            secrets=self.secrets,
            marks=StorageMarks(cluster_id, self.changes.storage_calls),
            lease_s=self.leases.length_s,
        )

    def _make_executor(self, kind: type[Executor], address: MasterAddress) -> Executor:
        context = ExecutorContext(
            attempts=self.home.attempts_path,
            home=self.home.path,
            master=address,
            devices=tuple(self.devices),
        )
        return kind.make(context)

    def start(self) -> None:
        """Begin to schedule; attempts of an earlier master are found again."""
        with self.database.read() as connection:
            missing = missing_methods(connection)
        for experiment_id, name in missing:
            logger.warning(
                "Experiment %d cannot go on, as its search method `%s` is not installed here, or"
                " takes other fields now. Hint: install the package that has it, and start the"
                " master again.",
                experiment_id,
                name,
            )
        self.database.write(self._catch_up).result()
        self.recorder.start()
        self.reconciler.start()
        self.retention.start()
        self.pool_runners.start()
        if self._watcher is not None:
            self._watcher.start()

    def renew_home_token(self) -> str:
        """Replace the home's token and return the new token; the old token opens nothing."""
        token = self.home.renew_token()
        self.home_token = token.encode()
        return token

    def close(self) -> None:
        """Stop; running attempts go on without a master."""
        self.is_closing = True
        self.pool_runners.close()
        self.reconciler.close()
        self.retention.close()
        if self._watcher is not None:
            self._watcher.close()
        self.recorder.close()
        self.database.close()

    def _catch_up(self, transaction: Transaction) -> None:
        for experiment_id in undecided_searches(transaction.connection):
            self.changes.search_operations.catch_up(transaction, experiment_id)

    def _on_commit(self, has_events: bool) -> None:
        if has_events:
            self.events.notify()


def _open_database(home: Home) -> Database:
    """Open the database of a home; both then agree on the cluster id and the uploaded code."""
    database = Database(home.database_path)
    home.keep_id(settle_cluster_id(database, home.cluster_id))
    contexts = home.contexts_path.glob("*.tar.gz")
    adopt_contexts(database, [path.name.split(".")[0] for path in contexts])
    return database
