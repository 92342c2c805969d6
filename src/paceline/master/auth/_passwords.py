"""Passwords of users, kept as Argon2 hashes."""

import threading
import time
from concurrent.futures import Future

from sqlalchemy import delete, func, insert, select

from paceline.master.auth._sign_in_throttle import Throttle
from paceline.master.store import Database, Transaction, tables

_MAX_FAILURES = 10
# On all names; there is no reason to try many.
_MAX_FAILURES_OF_SENDER = 30
# Of the few threads that answer requests; a stranger must not get them all.
_MAX_WAITING = 3


class TooManyAttemptsError(RuntimeError):
    """Raised when too many wrong passwords came in a short time."""


class Passwords:
    """Set and check passwords; thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._by_name = Throttle(_MAX_FAILURES)
        self._by_sender = Throttle(_MAX_FAILURES_OF_SENDER)
        # One check at a time: each takes 64 MiB and all cores, so a flood must queue.
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(_MAX_WAITING)

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

    def check(self, user: str, password: str, sender: str = "") -> bool:
        """Tell whether a password is the user's.

        Failures are counted for each sender and name: nobody's guesses keep others out.

        Args:
            user: The user's name.
            password: What was sent.
            sender: Who sent it, as `sender_at` tells.

        Raises:
            TooManyAttemptsError: Ten wrong ones came within a minute, thirty on several names, or
                many checks wait.
        """
        if not self._by_sender.allows(sender) or not self._by_name.allows((user, sender)):
            raise TooManyAttemptsError(
                f"At most {_MAX_FAILURES} wrong passwords are taken in"
                f" {self._by_name.window_s:.0f} s. Hint: wait a minute, or sign in by the link that"
                " `paceline login` prints."
            )
        if not self._places.acquire(blocking=False):
            raise TooManyAttemptsError("Many passwords wait to be checked. Hint: try again.")
        try:
            with self._lock:
                is_right = self._verify(user, password)
        finally:
            self._places.release()
        if is_right:
            self._by_name.forgive((user, sender))
        else:
            self._by_name.fail((user, sender))
            self._by_sender.fail(sender)
        return is_right

    def _verify(self, user: str, password: str) -> bool:
        from argon2 import PasswordHasher
        from argon2.exceptions import Argon2Error, InvalidHashError

        with self._database.read() as connection:
            query = select(tables.users.c.password_hash).where(tables.users.c.name == user)
            stored = connection.execute(query).scalar()
        try:
            return stored is not None and PasswordHasher().verify(stored, password)
        except (Argon2Error, InvalidHashError):
            return False
