"""Tokens, attempt tokens, passwords, sign-in links, sign-ins, throttle."""

import hashlib
import hmac
import ipaddress
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from paceline._base.files import TOKEN_PREFIX, make_secret
from paceline._cluster.master.store import tables, user_tables
from paceline._cluster.master.store.database import Database, Transaction
from paceline._cluster.master.store.reach import FIRST_USER
from paceline._cluster.master.store.row_ids_and_counts import keep_ids, new_id
from paceline._cluster.messages.master_models import TokenScope

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
    an attempt stores nothing, and a restarted master knows the earlier tokens.

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
        """Return the attempt of a token; None if the token is not a valid attempt token."""
        number, _, _ = token.removeprefix(_PREFIX).partition("_")
        is_number = number.isascii() and number.isdecimal() and len(number) < _MAX_DIGITS
        if not token.startswith(_PREFIX) or not is_number:
            return None
        expected = self.token_of(int(number)).encode()
        # Bytes, not text: `compare_digest` raises TypeError for text beyond ASCII.
        is_right = hmac.compare_digest(token.encode(errors="surrogateescape"), expected)
        return int(number) if is_right else None

    def is_known_to_run(self, attempt_id: int) -> bool:
        """Return whether the attempt was found usable a moment ago, without a database read."""
        return time.monotonic() - self._looked_at.get(attempt_id, -_LOOK_S) < _LOOK_S

    def is_usable(self, attempt_id: int) -> bool:
        """Return whether the attempt is there, and did not end more than a day ago."""
        attempts = tables.attempts.c
        with self._database.read() as connection:
            query = sa.select(attempts.ended_at).where(attempts.id == attempt_id)
            row = connection.execute(query).first()
        if row is None or (row.ended_at is not None and row.ended_at < time.time() - _AFTER_END_S):
            return False
        # Attempts pile up over the years, so the memory of them begins anew.
        if len(self._looked_at) >= _MAX_LOOKS:
            self._looked_at.clear()
        self._looked_at[attempt_id] = time.monotonic()
        return True

    def has_code(self, attempt_id: int, digest: str) -> bool:
        """Return whether an attempt runs the code of a digest."""
        attempts, experiments = tables.attempts, tables.experiments
        query = (
            sa.select(experiments.c.context_digest)
            .join(attempts, attempts.c.experiment_id == experiments.c.id)
            .where(attempts.c.id == attempt_id)
        )
        with self._database.read() as connection:
            return connection.execute(query).scalar() == digest


_URL_S = 6 * 3600.0


class SignedUrls:
    """Sign and check URLs for one request each, for clients that send no token with them.

    Args:
        key: A secret of the home.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, method: str, path: str) -> str:
        """Return the query to open a path for a method, for a few hours."""
        expires = int(time.time() + _URL_S)
        return f"expires={expires}&seal={self._seal(method, path, str(expires))}"

    def opens(self, method: str, path: str, query: bytes) -> bool:
        """Return whether a query was made for this method and path, and has not expired."""
        fields = dict(part.split(b"=", 1) for part in query.split(b"&") if b"=" in part)
        expires = fields.get(b"expires", b"").decode("latin-1")
        expected = self._seal(method, path, expires).encode()
        is_right = hmac.compare_digest(fields.get(b"seal", b""), expected)
        return is_right and time.time() < int(expires)

    def _seal(self, method: str, path: str, expires: str) -> str:
        text = "\n".join(["signed URL", method, path, expires])
        content = text.encode(errors="surrogateescape")
        return hmac.new(self._key, content, hashlib.sha256).hexdigest()


_LINK_S = 24 * 3600.0
_MAX_LINKS = 1000


class SignInLinks:
    """Single-use tokens to sign in; kept in memory, so they end with the master's process."""

    def __init__(self, length_s: float = _LINK_S) -> None:
        self._length_s = length_s
        self._expiry: dict[str, tuple[float, str]] = {}
        self._lock = threading.Lock()

    def make(self, user: str) -> tuple[str, float]:
        """Return a new token to sign a user in, and its time of expiry."""
        token, expires_at = secrets.token_urlsafe(32), time.time() + self._length_s
        with self._lock:
            # The oldest comes first; a loop that asks for links must not fill the memory.
            while len(self._expiry) >= _MAX_LINKS:
                del self._expiry[next(iter(self._expiry))]
            self._expiry[token] = expires_at, user
        return token, expires_at

    def redeem(self, token: str) -> str | None:
        """Consume a token and return its user; None for an unknown, used or expired token."""
        with self._lock:
            # Under the lock, so that a link works once.
            expires_at, user = self._expiry.pop(token, (0.0, ""))
        return user if time.time() < expires_at else None

    def forget(self, user: str) -> None:
        """Void the tokens made for a user."""
        with self._lock:
            self._expiry = {t: found for t, found in self._expiry.items() if found[1] != user}


