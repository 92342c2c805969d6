"""A master's parts on a real database, with nothing that starts processes."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Row, select

from paceline._base.journal_records import encode_metrics
from paceline._cluster.master.authentication import AttemptTokens
from paceline._cluster.master.executors import LocalExecutor, Machines
from paceline._cluster.master.experiments.attempt_end import end_attempt
from paceline._cluster.master.experiments.attempts import LaunchSources, Leases
from paceline._cluster.master.experiments.experiment_commands import Commands
from paceline._cluster.master.experiments.reconciler import Reconciler
from paceline._cluster.master.experiments.record_ingest import RecordIngest
from paceline._cluster.master.experiments.retention import Retention
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.experiments.storage_calls import StorageMarks
from paceline._cluster.master.home_directory import SecretStore
from paceline._cluster.master.searches.stored_searches import Searches
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Database, Transaction
from paceline._cluster.master.store.trial_logs import LogStore
from paceline._cluster.master.waiting import WaitingRequests
from paceline._cluster.messages.runner_messages import AttemptEnd, Mark, RecordBatch
from paceline._cluster.messages.states import ErrorKind, ExitReason
from paceline.config import validate_config
from paceline.journal import AnyRecord, CheckpointStored, MetricsReported, PreemptionAcknowledged
from paceline.search._search import replay
from paceline.search._search_messages import input_from_json, message_to_json

CONFIGS: dict[str, dict[str, Any]] = {
    "single": {"name": "single"},
    "random": {"name": "random", "max_trials": 3, "max_concurrent_trials": 2},
    "grid": {"name": "grid", "max_concurrent_trials": 2},
    "halving": {
        "name": "async_halving", "max_trials": 6, "num_rungs": 2, "divisor": 2,
        "max_concurrent_trials": 2, "time_metric": "epochs", "max_time": 4, "sampler": "random",
    },
    "adaptive": {
        "name": "adaptive_asha", "max_trials": 8, "divisor": 2, "max_concurrent_trials": 4,
        "time_metric": "epochs", "max_time": 8, "sampler": "random",
    },
}  # fmt: skip


class NotedControls(WaitingRequests):
    """Keeps the ids of the attempts whose control has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[int] = []

    def notify(self, key: int = 0) -> None:
        self.noted.append(key)


