"""Rows as models of the API and encoded lists; stored configs, members and environments."""

import base64
import hashlib
import json
import threading
import zlib
from collections.abc import Callable, Sequence
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa
from pydantic_core import to_json

from paceline._base.journal_records import encode_float
from paceline._cluster.master.store import tables, user_tables
from paceline._cluster.master.store.database import load_json
from paceline._cluster.master.store.metric_summaries import (
    Summary,
    first_metric_names,
    read_summary,
    read_x_axes,
)
from paceline._cluster.master.store.row_ids_and_counts import (
    NO_COUNTS,
    ExperimentCounts,
    experiment_counts,
    ids_parameter,
    many_ids,
)
from paceline._cluster.master.store.series_reader import tagged
from paceline._cluster.master.store.series_writer import NO_AXES
from paceline._cluster.messages.experiment_models import (
    Attempt,
    AttemptExit,
    AttemptNode,
    Checkpoint,
    Experiment,
    Message,
    MetricSummary,
    Trial,
)
from paceline._cluster.messages.runner_messages import LOCAL_NAME, LOCAL_NODE, AttemptEnd
from paceline._cluster.messages.states import AttemptState, CheckpointState, ExperimentState
from paceline.config._environment_and_secrets import hide_secrets
from paceline.config._experiment_config import ExperimentConfig
from paceline.config._searcher_registry import MissingSearcher, searcher_section
from paceline.config._validate_config import read_stored_config

_MAX_CACHED = 500
# Begins the stored path of a run that was reported by a token that opens no directory here.
REPORTED = "reported:"
_cache: dict[int, tuple[dict[str, Any], ExperimentConfig]] = {}


def config_of(experiment: sa.Row[Any]) -> ExperimentConfig:
    """Return the configuration of an experiment's row.

    Raises:
        paceline.config.ConfigError: It was not valid when it was stored.
    """
    stored: dict[str, Any] = experiment.config
    known = _cache.get(experiment.id)
    if known is not None and known[0] is stored:
        return known[1]
    # Rows are read for each request; comparing takes a fraction of the time of checking.
    is_known = known is not None and known[0] == stored
    config = known[1] if known is not None and is_known else read_stored_config(stored)
    if len(_cache) >= _MAX_CACHED:
        _cache.clear()
    _cache[experiment.id] = (stored, config)
    return config


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """Part of an attempt on a single node.

    Attributes:
        node_id: The node.
        name: The name of the node.
        slots: The slots that the attempt holds there.
        begun_at: When its runner said that it is there, in seconds since the epoch.
        port: A port that is free there; all meet at the port of the first member.
        exit: How it ended.
        ended_at: When the master learned of it, in seconds since the epoch.
        is_lost: Nobody can reach its node any more.
        sends_checkpoints: It does not share the checkpoint directory with the master.
    """

    node_id: int
    name: str
    slots: list[int]
    begun_at: float | None = None
    port: int = 0
    exit: AttemptEnd | None = None
    ended_at: float | None = None
    is_lost: bool = False
    sends_checkpoints: bool = False

    @property
    def state(self) -> AttemptState:
        """State of this part, derived from its exit and its start time."""
        if self.exit is not None:
            return AttemptState.ENDED
        return AttemptState.PENDING if self.begun_at is None else AttemptState.RUNNING


def read_members(attempt: sa.Row[Any]) -> list[Member]:
    """Return the members of an attempt, rank 0's first; empty for an attempt on a single node."""
    return msgspec.convert(attempt.members or [], list[Member])


def stored_members(members: list[Member]) -> Any:
    """Return members as JSON values for the database; None for an empty list."""
    return msgspec.to_builtins(members) or None


def num_slots_of(attempt: sa.Row[Any]) -> int:
    """Return the number of slots of an attempt on all its nodes."""
    return sum(map(len, slots_by_node(attempt).values()))


def slots_by_node(attempt: sa.Row[Any]) -> dict[int, list[int]]:
    """Return the slots held by an attempt, by node id."""
    if attempt.members is None:
        return {attempt.node_id or LOCAL_NODE: attempt.slots}
    return {member.node_id: member.slots for member in read_members(attempt)}