_MAX_SENDERS = 10_000
_PROC = Path("/proc/net")


class Throttle:
    """Count the failures of each sender within a window; thread-safe, of bounded size.

    Args:
        max_failures: How many each sender has in a window.
        window_s: Length of the window in seconds.
    """

    def __init__(self, max_failures: int, window_s: float = 60.0) -> None:
        self.max_failures = max_failures
        self.window_s = window_s
        self._lock = threading.Lock()
        # The sender that failed last comes last.
        self._failures: OrderedDict[Hashable, deque[float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._failures)

    def allows(self, sender: Hashable) -> bool:
        """Return whether a sender may try."""
        oldest = time.monotonic() - self.window_s
        with self._lock:
            failures = self._failures.get(sender, ())
            return sum(moment > oldest for moment in failures) < self.max_failures

    def fail(self, sender: Hashable) -> None:
        """Count a failure."""
        with self._lock:
            failures = self._failures.setdefault(sender, deque(maxlen=self.max_failures))
            failures.append(time.monotonic())
            self._failures.move_to_end(sender)
            # Senders can be invented without end.
            while len(self._failures) > _MAX_SENDERS:
                self._failures.popitem(last=False)

    def forgive(self, sender: Hashable) -> None:
        """Forget the failures of a sender who got in."""
        with self._lock:
            self._failures.pop(sender, None)


def sender_at(peer: tuple[str, int] | None, own: tuple[str, int | None] | None) -> str:
    """Return a name for the sender at a connection's other end, to keep strangers apart.

    The name is the address, or the /64 network of an IPv6 address, as one sender owns the whole
    network. All users of this machine have the same address; Linux knows the user of a connection.

    Args:
        peer: Address and port of the other end.
        own: Address and port of this end.
    """
    if peer is None:
        return ""
    address = ipaddress.ip_address(peer[0].partition("%")[0])
    if address.is_loopback:
        user = None if own is None else _user_of(peer, own, address.version)
        return str(address) if user is None else f"{address} user {user}"
    if address.version == 4:
        return str(address)
    # A socket for both kinds shows IPv4 senders as IPv6 addresses.
    mapped = address.ipv4_mapped
    return str(mapped or ipaddress.ip_network((address, 64), strict=False))


def _user_of(peer: tuple[str, int], own: tuple[str, int | None], version: int) -> str | None:
    """Return the Unix user who has the other end of a connection within this machine."""
    ends = [f"{port or 0:04X}" for _, port in (peer, own)]
    try:
        lines = (_PROC / ("tcp" if version == 4 else "tcp6")).read_text().splitlines()
    except OSError:
        return None
    for line in lines[1:]:
        # Number, this end, other end, state, queues, timer, retransmits, user.
        fields = line.split()
        if [field.rpartition(":")[2] for field in fields[1:3]] == ends:
            return fields[7]
    return None


_MAX_FAILURES = 10
# On all names; there is no reason to try many.
_MAX_FAILURES_OF_SENDER = 30
# Request threads waiting for password checks at most: a stranger must not occupy them all.
_MAX_WAITING = 3


class TooManyAttemptsError(RuntimeError):
    """Raised when too many wrong passwords came in a short time."""


class Passwords:
    """Set and check passwords; thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._by_name = Throttle(_MAX_FAILURES)
        self._by_sender = Throttle(_MAX_FAILURES_OF_SENDER)
        # Lock for a single check at a time: each takes 64 MiB and all cores, so a flood must queue.
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(_MAX_WAITING)

    def are_set(self) -> bool:
        """Return whether any user has a password."""
        with self._database.read() as connection:
            query = sa.select(user_tables.users.c.name).where(
                user_tables.users.c.password_hash != ""
            )
            return connection.execute(query.limit(1)).first() is not None

    def set(self, user: str, password: str) -> "Future[None]":
        """Give a user a password and end the user's sign-ins; done with the future."""
        from argon2 import PasswordHasher

        users, sign_ins = user_tables.users, user_tables.sign_ins
        hashed = PasswordHasher().hash(password)

        def job(transaction: Transaction) -> None:
            connection = transaction.connection
            values = {"password_hash": hashed, "changed_at": time.time()}
            change = sa.update(users).where(users.c.name == user).values(**values)
            if not connection.execute(change).rowcount:
                row = {"name": user, "is_admin": user == FIRST_USER}
                connection.execute(sa.insert(users).values(**row, **values))
            # Who has a password is no longer whoever has the name at a provider.
            awaited = (users.c.name == user, users.c.oidc_subject == "*")
            connection.execute(sa.update(users).where(*awaited).values(oidc_subject=None))
            connection.execute(sa.delete(sign_ins).where(sign_ins.c.user == user))
            # A power cut must not bring the old password back.
            transaction.force()

        return self._database.write(job)

    def check(self, user: str, password: str, sender: str = "") -> bool:
        """Return whether a password is the user's.

        Failures are counted for each sender and name: nobody's guesses keep others out.

        Args:
            user: The user's name.
            password: The password that was sent.
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
        # argon2 takes memory and a core: checks run singly, and few may wait.
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
            users = user_tables.users.c
            query = sa.select(users.password_hash).where(users.name == user, users.is_active)
            # Empty without a password.
            stored = connection.execute(query).scalar() or None
        try:
            return stored is not None and PasswordHasher().verify(stored, password)
        except (Argon2Error, InvalidHashError):
            return False


SIGN_IN_S = 30 * 24 * 3600


class SignIns:
    """Open, find and close sign-ins; they outlive the master's process."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def open(self, user: str, length_s: float = SIGN_IN_S) -> str:
        """Sign a user in and return the secret for the cookie; waits for the commit."""
        secret, now = secrets.token_urlsafe(32), time.time()
        sign_ins, users = user_tables.sign_ins, user_tables.users.c

        def job(transaction: Transaction) -> None:
            connection = transaction.connection
            connection.execute(sa.delete(sign_ins).where(sign_ins.c.expires_at <= now))
            values = {"digest": _digest(secret), "user": user, "created_at": now}
            # A user that was removed meanwhile may come back one day, without what was opened.
            query = sa.select(users.name).where(users.name == user, users.is_active)
            if connection.execute(query).first() is not None:
                connection.execute(sa.insert(sign_ins).values(**values, expires_at=now + length_s))

        self._database.write(job).result()
        return secret

    def user_of(self, secret: str) -> str | None:
        """Return the user of a sign-in's secret, None for an unknown or expired secret."""
        sign_ins = user_tables.sign_ins
        query = sa.select(sign_ins.c.user).where(
            sign_ins.c.digest == _digest(secret), sign_ins.c.expires_at > time.time()
        )
        with self._database.read() as connection:
            return connection.execute(query).scalar()

    def close(self, secret: str) -> None:
        """End a sign-in; waits for the commit."""
        sign_ins = user_tables.sign_ins

        def job(transaction: Transaction) -> None:
            transaction.connection.execute(
                sa.delete(sign_ins).where(sign_ins.c.digest == _digest(secret))
            )
            # A power cut must not open it again.
            transaction.force()

        self._database.write(job).result()


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()


# Tokens that are of no use any more are listed for this long.
_KEPT_S = 90 * 24 * 3600.0


class TokenNameTakenError(RuntimeError):
    """Raised when a usable token already has the name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredToken:
    """Stored token, without its secret.

    Attributes:
        node: The only node that it registers, of a token of the scope `runner`; None for any.
        pool: The only pool that its nodes may be in; None for any.
        user: The user as whom it acts.
    """

    id: int
    name: str
    scope: TokenScope
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    node: str | None = None
    pool: str | None = None
    user: str = FIRST_USER

    @property
    def is_revoked(self) -> bool:
        """Whether the token was revoked."""
        return self.revoked_at is not None

    @property
    def is_expired(self) -> bool:
        """Whether its time is over."""
        return self.expires_at is not None and self.expires_at <= time.time()

    @property
    def is_usable(self) -> bool:
        """Whether the token is neither revoked nor expired."""
        return not self.is_revoked and not self.is_expired


class Tokens:
    """Make, find, list and revoke tokens; thread-safe.

    The digests of all tokens are in memory, so that a wrong one costs no look into the database.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self.load()

    def load(self) -> None:
        """Read all tokens again, after a change beside this object."""
        with self._lock, self._database.read() as connection:
            rows = connection.execute(sa.select(user_tables.tokens))
            self._keep({row.digest: _stored(row) for row in rows})

    def create(
        self,
        name: str,
        scope: TokenScope,
        expires_in_s: float | None,
        *,
        node: str | None = None,
        pool: str | None = None,
        user: str = FIRST_USER,
    ) -> "Future[tuple[StoredToken, str]]":
        """Create a token; the future returns the token and its secret after the commit.

        The future raises `TokenNameTakenError` if a token of that name is neither revoked nor
        expired.
        """
        secret = make_secret(TOKEN_PREFIX)
        now = time.time()
        expires_at = None if expires_in_s is None else now + expires_in_s
        columns = user_tables.tokens.c

        def job(transaction: Transaction) -> tuple[StoredToken, str]:
            connection = transaction.connection
            is_over = sa.or_(
                columns.revoked_at <= now - _KEPT_S, columns.expires_at <= now - _KEPT_S
            )
            taken = sa.select(columns.id).where(
                columns.name == name,
                columns.revoked_at.is_(None),
                sa.or_(columns.expires_at.is_(None), columns.expires_at > now),
            )
            if connection.execute(taken).first() is not None:
                raise TokenNameTakenError(
                    f"`name` must be that of no other token, but {name!r} is. Hint: choose another"
                    f" name, or revoke that token (`paceline token revoke {name}`)."
                )
            token = StoredToken(
                id=new_id(connection, user_tables.tokens), name=name, scope=scope, created_at=now,
                expires_at=expires_at, revoked_at=None, node=node, pool=pool, user=user,
            )  # fmt: skip
            values = {field: getattr(token, field) for field in _FIELDS} | {"scope": scope.value}
            connection.execute(
                sa.insert(user_tables.tokens).values(digest=_digest(secret), **values)
            )
            keep_ids(connection, user_tables.tokens)
            connection.execute(sa.delete(user_tables.tokens).where(is_over))
            transaction.after_commit(lambda: self._remember(_digest(secret), token))
            return token, secret

        return self._database.write(job)

    def find(self, secret: str) -> StoredToken | None:
        """Return the token of a secret, possibly revoked or expired; None if unknown."""
        return self._known.get(_digest(secret))

    def get(self, token_id: int) -> StoredToken | None:
        """Return the token of an id, possibly revoked or expired; None if unknown."""
        return self._by_id.get(token_id)

    def list(self) -> list[StoredToken]:
        """Return all tokens, the newest first."""
        with self._lock:
            return sorted(self._known.values(), key=lambda token: -token.id)

    def revoke(self, token_id: int) -> "Future[bool]":
        """Revoke a token permanently; the future returns whether the token exists."""
        columns = user_tables.tokens.c

        def job(transaction: Transaction) -> bool:
            connection = transaction.connection
            digest = connection.execute(
                sa.select(columns.digest).where(columns.id == token_id)
            ).scalar()
            if digest is None:
                return False
            now = time.time()
            connection.execute(
                sa.update(user_tables.tokens)
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


_FIELDS = ("id", "name", "scope", "created_at", "expires_at", "revoked_at", "node", "pool",
           "user")  # fmt: skip


def _stored(row: sa.Row[Any]) -> StoredToken:
    values = {field: getattr(row, field) for field in _FIELDS}
    return StoredToken(**values | {"scope": TokenScope(row.scope)})


__all__ = [
    "SIGN_IN_S",
    "AttemptTokens",
    "Passwords",
    "SignInLinks",
    "SignIns",
    "StoredToken",
    "Throttle",
    "TokenNameTakenError",
    "Tokens",
    "TooManyAttemptsError",
    "sender_at",
]
