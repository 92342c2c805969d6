"""Experiments of a list as JSON."""

from collections.abc import Sequence
from types import SimpleNamespace

from pydantic_core import to_json
from sqlalchemy import Connection

from paceline.config import hide_secrets
from paceline.master.store._api_models import experiment_model
from paceline.master.store._database_engine import load_json
from paceline.master.store._encoding_cache import EncodingCache
from paceline.master.store._experiment_list import JSON_COLUMNS, Listed
from paceline.master.store._point_encoding import tagged
from paceline.master.store._row_counts import NO_COUNTS, ExperimentCounts, counts_of_experiments


def encode_experiments(
    connection: Connection, listed: Sequence[Listed], cache: EncodingCache, *, is_brief: bool
) -> list[bytes]:
    """Return each experiment as JSON; `is_brief` leaves the configurations empty."""
    counts = counts_of_experiments(connection, [one.experiment.id for one in listed])
    return [
        _encode_experiment(one, counts.get(one.experiment.id, NO_COUNTS), cache, is_brief=is_brief)
        for one in listed
    ]


def _encode_experiment(
    listed: Listed, counts: ExperimentCounts, cache: EncodingCache, *, is_brief: bool
) -> bytes:
    def encode() -> bytes:
        row = SimpleNamespace(**listed.experiment._mapping)
        for name in JSON_COLUMNS:
            setattr(row, name, load_json(getattr(row, name)))
        config = {} if is_brief else hide_secrets(row.config)
        model = experiment_model(row, counts, config=config, values=tagged(listed.values))
        return to_json(model, inf_nan_mode="null")

    if listed.values:
        return encode()
    return cache.encoded(("experiment", tuple(listed.experiment), counts, is_brief), encode)
