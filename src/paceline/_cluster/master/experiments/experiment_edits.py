"""Edits of an experiment by users: texts, queue place, limits, archive, continuation.

Earlier versions of an experiment's notes: who saved them, and when.
"""

import hashlib
from typing import Any

import sqlalchemy as sa

from paceline._cluster.master.experiments.attempts import checkpoint_root
from paceline._cluster.master.experiments.config_rules import check_changed_config
from paceline._cluster.master.experiments.scheduler_input import check_changed_rank, waiting_trials
from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.scheduling.pool_policies import moved
from paceline._cluster.master.scheduling.pools import Waiting
from paceline._cluster.master.searches.search_limits import change_limits
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import config_of
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.reach import current_user
from paceline._cluster.master.store.row_ids_and_counts import insert_document, update_experiment
from paceline._cluster.messages.runner_messages import DEFAULT_POOL
from paceline._cluster.messages.states import ExperimentState, TrialState, told_state
from paceline.config._experiment_config import ExperimentConfig
from paceline.config._fields_and_problems import UNITS
from paceline.config._searcher_section import Searcher
from paceline.config._validate_config import merge_configs, validate_config

_KIND = "notes"
_MOST_VERSIONS = 50
_documents = tables.documents


def add_notes_version(
    connection: sa.Connection, experiment_id: int, before: str, text: str
) -> None:
    """Store the notes of an edit, and the notes before the first edit; the newest 50 stay."""
    if before == text:
        return
    found = read_notes_history(connection, experiment_id)
    number = int(found[0]["number"]) + 1 if found else 1
    known_before = found[0]["text"] if found else ""
    if known_before != before:
        # Set when the experiment was created, or by a client of another tracker.
        _store(connection, experiment_id, number, before, user=None)
        number += 1
    _store(connection, experiment_id, number, text, user=current_user())
    of_notes = (_documents.c.kind == _KIND, _documents.c.parent == str(experiment_id))
    last = f"{max(number - _MOST_VERSIONS, 0):09}"
    connection.execute(sa.delete(_documents).where(*of_notes, _documents.c.name <= last))


def read_notes_history(connection: sa.Connection, experiment_id: int) -> list[dict[str, Any]]:
    """Return the stored versions, the newest first: number, text, user and time of each."""
    query = sa.select(_documents.c.content, _documents.c.created_at).where(
        _documents.c.kind == _KIND, _documents.c.parent == str(experiment_id)
    )
    rows = connection.execute(query.order_by(_documents.c.name.desc()))
    return [{**row.content, "saved_at": row.created_at} for row in rows]


def _store(
    connection: sa.Connection, experiment_id: int, number: int, text: str, user: str | None
) -> None:
    parent, name = str(experiment_id), f"{number:09}"
    content = {"number": number, "text": text, "user": user}
    insert_document(connection, _KIND, parent, name, content, experiment_id=experiment_id)


def version_of_notes(notes: str) -> str:
    """Return a mark of notes, for edits that must not replace those of someone else."""
    return hashlib.sha256(notes.encode()).hexdigest()[:16]


def edit_experiment(
    transaction: Transaction,
    changes: StateChanges,
    experiment_id: int,
    *,
    name: str | None = None,
    description: str | None = None,
    labels: list[str] | None = None,
    notes: str | None = None,
    notes_version: str | None = None,
    priority: int | None = None,
    weight: float | None = None,
    max_slots: int | None = None,
    limits: dict[str, Any] | None = None,
    project_id: int | None = None,
) -> None:
    """Change the given fields; None keeps a field.

    Raises:
        NotFoundError: There is no such experiment.
        paceline.config.ConfigError: A limit is not valid, or a policy is not met.
        RefusedError: It has ended, or is not this master's, and one of the last four is given, or
            `max_slots` are too few for a trial, or the notes are no longer of `notes_version`.
    """
    row = StateChanges.experiment(transaction.connection, experiment_id)
    if notes is not None and notes_version not in (None, version_of_notes(row.notes)):
        raise RefusedError(
            "notes_changed",
            f"The notes of experiment {experiment_id} must be those that the edit began from, but"
            " have been changed since. Hint: read and merge them, or send the change without"
            " `notes_version` to replace them.",
        )
    if limits is not None or not priority is weight is max_slots is None:
        _check_waits(row)
    if max_slots:
        _check_max_slots(row, max_slots)
    if priority is not None:
        check_changed_rank(transaction.connection, row, config_of(row), priority)
    values: dict[str, Any] = {
        "name": name, "description": description, "notes": notes,
        "priority": priority, "weight": weight, "max_slots": max_slots,
        "project_id": project_id,
    }  # fmt: skip
    if labels is not None:
        values["labels"] = list(dict.fromkeys(label for label in labels if label.strip()))
    changed = {k: v for k, v in values.items() if v is not None}
    check_changed_config(transaction.connection, row, **changed)
    if limits is not None:
        change_limits(transaction, changes, row, limits)
        transaction.emit("experiment_changed", experiment_id, fields=["limits"])
    if notes is not None:
        add_notes_version(transaction.connection, experiment_id, row.notes, notes)
    _change_experiment(transaction, experiment_id, changed)


