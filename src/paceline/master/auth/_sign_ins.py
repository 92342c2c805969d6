"""Sign-ins of browsers: what their cookies stand for."""

import hashlib
import secrets
import time

from sqlalchemy import delete, insert, select

from paceline.master.store import Database, Transaction, tables

SIGN_IN_S = 30 * 24 * 3600


class SignIns:
    """Open, find and close sign-ins; they outlive the master's process."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def open(self, user: str) -> str:
        """Sign a user in and return the secret that the cookie holds; waits for the commit."""
        secret, now = secrets.token_urlsafe(32), time.time()
        sign_ins = tables.sign_ins

        def job(transaction: Transaction) -> None:
            connection = transaction.connection
            connection.execute(delete(sign_ins).where(sign_ins.c.expires_at <= now))
            values = {"digest": _digest(secret), "user": user, "created_at": now}
            connection.execute(insert(sign_ins).values(**values, expires_at=now + SIGN_IN_S))

        self._database.write(job).result()
        return secret

    def user_of(self, secret: str) -> str | None:
        """Return whose sign-in a secret stands for, if it stands for one."""
        sign_ins = tables.sign_ins
        query = select(sign_ins.c.user).where(
            sign_ins.c.digest == _digest(secret), sign_ins.c.expires_at > time.time()
        )
        with self._database.read() as connection:
            return connection.execute(query).scalar()

    def close(self, secret: str) -> None:
        """End a sign-in; waits for the commit."""
        sign_ins = tables.sign_ins

        def job(transaction: Transaction) -> None:
            transaction.connection.execute(
                delete(sign_ins).where(sign_ins.c.digest == _digest(secret))
            )
            # A power cut must not open it again.
            transaction.force()

        self._database.write(job).result()


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()
