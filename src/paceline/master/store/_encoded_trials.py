"""Trials of a list as JSON."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from pydantic_core import to_json
from sqlalchemy import Connection, Row, Text, type_coerce

from paceline.master.store import _tables as tables
from paceline.master.store._api_models import TrialFacts, trial_facts, trial_model
from paceline.master.store._database_engine import load_json
from paceline.master.store._encoding_cache import EncodingCache

_trials = tables.trials.c
_JSON_COLUMNS = ("hparams", "latest_metric")
LISTED_TRIAL_COLUMNS = (
    *(
        _trials[name]
        for name in (
            *("id", "experiment_id", "request_id", "state", "seed", "restarts", "retries"),
            *("num_attempts", "steps_completed", "progress", "status", "best_metric", "best_step"),
            *("created_at", "ended_at", "stop_reason", "error", "error_kind", "target_length"),
            "num_records_lost",
        )
    ),
    *(type_coerce(_trials[name], Text).label(name) for name in _JSON_COLUMNS),
)
"""What a list shows of trials; what is stored as JSON is text."""


def encode_trials(
    connection: Connection, rows: Sequence[Row[Any]], cache: EncodingCache
) -> list[bytes]:
    """Return each trial as JSON.

    Args:
        connection: The database.
        rows: What `LISTED_TRIAL_COLUMNS` are of the trials; more columns may stand behind.
        cache: What was encoded before.
    """
    facts = trial_facts(connection, rows)
    return [_encode_trial(row, facts[row.id], cache) for row in rows]


def _encode_trial(row: Row[Any], facts: TrialFacts, cache: EncodingCache) -> bytes:
    columns = row[: len(LISTED_TRIAL_COLUMNS)]

    def encode() -> bytes:
        shown = SimpleNamespace(**row._mapping)
        for name in _JSON_COLUMNS:
            text = getattr(shown, name)
            setattr(shown, name, None if text is None else load_json(text))
        return to_json(trial_model(shown, facts), inf_nan_mode="null")

    return cache.encoded(("trial", columns, facts), encode)