def move_experiment(
    transaction: Transaction,
    experiment_id: int,
    *,
    ahead_of: int | None = None,
    behind: int | None = None,
    to_end: bool = False,
) -> None:
    """Move an experiment in the queue, among experiments of its pool with equal priority.

    Args:
        transaction: The transaction.
        experiment_id: The experiment.
        ahead_of: It goes right ahead of this one.
        behind: It goes right behind this one.
        to_end: It goes to the end, and not to the front, if neither is given.

    Raises:
        NotFoundError: There is no such experiment.
        RefusedError: One of them has ended, is not this master's, or waits in another pool.
    """
    connection = transaction.connection
    row = StateChanges.experiment(connection, experiment_id)
    _check_waits(row)
    others = [
        trial
        for trial in waiting_trials(connection, is_by_arrival=True)
        if trial.pool == _experiment_pool(row) and trial.experiment_id != experiment_id
    ]
    experiments = tables.experiments
    query = sa.select(experiments.c.id, experiments.c.queue_place).where(
        experiments.c.queue_place.is_not(None),
        experiments.c.state.in_([ExperimentState.ACTIVE.value, ExperimentState.PAUSED.value]),
    )
    places = {one.id: float(one.queue_place) for one in connection.execute(query)}
    other_id = ahead_of if ahead_of is not None else behind
    if other_id is not None:
        other = StateChanges.experiment(connection, other_id)
        _check_waits(other)
        _check_together(row, other)
        first, last = _ends_of_queue(connection, other, others, places)
    elif others:
        first = _place_in_queue(others[0], places)
        last = _place_in_queue(others[-1], places)
    else:
        return
    is_ahead = ahead_of is not None or (behind is None and not to_end)
    changed = moved(
        places, experiment_id,
        ahead_of=first if is_ahead else None, behind=None if is_ahead else last,
    )  # fmt: skip
    for changed_id, place in changed.items():
        if places.get(changed_id) != place:
            _change_experiment(transaction, changed_id, {"queue_place": place})


def set_archived(transaction: Transaction, experiment_id: int, *, is_archived: bool) -> None:
    """Archive an ended experiment to hide its row from lists, or undo this.

    Raises:
        NotFoundError: There is no such experiment.
        RefusedError: It has not ended.
    """
    row = StateChanges.experiment(transaction.connection, experiment_id)
    if is_archived and not ExperimentState(row.state).is_terminal:
        raise RefusedError(
            "not_ended",
            f"Experiment {experiment_id} must have ended to be archived, but is"
            f" {told_state(row.state)}.",
        )
    if row.is_archived != is_archived:
        _change_experiment(transaction, experiment_id, {"is_archived": is_archived})


def _check_waits(row: sa.Row[Any]) -> None:
    """Refuse queue changes for an unmanaged, stopping or ended experiment."""
    state = ExperimentState(row.state)
    if row.external_id is None and not (state.is_terminal or state.is_stopping):
        return
    how = (
        "runs without this master" if row.external_id is not None else f"is {told_state(row.state)}"
    )
    raise RefusedError(
        "not_scheduled",
        f"Experiment {row.id} must be active or paused to change when it gets slots, but {how}.",
    )


def _check_max_slots(row: sa.Row[Any], max_slots: int) -> None:
    needed = config_of(row).resources.fewest_slots
    if max_slots < needed:
        raise RefusedError(
            "too_few_slots",
            f"`max_slots` must be at least {needed}, which a trial of experiment {row.id} needs,"
            f" but got {max_slots}. Hint: pause the experiment to let none of its trials run.",
        )


def _check_together(row: sa.Row[Any], other: sa.Row[Any]) -> None:
    if row.id == other.id:
        raise RefusedError(
            "same_experiment", f"Experiment {row.id} cannot go ahead of or behind itself."
        )
    if _experiment_pool(row) != _experiment_pool(other):
        raise RefusedError(
            "other_pool",
            f"Experiment {row.id} waits in the pool {_experiment_pool(row)!r}, but {other.id} in"
            f" {_experiment_pool(other)!r}. Each pool has an order of its own.",
        )


def _experiment_pool(row: sa.Row[Any]) -> str:
    return config_of(row).resources.pool or DEFAULT_POOL


def _place_in_queue(trial: Waiting, places: dict[int, float]) -> float:
    return places.get(trial.experiment_id, float(trial.trial_id))