def store_environment(connection: sa.Connection, environment: dict[str, Any]) -> str:
    """Store an environment and return its digest."""
    content = msgspec.json.encode(environment, order="deterministic")
    digest = hashlib.sha256(content).hexdigest()
    environments = tables.environments
    known = sa.select(environments.c.digest).where(environments.c.digest == digest)
    if connection.execute(known).first() is None:
        connection.execute(
            sa.insert(environments).values(digest=digest, content=zlib.compress(content))
        )
    return digest


def read_environment(connection: sa.Connection, digest: str | None) -> dict[str, Any] | None:
    """Return the environment with a digest; None if unknown."""
    environments = tables.environments
    query = sa.select(environments.c.content).where(environments.c.digest == digest)
    content = None if digest is None else connection.execute(query).scalar()
    if content is None:
        return None
    found: dict[str, Any] = msgspec.json.decode(zlib.decompress(content))
    return found


def drop_unused_environments(connection: sa.Connection, digests: set[str]) -> None:
    """Delete the given environments without any referring attempt."""
    attempts, environments = tables.attempts.c, tables.environments
    for digest in digests:
        query = sa.select(attempts.id).where(attempts.environment == digest).limit(1)
        if connection.execute(query).first() is None:
            connection.execute(sa.delete(environments).where(environments.c.digest == digest))


def _shared(model: type[Message], table: sa.Table, *, but: set[str]) -> tuple[str, ...]:
    """Return the names that a model and a table share, without those that need a conversion."""
    return tuple(name for name in model.model_fields if name in table.c and name not in but)


_OF_EXPERIMENT = _shared(
    Experiment, tables.experiments, but={"best_metric", "config", "warnings", "notes"}
)
_OF_TRIAL = _shared(Trial, tables.trials, but={"best_metric", "metadata", "alerts"})
_OF_ATTEMPT = _shared(Attempt, tables.attempts, but={"exit"})
_OF_CHECKPOINT = _shared(Checkpoint, tables.checkpoints, but={"metric"})


