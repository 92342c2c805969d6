"""Models of the REST API for tokens."""

from enum import Enum

from pydantic import Field

from paceline.messages.base import Message, Request

NAME_PATTERN = "^[A-Za-z0-9_.-]{1,64}$"


class TokenScope(str, Enum):
    """What a token allows: each scope includes those before it, but for the last two.

    `runner` allows to register a node and to ask for its attempts, and nothing else. `report`
    allows to send runs without a master, and nothing else.
    """

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"
    RUNNER = "runner"
    REPORT = "report"


class NewToken(Request):
    """A token to be made; it never expires if `expires_in_s` (seconds) is None."""

    name: str = Field(pattern=NAME_PATTERN)
    scope: TokenScope = TokenScope.READ
    expires_in_s: float | None = Field(default=90 * 24 * 3600.0, gt=0, le=100 * 365 * 24 * 3600.0)


class Token(Message):
    """A token without its secret; times are in seconds since the epoch."""

    id: int
    name: str
    scope: TokenScope
    created_at: float
    expires_at: float | None
    revoked_at: float | None = None


class CreatedToken(Token):
    """A new token with its secret, which cannot be read again."""

    secret: str


class HomeToken(Message):
    """The new token of the master's home, which also lies in the file `token` there."""

    secret: str
