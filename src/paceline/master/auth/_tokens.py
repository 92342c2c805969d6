"""Tokens of programs: with a scope, an expiry, and revocation."""

import hashlib
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Row, delete, insert, or_, select, update

from paceline._checked_secrets import TOKEN_PREFIX, make_secret
from paceline.master.store import Database, Transaction, keep_ids, new_id, tables
from paceline.messages.tokens import TokenScope

# Tokens that are of no use any more are listed for this long.
_KEPT_S = 90 * 24 * 3600.0


class TokenNameTakenError(RuntimeError):
    """Raised when a token of that name can still be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredToken:
    """A token as it is stored: its secret is not.

    Attributes:
        node: The only node that it registers, of a token of the scope `runner`; None for any.
        pool: The only pool that its nodes may be in; None for any.
    """

    id: int
    name: str
    scope: TokenScope
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    node: str | None = None
    pool: str | None = None

    @property
    def is_revoked(self) -> bool:
        """Whether it was revoked."""
        return self.revoked_at is not None

    @property
    def is_expired(self) -> bool:
        """Whether its time is over."""
        return self.expires_at is not None and self.expires_at <= time.time()

    @property
    def is_usable(self) -> bool:
        """Whether it is neither revoked nor expired."""
        return not self.is_revoked and not self.is_expired


class Tokens:
    """Make, find, list and revoke tokens; thread-safe.

    The digests of all tokens are in memory, so that a wrong one costs no look into the database.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        with database.read() as connection:
            rows = connection.execute(select(tables.tokens))
            self._keep({row.digest: _stored(row) for row in rows})

    def create(
        self,
        name: str,
        scope: TokenScope,
        expires_in_s: float | None,
        *,
        node: str | None = None,
        pool: str | None = None,
    ) -> "Future[tuple[StoredToken, str]]":
        """Make a token; the future gives it and its secret after the commit.

        The future raises `TokenNameTakenError` if a token of that name is neither revoked nor
        expired.
        """
        secret = make_secret(TOKEN_PREFIX)
        now = time.time()
        expires_at = None if expires_in_s is None else now + expires_in_s
        columns = tables.tokens.c

        def job(transaction: Transaction) -> tuple[StoredToken, str]:
            connection = transaction.connection
            is_over = or_(columns.revoked_at <= now - _KEPT_S, columns.expires_at <= now - _KEPT_S)
            taken = select(columns.id).where(
                columns.name == name,
                columns.revoked_at.is_(None),
                or_(columns.expires_at.is_(None), columns.expires_at > now),
            )
            if connection.execute(taken).first() is not None:
                raise TokenNameTakenError(
                    f"`name` must be that of no other token, but {name!r} is. Hint: choose another"
                    f" name, or revoke that token (`paceline token revoke {name}`)."
                )
            token = StoredToken(
                id=new_id(connection, tables.tokens), name=name, scope=scope, created_at=now,
                expires_at=expires_at, revoked_at=None, node=node, pool=pool,
            )  # fmt: skip
            values = {field: getattr(token, field) for field in _FIELDS} | {"scope": scope.value}
            connection.execute(insert(tables.tokens).values(digest=_digest(secret), **values))
            keep_ids(connection, tables.tokens)
            connection.execute(delete(tables.tokens).where(is_over))
            transaction.after_commit(lambda: self._remember(_digest(secret), token))
            return token, secret

        return self._database.write(job)

    def find(self, secret: str) -> StoredToken | None:
        """Return the token of a secret, which may be revoked or expired."""
        return self._known.get(_digest(secret))

    def get(self, token_id: int) -> StoredToken | None:
        """Return a token by its id, which may be revoked or expired."""
        return self._by_id.get(token_id)

    def list(self) -> list[StoredToken]:
        """Return all tokens, the newest first."""
        with self._lock:
            return sorted(self._known.values(), key=lambda token: -token.id)

    def revoke(self, token_id: int) -> "Future[bool]":
        """Revoke a token for good; the future tells whether there is one."""
        columns = tables.tokens.c

        def job(transaction: Transaction) -> bool:
            connection = transaction.connection
            digest = connection.execute(
                select(columns.digest).where(columns.id == token_id)
            ).scalar()
            if digest is None:
                return False
            now = time.time()
            connection.execute(
                update(tables.tokens)
                .where(columns.id == token_id, columns.revoked_at.is_(None))
                .values(revoked_at=now)
            )
            # A power cut must not bring it back to life.
            transaction.force()
            transaction.after_commit(lambda: self._forget(digest, now))
            return True

        return self._database.write(job)

    def _remember(self, digest: str, token: StoredToken) -> None:
        oldest = time.time() - _KEPT_S
        with self._lock:
            kept = {
                known: other
                for known, other in self._known.items()
                if min(other.revoked_at or oldest + 1, other.expires_at or oldest + 1) > oldest
            }
            self._keep(kept | {digest: token})

    def _forget(self, digest: str, now: float) -> None:
        with self._lock:
            token = self._known[digest]
            if not token.is_revoked:
                self._keep(self._known | {digest: replace(token, revoked_at=now)})

    def _keep(self, known: dict[str, StoredToken]) -> None:
        self._known = known
        self._by_id = {token.id: token for token in known.values()}


_FIELDS = ("id", "name", "scope", "created_at", "expires_at", "revoked_at", "node", "pool")


def _stored(row: Row[Any]) -> StoredToken:
    values = {field: getattr(row, field) for field in _FIELDS}
    return StoredToken(**values | {"scope": TokenScope(row.scope)})


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()