def _columns(row: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


PROJECT_NAME = (
    sa.select(user_tables.projects.c.name)
    .where(user_tables.projects.c.id == tables.experiments.c.project_id)
    .scalar_subquery()
)
"""The name of an experiment's project."""


def experiment_view(connection: sa.Connection, row: sa.Row[Any]) -> Experiment:
    """Return an experiment's row as the API model, with secrets hidden."""
    counts = experiment_counts(connection, [row.id]).get(row.id, NO_COUNTS)
    query = sa.select(PROJECT_NAME).where(tables.experiments.c.id == row.id)
    project = connection.scalar(query) or ""
    return experiment_model(row, counts, config=hide_secrets(row.config), project=project)


def experiment_model(
    row: Any, counts: ExperimentCounts, *, config: dict[str, Any], project: str, values: Any = None
) -> Experiment:
    """Return the API model of an experiment from its row and counts.

    Args:
        row: The row, or an object with its columns.
        counts: The experiment's counts.
        config: The configuration that is shown.
        project: The name of its project.
        values: The columns that a list shows besides, if any.
    """
    searcher = row.config["searcher"]
    return Experiment(
        **_columns(row, _OF_EXPERIMENT),
        # Searcher fields as stored: a list also shows configurations invalid for this version.
        searcher=searcher["name"],
        kind=(row.config.get("interactive") or {}).get("kind", "training"),
        metric=searcher["metric"],
        smaller_is_better=searcher["smaller_is_better"],
        has_rungs=searcher_section(searcher["name"]).has_rungs,
        num_trials=counts.num_trials,
        num_running=counts.num_running,
        best_metric=_number(row.best_metric),
        config=config,
        project=project,
        warnings=[*row.warnings, *_missing_method(row)],
        is_unmanaged=row.external_id is not None,
        run_dir=row.external_path and row.external_path.removeprefix(REPORTED),
        has_code=row.context_digest is not None,
        is_unmeasured=row.search_end == "unmeasured",
        num_checkpoints=counts.num_checkpoints,
        checkpoint_bytes=counts.checkpoint_bytes,
        values=values or {},
    )


def _missing_method(experiment: Any) -> list[str]:
    """Return the warning about a missing search method of a live experiment, or an empty list."""
    if experiment.ended_at is not None or experiment.external_id is not None:
        return []
    searcher = config_of(experiment).searcher
    if not isinstance(searcher, MissingSearcher):
        return []
    return [
        f"It waits, as its search method `{searcher.name}` is not installed on the master, or takes"
        " other fields now. Hint: install the package that has it, and start the master again."
    ]


class TrialFacts(NamedTuple):
    """Facts about a trial from other tables: experiment state, attempts, newest checkpoint."""

    experiment_state: str
    started_at: float | None
    is_running: bool
    latest_checkpoint: str | None


def trial_view(connection: sa.Connection, row: sa.Row[Any]) -> Trial:
    """Return a trial's row as the API model with all details."""
    summary, has_more = _summaries(connection, row)
    return trial_model(
        row,
        trial_facts(connection, [row])[row.id],
        metadata=row.metadata,
        alerts=row.alerts or [],
        summary=summary,
        has_more_metrics=has_more,
        attempts=attempt_views(connection, row.id),
    )


def trial_facts(connection: sa.Connection, rows: Sequence[sa.Row[Any]]) -> dict[int, TrialFacts]:
    """Return the facts about trials from other tables, by trial id."""
    ids = [row.id for row in rows]
    started = _trial_starts(connection, ids)
    latest = _latest_checkpoints(connection, ids)
    experiment_states = _experiment_states(connection, {row.experiment_id for row in rows})
    facts = {}
    for row in rows:
        started_at, num_running = started.get(row.id, (None, 0))
        facts[row.id] = TrialFacts(
            experiment_states[row.experiment_id], started_at, num_running > 0, latest.get(row.id)
        )
    return facts


def trial_model(row: Any, facts: TrialFacts, **details: Any) -> Trial:
    """Return the API model of a trial from its row and facts.

    Args:
        row: The row, or an object with its columns.
        facts: Facts about the trial in other tables.
        details: The fields that a list leaves out.
    """
    return Trial(
        **_columns(row, _OF_TRIAL),
        experiment_state=ExperimentState(facts.experiment_state),
        is_running=facts.is_running,
        best_metric=_number(row.best_metric),
        started_at=facts.started_at,
        latest_checkpoint=facts.latest_checkpoint,
        **details,
    )


def attempt_views(connection: sa.Connection, trial_id: int) -> list[Attempt]:
    """Return a trial's attempts, oldest first."""
    attempts = tables.attempts
    query = sa.select(attempts).where(attempts.c.trial_id == trial_id).order_by(attempts.c.number)
    nodes = tables.nodes.c
    names = {row.id: row.name for row in connection.execute(sa.select(nodes.id, nodes.name)).all()}
    return [
        Attempt(
            **_columns(row, _OF_ATTEMPT),
            exit=_exit_model(row.exit),
            nodes=_nodes_of(row, names),
            **_restarts_of(row),
        )
        for row in connection.execute(query).all()
    ]


def _restarts_of(attempt: sa.Row[Any]) -> dict[str, Any]:
    by_generation = sorted((attempt.restart_causes or {}).items(), key=lambda item: int(item[0]))
    causes = [cause for _, causes in by_generation for cause in causes]
    return {"restarts": len(causes), "last_restart_cause": causes[-1] if causes else None}


def _nodes_of(attempt: sa.Row[Any], names: dict[int, str]) -> list[AttemptNode]:
    if members := read_members(attempt):
        return [AttemptNode(name=one.name, slots=one.slots) for one in members]
    if attempt.run_attempt is not None:
        return []
    name = LOCAL_NAME
    if attempt.node_id is not None:
        forgotten = attempt.node_name or f"node {attempt.node_id}, which is forgotten"
        name = names.get(attempt.node_id, forgotten)
    return [AttemptNode(name=name, slots=attempt.slots)]


def checkpoint_views(rows: list[sa.Row[Any]]) -> list[Checkpoint]:
    """Return checkpoints with the searched metric at their step."""
    return [
        Checkpoint(
            **_columns(row, _OF_CHECKPOINT),
            metric=_number(row.metric),
        )
        for row in rows
    ]


def encode_cursor(*position: Any) -> str:
    """Return a position in a list as an opaque cursor."""
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> list[Any]:
    """Return the position encoded by `encode_cursor`.

    Raises:
        ValueError: The cursor was made elsewhere.
    """
    try:
        # `encode_cursor` drops the padding.
        position = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"`cursor` must be the `next_cursor` of an earlier answer, but got {cursor!r}."
        ) from error
    if not isinstance(position, list):
        raise ValueError(f"`cursor` must be the `next_cursor` of an answer, but got {cursor!r}.")
    return position


