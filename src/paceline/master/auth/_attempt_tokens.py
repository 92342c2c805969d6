"""Tokens of attempts: what a runner holds opens the routes of its own attempt and no other."""

import hashlib
import hmac
import time

from sqlalchemy import select

from paceline.master.store import Database, tables

_PREFIX = "paceline_attempt_"
# A runner sends its attempt's end again if the answer was lost.
_AFTER_END_S = 24 * 3600.0
# How long an attempt counts as not ended without another look.
_LOOK_S = 30.0
_MAX_LOOKS = 10_000
_MAX_DIGITS = 19


class AttemptTokens:
    """Make and check the tokens of attempts.

    A token is computed from the attempt's id by a key that only the master has, so that starting
    an attempt stores nothing, and a master that was started again knows the tokens of before.

    Args:
        database: The master's database.
        key: A secret of the home.
    """

    def __init__(self, database: Database, key: bytes) -> None:
        self._database = database
        self._key = key
        self._looked_at: dict[int, float] = {}

    def token_of(self, attempt_id: int) -> str:
        """Return the token of an attempt."""
        seal = hmac.new(self._key, f"attempt {attempt_id}".encode(), hashlib.sha256).hexdigest()
        return f"{_PREFIX}{attempt_id}_{seal}"

    def attempt_of(self, token: str) -> int | None:
        """Return whose token this is; None if it is none of an attempt's."""
        number, _, _ = token.removeprefix(_PREFIX).partition("_")
        is_number = number.isascii() and number.isdecimal() and len(number) < _MAX_DIGITS
        if not token.startswith(_PREFIX) or not is_number:
            return None
        expected = self.token_of(int(number)).encode()
        is_right = hmac.compare_digest(token.encode(errors="surrogateescape"), expected)
        return int(number) if is_right else None

    def is_known_to_run(self, attempt_id: int) -> bool:
        """Tell whether `is_usable` would say yes, as it did a moment ago."""
        return time.monotonic() - self._looked_at.get(attempt_id, -_LOOK_S) < _LOOK_S

    def is_usable(self, attempt_id: int) -> bool:
        """Tell whether the attempt is there, and did not end more than a day ago."""
        attempts = tables.attempts.c
        with self._database.read() as connection:
            query = select(attempts.ended_at).where(attempts.id == attempt_id)
            row = connection.execute(query).first()
        if row is None or (row.ended_at is not None and row.ended_at < time.time() - _AFTER_END_S):
            return False
        if len(self._looked_at) >= _MAX_LOOKS:
            self._looked_at.clear()
        self._looked_at[attempt_id] = time.monotonic()
        return True

    def has_code(self, attempt_id: int, digest: str) -> bool:
        """Tell whether an attempt runs the code of a digest."""
        attempts, experiments = tables.attempts, tables.experiments
        query = (
            select(experiments.c.context_digest)
            .join(attempts, attempts.c.experiment_id == experiments.c.id)
            .where(attempts.c.id == attempt_id)
        )
        with self._database.read() as connection:
            return connection.execute(query).scalar() == digest
