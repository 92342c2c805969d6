"""The program of the second process for reads; its arguments: socket, database, sources."""

import gc
import logging
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from paceline._cluster.master.api.readers import (
    READY,
    Answer,
    length_of,
    packed,
    response_of,
    source_state,
)
from paceline._cluster.master.api.requests_and_answers import records_parameter
from paceline._cluster.master.store.database import DatabaseReader
from paceline._cluster.master.store.list_pages import EncodingCache, NameCache

logger = logging.getLogger(__name__)


@dataclass
class _Records:
    """Records available to routes in the second process."""

    database: DatabaseReader
    encodings: EncodingCache = field(default_factory=EncodingCache)
    kept_names: NameCache = field(default_factory=NameCache)


def main() -> None:
    """Answer the questions from a socket in order, until its other end is closed."""
    # Ctrl-C goes to all processes of a terminal; this one ends with the first process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[3] != source_state():
        raise SystemExit("Paceline was changed since the master started: reads are left to it.")
    # Imported objects live for ever: freezing them spares the garbage collector the scan.
    gc.freeze()
    stream = socket.socket(fileno=int(sys.argv[1])).makefile("rwb")
    records = _Records(DatabaseReader(Path(sys.argv[2])))
    stream.write(READY)
    stream.flush()
    while (question := _next_question(stream)) is not None:
        stream.write(packed(_answer(records, *question)))
        stream.flush()


def _next_question(stream: BufferedRWPair) -> Any:
    size = length_of(stream.read(4))
    return pickle.loads(stream.read(size)) if size else None  # noqa: S301 - from our own process


def _answer(
    records: _Records, endpoint: Callable[..., Any], arguments: dict[str, Any]
) -> Answer | None:
    """Return a function's answer; None on failure, so the first process repeats the read."""
    began = time.monotonic()
    name = records_parameter(endpoint)
    assert name is not None
    try:
        found = response_of(endpoint(**arguments, **{name: records}))
    except Exception as error:
        logger.debug("Not answered: %s", error)
        return None
    return Answer(bytes(found.body), found.media_type, time.monotonic() - began)