def _experiment_states(connection: sa.Connection, ids: set[int]) -> dict[int, str]:
    found = connection.execute(_EXPERIMENT_STATES, ids_parameter(ids)).all()
    return {row.id: row.state for row in found}


def _trial_starts(
    connection: sa.Connection, trial_ids: list[int]
) -> dict[int, tuple[float | None, int]]:
    """Return the first start time and the number of running attempts, by trial id."""
    found = connection.execute(_STARTS_OF_TRIALS, ids_parameter(trial_ids)).all()
    return {row[0]: (row[1], row[2]) for row in found}


def _latest_checkpoints(connection: sa.Connection, trial_ids: list[int]) -> dict[int, str]:
    found = connection.execute(_LATEST_CHECKPOINTS, ids_parameter(trial_ids)).all()
    return {row.id: row.uuid for row in found if row.uuid is not None}


def _trial_starts_query() -> sa.Select[Any]:
    attempts = tables.attempts.c
    is_running = attempts.state == AttemptState.RUNNING.value
    return (
        sa.select(
            attempts.trial_id,
            sa.func.min(attempts.started_at),
            sa.func.sum(sa.case((is_running, 1), else_=0)),
        )
        .where(attempts.trial_id.in_(many_ids()))
        .group_by(attempts.trial_id)
    )


def _latest_checkpoints_query() -> sa.Select[Any]:
    trials, checkpoints = tables.trials.c, tables.checkpoints.c
    # Subquery with LIMIT 1 per trial: only the last checkpoint is read, however many there are.
    latest = (
        sa.select(checkpoints.uuid)
        .where(
            checkpoints.trial_id == trials.id,
            checkpoints.state == CheckpointState.COMPLETED.value,
        )
        .order_by(
            checkpoints.steps_completed.desc(),
            checkpoints.attempt.desc(),
            checkpoints.created_at.desc(),
        )
        .limit(1)
        .scalar_subquery()
    )
    return sa.select(trials.id, latest.label("uuid")).where(trials.id.in_(many_ids()))


# Made once, as `row_ids_and_counts` has its queries.
_EXPERIMENT_STATES = sa.select(tables.experiments.c.id, tables.experiments.c.state).where(
    tables.experiments.c.id.in_(many_ids())
)
_STARTS_OF_TRIALS = _trial_starts_query()
_LATEST_CHECKPOINTS = _latest_checkpoints_query()


def _summaries(
    connection: sa.Connection, trial: sa.Row[Any]
) -> tuple[dict[str, dict[str, MetricSummary]], bool]:
    """Return summaries of the first metrics and the searched metric, and if there are more."""
    names, has_more = first_metric_names(connection, trial.id)
    if has_more:
        experiments = tables.experiments.c
        config = sa.select(experiments.config).where(experiments.id == trial.experiment_id)
        searched = connection.execute(config).scalar_one()["searcher"].get("metric")
        names.setdefault("validation", set()).add(searched or "")
    summaries = read_summary(connection, trial.id, names)
    axes = read_x_axes(connection, [trial.id]).get(trial.id, NO_AXES)
    shown = {
        group: {
            key: _summary_model(summary, axes.of(group, key))
            for key, summary in sorted(by_key.items())
        }
        for group, by_key in sorted(summaries.items())
    }
    return shown, has_more


