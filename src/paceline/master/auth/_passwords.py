"""Passwords of users, kept as Argon2 hashes."""

import threading
import time
from collections import deque
from concurrent.futures import Future

from sqlalchemy import delete, func, insert, select

from paceline.master.store import Database, Transaction, tables

_MAX_FAILURES = 10
_FAILURE_WINDOW_S = 60.0


class TooManyAttemptsError(RuntimeError):
    """Raised when too many wrong passwords came in a short time."""


class Passwords:
    """Set and check passwords; thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._failures: deque[float] = deque()
        # One check at a time: each takes 64 MiB and all cores, so a flood must queue.
        self._lock = threading.Lock()

    def are_set(self) -> bool:
        """Tell whether any user has a password."""
        with self._database.read() as connection:
            count: int = connection.execute(
                select(func.count()).select_from(tables.users)
            ).scalar_one()
        return count > 0

    def set(self, user: str, password: str) -> "Future[None]":
        """Give a user a password and end the user's sign-ins; done with the future."""
        from argon2 import PasswordHasher

        users, sign_ins = tables.users, tables.sign_ins
        hashed = PasswordHasher().hash(password)

        def job(transaction: Transaction) -> None:
            connection = transaction.connection
            connection.execute(delete(users).where(users.c.name == user))
            values = {"name": user, "password_hash": hashed, "changed_at": time.time()}
            connection.execute(insert(users).values(**values))
            connection.execute(delete(sign_ins).where(sign_ins.c.user == user))
            transaction.force()

        return self._database.write(job)

    def check(self, user: str, password: str) -> bool:
        """Tell whether a password is the user's.

        Raises:
            TooManyAttemptsError: Ten wrong ones came within a minute.
        """
        from argon2 import PasswordHasher
        from argon2.exceptions import Argon2Error, InvalidHashError

        with self._lock:
            self._refuse_flood()
            with self._database.read() as connection:
                query = select(tables.users.c.password_hash).where(tables.users.c.name == user)
                stored = connection.execute(query).scalar()
            try:
                if stored is not None and PasswordHasher().verify(stored, password):
                    self._failures.clear()
                    return True
            except (Argon2Error, InvalidHashError):
                pass
            self._failures.append(time.monotonic())
            return False

    def _refuse_flood(self) -> None:
        now = time.monotonic()
        while self._failures and self._failures[0] < now - _FAILURE_WINDOW_S:
            self._failures.popleft()
        if len(self._failures) >= _MAX_FAILURES:
            raise TooManyAttemptsError(
                f"At most {_MAX_FAILURES} wrong passwords are taken in {_FAILURE_WINDOW_S:.0f} s."
                " Hint: wait a minute, or sign in by the link that `paceline login` prints."
            )
