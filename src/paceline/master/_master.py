"""The master: its parts, put together."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path

import paceline
from paceline.gpus import KnownGpu
from paceline.master._home_directory import Home
from paceline.master._home_sizes import HomeSizes
from paceline.master._measurements import Measurements
from paceline.master._name_cache import NameCache
from paceline.master._runs_watcher import RunsWatcher
from paceline.master._secret_store import SecretStore
from paceline.master._waiting_requests import WaitingRequests
from paceline.master.auth import AttemptTokens, Passwords, SignInLinks, SignIns, Tokens
from paceline.master.executors import Executor, ExecutorContext, LocalExecutor
from paceline.master.experiments import (
    Commands,
    Leases,
    Node,
    Place,
    Reconciler,
    RecordIngest,
    Retention,
    Searches,
    SearchViews,
    StateChanges,
    Unmanaged,
    missing_methods,
    undecided_searches,
)
from paceline.master.nodes import LostNodes, NodeExecutor, Nodes, StorageMarks, Transfers
from paceline.master.scheduling import NodeSlots
from paceline.master.starters import PoolDefinition, PoolRunners, Starter
from paceline.master.store import (
    Database,
    EncodingCache,
    LogStore,
    Transaction,
    adopt_contexts,
    settle_cluster_id,
)
from paceline.master.upkeep import Recorder
from paceline.messages.attempts import MasterAddress, StorageMark
from paceline.messages.node_runners import LOCAL_NAME, NodeFacts
from paceline.runner import SECRET_FILE_NAME
from paceline.runner.node import describe_machine

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
        self.nodes = Nodes(
            self.database,
            home.cluster_id,
            self.leases.length_s,
            token_of=self.tokens.get,
            wake=self._wake,
        )
        self.lost_nodes = LostNodes(self.nodes)
        self._marks = StorageMarks(home.cluster_id)
        node = self._own_node()
        self.searches = Searches()
        self.kept_names = NameCache()
        self.encodings = EncodingCache()
        self.search_views = SearchViews(self.database, self.searches)
        self.changes = StateChanges(
            self.searches, self.logs, self._wake, self.controls.notify, node.default_storage
        )
        self.commands = Commands(self.changes, self._known_slots, self.secrets)
        self.ingest = RecordIngest(self.changes)
        self.transfers = Transfers(
            self.database, home.cluster_id, node.default_storage, self.changes
        )
        self.unmanaged = Unmanaged(self.changes, self.ingest)
        address = MasterAddress(url=url, certificate=certificate)
        self.reconciler = Reconciler(
            self.database,
            self.changes,
            NodeExecutor(self._make_executor(executor, address), self.nodes, self.database),
            node,
            self.leases,
            self.nodes.slots,
            self.nodes.returning_slots,
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

    def _own_node(self) -> Node:
        return Node(
            home=self.home.path,
            cluster_id=self.home.cluster_id,
            devices=tuple(self.devices),
            lease_s=self.leases.length_s,
            token_of=self.attempt_tokens.token_of,
            secrets_of=self.secrets.of,
            place_of=self._place_of,
            mark_of=self._mark_storage,
        )

    def _mark_storage(self, storage: str) -> StorageMark | None:
        if "://" in storage:
            return None
        calls = self.changes.storage_calls
        return calls.poll("mark", storage, lambda: self._marks.mark(storage))

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
        """Put another token in place of the home's and return it; the old one opens nothing."""
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

    def _place_of(self, node_id: int) -> Place | None:
        found = self.nodes.get(node_id)
        if found is None:
            return None
        facts = found.facts
        return Place(
            name=found.name,
            devices=tuple(facts.devices),
            num_cores=facts.num_cores,
            python=facts.python,
            address=facts.address,
        )

    def _known_slots(self) -> list[NodeSlots]:
        """Return the slots of all nodes, also of those that are lost now."""
        # Which of them reach each other is known of those that are there.
        others = [
            node.slots(can_join=bool(node.facts.address), only_pool=self.nodes.only_pool(node))
            for node in self.nodes.all()
        ]
        return [
            NodeSlots(slots=tuple(range(len(self.devices)))),
            *others,
            *self.pool_runners.possible_slots(),
        ]

    def _wake(self) -> None:
        self.reconciler.wake()
        self.retention.wake()

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