def _summary_model(summary: Summary, x_axis: str | None) -> MetricSummary:
    mean = summary.sum / summary.num_numbers if summary.num_numbers else None
    return MetricSummary(
        count=summary.count,
        last=tagged(summary.last),
        last_step=summary.last_step,
        min=_number(summary.min),
        max=_number(summary.max),
        mean=_number(mean),
        x_axis=x_axis,
    )


def _exit_model(stored: dict[str, Any] | None) -> AttemptExit | None:
    if stored is None:
        return None
    detail = stored.get("error") or stored.get("detail")
    return AttemptExit(
        reason=stored["reason"],
        kind=stored.get("kind"),
        code=stored["code"],
        signal=stored["signal"],
        outcome=stored.get("outcome"),
        error=detail,
        time=stored["time"],
    )


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return encode_float(float(value))


_LIMIT_BYTES = 16 * 1024 * 1024
# Size estimate for a dictionary entry in Python, with its key and value objects.
_ENTRY_BYTES = 250


class EncodingCache:
    """Cache of encoded rows, keyed by a digest of their whole content, so entries never go stale.

    Several threads may use it; they may make the same encoding at once.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, bytes] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()

    def encoded(self, content: Any, encode: Callable[[], bytes]) -> bytes:
        """Return the cached encoding of a content, or make and keep a new encoding.

        Args:
            content: Plain values: all that the encoding depends on, its kind among them.
            encode: Makes it.
        """
        try:
            plain = msgspec.msgpack.encode(content)
        except OverflowError:
            # An integer of more than 64 bits.
            return encode()
        key = blake2b(plain, digest_size=16).digest()
        found = self._kept.get(key)
        if found is None:
            found = encode()
            self._keep(key, found)
        return found

    def _keep(self, key: bytes, encoded: bytes) -> None:
        num_bytes = len(encoded) + _ENTRY_BYTES
        if num_bytes > _LIMIT_BYTES:
            return
        with self._lock:
            # The next lists fill the cache again, so no order of use is kept.
            if self._num_bytes + num_bytes > _LIMIT_BYTES:
                self._kept.clear()
                self._num_bytes = 0
            if key not in self._kept:
                self._kept[key] = encoded
                self._num_bytes += num_bytes


_JSON_COLUMNS = ("hparams", "latest_metric")
LISTED_TRIAL_COLUMNS = (
    *(
        tables.trials.c[name]
        for name in (
            *("id", "experiment_id", "request_id", "state", "seed", "restarts", "retries"),
            *("num_attempts", "steps_completed", "progress", "status", "best_metric", "best_step"),
            *("created_at", "ended_at", "stop_reason", "error", "error_kind", "target_length"),
            "num_records_lost",
        )
    ),
    *(sa.type_coerce(tables.trials.c[name], sa.Text).label(name) for name in _JSON_COLUMNS),
)
"""The columns of trials in a list; JSON columns are text."""


def encode_trials(
    connection: sa.Connection, rows: Sequence[sa.Row[Any]], cache: EncodingCache
) -> list[bytes]:
    """Return each trial as JSON.

    Args:
        connection: The database.
        rows: The trials' `LISTED_TRIAL_COLUMNS`; more columns may follow.
        cache: Trials encoded before.
    """
    facts = trial_facts(connection, rows)
    return [_encode_trial(row, facts[row.id], cache) for row in rows]


def _encode_trial(row: sa.Row[Any], facts: TrialFacts, cache: EncodingCache) -> bytes:
    columns = row[: len(LISTED_TRIAL_COLUMNS)]

    def encode() -> bytes:
        shown = SimpleNamespace(**row._mapping)
        for name in _JSON_COLUMNS:
            text = getattr(shown, name)
            setattr(shown, name, None if text is None else load_json(text))
        return to_json(trial_model(shown, facts), inf_nan_mode="null")

    return cache.encoded(("trial", columns, facts), encode)
