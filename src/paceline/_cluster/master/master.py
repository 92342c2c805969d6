"""The master put together from its parts."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import disable_created_metrics

import paceline
from paceline._base.gpus import KnownGpu
from paceline._cluster.master.authentication import (
    AttemptTokens,
    Passwords,
    SignedUrls,
    SignInLinks,
    SignIns,
    Tokens,
)
from paceline._cluster.master.executors import Executor, ExecutorContext, LocalExecutor
from paceline._cluster.master.experiments.attempts import LaunchSources, Leases
from paceline._cluster.master.experiments.deletions import FileRemoval
from paceline._cluster.master.experiments.directory_watchers import RunsWatcher
from paceline._cluster.master.experiments.experiment_commands import Commands
from paceline._cluster.master.experiments.idle_trials import IdleTrials
from paceline._cluster.master.experiments.logged_runs import LoggedRuns
from paceline._cluster.master.experiments.reconciler import Reconciler
from paceline._cluster.master.experiments.record_ingest import RecordIngest
from paceline._cluster.master.experiments.retention import Retention
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.experiments.storage_calls import StorageMarks, in_own_thread
from paceline._cluster.master.experiments.storage_health import StorageHealth
from paceline._cluster.master.experiments.tensorboard_watcher import TensorboardWatcher
from paceline._cluster.master.experiments.unmanaged_runs import Unmanaged
from paceline._cluster.master.home_directory import Home, SecretStore
from paceline._cluster.master.measurements import HomeSizes, Measurements
from paceline._cluster.master.nodes.checkpoint_transfers import Transfers
from paceline._cluster.master.nodes.node_registry import Nodes
from paceline._cluster.master.nodes.node_work import LostNodes, NodeExecutor
from paceline._cluster.master.notify.notices import NotifySettings
from paceline._cluster.master.notify.notifier import Notifier
from paceline._cluster.master.oidc_provider import OidcProvider, OidcSettings
from paceline._cluster.master.searches.sampler_answers import SamplerAnswers
from paceline._cluster.master.searches.search_limits import SearchClock
from paceline._cluster.master.searches.stored_searches import (
    Searches,
    SearchViews,
    missing_methods,
    undecided_searches,
)
from paceline._cluster.master.starters.pool_runners import PoolDefinition, PoolRunners
from paceline._cluster.master.starters.slurm_ssh_ray_starters import Starter
from paceline._cluster.master.store.api_models_from_rows import EncodingCache
from paceline._cluster.master.store.database import Database, Transaction, settle_cluster_id
from paceline._cluster.master.store.experiment_list import NameCache
from paceline._cluster.master.store.quotas import note_use_of_month
from paceline._cluster.master.store.run_files import FileContents
from paceline._cluster.master.store.trial_logs import LogStore
from paceline._cluster.master.streams import Streams
from paceline._cluster.master.upkeep.recovery_records import Recorder
from paceline._cluster.master.users import AuditLog, Users
from paceline._cluster.master.waiting import WaitingRequests, Wakeups
from paceline._cluster.messages.runner_messages import LOCAL_NAME, MasterAddress, NodeFacts
from paceline._cluster.runner.attempt_directory import FILE_NAME as SECRET_FILE_NAME
from paceline._cluster.runner.node_facts import describe_machine

logger = logging.getLogger(__name__)

# Series of the times at which other series began would double their number.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Master:
    """Everything behind the API; knows nothing of HTTP.

    Args:
        home: A prepared home that this process holds.
        devices: One entry per slot: "cpu" or a GPU's id.
        runs: A directory of runs made without a master, to be shown live.
        executor: The class of the executor.
        url: Where the master answers other machines.
        leases: How long runners may give no sign of life; the default leases if None.
        measurements: Where requests are counted; a new one if None.
        is_open: Whether it listens beyond loopback: requests with a token may name any host.
        pools: The pools whose runners this master starts.
        certificate: Its certificate (PEM) if it is asked by TLS. Browsers may name any host then.
        machine: The facts of its machine and these devices; the least if None.
        notify: The channels for messages to people, and rules; no channels if None.
        oidc: The provider by whom people sign in, if any.
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
        notify: NotifySettings | None = None,
        oidc: OidcSettings | None = None,
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
        self.users = Users(self.database, self.tokens.load)
        self.database.write(lambda made: note_use_of_month(made.connection)).result()
        self.audit = AuditLog(self.database)
        self.home_token = home.token.encode()
        self.attempt_tokens = AttemptTokens(self.database, home.attempt_key)
        self.signed_urls = SignedUrls(home.attempt_key)
        self.oidc = None if oidc is None else OidcProvider(oidc, home.attempt_key)
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
        settings = notify or NotifySettings()
        self.sampler_answers = SamplerAnswers(self.database, self.changes)
        self.notifier = Notifier(self.database, settings, home.cluster_id, url)
        self.commands = Commands(self.changes, self.secrets, settings.check)
        self.ingest = RecordIngest(self.changes)
        self.transfers = Transfers(self.database, home.cluster_id, self.changes)
        self.unmanaged = Unmanaged(self.changes, self.ingest)
        self.logged_runs = LoggedRuns(self.unmanaged)
        self.files = FileContents(home.path / "files")
        address = MasterAddress(url=url, certificate=certificate)
        self.reconciler = Reconciler(
            self.database,
            self.changes,
            NodeExecutor(self._make_executor(executor, address), self.nodes, self.database),
            self._launch_sources(),
            self.leases,
            (
                self.unmanaged.end_silent,
                self.lost_nodes.look,
                SearchClock(self.changes),
                IdleTrials(self.ingest.activities, self.ingest.raise_alert, self.commands.pause),
            ),
            self.transfers.forget_ended,
        )
        self.file_removal = FileRemoval(
            self.database, self.changes, self.logs, self.secrets, home.attempts_path
        )
        self.storage_health = StorageHealth(self.database, self.changes)
        self.retention = Retention(self.database, self.changes, self.files)
        self._watchers: list[RunsWatcher | TensorboardWatcher] = []
        if runs is not None:
            self._watchers = [
                RunsWatcher(runs, self.database, self.unmanaged, self.files),
                TensorboardWatcher(runs, self.database, self.unmanaged, self.files),
            ]
        self.recorder = Recorder(self.database, home.path)
        self.pool_runners = PoolRunners(
            pools or {},
            self.nodes,
            self.tokens,
            self.reconciler.pool_needs,
            address,
        )
        self.database.on_commit(self._on_commit)
        self.streams = Streams()
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
        self.sampler_answers.start()
        self.recorder.start()
        self.reconciler.start()
        self.retention.start()
        self.storage_health.start()
        # A storage may hang.
        in_own_thread(self.file_removal.finish)
        self.pool_runners.start()
        self.notifier.start()
        for watcher in self._watchers:
            watcher.start()

    def renew_home_token(self) -> str:
        """Replace the home's token and return the new token; the old token opens nothing."""
        token = self.home.renew_token()
        self.home_token = token.encode()
        return token

    def close(self) -> None:
        """Stop; running attempts continue without a master."""
        self.is_closing = True
        self.sampler_answers.close()
        self.pool_runners.close()
        self.reconciler.close()
        self.retention.close()
        self.storage_health.close()
        for watcher in self._watchers:
            watcher.close()
        self.recorder.close()
        self.notifier.close()
        self.database.close()

    def _catch_up(self, transaction: Transaction) -> None:
        for experiment_id in undecided_searches(transaction.connection):
            self.changes.search_operations.catch_up(transaction, experiment_id)

    def _on_commit(self, has_events: bool) -> None:
        if has_events:
            self.events.notify()


def _open_database(home: Home) -> Database:
    """Open the database of a home; both then agree on the cluster id."""
    database = Database(home.database_path)
    home.keep_id(settle_cluster_id(database, home.cluster_id))
    return database
