"""Links that sign a browser in, once."""

import secrets
import threading
import time

_LINK_S = 24 * 3600.0
_MAX_LINKS = 1000


class SignInLinks:
    """Tokens that open one sign-in each; they end with the master's process."""

    def __init__(self) -> None:
        self._expiry: dict[str, float] = {}
        self._lock = threading.Lock()

    def make(self) -> tuple[str, float]:
        """Return a new token and the time at which it expires."""
        token, expires_at = secrets.token_urlsafe(32), time.time() + _LINK_S
        with self._lock:
            # The oldest comes first; a loop that asks for links must not fill the memory.
            while len(self._expiry) >= _MAX_LINKS:
                del self._expiry[next(iter(self._expiry))]
            self._expiry[token] = expires_at
        return token, expires_at

    def redeem(self, token: str) -> bool:
        """Use a token up; False if it is unknown, used or expired."""
        with self._lock:
            expires_at = self._expiry.pop(token, None)
        return expires_at is not None and time.time() < expires_at