class Bench:
    """Drives experiments by hand: what runners and users would do, one call each."""

    def __init__(self, root: Path, num_slots: int) -> None:
        root.mkdir(exist_ok=True)
        self.database = Database(root / "master.sqlite")
        self.logs = LogStore(root / "logs")
        self.controls = NotedControls()
        self.searches = Searches()
        self.machines = Machines(["cpu"] * num_slots)
        self.changes = StateChanges(self.searches, self.logs, self.machines, controls=self.controls)
        self.secrets = SecretStore(root / "secrets.json")
        self.commands = Commands(self.changes, self.secrets, lambda notify: None)
        self.ingest = RecordIngest(self.changes)
        executor = LocalExecutor(root / "attempts", root)
        self.leases = Leases()
        self.reconciler = Reconciler(
            self.database, self.changes, executor, self.launch_sources(), self.leases
        )
        self.retention = Retention(self.database, self.changes)
        self._sequences: dict[tuple[int, int, int], int] = {}

    def launch_sources(self, devices: Sequence[str] = ("cpu",)) -> LaunchSources:
        """Return what the launch data come from, on a machine with these devices."""
        return LaunchSources(
            cluster_id="bench",
            default_storage="/home-of-paceline/checkpoints",
            machines=Machines(devices),
            tokens=AttemptTokens(self.database, b"key"),
            secrets=self.secrets,
            marks=StorageMarks("bench", self.changes.storage_calls),
        )

    def write(self, job: Callable[[Transaction], Any]) -> Any:
        """Run a job and wait for its commit."""
        return self.database.write(job).result()

    # ---- users -----------------------------------------------------------------------------

    def create(self, search: str = "single", *, activate: bool = True, **changed: Any) -> int:
        """Create an experiment of one of `CONFIGS`; `searcher` and others change fields."""
        config: dict[str, Any] = {
            "name": search,
            "entrypoint": "python3 train.py",
            "hyperparameters": {"lr": {"type": "double", "minval": 0, "maxval": 1, "count": 4}},
            "max_restarts": 2,
            "reproducibility": {"experiment_seed": 7},
        }
        searcher = CONFIGS[search] | {"metric": "loss"} | changed.pop("searcher", {})
        checked = validate_config(config | {"searcher": searcher} | changed)
        created: int = self.write(
            lambda transaction: self.commands.create(
                transaction, checked, submitted_config=None, context_digest=None, activate=activate
            )
        )
        return created

    def command(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Carry out a command."""
        return self.write(lambda t: getattr(self.commands, name)(t, *arguments, **options))

    # ---- the scheduler and runners ---------------------------------------------------------

    def schedule(self) -> list[int]:
        """Let the reconciler make one pass; returns the attempts that it created."""
        before = {row.id for row in self.rows(tables.attempts)}
        self.write(self.reconciler._pass)
        return [row.id for row in self.rows(tables.attempts) if row.id not in before]

    def start(self, trial_id: int) -> int:
        """Schedule until the trial has an attempt and let its runner announce itself."""
        self.schedule()
        attempt_id = self.live_attempt(trial_id).id
        self.send(attempt_id)
        return int(attempt_id)

    def send(self, attempt_id: int, *records: AnyRecord, rank: int = 0) -> list[Mark]:
        """Store further records of one rank's journal."""
        key = (attempt_id, 0, rank)
        first = self._sequences.get(key, 0)
        self._sequences[key] = first + len(records)
        return self.send_at(attempt_id, first, *records, rank=rank)

    def send_at(
        self, attempt_id: int, first: int, *records: AnyRecord, rank: int = 0
    ) -> list[Mark]:
        """Store records from a sequence number on, as a runner does that sends again."""
        numbered = list(enumerate(records, first))
        batch = RecordBatch(generation=0, rank=rank, records=numbered)
        return self.write(lambda t: self.ingest.store(t, attempt_id, [batch]))

    def validate(self, attempt_id: int, step: int, **metrics: Any) -> None:
        """Report validation metrics; `epochs` is the step unless it is given."""
        metrics = {"epochs": step} | metrics
        self.send(attempt_id, self.metrics("validation", step, **metrics))

    @staticmethod
    def metrics(group: str, step: int, **metrics: Any) -> MetricsReported:
        """Return a report."""
        return MetricsReported(
            time=1.0, group=group, steps_completed=step, metrics=encode_metrics(metrics)
        )

    def checkpoint(self, attempt_id: int, step: int, uuid: str = "") -> str:
        """Report a checkpoint and return its UUID."""
        uuid = uuid or f"checkpoint-{attempt_id}-{step}"
        self.send(
            attempt_id,
            CheckpointStored(
                time=1.0, uuid=uuid, steps_completed=step, metadata={"steps_completed": step},
                resources={"model": 3}, storage="/nowhere",
            ),
        )  # fmt: skip
        return uuid

    def end(
        self,
        attempt_id: int,
        *,
        code: int | None = 0,
        reason: ExitReason = ExitReason.EXITED,
        signal: int | None = None,
        detail: str | None = None,
        ago_s: float = 0.0,
        kind: ErrorKind | None = None,
        is_launch_error: bool = False,
        store: str | None = None,
    ) -> None:
        """Report the end of an attempt, which came some seconds ago."""
        end = AttemptEnd(
            reason=reason, code=code, signal=signal, time=time.time() - ago_s, detail=detail,
            kind=kind, is_launch_error=is_launch_error, store=store,
        )  # fmt: skip
        self.write(lambda t: end_attempt(self.changes, t, attempt_id, end))

    def leave(self, attempt_id: int) -> None:
        """Acknowledge preemption and exit with 0."""
        self.send(attempt_id, PreemptionAcknowledged(time=1.0))
        self.end(attempt_id)

    # ---- what is there ---------------------------------------------------------------------

    def rows(self, table: Any, **where: Any) -> list[Row[Any]]:
        """Return rows of a table."""
        query = select(table).order_by(*table.primary_key.columns)
        for name, value in where.items():
            query = query.where(table.c[name] == value)
        with self.database.read() as connection:
            return list(connection.execute(query))

    def row(self, table: Any, **where: Any) -> Row[Any]:
        """Return the only row."""
        [row] = self.rows(table, **where)
        return row

    def experiment(self, experiment_id: int) -> Row[Any]:
        """Return an experiment."""
        return self.row(tables.experiments, id=experiment_id)

    def state(self, experiment_id: int) -> str:
        """Return an experiment's state."""
        return str(self.experiment(experiment_id).state)

    def trial(self, trial_id: int) -> Row[Any]:
        """Return a trial."""
        return self.row(tables.trials, id=trial_id)

    def trials(self, experiment_id: int) -> list[Row[Any]]:
        """Return an experiment's trials."""
        return self.rows(tables.trials, experiment_id=experiment_id)

    def trial_states(self, experiment_id: int) -> list[str]:
        """Return the states of an experiment's trials."""
        return [row.state for row in self.trials(experiment_id)]

    def attempt(self, attempt_id: int) -> Row[Any]:
        """Return an attempt."""
        return self.row(tables.attempts, id=attempt_id)

    def live_attempt(self, trial_id: int) -> Row[Any]:
        """Return a trial's attempt that has not ended."""
        [row] = [a for a in self.rows(tables.attempts, trial_id=trial_id) if a.state != "ENDED"]
        return row

    def live_attempts(self) -> list[Row[Any]]:
        """Return all attempts that have not ended."""
        return [row for row in self.rows(tables.attempts) if row.state != "ENDED"]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the data of all events of a kind."""
        return [row.data for row in self.rows(tables.events, kind=kind)]

    def notes(self, trial_id: int) -> str:
        """Return what the master wrote into a trial's log."""
        return "\n".join(line.text for line in self.logs.read(trial_id))

    def inputs(self, experiment_id: int) -> list[dict[str, Any]]:
        """Return the search's stored inputs."""
        return [row.input for row in self.rows(tables.search_inputs, experiment_id=experiment_id)]

    def check_replay(self, experiment_id: int) -> None:
        """Check that the stored inputs, replayed, give exactly the stored operations."""
        experiment = self.experiment(experiment_id)
        config = validate_config(experiment.config)
        stored = self.rows(tables.search_inputs, experiment_id=experiment_id)
        assert [row.number for row in stored] == list(range(len(stored)))
        again = replay(
            config.search_config(),
            config.hyperparameters,
            experiment.seed,
            [input_from_json(json.dumps(row.input)) for row in stored],
            is_asking=config.searcher.is_asking,
        )
        decided = [[json.loads(message_to_json(operation)) for operation in ops] for ops in again]
        assert decided == [row.operations for row in stored]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Return a bench with four slots."""
    made = Bench(tmp_path, 4)
    yield made
    made.database.close()


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[[int], Bench]]:
    """Return a function that makes a bench with so many slots."""
    made: list[Bench] = []

    def make(num_slots: int) -> Bench:
        made.append(Bench(tmp_path / f"bench-{len(made)}", num_slots))
        return made[-1]

    yield make
    for one in made:
        one.database.close()
