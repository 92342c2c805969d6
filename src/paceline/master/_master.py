"""The master: its parts, put together."""

import time

import paceline
from paceline.master._boards import Board
from paceline.master._home import Home
from paceline.master.executors import LocalExecutor
from paceline.master.experiments import Commands, Intake, Keeper, Node, Reconciler, Searches
from paceline.master.store import Database, LogStore


class Master:
    """Everything behind the API; knows nothing of HTTP.

    Args:
        home: A prepared home that this process holds.
        devices: One entry per slot: "cpu" or a GPU's id.
    """

    def __init__(self, home: Home, devices: list[str]) -> None:
        self.home = home
        self.devices = devices
        self.started_at = time.time()
        self.version = paceline.__version__
        self.controls = Board()
        self.events = Board()
        self.database = Database(home.database_path)
        self.logs = LogStore(home.logs_path)
        node = Node(home=home.path, cluster_id=home.cluster_id, devices=tuple(devices))
        self.searches = Searches()
        self.keeper = Keeper(self.searches, self.logs, self._wake, self.controls.notify)
        self.commands = Commands(self.keeper, len(devices))
        self.intake = Intake(self.keeper)
        executor = LocalExecutor(home.attempts_path, home.path)
        self.reconciler = Reconciler(self.database, self.keeper, executor, node)
        self.database.on_commit(self._on_commit)
        self.is_closing = False

    def start(self) -> None:
        """Begin to schedule; attempts of an earlier master are found again."""
        self.reconciler.start()

    def close(self) -> None:
        """Stop; running attempts go on without a master."""
        self.is_closing = True
        self.reconciler.close()
        self.database.close()

    def _wake(self) -> None:
        self.reconciler.wake()

    def _on_commit(self, has_events: bool) -> None:
        if has_events:
            self.events.notify()
