"""Experiments of a list as JSON."""

import threading
from collections.abc import Sequence
from hashlib import blake2b
from types import SimpleNamespace

import msgspec
from pydantic_core import to_json
from sqlalchemy import Connection

from paceline.config import hide_secrets
from paceline.master.store._api_models import experiment_model
from paceline.master.store._database import load_json
from paceline.master.store._experiment_list import JSON_COLUMNS, Listed
from paceline.master.store._point_encoding import tagged
from paceline.master.store._row_counts import NO_COUNTS, ExperimentCounts, counts_of_experiments

_LIMIT_BYTES = 8 * 1024 * 1024
# What Python takes for an entry of a dictionary and its two objects.
_ENTRY_BYTES = 250


class ExperimentEncoder:
    """Encodes experiments, those that are as they were last time without making them again.

    An encoding is found by all that it is made of, so it is never out of date. Several threads may
    use it; they may make the same encoding at once.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, bytes] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()

    def encode(
        self, connection: Connection, listed: Sequence[Listed], *, is_brief: bool
    ) -> list[bytes]:
        """Return each experiment as JSON; `is_brief` leaves the configurations empty."""
        counts = counts_of_experiments(connection, [one.experiment.id for one in listed])
        return [
            self._encode_one(one, counts.get(one.experiment.id, NO_COUNTS), is_brief=is_brief)
            for one in listed
        ]

    def _encode_one(self, listed: Listed, counts: ExperimentCounts, *, is_brief: bool) -> bytes:
        if listed.values:
            return _encode(listed, counts, is_brief=is_brief)
        content = msgspec.msgpack.encode((tuple(listed.experiment), counts, is_brief))
        key = blake2b(content, digest_size=16).digest()
        encoded = self._kept.get(key)
        if encoded is None:
            encoded = _encode(listed, counts, is_brief=is_brief)
            self._keep(key, encoded)
        return encoded

    def _keep(self, key: bytes, encoded: bytes) -> None:
        num_bytes = len(encoded) + _ENTRY_BYTES
        if num_bytes > _LIMIT_BYTES:
            return
        with self._lock:
            if self._num_bytes + num_bytes > _LIMIT_BYTES:
                self._kept.clear()
                self._num_bytes = 0
            if key not in self._kept:
                self._kept[key] = encoded
                self._num_bytes += num_bytes


def _encode(listed: Listed, counts: ExperimentCounts, *, is_brief: bool) -> bytes:
    row = SimpleNamespace(**listed.experiment._mapping)
    for name in JSON_COLUMNS:
        setattr(row, name, load_json(getattr(row, name)))
    config = {} if is_brief else hide_secrets(row.config)
    model = experiment_model(row, counts, config=config, values=tagged(listed.values))
    return to_json(model, inf_nan_mode="null")
