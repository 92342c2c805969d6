"""The environments of attempts; equal ones are stored once."""

import hashlib
import zlib
from typing import Any

import msgspec
from sqlalchemy import Connection, delete, insert, select

from paceline.master.store import _tables as tables


def store_environment(connection: Connection, environment: dict[str, Any]) -> str:
    """Store an environment and return its digest."""
    content = msgspec.json.encode(environment, order="deterministic")
    digest = hashlib.sha256(content).hexdigest()
    environments = tables.environments
    known = select(environments.c.digest).where(environments.c.digest == digest)
    if connection.execute(known).first() is None:
        connection.execute(
            insert(environments).values(digest=digest, content=zlib.compress(content))
        )
    return digest


def read_environment(connection: Connection, digest: str | None) -> dict[str, Any] | None:
    """Return an environment; None if it is not known."""
    environments = tables.environments
    query = select(environments.c.content).where(environments.c.digest == digest)
    content = None if digest is None else connection.execute(query).scalar()
    if content is None:
        return None
    found: dict[str, Any] = msgspec.json.decode(zlib.decompress(content))
    return found


def drop_unused_environments(connection: Connection, digests: set[str]) -> None:
    """Delete those of some environments that no attempt has any more."""
    attempts, environments = tables.attempts.c, tables.environments
    for digest in digests:
        query = select(attempts.id).where(attempts.environment == digest).limit(1)
        if connection.execute(query).first() is None:
            connection.execute(delete(environments).where(environments.c.digest == digest))