def _ends_of_queue(
    connection: sa.Connection, other: sa.Row[Any], waiting: list[Waiting], places: dict[int, float]
) -> tuple[float, float]:
    """Return the first and last queue places of an experiment's waiting trials."""
    if other.id in places:
        return places[other.id], places[other.id]
    ids = [trial.trial_id for trial in waiting if trial.experiment_id == other.id]
    if not ids:
        # None waits now; the next one does so where those are that run.
        trials = tables.trials.c
        query = sa.select(trials.id).where(
            trials.experiment_id == other.id, trials.state == TrialState.ACTIVE.value
        )
        ids = list(connection.execute(query).scalars())
    if not ids:
        raise RefusedError("nothing_waits", f"No trial of experiment {other.id} wants slots now.")
    return float(min(ids)), float(max(ids))


def _change_experiment(
    transaction: Transaction, experiment_id: int, values: dict[str, Any]
) -> None:
    if not values:
        return
    update_experiment(transaction.connection, experiment_id, **values)
    transaction.emit("experiment_changed", experiment_id, fields=sorted(values))


def continued_trial_config(
    parent: sa.Row[Any], trial: sa.Row[Any], overrides: dict[str, Any]
) -> ExperimentConfig:
    """Return the config of a `single` experiment for continuing a trial.

    Args:
        parent: The experiment of the trial.
        trial: The trial.
        overrides: Fields of the config that change.

    Raises:
        paceline.config.ConfigError: The overrides do not fit.
    """
    old = config_of(parent)
    given = overrides.get("searcher")
    has_length = isinstance(given, dict) and "max_length" in given
    length: dict[str, Any] = {}
    # Not beside another one: the two would be merged.
    if old.searcher.length_unit in UNITS and not has_length:
        length = {"max_length": {old.searcher.length_unit: old.searcher.length}}
    config = parent.config | {
        "name": f"{parent.name} (trial {trial.id} continued)",
        "searcher": {
            "name": "single",
            "metric": old.searcher.metric,
            "smaller_is_better": old.searcher.smaller_is_better,
            "source_trial_id": trial.id,
            **length,
        },
        "hyperparameters": _as_constants(old.hyperparameters, trial.hparams),
    }
    return validate_config(merge_configs(config, overrides))


def overridden_config(experiment: sa.Row[Any], overrides: dict[str, Any]) -> ExperimentConfig:
    """Return the config of a continued experiment after applying overrides.

    Raises:
        RefusedError: The overrides change fields that a continued experiment keeps.
        paceline.config.ConfigError: The overrides do not fit.
    """
    if config_of(experiment).searcher.name != "single":
        raise RefusedError(
            "override_refused",
            "Only a single search takes a changed configuration when it is continued.",
        )
    merged = validate_config(merge_configs(experiment.config, overrides))
    if merged.searcher.name != "single":
        raise RefusedError("override_refused", "The continued search must remain single.")
    if "hyperparameters" in overrides:
        raise RefusedError(
            "override_refused",
            "A trial keeps its hyperparameters when its experiment is continued. Hint:"
            " `paceline trial continue` begins another trial, with others if you like.",
        )
    if checkpoint_root(merged) != checkpoint_root(config_of(experiment)):
        raise RefusedError(
            "override_refused",
            "A continued experiment keeps its checkpoint storage: its checkpoints are there.",
        )
    return merged


def _as_constants(space: dict[str, Any], hparams: dict[str, Any]) -> dict[str, Any]:
    """Return the space with every hyperparameter fixed at a trial's value."""
    fixed: dict[str, Any] = {}
    for name, value in hparams.items():
        entry = space.get(name)
        if isinstance(value, dict) and isinstance(entry, dict) and "type" not in entry:
            fixed[name] = _as_constants(entry, value)
        else:
            fixed[name] = {"type": "const", "val": value}
    return fixed


def check_ended(experiment: sa.Row[Any]) -> None:
    """Refuse an experiment with live trials."""
    if not ExperimentState(experiment.state).is_terminal:
        raise RefusedError(
            "not_ended",
            f"Experiment {experiment.id} must have ended, but is {told_state(experiment.state)}.",
        )


def check_can_reopen(experiment: sa.Row[Any], searcher: Searcher) -> None:
    """Refuse an experiment that has not ended, or with a search that cannot be reopened."""
    check_ended(experiment)
    if not searcher.can_reopen:
        raise RefusedError(
            "search_cannot_reopen",
            f"The search of experiment {experiment.id} ({searcher.name}) cannot be reopened, as"
            " it has made its decisions. Hint: `paceline experiment continue --max-trials N` goes"
            " on with more trials, and `paceline trial continue` resumes one of them.",
        )
