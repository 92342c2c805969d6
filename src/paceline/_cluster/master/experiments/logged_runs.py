"""Runs that clients of other trackers log here: unmanaged runs whose journal the master writes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline._base.journal_records import (
    AnyRecord,
    AttemptFinished,
    AttemptStarted,
    MetricsReported,
    StatusReported,
)
from paceline._base.run_directory import RunInfo
from paceline._cluster.master.experiments.state_decisions import NotFoundError, RefusedError
from paceline._cluster.master.experiments.unmanaged_runs import (
    Unmanaged,
    experiment_of_run,
    run_attempts,
    trial_of_run,
)
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.reach import (
    NotAllowedError,
    check_object,
    creating_in,
    sees_document,
)
from paceline._cluster.master.store.row_ids_and_counts import (
    insert_document,
    update_attempt,
    update_experiment,
)
from paceline._cluster.messages.runner_messages import RunBatch
from paceline._cluster.messages.states import AttemptState

PROJECT_LABEL = "project:"
"""What the label of a run's project begins with."""

_attempts = tables.attempts.c
# Made once: for each report it costs more to make than to run.
_NEWEST_ATTEMPT = (
    sa.select(
        _attempts.id,
        _attempts.run_attempt,
        _attempts.state,
        _attempts.outcome,
        sa.select(sa.func.max(tables.journal_marks.c.sequence))
        .where(tables.journal_marks.c.attempt_id == _attempts.id)
        .scalar_subquery()
        .label("newest"),
    )
    .join(tables.experiments, tables.experiments.c.id == _attempts.experiment_id)
    .where(tables.experiments.c.external_id == sa.bindparam("wanted"))
    .order_by(_attempts.number.desc())
    .limit(1)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """Rows of a logged run: its experiment, its only trial, its newest attempt."""

    run_id: str
    experiment_id: int
    trial: sa.Row[Any]
    attempt: sa.Row[Any]


class LoggedRuns:
    """Writes runs for their clients; used in the writer thread, inside a transaction.

    Args:
        unmanaged: Takes up the records.
    """

    def __init__(self, unmanaged: Unmanaged) -> None:
        self._unmanaged = unmanaged

    def open(
        self,
        transaction: Transaction,
        run_id: str,
        *,
        name: str,
        project: str | None = None,
        tags: Sequence[str] = (),
        hparams: Mapping[str, Any] | None = None,
        created: float | None = None,
        host: str = "",
        lease_s: float | None = None,
        within: tuple[str, str, str] | None = None,
    ) -> LoggedRun:
        """Begin a run; one that is known goes on in a further attempt, unless it still runs.

        Args:
            transaction: Everything happens in it, or nothing.
            run_id: The run, in a form that no other client's run can have.
            name: What it is called.
            project: Becomes a label.
            tags: Further labels.
            hparams: Its hyperparameters so far.
            created: When it began, in seconds since the epoch; now by default.
            host: The machine on which it runs, if known.
            lease_s: Seconds without a record after which it counts as lost; None is for ever.
            within: Kind, parent and name of the client's document to which it belongs: only those
                who see that see the run.
        """
        now = time.time()
        known = experiment_of_run(transaction.connection, run_id)
        if known is None:
            info = RunInfo(
                run_id=run_id,
                name=name,
                created=now if created is None else created,
                checkpoint_storage="",
                hparams=dict(hparams or {}),
            )
            with creating_in(project_of_document(transaction.connection, within)):
                self._unmanaged.register(transaction, info, "", is_trusted=False)
            self.relabel(transaction, run_id, project=project, tags=tags)
        elif hparams:
            self.set_hparams(transaction, run_id, hparams)
        experiment, trial = self._rows(transaction.connection, run_id)
        attempts = run_attempts(transaction.connection, trial.id)
        if not attempts or attempts[-1].outcome is not None:
            start = AttemptStarted(
                time=now if created is None or attempts else created,
                attempt=len(attempts),
                generation=0,
                rank=0,
                world_size=1,
                pid=0,
                host=host,
                resumed_from=None,
                # What it has logged stays, as it does with the client's own server.
                steps_completed=trial.steps_completed,
            )
            self._take(transaction, run_id, len(attempts), [start], -1, lease_s=lease_s)
        return self.get(transaction.connection, run_id)

    def get(self, connection: sa.Connection, run_id: str) -> LoggedRun:
        """Return the rows of a run.

        Raises:
            NotFoundError: There is none.
        """
        experiment, trial = self._rows(connection, run_id)
        newest = run_attempts(connection, trial.id)[-1]
        return LoggedRun(run_id=run_id, experiment_id=experiment.id, trial=trial, attempt=newest)

    def append(
        self,
        transaction: Transaction,
        run_id: str,
        records: Sequence[AnyRecord],
        *,
        is_alive: bool = True,
        lease_s: float | None = None,
    ) -> None:
        """Store further records of a run's newest attempt; one that was lost runs again.

        Raises:
            NotFoundError: There is no such run.
            ValueError: A record has a value that cannot be.
        """
        check_object(transaction.connection, "run_id", run_id)
        attempt = transaction.connection.execute(_NEWEST_ATTEMPT, {"wanted": run_id}).first()
        if attempt is None:
            raise NotFoundError(f"There is no run {run_id!r}.")
        number = -1 if attempt.newest is None else attempt.newest
        is_running = attempt.state == AttemptState.RUNNING.value and attempt.outcome is None
        if is_running and is_alive and lease_s is None and all(map(_is_metrics, records)):
            # Most calls: they need none of the statements that look for changes of states.
            numbered = list(enumerate(records, start=number + 1))
            batch = RunBatch(attempt.run_attempt, 0, 0, numbered, number)
            self._unmanaged.append(transaction, attempt.id, batch)
            return
        self._take(
            transaction, run_id, attempt.run_attempt, records, number,
            is_alive=is_alive, lease_s=lease_s,
        )  # fmt: skip

    def finish(
        self, transaction: Transaction, run_id: str, outcome: str, error: str | None = None
    ) -> None:
        """End a run; one that has ended stays as it is.

        Args:
            transaction: Everything happens in it, or nothing.
            run_id: The run.
            outcome: One of `journal_records.OUTCOMES`.
            error: Why it failed.
        """
        if self.get(transaction.connection, run_id).attempt.outcome is None:
            end = AttemptFinished(time=time.time(), outcome=outcome, error=error)
            self.append(transaction, run_id, [end], is_alive=False)

    def reopen(self, transaction: Transaction, run_id: str) -> None:
        """Let a run that has ended go on in the same attempt; one that runs stays as it is."""
        attempt = self.get(transaction.connection, run_id).attempt
        if attempt.outcome is not None:
            update_attempt(transaction.connection, attempt.id, outcome=None, error=None)
            record = StatusReported(time=time.time(), status="The run goes on.")
            self.append(transaction, run_id, [record])

    def relabel(
        self,
        transaction: Transaction,
        run_id: str,
        *,
        name: str | None = None,
        project: str | None = None,
        tags: Sequence[str] | None = None,
        notes: str | None = None,
    ) -> None:
        """Change the texts that people see of a run; None leaves one as it is."""
        experiment, _ = self._rows(transaction.connection, run_id)
        values: dict[str, Any] = {"name": name, "notes": notes}
        kept = [label for label in experiment.labels if label.startswith(PROJECT_LABEL)]
        if project is not None:
            kept = [f"{PROJECT_LABEL}{project}"]
        others = [label for label in experiment.labels if not label.startswith(PROJECT_LABEL)]
        values["labels"] = [*kept, *dict.fromkeys(others if tags is None else tags)]
        values = {key: value for key, value in values.items() if value is not None}
        if any(getattr(experiment, key) != value for key, value in values.items()):
            update_experiment(transaction.connection, experiment.id, **values)

    def set_hparams(
        self, transaction: Transaction, run_id: str, hparams: Mapping[str, Any]
    ) -> None:
        """Replace the hyperparameters of a run."""
        trials, (_, trial) = tables.trials, self._rows(transaction.connection, run_id)
        if trial.hparams != hparams:
            statement = sa.update(trials).where(trials.c.id == trial.id)
            transaction.connection.execute(statement.values(hparams=dict(hparams)))

    def _rows(self, connection: sa.Connection, run_id: str) -> tuple[sa.Row[Any], sa.Row[Any]]:
        experiment = experiment_of_run(connection, run_id)
        if experiment is None:
            raise NotFoundError(f"There is no run {run_id!r}.")
        return experiment, trial_of_run(connection, experiment.id)

    def _take(
        self,
        transaction: Transaction,
        run_id: str,
        attempt: int,
        records: Sequence[AnyRecord],
        newest: int,
        *,
        is_alive: bool = True,
        lease_s: float | None = None,
    ) -> None:
        numbered = list(enumerate(records, start=newest + 1))
        batch = RunBatch(attempt, 0, 0, numbered, newest)
        self._unmanaged.take(
            transaction, run_id, [batch], is_alive=is_alive, lease_s=lease_s, is_trusted=False
        )


def _is_metrics(record: AnyRecord) -> bool:
    return isinstance(record, MetricsReported)


def get_document(connection: sa.Connection, kind: str, parent: str, name: str) -> Any:
    """Return the content of a client's document, None if there is none."""
    documents = tables.documents.c
    query = sa.select(documents.content, documents.experiment_id, documents.project_id)
    row = connection.execute(query.where(*_place(kind, parent, name))).first()
    if row is None or not sees_document(connection, row.experiment_id, row.project_id):
        return None
    return row.content


def find_link(connection: sa.Connection, link: str) -> tuple[int | None, str | None] | None:
    """Return the experiment, or else the label, of what a client prints as the place of its run.

    Args:
        connection: Where to read.
        link: ``ENTITY/PROJECT[/runs/RUN]`` of W&B, or ``experiments/ID[/runs/RUN]`` of MLflow.
    """
    first, second, *rest = (*link.strip("/").split("/"), "")
    run = rest[1] if rest[:1] == ["runs"] and len(rest) > 2 else None
    if first == "experiments":
        if run is not None:
            experiment = experiment_of_run(connection, run)
            return None if experiment is None else (experiment.id, None)
        known = get_document(connection, "mlflow.experiment", "", second)
        return None if known is None else (None, PROJECT_LABEL + known["name"])
    if run is not None:
        column = tables.documents.c.experiment_id
        query = sa.select(column).where(*_place("wandb-run", f"{first}/{second}", run))
        experiment_id = connection.scalar(query)
        return None if experiment_id is None else (experiment_id, None)
    known = get_document(connection, "wandb-project", first, second)
    return None if known is None else (None, PROJECT_LABEL + second)


def list_documents(
    connection: sa.Connection, kind: str, parent: str | None = None, name: str | None = None
) -> list[sa.Row[Any]]:
    """Return rows of the documents of a kind, the earliest first."""
    documents = tables.documents
    query = sa.select(documents).where(documents.c.kind == kind)
    if parent is not None:
        query = query.where(documents.c.parent == parent)
    if name is not None:
        query = query.where(documents.c.name == name)
    rows = connection.execute(query.order_by(documents.c.created_at, documents.c.name))
    return [
        row for row in rows.all() if sees_document(connection, row.experiment_id, row.project_id)
    ]


def change_document(
    connection: sa.Connection,
    kind: str,
    parent: str,
    name: str,
    change: Callable[[Any], Any],
    *,
    experiment_id: int | None = None,
) -> Any:
    """Replace the content of a client's document, and return the new content.

    Args:
        connection: The writer's.
        kind: What it is, beginning with the client's name.
        parent: What it belongs to, such as a project.
        name: Its name there.
        change: Called with the content, None if there is none, returns the new one; None deletes.
        experiment_id: The experiment of the run that it is about: it goes with that.
    """
    documents, place = tables.documents, _place(kind, parent, name)
    before = get_document(connection, kind, parent, name)
    after = change(before)
    if after is None:
        connection.execute(sa.delete(documents).where(*place))
    elif before is None:
        hidden = connection.execute(sa.select(documents.c.experiment_id).where(*place)).first()
        if hidden is not None and hidden.experiment_id is not None:
            raise NotAllowedError("such object", is_hidden=True)
        if hidden is not None:
            raise RefusedError(
                "name_taken",
                f"The name {name!r} must not be in use in another project, but is. Hint: choose"
                " another name.",
            )
        insert_document(connection, kind, parent, name, after, experiment_id=experiment_id)
    else:
        statement = sa.update(documents).where(*place)
        connection.execute(statement.values(content=after, changed_at=time.time()))
    return after


def project_of_document(
    connection: sa.Connection, place: tuple[str, str, str] | None
) -> int | None:
    """Return the project of a client's document by its kind, parent and name, if there is one."""
    column = tables.documents.c.project_id
    return None if place is None else connection.scalar(sa.select(column).where(*_place(*place)))


def _place(kind: str, parent: str, name: str) -> tuple[Any, ...]:
    columns = tables.documents.c
    return columns.kind == kind, columns.parent == parent, columns.name == name
